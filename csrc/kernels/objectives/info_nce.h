// -ln(e^(S_ap / tau) / (e^(S_ap / tau) + sum over N of e^(S_an / tau))) of every positive pair, N being all
// negatives of the anchor (NT-Xent). Under the cosine, S = 1 - d; so it is softplus((d_ap - b) / tau + ln Z),
// where Z sums e^((b - d) / tau) over N and b is the nearest negative's distance.
#pragma once

#include "log_sum.h"

namespace tripletops {

template <class T>
class InfoNce : public LogSumObjective<T> {
 public:
  using LogSumObjective<T>::LogSumObjective;

 protected:
  bool pairs_stand_alone() const override { return true; }

  double rate() const override { return 1 / this->call.numbers.temperature; }
  double log_sum_slope(int32_t anchor) const override {
    return rate() * double(slope_sum()[this->row_of(anchor)]);
  }
  // An anchor without a positive has no loss.
  T limit_of(int32_t anchor) const override {
    constexpr T infinity = std::numeric_limits<T>::infinity();
    return this->rows.positive_count(anchor) > 0 ? infinity : -infinity;
  }

  void add_terms(int32_t anchor, T* buffer) override {
    if (this->rows.positive_count(anchor) == 0) return;
    const int32_t row = this->row_of(anchor);
    const bool any = this->negative_sum(anchor) > 0;
    this->nearest()[row] = any ? this->nearest_negative(anchor) : T(0);
    this->log_sum()[row] =
        any ? T(std::log(this->negative_sum(anchor))) : -std::numeric_limits<T>::infinity();
    T least = std::numeric_limits<T>::infinity();
    int32_t nearest_positive = kNobody;
    double slopes = 0;
    const auto add = [&](T d) {
      const double z = exponent(row, d), loss = softplus(z);
      this->sums.negative_loss[anchor] += loss;
      this->sums.negative_terms[anchor] += loss > 0;
      slopes += logistic(z);
    };
    this->prepared.each_positive(anchor, buffer, [&](int32_t other, T d) {
      improve(d, other, &least, &nearest_positive);
      if (!easy()) add(d);
    });
    if (easy()) add(least);
    this->result.positive[row] = nearest_positive;
    slope_sum()[row] = T(slopes);
  }

  Shares reduce() override {
    double pairs = 0;
    for (int32_t a = 0; a < this->anchors(); ++a) {
      const double positives = double(this->rows.positive_count(a));
      pairs += easy() ? std::min(positives, 1.0) : positives;
    }
    return this->shares_of(pairs, this->negatives_above_zero);
  }

  double positive_slope(int32_t anchor, int32_t row, T distance) const override {
    const int32_t anchor_row = this->row_of(anchor);
    if (easy() && row != this->result.positive[anchor_row]) return 0;
    return rate() * logistic(exponent(anchor_row, distance));
  }

 private:
  // By row: the sum over the positives of the slopes of softplus.
  T* slope_sum() const { return this->saved(2); }

  bool easy() const { return this->call.positive == Positive::easy; }

  double exponent(int32_t anchor_row, T d_ap) const {
    return rate() * (double(d_ap) - double(this->nearest()[anchor_row])) +
           double(this->log_sum()[anchor_row]);
  }
};

}  // namespace tripletops
