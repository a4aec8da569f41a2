// What is made of activations is kept by the thread that made it, until the next meeting.
#pragma once

#include <cstdint>

#include "pool.h"
#include "rows.h"

// What something was made of, for who keeps it.
class Origin {
  public:
    // Whether what was made is what these make: the same activations, at the same meeting.
    bool holds(const Rows &rows, int64_t inputs) const {
        return meeting == meetings && from.at == rows.at && from.stride == rows.stride && from.count == rows.count && width == inputs;
    }
    void set(const Rows &rows, int64_t inputs) { from = rows, width = inputs, meeting = meetings; }
    int rows() const { return from.count; }

  private:
    Rows from{};
    int64_t width = 0;
    uint64_t meeting = ~uint64_t(0);
};
