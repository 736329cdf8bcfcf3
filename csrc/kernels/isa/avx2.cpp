// For machines with AVX2 and FMA. The pragma, not a compiler flag, sets the instruction set, so nothing
// outside this file can be compiled for it.
#pragma GCC target("avx2,fma")

namespace tripletops {
namespace {

struct Isa {
  static constexpr int vector_bytes = 32;
  static constexpr bool fused = true;
  static constexpr int tile_rows = 6, panel_vectors = 2;  // 12 of 16 registers hold a tile's sums
  static constexpr bool adds_integer_products = false;
  static constexpr int integer_tile_rows = 4;
};

}  // namespace
}  // namespace tripletops

#include "../vector/quantised.h"
#include "../vector/table.h"

namespace tripletops {
namespace {

constexpr Functions<float> with_integers() {
  Functions<float> functions = all_functions<float>();
  functions.quantised = quantised_functions();
  return functions;
}

}  // namespace
extern const InstructionSet kBaseline, kAvx2;
const InstructionSet kAvx2 = {"avx2", &kBaseline, with_integers(), all_functions<double>()};
}  // namespace tripletops
