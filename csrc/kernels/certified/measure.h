// Distances of an anchor and a candidate from the rows themselves: half their squares, in the scale of framed
// rows. In float, with a bound on the error, and in double where that cannot tell. Anchors and candidates are
// counted by position.
#pragma once

#include <array>
#include <cmath>

#include "../prepared.h"

namespace tripletops {

constexpr double kUnit = 0x1p-24;  // the rounding of float
constexpr double kTiny = 1e-36;    // more than what underflow takes away from a half squared distance

// Half a squared distance.
struct Measured {
  double y = 0;
  bool exact = false;
};

class Measure {
 public:
  explicit Measure(Prepared<float>& prepared)
      : prepared_(prepared), rows_(prepared.rows), relative_((double(rows_.width) / 16 + 8) * kUnit) {
    whole_ = {float(prepared.scale), 1};
    if (prepared.distance != Distance::cosine) return;
    candidate_scales_ = scales_of(prepared.candidate_units, rows_.batch.candidates.count);
    anchor_scales_ = rows_.batch.self_mining ? candidate_scales_
                                             : scales_of(prepared.anchor_units, rows_.batch.anchors.count);
  }

  // How far the value may lie from the exact one (docs/certified.md).
  double error(const Measured& value) const {
    if (value.exact) return 0;
    const double of_units = anchor_scales_ ? 6 * kUnit * std::sqrt(2 * value.y) + 20 * kUnit * kUnit : 0;
    return relative_ * value.y + of_units + kTiny;
  }

  // From a zero row, under the cosine, everything is at distance 1.
  bool is_zero(int32_t anchor) const {
    return anchor_scales_ && std::isinf(prepared_.anchor_units[rows_.row_of(anchor)].norm);
  }

  Measured rough(int32_t anchor, int32_t candidate, int worker) const {
    const int32_t x_row = rows_.row_of(anchor), y_row = row_of(candidate);
    if (anchor_scales_ && std::isinf(prepared_.candidate_units[y_row].norm)) return {1, true};
    float* buffer = rows_.buffers[size_t(worker)];
    const float* x = rows_.functions.rows.load(rows_.batch.anchors, x_row, buffer);
    const float* y = rows_.functions.rows.load(rows_.batch.candidates, y_row, buffer + rows_.width);
    const Scales& x_scale = anchor_scales_ ? anchor_scales_[x_row] : whole_;
    const Scales& y_scale = anchor_scales_ ? candidate_scales_[y_row] : whole_;
    return {double(rows_.functions.quantised.half_square(x, y, rows_.width, x_scale.data(), y_scale.data())),
            false};
  }

  Measured exact(int32_t anchor, int32_t candidate, int worker) const {
    const int32_t x_row = rows_.row_of(anchor), y_row = row_of(candidate);
    float* buffer = rows_.buffers[size_t(worker)];
    const float* x = rows_.functions.rows.load(rows_.batch.anchors, x_row, buffer);
    const float* y = rows_.functions.rows.load(rows_.batch.candidates, y_row, buffer + rows_.width);
    return {rows_.functions.quantised.half_square_exact(prepared_.pair(x, y, x_row, y_row), rows_.width,
                                                        prepared_.distance, prepared_.scale),
            true};
  }

  // As it is reported.
  double reported(int32_t anchor, int32_t candidate, int worker) const {
    return double(
        float(prepared_.measured(rows_.row_of(anchor), row_of(candidate), rows_.buffers[size_t(worker)])));
  }

  int32_t row_of(int32_t candidate) const { return rows_.classes.candidates.index[candidate]; }

  void prefetch(int32_t anchor, int32_t candidate) const {
    prefetch(rows_.batch.anchors, rows_.row_of(anchor));
    prefetch(rows_.batch.candidates, row_of(candidate));
  }

 private:
  using Scales = std::array<float, 2>;  // of a row: what it is multiplied by, one after the other

  // 1 / norm as a power of two, which brings rows of any size near 1, and the rest.
  Scales* scales_of(const Normaliser* units, int64_t count) const {
    Scales* scales = rows_.scratch.template take<Scales>(count);
    for (int64_t row = 0; row < count; ++row) {
      const Normaliser& unit = units[row];
      const int exponent = std::isinf(unit.norm) ? 0 : std::clamp(-std::ilogb(unit.norm), -126, 126);
      scales[row] = {float(std::ldexp(1.0, exponent)),
                     float(unit.scale / unit.norm * std::ldexp(1.0, -exponent))};
    }
    return scales;
  }

  static void prefetch(const Matrix& matrix, int64_t row) {
    const int64_t size = matrix.storage == Storage::float32 ? 4 : 2;
    const char* from = static_cast<const char*>(matrix.data) + row * matrix.stride * size;
    for (int64_t byte = 0; byte < matrix.width * size; byte += 64) __builtin_prefetch(from + byte);
  }

  Prepared<float>& prepared_;
  Ordered<float>& rows_;
  const double relative_;
  Scales whole_ = {};
  Scales *anchor_scales_ = nullptr, *candidate_scales_ = nullptr;
};

// What is searched for: the nearest or farthest candidate of a kind, or the nearest beyond an anchor's floor.
class Goal {
 public:
  const bool same_class;
  const Keep keep;
  const double sign;  // the larger sign * -y, the better

  // `floors`: by anchor, a distance as it is reported; Keep::beyond alone, else null.
  Goal(const Prepared<float>& prepared, const Measure& measure, bool same_class, Keep keep,
       const double* floors)
      : same_class(same_class),
        keep(keep),
        sign(keep == Keep::farthest ? -1 : 1),
        prepared_(prepared),
        measure_(measure),
        floors_(floors) {}

  bool has_floors() const { return floors_ != nullptr; }
  double floor(int32_t anchor) const { return floors_[anchor]; }

  // Nothing below `floor_low` is reported as farther than the floor; everything above `floor_high` is. Half
  // squares, -1 where everything is beyond the floor.
  double floor_low(int32_t anchor) const {
    const double low = floors_[anchor] - std::abs(floors_[anchor]) * 0x1p-22 - 0x1p-148;
    return low < 0 ? -1 : half_square(low) * (1 - 1e-12);
  }
  double floor_high(int32_t anchor) const {
    const double floor = floors_[anchor];
    if (floor < 0) return -1;
    // The largest number stands for all larger ones.
    if (floor >= double(std::numeric_limits<float>::max())) return std::numeric_limits<double>::infinity();
    return half_square(floor + floor * 0x1p-22 + 0x1p-148) * (1 + 1e-12);
  }

  bool wants_nothing(int32_t anchor) const {
    return measure_.is_zero(anchor) || (floors_ && std::isinf(floors_[anchor]) && floors_[anchor] > 0);
  }

  // By position; a pair of the anchor and itself is not.
  bool is_eligible(int32_t anchor, int32_t candidate) const {
    const Ordered<float>& rows = prepared_.rows;
    const bool same = candidate >= rows.class_begin(anchor) && candidate < rows.class_end(anchor);
    return same == same_class && candidate != rows.self_position[anchor];
  }

 private:
  // Half the squared distance of framed rows that is reported as `distance`.
  double half_square(double distance) const {
    if (prepared_.distance == Distance::cosine) return distance;
    const double scaled = distance * prepared_.scale;
    return (prepared_.distance == Distance::euclidean ? scaled * scaled : scaled * prepared_.scale) / 2;
  }

  const Prepared<float>& prepared_;
  const Measure& measure_;
  const double* const floors_;
};

}  // namespace tripletops
