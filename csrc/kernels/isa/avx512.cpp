// For machines with AVX-512F, DQ, VL and BW. The pragma, not a compiler flag, sets the instruction set, so
// nothing outside this file can be compiled for it.
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw,avx2,fma,prefer-vector-width=512")
// GCC 12 takes the deliberately undefined operands inside its own intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace tripletops {
namespace {

struct Isa {
  static constexpr int vector_bytes = 64;
  static constexpr bool fused = true;
  static constexpr int tile_rows = 12, panel_vectors = 2;  // 24 of 32 registers hold a tile's sums
  static constexpr bool adds_integer_products = false;
  static constexpr int integer_tile_rows = 8;
};

}  // namespace
}  // namespace tripletops

#include "../vector/quantised.h"
#include "../vector/table.h"

namespace tripletops {
namespace {

// Finiteness is looked at where a sum overflowed: AVX2's function does for that.
template <class T>
constexpr Functions<T> own_functions() {
  Functions<T> functions = all_functions<T>();
  functions.rows.all_finite = nullptr;
  if constexpr (sizeof(T) == sizeof(float)) functions.quantised = quantised_functions();
  return functions;
}

}  // namespace
extern const InstructionSet kAvx2, kAvx512;
const InstructionSet kAvx512 = {"avx512", &kAvx2, own_functions<float>(), own_functions<double>()};
}  // namespace tripletops
