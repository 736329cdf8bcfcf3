"""The oracle's objectives over many tuples, and its draws by distance: on paper, by loops, against others."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity, LpDistance
from pytorch_metric_learning.losses import (
    ContrastiveLoss,
    MarginLoss,
    MultiSimilarityLoss,
    TripletMarginLoss,
)
from pytorch_metric_learning.miners import MultiSimilarityMiner
from pytorch_metric_learning.reducers import AvgNonZeroReducer, MeanReducer
from scipy.stats import chisquare
from torch import Tensor

from tripletops import reference

NAN = math.nan
REDUCTIONS = ["mean", "mean_nonzero", "sum", "none"]

# Five points on a line. Distances of each anchor to its positives | to its negatives, by row:
#   0 at 0.0:  1 → 1,   2 → 3    |  3 → 2.5,  4 → 7
#   1 at 1.0:  0 → 1,   2 → 2    |  3 → 1.5,  4 → 6
#   2 at 3.0:  0 → 3,   1 → 2    |  3 → 0.5,  4 → 4
#   3 at 2.5:  4 → 4.5           |  0 → 2.5,  1 → 1.5,  2 → 0.5
#   4 at 7.0:  3 → 4.5           |  0 → 7,    1 → 6,    2 → 4
LINE = torch.tensor([[0.0], [1.0], [3.0], [2.5], [7.0]], dtype=torch.float64)
LINE_LABELS = torch.tensor([8, 8, 8, -3, -3])

# Directions a = (1, 0), b = (.6, .8), c = (0, 1), d = (−1, 0), e = (−.6, .8) of any length. S by anchor:
#   a:  b .6, d −1   |  c 0,  e −.6
#   b:  a .6, d −.6  |  c .8, e .28
#   c:  e .8         |  a 0,  b .8, d 0
#   d:  a −1, b −.6  |  c 0,  e .6
#   e:  c .8         |  a −.6, b .28, d .6
COMPASS = torch.tensor([[1, 0], [3, 4], [0, 2], [-5, 0], [-6, 8]], dtype=torch.float64)
COMPASS_LABELS = torch.tensor([0, 0, 1, 0, 1])


pytestmark = pytest.mark.usefixtures("one_thread")


def tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def same(actual: Tensor, expected: object, tolerance: float = 1e-14) -> bool:
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    return torch.allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def batch_all(*arguments: Tensor, **options: object) -> Tensor:
    return reference.batch_all_loss(*arguments, **options)[0]


def beta_margin(emb: Tensor, labels: Tensor, **options: object) -> Tensor:
    """With a β of every anchor that lies between its distances."""
    beta = torch.linspace(1, 1.5, len(emb), dtype=emb.dtype)
    return reference.beta_margin_loss(emb, labels, beta, **options)


EVERY = [
    pytest.param(function, options, id=f"{function.__name__}-{'-'.join(map(str, options.values()))}")
    for function, options in [
        (batch_all, {"margin": 0.5}),
        (batch_all, {"loss": "soft_margin"}),
        (reference.semi_hard_loss, {"margin": 0.5}),
        (reference.multi_similarity_loss, {}),
        (reference.multi_similarity_loss, {"epsilon": None}),
        (reference.multi_similarity_loss, {"positive": "easy"}),
        (reference.contrastive_loss, {}),
        (reference.contrastive_loss, {"positive": "hard", "negative": "semihard"}),
        (beta_margin, {"positive": "all", "negative": "all"}),
        (beta_margin, {"seed": 7}),
    ]
]


EVERY_BY_DISTANCE = [
    pytest.param(function, {**options, "distance": distance}, id=f"{case.id}-{distance}")
    for case in EVERY
    for function, options in [case.values]
    for distance in ("euclidean", "sqeuclidean", "cosine")
    if function is not reference.multi_similarity_loss
] + [case for case in EVERY if case.values[0] is reference.multi_similarity_loss]


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    inputs = tuple(each.detach().clone().requires_grad_() for each in inputs)
    loss = function(*inputs)
    return loss.detach(), list(torch.autograd.grad(loss.sum(), inputs))


def random_batch(count: int, width: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    emb = torch.randn(count, width, dtype=torch.float64, generator=generator)
    return emb, torch.arange(count)[torch.randperm(count, generator=generator)] % classes


# On paper


def test_batch_all_on_a_line():
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


def test_batch_all_soft_margin():
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


def test_semi_hard_on_a_line():
    # Each positive with the nearest negative beyond it, d_ap − d_an + 2:
    #   0:  1 → 1 − 2.5,  2 → 3 − 7            .5, −2
    #   1:  0 → 1 − 1.5,  2 → 2 − 6            1.5, −2
    #   2:  0 → 3 − 4,    1 → 2 − 4            1, 0
    #   3:  4 → 4.5 − 2.5, as none is farther  4
    #   4:  3 → 4.5 − 6                        .5              8 pairs, 5 above 0
    expected = {"none": [0.5, 1.5, 1, 4, 0.5], "sum": 7.5, "mean": 7.5 / 8, "mean_nonzero": 1.5}
    for reduction, value in expected.items():
        assert same(reference.semi_hard_loss(LINE, LINE_LABELS, margin=2.0, reduction=reduction), value)
    # What x_0 … x_4 get:
    #   0 1 3:   0 +1  0 −1  0       2 0 4:  −1  0 +2  0 −1       4 3 1:   0 +1  0 −1  0
    #   1 0 3:  −1 +2  0 −1  0       3 4 0:  +1  0  0 −2 +1
    _, (gradient,) = with_gradients(
        lambda emb: reference.semi_hard_loss(emb, LINE_LABELS, margin=2.0, reduction="sum"), LINE
    )
    assert same(gradient, [[-1], [4], [2], [-5], [0]])


@pytest.mark.parametrize("positive", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("side", [1, -1])
def test_semi_hard_ties_go_to_the_first_candidate(positive, side):
    # Negatives at ±2, either of them first: beyond a positive at 1, but not beyond one at 2 or 5, where the
    # farthest is taken.
    options = {"ref_labels": torch.tensor([0, 1, 1]), "margin": 10.0}
    ref_emb = tensor([[positive], [side * 2.0], [side * -2.0]])
    loss, (_, by_ref) = with_gradients(
        lambda emb, ref_emb: reference.semi_hard_loss(emb, torch.tensor([0]), ref_emb=ref_emb, **options),
        tensor([[0]]), ref_emb,
    )  # fmt: skip
    assert loss == positive - 2 + 10
    assert by_ref.tolist() == [[1], [-side], [0]]


def test_semi_hard_wants_a_negative_strictly_farther():
    # Positive 2 away, negatives 2, 3 and 4 away: 2 − 3 + 5.
    options = {"ref_emb": tensor([[2], [-2], [4], [-3]]), "ref_labels": torch.tensor([0, 1, 1, 1])}
    for distance, expected in {"euclidean": 2 - 3 + 5, "sqeuclidean": 4 - 9 + 5}.items():
        loss = reference.semi_hard_loss(
            tensor([[0]]), torch.tensor([0]), margin=5.0, distance=distance, **options
        )
        assert loss == expected


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


@pytest.mark.parametrize("mining", ["all", "easy", None])
def test_multi_similarity_on_the_compass(mining):
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


def test_multi_similarity_gradient():
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


def test_multi_similarity_keeps_nothing_on_the_edge():
    # S_ap = S_an = 0: with ε = 0 neither is strictly beyond the other; a valid anchor all the same.
    emb, ref_emb = tensor([[1, 0], [0, 1]]), tensor([[0, 1], [0, -1]])
    options = {"ref_emb": ref_emb, "ref_labels": torch.tensor([0, 1]), "epsilon": 0.0, "base": 0.0}
    labels = torch.tensor([0, 1])
    # The second anchor: S_ap = −1, S_an = 1.
    second = math.log(1 + math.exp(2)) / 2 + math.log(1 + math.exp(50)) / 50
    assert same(reference.multi_similarity_loss(emb, labels, reduction="none", **options), [0, second])
    assert same(reference.multi_similarity_loss(emb, labels, **options), second / 2)
    assert same(reference.multi_similarity_loss(emb, labels, reduction="mean_nonzero", **options), second)


def test_multi_similarity_of_no_pair_has_no_slope_of_nan():
    # The compass's e keeps nothing; no step on the way back may be NaN, hidden behind a mask or not.
    with torch.autograd.set_detect_anomaly(True):
        with_gradients(lambda emb: reference.multi_similarity_loss(emb, COMPASS_LABELS), COMPASS)


def test_multi_similarity_far_out():
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
def test_contrastive_on_a_line(positive, negative, expected):
    options = {"pos_margin": 1.5, "neg_margin": 2.0, "positive": positive, "negative": negative}
    for reduction, value in {**expected, "mean_nonzero": expected["mean"]}.items():
        assert same(reference.contrastive_loss(LINE, LINE_LABELS, reduction=reduction, **options), value)


def test_contrastive_gradient():
    # Above 0: pairs 02 20 12 21 34 43 and 13 31 23 32. What x_0 … x_4 get of each, both directions alike:
    #   02: −1  0 +1  0  0      12:  0 −1 +1  0  0      34:  0  0  0 −1 +1        a sixth of each, twice
    #   13:  0 +1  0 −1  0      23:  0  0 −1 +1  0                                a quarter of each, twice
    options = {"pos_margin": 1.5, "neg_margin": 2.0}
    _, (gradient,) = with_gradients(lambda emb: reference.contrastive_loss(emb, LINE_LABELS, **options), LINE)
    assert same(gradient, [[-1 / 3], [-1 / 3 + 1 / 2], [2 / 3 - 1 / 2], [-1 / 3], [1 / 3]])


def test_margins_have_no_slope_at_the_kink():
    # The positive is 1 away and the negative 2, as the margins are.
    ref_emb, options = tensor([[1], [2]]), {"ref_labels": torch.tensor([0, 1])}
    for function in (
        lambda emb: reference.contrastive_loss(
            emb, torch.tensor([0]), ref_emb=ref_emb, pos_margin=1.0, neg_margin=2.0, **options
        ),
        lambda emb: reference.beta_margin_loss(
            emb, torch.tensor([0]), tensor([1.5]), ref_emb=ref_emb, alpha=0.5, positive="all", negative="all",
            **options,
        ),
    ):  # fmt: skip
        loss, (gradient,) = with_gradients(function, tensor([[0]]))
        assert loss == 0
        assert not gradient.any()


def test_pairs_stand_alone():
    # Rows 2 and 3 are alone in their classes, but negatives all round: |.25|, |.75|, |.5| from 0 1 .25 .75.
    emb, labels = tensor([[0], [1], [0.25], [0.75]]), torch.tensor([0, 0, 1, 2])
    # [1 − d]₊ by anchor: .75 .25 | .25 .75 | .75 .25 .5 | .25 .75 .5
    each = tensor([2, 2, 1.5, 1.5])
    assert same(reference.contrastive_loss(emb, labels, reduction="none"), each)
    assert same(reference.contrastive_loss(emb, labels), 2 / 2 + 5 / 10)
    # β = 1, α = 0: the same but for the positives, 1 away.
    beta = torch.ones(4, dtype=torch.float64)
    options = {"alpha": 0.0, "positive": "all", "negative": "all"}
    assert same(reference.beta_margin_loss(emb, labels, beta, **options), 5 / 10)
    # Not so where anchors have to have both: rows 0 and 1 only, 1 − .25 + 0 and so on.
    assert same(batch_all(emb, labels, margin=0.0, reduction="none"), [0.75 + 0.25, 0.25 + 0.75, 0, 0])
    assert same(reference.semi_hard_loss(emb, labels, margin=0.0, reduction="none"), [0.25, 0.25, 0, 0])
    # S is 1 between rows 1 2 3 and 0 with row 0.
    each = reference.multi_similarity_loss(emb, labels, reduction="none")
    assert (each[:2] > 0).all()
    assert not each[2:].any()


def test_beta_margin_on_a_line():
    # β = 2, α = .5: [d_ap − 1.5]₊ as above and [2.5 − d_an]₊: 0 0 | 1 0 | 2 0 | 0 1 2 | 0 0 0
    options = {"alpha": 0.5, "positive": "all", "negative": "all"}
    beta = torch.full((5,), 2.0, dtype=torch.float64)
    expected = {"none": [1.5, 1.5, 4, 6, 3], "sum": 16, "mean": 16 / 10, "mean_nonzero": 16 / 10}
    for reduction, value in expected.items():
        assert same(
            reference.beta_margin_loss(LINE, LINE_LABELS, beta, reduction=reduction, **options), value
        )
    # The hard pairs alone: 1.5 .5 1.5 3 3 and 0 1 2 2 0.
    options |= {"positive": "hard", "negative": "hard"}
    assert same(reference.beta_margin_loss(LINE, LINE_LABELS, beta, **options), 14.5 / 8)


def test_beta_margin_by_class():
    # β = 2 for the class 8 and 4 for the class −3, whose terms are 1 | 2 3 4 and 1 | 0 0 .5.
    options = {"alpha": 0.5, "positive": "all", "negative": "all"}
    beta = tensor([2, 2, 2, 4, 4])
    expected = {"none": [1.5, 1.5, 4, 10, 1.5], "sum": 18.5, "mean": 18.5 / 12}
    for reduction, value in expected.items():
        loss, (_, by_beta) = with_gradients(
            lambda emb, beta, reduction=reduction: reference.beta_margin_loss(
                emb, LINE_LABELS, beta, reduction=reduction, **options
            ),
            LINE, beta,
        )  # fmt: skip
        assert same(loss, value)
        # Negative terms less positive ones: 0 − 1, 1 − 1, 1 − 2, 3 − 1, 1 − 1
        assert same(by_beta, tensor([-1, 0, -1, 2, 0]) / (12 if reduction == "mean" else 1))


# By brute force


def distance_of(x: Tensor, y: Tensor, distance: str) -> float:
    if distance == "cosine":
        return 1 - (x @ y / (x.norm() * y.norm())).item()
    square = (x - y).square().sum().item()
    return square if distance == "sqeuclidean" else math.sqrt(square)


def distances_of(emb: Tensor, labels: Tensor, distance: str) -> list[tuple[list[float], list[float]]]:
    """Of every anchor the distances of its positives and of its negatives."""
    every = range(len(emb))
    return [
        (
            [distance_of(emb[a], emb[c], distance) for c in every if labels[c] == labels[a] and c != a],
            [distance_of(emb[a], emb[c], distance) for c in every if labels[c] != labels[a]],
        )
        for a in every
    ]


def reductions_of(terms: list[list[float]]) -> dict[str, object]:
    flat = [term for of_anchor in terms for term in of_anchor]
    return {
        "none": [sum(of_anchor) for of_anchor in terms],
        "sum": sum(flat),
        "mean": sum(flat) / len(flat),
        "mean_nonzero": sum(flat) / max(sum(term > 0 for term in flat), 1),
    }


BATCHES = [
    pytest.param(*random_batch(13, 3, 4), id="random"),
    pytest.param(*random_batch(12, 2, 3, seed=1), id="another"),
    pytest.param(*random_batch(11, 5, 6, seed=2), id="with a lonely row"),
]


@pytest.mark.parametrize(("emb", "labels"), BATCHES)
@pytest.mark.parametrize("distance", ["euclidean", "sqeuclidean", "cosine"])
def test_triplets_by_loops(emb, labels, distance):
    hinge, soft, semi_hard = [], [], []
    for positives, negatives in distances_of(emb, labels, distance):
        hinge.append([max(p - n + 0.3, 0.0) for p in positives for n in negatives])
        soft.append([math.log1p(math.exp(p - n)) for p in positives for n in negatives])
        # TensorFlow's rule: the smallest negative distance beyond the positive's, else the largest.
        beyond = [min((n for n in negatives if n > p), default=max(negatives)) for p in positives]
        semi_hard.append([max(p - n + 0.3, 0.0) for p, n in zip(positives, beyond, strict=True)])
    for reduction in REDUCTIONS:
        options = {"distance": distance, "reduction": reduction}
        loss, active = reference.batch_all_loss(emb, labels, margin=0.3, **options)
        assert same(loss, reductions_of(hinge)[reduction], 1e-12)
        assert active == sum(term > 0 for of_anchor in hinge for term in of_anchor)
        loss, active = reference.batch_all_loss(emb, labels, loss="soft_margin", **options)
        assert same(loss, reductions_of(soft)[reduction], 1e-12)
        assert active == sum(map(len, soft))
        loss = reference.semi_hard_loss(emb, labels, margin=0.3, **options)
        assert same(loss, reductions_of(semi_hard)[reduction], 1e-12)


@pytest.mark.parametrize(("emb", "labels"), BATCHES)
@pytest.mark.parametrize("distance", ["euclidean", "sqeuclidean", "cosine"])
def test_pairs_by_loops(emb, labels, distance):
    distances = distances_of(emb, labels, distance)
    pull = reductions_of([[max(p - 0.5, 0.0) for p in positives] for positives, _ in distances])
    push = reductions_of([[max(1.2 - n, 0.0) for n in negatives] for _, negatives in distances])
    beta = torch.linspace(0.5, 1.5, len(emb), dtype=torch.float64)
    margin = reductions_of([
        [max(p - b + 0.2, 0.0) for p in positives] + [max(b - n + 0.2, 0.0) for n in negatives]
        for b, (positives, negatives) in zip(beta.tolist(), distances, strict=True)
    ])  # fmt: skip
    for reduction in REDUCTIONS:
        counted = "mean_nonzero" if reduction == "mean" else reduction
        options = {"distance": distance, "reduction": reduction}
        loss = reference.contrastive_loss(emb, labels, pos_margin=0.5, neg_margin=1.2, **options)
        assert same(loss, tensor(pull[counted]) + tensor(push[counted]), 1e-12)
        loss = reference.beta_margin_loss(emb, labels, beta, positive="all", negative="all", **options)
        assert same(loss, margin[counted], 1e-12)


@pytest.mark.parametrize(("emb", "labels"), BATCHES)
@pytest.mark.parametrize("epsilon", [0.0, 0.1, None])
@pytest.mark.parametrize("positive", ["all", "easy"])
def test_multi_similarity_by_loops(emb, labels, epsilon, positive):
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
    for reduction in REDUCTIONS:
        loss = reference.multi_similarity_loss(emb, labels, reduction=reduction, **options)
        assert same(loss, expected[reduction], 1e-12)


# Against pytorch-metric-learning


def check_peer(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *inputs: Tensor, tolerance: float = 1e-11
) -> None:
    loss, gradients = with_gradients(ours, *inputs)
    expected, expected_gradients = with_gradients(theirs, *inputs)
    assert loss > 0
    assert same(loss, expected, tolerance)
    for gradient, peer in zip(gradients, expected_gradients, strict=True):
        assert gradient.any()
        assert same(gradient, peer, tolerance)


def plain_distance() -> LpDistance:
    return LpDistance(normalize_embeddings=False)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("epsilon", [0.1, 0.0, None])
def test_multi_similarity_like_pytorch_metric_learning(epsilon, seed):
    # Its mean counts anchors without a positive or a negative too, so here every anchor has both.
    emb, labels = random_batch(24, 6, 5, seed)
    peer = MultiSimilarityLoss(alpha=2, beta=50, base=1.0, distance=CosineSimilarity(), reducer=MeanReducer())
    miner = None if epsilon is None else MultiSimilarityMiner(epsilon=epsilon)
    check_peer(
        lambda emb: reference.multi_similarity_loss(emb, labels, epsilon=epsilon),
        lambda emb: peer(emb, labels, None if miner is None else miner(emb, labels)),
        emb,
    )
    ref_emb, ref_labels = random_batch(20, 6, 5, seed + 10)
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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("reduction", "reducer"), [("mean", MeanReducer), ("mean_nonzero", AvgNonZeroReducer)]
)
def test_batch_all_like_pytorch_metric_learning(reduction, reducer, seed):
    emb, labels = random_batch(22, 4, 5, seed)
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
    ref_emb, ref_labels = random_batch(17, 4, 4, seed + 10)
    check_peer(
        lambda emb, ref_emb: batch_all(
            emb, labels, margin=0.4, reduction=reduction, ref_emb=ref_emb, ref_labels=ref_labels
        ),
        lambda emb, ref_emb: peer(emb, labels, ref_emb=ref_emb, ref_labels=ref_labels),
        emb, ref_emb,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_contrastive_like_pytorch_metric_learning(seed):
    # Classes of one row included; a batch without negatives is where it differs: it keeps the positive terms.
    emb, labels = random_batch(22, 2, 12, seed)
    peer = ContrastiveLoss(pos_margin=0.3, neg_margin=1.1, distance=plain_distance())
    options = {"pos_margin": 0.3, "neg_margin": 1.1}
    check_peer(
        lambda emb: reference.contrastive_loss(emb, labels, **options), lambda emb: peer(emb, labels), emb
    )
    ref_emb, ref_labels = random_batch(17, 2, 4, seed + 10)
    check_peer(
        lambda emb, ref_emb: reference.contrastive_loss(
            emb, labels, ref_emb=ref_emb, ref_labels=ref_labels, **options
        ),
        lambda emb, ref_emb: peer(emb, labels, ref_emb=ref_emb, ref_labels=ref_labels),
        emb, ref_emb,
    )  # fmt: skip


@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_beta_margin_like_pytorch_metric_learning(by_class, seed):
    # It counts a pair once for every triplet that holds it, so it is given one triplet for each anchor.
    emb, labels = random_batch(20, 3, 4, seed)
    classes = torch.linspace(0.9, 1.3, 4, dtype=torch.float64) if by_class else tensor([1.2])
    options = {"positive": "random", "negative": "distance", "seed": 99 + seed}
    p, n, _, _ = reference.mine(emb, labels, **options)
    assert (p >= 0).all()
    assert (n >= 0).all()

    def theirs(emb: Tensor, beta: Tensor) -> Tensor:
        peer = MarginLoss(margin=0.3, distance=plain_distance())
        peer.beta = beta
        return peer(emb, labels, (torch.arange(20), p, n))

    def ours(emb: Tensor, beta: Tensor) -> Tensor:
        per_anchor = beta[labels] if by_class else beta.expand(20)
        return reference.beta_margin_loss(emb, labels, per_anchor, alpha=0.3, **options)

    check_peer(ours, theirs, emb, classes)


# Draws by distance

HALF = math.log(2) / 2


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        # ln d is −2, 1 and 2 HALFs for d = .5, √2 and 2, and ln(1 − d²/4) ln(15/16), −2 HALFs and −40 HALFs.
        (2, [math.log(15 / 16) / 2, -HALF, -20 * HALF]),
        (3, [2 * HALF, -HALF, -2 * HALF]),
        (4, [4 * HALF - math.log(15 / 16) / 2, -HALF, 16 * HALF]),
        (128, [252 * HALF - 62.5 * math.log(15 / 16), -HALF, 2248 * HALF]),
    ],
)
def test_log_weights(width, expected):
    x, y = torch.zeros(1, width, dtype=torch.float64), torch.zeros(4, width, dtype=torch.float64)
    x[0, 0] = 3.0
    y[0, 0], y[1, 1], y[2, 0] = 5.0, 1e-3, -7.0  # the same direction, at right angles, the antipode
    expected = [*expected, expected[1]]  # a zero row is at right angles to everything
    assert same(reference.log_weights(x, y, 0.5, None), [expected], 1e-12)
    assert same(reference.log_weights(x, y, 0.5, 1.4), [[expected[0], *[-math.inf] * 3]], 1e-12)
    assert same(reference.log_weights(x, y, 0.5, 2.0), [[*expected[:2], -math.inf, expected[3]]], 1e-12)
    # A cutoff that everything is nearer than; and beyond the limit, no weight is left.
    assert reference.log_weights(x, y, 2.5, None).unique().numel() == 1
    assert reference.log_weights(x, y, 2.5, None).isfinite().all()
    assert (reference.log_weights(x, y, 1.5, 1.5) == -math.inf).all()


def test_draws_without_dimensions():
    # Every distance is 0, so every weight the same: the largest hash, as by "random".
    emb, labels = torch.ones(30, 0), torch.arange(30) % 3
    options = {"positive": "random", "seed": 5}
    _, by_distance, _, _ = reference.mine(emb, labels, negative="distance", **options)
    _, by_hash, _, _ = reference.mine(emb, labels, negative="random", **options)
    assert torch.equal(by_distance, by_hash)


@pytest.mark.parametrize("distance", ["euclidean", "sqeuclidean", "cosine"])
@pytest.mark.parametrize(("cutoff", "limit"), [(0.5, 1.4), (0.9, None), (0.3, 1.0)])
def test_draws_by_loops(distance, cutoff, limit):
    emb, labels = random_batch(40, 6, 5)
    labels[3] = -9
    emb[7] = 0
    drawn = reference.mine(
        emb, labels, positive="easy", negative="distance", distance=distance, seed=-123, cutoff=cutoff,
        nonzero_loss_cutoff=limit, ignore_label=-9,
    )[1]  # fmt: skip
    hashes = reference.noise(-123, 40, 40, torch.device("cpu"))
    for a in range(40):
        keys = {}
        for c in range(40):
            if labels[c] in (labels[a], -9):
                continue
            s = torch.cosine_similarity(emb[a], emb[c], dim=0).item()
            d = max(math.sqrt(2 - 2 * s), cutoff)
            if limit is None or d < limit:
                v = (2**32 - hashes[a, c].item() - 0.5) / 2**32
                weight = -4 * math.log(d) - 1.5 * math.log(max(1 - d * d / 4, 2**-20))
                keys[c] = weight - math.log(-math.log1p(-v))
        if not keys:
            keys = {c: hashes[a, c].item() for c in range(40) if labels[c] not in (labels[a], -9)}
        assert drawn[a] == (-1 if a == 3 else max(keys, key=keys.__getitem__))


def test_a_draw_by_distance_feeds_the_losses():
    # The limits reach every function that mines by them.
    emb, labels = random_batch(30, 3, 3)
    beta = torch.ones(30, dtype=torch.float64)
    options = {"positive": "easy", "negative": "distance", "seed": 3, "reduction": "none"}
    for limits in ({}, {"cutoff": 0.9}, {"nonzero_loss_cutoff": 0.6}, {"nonzero_loss_cutoff": None}):
        p, n, d_ap, d_an = reference.mine(emb, labels, positive="easy", negative="distance", seed=3, **limits)
        assert (p >= 0).all()
        assert (n >= 0).all()
        loss = reference.triplet_loss(emb, labels, **options, **limits)
        assert same(loss, (d_ap - d_an + 0.2).relu())
        loss = reference.contrastive_loss(emb, labels, **options, **limits)
        assert same(loss, d_ap + (1 - d_an).relu())
        loss = reference.beta_margin_loss(emb, labels, beta, **options, **limits)
        assert same(loss, (d_ap - 0.8).relu() + (1.2 - d_an).relu())


def at_distances(distances: list[float], width: int) -> Tensor:
    """Rows that far, on the unit sphere, from the first axis."""
    d = tensor(distances)
    rows = torch.zeros(len(d), width, dtype=torch.float64)
    rows[:, 0] = 1 - d.square() / 2
    rows[torch.arange(len(d)), 1 + torch.arange(len(d)) % (width - 1)] = (
        d * (1 - d.square() / 4).clamp(min=0).sqrt()
    )
    return rows


SPREAD = [0.1, 0.45, 0.505, 0.51, 0.55, 0.6, 0.7, 0.9, 1.1, 1.3, 1.39, 1.41, 1.7, 1.95]
EVEN = [0.2, 0.8, 0.805, 0.81, 0.85, 1.2, 1.35]


@pytest.mark.parametrize("over", ["anchors", "seeds"])
@pytest.mark.parametrize(
    ("width", "distances", "cutoff", "limit"),
    [
        (3, SPREAD, 0.5, 1.4),
        (3, SPREAD, 0.5, None),
        (16, SPREAD, 0.5, 1.4),
        (16, EVEN, 0.8, None),
        (128, SPREAD, 0.5, 1.4),  # the weights of .5 and 1.39 are e^90 apart
        (128, SPREAD[4:], 0.5, None),  # 1.95 outweighs everything
        (128, SPREAD[4:-2], 0.5, None),
        (16, SPREAD[-3:], 0.5, 1.4),  # no weight at all
    ],
)
def test_draws_follow_the_weights(width, distances, cutoff, limit, over):
    # Half of the candidates are positives, in between the negatives.
    negatives = at_distances(distances, width)
    ref_emb = torch.stack([negatives.flip(0), negatives], 1).flatten(0, 1)
    ref_labels = torch.tensor([0, 1]).repeat(len(negatives))
    anchor = at_distances([0.0], width)
    anchors, seeds = (2000, [11]) if over == "anchors" else (16, range(125))
    counts = torch.zeros(len(ref_emb))
    for seed in seeds:
        n = reference.mine(
            anchor.expand(anchors, -1), torch.zeros(anchors, dtype=torch.int64), positive="random",
            negative="distance", ref_emb=ref_emb, ref_labels=ref_labels, seed=seed, cutoff=cutoff,
            nonzero_loss_cutoff=limit,
        )[1]  # fmt: skip
        counts += torch.bincount(n, minlength=len(ref_emb))
    assert not counts[::2].any()
    counts = counts[1::2].double()

    d = tensor(distances).clamp(min=cutoff)
    log_weight = (2 - width) * d.log() - (width - 3) / 2 * (1 - d.square() / 4).log()
    if limit is not None:
        log_weight[d >= limit] = -math.inf
    if (log_weight == -math.inf).all():
        log_weight = torch.zeros_like(d)
    expected = log_weight.softmax(0) * counts.sum()
    # Candidates too rare to count on are taken together, and hardly ever drawn.
    often = expected >= 5
    rare, rare_expected = counts[~often].sum(), expected[~often].sum()
    assert rare <= rare_expected + 4 * rare_expected.sqrt() + (rare_expected > 1e-3).double()
    if often.sum() > 1:
        observed = counts[often]
        p = chisquare(observed, expected[often] / expected[often].sum() * observed.sum()).pvalue
        assert p > 1e-3  # a fair draw fails for one seed in a thousand, and the seeds are fixed


# Edges


@pytest.mark.parametrize(("function", "options"), EVERY_BY_DISTANCE)
def test_gradients_by_differences(function, options):
    emb, labels = random_batch(7, 3, 3, seed=4)
    ref_emb, ref_labels = random_batch(6, 3, 3, seed=5)
    assert torch.autograd.gradcheck(
        lambda emb: function(emb, labels, reduction="none", **options), emb.clone().requires_grad_()
    )
    assert torch.autograd.gradcheck(
        lambda emb, ref_emb: function(
            emb, labels, ref_emb=ref_emb, ref_labels=ref_labels, self_index=torch.arange(7) - 1, **options
        ),
        (emb.clone().requires_grad_(), ref_emb.clone().requires_grad_()),
    )


def test_gradient_by_beta_by_differences():
    emb, labels = random_batch(7, 3, 3, seed=4)
    assert torch.autograd.gradcheck(
        lambda beta: reference.beta_margin_loss(emb, labels, beta, positive="all", negative="all"),
        torch.linspace(1, 2, 7, dtype=torch.float64).requires_grad_(),
    )


@pytest.mark.parametrize(
    ("labels", "ref_labels"),
    [
        ([], None),
        ([3], None),
        ([3, 3, 3], None),
        ([1, 2, 3], None),
        ([1, 2], []),
        ([1, 2], [1, 2]),
        ([], [1, 2]),
        ([4, 4, 4], None),  # all of them ignored
    ],
)
@pytest.mark.parametrize(("function", "options"), EVERY)
def test_nothing_to_compare_is_the_differentiable_zero(function, options, labels, ref_labels):
    for reduction, width in product(REDUCTIONS, (0, 2)):
        options = {**options, "reduction": reduction, "ignore_label": 4}
        inputs = [torch.randn(len(labels), width, dtype=torch.float64)]
        if ref_labels is not None:
            options["ref_labels"] = torch.tensor(ref_labels, dtype=torch.int64)
            options["self_index"] = torch.arange(len(labels)) if len(ref_labels) else None
            inputs.append(torch.randn(len(ref_labels), width, dtype=torch.float64))
        loss, gradients = with_gradients(
            lambda emb, ref_emb=None, options=options: function(
                emb, torch.tensor(labels, dtype=torch.int64), ref_emb=ref_emb, **options
            ),
            *inputs,
        )
        assert loss.shape == ((len(labels),) if reduction == "none" else ())
        assert not loss.any()
        assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize(("function", "options"), EVERY)
def test_rows_without_dimensions_are_all_at_distance_zero(function, options):
    # Of four rows each anchor has one positive and two negatives, all at distance 0, S = 1.
    values = {
        (batch_all, "soft_margin"): math.log(2),
        (batch_all, 0.5): 0.5,
        (reference.semi_hard_loss, 0.5): 0.5,
        (reference.multi_similarity_loss, None): math.log(2) / 2 + math.log(3) / 50,
        (reference.contrastive_loss, None): 1.0,
        (reference.contrastive_loss, "hard"): 0.0,  # nothing is strictly farther
        # β 1, 1.17, 1.33, 1.5 and .2, of one negative or of two
        (beta_margin, "all"): 1.45,
        (beta_margin, 7): 1.45,
    }
    word = next(iter(options.values()), None)
    expected = values.get((function, word), values.get((function, None)))
    loss = function(torch.ones(4, 0, dtype=torch.float64), torch.tensor([0, 1, 0, 1]), **options)
    assert same(loss, expected)


@pytest.mark.parametrize(("function", "options"), EVERY_BY_DISTANCE)
def test_no_slope_between_duplicates(function, options):
    emb, labels = torch.ones(6, 3, dtype=torch.float64), torch.arange(6) % 2
    loss, (gradient,) = with_gradients(lambda emb: function(emb, labels, **options), emb)
    assert loss.isfinite()
    assert not gradient.any()


@pytest.mark.parametrize(("function", "options"), EVERY)
def test_zero_rows_by_cosine(function, options):
    if function is not reference.multi_similarity_loss:
        options = {**options, "distance": "cosine"}
    emb, labels = random_batch(8, 3, 2)
    emb[2] = 0
    loss, (gradient,) = with_gradients(lambda emb: function(emb, labels, **options), emb)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert not gradient[2].any()


@pytest.mark.parametrize("value", [NAN, math.inf])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("function", "options"), EVERY)
def test_a_value_that_is_not_finite_is_never_mined_around(function, options, reduction, value):
    options = {**options, "reduction": reduction}
    emb, labels = random_batch(8, 3, 2)
    bad = emb.clone()
    bad[1, 1] = value
    loss, (gradient,) = with_gradients(lambda emb: function(emb, labels, **options), bad)
    assert loss.isnan().all()
    assert gradient.isnan().all()
    # In one of the two sets alone, with an ignored anchor and an ignored candidate: the whole gradient again.
    row = torch.arange(8)
    options |= {"ref_labels": labels.where(row != 3, 5), "ignore_label": 5}
    for first, second in ((emb, bad), (bad, emb)):
        loss, gradients = with_gradients(
            lambda emb, ref_emb: function(emb, labels.where(row != 2, 5), ref_emb=ref_emb, **options),
            first, second,
        )  # fmt: skip
        assert loss.isnan().all()
        assert all(gradient.isnan().all() for gradient in gradients)
    # No anchor, no loss to poison.
    loss, (_, by_ref) = with_gradients(
        lambda emb, ref_emb: function(emb, labels[:0], ref_emb=ref_emb, **options), emb[:0], bad
    )
    assert not loss.any()
    assert not by_ref.any()


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_beta_that_is_not_finite_spoils_everything(reduction, value):
    emb, labels = random_batch(8, 3, 2)
    beta = torch.ones(8, dtype=torch.float64)
    beta[3] = value
    loss, gradients = with_gradients(
        lambda emb, beta: reference.beta_margin_loss(emb, labels, beta, seed=1, reduction=reduction),
        emb,
        beta,
    )
    assert loss.isnan().all()
    assert all(gradient.isnan().all() for gradient in gradients)
    # Unless it is that of an ignored row.
    labels[3] = 9
    loss, gradients = with_gradients(
        lambda emb, beta: reference.beta_margin_loss(
            emb, labels, beta, seed=1, reduction=reduction, ignore_label=9
        ),
        emb, beta,
    )  # fmt: skip
    assert loss.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not any(gradient[3].any() for gradient in gradients)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("function", "options"), EVERY)
def test_ignored_rows_are_nobody_and_poison_nothing(function, options, reduction):
    if "seed" in options:  # the draws are by position
        options = {"positive": "easy", "negative": "hard"}
    options = {**options, "reduction": reduction}
    emb, labels = random_batch(11, 3, 3)
    rows = torch.tensor([0, 1, 2, 4, 5, 6, 7, 8, 10])
    beta = {"beta": torch.linspace(1, 1.5, 11, dtype=torch.float64)} if function is beta_margin else {}
    run = reference.beta_margin_loss if beta else function
    expected, (slope,) = with_gradients(
        lambda emb: run(emb, labels[rows], **{name: each[rows] for name, each in beta.items()}, **options),
        emb[rows],
    )
    emb[3], emb[9] = NAN, math.inf
    labels[[3, 9]] = -5
    loss, (gradient,) = with_gradients(lambda emb: run(emb, labels, **beta, ignore_label=-5, **options), emb)
    if reduction == "none":
        assert not loss[[3, 9]].any()
        loss = loss[rows]
    assert same(loss, expected)
    assert same(gradient[rows], slope)
    assert not gradient[[3, 9]].any()


@pytest.mark.parametrize(("function", "options"), EVERY)
def test_candidates_that_are_the_anchors(function, options):
    # The same rows as another set, each anchor naming itself; the two gradients add up to the one.
    emb, labels = random_batch(9, 3, 3)
    expected, (slope,) = with_gradients(lambda emb: function(emb, labels, **options), emb)
    loss, (by_emb, by_ref) = with_gradients(
        lambda emb, ref_emb: function(
            emb, labels, ref_emb=ref_emb, ref_labels=labels, self_index=torch.arange(9), **options
        ),
        emb, emb,
    )  # fmt: skip
    assert same(loss, expected)
    assert same(by_emb + by_ref, slope)
    assert by_emb.any()
    assert by_ref.any()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("function", "options"), EVERY)
def test_types(function, options, dtype, reduction):
    options = {**options, "reduction": reduction}
    emb, labels = random_batch(10, 3, 3)
    emb = emb.to(dtype)
    exact, (exact_slope,) = with_gradients(lambda emb: function(emb, labels, **options), emb.double())
    if function is beta_margin:
        beta = torch.linspace(1, 1.5, 10)
        loss, (slope,) = with_gradients(
            lambda emb: reference.beta_margin_loss(emb, labels, beta, **options), emb
        )
    else:
        loss, (slope,) = with_gradients(lambda emb: function(emb, labels, **options), emb)
    assert loss.dtype == torch.float32
    assert slope.dtype == dtype
    assert same(loss, exact, 1e-5)
    assert same(slope.double(), exact_slope, 1e-4 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize(("function", "options"), EVERY)
def test_the_parts_add_up_to_the_sum(function, options):
    emb, labels = random_batch(10, 3, 3)
    each = function(emb, labels, reduction="none", **options)
    assert each.shape == (10,)
    assert same(each.sum(), function(emb, labels, reduction="sum", **options))


def test_a_batch_of_three_hundred():
    emb, labels = random_batch(300, 16, 30)
    for function in (batch_all, reference.semi_hard_loss):
        loss, (gradient,) = with_gradients(lambda emb, function=function: function(emb, labels), emb)
        assert loss > 0
        assert gradient.isfinite().all()
