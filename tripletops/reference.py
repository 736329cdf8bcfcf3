"""The oracle: every rule, distance, loss and reduction of one triplet per anchor, in plain torch.

It must be short enough to be checked against the definitions by eye: it forms every difference of two rows,
holds N×M matrices, leaves gradients to autograd and checks no argument (functional.py does; labels are int64
here). It computes in the type it is given, half precision in float32; backends must match it run in float64.
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

# Selection: a rule picks one eligible candidate per anchor, −1 for none.


class Scan(NamedTuple):
    key: Tensor  # (N, M), what is compared
    distance: Tensor  # (N, M), what is reported
    noise: Tensor  # (N, M), what random picks compare; empty unless a rule is random
    d_ap: Tensor  # (N,), distance of the picked positive; NaN for none and until there is one


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


POSITIVES = {"hard": farthest, "easy": nearest, "random": uniform}
NEGATIVES = {"hard": nearest, "semihard": semihard, "easy": farthest, "random": uniform}


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


@torch.no_grad()
def mine(
    emb: Tensor, labels: Tensor, *, positive: str, negative: str, distance: str = "euclidean",
    ref_emb: Tensor | None = None, ref_labels: Tensor | None = None, self_index: Tensor | None = None,
    ignore_label: int | None = None, seed: int | Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(positive, negative, d_ap, d_an), each (N,); −1 and NaN where there is no such candidate."""
    if ref_emb is None or ref_labels is None:
        ref_emb, ref_labels, self_index = emb, labels, torch.arange(len(emb), device=emb.device)
    x, kept = kept_rows(emb, labels, ignore_label)
    y, ref_kept = kept_rows(ref_emb, ref_labels, ignore_label)
    eligible = kept[:, None] & ref_kept & bool(x.isfinite().all() and y.isfinite().all())
    if self_index is not None:
        eligible &= self_index[:, None] != torch.arange(len(y), device=y.device)
    same = labels[:, None] == ref_labels

    compare, report = DISTANCES[distance]
    key = torch.cat([compare(rows[:, None], y) for rows in torch.split(x, 64)])  # spares an N×M×D tensor
    draws = key.new_empty(0) if seed is None else noise(seed, len(x), len(y), key.device)
    scan = Scan(key, report(key), draws, d_ap=key.new_full(key.shape[:1], nan))

    def reported(pick: Tensor) -> Tensor:
        found = (pick >= 0).nonzero()[:, 0]
        return scan.d_ap.new_full(pick.shape, nan).index_put((found,), scan.distance[found, pick[found]])

    p = POSITIVES[positive](scan, eligible & same)
    scan = scan._replace(d_ap=reported(p))
    n = NEGATIVES[negative](scan, eligible & ~same)
    return p, n, scan.d_ap, reported(n)


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
    reduction: str = "mean", seed: int | Tensor | None = None,
) -> Tensor:  # fmt: skip
    distance = distance or ("cosine" if loss in ("first_order", "second_order") else "euclidean")
    p, n, _, _ = mine(
        emb, labels, positive=positive, negative=negative, distance=distance, ref_emb=ref_emb,
        ref_labels=ref_labels, self_index=self_index, ignore_label=ignore_label, seed=seed,
    )  # fmt: skip
    x, _ = kept_rows(emb, labels, ignore_label)
    y = x if ref_emb is None or ref_labels is None else kept_rows(ref_emb, ref_labels, ignore_label)[0]
    losses = losses_of(x, y, p, n, distance, loss, margin, temperature)
    if len(x) and not (x.isfinite().all() and y.isfinite().all()):
        # Every gradient becomes NaN with it.
        losses = losses + nan * (emb.sum() if ref_emb is None else emb.sum() + ref_emb.sum())
    return REDUCTIONS[reduction](losses, (p >= 0) & (n >= 0))
