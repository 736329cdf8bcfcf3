"""The numbers of a run as tables: measures beside the paper's, settings, the two scales, timing."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from train_ref.experiments import EXPERIMENTS
from train_ref.folder import RunFolder
from train_ref.outcome import Outcome, Value
from train_ref.report.document import Table
from train_ref.runner import cells_of
from train_ref.settings import DESK, PAPER, Computation, Experiment, Row

MISSING = "—"
BOUND = "bound diam₀ − 2·L₀"
NAMED = 6  # rows that are named one by one before "and so many more"


def outcome_of(folder: RunFolder) -> Outcome:
    """What a run's finished trainings have measured. The training under way is left out."""
    outcome = Outcome(folder, cells_of(folder.config()))
    finished = {record["cell"] for record in outcome.records if "final" in record}
    outcome.records = [record for record in outcome.records if record["cell"] in finished]
    return outcome


def experiment_of(outcome: Outcome) -> Experiment:
    return EXPERIMENTS[outcome.config["experiment"]]


def groups(outcome: Outcome) -> dict[str, list[Row]]:
    """The rows by the table or panel they belong to."""
    found: dict[str, list[Row]] = {}
    for row in outcome.rows:
        found.setdefault(row.group, []).append(row)
    return found


# Measures ---------------------------------------------------------------------------------------------------


class MeasureTable(NamedTuple):
    group: str
    place: str  # "<split>/<labels>"; empty for measures that are of neither
    table: Table
    published: bool  # whether the paper has numbers for it

    @property
    def title(self) -> str:
        return ": ".join(part for part in (self.group, place_in_words(self.place)) if part)


def place_in_words(place: str) -> str:
    split, _, labels = place.partition("/")
    return split if labels in ("", "class") else f"{split}, by {labels}"


def numbers(outcome: Outcome, row: Row) -> dict[str, Value]:
    """All measures of a row. Those that exist only before training come first."""
    after = outcome.measures(row.key)
    firsts = [each for each in outcome.records if each["row"] == row.key and each.get("epoch") == 0]
    names = dict.fromkeys(name for first in firsts for name in first["measures"] if name not in after)
    lists = {name: outcome.before(row.key, name) for name in names} | {BOUND: outcome.bounds(row.key)}
    lists |= {name: outcome.values(row.key, name) for name in after}
    return {name: _over_seeds(values) for name, values in lists.items() if values}


def _over_seeds(values: list[float]) -> Value:
    return Value(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))


def shown(value: Value | None, measure: str) -> str:
    """Percent with one decimal, other numbers with three digits."""
    if value is None:
        return MISSING
    size = abs(value.mean)
    if "/" in measure:
        form = ".1f"
    elif 0 < size < 1e-3:
        form = ".1e"
    else:
        form = f".{max(0, 2 - math.floor(math.log10(size))) if size else 1}f"
    return f"{value.mean:{form}} ± {value.std:{form}}" if value.seeds > 1 else f"{value.mean:{form}}"


def measure_tables(outcome: Outcome) -> list[MeasureTable]:
    """One table for each group of rows and each split and labels: ours, and the paper's where it has any."""
    found = []
    for group, rows in groups(outcome).items():
        ours = {row.key: numbers(outcome, row) for row in rows}
        names = dict.fromkeys(
            [name for row in rows for name in ours[row.key]]
            + [name for row in rows for name in row.published]
        )
        for place in dict.fromkeys(name.rpartition("/")[0] for name in names):
            chosen = [name for name in names if name.rpartition("/")[0] == place]
            found.append(_measure_table(group, place, rows, ours, chosen))
    return found


def _measure_table(
    group: str, place: str, rows: list[Row], ours: dict[str, dict[str, Value]], names: list[str]
) -> MeasureTable:
    header = [""]
    lines = [[row.name] for row in rows]
    any_published = False
    for name in names:
        header.append(name.rpartition("/")[2])
        published = any(name in row.published for row in rows)
        if published:
            header.append("paper")
        for row, line in zip(rows, lines, strict=True):
            line.append(shown(ours[row.key].get(name), name))
            if published:
                line.append(str(row.published[name]) if name in row.published else MISSING)
        any_published |= published
    table = Table(tuple(header), tuple(tuple(line) for line in lines), numbers=True)
    return MeasureTable(group, place, table, any_published)


# Settings ---------------------------------------------------------------------------------------------------


def in_words(value: object) -> str:
    """A setting's value."""
    match value:
        case None:
            return "not set"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:g}"
        case tuple() | list():
            return ", ".join(map(in_words, value)) or "none"
        case _:
            return str(value)


def name_in_words(setting: str) -> str:
    return setting.replace("_", " ")


def common_and_own(
    settings: Mapping[str, Computation],
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What all rows have in common, and of each row the rest."""
    common: dict[str, Any] = {}
    own: dict[str, dict[str, Any]] = {row: {} for row in settings}
    for each in dataclasses.fields(next(iter(settings.values()))):
        values = {row: getattr(found, each.name) for row, found in settings.items()}
        if len(set(values.values())) == 1:
            common[each.name] = next(iter(values.values()))
        else:
            for row, value in values.items():
                own[row][each.name] = value
    return common, own


class Difference(NamedTuple):
    """A setting that is not the paper's at desk scale."""

    setting: str
    desk: str
    paper: str
    rows: str  # empty: all of them


def differences(experiment: Experiment) -> list[Difference]:
    desk, paper = ({cell.row.key: cell for cell in experiment.cells(scale, {})} for scale in (DESK, PAPER))
    both = [cell.row for key, cell in desk.items() if key in paper]
    found = []
    for each in dataclasses.fields(experiment.desk):
        pairs: dict[tuple[object, object], list[Row]] = {}
        for row in both:
            pair = (getattr(cells[row.key].settings, each.name) for cells in (desk, paper))
            pairs.setdefault((next(pair), next(pair)), []).append(row)
        for (ours, theirs), rows in pairs.items():
            if ours != theirs:
                which = "" if len(rows) == len(both) else rows_in_words(rows, both)
                found.append(Difference(each.name, in_words(ours), in_words(theirs), which))
    return found


def only_at(scale: str, experiment: Experiment) -> str:
    """The rows that the other scale does not have."""
    here, there = (
        list({cell.row.key: cell.row for cell in experiment.cells(each, {})}.values())
        for each in (scale, PAPER if scale == DESK else DESK)
    )
    others = {row.key for row in there}
    return rows_in_words([row for row in here if row.key not in others], here + there)


def rows_in_words(rows: Sequence[Row], among: Sequence[Row]) -> str:
    """Rows by their names, or by the group's where they are all of it."""
    words = []
    for group in dict.fromkeys(row.group for row in rows):
        names = [row.name for row in rows if row.group == group]
        whole = len(names) == len({row.name for row in among if row.group == group})
        rest = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        if whole:
            words.append(group or "the main rows")
        else:
            words.append(f"{group}: " * bool(group) + ", ".join(names[:NAMED]) + rest)
    return "; ".join(words)


# Scale, completeness, time ----------------------------------------------------------------------------------


def scale_in_words(run: Mapping[str, Any]) -> str:
    """Of a run's configuration, or its published numbers, which name trainings that are missing too."""
    own = run["scale"] == PAPER or not differences(EXPERIMENTS[run["experiment"]])
    words = ["the paper's scale" if own else f"{run['scale']} scale"]
    if run["quick"]:
        words.append("quick trial")
    if changes := run["changes"]:
        changed = (f"{name_in_words(name)} {in_words(new)}" for name, new in changes.items())
        words.append(f"changed: {', '.join(changed)}")
    if run.get("unfinished"):
        words.append("unfinished")
    return "; ".join(words)


def unfinished_in_words(outcome: Outcome) -> str:
    """The trainings that are still to be done, by row; empty where there are none."""
    left: dict[str, list[str]] = {}
    for key in outcome.unfinished:
        row, _, seed = key.rpartition(" #")
        left.setdefault(row, []).append(seed)
    return "; ".join(f"{row} (seed {', '.join(seeds)})" for row, seeds in left.items())


class Share(NamedTuple):
    """Milliseconds of a step without its loss, and of the loss by tripletops and by hand."""

    network: float
    ours: float
    naive: float

    @property
    def ours_share(self) -> float:
        return 100 * self.ours / (self.network + self.ours)

    @property
    def naive_share(self) -> float:
        return 100 * self.naive / (self.network + self.naive)


def shares(outcome: Outcome) -> dict[str, Share]:
    """Of every row that was timed, the mean over its timed trainings."""
    found = {}
    for row in outcome.rows:
        times = [final["timing"] for final in outcome.finals.get(row.key, []) if "timing" in final]
        if times:
            found[row.key] = Share(
                *(statistics.fmean(each[name] for each in times) for name in Share._fields)
            )
    return found


def shares_in_words(found: Mapping[str, Share]) -> str:
    if not found:
        return "The loss was not timed."

    def span(values: list[float]) -> str:
        low, high = f"{min(values):.2g}", f"{max(values):.2g}"
        return f"{low} %" if low == high else f"{low}–{high} %"

    ours = span([share.ours_share for share in found.values()])
    naive = span([share.naive_share for share in found.values()])
    return (
        f"The loss, forward and backward, takes {ours} of a training step; batch-hard written by hand "
        f"on the same embeddings would take {naive}."
    )
