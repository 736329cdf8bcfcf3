// A uniform one of the positives farther than the nearest negative, or of the negatives nearer than the
// farthest positive; where there is none such, a uniform one of all.
#pragma once

#include "../selection.h"

namespace tripletops {

template <class T>
class SofthardRule : public Rule<T> {
 public:
  using Rule<T>::Rule;

  Packed needs(Distance) const override {
    return this->kind() == Kind::positives ? Packed::as_needed : Packed::everything;
  }

  void pick(Selection<T>& selection, Picks<T> picks) const override {
    if (this->kind() == Kind::positives)
      pick_positives(selection, picks);
    else
      pick_negatives(selection, picks);
    for (int32_t a = 0; a < selection.rows.anchors(); ++a)
      if (picks.index[a] == kNobody) picks.index[a] = selection.draw(a, this->kind());
  }

  // Nothing is farther, or nearer, than anything else.
  void settle_zero_row(const Selection<T>& selection, int32_t anchor, int32_t* pick) const override {
    *pick = selection.draw(anchor, this->kind());
  }

 private:
  // The largest hash so far of those that count.
  struct Drawn {
    bool any = false;
    uint32_t hash = 0;

    void add(uint64_t row_seed, int32_t row) {
      const uint32_t noise = hash_candidate(row_seed, uint32_t(row));
      if (!any || noise > hash) any = true, hash = noise;
    }
  };

  static uint64_t seed_of(const Selection<T>& selection, int32_t anchor) {
    return hash_anchor(selection.call.seed, uint64_t(selection.rows.row_of(anchor)));
  }

  // Both distances are measured from the rows.
  static void pick_positives(Selection<T>& selection, Picks<T> picks) {
    const Ordered<T>& rows = selection.rows;
    const Prepared<T>& prepared = selection.prepared;
    Picks<T> positives, nearest;
    selection.search({Keep::nothing, Keep::nearest, nullptr}, &positives, &nearest);
    for_each_range(rows.pool, rows.anchors(), kRowsPerTask, [&](int64_t begin, int64_t end, int worker) {
      for (int32_t a = int32_t(begin); a < end; ++a) {
        if (nearest.index[a] == kNobody) continue;
        const uint64_t row_seed = seed_of(selection, a);
        const T d_an = T(prepared.measured(rows.row_of(a), nearest.index[a], rows.buffers[worker]));
        Drawn drawn;
        prepared.each_positive(a, rows.buffers[worker], [&](int32_t row, T d_ap) {
          if (d_ap > d_an) drawn.add(row_seed, row);
        });
        if (drawn.any) picks.index[a] = int32_t(unhash_candidate(row_seed, drawn.hash));
      }
    });
  }

  // Both distances come out of the same products, so that duplicates of the farthest positive are not nearer.
  static void pick_negatives(Selection<T>& selection, Picks<T> picks) {
    selection.pack();
    Ordered<T>& rows = selection.rows;
    Prepared<T>& prepared = selection.prepared;
    const T* farthest = farthest_positives(selection);
    std::vector<Drawn> drawn(size_t(rows.anchors()));
    std::vector<T*> blocks;
    for (int worker = 0; worker < rows.pool.threads; ++worker) blocks.push_back(prepared.take_block());
    const auto load = [&](int32_t row, int32_t column, int worker) -> const T* {
      T* block = blocks[size_t(worker)];
      return prepared.load_block(row, column, farthest, block, nullptr) ? block : nullptr;
    };
    prepared.visit_rows(load, [&](int32_t anchor, int32_t count, int32_t candidate, const T* half) {
      const int32_t* index = rows.classes.candidates.index + candidate;
      for (int32_t a = anchor; a < anchor + count; ++a, half += kBlockRows) {
        const uint64_t row_seed = seed_of(selection, a);
        for (int32_t c = 0; c < kBlockRows; ++c)
          if (half[c] < farthest[a]) drawn[size_t(a)].add(row_seed, index[c]);
      }
    });
    for (int32_t a = 0; a < rows.anchors(); ++a)
      if (drawn[size_t(a)].any)
        picks.index[a] = int32_t(unhash_candidate(seed_of(selection, a), drawn[size_t(a)].hash));
  }

  // By anchor: half the squared distance of the farthest positive, -1 where there is none.
  static const T* farthest_positives(Selection<T>& selection) {
    Ordered<T>& rows = selection.rows;
    Prepared<T>& prepared = selection.prepared;
    T* farthest = rows.by_anchor(T(-1));
    std::vector<T*> blocks;
    for (int worker = 0; worker < rows.pool.threads; ++worker) blocks.push_back(prepared.take_block());
    for_each_range(rows.pool, rows.anchors(), kBlockRows, [&](int64_t begin, int64_t end, int worker) {
      const int32_t row = int32_t(begin);
      T* half = blocks[size_t(worker)];
      int32_t column = rows.class_begin(row) / kBlockRows * kBlockRows;
      for (; column < rows.class_end(int32_t(end) - 1); column += kBlockRows) {
        rows.functions.tiles.half_squares(prepared.pairs, row, column, nullptr, half, nullptr, nullptr);
        for (int32_t a = row; a < end; ++a)
          for (int32_t c = std::max(rows.class_begin(a), column);
               c < std::min(rows.class_end(a), column + kBlockRows); ++c)
            if (c != rows.self_position[a])
              farthest[a] = std::max(farthest[a], half[(a - row) * kBlockRows + c - column]);
      }
    });
    return farthest;
  }
};

}  // namespace tripletops
