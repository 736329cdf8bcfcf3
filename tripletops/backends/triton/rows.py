"""What the kernels read: rows ordered by class, centred, scaled and padded to whole tiles.

float32 and float64 rows are framed as on the CPU: multiplied by a power of two near one over their spread and
centred (cosine: normalised, then centred), so that products keep the digits that a common offset would take.
Half-precision rows stay half-precision numbers, which tensor cores multiply exactly; but for cosine, whose
unit rows are no such numbers.

Nothing here has a shape that depends on values, and nothing waits for the device.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tripletops._call import Call, Differentiated, compute_type
from tripletops._words import DISTANCE
from tripletops.backends.triton.tiles import LENGTHS, WIDTHS

HALVES = (torch.float16, torch.bfloat16)
SQEUCLIDEAN, COSINE = DISTANCE.code["sqeuclidean"], DISTANCE.code["cosine"]
_GRID = 16
_TINY_SQUARE = {torch.float32: 2.0**-99, torch.float64: 2.0**-899}  # smaller ones may have lost their digits


class Tiled(NamedTuple):
    """One side of the pairs as tiles are made of it, by position."""

    rows: Tensor
    half: Tensor
    nonzero: Tensor
    plain: Tensor
    row: Tensor


class Frame(NamedTuple):
    """() float64: how distances of framed rows are to be read."""

    unscale: Tensor  # from framed rows to distances, a power of two
    tiny: Tensor  # smaller distances may have lost their digits, as products; 0 where there are no outliers


class Places(NamedTuple):
    """By position of the anchors: where their class, and they themselves, lie among the candidates."""

    begin: Tensor
    end: Tensor
    self_position: Tensor


class Lifted(NamedTuple):
    """Rows as distances and gradients are computed from them."""

    rows: Tensor  # (N, D), the user's, under cosine times their lifts
    factor: Tensor  # (N,) float64, what a row is multiplied by: cosine: one over its norm, else the scale
    lift: Tensor | None  # (N,) float64, see `lifted`; None: 1


class Side(NamedTuple):
    """One side of the pairs. By row of the user's tensor: lifted, kept. By position: the rest."""

    lifted: Lifted
    kept: Tensor  # (N,) bool, those that are not ignored
    order: Tensor  # (N,) the row at a position
    row: Tensor  # (L,) int32, the same; −1: padding, or an ignored row
    rows: Tensor  # (L, W), 0 where there is nothing
    half: Tensor  # (L,) half the squared norms
    nonzero: Tensor  # (L,) 1, or 0 of a zero row under cosine
    plain: Tensor  # (L, W) lifted rows times their factors

    @property
    def tiled(self) -> Tiled:
        return Tiled(self.rows, self.half, self.nonzero, self.plain, self.row)

    def by_row(self, values: Tensor) -> Tensor:
        """(L, …) by position → (N, …) by row."""
        result = torch.empty((len(self.order), *values.shape[1:]), dtype=values.dtype, device=values.device)
        result[self.order] = values[: len(self.order)]
        return result


class Rows:
    """The rows of a call. Anchors are named by position, unless a name says row."""

    def __init__(self, given: Call | Differentiated, distance: int) -> None:
        self.given = given
        self.self_mining = given.ref_emb is None
        self.distance = distance
        self.width = given.emb.shape[1]
        self.kind = compute_type(given.emb)
        self.zero_rows = distance == COSINE and self.width > 0

        sides = [(given.emb, given.labels)]
        if given.ref_emb is not None and given.ref_labels is not None:
            sides.append((given.ref_emb, given.ref_labels))
        kept = [_kept(ids, given.ignore_label) for _, ids in sides]
        read = [rows.where(mask[:, None], 0) for (rows, _), mask in zip(sides, kept, strict=True)]
        self.finite = torch.stack([rows.isfinite().all() for rows in read]).all()
        lifts = [_lifts(rows) if self.zero_rows else None for rows in read]
        raw = [_times(rows, lift) for (rows, _), lift in zip(sides, lifts, strict=True)]
        read = [_times(rows, lift) for rows, lift in zip(read, lifts, strict=True)]
        orders = [torch.sort(ids, stable=True) for _, ids in sides]
        self.frame, framed = _frame(read, kept, distance, self.kind)
        self.anchors, *others = [
            _side(Lifted(rows, part.factor, lift), part, order.indices, mask, self.kind)
            for rows, lift, part, order, mask in zip(raw, lifts, framed, orders, kept, strict=True)
        ]
        self.candidates = others[0] if others else self.anchors
        self._place(orders[0].values, orders[-1].values, orders[-1].indices, kept[0])

    def _place(self, labels: Tensor, ref_labels: Tensor, ref_order: Tensor, kept: Tensor) -> None:
        """Where an anchor's class, and the anchor itself, lie among the candidates."""
        self_index = self.given.self_index
        length = len(self.anchors.row)
        alive = kept[self.anchors.order]
        begin = torch.searchsorted(ref_labels, labels).where(alive, 0)
        end = torch.searchsorted(ref_labels, labels, right=True).where(alive, 0)
        own = torch.full_like(begin, -1)
        if self.self_mining:
            own = torch.arange(len(labels), device=labels.device)
        elif self_index is not None and len(ref_order):
            position = torch.empty_like(ref_order)
            position[ref_order] = torch.arange(len(ref_order), device=ref_order.device)
            named = self_index[self.anchors.order]
            inside = (named >= 0) & (named < len(ref_order))
            own = position[named.where(inside, 0)].where(inside, -1)
        self.begin, self.end = _padded(begin, length, 0), _padded(end, length, 0)
        self.self_position = _padded(own, length, -1)

    @property
    def places(self) -> Places:
        return Places(self.begin, self.end, self.self_position)

    def under_cosine(self) -> Rows:
        """The same batch, by that distance."""
        return self if self.distance == COSINE else Rows(self.given, COSINE)

    @property
    def count(self) -> int:
        """Of the rows of emb."""
        return len(self.anchors.order)

    @cached_property
    def valid(self) -> Tensor:
        """(L,) whether an anchor has a positive and a negative."""
        return (self.positives > 0) & (self.negatives > 0)

    @cached_property
    def positives(self) -> Tensor:
        """(L,) how many positives an anchor has."""
        inside = (self.self_position >= self.begin) & (self.self_position < self.end)
        return self.end - self.begin - inside.to(torch.int32)

    @cached_property
    def negatives(self) -> Tensor:
        """(L,) how many negatives an anchor has."""
        usable = self.candidates.row >= 0
        own = self.self_position >= 0
        if len(usable):
            own = own & usable[self.self_position.long().clamp(min=0)]
        others = usable.sum() - own.to(torch.int32) - self.positives
        return others.where(self.anchors.row >= 0, 0)

    def by_row(self, values: Tensor) -> Tensor:
        """(…, L) by position → (…, N) by row of emb."""
        return self.anchors.by_row(values.movedim(-1, 0)).movedim(0, -1).contiguous()

    def by_position(self, values: Tensor) -> Tensor:
        """(…, N) by row of emb → (…, L), 0 in the padding."""
        return _padded(values[..., self.anchors.order], len(self.anchors.row), 0, values.dtype)


def _kept(labels: Tensor, ignore_label: int | None) -> Tensor:
    return torch.ones_like(labels, dtype=torch.bool) if ignore_label is None else labels != ignore_label


def _padded(values: Tensor, length: int, fill: int, dtype: torch.dtype = torch.int32) -> Tensor:
    shape = (*values.shape[:-1], length)
    result = torch.full(shape, fill, dtype=dtype, device=values.device)
    result[..., : values.shape[-1]] = values
    return result


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _power_of_two(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)


def _sizes(rows: Tensor) -> Tensor:
    """(N,) the largest magnitudes of the rows' elements."""
    return rows.abs().amax(1) if rows.shape[1] else rows.new_zeros(len(rows))


def _exponents(sizes: Tensor) -> Tensor:
    return torch.frexp(sizes.double()).exponent


def _lifts(rows: Tensor) -> Tensor:
    """(N,) powers of two, 1 but for tiny rows, whose largest elements they bring near 2⁻⁶⁰."""
    return _power_of_two((-60 - _exponents(_sizes(rows))).clamp(min=0))


def _times(rows: Tensor, lift: Tensor | None) -> Tensor:
    # A product of rows that overlap in memory would not have its elements side by side.
    return rows if lift is None else (rows * lift[:, None].to(rows.dtype)).contiguous()


def lifted(rows: Tensor, distance: int) -> Lifted:
    """The same rows, but for the scale, which only squares need.

    The gradient of the cosine of a tiny row may overflow, and the sum of two overflows may be NaN. So it is
    added up for the row times its lift, a power of two, and multiplied by that once, at the end.
    """
    if distance != COSINE or rows.shape[1] == 0:
        return Lifted(rows, torch.ones(len(rows), dtype=torch.float64, device=rows.device), None)
    lift = _lifts(rows)
    rows = _times(rows, lift)
    return Lifted(rows, _inverse_norms(rows), lift)


def _inverse_norms(rows: Tensor) -> Tensor:
    if rows.shape[1] == 0:
        return torch.ones(len(rows), dtype=torch.float64, device=rows.device)
    scale = _power_of_two(-_exponents(_sizes(rows)).clamp(-1000, 1000))
    square = (rows.double() * scale[:, None]).square().sum(1)
    return (scale / square.where(square > 0, 1).sqrt()).where(square > 0, 0)


class _Framed(NamedTuple):
    """The rows of a side, centred and scaled, by row."""

    factor: Tensor
    rows: Tensor
    half: Tensor
    nonzero: Tensor


def _frame(
    sides: list[Tensor], kept: list[Tensor], distance: int, kind: torch.dtype
) -> tuple[Frame, list[_Framed]]:
    """How distances of framed rows are to be read, and the sides, framed."""
    if distance == COSINE:
        factors = [_inverse_norms(rows) for rows in sides]
        units = [rows.double() * factor[:, None] for rows, factor in zip(sides, factors, strict=True)]
        number = torch.stack([mask.sum() for mask in kept]).sum().clamp(min=1)
        centre = torch.stack([rows.sum(0) for rows in units]).sum(0) / number
        scale = torch.ones((), dtype=torch.float64, device=centre.device)
        tiny = torch.zeros_like(scale)
        nonzero = [(factor != 0) | (rows.shape[1] == 0) for rows, factor in zip(units, factors, strict=True)]
        framed = [(rows - centre).to(kind) for rows in units]
    else:
        scale, centre, outliers = _grid_frame(sides, kept, kind)
        if sides[0].dtype == torch.float16:  # whose squares fit float32 as they are, while scaling may round
            scale, centre, outliers = torch.ones_like(scale), centre / scale, torch.zeros_like(outliers)
        square = (_TINY_SQUARE[kind] / scale / scale).where(outliers, 0)
        tiny = square if distance == SQEUCLIDEAN else square.sqrt()
        if sides[0].dtype in HALVES:
            centre, kind = _exact_centre(sides, kept, scale, centre), sides[0].dtype
        factors = [scale.expand(len(rows)).contiguous() for rows in sides]
        nonzero = [torch.ones_like(mask) for mask in kept]
        framed = [(rows.double() * scale - centre).to(kind) for rows in sides]
    sides_framed = [_framed(*parts) for parts in zip(factors, framed, nonzero, kept, strict=True)]
    return Frame(1 / scale, tiny), sides_framed


def _exact_centre(sides: list[Tensor], kept: list[Tensor], scale: Tensor, centre: Tensor) -> Tensor:
    """Of half-precision rows: 0 where to take the centre away would round them.

    It does not where all rows are within a factor of two of it, as with a large common offset; where some are
    not, the spread itself is as large as the offset.
    """
    dtype = sides[0].dtype
    centre = centre.to(dtype).double()
    exact = centre.isfinite()
    for rows, mask in zip(sides, kept, strict=True):
        framed = rows.double() * scale - centre
        exact &= ((framed.to(dtype).double() == framed) | ~mask[:, None]).all(0)
    return centre.where(exact, 0)


def _framed(factor: Tensor, framed: Tensor, nonzero: Tensor, kept: Tensor) -> _Framed:
    framed = framed.where(kept[:, None], 0)
    # S = 0 of a zero row with everything: ½ added on its side makes 1 − S come out of the arithmetic.
    half = framed.double().square().sum(1) / 2 + 0.5 * (~nonzero).double()
    return _Framed(factor, framed, half, nonzero)


def _sample(rows: Tensor, mask: Tensor) -> Tensor:
    """Up to nine of the rows in the mask, an odd number of them, evenly spread."""
    count = min(9, (len(rows) - 1) | 1)
    first = torch.sort(mask.to(torch.int8), descending=True, stable=True).indices
    place = torch.arange(count, device=rows.device) * (mask.sum() - 1).clamp(min=0) // max(count - 1, 1)
    return rows[first[place]]


def _median(values: Tensor) -> Tensor:
    """Over dimension 0, of an odd number."""
    return values.sort(0).values[len(values) // 2]


def _extent(sizes: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Exponents of the sizes of `number` rows: the largest, and the median, or the least that is not 0."""
    there = sizes > 0
    exponents = _exponents(sizes).where(there, 2**20).sort().values
    middle = ((number - 1) // 2 - (number - there.sum())).clamp(min=0)
    largest, median = exponents[torch.stack([(there.sum() - 1).clamp(min=0), middle])].where(there.any(), 0)
    return largest, median


def _grid_frame(sides: list[Tensor], kept: list[Tensor], kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(scale, centre, whether there are outliers), as in `csrc/kernels/survey.h`.

    The origin is the median of some rows, coordinate by coordinate: it lies among most rows, wherever a few
    others are, and on the grid that rows may lie on. The centre lies a whole number of sixteenths of the
    spread away from it: data on a grid stays on one, and its ties stay ties. Outliers move the mean away from
    all other rows; then the centre is the origin, or 0 where that is nearer to most rows. And the scale lies
    in the middle between the two, so that the squares of neither leave the exponents of `kind`.
    """
    rows, mask = sides[-1], kept[-1]
    if not mask.numel():
        rows, mask = sides[0], kept[0]
    if not mask.numel():
        rows = torch.zeros((1, rows.shape[1]), dtype=rows.dtype, device=rows.device)
        mask = torch.ones(1, dtype=torch.bool, device=rows.device)
    # Halves, because the difference of two of the largest numbers would not be finite.
    sample = _sample(rows, mask).double() / 2
    origin = _median(sample)
    away = [
        (side.double() / 2 - origin).where(there[:, None], 0) for side, there in zip(sides, kept, strict=True)
    ]
    number = torch.stack([there.sum() for there in kept]).sum().clamp(min=1)
    largest, median = _extent(torch.cat([*map(_sizes, away), origin.new_zeros(1)]), number + 1)
    outliers = largest - median > 5
    around_zero = outliers & (_exponents(_median(_sizes(sample))) < median)
    middle = largest - ((largest - median) // 2).clamp(max=50 if kind == torch.float32 else 400)
    limit = 126 if kind == torch.float32 else 1022
    scale = _power_of_two(-(middle.where(outliers, largest) + 1).clamp(-limit, limit))
    mean = torch.stack([(side / number).sum(0) for side in away]).sum(0)
    centre = origin * scale * 2 + (mean * scale * 2 * _GRID).round().where(~outliers, 0) / _GRID
    return scale, centre.where(~around_zero, 0), outliers


def _side(lifted: Lifted, framed: _Framed, order: Tensor, kept: Tensor, kind: torch.dtype) -> Side:
    count, width = lifted.rows.shape
    length = _up(max(count, 1), LENGTHS)
    plain = lifted.rows.where(kept[:, None], 0).double() * lifted.factor[:, None]

    def placed(values: Tensor) -> Tensor:
        whole = torch.zeros((length, _up(width, WIDTHS)), dtype=values.dtype, device=values.device)
        whole[:count, :width] = values[order]
        return whole

    return Side(
        lifted=lifted,
        kept=kept,
        order=order,
        row=_padded(order.where(kept[order], -1), length, -1),
        rows=placed(framed.rows),
        half=_padded(framed.half[order], length, 0, kind),
        nonzero=_padded(framed.nonzero[order], length, 0, kind),
        plain=placed(plain.to(framed.rows.dtype)),
    )
