"""How far a loss and its gradients may be off, from what rounding may do to distances.

How a loss answers to its distances is for its own module to say: the function `slopes` in tests/losses.
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.calls import TripletOptions
from tests.support.oracle import Truth


class Gaps(NamedTuple):
    """Triplets as a loss sees them, (T,) each."""

    d_ap: Tensor  # true distances
    d_an: Tensor
    value: Tensor  # the true loss
    size: Tensor  # d_ap + d_an + margin
    off: Tensor  # how far d_ap − d_an may be off
    floor: Tensor  # the part of `off` that does not shrink with the distances
    tied: Tensor  # whether d_ap = d_an however they are rounded: between equal rows, or from a zero row
    kind: torch.finfo  # of the type that losses are computed in
    numbers: dict[str, float]  # of the loss


class Slopes(NamedTuple):
    """What errors of distances do to a loss, (T,) each."""

    ap: Tensor  # the largest that the slope by d_ap may be, without its sign
    an: Tensor
    sharpness: Tensor  # by how much an error of the distances is multiplied in the loss
    bend: Tensor  # how far a slope may be off, relative to itself
    floor: Tensor  # how far a slope may be off, however small it is
    condition: Tensor  # by how much an ulp of the distances is multiplied in a slope, relative to itself
    flips: Tensor  # whether rounding may change a slope, or the number of losses above 0, by a step
    jump: Tensor  # how far a step may take the loss itself


def softplus_slopes(
    gaps: Gaps, z: Tensor, by_ap: Tensor, by_an: Tensor, rate: float, bend: Tensor, floor: Tensor
) -> Slopes:
    """Of softplus(z): `by_ap` and `by_an` are the slopes of z without their signs, `rate` is the largest of
    them, and `floor` how far they may be off."""
    # Where z is off by more than 1, its slope may be many times what it should be.
    wide = rate * gaps.off > 1
    sigma = torch.sigmoid(z + (rate * gaps.off).where(wide, 0))
    # A loss below the smallest normal number may be 0 in this type, and not be counted.
    flips = wide | ((gaps.value > 0) & (gaps.value < gaps.kind.smallest_normal))
    return Slopes(
        ap=sigma * by_ap,
        an=sigma * by_an,
        sharpness=torch.full_like(z, rate),
        bend=bend.where(~wide, 1),
        floor=sigma * floor,
        condition=1 + rate * gaps.size,
        flips=flips,
        jump=torch.zeros_like(z),
    )


def slopes_of(loss: str, gaps: Gaps) -> Slopes:
    return import_module(f"tests.losses.{loss}").slopes(gaps)


def length_of_slope(truth: Truth, d: Tensor, row: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of the derivative of d by `row`, and how far rounding the rows alone may move it."""
    still = torch.zeros_like(d)
    if truth.name == "euclidean":
        return (d > 0).double(), still
    if truth.name == "sqeuclidean":
        return 2 * d.sqrt(), still
    norm = row.norm(dim=1)
    pulls = (norm > 0) & (other.norm(dim=1) > 0)
    per_norm = torch.where(pulls, 1 / norm.where(pulls, 1), 0)
    return (2 * d).sqrt() * per_norm, truth.unit_error * per_norm


class Tolerances:
    """How far the loss of given picks, and each row of its gradients, may be off."""

    def __init__(
        self, truth: Truth, p: Tensor, n: Tensor, options: TripletOptions, losses: Tensor, cotangent: Tensor
    ) -> None:
        valid = ((p >= 0) & (n >= 0)).nonzero()[:, 0]
        p, n, value = p[valid], n[valid], losses[valid]
        gaps = gaps_of(truth, valid, p, n, options, value)
        slopes = slopes_of(options.loss, gaps)
        counted = {"mean": len(valid), "mean_nonzero": int((value > 0).sum())}.get(options.reduction, 1)
        share = 1 / max(counted, 1)
        loss_off = slopes.sharpness * gaps.off + slopes.jump
        loss_off += 2 * gaps.kind.eps * value.abs() + gaps.kind.smallest_normal
        self.loss_size = slopes.sharpness * gaps.size + value.abs()
        self.loss: Tensor = torch.zeros_like(losses).index_put((valid,), loss_off)
        if options.reduction != "none":
            self.loss, self.loss_size = loss_off.sum() * share, self.loss_size.sum()[None] * share
        self.may_flip, self.may_jump = bool(slopes.flips.any()), bool(slopes.jump.any())

        # By row of emb and of ref_emb: the sizes of all that pulls at it, and the tolerance.
        weight = cotangent.double().abs().expand(len(losses))[valid] * share
        self.pull = [torch.zeros(len(rows), dtype=torch.float64) for rows in (truth.x, truth.y)]
        self.gradient = [part.clone() for part in self.pull]
        for pick, d, slope in ((p, gaps.d_ap, slopes.ap), (n, gaps.d_an, slopes.an)):
            for side, rows, at, others, other in (
                (0, truth.x, valid, truth.y, pick),
                (1, truth.y, pick, truth.x, valid),
            ):
                length, moved = length_of_slope(truth, d, rows[at], others[other])
                pull = weight * slope * (length + moved)
                tolerance = pull * (truth.relative + slopes.bend) + weight * slope * moved
                # A slope below the smallest normal number loses digits.
                tolerance += weight * (gaps.kind.smallest_normal + slopes.floor) * length
                self.pull[side].index_add_(0, at, pull * slopes.condition)
                self.gradient[side].index_add_(0, at, tolerance)
        if truth.batch.ref_emb is None:
            self.pull = [self.pull[0] + self.pull[1]]
            self.gradient = [self.gradient[0] + self.gradient[1]]


def gaps_of(
    truth: Truth, anchor: Tensor, p: Tensor, n: Tensor, options: TripletOptions, value: Tensor
) -> Gaps:
    d_ap, d_an = truth.distance[anchor, p], truth.distance[anchor, n]
    size, floor = d_ap + d_an + options.numbers["margin"], truth.floor(d_ap) + truth.floor(d_an)
    tied = (truth.group[p] == truth.group[n]) | truth.same_to_all[anchor, 0]
    kind = torch.finfo(truth.batch.compute_type())
    return Gaps(d_ap, d_an, value, size, truth.relative * size + floor, floor, tied, kind, options.numbers)
