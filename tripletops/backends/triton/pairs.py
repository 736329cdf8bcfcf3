"""Pairs in lists: their distances, measured from the rows themselves, and what they pull their rows with."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tripletops.backends.triton.device import (
    COSINE,
    EUCLIDEAN,
    NOBODY,
    improve,
    reported,
    same_class,
    scaled_difference,
    squared_distance,
    within_type,
)
from tripletops.backends.triton.rows import Lifted, Rows
from tripletops.backends.triton.tiles import DEPTH, MEASURED, OWNERS, PAIRS, launch


class Raw(NamedTuple):
    """Rows as the user holds them, and what they are multiplied by (`rows.Lifted`)."""

    rows: Tensor
    stride: int
    factor: Tensor

    @classmethod
    def of(cls, side: Lifted) -> Raw:
        return cls(side.rows, side.rows.stride(0), side.factor)


@triton.jit
def measure_kernel(
    x, y, x_index, y_index, places, unscale, picks, floors, distances,
    pairs, x_length, y_length, width,
    SETTLE: tl.constexpr, DISTANCE: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The distances of picked candidates from the rows themselves; NaN where there is none.

    SETTLE: a pick that is not strictly farther than its floor after all is searched for among all negatives.
    """
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = at < pairs
    rows = (at % x_length).to(tl.int32)
    i = tl.load(x_index + rows)
    pick = tl.load(picks + at, inside, -1)
    found = pick >= 0
    kind: tl.constexpr = distances.dtype.element_ty
    back = tl.load(unscale)
    row_factor = tl.load(x.factor + i, i >= 0, 0.0)
    factor = tl.load(y.factor + pick, found, 0.0)
    square = squared_distance(
        x.rows, x.stride, i, row_factor, y.rows, y.stride, pick, factor, found, width, DEPTH
    )
    distance = reported(square, row_factor, factor, back, width, DISTANCE, kind).to(kind)
    if SETTLE:
        floor = tl.load(floors + at, inside, float("nan"))
        wrong = found & ~(distance > floor)
        if tl.max(wrong.to(tl.int32), 0) > 0:
            own = tl.load(places.self_position + rows)
            class_begin, class_end = tl.load(places.begin + rows), tl.load(places.end + rows)
            best, place = tl.full((ROWS,), float("inf"), kind), tl.full((ROWS,), NOBODY, tl.int32)
            for position in range(y_length):
                candidate = tl.load(y_index + position)
                j = tl.zeros_like(i) + candidate
                eligible = (
                    wrong & (j >= 0) & (own != position) & ~same_class(position, class_begin, class_end)
                )
                other = tl.load(y.factor + j, eligible, 0.0)
                square = squared_distance(
                    x.rows, x.stride, i, row_factor, y.rows, y.stride, j, other, eligible, width, DEPTH
                )
                apart = reported(square, row_factor, other, back, width, DISTANCE, kind).to(kind)
                apart = tl.where(eligible & (apart > floor), apart, float("inf"))
                best, place = improve(apart, tl.where(apart < float("inf"), j, NOBODY), best, place)
            distance = tl.where(wrong, best, distance)
            pick = tl.where(wrong, tl.where(place == NOBODY, -1, place), pick)
            found = pick >= 0
            tl.store(picks + at, pick, inside)
    tl.store(distances + at, tl.where(found, distance, float("nan")), inside)


@triton.jit
def pulls(
    x, i, x_factor, y, j, distance, weight, valid, depth, inside, DISTANCE: tl.constexpr,
):  # fmt: skip
    """What pairs pull each row i with, (rows, depth): Σ weight · the derivative of the distance."""
    any_pair = tl.max(valid.to(tl.int32), 1) > 0
    row_mask = any_pair[:, None] & inside[None, :]
    a = tl.load(x.rows + i.to(tl.int64)[:, None] * x.stride + depth[None, :], row_mask, 0.0)
    a = a.to(tl.float64)[:, None, :]
    mask = valid[:, :, None] & inside[None, None, :]
    b = tl.load(y.rows + j.to(tl.int64)[:, :, None] * y.stride + depth[None, None, :], mask, 0.0)
    b = b.to(tl.float64)
    weight, distance = weight.to(tl.float64), distance.to(tl.float64)
    if DISTANCE == COSINE:
        # d/dx (1 − S) = ((u − v) − (1 − S) u) / |x|, which keeps its digits where u and v nearly agree.
        u = a * x_factor[:, None, None]
        factor = tl.load(y.factor + j, valid, 0.0)[:, :, None]
        apart = scaled_difference(a, x_factor[:, None, None], b, factor)
        pull = (weight * x_factor[:, None])[:, :, None] * (apart - distance[:, :, None] * u)
    elif DISTANCE == EUCLIDEAN:
        apart = valid & (distance > 0)
        difference = a - b
        if x.rows.dtype.element_ty == tl.float64:  # one over a subnormal distance would overflow
            lift = tl.where(distance < 2.0**-900, 2.0**100, 1.0)
            distance, difference = distance * lift, difference * lift[:, :, None]
        factor = tl.where(apart, weight / tl.where(apart, distance, 1.0), 0.0)
        pull = factor[:, :, None] * difference
    else:
        pull = (2 * weight)[:, :, None] * (a - b)
    return tl.sum(tl.where(mask, pull, 0.0), 1)


@triton.jit
def pull_kernel(
    x, y, owner, anchor_row, pairs, incoming, incoming_begin, gradient,
    length, lists, width, owners,
    AS_ANCHOR: tl.constexpr, AS_CANDIDATE: tl.constexpr, DISTANCE: tl.constexpr,
    OWNERS: tl.constexpr, PAIRS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Add to rows of the gradient what pulls at them, as anchors and as candidates, in a fixed order.

    Pair list·length + position joins the anchor at `position` with the candidate pairs.candidate[pair].
    `incoming` holds the pairs of every candidate, from incoming_begin[row] on. x are the rows pulled at, y
    the others.
    """
    position = tl.program_id(0) * OWNERS + tl.arange(0, OWNERS)
    depth = tl.program_id(1) * DEPTH + tl.arange(0, DEPTH)
    inside = depth < width
    row = tl.load(owner + position, position < owners, -1)
    alive = row >= 0
    i = tl.maximum(row, 0)
    factor = tl.load(x.factor + i, alive, 0.0)
    ahead = tl.arange(0, PAIRS)[None, :]
    total = tl.zeros((OWNERS, DEPTH), tl.float64)
    if AS_ANCHOR:
        for start in range(0, lists, PAIRS):
            chosen = start + ahead
            there = alive[:, None] & (chosen < lists)
            pair = chosen.to(tl.int64) * length + position[:, None]
            j = tl.load(pairs.candidate + pair, there, -1)
            weight, distance = (
                tl.load(pairs.weight + pair, there, 0.0),
                tl.load(pairs.distance + pair, there, 0.0),
            )
            total += pulls(
                x, i, factor, y, j, distance, weight, (j >= 0) & (weight != 0),
                depth, inside, DISTANCE,
            )  # fmt: skip
    if AS_CANDIDATE:
        begin, end = tl.load(incoming_begin + i, alive, 0), tl.load(incoming_begin + i + 1, alive, 0)
        for start in range(0, tl.max(end - begin, 0).to(tl.int32), PAIRS):
            chosen = begin[:, None] + start + ahead
            there = chosen < end[:, None]
            pair = tl.load(incoming + chosen, there, 0)
            weight, distance = (
                tl.load(pairs.weight + pair, there, 0.0),
                tl.load(pairs.distance + pair, there, 0.0),
            )
            valid = there & (weight != 0)
            j = tl.load(anchor_row + pair % length, valid, 0)
            total += pulls(
                x, i, factor, y, j, distance, weight, valid,
                depth, inside, DISTANCE,
            )  # fmt: skip
    at = gradient + i.to(tl.int64)[:, None] * width + depth[None, :]
    mask = alive[:, None] & inside[None, :]
    kind: tl.constexpr = gradient.dtype.element_ty
    total = within_type(tl.load(at, mask, 0.0).to(tl.float64) + total, kind)
    tl.store(at, total.to(kind), mask)


def measure(rows: Rows, picks: Tensor, floors: Tensor | None = None) -> Tensor:
    """(lists, L) distances of the picks, int32 rows of the candidates, NaN for none.

    With floors, a pick that is not strictly farther than its floor is replaced, in `picks` itself.
    """
    x, y = rows.anchors, rows.candidates
    distances = torch.empty(picks.shape, dtype=rows.kind, device=picks.device)
    launch(
        measure_kernel,
        (-(-picks.numel() // MEASURED),),
        picks.device,
        x=Raw.of(x.lifted),
        y=Raw.of(y.lifted),
        x_index=x.row,
        y_index=y.row,
        places=rows.places,
        unscale=rows.frame.unscale,
        picks=picks,
        floors=distances if floors is None else floors,
        distances=distances,
        pairs=picks.numel(),
        x_length=len(x.row),
        y_length=len(y.row),
        width=rows.width,
        SETTLE=floors is not None,
        DISTANCE=rows.distance,
        ROWS=MEASURED,
        DEPTH=DEPTH,
    )
    return distances


class Lists(NamedTuple):
    """Pairs of an anchor and a candidate: (lists, L), by position of the anchor."""

    candidate: Tensor  # int32 rows, −1: none
    distance: Tensor
    weight: Tensor  # the derivative of the loss by the distance


class Ends(NamedTuple):
    """What pairs join: the rows of both sides, and the anchors' rows by position."""

    emb: Lifted
    ref_emb: Lifted | None  # None: emb
    row: Tensor
    distance: int


def pull(ends: Ends, lists: Lists, emb_gradient: Tensor | None, ref_gradient: Tensor | None) -> None:
    """Add to the gradients, (N, D) and (M, D), what the pairs pull with; to those that are wanted."""
    anchors = Raw.of(ends.emb)
    candidates = anchors if ends.ref_emb is None else Raw.of(ends.ref_emb)
    pairs = Lists(*(part.contiguous() for part in lists))
    count = len(candidates.rows)
    numbers = torch.arange(count + 1, dtype=torch.int32, device=ends.row.device)
    ordered, incoming = torch.sort(pairs.candidate.reshape(-1), stable=True)
    begin = torch.searchsorted(ordered, numbers)

    def add(gradient: Tensor, own: Raw, other: Raw, owner: Tensor, **roles: Any) -> None:
        width = own.rows.shape[1]
        launch(
            pull_kernel,
            (-(-len(owner) // OWNERS), -(-width // DEPTH)),
            gradient.device,
            x=own,
            y=other,
            owner=owner,
            anchor_row=ends.row,
            pairs=pairs,
            incoming=incoming,
            incoming_begin=begin,
            gradient=gradient,
            length=pairs.candidate.shape[1],
            lists=len(pairs.candidate),
            width=width,
            owners=len(owner),
            **roles,
            DISTANCE=ends.distance,
            OWNERS=OWNERS,
            PAIRS=PAIRS,
            DEPTH=DEPTH,
        )

    if emb_gradient is not None:
        add(emb_gradient, anchors, candidates, ends.row, AS_ANCHOR=True, AS_CANDIDATE=ends.ref_emb is None)
    if ref_gradient is not None:
        add(ref_gradient, candidates, anchors, numbers[:count], AS_ANCHOR=False, AS_CANDIDATE=True)
