/* The pool of threads and the scratch memory: see kernels.h.
 *
 * One job runs at a time. The word `gate` says which: its number, whether workers may still enter, how many are inside.
 * A worker enters by raising the last part, so that the caller, having closed the gate, knows when nobody looks at the
 * job any more.
 */
#include "kernels.h"

#include <pthread.h>
#include <sched.h>

enum { MAX_WORKERS = 255, SPINS = 2000 };
#define INSIDE 0xffffull
#define OPEN 0x10000ull
#define NUMBER 0x20000ull

static struct {
    uint64_t gate;
    struct team team;
    body *body;
    const void *work;
    long num_threads, num_workers;
    int num_asleep;
    pthread_mutex_t mutex;
    pthread_cond_t awake;
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER, .awake = PTHREAD_COND_INITIALIZER};
static pthread_mutex_t one_job = PTHREAD_MUTEX_INITIALIZER;

static void pause_a_moment(long tries) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
    if (tries > SPINS) sched_yield();
}

static uint64_t gate_now(void) { return __atomic_load_n(&pool.gate, __ATOMIC_ACQUIRE); }

/* Until there is a job after `last`, awake for a while, then asleep. */
static void await_job(uint64_t last) {
    for (long tries = 0; tries < SPINS; tries++) {
        if (gate_now() / NUMBER != last) return;
        pause_a_moment(0);
    }
    pthread_mutex_lock(&pool.mutex);
    __atomic_add_fetch(&pool.num_asleep, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&pool.gate, __ATOMIC_SEQ_CST) / NUMBER == last) pthread_cond_wait(&pool.awake, &pool.mutex);
    __atomic_sub_fetch(&pool.num_asleep, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&pool.mutex);
}

/* The gate as it was passed, or found closed. */
static uint64_t enter(void) {
    uint64_t gate = gate_now();
    while (gate & OPEN)
        if (__atomic_compare_exchange_n(&pool.gate, &gate, gate + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) break;
    return gate;
}

static void *worker(void *argument) {
    long thread = (long)(intptr_t)argument;
    for (uint64_t last = 0;;) {
        await_job(last);
        uint64_t gate = enter();
        last = gate / NUMBER;
        if (!(gate & OPEN)) continue;
        if (thread < pool.num_threads) pool.body(pool.work, &pool.team, thread);
        __atomic_sub_fetch(&pool.gate, 1, __ATOMIC_ACQ_REL);
    }
    return NULL;
}

/* After a fork the child has no workers. */
static void forget_workers(void) {
    pool.gate = 0, pool.num_workers = 0, pool.num_asleep = 0;
    pthread_mutex_init(&pool.mutex, NULL);
    pthread_cond_init(&pool.awake, NULL);
    pthread_mutex_init(&one_job, NULL);
}

static void hire(long num_workers) {
    static int has_handler;
    if (!has_handler) has_handler = !pthread_atfork(NULL, NULL, forget_workers);
    while (pool.num_workers < min_of(num_workers, MAX_WORKERS)) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, (void *)(intptr_t)(pool.num_workers + 1))) return;
        pthread_detach(thread);
        pool.num_workers++;
    }
}

static void open_gate(void) {
    __atomic_store_n(&pool.gate, (gate_now() / NUMBER + 1) * NUMBER + OPEN, __ATOMIC_SEQ_CST);
    if (!__atomic_load_n(&pool.num_asleep, __ATOMIC_SEQ_CST)) return;
    pthread_mutex_lock(&pool.mutex);
    pthread_cond_broadcast(&pool.awake);
    pthread_mutex_unlock(&pool.mutex);
}

void run(long num_threads, body *body, const void *work) {
    if (num_threads <= 1) {
        struct team alone = {{0}, {0}};
        body(work, &alone, 0);
        return;
    }
    pthread_mutex_lock(&one_job);
    hire(num_threads - 1);
    memset(&pool.team, 0, sizeof(pool.team));
    pool.body = body, pool.work = work, pool.num_threads = num_threads;
    open_gate();
    body(work, &pool.team, 0);
    __atomic_and_fetch(&pool.gate, ~OPEN, __ATOMIC_ACQ_REL);
    for (long tries = 0; gate_now() & INSIDE; tries++) pause_a_moment(tries);
    pthread_mutex_unlock(&one_job);
}

void share(struct team *team, int phase, long count, item *item, const void *work, float *scratch) {
    long mine = 0;
    for (long i; (i = __atomic_fetch_add(&team->next[phase], 1, __ATOMIC_RELAXED)) < count; mine++)
        item(work, i, scratch);
    if (mine) __atomic_add_fetch(&team->done[phase], mine, __ATOMIC_ACQ_REL);
    for (long tries = 0; __atomic_load_n(&team->done[phase], __ATOMIC_ACQUIRE) < count; tries++) pause_a_moment(tries);
}

static __thread struct {
    float *at;
    long size;
} kept;

float *reserve(long num_floats) {
    if (num_floats > kept.size) {
        free(kept.at);
        kept.at = aligned_alloc(GRID, (size_t)round_up(num_floats, LANES) * sizeof(float));
        kept.size = kept.at ? num_floats : 0;
    }
    return kept.at;
}
