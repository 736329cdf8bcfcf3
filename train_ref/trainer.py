"""The training loop: balanced batches, a loss of (embeddings, labels), Adam."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from train_ref.data import balanced_batch

Loss = Callable[[Tensor, Tensor], Tensor]


def train(
    model: nn.Module,
    pixels: Tensor,
    labels: Tensor,
    loss: Loss,
    *,
    steps: int,
    per_class: int,
    learning_rate: float,
    generator: torch.Generator,
    after_step: Callable[[float], None],
) -> None:
    """Train `model` in place; `after_step` is told the loss of every step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    model.train()
    for _ in range(steps):
        batch = balanced_batch(labels, per_class, generator)
        value = loss(model(pixels[batch]), labels[batch])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        after_step(value.item())


@torch.no_grad()
def embed(model: nn.Module, pixels: Tensor) -> Tensor:
    """The embeddings of all images, by the model as it is used after training."""
    model.eval()
    embeddings: Tensor = model(pixels)
    return embeddings
