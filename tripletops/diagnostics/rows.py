"""Rows, pairs and classes for `geometry`, `spectrum` and `summary`: checked, and measured block by block.

Distances are measured in float64, whatever the type of the rows. Nothing of N×N elements is ever held.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator
from math import frexp, isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from tripletops._arguments import encode_rows
from tripletops._rows import check_finite, check_rows, row_distances

BLOCK = 1024  # rows of a block; pairs of two blocks are held at once
ELEMENTS = BLOCK * BLOCK

# Block distances have a relative error of at most 2**-31. This is the share of a squared distance by which
# Gram arithmetic may be off before the pair is measured from the difference of its rows instead.
_GRAM_ERROR = 2.0**-30
_LIMIT = 1000  # of the exponent of a scale: float64 holds it and its inverse
RELATIVE_ERROR = 2.0**-29  # of a block distance, with room for the other roundings


def checked(name: str, rows: Tensor) -> Tensor:
    """The rows without their graph, or what is wrong with them."""
    check_rows(name, rows)
    rows = rows.detach()
    check_finite(name, rows)
    return rows


def checked_pair(f: Tensor, g: Tensor, same_dimension: bool = True) -> tuple[Tensor, Tensor]:
    """Two embeddings of the same data."""
    f, g = checked("f", f), checked("g", g)
    if f.device != g.device:
        raise ValueError(f"f is on {f.device} and g on {g.device}")
    if len(f) != len(g) or (same_dimension and f.shape != g.shape):
        raise ValueError(
            f"f of shape {tuple(f.shape)} and g of shape {tuple(g.shape)} must embed the same data: "
            f"row i of both is the same sample"
        )
    return f, g


class Labelled(NamedTuple):
    """Rows that count, and their classes."""

    emb: Tensor
    labels: Tensor  # int64
    kept: Tensor | None  # which rows of the caller's these are; None: all

    def original(self, row: int) -> int:
        """The caller's number of a row."""
        return row if self.kept is None or row < 0 else int(self.kept[row])


def labelled(emb: Tensor, labels: Tensor, ignore_label: int | None) -> Labelled:
    """Rows and labels, checked, without those that `ignore_label` marks."""
    emb, labels, _, _, _, ignore_label = encode_rows(emb, labels, None, None, None, ignore_label)
    index = None
    if ignore_label is not None and (labels == ignore_label).any():
        index = (labels != ignore_label).nonzero()[:, 0]
        emb, labels = emb[index], labels[index]
    emb = emb.detach()
    check_finite("emb", emb, index)
    return Labelled(emb, labels, index)


def number(name: str, value: object, *, at_least: float | None = None) -> float:
    """A finite Python number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a Python number, got {value!r}")
    given = float(value)
    if not isfinite(given) or (at_least is not None and given < at_least):
        least = "" if at_least is None else f" and at least {at_least:g}"
        raise ValueError(f"{name}={given!r}: must be finite{least}")
    return given


def scale_of(*embeddings: Tensor) -> float:
    """A power of two, by which nothing is rounded, that brings rows near 1, so that no square overflows."""
    largest = [float(rows.abs().max()) if rows.numel() else 0.0 for rows in embeddings]
    return 2.0 ** -max(-_LIMIT, min(_LIMIT, frexp(max(largest))[1]))


def apart(rows: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """The distances of the pairs (left, right) times `scale`, from the differences of rows in float64."""
    step = max(1, ELEMENTS // max(1, rows.shape[1]))
    differences = (
        (rows[i].double() * scale - rows[j].double() * scale).square().sum(1).sqrt()
        for i, j in zip(left.split(step), right.split(step), strict=True)
    )
    return torch.cat(list(differences))


class Pairs:
    """All distances between rows, a block of pairs at a time, each with a relative error below
    `RELATIVE_ERROR`, and the same bits whenever a block is asked for again.

    The product of centred rows gives squared distances quickly. Where its rounding could be more than
    `_GRAM_ERROR` of the result, the pair is measured from the difference of its rows.
    """

    def __init__(self, rows: Tensor, scale: float | None = None) -> None:
        self.rows = rows
        self.scale = scale_of(rows) if scale is None else scale
        self.centred = rows.double() * self.scale
        self.centred -= self.centred.mean(0)
        self.squares = self.centred.square().sum(1)
        # Each of the sums that make a squared distance has D terms of absolute sum (‖x‖ + ‖y‖)² ≤ 2(x² + y²)
        # at most. An addition is off by half an epsilon of it; the other steps by less than 16 of them.
        self.rounding = 2 * (rows.shape[1] + 16) * torch.finfo(torch.float64).eps

    def block(self, left: slice, right: slice) -> Tensor:
        """Distances times `scale` of the rows `left` from the rows `right`."""
        sums = self.squares[left, None] + self.squares[None, right]
        squared = torch.addmm(sums, self.centred[left], self.centred[right].T, alpha=-2)
        coarse = squared <= sums.mul_(self.rounding / _GRAM_ERROR)
        count = int(coarse.count_nonzero())
        if count > coarse.numel() // 8:
            x, y = (self.rows[side].double() * self.scale for side in (left, right))
            return row_distances(x, y)
        distances = squared.clamp_(min=0).sqrt_()
        if count:
            i, j = coarse.nonzero(as_tuple=True)
            distances[i, j] = self.between(i + left.start, j + right.start)
        return distances

    def between(self, left: Tensor, right: Tensor) -> Tensor:
        """Distances times `scale` of some pairs, to float64's own precision."""
        return apart(self.rows, left, right, self.scale)


def blocks(count: int) -> Iterator[tuple[slice, slice]]:
    """Which blocks hold the pairs i < j of `count` rows."""
    starts = range(0, count, BLOCK)
    for i in starts:
        for j in starts[i // BLOCK :]:
            yield slice(i, min(count, i + BLOCK)), slice(j, min(count, j + BLOCK))


def class_batches(labels: Tensor, dimension: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Places (C,) of classes of equal size n among the sorted classes, and their rows (C, n).

    A batch of several classes is small enough that n×n distances for each of them may be held.
    """
    _, place, counts = labels.unique(return_inverse=True, return_counts=True)
    order, starts = place.argsort(stable=True), counts.cumsum(0) - counts
    for size in counts.unique().tolist():
        classes = (counts == size).nonzero()[:, 0]
        for some in classes.split(max(1, ELEMENTS // (size * max(size, dimension, 1)))):
            yield some, order[starts[some, None] + torch.arange(size, device=labels.device)]


def mean(emb: Tensor) -> Tensor:
    """(D,) float64."""
    total = torch.zeros(emb.shape[1], dtype=torch.float64, device=emb.device)
    for some in emb.split(BLOCK):
        total += some.double().sum(0)
    return total / len(emb)


def radius(emb: Tensor) -> float:
    """The largest distance of a row from their mean."""
    centre = mean(emb)
    return max(float((some.double() - centre).square().sum(1).max().sqrt()) for some in emb.split(BLOCK))
