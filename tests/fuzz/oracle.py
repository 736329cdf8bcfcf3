"""What is true of a batch, and how far the promises let a call be off, in extended precision.

Written from the definitions; of `tripletops` it takes nothing but the hash that random picks go by. A long
double has at least 64 bits of mantissa and 15 of exponent: the squares and the inverses of all rows of all
types fit, so nothing has to be scaled.

A loss is a sum of terms, which are functions of an anchor's distances. The terms give the loss, and for each
pair of an anchor and a candidate the derivative by their distance. What the pairs do to the rows is the same
for every objective. The promises bound the error of a distance; a term and its slope are allowed as far as
they can move within these bounds. Where a hinge or a pick can go either way, the difference which that makes
is allowed as well.

Here is what rules, losses and objectives have in common; `rules`, `losses` and `objectives` have a function
for each word.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.support.batches import Batch
from tests.support.calls import cotangent_of
from tripletops import reference

# Section 6 of the specification, for float32: the relative error of a distance, and the squared distance of a
# pick by (4+√D)·R².
RELATIVE = 1e-5
PICK = 2.0**-21

Real = np.longdouble
Array = np.ndarray
assert np.finfo(Real).maxexp >= 16384, "needs a long double whose exponents hold the squares of float64"


def real(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy().astype(Real)


def row_norms(x: Array) -> Array:
    return np.sqrt(np.square(x).sum(-1))


class Lengths(NamedTuple):
    """Of the derivative of d by a row."""

    norm: Array
    moved: Array  # how far rounding the unit rows may move it
    parts: Array  # the size of what it is the difference of


class Truth:
    """The distances of a batch, who is whose positive and negative, and how far distances may be off."""

    def __init__(self, batch: Batch, distance: str, sizes_differ: bool = False) -> None:
        plain = batch.plain()
        self.batch, self.distance = batch, distance
        self.type = np.finfo(np.float64 if batch.compute_type() == torch.float64 else np.float32)
        self.finer = 2.0**-29 if self.type.bits == 64 else 1.0
        # docs/numerics.md, "Limits": then picks keep the bound of the whole batch alone.
        self.sizes_differ = sizes_differ

        def side(emb: Tensor, labels: Tensor) -> tuple[Array, Array, Array]:
            names, ignored = labels.numpy(), plain.ignore_label
            kept = np.ones(len(names), bool) if ignored is None else names != as_int64(ignored)
            return np.where(kept[:, None], real(emb), 0), names, kept

        self.x, labels, self.kept = side(plain.emb, plain.labels)
        self.y, ref_labels, ref_kept = self.x, labels, self.kept
        selves = np.arange(len(labels))
        if plain.ref_emb is not None and plain.ref_labels is not None:
            self.y, ref_labels, ref_kept = side(plain.ref_emb, plain.ref_labels)
            selves = np.full(len(labels), -1) if plain.self_index is None else plain.self_index.numpy()
        usable = self.kept[:, None] & ref_kept & (selves[:, None] != np.arange(len(ref_labels)))
        same = labels[:, None] == ref_labels
        self.positives, self.negatives = usable & same, usable & ~same
        self.rows = self.x[self.kept]
        if batch.ref_emb is not None:
            self.rows = np.concatenate([self.rows, self.y[ref_kept]])
        self.finite = bool(np.isfinite(self.rows).all())

    @cached_property
    def width(self) -> int:
        return self.x.shape[1]

    @cached_property
    def both_kinds(self) -> bool:
        """Whether there is a positive pair and a negative pair; objectives of pairs have no loss without."""
        return bool(self.positives.any() and self.negatives.any())

    @cached_property
    def equal_candidates(self) -> Array:
        """(M, M): duplicates, whose distances are equal bit for bit."""
        return (self.y[:, None] == self.y).all(-1)

    @cached_property
    def equidistant(self) -> Array:
        """(N,): anchors that are a row of zeros, which has S = 0 with everything."""
        zero = ~(self.x != 0).any(1)
        return zero if self.distance == "cosine" else np.zeros_like(zero)

    @cached_property
    def units(self) -> tuple[Array, Array]:
        def unit(x: Array) -> Array:
            norm = row_norms(x)[:, None]
            return x / np.where(norm > 0, norm, 1)

        return unit(self.x), unit(self.y)

    @cached_property
    def zero(self) -> Array:
        """(N, M): pairs with a row of zeros, whose cosine is 0 by definition."""
        return ~(self.x != 0).any(1)[:, None] | ~(self.y != 0).any(1)

    @cached_property
    def difference(self) -> Array:
        """(N, M, D), of unit rows if the distance is that of the cosine."""
        x, y = self.units if self.distance == "cosine" else (self.x, self.y)
        return x[:, None] - y

    @cached_property
    def square(self) -> Array:
        """Squared distances, of unit rows for the cosine: what selection compares."""
        square = np.square(self.difference).sum(-1)
        return np.where(self.zero, 2, square) if self.distance == "cosine" and self.width else square

    @cached_property
    def unlimited(self) -> Array:
        """Distances, whether their type can hold them or not."""
        if self.distance == "euclidean":
            return np.sqrt(self.square)
        return self.square / 2 if self.distance == "cosine" else self.square

    @cached_property
    def d(self) -> Array:
        """Distances; one too large for its type counts as the largest number of that."""
        return np.minimum(self.unlimited, Real(self.type.max))

    @cached_property
    def cosine_square(self) -> Array:
        """Squared distances of unit rows, whatever the distance is."""
        return self.square if self.distance == "cosine" else Truth(self.batch, "cosine").square

    @cached_property
    def relative(self) -> float:
        return RELATIVE * self.finer

    @cached_property
    def quantum(self) -> Array:
        """The smallest number of the type that distances and losses come in."""
        return Real(self.type.smallest_subnormal)

    @cached_property
    def double_unit_error(self) -> float:
        """How far the unit rows of a pair, which are made in double, may be off.

        A norm is off by half of what the sum of D squares is, whose roundings add up to √D of them, and by
        the rounding of the root; then follows a division.
        """
        return (5 + math.sqrt(self.width)) * 2.0**-53 if self.distance == "cosine" else 0.0

    @cached_property
    def unit_error(self) -> float:
        """The same for distances; one of float32 is promised no more than its rows rounded to 2⁻²³."""
        return max(self.double_unit_error, 2.0**-22 * self.finer) if self.distance == "cosine" else 0.0

    @cached_property
    def error(self) -> Array:
        """How far each distance may be off, which is stored in its type; that of equal rows is 0 exactly."""
        floor = self.unit_error * np.sqrt(2 * self.d) + self.unit_error**2 / 2
        error = self.relative * self.d + floor + self.quantum
        equal = (self.x[:, None] == self.y).all(-1)
        if self.distance == "cosine":  # a zero row is at distance 1 from its like
            equal &= ~self.zero | (self.width == 0)
        return np.where(equal, 0, error)

    @cached_property
    def size(self) -> Array:
        """Of what each distance is made of, an ulp of which is what counts: unit rows are rounded before."""
        off = self.double_unit_error
        return self.d + (off * np.sqrt(2 * self.d) + off**2 / 2) / self.type.eps

    def margin_error(self, margin: Array | float) -> Array:
        """A margin comes in the type of the distances."""
        return self.relative * np.abs(margin) + self.quantum * (np.asarray(margin) != 0)

    @cached_property
    def overflows(self) -> Array:
        """Distances that their type may not hold."""
        return self.unlimited + self.error >= Real(self.type.max)

    @cached_property
    def promised(self) -> float:
        """2⁻²¹·(4+√D), finer for float64: an error of squared distances by the square of a radius."""
        return self.finer * PICK * (4 + math.sqrt(self.width))

    @cached_property
    def pick_bound(self) -> Array:
        """How far a pick's squared distance may be from the extreme, by the radius of all centred rows."""
        rows = self.rows
        if self.distance == "cosine" and self.width:
            norms = row_norms(rows)[:, None]
            rows = rows / np.where(norms > 0, norms, 1)
        if not rows.size:
            return Real(0)
        return self.promised * np.square(rows - rows.mean(0)).sum(1).max()

    @cached_property
    def key_error(self) -> Array:
        """By pair, what the rounding of unit rows does to squared distances."""
        return self.double_unit_error * (2 * np.sqrt(self.square) + self.double_unit_error)

    def bound_of(self, picks: Array) -> Array:
        """How far a pick may be off, given the pairs that are right, a mask.

        No largest error is more than twice that of the plain formulation, whose products are those of the
        rows that take part. So a row far away from all others is no excuse where nobody should pick it.
        """
        if self.distance == "cosine" or self.sizes_differ or not picks.any():
            return self.pick_bound
        taking_part = [*np.square(self.x[picks.any(1)]).sum(1), *np.square(self.y[picks.any(0)]).sum(1)]
        return np.minimum(self.pick_bound, 2 * self.promised * max(taking_part))

    @cached_property
    def lengths(self) -> tuple[Lengths, Lengths]:
        """By pair, for x and for y."""
        still = np.zeros_like(self.d)
        if self.distance != "cosine":
            length = (self.d > 0).astype(Real) if self.distance == "euclidean" else 2 * np.sqrt(self.square)
            return 2 * (Lengths(length, still, length),)
        norms = row_norms(self.x)[:, None], row_norms(self.y)[None]
        inverse = (np.where(self.zero, 0, 1 / np.where(norm > 0, norm, 1)) for norm in norms)
        all_of = (
            Lengths(
                np.sqrt(2 * self.d) * each,
                self.unit_error * each,
                # float32 rows are normalised in double; of float64 rows the units' own ulp remains.
                each if self.type.bits == 64 else (np.sqrt(2 * self.d) + self.unit_error) * each,
            )
            for each in inverse
        )
        return next(all_of), next(all_of)

    def gradients(self, weight: Array) -> list[Array]:
        """Of the sum of weight·d over all pairs, by x and by y."""
        if self.distance == "cosine":
            weight = np.where(self.zero, 0, weight)[:, :, None]
            (u, v), d = self.units, self.d[:, :, None]
            norms = (np.where(norm > 0, norm, 1)[:, None] for norm in (row_norms(self.x), row_norms(self.y)))
            # ∂(1−S)/∂x = ((u − v) − (1−S)·u) / |x|
            by_x = (weight * (self.difference - d * u[:, None])).sum(1) / next(norms)
            by_y = (weight * (-self.difference - d * v[None])).sum(0) / next(norms)
            return [by_x, by_y]
        factor = 2 * weight
        if self.distance == "euclidean":
            factor = np.where(self.d > 0, weight / np.where(self.d > 0, self.unlimited, 1), 0)
        pulls = factor[:, :, None] * self.difference
        return [pulls.sum(1), -pulls.sum(0)]

    @cached_property
    def noise(self) -> Array:
        noise = reference.noise(self.batch.seed, *self.positives.shape, torch.device("cpu"))
        return noise.numpy().astype(Real)


def as_int64(label: int) -> int:
    """Labels of uint64 are read as int64 of the same 64 bits."""
    return label - 2**64 if label >= 2**63 else label


def softplus(z: Array) -> Array:
    return np.logaddexp(z, Real(0))


def sigmoid(z: Array) -> Array:
    return np.exp(-softplus(-z))


class Terms:
    """Terms that share a mean: sums by anchor, slopes by pair, and what rounding may do to them."""

    def __init__(self, truth: Truth) -> None:
        anchors, pairs = np.zeros(len(truth.x), Real), np.zeros(truth.positives.shape, Real)
        self.value, self.off, self.size, self.jump = (anchors.copy() for _ in range(4))
        self.slope, self.wobble, self.flip, self.bend = (pairs.copy() for _ in range(4))
        # By anchor, `off` is how far the value may be off; of that, `jump` is due to picks that may differ.
        # `size` is that of the parts which the value is made of. By pair, `slope` is the derivative by the
        # distance, and `wobble` how far it may be off; of that, `flip` is due to slopes that jump. `bend` is
        # the slope times the size of its argument, an ulp of which moves the slope of a curve.
        self.count = self.nonzero = 0
        self.flips = 0  # of the nonzero terms, those that may be counted or not
        self.only_nonzero = False  # whether every mean is one over the nonzero terms

    def share(self, reduction: str) -> tuple[float, float]:
        """What a mean multiplies by, and its relative error."""
        if reduction in ("sum", "none"):
            return 1.0, 0.0
        count, flips = self.nonzero, self.flips
        if reduction == "mean" and not self.only_nonzero:
            count, flips = self.count, 0
        return 1 / max(count, 1), flips / (count - flips) if flips < count else math.inf if flips else 0.0


@dataclass
class Allowed:
    """A value, and how far it may be off."""

    right: Array
    off: Array
    slack: Array  # of `off`, what jumps make
    whole: Array  # the sum of the sizes of all that is added up
    size: Array  # the same, larger by as much as an ulp of it counts for more


class Outcome:
    """The loss and the gradients of a call, and how far they may be off."""

    def __init__(self, truth: Truth, groups: list[Terms], reduction: str) -> None:
        shape = (len(truth.x),) if reduction == "none" else ()
        weights = real(cotangent_of(torch.zeros(shape, dtype=truth.batch.compute_type())))
        weights = np.broadcast_to(weights, len(truth.x))
        loss, learned, *sides = (
            Allowed(*(np.zeros(len(rows), Real) for _ in range(5)))
            for rows in (truth.x, truth.x, truth.x, truth.y)
        )
        weighed = np.zeros_like(truth.d)
        self.uncertain = False  # whether the number of terms is
        self.overflows = False  # whether a distance that takes part does not fit its type
        self.added = sum(terms.count or terms.nonzero for terms in groups)  # how many terms the loss has
        for terms in groups:
            share, doubt = terms.share(reduction)
            self.uncertain |= doubt > 0.5
            doubt = min(doubt, 1.0)
            takes_part = (terms.slope != 0) | (terms.wobble > 0)
            self.overflows |= bool((takes_part & truth.overflows).any())
            loss.right += share * terms.value
            loss.off += share * (terms.off * (1 + doubt) + terms.value * doubt)
            loss.slack += share * (terms.jump * (1 + doubt) + terms.value * doubt)
            loss.whole += share * terms.size
            loss.size += share * terms.size
            weight = (weights * share)[:, None]
            size = np.abs(weight)
            weighed += weight * terms.slope
            slope = size * np.abs(terms.slope)
            wobble = size * terms.wobble * (1 + doubt) + slope * doubt
            jump = size * terms.flip * (1 + doubt) + slope * doubt
            learned.off += (slope * truth.relative + wobble).sum(1)
            learned.slack += jump.sum(1)
            learned.whole += slope.sum(1)
            learned.size += slope.sum(1)
            # The slopes of "euclidean" are divided by the distance as it is stored, which has fewer digits
            # below the smallest normal number. So have slopes, and what is multiplied with them.
            steps = np.zeros_like(truth.d)
            if truth.distance == "euclidean":
                np.divide(truth.quantum, truth.d, out=steps, where=truth.d > 0)
                steps = np.minimum(steps, 1)
            lost = size * truth.type.tiny * takes_part
            bent = slope + size * terms.bend
            for axis, (side, (norm, moved, parts)) in enumerate(zip(sides, truth.lengths, strict=True)):
                off = (slope * (truth.relative + steps) + wobble + lost) * (norm + moved) + slope * moved
                side.off += off.sum(1 - axis) + truth.quantum * takes_part.sum(1 - axis)
                side.slack += ((jump + slope * steps) * (norm + moved)).sum(1 - axis)
                side.whole += (slope * norm).sum(1 - axis)
                side.size += (bent * parts).sum(1 - axis)
        for side, right in zip(sides, truth.gradients(weighed), strict=True):
            side.right = right
        learned.right = -weighed.sum(1)  # a boundary moves against its distances
        if truth.batch.ref_emb is None:
            both = zip(*(vars(side).values() for side in sides), strict=True)
            sides = [Allowed(*(as_anchor + as_candidate for as_anchor, as_candidate in both))]
        if reduction != "none":
            loss = Allowed(*(part.sum() for part in vars(loss).values()))
        self.loss, self.rows, self.learned = loss, sides, learned
