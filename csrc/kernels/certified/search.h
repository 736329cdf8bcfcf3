// One search of the certified pass. Every anchor is given a threshold by the best of a few candidates; a walk
// over tiles of integer products logs the pairs above it, and now and then measures one that certainly raises
// it; what is left in the end is measured. In a symmetric search a tile serves its rows and its columns.
#pragma once

#include <array>
#include <utility>
#include <vector>

#include "thresholds.h"

namespace tripletops {

constexpr int32_t kGroupRows = 256;     // anchors that share one pass over a panel
constexpr int32_t kWalkedPanels = 64;   // of one task
constexpr int32_t kPanelsPerDrain = 4;  // panels between two looks at what has passed
constexpr int32_t kMostTileRows = 16, kMostColumns = 32;
constexpr int32_t kHits = 4096, kTileHits = kMostTileRows * kMostColumns;
constexpr int32_t kLogged = 24;  // entries of the log for each anchor
constexpr int32_t kAhead = 4;    // pairs that are prefetched
constexpr int32_t kSeedPanels = 16, kSeedRows = 128;
constexpr int32_t kProbedTiles = 4;
constexpr double kWorthMeasuring = 0.15;  // share of the allowance that the threshold has to rise by

class CertifiedSearch {
 public:
  CertifiedSearch(Prepared<float>& prepared, const Measure& measure, const Goal& goal)
      : prepared_(prepared),
        rows_(prepared.rows),
        functions_(rows_.functions.quantised),
        measure_(measure),
        goal_(goal),
        symmetric_(rows_.batch.self_mining),
        thresholds_(prepared, measure, goal),
        workers_(size_t(rows_.pool.threads)) {
    for (Worker& worker : workers_) worker.best = rows_.scratch.filled(rows_.anchors(), Best{});
  }

  // Without products, every candidate of the anchor's class.
  void measure_positives() {
    for_each_range(rows_.pool, rows_.anchors(), kRowsPerTask, [&](int64_t begin, int64_t end, int by) {
      for (int32_t a = int32_t(begin); a < end; ++a) {
        if (goal_.wants_nothing(a)) continue;
        for (int32_t c = rows_.class_begin(a); c < rows_.class_end(a); ++c)
          if (c != rows_.self_position[a]) consider(first_bests(), a, c, by);
      }
    });
  }

  // Gets ready to walk, and tells how many candidates an anchor will have to measure in the end, on average:
  // of a few anchors, which are compared with all candidates.
  double prepare(const Quantised& anchors, const Quantised& candidates) {
    thresholds_.begin(anchors, candidates);
    seed();
    thresholds_.start(
        [&](int32_t a) { return first_bests()[a].candidate == kNobody ? nullptr : &first_bests()[a].value; });
    for (Worker& worker : workers_) {
      if (worker.log) continue;
      worker.slot = rows_.scratch.filled(rows_.anchors(), int32_t(-1));
      worker.hits = rows_.scratch.template take<Hit>(kHits + kTileHits);
      worker.log = rows_.scratch.template take<Entry>(log_size());
    }
    return probe();
  }

  void walk() {
    std::vector<int64_t> begin = {0};  // group of anchors -> its first task; one more entry at the end
    for (int32_t group = 0; group * kGroupRows < rows_.anchors(); ++group) {
      const Range panels = panels_of(group);
      begin.push_back(begin.back() + (panels.end - panels.begin + kWalkedPanels - 1) / kWalkedPanels);
    }
    for_each_task(rows_.pool, begin.back(), [&](int64_t task, int by) {
      const int32_t group = int32_t(std::upper_bound(begin.begin(), begin.end(), task) - begin.begin()) - 1;
      Range panels = panels_of(group);
      panels.begin += int32_t(task - begin[size_t(group)]) * kWalkedPanels;
      panels.end = std::min(panels.end, panels.begin + kWalkedPanels);
      walk_group(group, panels, by);
    });
    for_each_task(rows_.pool, int64_t(workers_.size()),
                  [&](int64_t worker, int by) { measure_log(workers_[size_t(worker)], by); });
  }

  // The rows of the picks: of equals the lowest.
  void finish(int32_t* picks) {
    for_each_range(rows_.pool, rows_.anchors(), kRowsPerTask, [&](int64_t begin, int64_t end, int by) {
      for (int32_t a = int32_t(begin); a < end; ++a) {
        Best& best = first_bests()[a];
        for (size_t worker = 1; worker < workers_.size(); ++worker) {
          const Best& found = workers_[worker].best[a];
          if (found.candidate != kNobody) improve(&best, a, found, by);
        }
        picks[a] = best.candidate == kNobody ? kNobody : measure_.row_of(best.candidate);
      }
    });
  }

 private:
  struct Range {
    int32_t begin, end;
  };

  // A candidate that may be its anchor's pick.
  struct Entry {
    int32_t anchor, candidate;
    float key;
  };

  struct Best {
    Measured value;
    int32_t candidate = kNobody;
  };

  // What a thread works with.
  struct Worker {
    Best* best = nullptr;     // by anchor
    int32_t* slot = nullptr;  // anchor -> the best of the entries that are being looked at, or -1
    Hit* hits = nullptr;
    Entry* log = nullptr;
    int64_t logged = 0;
    int32_t hit_count = 0;
    std::vector<int32_t> slots;  // those that are set
  };

  int32_t columns() const { return functions_.columns; }
  int32_t panels_of_all() const { return (rows_.classes.candidates.count + columns() - 1) / columns(); }
  int64_t log_size() const {
    return int64_t(rows_.anchors()) * kLogged / int64_t(workers_.size()) + 4 * kHits;
  }

  // Before the walk everything is kept here: an anchor is one thread's at a time, and the way that the search
  // goes does not depend on threads.
  Best* first_bests() const { return workers_[0].best; }

  bool is_better(const Measured& one, const Measured& other) const {
    return goal_.sign * one.y + measure_.error(one) < goal_.sign * other.y - measure_.error(other);
  }

  // Keeps the better one of two candidates. Where float can't tell, double does.
  void improve(Best* best, int32_t a, Best found, int by) const {
    if (best->candidate != kNobody && !is_better(found.value, best->value)) {
      if (found.candidate == best->candidate || is_better(best->value, found.value)) return;
      if (!found.value.exact) found.value = measure_.exact(a, found.candidate, by);
      if (!best->value.exact) best->value = measure_.exact(a, best->candidate, by);
      const double one = goal_.sign * found.value.y, other = goal_.sign * best->value.y;
      if (one > other ||
          (one == other && measure_.row_of(found.candidate) > measure_.row_of(best->candidate)))
        return;
    }
    *best = found;
  }

  bool is_beyond(const Best& found, int32_t a, int by) const {
    const double error = measure_.error(found.value);
    if (found.value.y + error < goal_.floor_low(a)) return false;
    return found.value.y - error > goal_.floor_high(a) ||
           measure_.reported(a, found.candidate, by) > goal_.floor(a);
  }

  // Measures a pair that is eligible, keeps it if it is the anchor's best, and raises the threshold.
  void consider(Best* bests, int32_t a, int32_t c, int by) {
    Best& best = bests[a];
    if (c == best.candidate) return;
    const Best found = {measure_.rough(a, c, by), c};
    if (goal_.has_floors() && !is_beyond(found, a, by)) return;
    improve(&best, a, found, by);
    if (best.candidate == c) thresholds_.raise(a, best.value);
  }

  // Measures the best of a small sample of candidates, as far as integers tell.
  void seed() {
    for_each_range(rows_.pool, rows_.anchors(), kSeedRows, [&](int64_t begin, int64_t end, int by) {
      std::array<int32_t, kSeedPanels> sample;
      int32_t size = 0;
      const Range all = candidates_of(int32_t(begin), int32_t(end) - 1);
      const int32_t panels = all.end - all.begin, wanted = std::clamp(panels / 64, 2, kSeedPanels);
      for (int32_t i = 0; i < wanted && panels > 0; ++i) {
        // Evenly spaced, and from other places for other anchors.
        const int64_t shift = begin / kSeedRows * 40503 + int64_t(i) * panels / wanted;
        const int32_t panel = all.begin + int32_t(shift % panels);
        const Rectangle at = {int32_t(begin), int32_t(end - begin), panel * columns(), columns()};
        if (what_holds(prepared_.pairs, at) == (goal_.same_class ? Holds::positives : Holds::negatives))
          sample[size_t(size++)] = panel;
      }
      for (int32_t row = int32_t(begin); row < end && size > 0; row += functions_.tile_rows)
        seed_tile(row, std::min(int32_t(end), row + functions_.tile_rows), sample.data(), size, by);
    });
  }

  void seed_tile(int32_t begin, int32_t end, const int32_t* panels, int32_t count, int by) {
    std::array<int32_t, kMostTileRows> found;
    functions_.best(thresholds_.scan, begin, panels, count, found.data());
    const auto is_there = [&](int32_t a) {
      const int32_t c = found[size_t(a - begin)];
      return c >= 0 && c < rows_.classes.candidates.count && !goal_.wants_nothing(a) &&
             goal_.is_eligible(a, c);
    };
    for (int32_t a = begin; a < end; ++a)
      if (is_there(a)) measure_.prefetch(a, found[size_t(a - begin)]);
    for (int32_t a = begin; a < end; ++a)
      if (is_there(a)) consider(first_bests(), a, found[size_t(a - begin)], by);
  }

  double probe() {
    const int32_t tiles = (rows_.anchors() + functions_.tile_rows - 1) / functions_.tile_rows;
    const int32_t probed = std::min(tiles, kProbedTiles);
    float* never = rows_.scratch.filled(rows_.classes.candidates.count + kPadding, 2 * kNever);
    const float* limit = std::exchange(thresholds_.scan.column_limit, never);
    std::array<double, kProbedTiles> survivors = {};
    for_each_task(rows_.pool, probed, [&](int64_t i, int by) {
      // An outlier keeps whatever there is; how many of them there are is counted instead.
      int32_t tile = int32_t(i * tiles / probed);
      for (int32_t tries = 0; tries < 8 && outliers_of(tile) > 0; ++tries) tile = (tile + 1) % tiles;
      survivors[size_t(i)] = survivors_of(tile * functions_.tile_rows, by);
    });
    thresholds_.scan.column_limit = limit;
    double sum = 0, outliers = 0;
    for (const double count : survivors) sum += count;
    for (int32_t tile = 0; tile < tiles; ++tile) outliers += outliers_of(tile);
    return sum / double(probed * functions_.tile_rows) +
           outliers * rows_.classes.candidates.count / rows_.anchors();
  }

  int32_t outliers_of(int32_t tile) const {
    int32_t count = 0;
    const int32_t begin = tile * functions_.tile_rows;
    for (int32_t a = begin; a < std::min(begin + functions_.tile_rows, rows_.anchors()); ++a)
      count += thresholds_.is_outlier(a);
    return count;
  }

  // Of the anchors of a tile together; infinite where there are very many.
  double survivors_of(int32_t row, int by) {
    Worker& worker = workers_[size_t(by)];
    const int32_t panels = panels_of_all();
    for (int32_t panel = 0; panel < panels; ++panel) {
      scan_tile(row, panel, false, worker);
      if (worker.hit_count < kTileHits && panel + 1 < panels) continue;
      drain(worker, first_bests(), false, by);
      if (worker.logged > 2 * kHits) keep_passing(worker);
      if (worker.logged <= 2 * kHits) continue;
      worker.logged = 0;
      return std::numeric_limits<double>::infinity();
    }
    keep_passing(worker);
    return double(std::exchange(worker.logged, 0));
  }

  // The panels that hold candidates of the anchors from the first to the last one.
  Range candidates_of(int32_t first, int32_t last) const {
    if (!goal_.same_class) return {0, panels_of_all()};
    const int32_t begin = rows_.class_begin(first), end = rows_.class_end(last);
    if (begin >= end) return {0, 0};
    return {begin / columns(), (end + columns() - 1) / columns()};
  }

  // Those that a group of anchors meets: in a symmetric search none before its own.
  Range panels_of(int32_t group) const {
    const int32_t first = group * kGroupRows, last = std::min(first + kGroupRows, rows_.anchors()) - 1;
    Range panels = candidates_of(first, last);
    if (symmetric_) panels.begin = std::max(panels.begin, first / columns());
    panels.begin = std::min(panels.begin, panels.end);
    return panels;
  }

  void walk_group(int32_t group, Range panels, int by) {
    Worker& worker = workers_[size_t(by)];
    const int32_t begin = group * kGroupRows, end = std::min(begin + kGroupRows, rows_.anchors());
    for (int32_t panel = panels.begin; panel < panels.end; ++panel) {
      const int32_t stop = symmetric_ ? std::min(end, (panel + 1) * columns()) : end;
      for (int32_t row = begin; row < stop; row += functions_.tile_rows) {
        scan_tile(row, panel, symmetric_, worker);
        if (worker.hit_count >= kHits) drain(worker, worker.best, symmetric_, by);
      }
      if ((panel - panels.begin) % kPanelsPerDrain == kPanelsPerDrain - 1)
        drain(worker, worker.best, symmetric_, by);
    }
    drain(worker, worker.best, symmetric_, by);
  }

  // `half`: of a tile that is its own mirror image, the pairs above the diagonal.
  void scan_tile(int32_t row, int32_t panel, bool half, Worker& worker) {
    const int32_t column = panel * columns();
    const Holds holds = what_holds(prepared_.pairs, {row, functions_.tile_rows, column, columns()});
    if (holds == (goal_.same_class ? Holds::negatives : Holds::positives)) return;
    // Of its own class a row meets itself, on the diagonal or where self_index says.
    const bool above_diagonal = half && row + functions_.tile_rows <= column;
    const bool meets_itself = goal_.same_class ? !above_diagonal : rows_.exclude_self_everywhere;
    std::array<uint32_t, kMostTileRows> bits;
    const bool whole = holds != Holds::both && !meets_itself;
    for (int32_t r = 0; r < functions_.tile_rows && !whole; ++r)
      bits[size_t(r)] = allowed(row + r, column, half);
    worker.hit_count += functions_.scan(thresholds_.scan, row, panel, whole ? nullptr : bits.data(),
                                        worker.hits + worker.hit_count);
  }

  // The columns that an anchor is paired with; `half`: only those behind it.
  uint32_t allowed(int32_t a, int32_t column, bool half) const {
    if (a >= rows_.anchors()) return 0;
    const auto from = [&](int32_t at) {
      return at <= column ? ~0u : at - column >= kMostColumns ? 0u : ~0u << (at - column);
    };
    const uint32_t inside = from(rows_.class_begin(a)) & ~from(rows_.class_end(a));
    const uint32_t bits = (goal_.same_class ? inside : ~inside) & ~from(rows_.classes.candidates.count);
    if (half) return bits & from(a + 1);
    const int32_t self = rows_.self_position[a];
    return self >= 0 ? bits & ~(from(self) & ~from(self + 1)) : bits;
  }

  // Logs what has passed, and measures what certainly raises a threshold.
  void drain(Worker& worker, Best* bests, bool both_sides, int by) {
    if (worker.hit_count == 0) return;
    if (worker.logged + 2 * worker.hit_count > log_size()) measure_log(worker, by);
    for (int32_t i = 0; i < worker.hit_count; ++i) {
      const Hit& hit = worker.hits[i];
      const float key = thresholds_.key_of(hit);
      log(worker, hit, hit.row, hit.column, key);
      if (both_sides) log(worker, hit, hit.column, hit.row, key);
    }
    worker.hit_count = 0;
    std::vector<int32_t>& slots = worker.slots;
    size_t kept = 0;
    for (const int32_t at : slots) {
      const int32_t a = worker.log[at].anchor, best = std::exchange(worker.slot[a], -1);
      const double rise = double(worker.log[best].key) - double(thresholds_.threshold(a));
      // The key is at most twice the allowance above what is measured.
      if (rise > (2 + kWorthMeasuring) * double(thresholds_.allowance[a])) slots[kept++] = best;
    }
    slots.resize(kept);
    for (size_t i = 0; i < kept; ++i) {
      if (i + kAhead < kept) prefetch(worker.log[slots[i + kAhead]]);
      Entry& entry = worker.log[slots[i]];
      consider(bests, entry.anchor, entry.candidate, by);
      entry.key = -2 * kNever;
    }
    slots.clear();
  }

  void log(Worker& worker, const Hit& hit, int32_t a, int32_t c, float key) {
    if (!(key > thresholds_.threshold(a)) || !thresholds_.may_be_beyond(hit, a)) return;
    const int32_t at = int32_t(worker.logged++);
    worker.log[at] = {a, c, key};
    // Measuring what may not be beyond the floor might raise nothing.
    if (!thresholds_.must_be_beyond(a, key)) return;
    int32_t& slot = worker.slot[a];
    if (slot < 0) worker.slots.push_back(at);
    if (slot < 0 || key > worker.log[slot].key) slot = at;
  }

  void prefetch(const Entry& entry) const { measure_.prefetch(entry.anchor, entry.candidate); }

  // Drops what the thresholds have overtaken.
  void keep_passing(Worker& worker) const {
    Entry* end = std::remove_if(worker.log, worker.log + worker.logged, [&](const Entry& entry) {
      return !(entry.key > thresholds_.threshold(entry.anchor));
    });
    worker.logged = end - worker.log;
  }

  void measure_log(Worker& worker, int by) {
    keep_passing(worker);
    for (int64_t i = 0; i < worker.logged; ++i) {
      if (i + kAhead < worker.logged) prefetch(worker.log[i + kAhead]);
      const Entry& entry = worker.log[i];
      if (entry.key > thresholds_.threshold(entry.anchor))
        consider(worker.best, entry.anchor, entry.candidate, by);
    }
    worker.logged = 0;
  }

  Prepared<float>& prepared_;
  Ordered<float>& rows_;
  const QuantisedFunctions& functions_;
  const Measure& measure_;
  const Goal& goal_;
  const bool symmetric_;
  CertifiedThresholds thresholds_;
  std::vector<Worker> workers_;
};

}  // namespace tripletops
