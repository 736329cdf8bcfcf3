"""Positives pulled to within one margin, negatives pushed beyond another."""

from __future__ import annotations

import pytest
import torch
from pytorch_metric_learning.losses import ContrastiveLoss
from torch import Tensor

from tests.support.backends import Backend
from tests.support.batches import Batch
from tests.support.calls import T
from tests.support.oracle import Truth
from tests.support.pairs import pair_terms, pairs_of
from tests.support.terms import Terms
from tests.support.tuples import ManyTuples, check_out_of_reach, run_tuples
from tests.support.worked import (
    LINE,
    LINE_LABELS,
    RANDOM_ROWS,
    check_peer,
    distances_of,
    plain_distance,
    random_rows,
    reductions_of,
    same,
    tensor,
    with_gradients,
)
from tripletops import reference
from tripletops._words import DISTANCE, REDUCTION

pytestmark = pytest.mark.usefixtures("one_thread")


# On paper


# [d_ap − 1.5]₊ by anchor: 0 1.5 | 0 .5 | 1.5 .5 | 3 | 3;  [2 − d_an]₊: 0 0 | .5 0 | 1.5 0 | 0 .5 1.5 | 0 0 0
@pytest.mark.parametrize(
    ("positive", "negative", "expected"),
    [
        ("all", "all", {"none": [1.5, 1, 3.5, 5, 3], "sum": 14, "mean": 10 / 6 + 4 / 4}),
        # 3 2 3 4.5 4.5 away | 2.5 1.5 .5 .5 4
        ("hard", "hard", {"none": [1.5, 1, 3, 4.5, 3], "sum": 13, "mean": 9.5 / 5 + 3.5 / 3}),
        # 1 1 2 4.5 4.5 away | 2.5 1.5 4 none 6
        ("easy", "semihard", {"none": [0, 0.5, 0.5, 3, 3], "sum": 7, "mean": 6.5 / 3 + 0.5 / 1}),
        # no negative nearer than 2
        ("all", "easy", {"none": [1.5, 0.5, 2, 3, 3], "sum": 10, "mean": 10 / 6}),
        ("hard", "all", {"none": [1.5, 1, 3, 5, 3], "sum": 13.5, "mean": 9.5 / 5 + 4 / 4}),
    ],
)
def test_a_line(positive, negative, expected):
    options = {"pos_margin": 1.5, "neg_margin": 2.0, "positive": positive, "negative": negative}
    for reduction, value in {**expected, "mean_nonzero": expected["mean"]}.items():
        assert same(reference.contrastive_loss(LINE, LINE_LABELS, reduction=reduction, **options), value)


def test_gradient():
    # Above 0: pairs 02 20 12 21 34 43 and 13 31 23 32. What x_0 … x_4 get of each, both directions alike:
    #   02: −1  0 +1  0  0      12:  0 −1 +1  0  0      34:  0  0  0 −1 +1        a sixth of each, twice
    #   13:  0 +1  0 −1  0      23:  0  0 −1 +1  0                                a quarter of each, twice
    options = {"pos_margin": 1.5, "neg_margin": 2.0}
    _, (gradient,) = with_gradients(lambda emb: reference.contrastive_loss(emb, LINE_LABELS, **options), LINE)
    assert same(gradient, [[-1 / 3], [-1 / 3 + 1 / 2], [2 / 3 - 1 / 2], [-1 / 3], [1 / 3]])


def test_no_slope_at_the_kink():
    # The positive is 1 away and the negative 2, as the margins are.
    options = {"ref_emb": tensor([[1], [2]]), "ref_labels": torch.tensor([0, 1])}
    loss, (gradient,) = with_gradients(
        lambda emb: reference.contrastive_loss(
            emb, torch.tensor([0]), pos_margin=1.0, neg_margin=2.0, **options
        ),
        tensor([[0]]),
    )
    assert loss == 0
    assert not gradient.any()


def test_pairs_stand_alone():
    # Rows 2 and 3 are alone in their classes, but negatives all round: |.25|, |.75|, |.5| from 0 1 .25 .75.
    emb, labels = tensor([[0], [1], [0.25], [0.75]]), torch.tensor([0, 0, 1, 2])
    # [1 − d]₊ by anchor: .75 .25 | .25 .75 | .75 .25 .5 | .25 .75 .5
    each = tensor([2, 2, 1.5, 1.5])
    assert same(reference.contrastive_loss(emb, labels, reduction="none"), each)
    assert same(reference.contrastive_loss(emb, labels), 2 / 2 + 5 / 10)


@pytest.mark.parametrize("rows", RANDOM_ROWS)
@pytest.mark.parametrize("distance", DISTANCE)
def test_by_loops(rows, distance):
    emb, labels = RANDOM_ROWS[rows]
    distances = distances_of(emb, labels, distance)
    pull = reductions_of([[max(p - 0.5, 0.0) for p in positives] for positives, _ in distances])
    push = reductions_of([[max(1.2 - n, 0.0) for n in negatives] for _, negatives in distances])
    for reduction in REDUCTION:
        counted = "mean_nonzero" if reduction == "mean" else reduction
        options = {"distance": distance, "reduction": reduction}
        loss = reference.contrastive_loss(emb, labels, pos_margin=0.5, neg_margin=1.2, **options)
        assert same(loss, tensor(pull[counted]) + tensor(push[counted]), 1e-12)


# Against pytorch-metric-learning


@pytest.mark.parametrize("seed", range(3))
def test_like_pytorch_metric_learning(seed):
    # Classes of one row included; a batch without negatives is where it differs: it keeps the positive terms.
    emb, labels = random_rows(22, 2, 12, seed)
    peer = ContrastiveLoss(pos_margin=0.3, neg_margin=1.1, distance=plain_distance())
    options = {"pos_margin": 0.3, "neg_margin": 1.1}
    check_peer(
        lambda emb: reference.contrastive_loss(emb, labels, **options), lambda emb: peer(emb, labels), emb
    )
    ref_emb, ref_labels = random_rows(17, 2, 4, seed + 10)
    check_peer(
        lambda emb, ref_emb: reference.contrastive_loss(
            emb, labels, ref_emb=ref_emb, ref_labels=ref_labels, **options
        ),
        lambda emb, ref_emb: peer(emb, labels, ref_emb=ref_emb, ref_labels=ref_labels),
        emb, ref_emb,
    )  # fmt: skip


# For the backends


def calls(distance: str, unit: float, classes: int) -> dict[str, ManyTuples]:
    by, between = {"distance": distance}, {"pos_margin": 0.7 * unit, "neg_margin": 1.1 * unit}
    return {
        "": ManyTuples("contrastive_loss", by | {"neg_margin": 1.1 * unit}),
        "between": ManyTuples("contrastive_loss", by | between),
        "picked": ManyTuples("contrastive_loss", by | between | {"positive": "easy", "negative": "semihard"}),
    }


def limits(distance: str, unit: float) -> list[ManyTuples]:
    """From margins of 0 to such that everything is active, or nothing."""
    margins = [size * unit for size in (0.0, 0.03, 0.5, 4.0, 1000.0)]
    ends = [(0.0, margin) for margin in margins] + [(margin, 0.0) for margin in margins]
    return [
        ManyTuples("contrastive_loss", {"distance": distance, "pos_margin": low, "neg_margin": high})
        for low, high in ends
    ]


def kinks() -> list[ManyTuples]:
    margins = {"pos_margin": 5.0, "neg_margin": 10.0}
    return [
        ManyTuples("contrastive_loss", margins),
        ManyTuples("contrastive_loss", margins | {"negative": "hard"}),
    ]


def whole_numbers() -> list[ManyTuples]:
    return [ManyTuples("contrastive_loss", {"pos_margin": 3.0, "neg_margin": 9.0})]


def of_equal_rows(distance: str, positives: int, negatives: int) -> list[tuple[ManyTuples, float]]:
    call = ManyTuples("contrastive_loss", {"distance": distance, "neg_margin": 1.25})
    return [(call, 1.25), (call.but(positive="hard", negative="semihard"), 0.0)]  # no negative is farther


def terms(truth: Truth, call: ManyTuples, picks: tuple[Tensor, Tensor] | None, exact: bool) -> list[Terms]:
    d, (positives, negatives) = truth.distance, pairs_of(truth, call, picks)
    start, end = d.new_tensor(call.options["pos_margin"]), d.new_tensor(call.options["neg_margin"])
    return [
        pair_terms(truth, positives, d - start, d + start),
        pair_terms(truth, negatives, end - d, d + end),
    ]


# On every backend


def pairs_need_no_others(backend: Backend) -> None:
    """Anchor 0 has negatives only, anchor 1 positives only."""
    batch = Batch(
        torch.tensor([[0.0], [4.0]]), torch.tensor([0, 1]),
        torch.tensor([[0.25], [5.0]]), torch.tensor([1, 1]), torch.tensor([-1, -1]),
    )  # fmt: skip
    losses, _, _ = run_tuples(batch, ManyTuples("contrastive_loss", {"reduction": "none"}))
    assert losses.tolist() == [0.75, 4.75]


def sums_may_leave_the_type(backend: Backend) -> None:
    # Row 0 has its positive at 1e38 and 98 negatives at 0: their mean fits float32, their sum does not.
    emb = torch.zeros(100, 1)
    emb[1] = 1e19
    labels = torch.cat([torch.zeros(2, dtype=torch.int64), torch.arange(98) // 49 + 1])
    if backend.slow:
        emb, labels = emb[[0, 1, *range(34, 68)]], labels[[0, 1, *range(34, 68)]]
    found = T.contrastive_loss(emb, labels, neg_margin=9e37, distance="sqeuclidean")
    expected = reference.contrastive_loss(emb.double(), labels, neg_margin=9e37, distance="sqeuclidean")
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


def a_negative_out_of_reach_may_lie_anywhere(backend: Backend) -> None:
    check_out_of_reach(backend, calls("euclidean", 1.0, 0)[""])


ON_EVERY_BACKEND = (
    pairs_need_no_others,
    sums_may_leave_the_type,
    a_negative_out_of_reach_may_lie_anywhere,
)
