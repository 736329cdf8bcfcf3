"""What all negative pairs pull their rows with: the backward of a streamed cost."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tripletops.backends.triton.costs import Cost
from tripletops.backends.triton.device import (
    COSINE,
    EUCLIDEAN,
    multiply,
    negative_distances,
    same_class,
    share_of,
)
from tripletops.backends.triton.rows import SQEUCLIDEAN, Rows, Side
from tripletops.backends.triton.tiles import Tile, launch, shares, with_tile


@triton.jit
def add_near(sums, x, y, weight, near, rows, column, span, inside, width, COLUMNS: tl.constexpr):
    """What near pairs pull with, one column after the other.

    The difference of near rows has digits that the difference of two sums has lost.
    """
    a = tl.load(x.plain + rows.to(tl.int64)[:, None] * width + span[None, :], inside, 0.0).to(sums.dtype)
    for place in tl.range(0, COLUMNS, num_stages=1, loop_unroll_factor=1):
        here = near & (tl.arange(0, COLUMNS) == place)[None, :]
        pair_weight = tl.sum(tl.where(here, weight, 0.0), 1)
        if tl.max(tl.abs(pair_weight), 0) > 0:
            b = tl.load(y.plain + (column + place) * width.to(tl.int64) + span[None, :], inside, 0.0)
            sums -= pair_weight[:, None] * (a - b.to(sums.dtype))
    return sums


@triton.jit
def weigh_kernel(
    x, y, places, frame, given, weights, pulled,
    x_length, y_length, width, tiles, ranks,
    SLOPE: tl.constexpr, AS_ANCHOR: tl.constexpr, AS_CANDIDATE: tl.constexpr, DISTANCE: tl.constexpr,
    ZERO_ROWS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What all negative pairs pull a row with: Σ factor·(x − y), SPAN dimensions of it.

    The factor is the slope of the anchor's cost times its weight, over the distance of the framed rows if
    that is euclidean. x are the rows pulled at, as anchors, as candidates of the anchors y, or as both.
    """
    split = tl.program_id(2)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    span = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = (span < width)[None, :]
    alive, row_half = (tl.load(x.row + rows) >= 0)[:, None], tl.load(x.half + rows)
    kind: tl.constexpr = x.half.dtype.element_ty
    scale = 1.0 / tl.load(frame.unscale).to(kind)
    stride = (x_length if AS_ANCHOR else y_length).to(tl.int64)
    sums, total = tl.zeros((ROWS, SPAN), kind), tl.zeros((ROWS,), kind)
    start, stop = share_of(split, tiles, y_length, COLUMNS)
    for column in range(start, stop, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        down, across = rows[:, None], columns[None, :]
        negatives = alive & (tl.load(y.row + columns) >= 0)[None, :]
        if AS_ANCHOR:
            same = same_class(across, tl.load(places.begin + down), tl.load(places.end + down))
            negatives = negatives & ~same & (across != tl.load(places.self_position + down))
        else:
            same = same_class(down, tl.load(places.begin + across), tl.load(places.end + across))
            negatives = negatives & ~same & (down != tl.load(places.self_position + across))
        distance, near = negative_distances(
            x, y, frame, negatives, row_half, rows, columns, width, DISTANCE, ZERO_ROWS, DEPTH, PRECISION
        )
        weight = tl.zeros((ROWS, COLUMNS), kind)
        if AS_ANCHOR:
            weight += SLOPE(given, down, stride, ranks, distance, negatives) * tl.load(weights + down)
        if AS_CANDIDATE:
            weight += SLOPE(given, across, stride, ranks, distance, negatives) * tl.load(weights + across)
        if DISTANCE == EUCLIDEAN:
            apart = negatives & (distance > 0)
            weight = tl.where(apart, weight / tl.where(apart, distance * scale, 1.0), 0.0)
        else:
            weight = tl.where(negatives, weight, 0.0)
        if ZERO_ROWS:
            weight = tl.where(tl.load(x.nonzero + down) * tl.load(y.nonzero + across) == 0, 0.0, weight)

        clear = tl.where(near, 0.0, weight)
        total += tl.sum(clear, 1)
        others = tl.load(y.rows + columns.to(tl.int64)[:, None] * width + span[None, :], inside, 0.0)
        sums = multiply(clear, others.to(kind), sums, PRECISION)
        if tl.max(tl.max(near.to(tl.int32), 1), 0) > 0:
            sums = add_near(sums, x, y, weight, near, rows, column, span, inside, width, COLUMNS)
    at = rows.to(tl.int64)[:, None] * width + span[None, :]
    values = tl.load(x.rows + at, inside, 0.0).to(kind)
    out = pulled + split.to(tl.int64) * x_length * width + at
    tl.store(out, total[:, None] * values - sums, inside)


def _weigh(
    rows: Rows, one: Side, other: Side, cost: Cost, weights: Tensor, as_anchor: bool, as_candidate: bool
) -> Tensor:
    """(L, W) what the negatives pull the rows of `one` with."""
    length, others, width = len(one.row), len(other.row), one.rows.shape[1]

    def run(tile: Tile) -> Tensor:
        blocks, spans = length // tile.rows, -(-width // tile.span)
        splits, tiles = shares(one.row.device, blocks * spans, others // tile.columns)
        pulled = torch.empty((splits, length, width), dtype=rows.kind, device=one.row.device)
        launch(
            weigh_kernel,
            (blocks, spans, splits),
            one.row.device,
            tile,
            x=one.tiled,
            y=other.tiled,
            places=rows.places,
            frame=rows.frame,
            given=cost.given,
            weights=weights,
            pulled=pulled,
            x_length=length,
            y_length=others,
            width=width,
            tiles=tiles,
            ranks=cost.ranks,
            SLOPE=cost.slope,
            AS_ANCHOR=as_anchor,
            AS_CANDIDATE=as_candidate,
            DISTANCE=rows.distance,
            ZERO_ROWS=rows.zero_rows,
        )
        return pulled.sum(0)

    found: Tensor = with_tile("weigh", one.rows, (cost.slope, as_anchor, as_candidate), run)
    return found


def subtract_pulls(
    rows: Rows, cost: Cost, weights: Tensor, emb_gradient: Tensor | None, ref_gradient: Tensor | None
) -> None:
    """Take what all negatives pull with away from the gradients that are wanted; `weights` is (L,)."""
    x, y = rows.anchors, rows.candidates
    if emb_gradient is not None:
        pulled = _weigh(rows, x, y, cost, weights, True, rows.self_mining)
        emb_gradient -= _gradient(rows, x, pulled)
    if ref_gradient is not None:
        ref_gradient -= _gradient(rows, y, _weigh(rows, y, x, cost, weights, False, True))


def _gradient(rows: Rows, side: Side, pulled: Tensor) -> Tensor:
    """By row: minus the gradient of what negatives, and only those, cost."""
    pulled = side.by_row(pulled[:, : rows.width])
    if rows.distance != COSINE.value:
        # Euclidean distances were those of framed rows too, so that the scale has cancelled.
        return (pulled * rows.frame.unscale * 2).to(rows.kind) if rows.distance == SQEUCLIDEAN else pulled
    # What pulls at the unit row, less its part along that row.
    factor = side.lifted.factor[:, None]
    unit = side.lifted.rows.where(side.kept[:, None], 0).double() * factor
    pulled = pulled.double()
    along = (pulled * unit).sum(1, keepdim=True)
    return ((pulled - along * unit) * factor).to(rows.kind)
