"""A GPU of compute capability 8.0 for Triton's own host code, whose machine is the emulator.

Triton binds arguments, specialises and compiles as for a real GPU; only its last stage, from PTX to machine
code, is left out: here PTX is the machine code. tripletops takes CPU tensors to the Triton backend meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from tests.ptx.catalogue import Key, key_of
from tests.ptx.machine import Program
from tests.ptx.tensors import Fresh, Tensors
from tripletops.backends import REGISTRY
from tripletops.backends.triton import tiles

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "triton"
DEVICE = "emulated"  # a key of Triton's caches that no real device has
MAX_SHARED = 163 << 10  # bytes that a block may have


class Utilities:
    """What Triton asks of a driver beside launches."""

    def get_device_properties(self, device: str) -> dict[str, int]:
        return {"max_shared_mem": MAX_SHARED, "multiprocessor_count": 1, "warpSize": 32}

    def load_binary(self, name: str, code: bytes, shared: int, device: str) -> tuple[Any, ...]:
        """(module, function, registers, spills, threads that a block may have)"""
        return None, code.decode(), 0, 0, 1024


class Emulator:
    """Triton's driver. `executed` are the kernels that were run, `change` may alter PTX before it is."""

    def __init__(self) -> None:
        self.utils = Utilities()
        self.fresh = Fresh()
        self.executed: set[Key] = set()
        self.change: Callable[[str], str] | None = None

    def get_current_device(self) -> str:
        return DEVICE

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 80, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            raise NotImplementedError(f"{metadata.name} wants scratch memory")

        key = key_of(source.fn, source.signature, source.constants)

        def launch(x: int, y: int, z: int, stream: int, code: str, *rest: Any) -> None:
            _metadata, _launch_metadata, _enter, _exit, *arguments = rest
            self.executed.add(key)
            given = _flat(tuple(source.signature.values()), tuple(arguments))
            changed = code if self.change is None else self.change(code)
            self._run(program_of(changed), (x, y, z), given, metadata.shared)

        return launch

    def _run(
        self, program: Program, grid: tuple[int, int, int], given: list[tuple[str, Any]], shared: int
    ) -> None:
        passed = [each for _, each in given if isinstance(each, Tensor)]
        tensors = Tensors(passed, grid[0] * grid[1] * grid[2], self.fresh)
        arguments = [
            tensors.address(each) if isinstance(each, Tensor) else _bits(kind, each) for kind, each in given
        ]
        program.launch(grid, arguments, tensors.space, shared)
        tensors.write_back()


@lru_cache(maxsize=256)
def program_of(text: str) -> Program:
    return Program(text)


def _flat(signature: Any, arguments: Any) -> list[tuple[str, Any]]:
    """The arguments that the kernel is given, not its constants; with Triton's names of their types."""
    if isinstance(signature, tuple):
        pairs = zip(signature, arguments, strict=True)
        return [each for kind, argument in pairs for each in _flat(kind, argument)]
    return [] if signature == "constexpr" else [(signature, arguments)]


def _bits(kind: str, number: float | int | bool) -> int:
    """As the kernel finds a number among its parameters."""
    if kind == "fp32":
        return int(np.float32(number).view(np.uint32))
    if kind == "fp64":
        return int(np.float64(number).view(np.uint64))
    if not kind.startswith(("i", "u")):
        raise NotImplementedError(f"an argument of type {kind}")
    return int(number)


def _hand_on(*arguments: Any) -> tuple[str, str] | None:
    """Triton's hook for its stages. Called without arguments, it says what makes its results different."""
    if not arguments:
        return "ptx is run", "ptx is run"
    stages = arguments[1]
    stages["cubin"] = lambda ptx, metadata: ptx.encode()
    return None


@contextmanager
def emulated(multiprocessors: int = 4) -> Iterator[Emulator]:
    """The Triton backend on CPU tensors, its kernels executed by the emulator."""
    if tiles.INTERPRETED:
        raise RuntimeError(
            "Triton interprets its kernels in this process (TRITON_INTERPRET): nothing is compiled"
        )
    emulator = Emulator()
    driver = triton.runtime.driver
    before = driver._active
    usable = REGISTRY["triton"]._replace(reads=("cpu",), why_not=lambda: None)
    properties = SimpleNamespace(multi_processor_count=multiprocessors)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(REGISTRY, triton=usable))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", return_value=properties))
        stack.enter_context(triton.knobs.cache.scope())
        stack.enter_context(triton.knobs.runtime.scope())
        triton.knobs.cache.dir = str(CACHE)
        triton.knobs.runtime.add_stages_inspection_hook = _hand_on
        stack.callback(driver.set_active, before)
        driver.set_active(emulator)
        for cached in (tiles.target, tiles._multiprocessors):
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        stack.enter_context(emulator.fresh)
        yield emulator
