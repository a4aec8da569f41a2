// Activations that go into a product, and where its sums go.
#pragma once

#include <cstdint>

#include "simd.h"

constexpr int PANEL = 2 * LANES;  // outputs that are computed together

// Registers for sums: the rest holds weights, and inputs that are spread.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int SUMS = 24;
#else
constexpr int SUMS = 12;
#endif
constexpr int MOST_ROWS = SUMS / 2;  // of one tile

// Three rows and two panels would leave too few registers of 16 for what is read, and half the speed.
constexpr int panels_of_tile(int rows) { return 8 * rows <= SUMS ? 4 : 4 * rows <= SUMS && (rows != 3 || SUMS > 12) ? 2 : 1; }

struct Rows {  // float activations [count][width], rows `stride` apart
    const float *at;
    int64_t stride;
    int count;

    const float *row(int index) const { return at + index * stride; }
};

struct Target {  // float [count][outputs]
    float *at;
    int64_t stride;
    const float *bias = nullptr;  // [outputs], added
    bool add = false;             // to what is there
};

// A panel's sums of one row, to outputs `first` and up, of which `count` exist.
INLINE void put(const Target &target, int row, int64_t first, int64_t count, F low, F high) {
    float *at = target.at + row * target.stride + first;
    if (count >= PANEL) {
        if (target.bias) low += load(target.bias + first), high += load(target.bias + first + LANES);
        if (target.add) low = load(at) + low, high = load(at + LANES) + high;
        store(at, low);
        store(at + LANES, high);
        return;
    }
    float values[PANEL];
    store(values, low);
    store(values + LANES, high);
    for (int64_t i = 0; i < count; i++) {
        float value = values[i];
        if (target.bias) value += target.bias[first + i];
        at[i] = target.add ? at[i] + value : value;
    }
}

// Packed weights of outputs `first` and up, panel after panel.
struct Panels {
    const uint32_t *words;
    int64_t width, first, outputs;

    void put(const Target &target, int row, int64_t panel, F low, F high) const {
        ::put(target, row, first + panel * PANEL, outputs - panel * PANEL, low, high);
    }
};
