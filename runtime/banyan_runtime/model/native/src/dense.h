// Products with weights that are floats, or bfloat16.
//
// Within a panel the weights of one input (or of two neighbours: pairs.h) stand side by side, so that an input, spread over a register,
// meets a whole panel with two multiplications, and nothing has to be summed across lanes.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "rows.h"
#include "simd.h"

// How weights are stored, read and multiplied. `Number` is what comes to be packed, `Word` what memory holds, `Input` what of a row is
// spread at a time. A sum takes `steps` of these, for each of which a panel has WORDS words.
struct Float32 {
    using Number = float;
    using Word = float;
    using Input = float;
    using Lanes = F;
    static constexpr int WORDS = PANEL;
    static const Rows &inputs(const Rows &rows, int64_t) { return rows; }
    static int64_t steps(int64_t width) { return width; }
    INLINE void write(Word *panel, int64_t k, int output, Number value) { panel[k * WORDS + output] = value; }
    INLINE float read(const Word *panel, int64_t k, int output) { return panel[k * WORDS + output]; }
    INLINE void read(const Word *at, Lanes &low, Lanes &high) {
        low = load(at);
        high = load(at + LANES);
    }
    INLINE F spread(Input input) { return splat(input); }
    INLINE F join(F sum, F input, F weights) { return fma(input, weights, sum); }
};

// Two bfloat16 to a word: outputs i and i + LANES share one, so that each is widened by one instruction.
struct Bfloat16 {
    using Number = uint16_t;
    using Word = uint32_t;
    using Input = float;
    using Lanes = F;
    static constexpr int WORDS = LANES;
    static const Rows &inputs(const Rows &rows, int64_t) { return rows; }
    static int64_t steps(int64_t width) { return width; }
    INLINE void write(Word *panel, int64_t k, int output, Number value) {
        panel[k * WORDS + output % LANES] |= output < LANES ? value : (Word)value << 16;
    }
    INLINE float read(const Word *panel, int64_t k, int output) {
        const Word word = panel[k * WORDS + output % LANES];
        return widen((uint16_t)(output < LANES ? word : word >> 16));
    }
    INLINE void read(const Word *at, Lanes &low, Lanes &high) {
        const U words = load_as<U>(at);
        low = (F)(words << 16);
        high = (F)(words & 0xffff0000u);
    }
    INLINE F spread(Input input) { return splat(input); }
    INLINE F join(F sum, F input, F weights) { return fma(input, weights, sum); }
};

// Inputs [from, to) of some rows meet some panels, while what lies `ahead` words behind them is fetched: the hardware's own prefetching
// stops where a page ends.
template <class Weights, int ROWS, int PANELS>
INLINE void add_some(const typename Weights::Input *const (&inputs)[ROWS], int64_t from, int64_t to,
                     const typename Weights::Word *const (&weights)[PANELS], int64_t ahead, F (&sums)[ROWS][PANELS][2]) {
    constexpr int LINE = 64 / (int)sizeof(typename Weights::Word);
    auto add = [&](int64_t k, bool fetch) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) {
            const typename Weights::Word *at = weights[p] + k * Weights::WORDS;
            if (fetch)
                for (int w = 0; w < Weights::WORDS; w += LINE) __builtin_prefetch(at + w + ahead);
            typename Weights::Lanes low, high;
            Weights::read(at, low, high);
#pragma GCC unroll 12
            for (int m = 0; m < ROWS; m++) {
                const auto input = Weights::spread(inputs[m][k]);
                sums[m][p][0] = Weights::join(sums[m][p][0], input, low);
                sums[m][p][1] = Weights::join(sums[m][p][1], input, high);
            }
        }
    };
    int64_t k = from;
    if constexpr (PANELS > 1) {  // reading limits, so each line is fetched once only
        constexpr int UNROLL = ROWS == 1 ? 4 : 2;
        for (; k + UNROLL <= to; k += UNROLL)
#pragma GCC unroll 4
            for (int n = 0; n < UNROLL; n++) add(k + n, n * Weights::WORDS % LINE == 0);
    }
#pragma GCC unroll 2
    for (; k < to; k++) add(k, true);
}

template <class Weights, int ROWS, int PANELS>
INLINE void tile(const typename Weights::Input *const (&inputs)[ROWS], int64_t steps, const typename Weights::Word *const (&weights)[PANELS],
                 F (&sums)[ROWS][PANELS][2]) {
#pragma GCC unroll 12
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) sums[m][p][0] = sums[m][p][1] = F{};
    constexpr int64_t MOST = 4096 / PANELS / (int)sizeof(typename Weights::Word) / Weights::WORDS;
    if constexpr (PANELS == 1) return add_some<Weights>(inputs, 0, steps, weights, MOST * Weights::WORDS, sums);
    // Near the ends of these panels the next ones' beginnings are fetched, which lie behind the last of these.
    const int64_t ahead = MOST < steps ? MOST : steps;
    add_some<Weights>(inputs, 0, steps - ahead, weights, ahead * Weights::WORDS, sums);
    add_some<Weights>(inputs, steps - ahead, steps, weights, (ahead + (PANELS - 1) * steps) * Weights::WORDS, sums);
}

template <class Weights>
class Dense {
  public:
    static int64_t words_of_panel(int64_t width) { return Weights::steps(width) * Weights::WORDS; }

    // Rows [outputs][width] of numbers from output `first` on, of which `count` exist, into memory that is zeros.
    static void pack(const void *data, int64_t first, int64_t count, int64_t width, uint32_t *panel) {
        auto *to = reinterpret_cast<Word *>(panel);
        auto *from = static_cast<const typename Weights::Number *>(data) + first * width;
        for (int64_t k = 0; k < width; k++)
            for (int i = 0; i < PANEL && i < count; i++) Weights::write(to, k, i, from[i * width + k]);
    }

    // The weights of one of a panel's outputs, as floats [width].
    static void row(const uint32_t *panel, int output, int64_t width, float *to) {
        auto *at = reinterpret_cast<const Word *>(panel);
        for (int64_t k = 0; k < width; k++) to[k] = Weights::read(at, k, output);
    }

    static void multiply(const Panels &panels, const Rows &rows, const Target &target, int64_t begin, int64_t end) {
        const Work work{panels, Weights::inputs(rows, panels.width), target};
        if (rows.count <= MOST_ROWS) return strips<MOST_ROWS>(work, 0, rows.count, begin, end);
        const int tiles = (rows.count + MOST_ROWS - 1) / MOST_ROWS;
        for (int64_t p = begin; p < end; p++)  // a panel stays in the cache while all rows meet it
            for (int t = 0; t < tiles; t++) {
                const int row = (int64_t)rows.count * t / tiles, next = (int64_t)rows.count * (t + 1) / tiles;
                strips<MOST_ROWS>(work, row, next - row, p, p + 1);
            }
    }

  private:
    using Word = typename Weights::Word;
    using Inputs = std::remove_reference_t<decltype(Weights::inputs(std::declval<Rows>(), 0))>;

    struct Work {
        const Panels &panels;
        Inputs &inputs;
        const Target &target;
    };

    template <int ROWS>
    static void strips(const Work &work, int row, int count, int64_t begin, int64_t end) {
        if constexpr (ROWS > 1)
            if (count < ROWS) return strips<ROWS - 1>(work, row, count, begin, end);
        constexpr int SEVERAL = panels_of_tile(ROWS);
        int64_t p = begin;
        for (; p + SEVERAL <= end; p += SEVERAL) strip<ROWS, SEVERAL>(work, row, p);
        for (; p < end; p++) strip<ROWS, 1>(work, row, p);
    }

    template <int ROWS, int PANELS>
    __attribute__((noinline)) static void strip(const Work &work, int row, int64_t panel) {
        const Panels &panels = work.panels;
        const Word *weights[PANELS];
        for (int p = 0; p < PANELS; p++) weights[p] = reinterpret_cast<const Word *>(panels.words) + (panel + p) * words_of_panel(panels.width);
        const typename Weights::Input *inputs[ROWS];
        for (int m = 0; m < ROWS; m++) inputs[m] = work.inputs.row(row + m);
        F sums[ROWS][PANELS][2];
        tile<Weights, ROWS, PANELS>(inputs, Weights::steps(panels.width), weights, sums);
        for (int m = 0; m < ROWS; m++)
            for (int p = 0; p < PANELS; p++) panels.put(work.target, row + m, panel + p, sums[m][p][0], sums[m][p][1]);
    }
};
