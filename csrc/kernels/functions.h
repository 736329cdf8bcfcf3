// The functions that an instruction set provides, and the plain structs that they share with the code around
// them. That code is compiled once, for every machine; the functions are compiled for each instruction set.
#pragma once

#include <limits>

#include "call.h"
#include "costs/costs.h"

namespace tripletops {

// x * scale / norm is the unit row; scale is a power of two that keeps the squares of extreme rows finite.
// The norm of a zero row is given as infinity, which makes its unit row zero. The gradient of a tiny row may
// overflow, and the sum of two overflows may be NaN: so it is added up divided by `lift`, a power of two, and
// multiplied by it once, at the end. Other rows have a lift of 1.
struct Normaliser {
  double scale = 1;
  double norm = 1;
  double lift = 1;
};

// How a row becomes what products are taken of: x * scale - centre, or the unit row - unit_centre. The latter
// is subtracted in double: unit rows that nearly agree would lose their differences to the rounding of T.
template <class T>
struct Frame {
  const T* centre = nullptr;  // (width,), already scaled; zero for unit rows
  T scale = 1;                // a power of two that keeps every product finite
  const double* unit_centre = nullptr;
};

// Rows packed for products of elements of type P, `lanes` of them to a panel: packed[d * lanes + lane].
// Nothing here depends on the type that distances are computed in.
template <class P>
struct Panels {
  P* packed = nullptr;
  int32_t lanes = 0;
  int64_t width = 0;

  __attribute__((always_inline)) P* panel(int64_t number) const { return packed + number * lanes * width; }
};

// One side of the pairs, its rows ordered by class. Arrays are padded, so that whole tiles can be read.
template <class T>
struct Side {
  int32_t count = 0;
  const int32_t* index = nullptr;  // position -> row as the user counts
  const int32_t* group = nullptr;  // position -> class, ascending
  Panels<T> panels;                // null where panels are packed as they are needed
  T* half_norms = nullptr;   // |x|^2 / 2 of each framed row; NaN behind the last, which no comparison picks
  int32_t* first = nullptr;  // the smallest index in each panel
};

// All pairs of an anchor and a candidate.
template <class T>
struct Pairs {
  Side<T> anchors, candidates;
  int64_t width = 0;
  bool symmetric = false;                    // the two sides are the same rows
  bool exclude_self_everywhere = false;      // self_index may name a row of another class
  const int32_t* self_position = nullptr;    // anchor position -> candidate position, or -1
  const int32_t* candidate_begin = nullptr;  // class -> first candidate position; one more entry at the end
  T tiny = 0;                                // half squared distances below it may have lost their digits
};

// The best candidate of each anchor so far. Keys are minimised; a tie goes to the smaller index.
template <class T>
struct Picks {
  T* key = nullptr;
  int32_t* index = nullptr;
};

namespace {
template <class T>
inline void improve(T key, int32_t index, T* best, int32_t* best_index) {
  if (key < *best || (key == *best && index < *best_index)) *best = key, *best_index = index;
}
}  // namespace

// What a pair pulls with, but for the cosine: d(distance)/dx is this times x - y.
namespace {
inline double pull_factor(Distance distance, double value, double weight) {
  return distance == Distance::euclidean ? weight / value : 2 * weight;
}
// The factor may not fit into T where the product does.
template <class T>
inline bool is_plain_pull(double value, double factor) {
  const double size = factor < 0 ? -factor : factor;
  return value < double(std::numeric_limits<T>::max()) && size > 0x1p-100 && size < 0x1p100;
}
}  // namespace

constexpr int32_t kBlockRows = 96;   // anchors that share one pass over a panel
constexpr int32_t kBufferRows = 64;  // at least a panel's columns, or twice a tile's rows and a vector more
constexpr int64_t kPulledTogether = 32;  // elements; of a block's rows they stay in the first-level cache
constexpr int32_t kNobody = INT32_MAX;   // an index larger than every candidate's

// What a search keeps for each anchor. `beyond` is the nearest candidate strictly farther than the anchor's
// floor.
enum class Keep : int { nothing, nearest, farthest, beyond };

// A search for one positive and one negative of each anchor.
template <class T>
struct Search {
  Keep positive = Keep::nothing, negative = Keep::nothing;
  const T* floor = nullptr;  // Keep::beyond: by anchor, a key
};

// For every anchor and each of its floors, which ascend: the nearest candidate beyond the floor, of those
// that are not beyond the next floor at least; and the farthest candidate of all.
template <class T>
struct Floors {
  const int64_t* begin = nullptr;  // anchor -> its first floor; one more entry at the end
  const T* floor = nullptr;
  Picks<T> beyond;    // by floor
  Picks<T> farthest;  // by anchor; keys are negated
};

// A draw by inverse distance density: log weight a ln(d^2) + b ln(1 - d^2/4) of squared distances between
// unit rows, not below `least`; weight 0 from `limit` on.
template <class T>
struct Draws {
  T a = 0, b = 0, least = 0, limit = 0;
  uint64_t seed = 0;
  const int32_t *anchor_index = nullptr, *candidate_index = nullptr;  // position -> row
  Picks<T> picks;  // the keys are minus (log weight + Gumbel noise)
};

// The two rows of a pair and what is needed to measure their distance.
template <class T>
struct Pair {
  const T *x = nullptr, *y = nullptr;
  Normaliser x_unit, y_unit;
};

// The tables hold function pointers alone. A null pointer stands for the function of the next smaller
// instruction set (dispatch.cpp).

// On single rows.
template <class T>
struct RowFunctions {
  // Row `row` as T: in place where it is stored so, else unpacked into `buffer`.
  const T* (*load)(const Matrix&, int64_t row, T* buffer);
  void (*store)(const T* values, int64_t width, Storage, void* row);
  bool (*all_finite)(const T* values, int64_t count);
  // Adds the deviations of rows [begin, end) of `index` from `origin`, times `shrink`, to sums and stores the
  // largest one of each row in `largest`. With `units` it first normalises the rows and takes `unit_origin`
  // away, in double: unit rows that nearly agree would lose their differences to the rounding of T. A
  // non-finite element makes its sum non-finite.
  void (*survey)(const Matrix&, const int32_t* index, int32_t begin, int32_t end, const T* origin, T shrink,
                 Normaliser* units, const double* unit_origin, T* sums, T* largest, T* buffer);
  // The framed row, and half its squared norm; `unit` is null but for cosine. Rounds as `pack` does.
  T (*frame)(const T* row, const Frame<T>&, const Normaliser* unit, int64_t width, T* framed);
  Normaliser (*normalise)(const T* row, int64_t width);
  // The largest number that T holds stands for all larger ones: the difference of two infinities would be
  // NaN.
  double (*measure)(const Pair<T>&, int64_t width, Distance);
  // The row in double; with `unit` the unit row.
  void (*unpack)(const T* row, const Normaliser* unit, int64_t width, double* unpacked);
  // The squared distances of x and `count` others, each rounded as that of `measure` is.
  void (*squares)(const double* x, const double* const* others, int32_t count, int64_t width,
                  double* squares);
  // sums += the sum of factor * (x - y) over `count` rows y, numbered by `others`, that lie `stride` apart.
  // `width` is at most kPulledTogether.
  void (*pull_all)(const double* x, const double* rows, int64_t stride, const int32_t* others,
                   const double* factors, int32_t count, int64_t width, T* sums);
  // sums += weight * d(distance)/dx, where x is the row that receives and y the other one of the pair; under
  // cosine divided by the lift of x.
  void (*pull)(const Pair<T>&, int64_t width, Distance, double distance, double weight, T* sums);
  // The same of `count` pairs of x, one after the other, all of them plain: sums += factor * (x - other). The
  // sums are `fresh` where they have not been written to.
  void (*pull_plainly)(const T* x, const T* const* others, const T* factors, int32_t count, int64_t width,
                       bool fresh, T* sums);
  // The largest hash of the candidates in positions [begin, end) and of `best`, if there is `any` so far.
  bool (*draw)(uint64_t row_seed, const int32_t* index, int32_t begin, int32_t end, bool any, uint32_t* best);
};

// On panels and tiles of products: functions of one layout, which belong together.
template <class T>
struct TileFunctions {
  // Packs panel `panel` of `side` to `packed`, with its norms and its smallest index. `buffer`: kBufferRows
  // rows and more.
  void (*pack)(const Matrix&, const Frame<T>&, const Normaliser* units, const Side<T>& side, int32_t lanes,
               int32_t panel, T* packed, T* half_norms, int32_t* first, T* buffer);
  // The same of tile `tile` of `anchors`, in their own room, from the panels of the same rows as candidates.
  void (*repack)(const Side<T>& candidates, int32_t tile, const Side<T>& anchors);
  // Searches anchor tiles [tile_begin, tile_end) x candidate panels [panel_begin, panel_end); `candidates`
  // holds the latter from the first one on.
  void (*search)(const Pairs<T>&, const Search<T>&, int32_t tile_begin, int32_t tile_end, int32_t panel_begin,
                 int32_t panel_end, const Side<T>& candidates, Picks<T> positives, Picks<T> negatives,
                 T* products);
  // The key that `search` computes for an anchor and a framed candidate, bit for bit.
  T (*key)(const Pairs<T>&, int32_t anchor, const T* framed, T half_norm);
  // Half the squared distances of a block: kBlockRows x kBlockRows pairs, the anchors from `row` and the
  // candidates from `column` on, infinite behind the last of them. False where none is below both sides'
  // `reach` (null: no such limit), then the block is not used. `near` receives the entries that are too close
  // for products to tell; null: they are not wanted.
  bool (*half_squares)(const Pairs<T>&, int32_t row, int32_t column, const T* reach, T* half, int32_t* near,
                       int32_t* near_count);
};

// On blocks of kBlockRows x kBlockRows values, and on `count` values that fill whole vectors.
template <class T>
struct BlockFunctions {
  // `factor` takes the scale of the frame back. `scaled` receives euclidean distances before that, which may
  // make subnormal numbers of them; null: they are not wanted.
  void (*to_distances)(T* half_squares, int64_t count, Distance, T factor, T* scaled);
  void (*transpose)(const T* block, T* transposed);
  void (*combine)(T* weights, int64_t count, const T* other, const T* distances);
  void (*accumulate)(const T* weights, const T* rows, int64_t width, int64_t stride, T* sums, double* totals);
  // Half squared distances; `index` tells the candidates' rows.
  void (*keep_beyond)(const Floors<T>&, int32_t anchor, int32_t count, const T* half, const int32_t* index);
  void (*to_log_weights)(const Draws<T>&, T* half_squares);
  void (*keep_draws)(const Draws<T>&, int32_t anchor, int32_t count, int32_t candidate, const T* log_weights);
  // What negatives cost, a pair of functions for each kind of cost.
  CostFunctions<T> hinge, softplus, exponential;
};

// Rows as integers: z = scale * q + r, by position, padded. Panel p holds the rows from p * columns on, its
// dword k of them packed[(p * depth + k) * columns + row]: four int8 or two int16. An int8 is stored with an
// offset that makes it unsigned, for there are products of unsigned with signed bytes alone.
struct Quantised {
  int bytes = 1;  // of an integer
  int32_t count = 0, columns = 0;
  int64_t depth = 0;  // dwords of a row, an even number
  uint32_t* packed = nullptr;
  int32_t* offset_sum = nullptr;  // minus the offset times the sum of q, where a sum of products begins
  float *scale = nullptr, *along = nullptr;    // along: r . z
  float *residual = nullptr, *norm = nullptr;  // |r| and |z|, not less than exactly
  float* half_norm = nullptr;                  // what stands for |z|^2 / 2 in a half squared distance
};

// What products of quantised rows are compared with (certified.h), by position.
struct Scan {
  const Quantised *anchors = nullptr, *candidates = nullptr;
  const float *row_scale = nullptr, *row_bar = nullptr, *column_bar = nullptr;
  const float *row_threshold = nullptr, *column_limit = nullptr;
  // Keep::beyond alone, else null.
  const float *row_cut = nullptr, *row_widening = nullptr, *column_ceiling = nullptr, *column_cut = nullptr;
};

// A pair that passed: `value` is the signed product less the bar of the row.
struct Hit {
  int32_t row, column;
  float value;
};

// On quantised rows; all of them or none.
struct QuantisedFunctions {
  int tile_rows, columns;                        // of a tile, whose rows are a part of a panel; of a panel
  int largest_byte, largest_half, largest_norm;  // an int8 and an int16 at most, and a row of int16
  // Panel `panel` out of `count` framed rows, one behind the other; `integers` has room for as many rows.
  void (*quantise)(const float* framed, int32_t count, int64_t width, const Quantised& to, int32_t panel,
                   uint32_t* integers);
  // Lists the pairs of the tile at `row` with the panel that pass, of those that the bits of `allowed` (by
  // row of the tile; null: all) tell; returns their number.
  int32_t (*scan)(const Scan&, int32_t row, int32_t panel, const uint32_t* allowed, Hit* hits);
  // The best candidate of each row of the tile among `count` panels, -1 where there is none.
  void (*best)(const Scan&, int32_t row, const int32_t* panels, int32_t count, int32_t* candidates);
  // Half the squared distance of x * x_scale[0] * x_scale[1] and the same of y, in float.
  float (*half_square)(const float* x, const float* y, int64_t width, const float* x_scale,
                       const float* y_scale);
  // The same in double, of framed distances: under the cosine it is the distance.
  double (*half_square_exact)(const Pair<float>&, int64_t width, Distance, double scale);
};

template <class T>
struct Functions {
  int tile_rows, panel_columns;
  RowFunctions<T> rows;
  TileFunctions<T> tiles;
  BlockFunctions<T> blocks;
  QuantisedFunctions quantised;  // of float; null where the instruction set has no fast integer products
};

// A name, the next smaller set (null: there is none), and its own functions.
struct InstructionSet {
  const char* name;
  const InstructionSet* base;
  Functions<float> single_precision;
  Functions<double> double_precision;
};

}  // namespace tripletops
