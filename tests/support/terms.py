"""The terms of an objective over many tuples, and how far rounding may move the loss and its gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.calls import cotangent_of
from tests.support.oracle import Truth


class Terms:
    """Terms that share a mean, in float64, and what rounding may do to them."""

    def __init__(self, truth: Truth) -> None:
        anchors, pairs = truth.distance.new_zeros(len(truth.x)), torch.zeros_like(truth.distance)
        self.value, self.off, self.size, self.jump = (anchors.clone() for _ in range(4))
        self.slope, self.wobble = pairs.clone(), pairs.clone()  # by pair, of d; how far the slope may be off
        self.steady: Tensor = torch.zeros(len(truth.x), 1, dtype=torch.bool)  # where no slope can jump
        self.rate = 1.0  # what a weight that may leave the type is multiplied by
        self.condition = torch.ones_like(anchors)  # by how much more an ulp of a distance counts in a slope
        self.count = self.nonzero = 0
        self.flips = 0  # of the nonzero ones, those that may be counted or not
        self.always_nonzero = False  # whether every mean is one over the nonzero terms

    def share(self, reduction: str) -> tuple[float, float]:
        """What a mean divides by, as a factor, and the relative error of it."""
        if reduction in ("sum", "none"):
            return 1.0, 0.0
        count, flips = self.nonzero, self.flips
        if reduction == "mean" and not self.always_nonzero:
            count, flips = self.count, 0
        return 1 / max(count, 1), flips / (count - flips) if flips < count else math.inf if flips else 0.0


@lru_cache(maxsize=4)
def errors_of(truth: Truth) -> Tensor:
    """How far each distance may be off; that of equal rows is 0 exactly."""
    if not truth.distance.numel():
        return truth.distance.clone()
    error = truth.relative * truth.distance + truth.floor(truth.distance)
    equal = (truth.distance == 0) & (torch.cdist(truth.x, truth.y, p=math.inf) == 0)
    return error.where(~equal, 0)


# Objectives of triplets.


def padded(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The columns that are set in each row, first ones first, and which of the entries are such columns."""
    counts = mask.sum(1, keepdim=True)
    widest = int(counts.max())
    order = mask.int().argsort(dim=1, descending=True, stable=True)
    return order[:, :widest], torch.arange(widest) < counts


def triplets_of(truth: Truth) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """All triplets, some anchors at a time: (anchors, positives, negatives, which of either are any)."""
    rows = (truth.positives.any(1) & truth.negatives.any(1)).nonzero()[:, 0]
    while len(rows):
        p, is_positive = padded(truth.positives[rows])
        n, is_negative = padded(truth.negatives[rows])
        some = max(1, 2_000_000 // (p.shape[1] * n.shape[1]))
        yield rows[:some], p[:some], n[:some], is_positive[:some], is_negative[:some]
        rows = rows[some:]


class Triples:
    """Of some anchors: values (anchors, positives, negatives) and what they are made of."""

    def __init__(
        self, truth: Truth, error: Tensor, margin: float, rows: Tensor, p: Tensor, n: Tensor
    ) -> None:
        self.to_p, self.to_n = (rows[:, None], p), (rows[:, None], n)
        self.d_ap, self.d_an = truth.distance[self.to_p][:, :, None], truth.distance[self.to_n][:, None]
        self.off = error[self.to_p][:, :, None] + error[self.to_n][:, None] + truth.relative * margin
        self.z = self.d_ap - self.d_an + margin
        self.size = self.d_ap + self.d_an + margin

    def spread(self, by_pair: Tensor, values: Tensor) -> None:
        """Adds what each pair has a share in."""
        by_pair.index_put_(self.to_p, values.sum(2), accumulate=True)
        by_pair.index_put_(self.to_n, values.sum(1), accumulate=True)


# Objectives of all pairs of an anchor.


class LogSum(NamedTuple):
    """ln Σ e^(−rate·d) over some candidates of each anchor, and what errors of d may do to it."""

    value: Tensor  # (N,), −inf for no candidates
    off: Tensor  # (N,)
    size: Tensor  # (N,), that of the exponents by their weights
    weight: Tensor  # (N, M), minus the derivative by rate·d; they add up to 1
    lowest: Tensor  # (N, M), the least that the weight may be
    highest: Tensor


def log_sum_of(truth: Truth, mask: Tensor, rate: float) -> LogSum:
    d, error = truth.distance, errors_of(truth)
    if not d.numel():
        none = d.new_zeros(len(d))
        return LogSum(none - math.inf, none, none, d, d, d)
    exponent = (-rate * d).where(mask, -math.inf)
    value = exponent.logsumexp(1)
    weight = (exponent - value[:, None]).exp().where(mask, 0)
    largest = error.where(mask, 0).amax(1)
    spread = 2 * rate * largest[:, None]  # a weight is a quotient, of which both parts may be off
    lowest, highest = weight * (-spread).exp(), (weight * spread.exp()).clamp(max=1)
    off = rate * torch.minimum(largest, (highest * error).sum(1))
    return LogSum(value, off, rate * (highest * d).sum(1), weight, lowest, highest)


def nearest_of(truth: Truth, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(N, M) masks: the nearest candidate of each anchor, and those that rounding may make the nearest."""
    d, error = truth.distance, errors_of(truth)
    if not d.numel():
        return mask, mask
    first = d.where(mask, math.inf).argmin(1, keepdim=True)
    nearest = mask & (first == torch.arange(d.shape[1]))
    return nearest, mask & (d <= d.gather(1, first) + error + error.gather(1, first))


# What terms allow.


@lru_cache(maxsize=4)
def lengths_of_slopes(truth: Truth) -> list[tuple[Tensor, Tensor]]:
    """By pair, for x and for y: the norm of the derivative of d, and how far rounding rows may move it."""
    d = truth.distance
    if truth.name != "cosine":
        length = (d > 0).double() if truth.name == "euclidean" else 2 * d.sqrt()
        return 2 * [(length, torch.zeros(()))]
    norms = truth.x.norm(dim=1)[:, None], truth.y.norm(dim=1)[None]
    pulls = (norms[0] > 0) & (norms[1] > 0)
    per_norm = [torch.where(pulls, 1 / norm.where(norm > 0, 1), 0) for norm in norms]
    return [((2 * d).sqrt() * each, truth.unit_error * each) for each in per_norm]


class TupleTolerances:
    """How far the loss, the gradients of rows, and that of what is learned by anchor, may be off."""

    def __init__(self, truth: Truth, groups: list[Terms], reduction: str) -> None:
        size = len(truth.x)
        cotangent = torch.full((size,), 1.5, dtype=torch.float64)
        if reduction == "none":
            cotangent = cotangent_of(cotangent).abs()
        zeros = torch.zeros(size, dtype=torch.float64)
        self.loss, self.loss_size, self.loss_slack = zeros.clone(), zeros.clone(), zeros.clone()
        self.learned, self.learned_pull, self.learned_slack = zeros.clone(), zeros.clone(), zeros.clone()
        sides = (len(truth.x), len(truth.y))
        self.gradient, self.pull, self.slack = (
            [torch.zeros(count, dtype=torch.float64) for count in sides] for _ in range(3)
        )
        self.uncertain = False  # whether the number of terms is
        for terms in groups:
            self._add(truth, terms, cotangent, *terms.share(reduction))
        if truth.batch.ref_emb is None:
            self.gradient, self.pull, self.slack = (
                [part[0] + part[1]] for part in (self.gradient, self.pull, self.slack)
            )
        if reduction != "none":
            self.loss, self.loss_size, self.loss_slack = (
                part.sum() for part in (self.loss, self.loss_size, self.loss_slack)
            )

    def _add(self, truth: Truth, terms: Terms, cotangent: Tensor, share: float, share_off: float) -> None:
        self.uncertain |= share_off > 0.5
        more = 1 + share_off
        self.loss += share * (terms.off * more + terms.value * share_off)
        self.loss_slack += share * (terms.jump * more + terms.value * share_off)
        self.loss_size += share * terms.size
        weight = (cotangent * share)[:, None]
        slope, wobble = weight * terms.slope, weight * (terms.wobble * more + terms.slope * share_off)
        jump = wobble.where(~terms.steady, weight * terms.slope * share_off)
        self.learned += (slope * truth.relative + wobble).sum(1)
        self.learned_pull += slope.sum(1)
        self.learned_slack += jump.sum(1)
        tiny = torch.finfo(truth.batch.compute_type()).smallest_normal
        for side, (length, moved) in enumerate(lengths_of_slopes(truth)):
            allowed = (slope * truth.relative + wobble) * (length + moved) + slope * moved
            allowed += weight * tiny * terms.rate * length * (terms.slope + terms.wobble > 0)
            self.gradient[side] += allowed.sum(1 - side)
            self.pull[side] += (slope * terms.condition[:, None] * (length + moved)).sum(1 - side)
            self.slack[side] += (jump * (length + moved)).sum(1 - side)
