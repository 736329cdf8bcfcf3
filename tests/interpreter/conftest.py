"""For the tests of Triton's kernels: whether there is anything to run them, and what makes that bearable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import DEVICE

from tripletops.backends import FORCED, INTERPRETED


def pytest_configure(config: pytest.Config) -> None:
    # Numpy's word for a row of a tile that is NaN from end to end, as it is where an embedding is not finite.
    config.addinivalue_line("filterwarnings", "ignore:All-NaN slice encountered:RuntimeWarning")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One skip with its reason, where there is neither a GPU nor Triton's interpreter, which has to be asked
    for before triton is first imported."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    if not here or DEVICE.type != "cpu" or (INTERPRETED and FORCED is not None):
        return
    first, *others = here
    reason = "run as TRITON_INTERPRET=1 TRIPLETOPS_BACKEND=triton python -m pytest tests/interpreter"
    first.add_marker(pytest.mark.skip(reason=reason))
    left_out = set(others)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=others)


@pytest.fixture(scope="session", autouse=True)
def silence() -> Iterator[None]:
    """Lanes that a mask throws away divide by 0 and overflow at will, here as on a GPU."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(scope="session", autouse=True)
def language_patched_once() -> Iterator[None]:
    """The interpreter puts its own functions into triton.language, and takes them out again, on every call of
    every jitted function, tl.min among them: more than half of its time. Here they stay."""
    if not INTERPRETED:
        yield
        return
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    patched: list[Any] = []

    def patch_once(function: Any) -> Any:
        visible = {id(value) for value in function.__globals__.values()}
        modules = [module for module in (language, language.core) if id(module) in visible]
        if any(module not in patched for module in modules):
            patched.extend(modules)
            patch(function)
        return interpreter._LangPatchScope()  # with nothing to take out again

    with pytest.MonkeyPatch.context() as context:
        context.setattr(interpreter, "_patch_lang", patch_once)
        yield
