"""What becomes of picks: their distances and losses, by row, and the loss of all of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tripletops._words import REDUCTION, Numbers
from tripletops.backends.triton import losses
from tripletops.backends.triton.device import NOBODY, scale_of
from tripletops.backends.triton.extremes import Best, best_of
from tripletops.backends.triton.losses import LossNumbers
from tripletops.backends.triton.pairs import measured
from tripletops.backends.triton.rows import LANGUAGE, Rows
from tripletops.backends.triton.tiles import DEPTH, MEASURED, SCORED, launch

MEAN: tl.constexpr = tl.constexpr(REDUCTION.code["mean"])
MEAN_NONZERO: tl.constexpr = tl.constexpr(REDUCTION.code["mean_nonzero"])
SUM: tl.constexpr = tl.constexpr(REDUCTION.code["sum"])
NONE: tl.constexpr = tl.constexpr(REDUCTION.code["none"])


class Scored(NamedTuple):
    """By row of emb."""

    picks: Tensor  # (2, N) int64, −1: none
    distances: Tensor  # (2, N), NaN: none
    scores: Tensor  # (3, N) float64: the losses and their derivatives by both distances; (0,) without a loss


@triton.jit
def score_kernel(
    x, y, names, frame, positive, negative, out, length, count, positive_splits, negative_splits, width,
    margin: tl.float64, temperature: tl.float64, sct_weight: tl.float64,
    LOSS: tl.constexpr, DISTANCE: tl.constexpr, EXPONENTS: tl.constexpr,
    KIND: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Merge what the splits of walks have kept, measure it from the rows, and store it by row, with its loss.

    Where rows are not finite nobody is picked. The loss of an anchor without a triplet is 0.
    """
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = at < count
    scale, finite = scale_of(frame, EXPONENTS, KIND)
    i = tl.where(finite, tl.load(names.row + at, inside, -1), -1)
    _, p = best_of(positive, at, inside, positive_splits, length)
    _, n = best_of(negative, at, inside, negative_splits, length)
    has_p = (i >= 0) & (p >= 0) & (p != NOBODY)
    has_n = (i >= 0) & (n >= 0) & (n != NOBODY)
    d_ap = measured(x, y, i, p, has_p, scale, width, DISTANCE, KIND, DEPTH)
    d_an = measured(x, y, i, n, has_n, scale, width, DISTANCE, KIND, DEPTH)
    to = tl.load(names.source + at, inside, 0)
    tl.store(out.picks + to, tl.where(has_p, p, -1).to(tl.int64), inside)
    tl.store(out.picks + count + to, tl.where(has_n, n, -1).to(tl.int64), inside)
    tl.store(out.distances + to, tl.where(has_p, d_ap, float("nan")), inside)
    tl.store(out.distances + count + to, tl.where(has_n, d_an, float("nan")), inside)
    if LOSS is not None:
        valid = has_p & has_n
        numbers = LossNumbers(
            margin=tl.full((), margin, tl.float64),
            temperature=tl.full((), temperature, tl.float64),
            sct_weight=tl.full((), sct_weight, tl.float64),
        )
        p_64, n_64 = d_ap.to(tl.float64), d_an.to(tl.float64)
        loss, slope_ap, slope_an = LOSS(tl.where(valid, p_64, 0.0), tl.where(valid, n_64, 0.0), numbers)
        tl.store(out.scores + to, tl.where(valid, loss, 0.0), inside)
        tl.store(out.scores + count + to, tl.where(valid, slope_ap, 0.0), inside)
        tl.store(out.scores + 2 * count + to, tl.where(valid, slope_an, 0.0), inside)


def score(rows: Rows, positive: Best, negative: Best, numbers: Numbers, loss: str | None) -> Scored:
    """Without the name of a loss there are no scores."""
    count, device = rows.count, rows.device
    out = Scored(
        torch.empty((2, count), dtype=torch.int64, device=device),
        torch.empty((2, count), dtype=rows.kind, device=device),
        torch.empty((0 if loss is None else 3, count), dtype=torch.float64, device=device),
    )
    launch(
        score_kernel,
        (-(-count // MEASURED),),
        device,
        x=rows.anchors.raw,
        y=rows.candidates.raw,
        names=rows.anchors.names,
        frame=rows.frame,
        positive=positive,
        negative=negative,
        out=out,
        length=rows.length,
        count=count,
        positive_splits=len(positive.row),
        negative_splits=len(negative.row),
        width=rows.width,
        margin=numbers.margin,
        temperature=numbers.temperature,
        sct_weight=numbers.sct_weight,
        LOSS=None if loss is None else getattr(losses, loss),
        DISTANCE=rows.distance,
        EXPONENTS=rows.exponents,
        KIND=LANGUAGE[rows.kind],
        ROWS=MEASURED,
        DEPTH=DEPTH,
    )
    return out


class Total(NamedTuple):
    loss: Tensor  # (), or (N,)
    totals: Tensor  # of `_call.Totals`
    saved: Tensor  # (4, N): the distances, and the slopes, which have the share of a mean in them


@triton.jit
def total_kernel(
    frame, scored, out, count,
    REDUCTION: tl.constexpr, EXPONENTS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program adds up all losses, in a fixed order."""
    total, above = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.int32)
    counted = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        loss = tl.load(scored.scores + at, inside, 0.0)
        p, n = tl.load(scored.picks + at, inside, -1), tl.load(scored.picks + count + at, inside, -1)
        above += (loss.to(KIND) > 0).to(tl.int32)
        counted += ((p >= 0) & (n >= 0)).to(tl.int32)
        total += tl.maximum(loss, 0.0) if REDUCTION == MEAN_NONZERO else loss
    _, finite = scale_of(frame, EXPONENTS, KIND)
    poison = tl.where(finite, 0.0, float("nan")).to(tl.float64)
    poison = tl.where(count == 0, 0.0, poison)  # no anchor, no loss to poison
    active, number = tl.sum(above, 0), tl.sum(counted, 0)
    share = tl.full((), 1.0, tl.float64)
    if REDUCTION == MEAN:
        share = share / tl.maximum(number, 1).to(tl.float64)
    if REDUCTION == MEAN_NONZERO:
        share = share / tl.maximum(active, 1).to(tl.float64)
    if REDUCTION != NONE:
        tl.store(out.loss, (tl.sum(total, 0) * share + poison).to(KIND))
    tl.store(out.totals, tl.where(poison == 0, active, 0).to(tl.float64))
    tl.store(out.totals + 1, 1.0 + poison)
    tl.store(out.totals + 2, 1.0 + poison)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        loss = tl.load(scored.scores + at, inside, 0.0)
        if REDUCTION == NONE:
            tl.store(out.loss + at, (loss + poison).to(KIND), inside)
        for side in tl.static_range(2):
            distance = tl.load(scored.distances + side * count + at, inside, 0.0)
            slope = tl.load(scored.scores + (side + 1) * count + at, inside, 0.0) * share
            if REDUCTION == MEAN_NONZERO:  # of the losses above 0 alone
                slope = tl.where(loss >= 0, slope, 0.0)
            tl.store(out.saved + side * count + at, distance, inside)
            tl.store(out.saved + (2 + side) * count + at, slope.to(KIND), inside)


def total(rows: Rows, scored: Scored, reduction: int) -> Total:
    out = Total(
        torch.empty((rows.count,) if reduction == NONE.value else (), dtype=rows.kind, device=rows.device),
        torch.empty(3, dtype=torch.float64, device=rows.device),
        torch.empty((4, rows.count), dtype=rows.kind, device=rows.device),
    )
    launch(
        total_kernel,
        (1,),
        rows.device,
        frame=rows.frame,
        scored=scored,
        out=out,
        count=rows.count,
        REDUCTION=reduction,
        EXPONENTS=rows.exponents,
        KIND=LANGUAGE[rows.kind],
        BLOCK=SCORED,
    )
    return out
