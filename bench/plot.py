"""`python -m bench.plot`: draw the README's chart and write the tables of docs/measuring.md.

All numbers are those of bench/results/core.csv and dense.csv: of every row the run that was made last.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench import core, dense
from bench.registry import Row, Shape

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
CHART = ROOT / "docs" / "speed.svg"
PAGE = ROOT / "docs" / "measuring.md"

PRODUCT, PRODUCT_INTO = "torch.mm", "torch.mm out="
# By row of the chart: the row in which a rival was measured too, and what the rival is called.
RIVALS = {
    "mm-d128": ("naive-n8192", "plain PyTorch"),
    "batch-all": ("metric-learning-batch-all", dense.METRIC_LEARNING),
}
OURS_COLOUR, RIVAL_COLOUR, PRODUCT_COLOUR = "#1f6feb", "#8c8c8c", "#d9822b"

Line = dict[str, str]


class Measured(NamedTuple):
    """A row of a table as it was last measured."""

    row: Row
    shape: Shape
    medians: dict[str, float]  # by contender
    line: Line  # the numerator's, with the ratio and the verdict

    @property
    def title(self) -> str:
        return self.row.title(self.shape)

    @property
    def to_product_into(self) -> str:
        """The ratio of the medians, for the product into memory that is already there."""
        if PRODUCT_INTO not in self.medians:
            return ""
        return _short(self.medians[self.row.numerator] / self.medians[PRODUCT_INTO])


def measured(file: Path, rows: list[Row]) -> Iterator[Measured]:
    """What the file holds of the rows, in their order."""
    with file.open(newline="", encoding="utf-8") as lines:
        found = list(csv.DictReader(lines))
    for row in rows:
        of_row = [line for line in found if line["row"] == row.name]
        if not of_row:
            continue
        last = {
            line["contender"]: line for line in of_row if line["time"] == max(each["time"] for each in of_row)
        }
        n, d, k, m = (int(last[row.numerator][size]) for size in ("n", "d", "k", "m"))
        medians = {contender: float(line["p50"]) for contender, line in last.items()}
        yield Measured(row, Shape(n, d, k, m), medians, last[row.numerator])


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def table(results: list[Measured]) -> str:
    """In Markdown, and under it where the numbers come from."""
    lines = [
        "| what | measured | target | met | to `torch.mm(..., out=)` |",
        "| --- | --- | --- | --- | --- |",
    ]
    for result in results:
        line = result.line
        met = line["met"] if line["met"] != "no" else "**no**"
        cells = (
            result.title,
            _short(float(line["ratio"])),
            line["target"],
            met,
            result.to_product_into,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_sources(results)])


def _sources(results: list[Measured]) -> Iterator[str]:
    """One line for every run."""
    runs = dict.fromkeys(result.line["time"] for result in results)
    for run in runs:
        line = next(result.line for result in results if result.line["time"] == run)
        yield (
            f"{run.partition('T')[0]}: {line['processor']}, {line['threads']} threads, {line['isa']}, "
            f"torch {line['torch']}, Python {line['python']}."
        )


def page(text: str, tables: dict[str, str]) -> str:
    """The page with every table between its marks made anew."""
    for name, written in tables.items():
        begin, end = f"<!-- {name}: written by bench/plot.py -->", f"<!-- {name}: end -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        before, *after = pattern.split(text)
        if len(after) != 1:
            raise ValueError(f"{PAGE.name} must have the marks of the table {name} once")
        text = f"{before}{begin}\n{written}\n{end}{after[0]}"
    return text


class Step(NamedTuple):
    """A line of the chart: milliseconds of forward and backward."""

    name: str
    ours: float
    rival: float | None = None
    rival_name: str = ""


def steps(results: list[Measured]) -> tuple[list[Step], tuple[float, float]]:
    """Every loss that was measured beside the bare product, the fastest first; and from what to what the
    product took."""
    by_name = {result.row.name: result for result in results}
    beside_product = [
        result
        for result in results
        if PRODUCT in result.medians and (result.shape.n, result.shape.d, result.shape.k) == (8192, 128, 4)
    ]
    found = []
    for result in beside_product:
        name = result.title.split(" ÷ ")[0]
        rival_row, rival_name = RIVALS.get(result.row.name, ("", ""))
        if rival_row not in by_name:
            found.append(Step(name, 1e3 * result.medians["ours"]))
            continue
        other = by_name[rival_row]
        ours, rival = other.medians["ours"], other.medians[other.row.numerator]
        found.append(Step(name, 1e3 * ours, 1e3 * rival, rival_name))
    products = [1e3 * result.medians[PRODUCT] for result in beside_product]
    return sorted(found, key=lambda step: step.ours), (min(products), max(products))


def draw(results: list[Measured], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    mpl.rcParams.update({"svg.hashsalt": "tripletops", "font.size": 11})  # the same numbers, the same file
    shown, product = steps(results)
    figure, axes = pyplot.subplots(figsize=(8.6, 0.36 * len(shown) + 1.2), layout="constrained")
    axes.axvspan(*product, color=PRODUCT_COLOUR, alpha=0.25, linewidth=0)
    axes.text(
        (product[0] * product[1]) ** 0.5,
        -1.15,
        "torch.mm(emb, emb.T) alone",
        color="#8a4b08",
        ha="center",
        va="center",
    )
    for place, step in enumerate(shown):
        _draw_step(axes, place, step)
    axes.plot([], [], "o", color=OURS_COLOUR, markersize=9, label="tripletops")
    axes.plot([], [], "o", color=RIVAL_COLOUR, markersize=8, label="others")
    axes.legend(loc="lower right", frameon=False)
    axes.set_yticks(range(len(shown)), [step.name for step in shown])
    axes.set_ylim(len(shown) - 0.5, -1.6)
    axes.set_xscale("log")
    axes.set_xlim(shown[0].ours / 3, 40_000)  # room for the number left of the fastest one
    ticks = [10, 100, 1_000, 10_000]
    axes.set_xticks(ticks, ["0.01 s", "0.1 s", "1 s", "10 s"])
    axes.set_xlabel("time of forward and backward (log scale), N = 8192, D = 128, 2 threads")
    axes.grid(axis="x", color="#e5e5e5")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(file, metadata={"Date": None}, facecolor="white")
    pyplot.close(figure)


def _draw_step(axes: Any, place: int, step: Step) -> None:
    if step.rival is not None:
        axes.plot([step.ours, step.rival], [place, place], color="#cfcfcf", linewidth=2, zorder=1)
        axes.plot(step.rival, place, "o", color=RIVAL_COLOUR, markersize=8)
        note = f"{step.rival_name}: {step.rival / step.ours:.0f} times as long"
        axes.annotate(
            note, (step.rival, place), (4, 8), textcoords="offset points", ha="right", color="#555555"
        )
    axes.plot(step.ours, place, "o", color=OURS_COLOUR, markersize=9, zorder=3)
    axes.annotate(
        f"{step.ours:.0f} ms",
        (step.ours, place),
        (-9, 0),
        textcoords="offset points",
        ha="right",
        va="center",
    )


def main() -> None:
    tables = {
        "core": list(measured(RESULTS / "core.csv", core.ROWS)),
        "dense": list(measured(RESULTS / "dense.csv", dense.ROWS)),
    }
    written = {name: table(results) for name, results in tables.items()}
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), written), encoding="utf-8")
    draw([*tables["core"], *tables["dense"]], CHART)


if __name__ == "__main__":
    main()
