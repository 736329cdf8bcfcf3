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

// With few thresholds near each other the exponentials are split at one of them, c: e^(t - d) is e^(t - c)
// times e^(c - d), so that a distance takes one exponential, not one for each threshold. Distances are not
// negative, so rounding t - c and c - d moves them by no more than the rounding of t, c and d has done.
constexpr int64_t kMostSplit = 4;
// |t - c| and c - d are at most this: the product of all factors 1 + e^(t - d) stays finite.
constexpr int kSplitReach = 10;

template <class T>
struct SplitThresholds {
  T factor[kMostSplit];  // e^(t - c)
  Vector<T> centre;

  // Whether the thresholds and the distances of a row lie so that they can be split.
  TRIPLETOPS_INLINE bool split(const T* threshold, int64_t count, const T* distances) {
    if (count > kMostSplit) return false;
    const T c = threshold[count / 2];
    centre = broadcast<T>(c);
    for (int64_t k = 0; k < count; ++k)
      if (!(threshold[k] - c <= kSplitReach && c - threshold[k] <= kSplitReach)) return false;
    Vector<T> nearest = broadcast<T>(kInfinity<T>);
    for (int i = 0; i < kBlockRows; i += kLanes<T>)
      nearest = keep_least(load_vector<T>(distances + i), nearest);
    if (lanes_not_above(nearest, centre - T(kSplitReach))) return false;
    for (int64_t first = 0; first < count; first += kLanes<T>) {
      Vector<T> apart = {};
      for (int64_t k = first; k < count && k < first + kLanes<T>; ++k) apart[k - first] = threshold[k] - c;
      const Vector<T> factors = exp_of<T>(apart);
      for (int64_t k = first; k < count && k < first + kLanes<T>; ++k) factor[k] = factors[k - first];
    }
    return true;
  }

  // e^(c - d)
  TRIPLETOPS_INLINE Vector<T> share(Vector<T> distance) const { return exp_of<T>(centre - distance); }
};

template <class T, int64_t count>
TRIPLETOPS_INLINE double sum_split(const SplitThresholds<T>& thresholds, const T* distances) {
  Vector<T> loss = {};
  for (int c = 0; c < kBlockRows; c += kLanes<T>) {
    const Vector<T> share = thresholds.share(load_vector<T>(distances + c));
    Vector<T> excess = {};
#pragma GCC unroll 4
    for (int64_t k = 0; k < count; ++k) {
      const Vector<T> e = share * thresholds.factor[k];
      excess = multiply_add(excess, e, excess + e);
    }
    loss += log_of_one_plus<T>(excess);
  }
  return sum_lanes<T>(loss);
}

template <class T, int64_t count>
TRIPLETOPS_INLINE void weigh_split(const SplitThresholds<T>& thresholds, const T* distances, T weight,
                                   T* weights, double* slope) {
  Vector<T> slopes[count] = {};
  for (int c = 0; c < kBlockRows; c += kLanes<T>) {
    const Vector<T> share = thresholds.share(load_vector<T>(distances + c));
    Vector<T> sum = {};
#pragma GCC unroll 4
    for (int64_t k = 0; k < count; ++k) {
      const Vector<T> e = share * thresholds.factor[k], one = e / (e + T(1));
      slopes[k] += one;
      sum += one;
    }
    store_vector(-sum * weight, weights + c);
  }
  for (int64_t k = 0; k < count; ++k) slope[k] += sum_lanes<T>(slopes[k]);
}

// Calls split(std::integral_constant) with the number of thresholds.
template <class Split>
TRIPLETOPS_INLINE void with_count(int64_t count, const Split& split) {
  static_assert(kMostSplit == 4);
  if (count == 1) split(std::integral_constant<int64_t, 1>{});
  if (count == 2) split(std::integral_constant<int64_t, 2>{});
  if (count == 3) split(std::integral_constant<int64_t, 3>{});
  if (count == 4) split(std::integral_constant<int64_t, 4>{});
}

template <class T>
TRIPLETOPS_INLINE void add_softplus_of(const Thresholds<T>& costs, int32_t anchor, const T* distances) {
  const int64_t begin = costs.begin[anchor], end = costs.begin[anchor + 1];
  if (begin == end) return;
  double loss = 0;
  SplitThresholds<T> split;
  if (split.split(costs.threshold + begin, end - begin, distances)) {
    with_count(end - begin, [&](auto count) { loss = sum_split<T, count>(split, distances); });
    costs.loss[anchor] += loss;
    return;
  }
  constexpr int64_t group = 32;  // factors between 1 and 2: their product stays finite
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
  const int64_t begin = costs.begin[anchor], end = costs.begin[anchor + 1];
  SplitThresholds<T> split;
  if (begin < end && split.split(costs.threshold + begin, end - begin, distances)) {
    with_count(end - begin, [&](auto count) {
      weigh_split<T, count>(split, distances, weight, weights, costs.slope + begin);
    });
    return;
  }
  for (int c = 0; c < kBlockRows; c += kLanes<T>) store_vector(Vector<T>{}, weights + c);
  for (int64_t k = begin; k < end; ++k) {
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
