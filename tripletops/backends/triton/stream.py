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
    scale_of,
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
    x, y, names, frame, given, weights, pulled,
    x_length, y_length, width, tiles, ranks, rate: tl.float64,
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
    speed = tl.full((), rate, tl.float64).to(kind)
    scale = scale_of(frame, 1, kind)[0].to(kind)
    stride = (x_length if AS_ANCHOR else y_length).to(tl.int64)
    sums, total = tl.zeros((ROWS, SPAN), kind), tl.zeros((ROWS,), kind)
    start, stop = share_of(split, tiles, y_length, COLUMNS)
    for column in range(start, stop, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        down, across = rows[:, None], columns[None, :]
        negatives = alive & (tl.load(y.row + columns) >= 0)[None, :]
        negatives = negatives & (tl.load(x.label + down) != tl.load(y.label + across))
        if AS_ANCHOR:
            negatives = negatives & (across != tl.load(names.self_position + down))
        else:
            negatives = negatives & (down != tl.load(names.self_position + across))
        distance, near = negative_distances(
            x, y, frame, negatives, row_half, rows, columns, width, DISTANCE, ZERO_ROWS, DEPTH, PRECISION
        )
        weight = tl.zeros((ROWS, COLUMNS), kind)
        if AS_ANCHOR:
            weight += SLOPE(given, speed, down, stride, ranks, distance, negatives) * tl.load(weights + down)
        if AS_CANDIDATE:
            slope = SLOPE(given, speed, across, stride, ranks, distance, negatives)
            weight += slope * tl.load(weights + across)
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
    length, others, width = len(one.row), len(other.row), one.tiled.rows.shape[1]

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
            names=rows.anchors.names,
            frame=rows.frame,
            given=cost.given,
            weights=weights,
            pulled=pulled,
            x_length=length,
            y_length=others,
            width=width,
            tiles=tiles,
            ranks=cost.ranks,
            rate=cost.rate,
            SLOPE=cost.slope,
            AS_ANCHOR=as_anchor,
            AS_CANDIDATE=as_candidate,
            DISTANCE=rows.distance,
            ZERO_ROWS=rows.zero_rows,
        )
        return pulled.sum(0)

    found: Tensor = with_tile("weigh", one.tiled.rows, (cost.slope, as_anchor, as_candidate), run)
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
        if rows.distance != SQEUCLIDEAN:
            return pulled
        return (pulled * rows.frame.unscale * 2).to(rows.kind)
    # What pulls at the unit row, less its part along that row.
    factor = side.unit.factor[:, None]
    unit = side.given.rows.double() * side.unit.lift[:, None] * factor
    unit = unit.masked_fill(factor == 0, 0)  # a row that is ignored may hold anything
    pulled = pulled.double()
    along = (pulled * unit).sum(1, keepdim=True)
    return ((pulled - along * unit) * factor).to(rows.kind)
