// What the kernels are given and what they give back: plain structs on raw pointers, shared by the
// instruction-set variants (which may define no weak symbol) and by the driver in mining.cpp.
#pragma once

#include <cstdint>

namespace tripletops {

// The order of every enum is the order of the word tables in tripletops/ops.py.
enum class Positive : int { hard, easy, random, all };
enum class Negative : int { hard, semihard, easy, random, distance, all };
enum class Distance : int { euclidean, sqeuclidean, cosine };
enum class Loss : int { margin, soft_margin, first_order, second_order };
enum class Reduction : int { mean, mean_nonzero, sum, none };

// What is kept of a tile for each anchor. `beyond` is the nearest candidate strictly farther than the
// anchor's floor.
enum class Rule : int { nothing, nearest, farthest, beyond };

enum class Storage : int { float32, float64, float16, bfloat16 };

// A matrix as the user holds it. `stride` counts elements from row to row; the elements of a row are
// adjacent.
struct Rows {
  const void* data = nullptr;
  int64_t count = 0;
  int64_t width = 0;
  int64_t stride = 0;
  Storage storage = Storage::float32;
};

// x * scale / norm is the unit row; scale is a power of two that keeps the squares of extreme rows finite.
// The norm of a zero row is given as infinity, which makes its unit row zero. The gradient of a tiny row may
// overflow, and the sum of two overflows may be NaN: so it is added up divided by `lift`, a power of two, and
// multiplied by it once, at the end. Other rows have a lift of 1.
struct Normaliser {
  double scale = 1;
  double norm = 1;
  double lift = 1;
};

// How a row becomes what the Gram product is taken of: x * scale - centre, or the unit row - unit_centre. The
// latter is subtracted in double: unit rows that nearly agree would lose their differences to the rounding of
// T.
template <class T>
struct Frame {
  const T* centre = nullptr;  // (width,), already scaled; zero for unit rows
  T scale = 1;                // a power of two that keeps every product finite
  const double* unit_centre = nullptr;
};

// Rows packed for the Gram product, `lanes` of them to a panel: packed[d * lanes + lane].
template <class T>
struct Panels {
  T* packed = nullptr;
  T* half_norms = nullptr;   // |x|^2 / 2 of each row; NaN behind the last, which no comparison picks
  int32_t* first = nullptr;  // the smallest index in each panel
};

// One side of the Gram product, its rows ordered by class.
template <class T>
struct Side {
  int32_t count = 0;
  int32_t lanes = 0;
  const int32_t* index = nullptr;  // position -> row as the user counts
  const int32_t* group = nullptr;  // position -> class, ascending
  Panels<T> panels;                // all of them, or none where they are packed as they are needed
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

constexpr int32_t kBlockRows = 96;   // anchors that share one pass over a panel
constexpr int32_t kBufferRows = 64;  // at least a panel's columns, or twice a tile's rows and a vector more
constexpr int32_t kNobody = INT32_MAX;  // an index larger than every candidate's

template <class T>
struct Walk {
  Side<T> anchors, candidates;
  int64_t width = 0;
  bool symmetric = false;                    // the two sides are the same rows
  bool exclude_self_everywhere = false;      // self_index may name a row of another class
  const int32_t* self_position = nullptr;    // anchor position -> candidate position, or -1
  const int32_t* candidate_begin = nullptr;  // class -> first candidate position; one more entry at the end
  Rule positive = Rule::nothing, negative = Rule::nothing;
  const T* floor = nullptr;  // Rule::beyond: the key of each anchor's positive
  T tiny = 0;                // half squared distances below it may have lost their digits to underflow
};

// What the negatives of an anchor cost, all of them. Anchors and candidates are counted by position.
enum class Cost : int {
  hinge,       // sum over the anchor's thresholds t of [t - d]+
  soft,        // sum over the anchor's thresholds t of softplus(t - d)
  exponential  // ln(1 + sum of e^(rate (offset - d)) over the negatives with d < limit), the offset aside
};

template <class T>
struct Costs {
  Cost kind = Cost::hinge;
  const int64_t* begin = nullptr;  // anchor -> its first threshold; one more entry at the end
  const T* threshold = nullptr;    // ascending
  const T* limit = nullptr;        // by anchor
  double rate = 0;

  // With `hinge`: threshold -> negatives between it and the one before. Backward counts all of them, forward
  // only those of anchors with many thresholds, whose loss lacks the thresholds' part.
  int32_t* hits = nullptr;

  // With `exponential`, by anchor: the nearest negative so far, and the sum of e^(rate (nearest - d)) over
  // the negatives so far. Backward: the nearest of all, and ln(1 + sum) relative to its exponent.
  T* nearest = nullptr;
  double* sum = nullptr;
  const T* log_sum = nullptr;

  double *loss = nullptr, *active = nullptr;  // forward, by anchor
  const T* weight = nullptr;                  // backward, by anchor: what its loss is multiplied by
  // Backward with `soft`: threshold -> the sum of its slopes.
  double* slope = nullptr;
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

// The functions that every instruction-set variant provides for one compute type.
template <class T>
struct Kernels {
  int tile_rows, panel_columns;

  // Row `row` as T: in place where it is stored so, else unpacked into `buffer`.
  const T* (*load)(const Rows&, int64_t row, T* buffer);
  void (*store)(const T* values, int64_t width, Storage, void* row);
  bool (*all_finite)(const T* values, int64_t count);
  // Adds the deviations of rows [begin, end) of `index` from `origin`, times `shrink`, to sums and stores the
  // largest one of each row in `largest`. With `units` it first normalises the rows and takes `unit_origin`
  // away, in double: unit rows that nearly agree would lose their differences to the rounding of T. A
  // non-finite element makes its sum non-finite.
  void (*survey)(const Rows&, const int32_t* index, int32_t begin, int32_t end, const T* origin, T shrink,
                 Normaliser* units, const double* unit_origin, T* sums, T* largest, T* buffer);
  // The framed row, and half its squared norm; `unit` is null but for cosine. Rounds as `pack` does.
  T (*frame)(const T* row, const Frame<T>&, const Normaliser* unit, int64_t width, T* framed);
  // Packs panel `panel` of `side` into the first of `panels`. `buffer`: kBufferRows rows and more.
  void (*pack)(const Rows&, const Frame<T>&, const Normaliser* units, const Side<T>& side, int32_t panel,
               const Panels<T>& panels, T* buffer);
  // Selection over anchor tiles [tile_begin, tile_end) x candidate panels [panel_begin, panel_end); `panels`
  // holds the latter from the first one on.
  void (*walk)(const Walk<T>&, int32_t tile_begin, int32_t tile_end, int32_t panel_begin, int32_t panel_end,
               const Panels<T>& panels, Picks<T> positives, Picks<T> negatives, T* products);
  // The key that `walk` computes for an anchor and a framed candidate, bit for bit.
  T (*key)(const Walk<T>&, int32_t anchor, const T* framed, T half_norm);
  // The largest hash of the candidates in positions [begin, end) and of `best`, if there is `any` so far.
  bool (*draw)(uint64_t row_seed, const int32_t* index, int32_t begin, int32_t end, bool any, uint32_t* best);
  // Blocks: kBlockRows x kBlockRows values, of the anchors from `row` and the candidates from `column` on;
  // infinite behind the last of them. False where no half squared distance is below both sides' `reach`
  // (null: no such limit), then the block is not used. `near` receives the entries that are too close for
  // Gram arithmetic.
  bool (*half_squares)(const Walk<T>&, int32_t row, int32_t column, const T* reach, T* half, int32_t* near,
                       int32_t* near_count);
  // `factor` takes the scale of the frame back. `scaled` receives euclidean distances before that, which may
  // make subnormal numbers of them; null: they are not wanted.
  void (*to_distances)(T* half_squares, Distance, T factor, T* scaled);
  void (*transpose)(const T* block, T* transposed);
  void (*combine)(T* weights, const T* other, const T* distances);
  void (*accumulate)(const T* weights, const T* rows, int64_t width, int64_t stride, T* sums, double* totals);
  // A block of distances to the anchors from `anchor` on, `count` of them. `weights`: d loss / d distance.
  void (*add_costs)(const Costs<T>&, int32_t anchor, int32_t count, const T* distances);
  void (*weigh)(const Costs<T>&, int32_t anchor, int32_t count, const T* distances, T* weights);
  // A block of half squared distances; `index` tells the candidates' rows.
  void (*keep_beyond)(const Floors<T>&, int32_t anchor, int32_t count, const T* half, const int32_t* index);
  void (*to_log_weights)(const Draws<T>&, T* half_squares);
  void (*keep_draws)(const Draws<T>&, int32_t anchor, int32_t count, int32_t candidate, const T* log_weights);

  Normaliser (*normalise)(const T* row, int64_t width);
  // The largest number that T holds stands for all larger ones: the difference of two infinities would be
  // NaN.
  double (*measure)(const Pair<T>&, int64_t width, Distance);
  // sums += weight * d(distance)/dx, where x is the row that receives and y the other one of the pair; under
  // cosine divided by the lift of x.
  void (*pull)(const Pair<T>&, int64_t width, Distance, double distance, double weight, T* sums);
};

struct Variant {
  const char* name;
  Kernels<float> single;
  Kernels<double> twice;
};

}  // namespace tripletops
