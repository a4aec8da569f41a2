// What the library is told of a model and of a step; library.py mirrors these structs.
#pragma once

#include <cstdint>

#include "activations.h"

struct Spec {
    int32_t vocabulary, hidden, layers, ropes, tied, half_cache, threads;
    int32_t layer_norm;               // norms are LayerNorms, not RMS norms
    int32_t inputs;                   // numbers of a token that each layer adds through a gate of its own; 0: none
    Activation inputs_activation;     // of these gates
    float eps;                        // of all norms
    float embed_scale, inputs_scale;  // of the two embeddings
    float logit_scale;
    float logit_soft_cap;  // 0: none
};

// A layer's sizes and formulas. Which norms and biases it has is seen by its parameters.
struct LayerSpec {
    int32_t heads, kv_heads, head_dim, inner;
    int32_t window;           // positions a query sees, its own included; 0: all
    int32_t rope;             // index; -1: no rotation
    int32_t kv_layer;         // earlier layer whose keys and values are read; -1: own ones
    int32_t row_norms;        // queries and keys are normed over all heads of a token together, not each head
    int32_t norm_after_rope;  // of heads
    int32_t value_is_key;     // a value is the projected key, before norm and rotation
    int32_t value_norm;       // values are normed without weights
    int32_t gated;            // the MLP
    Activation activation;
    float scale;           // of the scores
    float soft_cap;        // of the scores; 0: none
    float residual_scale;  // of what attention and MLP add
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
    float *inputs;  // [tokens][layers][spec.inputs], room for what layers add; null without
};
