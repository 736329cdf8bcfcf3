// The nearest negative strictly farther than d_ap + offset, d_ap being the distance of the picked positive.
// With an offset of 0 it is the semi-hard one (SHN).
#pragma once

#include "../selection.h"

namespace tripletops {

template <class T>
class BeyondRule : public Rule<T> {
 public:
  using Rule<T>::Rule;

  Keep sought() const override { return Keep::beyond; }
  Packed needs(Distance) const override { return Packed::as_needed; }

  // A certified search compares the distances that are reported. Else, without an offset, the search starts
  // above the key of the positive, computed as it computes its own keys: duplicates of the positive are
  // excluded by themselves.
  void pick(Selection<T>& selection, Picks<T> picks) const override {
    if (selection.search_beyond([&] { return floors(selection); }, picks)) return;
    selection.pack();
    const bool at_positive = selection.call.numbers.offset == 0;
    const T* floors = at_positive ? selection.positive_keys() : floor_keys(selection);
    Picks<T> positives, found;
    selection.search({Keep::nothing, Keep::beyond, floors}, &positives, &found);
    std::copy(found.index, found.index + selection.rows.anchors(), picks.index);
  }

  // Everything is at distance 1.
  void settle_zero_row(const Selection<T>& selection, int32_t anchor, int32_t* pick) const override {
    const bool any = selection.positives().index[anchor] != kNobody && selection.call.numbers.offset < 0;
    *pick = any ? selection.lowest(anchor, Kind::negatives) : kNobody;
  }

  // Keys are rounded: what is strictly farther is decided by the distances that are reported.
  void settle_measured(const Selection<T>& selection, int32_t anchor, const T* x, T d_ap, T* buffer,
                       int32_t* pick, T* distance) const override {
    const double floor = double(d_ap) + selection.call.numbers.offset;
    if (!(double(*distance) > floor))
      *pick = selection.prepared.nearest_beyond(anchor, x, floor, buffer, distance);
  }

 private:
  // By anchor: d_ap + offset; infinite where there is no positive.
  static const double* floors(Selection<T>& selection) {
    Ordered<T>& rows = selection.rows;
    double* floors = rows.by_anchor(std::numeric_limits<double>::infinity());
    for_each_range(rows.pool, rows.anchors(), kRowsPerTask, [&](int64_t begin, int64_t end, int worker) {
      for (int32_t a = int32_t(begin); a < end; ++a) {
        const int32_t positive = selection.positives().index[a];
        if (positive == kNobody) continue;
        const double d_ap = selection.prepared.measured(rows.row_of(a), positive, rows.buffers[worker]);
        floors[a] = double(T(d_ap)) + selection.call.numbers.offset;
      }
    });
    return floors;
  }

  // By anchor: the key of a candidate at the floor.
  static const T* floor_keys(Selection<T>& selection) {
    constexpr T infinity = std::numeric_limits<T>::infinity();
    const double* floor = floors(selection);
    T* keys = selection.rows.by_anchor(infinity);
    for (int32_t a = 0; a < selection.rows.anchors(); ++a) {
      const double own = double(selection.prepared.pairs.anchors.half_norms[a]);
      if (!std::isinf(floor[a]))
        keys[a] = floor[a] < 0 ? -infinity : T(half_square(selection.prepared, floor[a]) - own);
    }
    return keys;
  }

  // Half the squared distance of framed rows that are `distance` apart.
  static double half_square(const Prepared<T>& prepared, double distance) {
    if (prepared.distance == Distance::cosine) return distance;
    const double scaled = distance * prepared.scale;
    return (prepared.distance == Distance::euclidean ? scaled * scaled : scaled * prepared.scale) / 2;
  }
};

}  // namespace tripletops
