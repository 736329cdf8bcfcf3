"""The walk over all pairs, tile by tile: one kernel, whose consumers keep what rules and objectives ask for.

Every program owns the rows it writes: no atomics, the same bits run after run. Prepared rows (`rows.Tiled`)
are addressed by position: ordered by class, so that a row's positives lie in one range, and padded to whole
tiles. A walk over all candidates is shared out over `splits`, and the host merges what each of them kept.

A consumer is three device functions:

    start(given, anchors, KIND, RANKS) → state
    take(state, given, anchors, candidates, RANKS) → state
    store(state, out, anchors, RANKS)

`given` and `out` are tuples of pointers of its own, `anchors` and `candidates` the records below. KIND is the
type of the computation. A program carries RANKS thresholds or floors of each of its anchors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tripletops.backends.triton.device import (
    half_squares,
    negative_distances,
    same_class,
    share_of,
    within_classes,
)
from tripletops.backends.triton.rows import Rows
from tripletops.backends.triton.tiles import Tile, launch, shares, with_tile

# What a tile's values are.
NO_VALUES: tl.constexpr = tl.constexpr(0)
KEYS: tl.constexpr = tl.constexpr(1)  # half squared distances of framed rows: what selection compares
DISTANCES: tl.constexpr = tl.constexpr(2)  # those of negatives; where products cannot tell, measured


class Anchors(NamedTuple):
    """Those of a program."""

    position: Any  # (ROWS,)
    length: Any  # how many positions there are for all programs
    split: Any  # which share of the candidates the program walks over
    chunk: Any  # which RANKS of their ranks the program carries


class Candidates(NamedTuple):
    """A tile: the anchors of a program with some candidates."""

    value: Any  # (ROWS, COLUMNS)
    eligible: Any  # (ROWS, COLUMNS), whether a pair counts
    position: Any  # (COLUMNS,)
    row: Any  # (COLUMNS,), −1: nobody


@triton.jit
def of_split(anchors):
    """(ROWS,) where the anchors lie in a tensor (splits, L)."""
    return anchors.split.to(tl.int64) * anchors.length + anchors.position


@triton.jit
def of_rank(anchors, k, RANKS: tl.constexpr):
    """(ROWS,) where the anchors lie in a tensor (ranks, L), at the k-th rank that the program carries."""
    return (anchors.chunk * RANKS + k).to(tl.int64) * anchors.length + anchors.position


@triton.jit
def of_ranks(anchors, RANKS: tl.constexpr):
    """(ROWS, RANKS) where the anchors lie in a tensor (splits, ranks, L)."""
    rank = (anchors.split * tl.num_programs(2) + anchors.chunk) * RANKS + tl.arange(0, RANKS)
    return rank.to(tl.int64)[None, :] * anchors.length + anchors.position[:, None]


# Padding and ignored rows have no distances. What is kept of their keys is for the host to drop.


@triton.jit
def walk_kernel(
    x, y, places, positive_given, positive_out, negative_given, negative_out, frame,
    x_length, y_length, width, tiles,
    POSITIVE: tl.constexpr, NEGATIVE: tl.constexpr, ONLY_POSITIVES: tl.constexpr, VALUES: tl.constexpr,
    RANKS: tl.constexpr, DISTANCE: tl.constexpr, ZERO_ROWS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    anchors = Anchors(position=rows, length=x_length, split=tl.program_id(1), chunk=tl.program_id(2))
    class_begin, class_end = tl.load(places.begin + rows), tl.load(places.end + rows)
    own = tl.load(places.self_position + rows)[:, None]
    kind: tl.constexpr = x.half.dtype.element_ty
    positive = POSITIVE.start(positive_given, anchors, kind, RANKS)
    negative = NEGATIVE.start(negative_given, anchors, kind, RANKS)
    if VALUES == DISTANCES:
        row_half = tl.load(x.half + rows)
        alive = (tl.load(x.row + rows) >= 0)[:, None]

    start, stop = share_of(anchors.split, tiles, y_length, COLUMNS)
    if ONLY_POSITIVES:
        start, stop = within_classes(start, stop, class_begin, class_end, y_length, COLUMNS)
    for column in range(start, stop, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        index = tl.load(y.row + columns)
        usable = (index >= 0)[None, :] & (columns[None, :] != own)
        if VALUES == DISTANCES:
            usable = usable & alive
        same = same_class(columns[None, :], class_begin[:, None], class_end[:, None])
        if VALUES == KEYS:
            values = half_squares(x, y, rows, columns, width, ZERO_ROWS, DEPTH, PRECISION)
        elif VALUES == DISTANCES:
            values, _ = negative_distances(
                x, y, frame, usable & ~same, row_half, rows, columns, width,
                DISTANCE, ZERO_ROWS, DEPTH, PRECISION,
            )  # fmt: skip
        else:
            values = tl.zeros((ROWS, COLUMNS), kind)
        positives = Candidates(value=values, eligible=usable & same, position=columns, row=index)
        negatives = Candidates(value=values, eligible=usable & ~same, position=columns, row=index)
        positive = POSITIVE.take(positive, positive_given, anchors, positives, RANKS)
        negative = NEGATIVE.take(negative, negative_given, anchors, negatives, RANKS)
    POSITIVE.store(positive, positive_out, anchors, RANKS)
    NEGATIVE.store(negative, negative_out, anchors, RANKS)


class Consumer(NamedTuple):
    """What a walk keeps of one kind of candidates: device functions."""

    start: Any
    take: Any
    store: Any


@triton.jit
def _idle_start(given, anchors, KIND: tl.constexpr, RANKS: tl.constexpr):
    return anchors.position


@triton.jit
def _idle_take(state, given, anchors, candidates, RANKS: tl.constexpr):
    return state


@triton.jit
def _idle_store(state, out, anchors, RANKS: tl.constexpr):
    pass


class Keeper(NamedTuple):
    """A consumer with what it is given, and what makes its outputs for a number of splits."""

    consumer: Consumer
    given: tuple[Any, ...] = ()
    out: Callable[[int], tuple[Tensor, ...]] = lambda splits: ()


IDLE = Keeper(Consumer(_idle_start, _idle_take, _idle_store))


def walk(
    rows: Rows,
    tile_of: str,
    values: tl.constexpr,
    *,
    positives: Keeper = IDLE,
    negatives: Keeper = IDLE,
    ranks: int = 1,
    chunks: int = 1,
) -> tuple[Any, Any]:
    """The outputs of both keepers, dimension 0 being the splits. `tile_of` is a row of the table of tiles."""
    x, y = rows.anchors, rows.candidates
    length, others = len(x.row), len(y.row)

    def run(tile: Tile) -> tuple[Any, Any]:
        blocks = length // tile.rows
        splits, tiles = shares(x.row.device, blocks * chunks, others // tile.columns)
        kept = positives.out(splits), negatives.out(splits)
        launch(
            walk_kernel,
            (blocks, splits, chunks),
            x.row.device,
            tile,
            x=x.tiled,
            y=y.tiled,
            places=rows.places,
            positive_given=positives.given,
            positive_out=kept[0],
            negative_given=negatives.given,
            negative_out=kept[1],
            frame=rows.frame,
            x_length=length,
            y_length=others,
            width=x.rows.shape[1],
            tiles=tiles,
            POSITIVE=positives.consumer,
            NEGATIVE=negatives.consumer,
            ONLY_POSITIVES=negatives is IDLE,
            VALUES=values.value,
            RANKS=ranks,
            DISTANCE=rows.distance if values is DISTANCES else None,  # keys are the same for several
            ZERO_ROWS=rows.zero_rows and values is not NO_VALUES,
        )
        return kept

    kinds = positives.consumer, negatives.consumer, ranks
    found: tuple[Any, Any] = with_tile(tile_of, x.rows, kinds, run)
    return found


def padded_ranks(by_rank: Tensor, carried: int, fill: float) -> tuple[Tensor, int]:
    """(chunks · carried, L) of (ranks, L), and how many chunks there are."""
    chunks = -(-len(by_rank) // carried)
    missing = chunks * carried - len(by_rank)
    if missing:
        by_rank = torch.cat([by_rank, by_rank.new_full((missing, by_rank.shape[1]), fill)])
    return by_rank, chunks
