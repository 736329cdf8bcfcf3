"""What tripletops is measured against. Everybody who needs a baseline imports it from here.

The loss functions take (emb, labels) and return a scalar with a graph, as `tripletops.batch_hard_loss` does.
Those of pytorch-metric-learning are made by a function each, which imports it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bench.measure import Call

MARGIN = 0.2
PRODUCTS = ("torch.mm", "torch.mm out=")  # the names of the bare products of all pairs, as contenders


def naive_batch_hard(emb: Tensor, labels: Tensor) -> Tensor:
    """Batch-hard as one writes it by hand: the whole distance matrix, two masks, max and min, autograd."""
    distance = torch.cdist(emb, emb)
    same = labels[:, None] == labels[None, :]
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    d_ap = distance.masked_fill(~same | itself, -1.0).max(dim=1).values
    d_an = distance.masked_fill(same, float("inf")).min(dim=1).values
    return torch.relu(d_ap - d_an + MARGIN).mean()


def compiled_batch_hard() -> Callable[[Tensor, Tensor], Tensor]:
    """The same by `torch.compile`."""
    # For every size anew: code that serves any size would be slower.
    compiled: Callable[[Tensor, Tensor], Tensor] = torch.compile(naive_batch_hard, dynamic=False)
    return compiled


def matrix_product(rows: Tensor, columns: Tensor) -> Tensor:
    """The bare product of all pairs into fresh memory, as users call it: no loss and no backward."""
    return torch.mm(rows, columns.T)


def matrix_product_into(out: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The same into memory that is already there."""
    return torch.mm(rows, columns.T, out=out)


def products(rows: Tensor, columns: Tensor) -> dict[str, Call]:
    """Both of them as contenders."""
    out = rows.new_empty(len(rows), len(columns))
    calls = partial(matrix_product, rows, columns), partial(matrix_product_into, out, rows, columns)
    return dict(zip(PRODUCTS, calls, strict=True))


def metric_learning_batch_hard() -> Callable[[Tensor, Tensor], Tensor] | None:
    """Batch-hard by pytorch-metric-learning, or None where that is not installed."""
    if importlib.util.find_spec("pytorch_metric_learning") is None:
        return None
    from pytorch_metric_learning.distances import LpDistance
    from pytorch_metric_learning.miners import BatchHardMiner

    batch_all = metric_learning_batch_all()
    miner = BatchHardMiner(distance=LpDistance(normalize_embeddings=False))
    return lambda emb, labels: batch_all(emb, labels, miner(emb, labels))


def metric_learning_batch_all() -> Callable[..., Tensor]:
    """The mean hinge of all triplets, or of those that a miner chose, by pytorch-metric-learning."""
    from pytorch_metric_learning.distances import LpDistance
    from pytorch_metric_learning.losses import TripletMarginLoss
    from pytorch_metric_learning.reducers import MeanReducer

    distance = LpDistance(normalize_embeddings=False)
    loss: Callable[..., Tensor] = TripletMarginLoss(MARGIN, distance=distance, reducer=MeanReducer())
    return loss


def metric_learning_multi_similarity() -> Callable[[Tensor, Tensor], Tensor]:
    """The multi-similarity loss with its miner, by pytorch-metric-learning."""
    from pytorch_metric_learning.losses import MultiSimilarityLoss
    from pytorch_metric_learning.miners import MultiSimilarityMiner

    miner, loss = MultiSimilarityMiner(epsilon=0.1), MultiSimilarityLoss(alpha=2, beta=50, base=1.0)

    def run(emb: Tensor, labels: Tensor) -> Tensor:
        value: Tensor = loss(emb, labels, miner(emb, labels))
        return value

    return run


def metric_learning_supcon() -> Callable[[Tensor, Tensor], Tensor]:
    """The supervised contrastive loss by pytorch-metric-learning."""
    from pytorch_metric_learning.losses import SupConLoss

    loss: Callable[[Tensor, Tensor], Tensor] = SupConLoss(temperature=0.1)
    return loss


def metric_learning_info_nce() -> Callable[[Tensor, Tensor], Tensor]:
    """The InfoNCE loss by pytorch-metric-learning, which calls it NT-Xent."""
    from pytorch_metric_learning.losses import NTXentLoss

    loss: Callable[[Tensor, Tensor], Tensor] = NTXentLoss(temperature=0.07)
    return loss
