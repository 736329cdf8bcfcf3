// A negative drawn by inverse distance density on the sphere ("Sampling Matters in Deep Embedding Learning"),
// by the distances of unit rows, whatever the distance of the call is.
#pragma once

#include "../selection.h"

namespace tripletops {

template <class T>
class DistanceRule : public Rule<T> {
 public:
  using Rule<T>::Rule;

  Packed needs(Distance distance) const override {
    return distance == Distance::cosine ? Packed::everything : Packed::nothing;
  }

  void pick(Selection<T>& selection, Picks<T> picks) const override {
    if (selection.prepared.distance == Distance::cosine) {
      selection.pack();
      draw(selection, selection.prepared, picks);
    } else {
      Prepared<T> unit_rows(selection.rows, Distance::cosine);
      unit_rows.prepare(Packed::everything);
      draw(selection, unit_rows, picks);
    }
    for (int32_t a = 0; a < selection.rows.anchors(); ++a)
      if (picks.index[a] == kNobody)
        picks.index[a] = selection.draw(a, Kind::negatives);  // all weights are 0
  }

 private:
  // A streaming draw from the weights of all negatives: the largest of log weight + Gumbel noise.
  static void draw(const Selection<T>& selection, Prepared<T>& unit_rows, Picks<T> picks) {
    const Ordered<T>& rows = selection.rows;
    const Numbers& numbers = selection.call.numbers;
    const double dimensions = double(rows.width), cutoff = numbers.cutoff,
                 limit = numbers.nonzero_loss_cutoff;
    Draws<T> draws;
    draws.a = T((2 - dimensions) / 2);
    draws.b = T((3 - dimensions) / 2);
    draws.least = T(std::clamp(cutoff * cutoff, 0x1p-100, 0x1p100));
    draws.limit = T(std::min(limit * limit, double(std::numeric_limits<T>::infinity())));
    draws.seed = selection.call.seed;
    draws.anchor_index = rows.classes.anchors.index;
    draws.candidate_index = rows.classes.candidates.index;
    draws.picks = picks;
    std::vector<T*> blocks;
    for (int worker = 0; worker < rows.pool.threads; ++worker) blocks.push_back(unit_rows.take_block());
    const auto load = [&](int32_t row, int32_t column, int worker) -> const T* {
      T* block = blocks[size_t(worker)];
      if (!unit_rows.load_block(row, column, nullptr, block, nullptr)) return nullptr;
      rows.functions.blocks.to_log_weights(draws, block);
      return block;
    };
    unit_rows.visit_rows(load, [&](int32_t anchor, int32_t count, int32_t candidate, const T* block) {
      rows.functions.blocks.keep_draws(draws, anchor, count, candidate, block);
    });
  }
};

}  // namespace tripletops
