"""FaceNet's negative for every (anchor, positive): the nearest one strictly farther than the positive, else
the farthest of all."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tripletops._words import OBJECTIVE
from tripletops.backends.triton.extremes import (
    Best,
    Floors,
    fresh,
    merged,
    start_best,
    start_ranks,
    store_ranks,
    take_beyond,
    take_farthest,
)
from tripletops.backends.triton.gradient import Pulling
from tripletops.backends.triton.objectives import Kept, ManyTuples, Shares, Terms, Upstream
from tripletops.backends.triton.pairs import Lists, measure
from tripletops.backends.triton.tiles import RANKS as CARRIED
from tripletops.backends.triton.walk import (
    KEYS,
    Consumer,
    Keeper,
    of_ranks,
    of_split,
    padded_ranks,
    walk,
)

# The keys of the positives of some ranks. The same tiles compute them as search for negatives, so that the
# keys of duplicates are equal.


class Ranked(NamedTuple):
    begin: Tensor  # (L,) int32, the position of the anchor's first rank


class Keys(NamedTuple):
    key: Tensor  # (splits, ranks, L), infinite for none


@triton.jit
def _start_keys(given, anchors, KIND: tl.constexpr, RANKS: tl.constexpr):
    return tl.full((anchors.position.shape[0], RANKS), float("inf"), KIND)


@triton.jit
def _take_rank(keys, given, anchors, candidates, RANKS: tl.constexpr):
    rank = candidates.position[None, :] - tl.load(given.begin + anchors.position)[:, None]
    for k in range(RANKS):
        wanted = candidates.eligible & (rank == anchors.chunk * RANKS + k)
        key = tl.min(tl.where(wanted, candidates.value, float("inf")), 1)
        here = (tl.arange(0, RANKS) == k)[None, :]
        keys = tl.minimum(keys, tl.where(here, key[:, None], float("inf")))
    return keys


@triton.jit
def _store_keys(keys, out, anchors, RANKS: tl.constexpr):
    tl.store(out.key + of_ranks(anchors, RANKS), keys)


_KEYS = Consumer(_start_keys, _take_rank, _store_keys)

# For each floor the nearest negative above it, and the farthest of all, in one walk.


class Found(NamedTuple):
    """As `extremes.Best`, twice."""

    key: Tensor
    row: Tensor
    farthest_key: Tensor
    farthest_row: Tensor


@triton.jit
def _start(given, anchors, KIND: tl.constexpr, RANKS: tl.constexpr):
    return start_ranks(given, anchors, KIND, RANKS), start_best(given, anchors, KIND, RANKS)


@triton.jit
def _take_beyond_or_farthest(state, given, anchors, candidates, RANKS: tl.constexpr):
    beyond, farthest = state
    beyond = take_beyond(beyond, given, anchors, candidates, RANKS)
    farthest = take_farthest(farthest, given, anchors, candidates, RANKS)
    return beyond, farthest


@triton.jit
def _store(state, out, anchors, RANKS: tl.constexpr):
    beyond, farthest = state
    store_ranks(beyond, out, anchors, RANKS)
    if anchors.chunk == 0:  # the others have found the same
        at = of_split(anchors)
        tl.store(out.farthest_key + at, farthest[0])
        tl.store(out.farthest_row + at, farthest[1])


_BEYOND_OR_FARTHEST = Consumer(_start, _take_beyond_or_farthest, _store)


# How many of an anchor's picks are kept.
_KEPT = len(OBJECTIVE["semi_hard"].saved)


class SemiHard(ManyTuples):
    def positive_keys(self, first: int, last: int) -> Tensor:
        """(ranks, L) infinite for none."""
        half, ranks = self.rows.anchors.half, last - first
        carried = 1 if ranks == 1 else CARRIED
        chunks = -(-ranks // carried)
        keeper = Keeper(
            _KEYS,
            Ranked(self.rows.begin + first),
            lambda splits: Keys(half.new_empty((splits, chunks * carried, self.length))),
        )
        kept, _ = walk(self.rows, "select", KEYS, positives=keeper, ranks=carried, chunks=chunks)
        keys: Tensor = kept.key.amin(0)[:ranks]
        return keys

    def beyond_or_farthest(self, floors: Tensor) -> tuple[Tensor, Tensor]:
        """(ranks, L) and (L,) rows, −1 for none."""
        rows = self.rows
        carried = 1 if len(floors) == 1 else CARRIED
        padded, chunks = padded_ranks(floors, carried, inf)
        keeper = Keeper(
            _BEYOND_OR_FARTHEST,
            Floors(padded),
            lambda splits: Found(*fresh(rows, splits, len(padded)), *fresh(rows, splits)),
        )
        _, found = walk(rows, "select", KEYS, negatives=keeper, ranks=carried, chunks=chunks)
        beyond = merged(Best(found.key, found.row))[1][: len(floors)]
        return beyond, merged(Best(found.farthest_key, found.farthest_row))[1][0]

    def pairs(self, first: int, last: int) -> tuple[Lists, Lists]:
        """The positives of these ranks and their negatives; the weights are 1 and −1 where active."""
        rows = self.rows
        positive, d_ap = self.positives(first, last)
        keys = self.positive_keys(first, last)
        negative, farthest = self.beyond_or_farthest(keys.where(positive >= 0, inf))
        negative = negative.where(positive >= 0, -1).contiguous()
        d_an = measure(rows, negative, d_ap)
        far = farthest.where(rows.valid, -1)[None]
        beyond = negative >= 0
        d_an = d_an.where(beyond, measure(rows, far))
        negative = negative.where(beyond, far).where(positive >= 0, -1)
        active = ((self.losses(d_ap, d_an) > 0) & (positive >= 0)).to(rows.kind)
        return Lists(positive, d_ap, active), Lists(negative, d_an, -active)

    def losses(self, d_ap: Tensor, d_an: Tensor) -> Tensor:
        return d_ap.double() - d_an.double() + self.numbers.margin

    def terms(self) -> Terms:
        losses, active = self.by_anchor(0), self.by_anchor(0)
        kept = losses.new_zeros((_KEPT, self.length), dtype=self.rows.kind)
        for first, last in self.ranks:
            positive, negative = self.pairs(first, last)
            terms = self.losses(positive.distance, negative.distance)
            losses += terms.where(positive.weight > 0, 0).sum(0)
            active += positive.weight.double().sum(0)
            countable = (negative.candidate + 1).where(negative.candidate < 1 << 24, 0)
            kept[first:last] = countable[: max(_KEPT - first, 0)]
        return self.terms_together(losses, active)._replace(saved=kept)

    def shares(self, positives_above_zero: Tensor, negatives_above_zero: Tensor) -> Shares:
        pairs = self.rows.positives.where(self.rows.valid, 0).sum()
        return self.shares_of(pairs.double(), negatives_above_zero)

    def pull(self, to: Pulling, kept: Kept, upstream: Upstream) -> None:
        for first, last in self.ranks:
            positive, negative = self.pairs(first, last)
            to.pairs(positive.candidate, positive.distance, positive.weight * upstream.positive)
            to.pairs(negative.candidate, negative.distance, negative.weight * upstream.negative)
