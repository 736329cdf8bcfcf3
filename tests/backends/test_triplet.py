"""The public functions against the float64 oracle: one list of cases, on every backend that can run.

A test that takes `backend` runs on each of those on trial. Where the backend cannot bear everything (Triton's
interpreter, and the instruction sets of the cpu beside the best one), words take turns: every rule meets
every distance, and every loss every reduction, but not all of them each other.
"""

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
from hypothesis import strategies as st
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.reducers import MeanReducer
from torch import Tensor

from tests.support.backends import SLOW, in_turn
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
from tests.support.calls import (
    DEVICE,
    DISTANCES,
    DTYPES,
    LOSSES,
    NEGATIVES,
    REDUCTIONS,
    T,
    TripletOptions,
    bits,
    mined,
    run_loss,
)
from tests.support.cases import CASES, everyday
from tests.support.checks import check, check_poisoned
from tests.support.oracle import Truth, oracle_picks
from tests.support.words import RULES, every_option, own_checks
from tripletops._words import LOSS, NEGATIVE
from tripletops.backends import FORCED

CASES_BY_DISTANCE = [(case, distance) for case in CASES for distance in case.distances]
RULES_BY_DISTANCE = [*product(RULES, DISTANCES)]


@cache
def everyday_truths(distance: str) -> list[Truth]:
    return [Truth(batch, distance) for batch in everyday()]


@pytest.mark.parametrize(("rules", "distance"), RULES_BY_DISTANCE, ids=str)
def test_every_rule(backend, rules, distance):
    turn = RULES_BY_DISTANCE.index((rules, distance))
    truths = [truth for truth in everyday_truths(distance) if backend.bears(truth.batch)]
    for i, truth in enumerate(backend.some(truths, turn)):
        options = every_option(distance, turn + i)
        few = len(options) // 4 if backend.every_word else 1
        check(truth, rules.positive, rules.negative, *in_turn(options, turn + i, few), **rules.numbers)


@pytest.mark.parametrize(("distance", "loss"), [(name, loss) for name in LOSSES for loss in LOSSES[name]])
def test_every_loss(backend, distance, loss):
    for turn, (reduction, dtype) in enumerate(zip(REDUCTIONS, DTYPES, strict=True)):
        truth = Truth(random_batch(11, 6, classes=3, dtype=dtype), distance)
        rules = RULES[(turn * 11 + LOSSES["cosine"].index(loss)) % len(RULES)]
        options = [option for i in range(3) for option in every_option(distance, i) if option.loss == loss]
        some = backend.some([option for option in options if option.reduction == reduction], turn, few=2)
        check(truth, rules.positive, rules.negative, *some, **rules.numbers)


@pytest.mark.parametrize(("case", "distance"), CASES_BY_DISTANCE, ids=str)
def test_every_case(backend, case, distance):
    for cannot, reason in case.plain_cannot if backend.name == "reference" else ():
        if cannot == distance:
            pytest.skip(reason)
    if backend.slow and case.not_slow:
        pytest.skip(case.not_slow)
    start = CASES.index(case)
    for turn, batch in enumerate(case.batches(), start):
        if not (backend.bears(batch) and case.meets(distance, backend, turn)):
            continue
        truth = Truth(batch, distance)
        for rules, options in case.words(distance, backend, turn):
            check(truth, rules.positive, rules.negative, *options, **rules.numbers)


@pytest.mark.parametrize("promise", own_checks())
def test_what_a_word_alone_promises(backend, promise):
    promise(backend)


# Ties


@pytest.mark.parametrize(("rules", "distance"), RULES_BY_DISTANCE, ids=str)
def test_ties_on_a_lattice_go_to_the_first(backend, rules, distance):
    """Every sum on the way is exact, so the picks must be the oracle's, one by one."""
    shapes = [(2, 1, None), (13, 2, None), (32, 4, None), (61, 3, None), (35, 17, None), (17, 3, 67),
              (9, 4, 50), (40, 17, 33), (65, 1, 7), (100, 16, None), (171, 4, None)]  # fmt: skip
    turn = RULES_BY_DISTANCE.index((rules, distance))
    truths = [lattice_truth(*shape, dtype, distance) for shape, dtype in product(shapes, DTYPES)]
    truths = [truth for truth in truths if backend.bears(truth.batch)]
    for i, truth in enumerate(backend.some(truths, turn)):
        options = [TripletOptions(distance)] if i % 4 == turn % 4 else []
        triplets = check(truth, rules.positive, rules.negative, *options, **rules.numbers)
        p, n = oracle_picks(truth, rules.positive, rules.negative, **rules.numbers)
        assert torch.equal(triplets.positive, p)
        assert torch.equal(triplets.negative, n)


@cache
def lattice_truth(count: int, width: int, candidates: int | None, dtype: torch.dtype, distance: str) -> Truth:
    batch = lattice_batch(count, width, candidates, cosine=distance == "cosine")
    return Truth(batch.to(dtype), distance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distance", DISTANCES)
def test_all_rows_equal(backend, distance, dtype):
    generator = torch.Generator().manual_seed(1)
    count = 37 if backend.slow else 150
    emb = torch.randn(1, 23, generator=generator).to(dtype).repeat(count, 1)
    labels = labels_of(count, 7, generator)
    batch = Batch(emb, labels)
    others = ~torch.eye(count, dtype=torch.bool)
    first_positive = ((labels[:, None] == labels) & others).int().argmax(1)  # the first 1 of each row
    first_negative = (labels[:, None] != labels).int().argmax(1)
    words = [*product(["hard", "easy"], ["hard", "easy"])]
    for positive, negative in backend.some(words, DTYPES.index(dtype)):
        triplets = mined(batch, positive, negative, distance)
        assert torch.equal(triplets.positive, first_positive)
        assert torch.equal(triplets.negative, first_negative)
        assert not triplets.d_ap.any()
        assert not triplets.d_an.any()
        loss, (gradient,), _ = run_loss(batch, positive, negative, TripletOptions(distance, margin=0.25))
        assert loss == 0.25
        assert not gradient.any()
    truth = Truth(batch, distance)
    for rules in backend.some(RULES, DTYPES.index(dtype)):
        triplets = check(truth, rules.positive, rules.negative, **rules.numbers)
        expected = oracle_picks(truth, rules.positive, rules.negative, **rules.numbers)
        assert torch.equal(triplets.negative, expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_rows_by_cosine(backend, dtype):
    """S = 0 with everything, so everything ties; and no slope, on neither side."""
    turn = DTYPES.index(dtype)
    batch = random_batch(35 if backend.slow else 90, 11, classes=5).to(dtype)
    batch.emb[::7] = 0
    batch.emb[3:6] = -0.0
    zero = (batch.emb == 0).all(1)
    nothing_else = Truth(Batch(torch.zeros(20, 4, dtype=dtype), torch.arange(20) % 3), "cosine")
    truth, options = Truth(batch, "cosine"), every_option("cosine", turn)
    for i, rules in enumerate(backend.some(RULES, turn, few=3)):
        for each in (truth, nothing_else):
            some = in_turn(options, i + turn, 2 if backend.every_word else 1)
            triplets = check(each, rules.positive, rules.negative, *some, **rules.numbers)
            p, n = oracle_picks(each, rules.positive, rules.negative, **rules.numbers)
            at = zero if each is truth else slice(None)
            assert torch.equal(triplets.positive[at], p[at])
            assert torch.equal(triplets.negative[at], n[at])
            assert (triplets.d_ap[at] == 1).all()
    for option in backend.some(options, turn, few=3):
        assert not run_loss(batch, "hard", "hard", option)[1][0][zero].any()


def test_the_kink_has_no_slope(backend):
    """On a lattice d_ap − d_an + margin can be exactly 0."""
    emb, labels = torch.tensor([[0.0, 0], [3, 4], [-6, 8], [20, 0]]), torch.tensor([0, 0, 1, 2])
    # Anchor 0: 5 − 10 + 5; anchor 1: 5 − √(81+16) + 5 > 0
    options = TripletOptions(reduction="none", margin=5.0)
    losses, (gradient,), _ = run_loss(Batch(emb, labels), "hard", "hard", options)
    assert losses[0] == 0
    assert losses[1] > 0
    assert gradient.any()
    only_first = T.batch_hard_loss(emb.requires_grad_(), labels, margin=5.0, reduction="none")[0]
    only_first.backward()
    assert emb.grad is not None
    assert not emb.grad.any()


# Labels


def test_the_order_of_rows_changes_nothing_but_the_order(backend):
    batch = random_batch(61 if backend.slow else 101, 12, classes=13)
    order = torch.randperm(len(batch.emb), generator=torch.Generator().manual_seed(3))
    options = TripletOptions(reduction="none")
    shuffled = Batch(batch.emb[order], batch.labels[order])
    for negative in backend.some([word for word in NEGATIVES if not NEGATIVE[word].draws], 1):
        losses, _, _ = run_loss(batch, "easy", negative, options)
        again, _, _ = run_loss(shuffled, "easy", negative, options)
        torch.testing.assert_close(again, losses[order], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "dtype", [getattr(torch, f"{sign}int{size}") for sign in ("", "u") for size in (8, 16, 32, 64)]
)
def test_labels_of_any_integer_type(backend, dtype):
    batch = random_batch(40, 5, 30, classes=5)
    expected = bits(*mined(batch, "easy", "hard", "euclidean"))
    limits = torch.iinfo(dtype)
    values = [limits.min, limits.max, 2, 1, limits.max // 2]
    table = torch.tensor(values, dtype=dtype)
    assert batch.ref_labels is not None
    assert batch.self_index is not None
    labels, ref_labels = table[batch.labels], table[batch.ref_labels]
    given = replace(batch, labels=labels, ref_labels=ref_labels)
    assert bits(*mined(given, "easy", "hard", "euclidean")) == expected
    for which, value in backend.some([*enumerate(values)], dtype.itemsize):
        some = replace(given, ignore_label=value)
        like = replace(batch, ignore_label=which)
        assert bits(*mined(some, "hard", "easy", "cosine")) == bits(*mined(like, "hard", "easy", "cosine"))
    short = replace(batch, self_index=batch.self_index.to(torch.int32))
    assert bits(*mined(short, "easy", "hard", "euclidean")) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALONE)
def test_nothing_to_compare_is_the_differentiable_zero(backend, name, dtype):
    batch, turn = ALONE[name].to(dtype), [*ALONE].index(name) * len(DTYPES) + DTYPES.index(dtype)
    words = RULES_BY_DISTANCE
    for i, (rules, distance) in enumerate(backend.some(words, turn)):
        options = every_option(distance, turn)
        for option in in_turn(options, i, 4 if backend.every_word else 1):
            loss, gradients, _ = run_loss(batch, rules.positive, rules.negative, option, **rules.numbers)
            assert loss.shape == ((len(batch.emb),) if option.reduction == "none" else ())
            assert not loss.any()
            assert not any(gradient.any() for gradient in gradients)
        assert not mined(batch, rules.positive, rules.negative, distance, **rules.numbers).valid.any()


@pytest.mark.parametrize("candidates", [None, 9])
@pytest.mark.parametrize("distance", DISTANCES)
def test_rows_without_dimensions_are_at_distance_zero(backend, distance, candidates):
    batch = random_batch(14, 0, candidates, classes=3)
    turn = DISTANCES.index(distance) + 3 * (candidates is None)
    options = every_option(distance, turn)
    for i, (rules, dtype) in enumerate(backend.some([*product(RULES, DTYPES)], turn, few=5)):
        some = in_turn(options, i + turn, 2 if backend.every_word else 1)
        check(Truth(batch.to(dtype), distance), rules.positive, rules.negative, *some, **rules.numbers)
    triplets = mined(batch, "hard", "hard", distance)
    assert triplets.valid.all()
    assert not triplets.d_ap.any()


# Layouts and types


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_change_nothing(backend, layout, dtype):
    turn = LAYOUTS.index(layout) + DTYPES.index(dtype)
    for candidates, distance in backend.some([*product((None, 45), DISTANCES)], turn):
        batch = random_batch(38, 13, candidates, classes=5, dtype=dtype)
        ref_emb = None if batch.ref_emb is None else laid_out(batch.ref_emb, layout)
        other = replace(batch, emb=laid_out(batch.emb, layout), ref_emb=ref_emb)
        assert torch.equal(other.emb, batch.emb)
        for rules in in_turn(RULES, turn, 3 if backend.every_word else 1):
            words, options = rules[:2], TripletOptions(distance, reduction="none")
            outcomes = []
            for given in (batch, other):
                loss, gradients, _ = run_loss(given, *words, options, **rules.numbers)
                outcomes.append(bits(*mined(given, *words, distance, **rules.numbers), loss, *gradients))
            assert outcomes[0] == outcomes[1]


def test_the_gradient_of_an_expanded_cotangent(backend):
    """A sum's gradient comes expanded."""
    batch = random_batch(30, 6, classes=4)
    emb = batch.emb.clone().requires_grad_()
    T.triplet_loss(emb, batch.labels, reduction="none").sum().backward()
    assert emb.grad is not None
    expected = run_loss(batch, "hard", "hard", TripletOptions(reduction="sum"))[1][0] / 1.5
    torch.testing.assert_close(emb.grad, expected, rtol=0.01, atol=1e-3)


def test_gradients_of_one_side_alone(backend):
    batch = random_batch(20, 6, 30)
    both = run_loss(batch, "hard", "hard", TripletOptions())[1]
    assert batch.ref_emb is not None
    for side in (0, 1):
        emb, ref_emb = batch.emb.detach(), batch.ref_emb.detach()
        wanted = (emb, ref_emb)[side].requires_grad_()
        loss = T.triplet_loss(emb, batch.labels, **{**batch.options(), "ref_emb": ref_emb})
        (gradient,) = torch.autograd.grad(loss, wanted, torch.tensor(1.5))
        assert torch.equal(gradient, both[side])
        emb.requires_grad_(False), ref_emb.requires_grad_(False)
    assert not T.triplet_loss(batch.emb, batch.labels, **batch.options()).requires_grad
    differentiated = replace(batch, emb=batch.emb.requires_grad_())
    assert not mined(differentiated, "hard", "hard", "cosine").d_ap.requires_grad
    # The same tensor on both sides receives the sum of both.
    emb = batch.emb.detach().clone().requires_grad_()
    T.batch_hard_loss(
        emb, batch.labels, ref_emb=emb, ref_labels=batch.labels, self_index=torch.arange(20)
    ).backward()
    alone = Batch(batch.emb.detach(), batch.labels)
    expected = run_loss(alone, "hard", "hard", TripletOptions())[1][0] / 1.5
    torch.testing.assert_close(emb.grad, expected)


# Values that are not finite


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_poison_everything(backend, value, dtype):
    places = ((None, 0, 0), (None, 0, 39), (33, 0, 20), (33, 1, 32))
    start = 3 * DTYPES.index(dtype) + int(math.isinf(value)) + int(value < 0)
    for turn, (candidates, side, row) in enumerate(backend.some(places, start), 4 * start):
        batch = random_batch(40, 9, candidates, classes=5, dtype=dtype)
        target, labels = (batch.emb, batch.labels) if side == 0 else (batch.ref_emb, batch.ref_labels)
        assert target is not None
        assert labels is not None
        target[row, 4] = value
        own = int(labels[row])
        for distance in DISTANCES if backend.every_word else in_turn(DISTANCES, turn, 1):
            options = every_option(distance, turn)
            for i, rules in enumerate(in_turn(RULES, turn, 8 if backend.every_word else 1)):
                words = rules[:2]
                for option in in_turn(options, turn + i, 2 if backend.every_word else 1):
                    check_poisoned(batch, *words, option, **rules.numbers)
            # A class that is ignored stays out of it, and so does its row.
            option = in_turn(options, turn, 1)[0]
            check_poisoned(replace(batch, ignore_label=(own + 1) % 5), *words, option, **rules.numbers)
            check(Truth(replace(batch, ignore_label=own), distance), *words, option, **rules.numbers)


def test_poison_where_there_is_nothing_to_compare(backend):
    nobody = torch.ones(0, dtype=torch.int64)
    for emb in (torch.tensor([[math.nan]]), torch.tensor([[1.0], [math.inf]])):
        own, options = torch.arange(len(emb)), TripletOptions()
        for turn, batch in enumerate(
            (Batch(emb, torch.zeros_like(own)), Batch(emb, own), Batch(emb, own, torch.ones(0, 1), nobody))
        ):
            for rules in backend.some(RULES, turn, few=2):
                check_poisoned(batch, rules.positive, rules.negative, options, **rules.numbers)
        # Without anchors there is no loss to poison.
        loss, gradients, _ = run_loss(Batch(torch.ones(0, 1), nobody, emb, own), "hard", "hard", options)
        assert loss == 0
        assert not gradients[1].any()


# Gradients


@pytest.mark.skipif(SLOW, reason="gradcheck makes some twenty calls for each combination of words")
@pytest.mark.parametrize(("rules", "distance"), RULES_BY_DISTANCE, ids=str)
def test_gradcheck(rules, distance):
    for candidates, reduction in ((None, "none"), (7, "mean")):
        batch = random_batch(6, 3, candidates, classes=2, dtype=torch.float64, seed=11)
        inputs = [batch.emb.requires_grad_()]
        if batch.ref_emb is not None:
            inputs.append(batch.ref_emb.requires_grad_())
        for loss in LOSSES[distance]:
            words = TripletOptions(distance, loss, reduction, margin=0.7, temperature=0.5).options()
            options = {**batch.options(), **words, **rules.numbers}
            options |= {"positive": rules.positive, "negative": rules.negative}

            def call(emb: Tensor, ref_emb: Tensor | None = None, options=options, batch=batch) -> Tensor:
                return T.triplet_loss(emb, batch.labels, **{**options, "ref_emb": ref_emb})

            assert torch.autograd.gradcheck(call, inputs)


# For other libraries


@pytest.mark.parametrize("candidates", [False, True])
def test_triplets_for_the_losses_of_others(candidates):
    """That of pytorch-metric-learning gives the same value; it would take -1 for the last row."""
    batch = random_batch(23, 6, 19 if candidates else None, classes=5, with_self=False)
    batch.labels[7] = 99  # an anchor without a positive
    emb = batch.emb.requires_grad_()
    ref = {"ref_emb": batch.ref_emb, "ref_labels": batch.ref_labels} if candidates else {}
    rules = {"positive": "easy", "negative": "hard"}
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
        some = {"negative": negative, "temperature": 0.3, "seed": 5, **ref}
        assert torch.equal(
            T.easy_positive_loss(emb, labels, **some),
            T.triplet_loss(emb, labels, positive="easy", loss="second_order", **some),
        )
    for function, distance in ((T.batch_hard_loss, "euclidean"), (T.triplet_loss, "euclidean")):
        assert torch.equal(function(emb, labels), function(emb, labels, distance=distance))
    for loss in (name for name, word in LOSS.items() if word.cosine):
        assert torch.equal(
            T.triplet_loss(emb, labels, loss=loss), T.triplet_loss(emb, labels, loss=loss, distance="cosine")
        )


def test_autocast_changes_nothing(backend):
    """The arithmetic inside is nobody else's to choose."""
    batch, options = random_batch(35, 20, 18), TripletOptions("cosine", "soft_margin")
    for rules in backend.some(RULES, 0):
        expected = run_loss(batch, rules.positive, rules.negative, options, **rules.numbers)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss, gradients, _ = run_loss(batch, rules.positive, rules.negative, options, **rules.numbers)
        assert bits(loss, *gradients) == bits(expected[0], *expected[1])
    weight = torch.randn(20, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        emb = batch.emb @ weight
        loss = T.batch_hard_loss(emb, batch.labels)
    assert (emb.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.any()


# Repetition, threads, forks


def everything(batch: Batch, start: int = 0, step: int = 1) -> list[bytes]:
    """Every rule, with a distance and a loss in turn; with a step, every other rule, or fewer."""
    result = []
    for turn, rules in [*enumerate(RULES)][start::step]:
        distance = DISTANCES[turn % len(DISTANCES)]
        (options,) = in_turn(every_option(distance), turn, 1)
        loss, gradients, _ = run_loss(batch, rules.positive, rules.negative, options, **rules.numbers)
        result += bits(*mined(batch, rules.positive, rules.negative, distance, **rules.numbers))
        result += bits(loss, *gradients)
    return result


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_again(backend, dtype):
    def outcome(turn: int, batch: Batch) -> list[bytes]:
        rules, distance = RULES_BY_DISTANCE[turn % len(RULES_BY_DISTANCE)]
        options = TripletOptions(distance)
        loss, gradients, _ = run_loss(batch, rules.positive, rules.negative, options, **rules.numbers)
        triplets = mined(batch, rules.positive, rules.negative, distance, **rules.numbers)
        return bits(*triplets, loss, *gradients)

    turns = range(DTYPES.index(dtype), 4 * len(RULES), 4)
    batches = (random_batch(50, 20, dtype=dtype), random_batch(18, 33, 40, dtype=dtype))
    for turn, batch in product(backend.some(turns, DTYPES.index(dtype)), batches):
        assert outcome(turn, batch) == outcome(turn, batch)


@pytest.mark.skipif(FORCED == "reference", reason="plain torch splits its sums by the number of threads")
@pytest.mark.skipif(FORCED == "triton", reason="about the threads of the cpu's kernels")
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_on_any_number_of_threads(dtype):
    """Large enough that two threads do take part, in the scan and in the gradient."""
    for batch in (
        random_batch(1031, 97, classes=60, dtype=dtype),
        random_batch(263, 150, 911, classes=40, dtype=dtype),
    ):
        some = (DTYPES.index(dtype) % 2, 2)
        torch.set_num_threads(1)
        expected = everything(batch, *some)
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert everything(batch, *some) == expected


@pytest.mark.skipif(FORCED == "triton", reason="about the threads of the cpu's kernels")
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
    loss = T.triplet_loss(emb, labels, positive="easy", negative="hard")
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
@pytest.mark.skipif(FORCED == "triton", reason="about the threads of the cpu's kernels")
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


@pytest.mark.skipif(SLOW, reason="784 columns are too many")
def test_handwritten_digits(backend, shared_data):
    with gzip.open(shared_data / "mnist" / "t10k-images-idx3-ubyte.gz") as file:
        images = torch.frombuffer(bytearray(file.read(16 + 131 * 784)[16:]), dtype=torch.uint8)
    with gzip.open(shared_data / "mnist" / "t10k-labels-idx1-ubyte.gz") as file:
        labels = torch.frombuffer(bytearray(file.read(8 + 131)[8:]), dtype=torch.uint8)
    emb = images.view(131, 784).float() / 255
    for turn, distance in enumerate(DISTANCES):
        truth = Truth(Batch(emb, labels), distance)
        for rules in backend.some(RULES, turn, few=3):
            check(truth, rules.positive, rules.negative, TripletOptions(distance), **rules.numbers)


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


@st.composite
def options(draw: st.DrawFn) -> TripletOptions:
    distance = draw(st.sampled_from(DISTANCES))
    turn = draw(st.integers(0, 5))
    margin = draw(st.sampled_from([0.0, 0.2, 1.0, 30.0]))
    temperature = draw(st.sampled_from([0.05, 0.5, 1.0, 4.0]))
    chosen = draw(st.sampled_from(every_option(distance, turn)))
    numbers = {**chosen.numbers, "margin": margin, "temperature": temperature}
    return TripletOptions(distance, chosen.loss, chosen.reduction, **numbers)


@hypothesis.settings(max_examples=30 if SLOW else 400)
@hypothesis.given(batch=batches(), rules=st.sampled_from(RULES), options=options())
def test_anything(batch, rules, options):
    truth = Truth(batch, options.distance)
    if truth.finite:
        check(truth, rules.positive, rules.negative, options, **rules.numbers)
    else:
        check_poisoned(batch, rules.positive, rules.negative, options, **rules.numbers)
