"""The page of one run, report.md and report.html: verdicts, numbers, figures, and how they came about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from train_ref import data
from train_ref.data import DataError
from train_ref.folder import RunFolder, write_whole
from train_ref.outcome import Outcome
from train_ref.report import document, tables
from train_ref.report.document import Block, Heading, Paragraph, Picture, Points, Table
from train_ref.report.drawing import Drawing, NoFigureError
from train_ref.report.figures import CAPTIONS, draw
from train_ref.report.tables import experiment_of, in_words, name_in_words
from train_ref.settings import DESK, PAPER


def write_report(folder: RunFolder, roots: Sequence[Path] | None = None) -> Path:
    """Write a run's page and figures into its folder; the path of report.md.

    `roots` are the folders of the data sets, if not the usual ones: some figures need labels or images.
    """
    outcome = tables.outcome_of(folder)
    blocks = report(outcome, figures(Drawing(outcome, folder.path, roots)), roots)
    path = folder.path / "report.md"
    write_whole(path, document.markdown(blocks).encode())
    write_whole(path.with_suffix(".html"), document.page(experiment_of(outcome).name, blocks).encode())
    return path


def report(outcome: Outcome, pictures: Sequence[Block], roots: Sequence[Path] | None = None) -> list[Block]:
    experiment = experiment_of(outcome)
    return [
        Heading(1, experiment.name),
        Paragraph(f"{experiment.paper}: {experiment.shows}."),
        Paragraph(experiment.question, "Question:"),
        *warnings(outcome),
        Heading(2, "What became of the paper's claims"),
        verdicts(outcome),
        *account(outcome),
        Heading(2, "Numbers"),
        *numbers(outcome),
        *([Heading(2, "Figures"), *pictures] if pictures else []),
        Heading(2, "How it was run"),
        *settings(outcome),
        *choices(outcome),
        *scales(outcome),
        *timing(outcome),
        Heading(3, "Data and machine"),
        *environment(outcome, roots),
    ]


def warnings(outcome: Outcome) -> list[Block]:
    """What a reader must know before the numbers: trials, changed settings, trainings that are missing."""
    found: list[Block] = []
    config = outcome.config
    if config["quick"]:
        quick = ", ".join(
            f"{name_in_words(name)} {in_words(value)}" for name, value in experiment_of(outcome).quick.items()
        )
        found.append(
            Paragraph(
                f"Run with --quick ({quick}; a choice of the rows): it shows that everything works.",
                "A trial, not a result.",
            )
        )
    if config["changes"]:
        changes = ", ".join(
            f"{name_in_words(name)} {in_words(value)}" for name, value in config["changes"].items()
        )
        found.append(Paragraph(f"{changes}.", "Changed on the command line:"))
    if left := tables.unfinished_in_words(outcome):
        cells = "trainings" if experiment_of(outcome).compute is None else "computations"
        count = f"{len(outcome.unfinished)} of {len(outcome.cells)} {cells} are missing"
        found.append(Paragraph(f"{count}: {left}. What follows is of the others.", "Unfinished:"))
    return found


def verdicts(outcome: Outcome) -> Points:
    scale = tables.scale_in_words(outcome.config | {"unfinished": outcome.unfinished})
    return Points(
        tuple(
            Paragraph(
                f"{verdict.claim}. {_sentence(verdict.because)}",
                f"{_sentence(verdict.outcome)[:-1]} ({scale}):",
            )
            for verdict in experiment_of(outcome).judge(outcome)
        )
    )


def account(outcome: Outcome) -> list[Block]:
    """Why the verdicts came out as they did. The text is about desk scale as defined, so other runs have
    none."""
    text, config = experiment_of(outcome).account, outcome.config
    as_defined = config["scale"] == DESK and not config["quick"] and not config["changes"]
    return [Paragraph(text, "Why:")] if text and as_defined else []


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def numbers(outcome: Outcome) -> list[Block]:
    found: list[Block] = []
    made = tables.measure_tables(outcome)
    for each in made:
        found += [Heading(3, each.title or "All rows"), each.table]
    for group in tables.groups(outcome):
        if all(each.group != group for each in made):
            found.append(Paragraph(f"{group or 'All rows'}: {tables.MISSING} (nothing measured yet)."))
    paper = (
        " “paper” is what the paper reports at its own scale." if any(each.published for each in made) else ""
    )
    note = (
        "Mean ± standard deviation over the seeds; without ± it is of one seed. Recall and NMI are in "
        f"percent. {tables.MISSING} is not measured or not published.{paper}"
    )
    return [Paragraph(note), *found]


def figures(drawing: Drawing) -> list[Block]:
    """Draw all figures of the experiment; a sentence instead of one that can't be."""
    found: list[Block] = []
    for name in experiment_of(drawing.outcome).figures:
        try:
            files = draw(name, drawing)
        except NoFigureError as reason:
            found.append(Paragraph(f"{CAPTIONS[name]} Not drawn: {reason}."))
        else:
            found += [Picture(file.name, CAPTIONS[name], name) for file in files]
    return found


def settings(outcome: Outcome) -> list[Block]:
    common, own = tables.common_and_own(outcome.settings)
    found: list[Block] = []
    differing = list(next(iter(own.values())))
    if differing:
        header = ("row", *map(name_in_words, differing))
        lines = tuple((row, *(in_words(value) for value in values.values())) for row, values in own.items())
        found += [Heading(3, "Settings in which the rows differ"), Table(header, lines)]
    lines = tuple((name_in_words(name), in_words(value)) for name, value in common.items())
    return [*found, Heading(3, "Settings that all rows have in common"), Table(("setting", "value"), lines)]


def choices(outcome: Outcome) -> list[Block]:
    chosen = experiment_of(outcome).choices
    if not chosen:
        return []
    return [
        Heading(3, "Not given in the paper, chosen here"),
        Points(tuple(Paragraph(each) for each in chosen)),
    ]


def scales(outcome: Outcome) -> list[Block]:
    """What desk scale has otherwise than the paper."""
    experiment = experiment_of(outcome)
    found: list[Block] = [Heading(3, "Desk scale against the paper's")]
    differences = tables.differences(experiment)
    if differences:
        lines = tuple(
            (name_in_words(each.setting), each.desk, each.paper, each.rows or "all") for each in differences
        )
        found.append(Table(("setting", "desk", "paper", "rows"), lines))
    else:
        found.append(Paragraph("The settings are the same: desk scale is the paper's own here."))
    for scale, words in ((DESK, "Only at desk scale:"), (PAPER, "Only at the paper's scale:")):
        if rows := tables.only_at(scale, experiment):
            found.append(Paragraph(f"{rows}.", words))
    return found


def timing(outcome: Outcome) -> list[Block]:
    if experiment_of(outcome).compute is not None:
        return []
    heading = Heading(3, "The loss's share of a step")
    found = tables.shares(outcome)
    sentence = Paragraph(tables.shares_in_words(found))
    if not found:
        return [heading, sentence]
    header = ("row", "network (ms)", "loss (ms)", "share", "batch-hard by hand (ms)", "share")
    lines = tuple(
        (
            row,
            f"{share.network:.1f}",
            f"{share.ours:.2f}",
            f"{share.ours_share:.2f} %",
            f"{share.naive:.2f}",
            f"{share.naive_share:.2f} %",
        )
        for row, share in found.items()
    )
    return [heading, sentence, Table(header, lines, numbers=True)]


def environment(outcome: Outcome, roots: Sequence[Path] | None) -> list[Block]:
    config = outcome.config
    found = [Paragraph(source(*each, roots), "Data:") for each in _data_sets(outcome)]
    machine = ", ".join(f"{name} {value}" for name, value in config["environment"].items())
    found.append(Paragraph(f"{machine}.", "Machine and versions:"))
    found.append(
        Paragraph(
            f"{config['backend'] or 'chosen by the device'}; processes: {config['processes']}.", "Backend:"
        )
    )
    return [Points(tuple(found))]


def _data_sets(outcome: Outcome) -> list[tuple[str, int]]:
    if experiment_of(outcome).compute is not None:
        return []
    return list(dict.fromkeys((each.dataset, each.size) for each in outcome.settings.values()))


def source(name: str, size: int, roots: Sequence[Path] | None) -> str:
    """A data set's own line; its name where its files are not here."""
    try:
        return f"{data.load(name, size, roots).source}."
    except DataError:
        return f"{name} at {size}×{size}; its files are not here any more."
