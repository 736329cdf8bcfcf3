"""Which tile a kernel uses on which GPU, and why; and how kernels are launched.

A configuration is looked up by the target, the kernel and the type of the rows. Nothing is tuned unless the
environment variable TRIPLETOPS_AUTOTUNE is 1: then the first call of each kind times all that the table has.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)


class Tile(NamedTuple):
    rows: int
    columns: int
    depth: int  # dimensions loaded at a time
    span: int  # dimensions of the gradient that a program of `weigh` adds up
    warps: int
    stages: int
    precision: str  # of float32 products
    reason: str
    few_blocks: str = ""  # why fewer than two blocks on a multiprocessor will do

    def constants(self) -> dict[str, Any]:
        """As the kernels take them."""
        span = {"SPAN": self.span} if self.span else {}
        sizes = {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth}
        return {**sizes, **span, "PRECISION": self.precision}


# Prepared rows are padded to whole tiles of any of these.
LENGTHS, WIDTHS = (32, 16) if INTERPRETED else (128, 64)
RANKS = 4 if INTERPRETED else 8  # thresholds or floors of an anchor that a program carries
OWNERS, PAIRS = (
    (32, 4) if INTERPRETED else (2, 8)
)  # rows of a gradient, and pairs that pull at each at a time
MEASURED = 256 if INTERPRETED else 16  # pairs that a program measures
SCORED = 256  # triplets that a program scores
DEPTH = 32 if INTERPRETED else 64  # dimensions of a row that are loaded at a time where there are no products

_SQUARE = "the largest square, for the most reuse, with which two blocks fit the registers of an SM"
_DEEP = "half as many bytes a dimension: twice the depth in the same shared memory, fewer trips"
_NARROW = "half the columns, twice the depth: finer shares of the walk, for batches too small to fill the GPU"
_TERMS = "terms of several thresholds live beside the three products of tf32x3: what does not spill"
_MMA = "twice that in half precision; 64 rows are more than Triton 3.7 can compile for sm_100"
_LOGS = "hashes and logarithms live beside the products: a quarter of the pairs, so that nothing spills"
_DOUBLES = "a number takes two registers, its logarithm many more: the largest square that does not spill"
_ONE_PASS = "all of D ≤ 128 in one pass: distances are not computed anew for a second half of the gradient"
_EIGHT_WARPS = "a block of 8 warps is as many as two of 4, and holds the gradient of all of D ≤ 128"

_Choices = tuple[Tile, ...]  # the first is used, the others are what autotuning may choose
_Tiles = dict[str, dict[torch.dtype, _Choices]]  # by kernel and type of the rows


def _by_type(full: _Choices, half: _Choices, double: _Choices) -> dict[torch.dtype, _Choices]:
    return {torch.float32: full, torch.bfloat16: half, torch.float16: half, torch.float64: double}


def _gpu(full: str, stages: int, cost_columns: int, weigh_rows: int) -> _Tiles:
    """`full` is how float32 is multiplied. Rows that were normalised never come in half precision."""

    def walk(rows: int, columns: int, depth: int, reason: str) -> Tile:
        return Tile(rows, columns, depth, 0, 4, stages, full, reason)

    def double(rows: int, columns: int) -> Tile:
        return Tile(rows, columns, 16, 0, 4, stages, "ieee", _DOUBLES)

    def weigh(rows: int, span: int, precision: str) -> Tile:
        return Tile(rows, 32, 16, span, 8, 2, precision, _ONE_PASS, _EIGHT_WARPS)

    square, logs, once = walk(64, 64, 16, _SQUARE), walk(32, 32, 16, _LOGS), weigh(weigh_rows, 128, full)
    return {
        "select": _by_type(
            (square, walk(64, 32, 32, _NARROW)), (walk(64, 64, 32, _DEEP),), (double(32, 32),)
        ),
        "similarity": _by_type((square,), (square,), (double(32, 32),)),
        "cost": _by_type((walk(32, cost_columns, 16, _TERMS),), (walk(32, 32, 32, _MMA),), (double(16, 16),)),
        "draw": _by_type((logs,), (logs,), (double(16, 32),)),
        "weigh": _by_type((once,), (once,), (weigh(weigh_rows // 2, 64, "ieee"),)),
    }


def _interpreted(rows: int, span: int) -> Tile:
    return Tile(rows, 32, 16, span, 4, 1, "interpreter", "small batches cross the edges of tiles")


# What a walk keeps, by how much of it lives beside the products: extremes, a log-sum-exp, terms of
# thresholds, draws with their logarithms.
WALKS = ("select", "similarity", "cost", "draw")

TILES: dict[str, _Tiles] = {
    "sm_80": _gpu("tf32x3", 2, cost_columns=32, weigh_rows=32),
    "sm_90": _gpu("tf32x3", 2, cost_columns=16, weigh_rows=32),
    # Results wait in tensor memory: loads can be further ahead.
    "sm_100": _gpu("tf32x3", 3, cost_columns=16, weigh_rows=32),
    # It has float32 tensor cores, and no tf32x3; and 512 registers for each of its 64 lanes.
    "gfx942": _gpu("ieee", 2, cost_columns=32, weigh_rows=64),
    "interpreter": {
        kernel: _by_type(*3 * [(_interpreted(32, span), _interpreted(16, span))])
        for kernel, span in (*((walk, 0) for walk in WALKS), ("weigh", 16))
    },
}


GPUS = tuple(name for name in TILES if name != "interpreter")


class Launch(NamedTuple):
    kernel: Any
    arguments: dict[str, Any]  # by name, constants included
    tile: Tile | None
    target: str | None  # None: the same for all


class Recorder:
    """Takes launches instead of a GPU, those for every target: see `catalogue`."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.target: str | None = None

    def __enter__(self) -> Recorder:
        global _recorder
        _recorder = self
        return self

    def __exit__(self, *_: object) -> None:
        global _recorder
        _recorder = None

    def run(self, kernel: str, dtype: torch.dtype, run: Callable[[Tile], Any]) -> Any:
        """run(tile) with every tile that the kernel is shipped with."""
        for self.target in GPUS:
            for tile in TILES[self.target][kernel][dtype]:
                result = run(tile)
        self.target = None
        return result

    def take(self, kernel: Any, arguments: dict[str, Any], tile: Tile | None) -> None:
        self.launches.append(Launch(kernel, arguments, tile, self.target))


_recorder: Recorder | None = None


@cache
def target(device: torch.device) -> str:
    """The row of the table for the GPU of `device`."""
    if INTERPRETED:
        return "interpreter"
    if torch.version.hip is not None:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise RuntimeError(
            f"backend 'triton' needs a GPU of compute capability 8.0 or newer, "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}"
        )
    # Consumer GPUs from 12.0 on have the tensor cores of sm_80, not the tensor memory of sm_100.
    return {9: "sm_90", 10: "sm_100", 11: "sm_100"}.get(major, "sm_80")


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def shares(device: torch.device, blocks: int, tiles: int) -> tuple[int, int]:
    """(splits, tiles of each): a walk over `tiles` is shared out until the GPU has two blocks for each SM."""
    wanted = 2 if INTERPRETED or _recorder else 2 * _multiprocessors(device) // max(blocks, 1)
    each = -(-tiles // max(1, min(wanted, tiles, 16)))
    return -(-tiles // max(each, 1)), each


_chosen: dict[tuple[Any, ...], Tile] = {}


def with_tile(kernel: str, rows: torch.Tensor, key: tuple[Any, ...], run: Callable[[Tile], Any]) -> Any:
    """run(tile) with the kernel's tile for these prepared rows, or the fastest if TRIPLETOPS_AUTOTUNE is 1.

    `key` tells kinds of calls apart. `run` may be called more than once.
    """
    if _recorder is not None:
        return _recorder.run(kernel, rows.dtype, run)
    device = rows.device
    tiles = TILES[target(device)][kernel][rows.dtype]
    if len(tiles) == 1 or os.environ.get("TRIPLETOPS_AUTOTUNE") != "1":
        return run(tiles[0])
    key = (device, kernel, rows.dtype, rows.shape[1], len(rows).bit_length(), *key)
    if key not in _chosen:
        _chosen[key] = min(tiles, key=lambda tile: _seconds(lambda: run(tile), device))
    return run(_chosen[key])


def _seconds(call: Callable[[], Any], device: torch.device, rounds: int = 3) -> float:
    """Of the fastest of some calls, the first of which compiles and is not counted."""
    wait: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    call()
    samples = []
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        call()
        wait()
        samples.append(time.perf_counter() - start)
    return min(samples)


def launch(
    kernel: Any, grid: tuple[int, ...], device: torch.device, tile: Tile | None = None, **arguments: Any
) -> None:
    """Run a kernel on a device, all its arguments by name; nothing where the grid is empty."""
    if 0 in grid:
        return
    if tile is not None:
        arguments |= tile.constants()
    if _recorder is not None:
        _recorder.take(kernel, arguments, tile)
        return
    here: AbstractContextManager[Any] = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    options = {} if tile is None else {"num_warps": tile.warps, "num_stages": tile.stages}
    with here:
        kernel[grid](**arguments, **options, enable_fp_fusion=True)
