"""Every public function and module by name, with what may be given to it: all of it from `_words`.

A module is wrapped into a function: its options go to the constructor, a batch goes to the call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, nan
from typing import Any

import numpy as np
import torch

import tripletops as T
from tripletops._signatures import row_arguments
from tripletops._words import (
    ABOVE_ZERO,
    FINITE,
    FROM_ZERO,
    FUNCTION,
    LIMIT,
    OBJECTIVE,
    Function,
    Number,
    Range,
)
from tripletops.backends import REGISTRY

Callables = dict[str, Callable[..., Any]]

RECORDS: dict[str, Function] = {
    **FUNCTION,
    **{f"nn.{record.module}": record for record in FUNCTION.values() if record.module},
}


def as_function(module: Callable[..., torch.nn.Module], record: Function) -> Callable[..., Any]:
    """Options go to the constructor, rows to the call."""
    row_names = [argument.name for argument in row_arguments(record)]

    def call(emb: Any, labels: Any, **arguments: Any) -> Any:
        rows = {name: arguments.pop(name) for name in row_names if name in arguments}
        return module(**arguments)(emb, labels, **rows)

    return call


def plain_rules(record: Function) -> dict[str, str]:
    """A rule where the function asks for one, or is random by default: that leaves nothing to compare."""
    return {
        choice.name: "hard"
        for choice in record.choices
        if choice.required or (choice.default is not None and choice.table[choice.default].draws)
    }


def _callable(name: str, record: Function) -> Callable[..., Any]:
    learned, rules = OBJECTIVE[record.objective].learned, plain_rules(record)
    if name.startswith("nn."):
        return as_function(partial(getattr(T.nn, record.module), **rules), record)
    start = {} if learned is None else {learned.name: learned.start}
    return partial(getattr(T, name), **rules, **start)


FUNCTIONS: Callables = {name: _callable(name, record) for name, record in RECORDS.items()}


def those(condition: Callable[[Function], bool]) -> Callables:
    return {name: FUNCTIONS[name] for name, record in RECORDS.items() if condition(record)}


def words_of(record: Function, option: str) -> tuple[str, ...]:
    """The words that a caller may choose from; none where there is no such option."""
    return next((choice.words for choice in record.choices if choice.name == option), ())


def numbers_of(record: Function) -> list[Number]:
    return [option for option in record.options() if isinstance(option, Number)]


LOSSES = those(lambda record: "reduction" in {choice.name for choice in record.choices})
DRAWING = those(lambda record: record.draws)
TRIPLET_LOSSES = {name: LOSSES[name] for name in LOSSES if RECORDS[name].objective == "triplet"}
PAIRS = those(lambda record: "all" in words_of(record, "negative"))

# What a number must not be, with the text that names it in the refusal.
REFUSED: dict[Range, list[tuple[Any, str]]] = {
    FROM_ZERO: [
        (nan, "nan"),
        (-0.1, "-0.1"),
        (-1, "-1"),
        (inf, "inf"),
        (-inf, "-inf"),
        (10**400, "inf"),
        (np.float32(nan), "nan"),
    ],
    FINITE: [(nan, "nan"), (inf, "inf"), (-inf, "-inf"), (10**400, "inf"), (np.float64(inf), "inf")],
    LIMIT: [(nan, "nan"), (0.0, "0.0"), (-0.1, "-0.1"), (-inf, "-inf")],
}
REFUSED[ABOVE_ZERO] = [*REFUSED[FROM_ZERO], (0, "0"), (0.0, "0.0"), (-0.0, "-0.0")]

# Of each function: its numbers with what they must not be, and its options with their words.
NUMBERS: dict[str, dict[str, list[tuple[Any, str]]]] = {
    name: {number.name: REFUSED[number.range] for number in numbers_of(record)}
    for name, record in RECORDS.items()
}
WORDS: dict[str, dict[str, tuple[str, ...]]] = {
    name: {**{choice.name: choice.words for choice in record.choices}, "backend": tuple(REGISTRY)}
    for name, record in RECORDS.items()
}

# Labels of batches that have nothing to learn from.
DEGENERATE = {
    "N = 0": [],
    "N = 1": [3],
    "one class": [2, 2, 2, 2],
    "all classes distinct": [0, 1, 2, 3],
}
