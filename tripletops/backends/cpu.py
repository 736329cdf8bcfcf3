"""The compiled CPU kernels: load them once, and where that fails keep the reason instead of raising.

Importing tripletops must work on a machine where the library was never built, was built for another torch, or
where TRIPLETOPS_ISA asks for an instruction set that the processor lacks: `backend="reference"` serves there,
and the reason is told when the cpu backend is asked for.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

import torch

_BUILD = "build it with `pip install --no-build-isolation .` in the source tree"

_kernels: ModuleType | None = None


def why_not() -> str | None:
    """None where the kernels are loaded and usable, else the reason."""
    return _reason


def isa() -> str | None:
    """The instruction set in use: the best one here, or what TRIPLETOPS_ISA says; None: no kernels."""
    return None if _kernels is None or _reason is not None else str(_kernels.selected())


def isa_variants() -> list[str]:
    """The instruction sets of the kernels that this processor can run, the best one last."""
    return [] if _kernels is None else list(_kernels.variants())


def _load() -> str | None:
    """Load the kernels' Python module and the op library; the reason where one of them cannot be used."""
    global _kernels
    library = Path(__file__).parents[1] / "_C.abi3.so"
    if not library.exists():
        return f"the compiled library tripletops/{library.name} is missing; {_BUILD}"
    try:
        _kernels = importlib.import_module("tripletops._kernels")
        try:
            _kernels.selected()
        except ValueError:
            asked, usable = os.environ.get("TRIPLETOPS_ISA"), ", ".join(_kernels.variants())
            return f"TRIPLETOPS_ISA={asked!r} is not usable on this processor, which can run {usable}"
        torch.ops.load_library(library)
    except (ImportError, OSError, RuntimeError) as error:
        return (
            f"the compiled library was built for torch >= 2.10, found torch {torch.__version__}, and fails; "
            f"{_BUILD}; the loader says: {error}"
        )
    return None


_reason = _load()
