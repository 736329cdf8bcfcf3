"""(1/α)·ln(1 + Σ_P e^(−α(S−λ))) + (1/β)·ln(1 + Σ_N e^(β(S−λ))) of the pairs that mining leaves: negatives
nearer than the farthest positive + ε, positives farther than the nearest negative − ε. Under the cosine, S =
1 − d."""

from math import inf

import torch
from torch import Tensor

from tripletops.backends.triton.gradient import Pulling
from tripletops.backends.triton.objectives import Kept, Shares, Terms, Upstream
from tripletops.backends.triton.objectives.log_sum import LogSumObjective, softplus


class MultiSimilarity(LogSumObjective):
    @property
    def rate(self) -> float:
        return float(self.numbers.beta)

    def positive_exponent(self, d: Tensor) -> Tensor:
        return self.numbers.alpha * (d.double() - 1 + self.numbers.base)

    def is_kept(self, d: Tensor, nearest: Tensor) -> Tensor:
        return d.double() > nearest.double() - self.numbers.epsilon

    def limits(self, farthest: Tensor) -> Tensor:
        limit = (farthest.double() + self.numbers.epsilon).to(self.rows.kind)
        return limit.where(self.rows.valid, -inf)

    def farthest_positives(self) -> Tensor:
        """(L,) distances, −∞ for none."""
        farthest = self.by_anchor(-inf, self.rows.kind)
        for _, d in self.each_positive():
            farthest = torch.maximum(farthest, d.nan_to_num(nan=-inf).amax(0))
        return farthest

    def positive_sums(self, nearest: Tensor, largest: Tensor) -> Tensor:
        """(L,) Σ_P e^(exponent − largest), given the nearest negative."""
        if self.easy:
            return self.by_anchor(1)
        total = self.by_anchor(0)
        for _, d in self.each_positive():
            terms = (self.positive_exponent(d) - largest).exp()
            total += terms.where(self.is_kept(d, nearest), 0).sum(0)
        return total

    def terms(self) -> Terms:
        """Both logs are saved relative to their largest exponents, beside which their own digits would be
        lost."""
        beta, valid = self.numbers.beta, self.rows.valid
        nearest_positive, easy = self.nearest_positives()
        farthest = self.farthest_positives()
        nearest, negative_sum = self.sum_negatives(self.limits(farthest))
        largest = self.positive_exponent(nearest_positive if self.easy else farthest)
        positive = log_one_plus(largest.where(valid, 0), self.positive_sums(nearest, largest).where(valid, 0))
        reference = (beta * (1 - self.numbers.base - nearest.double())).where(valid, 0)
        negative = log_one_plus(reference, negative_sum.where(valid, 0))
        losses = positive / self.numbers.alpha + negative / beta
        log_sum = (negative - reference).where(negative_sum > 0, 0)
        saved = torch.stack([nearest.double(), log_sum, farthest.double(), positive - largest])
        saved = saved.where(valid, 0).to(self.rows.kind)
        picks = torch.stack([easy, torch.full_like(easy, -1)])
        return self.terms_together(losses, (losses > 0).double(), picks=picks, saved=saved)

    def shares(self, positives_above_zero: Tensor, negatives_above_zero: Tensor) -> Shares:
        return self.shares_of(self.rows.valid.sum().double(), negatives_above_zero)

    def pull(self, to: Pulling, kept: Kept, upstream: Upstream) -> None:
        nearest, log_sum, farthest, positive_log_sum = kept.saved
        positive_log_sum = self.positive_exponent(farthest) + positive_log_sum.double()
        for candidate, d in self.counted_positives(kept.picks[0]):
            exponent = self.positive_exponent(d)
            if self.easy:
                slope = torch.sigmoid(exponent)
            else:
                slope = (exponent - positive_log_sum).exp() * self.is_kept(d, nearest)
            to.pairs(candidate, d, slope * upstream.positive)
        self.push_negatives(to, self.limits(farthest), nearest, log_sum, upstream.negative)


def log_one_plus(exponent: Tensor, total: Tensor) -> Tensor:
    """ln(1 + e^exponent · total)."""
    return softplus(exponent + total.where(total > 0, 1).log()).where(total > 0, 0)
