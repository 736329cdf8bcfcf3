"""The kernels on NumPy arrays, for tests that import neither torch nor the package around the kernels."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

os.environ.setdefault("TRIPLETOPS_POISON", "1")  # the kernels' own memory reads as NaN until it is written

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tripletops"


def load(name: str, path: Path) -> ModuleType:
    """A module without the package around it, which would bring torch."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kernels_file() -> Path:
    named = os.environ.get("TRIPLETOPS_KERNELS_PATH")
    built = sorted(PACKAGE.glob("_kernels.*.so"))
    if not named and not built:
        pytest.skip("the kernels are not built in place", allow_module_level=True)
    return Path(named) if named else built[0]


kernels = load("_kernels", kernels_file())
words = load("tripletops_words", PACKAGE / "_words.py")


class Call(NamedTuple):
    """An objective with its words and numbers; numbers that are left out have their defaults."""

    objective: str
    positive: str = "all"
    negative: str = "all"
    distance: str = "euclidean"
    loss: str = "margin"
    numbers: dict[str, float] = {}  # noqa: RUF012  (never changed)

    def codes(self, reduction: str) -> list[int]:
        codes = words.Codes(
            words.OBJECTIVE_CODE[self.objective],
            words.POSITIVE.code[self.positive],
            words.NEGATIVE.code[self.negative],
            words.DISTANCE.code[self.distance],
            words.LOSS.code[self.loss],
            words.REDUCTION.code[reduction],
        )
        return list(codes)

    def all_numbers(self) -> list[float]:
        """Of the function that has most of them: batch_hard_loss has fewer than triplet_loss."""
        functions = (each for each in words.FUNCTION.values() if each.objective == self.objective)
        options = max((function.options() for function in functions), key=len)
        numbers = {option.name: option.default for option in options if isinstance(option, words.Number)}
        return list(words.Numbers(**{**numbers, **self.numbers}))

    def learned(self) -> float | None:
        learned = words.OBJECTIVE[self.objective].learned
        return None if learned is None else learned.start


class Result(NamedTuple):
    loss: np.ndarray  # (1,), or (N,) for reduction="none"
    totals: np.ndarray
    picks: np.ndarray  # (2, N)
    saved: np.ndarray  # (K, N)
    emb_gradient: np.ndarray
    ref_gradient: np.ndarray | None
    learned_gradient: np.ndarray | None

    def bits(self) -> list[bytes | None]:
        return [None if part is None else part.tobytes() for part in self]


def run(
    isa: str, threads: int, call: Call, *batch: np.ndarray, reduction: str = "mean", **rows: Any
) -> Result:
    """`rows`: ref_emb, ref_labels, self_index, ignore_label and seed, as the module takes them."""
    given = {"codes": call.codes(reduction), "numbers": call.all_numbers(), "learned": call.learned()}
    return Result(*kernels.loss(isa, threads, *batch, **{**given, **rows}))


def triplet(
    positive: str, negative: str, distance: str = "euclidean", loss: str = "margin", **numbers: float
) -> Call:
    """A number of a word that is not chosen keeps its default, as in a call of the public function."""
    chosen = (words.POSITIVE[positive], words.NEGATIVE[negative], words.LOSS[loss])
    used = {number.name for word in chosen for number in word.numbers}
    numbers = {name: value for name, value in numbers.items() if name in used}
    return Call("triplet", positive, negative, distance, loss, numbers)
