"""The figures of extreme-field, arranged as 002, Figs 2 and 5; fields are computed anew from the settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from train_ref.computed.extreme_field import FIELD, FIRST, SECOND, FieldSettings, field_of
from train_ref.report.drawing import Drawing, NoFigureError, panels
from train_ref.settings import Row
from tripletops import diagnostics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN_GAMMA = 0.5  # of Fig 2
ARROWS = 11  # along each axis of a vector field
SHADES = 31  # of a panel: a PNG's palette has to hold the arrows' colours too
NAMES = {"total_ap": r"$\Delta S_{ap}$", "total_an": r"$\Delta S_{an}$", "total": "movement"}


def _rows(drawing: Drawing) -> dict[str, list[Row]]:
    """The finished rows of fields, by their losses' names."""
    found: dict[str, list[Row]] = {}
    for row in drawing.outcome.rows:
        if row.key in drawing.outcome.finals and drawing.settings(row).part == FIELD:
            found.setdefault(row.group, []).append(row)
    if not found:
        raise NoFigureError("no row of it is finished yet")
    return found


def _draw(axes: Axes, settings: FieldSettings, p: float, show: str) -> None:
    """One panel; labels are left to the outer ones."""
    artist = field_of(settings, p).draw(axes, show, arrows=ARROWS)
    if show != "total":
        artist.set_cmap(artist.get_cmap().resampled(SHADES))
    axes.set(xticks=(0, 0.5, 1), yticks=(0, 0.5, 1), title="", xlabel="", ylabel="")
    axes.tick_params(labelsize=7)
    axes.set_xticklabels(["0", ".5", "1"])
    axes.set_yticklabels(["0", ".5", "1"])


def _label(grid: list[list[Axes]], lines: list[str], columns: list[str]) -> None:
    for panel, title in zip(grid[0], columns, strict=True):
        panel.set_title(title, fontsize=8)
    for panel in grid[-1]:
        panel.set_xlabel("$S_{ap}$", fontsize=8)
    for line, name in zip(grid, lines, strict=True):
        line[0].set_ylabel(f"{name}\n$S_{{an}}$", fontsize=8)
        for panel in line[1:]:
            panel.set_yticklabels([])
    for line in grid[:-1]:
        for panel in line:
            panel.set_xticklabels([])


def _legend(figure: Figure, axes: Axes, fields: list[tuple[FieldSettings, float]]) -> None:
    """Of the arrows' colours: the quarters that any of the fields moves to."""
    shares = [field_of(settings, p).quarters() for settings, p in fields]
    handles = [
        axes.plot([], [], color=colour, label=name)[0]
        for name, colour in diagnostics.QUARTER_COLOURS.items()
        if any(each[name] for each in shares)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def field_changes(drawing: Drawing) -> list[Path]:
    """Fig 2: lines for ΔS_ap, for ΔS_an and for the vector field; columns for the first and the second order,
    without entanglement and with it."""
    rows = [row for group in _rows(drawing).values() for row in group]
    chosen = [
        settings
        for loss in (FIRST, SECOND)
        for settings in map(drawing.settings, rows)
        if settings.loss == loss and settings.gamma == SHOWN_GAMMA
    ]
    if len(chosen) < 2:
        raise NoFigureError(f"the rows of both orders with γ={SHOWN_GAMMA:g} are not finished yet")
    columns = [(settings, p) for settings in chosen for p in (0.0, *settings.entanglement)]
    figure, grid = panels(len(NAMES), len(columns), 1.6, 1.62)
    for line, show in zip(grid, NAMES, strict=True):
        for panel, (settings, p) in zip(line, columns, strict=True):
            _draw(panel, settings, p, show)
    names = {FIRST: "L1st", SECOND: "L2nd"}
    titles = [f"{names[settings.loss]}, {f'p={p:g}' if p else 'alone'}" for settings, p in columns]
    _label(grid, list(NAMES.values()), titles)
    _legend(figure, grid[0][0], columns)
    return [drawing.save(figure, "field_changes")]


def field_all(drawing: Drawing) -> list[Path]:
    """Fig 5: a line for each loss and γ; columns for both changes without entanglement and with each p."""
    found = _rows(drawing)
    lines = [(f"{name}, {row.name}", drawing.settings(row)) for name, rows in found.items() for row in rows]
    strengths = (0.0, *lines[0][1].entanglement)
    columns = [(p, show) for p in strengths for show in ("total_ap", "total_an")]
    figure, grid = panels(len(lines), len(columns), 1.55, 1.45)
    for panels_of_line, (_, settings) in zip(grid, lines, strict=True):
        for panel, (p, show) in zip(panels_of_line, columns, strict=True):
            _draw(panel, settings, p, show)
    titles = [f"{NAMES[show]} {f'total, p={p:g}' if p else 'alone'}" for p, show in columns]
    _label(grid, [name for name, _ in lines], titles)
    return [drawing.save(figure, "field_all")]


def field_vectors(drawing: Drawing) -> list[Path]:
    """The vector fields of all losses: a line for each loss, columns for γ and p."""
    found = _rows(drawing)
    by_line = [
        {
            f"{row.name}, p={p:g}": (drawing.settings(row), p)
            for row in rows
            for p in drawing.settings(row).entanglement
        }
        for rows in found.values()
    ]
    titles = list(dict.fromkeys(title for line in by_line for title in line))
    figure, grid = panels(len(found), len(titles), 1.6, 1.62)
    for line, fields in zip(grid, by_line, strict=True):
        for panel, title in zip(line, titles, strict=True):
            if title in fields:
                _draw(panel, *fields[title], "total")
            else:
                panel.set_visible(False)
    _label(grid, list(found), titles)
    _legend(figure, grid[0][0], [each for fields in by_line for each in fields.values()])
    return [drawing.save(figure, "field_vectors")]


FIGURES: dict[str, Callable[[Drawing], list[Path]]] = {
    "field_changes": field_changes,
    "field_all": field_all,
    "field_vectors": field_vectors,
}
CAPTIONS = {
    "field_changes": "As 002, Fig 2, γ=0.5: the changes of S_ap and S_an in a step, alone and with the "
    "paper's model of entanglement, and the directions of both together. Red is what the loss does not want: "
    "S_ap falls or S_an grows. On the black line nothing changes. Each sign of each panel has a scale of its "
    "own. Arrows have one length, and the colour of their quarter.",
    "field_all": "As 002, Fig 5: the same changes for all losses and γ. Red: S_ap falls or S_an grows.",
    "field_vectors": "The directions with entanglement for all losses, γ and p; colours are the quarters.",
}
