"""What tests share: batches of many kinds, and the promises about numbers as checks against the oracle.

The oracle runs in float64. The promises, with R the largest norm of a row (cosine: unit row) from which the
mean of all rows that are not ignored was taken away, and all of it 2⁻²⁹ times as large for float64 itself:

* the squared distance of a pick is within 2⁻²¹·(4+√D)·R² of the extreme's;
* a distance is within 1e-5 of its own size, a loss within 1e-5·(d_ap+d_an+margin), and a gradient within 1e-5
  of the sizes of all that pulls at its row;
* no largest error is more than twice that of the plain formulation in the same type, plus 4 ulp.

Losses and gradients are compared for the picks that were made, so a pick within the bound cannot blur them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

import tripletops as T
from tripletops import reference

POSITIVES = ("hard", "easy", "random")
NEGATIVES = ("hard", "semihard", "easy", "random")
RULES = tuple(product(POSITIVES, NEGATIVES))
LOSSES = {
    "euclidean": ("margin", "soft_margin"),
    "sqeuclidean": ("margin", "soft_margin"),
    "cosine": ("margin", "soft_margin", "first_order", "second_order"),
}
DISTANCES = tuple(LOSSES)
REDUCTIONS = ("mean", "mean_nonzero", "sum", "none")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

RELATIVE = 1e-5
PICK = 2.0**-21


@dataclass(frozen=True, eq=False)
class Batch:
    """The tensors of one call."""

    emb: Tensor
    labels: Tensor
    ref_emb: Tensor | None = None
    ref_labels: Tensor | None = None
    self_index: Tensor | None = None
    ignore_label: int | None = None
    seed: int = 7

    def options(self) -> dict[str, Any]:
        return {
            "ref_emb": self.ref_emb,
            "ref_labels": self.ref_labels,
            "self_index": self.self_index,
            "ignore_label": self.ignore_label,
            "seed": self.seed,
        }

    def to(self, dtype: torch.dtype) -> Batch:
        ref_emb = None if self.ref_emb is None else self.ref_emb.to(dtype)
        return replace(self, emb=self.emb.to(dtype), ref_emb=ref_emb)

    def compute_type(self) -> torch.dtype:
        kinds = (self.emb.dtype, self.emb.dtype if self.ref_emb is None else self.ref_emb.dtype)
        return torch.float64 if torch.float64 in kinds else torch.float32

    def plain(self) -> Batch:
        """As the oracle takes it: the public functions accept any integer type."""
        return replace(
            self,
            labels=self.labels.long(),
            ref_labels=None if self.ref_labels is None else self.ref_labels.long(),
            self_index=None if self.self_index is None else self.self_index.long(),
        )


def labels_of(count: int, classes: int, generator: torch.Generator) -> Tensor:
    """`classes` ids, shuffled, as evenly often as can be."""
    labels = torch.arange(count) % max(classes, 1)
    return labels[torch.randperm(count, generator=generator)]


def random_batch(
    count: int,
    width: int,
    candidates: int | None = None,
    *,
    classes: int = 4,
    dtype: torch.dtype = torch.float32,
    with_self: bool = True,
    seed: int = 0,
) -> Batch:
    """Normal rows; with `candidates`, another set of as many, which holds half the anchors if `with_self`."""
    generator = torch.Generator().manual_seed(seed + 1000 * count + width)
    emb = torch.randn(count, width, generator=generator, dtype=torch.float64)
    labels = labels_of(count, classes, generator)
    if candidates is None:
        return Batch(emb.to(dtype), labels, seed=seed)
    ref_emb = torch.randn(candidates, width, generator=generator, dtype=torch.float64)
    ref_labels = labels_of(candidates, classes, generator)
    self_index = None
    if with_self:
        shared = min(count, candidates)
        place = torch.randperm(candidates, generator=generator)[:shared]
        ref_emb[place], ref_labels[place] = emb[:shared], labels[:shared]
        self_index = torch.full((count,), -1)
        self_index[:shared] = place
        self_index[1::2] = -1
    return Batch(emb.to(dtype), labels, ref_emb.to(dtype), ref_labels, self_index, seed=seed)


def mirrored(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` of the rows and their opposites, shuffled: their mean is 0, so that centring rounds nothing."""
    half = rows[torch.randint(len(rows), (count // 2,), generator=generator)]
    whole = torch.cat([half, -half, half.new_zeros(count % 2, rows.shape[1])])
    return whole[torch.randperm(count, generator=generator)]


def lattice_batch(
    count: int,
    width: int,
    candidates: int | None = None,
    *,
    cosine: bool = False,
    classes: int = 3,
    seed: int = 0,
) -> Batch:
    """Rows on a small lattice, full of ties and duplicates, whose distances are exact in every float type.

    For cosine the rows are ±1 in 1, 4 or 16 places, times a power of two, or 0: so are their norms.
    """
    generator = torch.Generator().manual_seed(seed + 1000 * count + width)
    rows = torch.randint(-2, 3, (4 * count + 4, width), generator=generator).float()
    if cosine:
        rows = torch.zeros(4 * count + 4, width)
        for row in rows:
            power = int(torch.randint(3, (), generator=generator))
            places = torch.randperm(width, generator=generator)[: 4**power]
            if len(places) == 4**power:
                signs = torch.randint(2, places.shape, generator=generator) * 2.0 - 1
                row[places] = signs * 2.0 ** int(torch.randint(-2, 3, (), generator=generator))
    emb, labels = mirrored(rows, count, generator), labels_of(count, classes, generator)
    if candidates is None:
        return Batch(emb, labels, seed=seed)
    ref_emb, ref_labels = mirrored(rows, candidates, generator), labels_of(candidates, classes, generator)
    self_index = torch.randint(-1, candidates, (count,), generator=generator) if candidates else None
    return Batch(emb, labels, ref_emb, ref_labels, self_index, seed=seed)


class Truth:
    """Everything about a batch that a pick is judged by, in float64."""

    def __init__(self, batch: Batch, distance: str) -> None:
        exact = batch.plain().to(torch.float64)
        self.batch, self.exact, self.name = batch, exact, distance
        self.x, kept = reference.kept_rows(exact.emb, exact.labels, exact.ignore_label)
        self.y, ref_kept, ref_labels, self_index = self.x, kept, exact.labels, torch.arange(len(self.x))
        if exact.ref_emb is not None and exact.ref_labels is not None:
            self.y, ref_kept = reference.kept_rows(exact.ref_emb, exact.ref_labels, exact.ignore_label)
            ref_labels = exact.ref_labels
            self_index = torch.full_like(exact.labels, -1) if exact.self_index is None else exact.self_index
        usable = kept[:, None] & ref_kept & (self_index[:, None] != torch.arange(len(self.y)))
        same = exact.labels[:, None] == ref_labels
        self.positives, self.negatives = usable & same, usable & ~same

        compare, report = reference.DISTANCES[distance]
        self.key = torch.cat([compare(rows[:, None], self.y) for rows in self.x.split(16)])
        self.distance = report(self.key)
        self.square = 2 * self.key if distance == "cosine" else self.key  # ½‖u−v‖² of unit rows is 1 − S

        width = self.x.shape[1]
        self.group = torch.zeros(len(self.y))  # equal for equal candidates
        if self.y.numel():
            self.group = torch.unique(self.y, dim=0, return_inverse=True)[1]
        rows = self.x[kept] if self.batch.ref_emb is None else torch.cat([self.x[kept], self.y[ref_kept]])
        if distance == "cosine" and width:
            rows = reference.unit(rows)
        radius = (rows - rows.mean(0)).square().sum(1).amax().item() if rows.numel() else 0.0
        self.finer = 2.0**-29 if batch.compute_type() == torch.float64 else 1.0
        self.bound = self.finer * PICK * (4 + math.sqrt(width)) * radius
        self.relative = self.finer * RELATIVE
        # A unit row is off by up to 2⁻²³ (norm and division), two by 2⁻²²; in float64 the oracle's are, too.
        self.unit_error = (
            2.0**-22 * (2 * self.finer if self.finer < 1 else 1) if distance == "cosine" else 0.0
        )

    def floor(self, d: Tensor) -> Tensor:
        """What rounding the rows themselves does to their distance, beside the relative error.

        Two unit rows make ½(√(2d) + their errors)² of d.
        """
        return self.unit_error * (2 * d).sqrt() + self.unit_error**2 / 2


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


def check_extreme(truth: Truth, eligible: Tensor, pick: Tensor, largest: bool, what: str) -> None:
    assert torch.equal(pick >= 0, eligible.any(1)), f"{what}: a pick too many, or one too few"
    found = (pick >= 0).nonzero()[:, 0]
    if not len(found):
        return
    assert eligible[found, pick[found]].all(), f"{what}: not eligible"
    square = -truth.square if largest else truth.square
    extreme = square.masked_fill(~eligible, math.inf)[found].amin(1)
    assert_within(square[found, pick[found]], extreme, truth.bound, f"squared distance of {what}")


def check_semihard(truth: Truth, p: Tensor, n: Tensor, d_ap: Tensor, d_an: Tensor) -> None:
    """The threshold is the picked positive's distance as computed, so it may be off by the bound itself."""
    assert (n[p < 0] == -1).all(), "semihard negative of an anchor without a positive"
    rows = (p >= 0).nonzero()[:, 0]
    if not len(rows):
        return
    threshold = truth.square[rows, p[rows]][:, None]
    square, eligible, n = truth.square[rows], truth.negatives[rows], n[rows]
    surely = eligible & (square > threshold + truth.bound)
    assert not (surely.any(1) & (n < 0)).any(), "no semihard negative where there is one"
    found = (n >= 0).nonzero()[:, 0]
    chosen = square[found, n[found]]
    assert eligible[found, n[found]].all(), "semihard negative: not eligible"
    assert (chosen > threshold[found, 0] - truth.bound).all(), "semihard negative: nearer than the positive"
    assert (d_an[rows][found] > d_ap[rows][found]).all(), "semihard negative: not strictly farther"
    nearest = square.masked_fill(~surely, math.inf)[found].amin(1) if len(found) else chosen
    assert (chosen <= nearest + truth.bound).all(), "semihard negative: a nearer one would do"


def check_first_of_equals(truth: Truth, eligible: Tensor, pick: Tensor, what: str) -> None:
    """Duplicates have equal keys, and so has everything seen from a zero row: the first must win."""
    found = (pick >= 0).nonzero()[:, 0]
    if not len(found):
        return
    group = truth.group
    equal = group[pick[found]][:, None] == group
    if truth.name == "cosine":
        equal |= (truth.x[found] == 0).all(1, keepdim=True)
    earlier = eligible[found] & equal & (torch.arange(len(group)) < pick[found][:, None])
    assert not earlier.any(), f"{what}: an earlier candidate is just as far"


def check_mined(truth: Truth, positive: str, negative: str, triplets: T.Triplets) -> None:
    anchor, p, n, d_ap, d_an = triplets
    batch, size = truth.batch, len(truth.x)
    assert torch.equal(anchor, torch.arange(size))
    assert p.dtype == n.dtype == torch.int64
    assert p.shape == n.shape == d_ap.shape == d_an.shape == (size,)
    assert d_ap.dtype == d_an.dtype == batch.compute_type()
    assert torch.equal(triplets.valid, (p >= 0) & (n >= 0))

    if "random" in (positive, negative):
        drawn_p, drawn_n = oracle_picks(truth, positive, negative)
        assert positive != "random" or torch.equal(p, drawn_p), "random positive"
        assert negative != "random" or torch.equal(n, drawn_n), "random negative"
    if positive != "random":
        check_extreme(truth, truth.positives, p, positive == "hard", f"{positive} positive")
        check_first_of_equals(truth, truth.positives, p, f"{positive} positive")
    if negative == "semihard":
        check_semihard(truth, p, n, d_ap, d_an)
        farther = truth.negatives & (truth.distance > d_ap[:, None])
        check_first_of_equals(truth, farther, n, "semihard negative")
    elif negative != "random":
        check_extreme(truth, truth.negatives, n, negative == "easy", f"{negative} negative")
        check_first_of_equals(truth, truth.negatives, n, f"{negative} negative")
    for pick, reported, what in ((p, d_ap, "d_ap"), (n, d_an, "d_an")):
        check_distances(truth, pick, reported, what)


def oracle_picks(truth: Truth, positive: str, negative: str) -> tuple[Tensor, Tensor]:
    """The picks of `reference.mine`, from distances already there."""
    noise = reference.noise(truth.batch.seed, *truth.key.shape, torch.device("cpu"))
    scan = reference.Scan(
        truth.key, truth.distance, noise, d_ap=truth.distance.new_full(truth.key.shape[:1], math.nan)
    )
    p = reference.POSITIVES[positive](scan, truth.positives)
    found = (p >= 0).nonzero()[:, 0]
    scan.d_ap[found] = truth.distance[found, p[found]]
    return p, reference.NEGATIVES[negative](scan, truth.negatives)


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


@dataclass(frozen=True)
class Objective:
    distance: str = "euclidean"
    loss: str = "margin"
    reduction: str = "mean"
    margin: float = 0.2
    temperature: float = 1.0

    def options(self) -> dict[str, Any]:
        return dict(vars(self))


def leaves(batch: Batch) -> tuple[Batch, list[Tensor]]:
    """The same tensors, strides and all, as inputs to differentiate by."""
    emb = batch.emb.detach().requires_grad_()
    if batch.ref_emb is None:
        return replace(batch, emb=emb), [emb]
    ref_emb = batch.ref_emb.detach().requires_grad_()
    return replace(batch, emb=emb, ref_emb=ref_emb), [emb, ref_emb]


def run_loss(
    batch: Batch, positive: str, negative: str, objective: Objective
) -> tuple[Tensor, list[Tensor], Tensor]:
    """(loss, gradients, the cotangent they were taken with)."""
    batch, inputs = leaves(batch)
    loss = T.triplet_loss(
        batch.emb,
        batch.labels,
        positive=positive,
        negative=negative,
        **batch.options(),
        **objective.options(),
    )
    cotangent = torch.linspace(-1.5, 1.5, loss.numel()).to(loss.dtype).reshape(loss.shape)
    if not loss.dim():
        cotangent = torch.full_like(loss, 1.5)
    return loss.detach(), list(torch.autograd.grad(loss, inputs, cotangent)), cotangent


def loss_of_picks(
    batch: Batch, p: Tensor, n: Tensor, objective: Objective, cotangent: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(losses, reduced loss, gradients) of the oracle in the batch's own type, for picks already made."""
    batch, inputs = leaves(batch)
    x, _ = reference.kept_rows(batch.emb, batch.labels, batch.ignore_label)
    y = x
    if batch.ref_emb is not None and batch.ref_labels is not None:
        y, _ = reference.kept_rows(batch.ref_emb, batch.ref_labels, batch.ignore_label)
    losses = reference.losses_of(
        x, y, p, n, objective.distance, objective.loss, objective.margin, objective.temperature
    )
    loss = reference.REDUCTIONS[objective.reduction](losses, (p >= 0) & (n >= 0))
    return losses.detach(), loss.detach(), list(torch.autograd.grad(loss, inputs, cotangent.to(loss.dtype)))


def length_of_slope(truth: Truth, d: Tensor, row: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of the derivative of d by `row`, and how far rounding the rows alone may move it."""
    still = torch.zeros_like(d)
    if truth.name == "euclidean":
        return (d > 0).double(), still
    if truth.name == "sqeuclidean":
        return 2 * d.sqrt(), still
    norm = row.norm(dim=1)
    pulls = (norm > 0) & (other.norm(dim=1) > 0)
    per_norm = torch.where(pulls, 1 / norm.where(pulls, 1), 0)
    return (2 * d).sqrt() * per_norm, truth.unit_error * per_norm


class Tolerances:
    """How far the loss of given picks, and each row of its gradients, may be off."""

    def __init__(
        self, truth: Truth, p: Tensor, n: Tensor, objective: Objective, losses: Tensor, cotangent: Tensor
    ) -> None:
        valid = ((p >= 0) & (n >= 0)).nonzero()[:, 0]
        p, n, value = p[valid], n[valid], losses[valid]
        d_ap, d_an = truth.distance[valid, p], truth.distance[valid, n]
        floor_ap, floor_an = truth.floor(d_ap), truth.floor(d_an)
        size = d_ap + d_an + objective.margin
        off = truth.relative * size + floor_ap + floor_an
        tiny = torch.finfo(truth.batch.compute_type())
        sharpness = 1.0  # of the loss: its Lipschitz constant in d_ap − d_an
        slope_ap = slope_an = torch.sigmoid(d_ap - d_an)
        second = torch.zeros_like(size)
        bend = off  # relative error of the slope
        if objective.loss == "margin":
            gap = d_ap - d_an + objective.margin
            flips = gap.abs() <= off
            slope_ap = slope_an = ((gap > 0) | flips).double()
            bend = flips.double()
        else:
            flips = (value > 0) & (value < tiny.smallest_normal)  # may be 0 in this type, and not counted
        if objective.loss in ("first_order", "second_order"):
            sharpness = 1 / objective.temperature
            bend = 2 * sharpness * off
        if objective.loss == "first_order":
            slope_ap = slope_an = sharpness * torch.sigmoid((d_ap - d_an) * sharpness)
        if objective.loss == "second_order":
            s_an = 1 - d_an
            sigmoid = torch.sigmoid((s_an.square() / 2 - 0.5 + d_ap.square() / 2) * sharpness)
            second = sharpness * sigmoid
            slope_ap, slope_an = second * d_ap, second * (s_an.abs() + d_an)

        counted = {"mean": len(valid), "mean_nonzero": int((value > 0).sum())}.get(objective.reduction, 1)
        share = 1 / max(counted, 1)
        loss_off = sharpness * off + 2 * tiny.eps * value + tiny.smallest_normal
        self.loss_size = sharpness * size + value
        self.loss: Tensor = torch.zeros_like(losses).index_put((valid,), loss_off)
        weight = cotangent.double().abs().expand(len(losses))[valid] * share
        if objective.reduction != "none":
            self.loss, self.loss_size = loss_off.sum() * share, self.loss_size.sum()[None] * share
        self.may_flip = bool(flips.any())

        # By row of emb and of ref_emb: the sizes of all that pulls at it, and the tolerance. An ulp of a
        # distance moves the slope of a curved loss by as much, relative to itself.
        condition = torch.ones_like(size) if objective.loss == "margin" else 1 + sharpness * size
        self.pull = [torch.zeros(len(rows), dtype=torch.float64) for rows in (truth.x, truth.y)]
        self.gradient = [part.clone() for part in self.pull]
        # A slope below the smallest normal number loses digits; second_order's hold 1 − S_ap, and S rounds.
        slope_floor = tiny.smallest_normal + second * (floor_ap + floor_an + tiny.eps)
        for pick, d, slope in ((p, d_ap, slope_ap), (n, d_an, slope_an)):
            for side, rows, at, others, other in (
                (0, truth.x, valid, truth.y, pick),
                (1, truth.y, pick, truth.x, valid),
            ):
                length, moved = length_of_slope(truth, d, rows[at], others[other])
                pull = weight * slope * (length + moved)
                tolerance = pull * (truth.relative + bend) + weight * slope * moved
                tolerance += weight * slope_floor * length
                self.pull[side].index_add_(0, at, pull * condition)
                self.gradient[side].index_add_(0, at, tolerance)
        if truth.batch.ref_emb is None:
            self.pull = [self.pull[0] + self.pull[1]]
            self.gradient = [self.gradient[0] + self.gradient[1]]


def check_loss(
    truth: Truth, triplets: T.Triplets, positive: str, negative: str, objective: Objective
) -> None:
    batch, p, n = truth.batch, triplets.positive, triplets.negative
    what = f"{positive}+{negative} {objective} {tuple(batch.emb.shape)} {batch.emb.dtype}"
    loss, gradients, cotangent = run_loss(batch, positive, negative, objective)
    losses, expected, expected_gradients = loss_of_picks(truth.exact, p, n, objective, cotangent)
    assert loss.dtype == batch.compute_type(), what
    assert loss.shape == expected.shape, what
    for gradient, given in zip(gradients, (batch.emb, batch.ref_emb), strict=False):
        assert given is not None
        assert (gradient.dtype, gradient.shape) == (given.dtype, given.shape), what

    allowed = Tolerances(truth, p, n, objective, losses, cotangent)
    if allowed.may_flip and objective.reduction == "mean_nonzero":
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
        _, plain, plain_gradients = loss_of_picks(batch.plain(), p, n, objective, cotangent)
        check_twice_plain(loss, plain, expected, allowed.loss_size, f"loss of {what}")
        if allowed.may_flip:
            return
        for gradient, plain_gradient, right, pull in zip(
            gradients, plain_gradients, expected_gradients, allowed.pull, strict=True
        ):
            check_twice_plain(gradient, plain_gradient, right, pull, f"gradient of {what}")


def mined(batch: Batch, positive: str, negative: str, distance: str) -> T.Triplets:
    return T.mine(
        batch.emb, batch.labels, positive=positive, negative=negative, distance=distance, **batch.options()
    )


def check(truth: Truth, positive: str, negative: str, *objectives: Objective) -> T.Triplets:
    """All promises: of the picks, of the distances, and of each objective's loss and gradients."""
    triplets = mined(truth.batch, positive, negative, truth.name)
    check_mined(truth, positive, negative, triplets)
    for objective in objectives:
        check_loss(truth, triplets, positive, negative, objective)
    return triplets


def objectives_of(distance: str, margin: float = 0.2, temperature: float = 1.0) -> list[Objective]:
    """Every loss of the distance with every reduction."""
    return [
        Objective(distance, loss, reduction, margin, temperature)
        for loss in LOSSES[distance]
        for reduction in REDUCTIONS
    ]


def check_poisoned(batch: Batch, positive: str, negative: str, objective: Objective) -> None:
    """For a batch with a row that is neither finite nor ignored: no picks, and NaN for everything else."""
    triplets = mined(batch, positive, negative, objective.distance)
    assert (triplets.positive == -1).all()
    assert (triplets.negative == -1).all()
    assert triplets.d_ap.isnan().all()
    assert triplets.d_an.isnan().all()
    loss, gradients, _ = run_loss(batch, positive, negative, objective)
    if not len(batch.emb):
        assert not loss.any()
        assert not any(gradient.any() for gradient in gradients)
        return
    assert loss.isnan().all()
    for gradient in gradients:
        assert gradient.isnan().all()


LAYOUTS = ("adjacent", "transposed", "strided", "one off")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values in other places of memory; between them, where there is room, NaN."""
    rows, columns = x.shape
    if layout == "transposed":
        return x.t().contiguous().t()
    if layout == "strided":
        room = x.new_full((2 * rows, 3 * columns), math.nan)
        room[::2, 1::3] = x
        return room[::2, 1::3]
    if layout == "one off":
        room = x.new_full((rows * (columns + 3) + 1,), math.nan)
        shifted = room[1:].view(rows, columns + 3)[:, :columns]
        shifted.copy_(x)
        return shifted
    return x


def bits(*tensors: Tensor) -> list[bytes]:
    """To compare results bit for bit, NaN included."""
    return [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
