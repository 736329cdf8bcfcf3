"""All pairs of an anchor, weighed against each other by two log-sum-exps."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import MultiSimilarityLoss
from pytorch_metric_learning.miners import MultiSimilarityMiner
from pytorch_metric_learning.reducers import MeanReducer
from torch import Tensor

from tests.support.backends import Backend
from tests.support.batches import Batch
from tests.support.calls import DTYPES
from tests.support.oracle import Truth
from tests.support.terms import Terms, errors_of, nearest_of
from tests.support.tuples import ManyTuples, run_tuples
from tests.support.worked import (
    COMPASS,
    COMPASS_LABELS,
    RANDOM_ROWS,
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

POSITIVES = next(
    choice.words for choice in FUNCTION["multi_similarity_loss"].choices if choice.name == "positive"
)


# On paper

# α = 1, β = 2, λ = 0: ln(1 + Σ e^−S) + ½ ln(1 + Σ e^2S). ε = .1: N keeps S > least − .1, P S < most + .1:
#   a:  least −1, most 0:    P d,    N c e
#   b:  least −.6, most .8:  P a d,  N c e
#   c:  least .8, most .8:   P e,    N b
#   d:  least −1, most .6:   P a b,  N c e
#   e:  least .8, most .6:   neither
SIMILAR = {
    "all": ([[-1], [0.6, -0.6], [0.8], [-1, -0.6], []], [[0, -0.6], [0.8, 0.28], [0.8], [0, 0.6], []]),
    # Only the nearest positive, which nothing filters: a → b, b → a, c → e, d → b, e → c.
    "easy": ([[0.6], [0.6], [0.8], [-0.6], [0.8]], [[0, -0.6], [0.8, 0.28], [0.8], [0, 0.6], []]),
    # Without mining.
    None: (
        [[0.6, -1], [0.6, -0.6], [0.8], [-1, -0.6], [0.8]],
        [[0, -0.6], [0.8, 0.28], [0, 0.8, 0], [0, 0.6], [-0.6, 0.28, 0.6]],
    ),
}


@pytest.mark.parametrize("mining", [*POSITIVES, None])
def test_the_compass(mining):
    each = [
        math.log(1 + sum(math.exp(-s) for s in p)) + math.log(1 + sum(math.exp(2 * s) for s in n)) / 2
        for p, n in zip(*SIMILAR[mining], strict=True)
    ]
    nonzero = 4 if mining == "all" else 5
    options = {"positive": mining} if mining else {"epsilon": None}
    for reduction, value in {
        "none": each, "sum": sum(each), "mean": sum(each) / 5, "mean_nonzero": sum(each) / nonzero
    }.items():  # fmt: skip
        loss = reference.multi_similarity_loss(
            COMPASS, COMPASS_LABELS, alpha=1.0, beta=2.0, base=0.0, reduction=reduction, **options
        )
        assert same(loss, value)


def test_gradient():
    # Anchor (2, 0), positive (3, 4), negative (4, 3): S_ap = .6, S_an = .8, and with the defaults
    # ½ ln(1 + e^.8) + .02 ln(1 + e^−10) = .585550 + 9.08e-7
    loss, (by_emb, by_ref) = with_gradients(
        lambda emb, ref_emb: reference.multi_similarity_loss(
            emb, torch.tensor([0]), ref_emb=ref_emb, ref_labels=torch.tensor([0, 1])
        ),
        tensor([[2, 0]]), tensor([[3, 4], [4, 3]]),
    )  # fmt: skip
    assert loss.item() == pytest.approx(0.5855503 + 9.08e-7, abs=1e-7)
    # −σ(.8) dS_ap + σ(−10) dS_an, with dS/dx = (v − S u)/|x|
    pull, push = 1 / (1 + math.exp(-0.8)), 1 / (1 + math.exp(10))
    assert same(by_emb, [[0, -pull * 0.4 + push * 0.3]])
    assert same(by_ref, [[-pull * 0.128, pull * 0.096], [push * 0.072, -push * 0.096]])


def test_nothing_on_the_edge_is_kept():
    # S_ap = S_an = 0: with ε = 0 neither is strictly beyond the other; a valid anchor all the same.
    emb, ref_emb = tensor([[1, 0], [0, 1]]), tensor([[0, 1], [0, -1]])
    options = {"ref_emb": ref_emb, "ref_labels": torch.tensor([0, 1]), "epsilon": 0.0, "base": 0.0}
    labels = torch.tensor([0, 1])
    # The second anchor: S_ap = −1, S_an = 1.
    second = math.log(1 + math.exp(2)) / 2 + math.log(1 + math.exp(50)) / 50
    assert same(reference.multi_similarity_loss(emb, labels, reduction="none", **options), [0, second])
    assert same(reference.multi_similarity_loss(emb, labels, **options), second / 2)
    assert same(reference.multi_similarity_loss(emb, labels, reduction="mean_nonzero", **options), second)


def test_no_pair_has_no_slope_of_nan():
    # The compass's e keeps nothing; no step on the way back may be NaN, hidden behind a mask or not.
    with torch.autograd.set_detect_anomaly(True):
        with_gradients(lambda emb: reference.multi_similarity_loss(emb, COMPASS_LABELS), COMPASS)


def test_far_out():
    # One term each, of exponents ±1000·(0 − λ): the larger is 1000/1000, the smaller e^−1000, which is 0.
    options = {"ref_emb": tensor([[0, 1], [0, -1]]), "ref_labels": torch.tensor([0, 1]), "alpha": 1000.0}
    for base in (1.0, -1.0):
        loss, gradients = with_gradients(
            lambda emb, base=base: reference.multi_similarity_loss(
                emb, torch.tensor([0]), beta=1000.0, base=base, **options
            ),
            tensor([[1, 0]]),
        )
        assert loss == 1
        assert gradients[0].isfinite().all()


def test_anchors_need_a_positive_and_a_negative():
    # Rows 2 and 3 are alone in their classes. S is 1 between rows 1 2 3 and 0 with row 0.
    emb, labels = tensor([[0], [1], [0.25], [0.75]]), torch.tensor([0, 0, 1, 2])
    each = reference.multi_similarity_loss(emb, labels, reduction="none")
    assert (each[:2] > 0).all()
    assert not each[2:].any()


@pytest.mark.parametrize("rows", RANDOM_ROWS)
@pytest.mark.parametrize("epsilon", [0.0, 0.1, None])
@pytest.mark.parametrize("positive", POSITIVES)
def test_by_loops(rows, epsilon, positive):
    emb, labels = RANDOM_ROWS[rows]
    losses, valid = [], 0
    for positives, negatives in distances_of(emb, labels, "cosine"):
        s_ap, s_an = [1 - d for d in positives], [1 - d for d in negatives]
        valid += bool(s_ap and s_an)
        if not (s_ap and s_an):
            losses.append(0.0)
            continue
        slack = math.inf if epsilon is None else epsilon
        kept_p = [s for s in s_ap if s < max(s_an) + slack] if positive == "all" else [max(s_ap)]
        kept_n = [s for s in s_an if s > min(s_ap) - slack]
        losses.append(
            math.log(1 + sum(math.exp(-2 * (s - 0.5)) for s in kept_p)) / 2
            + math.log(1 + sum(math.exp(10 * (s - 0.5)) for s in kept_n)) / 10
        )
    expected = {**reductions_of([[loss] for loss in losses]), "mean": sum(losses) / valid}
    options = {"beta": 10.0, "base": 0.5, "epsilon": epsilon, "positive": positive}
    for reduction in REDUCTION:
        loss = reference.multi_similarity_loss(emb, labels, reduction=reduction, **options)
        assert same(loss, expected[reduction], 1e-12)


# Against pytorch-metric-learning


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("epsilon", [0.1, 0.0, None])
def test_like_pytorch_metric_learning(epsilon, seed):
    # Its mean counts anchors without a positive or a negative too, so here every anchor has both.
    emb, labels = random_rows(24, 6, 5, seed)
    peer = MultiSimilarityLoss(alpha=2, beta=50, base=1.0, distance=CosineSimilarity(), reducer=MeanReducer())
    miner = None if epsilon is None else MultiSimilarityMiner(epsilon=epsilon)
    check_peer(
        lambda emb: reference.multi_similarity_loss(emb, labels, epsilon=epsilon),
        lambda emb: peer(emb, labels, None if miner is None else miner(emb, labels)),
        emb,
    )
    ref_emb, ref_labels = random_rows(20, 6, 5, seed + 10)
    check_peer(
        lambda emb, ref_emb: reference.multi_similarity_loss(
            emb, labels, ref_emb=ref_emb, ref_labels=ref_labels, epsilon=epsilon
        ),
        lambda emb, ref_emb: peer(
            emb, labels, None if miner is None else miner(emb, labels, ref_emb, ref_labels),
            ref_emb=ref_emb, ref_labels=ref_labels,
        ),
        emb, ref_emb,
    )  # fmt: skip


# For the backends


def calls(distance: str, unit: float, classes: int) -> dict[str, ManyTuples]:
    return {
        "": ManyTuples("multi_similarity_loss"),
        "all": ManyTuples("multi_similarity_loss", {"epsilon": None, "base": 0.5}),
        "easy": ManyTuples("multi_similarity_loss", {"positive": "easy"}),
    }


def limits(distance: str, unit: float) -> list[ManyTuples]:
    """At base 0, e^(beta·S) is beyond float32 from beta = 100 on, and beyond float64 at 1000."""
    numbers = (
        (2.0, 50.0, 1.0),
        (2.0, 50.0, 0.5),
        (1.0, 1.0, 0.0),
        (40.0, 100.0, 0.0),
        (2.0, 1000.0, 0.0),
        (1000.0, 1000.0, 0.0),
        (1000.0, 50.0, 1.0),
        (2.0, 50.0, -1.0),
        (0.01, 1e-3, 3.0),
        (300.0, 10.0, 30.0),
    )
    return [
        ManyTuples(
            "multi_similarity_loss",
            {"alpha": alpha, "beta": beta, "base": base, "epsilon": epsilon, "positive": positive},
        )
        for epsilon, positive, (alpha, beta, base) in product((0.1, None, 0.0, 1.0, 50.0), POSITIVES, numbers)
    ]


def kinks() -> list[ManyTuples]:
    return []


def whole_numbers() -> list[ManyTuples]:
    return []


def of_equal_rows(distance: str, positives: int, negatives: int) -> list[tuple[ManyTuples, float]]:
    """S − λ is 0."""
    push = math.log(1 + negatives) / 50
    return [
        (ManyTuples("multi_similarity_loss"), math.log(1 + positives) / 2 + push),
        (ManyTuples("multi_similarity_loss", {"epsilon": None}), math.log(1 + positives) / 2 + push),
        (ManyTuples("multi_similarity_loss", {"positive": "easy"}), math.log(2) / 2 + push),
    ]


def terms(truth: Truth, call: ManyTuples, picks: tuple[Tensor, Tensor] | None, exact: bool) -> list[Terms]:
    found, error, d, options = Terms(truth), errors_of(truth), truth.distance, call.options
    valid = truth.positives.any(1) & truth.negatives.any(1)
    if not valid.any():
        return [found]
    epsilon, offset = options["epsilon"], 1 - options["base"]
    positives, negatives = (mask & valid[:, None] for mask in (truth.positives, truth.negatives))
    farthest = d.where(positives, -math.inf).argmax(1, keepdim=True)
    nearest = d.where(negatives, math.inf).argmin(1, keepdim=True)
    least_value, steady = torch.zeros(len(d)), torch.ones(len(d), 1, dtype=torch.bool)
    for sign, mask, rate, other in (
        (-1, positives, options["alpha"], nearest),
        (1, negatives, options["beta"], farthest),
    ):
        kept = surely = possibly = mask  # what mining leaves
        if epsilon is not None:
            gap = sign * (d.gather(1, other) - d) + epsilon
            off = error.gather(1, other) + error + truth.relative * (epsilon + 1e-2)
            kept, surely, possibly = mask & (gap > 0), mask & (gap > off), mask & (gap > -off)
        easy = sign < 0 and options["positive"] == "easy"
        if easy:
            kept, possibly = nearest_of(truth, mask)
            surely = kept & (possibly.sum(1, keepdim=True) == 1)
        exponent = sign * rate * (offset - d)
        value, least, most = (
            torch.cat([exponent.where(some, -math.inf), torch.zeros(len(d), 1)], 1).logsumexp(1)
            for some in (kept, surely, possibly)
        )
        if easy:
            least = most = value
        steady = steady & (surely == possibly).all(1, keepdim=True)
        far = error.where(possibly, 0).amax(1)
        found.value += value / rate
        least_value += least / rate
        found.jump += (most - least) / rate
        found.off += (most - least) / rate + far
        found.size += (d.where(possibly, 0).amax(1) + abs(offset)) * valid + value / rate
        slope = (exponent - value[:, None]).exp().where(kept, 0)
        spread = 2 * rate * far[:, None]
        highest = (exponent - least[:, None] + spread).exp().clamp(max=1).where(possibly, 0)
        lowest = (exponent - most[:, None] - spread).exp().where(surely, 0)
        found.slope += slope
        found.wobble += torch.maximum(highest - slope, slope - lowest)
    found.count, found.nonzero = int(valid.sum()), int((found.value > 0).sum())
    found.flips = int((valid & (least_value < 2.0**-50)).sum())
    found.steady = steady
    return [found]


# On every backend


def an_easy_positive_beside_a_far_one(backend: Backend) -> None:
    """e^(alpha·d) of the nearest positive is nothing beside that of the farthest, which must not matter."""
    angle = torch.tensor([0.0, 60, 180, 90, 95], dtype=torch.float64).deg2rad()
    emb = torch.stack([angle.cos(), angle.sin()], 1)
    for dtype, alpha in product(DTYPES, (100.0, 600.0, 1000.0)):
        call = ManyTuples(
            "multi_similarity_loss",
            {"alpha": alpha, "positive": "easy", "reduction": "none", "epsilon": None},
        )
        losses, (gradient,), _ = run_tuples(Batch(emb.to(dtype), torch.tensor([0, 0, 0, 1, 1])), call)
        assert abs(losses[0].item() - 0.5) < 0.01
        assert abs(losses[2].item() - 1.5) < 0.01
        assert gradient.abs().max() < 4


ON_EVERY_BACKEND = (an_easy_positive_beside_a_far_one,)
