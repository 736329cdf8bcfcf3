"""The objectives over many tuples against the float64 oracle: every word, and every kind of batch.

One list of cases for all backends. The cpu's best instruction set and a GPU meet every form of every
objective in every test; with the others, words take turns. In Triton's interpreter batches are small, too.

The cpu's kernels work in blocks of 96 rows, and search an anchor's positives where it has more than 8; the
interpreter's tiles are of 32 rows and columns and a depth of 16. Sizes here lie on both sides of that.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, TypeVar
from zlib import crc32

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.support.backends import BACKENDS, SLOW, Backend
from tests.support.batches import (
    ALONE,
    KINDS,
    LAYOUTS,
    Batch,
    labels_of,
    laid_out,
    lattice_batch,
    random_batch,
    rows_of_kind,
)
from tests.support.calls import DEVICE, DISTANCES, DTYPES, KERNELS, REDUCTIONS, T
from tests.support.oracle import Truth
from tests.support.tuples import (
    OBJECTIVES,
    ManyTuples,
    Outcome,
    bits_of,
    calls_of,
    check_poisoned,
    check_tuples,
    judge_of,
    plain_tuples,
    run_tuples,
    unit_of,
)
from tripletops._words import NEGATIVE, OBJECTIVE, POSITIVE

Word = TypeVar("Word")

NAMES = tuple(calls_of("cosine"))
DISTANCES_OF = {name: tuple(each for each in DISTANCES if name in calls_of(each)) for name in NAMES}
EVERY_CALL = [(name, distance) for distance in DISTANCES for name in calls_of(distance)]
# What is enough where a test is about the batch, not about the words: every objective with every loss.
STREAMS = tuple(
    {
        (call.objective.name, call.options.get("loss")): name
        for name, call in reversed(calls_of("cosine").items())
        if call.streams
    }.values()
)
# A call of each objective that can pick.
PICKING = tuple(
    {
        call.objective.name: name for name, call in calls_of("cosine").items() if "negative" in call.options
    }.values()
)
PAIR_RULES = [
    (positive, negative)
    for positive, negative in product(POSITIVE, NEGATIVE)
    if positive != "all" or not NEGATIVE[negative].needs_positive
]

pytestmark = pytest.mark.usefixtures("one_thread")

too_large = pytest.mark.skipif(SLOW, reason="batches that Triton's interpreter would take minutes for")


def cases(*axes: Sequence[Any], slow: int) -> list[tuple[Any, ...]]:
    """All combinations; in Triton's interpreter one in `slow`, which shares no factor with the axes."""
    return [*product(*axes)][:: slow if SLOW else 1]


class Trial:
    """A backend, and whose turn it is where words take turns."""

    def __init__(self, backend: Backend, name: str) -> None:
        self.backend, self.slow, self.turn = backend, backend.slow, crc32(name.encode())

    def some(self, words: Sequence[Word], few: int = 1) -> Sequence[Word]:
        self.turn += 1
        return self.backend.some(words, self.turn, few)

    def check(
        self,
        batch: Batch | Truth,
        distance: str,
        *reductions: str,
        names: Sequence[str] = NAMES,
        unit: float | None = None,
        exact: bool = False,
        few: int = 1,
    ) -> None:
        """All objectives, or `few` of them; margins matter where distances are about `unit`."""
        truth = Truth(batch, distance) if isinstance(batch, Batch) else batch
        assert self.backend.bears(truth.batch)
        calls = calls_of(distance, unit_of(truth) if unit is None else unit)
        for name in self.some([name for name in names if name in calls], few):
            check_tuples(truth, calls[name], *self.some(reductions or REDUCTIONS), exact=exact)

    def check_alike(self, first: Outcome, second: Outcome) -> None:
        """Bit for bit, but with Triton: it adds up in the order of labels, and ignored rows leave gaps."""
        if self.backend.name == "cpu":
            assert bits_of(first) == bits_of(second)
        else:
            torch.testing.assert_close(first, second)

    def calls(self, distance: str, unit: float = 1.0, classes: int = 0, few: int = 2) -> Sequence[ManyTuples]:
        return self.some([*calls_of(distance, unit, classes).values()], few)


@pytest.fixture
def trial(backend: Backend, request: pytest.FixtureRequest) -> Trial:
    return Trial(backend, request.node.name)


def everything(batch: Batch, call: ManyTuples) -> list[bytes]:
    return bits_of(run_tuples(batch, call))


# Words


@cache
def everyday_truths(distance: str) -> list[Truth]:
    batches = [
        random_batch(2, 1, classes=2),
        random_batch(7, 3, classes=2, seed=1),
        random_batch(33, 5, classes=11, seed=3),
        random_batch(33, 17, classes=3, seed=4) if SLOW else random_batch(65, 31, classes=3, seed=4),
        random_batch(34 if SLOW else 97, 7, classes=6, seed=5),
        random_batch(29, 13, classes=4, dtype=torch.float64, seed=6),
        random_batch(34 if SLOW else 40, 8, classes=4, dtype=torch.bfloat16, seed=6),
        random_batch(5, 8, 40, seed=7),
        random_batch(33, 4, 18, with_self=False, seed=8),
        random_batch(1, 33, 70, classes=2, dtype=torch.float64, seed=9),
        random_batch(10, 5, 34, dtype=torch.float16),
    ]
    ignoring = random_batch(13, 6, 37, classes=5) if SLOW else random_batch(47, 6, 53, classes=6, seed=10)
    ignoring.emb[ignoring.labels == 2] = math.nan
    assert ignoring.ref_emb is not None
    ignoring.ref_emb[ignoring.ref_labels == 2] = math.inf
    batches.append(replace(ignoring, ignore_label=2))
    return [Truth(batch, distance) for batch in batches]


@pytest.mark.parametrize(("name", "distance"), EVERY_CALL)
def test_every_objective(trial, name, distance):
    for truth in trial.some(everyday_truths(distance), 2):
        call = calls_of(distance, unit_of(truth), classes=11)[name]
        check_tuples(truth, call, *trial.some(REDUCTIONS))


@pytest.mark.parametrize(("positive", "negative"), PAIR_RULES)
def test_every_rule_for_pairs(trial, positive, negative):
    for distance in trial.some(DISTANCES):
        for truth in trial.some(everyday_truths(distance)[4::3]):
            calls = calls_of(distance, unit_of(truth), classes=6)
            for name in trial.some(PICKING):
                call = calls[name].but(positive=positive, negative=negative)
                check_tuples(truth, call, *trial.some(("mean", "none")))


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("offset", [-0.4, 0.3])
def test_an_offset_for_pairs(trial, offset, distance):
    """`negative="beyond"` of the objectives that pick."""
    for truth in trial.some(everyday_truths(distance)[1::3]):
        unit = unit_of(truth)
        rules = {"positive": "easy", "negative": "beyond", "offset": offset * unit}
        for name in trial.some(PICKING):
            check_tuples(truth, calls_of(distance, unit, classes=11)[name].but(**rules), "mean", "none")


@pytest.mark.parametrize(
    ("objective", "distance"),
    [
        (objective, distance)
        for objective, distance in product(OBJECTIVES, DISTANCES)
        if distance == "cosine" or not OBJECTIVE[objective].cosine
    ],
)
def test_numbers_small_and_large(trial, objective, distance):
    truths = everyday_truths(distance)[2::3]
    for truth in trial.some(truths) if trial.slow else truths:
        for call in trial.some(judge_of(objective).limits(distance, unit_of(truth)), 3):
            check_tuples(truth, call, *trial.some(("mean", "none")))


@pytest.mark.parametrize("name", NAMES)
def test_every_type(trial, name):
    for dtype in DTYPES:
        for candidates, distance in trial.some([*product((None, 77), DISTANCES_OF[name])]):
            batch = random_batch(59, 21, candidates, classes=7, dtype=dtype)
            if trial.slow:
                batch = random_batch(11, 6, candidates and 14, classes=3, dtype=dtype)
            reductions = trial.some(REDUCTIONS) if trial.slow else ("mean_nonzero", "none")
            trial.check(batch, distance, *reductions, names=(name,))


FACTS = {
    f"{objective}-{fact.__name__}": fact
    for objective in OBJECTIVES
    for fact in judge_of(objective).ON_EVERY_BACKEND
}


@pytest.mark.parametrize("fact", FACTS.values(), ids=FACTS)
def test_facts_about_one_objective(backend, fact: Callable[[Backend], None]):
    fact(backend)


# Sizes


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
def test_sizes(trial, distance):
    shapes = [*product((1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 17, 33), (1, 3, 17))]
    for count, width in shapes[::4] if trial.slow else shapes:
        dtype = (torch.float32, torch.float64)[(count + width) % 2]
        trial.check(random_batch(count, width, classes=max(2, count // 4), dtype=dtype), distance, "mean")


def test_sizes_around_tiles(trial):
    shapes = [(1, 1), (2, 16), (3, 2), (15, 31), (31, 16), (32, 17), (33, 32), (34, 1), (64, 15), (65, 3),
              (1, 5, 33), (5, 3, 32), (16, 17, 31), (33, 16, 65), (31, 8, 1)]  # fmt: skip
    for i, (count, width, *candidates) in enumerate(shapes):
        classes, dtype = max(2, max(count, *candidates, 0) // 4), (torch.float32, torch.float64)[i % 2]
        batch = random_batch(count, width, *candidates, classes=classes, dtype=dtype)
        trial.check(batch, DISTANCES[i % 3], "mean", names=STREAMS, few=2)


@too_large
@pytest.mark.parametrize("count", [95, 96, 97, 191, 192, 193, 289])
def test_sizes_around_blocks(trial, count):
    for width, distance, dtype in (
        (3, "euclidean", torch.float32),
        (9, "cosine", torch.float32),
        (5, ("euclidean", "cosine")[count % 2], torch.float64),
    ):
        batch = random_batch(count, width, classes=count // 10, dtype=dtype)
        trial.check(batch, distance, "none", names=STREAMS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_candidate_sets_around_blocks(trial, dtype):
    sizes = (1, 31, 33) if trial.slow else (1, 95, 96, 97, 193)
    for count, candidates in product(sizes, sizes):
        distance = ("euclidean", "cosine")[(count + candidates) % 2]
        batch = random_batch(count, 1 + (count + candidates) % 9, candidates, classes=9, dtype=dtype)
        trial.check(batch, distance, "mean", names=STREAMS)


@pytest.mark.parametrize("width", [2, 7, 8, 31, 33, *(() if SLOW else (128, 257))])
def test_widths(trial, width):
    for dtype, distance in trial.some([*product([torch.float32, torch.float64], DISTANCES)], 3):
        trial.check(random_batch(37, width, classes=6, dtype=dtype), distance, "mean")


@pytest.mark.parametrize("candidates", [None, 9])
@pytest.mark.parametrize("distance", DISTANCES)
def test_rows_without_dimensions_are_at_distance_zero(trial, distance, candidates):
    for dtype in DTYPES:
        trial.check(random_batch(14, 0, candidates, classes=3, dtype=dtype), distance, exact=True)
    # Of four rows each anchor has one positive and two negatives.
    batch = Batch(torch.ones(4, 0), torch.tensor([0, 1, 0, 1]))
    for objective in trial.some(OBJECTIVES):
        check_equal_rows(objective, batch, distance, 1, 2)


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
@pytest.mark.parametrize("size", [2, 17, 34] if SLOW else [2, 7, 8, 9, 10, 11, 17, 48])
def test_positives_few_and_many(trial, size, distance):
    """With candidates of their own an anchor has `size` positives, else one less."""
    if not trial.slow:
        trial.check(random_batch(3 * size + 1, 6, classes=3), distance, "none")
        trial.check(random_batch(7, 6, 3 * size, classes=3, with_self=False), distance, "none")
        return
    generator = torch.Generator().manual_seed(size)
    labels = torch.cat([torch.zeros(size, dtype=torch.int64), torch.arange(9) // 2 + 1])
    labels = labels[torch.randperm(len(labels), generator=generator)]
    emb = torch.randn(len(labels), 6, generator=generator)
    trial.check(Batch(emb, labels), distance, "none", names=STREAMS, few=2)
    trial.check(Batch(emb[:7] + 0.1, labels[:7], emb, labels), distance, "none", names=STREAMS, few=2)


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
def test_classes_of_very_different_size(trial, distance):
    generator = torch.Generator().manual_seed(2)
    sizes = (1, 2, 17, 5, 1, 9) if trial.slow else (1, 2, 65, 5, 1, 17, 9, 40)
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    shuffled = labels[torch.randperm(len(labels), generator=generator)]
    emb = torch.randn(len(labels), 9, generator=generator)
    for some in (labels, labels.flip(0), shuffled):
        trial.check(Batch(emb, some), distance, "mean")
    few = len(emb) // 3
    against = Batch(emb[:few], shuffled[:few], emb.roll(1, 0) * 1.5, labels)
    trial.check(against, distance, "mean")


@pytest.mark.parametrize("distance", DISTANCES)
def test_a_class_with_half_of_all_rows(trial, distance):
    generator = torch.Generator().manual_seed(3)
    half = 32 if trial.slow else 98
    labels = torch.cat([torch.zeros(half, dtype=torch.int64), torch.arange(half) // 10 + 1])
    labels = labels[torch.randperm(2 * half, generator=generator)]
    trial.check(Batch(torch.randn(2 * half, 12, generator=generator), labels), distance, "mean")


# Objectives of triplets work on strips of anchors where there are more than 12, or 48, positives on average.
TRIPLETS = [
    name for name, call in calls_of("cosine").items() if call.objective.name in ("batch_all", "semi_hard")
]


@too_large
@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("positives", [13, 48, 50])
def test_strips(trial, positives, distance):
    """On both sides of the limits, and of the edges of blocks."""
    generator = torch.Generator().manual_seed(positives)
    few = torch.arange(7)
    labels = torch.cat([torch.arange(2 * positives) % 2, few])
    labels = labels[torch.randperm(len(labels), generator=generator)]
    emb = torch.randn(len(labels), 6, generator=generator)
    emb[:10] = emb[10:20]
    dtype = DTYPES[positives % 4]
    trial.check(Batch(emb.to(dtype), labels), distance, "mean", "none", names=TRIPLETS)
    ref_emb = torch.cat([emb + 0.01, emb])
    self_index = torch.randint(-1, len(ref_emb), (30,), generator=generator)
    against = Batch(emb[:30], labels[:30], ref_emb, labels.repeat(2), self_index)
    trial.check(against, distance, "sum", "mean_nonzero", names=TRIPLETS)


@too_large
@pytest.mark.parametrize("distance", DISTANCES)
def test_ties_in_strips(trial, distance):
    """Thresholds and negatives lie on a few different numbers, and most of them in one cell of the grid."""
    cosine = distance == "cosine"
    for count, classes, candidates in ((102, 2, None), (20, 2, 110)):
        batch = lattice_batch(count, 3, candidates, cosine=cosine, classes=classes)
        trial.check(batch, distance, "mean", names=TRIPLETS, unit=1.0, exact=True)
    generator = torch.Generator().manual_seed(4)
    emb = torch.randn(102, 5, generator=generator)
    emb[0] *= 1e6
    trial.check(Batch(emb, torch.arange(102) % 2), distance, "mean", names=TRIPLETS)


@too_large
@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize(("spread", "apart"), [(0.03, 0), (0.3, 1.5), (30, 0)])
def test_the_soft_margin_of_many_positives(trial, spread, apart, distance):
    """Distances in one cell, in several, most of them beyond the thresholds, and in more cells than pay."""
    generator = torch.Generator().manual_seed(6)
    labels = torch.arange(240) % 3
    centres = apart * torch.randn(3, 7, generator=generator)
    emb = centres[labels] + spread * torch.randn(240, 7, generator=generator)
    soft = [name for name in TRIPLETS if calls_of("cosine")[name].options.get("loss") == "soft_margin"]
    assert soft
    trial.check(Batch(emb, labels), distance, "mean", "none", names=soft)
    trial.check(Batch(emb[:20], labels[:20], emb.flip(0), labels.flip(0)), distance, "mean", names=soft)


@too_large
@pytest.mark.parametrize("margin", [0.0, 1e-30, 1e30])
def test_margins_in_strips(trial, margin):
    generator = torch.Generator().manual_seed(5)
    batch = Batch(torch.randn(100, 5, generator=generator), torch.arange(100) % 2)
    for distance in DISTANCES:
        truth = Truth(batch, distance)
        for name in ("batch_all", "semi_hard"):
            check_tuples(truth, calls_of(distance)[name].but(margin=margin), *trial.some(REDUCTIONS)[:2])


# Labels, candidates and layouts


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.uint64])
def test_labels_of_any_integer_type(trial, dtype):
    batch = random_batch(20 if trial.slow else 60, 5, 30, classes=5)
    limits = torch.iinfo(dtype)
    table = torch.tensor([limits.min, limits.max, 2, 1, limits.max // 2], dtype=dtype)
    assert batch.ref_labels is not None
    other = replace(batch, labels=table[batch.labels], ref_labels=table[batch.ref_labels])
    for call in trial.calls("cosine"):
        trial.check_alike(run_tuples(other, call), run_tuples(batch, call))


def test_self_may_be_of_another_class(trial):
    """`self_index` takes that row out, whatever it is: like candidates without it, anchor by anchor."""
    generator = torch.Generator().manual_seed(4)
    batch = random_batch(9, 4, 30, classes=3, dtype=torch.float64, with_self=False)
    assert batch.ref_emb is not None
    assert batch.ref_labels is not None
    place = torch.randint(30, (9,), generator=generator)
    assert (batch.labels != batch.ref_labels[place]).any()
    assert (batch.labels == batch.ref_labels[place]).any()
    # A draw names candidates by their position.
    calls = [call.but(reduction="none") for call in calls_of("cosine").values() if not call.draws]
    for call in trial.some(calls, 1 if trial.slow else 3):
        losses, _, _ = run_tuples(replace(batch, self_index=place), call)
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
        trial.check(replace(batch, self_index=place), distance)
        sizes = (40, 3, 60) if trial.slow else (100, 3, 130)
        trial.check(replace(random_batch(*sizes, classes=12), self_index=None), distance, "mean")


def test_candidates_that_are_the_anchors(trial):
    count = 40 if trial.slow else 130
    batch = random_batch(count, 10, classes=9)
    against = replace(batch, ref_emb=batch.emb, ref_labels=batch.labels, self_index=torch.arange(count))
    for call in trial.calls("cosine", few=4):
        loss, gradients, _ = run_tuples(batch, call)
        again, parts, _ = run_tuples(against, call)
        torch.testing.assert_close(again, loss)
        torch.testing.assert_close(parts[0] + parts[1], gradients[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("value", "candidates"), cases((math.nan, math.inf), (None, 110), slow=3))
def test_ignored_rows_change_nothing(trial, value, candidates):
    batch = random_batch(120, 7, candidates, classes=7)
    if trial.slow:
        batch = random_batch(45, 7, candidates and 50, classes=7)
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
        for call in trial.calls(distance, classes=7):
            loss, gradients, _ = run_tuples(ignoring, call)
            assert not gradients[0][~kept].any()
            if not call.draws:  # which names rows by their position
                expected, expected_gradients, _ = run_tuples(without, call)
                trial.check_alike(
                    (loss, [gradients[0][kept]], None), (expected, expected_gradients[:1], None)
                )
        trial.check(ignoring, distance, "mean", names=STREAMS)


@pytest.mark.parametrize(("dtype", "layout"), cases(DTYPES, LAYOUTS[1:], slow=5))
def test_strides_change_nothing(trial, layout, dtype):
    for candidates in (None, 45):
        batch = random_batch(100, 13, candidates, classes=5, dtype=dtype)
        if trial.slow:
            batch = random_batch(18, 19, candidates and 21, classes=3, dtype=dtype)
        ref_emb = None if batch.ref_emb is None else laid_out(batch.ref_emb, layout)
        other = replace(batch, emb=laid_out(batch.emb, layout), ref_emb=ref_emb)
        for call in trial.calls("cosine"):
            assert everything(other, call) == everything(batch, call)


@pytest.mark.parametrize(
    ("dtype", "ref_dtype"), [(torch.float16, torch.float32), (torch.bfloat16, torch.float16),
                             (torch.float64, torch.float16), (torch.float32, torch.float64),
                             (torch.float16, torch.float64), (torch.float32, torch.bfloat16)]
)  # fmt: skip
def test_candidates_of_another_type(trial, dtype, ref_dtype):
    batch = random_batch(24, 10, 31)
    assert batch.ref_emb is not None
    batch = replace(batch, emb=batch.emb.to(dtype), ref_emb=batch.ref_emb.to(ref_dtype))
    for distance in DISTANCES:
        trial.check(batch, distance, "mean")


def test_gradients_of_one_side_alone(trial):
    batch = random_batch(20, 6, 30)
    assert batch.ref_emb is not None
    for call in trial.calls("cosine", few=4):

        def gradients(call: ManyTuples, *sides: int) -> tuple[Tensor, ...]:
            inputs = [batch.emb.detach().clone(), batch.ref_emb.detach().clone()]
            for side in sides:
                inputs[side].requires_grad_()
            arguments = {**call.arguments(batch), "ref_emb": inputs[1]}
            beta = [] if call.beta is None else [call.beta]
            loss = getattr(T, call.function)(inputs[0], batch.labels, *beta, **arguments)
            return torch.autograd.grad(loss, [inputs[side] for side in sides], torch.tensor(1.5))

        both = gradients(call, 0, 1)
        for side in (0, 1):
            (gradient,) = gradients(call, side)
            assert gradient.any()
            assert torch.equal(gradient, both[side])


def test_autocast_changes_nothing(trial):
    batch = random_batch(35, 20, 18)
    for call in trial.calls("cosine", few=4):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            inside = everything(batch, call)
        assert inside == everything(batch, call)


# Ties and duplicates


@pytest.mark.parametrize("distance", DISTANCES)
def test_ties_on_a_lattice(trial, distance):
    """Every sum on the way is exact, so that no negative may be mistaken for another."""
    shapes = [(2, 1, None), (13, 2, None), (32, 4, None), (61, 3, None), (100, 16, None), (197, 4, None),
              (9, 4, 50), (40, 17, 33), (65, 1, 7)]  # fmt: skip
    if trial.slow:
        shapes = [(13, 2, None), (34, 4, None), (17, 17, None), (9, 4, 34), (40, 1, 7)]
    for i, (count, width, candidates) in enumerate(shapes):
        batch = lattice_batch(count, width, candidates, cosine=distance == "cosine", classes=3 + count // 20)
        for dtype in trial.some(DTYPES) if count < 50 else (DTYPES[i % 4],):
            trial.check(batch.to(dtype), distance, "mean", "none", names=STREAMS, unit=1.0, exact=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_numbers_are_exact(trial, dtype):
    """Sums of squared distances on a lattice, and of their slopes, are whole numbers: no digit may differ."""
    calls = [call for objective in OBJECTIVES for call in judge_of(objective).whole_numbers()]
    shapes = ((61, 3, None), (150, 4, None), (40, 5, 33), (33, 2, 130))
    for count, width, candidates in ((34, 3, None), (20, 5, 33)) if trial.slow else shapes:
        batch = lattice_batch(count, width, candidates, classes=6).to(dtype)
        exact = batch.plain().to(torch.float64)
        for call in trial.some(calls, 2):
            call = call.but(distance="sqeuclidean", reduction="sum")
            loss, gradients, active = run_tuples(batch, call)
            expected, right, expected_active = plain_tuples(exact, call, None, torch.float64, gram=False)
            assert loss == expected
            assert active == expected_active
            for gradient, whole in zip(gradients, right, strict=True):
                assert torch.equal(gradient, whole.to(gradient.dtype))


@pytest.mark.parametrize(("distance", "dtype"), cases(DISTANCES, DTYPES, slow=5))
def test_duplicates_wherever_they_lie(trial, distance, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = ((34, 4, None), (5, 6, 34)) if trial.slow else ((110, 5, None), (50, 6, 110))
    for count, different, candidates in shapes:
        rows = torch.randn(different, 19, generator=generator) + 3
        emb = rows[torch.randint(different, (count,), generator=generator)].to(dtype)
        batch = Batch(emb, labels_of(count, 8, generator))
        if candidates:
            ref_emb = rows[torch.randint(different, (candidates,), generator=generator)].to(dtype)
            batch = replace(batch, ref_emb=ref_emb, ref_labels=labels_of(candidates, 8, generator))
        trial.check(batch, distance, "mean", few=2)


def check_equal_rows(objective: str, batch: Batch, distance: str, positives: int, negatives: int) -> None:
    """The loss of equal rows is known, and has no slope."""
    if distance != "cosine" and OBJECTIVE[objective].cosine:
        return
    for call, value in judge_of(objective).of_equal_rows(distance, positives, negatives):
        loss, (gradient,), _ = run_tuples(batch, call)
        torch.testing.assert_close(loss.double(), torch.tensor(value, dtype=torch.float64), rtol=1e-7, atol=0)
        assert not gradient.any()


@pytest.mark.parametrize(("distance", "dtype"), cases(DISTANCES, DTYPES, slow=5))
def test_all_rows_equal(trial, distance, dtype):
    generator = torch.Generator().manual_seed(1)
    size = 5 if trial.slow else 21
    row, labels = torch.randn(1, 23, generator=generator), labels_of(7 * size, 7, generator)
    batch = Batch(row.to(dtype).repeat(7 * size, 1), labels)
    for objective in trial.some(OBJECTIVES, 3):
        check_equal_rows(objective, batch, distance, size - 1, 6 * size)
    trial.check(batch, distance, "mean")


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_rows_by_cosine(trial, dtype):
    """S = 0 with everything; and no slope, on neither side."""
    batch = random_batch(40 if trial.slow else 110, 11, classes=9).to(dtype)
    batch.emb[::7] = 0
    batch.emb[3:6] = -0.0
    zero = (batch.emb == 0).all(1)
    trial.check(batch, "cosine", "mean", "none", few=4)
    for call in trial.calls("cosine", few=3):
        assert not run_tuples(batch, call)[1][0][zero].any()
    trial.check(Batch(torch.zeros(20, 4, dtype=dtype), torch.arange(20) % 3), "cosine", exact=True, few=2)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_kinks_have_no_slope(backend, reduction):
    """[0]₊ has derivative 0, and is not counted: distances 5 and 10, margins that make up the difference."""
    emb = torch.tensor([[0.0, 0], [3, 4], [-6, 8]])
    batch = Batch(emb[:1], torch.tensor([0]), ref_emb=emb[1:], ref_labels=torch.tensor([0, 1]))
    for call in (call for objective in OBJECTIVES for call in judge_of(objective).kinks()):
        loss, gradients, active = run_tuples(batch, call.but(reduction=reduction))
        assert not loss.any()
        assert not any(gradient.any() for gradient in gradients)
        assert not active


# Scales


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("scale", [1e18, 1e-18])
def test_huge_and_tiny_rows(trial, scale, distance):
    for candidates in (None, 50):
        batch = random_batch(20 if trial.slow else 60, 24, candidates, classes=6)
        ref_emb = None if batch.ref_emb is None else batch.ref_emb * scale
        trial.check(replace(batch, emb=batch.emb * scale, ref_emb=ref_emb), distance, "mean")


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_rows_whose_squares_leave_the_type(trial, scale, distance):
    batch = random_batch(20 if trial.slow else 60, 24, classes=6)
    trial.check(replace(batch, emb=batch.emb * scale), distance, "mean")
    wide = replace(batch, emb=batch.emb.double() * scale**5)
    trial.check(wide, distance, "mean", names=STREAMS)


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
def test_rows_of_very_different_length(trial, distance):
    generator = torch.Generator().manual_seed(5)
    count = 34 if trial.slow else 80
    batch = random_batch(count, 16, classes=5)
    lengths = 10.0 ** torch.randint(-15, 16, (count, 1), generator=generator)
    trial.check(replace(batch, emb=batch.emb * lengths), distance, "mean")


@pytest.mark.parametrize("distance", DISTANCES)
def test_an_outlier(trial, distance):
    """One row 10⁴ times as long as the others takes the digits of all products of centred rows."""
    for dtype, candidates in product([torch.float32, torch.float64], (None, 60)):
        batch = random_batch(40 if trial.slow else 110, 8, candidates, classes=10, dtype=dtype)
        batch.emb[37] *= 1e4
        trial.check(batch, distance, "mean")


@pytest.mark.parametrize(
    ("dtype", "distance"), cases((torch.float16, torch.float32, torch.float64), DISTANCES, slow=2)
)
def test_a_common_offset(trial, distance, dtype):
    offset = 100 if dtype == torch.float16 else 1e4
    for candidates in (None, 70):
        batch = random_batch(40 if trial.slow else 100, 30, candidates, classes=9, dtype=torch.float64)
        ref_emb = None if batch.ref_emb is None else batch.ref_emb + offset
        trial.check(replace(batch, emb=batch.emb + offset, ref_emb=ref_emb).to(dtype), distance, "mean")


@pytest.mark.parametrize(("spread", "distance"), cases((1e-2, 1e-4, 1e-6), DISTANCES, slow=2))
def test_rows_nearer_to_each_other_than_a_product_can_tell(trial, distance, spread):
    generator = torch.Generator().manual_seed(6)
    clusters, each = (5, 7) if trial.slow else (9, 13)
    emb = torch.randn(clusters, 20, generator=generator).repeat(each, 1)
    emb += spread * torch.randn(len(emb), 20, generator=generator)
    batch = Batch(emb, labels_of(len(emb), 4 if trial.slow else 12, generator))
    trial.check(batch, distance, "mean")
    tiny = spread if distance == "euclidean" else spread**2
    trial.check(batch, distance, "mean", unit=5 * tiny)


@pytest.mark.parametrize(("dtype", "distance"), cases(DTYPES, DISTANCES, slow=5))
def test_two_tight_clusters(trial, distance, dtype):
    """Half of a block's pairs are too close for products, some of them equal."""
    generator = torch.Generator().manual_seed(8)
    count, width = (14, 7) if trial.slow else (120, 37)
    place = torch.randint(2, (count,), generator=generator)
    emb = torch.randn(2, width, generator=generator, dtype=torch.float64)[place]
    emb += 1e-2 * torch.randn(count, width, generator=generator)
    emb[::5] = emb[0]
    labels = labels_of(count, 4 if trial.slow else 12, generator)
    few = count // 2
    for batch in (Batch(emb, labels), Batch(emb[:few], labels[:few], emb.roll(1, 0), labels)):
        trial.check(batch.to(dtype), distance, "mean", names=STREAMS, few=3)


@pytest.mark.parametrize(("dtype", "distance"), cases(DTYPES, DISTANCES, slow=5))
def test_equal_rows_in_two_places(trial, distance, dtype):
    """Negatives at distance 0 miss the whole margin, those in the other place nothing. No row is pulled."""
    each = 4 if trial.slow else 60
    emb = torch.tensor([[3.1, -0.7, 0.2], [-2.3, 0.9, 1.7]], dtype=dtype).repeat_interleave(each, 0)
    labels = torch.arange(2 * each) // 4
    call = ManyTuples("contrastive_loss", {"distance": distance, "pos_margin": 0.0, "neg_margin": 0.25})
    losses, (gradient,), _ = run_tuples(Batch(emb, labels), call.but(reduction="none"))
    assert losses.eq(0.25 * (each - 4)).all()
    assert not gradient.any()


# Nothing to compare, and values that are not finite


@pytest.mark.parametrize(("name", "dtype"), cases(ALONE, DTYPES, slow=5))
def test_nothing_to_compare_is_the_differentiable_zero(trial, name, dtype):
    batch = ALONE[name].to(dtype)
    if trial.slow:
        batch = replace(batch, emb=batch.emb[:40], labels=batch.labels[:40])
    for distance in DISTANCES:
        for call, reduction in trial.some([*product(calls_of(distance).values(), REDUCTIONS)]):
            loss, gradients, active = run_tuples(batch, call.but(reduction=reduction))
            assert loss.shape == ((len(batch.emb),) if reduction == "none" else ())
            assert not loss.any()
            assert not any(gradient.any() for gradient in gradients)
            assert not active


@pytest.mark.parametrize(("dtype", "value"), cases(DTYPES, (math.nan, math.inf, -math.inf), slow=5))
def test_values_that_are_not_finite_poison_everything(trial, value, dtype):
    for candidates, side, row in ((None, 0, 0), (None, 0, 39), (33, 0, 20), (33, 1, 32)):
        batch = random_batch(40, 9, candidates, classes=5, dtype=dtype)
        target = batch.emb if side == 0 else batch.ref_emb
        labels = batch.labels if side == 0 else batch.ref_labels
        assert target is not None
        assert labels is not None
        target[row, 4] = value
        for distance in trial.some(DISTANCES):
            for call, reduction in trial.some([*product(calls_of(distance).values(), ("mean", "none"))]):
                check_poisoned(batch, call.but(reduction=reduction))
            other = (int(labels[row]) + 1) % 5
            for call in trial.calls(distance, 2.0, few=1):
                check_poisoned(replace(batch, ignore_label=other), call.but(reduction="sum"))
        spared = replace(batch, ignore_label=int(labels[row]))
        for call in trial.calls("cosine", few=1):
            loss, gradients, _ = run_tuples(spared, call)
            assert loss.isfinite()
            assert all(gradient.isfinite().all() for gradient in gradients)


def test_poison_where_there_is_nothing_to_compare(trial):
    nobody = torch.ones(0, dtype=torch.int64)
    for emb in (torch.tensor([[math.nan]]), torch.tensor([[1.0], [math.inf]])):
        for call in trial.calls("cosine", few=3):
            check_poisoned(Batch(emb, torch.zeros(len(emb), dtype=torch.int64)), call)
            check_poisoned(Batch(emb, torch.arange(len(emb))), call)
            # Without anchors there is no loss to poison.
            without = Batch(torch.ones(0, 1), nobody, emb, torch.arange(len(emb)))
            loss, gradients, _ = run_tuples(without, call)
            assert loss == 0
            assert not gradients[1].any()


# Properties. An example has a backend of its own, so that instruction sets take turns.

backends = st.sampled_from(BACKENDS)


def small_batches(dtype: torch.dtype = torch.float64) -> st.SearchStrategy[Batch]:
    return st.builds(
        lambda seed, count, width, classes: random_batch(
            count, width, classes=classes, dtype=dtype, seed=seed
        ),
        st.integers(0, 10**6),
        st.integers(3, 20 if SLOW else 40),
        st.sampled_from([1, 2, 5, 16]),
        st.integers(2, 5),
    )


def any_call(distances: tuple[str, ...] = DISTANCES) -> st.SearchStrategy[ManyTuples]:
    calls = [call for distance in distances for call in calls_of(distance, 1.5).values()]
    return st.sampled_from([call for call in calls if not call.draws])


@hypothesis.settings(max_examples=8 if SLOW else 60 * len(BACKENDS))
@hypothesis.given(
    backend=backends, batch=small_batches(), call=any_call(), shuffle=st.randoms(use_true_random=False)
)
def test_the_order_of_rows_changes_nothing_but_the_order(backend, batch, call, shuffle):
    order = list(range(len(batch.emb)))
    shuffle.shuffle(order)
    other = Batch(batch.emb[order], batch.labels[order])
    with backend.in_use():
        losses, _, _ = run_tuples(batch, call.but(reduction="none"))
        shuffled, _, _ = run_tuples(other, call.but(reduction="none"))
        torch.testing.assert_close(shuffled, losses[order], rtol=1e-11, atol=1e-11)
        loss, gradients, _ = run_tuples(batch, call)
        again, other_gradients, _ = run_tuples(other, call)
    torch.testing.assert_close(again, loss, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(other_gradients[0], gradients[0][order], rtol=1e-9, atol=1e-10)


def scaled_call(call: ManyTuples, factor: float) -> ManyTuples:
    """Distances times `factor` and margins that follow."""
    margins = {
        name: call.options[name] * factor
        for name in ("margin", "pos_margin", "neg_margin", *(() if call.beta is None else ("alpha",)))
        if name in call.options
    }
    other = call.but(**margins)
    return other if call.beta is None else replace(other, beta=call.beta * factor)


@hypothesis.settings(max_examples=8 if SLOW else 60 * len(BACKENDS))
@hypothesis.given(backend=backends, batch=small_batches(), call=any_call(), power=st.integers(-20, 20))
def test_a_power_of_two_scales_every_digit(backend, batch, call, power):
    """Rows times 2^k make distances times 2^k, 4^k, or the same; margins must follow."""
    hypothesis.assume(call.options.get("loss") != "soft_margin")
    factor = {"euclidean": 2.0**power, "sqeuclidean": 4.0**power, "cosine": 1.0}[call.distance]
    with backend.in_use():
        loss, _, active = run_tuples(batch, call)
        scaled, _, scaled_active = run_tuples(
            replace(batch, emb=batch.emb * 2.0**power), scaled_call(call, factor)
        )
    assert scaled == loss * factor
    assert scaled_active == active


@hypothesis.settings(max_examples=8 if SLOW else 60 * len(BACKENDS))
@hypothesis.given(backend=backends, batch=small_batches(torch.float32), call=any_call())
def test_the_parts_add_up_to_the_sum(backend, batch, call):
    with backend.in_use():
        losses, _, _ = run_tuples(batch, call.but(reduction="none"))
        total, _, _ = run_tuples(batch, call.but(reduction="sum"))
    torch.testing.assert_close(losses.double().sum().float(), total, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES[::2] if SLOW else NAMES)
def test_gradcheck(trial, name):
    rows = (4, 2) if trial.slow else (6, 3)
    for distance in trial.some(DISTANCES_OF[name]):
        for candidates, reduction in trial.some(((None, "none"), (rows[0] + 1, "mean"))):
            batch = random_batch(*rows, candidates, classes=2, dtype=torch.float64, with_self=False, seed=11)
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_again(trial, dtype):
    batches = random_batch(34, 20, classes=9, dtype=dtype), random_batch(9, 33, 34, dtype=dtype)
    for distance in DISTANCES:
        for call, batch in product(trial.calls(distance, few=1), trial.some(batches)):
            assert everything(batch, call) == everything(batch, call)


def all_of(trial: Trial, batch: Batch) -> Callable[[], list[list[bytes]]]:
    calls = [call for distance in ("euclidean", "cosine") for call in trial.calls(distance, 1.2)]

    def results() -> list[list[bytes]]:
        return [everything(batch, call.but(reduction=REDUCTIONS[i % 4])) for i, call in enumerate(calls)]

    return results


@pytest.mark.skipif(SLOW, reason="the interpreter's kernels have no threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_on_any_number_of_threads(trial, dtype):
    """Large enough that several threads do take part, forward and backward."""
    for batch in (
        random_batch(523, 20, classes=60, dtype=dtype),
        random_batch(201, 33, 502, classes=40, dtype=dtype),
        random_batch(423, 20, classes=3, dtype=dtype),
    ):
        results = all_of(trial, batch)
        expected = results()
        assert results() == expected
        for count in (2, 3, 5):
            torch.set_num_threads(count)
            assert results() == expected
        torch.set_num_threads(1)


@pytest.mark.skipif(SLOW, reason="the interpreter changes triton.language, which all Python threads share")
def test_several_python_threads_at_once(trial):
    torch.set_num_threads(2)
    batches = [random_batch(n, d, classes=9, seed=n) for n, d in ((300, 32), (217, 33), (64, 128), (5, 3))]
    results = [all_of(trial, batch) for batch in batches]
    expected = [result() for result in results]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            assert list(pool.map(lambda result: result(), results)) == expected


MEMORY = """
import torch
import tripletops as T

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024

def run(count, function, options, learned, classes):
    emb = torch.randn(count, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.arange(count) % (classes or count // 4)
    beta = [torch.tensor(1.2, requires_grad=True)] if learned else []
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


@pytest.mark.skipif(SLOW, reason="tests/backends/triton/test_memory.py counts what Triton's kernels take")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_square_of_the_batch_is_held():
    """6000² numbers would be 144 MB."""
    by_distance = [*calls_of("euclidean").values(), *calls_of("cosine").values()]
    calls = [(call.function, call.given, call.beta is not None, 0) for call in by_distance]
    calls += [(function, {}, False, 2) for function in ("batch_all_loss", "semi_hard_loss")]
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
def any_batches(draw: st.DrawFn) -> Batch:
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


@hypothesis.settings(max_examples=30 if SLOW else 250 * len(BACKENDS))
@hypothesis.given(
    backend=backends,
    batch=any_batches(),
    words=st.sampled_from(EVERY_CALL),
    rules=st.sampled_from(PAIR_RULES),
    reduction=st.sampled_from(REDUCTIONS),
    reach=st.sampled_from([0.0, 0.3, 1.0, 30.0]),
    by_class=st.booleans(),
)
def test_anything(backend, batch, words, rules, reduction, reach, by_class):
    name, distance = words
    truth = Truth(batch, distance)
    call = calls_of(distance, reach * unit_of(truth), classes=7 * by_class)[name]
    if "negative" in call.options:
        call = call.but(positive=rules[0], negative=rules[1])
    with backend.in_use():
        check_tuples(truth, call, reduction)
