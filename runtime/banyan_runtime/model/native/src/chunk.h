// Scores and weighted sums of some queries and one chunk of keys and values. Every sum runs over the same numbers in the same order,
// wherever they lie and however many queries there are, so a query's bits are the same in any company.
#pragma once

#include <cstdint>

#include "simd.h"

constexpr int CHUNK = 64;  // positions at a time

INLINE F as_floats(const float *at) { return load(at); }
INLINE F as_floats(const uint16_t *at) { return widen(at); }

// `Number` is what memory holds. cells[CHUNK]: where the key of each position lies, its value `width` behind it; behind the last
// position any that can be read. `width` fills whole registers.
template <class Number>
class Chunk {
  public:
    // Scores [rows][CHUNK] of queries [rows][width]. `ahead(j, count)` is called before positions [j, j + count) are read, once.
    template <class Ahead>
    static void score(const float *queries, int rows, int width, const Number *const *cells, int here, float *scores, Ahead ahead) {
        score_some(together(rows), queries, width, cells, here, scores, ahead);
        for (int r = together(rows); r < rows; r += together(rows - r))
            score_some(together(rows - r), queries + r * width, width, cells, here, scores + r * CHUNK, [](int, int) {});
    }

    // sums [rows][width] += weights [rows][CHUNK] @ values.
    static void add(const float *weights, int rows, int width, const Number *const *cells, int here, float *sums) {
        for (int r = 0; r < rows; r += together(rows - r)) {
            const float *from = weights + r * CHUNK;
            float *to = sums + r * width;
            switch (together(rows - r)) {
            case 1: add_rows<1>(from, width, cells, here, to); break;
            case 2: add_rows<2>(from, width, cells, here, to); break;
            case 3: add_rows<3>(from, width, cells, here, to); break;
            default: add_rows<4>(from, width, cells, here, to);
            }
        }
    }

  private:
    // How many of so many rows meet a position together: what is read of it serves all of them.
    static constexpr int together(int rows) { return rows == 5 || rows == 6 ? 3 : rows < 4 ? rows : 4; }

    template <class Ahead>
    static void score_some(int rows, const float *queries, int width, const Number *const *cells, int here, float *scores, Ahead ahead) {
        switch (rows) {
        case 1: return score_rows<1, 4>(queries, width, cells, here, scores, ahead);
        case 2: return score_rows<2, 4>(queries, width, cells, here, scores, ahead);
        case 3: return score_rows<3, 2>(queries, width, cells, here, scores, ahead);
        default: return score_rows<4, 2>(queries, width, cells, here, scores, ahead);
        }
    }

    template <int ROWS, int KEYS, class Ahead>
    __attribute__((noinline)) static void score_rows(const float *queries, int width, const Number *const *cells, int here, float *scores, Ahead ahead) {
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

    template <int ROWS>
    static void add_rows(const float *weights, int width, const Number *const *cells, int here, float *to) {
        int i = 0;
        for (; i + 2 * LANES <= width; i += 2 * LANES) add_tile<ROWS, 2>(weights, width, cells, i, here, to + i);
        if (i < width) add_tile<ROWS, 1>(weights, width, cells, i, here, to + i);
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
