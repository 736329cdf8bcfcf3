"""The types of PTX, and arithmetic on arrays of them that rounds as the PTX ISA says.

Registers hold bits: arrays of unsigned integers, or of booleans for predicates. An operation looks at them as
one of its types. Arrays broadcast: what is the same for all threads is held once.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATS = {16: np.float16, 32: np.float32, 64: np.float64}
# How an operation looks at a register, by the name of the type. bfloat16 is handled in float32: see `Half`.
TYPES: dict[str, type[np.generic]] = {
    **{f"{letter}{bits}": UNSIGNED[bits] for letter in "bu" for bits in UNSIGNED},
    **{f"s{bits}": kind for bits, kind in SIGNED.items()},
    **{f"f{bits}": kind for bits, kind in FLOATS.items()},
}
# What a register holds for threads that never wrote it: NaN, where that is possible.
POISON = {1: True, 8: 0xCD, 16: 0x7FCD, 32: 0x7FC0DEAD, 64: 0x7FF8DEADDEADDEAD}
TINY = np.finfo(np.float32).smallest_normal


def bits_of(kind: str) -> int:
    """Of a type, by its name."""
    if kind == "pred":
        return 1
    return int(re.sub(r"\D", "", kind.removesuffix("x2"))) * (2 if kind.endswith("x2") else 1)


def as_bits(values: Array) -> Array:
    """What a register holds of them."""
    if values.dtype == np.bool_ or values.dtype.kind == "u":
        return values
    return values.view(UNSIGNED[8 * values.dtype.itemsize])


def bfloat_to_float(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float_to_bfloat(values: Array) -> Array:
    """To the nearest, ties to even; NaN stays NaN. float64 is rounded to odd on the way, so that nothing is
    rounded twice."""
    narrow = towards_zero(values, np.float32) if values.dtype == np.float64 else values
    bits = narrow.view(np.uint32) | (narrow != values).astype(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)


def flushed(values: Array) -> Array:
    """Subnormal numbers of float32 as zeros of their sign (`.ftz`)."""
    return np.where(np.abs(values) < TINY, np.copysign(np.float32(0), values), values)


def to_tf32(bits: Array) -> Array:
    """float32 → the nearest number of 11 significant bits, ties away from zero (`cvt.rna.tf32`)."""
    finite = (bits & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
    return np.where(finite, (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000), bits)


def towards_zero(values: Array, kind: type[np.generic]) -> Array:
    """float64 → the nearest number of `kind` that is not farther from zero."""
    nearest = values.astype(kind)
    beyond = np.abs(nearest.astype(np.float64)) > np.abs(values)
    return np.where(beyond, np.nextafter(nearest, kind(0)), nearest)


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """The rounded sum, and what rounding took off (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """The same of a product (Dekker); of factors below 2⁹⁰⁰."""
    high = []
    for x in (a, b):
        big = x * 134217729.0  # 2²⁷ + 1
        high.append(big - (big - x))
    (a_high, b_high), product = high, a * b
    a_low, b_low = a - a_high, b - b_high
    return product, a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)


def _odd(total: Array, rest: Array) -> Array:
    """A sum rounded to odd: with a last bit that says that something was rounded off."""
    bits = total.view(np.uint64)
    even = ((bits & np.uint64(1)) == 0) & (rest != 0) & np.isfinite(total)
    towards = np.where((rest > 0) == (total > 0), bits + np.uint64(1), bits - np.uint64(1))
    # Of a total of 0 there is no rest: two numbers that cancel do so exactly.
    return np.where(even, towards, bits).view(np.float64)


def fused_narrow(a: Array, b: Array, c: Array) -> Array:
    """a·b + c of numbers with at most 24 bits, in float64, to be rounded once more and for all.

    The product is exact there, and the sum is rounded to odd, so that rounding it again rounds what was exact
    (Boldo, Melquiond 2008).
    """
    total, rest = _two_sum(a.astype(np.float64) * b, c.astype(np.float64))
    return _odd(total, np.where(np.isfinite(rest), rest, 0))


def fused_float64(a: Array, b: Array, c: Array) -> Array:
    """a·b + c of float64, rounded once, by the same paper.

    Where parts leave the exponents in which this is exact, the sum is made in extended precision.
    """
    product, product_rest = _two_product(a, b)
    low, low_rest = _two_sum(c, product_rest)
    high, high_rest = _two_sum(product, low)
    exact = high + _odd(*_two_sum(low_rest, high_rest))
    wide = (a.astype(np.longdouble) * b + c).astype(np.float64)
    factors = np.maximum(np.abs(a), np.abs(b))
    safe = (factors < 2.0**900) & (np.abs(c) < 2.0**1000)
    safe &= (np.abs(product) > 2.0**-900) & (np.abs(product) < 2.0**1000)
    return np.where(safe, exact, wide)


def saturated(values: Array, kind: type[np.generic]) -> Array:
    """Whole floats → integers of `kind`: too large ones become the largest, NaN becomes 0."""
    limits = np.iinfo(kind)
    values = np.where(np.isnan(values), 0, values)
    # The largest integer of 64 bits is no float: whatever reaches 2⁶³ or 2⁶⁴ is too large.
    inside = np.clip(values, float(limits.min), np.nextafter(float(limits.max) + 1, 0))
    result = inside.astype(kind)
    return np.where(values >= float(limits.max) + 1, kind(limits.max), result)


def shifted_left(values: Array, by: Array) -> Array:
    width = 8 * values.dtype.itemsize
    kept = values << np.minimum(by, width - 1).astype(values.dtype)
    return np.where(by < width, kept, values.dtype.type(0))


def shifted_right(values: Array, by: Array) -> Array:
    """With copies of the sign, if the type has one; shifts beyond the width shift everything out."""
    width = 8 * values.dtype.itemsize
    kept = values >> np.minimum(by, width - 1).astype(values.dtype)
    return kept if values.dtype.kind == "i" else np.where(by < width, kept, values.dtype.type(0))
