"""Positives within a boundary β that is learned, negatives beyond it (Wu et al., "Sampling Matters")."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tripletops import reference


def beta_margin_loss(
    batch: reference.Batch, beta: Tensor, *, alpha: float, reduction: str, **options: Any
) -> Tensor:
    """`beta` is (N,), that of each anchor; it receives a gradient too."""
    d, positives, negatives = reference.pairs(batch, **options)
    pull = (d - beta[:, None] + alpha).relu().where(positives, 0)
    push = (beta[:, None] - d + alpha).relu().where(negatives, 0)
    terms = (pull > 0).sum() + (push > 0).sum()
    return reference.reduce_terms((pull + push).sum(1), reduction, terms, terms)
