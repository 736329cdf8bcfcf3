"""Triton's objectives over many tuples and their gradients against the float64 oracle.

As in test_interpreted_triplet.py, batches are small and lie around the edges of tiles, and words take turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

import hypothesis
import pytest
import torch
from helpers import (
    ALONE,
    DEVICE,
    DISTANCES,
    DTYPES,
    LAYOUTS,
    REDUCTIONS,
    Batch,
    ManyTuples,
    Truth,
    bits,
    check_tuples,
    labels_of,
    laid_out,
    lattice_batch,
    random_batch,
    run_tuples,
)
from hypothesis import strategies as st
from test_interpreted_triplet import SCALES, SCALES_BY_DISTANCE, everyday_truths

# Tests are run here as they are where their batches are small enough.
from test_tuples import (  # noqa: F401
    EVERY_CALL,
    PAIR_RULES,
    STREAMS,
    batches,
    calls_of,
    check_all,
    check_poisoned,
    everything,
    test_active_triplets_are_counted,
    test_beta_of_classes_that_are_not_there,
    test_triplets_need_both_but_pairs_stand_alone,
    unit_of,
)


@pytest.mark.parametrize(("name", "distance"), EVERY_CALL)
def test_every_objective(name, distance):
    turn = EVERY_CALL.index((name, distance))
    for i in (0, 2):
        truth = everyday_truths(distance)[(turn + i) % 5]
        call = calls_of(distance, unit_of(truth), classes=9)[name]
        check_tuples(truth, call, REDUCTIONS[(turn + i) % 4])


@pytest.mark.parametrize("name", calls_of("cosine"))
def test_every_reduction_in_every_type(name):
    turn = [*calls_of("cosine")].index(name)
    distances = ("cosine",) if name.startswith("multi") else DISTANCES[turn % 3 :]
    for dtype, reduction, distance in zip(
        DTYPES, REDUCTIONS[turn % 4 :] + REDUCTIONS, cycle(distances), strict=False
    ):
        check_all(random_batch(11, 6, classes=3, dtype=dtype), distance, reduction, names=(name,))


@pytest.mark.parametrize(("positive", "negative"), PAIR_RULES)
def test_every_rule_for_pairs(positive, negative):
    turn = PAIR_RULES.index((positive, negative))
    truth = everyday_truths(DISTANCES[turn % 3])[turn % 5]
    name = ("contrastive_between", "beta_margin_all")[turn // 2 % 2]
    call = calls_of(truth.name, unit_of(truth), classes=9)[name]
    check_tuples(truth, call.but(positive=positive, negative=negative), REDUCTIONS[turn % 4])


@pytest.mark.parametrize("size", [0.0, 1000.0])
def test_margins(size):
    """Nothing but what the order of distances makes active, or everything."""
    for function, distance in zip(
        ("batch_all_loss", "semi_hard_loss", "contrastive_loss", "beta_margin_loss"),
        DISTANCES + DISTANCES,
        strict=False,
    ):
        truth = Truth(random_batch(19, 5, classes=3), distance)
        margin = size * unit_of(truth)
        given, beta = {"margin": margin}, None
        if function == "contrastive_loss":
            given = {"pos_margin": 0.0, "neg_margin": margin}
        elif function == "beta_margin_loss":
            given, beta = {"alpha": margin, "positive": "all", "negative": "all"}, torch.tensor(-margin)
        check_tuples(truth, ManyTuples(function, {"distance": distance, **given}, beta), "mean")


@pytest.mark.parametrize("positive", ["all", "easy"])
@pytest.mark.parametrize("epsilon", [0.1, None, 0.0, 50.0])
def test_multi_similarity(epsilon, positive):
    """At base 0, e^(beta·S) is beyond float32 from beta = 100 on, and beyond float64 at 1000."""
    options = ((2.0, 50.0, 0.5), (1000.0, 1000.0, 0.0), (0.01, 1e-3, 3.0), (300.0, 10.0, 30.0))
    for dtype, (alpha, beta, base), reduction in zip(
        (torch.float32, torch.float64, torch.float16, torch.float32), options, REDUCTIONS, strict=True
    ):
        truth = Truth(random_batch(15, 5, classes=3, dtype=dtype), "cosine")
        given = {"alpha": alpha, "beta": beta, "base": base, "epsilon": epsilon, "positive": positive}
        check_tuples(truth, ManyTuples("multi_similarity_loss", given), reduction)


# Sizes


def test_sizes_around_tile_edges():
    shapes = [(1, 1), (2, 16), (3, 2), (15, 31), (31, 16), (32, 17), (33, 32), (34, 1), (64, 15), (65, 3),
              (1, 5, 33), (5, 3, 32), (16, 17, 31), (33, 16, 65), (31, 8, 1)]  # fmt: skip
    words = cycle(
        (name, distance) for distance in DISTANCES for name in STREAMS if name in calls_of(distance)
    )
    for (count, width, *candidates), dtype in zip(
        shapes, cycle((torch.float32, torch.float64)), strict=False
    ):
        classes = max(2, max(count, *candidates, 0) // 4)
        batch = random_batch(count, width, *candidates, classes=classes, dtype=dtype)
        for _ in range(2):
            name, distance = next(words)
            check_all(batch, distance, "mean", names=(name,))


@pytest.mark.parametrize("distance", DISTANCES)
def test_rows_without_dimensions_are_at_distance_zero(distance):
    for call, dtype, reduction, *candidates in zip(
        calls_of(distance).values(), cycle(DTYPES), cycle(REDUCTIONS[::-1]), cycle((None, 9)), strict=False
    ):
        truth = Truth(random_batch(14, 0, *candidates, classes=3, dtype=dtype), distance)
        check_tuples(truth, call, reduction, exact=True)


@pytest.mark.parametrize("name", STREAMS)
def test_positives_few_and_many(name):
    """More than dimensions, and lists of them around the sizes that kernels read at a time."""
    for size, distance in ((2, "euclidean"), (17, "cosine"), (34, "euclidean")):
        generator = torch.Generator().manual_seed(size)
        labels = torch.cat([torch.zeros(size, dtype=torch.int64), torch.arange(9) // 2 + 1])
        labels = labels[torch.randperm(len(labels), generator=generator)]
        emb = torch.randn(len(labels), 6, generator=generator)
        if name == "multi_similarity":
            distance = "cosine"
        batch = Batch(emb, labels) if size < 20 else Batch(emb[:7] + 0.1, labels[:7], emb, labels)
        check_all(batch, distance, "none", names=(name,))


@pytest.mark.parametrize("name", ALONE)
def test_nothing_to_compare_is_the_differentiable_zero(name):
    turn = [*ALONE].index(name)
    for (called, distance), dtype, reduction in zip(
        EVERY_CALL[turn::9], DTYPES[turn % 4 :] + DTYPES, ("none", "mean", "mean_nonzero"), strict=False
    ):
        batch = ALONE[name].to(dtype)
        if len(batch.emb) > 20:
            batch = replace(batch, emb=batch.emb[:20], labels=batch.labels[:20])
        loss, gradients, active = run_tuples(batch, calls_of(distance)[called].but(reduction=reduction))
        assert loss.shape == ((len(batch.emb),) if reduction == "none" else ())
        assert not loss.any()
        assert not any(gradient.any() for gradient in gradients)
        assert not active


# Ties


@pytest.mark.parametrize("distance", DISTANCES)
def test_ties_on_a_lattice(distance):
    """Every sum on the way is exact, so that no negative may be mistaken for another."""
    names = [name for name in STREAMS if name in calls_of(distance)]
    for i, (count, width, *candidates) in enumerate(((34, 4), (17, 17), (9, 4, 34))):
        batch = lattice_batch(count, width, *candidates, cosine=distance == "cosine", classes=8)
        some = ("semi_hard", names[i % 2 * 3])
        check_all(batch.to(DTYPES[i + 1]), distance, REDUCTIONS[i], names=some, unit=1.0, exact=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_duplicates_wherever_they_lie(dtype):
    generator = torch.Generator().manual_seed(0)
    turn = DTYPES.index(dtype)
    for different, count, *candidates in ((4, 34), (6, 5, 34)):
        rows = torch.randn(different, 19, generator=generator) + 3
        sides = [
            (rows[torch.randint(different, (size,), generator=generator)], labels_of(size, 8, generator))
            for size in (count, *candidates)
        ]
        distance = DISTANCES[(turn + len(candidates)) % 3]
        names = [*calls_of(distance)][turn::5]
        batch = Batch(*[part for side in sides for part in side]).to(dtype)
        check_all(batch, distance, "mean", names=tuple(names))


@pytest.mark.parametrize("distance", DISTANCES)
def test_all_rows_equal(distance):
    generator = torch.Generator().manual_seed(1)
    row, labels = torch.randn(1, 23, generator=generator), labels_of(20, 4, generator)
    expected = {"batch_all": 0.25, "batch_all_soft": math.log(2), "semi_hard": 0.25, "contrastive": 1.25}
    for (name, value), dtype in zip(expected.items(), DTYPES, strict=True):
        margin = {"neg_margin": 1.25} if name == "contrastive" else {"margin": 0.25}
        batch = Batch(row.to(dtype).repeat(20, 1), labels)
        loss, (gradient,), _ = run_tuples(batch, calls_of(distance)[name].but(**margin))
        torch.testing.assert_close(loss.double(), torch.tensor(value, dtype=torch.float64), rtol=1e-7, atol=0)
        assert not gradient.any()
    check_all(batch, distance, "none", names=("beta_margin_all", "multi_similarity"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_rows_by_cosine(dtype):
    """S = 0 with everything; and no slope, on neither side."""
    batch = random_batch(19, 11, classes=4).to(dtype)
    batch.emb[::7] = 0
    batch.emb[3:6] = -0.0
    zero = (batch.emb == 0).all(1)
    names = [*calls_of("cosine")][DTYPES.index(dtype) :: 4]
    check_all(batch, "cosine", "none", names=tuple(names))
    for name in names:
        assert not run_tuples(batch, calls_of("cosine")[name])[1][0][zero].any()
    nothing_else = Batch(torch.zeros(20, 4, dtype=dtype), torch.arange(20) % 3)
    check_all(nothing_else, "cosine", "mean", exact=True, names=(STREAMS[DTYPES.index(dtype)],))


# Scales


@pytest.mark.parametrize(
    ("name", "distance"),
    [
        (name, distance)
        for name, distance in SCALES_BY_DISTANCE
        if name != "largest"  # of whose distances the reciprocals are too small for float32
        and ([*SCALES].index(name) + DISTANCES.index(distance)) % 3
    ],
)
def test_scales(name, distance):
    names = [each for each in STREAMS if each in calls_of(distance)]
    turn = SCALES_BY_DISTANCE.index((name, distance))
    check_all(SCALES[name][0](), distance, "mean", names=(names[turn % len(names)],))


# Types, layouts, and values that are not finite


@pytest.mark.parametrize("dtype", DTYPES)
def test_types_side_by_side(dtype):
    """Candidates, and beta, of any type."""
    turn = DTYPES.index(dtype)
    for i, other in enumerate((DTYPES[turn - 1], DTYPES[turn - 2])):
        batch = random_batch(18, 10, 21)
        assert batch.ref_emb is not None
        batch = replace(batch, emb=batch.emb.to(dtype), ref_emb=batch.ref_emb.to(other))
        name, distance = EVERY_CALL[(5 * turn + 11 * i) % len(EVERY_CALL)]
        check_all(batch, distance, "mean", names=(name,))
        beta = (torch.tensor(3.3), torch.linspace(2.5, 3.5, 4))[i].to(other)
        rules = ({}, {"positive": "all", "negative": "all"})[i]
        call = ManyTuples("beta_margin_loss", {"alpha": 0.3, **rules}, beta)
        check_tuples(Truth(random_batch(19, 6, dtype=dtype), "euclidean"), call, "none")


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_strides_change_nothing(layout):
    turn = LAYOUTS.index(layout)
    for call, dtype, candidates in zip(
        [*calls_of("cosine").values()][turn::3], DTYPES[turn:] + DTYPES, cycle((None, 21)), strict=False
    ):
        batch = random_batch(18, 19, candidates, classes=3, dtype=dtype)
        ref_emb = None if batch.ref_emb is None else laid_out(batch.ref_emb, layout)
        other = replace(batch, emb=laid_out(batch.emb, layout), ref_emb=ref_emb)
        assert everything(other, call) == everything(batch, call)


@pytest.mark.parametrize(("turn", "value"), [(0, math.inf), (1, -math.inf), (2, math.nan)])
def test_values_that_are_not_finite_poison_everything(turn, value):
    for dtype, (name, distance), reduction, (row, side, *candidates) in zip(
        DTYPES[turn:] + DTYPES, EVERY_CALL[turn::7], REDUCTIONS,
        ((0, 0), (13, 0), (13, 0, 10), (9, 1, 10)), strict=False,
    ):  # fmt: skip
        batch = random_batch(14, 19, *candidates, classes=5, dtype=dtype)
        target, labels = (batch.emb, batch.labels) if side == 0 else (batch.ref_emb, batch.ref_labels)
        assert target is not None
        assert labels is not None
        target[row, 18] = value
        call = calls_of(distance)[name].but(reduction=reduction)
        check_poisoned(replace(batch, ignore_label=(int(labels[row]) + 1) % 5), call)
        check_tuples(Truth(replace(batch, ignore_label=int(labels[row])), distance), call, reduction)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_beta_that_is_not_finite_poisons_everything(value):
    for candidates, reduction, beta, rules in (
        (None, "mean", value, ("random", "distance")),
        (20, "none", [1.0, 1.0, value], ("all", "all")),
    ):
        given = {"reduction": reduction, "positive": rules[0], "negative": rules[1]}
        call = ManyTuples("beta_margin_loss", given, torch.tensor(beta))
        check_poisoned(random_batch(30, 4, candidates, classes=3), call)


# Repetition


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_again(dtype):
    def all_of() -> Iterator[list[bytes]]:
        batches = random_batch(34, 20, classes=9, dtype=dtype), random_batch(9, 33, 34, dtype=dtype)
        words = EVERY_CALL[DTYPES.index(dtype) :: 4]
        for i, (name, distance) in enumerate(words[::3]):
            yield everything(batches[i % 2], calls_of(distance)[name])

    assert [*all_of()] == [*all_of()]


def test_autocast_changes_nothing():
    batch = random_batch(35, 20, 18)
    for name in ("batch_all", "multi_similarity", "beta_margin"):
        call = calls_of("cosine")[name]
        with torch.autocast(DEVICE.type, torch.bfloat16):
            inside = run_tuples(batch, call)
        outside = run_tuples(batch, call)
        assert bits(inside[0], *inside[1]) == bits(outside[0], *outside[1])


# Everything at once


@hypothesis.settings(max_examples=30)
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
