// Every triplet of an anchor, a positive of it and a negative of it. A positive makes a threshold for the
// anchor's negatives: d_ap + margin for the hinge, d_ap for the soft margin. Few thresholds are kept for all
// anchors at once; where there are many, an anchor's triplets are done with one after the other (strips/).
#pragma once

#include "../strips/hinges.h"
#include "../strips/softplus.h"
#include "thresholds.h"

namespace tripletops {

template <class T>
class BatchAll : public ManyTuples<T> {
 public:
  using ManyTuples<T>::ManyTuples;

 protected:
  void begin_evaluation() override {
    if (!strips_) return set_thresholds();
    with_rows([&](StripWalk<T>& walk, auto& rows) {
      this->stream->visit_strips(walk, [&](const StripRow<T>& row) {
        if (!this->rows.is_valid(row.anchor)) return;
        walk.load_distances(row, this->stream->buffer(row.worker));
        rows[size_t(row.worker)].add(positives_of(this->rows, row.anchor), margin(), row.distances,
                                     &this->sums.negative_loss[row.anchor],
                                     &this->sums.negative_terms[row.anchor]);
      });
    });
  }

  void begin_differentiation() override {
    if (!strips_) set_thresholds();
  }

  Cost<T> cost() override {
    if (strips_) return {};
    thresholds_.loss = this->sums.negative_loss, thresholds_.active = this->sums.negative_terms;
    return streamed();
  }

  Cost<T> weighed_cost(const T* weight) override {
    if (strips_) {
      weigh_strips(weight);
      return {};
    }
    thresholds_.weight = weight;
    if (is_soft()) thresholds_.slope = this->rows.scratch.filled(list_size(), 0.0);
    return streamed();
  }

  void add_terms(int32_t anchor, T*) override {
    if (!is_soft() && !strips_) add_hits(thresholds_, anchor, this->sums);
  }

  Shares reduce() override {
    if (is_soft()) this->negatives_above_zero = double(this->triplets);  // softplus is never 0
    return this->shares_of(double(this->triplets), this->negatives_above_zero);
  }

  void after_weighing() override {
    if (is_soft()) return;
    for (int32_t a = 0; a < this->anchors(); ++a)
      for (int64_t i = thresholds_.begin[a] + 1; i < thresholds_.begin[a + 1]; ++i)
        thresholds_.hits[i] += thresholds_.hits[i - 1];
  }

  bool pulls_positives() const override { return !strips_; }
  double positive_slope(int32_t anchor, int32_t, T distance) const override {
    if (!this->rows.is_valid(anchor)) return 0;
    const T* first = thresholds_.threshold + thresholds_.begin[anchor];
    const T* last = thresholds_.threshold + thresholds_.begin[anchor + 1];
    const int64_t at = std::lower_bound(first, last, threshold_of(distance)) - thresholds_.threshold;
    return is_soft() ? thresholds_.slope[at] : double(thresholds_.hits[at]);
  }

 private:
  bool is_soft() const { return this->call.loss == Loss::soft_margin; }
  int64_t list_size() const { return thresholds_.begin[this->anchors()]; }
  T margin() const { return T(this->call.numbers.margin); }

  T threshold_of(T d_ap) const { return is_soft() ? d_ap : within_type<T>(double(d_ap + margin())); }

  void set_thresholds() {
    const int64_t* begin = this->positive_lists();
    T* threshold = this->rows.scratch.template take<T>(begin[this->anchors()]);
    this->for_each_anchor([&](int32_t a, T* buffer) {
      if (begin[a] == begin[a + 1]) return;
      T* next = threshold + begin[a];
      this->prepared.each_positive(a, buffer, [&](int32_t, T d) { *next++ = threshold_of(d); });
      std::sort(threshold + begin[a], next);
    });
    thresholds_ = thresholds_from(begin, threshold, this->rows);
    limit_ = is_soft() ? nullptr : limits_of(thresholds_, this->rows);
  }

  Cost<T> streamed() const {
    const BlockFunctions<T>& functions = this->functions.blocks;
    return {is_soft() ? functions.softplus : functions.hinge, &thresholds_, limit_};
  }

  // Calls task(walk, rows), where `rows` works on the rows of a strip, one for each worker.
  template <class Task>
  void with_rows(const Task& task) {
    StripWalk<T> walk(this->prepared);
    const auto run = [&](auto rows) {
      using Row = typename decltype(rows)::value_type;
      for (int worker = 0; worker < walk.pool().threads; ++worker)
        rows.push_back(Row(this->rows, walk.columns(), this->functions.blocks.softplus));
      task(walk, rows);
    };
    if (is_soft())
      run(std::vector<SummedSoftplus<T>>());
    else
      run(std::vector<RankedHinges<T>>());
  }

  void weigh_strips(const T* weight) {
    with_rows([&](StripWalk<T>& walk, auto& rows) {
      this->stream->weigh_strips(walk, [&](const StripRow<T>& row) {
        const bool valid = this->rows.is_valid(row.anchor);
        if (valid)
          rows[size_t(row.worker)].weigh(positives_of(this->rows, row.anchor), margin(), weight[row.anchor],
                                         row.distances);
        const int64_t weighed = valid ? this->rows.classes.candidates.count : 0;
        std::fill(row.distances + weighed, row.distances + walk.columns(), T(0));
      });
    });
  }

  const bool strips_ = StripWalk<T>::pays(this->rows, is_soft() ? 48 : 12);  // measured
  Thresholds<T> thresholds_;
  const T* limit_ = nullptr;
};

}  // namespace tripletops
