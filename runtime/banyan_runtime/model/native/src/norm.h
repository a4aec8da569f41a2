// Norms of rows, each in one order of additions.
#pragma once

#include <cmath>
#include <vector>

#include "simd.h"

struct Norm {
    std::vector<float> weight;  // empty: the model has no such norm
    std::vector<float> bias;    // empty: 0

    explicit operator bool() const { return !weight.empty(); }
};

// x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019). `to` may be x.
inline void rms_norm(const float *x, const float *weight, int width, float eps, float *to) {
    F squares = {};
    int i = 0;
    for (; i + LANES <= width; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    float sum = sum_of(squares);
    for (; i < width; i++) sum += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(sum / (float)width + eps);
    for (i = 0; i + LANES <= width; i += LANES) store(to + i, load(x + i) * splat(scale) * load(weight + i));
    for (; i < width; i++) to[i] = x[i] * scale * weight[i];
}

// (x - mean(x)) / sqrt(var(x) + eps) * weight + bias (Ba et al. 2016). `to` may be x.
inline void layer_norm(const float *x, const Norm &norm, float eps, float *to) {
    const int width = (int)norm.weight.size();
    F sums = {};
    int i = 0;
    for (; i + LANES <= width; i += LANES) sums += load(x + i);
    float sum = sum_of(sums);
    for (; i < width; i++) sum += x[i];
    const float mean = sum / (float)width;
    F squares = {};
    for (i = 0; i + LANES <= width; i += LANES) {
        const F off = load(x + i) - splat(mean);
        squares = fma(off, off, squares);
    }
    float square = sum_of(squares);
    for (; i < width; i++) square += (x[i] - mean) * (x[i] - mean);
    const float scale = 1.0f / std::sqrt(square / (float)width + eps);
    for (i = 0; i + LANES <= width; i += LANES) store(to + i, (load(x + i) - splat(mean)) * splat(scale) * load(norm.weight.data() + i));
    for (; i < width; i++) to[i] = (x[i] - mean) * scale * norm.weight[i];
    for (size_t j = 0; j < norm.bias.size(); j++) to[j] += norm.bias[j];
}
