// Sums over all negatives of all anchors, streamed block by block: what they cost, and how they pull.
//
// The gradient of a sum of weights times distances is, for every row x, total * x - sum of factor * y over
// the rows y it is paired with (factor: the weight, for euclidean over the distance; total: their sum). Both
// come out of one product of the block of factors with the framed rows of the other side. Euclidean distances
// are those of framed rows too, so that the scale of the frame cancels.
#pragma once

#include "prepare.h"

namespace tripletops {

// A distance is in `reach` with something to spare: what comes of a pair is decided by the distance itself.
constexpr double kSpare = 1 + 1e-4;

template <class T>
struct Streamed : Prepared<T> {
  using Base = Prepared<T>;
  using Base::anchor_units, Base::candidate_units, Base::scale, Base::frame, Base::walk, Base::distance;
  using Base::Base;
  using Base::kernels, Base::pool, Base::batch, Base::scratch, Base::width, Base::classes, Base::buffers;

  struct Worker {
    T *distances, *scaled, *transposed, *weights, *other;
    Near near;
    T* near_weights;
    T* rows;  // two of them
  };
  std::vector<Worker> workers;

  int32_t anchors() const { return classes.anchors.count; }
  int32_t row_of(int32_t anchor) const { return classes.anchors.index[anchor]; }

  void hire_workers() {
    for (int i = 0; i < pool.threads; ++i) {
      Worker worker = {};
      for (T** block : {&worker.distances, &worker.scaled, &worker.transposed, &worker.weights, &worker.other,
                        &worker.near_weights})
        *block = this->take_block();
      worker.near.entries = scratch.template take<int32_t>(kBlockRows * kBlockRows);
      worker.rows = scratch.template take<T>(2 * width);
      workers.push_back(worker);
    }
  }

  template <class V>
  V* by_anchor(V value) {
    return scratch.filled(anchors() + kPadding, value);
  }

  // The half squared distance below which a negative can matter to each anchor; null: always.
  const T* reach_of(const Costs<T>& costs) {
    if (costs.kind == Cost::soft) return nullptr;
    T* reach = by_anchor(T(-1));
    for (int32_t a = 0; a < anchors(); ++a) {
      const double limit = double(costs.limit[a]), scaled = limit * scale;
      if (!(limit > 0)) continue;
      const double half = distance == Distance::cosine      ? limit
                          : distance == Distance::euclidean ? scaled * scaled / 2
                                                            : scaled * scale / 2;
      constexpr double least = std::numeric_limits<T>::denorm_min();  // 0 would drop pairs at distance 0
      reach[a] = T(std::clamp(half * kSpare, least, double(std::numeric_limits<T>::infinity())));
    }
    return reach;
  }

  // The distances of a block's negatives; what Gram arithmetic cannot tell is measured. `scaled`: see
  // Kernels::to_distances.
  bool load_distances(int32_t row, int32_t column, const T* reach, Worker& worker, T* scaled) const {
    if (!this->load_block(row, column, reach, worker.distances, &worker.near)) return false;
    kernels.to_distances(worker.distances, distance, T(1 / scale), scaled);
    for (int32_t i = 0; i < worker.near.count; ++i) {
      const int32_t at = worker.near.entries[i], candidate = column + at % kBlockRows;
      worker.distances[at] =
          T(this->measured(row_of(row + at / kBlockRows), classes.candidates.index[candidate], worker.rows));
    }
    return true;
  }

  void stream_costs(const Costs<T>& costs) {
    const T* reach = reach_of(costs);
    const auto load = [&](int32_t row, int32_t column, int i) -> const T* {
      Worker& worker = workers[size_t(i)];
      return load_distances(row, column, reach, worker, nullptr) ? worker.distances : nullptr;
    };
    this->visit_rows(load, [&](int32_t anchor, int32_t count, int32_t, const T* distances) {
      kernels.add_costs(costs, anchor, count, distances);
    });
  }

  // One side of the gradient, by position.
  struct Pulls {
    T *rows = nullptr, *sums = nullptr;
    double* totals = nullptr;
  };
  Pulls anchor_pulls, candidate_pulls;
  int64_t stride = 0;

  Pulls fresh_pulls(const Rows& rows, const Order& order, const Normaliser* units) {
    const int64_t count = (order.count + kBlockRows - 1) / kBlockRows * kBlockRows;
    Pulls pulls = {scratch.template take<T>(count * stride), scratch.template take<T>(count * stride),
                   scratch.template take<double>(count)};
    for_each_range(pool, count, kRowsPerTask, [&](int64_t begin, int64_t end, int worker) {
      std::fill(pulls.rows + begin * stride, pulls.rows + end * stride, T(0));
      std::fill(pulls.sums + begin * stride, pulls.sums + end * stride, T(0));
      std::fill(pulls.totals + begin, pulls.totals + end, 0.0);
      for (int64_t i = begin; i < std::min<int64_t>(end, order.count); ++i) {
        const int32_t index = order.index[i];
        kernels.frame(kernels.load(rows, index, buffers[worker]), frame, units ? units + index : nullptr,
                      width, pulls.rows + i * stride);
      }
    });
    return pulls;
  }

  void stream_weights(const Costs<T>& costs) {
    stride = (width + 31) / 32 * 32 + 16;  // whole panels; not a power of two, which would crowd the cache
    anchor_pulls = fresh_pulls(batch.anchors, classes.anchors, anchor_units);
    candidate_pulls =
        batch.self_mining ? anchor_pulls : fresh_pulls(batch.candidates, classes.candidates, candidate_units);
    const T* reach = reach_of(costs);
    this->visit_blocks([&](int32_t row, int32_t column, int i) {
      Worker& worker = workers[size_t(i)];
      T* scaled = distance == Distance::euclidean ? worker.scaled : nullptr;
      if (!load_distances(row, column, reach, worker, scaled)) return;
      const int32_t rows = this->rows_in_block(row, classes.anchors);
      const int32_t columns = this->rows_in_block(column, classes.candidates);
      T* weights = worker.weights;
      kernels.weigh(costs, row, rows, worker.distances, weights);
      const bool both = this->serves_both(row, column);
      if (both) {
        kernels.transpose(worker.distances, worker.transposed);
        kernels.weigh(costs, column, columns, worker.transposed, worker.other);
        kernels.transpose(worker.other, worker.transposed);
      }
      for (int32_t n = 0; n < worker.near.count; ++n) {
        const int32_t at = worker.near.entries[n];
        worker.near_weights[n] = weights[at] + (both ? worker.transposed[at] : 0);
      }
      kernels.combine(weights, both ? worker.transposed : nullptr, scaled);
      if (distance == Distance::cosine) drop_zero_rows(row, rows, column, columns, weights);
      for (int32_t n = 0; n < worker.near.count; ++n) {
        const int32_t at = worker.near.entries[n], r = row + at / kBlockRows, c = column + at % kBlockRows;
        pull_near(row_of(r), classes.candidates.index[c], double(worker.distances[at]),
                  double(worker.near_weights[n]), anchor_pulls.sums + r * stride,
                  candidate_pulls.sums + c * stride, worker.rows);
        weights[at] = 0;
      }
      kernels.accumulate(weights, candidate_pulls.rows + column * stride, width, stride,
                         anchor_pulls.sums + row * stride, anchor_pulls.totals + row);
      kernels.transpose(weights, worker.transposed);
      kernels.accumulate(worker.transposed, anchor_pulls.rows + row * stride, width, stride,
                         candidate_pulls.sums + column * stride, candidate_pulls.totals + column);
    });
  }

  // A pair that Gram arithmetic cannot tell apart pulls by the difference of its rows.
  void pull_near(int32_t anchor, int32_t candidate, double apart, double weight, T* anchor_sums,
                 T* candidate_sums, T* buffer) const {
    const T* x = kernels.load(batch.anchors, anchor, buffer);
    const T* y = kernels.load(batch.candidates, candidate, buffer + width);
    if (distance == Distance::euclidean) {
      kernels.pull({x, y, {}, {}}, width, distance, apart, -weight, anchor_sums);
      kernels.pull({x, y, {}, {}}, width, distance, apart, weight, candidate_sums);
      return;
    }
    const bool cosine = distance == Distance::cosine;
    const Normaliser u = cosine ? anchor_units[anchor] : Normaliser{scale, 1};
    const Normaliser v = cosine ? candidate_units[candidate] : Normaliser{scale, 1};
    if (cosine && (is_zero(u) || is_zero(v))) return;
    for (int64_t d = 0; d < width; ++d) {
      const T pull = T(weight * (double(x[d]) * u.scale / u.norm - double(y[d]) * v.scale / v.norm));
      anchor_sums[d] -= pull;
      candidate_sums[d] += pull;
    }
  }

  bool is_zero(const Normaliser& unit) const { return width > 0 && std::isinf(unit.norm); }

  // S = 0 of a zero row with everything, whatever either row does.
  void drop_zero_rows(int32_t row, int32_t rows, int32_t column, int32_t columns, T* weights) const {
    for (int32_t r = 0; r < rows; ++r)
      if (is_zero(anchor_units[row_of(row + r)]))
        std::fill(weights + r * kBlockRows, weights + (r + 1) * kBlockRows, T(0));
    for (int32_t c = 0; c < columns; ++c)
      if (is_zero(candidate_units[classes.candidates.index[column + c]]))
        for (int32_t r = 0; r < rows; ++r) weights[r * kBlockRows + c] = 0;
  }

  // Adds what was streamed to the gradient of an anchor or candidate, under cosine divided by its lift.
  // `buffer` holds a row.
  void add_streamed(bool is_anchor, int32_t position, T* buffer, T* gradient) const {
    const Pulls& pulls = is_anchor ? anchor_pulls : candidate_pulls;
    const T *own = pulls.rows + position * stride, *sums = pulls.sums + position * stride;
    const double total = pulls.totals[position];
    const auto pull = [&](int64_t d) { return total * double(own[d]) - double(sums[d]); };
    if (distance != Distance::cosine) {
      const double factor = distance == Distance::euclidean ? 1 : 2 / scale;
      for (int64_t d = 0; d < width; ++d) gradient[d] += T(pull(d) * factor);
      return;
    }
    const int32_t row = (is_anchor ? classes.anchors : classes.candidates).index[position];
    const Normaliser unit = (is_anchor ? anchor_units : candidate_units)[row];
    if (is_zero(unit)) return;
    // What pulls at the unit row, less its part along that row.
    const T* x = kernels.load(is_anchor ? batch.anchors : batch.candidates, row, buffer);
    const auto direction = [&](int64_t d) { return double(x[d]) * unit.scale / unit.norm; };
    const double outer = unit.scale / (unit.norm * unit.lift);
    double along = 0;
    for (int64_t d = 0; d < width; ++d) along += pull(d) * direction(d);
    for (int64_t d = 0; d < width; ++d) gradient[d] += T((pull(d) - along * direction(d)) * outer);
  }
};

}  // namespace tripletops
