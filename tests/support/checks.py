"""The promises about numbers, as checks against the oracle.

Whether a pick is right is for its rule's own module to say: the function `judge` in tests/rules.
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tripletops
from tests.support.batches import Batch
from tests.support.calls import TripletOptions, mined, run_loss
from tests.support.oracle import Truth, loss_of_picks
from tests.support.tolerances import Tolerances
from tripletops import reference
from tripletops._words import NEGATIVE, POSITIVE, Table


def worst(error: Tensor, tolerance: Tensor) -> str:
    error, tolerance = (part.flatten() for part in torch.broadcast_tensors(error, tolerance))
    at = int((~(error <= tolerance)).int().argmax())
    return f"{error[at]:.3g} where {tolerance[at]:.3g} is allowed, first at element {at}"


def assert_within(actual: Tensor, expected: Tensor, tolerance: Tensor | float, what: str) -> None:
    assert actual.shape == expected.shape, what
    if not actual.numel():
        return
    error = (actual.double() - expected).abs()
    tolerance = torch.as_tensor(tolerance, dtype=torch.float64)
    assert (error <= tolerance).all(), f"{what}: off by {worst(error, tolerance)}"


class Pick(NamedTuple):
    """The positives, or the negatives, of mined triplets, to be judged by the rule that picked them."""

    truth: Truth
    table: Table  # POSITIVE or NEGATIVE
    word: str
    triplets: tripletops.Triplets
    numbers: dict[str, Any]  # of the rule

    def __str__(self) -> str:
        return f"{self.word} {self.table.option}"

    @property
    def positive(self) -> bool:
        return self.table is POSITIVE

    @property
    def index(self) -> Tensor:
        """(N,) candidates, −1 for none."""
        return self.triplets.positive if self.positive else self.triplets.negative

    @property
    def eligible(self) -> Tensor:
        return self.truth.positives if self.positive else self.truth.negatives

    @property
    def others(self) -> Tensor:
        """The candidates of the other kind."""
        return self.truth.negatives if self.positive else self.truth.positives

    def one_of_all(self) -> Tensor:
        """The anchors that have a pick: those with an eligible candidate, which the pick must be."""
        pick, eligible = self.index, self.eligible
        assert torch.equal(pick >= 0, eligible.any(1)), f"{self}: a pick too many, or one too few"
        found = (pick >= 0).nonzero()[:, 0]
        assert eligible[found, pick[found]].all(), f"{self}: not eligible"
        return found


def judge(pick: Pick) -> None:
    rule = pick.table[pick.word].rule or pick.word
    import_module(f"tests.rules.{rule}").judge(pick)


def pick_of(truth: Truth, table: Table, name: str, triplets: tripletops.Triplets, **numbers: Any) -> Pick:
    word = table[name]
    rule = table.get(word.rule, word)  # which may have numbers that the word itself does not take
    known = {number.name: number.default for number in rule.numbers}
    known |= {number.name: numbers[number.name] for number in word.numbers if number.name in numbers}
    return Pick(truth, table, name, triplets, known)


def check_extreme(pick: Pick, largest: bool) -> None:
    """The nearest or farthest of all: no other one is nearer, or farther, by more than the promise."""
    found = pick.one_of_all()
    if not len(found):
        return
    truth, index = pick.truth, pick.index
    square = -truth.square if largest else truth.square
    extreme = square.masked_fill(~pick.eligible, math.inf)[found].amin(1)
    assert_within(square[found, index[found]], extreme, truth.bound, f"squared distance of {pick}")
    check_first_of_equals(pick, pick.eligible)


def check_first_of_equals(pick: Pick, eligible: Tensor) -> None:
    """Duplicates have equal keys, and so has everything seen from a zero row: the first must win."""
    truth, index = pick.truth, pick.index
    found = (index >= 0).nonzero()[:, 0]
    if not len(found):
        return
    equal = (truth.group[index[found]][:, None] == truth.group) | truth.same_to_all[found]
    earlier = eligible[found] & equal & (torch.arange(len(truth.group)) < index[found][:, None])
    assert not earlier.any(), f"{pick}: an earlier candidate is just as far"


def check_mined(
    truth: Truth, positive: str, negative: str, triplets: tripletops.Triplets, **numbers: Any
) -> None:
    """`numbers` are those of the rules."""
    anchor, p, n, d_ap, d_an = triplets
    batch, size = truth.batch, len(truth.x)
    assert torch.equal(anchor, torch.arange(size))
    assert p.dtype == n.dtype == torch.int64
    assert p.shape == n.shape == d_ap.shape == d_an.shape == (size,)
    assert d_ap.dtype == d_an.dtype == batch.compute_type()
    assert torch.equal(triplets.valid, (p >= 0) & (n >= 0))
    for table, word in ((POSITIVE, positive), (NEGATIVE, negative)):
        judge(pick_of(truth, table, word, triplets, **numbers))
    for pick, reported, what in ((p, d_ap, "d_ap"), (n, d_an, "d_an")):
        check_distances(truth, pick, reported, what)


def check_distances(truth: Truth, pick: Tensor, reported: Tensor, what: str) -> None:
    found = (pick >= 0).nonzero()[:, 0]
    assert torch.equal(reported.isnan(), pick < 0), f"{what} is NaN where there is no pick, and nowhere else"
    if not len(found):
        return
    expected = truth.distance[found, pick[found]]
    smallest = torch.finfo(reported.dtype).smallest_normal * torch.finfo(reported.dtype).eps
    tolerance = truth.relative * expected + truth.floor(expected) + smallest * (expected > 0)
    assert_within(reported[found], expected, tolerance, what)
    if reported.dtype == torch.float32:
        compare, report = reference.DISTANCES[truth.name]
        plain = report(compare(truth.x[found].float(), truth.y[pick[found]].float()))
        check_twice_plain(reported[found], plain, expected, expected + truth.floor(expected), what)


def check_twice_plain(actual: Tensor, plain: Tensor, expected: Tensor, size: Tensor, what: str) -> None:
    """`size` is that of the terms which make up the value: where they cancel, their ulp is what counts."""
    if not actual.numel() or not size.numel() or not plain.isfinite().all():
        return
    ulp = torch.finfo(actual.dtype).eps * size.max()
    allowed = 2 * (plain.double() - expected).abs().max() + 4 * ulp
    error = (actual.double() - expected).abs().max()
    assert error <= allowed, f"{what}: off by {error:.3g}, the plain formulation allows {allowed:.3g}"


def check_loss(
    truth: Truth,
    triplets: tripletops.Triplets,
    positive: str,
    negative: str,
    options: TripletOptions,
    **numbers: Any,
) -> None:
    loss, gradients, cotangent = run_loss(truth.batch, positive, negative, options, **numbers)
    what = f"{positive}+{negative} {numbers or ''} {options}"
    check_outcome(truth, triplets, options, loss, gradients, cotangent, what)


def check_outcome(
    truth: Truth,
    triplets: tripletops.Triplets,
    options: TripletOptions,
    loss: Tensor,
    gradients: list[Tensor],
    cotangent: Tensor,
    what: str,
) -> None:
    """A loss of the triplets and its gradients, taken with the cotangent."""
    batch, p, n = truth.batch, triplets.positive, triplets.negative
    what = f"{what} {tuple(batch.emb.shape)} {batch.emb.dtype}"
    losses, expected, expected_gradients = loss_of_picks(truth.exact, p, n, options, cotangent)
    assert loss.dtype == batch.compute_type(), what
    assert loss.shape == expected.shape, what
    for gradient, given in zip(gradients, (batch.emb, batch.ref_emb), strict=False):
        assert given is not None
        assert (gradient.dtype, gradient.shape) == (given.dtype, given.shape), what

    allowed = Tolerances(truth, p, n, options, losses, cotangent)
    if allowed.may_flip and options.reduction == "mean_nonzero":
        return  # one more or one less may have been counted
    assert_within(loss, expected, allowed.loss, f"loss of {what}")
    for side, (gradient, right, tolerance) in enumerate(
        zip(gradients, expected_gradients, allowed.gradient, strict=True)
    ):
        kind = torch.finfo(gradient.dtype)
        rounding = kind.eps * right.abs() + kind.smallest_normal * kind.eps
        pulled = tolerance[:, None] + rounding * (tolerance > 0)[:, None]
        assert_within(gradient, right, pulled, f"gradient of {('emb', 'ref_emb')[side]} of {what}")

    if batch.compute_type() == torch.float32:  # in float64 the plain formulation is the judge itself
        _, plain, plain_gradients = loss_of_picks(batch.plain(), p, n, options, cotangent)
        if not allowed.may_jump:
            check_twice_plain(loss, plain, expected, allowed.loss_size, f"loss of {what}")
        if allowed.may_flip:
            return
        for gradient, plain_gradient, right, pull in zip(
            gradients, plain_gradients, expected_gradients, allowed.pull, strict=True
        ):
            check_twice_plain(gradient, plain_gradient, right, pull, f"gradient of {what}")


def check(
    truth: Truth, positive: str, negative: str, *options: TripletOptions, **numbers: Any
) -> tripletops.Triplets:
    """All promises: of the picks, of the distances, and of the loss and gradients that each `options` ask
    for; `numbers` are those of the rules."""
    triplets = mined(truth.batch, positive, negative, truth.name, **numbers)
    check_mined(truth, positive, negative, triplets, **numbers)
    for each in options:
        check_loss(truth, triplets, positive, negative, each, **numbers)
    return triplets


def check_poisoned(
    batch: Batch, positive: str, negative: str, options: TripletOptions, **numbers: Any
) -> None:
    """For a batch with a row that is neither finite nor ignored: no picks, and NaN for everything else."""
    triplets = mined(batch, positive, negative, options.distance, **numbers)
    assert (triplets.positive == -1).all()
    assert (triplets.negative == -1).all()
    assert triplets.d_ap.isnan().all()
    assert triplets.d_an.isnan().all()
    loss, gradients, _ = run_loss(batch, positive, negative, options, **numbers)
    if not len(batch.emb):
        assert not loss.any()
        assert not any(gradient.any() for gradient in gradients)
        return
    assert loss.isnan().all()
    for gradient in gradients:
        assert gradient.isnan().all()
