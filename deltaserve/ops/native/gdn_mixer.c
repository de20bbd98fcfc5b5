/* A whole GDN layer between two norms: input products, convolution, gates, the recurrence, gated norm, output product.
 *
 * Three phases: the two input products for all tokens; then everything that looks along a row, by row and key head,
 * which needs no other head and so no waiting; then the output product. Extend rows and prefill rows differ in the
 * second phase only. What is read and written of a row is the table in ops/conv and ops/gdn.
 */
#include "gdn.h"

enum { MAX_TAPS = 8 };

struct gdn_layer {
    struct gdn_sizes s;
    struct matrix qkvz, ba, out;
    const float *conv; /* [taps, C] */
    const float *rates, *dt_bias, *norm; /* rates: -exp(A_log) */
    int64_t taps;
    double eps;
};

struct mixer_work {
    const struct gdn_layer *layer;
    const struct gdn_pool *pool;
    const struct extend_rows *extend;
    const struct prefill_rows *prefill;
    long T, C, width; /* C channels of the convolution, width of a row of `projected` */
    float *projected, *gates, *mixed, *scratch; /* q k v z [T, width]; b a [T, 2H]; [T, H * V] */
    long scratch_size;
    struct entry entry;
    struct linear qkvz, ba, out;
};

/* Channels of key head j: [first, first + count) of C for q, k and the values of its heads. */
struct section {
    long first, count;
};

static void sections_of(const struct gdn_sizes *s, long j, struct section sections[3]) {
    long keys = s->key_heads * s->key_dim, values = group_of(s) * s->value_dim;
    sections[0] = (struct section){j * s->key_dim, s->key_dim};
    sections[1] = (struct section){keys + j * s->key_dim, s->key_dim};
    sections[2] = (struct section){2 * keys + j * values, values};
}

/* silu of the convolution of one token on the head's channels, q k v side by side in y. */
static void convolve(const struct mixer_work *work, const struct section sections[3], const float *const inputs[],
                     float *y) {
    for (int part = 0; part < 3; part++) {
        long count = sections[part].count;
        for (long c = 0; c < count; c += LANES) {
            long at = sections[part].first + c, some = min_of(LANES, count - c);
            vec sum = {0};
            for (long tap = 0; tap < work->layer->taps; tap++)
                sum += load_some(inputs[tap] + at, some) * load_some(work->layer->conv + tap * work->C + at, some);
            store_some(y + c, silu_of(sum), some);
        }
        y += count;
    }
}

/* The head's channels of one conv input. */
static void copy_sections(const struct section sections[3], const float *from, float *to) {
    for (int part = 0; part < 3; part++)
        memcpy(to + sections[part].first, from + sections[part].first, (size_t)sections[part].count * sizeof(float));
}

static void unit_length(float *x, long n, float scale) {
    float sum = 0;
    for (long d = 0; d < n; d++) sum += x[d] * x[d];
    scale /= sqrtf(sum + 1e-6f);
    for (long d = 0; d < n; d++) x[d] *= scale;
}

/* b and a of each value head become its beta and g. */
static void make_gates(const struct gdn_layer *layer, long j, float *gates) {
    long H = layer->s.value_heads, group = group_of(&layer->s);
    for (long h = j * group; h < (j + 1) * group; h++) {
        float x = gates[H + h] + layer->dt_bias[h];
        gates[h] = 1.0f / (1.0f + expf(-gates[h]));
        gates[H + h] = layer->rates[h] * (x > 20.0f ? x : log1pf(expf(x)));
    }
}

/* After the convolution: what `mixed` gets of one token is norm(o) * silu(z). */
static void gated_norm(const struct mixer_work *work, long j, long token) {
    const struct gdn_sizes *s = &work->layer->s;
    long V = s->value_dim, first = j * group_of(s) * V;
    const float *z = work->projected + token * work->width + work->C + first;
    float *y = work->mixed + token * s->value_heads * V + first;
    for (long i = 0; i < group_of(s); i++, y += V, z += V) {
        norm_row(y, work->layer->norm, (float)work->layer->eps, V, y);
        for (long d = 0; d < V; d += LANES) {
            long some = min_of(LANES, V - d);
            store_some(y + d, load_some(y + d, some) * silu_of(load_some(z + d, some)), some);
        }
    }
}

/* The head's part of up to 64 consecutive tokens whose convolution is in `qkv`. */
static struct head_tokens prepare(const struct mixer_work *work, long j, long first, long count, float *qkv) {
    const struct gdn_sizes *s = &work->layer->s;
    long K = s->key_dim, H = s->value_heads, group = group_of(s), stride = 2 * K + group * s->value_dim;
    for (long t = 0; t < count; t++) {
        unit_length(qkv + t * stride, K, 1.0f / sqrtf((float)K));
        unit_length(qkv + t * stride + K, K, 1.0f);
        make_gates(work->layer, j, work->gates + (first + t) * 2 * H);
    }
    const float *gates = work->gates + first * 2 * H + j * group;
    float *o = work->mixed + first * H * s->value_dim + j * group * s->value_dim;
    return (struct head_tokens){qkv, qkv + K, qkv + 2 * K, gates + H, gates, stride, stride, 2 * H, o,
                                H * s->value_dim};
}

static void extend_row(const struct mixer_work *work, long row, long j, float *scratch) {
    const struct extend_rows *rows = work->extend;
    const struct gdn_sizes *s = &work->layer->s;
    long taps = work->layer->taps, ring_width = work->pool->ring_width, width = group_of(s) * s->value_dim;
    float *ring = work->pool->conv_ring + rows->rows[row] * work->pool->conv_stride;
    float *qkv = scratch + round_up(extend_scratch(s), LANES);
    struct section sections[3];
    sections_of(s, j, sections);
    for (long t = 0; t < rows->width; t++) {
        long token = row * rows->width + t, position = rows->starts[row] + t;
        if (t >= rows->num_new[row]) {
            memset(work->mixed + token * s->value_heads * s->value_dim + j * width, 0, (size_t)width * sizeof(float));
            continue;
        }
        const float *inputs[MAX_TAPS];
        copy_sections(sections, work->projected + token * work->width, ring + position % ring_width * work->C);
        for (long tap = 0; tap < taps; tap++)
            inputs[tap] = ring + (position + ring_width - taps + 1 + tap) % ring_width * work->C;
        convolve(work, sections, inputs, qkv);
        struct head_tokens x = prepare(work, j, token, 1, qkv);
        extend_token(s, work->pool, rows->rows[row], rows->slots[row], rows->num_ring[row] + t, j, x, scratch);
        gated_norm(work, j, token);
    }
}

/* A prefill row of n tokens from `first` of the step, as the convolution sees it: input i, i < 0 from the window. */
struct conv_row {
    const float *tokens, *window;
    long width, C, history;
};

static const float *input_at(const struct conv_row *row, long i) {
    return i >= 0 ? row->tokens + i * row->width : row->window + (row->history + i) * row->C;
}

/* The window at `slot` is that after `num_tokens`. */
static void store_window(const struct mixer_work *work, const struct section sections[3], const struct conv_row *row,
                         long num_tokens, long slot) {
    float *window = work->pool->windows + slot * work->pool->window_stride;
    for (long i = 0; i < row->history; i++)
        copy_sections(sections, input_at(row, num_tokens - row->history + i), window + i * row->C);
}

static void store_conv_ring(const struct mixer_work *work, const struct section sections[3],
                            const struct conv_row *row, long num_tokens, long end, long ring_row) {
    long ring_width = work->pool->ring_width;
    float *ring = work->pool->conv_ring + ring_row * work->pool->conv_stride;
    for (long back = 1; back <= row->history; back++)
        copy_sections(sections, input_at(row, num_tokens - back),
                      ring + (end - back + ring_width) % ring_width * row->C);
}

static void prefill_row(const struct mixer_work *work, long row, long j, float *scratch) {
    const struct prefill_rows *rows = work->prefill;
    const struct gdn_sizes *s = &work->layer->s;
    long first = extend_tokens(work->extend) + rows->offsets[row], stride = 2 * s->key_dim + group_of(s) * s->value_dim;
    long num_tokens = rows->offsets[row + 1] - rows->offsets[row], history = work->layer->taps - 1;
    float *states = scratch, *qkv = states + states_size(s), *rest = qkv + GRID * stride;
    const float *window = work->pool->windows + rows->slots_in[row] * work->pool->window_stride;
    struct conv_row inputs = {work->projected + first * work->width, window, work->width, work->C, history};
    struct section sections[3];
    sections_of(s, j, sections);
    load_states(s, work->pool, rows->slots_in[row], j, states);
    for (long start = 0; start < num_tokens; start += GRID) {
        long count = min_of(GRID, num_tokens - start), cut = 0;
        for (long t = 0; t < count; t++) {
            const float *taps[MAX_TAPS];
            for (long tap = 0; tap <= history; tap++) taps[tap] = input_at(&inputs, start + t - history + tap);
            convolve(work, sections, taps, qkv + t * stride);
        }
        struct head_tokens x = prepare(work, j, first + start, count, qkv);
        prefill_chunk(s, work->pool, rows->rows[row], j, count, x, states, rest);
        for (long t = 0; t < count; t++) gated_norm(work, j, first + start + t);
        for (long slot; (slot = next_cut(rows, row, start + GRID, &cut)) >= 0;) {
            store_states(s, work->pool, slot, j, states);
            store_window(work, sections, &inputs, start + GRID, slot);
        }
    }
    store_conv_ring(work, sections, &inputs, num_tokens, rows->starts[row] + num_tokens, rows->rows[row]);
}

static void input_item(const void *argument, long item, float *scratch) {
    const struct mixer_work *work = argument;
    long wide = linear_items(&work->qkvz);
    if (item < wide) linear_item(&work->qkvz, item, scratch);
    else linear_item(&work->ba, item - wide, scratch);
}

/* A row and key head; prefill rows, which take longer, come first. */
static void row_item(const void *argument, long item, float *scratch) {
    const struct mixer_work *work = argument;
    long row = item / work->layer->s.key_heads, j = item % work->layer->s.key_heads;
    long prefills = work->prefill ? work->prefill->num_rows : 0;
    if (row < prefills) prefill_row(work, row, j, scratch);
    else extend_row(work, row - prefills, j, scratch);
}

static void mixer_body(const void *argument, struct team *team, long thread) {
    const struct mixer_work *work = argument;
    float *scratch = work->scratch + thread * work->scratch_size;
    long rows = (work->prefill ? work->prefill->num_rows : 0) + (work->extend ? work->extend->num_rows : 0);
    share(team, 0, entry_items(&work->entry), entry_item, &work->entry, scratch);
    share(team, 1, linear_items(&work->qkvz) + linear_items(&work->ba), input_item, work, scratch);
    share(team, 2, rows * work->layer->s.key_heads, row_item, work, scratch);
    share(team, 3, linear_items(&work->out), linear_item, &work->out, scratch);
}

static long mixer_scratch(const struct gdn_layer *layer) {
    const struct gdn_sizes *s = &layer->s;
    long stride = 2 * s->key_dim + group_of(s) * s->value_dim;
    long rows = states_size(s) + GRID * stride + chunk_scratch(s), row = round_up(extend_scratch(s), LANES) + stride;
    long products[] = {linear_scratch(&layer->qkvz), linear_scratch(&layer->ba), linear_scratch(&layer->out), rows, row};
    long most = 0;
    for (int i = 0; i < 5; i++) most = products[i] > most ? products[i] : most;
    return round_up(most, LANES);
}

/* y [T, D] = mixer(norm(x + residual)), total = x + residual; residual, scale and then total may be NULL (`struct entry`),
 * and so may `extend` and `prefill`. Tokens of extend rows come first. */
int deltaserve_gdn_mixer(const struct gdn_layer *layer, const struct gdn_pool *pool, long T, const float *x,
                         const float *residual, const float *scale, float *total, float *y,
                         const struct extend_rows *extend, const struct prefill_rows *prefill, long num_threads) {
    const struct gdn_sizes *s = &layer->s;
    long H = s->value_heads, width = layer->qkvz.outs, values = H * s->value_dim, each = mixer_scratch(layer);
    long D = layer->out.outs;
    float *memory = reserve(T * (width + 2 * H + values + D) + 4 * LANES + num_threads * each);
    if (!memory) return 1;
    struct mixer_work work = {.layer = layer, .pool = pool, .extend = extend, .prefill = prefill, .T = T};
    work.C = width - values, work.width = width, work.scratch_size = each;
    work.scratch = memory, work.projected = memory + num_threads * each;
    work.gates = work.projected + round_up(T * width, LANES);
    work.mixed = work.gates + round_up(T * 2 * H, LANES);
    work.entry = (struct entry){x, residual, scale, (float)layer->eps, T, D, total,
                                work.mixed + round_up(T * values, LANES)};
    x = entered(&work.entry);
    long few = extend_tokens(extend);
    work.qkvz = (struct linear){&layer->qkvz, T, few, x, layer->qkvz.ins, work.projected, width, 0};
    work.ba = (struct linear){&layer->ba, T, few, x, layer->ba.ins, work.gates, 2 * H, 0};
    work.out = (struct linear){&layer->out, T, few, work.mixed, values, y, layer->out.outs, 0};
    run(num_threads, mixer_body, &work);
    return 0;
}
