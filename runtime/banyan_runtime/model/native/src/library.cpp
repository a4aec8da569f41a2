// The C interface, as library.py knows it. Nothing throws across it: calls that may fail give 0, or say so.
#include <new>

#include "check.h"
#include "decoder.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum Place : int32_t { EMBED, HEAD, NORM, INPUT_NORM, QKV, QKV_BIAS, Q_NORM, K_NORM, OUT, OUT_BIAS, MLP_NORM, GATE, GATE_BIAS, UP, UP_BIAS, DOWN, DOWN_BIAS };

Matrix *matrix(Decoder &decoder, int layer, int place) {
    switch (place) {
    case EMBED: return &decoder.embed;
    case HEAD: return &decoder.head;
    case QKV: return &decoder.layers[layer].qkv;
    case OUT: return &decoder.layers[layer].out;
    case GATE: return &decoder.layers[layer].gate;
    case UP: return &decoder.layers[layer].up;
    case DOWN: return &decoder.layers[layer].down;
    default: return nullptr;
    }
}

std::vector<float> *vector(Decoder &decoder, int index, int place) {
    if (place == NORM) return &decoder.norm;
    auto &layer = decoder.layers[index];
    switch (place) {
    case INPUT_NORM: return &layer.input_norm;
    case QKV_BIAS: return &layer.qkv_bias;
    case Q_NORM: return &layer.q_norm;
    case K_NORM: return &layer.k_norm;
    case OUT_BIAS: return &layer.out_bias;
    case MLP_NORM: return &layer.mlp_norm;
    case GATE_BIAS: return &layer.gate_bias;
    case UP_BIAS: return &layer.up_bias;
    case DOWN_BIAS: return &layer.down_bias;
    default: return nullptr;
    }
}

}  // namespace

EXPORT int32_t banyan_lanes() { return LANES; }

// What the library does wrongly on this processor, in words that follow "its kernels"; null if nothing.
EXPORT const char *banyan_check() {
    try {
        return check::everything();
    } catch (const std::exception &) {
        return "find no memory to be tried in";
    }
}

EXPORT Decoder *banyan_create(const Spec *spec, Pulse pulse) {
    try {
        auto *decoder = new Decoder(*spec);
        decoder->pulse = pulse;
        return decoder;
    } catch (const std::exception &) {
        return nullptr;
    }
}

EXPORT void banyan_destroy(Decoder *decoder) { delete decoder; }

// Rows of a matrix, below those that are there. 1 if it was taken over.
EXPORT int32_t banyan_matrix(Decoder *decoder, int32_t layer, int32_t place, int32_t kind, const void *data, int64_t outputs, int64_t width) {
    try {
        matrix(*decoder, layer, place)->append(static_cast<Kind>(kind), data, outputs, width, decoder->pool);
        return 1;
    } catch (const std::bad_alloc &) {
        return 0;
    }
}

EXPORT int32_t banyan_vector(Decoder *decoder, int32_t layer, int32_t place, const float *data, int64_t count) {
    try {
        vector(*decoder, layer, place)->assign(data, data + count);
        return 1;
    } catch (const std::bad_alloc &) {
        return 0;
    }
}

EXPORT void banyan_window(Decoder *decoder, int32_t layer, int32_t window) { decoder->layers[layer].window = window; }

EXPORT int32_t banyan_cache(Decoder *decoder, int64_t slots) {
    try {
        decoder->cache.kv_heads = decoder->spec.kv_heads;
        decoder->cache.head_dim = decoder->spec.head_dim;
        decoder->cache.half = decoder->spec.half_cache;
        decoder->cache.make(decoder->spec.layers, slots);
        return 1;
    } catch (const std::bad_alloc &) {
        return 0;
    }
}

EXPORT int32_t banyan_reserve(Decoder *decoder, int32_t sequences, int64_t positions, const float *cosines, const float *sines) {
    try {
        decoder->reserve(sequences, positions);
        decoder->rotations(cosines, sines, positions);
        return 1;
    } catch (const std::bad_alloc &) {
        return 0;
    }
}

EXPORT int64_t banyan_weights_bytes(const Decoder *decoder) { return decoder->weights_bytes(); }
EXPORT void banyan_step(Decoder *decoder, const Step *step, float *hidden) { decoder->step(*step, hidden); }
EXPORT void banyan_normed(Decoder *decoder, const float *hidden, int32_t count, float *to) { decoder->as_head_reads(hidden, count, to); }
EXPORT void banyan_logits(Decoder *decoder, const float *hidden, int32_t count, float *to) { decoder->logits(hidden, count, to); }
EXPORT void banyan_likeliest(Decoder *decoder, const float *hidden, int32_t count, int64_t *tokens) { decoder->likeliest(hidden, count, tokens); }
EXPORT void banyan_sample(Decoder *decoder, const float *logits, int32_t count, const Draws *draws, int64_t *tokens) { decoder->sample(logits, count, *draws, tokens); }
