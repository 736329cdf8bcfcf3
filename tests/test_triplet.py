"""The public functions against the float64 oracle: every combination of words, and every kind of batch."""

from __future__ import annotations

import gzip
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import product

import hypothesis
import pytest
import torch
from helpers import (
    ALONE,
    DISTANCES,
    DTYPES,
    KINDS,
    LAYOUTS,
    LOSSES,
    NEGATIVES,
    POSITIVES,
    REDUCTIONS,
    RULES,
    Batch,
    Objective,
    T,
    Truth,
    bits,
    check,
    check_drawn,
    check_poisoned,
    labels_of,
    laid_out,
    lattice_batch,
    mined,
    objectives_of,
    oracle_picks,
    random_batch,
    rows_of_kind,
    run_loss,
)
from hypothesis import strategies as st
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.reducers import MeanReducer
from scipy.stats import chisquare
from torch import Tensor

from tripletops.backends import FORCED

# What is enough where a test is about the batch, not about the words: all scans there are, each distance.
SCANS = (("hard", "hard"), ("easy", "semihard"), ("hard", "easy"), ("random", "semihard"))


@cache
def everyday_truths(distance: str) -> list[Truth]:
    """Sizes below, at and above the edges of tiles; two types; the rows themselves and other candidates."""
    batches = [
        random_batch(2, 1, classes=2),
        random_batch(7, 3, classes=2, seed=1),
        random_batch(17, 16, classes=3, seed=2),
        random_batch(33, 5, classes=11, seed=3),
        random_batch(65, 31, classes=5, seed=4),
        random_batch(97, 7, classes=2, seed=5),
        random_batch(29, 13, classes=4, dtype=torch.float64, seed=6),
        random_batch(5, 8, 40, seed=7),
        random_batch(33, 4, 18, with_self=False, seed=8),
        random_batch(1, 33, 70, classes=2, dtype=torch.float64, seed=9),
    ]
    ignoring = random_batch(47, 6, 53, classes=6, seed=10)
    ignoring.emb[ignoring.labels == 2] = math.nan
    assert ignoring.ref_emb is not None
    ignoring.ref_emb[ignoring.ref_labels == 2] = math.inf
    batches.append(replace(ignoring, ignore_label=2))
    return [Truth(batch, distance) for batch in batches]


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize(("positive", "negative"), RULES)
def test_every_combination_of_words(positive, negative, distance):
    for i, truth in enumerate(everyday_truths(distance)):
        margin, temperature = (0.2, 1.5, 0.0)[i % 3], (1.0, 0.1)[i % 2]
        check(truth, positive, negative, *objectives_of(distance, margin, temperature))


# Around the edges of tiles: 6 or 14 rows; 8, 16 or 32 columns of floats, 4, 8 or 16 of doubles.
EDGES = (*range(1, 10), 11, 13, 14, 15, 16, 17, 23, 29, 31, 32, 33, 47, 48, 49, 63, 64, 65, 83, 84, 85, 97)
LARGE = (127, 128, 129, 191, 193, 223, 224, 225, 256, 257, 331, 577, 1153)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
def test_sizes_around_tile_edges(distance, dtype):
    for count, width in product(EDGES, (1, 3, 8, 17)):
        truth = Truth(random_batch(count, width, classes=max(2, count // 4), dtype=dtype), distance)
        positive, negative = SCANS[(count + width) % len(SCANS)]
        check(truth, "hard", "hard", Objective(distance))
        check(truth, positive, negative)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_candidate_sets_around_tile_edges(dtype):
    sizes = (1, 5, 6, 7, 14, 15, 31, 33, 64)
    for count, candidates in product(sizes, (*sizes, 16, 32, 65, 97)):
        batch = random_batch(count, 1 + (count + candidates) % 9, candidates, classes=3, dtype=dtype)
        positive, negative = SCANS[(count + candidates) % len(SCANS)]
        check(Truth(batch, "euclidean"), positive, negative, Objective("euclidean", reduction="sum"))


@pytest.mark.parametrize("count", LARGE)
def test_larger_sizes(count):
    for width, distance, candidates in ((2, "cosine", None), (7, "euclidean", None), (11, "euclidean", 67)):
        batch = random_batch(count, width, candidates, classes=count // 5)
        if candidates:  # few anchors, many candidates
            batch = random_batch(candidates, width, count, classes=count // 50 + 2)
        truth = Truth(batch, distance)
        for positive, negative in SCANS:
            check(truth, positive, negative, Objective(distance))


@pytest.mark.parametrize("width", [1, 2, 7, 8, 9, 31, 64, 101, 127, 128, 129, 255, 256, 257, 383])
def test_widths(width):
    for dtype, distance in product([torch.float32, torch.float64], DISTANCES):
        truth = Truth(random_batch(37, width, classes=6, dtype=dtype), distance)
        check(truth, "hard", "hard", Objective(distance))
        check(truth, "easy", "semihard", Objective(distance, "soft_margin", "none"))


# Ties


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize(("positive", "negative"), RULES)
def test_ties_on_a_lattice_go_to_the_first(positive, negative, distance):
    """Every sum on the way is exact, so the picks must be the oracle's, one by one."""
    shapes = [(2, 1, None), (13, 2, None), (32, 4, None), (61, 3, None), (100, 16, None), (171, 4, None),
              (9, 4, 50), (40, 17, 33), (65, 1, 7)]  # fmt: skip
    for (count, width, candidates), dtype in product(shapes, DTYPES):
        batch = lattice_batch(count, width, candidates, cosine=distance == "cosine").to(dtype)
        truth = Truth(batch, distance)
        triplets = check(truth, positive, negative, Objective(distance))
        p, n = oracle_picks(truth, positive, negative)
        assert torch.equal(triplets.positive, p)
        assert torch.equal(triplets.negative, n)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distance", DISTANCES)
def test_duplicates_tie_wherever_they_lie(distance, dtype):
    """Few different rows, none of them round, all over the tiles: `check` wants the first of equals."""
    generator = torch.Generator().manual_seed(0)
    for count, different, candidates in ((200, 5, None), (131, 40, None), (70, 6, 150)):
        rows = torch.randn(different, 19, generator=generator) + 3
        emb = rows[torch.randint(different, (count,), generator=generator)].to(dtype)
        batch = Batch(emb, labels_of(count, 4, generator))
        if candidates:
            ref_emb = rows[torch.randint(different, (candidates,), generator=generator)].to(dtype)
            batch = replace(batch, ref_emb=ref_emb, ref_labels=labels_of(candidates, 4, generator))
        truth = Truth(batch, distance)
        for positive, negative in SCANS:
            check(truth, positive, negative, Objective(distance))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distance", DISTANCES)
def test_all_rows_equal(distance, dtype):
    generator = torch.Generator().manual_seed(1)
    emb = torch.randn(1, 23, generator=generator).to(dtype).repeat(150, 1)
    labels = labels_of(150, 7, generator)
    batch = Batch(emb, labels)
    others = ~torch.eye(150, dtype=torch.bool)
    first_positive = (
        ((labels[:, None] == labels) & others).int().argmax(1)
    )  # with a 1 in each row, the first 1's
    first_negative = (labels[:, None] != labels).int().argmax(1)
    for positive, negative in product(["hard", "easy"], ["hard", "easy"]):
        triplets = mined(batch, positive, negative, distance)
        assert torch.equal(triplets.positive, first_positive)
        assert torch.equal(triplets.negative, first_negative)
        assert not triplets.d_ap.any()
        assert not triplets.d_an.any()
        loss, (gradient,), _ = run_loss(batch, positive, negative, Objective(distance, margin=0.25))
        assert loss == 0.25
        assert not gradient.any()
    assert (mined(batch, "hard", "semihard", distance).negative == -1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_rows_by_cosine(dtype):
    """S = 0 with everything, so everything ties; and no slope, on neither side."""
    batch = random_batch(90, 11, classes=5).to(dtype)
    batch.emb[::7] = 0
    batch.emb[3:6] = -0.0
    truth = Truth(batch, "cosine")
    for positive, negative in RULES:
        check(truth, positive, negative, *objectives_of("cosine"))
    zero = (batch.emb == 0).all(1)
    triplets = mined(batch, "hard", "hard", "cosine")
    assert (triplets.d_ap[zero] == 1).all()
    assert (triplets.d_an[zero] == 1).all()
    assert (mined(batch, "easy", "semihard", "cosine").negative[zero] == -1).all()
    for objective in objectives_of("cosine"):
        assert not run_loss(batch, "hard", "hard", objective)[1][0][zero].any()
    nothing_else = Truth(Batch(torch.zeros(20, 4, dtype=dtype), torch.arange(20) % 3), "cosine")
    for positive, negative in RULES:
        check(nothing_else, positive, negative, *objectives_of("cosine"))


def test_the_kink_has_no_slope():
    """On a lattice d_ap − d_an + margin can be exactly 0."""
    emb, labels = torch.tensor([[0.0, 0], [3, 4], [-6, 8], [20, 0]]), torch.tensor([0, 0, 1, 2])
    # Anchor 0: 5 − 10 + 5; anchor 1: 5 − √(81+16) + 5 > 0
    losses, (gradient,), _ = run_loss(
        Batch(emb, labels), "hard", "hard", Objective(reduction="none", margin=5.0)
    )
    assert losses[0] == 0
    assert losses[1] > 0
    assert gradient.any()
    only_first = T.batch_hard_loss(emb.requires_grad_(), labels, margin=5.0, reduction="none")[0]
    only_first.backward()
    assert emb.grad is not None
    assert not emb.grad.any()


# Labels


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
def test_classes_of_very_different_size(distance):
    generator = torch.Generator().manual_seed(2)
    sizes = (1, 2, 131, 5, 1, 17, 40)
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    shuffled = labels[torch.randperm(len(labels), generator=generator)]
    emb = torch.randn(len(labels), 9, generator=generator)
    for some in (labels, labels.flip(0), shuffled):
        truth = Truth(Batch(emb, some), distance)
        for positive, negative in RULES:
            check(truth, positive, negative, Objective(distance))
        against = Batch(emb[:50], shuffled[:50], emb.roll(1, 0) * 1.5, some)
        for positive, negative in SCANS:
            check(Truth(against, distance), positive, negative, Objective(distance))


def test_the_order_of_rows_changes_nothing_but_the_order():
    batch = random_batch(101, 12, classes=13)
    order = torch.randperm(101, generator=torch.Generator().manual_seed(3))
    losses, _, _ = run_loss(batch, "easy", "semihard", Objective(reduction="none"))
    again, _, _ = run_loss(
        Batch(batch.emb[order], batch.labels[order]), "easy", "semihard", Objective(reduction="none")
    )
    torch.testing.assert_close(again, losses[order], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.uint16,
        torch.int32,
        torch.uint32,
        torch.int64,
        torch.uint64,
    ],
)
def test_labels_of_any_integer_type(dtype):
    batch = random_batch(40, 5, 30, classes=5)
    expected = bits(*mined(batch, "easy", "semihard", "euclidean"))
    limits = torch.iinfo(dtype)
    values = [limits.min, limits.max, 2, 1, limits.max // 2]
    table = torch.tensor(values, dtype=dtype)
    assert batch.ref_labels is not None
    assert batch.self_index is not None
    labels, ref_labels = table[batch.labels], table[batch.ref_labels]
    given = replace(batch, labels=labels, ref_labels=ref_labels)
    assert bits(*mined(given, "easy", "semihard", "euclidean")) == expected
    for which, value in enumerate(values):
        some = replace(given, ignore_label=value)
        like = replace(batch, ignore_label=which)
        assert bits(*mined(some, "hard", "hard", "cosine")) == bits(*mined(like, "hard", "hard", "cosine"))
    short = replace(batch, self_index=batch.self_index.to(torch.int32))
    assert bits(*mined(short, "easy", "semihard", "euclidean")) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALONE)
def test_nothing_to_compare_is_the_differentiable_zero(name, dtype):
    batch = ALONE[name].to(dtype)
    for distance, (positive, negative) in product(DISTANCES, RULES):
        for objective in objectives_of(distance):
            loss, gradients, _ = run_loss(batch, positive, negative, objective)
            assert loss.shape == ((len(batch.emb),) if objective.reduction == "none" else ())
            assert not loss.any()
            assert not any(gradient.any() for gradient in gradients)
        assert not mined(batch, positive, negative, distance).valid.any()


@pytest.mark.parametrize("candidates", [None, 9])
@pytest.mark.parametrize("distance", DISTANCES)
def test_rows_without_dimensions_are_at_distance_zero(distance, candidates):
    batch = random_batch(14, 0, candidates, classes=3)
    for (positive, negative), dtype in product(RULES, DTYPES):
        check(Truth(batch.to(dtype), distance), positive, negative, *objectives_of(distance))
    triplets = mined(batch, "hard", "hard", distance)
    assert triplets.valid.all()
    assert not triplets.d_ap.any()


# Layouts and types


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_change_nothing(layout, dtype):
    for candidates in (None, 45):
        batch = random_batch(38, 13, candidates, classes=5, dtype=dtype)
        ref_emb = None if batch.ref_emb is None else laid_out(batch.ref_emb, layout)
        other = replace(batch, emb=laid_out(batch.emb, layout), ref_emb=ref_emb)
        assert torch.equal(other.emb, batch.emb)
        for distance in DISTANCES:
            objective = Objective(distance, reduction="none")
            assert bits(*mined(other, "easy", "semihard", distance)) == bits(
                *mined(batch, "easy", "semihard", distance)
            )
            loss, gradients, _ = run_loss(other, "hard", "hard", objective)
            expected, expected_gradients, _ = run_loss(batch, "hard", "hard", objective)
            assert bits(loss, *gradients) == bits(expected, *expected_gradients)


@pytest.mark.parametrize("dtype", DTYPES)
def test_expanded_rows_and_strided_labels(dtype):
    generator = torch.Generator().manual_seed(4)
    column = torch.randn(30, 1, generator=generator).to(dtype).expand(30, 6)
    row = torch.randn(1, 6, generator=generator).to(dtype).expand(30, 6)
    labels = labels_of(60, 4, generator)[::2]
    one_label = torch.tensor([3]).expand(30)
    for emb, ref_emb in ((column, None), (row, None), (column, row), (row, column)):
        ref_labels = None if ref_emb is None else labels.flip(0)
        for distance in DISTANCES:
            check(
                Truth(Batch(emb, labels, ref_emb, ref_labels), distance), "hard", "hard", Objective(distance)
            )
    check(Truth(Batch(column, one_label, column, labels), "euclidean"), "easy", "easy", Objective())
    # A sum's gradient comes expanded, too.
    emb = column.clone().requires_grad_()
    T.triplet_loss(emb, labels, reduction="none").sum().backward()
    assert emb.grad is not None
    expected = run_loss(Batch(column, labels), "hard", "hard", Objective(reduction="sum"))[1][0] / 1.5
    torch.testing.assert_close(emb.grad, expected, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type(dtype):
    for candidates in (None, 77):
        batch = random_batch(59, 21, candidates, classes=7, dtype=dtype)
        for distance in DISTANCES:
            truth = Truth(batch, distance)
            for positive, negative in RULES:
                check(
                    truth, positive, negative, Objective(distance), Objective(distance, "soft_margin", "none")
                )


@pytest.mark.parametrize(
    ("dtype", "ref_dtype"), [pair for pair in product(DTYPES, DTYPES) if pair[0] != pair[1]]
)
def test_candidates_of_another_type(dtype, ref_dtype):
    batch = random_batch(24, 10, 31)
    assert batch.ref_emb is not None
    batch = replace(batch, emb=batch.emb.to(dtype), ref_emb=batch.ref_emb.to(ref_dtype))
    for distance in DISTANCES:
        check(Truth(batch, distance), "hard", "semihard", Objective(distance))


def test_gradients_of_one_side_alone():
    batch = random_batch(20, 6, 30)
    both = run_loss(batch, "hard", "hard", Objective())[1]
    assert batch.ref_emb is not None
    for side in (0, 1):
        emb, ref_emb = batch.emb.detach(), batch.ref_emb.detach()
        wanted = (emb, ref_emb)[side].requires_grad_()
        loss = T.triplet_loss(emb, batch.labels, **{**batch.options(), "ref_emb": ref_emb})
        (gradient,) = torch.autograd.grad(loss, wanted, torch.tensor(1.5))
        assert torch.equal(gradient, both[side])
        emb.requires_grad_(False), ref_emb.requires_grad_(False)
    assert not T.triplet_loss(batch.emb, batch.labels, **batch.options()).requires_grad
    assert not mined(
        replace(batch, emb=batch.emb.requires_grad_()), "hard", "hard", "cosine"
    ).d_ap.requires_grad
    # The same tensor on both sides receives the sum of both.
    emb = batch.emb.detach().clone().requires_grad_()
    T.batch_hard_loss(
        emb, batch.labels, ref_emb=emb, ref_labels=batch.labels, self_index=torch.arange(20)
    ).backward()
    expected = run_loss(Batch(batch.emb.detach(), batch.labels), "hard", "hard", Objective())[1][0] / 1.5
    torch.testing.assert_close(emb.grad, expected)


# Scales


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("scale", [1e18, 1e-18])
def test_huge_and_tiny_rows(scale, distance):
    for candidates in (None, 50):
        batch = random_batch(60, 24, candidates, classes=6)
        ref_emb = None if batch.ref_emb is None else batch.ref_emb * scale
        truth = Truth(replace(batch, emb=batch.emb * scale, ref_emb=ref_emb), distance)
        margin = 0.3 if distance == "cosine" else 0.3 * scale if distance == "euclidean" else 0.3 * scale**2
        objectives = objectives_of(distance, margin)
        if distance == "sqeuclidean":  # whose sum would leave the type
            objectives = [objective for objective in objectives if objective.reduction == "none"]
        for positive, negative in RULES:
            check(truth, positive, negative, *objectives)


@pytest.mark.parametrize("scale", [1e30, 1e-30, 3e37])
def test_rows_whose_squares_leave_the_type(scale):
    """float32 holds the rows and their distances, but not the squares on the way."""
    batch = random_batch(60, 24, classes=6)
    scaled = replace(batch, emb=batch.emb * scale)
    for positive, negative in RULES:
        check(Truth(scaled, "cosine"), positive, negative, *objectives_of("cosine"))
    if FORCED == "reference":
        pytest.skip("plain torch squares in the type it is given")
    if scale == 3e37:  # distances up to 3e38·√D leave the type themselves
        scaled = replace(batch, emb=batch.emb[:, :3] * scale)
    for positive, negative in RULES:
        check(Truth(scaled, "euclidean"), positive, negative, Objective("euclidean", margin=0.3 * scale))


def test_rows_of_very_different_length():
    generator = torch.Generator().manual_seed(5)
    batch = random_batch(80, 16, classes=5)
    lengths = 10.0 ** torch.randint(-15, 16, (80, 1), generator=generator)
    for positive, negative in RULES:
        check(
            Truth(replace(batch, emb=batch.emb * lengths), "cosine"),
            positive,
            negative,
            *objectives_of("cosine"),
        )
        check(Truth(replace(batch, emb=batch.emb * lengths), "euclidean"), positive, negative, Objective())


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_common_offset(distance, dtype):
    if FORCED == "reference" and (distance, dtype) == ("cosine", torch.float32):
        pytest.skip("plain torch rounds unit rows before it can tell them apart")
    for candidates in (None, 70):
        batch = random_batch(90, 30, candidates, classes=9, dtype=torch.float64)
        ref_emb = None if batch.ref_emb is None else batch.ref_emb + 1e4
        truth = Truth(replace(batch, emb=batch.emb + 1e4, ref_emb=ref_emb).to(dtype), distance)
        for positive, negative in RULES:
            check(truth, positive, negative, *objectives_of(distance))


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("spread", [1e-2, 1e-4, 1e-6])
def test_rows_nearer_to_each_other_than_a_product_can_tell(distance, spread):
    """Where the scan sees nothing but rounding, reported distances must still be right, and in order."""
    if FORCED == "reference" and distance == "cosine":
        pytest.skip("plain torch rounds unit rows before it can tell them apart")
    generator = torch.Generator().manual_seed(6)
    centres = torch.randn(9, 20, generator=generator)
    emb = centres.repeat(13, 1) + spread * torch.randn(117, 20, generator=generator)
    truth = Truth(Batch(emb, labels_of(117, 4, generator)), distance)
    for positive, negative in RULES:
        check(truth, positive, negative, *objectives_of(distance))


# Values that are not finite


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_poison_everything(value, dtype):
    for candidates, side, row in ((None, 0, 0), (None, 0, 39), (33, 0, 20), (33, 1, 32)):
        batch = random_batch(40, 9, candidates, classes=5, dtype=dtype)
        target = batch.emb if side == 0 else batch.ref_emb
        assert target is not None
        target[row, 4] = value
        for distance in DISTANCES:
            for positive, negative in RULES:
                check_poisoned(batch, positive, negative, Objective(distance))
            for objective in objectives_of(distance):
                check_poisoned(batch, "easy", "semihard", objective)
        # A class that is ignored stays out of it, and so does its row.
        labels = batch.labels if side == 0 else batch.ref_labels
        assert labels is not None
        other = (int(labels[row]) + 1) % 5
        check_poisoned(replace(batch, ignore_label=other), "hard", "hard", Objective(reduction="none"))
        spared = replace(batch, ignore_label=int(labels[row]))
        for distance in DISTANCES:
            check(Truth(spared, distance), "hard", "hard", *objectives_of(distance))


def test_poison_where_there_is_nothing_to_compare():
    for emb in (torch.tensor([[math.nan]]), torch.tensor([[1.0], [math.inf]])):
        check_poisoned(Batch(emb, torch.zeros(len(emb), dtype=torch.int64)), "hard", "hard", Objective())
        check_poisoned(Batch(emb, torch.arange(len(emb))), "random", "random", Objective())
        nobody = torch.ones(0, dtype=torch.int64)
        check_poisoned(
            Batch(emb, torch.arange(len(emb)), torch.ones(0, 1), nobody), "easy", "easy", Objective()
        )
        # Without anchors there is no loss to poison.
        loss, gradients, _ = run_loss(
            Batch(torch.ones(0, 1), nobody, emb, torch.arange(len(emb))), "hard", "hard", Objective()
        )
        assert loss == 0
        assert not gradients[1].any()


# Gradients


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize(("positive", "negative"), RULES)
def test_gradcheck(positive, negative, distance):
    for candidates, reduction in ((None, "none"), (7, "mean")):
        batch = random_batch(6, 3, candidates, classes=2, dtype=torch.float64, seed=11)
        inputs = [batch.emb.requires_grad_()]
        if batch.ref_emb is not None:
            inputs.append(batch.ref_emb.requires_grad_())
        for loss in LOSSES[distance]:
            options = {**batch.options(), **Objective(distance, loss, reduction, 0.7, 0.5).options()}

            def call(emb: Tensor, ref_emb: Tensor | None = None, options=options, batch=batch) -> Tensor:
                return T.triplet_loss(
                    emb, batch.labels, positive=positive, negative=negative, **{**options, "ref_emb": ref_emb}
                )

            assert torch.autograd.gradcheck(call, inputs)


# For other libraries


@pytest.mark.parametrize("candidates", [False, True])
def test_triplets_for_the_losses_of_others(candidates):
    """That of pytorch-metric-learning gives the same value; it would take -1 for the last row."""
    batch = random_batch(23, 6, 19 if candidates else None, classes=5, with_self=False)
    batch.labels[7] = 99  # an anchor without a positive
    emb = batch.emb.requires_grad_()
    ref = {"ref_emb": batch.ref_emb, "ref_labels": batch.ref_labels} if candidates else {}
    rules = {"positive": "easy", "negative": "semihard"}
    triplets = T.mine(emb, batch.labels, **rules, **ref)
    assert not triplets.valid[7]
    theirs = TripletMarginLoss(
        margin=0.5, distance=LpDistance(normalize_embeddings=False), reducer=MeanReducer()
    )
    given = theirs(emb, batch.labels, triplets.indices(), **ref)
    expected = T.triplet_loss(emb, batch.labels, **rules, **ref, margin=0.5)
    torch.testing.assert_close(given, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, emb)[0] for loss in (given, expected)))
    assert not torch.isclose(theirs(emb, batch.labels, triplets[:3], **ref), expected)


# Short names


def test_the_short_names_are_triplet_loss():
    batch = random_batch(50, 8, classes=6)
    emb, labels = batch.emb, batch.labels
    assert torch.equal(T.batch_hard_loss(emb, labels), T.triplet_loss(emb, labels))
    given = {
        "margin": 0.7,
        "distance": "cosine",
        "loss": "soft_margin",
        "reduction": "sum",
        "ignore_label": 3,
    }
    ref = {"ref_emb": emb.flip(0), "ref_labels": labels.flip(0), "self_index": torch.arange(50).flip(0)}
    assert torch.equal(
        T.batch_hard_loss(emb, labels, **given, **ref),
        T.triplet_loss(emb, labels, positive="hard", negative="hard", **given, **ref),
    )
    easy = T.triplet_loss(
        emb, labels, positive="easy", negative="hard", loss="second_order", distance="cosine"
    )
    assert torch.equal(T.easy_positive_loss(emb, labels), easy)
    for negative in NEGATIVES:
        assert torch.equal(
            T.easy_positive_loss(emb, labels, negative=negative, temperature=0.3, seed=5, **ref),
            T.triplet_loss(
                emb,
                labels,
                positive="easy",
                negative=negative,
                loss="second_order",
                temperature=0.3,
                seed=5,
                **ref,
            ),
        )
    for function, distance in ((T.batch_hard_loss, "euclidean"), (T.triplet_loss, "euclidean")):
        assert torch.equal(function(emb, labels), function(emb, labels, distance=distance))
    for loss in ("first_order", "second_order"):
        assert torch.equal(
            T.triplet_loss(emb, labels, loss=loss), T.triplet_loss(emb, labels, loss=loss, distance="cosine")
        )


def test_seeds():
    batch = random_batch(60, 4, classes=3)

    def draws(**options) -> tuple[list[int], list[int]]:
        triplets = T.mine(batch.emb, batch.labels, positive="random", negative="random", **options)
        return triplets.positive.tolist(), triplets.negative.tolist()

    assert draws(seed=3) == draws(seed=3) == draws(seed=torch.tensor(3)) == draws(seed=torch.tensor([3]))
    assert draws(seed=3) != draws(seed=4)
    assert draws(seed=-1) == draws(seed=torch.tensor(-1))
    assert draws(generator=torch.Generator().manual_seed(1)) == draws(
        generator=torch.Generator().manual_seed(1)
    )
    generator = torch.Generator().manual_seed(1)
    assert draws(generator=generator) != draws(generator=generator)
    torch.manual_seed(9)
    first, second = draws(), draws()
    torch.manual_seed(9)
    assert (draws(), draws()) == (first, second)
    assert first != second
    # Rules that draw nothing leave the generators alone.
    before, state = torch.get_rng_state(), generator.get_state()
    T.triplet_loss(batch.emb, batch.labels, positive="easy", negative="semihard", generator=generator)
    T.batch_hard_loss(batch.emb, batch.labels)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(generator.get_state(), state)


# Draws by distance


def drawn(batch: Batch, seed: int | None = None, **options) -> Tensor:
    given = batch.options() | ({} if seed is None else {"seed": seed})
    return T.mine(
        batch.emb, batch.labels, positive="random", negative="distance", **given, **options
    ).negative


@pytest.mark.parametrize("dtype", DTYPES)
def test_cutoffs_of_draws(dtype):
    for count, width, candidates in ((97, 1, None), (100, 3, None), (40, 16, 130), (130, 64, None)):
        batch = random_batch(count, width, candidates, classes=7, dtype=dtype)
        centre = batch.emb[::3].float().mean(0)
        batch.emb[::4] = (centre + 0.2 * batch.emb[::4].float()).to(dtype)  # some nearer than the cutoff
        truth = Truth(batch, "cosine")
        for cutoff, limit in product((0.5, 1e-3, 1.2, 5.0), (1.4, None, 0.9, 0.1)):
            check_drawn(truth, drawn(batch, cutoff=cutoff, nonzero_loss_cutoff=limit), cutoff, limit)


def test_draws_are_the_oracles():
    """float64 keys of the kernels and of the oracle differ in the last digits only: no draw does."""
    for count, width in ((40, 1), (97, 2), (193, 8), (150, 128)):
        batch = random_batch(count, width, classes=9, dtype=torch.float64)
        truth = Truth(batch, "cosine")
        assert torch.equal(drawn(batch), oracle_picks(truth, "random", "distance")[1])
        half = random_batch(count, width, classes=9).to(torch.float16)
        expected = oracle_picks(Truth(half, "cosine"), "random", "distance")[1]
        assert (drawn(half) != expected).sum() <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_do_not_depend_on_the_distance(dtype):
    for candidates in (None, 131):
        batch = random_batch(120, 17, candidates, classes=6, dtype=dtype)
        assert batch.emb.norm(dim=1).std() > 0.1
        euclidean, squared, cosine = (drawn(batch, distance=distance) for distance in DISTANCES)
        assert torch.equal(euclidean, squared)
        assert torch.equal(euclidean, cosine)


def test_without_weights_draws_are_uniform():
    for count, width, candidates in ((100, 8, None), (33, 40, 130)):
        batch = random_batch(count, width, candidates, classes=4)
        uniform = mined(batch, "random", "random", "euclidean").negative
        # From 2 on d reaches nothing; below the cutoff nothing is reached either.
        for cutoff, limit in ((0.5, 1e-3), (0.5, 0.5), (2.5, 2.0)):
            assert torch.equal(drawn(batch, cutoff=cutoff, nonzero_loss_cutoff=limit), uniform)
        assert not torch.equal(drawn(batch), uniform)
    # Orthogonal rows are at √2 from each other, beyond the limit of 1.4.
    batch = Batch(torch.eye(100), torch.arange(100) % 5)
    assert torch.equal(drawn(batch), mined(batch, "random", "random", "euclidean").negative)


def test_draws_in_many_dimensions():
    """Weights as far apart as e^(±300) neither overflow nor leave one candidate to all seeds or anchors."""
    generator = torch.Generator().manual_seed(12)
    for dtype in (torch.float16, torch.float32, torch.float64):
        centre = torch.randn(512, generator=generator)
        emb = (torch.randn(120, 512, generator=generator) + 0.7 * centre).to(dtype)
        batch = Batch(emb, labels_of(120, 6, generator))
        for limit in (1.4, None):
            negative = drawn(batch, nonzero_loss_cutoff=limit)
            check_drawn(Truth(batch, "cosine"), negative, limit=limit)
            assert len(negative.unique()) > 20
        # At one distance all weights are equal.
        batch = Batch(torch.eye(512)[:120].to(dtype) + 0.2, labels_of(120, 6, generator))
        assert len(torch.stack([drawn(batch, seed) for seed in range(40)])[:, 0].unique()) > 15


@pytest.mark.parametrize("width", [2, 3, 8, 32])
def test_draws_follow_the_weights(width):
    """One anchor, negatives at chosen distances: chi-square of 4000 draws against the exact weights."""
    distances = torch.tensor([0.2, 0.5, 0.8, 1.0, 1.1, 1.2, 1.3, 1.5], dtype=torch.float64)
    cosines = 1 - distances.square() / 2
    rows = torch.zeros(len(distances) + 1, width, dtype=torch.float64)
    rows[1:, 0], rows[1:, 1] = cosines, (1 - cosines.square()).sqrt()
    rows[0, 0] = 1.0
    draws = 4000
    emb = rows[:1].expand(draws, width).float()  # every anchor draws for itself
    batch = Batch(emb, torch.zeros(draws, dtype=torch.int64), rows.float() * 3, torch.arange(9).clamp(max=1))
    for cutoff, limit in ((0.5, 1.4), (0.9, None)):
        counts = drawn(batch, 3, cutoff=cutoff, nonzero_loss_cutoff=limit).bincount(minlength=9)[1:]
        d = distances.clamp(min=cutoff)
        log_weight = (2 - width) * d.log() - (width - 3) / 2 * (1 - d.square() / 4).log()
        if limit is not None:
            log_weight[d >= limit] = -math.inf
        expected = draws * log_weight.softmax(0)
        assert not counts[expected == 0].any()
        often = expected > 5
        observed = torch.cat([counts[often], counts[~often].sum()[None]]).double()
        wanted = torch.cat([expected[often], expected[~often].sum()[None]])
        observed, wanted = observed[wanted > 0], wanted[wanted > 0]
        assert chisquare(observed.numpy(), wanted.numpy()).pvalue > 1e-3


# Repetition, threads, forks


def everything(batch: Batch) -> list[bytes]:
    result = []
    for distance, (positive, negative) in product(DISTANCES, RULES):
        loss, gradients, _ = run_loss(batch, positive, negative, Objective(distance))
        result += bits(*mined(batch, positive, negative, distance), loss, *gradients)
    return result


@pytest.mark.skipif(FORCED == "reference", reason="plain torch splits its sums by the number of threads")
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_on_any_number_of_threads(dtype):
    """Large enough that two threads do take part, in the scan and in the gradient."""
    for batch in (
        random_batch(1031, 97, classes=60, dtype=dtype),
        random_batch(263, 150, 911, classes=40, dtype=dtype),
    ):
        torch.set_num_threads(1)
        expected = everything(batch)
        assert everything(batch) == expected
        for count in (2, 3):
            torch.set_num_threads(count)
            assert everything(batch) == expected


@pytest.mark.usefixtures("threads")
def test_several_python_threads_at_once():
    torch.set_num_threads(2)
    batches = [
        random_batch(n, d, classes=9, seed=n)
        for n, d in ((300, 64), (417, 33), (64, 128), (5, 3), (350, 65), (8, 8))
    ]
    expected = [everything(batch) for batch in batches]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(2):
            assert list(pool.map(everything, batches)) == expected


FORK = """
import os, sys, warnings
import torch
import tripletops as T

torch.set_num_threads(2)
emb = torch.randn(900, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
labels = torch.arange(900) % 50

def run():
    loss = T.triplet_loss(emb, labels, positive="easy", negative="semihard")
    (gradient,) = torch.autograd.grad(loss, emb)
    d_ap = T.mine(emb, labels, positive="hard", negative="hard").d_ap
    return loss.item(), gradient.numpy().tobytes(), d_ap.numpy().tobytes()

torch.mm(emb.detach(), emb.detach().T)  # wakes torch's own threads, which no child inherits
expected = run()
warnings.simplefilter("ignore")  # newer Pythons warn of forking with threads, which is the point here
child = os.fork()
if child == 0:
    try:
        os._exit(0 if run() == run() == expected else 3)
    finally:
        os._exit(4)
_, status = os.waitpid(child, 0)
assert run() == expected
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(
    FORCED == "reference", reason="plain torch hangs in a child whose parent has used threads"
)
def test_a_forked_child_runs_after_its_parent_used_threads():
    done = subprocess.run(
        [sys.executable, "-c", FORK], timeout=120, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"exit code {done.returncode}\\n{done.stderr}"


MEMORY = """
import sys
import torch
import tripletops as T

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024

def run(count):
    T.mine(torch.randn(count, 1), torch.arange(count) // 4, positive="hard", negative="hard")

torch.set_num_threads(2)
run(300)
before = peak()
run(int(sys.argv[1]))
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(FORCED is not None, reason="measures the CPU kernels")
def test_memory_grows_with_the_batch_not_with_its_square():
    """A list of the walk's tasks had 16 bytes for every 96 × 512 pairs: a quarter of all at 150,000 rows."""
    few, many = (
        int(
            subprocess.run(
                [sys.executable, "-c", MEMORY, str(rows)], stdout=subprocess.PIPE, check=True
            ).stdout
        )
        / rows
        for rows in (50_000, 150_000)
    )
    assert many < 1.15 * few


# Real rows


def test_handwritten_digits(shared_data):
    with gzip.open(shared_data / "mnist" / "t10k-images-idx3-ubyte.gz") as file:
        images = torch.frombuffer(bytearray(file.read(16 + 131 * 784)[16:]), dtype=torch.uint8)
    with gzip.open(shared_data / "mnist" / "t10k-labels-idx1-ubyte.gz") as file:
        labels = torch.frombuffer(bytearray(file.read(8 + 131)[8:]), dtype=torch.uint8)
    emb = images.view(131, 784).float() / 255
    for distance in DISTANCES:
        truth = Truth(Batch(emb, labels), distance)
        for positive, negative in SCANS:
            check(truth, positive, negative, Objective(distance))


# Everything at once


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    dtype = draw(st.sampled_from(DTYPES))
    width = draw(st.sampled_from([0, 1, 2, 3, 5, 8, 16, 17, 33]))
    classes = draw(st.integers(1, 7))
    kind = draw(st.sampled_from(KINDS))
    layout = draw(st.sampled_from(LAYOUTS))
    label_type = draw(st.sampled_from([torch.uint8, torch.int8, torch.int32, torch.int64]))
    ignore_label = draw(st.none() | st.integers(0, classes))

    def rows(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(classes, (count,), generator=generator)
        x = rows_of_kind(kind, count, width, dtype, generator)
        if ignore_label is not None:
            x[labels == ignore_label] = math.nan
        if count and width and draw(st.integers(0, 19)) == 0:
            x[draw(st.integers(0, count - 1))] = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
        return laid_out(x.to(dtype), layout), labels.to(label_type)

    emb, labels = rows(draw(st.integers(0, 40)))
    batch = Batch(emb, labels, ignore_label=ignore_label, seed=draw(st.integers(-(2**63), 2**63 - 1)))
    candidates = draw(st.none() | st.integers(0, 40))
    if candidates is None:
        return batch
    ref_emb, ref_labels = rows(candidates)
    self_index = None
    if draw(st.booleans()):
        self_index = torch.randint(-1, candidates, (len(emb),), generator=generator)
    return replace(batch, ref_emb=ref_emb, ref_labels=ref_labels, self_index=self_index)


@hypothesis.settings(max_examples=400)
@hypothesis.given(
    batch=batches(),
    positive=st.sampled_from(POSITIVES),
    negative=st.sampled_from(NEGATIVES),
    distance_and_loss=st.sampled_from(
        [(distance, loss) for distance in DISTANCES for loss in LOSSES[distance]]
    ),
    reduction=st.sampled_from(REDUCTIONS),
    margin=st.sampled_from([0.0, 0.2, 1.0, 30.0]),
    temperature=st.sampled_from([0.05, 0.5, 1.0, 4.0]),
)
def test_anything(batch, positive, negative, distance_and_loss, reduction, margin, temperature):
    distance, loss = distance_and_loss
    objective = Objective(distance, loss, reduction, margin, temperature)
    truth = Truth(batch, distance)
    if truth.x.isfinite().all() and truth.y.isfinite().all():
        check(truth, positive, negative, objective)
    else:
        check_poisoned(batch, positive, negative, objective)
