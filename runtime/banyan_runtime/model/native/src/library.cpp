// The C interface, as library.py knows it. Nothing throws across it: calls that may fail give 0, or say so.
#include <new>
#include <string_view>

#include "check.h"
#include "decoder.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Parameters by their names in weight_map.py; gates above ups are a matrix each.
template <class Owner, class Part>
struct Named {
    std::string_view name;
    Part Owner::*part;
};

constexpr Named<Decoder, Matrix> MATRICES[] = {
    {"embed", &Decoder::embed},
    {"head", &Decoder::head},
    {"inputs_embed", &Decoder::inputs_embed},
    {"inputs_projection", &Decoder::inputs_projection},
};
constexpr Named<Decoder, Norm> NORMS[] = {
    {"norm", &Decoder::norm},
    {"inputs_norm", &Decoder::inputs_norm},
};
constexpr Named<Layer, Matrix> LAYER_MATRICES[] = {
    {"qkv", &Layer::qkv},
    {"out", &Layer::out},
    {"gate", &Layer::gate},
    {"up", &Layer::up},
    {"down", &Layer::down},
    {"inputs_gate", &Layer::inputs_gate},
    {"inputs_projection", &Layer::inputs_projection},
};
constexpr Named<Layer, Norm> LAYER_NORMS[] = {
    {"input_norm", &Layer::input_norm},
    {"q_norm", &Layer::q_norm},
    {"k_norm", &Layer::k_norm},
    {"post_attention_norm", &Layer::post_attention_norm},
    {"mlp_norm", &Layer::mlp_norm},
    {"post_mlp_norm", &Layer::post_mlp_norm},
    {"inputs_norm", &Layer::inputs_norm},
};
constexpr Named<Layer, std::vector<float>> LAYER_VECTORS[] = {
    {"qkv_bias", &Layer::qkv_bias},
    {"out_bias", &Layer::out_bias},
    {"gate_bias", &Layer::gate_bias},
    {"up_bias", &Layer::up_bias},
    {"down_bias", &Layer::down_bias},
    {"scale", &Layer::scale},
};

// Null where there is none of the name.
template <class Owner, class Part, size_t COUNT>
Part *find(const Named<Owner, Part> (&known)[COUNT], Owner &owner, std::string_view name) {
    for (auto &each : known)
        if (each.name == name) return &(owner.*each.part);
    return nullptr;
}

// `layer` -1: the model's own.
Matrix *matrix(Decoder &decoder, int layer, std::string_view name) {
    return layer < 0 ? find(MATRICES, decoder, name) : find(LAYER_MATRICES, decoder.layers[layer], name);
}

std::vector<float> *vector(Decoder &decoder, int layer, std::string_view name) {
    if (layer >= 0)
        if (auto *found = find(LAYER_VECTORS, decoder.layers[layer], name)) return found;
    constexpr std::string_view BIAS = "_bias";
    const bool bias = name.size() > BIAS.size() && name.substr(name.size() - BIAS.size()) == BIAS;
    if (bias) name.remove_suffix(BIAS.size());
    Norm *norm = layer < 0 ? find(NORMS, decoder, name) : find(LAYER_NORMS, decoder.layers[layer], name);
    return norm ? bias ? &norm->bias : &norm->weight : nullptr;
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

EXPORT Decoder *banyan_create(const Spec *spec, const LayerSpec *layers, Pulse pulse) {
    try {
        auto *decoder = new Decoder(*spec, layers);
        decoder->pulse = pulse;
        return decoder;
    } catch (const std::exception &) {
        return nullptr;
    }
}

EXPORT void banyan_destroy(Decoder *decoder) { delete decoder; }

// Rows of a matrix, below those that are there. 1: they were taken over; -1: there is no matrix of this name.
EXPORT int32_t banyan_matrix(Decoder *decoder, int32_t layer, const char *name, int32_t kind, const void *data, int64_t outputs, int64_t width) {
    try {
        Matrix *to = matrix(*decoder, layer, name);
        if (!to) return -1;
        to->append(static_cast<Kind>(kind), data, outputs, width, decoder->pool);
        return 1;
    } catch (const std::bad_alloc &) {
        return 0;
    }
}

EXPORT int32_t banyan_vector(Decoder *decoder, int32_t layer, const char *name, const float *data, int64_t count) {
    try {
        std::vector<float> *to = vector(*decoder, layer, name);
        if (!to) return -1;
        to->assign(data, data + count);
        return 1;
    } catch (const std::bad_alloc &) {
        return 0;
    }
}

EXPORT int32_t banyan_cache(Decoder *decoder, int64_t slots) {
    try {
        decoder->cache.make(slots);
        return 1;
    } catch (const std::bad_alloc &) {
        return 0;
    }
}

EXPORT int32_t banyan_reserve(Decoder *decoder, int32_t sequences, int64_t positions) {
    try {
        decoder->reserve(sequences, positions);
        return 1;
    } catch (const std::bad_alloc &) {
        return 0;
    }
}

// Cosines and sines [positions][dim / 2] of a rope, and the growth of queries [positions], or null.
EXPORT int32_t banyan_rope(Decoder *decoder, int32_t index, int32_t dim, int64_t positions, const float *cosines, const float *sines, const float *growth) {
    try {
        const int64_t half = dim / 2;
        Rope &rope = decoder->ropes[index];
        rope.half = (int)half;
        rope.cosines.assign(cosines, cosines + positions * half);
        rope.sines.assign(sines, sines + positions * half);
        rope.growth.assign(growth, growth + (growth ? positions : 0));
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
