// Weights of 4 bits or fewer: they meet activations of 8 bits, whose errors are a tenth of the weights' own.
#pragma once

#include <cstdint>

#include "blocks.h"
#include "bytes.h"
#include "digits.h"
#include "formats.h"
#include "simd.h"

struct NibbleMeeting {
#if defined(__AVX2__)
    using Activations = Digits<int8_t, 127>;
    static constexpr int WORDS = 1;

    struct Sum {
#if defined(__AVX512VNNI__)
        I sum = {};

        __attribute__((always_inline)) void add(U weights, U inputs) { sum = (I)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)inputs); }
        __attribute__((always_inline)) F value() const { return __builtin_convertvector(sum, F); }
#elif defined(__AVX512BW__)
        __m512i sum = _mm512_setzero_si512();  // 16 bits hold those of 32 inputs

        __attribute__((always_inline)) void add(U weights, U inputs) { sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16((__m512i)weights, (__m512i)inputs)); }
        __attribute__((always_inline)) F value() const { return (F)_mm512_cvtepi32_ps(_mm512_madd_epi16(sum, _mm512_set1_epi16(1))); }
#else
        __m256i sum = _mm256_setzero_si256();  // 16 bits hold those of 32 inputs

        __attribute__((always_inline)) void add(U weights, U inputs) { sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16((__m256i)weights, (__m256i)inputs)); }
        __attribute__((always_inline)) F value() const { return (F)_mm256_cvtepi32_ps(_mm256_madd_epi16(sum, _mm256_set1_epi16(1))); }
#endif
    };

    INLINE void unpack(U bytes, U (&to)[1]) { to[0] = bytes; }
    INLINE U spread(const int8_t *numbers, int word) { return spread_word(numbers, word); }
#else
    using Activations = Digits<int16_t, 127>;
    using Sum = PairSum;
    static constexpr int WORDS = 2;

    INLINE void unpack(U bytes, U (&to)[2]) {
        to[0] = bytes & 0x00ff00ffu;
        to[1] = bytes >> 8 & 0x00ff00ffu;
    }
    INLINE U spread(const int16_t *numbers, int word) { return spread_word(numbers, word); }
#endif
    INLINE void values(uint32_t bytes, float scale, float shift, float *to) {
        for (int i = 0; i < 4; i++) to[i] = (float)(bytes >> PLACE[i] & 255) * scale + shift;
    }
};

template <class Format>
using Nibbles = Blocks<Format, NibbleMeeting>;
