// Products with GGUF's block formats: whole numbers meet whole numbers, and each group's sum joins the total of those before it, times
// its scales.
//
// One row reads the packed words. For more, the numbers of a stretch of inputs are unpacked once, and then meet all rows. Sums of groups
// are exact, and join in the same order: so a row has the same bits whatever the number of rows.
//
// What meets what is a `Meeting`'s matter (bytes.h, nibbles.h): the digits that activations become, how many words four numbers of
// LANES outputs are unpacked to, and a Sum of their products.
#pragma once

#include <cstdint>
#include <vector>

#include "formats.h"
#include "rows.h"
#include "simd.h"

// A panel's numbers for a stretch of inputs. One of each thread; kept, so that nothing is allocated once it has grown.
struct Stretch {
    static constexpr int INPUTS = 256;
    U words[INPUTS / 2][2];                            // of the panel's low outputs, and of its high ones
    F scales[INPUTS / 16][2], shifts[INPUTS / 16][2];  // of groups
    std::vector<F> totals;                             // [rows][2]

    static Stretch &mine() {
        thread_local Stretch stretch;
        return stretch;
    }
};

// Compilers would rather keep all rows' inputs in registers than their sums: here these are done before the next row's begin.
template <class V>
INLINE void settle(V &low, V &high) {
#if defined(__x86_64__)
    asm volatile("" : "+v"(low), "+v"(high));
#elif defined(__aarch64__)
    asm volatile("" : "+w"(low), "+w"(high));
#endif
}

// Formats that differ in how their numbers are packed share these.
template <class Meeting, int GROUP, bool SHIFTED, int ROWS>
__attribute__((noinline)) void meet_rows(
    const Stretch &stretch, const typename Meeting::Activations::Digit *numbers, const float *scales, const float *shifts, int groups, F *totals) {
    using Activations = typename Meeting::Activations;
    constexpr int WORDS = GROUP / 4 * Meeting::WORDS, SHARING = Activations::GROUP / GROUP;
    const U(*words)[2] = stretch.words;
    for (int g = 0; g < groups; g++, words += WORDS, numbers += GROUP) {
        typename Meeting::Sum sums[ROWS][2];
#pragma GCC unroll 4
        for (int i = 0; i < WORDS; i++) {
            const U low = words[i][0], high = words[i][1];
#pragma GCC unroll 12
            for (int m = 0; m < ROWS; m++) {
                const U input = Meeting::spread(numbers + m * Activations::STRETCH, i);
                sums[m][0].add(low, input);
                sums[m][1].add(high, input);
                settle(sums[m][0].sum, sums[m][1].sum);
            }
        }
#pragma GCC unroll 12
        for (int m = 0; m < ROWS; m++) {
            const F scale = splat(scales[m * Activations::GROUPS + g / SHARING]);
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                F total = fma(stretch.scales[g][h] * scale, sums[m][h].value(), totals[2 * m + h]);
                if constexpr (SHIFTED) total = fma(stretch.shifts[g][h], splat(shifts[m * Activations::GROUPS * SHARING + g]), total);
                totals[2 * m + h] = total;
            }
        }
        asm volatile("" ::: "memory");  // totals need no registers meanwhile
    }
}

template <class Format, class Meeting>
class Blocks {
  public:
    static int64_t words_of_panel(int64_t width) { return width / Format::INPUTS * Format::WORDS; }

    // Blocks of rows [outputs][width] from output `first` on, of which `count` exist, to a panel in memory that is zeros.
    static void pack(const void *data, int64_t first, int64_t count, int64_t width, uint32_t *panel) {
        const int64_t units = width / Format::INPUTS;
        const auto *blocks = static_cast<const uint8_t *>(data) + first * units * Format::BYTES;
        for (int i = 0; i < PANEL && i < count; i++)
            for (int64_t u = 0; u < units; u++) Format::pack(blocks + (i * units + u) * Format::BYTES, i, panel + u * Format::WORDS);
    }

    // The weights of one of a panel's outputs, as floats [width].
    static void row(const uint32_t *panel, int output, int64_t width, float *to) {
        const int half = output / LANES, lane = output % LANES;
        for (int64_t u = 0; u < width / Format::INPUTS; u++, panel += Format::WORDS)
            for (int g = 0; g < UNIT_GROUPS; g++) {
                const float scale = Format::scale(panel, g, half)[lane], shift = shift_of(panel, g, half)[lane];
                for (int index = 0; index < QUADS; index++, to += 4) Meeting::values(Format::bytes(panel, g, index, half)[lane], scale, shift, to);
            }
    }

    static void multiply(const Panels &panels, const Rows &rows, const Target &target, int64_t begin, int64_t end) {
        const Work work{panels, Activations::of(rows, panels.width), target, rows.count};
        for (int64_t p = begin; p < end; p++) rows.count == 1 ? one(work, p) : many(work, p);
    }

  private:
    using Activations = typename Meeting::Activations;
    using Sum = typename Meeting::Sum;
    static constexpr int GROUP = Format::GROUP, QUADS = GROUP / 4, UNIT_GROUPS = Format::INPUTS / GROUP;
    static constexpr int STRETCH_GROUPS = Stretch::INPUTS / GROUP;
    static constexpr int SHARING = Activations::GROUP / GROUP;  // groups that share a scale of activations
    static constexpr int WORDS = Meeting::WORDS;                // of four numbers
    static constexpr int AHEAD = 1024;                          // words
    static_assert(Stretch::INPUTS == Activations::STRETCH);

    struct Work {
        const Panels &panels;
        const Activations &rows;
        const Target &target;
        int count;

        const uint32_t *panel(int64_t p) const { return panels.words + p * words_of_panel(panels.width); }
        int64_t groups() const { return panels.width / GROUP; }
    };

    INLINE F shift_of(const uint32_t *unit, int g, int half) {
        if constexpr (Format::SHIFTED) return Format::shift(unit, g, half);
        return F{};
    }

    // Sums of activations that share a shift.
    INLINE const float *sums_of(const Activations &rows, int64_t group) { return SHARING == 1 ? rows.sum(group) : rows.half_sum(group); }

    // A row's total after a group joined it.
    INLINE F joined(F total, F scale, F shift, float row_scale, float row_sum, F sum) {
        total = fma(scale * splat(row_scale), sum, total);
        return Format::SHIFTED ? fma(shift, splat(row_sum), total) : total;
    }

    __attribute__((noinline)) static void one(const Work &work, int64_t panel) {
        const uint32_t *unit = work.panel(panel);
        const auto *numbers = work.rows.numbers(0);
        const float *scale = work.rows.scale(0), *sum = sums_of(work.rows, 0);
        F totals[2] = {};
        for (int64_t group = 0; group < work.groups(); group += UNIT_GROUPS, unit += Format::WORDS)
            for (int g = 0; g < UNIT_GROUPS; g++, numbers += GROUP) {
                for (int w = 0; w < Format::WORDS / UNIT_GROUPS; w += 16) __builtin_prefetch(unit + g * Format::WORDS / UNIT_GROUPS + w + AHEAD);
#pragma GCC unroll 2
                for (int h = 0; h < 2; h++) {
                    Sum total;
#pragma GCC unroll 8
                    for (int index = 0; index < QUADS; index++) {
                        U words[WORDS];
                        Meeting::unpack(Format::bytes(unit, g, index, h), words);
#pragma GCC unroll 2
                        for (int w = 0; w < WORDS; w++) total.add(words[w], Meeting::spread(numbers, index * WORDS + w));
                    }
                    totals[h] = joined(totals[h], Format::scale(unit, g, h), shift_of(unit, g, h), scale[(group + g) / SHARING], sum[group + g], total.value());
                }
            }
        work.panels.put(work.target, 0, panel, totals[0], totals[1]);
    }

    static void many(const Work &work, int64_t panel) {
        auto &stretch = Stretch::mine();
        stretch.totals.assign((size_t)work.count * 2, F{});
        const int64_t groups = work.groups();
        for (int64_t s = 0; s * STRETCH_GROUPS < groups; s++) {
            const int64_t left = groups - s * STRETCH_GROUPS;
            const int some = left < STRETCH_GROUPS ? left : STRETCH_GROUPS;
            unpack(work.panel(panel), s * STRETCH_GROUPS, some, stretch);
            int row = 0;
            meet<MOST_ROWS>(work, stretch, s, some, row);
            meet<4>(work, stretch, s, some, row);
            meet<2>(work, stretch, s, some, row);
            meet<1>(work, stretch, s, some, row);
        }
        for (int m = 0; m < work.count; m++) work.panels.put(work.target, m, panel, stretch.totals[2 * m], stretch.totals[2 * m + 1]);
    }

    __attribute__((noinline)) static void unpack(const uint32_t *panel, int64_t group, int count, Stretch &to) {
        U(*words)[2] = to.words;
        for (int i = 0; i < count; i++, group++) {
            const uint32_t *unit = panel + group / UNIT_GROUPS * Format::WORDS;
            const int g = group % UNIT_GROUPS;
            for (int w = 0; w < Format::WORDS / UNIT_GROUPS; w += 16) __builtin_prefetch(unit + g * Format::WORDS / UNIT_GROUPS + w + AHEAD);
            for (int h = 0; h < 2; h++) {
                to.scales[i][h] = Format::scale(unit, g, h);
                if constexpr (Format::SHIFTED) to.shifts[i][h] = Format::shift(unit, g, h);
            }
#pragma GCC unroll 8
            for (int index = 0; index < QUADS; index++, words += WORDS)
                for (int h = 0; h < 2; h++) {
                    U four[WORDS];
                    Meeting::unpack(Format::bytes(unit, g, index, h), four);
                    for (int w = 0; w < WORDS; w++) words[w][h] = four[w];
                }
        }
    }

    // As many times as ROWS rows are left.
    template <int ROWS>
    static void meet(const Work &work, Stretch &stretch, int64_t s, int groups, int &row) {
        for (; row + ROWS <= work.count; row += ROWS) {
            const int64_t at = work.rows.at(row, s);
            meet_rows<Meeting, GROUP, Format::SHIFTED, ROWS>(stretch, work.rows.numbers(at), work.rows.scale(at), sums_of(work.rows, at), groups, &stretch.totals[2 * row]);
        }
    }
};
