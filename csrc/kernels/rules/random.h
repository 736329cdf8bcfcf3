// A uniform candidate: the one with the largest hash.
#pragma once

#include "../selection.h"

namespace tripletops {

template <class T>
struct RandomRule : Rule<T> {
  using Rule<T>::Rule;

  void pick(Selection<T>& selection, Picks<T> picks) const override {
    for_each_range(selection.rows.pool, selection.rows.anchors(), kRowsPerTask,
                   [&](int64_t begin, int64_t end, int) {
                     for (int64_t a = begin; a < end; ++a)
                       picks.index[a] = selection.draw(int32_t(a), this->kind());
                   });
  }
};

}  // namespace tripletops
