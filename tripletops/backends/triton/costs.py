"""What the negatives of an anchor cost, all of them: consumers of the walk, and their slopes for `stream`.

The slope of a cost is a device function too: slope(given, at, stride, ranks, distance, negatives) → minus the
derivative of what anchors pay by the distances of a tile. `at` are their positions; what an anchor is given
for each of its `ranks` lies `stride` apart.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tripletops.backends.triton.device import logistic, softplus
from tripletops.backends.triton.rows import Rows
from tripletops.backends.triton.tiles import RANKS as CARRIED
from tripletops.backends.triton.walk import (
    DISTANCES,
    Consumer,
    Keeper,
    of_rank,
    of_ranks,
    of_split,
    padded_ranks,
    walk,
)


class Cost(NamedTuple):
    """A cost to be differentiated."""

    slope: Any  # a device function
    given: tuple[Tensor, ...]
    ranks: int = 1


# For each threshold t of an anchor: Σ [t − d]₊ and how many terms are above 0, or Σ softplus(t − d) and its
# slope. A threshold of −∞ is none.


class Thresholds(NamedTuple):
    threshold: Tensor  # (ranks, L)


class Sums(NamedTuple):
    """(splits, ranks, L) float64."""

    loss: Tensor
    slope: Tensor


@triton.jit
def _start_sums(given, anchors, KIND: tl.constexpr, RANKS: tl.constexpr):
    shape: tl.constexpr = (anchors.position.shape[0], RANKS)
    return tl.zeros(shape, tl.float64), tl.zeros(shape, tl.float64)


@triton.jit
def _add_rank(state, term, weight, counts, k, RANKS: tl.constexpr):
    total, slope = state
    columns: tl.constexpr = term.shape[1]
    here = (tl.arange(0, RANKS) == k)[None, :]
    mean = tl.sum(tl.where(counts, term * (1.0 / columns), 0.0), 1)  # their sum may leave the type
    total += tl.where(here, (mean.to(tl.float64) * columns)[:, None], 0.0)
    slope += tl.where(here, tl.sum(tl.where(counts, weight, 0.0), 1).to(tl.float64)[:, None], 0.0)
    return total, slope


@triton.jit
def _take_hinge(state, given, anchors, candidates, RANKS: tl.constexpr):
    for k in range(RANKS):
        threshold = tl.load(given.threshold + of_rank(anchors, k, RANKS))
        z = threshold[:, None] - candidates.value
        counts = candidates.eligible & (z > 0)
        state = _add_rank(state, z, counts.to(z.dtype), counts, k, RANKS)
    return state


@triton.jit
def _take_softplus(state, given, anchors, candidates, RANKS: tl.constexpr):
    for k in range(RANKS):
        threshold = tl.load(given.threshold + of_rank(anchors, k, RANKS))
        counts = candidates.eligible & (threshold > -float("inf"))[:, None]
        z = tl.where(counts, threshold[:, None] - candidates.value, 0.0)
        state = _add_rank(state, softplus(z), logistic(z), counts, k, RANKS)
    return state


@triton.jit
def _store_sums(state, out, anchors, RANKS: tl.constexpr):
    total, slope = state
    at = of_ranks(anchors, RANKS)
    tl.store(out.loss + at, total)
    tl.store(out.slope + at, slope)


@triton.jit
def hinge_slope(given, at, stride, ranks, distance, negatives):
    slope = tl.zeros_like(distance)
    for k in range(ranks):
        slope += (tl.load(given.threshold + at + k * stride) - distance > 0).to(distance.dtype)
    return slope


@triton.jit
def softplus_slope(given, at, stride, ranks, distance, negatives):
    slope = tl.zeros_like(distance)
    for k in range(ranks):
        slope += logistic(tl.load(given.threshold + at + k * stride) - distance)
    return slope


_HINGE = Consumer(_start_sums, _take_hinge, _store_sums)
_SOFTPLUS = Consumer(_start_sums, _take_softplus, _store_sums)


def add_thresholds(rows: Rows, thresholds: Tensor, soft: bool) -> tuple[Tensor, Tensor]:
    """(ranks, L) float64: what all negatives cost at each of the (ranks, L) thresholds, and the slopes."""
    carried = 1 if len(thresholds) == 1 else CARRIED
    padded, chunks = padded_ranks(thresholds, carried, -torch.inf)

    def out(splits: int) -> Sums:
        loss = torch.empty((splits, *padded.shape), dtype=torch.float64, device=padded.device)
        return Sums(loss, torch.empty_like(loss))

    keeper = Keeper(_SOFTPLUS if soft else _HINGE, Thresholds(padded), out)
    _, sums = walk(rows, "cost", DISTANCES, negatives=keeper, ranks=carried, chunks=chunks)
    return sums.loss.sum(0)[: len(thresholds)], sums.slope.sum(0)[: len(thresholds)]


def threshold_cost(thresholds: Tensor, soft: bool = False) -> Cost:
    return Cost(softplus_slope if soft else hinge_slope, Thresholds(thresholds), len(thresholds))


# A log-sum-exp over the negatives within an anchor's limit.


class Exponents(NamedTuple):
    limit: Tensor  # (L,)
    rate: Tensor  # () float64


class LogSums(NamedTuple):
    """(splits, L), of the negatives within the limit: the nearest, infinite for none, and Σ
    e^(rate·(nearest − d))."""

    nearest: Tensor
    total: Tensor


class Weighed(NamedTuple):
    limit: Tensor
    nearest: Tensor
    log_sum: Tensor  # what the exponents rate·(nearest − d) are reduced by
    rate: Tensor


@triton.jit
def _start_exponentials(given, anchors, KIND: tl.constexpr, RANKS: tl.constexpr):
    shape: tl.constexpr = anchors.position.shape
    return tl.full(shape, float("inf"), KIND), tl.zeros(shape, tl.float64)


@triton.jit
def _take_exponentials(state, given, anchors, candidates, RANKS: tl.constexpr):
    best, total = state
    values, rate = candidates.value, tl.load(given.rate).to(candidates.value.dtype)
    kept = candidates.eligible & (values < tl.load(given.limit + anchors.position)[:, None])
    nearer = tl.minimum(best, tl.min(tl.where(kept, values, float("inf")), 1))
    base = tl.where(nearer < float("inf"), nearer, 0.0)
    terms = tl.exp(tl.where(kept, rate * (base[:, None] - values), 0.0))
    shrink = tl.exp(rate * (base - tl.where(best < float("inf"), best, base)))
    return nearer, total * shrink + tl.sum(tl.where(kept, terms, 0.0), 1)


@triton.jit
def _store_exponentials(state, out, anchors, RANKS: tl.constexpr):
    best, total = state
    at = of_split(anchors)
    tl.store(out.nearest + at, best)
    tl.store(out.total + at, total)


@triton.jit
def exponential_slope(given, at, stride, ranks, distance, negatives):
    rate = tl.load(given.rate).to(distance.dtype)
    kept = negatives & (distance < tl.load(given.limit + at))
    exponent = rate * (tl.load(given.nearest + at) - distance) - tl.load(given.log_sum + at)
    return tl.where(kept, tl.exp(tl.where(kept, exponent, 0.0)), 0.0)


_EXPONENTIAL = Consumer(_start_exponentials, _take_exponentials, _store_exponentials)


def add_exponentials(rows: Rows, limit: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """(L,) the nearest negative within the limit, infinite for none, and Σ e^(rate·(nearest − d)) over all of
    them."""

    def out(splits: int) -> LogSums:
        shape = (splits, len(limit))
        return LogSums(
            torch.empty(shape, dtype=rows.kind, device=limit.device),
            torch.empty(shape, dtype=torch.float64, device=limit.device),
        )

    _, sums = walk(rows, "similarity", DISTANCES, negatives=Keeper(_EXPONENTIAL, Exponents(limit, rate), out))
    least = sums.nearest.amin(0)
    apart = (least - sums.nearest).double().where(sums.nearest < torch.inf, 0)
    return least, (sums.total * (rate * apart).exp()).sum(0)


def exponential_cost(limit: Tensor, nearest: Tensor, log_sum: Tensor, rate: Tensor) -> Cost:
    return Cost(exponential_slope, Weighed(limit, nearest, log_sum, rate))
