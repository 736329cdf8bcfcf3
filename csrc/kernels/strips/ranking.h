// Ranking many numbers among the values of one list: a uniform grid over the range of the values tells where
// to start, so that the time for a number does not grow with the list. Cells are in ascending order for
// values and numbers alike, so ranks are exact whatever the grid rounds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "../scratch.h"

namespace tripletops {

template <class T>
class Ranking {
 public:
  // Room for lists of up to `most` values.
  Ranking(int64_t most, Scratch& scratch)
      : values_(scratch.take<T>(most + 1)),
        origin_(scratch.take<int32_t>(most)),
        start_(scratch.take<int32_t>(kCellsPerValue * most + 2)),
        cells_of_(scratch.take<int32_t>(most)) {}

  // Sorts `values`; `count` > 0.
  void sort(const T* values, int64_t count) {
    count_ = count;
    T high = lowest_ = values[0];
    for (int64_t i = 1; i < count; ++i) {
      lowest_ = values[i] < lowest_ ? values[i] : lowest_;
      high = values[i] > high ? values[i] : high;
    }
    top_ = T(kCellsPerValue * count);
    per_unit_ = top_ / (high - lowest_);
    if (!(per_unit_ <= std::numeric_limits<T>::max())) per_unit_ = 0;  // all in one cell
    cells_of(values, count, cells_of_);
    const int64_t cells = kCellsPerValue * count + 1;
    std::fill(start_, start_ + cells + 1, 0);
    for (int64_t i = 0; i < count; ++i) ++start_[cells_of_[i]];
    int32_t behind = 0;
    for (int64_t cell = 0; cell < cells; ++cell) start_[cell] = behind += start_[cell];
    start_[cells] = behind;
    // From behind, so that every cell's start ends up where it belongs and equal values keep their order.
    for (int64_t i = count - 1; i >= 0; --i) {
      const int32_t at = --start_[cells_of_[i]];
      values_[at] = values[i], origin_[at] = int32_t(i);
    }
    values_[count] = std::numeric_limits<T>::quiet_NaN();
    if (per_unit_ == 0)
      sort_cell(0, count);
    else
      for (int64_t cell = 0; cell < cells; ++cell) sort_cell(start_[cell], start_[cell + 1]);
  }

  int64_t count() const { return count_; }
  // Ascending, a NaN behind the last, which passes for nobody; and which number each had before.
  const T* values() const { return values_; }
  const int32_t* origin() const { return origin_; }

  // Where in the grid numbers lie, infinite ones included.
  void cells_of(const T* numbers, int64_t count, int32_t* cells) const {
    for (int64_t i = 0; i < count; ++i) {
      T cell = (numbers[i] - lowest_) * per_unit_;
      cell = cell < top_ ? cell : top_;
      cells[i] = int32_t(cell > 0 ? cell : 0);
    }
  }

  // How many values come before a number that lies in `cell`: passes(value) is true for those, and for no
  // later one. Two steps without a branch are enough for nearly every number.
  template <class Passes>
  int64_t rank(int32_t cell, const Passes& passes) const {
    int64_t first = start_[cell];
    first += passes(values_[first]);
    first += passes(values_[first]);
    if (__builtin_expect(passes(values_[first]), 0))
      first = std::partition_point(values_ + first, values_ + start_[cell + 1], passes) - values_;
    return first;
  }

 private:
  static constexpr int64_t kCellsPerValue = 4, kInsertion = 16;

  void sort_cell(int64_t begin, int64_t end) {
    if (end - begin > kInsertion) return sort_many(begin, end);
    for (int64_t i = begin + 1; i < end; ++i) {
      const T value = values_[i];
      const int32_t origin = origin_[i];
      int64_t at = i;
      for (; at > begin && values_[at - 1] > value; --at)
        values_[at] = values_[at - 1], origin_[at] = origin_[at - 1];
      values_[at] = value, origin_[at] = origin;
    }
  }

  // By origins, whose values are looked up: sorted in a place that is free by now.
  void sort_many(int64_t begin, int64_t end) {
    struct Entry {
      T value;
      int32_t origin;
    };
    std::vector<Entry> entries;
    for (int64_t i = begin; i < end; ++i) entries.push_back({values_[i], origin_[i]});
    std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
      return a.value < b.value || (a.value == b.value && a.origin < b.origin);
    });
    for (int64_t i = begin; i < end; ++i)
      values_[i] = entries[size_t(i - begin)].value, origin_[i] = entries[size_t(i - begin)].origin;
  }

  T* const values_;
  int32_t* const origin_;    // sorted -> as given
  int32_t* const start_;     // cell -> its first value; one more entry at the end
  int32_t* const cells_of_;  // by value, as given
  int64_t count_ = 0;
  T lowest_ = 0, per_unit_ = 0, top_ = 0;
};

}  // namespace tripletops
