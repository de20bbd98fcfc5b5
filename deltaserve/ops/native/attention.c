/* Causal grouped-query attention over pages, alone and as a whole gated attention layer between two norms.
 *
 * Queries of a few neighbouring tokens and of all query heads of one KV head are the columns of a block of at most 64
 * (a single token's are padded to one vector); keys are rows. Page by page, scores and their softmax run down columns
 * with a running maximum; so the same code serves one token and a long prompt, and a column's arithmetic knows nothing
 * of its neighbours. Keys behind a block's last token are not touched.
 */
#include "kernels.h"

struct attention_sizes {
    int64_t heads, kv_heads, head_dim;
    double scale;
    int64_t first_key;
};

/* One layer's view of the pages: [pages][G][2][64][D], `stride` elements from page to page. */
struct page_pool {
    void *pages;
    int64_t kind, stride;
};

/* Columns: `count` tokens from absolute position `start`, r = H / G query heads each. q, gate and o of the KV head's
 * first query head lie at token * stride, further heads `head_stride` on. */
struct queries {
    long start, count;
    const float *q, *gate;
    long q_stride, q_head_stride;
    float *o;
    long o_stride;
};

enum { MAX_COLUMNS = GRID };
enum { STATE_FLOATS = 2 * MAX_COLUMNS };

INLINE long group_of(const struct attention_sizes *s) { return s->heads / s->kv_heads; }
INLINE long columns_of(long count, long group) { return round_up(count * group, LANES); }
/* Tokens whose columns fit; a group wider than that comes one token at a time. */
INLINE long tokens_together(long group) { return group >= MAX_COLUMNS ? 1 : MAX_COLUMNS / group; }

static long attend_scratch(const struct attention_sizes *s) {
    long columns = columns_of(tokens_together(group_of(s)), group_of(s));
    return round_up((columns + 2 * GRID) * s->head_dim + columns * s->head_dim, LANES) + (GRID + 4) * columns;
}

static long kind_bytes(long kind) { return kind == FLOAT32 ? 4 : kind == FLOAT8 ? 1 : 2; }

static const char *page_start(const struct attention_sizes *s, const struct page_pool *pool, long page, long kv_head) {
    long at = page * pool->stride + kv_head * 2 * GRID * s->head_dim;
    return (const char *)pool->pages + at * kind_bytes(pool->kind);
}

/* The 64 keys, then the 64 values of a page and KV head: in place, or widened into scratch. Only `count` are read. */
static const float *page_rows(const struct attention_sizes *s, const struct page_pool *pool, long page, long kv_head,
                              int is_value, long count, float *scratch) {
    long values = is_value ? GRID * s->head_dim * kind_bytes(pool->kind) : 0;
    const char *from = page_start(s, pool, page, kv_head) + values;
    if (pool->kind == FLOAT32) return (const float *)from;
    widen(from, pool->kind, count * s->head_dim, scratch);
    return scratch;
}

/* Columns of the running softmax over keys: position of its token, largest score, sum of weights, latest factor. */
struct columns {
    float *position, *peak, *total, *factor;
    long count;
};

/* Scores [keys, columns] from absolute position `first` become weights; columns learn of them. */
static void soften(const struct columns *at, float *scores, long num_keys, long first, long first_key, int is_masked) {
    for (long c = 0; c < at->count; c += LANES) {
        vec position = load(at->position + c), peak = load(at->peak + c), total = {0};
        vec least = choose((bits)(position < (float)first_key), position, (vec){0} + (float)first_key);
        vec most = peak;
        for (long key = 0; key < num_keys; key++) {
            float *score = scores + key * at->count + c;
            if (is_masked) {
                vec place = (vec){0} + (float)(first + key);
                bits hidden = (bits)(place > position) | (bits)(place < least);
                store(score, choose(hidden, (vec){0} - INFINITY, load(score)));
            }
            most = larger(load(score), most);
        }
        for (long key = 0; key < num_keys; key++) {
            float *score = scores + key * at->count + c;
            vec weight = exp_of(load(score) - most);
            store(score, weight);
            total += weight;
        }
        vec factor = exp_of(peak - most);
        store(at->total + c, load(at->total + c) * factor + total);
        store(at->factor + c, factor);
        store(at->peak + c, most);
    }
}

static void attend(const struct attention_sizes *s, const struct page_pool *pool, const int64_t *pages, long kv_head,
                   const struct queries *x, float *scratch) {
    long D = s->head_dim, group = group_of(s), used = x->count * group, columns = columns_of(x->count, group);
    float *queries = scratch, *keys = queries + columns * D, *values = keys + GRID * D, *o = values + GRID * D;
    float *scores = scratch + round_up((columns + 2 * GRID) * D + columns * D, LANES), *state = scores + GRID * columns;
    struct columns at = {state, state + columns, state + 2 * columns, state + 3 * columns, columns};
    memset(queries, 0, (size_t)(columns * D) * sizeof(float));
    memset(o, 0, (size_t)(columns * D) * sizeof(float));
    for (long c = 0; c < columns; c++) {
        const float *q = x->q + c / group * x->q_stride + c % group * x->q_head_stride;
        for (long d = 0; c < used && d < D; d++) queries[d * columns + c] = q[d] * (float)s->scale;
        at.position[c] = (float)(x->start + min_of(c / group, x->count - 1));
        at.peak[c] = -1e30f, at.total[c] = 0;
    }
    long last = x->start + x->count - 1;
    long page_bytes = GRID * D * kind_bytes(pool->kind);
    for (long first = min_of(s->first_key, x->start) / GRID * GRID; first <= last; first += GRID) {
        long num_keys = min_of(GRID, last + 1 - first), page = pages[first / GRID];
        const float *k = page_rows(s, pool, page, kv_head, 0, num_keys, keys);
        product(num_keys, columns, D, k, D, 1, queries, columns, scores, columns, 0);
        soften(&at, scores, num_keys, first, s->first_key, first + num_keys > x->start + 1 || first < s->first_key);
        if (first + GRID <= last) fetch(page_start(s, pool, pages[first / GRID + 1], kv_head), page_bytes);
        const float *v = page_rows(s, pool, page, kv_head, 1, num_keys, values);
        for (long c = 0; c < used; c++)
            for (long d = 0; d < D; d++) o[c * D + d] *= at.factor[c];
        product(used, D, num_keys, scores, 1, columns, v, D, o, D, 1);
    }
    for (long c = 0; c < used; c++) {
        float *to = x->o + c / group * x->o_stride + c % group * D;
        const float *gate = x->gate ? x->gate + c / group * x->q_stride + c % group * x->q_head_stride : NULL;
        for (long d = 0; d < D; d += LANES) {
            long some = min_of(LANES, D - d);
            vec y = load_some(o + c * D + d, some) / at.total[c];
            if (gate) y *= sigmoid_of(load_some(gate + d, some));
            store_some(to + d, y, some);
        }
    }
}

/* ---- rows ---------------------------------------------------------------------------------------------------- */

struct attend_work {
    const struct attention_sizes *s;
    const struct page_pool *pool;
    const struct extend_rows *extend;
    const struct prefill_rows *prefill;
    const float *q, *gate; /* token by token; gate may be NULL */
    long q_stride, q_head_stride;
    float *o; /* [T, H * D] */
};

static struct queries queries_at(const struct attend_work *work, long token, long kv_head, long start, long count) {
    long first_head = kv_head * group_of(work->s), q = token * work->q_stride + first_head * work->q_head_stride;
    long o_stride = work->s->heads * work->s->head_dim;
    return (struct queries){start, count, work->q + q, work->gate ? work->gate + q : NULL, work->q_stride,
                            work->q_head_stride, work->o + token * o_stride + first_head * work->s->head_dim, o_stride};
}

/* Tokens [token, token + count) of the step, from absolute position `start`. */
static void attend_tokens(const struct attend_work *work, const int64_t *pages, long kv_head, long token, long start,
                          long count, float *scratch) {
    long together = tokens_together(group_of(work->s));
    for (long t = 0; t < count; t += together) {
        struct queries x = queries_at(work, token + t, kv_head, start + t, min_of(together, count - t));
        attend(work->s, work->pool, pages, kv_head, &x, scratch);
    }
}

static void attend_extend(const struct attend_work *work, long row, long kv_head, float *scratch) {
    const struct extend_rows *rows = work->extend;
    long token = row * rows->width, group = group_of(work->s), D = work->s->head_dim;
    attend_tokens(work, rows->pages + row * rows->max_pages, kv_head, token, rows->starts[row], rows->num_new[row],
                  scratch);
    for (long t = rows->num_new[row]; t < rows->width; t++)
        memset(work->o + ((token + t) * work->s->heads + kv_head * group) * D, 0, (size_t)(group * D) * sizeof(float));
}

static long num_prefill_blocks(const struct prefill_rows *rows) {
    long blocks = 0;
    for (long row = 0; rows && row < rows->num_rows; row++)
        blocks += (rows->offsets[row + 1] - rows->offsets[row] + GRID - 1) / GRID;
    return blocks;
}

/* Block `block` of 64 tokens, counted over all rows from the last: the longest contexts come first. */
static void attend_prefill(const struct attend_work *work, long block, long kv_head, float *scratch) {
    const struct prefill_rows *rows = work->prefill;
    for (long row = 0; row < rows->num_rows; row++) {
        long num_tokens = rows->offsets[row + 1] - rows->offsets[row], blocks = (num_tokens + GRID - 1) / GRID;
        if (block >= blocks) {
            block -= blocks;
            continue;
        }
        long first = (blocks - 1 - block) * GRID, token = extend_tokens(work->extend) + rows->offsets[row] + first;
        attend_tokens(work, rows->pages + row * rows->max_pages, kv_head, token, rows->starts[row] + first,
                      min_of(GRID, num_tokens - first), scratch);
        return;
    }
}

static void attend_item(const void *argument, long item, float *scratch) {
    const struct attend_work *work = argument;
    long G = work->s->kv_heads, blocks = num_prefill_blocks(work->prefill);
    if (item < blocks * G) attend_prefill(work, item / G, item % G, scratch);
    else attend_extend(work, item / G - blocks, item % G, scratch);
}

static long attend_items(const struct attend_work *work) {
    return (num_prefill_blocks(work->prefill) + (work->extend ? work->extend->num_rows : 0)) * work->s->kv_heads;
}

struct alone {
    struct attend_work work;
    float *scratch;
};

static void alone_body(const void *argument, struct team *team, long thread) {
    const struct alone *alone = argument;
    float *scratch = alone->scratch + thread * round_up(attend_scratch(alone->work.s), LANES);
    share(team, 0, attend_items(&alone->work), attend_item, &alone->work, scratch);
}

/* q and o [T, H, D]; one of `extend` and `prefill` is NULL. */
int deltaserve_attention(const struct attention_sizes *s, const struct page_pool *pool, const float *q, float *o,
                         const struct extend_rows *extend, const struct prefill_rows *prefill, long num_threads) {
    struct alone alone = {{s, pool, extend, prefill, q, NULL, s->heads * s->head_dim, s->head_dim, o}, NULL};
    alone.scratch = reserve(num_threads * round_up(attend_scratch(s), LANES));
    if (!alone.scratch) return 1;
    run(num_threads, alone_body, &alone);
    return 0;
}

/* ---- the layer ----------------------------------------------------------------------------------------------- */

struct attention_layer {
    struct attention_sizes s;
    struct matrix qkv, out; /* outputs of qkv: per head D of q and D of its gate; k; v */
    const float *q_norm, *k_norm;
    double eps;
};

struct layer_work {
    const struct attention_layer *layer;
    struct attend_work attend;
    const int64_t *kv_slots;
    const float *cosines, *sines; /* [T, R] */
    long T, R;
    float *projected, *scratch;
    long scratch_size;
    struct entry entry;
    struct linear qkv, out;
};

/* Norm and rotation of one head, in place. */
static void turn(const struct layer_work *work, const float *norm, long token, float *x) {
    long R = work->R;
    const float *cosines = work->cosines + token * R, *sines = work->sines + token * R;
    norm_row(x, norm, (float)work->layer->eps, work->layer->s.head_dim, x);
    for (long i = 0; i < R; i++) {
        float first = x[i], second = x[R + i];
        x[i] = first * cosines[i] - second * sines[i];
        x[R + i] = second * cosines[i] + first * sines[i];
    }
}

/* Queries of a token are turned where they are; its keys and values go to their page. */
static void prepare_token(const struct layer_work *work, long token) {
    const struct attention_sizes *s = &work->layer->s;
    const struct page_pool *pool = work->attend.pool;
    long D = s->head_dim, page = work->kv_slots[token] / GRID, place = work->kv_slots[token] % GRID;
    float *q = work->projected + token * work->layer->qkv.outs, *k = q + 2 * s->heads * D, *v = k + s->kv_heads * D;
    for (long h = 0; h < s->heads; h++) turn(work, work->layer->q_norm, token, q + 2 * h * D);
    for (long g = 0; g < s->kv_heads; g++) {
        char *to = (char *)pool->pages + (page * pool->stride + (2 * g * GRID + place) * D) * kind_bytes(pool->kind);
        turn(work, work->layer->k_norm, token, k + g * D);
        narrow(k + g * D, D, pool->kind, to);
        narrow(v + g * D, D, pool->kind, to + GRID * D * kind_bytes(pool->kind));
    }
}

enum { TOKENS_PER_ITEM = 8 };

static void prepare_item(const void *argument, long item, float *scratch) {
    const struct layer_work *work = argument;
    (void)scratch;
    for (long t = item * TOKENS_PER_ITEM; t < min_of(work->T, (item + 1) * TOKENS_PER_ITEM); t++)
        prepare_token(work, t);
}

static void layer_body(const void *argument, struct team *team, long thread) {
    const struct layer_work *work = argument;
    float *scratch = work->scratch + thread * work->scratch_size;
    share(team, 0, entry_items(&work->entry), entry_item, &work->entry, scratch);
    share(team, 1, linear_items(&work->qkv), linear_item, &work->qkv, scratch);
    share(team, 2, (work->T + TOKENS_PER_ITEM - 1) / TOKENS_PER_ITEM, prepare_item, work, scratch);
    share(team, 3, attend_items(&work->attend), attend_item, &work->attend, scratch);
    share(team, 4, linear_items(&work->out), linear_item, &work->out, scratch);
}

/* y [T, D] = mixer(norm(x + residual)), total = x + residual; residual, scale and then total may be NULL (`struct entry`),
 * and so may `extend` and `prefill`. Tokens of extend rows come first. */
int deltaserve_attention_mixer(const struct attention_layer *layer, const struct page_pool *pool, long T, const float *x,
                               const float *residual, const float *scale, float *total, float *y, const int64_t *kv_slots, const float *cosines, const float *sines, long R,
                               const struct extend_rows *extend, const struct prefill_rows *prefill,
                               long num_threads) {
    const struct attention_sizes *s = &layer->s;
    long width = layer->qkv.outs, mixed_width = s->heads * s->head_dim, each = attend_scratch(s);
    if (linear_scratch(&layer->qkv) > each) each = linear_scratch(&layer->qkv);
    if (linear_scratch(&layer->out) > each) each = linear_scratch(&layer->out);
    each = round_up(each, LANES);
    float *memory = reserve(num_threads * each + T * (width + mixed_width + layer->out.outs) + 2 * LANES);
    if (!memory) return 1;
    float *projected = memory + num_threads * each, *mixed = projected + round_up(T * width, LANES);
    long few = extend_tokens(extend);
    struct entry entry = {x, residual, scale, (float)layer->eps, T, layer->out.outs, total,
                          mixed + round_up(T * mixed_width, LANES)};
    struct attend_work attend = {s, pool, extend, prefill, projected, projected + s->head_dim, width,
                                 2 * s->head_dim, mixed};
    struct layer_work work = {layer, attend, kv_slots, cosines, sines, T, R, projected, memory, each, entry,
                              {&layer->qkv, T, few, entered(&entry), layer->qkv.ins, projected, width, 0},
                              {&layer->out, T, few, mixed, mixed_width, y, layer->out.outs, 0}};
    run(num_threads, layer_body, &work);
    return 0;
}
