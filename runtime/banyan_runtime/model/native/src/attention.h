// Attention over the paged pool of keys and values.
//
// A query's keys are gone through in chunks of CHUNK, and chunks are joined within segments of SEGMENT; both begin at fixed
// positions of the text, and segments are joined in their order. So it makes no difference to a query's bits whether it is computed
// alone or in a prompt, in one thread or in several that share its segments.
#pragma once

#include <cmath>
#include <cstdint>

#include "cache.h"
#include "chunk.h"
#include "memory.h"
#include "simd.h"

constexpr int SEGMENT = 512;
constexpr int AHEAD = 24;       // keys that are fetched while earlier ones are read
constexpr int FEW_ROWS = 8;    // read keys and values where they lie: to copy them as floats would cost more than the products
constexpr int TILE_ROWS = 64;  // queries times the heads that share their keys

// Some queries of one sequence that follow one another.
struct Span {
    const int32_t *slots;  // of the sequence's positions
    int token;             // first query, index among the rows at hand
    int queries;
    int position;  // of the first query
};

// How a layer's queries meet keys.
struct Scoring {
    float scale;         // of the products
    float soft_cap = 0;  // scores become soft_cap * tanh(score / soft_cap); 0: they stay
    int window = 0;      // positions a query sees, its own included; 0: all
};

// What queries have got from some of their keys.
struct Gained {
    float *values;   // [rows][padded]: weighted sum of values
    float *highest;  // [rows] largest score
    float *mass;     // [rows] sum of exp(score - highest)
};

class Attention {
  public:
    Attention(int heads, int kv_heads, int head_dim)
        : group(heads / kv_heads), dim(head_dim), padded((head_dim + LANES - 1) / LANES * LANES),
          queries_per_tile(group >= TILE_ROWS ? 1 : TILE_ROWS / group), rows(queries_per_tile * group),
          scratch(size_t(rows) * (3 * padded + CHUNK + 4) + 2 * CHUNK * padded, Pages::small) {
        float *at = scratch.get();
        auto take = [&](size_t count) { return std::exchange(at, at + count); };
        query = take(rows * padded), scores = take(rows * CHUNK), copies = take(2 * CHUNK * padded);
        total = {take(rows * padded), take(rows), take(rows)};
        part = {take(rows * padded), take(rows), take(rows)};
    }

    const int group, dim, padded, queries_per_tile, rows;

    size_t gained_floats() const { return size_t(rows) * (padded + 2); }

    static int segments(const Span &span) { return (span.position + span.queries - 1) / SEGMENT + 1; }

    // All of a span's segments, with the cells of a head of keys: q and out [tokens][q_stride or out_stride], of heads head * group and up.
    void whole(const Cells &cells, int head, const Span &span, const Scoring &scoring, const float *q, int64_t q_stride, float *out, int64_t out_stride) {
        take_queries(span, head, scoring.scale, q, q_stride);
        for (int segment = 0; segment < segments(span); segment++) {
            if (!one(cells, span, scoring, segment, part)) continue;
            join(span, part);
        }
        give(span, head, out, out_stride);
    }

    // One segment of a span, into memory of `gained_floats`.
    void segment(const Cells &cells, int head, const Span &span, const Scoring &scoring, int segment, const float *q, int64_t q_stride, float *to) {
        take_queries(span, head, scoring.scale, q, q_stride);
        one(cells, span, scoring, segment, gained(to));
    }

    // The same as `whole`, from segments that were computed apart.
    void joined(int head, const Span &span, float *parts, float *out, int64_t out_stride) {
        begin(span);
        for (int segment = 0; segment < segments(span); segment++) join(span, gained(parts + segment * gained_floats()));
        give(span, head, out, out_stride);
    }

  private:
    Gained gained(float *at) const { return {at, at + size_t(rows) * padded, at + size_t(rows) * (padded + 1)}; }

    void begin(const Span &span) {
        for (int r = 0; r < span.queries * group; r++) total.highest[r] = -INFINITY, total.mass[r] = 0;
    }

    void take_queries(const Span &span, int head, float scale, const float *q, int64_t stride) {
        for (int r = 0; r < span.queries * group; r++) {
            const float *from = q + (span.token + r / group) * stride + (head * group + r % group) * dim;
            for (int i = 0; i < dim; i++) query[r * padded + i] = from[i] * scale;
        }
        begin(span);
    }

    // The keys of a segment that the span sees; false if there are none.
    bool one(const Cells &cells, const Span &span, const Scoring &scoring, int segment, Gained to) {
        const int count = span.queries * group, last = span.position + span.queries, window = scoring.window;
        const int first_seen = window ? (span.position - window + 1 > 0 ? span.position - window + 1 : 0) : 0;
        for (int r = 0; r < count; r++) to.highest[r] = -INFINITY, to.mass[r] = 0;
        bool any = false;
        for (int start = segment * SEGMENT; start < (segment + 1) * SEGMENT && start < last; start += CHUNK) {
            if (start + CHUNK <= first_seen) continue;
            if (!any) {
                std::memset(to.values, 0, sizeof(float) * count * padded);
                for (int j = start; j < last && j < start + AHEAD; j++) cells.fetch(span.slots[j]);
            }
            any = true;
            const int here = last - start < CHUNK ? last - start : CHUNK;
            const int32_t *slots = span.slots + start;
            auto ahead = [&](int j, int count) {  // slots of a text may lie anywhere, so the hardware cannot know which comes next
                for (int n = j + AHEAD; n < j + AHEAD + count && start + n < last; n++) cells.fetch(slots[n]);
            };
            auto meet = [&](const auto *const *pairs, auto fetch) {
                using Meeting = Chunk<std::decay_t<decltype(**pairs)>>;
                Meeting::score(query, count, padded, pairs, here, scores, fetch);
                if (scoring.soft_cap) cap(count, scoring.soft_cap);
                for (int r = 0; r < count; r++) weigh(r, span.position + r / group, window, start, to);
                Meeting::add(scores, count, padded, pairs, here, to.values);
            };
            auto lying = [&](const auto *pool) {
                decltype(pool) pairs[CHUNK];
                for (int j = 0; j < CHUNK; j++) pairs[j] = pool + cells.at(slots[j < here ? j : 0]);
                meet(pairs, ahead);
            };
            if (count <= FEW_ROWS && padded == dim) {
                cells.halves ? lying((const uint16_t *)cells.halves) : lying((const float *)cells.floats);
                continue;
            }
            const float *pairs[CHUNK];
            for (int j = 0; j < CHUNK; j++) pairs[j] = copies + j * 2 * padded;  // behind the last position what is left over from earlier
            for (int j = 0; j < here; j++) {
                ahead(j, 1);
                const int64_t at = cells.at(slots[j]);
                cells.get(at, copies + j * 2 * padded);
                cells.get(at + dim, copies + (j * 2 + 1) * padded);
            }
            meet(pairs, [](int, int) {});
        }
        return any;
    }

    void cap(int rows, float most) {
        map(scores, (int64_t)rows * CHUNK, [=](F score) { return splat(most) * tangent(score / splat(most)); });
    }

    // Scores to weights, relative to the largest score so far.
    void weigh(int r, int position, int window, int start, Gained &to) {
        float *row = scores + r * CHUNK;
        const int end = position - start + 1 < CHUNK ? position - start + 1 : CHUNK;
        const int begin = window && position - window + 1 > start ? position - window + 1 - start : 0;
        if (begin >= end) {
            for (int j = 0; j < CHUNK; j++) row[j] = 0;
            return;
        }
        for (int j = 0; j < begin; j++) row[j] = -INFINITY;
        for (int j = end; j < CHUNK; j++) row[j] = -INFINITY;
        F most = load(row);
        for (int j = LANES; j < CHUNK; j += LANES) most = larger(load(row + j), most);
        const float here = largest_of(most), before = to.highest[r], now = here > before ? here : before;
        F sum = {};
        for (int j = 0; j < CHUNK; j += LANES) {
            const F weight = exponential(load(row + j) - splat(now));
            store(row + j, weight);
            sum += weight;
        }
        const float kept = exponential(splat(before - now))[0];
        to.mass[r] = to.mass[r] * kept + sum_of(sum);
        to.highest[r] = now;
        if (kept != 1)
            for (int i = 0; i < padded; i += LANES) store(to.values + r * padded + i, load(to.values + r * padded + i) * splat(kept));
    }

    // A segment joins those before it. Rows that saw none of its keys stay as they are.
    void join(const Span &span, Gained from) {
        for (int r = 0; r < span.queries * group; r++) {
            float *sum = total.values + r * padded;
            const float *added = from.values + r * padded;
            if (from.highest[r] == -INFINITY && from.mass[r] == 0) continue;
            if (total.highest[r] == -INFINITY && total.mass[r] == 0) {
                std::memcpy(sum, added, sizeof(float) * padded);
                total.highest[r] = from.highest[r], total.mass[r] = from.mass[r];
                continue;
            }
            const float now = from.highest[r] > total.highest[r] ? from.highest[r] : total.highest[r];
            const F kept = exponential(splat(total.highest[r] - now)), share = exponential(splat(from.highest[r] - now));
            for (int i = 0; i < padded; i += LANES) store(sum + i, fma(load(added + i), share, load(sum + i) * kept));
            total.mass[r] = total.mass[r] * kept[0] + from.mass[r] * share[0];
            total.highest[r] = now;
        }
    }

    void give(const Span &span, int head, float *out, int64_t stride) {
        for (int r = 0; r < span.queries * group; r++) {
            float *to = out + (span.token + r / group) * stride + (head * group + r % group) * dim;
            for (int i = 0; i < dim; i++) to[i] = total.values[r * padded + i] / total.mass[r];
        }
    }

    Block<float> scratch;
    float *query, *scores, *copies;  // copies [CHUNK][key, value][padded]
    Gained total, part;
};
