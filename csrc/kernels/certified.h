// The certified pass: the nearest or farthest candidate of every anchor, or the nearest one beyond its floor,
// by products of integers. Rows are quantised to int8 or int16; a proven bound on the error tells which
// candidates may be an anchor's pick, and those are measured from the rows themselves. So picks are those of
// double precision, whatever the integers are, the order of the work and the number of threads. The bound is
// proven in docs/certified.md, whose names are used here.
//
// Float32 products are the better choice where too many candidates would have to be measured. What decides is
// a look at a few anchors: the same input takes the same way.
#pragma once

#include <memory>

#include "prepared.h"

namespace tripletops {

// For tests: all pairs of self-mined rows, by position, as a search for the nearest or the farthest candidate
// meets them: half their squared distances, exactly, out of products of integers of so many bytes, and how
// far apart the two may be. False where the instruction set has no such products.
bool certified_errors(const Functions<float>&, const Call&, Keep, int bytes, double* exact,
                      double* approximate, double* bound);

template <class T>
class CertifiedPass {  // of other types than float: nothing
 public:
  explicit CertifiedPass(Prepared<T>&) {}
  bool may_pay(Keep) const { return false; }
  bool pick(bool, Keep, const double*, int32_t*) { return false; }
};

template <>
class CertifiedPass<float> {
 public:
  explicit CertifiedPass(Prepared<float>& prepared);  // may be surveyed later
  ~CertifiedPass();

  // Whether the instruction set, the size and TRIPLETOPS_CERTIFIED let such a search be tried.
  bool may_pay(Keep) const;

  // The row of each anchor's pick, among the candidates of its class or among all others; kNobody where there
  // is none. `floors`, for Keep::beyond: by anchor, a distance as it is reported. False where float32
  // products are the better choice; then nothing has been picked.
  bool pick(bool same_class, Keep keep, const double* floors, int32_t* picks);

 private:
  struct State;

  Prepared<float>& prepared_;
  std::unique_ptr<State> state_;  // from the first search on, when the rows are surveyed
};

}  // namespace tripletops
