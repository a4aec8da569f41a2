// Matrices packed for products with a few or many rows of activations.
//
// Outputs are cut into panels of PANEL. Each sum runs over the inputs in one order, from the first to the last, whatever the number of
// rows: that is what makes a row's bits independent of its company, and costs nothing, because the independent sums of a panel (or of
// several) are enough to keep the multipliers busy. How a panel is packed is its kind's matter: dense.h, pairs.h, tiles.h,
// bytes.h, nibbles.h.
#pragma once

#include <cstdint>
#include <vector>

#include "bytes.h"
#include "dense.h"
#include "memory.h"
#include "nibbles.h"
#include "pairs.h"
#include "pool.h"
#include "rows.h"
#include "tiles.h"

enum class Kind : int32_t { f32 = 0, bf16 = 1, q8_0 = 2, q4_0 = 3, q4_1 = 4, q4_k = 5, q6_k = 6, q5_k = 7, q3_k = 8, q2_k = 9, q5_0 = 10, q5_1 = 11, iq4_nl = 12, iq4_xs = 13, mxfp4 = 14 };

// Where the processor multiplies bfloat16, activations are rounded to it too. BANYAN_PAIRS: so they are without such instructions, slowly;
// for tests.
#if defined(__AMX_BF16__)
using Halves = Tiles;
#elif defined(__AVX512BF16__) || defined(BANYAN_PAIRS)
using Halves = Dense<Pairs>;
#else
using Halves = Dense<Bfloat16>;
#endif

// Call `what` with an object of the class that packs and computes a kind.
template <class What>
void as_kind(Kind kind, What &&what) {
    switch (kind) {
    case Kind::f32: return what(Dense<Float32>());
    case Kind::bf16: return what(Halves());
    case Kind::q8_0: return what(Bytes<Q8_0>());
    case Kind::q4_0: return what(Nibbles<Q4_0>());
    case Kind::q4_1: return what(Nibbles<Q4_1>());
    case Kind::q4_k: return what(Nibbles<Q4_K>());
    case Kind::q6_k: return what(Bytes<Q6_K>());
    case Kind::q5_k: return what(Bytes<Q5_K>());
    case Kind::q3_k: return what(Nibbles<Q3_K>());
    case Kind::q2_k: return what(Nibbles<Q2_K>());
    case Kind::q5_0: return what(Bytes<Q5_0>());
    case Kind::q5_1: return what(Bytes<Q5_1>());
    case Kind::iq4_nl: return what(Bytes<IQ4_NL>());
    case Kind::iq4_xs: return what(Bytes<IQ4_XS>());
    case Kind::mxfp4: return what(Bytes<MXFP4>());
    }
}

// One below another the parts of a matrix [outputs][width]; each may be of a kind of its own.
class Matrix {
  public:
    int64_t outputs() const { return ends; }
    int64_t width() const { return inputs; }
    int64_t panels() const { return parts.empty() ? 0 : parts.back().first_panel + parts.back().panels; }
    size_t bytes() const {
        size_t total = 0;
        for (auto &part : parts) total += part.words.count() * 4;
        return total;
    }

    // Take over rows [outputs][width] of numbers of `kind`, or of blocks.
    void append(Kind kind, const void *data, int64_t outputs, int64_t width, Pool &pool) {
        inputs = width;
        const int64_t panels = (outputs + PANEL - 1) / PANEL;
        Part part{kind, ends, outputs, this->panels(), panels, {}};
        as_kind(kind, [&](auto way) {
            const int64_t words = way.words_of_panel(width);
            part.words = Block<uint32_t>(panels * words, Pages::huge);
            pool.run([&](Pool::Member &member) {
                int64_t begin, end;
                member.share(panels, begin, end);
                for (int64_t p = begin; p < end; p++) way.pack(data, p * PANEL, outputs - p * PANEL, width, part.words.get() + p * words);
            });
        });
        ends += outputs;
        parts.push_back(std::move(part));
    }

    // The weights of one output, as floats [width].
    void row(int64_t output, float *to) const {
        for (auto &part : parts) {
            if (output >= part.first + part.outputs) continue;
            const int64_t p = (output - part.first) / PANEL, i = (output - part.first) % PANEL;
            return as_kind(part.kind, [&](auto way) { way.row(part.words.get() + p * way.words_of_panel(inputs), i, inputs, to); });
        }
    }

    // rows @ matrix.T for the panels [begin, end) of all; every thread has panels of its own.
    void multiply(const Rows &rows, const Target &target, int64_t begin, int64_t end) const {
        for (auto &part : parts) {
            const int64_t from = begin > part.first_panel ? begin - part.first_panel : 0;
            const int64_t to = end - part.first_panel < part.panels ? end - part.first_panel : part.panels;
            if (from >= to) continue;
            const Panels panels{part.words.get(), inputs, part.first, part.outputs};
            as_kind(part.kind, [&](auto way) { way.multiply(panels, rows, target, from, to); });
        }
    }

  private:
    struct Part {
        Kind kind;
        int64_t first, outputs;  // of the matrix's
        int64_t first_panel, panels;
        Block<uint32_t> words;
    };

    std::vector<Part> parts;
    int64_t inputs = 0, ends = 0;
};
