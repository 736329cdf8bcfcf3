// What objectives with hinges share: lists of thresholds, and the sums that come of counting negatives below
// them.
#pragma once

#include "../objective.h"

namespace tripletops {

// An infinite threshold would make NaN of the terms that it does not have.
template <class T>
T within_type(double threshold) {
  return T(std::min(threshold, double(std::numeric_limits<T>::max())));
}

// `begin`: anchor -> its first threshold; one more entry at the end. Thresholds ascend.
template <class T>
Thresholds<T> thresholds_from(const int64_t* begin, const T* threshold, Ordered<T>& rows) {
  Thresholds<T> thresholds;
  thresholds.begin = begin, thresholds.threshold = threshold;
  thresholds.hits = rows.scratch.filled(begin[rows.anchors()], int32_t(0));
  return thresholds;
}

// By anchor: its last threshold, beyond which no negative costs anything.
template <class T>
const T* limits_of(const Thresholds<T>& thresholds, Ordered<T>& rows) {
  T* limit = rows.by_anchor(-std::numeric_limits<T>::infinity());
  for (int32_t a = 0; a < rows.anchors(); ++a)
    if (thresholds.begin[a] < thresholds.begin[a + 1])
      limit[a] = thresholds.threshold[thresholds.begin[a + 1] - 1];
  return limit;
}

// A negative counts against the threshold it lies below and against all larger ones.
template <class T, class Sums>
void add_hits(const Thresholds<T>& thresholds, int32_t anchor, Sums& sums) {
  int64_t below = 0;
  for (int64_t i = thresholds.begin[anchor]; i < thresholds.begin[anchor + 1]; ++i) {
    below += thresholds.hits[i];
    sums.negative_loss[anchor] += double(below) * double(thresholds.threshold[i]);
    sums.negative_terms[anchor] += double(below);
  }
  // In float64 both parts may have overflowed.
  if (std::isnan(sums.negative_loss[anchor]))
    sums.negative_loss[anchor] = std::numeric_limits<double>::infinity();
}

}  // namespace tripletops
