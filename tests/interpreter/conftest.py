"""For the tests of Triton's kernels: whether there is anything to run them, and what makes that bearable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers import DEVICE

from tripletops.backends import FORCED, INTERPRETED


@pytest.fixture(scope="session", autouse=True)
def something_to_run_kernels() -> Iterator[None]:
    """Triton's interpreter, which has to be asked for before triton is first imported, or a GPU."""
    if DEVICE.type == "cpu" and (not INTERPRETED or FORCED is None):
        pytest.skip("run as TRITON_INTERPRET=1 TRIPLETOPS_BACKEND=triton python -m pytest tests/interpreter")
    # Lanes that a mask throws away divide by 0 and overflow at will, here as on a GPU.
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(scope="session", autouse=True)
def language_patched_once(something_to_run_kernels: None) -> Iterator[None]:
    """The interpreter puts its own functions into triton.language, and takes them out again, on every call of
    every jitted function, tl.min among them: more than half of its time. Here they stay."""
    if not INTERPRETED:
        yield
        return
    from triton import language
    from triton.runtime import interpreter

    patch: Callable[[Any], Any] = interpreter._patch_lang
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
