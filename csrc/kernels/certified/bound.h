// How far a half squared distance out of products of quantised rows may lie from the exact one: a part for
// the anchor and a part for the candidate, so that a comparison takes one number of each. The names and the
// proof are those of docs/certified.md.
#pragma once

#include <cmath>

#include "measure.h"

namespace tripletops {

// What is known of a quantised row.
struct RowSize {
  double norm, residual, half_norm;
};

inline RowSize size_of(const Quantised& rows, int32_t position) {
  return {double(rows.norm[position]), double(rows.residual[position]), double(rows.half_norm[position])};
}

struct Bound {
  double a = 0;  // the cosine of an anchor and its pick, or 0
  double norm_cap = 0, norm_floor = 0, norm_most = 0;
  double residual_cap = 0, residual_most = 0;
  double reach = 0, reach_most = 0, extra_most = 0;
  double rounding = 0;  // of a sum over the width in float

  explicit Bound(int64_t width) : rounding((double(width) / 16 + 32) * kUnit) {}

  static double positive(double value) { return value > 0 ? value : 0; }
  double lower(double norm) const { return norm * (1 - 2 * rounding); }

  // |z_i - a z_j| at most, of a candidate at most y away whose norm is not below the floor.
  double reach_of(double norm, double y) const {
    const double square = (1 - a) * (norm * norm - a * norm_floor * norm_floor) + 2 * a * y;
    return std::sqrt(positive(square)) * (1 + 1e-9);
  }
  // |z_j - a z_i| at most, of one whose norm is not above the cap.
  double reach_to(double norm, double y) const {
    const double low = lower(norm);
    return std::sqrt(positive((1 - a) * (norm_cap * norm_cap - a * low * low) + 2 * a * y)) * (1 + 1e-9);
  }
  // What a norm above the cap adds to the latter.
  double extra(double norm) const {
    if (norm <= norm_cap) return 0;
    return a == 0 ? norm - norm_cap : std::sqrt((1 - a) * (norm * norm - norm_cap * norm_cap));
  }
  // What one below the floor adds to the former.
  double lack(double norm) const {
    const double low = lower(norm);
    return low >= norm_floor ? 0 : std::sqrt(a * (1 - a) * (norm_floor * norm_floor - low * low));
  }
  // How far roundings of float may move the comparison.
  double rounded(const RowSize& row) const {
    const double whole = row.norm + row.residual;
    return 2 * rounding * (whole * whole / 2 + row.half_norm) + kTiny;
  }
  // The row's part in the error as a candidate.
  double allowance(const RowSize& row) const {
    const double part = row.residual * (reach + lack(row.norm)) + residual_cap * extra(row.norm) +
                        positive(row.residual - residual_cap) * (reach_most - reach);
    return part * (1 + 1e-5) + rounded(row);
  }
  // Its part as an anchor, of candidates at most y away.
  double doubt(const RowSize& row, double y) const {
    const double of = reach_of(row.norm, y) + row.residual;
    const double part = row.residual * reach_to(row.norm, y) +
                        positive(row.residual - residual_cap) * extra_most +
                        residual_cap * positive(of - reach) + residual_most * positive(of - reach_most);
    return part * (1 + 1e-5) + rounded(row);
  }
  // What no distance from the row exceeds.
  double farthest(const RowSize& row) const {
    const double most = row.norm + norm_most;
    return most * most / 2 + 1;
  }
};

}  // namespace tripletops
