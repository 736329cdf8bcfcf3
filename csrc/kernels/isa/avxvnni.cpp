// For machines with AVX2, FMA and AVX-VNNI: products of integers that are added up in one instruction.
// Everything else is that of avx2.
#pragma GCC target("avx2,fma,avxvnni")

namespace tripletops {
namespace {

struct Isa {
  static constexpr int vector_bytes = 32;
  static constexpr bool fused = true;
  static constexpr int tile_rows = 6, panel_vectors = 2;
  static constexpr bool adds_integer_products = true;
  static constexpr int integer_tile_rows = 4;
};

}  // namespace
}  // namespace tripletops

#include "../vector/quantised.h"

namespace tripletops {
extern const InstructionSet kAvx2, kAvxVnni;
const InstructionSet kAvxVnni = {"avxvnni", &kAvx2, integer_functions(), {}};
}  // namespace tripletops
