#include "classes.h"

#include "functions.h"

namespace tripletops {
namespace {

// Open addressing: label -> class number.
class LabelTable {
 public:
  LabelTable(int64_t labels, Scratch& scratch) {
    while ((int64_t(1) << bits_) < 2 * labels) ++bits_;
    const int64_t slots = int64_t(1) << bits_;
    keys_ = scratch.take<int64_t>(slots);
    numbers_ = scratch.take<int32_t>(slots);
    std::memset(numbers_, 0xff, size_t(slots) * sizeof(int32_t));
  }

  int32_t number(int64_t label) {
    const int64_t mask = (int64_t(1) << bits_) - 1;
    int64_t slot = int64_t(uint64_t(label) * 0x9E3779B97F4A7C15u >> (64 - bits_));
    while (numbers_[slot] >= 0 && keys_[slot] != label) slot = (slot + 1) & mask;
    if (numbers_[slot] < 0) {
      keys_[slot] = label;
      numbers_[slot] = count_++;
    }
    return numbers_[slot];
  }

  int32_t count() const { return count_; }

 private:
  int bits_ = 1;
  int32_t count_ = 0;
  int64_t* keys_;
  int32_t* numbers_;
};

// A counting sort by class; numbers[row] is -1 for ignored rows.
Order sort_rows(const int32_t* numbers, int64_t rows, int32_t classes, int32_t padding, Scratch& scratch) {
  Order order;
  order.begin = scratch.take<int32_t>(classes + 2);
  std::memset(order.begin, 0, size_t(classes + 2) * sizeof(int32_t));
  int32_t* next = order.begin + 1;  // becomes the begin of each class after the rows are placed
  for (int64_t row = 0; row < rows; ++row)
    if (numbers[row] >= 0) ++next[numbers[row] + 1];
  for (int32_t c = 0; c < classes; ++c) next[c + 1] += next[c];
  order.count = next[classes];
  order.index = scratch.take<int32_t>(order.count + padding);
  order.group = scratch.take<int32_t>(order.count + padding);
  for (int64_t row = 0; row < rows; ++row) {
    if (numbers[row] < 0) continue;
    const int32_t position = next[numbers[row]]++;
    order.index[position] = int32_t(row);
    order.group[position] = numbers[row];
  }
  for (int32_t position = order.count; position < order.count + padding; ++position)
    order.index[position] = kNobody, order.group[position] = -1;
  return order;
}

}  // namespace

Classes order_by_class(const Batch& batch, int32_t padding, Scratch& scratch) {
  const int64_t anchors = batch.anchors.count, candidates = batch.candidates.count;
  LabelTable table(candidates + (batch.self_mining ? 0 : anchors), scratch);
  const auto number_all = [&](const int64_t* labels, int64_t rows) {
    int32_t* numbers = scratch.take<int32_t>(rows);
    for (int64_t row = 0; row < rows; ++row)
      numbers[row] = batch.ignoring && labels[row] == batch.ignore_label ? -1 : table.number(labels[row]);
    return numbers;
  };
  const int32_t* candidate_numbers = number_all(batch.candidate_labels, candidates);
  const int32_t* anchor_numbers =
      batch.self_mining ? candidate_numbers : number_all(batch.anchor_labels, anchors);

  Classes classes;
  classes.count = table.count();
  classes.candidates = sort_rows(candidate_numbers, candidates, classes.count, padding, scratch);
  classes.anchors = batch.self_mining ? classes.candidates
                                      : sort_rows(anchor_numbers, anchors, classes.count, padding, scratch);
  return classes;
}

}  // namespace tripletops
