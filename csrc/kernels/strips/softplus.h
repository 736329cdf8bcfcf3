// Every triplet of one anchor by the soft margin, from the row of its distances to all candidates: the sum
// over positives p and negatives n of softplus(d_ap - d_an).
#pragma once

#include "hinges.h"
#include "smooth.h"

namespace tripletops {

template <class T>
class SummedSoftplus {
 public:
  SummedSoftplus(Ordered<T>& rows, int64_t columns, const CostFunctions<T>& functions)
      : functions_(functions),
        columns_(columns),
        thresholds_(rows.scratch.template take<T>(largest_class(rows))),
        slopes_(rows.scratch.template take<double>(largest_class(rows))),
        weights_(rows.scratch.template take<T>(kBlockRows * kBlockRows)),
        smooth_(largest_class(rows)) {}

  void add(const PositiveRange& at, T, T* distances, double* loss, double*) {
    const int64_t begin[] = {0, take_thresholds(at, distances)};
    if (smooth_.take(thresholds_, begin[1], distances, columns_)) {
      *loss += smooth_.sum();
      return;
    }
    Thresholds<T> thresholds;
    thresholds.begin = begin, thresholds.threshold = thresholds_, thresholds.loss = loss;
    for (int64_t c = 0; c < columns_; c += kBlockRows) functions_.add(&thresholds, 0, 1, distances + c);
  }

  void weigh(const PositiveRange& at, T, T weight, T* distances) {
    const int64_t count = take_thresholds(at, distances);
    if (smooth_.take(thresholds_, count, distances, columns_))
      smooth_.differentiate(slopes_, weight, distances, columns_);
    else
      weigh_one_by_one(count, weight, distances);
    int64_t next = 0;
    for (int32_t c = at.begin; c < at.end; ++c)
      distances[c] = c == at.self ? T(0) : T(slopes_[next++] * double(weight));
  }

 private:
  void weigh_one_by_one(int64_t count, T weight, T* distances) {
    const int64_t begin[] = {0, count};
    std::fill(slopes_, slopes_ + count, 0.0);
    Thresholds<T> thresholds;
    thresholds.begin = begin, thresholds.threshold = thresholds_;
    thresholds.slope = slopes_, thresholds.weight = &weight;
    for (int64_t c = 0; c < columns_; c += kBlockRows) {
      functions_.weigh(&thresholds, 0, 1, distances + c, weights_);
      std::copy_n(weights_, kBlockRows, distances + c);
    }
  }

  // Leaves the negatives alone in `distances`.
  int64_t take_thresholds(const PositiveRange& at, T* distances) {
    int64_t count = 0;
    for (int32_t c = at.begin; c < at.end; ++c) {
      if (c != at.self) thresholds_[count++] = distances[c];
      distances[c] = std::numeric_limits<T>::infinity();
    }
    return count;
  }

  const CostFunctions<T> functions_;
  const int64_t columns_;
  T* const thresholds_;  // in the order of the positives
  double* const slopes_;
  T* const weights_;
  SmoothSums smooth_;
};

}  // namespace tripletops
