"""What objectives share whose negatives enter by a log-sum-exp: ln Σ e^(−rate·d) over the negatives within a
limit, kept relative to the exponent of the nearest one. Under the cosine, S = 1 − d."""

from abc import abstractmethod
from collections.abc import Iterator
from math import inf

import torch
from torch import Tensor

from tripletops._words import POSITIVE
from tripletops.backends.triton.costs import add_exponentials, exponential_cost
from tripletops.backends.triton.gradient import Pulling
from tripletops.backends.triton.objectives import ManyTuples
from tripletops.backends.triton.pairs import measure


class LogSumObjective(ManyTuples):
    @property
    @abstractmethod
    def rate(self) -> float: ...

    @property
    def easy(self) -> bool:
        """Whether the nearest positive alone counts."""
        return self.codes.positive == POSITIVE.code["easy"]

    def limit_of(self, anchors: Tensor) -> Tensor:
        """(L,) no limit for some anchors; for the others nothing counts."""
        return self.by_anchor(inf, self.rows.kind).where(anchors, -inf)

    def sum_negatives(self, limit: Tensor) -> tuple[Tensor, Tensor]:
        """(L,) the nearest negative within the limit, infinite for none, and Σ e^(rate·(nearest − d))."""
        return add_exponentials(self.rows, limit, self._rate())

    def push_negatives(
        self, to: Pulling, limit: Tensor, nearest: Tensor, log_sum: Tensor, weight: Tensor
    ) -> None:
        """Add what the negatives pull with: e^(rate·(nearest − d) − log_sum) times the anchor's weight."""
        to.negatives(self.rows, exponential_cost(limit, nearest, log_sum, self._rate()), weight)

    def nearest_positives(self) -> tuple[Tensor, Tensor]:
        """(L,) distances, infinite for none, and rows, −1 for none."""
        nearest = self.by_anchor(inf, self.rows.kind)
        row = torch.full((self.length,), -1, dtype=torch.int32, device=self.device)
        for candidate, d in self.each_positive():
            least = d.nan_to_num(nan=inf).amin(0)
            # Within a class rows ascend with the rank: of equals the first one is the lowest.
            rank = torch.arange(len(d), device=self.device)[:, None]
            first = rank.where(d == least, len(d) - 1).amin(0)
            row = candidate.gather(0, first[None])[0].where(least < nearest, row)
            nearest = torch.minimum(nearest, least)
        return nearest, row

    def counted_positives(self, nearest: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows and distances of all positives or, if `easy`, of the nearest, whose rows are given."""
        if self.easy:
            yield nearest[None], measure(self.rows, nearest[None])
        else:
            yield from self.each_positive()

    def _rate(self) -> Tensor:
        return torch.tensor(self.rate, dtype=torch.float64, device=self.device)


def softplus(z: Tensor) -> Tensor:
    return torch.logaddexp(z, torch.zeros_like(z))
