"""Positives pulled to within one margin, negatives pushed beyond another (Hadsell et al.)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tripletops import reference


def contrastive_loss(
    batch: reference.Batch, *, pos_margin: float, neg_margin: float, reduction: str, **options: Any
) -> Tensor:
    d, positives, negatives = reference.pairs(batch, **options)
    pull = (d - pos_margin).relu().where(positives, 0)
    push = (neg_margin - d).relu().where(negatives, 0)
    pulls, pushes = (pull > 0).sum(), (push > 0).sum()
    total = reference.reduce_terms(pull.sum(1), reduction, pulls, pulls)
    return total + reference.reduce_terms(push.sum(1), reduction, pushes, pushes)
