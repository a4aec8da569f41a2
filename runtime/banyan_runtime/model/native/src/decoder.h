// The model: embedding, blocks of attention and MLP, norm, head, each layer by its own description. One call computes a step.
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

#include "activations.h"
#include "attention.h"
#include "matrix.h"
#include "norm.h"
#include "pool.h"
#include "rope.h"
#include "sampler.h"
#include "spec.h"

using Pulse = void (*)();

struct Layer {
    LayerSpec about;
    int shape;              // index of its heads' sizes
    int own_heads;          // of keys that it computes
    int q_width, kv_width;  // of all heads
    int qkv_width;          // of a row's queries, keys and values
    Norm input_norm, q_norm, k_norm, v_norm, post_attention_norm, mlp_norm, post_mlp_norm, inputs_norm;
    std::vector<float> qkv_bias, out_bias, gate_bias, up_bias, down_bias, scale;
    Matrix qkv, out, gate, up, down, inputs_gate, inputs_projection;
};

class Decoder {
  public:
    Decoder(const Spec &spec, const LayerSpec *about) : spec(spec), pool(spec.threads), ropes(spec.ropes), cache(spec.half_cache) {
        int widest_qkv = 0, widest_heads = 0, widest_inner = spec.inputs;
        for (int index = 0; index < spec.layers; index++) {
            layers.push_back(made(about[index]));
            const Layer &layer = layers.back();
            widest_qkv = std::max(widest_qkv, layer.qkv_width);
            widest_heads = std::max(widest_heads, layer.q_width);
            widest_inner = std::max(widest_inner, layer.about.inner);
        }
        for (int t = 0; t < spec.threads; t++) samplers.emplace_back(spec.vocabulary);
        block = BLOCK;
        for (auto &shape : shapes) {
            const int tile = shape.attention[0]->queries_per_tile;
            block = std::max(block, (BLOCK + tile - 1) / tile * tile);
        }
        normed = Block<float>((size_t)(block + NORMED_ALONE * spec.threads) * spec.hidden, Pages::small);
        qkv = Block<float>((size_t)block * widest_qkv, Pages::small);
        attended = Block<float>((size_t)block * widest_heads, Pages::small);
        inner = Block<float>((size_t)block * widest_inner, Pages::small);
        ups = Block<float>((size_t)block * widest_inner, Pages::small);
        added = Block<float>((size_t)block * spec.hidden, Pages::small);
        own_inputs = Block<float>((size_t)spec.threads * spec.layers * spec.inputs, Pages::small);
        best.resize((size_t)block * spec.threads);
    }

    const Spec spec;
    Pool pool;
    std::vector<Layer> layers;
    std::vector<Rope> ropes;
    Matrix embed, head, inputs_embed, inputs_projection;
    Norm norm, inputs_norm;
    Cache cache;
    Pulse pulse = nullptr;

    const Matrix &outputs() const { return spec.tied ? embed : head; }

    size_t weights_bytes() const {
        size_t total = embed.bytes() + head.bytes() + inputs_embed.bytes() + inputs_projection.bytes();
        for (auto &layer : layers)
            for (auto *matrix : {&layer.qkv, &layer.out, &layer.gate, &layer.up, &layer.down, &layer.inputs_gate, &layer.inputs_projection})
                total += matrix->bytes();
        return total;
    }

    void reserve(int sequences, int64_t positions) {
        const size_t segments = positions / SEGMENT + 1;
        size_t most = 0;
        for (auto &shape : shapes) {
            // Segments are shared out only where there are fewer items than threads.
            most = std::max(most, segments * pool.threads() * shape.attention[0]->gained_floats());
            shape.spans.reserve(sequences + (size_t)block);
            shape.split.reserve(shape.spans.capacity() + 1);
        }
        shared = Block<float>(most, Pages::small);
    }

    // Last hidden states [tokens][hidden].
    void step(const Step &step, float *hidden) {
        pulsed = std::chrono::steady_clock::now();
        auto work = [&](Pool::Member &member) {
            int64_t begin, end;
            member.share(step.tokens, begin, end);
            for (int64_t t = begin; t < end; t++) embedded(embed, step.token_ids[t], spec.embed_scale, hidden + t * spec.hidden, spec.hidden);
            const bool at_once = step.tokens <= block;
            if (member.index == 0 && at_once)
                for (auto &shape : shapes) plan(shape, step, 0, step.tokens);
            member.meet();
            if (spec.inputs)
                for (int first = 0; first < step.tokens; first += block)
                    begin_inputs(member, step, first, std::min(block, step.tokens - first), hidden + (int64_t)first * spec.hidden);
            for (int index = 0; index < spec.layers; index++)
                for (int first = 0; first < step.tokens; first += block) {
                    if (member.index == 0) beat();
                    if (!at_once) {
                        if (member.index == 0) plan(shapes[layers[index].shape], step, first, std::min(block, step.tokens - first));
                        member.meet();
                    }
                    through(member, index, step, first, std::min(block, step.tokens - first), hidden + (int64_t)first * spec.hidden);
                }
        };
        pool.run(work);
    }

    // Hidden states [count][hidden] as the head reads them.
    void as_head_reads(const float *hidden, int count, float *to) {
        for (int row = 0; row < count; row++) normalize(hidden + (int64_t)row * spec.hidden, norm, to + (int64_t)row * spec.hidden);
    }

    // Logits [count][vocabulary].
    void logits(const float *hidden, int count, float *to) {
        for (int first = 0; first < count; first += block) {
            const int rows = std::min(block, count - first);
            auto work = [&](Pool::Member &member) {
                const float *inputs = normed_rows(member, hidden + (int64_t)first * spec.hidden, rows, norm);
                const Target target{to + (int64_t)first * spec.vocabulary, spec.vocabulary};
                for (int64_t begin, end; member.claim(outputs().panels(), TOGETHER, begin, end);) {
                    outputs().multiply({inputs, spec.hidden, rows}, target, begin, end);
                    finish(target, rows, begin * PANEL, std::min<int64_t>(end * PANEL, spec.vocabulary));
                }
            };
            pool.run(work);
        }
    }

    // The likeliest token of each of count <= block rows, of equal ones the first; -1 where a logit is not finite or all are -inf. Scale
    // and cap of logits keep their order, so they are left out.
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

    // Heads of one size: what computes their attention, and what of a step.
    struct Shape {
        int heads, kv_heads, head_dim;
        std::vector<std::unique_ptr<Attention>> attention;  // of each thread
        std::vector<Span> spans;
        std::vector<int64_t> split;  // first segment of each span, then how many there are; empty: spans are computed whole
    };

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

    Layer made(const LayerSpec &about) {
        Layer layer{};
        layer.about = about;
        layer.shape = shape_of(about);
        layer.q_width = about.heads * about.head_dim;
        layer.kv_width = about.kv_heads * about.head_dim;
        layer.own_heads = about.kv_layer < 0 ? about.kv_heads : 0;
        layer.qkv_width = layer.q_width + 2 * layer.own_heads * about.head_dim;
        if (about.value_norm) layer.v_norm.weight.assign(about.head_dim, 1.0f);
        about.kv_layer < 0 ? cache.add(about.kv_heads, about.head_dim) : cache.share(about.kv_layer);
        return layer;
    }

    int shape_of(const LayerSpec &about) {
        int index = 0;
        for (auto &shape : shapes) {
            if (shape.heads == about.heads && shape.kv_heads == about.kv_heads && shape.head_dim == about.head_dim) return index;
            index++;
        }
        shapes.push_back({about.heads, about.kv_heads, about.head_dim, {}, {}, {}});
        for (int t = 0; t < spec.threads; t++)
            shapes.back().attention.push_back(std::make_unique<Attention>(about.heads, about.kv_heads, about.head_dim));
        return index;
    }

    static void embedded(const Matrix &matrix, int64_t token, float scale, float *to, int64_t width) {
        matrix.row(token, to);
        map(to, width, [=](F x) { return x * splat(scale); });
    }

    void normalize(const float *x, const Norm &norm, float *to) const {
        if (spec.layer_norm)
            layer_norm(x, norm, spec.eps, to);
        else
            rms_norm(x, norm.weight.data(), (int)norm.weight.size(), spec.eps, to);
    }

    // [rows][hidden], until it is asked for again. Few rows every thread computes for itself: cheaper than to wait for one another.
    const float *normed_rows(Pool::Member &member, const float *hidden, int rows, const Norm &norm) {
        const bool alone = rows <= NORMED_ALONE;
        float *to = normed.get() + (alone ? (int64_t)(block + NORMED_ALONE * member.index) * spec.hidden : 0);
        int64_t begin = 0, end = rows;
        if (!alone) member.share(rows, begin, end);
        for (int64_t row = begin; row < end; row++) normalize(hidden + row * spec.hidden, norm, to + row * spec.hidden);
        if (!alone) member.meet();
        return to;
    }

    // The spans of rows [first, first + count) of a step, and who computes what of their attention.
    void plan(Shape &shape, const Step &step, int first, int count) {
        auto &spans = shape.spans;
        auto &split = shape.split;
        spans.clear();
        const int most = shape.attention[0]->queries_per_tile;
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
        const int64_t items = (int64_t)spans.size() * shape.kv_heads;
        split.clear();
        if (items < pool.threads()) {
            int64_t segments = 0;
            for (auto &span : spans) split.push_back(segments), segments += Attention::segments(span);
            split.push_back(segments);
            if (segments == (int64_t)spans.size()) split.clear();  // there is nothing to share out
        }
    }

    // A layer without norms before attention and MLP reads the hidden states as they are; one without a norm before its MLP alone computes
    // both from the same norm.
    void through(Pool::Member &member, int index, const Step &step, int first, int rows, float *hidden) {
        const Layer &layer = layers[index];
        const float *inputs = layer.input_norm ? normed_rows(member, hidden, rows, layer.input_norm) : hidden;
        product(member, layer.qkv, {inputs, spec.hidden, rows}, {qkv.get(), layer.qkv_width, bias(layer.qkv_bias)});
        member.meet();
        place(member, layer, index, step, first, rows);
        member.meet();
        attend(member, layer, index);
        member.meet();
        add(member, layer.out, {attended.get(), layer.q_width, rows}, layer.out_bias, layer.post_attention_norm, layer.about.residual_scale, hidden);
        if (layer.mlp_norm) inputs = normed_rows(member, hidden, rows, layer.mlp_norm);
        for (int64_t begin, end; member.claim(layer.up.panels(), TOGETHER, begin, end);) up(layer, {inputs, spec.hidden, rows}, begin, end);
        member.meet();
        add(member, layer.down, {inner.get(), layer.about.inner, rows}, layer.down_bias, layer.post_mlp_norm, layer.about.residual_scale, hidden);
        if (spec.inputs) add_inputs(member, layer, {step.inputs + ((int64_t)first * spec.layers + index) * spec.inputs, inputs_width(), rows}, hidden);
        if (!layer.scale.empty()) {
            each_row(member, rows, [&](int64_t row) { map(hidden + row * spec.hidden, spec.hidden, [&](F x) { return x * splat(layer.scale[0]); }); });
            member.meet();
        }
    }

    // The MLP of rows up to its activation, panels [begin, end) of its outputs.
    void up(const Layer &layer, const Rows &rows, int64_t begin, int64_t end) {
        const int width = layer.about.inner;
        const int64_t from = begin * PANEL, to = std::min<int64_t>(end * PANEL, width);
        if (!layer.about.gated) {
            layer.up.multiply(rows, {inner.get(), width, bias(layer.up_bias)}, begin, end);
            return activate(layer.about.activation, {inner.get(), width}, rows.count, from, to);
        }
        layer.gate.multiply(rows, {inner.get(), width, bias(layer.gate_bias)}, begin, end);
        layer.up.multiply(rows, {ups.get(), width, bias(layer.up_bias)}, begin, end);
        gate(layer.about.activation, {inner.get(), width}, {ups.get(), width, rows.count}, from, to);
    }

    // hidden += scale * norm(rows @ matrix.T + bias), all of it or what the layer has; then threads have met.
    void add(Pool::Member &member, const Matrix &matrix, const Rows &rows, const std::vector<float> &biases, const Norm &norm, float scale, float *hidden) {
        if (!norm && scale == 1.0f) {
            product(member, matrix, rows, {hidden, spec.hidden, bias(biases), true});
            member.meet();
            return;
        }
        product(member, matrix, rows, {added.get(), spec.hidden, bias(biases)});
        member.meet();
        each_row(member, rows.count, [&](int64_t row) {
            float *more = added.get() + row * spec.hidden, *to = hidden + row * spec.hidden;
            if (norm) normalize(more, norm, more);
            for (int i = 0; i < spec.hidden; i++) to[i] += scale * more[i];
        });
        member.meet();
    }

    int64_t inputs_width() const { return (int64_t)spec.layers * spec.inputs; }

    // What layers add of the tokens of some rows: (their embedding + the norm of a projection of their hidden state) / sqrt(2).
    void begin_inputs(Pool::Member &member, const Step &step, int first, int rows, const float *hidden) {
        float *inputs = step.inputs + first * inputs_width();
        if (member.index == 0) beat();
        product(member, inputs_projection, {hidden, spec.hidden, rows}, {inputs, inputs_width()});
        member.meet();
        const float shrunk = 1.0f / std::sqrt((float)spec.hidden), half = std::sqrt(0.5f);
        each_row(member, rows, [&](int64_t row) {
            float *own = own_inputs.get() + member.index * inputs_width();
            embedded(inputs_embed, step.token_ids[first + row], spec.inputs_scale, own, inputs_width());
            for (int index = 0; index < spec.layers; index++, own += spec.inputs) {
                float *at = inputs + row * inputs_width() + index * spec.inputs;
                map(at, spec.inputs, [=](F x) { return x * splat(shrunk); });
                normalize(at, inputs_norm, at);
                for (int i = 0; i < spec.inputs; i++) at[i] = (at[i] + own[i]) * half;
            }
        });
        member.meet();
    }

    // hidden += norm(projection(act(gate(hidden)) * inputs))
    void add_inputs(Pool::Member &member, const Layer &layer, const Rows &inputs, float *hidden) {
        for (int64_t begin, end; member.claim(layer.inputs_gate.panels(), TOGETHER, begin, end);) {
            const Target gates{inner.get(), spec.inputs};
            layer.inputs_gate.multiply({hidden, spec.hidden, inputs.count}, gates, begin, end);
            gate(spec.inputs_activation, gates, inputs, begin * PANEL, std::min<int64_t>(end * PANEL, spec.inputs));
        }
        member.meet();
        add(member, layer.inputs_projection, {inner.get(), spec.inputs, inputs.count}, {}, layer.inputs_norm, 1.0f, hidden);
    }

    // Call `what` with this thread's share of rows.
    template <class What>
    static void each_row(Pool::Member &member, int rows, What &&what) {
        int64_t begin, end;
        member.share(rows, begin, end);
        for (int64_t row = begin; row < end; row++) what(row);
    }

    // Logits of tokens [begin, end) as the model gives them: scaled and capped.
    void finish(const Target &logits, int rows, int64_t begin, int64_t end) const {
        if (spec.logit_scale == 1.0f && !spec.logit_soft_cap) return;
        for (int row = 0; row < rows; row++)
            map(logits.at + row * logits.stride + begin, end - begin, [&](F x) {
                const F cap = splat(spec.logit_soft_cap), scaled = x * splat(spec.logit_scale);
                return spec.logit_soft_cap ? cap * tangent(scaled / cap) : scaled;
            });
    }

    // This thread's part of rows @ matrix.T.
    static void product(Pool::Member &member, const Matrix &matrix, const Rows &rows, const Target &target) {
        for (int64_t begin, end; member.claim(matrix.panels(), TOGETHER, begin, end);) matrix.multiply(rows, target, begin, end);
    }

    static const float *bias(const std::vector<float> &values) { return values.empty() ? nullptr : values.data(); }

    // Queries and keys are normed and turned to their positions, keys and values put into their slots.
    void place(Pool::Member &member, const Layer &layer, int index, const Step &step, int first, int rows) {
        const LayerSpec &about = layer.about;
        if (about.row_norms || about.value_is_key) {
            each_row(member, rows, [&](int64_t row) { prepare(layer, qkv.get() + row * layer.qkv_width); });
            member.meet();
        }
        const int dim = about.head_dim, heads = about.heads + layer.own_heads;
        const Rope *rope = about.rope < 0 ? nullptr : &ropes[about.rope];
        int64_t begin, end;
        member.share((int64_t)rows * heads, begin, end);
        for (int64_t item = begin; item < end; item++) {
            const int row = item / heads, head = item % heads, position = step.positions[first + row];
            float *at = qkv.get() + (int64_t)row * layer.qkv_width + head * dim;
            const bool key = head >= about.heads;
            const Norm &norm = key ? layer.k_norm : layer.q_norm;
            const bool by_head = norm && !about.row_norms;
            if (by_head && !about.norm_after_rope) normalize(at, norm, at);
            if (rope) rope->turn(at, position);
            if (rope && !key) rope->grow(at, dim, position);
            if (by_head && about.norm_after_rope) normalize(at, norm, at);
            if (!key) continue;
            float *value = at + layer.kv_width;
            if (layer.v_norm) rms_norm(value, layer.v_norm.weight.data(), dim, spec.eps, value);
            cache.cells(index, head - about.heads).put(step.out_slots[first + row], at, value);
        }
    }

    // What is done to a row's queries, keys and values together.
    void prepare(const Layer &layer, float *row) const {
        float *keys = row + layer.q_width;
        if (layer.about.value_is_key && layer.own_heads) std::copy(keys, keys + layer.kv_width, keys + layer.kv_width);
        if (!layer.about.row_norms) return;
        normalize(row, layer.q_norm, row);
        if (layer.own_heads) normalize(keys, layer.k_norm, keys);
    }

    void attend(Pool::Member &member, const Layer &layer, int index) {
        const Shape &shape = shapes[layer.shape];
        Attention &mine = *shape.attention[member.index];
        const Scoring scoring{layer.about.scale, layer.about.soft_cap, layer.about.window};
        const int heads = shape.kv_heads;
        const auto &spans = shape.spans;
        const auto &split = shape.split;
        if (split.empty()) {
            const int64_t items = (int64_t)spans.size() * heads;
            // The later spans of a prompt see more keys: they are begun first.
            for (int64_t begun = 0, end = 0; begun < end || member.claim(items, 1, begun, end); begun++) {
                const int64_t item = items - 1 - begun;
                const int head = item % heads;
                mine.whole(cache.cells(index, head), head, spans[item / heads], scoring, qkv.get(), layer.qkv_width, attended.get(), layer.q_width);
            }
            return;
        }
        // Where a segment's gain lies: those of a head one after another.
        auto part = [&](int head, int64_t segment) { return shared.get() + (head * split.back() + segment) * mine.gained_floats(); };
        const int64_t segments = split.back(), items = segments * heads;
        for (int64_t item = 0, end = 0; item < end || member.claim(items, 1, item, end); item++) {
            const int64_t segment = item / heads;
            const int span = std::upper_bound(split.begin(), split.end(), segment) - split.begin() - 1, head = item % heads;
            mine.segment(cache.cells(index, head), head, spans[span], scoring, segment - split[span], qkv.get(), layer.qkv_width, part(head, segment));
        }
        member.meet();
        for (int64_t item = 0, end = 0; item < end || member.claim((int64_t)spans.size() * heads, 1, item, end); item++)
            mine.joined(item % heads, spans[item / heads], part(item % heads, split[item / heads]), attended.get(), layer.q_width);
    }

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

    int block;
    std::vector<Shape> shapes;
    std::vector<Sampler> samplers;  // of each thread
    Block<float> normed, qkv, attended, inner, ups, added, shared;
    Block<float> own_inputs;  // of each thread, the embedding of what layers add of a token
    std::vector<Best> best;
    std::chrono::steady_clock::time_point pulsed;
};
