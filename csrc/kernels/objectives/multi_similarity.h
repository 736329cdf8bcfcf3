// (1/alpha) ln(1 + sum over P of e^(-alpha (S - base))) + (1/beta) ln(1 + sum over N of e^(beta (S - base))),
// of the pairs that mining leaves: negatives nearer than the farthest positive + epsilon, positives farther
// than the nearest negative - epsilon. Under the cosine, S = 1 - d.
#pragma once

#include "log_sum.h"

namespace tripletops {

template <class T>
class MultiSimilarity : public LogSumObjective<T> {
 public:
  using LogSumObjective<T>::LogSumObjective;

 protected:
  void begin_evaluation() override {
    this->for_each_anchor([&](int32_t a, T* buffer) {
      if (!this->rows.is_valid(a)) return;
      T nearest = std::numeric_limits<T>::infinity(), farthest = -nearest;
      int32_t easy = kNobody;
      this->prepared.each_positive(a, buffer, [&](int32_t row, T d) {
        improve(d, row, &nearest, &easy);
        farthest = std::max(farthest, d);
      });
      this->farthest()[this->row_of(a)] = farthest;
      this->result.positive[this->row_of(a)] = easy;
    });
  }

  double rate() const override { return this->call.numbers.beta; }
  T limit_of(int32_t anchor) const override {
    if (!this->rows.is_valid(anchor)) return -std::numeric_limits<T>::infinity();
    return T(double(farthest()[this->row_of(anchor)]) + this->call.numbers.epsilon);
  }

  // Both logs are kept relative to their largest exponents, beside which their own digits would be lost.
  void add_terms(int32_t anchor, T* buffer) override {
    if (!this->rows.is_valid(anchor)) return;
    const Numbers& numbers = this->call.numbers;
    const int32_t row = this->row_of(anchor);
    const T nearest_negative = this->nearest_negative(anchor);
    this->nearest()[row] = nearest_negative;
    // If any positive is kept, the farthest is.
    const T reference =
        easy() ? this->distance_of(anchor, int32_t(this->result.positive[row]), buffer) : farthest()[row];
    const double largest = positive_exponent(reference);
    double sum = easy() ? 1 : 0;
    if (!easy())
      this->prepared.each_positive(anchor, buffer, [&](int32_t, T d) {
        if (is_kept(row, d)) sum += std::exp(positive_exponent(d) - largest);
      });
    const double positive = log_one_plus(largest, sum);
    const double exponent = numbers.beta * (1 - numbers.base - double(nearest_negative));
    const double negative = log_one_plus(exponent, this->negative_sum(anchor));
    positive_log_sum()[row] = T(positive - largest);
    this->log_sum()[row] = this->negative_sum(anchor) > 0 ? T(negative - exponent) : T(0);
    this->sums.negative_loss[anchor] = positive / numbers.alpha + negative / numbers.beta;
    this->sums.negative_terms[anchor] = this->sums.negative_loss[anchor] > 0;
  }

  Shares reduce() override {
    double valid = 0;
    for (int32_t a = 0; a < this->anchors(); ++a) valid += this->rows.is_valid(a);
    return this->shares_of(valid, this->negatives_above_zero);
  }

  double positive_slope(int32_t anchor, int32_t row, T distance) const override {
    if (!this->rows.is_valid(anchor)) return 0;
    const int32_t anchor_row = this->row_of(anchor);
    const double exponent = positive_exponent(distance);
    if (easy()) return row == this->result.positive[anchor_row] ? 1 / (1 + std::exp(-exponent)) : 0;
    if (!is_kept(anchor_row, distance)) return 0;
    return std::exp(exponent - positive_exponent(farthest()[anchor_row]) -
                    double(positive_log_sum()[anchor_row]));
  }

 private:
  // By row: the distance of the farthest positive, and ln(1 + sum) of the positives less the exponent of that
  // one.
  T* farthest() const { return this->saved(2); }
  T* positive_log_sum() const { return this->saved(3); }

  bool easy() const { return this->call.positive == Positive::easy; }

  // ln(1 + e^exponent * sum).
  static double log_one_plus(double exponent, double sum) {
    return sum > 0 ? softplus(exponent + std::log(sum)) : 0;
  }

  double positive_exponent(T d) const {
    return this->call.numbers.alpha * (double(d) - 1 + this->call.numbers.base);
  }

  bool is_kept(int32_t anchor_row, T d) const {
    return double(d) > double(this->nearest()[anchor_row]) - this->call.numbers.epsilon;
  }
};

}  // namespace tripletops
