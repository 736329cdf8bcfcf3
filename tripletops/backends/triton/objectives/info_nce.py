"""−ln(e^(S_ap/τ) / (e^(S_ap/τ) + Σ_N e^(S_an/τ))) of every positive pair, N being all negatives (NT-Xent).

Under the cosine, S = 1 − d. So it is softplus((d_ap − b)/τ + ln Z), where Z sums e^((b−d)/τ) over N and b is
the nearest negative's distance.
"""

from math import inf

import torch
from torch import Tensor

from tripletops.backends.triton.gradient import Pulling
from tripletops.backends.triton.objectives import Kept, Shares, Terms, Upstream
from tripletops.backends.triton.objectives.log_sum import LogSumObjective, softplus


class InfoNce(LogSumObjective):
    pairs_stand_alone = True

    @property
    def rate(self) -> float:
        return 1 / float(self.numbers.temperature)

    @property
    def counted(self) -> Tensor:
        """(L,) the anchors that have a positive."""
        return self.rows.positives > 0

    def exponent(self, d_ap: Tensor, nearest: Tensor, log_sum: Tensor) -> Tensor:
        """−∞ where there is no positive, or no negative."""
        z = self.rate * (d_ap.double() - nearest.double()) + log_sum.double()
        return z.nan_to_num(nan=-inf, posinf=inf, neginf=-inf)

    def terms(self) -> Terms:
        kind = self.rows.kind
        nearest, total = self.sum_negatives(self.limit_of(self.counted))
        any_negative = total > 0
        nearest = nearest.where(any_negative, 0)
        log_sum = total.where(any_negative, 1).log().where(any_negative, -inf).to(kind)
        _, nearest_positive = self.nearest_positives()
        losses, above_zero, slopes = self.by_anchor(0), self.by_anchor(0), self.by_anchor(0)
        for _, d in self.counted_positives(nearest_positive):
            z = self.exponent(d, nearest, log_sum)
            loss = softplus(z)
            losses += loss.sum(0)
            above_zero += (loss > 0).sum(0)
            slopes += torch.sigmoid(z).sum(0)
        saved = torch.stack([nearest, log_sum, slopes.to(kind)]).where(self.counted, 0)
        picks = torch.stack([nearest_positive, torch.full_like(nearest_positive, -1)])
        return self.terms_together(losses, above_zero, picks=picks, saved=saved)

    def shares(self, positives_above_zero: Tensor, negatives_above_zero: Tensor) -> Shares:
        positives = self.rows.positives.clamp(max=1) if self.easy else self.rows.positives
        return self.shares_of(positives.sum().double(), negatives_above_zero)

    def pull(self, to: Pulling, kept: Kept, upstream: Upstream) -> None:
        nearest, log_sum, slopes = kept.saved
        for candidate, d in self.counted_positives(kept.picks[0]):
            slope = self.rate * torch.sigmoid(self.exponent(d, nearest, log_sum))
            to.pairs(candidate, d, slope * upstream.positive)
        weight = upstream.negative * self.rate * slopes.double()
        finite = log_sum.where(log_sum > -inf, 0)  # an anchor without a negative has nothing to weigh
        self.push_negatives(to, self.limit_of(self.counted), nearest, finite, weight)
