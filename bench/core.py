"""The core table: one triplet per anchor, on the CPU, and the same on a GPU, where it has more rivals.

Unless a row says otherwise: forward and backward, float32, D=128, labels sorted with K=4 rows per class,
normally distributed embeddings, euclidean distance, hinge with the default margin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import tripletops as T
from bench import peers
from bench.batches import embeddings, sorted_labels
from bench.measure import Call, step
from bench.registry import SMALL, Contenders, Row, Shape, Target, assert_agree, memory_row, product_row
from tripletops import reference

RULES = {
    "HPHN": ("hard", "hard"),
    "EPHN": ("easy", "hard"),
    "EPSHN": ("easy", "semihard"),
    "EPEN": ("easy", "easy"),
}


# Other implementations of batch-hard: a title, and a function that makes the loss function.
PEERS: dict[str, tuple[str, Callable[[], Callable[[Tensor, Tensor], Tensor] | None]]] = {
    "naive": ("naive PyTorch", lambda: peers.naive_batch_hard),
    "compile": ("naive PyTorch by torch.compile", peers.compiled_batch_hard),
    "metric-learning": ("pytorch-metric-learning", peers.metric_learning_batch_hard),
}


def _batch(shape: Shape, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    emb = embeddings(shape.n, shape.d, dtype, shape.device)
    return emb, sorted_labels(shape.n, shape.k, shape.device)


def _ours(emb: Tensor, labels: Tensor, rule: str = "HPHN") -> Call:
    positive, negative = RULES[rule]
    return step(lambda: T.triplet_loss(emb, labels, positive=positive, negative=negative), emb)


def against_product(shape: Shape) -> dict[str, Call]:
    emb, labels = _batch(shape)
    rows = emb.detach()
    return {"ours": _ours(emb, labels)} | peers.products(rows, rows)


def _batch_hard(peer: str) -> Callable[[Tensor, Tensor], Tensor]:
    title, make = PEERS[peer]
    loss = make()
    assert loss is not None, f"{title} is not installed"
    return loss


def against(peer: str, shape: Shape) -> dict[str, Call]:
    emb, labels = _batch(shape)
    loss = _batch_hard(peer)
    return {peer: step(lambda: loss(emb, labels), emb), "ours": _ours(emb, labels)}


def against_memory(shape: Shape) -> dict[str, Call]:
    emb, labels = _batch(shape)
    memory, memory_labels = _batch(replace(shape, n=shape.m))
    memory.requires_grad_(False)
    ours = step(lambda: T.batch_hard_loss(emb, labels, ref_emb=memory, ref_labels=memory_labels), emb)
    return {"ours": ours} | peers.products(emb.detach(), memory)


def rule_against_batch_hard(rule: str, shape: Shape) -> dict[str, Call]:
    emb, labels = _batch(shape)
    return {rule: _ours(emb, labels, rule), "batch-hard": _ours(emb, labels)}


def shuffled_against_sorted(shape: Shape) -> dict[str, Call]:
    emb, labels = _batch(shape)
    order = torch.randperm(shape.n, generator=torch.Generator().manual_seed(0)).to(shape.device)
    return {"shuffled": _ours(emb, labels[order]), "sorted": _ours(emb, labels)}


def equal_against_random(shape: Shape) -> dict[str, Call]:
    emb, labels = _batch(shape)
    equal = emb.detach()[:1].repeat(shape.n, 1).requires_grad_()
    return {"equal": _ours(equal, labels), "random": _ours(emb, labels)}


def bfloat16_against_float32(shape: Shape) -> dict[str, Call]:
    return {"bfloat16": _ours(*_batch(shape, torch.bfloat16)), "float32": _ours(*_batch(shape))}


def twice_against_once(shape: Shape) -> dict[str, Call]:
    return {"2N": _ours(*_batch(replace(shape, n=2 * shape.n))), "N": _ours(*_batch(shape))}


def on_threads(count: int, call: Call) -> Call:
    """The call on so many threads, whatever the last one ran on."""

    def run() -> None:
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
        call()

    return run


def two_threads_against_one(shape: Shape) -> dict[str, Call]:
    call = _ours(*_batch(shape))
    return {"two threads": on_threads(2, call), "one": on_threads(1, call)}


def alone(shape: Shape) -> dict[str, Call]:
    return {"ours": _ours(*_batch(shape))}


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


def _two_threads(n: int) -> Row:
    what = "two threads ÷ one, N={n}, D={d}"
    contenders = two_threads_against_one
    return Row(f"threads-n{n}", what, Target(1.03), Shape(n), contenders, "two threads", "one", rounds=15)


def _peer(peer: str, n: int, target: Target | None = None) -> Row:
    title, _ = PEERS[peer]
    what = f"{title} ÷ ours, N={{n}}, D={{d}}"
    rounds = 15 if n <= SMALL else 5
    return Row(f"{peer}-n{n}", what, target, Shape(n), partial(against, peer), peer, "ours", rounds=rounds)


EVERYDAY = (32, 64, 128, 256, 512, 1024)  # the batch sizes of most trainings

COMMON_ROWS = [
    *[
        product_row(
            f"mm-d{d}",
            "batch-hard ÷ torch.mm, N={n}, D={d}",
            target,
            Shape(8192, d=d),
            against_product,
        )
        for d, target in ((128, Target(0.2, avx512vnni=0.12)), (512, Target(0.25, avx512vnni=0.15)))
    ],
    _peer("naive", 8192, Target(30, sign="≥")),
    *[_peer("naive", n, Target(6, sign="≥")) for n in EVERYDAY],
    *_rules(Shape(8192), 1.2),
    *_rules(Shape(8192, k=1024), 1.5),
    _pair("shuffled", "shuffled ÷ sorted labels", shuffled_against_sorted, "shuffled", "sorted"),
    _pair("equal", "all rows equal ÷ random rows", equal_against_random, "equal", "random"),
    _pair("bfloat16", "bfloat16 ÷ float32", bfloat16_against_float32, "bfloat16", "float32"),
    product_row(
        "memory-m65536",
        "N={n} against a memory of M={m}: ours ÷ torch.mm",
        Target(0.3),
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

ROWS = [*COMMON_ROWS, *[_two_threads(n) for n in EVERYDAY]]

ONLY_GPU_ROWS = [_peer(peer, n) for peer in ("compile", "metric-learning") for n in (8192, 128)]
GPU_ROWS = [row.on("cuda") for row in (*COMMON_ROWS, *ONLY_GPU_ROWS)]


def check(device: str = "cpu") -> None:
    """Raise `AssertionError` unless every rule gives the reference's loss and gradient."""
    emb, labels = _batch(Shape(203, d=37, device=device))
    for positive, negative in RULES.values():
        found = T.triplet_loss(emb, labels, positive=positive, negative=negative)
        expected = reference.triplet_loss(emb, labels, positive=positive, negative=negative)
        assert_agree(found, expected, emb)


def check_peers(device: str = "cpu") -> None:
    """Raise `AssertionError` unless batch-hard is the same by everybody."""
    emb, labels = _batch(Shape(204, d=37, device=device))
    for peer in PEERS:
        assert_agree(T.batch_hard_loss(emb, labels), _batch_hard(peer)(emb, labels), emb)


def check_gpu() -> None:
    check("cuda")
    check_peers("cuda")
