"""Write what is made of tripletops/_words.py and kept in git: the type stub and the README's tables.

python docs/write.py           # or `make words`
python docs/write.py --check   # exit 1 where a file is not up to date
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tripletops import _signatures
from tripletops._words import FUNCTION, LOSS, NEGATIVE, POSITIVE, Function, Table

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
STUB = ROOT / "tripletops" / "__init__.pyi"

_STUB_HEAD = '''\
"""What tripletops offers, for type checkers and editors. Written by docs/write.py from
tripletops/_words.py."""

from typing import Literal, overload

from torch import Generator, Tensor

from tripletops import diagnostics as diagnostics
from tripletops import evaluate as evaluate
from tripletops import nn as nn
from tripletops import samplers as samplers
from tripletops.backends import backends as backends
from tripletops.functional import Triplets as Triplets

__all__: list[str]
__version__: str
'''


def stub() -> str:
    return "\n".join([_STUB_HEAD, *_signatures.stub()]) + "\n"


def _rows(*cells: tuple[str, ...]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def rules_table(table: Table) -> str:
    """The words of `positive=` or `negative=`; `all` is for pairs alone."""
    lines = [(f'`"{word.name}"`', word.doc, word.paper) for word in table.values() if word.name != "all"]
    return _rows((f"`{table.option}=`", "picks", "the papers' name"), ("---",) * 3, *lines)


def losses_table() -> str:
    lines = [(f'`"{word.name}"`', word.doc, word.paper) for word in LOSS.values()]
    return _rows(("`loss=`", "value", "from"), ("---",) * 3, *lines)


def functions_table() -> str:
    def line(function: Function) -> tuple[str, ...]:
        return f"`{function.name}`", function.doc.removesuffix("."), function.paper

    lines = [line(function) for function in FUNCTION.values() if function.paper]
    return _rows(("function", "what it is", "from"), ("---",) * 3, *lines)


TABLES = {
    "positive": lambda: rules_table(POSITIVE),
    "negative": lambda: rules_table(NEGATIVE),
    "losses": losses_table,
    "functions": functions_table,
}


def readme(text: str) -> str:
    """The text with every table between its marks made anew."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: written by docs/write.py -->", f"<!-- {name}: end -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"README.md has no marks for the table of {name}")
        written = f"{begin}\n{table()}\n{end}"
        text = pattern.sub(lambda _, written=written: written, text)
    return text


def files() -> Iterator[tuple[Path, str]]:
    yield STUB, stub()
    yield README, readme(README.read_text(encoding="utf-8"))


def main(arguments: list[str]) -> int:
    stale = [path for path, text in files() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if arguments == ["--check"]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not up to date: run `make words`")
        return int(bool(stale))
    for path, text in files():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
