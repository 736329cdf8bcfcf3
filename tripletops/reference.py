"""The oracle: every rule, distance, loss and reduction, for one triplet per anchor or many, in plain torch.

It must be short enough to be checked against the definitions by eye: it forms every difference of two rows,
holds N×M matrices (a mask of all triplets is N×M×M), leaves gradients to autograd and checks no argument
(functional.py does; labels are int64 here). It computes in the type it is given, half precision in float32;
backends must match it run in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import NamedTuple

import torch
from torch import Tensor

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


# Selection: a rule picks one eligible candidate per anchor, −1 for none.


class Scan(NamedTuple):
    key: Tensor  # (N, M), what is compared
    distance: Tensor  # (N, M), what is reported
    noise: Tensor  # (N, M), what random picks compare; empty unless a rule is random
    d_ap: Tensor  # (N,), distance of the picked positive; NaN for none and until there is one
    log_weight: Tensor = torch.empty(0)  # (N, M), −inf for a weight of 0; empty unless the rule is "distance"


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


def semihard(scan: Scan, eligible: Tensor) -> Tensor:
    return lowest(scan.key, eligible & (scan.distance > scan.d_ap[:, None]))


def uniform(scan: Scan, eligible: Tensor) -> Tensor:
    return lowest(-scan.noise, eligible)


def by_weight(scan: Scan, eligible: Tensor) -> Tensor:
    # Of exponential draws divided by their weights, each is the smallest as often as its weight says. log1p:
    # the largest hashes leave the smallest draws, whose digits 1 − v would round away in float32.
    v = (2**32 - scan.noise - 0.5) / 2**32
    draw = (-torch.log1p(-v)).log() - scan.log_weight
    pick = lowest(draw, eligible & (scan.log_weight > -inf))
    return pick.where(pick >= 0, uniform(scan, eligible))


POSITIVES = {"hard": farthest, "easy": nearest, "random": uniform}
NEGATIVES = {
    "hard": nearest,
    "semihard": semihard,
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


# Losses of one triplet: functions of (d_ap, d_an, margin, temperature).


def softplus(z: Tensor) -> Tensor:  # F.softplus is linear above 20, which costs float64 half its digits
    return torch.logaddexp(z, torch.zeros_like(z))


def first_order(d_ap: Tensor, d_an: Tensor, margin: float, temperature: float) -> Tensor:
    s_ap, s_an = 1 - d_ap, 1 - d_an
    return softplus((s_an - s_ap) / temperature)


def second_order(d_ap: Tensor, d_an: Tensor, margin: float, temperature: float) -> Tensor:
    s_ap, s_an = 1 - d_ap, 1 - d_an
    return softplus((s_an.square() / 2 - s_ap + s_ap.square() / 2) / temperature)


LOSSES: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "margin": lambda d_ap, d_an, margin, temperature: (d_ap - d_an + margin).relu(),
    "soft_margin": lambda d_ap, d_an, margin, temperature: softplus(d_ap - d_an),
    "first_order": first_order,
    "second_order": second_order,
}
# Of the (N,) losses, 0 at anchors that are not valid.
REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda losses, valid: losses.sum() / valid.sum().clamp(min=1),
    "mean_nonzero": lambda losses, valid: losses.sum() / (losses > 0).sum().clamp(min=1),
    "sum": lambda losses, valid: losses.sum(),
    "none": lambda losses, valid: losses,
}


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
    emb: Tensor, labels: Tensor, ref_emb: Tensor | None, ref_labels: Tensor | None, self_index: Tensor | None,
    ignore_label: int | None,
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


def poisoned(loss: Tensor, anchors: int, finite: bool, *inputs: Tensor | None) -> Tensor:
    """NaN where something is not finite, and every gradient with it; no anchor, no loss to poison."""
    if finite or anchors == 0:
        return loss
    return loss + nan * torch.stack([each.sum() for each in inputs if each is not None]).sum()


@torch.no_grad()
def select(
    batch: Batch, positive: str, negative: str, distance: str, seed: int | Tensor | None, cutoff: float,
    nonzero_loss_cutoff: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    compare, report = DISTANCES[distance]
    key = key_matrix(compare, batch.x, batch.y)
    draws = key.new_empty(0) if seed is None else noise(seed, len(batch.x), len(batch.y), key.device)
    scan = Scan(key, report(key), draws, d_ap=key.new_full(key.shape[:1], nan))
    if negative == "distance":
        scan = scan._replace(log_weight=log_weights(batch.x, batch.y, cutoff, nonzero_loss_cutoff))

    def reported(pick: Tensor) -> Tensor:
        found = (pick >= 0).nonzero()[:, 0]
        return scan.d_ap.new_full(pick.shape, nan).index_put((found,), scan.distance[found, pick[found]])

    p = POSITIVES[positive](scan, batch.positives)
    scan = scan._replace(d_ap=reported(p))
    n = NEGATIVES[negative](scan, batch.negatives)
    return p, n, scan.d_ap, reported(n)


def mine(
    emb: Tensor, labels: Tensor, *, positive: str, negative: str, distance: str = "euclidean",
    ref_emb: Tensor | None = None, ref_labels: Tensor | None = None, self_index: Tensor | None = None,
    ignore_label: int | None = None, seed: int | Tensor | None = None, cutoff: float = 0.5,
    nonzero_loss_cutoff: float | None = 1.4,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(positive, negative, d_ap, d_an), each (N,); −1 and NaN where there is no such candidate."""
    batch = batch_of(emb, labels, ref_emb, ref_labels, self_index, ignore_label)
    return select(batch, positive, negative, distance, seed, cutoff, nonzero_loss_cutoff)


def losses_of(
    x: Tensor, y: Tensor, p: Tensor, n: Tensor, distance: str, loss: str, margin: float, temperature: float
) -> Tensor:
    """(N,) losses of the triplets (i, p[i], n[i]), 0 where one of the two is −1."""
    valid = ((p >= 0) & (n >= 0)).nonzero()[:, 0]
    compare, report = DISTANCES[distance]
    d_ap = report(compare(x[valid], y[p[valid]]))
    d_an = report(compare(x[valid], y[n[valid]]))
    return x.new_zeros(len(x)).index_put((valid,), LOSSES[loss](d_ap, d_an, margin, temperature))


def triplet_loss(
    emb: Tensor, labels: Tensor, *, positive: str = "hard", negative: str = "hard", loss: str = "margin",
    distance: str | None = None, margin: float = 0.2, temperature: float = 1.0, ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None, self_index: Tensor | None = None, ignore_label: int | None = None,
    reduction: str = "mean", seed: int | Tensor | None = None, cutoff: float = 0.5,
    nonzero_loss_cutoff: float | None = 1.4,
) -> Tensor:  # fmt: skip
    distance = distance or ("cosine" if loss in ("first_order", "second_order") else "euclidean")
    batch = batch_of(emb, labels, ref_emb, ref_labels, self_index, ignore_label)
    p, n, _, _ = select(batch, positive, negative, distance, seed, cutoff, nonzero_loss_cutoff)
    losses = losses_of(batch.x, batch.y, p, n, distance, loss, margin, temperature)
    losses = poisoned(losses, len(emb), batch.finite, emb, ref_emb)
    return REDUCTIONS[reduction](losses, (p >= 0) & (n >= 0))


# Objectives over many tuples: each anchor's loss is the sum of its terms, and a mean divides by their number.


def reduce_terms(losses: Tensor, reduction: str, terms: Tensor, nonzero: Tensor) -> Tensor:
    """Of the (N,) losses, given how many terms they are made of and how many of these are above 0."""
    if reduction == "none":
        return losses
    divisor = {"sum": torch.ones_like(terms), "mean": terms, "mean_nonzero": nonzero}[reduction]
    return losses.sum() / divisor.clamp(min=1)


def by_anchor(terms: Tensor, anchor: Tensor, anchors: int) -> Tensor:
    return terms.new_zeros(anchors).index_put((anchor,), terms, accumulate=True)


def batch_all_loss(
    emb: Tensor, labels: Tensor, *, margin: float = 0.2, loss: str = "margin", distance: str | None = None,
    ref_emb: Tensor | None = None, ref_labels: Tensor | None = None, self_index: Tensor | None = None,
    ignore_label: int | None = None, reduction: str = "mean",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss, number of active triplets)."""
    batch = batch_of(emb, labels, ref_emb, ref_labels, self_index, ignore_label)
    compare, report = DISTANCES[distance or "euclidean"]
    d = report(key_matrix(compare, batch.x, batch.y))
    a, p, n = (batch.positives[:, :, None] & batch.negatives[:, None, :]).nonzero().unbind(1)
    terms = LOSSES[loss](d[a, p], d[a, n], margin, 1.0)
    valid = torch.ones_like(terms, dtype=torch.bool)
    active = valid if loss == "soft_margin" else terms > 0  # softplus is never 0, though it may round to it
    total = reduce_terms(by_anchor(terms, a, len(emb)), reduction, valid.sum(), active.sum())
    return poisoned(total, len(emb), batch.finite, emb, ref_emb), active.sum()


def semi_hard_loss(
    emb: Tensor, labels: Tensor, *, margin: float = 0.2, distance: str | None = None,
    ref_emb: Tensor | None = None, ref_labels: Tensor | None = None, self_index: Tensor | None = None,
    ignore_label: int | None = None, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    batch = batch_of(emb, labels, ref_emb, ref_labels, self_index, ignore_label)
    compare, report = DISTANCES[distance or "euclidean"]
    key = key_matrix(compare, batch.x, batch.y)
    d = report(key)
    a, p = (batch.positives & batch.negatives.any(1, keepdim=True)).nonzero().unbind(1)
    scan = Scan(key.detach()[a], d.detach()[a], noise=key.new_empty(0), d_ap=d.detach()[a, p])
    n = semihard(scan, batch.negatives[a])
    n = n.where(n >= 0, farthest(scan, batch.negatives[a]))
    terms = LOSSES["margin"](d[a, p], d[a, n], margin, 1.0)
    valid = torch.ones_like(terms, dtype=torch.bool)
    total = reduce_terms(by_anchor(terms, a, len(emb)), reduction, valid.sum(), (terms > 0).sum())
    return poisoned(total, len(emb), batch.finite, emb, ref_emb)


def multi_similarity_loss(
    emb: Tensor, labels: Tensor, *, alpha: float = 2.0, beta: float = 50.0, base: float = 1.0,
    epsilon: float | None = 0.1, positive: str = "all", ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None, self_index: Tensor | None = None, ignore_label: int | None = None,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    batch = batch_of(emb, labels, ref_emb, ref_labels, self_index, ignore_label)
    valid = batch.positives.any(1) & batch.negatives.any(1)
    s = 1 - key_matrix(cosine, batch.x, batch.y)
    positives, negatives = (mask & valid[:, None] for mask in (batch.positives, batch.negatives))
    if epsilon is not None and len(batch.y):
        least, most = s.where(positives, inf).amin(1), s.where(negatives, -inf).amax(1)
        positives = positives & (s < most[:, None] + epsilon)
        negatives = negatives & (s > least[:, None] - epsilon)
    if positive == "easy":
        easy = lowest(-s.detach(), batch.positives & valid[:, None])
        positives = easy[:, None] == torch.arange(len(batch.y), device=s.device)

    def log_one_plus_sum(exponent: Tensor, mask: Tensor) -> Tensor:
        nothing = torch.finfo(s.dtype).min  # e to it is 0; of nothing but −inf, logsumexp has a slope of NaN
        return softplus(exponent.where(mask, nothing).logsumexp(1))

    losses = log_one_plus_sum(-alpha * (s - base), positives) / alpha
    losses = losses + log_one_plus_sum(beta * (s - base), negatives) / beta
    losses = poisoned(losses, len(emb), batch.finite, emb, ref_emb)
    return REDUCTIONS[reduction](losses, valid)


def pairs(
    batch: Batch, positive: str, negative: str, distance: str, seed: int | Tensor | None, cutoff: float,
    nonzero_loss_cutoff: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(N, M) distances and masks of the pairs to take; none where the batch lacks positives, or negatives."""
    p, n, _, _ = select(
        batch, "hard" if positive == "all" else positive, "hard" if negative == "all" else negative, distance,
        seed, cutoff, nonzero_loss_cutoff,
    )  # fmt: skip
    candidate = torch.arange(len(batch.y), device=p.device)
    positives = batch.positives if positive == "all" else p[:, None] == candidate
    negatives = batch.negatives if negative == "all" else n[:, None] == candidate
    both = batch.positives.any() & batch.negatives.any()
    compare, report = DISTANCES[distance]
    return report(key_matrix(compare, batch.x, batch.y)), positives & both, negatives & both


def contrastive_loss(
    emb: Tensor, labels: Tensor, *, pos_margin: float = 0.0, neg_margin: float = 1.0, positive: str = "all",
    negative: str = "all", seed: int | Tensor | None = None, cutoff: float = 0.5,
    nonzero_loss_cutoff: float | None = 1.4, distance: str | None = None, ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None, self_index: Tensor | None = None, ignore_label: int | None = None,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    batch = batch_of(emb, labels, ref_emb, ref_labels, self_index, ignore_label)
    d, positives, negatives = pairs(
        batch, positive, negative, distance or "euclidean", seed, cutoff, nonzero_loss_cutoff
    )
    pull = (d - pos_margin).relu().where(positives, 0)
    push = (neg_margin - d).relu().where(negatives, 0)
    pulls, pushes = (pull > 0).sum(), (push > 0).sum()
    total = reduce_terms(pull.sum(1), reduction, pulls, pulls)
    total = total + reduce_terms(push.sum(1), reduction, pushes, pushes)
    return poisoned(total, len(emb), batch.finite, emb, ref_emb)


def beta_margin_loss(
    emb: Tensor, labels: Tensor, beta: Tensor, *, alpha: float = 0.2, positive: str = "random",
    negative: str = "distance", seed: int | Tensor | None = None, cutoff: float = 0.5,
    nonzero_loss_cutoff: float | None = 1.4, distance: str | None = None, ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None, self_index: Tensor | None = None, ignore_label: int | None = None,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """`beta` is (N,), that of each anchor; it receives a gradient too."""
    batch = batch_of(emb, labels, ref_emb, ref_labels, self_index, ignore_label)
    d, positives, negatives = pairs(
        batch, positive, negative, distance or "euclidean", seed, cutoff, nonzero_loss_cutoff
    )
    pull = (d - beta[:, None] + alpha).relu().where(positives, 0)
    push = (beta[:, None] - d + alpha).relu().where(negatives, 0)
    terms = (pull > 0).sum() + (push > 0).sum()
    total = reduce_terms((pull + push).sum(1), reduction, terms, terms)
    finite = batch.finite and bool(beta[batch.kept].isfinite().all())
    return poisoned(total, len(emb), finite, emb, ref_emb, beta)
