// The nearest candidate beyond each of an anchor's floors, and the farthest of all, from blocks of half
// squared distances; and keeping the least key of a block's row.
#pragma once

#include "../functions.h"
#include "ranks.h"

namespace tripletops {
namespace {

// improve() by the keys of a row that are `least`, no key being below it. `to_key` makes keys of the values.
template <class T, class ToKey>
TRIPLETOPS_INLINE void settle_keys(const T* values, const ToKey& to_key, T least, const int32_t* index,
                                   T* best, int32_t* best_index) {
  for (int c = 0; c < kBlockRows; c += kLanes<T>) {
    uint32_t bits = lanes_not_above(to_key(load_vector<T>(values + c)), broadcast<T>(least));
    for (; bits; bits &= bits - 1) improve(least, index[c + __builtin_ctz(bits)], best, best_index);
  }
}

// Keeps the least key of a row, to_key(values), if it is better than the best one so far.
template <class T, class ToKey>
TRIPLETOPS_INLINE void keep_least_key(const T* values, const ToKey& to_key, const int32_t* index, T* best,
                                      int32_t* best_index) {
  Vector<T> lanes = broadcast<T>(kInfinity<T>);
  for (int c = 0; c < kBlockRows; c += kLanes<T>)
    lanes = keep_least(to_key(load_vector<T>(values + c)), lanes);
  if (lanes_not_above(lanes, broadcast<T>(*best)) == 0) return;
  settle_keys(values, to_key, least_lane<T>(lanes), index, best, best_index);
}

template <class T>
void keep_beyond(const Floors<T>& floors, int32_t anchor, int32_t count, const T* half,
                 const int32_t* index) {
  const Vector<T> none = broadcast<T>(kInfinity<T>);
  for (int32_t a = anchor; a < anchor + count; ++a, half += kBlockRows) {
    const int64_t begin = floors.begin[a], number = floors.begin[a + 1] - begin;
    if (number == 0) continue;
    const T* floor = floors.floor + begin;
    T* best = floors.beyond.key + begin;
    int32_t* best_index = floors.beyond.index + begin;

    keep_least_key(
        half, [&](Vector<T> key) { return key < none ? -key : none; }, index, floors.farthest.key + a,
        floors.farthest.index + a);
    if (number <= kFew) {
      for (int64_t k = 0; k < number; ++k) {
        const Vector<T> bar = broadcast<T>(floor[k]);
        keep_least_key(
            half, [&](Vector<T> key) { return key > bar ? key : none; }, index, best + k, best_index + k);
      }
      continue;
    }
    for (int c = 0; c < kBlockRows; ++c) {
      if (!(half[c] > floor[0] && half[c] < kInfinity<T>)) continue;
      const T key = half[c];
      const int64_t below = count_passing(floor, number, [&](T value) { return value < key; });
      improve(key, index[c], best + below - 1, best_index + below - 1);
    }
  }
}

}  // namespace
}  // namespace tripletops
