"""Bits, shifts, comparisons and choices."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from tests.ptx.decoder import Action, Decoder, Reader
from tests.ptx.instructions.arithmetic import floats_of, is_float
from tests.ptx.parser import Vector
from tests.ptx.threads import Threads
from tests.ptx.values import Array, as_bits, bits_of, flushed, shifted_left, shifted_right

LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def _logic(decoder: Decoder) -> Action:
    decoder.allow()
    operation, kind = LOGIC[decoder.instruction.name], decoder.type
    a, b, write = decoder.read(1, kind), decoder.read(2, kind), decoder.write(0)
    return lambda threads: write(threads, operation(a(threads), b(threads)))


def _not(decoder: Decoder) -> Action:
    decoder.allow()
    a, write = decoder.read(1, decoder.type), decoder.write(0)
    return lambda threads: write(threads, ~a(threads))


def _lop3(decoder: Decoder) -> Action:
    """Any function of three bits: bit 4a + 2b + c of the table is its value."""
    decoder.allow()
    readers = [decoder.read(place, decoder.type) for place in (1, 2, 3)]
    table, write = decoder.read(4, "b32"), decoder.write(0)

    def run(threads: Threads) -> None:
        bits, entries = [read(threads) for read in readers], int(table(threads)[0, 0])
        chosen = [
            reduce(np.bitwise_and, (x if case >> (2 - i) & 1 else ~x for i, x in enumerate(bits)))
            for case in range(8)
            if entries >> case & 1
        ]
        write(threads, reduce(np.bitwise_or, chosen, np.zeros((1, 1), np.uint32)))

    return run


def _shift(move: Callable[[Array, Array], Array]) -> Callable[[Decoder], Action]:
    def decode(decoder: Decoder) -> Action:
        decoder.allow()
        a, by, write = decoder.typed(1, decoder.type), decoder.read(2, "u32"), decoder.write(0)
        return lambda threads: write(threads, as_bits(move(a(threads), by(threads))))

    return decode


def _shf(decoder: Decoder) -> Action:
    """32 bits out of two registers, the lower one first."""
    decoder.allow("l", "r", "wrap", "clamp")
    low, high, by, write = *(decoder.read(place, "b32") for place in (1, 2, 3)), decoder.write(0)
    left, wraps = decoder.has("l"), decoder.has("wrap")

    def run(threads: Threads) -> None:
        both = high(threads).astype(np.uint64) << np.uint64(32) | low(threads)
        count = by(threads) & np.uint32(31) if wraps else np.minimum(by(threads), np.uint32(32))
        moved = both << count.astype(np.uint64) >> np.uint64(32) if left else both >> count.astype(np.uint64)
        write(threads, moved.astype(np.uint32))

    return run


def _bfe(decoder: Decoder) -> Action:
    """A field of bits; of a signed type, its highest bit is the sign."""
    decoder.allow()
    kind = decoder.type
    a, write = decoder.typed(1, kind), decoder.write(0)
    at, count = _field(decoder, 2)

    def run(threads: Threads) -> None:
        unused = np.maximum(bits_of(kind) - count(threads).astype(np.int64), 0)
        moved = shifted_right(a(threads), at(threads))
        write(threads, as_bits(shifted_right(shifted_left(moved, unused), unused)))

    return run


def _field(decoder: Decoder, place: int) -> list[Reader]:
    """Where a field begins, and how many bits it has."""
    readers = [decoder.read(place + i, "u32") for i in range(2)]
    return [lambda threads, read=read: read(threads) & np.uint32(0xFF) for read in readers]


def _bfi(decoder: Decoder) -> Action:
    """A field of bits put into another number."""
    decoder.allow()
    a, b = decoder.read(1, decoder.type), decoder.read(2, decoder.type)
    (at, count), write = _field(decoder, 3), decoder.write(0)

    def run(threads: Threads) -> None:
        ones = np.full((1, 1), -1).astype(a(threads).dtype)
        field = shifted_left(~shifted_left(ones, count(threads)), at(threads))
        moved = shifted_left(a(threads), at(threads))
        write(threads, (moved & field) | (b(threads) & ~field))

    return run


def _prmt(decoder: Decoder) -> Action:
    """Four bytes out of eight; a selector of 8 and more copies the sign of a byte."""
    decoder.allow()
    a, b, selector, write = *(decoder.read(place, "b32") for place in (1, 2, 3)), decoder.write(0)

    def run(threads: Threads) -> None:
        both = b(threads).astype(np.uint64) << np.uint64(32) | a(threads)
        chosen, result = selector(threads), np.zeros((1, 1), np.uint32)
        for place in range(4):
            nibble = chosen >> np.uint32(4 * place) & np.uint32(15)
            byte = (both >> (nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8) & np.uint64(255)).astype(
                np.uint32
            )
            sign = np.where(byte >= 128, np.uint32(255), np.uint32(0))
            result = result | np.where(nibble >= 8, sign, byte) << np.uint32(8 * place)
        write(threads, result)

    return run


def _count(function: Callable[[Array, int], Array], in_32_bits: bool = True) -> Callable[[Decoder], Action]:
    def decode(decoder: Decoder) -> Action:
        decoder.allow()
        bits = bits_of(decoder.type)
        a, write = decoder.read(1, decoder.type), decoder.write(0)

        def run(threads: Threads) -> None:
            result = function(a(threads), bits)
            write(threads, result.astype(np.uint32) if in_32_bits else result)

        return run

    return decode


def _places(values: Array, bits: int) -> Array:
    """(bits, …) each bit, the lowest one first."""
    return np.stack([values >> values.dtype.type(place) & values.dtype.type(1) for place in range(bits)])


def _popc(values: Array, bits: int) -> Array:
    return _places(values, bits).sum(0)


def _clz(values: Array, bits: int) -> Array:
    return np.where(values == 0, bits, _places(values, bits)[::-1].argmax(0))


def _brev(values: Array, bits: int) -> Array:
    ones = _places(values, bits)
    return reduce(
        np.bitwise_or, (one << values.dtype.type(bits - 1 - place) for place, one in enumerate(ones))
    )


# Comparisons. Those that end in u are true of NaN, the others are not; lo, ls, hi, hs are of unsigned ones.

ORDERS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
UNSIGNED_ORDERS = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def _compared(word: str, a: Array, b: Array) -> Array:
    if a.dtype.kind != "f":
        return ORDERS[UNSIGNED_ORDERS.get(word, word)](a, b)
    if word in ("lt", "le", "gt", "ge", "eq"):  # numpy's are false of NaN, too
        return ORDERS[word](a, b)
    unordered = np.isnan(a) | np.isnan(b)
    if word in ("num", "nan"):
        return ~unordered if word == "num" else unordered
    if word == "ne":
        return ~unordered & (a != b)
    return unordered | ORDERS[word.removesuffix("u")](a, b)


COMPARISONS = {*ORDERS, *UNSIGNED_ORDERS, *(f"{order}u" for order in ORDERS), "num", "nan"}


def _comparison(decoder: Decoder) -> Callable[[Threads], Array]:
    kind, word = decoder.type, decoder.modifiers[0]
    if word not in COMPARISONS:
        raise decoder.unknown(f"comparison {word}")
    flushes = decoder.has("ftz")
    a, b = decoder.read(1, kind), decoder.read(2, kind)
    if not is_float(kind):
        x, y = decoder.typed(1, kind), decoder.typed(2, kind)
        return lambda threads: _compared(word, x(threads), y(threads))

    def run(threads: Threads) -> Array:
        numbers = [floats_of(kind, read(threads)) for read in (a, b)]
        return _compared(word, *(flushed(each) if flushes else each for each in numbers))

    return run


def _setp(decoder: Decoder) -> Action:
    """One predicate or two, the second one of the opposite; both combined with a further predicate."""
    decoder.allow(decoder.modifiers[0], "ftz", *LOGIC)
    compare = _comparison(decoder)
    combine = next((LOGIC[each] for each in decoder.modifiers if each in LOGIC), None)
    given = decoder.predicate(3) if combine is not None else None
    target = decoder.operands[0]
    writers = [decoder.write(part) for part in (target.parts if isinstance(target, Vector) else (target,))]

    def run(threads: Threads) -> None:
        result = compare(threads)
        results = [result, ~result][: len(writers)]
        if combine is not None and given is not None:
            results = [combine(each, given(threads)) for each in results]
        for write, each in zip(writers, results, strict=True):
            write(threads, each)

    return run


def _set(decoder: Decoder) -> Action:
    """The comparison as a number: all bits of an integer, or 1.0."""
    decoder.allow(decoder.modifiers[0], "ftz", types=2)
    compare, write, kind = _comparison(decoder), decoder.write(0), decoder.modifiers[-2]
    true = {"f32": 0x3F800000}.get(kind, 0xFFFFFFFF)
    return lambda threads: write(threads, np.where(compare(threads), np.uint32(true), np.uint32(0)))


def _selp(decoder: Decoder) -> Action:
    decoder.allow()
    a, b = decoder.read(1, decoder.type), decoder.read(2, decoder.type)
    predicate, write = decoder.predicate(3), decoder.write(0)
    return lambda threads: write(threads, np.where(predicate(threads), a(threads), b(threads)))


FAMILY: dict[str, Callable[[Decoder], Action]] = {
    **dict.fromkeys(LOGIC, _logic),
    "not": _not,
    "lop3": _lop3,
    "shl": _shift(shifted_left),
    "shr": _shift(shifted_right),
    "shf": _shf,
    "bfe": _bfe,
    "bfi": _bfi,
    "prmt": _prmt,
    "popc": _count(_popc),
    "clz": _count(_clz),
    "brev": _count(_brev, in_32_bits=False),
    "setp": _setp,
    "set": _set,
    "selp": _selp,
}
