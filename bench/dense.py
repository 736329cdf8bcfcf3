"""The dense table: objectives over every pair or triplet, and those with distance-weighted negatives.

Unless a row says otherwise: forward and backward, float32, D=128, labels sorted with K=4 rows per class,
normally distributed embeddings, euclidean distance and the default margins. The contrastive loss is that of
the cosine distance: between such rows it is about 1, so that the margin of 1 is active for half of the pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import tripletops as T
from bench import peers
from bench.batches import clusters, embeddings, equal_rows, sorted_labels, tight_clusters
from bench.measure import Call, step
from bench.registry import Row, Shape, Target, assert_agree, memory_row, product_row

METRIC_LEARNING = "pytorch-metric-learning"


class BatchLoss(NamedTuple):
    """A loss of one batch, and the tensors that receive gradients."""

    loss: Callable[..., Tensor]  # takes a backend
    leaves: tuple[Tensor, ...]


def of_embeddings(function: str, **options: str) -> Callable[[Tensor, Tensor], BatchLoss]:
    """By name: `bench builds` also runs these tables with an older tripletops, which may lack a function."""
    return lambda emb, labels: BatchLoss(partial(getattr(T, function), emb, labels, **options), (emb,))


def beta_margin(emb: Tensor, labels: Tensor) -> BatchLoss:
    beta = torch.tensor(1.2, requires_grad=True)
    # With a fixed seed, every call and every backend has the same picks.
    loss = partial(T.beta_margin_loss, emb, labels, beta, positive="random", negative="distance", seed=0)
    return BatchLoss(loss, (emb, beta))


OBJECTIVES: dict[str, Callable[[Tensor, Tensor], BatchLoss]] = {
    "batch-all": of_embeddings("batch_all_loss"),
    "batch-all soft margin": of_embeddings("batch_all_loss", loss="soft_margin"),
    "semi-hard": of_embeddings("semi_hard_loss"),
    "multi-similarity": of_embeddings("multi_similarity_loss"),
    "supcon": of_embeddings("supcon_loss"),
    "info-nce": of_embeddings("info_nce_loss"),
    "contrastive": of_embeddings("contrastive_loss", distance="cosine"),
    "beta-margin": beta_margin,
}

# The same objectives by pytorch-metric-learning.
OTHERS: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "batch-all": peers.metric_learning_batch_all,
    "multi-similarity": peers.metric_learning_multi_similarity,
    "supcon": peers.metric_learning_supcon,
    "info-nce": peers.metric_learning_info_nce,
}


def _ours(objective: str, emb: Tensor, labels: Tensor) -> Call:
    loss, leaves = OBJECTIVES[objective](emb, labels)
    return step(loss, *leaves)


def alone(objective: str, shape: Shape) -> dict[str, Call]:
    return {"ours": _ours(objective, embeddings(shape.n, shape.d), sorted_labels(shape.n, shape.k))}


def against_product(objective: str, shape: Shape) -> dict[str, Call]:
    rows = embeddings(shape.n, shape.d).detach()
    return alone(objective, shape) | peers.products(rows, rows)


def against_metric_learning(objective: str, shape: Shape) -> dict[str, Call]:
    emb, labels = embeddings(shape.n, shape.d), sorted_labels(shape.n, shape.k)
    other = OTHERS[objective]()
    return {METRIC_LEARNING: step(lambda: other(emb, labels), emb)} | alone(objective, shape)


def clusters_against_random(shape: Shape) -> dict[str, Call]:
    labels = sorted_labels(shape.n, shape.k)
    return {
        "clusters": _ours("batch-all", clusters(shape.n, shape.d, shape.k), labels),
        "random": _ours("batch-all", embeddings(shape.n, shape.d), labels),
    }


CLOSE: dict[str, Callable[[int, int], Tensor]] = {
    "equal rows": equal_rows,
    "4 tight clusters": partial(tight_clusters, count=4),
}


def close_against_random(rows: str, distance: str, shape: Shape) -> dict[str, Call]:
    labels = sorted_labels(shape.n, shape.k)
    batches = {rows: CLOSE[rows](shape.n, shape.d), "random": embeddings(shape.n, shape.d)}
    loss = partial(T.batch_all_loss, distance=distance)
    return {name: step(partial(loss, emb, labels), emb) for name, emb in batches.items()}


def _name(objective: str) -> str:
    return objective.replace(" ", "-")


def _product(objective: str, target: Target | None, k: int = 4) -> Row:
    name = _name(objective) if k == 4 else f"{_name(objective)}-k{k}"
    what = f"{objective} ÷ torch.mm, N={{n}}, K={{k}}"
    return product_row(name, what, target, Shape(8192, k=k), partial(against_product, objective))


def _peak(objective: str) -> Row:
    what = f"{objective}: peak growth ÷ bytes of emb, N={{n}}"
    return memory_row(f"memory-{_name(objective)}", what, 10, Shape(32768), partial(alone, objective))


def _peak_of_two_classes(objective: str) -> Row:
    what = f"{objective}, 2 classes: peak growth ÷ bytes of emb, N={{n}}, D={{d}}"
    shape = Shape(8192, d=32, k=4096)
    return memory_row(f"memory-{_name(objective)}-2-classes", what, 24, shape, partial(alone, objective))


def _close(rows: str, distance: str) -> Row:
    return Row(
        f"{_name(rows)}-{distance}",
        f"batch-all, {distance}: {rows} ÷ random rows, N={{n}}",
        None,
        Shape(4096),
        partial(close_against_random, rows, distance),
        rows,
        "random",
    )


def _metric_learning(
    objective: str, target: Target | None, shape: Shape, rounds: int, bounded_by: str | None = None
) -> Row:
    return Row(
        f"metric-learning-{objective}",
        f"{objective}: {METRIC_LEARNING} ÷ ours, N={{n}}",
        target,
        shape,
        partial(against_metric_learning, objective),
        METRIC_LEARNING,
        "ours",
        rounds=rounds,
        bounded_by=bounded_by,
    )


ROWS = [
    _product("semi-hard", Target(0.6)),
    _product("batch-all", Target(1.1)),
    _product("batch-all", Target(5), k=1024),
    _product("batch-all soft margin", Target(2)),
    _product("multi-similarity", Target(1.2)),
    _product("supcon", Target(1.2)),
    _product("info-nce", Target(2.0)),
    _product("beta-margin", Target(1.2)),
    Row(
        "clusters",
        "batch-all: separated clusters ÷ random rows, N={n}",
        Target(0.8, sign="<"),
        Shape(8192),
        clusters_against_random,
        "clusters",
        "random",
    ),
    *[_close(rows, distance) for rows in CLOSE for distance in ("euclidean", "cosine")],
    *[_peak(objective) for objective in OBJECTIVES],
    *[_peak_of_two_classes(objective) for objective in ("batch-all", "semi-hard")],
    _metric_learning("batch-all", Target(50, sign="≥"), Shape(2048), rounds=3, bounded_by=METRIC_LEARNING),
    _product("contrastive", None),
    _metric_learning("multi-similarity", None, Shape(2048), rounds=5),
]


def check() -> None:
    """Raise `AssertionError` unless every objective gives the reference's loss and gradients, and the peers
    the same as ours."""
    emb, labels = embeddings(204, 37), sorted_labels(204, 4)
    for name, objective in OBJECTIVES.items():
        loss, leaves = objective(emb, labels)
        assert_agree(loss(), loss(backend="reference"), *leaves)
        if name in OTHERS:
            assert_agree(loss(), OTHERS[name]()(emb, labels), *leaves)
