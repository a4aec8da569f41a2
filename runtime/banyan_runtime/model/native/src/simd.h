// Vectors of floats as wide as the processor's, in GCC's vector extensions: one source for every instruction set.
//
// Sums must come out the same wherever a row stands in a batch, so nothing here may be contracted or reordered at the compiler's
// will: everything is compiled with -ffp-contract=off, and products are added by `fma` where one is meant.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float F __attribute__((vector_size(LANES * 4)));
typedef int32_t I __attribute__((vector_size(LANES * 4)));
typedef uint32_t U __attribute__((vector_size(LANES * 4)));

#define INLINE static inline __attribute__((always_inline))

template <class V, class T>
INLINE V load_as(const T *at) {
    V v;
    std::memcpy(&v, at, sizeof v);
    return v;
}

INLINE F load(const float *at) { return load_as<F>(at); }
INLINE void store(float *at, F v) { std::memcpy(at, &v, sizeof v); }

INLINE F splat(float x) {
#if defined(__AVX512F__)
    return (F)_mm512_set1_ps(x);
#elif defined(__AVX2__)
    return (F)_mm256_set1_ps(x);
#else
    return F{x, x, x, x};
#endif
}

// a * b + c, rounded once where the processor can.
INLINE F fma(F a, F b, F c) {
#if defined(__AVX512F__)
    return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// The larger of each pair; the second where either is NaN.
INLINE F larger(F a, F b) { return a > b ? a : b; }

// Lanes are joined in halves: each with the one that is half a register away, and so on.
template <class Join>
INLINE float across(F v, Join join) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
    auto eight = join(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
    auto eight = (__m256)v;
#endif
    auto four = join(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = join(four, _mm_movehl_ps(four, four));
    return join(four, _mm_movehdup_ps(four))[0];
#else
    typedef float Pair __attribute__((vector_size(8)));
    Pair low, high;
    std::memcpy(&low, &v, 8);
    std::memcpy(&high, (const char *)&v + 8, 8);
    const Pair two = join(low, high);
    return join(Pair{two[0], 0}, Pair{two[1], 0})[0];
#endif
}

INLINE float sum_of(F v) {
    return across(v, [](auto a, auto b) { return a + b; });
}

INLINE float largest_of(F v) {
    return across(v, [](auto a, auto b) { return a > b ? a : b; });
}

INLINE void four_sums(F a, F b, F c, F d, float *to) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
    auto fold = [](F v) { return _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1)); };
    const __m256 w = fold(a), x = fold(b), y = fold(c), z = fold(d);
#else
    const __m256 w = (__m256)a, x = (__m256)b, y = (__m256)c, z = (__m256)d;
#endif
    const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(w, x), _mm256_hadd_ps(y, z));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
#else
    to[0] = sum_of(a), to[1] = sum_of(b), to[2] = sum_of(c), to[3] = sum_of(d);
#endif
}

// A bfloat16 is the upper half of a float.
INLINE float widen(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

INLINE uint16_t narrow(float x) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE F widen(const uint16_t *at) {
#if defined(__AVX512F__)
    return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at)), 16);
#elif defined(__AVX2__)
    return (F)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at)), 16);
#else
    U bits;
    for (int i = 0; i < LANES; i++) bits[i] = (uint32_t)at[i] << 16;
    return (F)bits;
#endif
}

// e to the x, within 2 units in the last place (Cephes' polynomial of degree 6 after the power of two is taken out);
// exactly 1 at 0, exactly 0 below -87.3, NaN for NaN.
INLINE F exponential(F x) {
    const F low = splat(-87.3f), high = splat(88.3f);
    const I none = x < low;
    x = x > high ? high : x;
    x = x < low ? low : x;
    const F magic = splat(12582912.0f);  // 1.5 * 2^23: what is added to it is rounded to a whole number
    const F shifted = fma(x, splat(1.44269504088896341f), magic);
    const F n = shifted - magic;
    F r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    F p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p * r, r, r) + splat(1.0f);
    const F value = (F)((I)p + ((I)shifted << 23));
    return none ? F{} : x == x ? value : x;
}

// tanh of x within 2 units in the last place (Cephes): an odd polynomial near 0, where 1 - 2 / (exp(2x) + 1) would cancel. NaN for NaN.
INLINE F tangent(F x) {
    const F size = x < splat(0.0f) ? -x : x, square = x * x;
    F p = splat(-5.70498872745e-3f);
    p = fma(p, square, splat(2.06390887954e-2f));
    p = fma(p, square, splat(-5.37397155531e-2f));
    p = fma(p, square, splat(1.33314422036e-1f));
    p = fma(p, square, splat(-3.33332819422e-1f));
    const F near = fma(p * square, x, x), far = splat(1.0f) - splat(2.0f) / (exponential(size + size) + splat(1.0f));
    return size < splat(0.625f) ? near : x < splat(0.0f) ? -far : far;
}

// f(x) in place of each x, a register at a time.
template <class Function>
INLINE void map(float *x, int64_t count, Function f) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(x + i, f(load(x + i)));
    for (; i < count; i++) x[i] = f(splat(x[i]))[0];
}

INLINE void pause_a_little() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}
