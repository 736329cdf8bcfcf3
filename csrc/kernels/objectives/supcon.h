// -(1/#P) sum over P of [S_ap / tau - ln sum over A of e^(S / tau)] for an anchor with positives P and
// candidates A other than self ("Supervised Contrastive Learning"). Under the cosine, S = 1 - d; so it is
// (mean of d_ap - b) / tau + ln Z, where Z sums e^((b - d) / tau) over A and b is the nearest candidate's
// distance.
#pragma once

#include "log_sum.h"

namespace tripletops {

template <class T>
class Supcon : public LogSumObjective<T> {
 public:
  using LogSumObjective<T>::LogSumObjective;

 protected:
  bool pairs_stand_alone() const override { return true; }

  double rate() const override { return 1 / this->call.numbers.temperature; }
  double log_sum_slope(int32_t) const override { return rate(); }
  // An anchor without a positive has no loss.
  T limit_of(int32_t anchor) const override {
    constexpr T infinity = std::numeric_limits<T>::infinity();
    return this->rows.positive_count(anchor) > 0 ? infinity : -infinity;
  }

  void add_terms(int32_t anchor, T* buffer) override {
    const int64_t positives = this->rows.positive_count(anchor);
    if (positives == 0) return;
    T base = this->nearest_negative(anchor);
    double total = 0;
    this->prepared.each_positive(anchor, buffer, [&](int32_t, T d) {
      base = std::min(base, d);
      total += double(d);
    });
    const auto relative = [&](T d) { return std::exp(rate() * (double(base) - double(d))); };
    double z = 0;
    if (this->negative_sum(anchor) > 0)
      z = this->negative_sum(anchor) * relative(this->nearest_negative(anchor));
    this->prepared.each_positive(anchor, buffer, [&](int32_t, T d) { z += relative(d); });
    const double loss = rate() * (total / double(positives) - double(base)) + std::log(z);
    this->nearest()[this->row_of(anchor)] = base;
    this->log_sum()[this->row_of(anchor)] = T(std::log(z));
    this->sums.negative_loss[anchor] = loss;
    this->sums.negative_terms[anchor] = loss > 0;
  }

  Shares reduce() override {
    double counted = 0;
    for (int32_t a = 0; a < this->anchors(); ++a) counted += this->rows.positive_count(a) > 0;
    return this->shares_of(counted, this->negatives_above_zero);
  }

  double positive_slope(int32_t anchor, int32_t, T distance) const override {
    const int32_t row = this->row_of(anchor);
    const double exponent = rate() * (double(this->nearest()[row]) - double(distance));
    const double share = std::exp(exponent - double(this->log_sum()[row]));
    return rate() * (1 / double(this->rows.positive_count(anchor)) - share);
  }
};

}  // namespace tripletops
