// Objectives of pairs that stand alone: [d - start]+ of positive pairs and [end - d]+ of negative pairs, all
// of them or one of each for every anchor, picked by rule.
#pragma once

#include "thresholds.h"

namespace tripletops {

template <class T>
class PairHinges : public ManyTuples<T> {
 public:
  PairHinges(const Functions<T>& functions, const Pool& pool, const Call& call, const Evaluated<T>& result)
      : ManyTuples<T>(functions, pool, call, result), selection_(this->prepared, call) {}

 protected:
  virtual double start_of(int32_t anchor) const = 0;
  virtual double end_of(int32_t anchor) const = 0;

  bool pairs_stand_alone() const override { return true; }
  // A selection packs what it needs.
  Packed needs() const override { return picks_negatives() ? Packed::nothing : Packed::everything; }

  void begin_evaluation() override {
    fill_with_nothing<T>(mined(), this->anchor_count);
    if (picks_positives() || picks_negatives()) selection_.select(mined());
    if (!picks_negatives()) set_thresholds();
  }
  void begin_differentiation() override {
    if (!picks_negatives()) set_thresholds();
  }

  Cost<T> cost() override {
    if (picks_negatives()) return {};
    thresholds_.loss = this->sums.negative_loss, thresholds_.active = this->sums.negative_terms;
    return {this->functions.blocks.hinge, &thresholds_, limit_};
  }

  Cost<T> weighed_cost(const T* weight) override {
    if (picks_negatives()) return {};
    thresholds_.weight = weight;
    return {this->functions.blocks.hinge, &thresholds_, limit_};
  }

  void add_terms(int32_t anchor, T* buffer) override {
    const int32_t row = this->row_of(anchor);
    long double loss = 0;  // the roundings of many equal terms would add up
    const auto add = [&](int32_t, T d) {
      const double z = double(d) - start_of(anchor);
      if (z > 0) loss += z, ++this->sums.positive_terms[anchor];
    };
    if (!picks_positives())
      this->prepared.each_positive(anchor, buffer, add);
    else if (mined().positive[row] >= 0)
      add(int32_t(mined().positive[row]), mined().d_ap[row]);
    this->sums.positive_loss[anchor] = double(loss);
    if (!picks_negatives()) {
      add_hits(thresholds_, anchor, this->sums);
    } else if (mined().negative[row] >= 0) {
      const double z = end_of(anchor) - double(mined().d_an[row]);
      if (z > 0) this->sums.negative_loss[anchor] += z, ++this->sums.negative_terms[anchor];
    }
    positive_terms()[row] = T(this->sums.positive_terms[anchor]);
    negative_terms()[row] = T(this->sums.negative_terms[anchor]);
  }

  bool pulls_positives() const override { return !picks_positives(); }
  double positive_slope(int32_t anchor, int32_t, T distance) const override {
    return double(distance) > start_of(anchor);
  }

  int64_t most_pairs() const override { return 2 * this->anchors(); }
  void list_pairs(int32_t anchor, double upstream, PairList<T>& pairs) const override {
    const int32_t row = this->row_of(anchor);
    const Shares share = *this->result.shares;
    if (const int64_t picked = mined().positive[row]; picks_positives() && picked >= 0) {
      const T d = mined().d_ap[row];
      pairs.add(picked, d, T(positive_slope(anchor, int32_t(picked), d) * upstream * share.positive));
    }
    if (const int64_t picked = mined().negative[row]; picks_negatives() && picked >= 0) {
      const T d = mined().d_an[row];
      if (double(d) < end_of(anchor)) pairs.add(picked, d, T(-upstream * share.negative));
    }
  }

  // By row, in the order of tripletops/_words.py: the distances of the picks, and how many terms are above 0.
  Mined<T> mined() const {
    return {this->result.positive, this->result.negative, this->saved(0), this->saved(1)};
  }
  T* positive_terms() const { return this->saved(2); }
  T* negative_terms() const { return this->saved(3); }

 private:
  bool picks_positives() const { return this->call.positive != Positive::all; }
  bool picks_negatives() const { return this->call.negative != Negative::all; }

  void set_thresholds() {
    const int32_t anchors = this->anchors();
    int64_t* begin = this->rows.scratch.template take<int64_t>(anchors + 1);
    T* threshold = this->rows.scratch.template take<T>(anchors);
    for (int32_t a = 0; a < anchors; ++a) begin[a] = a, threshold[a] = within_type<T>(end_of(a));
    begin[anchors] = anchors;
    thresholds_ = thresholds_from(begin, threshold, this->rows);
    limit_ = limits_of(thresholds_, this->rows);
  }

  Selection<T> selection_;
  Thresholds<T> thresholds_;
  const T* limit_ = nullptr;
};

}  // namespace tripletops
