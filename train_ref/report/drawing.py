"""What every figure is drawn with: the run, the folder it goes to, panels and colours.

matplotlib is imported when a figure is asked for.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from train_ref import data
from train_ref.data import DataError, Dataset
from train_ref.folder import write_whole
from train_ref.outcome import Outcome
from train_ref.settings import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = numpy.ndarray[Any, Any]

DPI = 100
COLOURS = 192  # of a PNG's palette: a third of the bytes, and nobody sees it
BLUE, RED, GREEN, GREY = "#2b6cb0", "#c53030", "#2f855a", "#888888"


class NoFigureError(Exception):
    """Why there is no figure."""


@dataclass(frozen=True)
class Drawing:
    """What a figure is made from, and the folder it goes to."""

    outcome: Outcome
    target: Path
    roots: Sequence[Path] | None = None  # of the data sets
    _arrays: dict[str, dict[str, Array]] = field(default_factory=dict)
    _datasets: dict[tuple[str, int], Dataset] = field(default_factory=dict)

    def arrays(self, row: Row) -> dict[str, Array]:
        """What was kept of a row's first seed."""
        if row.key not in self._arrays:
            self._arrays[row.key] = self.outcome.kept(row.key)
        return self._arrays[row.key]

    def settings(self, row: Row) -> Any:
        return self.outcome.settings[row.key]

    def dataset(self, row: Row) -> Dataset:
        name, size = self.settings(row).dataset, self.settings(row).size
        if (name, size) not in self._datasets:
            try:
                self._datasets[name, size] = data.load(name, size, self.roots)
            except DataError:
                raise NoFigureError(f"the data set {name} is not here") from None
        return self._datasets[name, size]

    def save(self, figure: Figure, name: str, photos: bool = False) -> Path:
        from PIL import Image

        dither = Image.Dither.FLOYDSTEINBERG if photos else Image.Dither.NONE
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DPI)
        palette = Image.open(buffer).convert("RGB").quantize(COLOURS, dither=dither)
        buffer = io.BytesIO()
        palette.save(buffer, format="png", optimize=True)
        path = self.target / f"{name}.png"
        write_whole(path, buffer.getvalue())
        return path


def panels(
    rows: int, columns: int, width: float = 3.2, height: float = 3.0
) -> tuple[Figure, list[list[Axes]]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for each in axes.flat:
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=8)
    return figure, axes.tolist()
