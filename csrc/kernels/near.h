// Pairs of a block that lie too close for products: they are measured, and pull, by the differences of their
// rows in double. Rows are unpacked once for a block, and a row meets several others at a time.
#pragma once

#include <cmath>

#include "prepared.h"

namespace tripletops {

template <class T>
class NearPairs {
 public:
  Near list;

  explicit NearPairs(Prepared<T>& prepared)
      : prepared_(prepared),
        rows_(prepared.rows),
        distance_(prepared.distance),
        width_(prepared.rows.width),
        stride_((width_ + 15) / 16 * 16 + 8),  // not a power of two, which would crowd the cache
        buffer_(take<T>(2 * width_)),
        factors_(take<double>(kEntries)),
        sorted_factors_(take<double>(kEntries)),
        others_(take<int32_t>(kEntries)) {
    list.entries = take<int32_t>(kEntries);
    anchors_.rows = take<double>(std::min(kBlockRows, rows_.anchors()) * stride_);
    candidates_.rows = take<double>(std::min(kBlockRows, rows_.classes.candidates.count) * stride_);
  }

  // Writes the distances of the listed pairs into the block. They are those of Prepared::measured, bit for
  // bit.
  void measure(int32_t row, int32_t column, T* distances) {
    if (list.count == 0) return;
    anchors_.begin = row, candidates_.begin = column;
    std::fill_n(anchors_.known, kBlockRows, false);
    std::fill_n(candidates_.known, kBlockRows, false);
    constexpr int32_t together = 32;
    const double* others[together];
    double squares[together];
    for (int32_t first = 0, next; first < list.count; first = next) {
      const int32_t r = list.entries[first] / kBlockRows;
      const double* x = anchor(r);
      for (next = first; next < list.count && next - first < together; ++next) {
        if (list.entries[next] / kBlockRows != r) break;
        others[next - first] = candidate(list.entries[next] % kBlockRows);
      }
      rows_.functions.rows.squares(x, others, next - first, width_, squares);
      for (int32_t i = first; i < next; ++i)
        distances[list.entries[i]] = to_distance(list.entries[i], squares[i - first]);
    }
  }

  // Pulls at both rows of the listed pairs, which have been measured. `weights` is in the order of the list;
  // rows of sums lie `stride` apart, from those of the block on.
  void pull(const T* distances, const T* weights, T* anchor_sums, T* candidate_sums, int64_t stride) {
    int32_t kept = 0;
    for (int32_t n = 0; n < list.count; ++n) {
      const int32_t at = list.entries[n];
      const double apart = double(distances[at]), weight = double(weights[n]);
      if (weight == 0 || pulls_nothing(at, apart)) continue;
      const double factor = distance_ == Distance::euclidean     ? weight / apart
                            : distance_ == Distance::sqeuclidean ? weight * prepared_.scale
                                                                 : weight;
      // The factor may leave its type where the product does not, and the difference may overflow.
      const bool ordinary = std::abs(factor) > 0x1p-100 && std::abs(factor) < 0x1p100;
      if (!ordinary || apart >= double(std::numeric_limits<T>::max())) {
        pull_one(at, apart, weight, anchor_sums + at / kBlockRows * stride,
                 candidate_sums + at % kBlockRows * stride);
        continue;
      }
      factors_[kept] = -factor;
      list.entries[kept++] = at;
    }
    list.count = kept;
    if (kept == 0) return;
    pull_side<kBlockRows, 1>(anchors_, candidates_, anchor_sums, stride);
    pull_side<1, kBlockRows>(candidates_, anchors_, candidate_sums, stride);
  }

 private:
  static constexpr int64_t kEntries = kBlockRows * kBlockRows;

  // The rows of one side of the block, as far as they are known: under cosine the unit rows.
  struct BlockSide {
    int32_t begin = 0;
    bool known[kBlockRows], is_zero[kBlockRows];
    double* rows = nullptr;
  };

  template <class V>
  V* take(int64_t count) {
    return rows_.scratch.template take<V>(count);
  }

  const double* unpacked(BlockSide& side, int32_t number, const Matrix& matrix, const Order& order,
                         const Normaliser* units) {
    double* to = side.rows + number * stride_;
    if (side.known[number]) return to;
    side.known[number] = true;
    const int32_t row = order.index[side.begin + number];
    side.is_zero[number] = units && width_ > 0 && std::isinf(units[row].norm);
    const RowFunctions<T>& functions = rows_.functions.rows;
    functions.unpack(functions.load(matrix, row, buffer_), units ? units + row : nullptr, width_, to);
    return to;
  }

  const double* anchor(int32_t r) {
    return unpacked(anchors_, r, rows_.batch.anchors, rows_.classes.anchors, prepared_.anchor_units);
  }
  const double* candidate(int32_t c) {
    return unpacked(candidates_, c, rows_.batch.candidates, rows_.classes.candidates,
                    prepared_.candidate_units);
  }

  int32_t anchor_row(int32_t entry) const { return rows_.row_of(anchors_.begin + entry / kBlockRows); }
  int32_t candidate_row(int32_t entry) const {
    return rows_.classes.candidates.index[candidates_.begin + entry % kBlockRows];
  }

  bool are_equal(int32_t entry) const {
    return std::memcmp(anchors_.rows + entry / kBlockRows * stride_,
                       candidates_.rows + entry % kBlockRows * stride_, size_t(width_) * sizeof(double)) == 0;
  }

  bool has_zero_row(int32_t entry) const {
    return anchors_.is_zero[entry / kBlockRows] || candidates_.is_zero[entry % kBlockRows];
  }

  T to_distance(int32_t entry, double square) {
    if (has_zero_row(entry)) return 1;
    if (distance_ == Distance::cosine) return T(0.5 * square);
    const bool safe = sizeof(T) == sizeof(float) || (square > 0x1p-900 && square < 0x1p900);
    if (!safe && are_equal(entry)) return 0;
    if (!safe) return T(prepared_.measured(anchor_row(entry), candidate_row(entry), buffer_));
    const double value = distance_ == Distance::euclidean ? std::sqrt(square) : square;
    return T(std::min(value, double(std::numeric_limits<T>::max())));
  }

  bool pulls_nothing(int32_t entry, double apart) const {
    if (has_zero_row(entry)) return true;
    return apart == 0 && (distance_ == Distance::euclidean || are_equal(entry));
  }

  // Pulls at the rows of `side`. An entry is the sum of own number * own_step and other number * other_step.
  template <int32_t own_step, int32_t other_step>
  void pull_side(const BlockSide& side, const BlockSide& other, T* sums, int64_t stride) {
    const auto own_of = [&](int32_t entry) { return entry / own_step % kBlockRows; };
    int32_t begin[kBlockRows + 1] = {}, next[kBlockRows];
    for (int32_t n = 0; n < list.count; ++n) ++begin[own_of(list.entries[n]) + 1];
    for (int32_t i = 0; i < kBlockRows; ++i) begin[i + 1] += begin[i];
    std::copy_n(begin, kBlockRows, next);
    for (int32_t n = 0; n < list.count; ++n) {
      const int32_t entry = list.entries[n], at = next[own_of(entry)]++;
      others_[at] = entry / other_step % kBlockRows;
      sorted_factors_[at] = factors_[n];
    }
    for (int64_t d = 0; d < width_; d += kPulledTogether)
      for (int32_t i = 0; i < kBlockRows; ++i) {
        if (begin[i] == begin[i + 1]) continue;
        rows_.functions.rows.pull_all(side.rows + i * stride_ + d, other.rows + d, stride_,
                                      others_ + begin[i], sorted_factors_ + begin[i], begin[i + 1] - begin[i],
                                      std::min(kPulledTogether, width_ - d), sums + i * stride + d);
      }
  }

  // The same of a single pair of any size.
  void pull_one(int32_t entry, double apart, double weight, T* anchor_sums, T* candidate_sums) {
    const RowFunctions<T>& functions = rows_.functions.rows;
    const int32_t anchor_index = anchor_row(entry), candidate_index = candidate_row(entry);
    const T* x = functions.load(rows_.batch.anchors, anchor_index, buffer_);
    const T* y = functions.load(rows_.batch.candidates, candidate_index, buffer_ + width_);
    if (distance_ == Distance::euclidean) {
      functions.pull({x, y, {}, {}}, width_, distance_, apart, -weight, anchor_sums);
      functions.pull({x, y, {}, {}}, width_, distance_, apart, weight, candidate_sums);
      return;
    }
    const bool cosine = distance_ == Distance::cosine;
    const Normaliser u = cosine ? prepared_.anchor_units[anchor_index] : Normaliser{prepared_.scale, 1};
    const Normaliser v = cosine ? prepared_.candidate_units[candidate_index] : Normaliser{prepared_.scale, 1};
    for (int64_t d = 0; d < width_; ++d) {
      const T pull = T(weight * (double(x[d]) * u.scale / u.norm - double(y[d]) * v.scale / v.norm));
      anchor_sums[d] -= pull;
      candidate_sums[d] += pull;
    }
  }

  Prepared<T>& prepared_;
  Ordered<T>& rows_;
  const Distance distance_;
  const int64_t width_, stride_;
  BlockSide anchors_, candidates_;
  T* const buffer_;  // two rows
  double *const factors_, *const sorted_factors_;
  int32_t* const others_;
};

}  // namespace tripletops
