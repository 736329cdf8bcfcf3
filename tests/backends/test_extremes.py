"""Finite rows of any size: tiny ones, and some far away from all others.

Integers times a power of two are exact down to the last subnormal number. So a batch of tiny rows can be
compared with the same batch at its ordinary size: the derivative of a euclidean distance is the same, and
that of a cosine is larger by that power.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.backends import SLOW, Backend
from tests.support.batches import Batch, labels_of
from tests.support.calls import DTYPES, T, TripletOptions
from tests.support.checks import check
from tests.support.oracle import Truth
from tripletops import reference
from tripletops._words import FUNCTION, OBJECTIVE, Choice, Function

# The calls, from `_words`

ALWAYS = 1000.0  # a margin that every pair of the integers below is within


class LossCall(NamedTuple):
    function: str
    options: dict[str, Any]

    def __str__(self) -> str:
        return " ".join([self.function, *(word for word in self.options.values() if isinstance(word, str))])

    @property
    def picks_one(self) -> bool:
        return FUNCTION[self.function].objective == "triplet"

    def loss(self, emb: Tensor, labels: Tensor, **options: Any) -> Tensor:
        learned = OBJECTIVE[FUNCTION[self.function].objective].learned
        start = () if learned is None else (learned.start,)
        loss: Tensor = getattr(T, self.function)(emb, labels, *start, **{**self.options, **options})
        return loss

    def gradient(self, emb: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """(loss, its gradient)."""
        emb = emb.clone().requires_grad_()
        loss = self.loss(emb, labels, reduction="sum", **options)
        loss.backward()
        assert emb.grad is not None
        return loss.detach(), emb.grad


def choices_of(function: Function) -> dict[str, Choice]:
    return {choice.name: choice for choice in function.choices}


def without_draws(function: Function, word: str) -> dict[str, str]:
    """`word` instead of rules that are random by default."""
    rules = (choice for choice in function.choices if choice.default is not None)
    return {choice.name: word for choice in rules if choice.table[choice.default].draws}


LOSSES = [function for function in FUNCTION.values() if function.name != "mine"]
OF_ANY_DISTANCE = [function for function in LOSSES if "distance" in choices_of(function)]


def euclidean_calls(**margins: float) -> list[LossCall]:
    """Every loss that is linear in distances, with those of the margins that it has."""
    calls = []
    for function in OF_ANY_DISTANCE:
        options: dict[str, Any] = {"loss": "margin"} if "loss" in choices_of(function) else {}
        options |= without_draws(function, "all")
        options |= {each.name: margins[each.name] for each in function.options() if each.name in margins}
        calls.append(LossCall(function.name, options))
    return calls


def with_all_margins(margin: float) -> list[LossCall]:
    return euclidean_calls(margin=margin, neg_margin=margin, alpha=margin)


def cosine_calls() -> list[LossCall]:
    """Every function and, of each objective, every loss that it has."""
    calls = {}
    for function in LOSSES:
        choices = choices_of(function)
        options = {"distance": "cosine"} if "distance" in choices else {}
        options |= without_draws(function, "hard")
        calls[function.name, None] = LossCall(function.name, options)
        for word in choices["loss"].words if "loss" in choices else ():
            calls.setdefault((function.objective, word), LossCall(function.name, {**options, "loss": word}))
    return [*calls.values()]


def soft_margin_calls() -> list[LossCall]:
    functions = [each for each in OF_ANY_DISTANCE if "loss" in choices_of(each)]
    return [LossCall(function.name, {"loss": "soft_margin"}) for function in functions]


EUCLIDEAN, COSINE = with_all_margins(ALWAYS), cosine_calls()
every_euclidean_call = pytest.mark.parametrize("call", EUCLIDEAN, ids=str)


# Tiny rows

# A power of two that makes subnormal numbers of the integers up to 8.
TINY = {torch.float16: -22, torch.bfloat16: -131, torch.float32: -147, torch.float64: -1072}


def integers(count: int, width: int) -> tuple[Tensor, Tensor]:
    """No row of zeros, none that equals another, and as many classes as there are rows in one."""
    rows = torch.randint(-8, 9, (count, width), generator=torch.Generator().manual_seed(count)).double()
    rows[:, 0] = torch.arange(count) % 15 + 1
    return rows, torch.arange(count) // 3


def tolerance_of(dtype: torch.dtype) -> float:
    return 1e-12 if dtype == torch.float64 else 1e-5 + torch.finfo(dtype).eps


def skip_if_converted_wrongly(backend: Backend, dtype: torch.dtype) -> None:
    if backend.slow and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter converts subnormal bfloat16 numbers wrongly")


@every_euclidean_call
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_subnormal_rows(backend, call, dtype):
    skip_if_converted_wrongly(backend, dtype)
    rows, labels = integers(12, 6)
    _, ordinary = call.gradient(rows, labels)
    loss, tiny = call.gradient((rows * 2.0 ** TINY[dtype]).to(dtype), labels)
    assert loss.isfinite()
    if call.function == "semi_hard_loss":  # distances with few digits tie, and ties are not strictly farther
        assert tiny.isfinite().all()
        return
    # Triton divides by distances as they are reported, which here have five bits in float32 and float64.
    digits = 0.1 if backend.name == "triton" and dtype in (torch.float32, torch.float64) else 0.0
    allowed = max(tolerance_of(dtype), digits) * ordinary.abs().max()
    assert (tiny.double() - ordinary).abs().max() <= allowed


@pytest.mark.parametrize("call", COSINE, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_the_cosine_of_subnormal_rows(backend, call, dtype):
    skip_if_converted_wrongly(backend, dtype)
    for tiny_rows in ([3, 8], list(range(12))) if backend.slow else ([3], [3, 8], list(range(12))):
        check_tiny_cosine(call, dtype, tiny_rows)


def check_tiny_cosine(call: LossCall, dtype: torch.dtype, tiny_rows: list[int]) -> None:
    rows, labels = integers(12, 6)
    labels[tiny_rows[0]] = 99  # nobody's positive
    power = torch.zeros(12, 1, dtype=torch.float64)
    power[tiny_rows] = TINY[dtype]
    _, ordinary = call.gradient(rows, labels)
    loss, tiny = call.gradient((rows * 2.0**power).to(dtype), labels)
    assert loss.isfinite()
    assert not tiny.isnan().any()
    # One over a tiny norm may overflow: then infinity is the value in that type.
    expected = ordinary / 2.0**power
    allowed = expected.abs().amax(1, keepdim=True) * tolerance_of(dtype)
    largest = torch.finfo(dtype).max
    assert ((expected.abs() >= largest - allowed) | tiny.isfinite()).all()
    error = (tiny.double().clamp(-largest, largest) - expected.clamp(-largest, largest)).abs()
    assert (error <= allowed + torch.finfo(dtype).tiny).all()


@every_euclidean_call
def test_gradients_of_rows_that_differ_by_a_tiny_number(backend, call):
    """The derivative of a distance of 2⁻¹⁴⁰ among rows of ordinary size."""
    if backend.name == "triton" and call.function in (
        "batch_all_loss",
        "contrastive_loss",
        "beta_margin_loss",
    ):
        pytest.skip("of all pairs, Triton takes those for equal whose squared distance is 0 in float32")
    rows, labels = integers(12, 6)
    rows[7] = rows[1]
    rows[1, 3], rows[7, 3] = 0, 2.0**-140
    _, found = call.gradient(rows.float(), labels)
    _, expected = call.gradient(rows, labels, backend="reference")
    assert (found.double() - expected).abs().max() <= 1e-5 * expected.abs().max()


# Rows that nearly agree


def nearly_parallel(count: int, width: int, seed: int) -> Batch:
    """Rows that differ in their last bits alone: their unit rows, rounded to float32, would be equal."""
    generator = torch.Generator().manual_seed(seed)
    offset = 2.0**30 * torch.randn(width, generator=generator)
    last_bit = torch.finfo(torch.float32).eps * offset
    rows = offset + last_bit * torch.randint(-1, 2, (count, width), generator=generator)
    return Batch(rows, labels_of(count, 4, generator))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("count", "width"), [(40, 8)] if SLOW else [(40, 8), (96, 3), (600, 8), (600, 33)])
def test_picks_among_rows_that_are_nearly_parallel(backend, count, width, seed):
    truth = Truth(nearly_parallel(count, width, seed), "cosine")
    for positive, negative in (("hard", "hard"), ("easy", "semihard"), ("easy", "easy")):
        check(truth, positive, negative, TripletOptions("cosine"))


# Rows whose offset is many times their spread


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("offset", "spread"), [(0.5, -20), (1.0, -17), (1000.0, -7)])
def test_picks_among_rows_with_a_large_offset(backend, offset, spread, dtype):
    """Offset over spread leaves float16, as the spread itself does not."""
    generator = torch.Generator().manual_seed(spread + 100)
    rows = 2.0**spread * torch.randint(-15, 16, (40, 6), generator=generator)
    rows[:, 0] = offset
    truth = Truth(Batch(rows.to(dtype), labels_of(40, 5, generator)), "euclidean")
    for positive, negative in (("hard", "hard"), ("easy", "semihard")):
        check(truth, positive, negative, TripletOptions())


# Huge rows

HUGE = {torch.bfloat16: 122, torch.float32: 122, torch.float64: 1018}


@pytest.mark.parametrize("dtype", HUGE)
@pytest.mark.parametrize("number", range(len(EUCLIDEAN)), ids=[str(call) for call in EUCLIDEAN])
def test_nothing_is_nan_where_distances_are_too_large(backend, number, dtype):
    """Nor where margins are, which are added to them."""
    largest = float(torch.finfo(dtype).max)
    for call in (EUCLIDEAN[number], with_all_margins(largest / 8)[number]):
        check_huge(call, dtype)


@pytest.mark.parametrize("dtype", HUGE)
@pytest.mark.parametrize("call", soft_margin_calls(), ids=str)
def test_no_soft_margin_is_nan_where_distances_are_too_large(backend, call, dtype):
    check_huge(call, dtype)


def check_huge(call: LossCall, dtype: torch.dtype) -> None:
    rows, labels = integers(12, 6)
    emb = (rows * 2.0 ** HUGE[dtype]).to(dtype)
    for distance in ("euclidean", "sqeuclidean"):
        loss, slope = call.gradient(emb, labels, distance=distance)
        assert not loss.isnan()
        assert not slope.isnan().any()


# Outliers


@dataclass(frozen=True)
class Outlier:
    """A batch in which one row, or three, are far away from all others."""

    count: int
    width: int
    places: tuple[int, ...]
    size: float
    offset: float = 0.0
    dtype: torch.dtype = torch.float32

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.count)
        rows = torch.randn(self.count, self.width, generator=generator, dtype=torch.float64) + self.offset
        rows[list(self.places)] *= self.size
        return rows.to(self.dtype), torch.arange(self.count) // 4


def check_others(call: LossCall, outlier: Outlier) -> None:
    """The losses of anchors whose classes have no outlier are as exact as without one."""
    emb, labels = outlier.batch()
    found = call.loss(emb, labels, reduction="none")
    expected = call.loss(emb.double(), labels, reduction="none", backend="reference")
    others = ~torch.isin(labels, labels[list(outlier.places)])
    if call.function == "semi_hard_loss":
        others &= ~nearly_tied(emb.double(), labels)  # rounding may decide what is strictly farther
    assert others.any()
    terms = 1.0 if call.picks_one else float(outlier.count * 4)
    allowed = (1e-5 if outlier.dtype == torch.float32 else 1e-13) * (expected.abs() + terms)
    assert ((found.double() - expected).abs() <= allowed)[others].all()


def nearly_tied(emb: Tensor, labels: Tensor) -> Tensor:
    """(N,) the anchors of which a positive and a negative are about equally far."""
    keys = reference.key_matrix(reference.squared, emb, emb)
    same = labels[:, None] == labels
    ties = (keys[:, :, None] - keys[:, None, :]).abs() < 1e-4 * keys[:, :, None]
    return (ties & same[:, :, None] & ~same[:, None, :]).any(2).any(1)


OUTLIER_CALLS = [*euclidean_calls(neg_margin=3.0), *soft_margin_calls()]
SIZES = (1e5, 1e22, 1e28) if SLOW else (1e2, 1e5, 1e10, 1e20, 1e22, 1e23, 1e28)
every_outlier_call = pytest.mark.parametrize("call", OUTLIER_CALLS, ids=str)


@every_outlier_call
@pytest.mark.parametrize("size", SIZES)
def test_outliers_do_not_spoil_the_others(backend, call, size):
    check_others(call, Outlier(24, 16, (1, 9, 20), size))
    if backend.slow:
        check_others(call, Outlier(8, 8, (0,), size))
        check_others(call, Outlier(40, 8, (20,), size, 1e3))
        return
    for count, offset in itertools.product((8, 40), (0.0, 1e3)):
        for place in (0, count // 2, count - 1):
            check_others(call, Outlier(count, 8, (place,), size, offset))
    check_others(call, Outlier(100, 33, (50,), size))


@every_outlier_call
@pytest.mark.parametrize("size", [1e5, 1e30, 1e100])
def test_outliers_in_float64(backend, call, size):
    for places in ((20,),) if backend.slow else ((0,), (20,), (3, 21)):
        check_others(call, Outlier(40, 8, places, size, dtype=torch.float64))
