// The sum over an anchor's thresholds t of [t - d]+. With many thresholds a distance is ranked among them:
// then a prefix sum gives what it costs at all of them at once.
#pragma once

#include "../functions.h"
#include "../vector/ranks.h"

namespace tripletops {
namespace {

template <class T>
TRIPLETOPS_INLINE Vector<T> ones_where_above(Vector<T> a, Vector<T> b) {
  return a > b ? broadcast<T>(1) : Vector<T>{};
}

// Calls visit(column, first threshold above) for every distance of a row that is below the last threshold.
template <class T, class Visit>
TRIPLETOPS_INLINE void rank_row(const T* threshold, int64_t count, const T* distances, const Visit& visit) {
  const Vector<T> last = broadcast<T>(threshold[count - 1]);
  for (int c = 0; c < kBlockRows; c += kLanes<T>) {
    uint32_t bits = ~lanes_not_above(last, load_vector<T>(distances + c)) & kAllLanes<T>;
    for (; bits; bits &= bits - 1) {
      const int column = c + __builtin_ctz(bits);
      const T distance = distances[column];
      visit(column, count_passing(threshold, count, [&](T value) { return value <= distance; }));
    }
  }
}

template <class T>
TRIPLETOPS_INLINE void add_hinges_of(const Thresholds<T>& costs, int32_t anchor, const T* distances) {
  const int64_t begin = costs.begin[anchor], count = costs.begin[anchor + 1] - begin;
  const T* threshold = costs.threshold + begin;
  double loss = 0, active = 0;
  if (count <= kFew) {
    // From the largest threshold down: where that one is not reached, no other is.
    for (int64_t k = count - 1; k >= 0; --k) {
      Vector<T> sum = {}, hits = {};
      for (int c = 0; c < kBlockRows; c += kLanes<T>) {
        const Vector<T> below = broadcast<T>(threshold[k]) - load_vector<T>(distances + c);
        sum = multiply_add(below > 0 ? below : Vector<T>{}, broadcast<T>(T(kRoom)), sum);
        hits += ones_where_above<T>(below, Vector<T>{});
      }
      const double hit = sum_lanes<T>(hits);
      if (hit == 0) break;
      loss += sum_lanes<T>(sum) / kRoom, active += hit;
    }
  } else {
    // The thresholds' part of the loss comes of `hits`, when all negatives have been counted.
    rank_row(threshold, count, distances, [&](int column, int64_t first) {
      loss -= double(count - first) * double(distances[column]);
      ++costs.hits[begin + first];
    });
  }
  costs.loss[anchor] += loss;
  costs.active[anchor] += active;
}

template <class T>
TRIPLETOPS_INLINE void weigh_hinges_of(const Thresholds<T>& costs, int32_t anchor, const T* distances,
                                       T* weights) {
  const int64_t begin = costs.begin[anchor], count = costs.begin[anchor + 1] - begin;
  const T* threshold = costs.threshold + begin;
  const T weight = costs.weight[anchor];
  for (int c = 0; c < kBlockRows; c += kLanes<T>) store_vector(Vector<T>{}, weights + c);
  if (count <= kFew) {
    for (int64_t k = count - 1; k >= 0; --k) {
      Vector<T> hits = {};
      for (int c = 0; c < kBlockRows; c += kLanes<T>) {
        const Vector<T> hit = ones_where_above<T>(broadcast<T>(threshold[k]), load_vector<T>(distances + c));
        hits += hit;
        store_vector(load_vector<T>(weights + c) - hit * weight, weights + c);
      }
      const int32_t total = int32_t(sum_lanes<T>(hits));
      if (total == 0) break;
      costs.hits[begin + k] += total;
      if (k + 1 < count) costs.hits[begin + k + 1] -= total;
    }
  } else {
    rank_row(threshold, count, distances, [&](int column, int64_t first) {
      weights[column] = -T(count - first) * weight;
      ++costs.hits[begin + first];
    });
  }
}

template <class T>
void add_hinge(const void* cost, int32_t anchor, int32_t count, const T* distances) {
  const Thresholds<T>& all = *static_cast<const Thresholds<T>*>(cost);
  for (int32_t r = 0; r < count; ++r, distances += kBlockRows) add_hinges_of(all, anchor + r, distances);
}

template <class T>
void weigh_hinge(const void* cost, int32_t anchor, int32_t count, const T* distances, T* weights) {
  const Thresholds<T>& all = *static_cast<const Thresholds<T>*>(cost);
  for (int32_t r = 0; r < count; ++r, distances += kBlockRows, weights += kBlockRows)
    weigh_hinges_of(all, anchor + r, distances, weights);
  for (T* rest = weights; rest < weights + (kBlockRows - count) * kBlockRows; ++rest) *rest = 0;
}

}  // namespace
}  // namespace tripletops
