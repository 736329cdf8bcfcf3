"""All pairs of an anchor, weighed against each other (Wang et al., "Multi-Similarity Loss")."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from tripletops import reference


def multi_similarity_loss(
    batch: reference.Batch, *, alpha: float, beta: float, base: float, epsilon: float | None, positive: str,
    reduction: str,
) -> Tensor:  # fmt: skip
    valid = batch.positives.any(1) & batch.negatives.any(1)
    s = 1 - reference.key_matrix(reference.cosine, batch.x, batch.y)
    positives, negatives = (mask & valid[:, None] for mask in (batch.positives, batch.negatives))
    if epsilon is not None and len(batch.y):
        least, most = s.where(positives, inf).amin(1), s.where(negatives, -inf).amax(1)
        positives = positives & (s < most[:, None] + epsilon)
        negatives = negatives & (s > least[:, None] - epsilon)
    if positive == "easy":
        easy = reference.lowest(-s.detach(), batch.positives & valid[:, None])
        positives = easy[:, None] == torch.arange(len(batch.y), device=s.device)

    def log_one_plus_sum(exponent: Tensor, mask: Tensor) -> Tensor:
        nothing = torch.finfo(s.dtype).min  # e to it is 0; of nothing but −inf, logsumexp has a slope of NaN
        return reference.softplus(exponent.where(mask, nothing).logsumexp(1))

    losses = log_one_plus_sum(-alpha * (s - base), positives) / alpha
    losses = losses + log_one_plus_sum(beta * (s - base), negatives) / beta
    return reference.reduce_terms(losses, reduction, valid.sum(), (losses > 0).sum())
