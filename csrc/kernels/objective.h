// What is minimised. An objective is one file in objectives/, which answers the questions below; this driver
// names none of them.
#pragma once

#include "gradient.h"
#include "selection.h"
#include "stream.h"

namespace tripletops {

// Anything that has a loss and gradients.
template <class T>
class Objective {
 public:
  Objective(const Functions<T>& functions, const Pool& pool, const Call& call, const Evaluated<T>& result)
      : functions(functions),
        pool(pool),
        call(call),
        result(result),
        anchor_count(call.batch.anchors.count) {}
  virtual ~Objective() = default;

  virtual void evaluate() = 0;
  virtual void differentiate(const Gradients<T>&) = 0;

 protected:
  // Row `number` of what the objective saves, a value for each row of the anchors.
  T* saved(int number) const { return result.saved + number * anchor_count; }
  int64_t saved_count() const { return kSaved[int(call.objective)] * anchor_count; }

  bool per_anchor() const { return call.reduction == Reduction::none; }
  void fill_loss(T value) const {
    std::fill(result.loss, result.loss + (per_anchor() ? anchor_count : 1), value);
  }

  // A row is not finite: loss and gradients are NaN.
  void poison() const {
    fill_loss(std::numeric_limits<T>::quiet_NaN());
    result.shares->positive = result.shares->negative = std::numeric_limits<double>::quiet_NaN();
  }
  bool is_poisoned() const { return std::isnan(result.shares->positive); }

  void fill_gradients(const Gradients<T>& wanted, T value) {
    Scratch scratch;
    const Sides sides = {call.batch.anchors, call.batch.candidates, call.batch.self_mining};
    write_gradients<T>(functions, pool, scratch, Distance::euclidean, sides, wanted,
                       [&](bool, int64_t, int, RowGradient<T>& to) {
                         std::fill(to.part(), to.part() + call.batch.anchors.width, value);
                       });
    if (wanted.learned) std::fill(wanted.learned, wanted.learned + anchor_count, value);
  }

  const Functions<T>& functions;
  const Pool& pool;
  const Call& call;
  const Evaluated<T>& result;
  const int64_t anchor_count;
};

// Sums over many tuples of an anchor: over its positives one by one, and over its negatives as a cost that is
// streamed, or over pairs that were picked. Anchors and candidates are counted by position, unless a name
// says row.
template <class T>
class ManyTuples : public Objective<T> {
 public:
  ManyTuples(const Functions<T>& functions, const Pool& pool, const Call& call, const Evaluated<T>& result)
      : Objective<T>(functions, pool, call, result),
        rows(functions, pool, call.batch),
        prepared(rows, call.distance) {}

  void evaluate() override;
  void differentiate(const Gradients<T>&) override;

 protected:
  // The questions.

  // Which panels are packed, and whether every number that comes with the anchors is finite.
  virtual Packed needs() const { return Packed::everything; }
  virtual bool is_finite() const { return true; }
  // Whether pairs count for themselves: an anchor without a negative still has its positive pairs.
  virtual bool pairs_stand_alone() const { return false; }
  // What has to be known before the negatives are streamed.
  virtual void begin_evaluation() {}
  virtual void begin_differentiation() {}
  // What the negatives cost; no functions: nothing is streamed. The second takes `weight`, by anchor, which
  // the derivatives are multiplied by.
  virtual Cost<T> cost() { return {}; }
  virtual Cost<T> weighed_cost(const T* /*weight*/) { return {}; }
  // After all costs have been added: fills `sums` for one anchor. `buffer` holds two rows.
  virtual void add_terms(int32_t anchor, T* buffer) = 0;
  // What each term counts for. The numbers of terms above 0 have been counted.
  virtual Shares reduce() = 0;
  // After all negatives have been weighed.
  virtual void after_weighing() {}
  // The derivative of an anchor's loss by the distance of a positive, before anything is reduced; asked for
  // every positive, if `pulls_positives`.
  virtual bool pulls_positives() const { return true; }
  virtual double positive_slope(int32_t /*anchor*/, int32_t /*row*/, T /*distance*/) const { return 0; }
  // Pairs that were picked: how many at most, and those of one anchor, with what they pull with.
  virtual int64_t most_pairs() const { return 0; }
  virtual void list_pairs(int32_t /*anchor*/, double /*upstream*/, PairList<T>&) const {}
  // The derivative of an anchor's loss by its learned number.
  virtual double learned_slope(int32_t /*anchor*/) const { return 0; }

  // What the answers are made with.

  int32_t anchors() const { return rows.anchors(); }
  int32_t row_of(int32_t anchor) const { return rows.row_of(anchor); }

  template <class Task>
  void for_each_anchor(const Task& task) {
    for_each_range(rows.pool, anchors(), kRowsPerTask, [&](int64_t begin, int64_t end, int worker) {
      for (int64_t a = begin; a < end; ++a) task(int32_t(a), stream->buffer(worker));
    });
  }

  T distance_of(int32_t anchor, int32_t candidate_row, T* buffer) const {
    return T(prepared.measured(row_of(anchor), candidate_row, buffer));
  }

  // Where the positives of each anchor lie in lists of all of them; those of anchors that have no negative
  // are left out.
  int64_t* positive_lists() {
    int64_t* begin = rows.scratch.template take<int64_t>(anchors() + 1);
    begin[0] = 0;
    for (int32_t a = 0; a < anchors(); ++a)
      begin[a + 1] = begin[a] + (rows.is_valid(a) ? rows.positive_count(a) : 0);
    return begin;
  }

  static double one_of(double count) { return 1 / std::max(count, 1.0); }
  // The same share for all terms, by how many there are and how many of them are above 0.
  Shares shares_of(double all, double above_zero) const {
    const Reduction reduction = this->call.reduction;
    if (reduction == Reduction::sum || reduction == Reduction::none) return {1, 1};
    const double share = one_of(reduction == Reduction::mean ? all : above_zero);
    return {share, share};
  }

  Ordered<T> rows;
  Prepared<T> prepared;
  std::unique_ptr<Stream<T>> stream;

  // By anchor: the sums of its terms, and how many of them are above 0.
  struct Sums {
    double *positive_loss, *negative_loss, *positive_terms, *negative_terms;
  };
  Sums sums = {};
  // Of all anchors.
  int64_t positive_pairs = 0, negative_pairs = 0, triplets = 0;
  double positives_above_zero = 0, negatives_above_zero = 0;

 private:
  bool ready();
  bool is_empty() const {
    return positive_pairs == 0 || negative_pairs == 0 || (!pairs_stand_alone() && triplets == 0);
  }
  void pull_positives(bool is_anchor, int32_t position, T* buffer, const double* upstream,
                      const int32_t* anchor_position, RowGradient<T>& to) const;
};

}  // namespace tripletops
