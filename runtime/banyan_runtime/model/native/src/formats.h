// GGUF's block formats, packed so that lanes are outputs.
//
// A panel is cut into units of 32 or 256 inputs: what one block of each of its outputs holds, turned. A 32-bit word holds four or
// eight neighbouring inputs of one output, and a unit takes as many bytes as the file does, or up to 6 % more (MXFP4). Inputs
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

// A word of the fifth bits of 32 inputs, from numbers below 2: those of inputs 4 * n ... stand n bits up in their bytes.
INLINE uint32_t fifths(const uint8_t *numbers) {
    uint32_t word = 0;
    for (int n = 0; n < 8; n++) word |= quad(numbers + 4 * n) << n;
    return word;
}

// A word of the 16 numbers of 2 bits of a group, as Q2_K and Q3_K have them in 64 bytes: inputs 4 * n ... stand 2 * n bits up.
INLINE uint32_t quarters(const uint8_t *packed, int group) {
    uint8_t numbers[16];
    for (int n = 0; n < 16; n++) numbers[n] = packed[group / 8 * 32 + group % 2 * 16 + n] >> group / 2 % 4 * 2 & 3;
    uint32_t word = 0;
    for (int n = 0; n < 4; n++) word |= quad(numbers + 4 * n) << 2 * n;
    return word;
}

// A group's scale, of four groups whose signed bytes stand in one word.
INLINE F signed_byte(const uint32_t *scales, int group, int half) {
    const U words = load_as<U>(scales + group / 4 * PANEL + half * LANES);
    return __builtin_convertvector((I)(words << (24 - group % 4 * 8)) >> 24, F);
}

// Of sixteen signed bytes those that four numbers below 16 in each word name.
struct Table {
    alignas(16) int8_t values[16];

    __attribute__((always_inline)) U operator[](U numbers) const {
#if defined(__AVX512BW__)
        return (U)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)values)), (__m512i)numbers);
#elif defined(__AVX2__)
        return (U)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)values)), (__m256i)numbers);
#elif defined(__aarch64__)
        return (U)vqtbl1q_s8(vld1q_s8(values), (uint8x16_t)numbers);
#else
        uint8_t from[LANES * 4], to[LANES * 4];
        std::memcpy(from, &numbers, sizeof from);
        for (int i = 0; i < LANES * 4; i++) to[i] = (uint8_t)values[from[i]];
        std::memcpy(&numbers, to, sizeof to);
        return numbers;
#endif
    }
};
constexpr Table UNEVEN{{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}};
constexpr Table E2M1{{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}};  // twice the values

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

// A unit's numbers are four words of their lower four bits and one of the fifth, which stand in a byte's upper five bits; 16 stands for 0.
struct Q5_0 {
    static constexpr int BYTES = 22, INPUTS = 32, GROUP = 32;
    static constexpr int WORDS = LANES + 5 * PANEL;
    static constexpr bool SHIFTED = false;

    static void pack(const uint8_t *block, int output, uint32_t *unit) {
        put_half(unit, output, block);
        uint8_t lower[32], upper[32];
        for (int i = 0; i < 32; i++) lower[i] = block[6 + i % 16] >> i / 16 * 4 & 15, upper[i] = (block[2 + i / 8] >> i % 8 & 1) ^ 1;
        for (int i = 0; i < 4; i++) unit[LANES + i * PANEL + output] = octet(lower + 8 * i);
        unit[LANES + 4 * PANEL + output] = fifths(upper);
    }
    INLINE F scale(const uint32_t *unit, int, int half) { return halves(unit, half) * splat(0.125f); }
    INLINE U bytes(const uint32_t *unit, int, int index, int half) {
        const uint32_t *at = unit + LANES + half * LANES;
        const U lower = load_as<U>(at + index / 2 * PANEL), upper = load_as<U>(at + 4 * PANEL);
        return ((index % 2 ? lower >> 1 : lower << 3) & 0x78787878u) | (upper >> index & 0x01010101u) << 7;
    }
};

struct Q5_1 {
    static constexpr int BYTES = 24, INPUTS = 32, GROUP = 32;
    static constexpr int WORDS = 2 * LANES + 5 * PANEL;
    static constexpr bool SHIFTED = true;

    static void pack(const uint8_t *block, int output, uint32_t *unit) {
        put_half(unit, output, block);
        put_half(unit + LANES, output, block + 2);
        uint8_t lower[32], upper[32];
        for (int i = 0; i < 32; i++) lower[i] = block[8 + i % 16] >> i / 16 * 4 & 15, upper[i] = block[4 + i / 8] >> i % 8 & 1;
        for (int i = 0; i < 4; i++) unit[2 * LANES + i * PANEL + output] = octet(lower + 8 * i);
        unit[2 * LANES + 4 * PANEL + output] = fifths(upper);
    }
    INLINE F scale(const uint32_t *unit, int, int half) { return halves(unit, half); }
    INLINE F shift(const uint32_t *unit, int, int half) { return halves(unit + LANES, half); }
    INLINE U bytes(const uint32_t *unit, int, int index, int half) {
        const uint32_t *at = unit + 2 * LANES + half * LANES;
        const U lower = load_as<U>(at + index / 2 * PANEL), upper = load_as<U>(at + 4 * PANEL);
        return ((index % 2 ? lower >> 4 : lower) & 0x0f0f0f0fu) | (upper >> index & 0x01010101u) << 4;
    }
};

// Numbers that name values of a table.
struct IQ4_NL {
    static constexpr int BYTES = 18, INPUTS = 32, GROUP = 32;
    static constexpr int WORDS = LANES + 4 * PANEL;
    static constexpr bool SHIFTED = false;

    static void pack(const uint8_t *block, int output, uint32_t *unit) { Q4_0::pack(block, output, unit); }
    INLINE F scale(const uint32_t *unit, int, int half) { return halves(unit, half); }
    INLINE U bytes(const uint32_t *unit, int, int index, int half) { return UNEVEN[Q4_0::bytes(unit, 0, index, half)]; }
};

// The scale is a power of 2, written as an exponent in the file and as bfloat16 here.
struct MXFP4 {
    static constexpr int BYTES = 17, INPUTS = 32, GROUP = 32;
    static constexpr int WORDS = LANES + 4 * PANEL;
    static constexpr bool SHIFTED = false;

    static void pack(const uint8_t *block, int output, uint32_t *unit) {
        const uint16_t scale = block[0] < 2 ? 0x20 << block[0] : (block[0] - 1) << 7;  // half of it: the table has twice the values
        put_half(unit, output, reinterpret_cast<const uint8_t *>(&scale));
        uint8_t numbers[32];
        for (int i = 0; i < 32; i++) numbers[i] = block[1 + i % 16] >> i / 16 * 4 & 15;
        for (int i = 0; i < 4; i++) unit[LANES + i * PANEL + output] = octet(numbers + 8 * i);
    }
    INLINE F scale(const uint32_t *unit, int, int half) { return widen(reinterpret_cast<const uint16_t *>(unit) + half * LANES); }
    INLINE U bytes(const uint32_t *unit, int, int index, int half) { return E2M1[Q4_0::bytes(unit, 0, index, half)]; }
};

// Eight groups, whose scales and shifts are numbers of 6 bits; a byte each here, a group's in one half of a word.
struct SixBits {
    static constexpr int SCALES = 2 * LANES, NUMBERS = SCALES + 4 * PANEL;

    static void pack_scales(const uint8_t *block, int output, uint32_t *unit) {
        put_half(unit, output, block);
        put_half(unit + LANES, output, block + 2);
        const uint8_t *packed = block + 4;
        for (int group = 0; group < 8; group++) {
            const int i = group % 4;
            const uint32_t scale = group < 4 ? packed[i] & 63 : (packed[8 + i] & 15) | packed[i] >> 6 << 4;
            const uint32_t shift = group < 4 ? packed[4 + i] & 63 : packed[8 + i] >> 4 | packed[4 + i] >> 6 << 4;
            unit[SCALES + group / 2 * PANEL + output] |= (scale | shift << 8) << group % 2 * 16;
        }
    }
    INLINE F six(const uint32_t *unit, int group, int half, int which) {
        const U words = load_as<U>(unit + SCALES + group / 2 * PANEL + half * LANES);
        return __builtin_convertvector((I)(words >> (group % 2 * 16 + which * 8) & 63u), F);
    }
    INLINE F scale(const uint32_t *unit, int group, int half) { return six(unit, group, half, 0) * halves(unit, half); }
    INLINE F shift(const uint32_t *unit, int group, int half) { return six(unit, group, half, 1) * -halves(unit + LANES, half); }
};

struct Q4_K : SixBits {
    static constexpr int BYTES = 144, INPUTS = 256, GROUP = 32;
    static constexpr int WORDS = NUMBERS + 32 * PANEL;
    static constexpr bool SHIFTED = true;

    static void pack(const uint8_t *block, int output, uint32_t *unit) {
        pack_scales(block, output, unit);
        for (int group = 0; group < 8; group++) {
            uint8_t numbers[32];
            for (int n = 0; n < 32; n++) numbers[n] = block[16 + group / 2 * 32 + n] >> group % 2 * 4 & 15;
            for (int n = 0; n < 4; n++) unit[NUMBERS + (group * 4 + n) * PANEL + output] = octet(numbers + 8 * n);
        }
    }
    INLINE U bytes(const uint32_t *unit, int group, int index, int half) {
        const U words = load_as<U>(unit + NUMBERS + (group * 4 + index / 2) * PANEL + half * LANES);
        return (index % 2 ? words >> 4 : words) & 0x0f0f0f0fu;
    }
};

// A group's numbers are four words of their lower four bits and one of the fifth.
struct Q5_K : SixBits {
    static constexpr int BYTES = 176, INPUTS = 256, GROUP = 32;
    static constexpr int WORDS = NUMBERS + 40 * PANEL;
    static constexpr bool SHIFTED = true;

    static void pack(const uint8_t *block, int output, uint32_t *unit) {
        pack_scales(block, output, unit);
        for (int group = 0; group < 8; group++) {
            uint8_t lower[32], upper[32];
            for (int n = 0; n < 32; n++) {
                lower[n] = block[48 + group / 2 * 32 + n] >> group % 2 * 4 & 15;
                upper[n] = block[16 + n] >> group & 1;
            }
            uint32_t *to = unit + NUMBERS + group * 5 * PANEL + output;
            for (int n = 0; n < 4; n++) to[n * PANEL] = octet(lower + 8 * n);
            to[4 * PANEL] = fifths(upper);
        }
    }
    INLINE U bytes(const uint32_t *unit, int group, int index, int half) {
        const uint32_t *at = unit + NUMBERS + group * 5 * PANEL + half * LANES;
        const U lower = load_as<U>(at + index / 2 * PANEL), upper = load_as<U>(at + 4 * PANEL);
        return ((index % 2 ? lower >> 4 : lower) & 0x0f0f0f0fu) | (upper >> index & 0x01010101u) << 4;
    }
};

// Sixteen groups of numbers of 2 bits, which stand in one word; a byte holds 4 bits of a group's scale and 4 of its shift.
struct Q2_K {
    static constexpr int BYTES = 84, INPUTS = 256, GROUP = 16;
    static constexpr int SCALES = 2 * LANES, NUMBERS = SCALES + 4 * PANEL, WORDS = NUMBERS + 16 * PANEL;
    static constexpr bool SHIFTED = true;

    static void pack(const uint8_t *block, int output, uint32_t *unit) {
        put_half(unit, output, block + 80);
        put_half(unit + LANES, output, block + 82);
        for (int group = 0; group < 16; group++) {
            unit[SCALES + group / 4 * PANEL + output] |= (uint32_t)block[group] << group % 4 * 8;
            unit[NUMBERS + group * PANEL + output] = quarters(block + 16, group);
        }
    }
    INLINE F four(const uint32_t *unit, int group, int half, int which) {
        const U words = load_as<U>(unit + SCALES + group / 4 * PANEL + half * LANES);
        return __builtin_convertvector((I)(words >> (group % 4 * 8 + which * 4) & 15u), F);
    }
    INLINE F scale(const uint32_t *unit, int group, int half) { return four(unit, group, half, 0) * halves(unit, half); }
    INLINE F shift(const uint32_t *unit, int group, int half) { return four(unit, group, half, 1) * -halves(unit + LANES, half); }
    INLINE U bytes(const uint32_t *unit, int group, int index, int half) {
        return load_as<U>(unit + NUMBERS + group * PANEL + half * LANES) >> 2 * index & 0x03030303u;
    }
};

// Sixteen groups, whose scales are bytes. The third bits of two groups' numbers share a word; a number of 4 stands for 0.
struct Q3_K {
    static constexpr int BYTES = 110, INPUTS = 256, GROUP = 16;
    static constexpr int SCALES = LANES, NUMBERS = SCALES + 4 * PANEL, THIRDS = NUMBERS + 16 * PANEL, WORDS = THIRDS + 8 * PANEL;
    static constexpr bool SHIFTED = true;

    static void pack(const uint8_t *block, int output, uint32_t *unit) {
        put_half(unit, output, block + 108);
        const uint8_t *packed = block + 96;
        for (int group = 0; group < 16; group++) {
            const int six = (packed[group % 8] >> group / 8 * 4 & 15) | (packed[8 + group % 4] >> group / 4 * 2 & 3) << 4;
            unit[SCALES + group / 4 * PANEL + output] |= (uint32_t)(uint8_t)(six - 32) << group % 4 * 8;
            unit[NUMBERS + group * PANEL + output] = quarters(block + 32, group);
            uint8_t third[16];
            for (int n = 0; n < 16; n++) third[n] = block[group % 2 * 16 + n] >> group / 2 & 1;
            for (int n = 0; n < 4; n++) unit[THIRDS + group / 2 * PANEL + output] |= quad(third + 4 * n) << (group % 2 * 4 + n);
        }
    }
    INLINE F scale(const uint32_t *unit, int group, int half) { return signed_byte(unit + SCALES, group, half) * halves(unit, half); }
    INLINE F shift(const uint32_t *unit, int group, int half) { return scale(unit, group, half) * splat(-4.0f); }
    INLINE U bytes(const uint32_t *unit, int group, int index, int half) {
        const U lower = load_as<U>(unit + NUMBERS + group * PANEL + half * LANES) >> 2 * index & 0x03030303u;
        const U third = load_as<U>(unit + THIRDS + group / 2 * PANEL + half * LANES) >> (group % 2 * 4 + index) & 0x01010101u;
        return lower | third << 2;
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
        return signed_byte(unit + SCALES, group, half) * (halves(unit, half) * splat(0.25f));  // numbers are a byte's upper six bits
    }
    INLINE U bytes(const uint32_t *unit, int group, int index, int half) {
        const uint32_t *at = unit + NUMBERS + group * 3 * PANEL + half * LANES;
        const U lower = load_as<U>(at + index / 2 * PANEL), upper = load_as<U>(at + 2 * PANEL);
        return ((index % 2 ? lower >> 2 : lower << 2) & 0x3c3c3c3cu) | (upper << (6 - 2 * index) & 0xc0c0c0c0u);
    }
};

// Eight groups, whose scales are bytes.
struct IQ4_XS {
    static constexpr int BYTES = 136, INPUTS = 256, GROUP = 32;
    static constexpr int SCALES = LANES, NUMBERS = SCALES + 2 * PANEL, WORDS = NUMBERS + 32 * PANEL;
    static constexpr bool SHIFTED = false;

    static void pack(const uint8_t *block, int output, uint32_t *unit) {
        put_half(unit, output, block);
        for (int group = 0; group < 8; group++) {
            const int six = (block[4 + group / 2] >> group % 2 * 4 & 15) | (block[2 + group / 4] >> group % 4 * 2 & 3) << 4;
            unit[SCALES + group / 4 * PANEL + output] |= (uint32_t)(uint8_t)(six - 32) << group % 4 * 8;
            uint8_t numbers[32];
            for (int n = 0; n < 32; n++) numbers[n] = block[8 + group * 16 + n % 16] >> n / 16 * 4 & 15;
            for (int n = 0; n < 4; n++) unit[NUMBERS + (group * 4 + n) * PANEL + output] = octet(numbers + 8 * n);
        }
    }
    INLINE F scale(const uint32_t *unit, int group, int half) { return signed_byte(unit + SCALES, group, half) * halves(unit, half); }
    INLINE U bytes(const uint32_t *unit, int group, int index, int half) {
        const U words = load_as<U>(unit + NUMBERS + (group * 4 + index / 2) * PANEL + half * LANES);
        return UNEVEN[(index % 2 ? words >> 4 : words) & 0x0f0f0f0fu];
    }
};
