// Products of weights and activations that are bfloat16 both, two inputs at a time, for processors with instructions for that.
//
// A word holds two neighbouring inputs of one output, the even one below. Panels are filled up with zeros to whole lines of inputs.
// Activations are rounded to bfloat16, as they are where a model computes in it; sums are floats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dense.h"
#include "origin.h"
#include "rows.h"
#include "simd.h"

struct alignas(64) Line {  // of the cache
    static constexpr int INPUTS = 32;
    uint32_t pairs[INPUTS / 2];

    static int64_t needed(int64_t width) { return (width + INPUTS - 1) / INPUTS; }
};

// sum + inputs * weights. Numbers too small for a normal float count as zeros, and are none of its results.
#if defined(__AVX512BF16__)
INLINE F dot(F sum, U inputs, U weights) { return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)inputs, (__m512bh)weights); }

INLINE void round_line(const float *from, Line &to) {
    for (int half = 0; half < 2; half++) {
        const __m256bh pairs = _mm512_cvtneps_pbh(_mm512_loadu_ps(from + half * 16));
        std::memcpy(to.pairs + half * 8, &pairs, sizeof pairs);
    }
}
#else
// What that instruction does, for tests on processors without it (BANYAN_PAIRS in matrix.h).
INLINE F without_denormals(F x) { return (F)((U)x & ((U)(((U)x & 0x7f800000u) != 0) | 0x80000000u)); }

INLINE F dot(F sum, U inputs, U weights) {
    const F odd = without_denormals((F)(inputs & 0xffff0000u)), even = without_denormals((F)(inputs << 16));
    sum = without_denormals(fma(odd, without_denormals((F)(weights & 0xffff0000u)), without_denormals(sum)));
    return without_denormals(fma(even, without_denormals((F)(weights << 16)), sum));
}

INLINE void round_line(const float *from, Line &to) {
    for (int i = 0; i < Line::INPUTS / 2; i++) to.pairs[i] = narrow(from[2 * i]) | (uint32_t)narrow(from[2 * i + 1]) << 16;
}
#endif

// Activations as bfloat16, with zeros behind them up to a whole line.
class Rounded {
  public:
    // Each thread keeps what it made last, until it meets others; nothing is allocated once it has grown.
    static const Rounded &of(const Rows &rows, int64_t width) {
        thread_local Rounded mine;
        if (!mine.origin.holds(rows, width)) mine.make(rows, width);
        return mine;
    }

    const Line *line(int row) const { return lines.data() + row * stride; }
    const uint32_t *row(int index) const { return line(index)->pairs; }
    int64_t bytes_of_row() const { return stride * (int64_t)sizeof(Line); }

  private:
    void make(const Rows &rows, int64_t width) {
        origin.set(rows, width);
        const int64_t whole = width / Line::INPUTS;
        stride = Line::needed(width) | 1;  // odd, so that the rows of a tile share no set of the cache
        const size_t size = (rows.count + rows.count / 16 + 1) * stride;  // tiles.h reads tiles of equally many rows
        if (lines.size() < size) lines.resize(size);
        for (int m = 0; m < rows.count; m++) {
            const float *row = rows.row(m);
            Line *to = lines.data() + m * stride;
            for (int64_t i = 0; i < whole; i++) round_line(row + i * Line::INPUTS, to[i]);
            if (whole == Line::needed(width)) continue;
            float rest[Line::INPUTS] = {};
            std::memcpy(rest, row + whole * Line::INPUTS, (width - whole * Line::INPUTS) * sizeof(float));
            round_line(rest, to[whole]);
        }
    }

    std::vector<Line> lines;
    int64_t stride = 0;
    Origin origin;
};

struct Pairs {
    using Number = uint16_t;
    using Word = uint32_t;
    using Input = uint32_t;
    using Lanes = U;
    static constexpr int WORDS = PANEL;
    static const Rounded &inputs(const Rows &rows, int64_t width) { return Rounded::of(rows, width); }
    static int64_t steps(int64_t width) { return Line::needed(width) * Line::INPUTS / 2; }
    INLINE void write(Word *panel, int64_t k, int output, Number value) { panel[k / 2 * WORDS + output] |= (Word)value << k % 2 * 16; }
    INLINE float read(const Word *panel, int64_t k, int output) { return widen((uint16_t)(panel[k / 2 * WORDS + output] >> k % 2 * 16)); }
    INLINE void read(const Word *at, Lanes &low, Lanes &high) {
        low = load_as<U>(at);
        high = load_as<U>(at + LANES);
    }
    INLINE U spread(Input input) { return U{} + input; }
    INLINE F join(F sum, U inputs, U weights) { return dot(sum, inputs, weights); }
};
