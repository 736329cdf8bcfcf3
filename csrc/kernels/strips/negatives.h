// For every positive of one anchor the nearest negative beyond it, from the row of the anchor's keys for all
// candidates.
#pragma once

#include "hinges.h"

namespace tripletops {

// A positive, by position, and the negative beside it, by row.
template <class T>
struct PickedPair {
  int32_t positive, negative;
  T d_ap, d_an;
};

// What lies beyond a floor lies beyond all lower ones.
template <class T>
void keep_beyond_lower_floors(const Picks<T>& beyond, int64_t count) {
  for (int64_t i = count - 1; i-- > 0;)
    improve(beyond.key[i + 1], beyond.index[i + 1], beyond.key + i, beyond.index + i);
}

template <class T>
class RankedNegatives {
 public:
  RankedNegatives(Ordered<T>& rows, int64_t columns)
      : ranking_(largest_class(rows), rows.scratch),
        floors_(rows.scratch.template take<T>(largest_class(rows))),
        beyond_{rows.scratch.template take<T>(largest_class(rows)),
                rows.scratch.template take<int32_t>(largest_class(rows))},
        cells_(rows.scratch.template take<int32_t>(columns)) {}

  // `index` tells the candidates' rows. Infinite keys are none.
  void find(const PositiveRange& at, const T* keys, const int32_t* index) {
    int64_t count = 0;
    each_positive(at, [&](int32_t c) { floors_[count++] = keys[c]; });
    ranking_.sort(floors_, count);
    std::fill_n(beyond_.key, count, std::numeric_limits<T>::max());
    std::fill_n(beyond_.index, count, kNobody);
    ranking_.cells_of(keys, at.begin, cells_);
    ranking_.cells_of(keys + at.end, at.count - at.end, cells_ + at.end);
    T farthest = std::numeric_limits<T>::max();
    farthest_ = kNobody;
    each_negative(at, [&](int32_t c) {
      const T key = keys[c];
      if (key == std::numeric_limits<T>::infinity()) return;
      improve(-key, index[c], &farthest, &farthest_);
      const int64_t below = ranking_.rank(cells_[c], [&](T floor) { return floor < key; });
      if (below > 0) improve(key, index[c], beyond_.key + below - 1, beyond_.index + below - 1);
    });
    keep_beyond_lower_floors(beyond_, count);
  }

  int64_t count() const { return ranking_.count(); }
  int32_t farthest() const { return farthest_; }
  // In the order of the positives' keys. It is not measured yet.
  PickedPair<T> pair(const PositiveRange& at, int64_t number) const {
    return {at.positive(ranking_.origin()[number]), beyond_.index[number], 0, 0};
  }

 private:
  Ranking<T> ranking_;
  T* const floors_;  // in the order of the positives
  const Picks<T> beyond_;
  int32_t* const cells_;
  int32_t farthest_ = kNobody;
};

}  // namespace tripletops
