"""The checks of tests/support themselves: errors above what is promised are found, smaller ones pass.

What is promised of one rule or loss alone is planted in its own file, in tests/rules and tests/losses.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.support.batches import random_batch
from tests.support.calls import DISTANCES, LOSSES, REDUCTIONS, TripletOptions
from tests.support.checks import check_mined, judge, pick_of
from tests.support.oracle import Truth, oracle_picks
from tests.support.planted import Outcome, triplets_of
from tests.support.words import RULES, every_option, numbers_of
from tripletops._words import LOSS, NEGATIVE, POSITIVE

# Picks


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("distance", DISTANCES)
def test_the_oracles_own_picks_pass(rules, distance):
    for batch in (random_batch(30, 5, classes=4), random_batch(9, 3, 25, classes=3)):
        truth = Truth(batch, distance)
        triplets = triplets_of(truth, *oracle_picks(truth, *rules[:2], **rules.numbers))
        check_mined(truth, *rules[:2], triplets, **rules.numbers)


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("side", ["positive", "negative"])
def test_wrong_picks_are_found(rules, side):
    """Every anchor's pick in turn: none, one of the wrong kind, itself, and any other that is not as good."""
    truth = Truth(random_batch(12, 5, classes=3), "euclidean")
    right = oracle_picks(truth, *rules[:2], **rules.numbers)
    at = ["positive", "negative"].index(side)
    table, word = ((POSITIVE, rules.positive), (NEGATIVE, rules.negative))[at]
    tried = 0
    for anchor in range(12):
        for wrong in range(-1, 12):
            if wrong == right[at][anchor]:
                continue
            picks = [pick.clone() for pick in right]
            picks[at][anchor] = wrong
            with pytest.raises(AssertionError):
                judge(pick_of(truth, table, word, triplets_of(truth, *picks), **rules.numbers))
            tried += 1
    assert tried >= 12 * 12


UNDRAWN = [each for each in RULES if not (POSITIVE[each.positive].draws or NEGATIVE[each.negative].draws)]


@pytest.mark.parametrize("rules", UNDRAWN, ids=str)
def test_a_tie_that_goes_to_the_later_index_is_found(rules):
    batch = random_batch(20, 7, classes=4)
    batch.emb[10:] = batch.emb[:10]
    batch.labels[10:] = batch.labels[:10]
    truth = Truth(batch, "euclidean")
    right = oracle_picks(truth, *rules[:2], **rules.numbers)
    check_mined(truth, *rules[:2], triplets_of(truth, *right), **rules.numbers)
    found = 0
    for side, anchor in ((side, anchor) for side in (0, 1) for anchor in range(20)):
        later = int(right[side][anchor]) + 10
        if not 10 <= later < 20 or later == anchor:
            continue
        picks = [pick.clone() for pick in right]
        picks[side][anchor] = later
        with pytest.raises(AssertionError, match="earlier candidate"):
            check_mined(truth, *rules[:2], triplets_of(truth, *picks), **rules.numbers)
        found += 1
    assert found > 10


# Distances


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("which", ["d_ap", "d_an"])
def test_wrong_distances_are_found(distance, which):
    truth = Truth(random_batch(12, 5, classes=3), distance)
    triplets = triplets_of(truth, *oracle_picks(truth, "hard", "easy"))
    reported = getattr(triplets, which)
    for factor, passes in ((1 + 2.0**-23, True), (1 + 2e-5, False), (1 - 2e-5, False), (math.nan, False)):
        moved = reported.clone()
        moved[4] *= factor
        given = triplets._replace(**{which: moved})
        if passes:
            check_mined(truth, "hard", "easy", given)
        else:
            with pytest.raises(AssertionError, match=which):
                check_mined(truth, "hard", "easy", given)


# Losses and gradients


def outcomes(distance: str, loss: str) -> list[Outcome]:
    batches = (random_batch(14, 5, classes=4), random_batch(9, 6, 17, classes=3))
    return [
        Outcome(options, batch)
        for turn in range(len(numbers_of(LOSS, loss)))
        for batch in batches
        for options in every_option(distance, turn)
        if options.loss == loss
    ]


EVERY_LOSS = [(distance, loss) for distance in DISTANCES for loss in LOSSES[distance]]


@pytest.mark.parametrize(("distance", "loss"), EVERY_LOSS)
def test_wrong_losses_are_found(distance, loss):
    """The promise is 1e-5·(d_ap + d_an + margin), by what the loss multiplies distances with."""
    for outcome in outcomes(distance, loss):
        assert outcome.passes()
        allowed = outcome.allowed.loss.float()
        some = outcome.loss != 0
        if not some.any():
            continue
        for sign in (1, -1):
            assert not outcome.passes(outcome.loss + 1.1 * sign * allowed * some)
        one = torch.zeros_like(outcome.loss).flatten()
        one[int(some.int().argmax())] = 1.0
        assert not outcome.passes(outcome.loss + 1.1 * (allowed * one.reshape(outcome.loss.shape)))
        # A promise of its own: the error is at most twice that of the plain formulation, plus 4 ulp.
        ulp = torch.finfo(torch.float32).eps * outcome.allowed.loss_size.max().float()
        assert outcome.passes(outcome.loss + ulp * some)
        assert not outcome.passes(outcome.loss + 60 * ulp * some) or outcome.allowed.may_jump
        assert not outcome.passes(outcome.loss * math.nan)
        assert not outcome.passes(outcome.loss.double())


@pytest.mark.parametrize(("distance", "loss"), EVERY_LOSS)
def test_wrong_gradients_are_found(distance, loss):
    for outcome in outcomes(distance, loss):
        for side, (gradient, allowed) in enumerate(
            zip(outcome.gradients, outcome.allowed.gradient, strict=True)
        ):
            row = int(gradient.norm(dim=1).argmax())
            if not gradient[row].any():
                continue
            kind = torch.finfo(torch.float32)
            column = int(gradient[row].abs().argmax())
            off = float(allowed[row] + kind.eps * gradient[row, column].abs())
            for moved, passes in (
                (1.1 * off, False),
                (-1.1 * off, False),
                (kind.eps * float(outcome.allowed.pull[side].max()), True),
                (-2 * float(gradient[row, column]), False),
                (math.nan, False),
            ):
                given = [each.clone() for each in outcome.gradients]
                given[side][row, column] += moved
                assert outcome.passes(gradients=given) == passes, (outcome.options, moved)


@pytest.mark.parametrize(("distance", "loss"), EVERY_LOSS)
def test_a_gradient_where_nothing_pulls_is_found(distance, loss):
    """The row of an ignored label must have exactly 0."""
    batch = random_batch(10, 5, classes=3)
    batch.labels[7] = 99
    for reduction in REDUCTIONS:
        outcome = Outcome(TripletOptions(distance, loss, reduction), replace(batch, ignore_label=99))
        given = outcome.gradients[0].clone()
        assert not given[7].any()
        given[7, 2] = 1e-30
        assert outcome.passes()
        assert not outcome.passes(gradients=[given])
