// Logits to tokens: the same draws as model/sampler.py makes, but for rounding.
//
// Filters are joint: top_k, top_p and min_p judge the same softmax. Noise is a function of (seed, position, token), and the token with
// the largest (log probability + Gumbel noise) is drawn. Nothing sorts the vocabulary: where the tail is cut off, logits are counted
// into bins, and only those of the bins that decide the cut are sorted.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "simd.h"

struct Draws {  // columns of n rows; the caller's
    const float *temperature, *top_p, *min_p;
    const int32_t *top_k, *position;
    const uint64_t *seed;
};

namespace noise {

constexpr uint32_t C1 = 0xcc9e2d51, C2 = 0x1b873593, ADD = 0xe6546b64, MIX1 = 0x85ebca6b, MIX2 = 0xc2b2ae35, BYTES = 16;

template <class T>
INLINE T rotated(T x, int by) {
    return x << by | x >> (32 - by);
}

// The hash after the words that a row's cells share.
INLINE uint32_t start(uint64_t seed, uint32_t position) {
    uint32_t bits = 0;
    for (uint32_t word : {(uint32_t)seed, (uint32_t)(seed >> 32), position}) {
        bits ^= rotated(word * C1, 15) * C2;
        bits = rotated(bits, 13) * 5 + ADD;
    }
    return bits;
}

// 32 bits for a token; T is uint32_t or a vector of them.
template <class T>
INLINE T hash(T start, T token) {
    T bits = start ^ (rotated(token * C1, 15) * C2);
    bits = rotated(bits, 13) * 5 + ADD;
    bits ^= BYTES;
    bits ^= bits >> 16;
    bits *= MIX1;
    bits ^= bits >> 13;
    bits *= MIX2;
    return bits ^ bits >> 16;
}

INLINE double gumbel(uint32_t bits) {
    const double uniform = (double)bits / 4294967295.0;
    return -std::log(-std::min(std::log(uniform), -std::ldexp(1.0, -32)));
}

}  // namespace noise

class Sampler {
  public:
    explicit Sampler(int64_t vocabulary) : vocabulary(vocabulary) {
        weights.resize((size_t)vocabulary + LANES);
        ranked.reserve(vocabulary);
    }

    // A token for one row of logits [vocabulary]; -1 where they hold NaN, or the largest is infinite.
    int64_t draw(const float *logits, const Draws &draws, int64_t row) {
        const float highest = largest(logits);
        if (!std::isfinite(highest)) return -1;
        const float temperature = draws.temperature[row];
        if (temperature < 1e-6f || draws.top_k[row] == 1) return std::find(logits, logits + vocabulary, highest) - logits;
        start = noise::start(draws.seed[row], (uint32_t)draws.position[row]);
        mass = weigh(logits, highest, temperature);
        if (draws.top_k[row] > 1 || draws.top_p[row] < 1) return filtered(draws.top_k[row], draws.top_p[row], draws.min_p[row]);
        return open(draws.min_p[row]);
    }

  private:
    struct Ranked {
        float probability;
        int32_t token;
        bool operator<(const Ranked &other) const {
            return probability != other.probability ? probability > other.probability : token < other.token;
        }
    };

    static constexpr double SURE = 2.5;  // see model/sampler.py
    static constexpr int BINS = 1024;

    float largest(const float *logits) const {
        F most = splat(-INFINITY), broken = {};
        int64_t i = 0;
        for (; i + LANES <= vocabulary; i += LANES) {
            const F here = load(logits + i);
            most = larger(here, most);
            broken += here != here ? splat(1.0f) : F{};
        }
        float found = largest_of(most);
        bool sound = sum_of(broken) == 0;
        for (; i < vocabulary; i++) {
            found = logits[i] > found ? logits[i] : found;
            sound &= logits[i] == logits[i];
        }
        return sound ? found : NAN;
    }

    // exp((logit - highest) / temperature) of every token, into `weights`; their sum.
    float weigh(const float *logits, float highest, float temperature) {
        double total = 0;
        for (int64_t from = 0; from < vocabulary; from += 4096) {  // sums of few, so that what is added last is not lost
            const int64_t to = std::min(from + 4096, vocabulary);
            F sum = {};
            int64_t i = from;
            for (; i + LANES <= to; i += LANES) {
                const F weight = exponential((load(logits + i) - splat(highest)) / splat(temperature));
                store(weights.data() + i, weight);
                sum += weight;
            }
            for (; i < to; i++) {
                weights[i] = exponential(splat((logits[i] - highest) / temperature))[0];
                total += weights[i];
            }
            total += sum_of(sum);
        }
        return (float)total;
    }

    float probability(int64_t token) const { return weights[token] / mass; }

    double score(float probability, uint32_t token) const { return std::log((double)probability) + noise::gumbel(noise::hash(start, token)); }

    // The whole vocabulary takes part, or all that min_p leaves.
    int64_t open(float min_p) {
        const float floor = min_p > 0 ? min_p * probability_of(1.0f) : 0.0f;
        double kept = 0;
        if (floor > 0) {
            for (int64_t i = 0; i < vocabulary; i++) kept += probability(i) < floor ? 0.0f : probability(i);
        } else {
            kept = 1;
        }
        // The largest score of a row is a Gumbel variable itself, seldom below ln(kept) - SURE; what cannot reach that is ruled out
        // before any logarithm.
        const float reach = (float)(std::exp(SURE) * 1.001 / kept) / mass;
        double best = -INFINITY;
        int64_t found = -1;
        const auto look = [&](int64_t token) {
            const float p = probability(token);
            if (p <= 0 || p < floor) return;
            const double here = score(p, (uint32_t)token);
            if (here > best) best = here, found = token;
        };
        U tokens;
        for (int i = 0; i < LANES; i++) tokens[i] = (uint32_t)i;
        const U starts = U{} + start;
        int64_t i = 0;
        for (; i + LANES <= vocabulary; i += LANES, tokens += (uint32_t)LANES) {
            // 1 - u, near enough: the upper 24 bits of what is missing to the largest hash.
            const F rest = __builtin_convertvector((I)(~noise::hash(starts, tokens) >> 8), F) * splat(1.0f / 16777216.0f);
            const I possible = rest <= load(weights.data() + i) * splat(reach);
            if (!any(possible)) continue;
            for (int lane = 0; lane < LANES; lane++)
                if (possible[lane]) look(i + lane);
        }
        for (; i < vocabulary; i++) look(i);
        if (best < std::log(kept) - SURE) {
            best = -INFINITY;
            for (i = 0; i < vocabulary; i++) look(i);
        }
        // The only token that can be drawn may have the worst noise there is.
        return found >= 0 ? found : std::find(weights.begin(), weights.begin() + vocabulary, 1.0f) - weights.begin();
    }

    // top_k or top_p cuts the tail off.
    int64_t filtered(int32_t top_k, float top_p, float min_p) {
        // Bins of equal ratio: a token's bin is how many sixteenths of a factor of two it lies below the likeliest, that is the upper bits of
        // its weight. The likeliest have the largest.
        std::fill(std::begin(counts), std::end(counts), 0);
        std::fill(std::begin(masses), std::end(masses), 0.0);
        for (int64_t i = 0; i < vocabulary; i++) {
            const int bin = bin_of(weights[i]);
            counts[bin]++;
            masses[bin] += weights[i];
        }
        const int64_t limit = top_k > 0 ? top_k : vocabulary;
        const double slack = std::min(1e-4, std::max(1e-6, (1 - (double)top_p) / 2));
        int64_t count = 0;
        double before = 0;
        int last = 0;
        for (; last < BINS - 1; last++) {
            count += counts[last];
            before += masses[last];
            // With a little more than is needed, for sums that are rounded otherwise than the ranked ones.
            if (count >= limit || (top_p < 1 && before / mass > top_p + slack)) break;
        }
        ranked.clear();
        for (int64_t i = 0; i < vocabulary; i++)
            if (bin_of(weights[i]) <= last) ranked.push_back({probability(i), (int32_t)i});
        std::sort(ranked.begin(), ranked.end());
        const float floor = min_p * ranked[0].probability;
        double sum = 0, best = -INFINITY;
        int64_t found = ranked[0].token;
        for (size_t rank = 0; rank < ranked.size(); rank++) {
            const auto &one = ranked[rank];
            if (rank > 0 && ((int64_t)rank >= limit || (top_p < 1 && sum > top_p) || one.probability < floor)) break;
            const double here = score(one.probability, (uint32_t)one.token);
            if (here > best) best = here, found = one.token;
            sum += one.probability;
        }
        return found;
    }

    static int bin_of(float weight) {  // 1 is in the first, 0 in the last
        uint32_t bits;
        std::memcpy(&bits, &weight, 4);
        const int below = (int)(0x3f800000u >> 19) - (int)(bits >> 19);  // four bits of the mantissa are kept
        return std::min(std::max(below, 0), BINS - 1);
    }

    float probability_of(float weight) const { return weight / mass; }

    static bool any(I lanes) {
#if defined(__AVX512F__)
        return _mm512_movepi32_mask((__m512i)lanes) != 0;
#elif defined(__AVX2__)
        return _mm256_movemask_ps((__m256)lanes) != 0;
#else
        int32_t found = 0;
        for (int i = 0; i < LANES; i++) found |= lanes[i];
        return found != 0;
#endif
    }

    const int64_t vocabulary;
    std::vector<float> weights;  // [vocabulary] relative to the likeliest
    std::vector<Ranked> ranked;
    int64_t counts[BINS];
    double masses[BINS];
    uint32_t start = 0;
    float mass = 0;
};
