"""The figures of eps-noise: the minimisers, the gain of two modes by n, and where a far point settles.

001 has no figures of its theorems; these draw what they state.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from train_ref.report.drawing import BLUE, GREEN, GREY, RED, Drawing, NoFigureError, panels
from train_ref.settings import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHADES = (BLUE, GREEN, RED)  # of the levels of noise
RANKS = ("#1a365d", "#2b6cb0", "#63b3ed", "#f6ad55")


def _finished(drawing: Drawing, array: str) -> dict[tuple[str, bool], list[Row]]:
    """The rows that kept this array, by loss and sampling."""
    found: dict[tuple[str, bool], list[Row]] = {}
    for row in drawing.outcome.rows:
        if row.key in drawing.outcome.finals and array in drawing.arrays(row):
            settings: Any = drawing.settings(row)
            found.setdefault((settings.loss, settings.easy), []).append(row)
    if not found:
        raise NoFigureError("no row of it is finished yet")
    return found


def _named(loss: str, easy: bool) -> str:
    return f"{loss} loss with EPS" if easy else f"{loss} loss"


def noise_minimisers(drawing: Drawing) -> list[Path]:
    """The best embedding found: a line for each loss and sampling, a column for each p."""
    found = _finished(drawing, "points")
    levels = sorted({drawing.settings(row).keep for rows in found.values() for row in rows}, reverse=True)
    figure, axes = panels(len(found), len(levels), 2.15, 2.3)
    for line, ((loss, easy), rows) in zip(axes, found.items(), strict=True):
        by_level = {drawing.settings(row).keep: row for row in rows}
        for panel, level in zip(line, levels, strict=True):
            if level not in by_level:
                panel.set_visible(False)
                continue
            _embedding(
                panel, drawing.arrays(by_level[level])["points"], drawing.settings(by_level[level]).margin
            )
            panel.set_title(f"{_named(loss, easy)}, p={level:g}", fontsize=8)
    return [drawing.save(figure, "noise_minimisers")]


def _embedding(axes: Axes, points: Any, alpha: float) -> None:
    points = (points - points.mean(0)) / alpha
    half = len(points) // 2
    for part, colour, marker in ((points[:half], BLUE, "o"), (points[half:], RED, "x")):
        filled: dict[str, Any] = (
            {"facecolors": "none", "edgecolors": colour} if marker == "o" else {"color": colour}
        )
        axes.scatter(part[:, 0], part[:, 1], s=34, marker=marker, linewidths=1.1, **filled)
    # One scale per panel, never so small that a collapsed class looks spread.
    reach = max(1.6, 1.15 * float(numpy.abs(points).max()))
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach))
    axes.set_aspect("equal")
    axes.set_xlabel("distance in α", fontsize=8)


def noise_modes(drawing: Drawing) -> list[Path]:
    """What two modes gain over collapsed classes with EPS, against n; a panel for each loss."""
    found = _finished(drawing, "counts")
    figure, axes = panels(1, len(found), 4.25, 3.4)
    for panel, ((loss, _), rows) in zip(axes[0], found.items(), strict=True):
        for row, colour in zip(rows, SHADES, strict=False):
            arrays, level = drawing.arrays(row), drawing.settings(row).keep
            for name, style in (("each class", "-"), ("class 1", "--")):
                label = f"p={level:g}, {name} in two modes"
                panel.plot(arrays["counts"], arrays[f"gain, {name}"], style, color=colour, label=label)
        panel.axhline(0, color=GREY, lw=0.8)
        panel.set_xscale("log", base=2)
        panel.set_xticks([4, 8, 16, 32, 64, 128], ["4", "8", "16", "32", "64", "128"])
        panel.set(title=_named(loss, True), xlabel="n, points in both classes")
        panel.set_ylabel("loss collapsed − loss in two modes")
        panel.legend(fontsize=7, frameon=False, loc="lower right")
    return [drawing.save(figure, "noise_modes")]


def noise_far_points(drawing: Drawing) -> list[Path]:
    """A point's part of the anchor's loss against its distance, by its rank; a panel for each loss and p."""
    found = _finished(drawing, "curves")
    figure, axes = panels(len(found), max(map(len, found.values())), 2.85, 2.5)
    for line, ((loss, _), rows) in zip(axes, found.items(), strict=True):
        for panel, row in zip(line, rows, strict=False):
            arrays, settings = drawing.arrays(row), drawing.settings(row)
            for rank, curve, colour in zip(arrays["ranks"], arrays["curves"], RANKS, strict=True):
                panel.plot(arrays["places"] / settings.margin, curve, color=colour, label=f"rank {rank}")
            target, name = (2, "β+α") if loss == "margin" else (1, "D₁+α")
            panel.axvline(target, color=GREY, lw=0.8, ls=":")
            panel.annotate(name, (target, 0.96), xycoords=("data", "axes fraction"), fontsize=8, color=GREY)
            panel.set_title(f"{_named(loss, True)}, p={settings.keep:g}", fontsize=9)
            panel.set_xlabel("distance from the anchor in α", fontsize=8)
            panel.set_ylim(0)
        line[0].set_ylabel("expected loss of the point", fontsize=8)
        line[0].legend(fontsize=7, frameon=False)
        for unused in line[len(rows) :]:
            unused.set_visible(False)
    return [drawing.save(figure, "noise_far_points")]


FIGURES: dict[str, Callable[[Drawing], list[Path]]] = {
    "noise_minimisers": noise_minimisers,
    "noise_modes": noise_modes,
    "noise_far_points": noise_far_points,
}
CAPTIONS = {
    "noise_minimisers": "The embeddings with the smallest expected loss found; class 1 as circles, class 2 "
    "as crosses. Without EPS and with noise all points of a class lie on each other.",
    "noise_modes": "With EPS: the expected loss of collapsed classes minus that of classes in two modes. "
    "Above 0 two modes are better.",
    "noise_far_points": "With EPS: the part of an anchor's expected loss that a point of its class has, "
    "against its distance, by its rank among the anchor's neighbours; the nearer ones are of the class too. "
    "For triplets it is that of the two triplets with the nearest point, at D₁=0.",
}
