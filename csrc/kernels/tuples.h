// Objectives over many tuples: every triplet, every (anchor, positive) pair with its negative, or every pair.
// Forward and backward stream the blocks of pairs; neither keeps any of them.
#pragma once

#include "mining.h"

namespace tripletops {

// The order is that of OBJECTIVE in tripletops/ops.py.
enum class Tuples : int { batch_all, batch_all_soft, semi_hard, multi_similarity, contrastive, beta_margin };

// What `parameters` holds: margin | nothing | margin | alpha, beta, base, epsilon | pos_margin, neg_margin |
// alpha.
struct TupleObjective {
  Tuples tuples = Tuples::batch_all;
  Reduction reduction = Reduction::mean;
  double parameters[4] = {0, 0, 0, 0};
};

// What forward leaves for backward, next to its inputs.
template <class T>
struct TupleState {
  // Of the triplets (batch_all), pairs (semi_hard) or anchors (multi_similarity): those with a loss above 0,
  // and all. Of the last two objectives: the positive and the negative terms above 0.
  int64_t* counts = nullptr;
  int64_t *positive = nullptr, *negative = nullptr;  // picks, by anchor; -1 for none
  // By anchor, multi_similarity only: the distance of the nearest negative that counts and of the farthest
  // positive, and ln(1 + sum) of either side less the exponent of that one.
  T *nearest = nullptr, *farthest = nullptr, *positive_log_sum = nullptr, *negative_log_sum = nullptr;
};

// `beta`: by anchor, beta_margin only. `loss`: one value, or one per anchor with Reduction::none.
template <class T>
void tuples_forward(const Kernels<T>&, const Pool&, const Batch&, const Selection&, const TupleObjective&,
                    const T* beta, T* loss, TupleState<T> state);

// Gradients as in `differentiate`, and that of `beta`, which may be null.
template <class T>
void tuples_backward(const Kernels<T>&, const Pool&, const Batch&, const Selection&, const TupleObjective&,
                     const T* beta, TupleState<T> state, const T* upstream, bool upstream_per_anchor,
                     void* anchor_gradient, void* candidate_gradient, T* beta_gradient);

}  // namespace tripletops
