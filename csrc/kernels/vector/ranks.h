// Ranking a distance among ascending values: those of an anchor's positives, or thresholds.
#pragma once

#include "simd.h"

namespace tripletops {
namespace {

// Up to as many values are compared one by one, among more of them a distance is ranked.
constexpr int64_t kFew = 8;
// Terms are summed in T times this share, so that a row's sum of the largest numbers does not overflow.
constexpr double kRoom = 0x1p-8;

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

}  // namespace
}  // namespace tripletops
