"""Runs a kernel: its instructions decoded once, its blocks in lockstep.

All threads of several blocks go through a basic block at once. Where a branch divides them, those whose next
instruction comes first in the text go on, until the others are there: so they meet again behind loops and
conditions. Which order that is does not matter to the checks, which know what barriers and atomics order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tests.ptx.decoder import Action, Decoder, Reader
from tests.ptx.faults import FaultError, UnknownInstructionError
from tests.ptx.instructions import arithmetic, conversion, logic, movement, tensor_core, warp
from tests.ptx.memory import Space
from tests.ptx.parser import Instruction, Kernel, Number, Symbol, Vector, parse
from tests.ptx.threads import Threads
from tests.ptx.values import Array, bits_of

FAMILIES: dict[str, Callable[[Decoder], Action]] = {
    **arithmetic.FAMILY,
    **logic.FAMILY,
    **conversion.FAMILY,
    **movement.FAMILY,
    **warp.FAMILY,
    **tensor_core.FAMILY,
}
LEAVES = ("ret", "exit")
THREADS_AT_ONCE = 8192


@dataclass(eq=False)
class Straight:
    """Instructions without a branch among them, and how they end."""

    actions: list[tuple[Instruction, Action]] = field(default_factory=list)
    condition: Reader | None = None  # who takes the branch or leaves; None: all
    target: int | None = None  # of the branch, among the straights; None: there is no branch
    leaves: bool = False


class Program:
    """A kernel that can be launched."""

    def __init__(self, text: str) -> None:
        self.kernel = parse(text)
        self.straights = _straights(self.kernel)
        self.granule = _granule(self.kernel)

    def launch(
        self, grid: tuple[int, int, int], arguments: list[int], tensors: Space, shared_bytes: int = 0
    ) -> None:
        """`arguments` are the parameters in order, pointers as addresses in `tensors`. Parameters beyond them
        are scratch memory, which no kernel here uses: null."""
        names = [parameter.name for parameter in self.kernel.parameters]
        given = dict(zip(names, arguments + [0] * (len(names) - len(arguments)), strict=True))
        blocks = grid[0] * grid[1] * grid[2]
        at_once = max(1, THREADS_AT_ONCE // self.kernel.threads)
        for first in range(0, blocks, at_once):
            some = range(first, min(first + at_once, blocks))
            size = self.kernel.shared_bytes + shared_bytes
            self._run(Threads(self.kernel, grid, some, given, tensors, size, self.granule))

    def _run(self, threads: Threads) -> None:
        # Lanes whose results a mask throws away divide by 0 and overflow at will.
        with np.errstate(all="ignore"):
            paths = Paths(threads)
            while (at := paths.next()) is not None:
                straight = self.straights[at]
                _execute(straight, threads)
                taken = None if straight.condition is None else straight.condition(threads)
                if straight.leaves:
                    paths.leave(at, taken)
                elif straight.target is not None:
                    paths.branch(at, straight.target, taken)
                else:
                    paths.branch(at, at + 1, None)


def _execute(straight: Straight, threads: Threads) -> None:
    instruction: Instruction | None = None
    try:
        for instruction, action in straight.actions:  # noqa: B007  (named where it fails)
            action(threads)
    except FaultError as fault:
        raise FaultError(fault.what, fault.where or str(instruction)) from None


class Paths:
    """Where the threads are. While all are at the same place, `where` is None."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.at = 0
        self.where: Array | None = None

    def next(self) -> int | None:
        """The place of those who go on now; they become the mask."""
        threads = self.threads
        if self.where is None:
            threads.mask = None
            return None if threads.exited.all() else self.at
        self.at = int(self.where.min())
        if threads.exited.all():
            return None
        mask = self.where == self.at
        if mask.all():
            self.where = None
        threads.mask = None if mask.all() else mask
        return self.at

    def branch(self, at: int, target: int, taken: Array | None) -> None:
        mask = self.threads.mask
        if mask is None and (taken is None or taken.all()):
            self.at = target
        elif mask is None and taken is not None and not taken.any():
            self.at = at + 1
        else:
            self._divide(at, np.where(True if taken is None else taken, target, at + 1))

    def leave(self, at: int, taken: Array | None) -> None:
        threads = self.threads
        mask = np.ones(threads.shape, bool) if threads.mask is None else threads.mask
        leaving = mask if taken is None else mask & taken
        threads.exited = threads.exited | leaving
        self._divide(at, np.where(leaving, np.iinfo(np.int64).max, at + 1))

    def _divide(self, at: int, following: Array) -> None:
        threads = self.threads
        where = np.full(threads.shape, at, np.int64) if self.where is None else self.where
        mask = np.ones(threads.shape, bool) if threads.mask is None else threads.mask
        self.where = np.where(mask, following, where)


# Decoding


def _straights(kernel: Kernel) -> list[Straight]:
    instructions = kernel.instructions
    targets = {_target(each) for each in instructions if each.name == "bra"}
    begins = {kernel.labels[label] for label in targets}
    begins |= {place + 1 for place, each in enumerate(instructions) if _ends(each)}
    order = sorted({0, *begins} - {len(instructions)})
    number = {place: index for index, place in enumerate(order)}
    result = []
    for begin, end in zip(order, [*order[1:], len(instructions)], strict=True):
        straight = Straight()
        for instruction in instructions[begin:end]:
            if _ends(instruction):
                straight.condition = _condition(kernel, instruction)
                straight.leaves = instruction.name in LEAVES
                if instruction.name == "bra":
                    straight.target = number[kernel.labels[_target(instruction)]]
            else:
                straight.actions.append((instruction, _decoded(kernel, instruction)))
        result.append(straight)
    return result


def _ends(instruction: Instruction) -> bool:
    return instruction.name == "bra" or instruction.name in LEAVES


def _target(branch: Instruction) -> str:
    (label,) = branch.operands
    assert isinstance(label, Symbol), branch
    return label.name


def _condition(kernel: Kernel, instruction: Instruction) -> Reader | None:
    if instruction.guard is None:
        return None
    predicate = Decoder(kernel, instruction).predicate(instruction.guard)
    return (lambda threads: ~predicate(threads)) if instruction.guard_negated else predicate


def _decoded(kernel: Kernel, instruction: Instruction) -> Action:
    if instruction.name not in FAMILIES:
        raise UnknownInstructionError(str(instruction))
    try:
        action = FAMILIES[instruction.name](Decoder(kernel, instruction))
    except (KeyError, ValueError, IndexError) as error:
        raise UnknownInstructionError(f"{instruction}: {error!r}") from error
    condition = _condition(kernel, instruction)
    return action if condition is None else partial(_guarded, condition, action)


def _guarded(condition: Reader, action: Action, threads: Threads) -> None:
    before, chosen = threads.mask, threads.full(condition(threads))
    mask = chosen if before is None else chosen & before
    if not mask.any():
        return
    threads.mask = None if mask.all() else mask
    action(threads)
    threads.mask = before


def _granule(kernel: Kernel) -> int:
    """The bytes of the smallest access to shared memory: of fewer nobody needs to know who wrote them."""
    sizes = {16}
    for each in kernel.instructions:
        if each.name in ("ld", "st", "atom", "red") and any(
            word.startswith("shared") for word in each.modifiers
        ):
            vectors = [operand for operand in each.operands if isinstance(operand, Vector)]
            sizes.add(bits_of(each.modifiers[-1]) // 8 * max([1, *(len(vector.parts) for vector in vectors)]))
        elif each.name == "cp" and each.operands and len(each.operands) > 2:
            assert isinstance(each.operands[2], Number), each
            sizes.add(each.operands[2].value)
    return min(sizes)
