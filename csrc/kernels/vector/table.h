// Gathers an instruction set's functions into its table. The including file has defined `Isa`.
#pragma once

#include "../costs/exponential.h"
#include "../costs/hinge.h"
#include "../costs/softplus.h"
#include "block.h"
#include "draws.h"
#include "near_rows.h"
#include "search.h"

namespace tripletops {
namespace {

template <class T>
constexpr Functions<T> all_functions() {
  return {kTileRows,
          kPanelColumns<T>,
          {load_row<T>, store_row<T>, all_finite<T>, survey<T>, frame_row<T>, normalise<T>, measure<T>,
           unpack<T>, squares, pull_all<T>, pull<T>, pull_plainly<T>, draw},
          {pack<T>, repack<T>, search_block<T>, key_of_pair<T>, half_squares<T>},
          {to_distances<T>,
           transpose_block<T>,
           combine<T>,
           accumulate<T>,
           keep_beyond<T>,
           to_log_weights<T>,
           keep_draws<T>,
           {add_hinge<T>, weigh_hinge<T>},
           {add_softplus<T>, weigh_softplus<T>},
           {add_exponential<T>, weigh_exponential<T>}},
          {}};
}

}  // namespace
}  // namespace tripletops
