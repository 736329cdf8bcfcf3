"""Compiled kernels with one instruction changed: the emulator has to find what each change breaks.

What is changed is what the compiler could get wrong and nobody would see: barriers, waits for copies,
addresses. A wrong number is for the tests against the oracle to find.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch

import tripletops as T
from tests.ptx.driver import emulated
from tests.ptx.faults import FaultError
from tests.support.calls import bits

Change = Callable[[str], str]
ROWS, WIDTH = 128, 64  # several tiles, and several trips through the loop over dimensions


def rows() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def step(loss: Callable[..., Any]) -> list[bytes]:
    """Forward and backward, four rows of each class."""
    emb = rows().requires_grad_()
    value = loss(emb, torch.arange(ROWS) // 4, backend="triton")
    value.backward()
    assert emb.grad is not None
    return bits(value.detach(), emb.grad)


def mined() -> list[bytes]:
    return bits(*T.mine(rows(), torch.arange(ROWS) // 4, positive="hard", negative="hard", backend="triton"))


CALLS: dict[str, Callable[[], list[bytes]]] = {
    "walk_kernel": mined,
    "measure_kernel": mined,
    "pull_kernel": partial(step, T.batch_hard_loss),
    "weigh_kernel": partial(step, partial(T.batch_all_loss, margin=5.0)),
}


def replaced(kernel: str, pattern: str, number: int, by: str) -> Change:
    """Another text for the so-and-so-many-th place in that kernel where the pattern is."""

    def change(code: str) -> str:
        if f".entry {kernel}(" not in code:
            return code
        place = [*re.finditer(pattern, code)][number]
        return code[: place.start()] + place.expand(by) + code[place.end() :]

    return change


@cache
def compiled(kernel: str) -> tuple[str, list[bytes]]:
    """The PTX of that kernel, and what the call gives that launches it."""
    seen: list[str] = []

    def watch(code: str) -> str:
        seen.append(code)
        return code

    with emulated() as emulator:
        emulator.change = watch
        result = CALLS[kernel]()
    return next(code for code in seen if f".entry {kernel}(" in code), result


def fault_of(kernel: str, change: Change) -> str | None:
    """What the emulator says of the changed kernel; or that its results are others."""
    _, expected = compiled(kernel)
    with emulated() as emulator:
        emulator.change = change
        try:
            return None if CALLS[kernel]() == expected else "other results"
        except FaultError as fault:
            return str(fault)


def count(kernel: str, pattern: str) -> int:
    return len(re.findall(pattern, compiled(kernel)[0]))


def runs(kernel: str, pattern: str, number: int) -> bool:
    """Whether the call comes to that place at all."""
    return "gave up" in (fault_of(kernel, replaced(kernel, pattern, number, "trap;")) or "")


LINE = r"(?<=\n)[^\n]*"  # up to what follows
BARRIER, WAIT = r"bar\.sync\s+0;", r"cp\.async\.wait_group\s+(\d+);"
ACCESS = r"((?:ld|st)\.(?:global|shared)|ldmatrix|cp\.async\.c)(\.?[^;\[]*\[\s*%\w+)(?: *\+ *\d+)?(\s*\])"


@pytest.mark.parametrize(
    ("kernel", "every"), [("walk_kernel", 1), ("measure_kernel", 1), ("weigh_kernel", 11)]
)
def test_a_dropped_barrier(kernel, every):
    """A barrier that the call does not come to is not missed."""
    found = 0
    for number in range(0, count(kernel, BARRIER), every):
        fault = fault_of(kernel, replaced(kernel, BARRIER, number, ""))
        if fault is None:
            assert not runs(kernel, BARRIER, number), number
        else:
            assert re.search("shared memory while .* (reads|writes) it", fault), fault
            found += 1
    assert found


@pytest.mark.parametrize("kernel", ["walk_kernel", "weigh_kernel"])
def test_a_weakened_wait_for_copies(kernel):
    assert count(kernel, WAIT)
    for number in range(count(kernel, WAIT)):
        fault = fault_of(kernel, replaced(kernel, WAIT, number, "cp.async.wait_group 7;"))
        assert fault is not None, number
        assert "while an asynchronous copy writes it" in fault


@pytest.mark.parametrize("kernel", ["walk_kernel", "pull_kernel"])
def test_a_shifted_address(kernel):
    """By 64 bytes: outside of its tensor or array, or where others are, or where other numbers are."""
    for number in range(0, count(kernel, ACCESS), 10):
        change = replaced(kernel, ACCESS, number, r"\1\2 + 64\3")
        assert fault_of(kernel, change) is not None or not runs(kernel, LINE + ACCESS, number), number
