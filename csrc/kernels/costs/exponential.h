// A log-sum-exp over the negatives within an anchor's limit, as a running one: the exponents are relative to
// that of the nearest negative so far.
#pragma once

#include "../functions.h"
#include "../vector/vector_math.h"

namespace tripletops {
namespace {

template <class T>
TRIPLETOPS_INLINE void add_exponentials_of(const Exponentials<T>& costs, int32_t anchor, const T* distances) {
  const Vector<T> limit = broadcast<T>(costs.limit[anchor]);
  Vector<T> least = broadcast<T>(kInfinity<T>);
  for (int c = 0; c < kBlockRows; c += kLanes<T>) {
    const Vector<T> distance = load_vector<T>(distances + c);
    least = keep_least(distance < limit ? distance : broadcast<T>(kInfinity<T>), least);
  }
  const T nearest = least_lane<T>(least);
  if (nearest == kInfinity<T>) return;
  if (nearest < costs.nearest[anchor]) {
    costs.sum[anchor] *= __builtin_exp(costs.rate * (double(nearest) - double(costs.nearest[anchor])));
    costs.nearest[anchor] = nearest;
  }
  const Vector<T> start = broadcast<T>(costs.nearest[anchor]);
  Vector<T> sum = {};
  for (int c = 0; c < kBlockRows; c += kLanes<T>) {
    const Vector<T> distance = load_vector<T>(distances + c);
    sum += distance < limit ? exp_of<T>((start - distance) * T(costs.rate)) : Vector<T>{};
  }
  costs.sum[anchor] += sum_lanes<T>(sum);
}

template <class T>
TRIPLETOPS_INLINE void weigh_exponentials_of(const Exponentials<T>& costs, int32_t anchor, const T* distances,
                                             T* weights) {
  const Vector<T> limit = broadcast<T>(costs.limit[anchor]), start = broadcast<T>(costs.nearest[anchor]);
  const Vector<T> weight = broadcast<T>(costs.weight[anchor]);
  const T log_sum = costs.log_sum[anchor];
  for (int c = 0; c < kBlockRows; c += kLanes<T>) {
    const Vector<T> distance = load_vector<T>(distances + c);
    const Vector<T> share = exp_of<T>((start - distance) * T(costs.rate) - log_sum);
    store_vector(distance < limit ? -share * weight : Vector<T>{}, weights + c);
  }
}

template <class T>
void add_exponential(const void* cost, int32_t anchor, int32_t count, const T* distances) {
  const Exponentials<T>& all = *static_cast<const Exponentials<T>*>(cost);
  for (int32_t r = 0; r < count; ++r, distances += kBlockRows)
    add_exponentials_of(all, anchor + r, distances);
}

template <class T>
void weigh_exponential(const void* cost, int32_t anchor, int32_t count, const T* distances, T* weights) {
  const Exponentials<T>& all = *static_cast<const Exponentials<T>*>(cost);
  for (int32_t r = 0; r < count; ++r, distances += kBlockRows, weights += kBlockRows)
    weigh_exponentials_of(all, anchor + r, distances, weights);
  for (T* rest = weights; rest < weights + (kBlockRows - count) * kBlockRows; ++rest) *rest = 0;
}

}  // namespace
}  // namespace tripletops
