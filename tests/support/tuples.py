"""Objectives over many tuples: their calls, what the oracle says of them, and the checks.

What is particular to an objective stands in tests/objectives, in the module of its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple, Protocol, TypeAlias, cast
from unittest import mock

import torch
from torch import Tensor

from tests.support.backends import Backend
from tests.support.batches import Batch, lattice_batch
from tests.support.calls import DTYPES, KERNELS, T, bits, cotangent_of, leaves
from tests.support.checks import assert_within
from tests.support.oracle import Truth
from tests.support.terms import Terms, TupleTolerances
from tripletops import reference
from tripletops._signatures import returns_count
from tripletops._words import FUNCTION, OBJECTIVE, REDUCTION, Number, Objective

# All but that of the one triplet per anchor which `mine` picks.
OBJECTIVES = tuple(name for name in OBJECTIVE if name != FUNCTION["mine"].objective)


@dataclass(frozen=True, eq=False)
class ManyTuples:
    """A call of one of the objectives over many tuples, its batch aside."""

    function: str
    given: dict[str, Any] = field(default_factory=dict)
    beta: float | Tensor | None = None  # what the objective learns

    @property
    def objective(self) -> Objective:
        return OBJECTIVE[FUNCTION[self.function].objective]

    @cached_property
    def options(self) -> dict[str, Any]:
        return {**reference.defaults(FUNCTION[self.function]), **self.given}

    @property
    def distance(self) -> str:
        return "cosine" if self.objective.cosine else self.options["distance"] or "euclidean"

    @property
    def picks(self) -> bool:
        """Whether one positive or one negative of each anchor is picked."""
        options = self.options
        return "negative" in options and not options["positive"] == options["negative"] == "all"

    @property
    def streams(self) -> bool:
        """Whether it takes all pairs, and learns nothing."""
        return not self.picks and self.beta is None

    @property
    def draws(self) -> bool:
        """Whether a pick depends on the places of the rows."""
        words = {choice.name: choice.table for choice in FUNCTION[self.function].choices}
        return any(table[self.options[name]].draws for name, table in words.items() if self.options[name])

    def but(self, **given: Any) -> ManyTuples:
        return replace(self, given={**self.given, **given})

    def arguments(self, batch: Batch) -> dict[str, Any]:
        arguments = {**batch.options(), **self.given}
        if not FUNCTION[self.function].draws:
            arguments.pop("seed")
        return arguments

    def __str__(self) -> str:
        return f"{self.function} {self.given}"


class Judge(Protocol):
    """What the module of an objective in tests/objectives has beside its tests."""

    ON_EVERY_BACKEND: tuple[Callable[[Backend], None], ...]  # tests of this objective alone

    def terms(
        self, truth: Truth, call: ManyTuples, picks: tuple[Tensor, Tensor] | None, exact: bool
    ) -> list[Terms]:
        """The terms of a call with what rounding may do to them; `exact`: no key of a scan is rounded."""

    def calls(self, distance: str, unit: float, classes: int) -> dict[str, ManyTuples]:
        """The forms of the objective, the plain one first, named "".

        Their margins matter where distances are about `unit`; what is learned has a number for each class,
        if `classes` is not 0.
        """

    def limits(self, distance: str, unit: float) -> list[ManyTuples]:
        """Calls with numbers as small and as large as they may sensibly be."""

    def kinks(self) -> list[ManyTuples]:
        """Calls whose terms are exactly 0 where the positive is 5 away, the negative 10."""

    def whole_numbers(self) -> list[ManyTuples]:
        """Calls whose terms are whole numbers where squared distances are."""

    def of_equal_rows(self, distance: str, positives: int, negatives: int) -> list[tuple[ManyTuples, float]]:
        """Calls and their loss where all rows are equal, and anchors have so many positives and negatives."""


@cache
def judge_of(objective: str) -> Judge:
    return cast(Judge, import_module(f"tests.objectives.{objective}"))


def calls_of(distance: str, unit: float = 1.0, classes: int = 0) -> dict[str, ManyTuples]:
    """Every objective that has this distance, in all its forms, by name; see `Judge.calls`."""
    return {
        f"{objective}_{form}" if form else objective: call
        for objective in OBJECTIVES
        if distance == "cosine" or not OBJECTIVE[objective].cosine
        for form, call in judge_of(objective).calls(distance, unit, classes).items()
    }


def unit_of(truth: Truth) -> float:
    """A usual distance."""
    pairs = truth.distance[truth.positives | truth.negatives]
    return float(pairs.median()) if len(pairs) and pairs.median() > 0 else 1.0


# (loss, gradients, number of active terms or None); the gradient of β, if it is a tensor, comes last.
Outcome: TypeAlias = "tuple[Tensor, list[Tensor], Tensor | None]"


def bits_of(outcome: Outcome) -> list[bytes]:
    loss, gradients, active = outcome
    return bits(loss, *gradients, *([] if active is None else [active]))


def beta_by_anchor(batch: Batch, beta: Tensor) -> Tensor:
    place = torch.zeros_like(batch.labels, dtype=torch.int64)
    if beta.dim():
        place = batch.labels.long()
        if batch.ignore_label is not None:
            place = place.where(place != batch.ignore_label, 0)
    return beta.reshape(-1)[place]


def beta_of(call: ManyTuples, compute_type: torch.dtype) -> Tensor:
    return torch.as_tensor(call.beta, dtype=torch.float64).to(compute_type)


def run_tuples(batch: Batch, call: ManyTuples) -> Outcome:
    batch, inputs = leaves(batch)
    beta = []
    if call.beta is not None:
        beta = [call.beta.detach().requires_grad_() if isinstance(call.beta, Tensor) else call.beta]
        inputs += [each for each in beta if isinstance(each, Tensor)]
    extra: dict[str, Any] = {"backend": KERNELS}
    if returns_count(FUNCTION[call.function]):
        extra["return_active"] = True
    result = getattr(T, call.function)(batch.emb, batch.labels, *beta, **call.arguments(batch), **extra)
    loss, active = result if isinstance(result, tuple) else (result, None)
    return loss.detach(), list(torch.autograd.grad(loss, inputs, cotangent_of(loss))), active


def gram_matrix(compare: Any, x: Tensor, y: Tensor) -> Tensor:
    """The oracle's keys as one usually writes them: |x|² + |y|² − 2xy, or 1 − S."""
    if compare is reference.cosine and x.shape[1]:
        return 1 - reference.unit(x) @ reference.unit(y).T
    square = x.square().sum(1)[:, None] + y.square().sum(1) - 2 * x @ y.T
    return square.clamp(min=0)


def plain_tuples(
    batch: Batch, call: ManyTuples, picks: tuple[Tensor, Tensor] | None, compute_type: torch.dtype, gram: bool
) -> Outcome:
    """As `run_tuples`, of the oracle in the batch's own type, for picks already made."""
    batch, inputs = leaves(batch)
    arguments = call.arguments(batch)
    beta: list[Tensor] = []
    if call.beta is not None:
        leaf = beta_of(call, compute_type).to(batch.compute_type()).detach().requires_grad_()
        beta = [beta_by_anchor(batch, leaf)]
        inputs += [leaf] if isinstance(call.beta, Tensor) else []
    with ExitStack() as patches:
        if picks is not None:
            patches.enter_context(mock.patch.object(reference, "select", return_value=(*picks, None, None)))
        if gram:
            patches.enter_context(mock.patch.object(reference, "key_matrix", gram_matrix))
        result = getattr(reference, call.function)(batch.emb, batch.labels, *beta, **arguments)
        loss, active = result if isinstance(result, tuple) else (result, None)
        return loss.detach(), list(torch.autograd.grad(loss, inputs, cotangent_of(loss))), active


def picks_of(batch: Batch, call: ManyTuples) -> tuple[Tensor, Tensor] | None:
    """The positive and the negative of every anchor as `mine` picks them, for an objective that picks."""
    options = call.options
    if not call.picks:
        return None
    words = {name: "hard" if options[name] == "all" else options[name] for name in ("positive", "negative")}
    numbers = [option.name for option in FUNCTION["mine"].options() if isinstance(option, Number)]
    mining = {name: options[name] for name in numbers}
    mining |= {"distance": call.distance, "backend": KERNELS}
    triplets = T.mine(batch.emb, batch.labels, **words, **mining, **batch.options())
    return triplets.positive, triplets.negative


def check_no_worse_than_plain(
    actual: Tensor,
    plain: Callable[[bool], Tensor],
    expected: Tensor,
    size: Tensor,
    slack: Tensor,
    what: str,
) -> None:
    """The largest error at most twice that of a plain formulation, plus 4 ulp; `slack` is what may flip.

    `plain` is the oracle in this type or, called with True, the same with distances out of products of rows.
    """
    if not actual.numel():
        return
    ulp = max(torch.finfo(actual.dtype).eps, torch.finfo(torch.float32).eps) * size.max()
    error = ((actual.double() - expected).abs() - slack).max()
    allowed = ulp * 4
    for gram in (False, True):
        if error > allowed:
            off = (plain(gram).double() - expected).abs().nan_to_num(math.inf, math.inf).max()
            allowed = max(allowed, 2 * off + 4 * ulp)
    assert error <= allowed, f"{what}: off by {error:.3g}, the plain formulation allows {allowed:.3g}"


def check_tuples(truth: Truth, call: ManyTuples, *reductions: str, exact: bool = False) -> None:
    """All promises about the loss and the gradients of an objective; `exact`: no key of a scan is rounded."""
    assert truth.name == call.distance
    picks = picks_of(truth.batch, call)
    groups = judge_of(call.objective.name).terms(truth, call, picks, exact)
    for reduction in reductions or REDUCTION:
        check_reduced(truth, call.but(reduction=reduction), picks, groups)


class Gradient(NamedTuple):
    """One of the gradients of a call, the true one, and what is allowed; in shapes that fit each other."""

    name: str
    found: Tensor
    true: Tensor
    tolerance: Tensor
    pull: Tensor  # the size of all that adds up to it
    slack: Tensor  # what may flip


def judged_gradients(
    truth: Truth, call: ManyTuples, found: list[Tensor], true: list[Tensor], allowed: TupleTolerances
) -> list[Gradient]:
    names = ["emb"] if truth.batch.ref_emb is None else ["emb", "ref_emb"]
    rooms = [
        tuple(part[:, None] for part in parts)
        for parts in zip(allowed.gradient, allowed.pull, allowed.slack, strict=True)
    ]
    if isinstance(call.beta, Tensor):
        place = beta_by_anchor(truth.exact, torch.arange(call.beta.numel()).reshape(call.beta.shape))
        zeros = torch.zeros(call.beta.numel(), dtype=torch.float64)
        parts = (allowed.learned, allowed.learned_pull, allowed.learned_slack)
        names.append("beta")
        rooms.append(tuple(zeros.index_add(0, place, part).reshape(call.beta.shape) for part in parts))
    return [
        Gradient(name, *both, *room)
        for name, both, room in zip(names, zip(found, true, strict=True), rooms, strict=True)
    ]


def check_reduced(
    truth: Truth, call: ManyTuples, picks: tuple[Tensor, Tensor] | None, groups: list[Terms]
) -> None:
    batch, compute_type = truth.batch, truth.batch.compute_type()
    what = f"{call} {tuple(batch.emb.shape)} {batch.emb.dtype}"
    loss, gradients, active = run_tuples(batch, call)
    expected, right, expected_active = plain_tuples(truth.exact, call, picks, compute_type, gram=False)
    assert (loss.dtype, loss.shape) == (compute_type, expected.shape), what
    given = [each for each in (batch.emb, batch.ref_emb, call.beta) if isinstance(each, Tensor)]
    for gradient, like in zip(gradients, given, strict=True):
        assert (gradient.dtype, gradient.shape) == (like.dtype, like.shape), what
    if active is not None and expected_active is not None:
        assert (active.dtype, active.shape) == (torch.int64, ()), what
        assert abs(int(active) - int(expected_active)) <= groups[0].flips, f"active terms of {what}"

    allowed = TupleTolerances(truth, groups, call.options["reduction"])
    if allowed.uncertain:
        return
    judged = judged_gradients(truth, call, gradients, right, allowed)
    kind = torch.finfo(compute_type)
    # In float64 the judge, which adds up one after the other, rounds more.
    rounding = 2 * kind.eps if compute_type == torch.float32 else 4 * truth.relative
    tolerance = allowed.loss + rounding * expected.abs() + kind.smallest_normal * (allowed.loss_size > 0)
    assert_within(loss, expected, tolerance, f"loss of {what}")
    for each in judged:
        form = torch.finfo(each.found.dtype)
        room = each.tolerance + (form.eps * each.true.abs() + form.smallest_normal * form.eps) * (
            each.tolerance > 0
        )
        assert_within(each.found, each.true, room, f"gradient of {each.name} of {what}")
    if compute_type == torch.float32:  # in float64 the plain formulation is the judge itself
        check_against_plain(batch, call, picks, loss, expected, allowed, judged, what)


def check_against_plain(
    batch: Batch,
    call: ManyTuples,
    picks: tuple[Tensor, Tensor] | None,
    loss: Tensor,
    expected: Tensor,
    allowed: TupleTolerances,
    judged: list[Gradient],
    what: str,
) -> None:
    @cache
    def plain(gram: bool) -> list[Tensor]:
        value, slopes, _ = plain_tuples(batch.plain(), call, picks, batch.compute_type(), gram)
        return [value, *slopes]

    check_no_worse_than_plain(
        loss, lambda gram: plain(gram)[0], expected, allowed.loss_size, allowed.loss_slack, f"loss of {what}"
    )
    for i, each in enumerate(judged, 1):
        check_no_worse_than_plain(
            each.found,
            lambda gram, i=i: plain(gram)[i],
            each.true,
            each.pull,
            each.slack,
            f"gradient of {each.name} of {what}",
        )


def check_poisoned(batch: Batch, call: ManyTuples) -> None:
    """For a batch with a row that is neither finite nor ignored."""
    loss, gradients, _ = run_tuples(batch, call)
    assert loss.isnan().all()
    assert all(gradient.isnan().all() for gradient in gradients)


def check_out_of_reach(backend: Backend, call: ManyTuples) -> None:
    """No bit of a hinge depends on how far beyond the margin a negative is, and it gets no gradient.

    Of an outlier, that is: where a row becomes one, products are centred elsewhere. With Triton the centre
    follows an outlier, too, so that gradients round otherwise.
    """
    count = 34 if backend.slow else 120
    cases = [*product(DTYPES, ("euclidean", "sqeuclidean"))]
    for turn, (dtype, distance) in enumerate(cases[::3] if backend.slow else cases):
        near = lattice_batch(count, 4, classes=12).to(dtype)
        for position in backend.some((0, count // 2, count - 1), turn):
            outcomes = []
            for place in (40.0, 50.0):
                emb, labels = near.emb.clone(), near.labels.clone()
                emb[position], labels[position] = place, 99
                outcomes.append(run_tuples(Batch(emb, labels), call.but(distance=distance)))
                assert not outcomes[-1][1][0][position].any()
            if backend.name == "cpu":
                assert bits_of(outcomes[0]) == bits_of(outcomes[1])
            else:
                torch.testing.assert_close(*outcomes)
