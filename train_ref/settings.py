"""What a training is described by: settings, the rows of a table that change some of them, and the
experiment.

An experiment is one definition with two scales. `Experiment.cells` is the list of all trainings it consists
of: every row with every seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

DESK, PAPER = "desk", "paper"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides the numbers of one training, bar the seed."""

    dataset: str
    size: int  # pixels a side
    target: str = "class"  # the labels that training sees
    measured: tuple[str, ...] = ("class",)  # the labels that recall and NMI are measured by
    pad: int = 0  # a view of an image is a crop of it, padded by so many pixels, flipped or not; 0: as it is

    network: str
    dim: int = 128
    normalise: bool = True
    pretrained: bool = False  # on ImageNet; the weights lie in weights/ below a data folder
    frozen: int = 0  # blocks of the network that are not trained; their outputs are computed once
    views: int = 1  # of each training image, where its features are computed once

    batches: str = "pk"  # "pk", "groups" (every image once an epoch) or "shuffled" (no same-class guarantee)
    batch: int
    per_class: int = 8  # images of a class in a batch, "pk" and "groups"
    steps: int | None = None  # an epoch; None: as many as one pass over the images takes

    objective: str = "triplet"  # a name of `objectives.OBJECTIVES`
    positive: str = "hard"
    negative: str = "hard"
    triplet: str = "margin"  # `loss=` of tripletops.triplet_loss
    distance: str | None = None  # None: the loss's own
    margin: float = 0.2
    trim: float = 0.0  # share of the anchors, those with the highest loss, that is left out

    optimizer: str = "adam"  # or "sgd"
    learning_rate: float
    objective_learning_rate: float = 5e-4  # of β or of the proxies
    momentum: float = 0.9  # of sgd
    milestones: tuple[int, ...] = ()  # epochs after which the learning rate is divided by 10
    clip: float | None = None  # largest norm of the gradient
    precision: str = "float32"  # or "bfloat16": autocast
    epochs: int
    seeds: int = 3
    first_seed: int = 0

    recall_at: tuple[int, ...] = (1, 2, 4, 8)
    measure_every: int = 0  # epochs between measures of recall; 0: after the last only
    nmi: bool = False
    nmi_factor: int = 10  # NMI+ has so many clusters a class
    keep: tuple[
        str, ...
    ] = ()  # splits whose embeddings by the first seed are kept for figures; "train" is one
    diagrams: tuple[
        int, ...
    ] = ()  # epochs after which the triplet scatter diagram is kept; 0: before training


def changed(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """`settings` with some replaced; one that does not exist is named."""
    known = {each.name for each in fields(Settings)}
    for name in changes:
        if name not in known:
            raise ValueError(f"there is no setting {name!r}; there are {', '.join(sorted(known))}")
    return replace(settings, **changes)


@dataclass(frozen=True)
class Row:
    """One row of a table or point of a plot: what it changes, and what the paper has there."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    group: str = ""  # the table or panel it belongs to
    at_paper: dict[str, Any] = field(default_factory=dict)  # changed at the paper's scale only
    published: dict[str, float] = field(
        default_factory=dict
    )  # the paper's numbers by the name of the measure
    scales: tuple[str, ...] = (DESK, PAPER)

    @property
    def key(self) -> str:
        return f"{self.group}: {self.name}" if self.group else self.name

    def cells(self, settings: Settings) -> list[Cell]:
        """Its trainings, one a seed."""
        seeds = range(settings.first_seed, settings.first_seed + settings.seeds)
        return [Cell(self, seed, settings) for seed in seeds]


class Cell(NamedTuple):
    """One training."""

    row: Row
    seed: int
    settings: Settings

    @property
    def key(self) -> str:
        return f"{self.row.key} #{self.seed}"

    @property
    def is_first(self) -> bool:
        """Of the trainings of its row: the one that figures and timings are taken from."""
        return self.seed == self.settings.first_seed


class Verdict(NamedTuple):
    """What became of one claim of the paper."""

    claim: str
    outcome: str  # a word of `experiments.verdicts`
    because: str


@dataclass(frozen=True, kw_only=True)
class Experiment:
    name: str
    paper: str  # the paper's title
    shows: str  # its tables and figures
    question: str  # in one sentence
    desk: Settings
    at_paper: Settings
    rows: tuple[Row, ...]
    procedure: str = "train"  # a name of `procedures.PROCEDURES`
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
