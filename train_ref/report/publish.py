"""All runs on one page, RESULTS.md, with a page, figures and numbers for each, small enough to be committed.

Nothing of it shows images of a data set that may not be shared, and nothing names a place on the machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train_ref.experiments import EXPERIMENTS
from train_ref.folder import RunFolder, write_whole
from train_ref.outcome import Outcome
from train_ref.report import document, page, tables
from train_ref.report.document import Block, Heading, Links, Paragraph, Picture, Table
from train_ref.report.drawing import Drawing, NoFigureError
from train_ref.report.figures import PHOTOS
from train_ref.report.tables import experiment_of


def publish(folders: Sequence[RunFolder], target: Path, roots: Sequence[Path] | None = None) -> Path:
    """Write the runs into results/ below `target`, and RESULTS.md on all runs that are there then. A run that
    was published before stays. Returns the path of RESULTS.md."""
    for name, folder in _names(folders).items():
        _publish_run(name, folder, target / "results" / name, roots)
    blocks: list[Block] = [
        Heading(1, "Results"),
        Paragraph(
            "What “python -m train_ref” measured of the papers' claims. That one row is above another is "
            "reproduced if it is so by more than the larger of their standard deviations over the seeds, of "
            "one seed by anything, and partly if it is so for some rows or in the mean only. The page of "
            "each run has its numbers beside the paper's, its figures and how it was run."
        ),
    ]
    order = list(EXPERIMENTS)
    published = {
        path.parent.name: json.loads(path.read_text(encoding="utf-8"))
        for path in target.glob("results/*/numbers.json")
    }
    for name in sorted(published, key=lambda name: (order.index(published[name]["experiment"]), name)):
        blocks += _section(name, published[name])
    path = target / "RESULTS.md"
    write_whole(path, document.markdown(blocks).encode())
    return path


def _names(folders: Sequence[RunFolder]) -> dict[str, RunFolder]:
    """The runs by their experiments' names; several of one experiment by their folders'."""
    experiments = [folder.config()["experiment"] for folder in folders]
    names = [
        name if experiments.count(name) == 1 else folder.path.resolve().name
        for name, folder in zip(experiments, folders, strict=True)
    ]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"several runs would be published under one name: {', '.join(doubled)}")
    return dict(zip(names, folders, strict=True))


def _publish_run(name: str, folder: RunFolder, place: Path, roots: Sequence[Path] | None) -> None:
    outcome = tables.outcome_of(folder)
    drawing = Drawing(outcome, folder.path, roots)
    pictures = [
        Paragraph(f"{block.caption} Only in the run's own folder: the images may not be published.")
        if isinstance(block, Picture) and block.figure in PHOTOS and not _shareable(drawing)
        else block
        for block in page.figures(drawing)
    ]
    for old in place.glob("*.png"):
        old.unlink()
    for block in pictures:
        if isinstance(block, Picture):
            write_whole(place / block.file, (folder.path / block.file).read_bytes())
    write_whole(place / "report.md", document.markdown(page.report(outcome, pictures, roots)).encode())
    write_whole(place / "numbers.json", json.dumps(numbers(outcome), indent=1, ensure_ascii=False).encode())


def _shareable(drawing: Drawing) -> bool:
    """Whether images of all of the run's data sets may be published; False where that is unknown."""
    try:
        return all(drawing.dataset(row).shareable for row in drawing.outcome.rows)
    except NoFigureError:
        return False


def numbers(outcome: Outcome) -> dict[str, Any]:
    """All that the page is made from, for other programs."""
    experiment, config = experiment_of(outcome), outcome.config
    common, own = tables.common_and_own(outcome.settings)
    shares = tables.shares(outcome)
    rows = {}
    for row in outcome.rows:
        measured = tables.numbers(outcome, row)
        rows[row.key] = {
            "settings": own[row.key],
            "measures": {
                name: {"mean": _rounded(value.mean), "std": _rounded(value.std), "seeds": value.seeds}
                for name, value in measured.items()
            },
            "published": row.published,
            "milliseconds": {name: _rounded(value) for name, value in shares[row.key]._asdict().items()}
            if row.key in shares
            else {},
        }
    return {
        **{
            name: config[name] for name in ("experiment", "scale", "quick", "changes", "backend", "processes")
        },
        "paper": experiment.paper,
        "shows": experiment.shows,
        "environment": config["environment"],
        "verdicts": [verdict._asdict() for verdict in experiment.judge(outcome)],
        "settings": common,
        "rows": rows,
        "unfinished": outcome.unfinished,
    }


def _rounded(number: float) -> float:
    return float(f"{number:.6g}")


def _section(name: str, run: Mapping[str, Any]) -> list[Block]:
    """A published run: what it asks, what became of the claims, and where the rest is."""
    experiment = EXPERIMENTS[run["experiment"]]
    verdicts = tuple((each["claim"], each["outcome"], each["because"]) for each in run["verdicts"])
    place = f"results/{name}"
    return [
        Heading(2, name),
        Paragraph(
            f"{experiment.paper}: {experiment.shows}. {experiment.question} "
            f"Run at {tables.scale_in_words(run)}."
        ),
        Table(("claim", "verdict", "evidence"), verdicts),
        Links((("the run's page", f"{place}/report.md"), ("all numbers", f"{place}/numbers.json"))),
    ]
