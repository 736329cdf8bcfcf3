// What every objective begins with: rows ordered by class, surveyed, centred, scaled and packed.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "blocks.h"
#include "classes.h"
#include "mining.h"
#include "parallel.h"
#include "scratch.h"

namespace tripletops {

constexpr int32_t kPadding = 128;     // at least a tile's rows, a panel's columns and a block's rows
constexpr double kShrink = 0x1p-20;   // keeps a task's sum of the largest deviations finite
constexpr double kSerialBelow = 3e6;  // multiply-adds that are done before a second thread would have woken

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
  double scale = 1;  // a power of two near 1 / the spread of the rows
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

  // False on a non-finite element. Deviations whose sums overflow are surveyed again, shrunk.
  bool survey_side(const Rows& rows, const Order& order, const T* origin, Normaliser* units, double* sums,
                   double* spread) {
    const int64_t chunks = (order.count + kRowsPerTask - 1) / kRowsPerTask;
    T* partial =
        scratch.template take<T>(chunks * (width + 2));  // sums, spread, and what they were multiplied by
    std::atomic<bool> finite{true};
    for_each_range(pool, order.count, kRowsPerTask, [&](int64_t begin, int64_t end, int worker) {
      T* sum = partial + begin / kRowsPerTask * (width + 2);
      const auto survey = [&](T shrink) {
        std::fill(sum, sum + width + 1, T(0));
        sum[width + 1] = shrink;
        kernels.survey(rows, order.index, int32_t(begin), int32_t(end), origin, shrink, units, sum,
                       sum + width, buffers[worker]);
      };
      survey(1);
      if (kernels.all_finite(sum, width + 1)) return;
      for (int64_t i = begin; i < end; ++i)
        if (!kernels.all_finite(kernels.load(rows, order.index[i], buffers[worker]), width)) finite = false;
      survey(T(kShrink));
    });
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const T* sum = partial + chunk * (width + 2);
      const double rest = kShrink / double(sum[width + 1]);
      for (int64_t d = 0; d < width; ++d) sums[d] += double(sum[d]) * rest;
      *spread = std::max(*spread, double(sum[width]) * rest);
    }
    return finite;
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

  const T* first_row() {
    const bool there = classes.candidates.count > 0;
    return kernels.load(there ? batch.candidates : batch.anchors,
                        (there ? classes.candidates : classes.anchors).index[0],
                        scratch.template take<T>(width));
  }

  Frame<T> unit_frame(const double* sums, int64_t rows) {
    double* centre = scratch.template take<double>(width);
    for (int64_t d = 0; d < width; ++d) centre[d] = sums[d] / double(rows) / kShrink;
    return {zeros(), 1, centre};
  }

  // The centre lies a whole number of sixteenths of the spread away from a row: data on a grid stays on one,
  // and its ties stay ties.
  Frame<T> grid_frame(const double* sums, int64_t rows, const T* origin) {
    T* centre = scratch.template take<T>(width);
    for (int64_t d = 0; d < width; ++d) {
      const double away = sums[d] / double(rows) * scale / kShrink;
      centre[d] = T(double(origin[d]) * scale + std::round(away * 16) / 16);
    }
    return {centre, T(scale), nullptr};
  }

  // Reads every row that is not ignored, once; then packs both sides, centred on the mean of all of them.
  bool prepare(bool wants_products, bool all_panels = false) {
    const bool cosine = distance == Distance::cosine;
    double* sums = scratch.filled(width, 0.0);
    double spread = 0;
    if (cosine) {
      candidate_units = scratch.template take<Normaliser>(batch.candidates.count);
      anchor_units =
          batch.self_mining ? candidate_units : scratch.template take<Normaliser>(batch.anchors.count);
    }
    const int64_t rows = classes.candidates.count + (batch.self_mining ? 0 : classes.anchors.count);
    if (rows == 0) return true;
    const T* origin = cosine ? zeros() : first_row();
    bool finite = survey_side(batch.candidates, classes.candidates, origin, candidate_units, sums, &spread);
    if (!batch.self_mining)
      finite = survey_side(batch.anchors, classes.anchors, origin, anchor_units, sums, &spread) && finite;
    if (!finite) return false;
    if (!cosine && spread > 0) {
      const int limit = std::numeric_limits<T>::max_exponent - 2;
      scale = std::ldexp(1.0, -std::clamp(std::ilogb(spread / kShrink), -limit, limit));
    }

    walk.width = width;
    walk.symmetric = batch.self_mining;
    walk.candidate_begin = classes.candidates.begin;
    place_self();
    if (!wants_products) return true;
    frame = cosine ? unit_frame(sums, rows) : grid_frame(sums, rows, origin);
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
      const T d =
          T(kernels.measure(pair(x, y, classes.anchors.index[anchor], index), width, distance, scale));
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
    return kernels.measure(pair(x, y, anchor, candidate), width, distance, scale);
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
