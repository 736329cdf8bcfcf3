"""Positives within a boundary β that is learned, by a margin α, and negatives beyond it ("Sampling Matters
in Deep Embedding Learning")."""

from torch import Tensor

from tripletops.backends.triton.objectives import Kept, Shares, Upstream
from tripletops.backends.triton.objectives.pairs import PairHinges


class BetaMargin(PairHinges):
    @property
    def beta(self) -> Tensor:
        assert self.learned is not None
        return self.learned

    def start(self) -> Tensor:
        return self.beta - self.numbers.alpha

    def end(self) -> Tensor:
        return self.beta + self.numbers.alpha

    def shares(self, positives_above_zero: Tensor, negatives_above_zero: Tensor) -> Shares:
        above_zero = positives_above_zero + negatives_above_zero
        return self.shares_of(above_zero, above_zero)

    def learned_gradient(self, kept: Kept, upstream: Upstream) -> Tensor:
        _, _, positive_terms, negative_terms = kept.saved.double()
        return negative_terms * upstream.negative - positive_terms * upstream.positive
