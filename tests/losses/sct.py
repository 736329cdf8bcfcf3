"""``"sct"``: `first_order` where S_an ≤ S_ap, else sct_weight·S_an."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.backends import Backend
from tests.support.batches import Batch
from tests.support.calls import DTYPES, REDUCTIONS, TripletOptions, run_loss
from tests.support.planted import Outcome
from tests.support.tolerances import Gaps, Slopes, softplus_slopes
from tests.support.worked import tensor
from tests.support.worked_triplets import PAIR, pair_loss, same
from tripletops import reference

NUMBERS = ({"sct_weight": 1.0}, {"sct_weight": 2.0, "temperature": 0.1}, {"sct_weight": 0.0})


def slopes(gaps: Gaps) -> Slopes:
    """The loss jumps where S_an = S_ap. Rounding decides on which side a triplet is, but for ties."""
    rate, weight = 1 / gaps.numbers["temperature"], gaps.numbers["sct_weight"]
    gap = gaps.d_ap - gaps.d_an
    one, none = torch.ones_like(gap), torch.zeros_like(gap)
    both = softplus_slopes(gaps, gap * rate, rate * one, rate * one, rate, 2 * rate * gaps.off, none)
    # The number of losses above 0 is uncertain where S_an is about 0.
    flips = ((1 - gaps.d_an).abs() <= gaps.off + 2 * gaps.kind.eps) & (weight > 0)
    alone = Slopes(none, weight * one, weight * one, none, none, one, flips, none)
    contrast = (gap > 0) & ~gaps.tied
    either = (gap.abs() <= gaps.off) & ~gaps.tied
    chosen = Slopes(*(torch.where(contrast, a, b) for a, b in zip(alone, both, strict=True)))
    jump = (torch.logaddexp(gap * rate, none) - weight * (1 - gaps.d_an)).abs()
    return chosen._replace(
        ap=both.ap.where(either, chosen.ap),
        an=torch.maximum(both.an, alone.an).where(either, chosen.an),
        sharpness=torch.maximum(both.sharpness, alone.sharpness).where(either, chosen.sharpness),
        bend=one.where(either, chosen.bend),
        flips=chosen.flips | either,
        jump=jump.where(either, none),
    )


# ANCHOR with S_ap = .8 and S_an = .6: the rows of PAIR, the other way round.
EASY_PAIR = PAIR.flip(0)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("weight", [0.0, 1.0, 2.0])
def test_a_negative_that_is_less_similar_is_of_first_order(weight, temperature):
    # softplus((.6 − .8)/τ): ln(1 + e^−.2) = 0.59813887, ln(1 + e^−.4) = ln 1.67032005 = 0.51301525
    loss, by_anchor, by_pair = pair_loss(EASY_PAIR, loss="sct", temperature=temperature, sct_weight=weight)
    assert loss == pytest.approx({1.0: 0.59813887, 0.5: 0.51301525}[temperature], abs=1e-8)
    # σ(−.2/τ)/τ · (dS_an − dS_ap); dS/da is (0, .3) for the positive now, and (0, .4) for the negative
    slope = 1 / (1 + math.exp(0.2 / temperature)) / temperature
    assert same(by_anchor, [[0, 0.1 * slope]])
    assert same(by_pair, [[-0.072 * slope, 0.096 * slope], [0.128 * slope, -0.096 * slope]])


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("weight", [0.0, 1.0, 2.0])
def test_a_negative_that_is_more_similar_is_pushed_alone(weight, temperature):
    # S_an = .8 > S_ap = .6: the loss is .8 times the weight, and the positive has no slope.
    loss, by_anchor, by_pair = pair_loss(loss="sct", temperature=temperature, sct_weight=weight)
    assert loss == pytest.approx(0.8 * weight, rel=1e-15)
    assert same(by_anchor, [[0, 0.3 * weight]])
    assert same(by_pair, [[0, 0], [0.072 * weight, -0.096 * weight]])
    assert not by_pair[0].any()


def test_a_tie_is_of_first_order():
    # S_ap = S_an = .6: softplus(0) = ln 2, and its slope is ½; the anchor is pushed and pulled the same way.
    tie = PAIR[[0, 0]]
    loss, by_anchor, by_pair = pair_loss(tie, loss="sct", sct_weight=2.0)
    assert loss == pytest.approx(math.log(2), rel=1e-15)
    assert not by_anchor.any()
    assert same(by_pair, [[-0.064, 0.048], [0.064, -0.048]])
    # Mirrored rows tie as well: (3, 4) and (3, −4).
    loss, by_anchor, _ = pair_loss(tensor([[3, 4], [3, -4]]), loss="sct", sct_weight=2.0)
    assert loss == pytest.approx(math.log(2), rel=1e-15)
    assert same(by_anchor, [[0, -0.4]])  # (0, −.4)/2 − (0, .4)/2


# Anchor 0 has S_ap = −1 and S_an = −.6, so its loss is −.6; anchor 1, its positive, has S_ap = −1 and
# S_an = .6; anchor 2 has no positive.
OPPOSITES, OPPOSITE_LABELS = tensor([[1, 0], [-1, 0], [-0.6, 0.8]]), torch.tensor([0, 0, 1])


@pytest.mark.parametrize(("reduction", "expected"), [("none", [-0.6, 0.6, 0]), ("sum", 0.0), ("mean", 0.0)])
def test_a_contrast_below_zero(reduction, expected):
    loss = reference.triplet_loss(OPPOSITES, OPPOSITE_LABELS, loss="sct", reduction=reduction)
    assert same(loss, expected)


def test_a_contrast_below_zero_is_not_in_the_mean_of_those_above():
    loss = reference.triplet_loss(OPPOSITES, OPPOSITE_LABELS, loss="sct", reduction="mean_nonzero")
    assert same(loss, 0.6)


def test_sct_defaults_to_cosine():
    assert pair_loss(loss="sct")[0] == pair_loss(loss="sct", distance="cosine")[0]


def test_the_jump_is_allowed_only_where_rounding_decides():
    """The anchor is on the first axis; S_ap = .6, and S_an is .6 and as much more as is said."""
    for more, either in ((1e-7, True), (-1e-7, True), (1e-3, False), (-1e-3, False)):
        s = 0.6 + more
        pair = torch.tensor([[0.6, 0.8], [s, -math.sqrt(1 - s * s)]])
        batch = Batch(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), pair, torch.tensor([0, 1]))
        first, second = math.log(2), 2 * 0.6
        for reduction in ("sum", "none"):
            outcome = Outcome(TripletOptions("cosine", "sct", reduction, sct_weight=2.0), batch)
            jump = (second - first) if outcome.losses[0] < 1 else (first - second)
            assert outcome.passes()
            assert outcome.passes(outcome.loss + jump) == either
    # Between equal rows nothing is rounded: a tie is of first order.
    twins = Batch(
        torch.tensor([[1.0, 0.0]]), torch.tensor([0]), torch.tensor([[0.6, 0.8]] * 2), torch.tensor([0, 1])
    )
    outcome = Outcome(TripletOptions("cosine", "sct", "sum", sct_weight=2.0), twins)
    assert outcome.passes()
    assert not outcome.passes(outcome.loss + 1.2 - math.log(2))


# On every backend


def ties_are_of_first_order(backend: Backend) -> None:
    """A positive and a negative in the same place, not round; and a zero row, from which everything ties."""
    generator = torch.Generator().manual_seed(3)
    row = torch.randn(1, 19, generator=generator)
    for turn, dtype in enumerate(DTYPES):
        anchors = torch.randn(9, 19, generator=generator).to(dtype)
        anchors[4] = 0
        own = torch.zeros(9, dtype=torch.int64)
        batch = Batch(anchors, own, row.to(dtype).repeat(4, 1), torch.tensor([1, 0, 1, 0]))
        for reduction in backend.some(REDUCTIONS, turn):
            options = TripletOptions("cosine", "sct", reduction, sct_weight=5.0)
            loss, gradients, _ = run_loss(batch, "hard", "hard", options)
            total = loss.sum().item() / (9 if reduction in ("sum", "none") else 1)
            assert total == pytest.approx(math.log(2), rel=1e-6)
            assert not gradients[0].any()


ON_EVERY_BACKEND = (ties_are_of_first_order,)
