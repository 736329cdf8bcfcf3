"""The words of one triplet, with the numbers that their own modules want them to be tried with."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from tests.support.calls import LOSSES, NEGATIVES, POSITIVES, REDUCTIONS, TripletOptions
from tripletops import _words

UNITS = {
    number.name: number.unit for table in _words.TABLES for word in table.values() for number in word.numbers
}


def module_of(table: _words.Table, word: str) -> ModuleType:
    folder = "losses" if table is _words.LOSS else "rules"
    return import_module(f"tests.{folder}.{table[word].rule or word}")


def numbers_of(table: _words.Table, word: str) -> tuple[dict[str, float], ...]:
    return getattr(module_of(table, word), "NUMBERS", ({},)) if table[word].numbers else ({},)


class Rules(NamedTuple):
    positive: str
    negative: str
    numbers: dict[str, float]

    def __str__(self) -> str:
        return "-".join([self.positive, self.negative, *map(str, self.numbers.values())])


RULES = tuple(
    Rules(positive, negative, {**of_positive, **of_negative})
    for positive in POSITIVES
    for negative in NEGATIVES
    for of_positive in numbers_of(_words.POSITIVE, positive)
    for of_negative in numbers_of(_words.NEGATIVE, negative)
)


def sized(numbers: dict[str, float], unit: float) -> dict[str, float]:
    """Distances times `unit`, for rows whose distances are of that size."""
    return {name: value * unit if UNITS[name] == "a distance" else value for name, value in numbers.items()}


def every_option(distance: str, turn: int = 0, unit: float = 1.0) -> list[TripletOptions]:
    """Every loss of the distance with every reduction; the numbers of losses take turns."""
    return [
        TripletOptions(distance, loss, reduction, **sized(numbers[(turn + i) % len(numbers)], unit))
        for loss in LOSSES[distance]
        for numbers in [numbers_of(_words.LOSS, loss)]
        for i, reduction in enumerate(REDUCTIONS)
    ]


def own_checks() -> list[Any]:
    """What a word alone promises, on every backend: its module's ON_EVERY_BACKEND."""
    modules = {
        module.__name__: module
        for table in (_words.POSITIVE, _words.NEGATIVE, _words.LOSS)
        for word in table
        if word != "all"
        for module in [module_of(table, word)]
    }
    return [
        pytest.param(check, id=f"{name.rpartition('.')[2]}-{check.__name__}")
        for name, module in modules.items()
        for check in getattr(module, "ON_EVERY_BACKEND", ())
    ]
