// The paged pool of keys and values.
#pragma once

#include <cstdint>
#include <vector>

#include "memory.h"
#include "simd.h"

constexpr int TOGETHER = 256;  // slots whose cells of all layers are neighbours

// Keys and values of one head of a layer, by slot, as float or bfloat16.
struct Cells {
    uint16_t *halves;  // null: they are floats
    float *floats;
    int64_t run;  // numbers that TOGETHER slots take in all layers
    int dim;

    int64_t at(int64_t slot) const {
        const uint64_t index = slot;
        return index / TOGETHER * run + index % TOGETHER * 2 * dim;
    }

    // A key and its value. Values are made finite, since the weight 0 of one that a query must not see would not undo a NaN; the key is
    // made NaN instead, so that whoever does see it fails.
    void put(int64_t slot, const float *key, const float *value) const {
        const int64_t k = at(slot), v = k + dim;
        for (int i = 0; i < dim; i++) {
            const float kept = halves ? widen(narrow(value[i])) : value[i];  // what is rounded may become infinite
            const float mark = kept - kept, sound = mark == 0 ? kept : 0.0f;
            if (halves)
                halves[k + i] = narrow(key[i] + mark), halves[v + i] = narrow(sound);
            else
                floats[k + i] = key[i] + mark, floats[v + i] = sound;
        }
    }

    // Into the processor's cache.
    void fetch(int64_t slot) const {
        const char *from = halves ? (const char *)(halves + at(slot)) : (const char *)(floats + at(slot));
        for (int i = 0; i < 2 * dim * (halves ? 2 : 4); i += 64) __builtin_prefetch(from + i);
    }

    // One of them as floats; `to` has room for whole registers, zeros beyond dim stay.
    void get(int64_t from, float *to) const {
        int i = 0;
        for (; i + LANES <= dim; i += LANES) store(to + i, halves ? widen(halves + from + i) : load(floats + from + i));
        for (; i < dim; i++) to[i] = halves ? widen(halves[from + i]) : floats[from + i];
    }
};

// Keys and values of every layer: [slots / TOGETHER][layers][kv_heads][TOGETHER][key, value][head_dim]. A key lies beside its value,
// since they are read together and from places that nobody can guess. What no text has reached yet takes no memory: were all slots of a
// layer neighbours, the first token would touch a huge page for each layer and head.
class Cache {
  public:
    explicit Cache(bool half) : half(half) {}

    // The next layer has cells of its own.
    void add(int kv_heads, int dim) {
        layers.push_back({run, dim});
        run += (int64_t)TOGETHER * kv_heads * 2 * dim;
    }

    // The next layer reads those of an earlier one.
    void share(int layer) { layers.push_back(Layer(layers[layer])); }

    void make(int64_t slots) {
        const size_t numbers = (size_t)run * ((slots + TOGETHER - 1) / TOGETHER);
        if (half)
            halves = Block<uint16_t>(numbers, Pages::huge);
        else
            floats = Block<float>(numbers, Pages::huge);
    }

    Cells cells(int layer, int head) const {
        const Layer &of = layers[layer];
        const int64_t first = of.first + (int64_t)head * TOGETHER * 2 * of.dim;
        return half ? Cells{halves.get() + first, nullptr, run, of.dim} : Cells{nullptr, floats.get() + first, run, of.dim};
    }

  private:
    struct Layer {
        int64_t first;  // number of a run
        int dim;
    };

    const bool half;  // bfloat16
    std::vector<Layer> layers;
    int64_t run = 0;
    Block<uint16_t> halves;
    Block<float> floats;
};
