"""A pytest plugin for `make test`: as many of the tests as some seconds of processor time allow.

    python -m pytest -p tests.ptx.sample --sample 45 --sample-seed 7 tests/ptx tests/backends

The seed chooses the tests of tests/backends and their order; those of tests/ptx are run first, all of them.
Without a seed it is another one each time. What is left over when the time is up is not run, and said so.
"""

from __future__ import annotations

import random
import secrets
import time
from pathlib import Path
from typing import Any

import pytest

OWN = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sample")
    group.addoption("--sample", type=float, metavar="SECONDS", default=45, help="of processor time (45)")
    group.addoption("--sample-seed", type=int, metavar="SEED", help="chooses the tests; default: any")


def pytest_configure(config: pytest.Config) -> None:
    seed = config.getoption("--sample-seed")
    config.pluginmanager.register(
        Sample(config.getoption("--sample"), secrets.randbelow(10**6) if seed is None else seed)
    )


class Sample:
    def __init__(self, seconds: float, seed: int) -> None:
        self.seconds, self.seed = seconds, seed
        self.chosen, self.left_out = 0, 0
        self.started: float | None = None  # of the processor's time

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        own = [item for item in items if OWN in item.path.parents]
        others = [item for item in items if OWN not in item.path.parents]
        random.Random(self.seed).shuffle(others)
        items[:] = [*own, *others]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """True: the test has been dealt with."""
        if OWN in item.path.parents:
            return None
        now = time.process_time()
        self.started = now if self.started is None else self.started
        if now - self.started < self.seconds:
            self.chosen += 1
            return None
        self.left_out += 1
        return True

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(
            f"{self.chosen} tests by the seed {self.seed} (make test PTX_SEED={self.seed}); "
            f"{self.left_out} were left out: make test-ptx"
        )
