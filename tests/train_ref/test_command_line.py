"""The command line says what is wrong before anything is trained, and keeps what it was told."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import typing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.train_ref.support import (
    DIGITS,
    NAME,
    RUN,
    assert_same_run,
    command,
    interrupt_at,
    line,
    refusal,
)
from train_ref import __main__ as command_line
from train_ref import runner, trainer
from train_ref.experiments import EXPERIMENTS
from train_ref.experiments.easy_positives import EVEN_ODD
from train_ref.folder import RunFolder
from train_ref.outcome import Outcome
from train_ref.settings import DESK, PAPER, Settings, allowed_numbers, changed, option

pytest.importorskip("sklearn")
pytestmark = pytest.mark.usefixtures("training_alone")


def test_list_names_every_experiment(capsys):
    command("list")
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(EXPERIMENTS)
    asked = {"collapse-batch-size", "collapse-dim", "eps-even-odd", "eps-omniglot", "eps-trimmed", "eps-cars"}
    asked |= {"eps-cub", "extreme-movement", "extreme-group-size", "extreme-benchmarks"}
    asked |= {"collapse-toy", "eps-noise", "extreme-field"}
    assert set(EXPERIMENTS) == asked


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "eps-all"], "eps-even-odd"),
        (["run", "eps-even-odd", "--colour", "red"], "--colour"),
        (["run", "eps-even-odd", "--scale", "moon"], "desk"),
        (["run", "eps-even-odd", "--epochs", "many"], "--epochs"),
        ([], "COMMAND"),
    ],
)
def test_wrong_words(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        command(*arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


NOT_ALLOWED = {
    "from 1 to 1,000,000": [0, -1, 1_000_001, 10**30],
    "from 0 to 1,000,000": [-1, 1_000_001, 10**30],
    "0 or greater, and less than 2**32": [-1, 2**32, 10**30],
    "0 or greater, and finite": [-1, "nan", "inf"],
    "greater than 0, and finite": [0, -1, "nan", "inf"],
    "0 or greater, and less than 1": [-0.1, 1, "nan", "inf"],
}


@pytest.mark.parametrize(
    ("name", "number"),
    [
        (name, number)
        for name, allowed in allowed_numbers(Settings).items()
        for number in NOT_ALLOWED[allowed.words]
    ],
)
def test_a_number_that_is_not_allowed_is_said_first(tmp_path, monkeypatch, name, number):
    """Before data is looked for and anything is made."""
    monkeypatch.setattr(trainer.data, "load", lambda *_: pytest.fail("data is loaded"))
    others = ["1"] if isinstance(getattr(EVEN_ODD, name), tuple) else []
    said = line(*RUN, option(name), *others, number, "--out", tmp_path / "out")
    given = float(number) if typing.get_type_hints(Settings)[name] in (float, float | None) else number
    assert said == f"{option(name)} {given}: must be {allowed_numbers(Settings)[name].words}"
    assert not list(tmp_path.iterdir())


def test_the_ends_of_what_is_allowed():
    ends = {
        "from 1 to 1,000,000": [1, 1_000_000],
        "from 0 to 1,000,000": [0, 1_000_000],
        "0 or greater, and less than 2**32": [0, 2**32 - 1],
        "0 or greater, and finite": [0.0, 1e308],
        "greater than 0, and finite": [5e-324, 1e308],
        "0 or greater, and less than 1": [0.0, 0.999],
    }
    for name, allowed in allowed_numbers(Settings).items():
        for number in ends[allowed.words]:
            several = isinstance(getattr(EVEN_ODD, name), tuple)
            changed(EVEN_ODD, {name: (number,) if several else number})


def test_every_number_of_the_settings_has_its_bounds():
    numeric = [
        name
        for name, hint in typing.get_type_hints(Settings).items()
        if {int, float} & {hint, *typing.get_args(hint)}
    ]
    assert sorted(allowed_numbers(Settings)) == sorted(numeric)


@pytest.mark.parametrize(
    "changes",
    [
        {"positive": "nice"},
        {"positive": "all"},
        {"triplet": "cubic"},
        {"distance": "taxi"},
        {"network": "transformer"},
        {"frozen": 3},
        {"keep": ("shelf",)},
        {"objective": "semi_hard", "trim": 0.5},
        {"pretrained": True, "network": "resnet18"},
        {"batch": 30},
    ],
)
def test_what_is_wrong_with_the_last_row_is_said_before_the_first(tmp_path, monkeypatch, untrained, changes):
    experiment = EXPERIMENTS["eps-even-odd"]
    rows = (experiment.rows[0], dataclasses.replace(experiment.rows[1], changes=changes))
    monkeypatch.setitem(EXPERIMENTS, "eps-even-odd", dataclasses.replace(experiment, rows=rows))
    given = {name for name in changes if name in DIGITS}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in DIGITS.items() if name not in given]
    first = [] if "batch" not in given else ["--per-class", "64"]
    refusal("run", "eps-even-odd", *arguments, *first, "--data", tmp_path, "--out", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch", "30"], "a batch of 30 can't have 16 images of every class"),
        (["--per-class", "8"], r"p \(4\) must not exceed the number of classes \(2\)"),
        (["--batches", "piles"], "no batches 'piles'"),
        (["--network", "transformer"], "transformer.*even_odd"),
        (["--optimizer", "newton"], "newton.*sgd"),
        (["--objective", "hope"], "hope.*semi_hard"),
        (["--precision", "float8"], "float8.*bfloat16"),
        (["--dataset", "letters"], "'letters'.*omniglot"),
        (["--target", "colour"], "colour.*parity"),
        (["--measured", "colour", "--measure-every", "0"], "colour.*parity"),
        (["--keep", "shelf"], "shelf.*test digits"),
        (["--positive", "nice"], "nice"),
        (["--objective", "semi_hard", "--trim", "0.5"], "trim"),
        (["--backend", "abacus"], "abacus.*reference"),
        (["--backend", "triton"], "triton"),
        (["--pretrained"], "even_odd"),
    ],
)
def test_wrong_settings_are_said_before_training(tmp_path, monkeypatch, arguments, said):
    took = []
    optimizer_step = torch.optim.Adam.step
    monkeypatch.setattr(
        torch.optim.Adam, "step", lambda *rest, **more: (took.append(1), optimizer_step(*rest, **more))
    )
    with pytest.raises(SystemExit) as ended:
        command(*RUN, *arguments, "--out", tmp_path)
    assert isinstance(ended.value.code, str)
    assert re.search(said, ended.value.code)
    assert not took
    assert not list(tmp_path.iterdir())  # so that the right command finds the place free


def test_a_batch_without_a_triplet_is_said(tmp_path):
    given = {**DIGITS, "network": "even_odd", "per_class": 1, "batch": 2, "pad": 0, "measured": "digit"}
    arguments = [part for name, value in given.items() for part in (option(name), value)]
    words = ["--no-pretrained", "--frozen", 0, "--batches", "pk", "--target", "parity", "--quick"]
    said = line("run", "extreme-movement", *arguments, *words, "--epochs", 0, "--out", tmp_path)
    assert said == "a batch of 2 images has no triplet: raise --per-class or --batch"
    assert not list(tmp_path.iterdir())


def test_a_setting_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match=r"no setting colour; there are .*margin"):
        changed(EVEN_ODD, {"colour": "red"})


def test_a_run_is_not_overwritten(tmp_path, unbroken):
    shutil.copytree(unbroken, tmp_path / NAME)
    said = refusal(*RUN, "--out", tmp_path)
    assert f"python -m train_ref resume {tmp_path / NAME}" in said
    assert_same_run(tmp_path / NAME, unbroken)
    command("resume", tmp_path / NAME)  # nothing is left to be done
    assert_same_run(tmp_path / NAME, unbroken)


@pytest.mark.parametrize("kind", ["missing", "folder", "file"])
def test_resume_of_what_is_no_run(tmp_path, kind):
    path = tmp_path / "run"
    if kind == "folder":
        path.mkdir()
    elif kind == "file":
        path.touch()
    said = refusal("resume", path)
    assert str(path) in said
    assert "is no run" in said


def test_missing_data_is_named(tmp_path):
    said = refusal("run", "eps-even-odd", "--data", tmp_path / "nowhere", "--out", tmp_path)
    assert "train-images-idx3-ubyte.gz" in said
    assert str(tmp_path / "nowhere") in said
    said = refusal("run", "eps-cub", "--data", tmp_path / "nowhere", "--out", tmp_path)
    assert "cub" in said


@pytest.mark.parametrize("setting", dataclasses.fields(Settings), ids=lambda setting: setting.name)
def test_every_setting_is_an_option(monkeypatch, setting):
    """And gets there as what it is: numbers as numbers, several as a tuple."""
    given_all = {"clip": 0.5, "steps": 3, "milestones": (1,), "diagrams": (1,), "distance": "cosine"}
    default = getattr(changed(EVEN_ODD, given_all), setting.name)
    asked: dict[str, object] = {}
    unmade = RunFolder(Path("unmade"))
    monkeypatch.setattr(runner, "new_run", lambda *_, changes, **more: asked.update(changes) or unmade)
    option = f"--{setting.name.replace('_', '-')}"
    if isinstance(default, bool):
        given = [option if not default else f"--no-{setting.name.replace('_', '-')}"]
        expected: object = not default
    elif isinstance(default, tuple):
        given, expected = [option, *map(str, default)], list(default)
    else:
        given, expected = [option, str(default)], default
    command("run", "eps-even-odd", *given)
    assert asked == {setting.name: expected}
    assert type(asked[setting.name]) is type(expected)
    config = {"experiment": "eps-even-odd", "scale": DESK, "quick": False, "changes": asked}
    reached = getattr(runner.cells_of(json.loads(json.dumps(config)))[0].settings, setting.name)
    assert reached == (tuple(default) if isinstance(default, tuple) else expected)


def test_a_run_keeps_the_settings_it_was_begun_with(unbroken, monkeypatch):
    config = RunFolder(unbroken).config()
    experiment = EXPERIMENTS["eps-even-odd"]
    redefined = dataclasses.replace(experiment, desk=changed(experiment.desk, {"margin": 0.7, "seeds": 9}))
    monkeypatch.setitem(EXPERIMENTS, "eps-even-odd", redefined)
    found = runner.cells_of(config)
    assert [each.key for each in found] == ["Triplet #0", "EPS + Triplet #0"]
    assert {each.settings.margin for each in found} == {0.2}
    assert found[0].settings.recall_at == (1, 5, 10)  # a tuple again
    monkeypatch.setitem(EXPERIMENTS, "eps-even-odd", dataclasses.replace(redefined, rows=experiment.rows[1:]))
    with pytest.raises(
        ValueError, match=r"eps-even-odd has no row 'Triplet' in this version: .* run it anew"
    ):
        runner.cells_of(config)


def test_other_seeds(tmp_path, unbroken):
    """A run can be repeated with seeds that it has not had; the first of them stands for it in figures."""
    command(*RUN, "--out", tmp_path, "--first-seed", 3, "--seeds", 2, "--epochs", 1, "--steps", 2)
    folder = RunFolder(tmp_path / NAME)
    finals = [record for record in folder.records() if "final" in record]
    assert [record["cell"] for record in finals] == [
        "Triplet #3",
        "Triplet #4",
        "EPS + Triplet #3",
        "EPS + Triplet #4",
    ]
    assert ["timing" in record for record in finals] == [True, False] * 2
    outcome = Outcome(folder, runner.cells_of(folder.config()))
    assert set(outcome.kept("Triplet")) == {"embeddings train digits", "embeddings test digits"}
    assert not folder.arrays("Triplet #4")
    first_losses = [RunFolder(unbroken).records()[1]["losses"][0], folder.records()[1]["losses"][0]]
    assert first_losses[0] != first_losses[1]


@pytest.mark.parametrize("scale", [DESK, PAPER])
def test_a_run_has_the_rows_of_its_scale(scale):
    """Some experiments have a row of one name at each scale."""
    for experiment in EXPERIMENTS.values():
        expected = experiment.cells(scale, {})
        settings = {each.row.key: dataclasses.asdict(each.settings) for each in expected}
        config = {"experiment": experiment.name, "scale": scale, "settings": json.loads(json.dumps(settings))}
        assert runner.cells_of(config) == expected


def test_resume_keeps_the_backend(tmp_path, monkeypatch):
    interrupt_at(monkeypatch, 1)
    with pytest.raises(SystemExit):
        command(*RUN, "--backend", "reference", "--out", tmp_path)
    seen = []
    monkeypatch.setattr(runner, "execute", lambda folder, context: seen.append(context.backend))
    command("resume", tmp_path / NAME)
    assert seen == ["reference"]


def test_reports_are_written_anew(tmp_path, monkeypatch, capsys):
    published = []
    monkeypatch.setattr(
        command_line, "publish", lambda folders, out, _: published.append((folders, out)) or out
    )
    command("report", tmp_path / "a", tmp_path / "b")
    assert capsys.readouterr().out.split() == [str(tmp_path / name / "report.md") for name in "ab"]
    assert not published
    command("report", tmp_path / "a", tmp_path / "b", "--publish", tmp_path)
    ((folders, out),) = published
    assert [folder.path for folder in folders] == [tmp_path / "a", tmp_path / "b"]
    assert out == tmp_path


def test_reproduce_runs_every_experiment(tmp_path, monkeypatch):
    """Each by a command of its own; what was begun before is gone on with, what fails is named."""
    begun, fails = "eps-cars", "eps-cub"
    with RunFolder(tmp_path / f"{begun}-desk-quick").begun({}):
        pass
    commands, published = {}, []

    def run(arguments: list[str], **_: object) -> SimpleNamespace:
        name = next(
            name
            for name in EXPERIMENTS
            if any(part.rpartition("/")[2].startswith(name) for part in arguments)
        )
        commands[name] = arguments[3:]
        return SimpleNamespace(returncode=int(name == fails), stdout="its report", stderr="no data")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(command_line, "publish", lambda folders, out, _: published.extend(folders))
    said = refusal("reproduce", "--quick", "--data", tmp_path / "data", "--out", tmp_path)
    assert set(commands) == set(EXPERIMENTS)
    assert commands[begun][:2] == ["resume", str(tmp_path / f"{begun}-desk-quick")]
    assert commands["eps-omniglot"][:2] == ["run", "eps-omniglot"]
    assert "--quick" in commands["eps-omniglot"]
    assert all(str(tmp_path / "data") in arguments for arguments in commands.values())
    assert [folder.path.name for folder in published] == [
        f"{name}-desk-quick" for name in EXPERIMENTS if name != fails
    ]
    assert fails in said
    assert begun not in said
