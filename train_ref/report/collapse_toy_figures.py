"""The figures of collapse-toy, arranged as 000, Figs 2–4: points as circles, separated ones as stars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy

from train_ref.computed.collapse_toy import DESCENT, DISTANCES, PUBLISHED_C
from train_ref.report.drawing import BLUE, GREEN, GREY, RED, Array, Drawing, NoFigureError, panels
from train_ref.settings import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLASSES = (RED, BLUE)
GRID = 200  # points a side, of which the boundary of a class is drawn


def _rows(drawing: Drawing, part: str) -> list[Row]:
    finished = [row for row in drawing.outcome.rows if row.key in drawing.outcome.finals]
    found = [row for row in finished if drawing.settings(row).part == part and drawing.arrays(row)]
    if not found:
        raise NoFigureError("no row of it is finished yet")
    return found


def _plane(axes: Axes, title: str, shown: Sequence[Array]) -> None:
    """Axes of equal units around all that any panel shows."""
    points = numpy.concatenate([each.reshape(-1, 2) for each in shown])
    low, high = points.min(0), points.max(0)
    middle, reach = (low + high) / 2, 0.62 * float((high - low).max())
    axes.set(
        xlim=(middle[0] - reach, middle[0] + reach),
        ylim=(middle[1] - reach, middle[1] + reach),
        aspect="equal",
    )
    axes.set_xlabel("first coordinate", fontsize=8)
    axes.set_ylabel("second coordinate", fontsize=8)
    axes.set_title(title, fontsize=9)


def _points(axes: Axes, points: Array, labels: Array, marker: str = "o", size: float = 36) -> None:
    for label, colour in enumerate(CLASSES):
        chosen = points[labels == label]
        axes.scatter(chosen[:, 0], chosen[:, 1], s=size, marker=marker, color=colour, zorder=3, linewidths=0)


def _arrows(axes: Axes, start: Array, end: Array, labels: Array, longest: bool = False) -> None:
    """From every row of `start` to that of `end`; the longest ones black beneath."""
    lengths = numpy.linalg.norm(end - start, axis=1)
    for place, label in enumerate(labels):
        if lengths[place] < 1e-9:
            continue
        ends = tuple(end[place]), tuple(start[place])
        style = {"arrowstyle": "->", "shrinkA": 0, "shrinkB": 0}
        if longest and lengths[place] > 0.99 * lengths.max():
            axes.plot(*zip(*ends, strict=True), color="black", linewidth=3.6, zorder=1)
        axes.annotate("", *ends, arrowprops={**style, "color": CLASSES[label], "linewidth": 1.1}, zorder=2)


def boundary(points: Array, x: Array, y: Array) -> Array:
    """Where inequality (5) ends for a class, α = 0: positive inside its triplet-separated boundary."""
    reaches = numpy.linalg.norm(points[:, None] - points[None], axis=2).max(1)
    places = numpy.stack([x, y], -1)[..., None, :]
    found: Array = (reaches - numpy.linalg.norm(places - points, axis=-1)).max(-1)
    return found


def _boundaries(axes: Axes, points: Array, labels: Array) -> None:
    x, y = numpy.meshgrid(
        numpy.linspace(*axes.get_xlim(), GRID), numpy.linspace(*axes.get_ylim(), GRID), indexing="xy"
    )
    for label, colour in enumerate(CLASSES):
        inside = boundary(points[labels == label], x, y)
        axes.contour(x, y, inside, levels=[0.0], colors=[colour], linestyles="dashed", linewidths=0.9)


def _lines(axes: Axes, points: Array, triplet: Array, style: str) -> None:
    """The two distances of a triplet: green to the positive, grey to the negative."""
    anchor, positive, negative = triplet
    for end, colour in ((positive, GREEN), (negative, GREY)):
        axes.plot(*points[[anchor, end]].T, style, color=colour, linewidth=1.6, zorder=1)


def _named(axes: Axes, points: Array, triplet: Array) -> None:
    for name, place in zip(("anchor", "positive", "negative"), triplet, strict=True):
        axes.annotate(name, tuple(points[place]), (7, -3), textcoords="offset points", fontsize=8)


def toy_separated(drawing: Drawing) -> list[Path]:
    """Figs 2 and 3: the points, f*_haus, f*_iso, and the hardest triplet."""
    row = _rows(drawing, DISTANCES)[0]
    kept = drawing.arrays(row)
    f, haus, iso, labels = (kept[name] for name in ("f", "f haus", "f iso", "labels"))
    values = {name: drawing.outcome.values(row.key, name)[0] for name in ("d_haus", "d_iso", "½·L", "c")}
    figure, axes = panels(2, 2, 4.2, 4.0)
    (first, second), (third, fourth) = axes
    shown = [f, haus, iso]
    _plane(first, "five points under f, two classes", shown)
    _points(first, f, labels)
    _plane(second, f"f*_haus (stars): d_haus = {values['d_haus']:.3f}", shown)
    _arrows(second, f, haus, labels, longest=True)
    _points(second, f, labels, size=20)
    _points(second, haus, labels, "*", 110)
    _boundaries(second, haus, labels)
    _plane(third, f"f*_iso (stars): d_iso = {values['d_iso']:.3f}, d_haus/d_iso = {values['c']:.2f}", shown)
    _lines(third, f, kept["largest"], "-")
    _lines(third, iso, kept["largest"], "--")
    _points(third, f, labels, size=20)
    _points(third, iso, labels, "*", 110)
    _plane(fourth, f"the hardest triplet: L = {2 * values['½·L']:.3f}, ½·L = {values['½·L']:.3f}", shown)
    _lines(fourth, f, kept["hardest"], "-")
    _points(fourth, f, labels)
    _named(fourth, f, kept["hardest"])
    return [drawing.save(figure, "toy_separated")]


def toy_constant(drawing: Drawing) -> list[Path]:
    """How c is distributed over random sets, and where the paper's lies."""
    rows = _rows(drawing, DISTANCES)
    figure, [[axes]] = panels(1, 1, 8.4, 3.4)
    highest = max(float(drawing.arrays(row)["c"].max()) for row in rows)
    bins = numpy.linspace(0.5, max(highest, 0.6), 50).tolist()
    for row, colour in zip(rows, (BLUE, GREEN), strict=False):
        c = drawing.arrays(row)["c"]
        label = f"{row.name}: {len(c)} sets, {c.min():.2f} to {c.max():.2f}"
        axes.hist(c, bins=bins, histtype="step", color=colour, linewidth=1.5, label=label)
    axes.axvline(0.5, color="black", linestyle=":", linewidth=1.2, label="0.5: no set can be below")
    axes.axvline(PUBLISHED_C, color=RED, linestyle="--", label=f"the paper's set: {PUBLISHED_C}")
    axes.set(xlabel="c = d_haus(f, F_TS) / d_iso(f, F_TS), as found", ylabel="sets")
    axes.legend(fontsize=8, frameon=False)
    return [drawing.save(figure, "toy_constant")]


def toy_descent(drawing: Drawing) -> list[Path]:
    """Fig 4: frames of the descent with d_haus, all movements, and the nearest separated embedding found."""
    row = _rows(drawing, DESCENT)[0]
    kept = drawing.arrays(row)
    frames, labels, haus = kept["frames"], kept["labels"], kept["f haus"]
    value = {name: drawing.outcome.values(row.key, name)[0] for name in drawing.outcome.measures(row.key)}
    count = len(frames) + 2
    columns = 3 if count <= 6 else 4
    figure, grid = panels(-(-count // columns), columns, 8.5 / columns, 8.9 / columns)
    axes = [each for line in grid for each in line]
    for unused in axes[count:]:
        unused.set_visible(False)
    shown = [frames, haus]
    for panel, points, step, distance in zip(axes, frames, kept["steps"], kept["d_haus"], strict=False):
        _plane(panel, f"step {step}: d_haus = {distance:.2f}", shown)
        _points(panel, points, labels, size=14)
    moved, ideal = axes[len(frames)], axes[len(frames) + 1]
    _plane(moved, f"diameter {value['diameter before']:.2f} → {value['diameter after']:.2f}", shown)
    _arrows(moved, frames[0], frames[-1], labels)
    _plane(ideal, f"nearest: d_haus = {value['d_haus(f₀, F_TS)']:.2f}", shown)
    _arrows(ideal, frames[0], haus, labels)
    _points(ideal, haus, labels, "*", 40)
    for place, panel in enumerate(axes[:count]):
        if place % columns:
            panel.set_ylabel("")
    return [drawing.save(figure, "toy_descent")]


FIGURES: dict[str, Callable[[Drawing], list[Path]]] = {
    "toy_separated": toy_separated,
    "toy_constant": toy_constant,
    "toy_descent": toy_descent,
}
CAPTIONS = {
    "toy_separated": "As 000, Figs 2 and 3, for the first random set: the points; the nearest separated "
    "points found for d_haus, with the boundaries they must not enter (dashed) and the longest movements "
    "outlined in black; those found for d_iso, laid on f, with the triplet whose distances change most "
    "(solid under f, dashed under f*_iso; green to the positive, grey to the negative); the hardest triplet.",
    "toy_constant": "c over random sets of five points. The paper's set is not published, its c is.",
    "toy_descent": "As 000, Fig 4: twenty points under gradient descent on the batch-hard loss, α = 0, with "
    "their Hausdorff-like distance from the last frame; how each point moved; and where a search for the "
    "nearest separated embedding puts them.",
}
