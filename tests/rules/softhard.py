"""``"softhard"``: a uniform one of the positives farther than the nearest negative, or of the negatives
nearer than the farthest positive; where there is none such, a uniform one of all."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.batches import Batch
from tests.support.calls import DISTANCES
from tests.support.checks import Pick
from tests.support.oracle import Truth, largest_hash
from tests.support.planted import judged
from tests.support.worked import COMPASS, COMPASS_LABELS, LINE, LINE_LABELS, distance_of, random_rows, tensor
from tests.support.worked_triplets import CHI_SQUARE, chi_square, picks
from tripletops import reference
from tripletops._words import NEGATIVE, POSITIVE


def judge(pick: Pick) -> None:
    """The largest hash of a set that is known but for its edge: a candidate as far as the limit, to within
    the promise for squared distances, may be in it or not."""
    truth, found = pick.truth, pick.one_of_all()
    if not len(found):
        return
    sign = 1 if pick.positive else -1  # positives are to be farther than the limit, negatives nearer
    height, eligible, others = sign * truth.square[found], pick.eligible[found], pick.others[found]
    limit = height.masked_fill(~others, math.inf).amin(1, keepdim=True)
    possibly = eligible & (height > limit - truth.bound) & ~at_the_limit(pick, found, height, limit, others)
    surely = possibly & (height > limit + truth.bound)
    noise, picked = truth.noise[found], pick.index[found, None]
    best = noise.where(surely, -1).amax(1, keepdim=True)
    drawn = possibly.gather(1, picked) & (noise.gather(1, picked) >= best)
    uniform = largest_hash(truth, pick.eligible)[found, None] == picked
    right = drawn | (uniform & ~surely.any(1, keepdim=True))
    assert right.all(), f"{pick}: not the largest hash of those that count"


def at_the_limit(pick: Pick, found: Tensor, height: Tensor, limit: Tensor, others: Tensor) -> Tensor:
    """Where the limit is one row's for certain, its duplicates are exactly at it, and so are not beyond it;
    from a zero row by cosine everything is."""
    group = pick.truth.group
    near = others & (height <= limit + pick.truth.bound)
    first = near.int().argmax(1)
    certain = near.any(1, keepdim=True) & (~near | (group == group[first][:, None])).all(1, keepdim=True)
    duplicates = certain & (group == group[first][:, None])
    return duplicates | (pick.truth.same_to_all[found] & others.any(1, keepdim=True))


# Of every anchor the positives farther than its nearest negative, and the negatives nearer than its farthest
# positive. On the line the nearest negatives are at 2.5, 1.5, .5, .5, 4, the farthest positives at 3, 2, 3,
# 4.5, 4.5; on the compass, by cosine, at 1, .2, .2, .4, .4 and 2, 1.6, .2, 2, .2.
LINE_SETS = [{2}, {2}, {0, 1}, {4}, {3}], [{3}, {3}, {3}, {0, 1, 2}, {2}]
# c has its only positive at .2, as far as its nearest negative, so it draws from all; e has it at .2 and no
# negative nearer.
COMPASS_SETS = [{3}, {0, 3}, {4}, {0, 1}, {2}], [{2, 4}, {2, 4}, {0, 1, 3}, {2, 4}, {0, 1, 3}]


def drawn_sets(emb: Tensor, labels: Tensor, distance: str) -> tuple[list[set[int]], list[set[int]]]:
    options = {"positive": "softhard", "negative": "softhard", "distance": distance}
    of_seed = [picks(emb, labels, **options, seed=seed) for seed in range(60)]
    positives, negatives = (zip(*side, strict=True) for side in zip(*of_seed, strict=True))
    return [set(each) for each in positives], [set(each) for each in negatives]


@pytest.mark.parametrize("distance", ["euclidean", "sqeuclidean"])
def test_sets_on_a_line(distance):
    assert drawn_sets(LINE, LINE_LABELS, distance) == LINE_SETS


def test_sets_by_cosine():
    assert drawn_sets(COMPASS, COMPASS_LABELS, "cosine") == COMPASS_SETS


def test_the_set_is_strict():
    # Row 0 is at 0. Its positives are at 1, 2, −2 and 3, its negatives at 2 and 3: farther than 2 is 3 alone,
    # nearer than 3 is 2 alone. Without the positive at 3 nothing is farther than 2, and nothing nearer.
    emb, labels = tensor([[0], [1], [2], [-2], [3], [2], [3]]), torch.tensor([0, 0, 0, 0, 0, 1, 1])
    positives, negatives = drawn_sets(emb, labels, "euclidean")
    assert (positives[0], negatives[0]) == ({4}, {5})
    emb, labels = emb[[0, 1, 2, 3, 5, 6]], labels[[0, 1, 2, 3, 5, 6]]
    positives, negatives = drawn_sets(emb, labels, "euclidean")
    assert (positives[0], negatives[0]) == ({1, 2, 3}, {4, 5})


@pytest.mark.parametrize("seed", [0, 5, -1])
def test_where_classes_are_apart_the_draw_is_from_all(seed):
    # Positives are at most 4 away, negatives at least 6.
    emb, labels = tensor([[i % 5 + 10 * (i // 5)] for i in range(20)]), torch.arange(20) // 5
    p, n = picks(emb, labels, positive="softhard", negative="softhard", seed=seed)
    truth = Truth(Batch(emb, labels, seed=seed), "euclidean")
    assert p == largest_hash(truth, truth.positives).tolist()
    assert n == largest_hash(truth, truth.negatives).tolist()


def test_without_the_other_kind_the_draw_is_from_all():
    # One class: no negative, uniform positives. All classes distinct: the other way round.
    emb, classes = tensor([[0], [1], [4], [9]]), torch.arange(4)
    options = {"positive": "softhard", "negative": "softhard"}
    positives, negatives = drawn_sets(emb, torch.zeros_like(classes), "euclidean")
    assert positives == [{1, 2, 3}, {0, 2, 3}, {0, 1, 3}, {0, 1, 2}]
    assert negatives == [{-1}] * 4
    positives, negatives = drawn_sets(emb, classes, "euclidean")
    assert positives == [{-1}] * 4
    assert negatives == [{1, 2, 3}, {0, 2, 3}, {0, 1, 3}, {0, 1, 2}]
    assert picks(emb[:1], classes[:1], **options, seed=0) == ([-1], [-1])
    nobody = {"ref_emb": emb[:0], "ref_labels": classes[:0]}
    assert picks(emb, classes, **options, **nobody, seed=0) == ([-1] * 4, [-1] * 4)


def test_zero_rows_by_cosine_draw_from_all():
    # From a zero row everything is at distance 1, so nothing is farther or nearer than anything else.
    emb, labels = torch.eye(6, dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1, 1])
    emb[0] = 0
    positives, negatives = drawn_sets(emb, labels, "cosine")
    assert (positives[0], negatives[0]) == ({1, 2}, {3, 4, 5})


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("seed", [7, -123])
def test_draws_by_loops(distance, seed):
    emb, labels = random_rows(30, 4, 4)
    labels[3] = -9
    p, n = picks(
        emb, labels, positive="softhard", negative="softhard", distance=distance, seed=seed, ignore_label=-9
    )
    hashes = reference.noise(seed, 30, 30, torch.device("cpu"))
    for a in range(30):
        d = [distance_of(emb[a], emb[c], distance) for c in range(30)]
        kept = [c for c in range(30) if c not in (a, 3)]
        if a == 3:
            assert (p[a], n[a]) == (-1, -1)
            continue
        positives = [c for c in kept if labels[c] == labels[a]]
        negatives = [c for c in kept if labels[c] != labels[a]]
        farther = [c for c in positives if d[c] > min(d[other] for other in negatives)] or positives
        nearer = [c for c in negatives if d[c] < max(d[other] for other in positives)] or negatives
        assert p[a] == max(farther, key=lambda c: hashes[a, c].item())
        assert n[a] == max(nearer, key=lambda c: hashes[a, c].item())


@pytest.mark.parametrize("over", ["anchors", "seeds"])
def test_draws_are_uniform(over):
    # The anchor is at 0, positives at 1, 2, …, 7, negatives at 2.5, 3.5, …, 8.5: the positives from 3 on are
    # farther than 2.5, and the negatives up to 6.5 nearer than 7, five of each.
    ref_emb = tensor([[i // 2 + 1 + 1.5 * (i % 2)] for i in range(14)])
    ref_labels = torch.arange(14) % 2
    anchors, seeds = (3000, [3]) if over == "anchors" else (1, range(3000))
    counts = torch.zeros(14)
    for seed in seeds:
        p, n, _, _ = reference.mine(
            torch.zeros(anchors, 1, dtype=torch.float64), torch.zeros(anchors, dtype=torch.int64),
            positive="softhard", negative="softhard", ref_emb=ref_emb, ref_labels=ref_labels, seed=seed,
        )  # fmt: skip
        counts += torch.bincount(p, minlength=14) + torch.bincount(n, minlength=14)
    positives, negatives = counts[::2], counts[1::2]
    assert positives.sum() == negatives.sum() == 3000
    assert not positives[:2].any()
    assert not negatives[5:].any()
    assert chi_square(positives[2:]) < CHI_SQUARE[4]
    assert chi_square(negatives[:5]) < CHI_SQUARE[4]


@pytest.mark.parametrize("side", ["positive", "negative"])
def test_the_judge_is_as_sharp_as_the_promise(side):
    """Of two candidates one is surely in the set, and the other one is at its edge."""
    # The limit, made by the other kind, is at 2.
    table, sign, sure = (POSITIVE, -1.0, 3.0) if side == "positive" else (NEGATIVE, 1.0, 1.0)
    outward = 1 if side == "positive" else -1

    def batch(square: float, seed: int) -> Batch:
        places = sign * torch.tensor([sure, math.sqrt(4 + outward * square), -2.0])
        return Batch(
            torch.zeros(1, 1),
            torch.zeros(1, dtype=torch.int64),
            places[:, None],
            torch.tensor([0, 0, 1] if side == "positive" else [1, 1, 0]),
            seed=seed,
        )

    def larger(seed: int) -> int:
        return int(Truth(batch(0.0, seed), "euclidean").noise[0, :2].argmax())

    seeds = [next(seed for seed in range(99) if larger(seed) == which) for which in (0, 1)]
    bound = Truth(batch(0.0, 0), "euclidean").bound
    for factor in (1.5, 0.5, -0.5, -1.5):
        within = abs(factor) < 1
        # The larger hash is that of the candidate at the edge.
        given = batch(factor * bound, seeds[1])
        assert judged(given, table, "softhard", 1) == (factor > -1)
        assert judged(given, table, "softhard", 0) == (within or factor < -1)
        # The larger hash is that of the one which is surely in the set.
        given = batch(factor * bound, seeds[0])
        assert judged(given, table, "softhard", 0)
        assert not judged(given, table, "softhard", 1)
    # A duplicate of the candidate that makes the limit is exactly at it, and so not in the set.
    twin = batch(0.0, seeds[1])
    assert twin.ref_emb is not None
    twin.ref_emb[1] = twin.ref_emb[2]
    assert judged(twin, table, "softhard", 0)
    assert not judged(twin, table, "softhard", 1)
