"""The long CSV: a line for every contender of every row, with percentiles and what the numbers depend on.

Each kind of machine has a file of its own, since what numbers depend on differs: those of a GPU also on it.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from bench.measure import Samples, percentile
from bench.registry import Row, Shape

COLUMNS = [
    *("time", "row", "contender", "n", "d", "k", "m", "unit", "processes", "samples"),
    *("p10", "p25", "p50", "p75", "p90", "ratio", "target", "met"),
]


def append(
    path: Path,
    when: str,
    row: Row,
    shape: Shape,
    processes: list[Samples],
    environment: Mapping[str, str],
) -> None:
    """Add the lines of one measured row; ratio and verdict stand on the numerator's."""
    value = row.value(processes)
    isa = environment["isa"]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*COLUMNS, *environment], restval="")
        if new:
            writer.writeheader()
        for contender in processes[0]:
            values = [value for samples in processes for value in samples[contender]]
            line = {
                "time": when,
                "row": row.name,
                "contender": contender,
                **shape.sizes(),
                "unit": row.unit,
                "processes": len(processes),
                "samples": len(values),
                **{f"p{percent}": f"{percentile(values, percent):.6g}" for percent in (10, 25, 50, 75, 90)},
                **environment,
            }
            if contender == row.numerator:
                line["ratio"] = f"{value:.4g}"
                if row.target is not None:
                    verdict = "yes" if row.target.met(value, isa) else "no"
                    line |= {"target": row.target.text(isa), "met": verdict}
            writer.writerow(line)
