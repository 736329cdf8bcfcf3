// The rows of a call, ordered by class, and what every step of the call works with. Anchors and candidates
// are counted by position, unless a name says row.
#pragma once

#include <vector>

#include "classes.h"
#include "functions.h"
#include "parallel.h"
#include "scratch.h"

namespace tripletops {

constexpr int32_t kPadding = 128;     // at least a tile's rows, a panel's columns and a block's rows
constexpr double kSerialBelow = 1e6;  // multiply-adds that are done before a second thread would have begun

template <class T>
struct Ordered {
  const Functions<T>& functions;
  Pool pool;
  const Batch& batch;
  const int64_t width;
  Scratch scratch;
  Classes classes;
  std::vector<T*> buffers;                 // one per worker, of kBufferRows rows
  const int32_t* self_position = nullptr;  // anchor -> candidate, or -1
  bool exclude_self_everywhere = false;    // self_index names a row of another class

  Ordered(const Functions<T>& functions, const Pool& pool, const Batch& batch)
      : functions(functions), pool(pool), batch(batch), width(batch.anchors.width) {
    const double pairs = double(batch.anchors.count) * double(batch.candidates.count);
    if (pairs * double(width + 8) * (batch.self_mining ? 0.5 : 1) < kSerialBelow) this->pool.threads = 1;
    classes = order_by_class(batch, kPadding, scratch);
    for (int worker = 0; worker < this->pool.threads; ++worker)
      buffers.push_back(scratch.template take<T>(kBufferRows * width + kPadding));
    place_self();
  }

  int32_t anchors() const { return classes.anchors.count; }
  int32_t row_of(int32_t anchor) const { return classes.anchors.index[anchor]; }
  int32_t class_begin(int32_t anchor) const {
    return classes.candidates.begin[classes.anchors.group[anchor]];
  }
  int32_t class_end(int32_t anchor) const {
    return classes.candidates.begin[classes.anchors.group[anchor] + 1];
  }

  int64_t positive_count(int32_t anchor) const {
    const int32_t self = self_position[anchor];
    const bool inside = self >= class_begin(anchor) && self < class_end(anchor);
    return class_end(anchor) - class_begin(anchor) - inside;
  }
  int64_t negative_count(int32_t anchor) const {
    return classes.candidates.count - (self_position[anchor] >= 0) - positive_count(anchor);
  }
  // Whether the anchor has a positive and a negative.
  bool is_valid(int32_t anchor) const { return positive_count(anchor) > 0 && negative_count(anchor) > 0; }

  template <class V>
  V* by_anchor(V value) {
    return scratch.filled(anchors() + kPadding, value);
  }

  const T* zeros() { return scratch.filled(width, T(0)); }

  // Row -> position; -1 where the row is ignored.
  const int32_t* positions(const Order& order, int64_t rows) {
    int32_t* position = scratch.filled(rows, int32_t(-1));
    for (int32_t i = 0; i < order.count; ++i) position[order.index[i]] = i;
    return position;
  }

 private:
  void place_self() {
    const Order& candidates = classes.candidates;
    const int32_t* position_of = batch.self_index ? positions(candidates, batch.candidates.count) : nullptr;
    int32_t* self = scratch.template take<int32_t>(anchors() + kPadding);
    for (int32_t a = 0; a < anchors() + kPadding; ++a) {
      self[a] = -1;
      if (a >= anchors()) continue;
      if (batch.self_mining) {
        self[a] = a;
      } else if (batch.self_index) {
        const int64_t row = batch.self_index[row_of(a)];
        if (row >= 0 && row < batch.candidates.count) self[a] = position_of[row];
        if (self[a] >= 0 && candidates.group[self[a]] != classes.anchors.group[a])
          exclude_self_everywhere = true;
      }
    }
    self_position = self;
  }
};

}  // namespace tripletops
