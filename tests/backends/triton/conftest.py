"""For the tests of what is Triton's own: whether there is anything to run its kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.backends import EMULATED
from tests.support.calls import DEVICE
from tripletops.backends import FORCED, INTERPRETED


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One skip with its reason, where there is neither a GPU nor Triton's interpreter, which has to be asked
    for before triton is first imported."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    if not here or DEVICE.type != "cpu" or ((INTERPRETED or EMULATED) and FORCED is not None):
        return
    *others, last = here  # not one that is for the emulator alone
    reason = "run as TRITON_INTERPRET=1 TRIPLETOPS_BACKEND=triton python -m pytest tests/backends"
    last.add_marker(pytest.mark.skip(reason=reason))
    left_out = set(others)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=others)
