"""What the lanes of a warp do together, and barriers. Lanes that have diverged must not meet these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.decoder import Action, Decoder, Reader
from tests.ptx.faults import FaultError
from tests.ptx.parser import Vector
from tests.ptx.threads import LANES, Threads
from tests.ptx.values import TYPES, Array, as_bits

LANE = np.arange(LANES, dtype=np.int64)[None]


def _by_warp(threads: Threads, read: Reader) -> Array:
    return threads.by_warp(read(threads))


def _shfl(decoder: Decoder) -> Action:
    """The value of another lane; the own one where there is none, as the second result says."""
    decoder.allow("sync", "bfly", "idx", "up", "down")
    (mode,) = (each for each in decoder.modifiers if each in ("bfly", "idx", "up", "down"))
    target = decoder.operands[0]
    writers = [decoder.write(part) for part in (target.parts if isinstance(target, Vector) else (target,))]
    value, by, clamp, members = (decoder.read(place, "b32") for place in (1, 2, 3, 4))

    def run(threads: Threads) -> None:
        threads.whole_warps(members(threads))
        values, distance, limits = (_by_warp(threads, read) for read in (value, by, clamp))
        segment, most = (limits >> np.uint32(8)).astype(np.int64) & 31, limits.astype(np.int64) & 31
        distance = distance.astype(np.int64) & 31
        first = LANE & segment
        last = first | most & ~segment
        source = {
            "bfly": LANE ^ distance,
            "idx": first | distance & ~segment,
            "up": LANE - distance,
            "down": LANE + distance,
        }[mode]
        inside = source >= last if mode == "up" else source <= last
        source = np.where(inside, source, LANE)
        results = [np.take_along_axis(values, np.broadcast_to(source, values.shape), 1), inside]
        for write, result in zip(writers, results, strict=False):
            write(threads, threads.by_block(np.ascontiguousarray(np.broadcast_to(result, values.shape))))

    return run


REDUCTIONS: dict[str, Any] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _redux(decoder: Decoder) -> Action:
    decoder.allow("sync", *REDUCTIONS)
    (operation,) = (REDUCTIONS[each] for each in decoder.modifiers if each in REDUCTIONS)
    value, members, write = decoder.read(1, decoder.type), decoder.read(2, "b32"), decoder.write(0)
    numbers = TYPES[decoder.type]

    def run(threads: Threads) -> None:
        threads.whole_warps(members(threads))
        values = _by_warp(threads, value).view(numbers)
        total = operation.reduce(values, axis=1, keepdims=True).astype(numbers)
        write(threads, as_bits(threads.by_block(np.repeat(total, LANES, 1))))

    return run


def _vote(decoder: Decoder) -> Action:
    decoder.allow("sync", "all", "any", "uni", "ballot")
    (mode,) = (each for each in decoder.modifiers if each in ("all", "any", "uni", "ballot"))
    predicate, members, write = decoder.predicate(1), decoder.read(2, "b32"), decoder.write(0)

    def run(threads: Threads) -> None:
        threads.whole_warps(members(threads))
        votes = _by_warp(threads, predicate)
        every, some = votes.all(1, keepdims=True), votes.any(1, keepdims=True)
        ballot = (votes.astype(np.uint32) << LANE.astype(np.uint32)).sum(1, keepdims=True, dtype=np.uint32)
        result = {"all": every, "any": some, "uni": every | ~some, "ballot": ballot}[mode]
        write(threads, threads.by_block(np.repeat(result, LANES, 1)))

    return run


def _activemask(decoder: Decoder) -> Action:
    write = decoder.write(0)

    def run(threads: Threads) -> None:
        mask = threads.by_warp(np.ones((1, 1), bool) if threads.mask is None else threads.mask)
        bits = (mask.astype(np.uint32) << LANE.astype(np.uint32)).sum(1, keepdims=True, dtype=np.uint32)
        write(threads, threads.by_block(np.repeat(bits, LANES, 1)))

    return run


def _bar(decoder: Decoder) -> Action:
    decoder.allow("sync", "warp", "cta", "aligned", types=0)
    if decoder.has("warp"):
        members = decoder.read(0, "b32")
        return lambda threads: (threads.whole_warps(members(threads)), None)[1]
    number = decoder.read(0, "u32")
    count = decoder.read(1, "u32") if len(decoder.operands) > 1 else None

    def run(threads: Threads) -> None:
        if number(threads).any() or (count is not None and (count(threads) != threads.shape[1]).any()):
            raise FaultError("a barrier of a part of the block")
        threads.barrier()

    return run


FAMILY: dict[str, Callable[[Decoder], Action]] = {
    "shfl": _shfl,
    "redux": _redux,
    "vote": _vote,
    "activemask": _activemask,
    "bar": _bar,
    "barrier": _bar,
}
