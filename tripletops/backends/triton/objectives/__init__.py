"""What is minimised, a module for each objective; the driver here names none of them.

The module of the objective `triplet` has the class Triplet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from math import nan
from typing import NamedTuple

import torch
from torch import Tensor

from tripletops._call import Call, Differentiated, Evaluated, Gradients, Totals
from tripletops._words import OBJECTIVES, REDUCTION, Codes, Numbers
from tripletops.backends.triton.gradient import Pulling
from tripletops.backends.triton.pairs import Ends, measure
from tripletops.backends.triton.rows import Rows
from tripletops.backends.triton.tiles import RANKS

MEAN, MEAN_NONZERO, SUM, NONE = (REDUCTION.code[word] for word in ("mean", "mean_nonzero", "sum", "none"))


class Objective(ABC):
    """Anything that has a loss and gradients."""

    def __init__(self, given: Call | Differentiated) -> None:
        self.given = given
        self.codes, self.numbers = Codes(*given.codes), Numbers(*given.numbers)
        self.device = given.emb.device

    @abstractmethod
    def evaluate(self) -> Evaluated: ...

    @abstractmethod
    def differentiate(self, given: Differentiated) -> Gradients: ...


def objective_of(given: Call | Differentiated) -> Objective:
    word = OBJECTIVES[Codes(*given.codes).objective].name
    name = "".join(part.capitalize() for part in word.split("_"))
    objective: Objective = getattr(import_module(f"{__name__}.{word}"), name)(given)
    return objective


class Terms(NamedTuple):
    """(L,) float64, by position: the sums of an anchor's terms, and how many of them are above 0."""

    positive_loss: Tensor
    negative_loss: Tensor
    positive_terms: Tensor
    negative_terms: Tensor
    picks: Tensor | None = None  # (2, L) int32
    saved: Tensor | None = None  # (K, L), the rows that `_words.Objective.saved` names


class Shares(NamedTuple):
    """() float64: what a term counts for in the loss."""

    positive: Tensor
    negative: Tensor


class Kept(NamedTuple):
    """What forward kept, by position."""

    picks: Tensor  # (2, L) int32
    saved: Tensor  # (K, L)


class Upstream(NamedTuple):
    """(L,) float64: the gradient that arrives at the terms of an anchor, their shares included."""

    positive: Tensor
    negative: Tensor


class ManyTuples(Objective):
    """Sums over many tuples of an anchor: over its positives one by one, and over its negatives as a cost
    that is streamed, or over pairs that were picked. Anchors are named by position.

    Positives are measured from the rows in lists, one for each rank: rank k of an anchor is the k-th
    candidate of its class. Lists are made for as many ranks at a time as rows have dimensions, so that they
    take no more room than the rows. Negatives are streamed tile by tile, and once more in the backward.
    """

    def __init__(self, given: Call | Differentiated) -> None:
        super().__init__(given)
        self.rows = rows = Rows(given, self.codes.distance)
        self.length = len(rows.anchors.row)
        self.any = (rows.positives.sum() > 0) & (rows.negatives.sum() > 0)
        # Without anchors there is no loss to poison.
        self.finite = rows.finite if rows.count else torch.ones_like(rows.finite)
        self.learned: Tensor | None = None  # (L,) float64
        if given.learned is not None:
            self.learned = rows.by_position(given.learned.double())
            self.finite = self.finite & (self.learned.isfinite() | (rows.anchors.row < 0)).all()

    # The questions.

    # Whether pairs count for themselves: an anchor without a negative still has its positive pairs.
    pairs_stand_alone = False

    @abstractmethod
    def terms(self) -> Terms: ...

    @abstractmethod
    def shares(self, positives_above_zero: Tensor, negatives_above_zero: Tensor) -> Shares:
        """What each term counts for, given how many are above 0."""

    @abstractmethod
    def pull(self, to: Pulling, kept: Kept, upstream: Upstream) -> None:
        """Add what pairs pull with to the gradients."""

    def learned_gradient(self, kept: Kept, upstream: Upstream) -> Tensor:
        """(L,) the gradient of the learned numbers, where the objective learns some."""
        raise TypeError(f"{type(self).__name__} learns nothing")

    # What the answers are made with.

    def by_anchor(self, value: float, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.full((self.length,), value, dtype=dtype, device=self.device)

    def terms_together(self, loss: Tensor, above_zero: Tensor, **kept: Tensor) -> Terms:
        """Terms that are not told apart by positives and negatives: they count as those of negatives."""
        nothing = self.by_anchor(0)
        return Terms(nothing, loss, nothing, above_zero, **kept)

    def shares_of(self, terms: Tensor, above_zero: Tensor) -> Shares:
        """The same share for all terms, by how many there are and how many of them are above 0."""
        one = torch.ones((), dtype=torch.float64, device=self.device)
        if self.codes.reduction in (SUM, NONE):
            return Shares(one, one)
        share = one / (terms if self.codes.reduction == MEAN else above_zero).clamp(min=1)
        return Shares(share, share)

    @cached_property
    def ranks(self) -> list[tuple[int, int]]:
        """From which rank to which a list goes: the one thing that has to be read back from the device."""
        most, step = int((self.rows.end - self.rows.begin).max()), max(self.rows.width, RANKS)
        return [(first, min(first + step, most)) for first in range(0, most, step)]

    def positives(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """(ranks, L) rows and distances of the positives of these ranks, −1 and NaN for none."""
        rows = self.rows
        position = rows.begin + torch.arange(first, last, dtype=torch.int32, device=self.device)[:, None]
        there = (position < rows.end) & (position != rows.self_position)
        index = rows.candidates.row
        candidate = index[position.clamp(max=len(index) - 1).long()].where(there, -1)
        if not self.pairs_stand_alone:
            candidate = candidate.where(rows.valid, -1)
        return candidate, measure(rows, candidate)

    def each_positive(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows and distances of all positives, some ranks at a time."""
        for first, last in self.ranks:
            yield self.positives(first, last)

    # The driver.

    def evaluate(self) -> Evaluated:
        rows, terms = self.rows, self.terms()
        above_zero = terms.positive_terms.sum(), terms.negative_terms.sum()
        shares = self.shares(*above_zero)
        if self.codes.reduction == NONE:
            loss = rows.by_row(terms.positive_loss + terms.negative_loss)
        else:
            loss = terms.positive_loss.sum() * shares.positive + terms.negative_loss.sum() * shares.negative
        counts = self.any & self.finite
        totals = Totals(
            (above_zero[0] + above_zero[1]).where(counts, 0),
            *(share.where(self.any, 1).where(self.finite, nan) for share in shares),
        )
        picks, saved = terms.picks, terms.saved
        if picks is None:
            picks = torch.full((2, self.length), -1, dtype=torch.int32, device=self.device)
        if saved is None:
            saved = torch.empty((0, self.length), dtype=rows.kind, device=self.device)
        return Evaluated(
            loss.where(self.any, 0).where(self.finite, nan).to(rows.kind),
            torch.stack(totals),
            rows.by_row(picks.where(counts, -1).long()),
            rows.by_row(saved.where(counts, 0)),
        )

    def differentiate(self, given: Differentiated) -> Gradients:
        rows, totals = self.rows, Totals(*given.totals)
        picks = rows.by_position(given.picks).where(rows.anchors.row >= 0, -1)  # the padding picks nobody
        kept = Kept(picks.to(torch.int32), rows.by_position(given.saved))
        grad = given.grad.double()
        weight = rows.by_position(grad if self.codes.reduction == NONE else grad.expand(rows.count))
        weight = weight.where(self.any & (rows.anchors.row >= 0), 0)
        upstream = Upstream(weight * totals.positive_share, weight * totals.negative_share)
        ref_emb = None if rows.self_mining else rows.candidates.lifted
        to = Pulling(given, Ends(rows.anchors.lifted, ref_emb, rows.anchors.row, rows.distance), rows.kind)
        if rows.count:  # else nobody pulls, not even at rows that are not finite
            self.pull(to, kept, upstream)
        learned = torch.empty(0, dtype=rows.kind, device=self.device)
        if self.learned is not None:
            gradient = rows.by_row(self.learned_gradient(kept, upstream))
            learned = gradient.where(self.finite, nan).to(rows.kind)
        return Gradients(*to.finished(self.finite), learned)
