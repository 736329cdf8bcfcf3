// FaceNet's negative for every (anchor, positive): the nearest one strictly farther than the positive, else
// the farthest of all. Few pairs are kept for all anchors at once, and those of small classes from forward to
// backward; where there are many, an anchor's pairs are done with one after the other (strips/).
#pragma once

#include "../strips/negatives.h"

namespace tripletops {

template <class T>
class SemiHard : public ManyTuples<T> {
 public:
  using ManyTuples<T>::ManyTuples;

 protected:
  void begin_evaluation() override {
    if (strips_)
      evaluate_strips();
    else
      pick();
  }

  void begin_differentiation() override {
    if (!strips_ && all_are_kept())
      take_kept();
    else if (!strips_)
      pick();
  }

  Cost<T> weighed_cost(const T* weight) override {
    if (strips_) weigh_strips(weight);
    return {};
  }

  void add_terms(int32_t anchor, T*) override {
    if (strips_) return;
    for (int64_t i = begin_[anchor]; i < begin_[anchor + 1]; ++i) add_pair(anchor, pairs_[i]);
  }

  Shares reduce() override {
    double counted = 0;
    for (int32_t a = 0; a < this->anchors(); ++a)
      if (this->rows.is_valid(a)) counted += double(this->rows.positive_count(a));
    return this->shares_of(counted, this->negatives_above_zero);
  }

  bool pulls_positives() const override { return false; }
  int64_t most_pairs() const override { return strips_ ? 0 : 2 * begin_[this->anchors()]; }
  void list_pairs(int32_t anchor, double upstream, PairList<T>& pairs) const override {
    if (strips_) return;
    const Shares share = *this->result.shares;
    for (int64_t i = begin_[anchor]; i < begin_[anchor + 1]; ++i)
      if (const PickedPair<T>& pair = pairs_[i]; term_of(pair) > 0) {
        pairs.add(row_of_candidate(pair.positive), pair.d_ap, T(upstream * share.positive));
        pairs.add(pair.negative, pair.d_an, T(-upstream * share.negative));
      }
  }

 private:
  double term_of(const PickedPair<T>& pair) const {
    return double(pair.d_ap) - double(pair.d_an) + this->call.numbers.margin;
  }

  // Adds the term, and keeps the pick for backward.
  void add_pair(int32_t anchor, const PickedPair<T>& pair) {
    if (const double z = term_of(pair); z > 0)
      this->sums.negative_loss[anchor] += z, ++this->sums.negative_terms[anchor];
    const int32_t place = pair.positive - this->rows.class_begin(anchor);
    if (place < kKept && pair.negative < kCounted)
      this->saved(place)[this->row_of(anchor)] = T(pair.negative + 1);
  }

  int32_t row_of_candidate(int32_t candidate) const { return this->rows.classes.candidates.index[candidate]; }

  // By row: 1 + the row of the negative that was picked beside the candidate at each place of the class, the
  // first ones; 0: none was, or it has a number that T can't hold.
  static constexpr int32_t kKept = int32_t(kSaved[int(ObjectiveWord::semi_hard)]);
  static constexpr int32_t kCounted = 1 << 24;

  bool all_are_kept() const {
    return largest_class(this->rows) <= kKept && this->call.batch.candidates.count <= kCounted;
  }

  void take_kept() {
    start_lists();
    this->for_each_anchor([&](int32_t a, T* buffer) {
      PickedPair<T>* next = pairs_ + begin_[a];
      if (begin_[a] == begin_[a + 1]) return;
      each_candidate_of_class(a, [&](int32_t c) {
        const int32_t place = c - this->rows.class_begin(a);
        const int32_t negative = int32_t(this->saved(place)[this->row_of(a)]) - 1;
        *next++ = {c, negative, this->distance_of(a, row_of_candidate(c), buffer),
                   this->distance_of(a, negative, buffer)};
      });
    });
  }

  void start_lists() {
    begin_ = this->positive_lists();
    pairs_ = this->rows.scratch.template take<PickedPair<T>>(begin_[this->anchors()]);
  }

  // Calls visit(candidate) for every positive.
  template <class Visit>
  void each_candidate_of_class(int32_t anchor, const Visit& visit) const {
    for (int32_t c = this->rows.class_begin(anchor); c < this->rows.class_end(anchor); ++c)
      if (c != this->rows.self_position[anchor]) visit(c);
  }

  // Finds and measures the pairs of all anchors.
  void pick() {
    Scratch& scratch = this->rows.scratch;
    start_lists();
    const int64_t pairs = begin_[this->anchors()];
    constexpr T none = std::numeric_limits<T>::max();
    Floors<T> floors;
    floors.begin = begin_;
    floors.floor = sorted_keys();
    floors.beyond = {scratch.filled(pairs, none), scratch.filled(pairs, kNobody)};
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
      const int64_t begin = begin_[a], number = begin_[a + 1] - begin;
      if (number == 0) return;
      const Picks<T> beyond = {floors.beyond.key + begin, floors.beyond.index + begin};
      keep_beyond_lower_floors(beyond, number);
      PickedPair<T> last = {0, kNobody, 0, 0};
      for (int64_t i = 0; i < number; ++i) {
        PickedPair<T>& pair = pairs_[begin + i];
        pair.negative = beyond.index[i];
        settle(a, floors.farthest.index[a], buffer, last, pair);
        last = pair;
      }
    });
  }

  // Orders the positives of every anchor by their keys, which are returned.
  T* sorted_keys() {
    T* keys = positive_keys();
    this->for_each_anchor([&](int32_t a, T*) {
      struct Entry {
        T key;
        int32_t candidate;
      };
      std::vector<Entry> entries;
      if (begin_[a] == begin_[a + 1]) return;
      each_candidate_of_class(
          a, [&](int32_t c) { entries.push_back({keys[begin_[a] + int64_t(entries.size())], c}); });
      std::sort(entries.begin(), entries.end(), [](const Entry& one, const Entry& other) {
        return one.key < other.key || (one.key == other.key && one.candidate < other.candidate);
      });
      for (size_t i = 0; i < entries.size(); ++i) {
        const int64_t at = begin_[a] + int64_t(i);
        keys[at] = entries[i].key, pairs_[at].positive = entries[i].candidate;
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

  // Measures a pair; `last` is the one before, which may have the same negative. A negative that is not
  // strictly farther after all is searched for in the rows.
  void settle(int32_t anchor, int32_t farthest, T* buffer, const PickedPair<T>& last,
              PickedPair<T>& pair) const {
    const auto measure = [&](int32_t negative) {
      return negative == last.negative ? last.d_an : this->distance_of(anchor, negative, buffer);
    };
    pair.d_ap = this->distance_of(anchor, row_of_candidate(pair.positive), buffer);
    if (pair.negative != kNobody) {
      pair.d_an = measure(pair.negative);
      if (!(pair.d_an > pair.d_ap)) {
        const T* x = this->functions.rows.load(this->call.batch.anchors, this->row_of(anchor), buffer);
        pair.negative = this->prepared.nearest_beyond(anchor, x, double(pair.d_ap), buffer + this->rows.width,
                                                      &pair.d_an);
      }
    }
    if (pair.negative == kNobody) pair.negative = farthest, pair.d_an = measure(farthest);
  }

  std::vector<RankedNegatives<T>> finders(const StripWalk<T>& walk) {
    std::vector<RankedNegatives<T>> finders;
    for (int worker = 0; worker < walk.pool().threads; ++worker)
      finders.emplace_back(this->rows, walk.columns());
    return finders;
  }

  // Calls visit(pair) for every pair of a strip's row.
  template <class Visit>
  void each_pair(RankedNegatives<T>& finder, const StripRow<T>& row, const Visit& visit) const {
    const PositiveRange at = positives_of(this->rows, row.anchor);
    finder.find(at, row.half, this->rows.classes.candidates.index);
    PickedPair<T> last = {0, kNobody, 0, 0};
    for (int64_t i = 0; i < finder.count(); ++i) {
      PickedPair<T> pair = finder.pair(at, i);
      settle(row.anchor, finder.farthest(), this->stream->buffer(row.worker), last, pair);
      visit(last = pair);
    }
  }

  void evaluate_strips() {
    StripWalk<T> walk(this->prepared);
    std::vector<RankedNegatives<T>> all = finders(walk);
    this->stream->visit_strips(walk, [&](const StripRow<T>& row) {
      if (this->rows.is_valid(row.anchor))
        each_pair(all[size_t(row.worker)], row,
                  [&](const PickedPair<T>& pair) { add_pair(row.anchor, pair); });
    });
  }

  void weigh_strips(const T* weight) {
    StripWalk<T> walk(this->prepared);
    std::vector<RankedNegatives<T>> all = finders(walk);
    const int32_t* position =
        this->rows.positions(this->rows.classes.candidates, this->call.batch.candidates.count);
    this->stream->weigh_strips(walk, [&](const StripRow<T>& row) {
      T* weights = row.distances;
      std::fill_n(weights, walk.columns(), T(0));
      if (!this->rows.is_valid(row.anchor)) return;
      each_pair(all[size_t(row.worker)], row, [&](const PickedPair<T>& pair) {
        if (term_of(pair) > 0) ++weights[pair.positive], --weights[position[pair.negative]];
      });
      for (int64_t c = 0; c < walk.columns(); ++c) weights[c] *= weight[row.anchor];
    });
  }

  const bool strips_ = StripWalk<T>::pays(this->rows, 48);  // measured
  const int64_t* begin_ = nullptr;                          // anchor -> first pair; one more entry at the end
  PickedPair<T>* pairs_ = nullptr;
};

}  // namespace tripletops
