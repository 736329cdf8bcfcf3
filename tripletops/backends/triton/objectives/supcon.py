"""−(1/#P)·Σ_P [S_ap/τ − ln Σ_A e^(S/τ)] for an anchor with positives P and candidates A other than self
("Supervised Contrastive Learning").

Under the cosine, S = 1 − d. So it is (mean of d_ap − b)/τ + ln Z, where Z sums e^((b−d)/τ) over A and b is
the nearest candidate's distance.
"""

from math import inf

import torch
from torch import Tensor

from tripletops.backends.triton.gradient import Pulling
from tripletops.backends.triton.objectives import Kept, Shares, Terms, Upstream
from tripletops.backends.triton.objectives.log_sum import LogSumObjective


class Supcon(LogSumObjective):
    pairs_stand_alone = True

    @property
    def rate(self) -> float:
        return 1 / float(self.numbers.temperature)

    @property
    def counted(self) -> Tensor:
        """(L,) the anchors that have a positive."""
        return self.rows.positives > 0

    def terms(self) -> Terms:
        rate, counted = self.rate, self.counted
        nearest, negative_sum = self.sum_negatives(self.limit_of(counted))
        base, total = nearest, self.by_anchor(0)
        for _, d in self.each_positive():
            base = torch.minimum(base, d.nan_to_num(nan=inf).amin(0))
            total += d.double().nan_to_num(nan=0).sum(0)
        apart = (base.double() - nearest.double()).where(nearest < inf, 0)
        z = negative_sum * (rate * apart).exp()
        for _, d in self.each_positive():
            z += (rate * (base.double() - d.double())).exp().nan_to_num(nan=0).sum(0)
        log_z = z.where(counted, 1).log()
        losses = rate * (total / self.rows.positives.clamp(min=1) - base.double()) + log_z
        losses = losses.where(counted, 0)
        saved = torch.stack([base.double(), log_z]).where(counted, 0).to(self.rows.kind)
        return self.terms_together(losses, (losses > 0).double(), saved=saved)

    def shares(self, positives_above_zero: Tensor, negatives_above_zero: Tensor) -> Shares:
        return self.shares_of(self.counted.sum().double(), negatives_above_zero)

    def pull(self, to: Pulling, kept: Kept, upstream: Upstream) -> None:
        nearest, log_sum = kept.saved
        for candidate, d in self.each_positive():
            share = (self.rate * (nearest.double() - d.double()) - log_sum.double()).exp()
            slope = self.rate * (1 / self.rows.positives.clamp(min=1).double() - share)
            to.pairs(candidate, d, slope * upstream.positive)
        weight = upstream.negative * self.rate
        self.push_negatives(to, self.limit_of(self.counted), nearest, log_sum, weight)
