"""Every kernel with every tile it is shipped with, as ahead-of-time compilation takes it.

What there is to compile is recorded: the host code runs on a small batch for every word of `_words`, and its
launches are written down instead of run. So a new rule or objective is in the catalogue by itself. Both
half-precision types use the same tiles and instructions: float16 is recorded for defaults alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tripletops._call import Call, Differentiated, compute_type
from tripletops._words import (
    DISTANCE,
    FUNCTION,
    LOSS,
    NEGATIVE,
    OBJECTIVE,
    OBJECTIVE_CODE,
    POSITIVE,
    TABLES,
    Codes,
    Function,
    Number,
    Numbers,
)
from tripletops.backends import triton as backend
from tripletops.backends.triton.rows import HALVES
from tripletops.backends.triton.tiles import GPUS, Launch, Recorder
from tripletops.backends.triton.walk import NO_VALUES, Consumer


class Compilation(NamedTuple):
    kernel: str
    variant: str  # what the constants mean
    target: str
    dtype: str  # of the rows
    function: Any
    signature: dict[str, Any]
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]  # by place of the argument: what it is a multiple of
    warps: int
    stages: int
    rows: int  # of a tile of distances; 0: the kernel has none
    columns: int
    products: int  # per pair and dimension
    precision: str
    reason: str
    few_blocks: str  # why fewer than two blocks on an SM will do; empty: they don't


_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
}
_PRODUCTS = {"walk": 1, "weigh": 2}
_DRAWN = next(name for name, word in POSITIVE.items() if word.draws)  # no search has found its picks
_RECORDED = (torch.float32, torch.bfloat16, torch.float64)
ANCHORS, WIDTH, CLASSES = 200, 37, 20  # of the batch: odd, so that nothing is a multiple of 16 by chance


def _word_sets(
    function: Function, dtype: torch.dtype, tried: set[tuple[str, str]]
) -> Iterator[dict[str, str]]:
    """The function's defaults, then every other word that changes a kernel and has not been tried.

    A rule does the same for every objective, a loss for every function of its objective. Of float32 and
    float64 rows, the cosine asks more of a rule: there may be zero rows.
    """
    words = {table.option: word for table, word in function.fixed}
    words |= {choice.name: choice.default or choice.words[0] for choice in function.choices}
    yield words
    for choice in function.choices:
        is_rule = choice.table in (POSITIVE, NEGATIVE)
        if not is_rule and choice.table is not LOSS:
            continue
        where = choice.name if is_rule else function.objective
        new = [word for word in choice.words if (where, word) not in tried and word != words[choice.name]]
        tried |= {(where, word) for word in choice.words}
        for word in new:
            given = words | {choice.name: word}
            if is_rule and dtype not in HALVES:
                given["distance"] = "cosine"
            yield given
            if choice.table[word].needs_positive:
                yield given | {POSITIVE.option: _DRAWN}


def _codes(function: Function, words: dict[str, str]) -> Codes:
    if OBJECTIVE[function.objective].cosine or ("loss" in words and LOSS[words["loss"]].cosine):
        words = words | {"distance": "cosine"}
    codes = {table.option: table.code[words[table.option]] for table in TABLES if table.option in words}
    return Codes(OBJECTIVE_CODE[function.objective], **codes)


def _run(function: Function, words: dict[str, str], dtype: torch.dtype) -> None:
    """Forward and backward of a call whose kernels compute nothing."""
    objective, codes = OBJECTIVE[function.objective], _codes(function, words)
    numbers = {option.name: option for option in function.options() if isinstance(option, Number)}
    defaults = {
        name: number.none if number.default is None else number.default for name, number in numbers.items()
    }
    emb = torch.zeros(ANCHORS, WIDTH, dtype=dtype)
    kind = compute_type(emb)
    call = Call(
        emb=emb,
        labels=torch.arange(ANCHORS) % CLASSES,
        ref_emb=None,
        ref_labels=None,
        self_index=None,
        ignore_label=None,
        seed=torch.zeros((), dtype=torch.int64),
        learned=None if objective.learned is None else torch.zeros(ANCHORS, dtype=kind),
        codes=list(codes),
        numbers=list(Numbers(**defaults)),
    )
    loss, totals, _, _ = backend.loss(*call)
    given = call._asdict()
    del given["seed"]
    backend.gradient(
        *Differentiated(
            grad=torch.ones_like(loss),
            **given,
            totals=totals,
            picks=torch.full((2, ANCHORS), -1),
            saved=torch.zeros((len(objective.saved), ANCHORS), dtype=kind),
            wants_emb=True,
            wants_ref=False,
        )
    )


def _typed(value: Any, place: tuple[int, ...], attributes: dict[tuple[int, ...], list[list[Any]]]) -> Any:
    """The type of an argument as a signature has it; multiples of 16 are noted, as they are at run time."""
    if isinstance(value, tuple):
        parts = [_typed(part, (*place, i), attributes) for i, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, Tensor):
        attributes[place] = [["tt.divisibility", 16]]
        return f"*{_TYPES[value.dtype]}"
    if value % 16 == 0:
        attributes[place] = [["tt.divisibility", 16]]
    return "i32"


def _described(constants: dict[str, Any]) -> str:
    """What a variant does: the names of its device functions, and the distance."""
    words = []
    for name, value in constants.items():
        if isinstance(value, Consumer) and "idle" not in value.take.__name__:
            words.append(f"{name.lower()} {value.take.__name__.strip('_').removeprefix('take_')}")
        elif hasattr(value, "__name__"):
            words.append(value.__name__)
        elif name == "DISTANCE" and value is not None:
            words.append(DISTANCE.coded[value])
        elif name == "RANKS" and value > 1:
            words.append(f"{value} ranks")
        elif name in ("SETTLE", "AS_ANCHOR", "AS_CANDIDATE", "ZERO_ROWS") and value:
            words.append(name.lower())
    return ", ".join(words).replace("_", " ")


def _compilation(target: str, dtype: torch.dtype, launch: Launch) -> Compilation:
    kernel, given, tile, _ = launch
    constants = {param.name: given[param.name] for param in kernel.params if param.is_constexpr}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    signature = {
        param.name: "constexpr" if param.is_constexpr else _typed(given[param.name], (param.num,), attributes)
        for param in kernel.params
    }
    name = kernel.__name__.removesuffix("_kernel")
    has_products = name in _PRODUCTS and constants.get("VALUES") != NO_VALUES.value
    return Compilation(
        kernel=name,
        variant=_described(constants),
        target=target,
        dtype=_TYPES[dtype],
        function=kernel,
        signature=signature,
        constants=constants,
        attributes=attributes,
        warps=tile.warps if tile else 4,
        stages=tile.stages if tile else 1,
        rows=tile.rows if tile and has_products else 0,
        columns=tile.columns if tile and has_products else 0,
        products=_PRODUCTS[name] if has_products else 0,
        precision=tile.precision if tile and has_products else "",
        reason=tile.reason if tile else "",
        few_blocks=tile.few_blocks if tile else "",
    )


def _recorded(dtype: torch.dtype) -> Iterator[Compilation]:
    tried: set[tuple[str, str]] = set()
    for function in FUNCTION.values():
        if function.name == "mine":  # the forward of others
            continue
        for words in _word_sets(function, dtype, tried):
            with Recorder() as recorder:
                _run(function, words, dtype)
            for launch in recorder.launches:
                for target in GPUS if launch.target is None else (launch.target,):
                    yield _compilation(target, dtype, launch)
            if dtype == torch.float16:
                break


@cache
def compilations() -> tuple[Compilation, ...]:
    """One record for every kernel, variant, target, type of the rows and tile."""
    found: dict[Any, Compilation] = {}
    for dtype in (*_RECORDED, torch.float16):
        for record in _recorded(dtype):
            key = (record.target, record.kernel, str(record.signature), tuple(record.constants.items()))
            found.setdefault(key, record)
    return tuple(sorted(found.values(), key=lambda record: GPUS.index(record.target)))
