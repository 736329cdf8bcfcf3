#include "selection.h"

#include "registry.h"

namespace tripletops {
namespace {

constexpr int32_t kPanelsPerTask = 16;  // candidate panels of one task

template <class T>
int32_t panels_of(const Side<T>& side) {
  return (side.count + side.panels.lanes - 1) / side.panels.lanes;
}

// The order of merging does not matter: (key, index) has one minimum.
template <class T>
Picks<T> merged(const std::vector<Picks<T>>& picks, int32_t anchors) {
  for (size_t worker = 1; worker < picks.size(); ++worker)
    for (int32_t a = 0; a < anchors; ++a)
      improve(picks[worker].key[a], picks[worker].index[a], picks[0].key + a, picks[0].index + a);
  return picks[0];
}

}  // namespace

template <class T>
Selection<T>::Selection(Prepared<T>& prepared, const Call& call)
    : rows(prepared.rows),
      prepared(prepared),
      call(call),
      positive_(make_rule<T>(call.positive)),
      negative_(make_rule<T>(call.negative)),
      certified_(prepared) {}

template <class T>
void Selection<T>::search(const Search<T>& asked, Picks<T>* positives, Picks<T>* negatives) {
  Search<T> wanted = asked;
  const auto certify = [&](bool same_class, Keep* keep) {
    Picks<T> picks;
    if (*keep != Keep::nearest && *keep != Keep::farthest) return picks;
    picks.index = rows.scratch.filled(rows.anchors() + kPadding, kNobody);
    if (certified_.pick(same_class, *keep, nullptr, picks.index)) *keep = Keep::nothing;
    return picks;
  };
  const Picks<T> certified_negatives = certify(false, &wanted.negative);
  // A walk that looks for negatives finds positives by the way; and one beyond them starts from their keys.
  const bool beyond = negative_->sought() == Keep::beyond && !certified_.may_pay(Keep::beyond);
  const bool walks = wanted.negative != Keep::nothing || beyond;
  const Picks<T> certified_positives = walks ? Picks<T>() : certify(true, &wanted.positive);
  if (wanted.positive != Keep::nothing || wanted.negative != Keep::nothing)
    walk(wanted, positives, negatives);
  if (wanted.positive != asked.positive) *positives = certified_positives;
  if (wanted.negative != asked.negative) *negatives = certified_negatives;
}

template <class T>
void Selection<T>::walk(const Search<T>& wanted, Picks<T>* positives, Picks<T>* negatives) {
  pack();
  // One set of picks for each worker.
  std::vector<Picks<T>> positive_picks, negative_picks;
  for (int worker = 0; worker < rows.pool.threads; ++worker) {
    positive_picks.push_back(fresh_picks());
    negative_picks.push_back(fresh_picks());
  }
  if (wanted.negative == Keep::nothing)
    walk_class_blocks(wanted, positive_picks, negative_picks);
  else
    walk_everything(wanted, positive_picks, negative_picks);
  *positives = merged(positive_picks, rows.anchors());
  *negatives = merged(negative_picks, rows.anchors());
}

// Walks the tasks task_of(0) to task_of(count - 1), made as they are taken: a list of them would grow with
// N^2. A task's anchors pass by in blocks; its candidates are packed first where that has not been done.
template <class T>
template <class TaskOf>
void Selection<T>::walk_tasks(const Search<T>& wanted, int64_t count, const TaskOf& task_of,
                              const std::vector<Picks<T>>& positives,
                              const std::vector<Picks<T>>& negatives) {
  const Pairs<T>& pairs = prepared.pairs;
  const int32_t lanes = pairs.candidates.panels.lanes;
  const bool packed_before = pairs.candidates.panels.packed != nullptr;
  std::vector<T*> products;
  std::vector<Side<T>> packed;
  for (int worker = 0; worker < rows.pool.threads; ++worker) {
    products.push_back(
        rows.scratch.template take<T>(int64_t(block_tiles()) * rows.functions.tile_rows * lanes));
    if (!packed_before) packed.push_back(prepared.room_for(pairs.candidates, kPanelsPerTask, lanes));
  }
  for_each_task(rows.pool, count, [&](int64_t i, int worker) {
    const Task task = task_of(i);
    for (int32_t begin = task.panel_begin; begin < task.panel_end; begin += kPanelsPerTask) {
      const int32_t end = std::min(begin + kPanelsPerTask, task.panel_end);
      Side<T> candidates = pairs.candidates;
      if (packed_before) {
        candidates.panels.packed = candidates.panels.panel(begin);
        candidates.half_norms += int64_t(begin) * lanes;
        candidates.first += begin;
      } else {
        candidates = packed[size_t(worker)];
        for (int32_t panel = begin; panel < end; ++panel)
          prepared.pack(rows.batch.candidates, prepared.candidate_units, candidates, panel, panel - begin,
                        worker);
      }
      for (int32_t tile = task.tile_begin; tile < task.tile_end; tile += block_tiles())
        rows.functions.tiles.search(pairs, wanted, tile, std::min(tile + block_tiles(), task.tile_end), begin,
                                    end, candidates, positives[size_t(worker)], negatives[size_t(worker)],
                                    products[size_t(worker)]);
    }
  });
}

template <class T>
void Selection<T>::walk_everything(const Search<T>& wanted, const std::vector<Picks<T>>& positives,
                                   const std::vector<Picks<T>>& negatives) {
  const Pairs<T>& pairs = prepared.pairs;
  const int32_t tiles = panels_of(pairs.anchors), panels = panels_of(pairs.candidates);
  const int32_t step = std::clamp(panels / (4 * rows.pool.threads), 1, kPanelsPerTask);
  const int32_t block = pairs.symmetric ? block_tiles() : tiles;
  const auto first_panel = [&](int64_t i) {
    return pairs.symmetric ? int32_t(i * block * pairs.anchors.panels.lanes / pairs.candidates.panels.lanes)
                           : 0;
  };
  std::vector<int64_t> begin = {0};  // block of anchors -> its first task; one more entry at the end
  for (int32_t tile = 0; tile < tiles; tile += block)
    begin.push_back(begin.back() + (panels - first_panel(int64_t(begin.size()) - 1) + step - 1) / step);
  const auto task_of = [&](int64_t task) {
    const int64_t i = std::upper_bound(begin.begin(), begin.end(), task) - begin.begin() - 1;
    const int32_t tile = int32_t(i) * block;
    const int32_t panel = first_panel(i) + int32_t(task - begin[size_t(i)]) * step;
    return Task{tile, std::min(tile + block, tiles), panel, std::min(panel + step, panels)};
  };
  walk_tasks(wanted, begin.back(), task_of, positives, negatives);
}

// Only the tiles that touch a class's own block.
template <class T>
void Selection<T>::walk_class_blocks(const Search<T>& wanted, const std::vector<Picks<T>>& positives,
                                     const std::vector<Picks<T>>& negatives) {
  const Pairs<T>& pairs = prepared.pairs;
  const int32_t tiles = panels_of(pairs.anchors), lanes = pairs.anchors.panels.lanes;
  const int32_t class_size = rows.classes.candidates.count / std::max(rows.classes.count, 1);
  const int32_t step = std::clamp(class_size / lanes, 1, block_tiles());
  const auto task_of = [&](int64_t task) {
    const int32_t tile = int32_t(task) * step, end = std::min(tile + step, tiles);
    const int32_t first_row = tile * lanes;
    const int32_t last_row = std::min(end * lanes, rows.anchors()) - 1;
    int32_t first = rows.class_begin(first_row);
    const int32_t last = rows.class_end(last_row) - 1;
    if (pairs.symmetric) first = std::max(first, first_row);
    if (first > last) return Task{};
    return Task{tile, end, first / pairs.candidates.panels.lanes, last / pairs.candidates.panels.lanes + 1};
  };
  walk_tasks(wanted, (tiles + step - 1) / step, task_of, positives, negatives);
}

template <class T>
bool mine(const Functions<T>& functions, const Pool& pool, const Call& call, const Mined<T>& mined) {
  const int64_t count = call.batch.anchors.count;
  fill_with_nothing(mined, count);
  if (count == 0) return true;
  Ordered<T> rows(functions, pool, call.batch);
  Prepared<T> prepared(rows, call.distance);
  Selection<T> selection(prepared, call);
  if (!prepared.look()) return false;
  if (rows.anchors() > 0) selection.select(mined);
  return true;
}

#define TRIPLETOPS_INSTANTIATE(T) \
  template class Selection<T>;    \
  template bool mine<T>(const Functions<T>&, const Pool&, const Call&, const Mined<T>&);
TRIPLETOPS_INSTANTIATE(float)
TRIPLETOPS_INSTANTIATE(double)

}  // namespace tripletops
