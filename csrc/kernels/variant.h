// Gathers one instruction set's kernels into its table.
#pragma once

#include "rows.h"
#include "walk.h"

namespace tripletops {
namespace {

template <class T>
constexpr Kernels<T> kernels() {
  return {kTileRows, kPanelColumns<T>, load_row<T>,    store_row<T>, all_finite<T>, survey<T>,  frame_row<T>,
          pack<T>,   walk_block<T>,    key_of_pair<T>, draw,         normalise<T>,  measure<T>, pull<T>};
}

}  // namespace
}  // namespace tripletops
