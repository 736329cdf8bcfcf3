"""A run can be broken off at any moment and gone on with: it ends with the same numbers."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from tests.train_ref.support import (
    NAME,
    ROOT,
    RUN,
    assert_same_run,
    command,
    environment,
    interrupt_at,
    numbers,
)
from train_ref import __main__ as command_line
from train_ref import trainer
from train_ref.folder import RunFolder
from train_ref.trainer import Training

pytest.importorskip("sklearn")
pytestmark = pytest.mark.usefixtures("training_alone")


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


def test_no_thread_of_a_process_group_outlives_it(tmp_path):
    """A thread that is left can abort the process while Python ends. The first optimizer imports much of
    torch, and some of that keeps the group that exists then."""
    program = """
        import sys
        from pathlib import Path
        import torch
        from torch import distributed
        from train_ref import __main__
        distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        distributed.all_reduce(torch.ones(1))
        distributed.destroy_process_group()
        print([file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")])
    """
    arguments = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "store")]
    done = subprocess.run(arguments, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "gloo" not in done.stdout
