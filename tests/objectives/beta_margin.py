"""Positives within a boundary β that is learned, negatives beyond it, by α."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from pytorch_metric_learning.losses import MarginLoss
from torch import Tensor

from tests.support.backends import Backend
from tests.support.batches import Batch, random_batch
from tests.support.calls import DTYPES, bits
from tests.support.oracle import Truth
from tests.support.pairs import pair_terms, pairs_of
from tests.support.terms import Terms
from tests.support.tuples import (
    ManyTuples,
    beta_by_anchor,
    beta_of,
    check_out_of_reach,
    check_poisoned,
    check_tuples,
    run_tuples,
)
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

ALL = {"positive": "all", "negative": "all"}


# On paper


def test_a_line():
    # β = 2, α = .5: [d_ap − 1.5]₊ by anchor: 0 1.5 | 0 .5 | 1.5 .5 | 3 | 3
    #                [2.5 − d_an]₊:           0 0 | 1 0 | 2 0 | 0 1 2 | 0 0 0
    beta = torch.full((5,), 2.0, dtype=torch.float64)
    expected = {"none": [1.5, 1.5, 4, 6, 3], "sum": 16, "mean": 16 / 10, "mean_nonzero": 16 / 10}
    for reduction, value in expected.items():
        loss = reference.beta_margin_loss(LINE, LINE_LABELS, beta, alpha=0.5, reduction=reduction, **ALL)
        assert same(loss, value)
    # The hard pairs alone: 1.5 .5 1.5 3 3 and 0 1 2 2 0.
    loss = reference.beta_margin_loss(LINE, LINE_LABELS, beta, alpha=0.5, positive="hard", negative="hard")
    assert same(loss, 14.5 / 8)


def test_beta_by_class():
    # β = 2 for the class 8 and 4 for the class −3, whose terms are 1 | 2 3 4 and 1 | 0 0 .5.
    beta = tensor([2, 2, 2, 4, 4])
    expected = {"none": [1.5, 1.5, 4, 10, 1.5], "sum": 18.5, "mean": 18.5 / 12}
    for reduction, value in expected.items():
        loss, (_, by_beta) = with_gradients(
            lambda emb, beta, reduction=reduction: reference.beta_margin_loss(
                emb, LINE_LABELS, beta, alpha=0.5, reduction=reduction, **ALL
            ),
            LINE, beta,
        )  # fmt: skip
        assert same(loss, value)
        # Negative terms less positive ones: 0 − 1, 1 − 1, 1 − 2, 3 − 1, 1 − 1
        assert same(by_beta, tensor([-1, 0, -1, 2, 0]) / (12 if reduction == "mean" else 1))


def test_no_slope_at_the_kink():
    # The positive is 1 away and the negative 2, as β − α and β + α are.
    options = {"ref_emb": tensor([[1], [2]]), "ref_labels": torch.tensor([0, 1]), "alpha": 0.5}
    loss, (gradient,) = with_gradients(
        lambda emb: reference.beta_margin_loss(emb, torch.tensor([0]), tensor([1.5]), **options, **ALL),
        tensor([[0]]),
    )
    assert loss == 0
    assert not gradient.any()


def test_pairs_stand_alone():
    # Rows 2 and 3 are alone in their classes, but negatives all round: |.25|, |.75|, |.5| from 0 1 .25 .75.
    # β = 1, α = 0: the positives, 1 away, have no loss; [1 − d]₊: .75 .25 | .25 .75 | .75 .25 .5 | .25 .75 .5
    emb, labels = tensor([[0], [1], [0.25], [0.75]]), torch.tensor([0, 0, 1, 2])
    beta = torch.ones(4, dtype=torch.float64)
    assert same(reference.beta_margin_loss(emb, labels, beta, alpha=0.0, **ALL), 5 / 10)


@pytest.mark.parametrize("rows", RANDOM_ROWS)
@pytest.mark.parametrize("distance", DISTANCE)
def test_by_loops(rows, distance):
    emb, labels = RANDOM_ROWS[rows]
    beta = torch.linspace(0.5, 1.5, len(emb), dtype=torch.float64)
    expected = reductions_of([
        [max(p - b + 0.2, 0.0) for p in positives] + [max(b - n + 0.2, 0.0) for n in negatives]
        for b, (positives, negatives) in zip(beta.tolist(), distances_of(emb, labels, distance), strict=True)
    ])  # fmt: skip
    for reduction in REDUCTION:
        options = {"distance": distance, "reduction": reduction}
        loss = reference.beta_margin_loss(emb, labels, beta, **options, **ALL)
        assert same(loss, expected["mean_nonzero" if reduction == "mean" else reduction], 1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("reduction", REDUCTION)
def test_a_beta_that_is_not_finite_spoils_everything(reduction, value):
    emb, labels = random_rows(8, 3, 2)
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


def test_gradient_by_beta_by_differences():
    emb, labels = random_rows(7, 3, 3, seed=4)
    assert torch.autograd.gradcheck(
        lambda beta: reference.beta_margin_loss(emb, labels, beta, **ALL),
        torch.linspace(1, 2, 7, dtype=torch.float64).requires_grad_(),
    )


# Against pytorch-metric-learning


@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_like_pytorch_metric_learning(by_class, seed):
    # It counts a pair once for every triplet that holds it, so it is given one triplet for each anchor.
    emb, labels = random_rows(20, 3, 4, seed)
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


# For the backends


def calls(distance: str, unit: float, classes: int) -> dict[str, ManyTuples]:
    options = {"distance": distance, "alpha": 0.2 * unit}
    beta = torch.linspace(0.83 * unit, 1.07 * unit, classes) if classes else torch.tensor(0.9 * unit)
    return {
        "": ManyTuples("beta_margin_loss", options, beta),
        "all": ManyTuples("beta_margin_loss", options | ALL, beta),
    }


def limits(distance: str, unit: float) -> list[ManyTuples]:
    """From margins of 0 to such that everything is active, or nothing; β below 0 too."""
    margins = [size * unit for size in (0.0, 0.03, 0.5, 4.0, 1000.0)]
    return [
        ManyTuples("beta_margin_loss", {"distance": distance, "alpha": alpha} | ALL, beta)
        for margin in margins
        for beta in (margin, -margin)
        for alpha in (0.1 * margin, margin)
    ]


def kinks() -> list[ManyTuples]:
    return [
        ManyTuples("beta_margin_loss", {"alpha": 2.5} | ALL, 7.5),
        ManyTuples("beta_margin_loss", {"alpha": 2.5, "seed": 1}, 7.5),
    ]


def whole_numbers() -> list[ManyTuples]:
    return [ManyTuples("beta_margin_loss", {"alpha": 2.0} | ALL, torch.tensor(6.0))]


def of_equal_rows(distance: str, positives: int, negatives: int) -> list[tuple[ManyTuples, float]]:
    """[α − β]₊ of positives and [α + β]₊ of negatives: one of them is 0, or they are equal."""
    options = {"distance": distance, "alpha": 0.25}
    return [
        (ManyTuples("beta_margin_loss", options | rules, beta), abs(beta) + 0.25)
        for rules in ({}, ALL)
        for beta in (1.0, -1.0, 0.0)
    ]


def terms(truth: Truth, call: ManyTuples, picks: tuple[Tensor, Tensor] | None, exact: bool) -> list[Terms]:
    d, alpha = truth.distance, call.options["alpha"]
    positives, negatives = pairs_of(truth, call, picks)
    beta = beta_of(call, truth.batch.compute_type()).double()
    boundary = beta_by_anchor(truth.exact, beta)[:, None]
    size = d + boundary.abs() + alpha
    pull = pair_terms(truth, positives, d - boundary + alpha, size)
    push = pair_terms(truth, negatives, boundary - d + alpha, size)
    for group in (pull, push):  # which share one mean
        group.nonzero = int(pull.slope.sum() + push.slope.sum())
        group.flips = int(pull.wobble.sum() + push.wobble.sum())
    return [pull, push]


# On every backend


def stride_of(backend: Backend) -> int:
    """Which of many cases a backend meets: all, every seventh, or every 23rd."""
    return 1 if backend.every_word else 23 if backend.slow else 7


def pairs_need_no_others(backend: Backend) -> None:
    """Anchor 0 has negatives only, anchor 1 positives only."""
    batch = Batch(
        torch.tensor([[0.0], [4.0]]), torch.tensor([0, 1]),
        torch.tensor([[0.25], [5.0]]), torch.tensor([1, 1]), torch.tensor([-1, -1]),
    )  # fmt: skip
    options = {"reduction": "none", "alpha": 0.25, "positive": "easy", "negative": "hard"}
    losses, (_, _), _ = run_tuples(batch, ManyTuples("beta_margin_loss", options, 1.0))
    assert losses.tolist() == [1.0, 0.25]


def beta_may_have_any_type(backend: Backend) -> None:
    cases = [
        *product(DTYPES, DTYPES, (None, 40), (torch.tensor(3.3), torch.linspace(2.5, 3.5, 5)), ({}, ALL))
    ]
    for dtype, beta_dtype, candidates, beta, rules in cases[:: stride_of(backend)]:
        count = 30 if candidates or backend.slow else 50
        truth = Truth(random_batch(count, 6, candidates, classes=5, dtype=dtype), "euclidean")
        call = ManyTuples("beta_margin_loss", {"alpha": 0.3} | rules, beta.to(beta_dtype))
        check_tuples(truth, call, "mean", "none")


def a_number_is_like_a_tensor(backend: Backend) -> None:
    batch = random_batch(60, 6, classes=5)
    call = ManyTuples("beta_margin_loss", {}, torch.tensor(1.2))
    by_class = replace(call, beta=torch.full((5,), 1.2))
    loss, gradients, _ = run_tuples(batch, call)
    for other in (replace(call, beta=1.2), by_class):
        again, parts, _ = run_tuples(batch, other)
        assert bits(again, parts[0]) == bits(loss, gradients[0])
    torch.testing.assert_close(run_tuples(batch, by_class)[1][1].sum(), gradients[1])


def classes_may_be_missing(backend: Backend) -> None:
    batch = random_batch(40, 3, classes=3)
    call = ManyTuples("beta_margin_loss", ALL, torch.full((9,), 2.0))
    _, (_, gradient), _ = run_tuples(batch, call)
    assert gradient[:3].all()
    assert not gradient[3:].any()
    # The β of an ignored class stays out of it, too.
    spoiled = torch.full((9,), 2.0)
    spoiled[1] = math.nan
    loss, gradients, _ = run_tuples(replace(batch, ignore_label=1), replace(call, beta=spoiled))
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)


def a_beta_that_is_not_finite_poisons_everything(backend: Backend) -> None:
    values, every_rule = (
        (math.nan, math.inf, -math.inf),
        (ALL, {"positive": "random", "negative": "distance"}),
    )
    cases = [*product(values, DISTANCE, (None, 20), every_rule, REDUCTION)]
    for value, distance, candidates, rules, reduction in cases[:: stride_of(backend)]:
        batch = random_batch(30, 4, candidates, classes=3)
        given = {"distance": distance, "reduction": reduction} | rules
        for beta in (torch.tensor(value), torch.tensor([1.0, 1.0, value]), value):
            check_poisoned(batch, ManyTuples("beta_margin_loss", given, beta))


def a_negative_out_of_reach_may_lie_anywhere(backend: Backend) -> None:
    check_out_of_reach(backend, calls("euclidean", 1.0, 0)["all"])


ON_EVERY_BACKEND = (
    pairs_need_no_others,
    beta_may_have_any_type,
    a_number_is_like_a_tensor,
    classes_may_be_missing,
    a_beta_that_is_not_finite_poisons_everything,
    a_negative_out_of_reach_may_lie_anywhere,
)
