"""What a row of a table is: contenders at a size, the ratio that is shown, and what it has to reach."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.measure import (
    THREADS,
    Call,
    Samples,
    free_memory,
    in_fresh_process,
    limit_memory,
    peak_growth,
    peak_growth_of_gpu,
    ratio,
    take_turns,
)

FRESH_PROCESSES = 5
CALLS_IN_A_BLOCK = 20
SMALL = 512  # up to this many anchors a call is too short to be timed alone, and depends on its process
QUICK_ROUNDS = 3


@dataclass(frozen=True)
class Shape:
    n: int
    d: int = 128
    k: int = 4
    m: int = 0  # rows of the memory; 0: the batch mines itself
    device: str = "cpu"

    def sizes(self) -> dict[str, int]:
        return {"n": self.n, "d": self.d, "k": self.k, "m": self.m}

    def quick(self) -> Shape:
        """A size that runs at once, to see that everything works."""
        return replace(
            self,
            n=self.n if self.n <= SMALL else max(2 * SMALL, self.n // 8),
            k=self.k if self.k <= 4 else self.k // 8,
            m=self.m // 8,
        )


Contenders = Callable[[Shape], dict[str, Call]]

SIGNS: dict[str, Callable[[float, float], bool]] = {"≤": operator.le, "<": operator.lt, "≥": operator.ge}


@dataclass(frozen=True)
class Target:
    bound: float
    avx512vnni: float | None = None  # where wider registers and products of integers have to reach more
    sign: str = "≤"

    def limit(self, isa: str) -> float:
        return self.avx512vnni if self.avx512vnni is not None and isa == "avx512vnni" else self.bound

    def met(self, value: float, isa: str) -> bool:
        return SIGNS[self.sign](value, self.limit(isa))

    def text(self, isa: str) -> str:
        return f"{self.sign} {self.limit(isa):g}"


@dataclass(frozen=True)
class Row:
    name: str
    what: str  # with {n}, {d}, {k}, {m} for the sizes
    target: Target | None  # None: shown for the reader, promised to nobody
    shape: Shape
    contenders: Contenders
    numerator: str
    denominator: str
    beside: str | None = None  # a second denominator, shown without a target
    unit: str = "s"
    rounds: int = 7
    bounded_by: str | None = None  # N is doubled for as long as this contender fits into the memory

    def quick(self) -> Row:
        """The row at a size that runs at once, of which no target says anything."""
        rounds = min(self.rounds, QUICK_ROUNDS)
        return replace(self, shape=self.shape.quick(), rounds=rounds, target=None, bounded_by=None)

    def on(self, device: str) -> Row:
        """The row on another device, for which nothing was promised."""
        return replace(self, shape=replace(self.shape, device=device), target=None)

    def title(self, shape: Shape) -> str:
        return self.what.format(**shape.sizes())

    def measure(self) -> tuple[Shape, list[Samples]]:
        """The size that was measured, and the samples of every process that was run."""
        shape = self.shape
        if self.unit == "bytes":
            return shape, [in_fresh_process(_grow, self.contenders, shape)]
        if self.bounded_by:
            shape = largest(self.contenders, self.bounded_by, shape)
            return shape, [in_fresh_process(_time, self.contenders, shape, self.rounds, 1)]
        if shape.n > SMALL:
            calls = 1 if shape.device == "cpu" else CALLS_IN_A_BLOCK  # a GPU needs a millisecond for these
            return shape, [_time(self.contenders, shape, self.rounds, calls)]
        return shape, [
            in_fresh_process(_time, self.contenders, shape, self.rounds, CALLS_IN_A_BLOCK)
            for _ in range(FRESH_PROCESSES)
        ]

    def value(self, processes: list[Samples]) -> float:
        return ratio(processes, self.numerator, self.denominator)

    def value_beside(self, processes: list[Samples]) -> float | None:
        return ratio(processes, self.numerator, self.beside) if self.beside else None


def product_row(
    name: str, what: str, target: Target | None, shape: Shape, contenders: Contenders, rounds: int = 7
) -> Row:
    """Ours in units of the bare product of all pairs; `peers.products` are the other contenders."""
    return Row(name, what, target, shape, contenders, "ours", "torch.mm", "torch.mm out=", rounds=rounds)


def memory_row(name: str, what: str, bound: float, shape: Shape, contenders: Contenders) -> Row:
    """What the only contender takes at its worst moment, in units of the batch."""
    return Row(name, what, Target(bound), shape, contenders, "growth", "emb", unit="bytes")


def largest(contenders: Contenders, name: str, shape: Shape) -> Shape:
    """`shape` with its N doubled as often as the contender `name` survives it."""
    growth = 0
    # Pairs, and triplets at a fixed K, grow with the square of N: twice the N takes four times the memory.
    # What is sure to fail is not tried, since it would take minutes and all the memory there is.
    while 3 * growth <= free_memory():
        twice = replace(shape, n=2 * shape.n)
        try:
            growth = in_fresh_process(_survive, contenders, name, twice)
        except (MemoryError, RuntimeError) as error:  # a killed process is a RuntimeError too
            reason = str(error).partition("\n")[0] or type(error).__name__
            print(f"{name} does not survive N={twice.n}: {reason}", flush=True)
            return shape
        shape = twice
    free, taken = free_memory() / 2**30, growth / 2**30
    print(f"{name} takes {taken:.1f} GiB at N={shape.n}; for more N, {free:.1f} GiB are too few", flush=True)
    return shape


def _survive(contenders: Contenders, name: str, shape: Shape) -> int:
    """What it took, in bytes."""
    torch.set_num_threads(THREADS)
    call = contenders(shape)[name]
    limit_memory()
    return peak_growth(call)


def _time(contenders: Contenders, shape: Shape, rounds: int, calls: int) -> Samples:
    torch.set_num_threads(THREADS)
    return take_turns(contenders(shape), rounds, calls, shape.device)


def _grow(contenders: Contenders, shape: Shape) -> Samples:
    torch.set_num_threads(THREADS)
    for call in contenders(Shape(n=64, device=shape.device)).values():
        call()  # threads, libraries and autograd's own memory are there before anything is measured
    (call,) = contenders(shape).values()
    embeddings = shape.n * shape.d * torch.float32.itemsize
    grown = peak_growth_of_gpu(call) if shape.device == "cuda" else peak_growth(call)
    return {"growth": [float(grown)], "emb": [float(embeddings)]}


def assert_agree(found: Tensor, expected: Tensor, *leaves: Tensor) -> None:
    """Raise `AssertionError` unless both are the same loss with the same gradients: wrong is not fast."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    gradients = zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True)
    for ours, theirs in gradients:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
