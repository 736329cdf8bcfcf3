// One triplet per anchor, its positive and its negative picked by rule.
#pragma once

#include "../losses.h"
#include "../objective.h"

namespace tripletops {

// Defined in registry.h, which knows the words.
inline Term term_of(Loss, const Numbers&, double d_ap, double d_an);

template <class T>
class Triplet : public Objective<T> {
 public:
  using Objective<T>::Objective;

  void evaluate() override {
    const int64_t count = this->anchor_count;
    const Evaluated<T>& result = this->result;
    const Mined<T> mined = {result.positive, result.negative, d_ap(), d_an()};
    *result.active = 0;
    *result.shares = {};
    if (!mine<T>(this->functions, this->pool, this->call, mined)) {
      std::fill(slope_ap(), slope_ap() + 2 * count, T(0));
      return this->poison();
    }
    long double total = 0;  // of losses that may be the largest numbers that T holds
    int64_t valid = 0, above_zero = 0;
    for (int64_t i = 0; i < count; ++i) {
      Term term = {0, 0, 0};
      if (is_valid(i)) {
        term = term_of(this->call.loss, this->call.numbers, double(d_ap()[i]), double(d_an()[i]));
        ++valid, above_zero += T(term.loss) > 0;
        // A mean over the losses above 0 is one of those alone.
        if (term.loss < 0 && this->call.reduction == Reduction::mean_nonzero) term = {0, 0, 0};
      }
      if (this->per_anchor()) result.loss[i] = T(term.loss);
      total += term.loss;
      slope_ap()[i] = T(term.slope_ap), slope_an()[i] = T(term.slope_an);
    }
    *result.active = double(above_zero);
    if (!this->per_anchor()) *result.loss = T(total * share_slopes(valid, above_zero));
  }

  void differentiate(const Gradients<T>& wanted) override {
    if (this->is_poisoned()) return this->fill_gradients(wanted, std::numeric_limits<T>::quiet_NaN());
    const Batch& batch = this->call.batch;
    const Sides sides = {batch.anchors, batch.candidates, batch.self_mining};
    Scratch scratch;
    Pool pool = this->pool;
    if (double(batch.anchors.count + batch.candidates.count) * double(batch.anchors.width) < 3e4)
      pool.threads = 1;
    PairList<T> pairs(sides, this->call.distance, 2 * this->anchor_count, scratch);
    for (int64_t i = 0; i < this->anchor_count; ++i) {
      if (!is_valid(i)) continue;
      const T upstream = wanted.upstream[wanted.upstream_per_anchor ? i : 0];
      pairs.start(i);
      pairs.add(this->result.positive[i], d_ap()[i], slope_ap()[i] * upstream);
      pairs.add(this->result.negative[i], d_an()[i], slope_an()[i] * upstream);
    }
    pairs.sort_by_candidate(scratch);
    write_gradients<T>(
        this->functions, pool, scratch, this->call.distance, sides, wanted,
        [&](bool is_anchor, int64_t row, int, RowGradient<T>& to) { pairs.pull(is_anchor, row, to); });
  }

 private:
  // By row, in the order of tripletops/_words.py. The slopes have the share of a mean in them.
  T* d_ap() const { return this->saved(0); }
  T* d_an() const { return this->saved(1); }
  T* slope_ap() const { return this->saved(2); }
  T* slope_an() const { return this->saved(3); }

  bool is_valid(int64_t row) const {
    return this->result.positive[row] >= 0 && this->result.negative[row] >= 0;
  }

  // Multiplies the slopes by the share that every triplet has in the loss, and returns it.
  double share_slopes(int64_t valid, int64_t above_zero) const {
    if (this->call.reduction == Reduction::sum) return 1;
    const int64_t counted = this->call.reduction == Reduction::mean ? valid : above_zero;
    const double share = 1 / double(std::max<int64_t>(counted, 1));
    for (int64_t i = 0; i < this->anchor_count; ++i) {
      slope_ap()[i] = T(slope_ap()[i] * share);
      slope_an()[i] = T(slope_an()[i] * share);
    }
    return share;
  }
};

}  // namespace tripletops
