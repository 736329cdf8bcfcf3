"""The oracle's objectives over many tuples: what holds for all of them, in every form of tests/objectives."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.support.calls import DTYPES
from tests.support.tuples import OBJECTIVES, ManyTuples, calls_of, judge_of
from tests.support.worked import plain_loss, random_rows, same, with_gradients
from tripletops import reference
from tripletops._words import DISTANCE, OBJECTIVE, REDUCTION

pytestmark = pytest.mark.usefixtures("one_thread")


def params(distance: str) -> dict[str, ManyTuples]:
    """Their margins lie between the distances of the rows here."""
    return {
        f"{name}-{distance}": call
        for name, call in calls_of(distance, 1.0 if distance == "cosine" else 1.5).items()
    }


EVERY_BY_DISTANCE = {name: call for distance in DISTANCE for name, call in params(distance).items()}
EVERY = {
    name: call
    for name, call in EVERY_BY_DISTANCE.items()
    if call.objective.cosine or call.distance == "euclidean"
}


@pytest.fixture
def call(request: pytest.FixtureRequest) -> ManyTuples:
    """Draws, where there are any, have a seed."""
    call = EVERY_BY_DISTANCE[request.param]
    return call.but(seed=7) if "seed" in call.options else call


every_call = pytest.mark.parametrize("call", EVERY, indirect=True)
every_call_by_distance = pytest.mark.parametrize("call", EVERY_BY_DISTANCE, indirect=True)


def test_every_objective_has_its_file():
    assert {call.objective.name for call in EVERY.values()} == set(OBJECTIVES)
    assert len(OBJECTIVES) == len(OBJECTIVE) - 1


@every_call_by_distance
def test_gradients_by_differences(call):
    emb, labels = random_rows(7, 3, 3, seed=4)
    ref_emb, ref_labels = random_rows(6, 3, 3, seed=5)
    assert torch.autograd.gradcheck(
        lambda emb: plain_loss(call, emb, labels, reduction="none"), emb.clone().requires_grad_()
    )
    assert torch.autograd.gradcheck(
        lambda emb, ref_emb: plain_loss(
            call, emb, labels, ref_emb=ref_emb, ref_labels=ref_labels, self_index=torch.arange(7) - 1
        ),
        (emb.clone().requires_grad_(), ref_emb.clone().requires_grad_()),
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
@every_call
def test_nothing_to_compare_is_the_differentiable_zero(call, labels, ref_labels):
    for reduction, width in product(REDUCTION, (0, 2)):
        options = {"reduction": reduction, "ignore_label": 4}
        inputs = [torch.randn(len(labels), width, dtype=torch.float64)]
        if ref_labels is not None:
            options["ref_labels"] = torch.tensor(ref_labels, dtype=torch.int64)
            options["self_index"] = torch.arange(len(labels)) if len(ref_labels) else None
            inputs.append(torch.randn(len(ref_labels), width, dtype=torch.float64))
        loss, gradients = with_gradients(
            lambda emb, ref_emb=None, options=options: plain_loss(
                call, emb, torch.tensor(labels, dtype=torch.int64), ref_emb=ref_emb, **options
            ),
            *inputs,
        )
        assert loss.shape == ((len(labels),) if reduction == "none" else ())
        assert not loss.any()
        assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_rows_without_dimensions_are_all_at_distance_zero(objective):
    # Of four rows each anchor has one positive and two negatives, all at distance 0, S = 1.
    emb, labels = torch.ones(4, 0, dtype=torch.float64), torch.tensor([0, 1, 0, 1])
    distance = "cosine" if OBJECTIVE[objective].cosine else "euclidean"
    for call, expected in judge_of(objective).of_equal_rows(distance, 1, 2):
        seed = {"seed": 7} if "seed" in call.options else {}
        assert same(plain_loss(call, emb, labels, **seed), expected)


@every_call_by_distance
def test_no_slope_between_duplicates(call):
    emb, labels = torch.ones(6, 3, dtype=torch.float64), torch.arange(6) % 2
    loss, (gradient,) = with_gradients(lambda emb: plain_loss(call, emb, labels), emb)
    assert loss.isfinite()
    assert not gradient.any()


@pytest.mark.parametrize("call", params("cosine"), indirect=True)
def test_zero_rows_by_cosine(call):
    emb, labels = random_rows(8, 3, 2)
    emb[2] = 0
    loss, (gradient,) = with_gradients(lambda emb: plain_loss(call, emb, labels), emb)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert not gradient[2].any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("reduction", REDUCTION)
@every_call
def test_a_value_that_is_not_finite_is_never_mined_around(call, reduction, value):
    emb, labels = random_rows(8, 3, 2)
    bad = emb.clone()
    bad[1, 1] = value
    loss, (gradient,) = with_gradients(lambda emb: plain_loss(call, emb, labels, reduction=reduction), bad)
    assert loss.isnan().all()
    assert gradient.isnan().all()
    # In one of the two sets alone, with an ignored anchor and an ignored candidate: the whole gradient again.
    row = torch.arange(8)
    options = {"reduction": reduction, "ref_labels": labels.where(row != 3, 5), "ignore_label": 5}
    for first, second in ((emb, bad), (bad, emb)):
        loss, gradients = with_gradients(
            lambda emb, ref_emb: plain_loss(
                call, emb, labels.where(row != 2, 5), ref_emb=ref_emb, **options
            ),
            first, second,
        )  # fmt: skip
        assert loss.isnan().all()
        assert all(gradient.isnan().all() for gradient in gradients)
    # No anchor, no loss to poison.
    loss, (_, by_ref) = with_gradients(
        lambda emb, ref_emb: plain_loss(call, emb, labels[:0], ref_emb=ref_emb, **options), emb[:0], bad
    )
    assert not loss.any()
    assert not by_ref.any()


@pytest.mark.parametrize("reduction", REDUCTION)
@every_call
def test_ignored_rows_are_nobody_and_poison_nothing(call, reduction):
    if call.draws:  # by position
        call = call.but(positive="easy", negative="hard")
    emb, labels = random_rows(11, 3, 3)
    rows = torch.tensor([0, 1, 2, 4, 5, 6, 7, 8, 10])
    expected, (slope,) = with_gradients(
        lambda emb: plain_loss(call, emb, labels[rows], reduction=reduction), emb[rows]
    )
    emb[3], emb[9] = math.nan, math.inf
    labels[[3, 9]] = -5
    loss, (gradient,) = with_gradients(
        lambda emb: plain_loss(call, emb, labels, ignore_label=-5, reduction=reduction), emb
    )
    if reduction == "none":
        assert not loss[[3, 9]].any()
        loss = loss[rows]
    assert same(loss, expected)
    assert same(gradient[rows], slope)
    assert not gradient[[3, 9]].any()


@every_call
def test_candidates_that_are_the_anchors(call):
    # The same rows as another set, each anchor naming itself; the two gradients add up to the one.
    emb, labels = random_rows(9, 3, 3)
    expected, (slope,) = with_gradients(lambda emb: plain_loss(call, emb, labels), emb)
    loss, (by_emb, by_ref) = with_gradients(
        lambda emb, ref_emb: plain_loss(
            call, emb, labels, ref_emb=ref_emb, ref_labels=labels, self_index=torch.arange(9)
        ),
        emb, emb,
    )  # fmt: skip
    assert same(loss, expected)
    assert same(by_emb + by_ref, slope)
    assert by_emb.any()
    assert by_ref.any()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float64])
@every_call
def test_types(call, dtype, reduction):
    emb, labels = random_rows(10, 3, 3)
    emb = emb.to(dtype)

    def loss_of(emb: Tensor) -> Tensor:
        return plain_loss(call, emb, labels, reduction=reduction)

    exact, (exact_slope,) = with_gradients(loss_of, emb.double())
    loss, (slope,) = with_gradients(loss_of, emb)
    assert loss.dtype == torch.float32
    assert slope.dtype == dtype
    assert same(loss, exact, 1e-5)
    assert same(slope.double(), exact_slope, 1e-4 if dtype == torch.float32 else 0.05)


@every_call
def test_the_parts_add_up_to_the_sum(call):
    emb, labels = random_rows(10, 3, 3)
    each = plain_loss(call, emb, labels, reduction="none")
    assert each.shape == (10,)
    assert same(each.sum(), plain_loss(call, emb, labels, reduction="sum"))


@pytest.mark.parametrize(
    "limits", [{}, {"cutoff": 0.9}, {"nonzero_loss_cutoff": 0.6}, {"nonzero_loss_cutoff": None}]
)
def test_a_draw_by_distance_feeds_the_losses(limits):
    # The limits reach every function that mines by them.
    emb, labels = random_rows(30, 3, 3)
    beta = torch.ones(30, dtype=torch.float64)
    options = {"positive": "easy", "negative": "distance", "seed": 3, "reduction": "none"}
    p, n, d_ap, d_an = reference.mine(emb, labels, positive="easy", negative="distance", seed=3, **limits)
    assert (p >= 0).all()
    assert (n >= 0).all()
    loss = reference.triplet_loss(emb, labels, **options, **limits)
    assert same(loss, (d_ap - d_an + 0.2).relu())
    loss = reference.contrastive_loss(emb, labels, **options, **limits)
    assert same(loss, d_ap + (1 - d_an).relu())
    loss = reference.beta_margin_loss(emb, labels, beta, **options, **limits)
    assert same(loss, (d_ap - 0.8).relu() + (1.2 - d_an).relu())
