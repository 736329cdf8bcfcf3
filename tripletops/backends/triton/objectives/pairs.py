"""Objectives of pairs that stand alone: [d − start]₊ of positive pairs and [end − d]₊ of negative pairs, all
of them or one of each for every anchor, picked by rule."""

from abc import abstractmethod

import torch
from torch import Tensor

from tripletops._call import Call
from tripletops._words import NEGATIVE, POSITIVE
from tripletops.backends.triton.costs import add_thresholds, threshold_cost
from tripletops.backends.triton.gradient import Pulling
from tripletops.backends.triton.objectives import Kept, ManyTuples, Terms, Upstream
from tripletops.backends.triton.selection import Selection


class PairHinges(ManyTuples):
    pairs_stand_alone = True

    @abstractmethod
    def start(self) -> Tensor:
        """(L,) float64."""

    @abstractmethod
    def end(self) -> Tensor: ...

    @property
    def picks_positives(self) -> bool:
        return self.codes.positive != POSITIVE.code["all"]

    @property
    def picks_negatives(self) -> bool:
        return self.codes.negative != NEGATIVE.code["all"]

    def terms(self) -> Terms:
        picks = torch.full((2, self.length), -1, dtype=torch.int32, device=self.device)
        distances = torch.full((2, self.length), torch.nan, dtype=self.rows.kind, device=self.device)
        if self.picks_positives or self.picks_negatives:
            assert isinstance(self.given, Call)
            picked = Selection(self.rows, self.codes, self.numbers, self.given.seed).select()
            picks = torch.stack([picked.positive, picked.negative])
            distances = torch.stack([picked.d_ap, picked.d_an])
        positive_loss, positive_terms = self._positive_terms(distances[0])
        negative_loss, negative_terms = self._negative_terms(distances[1])
        counts = torch.stack([positive_terms, negative_terms]).to(self.rows.kind)
        saved = torch.cat([distances, counts])
        return Terms(positive_loss, negative_loss, positive_terms, negative_terms, picks, saved)

    def _positive_terms(self, d_ap: Tensor) -> tuple[Tensor, Tensor]:
        """(L,) losses and numbers of terms above 0."""
        if self.picks_positives:
            return above_zero(d_ap[None].double() - self.start())
        losses, terms = self.by_anchor(0), self.by_anchor(0)
        for _, d in self.each_positive():
            loss, number = above_zero(d.double() - self.start())
            losses += loss
            terms += number
        return losses, terms

    def _negative_terms(self, d_an: Tensor) -> tuple[Tensor, Tensor]:
        if self.picks_negatives:
            return above_zero(self.end() - d_an[None].double())
        losses, slopes = add_thresholds(self.rows, self.end().to(self.rows.kind)[None], soft=False)
        return losses[0], slopes[0]

    def pull(self, to: Pulling, kept: Kept, upstream: Upstream) -> None:
        start, end = self.start(), self.end()
        d_ap, d_an = kept.saved[:1], kept.saved[1:2]
        if self.picks_positives:
            to.pairs(kept.picks[:1], d_ap, (d_ap > start) * upstream.positive)
        else:
            for candidate, d in self.each_positive():
                to.pairs(candidate, d, (d > start) * upstream.positive)
        if self.picks_negatives:
            to.pairs(kept.picks[1:], d_an, (d_an < end) * -upstream.negative)
        else:
            to.negatives(self.rows, threshold_cost(end.to(self.rows.kind)[None]), upstream.negative)


def above_zero(terms: Tensor) -> tuple[Tensor, Tensor]:
    """Of (lists, L) terms, NaN for none: the sums of those above 0 and their numbers."""
    above = terms > 0
    return terms.where(above, 0).sum(0), above.sum(0).double()
