"""The tensors of a launch as one space of global memory, and which of their elements nobody has written.

The kernel is given other addresses than those of the tensors, with gaps between them, so that an address
beyond the end of one is in none. Only elements are inside: not what lies between those of a strided tensor.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tests.ptx.memory import OUTSIDE, UNWRITTEN, WRITTEN, Space
from tests.ptx.values import Array

BASE = 1 << 40
_GAP = 512
_ALIGNMENT = 256  # of the tensors' own addresses, which is kept


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte, and the one behind the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _bytes(begin: int, end: int) -> Array:
    return np.ctypeslib.as_array((ctypes.c_uint8 * (end - begin)).from_address(begin))


def _merged(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """The extents of the tensors, in order; those that overlap are one."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(map(_extent, tensors)):
        if merged and begin < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


class Fresh(TorchFunctionMode):
    """Which memory torch has allocated and nobody has written yet.

    Torch's own operations are taken to write all of what they change; kernels write what they store.
    """

    EMPTY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")

    def __init__(self) -> None:
        super().__init__()
        # By the address of a storage, its bytes; and the storage, so that nobody else gets its memory.
        self.unwritten: dict[int, tuple[Array, Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in self.EMPTY and isinstance(result, Tensor):
            storage = result.untyped_storage()
            self.unwritten[storage.data_ptr()] = np.ones(storage.nbytes(), bool), storage
        elif self.unwritten:
            self._note(name, args, kwargs or {}, result)
        return result

    def _note(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        changes = name == "__setitem__" or name.startswith("__i") or re.fullmatch(r"(?!_).*[^_]_", name)
        for tensor in tree_leaves((args[:1] if changes else (), kwargs.get("out"))):
            if isinstance(tensor, Tensor):
                self.unwritten.pop(tensor.untyped_storage().data_ptr(), None)

    def bytes_of(self, begin: int, end: int) -> Iterable[tuple[int, Array]]:
        """Where in the extent unwritten bytes may be: offsets into it, and the record of what lies there."""
        for start, (unwritten, _) in self.unwritten.items():
            if start < end and begin < start + len(unwritten):
                first, last = max(begin, start), min(end, start + len(unwritten))
                yield first - begin, unwritten[first - start : last - start]


class Tensors:
    """Those of a launch."""

    def __init__(self, tensors: list[Tensor], blocks: int, fresh: Fresh | None = None) -> None:
        tensors = [tensor for tensor in tensors if tensor.numel()]
        self.tensors, self.fresh = tensors, fresh
        self.granule = min((tensor.element_size() for tensor in tensors), default=8)
        self.extents: list[
            tuple[int, int, int]
        ] = []  # of memory: begin and end, and where it is in the space
        place = 0
        for begin, end in _merged(tensors):
            place += (begin - place) % _ALIGNMENT
            self.extents.append((begin, end, place))
            place += end - begin + _GAP
        length = -(-place // _ALIGNMENT) * _ALIGNMENT
        data = np.zeros(length, np.uint8)
        state = np.full(length // self.granule, OUTSIDE, np.uint8)
        for begin, end, at in self.extents:
            data[at : at + end - begin] = _bytes(begin, end)
        for tensor in tensors:
            self._elements(state, tensor)[...] = WRITTEN
        self._mark_unwritten(state)
        self.space = Space(self._name, data, state, self.granule, blocks)

    def address(self, tensor: Tensor) -> int:
        """As the kernel is given it."""
        begin = tensor.data_ptr()
        for first, end, at in self.extents:
            if first <= begin < end:
                return BASE + at + begin - first
        return BASE - _ALIGNMENT  # of an empty tensor, which has no memory

    def _name(self, byte: int) -> str:
        """For messages: tensors are numbered as the kernel is given them, without the empty ones."""
        number, start = max(
            ((i, self.address(tensor) - BASE) for i, tensor in enumerate(self.tensors)),
            key=lambda each: (each[1] <= byte, each[1]),
        )
        return f"byte {byte - start} of tensor {number}"

    def _elements(self, state: Array, tensor: Tensor) -> Array:
        """The granules of all elements, in the shape of the tensor."""
        first = (self.address(tensor) - BASE) // self.granule
        each = tensor.element_size() // self.granule
        strides = tuple(stride * each for stride in tensor.stride())
        return np.lib.stride_tricks.as_strided(state[first:], (*tensor.shape, each), (*strides, 1))

    def _records(self) -> Iterable[tuple[Array, slice]]:
        """Of memory that torch left unwritten: the record, by bytes, and where its granules are."""
        for begin, end, at in self.extents:
            for offset, unwritten in self.fresh.bytes_of(begin, end) if self.fresh else ():
                first = (at + offset) // self.granule
                yield unwritten, slice(first, first + len(unwritten) // self.granule)

    def _mark_unwritten(self, state: Array) -> None:
        for unwritten, where in self._records():
            part = state[where]
            part[unwritten[:: self.granule][: len(part)] & (part == WRITTEN)] = UNWRITTEN

    def write_back(self) -> None:
        """What the kernel stored, into the tensors."""
        written = np.repeat(self.space.writer >= 0, self.granule)
        for begin, end, at in self.extents:
            stored = written[at : at + end - begin]
            memory = _bytes(begin, end)
            memory[stored] = self.space.data[at : at + end - begin][stored]
        for unwritten, where in self._records():
            unwritten[np.repeat(self.space.state[where] == WRITTEN, self.granule)] = False
