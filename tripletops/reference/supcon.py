"""Supervised contrastive: all positives against all candidates (Khosla et al.)."""

from __future__ import annotations

from math import inf

from torch import Tensor

from tripletops import reference


def supcon_loss(batch: reference.Batch, *, temperature: float, reduction: str) -> Tensor:
    s = 1 - reference.key_matrix(reference.cosine, batch.x, batch.y)
    both = batch.positives.any() & batch.negatives.any()
    positives, candidates = batch.positives & both, batch.positives | batch.negatives
    counted = positives.any(1)
    # An anchor without a positive has no loss; its log-sum-exp of nothing must not even have a slope.
    log_sum = (s / temperature).where(candidates | ~counted[:, None], -inf).logsumexp(1, keepdim=True)
    terms = (log_sum - s / temperature).where(positives, 0).sum(1)
    losses = terms / positives.sum(1).clamp(min=1)
    return reference.reduce_terms(losses, reduction, counted.sum(), (losses > 0).sum())
