// GGUF's block formats, packed so that lanes are outputs.
//
// A panel is cut into units of 32 or 256 inputs: what one block of each of its outputs holds, turned. A 32-bit word holds four or
// eight neighbouring inputs of one output, and a unit takes as many bytes as the file does (Q4_K and Q6_K: 3 % and 1 % more). Inputs
// that share a scale are a group.
#pragma once

#include <cstdint>
#include <cstring>

#include "rows.h"
#include "simd.h"

// A float16 each of LANES outputs, which lie side by side.
INLINE F halves(const uint32_t *words, int half) {
    const uint16_t *at = reinterpret_cast<const uint16_t *>(words) + half * LANES;
#if defined(__AVX512F__)
    return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
#elif defined(__AVX2__)
    return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
#else
    U bits;
    for (int i = 0; i < LANES; i++) bits[i] = at[i];
    const F finite = (F)((bits & 0x7fff) << 13) * splat(0x1p112f);
    const U endless = (U)((bits & 0x7c00) == 0x7c00) & 0x7f800000;
    return (F)((U)finite | endless | (bits & 0x8000) << 16);
#endif
}

INLINE void put_half(uint32_t *words, int output, const uint8_t *from) { std::memcpy(reinterpret_cast<uint16_t *>(words) + output, from, 2); }

// Where four inputs stand in a word: the even bytes and the odd ones are neighbours each, so pairs of 16 bits are made by shifts alone.
constexpr int PLACE[4] = {0, 16, 8, 24};

INLINE uint32_t quad(const uint8_t *bytes) { return bytes[0] | bytes[1] << 16 | bytes[2] << 8 | (uint32_t)bytes[3] << 24; }

// The inputs 8 * word ... of numbers below 16: the first four in the lower halves of the bytes, the next four in the upper ones.
INLINE uint32_t octet(const uint8_t *numbers) { return quad(numbers) | quad(numbers + 4) << 4; }

struct Q8_0 {
    static constexpr int BYTES = 34, INPUTS = 32, GROUP = 32;  // of a block; inputs that share a scale
    static constexpr int WORDS = LANES + 8 * PANEL;            // of a unit
    static constexpr bool SHIFTED = false;

    static void pack(const uint8_t *block, int output, uint32_t *unit) {
        put_half(unit, output, block);
        for (int i = 0; i < 8; i++) unit[LANES + i * PANEL + output] = quad(block + 2 + 4 * i);
    }
    INLINE F scale(const uint32_t *unit, int, int half) { return halves(unit, half); }
    INLINE U bytes(const uint32_t *unit, int, int index, int half) { return load_as<U>(unit + LANES + index * PANEL + half * LANES); }
};

struct Q4_0 {
    static constexpr int BYTES = 18, INPUTS = 32, GROUP = 32;
    static constexpr int WORDS = LANES + 4 * PANEL;
    static constexpr bool SHIFTED = true;

    static void pack(const uint8_t *block, int output, uint32_t *unit) {
        put_half(unit, output, block);
        uint8_t numbers[32];
        for (int i = 0; i < 16; i++) numbers[i] = block[2 + i] & 15, numbers[i + 16] = block[2 + i] >> 4;
        for (int i = 0; i < 4; i++) unit[LANES + i * PANEL + output] = octet(numbers + 8 * i);
    }
    INLINE F scale(const uint32_t *unit, int, int half) { return halves(unit, half); }
    INLINE F shift(const uint32_t *unit, int, int half) { return halves(unit, half) * splat(-8.0f); }  // 8 stands for 0
    INLINE U bytes(const uint32_t *unit, int, int index, int half) {
        const U words = load_as<U>(unit + LANES + index / 2 * PANEL + half * LANES);
        return (index % 2 ? words >> 4 : words) & 0x0f0f0f0fu;
    }
};

struct Q4_1 {
    static constexpr int BYTES = 20, INPUTS = 32, GROUP = 32;
    static constexpr int WORDS = 2 * LANES + 4 * PANEL;
    static constexpr bool SHIFTED = true;

    static void pack(const uint8_t *block, int output, uint32_t *unit) {
        put_half(unit, output, block);
        put_half(unit + LANES, output, block + 2);
        uint8_t numbers[32];
        for (int i = 0; i < 16; i++) numbers[i] = block[4 + i] & 15, numbers[i + 16] = block[4 + i] >> 4;
        for (int i = 0; i < 4; i++) unit[2 * LANES + i * PANEL + output] = octet(numbers + 8 * i);
    }
    INLINE F scale(const uint32_t *unit, int, int half) { return halves(unit, half); }
    INLINE F shift(const uint32_t *unit, int, int half) { return halves(unit + LANES, half); }
    INLINE U bytes(const uint32_t *unit, int, int index, int half) {
        const U words = load_as<U>(unit + 2 * LANES + index / 2 * PANEL + half * LANES);
        return (index % 2 ? words >> 4 : words) & 0x0f0f0f0fu;
    }
};

// Eight groups, whose scales and shifts are numbers of 6 bits; a byte each here, a group's in one half of a word.
struct Q4_K {
    static constexpr int BYTES = 144, INPUTS = 256, GROUP = 32;
    static constexpr int SCALES = 2 * LANES, NUMBERS = SCALES + 4 * PANEL, WORDS = NUMBERS + 32 * PANEL;
    static constexpr bool SHIFTED = true;

    static void pack(const uint8_t *block, int output, uint32_t *unit) {
        put_half(unit, output, block);
        put_half(unit + LANES, output, block + 2);
        const uint8_t *packed = block + 4;
        for (int group = 0; group < 8; group++) {
            const int i = group % 4;
            const uint32_t scale = group < 4 ? packed[i] & 63 : (packed[8 + i] & 15) | packed[i] >> 6 << 4;
            const uint32_t shift = group < 4 ? packed[4 + i] & 63 : packed[8 + i] >> 4 | packed[4 + i] >> 6 << 4;
            unit[SCALES + group / 2 * PANEL + output] |= (scale | shift << 8) << group % 2 * 16;
            uint8_t numbers[32];
            for (int n = 0; n < 32; n++) numbers[n] = group % 2 ? block[16 + group / 2 * 32 + n] >> 4 : block[16 + group / 2 * 32 + n] & 15;
            for (int n = 0; n < 4; n++) unit[NUMBERS + (group * 4 + n) * PANEL + output] = octet(numbers + 8 * n);
        }
    }
    INLINE F six(const uint32_t *unit, int group, int half, int which) {
        const U words = load_as<U>(unit + SCALES + group / 2 * PANEL + half * LANES);
        return __builtin_convertvector((I)(words >> (group % 2 * 16 + which * 8) & 63u), F);
    }
    INLINE F scale(const uint32_t *unit, int group, int half) { return six(unit, group, half, 0) * halves(unit, half); }
    INLINE F shift(const uint32_t *unit, int group, int half) { return six(unit, group, half, 1) * -halves(unit + LANES, half); }
    INLINE U bytes(const uint32_t *unit, int group, int index, int half) {
        const U words = load_as<U>(unit + NUMBERS + (group * 4 + index / 2) * PANEL + half * LANES);
        return (index % 2 ? words >> 4 : words) & 0x0f0f0f0fu;
    }
};

// Sixteen groups, whose scales are bytes. A group's numbers are two words of their lower four bits and one of the upper two.
struct Q6_K {
    static constexpr int BYTES = 210, INPUTS = 256, GROUP = 16;
    static constexpr int SCALES = LANES, NUMBERS = SCALES + 4 * PANEL, WORDS = NUMBERS + 48 * PANEL;
    static constexpr bool SHIFTED = false;

    static void pack(const uint8_t *block, int output, uint32_t *unit) {
        put_half(unit, output, block + 208);
        for (int group = 0; group < 16; group++) {
            unit[SCALES + group / 4 * PANEL + output] |= (uint32_t)block[192 + group] << group % 4 * 8;
            uint8_t lower[16], upper[16];
            for (int n = 0; n < 16; n++) {
                const int at = group * 16 + n, side = at / 128, row = at % 128 / 32, column = at % 32;
                lower[n] = block[side * 64 + row % 2 * 32 + column] >> (row / 2 * 4) & 15;
                upper[n] = (block[128 + side * 32 + column] >> (2 * row) & 3) ^ 2;  // 32 stands for 0
            }
            uint32_t *to = unit + NUMBERS + group * 3 * PANEL + output;
            to[0] = octet(lower);
            to[PANEL] = octet(lower + 8);
            for (int n = 0; n < 4; n++) to[2 * PANEL] |= quad(upper + 4 * n) << 2 * n;
        }
    }
    INLINE F scale(const uint32_t *unit, int group, int half) {
        const U words = load_as<U>(unit + SCALES + group / 4 * PANEL + half * LANES);
        return __builtin_convertvector((I)(words << (24 - group % 4 * 8)) >> 24, F) * (halves(unit, half) * splat(0.25f));  // numbers are a byte's upper six bits
    }
    INLINE U bytes(const uint32_t *unit, int group, int index, int half) {
        const uint32_t *at = unit + NUMBERS + group * 3 * PANEL + half * LANES;
        const U lower = load_as<U>(at + index / 2 * PANEL), upper = load_as<U>(at + 2 * PANEL);
        return ((index % 2 ? lower >> 2 : lower << 2) & 0x3c3c3c3cu) | (upper << (6 - 2 * index) & 0xc0c0c0c0u);
    }
};
