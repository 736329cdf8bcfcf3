"""Every triplet of an anchor, a positive of it and a negative of it. A positive makes a threshold for the
anchor's negatives: d_ap + margin for the hinge, d_ap for the soft margin."""

from math import inf

from torch import Tensor

from tripletops._words import LOSS
from tripletops.backends.triton.costs import add_thresholds, threshold_cost
from tripletops.backends.triton.gradient import Pulling
from tripletops.backends.triton.objectives import Kept, ManyTuples, Shares, Terms, Upstream


class BatchAll(ManyTuples):
    @property
    def soft(self) -> bool:
        return self.codes.loss == LOSS.code["soft_margin"]

    @property
    def triplets(self) -> Tensor:
        """(L,) how many an anchor has."""
        return self.rows.positives.double() * self.rows.negatives.double()

    def thresholds(self, d_ap: Tensor) -> Tensor:
        margin = 0.0 if self.soft else self.numbers.margin
        return (d_ap + margin).nan_to_num(nan=-inf)  # within the type: the sum may be infinite

    def terms(self) -> Terms:
        losses, slopes = self.by_anchor(0), self.by_anchor(0)
        for _, d in self.each_positive():
            loss, slope = add_thresholds(self.rows, self.thresholds(d), self.soft)
            losses += loss.sum(0)
            slopes += slope.sum(0)
        # The slopes of hinges count those above 0. Softplus is never 0.
        return self.terms_together(losses, self.triplets if self.soft else slopes)

    def shares(self, positives_above_zero: Tensor, negatives_above_zero: Tensor) -> Shares:
        return self.shares_of(self.triplets.sum(), negatives_above_zero)

    def pull(self, to: Pulling, kept: Kept, upstream: Upstream) -> None:
        for candidate, d in self.each_positive():
            thresholds = self.thresholds(d)
            _, slope = add_thresholds(self.rows, thresholds, self.soft)
            to.pairs(candidate, d, slope * upstream.positive)
            to.negatives(self.rows, threshold_cost(thresholds, self.soft), upstream.negative)
