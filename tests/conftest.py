"""For all tests: memory that nobody wrote holds NaN, and real data is found or its absence is said."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

# The kernels' own memory reads as NaN until it is written; they ask when they first take some.
os.environ.setdefault("TRIPLETOPS_POISON", "1")

# The same examples every run: a red test must be red again on the next machine.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def poisoned_memory() -> Iterator[None]:
    """What an operation allocates through torch and leaves unwritten is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3, 5).isnan().all()
    assert torch.empty(7, dtype=torch.float64).isnan().all()
    assert (torch.empty(9, dtype=torch.int64) == torch.iinfo(torch.int64).max).all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def threads() -> Iterator[None]:
    """For tests that call `torch.set_num_threads`."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(threads: None) -> None:
    """For small tensors: on a busy machine, waiting for a second thread costs more than it does."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets, each in a subfolder of its own."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("TRIPLETOPS_DATA") or beside)
    if not folder.is_dir():
        pytest.skip(f"needs real data: {folder} does not exist, and TRIPLETOPS_DATA names no other folder")
    return folder
