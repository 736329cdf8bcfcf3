"""The triplet scatter diagram of "Extreme Triplet Learning: Effectively Optimizing Easy Positives and Hard
Negatives": every triplet a point, S_ap to the right and S_an upwards.

S is the cosine similarity. Triplets below the diagonal are correct: the anchor is more similar to its
positive. With the same rows at a second moment, the diagram says which way each triplet moved.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tripletops import functional
from tripletops._rows import whole
from tripletops.diagnostics.rows import checked
from tripletops.diagnostics.vector_field import (
    QUARTER_COLOURS,
    QUARTERS,
    frame,
    new_figure,
    quarter_of,
    quarter_shares,
)
from tripletops.functional import Triplets

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Scatter", "scatter"]

_BLOCK = 8192  # triplets whose rows are held in float64 at a time
_CORRECT, _WRONG, _GREY = "#2b6cb0", "#c53030", "#888888"
_COSINES = 2 + 1e-3  # the largest cosine distance, and room for rounding


class Scatter(NamedTuple):
    """T triplets on the scatter diagram; `draw` and `figure` show them."""

    rows: Tensor
    """(T, 3) int64: anchor, positive and negative."""
    points: Tensor
    """(T, 2) float64: S_ap and S_an."""
    moves: Tensor | None
    """(T, 2) float64: by how much S_ap and S_an changed; None without ``after``."""
    correct: Tensor
    """(T,) bool: S_ap > S_an."""
    share_correct: float
    """0 to 1, of all triplets; with ``after`` it is of the moment before."""
    quarters: dict[str, float] | None
    """The share, 0 to 1, of the triplets that moved to each quarter; those that stand still are in none."""

    def draw(self, axes: Axes, *, most: int = 2000) -> Axes:
        """Draw on matplotlib's `axes`: points, or arrows where there are moves.

        Args:
            axes: a panel.
            most: at most so many triplets are drawn, evenly chosen; the shares are those of all of them.
        """
        count, most = len(self.points), whole("most", most)
        chosen = torch.arange(count) if count <= most else torch.linspace(0, count - 1, most).long()
        if self.moves is None:
            self._draw_points(axes, chosen)
        else:
            self._draw_moves(axes, chosen, self.moves)
        ends = self.points if self.moves is None else torch.cat([self.points, self.points + self.moves])
        frame(axes, min(0.0, float(ends.min())), 1.0)
        moment = "" if self.moves is None else " before they moved"
        axes.set_title(f"{100 * self.share_correct:.1f} % of {count:,} triplets correct{moment}", fontsize=10)
        axes.legend(fontsize=8, loc="upper left", framealpha=0.8)
        return axes

    def figure(self, *, most: int = 2000) -> Figure:
        """One panel on a figure of its own, which needs no display; save it with ``savefig``."""
        figure = new_figure(5.2, 5.2)
        self.draw(figure.subplots(), most=most)
        return figure

    def _draw_points(self, axes: Axes, chosen: Tensor) -> None:
        points, correct = self.points[chosen], self.correct[chosen]
        for which, colour, name in ((correct, _CORRECT, "correct"), (~correct, _WRONG, "wrong")):
            x, y = points[which].numpy().T
            axes.scatter(x, y, s=8, linewidths=0, color=colour, alpha=0.6, label=name)

    def _draw_moves(self, axes: Axes, chosen: Tensor, moves: Tensor) -> None:
        """Each arrow goes from where its triplet was to where it is."""
        assert self.quarters is not None
        points, steps = self.points[chosen], moves[chosen]
        place = quarter_of(steps[:, 0], steps[:, 1])
        still = place < 0
        if bool(still.any()):
            x, y = points[still].numpy().T
            axes.scatter(x, y, s=8, linewidths=0, color=_GREY, label="no move")
        for index, name in enumerate(QUARTERS):
            here = place == index
            label = f"{name}: {100 * self.quarters[name]:.1f} %"
            # An empty quarter stands in the legend too: that it is empty is a finding.
            axes.plot([], [], color=QUARTER_COLOURS[name], label=label)
            if bool(here.any()):
                (x, y), (u, v) = points[here].numpy().T, steps[here].numpy().T
                how: dict[str, Any] = {"angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.004}
                axes.quiver(x, y, u, v, color=QUARTER_COLOURS[name], alpha=0.7, **how)


def scatter(
    emb: Tensor | None = None,
    labels: Tensor | None = None,
    *,
    after: Tensor | None = None,
    positive: str = "easy",
    negative: str = "hard",
    triplets: Triplets | None = None,
) -> Scatter:
    """Triplets on the scatter diagram, mined from embeddings or given, and how they moved since.

    Raises `ValueError` where there is no triplet: fewer than two rows, one class only, or no class with two
    rows.

    Args:
        emb: (N, D). Rows need not be normalised; a zero row has S = 0 with everything.
        labels: (N,) integer class ids, by which triplets are mined under the cosine distance.
        after: (N, D), the same rows at a later moment. The triplets stay those of `emb`.
        positive, negative: the rules of `mine`; the defaults are the paper's EPHN.
        triplets: triplets of `emb` instead of labels, mined by any distance, but without ``ref_emb``. Without
            `emb`, the similarities are 1 − d, so they must have been mined with ``distance="cosine"``.
    """
    if (labels is None) == (triplets is None):
        raise ValueError("give either labels, by which triplets are mined, or triplets")
    if emb is None:
        if triplets is None or after is not None:
            raise ValueError("labels and after need emb, which is not given")
        rows, points = _from_distances(triplets)
    else:
        emb = checked("emb", emb)
        if triplets is None:
            assert labels is not None
            triplets = functional.mine(emb, labels, positive=positive, negative=negative, distance="cosine")
        rows = _rows_of(triplets, len(emb))
        points = _similarities(emb, rows)
    moves = None
    if after is not None:
        assert emb is not None
        after = checked("after", after)
        if len(after) != len(emb):
            raise ValueError(
                f"emb of shape {tuple(emb.shape)} and after of shape {tuple(after.shape)} must embed the "
                f"same data: row i of both is the same sample"
            )
        moves = _similarities(after, rows) - points
        # What rounding alone can do to a dot product is no movement.
        rounding = (emb.shape[1] + after.shape[1]) * torch.finfo(torch.float64).eps
        moves = moves.masked_fill(moves.abs() <= rounding, 0.0)
    correct = points[:, 0] > points[:, 1]
    shares = None if moves is None else quarter_shares(*moves.unbind(1))
    return Scatter(rows, points, moves, correct, float(correct.double().mean()), shares)


def _rows_of(triplets: Triplets, count: float) -> Tensor:
    """(T, 3) rows of the valid triplets, on the CPU."""
    if not isinstance(triplets, Triplets):
        raise TypeError(f"triplets must be Triplets, as mine returns them, got {type(triplets).__name__}")
    rows = torch.stack(triplets.indices(), dim=1).cpu()
    if not len(rows):
        raise ValueError(
            f"none of {len(triplets.anchor)} anchors has both a positive and a negative: there is no triplet"
        )
    if int(rows.max()) >= count:
        raise ValueError(f"triplets name row {int(rows.max())}, and emb has {count} rows")
    return rows


def _from_distances(triplets: Triplets) -> tuple[Tensor, Tensor]:
    rows = _rows_of(triplets, inf)
    distances = torch.stack([triplets.d_ap, triplets.d_an], dim=1)[triplets.valid].double().cpu()
    if not bool(((distances >= 0) & (distances <= _COSINES)).all()):
        raise ValueError(
            "triplets have a distance outside of 0 to 2: it is not the cosine distance, so give emb with them"
        )
    return rows, 1 - distances


def _similarities(emb: Tensor, rows: Tensor) -> Tensor:
    """(T, 2) S_ap and S_an, float64 on the CPU, since a step may move a similarity by less than float32
    resolves."""
    found = []
    for block in rows.split(_BLOCK):
        anchor, positive, negative = (_unit(emb[place.to(emb.device)]) for place in block.unbind(1))
        products = torch.stack([(anchor * positive).sum(1), (anchor * negative).sum(1)], dim=1)
        found.append(products.clamp(-1, 1).cpu())
    return torch.cat(found)


def _unit(rows: Tensor) -> Tensor:
    """Divided by the largest element first, so that no square overflows or vanishes."""
    rows = rows.double()
    if not rows.shape[1]:
        return rows
    largest = rows.abs().amax(1, keepdim=True)
    rows = rows / torch.where(largest > 0, largest, 1.0)
    norms = rows.norm(dim=1, keepdim=True)
    return rows / torch.where(norms > 0, norms, 1.0)
