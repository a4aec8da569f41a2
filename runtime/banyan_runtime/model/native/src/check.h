// Whether what was compiled computes rightly on this processor: each part against plain loops, at shapes that reach its corners. It takes
// some milliseconds, and is asked at every start, because the instructions of one machine can be tried on no other.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "activations.h"
#include "attention.h"
#include "matrix.h"
#include "sampler.h"

namespace check {

struct Numbers {  // in [-1, 1), always the same ones
    uint32_t state = 1;
    uint32_t bits() { return state = state * 1664525u + 1013904223u; }
    float operator()() { return (float)(int32_t)bits() / 2147483648.0f; }
};

inline bool near(double found, double wanted, double scale) { return std::fabs(found - wanted) <= 1e-4 * scale; }

inline bool exponentials() {
    for (float x : {0.0f, -0.5f, -87.0f, -10.0f, 20.0f, 1.0f}) {
        const double wanted = std::exp((double)x);
        const F found = exponential(splat(x));
        if (!near(found[LANES - 1], wanted, wanted)) return false;
    }
    const uint32_t bits = 0x7fc00001;  // a NaN that is not the usual one
    float broken;
    std::memcpy(&broken, &bits, 4);
    for (float x : {NAN, broken})
        if (!std::isnan(exponential(splat(x))[0])) return false;
    return exponential(splat(0))[0] == 1 && exponential(splat(-INFINITY))[0] == 0;
}

inline bool curves() {
    for (float x : {0.0f, 1e-4f, -0.3f, 0.62f, -0.63f, 1.7f, -4.0f, 30.0f}) {
        const double wanted = std::tanh((double)x), gelu = x / 2 * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
        if (!near(tangent(splat(x))[LANES - 1], wanted, std::fabs(wanted))) return false;
        if (!near(gelu_tanh(splat(x))[LANES - 1], gelu, std::fabs(x)) || !near(silu(splat(x))[0], x / (1 + std::exp(-(double)x)), std::fabs(x)))
            return false;
    }
    return std::isnan(tangent(splat(NAN))[0]) && std::isnan(gelu_tanh(splat(NAN))[0]) && tangent(splat(-INFINITY))[0] == -1;
}

// A matrix as it comes to be packed, and its values.
struct Weights {
    Kind kind;
    int outputs, width;
    std::vector<uint8_t> data;
    std::vector<double> values;  // [outputs][width]
};

inline Weights numbers(Kind kind) {
    Weights made{kind, 4 * PANEL + 5, 2 * 32 + 7, {}, {}};  // as many panels as are computed at once, one more, and some outputs
    Numbers next;
    for (int i = 0; i < made.outputs * made.width; i++) {
        const uint16_t half = narrow(next());
        const float value = widen(half);
        const auto *bytes = kind == Kind::f32 ? reinterpret_cast<const uint8_t *>(&value) : reinterpret_cast<const uint8_t *>(&half);
        made.data.insert(made.data.end(), bytes, bytes + (kind == Kind::f32 ? 4 : 2));
        made.values.push_back(value);
    }
    return made;
}

inline double half_at(const uint8_t *at) {
    const int bits = at[0] | at[1] << 8, exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const double size = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
    return bits & 0x8000 ? -size : size;
}

// Where a block's float16 stand; -1: it has none there.
struct Places {
    int scale, other;
};

inline Places halves_of(Kind kind) {
    switch (kind) {
    case Kind::q6_k: return {208, -1};
    case Kind::q3_k: return {108, -1};
    case Kind::q2_k: return {80, 82};
    case Kind::q4_1:
    case Kind::q5_1:
    case Kind::q4_k:
    case Kind::q5_k: return {0, 2};
    case Kind::mxfp4: return {-1, -1};
    default: return {0, -1};
    }
}

// The values of a block, as its format is defined.
inline void unpack(Kind kind, const uint8_t *block, double *to) {
    const Places at = halves_of(kind);
    const double scale = at.scale < 0 ? 0 : half_at(block + at.scale), other = at.other < 0 ? 0 : half_at(block + at.other);
    const auto four = [&](int first, int i) { return block[first + i % 16] >> i % 32 / 16 * 4 & 15; };
    const auto fifth = [&](int first, int i) { return (block[first + i / 8] >> i % 8 & 1) << 4; };
    const auto two = [&](int first, int i) { return block[first + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3; };
    switch (kind) {
    case Kind::q8_0:
        for (int i = 0; i < 32; i++) to[i] = scale * (int8_t)block[2 + i];
        break;
    case Kind::q4_0:
        for (int i = 0; i < 32; i++) to[i] = scale * (four(2, i) - 8);
        break;
    case Kind::q4_1:
        for (int i = 0; i < 32; i++) to[i] = scale * four(4, i) + other;
        break;
    case Kind::q5_0:
        for (int i = 0; i < 32; i++) to[i] = scale * ((four(6, i) | fifth(2, i)) - 16);
        break;
    case Kind::q5_1:
        for (int i = 0; i < 32; i++) to[i] = scale * (four(8, i) | fifth(4, i)) + other;
        break;
    case Kind::iq4_nl:
        for (int i = 0; i < 32; i++) to[i] = scale * UNEVEN.values[four(2, i)];
        break;
    case Kind::iq4_xs:
        for (int i = 0; i < 256; i++) {
            const int g = i / 32, six = (block[4 + g / 2] >> g % 2 * 4 & 15) | (block[2 + g / 4] >> g % 4 * 2 & 3) << 4;
            to[i] = scale * (six - 32) * UNEVEN.values[four(8 + g * 16, i)];
        }
        break;
    case Kind::mxfp4:
        for (int i = 0; i < 32; i++) to[i] = std::ldexp(E2M1.values[four(1, i)], block[0] - 128);
        break;
    case Kind::q2_k:
        for (int i = 0; i < 256; i++) to[i] = scale * (block[i / 16] & 15) * two(16, i) - other * (block[i / 16] >> 4);
        break;
    case Kind::q3_k:
        for (int i = 0; i < 256; i++) {
            const int g = i / 16, six = (block[96 + g % 8] >> g / 8 * 4 & 15) | (block[104 + g % 4] >> g / 4 * 2 & 3) << 4;
            to[i] = scale * (six - 32) * ((two(32, i) | (block[i % 32] >> i / 32 & 1) << 2) - 4);
        }
        break;
    case Kind::q4_k:
    case Kind::q5_k:
        for (int i = 0; i < 256; i++) {
            const int g = i / 32;
            const uint8_t *six = block + 4;
            const int times = g < 4 ? six[g] & 63 : (six[g + 4] & 15) | six[g - 4] >> 6 << 4;
            const int less = g < 4 ? six[g + 4] & 63 : six[g + 4] >> 4 | six[g] >> 6 << 4;
            const int first = kind == Kind::q5_k ? 48 : 16, lower = block[first + g / 2 * 32 + i % 32] >> g % 2 * 4 & 15;
            to[i] = scale * times * (lower | (kind == Kind::q5_k ? block[16 + i % 32] >> g & 1 : 0) << 4) - other * less;
        }
        break;
    case Kind::q6_k:
        for (int i = 0; i < 256; i++) {
            const int side = i / 128, row = i % 128 / 32, column = i % 32;
            const int lower = block[side * 64 + row % 2 * 32 + column] >> row / 2 * 4 & 15, upper = block[128 + side * 32 + column] >> 2 * row & 3;
            to[i] = scale * (int8_t)block[192 + i / 16] * ((lower | upper << 4) - 32);
        }
        break;
    default: break;
    }
}

// Blocks of any bytes, but for their float16: from 2^-7 to 2^-3, and one that is less than any normal one.
template <class Format>
Weights blocks(Kind kind) {
    // More inputs than are written out at a time where there are many rows.
    Weights made{kind, 4 * PANEL + 5, (Stretch::INPUTS / Format::INPUTS + 1) * Format::INPUTS, {}, {}};
    const size_t count = (size_t)made.outputs * made.width / Format::INPUTS;
    made.data.resize(count * Format::BYTES);
    made.values.resize(count * Format::INPUTS);
    Numbers next;
    for (auto &byte : made.data) byte = next.bits() >> 24;
    for (size_t i = 0; i < count; i++) {
        uint8_t *block = &made.data[i * Format::BYTES];
        const Places halves = halves_of(kind);
        for (int at : {halves.scale, halves.other})
            if (at >= 0) block[at + 1] = (block[at + 1] & 0x83) | (i ? 8 + (block[at + 1] >> 2) % 5 : 0) << 2;
        if (kind == Kind::mxfp4) block[0] = i ? 120 + block[0] % 5 : 0;
        unpack(kind, block, &made.values[i * Format::INPUTS]);
    }
    return made;
}

template <class Way>
constexpr bool rounds = std::is_base_of_v<Dense<Pairs>, Way>;  // activations to bfloat16

template <class Way>
constexpr int most = 0;  // of the whole numbers that activations become, 32 with one scale; 0: they stay floats
template <class Format>
constexpr int most<Nibbles<Format>> = 127;
template <class Format>
constexpr int most<Bytes<Format>> = 32767;

// What of activations [width] meets weights.
template <class Way>
std::vector<double> met(const float *row, int width) {
    std::vector<double> made(row, row + width);
    if (rounds<Way>)
        for (auto &x : made) x = widen(narrow((float)x));
    for (int group = 0; most<Way> && group < width; group += 32) {
        float largest = 0;
        for (int k = group; k < group + 32; k++) largest = std::max(largest, std::fabs(row[k]));
        for (int k = group; k < group + 32; k++) made[k] = std::nearbyint(row[k] * (most<Way> / largest)) * largest / most<Way>;
    }
    return made;
}

template <class Way>
bool products(Way way, const Weights &weights) {
    constexpr int ROWS = 50;  // several tiles of all sizes
    const int outputs = weights.outputs, width = weights.width, panels = (outputs + PANEL - 1) / PANEL;
    Numbers next;
    std::vector<float> rows(ROWS * width), alone(ROWS * outputs), found(ROWS * outputs), row(width);
    for (auto &x : rows) x = next();
    meetings++;  // what was made of others is not what is made of these
    std::vector<uint32_t> words(panels * way.words_of_panel(width));
    for (int p = 0; p < panels; p++) way.pack(weights.data.data(), p * PANEL, outputs - p * PANEL, width, &words[p * way.words_of_panel(width)]);
    const Panels packed{words.data(), width, 0, outputs};
    for (int m = 0; m < ROWS; m++) way.multiply(packed, {&rows[m * width], width, 1}, {&alone[m * outputs], outputs}, 0, panels);
    for (int m = 0; m < ROWS; m++) {
        const std::vector<double> inputs = met<Way>(&rows[m * width], width);
        for (int o = m % 32; o < outputs; o += m ? 32 : 1) {
            double wanted = 0, size = 0;
            for (int k = 0; k < width; k++) {
                const double part = inputs[k] * weights.values[o * width + k];
                wanted += part, size += std::fabs(part);
            }
            if (!near(alone[m * outputs + o], wanted, size)) return false;
        }
    }
    for (int count : {2, 3, 4, 5, 6, 7, 8, MOST_ROWS, MOST_ROWS + 1, 17, 34, ROWS}) {
        found.assign(found.size(), 0);
        const int first = count > 8 ? ROWS - count : 0;  // wherever they stand; and beside those of before
        const Rows some{&rows[first * width], width, count};
        way.multiply(packed, some, {found.data(), outputs}, 0, 1);
        way.multiply(packed, some, {found.data(), outputs}, 1, panels);
        if (std::memcmp(found.data(), &alone[first * outputs], count * outputs * sizeof(float))) return false;
    }
    for (int o = 0; o < outputs; o += 7) {
        way.row(&words[o / PANEL * way.words_of_panel(width)], o % PANEL, width, row.data());
        for (int k = 0; k < width; k++) {
            const double wanted = weights.values[o * width + k];
            if (!near(row[k], wanted, 0.01 + std::fabs(wanted))) return false;
        }
    }
    return true;
}

inline bool products(const Weights &weights) {
    bool right = false;
    as_kind(weights.kind, [&](auto way) { right = products(way, weights); });
    return right;
}

// A query alone is one of few rows, with others before it one of many: both must be right, and have the same bits.
inline bool attends(bool half, int dim, float cap) {
    constexpr int HEADS = 3, KEYS = SEGMENT + CHUNK + 9, QUERIES = 4;
    Numbers next;
    Cache cache(half);
    cache.add(1, dim);
    cache.make(KEYS);
    const Cells cells = cache.cells(0, 0);
    const Scoring scoring{1 / std::sqrt((float)dim), cap};
    const int width = HEADS * dim;
    std::vector<float> keys(KEYS * dim), values(KEYS * dim), query(QUERIES * width), out(width), outs(QUERIES * width);
    std::vector<int32_t> slots(KEYS);
    for (auto &x : query) x = next();
    for (int j = 0; j < KEYS; j++) {
        slots[j] = KEYS - 1 - j;
        for (int i = 0; i < dim; i++) keys[j * dim + i] = widen(narrow(next())), values[j * dim + i] = widen(narrow(next()));
        cells.put(slots[j], &keys[j * dim], &values[j * dim]);
    }
    Attention attention(HEADS, 1, dim);
    const float *last = query.data() + (QUERIES - 1) * width;
    attention.whole(cells, 0, {slots.data(), 0, 1, KEYS - 1}, scoring, last, width, out.data(), width);
    attention.whole(cells, 0, {slots.data(), 0, QUERIES, KEYS - QUERIES}, scoring, query.data(), width, outs.data(), width);
    if (std::memcmp(out.data(), outs.data() + (QUERIES - 1) * width, width * sizeof(float))) return false;
    for (int h = 0; h < HEADS; h++) {
        std::vector<double> weight(KEYS);
        double mass = 0;
        for (int j = 0; j < KEYS; j++) {
            double score = 0;
            for (int i = 0; i < dim; i++) score += (double)last[h * dim + i] * keys[j * dim + i];
            score *= scoring.scale;
            mass += weight[j] = std::exp(cap ? cap * std::tanh(score / cap) : score);
        }
        for (int i = 0; i < dim; i++) {
            double wanted = 0;
            for (int j = 0; j < KEYS; j++) wanted += weight[j] / mass * values[j * dim + i];
            if (!near(out[h * dim + i], wanted, 1)) return false;
        }
    }
    return true;
}

inline bool hashes() {
    U tokens;
    for (int i = 0; i < LANES; i++) tokens[i] = 977u * (uint32_t)i;
    const U found = noise::hash(U{} + 12345u, tokens);
    for (int i = 0; i < LANES; i++)
        if (found[i] != noise::hash(12345u, 977u * (uint32_t)i)) return false;
    return true;
}

// Tokens are those of the largest score among what the filters leave, up to rounding.
inline bool draws() {
    constexpr int VOCABULARY = 5 * LANES + 3;
    Numbers next;
    Sampler sampler(VOCABULARY);
    std::vector<float> logits(VOCABULARY);
    std::vector<double> likely(VOCABULARY);
    std::vector<int> order(VOCABULARY);
    for (int round = 0; round < 24; round++) {
        for (auto &x : logits) x = 4 * next();
        const float temperature = round % 8 == 7 ? 0.0f : 0.8f, top_p = round % 4 == 1 ? 0.7f : 1.0f, min_p = round % 4 == 2 ? 0.1f : 0.0f;
        const int32_t top_k = round % 4 == 3 ? 9 : 0, position = round;
        const uint64_t seed = 0x123456789abcdefull * round;
        const int64_t token = sampler.draw(logits.data(), {&temperature, &top_p, &min_p, &top_k, &position, &seed}, 0);
        if (token < 0 || token >= VOCABULARY) return false;
        for (int i = 0; i < VOCABULARY; i++) order[i] = i;
        std::sort(order.begin(), order.end(), [&](int one, int other) { return logits[one] > logits[other]; });
        if (temperature == 0) {
            if (token != order[0]) return false;
            continue;
        }
        double mass = 0, before = 0, best = -INFINITY, drawn = -INFINITY;
        for (int i = 0; i < VOCABULARY; i++) mass += likely[i] = std::exp(((double)logits[i] - logits[order[0]]) / temperature);
        for (int rank = 0; rank < VOCABULARY; rank++) {
            const int i = order[rank];
            const double p = likely[i] / mass;
            if (rank && ((top_k && rank >= top_k) || (top_p < 1 && before > top_p) || p < min_p / mass)) break;
            const double score = std::log(p) + noise::gumbel(noise::hash(noise::start(seed, (uint32_t)position), (uint32_t)i));
            best = std::max(best, score);
            if (i == token) drawn = score;
            before += p;
        }
        if (drawn < best - 1e-4) return false;
    }
    logits[VOCABULARY - 1] = NAN;
    const float one = 1, zero = 0;
    const int32_t none = 0;
    const uint64_t seed = 1;
    return sampler.draw(logits.data(), {&one, &one, &zero, &none, &none, &seed}, 0) == -1;
}

// What the kernels do wrongly, in words that follow "its kernels"; null if all is well.
inline const char *everything() {
#if defined(__AMX_BF16__)
    if (!Tiles::permitted()) return "are refused AMX by the operating system";
#endif
    if (!exponentials()) return "compute exponentials wrongly on this processor";
    if (!curves()) return "compute activations wrongly on this processor";
    if (!products(numbers(Kind::f32))) return "compute products in float32 wrongly on this processor";
    if (!products(numbers(Kind::bf16))) return "compute products in bfloat16 wrongly on this processor";
    if (!products(blocks<Q8_0>(Kind::q8_0))) return "compute products in Q8_0 wrongly on this processor";
    if (!products(blocks<Q4_0>(Kind::q4_0))) return "compute products in Q4_0 wrongly on this processor";
    if (!products(blocks<Q4_1>(Kind::q4_1))) return "compute products in Q4_1 wrongly on this processor";
    if (!products(blocks<Q4_K>(Kind::q4_k))) return "compute products in Q4_K wrongly on this processor";
    if (!products(blocks<Q6_K>(Kind::q6_k))) return "compute products in Q6_K wrongly on this processor";
    if (!products(blocks<Q5_K>(Kind::q5_k))) return "compute products in Q5_K wrongly on this processor";
    if (!products(blocks<Q3_K>(Kind::q3_k))) return "compute products in Q3_K wrongly on this processor";
    if (!products(blocks<Q2_K>(Kind::q2_k))) return "compute products in Q2_K wrongly on this processor";
    if (!products(blocks<Q5_0>(Kind::q5_0))) return "compute products in Q5_0 wrongly on this processor";
    if (!products(blocks<Q5_1>(Kind::q5_1))) return "compute products in Q5_1 wrongly on this processor";
    if (!products(blocks<IQ4_NL>(Kind::iq4_nl))) return "compute products in IQ4_NL wrongly on this processor";
    if (!products(blocks<IQ4_XS>(Kind::iq4_xs))) return "compute products in IQ4_XS wrongly on this processor";
    if (!products(blocks<MXFP4>(Kind::mxfp4))) return "compute products in MXFP4 wrongly on this processor";
    for (const int dim : {24, 4 * LANES, 5 * LANES + 2})
        if (!attends(false, dim, 0) || !attends(true, dim, 0.5f)) return "compute attention wrongly on this processor";
    if (!hashes() || !draws()) return "draw tokens wrongly on this processor";
    return nullptr;
}

}  // namespace check
