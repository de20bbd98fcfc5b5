/* The gated delta rule on the boundary state: one token behind a ring, a chunk of 64 from a boundary, and the fold of a
 * full ring. The formulas are those of ops/gdn; work goes by key head, whose value heads share keys and queries.
 *
 * A chunk solves its unit lower triangular system by blocks of 16 tokens instead of inverting it: what earlier blocks
 * contribute is one product, what the block's own tokens contribute goes row by row.
 */
#include "gdn.h"

enum { SOLVED_TOGETHER = 16 };

static void *state_at(const struct gdn_sizes *s, const struct gdn_pool *pool, long slot, long j) {
    long size = pool->state_kind == FLOAT32 ? 4 : 2;
    return (char *)pool->states + (slot * pool->state_stride + j * group_of(s) * s->key_dim * s->value_dim) * size;
}

void load_states(const struct gdn_sizes *s, const struct gdn_pool *pool, long slot, long j, float *states) {
    widen(state_at(s, pool, slot, j), pool->state_kind, group_of(s) * s->key_dim * s->value_dim, states);
}

void store_states(const struct gdn_sizes *s, const struct gdn_pool *pool, long slot, long j, const float *states) {
    narrow(states, group_of(s) * s->key_dim * s->value_dim, pool->state_kind, state_at(s, pool, slot, j));
}

static void exp_in_place(float *x, long n) {
    for (long i = 0; i < n; i += LANES) store(x + i, exp_of(load(x + i)));
}

/* ---- one token behind a ring --------------------------------------------------------------------------------- */

long extend_scratch(const struct gdn_sizes *s) {
    return states_size(s) + round_up(18 * s->key_dim + 2 * s->value_dim, LANES) + GRID * LANES + 3 * GRID;
}

/* decays[i]: what the tokens after entry i leave of it. Returns what all of them leave of the state. */
static float decays_after(const float *ring_g, long stride, long num_ring, float newest, float *decays) {
    float later = newest;
    for (long i = num_ring; i-- > 0;) {
        decays[i] = later;
        later += ring_g[i * stride];
    }
    memset(decays + num_ring, 0, (size_t)(round_up(num_ring, LANES) - num_ring) * sizeof(float));
    exp_in_place(decays, num_ring);
    return expf(later);
}

void extend_token(const struct gdn_sizes *s, const struct gdn_pool *pool, long ring_row, long slot, long num_ring,
                  long j, struct head_tokens x, float *scratch) {
    long K = s->key_dim, V = s->value_dim, group = group_of(s), heads = s->value_heads;
    float *states = scratch, *columns = scratch + states_size(s), *scaled = columns + K * LANES, *past = scaled + 2 * K;
    float *scores = columns + round_up(18 * K + 2 * V, LANES), *decays = scores + GRID * LANES, *weights = decays + GRID;
    float *ring_k = pool->ring_k + ring_row * pool->k_stride + j * K, gain = 0;
    for (long n = 0; n < num_ring; n++) {
        fetch(ring_k + n * s->key_heads * K, K * 4);
        fetch(pool->ring_u + ring_row * pool->u_stride + (n * heads + j * group) * V, group * V * 4);
    }
    memset(columns, 0, (size_t)(K * LANES) * sizeof(float));
    for (long d = 0; d < K; d++) {
        columns[d * LANES] = x.k[d], columns[d * LANES + 1] = x.q[d];
        gain += x.k[d] * x.q[d];
    }
    product(num_ring, LANES, K, ring_k, s->key_heads * K, 1, columns, LANES, scores, LANES, 0);
    const float *stored = state_at(s, pool, slot, j);
    if (pool->state_kind != FLOAT32) load_states(s, pool, slot, j, states), stored = states;
    for (long i = 0; i < group; i++, stored += K * V) {
        float *ring_u = pool->ring_u + ring_row * pool->u_stride + (j * group + i) * V;
        float *ring_g = pool->ring_g + ring_row * pool->g_stride + j * group + i;
        float decay = decays_after(ring_g, heads, num_ring, x.g[i], decays);
        for (long d = 0; d < K; d++) scaled[d] = decay * x.k[d], scaled[K + d] = decay * x.q[d];
        product(2, V, K, scaled, K, 1, stored, V, past, V, 0);
        for (long n = 0; n < num_ring; n++) {
            weights[n] = decays[n] * scores[n * LANES];
            weights[GRID + n] = decays[n] * scores[n * LANES + 1];
        }
        product(2, V, num_ring, weights, GRID, 1, ring_u, heads * V, past, V, 1);
        float *u = ring_u + num_ring * heads * V;
        for (long d = 0; d < V; d++) {
            u[d] = x.beta[i] * (x.v[i * V + d] - past[d]);
            x.o[i * V + d] = past[V + d] + gain * u[d];
        }
        ring_g[num_ring * heads] = x.g[i];
    }
    memcpy(ring_k + num_ring * s->key_heads * K, x.k, (size_t)K * sizeof(float));
}

/* ---- a chunk from a boundary --------------------------------------------------------------------------------- */

enum { SQUARE = GRID * GRID };

long chunk_scratch(const struct gdn_sizes *s) {
    return GRID * round_up(s->key_dim, LANES) + 4 * SQUARE + 4 * GRID * round_up(s->value_dim, LANES) + 5 * GRID;
}

/* scores[i][n] = x_i . k_n for n up to the end of i's block of 16 tokens. */
static void lower_scores(long num_tokens, long K, const float *x, long stride, const float *keys, float *scores) {
    for (long i = 0; i < num_tokens; i += SOLVED_TOGETHER)
        product(min_of(SOLVED_TOGETHER, num_tokens - i), i + SOLVED_TOGETHER, K, x + i * stride, stride, 1, keys, GRID,
                scores + i * GRID, GRID, 0);
}

/* What each token leaves of the ones before it, times the scores: system (negative, by beta) and seen, zero beyond i. */
static void decayed(long num_tokens, const double *sums, const float *beta, long gate_stride, const float *kk,
                    const float *qk, float *system, float *seen) {
    for (long i = 0; i < num_tokens; i++) {
        long end = i / SOLVED_TOGETHER * SOLVED_TOGETHER + SOLVED_TOGETHER;
        float decays[GRID];
        for (long n = 0; n < end; n++) decays[n] = n <= i ? (float)(sums[i] - sums[n]) : -1e30f;
        for (long n = 0; n < end; n += LANES) {
            vec decay = exp_of(load(decays + n));
            store(system + i * GRID + n, load(kk + i * GRID + n) * decay * -beta[i * gate_stride]);
            store(seen + i * GRID + n, load(qk + i * GRID + n) * decay);
        }
    }
}

/* u holds the right sides and becomes the solution. */
static void solve(long num_tokens, long V, const float *system, float *u) {
    for (long first = 0; first < num_tokens; first += SOLVED_TOGETHER) {
        long stop = min_of(first + SOLVED_TOGETHER, num_tokens);
        if (first) product(stop - first, V, first, system + first * GRID, GRID, 1, u, V, u + first * V, V, 1);
        for (long i = first + 1; i < stop; i++)
            product(1, V, i - first, system + i * GRID + first, GRID, 1, u + first * V, V, u + i * V, V, 1);
    }
}

static void keep_tail(const struct gdn_sizes *s, const struct gdn_pool *pool, long ring_row, long j, long i,
                      long num_tokens, struct head_tokens x, const float *u) {
    long K = s->key_dim, V = s->value_dim, H = s->value_heads, head = j * group_of(s) + i;
    for (long n = 0; n < num_tokens; n++) {
        float *ring_k = pool->ring_k + ring_row * pool->k_stride + (n * s->key_heads + j) * K;
        float *ring_u = pool->ring_u + ring_row * pool->u_stride + (n * H + head) * V;
        memcpy(ring_k, x.k + n * x.key_stride, (size_t)K * sizeof(float));
        memcpy(ring_u, u + n * V, (size_t)V * sizeof(float));
        pool->ring_g[ring_row * pool->g_stride + n * H + head] = x.g[n * x.gate_stride + i];
    }
}

/* state [K, V] becomes that of the next boundary; u is used up. */
static void advance(long K, long V, const double *sums, const float *k, long key_stride, float *u, float *state) {
    for (long n = 0; n < GRID; n++) {
        float left = expf((float)(sums[GRID - 1] - sums[n]));
        for (long d = 0; d < V; d++) u[n * V + d] *= left;
    }
    float left = expf((float)sums[GRID - 1]);
    for (long d = 0; d < K * V; d++) state[d] *= left;
    product(K, V, GRID, k, 1, key_stride, u, V, state, V, 1);
}

void prefill_chunk(const struct gdn_sizes *s, const struct gdn_pool *pool, long ring_row, long j, long num_tokens,
                   struct head_tokens x, float *states, float *scratch) {
    long K = s->key_dim, V = s->value_dim, group = group_of(s), wide = GRID * round_up(V, LANES);
    float *keys = scratch, *kk = keys + GRID * round_up(K, LANES), *qk = kk + SQUARE, *system = qk + SQUARE;
    float *seen = system + SQUARE, *seen_k = seen + SQUARE, *seen_q = seen_k + wide, *u = seen_q + wide;
    double sums[GRID];
    memset(keys, 0, (size_t)(GRID * K) * sizeof(float));
    for (long n = 0; n < num_tokens; n++)
        for (long d = 0; d < K; d++) keys[d * GRID + n] = x.k[n * x.key_stride + d];
    lower_scores(num_tokens, K, x.k, x.key_stride, keys, kk);
    lower_scores(num_tokens, K, x.q, x.key_stride, keys, qk);
    for (long i = 0; i < group; i++) {
        float *state = states + i * K * V;
        for (long n = 0; n < num_tokens; n++) sums[n] = (n ? sums[n - 1] : 0) + x.g[n * x.gate_stride + i];
        decayed(num_tokens, sums, x.beta + i, x.gate_stride, kk, qk, system, seen);
        product(num_tokens, V, K, x.k, x.key_stride, 1, state, V, seen_k, V, 0);
        product(num_tokens, V, K, x.q, x.key_stride, 1, state, V, seen_q, V, 0);
        for (long n = 0; n < num_tokens; n++) {
            float left = expf((float)sums[n]), beta = x.beta[n * x.gate_stride + i];
            const float *v = x.v + n * x.value_stride + i * V;
            for (long d = 0; d < V; d++) u[n * V + d] = beta * (v[d] - left * seen_k[n * V + d]);
            for (long d = 0; d < V; d++) x.o[n * x.o_stride + i * V + d] = left * seen_q[n * V + d];
        }
        solve(num_tokens, V, system, u);
        for (long n = 0; n < num_tokens; n += SOLVED_TOGETHER) {
            long rows = min_of(SOLVED_TOGETHER, num_tokens - n);
            product(rows, V, n + rows, seen + n * GRID, GRID, 1, u, V, x.o + n * x.o_stride + i * V, x.o_stride, 1);
        }
        if (num_tokens < GRID) keep_tail(s, pool, ring_row, j, i, num_tokens, x, u);
        else advance(K, V, sums, x.k, x.key_stride, u, state);
    }
    /* Rounded where it would be stored, so that a cut changes nothing. */
    if (num_tokens == GRID) round_to(pool->state_kind, group * K * V, states);
}

/* ---- the op's own entries: no products, no convolution ------------------------------------------------------- */

struct gdn_work {
    const struct gdn_sizes *s;
    const struct gdn_pool *pool;
    const struct extend_rows *extend;
    const struct prefill_rows *prefill;
    struct head_tokens x;
    float *scratch;
    long scratch_size;
};

static struct head_tokens tokens_of_head(const struct gdn_work *work, long j, long first) {
    struct head_tokens x = work->x;
    long K = work->s->key_dim, width = group_of(work->s) * work->s->value_dim;
    x.q += j * K, x.k += j * K, x.v += j * width, x.o += j * width;
    x.g += j * group_of(work->s), x.beta += j * group_of(work->s);
    return from_token(x, first);
}

static void extend_item(const void *argument, long item, float *scratch) {
    const struct gdn_work *work = argument;
    const struct extend_rows *rows = work->extend;
    long row = item / work->s->key_heads, j = item % work->s->key_heads;
    for (long t = 0; t < rows->width; t++) {
        struct head_tokens x = tokens_of_head(work, j, row * rows->width + t);
        if (t < rows->num_new[row])
            extend_token(work->s, work->pool, rows->rows[row], rows->slots[row], rows->num_ring[row] + t, j, x, scratch);
        else memset(x.o, 0, (size_t)(group_of(work->s) * work->s->value_dim) * sizeof(float));
    }
}

static void prefill_item(const void *argument, long item, float *states) {
    const struct gdn_work *work = argument;
    const struct prefill_rows *rows = work->prefill;
    long row = item / work->s->key_heads, j = item % work->s->key_heads;
    long num_tokens = rows->offsets[row + 1] - rows->offsets[row];
    load_states(work->s, work->pool, rows->slots_in[row], j, states);
    for (long t = 0; t < num_tokens; t += GRID) {
        struct head_tokens x = tokens_of_head(work, j, rows->offsets[row] + t);
        long count = min_of(GRID, num_tokens - t), cut = 0;
        prefill_chunk(work->s, work->pool, rows->rows[row], j, count, x, states, states + states_size(work->s));
        for (long slot; (slot = next_cut(rows, row, t + GRID, &cut)) >= 0;)
            store_states(work->s, work->pool, slot, j, states);
    }
}

static void gdn_body(const void *argument, struct team *team, long thread) {
    const struct gdn_work *work = argument;
    float *scratch = work->scratch + thread * work->scratch_size;
    if (work->extend) share(team, 0, work->extend->num_rows * work->s->key_heads, extend_item, work, scratch);
    if (work->prefill) share(team, 1, work->prefill->num_rows * work->s->key_heads, prefill_item, work, scratch);
}

static int run_gdn(struct gdn_work *work, long scratch_size, long num_threads) {
    work->scratch_size = round_up(scratch_size, LANES);
    work->scratch = reserve(num_threads * work->scratch_size);
    if (!work->scratch) return 1;
    run(num_threads, gdn_body, work);
    return 0;
}

static struct head_tokens flat(const struct gdn_sizes *s, const float *q, const float *k, const float *v, const float *g,
                               const float *beta, float *o) {
    long values = s->value_heads * s->value_dim;
    return (struct head_tokens){q, k, v, g, beta, s->key_heads * s->key_dim, values, s->value_heads, o, values};
}

/* q, k [T, J, K], v and o [T, H, V], g and beta [T, H]. */
int deltaserve_gdn_extend(const struct gdn_sizes *s, const struct gdn_pool *pool, const struct extend_rows *rows,
                          const float *q, const float *k, const float *v, const float *g, const float *beta, float *o,
                          long num_threads) {
    struct gdn_work work = {s, pool, rows, NULL, flat(s, q, k, v, g, beta, o), NULL, 0};
    return run_gdn(&work, extend_scratch(s), num_threads);
}

int deltaserve_gdn_prefill(const struct gdn_sizes *s, const struct gdn_pool *pool, const struct prefill_rows *rows,
                           const float *q, const float *k, const float *v, const float *g, const float *beta, float *o,
                           long num_threads) {
    struct gdn_work work = {s, pool, NULL, rows, flat(s, q, k, v, g, beta, o), NULL, 0};
    return run_gdn(&work, states_size(s) + chunk_scratch(s), num_threads);
}

/* ---- fold ---------------------------------------------------------------------------------------------------- */

/* `layers` pools lie side by side: one layer further is one layer's size further in each. */
struct fold_work {
    const struct gdn_sizes *s;
    const struct gdn_pool *pool;
    const int64_t *rows, *in, *out;
    long count, layers;
    float *scratch;
    long scratch_size;
};

static void fold_item(const void *argument, long item, float *scratch) {
    const struct fold_work *work = argument;
    const struct gdn_sizes *s = work->s;
    long K = s->key_dim, V = s->value_dim, H = s->value_heads, J = s->key_heads, j = item % J;
    long layer = item / J % work->layers, fold = item / J / work->layers, row = work->rows[fold];
    struct gdn_pool pool = *work->pool;
    pool.states = (char *)pool.states + layer * H * K * V * (pool.state_kind == FLOAT32 ? 4 : 2);
    pool.ring_k += layer * GRID * J * K, pool.ring_u += layer * GRID * H * V, pool.ring_g += layer * GRID * H;
    float *states = scratch, *u = states + states_size(s);
    load_states(s, &pool, work->in[fold], j, states);
    for (long i = 0; i < group_of(s); i++) {
        const float *ring_u = pool.ring_u + row * pool.u_stride + (j * group_of(s) + i) * V;
        const float *ring_g = pool.ring_g + row * pool.g_stride + j * group_of(s) + i;
        double sums[GRID];
        for (long n = 0; n < GRID; n++) {
            sums[n] = (n ? sums[n - 1] : 0) + ring_g[n * H];
            memcpy(u + n * V, ring_u + n * H * V, (size_t)V * sizeof(float));
        }
        advance(K, V, sums, pool.ring_k + row * pool.k_stride + j * K, J * K, u, states + i * K * V);
    }
    store_states(s, &pool, work->out[fold], j, states);
}

static void fold_body(const void *argument, struct team *team, long thread) {
    const struct fold_work *work = argument;
    float *scratch = work->scratch + thread * work->scratch_size;
    share(team, 0, work->count * work->layers * work->s->key_heads, fold_item, work, scratch);
}

/* states[out] <- the state 64 tokens after states[in], from full rings, for all layers. */
int deltaserve_gdn_fold(const struct gdn_sizes *s, const struct gdn_pool *pool, long layers, long count,
                        const int64_t *rows, const int64_t *in, const int64_t *out, long num_threads) {
    struct fold_work work = {s, pool, rows, in, out, count, layers, NULL, 0};
    work.scratch_size = states_size(s) + round_up(GRID * s->value_dim, LANES);
    work.scratch = reserve(num_threads * work.scratch_size);
    if (!work.scratch) return 1;
    run(num_threads, fold_body, &work);
    return 0;
}
