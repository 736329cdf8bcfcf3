"""PTX text → a `Kernel`: instructions whose operands are records, and where each of them came from.

Only what the compiler emits for one entry point is read. The grammar: PTX ISA, chapters 4 to 6.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from tests.ptx.faults import UnknownInstructionError

REGISTER_BITS = {"pred": 1, **{f"{kind}{bits}": bits for kind in "bsuf" for bits in (8, 16, 32, 64)}}


class Register(NamedTuple):
    index: int
    bits: int  # 1: a predicate


class Number(NamedTuple):
    value: int  # of a floating-point number its bits
    bits: int  # 0: an integer, which has the type of the instruction


class Symbol(NamedTuple):
    """A label, a parameter, a special register, an array in shared memory, or `_`."""

    name: str


class Address(NamedTuple):
    base: Register | Symbol | Number
    offset: int


class Not(NamedTuple):
    predicate: Register


class Vector(NamedTuple):
    """{a, b}, and the pair a|b."""

    parts: tuple[Register | Number | Symbol, ...]


Operand: TypeAlias = "Register | Number | Symbol | Address | Not | Vector"


@dataclass(frozen=True, eq=False)
class Instruction:
    name: str
    modifiers: tuple[str, ...]  # behind the name, types among them
    operands: tuple[Operand, ...]
    guard: Register | None
    guard_negated: bool
    text: str
    source: str  # the line of Triton's source, "walk.py:91"

    def __str__(self) -> str:
        return f"{self.text}  ({self.source})" if self.source else self.text


class Parameter(NamedTuple):
    name: str
    bits: int


@dataclass(eq=False)
class Kernel:
    name: str
    parameters: list[Parameter]
    threads: int  # of a block
    registers: list[int] = field(default_factory=list)  # how many bits each of them has
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # to places among the instructions
    shared: dict[str, int] = field(default_factory=dict)  # arrays in shared memory, to their addresses
    shared_bytes: int = 0  # without what the launch adds


_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\{", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+\.(\w+)[^,]*?(\w+)\s*(?:,|$)")
_SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)\[(\d*)\]")
_TOKEN = re.compile(
    r"\s+"
    r"|\.loc\s+(?P<file>\d+)\s+(?P<line>\d+)[^\n]*"
    r"|(?P<label>[$\w]+):"
    r"|(?P<scope>[{}])"
    r"|(?P<statement>[^;{}]*(?:\{[^;{}]*\}[^;{}]*)*);"
)
_INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z]\w*)((?:\.[\w:]+)*)\s*(.*)", re.DOTALL)
_PART = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")


def parse(text: str) -> Kernel:
    """The one kernel of a module."""
    text = re.sub(r"//[^\n]*", "", text)
    entry = _ENTRY.search(text)
    if entry is None or len(_ENTRY.findall(text)) != 1:
        raise UnknownInstructionError("a module that does not have one entry point")
    name, parameters, directives = entry.groups()
    return _Body(
        Kernel(
            name,
            [Parameter(name, REGISTER_BITS[kind]) for kind, name in _PARAMETER.findall(parameters)],
            _threads(directives),
        ),
        text,
        entry.end(),
    ).kernel


def _threads(directives: str) -> int:
    counts = re.search(r"\.reqntid\s+([\d, ]+)", directives)
    if counts is None:
        raise UnknownInstructionError("a kernel that does not say how many threads a block has")
    threads = 1
    for count in counts[1].split(","):
        threads *= int(count)
    return threads


class _Body:
    """Reads the instructions of a kernel."""

    def __init__(self, kernel: Kernel, text: str, begin: int) -> None:
        self.kernel = kernel
        self.scopes: list[dict[str, Register]] = [{}]  # names of registers, those of inner blocks last
        self.source = ""
        self.files = {
            number: Path(path).name for number, path in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text)
        }
        self._place_shared(text)
        for match in self._tokens(text, begin):
            self._take(match)

    def _place_shared(self, text: str) -> None:
        """Arrays of a given size first; the one without a size begins behind them."""
        found = sorted(_SHARED.findall(text), key=lambda array: array[2] == "")
        for align, name, size in found:
            start = -(-self.kernel.shared_bytes // int(align)) * int(align)
            self.kernel.shared[name] = start
            self.kernel.shared_bytes = start + int(size or 0)

    def _tokens(self, text: str, place: int) -> Iterator[re.Match[str]]:
        while self.scopes:
            match = _TOKEN.match(text, place)
            if match is None:
                raise UnknownInstructionError(f"cannot read {text[place : place + 60]!r}")
            place = match.end()
            yield match

    def _take(self, match: re.Match[str]) -> None:
        if match["file"]:
            self.source = f"{self.files.get(match['file'], '?')}:{match['line']}"
        elif match["label"]:
            self.kernel.labels[match["label"]] = len(self.kernel.instructions)
        elif match["scope"] == "{":
            self.scopes.append({})
        elif match["scope"] == "}":
            self.scopes.pop()
        elif match["statement"]:
            self._statement(" ".join(match["statement"].split()))

    def _statement(self, text: str) -> None:
        if text.startswith(".reg"):
            self._declare(text)
        elif text.startswith(".shared"):
            pass  # placed already
        elif not text.startswith(".pragma"):
            self.kernel.instructions.append(self._instruction(text))

    def _declare(self, text: str) -> None:
        _, kind, *names = text.replace(",", " ").split()
        bits = REGISTER_BITS[kind.removeprefix(".")]
        for name in names:
            stem, _, count = name.partition("<")
            declared = [stem] if not count else [f"{stem}{i}" for i in range(int(count.rstrip(">")))]
            for each in declared:
                self.scopes[-1][each] = Register(len(self.kernel.registers), bits)
                self.kernel.registers.append(bits)

    def _instruction(self, text: str) -> Instruction:
        match = _INSTRUCTION.fullmatch(text)
        if match is None:
            raise UnknownInstructionError(f"cannot read {text!r}")
        negated, guard, name, modifiers, operands = match.groups()
        register = self._operand(guard) if guard else None
        assert register is None or isinstance(register, Register), text
        return Instruction(
            name=name,
            modifiers=tuple(modifiers.split(".")[1:]),
            operands=tuple(self._operand(part) for part in _PART.findall(operands)),
            guard=register,
            guard_negated=bool(negated),
            text=text,
            source=self.source,
        )

    def _operand(self, text: str) -> Operand:
        if text.startswith("["):
            return self._address(text)
        if text.startswith("{"):
            return Vector(tuple(self._simple(part) for part in _PART.findall(text.strip("{}"))))
        if text.startswith("!"):
            negated = self._simple(text[1:])
            assert isinstance(negated, Register), text
            return Not(negated)
        if "|" in text:
            return Vector(tuple(self._simple(part) for part in text.split("|")))
        return self._simple(text)

    def _address(self, text: str) -> Address:
        base, sign, offset = re.fullmatch(r"\[\s*([^\s+-]+)\s*([+-]?)\s*(-?\w*)\s*\]", text).groups()  # type: ignore[union-attr]
        return Address(self._simple(base), int(sign + "1") * int(offset, 0) if sign else 0)

    def _simple(self, text: str) -> Register | Number | Symbol:
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        if re.match(r"0[fFdD][0-9a-fA-F]{8}", text):
            return Number(int(text[2:], 16), 32 if text[1] in "fF" else 64)
        if re.match(r"-?\d", text):
            return Number(int(text.rstrip("U"), 0), 0)
        return Symbol(text)
