/* The second half of a layer: a dense SwiGLU, or experts with a shared one behind a gate.
 *
 * Tokens are sorted by expert, so that an expert's weights are read once for all its tokens and those of the others not
 * at all. The shared expert is one more that every token takes, with weight sigmoid(gate); a dense FFN is a shared expert
 * without gate or others. What the experts of a token answer is added in the order of its routing, the shared one last.
 */
#include "kernels.h"

struct ffn {
    struct matrix router, shared_gate;   /* outs 0: there is none */
    struct matrix gate_up, down;         /* one expert's shapes; `data` is the first's */
    struct matrix shared_up, shared_down;
    int64_t num_experts, top_k, renormalize;
};

/* gate_up has 16 gate rows, then their 16 up rows, and so on; F rounded up to 16. */

struct ffn_work {
    const struct ffn *f;
    long T, D, width, shared_width; /* widths of the hidden part, rounded up to 16 */
    const float *x;
    float *y;
    float *logits, *shared_logits, *weights; /* [T, E], [T], [T, k] */
    int64_t *ids, *places;                   /* [T, k]: expert, and place among the sorted pairs */
    int64_t *starts;                         /* [E + 1] where an expert's pairs begin */
    int64_t *touched, *num_touched;          /* experts with tokens */
    float *sorted, *hidden, *shared_hidden, *answers; /* [T k, D], [T k, width], [T, shared], [T (k + 1), D] */
    float *scratch;
    long scratch_size;
    struct entry entry;
    struct linear router, shared_gate;
};

/* ---- routing ------------------------------------------------------------------------------------------------- */

/* NaN comes before every number, so that it is chosen and shows. */
static int is_likelier(float a, float b) { return a > b || (a != a && b == b); }

/* The likeliest experts of one token, equal logits to the lower id; their weights. */
static void route(const float *logits, long num_experts, long top_k, int renormalize, float *weights, int64_t *ids) {
    float total = 0;
    for (long e = 0, found = 0; e < num_experts; e++) {
        if (found == top_k && !is_likelier(logits[e], logits[ids[top_k - 1]])) continue;
        long place = found < top_k ? found++ : top_k - 1;
        for (; place > 0 && is_likelier(logits[e], logits[ids[place - 1]]); place--) ids[place] = ids[place - 1];
        ids[place] = e;
    }
    float peak = logits[ids[0]];
    if (renormalize)
        for (long k = 0; k < top_k; k++) total += expf(logits[ids[k]] - peak);
    else
        for (long e = 0; e < num_experts; e++) total += expf(logits[e] - peak);
    for (long k = 0; k < top_k; k++) weights[k] = expf(logits[ids[k]] - peak) / total;
}

/* Pairs of token and expert in order of experts, tokens rising within one. */
static void sort_pairs(const void *argument, long item, float *scratch) {
    const struct ffn_work *work = argument;
    (void)item, (void)scratch;
    long pairs = work->T * work->f->top_k, E = work->f->num_experts, count = 0;
    int64_t *starts = work->starts;
    memset(starts, 0, (size_t)(E + 1) * sizeof(*starts));
    for (long i = 0; i < pairs; i++) starts[work->ids[i] + 1]++;
    for (long e = 0; e < E; e++) {
        if (starts[e + 1]) work->touched[count++] = e;
        starts[e + 1] += starts[e];
    }
    *work->num_touched = count;
    for (long i = 0; i < pairs; i++) work->places[i] = starts[work->ids[i]]++;
    for (long e = E; e > 0; e--) starts[e] = starts[e - 1];
    starts[0] = 0;
}

/* ---- products ------------------------------------------------------------------------------------------------ */

/* hidden[m] = silu(gate x[m]) * (up x[m]) for one block of gate_up: half as many outputs. */
static void swiglu_block(const struct matrix *w, long block, long M, const float *x, long xm, float *hidden, long hm,
                         float *scratch) {
    long width = min_of(GRID, w->outs - block * GRID);
    float *both = scratch + block_scratch(w);
    for (long first = 0; first < M; first += ROWS_PER_ITEM) {
        long rows = min_of(ROWS_PER_ITEM, M - first);
        block_product(w, block, rows, x + first * xm, xm, both, GRID, scratch);
        for (long m = 0; m < rows; m++)
            for (long n = 0; n < width; n += 2 * LANES) {
                vec gate = load(both + m * GRID + n), up = load(both + m * GRID + n + LANES);
                store(hidden + (first + m) * hm + (block * GRID + n) / 2, silu_of(gate) * up);
            }
    }
}

static struct matrix expert_of(const struct matrix *first, long expert) {
    struct matrix w = *first;
    w.data = (const char *)w.data + expert * stored_size(&w) * (w.kind == BFLOAT16 ? 2 : 4);
    return w;
}

/* One block of one expert's gate_up, counted over the touched experts; then the shared expert's. */
static void up_item(const void *argument, long item, float *scratch) {
    const struct ffn_work *work = argument;
    const struct ffn *f = work->f;
    long blocks = num_blocks(&f->gate_up), routed = *work->num_touched * blocks;
    if (item >= routed) {
        swiglu_block(&f->shared_up, item - routed, work->T, work->x, work->D, work->shared_hidden, work->shared_width,
                     scratch);
        return;
    }
    long e = work->touched[item / blocks], first = work->starts[e];
    struct matrix w = expert_of(&f->gate_up, e);
    swiglu_block(&w, item % blocks, work->starts[e + 1] - first, work->sorted + first * work->D, work->D,
                 work->hidden + first * work->width, work->width, scratch);
}

static void down_item(const void *argument, long item, float *scratch) {
    const struct ffn_work *work = argument;
    const struct ffn *f = work->f;
    long blocks = num_blocks(&f->shared_down), routed = *work->num_touched * blocks;
    float *shared = work->answers + work->T * f->top_k * work->D;
    struct matrix w = f->shared_down;
    struct linear l = {&w, work->T, work->shared_hidden, work->shared_width, shared, work->D};
    if (item < routed) {
        long e = work->touched[item / blocks], first = work->starts[e];
        w = expert_of(&f->down, e);
        l.M = work->starts[e + 1] - first, l.x = work->hidden + first * work->width, l.xm = work->width;
        l.y = work->answers + first * work->D;
    }
    for (long rows = 0; rows * ROWS_PER_ITEM < l.M; rows++)
        linear_item(&l, (item < routed ? item % blocks : item - routed) + rows * blocks, scratch);
}

static void add_answers(const struct ffn_work *work, long token) {
    long D = work->D, k = work->f->top_k;
    float *y = work->y + token * D;
    const float *shared = work->answers + (work->T * k + token) * D;
    float gate = work->f->shared_gate.outs ? 1.0f / (1.0f + expf(-work->shared_logits[token])) : 1.0f;
    for (long d = 0; d < D; d++) y[d] = 0;
    for (long i = 0; i < k; i++) {
        const float *answer = work->answers + work->places[token * k + i] * D;
        float weight = work->weights[token * k + i];
        for (long d = 0; d < D; d++) y[d] += weight * answer[d];
    }
    for (long d = 0; d < D; d++) y[d] += gate * shared[d];
}

/* ---- phases -------------------------------------------------------------------------------------------------- */

enum { TOKENS_PER_ITEM = 4 };

static void router_item(const void *argument, long item, float *scratch) {
    const struct ffn_work *work = argument;
    long routers = linear_items(&work->router);
    if (item < routers) linear_item(&work->router, item, scratch);
    else linear_item(&work->shared_gate, item - routers, scratch);
}

static void route_item(const void *argument, long item, float *scratch) {
    const struct ffn_work *work = argument;
    const struct ffn *f = work->f;
    (void)scratch;
    for (long t = item * TOKENS_PER_ITEM; t < min_of(work->T, (item + 1) * TOKENS_PER_ITEM); t++)
        route(work->logits + t * f->num_experts, f->num_experts, f->top_k, (int)f->renormalize,
              work->weights + t * f->top_k, work->ids + t * f->top_k);
}

static void copy_item(const void *argument, long item, float *scratch) {
    const struct ffn_work *work = argument;
    long k = work->f->top_k, D = work->D;
    (void)scratch;
    for (long i = item * TOKENS_PER_ITEM * k; i < min_of(work->T, (item + 1) * TOKENS_PER_ITEM) * k; i++)
        memcpy(work->sorted + work->places[i] * D, work->x + i / k * D, (size_t)D * sizeof(float));
}

static void sum_item(const void *argument, long item, float *scratch) {
    const struct ffn_work *work = argument;
    (void)scratch;
    for (long t = item * TOKENS_PER_ITEM; t < min_of(work->T, (item + 1) * TOKENS_PER_ITEM); t++)
        add_answers(work, t);
}

static void ffn_body(const void *argument, struct team *team, long thread) {
    const struct ffn_work *work = argument;
    const struct ffn *f = work->f;
    float *scratch = work->scratch + thread * work->scratch_size;
    long tokens = (work->T + TOKENS_PER_ITEM - 1) / TOKENS_PER_ITEM;
    share(team, 0, entry_items(&work->entry), entry_item, &work->entry, scratch);
    if (f->num_experts) {
        share(team, 1, linear_items(&work->router) + linear_items(&work->shared_gate), router_item, work, scratch);
        share(team, 2, tokens, route_item, work, scratch);
        share(team, 3, 1, sort_pairs, work, scratch);
        share(team, 4, tokens, copy_item, work, scratch);
    }
    long ups = *work->num_touched * num_blocks(&f->gate_up) + num_blocks(&f->shared_up);
    share(team, 5, ups, up_item, work, scratch);
    share(team, 6, (*work->num_touched + 1) * num_blocks(&f->shared_down), down_item, work, scratch);
    share(team, 7, tokens, sum_item, work, scratch);
}

/* Hands out parts of one allocation; with `memory` NULL it only counts. */
struct parts {
    float *memory;
    long used;
};

static float *take(struct parts *parts, long num_floats) {
    float *part = parts->memory ? parts->memory + parts->used : NULL;
    parts->used += round_up(num_floats, LANES);
    return part;
}

static void lay_out(struct ffn_work *work, struct parts *parts, long num_threads) {
    const struct ffn *f = work->f;
    long T = work->T, k = f->top_k, E = f->num_experts;
    const struct matrix *matrices[] = {&f->router, &f->shared_gate, &f->gate_up, &f->down, &f->shared_up, &f->shared_down};
    work->scratch_size = 0;
    for (int i = 0; i < 6; i++)
        if (linear_scratch(matrices[i]) > work->scratch_size) work->scratch_size = linear_scratch(matrices[i]);
    work->scratch = take(parts, num_threads * work->scratch_size);
    work->logits = take(parts, T * E), work->shared_logits = take(parts, T), work->weights = take(parts, T * k);
    work->ids = (int64_t *)take(parts, 2 * T * k), work->places = (int64_t *)take(parts, 2 * T * k);
    work->starts = (int64_t *)take(parts, 2 * (E + 1)), work->touched = (int64_t *)take(parts, 2 * E);
    work->num_touched = (int64_t *)take(parts, 2);
    work->sorted = take(parts, T * k * work->D), work->hidden = take(parts, T * k * work->width);
    work->entry.normed = take(parts, T * work->D);
    work->shared_hidden = take(parts, T * work->shared_width), work->answers = take(parts, T * (k + 1) * work->D);
}

/* y [T, D] = ffn(norm(x + residual)), total = x + residual; residual, scale and then total may be NULL. */
int deltaserve_ffn(const struct ffn *f, long T, const float *x, const float *residual, const float *scale, float eps,
                   float *total, float *y, long num_threads) {
    struct ffn_work work = {.f = f, .T = T, .D = f->shared_down.outs, .y = y};
    work.entry = (struct entry){x, residual, scale, eps, T, work.D, total, NULL};
    struct parts parts = {NULL, 0};
    work.width = f->gate_up.outs / 2, work.shared_width = f->shared_up.outs / 2;
    lay_out(&work, &parts, num_threads);
    parts = (struct parts){reserve(parts.used), 0};
    if (!parts.memory) return 1;
    lay_out(&work, &parts, num_threads);
    *work.num_touched = 0;
    work.x = x = entered(&work.entry);
    work.router = (struct linear){&f->router, T, x, work.D, work.logits, f->num_experts};
    work.shared_gate = (struct linear){&f->shared_gate, T, x, work.D, work.shared_logits, 1};
    run(num_threads, ffn_body, &work);
    return 0;
}
