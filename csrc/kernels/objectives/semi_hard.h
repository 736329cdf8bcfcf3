// FaceNet's negative for every (anchor, positive): the nearest one strictly farther than the positive, else
// the farthest of all.
#pragma once

#include "../objective.h"

namespace tripletops {

template <class T>
class SemiHard : public ManyTuples<T> {
 public:
  using ManyTuples<T>::ManyTuples;

 protected:
  void begin_evaluation() override { pick(); }
  void begin_differentiation() override { pick(); }

  void add_terms(int32_t anchor, T*) override {
    for (int64_t i = begin_[anchor]; i < begin_[anchor + 1]; ++i)
      if (const double z = term_of_pair(i); z > 0)
        this->sums.negative_loss[anchor] += z, ++this->sums.negative_terms[anchor];
  }

  Shares reduce() override {
    double counted = 0;
    for (int32_t a = 0; a < this->anchors(); ++a)
      if (this->rows.is_valid(a)) counted += double(this->rows.positive_count(a));
    return this->shares_of(counted, this->negatives_above_zero);
  }

  bool pulls_positives() const override { return false; }
  int64_t most_pairs() const override { return 2 * begin_[this->anchors()]; }
  void list_pairs(int32_t anchor, double upstream, PairList<T>& pairs) const override {
    const Shares share = *this->result.shares;
    for (int64_t i = begin_[anchor]; i < begin_[anchor + 1]; ++i)
      if (term_of_pair(i) > 0) {
        pairs.add(positive_[i], d_ap_[i], T(upstream * share.positive));
        pairs.add(negative_[i], d_an_[i], T(-upstream * share.negative));
      }
  }

 private:
  double term_of_pair(int64_t pair) const {
    return double(d_ap_[pair]) - double(d_an_[pair]) + this->call.numbers.margin;
  }

  void pick() {
    Scratch& scratch = this->rows.scratch;
    begin_ = this->positive_lists();
    const int64_t pairs = begin_[this->anchors()];
    constexpr T none = std::numeric_limits<T>::max();
    positive_ = scratch.take<int32_t>(pairs), negative_ = scratch.filled(pairs, kNobody);
    d_ap_ = scratch.take<T>(pairs), d_an_ = scratch.take<T>(pairs);
    Floors<T> floors;
    floors.begin = begin_;
    floors.floor = sorted_keys();
    floors.beyond = {scratch.filled(pairs, none), negative_};
    floors.farthest = {this->rows.by_anchor(none), this->rows.by_anchor(kNobody)};
    const auto load = [&](int32_t row, int32_t column, int worker) -> const T* {
      T* block = this->stream->block(worker);
      return this->prepared.load_block(row, column, nullptr, block, nullptr) ? block : nullptr;
    };
    const int32_t* index = this->rows.classes.candidates.index;
    this->prepared.visit_rows(load, [&](int32_t anchor, int32_t count, int32_t candidate, const T* half) {
      this->functions.blocks.keep_beyond(floors, anchor, count, half, index + candidate);
    });
    this->for_each_anchor([&](int32_t a, T* buffer) {
      if (begin_[a] < begin_[a + 1]) settle(floors, a, buffer);
    });
  }

  // Orders the positives of every anchor by their keys, which are returned.
  T* sorted_keys() {
    T* keys = positive_keys();
    this->for_each_anchor([&](int32_t a, T* buffer) {
      struct Entry {
        T key;
        int32_t row;
        T d;
      };
      std::vector<Entry> entries;
      if (begin_[a] == begin_[a + 1]) return;
      this->prepared.each_positive(a, buffer, [&](int32_t row, T d) {
        entries.push_back({keys[begin_[a] + int64_t(entries.size())], row, d});
      });
      std::sort(entries.begin(), entries.end(), [](const Entry& one, const Entry& other) {
        return one.key < other.key || (one.key == other.key && one.row < other.row);
      });
      for (size_t i = 0; i < entries.size(); ++i) {
        const int64_t at = begin_[a] + int64_t(i);
        keys[at] = entries[i].key, positive_[at] = entries[i].row, d_ap_[at] = entries[i].d;
      }
    });
    return keys;
  }

  // The keys of the positives as the blocks compute them: those of their duplicates are equal bit for bit.
  T* positive_keys() {
    const Ordered<T>& rows = this->rows;
    T* keys = this->rows.scratch.template take<T>(begin_[rows.anchors()]);
    const int64_t blocks = (rows.anchors() + kBlockRows - 1) / kBlockRows;
    for_each_task(rows.pool, blocks, [&](int64_t block, int worker) {
      T* half = this->stream->block(worker);
      const int32_t row = int32_t(block) * kBlockRows;
      const int32_t end = row + this->prepared.rows_in_block(row, rows.classes.anchors);
      int32_t column = rows.class_begin(row) / kBlockRows * kBlockRows;
      for (; column < rows.class_end(end - 1); column += kBlockRows) {
        this->functions.tiles.half_squares(this->prepared.pairs, row, column, nullptr, half, nullptr,
                                           nullptr);
        for (int32_t a = row; a < end; ++a)
          if (begin_[a] < begin_[a + 1])
            copy_keys(a, column, half + (a - row) * kBlockRows, keys + begin_[a]);
      }
    });
    return keys;
  }

  // Those of one anchor from its row of a block; self is left out.
  void copy_keys(int32_t anchor, int32_t column, const T* half, T* keys) const {
    const int32_t self = this->rows.self_position[anchor], first = this->rows.class_begin(anchor);
    const int32_t last = std::min(this->rows.class_end(anchor), column + kBlockRows);
    for (int32_t c = std::max(first, column); c < last; ++c)
      if (c != self) keys[c - first - (self >= first && self < c)] = half[c - column];
  }

  // Measures what was found. A negative that is not strictly farther after all is searched for in the rows.
  void settle(const Floors<T>& floors, int32_t anchor, T* buffer) {
    const int64_t begin = begin_[anchor], end = begin_[anchor + 1];
    // What lies beyond a floor lies beyond all lower ones.
    for (int64_t i = end - 1; i-- > begin;)
      improve(floors.beyond.key[i + 1], negative_[i + 1], floors.beyond.key + i, negative_ + i);
    const int32_t farthest = floors.farthest.index[anchor];
    for (int64_t i = begin; i < end; ++i) {
      int32_t& negative = negative_[i];
      T& d_an = d_an_[i];
      if (negative != kNobody) {
        d_an = this->distance_of(anchor, negative, buffer);
        if (!(d_an > d_ap_[i])) {
          const T* x = this->functions.rows.load(this->call.batch.anchors, this->row_of(anchor), buffer);
          negative =
              this->prepared.nearest_beyond(anchor, x, double(d_ap_[i]), buffer + this->rows.width, &d_an);
        }
      }
      if (negative == kNobody) negative = farthest, d_an = this->distance_of(anchor, farthest, buffer);
    }
  }

  const int64_t* begin_ = nullptr;                     // anchor -> first pair; one more entry at the end
  int32_t *positive_ = nullptr, *negative_ = nullptr;  // rows, by pair
  T *d_ap_ = nullptr, *d_an_ = nullptr;
};

}  // namespace tripletops
