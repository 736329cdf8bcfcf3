"""What a loader hands out: images as bytes and their labels, divided into training and tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    pixels: Tensor
    """(N, C, H, W) uint8; may be a memory map, whose pages are read as batches are indexed."""
    labels: dict[str, Tensor]
    """Label sets by name, each (N,) int64."""

    def __len__(self) -> int:
        return len(self.pixels)


@dataclass(frozen=True)
class Dataset:
    name: str
    train: Split
    tests: dict[str, Split]
    """What is measured, by name."""
    mean: tuple[float, ...]
    """Per channel, of pixels from 0 to 1."""
    std: tuple[float, ...]
    shareable: bool
    """May pictures of its images be published?"""
    source: str
    """One line for reports: files, counts, licence."""


def numbered(
    keys: Sequence[str] | Sequence[int], among: Sequence[str] | Sequence[int] | None = None
) -> Tensor:
    """(N,) int64: each key's place among the sorted distinct ones of `among`, or of `keys` themselves."""
    distinct = np.unique(np.asarray(keys if among is None else among))
    return torch.from_numpy(np.searchsorted(distinct, np.asarray(keys)))
