#include "certified.h"

#include <atomic>
#include <cstdlib>

#include "certified/glance.h"
#include "certified/search.h"

namespace tripletops {
namespace {

constexpr int64_t kWidest = 32768;    // wider sums of bytes may not fit into int32
constexpr int64_t kFewPositives = 8;  // per anchor, on average: measured without any products
// Where it pays, on the machine that it was measured on (docs/certified.md): so many multiply-adds of all
// pairs at least, twice as many where int16 are likely, and rows so wide.
constexpr double kLeastProducts = 1.5e9, kLeastProductsBeyond = 3e9;
constexpr int64_t kLeastWidth = 64;
constexpr double kHopeless = 1.0 / 32;  // share of candidates that cannot be told apart, at a glance

std::atomic<int>& use() {
  static std::atomic<int> value = [] {
    const char* text = std::getenv("TRIPLETOPS_CERTIFIED");
    const bool forced = text && (*text == '0' || *text == '1') && !text[1];
    if (!forced) return int(UseCertified::where_it_pays);
    return int(*text == '0' ? UseCertified::never : UseCertified::always);
  }();
  return value;
}

struct Sides {
  Quantised anchors, candidates;
};

Quantised quantise(Prepared<float>& prepared, const Matrix& matrix, const Normaliser* units,
                   const Order& order, int bytes) {
  Ordered<float>& rows = prepared.rows;
  Scratch& scratch = rows.scratch;
  const QuantisedFunctions& functions = rows.functions.quantised;
  const int32_t columns = functions.columns, panels = (order.count + columns - 1) / columns;
  const int32_t padded = panels * columns + kPadding;
  Quantised to;
  to.bytes = bytes, to.count = order.count, to.columns = columns;
  to.depth = (rows.width * bytes + 7) / 8 * 2;
  to.packed = scratch.take<uint32_t>(int64_t(panels) * columns * to.depth + kPadding);
  to.offset_sum = scratch.take<int32_t>(padded);
  for (float** values : {&to.scale, &to.along, &to.residual, &to.norm, &to.half_norm})
    *values = scratch.filled(padded, 0.f);
  std::vector<uint32_t*> integers;
  for (int worker = 0; worker < rows.pool.threads; ++worker)
    integers.push_back(scratch.take<uint32_t>(columns * to.depth + kPadding));
  for_each_task(rows.pool, panels, [&](int64_t panel, int worker) {
    float* framed = rows.buffers[size_t(worker)];
    const int32_t begin = int32_t(panel) * columns, count = std::min(columns, order.count - begin);
    for (int32_t r = 0; r < count; ++r) {
      const int32_t row = order.index[begin + r];
      float* to_row = framed + int64_t(r) * rows.width;
      to.half_norm[begin + r] =
          rows.functions.rows.frame(rows.functions.rows.load(matrix, row, to_row), prepared.frame,
                                    units ? units + row : nullptr, rows.width, to_row);
    }
    functions.quantise(framed, count, rows.width, to, int32_t(panel), integers[size_t(worker)]);
  });
  return to;
}

Sides quantise_sides(Prepared<float>& prepared, int bytes) {
  const Batch& batch = prepared.rows.batch;
  const Classes& classes = prepared.rows.classes;
  Sides sides;
  sides.candidates =
      quantise(prepared, batch.candidates, prepared.candidate_units, classes.candidates, bytes);
  sides.anchors = batch.self_mining
                      ? sides.candidates
                      : quantise(prepared, batch.anchors, prepared.anchor_units, classes.anchors, bytes);
  return sides;
}

}  // namespace

UseCertified use_of_certified() { return UseCertified(use().load(std::memory_order_relaxed)); }
void set_use_of_certified(UseCertified wanted) { use() = int(wanted); }

struct CertifiedPass<float>::State {
  Prepared<float>& prepared;
  const Ordered<float>& rows;
  const Measure measure;
  std::array<Sides, 2> quantised;  // in one byte and in two

  explicit State(Prepared<float>& prepared) : prepared(prepared), rows(prepared.rows), measure(prepared) {}

  bool pick(bool same_class, Keep keep, const double* floors, int32_t* picks) {
    const bool forced = use_of_certified() == UseCertified::always;
    const Goal goal(prepared, measure, same_class, keep, floors);
    CertifiedSearch search(prepared, measure, goal);
    if (same_class && positive_pairs() <= kFewPositives * rows.anchors()) {
      search.measure_positives();
      search.finish(picks);
      return true;
    }
    for (const int bytes : {1, 2}) {
      const double affordable = affordable_survivors(bytes, keep);
      if (!forced && is_hopeless(goal, bytes, affordable)) continue;
      const Sides& sides = sides_of(bytes);
      const double survivors = search.prepare(sides.anchors, sides.candidates);
      if (survivors > affordable && !(forced && bytes == 2)) continue;
      search.walk();
      search.finish(picks);
      return true;
    }
    return false;
  }

  // How many candidates an anchor may measure. One costs as much as the products of some thousands of
  // numbers, and the less there is to gain, the fewer may be measured.
  double affordable_survivors(int bytes, Keep keep) const {
    const double products = double(rows.classes.candidates.count) * double(rows.width);
    return std::clamp(products / (bytes == 2 && keep != Keep::beyond ? 96000 : 32000), 2.0, 48.0);
  }

  // Whether a glance tells that far too many would have to be measured. Among integers of one byte, the few
  // nearest of a sample lie closer together than those of all candidates: only a large share tells. Integers
  // of two bytes hardly ever fail, and then in proportion.
  bool is_hopeless(const Goal& goal, int bytes, double affordable) const {
    const double candidates = double(rows.classes.candidates.count);
    const Glance glance(prepared, measure, goal);
    if (bytes == 1) return glance.indistinct(1, 128) > std::max(kHopeless, 8 * affordable / candidates);
    return glance.indistinct(2, 1024) * candidates > affordable * (goal.keep == Keep::beyond ? 0.5 : 0.25);
  }

  int64_t positive_pairs() const {
    int64_t pairs = 0;
    for (int32_t a = 0; a < rows.anchors(); ++a) pairs += rows.positive_count(a);
    return pairs;
  }

  const Sides& sides_of(int bytes) {
    Sides& sides = quantised[size_t(bytes - 1)];
    if (!sides.anchors.packed) sides = quantise_sides(prepared, bytes);
    return sides;
  }
};

CertifiedPass<float>::CertifiedPass(Prepared<float>& prepared) : prepared_(prepared) {}
CertifiedPass<float>::~CertifiedPass() = default;

bool certified_errors(const Functions<float>& functions, const Call& call, Keep keep, int bytes,
                      double* exact, double* approximate, double* bound) {
  const QuantisedFunctions& quantised = functions.quantised;
  if (!quantised.scan) return false;
  Ordered<float> rows(functions, {}, call.batch);
  Prepared<float> prepared(rows, call.distance);
  if (!prepared.look()) return false;
  const int32_t count = rows.anchors();
  const Measure measure(prepared);
  const Goal goal(prepared, measure, false, keep, nullptr);
  std::vector<Measured> best;
  best.resize(size_t(count));
  for (int32_t i = 0; i < count; ++i)
    for (int32_t j = 0; j < count; ++j) {
      const Measured value = measure.exact(i, j, 0);
      exact[int64_t(i) * count + j] = value.y;
      const bool better = !best[size_t(i)].exact || goal.sign * value.y < goal.sign * best[size_t(i)].y;
      if (i != j && better) best[size_t(i)] = value;
    }
  const Sides sides = quantise_sides(prepared, bytes);
  CertifiedThresholds thresholds(prepared, measure, goal);
  thresholds.begin(sides.anchors, sides.candidates);
  thresholds.start([&](int32_t i) { return best[size_t(i)].exact ? &best[size_t(i)] : nullptr; });
  // What no pair fails to pass, so that all are listed.
  const std::vector<float> lowest = std::vector<float>(size_t(count + kPadding), -kNever);
  thresholds.scan.row_threshold = lowest.data();
  std::vector<Hit> hits(kTileHits);
  for (int32_t row = 0; row < count; row += quantised.tile_rows)
    for (int32_t panel = 0; panel * quantised.columns < count; ++panel) {
      const int32_t found = quantised.scan(thresholds.scan, row, panel, nullptr, hits.data());
      for (int32_t h = 0; h < found; ++h) {
        const Hit& hit = hits[size_t(h)];
        if (hit.row >= count || hit.column >= count) continue;
        const int64_t at = int64_t(hit.row) * count + hit.column;
        const double allowances =
            double(thresholds.allowance[hit.row]) + double(thresholds.allowance[hit.column]);
        approximate[at] = goal.sign * (allowances - double(thresholds.key_of(hit)));
        bound[at] = double(thresholds.allowance[hit.column]) +
                    thresholds.bound().doubt(size_of(sides.anchors, hit.row), exact[at]);
      }
    }
  return true;
}

bool CertifiedPass<float>::may_pay(Keep keep) const {
  const Ordered<float>& rows = prepared_.rows;
  const double candidates = double(rows.classes.candidates.count), width = double(rows.width);
  const bool usable =
      rows.functions.quantised.scan && rows.width > 0 && rows.width <= kWidest && candidates > 0;
  if (use_of_certified() != UseCertified::where_it_pays)
    return usable && use_of_certified() == UseCertified::always;
  const double products = double(rows.anchors()) * candidates * width / (rows.batch.self_mining ? 2 : 1);
  return usable && rows.width >= kLeastWidth &&
         products >= (keep == Keep::beyond ? kLeastProductsBeyond : kLeastProducts);
}

bool CertifiedPass<float>::pick(bool same_class, Keep keep, const double* floors, int32_t* picks) {
  if (!may_pay(keep)) return false;
  if (!state_) state_ = std::make_unique<State>(prepared_);
  return state_->pick(same_class, keep, floors, picks);
}

}  // namespace tripletops
