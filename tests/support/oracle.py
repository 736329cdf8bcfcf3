"""What is true of a batch, in float64, by the plain formulation."""

from __future__ import annotations

import math
from functools import cached_property
from unittest import mock

import torch
from torch import Tensor

from tests.support.batches import Batch
from tests.support.calls import TripletOptions, leaves
from tripletops import reference
from tripletops._words import FUNCTION
from tripletops.reference.triplet import losses_of

RELATIVE = 1e-5
PICK = 2.0**-21


class Truth:
    """Everything about a batch that a pick is judged by, in float64."""

    def __init__(self, batch: Batch, distance: str) -> None:
        exact = batch.plain().to(torch.float64)
        self.batch, self.exact, self.name = batch, exact, distance
        self.x, kept = reference.kept_rows(exact.emb, exact.labels, exact.ignore_label)
        self.y, ref_kept, ref_labels, self_index = self.x, kept, exact.labels, torch.arange(len(self.x))
        if exact.ref_emb is not None and exact.ref_labels is not None:
            self.y, ref_kept = reference.kept_rows(exact.ref_emb, exact.ref_labels, exact.ignore_label)
            ref_labels = exact.ref_labels
            self_index = torch.full_like(exact.labels, -1) if exact.self_index is None else exact.self_index
        usable = kept[:, None] & ref_kept & (self_index[:, None] != torch.arange(len(self.y)))
        same = exact.labels[:, None] == ref_labels
        self.positives, self.negatives = usable & same, usable & ~same
        self.finite = bool(self.x.isfinite().all() and self.y.isfinite().all())
        self.rows = reference.Batch(self.x, self.y, kept, self.positives, self.negatives, self.finite)

        compare, report = reference.DISTANCES[distance]
        self.key = torch.cat([compare(rows[:, None], self.y) for rows in self.x.split(16)])
        self.distance = report(self.key)
        self.square = 2 * self.key if distance == "cosine" else self.key  # ½‖u−v‖² of unit rows is 1 − S

        width = self.x.shape[1]
        self.group = torch.zeros(len(self.y))  # equal for equal candidates
        if self.y.numel():
            self.group = torch.unique(self.y, dim=0, return_inverse=True)[1]
        rows = self.x[kept] if self.batch.ref_emb is None else torch.cat([self.x[kept], self.y[ref_kept]])
        if distance == "cosine" and width:
            rows = reference.unit(rows)
        radius = (rows - rows.mean(0)).square().sum(1).amax().item() if rows.numel() else 0.0
        self.finer = 2.0**-29 if batch.compute_type() == torch.float64 else 1.0
        self.bound = self.finer * PICK * (4 + math.sqrt(width)) * radius
        self.relative = self.finer * RELATIVE
        # A unit row is off by up to 2⁻²³ (norm and division), two by 2⁻²²; in float64 the oracle's are, too.
        self.unit_error = (
            2.0**-22 * (2 * self.finer if self.finer < 1 else 1) if distance == "cosine" else 0.0
        )

    @cached_property
    def noise(self) -> Tensor:
        return reference.noise(self.batch.seed, *self.key.shape, torch.device("cpu"))

    @cached_property
    def unit_square(self) -> Tensor:
        """Squared distances between unit rows, whatever the distance is; from a zero row they are 2."""
        return 2 * reference.key_matrix(reference.cosine, self.x, self.y)

    @cached_property
    def same_to_all(self) -> Tensor:
        """(N, 1), whether every candidate is as far from an anchor as any other: a zero row by cosine."""
        zero = (self.x == 0).all(1, keepdim=True)
        return zero if self.name == "cosine" else torch.zeros_like(zero)

    def floor(self, d: Tensor) -> Tensor:
        """What rounding the rows themselves does to their distance, beside the relative error.

        Two unit rows make ½(√(2d) + their errors)² of d.
        """
        return self.unit_error * (2 * d).sqrt() + self.unit_error**2 / 2


def largest_hash(truth: Truth, eligible: Tensor) -> Tensor:
    """(N,) uniform draws: of every anchor the eligible candidate with the largest hash, −1 for none."""
    if not len(truth.y):
        return torch.full((len(truth.x),), -1)
    return truth.noise.where(eligible, -1).argmax(1).where(eligible.any(1), -1)


def oracle_picks(
    truth: Truth, positive: str, negative: str, **numbers: float | None
) -> tuple[Tensor, Tensor]:
    """The picks of `reference.mine`, from distances already there."""
    options = {**reference.defaults(FUNCTION["mine"]), **numbers, "seed": truth.batch.seed}
    options |= {"positive": positive, "negative": negative, "distance": truth.name}
    with (
        mock.patch.object(reference, "distances", return_value=(truth.key, truth.distance)),
        mock.patch.object(reference, "noise", return_value=truth.noise),
    ):
        p, n, _, _ = reference.select(truth.rows, **options)
    return p, n


def loss_of_picks(
    batch: Batch, p: Tensor, n: Tensor, options: TripletOptions, cotangent: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(losses, reduced loss, gradients) of the oracle in the batch's own type, for picks already made."""
    batch, inputs = leaves(batch)
    x, _ = reference.kept_rows(batch.emb, batch.labels, batch.ignore_label)
    y = x
    if batch.ref_emb is not None and batch.ref_labels is not None:
        y, _ = reference.kept_rows(batch.ref_emb, batch.ref_labels, batch.ignore_label)
    losses = losses_of(x, y, p, n, options.distance, options.loss, **options.numbers)
    valid = (p >= 0) & (n >= 0)
    loss = reference.reduce_terms(losses, options.reduction, valid.sum(), (losses > 0).sum())
    return losses.detach(), loss.detach(), list(torch.autograd.grad(loss, inputs, cotangent.to(loss.dtype)))
