// What the negatives of an anchor cost, all of them: the kinds of sums that objectives stream. Anchors are
// counted by position. Each kind has two functions (tables in functions.h), on blocks of distances to `count`
// anchors from `anchor` on, a row for each: `add` adds what the block's negatives cost, `weigh` gives the
// derivative of the anchor's sum, times its weight, by each distance.
#pragma once

#include <cstdint>

namespace tripletops {

template <class T>
struct CostFunctions {
  void (*add)(const void* cost, int32_t anchor, int32_t count, const T* distances);
  void (*weigh)(const void* cost, int32_t anchor, int32_t count, const T* distances, T* weights);
};

// A cost to be streamed: its own data, and what of a block can matter.
template <class T>
struct Cost {
  CostFunctions<T> functions = {};
  const void* data = nullptr;
  const T* limit = nullptr;  // by anchor: a distance from here on costs nothing; null: every one matters
};

// Sum over the anchor's thresholds t of [t - d]+ (hinge) or of softplus(t - d).
template <class T>
struct Thresholds {
  const int64_t* begin = nullptr;  // anchor -> its first threshold; one more entry at the end
  const T* threshold = nullptr;    // ascending

  // Hinge: threshold -> negatives between it and the one before. `weigh` counts all of them, `add` only those
  // of anchors with many thresholds, whose loss lacks the thresholds' part.
  int32_t* hits = nullptr;
  // Softplus, `weigh`: threshold -> the sum of its slopes.
  double* slope = nullptr;

  double *loss = nullptr, *active = nullptr;  // `add`, by anchor; softplus counts no active terms
  const T* weight = nullptr;                  // `weigh`, by anchor
};

// ln of the sum of e^(-rate d) over the negatives with d < limit.
template <class T>
struct Exponentials {
  const T* limit = nullptr;  // by anchor
  double rate = 0;

  // By anchor: the nearest negative so far, and the sum of e^(rate (nearest - d)) over the negatives so far.
  // `weigh`: the nearest of all, and what the exponents rate (nearest - d) are reduced by before they are
  // taken.
  T* nearest = nullptr;
  double* sum = nullptr;
  const T* log_sum = nullptr;
  const T* weight = nullptr;  // `weigh`, by anchor
};

}  // namespace tripletops
