"""What a training is described by: settings, the rows of a table that change some of them, and the
experiment.

An experiment is one definition with two scales. `Experiment.cells` is the list of all trainings it consists
of: every row with every seed. An experiment may compute its numbers instead of training a network for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import numpy

DESK, PAPER = "desk", "paper"


class Allowed(NamedTuple):
    """Which numbers a setting may have, in words and as a test; NaN passes no comparison."""

    words: str
    test: Callable[[float], bool]


MOST = 1_000_000  # more than any experiment needs, so that a typing error cannot fill the memory
Count = Annotated[int, Allowed(f"from 1 to {MOST:,}", lambda number: 1 <= number <= MOST)]
CountFromZero = Annotated[int, Allowed(f"from 0 to {MOST:,}", lambda number: 0 <= number <= MOST)]
Seed = Annotated[int, Allowed("0 or greater, and less than 2**32", lambda number: 0 <= number < 2**32)]
FromZero = Annotated[float, Allowed("0 or greater, and finite", lambda number: 0 <= number < math.inf)]
AboveZero = Annotated[float, Allowed("greater than 0, and finite", lambda number: 0 < number < math.inf)]
Share = Annotated[float, Allowed("0 or greater, and less than 1", lambda number: 0 <= number < 1)]


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Everything that decides the numbers of one cell, bar the seed. An experiment that trains nothing has
    settings of its own, a subclass of this.

    The types say which numbers are allowed; `ValueError` names one that is not.
    """

    seeds: Count = 1
    first_seed: Seed = 0

    def __post_init__(self) -> None:
        for name, allowed in allowed_numbers(type(self)).items():
            value = getattr(self, name)
            for number in value if isinstance(value, tuple) else (value,):
                if number is not None and not allowed.test(number):
                    raise ValueError(f"{option(name)} {number}: must be {allowed.words}")


class Computed(NamedTuple):
    """What a cell of an experiment that trains nothing comes to."""

    measures: dict[str, float]
    arrays: dict[str, numpy.ndarray[Any, Any]]  # for figures; those of the first seed are kept


@dataclass(frozen=True, kw_only=True)
class Settings(Computation):
    """The settings of a training."""

    dataset: str
    size: Count  # pixels a side
    target: str = "class"  # the labels that training sees
    measured: tuple[str, ...] = ("class",)  # the labels that recall and NMI are measured by
    # A view is a random crop of the image padded by this many pixels, flipped or not; 0: the image itself.
    pad: CountFromZero = 0

    network: str
    dim: Count = 128
    normalise: bool = True
    pretrained: bool = False  # on ImageNet; the weights lie in weights/ below a data folder
    frozen: CountFromZero = 0  # blocks of the network that are not trained; their outputs are computed once
    views: Count = 1  # of each training image, where its features are computed once

    batches: str = "pk"  # "pk", "groups" (every image once an epoch) or "shuffled" (no same-class guarantee)
    batch: Count
    per_class: Count = 8  # images of a class in a batch, "pk" and "groups"
    steps: Count | None = None  # per epoch; None: as many as one pass over the images takes

    objective: str = "triplet"  # a name of `objectives.OBJECTIVES`
    positive: str = "hard"
    negative: str = "hard"
    triplet: str = "margin"  # `loss=` of tripletops.triplet_loss
    distance: str | None = None  # None: the loss's own
    margin: FromZero = 0.2
    trim: Share = 0.0  # share of the anchors, those with the highest loss, that is left out

    optimizer: str = "adam"  # or "sgd"
    learning_rate: AboveZero
    objective_learning_rate: FromZero = 5e-4  # of β or of the proxies
    momentum: Share = 0.9  # of sgd
    milestones: tuple[CountFromZero, ...] = ()  # epochs after which the learning rate is divided by 10
    clip: AboveZero | None = None  # largest norm of the gradient
    precision: str = "float32"  # or "bfloat16": autocast
    epochs: CountFromZero
    seeds: Count = 3

    recall_at: tuple[Count, ...] = (1, 2, 4, 8)
    measure_every: CountFromZero = 0  # epochs between measures of recall; 0: after the last only
    nmi: bool = False
    nmi_factor: Count = 10  # clusters per class of NMI+
    keep: tuple[str, ...] = ()  # splits whose embeddings by the first seed are kept for figures, or "train"
    # Epochs after which the triplet scatter diagram is kept; 0: before training.
    diagrams: tuple[CountFromZero, ...] = ()


def allowed_numbers(kind: type[Computation]) -> dict[str, Allowed]:
    """What the types of the settings say, also inside of "… | None" and of tuples."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: part.__metadata__[0]
        for name, hint in hints.items()
        for part in (hint, *get_args(hint))
        if get_origin(part) is Annotated
    }


def option(setting: str) -> str:
    """A setting as the command line has it."""
    return f"--{setting.replace('_', '-')}"


def changed(settings: Computation, changes: Mapping[str, Any]) -> Computation:
    """`settings` with some replaced; one that does not exist is named."""
    if unknown := unknown_settings(changes, type(settings)):
        known = ", ".join(sorted(vars(settings)))
        raise ValueError(f"there is no setting {', '.join(unknown)}; there are {known}")
    return replace(settings, **changes)


def unknown_settings(names: Iterable[str], kind: type[Computation]) -> list[str]:
    return sorted(set(names) - {each.name for each in fields(kind)})


@dataclass(frozen=True)
class Row:
    """One row of a table or point of a plot: what it changes, and what the paper has there."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    group: str = ""  # the table or panel it belongs to
    at_paper: dict[str, Any] = field(default_factory=dict)  # changed at the paper's scale only
    published: dict[str, float] = field(default_factory=dict)  # the paper's numbers by measure
    scales: tuple[str, ...] = (DESK, PAPER)

    @property
    def key(self) -> str:
        return f"{self.group}: {self.name}" if self.group else self.name

    def cells(self, settings: Computation) -> list[Cell]:
        """Its trainings, one per seed."""
        seeds = range(settings.first_seed, settings.first_seed + settings.seeds)
        return [Cell(self, seed, settings) for seed in seeds]


class Cell(NamedTuple):
    """One training, or one computation."""

    row: Row
    seed: int
    settings: Any  # `Settings`, or those of the experiment's computation

    @property
    def key(self) -> str:
        return f"{self.row.key} #{self.seed}"

    @property
    def is_first(self) -> bool:
        """Of the trainings of its row: the one that figures and timings are taken from."""
        return bool(self.seed == self.settings.first_seed)


class Verdict(NamedTuple):
    """Whether one claim of the paper was reproduced."""

    claim: str
    outcome: str  # a word of `experiments.verdicts`
    because: str


@dataclass(frozen=True, kw_only=True)
class Experiment:
    name: str
    paper: str  # the paper's title
    shows: str  # its tables and figures
    question: str  # in one sentence
    desk: Computation
    at_paper: Computation
    rows: tuple[Row, ...]
    procedure: str = "train"  # a name of `procedures.PROCEDURES`
    compute: Callable[[Any, int], Computed] | None = None  # of settings and seed, where nothing is trained
    quick: dict[str, Any] = field(default_factory=dict)  # what `--quick` changes
    quick_rows: Callable[[Row], bool] = lambda row: True  # which rows `--quick` keeps
    choices: tuple[str, ...] = ()  # what the paper leaves open, and what was chosen
    account: str = ""  # why desk scale comes out as it does, where that is not as in the paper
    figures: tuple[str, ...] = ()  # names of `report.figures.FIGURES`
    judge: Callable[[Any], list[Verdict]]  # of an `outcome.Outcome`

    def cells(self, scale: str, changes: Mapping[str, Any], quick: bool = False) -> list[Cell]:
        """All trainings at a scale; `changes` come last and win."""
        base = self.desk if scale == DESK else self.at_paper
        found = []
        for row in self.rows:
            if scale not in row.scales or (quick and not self.quick_rows(row)):
                continue
            settings = changed(base, row.changes)
            settings = changed(settings, row.at_paper if scale == PAPER else {})
            settings = changed(changed(settings, self.quick if quick else {}), changes)
            found += row.cells(settings)
        return found
