// Attention over the paged pool of keys and values.
//
// A query's keys are gone through in chunks of CHUNK, and chunks are joined within segments of SEGMENT; both begin at fixed
// positions of the text, and segments are joined in their order. So it makes no difference to a query's bits whether it is computed
// alone or in a prompt, in one thread or in several that share its segments.
#pragma once

#include <cmath>
#include <cstdint>

#include "chunk.h"
#include "memory.h"
#include "simd.h"

constexpr int SEGMENT = 512;
constexpr int AHEAD = 24;       // keys that are fetched while earlier ones are read
constexpr int FEW_ROWS = 8;    // read keys and values where they lie: to copy them as floats would cost more than the products
constexpr int TILE_ROWS = 64;  // queries times the heads that share their keys

constexpr int TOGETHER = 256;  // slots whose cells of all layers are neighbours

// Keys and values of every layer: [slots / TOGETHER][layers][kv_heads][TOGETHER][key, value][head_dim], as float or bfloat16. A key lies
// beside its value, since they are read together and from places that nobody can guess. What no text has reached yet takes no memory:
// were all slots of a layer neighbours, the first token would touch a huge page for each layer and head.
struct Cache {
    int layers = 0, kv_heads = 0, head_dim = 0;
    bool half = false;  // bfloat16
    Block<uint16_t> halves;
    Block<float> floats;

    void make(int layer_count, int64_t slots) {
        layers = layer_count;
        const size_t cells = (size_t)2 * layers * kv_heads * ((slots + TOGETHER - 1) / TOGETHER * TOGETHER) * head_dim;
        if (half)
            halves = Block<uint16_t>(cells, Pages::huge);
        else
            floats = Block<float>(cells, Pages::huge);
    }
    int64_t cell(int layer, int head, int64_t slot) const {
        const uint64_t at = slot, run = (at / TOGETHER * layers + layer) * kv_heads + head;
        return (run * TOGETHER + at % TOGETHER) * 2 * head_dim;
    }

    // A key and its value. Values are made finite, since the weight 0 of one that a query must not see would not undo a NaN; the key is
    // made NaN instead, so that whoever does see it fails.
    void put(int layer, int head, int64_t slot, const float *key, const float *value) const {
        const int64_t k = cell(layer, head, slot), v = k + head_dim;
        for (int i = 0; i < head_dim; i++) {
            const float kept = half ? widen(narrow(value[i])) : value[i];  // what is rounded may become infinite
            const float mark = kept - kept, sound = mark == 0 ? kept : 0.0f;
            if (half)
                halves[k + i] = narrow(key[i] + mark), halves[v + i] = narrow(sound);
            else
                floats[k + i] = key[i] + mark, floats[v + i] = sound;
        }
    }

    // Into the processor's cache.
    void fetch(int layer, int head, int64_t slot) const {
        const int64_t at = cell(layer, head, slot);
        const char *from = half ? (const char *)(halves.get() + at) : (const char *)(floats.get() + at);
        for (int i = 0; i < 2 * head_dim * (half ? 2 : 4); i += 64) __builtin_prefetch(from + i);
    }

    // One of them as floats; `to` has room for whole registers, zeros beyond head_dim stay.
    void get(int64_t from, float *to) const {
        int i = 0;
        for (; i + LANES <= head_dim; i += LANES) store(to + i, half ? widen(halves.get() + from + i) : load(floats.get() + from + i));
        for (; i < head_dim; i++) to[i] = half ? widen(halves[from + i]) : floats[from + i];
    }
};

// Some queries of one sequence that follow one another.
struct Span {
    const int32_t *slots;  // of the sequence's positions
    int token;             // first query, index among the rows at hand
    int queries;
    int position;  // of the first query
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
          queries_per_tile(group >= TILE_ROWS ? 1 : TILE_ROWS / group), rows(queries_per_tile * group), scale(1.0f / std::sqrt((float)head_dim)),
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

    // All of a span's segments: q and out [tokens][q_stride or out_stride], of heads head * group and up.
    void whole(const Cache &cache, int layer, int head, const Span &span, int window, const float *q, int64_t q_stride, float *out, int64_t out_stride) {
        take_queries(span, head, q, q_stride);
        for (int segment = 0; segment < segments(span); segment++) {
            if (!one(cache, layer, head, span, window, segment, part)) continue;
            join(span, part);
        }
        give(span, head, out, out_stride);
    }

    // One segment of a span, into memory of `gained_floats`.
    void segment(const Cache &cache, int layer, int head, const Span &span, int window, int segment, const float *q, int64_t q_stride, float *to) {
        take_queries(span, head, q, q_stride);
        one(cache, layer, head, span, window, segment, gained(to));
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

    void take_queries(const Span &span, int head, const float *q, int64_t stride) {
        for (int r = 0; r < span.queries * group; r++) {
            const float *from = q + (span.token + r / group) * stride + (head * group + r % group) * dim;
            for (int i = 0; i < dim; i++) query[r * padded + i] = from[i] * scale;
        }
        begin(span);
    }

    // The keys of a segment that the span sees; false if there are none.
    bool one(const Cache &cache, int layer, int head, const Span &span, int window, int segment, Gained to) {
        const int count = span.queries * group, last = span.position + span.queries;
        const int first_seen = window ? (span.position - window + 1 > 0 ? span.position - window + 1 : 0) : 0;
        for (int r = 0; r < count; r++) to.highest[r] = -INFINITY, to.mass[r] = 0;
        bool any = false;
        for (int start = segment * SEGMENT; start < (segment + 1) * SEGMENT && start < last; start += CHUNK) {
            if (start + CHUNK <= first_seen) continue;
            if (!any) {
                std::memset(to.values, 0, sizeof(float) * count * padded);
                for (int j = start; j < last && j < start + AHEAD; j++) cache.fetch(layer, head, span.slots[j]);
            }
            any = true;
            const int here = last - start < CHUNK ? last - start : CHUNK;
            const int32_t *slots = span.slots + start;
            auto ahead = [&](int j, int count) {  // slots of a text may lie anywhere, so the hardware cannot know which comes next
                for (int n = j + AHEAD; n < j + AHEAD + count && start + n < last; n++) cache.fetch(layer, head, slots[n]);
            };
            auto meet = [&](const auto *const *cells, auto fetch) {
                using Meeting = Chunk<std::decay_t<decltype(**cells)>>;
                Meeting::score(query, count, padded, cells, here, scores, fetch);
                for (int r = 0; r < count; r++) weigh(r, span.position + r / group, window, start, to);
                Meeting::add(scores, count, padded, cells, here, to.values);
            };
            auto lying = [&](const auto *pool) {
                decltype(pool) cells[CHUNK];
                for (int j = 0; j < CHUNK; j++) cells[j] = pool + cache.cell(layer, head, slots[j < here ? j : 0]);
                meet(cells, ahead);
            };
            if (count <= FEW_ROWS && padded == dim) {
                cache.half ? lying((const uint16_t *)cache.halves.get()) : lying((const float *)cache.floats.get());
                continue;
            }
            const float *cells[CHUNK];
            for (int j = 0; j < CHUNK; j++) cells[j] = copies + j * 2 * padded;  // behind the last position what is left over from earlier
            for (int j = 0; j < here; j++) {
                ahead(j, 1);
                const int64_t at = cache.cell(layer, head, slots[j]);
                cache.get(at, copies + j * 2 * padded);
                cache.get(at + dim, copies + (j * 2 + 1) * padded);
            }
            meet(cells, [](int, int) {});
        }
        return any;
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

    const float scale;
    Block<float> scratch;
    float *query, *scores, *copies;  // copies [CHUNK][key, value][padded]
    Gained total, part;
};
