// What the products of a search are compared with, and how that follows from what has been measured. The key
// of a pair is never less than -y (y for the farthest), y being half its squared distance; the threshold of
// an anchor is what the key of its pick certainly exceeds. Thresholds only rise. They are shared by the
// threads: whoever reads an older one looks at more than is needed.
#pragma once

#include <vector>

#include "bound.h"

namespace tripletops {

constexpr float kNever = 1e36f;  // a threshold that nothing passes, and minus one that everything does

inline float shared(const float& value) {
  float copy;
  __atomic_load(&value, &copy, __ATOMIC_RELAXED);
  return copy;
}
inline void share(float* to, float value) { __atomic_store(to, &value, __ATOMIC_RELAXED); }

class CertifiedThresholds {
 public:
  Quantised anchors, candidates;
  Scan scan;
  const float* allowance = nullptr;  // by anchor

  CertifiedThresholds(Prepared<float>& prepared, const Measure& measure, const Goal& goal)
      : prepared_(prepared),
        rows_(prepared.rows),
        measure_(measure),
        goal_(goal),
        symmetric_(rows_.batch.self_mining),
        bound_(rows_.width) {}

  // Bars by which candidates can be compared roughly, before anything is known of errors.
  void begin(const Quantised& of_anchors, const Quantised& of_candidates) {
    anchors = of_anchors, candidates = of_candidates;
    row_bar_ = take(anchors.count), row_scale_ = take(anchors.count);
    column_bar_ = symmetric_ ? row_bar_ : take(candidates.count);
    const float sign = float(goal_.sign);
    for (int32_t a = 0; a < anchors.count; ++a)
      row_scale_[a] = sign * anchors.scale[a], row_bar_[a] = sign * anchors.half_norm[a];
    for (int32_t c = 0; c < candidates.count && !symmetric_; ++c)
      column_bar_[c] = sign * candidates.half_norm[c];
    pad(row_scale_, anchors.count, 0), pad(row_bar_, anchors.count, kNever);
    pad(column_bar_, candidates.count, kNever);
    scan = {};
    scan.anchors = &anchors, scan.candidates = &candidates;
    scan.row_scale = row_scale_, scan.row_bar = row_bar_, scan.column_bar = column_bar_;
    if (!goal_.has_floors()) return;
    float* cut = take(anchors.count);
    for (int32_t a = 0; a < anchors.count; ++a) {
      // An error of this size is usual.
      const double low = goal_.floor_low(a), error = 0.2 * double(anchors.residual[a] * anchors.norm[a]);
      cut[a] = low < 0 ? kNever : float(-low - error);
    }
    pad(cut, anchors.count, 0);
    scan.row_cut = cut, scan.column_ceiling = column_bar_;
  }

  // From here on keys are certain. `known(a)`: what has been measured of the anchor, null if nothing.
  template <class Known>
  void start(const Known& known) {
    set_constants(known);
    float* of_anchors = take(anchors.count);
    const float* of_candidates = symmetric_ ? of_anchors : start_candidates();
    allowance = of_anchors;
    threshold_ = take(anchors.count), limit_ = take(candidates.count);
    if (goal_.has_floors()) take_floors();
    for_each_range(rows_.pool, anchors.count, kRowsPerTask, [&](int64_t begin, int64_t end, int) {
      for (int32_t a = int32_t(begin); a < end; ++a) {
        of_anchors[a] = above(bound_.allowance(size_of(anchors, a)));
        row_bar_[a] = bar(anchors, a, of_anchors[a]);
        const bool wanted = !goal_.wants_nothing(a);
        threshold_[a] = wanted ? -kNever : kNever;
        if (symmetric_) limit_[a] = wanted ? -kNever : 2 * kNever;
        if (goal_.has_floors()) start_floor(a, wanted, of_candidates);
        if (const Measured* value = wanted ? known(a) : nullptr) raise(a, *value);
      }
    });
    pad(threshold_, anchors.count, kNever);
    std::fill(limit_ + (symmetric_ ? candidates.count : 0), limit_ + candidates.count + kPadding, 2 * kNever);
    scan.row_threshold = threshold_, scan.column_limit = limit_;
    if (goal_.has_floors()) finish_floors(of_candidates);
  }

  float threshold(int32_t anchor) const { return shared(threshold_[anchor]); }

  // Everything that is as good as `value`, or better, has a key above the threshold.
  void raise(int32_t anchor, const Measured& value) {
    if (!threshold_) return;
    const RowSize size = size_of(anchors, anchor);
    const double y = goal_.sign * value.y + measure_.error(value);
    const double doubt = bound_.doubt(size, bound_.a > 0 ? std::min(y, bound_.farthest(size)) : 0);
    const double own = double(allowance[anchor]), slack = 16 * kUnit * (std::abs(y) + own + doubt);
    const float raised = below(-y - doubt + own - slack);
    if (!(raised > threshold(anchor))) return;
    share(threshold_ + anchor, raised);
    if (symmetric_) share(limit_ + anchor, below(double(raised) + double(row_bar_[anchor])));
    if (goal_.has_floors()) lower_cut(anchor, doubt);
  }

  // The key of a pair that passed for its row, or for its column.
  float key_of(const Hit& hit) const { return hit.value - column_bar_[hit.column]; }

  // Whether a pair may be beyond the floor of the anchor, its row or its column; and whether it must be.
  bool may_be_beyond(const Hit& hit, int32_t anchor) const {
    if (!goal_.has_floors()) return true;
    return anchor == hit.row ? hit.value < scan.column_ceiling[hit.column] + shared(cut_[anchor])
                             : hit.value < shared(column_cut_[anchor]) + widening_[hit.row];
  }
  bool must_be_beyond(int32_t anchor, float key) const {
    return !goal_.has_floors() || key < certain_[anchor];
  }

  const Bound& bound() const { return bound_; }

  // Rows whose part in the error is out of the ordinary.
  bool is_outlier(int32_t anchor) const { return double(anchors.residual[anchor]) > bound_.residual_cap; }

 private:
  static float below(double value) {
    return std::nextafter(float(value), -std::numeric_limits<float>::infinity());
  }
  static float above(double value) {
    return std::nextafter(float(value), std::numeric_limits<float>::infinity());
  }

  float* take(int32_t count) { return rows_.scratch.template take<float>(count + kPadding); }
  static void pad(float* values, int32_t count, float value) {
    std::fill(values + count, values + count + kPadding, value);
  }

  float bar(const Quantised& rows, int32_t i, float own) const {
    return float(goal_.sign * (double(rows.half_norm[i]) - bound_.a * double(rows.along[i])) - double(own));
  }

  // Where the two sides are different rows.
  const float* start_candidates() {
    float* own = take(candidates.count);
    for_each_range(rows_.pool, candidates.count, kRowsPerTask, [&](int64_t begin, int64_t end, int) {
      for (int32_t c = int32_t(begin); c < end; ++c) {
        own[c] = above(bound_.allowance(size_of(candidates, c)));
        column_bar_[c] = bar(candidates, c, own[c]);
      }
    });
    return own;
  }

  void take_floors() {
    cut_ = take(anchors.count), widening_ = take(anchors.count), certain_ = take(anchors.count);
    ceiling_ = take(candidates.count), column_cut_ = take(candidates.count);
  }

  void start_floor(int32_t anchor, bool wanted, const float* of_candidates) {
    certain_[anchor] = float(-goal_.floor_high(anchor));
    widening_[anchor] = above(2 * double(allowance[anchor]));
    cut_[anchor] = -kNever;
    if (symmetric_) {
      column_cut_[anchor] = -2 * kNever;
      ceiling_[anchor] = above(double(row_bar_[anchor]) + 2 * double(of_candidates[anchor]));
    }
    const RowSize size = size_of(anchors, anchor);
    if (wanted) lower_cut(anchor, bound_.doubt(size, bound_.farthest(size)));
  }

  void finish_floors(const float* of_candidates) {
    for (int32_t c = 0; c < candidates.count && !symmetric_; ++c) {
      ceiling_[c] = above(double(column_bar_[c]) + 2 * double(of_candidates[c]));
      column_cut_[c] = -2 * kNever;
    }
    pad(cut_, anchors.count, -kNever), pad(widening_, anchors.count, 0);
    pad(ceiling_, candidates.count, 0), pad(column_cut_, candidates.count, -2 * kNever);
    scan.row_cut = cut_, scan.row_widening = widening_;
    scan.column_ceiling = ceiling_, scan.column_cut = column_cut_;
  }

  // Everything that is beyond the floor, and as good as what `doubt` belongs to, stays below the ceiling.
  void lower_cut(int32_t anchor, double doubt) {
    const double low = goal_.floor_low(anchor), own = double(allowance[anchor]);
    const float cut = low < 0 ? kNever : above(own - low + doubt + 16 * kUnit * (low + own + doubt));
    share(cut_ + anchor, cut);
    if (symmetric_) share(column_cut_ + anchor, above(double(cut) + double(row_bar_[anchor])));
  }

  // What norms, residuals and reaches are for nearly all rows. What a row exceeds them by is its own affair.
  template <class Known>
  void set_constants(const Known& known) {
    const auto reach = [&](int32_t a) {
      const Measured* value = known(a);
      const RowSize size = size_of(anchors, a);
      return bound_.reach_of(size.norm, value ? value->y : bound_.farthest(size)) + size.residual;
    };
    bound_.norm_most = largest(candidates.count, [&](int32_t c) { return double(candidates.norm[c]); });
    bound_.norm_cap = quantile(candidates.count, 0.99, [&](int32_t c) { return double(candidates.norm[c]); });
    bound_.norm_floor =
        bound_.lower(quantile(candidates.count, 0.01, [&](int32_t c) { return double(candidates.norm[c]); }));
    bound_.residual_cap =
        1.5 * quantile(candidates.count, 0.99, [&](int32_t c) { return double(candidates.residual[c]); });
    // The farther a candidate, the better: nothing bounds its distance.
    bound_.a = goal_.keep == Keep::farthest ? 0 : quantile(anchors.count, 0.5, [&](int32_t a) {
      const Measured* value = known(a);
      const double norm = double(anchors.norm[a]);
      return value && norm > 0 ? std::clamp(1 - value->y / (norm * norm), 0.0, 0.999) : 0;
    });
    bound_.reach = quantile(anchors.count, 0.9, reach);
    bound_.reach_most =
        std::max(bound_.reach,
                 largest(anchors.count, [&](int32_t a) { return goal_.wants_nothing(a) ? 0 : reach(a); }));
    bound_.extra_most = bound_.extra(bound_.norm_most);
    bound_.residual_most =
        largest(candidates.count, [&](int32_t c) { return double(candidates.residual[c]); });
  }

  template <class Value>
  static double largest(int32_t count, const Value& value) {
    double most = 0;
    for (int32_t i = 0; i < count; ++i) most = std::max(most, value(i));
    return most;
  }

  // Of a sample.
  template <class Value>
  static double quantile(int32_t count, double share, const Value& value) {
    const int32_t size = std::min(count, 1024);
    std::vector<double> values;
    for (int32_t i = 0; i < size; ++i) values.push_back(value(int32_t(int64_t(i) * count / size)));
    if (values.empty()) return 0;
    const size_t at = std::min(values.size() - 1, size_t(double(size) * share));
    std::nth_element(values.begin(), values.begin() + int64_t(at), values.end());
    return values[at];
  }

  Prepared<float>& prepared_;
  Ordered<float>& rows_;
  const Measure& measure_;
  const Goal& goal_;
  const bool symmetric_;
  Bound bound_;
  float *row_scale_ = nullptr, *row_bar_ = nullptr, *column_bar_ = nullptr;
  float *threshold_ = nullptr, *limit_ = nullptr;
  float *cut_ = nullptr, *widening_ = nullptr, *certain_ = nullptr, *ceiling_ = nullptr,
        *column_cut_ = nullptr;
};

}  // namespace tripletops
