// The instruction-set variants of the kernels and the one in use.
#pragma once

#include <string>
#include <vector>

#include "kernels/problem.h"

namespace tripletops {

// Those that this machine can run, the best one last.
std::vector<const Variant*> usable_variants();

// The variant called `name`. Throws std::invalid_argument, naming the usable ones, where there is no such
// variant here.
const Variant& variant_named(const std::string& name);

// The one that TRIPLETOPS_ISA names when this is first called, else the best.
const Variant& selected_variant();

}  // namespace tripletops
