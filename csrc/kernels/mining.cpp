// The order of work around the kernels: order rows by class, survey and pack them, walk the tiles, settle
// what the walk found, measure the winners from the rows themselves.
#include "mining.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "classes.h"
#include "hash.h"
#include "parallel.h"
#include "scratch.h"

namespace tripletops {
namespace {

constexpr int32_t kBlockRows = 96;      // anchors that share one pass over a panel
constexpr int32_t kPanelsPerTask = 16;  // candidate panels of one task
constexpr int32_t kRowsPerTask = 256;  // fixed, so that sums over rows do not depend on the number of threads
constexpr int32_t kPadding = 64;       // at least a tile's rows and a panel's columns
constexpr int kPullsInT = 32;  // terms of a gradient row that are summed in T before they go into double
constexpr double kShrink = 0x1p-20;   // keeps a task's sum of the largest deviations finite
constexpr double kSerialBelow = 3e6;  // multiply-adds that are done before a second thread would have woken

template <class T>
struct Mining {
  const Kernels<T>& kernels;
  Pool pool;
  const Batch& batch;
  const Selection& selection;

  Scratch scratch;
  int64_t width = 0;
  Classes classes;
  std::vector<T*> buffers;                                         // one per worker
  Normaliser *anchor_units = nullptr, *candidate_units = nullptr;  // by row; cosine only
  double scale = 1;  // a power of two near 1 / the spread of the rows
  Frame<T> frame;
  Walk<T> walk;
  std::vector<Picks<T>> positives, negatives;  // one per worker, then merged into the first

  Mining(const Kernels<T>& kernels, const Pool& pool, const Batch& batch, const Selection& selection)
      : kernels(kernels), pool(pool), batch(batch), selection(selection), width(batch.anchors.width) {
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

  int32_t block_tiles() const { return kBlockRows / kernels.tile_rows; }

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

  const T* zeros() {
    T* row = scratch.template take<T>(width);
    std::fill(row, row + width, T(0));
    return row;
  }

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
  bool prepare(bool wants_products) {
    const bool cosine = selection.distance == Distance::cosine;
    double* sums = scratch.template take<double>(width);
    std::fill(sums, sums + width, 0.0);
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
    if (walk.symmetric) pack_side(batch.candidates, candidate_units, walk.candidates);
    return true;
  }

  void place_self() {
    const Order &anchors = classes.anchors, &candidates = classes.candidates;
    int32_t* position_of = nullptr;  // candidate row -> position
    if (batch.self_index) {
      position_of = scratch.template take<int32_t>(batch.candidates.count);
      std::fill(position_of, position_of + batch.candidates.count, -1);
      for (int32_t c = 0; c < candidates.count; ++c) position_of[candidates.index[c]] = c;
    }
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

  // An anchor without a pick holds the largest finite key: above every key of scaled rows, below the infinity
  // of an excluded pair.
  std::vector<Picks<T>> fresh_picks() {
    const int64_t length = classes.anchors.count + kPadding;
    std::vector<Picks<T>> picks;
    for (int worker = 0; worker < pool.threads; ++worker) {
      picks.push_back({scratch.template take<T>(length), scratch.template take<int32_t>(length)});
      std::fill(picks.back().key, picks.back().key + length, std::numeric_limits<T>::max());
      std::fill(picks.back().index, picks.back().index + length, kNobody);
    }
    return picks;
  }

  // The order of merging does not matter: (key, index) has one minimum.
  void merge(std::vector<Picks<T>>& picks) {
    for (size_t worker = 1; worker < picks.size(); ++worker)
      for (int32_t a = 0; a < classes.anchors.count; ++a)
        improve(picks[worker].key[a], picks[worker].index[a], picks[0].key + a, picks[0].index + a);
  }

  struct Task {
    int32_t tile_begin, tile_end, panel_begin, panel_end;
  };

  // A task's anchors pass by in blocks; its candidates are packed first where that has not been done.
  void walk_tasks(const std::vector<Task>& tasks) {
    const int lanes = walk.candidates.lanes;
    const bool packed_before = walk.candidates.panels.packed != nullptr;
    std::vector<T*> products;
    std::vector<Panels<T>> packed;
    for (int worker = 0; worker < pool.threads; ++worker) {
      products.push_back(scratch.template take<T>(int64_t(block_tiles()) * walk.anchors.lanes * lanes));
      if (!packed_before) packed.push_back(room_for(kPanelsPerTask, lanes));
    }
    for_each_task(pool, int64_t(tasks.size()), [&](int64_t i, int worker) {
      const Task& task = tasks[size_t(i)];
      for (int32_t begin = task.panel_begin; begin < task.panel_end; begin += kPanelsPerTask) {
        const int32_t end = std::min(begin + kPanelsPerTask, task.panel_end);
        if (!packed_before)
          for (int32_t panel = begin; panel < end; ++panel)
            kernels.pack(batch.candidates, frame, candidate_units, walk.candidates, panel,
                         from_panel(packed[worker], panel - begin, lanes), buffers[worker]);
        const Panels<T> panels =
            packed_before ? from_panel(walk.candidates.panels, begin, lanes) : packed[worker];
        for (int32_t tile = task.tile_begin; tile < task.tile_end; tile += block_tiles())
          kernels.walk(walk, tile, std::min(tile + block_tiles(), task.tile_end), begin, end, panels,
                       positives[worker], negatives[worker], products[worker]);
      }
    });
  }

  void walk_everything() {
    const int32_t tiles = panels_of(walk.anchors), panels = panels_of(walk.candidates);
    std::vector<Task> tasks;
    const int32_t step = std::clamp(panels / (4 * pool.threads), 1, kPanelsPerTask);
    const int32_t block = walk.symmetric ? block_tiles() : tiles;
    for (int32_t tile = 0; tile < tiles; tile += block)
      for (int32_t panel = walk.symmetric ? tile * walk.anchors.lanes / walk.candidates.lanes : 0;
           panel < panels; panel += step)
        tasks.push_back({tile, std::min(tile + block, tiles), panel, std::min(panel + step, panels)});
    walk_tasks(tasks);
  }

  // Only the tiles that touch a class's own block.
  void walk_class_blocks() {
    const int32_t tiles = panels_of(walk.anchors);
    const int32_t class_size = classes.candidates.count / std::max(classes.count, 1);
    const int32_t step = std::clamp(class_size / walk.anchors.lanes, 1, block_tiles());
    std::vector<Task> tasks;
    for (int32_t tile = 0; tile < tiles; tile += step) {
      const int32_t end = std::min(tile + step, tiles);
      const int32_t first_row = tile * walk.anchors.lanes;
      const int32_t last_row = std::min(end * walk.anchors.lanes, classes.anchors.count) - 1;
      int32_t first = walk.candidate_begin[classes.anchors.group[first_row]];
      const int32_t last = walk.candidate_begin[classes.anchors.group[last_row] + 1] - 1;
      if (walk.symmetric) first = std::max(first, first_row);
      if (first <= last)
        tasks.push_back({tile, end, first / walk.candidates.lanes, last / walk.candidates.lanes + 1});
    }
    walk_tasks(tasks);
  }

  // A uniform candidate out of the anchor's class (or out of all others), self aside; kNobody if there is
  // none.
  int32_t draw(int32_t anchor, bool same_class) const {
    const uint64_t row_seed = hash_anchor(selection.seed, uint64_t(classes.anchors.index[anchor]));
    const int32_t group = classes.anchors.group[anchor], self = walk.self_position[anchor];
    const int32_t begin = walk.candidate_begin[group], end = walk.candidate_begin[group + 1];
    bool any = false;
    uint32_t best = 0;
    const auto draw_from = [&](int32_t from, int32_t to) {
      const bool inside = self >= from && self < to;
      any = kernels.draw(row_seed, classes.candidates.index, from, inside ? self : to, any, &best);
      if (inside) any = kernels.draw(row_seed, classes.candidates.index, self + 1, to, any, &best);
    };
    if (same_class) {
      draw_from(begin, end);
    } else {
      draw_from(0, begin);
      draw_from(end, classes.candidates.count);
    }
    return any ? int32_t(unhash_candidate(row_seed, best)) : kNobody;
  }

  void draw_all(bool same_class, Picks<T> picks) {
    for_each_range(pool, classes.anchors.count, kRowsPerTask, [&](int64_t begin, int64_t end, int) {
      for (int64_t a = begin; a < end; ++a) picks.index[a] = draw(int32_t(a), same_class);
    });
  }

  T key_of(int32_t anchor, int32_t candidate) {
    T *row_buffer = buffers[0], *framed = row_buffer + width;
    const T* row = kernels.load(batch.candidates, candidate, row_buffer);
    const T half_norm =
        kernels.frame(row, frame, candidate_units ? candidate_units + candidate : nullptr, width, framed);
    return kernels.key(walk, anchor, framed, half_norm);
  }

  // The semi-hard scan starts above the key of the picked positive, computed as the scan computes its own.
  void set_floor() {
    T* floor = scratch.template take<T>(classes.anchors.count + kPadding);
    std::fill(floor, floor + classes.anchors.count + kPadding, std::numeric_limits<T>::infinity());
    for (int32_t a = 0; a < classes.anchors.count; ++a) {
      const int32_t positive = positives[0].index[a];
      if (positive == kNobody) continue;
      if (selection.positive == Positive::random)
        floor[a] = key_of(a, positive);
      else
        floor[a] = walk.positive == Rule::farthest ? -positives[0].key[a] : positives[0].key[a];
    }
    walk.floor = floor;
  }

  // The smallest index of a class's candidates, self aside. Within a class positions ascend with the index.
  int32_t lowest(int32_t anchor, int32_t group) const {
    int32_t position = walk.candidate_begin[group];
    if (position == walk.self_position[anchor]) ++position;
    return position < walk.candidate_begin[group + 1] ? classes.candidates.index[position] : kNobody;
  }

  // From a zero row everything has S = 0, and the tie goes to the lowest index; products would show rounding
  // instead.
  void settle_zero_rows() {
    for (int32_t a = 0; a < classes.anchors.count; ++a) {
      if (!std::isinf(anchor_units[classes.anchors.index[a]].norm)) continue;
      const int32_t own = classes.anchors.group[a];
      if (selection.positive != Positive::random) positives[0].index[a] = lowest(a, own);
      if (selection.negative == Negative::random) continue;
      int32_t best = kNobody;
      // Classes are numbered by their lowest index: behind one that starts later than the best, all do.
      for (int32_t group = 0; group < classes.count && selection.negative != Negative::semihard; ++group) {
        if (group != own) best = std::min(best, lowest(a, group));
        if (best != kNobody && classes.candidates.index[walk.candidate_begin[group]] > best) break;
      }
      negatives[0].index[a] = best;
    }
  }

  void select() {
    constexpr Rule positive_rules[] = {Rule::farthest, Rule::nearest, Rule::nothing};
    constexpr Rule negative_rules[] = {Rule::nearest, Rule::beyond, Rule::farthest, Rule::nothing};
    const Rule positive = positive_rules[int(selection.positive)],
               negative = negative_rules[int(selection.negative)];

    positives = fresh_picks();
    negatives = fresh_picks();
    if (positive == Rule::nothing) draw_all(true, positives[0]);
    if (negative == Rule::nothing) draw_all(false, negatives[0]);
    walk.positive = positive;
    if (negative == Rule::beyond || negative == Rule::nothing) {
      if (positive != Rule::nothing) walk_class_blocks();
      merge(positives);
      if (negative == Rule::nothing) return;
      set_floor();
      walk.positive = Rule::nothing;
      walk.negative = negative;
      walk_everything();
    } else {
      walk.negative = negative;
      walk_everything();
      merge(positives);
    }
    merge(negatives);
  }

  Pair<T> pair(const T* x, const T* y, int64_t anchor, int64_t candidate) const {
    if (selection.distance != Distance::cosine) return {x, y, {}, {}};
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
      const T d = T(kernels.measure(pair(x, y, classes.anchors.index[anchor], index), width,
                                    selection.distance, scale));
      if (d > floor) improve(d, index, &nearest, &best);
    }
    *found = nearest;
    return best;
  }

  void report(int64_t* positive, int64_t* negative, T* d_ap, T* d_an) {
    for_each_range(pool, classes.anchors.count, kRowsPerTask, [&](int64_t begin, int64_t end, int worker) {
      T *x_buffer = buffers[worker], *y_buffer = x_buffer + width;
      for (int32_t a = int32_t(begin); a < end; ++a) {
        const int32_t row = classes.anchors.index[a];
        const T* x = kernels.load(batch.anchors, row, x_buffer);
        const auto reported = [&](int32_t candidate) {
          const T* y = kernels.load(batch.candidates, candidate, y_buffer);
          return T(kernels.measure(pair(x, y, row, candidate), width, selection.distance, scale));
        };
        const int32_t p = positives[0].index[a];
        int32_t n = negatives[0].index[a];
        if (p != kNobody) positive[row] = p, d_ap[row] = reported(p);
        if (n == kNobody) continue;
        T distance = reported(n);
        if (selection.negative == Negative::semihard && !(distance > d_ap[row]))
          n = scan_rows(a, x, d_ap[row], y_buffer, &distance);
        if (n != kNobody) negative[row] = n, d_an[row] = distance;
      }
    });
  }
};

double softplus(double z) { return std::max(z, 0.0) + std::log1p(std::exp(-std::abs(z))); }
double logistic(double z) { return z >= 0 ? 1 / (1 + std::exp(-z)) : std::exp(z) / (1 + std::exp(z)); }

struct Term {
  double loss, slope_ap, slope_an;
};

// The loss of one triplet and its derivatives by d_ap and d_an; S = 1 - d under cosine.
Term triplet_term(const Objective& objective, double d_ap, double d_an) {
  const double s_ap = 1 - d_ap, s_an = 1 - d_an, tau = objective.temperature;
  double z = 0, dz_ap = 0, dz_an = 0;
  switch (objective.loss) {
    case Loss::margin: {
      z = d_ap - d_an + objective.margin;
      if (z > 0) return {z, 1, -1};
      return {z == z ? 0 : z, 0, 0};
    }
    case Loss::soft_margin:
      z = d_ap - d_an, dz_ap = 1, dz_an = -1;
      break;
    case Loss::first_order:
      z = (d_ap - d_an) / tau, dz_ap = 1 / tau, dz_an = -1 / tau;
      break;
    case Loss::second_order:  // S_ap^2/2 - S_ap + 1/2 = d_ap^2/2
      z = (0.5 * s_an * s_an - s_ap + 0.5 * s_ap * s_ap) / tau, dz_ap = d_ap / tau, dz_an = -s_an / tau;
      break;
  }
  const double sigma = logistic(z);
  return {softplus(z), sigma * dz_ap, sigma * dz_an};
}

}  // namespace

template <class T>
bool mine(const Kernels<T>& kernels, const Pool& pool, const Batch& batch, const Selection& selection,
          int64_t* positive, int64_t* negative, T* d_ap, T* d_an) {
  const int64_t count = batch.anchors.count;
  std::fill(positive, positive + count, -1);
  std::fill(negative, negative + count, -1);
  std::fill(d_ap, d_ap + count, std::numeric_limits<T>::quiet_NaN());
  std::fill(d_an, d_an + count, std::numeric_limits<T>::quiet_NaN());
  if (count == 0) return true;

  Mining<T> mining(kernels, pool, batch, selection);
  const bool random = selection.positive == Positive::random && selection.negative == Negative::random;
  if (!mining.prepare(!random)) return false;
  if (mining.classes.anchors.count == 0) return true;
  mining.select();
  if (selection.distance == Distance::cosine && batch.anchors.width > 0) mining.settle_zero_rows();
  mining.report(positive, negative, d_ap, d_an);
  return true;
}

template <class T>
void score(const Objective& objective, bool finite, int64_t anchors, const int64_t* positive,
           const int64_t* negative, const T* d_ap, const T* d_an, T* loss, T* slope_ap, T* slope_an) {
  const bool per_anchor = objective.reduction == Reduction::none;
  double total = 0;
  int64_t counted = 0;
  for (int64_t i = 0; i < anchors; ++i) {
    Term term = {0, 0, 0};
    if (!finite) {
      const double nan = std::numeric_limits<double>::quiet_NaN();
      term = {nan, nan, nan};
    } else if (positive[i] >= 0 && negative[i] >= 0) {
      term = triplet_term(objective, double(d_ap[i]), double(d_an[i]));
      counted += objective.reduction == Reduction::mean || T(term.loss) > 0;
    }
    if (per_anchor) loss[i] = T(term.loss);
    total += term.loss;
    slope_ap[i] = T(term.slope_ap);
    slope_an[i] = T(term.slope_an);
  }
  if (per_anchor) return;
  const bool mean = objective.reduction != Reduction::sum;
  const double share = mean ? 1 / double(std::max<int64_t>(counted, 1)) : 1;
  *loss = T(total * share);
  if (mean)
    for (int64_t i = 0; i < anchors; ++i)
      slope_ap[i] = T(slope_ap[i] * share), slope_an[i] = T(slope_an[i] * share);
}

template <class T>
void differentiate(const Kernels<T>& kernels, const Pool& given_pool, const Rows& anchors,
                   const Rows& candidates, bool self_mining, Distance distance, const int64_t* positive,
                   const int64_t* negative, const T* d_ap, const T* d_an, const T* slope_ap,
                   const T* slope_an, const T* upstream, bool upstream_per_anchor, void* anchor_gradient,
                   void* candidate_gradient) {
  Scratch scratch;
  Pool pool = given_pool;
  const int64_t width = anchors.width;
  if (double(anchors.count + candidates.count) * double(width) < 1e5) pool.threads = 1;
  const bool cosine = distance == Distance::cosine;

  // Which anchors picked each candidate: 2 * anchor, + 1 where it is the negative; in the order of the
  // anchors.
  int64_t* begin = scratch.take<int64_t>(candidates.count + 2);
  int64_t* entries = scratch.take<int64_t>(2 * anchors.count);
  std::fill(begin, begin + candidates.count + 2, int64_t(0));
  bool poisoned = false;
  const auto valid = [&](int64_t anchor) { return positive[anchor] >= 0 && negative[anchor] >= 0; };
  for (int64_t i = 0; i < anchors.count; ++i) {
    if (valid(i))
      ++begin[positive[i] + 2], ++begin[negative[i] + 2];
    else
      poisoned |= slope_ap[i] != slope_ap[i];
  }
  for (int64_t c = 0; c < candidates.count; ++c) begin[c + 2] += begin[c + 1];
  for (int64_t i = 0; i < anchors.count; ++i)
    if (valid(i)) entries[begin[positive[i] + 1]++] = 2 * i, entries[begin[negative[i] + 1]++] = 2 * i + 1;

  std::vector<T*> buffers;
  std::vector<double*> sums;
  for (int worker = 0; worker < pool.threads; ++worker) {
    buffers.push_back(scratch.take<T>(3 * width));
    sums.push_back(scratch.take<double>(width));
  }
  const auto weight = [&](int64_t entry) {
    const int64_t i = entry / 2;
    return double(entry % 2 ? slope_an[i] : slope_ap[i]) * double(upstream[upstream_per_anchor ? i : 0]);
  };

  const auto fill_rows = [&](const Rows& rows, void* gradient, bool as_anchor, bool as_candidate) {
    if (!gradient) return;
    const int64_t bytes = rows.storage == Storage::float64 ? 8 : rows.storage == Storage::float32 ? 4 : 2;
    for_each_range(pool, rows.count, kRowsPerTask, [&](int64_t from, int64_t to, int worker) {
      double* sum = sums[worker];
      T *x_buffer = buffers[worker], *y_buffer = x_buffer + width, *part = y_buffer + width;
      for (int64_t row = from; row < to; ++row) {
        void* out = static_cast<char*>(gradient) + row * width * bytes;
        const bool anchor = as_anchor && valid(row);
        const bool picked = as_candidate && begin[row] != begin[row + 1];
        std::fill(part, part + width, poisoned ? std::numeric_limits<T>::quiet_NaN() : T(0));
        if (anchor || picked) {
          const T* x = kernels.load(rows, row, x_buffer);
          const Normaliser x_unit = cosine ? kernels.normalise(x, width) : Normaliser{};
          // A few pulls add up in T, many of them in double: a row that everybody picked loses no digits.
          int64_t pulls = 0;
          const auto flush = [&] {
            if (pulls == kPullsInT) std::fill(sum, sum + width, 0.0);
            for (int64_t d = 0; d < width; ++d) sum[d] += double(part[d]), part[d] = 0;
          };
          const auto pull = [&](const Rows& others, int64_t other, int64_t entry) {
            const T* y = kernels.load(others, other, y_buffer);
            const Normaliser y_unit = cosine ? kernels.normalise(y, width) : Normaliser{};
            kernels.pull({x, y, x_unit, y_unit}, width, distance,
                         double(entry % 2 ? d_an[entry / 2] : d_ap[entry / 2]), weight(entry), part);
            if (++pulls % kPullsInT == 0) flush();
          };
          if (anchor) pull(candidates, positive[row], 2 * row), pull(candidates, negative[row], 2 * row + 1);
          if (picked)
            for (int64_t e = begin[row]; e < begin[row + 1]; ++e) pull(anchors, entries[e] / 2, entries[e]);
          if (pulls >= kPullsInT)
            for (int64_t d = 0; d < width; ++d) part[d] = T(sum[d] + double(part[d]));
        }
        kernels.store(part, width, rows.storage, out);
      }
    });
  };
  fill_rows(anchors, anchor_gradient, true, self_mining);
  if (!self_mining) fill_rows(candidates, candidate_gradient, false, true);
}

#define TRIPLETOPS_INSTANTIATE(T)                                                                           \
  template bool mine<T>(const Kernels<T>&, const Pool&, const Batch&, const Selection&, int64_t*, int64_t*, \
                        T*, T*);                                                                            \
  template void score<T>(const Objective&, bool, int64_t, const int64_t*, const int64_t*, const T*,         \
                         const T*, T*, T*, T*);                                                             \
  template void differentiate<T>(const Kernels<T>&, const Pool&, const Rows&, const Rows&, bool, Distance,  \
                                 const int64_t*, const int64_t*, const T*, const T*, const T*, const T*,    \
                                 const T*, bool, void*, void*);
TRIPLETOPS_INSTANTIATE(float)
TRIPLETOPS_INSTANTIATE(double)

}  // namespace tripletops
