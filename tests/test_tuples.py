"""The objectives over many tuples against the float64 oracle: every word, and every kind of batch.

The kernels work in blocks of 96 rows, and search an anchor's positives where it has more than 8; sizes here
lie on both sides of that.
"""

from __future__ import annotations

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
    KERNELS,
    KINDS,
    LAYOUTS,
    NEGATIVES,
    POSITIVES,
    REDUCTIONS,
    Batch,
    ManyTuples,
    T,
    Truth,
    bits,
    check_tuples,
    labels_of,
    laid_out,
    lattice_batch,
    plain_tuples,
    random_batch,
    rows_of_kind,
    run_tuples,
)
from hypothesis import strategies as st
from torch import Tensor

from tripletops import reference

PAIR_RULES = [
    (positive, negative)
    for positive, negative in product(("all", *POSITIVES), ("all", *NEGATIVES))
    if (positive, negative) != ("all", "semihard")
]


pytestmark = pytest.mark.usefixtures("one_thread")


def calls_of(distance: str, unit: float = 1.0, classes: int = 0) -> dict[str, ManyTuples]:
    """Every objective, with margins that matter where distances are about `unit`; β by class if `classes`."""
    by = {"distance": distance}
    margin = {"margin": 0.2 * unit}
    beta = torch.tensor(0.9 * unit)
    if classes:
        beta = torch.linspace(0.83 * unit, 1.07 * unit, classes)
    between = {"pos_margin": 0.7 * unit, "neg_margin": 1.1 * unit}
    alpha = {"alpha": 0.2 * unit}
    calls = {
        "batch_all": ManyTuples("batch_all_loss", by | margin),
        "batch_all_soft": ManyTuples("batch_all_loss", by | {"loss": "soft_margin"}),
        "semi_hard": ManyTuples("semi_hard_loss", by | margin),
        "contrastive": ManyTuples("contrastive_loss", by | {"neg_margin": 1.1 * unit}),
        "contrastive_between": ManyTuples("contrastive_loss", by | between),
        "contrastive_picked": ManyTuples(
            "contrastive_loss", by | between | {"positive": "easy", "negative": "semihard"}
        ),
        "beta_margin": ManyTuples("beta_margin_loss", by | alpha, beta),
        "beta_margin_all": ManyTuples(
            "beta_margin_loss", by | alpha | {"positive": "all", "negative": "all"}, beta
        ),
    }
    if distance == "cosine":
        calls |= {
            "multi_similarity": ManyTuples("multi_similarity_loss"),
            "multi_similarity_all": ManyTuples("multi_similarity_loss", {"epsilon": None, "base": 0.5}),
            "multi_similarity_easy": ManyTuples("multi_similarity_loss", {"positive": "easy"}),
        }
    return calls


# What is enough where a test is about the batch, not about the words.
STREAMS = ("batch_all", "batch_all_soft", "semi_hard", "contrastive", "multi_similarity")
EVERY_CALL = [(name, distance) for distance in DISTANCES for name in calls_of(distance)]


def unit_of(truth: Truth) -> float:
    """A usual distance."""
    pairs = truth.distance[truth.positives | truth.negatives]
    return float(pairs.median()) if len(pairs) and pairs.median() > 0 else 1.0


def check_all(
    batch: Batch,
    distance: str,
    *reductions: str,
    names: tuple[str, ...] | None = None,
    unit: float | None = None,
    exact: bool = False,
) -> None:
    truth = Truth(batch, distance)
    for name, call in calls_of(distance, unit_of(truth) if unit is None else unit).items():
        if names is None or name in names:
            check_tuples(truth, call, *reductions, exact=exact)


@cache
def everyday_truths(distance: str) -> list[Truth]:
    batches = [
        random_batch(2, 1, classes=2),
        random_batch(7, 3, classes=2, seed=1),
        random_batch(33, 5, classes=11, seed=3),
        random_batch(65, 31, classes=3, seed=4),
        random_batch(97, 7, classes=6, seed=5),
        random_batch(29, 13, classes=4, dtype=torch.float64, seed=6),
        random_batch(40, 8, classes=4, dtype=torch.bfloat16, seed=6),
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


@pytest.mark.parametrize(("name", "distance"), EVERY_CALL)
def test_every_objective(name, distance):
    for truth in everyday_truths(distance):
        check_tuples(truth, calls_of(distance, unit_of(truth), classes=11)[name])


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize(("positive", "negative"), PAIR_RULES)
def test_every_rule_for_pairs(positive, negative, distance):
    for truth in everyday_truths(distance)[4::3]:
        calls = calls_of(distance, unit_of(truth), classes=6)
        for name in ("contrastive_between", "beta_margin_all"):
            check_tuples(truth, calls[name].but(positive=positive, negative=negative), "mean", "none")


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("size", [0.0, 0.03, 0.5, 4.0, 1000.0])
def test_margins(size, distance):
    """From 0 to so large that everything is active."""
    for truth in everyday_truths(distance)[1:8:2]:
        margin = size * unit_of(truth)
        for function in ("batch_all_loss", "semi_hard_loss"):
            check_tuples(
                truth, ManyTuples(function, {"distance": distance, "margin": margin}), "mean", "none"
            )
        pairs = {"distance": distance, "positive": "all", "negative": "all"}
        for low, high in ((0.0, margin), (margin, 0.0)):
            margins = {"pos_margin": low, "neg_margin": high}
            check_tuples(truth, ManyTuples("contrastive_loss", pairs | margins), "mean")
        for beta in (margin, -margin):
            check_tuples(truth, ManyTuples("beta_margin_loss", pairs | {"alpha": 0.1 * margin}, beta), "mean")
            check_tuples(truth, ManyTuples("beta_margin_loss", pairs | {"alpha": margin}, beta), "sum")


@pytest.mark.parametrize("positive", ["all", "easy"])
@pytest.mark.parametrize("epsilon", [0.1, None, 0.0, 1.0, 50.0])
def test_multi_similarity(epsilon, positive):
    """At base 0, e^(beta·S) is beyond float32 from beta = 100 on, and beyond float64 at 1000."""
    for alpha, beta, base in (
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
    ):
        call = ManyTuples(
            "multi_similarity_loss",
            {"alpha": alpha, "beta": beta, "base": base, "epsilon": epsilon, "positive": positive},
        )
        for truth in everyday_truths("cosine")[2::3]:
            check_tuples(truth, call, "mean", "none")


def test_multi_similarity_of_an_easy_positive_beside_a_far_one():
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


# Sizes


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
def test_sizes(distance):
    for count, width in product((1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 17, 33), (1, 3, 17)):
        dtype = (torch.float32, torch.float64)[(count + width) % 2]
        check_all(random_batch(count, width, classes=max(2, count // 4), dtype=dtype), distance, "mean")


@pytest.mark.parametrize("count", [95, 96, 97, 191, 192, 193, 289])
def test_sizes_around_blocks(count):
    for width, distance, dtype in (
        (3, "euclidean", torch.float32),
        (9, "cosine", torch.float32),
        (5, ("euclidean", "cosine")[count % 2], torch.float64),
    ):
        batch = random_batch(count, width, classes=count // 10, dtype=dtype)
        check_all(batch, distance, "none", names=STREAMS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_candidate_sets_around_blocks(dtype):
    sizes = (1, 95, 96, 97, 193)
    for count, candidates in product(sizes, sizes):
        distance = ("euclidean", "cosine")[(count + candidates) % 2]
        batch = random_batch(count, 1 + (count + candidates) % 9, candidates, classes=9, dtype=dtype)
        check_all(batch, distance, "mean", names=STREAMS)


@pytest.mark.parametrize("width", [2, 7, 8, 31, 33, 128, 257])
def test_widths(width):
    for dtype, distance in product([torch.float32, torch.float64], DISTANCES):
        check_all(random_batch(37, width, classes=6, dtype=dtype), distance, "mean")


@pytest.mark.parametrize("candidates", [None, 9])
@pytest.mark.parametrize("distance", DISTANCES)
def test_rows_without_dimensions_are_at_distance_zero(distance, candidates):
    for dtype in DTYPES:
        batch = random_batch(14, 0, candidates, classes=3, dtype=dtype)
        check_all(batch, distance, exact=True)
        loss, _, active = run_tuples(
            batch, ManyTuples("batch_all_loss", {"distance": distance, "margin": 0.25})
        )
        assert loss == 0.25
        assert active is not None
        assert active > 0


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
@pytest.mark.parametrize("size", [2, 7, 8, 9, 10, 11, 17, 48])
def test_positives_few_and_many(size, distance):
    """With candidates of their own an anchor has `size` positives, else one less."""
    check_all(random_batch(3 * size + 1, 6, classes=3), distance, "none")
    check_all(random_batch(7, 6, 3 * size, classes=3, with_self=False), distance, "none")


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
def test_classes_of_very_different_size(distance):
    generator = torch.Generator().manual_seed(2)
    sizes = (1, 2, 65, 5, 1, 17, 9, 40)
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    shuffled = labels[torch.randperm(len(labels), generator=generator)]
    emb = torch.randn(len(labels), 9, generator=generator)
    for some in (labels, labels.flip(0), shuffled):
        check_all(Batch(emb, some), distance, "mean")
    against = Batch(emb[:50], shuffled[:50], emb.roll(1, 0) * 1.5, labels)
    check_all(against, distance, "mean")


def test_a_class_with_half_of_all_rows():
    generator = torch.Generator().manual_seed(3)
    labels = torch.cat([torch.zeros(98, dtype=torch.int64), torch.arange(98) // 10 + 1])
    labels = labels[torch.randperm(196, generator=generator)]
    batch = Batch(torch.randn(196, 12, generator=generator), labels)
    for distance in DISTANCES:
        check_all(batch, distance, "mean")


# Labels, candidates and layouts


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.uint64])
def test_labels_of_any_integer_type(dtype):
    batch = random_batch(60, 5, 30, classes=5)
    limits = torch.iinfo(dtype)
    table = torch.tensor([limits.min, limits.max, 2, 1, limits.max // 2], dtype=dtype)
    assert batch.ref_labels is not None
    other = replace(batch, labels=table[batch.labels], ref_labels=table[batch.ref_labels])
    for call in calls_of("cosine").values():
        assert everything(other, call) == everything(batch, call)


def test_self_may_be_of_another_class():
    """`self_index` takes that row out, whatever it is: like candidates without it, anchor by anchor."""
    generator = torch.Generator().manual_seed(4)
    batch = random_batch(9, 4, 30, classes=3, dtype=torch.float64, with_self=False)
    assert batch.ref_emb is not None
    assert batch.ref_labels is not None
    place = torch.randint(30, (9,), generator=generator)
    assert (batch.labels != batch.ref_labels[place]).any()
    assert (batch.labels == batch.ref_labels[place]).any()
    for name, call in calls_of("cosine", 1.0).items():
        if name == "beta_margin":  # whose draws name candidates by their position
            continue
        losses, _, _ = run_tuples(replace(batch, self_index=place), call.but(reduction="none"))
        for anchor, left_out in enumerate(place.tolist()):
            rest = torch.arange(30) != left_out
            alone = Batch(
                batch.emb[anchor : anchor + 1],
                batch.labels[anchor : anchor + 1],
                batch.ref_emb[rest],
                batch.ref_labels[rest],
            )
            loss, _, _ = run_tuples(alone, call.but(reduction="sum"))
            torch.testing.assert_close(losses[anchor], loss, rtol=1e-12, atol=1e-12)
    for distance in DISTANCES:
        check_all(replace(batch, self_index=place), distance)
        check_all(replace(random_batch(100, 3, 130, classes=12), self_index=None), distance, "mean")


def test_candidates_that_are_the_anchors():
    batch = random_batch(130, 10, classes=9)
    against = replace(batch, ref_emb=batch.emb, ref_labels=batch.labels, self_index=torch.arange(130))
    for call in calls_of("cosine").values():
        loss, gradients, _ = run_tuples(batch, call)
        again, parts, _ = run_tuples(against, call)
        torch.testing.assert_close(again, loss)
        torch.testing.assert_close(parts[0] + parts[1], gradients[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_ignored_rows_change_nothing(value):
    for candidates in (None, 110):
        batch = random_batch(120, 7, candidates, classes=7)
        ignoring = replace(batch, ignore_label=3, emb=batch.emb.clone())
        ignoring.emb[batch.labels == 3] = value
        kept = batch.labels != 3
        without = Batch(batch.emb[kept], batch.labels[kept], seed=batch.seed)
        if batch.ref_emb is not None and batch.ref_labels is not None:
            ref_emb, ref_kept = batch.ref_emb.clone(), batch.ref_labels != 3
            ref_emb[~ref_kept] = value
            ignoring = replace(ignoring, ref_emb=ref_emb, self_index=None)
            without = replace(without, ref_emb=batch.ref_emb[ref_kept], ref_labels=batch.ref_labels[ref_kept])
        for distance in DISTANCES:
            for name, call in calls_of(distance, classes=7).items():
                loss, gradients, _ = run_tuples(ignoring, call)
                assert not gradients[0][~kept].any()
                if name != "beta_margin":  # draws name rows by their position
                    expected, expected_gradients, _ = run_tuples(without, call)
                    assert bits(loss, gradients[0][kept]) == bits(expected, expected_gradients[0])
            check_all(ignoring, distance, "mean", names=STREAMS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_change_nothing(layout, dtype):
    for candidates in (None, 45):
        batch = random_batch(100, 13, candidates, classes=5, dtype=dtype)
        ref_emb = None if batch.ref_emb is None else laid_out(batch.ref_emb, layout)
        other = replace(batch, emb=laid_out(batch.emb, layout), ref_emb=ref_emb)
        for call in calls_of("cosine").values():
            assert everything(other, call) == everything(batch, call)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type(dtype):
    for candidates, distance in product((None, 77), DISTANCES):
        check_all(random_batch(59, 21, candidates, classes=7, dtype=dtype), distance, "mean_nonzero", "none")


@pytest.mark.parametrize(
    ("dtype", "ref_dtype"), [(torch.float16, torch.float32), (torch.bfloat16, torch.float16),
                             (torch.float64, torch.float16), (torch.float32, torch.float64)]
)  # fmt: skip
def test_candidates_of_another_type(dtype, ref_dtype):
    batch = random_batch(24, 10, 31)
    assert batch.ref_emb is not None
    batch = replace(batch, emb=batch.emb.to(dtype), ref_emb=batch.ref_emb.to(ref_dtype))
    for distance in DISTANCES:
        check_all(batch, distance, "mean")


def test_gradients_of_one_side_alone():
    batch = random_batch(20, 6, 30)
    assert batch.ref_emb is not None
    for call in calls_of("cosine").values():
        both = run_tuples(batch, call)[1]
        for side in (0, 1):
            inputs = [batch.emb.detach().clone(), batch.ref_emb.detach().clone()]
            inputs[side].requires_grad_()
            arguments = {**call.arguments(batch), "ref_emb": inputs[1]}
            beta = [] if call.beta is None else [call.beta]
            loss = getattr(T, call.function)(inputs[0], batch.labels, *beta, **arguments)
            (gradient,) = torch.autograd.grad(loss, inputs[side], torch.tensor(1.5))
            assert torch.equal(gradient, both[side])


def test_active_triplets_are_counted():
    emb, labels = torch.tensor([[0.0], [1.0], [3.0], [2.5], [7.0]]), torch.tensor([8, 8, 8, -3, -3])
    for reduction in REDUCTIONS:
        loss, active = T.batch_all_loss(emb, labels, margin=1.0, reduction=reduction, return_active=True)
        assert active == 9  # by hand: test_reference_tuples.py
        assert active.dtype == torch.int64
        assert active.shape == ()
        assert torch.equal(loss, T.batch_all_loss(emb, labels, margin=1.0, reduction=reduction))
    _, active = T.batch_all_loss(emb, labels, loss="soft_margin", return_active=True)
    assert active == 18
    _, active = T.batch_all_loss(emb, torch.arange(5), return_active=True)
    assert active == 0


# Beta


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beta_dtype", DTYPES)
def test_beta_of_any_type(dtype, beta_dtype):
    for batch in (
        random_batch(50, 6, classes=5, dtype=dtype),
        random_batch(30, 6, 40, classes=5, dtype=dtype),
    ):
        truth = Truth(batch, "euclidean")
        for beta in (torch.tensor(3.3), torch.linspace(2.5, 3.5, 5)):
            call = ManyTuples("beta_margin_loss", {"alpha": 0.3}, beta.to(beta_dtype))
            check_tuples(truth, call, "mean", "none")
            check_tuples(truth, call.but(positive="all", negative="all"), "mean", "none")


def test_a_number_for_beta_is_like_a_tensor():
    batch = random_batch(60, 6, classes=5)
    call = ManyTuples("beta_margin_loss", {}, torch.tensor(1.2))
    by_class = replace(call, beta=torch.full((5,), 1.2))
    loss, gradients, _ = run_tuples(batch, call)
    for other in (replace(call, beta=1.2), by_class):
        again, parts, _ = run_tuples(batch, other)
        assert bits(again, parts[0]) == bits(loss, gradients[0])
    torch.testing.assert_close(run_tuples(batch, by_class)[1][1].sum(), gradients[1])


def test_beta_of_classes_that_are_not_there():
    batch = random_batch(40, 3, classes=3)
    call = ManyTuples("beta_margin_loss", {"positive": "all", "negative": "all"}, torch.full((9,), 2.0))
    _, (_, gradient), _ = run_tuples(batch, call)
    assert gradient[:3].all()
    assert not gradient[3:].any()
    # That of an ignored class stays out of it, too.
    assert call.beta is not None
    spoiled = torch.full((9,), 2.0)
    spoiled[1] = math.nan
    loss, gradients, _ = run_tuples(replace(batch, ignore_label=1), replace(call, beta=spoiled))
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)


# Ties and duplicates


@pytest.mark.parametrize("distance", DISTANCES)
def test_ties_on_a_lattice(distance):
    """Every sum on the way is exact, so that no negative may be mistaken for another."""
    shapes = [(2, 1, None), (13, 2, None), (32, 4, None), (61, 3, None), (100, 16, None), (197, 4, None),
              (9, 4, 50), (40, 17, 33), (65, 1, 7)]  # fmt: skip
    for i, (count, width, candidates) in enumerate(shapes):
        batch = lattice_batch(count, width, candidates, cosine=distance == "cosine", classes=3 + count // 20)
        for dtype in DTYPES if count < 50 else (DTYPES[i % 4],):
            check_all(batch.to(dtype), distance, "mean", "none", names=STREAMS, unit=1.0, exact=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_numbers_are_exact(dtype):
    """Sums of squared distances on a lattice, and of their slopes, are whole numbers: no digit may differ."""
    for count, width, candidates in ((61, 3, None), (150, 4, None), (40, 5, 33), (33, 2, 130)):
        batch = lattice_batch(count, width, candidates, classes=6).to(dtype)
        exact = batch.plain().to(torch.float64)
        for function, given in (
            ("batch_all_loss", {"margin": 2.0}),
            ("semi_hard_loss", {"margin": 2.0}),
            ("contrastive_loss", {"pos_margin": 3.0, "neg_margin": 9.0}),
            ("beta_margin_loss", {"alpha": 2.0, "positive": "all", "negative": "all"}),
        ):
            beta = torch.tensor(6.0) if function == "beta_margin_loss" else None
            call = ManyTuples(function, {"distance": "sqeuclidean", "reduction": "sum", **given}, beta)
            loss, gradients, active = run_tuples(batch, call)
            expected, right, expected_active = plain_tuples(exact, call, None, torch.float64, gram=False)
            assert loss == expected
            assert active == expected_active
            for gradient, whole in zip(gradients, right, strict=True):
                assert torch.equal(gradient, whole.to(gradient.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distance", DISTANCES)
def test_duplicates_wherever_they_lie(distance, dtype):
    generator = torch.Generator().manual_seed(0)
    for count, different, candidates in ((110, 5, None), (50, 6, 110)):
        rows = torch.randn(different, 19, generator=generator) + 3
        emb = rows[torch.randint(different, (count,), generator=generator)].to(dtype)
        batch = Batch(emb, labels_of(count, 8, generator))
        if candidates:
            ref_emb = rows[torch.randint(different, (candidates,), generator=generator)].to(dtype)
            batch = replace(batch, ref_emb=ref_emb, ref_labels=labels_of(candidates, 8, generator))
        check_all(batch, distance, "mean")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distance", DISTANCES)
def test_all_rows_equal(distance, dtype):
    generator = torch.Generator().manual_seed(1)
    emb = torch.randn(1, 23, generator=generator).to(dtype).repeat(150, 1)
    batch = Batch(emb, labels_of(150, 7, generator))
    expected = {"batch_all": 0.25, "batch_all_soft": math.log(2), "semi_hard": 0.25, "contrastive": 1.25}
    for name, value in expected.items():
        margin = {"neg_margin": 1.25} if name == "contrastive" else {"margin": 0.25}
        loss, (gradient,), _ = run_tuples(batch, calls_of(distance)[name].but(**margin))
        torch.testing.assert_close(loss.double(), torch.tensor(value, dtype=torch.float64), rtol=1e-7, atol=0)
        assert not gradient.any()
    for beta, value in ((1.0, 1.25), (-1.0, 1.25), (0.0, 0.25)):
        call = ManyTuples("beta_margin_loss", {"alpha": 0.25, "distance": distance}, beta)
        loss, (gradient,), _ = run_tuples(batch, call)
        assert loss == value
        assert not gradient.any()
    check_all(batch, distance, "mean")


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_rows_by_cosine(dtype):
    """S = 0 with everything; and no slope, on neither side."""
    batch = random_batch(110, 11, classes=9).to(dtype)
    batch.emb[::7] = 0
    batch.emb[3:6] = -0.0
    zero = (batch.emb == 0).all(1)
    check_all(batch, "cosine", "mean", "none")
    for call in calls_of("cosine").values():
        assert not run_tuples(batch, call)[1][0][zero].any()
    check_all(Batch(torch.zeros(20, 4, dtype=dtype), torch.arange(20) % 3), "cosine", exact=True)


def test_kinks_have_no_slope():
    """[0]₊ has derivative 0, and is not counted: distances 5 and 10, margins that make up the difference."""
    emb = torch.tensor([[0.0, 0], [3, 4], [-6, 8]])
    first = {"ref_emb": emb[1:], "ref_labels": torch.tensor([0, 1])}
    for call in (
        ManyTuples("batch_all_loss", {"margin": 5.0}),
        ManyTuples("semi_hard_loss", {"margin": 5.0}),
        ManyTuples("contrastive_loss", {"pos_margin": 5.0, "neg_margin": 10.0}),
        ManyTuples("contrastive_loss", {"pos_margin": 5.0, "neg_margin": 10.0, "negative": "hard"}),
        ManyTuples("beta_margin_loss", {"alpha": 2.5, "positive": "all", "negative": "all"}, 7.5),
        ManyTuples("beta_margin_loss", {"alpha": 2.5, "seed": 1}, 7.5),
    ):
        for reduction in REDUCTIONS:
            batch = Batch(emb[:1], torch.tensor([0]), **first)
            loss, gradients, active = run_tuples(batch, call.but(reduction=reduction))
            assert not loss.any()
            assert not any(gradient.any() for gradient in gradients)
            assert not active


# Scales


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("scale", [1e18, 1e-18])
def test_huge_and_tiny_rows(scale, distance):
    for candidates in (None, 50):
        batch = random_batch(60, 24, candidates, classes=6)
        ref_emb = None if batch.ref_emb is None else batch.ref_emb * scale
        check_all(replace(batch, emb=batch.emb * scale, ref_emb=ref_emb), distance, "mean")


@pytest.mark.parametrize("loss", ["margin", "soft_margin"])
def test_terms_whose_sum_leaves_the_type(loss):
    emb = torch.zeros(100, 1)
    emb[1] = 1e19
    labels = torch.cat([torch.zeros(2, dtype=torch.int64), torch.arange(98) // 49 + 1])
    # Row 0 has its positive at 1e38 and 98 negatives at 0: their mean fits float32, their sum does not.
    found = T.batch_all_loss(emb, labels, loss=loss, distance="sqeuclidean")
    expected, _ = reference.batch_all_loss(emb.double(), labels, loss=loss, distance="sqeuclidean")
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    found = T.contrastive_loss(emb, labels, neg_margin=9e37, distance="sqeuclidean")
    expected = reference.contrastive_loss(emb.double(), labels, neg_margin=9e37, distance="sqeuclidean")
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_rows_whose_squares_leave_the_type(scale, distance):
    batch = random_batch(60, 24, classes=6)
    check_all(replace(batch, emb=batch.emb * scale), distance, "mean")
    wide = replace(batch, emb=batch.emb.double() * scale**5)
    check_all(wide, distance, "mean", names=STREAMS)


def test_rows_of_very_different_length():
    generator = torch.Generator().manual_seed(5)
    batch = random_batch(80, 16, classes=5)
    lengths = 10.0 ** torch.randint(-15, 16, (80, 1), generator=generator)
    check_all(replace(batch, emb=batch.emb * lengths), "cosine", "mean")
    check_all(replace(batch, emb=batch.emb * lengths), "euclidean", "mean")


@pytest.mark.parametrize("distance", DISTANCES)
def test_an_outlier(distance):
    """One row 10⁴ times as long as the others takes the digits of all products of centred rows."""
    for dtype, candidates in product([torch.float32, torch.float64], (None, 60)):
        batch = random_batch(110, 8, candidates, classes=10, dtype=dtype)
        batch.emb[37] *= 1e4
        check_all(batch, distance, "mean")


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_common_offset(distance, dtype):
    for candidates in (None, 70):
        batch = random_batch(100, 30, candidates, classes=9, dtype=torch.float64)
        ref_emb = None if batch.ref_emb is None else batch.ref_emb + 1e4
        check_all(replace(batch, emb=batch.emb + 1e4, ref_emb=ref_emb).to(dtype), distance, "mean")


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("spread", [1e-2, 1e-4, 1e-6])
def test_rows_nearer_to_each_other_than_a_product_can_tell(distance, spread):
    generator = torch.Generator().manual_seed(6)
    centres = torch.randn(9, 20, generator=generator)
    emb = centres.repeat(13, 1) + spread * torch.randn(117, 20, generator=generator)
    batch = Batch(emb, labels_of(117, 12, generator))
    check_all(batch, distance, "mean")
    tiny = spread if distance == "euclidean" else spread**2
    check_all(batch, distance, "mean", unit=5 * tiny)


# Nothing to compare, and values that are not finite


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALONE)
def test_nothing_to_compare_is_the_differentiable_zero(name, dtype):
    batch = ALONE[name].to(dtype)
    for distance in DISTANCES:
        for call, reduction in product(calls_of(distance).values(), REDUCTIONS):
            loss, gradients, active = run_tuples(batch, call.but(reduction=reduction))
            assert loss.shape == ((len(batch.emb),) if reduction == "none" else ())
            assert not loss.any()
            assert not any(gradient.any() for gradient in gradients)
            assert not active


def test_triplets_need_both_but_pairs_stand_alone():
    """Anchor 0 has negatives only, anchor 1 positives only."""
    batch = Batch(
        torch.tensor([[0.0], [4.0]]), torch.tensor([0, 1]),
        torch.tensor([[0.25], [5.0]]), torch.tensor([1, 1]), torch.tensor([-1, -1]),
    )  # fmt: skip
    calls = calls_of("euclidean")
    for name in ("batch_all", "batch_all_soft", "semi_hard"):
        losses, gradients, _ = run_tuples(batch, calls[name].but(reduction="none"))
        assert not losses[0]
        assert not any(gradient.any() for gradient in gradients)
    contrastive = ManyTuples("contrastive_loss", {"reduction": "none"})
    losses, _, _ = run_tuples(batch, contrastive)
    assert losses.tolist() == [0.75, 4.75]
    beta = ManyTuples("beta_margin_loss", {"reduction": "none", "alpha": 0.25, "seed": 0}, 1.0)
    losses, (_, _), _ = run_tuples(batch, beta.but(positive="easy", negative="hard"))
    assert losses.tolist() == [1.0, 0.25]


def check_poisoned(batch: Batch, call: ManyTuples) -> None:
    loss, gradients, _ = run_tuples(batch, call)
    assert loss.isnan().all()
    assert all(gradient.isnan().all() for gradient in gradients)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_poison_everything(value, dtype):
    for candidates, side, row in ((None, 0, 0), (None, 0, 39), (33, 0, 20), (33, 1, 32)):
        batch = random_batch(40, 9, candidates, classes=5, dtype=dtype)
        target = batch.emb if side == 0 else batch.ref_emb
        labels = batch.labels if side == 0 else batch.ref_labels
        assert target is not None
        assert labels is not None
        target[row, 4] = value
        for distance in DISTANCES:
            for call, reduction in product(calls_of(distance).values(), ("mean", "none")):
                check_poisoned(batch, call.but(reduction=reduction))
            other = (int(labels[row]) + 1) % 5
            for call in calls_of(distance, 2.0).values():
                check_poisoned(replace(batch, ignore_label=other), call.but(reduction="sum"))
        spared = replace(batch, ignore_label=int(labels[row]))
        for call in calls_of("cosine", 1.0).values():
            loss, gradients, _ = run_tuples(spared, call)
            assert loss.isfinite()
            assert all(gradient.isfinite().all() for gradient in gradients)


def test_poison_where_there_is_nothing_to_compare():
    nobody = torch.ones(0, dtype=torch.int64)
    for emb in (torch.tensor([[math.nan]]), torch.tensor([[1.0], [math.inf]])):
        for call in calls_of("cosine").values():
            check_poisoned(Batch(emb, torch.zeros(len(emb), dtype=torch.int64)), call)
            check_poisoned(Batch(emb, torch.arange(len(emb))), call)
            # Without anchors there is no loss to poison.
            without = Batch(torch.ones(0, 1), nobody, emb, torch.arange(len(emb)))
            loss, gradients, _ = run_tuples(without, call)
            assert loss == 0
            assert not gradients[1].any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("distance", DISTANCES)
def test_a_beta_that_is_not_finite_poisons_everything(distance, value):
    for candidates, rules, reduction in product(
        (None, 20), (("all", "all"), ("random", "distance")), REDUCTIONS
    ):
        batch = random_batch(30, 4, candidates, classes=3)
        given = {"distance": distance, "reduction": reduction, "positive": rules[0], "negative": rules[1]}
        check_poisoned(batch, ManyTuples("beta_margin_loss", given, torch.tensor(value)))
        check_poisoned(batch, ManyTuples("beta_margin_loss", given, torch.tensor([1.0, 1.0, value])))
        loss, gradients, _ = run_tuples(batch, ManyTuples("beta_margin_loss", given, value))
        assert loss.isnan().all()
        assert all(gradient.isnan().all() for gradient in gradients)


# Properties


def small_batches(dtype: torch.dtype = torch.float64) -> st.SearchStrategy[Batch]:
    return st.builds(
        lambda seed, count, width, classes: random_batch(
            count, width, classes=classes, dtype=dtype, seed=seed
        ),
        st.integers(0, 10**6),
        st.integers(3, 40),
        st.sampled_from([1, 2, 5, 16]),
        st.integers(2, 5),
    )


def any_call(distances: tuple[str, ...] = DISTANCES) -> st.SearchStrategy[ManyTuples]:
    calls = [call for distance in distances for call in calls_of(distance, 1.5).values()]
    return st.sampled_from([call for call in calls if call.options.get("positive") != "random"])


@hypothesis.settings(max_examples=60)
@hypothesis.given(batch=small_batches(), call=any_call(), shuffle=st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_nothing_but_the_order(batch, call, shuffle):
    order = list(range(len(batch.emb)))
    shuffle.shuffle(order)
    other = Batch(batch.emb[order], batch.labels[order])
    losses, _, _ = run_tuples(batch, call.but(reduction="none"))
    shuffled, _, _ = run_tuples(other, call.but(reduction="none"))
    torch.testing.assert_close(shuffled, losses[order], rtol=1e-11, atol=1e-11)
    loss, gradients, _ = run_tuples(batch, call)
    again, other_gradients, _ = run_tuples(other, call)
    torch.testing.assert_close(again, loss, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(other_gradients[0], gradients[0][order], rtol=1e-9, atol=1e-10)


@hypothesis.settings(max_examples=60)
@hypothesis.given(batch=small_batches(), call=any_call(), power=st.integers(-20, 20))
def test_a_power_of_two_scales_every_digit(batch, call, power):
    """Rows times 2^k make distances times 2^k, 4^k, or the same; margins must follow."""
    if call.options.get("loss") == "soft_margin":
        return
    factor = {"euclidean": 2.0**power, "sqeuclidean": 4.0**power, "cosine": 1.0}[call.distance]
    given = {
        name: value * factor if name in ("margin", "pos_margin", "neg_margin") else value
        for name, value in call.given.items()
    }
    other = replace(call, given=given)
    if call.beta is not None:
        other = replace(other.but(alpha=call.options["alpha"] * factor), beta=call.beta * factor)
    loss, _, active = run_tuples(batch, call)
    scaled, _, scaled_active = run_tuples(replace(batch, emb=batch.emb * 2.0**power), other)
    assert scaled == loss * factor
    assert scaled_active == active


@hypothesis.settings(max_examples=60)
@hypothesis.given(batch=small_batches(torch.float32), call=any_call())
def test_the_parts_add_up_to_the_sum(batch, call):
    losses, _, _ = run_tuples(batch, call.but(reduction="none"))
    total, _, _ = run_tuples(batch, call.but(reduction="sum"))
    torch.testing.assert_close(losses.double().sum().float(), total, rtol=1e-6, atol=1e-6)


@hypothesis.settings(max_examples=40)
@hypothesis.given(batch=small_batches(), margin=st.sampled_from([0.0, 0.3, 2.0]))
def test_batch_all_is_the_sum_over_all_triplets(batch, margin):
    total, count, active = 0.0, 0, 0
    d, labels = (
        torch.cdist(batch.emb, batch.emb, compute_mode="donot_use_mm_for_euclid_dist").tolist(),
        batch.labels.tolist(),
    )
    rows = range(len(labels))
    for a, p in product(rows, rows):
        if a == p or labels[a] != labels[p]:
            continue
        for n in rows:
            if labels[n] != labels[a]:
                value = max(d[a][p] - d[a][n] + margin, 0.0)
                total, count, active = total + value, count + 1, active + (value > 0)
    for reduction, divisor in (("sum", 1), ("mean", count), ("mean_nonzero", active)):
        loss, found = T.batch_all_loss(
            batch.emb, batch.labels, margin=margin, reduction=reduction, return_active=True, backend=KERNELS
        )
        assert math.isclose(loss.item(), total / max(divisor, 1), rel_tol=1e-10, abs_tol=1e-10)
        assert found == active


@pytest.mark.parametrize("distance", ["euclidean", "sqeuclidean"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_negative_out_of_reach_may_lie_anywhere(distance, dtype):
    """No bit of a hinge depends on how far beyond the margin a negative is, and it gets no gradient.

    Of an outlier, that is: where a row becomes one, products are centred elsewhere.
    """
    near = lattice_batch(120, 4, classes=12).to(dtype)
    for position in (0, 60, 119):
        outcomes = []
        for place in (40.0, 50.0):
            emb = near.emb.clone()
            emb[position] = place
            labels = near.labels.clone()
            labels[position] = 99
            batch = Batch(emb, labels)
            for name in ("batch_all", "contrastive", "beta_margin_all"):
                loss, gradients, active = run_tuples(batch, calls_of(distance)[name])
                assert not gradients[0][position].any()
                outcomes.append(bits(loss, *gradients, *([] if active is None else [active])))
        assert outcomes[:3] == outcomes[3:]


@pytest.mark.parametrize(("name", "distance"), EVERY_CALL)
def test_gradcheck(name, distance):
    for candidates, reduction in ((None, "none"), (7, "mean")):
        batch = random_batch(6, 3, candidates, classes=2, dtype=torch.float64, with_self=False, seed=11)
        call = calls_of(distance, 1.0 if distance == "cosine" else 2.0)[name].but(reduction=reduction)
        inputs = [batch.emb.requires_grad_()]
        if batch.ref_emb is not None:
            inputs.append(batch.ref_emb.requires_grad_())
        if isinstance(call.beta, Tensor):
            inputs.append(call.beta.double().requires_grad_())

        def loss_of(*inputs: Tensor, call: ManyTuples = call, batch: Batch = batch) -> Tensor:
            emb, *rest = inputs
            arguments = {**call.arguments(batch), "backend": KERNELS}
            if batch.ref_emb is not None:
                arguments["ref_emb"] = rest.pop(0)
            return getattr(T, call.function)(emb, batch.labels, *rest, **arguments)

        assert torch.autograd.gradcheck(loss_of, inputs)


# Repetition, threads, memory


def everything(batch: Batch, call: ManyTuples) -> list[bytes]:
    loss, gradients, active = run_tuples(batch, call)
    return bits(loss, *gradients, *([] if active is None else [active]))


def all_of(batch: Batch) -> list[list[bytes]]:
    calls = [call for distance in ("euclidean", "cosine") for call in calls_of(distance, 1.2).values()]
    return [everything(batch, call.but(reduction=REDUCTIONS[i % 4])) for i, call in enumerate(calls)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_on_any_number_of_threads(dtype):
    """Large enough that several threads do take part, forward and backward."""
    for batch in (
        random_batch(523, 20, classes=60, dtype=dtype),
        random_batch(201, 33, 502, classes=40, dtype=dtype),
    ):
        expected = all_of(batch)
        assert all_of(batch) == expected
        for count in (2, 3, 5):
            torch.set_num_threads(count)
            assert all_of(batch) == expected
        torch.set_num_threads(1)


def test_several_python_threads_at_once():
    torch.set_num_threads(2)
    batches = [random_batch(n, d, classes=9, seed=n) for n, d in ((300, 32), (217, 33), (64, 128), (5, 3))]
    expected = [all_of(batch) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            assert list(pool.map(all_of, batches)) == expected


MEMORY = """
import torch
import tripletops as T

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024

def run(count, function, options):
    emb = torch.randn(count, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.arange(count) % (count // 4)
    beta = [torch.tensor(1.2, requires_grad=True)] if function == "beta_margin_loss" else []
    getattr(T, function)(emb, labels, *beta, **options).backward()

torch.set_num_threads(2)
for call in CALLS:
    run(200, *call)
before = peak()
for call in CALLS:
    run(6000, *call)
    print(*call, (peak() - before) // 2**20, "MB")
    assert peak() - before < 6000**2 * 4 / 10
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_square_of_the_batch_is_held():
    """6000² numbers would be 144 MB."""
    calls: list[tuple[str, dict[str, str]]] = [
        ("batch_all_loss", {}),
        ("batch_all_loss", {"loss": "soft_margin"}),
        ("semi_hard_loss", {}),
        ("multi_similarity_loss", {}),
        ("contrastive_loss", {}),
        ("contrastive_loss", {"positive": "easy", "negative": "distance"}),
        ("beta_margin_loss", {}),
        ("beta_margin_loss", {"positive": "all", "negative": "all"}),
    ]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY.replace("CALLS", repr(calls))],
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# Everything at once


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    dtype = draw(st.sampled_from(DTYPES))
    width = draw(st.sampled_from([0, 1, 2, 3, 5, 8, 16, 17, 33]))
    classes = draw(st.integers(1, 7))
    kind = draw(st.sampled_from(KINDS))
    layout = draw(st.sampled_from(LAYOUTS))
    ignore_label = draw(st.none() | st.integers(0, classes))

    def rows(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(classes, (count,), generator=generator)
        x = rows_of_kind(kind, count, width, dtype, generator)
        if ignore_label is not None:
            x[labels == ignore_label] = math.nan
        return laid_out(x.to(dtype), layout), labels

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


@hypothesis.settings(max_examples=250)
@hypothesis.given(
    batch=batches(),
    words=st.sampled_from(EVERY_CALL),
    rules=st.sampled_from(PAIR_RULES),
    reduction=st.sampled_from(REDUCTIONS),
    reach=st.sampled_from([0.0, 0.3, 1.0, 30.0]),
    by_class=st.booleans(),
)
def test_anything(batch, words, rules, reduction, reach, by_class):
    name, distance = words
    truth = Truth(batch, distance)
    call = calls_of(distance, reach * unit_of(truth), classes=7 * by_class)[name]
    if "negative" in call.options:
        call = call.but(positive=rules[0], negative=rules[1])
    check_tuples(truth, call, reduction)
