"""How many directions an embedding fills: its thickness (9a of paper 000) and its effective rank.

Both come from D×D covariances, summed over blocks of rows in float64 whatever the type of the rows. Rows must
be finite: a ValueError names the first that is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from tripletops._rows import whole
from tripletops.diagnostics.rows import BLOCK, checked, scale_of

__all__ = ["Thickness", "effective_rank", "thickness"]

_EPSILON = torch.finfo(torch.float64).eps
_DESCENT = 60  # steps of the search for a thinner direction
_STARTS = 3  # directions that the search starts from


class Thickness(NamedTuple):
    """An interval that holds the thickness, and a direction."""

    lower: float
    """The thickness is at least this. It is proved, see `thickness`."""
    upper: float
    """The thickness is at most this: the width of the rows along `direction`."""
    direction: Tensor
    """(D,) float64 of length 1, the thinnest direction that was found."""


def thickness(emb: Tensor, *, rounds: int = 40) -> Thickness:
    """Bounds of the thickness (9a): the least width of the rows of `emb`, (N, D), along any direction.

    The least width is hard to find, so an interval is given. It is as narrow as rounding allows for D ≤ 2,
    and for N ≤ D, where the thickness is 0: some direction is orthogonal to all N − 1 differences.

    The upper bound is the width along the best direction that was found, plus rounding.

    The lower bound is proved. Give the rows any weights p ≥ 0 of sum 1, and let e have length 1. The numbers
    t = e·x lie between a and b, b − a being the width along e. With their weighted mean m, (t − a)(b − t) ≥ 0
    gives Var t ≤ (b − m)(m − a) ≤ (b − a)²/4. And Var t = eᵀ·Cov·e ≥ λ, the least eigenvalue of the weighted
    covariance. So no width is below 2·√λ, whatever the weights: those with the largest λ found are taken.
    What rounding may have added to λ is subtracted first.

    Args:
        emb: (N, D), D at least 1. Fewer than two rows have thickness 0.
        rounds: of the search for weights. More may narrow the interval.
    """
    emb, rounds = checked("emb", emb), whole("rounds", rounds)
    count, dimension = emb.shape
    if dimension == 0:
        raise ValueError(f"emb of shape {tuple(emb.shape)} has no direction: D must be at least 1")
    if count == 0:
        return Thickness(0.0, 0.0, torch.eye(dimension, dtype=torch.float64, device=emb.device)[0])
    rows = _Rows(emb)
    if count <= dimension:
        return Thickness(0.0, 0.0, rows.eigen(rows.even_weights())[1][:, 0])
    if dimension == 1:
        found = rows.thinnest(torch.ones(1, 1, dtype=torch.float64, device=emb.device))
    elif dimension == 2:
        found = rows.thinnest(_edge_normals(rows))
    else:
        found = _searched(rows, rounds)
    return Thickness(found.lower / rows.scale, found.upper / rows.scale, found.direction)


class _Rows:
    """Centred rows in float64, scaled to be near 1, a block at a time."""

    def __init__(self, emb: Tensor) -> None:
        self.emb, self.scale = emb, scale_of(emb)
        self.centre = emb[0].double() * self.scale
        # From the first row on, so that rows which are all equal are at exactly 0.
        self.centre = self.centre + sum(some.sum(0) for some in self.split()) / len(emb)

    def split(self) -> Iterator[Tensor]:
        for some in self.emb.split(4 * BLOCK):
            # Of one layout, whatever that of the rows: products of it have the same bits.
            yield (some.double() * self.scale - self.centre).contiguous()

    def even_weights(self) -> Tensor:
        count = len(self.emb)
        return torch.full((count,), 1 / count, dtype=torch.float64, device=self.emb.device)

    def widths(self, directions: Tensor) -> Tensor:
        """Along each of the directions, (K, D)."""
        low = self.centre.new_full((len(directions),), torch.inf)
        high = -low
        for some in self.split():
            along = some @ directions.T
            low, high = torch.minimum(low, along.amin(0)), torch.maximum(high, along.amax(0))
        return high - low

    def rounding(self) -> float:
        """By how much the width along a direction can be off: its products have D terms."""
        reach = sqrt(max(float(some.square().sum(1).max()) for some in self.split()))
        return 4 * (self.emb.shape[1] + 8) * _EPSILON * reach

    def thinnest(self, directions: Tensor) -> Thickness:
        """The thickness, where it is known to be the width along one of these directions."""
        widths = torch.cat([self.widths(some) for some in directions.split(BLOCK)])
        least, rounding = float(widths.min()), self.rounding()
        return Thickness(max(0.0, least - rounding), least + rounding, directions[int(widths.argmin())])

    def eigen(self, weights: Tensor) -> tuple[Tensor, Tensor, float]:
        """Eigenvalues of the weighted covariance, from the least, their vectors as columns, and by how much
        an eigenvalue can be off: sums of N terms, and D for the decomposition, which is backward stable."""
        dimension = self.emb.shape[1]
        second = self.centre.new_zeros(dimension, dimension)
        first = self.centre.new_zeros(dimension)
        for some, share in zip(self.split(), weights.split(4 * BLOCK), strict=True):
            second += some.T @ (some * share[:, None])
            first += share @ some
        values, vectors = torch.linalg.eigh(second - first.outer(first))
        terms = len(self.emb) + 16 * dimension + 16
        return values, vectors, 2 * terms * _EPSILON * float(second.trace())


def _searched(rows: _Rows, rounds: int) -> Thickness:
    """Weights with a large least eigenvalue, and directions with a small width.

    Rows that lie far out along the thin directions gain weight. The sum of squares, each divided by the
    square of the direction's eigenvalue, says how far; its root is the factor. Any weights give a bound.
    """
    weights, least, candidates = rows.even_weights(), 0.0, []
    for _ in range(rounds):
        values, vectors, rounding = rows.eigen(weights)
        least = max(least, float(values[0]) - rounding)
        widths = rows.widths(vectors.T)
        thin = widths.topk(min(_STARTS, len(widths)), largest=False).indices
        candidates += [(float(widths[place]), vectors[:, place]) for place in thin.tolist()]
        if float(values[0]) <= rounding:
            break
        far = torch.cat([((some @ vectors).square() / values.square()).sum(1) for some in rows.split()])
        weights = weights * far.sqrt()
        # The proof needs weights of sum 1. Their rounding is part of that of the eigenvalues.
        weights /= weights.sum()
    candidates = sorted(candidates, key=lambda one: one[0])[:_STARTS]
    width, direction = min((_descend(rows, start) for _, start in candidates), key=lambda one: one[0])
    return Thickness(2 * sqrt(least), width + rows.rounding(), direction)


def _descend(rows: _Rows, direction: Tensor) -> tuple[float, Tensor]:
    """The thinnest direction met on a walk down from one.

    The width is a convex function of the direction, with the difference of the two outermost rows as its
    subgradient. A step aims at a width that is somewhat lower, and aims less low where that fails.
    """
    best, thinnest, aim = torch.inf, direction, 0.1
    for _ in range(_DESCENT):
        along = torch.cat([some @ direction for some in rows.split()])
        width = float(along.max() - along.min())
        if width < best:
            best, thinnest = width, direction
        else:
            aim *= 0.8
        ends = rows.emb[[int(along.argmax()), int(along.argmin())]].double() * rows.scale
        across = ends[0] - ends[1]
        across = across - (across @ direction) * direction
        length = float(across.square().sum())
        if length == 0:
            break
        direction = direction - (width - (1 - aim) * best) / length * across
        direction = direction / direction.norm()
    return best, thinnest


def _edge_normals(rows: _Rows) -> Tensor:
    """The normals of the edges of the convex hull of rows in the plane: the least width is along one."""
    # Not the centred rows: differences of the rows given have all their digits, however short an edge is.
    points = sorted({(x, y) for x, y in (rows.emb.double() * rows.scale).tolist()})
    hull: list[tuple[float, float]] = []
    for side in (points, points[::-1]):
        chain: list[tuple[float, float]] = []
        for point in side:
            while len(chain) > 1 and _turn(chain[-2], chain[-1], point) <= 0:
                chain.pop()
            chain.append(point)
        hull += chain[:-1]
    if not hull:
        return rows.centre.new_tensor([[1.0, 0.0]])
    corners = rows.centre.new_tensor(hull)
    edges: Tensor = corners.roll(-1, 0) - corners
    normals: Tensor = torch.stack([-edges[:, 1], edges[:, 0]], 1) / edges.norm(dim=1, keepdim=True)
    return normals


def _turn(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> float:
    """Above 0 where the way from a over b to c turns left."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def effective_rank(emb: Tensor) -> float:
    """The effective rank (Roy & Vetterli 2007) of the centred rows of `emb`, (N, D).

    It is exp(H), H being the entropy of the singular values σ of the rows minus their mean, divided by their
    sum. It lies between 1, all rows on a line, and min(N − 1, D), the same spread in every direction. Rows
    that are all equal, or one row, have 0. The σ² are eigenvalues of the D×D covariance, or, for fewer rows
    than columns, of the N×N products of rows. Those below 16·epsilon times the number of them times the
    largest are rounding, and count as 0.
    """
    emb = checked("emb", emb)
    if len(emb) == 0:
        raise ValueError(f"emb of shape {tuple(emb.shape)} has no row")
    if emb.shape[1] == 0:
        return 0.0
    rows = _Rows(emb)
    if len(emb) < emb.shape[1]:
        centred = torch.cat(list(rows.split()))
        products = centred @ centred.T
    else:
        products = rows.centre.new_zeros(emb.shape[1], emb.shape[1])
        for some in rows.split():
            products += some.T @ some
    values = torch.linalg.eigvalsh(products)
    largest = float(values[-1])
    if largest <= 0:
        return 0.0
    sigma = values.where(values > 16 * len(values) * _EPSILON * largest, 0).sqrt()
    return float(torch.special.entr(sigma / sigma.sum()).sum().exp())
