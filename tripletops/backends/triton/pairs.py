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
    SQEUCLIDEAN,
    improve,
    reported,
    scale_of,
    scaled_difference,
    share_of,
    squared_distance,
    within_type,
)
from tripletops.backends.triton.extremes import Best, best_of
from tripletops.backends.triton.framing import lower_bound
from tripletops.backends.triton.rows import LANGUAGE, Raw, Rows
from tripletops.backends.triton.tiles import (
    DEPTH,
    MEASURED,
    OWNERS,
    PAIRS,
    SCANNED,
    SETTLE_SPLITS,
    SETTLED,
    SETTLED_DEPTH,
    launch,
)


@triton.jit
def factors_of(side, index, valid, scale, DISTANCE: tl.constexpr):
    """What rows are multiplied by, in two steps that stay within the type."""
    if DISTANCE == COSINE:
        return tl.load(side.unit.factor + index, valid, 0.0), tl.load(side.unit.lift + index, valid, 1.0)
    else:
        return tl.zeros(valid.shape, tl.float64) + scale, tl.full(valid.shape, 1.0, tl.float64)


@triton.jit
def measured(
    x, y, i, j, valid, scale, width, DISTANCE: tl.constexpr, KIND: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The distances of the rows i and j, pair by pair, from the rows themselves; 0 where not valid."""
    x_factor, x_lift = factors_of(x, i, valid, scale, DISTANCE)
    y_factor, y_lift = factors_of(y, j, valid, scale, DISTANCE)
    square = squared_distance(
        x.rows, x.stride, i, x_factor, x_lift, y.rows, y.stride, j, y_factor, y_lift, valid, width, DEPTH
    )
    return reported(square, x_factor, y_factor, 1.0 / scale, width, DISTANCE, KIND).to(KIND)


@triton.jit
def measure_kernel(
    x, y, row, frame, picks, distances, pairs, length, width, offset: tl.float64,
    AS_KEYS: tl.constexpr, DISTANCE: tl.constexpr, EXPONENTS: tl.constexpr, KIND: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The distances of picked candidates from the rows themselves; NaN where there is none.

    AS_KEYS: half the squared distance of a framed candidate that is farther by the offset; infinite for none.
    """
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = at < pairs
    i = tl.load(row + (at % length).to(tl.int32))
    pick = tl.load(picks + at, inside, -1)
    found = (pick >= 0) & (pick != NOBODY) & (i >= 0)
    scale, _ = scale_of(frame, EXPONENTS, KIND)
    distance = measured(x, y, i, pick, found, scale, width, DISTANCE, KIND, DEPTH)
    if AS_KEYS:
        floor = distance.to(tl.float64) + offset
        scaled = floor * scale
        if DISTANCE == EUCLIDEAN:
            key = scaled * scaled * 0.5
        elif DISTANCE == SQEUCLIDEAN:
            key = scaled * scale * 0.5
        else:
            key = floor
        key = tl.where(floor >= 0, key, -float("inf")).to(KIND)
        tl.store(distances + at, tl.where(found, key, float("inf")), inside)
    else:
        tl.store(distances + at, tl.where(found, distance, float("nan")), inside)


def _measure(rows: Rows, picks: Tensor, offset: float, as_keys: bool) -> Tensor:
    distances = torch.empty(picks.shape, dtype=rows.kind, device=picks.device)
    launch(
        measure_kernel,
        (-(-picks.numel() // MEASURED),),
        picks.device,
        x=rows.anchors.raw,
        y=rows.candidates.raw,
        row=rows.anchors.row,
        frame=rows.frame,
        picks=picks,
        distances=distances,
        pairs=picks.numel(),
        length=rows.length,
        width=rows.width,
        offset=offset,
        AS_KEYS=as_keys,
        DISTANCE=rows.distance,
        EXPONENTS=rows.exponents,
        KIND=LANGUAGE[rows.kind],
        ROWS=MEASURED,
        DEPTH=DEPTH,
    )
    return distances


def measure(rows: Rows, picks: Tensor) -> Tensor:
    """(lists, L) distances of the picks, int32 rows of the candidates, NaN for none."""
    return _measure(rows, picks, 0.0, as_keys=False)


def keys_beyond(rows: Rows, picks: Tensor, offset: float) -> Tensor:
    """(lists, L) the keys that candidates have, or would have, that are farther than the picks by the offset;
    infinite where there is no pick."""
    return _measure(rows, picks, offset, as_keys=True)


# Keys are rounded. A pick that turns out not strictly farther than its floor is searched for once more, among
# all negatives, by the distances that are reported. Few are: a program that has none to replace is done.


@triton.jit
def settle_kernel(
    x, y, x_names, y_names, frame, picks, distances, floors, out,
    pairs, x_length, y_length, width, tiles, offset: tl.float64,
    DISTANCE: tl.constexpr, EXPONENTS: tl.constexpr, KIND: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """For picks that are not farther than their floors, the nearest candidate of a split that is."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    at = first + tl.arange(0, ROWS)
    scale, _ = scale_of(frame, EXPONENTS, KIND)
    start, stop = share_of(tl.program_id(1), tiles, y_length, COLUMNS)
    floor = tl.load(floors + at, at < pairs, float("nan")) + tl.full((), offset, tl.float64).to(KIND)
    alive = tl.load(x_names.row + at % x_length) >= 0
    wrong = alive & (tl.load(picks + at, at < pairs, -1) >= 0)
    wrong = wrong & ~(tl.load(distances + at, at < pairs, 0.0) > floor)
    keys, rows = tl.full((ROWS,), float("inf"), KIND), tl.full((ROWS,), NOBODY, tl.int32)
    if tl.max(wrong.to(tl.int32), 0) > 0:
        for place in range(ROWS):
            here = tl.arange(0, ROWS) == place
            if tl.max((wrong & here).to(tl.int32), 0) > 0:
                position = ((first + place) % x_length).to(tl.int32)
                least = tl.load(floors + first + place) + tl.full((), offset, tl.float64).to(KIND)
                i, label = tl.load(x_names.row + position), tl.load(x_names.label + position)
                own = tl.load(x_names.self_position + position)
                best, found = tl.full((COLUMNS,), float("inf"), KIND), tl.full((COLUMNS,), NOBODY, tl.int32)
                for column in range(start, stop, COLUMNS):
                    columns = column + tl.arange(0, COLUMNS)
                    j = tl.load(y_names.row + columns)
                    eligible = (j >= 0) & (columns != own) & (tl.load(y_names.label + columns) != label)
                    apart = measured(
                        x, y, tl.zeros_like(j) + i, j, eligible, scale, width, DISTANCE, KIND, DEPTH
                    )
                    beyond = eligible & (apart > least)
                    apart, j = tl.where(beyond, apart, float("inf")), tl.where(beyond, j, NOBODY)
                    best, found = improve(apart, j, best, found)
                nearest = tl.min(best, 0)
                lowest = tl.min(tl.where(best == nearest, found, NOBODY), 0)
                keys, rows = tl.where(here, nearest, keys), tl.where(here, lowest, rows)
    to = tl.program_id(1).to(tl.int64) * pairs + at
    tl.store(out.key + to, keys, at < pairs)
    tl.store(out.row + to, rows, at < pairs)


@triton.jit
def replace_kernel(
    picks, distances, floors, best, pairs, splits, offset: tl.float64, KIND: tl.constexpr, ROWS: tl.constexpr
):
    """Put what was found in place of the picks that are not farther than their floors."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = at < pairs
    pick, distance = tl.load(picks + at, inside, -1), tl.load(distances + at, inside, 0.0)
    floor = tl.load(floors + at, inside, float("nan")) + tl.full((), offset, tl.float64).to(KIND)
    wrong = (pick >= 0) & ~(distance > floor)
    key, row = best_of(best, at, inside, splits, pairs)
    none = row == NOBODY
    tl.store(picks + at, tl.where(wrong, tl.where(none, -1, row), pick), inside)
    tl.store(distances + at, tl.where(wrong, tl.where(none, float("nan"), key), distance), inside)


def settle(rows: Rows, picks: Tensor, distances: Tensor, floors: Tensor, offset: float) -> None:
    """Replace picks that are not strictly farther than their floors + offset, −1 where nobody is.

    All are (lists, L); picks and distances are changed in place.
    """
    x, y, pairs = rows.anchors, rows.candidates, picks.numel()
    # Few programs have anything to search for, and what they search is long.
    tiles = -(-(len(y.row) // SETTLED) // SETTLE_SPLITS)
    splits = -(-len(y.row) // (tiles * SETTLED))
    key = torch.empty((splits, pairs), dtype=rows.kind, device=picks.device)
    best = Best(key, torch.empty_like(key, dtype=torch.int32))
    common: dict[str, Any] = {
        "picks": picks,
        "distances": distances,
        "floors": floors,
        "pairs": pairs,
        "offset": offset,
        "KIND": LANGUAGE[rows.kind],
        "ROWS": MEASURED,
    }
    grid = -(-pairs // MEASURED)
    launch(
        settle_kernel,
        (grid, splits),
        picks.device,
        **common,
        x=x.raw,
        y=y.raw,
        x_names=x.names,
        y_names=y.names,
        frame=rows.frame,
        out=best,
        x_length=rows.length,
        y_length=len(y.row),
        width=rows.width,
        tiles=tiles,
        DISTANCE=rows.distance,
        EXPONENTS=rows.exponents,
        COLUMNS=SETTLED,
        DEPTH=SETTLED_DEPTH,
    )
    launch(replace_kernel, (grid,), picks.device, **common, best=best, splits=splits)


@triton.jit
def pulls(
    x, i, x_unit, y, j, distance, weight, valid, depth, inside, DISTANCE: tl.constexpr,
):  # fmt: skip
    """What pairs pull each row i with, (rows, depth): Σ weight · the derivative of the distance.

    Under the cosine it is what pulls at the row times its lift.
    """
    x_factor, x_lift = x_unit
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
        lifted = a * x_lift[:, None, None]
        y_factor, y_lift = factors_of(y, j, valid, 1.0, DISTANCE)
        apart = scaled_difference(
            lifted, x_factor[:, None, None], b * y_lift[:, :, None], y_factor[:, :, None]
        )
        u = lifted * x_factor[:, None, None]
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


class Lists(NamedTuple):
    """Pairs of an anchor and a candidate: (lists, L), by position of the anchor."""

    candidate: Tensor  # rows, −1: none
    distance: Tensor
    weight: Tensor  # the derivative of the loss by the distance


class Upstream(NamedTuple):
    """The gradient that arrived at the losses of anchors, where `weight` does not have it in itself."""

    grad: Tensor  # (), or (L,)
    share: Tensor  # () float64, NaN where the loss is


@triton.jit
def weighed(pairs, upstream, pair, position, valid, ARRIVES: tl.constexpr, EACH: tl.constexpr):
    """The weights and distances of pairs, given the positions of their anchors."""
    weight, distance = tl.load(pairs.weight + pair, valid, 0.0), tl.load(pairs.distance + pair, valid, 0.0)
    if ARRIVES:
        if EACH:
            weight *= tl.load(upstream.grad + position, valid, 0.0)
        else:
            weight *= tl.load(upstream.grad)
    return weight, distance


@triton.jit
def add_searched(
    total, x, y, pairs, upstream, row, alive, i, unit, length, lists, depth, inside,
    DISTANCE: tl.constexpr, ARRIVES: tl.constexpr, EACH: tl.constexpr, SCANNED: tl.constexpr,
):  # fmt: skip
    """Add what pulls at one row as a candidate, its pairs being searched for among all."""
    for start in range(0, lists * length, SCANNED):
        at = start + tl.arange(0, SCANNED)
        wanted = tl.max(tl.where(alive, row, -2), 0)
        hit = tl.load(pairs.candidate + at, at < lists * length, -1) == wanted
        for _ in range(tl.sum(hit.to(tl.int32), 0)):
            first = tl.min(tl.where(hit, at, NOBODY), 0)
            hit = hit & (at != first)
            pair = tl.zeros((1, 1), tl.int64) + first
            j = (pair % length).to(tl.int32)
            weight, distance = weighed(pairs, upstream, pair, j, pair >= 0, ARRIVES, EACH)
            total += pulls(x, i, unit, y, j, distance, weight, weight != 0, depth, inside, DISTANCE)
    return total


@triton.jit
def add_listed(
    total, x, y, anchor_row, pairs, incoming, upstream, alive, i, unit, length, lists, steps, depth, inside,
    DISTANCE: tl.constexpr, NAMED: tl.constexpr, ARRIVES: tl.constexpr, EACH: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Add what pulls at rows as candidates, their pairs lying side by side."""
    ahead = tl.arange(0, PAIRS)[None, :]
    begin = lower_bound(incoming.candidate, lists * length, i, steps, False)
    end = lower_bound(incoming.candidate, lists * length, i, steps, True)
    begin, end = tl.where(alive, begin, 0), tl.where(alive, end, 0)
    for start in range(0, tl.max(end - begin, 0), PAIRS):
        chosen = begin[:, None] + start + ahead
        there = chosen < end[:, None]
        pair = tl.load(incoming.pair + chosen, there, 0)
        anchor = (pair % length).to(tl.int32)
        weight, distance = weighed(pairs, upstream, pair, anchor, there, ARRIVES, EACH)
        valid = there & (weight != 0)
        j = tl.load(anchor_row + anchor, valid, 0) if NAMED else anchor
        total += pulls(x, i, unit, y, j, distance, weight, valid, depth, inside, DISTANCE)
    return total


@triton.jit
def pull_kernel(
    x, y, owner, anchor_row, pairs, incoming, upstream, gradient,
    length, lists, width, owners, steps,
    AS_ANCHOR: tl.constexpr, AS_CANDIDATE: tl.constexpr, DISTANCE: tl.constexpr,
    OWNED: tl.constexpr, NAMED: tl.constexpr, SEARCHED: tl.constexpr, ARRIVES: tl.constexpr,
    EACH: tl.constexpr,
    OWNERS: tl.constexpr, PAIRS: tl.constexpr, SCANNED: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """What pulls at rows of the gradient, as anchors and as candidates, in a fixed order.

    Pair list·length + position joins the anchor at `position` with the candidate pairs.candidate[pair]. x are
    the rows pulled at, y the others. OWNED: `owner` says which rows they are, NAMED: anchor_row says which
    row an anchor is; else positions are rows. A candidate's pairs are searched for (SEARCHED), or found
    in `incoming`, sorted by candidate. ARRIVES: the gradient is finished, for `upstream` has arrived; else
    it is added to.
    """
    position = tl.program_id(0) * OWNERS + tl.arange(0, OWNERS)
    depth = tl.program_id(1) * DEPTH + tl.arange(0, DEPTH)
    inside = depth < width
    row = tl.where(position < owners, position, -1)
    if OWNED:
        row = tl.load(owner + position, position < owners, -1)
    alive = row >= 0
    i = tl.maximum(row, 0)
    unit = factors_of(x, i, alive, 1.0, DISTANCE)
    ahead = tl.arange(0, PAIRS)[None, :]
    total = tl.zeros((OWNERS, DEPTH), tl.float64)
    if AS_ANCHOR:
        for start in range(0, lists, PAIRS):
            chosen = start + ahead
            there = alive[:, None] & (chosen < lists)
            pair = chosen.to(tl.int64) * length + position[:, None]
            j = tl.load(pairs.candidate + pair, there, -1).to(tl.int32)
            valid = there & (j >= 0)
            anchor = position[:, None] + tl.zeros_like(chosen)
            weight, distance = weighed(pairs, upstream, pair, anchor, valid, ARRIVES, EACH)
            total += pulls(x, i, unit, y, j, distance, weight, valid & (weight != 0), depth, inside, DISTANCE)
    if AS_CANDIDATE:
        if SEARCHED:
            total = add_searched(
                total, x, y, pairs, upstream, row, alive, i, unit, length, lists, depth, inside,
                DISTANCE, ARRIVES, EACH, SCANNED,
            )  # fmt: skip
        else:
            total = add_listed(
                total, x, y, anchor_row, pairs, incoming, upstream, alive, i, unit, length, lists, steps,
                depth, inside, DISTANCE, NAMED, ARRIVES, EACH, PAIRS,
            )  # fmt: skip
    at = gradient + i.to(tl.int64)[:, None] * width + depth[None, :]
    mask = alive[:, None] & inside[None, :]
    kind: tl.constexpr = pairs.distance.dtype.element_ty
    if ARRIVES:
        total = within_type(total, kind).to(kind).to(tl.float64)
        if DISTANCE == COSINE:
            total = total * unit[1][:, None]
        total += tl.load(upstream.share) * 0.0  # NaN where the loss is
        tl.store(at, total.to(kind).to(gradient.dtype.element_ty), mask)
    else:
        total = within_type(tl.load(at, mask, 0.0).to(tl.float64) + total, kind)
        tl.store(at, total.to(kind), mask)


class Ends(NamedTuple):
    """What pairs join: the rows of both sides, and the anchors' rows by position, which are the positions
    themselves if there is no tensor of them."""

    emb: Raw
    ref_emb: Raw | None  # None: emb
    row: Tensor | None
    distance: int


class Incoming(NamedTuple):
    """Pairs sorted by their candidates."""

    candidate: Tensor
    pair: Tensor


def pull(
    ends: Ends,
    lists: Lists,
    emb_gradient: Tensor | None,
    ref_gradient: Tensor | None,
    upstream: Upstream | None = None,
    searched: bool = False,
) -> None:
    """Add to the gradients, (N, D) and (M, D), what the pairs pull with; to those that are wanted.

    With `upstream` the gradients are that and nothing else.
    """
    anchors = ends.emb
    candidates = anchors if ends.ref_emb is None else ends.ref_emb
    pairs = Lists(*(part.contiguous() for part in lists))
    flat = pairs.candidate.reshape(-1)
    incoming = Incoming(flat, flat) if searched else Incoming(*torch.sort(flat, stable=True))

    def add(gradient: Tensor, own: Raw, other: Raw, as_anchor: bool, as_candidate: bool) -> None:
        count, width = gradient.shape
        owner = ends.row if as_anchor else None
        owners = count if owner is None else len(owner)
        each = 1 if searched else OWNERS
        launch(
            pull_kernel,
            (-(-owners // each), -(-width // DEPTH)),
            gradient.device,
            x=own,
            y=other,
            owner=flat if owner is None else owner,
            anchor_row=flat if ends.row is None else ends.row,
            pairs=pairs,
            incoming=incoming,
            upstream=Upstream(pairs.weight, pairs.weight) if upstream is None else upstream,
            gradient=gradient,
            length=pairs.candidate.shape[1],
            lists=len(pairs.candidate),
            width=width,
            owners=owners,
            steps=flat.numel().bit_length(),
            AS_ANCHOR=as_anchor,
            AS_CANDIDATE=as_candidate,
            DISTANCE=ends.distance,
            OWNED=owner is not None,
            NAMED=ends.row is not None,
            SEARCHED=searched,
            ARRIVES=upstream is not None,
            EACH=upstream is not None and upstream.grad.dim() == 1,
            OWNERS=each,
            PAIRS=1 if searched else PAIRS,
            SCANNED=SCANNED,
            DEPTH=DEPTH,
        )

    if emb_gradient is not None:
        add(emb_gradient, anchors, candidates, True, ends.ref_emb is None)
    if ref_gradient is not None:
        add(ref_gradient, candidates, anchors, False, True)
