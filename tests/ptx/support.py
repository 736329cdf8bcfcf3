"""Small kernels written by hand, run by the emulator."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.ptx.machine import Program
from tests.ptx.tensors import Fresh, Tensors
from tests.ptx.values import Array

STEMS = {1: "%p", 16: "%rs", 32: "%r", 64: "%rd"}


def module(body: str, parameters: int, threads: int = 32) -> str:
    """A kernel with so many pointers, `k_param_0` and so on; 512 bytes of shared memory are `room`."""
    given = ",\n".join(f".param .u64 .ptr .global .align 1 k_param_{i}" for i in range(parameters))
    return f"""
.version 8.0
.target sm_80
.address_size 64
.shared .align 16 .b8 room[512];
.visible .entry k(
{given}
)
.reqntid {threads}
{{
.reg .pred %p<40>;
.reg .b16 %rs<40>;
.reg .b32 %r<40>;
.reg .b64 %rd<40>;
{body}
ret;
}}
"""


def run(
    text: str, *tensors: Tensor, grid: tuple[int, int, int] = (1, 1, 1), fresh: Fresh | None = None
) -> None:
    """Launches the kernel of a module; its parameters are the tensors."""
    memory = Tensors([*tensors], grid[0] * grid[1] * grid[2], fresh)
    Program(text).launch(grid, [memory.address(tensor) for tensor in tensors], memory.space)
    memory.write_back()


# The address of parameter i for this thread, whose elements have so many bytes, in %rd{register}.
def address(register: int, parameter: int, size: int) -> str:
    return f"""
ld.param.b64 %rd{register}, [k_param_{parameter}];
mov.u32 %r39, %tid.x;
mad.wide.u32 %rd{register}, %r39, {size}, %rd{register};
"""


def calculated(instructions: str, *operands: Array, results: tuple[type[np.generic], ...]) -> list[Array]:
    """What 32 lanes calculate. In the text, {0} is the first operand, {a} the first result; operands of one
    element are the same for all lanes, booleans are predicates."""
    names, loads = [], []
    given = [np.broadcast_to(np.asarray(operand), 32) for operand in operands]
    for i, operand in enumerate(given):
        bits = 8 * operand.dtype.itemsize if operand.dtype != np.bool_ else 1
        names.append(f"{STEMS[bits]}{i}")
        loads.append(address(38, i, max(bits // 8, 4 if bits == 1 else 2)))
        if bits == 1:
            loads.append(f"ld.global.b32 %r38, [%rd38];\nsetp.ne.b32 {names[-1]}, %r38, 0;")
        else:
            loads.append(f"ld.global.b{bits} {names[-1]}, [%rd38];")
    outputs, stores = {}, []
    for i, (letter, kind) in enumerate(zip("abcdefgh", results, strict=False)):
        bits = 1 if kind is np.bool_ else 8 * np.dtype(kind).itemsize
        outputs[letter] = f"{STEMS[bits]}{20 + i}"
        stores.append(address(38, len(given) + i, max(bits // 8, 4 if bits == 1 else 2)))
        source = outputs[letter]
        if bits == 1:
            stores.append(f"selp.b32 %r37, 1, 0, {source};")
            source, bits = "%r37", 32
        stores.append(f"st.global.b{bits} [%rd38], {source};")
    body = "\n".join([*loads, instructions.format(*names, **outputs), *stores])
    tensors = [torch.from_numpy(_held(operand).copy()) for operand in given]
    found = [torch.from_numpy(_held(np.zeros(32, kind))) for kind in results]
    run(module(body, len(tensors) + len(found)), *tensors, *found)
    return [
        each.numpy() != 0 if kind is np.bool_ else each.numpy().view(kind)
        for each, kind in zip(found, results, strict=True)
    ]


def _held(values: Array) -> Array:
    """As torch knows it: signed integers of the same bits."""
    if values.dtype == np.bool_:
        return values.astype(np.int32)
    return np.ascontiguousarray(values).view(f"i{values.dtype.itemsize}")
