"""Words, and calls of the public functions on whatever device and backend is on trial."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import tripletops
from tests.support.batches import Batch
from tripletops import _words
from tripletops.backends import FORCED

DEVICE = torch.device(os.environ.get("TRIPLETOPS_TEST_DEVICE") or "cpu")
# Objectives over many tuples are judged by the plain formulation, which therefore cannot be on trial itself.
KERNELS = "cpu" if FORCED == "reference" else None
POSITIVES, NEGATIVES = (
    tuple(word for word in table if word != "all") for table in (_words.POSITIVE, _words.NEGATIVE)
)
DISTANCES = _words.DISTANCE.names
LOSSES = {
    distance: tuple(name for name, word in _words.LOSS.items() if distance == "cosine" or not word.cosine)
    for distance in DISTANCES
}
REDUCTIONS = _words.REDUCTION.names
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CUTOFF, LIMIT = _words.CUTOFF.default, _words.NONZERO_LOSS_CUTOFF.default
LOSS_NUMBERS = {number.name: number.default for word in _words.LOSS.values() for number in word.numbers}


class Moved(torch.autograd.Function):
    """A tensor on DEVICE, in the same places of its memory; `Tensor.to` would close the gaps."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        if not tensor.numel():
            return tensor.to(DEVICE)
        shape, strides, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        end = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        return tensor.as_strided((end,), (1,), 0).to(DEVICE).as_strided(shape, strides, offset)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.cpu()


class Public:
    """tripletops, its functions run on DEVICE: tensors go there, and results come back."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(tripletops, name)
        if torch.device("cpu") == DEVICE:
            return function

        @wraps(function)
        def call(*given: Any, **options: Any) -> Any:
            given, options = tree_map_only(Tensor, Moved.apply, (given, options))
            return tree_map_only(Tensor, Tensor.cpu, function(*given, **options))

        return call


T = Public()


class TripletOptions:
    """The options of a triplet loss beside its batch and its rules; `numbers` are those of the losses."""

    def __init__(
        self, distance: str = "euclidean", loss: str = "margin", reduction: str = "mean", **numbers: float
    ) -> None:
        assert numbers.keys() <= LOSS_NUMBERS.keys(), numbers
        self.distance, self.loss, self.reduction = distance, loss, reduction
        self.numbers = {**LOSS_NUMBERS, **numbers}

    def options(self) -> dict[str, Any]:
        return {"distance": self.distance, "loss": self.loss, "reduction": self.reduction, **self.numbers}

    def __repr__(self) -> str:
        return f"TripletOptions({', '.join(f'{name}={value!r}' for name, value in self.options().items())})"


def options_of(distance: str, **numbers: float) -> list[TripletOptions]:
    """Every loss of the distance with every reduction."""
    return [
        TripletOptions(distance, loss, reduction, **numbers)
        for loss in LOSSES[distance]
        for reduction in REDUCTIONS
    ]


def leaves(batch: Batch) -> tuple[Batch, list[Tensor]]:
    """The same tensors, strides and all, as inputs to differentiate by."""
    emb = batch.emb.detach().requires_grad_()
    if batch.ref_emb is None:
        return replace(batch, emb=emb), [emb]
    ref_emb = batch.ref_emb.detach().requires_grad_()
    return replace(batch, emb=emb, ref_emb=ref_emb), [emb, ref_emb]


def run_loss(
    batch: Batch, positive: str, negative: str, options: TripletOptions, **numbers: float
) -> tuple[Tensor, list[Tensor], Tensor]:
    """(loss, gradients, the cotangent they were taken with); `numbers` are those of the rules."""
    batch, inputs = leaves(batch)
    words = {"positive": positive, "negative": negative, **numbers, **options.options()}
    loss = T.triplet_loss(batch.emb, batch.labels, **words, **batch.options())
    cotangent = cotangent_of(loss)
    return loss.detach(), list(torch.autograd.grad(loss, inputs, cotangent)), cotangent


def mined(
    batch: Batch, positive: str, negative: str, distance: str, **numbers: float | None
) -> tripletops.Triplets:
    words = {"positive": positive, "negative": negative, "distance": distance, **numbers}
    return T.mine(batch.emb, batch.labels, **words, **batch.options())


def bits(*tensors: Tensor) -> list[bytes]:
    """To compare results bit for bit, NaN included."""
    return [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


def cotangent_of(loss: Tensor) -> Tensor:
    if not loss.dim():
        return torch.full_like(loss, 1.5)
    return torch.linspace(-1.5, 1.5, loss.numel()).to(loss.dtype)
