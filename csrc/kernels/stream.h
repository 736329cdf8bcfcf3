// Sums over all negatives of all anchors, streamed block by block: what they cost, and how they pull.
//
// The gradient of a sum of weights times distances is, for every row x, total * x - sum of factor * y over
// the rows y it is paired with (factor: the weight, for euclidean over the distance; total: their sum). Both
// come out of one product of the block of factors with the framed rows of the other side. Euclidean distances
// are those of framed rows too, so that the scale of the frame cancels.
#pragma once

#include <cmath>

#include "near.h"
#include "strips/walk.h"

namespace tripletops {

template <class T>
class Stream {
 public:
  explicit Stream(Prepared<T>& prepared)
      : prepared_(prepared), rows_(prepared.rows), distance_(prepared.distance), width_(prepared.rows.width) {
    for (int i = 0; i < rows_.pool.threads; ++i) {
      Worker worker(prepared);
      for (T** block : {&worker.distances, &worker.scaled, &worker.transposed, &worker.weights, &worker.other,
                        &worker.near_weights})
        *block = prepared.take_block();
      worker.buffer = rows_.scratch.template take<T>(2 * width_);
      workers_.push_back(worker);
    }
  }

  // Room for two rows, and for a block, that a worker may use between streams.
  T* buffer(int worker) const { return workers_[size_t(worker)].buffer; }
  T* block(int worker) const { return workers_[size_t(worker)].distances; }

  // Adds what all negatives cost.
  void add(const Cost<T>& cost) {
    const T* reach = reach_of(cost);
    const auto load = [&](int32_t row, int32_t column, int i) -> const T* {
      Worker& worker = workers_[size_t(i)];
      return load_distances(row, column, reach, worker, nullptr) ? worker.distances : nullptr;
    };
    prepared_.visit_rows(load, [&](int32_t anchor, int32_t count, int32_t, const T* distances) {
      cost.functions.add(cost.data, anchor, count, distances);
    });
  }

  // Collects what all negatives pull with.
  void weigh(const Cost<T>& cost) {
    start_pulls();
    if (rows_.batch.self_mining) candidates_ = anchors_;
    const T* reach = reach_of(cost);
    prepared_.visit_blocks([&](int32_t row, int32_t column, int i) {
      Worker& worker = workers_[size_t(i)];
      T* scaled = distance_ == Distance::euclidean ? worker.scaled : nullptr;
      if (!load_distances(row, column, reach, worker, scaled)) return;
      weigh_block(cost, row, column, worker, scaled);
      pull_block(row, column, worker);
    });
  }

  // Calls use(row) for the row of every anchor, with its half squared distances.
  template <class Use>
  void visit_strips(StripWalk<T>& walk, const Use& use) const {
    for_each_task(walk.pool(), walk.strips(), [&](int64_t strip, int worker) {
      walk.load(int32_t(strip), worker);
      for (int32_t r = 0; r < rows_in_strip(strip); ++r) use(walk.row(int32_t(strip), r, worker));
    });
  }

  // The same, with distances; `use` turns them into the derivatives by them. Collects what these pull with.
  // A candidate is pulled by the strips in their order, the anchors of a strip by themselves.
  template <class Use>
  void weigh_strips(StripWalk<T>& walk, const Use& use) {
    start_pulls();
    if (rows_.batch.self_mining) {
      candidates_ = fresh_sums(rows_.classes.candidates.count);
      candidates_.rows = anchors_.rows;
    }
    Turns turns(int32_t(walk.columns() / kBlockRows));
    for_each_task(walk.pool(), walk.strips(), [&](int64_t strip, int worker) {
      walk.load(int32_t(strip), worker);
      for (int32_t r = 0; r < rows_in_strip(strip); ++r) {
        const StripRow<T> row = walk.row(int32_t(strip), r, worker);
        walk.load_distances(row, buffer(worker));
        use(row);
        to_factors(row, walk.columns());
      }
      for (int32_t block = 0; block < walk.columns() / kBlockRows; ++block)
        pull_part(walk, int32_t(strip), block, turns, worker);
    });
    if (rows_.batch.self_mining) join_sums(walk.columns());
  }

  bool has_pulls() const { return anchors_.rows != nullptr; }

  // Adds what was collected to the gradient of an anchor or candidate, by position; under cosine divided by
  // its lift. `buffer` holds a row.
  void add_pulls(bool is_anchor, int32_t position, T* buffer, T* gradient) const {
    const Pulls& pulls = is_anchor ? anchors_ : candidates_;
    const T *own = pulls.rows + position * stride_, *sums = pulls.sums + position * stride_;
    const double total = pulls.totals[position];
    const auto pull = [&](int64_t d) { return total * double(own[d]) - double(sums[d]); };
    if (distance_ != Distance::cosine) {
      const double factor = distance_ == Distance::euclidean ? 1 : 2 / prepared_.scale;
      for (int64_t d = 0; d < width_; ++d) gradient[d] += T(pull(d) * factor);
      return;
    }
    const Batch& batch = rows_.batch;
    const int32_t row = (is_anchor ? rows_.classes.anchors : rows_.classes.candidates).index[position];
    const Normaliser unit = (is_anchor ? prepared_.anchor_units : prepared_.candidate_units)[row];
    if (is_zero(unit)) return;
    // What pulls at the unit row, less its part along that row.
    const T* x = rows_.functions.rows.load(is_anchor ? batch.anchors : batch.candidates, row, buffer);
    const auto direction = [&](int64_t d) { return double(x[d]) * unit.scale / unit.norm; };
    const double outer = unit.scale / (unit.norm * unit.lift);
    double along = 0;
    for (int64_t d = 0; d < width_; ++d) along += pull(d) * direction(d);
    for (int64_t d = 0; d < width_; ++d) gradient[d] += T((pull(d) - along * direction(d)) * outer);
  }

 private:
  struct Worker {
    explicit Worker(Prepared<T>& prepared) : near(prepared) {}

    T *distances = nullptr, *scaled = nullptr, *transposed = nullptr, *weights = nullptr, *other = nullptr;
    NearPairs<T> near;
    T* near_weights = nullptr;
    T* buffer = nullptr;  // two rows
  };

  // One side of the gradient, by position.
  struct Pulls {
    T *rows = nullptr, *sums = nullptr;
    double* totals = nullptr;
  };

  // The half squared distance below which a negative can matter to each anchor, a little enlarged: it only
  // skips blocks, and the exact comparison of distances follows. Null: every negative matters.
  const T* reach_of(const Cost<T>& cost) {
    constexpr double spare = 1 + 1e-4;
    if (!cost.limit) return nullptr;
    T* reach = rows_.by_anchor(T(-1));
    for (int32_t a = 0; a < rows_.anchors(); ++a) {
      const double limit = double(cost.limit[a]), scaled = limit * prepared_.scale;
      if (!(limit > 0)) continue;
      const double half = distance_ == Distance::cosine      ? limit
                          : distance_ == Distance::euclidean ? scaled * scaled / 2
                                                             : scaled * prepared_.scale / 2;
      constexpr double least = std::numeric_limits<T>::denorm_min();  // 0 would drop pairs at distance 0
      reach[a] = T(std::clamp(half * spare, least, double(std::numeric_limits<T>::infinity())));
    }
    return reach;
  }

  // The distances of a block's negatives; those that products cannot tell are measured. `scaled`: see
  // BlockFunctions::to_distances.
  bool load_distances(int32_t row, int32_t column, const T* reach, Worker& worker, T* scaled) const {
    if (!prepared_.load_block(row, column, reach, worker.distances, &worker.near.list)) return false;
    rows_.functions.blocks.to_distances(worker.distances, kBlockRows * kBlockRows, distance_,
                                        T(1 / prepared_.scale), scaled);
    worker.near.measure(row, column, worker.distances);
    return true;
  }

  void start_pulls() {
    const Batch& batch = rows_.batch;
    stride_ = (width_ + 31) / 32 * 32 + 16;  // whole panels; not a power of two, which would crowd the cache
    anchors_ = fresh_pulls(batch.anchors, rows_.classes.anchors, prepared_.anchor_units);
    if (!batch.self_mining)
      candidates_ = fresh_pulls(batch.candidates, rows_.classes.candidates, prepared_.candidate_units);
  }

  static int64_t whole_blocks(int64_t count) { return (count + kBlockRows - 1) / kBlockRows * kBlockRows; }

  Pulls fresh_sums(int64_t rows) {
    const int64_t count = whole_blocks(rows);
    Pulls pulls = {nullptr, rows_.scratch.template take<T>(count * stride_),
                   rows_.scratch.template take<double>(count)};
    for_each_range(rows_.pool, count, kRowsPerTask, [&](int64_t begin, int64_t end, int) {
      std::fill(pulls.sums + begin * stride_, pulls.sums + end * stride_, T(0));
      std::fill(pulls.totals + begin, pulls.totals + end, 0.0);
    });
    return pulls;
  }

  Pulls fresh_pulls(const Matrix& matrix, const Order& order, const Normaliser* units) {
    const int64_t count = whole_blocks(order.count);
    Pulls pulls = fresh_sums(order.count);
    pulls.rows = rows_.scratch.template take<T>(count * stride_);
    const RowFunctions<T>& functions = rows_.functions.rows;
    for_each_range(rows_.pool, count, kRowsPerTask, [&](int64_t begin, int64_t end, int worker) {
      std::fill(pulls.rows + begin * stride_, pulls.rows + end * stride_, T(0));
      for (int64_t i = begin; i < std::min<int64_t>(end, order.count); ++i) {
        const int32_t index = order.index[i];
        functions.frame(functions.load(matrix, index, rows_.buffers[worker]), prepared_.frame,
                        units ? units + index : nullptr, width_, pulls.rows + i * stride_);
      }
    });
    return pulls;
  }

  // The factors of a block's pairs, as anchors see their candidates and, where the block serves both, as
  // candidates see them as anchors. Near pairs pull by themselves, and get the factor 0.
  void weigh_block(const Cost<T>& cost, int32_t row, int32_t column, Worker& worker, const T* scaled) {
    const BlockFunctions<T>& functions = rows_.functions.blocks;
    const int32_t anchors = prepared_.rows_in_block(row, rows_.classes.anchors);
    const int32_t candidates = prepared_.rows_in_block(column, rows_.classes.candidates);
    T* weights = worker.weights;
    cost.functions.weigh(cost.data, row, anchors, worker.distances, weights);
    const bool both = prepared_.serves_both(row, column);
    if (both) {
      functions.transpose(worker.distances, worker.transposed);
      cost.functions.weigh(cost.data, column, candidates, worker.transposed, worker.other);
      functions.transpose(worker.other, worker.transposed);
    }
    const Near& near = worker.near.list;
    for (int32_t n = 0; n < near.count; ++n) {
      const int32_t at = near.entries[n];
      worker.near_weights[n] = weights[at] + (both ? worker.transposed[at] : 0);
    }
    functions.combine(weights, kBlockRows * kBlockRows, both ? worker.transposed : nullptr, scaled);
    if (distance_ == Distance::cosine) drop_zero_rows(row, anchors, column, candidates, weights);
    for (int32_t n = 0; n < near.count; ++n) weights[near.entries[n]] = 0;
    pull_near(row, column, worker);
  }

  void pull_near(int32_t row, int32_t column, Worker& worker) {
    worker.near.pull(worker.distances, worker.near_weights, anchors_.sums + row * stride_,
                     candidates_.sums + column * stride_, stride_);
  }

  void pull_block(int32_t row, int32_t column, Worker& worker) {
    const BlockFunctions<T>& functions = rows_.functions.blocks;
    functions.accumulate(worker.weights, candidates_.rows + column * stride_, width_, stride_,
                         anchors_.sums + row * stride_, anchors_.totals + row);
    functions.transpose(worker.weights, worker.transposed);
    functions.accumulate(worker.transposed, anchors_.rows + row * stride_, width_, stride_,
                         candidates_.sums + column * stride_, candidates_.totals + column);
  }

  int32_t rows_in_strip(int64_t strip) const {
    return prepared_.rows_in_block(int32_t(strip) * kBlockRows, rows_.classes.anchors);
  }

  // From the derivatives in `distances` to factors in `half`; those of near pairs stay as they are.
  void to_factors(const StripRow<T>& row, int64_t columns) const {
    if (row.scaled) StripWalk<T>::each_near(row.near, columns, [&](int64_t c) { row.scaled[c] = 1; });
    rows_.functions.blocks.combine(row.distances, columns, nullptr, row.scaled);
    std::copy(row.distances, row.distances + columns, row.half);
  }

  // What a block of a strip pulls with.
  void pull_part(const StripWalk<T>& walk, int32_t strip, int32_t block, Turns& turns, int i) {
    Worker& worker = workers_[size_t(i)];
    const int32_t row = strip * kBlockRows, column = block * kBlockRows, anchors = rows_in_strip(strip);
    T* weights = worker.weights;
    for (int32_t r = 0; r < anchors; ++r)
      std::copy_n(walk.row(strip, r, i).half + column, kBlockRows, weights + r * kBlockRows);
    std::fill(weights + anchors * kBlockRows, weights + kBlockRows * kBlockRows, T(0));
    if (distance_ == Distance::cosine)
      drop_zero_rows(row, anchors, column, prepared_.rows_in_block(column, rows_.classes.candidates),
                     weights);
    Near& near = worker.near.list;
    near.count = 0;
    for (int32_t r = 0; r < anchors; ++r)
      walk.each_near(walk.near(strip, r, block, i), kBlockRows, [&](int64_t c) {
        T& weight = weights[r * kBlockRows + c];
        if (weight == 0) return;
        worker.near_weights[near.count] = weight;
        near.entries[near.count++] = int32_t(r * kBlockRows + c);
        weight = 0;
      });
    worker.near.measure(row, column, worker.distances);
    turns.wait(block, strip);
    pull_near(row, column, worker);
    pull_block(row, column, worker);
    turns.finish(block);
  }

  // In self-mining a row is an anchor and a candidate.
  void join_sums(int64_t count) {
    for_each_range(rows_.pool, count, kRowsPerTask, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin * stride_; i < end * stride_; ++i) anchors_.sums[i] += candidates_.sums[i];
      for (int64_t i = begin; i < end; ++i) anchors_.totals[i] += candidates_.totals[i];
    });
    candidates_ = anchors_;
  }

  bool is_zero(const Normaliser& unit) const { return width_ > 0 && std::isinf(unit.norm); }
  int32_t candidate_row(int32_t candidate) const { return rows_.classes.candidates.index[candidate]; }

  // S = 0 of a zero row with everything, whatever either row does.
  void drop_zero_rows(int32_t row, int32_t anchors, int32_t column, int32_t candidates, T* weights) const {
    for (int32_t r = 0; r < anchors; ++r)
      if (is_zero(prepared_.anchor_units[rows_.row_of(row + r)]))
        std::fill(weights + r * kBlockRows, weights + (r + 1) * kBlockRows, T(0));
    for (int32_t c = 0; c < candidates; ++c)
      if (is_zero(prepared_.candidate_units[candidate_row(column + c)]))
        for (int32_t r = 0; r < anchors; ++r) weights[r * kBlockRows + c] = 0;
  }

  Prepared<T>& prepared_;
  Ordered<T>& rows_;
  const Distance distance_;
  const int64_t width_;
  std::vector<Worker> workers_;
  Pulls anchors_, candidates_;
  int64_t stride_ = 0;
};

}  // namespace tripletops
