"""One network is trained twice with batch-hard, by tripletops and by plain PyTorch, from the same weights on
the same batches. Both take turns step by step, so that a slow moment of the machine hits both."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field, replace

import torch

import tripletops as T
from bench.measure import THREADS
from bench.peers import MARGIN, naive_batch_hard
from train_ref.demo.training import COLLAPSING, Digits, Loss, batches, network

# Batch-hard as in the collapsing setting, but with the dimension and learning rate of ordinary practice.
SETTING = replace(COLLAPSING, dim=64, learning_rate=1e-4, margin=MARGIN)
STEPS = 60


@dataclass
class Side:
    """One of the two trainings."""

    losses: list[float] = field(default_factory=list)
    loss_seconds: list[float] = field(default_factory=list)  # forward and backward of the loss
    step_seconds: list[float] = field(default_factory=list)  # with the network and the optimizer


@dataclass(frozen=True)
class Comparison:
    ours: Side
    naive: Side
    same_rows: float  # largest relative difference of the two losses of the same embeddings

    @property
    def largest(self) -> tuple[float, int]:
        """The largest relative difference between the two curves, and the step of it."""
        pairs = zip(self.ours.losses, self.naive.losses, strict=True)
        return max((_relative(ours, naive), step) for step, (ours, naive) in enumerate(pairs))

    @property
    def loss_ratio(self) -> float:
        return statistics.median(self.naive.loss_seconds) / statistics.median(self.ours.loss_seconds)

    @property
    def step_ratio(self) -> float:
        return statistics.median(self.naive.step_seconds) / statistics.median(self.ours.step_seconds)


def _ours(emb: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return T.batch_hard_loss(emb, labels, margin=MARGIN)


def compare(digits: Digits, seed: int, steps: int) -> Comparison:
    torch.set_num_threads(THREADS)
    losses: tuple[Loss, Loss] = (_ours, naive_batch_hard)
    sides = (Side(), Side())
    models = tuple(network(SETTING, seed) for _ in sides)
    optimizers = [torch.optim.Adam(model.parameters(), lr=SETTING.learning_rate) for model in models]
    same_rows = 0.0
    for step, rows in enumerate(batches(digits, SETTING, seed, steps)):
        pixels, labels = digits.train.pixels[rows], digits.train.digits[rows]
        for which in (0, 1) if step % 2 else (1, 0):
            model, optimizer, side = models[which], optimizers[which], sides[which]
            start = time.perf_counter()
            emb = model(pixels)
            # The loss is cut off from the network, to be timed alone; its gradient is handed on.
            leaf = emb.detach().requires_grad_()
            before_loss = time.perf_counter()
            loss = losses[which](leaf, labels)
            loss.backward()
            after_loss = time.perf_counter()
            optimizer.zero_grad()
            emb.backward(leaf.grad)
            optimizer.step()
            side.step_seconds.append(time.perf_counter() - start)
            side.loss_seconds.append(after_loss - before_loss)
            side.losses.append(loss.item())
            if which == 1:
                same_rows = max(same_rows, _relative(_ours(emb.detach(), labels).item(), loss.item()))
    return Comparison(*sides, same_rows)


def _relative(ours: float, naive: float) -> float:
    if ours == naive:
        return 0.0
    return abs(ours - naive) / abs(naive) if naive else float("inf")
