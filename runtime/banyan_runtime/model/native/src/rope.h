// Rotary position embeddings of one kind.
#pragma once

#include <cstdint>
#include <vector>

struct Rope {
    int half = 0;                       // element i < half of a head is turned against element i + half; those behind them stay
    std::vector<float> cosines, sines;  // [positions][half]
    std::vector<float> growth;          // [positions], factor of queries; empty: 1

    void turn(float *x, int64_t position) const {
        const float *cos = cosines.data() + position * half, *sin = sines.data() + position * half;
        for (int i = 0; i < half; i++) {
            const float a = x[i], b = x[i + half];
            x[i] = a * cos[i] - b * sin[i];
            x[i + half] = b * cos[i] + a * sin[i];
        }
    }

    void grow(float *query, int dim, int64_t position) const {
        if (growth.empty()) return;
        for (int i = 0; i < dim; i++) query[i] *= growth[position];
    }
};
