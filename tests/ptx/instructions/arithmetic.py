"""Sums, products, quotients, roots: of integers, which wrap around, and of floating-point numbers.

Instructions that the GPU approximates (`ex2.approx`, `div.full`, …) are rounded correctly here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.decoder import Action, Decoder
from tests.ptx.threads import Threads
from tests.ptx.values import (
    TYPES,
    Array,
    as_bits,
    bfloat_to_float,
    bits_of,
    float_to_bfloat,
    flushed,
    fused_float64,
    fused_narrow,
)

Operation = Callable[..., Any]


def is_float(kind: str) -> bool:
    return kind.startswith(("f", "bf"))


def _halves(bits: Array) -> Array:
    """The numbers of 16 bits in a register of 32: (2, …), the lower one first."""
    return np.stack([bits & np.uint32(0xFFFF), bits >> np.uint32(16)]).astype(np.uint16)


def floats_of(kind: str, bits: Array) -> Array:
    """What a register holds, as numbers to calculate with."""
    if kind.endswith("x2"):
        bits = _halves(bits)
    if kind.startswith("bf"):
        return bfloat_to_float(bits)
    return bits.view(TYPES[kind.removesuffix("x2")])


def bits_of_floats(kind: str, numbers: Array) -> Array:
    """The way back, rounded."""
    if kind.startswith("bf"):
        bits = float_to_bfloat(numbers)
    else:
        bits = as_bits(numbers.astype(TYPES[kind.removesuffix("x2")], copy=False))
    if kind.endswith("x2"):
        return bits[0].astype(np.uint32) | bits[1].astype(np.uint32) << np.uint32(16)
    return bits


def _float_action(decoder: Decoder, operation: Operation) -> Action:
    kind, flushes = decoder.type, decoder.has("ftz") and decoder.type == "f32"
    readers = [decoder.read(place, kind) for place in range(1, len(decoder.operands))]
    write = decoder.write(0)

    def run(threads: Threads) -> None:
        numbers = [floats_of(kind, read(threads)) for read in readers]
        if flushes:
            numbers = [flushed(each) for each in numbers]
        result = operation(*numbers)
        write(threads, bits_of_floats(kind, flushed(result.astype(np.float32)) if flushes else result))

    return run


def _integer_action(decoder: Decoder, operation: Operation) -> Action:
    readers = [decoder.typed(place, decoder.type) for place in range(1, len(decoder.operands))]
    write = decoder.write(0)
    return lambda threads: write(threads, as_bits(operation(*(read(threads) for read in readers))))


def _of_either(
    floats: Operation | None, integers: Operation | None = None, modifiers: tuple[str, ...] = ()
) -> Callable[[Decoder], Action]:
    """An operation that both kinds of numbers have, or one of them."""

    def decode(decoder: Decoder) -> Action:
        operation = floats if is_float(decoder.type) else integers
        if operation is None:
            raise decoder.unknown("of this type")
        decoder.allow(*(("rn", "ftz", *modifiers) if is_float(decoder.type) else ()))
        return (_float_action if is_float(decoder.type) else _integer_action)(decoder, operation)

    return decode


def _extreme(least: bool) -> Callable[[Decoder], Action]:
    """`min` and `max`: a number if only one is NaN, unless `.NaN` is said; −0 is less than 0."""
    integers: Operation = np.minimum if least else np.maximum
    numbers: Operation = np.fmin if least else np.fmax

    def decode(decoder: Decoder) -> Action:
        if not is_float(decoder.type):
            decoder.allow()
            return _integer_action(decoder, integers)
        decoder.allow("ftz", "NaN")
        operation = integers if decoder.has("NaN") else numbers

        def extreme(a: Array, b: Array) -> Array:
            result = operation(a, b)
            zeros = (a == 0) & (b == 0)
            if zeros.any():
                negative = np.signbit(a) | np.signbit(b) if least else np.signbit(a) & np.signbit(b)
                result = np.where(
                    zeros, np.where(negative, -result.dtype.type(0), result.dtype.type(0)), result
                )
            return result

        return _float_action(decoder, extreme)

    return decode


# Products of integers


def _wide(kind: str) -> str:
    return f"{kind[0]}{2 * bits_of(kind)}"


def _high_product(a: Array, b: Array) -> Array:
    """The upper half of the product."""
    bits = 8 * a.dtype.itemsize
    if bits < 64:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return (a.astype(wide) * b.astype(wide) >> wide(bits)).astype(a.dtype)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = a.view(np.uint64), b.view(np.uint64)
    cross = (x & low) * (y & low) >> half
    middle = (x >> half) * (y & low) + cross
    other = (x & low) * (y >> half) + (middle & low)
    high = (x >> half) * (y >> half) + (middle >> half) + (other >> half)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.view(a.dtype)


def _product(decoder: Decoder) -> tuple[Callable[[Threads], Array], str]:
    """The product of the first two operands, and its type."""
    kind = decoder.type
    a, b = decoder.typed(1, kind), decoder.typed(2, kind)
    if decoder.has("wide"):
        wide = TYPES[_wide(kind)]
        return (lambda threads: a(threads).astype(wide) * b(threads).astype(wide)), _wide(kind)
    if decoder.has("hi"):
        return (lambda threads: _high_product(a(threads), b(threads))), kind
    if not decoder.has("lo"):
        raise decoder.unknown("which half of the product?")
    return (lambda threads: a(threads) * b(threads)), kind


def _mul(decoder: Decoder) -> Action:
    if is_float(decoder.type):
        decoder.allow("rn", "ftz")
        return _float_action(decoder, np.multiply)
    decoder.allow("lo", "hi", "wide")
    product, _ = _product(decoder)
    write = decoder.write(0)
    return lambda threads: write(threads, as_bits(product(threads)))


def _mad(decoder: Decoder) -> Action:
    if is_float(decoder.type):
        return _fma(decoder)
    decoder.allow("lo", "hi", "wide")
    product, kind = _product(decoder)
    c, write = decoder.typed(3, kind), decoder.write(0)
    return lambda threads: write(threads, as_bits(product(threads) + c(threads)))


def _fma(decoder: Decoder) -> Action:
    decoder.allow("rn", "ftz")
    return _float_action(decoder, fused_float64 if decoder.type == "f64" else fused_narrow)


# Quotients of integers round towards zero.


def _quotient(a: Array, b: Array) -> Array:
    quotient = a // b
    if a.dtype.kind == "u":
        return quotient
    inexact = quotient * b != a
    return quotient + (inexact & ((a < 0) != (b < 0))).astype(a.dtype)


# Functions of one number, calculated in float64 and rounded


def _through_double(function: Operation) -> Operation:
    return lambda x: function(x.astype(np.float64)).astype(x.dtype)


def _approximated(function: Operation) -> Callable[[Decoder], Action]:
    return _of_either(_through_double(function), None, ("approx",))


def _rcp(decoder: Decoder) -> Action:
    decoder.allow("rn", "approx", "ftz")
    if decoder.type == "f64" and decoder.has("approx"):

        def gross(x: Array) -> Array:
            """Only the upper 32 bits are calculated (PTX ISA, rcp.approx.ftz.f64)."""
            return ((1 / x).view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)

        return _float_action(decoder, gross)
    return _float_action(decoder, _through_double(lambda x: 1 / x))


def _copysign(decoder: Decoder) -> Action:
    decoder.allow()
    return _float_action(decoder, lambda sign, size: np.copysign(size, sign))


FAMILY: dict[str, Callable[[Decoder], Action]] = {
    "add": _of_either(np.add, np.add),
    "sub": _of_either(np.subtract, np.subtract),
    "mul": _mul,
    "mad": _mad,
    "fma": _fma,
    "div": _of_either(np.divide, _quotient, ("full", "approx")),
    "rem": _of_either(None, np.fmod),
    "neg": _of_either(np.negative, np.negative),
    "abs": _of_either(np.abs, np.abs),
    "min": _extreme(least=True),
    "max": _extreme(least=False),
    "sqrt": _of_either(np.sqrt, None, ("approx",)),
    "rsqrt": _approximated(lambda x: 1 / np.sqrt(x)),
    "rcp": _rcp,
    "ex2": _approximated(np.exp2),
    "lg2": _approximated(np.log2),
    "sin": _approximated(np.sin),
    "cos": _approximated(np.cos),
    "tanh": _approximated(np.tanh),
    "copysign": _copysign,
}
