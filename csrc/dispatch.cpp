#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace tripletops {

extern const InstructionSet kBaseline;
#if defined(__x86_64__)
extern const InstructionSet kAvx2, kAvx512;
#endif

namespace {

// Takes the functions that `own` lacks from `base`. The tables are nothing but function pointers.
template <class Table>
void fill_in(Table& own, const Table& base) {
  using Function = void (*)();
  static_assert(sizeof(Table) % sizeof(Function) == 0);
  auto* functions = reinterpret_cast<Function*>(&own);
  const auto* replacements = reinterpret_cast<const Function*>(&base);
  for (size_t i = 0; i < sizeof(Table) / sizeof(Function); ++i)
    if (!functions[i]) functions[i] = replacements[i];
}

template <class T>
void fill_in(Functions<T>& own, const Functions<T>& base) {
  fill_in(own.rows, base.rows);
  fill_in(own.blocks, base.blocks);
  if (own.tiles.search) return;
  own.tiles = base.tiles;  // one layout of panels, or the other
  own.tile_rows = base.tile_rows, own.panel_columns = base.panel_columns;
}

InstructionSet complete(const InstructionSet& set) {
  InstructionSet whole = set;
  for (const InstructionSet* base = set.base; base; base = base->base) {
    fill_in(whole.single_precision, base->single_precision);
    fill_in(whole.double_precision, base->double_precision);
  }
  return whole;
}

}  // namespace

const std::vector<InstructionSet>& usable_instruction_sets() {
  static const std::vector<InstructionSet> usable = [] {
    std::vector<InstructionSet> sets = {complete(kBaseline)};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      sets.push_back(complete(kAvx2));
      if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
        sets.push_back(complete(kAvx512));
    }
#endif
    return sets;
  }();
  return usable;
}

const InstructionSet& instruction_set_named(const std::string& name) {
  std::string names;
  for (const InstructionSet& set : usable_instruction_sets()) {
    if (name == set.name) return set;
    names += (names.empty() ? "" : ", ") + std::string(set.name);
  }
  throw std::invalid_argument("TRIPLETOPS_ISA: '" + name + "' cannot run here; usable: " + names);
}

namespace {

std::atomic<const InstructionSet*>& selected() {
  static std::atomic<const InstructionSet*> set = [] {
    const char* name = std::getenv("TRIPLETOPS_ISA");
    return name && *name ? &instruction_set_named(name) : &usable_instruction_sets().back();
  }();
  return set;
}

}  // namespace

const InstructionSet& selected_instruction_set() { return *selected().load(std::memory_order_relaxed); }

void select_instruction_set(const std::string& name) { selected() = &instruction_set_named(name); }

}  // namespace tripletops
