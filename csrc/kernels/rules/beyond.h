// The nearest negative strictly farther than the picked positive: the semi-hard one (SHN).
#pragma once

#include "../selection.h"

namespace tripletops {

template <class T>
class BeyondRule : public Rule<T> {
 public:
  using Rule<T>::Rule;

  Packed needs(Distance) const override { return Packed::as_needed; }

  // The search starts above the key of the positive, computed as it computes its own keys: duplicates of the
  // positive are excluded by themselves.
  void pick(Selection<T>& selection, Picks<T> picks) const override {
    const T* floors = selection.positive_keys();
    Picks<T> positives, found;
    selection.search({Keep::nothing, Keep::beyond, floors}, &positives, &found);
    std::copy(found.index, found.index + selection.rows.anchors(), picks.index);
  }

  // Everything is at distance 1.
  void settle_zero_row(const Selection<T>&, int32_t, int32_t* pick) const override { *pick = kNobody; }

  // Keys are rounded: what is strictly farther is decided by the distances that are reported.
  void settle_measured(const Selection<T>& selection, int32_t anchor, const T* x, T d_ap, T* buffer,
                       int32_t* pick, T* distance) const override {
    const double floor = double(d_ap);
    if (!(double(*distance) > floor))
      *pick = selection.prepared.nearest_beyond(anchor, x, floor, buffer, distance);
  }
};

}  // namespace tripletops
