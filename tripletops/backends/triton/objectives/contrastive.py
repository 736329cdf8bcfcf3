"""Positives are pulled to within one margin, negatives are pushed beyond another."""

from torch import Tensor

from tripletops.backends.triton.objectives import Shares
from tripletops.backends.triton.objectives.pairs import PairHinges


class Contrastive(PairHinges):
    def start(self) -> Tensor:
        return self.by_anchor(self.numbers.pos_margin)

    def end(self) -> Tensor:
        return self.by_anchor(self.numbers.neg_margin)

    def shares(self, positives_above_zero: Tensor, negatives_above_zero: Tensor) -> Shares:
        """Each kind of pairs has a mean of its own, over the terms above 0."""
        return Shares(
            self.shares_of(positives_above_zero, positives_above_zero).positive,
            self.shares_of(negatives_above_zero, negatives_above_zero).negative,
        )
