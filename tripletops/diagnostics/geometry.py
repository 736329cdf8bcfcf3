"""The geometry of one embedding in the words of paper 000: diameters, separation, the bound on collapse.

All of it is exact for hundreds of thousands of rows, without a matrix of all pairs. The extremes come from
the fused search of `functional.mine`. Rounding may mislead a float32 search, by a promised amount at most, so
every row that could hold the extreme is searched again in float64. Distances are float64 numbers whatever the
type of the rows.

Rows must be finite: a ValueError names the first that is not. Rows with `ignore_label` are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, nan, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from tripletops import functional
from tripletops._rows import row_distances
from tripletops.diagnostics.rows import (
    BLOCK,
    Labelled,
    apart,
    checked,
    class_batches,
    labelled,
    number,
    radius,
    scale_of,
)

__all__ = [
    "ClassDiameters",
    "Diameter",
    "Separation",
    "class_diameters",
    "collapse_bound",
    "diameter",
    "separation",
]

_ANCHORS = 4096  # searched again in float64 at once


class Diameter(NamedTuple):
    """The farthest pair of rows."""

    value: float
    """Its distance; 0 for fewer than two rows."""
    pair: tuple[int, int]
    """The two rows, the lower one first; (−1, −1) for fewer than two rows."""


class ClassDiameters(NamedTuple):
    """The farthest pair of every class."""

    classes: Tensor
    """(C,) int64, the labels in ascending order."""
    values: Tensor
    """(C,) float64, the distance of each class's farthest pair; 0 for a class of one row."""
    pairs: Tensor
    """(C, 2) int64, its rows, the lower one first; −1 for a class of one row."""


class Separation(NamedTuple):
    """Whether an embedding is α-triplet-separated, and the triplet that is farthest from it."""

    is_separated: bool
    """Whether d_ap + α ≤ d_an for every triplet, which is `excess` ≤ 0."""
    triplet: tuple[int, int, int]
    """Anchor, positive and negative of the worst triplet; −1 without any triplet. A row that is alone in its
    class is its own positive, as Definition 2.1 has it."""
    d_ap: float
    """Distance of its anchor and positive; NaN without any triplet."""
    d_an: float
    """Distance of its anchor and negative, likewise."""
    excess: float
    """Its d_ap − d_an + α, the largest of all triplets; −inf without any."""
    loss: float
    """Its loss (4): `excess`, or 0 where that is negative."""


def diameter(emb: Tensor) -> Diameter:
    """The largest euclidean distance between two rows of `emb`, (N, D), and the pair (9b)."""
    emb = checked("emb", emb)
    if len(emb) < 2:
        return Diameter(0.0, (-1, -1))
    labels = torch.zeros(len(emb), dtype=torch.int64, device=emb.device)
    mined = functional.mine(emb, labels, positive="hard", negative="hard")
    d_ap = mined.d_ap.double()
    best = float(d_ap.max())
    if best > 0 and emb.dtype is not torch.float64:
        # No row is farther from the centre than the diameter, which `best` is but for rounding.
        could_be_farthest = _largest_possible(d_ap, emb, 1.01 * best) >= best
        pair = _farthest(emb, labels, could_be_farthest.nonzero()[:, 0])
    else:
        pair = (int(d_ap.argmax()), int(mined.positive[d_ap.argmax()]))
    return Diameter(_distance(emb, *pair), (min(pair), max(pair)))


def _farthest(emb: Tensor, labels: Tensor, anchors: Tensor) -> tuple[int, int]:
    """The farthest of some anchors and its positive, with float64's precision."""
    best, pair = -inf, (-1, -1)
    for some, mined in _mined_again(emb, labels, anchors):
        place = int(mined.d_ap.argmax())
        if float(mined.d_ap[place]) > best:
            best, pair = float(mined.d_ap[place]), (int(some[place]), int(mined.positive[place]))
    return pair


def _mined_again(
    emb: Tensor, labels: Tensor, anchors: Tensor
) -> Iterator[tuple[Tensor, functional.Triplets]]:
    """The hardest triplets of some anchors, found in float64, a block of anchors at a time."""
    candidates = emb.double()
    for some in anchors.split(_ANCHORS):
        rows = {"ref_emb": candidates, "ref_labels": labels, "self_index": some}
        yield some, functional.mine(candidates[some], labels[some], **rows, positive="hard", negative="hard")


def _largest_possible(distances: Tensor, emb: Tensor, reach: float) -> Tensor:
    """How large the largest distances can be, given those of the pairs that a search found."""
    return (distances.square() * (1 + _rounding(emb)) + _hidden(emb, reach)).sqrt()


def _smallest_possible(distances: Tensor, emb: Tensor, reach: float) -> Tensor:
    """How small the smallest distances can be, likewise."""
    return (distances.square() * (1 - _rounding(emb)) - _hidden(emb, reach)).clamp(min=0).sqrt()


def _hidden(emb: Tensor, reach: float) -> float:
    """By how much the squared distance of a float32 search's pick can miss the extreme, for rows at most
    `reach` from their centre. Every backend promises that much."""
    return 2.0**-21 * (4 + sqrt(emb.shape[1])) * reach * reach


def _rounding(emb: Tensor) -> float:
    """The relative error of the squared distances that a float32 search reports: they are sums of D terms."""
    return (emb.shape[1] + 16) * torch.finfo(torch.float32).eps


def _distance(rows: Tensor, i: int, j: int) -> float:
    pair = rows[[i, j]]
    scale = scale_of(pair)
    left, right = torch.tensor([[0], [1]], device=rows.device)
    return float(apart(pair, left, right, scale)) / scale


def class_diameters(emb: Tensor, labels: Tensor, *, ignore_label: int | None = None) -> ClassDiameters:
    """The `diameter` of the rows of every class.

    Args:
        emb: (N, D).
        labels: (N,) integer class ids.
        ignore_label: rows with it do not count.
    """
    return class_diameters_of(labelled(emb, labels, ignore_label))


def class_diameters_of(given: Labelled) -> ClassDiameters:
    """`class_diameters` of rows that were checked."""
    emb, labels = given.emb, given.labels
    classes, scale = labels.unique(), scale_of(emb)
    values = torch.zeros(len(classes), dtype=torch.float64, device=emb.device)
    pairs = torch.full((len(classes), 2), -1, device=emb.device)
    for some, rows in class_batches(labels, emb.shape[1]):
        size = rows.shape[1]
        if size > BLOCK:
            found = diameter(emb[rows[0]])
            values[some], pairs[some] = found.value, rows[0, list(found.pair)]
        elif size > 1:
            points = emb[rows].double() * scale
            farthest = row_distances(points, points).flatten(1).max(1)
            values[some] = farthest.values / scale
            place = torch.stack([farthest.indices // size, farthest.indices % size], 1)
            # Where all rows are equal, the first two stand for the pair, not a row and itself.
            place = place.where(farthest.values[:, None] > 0, torch.arange(2, device=emb.device))
            pairs[some] = rows.gather(1, place).sort(1).values
    if given.kept is not None and len(classes):
        pairs = given.kept[pairs.clamp(min=0)].where(pairs >= 0, -1)
    return ClassDiameters(classes, values, pairs)


def separation(
    emb: Tensor, labels: Tensor, alpha: float = 0.0, *, ignore_label: int | None = None
) -> Separation:
    """Whether `emb` is α-triplet-separated (Definition 2.1), and its worst triplet.

    That is the triplet with the largest loss of batch-hard mining. A row that is alone in its class forms
    triplets with itself as the positive, since x and y may be the same point in (5): it must be α away from
    every negative. One class, or no row: no triplet, and separated.

    Args:
        emb: (N, D).
        labels: (N,) integer class ids.
        alpha: the margin α, 0 or greater.
        ignore_label: rows with it do not count.
    """
    alpha, given = number("alpha", alpha, at_least=0), labelled(emb, labels, ignore_label)
    mined = functional.mine(given.emb, given.labels, positive="hard", negative="hard")
    return separation_of(given, mined, alpha)


def separation_of(given: Labelled, mined: functional.Triplets, alpha: float) -> Separation:
    """`separation` of rows that were checked, given each anchor's farthest positive and nearest negative."""
    emb = given.emb
    if not (mined.negative >= 0).any():
        return Separation(True, (-1, -1, -1), nan, nan, -inf, 0.0)
    d_ap, d_an = mined.d_ap.double().nan_to_num(nan=0.0), mined.d_an.double()
    triplets = [(torch.arange(len(emb), device=emb.device), mined)]
    if emb.dtype is not torch.float64:
        reach = radius(emb)
        largest = _largest_possible(d_ap, emb, reach).where(mined.positive >= 0, 0)
        could_be_worst = largest - _smallest_possible(d_an, emb, reach) >= _lower(d_ap, d_an, emb)
        triplets = list(_mined_again(emb, given.labels, could_be_worst.nonzero()[:, 0]))
    best, worst = -inf, (-1, -1, -1)
    for anchors, found in triplets:
        differences = found.d_ap.nan_to_num(nan=0.0) - found.d_an
        place = int(differences.argmax())
        if float(differences[place]) > best:
            anchor, positive = int(anchors[place]), int(found.positive[place])
            best = float(differences[place])
            worst = (anchor, positive if positive >= 0 else anchor, int(found.negative[place]))
    near, far = _distance(emb, worst[0], worst[1]), _distance(emb, worst[0], worst[2])
    excess = near - far + alpha
    anchor, positive, negative = (given.original(row) for row in worst)
    return Separation(excess <= 0, (anchor, positive, negative), near, far, excess, max(excess, 0.0))


def _lower(d_ap: Tensor, d_an: Tensor, emb: Tensor) -> float:
    """What the largest d_ap − d_an is at least, given the distances that a float32 search reports."""
    rounding = _rounding(emb)
    return float((d_ap * (1 - rounding) - d_an * (1 + rounding)).max())


def collapse_bound(diameter: float, loss: float, c: float = 2.0) -> float:
    """What the diameter after training is at least by (17): `diameter` − c·`loss`, of before training.

    At or below 0 the bound allows a collapse; it does not foretell one.

    Args:
        diameter: of the embedding before training, 0 or greater.
        loss: its triplet loss with hard negative mining, 0 or greater. Appendix B takes that of the hardest
            triplet, which is `Separation.loss`.
        c: the constant; the paper draws its figures with 2.
    """
    diameter = number("diameter", diameter, at_least=0)
    return diameter - number("c", c, at_least=0) * number("loss", loss, at_least=0)
