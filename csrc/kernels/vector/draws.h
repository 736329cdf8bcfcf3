// Draws by inverse distance density: the largest of log weight plus Gumbel noise, the noise being a hash of
// (seed, anchor, candidate).
#pragma once

#include "../hash.h"
#include "floors.h"
#include "vector_math.h"

namespace tripletops {
namespace {

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
