#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tripletops {

extern const InstructionSet kBaseline;
#if defined(__x86_64__)
extern const InstructionSet kAvx2, kAvxVnni, kAvx512, kAvx512Vnni;
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
  if (!own.quantised.scan) own.quantised = base.quantised;
  if (own.tiles.search) return;
  own.tiles = base.tiles;  // one layout of panels, or the other
  own.tile_rows = base.tile_rows, own.panel_columns = base.panel_columns;
}

#if defined(__x86_64__)
// GCC 12's __builtin_cpu_supports has no word for it.
bool has_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

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
      if (has_avx_vnni()) sets.push_back(complete(kAvxVnni));
      if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")) {
        sets.push_back(complete(kAvx512));
        if (__builtin_cpu_supports("avx512vnni")) sets.push_back(complete(kAvx512Vnni));
      }
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
