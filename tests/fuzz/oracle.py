"""What a call should give, and how far the promises let it be off, in extended precision.

Written from the definitions; of `tripletops` it takes nothing but the hash that random picks go by. A long
double has at least 64 bits of mantissa and 15 of exponent: the squares and the inverses of all rows of all
types fit, so nothing has to be scaled.

A loss is a sum of terms, which are functions of an anchor's distances. The terms give the loss, and for each
pair of an anchor and a candidate the derivative by their distance. What the pairs do to the rows is the same
for every objective. The promises, which `helpers` lists, bound the error of a distance; a term and its slope
are allowed as far as they can move within these bounds. Where a hinge or a pick can go either way, the
difference which that makes is allowed as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from helpers import PICK, RELATIVE, Batch, ManyTuples, beta_by_anchor, beta_of, cotangent_of
from torch import Tensor

from tripletops import reference

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

    def __init__(self, batch: Batch, distance: str) -> None:
        plain = batch.plain()
        self.batch, self.distance = batch, distance
        self.type = np.finfo(np.float64 if batch.compute_type() == torch.float64 else np.float32)
        self.finer = 2.0**-29 if self.type.bits == 64 else 1.0

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
        if self.distance == "cosine" or not picks.any():
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
class Triplets:
    """z of some triplets and its two derivatives, signs aside, and how far they may be off."""

    z: Array
    off: Array
    size: Array
    by_ap: Array
    by_an: Array
    by_ap_off: Array
    by_an_off: Array


def triplets_of(truth: Truth, a: Array, p: Array, n: Array, loss: str, margin: float, tau: float) -> Triplets:
    d_ap, d_an, e_ap, e_an = truth.d[a, p], truth.d[a, n], truth.error[a, p], truth.error[a, n]
    size = truth.size[a, p] + truth.size[a, n]
    one, none = np.ones_like(d_ap), np.zeros_like(d_ap)
    if loss == "second_order":  # ½S_an² − S_ap + ½S_ap² = ½(1−d_an)² + ½d_ap² − ½
        s_an = 1 - d_an
        z = (s_an * s_an + d_ap * d_ap - 1) / (2 * tau)
        off = (np.abs(s_an) * e_an + d_ap * e_ap + (e_an * e_an + e_ap * e_ap) / 2) / tau
        # S is rounded: 1 − S_an loses digits that are small beside 1.
        e_an = e_an + truth.type.eps
        return Triplets(z, off, size / tau, d_ap / tau, -s_an / tau, e_ap / tau, e_an / tau)
    rate = {"margin": 1.0, "soft_margin": 1.0, "first_order": 1 / tau}[loss]
    margin = margin if loss == "margin" else 0.0
    z, size = (d_ap - d_an) * rate + margin, size * rate + margin
    off = (e_ap + e_an) * rate + truth.margin_error(margin)
    return Triplets(z, off, size, one * rate, -one * rate, none, none)


def triplet_terms(
    truth: Truth, a: Array, p: Array, n: Array, loss: str, margin: float = 0.0, tau: float = 1.0
) -> Terms:
    """One term for each of the triplets (a, p, n)."""
    terms, all_of = Terms(truth), triplets_of(truth, a, p, n, loss, margin, tau)
    z, off = all_of.z, all_of.off
    if loss == "margin":
        value, low, high = (np.maximum(each, 0) for each in (z, z - off, z + off))
        slope, least, most = ((each > 0).astype(Real) for each in (z, z - off, z + off))
    else:
        value, low, high = (softplus(each) for each in (z, z - off, z + off))
        slope, least, most = (sigmoid(each) for each in (z, z - off, z + off))
    np.add.at(terms.value, a, value)
    np.add.at(terms.off, a, np.maximum(high - value, value - low))
    np.add.at(terms.size, a, np.where(most > 0, all_of.size, 0) + value)
    flips = most != least
    if loss != "margin":  # a small one may round to 0, or be lost below the smallest normal number
        np.add.at(terms.off, a, np.where(high > truth.quantum / 4, truth.type.tiny, 0))
        flips = (low < truth.type.tiny) & (high > truth.quantum / 4)
    terms.count, terms.nonzero, terms.flips = len(a), int((value > truth.quantum / 2).sum()), int(flips.sum())
    for other, rate, rate_off in ((p, all_of.by_ap, all_of.by_ap_off), (n, all_of.by_an, all_of.by_an_off)):
        np.add.at(terms.slope, (a, other), slope * rate)
        wobble = (most - least) * np.abs(rate) + most * rate_off
        np.add.at(terms.wobble, (a, other), wobble)
        if loss == "margin":
            np.add.at(terms.flip, (a, other), wobble)
        else:
            np.add.at(terms.bend, (a, other), most * np.abs(rate) * all_of.size)
    return terms


def semi_hard_terms(truth: Truth, margin: float) -> Terms:
    """For each (a, p) one term: with the nearest negative strictly farther than p, else with the farthest."""
    terms = Terms(truth)
    a, p = np.nonzero(truth.positives & truth.negatives.any(1, keepdims=True))
    if not len(a):
        return terms
    eligible, pairs = truth.negatives[a], np.arange(len(a))
    square, threshold = np.where(eligible, truth.square[a], -1), truth.square[a, p][:, None]
    beyond = eligible & (square > threshold)
    nearest = np.where(beyond, square, np.inf).argmin(1)
    n = np.where(beyond.any(1), nearest, square.argmax(1))

    right = np.zeros_like(truth.positives)
    right[a, p] = right[a, n] = True
    bound = truth.bound_of(right)
    d, error = truth.d[a], truth.error[a]
    d_ap, e_ap = truth.d[a, p][:, None], truth.error[a, p][:, None]
    # Keys are off by the bound, and what is strictly farther is decided by distances as they are reported.
    bound = bound + truth.key_error[a] + truth.key_error[a, p][:, None]
    surely = eligible & (square > threshold + bound) & (d - error > d_ap + e_ap)
    possible = eligible & ((square > threshold - bound) | (d + error > d_ap - e_ap))
    limit = np.where(surely, square + bound, np.inf).min(1, keepdims=True) + bound
    reported_limit = np.where(surely, d + error, np.inf).min(1, keepdims=True)
    possible &= (square <= limit) | (d - error <= reported_limit)
    possible |= eligible & ~surely.any(1, keepdims=True) & (square >= square.max(1, keepdims=True) - bound)

    z = d_ap - d + margin
    off = np.where(possible, e_ap + error + truth.margin_error(margin), 0)
    least, most = np.where(possible, z, np.inf).min(1), np.where(possible, z, -np.inf).max(1)
    far = off.max(1)
    value = np.maximum(z[pairs, n], 0)
    active, counts = value > 0, most > -far
    may_flip = counts & (least <= far) & (far > 0)
    several = possible.sum(1, keepdims=True) > 1
    doubtful = possible & (z > -off) & (several | (z <= off)) & (off > 0)
    terms.count, terms.nonzero, terms.flips = len(a), int(active.sum()), int(may_flip.sum())
    np.add.at(terms.value, a, value)
    np.add.at(terms.jump, a, np.maximum(most, 0) - np.maximum(least, 0))
    np.add.at(terms.off, a, np.where(counts, far, 0))
    terms.off += terms.jump
    size = truth.size[a, p] + truth.size[a, n] + margin
    np.add.at(terms.size, a, np.where(counts, size, 0) + value)
    np.add.at(terms.slope, (a, p), active)
    np.add.at(terms.slope, (a, n), -active.astype(Real))
    np.add.at(terms.wobble, (a, p), may_flip)
    np.add.at(terms.wobble, a, doubtful)
    terms.flip = terms.wobble
    return terms


def log_sum_with_one(exponent: Array, mask: Array) -> Array:
    """ln(1 + the sum of e^exponent over the mask), by row."""
    all_of = np.concatenate([np.where(mask, exponent, -np.inf), np.zeros((len(exponent), 1), Real)], 1)
    return np.logaddexp.reduce(all_of, axis=1)


def multi_similarity_terms(truth: Truth, options: dict[str, Any]) -> Terms:
    terms, d, error = Terms(truth), truth.d, truth.error
    valid = truth.positives.any(1) & truth.negatives.any(1)
    if not valid.any():
        return terms
    epsilon, offset, anchors = options["epsilon"], 1 - options["base"], np.arange(len(d))
    positives, negatives = truth.positives & valid[:, None], truth.negatives & valid[:, None]
    farthest = np.where(positives, d, -np.inf).argmax(1)
    nearest = np.where(negatives, d, np.inf).argmin(1)
    least_value, most_value = np.zeros(len(d), Real), np.zeros(len(d), Real)
    for sign, mask, rate, other in (
        (-1, positives, options["alpha"], nearest),
        (1, negatives, options["beta"], farthest),
    ):
        kept = surely = possibly = mask  # what mining leaves
        if epsilon is not None:
            gap = sign * (d[anchors, other][:, None] - d) + epsilon
            off = error[anchors, other][:, None] + error + truth.type.eps * (np.abs(gap) + epsilon + d)
            kept, surely, possibly = mask & (gap > 0), mask & (gap > off), mask & (gap > -off)
        easy = sign < 0 and options["positive"] == "easy"
        if easy:
            first = np.where(mask, d, np.inf).argmin(1)
            kept = mask & (first[:, None] == np.arange(d.shape[1]))
            possibly = mask & (d - error <= (d + error)[anchors, first][:, None])
            surely = kept & (possibly.sum(1, keepdims=True) == 1)
        exponent = sign * rate * (offset - d)
        value, least, most = (log_sum_with_one(exponent, some) for some in (kept, surely, possibly))
        if easy:
            least = most = value
        steady = (surely == possibly).all(1, keepdims=True)
        far = np.where(possibly, error, 0).max(1)
        terms.value += value / rate
        least_value += least / rate
        most_value += most / rate
        terms.jump += (most - least) / rate
        terms.off += (most - least) / rate + far
        terms.size += (np.where(possibly, truth.size, 0).max(1) + abs(offset)) * valid + value / rate
        slope = np.where(kept, np.exp(exponent - value[:, None]), 0)
        spread = 2 * rate * far[:, None]
        highest = np.where(possibly, np.minimum(np.exp(exponent - least[:, None] + spread), 1), 0)
        lowest = np.where(surely, np.exp(exponent - most[:, None] - spread), 0)
        wobble = np.maximum(highest - slope, slope - lowest)
        terms.slope -= sign * slope
        terms.wobble += wobble
        terms.flip += np.where(steady, 0, wobble)
        terms.bend += highest * rate * (d + abs(offset))
    terms.count, terms.nonzero = int(valid.sum()), int((terms.value > 0).sum())
    terms.flips = int(((least_value < truth.type.tiny) & (most_value > 0)).sum())
    return terms


def pair_terms(truth: Truth, pairs: Array, sign: int, end: Array) -> Terms:
    """[sign·(d − end)]₊ of the pairs."""
    terms = Terms(truth)
    z, size = sign * (truth.d - end), truth.size + np.abs(end)
    off = truth.error + truth.margin_error(end)
    kept, flips = pairs & (z > -off), pairs & (np.abs(z) <= off) & (off > 0)
    terms.value = np.where(pairs, np.maximum(z, 0), 0).sum(1)
    terms.off, terms.size = np.where(kept, off, 0).sum(1), np.where(kept, size, 0).sum(1)
    terms.slope, terms.wobble = sign * (pairs & (z > 0)).astype(Real), flips.astype(Real)
    terms.flip = terms.wobble
    terms.nonzero, terms.flips = int((pairs & (z > 0)).sum()), int(flips.sum())
    terms.only_nonzero = True
    return terms


def terms_of(truth: Truth, call: ManyTuples, picks: tuple[Array, Array] | None) -> list[Terms]:
    """The terms of an objective, by mean. `picks`: each anchor's positive and negative, −1 for none."""
    options, function = call.options, call.function
    if function == "multi_similarity_loss":
        return [multi_similarity_terms(truth, options)]
    if function == "semi_hard_loss":
        return [semi_hard_terms(truth, options["margin"])]
    if function == "batch_all_loss":
        a, p, n = np.nonzero(truth.positives[:, :, None] & truth.negatives[:, None, :])
        terms = triplet_terms(truth, a, p, n, options["loss"], options["margin"])
        if options["loss"] == "soft_margin":  # never 0, so all of them are active
            terms.nonzero, terms.flips = terms.count, 0
        return [terms]
    if function not in ("contrastive_loss", "beta_margin_loss"):
        assert picks is not None
        a = np.nonzero((picks[0] >= 0) & (picks[1] >= 0))[0]
        p, n = picks[0][a], picks[1][a]
        return [triplet_terms(truth, a, p, n, options["loss"], options["margin"], options["temperature"])]

    positives, negatives = truth.positives, truth.negatives
    both = positives.any() and negatives.any()
    candidate = np.arange(len(truth.y))
    if picks is not None and options["positive"] != "all":
        positives = picks[0][:, None] == candidate
    if picks is not None and options["negative"] != "all":
        negatives = picks[1][:, None] == candidate
    if function == "contrastive_loss":
        start, end = Real(options["pos_margin"]), Real(options["neg_margin"])
        return [pair_terms(truth, positives & both, 1, start), pair_terms(truth, negatives & both, -1, end)]
    beta = real(beta_by_anchor(truth.batch.plain(), beta_of(call, truth.batch.compute_type())))[:, None]
    alpha = options["alpha"]
    pull = pair_terms(truth, positives & both, 1, beta - alpha)
    push = pair_terms(truth, negatives & both, -1, beta + alpha)
    pull.nonzero = push.nonzero = pull.nonzero + push.nonzero
    pull.flips = push.flips = pull.flips + push.flips
    return [pull, push]


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
        loss, beta, *sides = (
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
            beta.off += (slope * truth.relative + wobble).sum(1)
            beta.slack += jump.sum(1)
            beta.whole += slope.sum(1)
            beta.size += slope.sum(1)
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
        beta.right = -weighed.sum(1)  # a boundary moves against its distances
        if truth.batch.ref_emb is None:
            both = zip(*(vars(side).values() for side in sides), strict=True)
            sides = [Allowed(*(as_anchor + as_candidate for as_anchor, as_candidate in both))]
        if reduction != "none":
            loss = Allowed(*(part.sum() for part in vars(loss).values()))
        self.loss, self.rows, self.beta = loss, sides, beta
