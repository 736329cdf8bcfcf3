// The nearest or the farthest candidate: what the tile walk finds by itself.
#pragma once

#include "../selection.h"

namespace tripletops {

template <class T>
class ExtremeRule : public Rule<T> {
 public:
  ExtremeRule(Kind kind, Keep extreme) : Rule<T>(kind), extreme_(extreme) {}

  Keep extreme() const override { return extreme_; }

  // Of equals the first one is picked.
  void settle_zero_row(const Selection<T>& selection, int32_t anchor, int32_t* pick) const override {
    *pick = selection.lowest(anchor, this->kind());
  }

 private:
  const Keep extreme_;
};

}  // namespace tripletops
