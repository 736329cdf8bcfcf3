"""FaceNet's negative for every (anchor, positive): the nearest one strictly farther, else the farthest."""

from __future__ import annotations

import torch
from torch import Tensor

from tripletops import reference


def semi_hard_loss(batch: reference.Batch, *, margin: float, distance: str, reduction: str) -> Tensor:
    key, d = reference.distances(batch, distance)
    a, p = (batch.positives & batch.negatives.any(1, keepdim=True)).nonzero().unbind(1)
    eligible, farther = batch.negatives[a], d.detach()[a] > d.detach()[a, p][:, None]
    n = reference.lowest(key.detach()[a], eligible & farther)
    n = n.where(n >= 0, reference.lowest(-key.detach()[a], eligible))
    terms = reference.LOSSES["margin"](d[a, p], d[a, n], margin=margin)
    losses = reference.by_anchor(terms, a, len(batch.x))
    return reference.reduce_terms(losses, reduction, torch.tensor(len(a)), (terms > 0).sum())
