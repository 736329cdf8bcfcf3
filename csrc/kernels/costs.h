// What the rows of a block do to their anchors: losses and weights of all negatives, the nearest negative
// beyond each positive, and draws by distance.
#pragma once

#include "hash.h"
#include "select.h"
#include "vector_math.h"

namespace tripletops {
namespace {

// Rows are summed up as this share of their terms, any of which may be the largest number that T holds.
constexpr double kRoom = 0x1p-8;
// Up to as many thresholds are compared one by one, among more of them a distance is ranked.
constexpr int64_t kFew = 8;

template <class T>
TRIPLETOPS_INLINE Vector<T> ones_where_above(Vector<T> a, Vector<T> b) {
  return a > b ? broadcast<T>(1) : Vector<T>{};
}

// How many of `count` > 0 ascending values come before x: passes(value) is true for those, and for no later
// one. Without a branch, which would be mispredicted every other time.
template <class T, class Passes>
TRIPLETOPS_INLINE int64_t count_passing(const T* values, int64_t count, const Passes& passes) {
  int64_t first = 0;
  while (count > 1) {
    const int64_t half = count / 2;
    first += half & -int64_t(passes(values[first + half - 1]));
    count -= half;
  }
  return first + passes(values[first]);
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
TRIPLETOPS_INLINE void add_hinges(const Costs<T>& costs, int32_t anchor, const T* distances) {
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
TRIPLETOPS_INLINE void weigh_hinges(const Costs<T>& costs, int32_t anchor, const T* distances, T* weights) {
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

// e^-|x|, of which softplus(x) = max(x, 0) + ln(1 + it), and its derivative is 1 / (1 + it) or 1 minus that.
template <class T>
TRIPLETOPS_INLINE Vector<T> exp_of_minus_size(Vector<T> x) {
  return exp_of<T>(x > 0 ? -x : x);
}

template <class T>
TRIPLETOPS_INLINE void add_soft(const Costs<T>& costs, int32_t anchor, const T* distances) {
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
TRIPLETOPS_INLINE void weigh_soft(const Costs<T>& costs, int32_t anchor, const T* distances, T* weights) {
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
TRIPLETOPS_INLINE void add_exponentials(const Costs<T>& costs, int32_t anchor, const T* distances) {
  const Vector<T> limit = broadcast<T>(costs.limit[anchor]);
  Vector<T> least = broadcast<T>(kInfinity<T>);
  for (int c = 0; c < kBlockRows; c += kLanes<T>) {
    const Vector<T> distance = load_vector<T>(distances + c);
    least = keep_least(distance < limit ? distance : broadcast<T>(kInfinity<T>), least);
  }
  T nearest = kInfinity<T>;
  for (int lane = 0; lane < kLanes<T>; ++lane) nearest = least[lane] < nearest ? least[lane] : nearest;
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
TRIPLETOPS_INLINE void weigh_exponentials(const Costs<T>& costs, int32_t anchor, const T* distances,
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
void add_costs(const Costs<T>& costs, int32_t anchor, int32_t count, const T* distances) {
  for (int32_t r = 0; r < count; ++r, distances += kBlockRows) {
    if (costs.kind == Cost::hinge) add_hinges(costs, anchor + r, distances);
    if (costs.kind == Cost::soft) add_soft(costs, anchor + r, distances);
    if (costs.kind == Cost::exponential) add_exponentials(costs, anchor + r, distances);
  }
}

template <class T>
void weigh(const Costs<T>& costs, int32_t anchor, int32_t count, const T* distances, T* weights) {
  for (int32_t r = 0; r < count; ++r, distances += kBlockRows, weights += kBlockRows) {
    if (costs.kind == Cost::hinge) weigh_hinges(costs, anchor + r, distances, weights);
    if (costs.kind == Cost::soft) weigh_soft(costs, anchor + r, distances, weights);
    if (costs.kind == Cost::exponential) weigh_exponentials(costs, anchor + r, distances, weights);
  }
  for (T* rest = weights; rest < weights + (kBlockRows - count) * kBlockRows; ++rest) *rest = 0;
}

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
  T least = lanes[0];
  for (int lane = 1; lane < kLanes<T>; ++lane) least = lanes[lane] < least ? lanes[lane] : least;
  settle_keys(values, to_key, least, index, best, best_index);
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

template <class T>
void to_log_weights(const Draws<T>& draws, T* half_squares) {
  const Vector<T> least = broadcast<T>(draws.least), limit = broadcast<T>(draws.limit);
  for (int i = 0; i < kBlockRows * kBlockRows; i += kLanes<T>) {
    Vector<T> square = load_vector<T>(half_squares + i) * T(2);
    square = square > least ? square : least;
    const Vector<T> counted = square < limit ? square : least;  // infinity must not meet the logarithms
    const Vector<T> opposite = T(1) - counted * T(0.25);
    const Vector<T> weight = draws.a * log_of<T>(counted) +
                             draws.b * log_of<T>(opposite > T(0x1p-20) ? opposite : broadcast<T>(T(0x1p-20)));
    store_vector(square < limit ? weight : broadcast<T>(-kInfinity<T>), half_squares + i);
  }
}

// -ln(-ln(1 - v)), v = (2^32 - hash - 1/2) / 2^32, of a row of hashes.
template <class T>
TRIPLETOPS_INLINE Vector<T> gumbel(const uint32_t* hashes) {
  T small[kLanes<T>], large[kLanes<T>];
  for (int lane = 0; lane < kLanes<T>; ++lane) {
    small[lane] = (T(~hashes[lane]) + T(0.5)) * T(0x1p-32);
    large[lane] = (T(hashes[lane]) + T(0.5)) * T(0x1p-32);
  }
  // 1 - v has no digits of a small v left.
  const Vector<T> v = load_vector<T>(small);
  const Vector<T> near_one = -log_of_parts<T>(Vector<T>{}, v < T(0.25) ? -v : Vector<T>{});
  const Vector<T> exponential = v < T(0.25) ? near_one : -log_of<T>(load_vector<T>(large));
  return -log_of<T>(exponential);
}

template <class T>
void keep_draws(const Draws<T>& draws, int32_t anchor, int32_t count, int32_t candidate,
                const T* log_weights) {
  const int32_t* index = draws.candidate_index + candidate;
  uint32_t hashes[kBlockRows];
  T keys[kBlockRows];
  for (int32_t a = anchor; a < anchor + count; ++a, log_weights += kBlockRows) {
    const uint64_t row = hash_anchor(draws.seed, uint64_t(draws.anchor_index[a]));
    for (int c = 0; c < kBlockRows; ++c) hashes[c] = hash_candidate(row, uint32_t(index[c]));
    for (int c = 0; c < kBlockRows; c += kLanes<T>)
      store_vector(-(load_vector<T>(log_weights + c) + gumbel<T>(hashes + c)), keys + c);
    keep_least_key(
        keys, [&](Vector<T> key) { return key; }, index, draws.picks.key + a, draws.picks.index + a);
  }
}

}  // namespace
}  // namespace tripletops
