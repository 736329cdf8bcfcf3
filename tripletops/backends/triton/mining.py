"""One positive and one negative for every anchor: the order of work around the kernels.

As on the CPU: walk over the tiles, settle what was found, measure the winners from the rows themselves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tripletops.backends.triton import kernels
from tripletops.backends.triton.rows import Rows
from tripletops.backends.triton.tiles import (
    DEPTH,
    MEASURED,
    OWNERS,
    PAIRS,
    RANKS,
    Tile,
    launch,
    shares,
    with_tile,
)

NOBODY = 2**31 - 1

# The codes of `ops.POSITIVE` and `ops.NEGATIVE`, and what the walk keeps for them; others are drawn.
_POSITIVES = {0: kernels.FARTHEST.value, 1: kernels.NEAREST.value}
_NEGATIVES = {0: kernels.NEAREST.value, 1: kernels.BEYOND.value, 2: kernels.FARTHEST.value}
RANDOM_POSITIVE, ALL_POSITIVES = 2, 3
SEMIHARD, RANDOM_NEGATIVE, BY_DISTANCE, ALL_NEGATIVES = 1, 3, 4, 5
_NOTHING, _GIVEN, _EVERY = kernels.NOTHING.value, kernels.GIVEN.value, kernels.EVERY.value


class Found(NamedTuple):
    """What a walk keeps, by position; keys and indices, −1 for none."""

    positive_key: Tensor
    positive: Tensor
    negative: Tensor  # (ranks, L)
    farthest: Tensor


class Rules(NamedTuple):
    """Of selection, as the ops take them."""

    seed: Tensor | None
    positive: int
    negative: int
    cutoff: float
    nonzero_loss_cutoff: float


def products(rows: Rows) -> tuple[Tensor, ...]:
    """The arguments of a tile, anchors first."""
    x, y = rows.anchors, rows.candidates
    return x.rows, x.half, x.nonzero, y.rows, y.half


def places(rows: Rows) -> tuple[Tensor, ...]:
    return rows.begin, rows.end, rows.self_position


def least_index(keys: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """The least keys over dimension 0 and the lowest index that has each; −1 for none."""
    least = keys.amin(0)
    place = index.where(keys == least, NOBODY).amin(0)
    return least, place.where(place < NOBODY, -1)


def walk(
    rows: Rows,
    positive: int,
    negative: int,
    *,
    given: Tensor | None = None,
    floors: Tensor | None = None,
    ranks: tuple[int, int] = (0, 0),
) -> Found:
    """Run `kernels.select`. `floors` is (ranks, L); `ranks` those of the positives whose keys are kept."""
    x, y = rows.anchors, rows.candidates
    length, others = len(x.row), len(y.row)
    carried = 1 if floors is None or len(floors) == 1 else RANKS
    chunks = 1 if floors is None else -(-len(floors) // carried)
    if floors is not None and len(floors) < chunks * carried:
        empty = torch.full(
            (chunks * carried - len(floors), length), torch.inf, dtype=rows.kind, device=x.row.device
        )
        floors = torch.cat([floors, empty])

    def run(tile: Tile) -> Found:
        blocks = length // tile.rows
        splits, tiles = shares(x.row.device, blocks * chunks, others // tile.columns)
        keys = x.half.new_full((splits, length), torch.inf)
        index = torch.full((splits, length), NOBODY, dtype=torch.int32, device=keys.device)
        kept = keys.clone(), index.clone()
        far = keys.clone(), index.clone()
        if positive == _EVERY:
            kept = x.half.new_full((ranks[1] - ranks[0], length), torch.inf), kept[1]
        nearest = (
            x.half.new_full((splits, chunks * carried, length), torch.inf),
            torch.full((splits, chunks * carried, length), NOBODY, dtype=torch.int32, device=keys.device),
        )
        launch(
            kernels.select,
            (blocks, splits, chunks),
            *products(rows),
            y.row,
            *places(rows),
            index if given is None else given,
            keys if floors is None else floors,
            *kept,
            *nearest,
            *far,
            length,
            others,
            x.rows.shape[1],
            tiles,
            *ranks,
            POSITIVE=positive,
            NEGATIVE=negative,
            RANKS=carried,
            ZERO_ROWS=rows.zero_rows,
            tile=tile,
        )
        if positive == _EVERY:
            return Found(kept[0], index[0], index[:1], index[0])
        sign = -1 if positive == kernels.FARTHEST.value else 1
        key, picked = least_index(kept[0] * sign, kept[1])
        return Found(key * sign, picked, least_index(*nearest)[1], least_index(*far)[1])

    found: Found = with_tile("select", x.rows, (positive, negative, carried), run)
    return found


def draw(rows: Rows, seed: Tensor, *, positives: bool) -> Tensor:
    """(L,) uniform positives or negatives, −1 for none."""
    return _draw(rows, seed, rows.anchors.half, positives=positives, by_distance=False)


def draw_by_distance(rows: Rows, seed: Tensor, cutoff: float, limit: float) -> Tensor:
    """(L,) negatives drawn by their weights; `rows` are those of cosine."""
    width = rows.width
    numbers = [(2 - width) / 2, (3 - width) / 2, min(max(cutoff**2, 2.0**-100), 2.0**100), limit**2]
    density = torch.tensor(numbers, dtype=torch.float64, device=seed.device)
    return _draw(rows, seed, density, positives=False, by_distance=True)


def _draw(rows: Rows, seed: Tensor, density: Tensor, *, positives: bool, by_distance: bool) -> Tensor:
    x, y = rows.anchors, rows.candidates
    length, others = len(x.row), len(y.row)

    def run(tile: Tile) -> Tensor:
        blocks = length // tile.rows
        splits, tiles = shares(seed.device, blocks, others // tile.columns)
        weight = x.half.new_full((splits, length), torch.inf)
        uniform = torch.full((splits, length), NOBODY, dtype=torch.int32, device=seed.device)
        index, drawn = uniform.clone(), uniform.clone()
        launch(
            kernels.draw,
            (blocks, splits),
            *products(rows)[:3],
            x.row,
            *products(rows)[3:],
            y.row,
            *places(rows),
            seed,
            density,
            weight,
            drawn,
            uniform,
            index,
            length,
            others,
            x.rows.shape[1],
            tiles,
            POSITIVES=positives,
            BY_DISTANCE=by_distance,
            ZERO_ROWS=rows.zero_rows,
            tile=tile,
        )
        anyone = least_index(uniform, index)[1]
        if not by_distance:
            return anyone
        chosen = least_index(weight, drawn)[1]
        return chosen.where(chosen >= 0, anyone)  # all weights are 0

    picks: Tensor = with_tile("draw", x.rows, (positives, by_distance), run)
    return picks.where(x.row >= 0, -1)


def measure(rows: Rows, picks: Tensor, floors: Tensor | None = None) -> Tensor:
    """(lists, L) distances of the picks, int32 rows of the candidates, NaN for none.

    With floors, a pick that is not strictly farther than its floor is replaced, in `picks` itself.
    """
    x, y = rows.anchors, rows.candidates
    distances = torch.empty(picks.shape, dtype=rows.kind, device=picks.device)
    launch(
        kernels.measure,
        (-(-picks.numel() // MEASURED),),
        x.raw,
        x.raw.stride(0),
        x.factor,
        x.row,
        y.raw,
        y.raw.stride(0),
        y.factor,
        y.row,
        *places(rows),
        rows.unscale,
        picks,
        distances if floors is None else floors,
        distances,
        picks.numel(),
        len(x.row),
        len(y.row),
        rows.width,
        SETTLE=floors is not None,
        DISTANCE=rows.distance,
        ROWS=MEASURED,
        DEPTH=DEPTH,
    )
    return distances


class Picked(NamedTuple):
    """By position, −1 and NaN for none."""

    positive: Tensor
    negative: Tensor
    d_ap: Tensor
    d_an: Tensor


def select(rows: Rows, rules: Rules) -> Picked:
    """One positive and one negative for every anchor, measured."""
    alive = rows.anchors.row >= 0
    positive_rule = _POSITIVES.get(rules.positive, _NOTHING)
    negative_rule = _NEGATIVES.get(rules.negative, _NOTHING)
    given = None
    if rules.positive == RANDOM_POSITIVE:
        assert rules.seed is not None
        given = draw(rows, rules.seed, positives=True)
    positive = negative = torch.full_like(rows.anchors.row, -1)
    if rules.negative == SEMIHARD:
        found = walk(rows, positive_rule if given is None else _GIVEN, _NOTHING, given=given)
        positive = found.positive
        floors = found.positive_key.where(positive >= 0, torch.inf)[None]
        negative = walk(rows, _NOTHING, negative_rule, floors=floors).negative[0]
    elif positive_rule != _NOTHING or negative_rule != _NOTHING:
        found = walk(rows, positive_rule, negative_rule)
        positive = found.positive
        negative = found.farthest if negative_rule == kernels.FARTHEST.value else found.negative[0]
    if given is not None:
        positive = given
    if rules.negative == RANDOM_NEGATIVE:
        assert rules.seed is not None
        negative = draw(rows, rules.seed, positives=False)
    elif rules.negative == BY_DISTANCE:
        assert rules.seed is not None
        unit_rows = rows.under_cosine()
        negative = draw_by_distance(unit_rows, rules.seed, rules.cutoff, rules.nonzero_loss_cutoff)
    picks = torch.stack([positive, negative]).where(alive, -1)
    if rules.negative == SEMIHARD:
        d_ap = measure(rows, picks[:1])
        distances = torch.cat([d_ap, measure(rows, picks[1:], d_ap)])
    else:
        distances = measure(rows, picks)
    return Picked(*picks.unbind(), *distances.unbind())


class Lists(NamedTuple):
    """Pairs of an anchor and a candidate: (lists, L), by position of the anchor."""

    candidate: Tensor  # int32 rows, −1: none
    distance: Tensor
    weight: Tensor  # the derivative of the loss by the distance


class Ends(NamedTuple):
    """What pairs join: the rows of both sides, and the anchors' rows by position."""

    emb: Tensor
    emb_factor: Tensor  # as in `rows.Side`
    ref_emb: Tensor | None  # None: emb
    ref_factor: Tensor | None
    row: Tensor
    distance: int


def pull(ends: Ends, lists: Lists, emb_gradient: Tensor | None, ref_gradient: Tensor | None) -> None:
    """Add to the gradients, (N, D) and (M, D), what the pairs pull with; to those that are wanted."""
    emb, emb_factor, ref_emb, ref_factor, row, distance = ends
    candidate, distances, weights = (part.contiguous() for part in lists)
    others = (emb, emb_factor) if ref_emb is None or ref_factor is None else (ref_emb, ref_factor)
    width, count = emb.shape[1], len(others[0])
    numbers = torch.arange(count + 1, dtype=torch.int32, device=emb.device)
    ordered, incoming = torch.sort(candidate.reshape(-1), stable=True)
    begin = torch.searchsorted(ordered, numbers)
    sides = [(emb_gradient, (emb, emb_factor), others, row, True, ref_emb is None)]
    if ref_emb is not None:
        sides.append((ref_gradient, others, (emb, emb_factor), numbers[:count], False, True))
    for gradient, (own, own_factor), (other, other_factor), owner, as_anchor, as_candidate in sides:
        if gradient is None:
            continue
        launch(
            kernels.pull,
            (-(-len(owner) // OWNERS), -(-width // DEPTH)),
            own,
            own.stride(0),
            own_factor,
            other,
            other.stride(0),
            other_factor,
            owner,
            row,
            candidate,
            distances,
            weights,
            incoming,
            begin,
            gradient,
            candidate.shape[1],
            len(candidate),
            width,
            len(owner),
            AS_ANCHOR=as_anchor,
            AS_CANDIDATE=as_candidate,
            DISTANCE=distance,
            OWNERS=OWNERS,
            PAIRS=PAIRS,
            DEPTH=DEPTH,
        )
