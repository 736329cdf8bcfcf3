// The micro-kernel: the Gram products of one tile of anchors with one panel of candidates, held in registers
// over the whole inner loop. Every product is one chain of multiply-adds in the order of the dimensions,
// wherever the tile lies, so equal rows get equal bits.
#pragma once

#include "../functions.h"
#include "simd.h"

namespace tripletops {
namespace {

// A tile's sums fill most registers; two more hold a panel's row. A block of kBlockRows is a whole number of
// tiles and of panels.
constexpr int kTileRows = Isa::tile_rows;
constexpr int kPanelVectors = Isa::panel_vectors;
template <class T>
constexpr int kPanelColumns = kPanelVectors * kLanes<T>;
static_assert(kBlockRows % kTileRows == 0 && kBlockRows % kPanelColumns<float> == 0);
template <class T>
constexpr int kTileSize = kTileRows * kPanelColumns<T>;

// products[r * kPanelColumns + c] (+)= sum over d in [begin, end) of anchors[d * kTileRows + r] * panel[d *
// kPanelColumns + c].
template <class T>
void gram_tile(const T* anchors, const T* panel, int64_t begin, int64_t end, T* products) {
  Vector<T> sum[kTileRows][kPanelVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v)
      sum[r][v] = begin ? load_vector<T>(products + r * kPanelColumns<T> + v * kLanes<T>) : Vector<T>{};

  const T* a = anchors + begin * kTileRows;
  const T* b = panel + begin * kPanelColumns<T>;
#pragma GCC unroll 4
  for (int64_t d = begin; d < end; ++d, a += kTileRows, b += kPanelColumns<T>) {
    Vector<T> column[kPanelVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) column[v] = load_vector<T>(b + v * kLanes<T>);
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      const Vector<T> row = broadcast<T>(a[r]);
#pragma GCC unroll 2
      for (int v = 0; v < kPanelVectors; ++v) sum[r][v] = multiply_add(row, column[v], sum[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v)
      store_vector(sum[r][v], products + r * kPanelColumns<T> + v * kLanes<T>);
}

// The slice of a panel that stays in the first-level cache while the anchors of a block pass by.
template <class T>
constexpr int64_t kSlice = 16384 / (kPanelColumns<T> * int64_t(sizeof(T)));

// products[tile * kTileSize + ...] of `tiles` tiles of anchors, one behind the other, with one panel.
template <class T>
TRIPLETOPS_INLINE void multiply_panel(const T* anchors, int32_t tiles, const T* panel, int64_t width,
                                      T* products) {
  int64_t from = 0;
  do {
    const int64_t to = from + kSlice<T> < width ? from + kSlice<T> : width;
    for (int32_t tile = 0; tile < tiles; ++tile)
      gram_tile(anchors + int64_t(tile) * kTileRows * width, panel, from, to, products + tile * kTileSize<T>);
    from = to;
  } while (from < width);
}

// The walk: the products of a block of anchor tiles with one candidate panel after the other. What becomes of
// them is the consumer's: take(panel, tiles) may read `products` until the next panel. `tiles_of(panel)`
// tells how many of the tiles meet the panel.
template <class T, class TilesOf, class Take>
TRIPLETOPS_INLINE void walk_panels(const T* anchors, const Panels<T>& candidates, int32_t panels, T* products,
                                   const TilesOf& tiles_of, const Take& take) {
  for (int32_t panel = 0; panel < panels; ++panel) {
    const int32_t tiles = tiles_of(panel);
    multiply_panel(anchors, tiles, candidates.panel(panel), candidates.width, products);
    take(panel, tiles);
  }
}

}  // namespace
}  // namespace tripletops
