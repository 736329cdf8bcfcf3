"""The best candidate of every anchor, by (key, row): what rules search for, as consumers of the walk."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tripletops.backends.triton.device import NOBODY, improve, least_of
from tripletops.backends.triton.rows import Rows
from tripletops.backends.triton.tiles import MERGED, launch
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


class Best(NamedTuple):
    """(splits, ranks, L): keys, infinite for none, and rows, NOBODY for none (−1 once merged)."""

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
    shape = (splits, ranks, rows.length)
    key = torch.empty(shape, dtype=rows.kind, device=rows.device)
    return Best(key, torch.empty(shape, dtype=torch.int32, device=rows.device))


@triton.jit
def best_of(best, at, inside, splits, length):
    """The least key over all splits and the lowest row that has it; NOBODY for none."""
    row = tl.load(best.row + at, inside, NOBODY)
    key = tl.load(best.key + at, inside, 0)
    for split in range(1, splits):
        there = at + split * length.to(tl.int64)
        key, row = improve(
            tl.load(best.key + there, inside, 0), tl.load(best.row + there, inside, NOBODY), key, row
        )
    return key, row


@triton.jit
def merge_kernel(
    best, otherwise, out, splits, other_splits, length,
    NEGATED: tl.constexpr, OTHERWISE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = at < length
    key, row = best_of(best, at, inside, splits, length)
    if OTHERWISE:
        _, other = best_of(otherwise, at, inside, other_splits, length)
        row = tl.where(row == NOBODY, other, row)
    else:
        none: tl.constexpr = float("inf") if key.dtype.is_floating() else 2**31 - 1
        key = tl.where(row == NOBODY, none, -key if NEGATED else key)
    tl.store(out.key + at, key, inside)
    tl.store(out.row + at, tl.where(row == NOBODY, -1, row), inside)


def merged(best: Best, otherwise: Best | None = None, negated: bool = False) -> Best:
    """What all splits have kept; where that is nobody, what the splits of `otherwise` have.

    Nobody is −1, with an infinite key. `negated`: keys change their sign.
    """
    splits, *shape = best.row.shape
    out = Best(best.key.new_empty((1, *shape)), best.row.new_empty((1, *shape)))
    launch(
        merge_kernel,
        (-(-out.row.numel() // MERGED),),
        best.row.device,
        best=best,
        otherwise=best if otherwise is None else otherwise,
        out=out,
        splits=splits,
        other_splits=splits if otherwise is None else len(otherwise.row),
        length=out.row.numel(),
        NEGATED=negated,
        OTHERWISE=otherwise is not None,
        ROWS=MERGED,
    )
    return out


def search(
    rows: Rows, positive: Consumer | None = None, negative: Consumer | None = None
) -> tuple[Best | None, Best | None]:
    """The extreme positive and the extreme negative of every anchor, in one walk.

    The keys of the farthest are negated.
    """

    def keeper(consumer: Consumer | None) -> Keeper:
        return IDLE if consumer is None else Keeper(consumer, (), lambda splits: fresh(rows, splits))

    kept = walk(rows, "select", KEYS, positives=keeper(positive), negatives=keeper(negative))
    return kept[0] if positive else None, kept[1] if negative else None


def keys_of(rows: Rows, positive: Tensor) -> Tensor:
    """(1, 1, L) the keys of given positives, which are rows."""
    keeper = Keeper(_GIVEN, Given(positive), lambda splits: fresh(rows, splits))
    best, _ = walk(rows, "select", KEYS, positives=keeper)
    return merged(best).key


def nearest_beyond(rows: Rows, floors: Tensor) -> Best:
    """The nearest negative strictly above each of the (ranks, L) floors."""
    carried = 1 if len(floors) == 1 else CARRIED
    padded, chunks = padded_ranks(floors, carried, torch.inf)
    keeper = Keeper(_BEYOND, Floors(padded), lambda splits: fresh(rows, splits, len(padded)))
    best: Best = walk(rows, "select", KEYS, negatives=keeper, ranks=carried, chunks=chunks)[1]
    return best
