// How a batch lies in space, from a look at every row: where its middle is, how far it spreads, and whether
// there are outliers. Products are taken of rows that are centred and scaled by what is found here.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "ordered.h"

namespace tripletops {

constexpr int kShrinkBits = 20;  // keep a task's sum of the largest deviations finite
constexpr double kShrink = 1.0 / (1 << kShrinkBits);
constexpr int kSampled = 9;  // rows that the origin of the survey is made of

// How far rows lie from the origin of the survey, as exponents of two: the largest, and the median, which is
// the least where most rows are the origin itself.
struct Extent {
  int largest = 0, median = 0;

  // An outlier's exponent is larger than the median's by more than this.
  static constexpr int kOrdinary = 5;
  bool has_outliers() const { return largest - median > kOrdinary; }
};

// `exponents` are those of the rows that are not the origin.
inline Extent extent_of(std::vector<int>& exponents, int64_t rows) {
  if (exponents.empty()) return {};
  const int largest = *std::max_element(exponents.begin(), exponents.end());
  const int64_t equal = rows - int64_t(exponents.size());
  const int64_t middle = std::max<int64_t>((rows - 1) / 2 - equal, 0);
  int64_t smaller = 0;
  for (const int exponent : exponents) smaller += exponent < largest - Extent::kOrdinary;
  if (smaller <= middle) return {largest, largest};  // as nearly always, and near enough
  std::nth_element(exponents.begin(), exponents.begin() + middle, exponents.end());
  return {largest, exponents[size_t(middle)]};
}

// As std::ilogb, which is too slow for every row of a small batch; `value` > 0.
template <class T>
int exponent_of(T value) {
  if (!std::isnormal(value)) return std::ilogb(value);
  constexpr int digits = std::numeric_limits<T>::digits - 1;
  std::conditional_t<sizeof(T) == sizeof(float), uint32_t, uint64_t> bits;
  std::memcpy(&bits, &value, sizeof bits);
  return int(bits >> digits) - (std::numeric_limits<T>::max_exponent - 1);
}

// The median of `count` rows, coordinate by coordinate; eight at a time, without a branch, so that the
// compiler finds vectors in it.
template <int count, class T>
void median_of(const T* const* rows, int64_t width, T* median) {
  constexpr int together = 8;
  for (int64_t begin = 0; begin < width; begin += together) {
    const int64_t size = std::min<int64_t>(together, width - begin);
    T values[count][together] = {};
    for (int i = 0; i < count; ++i)
      if (size == together)
        std::memcpy(values[i], rows[i] + begin, sizeof values[i]);  // of a known size: not a call
      else
        std::copy(rows[i] + begin, rows[i] + begin + size, values[i]);
    for (int last = count - 1; last >= count / 2; --last)  // bubbles up the largest one, then the next
      for (int i = 0; i < last; ++i)
        for (int d = 0; d < together; ++d) {
          const T low = std::min(values[i][d], values[i + 1][d]);
          const T high = std::max(values[i][d], values[i + 1][d]);
          values[i][d] = low, values[i + 1][d] = high;
        }
    std::copy(values[count / 2], values[count / 2] + size, median + begin);
  }
}

// As std::round, which is a call for every element, of values within an int32.
inline double nearest_whole(double value) { return double(int32_t(value + std::copysign(0.5, value))); }

// The same of 1, 3, 5, 7 or kSampled rows.
template <class V>
const V* median_row(const std::vector<const V*>& sample, int64_t width, V* median) {
  switch (sample.size()) {
    case 1:
      return sample[0];
    case 3:
      median_of<3>(sample.data(), width, median);
      break;
    case 5:
      median_of<5>(sample.data(), width, median);
      break;
    case 7:
      median_of<7>(sample.data(), width, median);
      break;
    default:
      median_of<kSampled>(sample.data(), width, median);
  }
  return median;
}

template <class T>
class Survey {
 public:
  // With `units` (by row of candidates and of anchors; null: none) the rows are normalised first.
  Survey(Ordered<T>& rows, Normaliser* candidate_units, Normaliser* anchor_units)
      : rows_(rows), candidate_units_(candidate_units), anchor_units_(anchor_units) {}

  // Reads every row that is not ignored, once. False where one holds a non-finite element.
  bool look() {
    const int64_t count = row_count();
    sums_ = rows_.scratch.filled(rows_.width, 0.0);
    exponents_.reserve(size_t(count));
    sample_ = sample_rows(count);
    origin_ = candidate_units_ ? rows_.zeros() : median_row(sample_, rows_.width, take<T>());
    unit_origin_ = candidate_units_ ? median_unit() : nullptr;
    const Batch& batch = rows_.batch;
    return look_at(batch.candidates, rows_.classes.candidates, candidate_units_) &&
           (batch.self_mining || look_at(batch.anchors, rows_.classes.anchors, anchor_units_));
  }

  int64_t row_count() const {
    return rows_.classes.candidates.count + (rows_.batch.self_mining ? 0 : rows_.classes.anchors.count);
  }

  Frame<T> unit_frame() {
    double* centre = take<double>();
    for (int64_t d = 0; d < rows_.width; ++d)
      centre[d] = unit_origin_[d] + sums_[d] / double(row_count()) / kShrink;
    return {rows_.zeros(), 1, centre};
  }

  // The centre lies a whole number of sixteenths of the spread away from the origin: data on a grid stays on
  // one, and its ties stay ties. Outliers move the mean away from all other rows; then the centre is the
  // origin, or 0 where that is nearer to most rows. And the scale lies in the middle between the two, so
  // that the squares of neither leave the exponents of T, unless outliers are more than 2^100 (float) or
  // 2^800 (double) times as far away as most rows.
  Frame<T> grid_frame() {
    const Extent extent = extent_of(exponents_, row_count());
    constexpr int limit = std::numeric_limits<T>::max_exponent - 2;
    constexpr int room = sizeof(T) == sizeof(float) ? 50 : 400;
    outliers_ = extent.has_outliers();
    const int middle = extent.largest - std::min((extent.largest - extent.median) / 2, room);
    const double scale = std::ldexp(1.0, -std::clamp(outliers_ ? middle : extent.largest, -limit, limit));
    if (outliers_ && lies_around_zero(extent)) return {rows_.zeros(), T(scale), nullptr};
    T* centre = take<T>();
    for (int64_t d = 0; d < rows_.width; ++d) {
      const double away = outliers_ ? 0 : sums_[d] / double(row_count()) * scale / kShrink;
      centre[d] = T(double(origin_[d]) * scale + nearest_whole(away * 16) / 16);
    }
    return {centre, T(scale), nullptr};
  }

  bool outliers() const { return outliers_; }

 private:
  template <class V>
  V* take() {
    return rows_.scratch.template take<V>(rows_.width);
  }

  // Up to nine rows, an odd number of them, evenly spread over both sides. Their median lies among most rows,
  // wherever a few others are, and on the grid that rows may lie on.
  std::vector<const T*> sample_rows(int64_t rows) {
    const int64_t count = std::min<int64_t>(kSampled, (rows - 1) | 1);
    const Classes& classes = rows_.classes;
    std::vector<const T*> sample;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t position = count > 1 ? i * (rows - 1) / (count - 1) : 0;
      const int64_t behind = position - classes.candidates.count;
      const bool is_candidate = behind < 0;
      sample.push_back(rows_.functions.rows.load(
          is_candidate ? rows_.batch.candidates : rows_.batch.anchors,
          is_candidate ? classes.candidates.index[position] : classes.anchors.index[behind], take<T>()));
    }
    return sample;
  }

  const double* median_unit() {
    std::vector<const double*> units;
    for (const T* row : sample_) {
      const Normaliser unit = rows_.functions.rows.normalise(row, rows_.width);
      double* values = take<double>();
      for (int64_t d = 0; d < rows_.width; ++d) values[d] = double(row[d]) * unit.scale / unit.norm;
      units.push_back(values);
    }
    return median_row(units, rows_.width, take<double>());
  }

  // Whether most rows lie clearly nearer to 0 than to the origin.
  bool lies_around_zero(Extent extent) const {
    std::vector<T> sizes;
    for (const T* row : sample_) {
      T size = 0;
      for (int64_t d = 0; d < rows_.width; ++d) size = std::max(size, std::abs(row[d]));
      sizes.push_back(size);
    }
    std::sort(sizes.begin(), sizes.end());
    const T median = sizes[sizes.size() / 2];
    return median == 0 || std::ilogb(median) < extent.median;
  }

  // Adds the deviations from the origin, times kShrink, to the sums, and the exponents of the largest one of
  // each row to the exponents, but for rows that are the origin, and for unit rows. Deviations whose sums
  // overflow are looked at again, shrunk.
  bool look_at(const Matrix& matrix, const Order& order, Normaliser* units) {
    const RowFunctions<T>& functions = rows_.functions.rows;
    const int64_t width = rows_.width, chunks = (order.count + kRowsPerTask - 1) / kRowsPerTask;
    // By chunk of rows: the sums, and what they were multiplied by.
    T* partial = rows_.scratch.template take<T>(chunks * (width + 1));
    T* largest = rows_.scratch.template take<T>(order.count);
    std::atomic<bool> finite{true};
    for_each_range(rows_.pool, order.count, kRowsPerTask, [&](int64_t begin, int64_t end, int worker) {
      T* sum = partial + begin / kRowsPerTask * (width + 1);
      const auto survey = [&](T shrink) {
        std::fill(sum, sum + width, T(0));
        sum[width] = shrink;
        functions.survey(matrix, order.index, int32_t(begin), int32_t(end), origin_, shrink, units,
                         unit_origin_, sum, largest + begin, rows_.buffers[worker]);
      };
      survey(1);
      if (functions.all_finite(sum, width)) return;
      for (int64_t i = begin; i < end; ++i)
        if (!functions.all_finite(functions.load(matrix, order.index[i], rows_.buffers[worker]), width))
          finite = false;
      survey(T(kShrink));
    });
    if (!finite) return false;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const T* sum = partial + chunk * (width + 1);
      const bool shrunk = sum[width] != 1;
      for (int64_t d = 0; d < width; ++d) sums_[d] += double(sum[d]) * (shrunk ? 1 : kShrink);
      if (units) continue;
      const int64_t end = std::min<int64_t>((chunk + 1) * kRowsPerTask, order.count);
      for (int64_t i = chunk * kRowsPerTask; i < end; ++i)
        if (largest[i] > 0) exponents_.push_back(exponent_of(largest[i]) + (shrunk ? kShrinkBits : 0));
    }
    return true;
  }

  Ordered<T>& rows_;
  Normaliser *const candidate_units_, *const anchor_units_;
  std::vector<const T*> sample_;
  const T* origin_ = nullptr;
  const double* unit_origin_ = nullptr;
  double* sums_ = nullptr;  // of the deviations from the origin, times kShrink
  std::vector<int> exponents_;
  bool outliers_ = false;
};

}  // namespace tripletops
