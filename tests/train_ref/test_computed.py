"""Experiments that compute instead of training: run, resumed and reported like the others."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import numpy as np
import pytest

from tests.train_ref.support import command, refusal
from train_ref import runner
from train_ref.experiments import EXPERIMENTS
from train_ref.experiments.verdicts import REPRODUCED
from train_ref.folder import RunFolder
from train_ref.report.tables import outcome_of
from train_ref.settings import AboveZero, Computation, Computed, Count, Experiment, Row, Verdict
from train_ref.trainer import Context


@dataclass(frozen=True, kw_only=True)
class Squares(Computation):
    start: AboveZero = 1.0
    terms: Count = 3


class Counted:
    """Sums of squares, and which cells were computed; the process interrupts itself in one of them."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, int]] = []
        self.interrupted_at: int | None = None

    def __call__(self, settings: Squares, seed: int) -> Computed:
        if len(self.calls) == self.interrupted_at:
            os.kill(os.getpid(), signal.SIGINT)
        self.calls.append((settings.start, seed))
        squares = (settings.start + seed + np.arange(settings.terms)) ** 2
        return Computed({"sum": float(squares.sum())}, {"squares": squares})


@pytest.fixture
def compute(monkeypatch) -> Counted:
    counted = Counted()
    experiment = Experiment(
        name="squares",
        paper="A paper",
        shows="Fig 1",
        question="How large is a sum of squares?",
        desk=Squares(seeds=2),
        at_paper=Squares(seeds=2),
        rows=(Row("one", published={"sum": 14.0}), Row("five", {"start": 5.0})),
        compute=counted,
        quick={"terms": 1},
        judge=lambda outcome: [Verdict("It grows", REPRODUCED, str(outcome.value("five", "sum")))],
    )
    monkeypatch.setitem(EXPERIMENTS, experiment.name, experiment)
    return counted


def test_every_row_and_seed_is_computed_and_reported(compute, tmp_path):
    command("run", "squares", "--out", tmp_path)
    assert compute.calls == [(1.0, 0), (1.0, 1), (5.0, 0), (5.0, 1)]
    folder = RunFolder(tmp_path / "squares-desk")
    outcome = outcome_of(folder)
    assert outcome.unfinished == []
    assert outcome.values("one", "sum") == [1 + 4 + 9, 4 + 9 + 16]
    np.testing.assert_array_equal(outcome.kept("five")["squares"], [25, 36, 49])
    assert folder.arrays("five #1") == {}
    text = (folder.path / "report.md").read_text()
    assert "| one | 21.5 ± 10.6 | 14.0 |" in text
    assert "**Reproduced (the paper's scale):** It grows." in text
    assert "| start |" in text
    assert "**Data:**" not in text


def test_settings_are_changed_and_checked_as_for_trainings(compute, tmp_path):
    command("run", "squares", "--quick", "--seeds", "1", "--first-seed", "7", "--out", tmp_path)
    assert compute.calls == [(1.0, 7), (5.0, 7)]
    assert outcome_of(RunFolder(tmp_path / "squares-desk-quick")).values("one", "sum") == [64.0]
    said = refusal("run", "squares", "--network", "resnet18", "--out", tmp_path / "other")
    assert said == "there is no setting network; there are first_seed, seeds, start, terms"
    with pytest.raises(ValueError, match="--terms 0: must be from 1 to 1,000,000"):
        Squares(terms=0)


def test_an_interrupted_run_goes_on_with_what_is_left(compute, tmp_path, capsys):
    compute.interrupted_at = 1
    with pytest.raises(SystemExit) as ended:
        command("run", "squares", "--out", tmp_path)
    assert ended.value.code == runner.INTERRUPTED
    assert "python -m train_ref resume" in capsys.readouterr().err
    assert len(compute.calls) == 2
    command("resume", tmp_path / "squares-desk")
    assert compute.calls == [(1.0, 0), (1.0, 1), (5.0, 0), (5.0, 1)]
    assert outcome_of(RunFolder(tmp_path / "squares-desk")).unfinished == []


def test_unfinished_computations_are_named(compute, tmp_path):
    compute.interrupted_at = 0
    with pytest.raises(SystemExit):
        command("run", "squares", "--out", tmp_path)
    command("report", tmp_path / "squares-desk")
    text = (tmp_path / "squares-desk" / "report.md").read_text()
    assert "3 of 4 computations are missing: one (seed 1); five (seed 0, 1)." in text


def test_several_processes_are_refused(compute, tmp_path):
    folder = RunFolder(tmp_path / "squares-desk")
    command("run", "squares", "--out", tmp_path)
    config = folder.config() | {"processes": 2}
    folder.config = lambda: config
    with pytest.raises(ValueError, match="squares trains nothing: run it in one process, without torchrun"):
        runner.execute(folder, Context(world=2))
