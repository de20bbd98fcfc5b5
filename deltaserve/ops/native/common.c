/* Number formats, products, threads and scratch: see kernels.h. */
#include "kernels.h"

/* ---- number formats ------------------------------------------------------------------------------------------ */

static float as_float(uint32_t x) {
    float y;
    memcpy(&y, &x, sizeof(y));
    return y;
}

static uint32_t as_bits(float x) {
    uint32_t y;
    memcpy(&y, &x, sizeof(y));
    return y;
}

static float from_float16(uint16_t x) {
    uint32_t magnitude = x & 0x7fff, sign = (uint32_t)(x & 0x8000) << 16;
    if (magnitude >= 0x7c00) return as_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    return as_float(sign | as_bits(as_float(magnitude << 13) * 0x1p112f));
}

static float from_float8(uint8_t x) {
    uint32_t magnitude = x & 0x7f, sign = (uint32_t)(x & 0x80) << 24;
    if (magnitude == 0x7f) return as_float(sign | 0x7fc00000);
    return as_float(sign | as_bits(as_float(magnitude << 20) * 0x1p120f));
}

/* Drops `shift` low bits of x, rounding to nearest, ties to even. */
static uint32_t drop_bits(uint32_t x, int shift) { return (x + (1u << (shift - 1)) - 1 + (x >> shift & 1)) >> shift; }

static uint16_t to_bfloat16(float x) {
    if (x != x) return 0x7fc0;
    return (uint16_t)drop_bits(as_bits(x), 16);
}

/* To a format with `mantissa` bits whose exponent bias is smaller by `bias`: normal numbers by dropping bits, small ones
 * by letting float32 round at the format's last place. */
static uint32_t to_small(float size, int mantissa, int bias) {
    float least = as_float((uint32_t)(bias + 1) << 23);
    if (size < least) {
        float one_place = as_float((uint32_t)(bias + 1 + 23 - mantissa) << 23);
        return as_bits(size + one_place) - as_bits(one_place);
    }
    return drop_bits(as_bits(size) - ((uint32_t)bias << 23), 23 - mantissa);
}

static uint16_t to_float16(float x) {
    uint16_t sign = (uint16_t)(as_bits(x) >> 16 & 0x8000);
    if (x != x) return sign | 0x7e00;
    uint32_t y = fabsf(x) < 65520.0f ? to_small(fabsf(x), 10, 112) : 0x7c00;
    return (uint16_t)(sign | y);
}

static uint8_t to_float8(float x) {
    uint8_t sign = (uint8_t)(as_bits(x) >> 24 & 0x80);
    if (x != x) return sign | 0x7f;
    return (uint8_t)(sign | to_small(fabsf(x) < 448.0f ? fabsf(x) : 448.0f, 3, 120));
}

void widen(const void *from, enum kind kind, long n, float *to) {
    const uint16_t *half = from;
    const uint8_t *quarter = from;
    if (kind == FLOAT32) memcpy(to, from, (size_t)n * sizeof(float));
    else if (kind == BFLOAT16) for (long i = 0; i < n; i++) to[i] = as_float((uint32_t)half[i] << 16);
    else if (kind == FLOAT16) for (long i = 0; i < n; i++) to[i] = from_float16(half[i]);
    else for (long i = 0; i < n; i++) to[i] = from_float8(quarter[i]);
}

void narrow(const float *from, long n, enum kind kind, void *to) {
    uint16_t *half = to;
    uint8_t *quarter = to;
    if (kind == FLOAT32) memcpy(to, from, (size_t)n * sizeof(float));
    else if (kind == BFLOAT16) for (long i = 0; i < n; i++) half[i] = to_bfloat16(from[i]);
    else if (kind == FLOAT16) for (long i = 0; i < n; i++) half[i] = to_float16(from[i]);
    else for (long i = 0; i < n; i++) quarter[i] = to_float8(from[i]);
}

void round_to(enum kind kind, long n, float *x) {
    uint16_t kept[GRID];
    if (kind == FLOAT32) return;
    for (long i = 0; i < n; i += GRID) {
        narrow(x + i, min_of(GRID, n - i), kind, kept);
        widen(kept, kind, min_of(GRID, n - i), x + i);
    }
}

/* ---- products ------------------------------------------------------------------------------------------------ */

/* `rows` times `vecs` accumulators fill the registers. With narrower registers a tile is one vector wide. */
enum { TILE_ROWS = 6, TILE_VECS = 4, TALL_ROWS = 12 };

/* One tile of `product`; `part` is the number of columns in its last vector. */
INLINE void tile(const int rows, const int vecs, long part, long K, const float *a, long am, long ak, const float *b,
                 long bk, float *c, long cm, int add) {
    vec sum[TALL_ROWS][TILE_VECS] = {{{0}}};
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int n = 0; n < vecs; n++)
            if (add) sum[m][n] = part == LANES ? load(c + m * cm + n * LANES) : load_part(c + m * cm, part);
    for (long k = 0; k < K; k++) {
        vec w[TILE_VECS];
        UNROLL for (int n = 0; n < vecs; n++)
            w[n] = part == LANES ? load(b + k * bk + n * LANES) : load_part(b + k * bk, part);
        UNROLL for (int m = 0; m < rows; m++) {
            float x = a[m * am + k * ak];
            UNROLL for (int n = 0; n < vecs; n++) sum[m][n] += x * w[n];
        }
    }
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int n = 0; n < vecs; n++)
            if (part == LANES) store(c + m * cm + n * LANES, sum[m][n]);
            else memcpy(c + m * cm, &sum[m][n], (size_t)part * sizeof(float));
}

/* One tile of a product with a bfloat16 block of `stride` outputs. */
INLINE void narrow_tile(const int rows, const int vecs, long stride, long K, const float *x, long xm,
                        const uint32_t *pairs, float *y, long ym) {
    vec sum[TILE_ROWS][TILE_VECS] = {{{0}}};
    for (long k = 0; k < K / 2; k++) {
        vec even[TILE_VECS], odd[TILE_VECS];
        UNROLL for (int n = 0; n < vecs; n++) {
            bits both = *(const bits *)(pairs + k * stride + n * LANES);
            even[n] = (vec)(both << 16);
            odd[n] = (vec)(both & 0xffff0000u);
        }
        UNROLL for (int m = 0; m < rows; m++)
            UNROLL for (int n = 0; n < vecs; n++) sum[m][n] += x[m * xm + 2 * k] * even[n];
        UNROLL for (int m = 0; m < rows; m++)
            UNROLL for (int n = 0; n < vecs; n++) sum[m][n] += x[m * xm + 2 * k + 1] * odd[n];
    }
    if (K % 2)
        UNROLL for (int n = 0; n < vecs; n++) {
            vec last = (vec)(*(const bits *)(pairs + K / 2 * stride + n * LANES) << 16);
            UNROLL for (int m = 0; m < rows; m++) sum[m][n] += x[m * xm + K - 1] * last;
        }
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int n = 0; n < vecs; n++) store(y + m * ym + n * LANES, sum[m][n]);
}

/* Rows in tiles of six; `call(rows)` does one. */
#define IN_TILES(M, call, advance)                    \
    for (; M >= TILE_ROWS; M -= TILE_ROWS, advance) { \
        call(6);                                      \
    }                                                 \
    switch (M) {                                      \
        case 5: call(5); break;                       \
        case 4: call(4); break;                       \
        case 3: call(3); break;                       \
        case 2: call(2); break;                       \
        case 1: call(1); break;                       \
        default: break;                               \
    }

static void wide_columns(long M, long K, const float *a, long am, long ak, const float *b, long bk, float *c, long cm,
                         int add) {
#define CALL(rows) tile(rows, TILE_VECS, LANES, K, a, am, ak, b, bk, c, cm, add)
    IN_TILES(M, CALL, (a += TILE_ROWS * am, c += TILE_ROWS * cm))
#undef CALL
}

static void one_vector(long M, long K, const float *a, long am, long ak, const float *b, long bk, float *c, long cm,
                       int add) {
#define CALL(rows) tile(rows, 1, LANES, K, a, am, ak, b, bk, c, cm, add)
    for (; M >= TALL_ROWS; M -= TALL_ROWS, a += TALL_ROWS * am, c += TALL_ROWS * cm) CALL(TALL_ROWS);
    IN_TILES(M, CALL, (a += TILE_ROWS * am, c += TILE_ROWS * cm))
#undef CALL
}

void product(long M, long N, long K, const float *a, long am, long ak, const float *b, long bk, float *c, long cm,
             int add) {
    for (; N >= TILE_VECS * LANES; N -= TILE_VECS * LANES, b += TILE_VECS * LANES, c += TILE_VECS * LANES)
        wide_columns(M, K, a, am, ak, b, bk, c, cm, add);
    for (; N >= LANES; N -= LANES, b += LANES, c += LANES) one_vector(M, K, a, am, ak, b, bk, c, cm, add);
    if (N)
        for (long m = 0; m < M; m++) tile(1, 1, N, K, a + m * am, am, ak, b, bk, c + m * cm, cm, add);
}

static void narrow_wide_columns(long M, long K, const float *x, long xm, const uint32_t *pairs, float *y, long ym) {
#define CALL(rows) narrow_tile(rows, TILE_VECS, TILE_VECS *LANES, K, x, xm, pairs, y, ym)
    IN_TILES(M, CALL, (x += TILE_ROWS * xm, y += TILE_ROWS * ym))
#undef CALL
}

static void narrow_one_vector(long M, long stride, long K, const float *x, long xm, const uint32_t *pairs, float *y,
                              long ym) {
#define CALL(rows) narrow_tile(rows, 1, stride, K, x, xm, pairs, y, ym)
    IN_TILES(M, CALL, (x += TILE_ROWS * xm, y += TILE_ROWS * ym))
#undef CALL
}

/* From this many rows on, widening a block once costs less than widening it for every tile of rows. */
enum { MANY_ROWS = 24 };

static void widen_block(const uint32_t *pairs, long ins, long width, float *to) {
    for (long k = 0; k < (ins + 1) / 2; k++)
        for (long n = 0; n < width; n += LANES) {
            bits both = *(const bits *)(pairs + k * width + n);
            store(to + 2 * k * width + n, (vec)(both << 16));
            store(to + (2 * k + 1) * width + n, (vec)(both & 0xffff0000u));
        }
}

void block_product(const struct matrix *w, long block, long M, const float *x, long xm, float *y, long ym,
                   float *scratch) {
    long width = min_of(GRID, round_up(w->outs, LANES) - block * GRID);
    if (w->kind == FLOAT32) {
        product(M, width, w->ins, x, xm, 1, (const float *)w->data + block * GRID * w->ins, width, y, ym, 0);
        return;
    }
    long padded = round_up(w->ins, 2);
    const uint32_t *pairs = (const uint32_t *)w->data + block * GRID * padded / 2;
    if (M >= MANY_ROWS) {
        for (long k = 0; k < w->ins; k += WIDENED) {
            long ins = min_of(WIDENED, w->ins - k);
            widen_block(pairs + k / 2 * width, ins, width, scratch);
            product(M, width, ins, x + k, xm, 1, scratch, width, y, ym, k > 0);
        }
    } else if (width == TILE_VECS * LANES) {
        narrow_wide_columns(M, w->ins, x, xm, pairs, y, ym);
    } else {
        for (long n = 0; n < width; n += LANES) narrow_one_vector(M, width, w->ins, x, xm, pairs + n, y + n, ym);
    }
}
