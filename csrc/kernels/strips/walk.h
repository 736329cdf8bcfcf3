// Strips: kBlockRows anchors with all their candidates, row by row. Where anchors have many positives,
// what an objective knows of all (anchor, positive) would grow with N * K. Of a strip it does not have
// to be kept: each row is worked on by itself, its lists in the cache, and then forgotten. The price
// is that a strip serves its anchors alone, so that every pair is computed from both sides.
#pragma once

#include "../prepared.h"

namespace tripletops {

// One anchor's row of a strip.
template <class T>
struct StripRow {
  int32_t anchor = 0;
  int worker = 0;
  // By candidate: half squared distances and, where products cannot tell them, a bit; infinite for self and
  // behind the last.
  T* half = nullptr;
  uint32_t* near = nullptr;
  // By candidate, once StripWalk::load_distances has been called: distances and, under euclidean, those of
  // the frame.
  T *distances = nullptr, *scaled = nullptr;
};

template <class T>
class StripWalk {
 public:
  // Whether anchors have more than `many` positives on average: below that, lists of all of them cost less
  // than computing every pair twice.
  static bool pays(const Ordered<T>& rows, int64_t many) {
    int64_t pairs = 0;
    for (int32_t a = 0; a < rows.anchors(); ++a) pairs += rows.positive_count(a);
    return pairs > many * rows.anchors();
  }

  explicit StripWalk(Prepared<T>& prepared)
      : prepared_(prepared), rows_(prepared.rows), pool_(prepared.rows.pool), columns_(padded_columns()) {
    // A strip is O(M) of memory: there may be as many as are O(M * D) together.
    constexpr int64_t bytes_per_element = 16;
    const int64_t strips = std::max<int64_t>(1, bytes_per_element * rows_.width / (kBlockRows * 4));
    pool_.threads = int(std::min<int64_t>(pool_.threads, strips));
    Scratch& scratch = rows_.scratch;
    for (int worker = 0; worker < pool_.threads; ++worker)
      workers_.push_back({scratch.take<T>(kBlockRows * columns_),
                          scratch.take<uint32_t>(kBlockRows * columns_ / kBits),
                          scratch.take<T>(columns_),
                          scratch.take<T>(columns_),
                          prepared.take_block(),
                          {scratch.take<int32_t>(kBlockRows * kBlockRows), 0}});
  }

  const Pool& pool() const { return pool_; }
  int64_t columns() const { return columns_; }
  int32_t strips() const { return (rows_.anchors() + kBlockRows - 1) / kBlockRows; }

  // Computes a strip.
  void load(int32_t strip, int worker) {
    Worker& own = workers_[size_t(worker)];
    const int32_t row = strip * kBlockRows, anchors = prepared_.rows_in_block(row, rows_.classes.anchors);
    std::fill(own.near, own.near + anchors * columns_ / kBits, 0u);
    for (int32_t column = 0; column < rows_.classes.candidates.count; column += kBlockRows) {
      prepared_.load_pairs(row, column, own.block, &own.list);
      for (int32_t r = 0; r < anchors; ++r)
        std::copy(own.block + r * kBlockRows, own.block + (r + 1) * kBlockRows,
                  own.half + r * columns_ + column);
      for (int32_t i = 0; i < own.list.count; ++i) {
        const int32_t r = own.list.entries[i] / kBlockRows, c = column + own.list.entries[i] % kBlockRows;
        own.near[(r * columns_ + c) / kBits] |= 1u << (c % kBits);
      }
    }
  }

  // Row `r` of the worker's strip.
  StripRow<T> row(int32_t strip, int32_t r, int worker) const {
    const Worker& own = workers_[size_t(worker)];
    return {strip * kBlockRows + r,  worker,
            own.half + r * columns_, own.near + r * columns_ / kBits,
            own.distances,           prepared_.distance == Distance::euclidean ? own.scaled : nullptr};
  }

  // The bits of that row in a block of candidates.
  const uint32_t* near(int32_t strip, int32_t r, int32_t block, int worker) const {
    return row(strip, r, worker).near + block * kBlockRows / kBits;
  }

  // `buffer` holds two rows.
  void load_distances(const StripRow<T>& row, T* buffer) const {
    std::copy(row.half, row.half + columns_, row.distances);
    rows_.functions.blocks.to_distances(row.distances, columns_, prepared_.distance, T(1 / prepared_.scale),
                                        row.scaled);
    each_near(row.near, columns_, [&](int64_t c) {
      row.distances[c] =
          T(prepared_.measured(rows_.row_of(row.anchor), rows_.classes.candidates.index[c], buffer));
    });
  }

  // Calls visit(c) for every bit c that is set.
  template <class Visit>
  static void each_near(const uint32_t* near, int64_t columns, const Visit& visit) {
    for (int64_t word = 0; word < columns / kBits; ++word)
      for (uint32_t bits = near[word]; bits; bits &= bits - 1) visit(word * kBits + __builtin_ctz(bits));
  }

 private:
  static constexpr int64_t kBits = 32;
  static_assert(kBlockRows % kBits == 0);

  struct Worker {
    T* half;
    uint32_t* near;
    T *distances, *scaled, *block;
    Near list;
  };

  int64_t padded_columns() const {
    return (int64_t(rows_.classes.candidates.count) + kBlockRows - 1) / kBlockRows * kBlockRows;
  }

  Prepared<T>& prepared_;
  Ordered<T>& rows_;
  Pool pool_;
  const int64_t columns_;
  std::vector<Worker> workers_;
};

}  // namespace tripletops
