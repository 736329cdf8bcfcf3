// Sums over all pairs of a threshold t and a distance d of softplus(t - d), and of its derivatives, without
// going through the pairs. As functions of d the sums over t are smooth: nothing in them is nearer than pi to
// the real line that is not analytic. So the distances are put into cells of width 1, and in each cell the
// polynomial through kNodes Chebyshev nodes stands for the function. Its relative error is below 7e-9
// (docs/numerics.md), a tenth of the rounding of a float32. What meets a threshold is then the nodes, not the
// distances, whose number does not matter.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace tripletops {

class SmoothSums {
 public:
  explicit SmoothSums(int64_t most_thresholds) {
    raised_.reserve(size_t(most_thresholds));
    // The polynomial's coefficients: by Chebyshev polynomials first, which are then written out in powers.
    double chebyshev[kNodes][kNodes] = {};
    chebyshev[0][0] = chebyshev[1][1] = 1;
    for (int m = 2; m < kNodes; ++m)
      for (int k = 0; k < kNodes; ++k)
        chebyshev[m][k] = 2 * (k > 0 ? chebyshev[m - 1][k - 1] : 0) - chebyshev[m - 2][k];
    for (int j = 0; j < kNodes; ++j) {
      const double angle = (2 * j + 1) * std::acos(-1.0) / (2 * kNodes);
      offset_[j] = (1 + std::cos(angle)) / 2;
      for (int k = 0; k < kNodes; ++k) {
        power_of_node_[k][j] = 0;
        for (int m = 0; m < kNodes; ++m)
          power_of_node_[k][j] += (m ? 2.0 : 1.0) / kNodes * std::cos(m * angle) * chebyshev[m][k];
      }
    }
  }

  // Takes the thresholds and the finite ones of the distances; false where they lie too far apart for it to
  // pay, or for their exponentials.
  template <class T>
  bool take(const T* thresholds, int64_t count, const T* distances, int64_t columns) {
    if (sizeof(T) != sizeof(float) || count < kFewest) return false;
    T least = std::numeric_limits<T>::infinity(), most = 0;
    for (int64_t c = 0; c < columns; ++c) {
      const T d = distances[c];
      least = std::min(least, d);
      most = std::max(most, d < std::numeric_limits<T>::infinity() ? d : T(0));
    }
    if (!(least <= most && double(most) - double(least) < kMostCells)) return false;
    begin_ = double(least);
    cells_ = int32_t(double(most) - begin_) + 1;
    if (cells_ * kNodes * kWorthOfNode > columns) return false;
    raised_.resize(size_t(count));
    for (int64_t k = 0; k < count; ++k) {
      const double above = double(thresholds[k]) - begin_;
      if (std::abs(above) > kReach) return false;
      raised_[size_t(k)] = std::exp(above);
    }
    gather(distances, columns);
    return true;
  }

  // The sum over all pairs.
  double sum() const {
    double sum = 0;
    for (int32_t x = 0; x < cells_ * kNodes; ++x) {
      double whole = 0, excess = 0;  // the product of some factors 1 + e^(t - x), less 1
      for (const double raised : raised_) {
        const double e = raised * lowered_[x];
        excess = excess * e + (excess + e);
        if (excess > 0x1p400) whole += std::log1p(excess), excess = 0;
      }
      sum += share_[x] * (whole + std::log1p(excess));
    }
    return sum;
  }

  // The derivatives by the thresholds; and by the distances, negated and times `weight`, in their place.
  template <class T>
  void differentiate(double* slopes, T weight, T* distances, int64_t columns) {
    double node[kMostCells * kNodes] = {}, power[kMostCells][kNodes];
    for (size_t k = 0; k < raised_.size(); ++k) {
      double slope = 0;
      for (int32_t x = 0; x < cells_ * kNodes; ++x) {
        const double e = raised_[k] * lowered_[x], one = e / (1 + e);
        node[x] += one;
        slope += share_[x] * one;
      }
      slopes[k] = slope;
    }
    for (int32_t cell = 0; cell < cells_; ++cell)
      for (int k = 0; k < kNodes; ++k) {
        power[cell][k] = 0;
        for (int j = 0; j < kNodes; ++j) power[cell][k] += power_of_node_[k][j] * node[cell * kNodes + j];
      }
    for (int64_t c = 0; c < columns; ++c) {
      if (distances[c] == std::numeric_limits<T>::infinity()) {
        distances[c] = 0;
        continue;
      }
      const Place at = place(double(distances[c]));
      double value = 0;
      for (int k = kNodes; k-- > 0;) value = value * at.along + power[at.cell][k];
      distances[c] = T(-value * double(weight));
    }
  }

 private:
  static constexpr int kNodes = 8;
  static constexpr int32_t kMostCells = 64;
  static constexpr int64_t kFewest = 16;      // thresholds
  static constexpr int32_t kWorthOfNode = 4;  // distances, in time
  static constexpr double kReach = 200;       // products of two exponentials stay finite, and are not 0

  struct Place {
    int32_t cell;
    double along;  // -1 to 1
  };

  Place place(double distance) const {
    const double away = distance - begin_;
    const int32_t cell = int32_t(away);
    return {cell, 2 * (away - cell) - 1};
  }

  // How much of the distances each node stands for.
  template <class T>
  void gather(const T* distances, int64_t columns) {
    double moments[kMostCells][kNodes] = {};
    for (int64_t c = 0; c < columns; ++c) {
      if (distances[c] == std::numeric_limits<T>::infinity()) continue;
      const Place at = place(double(distances[c]));
      double power = 1;
      for (int k = 0; k < kNodes; ++k, power *= at.along) moments[at.cell][k] += power;
    }
    for (int32_t x = 0; x < cells_ * kNodes; ++x) {
      const int32_t cell = x / kNodes, j = x % kNodes;
      share_[x] = 0;
      for (int k = 0; k < kNodes; ++k) share_[x] += power_of_node_[k][j] * moments[cell][k];
      lowered_[x] = std::exp(-(cell + offset_[j]));
    }
  }

  double offset_[kNodes], power_of_node_[kNodes][kNodes];
  double begin_ = 0;
  int32_t cells_ = 0;
  std::vector<double> raised_;                                        // e^(t - begin) by threshold
  double lowered_[kMostCells * kNodes], share_[kMostCells * kNodes];  // by node x: e^(begin - x)
};

}  // namespace tripletops
