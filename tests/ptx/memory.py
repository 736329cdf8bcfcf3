"""Memory, and who touched it: a space of bytes that refuses accesses with no defined outcome.

Threads of different warps are ordered by barriers alone, threads of different blocks by nothing but atomics
that release and acquire. So a place that one of them writes may not be read or written by the other: it is a
race in whatever order the emulator happens to run them. Threads of one warp run in lockstep here and as
Triton assumes it.

Each place, a granule of some bytes, remembers who wrote it last and who has read it, as *stamps*: numbers
made of the block, how many barriers it had passed, and the warp. Later stamps of a block are larger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from tests.ptx.faults import FaultError
from tests.ptx.values import UNSIGNED, Array

# A stamp: block · 2³² + epoch · 2⁷ + warp; an epoch is the time between two barriers.
WARPS, EPOCHS = 7, 25
BLOCK = WARPS + EPOCHS
SEVERAL_WARPS = 2**WARPS - 1
ATOMIC = 2**WARPS - 2  # whoever writes by atomics
NOBODY = -1
SEVERAL_BLOCKS = 2**61
IN_FLIGHT = 2**62  # written by an asynchronous copy that nobody has waited for
# (before, which of the threads) → after.
Change: TypeAlias = Callable[[Array, Array], Array]
OUTSIDE, UNWRITTEN, WRITTEN = 0, 1, 2  # the states of a place


def stamp_of(block: Array, epoch: Array, warp: Array) -> Array:
    return (block << BLOCK) + (epoch << WARPS) + warp


class Visitors(NamedTuple):
    """Who makes an access: arrays that broadcast with its places."""

    stamp: Array
    thread: Array  # for messages

    @property
    def epoch(self) -> Array:
        """The smallest stamp of this epoch."""
        return self.stamp >> WARPS << WARPS

    @property
    def block(self) -> Array:
        return self.stamp >> BLOCK


class Access(NamedTuple):
    """What an instruction touches: (threads,) bytes, (threads, granules) places."""

    start: Array
    places: Array
    who: Visitors  # (threads, 1)


class Space:
    """Bytes with the history of their granules; name(byte) says where a byte is."""

    def __init__(
        self, name: Callable[[int], str], data: Array, state: Array, granule: int, blocks: int
    ) -> None:
        self.name, self.data, self.state, self.granule = name, data, state, granule
        self.writer = np.full(len(state), NOBODY, np.int64)
        self.reader = np.full(len(state), NOBODY, np.int64)
        # Up to which epoch a block has acquired what another block, the column, released; made when needed.
        self._blocks = blocks
        self._acquired: Array | None = None
        self._released: dict[int, Array] = {}

    # Accesses

    def access(self, start: Array, size: int, who: Visitors, inside: Array) -> Access:
        """`start` are the first bytes, `inside` whether the space has them."""
        if not inside.all():
            raise FaultError(f"outside of memory: {_threads(who.thread, ~inside)}")
        if (start % size).any():
            crooked = _threads(who.thread, start % size > 0)
            raise FaultError(f"an address is no multiple of {size}: {crooked}")
        first = start // self.granule
        places = first[:, None] + np.arange(max(1, size // self.granule))
        outside = self.state[places] == OUTSIDE
        if outside.any():
            raise FaultError(f"outside of memory: {_threads(who.thread, outside.any(1))}")
        return Access(start, places, Visitors(who.stamp[:, None], who.thread))

    def load(self, access: Access, bits: int, count: int, atomic: bool = False) -> Array:
        """(threads, count) numbers, checked."""
        self.note_read(access, atomic)
        values = self.data.view(UNSIGNED[bits])
        return values[(access.start // (bits // 8))[:, None] + np.arange(count)]

    def store(self, access: Access, numbers: Array, atomic: bool = False) -> None:
        """(threads, count) numbers, checked."""
        shared = self.note_atomic(access, reads=False) if atomic else self.note_write(access)
        values, at = self.data.view(numbers.dtype), (access.start // numbers.dtype.itemsize)[:, None]
        at = at + np.arange(numbers.shape[1])
        values[at] = numbers
        if shared is not None and (values[at] != numbers)[shared.any(1)].any():
            self._fail("write to {} by several warps at once", access, shared)

    def update(self, access: Access, kind: type[np.generic], change: Change) -> Array:
        """What was there before an atomic operation; threads take turns where they share an address."""
        self.note_atomic(access)
        values = self.data.view(kind)
        at = access.start // values.dtype.itemsize
        before = np.empty(len(at), values.dtype)
        left = np.arange(len(at))
        while len(left):
            _, first = np.unique(at[left], return_index=True)
            now = left[first]
            before[now] = values[at[now]]
            values[at[now]] = change(before[now], now)
            left = np.delete(left, first)
        return before

    # What they do to each other

    def note_read(self, access: Access, atomic: bool = False) -> None:
        """An atomic load may meet atomic operations, and then bars nobody."""
        places, who = access.places, access.who
        self._check_written(access)
        writer = self.writer[places]
        if atomic:
            self._check(np.where(_is_atomic(writer), NOBODY, writer), access, "read of {} while {} writes it")
            return
        self._check(writer, access, "read of {} while {} writes it")
        before = self.reader[places]
        here = before >> BLOCK == who.block
        alone = (before == NOBODY) | (before == who.stamp) | (here & (before < who.epoch))
        several = np.where(here, who.epoch + SEVERAL_WARPS, SEVERAL_BLOCKS)
        stamp = np.where(alone, who.stamp, several)
        self.reader[places] = stamp
        # Of several threads that read a place in this very instruction, the last one has left its stamp.
        met = self.reader[places]
        if (met == stamp).all():
            return
        here = met >> BLOCK == who.block
        for mixed, several in (
            ((met != stamp) & here, who.epoch + SEVERAL_WARPS),
            ((met != stamp) & ~here, np.int64(SEVERAL_BLOCKS)),
        ):
            self.reader[places[mixed]] = np.broadcast_to(several, places.shape)[mixed]

    def note_write(self, access: Access) -> Array | None:
        """Where several warps of a block write at once. Triton lets them: they must write the same then."""
        places, who = access.places, access.who
        self._check(self.writer[places], access, "write to {} while {} writes it")
        self._check(self.reader[places], access, "write to {} while {} reads it")
        self.writer[places] = who.stamp
        self.state[places] = WRITTEN
        met = self.writer[places]
        shared: Array = met != who.stamp
        if not shared.any():
            return None
        if (met >> BLOCK != who.block).any():
            self._fail("write to {} while {} writes it", access, met >> BLOCK != who.block, met)
        self.writer[places[shared]] = np.broadcast_to(who.epoch + SEVERAL_WARPS, places.shape)[shared]
        return shared

    def note_atomic(self, access: Access, reads: bool = True) -> None:
        """As a read and a write, which other atomics may share."""
        places, who = access.places, access.who
        if reads:
            self._check_written(access)
        before = self.writer[places]
        atomic = _is_atomic(before)
        others = np.where(atomic, NOBODY, before)
        self._check(others, access, "atomic operation on {} while {} writes it")
        self._check(self.reader[places], access, "atomic operation on {} while {} reads it")
        stamp = np.broadcast_to(who.epoch + ATOMIC, places.shape)
        foreign = atomic & (before >> BLOCK != who.block)
        self.writer[places] = np.where(foreign, SEVERAL_BLOCKS, stamp)
        met = self.writer[places]
        self.writer[places[met >> BLOCK != who.block]] = SEVERAL_BLOCKS
        self.state[places] = WRITTEN

    def _check_written(self, access: Access) -> None:
        unwritten = self.state[access.places] == UNWRITTEN
        if unwritten.any():
            self._fail("read of {} that nobody wrote", access, unwritten)

    def _check(self, stamps: Array, access: Access, message: str) -> None:
        """Whether nobody with these stamps may be at the places at the same time as the visitors."""
        who = access.who
        conflict = (stamps >= who.epoch) & (stamps != who.stamp)
        conflict |= (stamps >> BLOCK < who.block) & (stamps != NOBODY)
        if conflict.any():
            conflict &= ~self._ordered(stamps, who)
        if conflict.any():
            self._fail(message, access, conflict, stamps)

    def _fail(self, message: str, access: Access, wrong: Array, stamps: Array | None = None) -> None:
        thread, place = np.argwhere(wrong)[0]
        byte = self.name(int(access.places[thread, place]) * self.granule)
        block = int(np.broadcast_to(access.who.block, access.places.shape)[thread, 0])
        other = "" if stamps is None else _described(int(stamps[thread, place]), block)
        raise FaultError(message.format(byte, other) + f": {_threads(access.who.thread, wrong.any(1))}")

    # Order by atomics

    def release_and_acquire(self, access: Access, releases: bool, acquires: bool) -> None:
        """Blocks that meet at a place by atomic operations, in the order in which these were made.

        What a block wrote before its last barrier is released.
        """
        if self._acquired is None:
            self._acquired = np.full((self._blocks, self._blocks), NOBODY, np.int64)
        blocks = np.broadcast_to(access.who.block, access.places.shape)[:, 0]
        epochs = np.broadcast_to((access.who.stamp >> WARPS) % 2**EPOCHS, access.places.shape)[:, 0]
        visits = zip(access.places[:, 0].tolist(), blocks.tolist(), epochs.tolist(), strict=True)
        for place, block, epoch in visits:
            known = self._released.setdefault(place, np.full(self._blocks, NOBODY, np.int64))
            if acquires:
                np.maximum(self._acquired[block], known, out=self._acquired[block])
            if releases:
                np.maximum(known, self._acquired[block], out=known)
                known[block] = max(known[block], epoch - 1)

    def _ordered(self, stamps: Array, who: Visitors) -> Array:
        """Whether blocks have acquired what other blocks did with these stamps."""
        if self._acquired is None:
            return np.zeros(stamps.shape, bool)
        block = np.broadcast_to(who.block, stamps.shape)
        other, epoch = stamps >> BLOCK, (stamps >> WARPS) % 2**EPOCHS
        known = (stamps >= 0) & (stamps < SEVERAL_BLOCKS) & (other != block)
        return known & (epoch <= self._acquired[block, np.where(known, other, 0)])

    # Asynchronous copies

    def copy_begins(self, access: Access, numbers: Array) -> None:
        """A write that may happen at any time until it is waited for."""
        self.store(access, numbers)
        self.writer[access.places] = IN_FLIGHT

    def copy_ends(self, places: Array, stamp: Array) -> None:
        """As if it were written now, by those who waited."""
        self.writer[places] = stamp


def _is_atomic(stamps: Array) -> Array:
    return (stamps == SEVERAL_BLOCKS) | ((stamps & SEVERAL_WARPS == ATOMIC) & (stamps != NOBODY))


def _described(stamp: int, block: int) -> str:
    if stamp == IN_FLIGHT:
        return "an asynchronous copy"
    if stamp == SEVERAL_BLOCKS:
        return "several blocks"
    other, warp = stamp >> BLOCK, stamp & SEVERAL_WARPS
    warps = {SEVERAL_WARPS: "several warps", ATOMIC: "an atomic operation"}.get(warp, f"warp {warp}")
    return warps if other == block else f"block {other}"


def _threads(threads: Array, wrong: Array) -> str:
    some = [str(thread) for thread in threads[wrong][:3]]
    return f"thread {', '.join(some)}{' and others' if wrong.sum() > 3 else ''}"
