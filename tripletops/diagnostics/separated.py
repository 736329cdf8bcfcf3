"""The nearest α-triplet-separated embedding (000, Definition 2.1), by optimisation from many starts.

Both distances of an embedding f from F_TS, the set of all separated ones, are infima: of the Hausdorff-like
distance in (13), of the isometric error in (15). A search finds a separated embedding, whose distance is an
upper bound of the infimum. It must be separated when it is measured, not nearly so: what descent finds is
pulled towards collapsed classes until no triplet has a loss.

(12) compares sets of points and (26) compares the places of each point. For one pair of embeddings they
differ: two points of a class that change places are at distance 0 by (12). Their infima are equal. If g is
separated and at distance r from f by (12), move every point to the nearest place that its class has in g. No
point moves by more than r, and fewer places of the same classes are still separated. So the search moves
points, and what it returns has the same distance by (12) and by (26).
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from tripletops._arguments import encode_rows
from tripletops._rows import row_distances, whole
from tripletops.diagnostics.rows import number

__all__ = ["Separated", "to_separated"]

METRICS = ("isometric", "hausdorff")
MOST_ROWS = 512  # the search holds all distances of every start

_ELEMENTS = 2**23  # distances that are held at once
_SLACK = 2.0**-40  # by which triplets are separated, so that measuring the distances otherwise finds no loss
_REPAIRS = 40  # halvings of the way to collapsed classes
_WEIGHTS = (1.0, 2.0, 4.0, 8.0)  # of the worst triplet against the distance, by start
_RATES = (0.05, 2e-4)  # Adam's step, first and last; embeddings are scaled to a diameter of about 1
_TEMPERATURES = (0.05, 2e-4)  # of the smooth maxima, first and last
_NOISES = (0.02, 0.1, 0.4)


class Separated(NamedTuple):
    """A separated embedding near a given one. For B sets, every number is (B,), else ()."""

    emb: Tensor
    """(N, D) or (B, N, D) float64, α-triplet-separated. Rounded to float32 it may not be."""
    upper: Tensor
    """Its distance from the given embedding: an upper bound of the distance to F_TS."""
    lower: Tensor
    """A proved lower bound of that distance: ½·loss for d_iso, ¼·loss for d_haus."""
    loss: Tensor
    """The loss of the hardest triplet of the given embedding, max [d_ap − d_an + α]₊."""
    alpha: float
    metric: str

    def __str__(self) -> str:
        name, share = ("d_iso", "1/2") if self.metric == "isometric" else ("d_haus", "1/4")
        if self.upper.dim():
            return (
                f"{name}(f, F_TS) of {len(self.upper)} sets, α={self.alpha:g}: lower bounds ({share} of the "
                f"hardest triplet's loss) {self.lower.tolist()}, upper bounds (the nearest separated "
                f"embedding found) {self.upper.tolist()}"
            )
        return (
            f"{name}(f, F_TS), α={self.alpha:g}: at least {float(self.lower):.6g} (lower bound: {share} of "
            f"the hardest triplet's loss {float(self.loss):.6g}), at most {float(self.upper):.6g} (upper "
            f"bound: the nearest separated embedding found)"
        )


class _Sets(NamedTuple):
    """Embeddings to separate, centred and of diameter about 1. Starts come before sets in all shapes."""

    f: Tensor  # (B, N, D)
    distances: Tensor  # (B, N, N)
    same: Tensor  # (B, N, N), whether two rows have one class; a row is its own positive
    averaging: Tensor  # (B, N, N), rows to their class's mean
    alpha: Tensor  # (B, 1)
    slack: Tensor  # (B,)


def to_separated(
    emb: Tensor,
    labels: Tensor,
    alpha: float = 0.0,
    metric: str = "isometric",
    *,
    starts: int = 16,
    steps: int = 400,
    seed: int = 0,
) -> Separated:
    """Search for the α-triplet-separated embedding nearest to `emb`, and bound its distance from both sides.

    This is for small sets: all N×N distances of every start are held. An embedding that is separated already
    is returned as it is, with 0 for both bounds; so is one class alone, which has no triplet.

    The lower bounds are proved: a triplet's loss changes by at most twice the isometric error (Theorem 3.3),
    and by at most four times the largest movement. The search for d_iso starts at what is found for d_haus,
    by whose movement r no distance changes by more than 2r. So ½·d_iso ≤ d_haus holds for what is found, as
    for the infima. It is the movement (26) that makes this true; see the top of this module on (12).
    d_iso ≤ 2·L, the other half of Theorem 3.3, is false for α > 0 in general.

    The isometric error does not see rotations: what is returned is turned and moved to lie close to `emb`.

    Args:
        emb: (N, D) of 2 to 512 rows, or (B, N, D) for B sets at once.
        labels: (N,) integer class ids, or (B, N).
        alpha: the margin, 0 or greater.
        metric: ``"isometric"`` for (15), ``"hausdorff"`` for (13).
        starts: how many descents there are.
        steps: of each descent.
        seed: of the random starts.
    """
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r} is not one of {', '.join(map(repr, METRICS))}")
    alpha = number("alpha", alpha, at_least=0)
    starts, steps = whole("starts", starts), whole("steps", steps)
    rows, ids = _checked(emb, labels, alpha)
    same = ids[:, :, None] == ids[:, None, :]
    excess = _excess(rows, same, rows.new_tensor(alpha))
    loss, found = excess.clamp(min=0), rows.clone()
    wrong = (loss > 0).nonzero()[:, 0]
    if len(wrong):
        generator = torch.Generator(rows.device).manual_seed(seed)
        at_once = max(1, _ELEMENTS // rows.shape[1] ** 2)  # embeddings whose distances may be held
        search = _Search(starts, steps, generator, at_once)
        for some in wrong.split(max(1, at_once // starts)):
            found[some] = _nearest(rows[some], same[some], alpha, metric, search)
        if bool((_excess(found[wrong], same[wrong], rows.new_tensor(alpha)) > 0).any()):
            raise ValueError("emb lies too far from 0 for float64 to separate its rows: subtract their mean")
    upper = _isometric(found, rows) if metric == "isometric" else _pointwise(found, rows)
    lower = loss / (2 if metric == "isometric" else 4)
    if emb.dim() == 2:
        return Separated(found[0], upper[0], lower[0], loss[0], alpha, metric)
    return Separated(found, upper, lower, loss, alpha, metric)


def _checked(emb: Tensor, labels: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """(B, N, D) in float64 and (B, N), or what is wrong with them."""
    if isinstance(emb, Tensor) and isinstance(labels, Tensor) and emb.dim() == 3:
        if labels.shape not in (emb.shape[:2], emb.shape[1:2]):
            raise ValueError(
                f"emb of shape {tuple(emb.shape)} needs labels (N,) or (B, N), got {tuple(labels.shape)}"
            )
        shape, ids = emb.shape, labels.expand(emb.shape[:2]).reshape(-1)
        emb, labels, *_ = encode_rows(emb.reshape(-1, shape[2]), ids, None, None, None, None)
    else:
        emb, labels, *_ = encode_rows(emb, labels, None, None, None, None)
        shape = torch.Size((1, *emb.shape))
    if not 2 <= shape[1] <= MOST_ROWS:
        raise ValueError(f"a set has {shape[1]} rows: the search is for 2 to {MOST_ROWS}")
    rows = emb.detach().double().reshape(shape)
    if not rows.isfinite().all():
        bad = (~rows.isfinite().all(2)).nonzero()[0].tolist()
        raise ValueError(f"emb is not finite in row {bad[1]}" + (f" of set {bad[0]}" if shape[0] > 1 else ""))
    if alpha > 0 and shape[2] == 0:
        raise ValueError(f"emb has rows of length 0, which alpha={alpha:g} cannot separate")
    return rows, labels.reshape(shape[:2])


def _excess(g: Tensor, same: Tensor, alpha: Tensor) -> Tensor:
    """The largest d_ap − d_an + α of all triplets, −inf without any: (…, B) for g (…, B, N, D)."""
    distances = row_distances(g, g)
    farthest = distances.masked_fill(~same, 0).amax(-1)
    nearest = distances.masked_fill(same, inf).amin(-1)
    return (farthest - nearest).amax(-1) + alpha


def _pointwise(g: Tensor, f: Tensor) -> Tensor:
    """(26): the largest movement of a row."""
    return (g - f).square().sum(-1).sqrt().amax(-1)


def _isometric(g: Tensor, f: Tensor) -> Tensor:
    """(14): the largest change of a distance."""
    return (row_distances(g, g) - row_distances(f, f)).abs().flatten(-2).amax(-1)


class _Search(NamedTuple):
    """How much is tried."""

    starts: int
    steps: int
    generator: torch.Generator
    at_once: int  # embeddings that are descended from at once

    def noise(self, like: Tensor, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=like.dtype, device=like.device)


def _nearest(rows: Tensor, same: Tensor, alpha: float, metric: str, search: _Search) -> Tensor:
    """The nearest separated embedding found for every set, (B, N, D)."""
    centre = rows.mean(1, keepdim=True)
    scale = (row_distances(rows, rows).flatten(1).amax(1) + alpha)[:, None, None]
    f = (rows - centre) / scale
    # Adding the centre again rounds coordinates to its precision.
    rounding = 64 * torch.finfo(rows.dtype).eps * (centre.abs().amax((1, 2)) / scale[:, 0, 0])
    averaging = same.double() / same.sum(-1, keepdim=True)
    sets = _Sets(f, row_distances(f, f), same, averaging, alpha / scale[:, 0], _SLACK + rounding)
    collapsed = averaging @ f
    starts = torch.cat([f[None], collapsed[None], (f + collapsed)[None] / 2])
    g = _best(_around(starts, sets, search), sets, _movement, _pointwise, search)
    # Every point goes to the nearest place of its class, which makes (12) and (26) equal.
    place = row_distances(f, g).masked_fill(~same, inf).argmin(-1)
    g = g.gather(1, place[:, :, None].expand_as(g))
    if metric == "isometric":
        starts = torch.cat([g[None], f[None], collapsed[None]])
        other = _best(_around(starts, sets, search), sets, _stretch, _isometric, search)
        better = _isometric(other, f) < _isometric(g, f)
        g = _laid_on(torch.where(better[:, None, None], other, g), f)
    return g * scale + centre


def _around(starts: Tensor, sets: _Sets, search: _Search) -> Tensor:
    """As many starts as are asked for: the given ones, then those again with points or classes moved."""
    given = len(starts)
    found = starts[torch.arange(search.starts, device=starts.device) % given]
    for place in range(given, search.starts):
        noise = search.noise(starts, *starts.shape[1:])
        if place % 2:
            # Rows of a class have one noise: its mean, of the size of one row's.
            noise = sets.averaging @ noise * sets.same.sum(-1, keepdim=True).sqrt()
        found[place] += _NOISES[place // 2 % len(_NOISES)] * noise
    return found


Objective = Callable[[Tensor, Tensor, _Sets, float], Tensor]
Measure = Callable[[Tensor, Tensor], Tensor]


def _smooth_maximum(values: Tensor, temperature: float) -> Tensor:
    return temperature * (values / temperature).logsumexp(-1)


def _movement(g: Tensor, distances: Tensor, sets: _Sets, temperature: float) -> Tensor:
    # Without the small number a row that has not moved would have no gradient.
    return _smooth_maximum(((g - sets.f).square().sum(-1) + 1e-24).sqrt(), temperature)


def _stretch(g: Tensor, distances: Tensor, sets: _Sets, temperature: float) -> Tensor:
    return _smooth_maximum((distances - sets.distances).abs().flatten(-2), temperature)


def _best(starts: Tensor, sets: _Sets, objective: Objective, measure: Measure, search: _Search) -> Tensor:
    """Descend from every start, repair what is found, and keep the best of every set."""
    ends = []
    together = max(1, search.at_once // starts.shape[1])
    for place in range(0, len(starts), together):
        some = starts[place : place + together]
        weights = [_WEIGHTS[(place + each) % len(_WEIGHTS)] for each in range(len(some))]
        weight = some.new_tensor(weights)[:, None]
        ends.append(_repaired(_descended(some, weight, sets, objective, search.steps), sets, search))
    found = torch.cat(ends)
    chosen = measure(found, sets.f).argmin(0)
    return found[chosen, torch.arange(found.shape[1], device=found.device)]


@torch.enable_grad()
def _descended(starts: Tensor, weight: Tensor, sets: _Sets, objective: Objective, steps: int) -> Tensor:
    """Minimise the distance from f plus the worst triplet's loss times `weight`, both as smooth maxima that
    become sharper with every step."""
    g = starts.clone().requires_grad_()
    optimizer = torch.optim.Adam([g])
    for step in range(steps):
        done = step / max(1, steps - 1)
        rate, temperature = (a * (b / a) ** done for a, b in (_RATES, _TEMPERATURES))
        optimizer.param_groups[0]["lr"] = rate
        distances = row_distances(g, g)
        d_ap = _smooth_maximum(distances.masked_fill(~sets.same, -inf), temperature)
        d_an = -_smooth_maximum((-distances).masked_fill(sets.same, -inf), temperature)
        worst = _smooth_maximum(d_ap - d_an + sets.alpha, temperature)
        loss = objective(g, distances, sets, temperature) + weight * worst.relu()
        (g.grad,) = torch.autograd.grad(loss.sum(), g)
        optimizer.step()
    return g.detach()


def _repaired(g: Tensor, sets: _Sets, search: _Search) -> Tensor:
    """The first separated embedding, by bisection, on the way from g to classes that are collapsed to points.

    Such points are separated once they are α apart: they are moved away from their centre as far as needed.
    """
    target = _collapsed(g, sets, search)
    alpha = sets.alpha[:, 0] + sets.slack
    least, most = g.new_zeros(g.shape[:2]), g.new_ones(g.shape[:2])
    most = most.where(_excess(g, sets.same, alpha) > 0, 0)
    for _ in range(_REPAIRS):
        middle = (least + most) / 2
        separated = _excess(g.lerp(target, middle[..., None, None]), sets.same, alpha) <= 0
        most, least = most.where(~separated, middle), least.where(separated, middle)
    return g.lerp(target, most[..., None, None])


def _collapsed(g: Tensor, sets: _Sets, search: _Search) -> Tensor:
    """Every class at one point, no two of them nearer than α."""
    means = sets.averaging @ g
    needed = sets.alpha[:, 0] + 4 * sets.slack
    gap = row_distances(means, means).masked_fill(sets.same, inf).flatten(-2).amin(-1)
    # Means that coincide cannot be driven apart by scaling: each gets a place of its own first.
    noise = sets.averaging @ search.noise(g, *g.shape)
    close = gap < torch.maximum(0.1 * sets.alpha[:, 0], g.new_tensor(1e-6))
    means = torch.where(close[..., None, None], means + noise * (sets.alpha + 1e-3)[..., None], means)
    gap = row_distances(means, means).masked_fill(sets.same, inf).flatten(-2).amin(-1)
    centre = means.mean(-2, keepdim=True)
    return centre + (means - centre) * (needed / gap).clamp(min=1)[..., None, None]


def _laid_on(g: Tensor, f: Tensor) -> Tensor:
    """g turned, mirrored and moved so that the squared distances of its rows from those of f are least."""
    centre = g.mean(1, keepdim=True)
    left, _, right = torch.linalg.svd((g - centre).mT @ (f - f.mean(1, keepdim=True)))
    turned: Tensor = (g - centre) @ (left @ right) + f.mean(1, keepdim=True)
    return turned
