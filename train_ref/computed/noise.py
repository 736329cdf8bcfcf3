"""001, Theorems 1–2 and Claims 1–4: the expected losses of two classes in the plane under label noise.

A point keeps its class's label with probability p and has the other one otherwise, independently of all
others. The expectation over the labels is exact. Without easy positives a pair or a triplet of distinct
points has a constant weight. With easy positives (EPS) the anchor's positive is the nearest point that has
its label: the j-th nearest is it with probability Σ_r P(Y_anchor=r)·P(Y_j=r)·Π_{t<j} P(Y_t≠r), a cumulative
product along the order of distances. The order of equal distances does not change the sum. The embeddings are
free points, minimised directly from many starts.

The losses take the distances from each anchor to all others, (…, anchors, others), and return one sum per
anchor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch

from train_ref.settings import AboveZero, Computation, Computed, Count

Tensor = torch.Tensor

COINCIDE = 1e-4  # a loss this close to the smallest one counts as the same minimum, in units of α
LARGEST = 128  # points up to which two modes and one are compared
FARTHEST = 256  # ranks up to which the weights of far points are compared
TOGETHER = 32  # starts
STEP = 1e-3  # of the distances at which a far point's loss is computed, in units of α


@dataclass(frozen=True, kw_only=True)
class NoiseSettings(Computation):
    """One minimisation: a loss, with or without easy positives, under one level of noise."""

    loss: str = "triplet"  # or "margin"
    easy: bool = False  # EPS
    keep: AboveZero = 0.8  # p: the probability that a point has its own class's label
    points: Count = 16  # n, in two classes of equal size
    margin: AboveZero = 1.0  # α
    starts: Count = 256
    steps: Count = 3000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss not in ("triplet", "margin"):
            raise ValueError(f"--loss {self.loss}: must be triplet or margin")
        if not 0.5 < self.keep <= 1:
            raise ValueError(f"--keep {self.keep}: must be greater than 0.5, and at most 1")
        if self.points % 4 or self.points < 8:
            raise ValueError(f"--points {self.points}: must be a multiple of 4, and at least 8")


class Labels(NamedTuple):
    """The probabilities of both labels, of the anchors (2, anchors, 1) and others (2, anchors, others)."""

    own: Tensor
    others: Tensor


def labels_of(keep: float, points: int) -> Labels:
    """Of all points as anchors; the first half is class 1."""
    first = torch.full((points,), keep, dtype=torch.float64)
    first[points // 2 :] = 1 - keep
    chances = torch.stack([first, 1 - first])
    return Labels(chances[:, :, None], chances[:, _others(points)])


def _others(points: int) -> Tensor:
    """(points, points − 1): for each point the places of all others, in order."""
    everyone = torch.arange(points).expand(points, points)
    return everyone[~torch.eye(points, dtype=torch.bool)].view(points, points - 1)


def distances(points: Tensor) -> Tensor:
    """(…, points, points − 1): from each point to all others."""
    apart = torch.linalg.vector_norm(points[..., :, None, :] - points[..., None, :, :], dim=-1)
    places = _others(points.shape[-2])
    others: Tensor = apart.gather(-1, places.expand(*apart.shape[:-2], *places.shape))
    return others


def triplet_loss(apart: Tensor, labels: Labels, margin: float) -> Tensor:
    """Σ_{j,k} P(Y_i=Y_j≠Y_k)·(D_ij − D_ik + α)₊ over distinct i, j, k."""
    weight = (labels.own[..., None] * labels.others[..., None] * (1 - labels.others[..., None, :])).sum(0)
    return _over_triplets(weight, apart, margin)


def easy_triplet_loss(apart: Tensor, labels: Labels, margin: float) -> Tensor:
    """The same with EPS: j is the nearest point that has the anchor's label."""
    order, nearest, other = _nearest(apart, labels)
    later = torch.ones(apart.shape[-1], apart.shape[-1], dtype=torch.bool).triu()
    # A point nearer than the positive has the other label already.
    weight = (nearest[..., None] * torch.where(later, other[..., None, :], 1.0)).sum(0)
    return _over_triplets(weight, apart.gather(-1, order), margin)


def _over_triplets(weight: Tensor, apart: Tensor, margin: float) -> Tensor:
    distinct = 1 - torch.eye(apart.shape[-1], dtype=apart.dtype)
    hinge = (apart[..., :, None] - apart[..., None, :] + margin).clamp(min=0)
    return (weight * distinct * hinge).sum((-1, -2))


def margin_loss(apart: Tensor, labels: Labels, margin: float, beta: Tensor) -> Tensor:
    """Σ_j P(Y_i=Y_j)·(D_ij − β_i + α)₊ + P(Y_i≠Y_j)·(β_i − D_ij + α)₊; `beta` is (…, anchors)."""
    same = (labels.own * labels.others).sum(0)
    return _over_pairs(same, 1 - same, apart, margin, beta)


def easy_margin_loss(apart: Tensor, labels: Labels, margin: float, beta: Tensor) -> Tensor:
    """The same with EPS: only the nearest point that has the anchor's label is a positive."""
    order, nearest, other = _nearest(apart, labels)
    own = labels.own.view(2, *[1] * (apart.dim() - 2), -1, 1)
    return _over_pairs(nearest.sum(0), (own * other).sum(0), apart.gather(-1, order), margin, beta)


def _over_pairs(positive: Tensor, negative: Tensor, apart: Tensor, margin: float, beta: Tensor) -> Tensor:
    beyond = apart - beta[..., None]
    return (positive * (beyond + margin).clamp(min=0) + negative * (margin - beyond).clamp(min=0)).sum(-1)


def _nearest(apart: Tensor, labels: Labels) -> tuple[Tensor, Tensor, Tensor]:
    """The others by distance: their places, and for both labels r, (2, …, anchors, others), the probability
    that anchor and j-th nearest have r and no nearer one has, and that of Y_j≠r."""
    order = apart.detach().argsort(dim=-1, stable=True)
    shape = (2, *[1] * (apart.dim() - 2))
    own = labels.own.view(*shape, *labels.own.shape[1:])
    chance = labels.others.view(*shape, *labels.others.shape[1:]).expand(2, *apart.shape)
    chance = chance.gather(-1, order.expand(2, *order.shape))
    other = 1 - chance
    none_before = torch.cat([torch.ones_like(other[..., :1]), other.cumprod(-1)[..., :-1]], -1)
    return order, own * chance * none_before, other


# Embeddings -------------------------------------------------------------------------------------------------


def collapsed(points: int, apart: float) -> Tensor:
    """Each class in one point."""
    return _modes(points, [(0, 0), (0, 0), (apart, 0), (apart, 0)])


def one_class_in_two_modes(points: int, apart: float) -> Tensor:
    """f₂ of Appendix B: two modes of class 1 and class 2 at the corners of an equilateral triangle."""
    third = (apart / 2, apart * math.sqrt(3) / 2)
    return _modes(points, [(0, 0), (apart, 0), third, third])


def both_classes_in_two_modes(points: int, apart: float) -> Tensor:
    """Four modes at the corners of a square, those of a class beside each other."""
    return _modes(points, [(0, 0), (apart, 0), (0, apart), (apart, apart)])


def _modes(points: int, places: list[tuple[float, float]]) -> Tensor:
    return torch.tensor(places, dtype=torch.float64).repeat_interleave(points // 4, dim=0)


def spread(points: int, diameter: float, gap: float) -> Tensor:
    """Two classes on circles of that diameter; `gap` is between the circles."""
    angle = 2 * math.pi * torch.arange(points // 2, dtype=torch.float64) / (points // 2)
    circle = diameter / 2 * torch.stack([angle.cos(), angle.sin()], dim=-1)
    return torch.cat([circle, circle + torch.tensor([diameter + gap, 0.0], dtype=torch.float64)])


def simplices(points: int, side: float, apart: float) -> Tensor:
    """Two regular simplices in R^(n+1): distances are `side` within a class and `apart` between classes."""
    found = torch.zeros(points, points + 1, dtype=torch.float64)
    found[:, :points] = side / math.sqrt(2) * torch.eye(points, dtype=torch.float64)
    found[points // 2 :, points] = math.sqrt(apart**2 - side**2)
    return found


# Minimisation -----------------------------------------------------------------------------------------------


class Objective(NamedTuple):
    """The expected loss of whole embeddings under some settings, with the paper's factor 1/n² or 1/n³."""

    settings: NoiseSettings
    labels: Labels

    @classmethod
    def of(cls, settings: NoiseSettings, points: int | None = None) -> Objective:
        return cls(settings, labels_of(settings.keep, points or settings.points))

    def per_anchor(self, apart: Tensor, beta: Tensor) -> Tensor:
        """Of distances; the triplet loss has no use for `beta`."""
        margin = self.settings.margin
        if self.settings.loss == "triplet":
            loss = easy_triplet_loss if self.settings.easy else triplet_loss
            return loss(apart, self.labels, margin)
        pairs = easy_margin_loss if self.settings.easy else margin_loss
        return pairs(apart, self.labels, margin, beta)

    def __call__(self, points: Tensor, beta: Tensor | None = None) -> Tensor:
        """Of points (…, n, m); β is α unless given."""
        count = points.shape[-2]
        if beta is None:
            beta = torch.full((count,), self.settings.margin, dtype=torch.float64)
        power = 3 if self.settings.loss == "triplet" and not self.settings.easy else 2
        total: Tensor = self.per_anchor(distances(points), beta).sum(-1) / count**power
        return total


def descend(loss: Callable[[Tensor], Tensor], start: Tensor, steps: int, rate: float) -> Tensor:
    """Where Adam ends from every start, (starts, …). Few of them descend together, so that their triplets fit
    into the cache."""
    return torch.cat([_descend(loss, some, steps, rate) for some in start.split(TOGETHER)])


def _descend(loss: Callable[[Tensor], Tensor], start: Tensor, steps: int, rate: float) -> Tensor:
    """The rate falls to a millionth, for the losses have kinks at their minima; epsilon is tiny, for far
    points have tiny weights."""
    variable = start.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([variable], lr=rate, betas=(0.9, 0.99), eps=1e-30)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * 10 ** (-6 * step / steps)
        optimizer.zero_grad()
        loss(variable).sum().backward()
        optimizer.step()
    return variable.detach()


class Minimum(NamedTuple):
    """What the starts came to, best first."""

    points: Tensor
    beta: Tensor
    losses: Tensor


def minimise(settings: NoiseSettings, seed: int) -> Minimum:
    """From `settings.starts` random embeddings, of scales from 0.3α to 3α. Theorem 2 minimises over β as
    well; Claims 2 and 3 have it given, and it is α then."""
    objective, alpha = Objective.of(settings), settings.margin
    generator = torch.Generator().manual_seed(seed)
    shape = settings.starts, settings.points, 2
    scale = alpha * torch.linspace(0.3, 3, settings.starts, dtype=torch.float64)[:, None, None]
    start = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    beta = torch.full((*shape[:2], 1), alpha, dtype=torch.float64)
    free = settings.loss == "margin" and not settings.easy

    def loss(variable: Tensor) -> Tensor:
        return objective(variable[..., :2], variable[..., 2] if free else None)

    found = descend(loss, torch.cat([start, beta], dim=-1), settings.steps, alpha / 10)
    losses = loss(found)
    order = losses.argsort(stable=True)
    found = found[order]
    return Minimum(found[..., :2], found[..., 2], losses[order])


# Measures ---------------------------------------------------------------------------------------------------


def compute(settings: NoiseSettings, seed: int) -> Computed:
    """One cell of `eps-noise`."""
    minimum = minimise(settings, seed)
    measures = _of_minimum(settings, minimum) | _of_embeddings(settings)
    arrays = {"points": minimum.points[0].numpy(), "losses": minimum.losses.numpy()}
    if settings.easy:
        more, curves = _of_two_modes(settings)
        measures |= more
        arrays |= curves
        more, curves = _of_far_points(settings)
        measures |= more | _of_one_anchor(settings, seed)
        arrays |= curves
    return Computed(measures, arrays)


def _of_minimum(settings: NoiseSettings, minimum: Minimum) -> dict[str, float]:
    """The size of the best embedding found, in units of the embedding itself."""
    half, points = settings.points // 2, minimum.points[0]
    apart = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    reached = minimum.losses < minimum.losses[0] + COINCIDE * settings.margin
    found = {
        "smallest loss found": minimum.losses[0].item(),
        "share of starts that reach it": reached.double().mean().item(),
        "diameter of class 1": apart[:half, :half].max().item(),
        "diameter of class 2": apart[half:, half:].max().item(),
        "smallest distance between classes": apart[:half, half:].min().item(),
        "largest distance between classes": apart[:half, half:].max().item(),
    }
    if settings.loss == "margin":
        found |= {"smallest β": minimum.beta[0].min().item(), "largest β": minimum.beta[0].max().item()}
    return found


def _natural(settings: NoiseSettings) -> float:
    """How far collapsed classes are apart at the minimum without EPS: α, for margins β + α = 2α."""
    return settings.margin * (1 if settings.loss == "triplet" else 2)


def _of_embeddings(settings: NoiseSettings) -> dict[str, float]:
    """The losses of embeddings that the paper's arguments name."""
    objective, count, alpha = Objective.of(settings), settings.points, settings.margin
    apart, diameter = _natural(settings), alpha / 2
    wide = torch.full((count,), alpha + diameter, dtype=torch.float64)
    found = {
        "loss, collapsed": objective(collapsed(count, apart)).item(),
        "loss, class 1 in two modes": objective(one_class_in_two_modes(count, apart)).item(),
        "loss, each class in two modes": objective(both_classes_in_two_modes(count, apart)).item(),
    }
    if not settings.easy:
        # Section 4.1 has diam < 2α + gap, and β = α: the printed condition holds here too.
        printed = spread(count, alpha, alpha / 2)
        found |= {
            # β a little above α + diam, and a gap a little above what it asks for: no rounding is left.
            "loss, spread": objective(spread(count, diameter, apart + 0.7 * alpha), wide + alpha / 10).item(),
            "loss, spread as printed": objective(printed).item(),
            "loss, simplices": objective(simplices(count, diameter, apart + diameter), wide).item(),
        }
    return found


def _of_two_modes(settings: NoiseSettings) -> tuple[dict[str, float], dict[str, Any]]:
    """Claims 1 and 2: the number of points from which on two modes have the smaller loss, up to `LARGEST`."""
    counts = range(4, LARGEST + 1, 4)
    apart = _natural(settings)
    kinds = {"class 1": one_class_in_two_modes, "each class": both_classes_in_two_modes}
    gains: dict[str, list[float]] = {name: [] for name in kinds}
    for count in counts:
        objective = Objective.of(settings, count)
        one = objective(collapsed(count, apart))
        for name, kind in kinds.items():
            gains[name].append((one - objective(kind(count, apart))).item())
    measures = {
        f"smallest n, {name} in two modes": _from_here_on([gain > 0 for gain in gain_by_n], list(counts))
        for name, gain_by_n in gains.items()
    }
    arrays = {f"gain, {name}": numpy.array(gain_by_n) for name, gain_by_n in gains.items()}
    return measures, {"counts": numpy.array(counts), **arrays}


def _from_here_on(holds: list[bool], places: list[int]) -> float:
    """The first place from which on it holds to the end; infinity if it does not hold at the end."""
    failing = [place for place, each in enumerate(holds) if not each]
    first = failing[-1] + 1 if failing else 0
    return float(places[first]) if first < len(places) else math.inf


def _chance(keep: float, own: int, label: int) -> float:
    """P(Y=label) of a point of the anchor's class (own=1) or the other; label 1 is the anchor's class."""
    return keep if own == label else 1 - keep


def pair_weights(keep: float, before_own: int, before_other: int, own: int) -> tuple[float, float]:
    """P(it is the nearest positive) and P(it has another label than the anchor), of a point of the anchor's
    class or not, behind that many points of the anchor's class and of the other."""
    positive = negative = 0.0
    for label in (0, 1):
        anchor, it = _chance(keep, 1, label), _chance(keep, own, label)
        skipped = (1 - _chance(keep, 1, label)) ** before_own * (1 - _chance(keep, 0, label)) ** before_other
        positive += anchor * it * skipped
        negative += anchor * (1 - it)
    return positive, negative


def triplet_weights(
    keep: float, near: int, between_own: int, between_other: int, far: int
) -> tuple[float, float]:
    """Of the anchor's nearest point t=1 and a far one: P(nearest positive, far negative) and the reverse."""
    forward = reverse = 0.0
    for label in (0, 1):
        anchor, first, last = (_chance(keep, own, label) for own in (1, near, far))
        skipped = (1 - _chance(keep, 1, label)) ** between_own * (
            1 - _chance(keep, 0, label)
        ) ** between_other
        forward += anchor * first * (1 - last)
        reverse += anchor * last * (1 - first) * skipped
    return forward, reverse


def _weights(settings: NoiseSettings, rank: int, own_before: int, own: int) -> tuple[float, float]:
    """What pulls the point of that rank in and what pushes it out: of margins its positive and negative
    weight, of triplets with the nearest point those of the two triplets."""
    if settings.loss == "margin":
        return pair_weights(settings.keep, own_before, rank - 1 - own_before, own)
    pushes, pulls = triplet_weights(settings.keep, 1, own_before, rank - 2 - own_before, own)
    return pulls, pushes


def _of_far_points(settings: NoiseSettings) -> tuple[dict[str, float], dict[str, Any]]:
    """Claims 3 and 4: the rank behind which points are pushed out, and the distance at which their loss is
    smallest. For triplets t is the anchor's nearest point, of its class, at distance 0."""
    first = 1 if settings.loss == "margin" else 2
    ranks = list(range(first, FARTHEST + 1))
    in_order, any_order = [], []
    for rank in ranks:
        nearer = rank - first
        pulls, pushes = _weights(settings, rank, nearer, 1)
        in_order.append(pulls < pushes)
        orders = (_weights(settings, rank, before, own) for before in range(nearer + 1) for own in (0, 1))
        any_order.append(all(pulls < pushes for pulls, pushes in orders))
    alpha = settings.margin
    places = numpy.arange(0, 4 * alpha, STEP * alpha)
    beyond = places - alpha if settings.loss == "margin" else places
    shown = (first, first + 1, first + 2, first + 6)
    curves = []
    for rank in shown:
        pulls, pushes = _weights(settings, rank, rank - first, 1)
        curves.append(pulls * numpy.maximum(beyond + alpha, 0) + pushes * numpy.maximum(alpha - beyond, 0))
    measures = {
        "first rank pushed out, own class first": _from_here_on(in_order, ranks),
        "first rank pushed out, any order": _from_here_on(any_order, ranks),
        "a far point settles at": float(places[int(curves[-1].argmin())]),
    }
    return measures, {"places": places, "ranks": numpy.array(shown), "curves": numpy.array(curves)}


def _of_one_anchor(settings: NoiseSettings, seed: int) -> dict[str, float]:
    """One anchor's own loss, minimised over its distances to all others: no other anchor is in the way."""
    objective, alpha = Objective.of(settings), settings.margin
    alone = Objective(settings, Labels(objective.labels.own[:, :1], objective.labels.others[:, :1]))
    beta = torch.full((1,), alpha, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    shape = settings.starts, 1, settings.points - 1
    start = 4 * alpha * torch.rand(shape, generator=generator, dtype=torch.float64)

    def loss(apart: Tensor) -> Tensor:
        return alone.per_anchor(apart.abs(), beta).sum(-1)

    # The second descent forgets the large gradients that Adam divides the far points' tiny ones by.
    found = descend(loss, start, settings.steps, alpha / 10)
    found = descend(loss, found, settings.steps, alpha / 10).abs()
    best = _settled(loss, found[loss(found).argmin()], alpha)[0].sort().values
    beyond = best - best[0]
    # Margins: β − α = 0 or β + α = 2α. Triplets: D₁ and multiples of α beyond it.
    level = 2 * alpha if settings.loss == "margin" else alpha
    levels = (beyond / level).round()
    return {
        "one anchor, nearest point": best[0].item(),
        "one anchor, farthest point beyond it": beyond[-1].item(),
        "one anchor, points one level out": float((levels == 1).sum()),
        "one anchor, largest distance from a level": (beyond - level * levels).abs().max().item(),
    }


def _settled(loss: Callable[[Tensor], Tensor], apart: Tensor, alpha: float) -> Tensor:
    """`apart`, (1, others), moved one distance at a time to the best kink of the loss until none is better.
    Adam drifts where the slope beyond a kink is a millionth of that before it."""
    best = apart.clone()
    improved = True
    while improved:
        improved = False
        for place in range(best.shape[-1]):
            constant = best.new_tensor([0.0, 2 * alpha])
            kinks = torch.cat([constant, best[0], best[0] + alpha, (best[0] - alpha).clamp(min=0)])
            trials = best.repeat(len(kinks), 1, 1)
            trials[:, 0, place] = kinks
            losses = loss(trials)
            if losses.min() < loss(best) * (1 - 1e-14):
                best, improved = trials[losses.argmin()], True
    return best
