// The search for the best candidate of each anchor: the one with the least key, a tie going to the smallest
// index. The key is half the squared distance without the anchor's own term, h_candidate - g (negated where
// the farthest is wanted). Products are consumed tile by tile, while they are in the nearest cache. A scan of
// the tile in vectors finds the few anchors that it can improve; those are settled one by one.
#pragma once

#include "../mask.h"
#include "tile.h"

namespace tripletops {
namespace {

// The same expression for scalars and vectors.
template <Keep keep, class V>
TRIPLETOPS_INLINE V key_of(V half_norm, V product) {
  return keep == Keep::farthest ? product - half_norm : half_norm - product;
}

// A product that gives its pair the key +infinity.
template <Keep keep, class T>
constexpr T kExcluded = keep == Keep::farthest ? kInfinity<T> : -kInfinity<T>;

// A tile of products and what its keys are made of.
template <class T>
struct TileView {
  const T* products;
  int32_t row, column;  // position of the first anchor and of the first candidate
  const T *row_half_norms, *column_half_norms;
  int32_t row_first, column_first;  // the smallest index among the anchors, among the candidates
};

template <Keep keep, class T>
TRIPLETOPS_INLINE Vector<T> above_floor(Vector<T> key, Vector<T> floor) {
  return keep == Keep::beyond ? (key > floor ? key : broadcast<T>(kInfinity<T>)) : key;
}

// The anchor of row r against the tile's candidates, `least` of whose keys is known lane by lane.
template <Keep keep, class T>
__attribute__((noinline)) void settle_row(const Pairs<T>& pairs, const TileView<T>& tile, int r, T floor,
                                          Vector<T> least, T* best, int32_t* best_index) {
  const T low = least_lane<T>(least);
  for (int v = 0; v < kPanelVectors; ++v) {
    const int at = v * kLanes<T>;
    const Vector<T> key = key_of<keep>(load_vector<T>(tile.column_half_norms + at),
                                       load_vector<T>(tile.products + r * kPanelColumns<T> + at));
    uint32_t bits = lanes_not_above(above_floor<keep, T>(key, broadcast<T>(floor)), broadcast<T>(low));
    for (; bits; bits &= bits - 1)
      improve(low, pairs.candidates.index[tile.column + at + __builtin_ctz(bits)], best, best_index);
  }
}

// The anchors of the columns of a vector, those whose bits are set, against the tile's rows; `least` is the
// least key of each column.
template <Keep keep, class T>
__attribute__((noinline)) void settle_columns(const Pairs<T>& pairs, const TileView<T>& tile, int v,
                                              uint32_t bits, Vector<T> floor, Vector<T> least, T* best,
                                              int32_t* best_index) {
  using Indices = decltype(least <= least);
  Indices lowest = Indices{} + kNobody;
  for (int r = 0; r < kTileRows; ++r) {
    const Vector<T> key = key_of<keep>(broadcast<T>(tile.row_half_norms[r]),
                                       load_vector<T>(tile.products + r * kPanelColumns<T> + v * kLanes<T>));
    const Indices index = Indices{} + pairs.anchors.index[tile.row + r];
    lowest = (above_floor<keep, T>(key, floor) <= least) & (index < lowest) ? index : lowest;
  }
  for (; bits; bits &= bits - 1) {
    const int lane = __builtin_ctz(bits);
    improve(least[lane], int32_t(lowest[lane]), best + lane, best_index + lane);
  }
}

// The tile's anchors along its rows. `floors`: by anchor, read with Keep::beyond alone.
template <Keep keep, class T>
TRIPLETOPS_INLINE void keep_rows(const Pairs<T>& pairs, const TileView<T>& tile, const T* floors,
                                 Picks<T> picks) {
  constexpr int columns = kPanelColumns<T>;
  T* best = picks.key + tile.row;
  int32_t* best_index = picks.index + tile.row;
  const T* floor = keep == Keep::beyond ? floors + tile.row : best;
  const T* half_norms = tile.column_half_norms;

  // least - best <= 0 exactly where least <= best: one accumulator tells whether any row needs a look.
  Vector<T> least[kTileRows];
  Vector<T> slack = broadcast<T>(kInfinity<T>);
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r) {
    least[r] = broadcast<T>(kInfinity<T>);
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) {
      const Vector<T> key = key_of<keep>(load_vector<T>(half_norms + v * kLanes<T>),
                                         load_vector<T>(tile.products + r * columns + v * kLanes<T>));
      least[r] = keep_least(above_floor<keep, T>(key, broadcast<T>(floor[r])), least[r]);
    }
    slack = keep_least(least[r] - broadcast<T>(best[r]), slack);
  }
  if (__builtin_expect(lanes_not_above(slack, Vector<T>{}) == 0, 1)) return;

#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r) {
    const Vector<T> bar = broadcast<T>(best[r]);
    const uint32_t reached = lanes_not_above(least[r], bar);
    if (reached && ((reached & ~lanes_not_above(bar, least[r])) || tile.column_first < best_index[r]))
      settle_row<keep>(pairs, tile, r, floor[r], least[r], best + r, best_index + r);
  }
}

// The tile's anchors along its columns: the transposed half of a symmetric product.
template <Keep keep, class T>
TRIPLETOPS_INLINE void keep_columns(const Pairs<T>& pairs, const TileView<T>& tile, const T* floors,
                                    Picks<T> picks) {
  constexpr int columns = kPanelColumns<T>;
  T* best = picks.key + tile.column;
  int32_t* best_index = picks.index + tile.column;
  const T* floor = keep == Keep::beyond ? floors + tile.column : best;
  const T* half_norms = tile.row_half_norms;

#pragma GCC unroll 2
  for (int v = 0; v < kPanelVectors; ++v) {
    const Vector<T> limit = load_vector<T>(floor + v * kLanes<T>);
    Vector<T> least = broadcast<T>(kInfinity<T>);
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      const Vector<T> key = key_of<keep>(broadcast<T>(half_norms[r]),
                                         load_vector<T>(tile.products + r * columns + v * kLanes<T>));
      least = keep_least(above_floor<keep, T>(key, limit), least);
    }
    const Vector<T> bar = load_vector<T>(best + v * kLanes<T>);
    uint32_t bits = lanes_not_above(least, bar);
    if (__builtin_expect(bits == 0, 1)) continue;
    bool tie_can_win = false;
    for (int lane = 0; lane < kLanes<T>; ++lane)
      tie_can_win |= tile.row_first < best_index[v * kLanes<T> + lane];
    if (!tie_can_win) bits &= ~lanes_not_above(bar, least);
    if (bits)
      settle_columns<keep>(pairs, tile, v, bits, limit, least, best + v * kLanes<T>,
                           best_index + v * kLanes<T>);
  }
}

// All pairs of the tile are of the wanted kind.
template <Keep keep, class T>
TRIPLETOPS_INLINE void keep_whole(const Pairs<T>& pairs, const TileView<T>& tile, const T* floors,
                                  Picks<T> picks) {
  keep_rows<keep>(pairs, tile, floors, picks);
  if (pairs.symmetric) keep_columns<keep>(pairs, tile, floors, picks);
}

// The same of a copy of the tile in which the pairs of the other kind, and self, are excluded.
template <Keep keep, class T>
__attribute__((noinline)) void keep_part(const Pairs<T>& pairs, const TileView<T>& tile, const T* floors,
                                         Picks<T> picks, bool same_class) {
  alignas(64) T part[kTileSize<T>];
  std::memcpy(part, tile.products, sizeof part);
  exclude(pairs, {tile.row, kTileRows, tile.column, kPanelColumns<T>}, same_class, kExcluded<keep, T>, part,
          kPanelColumns<T>);
  TileView<T> masked = tile;
  masked.products = part;
  keep_whole<keep>(pairs, masked, floors, picks);
}

template <class T>
TRIPLETOPS_INLINE void search_tile(const Pairs<T>& pairs, const Search<T>& search, const TileView<T>& tile,
                                   Picks<T> positives, Picks<T> negatives) {
  const Holds holds = what_holds(pairs, {tile.row, kTileRows, tile.column, kPanelColumns<T>});
  const T* floors = search.floor;
  if (holds != Holds::negatives) {
    if (search.positive == Keep::nearest) keep_part<Keep::nearest>(pairs, tile, floors, positives, true);
    if (search.positive == Keep::farthest) keep_part<Keep::farthest>(pairs, tile, floors, positives, true);
  }
  if (holds == Holds::positives) return;
  if (holds == Holds::negatives && !pairs.exclude_self_everywhere) {
    if (search.negative == Keep::nearest) keep_whole<Keep::nearest>(pairs, tile, floors, negatives);
    if (search.negative == Keep::farthest) keep_whole<Keep::farthest>(pairs, tile, floors, negatives);
    if (search.negative == Keep::beyond) keep_whole<Keep::beyond>(pairs, tile, floors, negatives);
  } else {
    if (search.negative == Keep::nearest) keep_part<Keep::nearest>(pairs, tile, floors, negatives, false);
    if (search.negative == Keep::farthest) keep_part<Keep::farthest>(pairs, tile, floors, negatives, false);
    if (search.negative == Keep::beyond) keep_part<Keep::beyond>(pairs, tile, floors, negatives, false);
  }
}

// In a symmetric problem the blocks of anchors cover the upper triangle, and each tile serves its rows and
// its columns as anchors. `products` has room for those of one panel with every anchor tile of the block.
template <class T>
void search_block(const Pairs<T>& pairs, const Search<T>& search, int32_t tile_begin, int32_t tile_end,
                  int32_t panel_begin, int32_t panel_end, const Side<T>& candidates, Picks<T> positives,
                  Picks<T> negatives, T* products) {
  constexpr int columns = kPanelColumns<T>;
  const auto tiles_of = [&](int32_t panel) {
    const int32_t last_column = (panel_begin + panel + 1) * columns - 1;
    const int32_t end = last_column / kTileRows + 1;
    return (pairs.symmetric && end < tile_end ? end : tile_end) - tile_begin;
  };
  const auto take = [&](int32_t panel, int32_t tiles) {
    for (int32_t i = 0; i < tiles; ++i) {
      const int32_t tile = tile_begin + i;
      const TileView<T> view = {products + i * kTileSize<T>,
                                tile * kTileRows,
                                (panel_begin + panel) * columns,
                                pairs.anchors.half_norms + tile * kTileRows,
                                candidates.half_norms + int64_t(panel) * columns,
                                pairs.anchors.first[tile],
                                candidates.first[panel]};
      search_tile(pairs, search, view, positives, negatives);
    }
  };
  walk_panels(pairs.anchors.panels.panel(tile_begin), candidates.panels, panel_end - panel_begin, products,
              tiles_of, take);
}

template <class T>
T key_of_pair(const Pairs<T>& pairs, int32_t anchor, const T* framed, T half_norm) {
  const T* a = pairs.anchors.panels.panel(anchor / kTileRows) + anchor % kTileRows;
  T product = 0;
  for (int64_t d = 0; d < pairs.width; ++d) product = multiply_add_one(a[d * kTileRows], framed[d], product);
  return key_of<Keep::nearest>(half_norm, product);
}

}  // namespace
}  // namespace tripletops
