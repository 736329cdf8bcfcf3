"""Triton's mining, losses of the picks and their gradients against the float64 oracle.

The interpreter is slow, so batches are small and words take turns: every rule meets every distance, every
loss every reduction, and each of them every type and kind of batch, but not all of them each other. Its tiles
are of 32 rows and columns and a depth of 16; sizes lie around these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import cycle, product

import hypothesis
import pytest
import torch
from helpers import (
    ALONE,
    DEVICE,
    DISTANCES,
    DTYPES,
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
    run_loss,
)
from hypothesis import strategies as st

# Run here as they are: their batches are small enough.
from test_triplet import (  # noqa: F401
    SCANS,
    batches,
    drawn,
    test_gradients_of_one_side_alone,
    test_poison_where_there_is_nothing_to_compare,
    test_seeds,
    test_the_kink_has_no_slope,
)

import tripletops


def ignoring_batch() -> Batch:
    batch = random_batch(13, 6, 37, classes=5)
    batch.emb[batch.labels == 2] = math.nan
    assert batch.ref_emb is not None
    batch.ref_emb[batch.ref_labels == 2] = math.inf
    return replace(batch, ignore_label=2)


@cache
def everyday_truths(distance: str) -> list[Truth]:
    """Every type; the rows themselves and other candidates, with and without the anchors among them."""
    batches = (
        random_batch(33, 17, classes=3),
        random_batch(10, 5, 34).to(torch.float16),
        random_batch(20, 33, 9, with_self=False, dtype=torch.float64),
        random_batch(34, 3, classes=9, dtype=torch.bfloat16),
        ignoring_batch(),
    )
    return [Truth(batch, distance) for batch in batches]


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize(("positive", "negative"), RULES)
def test_every_rule(positive, negative, distance):
    turn = RULES.index((positive, negative)) + DISTANCES.index(distance)
    truths, losses = everyday_truths(distance), LOSSES[distance]
    objective = Objective(distance, losses[turn % len(losses)], REDUCTIONS[turn // 2 % 4], margin=0.5)
    check(truths[turn % 5], positive, negative, objective)
    check(truths[(turn + 2) % 5], positive, negative)


@pytest.mark.parametrize(("distance", "loss"), [(name, loss) for name in LOSSES for loss in LOSSES[name]])
def test_every_loss(distance, loss):
    for reduction, dtype, rules in zip(REDUCTIONS, DTYPES, RULES[::4], strict=True):
        batch = random_batch(11, 6, classes=3, dtype=dtype)
        for objective in (
            Objective(distance, loss, reduction, margin=1.5, temperature=0.1),
            Objective(distance, loss, REDUCTIONS[REDUCTIONS.index(reduction) - 1]),
        ):
            check(Truth(batch, distance), *rules, objective)


# Sizes


def test_sizes_around_tile_edges():
    shapes = [(1, 1), (2, 16), (3, 2), (15, 31), (31, 16), (32, 17), (33, 32), (34, 1), (63, 33), (64, 15),
              (65, 3), (1, 5, 33), (5, 3, 32), (16, 17, 31), (33, 16, 65), (31, 8, 1), (65, 2)]  # fmt: skip
    words = zip(cycle(SCANS), cycle(DISTANCES), cycle((torch.float32, torch.float64)), strict=False)
    for (count, width, *candidates), (rules, distance, dtype) in zip(shapes, words, strict=False):
        batch = random_batch(count, width, *candidates, classes=max(2, count // 4), dtype=dtype)
        check(Truth(batch, distance), *rules, Objective(distance, reduction="sum"))


@pytest.mark.parametrize("candidates", [None, 9])
@pytest.mark.parametrize("distance", DISTANCES)
def test_rows_without_dimensions_are_at_distance_zero(distance, candidates):
    batch = random_batch(14, 0, candidates, classes=3)
    turn = DISTANCES.index(distance) + 3 * (candidates is None)
    for rules, dtype, objective in zip(
        RULES[turn::5], DTYPES[turn % 2 :], objectives_of(distance)[turn % 2 :: 3], strict=False
    ):
        triplets = check(Truth(batch.to(dtype), distance), *rules, objective)
        if "semihard" not in rules:
            assert triplets.valid.all()
            assert not triplets.d_ap.any()


@pytest.mark.parametrize("name", ALONE)
def test_nothing_to_compare_is_the_differentiable_zero(name):
    turn = [*ALONE].index(name)
    for rules, distance, dtype, reduction in zip(
        RULES[turn::7], cycle(DISTANCES[::-1]), DTYPES[turn % 4 :] + DTYPES, ("none", "mean"), strict=False
    ):
        batch, objective = ALONE[name].to(dtype), Objective(distance, "soft_margin", reduction)
        loss, gradients, _ = run_loss(batch, *rules, objective)
        assert loss.shape == ((len(batch.emb),) if reduction == "none" else ())
        assert not loss.any()
        assert not any(gradient.any() for gradient in gradients)
        assert not mined(batch, *rules, distance).valid.any()


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
def test_classes_of_very_different_size(distance):
    generator = torch.Generator().manual_seed(2)
    labels = torch.repeat_interleave(torch.arange(6), torch.tensor([1, 2, 41, 5, 1, 17]))
    shuffled = labels[torch.randperm(len(labels), generator=generator)]
    emb = torch.randn(len(labels), 9, generator=generator)
    check(Truth(Batch(emb, labels.flip(0)), distance), "hard", "semihard", Objective(distance))
    truth = Truth(Batch(emb[:20], shuffled[:20], emb.roll(1, 0) * 1.5, labels), distance)
    for rules in (("easy", "hard"), ("random", "random")):
        check(truth, *rules, Objective(distance))


# Ties


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize(("positive", "negative"), RULES)
def test_ties_on_a_lattice_go_to_the_first(positive, negative, distance):
    """Every sum on the way is exact, so the picks must be the oracle's, one by one."""
    turn = RULES.index((positive, negative)) + DISTANCES.index(distance)
    count, width, *candidates = ((70, 4), (35, 17), (17, 3, 67))[turn % 3]
    batch = lattice_batch(count, width, *candidates, cosine=distance == "cosine")
    truth = Truth(batch.to(DTYPES[turn % 4]), distance)
    triplets = check(truth, positive, negative)
    p, n = oracle_picks(truth, positive, negative)
    assert torch.equal(triplets.positive, p)
    assert torch.equal(triplets.negative, n)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distance", DISTANCES)
def test_duplicates_tie_wherever_they_lie(distance, dtype):
    """Few different rows, none of them round, all over the tiles: `check` wants the first of equals."""
    generator = torch.Generator().manual_seed(0)
    turn = DTYPES.index(dtype) + DISTANCES.index(distance)
    for scan, different, count, *candidates in (
        (SCANS[turn % 4], 4, 70),
        (SCANS[(turn + 1) % 4], 6, 19, 80),
    ):
        rows = torch.randn(different, 19, generator=generator) + 3
        sides = [
            (rows[torch.randint(different, (size,), generator=generator)], labels_of(size, 4, generator))
            for size in (count, *candidates)
        ]
        batch = Batch(*[part for side in sides for part in side]).to(dtype)
        check(Truth(batch, distance), *scan)


@pytest.mark.parametrize("distance", DISTANCES)
def test_all_rows_equal(distance):
    generator = torch.Generator().manual_seed(1)
    labels = labels_of(37, 4, generator)
    others = ~torch.eye(37, dtype=torch.bool)
    first_positive = ((labels[:, None] == labels) & others).int().argmax(1)
    first_negative = (labels[:, None] != labels).int().argmax(1)
    row = torch.randn(1, 23, generator=generator)
    for dtype, rule in zip(DTYPES, cycle(("hard", "easy")), strict=False):
        batch = Batch(row.to(dtype).repeat(37, 1), labels)
        triplets = mined(batch, rule, rule, distance)
        assert torch.equal(triplets.positive, first_positive)
        assert torch.equal(triplets.negative, first_negative)
        assert not triplets.d_ap.any()
        assert not triplets.d_an.any()
        assert (mined(batch, rule, "semihard", distance).negative == -1).all()
    loss, (gradient,), _ = run_loss(batch, "hard", "hard", Objective(distance, margin=0.25))
    assert loss == 0.25
    assert not gradient.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_rows_by_cosine(dtype):
    """S = 0 with everything, so everything ties; and no slope, on neither side."""
    turn = DTYPES.index(dtype)
    batch = random_batch(35, 11, classes=4).to(dtype)
    batch.emb[::7] = 0
    batch.emb[3:6] = -0.0
    zero = (batch.emb == 0).all(1)
    for loss, rules in zip(LOSSES["cosine"][turn % 2 :: 2], RULES[turn::6], strict=False):
        objective = Objective("cosine", loss)
        triplets = check(Truth(batch, "cosine"), *rules, objective)
        assert (triplets.d_ap[zero] == 1).all()
        assert not run_loss(batch, *rules, objective)[1][0][zero].any()
    assert (mined(batch, "easy", "semihard", "cosine").negative[zero] == -1).all()
    nothing_else = Truth(Batch(torch.zeros(20, 4, dtype=dtype), torch.arange(20) % 3), "cosine")
    check(nothing_else, *RULES[2 + turn], Objective("cosine", LOSSES["cosine"][turn]))


# Scales


def scaled(batch: Batch, factor: float) -> Batch:
    ref_emb = None if batch.ref_emb is None else batch.ref_emb * factor
    return replace(batch, emb=batch.emb * factor, ref_emb=ref_emb)


def with_lengths() -> Batch:
    generator = torch.Generator().manual_seed(5)
    batch = random_batch(34, 16, classes=5)
    return replace(batch, emb=batch.emb * 10.0 ** torch.randint(-15, 16, (34, 1), generator=generator))


def with_outlier() -> Batch:
    batch = random_batch(12, 8, 35, classes=5)
    batch.emb[7] *= 1e4
    return batch


def with_offset(offset: float, dtype: torch.dtype) -> Batch:
    batch = random_batch(34, 30, 9, dtype=torch.float64)
    assert batch.ref_emb is not None
    return replace(batch, emb=batch.emb + offset, ref_emb=batch.ref_emb + offset).to(dtype)


def with_clusters(spread: float) -> Batch:
    """Where the scan sees nothing but rounding, reported distances must still be right, and in order."""
    generator = torch.Generator().manual_seed(6)
    emb = torch.randn(5, 20, generator=generator).repeat(7, 1)
    return Batch(emb + spread * torch.randn(35, 20, generator=generator), labels_of(35, 4, generator))


SCALES: dict[str, tuple[Callable[[], Batch], float]] = {  # the batch, and the size of its distances
    "huge": (lambda: scaled(random_batch(7, 24, 34), 1e18), 1e18),
    "tiny": (lambda: scaled(random_batch(20, 24), 1e-18), 1e-18),
    "squares overflow": (lambda: scaled(random_batch(20, 24), 1e30), 1e30),
    "squares underflow": (lambda: scaled(random_batch(20, 24), 1e-30), 1e-30),
    "largest": (lambda: scaled(random_batch(20, 3), 3e37), 3e37),
    "huge doubles": (lambda: scaled(random_batch(20, 24, dtype=torch.float64), 1e150), 1e150),
    "lengths": (with_lengths, 1.0),
    "outlier": (with_outlier, 1.0),
    "offset": (lambda: with_offset(1e4, torch.float32), 1.0),
    "offset of doubles": (lambda: with_offset(1e4, torch.float64), 1.0),
    "offset of halves": (lambda: with_offset(100.0, torch.float16), 1.0),
    "clusters": (lambda: with_clusters(1e-2), 1e-2),
    "narrow clusters": (lambda: with_clusters(1e-4), 1e-4),
    "narrowest clusters": (lambda: with_clusters(1e-6), 1e-6),
}
SCALES_BY_DISTANCE = [
    (name, distance)
    for (name, (_, size)), distance in product(SCALES.items(), DISTANCES)
    if distance != "sqeuclidean" or 1e-20 < size < 1e20  # else squared distances leave the type
]


@pytest.mark.parametrize(("name", "distance"), SCALES_BY_DISTANCE)
def test_scales(name, distance):
    make, size = SCALES[name]
    truth, turn = Truth(make(), distance), [*SCALES].index(name)
    power = {"euclidean": 1, "sqeuclidean": 2, "cosine": 0}[distance]
    losses, rules = LOSSES[distance], (*SCANS, ("easy", "distance"))
    reduction = "none" if size > 1e15 and power else REDUCTIONS[turn % 4]  # a sum would leave the type
    objective = Objective(distance, losses[turn % len(losses)], reduction, 0.3 * size**power)
    check(truth, *rules[turn % 5], objective)
    check(truth, *rules[(turn + 1) % 5])


# Types, layouts, and values that are not finite


@pytest.mark.parametrize(
    ("dtype", "ref_dtype"), [(torch.float16, torch.float32), (torch.bfloat16, torch.float16),
                             (torch.float64, torch.float16), (torch.float32, torch.float64)]
)  # fmt: skip
def test_candidates_of_another_type(dtype, ref_dtype):
    batch = random_batch(19, 10, 21)
    assert batch.ref_emb is not None
    batch = replace(batch, emb=batch.emb.to(dtype), ref_emb=batch.ref_emb.to(ref_dtype))
    distance = DISTANCES[DTYPES.index(dtype) % 3]
    check(Truth(batch, distance), "hard", "semihard", Objective(distance))


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.uint16, torch.int32, torch.int64, torch.uint64]
)
def test_labels_of_any_integer_type(dtype):
    batch = random_batch(19, 5, 21, classes=5)
    limits = torch.iinfo(dtype)
    values = [limits.min, limits.max, 2, 1, limits.max // 2]
    table = torch.tensor(values, dtype=dtype)
    assert batch.ref_labels is not None
    given = replace(batch, labels=table[batch.labels], ref_labels=table[batch.ref_labels])
    ignored = dtype.itemsize % 5
    for some, like in (
        (given, batch),
        (replace(given, ignore_label=values[ignored]), replace(batch, ignore_label=ignored)),
    ):
        assert bits(*mined(some, "easy", "hard", "euclidean")) == bits(
            *mined(like, "easy", "hard", "euclidean")
        )


def test_expanded_rows_and_strided_labels():
    generator = torch.Generator().manual_seed(4)
    column = torch.randn(30, 1, generator=generator).expand(30, 6)
    row = torch.randn(1, 6, generator=generator).expand(30, 6)
    labels = labels_of(60, 4, generator)[::2]
    for batch, distance in (
        (Batch(column, labels), "euclidean"),
        (Batch(column, labels, row, labels.flip(0)), "sqeuclidean"),
        (Batch(row, torch.tensor([3]).expand(30), column, labels), "cosine"),
    ):
        check(Truth(batch, distance), "hard", "hard", Objective(distance))


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_strides_change_nothing(layout):
    for dtype, distance, candidates in zip(DTYPES, cycle(DISTANCES), cycle((None, 21)), strict=False):
        batch = random_batch(18, 19, candidates, classes=3, dtype=dtype)
        ref_emb = None if batch.ref_emb is None else laid_out(batch.ref_emb, layout)
        other = replace(batch, emb=laid_out(batch.emb, layout), ref_emb=ref_emb)
        outcomes = []
        for given in (batch, other):
            loss, gradients, _ = run_loss(given, "easy", "semihard", Objective(distance, reduction="none"))
            outcomes.append(bits(loss, *gradients))
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(("turn", "value"), [(0, math.inf), (1, -math.inf), (2, math.nan)])
def test_values_that_are_not_finite_poison_everything(turn, value):
    for dtype, rules, distance, reduction, (row, side, *candidates) in zip(
        DTYPES[turn:] + DTYPES, RULES[turn::3], DISTANCES[turn:] + DISTANCES, REDUCTIONS,
        ((0, 0), (35, 0), (20, 0, 18), (17, 1, 18)), strict=False,
    ):  # fmt: skip
        batch = random_batch(36, 19, *candidates, classes=5, dtype=dtype)
        target, labels = (batch.emb, batch.labels) if side == 0 else (batch.ref_emb, batch.ref_labels)
        assert target is not None
        assert labels is not None
        target[row, 18] = value
        objective = Objective(distance, "soft_margin", reduction)
        check_poisoned(replace(batch, ignore_label=(int(labels[row]) + 1) % 5), *rules, objective)
        check(Truth(replace(batch, ignore_label=int(labels[row])), distance), *rules, objective)


# Draws


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_draws_are_the_same_on_every_backend(seed):
    for count, candidates in ((50, None), (18, 70)):
        batch = replace(random_batch(count, 4, candidates, classes=3), seed=seed)
        picks = mined(batch, "random", "random", "euclidean")
        expected = oracle_picks(Truth(batch, "euclidean"), "random", "random")
        assert torch.equal(picks.positive, expected[0])
        assert torch.equal(picks.negative, expected[1])
        if tripletops.backends()["cpu"] == "usable":
            rules = {"positive": "random", "negative": "random", "backend": "cpu"}
            others = tripletops.mine(batch.emb, batch.labels, **rules, **batch.options())
            assert torch.equal(picks.positive, others.positive)
            assert torch.equal(picks.negative, others.negative)


@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_by_distance(dtype):
    cutoffs = cycle([*product((0.5, 1e-3, 1.2, 5.0), (1.4, None, 0.9, 0.1))][DTYPES.index(dtype) :: 3])
    for count, width, *candidates in ((50, 1), (35, 3), (17, 16, 66), (35, 40)):
        batch = random_batch(count, width, *candidates, classes=4, dtype=dtype)
        centre = batch.emb[::3].float().mean(0)
        batch.emb[::4] = (centre + 0.2 * batch.emb[::4].float()).to(dtype)  # some nearer than the cutoff
        cutoff, limit = next(cutoffs)
        negative = drawn(batch, cutoff=cutoff, nonzero_loss_cutoff=limit, distance=DISTANCES[count % 3])
        check_drawn(Truth(batch, "cosine"), negative, cutoff, limit)


def test_draws_by_distance_are_the_oracles():
    """float64 keys of the kernels and of the oracle differ in the last digits only: no draw does."""
    for count, width, distance in ((40, 1, "cosine"), (67, 2, "euclidean"), (50, 24, "sqeuclidean")):
        batch = random_batch(count, width, classes=9, dtype=torch.float64)
        expected = oracle_picks(Truth(batch, "cosine"), "random", "distance")[1]
        assert torch.equal(drawn(batch, distance=distance), expected)


def test_without_weights_draws_are_uniform():
    batch = random_batch(17, 20, 66)
    uniform = mined(batch, "random", "random", "euclidean").negative
    # From 2 on d reaches nothing; below the cutoff nothing is reached either.
    for cutoff, limit in ((0.5, 1e-3), (0.5, 0.5), (2.5, 2.0)):
        assert torch.equal(drawn(batch, cutoff=cutoff, nonzero_loss_cutoff=limit), uniform)
    assert not torch.equal(drawn(batch), uniform)


# Repetition


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_again(dtype):
    def everything() -> Iterator[list[bytes]]:
        for batch, distance, rules in zip(
            (random_batch(50, 20, dtype=dtype), random_batch(18, 33, 40, dtype=dtype)),
            DISTANCES[DTYPES.index(dtype) % 2 :],
            RULES[DTYPES.index(dtype) :: 5],
            strict=False,
        ):
            loss, gradients, _ = run_loss(batch, *rules, Objective(distance))
            yield bits(*mined(batch, *rules, distance), loss, *gradients)

    assert [*everything()] == [*everything()]


def test_autocast_changes_nothing():
    """The arithmetic inside is nobody else's to choose."""
    batch, objective = random_batch(35, 20, 18), Objective("cosine", "second_order")
    expected = run_loss(batch, "easy", "semihard", objective)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        loss, gradients, _ = run_loss(batch, "easy", "semihard", objective)
    assert bits(loss, *gradients) == bits(expected[0], *expected[1])
    weight = torch.randn(20, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        emb = batch.emb @ weight
        loss = T.batch_hard_loss(emb, batch.labels)
    assert (emb.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.any()


# Everything at once


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    batch=batches(),
    positive=st.sampled_from(POSITIVES),
    negative=st.sampled_from(NEGATIVES),
    distance_and_loss=st.sampled_from(
        [(distance, loss) for distance in DISTANCES for loss in LOSSES[distance]]
    ),
    reduction=st.sampled_from(REDUCTIONS),
    margin=st.sampled_from([0.0, 0.2, 30.0]),
)
def test_anything(batch, positive, negative, distance_and_loss, reduction, margin):
    distance, loss = distance_and_loss
    objective = Objective(distance, loss, reduction, margin)
    truth = Truth(batch, distance)
    if truth.x.isfinite().all() and truth.y.isfinite().all():
        check(truth, positive, negative, objective)
    else:
        check_poisoned(batch, positive, negative, objective)
