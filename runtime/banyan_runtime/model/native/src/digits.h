// Activations as whole numbers, for products with weights that are such themselves.
//
// Each group of 32 inputs has a scale: its largest activation becomes MOST. Sums of products are then exact in any order, and a row has
// the same bits whatever is computed beside it.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "origin.h"
#include "rows.h"
#include "simd.h"

// Numbers of LANES words each, in their order.
INLINE void narrow_to(int16_t *to, const I *from, int count) {
    for (int i = 0; i < count; i++) {
        typedef int16_t Half __attribute__((vector_size(LANES * 2)));
        const Half half = __builtin_convertvector(from[i], Half);
        std::memcpy(to + i * LANES, &half, sizeof half);
    }
}

// A byte each. Of every four numbers the middle ones change places, as those of weights do (formats.h).
INLINE void narrow_to(int8_t *to, const I *from, int count) {
#if defined(__AVX512BW__)
    const __m128i places = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    for (int i = 0; i < count; i++) _mm_storeu_si128((__m128i *)(to + 16 * i), _mm_shuffle_epi8(_mm512_cvtepi32_epi8((__m512i)from[i]), places));
#elif defined(__AVX2__)
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing works on halves of registers
    const __m256i places = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
    for (int i = 0; i < count; i += 4, to += 32) {
        const __m256i first = _mm256_packs_epi32((__m256i)from[i], (__m256i)from[i + 1]), second = _mm256_packs_epi32((__m256i)from[i + 2], (__m256i)from[i + 3]);
        _mm256_storeu_si256((__m256i *)to, _mm256_shuffle_epi8(_mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), order), places));
    }
#else
    for (int i = 0; i < count * LANES; i++) to[i] = (int8_t)from[i / LANES][(i % LANES & ~3) + (i & 1) * 2 + (i >> 1 & 1)];
#endif
}

// Of all rows. A stretch of inputs of one row lies beside that of the next.
template <class Number, int MOST>
class Digits {
  public:
    using Digit = Number;
    static constexpr int GROUP = 32, GROUPS = 8, STRETCH = GROUPS * GROUP;

    // Each thread keeps what it made last, until it meets others; nothing is allocated once it has grown.
    static const Digits &of(const Rows &rows, int64_t width) {
        thread_local Digits mine;
        if (!mine.origin.holds(rows, width)) mine.make(rows, width);
        return mine;
    }

    // Where groups of a stretch are: of the next row GROUPS further.
    int64_t at(int row, int64_t stretch) const { return (stretch * origin.rows() + row) * GROUPS; }
    const Digit *numbers(int64_t group) const { return digits.data() + group * GROUP; }
    const float *scale(int64_t group) const { return scales.data() + group; }
    const float *sum(int64_t group) const { return sums.data() + group; }               // of the activations themselves
    const float *half_sum(int64_t group) const { return half_sums.data() + 2 * group; }  // of 16 of them

  private:
    void make(const Rows &rows, int64_t width) {
        origin.set(rows, width);
        const int64_t groups = width / GROUP;
        const size_t count = (size_t)rows.count * ((groups + GROUPS - 1) / GROUPS) * GROUPS;
        if (scales.size() < count) scales.resize(count), sums.resize(count), half_sums.resize(2 * count), digits.resize(count * GROUP);
        for (int row = 0; row < rows.count; row++)
            for (int64_t g = 0; g < groups; g++) make(rows.at + row * rows.stride + g * GROUP, at(row, g / GROUPS) + g % GROUPS);
    }

    void make(const float *numbers, size_t group) {
        constexpr int PIECES = GROUP / LANES;
        F most = {}, marks = {};
        for (int i = 0; i < PIECES; i++) {
            const F x = load(numbers + i * LANES);
            most = larger(larger(x, -x), most);
            marks += x - x;  // NaN where x is not finite
        }
        const float largest = largest_of(most);
        const bool any = largest > 1e-30f;  // of what is smaller the inverse would not be finite
        const F inverse = splat(any ? MOST / largest : 0.0f), magic = splat(12582912.0f);
        I whole[PIECES], totals[2] = {};
        for (int i = 0; i < PIECES; i++) {
            whole[i] = (I)fma(load(numbers + i * LANES), inverse, magic) - (I)magic;  // to the nearest
            totals[i / (PIECES / 2)] += whole[i];
        }
        scales[group] = (any ? largest / MOST : 0.0f) + sum_of(marks);
        const float first = sum_of(__builtin_convertvector(totals[0], F)), second = sum_of(__builtin_convertvector(totals[1], F));
        half_sums[2 * group] = first * scales[group], half_sums[2 * group + 1] = second * scales[group];
        sums[group] = (first + second) * scales[group];
        narrow_to(digits.data() + group * GROUP, whole, PIECES);
    }

    std::vector<Digit> digits;
    std::vector<float> scales, sums, half_sums;
    Origin origin;
};
