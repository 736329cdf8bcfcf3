"""Supervised contrastive: all positives of an anchor against all its candidates."""

from __future__ import annotations

import math

import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import SupConLoss
from pytorch_metric_learning.reducers import AvgNonZeroReducer, MeanReducer
from torch import Tensor

from tests.support.backends import Backend
from tests.support.oracle import Truth
from tests.support.terms import Terms, errors_of, log_sum_of
from tests.support.tuples import ManyTuples
from tests.support.worked import (
    AXES,
    AXES_LABELS,
    COMPASS,
    COMPASS_LABELS,
    RANDOM_ROWS,
    check_anchors_without_negatives,
    check_peer,
    distances_of,
    random_rows,
    reductions_of,
    same,
    tensor,
    with_gradients,
)
from tripletops import reference
from tripletops._words import REDUCTION

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPERATURES = [0.01, 0.05, 0.1, 0.5, 1.0, 10.0]
LOG_2 = math.log(2)
ln = math.log


# On paper


def test_the_axes():
    # τ = 1/ln 2 makes e^(S/τ) = 2^S. Σ over all candidates, and the mean of ln 2^S over the positives:
    #   a:  1 + ½ + 1 + ½ = 3     (0 − 1)/2
    #   b:  1 + 1 + 2 + 1 = 5     0
    #   c:  ½ + 1 + 1 + 2 = 4.5   0
    #   d:  1 + 2 + 1 + 1 = 5     0
    #   e:  ½ + 1 + 2 + 1 = 4.5   (−1 + 0)/2
    each = [ln(3) + LOG_2 / 2, ln(5), ln(4.5), ln(5), ln(4.5) + LOG_2 / 2]
    expected = {"none": each, "sum": sum(each), "mean": sum(each) / 5, "mean_nonzero": sum(each) / 5}
    for reduction, value in expected.items():
        loss = reference.supcon_loss(AXES, AXES_LABELS, temperature=1 / LOG_2, reduction=reduction)
        assert same(loss, value)


def test_gradient():
    # Anchor (2, 0), positives (3, 4) and (0, 1), negative (4, 3): S = .6, 0 and .8, by τ = .5 1.2, 0 and 1.6.
    # Σ = e^1.2 + 1 + e^1.6 = 9.273149, of which the shares are .358036, .107838 and .534126.
    # ln 9.273149 − (1.2 + 0)/2 = 2.227123 − .6
    loss, (by_emb, by_ref) = with_gradients(
        lambda emb, ref_emb: reference.supcon_loss(
            emb, torch.tensor([0]), ref_emb=ref_emb, ref_labels=torch.tensor([0, 0, 1]), temperature=0.5
        ),
        tensor([[2, 0]]), tensor([[3, 4], [0, 1], [4, 3]]),
    )  # fmt: skip
    assert loss.item() == pytest.approx(1.627123, abs=1e-6)
    # By S: (share − ½)/τ of a positive and share/τ of the negative. dS/dx = (v − S u)/|x|.
    total = math.exp(1.2) + 1 + math.exp(1.6)
    first, second = 2 * (math.exp(1.2) / total - 0.5), 2 * (1 / total - 0.5)
    push = 2 * math.exp(1.6) / total
    assert same(by_emb, [[0, first * 0.4 + second * 0.5 + push * 0.3]])
    assert same(
        by_ref, [[first * 0.128, -first * 0.096], [second, 0], [push * 0.072, -push * 0.096]]
    )  # fmt: skip


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_compass(temperature):
    # Of anchor a: S is .6 and −1 to positives, 0 and −.6 to negatives; of c .8 | 0 .8 0, and so on.
    each = [
        ln(sum(math.exp((s - max(p + n)) / temperature) for s in p + n))
        + (max(p + n) - sum(p) / len(p)) / temperature
        for p, n in (
            ([0.6, -1], [0, -0.6]),
            ([0.6, -0.6], [0.8, 0.28]),
            ([0.8], [0, 0.8, 0]),
            ([-1, -0.6], [0, 0.6]),
            ([0.8], [-0.6, 0.28, 0.6]),
        )
    ]
    loss = reference.supcon_loss(COMPASS, COMPASS_LABELS, temperature=temperature, reduction="none")
    assert same(loss, each, 1e-13 / min(temperature, 1))


def test_anchors_without_a_positive_have_no_loss_but_are_candidates():
    # c and d are alone in their classes now. As before, but for them: of 5 anchors 3 have a positive.
    labels = torch.tensor([0, 0, 1, 2, 0])
    each = [ln(3) + LOG_2 / 2, ln(5), 0, 0, ln(4.5) + LOG_2 / 2]
    expected = {"none": each, "sum": sum(each), "mean": sum(each) / 3, "mean_nonzero": sum(each) / 3}
    for reduction, value in expected.items():
        loss, (gradient,) = with_gradients(
            lambda emb, reduction=reduction: reference.supcon_loss(
                emb, labels, temperature=1 / LOG_2, reduction=reduction
            ),
            AXES,
        )
        assert same(loss, value)
        assert gradient[2:4].any(1).all()  # as negatives they are pushed


def test_an_anchor_with_one_candidate_has_the_loss_zero():
    # Anchor 0 has itself left out and nothing but its positive: −ln 1. It counts in the mean, not as nonzero.
    emb, labels = tensor([[1, 0], [0, 1], [0, 1]]), torch.tensor([0, 0, 1])
    options = {
        "ref_emb": tensor([[3, 4], [0, 2]]), "ref_labels": torch.tensor([0, 1]), "temperature": 1.0,
        "self_index": torch.tensor([1, -1, 0]),
    }  # fmt: skip
    # Anchor 1: S is .8 to its positive, 1 to its negative; anchor 2 has its positive alone.
    second = ln(math.exp(0.8) + math.exp(1)) - 0.8
    for reduction, value in {
        "none": [0, second, 0], "sum": second, "mean": second / 3, "mean_nonzero": second
    }.items():  # fmt: skip
        loss = reference.supcon_loss(emb, labels, reduction=reduction, **options)
        assert same(loss, value)


def test_itself_among_other_candidates():
    # A copy of the anchor is a positive, S = 1, unless `self_index` names it.
    emb, labels = tensor([[1, 0]]), torch.tensor([0])
    options = {"ref_emb": tensor([[1, 0], [0, 1], [-1, 0]]), "ref_labels": torch.tensor([0, 0, 1])}
    # 2^S: 2, 1, ½. With the copy ln 3.5 − ½ ln 2; without it ln 1.5.
    for self_index, value in ((None, ln(3.5) - LOG_2 / 2), (-1, ln(3.5) - LOG_2 / 2), (0, ln(1.5))):
        if self_index is not None:
            options["self_index"] = torch.tensor([self_index])
        assert same(reference.supcon_loss(emb, labels, temperature=1 / LOG_2, **options), value)


@pytest.mark.parametrize("rows", RANDOM_ROWS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_by_loops(rows, temperature):
    emb, labels = RANDOM_ROWS[rows]
    terms = []
    for positives, negatives in distances_of(emb, labels, "cosine"):
        s_ap, every = [1 - d for d in positives], [1 - d for d in positives + negatives]
        log_sum = ln(sum(math.exp(s / temperature) for s in every))
        terms.append([-sum(s / temperature - log_sum for s in s_ap) / len(s_ap)] if s_ap else [])
    for reduction in REDUCTION:
        loss = reference.supcon_loss(emb, labels, temperature=temperature, reduction=reduction)
        assert same(loss, reductions_of(terms)[reduction], 1e-11)


# Against pytorch-metric-learning


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_like_pytorch_metric_learning(temperature, seed):
    """The same wherever every anchor has a positive, by both means."""
    emb, labels = random_rows(24, 6, 5, seed)
    ref_emb, ref_labels = random_rows(20, 6, 5, seed + 10)
    for reduction, reducer in (("mean", MeanReducer()), ("mean_nonzero", AvgNonZeroReducer())):
        peer = SupConLoss(temperature=temperature, distance=CosineSimilarity(), reducer=reducer)
        options = {"temperature": temperature, "reduction": reduction}
        check_peer(
            lambda emb, options=options: reference.supcon_loss(emb, labels, **options),
            lambda emb, peer=peer: peer(emb, labels),
            emb,
        )
        check_peer(
            lambda emb, ref_emb, options=options: reference.supcon_loss(
                emb, labels, ref_emb=ref_emb, ref_labels=ref_labels, **options
            ),
            lambda emb, ref_emb, peer=peer: peer(emb, labels, ref_emb=ref_emb, ref_labels=ref_labels),
            emb, ref_emb,
        )  # fmt: skip


def test_where_pytorch_metric_learning_counts_otherwise():
    """Its MeanReducer counts anchors without a positive; the one it takes by default does not, like ours."""
    emb, labels = random_rows(12, 4, 8)
    alone = (labels[:, None] == labels).sum(1) == 1
    assert alone.sum() == 4
    check_peer(
        lambda emb: reference.supcon_loss(emb, labels), lambda emb: SupConLoss()(emb, labels), emb
    )  # fmt: skip
    check_peer(
        lambda emb: reference.supcon_loss(emb, labels) * 8 / 12,
        lambda emb: SupConLoss(reducer=MeanReducer())(emb, labels),
        emb,
    )


# For the backends


def calls(distance: str, unit: float, classes: int) -> dict[str, ManyTuples]:
    return {"": ManyTuples("supcon_loss"), "warm": ManyTuples("supcon_loss", {"temperature": 1.0})}


def limits(distance: str, unit: float) -> list[ManyTuples]:
    temperatures = (1e-3, *TEMPERATURES, 1e3)
    return [ManyTuples("supcon_loss", {"temperature": temperature}) for temperature in temperatures]


def kinks() -> list[ManyTuples]:
    return []


def whole_numbers() -> list[ManyTuples]:
    return []


def of_equal_rows(distance: str, positives: int, negatives: int) -> list[tuple[ManyTuples, float]]:
    """All candidates have the same share."""
    return [(call, ln(positives + negatives)) for call in calls(distance, 1.0, 0).values()]


def terms(truth: Truth, call: ManyTuples, picks: tuple[Tensor, Tensor] | None, exact: bool) -> list[Terms]:
    """rate·(mean of d_ap) + ln Σ e^(−rate·d) for every anchor that has a positive."""
    found, error, d = Terms(truth), errors_of(truth), truth.distance
    if not (truth.positives.any() and truth.negatives.any()):
        return [found]
    rate = 1 / call.options["temperature"]
    counted, candidates = truth.positives.any(1), truth.positives | truth.negatives
    share = truth.positives / truth.positives.sum(1, keepdim=True).clamp(min=1).double()
    log_sum = log_sum_of(truth, candidates & counted[:, None], rate)
    pull = (share * d).sum(1)
    found.value = (rate * pull + log_sum.value).where(counted, 0).clamp(min=0)
    found.off = rate * (share * error).sum(1) + log_sum.off
    found.size = rate * pull + log_sum.size + found.value
    found.slope = rate * (share + log_sum.weight)
    found.wobble = rate * torch.maximum(log_sum.highest - log_sum.weight, log_sum.weight - log_sum.lowest)
    found.steady |= True
    found.rate, found.condition = max(rate, 1.0), 1 + rate * pull + log_sum.size
    found.count, found.nonzero = int(counted.sum()), int((found.value > 0).sum())
    # The loss of several positives is ln 2 at least. That of one nears 0 where it outweighs all other
    # candidates, and is 0 where there are none.
    others = candidates.sum(1) > 1
    least = 2.0**-50 * (1 + rate) * (2 * rate * error.where(candidates, 0).amax(1)).exp()
    found.flips = int((counted & others & (found.value <= least)).sum())
    return [found]


# On every backend


def an_anchor_may_lack_negatives(backend: Backend) -> None:
    check_anchors_without_negatives(backend, calls("cosine", 1.0, 0))


ON_EVERY_BACKEND = (an_anchor_may_lack_negatives,)
