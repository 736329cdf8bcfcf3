"""The rule of ``"semihard"``: the nearest negative strictly farther than the picked positive."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.checks import Pick, check_first_of_equals
from tests.support.oracle import Truth
from tests.support.planted import judged, line
from tests.support.worked import COMPASS, COMPASS_LABELS, LINE, LINE_LABELS, tensor
from tests.support.worked_triplets import picks, same
from tripletops import reference
from tripletops._words import NEGATIVE

NAN = math.nan


def judge(pick: Pick) -> None:
    """The search knows the threshold only to within the promise for squared distances."""
    truth, (_, p, n, d_ap, d_an) = pick.truth, pick.triplets
    assert (n[p < 0] == -1).all(), f"{pick} of an anchor without a positive"
    rows = (p >= 0).nonzero()[:, 0]
    if not len(rows):
        return
    threshold = truth.square[rows, p[rows]][:, None]
    square, eligible, chosen = truth.square[rows], truth.negatives[rows], n[rows]
    surely = eligible & (square > threshold + truth.bound)
    assert not (surely.any(1) & (chosen < 0)).any(), f"no {pick} where there is one"
    found = (chosen >= 0).nonzero()[:, 0]
    if not len(found):
        return
    at = square[found, chosen[found]]
    assert eligible[found, chosen[found]].all(), f"{pick}: not eligible"
    assert (at > threshold[found, 0] - truth.bound).all(), f"{pick}: nearer than the threshold"
    assert (d_an[rows][found] > d_ap[rows][found]).all(), f"{pick}: not strictly farther"
    nearest = square.masked_fill(~surely, math.inf)[found].amin(1)
    assert (at <= nearest + truth.bound).all(), f"{pick}: a nearer one would do"
    check_first_of_equals(pick, truth.negatives & (truth.distance > d_ap.double()[:, None]))


# Semi-hard


@pytest.mark.parametrize("distance", ["euclidean", "sqeuclidean"])
@pytest.mark.parametrize(
    ("positive", "negatives", "d_an"),
    [
        # Strictly farther than 3, 2, 3, 4.5, 4.5: rows 4, 4, 4, none (2.5 is the farthest), 1 (6 < 7).
        ("hard", [4, 4, 4, -1, 1], [7.0, 6.0, 4.0, NAN, 6.0]),
        # Strictly farther than 1, 1, 2, 4.5, 4.5: rows 3 (2.5), 3 (1.5), 4 (0.5 is nearer than 2), none, 1.
        ("easy", [3, 3, 4, -1, 1], [2.5, 1.5, 4.0, NAN, 6.0]),
    ],
)
def test_semihard_on_a_line(positive, negatives, d_an, distance):
    _, n, _, reported = reference.mine(
        LINE, LINE_LABELS, positive=positive, negative="semihard", distance=distance
    )
    assert n.tolist() == negatives
    assert same(reported, tensor(d_an) ** (2 if distance == "sqeuclidean" else 1))


@pytest.mark.parametrize("scale", [1.0, 1e200, 1e-200])
@pytest.mark.parametrize(
    ("positive", "negatives", "d_an"),
    [
        # Strictly farther than 2, 1.6, .2, 2, .2: c's b is only as far as its e.
        ("hard", [-1, -1, 0, -1, 3], [NAN, NAN, 1, NAN, 0.4]),
        # Strictly farther than .4, .4, .2, 1.6, .2.
        ("easy", [2, 4, 0, -1, 3], [1, 0.72, 1, NAN, 0.4]),
    ],
)
def test_semihard_by_cosine(positive, negatives, d_an, scale):
    _, n, _, reported = reference.mine(
        COMPASS * scale, COMPASS_LABELS, positive=positive, negative="semihard", distance="cosine"
    )
    assert n.tolist() == negatives
    assert same(reported, d_an)


def test_semihard_leaves_out_duplicates_of_the_positive():
    # Row 0: the positive is 2 away, negatives 2 (the same place) and 3. Row 1: positive 2, negatives 0 and 1.
    # Row 2: positive 1, negatives 2 and 0. Row 3: positive 1, negatives 3 and 1.
    assert picks(
        tensor([[0], [2], [2], [3]]), torch.tensor([0, 0, 1, 1]), positive="hard", negative="semihard"
    ) == ([1, 0, 3, 2], [3, -1, 0, 0])


def test_an_anchor_without_a_positive_has_no_semihard_negative():
    # Row 0 has a positive but nothing is farther; row 2 has a negative but no positive.
    emb, labels = tensor([[0], [4], [1]]), torch.tensor([0, 0, 1])
    assert picks(emb, labels, positive="hard", negative="semihard") == ([1, 0, -1], [-1, -1, -1])


def test_the_loss_of_semihard_negatives():
    # Easy+semihard, margin 2: 1−2.5+2, 1−1.5+2, [2−4+2]₊ = 0, no negative, 4.5−6+2; four valid, three above 0
    options = {"positive": "easy", "negative": "semihard", "margin": 2.0}
    for reduction, expected in [
        ("none", [0.5, 1.5, 0, 0, 0.5]), ("sum", 2.5), ("mean", 2.5 / 4), ("mean_nonzero", 2.5 / 3)
    ]:  # fmt: skip
        assert same(reference.triplet_loss(LINE, LINE_LABELS, reduction=reduction, **options), expected)


def test_semihard_ties_go_to_the_first_candidate():
    # Positives of row 0 at ±1, negatives at ±2.
    emb, labels = tensor([[0], [-1], [1], [-2], [2], [-2], [2]]), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    for positive in ("hard", "easy"):
        for rows in (emb, -emb):
            p, n = picks(rows, labels, positive=positive, negative="semihard")
            assert (p[0], n[0]) == (1, 3)


@pytest.mark.parametrize("count", [2, 9, 100, 1000])
def test_nothing_is_strictly_farther_than_a_duplicate(count):
    emb, labels = torch.ones(count, 3), torch.arange(count) % 2
    assert picks(emb, labels, positive="easy", negative="semihard")[1] == [-1] * count


def test_zero_rows_have_no_semihard_negative():
    emb, labels = tensor([[0, 0], [3, 4], [0, 0], [4, 3]]), torch.tensor([0, 0, 1, 1])
    assert picks(emb, labels, positive="easy", negative="semihard", distance="cosine")[1] == [-1] * 4


def test_the_judge_is_as_sharp_as_the_promise():
    """The positive is at 1, and so is the threshold; there is a negative at 2."""
    threshold = 1.0
    bound = Truth(line(-1.0, 2.0, threshold), "euclidean").bound

    def accepts(place: float, pick: int) -> bool:
        return judged(line(-1.0, 2.0, place), NEGATIVE, "semihard", pick)

    # A negative that is surely beyond must not be passed over, neither for another nor for none.
    beyond = math.sqrt(threshold**2 + 2.5 * bound)
    assert accepts(beyond, 2)
    assert not accepts(beyond, 1)
    assert not accepts(beyond, -1)
    # One that is about at the threshold may be, and may be picked if it is beyond as reported.
    hardly = math.sqrt(threshold**2 + 0.9 * bound)
    assert accepts(hardly, 1)
    assert accepts(hardly, 2)
    # At the threshold, or nearer, it must not be picked.
    assert accepts(threshold, 1)
    assert not accepts(threshold, 2)
    assert not accepts(math.sqrt(threshold**2 - 0.5 * bound), 2)
