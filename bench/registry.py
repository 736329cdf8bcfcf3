"""The rows of the core table: what each one compares, at which size, and what it has to reach.

Unless a row says otherwise: forward and backward, float32, D=128, labels sorted with K=4 rows per class,
normally distributed embeddings, euclidean distance, hinge with the default margin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor

import tripletops as T
from bench import peers
from bench.measure import THREADS, Call, Samples, in_fresh_process, peak_growth, ratio, step, take_turns
from tripletops import reference

FRESH_PROCESSES = 5
CALLS_IN_A_BLOCK = 20
SMALL = 512  # up to this many anchors a call is too short to be timed alone, and depends on its process

RULES = {
    "HPHN": ("hard", "hard"),
    "EPHN": ("easy", "hard"),
    "EPSHN": ("easy", "semihard"),
    "EPEN": ("easy", "easy"),
}


@dataclass(frozen=True)
class Shape:
    n: int
    d: int = 128
    k: int = 4
    m: int = 0  # rows of the memory; 0: the batch mines itself

    def quick(self) -> Shape:
        """A size that runs at once, to see that everything works."""
        return replace(
            self,
            n=self.n if self.n <= SMALL else max(SMALL, self.n // 8),
            k=self.k if self.k <= 4 else self.k // 8,
            m=self.m // 8,
        )


Contenders = Callable[[Shape], dict[str, Call]]


@dataclass(frozen=True)
class Target:
    bound: float
    avx512: float | None = None  # where the wider registers have to reach more
    at_least: bool = False

    def limit(self, isa: str) -> float:
        return self.avx512 if self.avx512 is not None and isa == "avx512" else self.bound

    def met(self, value: float, isa: str) -> bool:
        return value >= self.limit(isa) if self.at_least else value <= self.limit(isa)

    def text(self, isa: str) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit(isa):g}"


@dataclass(frozen=True)
class Row:
    name: str
    what: str  # with {n}, {d}, {k}, {m} for the sizes
    target: Target
    shape: Shape
    contenders: Contenders
    numerator: str
    denominator: str
    beside: str | None = None  # a second denominator, shown without a target
    unit: str = "s"
    rounds: int = 7

    def title(self, shape: Shape) -> str:
        return self.what.format(**asdict(shape))

    def measure(self, shape: Shape, rounds: int) -> list[Samples]:
        """The samples of every process that was run."""
        if self.unit == "bytes":
            return [in_fresh_process(_grow, self.contenders, shape)]
        if shape.n > SMALL:
            return [_time(self.contenders, shape, rounds, 1)]
        return [
            in_fresh_process(_time, self.contenders, shape, rounds, CALLS_IN_A_BLOCK)
            for _ in range(FRESH_PROCESSES)
        ]

    def value(self, processes: list[Samples]) -> float:
        return ratio(processes, self.numerator, self.denominator)

    def value_beside(self, processes: list[Samples]) -> float | None:
        return ratio(processes, self.numerator, self.beside) if self.beside else None


def _time(contenders: Contenders, shape: Shape, rounds: int, calls: int) -> Samples:
    torch.set_num_threads(THREADS)
    return take_turns(contenders(shape), rounds, calls)


def _grow(contenders: Contenders, shape: Shape) -> Samples:
    torch.set_num_threads(THREADS)
    for call in contenders(Shape(n=64)).values():
        call()  # threads, libraries and autograd's own memory are there before anything is measured
    (call,) = contenders(shape).values()
    embeddings = shape.n * shape.d * torch.float32.itemsize
    return {"growth": [float(peak_growth(call))], "emb": [float(embeddings)]}


def embeddings(n: int, d: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(n + d)
    return torch.randn(n, d, generator=generator).to(dtype).requires_grad_()


def sorted_labels(n: int, k: int) -> Tensor:
    return torch.arange(n) // k


def _ours(emb: Tensor, labels: Tensor, rule: str = "HPHN") -> Call:
    positive, negative = RULES[rule]
    return step(lambda: T.triplet_loss(emb, labels, positive=positive, negative=negative), emb)


def against_product(shape: Shape) -> dict[str, Call]:
    emb, labels = embeddings(shape.n, shape.d), sorted_labels(shape.n, shape.k)
    rows = emb.detach()
    return {"ours": _ours(emb, labels)} | _products(rows, rows)


def against_naive(shape: Shape) -> dict[str, Call]:
    emb, labels = embeddings(shape.n, shape.d), sorted_labels(shape.n, shape.k)
    return {
        "naive": step(lambda: peers.naive_batch_hard(emb, labels), emb),
        "ours": _ours(emb, labels),
    }


def against_memory(shape: Shape) -> dict[str, Call]:
    emb, labels = embeddings(shape.n, shape.d), sorted_labels(shape.n, shape.k)
    memory = embeddings(shape.m, shape.d).detach()
    memory_labels = sorted_labels(shape.m, shape.k)
    ours = step(lambda: T.batch_hard_loss(emb, labels, ref_emb=memory, ref_labels=memory_labels), emb)
    return {"ours": ours} | _products(emb.detach(), memory)


def _products(rows: Tensor, columns: Tensor) -> dict[str, Call]:
    out = torch.empty(len(rows), len(columns))
    return {
        "torch.mm": partial(peers.matrix_product, rows, columns),
        "torch.mm out=": partial(peers.matrix_product_into, out, rows, columns),
    }


def rule_against_batch_hard(rule: str, shape: Shape) -> dict[str, Call]:
    emb, labels = embeddings(shape.n, shape.d), sorted_labels(shape.n, shape.k)
    return {rule: _ours(emb, labels, rule), "batch-hard": _ours(emb, labels)}


def shuffled_against_sorted(shape: Shape) -> dict[str, Call]:
    emb, labels = embeddings(shape.n, shape.d), sorted_labels(shape.n, shape.k)
    order = torch.randperm(shape.n, generator=torch.Generator().manual_seed(0))
    return {"shuffled": _ours(emb, labels[order]), "sorted": _ours(emb, labels)}


def equal_against_random(shape: Shape) -> dict[str, Call]:
    emb, labels = embeddings(shape.n, shape.d), sorted_labels(shape.n, shape.k)
    equal = emb.detach()[:1].repeat(shape.n, 1).requires_grad_()
    return {"equal": _ours(equal, labels), "random": _ours(emb, labels)}


def bfloat16_against_float32(shape: Shape) -> dict[str, Call]:
    labels = sorted_labels(shape.n, shape.k)
    half = embeddings(shape.n, shape.d, torch.bfloat16)
    return {"bfloat16": _ours(half, labels), "float32": _ours(embeddings(shape.n, shape.d), labels)}


def twice_against_once(shape: Shape) -> dict[str, Call]:
    return {
        name: _ours(embeddings(n, shape.d), sorted_labels(n, shape.k))
        for name, n in (("2N", 2 * shape.n), ("N", shape.n))
    }


def alone(shape: Shape) -> dict[str, Call]:
    return {"ours": _ours(embeddings(shape.n, shape.d), sorted_labels(shape.n, shape.k))}


def _rules(shape: Shape, bound: float) -> list[Row]:
    return [
        Row(
            f"{rule.lower()}-k{shape.k}",
            f"{rule} ÷ batch-hard, N={{n}}, K={{k}}",
            Target(bound),
            shape,
            partial(rule_against_batch_hard, rule),
            rule,
            "batch-hard",
        )
        for rule in ("EPHN", "EPSHN", "EPEN")
    ]


def _pair(name: str, what: str, contenders: Contenders, first: str, second: str) -> Row:
    return Row(name, f"{what}, N={{n}}", Target(1.1), Shape(8192), contenders, first, second)


def _product(name: str, what: str, target: Target, shape: Shape, rounds: int = 7) -> Row:
    contenders = against_memory if shape.m else against_product
    return Row(name, what, target, shape, contenders, "ours", "torch.mm", "torch.mm out=", rounds=rounds)


CORE = [
    _product("mm-d128", "batch-hard ÷ torch.mm, N={n}, D={d}", Target(0.5, avx512=0.3), Shape(8192)),
    _product("mm-d512", "batch-hard ÷ torch.mm, N={n}, D={d}", Target(0.7, avx512=0.5), Shape(8192, d=512)),
    Row(
        "naive-n8192",
        "naive PyTorch ÷ ours, N={n}, D={d}",
        Target(30, at_least=True),
        Shape(8192),
        against_naive,
        "naive",
        "ours",
        rounds=5,
    ),
    Row(
        "naive-n128",
        "naive PyTorch ÷ ours, N={n}, D={d}",
        Target(4, at_least=True),
        Shape(128),
        against_naive,
        "naive",
        "ours",
        rounds=15,
    ),
    *_rules(Shape(8192), 1.15),
    *_rules(Shape(8192, k=1024), 1.5),
    _pair("shuffled", "shuffled ÷ sorted labels", shuffled_against_sorted, "shuffled", "sorted"),
    _pair("equal", "all rows equal ÷ random rows", equal_against_random, "equal", "random"),
    _pair("bfloat16", "bfloat16 ÷ float32", bfloat16_against_float32, "bfloat16", "float32"),
    _product(
        "memory-m65536",
        "N={n} against a memory of M={m}: ours ÷ torch.mm",
        Target(0.8),
        Shape(256, m=65536),
        rounds=3,
    ),
    Row(
        "peak-memory",
        "peak memory growth ÷ bytes of emb, N={n}, D={d}",
        Target(6),
        Shape(65536),
        alone,
        "growth",
        "emb",
        unit="bytes",
    ),
    *[
        Row(
            f"double-n{n}",
            "time(2N) ÷ time(N), N={n}",
            Target(4.2),
            Shape(n),
            twice_against_once,
            "2N",
            "N",
            rounds=5,
        )
        for n in (4096, 8192, 16384)
    ],
]


def check() -> None:
    """Raise `AssertionError` unless every rule gives the reference's loss and gradient: wrong is not fast."""
    emb, labels = embeddings(203, 37), sorted_labels(203, 4)
    for positive, negative in RULES.values():
        found = T.triplet_loss(emb, labels, positive=positive, negative=negative)
        expected = reference.triplet_loss(emb, labels, positive=positive, negative=negative)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            torch.autograd.grad(found, emb)[0], torch.autograd.grad(expected, emb)[0], rtol=1e-4, atol=1e-6
        )
