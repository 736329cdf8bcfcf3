"""The compiled CPU kernels: load them once, and where that fails keep the reason instead of raising.

Importing tripletops must work on a machine where the library was never built, was built for another torch, or
where TRIPLETOPS_ISA asks for an instruction set that the processor lacks: `backend="reference"` serves there,
and the reason is told when the cpu backend is asked for.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tripletops._words import fingerprint

_BUILD = "build it with `pip install --no-build-isolation -e .` in the source tree"

_library: ctypes.CDLL | None = None


def why_not() -> str | None:
    """None where the kernels are loaded and usable, else the reason."""
    return _reason


def isa() -> str | None:
    """The instruction set in use: the best one here, or what TRIPLETOPS_ISA says; None: no kernels."""
    return None if _library is None or _reason is not None else str(_library.tripletops_isa().decode())


def instruction_sets() -> list[str]:
    """The instruction sets of the kernels that this processor can run, the best one last."""
    return [] if _library is None else _library.tripletops_instruction_sets().decode().split()


@contextmanager
def using_isa(name: str) -> Iterator[None]:
    """Let the kernels use that instruction set for a while, in all threads. For tests and measurements."""
    before = isa()
    if _library is None or before is None:
        raise RuntimeError(f"the cpu kernels cannot be used: {_reason}")
    if not _library.tripletops_select_isa(name.encode()):
        raise ValueError(f"{name!r} is not one of the instruction sets {', '.join(instruction_sets())}")
    try:
        yield
    finally:
        _library.tripletops_select_isa(before.encode())


@contextmanager
def using_certified(use: str) -> Iterator[None]:
    """Forbid ("never") or force ("always") the certified pass for a while. For tests and measurements."""
    if _library is None:
        raise RuntimeError(f"the cpu kernels cannot be used: {_reason}")
    before = _library.tripletops_certified()
    _library.tripletops_use_certified(("never", "where it pays", "always").index(use))
    try:
        yield
    finally:
        _library.tripletops_use_certified(before)


def _load() -> str | None:
    """Load the library, which gives torch the ops; the reason where it cannot be used."""
    global _library
    file = Path(__file__).parents[1] / "_C.abi3.so"
    if not file.exists():
        return _why_missing(file)
    if torch.__version__ < "2.10":
        return f"the compiled library needs torch >= 2.10, found torch {torch.__version__}"
    try:
        torch.ops.load_library(file)
        library = ctypes.CDLL(str(file))  # the same one, for what torch does not ask of it
        for function in (
            library.tripletops_isa,
            library.tripletops_instruction_sets,
            library.tripletops_fingerprint,
        ):
            function.restype = ctypes.c_char_p
        library.tripletops_select_isa.restype = ctypes.c_bool
        library.tripletops_use_certified.restype = None
    except (OSError, AttributeError) as error:  # AttributeError: it was built from other sources
        said = error.__cause__ or error  # torch's own error names the file alone
        return f"the compiled library cannot be loaded: {said}; {_BUILD}"
    if library.tripletops_fingerprint().decode() != fingerprint():
        return f"the compiled library was built from other sources; {_BUILD}"
    _library = library
    if library.tripletops_isa() is None:
        asked, usable = os.environ.get("TRIPLETOPS_ISA"), ", ".join(instruction_sets())
        return f"TRIPLETOPS_ISA={asked!r} is not usable on this processor, which can run {usable}"
    return None


def _why_missing(file: Path) -> str:
    """Whether it was never built, or was installed elsewhere and this source tree comes first on sys.path."""
    for entry in sys.path:
        site = Path(entry).resolve()
        if (site / file.parent.name / file.name).exists():
            return (
                f"the source tree {file.parents[1]} has no compiled library and hides the tripletops "
                f"installed in {site}; run from another folder, or {_BUILD}"
            )
    return f"the compiled library {file} is missing; {_BUILD}"


_reason = _load()
