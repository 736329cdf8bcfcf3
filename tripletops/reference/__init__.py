"""The oracle: every rule, distance, loss, reduction and objective in plain torch.

It must be short enough to be checked against the definitions by eye: it forms every difference of two rows,
holds N×M matrices (a mask of all triplets is N×M×M), leaves gradients to autograd and checks no argument
(functional.py does; labels are int64 here). It computes in the type it is given, half precision in float32;
backends must match it run in float64.

Here are rows, distances, rules, losses and reductions. Every objective has a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from math import inf, nan
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tripletops._words import FUNCTION, LOSS, Function

# Distances between rows (…, D) of any leading shape: the key that selection compares, then what is reported.


def squared(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().sum(-1)


def root(square: Tensor) -> Tensor:
    # The slope of sqrt at 0 is infinite and autograd's 0·inf is NaN, so 0 must not even go in.
    apart = square > 0
    return square.where(apart, 1).sqrt().where(apart, 0)


def unit(x: Tensor) -> Tensor:
    largest = x.detach().abs().amax(-1, keepdim=True)  # the square of 1e30 would not fit float32
    x = x / largest.where(largest > 0, 1)
    square = x.square().sum(-1, keepdim=True)
    return x / square.where(square > 0, 1).sqrt()


def cosine(x: Tensor, y: Tensor) -> Tensor:
    if x.shape[-1] == 0:
        return squared(x, y)
    u, v = unit(x), unit(y)
    zero_row = (u == 0).all(-1) | (v == 0).all(-1)
    return (squared(u, v) / 2).where(~zero_row, 1)


DISTANCES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "euclidean": (squared, root),
    "sqeuclidean": (squared, lambda key: key),
    "cosine": (cosine, lambda key: key),
}


def key_matrix(compare: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([compare(rows[:, None], y) for rows in torch.split(x, 64)])  # spares an N×M×D tensor


# Rows: who is whose positive and negative.


def kept_rows(emb: Tensor, labels: Tensor, ignore_label: int | None) -> tuple[Tensor, Tensor]:
    """The rows, 0 where ignored so that nothing flows in or out there, and a mask of those that are kept."""
    kept = torch.ones_like(labels, dtype=torch.bool) if ignore_label is None else labels != ignore_label
    x = emb.float() if emb.dtype in (torch.float16, torch.bfloat16) else emb
    return x.where(kept[:, None], 0), kept


class Batch(NamedTuple):
    x: Tensor  # (N, D), the anchors
    y: Tensor  # (M, D), the candidates
    kept: Tensor  # (N,), the anchors that are not ignored
    positives: Tensor  # (N, M), whether the candidate is a positive of the anchor
    negatives: Tensor
    finite: bool  # if not, there are neither positives nor negatives


def batch_of(
    emb: Tensor, labels: Tensor, ref_emb: Tensor | None = None, ref_labels: Tensor | None = None,
    self_index: Tensor | None = None, ignore_label: int | None = None,
) -> Batch:  # fmt: skip
    if ref_emb is None or ref_labels is None:
        ref_emb, ref_labels, self_index = emb, labels, torch.arange(len(emb), device=emb.device)
    x, kept = kept_rows(emb, labels, ignore_label)
    y, ref_kept = kept_rows(ref_emb, ref_labels, ignore_label)
    finite = bool(x.isfinite().all() and y.isfinite().all())
    eligible = kept[:, None] & ref_kept & finite
    # NaN comes with `poisoned`, to every gradient or to none.
    x, y = x.where(x.isfinite(), 0), y.where(y.isfinite(), 0)
    if self_index is not None:
        eligible &= self_index[:, None] != torch.arange(len(y), device=y.device)
    same = labels[:, None] == ref_labels
    return Batch(x, y, kept, eligible & same, eligible & ~same, finite)


def distances(batch: Batch, distance: str) -> tuple[Tensor, Tensor]:
    """(N, M), what selection compares and what is reported."""
    compare, report = DISTANCES[distance]
    key = key_matrix(compare, batch.x, batch.y)
    return key, report(key)


def poisoned(loss: Tensor, anchors: int, finite: bool, *inputs: Tensor | None) -> Tensor:
    """NaN where something is not finite, and every gradient with it; no anchor, no loss to poison."""
    if finite or anchors == 0:
        return loss
    return loss + nan * torch.stack([each.sum() for each in inputs if each is not None]).sum()


# Rules: a rule picks one eligible candidate per anchor, −1 for none.


class Scan(NamedTuple):
    batch: Batch
    key: Tensor  # (N, M), what is compared
    distance: Tensor  # (N, M), what is reported
    noise: Tensor  # (N, M), what random picks compare; empty unless a rule is random
    d_ap: Tensor  # (N,), distance of the picked positive; NaN for none and until there is one
    numbers: dict[str, Any]  # of the rules


def lowest(score: Tensor, eligible: Tensor) -> Tensor:
    """Of equal scores the first candidate's, which torch.argmin does not promise."""
    candidates = score.shape[1]
    if candidates == 0:
        return torch.full(score.shape[:1], -1, device=score.device)
    best = score.where(eligible, inf).amin(1, keepdim=True)
    position = torch.arange(candidates, device=score.device)
    first = position.where(eligible & (score == best), candidates).amin(1)
    return first.where(first < candidates, -1)


def nearest(scan: Scan, eligible: Tensor) -> Tensor:
    return lowest(scan.key, eligible)


def farthest(scan: Scan, eligible: Tensor) -> Tensor:
    return lowest(-scan.key, eligible)


def beyond(scan: Scan, eligible: Tensor) -> Tensor:
    return lowest(scan.key, eligible & (scan.distance > scan.d_ap[:, None] + scan.numbers["offset"]))


def uniform(scan: Scan, eligible: Tensor) -> Tensor:
    return lowest(-scan.noise, eligible)


def by_weight(scan: Scan, eligible: Tensor) -> Tensor:
    # Of exponential draws divided by their weights, each is the smallest as often as its weight says. log1p:
    # the largest hashes leave the smallest draws, whose digits 1 − v would round away in float32.
    v = (2**32 - scan.noise - 0.5) / 2**32
    batch, numbers = scan.batch, scan.numbers
    log_weight = log_weights(batch.x, batch.y, numbers["cutoff"], numbers["nonzero_loss_cutoff"])
    draw = (-torch.log1p(-v)).log() - log_weight
    pick = lowest(draw, eligible & (log_weight > -inf))
    return pick.where(pick >= 0, uniform(scan, eligible))


def farther_than_a_negative(scan: Scan, eligible: Tensor) -> Tensor:
    limit = scan.key.where(scan.batch.negatives, inf).amin(1, keepdim=True) if scan.key.numel() else scan.key
    pick = uniform(scan, eligible & (scan.key > limit))
    return pick.where(pick >= 0, uniform(scan, eligible))


def nearer_than_a_positive(scan: Scan, eligible: Tensor) -> Tensor:
    limit = scan.key.where(scan.batch.positives, -inf).amax(1, keepdim=True) if scan.key.numel() else scan.key
    pick = uniform(scan, eligible & (scan.key < limit))
    return pick.where(pick >= 0, uniform(scan, eligible))


POSITIVES = {"hard": farthest, "easy": nearest, "random": uniform, "softhard": farther_than_a_negative}
NEGATIVES = {
    "hard": nearest,
    "semihard": lambda scan, eligible: beyond(scan._replace(numbers={"offset": 0.0}), eligible),
    "beyond": beyond,
    "softhard": nearer_than_a_positive,
    "easy": farthest,
    "random": uniform,
    "distance": by_weight,
}


def log_weights(x: Tensor, y: Tensor, cutoff: float, nonzero_loss_cutoff: float | None) -> Tensor:
    """(N, M), minus the log of how dense the distance d is between points of the unit sphere (Wu et al.)."""
    d = root(2 * key_matrix(cosine, x, y)).double().clamp(min=cutoff)
    width = x.shape[1]
    height = (1 - d.square() / 4).clamp(min=2**-20)  # the density at the antipode is 0
    log_weight = (2 - width) * d.log() - (width - 3) / 2 * height.log()
    return log_weight if nonzero_loss_cutoff is None else log_weight.where(d < nonzero_loss_cutoff, -inf)


def noise(seed: int | Tensor, anchors: int, candidates: int, device: torch.device) -> Tensor:
    """A 32-bit hash of (seed, anchor, candidate), one-to-one in the candidate; float64 holds it exactly."""

    def shift(z: Tensor, bits: int) -> Tensor:  # of an unsigned number: int64 >> would repeat the sign
        return (z >> bits) & ((1 << (64 - bits)) - 1)

    row = torch.arange(1, anchors + 1, device=device) * (0x9E3779B97F4A7C15 - 2**64) + seed
    row = (row ^ shift(row, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    row = (row ^ shift(row, 27)) * (0x94D049BB133111EB - 2**64)
    row = (row ^ shift(row, 31))[:, None]
    x = (torch.arange(candidates, device=device) * 0x9E3779B1 + row) & 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    x = x ^ shift(row, 32)
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return (x ^ (x >> 16)).double()


@torch.no_grad()
def select(
    batch: Batch, positive: str, negative: str, distance: str, seed: int | Tensor | None, **numbers: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(positive, negative, d_ap, d_an), each (N,); −1 and NaN where there is no such candidate."""
    key, reported = distances(batch, distance)
    draws = key.new_empty(0) if seed is None else noise(seed, len(batch.x), len(batch.y), key.device)
    scan = Scan(batch, key, reported, draws, key.new_full(key.shape[:1], nan), numbers)

    def distance_of(pick: Tensor) -> Tensor:
        found = (pick >= 0).nonzero()[:, 0]
        return scan.d_ap.new_full(pick.shape, nan).index_put((found,), reported[found, pick[found]])

    p = POSITIVES[positive](scan, batch.positives)
    scan = scan._replace(d_ap=distance_of(p))
    n = NEGATIVES[negative](scan, batch.negatives)
    return p, n, scan.d_ap, distance_of(n)


# Losses of one triplet: functions of d_ap, d_an and the numbers that a loss has.


def softplus(z: Tensor) -> Tensor:  # F.softplus is linear above 20, which costs float64 half its digits
    return torch.logaddexp(z, torch.zeros_like(z))


def margin(d_ap: Tensor, d_an: Tensor, *, margin: float, **_: Any) -> Tensor:
    return (d_ap - d_an + margin).relu()


def soft_margin(d_ap: Tensor, d_an: Tensor, **_: Any) -> Tensor:
    return softplus(d_ap - d_an)


def first_order(d_ap: Tensor, d_an: Tensor, *, temperature: float, **_: Any) -> Tensor:
    s_ap, s_an = 1 - d_ap, 1 - d_an
    return softplus((s_an - s_ap) / temperature)


def second_order(d_ap: Tensor, d_an: Tensor, *, temperature: float, **_: Any) -> Tensor:
    s_ap, s_an = 1 - d_ap, 1 - d_an
    return softplus((s_an.square() / 2 - s_ap + s_ap.square() / 2) / temperature)


def sct(d_ap: Tensor, d_an: Tensor, *, temperature: float, sct_weight: float, **_: Any) -> Tensor:
    s_ap, s_an = 1 - d_ap, 1 - d_an
    return first_order(d_ap, d_an, temperature=temperature).where(s_an <= s_ap, sct_weight * s_an)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "margin": margin,
    "soft_margin": soft_margin,
    "first_order": first_order,
    "second_order": second_order,
    "sct": sct,
}


# Reductions: each anchor's loss is the sum of its terms, and a mean divides by their number.


def reduce_terms(losses: Tensor, reduction: str, terms: Tensor, nonzero: Tensor) -> Tensor:
    """Of the (N,) losses, given how many terms they are made of and how many of these are above 0."""
    if reduction == "none":
        return losses
    if reduction == "mean_nonzero":
        losses = losses.clamp(min=0)  # those above 0 alone
    divisor = {"sum": torch.ones_like(terms), "mean": terms, "mean_nonzero": nonzero}[reduction]
    return losses.sum() / divisor.clamp(min=1)


def by_anchor(terms: Tensor, anchor: Tensor, anchors: int) -> Tensor:
    return terms.new_zeros(anchors).index_put((anchor,), terms, accumulate=True)


def pairs(
    batch: Batch, positive: str, negative: str, distance: str, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(N, M) distances and masks of the pairs to take; none where the batch lacks positives, or negatives."""
    one_positive, one_negative = ("hard" if word == "all" else word for word in (positive, negative))
    p, n, _, _ = select(batch, one_positive, one_negative, distance, **options)
    candidate = torch.arange(len(batch.y), device=p.device)
    positives = batch.positives if positive == "all" else p[:, None] == candidate
    negatives = batch.negatives if negative == "all" else n[:, None] == candidate
    both = batch.positives.any() & batch.negatives.any()
    return distances(batch, distance)[1], positives & both, negatives & both


# What users call. Options that are left out have the defaults of `_words`.


def defaults(function: Function) -> dict[str, Any]:
    options: dict[str, Any] = {option.name: option.default for option in function.options()}
    return {**options, "seed": None} if function.draws else options


def mine(
    emb: Tensor, labels: Tensor, *, exclusive: bool = False, **given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(positive, negative, d_ap, d_an), each (N,); −1 and NaN where there is no such candidate."""
    batch, options = split(emb, labels, {**defaults(FUNCTION["mine"]), **given})
    positive, negative, d_ap, d_an = select(batch, **options)
    used: set[int] = set()
    for anchor in range(len(emb) if exclusive else 0):
        triplet = {_own_row(anchor, given), int(positive[anchor]), int(negative[anchor])}
        if positive[anchor] < 0 or negative[anchor] < 0:
            continue
        if used.isdisjoint(triplet):
            used |= triplet - {-1}
        else:
            positive[anchor] = negative[anchor] = -1
            d_ap[anchor] = d_an[anchor] = torch.nan
    return positive, negative, d_ap, d_an


def _own_row(anchor: int, given: dict[str, Any]) -> int:
    """Where the anchor is among the candidates; −1: nowhere."""
    if given.get("ref_emb") is None:
        return anchor
    return -1 if given.get("self_index") is None else int(given["self_index"][anchor])


def split(emb: Tensor, labels: Tensor, given: dict[str, Any]) -> tuple[Batch, dict[str, Any]]:
    """The batch, and the options beside its rows."""
    rows = {name: given.get(name) for name in ("ref_emb", "ref_labels", "self_index", "ignore_label")}
    options = {name: value for name, value in given.items() if name not in rows}
    if options.get("distance", "") is None:
        cosine_only = "loss" in options and LOSS[options["loss"]].cosine
        options["distance"] = "cosine" if cosine_only else "euclidean"
    return batch_of(emb, labels, **rows), options


def _public(function: Function) -> Callable[..., Any]:
    """The objective's own function takes a batch, each anchor's learned number if any, and the options."""
    module = import_module(f"{__name__}.{function.objective}")
    plain: Callable[..., Any] = getattr(module, function.name)

    @wraps(plain)
    def public(emb: Tensor, labels: Tensor, *learned: Tensor, **given: Any) -> Any:
        batch, options = split(emb, labels, {**defaults(function), **given})
        result = plain(batch, *learned, **options)
        loss, *others = result if isinstance(result, tuple) else (result,)
        finite = batch.finite and all(bool(each[batch.kept].isfinite().all()) for each in learned)
        loss = poisoned(loss, len(emb), finite, emb, given.get("ref_emb"), *learned)
        return (loss, *others) if others else loss

    return public


for _function in FUNCTION.values():
    if _function.name == f"{_function.objective}_loss":
        globals()[_function.name] = _public(_function)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
