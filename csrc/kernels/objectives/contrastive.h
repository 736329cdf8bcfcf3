// Positives are pulled to within one margin, negatives are pushed beyond another.
#pragma once

#include "pairs.h"

namespace tripletops {

template <class T>
class Contrastive : public PairHinges<T> {
 public:
  using PairHinges<T>::PairHinges;

 protected:
  double start_of(int32_t) const override { return this->call.numbers.pos_margin; }
  double end_of(int32_t) const override { return this->call.numbers.neg_margin; }

  // Each kind of pairs has a mean of its own, over the terms above 0.
  Shares reduce() override {
    return {this->shares_of(this->positives_above_zero, this->positives_above_zero).positive,
            this->shares_of(this->negatives_above_zero, this->negatives_above_zero).negative};
  }
};

}  // namespace tripletops
