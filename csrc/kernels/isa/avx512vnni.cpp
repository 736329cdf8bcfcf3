// For machines that have, beside what avx512 asks for, products of integers that are added up in one
// instruction. Everything else is that of avx512.
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw,avx512vnni,avx2,fma,prefer-vector-width=512")
// GCC 12 takes the deliberately undefined operands inside its own intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace tripletops {
namespace {

struct Isa {
  static constexpr int vector_bytes = 64;
  static constexpr bool fused = true;
  static constexpr int tile_rows = 12, panel_vectors = 2;
  static constexpr bool adds_integer_products = true;
  static constexpr int integer_tile_rows = 8;
};

}  // namespace
}  // namespace tripletops

#include "../vector/quantised.h"

namespace tripletops {
extern const InstructionSet kAvx512, kAvx512Vnni;
const InstructionSet kAvx512Vnni = {"avx512vnni", &kAvx512, integer_functions(), {}};
}  // namespace tripletops
