"""Few rows whose distances are worked out on paper, the oracle's losses of them, and those of peers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from pytorch_metric_learning.distances import LpDistance
from torch import Tensor

from tests.support.backends import Backend
from tests.support.batches import Batch
from tests.support.calls import DTYPES
from tests.support.oracle import Truth
from tests.support.tuples import ManyTuples, beta_by_anchor, beta_of, check_tuples
from tripletops import reference
from tripletops._words import REDUCTION

# Five points on a line. Distances of each anchor to its positives | to its negatives, by row:
#   0 at 0.0:  1 → 1,   2 → 3    |  3 → 2.5,  4 → 7
#   1 at 1.0:  0 → 1,   2 → 2    |  3 → 1.5,  4 → 6
#   2 at 3.0:  0 → 3,   1 → 2    |  3 → 0.5,  4 → 4
#   3 at 2.5:  4 → 4.5           |  0 → 2.5,  1 → 1.5,  2 → 0.5
#   4 at 7.0:  3 → 4.5           |  0 → 7,    1 → 6,    2 → 4
LINE = torch.tensor([[0.0], [1.0], [3.0], [2.5], [7.0]], dtype=torch.float64)
LINE_LABELS = torch.tensor([8, 8, 8, -3, -3])

# Directions a = (1, 0), b = (.6, .8), c = (0, 1), d = (−1, 0), e = (−.6, .8) of any length. S by anchor:
#   a:  b .6, d −1   |  c 0,  e −.6
#   b:  a .6, d −.6  |  c .8, e .28
#   c:  e .8         |  a 0,  b .8, d 0
#   d:  a −1, b −.6  |  c 0,  e .6
#   e:  c .8         |  a −.6, b .28, d .6
COMPASS = torch.tensor([[1, 0], [3, 4], [0, 2], [-5, 0], [-6, 8]], dtype=torch.float64)
COMPASS_LABELS = torch.tensor([0, 0, 1, 0, 1])

# Directions a = (1, 0), b = (0, 1), c = (−1, 0), d = b, e = c of any length. S by anchor:
#   a:  b 0, e −1  |  c −1, d 0
#   b:  a 0, e 0   |  c 0,  d 1
#   c:  d 0        |  a −1, b 0, e 1
#   d:  c 0        |  a 0,  b 1, e 0
#   e:  a −1, b 0  |  c 1,  d 0
AXES = torch.tensor([[1, 0], [0, 1], [-3, 0], [0, 2], [-2, 0]], dtype=torch.float64)
AXES_LABELS = torch.tensor([0, 0, 1, 1, 0])


def tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def same(actual: Tensor, expected: object, tolerance: float = 1e-14) -> bool:
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    return torch.allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    inputs = tuple(each.detach().clone().requires_grad_() for each in inputs)
    loss = function(*inputs)
    return loss.detach(), list(torch.autograd.grad(loss.sum(), inputs))


def random_rows(count: int, width: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    emb = torch.randn(count, width, dtype=torch.float64, generator=generator)
    return emb, torch.arange(count)[torch.randperm(count, generator=generator)] % classes


def plain_loss(call: ManyTuples, emb: Tensor, labels: Tensor, **options: object) -> Tensor:
    """The oracle's loss of a call."""
    learned = []
    if call.beta is not None:
        beta = beta_of(call, torch.float64 if emb.dtype == torch.float64 else torch.float32)
        learned = [beta_by_anchor(Batch(emb, labels), beta)]
    result = getattr(reference, call.function)(emb, labels, *learned, **call.given, **options)
    return result[0] if isinstance(result, tuple) else result


# By brute force.


def distance_of(x: Tensor, y: Tensor, distance: str) -> float:
    if distance == "cosine":
        return 1 - (x @ y / (x.norm() * y.norm())).item()
    square = (x - y).square().sum().item()
    return square if distance == "sqeuclidean" else math.sqrt(square)


def distances_of(emb: Tensor, labels: Tensor, distance: str) -> list[tuple[list[float], list[float]]]:
    """Of every anchor the distances of its positives and of its negatives."""
    every = range(len(emb))
    return [
        (
            [distance_of(emb[a], emb[c], distance) for c in every if labels[c] == labels[a] and c != a],
            [distance_of(emb[a], emb[c], distance) for c in every if labels[c] != labels[a]],
        )
        for a in every
    ]


def reductions_of(terms: list[list[float]]) -> dict[str, object]:
    flat = [term for of_anchor in terms for term in of_anchor]
    return {
        "none": [sum(of_anchor) for of_anchor in terms],
        "sum": sum(flat),
        "mean": sum(flat) / len(flat),
        "mean_nonzero": sum(flat) / max(sum(term > 0 for term in flat), 1),
    }


RANDOM_ROWS = {
    "random": random_rows(13, 3, 4),
    "another": random_rows(12, 2, 3, seed=1),
    "with a lonely row": random_rows(11, 5, 6, seed=2),
}


# Against pytorch-metric-learning.


def check_peer(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *inputs: Tensor, tolerance: float = 1e-11
) -> None:
    loss, gradients = with_gradients(ours, *inputs)
    expected, expected_gradients = with_gradients(theirs, *inputs)
    assert loss > 0
    assert same(loss, expected, tolerance)
    for gradient, peer in zip(gradients, expected_gradients, strict=True):
        assert gradient.any()
        assert same(gradient, peer, tolerance)


def plain_distance() -> LpDistance:
    return LpDistance(normalize_embeddings=False)


def check_anchors_without_negatives(backend: Backend, calls: dict[str, ManyTuples]) -> None:
    """The only negative of anchors 0 and 1 is left out as if it were themselves; others keep theirs."""
    emb, _ = random_rows(6, 4, 2, seed=3)
    batch = Batch(
        emb, torch.zeros(6, dtype=torch.int64), emb.roll(1, 0) + 0.1, torch.tensor([0, 0, 0, 1, 0, 0])
    )
    batch = replace(batch, self_index=torch.tensor([3, 3, 0, -1, 2, -1]))
    for turn, dtype in enumerate(DTYPES):
        truth = Truth(batch.to(dtype), "cosine")
        assert truth.negatives.any(1).tolist() == [False, False, True, True, True, True]
        for call in calls.values():
            check_tuples(truth, call, *backend.some(REDUCTION.names, turn))
