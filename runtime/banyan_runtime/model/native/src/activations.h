// What stands between an MLP's products.
#pragma once

#include "rows.h"
#include "simd.h"

enum class Activation : int32_t { silu = 0, gelu_tanh = 1 };

INLINE F silu(F x) { return x / (splat(1.0f) + exponential(-x)); }

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))), where (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 * u)).
INLINE F gelu_tanh(F x) {
    const F twice = x * fma(x * x, splat(0.0713548162726f), splat(1.59576912161f));
    return x / (splat(1.0f) + exponential(-twice));
}

// Call `what` with an activation's function.
template <class What>
void as_activation(Activation activation, What &&what) {
    switch (activation) {
    case Activation::silu: return what([](F x) __attribute__((always_inline)) { return silu(x); });
    case Activation::gelu_tanh: return what([](F x) __attribute__((always_inline)) { return gelu_tanh(x); });
    }
}

// act(gates) * ups in place of the gates, for elements [begin, end) of all rows. `begin` is a panel's first, so only the last register
// may be short.
inline void gate(Activation activation, const Target &gates, const Rows &ups, int64_t begin, int64_t end) {
    as_activation(activation, [&](auto act) {
        for (int row = 0; row < ups.count; row++) {
            float *at = gates.at + row * gates.stride;
            const float *up = ups.row(row);
            int64_t i = begin;
            for (; i + LANES <= end; i += LANES) store(at + i, act(load(at + i)) * load(up + i));
            for (; i < end; i++) at[i] = act(splat(at[i]))[0] * up[i];
        }
    });
}

// act(x) in place of x, likewise.
inline void activate(Activation activation, const Target &x, int rows, int64_t begin, int64_t end) {
    as_activation(activation, [&](auto act) {
        for (int row = 0; row < rows; row++) map(x.at + row * x.stride + begin, end - begin, act);
    });
}
