"""The experiments have the settings and the published numbers of their papers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from train_ref import models, procedures, runner
from train_ref.batches import batches
from train_ref.data import DATA_SETS, Split
from train_ref.experiments import EXPERIMENTS
from train_ref.folder import RunFolder
from train_ref.objectives import OBJECTIVES
from train_ref.outcome import Outcome
from train_ref.procedures import PROCEDURES
from train_ref.settings import DESK, PAPER, Cell, changed

pytest.importorskip("sklearn")
pytestmark = pytest.mark.usefixtures("training_alone")


# Of each data set: the classes that are trained on, and the images and classes of what is measured.
CLASSES = {
    "mnist": {"digit": 6, "parity": 2},
    "digits": {"digit": 6, "parity": 2},
    "omniglot": {"letter": 964, "alphabet": 30},
    "cub": {"class": 100},
    "cars": {"class": 98},
    "sop": {"class": 11318},
    "inshop": {"class": 3997},
    "market": {"class": 751},
}
TESTS = {
    "mnist": {"train digits": {"digit": 6, "parity": 2}, "test digits": {"digit": 4, "parity": 2}},
    "omniglot": {
        "test alphabets": {"letter": 659, "alphabet": 20},
        "training alphabets": {"letter": 964, "alphabet": 30},
    },
    "cub": {"test classes": {"class": 100}},
    "cars": {"test classes": {"class": 98}},
    "sop": {"test classes": {"class": 11316}},
    "inshop": {"query": {"class": 3985}, "gallery": {"class": 3985}},
    "market": {"query": {"class": 750}, "gallery": {"class": 750}},
}
PER_CLASS = {"omniglot": 20, "sop": 5}

EVERY = [(name, scale) for name in EXPERIMENTS for scale in (DESK, PAPER)]
TRAINED = [(name, scale) for name, scale in EVERY if EXPERIMENTS[name].compute is None]


@pytest.mark.parametrize(("name", "scale"), EVERY)
@pytest.mark.parametrize("quick", [False, True], ids=["whole", "quick"])
def test_every_experiment_asks_a_question_and_has_cells(name, scale, quick):
    experiment = EXPERIMENTS[name]
    cells = experiment.cells(scale, {}, quick)
    assert cells
    assert len({each.key for each in cells}) == len(cells)
    assert experiment.question.endswith("?")


@pytest.mark.parametrize(("name", "scale"), TRAINED)
@pytest.mark.parametrize("quick", [False, True], ids=["whole", "quick"])
def test_every_training_is_one_that_can_be(name, scale, quick):
    experiment = EXPERIMENTS[name]
    assert experiment.procedure in PROCEDURES
    for each in experiment.cells(scale, {}, quick):
        settings = each.settings
        assert settings.dataset in DATA_SETS
        assert settings.network in models.NAMES
        assert settings.objective in OBJECTIVES
        assert settings.optimizer in ("adam", "sgd")
        known = CLASSES[settings.dataset]
        assert settings.target in known
        assert set(settings.measured) <= set(known)
        assert set(settings.keep) <= {"train", *TESTS[settings.dataset]}
        labels = torch.arange(known[settings.target]).repeat_interleave(80)
        assert len(batches(settings, labels, 0, num_replicas=1, rank=0))
        torch.manual_seed(0)
        emb, few = torch.randn(8, settings.dim), torch.arange(2).repeat_interleave(4)
        loss = OBJECTIVES[settings.objective](settings, 2, None, torch.Generator().manual_seed(0))
        assert loss(nn.functional.normalize(emb) if settings.normalise else emb, few).isfinite()


def measures_of(experiment, each: Cell, monkeypatch) -> set[str]:
    """The names of all that is measured of a training: with its data set's classes, but no images."""
    if experiment.compute is not None:
        return set(experiment.compute(changed(each.settings, experiment.quick), each.seed).measures)
    if experiment.procedure != "train":
        return set()
    tests = {}
    for split, labelled in TESTS[each.settings.dataset].items():
        rows = max(labelled.values()) * PER_CLASS.get(each.settings.dataset, 50)
        labels = {label: torch.arange(rows) % count for label, count in labelled.items()}
        tests[split] = Split(torch.empty(rows, 1, 1, 1, dtype=torch.uint8), labels)
    dataset = SimpleNamespace(tests=tests, train=next(iter(tests.values())))
    stub = SimpleNamespace(
        cell=each,
        settings=each.settings,
        dataset=dataset,
        kept={},
        embed=lambda split: torch.zeros(len(split), 1),
    )
    monkeypatch.setattr(procedures, "recall_at_k", lambda emb, labels, ks, **more: dict.fromkeys(ks, 0.5))
    monkeypatch.setattr(procedures, "nmi", lambda *_: 0.5)
    monkeypatch.setattr(procedures, "nmi_plus", lambda *_: 0.5)
    return set(PROCEDURES[experiment.procedure](stub).after())


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_published_numbers_have_ours_beside_them(name, scale, monkeypatch):
    experiment = EXPERIMENTS[name]
    for each in experiment.cells(scale, {"seeds": 1}):
        if each.row.published:
            missing = set(each.row.published) - measures_of(experiment, each, monkeypatch)
            assert not missing, f"{each.key}: {missing}"


def published(experiment: str, row: str, scale: str = PAPER) -> dict[str, float]:
    return next(
        each.row.published for each in EXPERIMENTS[experiment].cells(scale, {}) if each.row.key == row
    )


@pytest.mark.parametrize(
    ("experiment", "row", "measure", "value"),
    [
        ("eps-even-odd", "Triplet", "train digits/digit/R@1", 42.01),
        ("eps-even-odd", "Triplet", "test digits/digit/R@10", 93.26),
        ("eps-even-odd", "EPS + Triplet", "train digits/digit/R@5", 93.57),
        ("eps-even-odd", "EPS + Triplet", "test digits/digit/R@1", 42.31),
        ("eps-omniglot", "Trip. + SH", "test alphabets/letter/R@1", 49.4),
        ("eps-omniglot", "EPS + Trip. + SH", "test alphabets/letter/NMI", 79.6),
        ("eps-omniglot", "EPS + MS", "test alphabets/alphabet/NMI+", 53.8),
        ("eps-omniglot", "MS", "test alphabets/alphabet/R@8", 95.4),
        ("eps-omniglot", "EPS + Trip. + SH", "training alphabets/alphabet/R@1", 94.5),
        ("eps-omniglot", "Trip. + SH", "training alphabets/letter/R@1", 70.3),
        ("eps-cars", "EPS + Dist-Margin", "test classes/class/R@1", 83.6),
        ("eps-cars", "Trip. + SH", "test classes/class/NMI", 65.1),
        ("eps-cars", "512-d, batch 260: EPS + MS", "test classes/class/R@1", 85.5),
        ("eps-cub", "MS", "test classes/class/NMI+", 68.0),
        ("eps-cub", "EPS + Trip. + SH", "test classes/class/R@4", 82.4),
        ("eps-cub", "512-d, batch 260: MS", "test classes/class/R@1", 65.7),
        ("extreme-benchmarks", "CUB: EPHN-1st", "test classes/class/R@4", 83.5),
        ("extreme-benchmarks", "CAR: EPHN-2nd", "test classes/class/R@1", 83.2),
        ("extreme-benchmarks", "SOP: EPHN-2nd", "test classes/class/R@100", 96.3),
        ("extreme-benchmarks", "In-shop: EPHN-1st", "gallery/class/R@20", 97.9),
    ],
)
def test_published_numbers_are_the_papers(experiment, row, measure, value):
    """As they stand in 001's Tables 1 to 4 and 6, and in 002's Table 1."""
    assert published(experiment, row)[measure] == value


def test_settings_are_the_papers():
    """A few that the papers name, each with the scale's own."""
    for name in ("eps-cars", "eps-cub", "eps-omniglot"):
        at_paper = EXPERIMENTS[name].at_paper
        assert (at_paper.network, at_paper.dim, at_paper.batch, at_paper.seeds) == ("resnet50", 128, 160, 8)
        assert (at_paper.optimizer, at_paper.learning_rate) == ("adam", 1e-5)
    extreme = {each.row.key: each.settings for each in EXPERIMENTS["extreme-group-size"].cells(PAPER, {})}
    row = extreme["CUB: EPHN-1st n=2"]
    assert (row.optimizer, row.batch, row.learning_rate, row.epochs) == ("sgd", 128, 0.0025, 40)
    assert (row.milestones, row.triplet, row.per_class) == ((20, 30), "first_order", 2)
    assert extreme["CAR: EPSHN-2nd n=16"].learning_rate == 0.005
    collapse = {each.row.key: each.settings for each in EXPERIMENTS["collapse-batch-size"].cells(PAPER, {})}
    row = collapse["α=0.05: P=18 K=32"]
    assert (row.network, row.batch, row.margin, row.normalise) == ("resnet18", 576, 0.05, False)
    assert row.epochs * row.steps == 40_000


def test_rows_differ_at_both_scales():
    """No two rows of an experiment are the same training under two names."""
    for name, scale in EVERY:
        if name == "eps-omniglot":  # Fig 3b has two of Table 3's rows again, measured less
            continue
        settings = [each.settings for each in EXPERIMENTS[name].cells(scale, {}) if each.seed == 0]
        assert len(set(settings)) == len(settings), f"{name} at the scale {scale}"


def test_verdicts_from_numbers(unbroken):
    """Of the tiny run, with recalls put in its place: above by more than the std, by less, and below."""
    config = runner.cells_of(RunFolder(unbroken).config())
    outcome = Outcome(RunFolder(unbroken), config)
    assert outcome.unfinished == []
    for gain, expected in ((10.0, "reproduced"), (1.0, "partly reproduced"), (-1.0, "not reproduced")):
        outcome.finals = {
            row: [
                {"measures": {f"{split} digits/digit/R@1": value for split in ("train", "test")}}
                for value in (start - 2, start + 2)
            ]
            for row, start in (("Triplet", 40.0), ("EPS + Triplet", 40.0 + gain))
        }
        verdicts = EXPERIMENTS["eps-even-odd"].judge(outcome)
        assert [verdict.outcome for verdict in verdicts] == [expected, expected]
        assert f"{40.0 + gain:.1f} ± 2.8" in verdicts[0].because
    outcome.finals = {}
    assert {verdict.outcome for verdict in EXPERIMENTS["eps-even-odd"].judge(outcome)} == {"not run"}
