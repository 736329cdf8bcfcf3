"""Matrices spread over the lanes of a warp: `ldmatrix` and `mma.sync`.

How a real tensor core rounds is not documented. Here products are exact, those of one instruction (in half
precision: of eight of its dimensions) are added to the sum at once, and the result is rounded towards zero.
Doubles are added up one after the other, each product fused with its sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tests.ptx.decoder import Action, Decoder, Reader
from tests.ptx.instructions.arithmetic import floats_of
from tests.ptx.memory import Access
from tests.ptx.threads import LANES, Threads
from tests.ptx.values import Array, as_bits, fused_float64, towards_zero

ADDED_AT_ONCE = 8
LANE = np.arange(LANES)
GROUP, MEMBER = LANE // 4, LANE % 4


class Fragment(NamedTuple):
    """Where a matrix is: (rows, columns) places among (registers, lanes, numbers in each)."""

    place: Array

    def gather(self, numbers: Array) -> Array:
        """(warps, registers, lanes, numbers) → (warps, rows, columns)."""
        return numbers.reshape(len(numbers), -1)[:, self.place]

    def scatter(self, matrix: Array) -> Array:
        """(warps, rows, columns) → (warps, registers · lanes · numbers)."""
        result = np.empty((len(matrix), self.place.size), matrix.dtype)
        result[:, self.place.reshape(-1)] = matrix.reshape(len(matrix), -1)
        return result


def fragment(
    rows: int, columns: int, registers: int, packed: int, where: Callable[[int, int], tuple[Array, Array]]
) -> Fragment:
    """where(register, number in it) → the row and the column of every lane."""
    place = np.full((rows, columns), -1)
    for register in range(registers):
        for number in range(packed):
            row, column = where(register, number)
            place[row, column] = (register * LANES + LANE) * packed + number
    assert (place >= 0).all()
    return Fragment(place)


class Shape(NamedTuple):
    """Of the operands of one kind of product. PTX ISA, "Matrix fragments for mma"."""

    a: Fragment
    b: Fragment
    c: Fragment


def _of_16_rows(depth: int, packed: int) -> Shape:
    """m16n8: 16×depth by depth×8, `packed` numbers in a register."""
    quarter = 4 * packed  # dimensions that the four lanes of a group hold
    return Shape(
        fragment(
            16,
            depth,
            2 * depth // quarter,
            packed,
            lambda i, n: (GROUP + 8 * (i % 2), MEMBER * packed + quarter * (i // 2) + n),
        ),
        fragment(depth, 8, depth // quarter, packed, lambda i, n: (MEMBER * packed + quarter * i + n, GROUP)),
        fragment(16, 8, 4, 1, lambda i, n: (GROUP + 8 * (i // 2), 2 * MEMBER + i % 2)),
    )


SHAPES = {
    ("m16n8k4", "tf32"): _of_16_rows(4, 1),
    ("m16n8k8", "tf32"): _of_16_rows(8, 1),
    **{("m16n8k8", half): _of_16_rows(8, 2) for half in ("f16", "bf16")},
    **{("m16n8k16", half): _of_16_rows(16, 2) for half in ("f16", "bf16")},
    ("m8n8k4", "f64"): Shape(
        fragment(8, 4, 1, 1, lambda i, n: (GROUP, MEMBER)),
        fragment(4, 8, 1, 1, lambda i, n: (MEMBER, GROUP)),
        fragment(8, 8, 2, 1, lambda i, n: (GROUP, 2 * MEMBER + i)),
    ),
}


def _numbers(kind: str, bits: Array) -> Array:
    """(warps, registers, lanes) bits → (warps, registers, lanes, numbers)."""
    if kind == "tf32":  # the lower bits are not read
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)[..., None]
    if kind in ("f16", "bf16"):
        return np.moveaxis(floats_of(f"{kind}x2", bits), 0, -1)
    return floats_of(kind, bits)[..., None]


def product(kind: str, a: Array, b: Array, c: Array) -> Array:
    """(warps, m, k), (warps, k, n), (warps, m, n), rounded as said above."""
    if kind == "f64":
        for k in range(a.shape[2]):
            c = fused_float64(a[:, :, k, None], b[:, None, k], c)
        return c
    a, b = a.astype(np.float64), b.astype(np.float64)
    for k in range(0, a.shape[2], ADDED_AT_ONCE):
        some = slice(k, k + ADDED_AT_ONCE)
        c = towards_zero(c + a[:, :, some] @ b[:, some], np.float32)
    return c


def _mma(decoder: Decoder) -> Action:
    decoder.allow("sync", "aligned", "row", "col", *(shape for shape, _ in SHAPES), types=4)
    target, kind, other, sums = decoder.modifiers[-4:]
    found = [SHAPES[each, kind] for each in decoder.modifiers if (each, kind) in SHAPES]
    wanted = "f64" if kind == "f64" else "f32"
    if (
        not found
        or kind != other
        or (target, sums) != (wanted, wanted)
        or decoder.modifiers[3:5] != ("row", "col")
    ):
        raise decoder.unknown("of this shape or type")
    shape, held = found[0], "b64" if kind == "f64" else "b32"
    writers = [decoder.write(part) for part in decoder.parts(0)]
    a, b, c = ([decoder.read(part, held) for part in decoder.parts(place)] for place in (1, 2, 3))

    def run(threads: Threads) -> None:
        threads.whole_warps()
        operands = (
            _numbers(each, _registers(threads, part)) for each, part in ((kind, a), (kind, b), (sums, c))
        )
        matrices = [part.gather(numbers) for part, numbers in zip(shape, operands, strict=True)]
        result = shape.c.scatter(product(kind, *matrices)).reshape(-1, len(writers), LANES)
        for place, write in enumerate(writers):
            write(threads, as_bits(threads.by_block(np.ascontiguousarray(result[:, place]))))

    return run


def _registers(threads: Threads, readers: list[Reader]) -> Array:
    """(warps, registers, lanes)"""
    return np.stack([threads.by_warp(read(threads)) for read in readers], 1)


def _ldmatrix(decoder: Decoder) -> Action:
    """8×8 matrices of 16 bits; eight lanes each say where the rows of one of them begin."""
    decoder.allow("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta")
    writers, address = [decoder.write(part) for part in decoder.parts(0)], decoder.address(1)
    transposed = decoder.has("trans")
    if decoder.type != "b16" or not decoder.has(f"x{len(writers)}"):
        raise decoder.unknown("of this type")

    def run(threads: Threads) -> None:
        warps = threads.whole_warps()
        access = threads.shared_access(address(threads), 16)
        rows = np.tile(8 * len(writers) > LANE, int(warps.sum()))
        chosen = Access(
            access.start[rows],
            access.places[rows],
            access.who._replace(stamp=access.who.stamp[rows], thread=access.who.thread[rows]),
        )
        numbers = threads.shared.load(chosen, 16, 8).reshape(-1, len(writers), 8, 8)
        numbers = numbers.swapaxes(2, 3) if transposed else numbers
        pairs = np.ascontiguousarray(numbers).view(np.uint32).reshape(-1, len(writers), LANES)
        for place, write in enumerate(writers):
            write(threads, threads.spread(pairs[:, place].reshape(-1)))

    return run


FAMILY: dict[str, Callable[[Decoder], Action]] = {"mma": _mma, "ldmatrix": _ldmatrix}
