// The variant for machines with AVX2 and FMA. The pragma, not a compiler flag, sets the instruction set, so
// nothing outside this file can be compiled for it.
#pragma GCC target("avx2,fma")
#define TRIPLETOPS_VECTOR_BYTES 32
#include "variant.h"

namespace tripletops {
extern const Variant kAvx2;
const Variant kAvx2 = {"avx2", kernels<float>(), kernels<double>()};
}  // namespace tripletops
