"""The losses of triplets, and how far rounding may move them: a function for each word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tests.fuzz.oracle import Array, Real, Truth, sigmoid, softplus


class Triplets(NamedTuple):
    """The distances of some triplets, how far these may be off, and the sizes of what they are made of."""

    truth: Truth
    d_ap: Array
    d_an: Array
    e_ap: Array
    e_an: Array
    size_ap: Array
    size_an: Array
    tied: Array  # whether the two distances are equal bit for bit


def triplets_of(truth: Truth, a: Array, p: Array, n: Array, measured: bool) -> Triplets:
    """`measured`: the distances come from the rows themselves, so that S = 0 of a zero row is exact."""
    error = np.where(truth.zero, 0, truth.error) if measured and truth.distance == "cosine" else truth.error
    parts = (part[a, other] for part in (truth.d, error, truth.size) for other in (p, n))
    tied = truth.equal_candidates[p, n] | truth.equidistant[a]
    return Triplets(truth, *parts, tied)


@dataclass
class Slopes:
    """The derivatives of some losses by d_ap, or by d_an; the names are those of `Terms`."""

    slope: Array
    wobble: Array
    flip: Array
    bend: Array


@dataclass
class Losses:
    value: Array
    low: Array  # the value lies between
    high: Array
    jump: Array  # of that, what is due to a loss that jumps
    size: Array
    ap: Slopes
    an: Slopes
    lost: Array  # what a small value may lose beside, by being rounded to 0
    counts: Array  # whether it is above 0, and counts in a mean over such
    may_flip: Array  # whether rounding may change that

    def above_zero(self) -> Losses:
        """What a mean takes that is one over losses above 0."""
        negative, doubtful, never = self.value < 0, (self.low < 0) & (self.high > 0), self.high <= 0
        for side in (self.ap, self.an):
            either = np.where(doubtful, np.abs(side.slope), 0)
            side.slope = np.where(negative, 0, side.slope)
            side.wobble, side.flip = (np.where(never, 0, x + either) for x in (side.wobble, side.flip))
            side.bend = np.where(never, 0, side.bend)
        self.value, self.low, self.high = (np.maximum(x, 0) for x in (self.value, self.low, self.high))
        self.jump, self.lost, self.size = (np.where(never, 0, x) for x in (self.jump, self.lost, self.size))
        return self


def hinge(truth: Truth, z: Array, off: Array, size: Array) -> Losses:
    """[z]₊ of z = d_ap − d_an + something."""
    value, low, high = (np.maximum(each, 0) for each in (z, z - off, z + off))
    slope, least, most = ((each > 0).astype(Real) for each in (z, z - off, z + off))
    flip, none = most - least, np.zeros_like(z)
    ap, an = (Slopes(sign * slope, flip, flip, none) for sign in (1, -1))
    size = np.where(most > 0, size, 0) + value
    return Losses(value, low, high, none, size, ap, an, none, value > truth.quantum / 2, flip > 0)


class Inner(NamedTuple):
    """The derivative of z by a distance."""

    rate: Array
    off: Array | float = 0.0
    size: Array | float = 0.0  # of what it is made of, an ulp of which moves it


def curve(truth: Truth, z: Array, off: Array, size: Array, by_ap: Inner, by_an: Inner) -> Losses:
    """softplus(z)."""
    # Where both distances are exact, z itself is still rounded: a difference, a quotient, and its parts.
    off = off + 4 * truth.type.eps * size
    value, low, high = (softplus(each) for each in (z, z - off, z + off))
    slope, least, most = (sigmoid(each) for each in (z, z - off, z + off))
    none = np.zeros_like(z)

    def side(inner: Inner) -> Slopes:
        wobble = (most - least) * np.abs(inner.rate) + most * inner.off
        return Slopes(slope * inner.rate, wobble, none, most * (np.abs(inner.rate) * size + inner.size))

    # A small one may round to 0, or be lost below the smallest normal number.
    lost = np.where(high > truth.quantum / 4, truth.type.tiny, 0)
    size = np.where(most > 0, size, 0) + value
    return Losses(
        value, low, high, none, size, side(by_ap), side(by_an), lost, *counted(truth, value, low, high)
    )


def counted(truth: Truth, value: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """Whether values above 0 are that in their type, and whether rounding may change it."""
    return value > truth.quantum / 2, (low < truth.type.tiny) & (high > truth.quantum / 4)


def margin(of: Triplets, numbers: dict[str, Any]) -> Losses:
    room = numbers["margin"]
    off = of.e_ap + of.e_an + of.truth.margin_error(room)
    return hinge(of.truth, of.d_ap - of.d_an + room, off, of.size_ap + of.size_an + room)


def soft_margin(of: Triplets, numbers: dict[str, Any]) -> Losses:
    one = np.ones_like(of.d_ap)
    size = of.size_ap + of.size_an
    return curve(of.truth, of.d_ap - of.d_an, of.e_ap + of.e_an, size, Inner(one), Inner(-one))


def first_order(of: Triplets, numbers: dict[str, Any]) -> Losses:
    """softplus((S_an − S_ap)/τ)"""
    rate = np.full_like(of.d_ap, 1 / Real(numbers["temperature"]))
    z, off, size = ((of.d_ap - of.d_an), (of.e_ap + of.e_an), (of.size_ap + of.size_an))
    return curve(of.truth, z * rate, off * rate, size * rate, Inner(rate), Inner(-rate))


def second_order(of: Triplets, numbers: dict[str, Any]) -> Losses:
    """softplus((½S_an² − S_ap + ½S_ap²)/τ), where that is ½(1−d_an)² + ½d_ap² − ½."""
    tau, s_an = Real(numbers["temperature"]), 1 - of.d_an
    z = (s_an * s_an + of.d_ap * of.d_ap - 1) / (2 * tau)
    off = np.abs(s_an) * of.e_an + of.d_ap * of.e_ap + (of.e_an * of.e_an + of.e_ap * of.e_ap) / 2
    size = (of.size_ap + of.size_an) / tau
    # S is rounded: 1 − S_an loses digits that are small beside 1.
    by_an = Inner(-s_an / tau, (of.e_an + of.truth.type.eps) / tau, of.size_an / tau)
    by_ap = Inner(of.d_ap / tau, of.e_ap / tau, of.size_ap / tau)
    return curve(of.truth, z, off / tau, size, by_ap, by_an)


def sct(of: Triplets, numbers: dict[str, Any]) -> Losses:
    """`first_order` where S_an ≤ S_ap, else sct_weight·S_an, of which S_ap is no part."""
    weight, none = Real(numbers["sct_weight"]), np.zeros_like(of.d_ap)
    value, off = weight * (1 - of.d_an), weight * (of.e_an + of.truth.type.eps)
    push, still = Slopes(none - weight, none, none, none), Slopes(none, none, none, none)
    counts = counted(of.truth, value, value - off, value + off)
    size = weight * (1 + of.size_an)
    alone = Losses(value, value - off, value + off, none, size, still, push, none, *counts)
    doubtful = (np.abs(of.d_an - of.d_ap) <= of.e_ap + of.e_an) & ~of.tied
    pushed = (of.d_an < of.d_ap) & ~of.tied
    return either(alone, first_order(of, numbers), pushed, doubtful)


def either(one: Losses, other: Losses, is_one: Array, doubtful: Array) -> Losses:
    """The one where `is_one`, else the other; where that is doubtful, the difference is allowed."""

    def chosen(a: Array, b: Array) -> Array:
        return np.where(is_one, a, b)

    def most_of(a: Array, b: Array) -> Array:
        return np.where(doubtful, np.maximum(a, b), chosen(a, b))

    def slopes(a: Slopes, b: Slopes) -> Slopes:
        jump = np.where(doubtful, np.abs(a.slope - b.slope), 0)
        wobble, flip = most_of(a.wobble, b.wobble) + jump, most_of(a.flip, b.flip) + jump
        return Slopes(chosen(a.slope, b.slope), wobble, flip, most_of(a.bend, b.bend))

    return Losses(
        chosen(one.value, other.value),
        -most_of(-one.low, -other.low),
        most_of(one.high, other.high),
        np.where(doubtful, np.abs(one.value - other.value), 0),
        most_of(one.size, other.size),
        slopes(one.ap, other.ap),
        slopes(one.an, other.an),
        most_of(one.lost, other.lost),
        chosen(one.counts, other.counts),
        most_of(one.may_flip, other.may_flip) | (doubtful & (one.counts != other.counts)),
    )


LOSS: dict[str, Callable[[Triplets, dict[str, Any]], Losses]] = {
    "margin": margin,
    "soft_margin": soft_margin,
    "first_order": first_order,
    "second_order": second_order,
    "sct": sct,
}
