"""Everything that is promised of one call. A broken promise is a `Broken`, named after what was checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from tests.fuzz.cases import Call, Case
from tests.fuzz.objectives import Picks, learned_by_anchor, learned_of, terms_of
from tests.fuzz.oracle import Allowed, Array, Outcome, Real, Truth, real
from tests.fuzz.rules import NEGATIVE, POSITIVE, Judge, Scan
from tests.support.calls import KERNELS, T, bits, cotangent_of, leaves
from tripletops import reference
from tripletops._words import FUNCTION, Number
from tripletops.backends import INTERPRETED

# The numbers of the rules.
MINING = tuple(option.name for option in FUNCTION["mine"].options() if isinstance(option, Number))


class Broken(NamedTuple):
    check: str
    message: str


class BrokenError(Exception):
    def __init__(self, check: str, message: str) -> None:
        super().__init__(f"{check}: {message}")
        self.broken = Broken(check, message)


def need(condition: Any, check: str, message: str) -> None:
    if not condition:
        raise BrokenError(check, message)


class Result(NamedTuple):
    loss: Tensor
    gradients: list[Tensor]  # of the rows, then of what is learned if that is a tensor
    active: Tensor | None

    def bits(self) -> list[bytes]:
        return bits(self.loss, *self.gradients, *([] if self.active is None else [self.active]))


def run_mine(case: Case) -> Any:
    call = case.call
    assert call.rules is not None
    given = {name: call.options[name] for name in MINING if name in call.options}
    given |= {"positive": call.rules[0], "negative": call.rules[1], "distance": call.distance}
    return T.mine(case.batch.emb, case.batch.labels, **given, **case.batch.options(), backend=KERNELS)


def run(case: Case) -> Result:
    batch, inputs = leaves(case.batch)
    call, learned = case.call, []
    if call.learned is not None:
        learned = [
            call.learned.detach().requires_grad_() if isinstance(call.learned, Tensor) else call.learned
        ]
        inputs += [each for each in learned if isinstance(each, Tensor)]
    extra = {"return_active": True} if call.function == "batch_all_loss" else {}
    value = getattr(T, call.function)(
        batch.emb, batch.labels, *learned, **call.arguments(batch), **extra, backend=KERNELS
    )
    loss, active = value if isinstance(value, tuple) else (value, None)
    return Result(loss.detach(), list(torch.autograd.grad(loss, inputs, cotangent_of(loss))), active)


def broken_promises(case: Case) -> list[Broken]:
    """All of them, so that one does not hide another."""
    found = []
    before = [storage_of(rows).clone() for rows in case.rows]
    try:
        for check in checks_of(case):
            try:
                check()
            except BrokenError as broken:
                found.append(broken.broken)
        need(
            all(torch.equal(old, storage_of(rows)) for old, rows in zip(before, case.rows, strict=True)),
            "inputs",
            "were modified",
        )
    except BrokenError as broken:
        found.append(broken.broken)
    except Exception as error:  # whatever it is, the call should not have raised it
        found.append(Broken("raised", f"{type(error).__name__}: {error}"))
    return found


def storage_of(rows: Tensor) -> Tensor:
    """All bytes that the rows lie in, the gaps included; NaN is equal to itself as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(rows.untyped_storage())


def checks_of(case: Case) -> Iterator[Callable[[], None]]:
    mines = case.function == "mine"
    picks = run_mine(case) if case.call.rules is not None else None
    result = None if mines else run(case)
    if not INTERPRETED:  # Triton's interpreter does one thing after the other, slowly
        yield lambda: check_repeats(case, picks, result)
    truth = Truth(case.batch, case.call.distance, case.sizes_differ)
    if result is not None:
        yield lambda: check_form(case, result)
    if not finite(case, truth):
        yield lambda: check_poisoned(case, truth, picks, result)
        return
    if result is not None:
        yield lambda: check_no_nan(result)
    if case.takes_threads:
        return
    if picks is not None:
        yield from pick_checks(case, truth, picks)
    if result is not None:
        yield from loss_checks(case, truth, picks, result)


def finite(case: Case, truth: Truth) -> bool:
    if case.call.learned is None:
        return truth.finite
    return truth.finite and bool(learned_of(case.call, case.batch.compute_type()).isfinite().all())


def check_repeats(case: Case, picks: Any, result: Result | None) -> None:
    """The same bits again, on another number of threads."""
    threads = torch.get_num_threads()
    try:
        for count in (2, 3) if case.takes_threads else (2,):
            torch.set_num_threads(count)
            if picks is not None:
                need(bits(*run_mine(case)) == bits(*picks), "bits", f"other picks on {count} threads")
            if result is not None:
                need(run(case).bits() == result.bits(), "bits", f"other results on {count} threads")
    finally:
        torch.set_num_threads(threads)


def check_form(case: Case, result: Result) -> None:
    kind, batch = case.batch.compute_type(), case.batch
    shape = batch.labels.shape if case.call.options["reduction"] == "none" else ()
    form = (result.loss.dtype, result.loss.shape)
    need(form == (kind, shape), "form", f"the loss is {form}")
    given = [*case.rows, *([case.call.learned] if isinstance(case.call.learned, Tensor) else [])]
    for gradient, like in zip(result.gradients, given, strict=True):
        form, right = (gradient.dtype, gradient.shape), (like.dtype, like.shape)
        need(form == right, "form", f"the gradient of {right} is {form}")


def check_no_nan(result: Result) -> None:
    for gradient in result.gradients:
        wrong = gradient.isnan()
        if wrong.any():
            count, at = int(wrong.sum()), tuple(wrong.nonzero()[0].tolist())
            raise BrokenError("NaN gradient", f"{count} of {wrong.numel()} elements, first at {at}")


def check_poisoned(case: Case, truth: Truth, picks: Any, result: Result | None) -> None:
    """No picks around a row that is neither finite nor ignored, and NaN for everything else."""
    if picks is not None and not truth.finite:
        nothing = (picks.positive == -1) & (picks.negative == -1) & picks.d_ap.isnan() & picks.d_an.isnan()
        need(nothing.all(), "poison", "picks around a row that is not finite")
    if result is None:
        return
    parts = [result.loss, *result.gradients]
    if not len(truth.x):  # no anchor, no loss to poison
        need(not any(part.any() for part in parts), "poison", "a loss without an anchor")
        return
    if isinstance(case.call.learned, Tensor):  # a class without an anchor is no part of the loss
        parts[-1] = learned_by_anchor(case.batch.plain(), parts[-1])[torch.from_numpy(truth.kept)]
    need(all(part.isnan().all() for part in parts), "poison", "not everything is NaN")


# Picks


def pick_checks(case: Case, truth: Truth, picks: Any) -> Iterator[Callable[[], None]]:
    assert case.call.rules is not None
    positive, negative = case.call.rules
    p, n = picks.positive.numpy(), picks.negative.numpy()
    d_ap, d_an = real(picks.d_ap), real(picks.d_an)
    options = case.call.options
    ap = Scan(truth, truth.positives, truth.negatives, options, p, d_ap, p, d_ap)
    an = Scan(truth, truth.negatives, truth.positives, options, n, d_an, p, d_ap)
    yield lambda: check_mined_form(case, picks)
    yield lambda: check_picks(POSITIVE[positive], ap, f"{positive} positive")
    yield lambda: check_picks(NEGATIVE[negative], an, f"{negative} negative")
    yield lambda: check_distances(truth, p, d_ap, "d_ap")
    yield lambda: check_distances(truth, n, d_an, "d_an")


def check_mined_form(case: Case, picks: Any) -> None:
    kind, shape = case.batch.compute_type(), case.batch.labels.shape
    need(torch.equal(picks.anchor, torch.arange(*shape)), "form", "anchors are not 0 to N-1")
    forms = [(part.dtype, part.shape) for part in picks[1:]]
    need(forms == 2 * [(torch.int64, shape)] + 2 * [(kind, shape)], "form", f"picks are {forms}")


def check_picks(judge: Judge, scan: Scan, what: str) -> None:
    acceptable, picked = judge(scan), scan.pick >= 0
    right = acceptable.nobody.copy()
    right[picked] = acceptable.picks[picked, scan.pick[picked]]
    if not right.all():
        anchor = int((~right).argmax())
        others = [str(candidate) for candidate in np.nonzero(acceptable.picks[anchor])[0]]
        others += ["none"] if acceptable.nobody[anchor] else []
        pick = f"the {what} of anchor {anchor} is {scan.pick[anchor]}"
        raise BrokenError("picks", f"{pick}, not {' or '.join(others)}; {(~right).sum()} are wrong")


def check_distances(truth: Truth, pick: Array, reported: Array, what: str) -> None:
    missing = pick < 0
    need(
        (np.isnan(reported) == missing).all(),
        "distances",
        f"{what} must be NaN without a pick, and only then",
    )
    found = np.nonzero(pick >= 0)[0]
    right = truth.d[found, pick[found]]
    off = truth.error[found, pick[found]]
    need_within(reported[found], right, off, "distances", what)


# Losses and gradients


def describe_worst(error: Array, allowed: Array, right: Array) -> str:
    error, allowed, right = (part.reshape(-1) for part in np.broadcast_arrays(error, allowed, right))
    at = int((~(error <= allowed)).argmax())
    off, whole, most = (short(part[at]) for part in (error, right, allowed))
    return f"off by {off} of {whole} at element {at}, where {most} is allowed"


def short(value: Array) -> str:
    """Of a number that may lie far beyond the range of Python's own."""
    return np.format_float_scientific(value, precision=3) if np.isfinite(value) else str(value)


def need_within(
    actual: Array, right: Array, off: Array, check: str, what: str, overflows: Array | bool = False
) -> None:
    """`overflows`: where infinity, too, is a right answer."""
    actual, right, off = np.broadcast_arrays(actual, right, off)
    beyond = np.isinf(actual) & overflows
    error = np.where(beyond, 0, np.abs(np.where(beyond, 0, actual) - right))
    if not (error <= off).all():
        raise BrokenError(check, f"{what} {describe_worst(error, off, right)}")


def beyond_type(truth: Truth, call: Call) -> bool:
    """Whether an objective over many tuples may not fit its type; then only NaN would be wrong.

    That type holds a distance plus a margin or a boundary, and in float64 the sum of an anchor's terms.
    """
    if call.objective == "triplet" or not truth.unlimited.size:
        return False
    options = FUNCTION[call.function].options()
    numbers = [each for each in options if isinstance(each, Number) and each.name not in MINING]
    margins = (call.options[each.name] for each in numbers if each.unit == "a distance")
    learned = 0.0 if call.learned is None else float(torch.as_tensor(call.learned).abs().max())
    largest = truth.unlimited.max() + max(margins, default=0.0) + learned
    terms = truth.unlimited.size if truth.type.bits == 64 else 1
    return bool(largest * terms >= Real(truth.type.max))


def loss_checks(case: Case, truth: Truth, picks: Any, result: Result) -> Iterator[Callable[[], None]]:
    call, reduction = case.call, case.call.options["reduction"]
    pairs = None if picks is None else Picks(picks.positive.numpy(), picks.negative.numpy())
    if beyond_type(truth, call):
        yield lambda: need(not result.loss.isnan().any(), "loss", "it is NaN")
        return
    groups = terms_of(truth, call, pairs)
    outcome = Outcome(truth, groups, reduction)
    if result.active is not None:
        active, right, doubtful = int(result.active), groups[0].nonzero, groups[0].flips
        message = f"{active} triplets, not {right}, of which {doubtful} are in doubt"
        yield lambda: need(abs(active - right) <= doubtful, "active", message)
    if outcome.uncertain:
        return
    yield lambda: check_promised(truth, result.loss, outcome.loss, outcome.added, "loss")
    if outcome.overflows:  # of a distance that is too large, no more is promised than that nothing is NaN
        return
    parts = [("loss", result.loss, outcome.loss)]
    names = ["gradient of emb", "gradient of ref_emb"][: len(case.rows)]
    parts += zip(names, result.gradients, outcome.rows, strict=False)
    if isinstance(call.learned, Tensor):
        by_class = allowed_by_class(case, call.learned, outcome.learned)
        parts.append(("gradient of what is learned", result.gradients[-1], by_class))

    @cache
    def plain(gram: bool) -> list[Tensor]:
        return plain_result(case, picks, gram)

    for place, (what, actual, allowed) in enumerate(parts):
        if what != "loss":
            yield partial(check_promised, truth, actual, allowed, 0, what)
        yield partial(
            check_no_worse_than_plain, truth, actual, allowed, lambda gram, i=place: plain(gram)[i], what
        )


def allowed_by_class(case: Case, learned: Tensor, by_anchor: Allowed) -> Allowed:
    numbers = torch.arange(learned.numel()).reshape(learned.shape)
    place = learned_by_anchor(case.batch.plain(), numbers).numpy()
    parts = []
    for part in vars(by_anchor).values():
        total = np.zeros(learned.numel(), Real)
        np.add.at(total, place, part)
        parts.append(total.reshape(learned.shape))
    return Allowed(*parts)


def check_promised(truth: Truth, actual: Tensor, allowed: Allowed, added: int, what: str) -> None:
    """Within 1e-5 of the sizes of what it is made of, beside what its own type rounds off.

    Losses of float32 are added up in double. So are those of float64, where `added` roundings add up, random
    ones, to the root of their number.
    """
    kind, value = torch.finfo(actual.dtype), real(actual)
    off, whole = (part[:, None] if actual.dim() == 2 else part for part in (allowed.off, allowed.whole))
    roundings = 4 + 2 * math.sqrt(added) if truth.type.bits == 64 else 4
    rounding = roundings * kind.eps * (np.abs(allowed.right) + off) + Real(kind.smallest_normal) * kind.eps
    if what == "loss" or (INTERPRETED and actual.dtype is torch.bfloat16):  # see cases.py
        rounding = rounding + Real(kind.smallest_normal)
    off = off + np.where((whole > 0) | (off > 0), rounding, 0)
    # Of a sum whose parts are too large for the type, infinity is all that can be expected.
    overflows = np.sign(value) * allowed.right + off >= Real(kind.max)
    overflows = overflows | (whole + off >= Real(truth.type.max))
    need_within(value, allowed.right, off, what, "it is", overflows)


def check_no_worse_than_plain(
    truth: Truth, actual: Tensor, allowed: Allowed, plain: Callable[[bool], Tensor], what: str
) -> None:
    """The largest error at most twice that of the plain formulation, plus 4 ulp, jumps aside.

    The plain formulation takes differences of rows or, called with True, products of them.
    """
    value = real(actual)
    if not value.size or not np.isfinite(value).all():
        return
    kind = torch.finfo(actual.dtype)
    eps = max(kind.eps, truth.type.eps)  # a number of float64 receives what was computed in float32
    slack = allowed.slack[:, None] if actual.dim() == 2 else allowed.slack
    error = (np.abs(value - allowed.right) - slack * (1 + eps)).max()
    ulp = eps * allowed.size.max(initial=0) + Real(kind.smallest_normal)
    limit = 4 * ulp
    for gram in (False, True):
        if error > limit:
            off = np.abs(real(plain(gram)) - allowed.right).max()
            limit = max(limit, math.inf if np.isnan(off) else 2 * off + 4 * ulp)
    need(
        error <= limit,
        f"{what} and plain",
        f"off by {short(error)}, the plain formulation allows {short(Real(limit))}",
    )


def gram_matrix(compare: Any, x: Tensor, y: Tensor) -> Tensor:
    """Keys as one usually writes them: |x|² + |y|² − 2xy, or 1 − S."""
    if compare is reference.cosine and x.shape[1]:
        return 1 - reference.unit(x) @ reference.unit(y).T
    square = x.square().sum(1)[:, None] + y.square().sum(1) - 2 * x @ y.T
    return square.clamp(min=0)


def plain_result(case: Case, picks: Any, gram: bool) -> list[Tensor]:
    """[loss, gradients …] of the plain formulation in the same type, for the picks that were made."""
    batch, inputs = leaves(case.batch.plain())
    call, learned = case.call, []
    if call.learned is not None:
        leaf = learned_of(call, batch.compute_type()).detach().requires_grad_()
        learned = [learned_by_anchor(batch, leaf)]
        inputs += [leaf] if isinstance(call.learned, Tensor) else []
    if batch.ref_emb is not None:  # the plain formulation takes rows of one type
        kind = torch.promote_types(batch.emb.dtype, batch.ref_emb.dtype)
        batch = replace(batch, emb=batch.emb.to(kind), ref_emb=batch.ref_emb.to(kind))
    options = {**call.options, **call.arguments(batch)}
    with ExitStack() as patches:
        if picks is not None:
            found = mock.patch.object(reference, "select", return_value=(*picks[1:3], None, None))
            patches.enter_context(found)
        if gram:
            patches.enter_context(mock.patch.object(reference, "key_matrix", gram_matrix))
        plain = getattr(reference, f"{call.objective}_loss")
        value = plain(batch.emb, batch.labels, *learned, **options)
        loss = value[0] if isinstance(value, tuple) else value
        return [loss.detach(), *torch.autograd.grad(loss, inputs, cotangent_of(loss))]
