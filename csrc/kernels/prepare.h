// What every objective begins with: rows ordered by class, surveyed, centred, scaled and packed.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "blocks.h"
#include "classes.h"
#include "mining.h"
#include "parallel.h"
#include "scratch.h"

namespace tripletops {

constexpr int32_t kPadding = 128;  // at least a tile's rows, a panel's columns and a block's rows
constexpr int kShrinkBits = 20;    // keep a task's sum of the largest deviations finite
constexpr double kShrink = 1.0 / (1 << kShrinkBits);
constexpr double kSerialBelow = 3e6;  // multiply-adds that are done before a second thread would have woken

// How far rows lie from the origin of the survey, as exponents of two: the largest, and the median, which is
// the least where most rows are the origin itself.
struct Extent {
  int largest = 0, median = 0;
};

// A row whose exponent is larger than the median's by more than this is an outlier.
constexpr int kOrdinary = 5;

// As std::ilogb, which is too slow for every row of a small batch; `value` > 0.
template <class T>
int exponent_of(T value) {
  if (!std::isnormal(value)) return std::ilogb(value);
  constexpr int digits = std::numeric_limits<T>::digits - 1;
  std::conditional_t<sizeof(T) == sizeof(float), uint32_t, uint64_t> bits;
  std::memcpy(&bits, &value, sizeof bits);
  return int(bits >> digits) - (std::numeric_limits<T>::max_exponent - 1);
}

constexpr int kSampled = 9;  // rows that the origin of the survey is made of

// The median of `count` rows, coordinate by coordinate; eight at a time, without a branch, so that the
// compiler finds vectors in it.
template <int count, class T>
void median_of(const T* const* rows, int64_t width, T* median) {
  constexpr int together = 8;
  for (int64_t begin = 0; begin < width; begin += together) {
    const int64_t size = std::min<int64_t>(together, width - begin);
    T values[count][together] = {};
    for (int i = 0; i < count; ++i) std::copy(rows[i] + begin, rows[i] + begin + size, values[i]);
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

// Entries of a block.
struct Near {
  int32_t* entries = nullptr;
  int32_t count = 0;
};

template <class T>
struct Prepared {
  const Kernels<T>& kernels;
  Pool pool;
  const Batch& batch;
  const Distance distance;

  Scratch scratch;
  int64_t width = 0;
  Classes classes;
  std::vector<T*> buffers;                                         // one per worker
  Normaliser *anchor_units = nullptr, *candidate_units = nullptr;  // by row; cosine only
  double scale = 1;  // a power of two near 1 / the spread of the rows; between them and outliers, if any
  Frame<T> frame;
  Walk<T> walk;

  Prepared(const Kernels<T>& kernels, const Pool& pool, const Batch& batch, Distance distance)
      : kernels(kernels), pool(pool), batch(batch), distance(distance), width(batch.anchors.width) {
    const double pairs = double(batch.anchors.count) * double(batch.candidates.count);
    if (pairs * double(width + 8) * (batch.self_mining ? 0.5 : 1) < kSerialBelow) this->pool.threads = 1;
    classes = order_by_class(batch, kPadding, scratch);
    for (int worker = 0; worker < this->pool.threads; ++worker)
      buffers.push_back(scratch.template take<T>(kBufferRows * width + kPadding));
  }

  // Adds the deviations from `origin`, times kShrink, to `sums`, and the exponents of the largest one of each
  // row to `exponents`, but for rows that are the origin, and for unit rows. False on a non-finite element.
  // Deviations whose sums overflow are surveyed again, shrunk.
  bool survey_side(const Rows& rows, const Order& order, const T* origin, Normaliser* units,
                   const double* unit_origin, double* sums, std::vector<int>* exponents) {
    const int64_t chunks = (order.count + kRowsPerTask - 1) / kRowsPerTask;
    T* partial = scratch.template take<T>(chunks * (width + 1));  // sums, and what they were multiplied by
    T* largest = scratch.template take<T>(order.count);
    std::atomic<bool> finite{true};
    for_each_range(pool, order.count, kRowsPerTask, [&](int64_t begin, int64_t end, int worker) {
      T* sum = partial + begin / kRowsPerTask * (width + 1);
      const auto survey = [&](T shrink) {
        std::fill(sum, sum + width, T(0));
        sum[width] = shrink;
        kernels.survey(rows, order.index, int32_t(begin), int32_t(end), origin, shrink, units, unit_origin,
                       sum, largest + begin, buffers[worker]);
      };
      survey(1);
      if (kernels.all_finite(sum, width)) return;
      for (int64_t i = begin; i < end; ++i)
        if (!kernels.all_finite(kernels.load(rows, order.index[i], buffers[worker]), width)) finite = false;
      survey(T(kShrink));
    });
    if (!finite) return false;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const T* sum = partial + chunk * (width + 1);
      const bool shrunk = sum[width] != 1;
      for (int64_t d = 0; d < width; ++d) sums[d] += double(sum[d]) * (shrunk ? 1 : kShrink);
      if (units) continue;
      const int64_t end = std::min<int64_t>((chunk + 1) * kRowsPerTask, order.count);
      for (int64_t i = chunk * kRowsPerTask; i < end; ++i)
        if (largest[i] > 0) exponents->push_back(exponent_of(largest[i]) + (shrunk ? kShrinkBits : 0));
    }
    return true;
  }

  // `exponents` are those of the rows that are not the origin.
  static Extent extent_of(std::vector<int>& exponents, int64_t rows) {
    if (exponents.empty()) return {};
    const int largest = *std::max_element(exponents.begin(), exponents.end());
    const int64_t equal = rows - int64_t(exponents.size());
    const int64_t middle = std::max<int64_t>((rows - 1) / 2 - equal, 0);
    int64_t smaller = 0;
    for (const int exponent : exponents) smaller += exponent < largest - kOrdinary;
    if (smaller <= middle) return {largest, largest};  // as nearly always, and near enough
    std::nth_element(exponents.begin(), exponents.begin() + middle, exponents.end());
    return {largest, exponents[size_t(middle)]};
  }

  static int32_t panels_of(const Side<T>& side) { return (side.count + side.lanes - 1) / side.lanes; }

  Panels<T> room_for(int64_t panels, int lanes) {
    return {scratch.template take<T>(panels * lanes * width), scratch.template take<T>(panels * lanes),
            scratch.template take<int32_t>(panels)};
  }

  Panels<T> from_panel(const Panels<T>& panels, int64_t panel, int lanes) const {
    return {panels.packed + panel * lanes * width, panels.half_norms + panel * lanes, panels.first + panel};
  }

  void pack_side(const Rows& rows, const Normaliser* units, Side<T>& side) {
    const int32_t panels = panels_of(side);
    side.panels = room_for(panels, side.lanes);
    for_each_range(pool, panels, kRowsPerTask / side.lanes, [&](int64_t begin, int64_t end, int worker) {
      for (int64_t panel = begin; panel < end; ++panel)
        kernels.pack(rows, frame, units, side, int32_t(panel), from_panel(side.panels, panel, side.lanes),
                     buffers[worker]);
    });
  }

  const T* zeros() { return scratch.filled(width, T(0)); }

  // Up to nine rows, an odd number of them, evenly spread over both sides.
  std::vector<const T*> sample_rows(int64_t rows) {
    const int64_t count = std::min<int64_t>(kSampled, (rows - 1) | 1);
    std::vector<const T*> sample;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t position = count > 1 ? i * (rows - 1) / (count - 1) : 0;
      const int64_t behind = position - classes.candidates.count;
      const bool is_candidate = behind < 0;
      sample.push_back(
          kernels.load(is_candidate ? batch.candidates : batch.anchors,
                       is_candidate ? classes.candidates.index[position] : classes.anchors.index[behind],
                       scratch.template take<T>(width)));
    }
    return sample;
  }

  // The median of the sample, coordinate by coordinate: it lies among most rows, wherever a few others are,
  // and on the grid that rows may lie on.
  template <class V>
  const V* median_row(const std::vector<const V*>& sample) {
    V* median = scratch.template take<V>(width);
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

  // The same of the unit rows.
  const double* median_unit(const std::vector<const T*>& sample) {
    std::vector<const double*> units;
    for (const T* row : sample) {
      const Normaliser unit = kernels.normalise(row, width);
      double* values = scratch.template take<double>(width);
      for (int64_t d = 0; d < width; ++d) values[d] = double(row[d]) * unit.scale / unit.norm;
      units.push_back(values);
    }
    return median_row(units);
  }

  // Whether most rows lie clearly nearer to 0 than to the origin.
  bool lies_around_zero(const std::vector<const T*>& sample, Extent extent) const {
    std::vector<T> sizes;
    for (const T* row : sample) {
      T size = 0;
      for (int64_t d = 0; d < width; ++d) size = std::max(size, std::abs(row[d]));
      sizes.push_back(size);
    }
    std::sort(sizes.begin(), sizes.end());
    const T median = sizes[sizes.size() / 2];
    return median == 0 || std::ilogb(median) < extent.median;
  }

  Frame<T> unit_frame(const double* sums, int64_t rows, const double* unit_origin) {
    double* centre = scratch.template take<double>(width);
    for (int64_t d = 0; d < width; ++d) centre[d] = unit_origin[d] + sums[d] / double(rows) / kShrink;
    return {zeros(), 1, centre};
  }

  // The centre lies a whole number of sixteenths of the spread away from the origin: data on a grid stays on
  // one, and its ties stay ties. Outliers move the mean away from all other rows; then the centre is the
  // origin, or 0 where that is nearer to most rows. And the scale lies in the middle between the two, so
  // that the squares of neither leave the exponents of T, unless outliers are more than 2^100 (float) or
  // 2^800 (double) times as far away as most rows.
  Frame<T> grid_frame(const double* sums, int64_t rows, const T* origin, const std::vector<const T*>& sample,
                      Extent extent) {
    constexpr int limit = std::numeric_limits<T>::max_exponent - 2;
    constexpr int room = sizeof(T) == sizeof(float) ? 50 : 400;
    const bool outliers = extent.largest - extent.median > kOrdinary;
    const int middle = extent.largest - std::min((extent.largest - extent.median) / 2, room);
    scale = std::ldexp(1.0, -std::clamp(outliers ? middle : extent.largest, -limit, limit));
    if (outliers) walk.tiny = T(sizeof(T) == sizeof(float) ? 0x1p-100 : 0x1p-900);
    if (outliers && lies_around_zero(sample, extent)) return {zeros(), T(scale), nullptr};
    T* centre = scratch.template take<T>(width);
    for (int64_t d = 0; d < width; ++d) {
      const double away = outliers ? 0 : sums[d] / double(rows) * scale / kShrink;
      centre[d] = T(double(origin[d]) * scale + std::round(away * 16) / 16);
    }
    return {centre, T(scale), nullptr};
  }

  // Reads every row that is not ignored, once; then packs both sides, centred on the mean of all of them.
  bool prepare(bool wants_products, bool all_panels = false) {
    const bool cosine = distance == Distance::cosine;
    double* sums = scratch.filled(width, 0.0);
    std::vector<int> exponents;
    if (cosine) {
      candidate_units = scratch.filled(batch.candidates.count, Normaliser{});
      anchor_units = batch.self_mining ? candidate_units : scratch.filled(batch.anchors.count, Normaliser{});
    }
    const int64_t rows = classes.candidates.count + (batch.self_mining ? 0 : classes.anchors.count);
    if (rows == 0) return true;
    exponents.reserve(size_t(rows));
    const std::vector<const T*> sample = sample_rows(rows);
    const T* origin = cosine ? zeros() : median_row(sample);
    const double* unit_origin = cosine ? median_unit(sample) : nullptr;
    if (!survey_side(batch.candidates, classes.candidates, origin, candidate_units, unit_origin, sums,
                     &exponents) ||
        (!batch.self_mining &&
         !survey_side(batch.anchors, classes.anchors, origin, anchor_units, unit_origin, sums, &exponents)))
      return false;

    walk.width = width;
    walk.symmetric = batch.self_mining;
    walk.candidate_begin = classes.candidates.begin;
    place_self();
    if (!wants_products) return true;
    frame = cosine ? unit_frame(sums, rows, unit_origin)
                   : grid_frame(sums, rows, origin, sample, extent_of(exponents, rows));
    const auto side = [](const Order& order, int lanes) {
      return Side<T>{order.count, lanes, order.index, order.group, {}};
    };
    walk.anchors = side(classes.anchors, kernels.tile_rows);
    walk.candidates = side(classes.candidates, kernels.panel_columns);
    pack_side(batch.anchors, anchor_units, walk.anchors);
    // Those of a symmetric product are used once for every block of anchors; others once, by whoever walks
    // them.
    if (walk.symmetric || all_panels) pack_side(batch.candidates, candidate_units, walk.candidates);
    return true;
  }

  // Row -> position; -1 where the row is ignored.
  const int32_t* positions(const Order& order, int64_t rows) {
    int32_t* position = scratch.filled(rows, int32_t(-1));
    for (int32_t i = 0; i < order.count; ++i) position[order.index[i]] = i;
    return position;
  }

  void place_self() {
    const Order &anchors = classes.anchors, &candidates = classes.candidates;
    const int32_t* position_of = batch.self_index ? positions(candidates, batch.candidates.count) : nullptr;
    int32_t* self = scratch.template take<int32_t>(anchors.count + kPadding);
    for (int32_t a = 0; a < anchors.count + kPadding; ++a) {
      self[a] = -1;
      if (a >= anchors.count) continue;
      if (batch.self_mining) {
        self[a] = a;
      } else if (batch.self_index) {
        const int64_t row = batch.self_index[anchors.index[a]];
        if (row >= 0 && row < batch.candidates.count) self[a] = position_of[row];
        if (self[a] >= 0 && candidates.group[self[a]] != anchors.group[a])
          walk.exclude_self_everywhere = true;
      }
    }
    walk.self_position = self;
  }

  Pair<T> pair(const T* x, const T* y, int64_t anchor, int64_t candidate) const {
    if (distance != Distance::cosine) return {x, y, {}, {}};
    return {x, y, anchor_units[anchor], candidate_units[candidate]};
  }

  // The nearest negative that is strictly farther than `floor` as distances are reported, from the rows
  // themselves.
  int32_t scan_rows(int32_t anchor, const T* x, T floor, T* row_buffer, T* found) const {
    const int32_t group = classes.anchors.group[anchor];
    int32_t best = kNobody;
    T nearest = std::numeric_limits<T>::infinity();
    for (int32_t c = 0; c < classes.candidates.count; ++c) {
      if (classes.candidates.group[c] == group || c == walk.self_position[anchor]) continue;
      const int32_t index = classes.candidates.index[c];
      const T* y = kernels.load(batch.candidates, index, row_buffer);
      const T d = T(kernels.measure(pair(x, y, classes.anchors.index[anchor], index), width, distance));
      if (d > floor) improve(d, index, &nearest, &best);
    }
    *found = nearest;
    return best;
  }

  // The distance of an anchor and a candidate, counted as the user counts rows, from the rows themselves.
  // `buffer` holds two rows.
  double measured(int32_t anchor, int32_t candidate, T* buffer) const {
    const T* x = kernels.load(batch.anchors, anchor, buffer);
    const T* y = kernels.load(batch.candidates, candidate, buffer + width);
    return kernels.measure(pair(x, y, anchor, candidate), width, distance);
  }

  // Blocks of kBlockRows x kBlockRows pairs; `row` and `column` are the positions they begin at.

  T* take_block() { return scratch.template take<T>(kBlockRows * kBlockRows); }

  static int32_t rows_in_block(int32_t begin, const Order& order) {
    return std::min(kBlockRows, order.count - begin);
  }

  // Whether the block also stands for its transpose, which is not visited.
  bool serves_both(int32_t row, int32_t column) const { return batch.self_mining && row != column; }

  template <class Visit>
  void visit_blocks(const Visit& visit) const {
    const auto blocks = [](const Order& order) { return (order.count + kBlockRows - 1) / kBlockRows; };
    const auto at = [&](int32_t anchor, int32_t candidate, int worker) {
      visit(anchor * kBlockRows, candidate * kBlockRows, worker);
    };
    if (batch.self_mining)
      for_each_pair_of_blocks(pool, blocks(classes.anchors), at);
    else
      for_each_pair_of_blocks(pool, blocks(classes.anchors), blocks(classes.candidates), at);
  }

  // Calls use(anchor, count, candidate, block) with every block that load(row, column, worker) returns, null
  // where there is nothing to use: `count` rows of it, one for each anchor, a column for each candidate. Then
  // with its transpose, where that is not visited by itself.
  template <class Load, class Use>
  void visit_rows(const Load& load, const Use& use) {
    std::vector<T*> transposes;
    for (int worker = 0; worker < pool.threads; ++worker) transposes.push_back(take_block());
    visit_blocks([&](int32_t row, int32_t column, int worker) {
      const T* block = load(row, column, worker);
      if (!block) return;
      use(row, rows_in_block(row, classes.anchors), column, block);
      if (!serves_both(row, column)) return;
      kernels.transpose(block, transposes[size_t(worker)]);
      use(column, rows_in_block(column, classes.candidates), row, transposes[size_t(worker)]);
    });
  }

  // The half squared distances of negatives; infinite where a pair is none. False where the block holds no
  // negative, or none below `reach`. `near` lists the entries whose distance must be measured from the rows.
  bool load_block(int32_t row, int32_t column, const T* reach, T* block, Near* near) const {
    const Order &anchors = classes.anchors, &candidates = classes.candidates;
    const int32_t rows = rows_in_block(row, anchors), columns = rows_in_block(column, candidates);
    const int32_t row_low = anchors.group[row], row_high = anchors.group[row + rows - 1];
    const int32_t column_low = candidates.group[column], column_high = candidates.group[column + columns - 1];
    if (row_low == column_high && row_high == column_low) return false;  // one class
    if (!kernels.half_squares(walk, row, column, reach, block, near ? near->entries : nullptr,
                              near ? &near->count : nullptr))
      return false;
    constexpr T none = std::numeric_limits<T>::infinity();
    if (rows < kBlockRows || columns < kBlockRows)
      for (int32_t r = 0; r < kBlockRows; ++r)
        std::fill(block + r * kBlockRows + (r < rows ? columns : 0), block + (r + 1) * kBlockRows, none);
    const bool apart = row_high < column_low || column_high < row_low;
    if (!apart || walk.exclude_self_everywhere)
      for (int32_t r = 0; r < rows; ++r) {
        T* entries = block + r * kBlockRows;
        const int32_t group = anchors.group[row + r], self = walk.self_position[row + r] - column;
        for (int32_t c = 0; c < columns; ++c)
          if (candidates.group[column + c] == group) entries[c] = none;
        if (self >= 0 && self < columns) entries[self] = none;
      }
    if (near)
      near->count = int32_t(std::remove_if(near->entries, near->entries + near->count,
                                           [&](int32_t at) { return block[at] == none; }) -
                            near->entries);
    return true;
  }
};

}  // namespace tripletops
