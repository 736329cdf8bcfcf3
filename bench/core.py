"""The core table: one triplet per anchor.

Unless a row says otherwise: forward and backward, float32, D=128, labels sorted with K=4 rows per class,
normally distributed embeddings, euclidean distance, hinge with the default margin.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import tripletops as T
from bench import peers
from bench.batches import embeddings, sorted_labels
from bench.measure import Call, step
from bench.registry import Contenders, Row, Shape, Target, assert_agree, memory_row, product_row
from tripletops import reference

RULES = {
    "HPHN": ("hard", "hard"),
    "EPHN": ("easy", "hard"),
    "EPSHN": ("easy", "semihard"),
    "EPEN": ("easy", "easy"),
}


def _ours(emb: Tensor, labels: Tensor, rule: str = "HPHN") -> Call:
    positive, negative = RULES[rule]
    return step(lambda: T.triplet_loss(emb, labels, positive=positive, negative=negative), emb)


def against_product(shape: Shape) -> dict[str, Call]:
    emb, labels = embeddings(shape.n, shape.d), sorted_labels(shape.n, shape.k)
    rows = emb.detach()
    return {"ours": _ours(emb, labels)} | peers.products(rows, rows)


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
    return {"ours": ours} | peers.products(emb.detach(), memory)


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


ROWS = [
    *[
        product_row(
            f"mm-d{d}",
            "batch-hard ÷ torch.mm, N={n}, D={d}",
            target,
            Shape(8192, d=d),
            against_product,
        )
        for d, target in ((128, Target(0.5, avx512=0.3)), (512, Target(0.7, avx512=0.5)))
    ],
    Row(
        "naive-n8192",
        "naive PyTorch ÷ ours, N={n}, D={d}",
        Target(30, sign="≥"),
        Shape(8192),
        against_naive,
        "naive",
        "ours",
        rounds=5,
    ),
    Row(
        "naive-n128",
        "naive PyTorch ÷ ours, N={n}, D={d}",
        Target(4, sign="≥"),
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
    product_row(
        "memory-m65536",
        "N={n} against a memory of M={m}: ours ÷ torch.mm",
        Target(0.8),
        Shape(256, m=65536),
        against_memory,
        rounds=3,
    ),
    memory_row("peak-memory", "peak memory growth ÷ bytes of emb, N={n}, D={d}", 6, Shape(65536), alone),
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
    """Raise `AssertionError` unless every rule gives the reference's loss and gradient."""
    emb, labels = embeddings(203, 37), sorted_labels(203, 4)
    for positive, negative in RULES.values():
        found = T.triplet_loss(emb, labels, positive=positive, negative=negative)
        expected = reference.triplet_loss(emb, labels, positive=positive, negative=negative)
        assert_agree(found, expected, emb)
