"""Checks of rows and whole numbers, and distances from differences, for `evaluate` and `diagnostics`."""

from __future__ import annotations

import numbers

import torch
from torch import Tensor

_BLOCK = 1024  # rows that are looked at together


def check_rows(name: str, rows: Tensor) -> None:
    if not isinstance(rows, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(rows).__qualname__}")
    if rows.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {rows.dtype}")
    if rows.dim() != 2:
        raise ValueError(f"{name} must be (N, D), got {name} of shape {tuple(rows.shape)}")


def check_finite(name: str, rows: Tensor, index: Tensor | None = None) -> None:
    """`index`: which rows of the caller's these are; None: all."""
    is_finite = torch.cat([some.isfinite().all(1) for some in rows.split(_BLOCK)])
    if not is_finite.all():
        first = int((~is_finite).nonzero()[0])
        first = first if index is None else int(index[first])
        raise ValueError(f"{name} of shape {tuple(rows.shape)} is not finite in row {first}")


def whole(name: str, value: object, least: int = 1) -> int:
    """A Python int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int, got {value!r}")
    count = int(value)
    if count < least:
        raise ValueError(f"{name}={count}: must be {least} or greater")
    return count


def row_distances(x: Tensor, y: Tensor) -> Tensor:
    """Euclidean distances from differences: equal rows are at 0, and equal pairs equally far, anywhere."""
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
