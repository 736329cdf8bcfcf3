"""Every positive pair against all negatives of its anchor (InfoNCE, NT-Xent)."""

from __future__ import annotations

import torch
from torch import Tensor

from tripletops import reference


def info_nce_loss(batch: reference.Batch, *, temperature: float, positive: str, reduction: str) -> Tensor:
    s = (1 - reference.key_matrix(reference.cosine, batch.x, batch.y)) / temperature
    positives = batch.positives & batch.positives.any() & batch.negatives.any()
    if positive == "easy":
        easy = reference.lowest(-s.detach(), positives)
        positives = easy[:, None] == torch.arange(len(batch.y), device=s.device)
    a, p = positives.nonzero().unbind(1)
    nothing = torch.finfo(s.dtype).min  # e to it is 0; of nothing but −inf, logsumexp has a slope of NaN
    terms = reference.softplus(s.where(batch.negatives, nothing).logsumexp(1)[a] - s[a, p])
    losses = reference.by_anchor(terms, a, len(batch.x))
    return reference.reduce_terms(losses, reduction, positives.sum(), (terms > 0).sum())
