"""What a run's folder says: the measures of every row over its seeds, its epochs, its timing."""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

import numpy

from train_ref.folder import Record, RunFolder
from train_ref.settings import Cell


class Value(NamedTuple):
    """A measure over the seeds."""

    mean: float
    std: float  # of the sample; 0 for one seed
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.std:.1f}" if self.seeds > 1 else f"{self.mean:.1f}"


class Outcome:
    def __init__(self, folder: RunFolder, cells: list[Cell]):
        self.folder, self.cells = folder, cells
        self.config = folder.config()
        self.records = folder.records()
        self.rows = list({cell.row.key: cell.row for cell in cells}.values())
        self.settings = {cell.row.key: cell.settings for cell in cells}
        self.finals: dict[str, list[Record]] = {}
        for record in self.records:
            if "final" in record:
                self.finals.setdefault(record["row"], []).append(record)

    @property
    def unfinished(self) -> list[str]:
        done = {record["cell"] for finals in self.finals.values() for record in finals}
        return [cell.key for cell in self.cells if cell.key not in done]

    def values(self, row: str, measure: str) -> list[float]:
        """A measure after training, one number per seed that has it."""
        finals = self.finals.get(row, [])
        return [record["measures"][measure] for record in finals if measure in record["measures"]]

    def value(self, row: str, measure: str) -> Value | None:
        found = self.values(row, measure)
        if not found:
            return None
        return Value(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else 0.0, len(found))

    def before(self, row: str, measure: str) -> list[float]:
        """A measure before training, one number per seed that has finished."""
        done = {record["cell"] for record in self.finals.get(row, [])}
        firsts = [record for record in self.records if record["cell"] in done and record.get("epoch") == 0]
        return [record["measures"][measure] for record in firsts if measure in record["measures"]]

    def bounds(self, row: str) -> list[float]:
        """000, (17) with c = 2: the least diameter that training can leave, by the theory."""
        parts = zip(self.before(row, "diameter before"), self.before(row, "loss before"), strict=True)
        return [diameter - 2 * loss for diameter, loss in parts]

    def kept(self, row: str) -> dict[str, numpy.ndarray[Any, Any]]:
        """The arrays of the first seed."""
        return self.folder.arrays(f"{row} #{self.settings[row].first_seed}")

    def diagrams(self, row: str) -> dict[int, numpy.ndarray[Any, Any]]:
        """The first seed's triplet scatter diagrams by epoch: (triplets, 2), S_ap and S_an."""
        return {
            int(name.split()[1]): array.astype(float)
            for name, array in self.kept(row).items()
            if name.startswith("diagram ")
        }

    def by_epoch(self, row: str, measure: str) -> dict[int, list[float]]:
        """A measure after every epoch that has it, one number per seed."""
        found: dict[int, list[float]] = {}
        for record in self.records:
            if record["row"] == row and "epoch" in record and measure in record["measures"]:
                found.setdefault(record["epoch"], []).append(record["measures"][measure])
        return found

    def measures(self, row: str) -> list[str]:
        """The names of all measures after training."""
        return list(dict.fromkeys(name for final in self.finals.get(row, []) for name in final["measures"]))
