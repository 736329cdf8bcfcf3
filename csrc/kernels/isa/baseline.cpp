// For every machine: what the compiler's default target offers, no fused multiply-add.
namespace tripletops {
namespace {

struct Isa {
  static constexpr int vector_bytes = 16;
  static constexpr bool fused = false;
  static constexpr int tile_rows = 6, panel_vectors = 2;  // 12 of 16 registers hold a tile's sums
};

}  // namespace
}  // namespace tripletops

#include "../vector/table.h"

namespace tripletops {
extern const InstructionSet kBaseline;
const InstructionSet kBaseline = {"baseline", nullptr, all_functions<float>(), all_functions<double>()};
}  // namespace tripletops
