// Positives within a boundary that is learned, by a margin alpha, and negatives beyond it ("Sampling Matters
// in Deep Embedding Learning").
#pragma once

#include "pairs.h"

namespace tripletops {

template <class T>
class BetaMargin : public PairHinges<T> {
 public:
  using PairHinges<T>::PairHinges;

 protected:
  bool is_finite() const override {
    for (int32_t a = 0; a < this->anchors(); ++a)
      if (!std::isfinite(beta(a))) return false;
    return true;
  }

  double start_of(int32_t anchor) const override { return double(beta(anchor)) - this->call.numbers.alpha; }
  double end_of(int32_t anchor) const override { return double(beta(anchor)) + this->call.numbers.alpha; }

  Shares reduce() override {
    const double above_zero = this->positives_above_zero + this->negatives_above_zero;
    return this->shares_of(above_zero, above_zero);
  }

  double learned_slope(int32_t anchor) const override {
    const int32_t row = this->row_of(anchor);
    const Shares share = *this->result.shares;
    return double(this->negative_terms()[row]) * share.negative -
           double(this->positive_terms()[row]) * share.positive;
  }

 private:
  T beta(int32_t anchor) const { return static_cast<const T*>(this->call.learned)[this->row_of(anchor)]; }
};

}  // namespace tripletops
