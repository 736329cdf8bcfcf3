// Every triplet of one anchor by the hinge, from the row of its distances to all candidates: the sum over
// positives p and negatives n of [d_ap + margin - d_an]+.
#pragma once

#include "../objectives/thresholds.h"
#include "ranking.h"

namespace tripletops {

// Where an anchor's positives are among its candidates; `self` may be among them.
struct PositiveRange {
  int32_t begin, end, self, count;  // `count`: of all candidates

  // The position of a positive, self left out.
  int32_t positive(int32_t number) const {
    const int32_t c = begin + number;
    return c + (self >= begin && c >= self);
  }
};

template <class T>
PositiveRange positives_of(const Ordered<T>& rows, int32_t anchor) {
  return {rows.class_begin(anchor), rows.class_end(anchor), rows.self_position[anchor],
          rows.classes.candidates.count};
}

template <class Visit>
void each_positive(const PositiveRange& at, const Visit& visit) {
  for (int32_t c = at.begin; c < at.end; ++c)
    if (c != at.self) visit(c);
}

template <class Visit>
void each_negative(const PositiveRange& at, const Visit& visit) {
  for (int32_t c = 0; c < at.begin; ++c) visit(c);
  for (int32_t c = at.end; c < at.count; ++c) visit(c);
}

template <class T>
int64_t largest_class(const Ordered<T>& rows) {
  const Order& order = rows.classes.candidates;
  int64_t largest = 0;
  for (int32_t c = 0; c < order.count;) {
    const int32_t end = order.begin[order.group[c] + 1];
    largest = std::max<int64_t>(largest, end - c), c = end;
  }
  return largest;
}

template <class T>
class RankedHinges {
 public:
  RankedHinges(Ordered<T>& rows, int64_t columns, const CostFunctions<T>&)
      : ranking_(largest_class(rows), rows.scratch),
        thresholds_(rows.scratch.template take<T>(largest_class(rows))),
        hits_(rows.scratch.template take<int32_t>(largest_class(rows) + 1)),
        cells_(rows.scratch.template take<int32_t>(columns)) {}

  // Ranks all negatives. The sum and the number of the terms above 0:
  void add(const PositiveRange& at, T margin, const T* distances, double* loss, double* active) {
    rank(at, margin, distances);
    double thresholds = 0, negatives = 0, terms = 0;
    int64_t below = 0;
    for (int64_t i = 0; i < ranking_.count(); ++i) {
      below += hits_[i];
      thresholds += double(below) * double(ranking_.values()[i]), terms += double(below);
    }
    each_negative(at, [&](int32_t c) {
      negatives += double(ranking_.count() - cells_[c]) * std::min(double(distances[c]), kLargest);
    });
    *loss = thresholds - negatives, *active = terms;
    // In float64 both parts may have overflowed.
    if (std::isnan(*loss)) *loss = std::numeric_limits<double>::infinity();
  }

  // From distances to the derivatives by them, times `weight`.
  void weigh(const PositiveRange& at, T margin, T weight, T* distances) {
    rank(at, margin, distances);
    each_negative(at, [&](int32_t c) { distances[c] = -T(ranking_.count() - cells_[c]) * weight; });
    if (at.self >= at.begin && at.self < at.end) distances[at.self] = 0;
    int64_t below = 0;
    for (int64_t i = 0; i < ranking_.count(); ++i) {
      below += hits_[i];
      distances[at.positive(ranking_.origin()[i])] = T(below) * weight;
    }
  }

 private:
  static constexpr double kLargest = double(std::numeric_limits<T>::max());

  // Sorts the thresholds, and leaves in `cells_` how many of them each negative is not below.
  void rank(const PositiveRange& at, T margin, const T* distances) {
    int64_t count = 0;
    each_positive(at,
                  [&](int32_t c) { thresholds_[count++] = within_type<T>(double(distances[c] + margin)); });
    ranking_.sort(thresholds_, count);
    std::fill(hits_, hits_ + count + 1, 0);
    ranking_.cells_of(distances, at.begin, cells_);
    ranking_.cells_of(distances + at.end, at.count - at.end, cells_ + at.end);
    each_negative(at, [&](int32_t c) {
      const T distance = distances[c];
      cells_[c] = int32_t(ranking_.rank(cells_[c], [&](T threshold) { return threshold <= distance; }));
      ++hits_[cells_[c]];
    });
  }

  Ranking<T> ranking_;
  T* const thresholds_;  // in the order of the positives
  int32_t* const hits_;  // threshold -> negatives between it and the one before
  int32_t* const cells_;
};

}  // namespace tripletops
