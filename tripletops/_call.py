"""What a backend is given and what it gives back, by name. A leaf, like `_words`.

The schemas of the ops are written from these records (`ops`), and backends unpack their arguments into them,
so that nobody counts positions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Call(NamedTuple):
    """A batch and what to do with it, checked by `functional`."""

    emb: Tensor
    labels: Tensor
    ref_emb: Tensor | None
    ref_labels: Tensor | None
    self_index: Tensor | None
    ignore_label: int | None
    seed: Tensor | None  # () int64, where a rule draws
    learned: Tensor | None  # (N,), each anchor's number, where the objective learns one
    codes: list[int]  # of `_words.Codes`
    numbers: list[float]  # of `_words.Numbers`


class Mined(NamedTuple):
    """Of every anchor's positive and negative, in this order."""

    picks: Tensor  # (2, N) int64, −1: none
    distances: Tensor  # (2, N), NaN: none


class Evaluated(NamedTuple):
    """A loss and what its gradient is computed from."""

    loss: Tensor  # (), or (N,) for reduction="none"
    totals: Tensor  # of `Totals`, (3,) float64
    picks: Tensor  # (2, N) int64, each anchor's positive and negative, −1: none
    saved: Tensor  # (K, N), the rows that `_words.Objective.saved` names


class Totals(NamedTuple):
    """Of all anchors together."""

    active: Any  # the number of terms above 0
    positive_share: (
        Any  # what a term of a positive is multiplied by in the loss, which a mean makes less than 1
    )
    negative_share: Any  # likewise a term of a negative, or of a triplet


class Differentiated(NamedTuple):
    """A loss that was evaluated, and the gradient that arrived at it."""

    grad: Tensor
    emb: Tensor
    labels: Tensor
    ref_emb: Tensor | None
    ref_labels: Tensor | None
    self_index: Tensor | None
    ignore_label: int | None
    learned: Tensor | None
    codes: list[int]
    numbers: list[float]
    totals: Tensor
    picks: Tensor
    saved: Tensor
    wants_emb: bool  # which gradients of rows are asked for
    wants_ref: bool


class Gradients(NamedTuple):
    """(0,) where a gradient is not wanted."""

    emb: Tensor
    ref_emb: Tensor
    learned: Tensor


def compute_type(emb: Tensor) -> torch.dtype:
    """The type of losses and distances."""
    return torch.float64 if emb.dtype == torch.float64 else torch.float32
