"""InfoNCE, also known as NT-Xent: every positive pair against all negatives of its anchor."""

from __future__ import annotations

import math

import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import NTXentLoss
from torch import Tensor

from tests.support.backends import Backend
from tests.support.oracle import Truth
from tests.support.terms import Terms, errors_of, log_sum_of, nearest_of
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
from tripletops._words import FUNCTION, REDUCTION

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPERATURES = [0.01, 0.07, 0.5, 1.0, 10.0]
POSITIVES = next(choice.words for choice in FUNCTION["info_nce_loss"].choices if choice.name == "positive")
LOG_2 = math.log(2)
ln = math.log


# On paper

# τ = 1/ln 2 makes e^(S/τ) = 2^S. Σ over the negatives N, and 1 + N/2^S by positive:
#   a:  ½ + 1 = 1.5      b 1 → 2.5, e ½ → 4
#   b:  1 + 2 = 3        a 1 → 4, e 1 → 4
#   c:  ½ + 1 + 2 = 3.5  d 1 → 4.5
#   d:  1 + 2 + 1 = 4    c 1 → 5
#   e:  2 + 1 = 3        a ½ → 7, b 1 → 4
# The nearest positives are b, a (of a and e the first), d, c and b.
ON_AXES = {
    "all": ([ln(10), ln(16), ln(4.5), ln(5), ln(28)], 8),
    "easy": ([ln(2.5), ln(4), ln(4.5), ln(5), ln(4)], 5),
}


@pytest.mark.parametrize("positive", POSITIVES)
def test_the_axes(positive):
    each, pairs = ON_AXES[positive]
    expected = {"none": each, "sum": sum(each), "mean": sum(each) / pairs, "mean_nonzero": sum(each) / pairs}
    for reduction, value in expected.items():
        loss = reference.info_nce_loss(
            AXES, AXES_LABELS, temperature=1 / LOG_2, positive=positive, reduction=reduction
        )
        assert same(loss, value)


@pytest.mark.parametrize("positive", POSITIVES)
def test_gradient(positive):
    # Anchor (2, 0), positives (3, 4) and (0, 1), negatives (4, 3) and (0, −1): S = .6, 0 | .8, 0, and τ = .5
    # makes them 1.2, 0 | 1.6, 0. N = e^1.6 + 1 = 5.953032, of which the shares are .832018 and .167982.
    # ln(1 + N/e^1.2) = ln 2.793018 = 1.027122, and ln(1 + N/1) = ln 6.953032 = 1.939178.
    loss, (by_emb, by_ref) = with_gradients(
        lambda emb, ref_emb: reference.info_nce_loss(
            emb, torch.tensor([0]), ref_emb=ref_emb, ref_labels=torch.tensor([0, 0, 1, 1]), temperature=0.5,
            positive=positive, reduction="sum",
        ),
        tensor([[2, 0]]), tensor([[3, 4], [0, 1], [4, 3], [0, -1]]),
    )  # fmt: skip
    assert loss.item() == pytest.approx(1.027122 + (1.939178 if positive == "all" else 0), abs=2e-6)
    # By S: −σ/τ of a positive, σ = N/(N + e^(S/τ)), and (sum of these σ)·share/τ of a negative.
    total = math.exp(1.6) + 1
    first, second = 2 * total / (total + math.exp(1.2)), 2 * total / (total + 1)
    if positive == "easy":
        second = 0.0
    near, far = (first + second) * math.exp(1.6) / total, (first + second) / total
    # dS/dx = (v − S u)/|x|
    assert same(by_emb, [[0, -first * 0.4 - second * 0.5 + near * 0.3 - far * 0.5]])
    assert same(
        by_ref, [[-first * 0.128, first * 0.096], [-second, 0], [near * 0.072, -near * 0.096], [far, 0]]
    )


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_compass(temperature):
    # Of anchor a: S is .6 and −1 to positives, 0 and −.6 to negatives; of c .8 | 0 .8 0, and so on.
    each = [
        sum(ln(1 + sum(math.exp((n - s) / temperature) for n in negatives)) for s in positives)
        for positives, negatives in (
            ([0.6, -1], [0, -0.6]),
            ([0.6, -0.6], [0.8, 0.28]),
            ([0.8], [0, 0.8, 0]),
            ([-1, -0.6], [0, 0.6]),
            ([0.8], [-0.6, 0.28, 0.6]),
        )
    ]
    loss = reference.info_nce_loss(COMPASS, COMPASS_LABELS, temperature=temperature, reduction="none")
    assert same(loss, each, 1e-13 / min(temperature, 1))


@pytest.mark.parametrize("positive", POSITIVES)
def test_anchors_without_a_positive_are_negatives_only(positive):
    # c and d are alone in their classes now. As before, but for them.
    labels, (each, pairs) = torch.tensor([0, 0, 1, 2, 0]), ON_AXES[positive]
    each = [each[0], each[1], 0, 0, each[4]]
    options = {"temperature": 1 / LOG_2, "positive": positive}
    assert same(reference.info_nce_loss(AXES, labels, reduction="none", **options), each)
    loss, (gradient,) = with_gradients(lambda emb: reference.info_nce_loss(emb, labels, **options), AXES)
    assert same(loss, sum(each) / (pairs - 2))
    assert gradient[2:4].any(1).all()  # as negatives they are pushed


@pytest.mark.parametrize("positive", POSITIVES)
def test_a_pair_without_a_negative_has_the_loss_zero(positive):
    # Anchor 0 leaves out the only negative, as if that were itself: −ln 1. Its pairs count in the mean.
    emb, labels = tensor([[1, 0], [0, 1]]), torch.tensor([0, 0])
    options = {
        "ref_emb": tensor([[3, 4], [0, 2]]), "ref_labels": torch.tensor([0, 1]), "temperature": 1.0,
        "self_index": torch.tensor([1, -1]), "positive": positive,
    }  # fmt: skip
    second = ln(1 + math.exp(1 - 0.8))  # S is .8 to the positive, 1 to the negative
    for reduction, value in {
        "none": [0, second], "sum": second, "mean": second / 2, "mean_nonzero": second
    }.items():  # fmt: skip
        loss, (gradient,) = with_gradients(
            lambda emb, reduction=reduction: reference.info_nce_loss(
                emb, labels, reduction=reduction, **options
            ),
            emb,
        )
        assert same(loss, value)
        assert not gradient[0].any()
        assert gradient[1].any()


def test_itself_among_other_candidates():
    # A copy of the anchor is a positive, S = 1, unless `self_index` names it.
    emb, labels = tensor([[1, 0]]), torch.tensor([0])
    options = {"ref_emb": tensor([[1, 0], [0, 1], [-1, 0]]), "ref_labels": torch.tensor([0, 0, 1])}
    # 2^S: 2, 1 | ½. With the copy ln 1.25 and ln 1.5; without it ln 1.5.
    for positive, with_copy in (("all", (ln(1.25) + ln(1.5)) / 2), ("easy", ln(1.25))):
        for self_index, value in ((None, with_copy), (-1, with_copy), (0, ln(1.5))):
            named = {} if self_index is None else {"self_index": torch.tensor([self_index])}
            loss = reference.info_nce_loss(
                emb, labels, temperature=1 / LOG_2, positive=positive, **named, **options
            )
            assert same(loss, value)


def test_the_easy_one_of_equal_positives_is_the_first():
    # Both positives at S = 0; the first is pulled.
    _, (_, by_ref) = with_gradients(
        lambda emb, ref_emb: reference.info_nce_loss(
            emb, torch.tensor([0]), ref_emb=ref_emb, ref_labels=torch.tensor([1, 0, 0]), positive="easy"
        ),
        tensor([[1, 0]]), tensor([[3, 4], [0, 1], [0, -1]]),
    )  # fmt: skip
    assert by_ref[1].any()
    assert not by_ref[2].any()


@pytest.mark.parametrize("rows", RANDOM_ROWS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("positive", POSITIVES)
def test_by_loops(rows, temperature, positive):
    emb, labels = RANDOM_ROWS[rows]
    found = []
    for positives, negatives in distances_of(emb, labels, "cosine"):
        s_ap, s_an = [1 - d for d in positives], [1 - d for d in negatives]
        if positive == "easy":
            s_ap = sorted(s_ap)[-1:]
        total = sum(math.exp(s / temperature) for s in s_an)
        found.append([math.log1p(total / math.exp(s / temperature)) for s in s_ap])
    for reduction in REDUCTION:
        loss = reference.info_nce_loss(
            emb, labels, temperature=temperature, positive=positive, reduction=reduction
        )
        assert same(loss, reductions_of(found)[reduction], 1e-11)


# Against pytorch-metric-learning


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_like_pytorch_metric_learning(temperature, seed):
    """NTXentLoss, anchors without positives included. It has no word like "easy"."""
    peer, options = NTXentLoss(temperature, distance=CosineSimilarity()), {"temperature": temperature}
    for classes in (5, 14):
        emb, labels = random_rows(22, 6, classes, seed)
        ref_emb, ref_labels = random_rows(20, 6, 5, seed + 10)
        check_peer(
            lambda emb, labels=labels: reference.info_nce_loss(emb, labels, **options),
            lambda emb, labels=labels: peer(emb, labels),
            emb,
        )
        check_peer(
            lambda emb, ref_emb, labels=labels, ref_labels=ref_labels: reference.info_nce_loss(
                emb, labels, ref_emb=ref_emb, ref_labels=ref_labels, **options
            ),
            lambda emb, ref_emb, labels=labels, ref_labels=ref_labels: peer(
                emb, labels, ref_emb=ref_emb, ref_labels=ref_labels
            ),
            emb, ref_emb,
        )  # fmt: skip


def test_where_pytorch_metric_learning_differs():
    # S is −1 to the positive and 1 to the negative, which at τ = 1/1000 makes a loss of 2000.
    emb, labels = tensor([[1, 0], [1, 0]]), torch.tensor([0, 0])
    others = {"ref_emb": tensor([[-1, 0], [1, 0]]), "ref_labels": torch.tensor([0, 1])}
    assert same(reference.info_nce_loss(emb, labels, temperature=1e-3, **others), 2000)
    # It takes the log of a quotient plus the smallest number, and so cuts a loss off.
    peer = NTXentLoss(temperature=1e-3)
    assert peer(emb, labels, **others).item() == pytest.approx(-ln(torch.finfo(torch.float64).tiny))
    # One anchor with one pair of each kind is nothing to it.
    assert same(reference.info_nce_loss(emb[:1], labels[:1], temperature=1e-3, **others), 2000)
    assert peer(emb[:1], labels[:1], **others) == 0


# For the backends


def calls(distance: str, unit: float, classes: int) -> dict[str, ManyTuples]:
    return {
        "": ManyTuples("info_nce_loss"),
        "easy": ManyTuples("info_nce_loss", {"positive": "easy", "temperature": 0.5}),
    }


def limits(distance: str, unit: float) -> list[ManyTuples]:
    return [
        ManyTuples("info_nce_loss", {"temperature": temperature, "positive": positive})
        for temperature in (1e-3, *TEMPERATURES, 1e3)
        for positive in POSITIVES
    ]


def kinks() -> list[ManyTuples]:
    return []


def whole_numbers() -> list[ManyTuples]:
    return []


def of_equal_rows(distance: str, positives: int, negatives: int) -> list[tuple[ManyTuples, float]]:
    return [(call, ln(1 + negatives)) for call in calls(distance, 1.0, 0).values()]


def terms(truth: Truth, call: ManyTuples, picks: tuple[Tensor, Tensor] | None, exact: bool) -> list[Terms]:
    """softplus(rate·d_ap + ln Σ e^(−rate·d_an)) for every positive pair."""
    found, error, d = Terms(truth), errors_of(truth), truth.distance
    if not (truth.positives.any() and truth.negatives.any()):
        return [found]
    rate = 1 / call.options["temperature"]
    pairs = possible = truth.positives
    if call.options["positive"] == "easy":
        pairs, possible = nearest_of(truth, truth.positives)
    log_sum = log_sum_of(truth, truth.negatives & truth.positives.any(1, keepdim=True), rate)
    z, off = rate * d + log_sum.value[:, None], rate * error + log_sum.off[:, None]
    low, slope, high = (torch.sigmoid(z + side * off) for side in (-1, 0, 1))
    value, weight = reference.softplus(z) * pairs, high * pairs
    found.value, found.off = value.sum(1), (off * weight).sum(1)
    found.size = ((rate * d + log_sum.size[:, None]) * weight + value).sum(1)
    # Each negative has a share in the slopes of all pairs.
    least, push, most = (
        (part * pairs).sum(1, keepdim=True) * share
        for part, share in ((low, log_sum.lowest), (slope, log_sum.weight), (high, log_sum.highest))
    )
    found.steady = (possible == pairs).all(1, keepdim=True)
    found.rate = max(rate, 1.0)
    found.condition = 1 + rate * (d * pairs).amax(1) + log_sum.size
    found.slope = rate * (slope * pairs + push)
    found.wobble = rate * torch.maximum(
        high * possible + most - slope * pairs - push,
        slope * pairs + push - low * (pairs & found.steady) - least,
    )
    found.count, found.nonzero = int(pairs.sum()), int((value > 0).sum())
    found.flips = int((pairs & (z - off < -700) & (z + off > -800)).sum())  # where e^z leaves float64
    return [found]


# On every backend


def an_anchor_may_lack_negatives(backend: Backend) -> None:
    check_anchors_without_negatives(backend, calls("cosine", 1.0, 0))


ON_EVERY_BACKEND = (an_anchor_may_lack_negatives,)
