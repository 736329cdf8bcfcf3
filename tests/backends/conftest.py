"""For the tests of backends: which of them are on trial, and what makes Triton's interpreter bearable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.backends import BACKENDS, EMULATED, Backend
from tripletops.backends import INTERPRETED


def pytest_configure(config: pytest.Config) -> None:
    # Numpy's word for a row of a tile that is NaN from end to end, as it is where an embedding is not finite.
    config.addinivalue_line("filterwarnings", "ignore:All-NaN slice encountered:RuntimeWarning")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", BACKENDS, ids=str, indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """One of the backends on trial, in use: a test that takes it runs on each of them."""
    with request.param.in_use():
        yield request.param


@pytest.fixture(autouse=True)
def emulator() -> Iterator[Any]:
    """Where the GPU's code is on trial, Triton's kernels are compiled, and run by this."""
    if not EMULATED:
        yield None
        return
    from tests.ptx.driver import emulated

    with emulated() as driver:
        yield driver


@pytest.fixture(scope="session", autouse=True)
def silence() -> Iterator[None]:
    """Lanes that a mask throws away divide by 0 and overflow at will, here as on a GPU."""
    if not INTERPRETED:
        yield
        return
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
