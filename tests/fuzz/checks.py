"""Everything that is promised of one call. A broken promise is a `Broken`, named after what was checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from helpers import (
    CUTOFF,
    KERNELS,
    LIMIT,
    ManyTuples,
    Objective,
    T,
    beta_by_anchor,
    beta_of,
    bits,
    cotangent_of,
    leaves,
    loss_of_picks,
    plain_tuples,
)
from torch import Tensor

from fuzz.cases import MANY_TUPLES, ONE_TRIPLET, Case
from fuzz.oracle import Allowed, Array, Outcome, Real, Truth, real, terms_of
from tripletops.backends import INTERPRETED

LIMITS = {"cutoff": CUTOFF, "nonzero_loss_cutoff": LIMIT}


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
    gradients: list[Tensor]  # of the rows, then of beta if that is a tensor
    active: Tensor | None

    def bits(self) -> list[bytes]:
        return bits(self.loss, *self.gradients, *([] if self.active is None else [self.active]))


def rules_of(call: ManyTuples) -> tuple[str, str] | None:
    """The rules by which one positive and one negative of each anchor are picked; None: nothing is."""
    positive, negative = (call.options.get(name) for name in ("positive", "negative"))
    if call.function == "batch_hard_loss":
        return "hard", "hard"
    if call.function == "easy_positive_loss":
        return "easy", str(negative)
    if negative is None or positive == negative == "all":
        return None
    return str(positive).replace("all", "hard"), str(negative).replace("all", "hard")


def run_mine(case: Case) -> Any:
    rules, options = rules_of(case.call), case.call.options
    assert rules is not None
    given = {name: options.get(name, default) for name, default in LIMITS.items()}
    given |= {"positive": rules[0], "negative": rules[1], "distance": distance_of(case), "backend": KERNELS}
    return T.mine(case.batch.emb, case.batch.labels, **given, **case.batch.options())


def run(case: Case) -> Result:
    batch, inputs = leaves(case.batch)
    call, beta = case.call, []
    if call.beta is not None:
        beta = [call.beta.detach().requires_grad_() if isinstance(call.beta, Tensor) else call.beta]
        inputs += [each for each in beta if isinstance(each, Tensor)]
    extra = {"return_active": True} if call.function == "batch_all_loss" else {}
    value = getattr(T, call.function)(
        batch.emb, batch.labels, *beta, **call.arguments(batch), **extra, backend=KERNELS
    )
    loss, active = value if isinstance(value, tuple) else (value, None)
    return Result(loss.detach(), list(torch.autograd.grad(loss, inputs, cotangent_of(loss))), active)


def distance_of(case: Case) -> str:
    call = case.call
    if call.function in ONE_TRIPLET and call.options["loss"] in ("first_order", "second_order"):
        return "cosine"
    return call.distance


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
    picks = run_mine(case) if rules_of(case.call) is not None else None
    result = None if mines else run(case)
    if not INTERPRETED:  # Triton's interpreter does one thing after the other, slowly
        yield lambda: check_repeats(case, picks, result)
    truth = Truth(case.batch, distance_of(case))
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
    if case.call.beta is None:
        return truth.finite
    return truth.finite and bool(beta_of(case.call, case.batch.compute_type()).isfinite().all())


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
    given = [*case.rows, *([case.call.beta] if isinstance(case.call.beta, Tensor) else [])]
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
    if isinstance(case.call.beta, Tensor):  # a class without an anchor is no part of the loss
        parts[-1] = beta_by_anchor(case.batch.plain(), parts[-1])[torch.from_numpy(truth.kept)]
    need(all(part.isnan().all() for part in parts), "poison", "not everything is NaN")


# Picks


def pick_checks(case: Case, truth: Truth, picks: Any) -> Iterator[Callable[[], None]]:
    rules = rules_of(case.call)
    assert rules is not None
    positive, negative = rules
    p, n = picks.positive.numpy(), picks.negative.numpy()
    d_ap, d_an = real(picks.d_ap), real(picks.d_an)
    yield lambda: check_mined_form(case, picks)
    if positive == "random":
        yield lambda: check_uniform(truth, truth.positives, p, "random positive")
    else:
        yield lambda: check_extreme(truth, truth.positives, p, positive == "hard", f"{positive} positive")
    if negative == "random":
        yield lambda: check_uniform(truth, truth.negatives, n, "random negative")
    elif negative == "distance":
        limits = {name: case.call.options.get(name, default) for name, default in LIMITS.items()}
        yield lambda: check_drawn(truth, n, *limits.values())
    elif negative == "semihard":
        yield lambda: check_semihard(truth, p, n, d_ap, d_an)
    else:
        yield lambda: check_extreme(truth, truth.negatives, n, negative == "easy", f"{negative} negative")
    yield lambda: check_distances(truth, p, d_ap, "d_ap")
    yield lambda: check_distances(truth, n, d_an, "d_an")


def check_mined_form(case: Case, picks: Any) -> None:
    kind, shape = case.batch.compute_type(), case.batch.labels.shape
    need(torch.equal(picks.anchor, torch.arange(*shape)), "form", "anchors are not 0 to N-1")
    forms = [(part.dtype, part.shape) for part in picks[1:]]
    need(forms == 2 * [(torch.int64, shape)] + 2 * [(kind, shape)], "form", f"picks are {forms}")


def check_who(eligible: Array, pick: Array, what: str) -> Array:
    """The anchors that have a pick, once it is clear that they are those which should."""
    need(((pick >= 0) == eligible.any(1)).all(), "picks", f"{what}: one too many, or one too few")
    found = np.nonzero(pick >= 0)[0]
    need(eligible[found, pick[found]].all(), "picks", f"{what}: not eligible")
    return found


def check_uniform(truth: Truth, eligible: Array, pick: Array, what: str) -> None:
    found = check_who(eligible, pick, what)
    if len(found):
        drawn = np.where(eligible, truth.noise, -1)[found].argmax(1)
        need((pick[found] == drawn).all(), "picks", f"{what}: not the one with the largest hash")


def mask_of(truth: Truth, rows: Array, pick: Array) -> Array:
    mask = np.zeros_like(truth.positives)
    mask[rows, pick] = True
    return mask


def check_extreme(truth: Truth, eligible: Array, pick: Array, largest: bool, what: str) -> None:
    found = check_who(eligible, pick, what)
    if not len(found):
        return
    best = np.where(eligible, -truth.square if largest else truth.square, np.inf)[found].argmin(1)
    bound = truth.bound_of(mask_of(truth, found, best))
    bound = bound + truth.key_error[found, pick[found]] + truth.key_error[found, best]
    chosen, extreme = truth.square[found, pick[found]], truth.square[found, best]
    need_within(chosen, extreme, bound, "picks", f"squared distance of the {what}")
    check_first(truth, eligible, pick, what)


def check_first(truth: Truth, eligible: Array, pick: Array, what: str) -> None:
    """Duplicates have equal keys, and so has everything seen from a zero row: the first must win."""
    found = np.nonzero(pick >= 0)[0]
    equal = (truth.y[pick[found]][:, None] == truth.y).all(-1)
    if truth.distance == "cosine":
        equal |= ~(truth.x[found] != 0).any(1, keepdims=True)
    earlier = eligible[found] & equal & (np.arange(len(truth.y)) < pick[found][:, None])
    need(not earlier.any(), "picks", f"{what}: an earlier candidate is just as far")


def check_semihard(truth: Truth, p: Array, n: Array, d_ap: Array, d_an: Array) -> None:
    """The nearest negative strictly farther than the positive that was picked, if there is any."""
    what = "semihard negative"
    found = np.nonzero(n >= 0)[0]
    need((p[found] >= 0).all(), "picks", f"{what} of an anchor without a positive")
    need(truth.negatives[found, n[found]].all(), "picks", f"{what}: not eligible")
    need((d_an[found] > d_ap[found]).all(), "picks", f"{what}: not strictly farther")
    rows = np.nonzero((p >= 0) & truth.negatives.any(1))[0]
    if not len(rows):
        return
    square, p, n = np.where(truth.negatives, truth.square, -1)[rows], p[rows], n[rows]
    threshold = truth.square[rows, p][:, None]
    beyond = np.where(square > threshold, square, np.inf)
    there = np.isfinite(beyond).any(1)
    right = mask_of(truth, rows, p) | mask_of(truth, rows[there], beyond[there].argmin(1))
    bound = truth.bound_of(right) + truth.key_error[rows] + truth.key_error[rows, p][:, None]
    # The threshold is a key as well. Distances as they are reported decide what is strictly farther. Where
    # the keys found something that is not, they decide what is nearest, too.
    d, error = truth.d[rows], truth.error[rows]
    clearly = d - error > truth.d[rows, p][:, None] + truth.error[rows, p][:, None]
    surely = (square > threshold + bound) & clearly & ~truth.overflows[rows, p][:, None]
    need(not (surely.any(1) & (n < 0)).any(), "picks", f"no {what} where there is one")
    nearest, reported = (np.where(surely, most, np.inf).min(1) for most in (square + bound, d + error))
    chosen = np.arange(len(rows)), n
    too_far = (n >= 0) & (square[chosen] > nearest + bound[chosen]) & ((d - error)[chosen] > reported)
    too_near = (n >= 0) & (square[chosen] < threshold[:, 0] - bound[chosen])
    need(not too_far.any(), "picks", f"{what}: a nearer one would do")
    need(not too_near.any(), "picks", f"{what}: nearer than the positive")
    whole = np.full(len(truth.x), -1)
    whole[rows] = n
    check_first(truth, truth.negatives, whole, what)


def check_drawn(truth: Truth, n: Array, cutoff: float, limit: float | None) -> None:
    """A draw by distance has the largest key, log weight plus Gumbel noise, as far as keys differ clearly."""
    what = "drawn negative"
    found = check_who(truth.negatives, n, what)
    if not len(found):
        return
    eligible, width, noise = truth.negatives[found], truth.width, truth.noise[found]
    gumbel = -np.log(-np.log((noise + Real(0.5)) / 2**32))
    d = np.maximum(np.sqrt(truth.cosine_square[found]), cutoff)
    height = np.maximum(1 - np.square(d) / 4, 2.0**-20)
    log_weight = (2 - width) * np.log(d) + (3 - width) / 2 * np.log(height)
    off = truth.promised * 4  # unit rows lie within a radius of 1, and centring leaves none longer than 2
    slope = abs(2 - width) / 2 / np.square(d) + abs(3 - width) / 8 / height
    terms = abs(2 - width) * np.abs(np.log(d)) + abs(3 - width) / 2 * np.abs(np.log(height)) + np.abs(gumbel)
    tolerance = slope * off + 8 * truth.type.eps * (1 + terms)
    key = log_weight + gumbel
    surely = possibly = eligible
    if limit is not None:
        surely = eligible & (np.square(d) + off < limit**2)
        possibly = eligible & (np.square(d) - off < limit**2)
    best = np.where(surely, key - tolerance, -np.inf).max(1, keepdims=True)
    allowed = possibly & (key + tolerance >= best)
    uniform = np.where(eligible, noise, -1).argmax(1)
    chosen = n[found]
    right = allowed[np.arange(len(found)), chosen] | (~surely.any(1) & (chosen == uniform))
    need(right.all(), "picks", f"{what}: another one has the larger key")


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


def beyond_type(truth: Truth, call: ManyTuples) -> bool:
    """Whether an objective over many tuples may not fit its type; then only NaN would be wrong.

    A distance plus a margin is held in that type, and in float64 the sum of an anchor's terms.
    """
    if call.function not in MANY_TUPLES or not truth.unlimited.size:
        return False
    margins = (call.options.get(name) or 0.0 for name in ("margin", "pos_margin", "neg_margin", "alpha"))
    largest = truth.unlimited.max() + max(margins)
    terms = truth.unlimited.size if truth.type.bits == 64 else 1
    return bool(largest * terms >= Real(truth.type.max))


def loss_checks(case: Case, truth: Truth, picks: Any, result: Result) -> Iterator[Callable[[], None]]:
    call, reduction = case.call, case.call.options["reduction"]
    pairs = None if picks is None else (picks.positive.numpy(), picks.negative.numpy())
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
    if isinstance(call.beta, Tensor):
        parts.append(("gradient of beta", result.gradients[-1], by_class(case, call.beta, outcome.beta)))

    @cache
    def plain(gram: bool) -> list[Tensor]:
        return plain_result(case, picks, gram)

    for place, (what, actual, allowed) in enumerate(parts):
        if what != "loss":
            yield partial(check_promised, truth, actual, allowed, 0, what)
        yield partial(
            check_no_worse_than_plain, truth, actual, allowed, lambda gram, i=place: plain(gram)[i], what
        )


def by_class(case: Case, beta: Tensor, by_anchor: Allowed) -> Allowed:
    place = beta_by_anchor(case.batch.plain(), torch.arange(beta.numel()).reshape(beta.shape)).numpy()
    parts = []
    for part in vars(by_anchor).values():
        total = np.zeros(beta.numel(), Real)
        np.add.at(total, place, part)
        parts.append(total.reshape(beta.shape))
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
    eps = max(kind.eps, truth.type.eps)  # a beta of float64 receives what was computed in float32
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


def plain_result(case: Case, picks: Any, gram: bool) -> list[Tensor]:
    """[loss, gradients …] of the plain formulation in the same type, for the picks that were made."""
    batch, call = case.batch.plain(), case.call
    pairs = None if picks is None else (picks.positive, picks.negative)
    if call.function in ONE_TRIPLET:
        assert pairs is not None
        words = {name: call.options[name] for name in ("loss", "reduction", "margin", "temperature")}
        objective = Objective(distance_of(case), **words)
        shape = batch.labels.shape if words["reduction"] == "none" else ()
        cotangent = cotangent_of(torch.zeros(shape, dtype=batch.compute_type()))
        _, loss, gradients = loss_of_picks(batch, *pairs, objective, cotangent)
        return [loss, *gradients]
    loss, gradients, _ = plain_tuples(batch, call, pairs, batch.compute_type(), gram)
    return [loss, *gradients]
