"""Recall@k: the share of queries with one of their own class among the k nearest, themselves left out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 1024


def recall_at(ks: Sequence[int], emb: Tensor, labels: Tensor) -> list[float]:
    """Recall at every one of `ks`, in percent, every row being a query once; a chunk of queries at a time."""
    nearest = min(max(ks), len(emb) - 1)
    hits = torch.zeros(nearest, dtype=torch.float64)
    for start in range(0, len(emb), CHUNK):
        distance = torch.cdist(emb[start : start + CHUNK], emb, compute_mode="donot_use_mm_for_euclid_dist")
        query = torch.arange(start, start + len(distance))
        distance[torch.arange(len(distance)), query] = float("inf")
        found = labels[distance.topk(nearest, largest=False).indices] == labels[query, None]
        hits += (found.cumsum(dim=1) > 0).sum(dim=0)
    return [100 * float(hits[min(k, nearest) - 1]) / len(emb) for k in ks]
