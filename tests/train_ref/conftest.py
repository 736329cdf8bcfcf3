"""Fixtures of the trainer's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.train_ref import support
from tests.train_ref.support import NAME, RUN, command
from train_ref import trainer
from train_ref.trainer import Training


@pytest.fixture(scope="module")
def training_alone() -> Iterator[None]:
    with support.training_alone():
        yield


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory) -> Path:
    """The folder of a run that nothing happened to: two trainings of two epochs of four steps. Read only."""
    out = tmp_path_factory.mktemp("unbroken")
    with support.training_alone():
        command(*RUN, "--out", out)
    return out / NAME


@pytest.fixture
def untrained(monkeypatch) -> None:
    def step(self: Training, index: torch.Tensor) -> trainer.Step:
        raise AssertionError("training has begun")

    monkeypatch.setattr(Training, "step", step)
