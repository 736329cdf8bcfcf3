"""Random calls of the public functions of tripletops, which can be repeated: in any process, by any build.

A call is a `Case`: a function, a number and options. Its batch follows from function and number alone. What
options and words there are is not written down here: the signatures say it, and the errors that list the
words of an option.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tripletops

DTYPES = ("float32", "float64", "float16", "bfloat16")
LABEL_DTYPES = ("int64", "int32", "int16", "uint8")
KINDS = ("normal", "unit", "offset", "duplicates", "equal", "integers", "clusters", "tiny", "huge")
WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65, 70)  # around those of vector registers
IGNORED = 3  # the label that is ignored where one is
LEARNED = ("number", "scalar", "by class")  # what a learned parameter is given as
NO_WORD = "?"  # a word that no option has

# What belongs to the batch or the draw. `backend` is left alone: the default is the CPU's.
NOT_OPTIONS = (
    "emb",
    "labels",
    "ref_emb",
    "ref_labels",
    "self_index",
    "ignore_label",
    "generator",
    "seed",
    "backend",
)


class Case(NamedTuple):
    """A call."""

    function: str
    number: int
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.function}/{self.number}"


class Option(NamedTuple):
    name: str
    kind: str  # "word", "flag", "number" or "learned"
    words: tuple[str, ...]
    default: float  # of a number
    none: bool  # None may be given too


def functions() -> dict[str, list[Option]]:
    """Every public function that takes a batch, with its options."""
    found = {}
    for name in tripletops.__all__:
        value = getattr(tripletops, name)
        if inspect.isfunction(value) and "emb" in inspect.signature(value).parameters:
            found[name] = _options(name)
    return found


def _options(function: str) -> list[Option]:
    parameters = inspect.signature(getattr(tripletops, function)).parameters.values()
    return [_option(function, parameter) for parameter in parameters if parameter.name not in NOT_OPTIONS]


def _option(function: str, parameter: inspect.Parameter) -> Option:
    annotation, name = str(parameter.annotation), parameter.name
    none = "None" in annotation
    if "Tensor" in annotation:
        return Option(name, "learned", LEARNED, 0.0, none)
    if "str" in annotation:
        return Option(name, "word", _words(function, name), 0.0, none)
    if "bool" in annotation:
        return Option(name, "flag", (), 0.0, none)
    return Option(name, "number", (), 1.0 if parameter.default is None else float(parameter.default), none)


def _words(function: str, option: str) -> tuple[str, ...]:
    """Those that the error for an unknown word lists."""
    call = getattr(tripletops, function)
    parameters = inspect.signature(call).parameters.values()
    required = [parameter for parameter in parameters if parameter.default is inspect.Parameter.empty]
    positional: list[Any] = [torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64), 1.0]
    count = sum(parameter.kind is not parameter.KEYWORD_ONLY for parameter in required)
    keywords = {parameter.name: "hard" for parameter in required if parameter.kind is parameter.KEYWORD_ONLY}
    try:
        call(*positional[:count], **keywords | {option: NO_WORD})
    except ValueError as error:
        return tuple(re.findall(r"'(\w+)'", str(error).partition("not one of")[2]))
    raise AssertionError(f"{function} takes {option}={NO_WORD!r}")


def cases(function: str, options: list[Option]) -> Iterator[Case]:
    """All calls of a function: there is no end to them."""
    number = 0
    while True:
        yield case_of(function, number, options)
        number += 1


def case_of(function: str, number: int, options: list[Option]) -> Case:
    return Case(function, number, _draw_options(options, random.Random(f"options of {function}/{number}")))


def _draw_options(options: list[Option], draw: random.Random) -> dict[str, Any]:
    """A value for most of the options; the others keep their defaults."""
    drawn: dict[str, Any] = {}
    for option in options:
        if option.none and draw.random() < 0.3:
            drawn[option.name] = None
        elif option.words:
            drawn[option.name] = draw.choice(option.words)
        elif option.kind == "flag":
            drawn[option.name] = draw.random() < 0.5
        elif draw.random() < 0.6:
            drawn[option.name] = (option.default or 0.5) * draw.choice((0.25, 0.5, 0.9, 1.1, 2.0, 3.7))
    return drawn


@dataclass
class Arguments:
    """What a function is called with, and which of it receives gradients."""

    positional: list[Any]
    keywords: dict[str, Any] = field(default_factory=dict)
    leaves: dict[str, Tensor] = field(default_factory=dict)
    summary: str = ""  # for the eye


class Sampler:
    """Draws the batch of a case."""

    def __init__(self, case: Case) -> None:
        self.draw = random.Random(case.name)
        self.generator = torch.Generator().manual_seed(self.draw.getrandbits(40))
        self.kind, self.dtype = self.draw.choice(KINDS), self.draw.choice(DTYPES)
        self.label_dtype = self.draw.choice(LABEL_DTYPES)
        self.n, self.d = self.row_count(), self.draw.choice(WIDTHS)
        self.classes = self.draw.choice((1, 2, 3, 5, 10, 40, max(self.n // 4, 1), max(self.n, 1)))

    def often(self, probability: float) -> bool:
        return self.draw.random() < probability

    def row_count(self) -> int:
        if self.often(0.02):
            return 1200
        return self.draw.choice(
            (self.draw.randint(0, 9), self.draw.randint(10, 70), self.draw.randint(71, 300))
        )

    def embeddings(self, n: int) -> Tensor:
        rows = self._rows_of_a_kind(n)
        if n and self.often(0.04):
            rows[self.draw.randrange(n), self.draw.randrange(self.d)] = self.draw.choice(
                (torch.nan, torch.inf)
            )
        rows = rows.to(getattr(torch, self.dtype))
        return rows.T.contiguous().T if self.often(0.1) else rows  # now and then with other strides

    def _rows_of_a_kind(self, n: int) -> Tensor:
        rows = torch.randn(n, self.d, generator=self.generator, dtype=torch.float64)
        if n == 0:
            return rows
        several = torch.randint(max(n // 3, 1), (n,), generator=self.generator)
        power = self.draw.choice((0.2, 0.4))
        scale = torch.finfo(getattr(torch, self.dtype)).max ** power
        by_kind: dict[str, Callable[[], Tensor]] = {
            "normal": lambda: rows,
            "unit": lambda: rows / rows.norm(dim=1, keepdim=True),
            "offset": lambda: rows + 250 * power,
            "duplicates": lambda: rows[several],
            "equal": lambda: rows[:1].repeat(n, 1),
            "integers": lambda: rows.round(),
            "clusters": lambda: rows[several] + 0.01 * rows,
            "tiny": lambda: rows / scale,
            "huge": lambda: rows * scale,
        }
        return by_kind[self.kind]()

    def labels(self, n: int) -> Tensor:
        labels = torch.randint(self.classes, (n,), generator=self.generator)
        if self.often(0.5):
            labels = labels.sort().values
        return (labels % 256 if self.label_dtype == "uint8" else labels).to(getattr(torch, self.label_dtype))

    def numbers(self, count: int) -> Tensor:
        """Of about 1, half the time in the type of the batch."""
        numbers = 0.5 + torch.rand(count, generator=self.generator)
        return numbers.to(getattr(torch, self.dtype)) if self.often(0.5) else numbers


def arguments(case: Case) -> Arguments:
    """What a case calls its function with."""
    sampler = Sampler(case)
    emb, labels = sampler.embeddings(sampler.n), sampler.labels(sampler.n)
    made = Arguments([emb, labels], leaves={"emb": emb})
    made.summary = f"{sampler.dtype} {sampler.n}×{sampler.d} {sampler.kind}, {sampler.classes} classes"
    if sampler.often(0.4):
        _add_references(made, sampler)
    if sampler.often(0.3):
        made.keywords["ignore_label"] = IGNORED
        made.summary += f", ignore_label={IGNORED}"
    if "seed" in inspect.signature(getattr(tripletops, case.function)).parameters:
        seed = sampler.draw.getrandbits(40)
        by_generator = sampler.often(0.2)
        made.keywords |= (
            {"generator": torch.Generator().manual_seed(seed)} if by_generator else {"seed": seed}
        )
    for name, value in case.options.items():
        if value in LEARNED:
            _add_learned(made, name, value, sampler)
        else:
            made.keywords[name] = value
    for leaf in made.leaves.values():
        leaf.requires_grad_()
    return made


def _add_references(made: Arguments, sampler: Sampler) -> None:
    """Add ref_emb, half the time with the anchors behind the other rows."""
    emb, labels = made.positional
    count = sampler.row_count()
    ref_emb, ref_labels = sampler.embeddings(count), sampler.labels(count)
    made.summary += f", ref_emb of {count}"
    if sampler.often(0.5):
        ref_emb, ref_labels = torch.cat([ref_emb, emb]), torch.cat([ref_labels, labels])
        absent = torch.rand(len(emb), generator=sampler.generator) < 0.1
        made.keywords["self_index"] = (count + torch.arange(len(emb))).masked_fill(absent, -1)
        made.summary += " and the anchors"
    made.keywords |= {"ref_emb": ref_emb, "ref_labels": ref_labels}
    if sampler.often(0.7):
        made.leaves["ref_emb"] = ref_emb
        made.summary += " with a gradient"


def _add_learned(made: Arguments, name: str, given_as: str, sampler: Sampler) -> None:
    labels = made.positional[1]
    values = sampler.numbers(1 + int(labels.max()) if len(labels) else 1)
    if given_as == "number":
        made.positional.append(values[0].item())
        return
    made.leaves[name] = values if given_as == "by class" else values[0].clone()
    made.positional.append(made.leaves[name])


def run(case: Case) -> dict[str, Tensor]:
    """Loss and gradients by name, or what was mined."""
    given = arguments(case)
    result = getattr(tripletops, case.function)(*given.positional, **given.keywords)
    if isinstance(result, tripletops.Triplets):
        return result._asdict()
    loss, *active = result if isinstance(result, tuple) else (result,)
    generator = torch.Generator().manual_seed(case.number)
    upstream = torch.randn(loss.shape, generator=generator, dtype=loss.dtype)
    if loss.dim() == 0:  # a power of two: whether gradients are scaled before or after makes no difference
        upstream = upstream.sign() * upstream.mul(3).round().exp2()
    gradients = torch.autograd.grad(loss, list(given.leaves.values()), upstream)
    by_leaf = zip(given.leaves, gradients, strict=True)
    results = {"loss": loss.detach()} | {f"gradient of {name}": gradient for name, gradient in by_leaf}
    return results | dict(zip(["active"], active, strict=False))
