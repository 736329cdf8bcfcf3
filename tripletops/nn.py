"""The losses as modules: options are attributes, checked when the module is made; a batch goes to `forward`.

An attribute may be set to another value between two batches (a margin that grows, say): every call reads and
checks it anew.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module

from tripletops import functional

_OPTIONS = (
    "positive",
    "negative",
    "margin",
    "distance",
    "loss",
    "temperature",
    "ignore_label",
    "reduction",
    "backend",
)


class TripletLoss(Module):
    """`tripletops.triplet_loss` as a module.

    Args:
        positive: ``"hard"``, ``"easy"`` or ``"random"``.
        negative: ``"hard"``, ``"semihard"``, ``"easy"`` or ``"random"``.
        margin, distance, loss, temperature, ignore_label, reduction, backend: as in
            `tripletops.triplet_loss`.
    """

    def __init__(
        self,
        *,
        positive: str = "hard",
        negative: str = "hard",
        margin: float = 0.2,
        distance: str | None = None,
        loss: str = "margin",
        temperature: float = 1.0,
        ignore_label: int | None = None,
        reduction: str = "mean",
        backend: str | None = None,
    ) -> None:
        super().__init__()
        functional.check_options(
            positive=positive,
            negative=negative,
            margin=margin,
            distance=distance,
            loss=loss,
            temperature=temperature,
            ignore_label=ignore_label,
            reduction=reduction,
            backend=backend,
        )
        self.positive = positive
        self.negative = negative
        self.margin = margin
        self.distance = distance
        self.loss = loss
        self.temperature = temperature
        self.ignore_label = ignore_label
        self.reduction = reduction
        self.backend = backend

    def forward(
        self,
        emb: Tensor,
        labels: Tensor,
        *,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        self_index: Tensor | None = None,
        generator: torch.Generator | None = None,
        seed: int | Tensor | None = None,
    ) -> Tensor:
        """The loss of embeddings (N, D) with labels (N,); the rest is as in `tripletops.triplet_loss`."""
        return functional.triplet_loss(
            emb,
            labels,
            positive=self.positive,
            negative=self.negative,
            generator=generator,
            seed=seed,
            margin=self.margin,
            distance=self.distance,
            loss=self.loss,
            temperature=self.temperature,
            ref_emb=ref_emb,
            ref_labels=ref_labels,
            self_index=self_index,
            ignore_label=self.ignore_label,
            reduction=self.reduction,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        """Every option that has a value."""
        options = ((name, getattr(self, name)) for name in _OPTIONS)
        return ", ".join(f"{name}={value!r}" for name, value in options if value is not None)


class BatchHardLoss(TripletLoss):
    """`tripletops.batch_hard_loss` as a module: the farthest positive and the nearest negative (HPHN).

    Args:
        margin, distance, loss, temperature, ignore_label, reduction, backend: as in
            `tripletops.triplet_loss`.
    """

    def __init__(
        self,
        *,
        margin: float = 0.2,
        distance: str | None = None,
        loss: str = "margin",
        temperature: float = 1.0,
        ignore_label: int | None = None,
        reduction: str = "mean",
        backend: str | None = None,
    ) -> None:
        super().__init__(
            positive="hard",
            negative="hard",
            margin=margin,
            distance=distance,
            loss=loss,
            temperature=temperature,
            ignore_label=ignore_label,
            reduction=reduction,
            backend=backend,
        )


class EasyPositiveLoss(TripletLoss):
    """`tripletops.easy_positive_loss` as a module: nearest positive and, by default, nearest negative.

    Args:
        negative: ``"hard"`` (EPHN), ``"semihard"`` (EPSHN), ``"easy"`` (EPEN) or ``"random"``.
        loss, margin, distance, temperature, ignore_label, reduction, backend: as in
            `tripletops.easy_positive_loss`.
    """

    def __init__(
        self,
        *,
        negative: str = "hard",
        loss: str = "second_order",
        margin: float = 0.2,
        distance: str | None = None,
        temperature: float = 1.0,
        ignore_label: int | None = None,
        reduction: str = "mean",
        backend: str | None = None,
    ) -> None:
        super().__init__(
            positive="easy",
            negative=negative,
            margin=margin,
            distance=distance,
            loss=loss,
            temperature=temperature,
            ignore_label=ignore_label,
            reduction=reduction,
            backend=backend,
        )
