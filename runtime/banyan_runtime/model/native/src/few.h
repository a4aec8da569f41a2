// Attention of few rows, which reads keys and values where they lie: to copy them as floats first, as many rows have it, would cost
// more than the products. Every sum runs over the same numbers in the same order as there (attention.h), so its bits are the same.
#pragma once

#include <cstdint>

#include "simd.h"

constexpr int CHUNK = 64;  // positions at a time

INLINE F as_floats(const float *at) { return load(at); }
INLINE F as_floats(const uint16_t *at) { return widen(at); }

INLINE void four_sums(F a, F b, F c, F d, float *to) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
    auto fold = [](F v) { return _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1)); };
    const __m256 w = fold(a), x = fold(b), y = fold(c), z = fold(d);
#else
    const __m256 w = (__m256)a, x = (__m256)b, y = (__m256)c, z = (__m256)d;
#endif
    const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(w, x), _mm256_hadd_ps(y, z));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
#else
    to[0] = sum_of(a), to[1] = sum_of(b), to[2] = sum_of(c), to[3] = sum_of(d);
#endif
}

// `Number` is what the pool holds. cells[CHUNK]: where the key of each position lies, its value `width` behind it; behind the last
// position any that can be read. `width` fills whole registers.
template <class Number>
class Few {
  public:
    static constexpr int ROWS = 8;  // of more it is cheaper to copy

    // Scores [rows][CHUNK] of queries [rows][width]. `ahead(j, count)` is called before positions [j, j + count) are read, once.
    template <class Ahead>
    static void score(const float *queries, int rows, int width, const Number *const *cells, int here, float *scores, Ahead ahead) {
        auto none = [](int, int) {};
        int r = 0;
        if (rows == 1)
            some<1, 4>(queries, width, cells, here, scores, ahead), r = 1;
        else if (rows == 2)
            some<2, 4>(queries, width, cells, here, scores, ahead), r = 2;
        else if (rows == 3 || rows == 5 || rows == 6)
            some<3, 2>(queries, width, cells, here, scores, ahead), r = 3;
        else
            some<4, 2>(queries, width, cells, here, scores, ahead), r = 4;
        switch (rows - r) {
        case 0: return;
        case 1: return some<1, 4>(queries + r * width, width, cells, here, scores + r * CHUNK, none);
        case 2: return some<2, 4>(queries + r * width, width, cells, here, scores + r * CHUNK, none);
        case 3: return some<3, 2>(queries + r * width, width, cells, here, scores + r * CHUNK, none);
        default: return some<4, 2>(queries + r * width, width, cells, here, scores + r * CHUNK, none);
        }
    }

    // sums [rows][width] += weights [rows][CHUNK] @ values.
    static void add(const float *weights, int rows, int width, const Number *const *cells, int here, float *sums) {
        for (int r = 0; r < rows;) {
            const int left = rows - r, count = left == 5 ? 3 : left < 4 ? left : 4;
            for (int i = 0; i < width;) {
                const int wide = width - i >= 2 * LANES ? 2 : 1;
                add_some(count, wide, weights + r * CHUNK, width, cells, i, here, sums + r * width + i);
                i += wide * LANES;
            }
            r += count;
        }
    }

  private:
    template <int ROWS, int KEYS, class Ahead>
    __attribute__((noinline)) static void some(const float *queries, int width, const Number *const *cells, int here, float *scores, Ahead ahead) {
        for (int j = 0; j < here; j += KEYS) {
            ahead(j, KEYS);
            F sums[ROWS][KEYS] = {};
            for (int i = 0; i < width; i += LANES) {
                F key[KEYS];
#pragma GCC unroll 8
                for (int n = 0; n < KEYS; n++) key[n] = as_floats(cells[j + n] + i);
#pragma GCC unroll 8
                for (int m = 0; m < ROWS; m++) {
                    const F query = load(queries + m * width + i);
#pragma GCC unroll 8
                    for (int n = 0; n < KEYS; n++) sums[m][n] = fma(query, key[n], sums[m][n]);
                }
            }
#pragma GCC unroll 8
            for (int m = 0; m < ROWS; m += 4 / KEYS) {
                float four[4];
                const F *next = sums[m + 1 < ROWS ? m + 1 : m];
                if constexpr (KEYS == 4)
                    four_sums(sums[m][0], sums[m][1], sums[m][2], sums[m][3], four);
                else
                    four_sums(sums[m][0], sums[m][1], next[0], next[1], four);
                for (int n = 0; n < 4 && m + n / KEYS < ROWS; n++) scores[(m + n / KEYS) * CHUNK + j + n % KEYS] = four[n];
            }
        }
    }

    static void add_some(int rows, int wide, const float *weights, int width, const Number *const *cells, int from, int here, float *sums) {
        switch (rows * 2 + wide) {
        case 3: return add_tile<1, 1>(weights, width, cells, from, here, sums);
        case 4: return add_tile<1, 2>(weights, width, cells, from, here, sums);
        case 5: return add_tile<2, 1>(weights, width, cells, from, here, sums);
        case 6: return add_tile<2, 2>(weights, width, cells, from, here, sums);
        case 7: return add_tile<3, 1>(weights, width, cells, from, here, sums);
        case 8: return add_tile<3, 2>(weights, width, cells, from, here, sums);
        case 9: return add_tile<4, 1>(weights, width, cells, from, here, sums);
        default: return add_tile<4, 2>(weights, width, cells, from, here, sums);
        }
    }

    template <int ROWS, int WIDE>
    __attribute__((noinline)) static void add_tile(const float *weights, int width, const Number *const *cells, int from, int here, float *to) {
        F sums[ROWS][WIDE];
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
            for (int n = 0; n < WIDE; n++) sums[m][n] = load(to + m * width + n * LANES);
        for (int j = 0; j < here; j++) {
            F value[WIDE];
#pragma GCC unroll 8
            for (int n = 0; n < WIDE; n++) value[n] = as_floats(cells[j] + width + from + n * LANES);
#pragma GCC unroll 8
            for (int m = 0; m < ROWS; m++) {
                const F weight = splat(weights[m * CHUNK + j]);
#pragma GCC unroll 8
                for (int n = 0; n < WIDE; n++) sums[m][n] = fma(weight, value[n], sums[m][n]);
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
            for (int n = 0; n < WIDE; n++) store(to + m * width + n * LANES, sums[m][n]);
    }
};
