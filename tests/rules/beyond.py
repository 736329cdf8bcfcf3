"""``"beyond"``: the nearest negative strictly farther than d_ap + offset; ``"semihard"`` is offset 0."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.backends import Backend
from tests.support.batches import Batch, lattice_batch, random_batch
from tests.support.calls import DISTANCES, DTYPES, POSITIVES, TripletOptions, bits, mined, run_loss
from tests.support.checks import Pick, check_first_of_equals
from tests.support.oracle import Truth
from tests.support.planted import judged, line
from tests.support.worked import COMPASS, COMPASS_LABELS, LINE, LINE_LABELS, tensor
from tests.support.worked_triplets import loss_and_gradients, picks, same
from tripletops import reference
from tripletops._words import NEGATIVE

NAN = math.nan
NUMBERS = ({"offset": 0.5}, {"offset": -0.25})  # exact in every type


def squared(truth: Truth, d: Tensor) -> Tensor:
    """What selection compares for a distance; −inf for one below 0, which everything is beyond."""
    square = {"euclidean": d.square(), "sqeuclidean": d, "cosine": 2 * d}[truth.name]
    return square.where(d >= 0, -math.inf)


def judge(pick: Pick) -> None:
    """The search knows the threshold only to within the promise for squared distances, and without an offset
    that is all. With one, d_ap and its sum with the offset are rounded before."""
    truth, (_, p, n, d_ap, d_an), offset = pick.truth, pick.triplets, pick.numbers["offset"]
    assert (n[p < 0] == -1).all(), f"{pick} of an anchor without a positive"
    rows = (p >= 0).nonzero()[:, 0]
    if not len(rows):
        return
    d, off = truth.distance[rows, p[rows]][:, None], torch.zeros(())
    if offset:
        off = 4 * torch.finfo(d_ap.dtype).eps * (d + (d + offset).abs()) + truth.floor(d)
    least, most = (squared(truth, d + offset + error) for error in (-off, off))
    square, eligible, chosen = truth.square[rows], truth.negatives[rows], n[rows]
    surely = eligible & (square > most + truth.bound)
    assert not (surely.any(1) & (chosen < 0)).any(), f"no {pick} where there is one"
    found = (chosen >= 0).nonzero()[:, 0]
    if not len(found):
        return
    at = square[found, chosen[found]]
    assert eligible[found, chosen[found]].all(), f"{pick}: not eligible"
    assert (at > least[found, 0] - truth.bound).all(), f"{pick}: nearer than the threshold"
    reported = d_ap[rows][found]
    threshold = torch.minimum(
        reported.double() + offset, (reported + offset).double()
    )  # the sum may be rounded
    assert (d_an.double()[rows][found] > threshold).all(), f"{pick}: not strictly farther"
    nearest = square.masked_fill(~surely, math.inf)[found].amin(1)
    assert (at <= nearest + truth.bound).all(), f"{pick}: a nearer one would do"
    check_first_of_equals(pick, truth.negatives & (truth.distance > d_ap.double()[:, None] + offset))


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


# Offsets


@pytest.mark.parametrize(
    ("positive", "offset", "negatives"),
    [
        # Strictly farther than 3 ½, 2 ½, 3 ½, 5, 5: row 2's is 4 away.
        ("hard", 0.5, [4, 4, 4, -1, 1]),
        # Strictly farther than 4, 3, 4, 5 ½, 5 ½: row 2's negative at exactly 4 is not.
        ("hard", 1.0, [4, 4, -1, -1, 1]),
        # Strictly farther than 4 ½, 3 ½, 4 ½, 6, 6: row 4's negative at exactly 6 is not, the one at 7 is.
        ("hard", 1.5, [4, 4, -1, -1, 0]),
        # Strictly farther than 2, 1, 2, 3 ½, 3 ½: nearer than the positive, but not by a whole 1.
        ("hard", -1.0, [3, 3, 4, -1, 2]),
        # Strictly farther than 2 ½, 1 ½, …: rows 0 and 1 have a negative at exactly that.
        ("hard", -0.5, [4, 4, 4, -1, 1]),
        # Strictly farther than 1, 0, 1, 2 ½, 2 ½: row 3's farthest negative is exactly 2 ½ away.
        ("hard", -2.0, [3, 3, 4, -1, 2]),
        # Everything is beyond a threshold below 0: the nearest negative of all.
        ("hard", -5.0, [3, 3, 3, 2, 2]),
        # Strictly farther than 1 ½, 1 ½, 2 ½, 5, 5: row 1's nearest negative is exactly 1 ½ away.
        ("easy", 0.5, [3, 4, 4, -1, 1]),
        # Strictly farther than 7, 7, 8, …: nothing is.
        ("easy", 6.0, [-1, -1, -1, -1, -1]),
        # Of thresholds of exactly 0, 0, 1, 3 ½, 3 ½.
        ("easy", -1.0, [3, 3, 4, -1, 2]),
    ],
)
def test_offsets_on_a_line(positive, offset, negatives):
    _, n, d_ap, d_an = reference.mine(
        LINE, LINE_LABELS, positive=positive, negative="beyond", offset=offset, distance="euclidean"
    )
    assert n.tolist() == negatives
    assert torch.equal(d_an.isnan(), n < 0)
    assert (d_an[n >= 0] > d_ap[n >= 0] + offset).all()


@pytest.mark.parametrize(
    ("offset", "negatives"),
    [
        # Squared distances of the hard positives: 9, 4, 9, 20.25, 20.25; of the negatives 6.25 49, 2.25 36,
        # .25 16, 6.25 2.25 .25, 49 36 16.
        (7.0, [4, 4, -1, -1, 1]),  # 16 is not strictly more than 9 + 7
        (-2.75, [4, 3, 4, -1, 1]),  # 6.25 is not strictly more than 9 − 2.75, 2.25 is more than 4 − 2.75
        (-4.25, [3, 3, 4, -1, 1]),  # 16 is not strictly more than 20.25 − 4.25
    ],
)
def test_offsets_are_of_the_distance_in_use(offset, negatives):
    options = {"positive": "hard", "negative": "beyond", "distance": "sqeuclidean", "offset": offset}
    assert picks(LINE, LINE_LABELS, **options)[1] == negatives


@pytest.mark.parametrize(
    ("offset", "negatives"),
    [
        # By cosine, strictly farther than .4, .4, .2, 1.6, .2 plus the offset; the negatives are at
        # 1 1.6, .2 .72, 1 .2 1, 1 .4, 1.6 .72 .4.
        (0.5, [2, -1, 0, -1, 1]),
        (0.75, [4, -1, 0, -1, 0]),
        (-0.25, [2, 2, 1, -1, 3]),
        (-1.0, [2, 2, 1, 2, 3]),
    ],
)
def test_offsets_by_cosine(offset, negatives):
    options = {"positive": "easy", "negative": "beyond", "distance": "cosine", "offset": offset}
    assert picks(COMPASS, COMPASS_LABELS, **options)[1] == negatives


def test_ties_beyond_go_to_the_first_candidate():
    # The positive of row 0 is 1 away; negatives at −2, 2, −3, 3.
    emb, labels = tensor([[0], [1], [3], [-2], [2], [-3]]), torch.tensor([0, 0, 1, 1, 1, 1])
    assert picks(emb, labels, positive="hard", negative="beyond", offset=0.5)[1][0] == 3
    assert picks(emb, labels, positive="hard", negative="beyond", offset=1.0)[1][0] == 2


def test_the_loss_of_negatives_beyond_an_offset():
    # Hard+beyond with offset 1, margin 2: 3−7+2 < 0, 2−6+2 < 0, none, none, 4.5−6+2 = .5, on a row 1 ← 4 → 3:
    # x_4's positive is at 2.5 and its negative at 1, both on its left.
    options = {"positive": "hard", "negative": "beyond", "offset": 1.0, "margin": 2.0, "reduction": "sum"}
    loss, gradient, _ = loss_and_gradients(LINE, LINE_LABELS, **options)
    assert loss == 0.5
    assert same(gradient, [[0], [1], [0], [-1], [0]])


def test_the_default_offset_is_that_of_semihard():
    for positive in POSITIVES:
        options = {"positive": positive, "seed": 3}
        semihard = reference.mine(LINE, LINE_LABELS, negative="semihard", **options)
        beyond = reference.mine(LINE, LINE_LABELS, negative="beyond", **options)
        assert bits(*semihard) == bits(*beyond)


@pytest.mark.parametrize(("word", "offset"), [("semihard", 0.0), ("beyond", 0.5), ("beyond", -0.25)])
def test_the_judge_is_as_sharp_as_the_promise(word, offset):
    """The positive is at 1, so that the threshold is at 1 + offset; there is a negative at 2."""
    numbers, threshold = {"offset": offset} if offset else {}, 1 + offset
    bound = Truth(line(-1.0, 2.0, threshold), "euclidean").bound
    # Distances of about 1 are rounded by 2⁻²⁴, and so is the sum.
    rounding = 8 * 2.0**-22 * (1 + threshold) * threshold if offset else 0.0

    def accepts(place: float, pick: int) -> bool:
        return judged(line(-1.0, 2.0, place), NEGATIVE, word, pick, **numbers)

    # A negative that is surely beyond must not be passed over, neither for another nor for none.
    beyond = math.sqrt(threshold**2 + 2.5 * bound + rounding)
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


# On every backend


def offset_zero_is_semihard_bit_for_bit(backend: Backend) -> None:
    batches = [
        random_batch(33, 7, classes=4),
        random_batch(17, 16, 40, classes=3),
        lattice_batch(40, 3),
        lattice_batch(40, 16, cosine=True),
    ]
    for turn, batch in enumerate(batches):
        for distance in backend.some(DISTANCES, turn):
            dtype, options = DTYPES[turn % 4], TripletOptions(distance, reduction="none")
            given = batch.to(dtype)
            for positive in backend.some(POSITIVES, turn):
                semihard, beyond = (
                    (
                        mined(given, positive, word, distance, **numbers),
                        run_loss(given, positive, word, options, **numbers),
                    )
                    for word, numbers in (("semihard", {}), ("beyond", {"offset": 0.0}))
                )
                assert bits(*semihard[0]) == bits(*beyond[0])
                assert bits(semihard[1][0], *semihard[1][1]) == bits(beyond[1][0], *beyond[1][1])


def the_threshold_is_strict(backend: Backend) -> None:
    """Candidates at 0, 1, …, 39, positives at 5, 12 and 20: some negative is exactly at the threshold."""
    line, positives = torch.arange(40.0)[:, None], torch.tensor([5, 12, 20])
    labels = torch.ones(40, dtype=torch.int64).index_fill(0, positives, 0)
    cases = [
        ("euclidean", 1.0, 22),
        ("euclidean", 0.5, 21),
        ("euclidean", -1.0, 21),
        ("euclidean", 19.0, -1),
        ("sqeuclidean", 41.0, 22),  # 20² + 41 = 21²
        ("sqeuclidean", -39.0, 21),  # 20² − 39 = 19²
        ("sqeuclidean", 1121.0, -1),  # 20² + 1121 = 39²
    ]
    for turn, dtype in enumerate(DTYPES):
        anchor, own = torch.zeros(1, 1, dtype=dtype), torch.zeros(1, dtype=torch.int64)
        batch = Batch(anchor, own, line.to(dtype), labels)
        for distance, offset, expected in backend.some(cases, turn, few=2):
            assert mined(batch, "hard", "beyond", distance, offset=offset).negative.item() == expected


ON_EVERY_BACKEND = (offset_zero_is_semihard_bit_for_bit, the_threshold_is_strict)
