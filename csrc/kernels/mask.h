// Who is whose positive and negative, for rectangles of pairs: tiles in registers and blocks in memory alike.
// Rows are ordered by class, so a rectangle holds negatives only, positives only, or (along the classes' own
// blocks) both.
#pragma once

#include "functions.h"

namespace tripletops {
namespace {

// The anchors from `row` and the candidates from `column` on.
struct Rectangle {
  int32_t row, rows, column, columns;
};

enum class Holds { negatives, positives, both };

// Positions behind the last row of a side belong to no class and do not count.
template <class T>
inline Holds what_holds(const Pairs<T>& pairs, const Rectangle& at) {
  const auto last = [](int32_t begin, int32_t size, int32_t count) {
    return (begin + size < count ? begin + size : count) - 1;
  };
  const int32_t* row_group = pairs.anchors.group;
  const int32_t* column_group = pairs.candidates.group;
  const int32_t row_low = row_group[at.row];
  const int32_t row_high = row_group[last(at.row, at.rows, pairs.anchors.count)];
  const int32_t column_low = column_group[at.column];
  const int32_t column_high = column_group[last(at.column, at.columns, pairs.candidates.count)];
  if (row_high < column_low || column_high < row_low) return Holds::negatives;
  return row_low == column_high && row_high == column_low ? Holds::positives : Holds::both;
}

// values[r * stride + c] = excluded where the pair is not of the wanted kind, and where it is self.
template <class T>
inline void exclude(const Pairs<T>& pairs, const Rectangle& at, bool wants_same_class, T excluded, T* values,
                    int64_t stride) {
  const int32_t* candidate_group = pairs.candidates.group + at.column;
  for (int32_t r = 0; r < at.rows; ++r, values += stride) {
    const int32_t group = pairs.anchors.group[at.row + r];
    for (int32_t c = 0; c < at.columns; ++c)
      values[c] = (candidate_group[c] == group) == wants_same_class ? values[c] : excluded;
    const int32_t self = pairs.self_position[at.row + r] - at.column;
    if (self >= 0 && self < at.columns) values[self] = excluded;
  }
}

}  // namespace
}  // namespace tripletops
