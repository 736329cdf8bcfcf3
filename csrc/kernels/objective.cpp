#include "objective.h"

#include "registry.h"

namespace tripletops {

// False where a row that is not ignored, or a number that comes with it, is not finite.
template <class T>
bool ManyTuples<T>::ready() {
  if (stream) return true;  // the loss has just been evaluated
  if (!prepared.prepare(needs()) || !is_finite()) return false;
  for (int32_t a = 0; a < anchors(); ++a) {
    const int64_t positive = rows.positive_count(a), negative = rows.negative_count(a);
    positive_pairs += positive, negative_pairs += negative, triplets += positive * negative;
  }
  stream = std::make_unique<Stream<T>>(prepared);
  return true;
}

template <class T>
void ManyTuples<T>::evaluate() {
  const Evaluated<T>& result = this->result;
  this->fill_loss(T(0));
  *result.active = 0;
  *result.shares = {};
  for (int64_t* picks : {result.positive, result.negative})
    std::fill(picks, picks + this->anchor_count, int64_t(-1));
  std::fill(result.saved, result.saved + this->saved_count(), T(0));
  if (this->anchor_count == 0) return;
  if (!ready()) return this->poison();
  if (is_empty()) return;

  sums = {rows.by_anchor(0.0), rows.by_anchor(0.0), rows.by_anchor(0.0), rows.by_anchor(0.0)};
  begin_evaluation();
  if (const Cost<T> streamed = cost(); streamed.functions.add) stream->add(streamed);
  for_each_anchor([&](int32_t a, T* buffer) { add_terms(a, buffer); });

  long double positive = 0, negative = 0;  // of losses that may be the largest numbers that T holds
  for (int32_t a = 0; a < anchors(); ++a) {
    positive += sums.positive_loss[a], negative += sums.negative_loss[a];
    positives_above_zero += sums.positive_terms[a], negatives_above_zero += sums.negative_terms[a];
  }
  const Shares share = reduce();
  *result.active = positives_above_zero + negatives_above_zero;
  *result.shares = share;
  if (!this->per_anchor())
    *result.loss = T(positive * share.positive + negative * share.negative);
  else
    for (int32_t a = 0; a < anchors(); ++a)
      result.loss[row_of(a)] = T(sums.positive_loss[a] + sums.negative_loss[a]);
}

template <class T>
void ManyTuples<T>::differentiate(const Gradients<T>& wanted) {
  if (this->is_poisoned()) return this->fill_gradients(wanted, std::numeric_limits<T>::quiet_NaN());
  if (this->anchor_count == 0 || !ready() || is_empty()) return this->fill_gradients(wanted, T(0));

  const Shares share = *this->result.shares;
  double* upstream = rows.by_anchor(0.0);
  T* weight = rows.by_anchor(T(0));
  for (int32_t a = 0; a < anchors(); ++a) {
    upstream[a] = double(wanted.upstream[wanted.upstream_per_anchor ? row_of(a) : 0]);
    weight[a] = T(upstream[a] * share.negative);
  }
  begin_differentiation();
  const Cost<T> streamed = weighed_cost(weight);
  if (streamed.functions.weigh) {
    stream->weigh(streamed);
    after_weighing();
  }

  const Batch& batch = this->call.batch;
  const Sides sides = {batch.anchors, batch.candidates, batch.self_mining, prepared.anchor_units,
                       prepared.candidate_units};
  PairList<T> pairs(sides, prepared.distance, most_pairs(), rows.scratch);
  for (int32_t a = 0; a < anchors(); ++a) {
    pairs.start(row_of(a));
    list_pairs(a, upstream[a], pairs);
  }
  pairs.sort_by_candidate(rows.scratch);
  if (wanted.learned) {
    std::fill(wanted.learned, wanted.learned + this->anchor_count, T(0));
    for (int32_t a = 0; a < anchors(); ++a) wanted.learned[row_of(a)] = T(upstream[a] * learned_slope(a));
  }

  const int32_t* anchor_position = rows.positions(rows.classes.anchors, batch.anchors.count);
  const int32_t* candidate_position =
      batch.self_mining ? anchor_position : rows.positions(rows.classes.candidates, batch.candidates.count);
  write_gradients<T>(this->functions, rows.pool, rows.scratch, prepared.distance, sides, wanted,
                     [&](bool is_anchor, int64_t row, int worker, RowGradient<T>& to) {
                       const int32_t position = (is_anchor ? anchor_position : candidate_position)[row];
                       if (position < 0) return;
                       T* buffer = stream->buffer(worker);
                       if (stream->has_pulls()) stream->add_pulls(is_anchor, position, buffer, to.part());
                       if (pulls_positives())
                         pull_positives(is_anchor, position, buffer, upstream, anchor_position, to);
                       pairs.pull(is_anchor, row, to);
                     });
}

// What the row's positive pairs pull it with: as an anchor and, in self-mining, as the others' positive; or
// as a candidate.
template <class T>
void ManyTuples<T>::pull_positives(bool is_anchor, int32_t position, T* buffer, const double* upstream,
                                   const int32_t* anchor_position, RowGradient<T>& to) const {
  const Batch& batch = this->call.batch;
  const double share = this->result.shares->positive;
  const auto weight = [&](int32_t anchor, int32_t other, T d) {
    return positive_slope(anchor, other, d) * upstream[anchor] * share;
  };
  if (is_anchor) {
    prepared.each_positive(position, buffer, [&](int32_t other, T d) {
      double both = weight(position, other, d);
      if (batch.self_mining) both += weight(anchor_position[other], row_of(position), d);
      to.pull(batch.candidates, prepared.candidate_units, other, d, T(both));
    });
    return;
  }
  const Order& order = rows.classes.anchors;
  const int32_t group = rows.classes.candidates.group[position],
                row = rows.classes.candidates.index[position];
  for (int32_t a = order.begin[group]; a < order.begin[group + 1]; ++a) {
    if (rows.self_position[a] == position) continue;
    const T d = distance_of(a, row, buffer);
    to.pull(batch.anchors, prepared.anchor_units, row_of(a), d, T(weight(a, row, d)));
  }
}

template <class T>
void evaluate(const Functions<T>& functions, const Pool& pool, const Call& call, const Evaluated<T>& result) {
  make_objective<T>(functions, pool, call, result)->evaluate();
}

template <class T>
void differentiate(const Functions<T>& functions, const Pool& pool, const Call& call,
                   const Evaluated<T>& result, const Gradients<T>& wanted) {
  make_objective<T>(functions, pool, call, result)->differentiate(wanted);
}

template <class T>
void evaluate_and_differentiate(const Functions<T>& functions, const Pool& pool, const Call& call,
                                const Evaluated<T>& result, const Gradients<T>& wanted) {
  const auto objective = make_objective<T>(functions, pool, call, result);
  objective->evaluate();
  objective->differentiate(wanted);
}

#define TRIPLETOPS_INSTANTIATE(T)                                                                    \
  template class ManyTuples<T>;                                                                      \
  template void evaluate<T>(const Functions<T>&, const Pool&, const Call&, const Evaluated<T>&);     \
  template void differentiate<T>(const Functions<T>&, const Pool&, const Call&, const Evaluated<T>&, \
                                 const Gradients<T>&);                                               \
  template void evaluate_and_differentiate<T>(const Functions<T>&, const Pool&, const Call&,         \
                                              const Evaluated<T>&, const Gradients<T>&);
TRIPLETOPS_INSTANTIATE(float)
TRIPLETOPS_INSTANTIATE(double)

}  // namespace tripletops
