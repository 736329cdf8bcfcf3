// The instruction sets of this machine and the one in use.
#pragma once

#include <string>
#include <vector>

#include "kernels/functions.h"

namespace tripletops {

// Those that this machine can run, the best one last. All their functions are there.
const std::vector<InstructionSet>& usable_instruction_sets();

// The one called `name`. Throws std::invalid_argument, naming the usable ones, where there is no such one
// here.
const InstructionSet& instruction_set_named(const std::string& name);

// The one in use: what TRIPLETOPS_ISA names when this is first called, else the best, until another is
// selected.
const InstructionSet& selected_instruction_set();
// Throws as instruction_set_named does. Calls that are under way keep the one they began with.
void select_instruction_set(const std::string& name);

template <class T>
const Functions<T>& functions_of(const InstructionSet& set) {
  if constexpr (sizeof(T) == sizeof(float))
    return set.single_precision;
  else
    return set.double_precision;
}

}  // namespace tripletops
