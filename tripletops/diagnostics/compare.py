"""How far two embeddings of the same data are apart, in the words of paper 000: (12), (14) and (26).

All of it is exact for many rows, without a matrix of all pairs, and in float64 whatever the type of the rows.
Rows must be finite: a ValueError names the first that is not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tripletops._rows import row_distances
from tripletops.diagnostics.rows import (
    BLOCK,
    RELATIVE_ERROR,
    Pairs,
    blocks,
    checked_pair,
    class_batches,
    labelled,
    scale_of,
)
from tripletops.evaluate import nearest

__all__ = [
    "Hausdorff",
    "IsometricError",
    "PointwiseDistance",
    "hausdorff",
    "isometric_error",
    "pointwise_distance",
]


class Hausdorff(NamedTuple):
    """The Hausdorff-like distance (12) of two embeddings."""

    value: float
    """The largest of `values`."""
    label: int
    """The class that has it."""
    classes: Tensor
    """(C,) int64, the labels in ascending order."""
    values: Tensor
    """(C,) float64, the Hausdorff distance of each class's two sets of points."""


class PointwiseDistance(NamedTuple):
    """The largest movement of a row between two embeddings (26)."""

    value: float
    """Its distance."""
    row: int
    """The row."""


class IsometricError(NamedTuple):
    """The pair whose distance differs most between two embeddings (14)."""

    value: float
    """By how much; 0 for fewer than two rows."""
    pair: tuple[int, int]
    """The two rows, the lower one first; (−1, −1) for fewer than two rows."""


def hausdorff(f: Tensor, g: Tensor, labels: Tensor, *, ignore_label: int | None = None) -> Hausdorff:
    """The Hausdorff-like distance (12): the largest Hausdorff distance of any class, between the two
    sets of points that f and g make of it.

    That of two sets is the largest distance of a point of either from the nearest point of the other.

    Args:
        f, g: (N, D), two embeddings of the same data.
        labels: (N,) integer class ids of both.
        ignore_label: rows with it do not count.
    """
    if ignore_label is None:
        f, g = checked_pair(f, g)
    given, other = (labelled(rows, labels, ignore_label) for rows in (f, g))
    f, g = checked_pair(given.emb, other.emb)
    classes, scale = given.labels.unique(), scale_of(f, g)
    if len(classes) == 0:
        raise ValueError(f"f of shape {tuple(f.shape)} has no row that counts")
    values = torch.zeros(len(classes), dtype=torch.float64, device=f.device)
    for some, rows in class_batches(given.labels, f.shape[1]):
        if rows.shape[1] > BLOCK:
            x, y = f[rows[0]].double(), g[rows[0]].double()
            values[some] = torch.maximum(nearest(x, 1, y).distances.max(), nearest(y, 1, x).distances.max())
        else:
            distances = row_distances(f[rows].double() * scale, g[rows].double() * scale)
            there, back = distances.amin(2).amax(1), distances.amin(1).amax(1)
            values[some] = torch.maximum(there, back) / scale
    place = int(values.argmax())
    return Hausdorff(float(values[place]), int(classes[place]), classes, values)


def pointwise_distance(f: Tensor, g: Tensor) -> PointwiseDistance:
    """The largest distance ‖f(x) − g(x)‖ of a row of f, (N, D), from the same row of g (26).

    It is never smaller than `hausdorff`, which lets rows of a class change places.
    """
    f, g = checked_pair(f, g)
    if len(f) == 0:
        raise ValueError(f"f of shape {tuple(f.shape)} has no row")
    scale = scale_of(f, g)
    moved = torch.cat(
        [
            (x.double() * scale - y.double() * scale).square().sum(1).sqrt()
            for x, y in zip(f.split(BLOCK), g.split(BLOCK), strict=True)
        ]
    )
    row = int(moved.argmax())
    return PointwiseDistance(float(moved[row]) / scale, row)


def isometric_error(f: Tensor, g: Tensor) -> IsometricError:
    """The isometric error (14): the largest difference between the distance of two rows in f and in g.

    Every pair is looked at, N·N/2 distances of either embedding. Two embeddings that differ by no more than
    rounding, as rotated copies do, take some ten times as long.

    Args:
        f, g: (N, D) and (N, E), two embeddings of the same data.
    """
    f, g = checked_pair(f, g, same_dimension=False)
    if len(f) < 2:
        return IsometricError(0.0, (-1, -1))
    # One scale for both, so that their distances can be compared.
    scale = scale_of(f, g)
    in_f, in_g = Pairs(f, scale), Pairs(g, scale)
    best, pair = -1.0, (-1, -1)
    for left, right in blocks(len(f)):
        near, far = in_f.block(left, right), in_g.block(left, right)
        largest = (near - far).abs_()
        # With what rounding may have taken from it, no pair of the block differs by more.
        largest += near.add_(far).mul_(RELATIVE_ERROR)
        if left == right:
            largest = largest.triu(1)
        i, j = (largest > best).nonzero(as_tuple=True)
        if left == right:
            i, j = i[i < j], j[i < j]
        if len(i) == 0:
            continue
        # The most promising pair first: it leaves few others to be measured.
        for some in (largest[i, j].argmax()[None], None):
            chosen = (largest[i, j] >= best).nonzero()[:, 0] if some is None else some
            x, y = i[chosen] + left.start, j[chosen] + right.start
            if len(x) == 0:
                continue
            differences = (in_f.between(x, y) - in_g.between(x, y)).abs()
            place = int(differences.argmax())
            value, found = float(differences[place]), (int(x[place]), int(y[place]))
            if value > best or (value == best and found < pair):
                best, pair = value, found
    return IsometricError(best / scale, pair)
