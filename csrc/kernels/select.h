// What is kept of a tile: for each anchor the candidate with the least key, a tie going to the smallest
// index. The key is half the squared distance without the anchor's own term, h_candidate - g (negated where
// the farthest is wanted). A scan of the tile in vectors finds the few anchors that it can improve; those are
// settled one by one.
#pragma once

#include "problem.h"
#include "tile.h"

namespace tripletops {
namespace {

template <class T>
constexpr T kInfinity = T(__builtin_inf());

// The same expression for scalars and vectors.
template <Rule rule, class V>
TRIPLETOPS_INLINE V key_of(V half_norm, V product) {
  return rule == Rule::farthest ? product - half_norm : half_norm - product;
}

// A product that gives its pair the key +infinity.
template <Rule rule, class T>
constexpr T kExcluded = rule == Rule::farthest ? kInfinity<T> : -kInfinity<T>;

template <class T>
struct TileView {
  const T* products;
  int32_t row, column;  // position of the first anchor and of the first candidate
  const T *row_half_norms, *column_half_norms;
  int32_t row_first, column_first;  // the smallest index among the anchors, among the candidates
};

template <Rule rule, class T>
TRIPLETOPS_INLINE Vector<T> above_floor(Vector<T> key, Vector<T> floor) {
  return rule == Rule::beyond ? (key > floor ? key : broadcast<T>(kInfinity<T>)) : key;
}

// The anchor of row r against the tile's candidates, `least` of whose keys is known lane by lane.
template <Rule rule, class T>
__attribute__((noinline)) void settle_row(const Walk<T>& walk, const TileView<T>& tile, int r, T floor,
                                          Vector<T> least, T* best, int32_t* best_index) {
  T low = least[0];
  for (int lane = 1; lane < kLanes<T>; ++lane) low = least[lane] < low ? least[lane] : low;
  for (int v = 0; v < kPanelVectors; ++v) {
    const int at = v * kLanes<T>;
    const Vector<T> key = key_of<rule>(load_vector<T>(tile.column_half_norms + at),
                                       load_vector<T>(tile.products + r * kPanelColumns<T> + at));
    uint32_t bits = lanes_not_above(above_floor<rule, T>(key, broadcast<T>(floor)), broadcast<T>(low));
    for (; bits; bits &= bits - 1)
      improve(low, walk.candidates.index[tile.column + at + __builtin_ctz(bits)], best, best_index);
  }
}

// The anchor of column c against the tile's rows.
template <Rule rule, class T>
__attribute__((noinline)) void settle_column(const Walk<T>& walk, const TileView<T>& tile, int c, T floor,
                                             T* best, int32_t* best_index) {
  for (int r = 0; r < kTileRows; ++r) {
    const T key = key_of<rule>(tile.row_half_norms[r], tile.products[r * kPanelColumns<T> + c]);
    if (rule != Rule::beyond || key > floor) improve(key, walk.anchors.index[tile.row + r], best, best_index);
  }
}

// The tile's anchors along its rows.
template <Rule rule, class T>
TRIPLETOPS_INLINE void keep_rows(const Walk<T>& walk, const TileView<T>& tile, Picks<T> picks) {
  constexpr int columns = kPanelColumns<T>;
  T* best = picks.key + tile.row;
  int32_t* best_index = picks.index + tile.row;
  const T* floor = rule == Rule::beyond ? walk.floor + tile.row : best;
  const T* half_norms = tile.column_half_norms;

  // least - best <= 0 exactly where least <= best: one accumulator tells whether any row needs a look.
  Vector<T> least[kTileRows];
  Vector<T> slack = broadcast<T>(kInfinity<T>);
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r) {
    least[r] = broadcast<T>(kInfinity<T>);
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) {
      const Vector<T> key = key_of<rule>(load_vector<T>(half_norms + v * kLanes<T>),
                                         load_vector<T>(tile.products + r * columns + v * kLanes<T>));
      least[r] = keep_least(above_floor<rule, T>(key, broadcast<T>(floor[r])), least[r]);
    }
    slack = keep_least(least[r] - broadcast<T>(best[r]), slack);
  }
  if (__builtin_expect(lanes_not_above(slack, Vector<T>{}) == 0, 1)) return;

#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r) {
    const Vector<T> bar = broadcast<T>(best[r]);
    const uint32_t reached = lanes_not_above(least[r], bar);
    if (reached && ((reached & ~lanes_not_above(bar, least[r])) || tile.column_first < best_index[r]))
      settle_row<rule>(walk, tile, r, floor[r], least[r], best + r, best_index + r);
  }
}

// The tile's anchors along its columns: the transposed half of a symmetric product.
template <Rule rule, class T>
TRIPLETOPS_INLINE void keep_columns(const Walk<T>& walk, const TileView<T>& tile, Picks<T> picks) {
  constexpr int columns = kPanelColumns<T>;
  T* best = picks.key + tile.column;
  int32_t* best_index = picks.index + tile.column;
  const T* floor = rule == Rule::beyond ? walk.floor + tile.column : best;
  const T* half_norms = tile.row_half_norms;

#pragma GCC unroll 2
  for (int v = 0; v < kPanelVectors; ++v) {
    const Vector<T> limit = load_vector<T>(floor + v * kLanes<T>);
    Vector<T> least = broadcast<T>(kInfinity<T>);
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      const Vector<T> key = key_of<rule>(broadcast<T>(half_norms[r]),
                                         load_vector<T>(tile.products + r * columns + v * kLanes<T>));
      least = keep_least(above_floor<rule, T>(key, limit), least);
    }
    const Vector<T> bar = load_vector<T>(best + v * kLanes<T>);
    uint32_t bits = lanes_not_above(least, bar);
    if (__builtin_expect(bits == 0, 1)) continue;
    bool tie_can_win = false;
    for (int lane = 0; lane < kLanes<T>; ++lane)
      tie_can_win |= tile.row_first < best_index[v * kLanes<T> + lane];
    if (!tie_can_win) bits &= ~lanes_not_above(bar, least);
    for (; bits; bits &= bits - 1) {
      const int c = v * kLanes<T> + __builtin_ctz(bits);
      settle_column<rule>(walk, tile, c, floor[c], best + c, best_index + c);
    }
  }
}

template <Rule rule, class T>
TRIPLETOPS_INLINE void keep(const Walk<T>& walk, const TileView<T>& tile, Picks<T> picks) {
  keep_rows<rule>(walk, tile, picks);
  if (walk.symmetric) keep_columns<rule>(walk, tile, picks);
}

// keep() of a copy of the tile in which the pairs of the unwanted kind, and self, are excluded.
template <Rule rule, class T>
__attribute__((noinline)) void keep_part(const Walk<T>& walk, const TileView<T>& tile, Picks<T> picks,
                                         bool same_class) {
  constexpr int columns = kPanelColumns<T>;
  alignas(64) T part[kTileSize<T>];
  const int32_t* candidate_group = walk.candidates.group + tile.column;
  for (int r = 0; r < kTileRows; ++r) {
    const int32_t group = walk.anchors.group[tile.row + r];
    for (int c = 0; c < columns; ++c)
      part[r * columns + c] =
          (candidate_group[c] == group) == same_class ? tile.products[r * columns + c] : kExcluded<rule, T>;
    const int32_t self = walk.self_position[tile.row + r] - tile.column;
    if (self >= 0 && self < columns) part[r * columns + self] = kExcluded<rule, T>;
  }
  TileView<T> masked = tile;
  masked.products = part;
  keep<rule>(walk, masked, picks);
}

}  // namespace
}  // namespace tripletops
