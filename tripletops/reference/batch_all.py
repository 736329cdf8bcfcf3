"""Every triplet of an anchor, a positive of it and a negative of it (Hermans et al., equation 6)."""

from __future__ import annotations

import torch
from torch import Tensor

from tripletops import reference


def batch_all_loss(
    batch: reference.Batch, *, margin: float, loss: str, distance: str, reduction: str
) -> tuple[Tensor, Tensor]:
    """(loss, number of active triplets)."""
    _, d = reference.distances(batch, distance)
    a, p, n = (batch.positives[:, :, None] & batch.negatives[:, None, :]).nonzero().unbind(1)
    terms = reference.LOSSES[loss](d[a, p], d[a, n], margin=margin)
    valid = torch.ones_like(terms, dtype=torch.bool)
    active = valid if loss == "soft_margin" else terms > 0  # softplus is never 0, though it may round to it
    losses = reference.by_anchor(terms, a, len(batch.x))
    return reference.reduce_terms(losses, reduction, valid.sum(), active.sum()), active.sum()
