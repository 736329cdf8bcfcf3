// Gathers one instruction set's kernels into its table.
#pragma once

#include "block.h"
#include "costs.h"

namespace tripletops {
namespace {

template <class T>
constexpr Kernels<T> kernels() {
  return {kTileRows,       kPanelColumns<T>,   load_row<T>,    store_row<T>,
          all_finite<T>,   survey<T>,          frame_row<T>,   pack<T>,
          walk_block<T>,   key_of_pair<T>,     draw,           half_squares<T>,
          to_distances<T>, transpose_block<T>, combine<T>,     accumulate<T>,
          add_costs<T>,    weigh<T>,           keep_beyond<T>, to_log_weights<T>,
          keep_draws<T>,   normalise<T>,       measure<T>,     pull<T>};
}

}  // namespace
}  // namespace tripletops
