// The sum over an anchor's thresholds t of softplus(t - d).
#pragma once

#include "../functions.h"
#include "../vector/ranks.h"
#include "../vector/vector_math.h"

namespace tripletops {
namespace {

// e^-|x|, of which softplus(x) = max(x, 0) + ln(1 + it), and its derivative is 1 / (1 + it) or 1 minus that.
template <class T>
TRIPLETOPS_INLINE Vector<T> exp_of_minus_size(Vector<T> x) {
  return exp_of<T>(x > 0 ? -x : x);
}

template <class T>
TRIPLETOPS_INLINE void add_softplus_of(const Thresholds<T>& costs, int32_t anchor, const T* distances) {
  const int64_t begin = costs.begin[anchor], end = costs.begin[anchor + 1];
  constexpr int64_t group = 32;  // factors between 1 and 2: their product stays finite
  double loss = 0;
  for (int c = 0; c < kBlockRows; c += kLanes<T>) {
    const Vector<T> distance = load_vector<T>(distances + c);
    for (int64_t first = begin; first < end; first += group) {
      Vector<T> whole = {};
      Vector<T> excess = {};  // the product of the factors less 1, which keeps the digits of small terms
      for (int64_t k = first; k < end && k < first + group; ++k) {
        const Vector<T> z = broadcast<T>(costs.threshold[k]) - distance;
        const Vector<T> e = exp_of_minus_size<T>(z);
        whole = multiply_add(z > 0 ? z : Vector<T>{}, broadcast<T>(T(kRoom)), whole);
        excess = multiply_add(excess, e, excess + e);
      }
      loss += sum_lanes<T>(whole) / kRoom + sum_lanes<T>(log_of_one_plus<T>(excess));
    }
  }
  costs.loss[anchor] += loss;
}

template <class T>
TRIPLETOPS_INLINE void weigh_softplus_of(const Thresholds<T>& costs, int32_t anchor, const T* distances,
                                         T* weights) {
  const T weight = costs.weight[anchor];
  for (int c = 0; c < kBlockRows; c += kLanes<T>) store_vector(Vector<T>{}, weights + c);
  for (int64_t k = costs.begin[anchor]; k < costs.begin[anchor + 1]; ++k) {
    Vector<T> slopes = {};
    for (int c = 0; c < kBlockRows; c += kLanes<T>) {
      const Vector<T> z = broadcast<T>(costs.threshold[k]) - load_vector<T>(distances + c);
      const Vector<T> e = exp_of_minus_size<T>(z);
      const Vector<T> slope = (z > 0 ? broadcast<T>(1) : e) / (e + T(1));
      slopes += slope;
      store_vector(load_vector<T>(weights + c) - slope * weight, weights + c);
    }
    costs.slope[k] += sum_lanes<T>(slopes);
  }
}

template <class T>
void add_softplus(const void* cost, int32_t anchor, int32_t count, const T* distances) {
  const Thresholds<T>& all = *static_cast<const Thresholds<T>*>(cost);
  for (int32_t r = 0; r < count; ++r, distances += kBlockRows) add_softplus_of(all, anchor + r, distances);
}

template <class T>
void weigh_softplus(const void* cost, int32_t anchor, int32_t count, const T* distances, T* weights) {
  const Thresholds<T>& all = *static_cast<const Thresholds<T>*>(cost);
  for (int32_t r = 0; r < count; ++r, distances += kBlockRows, weights += kBlockRows)
    weigh_softplus_of(all, anchor + r, distances, weights);
  for (T* rest = weights; rest < weights + (kBlockRows - count) * kBlockRows; ++rest) *rest = 0;
}

}  // namespace
}  // namespace tripletops
