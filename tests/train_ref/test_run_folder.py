"""The folder of a run: what a full disk, a failure or a second process does to it."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from tests.train_ref.support import (
    NAME,
    ROOT,
    RUN,
    assert_same_run,
    command,
    environment,
    fail_in_training,
    full_disk,
    line,
    numbers,
    rewrite,
    tree,
)
from train_ref import runner, trainer
from train_ref.experiments import EXPERIMENTS
from train_ref.folder import FolderError, RunFolder
from train_ref.settings import Cell
from train_ref.trainer import Training

pytest.importorskip("sklearn")
pytestmark = pytest.mark.usefixtures("training_alone")


# The folder -------------------------------------------------------------------------------------------------


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
