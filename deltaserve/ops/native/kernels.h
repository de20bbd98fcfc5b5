/* What all kernels share: vectors of 16 floats, narrow number formats, exp, small products, threads and scratch.
 *
 * Vectors are the compiler's own (GCC and Clang know them on every processor): one register with AVX-512, two with AVX2,
 * four with NEON. All arithmetic is float32. A product adds its terms in rising order of k into one accumulator per
 * output, whatever its other sizes, so a row's result does not depend on the rows beside it.
 *
 */
#ifndef DELTASERVE_KERNELS_H
#define DELTASERVE_KERNELS_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 16, GRID = 64, MAX_PHASES = 8 };
enum kind { FLOAT32, BFLOAT16, FLOAT16, FLOAT8 }; /* FLOAT8 is e4m3fn */

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t bits __attribute__((vector_size(64), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

INLINE long min_of(long a, long b) { return a < b ? a : b; }
INLINE long round_up(long n, long step) { return (n + step - 1) / step * step; }

/* The first `n` floats, zeros behind. */
INLINE vec load_part(const float *at, long n) {
    vec x = {0};
    memcpy(&x, at, (size_t)n * sizeof(float));
    return x;
}

INLINE vec load(const float *at) { return *(const vec *)at; }
INLINE void store(float *at, vec x) { *(vec *)at = x; }

/* A whole vector, or the part of one at the end of a row. */
INLINE vec load_some(const float *at, long n) { return n == LANES ? load(at) : load_part(at, n); }
INLINE void store_some(float *at, vec x, long n) {
    if (n == LANES) store(at, x);
    else memcpy(at, &x, (size_t)n * sizeof(float));
}

INLINE vec choose(bits mask, vec yes, vec no) { return (vec)((mask & (bits)yes) | (~mask & (bits)no)); }
INLINE vec larger(vec a, vec b) { return choose((bits)(a > b), a, b); }

INLINE float sum_of(vec x) {
    float lanes[LANES];
    memcpy(lanes, &x, sizeof(lanes));
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

/* exp with a relative error of about 1e-7: 2^n times a polynomial in the rest. 0 below -87, NaN stays NaN. */
INLINE vec exp_of(vec x) {
    const vec magic = (vec){0} + 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer, in the low bits */
    const vec top = (vec){0} + 88.7f;
    x = choose((bits)(x > top), top, x);
    vec shifted = x * 1.44269504f + magic;
    vec n = shifted - magic;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    bits power = ((bits)shifted + 127u) << 23;
    return (vec)(~(bits)(x < -87.3f) & (bits)(p * (vec)power));
}

INLINE vec sigmoid_of(vec x) { return 1.0f / (1.0f + exp_of(-x)); }
INLINE vec silu_of(vec x) { return x / (1.0f + exp_of(-x)); }

/* Ask for memory that will be read in an order which the processor does not foresee. */
INLINE void fetch(const void *from, long bytes) {
    for (long i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)from + i, 0, 2);
}

/* Narrow numbers, `n` of them, `stride` apart for the caller's convenience of none: contiguous on both sides. */
void widen(const void *from, enum kind kind, long n, float *to);
void narrow(const float *from, long n, enum kind kind, void *to);
/* x as it comes back from `kind`. */
void round_to(enum kind kind, long n, float *x);

/* c[m][n] = (or += where `add`) the sum over k of a[m * am + k * ak] * b[k * bk + n]. Any sizes. */
void product(long M, long N, long K, const float *a, long am, long ak, const float *b, long bk, float *c, long cm,
             int add);

/* A weight [outs, ins] in blocks of 64 outputs (the last has as many vectors of 16 as it needs, padded with zeros).
 * FLOAT32: in a block, inputs one after the other, its outputs side by side. BFLOAT16: pairs of inputs one after the
 * other, of each output the two together, so that a shift and a mask widen 16 outputs without moving them. */
struct matrix {
    const void *data;
    int64_t outs, ins, kind;
};

INLINE long num_blocks(const struct matrix *w) { return (w->outs + GRID - 1) / GRID; }
/* Numbers in the matrix as it is stored. */
INLINE long stored_size(const struct matrix *w) {
    return round_up(w->outs, LANES) * (w->kind == BFLOAT16 ? round_up(w->ins, 2) : w->ins);
}
/* Inputs that are widened at a time: their 64 outputs fit a first-level cache. */
enum { WIDENED = 128 };
/* Floats of scratch that `block_product` needs. */
INLINE long block_scratch(const struct matrix *w) { return round_up(min_of(w->ins, WIDENED), 2) * GRID; }

/* y[m][o] = w x[m] for the outputs of one block, o from 0; y has room for whole vectors. */
void block_product(const struct matrix *w, long block, long M, const float *x, long xm, float *y, long ym,
                   float *scratch);

/* Matrix tiles, where the processor has them: y [M, outs] = w x for up to TILED rows. See tiles.c. */
enum { TILED = 64 };
int can_tile(const struct matrix *w);
long tiles_scratch(const struct matrix *w);
void tiles_product(const struct matrix *w, long M, const float *x, long xm, float *y, long ym, float *scratch);

/* y = w x for M rows, as items that threads share. The first `few` rows go through vectors, a block of outputs for up to
 * ROWS_PER_ITEM rows at a time; the rest through tiles where there are any. Tiles round otherwise, so `few` is the number
 * of extend tokens, and a token's result does not depend on how many others there are. With `is_swiglu` the weight is a
 * gate_up, 16 gate rows, then their 16 up rows, and so on; y is silu(gate) * up, half as wide. y may be exactly as wide
 * as it is said here. */
enum { ROWS_PER_ITEM = 192 };
struct linear {
    const struct matrix *w;
    long M, few;
    const float *x;
    long xm;
    float *y;
    long ym;
    int is_swiglu;
};
INLINE long rows_of_vectors(const struct linear *l) { return can_tile(l->w) ? min_of(l->few, l->M) : l->M; }
INLINE long linear_items(const struct linear *l) {
    long few = rows_of_vectors(l), tiled = (l->M - few + TILED - 1) / TILED;
    return tiled + num_blocks(l->w) * ((few + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM);
}
/* Scratch of an item whose rows may go through tiles, and of one whose rows may not. */
INLINE long vector_scratch(const struct matrix *w) { return block_scratch(w) + ROWS_PER_ITEM * GRID; }
INLINE long linear_scratch(const struct matrix *w) {
    long tiled = can_tile(w) ? tiles_scratch(w) + TILED * w->outs : 0;
    return tiled > vector_scratch(w) ? tiled : vector_scratch(w);
}
void linear_item(const void *linear, long item, float *scratch);

/* y = x * rsqrt(mean(x^2) + eps) * scale. */
void norm_row(const float *x, const float *scale, float eps, long D, float *y);

/* How half a layer begins: total = x + residual (x itself where there is no residual), normed = norm(total). Items are
 * NORM_ROWS rows. Without a scale there is no norm, and `entered` is x. */
enum { NORM_ROWS = 16 };
struct entry {
    const float *x, *residual, *scale;
    float eps;
    long T, D;
    float *total, *normed;
};
INLINE long entry_items(const struct entry *e) { return e->scale ? (e->T + NORM_ROWS - 1) / NORM_ROWS : 0; }
INLINE const float *entered(const struct entry *e) { return e->scale ? e->normed : e->x; }
void entry_item(const void *entry, long item, float *scratch);

/* Threads: a pool of this library's own, whose workers watch for work a short while and then sleep. A job is a body that
 * calls `share` for one phase after the other, on the caller and on any workers that come in time. Items are claimed from
 * a counter and a phase ends when all its items are done, not when all threads have come by: nobody waits for a worker
 * that the system does not let run. Which thread does an item changes nothing in it. */
struct team {
    long next[MAX_PHASES], done[MAX_PHASES];
};
typedef void body(const void *work, struct team *team, long thread);
typedef void item(const void *work, long index, float *scratch);

void run(long num_threads, body *body, const void *work);
/* All of item(work, 0 .. count - 1, scratch), by whichever threads are there; returns when they are done. */
void share(struct team *team, int phase, long count, item *item, const void *work, float *scratch);

/* Memory of the calling thread that the next call reuses; NULL if there is none left. */
float *reserve(long num_floats);

/* The rows of a step; see ops/rows.py. */
struct extend_rows {
    int64_t num_rows, width;
    const int64_t *rows, *slots, *starts, *num_ring, *num_new, *pages;
    int64_t max_pages;
};

struct prefill_rows {
    int64_t num_rows;
    const int64_t *offsets, *starts, *rows, *slots_in, *pages;
    int64_t max_pages, num_cuts;
    const int64_t *cuts; /* [num_cuts][3]: row, tokens, slot */
};

INLINE long extend_tokens(const struct extend_rows *rows) { return rows ? rows->num_rows * rows->width : 0; }

#endif
