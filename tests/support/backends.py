"""The backends on trial in this process, and what each of them can bear."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from tests.support.batches import Batch
from tests.support.calls import DEVICE
from tripletops.backends import FORCED, INTERPRETED, cpu

Word = TypeVar("Word")
# Whether the GPU's code is executed, by the emulator of tests/ptx. TRIPLETOPS_BACKEND has to be triton, too.
EMULATED = bool(os.environ.get("TRIPLETOPS_TEST_PTX"))


def in_turn(words: Sequence[Word], turn: int, few: int) -> list[Word]:
    """As many words as `few`, other ones at every turn."""
    return [words[(turn * few + i) % len(words)] for i in range(min(few, len(words)))]


@dataclass(frozen=True)
class Backend:
    """What runs the public functions."""

    name: str
    instruction_set: str | None = None  # of the cpu's kernels
    every_word: bool = True  # else words take turns: another batch, other words
    slow: bool = False  # batches have to be small:
    pairs: int = 70 * 70
    width: int = 40

    def __str__(self) -> str:
        return self.instruction_set or self.name

    @contextmanager
    def in_use(self) -> Iterator[None]:
        with nullcontext() if self.instruction_set is None else cpu.using_isa(self.instruction_set):
            yield

    def bears(self, batch: Batch) -> bool:
        """The interpreter needs a second for anything larger; its tiles are of 32 rows, and 16 deep. Those of
        a GPU are of 64 rows and 64 deep."""
        rows, width = batch.emb.shape
        candidates = rows if batch.ref_emb is None else len(batch.ref_emb)
        return not self.slow or (rows * candidates <= self.pairs and width <= self.width)

    def some(self, words: Sequence[Word], turn: int, few: int = 1) -> Sequence[Word]:
        """All of them or, where words take turns, as many as `few`, other ones at every turn."""
        return words if self.every_word else in_turn(words, turn, few)


# Their other functions are those of avx512 and avx2; tests/backends/cpu/test_certified.py tries them.
INTEGERS_ALONE = ("avx512vnni", "avxvnni")


def backends_on_trial() -> list[Backend]:
    """The cpu's best instruction set meets every word, and the others meet each word now and then."""
    if FORCED == "triton" and INTERPRETED:
        return [Backend("triton", every_word=False, slow=True)]
    if FORCED == "triton" and EMULATED:
        return [Backend("triton", every_word=False, slow=True, pairs=200 * 200, width=130)]
    if FORCED not in (None, "cpu") or DEVICE.type != "cpu":
        return [Backend(FORCED or "triton")]
    *others, best = [name for name in cpu.instruction_sets() if name not in INTEGERS_ALONE] or [None]
    return [Backend("cpu", best), *(Backend("cpu", name, every_word=False) for name in reversed(others))]


BACKENDS = backends_on_trial()
SLOW = any(backend.slow for backend in BACKENDS)
