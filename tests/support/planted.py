"""Planted outcomes: picks, losses and gradients that nobody computed, to see what the checks make of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.support.batches import Batch
from tests.support.calls import TripletOptions, cotangent_of
from tests.support.checks import check_outcome, judge, pick_of
from tests.support.oracle import Truth, loss_of_picks, oracle_picks
from tests.support.tolerances import Tolerances
from tripletops import Triplets
from tripletops._words import POSITIVE, Table


def triplets_of(truth: Truth, p: Tensor, n: Tensor) -> Triplets:
    """With the true distances, rounded."""
    distances = []
    for pick in (p, n):
        found = (pick >= 0).nonzero()[:, 0]
        d = torch.full((len(pick),), math.nan, dtype=torch.float64)
        distances.append(d.index_put((found,), truth.distance[found, pick[found]]).float())
    return Triplets(torch.arange(len(p)), p, n, *distances)


def line(*places: float) -> Batch:
    """One anchor at 0, and candidates at these places: positives below 0, negatives above."""
    rows = torch.tensor(places)[:, None]
    labels = (rows[:, 0] > 0).long()
    return Batch(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), rows, labels)


def judged(
    batch: Batch, table: Table, word: str, pick: int, distance: str = "euclidean", **numbers: float
) -> bool:
    """Whether the rule's judge accepts the pick, the other one being the oracle's."""
    truth = Truth(batch, distance)
    p, n = oracle_picks(truth, "hard", "hard")
    pick = torch.tensor([pick])
    triplets = triplets_of(truth, *((pick, n) if table is POSITIVE else (p, pick)))
    try:
        judge(pick_of(truth, table, word, triplets, **numbers))
    except AssertionError:
        return False
    return True


class Outcome:
    """The oracle's loss and gradients of hard+hard triplets, and what is allowed."""

    def __init__(self, options: TripletOptions, batch: Batch) -> None:
        self.options, self.truth = options, Truth(batch, options.distance)
        p, n = oracle_picks(self.truth, "hard", "hard")
        self.triplets = triplets_of(self.truth, p, n)
        shape = batch.labels.shape if options.reduction == "none" else ()
        self.cotangent = cotangent_of(torch.zeros(shape))
        losses, loss, gradients = loss_of_picks(self.truth.exact, p, n, options, self.cotangent)
        self.losses, self.loss, self.gradients = losses, loss.float(), [each.float() for each in gradients]
        self.allowed = Tolerances(self.truth, p, n, options, losses, self.cotangent)

    def passes(self, loss: Tensor | None = None, gradients: list[Tensor] | None = None) -> bool:
        loss = self.loss if loss is None else loss
        gradients = self.gradients if gradients is None else gradients
        try:
            check_outcome(
                self.truth, self.triplets, self.options, loss, gradients, self.cotangent, "a planted one"
            )
        except AssertionError:
            return False
        return True
