// The gradient of a loss that is a sum over pairs of an anchor and a candidate, row by row: every row is
// written by one thread, its pairs in a fixed order.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "parallel.h"
#include "scratch.h"

namespace tripletops {

constexpr int kPullsInT = 32;  // terms of a gradient row that are summed in T before they go into double

template <class T>
struct PairList {
  int64_t count = 0;
  const int64_t *begin = nullptr, *end = nullptr;  // anchor row -> its first pair and the one behind its last
  const int32_t* candidate = nullptr;
  const T* distance = nullptr;
  const T* weight = nullptr;  // d loss / d distance
};

// The two sides of the pairs. The units are those of cosine, by row; null: they are computed on the way.
struct Sides {
  Rows anchors, candidates;
  bool self_mining = true;
  const Normaliser *anchor_units = nullptr, *candidate_units = nullptr;
};

// Which pairs each candidate is in, in the order of the anchors.
struct Partners {
  int64_t* begin = nullptr;   // candidate row -> first entry; one more at the end
  int32_t* anchor = nullptr;  // entry -> anchor row
  int64_t* pair = nullptr;    // entry -> pair
};

template <class T>
Partners partners_of(int64_t anchors, int64_t candidates, const PairList<T>& pairs, Scratch& scratch) {
  Partners partners = {scratch.take<int64_t>(candidates + 2), scratch.take<int32_t>(pairs.count),
                       scratch.take<int64_t>(pairs.count)};
  std::fill(partners.begin, partners.begin + candidates + 2, int64_t(0));
  for (int64_t pair = 0; pair < pairs.count; ++pair) ++partners.begin[pairs.candidate[pair] + 2];
  for (int64_t c = 0; c < candidates; ++c) partners.begin[c + 2] += partners.begin[c + 1];
  for (int64_t anchor = 0; anchor < anchors; ++anchor)
    for (int64_t pair = pairs.begin[anchor]; pair < pairs.end[anchor]; ++pair) {
      const int64_t entry = partners.begin[pairs.candidate[pair] + 1]++;
      partners.anchor[entry] = int32_t(anchor);
      partners.pair[entry] = pair;
    }
  return partners;
}

// Writes the gradient rows of anchors and candidates, in their own storage, adjacent rows; null: not wanted.
// In self-mining both parts go to `anchor_gradient`. `rest(is_anchor, row, worker, gradient, pull)` adds what
// does not come from the list: to `gradient` itself, divided by the row's lift under cosine, then by
// pull(other row, distance, weight). `poisoned`: everything is NaN.
template <class T, class Rest>
void pull_pairs(const Kernels<T>& kernels, const Pool& pool, Scratch& scratch, const Sides& sides,
                Distance distance, const PairList<T>& pairs, bool poisoned, const Rest& rest,
                void* anchor_gradient, void* candidate_gradient) {
  const int64_t width = sides.anchors.width;
  const bool cosine = distance == Distance::cosine;
  const bool by_candidate = sides.self_mining ? anchor_gradient : candidate_gradient;
  Partners partners;
  if (by_candidate) partners = partners_of(sides.anchors.count, sides.candidates.count, pairs, scratch);

  std::vector<T*> buffers;
  std::vector<double*> sums;
  for (int worker = 0; worker < pool.threads; ++worker) {
    buffers.push_back(scratch.take<T>(3 * width));
    sums.push_back(scratch.take<double>(width));
  }

  const auto fill_rows = [&](const Rows& rows, void* gradient, bool as_anchor, bool as_candidate) {
    if (!gradient) return;
    const int64_t bytes = rows.storage == Storage::float64 ? 8 : rows.storage == Storage::float32 ? 4 : 2;
    for_each_range(pool, rows.count, kRowsPerTask, [&](int64_t from, int64_t to, int worker) {
      double* sum = sums[worker];
      T *x_buffer = buffers[worker], *y_buffer = x_buffer + width, *part = y_buffer + width;
      const auto unit = [&](const Normaliser* units, int64_t row, const T* values) {
        return !cosine ? Normaliser{} : units ? units[row] : kernels.normalise(values, width);
      };
      const Normaliser* own_units = as_anchor ? sides.anchor_units : sides.candidate_units;
      for (int64_t row = from; row < to; ++row) {
        std::fill(part, part + width, poisoned ? std::numeric_limits<T>::quiet_NaN() : T(0));
        const T* x = nullptr;
        Normaliser x_unit;
        // A few pulls add up in T, many of them in double: a row that everybody picked loses no digits.
        int64_t pulls = 0;
        const auto pull = [&](const Rows& others, const Normaliser* units, int64_t other, T apart, T weight) {
          if (weight == 0) return;
          if (!x) {
            x = kernels.load(rows, row, x_buffer);
            x_unit = unit(own_units, row, x);
          }
          const T* y = kernels.load(others, other, y_buffer);
          kernels.pull({x, y, x_unit, unit(units, other, y)}, width, distance, double(apart), double(weight),
                       part);
          if (++pulls % kPullsInT != 0) return;
          if (pulls == kPullsInT) std::fill(sum, sum + width, 0.0);
          for (int64_t d = 0; d < width; ++d) sum[d] += double(part[d]), part[d] = 0;
        };
        const auto pull_to_candidate = [&](int64_t other, T apart, T weight) {
          pull(sides.candidates, sides.candidate_units, other, apart, weight);
        };
        const auto pull_to_anchor = [&](int64_t other, T apart, T weight) {
          pull(sides.anchors, sides.anchor_units, other, apart, weight);
        };
        if (!poisoned) {
          if (as_anchor)
            rest(true, row, worker, part, pull_to_candidate);
          else
            rest(false, row, worker, part, pull_to_anchor);
          if (as_anchor)
            for (int64_t pair = pairs.begin[row]; pair < pairs.end[row]; ++pair)
              pull_to_candidate(pairs.candidate[pair], pairs.distance[pair], pairs.weight[pair]);
          if (as_candidate)
            for (int64_t entry = partners.begin[row]; entry < partners.begin[row + 1]; ++entry)
              pull_to_anchor(partners.anchor[entry], pairs.distance[partners.pair[entry]],
                             pairs.weight[partners.pair[entry]]);
        }
        const double lift = cosine && own_units ? own_units[row].lift : x_unit.lift;
        if (pulls >= kPullsInT || lift != 1)
          for (int64_t d = 0; d < width; ++d)
            part[d] = T(((pulls >= kPullsInT ? sum[d] : 0) + double(part[d])) * lift);
        kernels.store(part, width, rows.storage, static_cast<char*>(gradient) + row * width * bytes);
      }
    });
  };
  fill_rows(sides.anchors, anchor_gradient, true, sides.self_mining);
  if (!sides.self_mining) fill_rows(sides.candidates, candidate_gradient, false, true);
}

}  // namespace tripletops
