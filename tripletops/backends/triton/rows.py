"""The rows of a call as the kernels read them.

A batch of everyday size is walked over as it is. The rows of a larger one are framed first (`framing`), for
products; and where that saves work they are ordered by class, so that a row's positives lie in one range.
Anchors and candidates are named by position: that is the row itself, unless they are ordered.

Nothing here has a shape that depends on values, and nothing waits for the device.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from tripletops._call import Call, Differentiated, compute_type
from tripletops._words import DISTANCE
from tripletops.backends.triton import framing
from tripletops.backends.triton.framing import HALVES, SAMPLED, Frame, Given, Names, Unit
from tripletops.backends.triton.tiles import (
    BLOCKS,
    COUNTED,
    DEPTH,
    FEW,
    LENGTHS,
    SAMPLED_DEPTH,
    SURVEYED,
    WIDTHS,
    is_everyday,
    launch,
)

SQEUCLIDEAN, COSINE = DISTANCE.code["sqeuclidean"], DISTANCE.code["cosine"]
LANGUAGE = {torch.float32: tl.float32, torch.float64: tl.float64}  # types by their names in kernels


class Tiled(NamedTuple):
    """One side of the pairs as tiles are made of it, by position: framed rows."""

    rows: Tensor  # (L, W), 0 where there is nothing
    half: Tensor  # (L,) half the squared norms
    nonzero: Tensor  # (L,) 1, or 0 of a zero row under cosine
    plain: Tensor  # (L, W) the same rows, scaled alone
    row: Tensor
    label: Tensor


class Raw(NamedTuple):
    """One side of the pairs as the user holds it, by row: what distances are measured from."""

    rows: Tensor
    stride: int
    unit: Unit


class Everyday(NamedTuple):
    """The same, as tiles are made of it."""

    rows: Tensor
    stride: int
    unit: Unit
    row: Tensor
    label: Tensor


class Side(NamedTuple):
    given: Given
    unit: Unit
    names: Names
    order: Tensor | None  # (N,) the row at a position; None: the position itself
    tiled: Any  # Tiled or Everyday

    @property
    def raw(self) -> Raw:
        return Raw(self.given.rows, self.given.stride, self.unit)

    @property
    def row(self) -> Tensor:
        return self.names.row

    def by_row(self, values: Tensor) -> Tensor:
        """(L, …) by position → (N, …) by row."""
        values = values[: self.given.count]
        if self.order is None:
            return values
        result = torch.empty_like(values)
        result[self.order] = values
        return result


def up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def units(rows: Tensor) -> Unit:
    """What the cosine multiplies these rows by, as yet unknown."""
    return Unit(*torch.empty((2, len(rows)), dtype=torch.float64, device=rows.device).unbind())


def names_of(length: int, device: torch.device) -> Names:
    row, source, own, begin, end = torch.empty((5, length), dtype=torch.int32, device=device).unbind()
    return Names(row, source, torch.empty(length, dtype=torch.int64, device=device), own, begin, end)


class Rows:
    """The rows of a call. Anchors are named by position, unless a name says row."""

    def __init__(
        self,
        given: Call | Differentiated,
        distance: int,
        *,
        ordered: bool | None = None,
        framed: bool | None = None,
        plain: bool = False,
        units_only: bool = False,
    ) -> None:
        """What is left open goes by the size of the batch. With `units_only`, only `raw` may be asked for."""
        self.call = given
        self.self_mining = given.ref_emb is None
        self.distance = distance
        self.width = given.emb.shape[1]
        self.kind = compute_type(given.emb)
        self.zero_rows = distance == COSINE and self.width > 0
        self.device = given.emb.device
        sides = [(given.emb, given.labels)]
        if given.ref_emb is not None and given.ref_labels is not None:
            sides.append((given.ref_emb, given.ref_labels))
        self._sides = [Given(rows, rows.stride(0), labels, len(rows)) for rows, labels in sides]
        few = is_everyday(max(side.count for side in self._sides))
        self.everyday = not framed if framed is not None else few and not ordered
        self.ordered = not self.everyday if ordered is None else ordered
        self._units = [units(side.rows) for side in self._sides]
        self._names = [names_of(up(max(side.count, 1), LENGTHS), self.device) for side in self._sides]
        compared = [side.rows for side in self._sides]
        self._relative = self.everyday and distance == COSINE and not units_only
        if self._relative:
            compared = [torch.empty(rows.shape, dtype=self.kind, device=self.device) for rows in compared]
        self._lengths = [len(names.row) for names in self._names]
        self.length = self._lengths[0]  # of anchors by position
        self.count = self._sides[0].count  # of the rows of emb
        self.exponents = 2 * FEW  # as many as `device.scale_of` has to look at
        self._survey(compared)
        if self.everyday:
            tiled = [
                Everyday(rows, rows.stride(0), unit, names.row, names.label)
                for rows, unit, names in zip(compared, self._units, self._names, strict=True)
            ]
            orders = [None] * len(tiled)
        else:
            self._frame()
            tiled, orders = self._place(plain)
        self.anchors, *others = [
            Side(*parts) for parts in zip(self._sides, self._units, self._names, orders, tiled, strict=True)
        ]
        self.candidates = others[0] if others else self.anchors

    # How the kernels are given it all.

    @property
    def _language(self) -> Any:
        return LANGUAGE[self.kind]

    @property
    def _ignoring(self) -> dict[str, Any]:
        ignore = self.call.ignore_label
        return {"ignore": 0 if ignore is None else ignore, "IGNORES": ignore is not None}

    def _self_of(self, side: int) -> str:
        if self.self_mining:
            return "same"
        return "none" if side or self.call.self_index is None else "named"

    @property
    def _self_index(self) -> Tensor:
        # Any tensor will do where there is none.
        return self.call.labels if self.call.self_index is None else self.call.self_index

    def _survey(self, relative: list[Tensor]) -> None:
        entries = sum(side.count for side in self._sides)
        exponent = torch.empty(max(entries, 1), dtype=torch.int32, device=self.device)
        unknown = self._units[0].factor  # numbers of a frame that nobody asks for without one
        self.frame = Frame(exponent, entries, unknown, unknown)
        blocks = [length // SURVEYED for length in self._lengths]
        framed = not self.everyday
        shape = sum(blocks) if framed else 0, self.width
        sums = torch.empty(shape, dtype=torch.float64, device=self.device)
        origin, sample_exponent = sums, exponent
        if framed and self.distance != COSINE:
            origin = torch.empty(self.width, dtype=torch.float64, device=self.device)
            sample_exponent = torch.empty(1, dtype=torch.int32, device=self.device)
            sampled = self._sides[-1] if self._sides[-1].count else self._sides[0]
            launch(
                framing.origin_kernel,
                (1,),
                self.device,
                given=sampled,
                origin=origin,
                sample_exponent=sample_exponent,
                width=self.width,
                sampled=min(SAMPLED, (sampled.count - 1) | 1),
                **self._ignoring,
                BLOCK=BLOCKS,
                DEPTH=SAMPLED_DEPTH,
            )
        self._origin, self._sample_exponent, self._sums = origin, sample_exponent, sums
        first = 0
        for place, (side, unit, names) in enumerate(zip(self._sides, self._units, self._names, strict=True)):
            launch(
                framing.survey_kernel,
                (blocks[place],),
                self.device,
                given=side,
                names=names,
                unit=unit,
                reference=self._sides[0],
                relative=relative[place],
                self_index=self._self_index,
                origin=origin,
                exponents=exponent,
                sums=sums[sum(blocks[:place]) :],
                width=self.width,
                first=first,
                rows=entries,
                candidates=self._sides[-1].count,
                **self._ignoring,
                WHOLE=self.everyday,
                RELATIVE=self._relative,
                SELF=self._self_of(place),
                COSINE=self.distance == COSINE,
                KIND=self._language,
                FEW=FEW,
                ROWS=SURVEYED,
                DEPTH=DEPTH,
            )
            first += side.count

    def _frame(self) -> None:
        exponents, entries, *_ = self.frame
        self.frame = Frame(
            torch.empty(1, dtype=torch.int32, device=self.device),
            1,
            *torch.empty((2, 1), dtype=torch.float64, device=self.device).unbind(),
        )
        self._centre = torch.empty(self.width, dtype=torch.float64, device=self.device)
        dtype = self._sides[0].rows.dtype
        launch(
            framing.frame_kernel,
            (max(1, -(-self.width // DEPTH)),),
            self.device,
            exponents=exponents,
            sums=self._sums,
            origin=self._origin,
            sample_exponent=self._sample_exponent,
            frame=self.frame,
            centre=self._centre,
            entries=entries,
            blocks=len(self._sums),
            width=self.width,
            DISTANCE=self.distance,
            KIND=self._language,
            SCALES=dtype != torch.float16,
            BLOCK=COUNTED,
            ROWS=SURVEYED,
            DEPTH=DEPTH,
        )
        if dtype in HALVES and self.distance != COSINE:
            self._make_centre_exact()

    def _make_centre_exact(self) -> None:
        blocks = [-(-side.count // SURVEYED) for side in self._sides]
        exact = torch.empty((sum(blocks), self.width), dtype=torch.int32, device=self.device)
        sizes = {"width": self.width, "ROWS": SURVEYED, "DEPTH": DEPTH}
        for place, side in enumerate(self._sides):
            launch(
                framing.exact_kernel,
                (blocks[place],),
                self.device,
                given=side,
                frame=self.frame,
                centre=self._centre,
                exact=exact[sum(blocks[:place]) :],
                **self._ignoring,
                KIND=self._language,
                **sizes,
            )
        launch(
            framing.exact_centre_kernel,
            (-(-self.width // DEPTH),),
            self.device,
            centre=self._centre,
            exact=exact,
            blocks=len(exact),
            rows=self._sides[0].rows,
            **sizes,
        )

    def _place(self, plain: bool) -> tuple[list[Tiled], list[Tensor | None]]:
        dtype = self._sides[0].rows.dtype
        stored = dtype if dtype in HALVES and self.distance != COSINE else self.kind
        wide = up(self.width, WIDTHS)
        tiled: list[Tiled] = []
        orders: list[Tensor | None] = []
        # Candidates first: anchors are told where they lie.
        candidate_labels = candidate_places = self._sides[-1].label
        for place in reversed(range(len(self._sides))):
            side, names, length = self._sides[place], self._names[place], self._lengths[place]
            rows = torch.empty((length, wide), dtype=stored, device=self.device)
            half, nonzero = torch.empty((2, length), dtype=self.kind, device=self.device).unbind()
            scaled = torch.empty_like(rows) if plain else rows
            out = Tiled(rows, half, nonzero, scaled, names.row, names.label)
            order, own_place = None, candidate_places
            if self.ordered:
                labels, order = torch.sort(side.label, stable=True)
                own_place = torch.empty(side.count, dtype=torch.int32, device=self.device)
                if place == len(self._sides) - 1:
                    candidate_labels, candidate_places = labels, own_place
            launch(
                framing.place_kernel,
                (length // SURVEYED,),
                self.device,
                given=side,
                names=names,
                unit=self._units[place],
                self_index=self._self_index,
                order=side.label if order is None else order,
                place_of=candidate_places,
                own_place=own_place,
                ordered=candidate_labels,
                frame=self.frame,
                centre=self._centre,
                out=out,
                width=self.width,
                whole_width=wide,
                candidates=self._sides[-1].count,
                steps=self._sides[-1].count.bit_length(),
                **self._ignoring,
                ORDERED=self.ordered,
                PLAIN=plain,
                SELF=self._self_of(place),
                COSINE=self.distance == COSINE,
                KIND=self._language,
                ROWS=SURVEYED,
                DEPTH=DEPTH,
            )
            tiled.insert(0, out)
            orders.insert(0, order)
        return tiled, orders

    # What is asked of it.

    @property
    def finite(self) -> Tensor:
        """() whether all rows that are read are finite; of framed rows."""
        return self.frame.exponent[0] < framing.NOT_FINITE.value

    def under_cosine(self) -> Rows:
        """The same batch, by that distance."""
        if self.distance == COSINE:
            return self
        return Rows(self.call, COSINE, ordered=self.ordered, framed=not self.everyday)

    @cached_property
    def valid(self) -> Tensor:
        """(L,) whether an anchor has a positive and a negative."""
        return (self.positives > 0) & (self.negatives > 0)

    @cached_property
    def positives(self) -> Tensor:
        """(L,) how many positives an anchor has, of ordered rows."""
        *_, own, begin, end = self.anchors.names
        inside = (own >= begin) & (own < end)
        return end - begin - inside.to(torch.int32)

    @cached_property
    def negatives(self) -> Tensor:
        """(L,) how many negatives an anchor has, of ordered rows."""
        usable, own = self.candidates.row >= 0, self.anchors.names.self_position
        there = (own >= 0) & usable[own.long().clamp(0, len(usable) - 1)]
        others = usable.sum() - there.to(torch.int32) - self.positives
        return others.masked_fill(self.anchors.row < 0, 0)

    def by_row(self, values: Tensor) -> Tensor:
        """(…, L) by position → (…, N) by row of emb."""
        return self.anchors.by_row(values.movedim(-1, 0)).movedim(0, -1).contiguous()

    def by_position(self, values: Tensor) -> Tensor:
        """(…, N) by row of emb → (…, L), 0 in the padding."""
        result = values.new_zeros((*values.shape[:-1], self.length))
        result[..., : self.count] = values if self.anchors.order is None else values[..., self.anchors.order]
        return result


def raws(given: Differentiated, distance: int) -> tuple[Raw, Raw | None]:
    """The rows of emb and of ref_emb, if there is one, without a frame."""
    if distance == COSINE:
        rows = Rows(given, distance, ordered=False, framed=False, units_only=True)
        return rows.anchors.raw, None if rows.self_mining else rows.candidates.raw

    def raw(rows: Tensor) -> Raw:
        return Raw(rows, rows.stride(0), Unit(rows, rows))

    return raw(given.emb), None if given.ref_emb is None else raw(given.ref_emb)
