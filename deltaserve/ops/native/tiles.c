/* Products of many rows on processors with matrix tiles (AMX): about five times the arithmetic of vectors.
 *
 * Tiles multiply bfloat16 only. The weights are bfloat16 already; a float32 input is the exact sum of three bfloat16 numbers
 * of 8 bits each, so three products of tiles, added up in float32, are one product in float32. A row's result depends on
 * that row alone, as everywhere; but it is not to the bit that of the vector kernels, so callers choose by kind of token
 * (prefill or not), never by how many rows there happen to be.
 */
#include "kernels.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

/* SIDE rows, or outputs, and DEPTH inputs make a tile; PARTS bfloat16 numbers a float32. */
enum { SIDE = 16, DEPTH = 32, PARTS = 3 };

/* Linux lets a process use tiles once it has asked: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). */
static int has_tiles(void) {
    static int answer; /* 0 not asked, 1 yes, 2 no */
    if (!answer) answer = syscall(SYS_arch_prctl, 0x1023, 18) ? 2 : 1;
    return answer == 1;
}

int can_tile(const struct matrix *w) {
    return w->kind == BFLOAT16 && w->ins % DEPTH == 0 && w->outs >= 2 * SIDE && has_tiles();
}

static void configure(void) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = SIDE;
    _tile_loadconfig(&config);
}

/* parts[K / DEPTH][PARTS][2 * SIDE][DEPTH]: up to 32 rows of x, each number as a sum of three; rows behind M are zero. */
static void split(long M, long K, const float *x, long xm, uint16_t *parts) {
    memset(parts, 0, (size_t)(PARTS * 2 * SIDE * K) * sizeof(*parts));
    for (long m = 0; m < M; m++)
        for (long k = 0; k < K; k += LANES) {
            uint16_t *to = parts + (k / DEPTH * PARTS * 2 * SIDE + m) * DEPTH + k % DEPTH;
            __m512 rest = _mm512_loadu_ps(x + m * xm + k);
            for (long p = 0; p < PARTS; p++, to += 2 * SIDE * DEPTH) {
                __m256bh part = _mm512_cvtneps_pbh(rest);
                _mm256_storeu_si256((__m256i *)to, (__m256i)part);
                rest -= (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)part), 16);
            }
        }
}

/* 32 rows times 16 or 32 outputs into y [32][32]; `pairs` of the block begin at the first output, `width` wide. */
static void multiply_tiles(int is_wide, long K, const uint16_t *parts, const uint32_t *pairs, long width, float *y) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < K / DEPTH; k++, pairs += DEPTH / 2 * width) {
        _tile_loadd(6, pairs, width * 4);
        if (is_wide) {
            _tile_loadd(7, pairs + SIDE, width * 4);
        }
        for (long p = 0; p < PARTS; p++, parts += 2 * SIDE * DEPTH) {
            _tile_loadd(4, parts, DEPTH * 2);
            _tile_loadd(5, parts + SIDE * DEPTH, DEPTH * 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(2, 5, 6);
            if (!is_wide) continue;
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, y, 128);
    _tile_stored(1, y + SIDE, 128);
    _tile_stored(2, y + SIDE * 32, 128);
    _tile_stored(3, y + SIDE * 32 + SIDE, 128);
}

long tiles_scratch(const struct matrix *w) { return PARTS * SIDE * w->ins + 4 * SIDE * SIDE; }

void tiles_product(const struct matrix *w, long M, const float *x, long xm, float *y, long ym, float *scratch) {
    long K = w->ins, padded = round_up(w->outs, LANES);
    float *result = scratch;
    uint16_t *parts = (uint16_t *)(scratch + 4 * SIDE * SIDE);
    configure();
    for (long m = 0; m < M; m += 2 * SIDE) {
        long rows = min_of(2 * SIDE, M - m);
        split(rows, K, x + m * xm, xm, parts);
        __asm__ volatile("" ::: "memory"); /* tile loads do not tell the compiler what they read */
        for (long n = 0; n < padded; n += 2 * SIDE) {
            long block = n / GRID * GRID, width = min_of(GRID, padded - block);
            const uint32_t *pairs = (const uint32_t *)w->data + block * K / 2 + n - block;
            multiply_tiles(n + SIDE < padded, K, parts, pairs, width, result);
            for (long i = 0; i < rows; i++)
                memcpy(y + (m + i) * ym + n, result + i * 2 * SIDE,
                       (size_t)min_of(2 * SIDE, w->outs - n) * sizeof(float));
        }
    }
    _tile_release();
}
#else
int can_tile(const struct matrix *w) { return (void)w, 0; }
long tiles_scratch(const struct matrix *w) { return (void)w, 0; }
void tiles_product(const struct matrix *w, long M, const float *x, long xm, float *y, long ym, float *scratch) {
    (void)w, (void)M, (void)x, (void)xm, (void)y, (void)ym, (void)scratch;
}
#endif
