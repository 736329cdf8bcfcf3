// Mining, scoring and differentiating one triplet per anchor, on raw pointers: what ops.cpp offers to torch
// and module.cpp to the tests.
#pragma once

#include "problem.h"

namespace tripletops {

// Where the work runs: `run` calls body(context, i) for i in [0, count), on up to `threads` threads.
struct Pool {
  int threads = 1;
  void (*run)(int count, void (*body)(void* context, int i), void* context) = nullptr;
};

struct Batch {
  Rows anchors, candidates;  // the same matrix in self-mining
  const int64_t* anchor_labels = nullptr;
  const int64_t* candidate_labels = nullptr;
  const int64_t* self_index = nullptr;  // (anchors,) or null; not read in self-mining
  bool self_mining = true;
  bool ignoring = false;
  int64_t ignore_label = 0;
};

struct Selection {
  Positive positive = Positive::hard;
  Negative negative = Negative::hard;
  Distance distance = Distance::euclidean;
  uint64_t seed = 0;
  double cutoff = 0.5, nonzero_loss_cutoff = 1.4;  // of Negative::distance
};

struct Objective {
  Loss loss = Loss::margin;
  Reduction reduction = Reduction::mean;
  double margin = 0;
  double temperature = 1;
};

// Picks and reported distances of every anchor: -1 and NaN where there is none. False where a row that is not
// ignored holds a non-finite element: then everything is -1 and NaN.
template <class T>
bool mine(const Kernels<T>&, const Pool&, const Batch&, const Selection&, int64_t* positive,
          int64_t* negative, T* d_ap, T* d_an);

// The loss (one value, or one per anchor with Reduction::none) of mined triplets, and the slopes d loss / d
// d_ap and d loss / d d_an with the reduction's weights in them. Not finite: all of them are NaN.
template <class T>
void score(const Objective&, bool finite, int64_t anchors, const int64_t* positive, const int64_t* negative,
           const T* d_ap, const T* d_an, T* loss, T* slope_ap, T* slope_an);

// The gradient rows of anchors and candidates, in their own storage, adjacent rows; null: not wanted. In
// self-mining both parts go to `anchor_gradient`. `upstream` holds one value, or one per anchor.
template <class T>
void differentiate(const Kernels<T>&, const Pool&, const Rows& anchors, const Rows& candidates,
                   bool self_mining, Distance, const int64_t* positive, const int64_t* negative,
                   const T* d_ap, const T* d_an, const T* slope_ap, const T* slope_an, const T* upstream,
                   bool upstream_per_anchor, void* anchor_gradient, void* candidate_gradient);

}  // namespace tripletops
