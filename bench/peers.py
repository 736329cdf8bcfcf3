"""What tripletops is measured against. Everybody who needs a baseline imports it from here.

The loss functions take (emb, labels) and return a scalar with a graph, as `tripletops.batch_hard_loss` does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

MARGIN = 0.2


def naive_batch_hard(emb: Tensor, labels: Tensor) -> Tensor:
    """Batch-hard as one writes it by hand: the whole distance matrix, two masks, max and min, autograd."""
    distance = torch.cdist(emb, emb)
    same = labels[:, None] == labels[None, :]
    itself = torch.eye(len(labels), dtype=torch.bool)
    d_ap = distance.masked_fill(~same | itself, -1.0).max(dim=1).values
    d_an = distance.masked_fill(same, float("inf")).min(dim=1).values
    return torch.relu(d_ap - d_an + MARGIN).mean()


def matrix_product(rows: Tensor, columns: Tensor) -> Tensor:
    """The bare product of all pairs into fresh memory, as users call it: no loss and no backward."""
    return torch.mm(rows, columns.T)


def matrix_product_into(out: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The same into memory that is already there."""
    return torch.mm(rows, columns.T, out=out)


def metric_learning_batch_hard() -> Callable[[Tensor, Tensor], Tensor] | None:
    """Batch-hard by pytorch-metric-learning, or None where that is not installed."""
    if importlib.util.find_spec("pytorch_metric_learning") is None:
        return None
    from pytorch_metric_learning.distances import LpDistance
    from pytorch_metric_learning.losses import TripletMarginLoss
    from pytorch_metric_learning.miners import BatchHardMiner
    from pytorch_metric_learning.reducers import MeanReducer

    distance = LpDistance(normalize_embeddings=False)
    miner = BatchHardMiner(distance=distance)
    criterion = TripletMarginLoss(margin=MARGIN, distance=distance, reducer=MeanReducer())

    def loss(emb: Tensor, labels: Tensor) -> Tensor:
        value: Tensor = criterion(emb, labels, miner(emb, labels))
        return value

    return loss
