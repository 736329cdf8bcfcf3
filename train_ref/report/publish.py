"""All runs on one page, RESULTS.md, with their figures and numbers beside it, small enough to be committed.

Nothing of it shows images of a data set that may not be shared, and nothing names a place on the machine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from train_ref.folder import RunFolder, write_whole
from train_ref.outcome import Outcome
from train_ref.report import document, page, tables
from train_ref.report.document import Block, Heading, Links, Paragraph, Picture, Points, Table
from train_ref.report.drawing import Drawing, NoFigureError
from train_ref.report.figures import PHOTOS
from train_ref.report.tables import experiment_of, name_in_words
from train_ref.settings import PAPER


class Published(NamedTuple):
    """A run whose files are in place below results/."""

    name: str  # of its folder there
    outcome: Outcome
    pictures: list[Block]


def publish(folders: Sequence[RunFolder], target: Path, roots: Sequence[Path] | None = None) -> Path:
    """Write RESULTS.md and results/ into `target`; the path of RESULTS.md."""
    runs = [_publish_run(name, folder, target, roots) for name, folder in _names(folders).items()]
    blocks: list[Block] = [
        Heading(1, "Results"),
        Paragraph(
            "What “python -m train_ref” measured of the papers' claims. That one row is above another is "
            "reproduced if it is so by more than the larger of their standard deviations over the seeds, of "
            "one seed by anything, and partly if it is so for some rows or in the mean only. Numbers under "
            "“paper” are the paper's own, at its scale."
        ),
        _claims(runs),
    ]
    for run in runs:
        blocks += _section(run)
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


def _publish_run(name: str, folder: RunFolder, target: Path, roots: Sequence[Path] | None) -> Published:
    outcome = tables.outcome_of(folder)
    drawing = Drawing(outcome, folder.path, roots)
    pictures = [
        Paragraph(f"{block.caption} Only in the run's own folder: the images may not be published.")
        if isinstance(block, Picture) and block.figure in PHOTOS and not _shareable(drawing)
        else block
        for block in page.figures(drawing)
    ]
    place = target / "results" / name
    for old in place.glob("*.png"):
        old.unlink()
    for block in pictures:
        if isinstance(block, Picture):
            write_whole(place / block.file, (folder.path / block.file).read_bytes())
    write_whole(place / "report.md", document.markdown(page.report(outcome, pictures, roots)).encode())
    write_whole(place / "numbers.json", json.dumps(numbers(outcome), indent=1, ensure_ascii=False).encode())
    return Published(name, outcome, pictures)


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


def _claims(runs: Sequence[Published]) -> Table:
    lines = [
        (run.name, verdict.claim, verdict.outcome, tables.scale_in_words(run.outcome), verdict.because)
        for run in runs
        for verdict in experiment_of(run.outcome).judge(run.outcome)
    ]
    return Table(("experiment", "claim", "verdict", "scale", "evidence"), tuple(lines))


def _section(run: Published) -> list[Block]:
    outcome, experiment = run.outcome, experiment_of(run.outcome)
    made = tables.measure_tables(outcome)
    chosen = []
    # The tables that the paper has numbers for, or else the first table of the group.
    for group in tables.groups(outcome):
        own = [each for each in made if each.group == group]
        chosen += [each for each in own if each.published] or own[:1]
    found: list[Block] = [
        Heading(2, run.name),
        Paragraph(f"{experiment.paper}: {experiment.shows}. {experiment.question}"),
        *page.warnings(outcome),
        *page.account(outcome),
    ]
    for each in chosen:
        found += [Paragraph("", each.title), each.table] if each.title else [each.table]
    place = f"results/{run.name}"
    found += [
        Picture(f"{place}/{block.file}", block.caption, block.figure) if isinstance(block, Picture) else block
        for block in run.pictures
    ]
    found.append(
        Points((Paragraph(what_was_run(outcome)), Paragraph(tables.shares_in_words(tables.shares(outcome)))))
    )
    found.append(Links((("full report", f"{place}/report.md"), ("all numbers", f"{place}/numbers.json"))))
    return found


def what_was_run(outcome: Outcome) -> str:
    """One line: the scale, how much of it, and where it is smaller than the paper."""
    experiment = experiment_of(outcome)
    done = len(outcome.cells) - len(outcome.unfinished)
    sentences = [
        f"Run at {tables.scale_in_words(outcome)}: {done} of {len(outcome.cells)} trainings, "
        f"{len(outcome.rows)} rows."
    ]
    if outcome.config["scale"] != PAPER:
        differences = [
            f"{name_in_words(each.setting)} {each.desk} "
            f"(paper: {each.paper}){f' for {each.rows}' if each.rows else ''}"
            for each in tables.differences(experiment)
        ]
        if differences:
            sentences.append(f"Otherwise than in the paper: {', '.join(differences)}.")
        if left_out := tables.only_at(PAPER, experiment):
            sentences.append(f"Left out at desk scale: {left_out}.")
    return " ".join(sentences)
