"""What the tests of the trainer share: small runs on scikit-learn's digits, and what they left behind."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest
import torch

from train_ref import __main__ as command_line
from train_ref import runner, trainer
from train_ref.experiments.easy_positives import EVEN_ODD
from train_ref.folder import RunFolder
from train_ref.settings import Cell, Row, changed
from train_ref.trainer import Training

ROOT = Path(__file__).resolve().parents[2]
DIGITS = {"dataset": "digits", "size": 8, "batch": 32, "per_class": 16, "steps": 4, "epochs": 2, "seeds": 1}
RUN = [
    "run",
    "eps-even-odd",
    *(part for name, value in DIGITS.items() for part in (f"--{name.replace('_', '-')}", str(value))),
]
NAME = "eps-even-odd-desk"


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


def cell(seed: int = 0, **changes) -> Cell:
    """A training of even/odd on digits, with changes."""
    return Cell(Row("row"), seed, changed(EVEN_ODD, DIGITS | {"distance": None} | changes))


def losses(training: Training, steps: int) -> list[float]:
    found: list[float] = []
    while len(found) < steps:
        found += [step.loss for step in training.epoch_steps()]
        training.close_epoch()
    return found[:steps]


@contextmanager
def training_alone() -> Iterator[None]:
    """On the CPU by one thread, for sums by two are others; and memory is left to later tests as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            patch.setattr(runner, "keep_freed_memory", lambda: None)
            patch.setattr(runner, "TIMED_ROUNDS", 1)
            patch.setattr(command_line, "write_report", lambda folder, *_: folder.path / "report.md")
            yield
    finally:
        torch.set_num_threads(before)


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


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def tree(path: Path) -> dict[str, bytes | None]:
    """All that is below a folder, with the contents of files."""
    return {
        str(each.relative_to(path)): each.read_bytes() if each.is_file() else None for each in path.rglob("*")
    }


def fail_in_training(monkeypatch, error: BaseException) -> None:
    def step(self: Training, index: torch.Tensor) -> trainer.Step:
        raise error

    monkeypatch.setattr(Training, "step", step)


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


def rewrite(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
