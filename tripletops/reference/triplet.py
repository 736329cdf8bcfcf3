"""One triplet per anchor, its positive and its negative picked by rule."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tripletops import reference


def triplet_loss(
    batch: reference.Batch, *, positive: str, negative: str, loss: str, distance: str, reduction: str,
    **options: Any,
) -> Tensor:  # fmt: skip
    p, n, _, _ = reference.select(batch, positive, negative, distance, **options)
    losses = losses_of(batch.x, batch.y, p, n, distance, loss, **options)
    valid = (p >= 0) & (n >= 0)
    return reference.reduce_terms(losses, reduction, valid.sum(), (losses > 0).sum())


def losses_of(x: Tensor, y: Tensor, p: Tensor, n: Tensor, distance: str, loss: str, **numbers: Any) -> Tensor:
    """(N,) losses of the triplets (i, p[i], n[i]), 0 where one of the two is −1."""
    valid = ((p >= 0) & (n >= 0)).nonzero()[:, 0]
    compare, report = reference.DISTANCES[distance]
    d_ap = report(compare(x[valid], y[p[valid]]))
    d_an = report(compare(x[valid], y[n[valid]]))
    return x.new_zeros(len(x)).index_put((valid,), reference.LOSSES[loss](d_ap, d_an, **numbers))
