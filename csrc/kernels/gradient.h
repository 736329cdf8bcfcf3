// The gradient of a loss that is a sum over pairs of an anchor and a candidate, row by row: every row is
// written by one thread, its pairs in a fixed order. Rows are counted as the user counts them.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "functions.h"
#include "parallel.h"
#include "scratch.h"

namespace tripletops {

// The two sides of the pairs. The units are those of cosine, by row; null: they are computed on the way.
struct Sides {
  Matrix anchors, candidates;
  bool self_mining = true;
  const Normaliser *anchor_units = nullptr, *candidate_units = nullptr;
};

// The gradient of one row after the other.
template <class T>
class RowGradient {
 public:
  // `storage`: of the gradient.
  RowGradient(const Functions<T>& functions, Distance distance, const Matrix& matrix, const Normaliser* units,
              Storage storage, Scratch& scratch)
      : functions_(functions.rows),
        distance_(distance),
        matrix_(matrix),
        units_(units),
        storage_(storage),
        keeps_type_(storage == type_of(T())),
        buffer_(scratch.take<T>(3 * matrix.width)),
        sum_(scratch.take<double>(matrix.width)) {}

  void start(int64_t row, void* gradient) {
    row_ = row, x_ = nullptr, unit_ = {}, pulls_ = 0, waiting_ = 0, fresh_ = true;
    const int64_t bytes = storage_ == Storage::float64 ? 8 : storage_ == Storage::float32 ? 4 : 2;
    gradient_ = static_cast<char*>(gradient) + row * matrix_.width * bytes;
    part_ = keeps_type_ ? reinterpret_cast<T*>(gradient_) : buffer_ + 2 * matrix_.width;
  }

  // What pulls add to; under cosine divided by the row's lift.
  T* part() {
    settle();
    if (fresh_) std::fill(part_, part_ + matrix_.width, T(0));
    fresh_ = false;
    return part_;
  }

  // Adds weight * d(distance)/d(row), the other row of the pair being `other` of `others`.
  void pull(const Matrix& others, const Normaliser* units, int64_t other, T distance, T weight) {
    pull(others, units, other, distance, weight, plain_factor(distance_, distance, weight));
  }

  // What x - y is multiplied by where it is as simple as that, else 0.
  static T plain_factor(Distance by, T distance, T weight) {
    if (by == Distance::cosine) return 0;
    const double factor = pull_factor(by, double(distance), double(weight));
    return is_plain_pull<T>(double(distance), factor) ? T(factor) : T(0);
  }

  void pull(const Matrix& others, const Normaliser* units, int64_t other, T distance, T weight, T factor) {
    if (weight == 0) return;
    if (!x_) {
      x_ = functions_.load(matrix_, row_, buffer_);
      unit_ = unit(units_, row_, x_);
    }
    const T* y = functions_.load(others, other, buffer_ + matrix_.width);
    if (factor != 0 && others.storage == type_of(T())) {
      other_[waiting_] = y, factor_[waiting_] = factor;
      if (++waiting_ == kWaiting) settle();
    } else {
      functions_.pull({x_, y, unit_, unit(units, other, y)}, matrix_.width, distance_, double(distance),
                      double(weight), part());
    }
    // A few pulls add up in T, many of them in double: a row that everybody picked loses no digits.
    if (++pulls_ % kPullsInT != 0) return;
    if (pulls_ == kPullsInT) std::fill(sum_, sum_ + matrix_.width, 0.0);
    const T* own = part();
    for (int64_t d = 0; d < matrix_.width; ++d) sum_[d] += double(own[d]);
    fresh_ = true;
  }

  void store() {
    const int64_t width = matrix_.width;
    const double lift = distance_ == Distance::cosine && units_ ? units_[row_].lift : unit_.lift;
    T* own = part();
    if (pulls_ >= kPullsInT || lift != 1)
      for (int64_t d = 0; d < width; ++d)
        own[d] = T(((pulls_ >= kPullsInT ? sum_[d] : 0) + double(own[d])) * lift);
    if (!keeps_type_) functions_.store(own, width, storage_, gradient_);
  }

 private:
  static constexpr int kPullsInT = 32;  // terms that are summed in T before they go into double
  static constexpr int kWaiting = 8;    // pulls that are done together, so that sums stay in registers

  static Storage type_of(float) { return Storage::float32; }
  static Storage type_of(double) { return Storage::float64; }

  Normaliser unit(const Normaliser* units, int64_t row, const T* values) const {
    if (distance_ != Distance::cosine) return {};
    return units ? units[row] : functions_.normalise(values, matrix_.width);
  }

  // Does the pulls that wait.
  void settle() {
    if (waiting_ == 0) return;
    functions_.pull_plainly(x_, other_, factor_, waiting_, matrix_.width, fresh_, part_);
    waiting_ = 0, fresh_ = false;
  }

  const RowFunctions<T>& functions_;
  const Distance distance_;
  const Matrix& matrix_;
  const Normaliser* const units_;
  const Storage storage_;
  const bool keeps_type_;
  T* const buffer_;  // the row, another row, and the part that is summed in T if that is not the gradient
  double* const sum_;
  int64_t row_ = 0;
  char* gradient_ = nullptr;
  T* part_ = nullptr;
  bool fresh_ = true;     // nothing has been written to the part
  const T* x_ = nullptr;  // loaded when the first pair pulls at it
  Normaliser unit_;
  int64_t pulls_ = 0;
  const T* other_[kWaiting];
  T factor_[kWaiting];
  int32_t waiting_ = 0;
};

// Writes every row of a gradient: fill(row, worker, RowGradient&) adds what pulls at it. Null: it is not
// wanted.
template <class T, class Fill>
void write_gradient(const Functions<T>& functions, const Pool& pool, Scratch& scratch, Distance distance,
                    const Matrix& matrix, const Normaliser* units, Storage storage, void* gradient,
                    const Fill& fill) {
  if (!gradient || matrix.width == 0) return;
  std::vector<RowGradient<T>> rows;
  for (int worker = 0; worker < pool.threads; ++worker)
    rows.emplace_back(functions, distance, matrix, units, storage, scratch);
  for_each_range(pool, matrix.count, kRowsInTurn, [&](int64_t begin, int64_t end, int worker) {
    for (int64_t row = begin; row < end; ++row) {
      rows[size_t(worker)].start(row, gradient);
      fill(row, worker, rows[size_t(worker)]);
      rows[size_t(worker)].store();
    }
  });
}

// Both gradients: fill(is_anchor, row, worker, RowGradient&). In self-mining there is one, of rows as
// anchors.
template <class T, class Fill>
void write_gradients(const Functions<T>& functions, const Pool& pool, Scratch& scratch, Distance distance,
                     const Sides& sides, const Gradients<T>& wanted, const Fill& fill) {
  const auto fill_as = [&](bool is_anchor) {
    return [&, is_anchor](int64_t row, int worker, RowGradient<T>& to) { fill(is_anchor, row, worker, to); };
  };
  const Storage own = sides.anchors.storage;
  const Storage storage = wanted.unrounded && own != Storage::float64 ? Storage::float32 : own;
  write_gradient(functions, pool, scratch, distance, sides.anchors, sides.anchor_units, storage,
                 wanted.anchors, fill_as(true));
  if (!sides.self_mining)
    write_gradient(functions, pool, scratch, distance, sides.candidates, sides.candidate_units, storage,
                   wanted.candidates, fill_as(false));
}

// scaled = values * factor. False where a gradient that was computed with the factor might have other digits
// or be finite: a value, or the factor, is too far from 1.
template <class T>
bool scale_gradient(const T* values, int64_t count, T factor, T* scaled) {
  constexpr T largest = T(sizeof(T) == sizeof(float) ? 0x1p100 : 0x1p900), smallest = 1 / largest;
  const T size = std::abs(factor);
  int outside = !(size >= T(0x1p-20) && size <= T(0x1p20));
  for (int64_t i = 0; i < count; ++i) {
    const T magnitude = std::abs(values[i]);
    outside |= (magnitude != 0) & !((magnitude >= smallest) & (magnitude <= largest));
    scaled[i] = values[i] * factor + T(0);  // sums begin with 0, so they are never -0
  }
  return !outside;
}

// Pairs in a list, anchor by anchor, and what each of them pulls with.
template <class T>
class PairList {
 public:
  // At most `most` pairs.
  PairList(const Sides& sides, Distance by, int64_t most, Scratch& scratch)
      : sides_(sides),
        by_(by),
        begin_(scratch.filled(sides.anchors.count, int64_t(0))),
        end_(scratch.filled(sides.anchors.count, int64_t(0))),
        candidate_(scratch.take<int32_t>(most)),
        distance_(scratch.take<T>(most)),
        weight_(scratch.take<T>(most)),
        factor_(scratch.take<T>(most)) {}

  // Whose pairs are added next. Each anchor at most once.
  void start(int64_t anchor) { anchor_ = anchor, begin_[anchor] = end_[anchor] = count_; }

  // `weight`: d loss / d distance.
  void add(int64_t candidate, T distance, T weight) {
    candidate_[count_] = int32_t(candidate), distance_[count_] = distance, weight_[count_] = weight;
    factor_[count_] = RowGradient<T>::plain_factor(by_, distance, weight);
    end_[anchor_] = ++count_;
  }

  // Tells which pairs each candidate is in, in the order of the anchors' rows.
  void sort_by_candidate(Scratch& scratch) {
    const int64_t candidates = sides_.candidates.count;
    partner_begin_ = scratch.filled(candidates + 2, int64_t(0));
    partner_ = scratch.take<int32_t>(count_);
    partner_pair_ = scratch.take<int64_t>(count_);
    for (int64_t pair = 0; pair < count_; ++pair) ++partner_begin_[candidate_[pair] + 2];
    for (int64_t c = 0; c < candidates; ++c) partner_begin_[c + 2] += partner_begin_[c + 1];
    for (int64_t anchor = 0; anchor < sides_.anchors.count; ++anchor)
      for (int64_t pair = begin_[anchor]; pair < end_[anchor]; ++pair) {
        const int64_t entry = partner_begin_[candidate_[pair] + 1]++;
        partner_[entry] = int32_t(anchor);
        partner_pair_[entry] = pair;
      }
  }

  void pull(bool is_anchor, int64_t row, RowGradient<T>& to) const {
    if (is_anchor)
      for (int64_t pair = begin_[row]; pair < end_[row]; ++pair)
        to.pull(sides_.candidates, sides_.candidate_units, candidate_[pair], distance_[pair], weight_[pair],
                factor_[pair]);
    if (is_anchor && !sides_.self_mining) return;
    for (int64_t entry = partner_begin_[row]; entry < partner_begin_[row + 1]; ++entry) {
      const int64_t pair = partner_pair_[entry];
      to.pull(sides_.anchors, sides_.anchor_units, partner_[entry], distance_[pair], weight_[pair],
              factor_[pair]);
    }
  }

 private:
  const Sides& sides_;
  const Distance by_;
  int64_t *const begin_, *const end_;  // anchor row -> its first pair and the one behind its last
  int32_t* const candidate_;
  T *const distance_, *const weight_, *const factor_;
  int64_t count_ = 0, anchor_ = 0;
  int64_t* partner_begin_ = nullptr;  // candidate row -> first entry; one more at the end
  int32_t* partner_ = nullptr;        // entry -> anchor row
  int64_t* partner_pair_ = nullptr;   // entry -> pair
};

}  // namespace tripletops
