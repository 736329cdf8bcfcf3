// What objectives share whose negatives enter by a log-sum-exp: ln of the sum of e^(-rate d) over the
// negatives within a limit, kept relative to the exponent of the nearest one.
#pragma once

#include "../losses.h"
#include "../objective.h"

namespace tripletops {

template <class T>
class LogSumObjective : public ManyTuples<T> {
 public:
  using ManyTuples<T>::ManyTuples;

 protected:
  virtual double rate() const = 0;
  // Negatives at this distance or beyond do not count for the anchor.
  virtual T limit_of(int32_t anchor) const = 0;
  // The derivative of an anchor's loss by its log-sum-exp over -rate.
  virtual double log_sum_slope(int32_t /*anchor*/) const { return 1; }

  Cost<T> cost() override {
    set_limits();
    exponentials_.nearest = this->rows.by_anchor(std::numeric_limits<T>::infinity());
    exponentials_.sum = this->rows.by_anchor(0.0);
    return {this->functions.blocks.exponential, &exponentials_, exponentials_.limit};
  }

  Cost<T> weighed_cost(const T* weight) override {
    set_limits();
    T *nearest = this->rows.by_anchor(T(0)), *log_sum = this->rows.by_anchor(T(0));
    T* slope = this->rows.by_anchor(T(0));
    for (int32_t a = 0; a < this->anchors(); ++a) {
      nearest[a] = this->nearest()[this->row_of(a)], log_sum[a] = this->log_sum()[this->row_of(a)];
      slope[a] = T(double(weight[a]) * log_sum_slope(a));
    }
    exponentials_.nearest = nearest, exponentials_.log_sum = log_sum, exponentials_.weight = slope;
    return {this->functions.blocks.exponential, &exponentials_, exponentials_.limit};
  }

  // After the negatives have been streamed: the nearest one within the limit, infinite for none, and the sum
  // of e^(rate (nearest - d)).
  T nearest_negative(int32_t anchor) const { return exponentials_.nearest[anchor]; }
  double negative_sum(int32_t anchor) const { return exponentials_.sum[anchor]; }

  // The first rows that are saved, in the order of tripletops/_words.py: the distance that exponents are
  // relative to, and what the log-sum-exp is beside rate * that.
  T* nearest() const { return this->saved(0); }
  T* log_sum() const { return this->saved(1); }

 private:
  void set_limits() {
    T* limit = this->rows.by_anchor(-std::numeric_limits<T>::infinity());
    for (int32_t a = 0; a < this->anchors(); ++a) limit[a] = limit_of(a);
    exponentials_.limit = limit, exponentials_.rate = rate();
  }

  Exponentials<T> exponentials_;
};

}  // namespace tripletops
