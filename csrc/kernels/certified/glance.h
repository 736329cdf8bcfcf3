// Before anything is quantised: a glance at a few candidates of a few anchors, whether integers could tell
// them apart.
#pragma once

#include <array>
#include <vector>

#include "measure.h"

namespace tripletops {

constexpr int32_t kGlancedAnchors = 8;

class Glance {
 public:
  Glance(const Prepared<float>& prepared, const Measure& measure, const Goal& goal)
      : prepared_(prepared), rows_(prepared.rows), measure_(measure), goal_(goal) {}

  // The share of `candidates` of them that an anchor's pick cannot be told from by integers of so many bytes,
  // on average. The anchor that looks worst may be an outlier and does not count.
  double indistinct(size_t bytes, int32_t candidates) const {
    std::array<double, kGlancedAnchors> shares = {};
    for_each_task(rows_.pool, kGlancedAnchors, [&](int64_t i, int by) {
      const int32_t anchor = int32_t(i * rows_.anchors() / kGlancedAnchors);
      if (!goal_.wants_nothing(anchor)) shares[size_t(i)] = indistinct_of(anchor, bytes, candidates, by);
    });
    double sum = 0;
    for (const double share : shares) sum += share;
    return (sum - *std::max_element(shares.begin(), shares.end())) / (kGlancedAnchors - 1);
  }

 private:
  double indistinct_of(int32_t anchor, size_t bytes, int32_t candidates, int by) const {
    const std::vector<double> ys = measured(anchor, candidates, by);
    if (ys.empty()) return 0;
    const double floor = goal_.has_floors() ? goal_.floor_low(anchor) : -1;
    double pick = goal_.keep == Keep::farthest ? 0 : std::numeric_limits<double>::infinity();
    for (const double y : ys)
      if (y > floor) pick = goal_.keep == Keep::farthest ? std::max(pick, y) : std::min(pick, y);
    if (std::isinf(pick)) pick = std::max(floor, 0.0);  // none is beyond the floor
    const double error = typical_error(anchor, pick, bytes, by);
    double count = -1;  // the pick is itself among them
    for (const double y : ys)
      count += goal_.keep == Keep::farthest ? y >= pick - error : y >= floor - error && y <= pick + error;
    return std::max(count, 0.0) / double(ys.size());
  }

  std::vector<double> measured(int32_t anchor, int32_t candidates, int by) const {
    const int32_t begin = rows_.class_begin(anchor), end = rows_.class_end(anchor);
    const int32_t own = end - begin, all = rows_.classes.candidates.count;
    const int32_t eligible = goal_.same_class ? own : all - own, size = std::min(eligible, candidates);
    std::vector<double> ys;
    for (int32_t k = 0; k < size; ++k) {
      const int32_t at = int32_t(int64_t(k) * eligible / size);
      const int32_t c = goal_.same_class ? begin + at : at < begin ? at : at + own;
      if (goal_.is_eligible(anchor, c)) ys.push_back(measure_.rough(anchor, c, by).y);
    }
    return ys;
  }

  // The bound on the error of a pair of rows like this one that are y apart.
  double typical_error(int32_t anchor, double y, size_t bytes, int by) const {
    const int32_t row = rows_.row_of(anchor);
    float *buffer = rows_.buffers[size_t(by)], *framed = buffer + rows_.width;
    rows_.functions.rows.frame(rows_.functions.rows.load(rows_.batch.anchors, row, buffer), prepared_.frame,
                               prepared_.anchor_units ? prepared_.anchor_units + row : nullptr, rows_.width,
                               framed);
    double square = 0, largest = 0;
    for (int64_t d = 0; d < rows_.width; ++d) {
      square += double(framed[d]) * double(framed[d]);
      largest = std::max(largest, std::abs(double(framed[d])));
    }
    const bool pivots = goal_.keep != Keep::farthest && square > 0;
    const double cosine = pivots ? std::clamp(1 - y / square, 0.0, 1.0) : 0;
    const double reach = std::sqrt(square * (1 - cosine * cosine));
    const double spread = 2 * std::sqrt(double(rows_.width) / 12) * reach;  // roundings in all directions
    const QuantisedFunctions& functions = rows_.functions.quantised;
    if (bytes == 1) return spread * largest / functions.largest_byte;
    return spread * std::max(largest / functions.largest_half, std::sqrt(square) / functions.largest_norm);
  }

  const Prepared<float>& prepared_;
  const Ordered<float>& rows_;
  const Measure& measure_;
  const Goal& goal_;
};

}  // namespace tripletops
