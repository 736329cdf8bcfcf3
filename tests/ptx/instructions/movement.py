"""Between registers, parameters and memory: moves, loads, stores, asynchronous copies, atomic operations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.ptx.decoder import Action, Decoder, Reader, Writer
from tests.ptx.faults import FaultError
from tests.ptx.parser import Address, Symbol, Vector
from tests.ptx.threads import Threads
from tests.ptx.values import TYPES, UNSIGNED, Array, as_bits, bits_of

SPACES = ("global", "shared", "param")
SCOPES = ("cta", "cluster", "gpu", "sys")
CACHED = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc")
ATOMIC_READS = ("relaxed", "acquire", "volatile")
ATOMIC_WRITES = ("relaxed", "release", "volatile")


# Registers


def _mov(decoder: Decoder) -> Action:
    decoder.allow()
    target, source = decoder.operands
    if isinstance(target, Vector):
        return _unpack(decoder, target)
    if isinstance(source, Vector):
        return _pack(decoder, source)
    read, write = decoder.read(1, decoder.type), decoder.write(0)
    return lambda threads: write(threads, read(threads))


def _unpack(decoder: Decoder, target: Vector) -> Action:
    bits = bits_of(decoder.type) // len(target.parts)
    read, wide = decoder.read(1, decoder.type), UNSIGNED[bits_of(decoder.type)]
    writers = [decoder.write(part) for part in target.parts]

    def run(threads: Threads) -> None:
        value = read(threads)
        for place, write in enumerate(writers):
            write(threads, (value >> wide(bits * place)).astype(UNSIGNED[bits]))

    return run


def _pack(decoder: Decoder, source: Vector) -> Action:
    bits = bits_of(decoder.type) // len(source.parts)
    readers, write = [decoder.read(part, f"b{bits}") for part in source.parts], decoder.write(0)
    wide = UNSIGNED[bits_of(decoder.type)]

    def run(threads: Threads) -> None:
        value: Array = np.zeros((1, 1), wide)
        for place, read in enumerate(readers):
            value = value | read(threads).astype(wide) << wide(bits * place)
        write(threads, value)

    return run


# Loads and stores


def _space(decoder: Decoder) -> str:
    found = [each.split("::")[0] for each in decoder.modifiers if each.split("::")[0] in SPACES]
    if len(found) != 1:
        raise decoder.unknown("memory of no known kind")
    return found[0]


def _allow_access(decoder: Decoder, *modifiers: str) -> None:
    hints = (each for each in decoder.modifiers if each.startswith(("L1::", "L2::")))
    words = ("shared::cta", "weak", "v2", "v4", *SPACES, *SCOPES, *CACHED)
    decoder.allow(*words, *hints, *modifiers)


def _ld(decoder: Decoder) -> Action:
    _allow_access(decoder, *ATOMIC_READS)
    space, kind = _space(decoder), decoder.type
    if space == "param":
        return _parameter(decoder)
    if len(decoder.operands) != 2:
        raise decoder.unknown("a cache policy")
    writers = [decoder.write(part, signed=kind.startswith("s")) for part in decoder.parts(0)]
    address, bits = decoder.address(1), bits_of(kind)
    size = bits // 8 * len(writers)
    atomic, acquires = any(decoder.has(each) for each in ATOMIC_READS), decoder.has("acquire")

    def run(threads: Threads) -> None:
        memory, access = threads.access(space, address(threads), size)
        numbers = memory.load(access, bits, len(writers), atomic)
        if acquires:
            memory.release_and_acquire(access, releases=False, acquires=True)
        for place, write in enumerate(writers):
            write(threads, threads.spread(numbers[:, place]))

    return run


def _parameter(decoder: Decoder) -> Action:
    address, write = decoder.operands[1], decoder.write(0, signed=decoder.type.startswith("s"))
    assert isinstance(address, Address), decoder.instruction
    if not isinstance(address.base, Symbol) or address.offset:
        raise decoder.unknown("a part of a parameter")
    name, bits = address.base.name, bits_of(decoder.type)

    def run(threads: Threads) -> None:
        write(threads, np.full((1, 1), threads.arguments[name] & (2**bits - 1), UNSIGNED[bits]))

    return run


def _st(decoder: Decoder) -> Action:
    _allow_access(decoder, *ATOMIC_WRITES)
    space, kind = _space(decoder), decoder.type
    if len(decoder.operands) != 2:
        raise decoder.unknown("a cache policy")
    readers = [decoder.read(part, kind) for part in decoder.parts(1)]
    address, size = decoder.address(0), bits_of(kind) // 8 * len(readers)
    atomic, releases = any(decoder.has(each) for each in ATOMIC_WRITES), decoder.has("release")

    def run(threads: Threads) -> None:
        memory, access = threads.access(space, address(threads), size)
        numbers = np.stack([threads.active(read(threads)) for read in readers], 1)
        memory.store(access, numbers, atomic)
        if releases:
            memory.release_and_acquire(access, releases=True, acquires=False)

    return run


# Asynchronous copies


def _cp(decoder: Decoder) -> Action:
    if decoder.modifiers[0] != "async" or decoder.has("bulk"):
        raise decoder.unknown()
    if decoder.has("commit_group"):
        return lambda threads: threads.copies.commit()
    if decoder.has("wait_all"):
        return lambda threads: (threads.copies.commit(), threads.copies.wait(0))[1]
    if decoder.has("wait_group"):
        unfinished = decoder.read(0, "u32")
        return lambda threads: threads.copies.wait(int(unfinished(threads)[0, 0]))
    hints = (each for each in decoder.modifiers if each.startswith("L2::"))
    decoder.allow("async", "ca", "cg", "shared", "shared::cta", "global", *hints, types=0)
    return _copy(decoder)


def _copy(decoder: Decoder) -> Action:
    """Of so many bytes; the fourth operand says how many there are, the others are zeros."""
    if len(decoder.operands) > 4:
        raise decoder.unknown("a cache policy")
    target, source = decoder.address(0), decoder.address(1)
    bits = decoder.read(2, "u32")
    given: Reader = decoder.read(3, "u32") if len(decoder.operands) > 3 else bits

    def run(threads: Threads) -> None:
        size = int(bits(threads)[0, 0])
        there = threads.active(given(threads))
        if ((there != 0) & (there != size)).any():
            raise decoder.unknown("a part of what is to be copied")
        numbers = np.zeros((len(there), size // 4), np.uint32)
        whole = there != 0
        if whole.any():
            numbers[whole] = _loaded(threads, threads.active(source(threads)), whole, size)
        threads.copies.start(threads.shared_access(target(threads), size), numbers)

    return run


def _loaded(threads: Threads, start: Array, chosen: Array, size: int) -> Array:
    """What lies at some of the addresses of those that take part."""
    before = threads.mask
    mask = np.zeros(threads.shape, bool)
    mask[np.ones(threads.shape, bool) if before is None else before] = chosen
    whole = np.zeros(threads.shape, np.int64)
    whole[mask] = start[chosen]
    threads.mask = mask
    try:
        return threads.tensors.load(threads.global_access(whole, size), 32, size // 4)
    finally:
        threads.mask = before


# Atomic operations

ATOMIC: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda before, new: new,
    "cas": lambda before, expected, new: np.where(before == expected, new, before),
    "inc": lambda before, limit: np.where(before >= limit, 0, before + 1).astype(before.dtype),
    "dec": lambda before, limit: np.where((before == 0) | (before > limit), limit, before - 1).astype(
        before.dtype
    ),
}


def _atom(decoder: Decoder) -> Action:
    return _atomic(decoder, decoder.write(0), 1)


def _red(decoder: Decoder) -> Action:
    return _atomic(decoder, lambda threads, value: None, 0)


def _atomic(decoder: Decoder, write: Writer, place: int) -> Action:
    orders = ("relaxed", "acquire", "release", "acq_rel")
    decoder.allow(*orders, *SCOPES, "global", "shared", "shared::cta", "noftz", *ATOMIC)
    operation = next((ATOMIC[each] for each in decoder.modifiers if each in ATOMIC), None)
    kind = decoder.type
    if operation is None or kind.endswith("x2") or kind == "bf16":
        raise decoder.unknown("of this type")
    space = "shared" if any(each.startswith("shared") for each in decoder.modifiers) else "global"
    address = decoder.address(place)
    readers = [decoder.typed(i, kind) for i in range(place + 1, len(decoder.operands))]
    releases = decoder.has("release") or decoder.has("acq_rel")
    acquires = decoder.has("acquire") or decoder.has("acq_rel")

    def run(threads: Threads) -> None:
        memory, access = threads.access(space, address(threads), bits_of(kind) // 8)
        operands = [threads.active(read(threads)) for read in readers]
        before = memory.update(
            access, TYPES[kind], lambda before, who: operation(before, *(each[who] for each in operands))
        )
        if releases or acquires:
            memory.release_and_acquire(access, releases, acquires)
        write(threads, threads.spread(as_bits(before)))

    return run


def _fence(decoder: Decoder) -> Action:
    """Accesses are made in order here; who may rely on that, `memory` decides by barriers and atomics."""
    return lambda threads: None


def _trap(decoder: Decoder) -> Action:
    def run(threads: Threads) -> None:
        raise FaultError("the kernel gave up (trap)")

    return run


FAMILY: dict[str, Callable[[Decoder], Action]] = {
    "mov": _mov,
    "ld": _ld,
    "st": _st,
    "cp": _cp,
    "atom": _atom,
    "red": _red,
    "membar": _fence,
    "fence": _fence,
    "trap": _trap,
}
