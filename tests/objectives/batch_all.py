"""Every triplet of an anchor, a positive of it and a negative of it."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.reducers import AvgNonZeroReducer, MeanReducer
from torch import Tensor

from tests.support.backends import Backend
from tests.support.batches import Batch, random_batch
from tests.support.calls import KERNELS, T
from tests.support.oracle import Truth
from tests.support.terms import Terms, Triples, errors_of, triplets_of
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


def batch_all(*arguments: Tensor, **options: object) -> Tensor:
    return reference.batch_all_loss(*arguments, **options)[0]


# On paper


def test_a_line():
    # d_ap − d_an + 1 by anchor and positive, above 0 or not:
    #   0:  1: −.5, −5   2: 1.5, −3          1.5
    #   1:  0: .5, −4    2: 1.5, −3          2
    #   2:  0: 3.5, 0    1: 2.5, −1          6
    #   3:  4: 3, 4, 5                       12
    #   4:  3: −1.5, −.5, 1.5                1.5       18 triplets, 9 of them above 0, one on the kink
    expected = {"none": [1.5, 2, 6, 12, 1.5], "sum": 23, "mean": 23 / 18, "mean_nonzero": 23 / 9}
    for reduction, value in expected.items():
        loss, active = reference.batch_all_loss(LINE, LINE_LABELS, margin=1.0, reduction=reduction)
        assert same(loss, value)
        assert active.dtype == torch.int64
        assert active.shape == ()
        assert active == 9
    # The derivative of |x_i − x_j| is ±1; what x_0 … x_4 get from each triplet above 0:
    #   0 2 3:   0  0 +1 −1  0       2 0 3:  −1  0  0 +1  0       3 4 1:   0 +1  0 −2 +1
    #   1 0 3:  −1 +2  0 −1  0       2 1 3:   0 −1  0 +1  0       3 4 2:   0  0 −1  0 +1
    #   1 2 3:   0  0 +1 −1  0       3 4 0:  +1  0  0 −2 +1       4 3 2:   0  0 +1 −1  0
    _, (gradient,) = with_gradients(
        lambda emb: batch_all(emb, LINE_LABELS, margin=1.0, reduction="sum"), LINE
    )
    assert same(gradient, [[-1], [2], [2], [-6], [3]])


def test_soft_margin():
    # One anchor at 0, positive at 1, negatives at 1 and 3: softplus(0) + softplus(−2) = ln 2 + ln(1 + e^−2)
    options = {"loss": "soft_margin", "margin": 77.0, "ref_labels": torch.tensor([0, 1, 1])}
    total = math.log(2) + math.log1p(math.exp(-2))
    for reduction, value in {
        "none": [total],
        "sum": total,
        "mean": total / 2,
        "mean_nonzero": total / 2,
    }.items():
        loss, active = reference.batch_all_loss(
            tensor([[0]]), torch.tensor([0]), ref_emb=tensor([[1], [1], [3]]), reduction=reduction, **options
        )
        assert same(loss, value)
        assert active == 2
    # softplus(−999) rounds to 0, which makes it no less a term.
    loss, active = reference.batch_all_loss(
        tensor([[0]]),
        torch.tensor([0]),
        ref_emb=tensor([[1], [1], [1000]]),
        reduction="mean_nonzero",
        **options,
    )
    assert same(loss, math.log(2) / 2)
    assert active == 2


def test_anchors_need_a_positive_and_a_negative():
    # Rows 2 and 3 are alone in their classes. Rows 0 and 1: 1 − .25, 1 − .75, and so on.
    emb, labels = tensor([[0], [1], [0.25], [0.75]]), torch.tensor([0, 0, 1, 2])
    assert same(batch_all(emb, labels, margin=0.0, reduction="none"), [0.75 + 0.25, 0.25 + 0.75, 0, 0])


@pytest.mark.parametrize("rows", RANDOM_ROWS)
@pytest.mark.parametrize("distance", DISTANCE)
def test_by_loops(rows, distance):
    emb, labels = RANDOM_ROWS[rows]
    hinge, soft = [], []
    for positives, negatives in distances_of(emb, labels, distance):
        hinge.append([max(p - n + 0.3, 0.0) for p in positives for n in negatives])
        soft.append([math.log1p(math.exp(p - n)) for p in positives for n in negatives])
    for reduction in REDUCTION:
        options = {"distance": distance, "reduction": reduction}
        loss, active = reference.batch_all_loss(emb, labels, margin=0.3, **options)
        assert same(loss, reductions_of(hinge)[reduction], 1e-12)
        assert active == sum(term > 0 for of_anchor in hinge for term in of_anchor)
        loss, active = reference.batch_all_loss(emb, labels, loss="soft_margin", **options)
        assert same(loss, reductions_of(soft)[reduction], 1e-12)
        assert active == sum(map(len, soft))


def test_a_batch_of_three_hundred():
    emb, labels = random_rows(300, 16, 30)
    loss, (gradient,) = with_gradients(lambda emb: batch_all(emb, labels), emb)
    assert loss > 0
    assert gradient.isfinite().all()


# Against pytorch-metric-learning


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("reduction", "reducer"), [("mean", MeanReducer), ("mean_nonzero", AvgNonZeroReducer)]
)
def test_like_pytorch_metric_learning(reduction, reducer, seed):
    emb, labels = random_rows(22, 4, 5, seed)
    peer = TripletMarginLoss(margin=0.4, distance=plain_distance(), reducer=reducer())
    check_peer(
        lambda emb: batch_all(emb, labels, margin=0.4, reduction=reduction),
        lambda emb: peer(emb, labels),
        emb,
    )
    # Its smooth loss keeps the margin, and the softplus it calls is linear from 20 on.
    smooth = TripletMarginLoss(margin=0.0, smooth_loss=True, distance=plain_distance(), reducer=reducer())
    check_peer(
        lambda emb: batch_all(emb, labels, loss="soft_margin", reduction=reduction),
        lambda emb: smooth(emb, labels),
        emb,
    )
    ref_emb, ref_labels = random_rows(17, 4, 4, seed + 10)
    check_peer(
        lambda emb, ref_emb: batch_all(
            emb, labels, margin=0.4, reduction=reduction, ref_emb=ref_emb, ref_labels=ref_labels
        ),
        lambda emb, ref_emb: peer(emb, labels, ref_emb=ref_emb, ref_labels=ref_labels),
        emb, ref_emb,
    )  # fmt: skip


# For the backends


def calls(distance: str, unit: float, classes: int) -> dict[str, ManyTuples]:
    return {
        "": ManyTuples("batch_all_loss", {"distance": distance, "margin": 0.2 * unit}),
        "soft": ManyTuples("batch_all_loss", {"distance": distance, "loss": "soft_margin"}),
    }


def limits(distance: str, unit: float) -> list[ManyTuples]:
    """From a margin of 0 to one so large that everything is active."""
    margins = [size * unit for size in (0.0, 0.03, 0.5, 4.0, 1000.0)]
    return [ManyTuples("batch_all_loss", {"distance": distance, "margin": margin}) for margin in margins]


def kinks() -> list[ManyTuples]:
    return [ManyTuples("batch_all_loss", {"margin": 5.0})]


def whole_numbers() -> list[ManyTuples]:
    return [ManyTuples("batch_all_loss", {"margin": 2.0})]


def of_equal_rows(distance: str, positives: int, negatives: int) -> list[tuple[ManyTuples, float]]:
    return [
        (ManyTuples("batch_all_loss", {"distance": distance, "margin": 0.25}), 0.25),
        (ManyTuples("batch_all_loss", {"distance": distance, "loss": "soft_margin"}), math.log(2)),
    ]


def terms(truth: Truth, call: ManyTuples, picks: tuple[Tensor, Tensor] | None, exact: bool) -> list[Terms]:
    soft = call.options["loss"] == "soft_margin"
    margin = 0.0 if soft else call.options["margin"]
    found, error = Terms(truth), errors_of(truth)
    for rows, p, n, is_positive, is_negative in triplets_of(truth):
        all_of = Triples(truth, error, margin, rows, p, n)
        valid = is_positive[:, :, None] & is_negative[:, None]
        z, off = all_of.z, all_of.off
        if soft:
            value, slope = reference.softplus(z) * valid, torch.sigmoid(z) * valid
            wobble = (torch.sigmoid(z + off) - torch.sigmoid(z - off)) * valid
            weight = torch.sigmoid(z + off) * valid
        else:
            value, slope = z.relu() * valid, ((z > 0) & valid).double()
            wobble = ((z.abs() <= off) & (off > 0) & valid).double()
            weight = ((z > -off) & valid).double()
        found.count += int(valid.sum())
        found.nonzero += int(valid.sum() if soft else slope.sum())
        found.flips += 0 if soft else int(wobble.sum())
        found.value[rows] = value.sum((1, 2))
        found.off[rows] = (off * weight).sum((1, 2))
        found.size[rows] = (all_of.size * weight + value).sum((1, 2))
        all_of.spread(found.slope, slope)
        all_of.spread(found.wobble, wobble)
    found.steady |= soft
    return [found]


# On every backend


def active_triplets_are_counted(backend: Backend) -> None:
    emb = LINE.float()
    for reduction in REDUCTION:
        loss, active = T.batch_all_loss(emb, LINE_LABELS, margin=1.0, reduction=reduction, return_active=True)
        assert active == 9  # by hand: test_a_line
        assert active.dtype == torch.int64
        assert active.shape == ()
        assert torch.equal(loss, T.batch_all_loss(emb, LINE_LABELS, margin=1.0, reduction=reduction))
    _, active = T.batch_all_loss(emb, LINE_LABELS, loss="soft_margin", return_active=True)
    assert active == 18
    _, active = T.batch_all_loss(emb, torch.arange(5), return_active=True)
    assert active == 0


def it_is_the_sum_over_all_triplets(backend: Backend) -> None:
    shapes = [*product((3, 9, 22, 40), (1, 2, 5, 16), (2, 3, 5))]
    for turn, (count, width, classes) in enumerate(shapes if backend.every_word else shapes[::7]):
        batch = random_batch(count, width, classes=classes, dtype=torch.float64, seed=turn)
        margin, terms = (0.0, 0.3, 2.0)[turn % 3], []
        for positives, negatives in distances_of(batch.emb, batch.labels, "euclidean"):
            terms.append([max(p - n + margin, 0.0) for p in positives for n in negatives])
        active = sum(term > 0 for of_anchor in terms for term in of_anchor)
        for reduction in backend.some(("sum", "mean", "mean_nonzero"), turn):
            loss, found = T.batch_all_loss(
                batch.emb,
                batch.labels,
                margin=margin,
                reduction=reduction,
                return_active=True,
                backend=KERNELS,
            )
            expected = reductions_of(terms)[reduction] if any(terms) else 0.0
            assert math.isclose(loss.item(), expected, rel_tol=1e-10, abs_tol=1e-10)
            assert found == active


def soft_margins_of_near_and_far_thresholds(backend: Backend) -> None:
    """Exponentials are split where thresholds are within 10 of each other. All distances are exact; what
    splitting may add to a rounded exponent is an ulp of the largest distance."""
    for spread in (0.5, 9.875, 10.0, 10.125, 60.0):
        for positives in (1, 2, 3, 4, 5):
            places = torch.cat([torch.linspace(-1, 1, positives), torch.linspace(-2.5, 2.5, 11)]) * spread
            ref_emb = ((places * 8).round() / 8 + 200)[:, None]
            ref_labels = (torch.arange(positives + 11) >= positives).long()

            def run(rows: Tensor, ref_rows: Tensor, labels: Tensor, which: str | None) -> list[Tensor]:
                rows.requires_grad_()
                loss = T.batch_all_loss(
                    rows,
                    labels[:1],
                    loss="soft_margin",
                    reduction="sum",
                    ref_emb=ref_rows,
                    ref_labels=labels,
                    backend=which,
                )
                return [loss.detach().double(), torch.autograd.grad(loss, rows)[0].double()]

            found = run(torch.zeros(1, 1), ref_emb, ref_labels, KERNELS)
            exact = run(torch.zeros(1, 1, dtype=torch.float64), ref_emb.double(), ref_labels, "reference")
            epsilon = torch.finfo(torch.float32).eps
            bound = positives * 11 * epsilon * float(ref_emb.max()) + 4 * epsilon * float(exact[0])
            for one, other in zip(found, exact, strict=True):
                assert float((one - other).abs().max()) <= bound


def sums_may_leave_the_type(backend: Backend) -> None:
    # Row 0 has its positive at 1e38 and 98 negatives at 0: their mean fits float32, their sum does not.
    emb = torch.zeros(100, 1)
    emb[1] = 1e19
    labels = torch.cat([torch.zeros(2, dtype=torch.int64), torch.arange(98) // 49 + 1])
    if backend.slow:
        emb, labels = emb[[0, 1, *range(34, 68)]], labels[[0, 1, *range(34, 68)]]
    for loss in ("margin", "soft_margin"):
        found = T.batch_all_loss(emb, labels, loss=loss, distance="sqeuclidean")
        expected = batch_all(emb.double(), labels, loss=loss, distance="sqeuclidean")
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


def anchors_need_both(backend: Backend) -> None:
    """Anchor 0 has negatives only, anchor 1 positives only."""
    batch = Batch(
        torch.tensor([[0.0], [4.0]]), torch.tensor([0, 1]),
        torch.tensor([[0.25], [5.0]]), torch.tensor([1, 1]), torch.tensor([-1, -1]),
    )  # fmt: skip
    for call in calls("euclidean", 1.0, 0).values():
        losses, gradients, _ = run_tuples(batch, call.but(reduction="none"))
        assert not losses.any()
        assert not any(gradient.any() for gradient in gradients)


def a_negative_out_of_reach_may_lie_anywhere(backend: Backend) -> None:
    check_out_of_reach(backend, calls("euclidean", 1.0, 0)[""])


ON_EVERY_BACKEND = (
    active_triplets_are_counted,
    it_is_the_sum_over_all_triplets,
    soft_margins_of_near_and_far_thresholds,
    sums_may_leave_the_type,
    anchors_need_both,
    a_negative_out_of_reach_may_lie_anywhere,
)
