// The model: embedding, blocks of attention and gated MLP, norm, head. One call computes a step.
//
// Activations are floats throughout; weights, keys and values have the model's type. All rows of a step pass a layer before the next
// layer, in blocks of BLOCK rows, so the memory for activations does not grow with a prompt.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <vector>

#include "attention.h"
#include "matrix.h"
#include "pool.h"
#include "sampler.h"

struct Spec {
    int32_t vocabulary, hidden, inner, layers, heads, kv_heads, head_dim, tied, half_cache, threads;
    float eps;
};

struct Step {  // as in step.py; arrays are the caller's
    int32_t tokens, sequences;
    const int64_t *token_ids;   // [tokens]
    const int32_t *positions;   // [tokens]
    const int32_t *out_slots;   // [tokens]
    const int32_t *rows;        // [sequences] of the table
    const int32_t *query_lens;  // [sequences]
    const int32_t *kv_lens;     // [sequences]
    const int32_t *table;       // [.., table_width] slots
    int64_t table_width;
};

using Pulse = void (*)();

class Decoder {
  public:
    struct Layer {
        std::vector<float> input_norm, qkv_bias, q_norm, k_norm, out_bias, mlp_norm, gate_bias, up_bias, down_bias;
        Matrix qkv, out, gate, up, down;
        int window = 0;  // positions a query sees, its own included; 0: all
    };

    explicit Decoder(const Spec &spec)
        : spec(spec), pool(spec.threads), layers(spec.layers), q_width(spec.heads * spec.head_dim), kv_width(spec.kv_heads * spec.head_dim),
          qkv_width(q_width + 2 * kv_width) {
        for (int t = 0; t < spec.threads; t++) attention.push_back(std::make_unique<Attention>(spec.heads, spec.kv_heads, spec.head_dim));
        for (int t = 0; t < spec.threads; t++) samplers.emplace_back(spec.vocabulary);
        const int tile = attention[0]->queries_per_tile;
        block = std::max(BLOCK, (BLOCK + tile - 1) / tile * tile);
        normed = Block<float>((size_t)(block + NORMED_ALONE * spec.threads) * spec.hidden, Pages::small);
        qkv = Block<float>((size_t)block * qkv_width, Pages::small);
        attended = Block<float>((size_t)block * q_width, Pages::small);
        inner = Block<float>((size_t)block * spec.inner, Pages::small);
        ups = Block<float>((size_t)block * spec.inner, Pages::small);
        best.resize((size_t)block * spec.threads);
    }

    const Spec spec;
    Pool pool;
    std::vector<Layer> layers;
    Matrix embed, head;
    std::vector<float> norm;
    Cache cache;
    Pulse pulse = nullptr;

    const Matrix &outputs() const { return spec.tied ? embed : head; }

    size_t weights_bytes() const {
        size_t total = embed.bytes() + head.bytes();
        for (auto &layer : layers) total += layer.qkv.bytes() + layer.out.bytes() + layer.gate.bytes() + layer.up.bytes() + layer.down.bytes();
        return total;
    }

    // Rotations cos, sin [positions][head_dim / 2].
    void rotations(const float *cos, const float *sin, int64_t positions) {
        const size_t count = (size_t)positions * (spec.head_dim / 2);
        cosines.assign(cos, cos + count);
        sines.assign(sin, sin + count);
    }

    void reserve(int sequences, int64_t positions) {
        const size_t segments = positions / SEGMENT + 1;
        // Segments are shared out only where there are fewer items than threads.
        shared = Block<float>(segments * pool.threads() * attention[0]->gained_floats(), Pages::small);
        spans.reserve(sequences + (size_t)block);
        split.reserve(spans.capacity() + 1);
    }

    // Last hidden states [tokens][hidden].
    void step(const Step &step, float *hidden) {
        pulsed = std::chrono::steady_clock::now();
        auto work = [&](Pool::Member &member) {
            int64_t begin, end;
            member.share(step.tokens, begin, end);
            for (int64_t t = begin; t < end; t++) embed.row(step.token_ids[t], hidden + t * spec.hidden);
            const bool at_once = step.tokens <= block;
            if (member.index == 0 && at_once) plan(step, 0, step.tokens);
            member.meet();
            for (int index = 0; index < spec.layers; index++)
                for (int first = 0; first < step.tokens; first += block) {
                    if (member.index == 0) beat();
                    if (!at_once) {
                        if (member.index == 0) plan(step, first, std::min(block, step.tokens - first));
                        member.meet();
                    }
                    through(member, index, step, first, std::min(block, step.tokens - first), hidden + (int64_t)first * spec.hidden);
                }
        };
        pool.run(work);
    }

    // Hidden states [count][hidden] as the head reads them.
    void as_head_reads(const float *hidden, int count, float *to) {
        for (int row = 0; row < count; row++) normalize(hidden + (int64_t)row * spec.hidden, norm, spec.hidden, to + (int64_t)row * spec.hidden);
    }

    // Logits [count][vocabulary].
    void logits(const float *hidden, int count, float *to) {
        for (int first = 0; first < count; first += block) {
            const int rows = std::min(block, count - first);
            auto work = [&](Pool::Member &member) {
                const float *inputs = normed_rows(member, hidden + (int64_t)first * spec.hidden, rows, norm);
                product(member, outputs(), {inputs, spec.hidden, rows}, {to + (int64_t)first * spec.vocabulary, spec.vocabulary});
            };
            pool.run(work);
        }
    }

    // The likeliest token of each of count <= block rows, of equal ones the first; -1 where a logit is not finite or all are -inf.
    void likeliest(const float *hidden, int count, int64_t *tokens) {
        for (int first = 0; first < count; first += block) {
            const int rows = std::min(block, count - first);
            auto work = [&](Pool::Member &member) {
                search(member, normed_rows(member, hidden + (int64_t)first * spec.hidden, rows, norm), rows);
            };
            pool.run(work);
            for (int row = 0; row < rows; row++) {
                Best found = best[row];
                for (int t = 1; t < pool.threads(); t++) {
                    const Best &other = best[(size_t)t * block + row];
                    found.broken |= other.broken;
                    if (other.value > found.value || (other.value == found.value && other.token < found.token))
                        found.value = other.value, found.token = other.token;
                }
                tokens[first + row] = found.broken || !std::isfinite(found.value) ? -1 : found.token;
            }
        }
    }

    // A token for each of count rows of logits [count][vocabulary]; -1 where there is none to be drawn.
    void sample(const float *logits, int count, const Draws &draws, int64_t *tokens) {
        std::atomic<int> row{0};
        auto work = [&](Pool::Member &member) {
            for (int mine; (mine = row.fetch_add(1, std::memory_order_relaxed)) < count;)
                tokens[mine] = samplers[member.index].draw(logits + (int64_t)mine * spec.vocabulary, draws, mine);
        };
        pool.run(work);
    }

  private:
    static constexpr int BLOCK = 256;
    static constexpr int NORMED_ALONE = 4;  // rows at most
    static constexpr int TOGETHER = 4;  // panels that are claimed at least, since some products take so many at once

    struct Best {
        float value;
        bool broken;
        int64_t token;
    };

    // Tell whoever watches that the step goes on; not so often that it would cost anything.
    void beat() {
        const auto now = std::chrono::steady_clock::now();
        if (pulse && now - pulsed > std::chrono::milliseconds(20)) {
            pulsed = now;
            pulse();
        }
    }

    void normalize(const float *x, const std::vector<float> &weight, int width, float *to) const {
        F squares = {};
        int i = 0;
        for (; i + LANES <= width; i += LANES) squares = fma(load(x + i), load(x + i), squares);
        float sum = sum_of(squares);
        for (; i < width; i++) sum += x[i] * x[i];
        const float scale = 1.0f / std::sqrt(sum / (float)width + spec.eps);
        for (i = 0; i + LANES <= width; i += LANES) store(to + i, load(x + i) * splat(scale) * load(weight.data() + i));
        for (; i < width; i++) to[i] = x[i] * scale * weight[i];
    }

    // [rows][hidden], until it is asked for again. Few rows every thread computes for itself: cheaper than to wait for one another.
    const float *normed_rows(Pool::Member &member, const float *hidden, int rows, const std::vector<float> &weight) {
        const bool alone = rows <= NORMED_ALONE;
        float *to = normed.get() + (alone ? (int64_t)(block + NORMED_ALONE * member.index) * spec.hidden : 0);
        int64_t begin = 0, end = rows;
        if (!alone) member.share(rows, begin, end);
        for (int64_t row = begin; row < end; row++) normalize(hidden + row * spec.hidden, weight, spec.hidden, to + row * spec.hidden);
        if (!alone) member.meet();
        return to;
    }

    // The spans of rows [first, first + count) of a step, and who computes what of their attention.
    void plan(const Step &step, int first, int count) {
        spans.clear();
        const int most = attention[0]->queries_per_tile;
        int start = 0;
        for (int s = 0; s < step.sequences && start < first + count; s++) {
            const int length = step.query_lens[s];
            const int from = std::max(start, first), to = std::min(start + length, first + count);
            for (int token = from; token < to; token += most) {
                const int position = step.kv_lens[s] - length + token - start;
                spans.push_back({step.table + step.rows[s] * step.table_width, token - first, std::min(most, to - token), position});
            }
            start += length;
        }
        const int64_t items = (int64_t)spans.size() * spec.kv_heads;
        split.clear();
        if (items < pool.threads()) {
            int64_t segments = 0;
            for (auto &span : spans) split.push_back(segments), segments += Attention::segments(span);
            split.push_back(segments);
            if (segments == (int64_t)spans.size()) split.clear();  // there is nothing to share out
        }
    }

    void through(Pool::Member &member, int index, const Step &step, int first, int rows, float *hidden) {
        Layer &layer = layers[index];
        const float *inputs = normed_rows(member, hidden, rows, layer.input_norm);
        product(member, layer.qkv, {inputs, spec.hidden, rows}, {qkv.get(), qkv_width, bias(layer.qkv_bias)});
        member.meet();
        place(member, layer, index, step, first, rows);
        member.meet();
        attend(member, layer, index);
        member.meet();
        product(member, layer.out, {attended.get(), q_width, rows}, {hidden, spec.hidden, bias(layer.out_bias), true});
        member.meet();
        inputs = normed_rows(member, hidden, rows, layer.mlp_norm);
        for (int64_t begin, end; member.claim(layer.gate.panels(), TOGETHER, begin, end);) {
            layer.gate.multiply({inputs, spec.hidden, rows}, {inner.get(), spec.inner, bias(layer.gate_bias)}, begin, end);
            layer.up.multiply({inputs, spec.hidden, rows}, {ups.get(), spec.inner, bias(layer.up_bias)}, begin, end);
            gate(begin * PANEL, std::min<int64_t>(end * PANEL, spec.inner), rows);
        }
        member.meet();
        product(member, layer.down, {inner.get(), spec.inner, rows}, {hidden, spec.hidden, bias(layer.down_bias), true});
        member.meet();
    }

    // This thread's part of rows @ matrix.T.
    static void product(Pool::Member &member, const Matrix &matrix, const Rows &rows, const Target &target) {
        for (int64_t begin, end; member.claim(matrix.panels(), TOGETHER, begin, end);) matrix.multiply(rows, target, begin, end);
    }

    static const float *bias(const std::vector<float> &values) { return values.empty() ? nullptr : values.data(); }

    // silu(gate) * up, for some outputs of all rows. A share begins at a panel, so whole registers fit but for the last.
    void gate(int64_t begin, int64_t end, int rows) const {
        for (int row = 0; row < rows; row++) {
            float *gates = inner.get() + (int64_t)row * spec.inner;
            const float *up = ups.get() + (int64_t)row * spec.inner;
            int64_t i = begin;
            for (; i + LANES <= end; i += LANES) store(gates + i, silu(load(gates + i)) * load(up + i));
            for (; i < end; i++) gates[i] = silu(splat(gates[i]))[0] * up[i];
        }
    }

    static F silu(F x) { return x / (splat(1.0f) + exponential(-x)); }

    // Queries and keys are normed and turned to their positions, keys and values put into their slots.
    void place(Pool::Member &member, const Layer &layer, int index, const Step &step, int first, int rows) {
        const int all = spec.heads + 2 * spec.kv_heads;
        int64_t begin, end;
        member.share((int64_t)rows * (spec.heads + spec.kv_heads), begin, end);
        for (int64_t item = begin; item < end; item++) {
            const int row = item / (spec.heads + spec.kv_heads), head = item % (spec.heads + spec.kv_heads);
            float *at = qkv.get() + ((int64_t)row * all + head) * spec.head_dim;
            const bool key = head >= spec.heads;
            const auto &weight = key ? layer.k_norm : layer.q_norm;
            if (!weight.empty()) normalize(at, weight, spec.head_dim, at);
            const int position = step.positions[first + row];
            rotate(at, position);
            if (key) cache.put(index, head - spec.heads, step.out_slots[first + row], at, at + kv_width);
        }
    }

    void rotate(float *x, int64_t position) const {
        const int half = spec.head_dim / 2;
        const float *cos = cosines.data() + position * half, *sin = sines.data() + position * half;
        for (int i = 0; i < half; i++) {
            const float a = x[i], b = x[i + half];
            x[i] = a * cos[i] - b * sin[i];
            x[i + half] = b * cos[i] + a * sin[i];
        }
    }

    void attend(Pool::Member &member, const Layer &layer, int index) {
        Attention &mine = *attention[member.index];
        const int heads = spec.kv_heads;
        if (split.empty()) {
            const int64_t items = (int64_t)spans.size() * heads;
            // The later spans of a prompt see more keys: they are begun first.
            for (int64_t begun = 0, end = 0; begun < end || member.claim(items, 1, begun, end); begun++) {
                const int64_t item = items - 1 - begun;
                mine.whole(cache, index, item % heads, spans[item / heads], layer.window, qkv.get(), qkv_width, attended.get(), q_width);
            }
            return;
        }
        const int64_t segments = split.back(), items = segments * heads;
        for (int64_t item = 0, end = 0; item < end || member.claim(items, 1, item, end); item++) {
            const int64_t segment = item / heads;
            const int span = std::upper_bound(split.begin(), split.end(), segment) - split.begin() - 1;
            mine.segment(cache, index, item % heads, spans[span], layer.window, segment - split[span], qkv.get(), qkv_width, part(item % heads, segment));
        }
        member.meet();
        for (int64_t item = 0, end = 0; item < end || member.claim((int64_t)spans.size() * heads, 1, item, end); item++)
            mine.joined(item % heads, spans[item / heads], part(item % heads, split[item / heads]), attended.get(), q_width);
    }

    // Where a segment's gain lies: those of a head one after another.
    float *part(int head, int64_t segment) const { return shared.get() + (head * split.back() + segment) * attention[0]->gained_floats(); }

    void search(Pool::Member &member, const float *inputs, int rows) {
        Best *mine = best.data() + (size_t)member.index * block;
        for (int row = 0; row < rows; row++) mine[row] = {-INFINITY, false, 0};
        constexpr int WIDE = 2 * TOGETHER, HIGH = 48;  // so many that what a product makes of weights is made once for most batches
        float logits[HIGH * WIDE * PANEL];
        for (int64_t begin, end; member.claim(outputs().panels(), WIDE, begin, end);)
            for (int64_t panel = begin; panel < end; panel += WIDE)
                for (int first = 0; first < rows; first += HIGH) {
                    const int count = std::min(HIGH, rows - first);
                    const int64_t last = std::min(panel + WIDE, end), token = panel * PANEL, until = std::min<int64_t>(last * PANEL, spec.vocabulary);
                    // Outputs are put where they would stand among all: `logits` begins at this panel's.
                    const Target target{logits - token, WIDE * PANEL};
                    outputs().multiply({inputs + (int64_t)first * spec.hidden, spec.hidden, count}, target, panel, last);
                    for (int row = 0; row < count; row++) look(logits + row * WIDE * PANEL, token, until - token, mine[first + row]);
                }
    }

    // `count` logits, of the tokens from `token` on. They come in any order: of equal ones the first token is the likeliest.
    static void look(const float *logits, int64_t token, int64_t count, Best &best) {
        F most = splat(-INFINITY);
        I broken = {};
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) {
            const F some = load(logits + i);
            most = larger(some, most);
            broken |= some != some;
        }
        float top = largest_of(most);
        for (; i < count; i++) {
            if (logits[i] > top) top = logits[i];
            best.broken |= logits[i] != logits[i];
        }
        for (int lane = 0; lane < LANES; lane++) best.broken |= broken[lane] != 0;
        if (top < best.value || (top == best.value && token > best.token)) return;
        for (i = 0; i < count; i++)
            if (logits[i] == top) {
                best.value = top, best.token = token + i;
                return;
            }
    }

    const int q_width, kv_width, qkv_width;
    int block;
    std::vector<std::unique_ptr<Attention>> attention;  // of each thread
    std::vector<Sampler> samplers;                      // likewise
    Block<float> normed, qkv, attended, inner, ups, shared;
    std::vector<float> cosines, sines;
    std::vector<Span> spans;
    std::vector<int64_t> split;  // first segment of each span, then how many there are; empty: spans are computed whole
    std::vector<Best> best;
    std::chrono::steady_clock::time_point pulsed;
};
