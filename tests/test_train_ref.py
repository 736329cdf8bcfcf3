"""The reference trainer: a run can be broken off at any moment and gone on with, every backend follows the
same course, objectives and procedures are what their formulas say, and the command line says what is wrong
before anything is trained. Everything is tried on scikit-learn's digits.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import functools
import io
import json
import math
import multiprocessing
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
import typing
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
import tqdm
from torch import nn

import tripletops as T
from train_ref import __main__ as command_line
from train_ref import demo, features, models, procedures, runner, trainer
from train_ref.batches import ShuffledBatches, batches
from train_ref.data import DATA_SETS, DataError, Split
from train_ref.experiments import EXPERIMENTS
from train_ref.experiments.easy_positives import EVEN_ODD
from train_ref.features import Inputs
from train_ref.folder import FolderError, RunFolder, write_whole
from train_ref.objectives import OBJECTIVES
from train_ref.outcome import Outcome
from train_ref.procedures import PROCEDURES
from train_ref.report.page import write_report
from train_ref.settings import DESK, PAPER, Cell, Row, Settings, allowed_numbers, changed, option
from train_ref.trainer import Context, Training
from tripletops.evaluate import diameter

pytest.importorskip("sklearn")

ROOT = Path(__file__).resolve().parents[1]
DIGITS = {"dataset": "digits", "size": 8, "batch": 32, "per_class": 16, "steps": 4, "epochs": 2, "seeds": 1}
RUN = [
    "run",
    "eps-even-odd",
    *(part for name, value in DIGITS.items() for part in (f"--{name.replace('_', '-')}", str(value))),
]
NAME = "eps-even-odd-desk"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """On the CPU by one thread, for sums by two are others; and memory is left to later tests as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(runner, "keep_freed_memory", lambda: None)
        patch.setattr(runner, "TIMED_ROUNDS", 1)
        patch.setattr(command_line, "write_report", lambda folder, *_: folder.path / "report.md")
        yield
    torch.set_num_threads(before)


def command(*arguments: object) -> None:
    """`python -m train_ref …`, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train_ref", *map(str, arguments)])
        command_line.main()


def refusal(*arguments: object) -> str:
    """What the command says on ending with an error, instead of a traceback."""
    with pytest.raises(SystemExit) as ended:
        command(*arguments)
    assert isinstance(ended.value.code, str)
    return ended.value.code


def line(*arguments: object) -> str:
    """The same, where it is no more than a line."""
    said = refusal(*arguments)
    assert "\n" not in said
    return said


def numbers(path: Path) -> list[dict]:
    """All that a run measured, but for how long it took."""
    times = {"seconds", "loss_seconds", "timing"}
    return [
        {name: value for name, value in record.items() if name not in times}
        for record in RunFolder(path).records()
    ]


def arrays(path: Path) -> dict[str, dict[str, numpy.ndarray]]:
    return {cell: RunFolder(path).arrays(cell) for cell in ("Triplet #0", "EPS + Triplet #0")}


def assert_same_run(path: Path, expected: Path) -> None:
    assert numbers(path) == numbers(expected)
    timed, expected_timed = (
        [set(record.get("timing", ())) for record in RunFolder(each).records()] for each in (path, expected)
    )
    assert timed == expected_timed
    kept, expected_arrays = arrays(path), arrays(expected)
    for cell, named in expected_arrays.items():
        assert set(named) == {"embeddings train digits", "embeddings test digits"}
        for name, array in named.items():
            numpy.testing.assert_array_equal(kept[cell][name], array)
    left = [file.name for file in path.iterdir() if not file.name.startswith(".")]
    assert sorted(left) == sorted(file.name for file in expected.iterdir())  # no checkpoint


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    """The folder of a run that nothing happened to: two trainings of two epochs of four steps."""
    out = tmp_path_factory.mktemp("unbroken")
    command(*RUN, "--out", out)
    return out / NAME


def cell(seed: int = 0, **changes) -> Cell:
    """A training of even/odd on digits, with changes."""
    return Cell(Row("row"), seed, changed(EVEN_ODD, DIGITS | {"distance": None} | changes))


def losses(training: Training, steps: int) -> list[float]:
    found: list[float] = []
    while len(found) < steps:
        found += [step.loss for step in training.epoch_steps()]
        training.close_epoch()
    return found[:steps]


# Broken off -------------------------------------------------------------------------------------------------


def test_a_run_leaves_what_it_promises(unbroken):
    records = RunFolder(unbroken).records()
    assert [(record["cell"], record.get("epoch", "final")) for record in records] == [
        (name, epoch) for name in ("Triplet #0", "EPS + Triplet #0") for epoch in (0, 1, 2, "final")
    ]
    assert [len(record["losses"]) for record in records if "losses" in record] == [4] * 4
    assert all(
        set(record["timing"]) == {"network", "ours", "naive"} for record in records if "final" in record
    )
    assert records[1]["loss"] == pytest.approx(sum(records[1]["losses"]) / 4)
    assert {"train digits/digit/R@1", "test digits/digit/R@10"} < set(records[3]["measures"])
    assert (
        records[2]["measures"]["train digits/digit/R@5"] == records[3]["measures"]["train digits/digit/R@5"]
    )
    config = json.loads((unbroken / "config.json").read_text())
    assert {"torch", "python", "processor"} < set(config["environment"])
    assert config["settings"]["EPS + Triplet"]["positive"] == "easy"


FORKS = multiprocessing.get_context("forkserver")  # a process that has torch in it begins at once
FORKS.set_forkserver_preload(["pytest", "sklearn.datasets", "torch._dynamo", "train_ref.__main__"])


def command_that_dies(arguments: list[str], place: str | None, calls: int) -> None:
    """In a process of its own: a command that is killed as `place` is called for the n-th time."""
    torch.set_num_threads(1)
    sys.argv = ["train_ref", *arguments]
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (the process's end closes it)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(command_line, "write_report", lambda *_: None)
        if place is not None:
            name, _, attribute = place.rpartition(".")
            owner = {"os": os, "Training": Training, "RunFolder": RunFolder}[name]
            original = getattr(owner, attribute)

            def dying(*args, **kwargs):
                nonlocal calls
                calls -= 1
                if not calls:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)

            patch.setattr(owner, attribute, dying)
        command_line.main()


@pytest.mark.parametrize(
    ("place", "calls"),
    [
        pytest.param("Training.step", 3, id="before anything was saved"),
        pytest.param("os.fsync", 4, id="while the second checkpoint is written"),
        pytest.param("RunFolder.write_records", 1, id="between the checkpoint and its metrics"),
        pytest.param("Training.step", 7, id="in the middle of the second epoch"),
        pytest.param("RunFolder.write_arrays", 1, id="after the last epoch"),
        pytest.param("RunFolder.write_records", 3, id="between the arrays and the last metrics"),
        pytest.param("RunFolder.drop_checkpoint", 1, id="between two trainings"),
        pytest.param("Training.step", 14, id="in the second training"),
    ],
)
def test_killed_and_resumed(tmp_path, unbroken, place, calls):
    process = FORKS.Process(target=command_that_dies, args=([*RUN, "--out", str(tmp_path)], place, calls))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(numbers(tmp_path / NAME)) < len(numbers(unbroken)) or place == "RunFolder.drop_checkpoint"
    command("resume", tmp_path / NAME)
    assert_same_run(tmp_path / NAME, unbroken)


def test_killed_again_and_again(tmp_path, unbroken):
    """From outside, wherever it is after so many seconds; in the end it is left alone."""
    path = tmp_path / NAME
    for delay in (0.1, 0.5, 0.3, 0.7, 0.4, 0.6, None):
        arguments = (
            ["resume", str(path)] if (path / "config.json").exists() else [*RUN, "--out", str(tmp_path)]
        )
        process = FORKS.Process(target=command_that_dies, args=(arguments, None, 0))
        process.start()
        process.join(delay)
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
    assert process.exitcode == 0
    assert_same_run(path, unbroken)


def interrupt_at(monkeypatch, steps: int) -> None:
    """Ctrl-C during the step of that number."""
    original = Training.step

    def step(self: Training, index: torch.Tensor) -> trainer.Step:
        nonlocal steps
        steps -= 1
        if steps == 0:
            signal.raise_signal(signal.SIGINT)
        return original(self, index)

    monkeypatch.setattr(Training, "step", step)


@pytest.mark.parametrize("steps", [1, 4, 6, 16], ids=["first", "last of an epoch", "within", "last of all"])
def test_interrupted_and_resumed(tmp_path, monkeypatch, capsys, unbroken, steps):
    interrupt_at(monkeypatch, steps)
    with pytest.raises(SystemExit) as ended:
        command(*RUN, "--out", tmp_path)
    assert ended.value.code == 130
    assert f"python -m train_ref resume {tmp_path / NAME}" in capsys.readouterr().err
    checkpoint = RunFolder(tmp_path / NAME).checkpoint()
    assert checkpoint is not None
    assert checkpoint.training["step_of_epoch"] == (steps - 1) % 4 + 1  # nothing is lost but the way here
    command("resume", tmp_path / NAME)
    assert_same_run(tmp_path / NAME, unbroken)


def test_interrupted_twice_ends_at_once(tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGINT)

    def step(self: Training, index: torch.Tensor) -> trainer.Step:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second has no effect")

    monkeypatch.setattr(Training, "step", step)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        command(*RUN, "--out", tmp_path)
    assert signal.getsignal(signal.SIGINT) is before


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


def test_interrupted_from_outside(tmp_path, unbroken):
    """A process as a user starts it, with more to do than it will have time for."""
    path = tmp_path / NAME
    arguments = [sys.executable, "-m", "train_ref", *RUN[:-1], "50", "--out", str(tmp_path)]
    process = subprocess.Popen(arguments, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    deadline = time.monotonic() + 120
    while not (path / "checkpoint.pt").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert f"python -m train_ref resume {path}" in errors
    assert "Traceback" not in errors
    assert numbers(path)[:2] == numbers(unbroken)[:2]  # before training, and its first epoch


def test_torchrun_follows_one_process(tmp_path):
    """Two processes mine in one batch: the losses are the same, but for the order of sums."""
    descent = ["--optimizer", "sgd", "--learning-rate", "0.002"]
    arguments = [*RUN, "--network", "convnet2", *descent, "--quick"]
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "train_ref"]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, *arguments, "--out", str(tmp_path / "two")],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    command(*arguments, "--out", tmp_path / "one")
    folders = [tmp_path / count / f"{NAME}-quick" for count in ("one", "two")]
    one, two = ([record for record in numbers(folder) if "losses" in record] for folder in folders)
    assert len(one) == len(two) == 4
    for expected, found in zip(one, two, strict=True):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert found["active"] == pytest.approx(expected["active"], abs=0.01)
    assert json.loads((folders[1] / "config.json").read_text())["processes"] == 2
    with RunFolder(folders[1]).locked():  # both processes end, by what the first of them found
        done = subprocess.run(
            [sys.executable, "-m", *launcher, "resume", str(folders[1])],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
        )
    assert done.returncode != 0
    assert done.stderr.count(f"{folders[1]} is in use by process {os.getpid()} on ") == 2
    assert done.stderr.count("Traceback") == 1  # torchrun's own


# The folder -------------------------------------------------------------------------------------------------


@pytest.fixture
def untrained(monkeypatch) -> None:
    def step(self: Training, index: torch.Tensor) -> trainer.Step:
        raise AssertionError("training has begun")

    monkeypatch.setattr(Training, "step", step)


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_is_said_before_training(tmp_path, monkeypatch, untrained):
    monkeypatch.setattr(os, "posix_fallocate", full_disk)
    go_on = f"go on with `python -m train_ref resume {tmp_path / NAME}`"
    for arguments in ([*RUN, "--out", tmp_path], ["resume", tmp_path / NAME]):  # the run is kept
        said = line(*arguments)
        assert re.search(rf"{tmp_path / NAME} has no room for \d+ MiB .*No space left on device", said)
        assert said.endswith(go_on)


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Files can't grow beyond `size` bytes: the system refuses, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("epoch", [1, 2], ids=["before anything was saved", "after an epoch was saved"])
def test_a_disk_that_fills_up(tmp_path, monkeypatch, unbroken, epoch):
    """What was saved before is whole, and the run goes on when there is room."""
    write, left = RunFolder.write_checkpoint, epoch

    def write_checkpoint(*args):
        nonlocal left
        left -= 1
        with room_for(2**14) if not left else nullcontext():
            write(*args)

    monkeypatch.setattr(RunFolder, "write_checkpoint", write_checkpoint)
    said = line(*RUN, "--out", tmp_path)
    assert said.startswith(f"{tmp_path / NAME / 'checkpoint.pt'} can't be written to: File too large")
    assert said.endswith(f"go on with `python -m train_ref resume {tmp_path / NAME}`")
    assert len(numbers(tmp_path / NAME)) == epoch - 1 + (epoch > 1)  # before training, and its epochs
    command("resume", tmp_path / NAME)
    assert_same_run(tmp_path / NAME, unbroken)


def test_what_is_reserved_is_enough_for_any_checkpoint(tmp_path, monkeypatch):
    """Of the largest network, whichever row has it."""
    experiment = EXPERIMENTS["eps-even-odd"]
    rows = (experiment.rows[0], dataclasses.replace(experiment.rows[1], changes={"dim": 4096}))
    monkeypatch.setitem(EXPERIMENTS, "eps-even-odd", dataclasses.replace(experiment, rows=rows))
    reserved, largest = [], 0
    monkeypatch.setattr(os, "posix_fallocate", lambda handle, start, size: reserved.append(size))
    write = RunFolder.write_checkpoint

    def write_checkpoint(folder, checkpoint):
        nonlocal largest
        write(folder, checkpoint)
        largest = max(largest, folder.checkpoint_file.stat().st_size)

    monkeypatch.setattr(RunFolder, "write_checkpoint", write_checkpoint)
    command(*RUN, "--out", tmp_path)
    # Twice 3 states of the largest network, and a MiB of arrays for each training.
    assert 2 * largest <= reserved[0] < 2 * largest + 2 * 2**20


def test_unwritable_folder_is_said_before_training(tmp_path, untrained):
    (tmp_path / "file").touch()
    said = line(*RUN, "--out", tmp_path / "file")
    assert str(tmp_path / "file" / NAME) in said
    assert "can't be written to" in said


def test_a_full_disk_when_the_folder_is_made(tmp_path, monkeypatch, untrained):
    monkeypatch.setattr(os, "fsync", full_disk)
    assert str(tmp_path / "above" / NAME) in line(*RUN, "--out", tmp_path / "above")
    assert not list(tmp_path.iterdir())


def tree(path: Path) -> dict[str, bytes | None]:
    """All that is below a folder, with the contents of files."""
    return {
        str(each.relative_to(path)): each.read_bytes() if each.is_file() else None for each in path.rglob("*")
    }


def fail_in_training(monkeypatch, error: BaseException) -> None:
    def step(self: Training, index: torch.Tensor) -> trainer.Step:
        raise error

    monkeypatch.setattr(Training, "step", step)


FAILURES = {
    "no data": ["--dataset", "mnist", "--data", "nowhere"],
    "a wrong word": ["--network", "transformer"],
    "a wrong number": ["--seeds", "0"],
    "no TensorBoard": ["--tensorboard"],
    "NaN": ArithmeticError("the loss is NaN"),
    "a second Ctrl-C": KeyboardInterrupt(),
    "a mistake of the program": RuntimeError("shapes"),
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("there", ["notes", "an empty folder", "nothing"])
def test_a_failed_run_removes_what_it_made_and_nothing_else(tmp_path, monkeypatch, failure, there):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    path = tmp_path / "above" / NAME
    if there != "nothing":
        path.mkdir(parents=True)
    if there == "notes":
        path.joinpath("sketches").mkdir()
        path.joinpath("notes.txt").write_text("why")
        path.joinpath("sketches", "plane.png").write_bytes(b"what")
    before = tree(tmp_path)
    changes = failure if isinstance(failure, list) else []
    with monkeypatch.context() as patch:
        if isinstance(failure, BaseException):
            fail_in_training(patch, failure)
        with pytest.raises((SystemExit, RuntimeError)):
            command(*RUN, *changes, "--out", path.parent)
    assert tree(tmp_path) == before
    command(*RUN, "--epochs", 0, "--out", path.parent)  # the corrected command finds the place free
    assert before.items() <= tree(tmp_path).items()


def test_a_failed_run_leaves_what_came_in_the_meantime(tmp_path, monkeypatch):
    def step(self: Training, index: torch.Tensor) -> trainer.Step:
        tmp_path.joinpath(NAME, "notes.txt").write_text("looks bad")
        raise ArithmeticError("the loss is NaN")

    monkeypatch.setattr(Training, "step", step)
    assert line(*RUN, "--out", tmp_path) == "the loss is NaN"
    assert tree(tmp_path) == {NAME: None, f"{NAME}/notes.txt": b"looks bad"}


def test_a_failed_run_removes_its_curves(tmp_path, monkeypatch):
    """TensorBoard's files are there before anything is saved."""

    def writer(folder: RunFolder, cell: Cell) -> None:
        place = folder.path / "tensorboard" / cell.key
        place.mkdir(parents=True)
        place.joinpath("events.out.tfevents.1.host.2.0").write_bytes(b"curve")

    monkeypatch.setattr(runner, "_tensorboard", writer)
    fail_in_training(monkeypatch, ArithmeticError("the loss is NaN"))
    line(*RUN, "--tensorboard", "--out", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_run_that_saved_something_is_kept(tmp_path, monkeypatch, unbroken):
    close_epoch = Training.close_epoch

    def fail(training: Training) -> dict:
        if training.epoch == 1:
            raise ArithmeticError("the loss is NaN")
        return close_epoch(training)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "close_epoch", fail)
        line(*RUN, "--out", tmp_path)
    assert len(numbers(tmp_path / NAME)) == 2
    command("resume", tmp_path / NAME)
    assert_same_run(tmp_path / NAME, unbroken)


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint.pt", "report.md", "arrays/a.npz", "arrays/a"])
def test_files_that_a_run_would_overwrite_are_in_its_way(tmp_path, untrained, name):
    file = tmp_path / NAME / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    before = tree(tmp_path)
    said = line(*RUN, "--out", tmp_path)
    assert f"{tmp_path / NAME / name.partition('/')[0]}" in said
    assert "is in the way of a new run: move it away" in said
    assert tree(tmp_path) == before


# Two processes ----------------------------------------------------------------------------------------------


def test_a_run_is_worked_on_by_one_process(tmp_path, unbroken):
    """Another one is told who holds it; kill -9 lets go of it."""
    path = tmp_path / NAME
    arguments = [sys.executable, "-m", "train_ref", *RUN, "--out", str(tmp_path)]
    process = subprocess.Popen(
        [*arguments, "--steps", "1000000"], cwd=ROOT, env=environment(), stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while not (path / "config.json").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        before = (path / "config.json").read_bytes()
        for again in (["resume", path], [*RUN, "--out", tmp_path]):
            said = line(*again)
            assert said.startswith(f"{path} is in use by process {process.pid} on ")
            assert "(run eps-even-odd " in said
            assert "--steps 1000000" in said
            assert said.endswith("wait until it has ended, or stop it")
        assert process.poll() is None
        assert (path / "config.json").read_bytes() == before
    finally:
        process.kill()
        process.wait()
    assert (path / ".lock").exists()
    shorter = {row: each | {"steps": 4} for row, each in json.loads(before)["settings"].items()}
    rewrite(path / "config.json", settings=shorter)
    command("resume", path)
    assert numbers(path) == numbers(unbroken)
    assert not (path / ".lock").exists()


def test_a_lock_that_vanishes_while_it_is_opened(tmp_path, monkeypatch):
    """The file that was opened is then nobody's: another process may hold its successor."""
    flock = fcntl.flock

    def late(file, how):
        (tmp_path / ".lock").unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(FolderError, match="just ending: try again"), RunFolder(tmp_path).locked():
        pass


def test_a_lock_needs_no_room_on_the_disk(tmp_path):
    folder = RunFolder(tmp_path)
    refused = pytest.raises(FolderError, match="in use by another process")
    with room_for(0), folder.locked(), refused, folder.locked():
        pass


def test_a_folder_that_cannot_be_locked(tmp_path, monkeypatch, untrained):
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert f"{tmp_path / NAME} can't be locked: No locks available" in line(*RUN, "--out", tmp_path)


# Files that are damaged or of another version ---------------------------------------------------------------


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> Path:
    """The folder of a run with a checkpoint, in its second epoch."""
    out = tmp_path_factory.mktemp("interrupted")
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, 6)
        with pytest.raises(SystemExit):
            command(*RUN, "--out", out)
    return out / NAME


@pytest.fixture
def copy(tmp_path, interrupted) -> Path:
    return Path(shutil.copytree(interrupted, tmp_path / NAME))


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def plain(content: bytes) -> bytes:
    """A checkpoint as it was before there were digests."""
    return content.partition(b"\n")[2]


DAMAGES = {
    "empty": lambda content: b"",
    "junk": lambda content: b"junk",
    "truncated": lambda content: content[: len(content) // 2],
    "in its digest": lambda content: flipped(content, 3),
    "in its weights": lambda content: flipped(content, len(content) // 2),
    "at its end": lambda content: flipped(content, len(content) - 1),
    "longer": lambda content: content + b"x",
    "truncated, without a digest": lambda content: plain(content)[: len(content) // 2],
    "of another program": lambda content: saved({"weights": torch.zeros(2)}),
    "no checkpoint": lambda content: saved([1, 2]),
}


def saved(what: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(what, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_not_resumed_from(copy, monkeypatch, unbroken, damage):
    file = copy / "checkpoint.pt"
    file.write_bytes(damage(file.read_bytes()))
    with monkeypatch.context() as patch:
        fail_in_training(patch, AssertionError("training goes on"))
        said = line("resume", copy)
    assert said.startswith(f"{file} is damaged")
    assert "delete it, and the training that was under way begins anew" in said
    assert f"python -m train_ref resume {copy}" in said
    file.unlink()
    command("resume", copy)
    assert_same_run(copy, unbroken)


def test_a_checkpoint_without_a_digest_is_resumed_from(copy, unbroken):
    file = copy / "checkpoint.pt"
    file.write_bytes(plain(file.read_bytes()))
    assert torch.load(file, weights_only=True)["training"]["step_of_epoch"] == 2
    command("resume", copy)
    assert_same_run(copy, unbroken)


def test_a_checkpoint_of_another_network(copy, untrained):
    """As after a change of the network's definition."""
    folder = RunFolder(copy)
    checkpoint = folder.checkpoint()
    assert checkpoint is not None
    del checkpoint.training["network"]["head.bias"]
    folder.write_checkpoint(checkpoint)
    said = line("resume", copy)
    assert f"{copy / 'checkpoint.pt'} is of another version of this network: delete it" in said


def rewrite(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("doing", ["resume", "report"])
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"colour": "red"}, "there is no setting colour in this version: go on with the one that began"),
        ({"margin": -1.0}, "--margin -1.0: must be 0 or greater"),
        ({"epochs": "two"}, "eps-even-odd has other settings in this version: go on with the one that began"),
    ],
)
def test_settings_of_another_version(copy, monkeypatch, untrained, doing, setting, said):
    monkeypatch.setattr(command_line, "write_report", write_report)
    settings = json.loads((copy / "config.json").read_text())["settings"]
    settings["Triplet"] |= setting
    rewrite(copy / "config.json", settings=settings)
    before = tree(copy)
    assert line(doing, copy).startswith(said)
    assert tree(copy) == before


@pytest.mark.parametrize("doing", ["resume", "report"])
def test_an_experiment_of_another_version(copy, monkeypatch, untrained, doing):
    monkeypatch.setattr(command_line, "write_report", write_report)
    rewrite(copy / "config.json", experiment="eps-moon")
    assert line(doing, copy).startswith("there is no experiment 'eps-moon' in this version: ")


@pytest.mark.parametrize("doing", ["resume", "report"])
@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", '{"experiment": "eps-', "is damaged"),
        ("config.json", "\x00", "is damaged"),
        ("config.json", "[]", "is not of a run: it needs backend, changes,"),
        ("config.json", '{"experiment": "eps-even-odd"}', "is not of a run: it needs backend, changes,"),
        ("metrics.jsonl", '{"cell": "Tri', "is damaged"),
    ],
)
def test_damaged_files_are_named(copy, monkeypatch, untrained, doing, file, content, said):
    monkeypatch.setattr(command_line, "write_report", write_report)
    (copy / file).write_text(content)
    assert line(doing, copy).startswith(f"{copy / file} {said}")


def test_damaged_arrays_are_named(tmp_path, monkeypatch, unbroken):
    monkeypatch.setattr(command_line, "write_report", write_report)
    path = Path(shutil.copytree(unbroken, tmp_path / NAME))
    file = next(path.joinpath("arrays").iterdir())
    file.write_bytes(file.read_bytes()[:1000])
    assert line("report", path).startswith(f"{file} is damaged: delete it")
    file.unlink()
    command("report", path)


@pytest.mark.parametrize("place", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_file_is_whole_or_the_old_one(tmp_path, monkeypatch, place, error):
    file = tmp_path / "checkpoint.pt"
    write_whole(file, b"old")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, place, fail)
    with pytest.raises(FolderError if isinstance(error, OSError) else type(error)):
        write_whole(file, b"new and longer")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]
    monkeypatch.undo()
    write_whole(file, b"new and longer")
    assert file.read_bytes() == b"new and longer"


def test_a_run_can_be_read_by_others(unbroken):
    """As far as they may read other files that are made here."""
    mask = os.umask(0)
    os.umask(mask)
    for file in (unbroken / "config.json", unbroken / "metrics.jsonl"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~mask


def test_a_name_stands_for_a_file_on_the_disk(tmp_path, monkeypatch):
    """What is renamed was brought to the disk before: in the other order a power cut leaves an empty file."""
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *names: (order.append("replace"), replace(*names)))
    write_whole(tmp_path / "file", b"content")
    assert order[:2] == ["fsync", "replace"]


# Backends ---------------------------------------------------------------------------------------------------

COURSES = {
    "random": {"positive": "random", "negative": "random"},
    "easy": {"positive": "easy", "negative": "semihard"},
    "hard": {"positive": "hard", "negative": "hard", "triplet": "soft_margin"},
    "first order": {"positive": "easy", "negative": "hard", "triplet": "first_order", "normalise": True},
    "second order": {"positive": "hard", "negative": "easy", "triplet": "second_order", "normalise": True},
    "trimmed": {"positive": "random", "negative": "random", "trim": 0.25},
    "semi_hard": {"objective": "semi_hard", "normalise": True},
    "margin": {"objective": "beta_margin", "positive": "random", "negative": "distance", "normalise": True},
    "easy margin": {
        "objective": "beta_margin",
        "positive": "easy",
        "negative": "distance",
        "normalise": True,
    },
    "trimmed margin": {
        "objective": "beta_margin",
        "positive": "random",
        "negative": "distance",
        "trim": 0.5,
        "normalise": True,
    },
    "multi_similarity": {"objective": "multi_similarity", "positive": "all", "normalise": True},
    "easy multi_similarity": {"objective": "multi_similarity", "positive": "easy", "normalise": True},
    "proxy_nca": {"objective": "proxy_nca", "normalise": True},
}


@pytest.mark.parametrize("course", COURSES)
def test_backends_follow_the_same_course(course):
    """Step by step, in plain descent: Adam makes whole steps out of what rounding leaves of a zero."""
    asked = cell(**COURSES[course], dim=16, steps=20, optimizer="sgd", learning_rate=2e-3)
    expected = losses(Training(asked, Context(backend="reference")), 20)
    found = losses(Training(asked, Context(backend="cpu")), 20)
    assert found == pytest.approx(expected, rel=1e-4)
    assert len(set(expected)) > 10


def test_every_objective_has_a_course():
    assert {changes.get("objective", "triplet") for changes in COURSES.values()} == set(OBJECTIVES)


def test_the_backend_is_the_one_asked_for(monkeypatch):
    asked = []
    triplet_loss = T.triplet_loss
    monkeypatch.setattr(
        T, "triplet_loss", lambda *rows, **how: (asked.append(how["backend"]), triplet_loss(*rows, **how))[1]
    )
    losses(Training(cell(), Context(backend="reference")), 1)
    assert asked[0] == "reference"


# The progress bar -------------------------------------------------------------------------------------------


def test_the_bar_has_what_a_reader_waits_for(tmp_path, monkeypatch):
    shown = io.StringIO()
    bar = functools.partial(tqdm.tqdm, file=shown)
    monkeypatch.setattr(runner, "tqdm", lambda **how: bar(**{**how, "disable": False, "mininterval": 0}))
    command(*RUN, "--out", tmp_path)
    lines = shown.getvalue().split("\r")
    last = next(line for line in reversed(lines) if "loss" in line)
    assert re.search(r"EPS \+ Triplet #0 loss \d+\.\d+ active \d+% diameter \d", last)
    assert "16/16" in lines[-1]
    assert re.search(r"\[\d\d:\d\d<", last)  # the time that is left


# Objectives and the step ------------------------------------------------------------------------------------


def objective(classes: int = 3, backend: str = "reference", **changes) -> nn.Module:
    settings = cell(**changes).settings
    return OBJECTIVES[settings.objective](settings, classes, backend, torch.Generator().manual_seed(0))


def test_proxy_nca_by_its_formula():
    """−log of exp(−d²(x, own)) / Σ over the other proxies of exp(−d²(x, other)), all on the sphere."""
    torch.manual_seed(0)
    loss = objective(objective="proxy_nca", dim=4)
    emb, labels = torch.randn(5, 4), torch.tensor([0, 2, 1, 1, 2])
    x, proxies = nn.functional.normalize(emb), nn.functional.normalize(loss.proxies.detach())
    expected = 0.0
    for row, label in zip(x, labels.tolist(), strict=True):
        square = [float((row - proxy).square().sum()) for proxy in proxies]
        others = sum(math.exp(-square[other]) for other in range(3) if other != label)
        expected -= math.log(math.exp(-square[label]) / others) / 5
    assert loss(emb, labels).item() == pytest.approx(expected, rel=1e-5)


def test_proxy_nca_where_the_answer_is_seen():
    loss = objective(classes=2, objective="proxy_nca", dim=2)
    with torch.no_grad():
        loss.proxies.copy_(torch.tensor([[3.0, 0.0], [0.0, 0.5]]))
    # d² to the own proxy is 0, to the other, at a right angle, 2: −log(1 / exp(−2)) = −2.
    assert loss(torch.tensor([[7.0, 0.0]]), torch.tensor([0])).item() == pytest.approx(-2)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_trimming_leaves_out_the_highest(backend):
    # On a line: 0 and 1 of one class, 3 and 5 of another. Hard picks have d_ap − d_an of 1 − 3, 1 − 2, 2 − 2
    # and 2 − 4: with the margin 3 the losses are 1, 2, 3, 1.
    emb, labels = torch.tensor([[0.0], [1.0], [3.0], [5.0]]), torch.tensor([0, 0, 1, 1])
    rules = {"positive": "hard", "negative": "hard", "margin": 3.0, "backend": backend}
    assert objective(**rules)(emb, labels).item() == 7 / 4
    assert objective(trim=0.25, **rules)(emb, labels).item() == pytest.approx(4 / 3)
    assert objective(trim=0.99, **rules)(emb, labels).item() == 1  # one is always left
    rows = emb.clone().requires_grad_()
    trimmed = objective(trim=0.5, **rules)(rows, labels)
    trimmed.backward()
    # The anchors 0 and 5 are left: the mean of (x₁ − x₀) − (x₃ − x₀) and (x₅ − x₃) − (x₅ − x₁), and 3.
    assert trimmed.item() == 1
    assert rows.grad is not None
    assert rows.grad.flatten().tolist() == pytest.approx([0, 1, -1, 0], abs=1e-6)


def test_beta_is_learned_at_its_own_rate():
    training = Training(
        cell(
            network="even_odd_relu",  # a batch in which no class's pairs cancel out in the gradient of its β
            objective="beta_margin",
            positive="random",
            negative="distance",
            normalise=True,
            optimizer="sgd",
            momentum=0.0,
            objective_learning_rate=0.125,
        ),
        Context(),
    )
    beta = training.objective.beta
    assert beta.tolist() == pytest.approx([1.2, 1.2])
    network = [each.detach().clone() for each in training.parameters]
    training.step(torch.tensor(next(iter(training.sampler))))
    assert beta.grad is not None
    assert beta.grad.abs().min() > 0
    torch.testing.assert_close(beta.detach(), 1.2 - 0.125 * beta.grad)
    for before, each in zip(network, training.parameters, strict=True):
        assert each.grad is not None
        torch.testing.assert_close(each.detach(), before - 1e-3 * each.grad)


def test_milestones_divide_the_rates_by_ten():
    training = Training(cell(objective="proxy_nca", steps=1, milestones=(1, 3)), Context())
    rates = []
    for _ in range(4):
        losses(training, 1)
        rates.append([group["lr"] for group in training.optimizer.param_groups])
    expected = [[1e-3 * share, 5e-4 * share] for share in (1, 0.1, 0.1, 0.01)]
    assert rates == [pytest.approx(pair) for pair in expected]


def test_clipping_bounds_the_step():
    settings = {"optimizer": "sgd", "learning_rate": 1.0, "momentum": 0.0}
    moved = {}
    for clip in (None, 1e-3):
        training = Training(cell(clip=clip, **settings), Context())
        before = torch.cat([each.detach().flatten().clone() for each in training.parameters])
        training.step(torch.tensor(next(iter(training.sampler))))
        after = torch.cat([each.detach().flatten() for each in training.parameters])
        moved[clip] = float((after - before).norm())
    assert moved[None] > 1e-2
    assert moved[1e-3] == pytest.approx(1e-3, rel=1e-2)


def test_half_precision_trains(monkeypatch):
    training = Training(cell(precision="bfloat16", steps=20, network="convnet2"), Context())
    seen = []
    training.network.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    found = losses(training, 20)
    assert seen[0] == torch.bfloat16
    assert all(map(math.isfinite, found))
    assert found != losses(Training(cell(steps=20, network="convnet2"), Context()), 20)
    assert training.parameters[0].dtype == torch.float32
    assert training.embed(training.dataset.tests["train digits"]).dtype == torch.float32


def test_training_learns_and_is_repeatable():
    asked = cell(positive="easy", steps=25)
    training = Training(asked, Context())
    found = losses(training, 25)
    assert sum(found[-5:]) < sum(found[:5])
    assert found == losses(Training(asked, Context()), 25)
    assert found != losses(Training(cell(1, positive="easy", steps=25), Context()), 25)


def test_dropout_goes_on_where_it_was():
    """A training that is taken up again drops what it would have dropped, in whatever state chance is."""

    def begun() -> Training:
        training = Training(cell(), Context())
        training.network.register_forward_hook(
            lambda network, _, emb: torch.dropout(emb, 0.5, train=network.training)
        )
        return training

    whole, first, second = begun(), begun(), begun()
    expected = losses(whole, 8)
    assert losses(first, 4) == expected[:4]
    assert losses(Training(cell(), Context()), 4) != expected[:4]  # it does drop something
    torch.rand(3)
    second.load_state(first.state())
    assert losses(second, 4) == expected[4:]


def test_the_active_share_counts_moved_embeddings():
    # The pairs of the first two classes are far from all others, and stay; within the third's is another.
    training = Training(cell(positive="hard", negative="hard"), Context())
    emb = torch.tensor([[0.0, 0], [0.1, 0], [9, 0], [9.1, 0], [50, 0], [51, 0], [50.3, 0.4]])
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    training.embeddings = lambda inputs: emb.clone().requires_grad_() * 1  # type: ignore[method-assign]
    training.inputs.batch = lambda *_: emb  # type: ignore[method-assign]
    training.labels = labels
    training.optimizer.step = lambda: None  # type: ignore[method-assign,assignment]
    step = training.step(torch.arange(7))
    assert step.active == pytest.approx(3 / 7)
    assert step.loss_seconds <= step.seconds


def test_nan_is_said_at_once(monkeypatch):
    training = Training(cell(), Context())
    training.objective.forward = lambda emb, labels: emb.sum() * torch.nan  # type: ignore[method-assign]
    with pytest.raises(ArithmeticError, match=r"row #0: the loss is NaN in epoch 1"):
        losses(training, 1)


def test_a_data_set_is_opened_once_for_all_trainings(monkeypatch):
    opened = []
    load = trainer.data.load
    monkeypatch.setattr(trainer.data, "load", lambda *asked: opened.append(asked) or load(*asked))
    context = Context()
    first, second = Training(cell(0), context), Training(cell(1), context)
    assert first.dataset is second.dataset
    assert [asked[:2] for asked in opened] == [("digits", 8)]


# Frozen blocks ----------------------------------------------------------------------------------------------


def inputs_through(stem: nn.Module, folder: Path, **changes) -> Inputs:
    asked = cell(**{"views": 3, "pad": 1} | changes)
    dataset = Context().dataset(asked.settings)
    return Inputs(dataset, SimpleNamespace(stem=stem), asked.settings, torch.device("cpu"), folder)


def test_frozen_blocks_are_computed_once(tmp_path, monkeypatch):
    monkeypatch.setattr(features, "COMPUTED_AT_ONCE", 100)
    torch.manual_seed(0)
    stem = nn.Conv2d(1, 2, 3)
    made = inputs_through(stem, tmp_path)
    split = made.dataset.train
    assert made.train.shape == (len(split), 3, 2, 6, 6)
    with torch.no_grad():
        images = made._floats(split.pixels)
        torch.testing.assert_close(made.train[:, 0], stem(images))
    assert not made.train[:, 1].equal(made.train[:, 2])
    index = torch.tensor([5, 0, 5])
    batch = made.batch(index, torch.Generator().manual_seed(0))
    for row, image in zip(batch, index, strict=True):
        assert any(row.equal(view) for view in made.train[image])
    plain = torch.cat(list(made.plain(split, 64)))
    assert plain.equal(made.train[:, 0])
    written = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.npy")}
    assert inputs_through(stem, tmp_path).train.equal(made.train)
    assert {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.npy")} == written
    with torch.no_grad():
        stem.weight += 1
    assert not inputs_through(stem, tmp_path).train.equal(made.train)  # other weights, other features


def test_no_room_for_features_is_said_before_they_are_computed(tmp_path, monkeypatch):
    def full(descriptor, start, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(Inputs, "_fill", lambda *_: pytest.fail("computing began"))
    with pytest.raises(DataError, match=r"features-digits-.* takes \d MB.*No space left.*XDG_CACHE_HOME"):
        inputs_through(nn.Conv2d(1, 2, 3), tmp_path)
    assert not list(tmp_path.glob("*.npy"))


# Batches ----------------------------------------------------------------------------------------------------


def epoch_of(sampler, epoch: int) -> list[list[int]]:
    sampler.set_epoch(epoch)
    return list(sampler)


def test_shuffled_batches_cover_the_data_set():
    sampler = ShuffledBatches(12, 4, steps=None, seed=0)
    assert len(sampler) == 3
    first, second = epoch_of(sampler, 0), epoch_of(sampler, 1)
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(12))
    assert first != second
    assert first == epoch_of(ShuffledBatches(12, 4, steps=None, seed=0), 0)
    assert first != epoch_of(ShuffledBatches(12, 4, steps=None, seed=1), 0)


def test_shuffled_batches_begin_anew_where_the_data_ends():
    found = epoch_of(ShuffledBatches(10, 4, steps=5, seed=0), 0)
    assert [len(set(batch)) for batch in found] == [4] * 5
    for passed in (found[:2], found[2:4]):
        assert len(set(chain(*passed))) == 8
    assert found[:2] != found[2:4]


def test_shares_of_a_shuffled_batch_make_it_up():
    ranks = [ShuffledBatches(20, 6, steps=7, seed=5, num_replicas=3, rank=rank) for rank in range(3)]
    shares = zip(*(epoch_of(rank, 2) for rank in ranks), strict=True)
    assert [list(chain(*parts)) for parts in shares] == epoch_of(ShuffledBatches(20, 6, steps=7, seed=5), 2)


def test_batches_that_cannot_be():
    labels = torch.arange(4).repeat(5)
    for changes, said in (
        ({"batch": 10, "per_class": 4}, "a batch of 10 can't have 4 images of every class"),
        ({"batches": "shuffled", "batch": 21}, "a batch of 21 of a data set of 20 images"),
        ({"batches": "piles"}, "there are no batches 'piles'; there are 'pk', 'groups' and 'shuffled'"),
    ):
        with pytest.raises(ValueError, match=said):
            batches(cell(**changes).settings, labels, 0, num_replicas=1, rank=0)
    with pytest.raises(ValueError, match="a batch of 5 can't be shared out among 2 processes"):
        ShuffledBatches(20, 5, steps=None, seed=0, num_replicas=2)


# Procedures -------------------------------------------------------------------------------------------------


def movement(**changes) -> procedures.Movement:
    asked = {"positive": "hard", "negative": "hard", "normalise": True, "dim": 8, "network": "convnet2"}
    return procedures.Movement(Training(cell(**asked | changes), Context()))


@pytest.mark.parametrize(("positive", "negative"), [("hard", "hard"), ("easy", "easy")])
def test_disjoint_triplets(positive, negative):
    procedure = movement(positive=positive, negative=negative)
    torch.manual_seed(0)
    emb, labels = nn.functional.normalize(torch.randn(40, 8)), torch.arange(4).repeat_interleave(10)
    found = procedure.disjoint_triplets(emb, labels)
    rows = found.flatten().tolist()
    assert len(found) > 3
    assert len(rows) == len(set(rows))
    mined = T.mine(emb, labels, positive=positive, negative=negative, distance="cosine")
    triplets = list(
        zip(*(part.tolist() for part in (mined.anchor, mined.positive, mined.negative)), strict=True)
    )
    assert {tuple(triplet) for triplet in found.tolist()} < set(triplets)
    # Not one more could be had: each of those left out shares a row with one before it.
    used: set[int] = set()
    for triplet in triplets:
        if list(triplet) in found.tolist():
            used |= set(triplet)
        else:
            assert used & set(triplet)


@pytest.mark.parametrize("order", ["first_order", "second_order"])
def test_movement_by_its_definition(order):
    procedure = movement(triplet=order)
    training = procedure.training
    index = torch.tensor(next(iter(training.sampler)))
    inputs = training.inputs.batch(index, training.crops)
    parameters = [each.detach().clone() for each in training.parameters]
    with torch.no_grad():
        before = training.embeddings(inputs)
    rows = procedure.disjoint_triplets(before, training.labels[index])
    moves = procedure.move(inputs, training.labels[index], torch.optim.SGD(training.parameters, lr=1e-2))
    with torch.no_grad():
        after = training.embeddings(inputs)
    for emb, columns in ((before, moves[:, :2]), (after, moves[:, :2] + moves[:, 2:])):
        anchor, positive, negative = (emb[rows[:, place]] for place in range(3))
        expected = torch.stack([(anchor * positive).sum(1), (anchor * negative).sum(1)], 1)
        torch.testing.assert_close(columns, expected)
    # The step is down the loss that tripletops has under this name, of these triplets alone.
    with torch.no_grad():
        for each, old in zip(training.parameters, parameters, strict=True):
            each.copy_(old)
    s_ap, s_an = procedure.similarities(training.embeddings(inputs), rows).unbind(1)
    exponent = s_an - s_ap if order == "first_order" else s_an**2 / 2 - s_ap + s_ap**2 / 2
    gradients = torch.autograd.grad(torch.log1p(exponent.exp()).mean(), training.parameters)
    assert any(gradient.abs().max() > 0 for gradient in gradients)
    moved = procedure.move(inputs, training.labels[index], torch.optim.SGD(training.parameters, lr=1e-2))
    torch.testing.assert_close(moved, moves)
    for each, old, gradient in zip(training.parameters, parameters, gradients, strict=True):
        torch.testing.assert_close(each.detach(), old - 1e-2 * gradient, rtol=1e-4, atol=1e-6)


def test_quarters_of_all_moves(monkeypatch):
    procedure = movement()
    moves = torch.tensor([[1, 1], [1, -1], [1, -1], [-1, -1], [-1, 1]]).float()
    monkeypatch.setattr(
        procedure, "move", lambda *_: torch.cat([torch.zeros(5, 2), moves.roll(0, dims=0)], dim=1)
    )
    assert procedure.after() == pytest.approx(
        {"top-right": 20, "bottom-right": 40, "bottom-left": 20, "top-left": 20}
    )
    assert procedure.training.kept["moves"].shape == (2 * 4 * 5, 4)


def test_movement_end_to_end():
    procedure = movement()
    before = [each.detach().clone() for each in procedure.training.parameters]
    assert procedure.before() == {}
    measures = procedure.after()
    assert sum(measures.values()) == pytest.approx(100)
    assert set(measures) == {"top-right", "bottom-right", "bottom-left", "top-left"}
    changes = [
        float((each - old).detach().abs().max())
        for each, old in zip(procedure.training.parameters, before, strict=True)
    ]
    assert 0 < max(changes) < 1e-3  # the learning rate is a low one


def test_the_parts_of_the_bound():
    asked = cell(positive="hard", negative="hard", margin=0.0, network="convnet2", dim=4)
    training = Training(asked, Context())
    procedure = procedures.Collapse(training)
    parameters = [each.detach().clone() for each in training.parameters]
    measures = procedure.before()
    assert all(map(torch.equal, parameters, training.parameters))  # nothing is trained yet
    held_out = training.embed(training.dataset.tests["train digits"])
    assert measures["diameter before"] == pytest.approx(float(torch.pdist(held_out).max()), rel=1e-5)
    found = []
    for epoch in range(13):  # four batches each, of which fifty count
        training.sampler.set_epoch(-1 - 4 * epoch)
        for index in training.sampler:
            emb = training.embeddings(training.inputs.batch(torch.tensor(index), training.crops)).detach()
            distance = torch.cdist(emb, emb)
            same = training.labels[index][:, None] == training.labels[index]
            farthest = distance.masked_fill(~same, 0).amax(1)
            nearest = distance.masked_fill(same, torch.inf).amin(1)
            found.append(float((farthest - nearest).clamp(min=0).mean()))
    assert measures["loss before"] == pytest.approx(sum(found[:50]) / 50, rel=1e-3)
    assert measures["largest loss before"] == pytest.approx(max(found[:50]), rel=1e-3)
    losses(training, 4)
    after = procedure.after()["diameter"]
    assert after == pytest.approx(diameter(training.embed(training.dataset.tests["train digits"])))
    assert after != measures["diameter before"]


def test_the_validation_set_is_bounded_and_fixed(monkeypatch):
    monkeypatch.setattr(procedures, "VALIDATION", 7)
    training = Training(cell(network="convnet2"), Context())
    sizes = []
    embed = training.embed
    monkeypatch.setattr(training, "embed", lambda split: (sizes.append(len(split)), embed(split))[1])
    procedure = procedures.Collapse(training)
    assert procedure.diameter() == procedure.diameter()
    assert sizes == [7, 7]


def test_diagrams_are_kept_of_every_image():
    training = Training(cell(diagrams=(0, 2), normalise=True, dim=8), Context())
    procedure = procedures.Train(training)
    procedure.before()
    emb, labels = training.embed(training.dataset.train), training.labels
    similarity = emb @ emb.T
    same = labels[:, None] == labels
    expected = torch.stack(
        [
            similarity.masked_fill(~same, -2).fill_diagonal_(-2).amax(1),
            similarity.masked_fill(same, -2).amax(1),
        ],
        dim=1,
    )
    torch.testing.assert_close(training.kept["diagram 0"], expected, atol=1e-5, rtol=0)
    for _ in range(2):
        losses(training, 4)
        procedure.after_epoch()
    assert set(training.kept) == {"diagram 0", "diagram 2"}


# The command line -------------------------------------------------------------------------------------------


def test_list_names_every_experiment(capsys):
    command("list")
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(EXPERIMENTS)
    asked = {"collapse-batch-size", "collapse-dim", "eps-even-odd", "eps-omniglot", "eps-trimmed", "eps-cars"}
    asked |= {"eps-cub", "extreme-movement", "extreme-group-size", "extreme-benchmarks"}
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
    [(name, number) for name, allowed in allowed_numbers().items() for number in NOT_ALLOWED[allowed.words]],
)
def test_a_number_that_is_not_allowed_is_said_first(tmp_path, monkeypatch, name, number):
    """Before data is looked for and anything is made."""
    monkeypatch.setattr(trainer.data, "load", lambda *_: pytest.fail("data is loaded"))
    others = ["1"] if isinstance(getattr(EVEN_ODD, name), tuple) else []
    said = line(*RUN, option(name), *others, number, "--out", tmp_path / "out")
    given = float(number) if typing.get_type_hints(Settings)[name] in (float, float | None) else number
    assert said == f"{option(name)} {given}: must be {allowed_numbers()[name].words}"
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
    for name, allowed in allowed_numbers().items():
        for number in ends[allowed.words]:
            several = isinstance(getattr(EVEN_ODD, name), tuple)
            changed(EVEN_ODD, {name: (number,) if several else number})


def test_every_number_of_the_settings_has_its_bounds():
    numeric = [
        name
        for name, hint in typing.get_type_hints(Settings).items()
        if {int, float} & {hint, *typing.get_args(hint)}
    ]
    assert sorted(allowed_numbers()) == sorted(numeric)


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


# Experiments ------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(("name", "scale"), EVERY)
@pytest.mark.parametrize("quick", [False, True], ids=["whole", "quick"])
def test_every_training_is_one_that_can_be(name, scale, quick):
    experiment = EXPERIMENTS[name]
    cells = experiment.cells(scale, {}, quick)
    assert cells
    assert len({each.key for each in cells}) == len(cells)
    assert experiment.procedure in PROCEDURES
    assert experiment.question.endswith("?")
    for each in cells:
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


# The demo ---------------------------------------------------------------------------------------------------


def test_demo_end_to_end(monkeypatch, capsys, tmp_path):
    arguments = [
        "--steps",
        "2",
        "--epochs",
        "1",
        "--seeds",
        "2",
        "--no-speed-table",
        "--output",
        str(tmp_path),
    ]
    monkeypatch.setattr("sys.argv", ["demo", *arguments])
    demo.main()
    printed = capsys.readouterr()
    table = [line for line in printed.out.splitlines() if line.count("±") == 3]
    assert len(table) == 4
    assert "42.0   87.5   96.6" in table[0]
    assert "42.3   83.9   93.6" in table[3]
    assert printed.out.count("reproduced, on digits") == 2
    report = tmp_path / NAME / "report.md"
    assert str(report) in printed.out
    assert report.exists()
    assert any(file.stat().st_size > 10_000 for file in (tmp_path / NAME).rglob("*.png"))


def demo_arguments(out: Path, *more: object) -> list[str]:
    return ["demo", "--no-speed-table", "--output", str(out), *map(str, more)]


def test_demo_makes_room_for_itself_alone(monkeypatch, tmp_path, unbroken, untrained):
    """It does away with the run that an earlier demo left, and with nothing else."""
    for changes, begins in (({"dataset": "digits", "size": 8}, True), ({"epochs": 3}, False)):
        path = Path(shutil.copytree(unbroken, tmp_path / str(begins) / NAME))
        rewrite(path / "config.json", changes=changes)
        (path / "notes.txt").write_text("nice")
        before = tree(path)
        monkeypatch.setattr("sys.argv", demo_arguments(path.parent))
        with pytest.raises(AssertionError if begins else SystemExit):
            demo.main()
        assert tree(path) == ({"notes.txt": b"nice"} if begins else before)


def test_demo_leaves_a_run_that_is_under_way(monkeypatch, capsys, tmp_path, unbroken, untrained):
    path = Path(shutil.copytree(unbroken, tmp_path / NAME))
    rewrite(path / "config.json", changes={"dataset": "digits", "size": 8})
    monkeypatch.setattr("sys.argv", demo_arguments(tmp_path))
    with RunFolder(path).locked():
        before = tree(path)
        with pytest.raises(SystemExit, match="is in use by process"):
            demo.main()
        assert tree(path) == before


def test_demo_says_what_is_wrong(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", demo_arguments(tmp_path / "out", "--seeds", 0))
    with pytest.raises(SystemExit, match="--seeds 0: must be from 1"):
        demo.main()
    assert not list(tmp_path.iterdir())


def test_demo_interrupted(monkeypatch, capsys, tmp_path):
    interrupt_at(monkeypatch, 1)
    monkeypatch.setattr("sys.argv", demo_arguments(tmp_path))
    with pytest.raises(SystemExit) as ended:
        demo.main()
    assert ended.value.code == 130
    assert f"python -m train_ref resume {tmp_path / NAME}" in capsys.readouterr().err
