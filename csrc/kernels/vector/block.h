// Blocks: kBlockRows anchors x kBlockRows candidates as one square matrix, row by row, of half squared
// distances, then of distances or weights. Objectives over many pairs work on its rows, and in a symmetric
// problem on the rows of its transpose, so that a block serves both of its sides.
#pragma once

#include "rows.h"
#include "tile.h"

namespace tripletops {
namespace {

// Below this share of the two rows' own half norms, a half squared distance out of Gram arithmetic has lost
// too many digits to stand.
constexpr double kNear = 1.0 / 16;

// What becomes of a panel's products: a stripe of half squared distances. Tells whether any of them is within
// reach, and lists those that are too close for products.
template <class T>
struct Stripe {
  const Pairs<T>& pairs;
  const int32_t row, column;
  const T* const reach;
  T* const half;
  int32_t* const near;
  const T* const products;
  uint32_t active;
  int32_t found = 0;

  TRIPLETOPS_INLINE void take(int32_t panel, int32_t tiles) {
    constexpr int columns = kPanelColumns<T>;
    const int32_t first = column + panel * columns;
    const T *row_halves = pairs.anchors.half_norms + row,
            *column_halves = pairs.candidates.half_norms + first;
    uint32_t reached = 0;
    for (int32_t r = 0; r < tiles * kTileRows; ++r) {
      const Vector<T> own = broadcast<T>(row_halves[r]);
      const Vector<T> row_reach = broadcast<T>(reach ? reach[row + r] : T(0));
      uint64_t close = 0;
#pragma GCC unroll 2
      for (int v = 0; v < kPanelVectors; ++v) {
        const int at = v * kLanes<T>;
        const Vector<T> norms = own + load_vector<T>(column_halves + at);
        const Vector<T> apart = norms - load_vector<T>(products + r * columns + at);
        const Vector<T> value = apart > 0 ? apart : Vector<T>{};
        store_vector(value, half + r * kBlockRows + panel * columns + at);
        const Vector<T> bar = multiply_add(norms, broadcast<T>(T(kNear)), broadcast<T>(pairs.tiny));
        close |= uint64_t(~lanes_not_above(bar, value) & kAllLanes<T>) << at;
        if (reach) {
          Vector<T> farthest = row_reach;
          if (pairs.symmetric) {
            const Vector<T> column_reach = load_vector<T>(reach + first + at);
            farthest = column_reach > farthest ? column_reach : farthest;
          }
          reached |= ~lanes_not_above(farthest, value) & kAllLanes<T>;
        }
      }
      if (reach) reached |= close != 0;  // their distances are measured, and may be within reach after all
      if (__builtin_expect(close && near, 0)) list_near(r * kBlockRows + panel * columns, close);
    }
    active |= reached;
  }

  // What lies behind the last row may be among them.
  __attribute__((noinline)) void list_near(int32_t first, uint64_t close) {
    for (; close; close &= close - 1) near[found++] = first + __builtin_ctzll(close);
  }
};

template <class T>
bool half_squares(const Pairs<T>& pairs, int32_t row, int32_t column, const T* reach, T* half, int32_t* near,
                  int32_t* near_count) {
  constexpr int columns = kPanelColumns<T>;
  alignas(64) T products[kBlockRows * columns];
  const auto pieces = [](int32_t left, int size) {
    return ((left < kBlockRows ? left : kBlockRows) + size - 1) / size;
  };
  const int32_t tiles = pieces(pairs.anchors.count - row, kTileRows);
  const int32_t panels = pieces(pairs.candidates.count - column, columns);
  Stripe<T> stripe = {pairs, row, column, reach, half, near, products, reach ? 0u : 1u};
  const Panels<T> candidates = {pairs.candidates.panels.panel(column / columns), columns, pairs.width};
  walk_panels(
      pairs.anchors.panels.panel(row / kTileRows), candidates, panels, products,
      [&](int32_t) { return tiles; },
      [&](int32_t panel, int32_t count) __attribute__((always_inline)) { stripe.take(panel, count); });
  for (int32_t r = 0; r < kBlockRows; ++r)
    for (int32_t c = r < tiles * kTileRows ? panels * columns : 0; c < kBlockRows; ++c)
      half[r * kBlockRows + c] = kInfinity<T>;
  if (near) *near_count = stripe.found;
  return stripe.active != 0;
}

template <class T>
void to_distances(T* values, int64_t count, Distance distance, T factor, T* scaled) {
  if (distance == Distance::cosine) return;
  const Vector<T> factors = broadcast<T>(factor);
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    const Vector<T> square = load_vector<T>(values + i) * T(2);
    const Vector<T> value = distance == Distance::euclidean ? square_root(square) : square * factors;
    if (scaled) store_vector(value, scaled + i);
    const Vector<T> largest = value < kInfinity<T> ? broadcast<T>(kLargest<T>) : value;
    store_vector(keep_least(value * factors, largest), values + i);
  }
}

template <class T>
void transpose_block(const T* from, T* to) {
  constexpr int lanes = kLanes<T>;
  for (int r = 0; r < kBlockRows; r += lanes)
    for (int c = 0; c < kBlockRows; c += lanes) {
      Vector<T> square[lanes];
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i) square[i] = load_vector<T>(from + (r + i) * kBlockRows + c);
      transpose<T>(square);
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i) store_vector(square[i], to + (c + i) * kBlockRows + r);
    }
}

// weights += other (if any), / distances (if any; 0 where the distance is 0).
template <class T>
void combine(T* weights, int64_t count, const T* other, const T* distances) {
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    Vector<T> weight = load_vector<T>(weights + i);
    if (other) weight += load_vector<T>(other + i);
    if (distances) {
      const Vector<T> distance = load_vector<T>(distances + i);
      weight = distance > 0 ? weight / distance : Vector<T>{};
    }
    store_vector(weight, weights + i);
  }
}

// sums[r] += sum over c of weights[r][c] * rows[c], a tile's rows and a panel's columns at a time, and
// totals[r] += that of the weights alone. Each block is summed by itself first.
template <class T>
void accumulate(const T* weights, const T* rows, int64_t width, int64_t stride, T* sums, double* totals) {
  constexpr int columns = kPanelColumns<T>, tiles = kBlockRows / kTileRows;
  bool wanted[tiles];
  for (int tile = 0; tile < tiles; ++tile) {
    wanted[tile] = false;
    for (int r = tile * kTileRows; r < (tile + 1) * kTileRows; ++r) {
      Vector<T> total = {}, size = {};
      for (int c = 0; c < kBlockRows; c += kLanes<T>) {
        const Vector<T> weight = load_vector<T>(weights + r * kBlockRows + c);
        total += weight;
        size += weight > 0 ? weight : -weight;
      }
      if (sum_lanes<T>(size) == 0) continue;
      wanted[tile] = true;
      totals[r] += sum_lanes<T>(total);
    }
  }
  for (int64_t d = 0; d < width; d += columns)
    for (int tile = 0; tile < tiles; ++tile) {
      if (!wanted[tile]) continue;
      const T* weight = weights + tile * kTileRows * kBlockRows;
      const T* row = rows + d;
      Vector<T> sum[kTileRows][kPanelVectors] = {};
      for (int c = 0; c < kBlockRows; ++c, row += stride) {
        Vector<T> values[kPanelVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kPanelVectors; ++v) values[v] = load_vector<T>(row + v * kLanes<T>);
#pragma GCC unroll 16
        for (int r = 0; r < kTileRows; ++r) {
          const Vector<T> one = broadcast<T>(weight[r * kBlockRows + c]);
#pragma GCC unroll 2
          for (int v = 0; v < kPanelVectors; ++v) sum[r][v] = multiply_add(one, values[v], sum[r][v]);
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) {
        T* to = sums + (tile * kTileRows + r) * stride + d;
#pragma GCC unroll 2
        for (int v = 0; v < kPanelVectors; ++v)
          store_vector(load_vector<T>(to + v * kLanes<T>) + sum[r][v], to + v * kLanes<T>);
      }
    }
}

}  // namespace
}  // namespace tripletops
