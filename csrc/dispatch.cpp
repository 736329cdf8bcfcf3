#include "dispatch.h"

#include <cstdlib>
#include <stdexcept>

namespace tripletops {

extern const Variant kScalar;
#if defined(__x86_64__)
extern const Variant kAvx2, kAvx512;
#endif

std::vector<const Variant*> usable_variants() {
  std::vector<const Variant*> variants = {&kScalar};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    variants.push_back(&kAvx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
      variants.push_back(&kAvx512);
  }
#endif
  return variants;
}

const Variant& variant_named(const std::string& name) {
  std::string names;
  for (const Variant* variant : usable_variants()) {
    if (name == variant->name) return *variant;
    names += (names.empty() ? "" : ", ") + std::string(variant->name);
  }
  throw std::invalid_argument("TRIPLETOPS_ISA: '" + name + "' cannot run here; usable: " + names);
}

const Variant& selected_variant() {
  static const Variant& selected = [&]() -> const Variant& {
    const char* name = std::getenv("TRIPLETOPS_ISA");
    return name && *name ? variant_named(name) : *usable_variants().back();
  }();
  return selected;
}

}  // namespace tripletops
