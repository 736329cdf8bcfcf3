"""The terms of the objectives, and how far rounding may move them: a function for each.

Every function returns the terms by mean: those that share a mean are together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.fuzz.cases import Call
from tests.fuzz.losses import LOSS, triplets_of
from tests.fuzz.oracle import Array, Real, Terms, Truth, real, sigmoid, softplus
from tests.support.batches import Batch


class Picks(NamedTuple):
    """Each anchor's positive and negative, −1 for none."""

    positive: Array
    negative: Array


def learned_by_anchor(batch: Batch, numbers: Tensor) -> Tensor:
    """(N,): the number of the anchor's class, or the one for all."""
    labels = batch.labels.long()
    place = torch.zeros_like(labels)
    if numbers.dim():
        place = labels if batch.ignore_label is None else labels.where(labels != batch.ignore_label, 0)
    return numbers.reshape(-1)[place]


def learned_of(call: Call, dtype: torch.dtype) -> Tensor:
    return torch.as_tensor(call.learned, dtype=torch.float64).to(dtype)


def add_triplets(truth: Truth, call: Call, a: Array, p: Array, n: Array) -> Terms:
    """One term for each of the triplets (a, p, n)."""
    terms = Terms(truth)
    measured = call.objective == "triplet"  # where many tuples count, distances come from products
    losses = LOSS[call.options["loss"]](triplets_of(truth, a, p, n, measured), call.options)
    terms.count, terms.nonzero, terms.flips = len(a), int(losses.counts.sum()), int(losses.may_flip.sum())
    if call.options["reduction"] == "mean_nonzero":
        losses = losses.above_zero()
    np.add.at(terms.value, a, losses.value)
    np.add.at(terms.off, a, np.maximum(losses.high - losses.value, losses.value - losses.low) + losses.lost)
    np.add.at(terms.jump, a, losses.jump)
    np.add.at(terms.size, a, losses.size)
    for other, side in ((p, losses.ap), (n, losses.an)):
        for name, part in vars(side).items():
            np.add.at(getattr(terms, name), (a, other), part)
    return terms


def triplet(truth: Truth, call: Call, picks: Picks | None) -> list[Terms]:
    assert picks is not None
    a = np.nonzero((picks.positive >= 0) & (picks.negative >= 0))[0]
    return [add_triplets(truth, call, a, picks.positive[a], picks.negative[a])]


def batch_all(truth: Truth, call: Call, picks: Picks | None) -> list[Terms]:
    a, p, n = np.nonzero(truth.positives[:, :, None] & truth.negatives[:, None, :])
    terms = add_triplets(truth, call, a, p, n)
    if call.options["loss"] == "soft_margin":  # never 0, so all of them are active
        terms.nonzero, terms.flips = terms.count, 0
    return [terms]


def semi_hard(truth: Truth, call: Call, picks: Picks | None) -> list[Terms]:
    """For each (a, p) one term: with the nearest negative strictly farther than p, else with the farthest."""
    terms, margin = Terms(truth), call.options["margin"]
    a, p = np.nonzero(truth.positives & truth.negatives.any(1, keepdims=True))
    if not len(a):
        return [terms]
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
    return [terms]


def log_sum_with_one(exponent: Array, mask: Array) -> Array:
    """ln(1 + the sum of e^exponent over the mask), by row."""
    all_of = np.concatenate([np.where(mask, exponent, -np.inf), np.zeros((len(exponent), 1), Real)], 1)
    return np.logaddexp.reduce(all_of, axis=1)


def multi_similarity(truth: Truth, call: Call, picks: Picks | None) -> list[Terms]:
    terms, d, error, options = Terms(truth), truth.d, truth.error, call.options
    valid = truth.positives.any(1) & truth.negatives.any(1)
    if not valid.any():
        return [terms]
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
    return [terms]


def pair_hinges(truth: Truth, pairs: Array, sign: int, end: Array) -> Terms:
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


def log_sum(exponent: Array, mask: Array) -> Array:
    """The log of the sum of e^exponent over the mask, by row."""
    none = np.full((len(exponent), 1), -np.inf, Real)
    return np.logaddexp.reduce(np.concatenate([np.where(mask, exponent, -np.inf), none], 1), axis=1)


class LogSum:
    """The log of the sum of e^(−rate·d) over a mask, the shares in that sum, and between what they lie."""

    def __init__(self, truth: Truth, mask: Array, rate: Array) -> None:
        near, far = truth.d - truth.error, truth.d + truth.error
        self.value, self.high, self.low = (log_sum(-rate * d, mask) for d in (truth.d, near, far))
        self.share = self.exp(mask, -rate * truth.d, self.value)
        self.most = np.minimum(self.exp(mask, -rate * near, self.low), 1)
        self.least = self.exp(mask, -rate * far, self.high)
        self.size = rate * (self.share * truth.size).sum(1)

    @staticmethod
    def exp(mask: Array, exponent: Array, log: Array) -> Array:
        found = mask & np.isfinite(log)[:, None]
        return np.exp(np.where(found, exponent - np.where(np.isfinite(log), log, 0)[:, None], -np.inf))


def spread(value: Array, low: Array, high: Array) -> Array:
    """How far from the value it is to either end."""
    return np.maximum(high - value, value - low)


def supcon(truth: Truth, call: Call, picks: Picks | None) -> list[Terms]:
    """Of an anchor with positives P and candidates A: Σ_P d_ap/(τ·#P) + ln Σ_A e^(−d/τ), since S = 1 − d."""
    terms, rate = Terms(truth), 1 / Real(call.options["temperature"])
    positives = truth.positives & truth.both_kinds
    counted = positives.any(1)
    among = (truth.positives | truth.negatives) & counted[:, None]
    weight = positives / np.maximum(positives.sum(1, keepdims=True), 1).astype(Real)
    log, ulp = LogSum(truth, among, rate), 8 * truth.type.eps

    def value(d: Array, log: Array) -> Array:
        return np.where(counted, rate * (weight * d).sum(1) + np.where(counted, log, 0), 0)

    terms.value = value(truth.d, log.value)
    low, high = value(truth.d - truth.error, log.low), value(truth.d + truth.error, log.high)
    # An anchor with a single candidate has none that the positive is against: its loss is 0.
    alone = among.sum(1) == 1
    terms.value, low, high = (np.where(alone, 0, part) for part in (terms.value, low, high))
    # The log of a sum that is 1 and a little more is off by the rounding of 1.
    lost = np.where(counted & ~alone, ulp, 0)
    terms.off = spread(terms.value, low, high) + lost
    terms.size = np.where(counted, rate * (weight * truth.size).sum(1) + log.size + 1, 0) + terms.value
    terms.count, terms.nonzero = int(counted.sum()), int((counted & (terms.value > 0)).sum())
    terms.flips = int((counted & (low < truth.type.tiny + lost) & (high + lost > 0)).sum())

    terms.slope = rate * (weight - log.share)
    size = rate * truth.size + log.size[:, None]
    terms.wobble = rate * (spread(log.share, log.least, log.most) + ulp * (weight + log.most))
    terms.wobble += rate * truth.type.tiny * among
    terms.bend = rate * (log.most * size + weight + log.most)
    for part in (terms.slope, terms.wobble, terms.bend):
        part[alone] = 0
    return [terms]


def info_nce(truth: Truth, call: Call, picks: Picks | None) -> list[Terms]:
    """For every positive pair softplus(d_ap/τ + ln Σ_N e^(−d_an/τ)), since S = 1 − d."""
    terms, rate = Terms(truth), 1 / Real(call.options["temperature"])
    d, error, tiny = truth.d, truth.error, truth.type.tiny
    kept = possibly = truth.positives & truth.both_kinds
    near, far = d - error, d + error
    if call.options["positive"] == "easy" and kept.any():
        anchors = np.nonzero(kept.any(1))[0]
        first = np.where(kept, d, np.inf)[anchors].argmin(1)
        limit = np.where(kept, far, np.inf).min(1, keepdims=True)
        possibly = kept & (near <= limit)
        kept = np.zeros_like(possibly)
        kept[anchors, first] = True
        near, far = np.where(possibly, near, np.inf).min(1, keepdims=True) + 0 * d, limit + 0 * d
    log = LogSum(truth, truth.negatives & possibly.any(1, keepdims=True), rate)
    z, low, high = (
        rate * x + part[:, None] for x, part in ((d, log.value), (near, log.low), (far, log.high))
    )
    value, least, most = (np.where(kept, softplus(x), 0) for x in (z, low, high))
    terms.value = value.sum(1)
    terms.off = (spread(value, least, most) + np.where(most > truth.quantum / 4, tiny, 0)).sum(1)
    parts = np.where(most > 0, rate * truth.size + log.size[:, None], 0)
    terms.size = (parts * kept).sum(1) + terms.value
    terms.count, terms.nonzero = int(kept.sum()), int((value > 0).sum())
    terms.flips = int(((least < tiny) & (most > 0)).sum())

    pull, lowest, highest = (np.where(possibly, sigmoid(x), 0) for x in (z, low, high))
    several = possibly.sum(1, keepdims=True) > 1
    flip = np.where((possibly != kept) | (kept & several & (call.options["positive"] == "easy")), highest, 0)
    pulled = np.where(kept, pull, 0)
    terms.slope = rate * pulled
    terms.wobble = rate * (np.where(kept, spread(pull, lowest, highest), 0) + flip)
    terms.flip = rate * flip
    terms.bend = rate * highest * (rate * truth.size + log.size[:, None])
    # Each negative has its share in what the positives are pulled with.
    total, fewest, at_most = (
        np.where(kept, part, 0).sum(1, keepdims=True) for part in (pull, lowest, highest)
    )
    terms.slope -= rate * total * log.share
    terms.wobble += rate * spread(total * log.share, fewest * log.least, at_most * log.most)
    terms.wobble += rate * (8 * truth.type.eps * total * log.share + tiny * (log.share > 0))
    terms.bend += rate * at_most * log.most * (1 + rate * truth.size + log.size[:, None])
    return [terms]


def pairs(truth: Truth, call: Call, picks: Picks | None) -> tuple[Array, Array]:
    """Masks of the positive and of the negative pairs that count."""
    positives, negatives = truth.positives, truth.negatives
    candidate = np.arange(len(truth.y))
    if picks is not None and call.options["positive"] != "all":
        positives = picks.positive[:, None] == candidate
    if picks is not None and call.options["negative"] != "all":
        negatives = picks.negative[:, None] == candidate
    return positives & truth.both_kinds, negatives & truth.both_kinds


def contrastive(truth: Truth, call: Call, picks: Picks | None) -> list[Terms]:
    positives, negatives = pairs(truth, call, picks)
    start, end = Real(call.options["pos_margin"]), Real(call.options["neg_margin"])
    return [pair_hinges(truth, positives, 1, start), pair_hinges(truth, negatives, -1, end)]


def beta_margin(truth: Truth, call: Call, picks: Picks | None) -> list[Terms]:
    positives, negatives = pairs(truth, call, picks)
    kind = truth.batch.compute_type()
    beta = real(learned_by_anchor(truth.batch.plain(), learned_of(call, kind)))[:, None]
    pull = pair_hinges(truth, positives, 1, beta - call.options["alpha"])
    push = pair_hinges(truth, negatives, -1, beta + call.options["alpha"])
    pull.nonzero = push.nonzero = pull.nonzero + push.nonzero
    pull.flips = push.flips = pull.flips + push.flips
    return [pull, push]


OBJECTIVE: dict[str, Callable[[Truth, Call, Picks | None], list[Terms]]] = {
    "triplet": triplet,
    "batch_all": batch_all,
    "semi_hard": semi_hard,
    "multi_similarity": multi_similarity,
    "supcon": supcon,
    "info_nce": info_nce,
    "contrastive": contrastive,
    "beta_margin": beta_margin,
}


def terms_of(truth: Truth, call: Call, picks: Picks | None) -> list[Terms]:
    return OBJECTIVE[call.objective](truth, call, picks)
