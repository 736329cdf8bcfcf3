"""One triplet per anchor, its positive and its negative picked by rule."""

from __future__ import annotations

from math import nan
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tripletops._call import Call, Differentiated, Evaluated, Gradients, Totals
from tripletops._words import LOSS, Numbers
from tripletops.backends.triton import losses
from tripletops.backends.triton.gradient import Pulling
from tripletops.backends.triton.objectives import MEAN, MEAN_NONZERO, NONE, SUM, Objective
from tripletops.backends.triton.pairs import Ends
from tripletops.backends.triton.rows import lifted
from tripletops.backends.triton.selection import mine
from tripletops.backends.triton.tiles import SCORED, launch


class Scores(NamedTuple):
    """(N,) float64."""

    loss: Tensor
    slope_ap: Tensor
    slope_an: Tensor


@triton.jit
def score_kernel(d_ap, d_an, numbers, out, length, LOSS: tl.constexpr, ROWS: tl.constexpr):
    """The loss of one triplet per anchor and its slopes; 0 where a distance is NaN."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < length
    p = tl.load(d_ap + rows, inside, float("nan")).to(tl.float64)
    n = tl.load(d_an + rows, inside, float("nan")).to(tl.float64)
    valid = (p == p) & (n == n)
    loss, slope_ap, slope_an = LOSS(tl.where(valid, p, 0.0), tl.where(valid, n, 0.0), numbers)
    tl.store(out.loss + rows, tl.where(valid, loss, 0.0), inside)
    tl.store(out.slope_ap + rows, tl.where(valid, slope_ap, 0.0), inside)
    tl.store(out.slope_an + rows, tl.where(valid, slope_an, 0.0), inside)


class Triplet(Objective):
    def evaluate(self) -> Evaluated:
        assert isinstance(self.given, Call)
        (picks, distances), finite = mine(self.given)
        count, kind = picks.shape[1], distances.dtype
        scores = self._scores(*distances.unbind())
        value, slopes = scores.loss, torch.stack([scores.slope_ap, scores.slope_an])
        above_zero = (scores.loss.to(kind) > 0).sum()
        if self.codes.reduction == MEAN_NONZERO:  # of the losses above 0 alone
            value, slopes = value.clamp(min=0), slopes.where(value >= 0, 0)
        if self.codes.reduction != NONE:
            counted = (picks >= 0).all(0).sum() if self.codes.reduction == MEAN else above_zero
            share = 1 if self.codes.reduction == SUM else 1 / counted.clamp(min=1).double()
            value, slopes = value.sum() * share, slopes * share
        if count == 0:  # no anchor, no loss to poison
            finite = torch.ones_like(finite)
        one = torch.ones((), dtype=torch.float64, device=self.device).where(finite, nan)
        return Evaluated(
            value.where(finite, nan).to(kind),
            torch.stack(Totals(above_zero.double().where(finite, 0), one, one)),
            picks,
            torch.cat([distances, slopes.to(kind)]),  # the slopes have the share of a mean in them
        )

    def _scores(self, d_ap: Tensor, d_an: Tensor) -> Scores:
        count = len(d_ap)
        scores = Scores(*torch.empty((3, count), dtype=torch.float64, device=self.device).unbind())
        numbers = torch.tensor(self.numbers, dtype=torch.float64, device=self.device)
        launch(
            score_kernel,
            (-(-count // SCORED),),
            self.device,
            d_ap=d_ap,
            d_an=d_an,
            numbers=Numbers(*numbers.unbind()),
            out=scores,
            length=count,
            LOSS=getattr(losses, LOSS.coded[self.codes.loss]),
            ROWS=SCORED,
        )
        return scores

    def differentiate(self, given: Differentiated) -> Gradients:
        emb, kind, distance = given.emb, given.saved.dtype, self.codes.distance
        row = torch.arange(len(emb), dtype=torch.int32, device=emb.device)
        ref_emb = None if given.ref_emb is None else lifted(given.ref_emb, distance)
        to = Pulling(given, Ends(lifted(emb, distance), ref_emb, row, distance), kind)
        distances, slopes = given.saved[:2], given.saved[2:]
        to.pairs(given.picks.to(torch.int32), distances, slopes * given.grad)
        finite = ~Totals(*given.totals).positive_share.isnan()
        return Gradients(*to.finished(finite), torch.empty(0, dtype=kind, device=emb.device))
