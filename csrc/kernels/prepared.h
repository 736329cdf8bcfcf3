// The rows of a call as products take them: surveyed, centred, scaled and packed for one distance; and the
// walks over blocks of their pairs. Anchors and candidates are counted by position, unless a name says row.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "mask.h"
#include "schedule.h"
#include "survey.h"

namespace tripletops {

// Which panels are packed beforehand. Those of a symmetric product are used once for every block of anchors,
// so all of them are; others are used once, by whoever walks them, unless all are asked for.
enum class Packed { nothing, as_needed, everything };

// Entries of a block.
struct Near {
  int32_t* entries = nullptr;
  int32_t count = 0;
};

template <class T>
struct Prepared {
  Ordered<T>& rows;
  const Distance distance;
  Normaliser *anchor_units = nullptr, *candidate_units = nullptr;  // by row; cosine only
  Frame<T> frame;
  double scale = 1;  // that of the frame: a power of two near 1 / the spread of the rows
  Pairs<T> pairs;

  Prepared(Ordered<T>& rows, Distance distance) : rows(rows), distance(distance) {}

  // False where a row that is not ignored holds a non-finite element.
  bool prepare(Packed packed) {
    if (!look()) return false;
    pack_sides(packed);
    return true;
  }

  // The same without packing: `pack_sides` may follow.
  bool look() {
    const Batch& batch = rows.batch;
    const bool cosine = distance == Distance::cosine;
    if (cosine) {
      candidate_units = rows.scratch.filled(batch.candidates.count, Normaliser{});
      anchor_units =
          batch.self_mining ? candidate_units : rows.scratch.filled(batch.anchors.count, Normaliser{});
    }
    Survey<T> survey(rows, candidate_units, anchor_units);
    if (survey.row_count() == 0) return true;
    if (!survey.look()) return false;
    pairs.width = rows.width;
    pairs.symmetric = batch.self_mining;
    pairs.candidate_begin = rows.classes.candidates.begin;
    pairs.self_position = rows.self_position;
    pairs.exclude_self_everywhere = rows.exclude_self_everywhere;
    pairs.anchors = side_of(rows.classes.anchors);
    pairs.candidates = side_of(rows.classes.candidates);
    frame = cosine ? survey.unit_frame() : survey.grid_frame();
    scale = double(frame.scale);
    if (survey.outliers()) pairs.tiny = T(sizeof(T) == sizeof(float) ? 0x1p-100 : 0x1p-900);
    return true;
  }

  // Packs what is asked for and has not been packed before.
  void pack_sides(Packed packed) {
    const Batch& batch = rows.batch;
    if (packed == Packed::nothing || rows.classes.anchors.count + rows.classes.candidates.count == 0) return;
    if (pairs.symmetric) {
      if (!pairs.anchors.panels.packed) pack_both();
      return;
    }
    if (!pairs.anchors.panels.packed)
      pack_side(batch.anchors, anchor_units, rows.functions.tile_rows, pairs.anchors);
    if (pairs.candidates.panels.packed) return;
    pairs.candidates.panels = {nullptr, rows.functions.panel_columns, rows.width};
    if (packed == Packed::everything)
      pack_side(batch.candidates, candidate_units, rows.functions.panel_columns, pairs.candidates);
  }

  // Room for the panels of `side`, `count` of them.
  Side<T> room_for(const Side<T>& side, int64_t count, int32_t lanes) {
    Side<T> room = side;
    room.panels = {rows.scratch.template take<T>(count * lanes * rows.width), lanes, rows.width};
    room.half_norms = rows.scratch.template take<T>(count * lanes);
    room.first = rows.scratch.template take<int32_t>(count);
    return room;
  }

  // Packs panel `panel` of `side` into place `at` of `room`.
  void pack(const Matrix& matrix, const Normaliser* units, const Side<T>& room, int32_t panel, int64_t at,
            int worker) const {
    const int32_t lanes = room.panels.lanes;
    rows.functions.tiles.pack(matrix, frame, units, room, lanes, panel, room.panels.panel(at),
                              room.half_norms + at * lanes, room.first + at, rows.buffers[worker]);
  }

  Pair<T> pair(const T* x, const T* y, int64_t anchor_row, int64_t candidate_row) const {
    if (distance != Distance::cosine) return {x, y, {}, {}};
    return {x, y, anchor_units[anchor_row], candidate_units[candidate_row]};
  }

  // The distance of an anchor and a candidate, by row, from the rows themselves. `buffer` holds two rows.
  double measured(int32_t anchor_row, int32_t candidate_row, T* buffer) const {
    const RowFunctions<T>& functions = rows.functions.rows;
    const T* x = functions.load(rows.batch.anchors, anchor_row, buffer);
    const T* y = functions.load(rows.batch.candidates, candidate_row, buffer + rows.width);
    return functions.measure(pair(x, y, anchor_row, candidate_row), rows.width, distance);
  }

  // Calls visit(row, distance) for every positive of an anchor. `buffer` holds two rows.
  template <class Visit>
  void each_positive(int32_t anchor, T* buffer, const Visit& visit) const {
    const RowFunctions<T>& functions = rows.functions.rows;
    const int32_t anchor_row = rows.row_of(anchor);
    const T* x = functions.load(rows.batch.anchors, anchor_row, buffer);
    for (int32_t c = rows.class_begin(anchor); c < rows.class_end(anchor); ++c) {
      if (c == rows.self_position[anchor]) continue;
      const int32_t row = rows.classes.candidates.index[c];
      const T* y = functions.load(rows.batch.candidates, row, buffer + rows.width);
      visit(row, T(functions.measure(pair(x, y, anchor_row, row), rows.width, distance)));
    }
  }

  // The nearest negative that is strictly farther than `floor` as distances are reported, from the rows
  // themselves; its row, or kNobody. `x` is the anchor's row, `buffer` holds one.
  int32_t nearest_beyond(int32_t anchor, const T* x, double floor, T* buffer, T* found) const {
    const RowFunctions<T>& functions = rows.functions.rows;
    const Classes& classes = rows.classes;
    const int32_t group = classes.anchors.group[anchor];
    int32_t best = kNobody;
    T nearest = std::numeric_limits<T>::infinity();
    for (int32_t c = 0; c < classes.candidates.count; ++c) {
      if (classes.candidates.group[c] == group || c == rows.self_position[anchor]) continue;
      const int32_t index = classes.candidates.index[c];
      const T* y = functions.load(rows.batch.candidates, index, buffer);
      const T d = T(functions.measure(pair(x, y, rows.row_of(anchor), index), rows.width, distance));
      if (double(d) > floor) improve(d, index, &nearest, &best);
    }
    *found = nearest;
    return best;
  }

  // Blocks of kBlockRows x kBlockRows pairs; `row` and `column` are the positions they begin at.

  T* take_block() { return rows.scratch.template take<T>(kBlockRows * kBlockRows); }

  static int32_t rows_in_block(int32_t begin, const Order& order) {
    return std::min(kBlockRows, order.count - begin);
  }

  // Whether the block also stands for its transpose, which is not visited.
  bool serves_both(int32_t row, int32_t column) const { return rows.batch.self_mining && row != column; }

  template <class Visit>
  void visit_blocks(const Visit& visit) const {
    const auto blocks = [](const Order& order) { return (order.count + kBlockRows - 1) / kBlockRows; };
    const auto at = [&](int32_t anchor, int32_t candidate, int worker) {
      visit(anchor * kBlockRows, candidate * kBlockRows, worker);
    };
    const Classes& classes = rows.classes;
    if (rows.batch.self_mining)
      for_each_pair_of_blocks(rows.pool, blocks(classes.anchors), at);
    else
      for_each_pair_of_blocks(rows.pool, blocks(classes.anchors), blocks(classes.candidates), at);
  }

  // Calls use(anchor, count, candidate, block) with every block that load(row, column, worker) returns, null
  // where there is nothing to use: `count` rows of it, one for each anchor, a column for each candidate. Then
  // with its transpose, where that is not visited by itself.
  template <class Load, class Use>
  void visit_rows(const Load& load, const Use& use) {
    std::vector<T*> transposes;
    for (int worker = 0; worker < rows.pool.threads; ++worker) transposes.push_back(take_block());
    visit_blocks([&](int32_t row, int32_t column, int worker) {
      const T* block = load(row, column, worker);
      if (!block) return;
      use(row, rows_in_block(row, rows.classes.anchors), column, block);
      if (!serves_both(row, column)) return;
      rows.functions.blocks.transpose(block, transposes[size_t(worker)]);
      use(column, rows_in_block(column, rows.classes.candidates), row, transposes[size_t(worker)]);
    });
  }

  // The half squared distances of negatives; infinite where a pair is none. False where the block holds no
  // negative, or none below `reach`. `near` lists the entries whose distance must be measured from the rows.
  bool load_block(int32_t row, int32_t column, const T* reach, T* block, Near* near) const {
    const Rectangle at = rectangle(row, column);
    const Holds holds = what_holds(pairs, at);
    if (holds == Holds::positives) return false;
    if (!rows.functions.tiles.half_squares(pairs, row, column, reach, block, near ? near->entries : nullptr,
                                           near ? &near->count : nullptr))
      return false;
    fill_behind(at, block);
    if (holds == Holds::both || pairs.exclude_self_everywhere)
      exclude(pairs, at, false, kNone, block, kBlockRows);
    if (near) drop_none(block, *near);
    return true;
  }

  // The same of all pairs but self.
  void load_pairs(int32_t row, int32_t column, T* block, Near* near) const {
    const Rectangle at = rectangle(row, column);
    rows.functions.tiles.half_squares(pairs, row, column, nullptr, block, near->entries, &near->count);
    fill_behind(at, block);
    for (int32_t r = 0; r < at.rows; ++r) {
      const int32_t self = pairs.self_position[row + r] - column;
      if (self >= 0 && self < at.columns) block[r * kBlockRows + self] = kNone;
    }
    drop_none(block, *near);
  }

 private:
  static constexpr T kNone = std::numeric_limits<T>::infinity();

  Rectangle rectangle(int32_t row, int32_t column) const {
    return {row, rows_in_block(row, rows.classes.anchors), column,
            rows_in_block(column, rows.classes.candidates)};
  }

  static void fill_behind(const Rectangle& at, T* block) {
    if (at.rows == kBlockRows && at.columns == kBlockRows) return;
    for (int32_t r = 0; r < kBlockRows; ++r)
      std::fill(block + r * kBlockRows + (r < at.rows ? at.columns : 0), block + (r + 1) * kBlockRows, kNone);
  }

  static void drop_none(const T* block, Near& near) {
    near.count = int32_t(std::remove_if(near.entries, near.entries + near.count,
                                        [&](int32_t entry) { return block[entry] == kNone; }) -
                         near.entries);
  }

  static Side<T> side_of(const Order& order) {
    Side<T> side;
    side.count = order.count, side.index = order.index, side.group = order.group;
    return side;
  }

  // The rows of a block are a whole number of panels and of tiles.
  void pack_both() {
    const int32_t lanes = rows.functions.panel_columns, tile_rows = rows.functions.tile_rows;
    const auto pieces = [](int64_t end, int32_t size) { return int32_t((end + size - 1) / size); };
    const int32_t count = pairs.candidates.count;
    pairs.candidates = room_for(pairs.candidates, pieces(count, lanes), lanes);
    pairs.anchors = room_for(pairs.anchors, pieces(count, tile_rows), tile_rows);
    for_each_range(rows.pool, count, kBlockRows, [&](int64_t begin, int64_t end, int worker) {
      for (int32_t panel = int32_t(begin) / lanes; panel < pieces(end, lanes); ++panel)
        pack(rows.batch.candidates, candidate_units, pairs.candidates, panel, panel, worker);
      for (int32_t tile = int32_t(begin) / tile_rows; tile < pieces(end, tile_rows); ++tile)
        rows.functions.tiles.repack(pairs.candidates, tile, pairs.anchors);
    });
  }

  void pack_side(const Matrix& matrix, const Normaliser* units, int32_t lanes, Side<T>& side) {
    const int32_t panels = (side.count + lanes - 1) / lanes;
    side = room_for(side, panels, lanes);
    for_each_range(rows.pool, panels, kRowsPerTask / lanes, [&](int64_t begin, int64_t end, int worker) {
      for (int64_t panel = begin; panel < end; ++panel)
        pack(matrix, units, side, int32_t(panel), panel, worker);
    });
  }
};

}  // namespace tripletops
