// Rows ordered by class. Classes are numbered by first appearance among the candidates, so that labels that
// arrive grouped stay where they are whatever their values; within a class rows keep their order.
#pragma once

#include "call.h"
#include "scratch.h"

namespace tripletops {

struct Order {
  int32_t count = 0;         // rows that are not ignored
  int32_t* index = nullptr;  // position -> row; padded
  int32_t* group = nullptr;  // position -> class, ascending; padded with -1
  int32_t* begin = nullptr;  // class -> first position; one more entry at the end
};

struct Classes {
  int32_t count = 0;
  Order anchors, candidates;  // the same order in self-mining
};

// `padding`: how many entries behind the last position may be read.
Classes order_by_class(const Batch& batch, int32_t padding, Scratch& scratch);

}  // namespace tripletops
