"""Collapse in the plane (000, Figs 2–4), computed: how far random points are from triplet-separated ones, and
where descent on batch-hard mining takes them.

The paper's points are not published. So many random sets are drawn, and the first of them stands in for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import tripletops as T
from train_ref.computed import percent
from train_ref.settings import AboveZero, Computation, Computed, Count
from tripletops.diagnostics import diameter, hausdorff, to_separated

DISTANCES, DESCENT = "distances", "descent"
PUBLISHED_C = 0.53
WITHIN = 0.01  # relative difference below which two numbers count as equal: the search is that good
CHECKED = 100  # sets that are searched again, twice as hard


@dataclass(frozen=True, kw_only=True)
class Toy(Computation):
    part: str = DISTANCES  # or "descent"
    sets: Count = 1000
    points: tuple[Count, ...] = (3, 2)  # of each class
    drawn_from: str = "normal"  # or "uniform", in a square
    starts: Count = 16  # of each search for a separated embedding
    search_steps: Count = 400
    descent_steps: Count = 50
    learning_rate: AboveZero = 1.0  # of the mean batch-hard loss
    frames: tuple[Count, ...] = (3, 6, 10, 15, 50)  # steps after which the points are kept


def compute(settings: Toy, seed: int) -> Computed:
    generator = torch.Generator().manual_seed(seed)
    shape = settings.sets, sum(settings.points), 2
    if settings.drawn_from == "normal":
        points = torch.randn(shape, generator=generator, dtype=torch.float64)
    else:
        points = torch.rand(shape, generator=generator, dtype=torch.float64)
    labels = torch.arange(len(settings.points)).repeat_interleave(torch.tensor(settings.points))
    return (_distances if settings.part == DISTANCES else _descent)(settings, seed, points, labels)


# Five points: Figs 2 and 3 ----------------------------------------------------------------------------------


def discrepancies(f: Tensor, g: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(…, N, N, N) by anchor, positive and negative: the triplet's d_ap − d_an under f, and by how much its
    two distances differ between f and g, (38). −inf where the three are no triplet."""
    before, after = torch.cdist(f, f), torch.cdist(g, g)
    change = (before - after).abs()
    same = labels[:, None] == labels
    other_row = ~torch.eye(len(labels), dtype=torch.bool)
    valid = (same & other_row)[:, :, None] & ~same[:, None, :]
    losses = before[..., :, :, None] - before[..., :, None, :]
    total = change[..., :, :, None] + change[..., :, None, :]
    return losses.masked_fill(~valid, -torch.inf), total.masked_fill(~valid, -torch.inf)


def _triplet(flat: Tensor, rows: int) -> Tensor:
    """Anchor, positive and negative, (…, 3), from their place among all N³."""
    return torch.stack([flat // rows**2, flat // rows % rows, flat % rows], -1)


def _distances(settings: Toy, seed: int, points: Tensor, labels: Tensor) -> Computed:
    search = {"starts": settings.starts, "steps": settings.search_steps, "seed": seed}
    haus = to_separated(points, labels, metric="hausdorff", **search)
    iso = to_separated(points, labels, metric="isometric", **search)
    wrong = iso.loss > 0
    if not wrong.any():
        raise ValueError(f"all of {settings.sets} sets are separated already: draw more")
    f, d_haus, d_iso, loss = points[wrong], haus.upper[wrong], iso.upper[wrong], iso.loss[wrong]
    c = d_haus / d_iso
    losses, totals = discrepancies(f, iso.emb[wrong], labels)
    losses, totals = losses.flatten(1), totals.flatten(1)
    hardest, largest = losses.argmax(1), totals.argmax(1)
    of_hardest = totals.gather(1, hardest[:, None])[:, 0]
    triplets = [_triplet(each, len(labels)) for each in (hardest, largest)]
    again = _searched_again(f[:CHECKED], labels, search)
    measures = {
        "d_haus": float(d_haus[0]),
        "d_iso": float(d_iso[0]),
        "½·L": float(loss[0]) / 2,
        "c": float(c[0]),
        "c: lowest": float(c.min()),
        "c: median": float(c.median()),
        "c: highest": float(c.max()),
        "c: change by twice the search": float((again - c[:CHECKED]).abs().max()),
        "sets/separated already": 100 - percent(wrong),
        "sets/c ≤ 0.53": percent(c <= PUBLISHED_C),
        "sets/½·d_iso ≤ d_haus": percent(d_iso / 2 <= d_haus),
        "sets/½·L ≤ d_iso": percent(loss / 2 <= d_iso),
        "sets/d_iso is ½·L within 1 %": percent(d_iso <= (1 + WITHIN) * loss / 2),
        "sets/d_iso ≤ 2·L": percent(d_iso <= 2 * loss),
        "sets/hardest has the largest discrepancy within 1 %": percent(
            of_hardest >= (1 - WITHIN) * totals.amax(1)
        ),
        "sets/same triplet": percent(hardest == largest),
        "sets/same three points": percent((triplets[0].sort(1).values == triplets[1].sort(1).values).all(1)),
    }
    arrays = {
        "f": f[0],
        "f haus": haus.emb[wrong][0],
        "f iso": iso.emb[wrong][0],
        "labels": labels,
        "hardest": triplets[0][0],
        "largest": triplets[1][0],
        "c": c,
    }
    return Computed(measures, {name: array.numpy() for name, array in arrays.items()})


def _searched_again(points: Tensor, labels: Tensor, search: dict[str, int]) -> Tensor:
    """c by a search of twice as many starts and steps, which begin elsewhere."""
    harder = {name: 2 * search[name] for name in ("starts", "steps")} | {"seed": search["seed"] + 1}
    found = [to_separated(points, labels, metric=each, **harder).upper for each in ("hausdorff", "isometric")]
    return found[0] / found[1]


# Twenty points: Fig 4 ---------------------------------------------------------------------------------------


def descend(points: Tensor, labels: Tensor, settings: Toy) -> list[Tensor]:
    """The points before and after every step of plain gradient descent on the batch-hard loss with α = 0."""
    frames = [points]
    for _ in range(settings.descent_steps):
        moving = frames[-1].clone().requires_grad_()
        T.batch_hard_loss(moving, labels, margin=0.0).backward()
        assert moving.grad is not None
        frames.append((moving - settings.learning_rate * moving.grad).detach())
    return frames


def _hardest_loss(points: Tensor, labels: Tensor) -> float:
    return float(T.batch_hard_loss(points, labels, margin=0.0, reduction="none").max())


def _descent(settings: Toy, seed: int, points: Tensor, labels: Tensor) -> Computed:
    paths = [descend(each, labels, settings) for each in points]
    last = torch.stack([path[-1] for path in paths])
    nearest = to_separated(
        points, labels, metric="hausdorff", starts=settings.starts, steps=settings.search_steps, seed=seed
    )
    before, after, ideal = (
        torch.tensor([diameter(each).value for each in some]) for some in (points, last, nearest.emb)
    )
    losses = [torch.tensor([_hardest_loss(each, labels) for each in some]) for some in (points, last)]
    kept = [0, *(frame for frame in settings.frames if frame <= settings.descent_steps)]
    by_frame = [hausdorff(paths[0][frame], last[0], labels).value for frame in kept]
    moved = torch.tensor([hausdorff(path[0], path[-1], labels).value for path in paths])
    bound = before - 2 * losses[0]
    measures = {
        "diameter before": float(before[0]),
        "diameter after": float(after[0]),
        "d_haus(f₀, f_last)": by_frame[0],
        "d_haus(f₀, F_TS)": float(nearest.upper[0]),
        "sets/diameter left by descent": 100 * float((after / before).mean()),
        "sets/diameter left by the nearest separated": 100 * float((ideal / before).mean()),
        "sets/loss over diameter before": 100 * float((losses[0] / before).mean()),
        "sets/loss over diameter after": 100 * float((losses[1] / after).mean()),
        "sets/shrunk by half or more": percent(after <= before / 2),
        "sets/diameter after ≥ diam₀ − 2·L₀": percent(after >= bound),
        "sets/d_haus moved over d_haus(f₀, F_TS)": 100 * float((moved / nearest.upper).mean()),
    }
    arrays = {
        "frames": torch.stack([paths[0][frame] for frame in kept]),
        "steps": torch.tensor(kept),
        "d_haus": torch.tensor(by_frame),
        "f haus": nearest.emb[0],
        "labels": labels,
        "left by descent": after / before,
        "left by the nearest separated": ideal / before,
    }
    return Computed(measures, {name: array.numpy() for name, array in arrays.items()})
