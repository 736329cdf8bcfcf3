// The variant for machines with AVX-512F. The pragma, not a compiler flag, sets the instruction set, so
// nothing outside this file can be compiled for it.
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw,avx2,fma,prefer-vector-width=512")
// GCC 12 takes the deliberately undefined operands inside its own intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#define TRIPLETOPS_VECTOR_BYTES 64
#include "variant.h"

namespace tripletops {
extern const Variant kAvx512;
const Variant kAvx512 = {"avx512", kernels<float>(), kernels<double>()};
}  // namespace tripletops
