// Weights of 8 bits, 6 or 5, or values of a table: they meet activations of 16 bits, which cost no more than what bfloat16 leaves of them would.
#pragma once

#include <cstdint>

#include "blocks.h"
#include "digits.h"
#include "formats.h"
#include "simd.h"

// Pairs of 16 bits.
struct PairSum {
    I sum = {};

    __attribute__((always_inline)) void add(U weights, U inputs) {
#if defined(__AVX512VNNI__)
        sum = (I)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)weights, (__m512i)inputs);
#elif defined(__AVX512BW__)
        sum += (I)_mm512_madd_epi16((__m512i)weights, (__m512i)inputs);
#elif defined(__AVX2__)
        sum += (I)_mm256_madd_epi16((__m256i)weights, (__m256i)inputs);
#elif defined(__SSE2__)
        sum += (I)_mm_madd_epi16((__m128i)weights, (__m128i)inputs);
#else
        sum += ((I)weights >> 16) * ((I)inputs >> 16) + ((I)(weights << 16) >> 16) * ((I)(inputs << 16) >> 16);
#endif
    }
    __attribute__((always_inline)) F value() const { return __builtin_convertvector(sum, F); }
};

template <class Digit>
INLINE U spread_word(const Digit *numbers, int word) {
    return U{} + load_as<uint32_t>(reinterpret_cast<const char *>(numbers) + 4 * word);
}

struct ByteMeeting {
    using Activations = Digits<int16_t, 32767>;
    using Sum = PairSum;
    static constexpr int WORDS = 2;

    INLINE void unpack(U bytes, U (&to)[2]) {
        typedef int16_t Halves __attribute__((vector_size(LANES * 4)));
        to[0] = (U)((Halves)bytes << 8 >> 8);
        to[1] = (U)((Halves)bytes >> 8);
    }
    INLINE U spread(const int16_t *numbers, int word) { return spread_word(numbers, word); }
    INLINE void values(uint32_t bytes, float scale, float shift, float *to) {
        for (int i = 0; i < 4; i++) to[i] = (float)(int8_t)(bytes >> PLACE[i]) * scale + shift;
    }
};

template <class Format>
using Bytes = Blocks<Format, ByteMeeting>;
