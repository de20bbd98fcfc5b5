/* The second half of a layer: a dense SwiGLU, or experts with a shared one behind a gate.
 *
 * Tokens are sorted by expert, so that an expert's weights are read once for all its tokens and those of the others not
 * at all. The shared expert is one more that every token takes, with weight sigmoid(gate); a dense FFN is a shared expert
 * without gate or others. What the experts of a token answer is added in the order of its routing, the shared one last.
 */
#include "kernels.h"

struct ffn {
    struct matrix router, shared_gate;   /* outs 0: there is none */
    struct matrix gate_up, down;         /* one expert's shapes; `data` is the first's; see `struct linear` */
    struct matrix shared_up, shared_down;
    int64_t num_experts, top_k, renormalize;
};

/* One expert's rows of both products, and where its items begin among all. */
struct part {
    struct matrix up_matrix, down_matrix;
    struct linear up, down;
    long first_up, first_down;
};

struct ffn_work {
    const struct ffn *f;
    long T, few, D, width, shared_width; /* few extend tokens; widths of the hidden part, rounded up to 16 */
    const float *x;
    float *y;
    float *logits, *shared_logits, *weights; /* [T, E], [T], [T, k] */
    int64_t *ids, *places;                   /* [T, k]: expert, and place among the sorted pairs */
    int64_t *starts, *fews;                  /* [E + 1] where an expert's pairs begin; [E] how many are of extend tokens */
    struct part *parts;                      /* [E + 1] the experts with tokens, the shared one last */
    int64_t *num_parts;
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
static void sort_pairs(const struct ffn_work *work) {
    long k = work->f->top_k, pairs = work->T * k, E = work->f->num_experts;
    int64_t *starts = work->starts;
    memset(starts, 0, (size_t)(E + 1) * sizeof(*starts));
    memset(work->fews, 0, (size_t)E * sizeof(*work->fews));
    for (long i = 0; i < pairs; i++) {
        starts[work->ids[i] + 1]++;
        work->fews[work->ids[i]] += i < work->few * k;
    }
    for (long e = 0; e < E; e++) starts[e + 1] += starts[e];
    for (long i = 0; i < pairs; i++) work->places[i] = starts[work->ids[i]]++;
    for (long e = E; e > 0; e--) starts[e] = starts[e - 1];
    starts[0] = 0;
}

/* ---- products ------------------------------------------------------------------------------------------------ */

static struct matrix expert_of(const struct matrix *first, long expert) {
    struct matrix w = *first;
    w.data = (const char *)w.data + expert * stored_size(&w) * (w.kind == BFLOAT16 ? 2 : 4);
    return w;
}

static void add_part(const struct ffn_work *work, struct matrix up, struct matrix down, long few, long rows,
                     const float *x, float *hidden, float *answers) {
    struct part *part = work->parts + (*work->num_parts)++;
    long width = up.outs / 2;
    part->up_matrix = up, part->down_matrix = down;
    part->up = (struct linear){&part->up_matrix, rows, few, x, work->D, hidden, width, 1};
    part->down = (struct linear){&part->down_matrix, rows, few, hidden, width, answers, work->D, 0};
    part->first_up = part->first_down = 0;
    if (part == work->parts) return;
    part->first_up = part[-1].first_up + linear_items(&part[-1].up);
    part->first_down = part[-1].first_down + linear_items(&part[-1].down);
}

/* One item: sorts the pairs and lists the products that they need. */
static void plan_item(const void *argument, long item, float *scratch) {
    const struct ffn_work *work = argument;
    const struct ffn *f = work->f;
    (void)item, (void)scratch;
    *work->num_parts = 0;
    if (f->num_experts) sort_pairs(work);
    for (long e = 0; e < f->num_experts; e++) {
        long first = work->starts[e], rows = work->starts[e + 1] - first;
        if (rows)
            add_part(work, expert_of(&f->gate_up, e), expert_of(&f->down, e), work->fews[e], rows,
                     work->sorted + first * work->D, work->hidden + first * work->width, work->answers + first * work->D);
    }
    add_part(work, f->shared_up, f->shared_down, work->few, work->T, work->x, work->shared_hidden,
             work->answers + work->T * f->top_k * work->D);
}

static void up_item(const void *argument, long item, float *scratch) {
    const struct ffn_work *work = argument;
    const struct part *part = work->parts + *work->num_parts - 1;
    while (item < part->first_up) part--;
    linear_item(&part->up, item - part->first_up, scratch);
}

static void down_item(const void *argument, long item, float *scratch) {
    const struct ffn_work *work = argument;
    const struct part *part = work->parts + *work->num_parts - 1;
    while (item < part->first_down) part--;
    linear_item(&part->down, item - part->first_down, scratch);
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

enum { TOKENS_PER_ITEM = 4, SMALL_ROUTER = 1 << 16 };

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

/* Everything before the experts as one item, where it is too little to share. */
static void choose_item(const void *argument, long item, float *scratch) {
    const struct ffn_work *work = argument;
    if (entry_items(&work->entry)) entry_item(&work->entry, 0, scratch);
    if (work->f->num_experts) {
        for (long i = 0; i < linear_items(&work->router) + linear_items(&work->shared_gate); i++)
            router_item(work, i, scratch);
        route_item(work, 0, scratch);
    }
    plan_item(work, item, scratch);
    if (work->f->num_experts) copy_item(work, 0, scratch);
}

static void choose_experts(const struct ffn_work *work, struct team *team, long tokens, float *scratch) {
    if (tokens == 1 && work->f->router.outs * work->D <= SMALL_ROUTER) {
        share(team, 0, 1, choose_item, work, scratch);
        return;
    }
    share(team, 0, entry_items(&work->entry), entry_item, &work->entry, scratch);
    if (work->f->num_experts) {
        share(team, 1, linear_items(&work->router) + linear_items(&work->shared_gate), router_item, work, scratch);
        share(team, 2, tokens, route_item, work, scratch);
    }
    share(team, 3, 1, plan_item, work, scratch);
    if (work->f->num_experts) share(team, 4, tokens, copy_item, work, scratch);
}

static void ffn_body(const void *argument, struct team *team, long thread) {
    const struct ffn_work *work = argument;
    float *scratch = work->scratch + thread * work->scratch_size;
    long tokens = (work->T + TOKENS_PER_ITEM - 1) / TOKENS_PER_ITEM;
    choose_experts(work, team, tokens, scratch);
    const struct part *last = work->parts + *work->num_parts - 1;
    share(team, 5, last->first_up + linear_items(&last->up), up_item, work, scratch);
    share(team, 6, last->first_down + linear_items(&last->down), down_item, work, scratch);
    share(team, 7, tokens, sum_item, work, scratch);
}

/* Hands out pieces of one allocation; with `memory` NULL it only counts. */
struct pieces {
    float *memory;
    long used;
};

static float *take(struct pieces *pieces, long num_floats) {
    float *piece = pieces->memory ? pieces->memory + pieces->used : NULL;
    pieces->used += round_up(num_floats, LANES);
    return piece;
}

static void lay_out(struct ffn_work *work, struct pieces *pieces, long num_threads) {
    const struct ffn *f = work->f;
    long T = work->T, k = f->top_k, E = f->num_experts;
    const struct matrix *matrices[] = {&f->router, &f->shared_gate, &f->gate_up, &f->down, &f->shared_up, &f->shared_down};
    work->scratch_size = 0;
    for (int i = 0; i < 6; i++)
        if (linear_scratch(matrices[i]) > work->scratch_size) work->scratch_size = linear_scratch(matrices[i]);
    work->scratch = take(pieces, num_threads * work->scratch_size);
    work->logits = take(pieces, T * E), work->shared_logits = take(pieces, T), work->weights = take(pieces, T * k);
    work->ids = (int64_t *)take(pieces, 2 * T * k), work->places = (int64_t *)take(pieces, 2 * T * k);
    work->starts = (int64_t *)take(pieces, 2 * (E + 1)), work->fews = (int64_t *)take(pieces, 2 * E);
    work->parts = (struct part *)take(pieces, (E + 1) * (long)(sizeof(struct part) / sizeof(float)));
    work->num_parts = (int64_t *)take(pieces, 2);
    work->sorted = take(pieces, T * k * work->D), work->hidden = take(pieces, T * k * work->width);
    work->entry.normed = take(pieces, T * work->D);
    work->shared_hidden = take(pieces, T * work->shared_width), work->answers = take(pieces, T * (k + 1) * work->D);
}

/* y [T, D] = ffn(norm(x + residual)), total = x + residual; residual, scale and then total may be NULL. The first num_extend
 * tokens are those of extend rows. */
int deltaserve_ffn(const struct ffn *f, long T, long num_extend, const float *x, const float *residual, const float *scale, float eps,
                   float *total, float *y, long num_threads) {
    struct ffn_work work = {.f = f, .T = T, .few = num_extend, .D = f->shared_down.outs, .y = y};
    work.entry = (struct entry){x, residual, scale, eps, T, work.D, total, NULL};
    struct pieces pieces = {NULL, 0};
    work.width = f->gate_up.outs / 2, work.shared_width = f->shared_up.outs / 2;
    lay_out(&work, &pieces, num_threads);
    pieces = (struct pieces){reserve(pieces.used), 0};
    if (!pieces.memory) return 1;
    lay_out(&work, &pieces, num_threads);
    work.x = x = entered(&work.entry);
    work.router = (struct linear){&f->router, T, num_extend, x, work.D, work.logits, f->num_experts, 0};
    work.shared_gate = (struct linear){&f->shared_gate, T, num_extend, x, work.D, work.shared_logits, 1, 0};
    run(num_threads, ffn_body, &work);
    return 0;
}
