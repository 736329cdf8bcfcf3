// The tile walk: every tile of a block of anchors x a range of candidate panels, once. In a symmetric problem
// the blocks cover the upper triangle and each tile serves its rows and its columns as anchors. Rows are
// ordered by class, so a tile holds negatives only, positives only, or (along the class blocks) both.
#pragma once

#include "select.h"

namespace tripletops {
namespace {

template <class T>
TRIPLETOPS_INLINE void keep_tile(const Walk<T>& walk, const TileView<T>& tile, Picks<T> positives,
                                 Picks<T> negatives) {
  const int32_t last_row =
      (tile.row + kTileRows < walk.anchors.count ? tile.row + kTileRows : walk.anchors.count) - 1;
  const int32_t end = tile.column + kPanelColumns<T>;
  const int32_t last_column = (end < walk.candidates.count ? end : walk.candidates.count) - 1;
  const int32_t row_low = walk.anchors.group[tile.row], row_high = walk.anchors.group[last_row];
  const int32_t column_low = walk.candidates.group[tile.column],
                column_high = walk.candidates.group[last_column];

  const bool apart = row_high < column_low || column_high < row_low;
  const bool together = row_low == row_high && column_low == column_high && row_low == column_low;
  if (!apart) {
    if (walk.positive == Rule::nearest) keep_part<Rule::nearest>(walk, tile, positives, true);
    if (walk.positive == Rule::farthest) keep_part<Rule::farthest>(walk, tile, positives, true);
  }
  if (together) return;
  if (apart && !walk.exclude_self_everywhere) {
    if (walk.negative == Rule::nearest) keep<Rule::nearest>(walk, tile, negatives);
    if (walk.negative == Rule::farthest) keep<Rule::farthest>(walk, tile, negatives);
    if (walk.negative == Rule::beyond) keep<Rule::beyond>(walk, tile, negatives);
  } else {
    if (walk.negative == Rule::nearest) keep_part<Rule::nearest>(walk, tile, negatives, false);
    if (walk.negative == Rule::farthest) keep_part<Rule::farthest>(walk, tile, negatives, false);
    if (walk.negative == Rule::beyond) keep_part<Rule::beyond>(walk, tile, negatives, false);
  }
}

// `products` has room for those of one panel with every anchor tile of the block.
template <class T>
void walk_block(const Walk<T>& walk, int32_t tile_begin, int32_t tile_end, int32_t panel_begin,
                int32_t panel_end, const Panels<T>& panels, Picks<T> positives, Picks<T> negatives,
                T* products) {
  constexpr int columns = kPanelColumns<T>;
  for (int32_t panel = panel_begin; panel < panel_end; ++panel) {
    const int32_t column = panel * columns;
    int32_t end = tile_end;
    if (walk.symmetric && end > (column + columns - 1) / kTileRows + 1)
      end = (column + columns - 1) / kTileRows + 1;
    const int64_t local = panel - panel_begin;
    const T* candidates = panels.packed + local * columns * walk.width;
    multiply_panel(walk.anchors.panels.packed + int64_t(tile_begin) * kTileRows * walk.width,
                   end - tile_begin, candidates, walk.width, products);
    for (int32_t tile = tile_begin; tile < end; ++tile) {
      const TileView<T> view = {products + (tile - tile_begin) * kTileSize<T>,
                                tile * kTileRows,
                                column,
                                walk.anchors.panels.half_norms + tile * kTileRows,
                                panels.half_norms + local * columns,
                                walk.anchors.panels.first[tile],
                                panels.first[local]};
      keep_tile(walk, view, positives, negatives);
    }
  }
}

template <class T>
T key_of_pair(const Walk<T>& walk, int32_t anchor, const T* framed, T half_norm) {
  const T* a =
      walk.anchors.panels.packed + int64_t(anchor / kTileRows) * kTileRows * walk.width + anchor % kTileRows;
  T product = 0;
  for (int64_t d = 0; d < walk.width; ++d) product = multiply_add_one(a[d * kTileRows], framed[d], product);
  return key_of<Rule::nearest>(half_norm, product);
}

}  // namespace
}  // namespace tripletops
