/* Products with a weight, and what is done to single rows: norms and rotary angles. */
#include "kernels.h"

static void swiglu_rows(long M, long width, const float *both, long bm, float *y, long ym) {
    for (long m = 0; m < M; m++)
        for (long n = 0; n < width; n += 2 * LANES)
            store(y + m * ym + n / 2, silu_of(load(both + m * bm + n)) * load(both + m * bm + n + LANES));
}

static void tiled_item(const struct linear *l, long first, float *scratch) {
    long rows = min_of(TILED, l->M - first), outs = l->w->outs;
    const float *x = l->x + first * l->xm;
    float *y = l->y + first * l->ym, *both = scratch + tiles_scratch(l->w);
    if (!l->is_swiglu) tiles_product(l->w, rows, x, l->xm, y, l->ym, scratch);
    else {
        tiles_product(l->w, rows, x, l->xm, both, outs, scratch);
        swiglu_rows(rows, outs, both, outs, y, l->ym);
    }
}

void linear_item(const void *argument, long item, float *scratch) {
    const struct linear *l = argument;
    long few = rows_of_vectors(l), tiled = (l->M - few + TILED - 1) / TILED;
    if (item < tiled) {
        tiled_item(l, few + item * TILED, scratch);
        return;
    }
    item -= tiled;
    long block = item % num_blocks(l->w), first = item / num_blocks(l->w) * ROWS_PER_ITEM;
    long rows = min_of(ROWS_PER_ITEM, few - first), width = min_of(GRID, l->w->outs - block * GRID);
    const float *x = l->x + first * l->xm;
    float *y = l->y + first * l->ym + (l->is_swiglu ? block * GRID / 2 : block * GRID);
    if (!l->is_swiglu && width % LANES == 0) {
        block_product(l->w, block, rows, x, l->xm, y, l->ym, scratch);
        return;
    }
    float *whole = scratch + block_scratch(l->w);
    block_product(l->w, block, rows, x, l->xm, whole, GRID, scratch);
    if (l->is_swiglu) swiglu_rows(rows, width, whole, GRID, y, l->ym);
    else
        for (long m = 0; m < rows; m++) memcpy(y + m * l->ym, whole + m * GRID, (size_t)width * sizeof(float));
}

struct linear_work {
    struct linear linear;
    float *scratch;
};

static void linear_body(const void *argument, struct team *team, long thread) {
    const struct linear_work *work = argument;
    float *scratch = work->scratch + thread * vector_scratch(work->linear.w);
    share(team, 0, linear_items(&work->linear), linear_item, &work->linear, scratch);
}

/* y [M, outs] = x [M, ins] w^T. */
int deltaserve_linear(const struct matrix *w, long M, const float *x, float *y, long num_threads) {
    struct linear_work work = {{w, M, M, x, w->ins, y, w->outs, 0}, reserve(num_threads * vector_scratch(w))};
    if (!work.scratch) return 1;
    run(num_threads, linear_body, &work);
    return 0;
}

void norm_row(const float *x, const float *scale, float eps, long D, float *y) {
    vec sums = {0};
    for (long d = 0; d < D; d += LANES) {
        vec part = load_some(x + d, min_of(LANES, D - d));
        sums += part * part;
    }
    float factor = 1.0f / sqrtf(sum_of(sums) / (float)D + eps);
    for (long d = 0; d < D; d += LANES) {
        long some = min_of(LANES, D - d);
        store_some(y + d, load_some(x + d, some) * factor * load_some(scale + d, some), some);
    }
}

void entry_item(const void *argument, long item, float *scratch) {
    const struct entry *e = argument;
    long D = e->D;
    (void)scratch;
    for (long t = item * NORM_ROWS; t < min_of(e->T, (item + 1) * NORM_ROWS); t++) {
        const float *x = e->x + t * D;
        if (e->residual) {
            float *total = e->total + t * D;
            for (long d = 0; d < D; d++) total[d] = x[d] + e->residual[t * D + d];
            x = total;
        }
        norm_row(x, e->scale, e->eps, D, e->normed + t * D);
    }
}

static void norm_body(const void *entry, struct team *team, long thread) {
    (void)thread;
    share(team, 0, entry_items(entry), entry_item, entry, NULL);
}

/* y [T, D] = norm(x), or with a residual total = x + residual and y = norm(total). */
int deltaserve_norm(const float *x, const float *residual, const float *scale, float eps, long T, long D, float *total,
                    float *y, long num_threads) {
    struct entry entry = {x, residual, scale, eps, T, D, total, y};
    run(T <= NORM_ROWS ? 1 : num_threads, norm_body, &entry);
    return 0;
}

struct table {
    const char *data;
    long kind, D;
    const int64_t *ids;
    long T;
    float *y;
};

static void table_item(const void *argument, long item, float *scratch) {
    const struct table *table = argument;
    long D = table->D, bytes = D * (table->kind == FLOAT32 ? 4 : 2);
    (void)scratch;
    for (long t = item * NORM_ROWS; t < min_of(table->T, (item + 1) * NORM_ROWS); t++)
        widen(table->data + table->ids[t] * bytes, table->kind, D, table->y + t * D);
}

static void table_body(const void *table, struct team *team, long thread) {
    (void)thread;
    share(team, 0, (((const struct table *)table)->T + NORM_ROWS - 1) / NORM_ROWS, table_item, table, NULL);
}

/* y [T, D] = rows `ids` of a table [V, D] of float32 or bfloat16. Returns 2 if an id is not of the table. */
int deltaserve_look_up(const void *data, long kind, long V, long D, const int64_t *ids, long T, float *y,
                       long num_threads) {
    struct table table = {data, kind, D, ids, T, y};
    for (long t = 0; t < T; t++)
        if (ids[t] < 0 || ids[t] >= V) return 2;
    run(T <= NORM_ROWS ? 1 : num_threads, table_body, &table);
    return 0;
}

/* cos and sin [T, R] of position * frequency, times `factor`; angles in float64. */
int deltaserve_cos_sin(const int64_t *positions, const double *frequencies, double factor, long T, long R, float *cosines,
                       float *sines) {
    for (long t = 0; t < T; t++)
        for (long r = 0; r < R; r++) {
            double angle = (double)positions[t] * frequencies[r];
            cosines[t * R + r] = (float)(cos(angle) * factor);
            sines[t * R + r] = (float)(sin(angle) * factor);
        }
    return 0;
}
