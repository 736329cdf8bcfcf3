"""Every kernel with every tile it is shipped with, as ahead-of-time compilation takes it.

The variants are those that need the most registers: rules, costs and distances that do less are left out.
Both half-precision types use the same tiles and instructions: float16 is compiled once for each product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tripletops.backends.triton import kernels
from tripletops.backends.triton.tiles import DEPTH, MEASURED, OWNERS, PAIRS, RANKS, SCORED, TILES, Tile


class Compilation(NamedTuple):
    kernel: str
    variant: str  # what the constants mean
    target: str
    dtype: str  # of the rows
    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]  # arguments that are multiples of 16
    warps: int
    stages: int
    rows: int  # of a tile of distances; 0: the kernel has none
    columns: int
    products: int  # per pair and dimension
    precision: str
    reason: str
    few_blocks: str  # why fewer than two blocks on an SM will do; empty: they don't


class Variant(NamedTuple):
    kernel: str
    what: str
    constants: dict[str, Any]
    types: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float64)  # of the rows


_ALL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NORMALISED = (torch.float32, torch.float64)  # half-precision rows are normalised in float32
_WALK = {"ZERO_ROWS": True}
_BOTH = {"AS_ANCHOR": True, "AS_CANDIDATE": True}
_COSINE = {"DISTANCE": 2, **_WALK}

VARIANTS = [
    Variant(
        "select",
        "hard + hard",
        {"POSITIVE": kernels.FARTHEST.value, "NEGATIVE": kernels.NEAREST.value, "RANKS": 1, **_WALK},
        _ALL,
    ),
    Variant(
        "select",
        "beyond floors",
        {"POSITIVE": kernels.NOTHING.value, "NEGATIVE": kernels.BEYOND.value, "RANKS": RANKS, **_WALK},
    ),
    Variant("draw", "uniform", {"POSITIVES": False, "BY_DISTANCE": False, **_WALK}),
    Variant("draw", "by distance", {"POSITIVES": False, "BY_DISTANCE": True, **_WALK}, _NORMALISED),
    Variant("cost", "hinge", {"SOFTPLUS": False, "RANKS": RANKS, "DISTANCE": 0, **_WALK}),
    Variant("cost", "soft margin", {"SOFTPLUS": True, "RANKS": RANKS, "DISTANCE": 0, **_WALK}),
    Variant("similarity", "cosine", _WALK, _NORMALISED),
    Variant("weigh", "hinge", {"COST": kernels.HINGE.value, "DISTANCE": 0, **_BOTH, **_WALK}, _ALL),
    Variant("weigh", "soft margin", {"COST": kernels.SOFT.value, "DISTANCE": 0, **_BOTH, **_WALK}),
    Variant("weigh", "exponential", {"COST": kernels.EXPONENTIAL.value, **_BOTH, **_COSINE}, _NORMALISED),
    Variant("measure", "settling", {"SETTLE": True, "DISTANCE": 2, "ROWS": MEASURED, "DEPTH": DEPTH}),
    Variant("pull", "cosine", {"DISTANCE": 2, "OWNERS": OWNERS, "PAIRS": PAIRS, "DEPTH": DEPTH, **_BOTH}),
    Variant("score", "second order", {"LOSS": kernels.SECOND_ORDER.value, "ROWS": SCORED}, _NORMALISED),
]

_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_PRODUCTS = {"select": 1, "draw": 1, "cost": 1, "similarity": 1, "weigh": 2}

# The types of the arguments, by name; {rows}: of the rows, {kind}: of what is computed.
_POINTERS = {
    "{rows}": "x y x_plain y_plain",
    "{kind}": "x_half x_nonzero y_half y_nonzero floors positive_key negative_key farthest_key weight_key "
    "distances thresholds weights limits nearest log_sums pulled gradient d_ap d_an",
    "fp64": "x_factor y_factor unscale density parameters losses slopes slope_ap slope_an sums rate",
    "i32": "x_index y_index begin end self_position given positive_index negative_index farthest_index "
    "weight_index uniform_key uniform_index picks owner other_index",
    "i64": "seed incoming incoming_begin",
}
_NUMBERS = (
    "x_length y_length width tiles first_rank last_rank x_stride y_stride y_count pairs length lists owners "
    "ranks"
)
_ALIGNED = ("x_length", "y_length")  # and `width` of prepared rows: padded to whole tiles


def _signature(names: list[str], constants: dict[str, Any], dtype: torch.dtype) -> dict[str, str]:
    rows, kind = _TYPES[dtype], "fp64" if dtype == torch.float64 else "fp32"
    types = {
        name: "*" + of.format(rows=rows, kind=kind)
        for of, group in _POINTERS.items()
        for name in group.split()
    }
    types |= dict.fromkeys(_NUMBERS.split(), "i32")
    return {name: "constexpr" if name in constants else types[name] for name in names}


def _compilation(target: str, variant: Variant, dtype: torch.dtype, tile: Tile | None) -> Compilation:
    function = getattr(kernels, variant.kernel)
    constants = variant.constants | (tile.constants() if tile else {})
    signature = _signature(function.arg_names, constants, dtype)
    padded = (*_ALIGNED, "width") if tile is not None else _ALIGNED
    has_products = tile is not None and variant.what != "uniform"
    return Compilation(
        kernel=variant.kernel,
        variant=variant.what,
        target=target,
        dtype=_TYPES[dtype],
        function=function,
        signature=signature,
        constants=constants,
        divisible=tuple(name for name, of in signature.items() if of.startswith("*") or name in padded),
        warps=tile.warps if tile else 4,
        stages=tile.stages if tile else 1,
        rows=tile.rows if tile and has_products else 0,
        columns=tile.columns if tile and has_products else 0,
        products=_PRODUCTS[variant.kernel] if has_products else 0,
        precision=tile.precision if tile and has_products else "",
        reason=tile.reason if tile else "",
        few_blocks=tile.few_blocks if tile else "",
    )


def compilations() -> list[Compilation]:
    """One record for every kernel, variant, target, type of the rows and tile."""
    return [
        _compilation(target, variant, dtype, tile)
        for target, table in TILES.items()
        if target != "interpreter"
        for variant in VARIANTS
        for dtype in variant.types
        for tile in (table[variant.kernel][dtype] if variant.kernel in table else (None,))
    ]
