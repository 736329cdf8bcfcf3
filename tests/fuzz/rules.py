"""Which candidates each rule may pick: a function for each word.

A rule has to pick the right candidate as far as rounding lets it know. Squared distances may be off by a
bound; the hash that uniform draws go by is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.fuzz.oracle import Array, Real, Truth


class Scan(NamedTuple):
    """One side of the triplets, to be picked."""

    truth: Truth
    eligible: Array  # (N, M), the candidates of this side
    others: Array  # (N, M), those of the other side
    options: dict[str, Any]
    pick: Array  # (N,), what was picked; −1 for none
    distance: Array  # (N,), as reported; NaN for none
    positive: Array  # the same of the positives, which come first
    d_ap: Array


class Acceptable(NamedTuple):
    picks: Array  # (N, M)
    nobody: Array  # (N,), whether an anchor may go without


def one_of_each(scan: Scan, picks: Array) -> Acceptable:
    """An anchor goes without a pick where it has no candidate, and only there."""
    return Acceptable(picks & scan.eligible, ~scan.eligible.any(1))


def mask_of(truth: Truth, anchors: Array, candidates: Array) -> Array:
    mask = np.zeros_like(truth.positives)
    mask[anchors, candidates] = True
    return mask


def best_of(truth: Truth, score: Array, eligible: Array) -> tuple[Array, Array]:
    """The anchors that have a candidate, and the candidate with the lowest score of each."""
    anchors = np.nonzero(eligible.any(1))[0]
    return anchors, np.where(eligible, score, np.inf)[anchors].argmin(1) if len(anchors) else anchors


def repeated(scan: Scan) -> Array:
    """Candidates that an earlier one is exactly as far as: a duplicate, or anything seen from a zero row."""
    truth = scan.truth
    earlier = np.tril(truth.equal_candidates, -1)
    after_duplicate = scan.eligible.astype(np.float32) @ earlier.T.astype(np.float32) > 0
    after_any = scan.eligible.cumsum(1) > scan.eligible
    return after_duplicate | (truth.equidistant[:, None] & after_any)


def extreme(scan: Scan, sign: int) -> Acceptable:
    """The nearest candidate (sign 1) or the farthest (sign −1)."""
    truth = scan.truth
    anchors, best = best_of(truth, sign * truth.square, scan.eligible)
    bound = truth.bound_of(mask_of(truth, anchors, best)) + truth.key_error[anchors]
    bound = bound + truth.key_error[anchors, best][:, None]
    close = np.zeros_like(scan.eligible)
    close[anchors] = np.abs(truth.square[anchors] - truth.square[anchors, best][:, None]) <= bound
    return one_of_each(scan, close & ~repeated(scan))


def nearest(scan: Scan) -> Acceptable:
    return extreme(scan, 1)


def farthest(scan: Scan) -> Acceptable:
    return extreme(scan, -1)


def largest_hash(scan: Scan) -> Array:
    anchors, first = best_of(scan.truth, -scan.truth.noise, scan.eligible)
    return mask_of(scan.truth, anchors, first)


def uniform(scan: Scan) -> Acceptable:
    return one_of_each(scan, largest_hash(scan))


def uniform_of_some(scan: Scan, surely: Array, possibly: Array) -> Acceptable:
    """A uniform one of some candidates; of all if these are none."""
    hash_of_sure = np.where(surely, scan.truth.noise, -1).max(1, initial=-1)[:, None]
    drawn = possibly & (scan.truth.noise >= hash_of_sure)
    return one_of_each(scan, drawn | (largest_hash(scan) & ~surely.any(1, keepdims=True)))


def softhard(scan: Scan, sign: int) -> Acceptable:
    """A uniform one of those farther than the nearest of the other side (sign 1), or nearer than the farthest
    (sign −1)."""
    truth, (d, error) = scan.truth, (sign * scan.truth.d, scan.truth.error)
    square = sign * truth.square
    surely, possibly = np.zeros_like(scan.eligible), np.zeros_like(scan.eligible)
    anchors, best = best_of(truth, square, scan.others)
    if not len(anchors):
        return uniform(scan)
    limit = square[anchors, best][:, None]
    right = mask_of(truth, anchors, best)
    right[anchors] |= scan.eligible[anchors] & (square[anchors] > limit)
    bound = truth.bound_of(right) + truth.key_error[anchors] + truth.key_error[anchors, best][:, None]
    # Any of the other side within the bound may have been taken for the extreme one. Either squared distances
    # are compared, or the distances that would be reported.
    taken = scan.others[anchors] & (square[anchors] <= limit + bound)
    d, error = d[anchors], error[anchors]
    least, most = (
        np.where(taken, d - error, np.inf).min(1, keepdims=True),
        np.where(taken, d + error, -np.inf).max(1, keepdims=True),
    )
    surely[anchors] = (square[anchors] > limit + bound) & (d - error > most)
    possibly[anchors] = (square[anchors] > limit - bound) | (d + error > least)
    # Nothing is farther than its duplicate, nor than anything else seen from a zero row.
    differs = taken.astype(np.float32) @ (~truth.equal_candidates).astype(np.float32) > 0
    possibly[anchors] &= differs & ~truth.equidistant[anchors][:, None]
    return uniform_of_some(scan, surely & possibly & scan.eligible, possibly & scan.eligible)


def softhard_positive(scan: Scan) -> Acceptable:
    return softhard(scan, 1)


def softhard_negative(scan: Scan) -> Acceptable:
    return softhard(scan, -1)


def beyond(scan: Scan) -> Acceptable:
    return farther_by(scan, Real(scan.options["offset"]))


def semihard(scan: Scan) -> Acceptable:
    return farther_by(scan, Real(0))


def farther_by(scan: Scan, offset: Array) -> Acceptable:
    """The nearest negative strictly farther than d_ap + offset, of reported distances, if there is any."""
    truth, floor = scan.truth, scan.d_ap + offset
    picks, nobody = np.zeros_like(scan.eligible), np.ones(len(scan.eligible), bool)
    rows = np.nonzero(scan.eligible.any(1) & (scan.positive >= 0))[0]
    p = scan.positive[rows]
    if not len(rows):
        return Acceptable(picks, nobody)
    eligible, floor = scan.eligible[rows], floor[rows][:, None]
    square, d, error = truth.square[rows], truth.d[rows], truth.error[rows]
    threshold, threshold_off = floor_of_squares(truth, floor)
    farther = np.where(eligible & (square > threshold), square, np.inf)
    there = np.isfinite(farther).any(1)
    right = mask_of(truth, rows[there], farther[there].argmin(1)) | mask_of(truth, rows, p)
    bound = truth.bound_of(right) + truth.key_error[rows] + truth.key_error[rows, p][:, None] + threshold_off
    # The threshold is a key as well. Distances as they are reported decide what is strictly farther. Where
    # the keys found something that is not, they decide what is nearest, too.
    surely = eligible & (square > threshold + bound) & (d - error > floor)
    nearest, reported = (
        np.where(surely, most, np.inf).min(1, keepdims=True) for most in (square + bound, d + error)
    )
    picks[rows] = eligible & (square >= threshold - bound)
    picks[rows] &= (square <= nearest + bound) | (d - error <= reported)
    picks &= ~repeated(scan)
    wrong = np.nonzero((scan.pick >= 0) & ~(scan.distance > scan.d_ap + offset))[0]
    picks[wrong, scan.pick[wrong]] = False  # not strictly farther
    nobody[rows] = ~surely.any(1)
    return Acceptable(picks, nobody)


def floor_of_squares(truth: Truth, floor: Array) -> tuple[Array, Array]:
    """The squared distance that belongs to a distance, and what a rounding of that distance does to it."""

    def squared(distance: Array) -> Array:
        if truth.distance == "euclidean":
            return np.square(distance)
        return 2 * distance if truth.distance == "cosine" else distance

    size = np.abs(floor)
    off = squared(size + truth.type.eps * size + truth.quantum) - squared(size)
    return np.where(floor < 0, -np.inf, squared(floor)), np.where(floor < 0, 0, off)


def drawn_by_distance(scan: Scan) -> Acceptable:
    """The largest key, log weight plus Gumbel noise, as far as keys differ clearly."""
    truth, cutoff, limit = scan.truth, scan.options["cutoff"], scan.options["nonzero_loss_cutoff"]
    width = truth.width
    gumbel = -np.log(-np.log((truth.noise + Real(0.5)) / 2**32))
    d = np.maximum(np.sqrt(truth.cosine_square), cutoff)
    height = np.maximum(1 - np.square(d) / 4, 2.0**-20)
    log_weight = (2 - width) * np.log(d) + (3 - width) / 2 * np.log(height)
    off = truth.promised * 4  # unit rows lie within a radius of 1, and centring leaves none longer than 2
    slope = abs(2 - width) / 2 / np.square(d) + abs(3 - width) / 8 / height
    terms = abs(2 - width) * np.abs(np.log(d)) + abs(3 - width) / 2 * np.abs(np.log(height)) + np.abs(gumbel)
    tolerance = slope * off + 8 * truth.type.eps * (1 + terms)
    key = log_weight + gumbel
    surely = possibly = scan.eligible
    if limit is not None:
        surely = scan.eligible & (np.square(d) + off < limit**2)
        possibly = scan.eligible & (np.square(d) - off < limit**2)
    best = np.where(surely, key - tolerance, -np.inf).max(1, initial=-np.inf, keepdims=True)
    drawn = possibly & (key + tolerance >= best)
    return one_of_each(scan, drawn | (largest_hash(scan) & ~surely.any(1, keepdims=True)))


Judge = Callable[[Scan], Acceptable]
POSITIVE: dict[str, Judge] = {
    "hard": farthest,
    "easy": nearest,
    "random": uniform,
    "softhard": softhard_positive,
}
NEGATIVE: dict[str, Judge] = {
    "hard": nearest,
    "semihard": semihard,
    "beyond": beyond,
    "softhard": softhard_negative,
    "easy": farthest,
    "random": uniform,
    "distance": drawn_by_distance,
}
