// What a call is and what it gives back: plain structs on raw pointers, which ops.cpp fills for torch and
// module.cpp for the tests. The functions at the end are all that they call.
#pragma once

#include <cstdint>

#include "words.h"

namespace tripletops {

template <class T>
struct Functions;

enum class Storage : int { float32, float64, float16, bfloat16 };

// A matrix as the user holds it. `stride` counts elements from row to row; the elements of a row are
// adjacent.
struct Matrix {
  const void* data = nullptr;
  int64_t count = 0;
  int64_t width = 0;
  int64_t stride = 0;
  Storage storage = Storage::float32;
};

// Where the work runs: `run` calls body(context, i) for i in [0, count), on up to `threads` threads.
struct Pool {
  int threads = 1;
  void (*run)(int count, void (*body)(void* context, int i), void* context) = nullptr;
};

struct Batch {
  Matrix anchors, candidates;  // the same matrix in self-mining
  const int64_t* anchor_labels = nullptr;
  const int64_t* candidate_labels = nullptr;
  const int64_t* self_index = nullptr;  // (anchors,) or null; not read in self-mining
  bool self_mining = true;
  bool ignoring = false;
  int64_t ignore_label = 0;
};

// The fields have the names of tripletops/_words.py.
struct Call {
  Batch batch;
  ObjectiveWord objective = ObjectiveWord(0);
  Positive positive = Positive::all;
  Negative negative = Negative::all;
  Distance distance = Distance::euclidean;
  Loss loss = Loss(0);
  Reduction reduction = Reduction::mean;
  Numbers numbers;
  uint64_t seed = 0;
  const void* learned = nullptr;  // (anchors,) in the compute type, by row; null unless the objective learns
};

// One positive and one negative of every anchor: -1 and NaN where there is none.
template <class T>
struct Mined {
  int64_t *positive = nullptr, *negative = nullptr;
  T *d_ap = nullptr, *d_an = nullptr;
};

// What a term counts for in the loss: one over the number of terms that a mean is taken of.
struct Shares {
  double positive = 1, negative = 1;
};

// A loss and what its gradient is computed from (tripletops/_call.py, `Evaluated`).
template <class T>
struct Evaluated {
  T* loss = nullptr;                                 // one value, or one per anchor with Reduction::none
  double* active = nullptr;                          // one value: how many terms are above 0
  Shares* shares = nullptr;                          // one of them
  int64_t *positive = nullptr, *negative = nullptr;  // picks, by anchor; -1 for none
  T* saved = nullptr;  // rows of one value per anchor, as the objective names them
};

// The gradient that arrives, and those that are wanted: rows in the storage of their matrix, adjacent; null:
// not wanted. In self-mining everything goes to `anchors`.
template <class T>
struct Gradients {
  const T* upstream = nullptr;
  bool upstream_per_anchor = false;
  void *anchors = nullptr, *candidates = nullptr;
  T* learned = nullptr;
  bool unrounded = false;  // half-precision rows receive float32
};

// When the certified pass (certified.h) is tried.
enum class UseCertified : int { never, where_it_pays, always };

// What TRIPLETOPS_CERTIFIED says when this is first called (0: never, 1: always), until it is set.
UseCertified use_of_certified();
void set_use_of_certified(UseCertified);

// False where a row that is not ignored holds a non-finite element: then everything is -1 and NaN.
template <class T>
bool mine(const Functions<T>&, const Pool&, const Call&, const Mined<T>&);

template <class T>
void evaluate(const Functions<T>&, const Pool&, const Call&, const Evaluated<T>&);

template <class T>
void differentiate(const Functions<T>&, const Pool&, const Call&, const Evaluated<T>&, const Gradients<T>&);

// Both, one after the other.
template <class T>
void evaluate_and_differentiate(const Functions<T>&, const Pool&, const Call&, const Evaluated<T>&,
                                const Gradients<T>&);

}  // namespace tripletops
