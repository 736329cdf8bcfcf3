"""The certified pass against the walk over float32 products, on rows of all kinds: whatever the rows, the
switching rule (docs/certified.md) may make no call slower than the walk by more than 3 %.

Forward alone (`mine`), float32, D=128, sorted labels with K=4 rows per class, euclidean distance.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Generator, Tensor
from torch.nn.functional import normalize

import tripletops as T
from bench.batches import sorted_labels
from bench.measure import Call
from bench.registry import Contenders, Row, Shape, Target
from tripletops import info

Kind = Callable[[Tensor, Generator], Tensor]


def _heavy(x: Tensor, generator: Generator) -> Tensor:
    """One row in a thousand is a hundred times as long."""
    x[torch.randperm(len(x), generator=generator)[: max(4, len(x) // 1000)]] *= 100
    return x


def _one_huge(x: Tensor, generator: Generator) -> Tensor:
    x[len(x) // 2] *= 1e4
    return x


def _low_rank(x: Tensor, generator: Generator) -> Tensor:
    return x[:, :6] @ torch.randn(6, x.shape[1], generator=generator)


def _clusters(count: int, spread: float) -> Kind:
    """Rows of all classes around a few centres."""

    def make(x: Tensor, generator: Generator) -> Tensor:
        centres = normalize(torch.randn(count, x.shape[1], generator=generator))
        around = torch.randint(count, (len(x),), generator=generator)
        return centres[around].add(x, alpha=spread / x.shape[1] ** 0.5)

    return make


def _classes_apart(x: Tensor, generator: Generator) -> Tensor:
    return normalize(
        normalize(x[::4]).repeat_interleave(4, 0)[: len(x)] + 0.1 * x.flip(0) / x.shape[1] ** 0.5
    )


# Out of normally distributed rows.
KINDS: dict[str, Kind] = {
    "random": lambda x, _: x,
    "clustered": _classes_apart,
    "few tight clusters": _clusters(4, 0.01),
    "few wide clusters": _clusters(4, 0.1),
    "low rank": _low_rank,
    "collapsed": lambda x, _: normalize(x[:1]) + 1e-3 * x / x.shape[1] ** 0.5,
    "heavy tails": _heavy,
    "one huge row": _one_huge,
    "sparse": lambda x, _: torch.relu(x - 1.5),
    "all equal": lambda x, _: x[:1].repeat(len(x), 1),
}
RULES = {"batch-hard": ("hard", "hard"), "semi-hard": ("easy", "semihard")}
SIZES = (512, 2048, 4096, 8192)


def batch(kind: str, shape: Shape) -> tuple[Tensor, Tensor]:
    generator = Generator().manual_seed(shape.n + shape.d)
    emb = KINDS[kind](torch.randn(shape.n, shape.d, generator=generator), generator)
    return emb.contiguous(), sorted_labels(shape.n, shape.k)


def against_float32(kind: str, rule: str, shape: Shape) -> dict[str, Call]:
    emb, labels = batch(kind, shape)
    positive, negative = RULES[rule]

    def mine(use: str) -> None:
        with info.using_certified(use):
            T.mine(emb, labels, positive=positive, negative=negative)

    return {"switched": partial(mine, "where it pays"), "float32": partial(mine, "never")}


def _row(kind: str, rule: str, n: int) -> Row:
    contenders: Contenders = partial(against_float32, kind, rule)
    name = f"{kind.replace(' ', '-')}-{rule}-n{n}"
    what = f"{rule}, {kind}: switched ÷ float32, N={{n}}"
    return Row(name, what, Target(1.03), Shape(n), contenders, "switched", "float32", rounds=15)


ROWS = [_row(kind, rule, n) for rule in RULES for kind in KINDS for n in SIZES]


def check() -> None:
    """Raise `AssertionError` unless the picks of both ways are equally far."""
    for kind in KINDS:
        emb, labels = batch(kind, Shape(1024, d=33))
        found = {}
        for use in ("never", "always"):
            with info.using_certified(use):
                found[use] = T.mine(emb, labels, positive="hard", negative="hard")
        for name in ("d_ap", "d_an"):
            ours, theirs = (getattr(found[use], name) for use in ("always", "never"))
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(emb.abs().max()))
