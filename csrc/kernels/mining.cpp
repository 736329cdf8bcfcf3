// The order of work around the kernels: order rows by class, survey and pack them, walk the tiles, settle
// what the walk found, measure the winners from the rows themselves.
#include "mining.h"

#include "gradient.h"
#include "hash.h"
#include "prepare.h"

namespace tripletops {
namespace {

constexpr int32_t kPanelsPerTask = 16;  // candidate panels of one task

// What the tile walk keeps; nothing where the pick is drawn, or all candidates are meant.
Rule rule_of(Positive positive) {
  return positive == Positive::hard   ? Rule::farthest
         : positive == Positive::easy ? Rule::nearest
                                      : Rule::nothing;
}
Rule rule_of(Negative negative) {
  switch (negative) {
    case Negative::hard:
      return Rule::nearest;
    case Negative::semihard:
      return Rule::beyond;
    case Negative::easy:
      return Rule::farthest;
    default:
      return Rule::nothing;
  }
}

template <class T>
struct Mining : Prepared<T> {
  using Base = Prepared<T>;
  using Base::anchor_units, Base::candidate_units, Base::frame, Base::walk, Base::pair, Base::scan_rows;
  using Base::kernels, Base::pool, Base::batch, Base::scratch, Base::width, Base::classes, Base::buffers;
  using Base::panels_of, Base::room_for, Base::from_panel;

  const Selection& selection;
  std::vector<Picks<T>> positives, negatives;  // one per worker, then merged into the first

  Mining(const Kernels<T>& kernels, const Pool& pool, const Batch& batch, const Selection& selection)
      : Base(kernels, pool, batch, selection.distance), selection(selection) {}

  int32_t block_tiles() const { return kBlockRows / kernels.tile_rows; }

  // An anchor without a pick holds the largest finite key: above every key of scaled rows, below the infinity
  // of an excluded pair.
  std::vector<Picks<T>> fresh_picks() {
    const int64_t length = classes.anchors.count + kPadding;
    std::vector<Picks<T>> picks;
    for (int worker = 0; worker < pool.threads; ++worker) {
      picks.push_back(
          {scratch.filled(length, std::numeric_limits<T>::max()), scratch.filled(length, kNobody)});
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

  // Walks the tasks task_of(0) to task_of(count - 1), made as they are taken: a list of them would grow with
  // N^2. A task's anchors pass by in blocks; its candidates are packed first where that has not been done.
  template <class TaskOf>
  void walk_tasks(int64_t count, const TaskOf& task_of) {
    const int lanes = walk.candidates.lanes;
    const bool packed_before = walk.candidates.panels.packed != nullptr;
    std::vector<T*> products;
    std::vector<Panels<T>> packed;
    for (int worker = 0; worker < pool.threads; ++worker) {
      products.push_back(scratch.template take<T>(int64_t(block_tiles()) * walk.anchors.lanes * lanes));
      if (!packed_before) packed.push_back(room_for(kPanelsPerTask, lanes));
    }
    for_each_task(pool, count, [&](int64_t i, int worker) {
      const Task task = task_of(i);
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
    const int32_t step = std::clamp(panels / (4 * pool.threads), 1, kPanelsPerTask);
    const int32_t block = walk.symmetric ? block_tiles() : tiles;
    const auto first_panel = [&](int64_t i) {
      return walk.symmetric ? int32_t(i * block * walk.anchors.lanes / walk.candidates.lanes) : 0;
    };
    std::vector<int64_t> begin = {0};  // block of anchors -> its first task; one more entry at the end
    for (int32_t tile = 0; tile < tiles; tile += block)
      begin.push_back(begin.back() + (panels - first_panel(int64_t(begin.size()) - 1) + step - 1) / step);
    walk_tasks(begin.back(), [&](int64_t task) {
      const int64_t i = std::upper_bound(begin.begin(), begin.end(), task) - begin.begin() - 1;
      const int32_t tile = int32_t(i) * block;
      const int32_t panel = first_panel(i) + int32_t(task - begin[size_t(i)]) * step;
      return Task{tile, std::min(tile + block, tiles), panel, std::min(panel + step, panels)};
    });
  }

  // Only the tiles that touch a class's own block.
  void walk_class_blocks() {
    const int32_t tiles = panels_of(walk.anchors);
    const int32_t class_size = classes.candidates.count / std::max(classes.count, 1);
    const int32_t step = std::clamp(class_size / walk.anchors.lanes, 1, block_tiles());
    walk_tasks((tiles + step - 1) / step, [&](int64_t task) {
      const int32_t tile = int32_t(task) * step, end = std::min(tile + step, tiles);
      const int32_t first_row = tile * walk.anchors.lanes;
      const int32_t last_row = std::min(end * walk.anchors.lanes, classes.anchors.count) - 1;
      int32_t first = walk.candidate_begin[classes.anchors.group[first_row]];
      const int32_t last = walk.candidate_begin[classes.anchors.group[last_row] + 1] - 1;
      if (walk.symmetric) first = std::max(first, first_row);
      if (first > last) return Task{};
      return Task{tile, end, first / walk.candidates.lanes, last / walk.candidates.lanes + 1};
    });
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
      if (rule_of(selection.positive) != Rule::nothing) positives[0].index[a] = lowest(a, own);
      if (rule_of(selection.negative) == Rule::nothing) continue;
      int32_t best = kNobody;
      // Classes are numbered by their lowest index: behind one that starts later than the best, all do.
      for (int32_t group = 0; group < classes.count && selection.negative != Negative::semihard; ++group) {
        if (group != own) best = std::min(best, lowest(a, group));
        if (best != kNobody && classes.candidates.index[walk.candidate_begin[group]] > best) break;
      }
      negatives[0].index[a] = best;
    }
  }

  // A streaming draw from the weights of all negatives: the largest of log weight + Gumbel noise.
  void draw_by_distance(Picks<T> picks) {
    if (selection.distance == Distance::cosine) {
      draw_by_distance_among(*this, picks);
    } else {
      Prepared<T> unit_rows(kernels, pool, batch, Distance::cosine);
      unit_rows.prepare(true, true);
      draw_by_distance_among(unit_rows, picks);
    }
    for (int32_t a = 0; a < classes.anchors.count; ++a)
      if (picks.index[a] == kNobody) picks.index[a] = draw(a, false);  // all weights are 0
  }

  void draw_by_distance_among(Prepared<T>& unit_rows, Picks<T> picks) {
    const double dimensions = double(width), cutoff = selection.cutoff, limit = selection.nonzero_loss_cutoff;
    Draws<T> draws;
    draws.a = T((2 - dimensions) / 2);
    draws.b = T((3 - dimensions) / 2);
    draws.least = T(std::clamp(cutoff * cutoff, 0x1p-100, 0x1p100));
    draws.limit = T(std::min(limit * limit, double(std::numeric_limits<T>::infinity())));
    draws.seed = selection.seed;
    draws.anchor_index = classes.anchors.index;
    draws.candidate_index = classes.candidates.index;
    draws.picks = picks;
    std::vector<T*> blocks;
    for (int worker = 0; worker < pool.threads; ++worker) blocks.push_back(unit_rows.take_block());
    const auto load = [&](int32_t row, int32_t column, int worker) -> const T* {
      T* block = blocks[size_t(worker)];
      if (!unit_rows.load_block(row, column, nullptr, block, nullptr)) return nullptr;
      kernels.to_log_weights(draws, block);
      return block;
    };
    unit_rows.visit_rows(load, [&](int32_t anchor, int32_t count, int32_t candidate, const T* block) {
      kernels.keep_draws(draws, anchor, count, candidate, block);
    });
  }

  void select() {
    const Rule positive = rule_of(selection.positive), negative = rule_of(selection.negative);
    positives = fresh_picks();
    negatives = fresh_picks();
    if (selection.positive == Positive::random) draw_all(true, positives[0]);
    if (selection.negative == Negative::random) draw_all(false, negatives[0]);
    if (selection.negative == Negative::distance) draw_by_distance(negatives[0]);
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

  void report(int64_t* positive, int64_t* negative, T* d_ap, T* d_an) {
    for_each_range(pool, classes.anchors.count, kRowsPerTask, [&](int64_t begin, int64_t end, int worker) {
      T *x_buffer = buffers[worker], *y_buffer = x_buffer + width;
      for (int32_t a = int32_t(begin); a < end; ++a) {
        const int32_t row = classes.anchors.index[a];
        const T* x = kernels.load(batch.anchors, row, x_buffer);
        const auto reported = [&](int32_t candidate) {
          const T* y = kernels.load(batch.candidates, candidate, y_buffer);
          return T(kernels.measure(pair(x, y, row, candidate), width, selection.distance));
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
  const bool draws_here = selection.negative == Negative::distance && selection.distance == Distance::cosine;
  const bool walks =
      rule_of(selection.positive) != Rule::nothing || rule_of(selection.negative) != Rule::nothing;
  if (!mining.prepare(walks || draws_here, draws_here)) return false;
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
  long double total = 0;  // of losses that may be the largest numbers that T holds
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
  if (double(anchors.count + candidates.count) * double(anchors.width) < 1e5) pool.threads = 1;

  int64_t* begin = scratch.take<int64_t>(anchors.count + 1);
  int32_t* candidate = scratch.take<int32_t>(2 * anchors.count);
  T* distances = scratch.take<T>(2 * anchors.count);
  T* weights = scratch.take<T>(2 * anchors.count);
  int64_t pairs = 0;
  bool poisoned = false;
  for (int64_t i = 0; i < anchors.count; ++i) {
    begin[i] = pairs;
    if (positive[i] < 0 || negative[i] < 0) {
      poisoned |= slope_ap[i] != slope_ap[i];
      continue;
    }
    const T grad = upstream[upstream_per_anchor ? i : 0];
    candidate[pairs] = int32_t(positive[i]), distances[pairs] = d_ap[i],
    weights[pairs++] = slope_ap[i] * grad;
    candidate[pairs] = int32_t(negative[i]), distances[pairs] = d_an[i],
    weights[pairs++] = slope_an[i] * grad;
  }
  begin[anchors.count] = pairs;
  pull_pairs<T>(
      kernels, pool, scratch, {anchors, candidates, self_mining}, distance,
      {pairs, begin, begin + 1, candidate, distances, weights}, poisoned, [](auto&&...) {}, anchor_gradient,
      candidate_gradient);
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
