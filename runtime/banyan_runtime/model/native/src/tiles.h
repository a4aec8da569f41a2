// Products of bfloat16 with AMX: an instruction multiplies a tile of up to 16 rows of activations, 32 inputs wide, with a tile of weights,
// 32 inputs and 16 outputs, and adds them to a tile of sums. Panels and rounded activations are those of pairs.h.
//
// A sum takes 32 inputs after 32 inputs, whatever the number of rows: so a row has the same bits in any company.
#pragma once

#if defined(__AMX_BF16__)

#include <cstdint>

#include <sys/syscall.h>
#include <unistd.h>

#include "pairs.h"

class Tiles : public Dense<Pairs> {
  public:
    // Whether the kernel lets this process use tiles. Asked once, for all threads, before any of them does.
    static bool permitted() {
        constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
        static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
        return granted;
    }

    static void multiply(const Panels &panels, const Rows &rows, const Target &target, int64_t begin, int64_t end) {
        // Tiles of equally many rows need one configuration only. What the last one has too many is computed, and forgotten.
        const int tiles = (rows.count + 15) / 16, height = (rows.count + tiles - 1) / tiles;
        const Work work{panels, Rounded::of(rows, panels.width), target, rows.count, height};
        configure(height);
        for (int64_t p = begin; p < end; p += 2) {  // two panels stay in the cache while all rows meet them
            const bool both = p + 1 < end;
            int t = 0;
            for (; t + 2 <= tiles; t += 2) {
                block<2, 1>(work, t, p);
                if (both) block<2, 1>(work, t, p + 1);
            }
            if (t == tiles) continue;
            both ? block<1, 2>(work, t, p) : block<1, 1>(work, t, p);
        }
        _tile_release();  // the kernel saves what is not released with every switch of threads
    }

  private:
    static_assert(LANES == 16, "a tile of sums is as wide as a register");

    struct Work {
        const Panels &panels;
        const Rounded &inputs;
        const Target &target;
        int rows, height;
    };

    // Compilers may believe that the instructions for tiles read no memory: what they read is written before this.
    static void settle(const void *at) { asm volatile("" ::"r"(at) : "memory"); }

    // Tiles 0 to 3 are sums, 4 and 5 activations, 6 and 7 weights.
    static void configure(int height) {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {};  // of a row
            uint8_t rows[16] = {};
        } wanted;
        for (int i = 0; i < 8; i++) wanted.bytes[i] = 64, wanted.rows[i] = i < 6 ? height : 16;
        settle(&wanted);
        _tile_loadconfig(&wanted);
    }

    // One or two tiles of rows with one or two panels: four sums at a time hide how long each takes.
    template <int ROWS, int PANELS>
    __attribute__((noinline)) static void block(const Work &work, int tile, int64_t panel) {
        static_assert(ROWS * PANELS <= 2);
        const Line *inputs = work.inputs.line(tile * work.height);
        const int64_t stride = work.inputs.bytes_of_row(), words = words_of_panel(work.panels.width);
        const uint32_t *weights = work.panels.words + panel * words;
        settle(inputs);
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (ROWS * PANELS == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t k = 0; k < Line::needed(work.panels.width); k++, weights += 16 * PANEL) {
            if constexpr (ROWS == 1)  // whose weights come from memory more often than not
                for (int p = 0; p < PANELS; p++)
                    for (int w = 0; w < 16 * PANEL; w += 16) __builtin_prefetch(weights + p * words + w + AHEAD);
            _tile_loadd(4, inputs + k, stride);
            _tile_loadd(6, weights, PANEL * 4);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, weights + 16, PANEL * 4);
            _tile_dpbf16ps(1, 4, 7);
            if constexpr (ROWS == 2) {
                _tile_loadd(5, (const char *)(inputs + k) + work.height * stride, stride);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            if constexpr (PANELS == 2) {
                _tile_loadd(6, weights + words, PANEL * 4);
                _tile_dpbf16ps(2, 4, 6);
                _tile_loadd(7, weights + words + 16, PANEL * 4);
                _tile_dpbf16ps(3, 4, 7);
            }
        }
        alignas(64) float sums[2][16][PANEL];
        _tile_stored(0, &sums[0][0][0], PANEL * 4);
        _tile_stored(1, &sums[0][0][LANES], PANEL * 4);
        if constexpr (ROWS * PANELS == 2) {
            _tile_stored(2, &sums[1][0][0], PANEL * 4);
            _tile_stored(3, &sums[1][0][LANES], PANEL * 4);
        }
        for (int r = 0; r < ROWS; r++)
            for (int p = 0; p < PANELS; p++) put(work, tile + r, panel + p, sums[r + p]);
    }

    static void put(const Work &work, int tile, int64_t panel, const float (*sums)[PANEL]) {
        const int first = tile * work.height;
        for (int m = 0; m < work.height && first + m < work.rows; m++)
            work.panels.put(work.target, first + m, panel, load(sums[m]), load(sums[m] + LANES));
    }

    static constexpr int AHEAD = 1024;  // words
};

#endif
