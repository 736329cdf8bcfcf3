"""The best candidate of every anchor, by (key, row): what rules search for, as consumers of the walk."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tripletops.backends.triton.device import NOBODY, improve, least_of
from tripletops.backends.triton.rows import Rows
from tripletops.backends.triton.tiles import RANKS as CARRIED
from tripletops.backends.triton.walk import (
    IDLE,
    KEYS,
    Consumer,
    Keeper,
    of_rank,
    of_ranks,
    of_split,
    padded_ranks,
    walk,
)

NO_ROW: int = NOBODY.value


class Best(NamedTuple):
    """(splits, ranks, L): keys, infinite for none, and rows."""

    key: Tensor
    row: Tensor


# One candidate for each anchor. The state is (key, row).


@triton.jit
def start_best(given, anchors, KIND: tl.constexpr, RANKS: tl.constexpr):
    return (
        tl.full(anchors.position.shape, float("inf"), KIND),
        tl.full(anchors.position.shape, NOBODY, tl.int32),
    )


@triton.jit
def take_nearest(state, given, anchors, candidates, RANKS: tl.constexpr):
    best, row = state
    key, found = least_of(tl.where(candidates.eligible, candidates.value, float("inf")), candidates.row)
    return improve(key, found, best, row)


@triton.jit
def take_farthest(state, given, anchors, candidates, RANKS: tl.constexpr):
    best, row = state
    key, found = least_of(tl.where(candidates.eligible, -candidates.value, float("inf")), candidates.row)
    return improve(key, found, best, row)


@triton.jit
def _take_given(state, given, anchors, candidates, RANKS: tl.constexpr):
    best, row = state
    wanted = candidates.row[None, :] == tl.load(given.row + anchors.position)[:, None]
    wanted = candidates.eligible & wanted
    key, found = least_of(tl.where(wanted, candidates.value, float("inf")), candidates.row)
    return improve(key, found, best, row)


@triton.jit
def store_best(state, out, anchors, RANKS: tl.constexpr):
    """Whatever else the state holds is dropped."""
    at = of_split(anchors)
    tl.store(out.key + at, state[0])
    tl.store(out.row + at, state[1])


# For each of an anchor's floors the nearest candidate above it. The state has a column for each rank.


@triton.jit
def start_ranks(given, anchors, KIND: tl.constexpr, RANKS: tl.constexpr):
    shape: tl.constexpr = (anchors.position.shape[0], RANKS)
    return tl.full(shape, float("inf"), KIND), tl.full(shape, NOBODY, tl.int32)


@triton.jit
def take_beyond(state, given, anchors, candidates, RANKS: tl.constexpr):
    best, row = state
    values = candidates.value
    for k in range(RANKS):
        floor = tl.load(given.floors + of_rank(anchors, k, RANKS))
        above = candidates.eligible & (values > floor[:, None])
        key, found = least_of(tl.where(above, values, float("inf")), candidates.row)
        here = (tl.arange(0, RANKS) == k)[None, :]
        rank_key = tl.where(here, key[:, None], float("inf"))
        rank_found = tl.where(here, found[:, None], NOBODY)
        best, row = improve(rank_key, rank_found, best, row)
    return best, row


@triton.jit
def store_ranks(state, out, anchors, RANKS: tl.constexpr):
    best, row = state
    at = of_ranks(anchors, RANKS)
    tl.store(out.key + at, best)
    tl.store(out.row + at, row)


NEAREST = Consumer(start_best, take_nearest, store_best)
FARTHEST = Consumer(start_best, take_farthest, store_best)
_GIVEN = Consumer(start_best, _take_given, store_best)
_BEYOND = Consumer(start_ranks, take_beyond, store_ranks)


class Given(NamedTuple):
    row: Tensor  # (L,) int32, the candidate whose key is asked for


class Floors(NamedTuple):
    floors: Tensor  # (ranks, L), keys


def fresh(rows: Rows, splits: int, ranks: int = 1) -> Best:
    half = rows.anchors.half
    shape = (splits, ranks, len(half))
    row = torch.full(shape, NO_ROW, dtype=torch.int32, device=half.device)
    return Best(half.new_full(shape, torch.inf), row)


def merged(best: Best) -> tuple[Tensor, Tensor]:
    """(ranks, L) the least keys over all splits and the lowest row that has each; −1 for none."""
    least = best.key.amin(0)
    row = best.row.where(best.key == least, NO_ROW).amin(0)
    return least, row.where(row < NO_ROW, -1)


class Extreme(NamedTuple):
    """By position: the key, half a squared distance, infinite for none; the row, −1 for none."""

    key: Tensor
    row: Tensor


def search(
    rows: Rows, positive: Consumer | None = None, negative: Consumer | None = None
) -> tuple[Extreme | None, Extreme | None]:
    """The extreme positive and the extreme negative of every anchor, in one walk."""

    def keeper(consumer: Consumer | None) -> Keeper:
        return IDLE if consumer is None else Keeper(consumer, (), lambda splits: fresh(rows, splits))

    def found(consumer: Consumer | None, best: Best) -> Extreme | None:
        if consumer is None:
            return None
        key, row = merged(best)
        return Extreme(-key[0] if consumer is FARTHEST else key[0], row[0])

    kept = walk(rows, "select", KEYS, positives=keeper(positive), negatives=keeper(negative))
    return found(positive, kept[0]), found(negative, kept[1])


def keys_of(rows: Rows, positive: Tensor) -> Tensor:
    """(L,) the keys of given positives, which are rows."""
    keeper = Keeper(_GIVEN, Given(positive), lambda splits: fresh(rows, splits))
    best, _ = walk(rows, "select", KEYS, positives=keeper)
    return merged(best)[0][0]


def nearest_beyond(rows: Rows, floors: Tensor) -> Tensor:
    """(ranks, L) rows: the nearest negative strictly above each of the (ranks, L) floors, −1 for none."""
    carried = 1 if len(floors) == 1 else CARRIED
    padded, chunks = padded_ranks(floors, carried, torch.inf)
    keeper = Keeper(_BEYOND, Floors(padded), lambda splits: fresh(rows, splits, len(padded)))
    _, best = walk(rows, "select", KEYS, negatives=keeper, ranks=carried, chunks=chunks)
    return merged(best)[1][: len(floors)]
