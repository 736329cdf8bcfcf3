"""``"easy"``: the nearest positive, the farthest negative."""

from __future__ import annotations

import math

import pytest

from tests.support.calls import NEGATIVES, POSITIVES
from tests.support.checks import Pick, check_extreme
from tests.support.oracle import Truth
from tests.support.planted import judged, line
from tests.support.worked import COMPASS, COMPASS_LABELS, LINE, LINE_LABELS, tensor
from tests.support.worked_triplets import same
from tripletops import reference
from tripletops._words import NEGATIVE, POSITIVE


def judge(pick: Pick) -> None:
    check_extreme(pick, largest=not pick.positive)


@pytest.mark.parametrize("distance", ["euclidean", "sqeuclidean"])
@pytest.mark.parametrize("negative", NEGATIVES)
def test_the_nearest_positive_on_a_line(negative, distance):
    p, _, d_ap, _ = reference.mine(
        LINE, LINE_LABELS, positive="easy", negative=negative, distance=distance, seed=0
    )
    assert p.tolist() == [1, 0, 1, 4, 3]
    assert same(d_ap, tensor([1.0, 1.0, 2.0, 4.5, 4.5]) ** (2 if distance == "sqeuclidean" else 1))


@pytest.mark.parametrize("distance", ["euclidean", "sqeuclidean"])
@pytest.mark.parametrize("positive", POSITIVES)
def test_the_farthest_negative_on_a_line(positive, distance):
    _, n, _, d_an = reference.mine(
        LINE, LINE_LABELS, positive=positive, negative="easy", distance=distance, seed=0
    )
    assert n.tolist() == [4, 4, 4, 0, 0]
    assert same(d_an, tensor([7.0, 6.0, 4.0, 2.5, 7.0]) ** (2 if distance == "sqeuclidean" else 1))


@pytest.mark.parametrize("scale", [1.0, 1e200, 1e-200])
def test_easy_by_cosine(scale):
    p, n, d_ap, d_an = reference.mine(
        COMPASS * scale, COMPASS_LABELS, positive="easy", negative="easy", distance="cosine"
    )
    assert (p.tolist(), n.tolist()) == ([1, 0, 4, 1, 2], [4, 4, 0, 2, 0])
    assert same(d_ap, [0.4, 0.4, 0.2, 1.6, 0.2])
    assert same(d_an, [1.6, 0.72, 1, 1, 1.6])


@pytest.mark.parametrize(("factor", "passes"), [(0.5, True), (1.5, False), (-3.0, True)])
def test_the_judge_is_as_sharp_as_the_promise(factor, passes):
    """The candidate at index 3 is worse than the best one by what is promised, times the factor."""
    off = factor * Truth(line(-2.0, -1.0, 1.0, 1.5), "euclidean").bound
    assert judged(line(-1.0, 2.0, 1.5, math.sqrt(4 - off)), NEGATIVE, "easy", 3) == passes
    assert judged(line(-1.0, -2.0, 1.0, -math.sqrt(1 + off)), POSITIVE, "easy", 3) == passes
