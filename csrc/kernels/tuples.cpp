#include "tuples.h"

#include "gradient.h"
#include "stream.h"

namespace tripletops {
namespace {

// ln(1 + e^exponent * sum).
double log_one_plus(double exponent, double sum) {
  if (!(sum > 0)) return 0;
  const double x = exponent + std::log(sum);
  return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
}

// Anchors and candidates are counted by position, unless a name says row.
template <class T>
struct ManyTuples : Streamed<T> {
  using Base = Streamed<T>;
  using Base::anchors, Base::row_of, Base::by_anchor, Base::workers;
  using Base::kernels, Base::pool, Base::batch, Base::scratch, Base::width, Base::classes, Base::buffers;
  using Base::walk, Base::distance;

  const Selection& selection;
  const TupleObjective& objective;
  const double* const parameters;
  const T* const beta;  // by row
  const TupleState<T> state;

  int64_t positive_pairs = 0, negative_pairs = 0, triplets = 0;
  Costs<T> costs;
  double *positive_loss = nullptr, *negative_loss = nullptr;  // by anchor
  double *positive_terms = nullptr, *negative_terms = nullptr;

  ManyTuples(const Kernels<T>& kernels, const Pool& pool, const Batch& batch, const Selection& selection,
             const TupleObjective& objective, const T* beta, const TupleState<T>& state)
      : Base(kernels, pool, batch, selection.distance),
        selection(selection),
        objective(objective),
        parameters(objective.parameters),
        beta(beta),
        state(state) {}

  bool is(Tuples tuples) const { return objective.tuples == tuples; }
  bool all_triplets() const { return is(Tuples::batch_all) || is(Tuples::batch_all_soft); }
  bool pairs_only() const { return is(Tuples::contrastive) || is(Tuples::beta_margin); }
  bool picks_positives() const { return pairs_only() && selection.positive != Positive::all; }
  bool picks_negatives() const { return pairs_only() && selection.negative != Negative::all; }
  bool streams() const { return !is(Tuples::semi_hard) && !picks_negatives(); }

  int32_t class_begin(int32_t anchor) const { return walk.candidate_begin[classes.anchors.group[anchor]]; }
  int32_t class_end(int32_t anchor) const { return walk.candidate_begin[classes.anchors.group[anchor] + 1]; }
  int64_t positive_count(int32_t anchor) const {
    const int32_t self = walk.self_position[anchor];
    const bool inside = self >= class_begin(anchor) && self < class_end(anchor);
    return class_end(anchor) - class_begin(anchor) - inside;
  }
  int64_t negative_count(int32_t anchor) const {
    return classes.candidates.count - (walk.self_position[anchor] >= 0) - positive_count(anchor);
  }
  bool is_valid(int32_t anchor) const { return positive_count(anchor) > 0 && negative_count(anchor) > 0; }

  // False where a row that is not ignored, or its beta, is not finite.
  bool ready() {
    if (!this->prepare(!picks_negatives(), true)) return false;
    for (int32_t a = 0; a < anchors(); ++a) {
      if (beta && !std::isfinite(beta[row_of(a)])) return false;
      const int64_t positive = positive_count(a), negative = negative_count(a);
      positive_pairs += positive, negative_pairs += negative, triplets += positive * negative;
    }
    this->hire_workers();
    return true;
  }

  // Nothing to learn from.
  bool is_empty() const {
    return positive_pairs == 0 || negative_pairs == 0 || (!pairs_only() && triplets == 0);
  }

  template <class Task>
  void for_each_anchor(const Task& task) {
    for_each_range(pool, anchors(), kRowsPerTask, [&](int64_t begin, int64_t end, int worker) {
      for (int64_t a = begin; a < end; ++a) task(int32_t(a), workers[size_t(worker)].rows);
    });
  }

  // `rows` has room for two of them.
  T distance_of(int32_t anchor, int32_t candidate_row, T* rows) const {
    return T(this->measured(row_of(anchor), candidate_row, rows));
  }

  // Calls visit(row, distance) for every positive.
  template <class Visit>
  void each_positive(int32_t anchor, T* rows, const Visit& visit) const {
    const T* x = kernels.load(batch.anchors, row_of(anchor), rows);
    for (int32_t c = class_begin(anchor); c < class_end(anchor); ++c) {
      if (c == walk.self_position[anchor]) continue;
      const int32_t row = classes.candidates.index[c];
      const T* y = kernels.load(batch.candidates, row, rows + width);
      visit(row, T(kernels.measure(this->pair(x, y, row_of(anchor), row), width, distance)));
    }
  }

  // Where the positives of each anchor lie in lists of all of them; those of anchors that have no negative
  // are left out.
  int64_t* positive_lists() {
    int64_t* begin = scratch.template take<int64_t>(anchors() + 1);
    begin[0] = 0;
    for (int32_t a = 0; a < anchors(); ++a) begin[a + 1] = begin[a] + (is_valid(a) ? positive_count(a) : 0);
    return begin;
  }

  // Every triplet: a positive makes a threshold for the anchor's negatives.

  // An infinite threshold would make NaN of the terms that it does not have.
  static T within_type(double threshold) {
    return T(std::min(threshold, double(std::numeric_limits<T>::max())));
  }

  T threshold_of(T d_ap) const {
    return is(Tuples::batch_all) ? within_type(double(d_ap + T(parameters[0]))) : d_ap;
  }

  void set_triplet_costs() {
    const int64_t* begin = positive_lists();
    T* threshold = scratch.template take<T>(begin[anchors()]);
    for_each_anchor([&](int32_t a, T* rows) {
      if (begin[a] == begin[a + 1]) return;
      T* next = threshold + begin[a];
      each_positive(a, rows, [&](int32_t, T d) { *next++ = threshold_of(d); });
      std::sort(threshold + begin[a], next);
    });
    set_thresholds(begin, threshold);
    if (is(Tuples::batch_all_soft)) costs.kind = Cost::soft;
  }

  void set_thresholds(const int64_t* begin, const T* threshold) {
    T* limit = by_anchor(-std::numeric_limits<T>::infinity());
    for (int32_t a = 0; a < anchors(); ++a)
      if (begin[a] < begin[a + 1]) limit[a] = threshold[begin[a + 1] - 1];
    costs.kind = Cost::hinge;
    costs.begin = begin, costs.threshold = threshold, costs.limit = limit;
    costs.hits = scratch.filled(begin[anchors()], int32_t(0));
  }

  // A negative counts against the threshold it lies below and against all larger ones.
  void add_hits() {
    for_each_anchor([&](int32_t a, T*) {
      int64_t below = 0;
      for (int64_t i = costs.begin[a]; i < costs.begin[a + 1]; ++i) {
        below += costs.hits[i];
        negative_loss[a] += double(below) * double(costs.threshold[i]);
        negative_terms[a] += double(below);
      }
      // In float64 both parts may have overflowed.
      if (std::isnan(negative_loss[a])) negative_loss[a] = std::numeric_limits<double>::infinity();
    });
  }

  // Pairs: [d - positive_start]+ and [negative_end - d]+.

  double positive_start(int32_t anchor) const {
    return is(Tuples::contrastive) ? parameters[0] : double(beta[row_of(anchor)]) - parameters[0];
  }
  double negative_end(int32_t anchor) const {
    return is(Tuples::contrastive) ? parameters[1] : double(beta[row_of(anchor)]) + parameters[0];
  }

  void set_pair_costs() {
    int64_t* begin = scratch.template take<int64_t>(anchors() + 1);
    T* threshold = scratch.template take<T>(anchors());
    for (int32_t a = 0; a < anchors(); ++a) begin[a] = a, threshold[a] = within_type(negative_end(a));
    begin[anchors()] = anchors();
    set_thresholds(begin, threshold);
  }

  void add_positive_terms() {
    for_each_anchor([&](int32_t a, T* rows) {
      long double loss = 0;  // the roundings of many equal terms would add up
      const auto add = [&](int32_t, T d) {
        const double z = double(d) - positive_start(a);
        if (z > 0) loss += z, ++positive_terms[a];
      };
      const int64_t picked = state.positive[row_of(a)];
      if (!picks_positives())
        each_positive(a, rows, add);
      else if (picked >= 0)
        add(int32_t(picked), distance_of(a, int32_t(picked), rows));
      positive_loss[a] = double(loss);
    });
  }

  void add_picked_negatives() {
    for_each_anchor([&](int32_t a, T* rows) {
      const int64_t picked = state.negative[row_of(a)];
      if (picked < 0) return;
      const double z = negative_end(a) - double(distance_of(a, int32_t(picked), rows));
      if (z > 0) negative_loss[a] += z, ++negative_terms[a];
    });
  }

  // Multi-similarity: negatives nearer than the farthest positive + epsilon, positives farther than the
  // nearest negative - epsilon.

  void set_similarity_costs() {
    T* limit = by_anchor(-std::numeric_limits<T>::infinity());
    for (int32_t a = 0; a < anchors(); ++a)
      if (is_valid(a)) limit[a] = T(double(state.farthest[row_of(a)]) + parameters[3]);
    costs.kind = Cost::exponential;
    costs.limit = limit, costs.rate = parameters[1];
  }

  void survey_positives() {
    for_each_anchor([&](int32_t a, T* rows) {
      if (!is_valid(a)) return;
      T nearest = std::numeric_limits<T>::infinity(), farthest = -nearest;
      int32_t easy = kNobody;
      each_positive(a, rows, [&](int32_t row, T d) {
        improve(d, row, &nearest, &easy);
        farthest = std::max(farthest, d);
      });
      state.farthest[row_of(a)] = farthest;
      state.positive[row_of(a)] = easy;
    });
  }

  double positive_exponent(T d) const { return parameters[0] * (double(d) - 1 + parameters[2]); }

  bool is_easy(int32_t anchor, int32_t row) const { return row == state.positive[row_of(anchor)]; }
  bool is_kept(int32_t anchor, T d) const {
    return double(d) > double(state.nearest[row_of(anchor)]) - parameters[3];
  }

  // The state keeps both logs relative to their largest exponents, beside which their own digits would be
  // lost.
  void add_similarities() {
    for_each_anchor([&](int32_t a, T* rows) {
      if (!is_valid(a)) return;
      const int32_t row = row_of(a);
      state.nearest[row] = costs.nearest[a];
      const bool easy = selection.positive == Positive::easy;
      // If any positive is kept, the farthest is.
      const T reference = easy ? distance_of(a, int32_t(state.positive[row]), rows) : state.farthest[row];
      const double largest = positive_exponent(reference);
      double sum = easy ? 1 : 0;
      if (!easy)
        each_positive(a, rows, [&](int32_t, T d) {
          if (is_kept(a, d)) sum += std::exp(positive_exponent(d) - largest);
        });
      const double positive = log_one_plus(largest, sum);
      const double nearest = parameters[1] * (1 - parameters[2] - double(costs.nearest[a]));
      const double negative = log_one_plus(nearest, costs.sum[a]);
      state.positive_log_sum[row] = T(positive - largest);
      state.negative_log_sum[row] = costs.sum[a] > 0 ? T(negative - nearest) : T(0);
      negative_loss[a] = positive / parameters[0] + negative / parameters[1];
      negative_terms[a] = negative_loss[a] > 0;
    });
  }

  // FaceNet's negative of every (anchor, positive): the nearest one beyond the positive, else the farthest.

  struct SemiHard {
    const int64_t* begin;          // anchor -> first pair; one more entry at the end
    int32_t *positive, *negative;  // rows
    T *d_ap, *d_an;
  };

  // The keys of the positives as the blocks compute them: those of their duplicates are equal bit for bit.
  T* positive_keys(const int64_t* begin) {
    T* keys = scratch.template take<T>(begin[anchors()]);
    const int64_t blocks = (anchors() + kBlockRows - 1) / kBlockRows;
    for_each_task(pool, blocks, [&](int64_t block, int worker) {
      T* half = workers[size_t(worker)].distances;
      const int32_t row = int32_t(block) * kBlockRows;
      const int32_t end = row + this->rows_in_block(row, classes.anchors);
      int32_t column = class_begin(row) / kBlockRows * kBlockRows;
      for (; column < class_end(end - 1); column += kBlockRows) {
        kernels.half_squares(walk, row, column, nullptr, half, nullptr, nullptr);
        for (int32_t a = row; a < end; ++a) {
          if (begin[a] == begin[a + 1]) continue;
          const int32_t self = walk.self_position[a], first = class_begin(a);
          const int32_t last = std::min(class_end(a), column + kBlockRows);
          for (int32_t c = std::max(first, column); c < last; ++c)
            if (c != self)
              keys[begin[a] + c - first - (self >= first && self < c)] =
                  half[(a - row) * kBlockRows + c - column];
        }
      }
    });
    return keys;
  }

  SemiHard pick_semi_hard() {
    const int64_t* begin = positive_lists();
    const int64_t pairs = begin[anchors()];
    constexpr T none = std::numeric_limits<T>::max();
    SemiHard found = {begin, scratch.template take<int32_t>(pairs), scratch.filled(pairs, kNobody),
                      scratch.template take<T>(pairs), scratch.template take<T>(pairs)};
    Floors<T> floors;
    T* keys = positive_keys(begin);
    for_each_anchor([&](int32_t a, T* rows) {
      if (begin[a] == begin[a + 1]) return;
      struct Entry {
        T key;
        int32_t row;
        T d;
      };
      std::vector<Entry> entries;
      each_positive(a, rows, [&](int32_t row, T d) {
        entries.push_back({keys[begin[a] + int64_t(entries.size())], row, d});
      });
      std::sort(entries.begin(), entries.end(), [](const Entry& one, const Entry& other) {
        return one.key < other.key || (one.key == other.key && one.row < other.row);
      });
      for (size_t i = 0; i < entries.size(); ++i) {
        const int64_t at = begin[a] + int64_t(i);
        keys[at] = entries[i].key, found.positive[at] = entries[i].row, found.d_ap[at] = entries[i].d;
      }
    });
    floors.begin = begin;
    floors.floor = keys;
    floors.beyond = {scratch.filled(pairs, none), found.negative};
    floors.farthest = {by_anchor(none), by_anchor(kNobody)};
    const auto load = [&](int32_t row, int32_t column, int worker) -> const T* {
      T* block = workers[size_t(worker)].distances;
      return this->load_block(row, column, nullptr, block, nullptr) ? block : nullptr;
    };
    this->visit_rows(load, [&](int32_t anchor, int32_t count, int32_t candidate, const T* half) {
      kernels.keep_beyond(floors, anchor, count, half, classes.candidates.index + candidate);
    });
    for_each_anchor([&](int32_t a, T* rows) {
      if (begin[a] < begin[a + 1]) settle_semi_hard(found, floors, a, rows);
    });
    return found;
  }

  // Measures what was found. A negative that is not strictly farther after all is searched for in the rows.
  void settle_semi_hard(const SemiHard& found, const Floors<T>& floors, int32_t anchor, T* rows) {
    const int64_t begin = found.begin[anchor], end = found.begin[anchor + 1];
    // What lies beyond a floor lies beyond all lower ones.
    for (int64_t i = end - 1; i-- > begin;)
      improve(floors.beyond.key[i + 1], found.negative[i + 1], floors.beyond.key + i, found.negative + i);
    const int32_t farthest = floors.farthest.index[anchor];
    for (int64_t i = begin; i < end; ++i) {
      int32_t& negative = found.negative[i];
      T& d_an = found.d_an[i];
      if (negative != kNobody) {
        d_an = distance_of(anchor, negative, rows);
        if (!(d_an > found.d_ap[i])) {
          const T* x = kernels.load(batch.anchors, row_of(anchor), rows);
          negative = this->scan_rows(anchor, x, found.d_ap[i], rows + width, &d_an);
        }
      }
      if (negative == kNobody) negative = farthest, d_an = distance_of(anchor, farthest, rows);
    }
  }

  double semi_hard_term(const SemiHard& found, int64_t pair) const {
    return double(found.d_ap[pair]) - double(found.d_an[pair]) + parameters[0];
  }

  void set_costs() {
    if (all_triplets()) set_triplet_costs();
    if (pairs_only()) set_pair_costs();
    if (is(Tuples::multi_similarity)) set_similarity_costs();
  }

  void forward(T* loss) {
    positive_loss = by_anchor(0.0), negative_loss = by_anchor(0.0);
    positive_terms = by_anchor(0.0), negative_terms = by_anchor(0.0);
    if (is(Tuples::multi_similarity)) survey_positives();
    if (streams()) {
      set_costs();
      costs.loss = negative_loss, costs.active = negative_terms;
      costs.nearest = by_anchor(std::numeric_limits<T>::infinity());
      costs.sum = by_anchor(0.0);
      this->stream_costs(costs);
      if (costs.kind == Cost::hinge) add_hits();
    }
    if (is(Tuples::multi_similarity)) add_similarities();
    if (pairs_only()) add_positive_terms();
    if (picks_negatives()) add_picked_negatives();
    if (is(Tuples::semi_hard)) {
      const SemiHard found = pick_semi_hard();
      for (int32_t a = 0; a < anchors(); ++a)
        for (int64_t i = found.begin[a]; i < found.begin[a + 1]; ++i)
          if (const double z = semi_hard_term(found, i); z > 0) negative_loss[a] += z, ++negative_terms[a];
    }

    long double positive = 0, negative = 0;  // of losses that may be the largest numbers that T holds
    double positives = 0, negatives = 0, counted = 0;
    for (int32_t a = 0; a < anchors(); ++a) {
      positive += positive_loss[a], negative += negative_loss[a];
      positives += positive_terms[a], negatives += negative_terms[a];
      if (is_valid(a)) counted += is(Tuples::semi_hard) ? double(positive_count(a)) : 1;
    }
    if (all_triplets()) counted = double(triplets);
    if (is(Tuples::batch_all_soft)) negatives = counted;
    state.counts[0] = int64_t(pairs_only() ? positives : negatives);
    state.counts[1] = int64_t(pairs_only() ? negatives : counted);
    const Shares share = shares();
    if (objective.reduction != Reduction::none)
      *loss = T(positive * share.positive + negative * share.negative);
    else
      for (int32_t a = 0; a < anchors(); ++a) loss[row_of(a)] = T(positive_loss[a] + negative_loss[a]);
  }

  // What a term counts for in the loss.
  struct Shares {
    double positive, negative;
  };

  Shares shares() const {
    const auto one_of = [](int64_t count) { return 1 / double(std::max<int64_t>(count, 1)); };
    const int64_t *counts = state.counts, both = counts[0] + counts[1];
    if (objective.reduction == Reduction::sum || objective.reduction == Reduction::none) return {1, 1};
    if (is(Tuples::contrastive)) return {one_of(counts[0]), one_of(counts[1])};
    if (is(Tuples::beta_margin)) return {one_of(both), one_of(both)};
    const double share = one_of(counts[objective.reduction == Reduction::mean ? 1 : 0]);
    return {share, share};
  }

  // The derivative of an anchor's loss by the distance of a positive, before anything is reduced.
  double positive_slope(int32_t anchor, int32_t row, T d) const {
    if (pairs_only()) return double(d) > positive_start(anchor);
    if (!is_valid(anchor)) return 0;
    if (is(Tuples::multi_similarity)) {
      const double exponent = positive_exponent(d);
      if (selection.positive == Positive::easy)
        return is_easy(anchor, row) ? 1 / (1 + std::exp(-exponent)) : 0;
      if (!is_kept(anchor, d)) return 0;
      return std::exp(exponent - positive_exponent(state.farthest[row_of(anchor)]) -
                      double(state.positive_log_sum[row_of(anchor)]));
    }
    const T* first = costs.threshold + costs.begin[anchor];
    const T* last = costs.threshold + costs.begin[anchor + 1];
    const int64_t at = std::lower_bound(first, last, threshold_of(d)) - costs.threshold;
    return costs.kind == Cost::soft ? costs.slope[at] : double(costs.hits[at]);
  }

  void backward(const T* upstream, bool per_anchor, void* anchor_gradient, void* candidate_gradient,
                T* beta_gradient) {
    const Shares share = shares();
    const auto grad = [&](int32_t a) { return double(upstream[per_anchor ? row_of(a) : 0]); };
    if (streams()) {
      set_costs();
      T *weight = by_anchor(T(0)), *log_sum = by_anchor(T(0));
      costs.nearest = by_anchor(T(0));
      for (int32_t a = 0; a < anchors(); ++a) {
        weight[a] = T(grad(a) * share.negative);
        log_sum[a] = state.negative_log_sum[row_of(a)];
        costs.nearest[a] = state.nearest[row_of(a)];
      }
      costs.weight = weight, costs.log_sum = log_sum;
      if (costs.kind == Cost::soft) costs.slope = scratch.filled(costs.begin[anchors()], 0.0);
      this->stream_weights(costs);
      if (costs.kind == Cost::hinge)
        for (int32_t a = 0; a < anchors(); ++a)
          for (int64_t i = costs.begin[a] + 1; i < costs.begin[a + 1]; ++i)
            costs.hits[i] += costs.hits[i - 1];
    }

    // Pairs that were picked go into a list.
    SemiHard semi_hard = {};
    if (is(Tuples::semi_hard)) semi_hard = pick_semi_hard();
    const int64_t most = 2 * (semi_hard.begin ? semi_hard.begin[anchors()] : anchors());
    int64_t* begin = scratch.filled(batch.anchors.count, int64_t(0));
    int64_t* end = scratch.filled(batch.anchors.count, int64_t(0));
    int32_t* candidate = scratch.template take<int32_t>(most);
    T *distances = scratch.template take<T>(most), *weights = scratch.template take<T>(most);
    int64_t pairs = 0;
    const auto add = [&](int64_t row, T d, double weight) {
      candidate[pairs] = int32_t(row), distances[pairs] = d, weights[pairs++] = T(weight);
    };
    T* rows = workers[0].rows;
    for (int32_t a = 0; a < anchors(); ++a) {
      const int64_t positive = state.positive[row_of(a)], negative = state.negative[row_of(a)];
      begin[row_of(a)] = pairs;
      if (is(Tuples::semi_hard))
        for (int64_t i = semi_hard.begin[a]; i < semi_hard.begin[a + 1]; ++i)
          if (semi_hard_term(semi_hard, i) > 0) {
            add(semi_hard.positive[i], semi_hard.d_ap[i], grad(a) * share.positive);
            add(semi_hard.negative[i], semi_hard.d_an[i], -grad(a) * share.negative);
          }
      if (picks_positives() && positive >= 0) {
        const T d = distance_of(a, int32_t(positive), rows);
        add(positive, d, positive_slope(a, int32_t(positive), d) * grad(a) * share.positive);
      }
      if (picks_negatives() && negative >= 0) {
        const T d = distance_of(a, int32_t(negative), rows);
        if (double(d) < negative_end(a)) add(negative, d, -grad(a) * share.negative);
      }
      end[row_of(a)] = pairs;
    }
    if (beta_gradient) differentiate_beta(grad, share, beta_gradient);

    const bool all_positives = !picks_positives() && !is(Tuples::semi_hard);
    const int32_t* anchor_position = this->positions(classes.anchors, batch.anchors.count);
    const int32_t* candidate_position =
        batch.self_mining ? anchor_position : this->positions(classes.candidates, batch.candidates.count);
    const auto pull_rest = [&](bool is_anchor, int64_t row, int worker, T* gradient, const auto& pull) {
      const int32_t position = (is_anchor ? anchor_position : candidate_position)[row];
      if (position < 0) return;
      T* two_rows = workers[size_t(worker)].rows;
      if (streams()) this->add_streamed(is_anchor, position, two_rows, gradient);
      if (!all_positives) return;
      const auto weight = [&](int32_t anchor, int32_t other, T d) {
        return positive_slope(anchor, other, d) * grad(anchor) * share.positive;
      };
      if (is_anchor) {
        each_positive(position, two_rows, [&](int32_t other, T d) {
          double both = weight(position, other, d);
          if (batch.self_mining) both += weight(anchor_position[other], int32_t(row), d);
          pull(other, d, T(both));
        });
      } else {
        const int32_t group = classes.candidates.group[position];
        for (int32_t a = classes.anchors.begin[group]; a < classes.anchors.begin[group + 1]; ++a) {
          if (walk.self_position[a] == position) continue;
          const T d = distance_of(a, int32_t(row), two_rows);
          pull(row_of(a), d, T(weight(a, int32_t(row), d)));
        }
      }
    };
    const Sides sides = {batch.anchors, batch.candidates, batch.self_mining, this->anchor_units,
                         this->candidate_units};
    pull_pairs<T>(kernels, pool, scratch, sides, distance, {pairs, begin, end, candidate, distances, weights},
                  false, pull_rest, anchor_gradient, candidate_gradient);
  }

  template <class Grad>
  void differentiate_beta(const Grad& grad, const Shares& share, T* beta_gradient) {
    positive_loss = by_anchor(0.0), negative_loss = by_anchor(0.0);
    positive_terms = by_anchor(0.0), negative_terms = by_anchor(0.0);
    add_positive_terms();
    if (picks_negatives()) add_picked_negatives();
    for (int32_t a = 0; a < anchors(); ++a) {
      const double negatives = streams() ? double(costs.hits[a]) : negative_terms[a];
      beta_gradient[row_of(a)] =
          T(grad(a) * (negatives * share.negative - positive_terms[a] * share.positive));
    }
  }
};

}  // namespace

template <class T>
void tuples_forward(const Kernels<T>& kernels, const Pool& pool, const Batch& batch,
                    const Selection& selection, const TupleObjective& objective, const T* beta, T* loss,
                    TupleState<T> state) {
  const int64_t count = batch.anchors.count, losses = objective.reduction == Reduction::none ? count : 1;
  std::fill(loss, loss + losses, T(0));
  std::fill(state.counts, state.counts + 2, int64_t(0));
  for (int64_t* picks : {state.positive, state.negative}) std::fill(picks, picks + count, int64_t(-1));
  for (T* values : {state.nearest, state.farthest, state.positive_log_sum, state.negative_log_sum})
    std::fill(values, values + count, T(0));
  if (count == 0) return;

  ManyTuples<T> tuples(kernels, pool, batch, selection, objective, beta, state);
  if (!tuples.ready()) return std::fill(loss, loss + losses, std::numeric_limits<T>::quiet_NaN());
  if (tuples.is_empty()) return;
  if (tuples.picks_positives() || tuples.picks_negatives()) {
    std::vector<T> distances(size_t(2 * count));
    mine<T>(kernels, pool, batch, selection, state.positive, state.negative, distances.data(),
            distances.data() + count);
  }
  tuples.forward(loss);
}

template <class T>
void tuples_backward(const Kernels<T>& kernels, const Pool& pool, const Batch& batch,
                     const Selection& selection, const TupleObjective& objective, const T* beta,
                     TupleState<T> state, const T* upstream, bool upstream_per_anchor, void* anchor_gradient,
                     void* candidate_gradient, T* beta_gradient) {
  const int64_t count = batch.anchors.count;
  ManyTuples<T> tuples(kernels, pool, batch, selection, objective, beta, state);
  const bool finite = count == 0 || tuples.ready();
  const T nothing = finite ? T(0) : std::numeric_limits<T>::quiet_NaN();
  if (beta_gradient) std::fill(beta_gradient, beta_gradient + count, nothing);
  if (count > 0 && finite && !tuples.is_empty())
    return tuples.backward(upstream, upstream_per_anchor, anchor_gradient, candidate_gradient, beta_gradient);
  const std::vector<int64_t> none(size_t(count), 0);
  pull_pairs<T>(
      kernels, pool, tuples.scratch, {batch.anchors, batch.candidates, batch.self_mining}, selection.distance,
      {0, none.data(), none.data(), nullptr, nullptr, nullptr}, !finite, [](auto&&...) {}, anchor_gradient,
      candidate_gradient);
}

#define TRIPLETOPS_INSTANTIATE(T)                                                                         \
  template void tuples_forward<T>(const Kernels<T>&, const Pool&, const Batch&, const Selection&,         \
                                  const TupleObjective&, const T*, T*, TupleState<T>);                    \
  template void tuples_backward<T>(const Kernels<T>&, const Pool&, const Batch&, const Selection&,        \
                                   const TupleObjective&, const T*, TupleState<T>, const T*, bool, void*, \
                                   void*, T*);
TRIPLETOPS_INSTANTIATE(float)
TRIPLETOPS_INSTANTIATE(double)

}  // namespace tripletops
