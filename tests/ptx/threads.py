"""The threads of some blocks of a grid, which run in lockstep: registers, masks, barriers, memory.

An array of the threads has the shape (blocks, threads of a block); what is the same along an axis has the
length 1 there. `mask` says which threads take part in an instruction; None: all of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ptx.faults import FaultError
from tests.ptx.memory import UNWRITTEN, Access, Space, Visitors, stamp_of
from tests.ptx.parser import Kernel, Register
from tests.ptx.tensors import BASE
from tests.ptx.values import POISON, Array

LANES = 32


class Threads:
    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        blocks: range,
        arguments: dict[str, int],
        tensors: Space,
        shared_bytes: int,
        granule: int,
    ) -> None:
        self.arguments = arguments
        self.shape = len(blocks), kernel.threads
        self.registers: list[Any] = [None] * len(kernel.registers)
        self.mask: Array | None = None
        self.tensors = tensors
        self.shared_bytes = -(-shared_bytes // 16) * 16
        length = len(blocks) * self.shared_bytes
        state = np.full(length // granule, UNWRITTEN, np.uint8)
        self.shared = Space(self._shared_name, np.zeros(length, np.uint8), state, granule, blocks.stop)
        self.copies = Copies(self)
        self.exited = np.zeros(self.shape, bool)
        self._numbers = np.arange(blocks.start, blocks.stop, dtype=np.int64)[:, None]
        self._epochs = np.zeros((len(blocks), 1), np.int64)
        self._place(grid)

    def _shared_name(self, byte: int) -> str:
        return f"byte {byte % self.shared_bytes} of shared memory"

    def _place(self, grid: tuple[int, int, int]) -> None:
        """The special registers."""
        thread = np.arange(self.shape[1], dtype=np.uint32)[None]
        self.special = {"%tid.x": thread, "%laneid": thread % LANES, "%warpid": thread // LANES}
        rest = self._numbers
        for axis, size in zip("xyz", grid, strict=True):
            self.special[f"%ctaid.{axis}"] = (rest % size).astype(np.uint32)
            self.special[f"%nctaid.{axis}"] = np.full((1, 1), size, np.uint32)
            self.special.setdefault(f"%tid.{axis}", np.zeros((1, 1), np.uint32))
            self.special[f"%ntid.{axis}"] = np.full((1, 1), self.shape[1] if axis == "x" else 1, np.uint32)
            rest = rest // size
        self.warps = -(-self.shape[1] // LANES)
        self._order = thread.astype(np.int64)
        self._stamp()

    def _stamp(self) -> None:
        self.stamps = stamp_of(self._numbers, self._epochs, self._order // LANES)
        self._names = np.broadcast_to(self._order, self.shape)

    # Registers

    def put(self, register: Register, value: Array) -> None:
        """For the threads of the mask; `value` has the type in which registers are held."""
        if self.mask is not None:
            before = self.registers[register.index]
            before = value.dtype.type(POISON[register.bits]) if before is None else before
            value = np.where(self.mask, value, before)
        self.registers[register.index] = value

    def full(self, value: Array) -> Array:
        return value if value.shape == self.shape else np.broadcast_to(value, self.shape)

    def by_warp(self, value: Array) -> Array:
        """(warps of all blocks, lanes)."""
        return np.ascontiguousarray(self.full(value)).reshape(-1, LANES)

    def by_block(self, value: Array) -> Array:
        """The way back."""
        return value.reshape(self.shape)

    def whole_warps(self, members: Array | None = None) -> Array:
        """Which warps take part in an instruction that all lanes of a warp have to reach together."""
        if members is not None and (self.active(members) != np.uint32(0xFFFFFFFF)).any():
            raise FaultError("a collective instruction of some lanes only")
        if self.mask is None:
            return np.ones(self.shape[0] * self.warps, bool)
        lanes = self.by_warp(self.mask)
        present: Array = lanes.any(1)
        if (lanes.all(1) != present).any():
            raise FaultError("the lanes of a warp have diverged before a collective instruction")
        return present

    def barrier(self) -> None:
        """All threads of a block that have not left, or none."""
        if self.mask is None:
            self._epochs = self._epochs + 1
        else:
            present = self.mask.any(1, keepdims=True)
            if ((self.mask | self.exited).all(1, keepdims=True) != present).any():
                raise FaultError("the threads of a block have diverged before a barrier")
            self._epochs = self._epochs + present
        self._stamp()

    # Memory

    def active(self, value: Array) -> Array:
        """(threads that take part,)"""
        full = self.full(value)
        return full.reshape(-1) if self.mask is None else full[self.mask]

    def spread(self, values: Array) -> Array:
        """The way back: (blocks, threads), with zeros for the others."""
        if self.mask is None:
            return values.reshape(self.shape)
        result = np.zeros(self.shape, values.dtype)
        result[self.mask] = values
        return result

    def visitors(self) -> Visitors:
        return Visitors(self.active(self.stamps), self.active(self._names))

    def global_access(self, address: Array, size: int) -> Access:
        start = self.active(address).astype(np.int64) - BASE
        inside = (start >= 0) & (start + size <= len(self.tensors.data))
        return self.tensors.access(start, size, self.visitors(), inside)

    def shared_access(self, address: Array, size: int) -> Access:
        return self.shared.access(*self._shared_start(address, size))

    def _shared_start(self, address: Array, size: int) -> tuple[Array, int, Visitors, Array]:
        inside_block = self.active(address).astype(np.int64)
        inside = (inside_block >= 0) & (inside_block + size <= self.shared_bytes)
        first = np.arange(self.shape[0])[:, None] * self.shared_bytes
        return inside_block + self.active(first), size, self.visitors(), inside

    def access(self, space: str, address: Array, size: int) -> tuple[Space, Access]:
        if space == "shared":
            return self.shared, self.shared_access(address, size)
        return self.tensors, self.global_access(address, size)


class Copies:
    """Asynchronous copies from global to shared memory that nobody has waited for."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.committed = np.zeros(threads.shape, np.int64)  # groups of each thread
        self.pending: list[tuple[Array, Array, Array]] = []  # places, thread, group

    def start(self, access: Access, numbers: Array) -> None:
        threads = self.threads
        threads.shared.copy_begins(access, numbers)
        who = threads.active(np.arange(threads.exited.size).reshape(threads.shape))
        self.pending.append((access.places, who, self.committed.reshape(-1)[who]))

    def commit(self) -> None:
        mask = self.threads.mask
        self.committed = self.committed + (1 if mask is None else mask)

    def wait(self, unfinished: int) -> None:
        """Until no more than so many groups of each thread are left."""
        threads, left = self.threads, []
        committed, stamps = self.committed.reshape(-1), threads.full(threads.stamps).reshape(-1)
        waits = np.ones(len(committed), bool) if threads.mask is None else threads.mask.reshape(-1)
        for places, who, group in self.pending:
            done = waits[who] & (group < committed[who] - unfinished)
            threads.shared.copy_ends(places[done], stamps[who[done]][:, None])
            if not done.all():
                left.append((places[~done], who[~done], group[~done]))
        self.pending = left
