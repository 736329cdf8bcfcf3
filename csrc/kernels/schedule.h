// The order in which pairs of blocks are visited by several threads: rounds in which no block occurs twice. A
// visit waits for the earlier ones of its two blocks alone, so it may write to what belongs to them, and sums
// come out the same for any number of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "parallel.h"

namespace tripletops {

// How many visits each block has behind it. Visits are begun in order, so that what is waited for is under
// way.
class Turns {
 public:
  explicit Turns(int32_t blocks) : done_(size_t(blocks)) {}
  void wait(int32_t block, int32_t turn) const {
    while (done_[size_t(block)].load(std::memory_order_acquire) < turn) std::this_thread::yield();
  }
  void finish(int32_t block) { done_[size_t(block)].fetch_add(1, std::memory_order_release); }

 private:
  std::vector<std::atomic<int32_t>> done_;
};

// Symmetric: every pair first <= second of `blocks` once, by the circle method of tournaments.
template <class Visit>
void for_each_pair_of_blocks(const Pool& pool, int32_t blocks, const Visit& visit) {
  for_each_task(pool, blocks, [&](int64_t i, int worker) { visit(int32_t(i), int32_t(i), worker); });
  const int32_t players = blocks + blocks % 2, circle = players - 1, matches = players / 2;
  Turns turns(players);
  for_each_task(pool, int64_t(circle) * matches, [&](int64_t task, int worker) {
    const int32_t round = int32_t(task / matches), match = int32_t(task % matches);
    const int32_t one = match == 0 ? circle : (round + match) % circle;
    const int32_t other = (round - match + circle) % circle;
    turns.wait(one, round), turns.wait(other, round);
    if (one < blocks && other < blocks) visit(std::min(one, other), std::max(one, other), worker);
    turns.finish(one), turns.finish(other);
  });
}

// Every anchor block with every candidate block: those of the shorter side move along the longer one.
template <class Visit>
void for_each_pair_of_blocks(const Pool& pool, int32_t anchors, int32_t candidates, const Visit& visit) {
  const int32_t rounds = std::max(anchors, candidates), movers = std::min(anchors, candidates);
  Turns mover_turns(movers), other_turns(rounds);
  // How often the other block has been met before `round`: by those that began at or before it, which come
  // down upon it, and by those that began behind it and went around the end.
  const auto met = [&](int32_t other, int32_t round) {
    const int32_t lowest = std::max(other - round + 1, 0), around = rounds + other - round + 1;
    return std::max(std::min(other, movers - 1) - lowest + 1, 0) + std::max(movers - around, 0);
  };
  for_each_task(pool, int64_t(rounds) * movers, [&](int64_t task, int worker) {
    const int32_t round = int32_t(task / movers), mover = int32_t(task % movers);
    const int32_t other = int32_t((int64_t(mover) + round) % rounds);
    mover_turns.wait(mover, round), other_turns.wait(other, met(other, round));
    visit(anchors <= candidates ? mover : other, anchors <= candidates ? other : mover, worker);
    mover_turns.finish(mover), other_turns.finish(other);
  });
}

}  // namespace tripletops
