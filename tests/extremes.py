"""Finite rows of any size, and what is checked of them on every backend.

Integers times a power of two are exact down to the last subnormal number. So a batch of tiny rows can be
compared with the same batch at its ordinary size: the derivative of a euclidean distance is the same, and
that of a cosine is larger by that power.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from helpers import Batch, T, labels_of
from torch import Tensor

import tripletops

# A power of two that makes subnormal numbers of the integers up to 8.
TINY = {torch.float16: -22, torch.bfloat16: -131, torch.float32: -147, torch.float64: -1072}

ALWAYS = 1000.0  # a margin that every pair of the integers below is within
EUCLIDEAN: dict[str, dict[str, Any]] = {
    "batch_hard_loss": {"margin": ALWAYS},
    "easy_positive_loss": {"margin": ALWAYS, "loss": "margin"},
    "semi_hard_loss": {"margin": ALWAYS},
    "batch_all_loss": {"margin": ALWAYS},
    "contrastive_loss": {"neg_margin": ALWAYS},
    "beta_margin_loss": {"alpha": ALWAYS, "positive": "all", "negative": "all"},
}
COSINE: dict[str, dict[str, Any]] = {
    "batch_hard_loss": {"distance": "cosine"},
    "easy_positive_loss": {},
    "semi_hard_loss": {"distance": "cosine"},
    "batch_all_loss": {"distance": "cosine"},
    "contrastive_loss": {"distance": "cosine"},
    "multi_similarity_loss": {},
    "beta_margin_loss": {"distance": "cosine", "positive": "hard", "negative": "hard"},
}


def function_of(name: str) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = getattr(T, name)
    return (
        (lambda *given, **options: function(*given, 1.2, **options))
        if name == "beta_margin_loss"
        else function
    )


def gradient(name: str, emb: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    emb = emb.clone().requires_grad_()
    loss = function_of(name)(emb, labels, reduction="sum", **options)
    loss.backward()
    assert emb.grad is not None
    return loss.detach(), emb.grad


def integers(count: int, width: int) -> tuple[Tensor, Tensor]:
    """No row of zeros, none that equals another, and as many classes as there are rows in one."""
    rows = torch.randint(-8, 9, (count, width), generator=torch.Generator().manual_seed(count)).double()
    rows[:, 0] = torch.arange(count) % 15 + 1
    return rows, torch.arange(count) // 3


def tolerance_of(dtype: torch.dtype) -> float:
    return 1e-12 if dtype == torch.float64 else 1e-5 + torch.finfo(dtype).eps


def check_tiny_euclidean(name: str, dtype: torch.dtype, digits: float = 0.0) -> None:
    """`digits`: the relative error of a distance that is a subnormal number, where gradients rest on it."""
    rows, labels = integers(12, 6)
    _, ordinary = gradient(name, rows, labels, **EUCLIDEAN[name])
    loss, tiny = gradient(name, (rows * 2.0 ** TINY[dtype]).to(dtype), labels, **EUCLIDEAN[name])
    assert loss.isfinite()
    if name == "semi_hard_loss":  # distances with few digits tie, and ties are not strictly farther
        assert tiny.isfinite().all()
        return
    allowed = max(tolerance_of(dtype), digits) * ordinary.abs().max()
    assert (tiny.double() - ordinary).abs().max() <= allowed


def check_tiny_cosine(name: str, dtype: torch.dtype, tiny_rows: list[int]) -> None:
    rows, labels = integers(12, 6)
    labels[tiny_rows[0]] = 99  # nobody's positive
    power = torch.zeros(12, 1, dtype=torch.float64)
    power[tiny_rows] = TINY[dtype]
    _, ordinary = gradient(name, rows, labels, **COSINE[name])
    loss, tiny = gradient(name, (rows * 2.0**power).to(dtype), labels, **COSINE[name])
    assert loss.isfinite()
    assert not tiny.isnan().any()
    # One over a tiny norm may overflow: then infinity is the value in that type.
    expected = ordinary / 2.0**power
    allowed = expected.abs().amax(1, keepdim=True) * tolerance_of(dtype)
    largest = torch.finfo(dtype).max
    assert ((expected.abs() >= largest - allowed) | tiny.isfinite()).all()
    error = (tiny.double().clamp(-largest, largest) - expected.clamp(-largest, largest)).abs()
    assert (error <= allowed + torch.finfo(dtype).tiny).all()


def check_rows_that_differ_by_a_tiny_number(name: str) -> None:
    """The derivative of a distance of 2⁻¹⁴⁰ among rows of ordinary size."""
    rows, labels = integers(12, 6)
    rows[7] = rows[1]
    rows[1, 3], rows[7, 3] = 0, 2.0**-140
    _, found = gradient(name, rows.float(), labels, **EUCLIDEAN[name])
    _, expected = gradient(name, rows, labels, **EUCLIDEAN[name], backend="reference")
    assert (found.double() - expected).abs().max() <= 1e-5 * expected.abs().max()


def nearly_parallel(count: int, width: int, seed: int) -> Batch:
    """Rows that differ in their last bits alone: their unit rows, rounded to float32, would be equal."""
    generator = torch.Generator().manual_seed(seed)
    offset = 2.0**30 * torch.randn(width, generator=generator)
    last_bit = torch.finfo(torch.float32).eps * offset
    rows = offset + last_bit * torch.randint(-1, 2, (count, width), generator=generator)
    return Batch(rows, labels_of(count, 4, generator))


HUGE = {torch.bfloat16: 122, torch.float32: 122, torch.float64: 1018}


def check_huge(name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Distances, and margins added to them, that are too large for the type make nothing NaN."""
    rows, labels = integers(12, 6)
    emb = (rows * 2.0 ** HUGE[dtype]).to(dtype)
    for distance in ("euclidean", "sqeuclidean"):
        loss, slope = gradient(name, emb, labels, distance=distance, **options)
        assert not loss.isnan()
        assert not slope.isnan().any()


OUTLIER_LOSSES = {
    "batch_hard_loss": {},
    "semi_hard_loss": {},
    "batch_all_loss": {},
    "batch_all_loss, soft margin": {"loss": "soft_margin"},
    "contrastive_loss": {"neg_margin": 3.0},
}


@dataclass(frozen=True)
class Outlier:
    """A batch in which one row, or three, are far away from all others."""

    count: int
    width: int
    places: tuple[int, ...]
    size: float
    offset: float = 0.0
    dtype: torch.dtype = torch.float32

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.count)
        rows = torch.randn(self.count, self.width, generator=generator, dtype=torch.float64) + self.offset
        rows[list(self.places)] *= self.size
        return rows.to(self.dtype), torch.arange(self.count) // 4


def check_others(name: str, outlier: Outlier) -> None:
    """The losses of anchors whose classes have no outlier are as exact as without one."""
    emb, labels = outlier.batch()
    function = partial(function_of(name.split(",")[0]), reduction="none", **OUTLIER_LOSSES[name])
    found, expected = function(emb, labels), function(emb.double(), labels, backend="reference")
    others = ~torch.isin(labels, labels[list(outlier.places)])
    if name == "semi_hard_loss":  # rounding may decide what is strictly farther
        triplets = tripletops.reference.key_matrix(tripletops.reference.squared, emb.double(), emb.double())
        same = labels[:, None] == labels
        ties = (triplets[:, :, None] - triplets[:, None, :]).abs() < 1e-4 * triplets[:, :, None]
        others &= ~(ties & same[:, :, None] & ~same[:, None, :]).any(2).any(1)
    assert others.any()
    terms = 1.0 if name == "batch_hard_loss" else float(outlier.count * 4)
    allowed = (1e-5 if outlier.dtype == torch.float32 else 1e-13) * (expected.abs() + terms)
    assert ((found.double() - expected).abs() <= allowed)[others].all()
