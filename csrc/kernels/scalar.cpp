// The variant for every machine: what the compiler's default target offers, no fused multiply-add.
#define TRIPLETOPS_VECTOR_BYTES 16
#include "variant.h"

namespace tripletops {
extern const Variant kScalar;
const Variant kScalar = {"scalar", kernels<float>(), kernels<double>()};
}  // namespace tripletops
