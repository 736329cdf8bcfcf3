// One positive and one negative for every anchor. What a rule picks is the rule's own matter (rules/); here
// is what rules pick with: searches by the tile walk, uniform draws, and the order of the steps. Anchors and
// candidates are counted by position, unless a name says row.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "certified.h"
#include "hash.h"

namespace tripletops {

template <class T>
class Selection;

enum class Kind { positives, negatives };

// How one side of the triplets is picked: the questions that a rule answers.
template <class T>
class Rule {
 public:
  explicit Rule(Kind kind) : kind_(kind) {}
  virtual ~Rule() = default;

  // The extreme that is picked, where the rule is one: both sides' extremes are found in one walk.
  virtual Keep extreme() const { return Keep::nothing; }
  // What the rule searches for, be it an extreme or not.
  virtual Keep sought() const { return extreme(); }
  // Which panels the rule's own walks need.
  virtual Packed needs(Distance) const {
    return extreme() == Keep::nothing ? Packed::nothing : Packed::as_needed;
  }
  // Picks for every anchor, into the row numbers of `picks`; its keys are free to use. Positives are there
  // before negatives are picked. Not called for extremes.
  virtual void pick(Selection<T>&, Picks<T>) const {}
  // From a zero row, under the cosine, everything has S = 0, a tie that products would break. Changes `pick`,
  // a row, to what the rule picks then.
  virtual void settle_zero_row(const Selection<T>&, int32_t /*anchor*/, int32_t* /*pick*/) const {}
  // The pick has been measured. A rule that compares distances may find, from the rows themselves, that the
  // pick has to be another one. `x` is the anchor's row, `buffer` holds a row.
  virtual void settle_measured(const Selection<T>&, int32_t /*anchor*/, const T* /*x*/, T /*d_ap*/,
                               T* /*buffer*/, int32_t* /*pick*/, T* /*distance*/) const {}

 protected:
  Kind kind() const { return kind_; }

 private:
  const Kind kind_;
};

template <class T>
class Selection {
 public:
  Ordered<T>& rows;
  Prepared<T>& prepared;
  const Call& call;

  Selection(Prepared<T>& prepared, const Call& call);

  // Packs the rows as floats, for rules that walk over them.
  void pack() {
    prepared.pack_sides(std::max(positive_->needs(prepared.distance), negative_->needs(prepared.distance)));
  }

  // By row of the anchors; rows without an anchor are left as they are.
  void select(const Mined<T>& mined) {
    const Keep positive = positive_->extreme(), negative = negative_->extreme();
    if (positive != Keep::nothing && negative != Keep::nothing) {
      search({positive, negative, nullptr}, &positives_, &negatives_);
    } else {
      pick_side(*positive_, {positive, Keep::nothing, nullptr}, &positives_);
      pick_side(*negative_, {Keep::nothing, negative, nullptr}, &negatives_);
    }
    if (prepared.distance == Distance::cosine && rows.width > 0) settle_zero_rows();
    report(mined);
  }

  // The picked positives, by row.
  const Picks<T>& positives() const { return positives_; }

  // An anchor without a pick holds the largest finite key: above every key of scaled rows, below the infinity
  // of an excluded pair.
  Picks<T> fresh_picks() {
    const int64_t length = rows.anchors() + kPadding;
    return {rows.scratch.filled(length, std::numeric_limits<T>::max()), rows.scratch.filled(length, kNobody)};
  }

  // Keeps what is asked for: by the certified pass where that is the better way, which leaves no keys (null),
  // else by a walk over tiles of float products; keys of a farthest candidate are negated.
  void search(const Search<T>& wanted, Picks<T>* positives, Picks<T>* negatives);

  // The nearest negative strictly farther than `floors`, distances by anchor. False where a search above keys
  // is the better way; then nothing has been picked.
  template <class Floors>
  bool search_beyond(const Floors& floors, Picks<T> picks) {
    return certified_.may_pay(Keep::beyond) && certified_.pick(false, Keep::beyond, floors(), picks.index);
  }

  // The key that a search would compare for an anchor and a candidate, by row.
  T key_of(int32_t anchor, int32_t candidate_row) const {
    T *row_buffer = rows.buffers[0], *framed = row_buffer + rows.width;
    const T* row = rows.functions.rows.load(rows.batch.candidates, candidate_row, row_buffer);
    const Normaliser* unit = prepared.candidate_units ? prepared.candidate_units + candidate_row : nullptr;
    const T half_norm = rows.functions.rows.frame(row, prepared.frame, unit, rows.width, framed);
    return rows.functions.tiles.key(prepared.pairs, anchor, framed, half_norm);
  }

  // By anchor, padded: the key of the picked positive, infinite where there is none.
  T* positive_keys() {
    T* keys = rows.scratch.filled(rows.anchors() + kPadding, std::numeric_limits<T>::infinity());
    pack();
    const Keep extreme = positive_->extreme();
    // Certified picks have no keys; those of the walk are picked by the same products as what is compared.
    Picks<T> none;
    if (extreme != Keep::nothing && !positives_.key)
      walk({extreme, Keep::nothing, nullptr}, &positives_, &none);
    for (int32_t a = 0; a < rows.anchors(); ++a) {
      const int32_t positive = positives_.index[a];
      if (positive == kNobody) continue;
      if (extreme == Keep::nothing)
        keys[a] = key_of(a, positive);
      else
        keys[a] = extreme == Keep::farthest ? -positives_.key[a] : positives_.key[a];
    }
    return keys;
  }

  // A uniform candidate of the kind, self aside, by its row; kNobody if there is none.
  int32_t draw(int32_t anchor, Kind kind) const {
    const uint64_t row_seed = hash_anchor(call.seed, uint64_t(rows.row_of(anchor)));
    const int32_t self = rows.self_position[anchor];
    const int32_t begin = rows.class_begin(anchor), end = rows.class_end(anchor);
    const Order& candidates = rows.classes.candidates;
    bool any = false;
    uint32_t best = 0;
    const auto draw_from = [&](int32_t from, int32_t to) {
      const bool inside = self >= from && self < to;
      any = rows.functions.rows.draw(row_seed, candidates.index, from, inside ? self : to, any, &best);
      if (inside) any = rows.functions.rows.draw(row_seed, candidates.index, self + 1, to, any, &best);
    };
    if (kind == Kind::positives) {
      draw_from(begin, end);
    } else {
      draw_from(0, begin);
      draw_from(end, candidates.count);
    }
    return any ? int32_t(unhash_candidate(row_seed, best)) : kNobody;
  }

  // The candidate of the kind with the lowest row, self aside; kNobody if there is none.
  int32_t lowest(int32_t anchor, Kind kind) const {
    const int32_t own = rows.classes.anchors.group[anchor];
    if (kind == Kind::positives) return lowest_of_class(anchor, own);
    int32_t best = kNobody;
    // Classes are numbered by their lowest row: behind one that starts later than the best, all do.
    for (int32_t group = 0; group < rows.classes.count; ++group) {
      if (group != own) best = std::min(best, lowest_of_class(anchor, group));
      if (best != kNobody && rows.classes.candidates.index[rows.classes.candidates.begin[group]] > best)
        break;
    }
    return best;
  }

 private:
  struct Task {
    int32_t tile_begin, tile_end, panel_begin, panel_end;
  };

  void pick_side(const Rule<T>& rule, const Search<T>& extreme, Picks<T>* picks) {
    if (rule.extreme() != Keep::nothing) {
      Picks<T> other;
      search(extreme, extreme.positive != Keep::nothing ? picks : &other,
             extreme.negative != Keep::nothing ? picks : &other);
      return;
    }
    *picks = fresh_picks();
    rule.pick(*this, *picks);
  }

  // Within a class positions ascend with the row.
  int32_t lowest_of_class(int32_t anchor, int32_t group) const {
    const int32_t* begin = rows.classes.candidates.begin;
    int32_t position = begin[group];
    if (position == rows.self_position[anchor]) ++position;
    return position < begin[group + 1] ? rows.classes.candidates.index[position] : kNobody;
  }

  void settle_zero_rows() {
    for (int32_t a = 0; a < rows.anchors(); ++a) {
      if (!std::isinf(prepared.anchor_units[rows.row_of(a)].norm)) continue;
      positive_->settle_zero_row(*this, a, positives_.index + a);
      negative_->settle_zero_row(*this, a, negatives_.index + a);
    }
  }

  void report(const Mined<T>& mined) {
    const RowFunctions<T>& functions = rows.functions.rows;
    for_each_range(rows.pool, rows.anchors(), kRowsInTurn, [&](int64_t begin, int64_t end, int worker) {
      T *x_buffer = rows.buffers[worker], *y_buffer = x_buffer + rows.width;
      for (int32_t a = int32_t(begin); a < end; ++a) {
        const int32_t row = rows.row_of(a);
        const T* x = functions.load(rows.batch.anchors, row, x_buffer);
        const auto reported = [&](int32_t candidate) {
          const T* y = functions.load(rows.batch.candidates, candidate, y_buffer);
          return T(functions.measure(prepared.pair(x, y, row, candidate), rows.width, prepared.distance));
        };
        const int32_t p = positives_.index[a];
        int32_t n = negatives_.index[a];
        if (p != kNobody) mined.positive[row] = p, mined.d_ap[row] = reported(p);
        if (n == kNobody) continue;
        T distance = reported(n);
        negative_->settle_measured(*this, a, x, mined.d_ap[row], y_buffer, &n, &distance);
        if (n != kNobody) mined.negative[row] = n, mined.d_an[row] = distance;
      }
    });
  }

  void walk(const Search<T>&, Picks<T>* positives, Picks<T>* negatives);
  template <class TaskOf>
  void walk_tasks(const Search<T>&, int64_t count, const TaskOf&, const std::vector<Picks<T>>& positives,
                  const std::vector<Picks<T>>& negatives);
  void walk_everything(const Search<T>&, const std::vector<Picks<T>>&, const std::vector<Picks<T>>&);
  void walk_class_blocks(const Search<T>&, const std::vector<Picks<T>>&, const std::vector<Picks<T>>&);

  int32_t block_tiles() const { return kBlockRows / rows.functions.tile_rows; }

  std::unique_ptr<Rule<T>> positive_, negative_;
  CertifiedPass<T> certified_;
  Picks<T> positives_, negatives_;
};

// What stands for no picks at all.
template <class T>
void fill_with_nothing(const Mined<T>& mined, int64_t count) {
  std::fill(mined.positive, mined.positive + count, -1);
  std::fill(mined.negative, mined.negative + count, -1);
  std::fill(mined.d_ap, mined.d_ap + count, std::numeric_limits<T>::quiet_NaN());
  std::fill(mined.d_an, mined.d_an + count, std::numeric_limits<T>::quiet_NaN());
}

}  // namespace tripletops
