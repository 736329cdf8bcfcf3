"""Write what C++ knows of the words of tripletops/_words.py, when the library is built.

`words.h` has the enums and numbers, `registry.h` what each word stands for: the rule `hard` is the class
HardRule of kernels/rules/hard.h, the objective `triplet` the class Triplet of kernels/objectives/triplet.h,
the loss `margin` the function losses::margin of kernels/losses.h.

    python csrc/words.py FOLDER
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).resolve().parents[1] / "tripletops" / "_words.py"


def load() -> Any:
    """The module, without the package around it: that needs torch and the library itself."""
    spec = importlib.util.spec_from_file_location("tripletops_words", _SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _enum(name: str, words: tuple[str, ...]) -> str:
    return f"""\
enum class {name} : int {{ {", ".join(words)} }};
constexpr int64_t count_of({name}) {{ return {len(words)}; }}
"""


def _draws(name: str, table: Any) -> str:
    named = [f"word == {name}::{word.name}" for word in table.values() if word.draws] or ["false"]
    return f"constexpr bool word_draws({name} word) {{ return {' || '.join(named)}; }}"


def _flags(name: str, flags: Iterable[bool]) -> str:
    return f"constexpr bool {name}[] = {{{', '.join(str(flag).lower() for flag in flags)}}};"


def header() -> str:
    words = load()
    tables = {table.option.capitalize(): table.coded for table in words.TABLES}
    tables["ObjectiveWord"] = tuple(words.OBJECTIVE)
    enums = "\n".join(_enum(name, table) for name, table in tables.items())
    members = "\n".join(f"  double {name} = 0;" for name in words.NUMBERS)
    saved = ", ".join(str(len(objective.saved)) for objective in words.OBJECTIVES)
    return f"""\
// Written by csrc/words.py from tripletops/_words.py: every word with its code.
#pragma once

#include <cstdint>

namespace tripletops {{

{enums}
// The numbers of a call, by name; 0 where the call has no such number.
struct Numbers {{
{members}
}};
constexpr int64_t kCodes = {len(words.Codes._fields)};
constexpr int64_t kNumbers = {len(words.NUMBERS)};

// Whether a rule needs a seed.
{_draws("Positive", words.POSITIVE)}
{_draws("Negative", words.NEGATIVE)}

// By objective: how many numbers it keeps for each anchor, whether it learns one, whether it is defined
// on the cosine alone.
constexpr int64_t kSaved[] = {{{saved}}};
{_flags("kLearns", (objective.learned is not None for objective in words.OBJECTIVES))}
{_flags("kCosineOnly", (objective.cosine for objective in words.OBJECTIVES))}

// Of the words that the library was built with: other sources have another one.
constexpr const char* kFingerprint = "{words.fingerprint()}";

}}  // namespace tripletops
"""


def _camel(word: str) -> str:
    return "".join(part.capitalize() for part in word.split("_"))


def _cases(enum: str, words: tuple[str, ...], result: str) -> str:
    return "\n".join(
        f"    case {enum}::{word}:\n      return {result.format(name=_camel(word), word=word)};"
        for word in words
    )


def _make_rule(table: Any, kind: str) -> str:
    enum = table.option.capitalize()
    cases = "\n".join(
        f"    case {enum}::{word}:\n"
        f"      return std::make_unique<{_camel(table[word].rule or word)}Rule<T>>(Kind::{kind});"
        for word in table.coded
    )
    return f"""\
template <class T>
std::unique_ptr<Rule<T>> make_rule({enum} word) {{
  switch (word) {{
{cases}
  }}
  return nullptr;
}}"""


def registry() -> str:
    words = load()
    tables = words.POSITIVE, words.NEGATIVE
    rules = {table[word].rule or word for table in tables for word in table.coded}
    objective = "std::make_unique<{name}<T>>(functions, pool, call, result)"
    includes = [f"rules/{word}" for word in rules] + [f"objectives/{word}" for word in words.OBJECTIVE]
    return f"""\
// Written by csrc/words.py from tripletops/_words.py: what every word stands for.
#pragma once

{_lines(f'#include "kernels/{file}.h"' for file in sorted(includes))}

namespace tripletops {{

{_make_rule(words.POSITIVE, "positives")}

{_make_rule(words.NEGATIVE, "negatives")}

inline Term term_of(Loss word, const Numbers& numbers, double d_ap, double d_an) {{
  switch (word) {{
{_cases("Loss", words.LOSS.coded, "losses::{word}(numbers, d_ap, d_an)")}
  }}
  return {{}};
}}

template <class T>
std::unique_ptr<Objective<T>> make_objective(const Functions<T>& functions, const Pool& pool,
                                             const Call& call, const Evaluated<T>& result) {{
  switch (call.objective) {{
{_cases("ObjectiveWord", tuple(words.OBJECTIVE), objective)}
  }}
  return nullptr;
}}

}}  // namespace tripletops
"""


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)


def write(folder: Path) -> None:
    """Leave files alone that are up to date, so that nothing is compiled again."""
    for name, text in (("words.h", header()), ("registry.h", registry())):
        file = folder / name
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
