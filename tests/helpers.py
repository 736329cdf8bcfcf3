"""What tests share: batches of many kinds, and the promises about numbers as checks against the oracle.

The oracle runs in float64. The promises, with R the largest norm of a row (cosine: unit row) from which the
mean of all rows that are not ignored was taken away, and all of it 2⁻²⁹ times as large for float64 itself:

* the squared distance of a pick is within 2⁻²¹·(4+√D)·R² of the extreme's;
* a distance is within 1e-5 of its own size, a loss within 1e-5·(d_ap+d_an+margin), and a gradient within 1e-5
  of the sizes of all that pulls at its row;
* no largest error is more than twice that of the plain formulation in the same type, plus 4 ulp.

Losses and gradients are compared for the picks that were made, so a pick within the bound cannot blur them.
Objectives over many tuples are compared as a whole: where rounding may decide whether a term counts, or which
negative is meant, the difference that makes is allowed on top.

Batches and the oracle are on the CPU; what is on trial may run elsewhere, on the device which the environment
variable TRIPLETOPS_TEST_DEVICE names.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, wraps
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import tripletops
from tripletops import reference
from tripletops.backends import FORCED

DEVICE = torch.device(os.environ.get("TRIPLETOPS_TEST_DEVICE") or "cpu")
# Objectives over many tuples are judged by the plain formulation, which therefore cannot be on trial itself.
KERNELS = "cpu" if FORCED == "reference" else None

POSITIVES = ("hard", "easy", "random")
NEGATIVES = ("hard", "semihard", "easy", "random", "distance")
RULES = tuple(product(POSITIVES, NEGATIVES))
LOSSES = {
    "euclidean": ("margin", "soft_margin"),
    "sqeuclidean": ("margin", "soft_margin"),
    "cosine": ("margin", "soft_margin", "first_order", "second_order"),
}
DISTANCES = tuple(LOSSES)
REDUCTIONS = ("mean", "mean_nonzero", "sum", "none")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

CUTOFF, LIMIT = 0.5, 1.4  # of negative="distance", where nothing else is said

RELATIVE = 1e-5
PICK = 2.0**-21


class Moved(torch.autograd.Function):
    """A tensor on DEVICE, in the same places of its memory; `Tensor.to` would close the gaps."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        if not tensor.numel():
            return tensor.to(DEVICE)
        shape, strides, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        end = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        return tensor.as_strided((end,), (1,), 0).to(DEVICE).as_strided(shape, strides, offset)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.cpu()


class Public:
    """tripletops, its functions run on DEVICE: tensors go there, and results come back."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(tripletops, name)
        if torch.device("cpu") == DEVICE:
            return function

        @wraps(function)
        def call(*given: Any, **options: Any) -> Any:
            given, options = tree_map_only(Tensor, Moved.apply, (given, options))
            return tree_map_only(Tensor, Tensor.cpu, function(*given, **options))

        return call


T = Public()


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


KINDS = ("normal", "lattice", "duplicates", "some zero", "offset", "long", "short")


def rows_of_kind(kind: str, count: int, width: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Rows of one of KINDS in float64, none of them beyond the range of `dtype`."""
    x = torch.randn(count, width, generator=generator, dtype=torch.float64)
    if kind == "lattice":
        x = torch.randint(-2, 3, (count, width), generator=generator).double()
    elif kind == "duplicates" and count:
        x = x[torch.randint(1 + count // 4, (count,), generator=generator)]
    elif kind == "some zero":
        x[torch.rand(count, generator=generator) < 0.3] = 0
    elif kind == "offset":
        x += 100
    elif kind in ("long", "short") and dtype not in (torch.float16, torch.bfloat16):
        x *= 1e15 if kind == "long" else 1e-15
    return x


# Batches without any triplet. Blocks of the kernels hold 96 rows.
ALONE = {
    "no rows": Batch(torch.ones(0, 3), torch.ones(0, dtype=torch.int64)),
    "one row": Batch(torch.ones(1, 3), torch.ones(1, dtype=torch.int64)),
    "one class": replace(random_batch(120, 3), labels=torch.zeros(120, dtype=torch.int64)),
    "all classes distinct": replace(random_batch(120, 3), labels=torch.arange(120)),
    "no candidates": Batch(
        torch.ones(4, 3), torch.arange(4) % 2, torch.ones(0, 3), torch.ones(0, dtype=torch.int64)
    ),
    "no anchors": random_batch(0, 3, 20),
    "only itself": Batch(
        torch.ones(2, 3), torch.arange(2), torch.ones(2, 3), torch.arange(2), torch.arange(2)
    ),
    "all ignored": replace(random_batch(20, 3), labels=torch.zeros(20, dtype=torch.int64), ignore_label=0),
    "no dimension, one class": Batch(torch.ones(5, 0), torch.zeros(5, dtype=torch.int64)),
}


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

    @cached_property
    def noise(self) -> Tensor:
        return reference.noise(self.batch.seed, *self.key.shape, torch.device("cpu"))

    @cached_property
    def unit_square(self) -> Tensor:
        """Squared distances between unit rows, whatever the distance is; from a zero row they are 2."""
        return 2 * reference.key_matrix(reference.cosine, self.x, self.y)

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


def check_mined(truth: Truth, positive: str, negative: str, triplets: tripletops.Triplets) -> None:
    anchor, p, n, d_ap, d_an = triplets
    batch, size = truth.batch, len(truth.x)
    assert torch.equal(anchor, torch.arange(size))
    assert p.dtype == n.dtype == torch.int64
    assert p.shape == n.shape == d_ap.shape == d_an.shape == (size,)
    assert d_ap.dtype == d_an.dtype == batch.compute_type()
    assert torch.equal(triplets.valid, (p >= 0) & (n >= 0))

    if "random" in (positive, negative):
        drawn_p, drawn_n = oracle_picks(truth, positive, negative.replace("distance", "random"))
        assert positive != "random" or torch.equal(p, drawn_p), "random positive"
        assert negative != "random" or torch.equal(n, drawn_n), "random negative"
    if positive != "random":
        check_extreme(truth, truth.positives, p, positive == "hard", f"{positive} positive")
        check_first_of_equals(truth, truth.positives, p, f"{positive} positive")
    if negative == "semihard":
        check_semihard(truth, p, n, d_ap, d_an)
        farther = truth.negatives & (truth.distance > d_ap[:, None])
        check_first_of_equals(truth, farther, n, "semihard negative")
    elif negative == "distance":
        check_drawn(truth, n)
    elif negative != "random":
        check_extreme(truth, truth.negatives, n, negative == "easy", f"{negative} negative")
        check_first_of_equals(truth, truth.negatives, n, f"{negative} negative")
    for pick, reported, what in ((p, d_ap, "d_ap"), (n, d_an, "d_an")):
        check_distances(truth, pick, reported, what)


def oracle_picks(truth: Truth, positive: str, negative: str) -> tuple[Tensor, Tensor]:
    """The picks of `reference.mine`, from distances already there."""
    scan = reference.Scan(
        truth.key, truth.distance, truth.noise, d_ap=truth.distance.new_full(truth.key.shape[:1], math.nan)
    )
    if negative == "distance":
        scan = scan._replace(log_weight=reference.log_weights(truth.x, truth.y, CUTOFF, LIMIT))
    p = reference.POSITIVES[positive](scan, truth.positives)
    found = (p >= 0).nonzero()[:, 0]
    scan.d_ap[found] = truth.distance[found, p[found]]
    return p, reference.NEGATIVES[negative](scan, truth.negatives)


def check_drawn(truth: Truth, n: Tensor, cutoff: float = CUTOFF, limit: float | None = LIMIT) -> None:
    """A draw by distance has the largest key, log weight plus noise, but for what rounding does to keys."""
    assert torch.equal(n >= 0, truth.negatives.any(1)), "drawn negative: one too many, or one too few"
    found = (n >= 0).nonzero()[:, 0]
    if not len(found):
        return
    eligible, width = truth.negatives[found], truth.x.shape[1]
    noise = truth.noise[found]
    gumbel = -(-torch.log1p((noise + 0.5) / 2**32 - 1)).log()
    d = truth.unit_square[found].sqrt().clamp(min=cutoff)
    height = (1 - d.square() / 4).clamp(min=2**-20)
    log_weight = (2 - width) * d.log() + (3 - width) / 2 * height.log()
    # Unit rows have the radius 1 at most, and centring leaves no row longer than 2.
    off = truth.finer * PICK * (4 + math.sqrt(width)) * 4
    slope = abs(2 - width) / 2 / d.square() + abs(3 - width) / 8 / height
    terms = abs(2 - width) * d.log().abs() + abs(3 - width) / 2 * height.log().abs() + gumbel.abs()
    tolerance = slope * off + 8 * 2.0**-23 * truth.finer * (1 + terms)
    key = log_weight + gumbel
    surely = possibly = eligible
    if limit is not None:
        surely = eligible & (d.square() + off < limit**2)
        possibly = eligible & (d.square() - off < limit**2) & (cutoff < limit)
    picked = torch.zeros_like(eligible).scatter(1, n[found, None], True)
    uniform = noise.where(eligible, -1).argmax(1, keepdim=True) == torch.arange(len(truth.y))
    best = (key - tolerance).where(surely, -math.inf).amax(1, keepdim=True)
    allowed = possibly & (key + tolerance >= best)
    allowed = allowed | (uniform & ~surely.any(1, keepdim=True))
    assert (allowed & picked).any(1).all(), "drawn negative: another one has the larger key"


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
    truth: Truth, triplets: tripletops.Triplets, positive: str, negative: str, objective: Objective
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


def mined(batch: Batch, positive: str, negative: str, distance: str) -> tripletops.Triplets:
    return T.mine(
        batch.emb, batch.labels, positive=positive, negative=negative, distance=distance, **batch.options()
    )


def check(truth: Truth, positive: str, negative: str, *objectives: Objective) -> tripletops.Triplets:
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


# Objectives over many tuples


@cache
def defaults_of(function: str) -> dict[str, Any]:
    parameters = inspect.signature(getattr(T, function)).parameters
    return {name: each.default for name, each in parameters.items() if each.default is not each.empty}


@dataclass(frozen=True, eq=False)
class ManyTuples:
    """A call of one of the objectives over many tuples, its batch aside."""

    function: str
    given: dict[str, Any] = field(default_factory=dict)
    beta: float | Tensor | None = None

    @cached_property
    def options(self) -> dict[str, Any]:
        return {**defaults_of(self.function), **self.given}

    @property
    def distance(self) -> str:
        if self.function == "multi_similarity_loss":
            return "cosine"
        return self.options["distance"] or "euclidean"

    @property
    def picks(self) -> bool:
        """Whether one positive or one negative of each anchor is picked."""
        options = self.options
        return "negative" in options and not options["positive"] == options["negative"] == "all"

    def but(self, **given: Any) -> ManyTuples:
        return replace(self, given={**self.given, **given})

    def arguments(self, batch: Batch) -> dict[str, Any]:
        arguments = {**batch.options(), **self.given}
        if "seed" not in self.options:
            arguments.pop("seed")
        return arguments

    def __str__(self) -> str:
        return f"{self.function} {self.given}"


def beta_by_anchor(batch: Batch, beta: Tensor) -> Tensor:
    place = torch.zeros_like(batch.labels, dtype=torch.int64)
    if beta.dim():
        place = batch.labels.long()
        if batch.ignore_label is not None:
            place = place.where(place != batch.ignore_label, 0)
    return beta.reshape(-1)[place]


def beta_of(call: ManyTuples, compute_type: torch.dtype) -> Tensor:
    return torch.as_tensor(call.beta, dtype=torch.float64).to(compute_type)


def cotangent_of(loss: Tensor) -> Tensor:
    if not loss.dim():
        return torch.full_like(loss, 1.5)
    return torch.linspace(-1.5, 1.5, loss.numel()).to(loss.dtype)


def run_tuples(batch: Batch, call: ManyTuples) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """(loss, gradients, number of active triplets); the gradient of β, if it is a tensor, comes last."""
    batch, inputs = leaves(batch)
    beta = []
    if call.beta is not None:
        beta = [call.beta.detach().requires_grad_() if isinstance(call.beta, Tensor) else call.beta]
        inputs += [each for each in beta if isinstance(each, Tensor)]
    extra: dict[str, Any] = {"backend": KERNELS}
    if call.function == "batch_all_loss":
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
) -> tuple[Tensor, list[Tensor], Tensor | None]:
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
    mining = {name: options[name] for name in ("cutoff", "nonzero_loss_cutoff")}
    mining |= {"distance": call.distance, "backend": KERNELS}
    triplets = T.mine(batch.emb, batch.labels, **words, **mining, **batch.options())
    return triplets.positive, triplets.negative


def pairs_of(truth: Truth, call: ManyTuples, picks: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """(N, M) masks of the positive and of the negative pairs that count."""
    positives, negatives = truth.positives, truth.negatives
    both = positives.any() & negatives.any()
    if picks is not None:
        candidate = torch.arange(len(truth.y))
        if call.options["positive"] != "all":
            positives = picks[0][:, None] == candidate
        if call.options["negative"] != "all":
            negatives = picks[1][:, None] == candidate
    return positives & both, negatives & both


class Terms:
    """Terms that share a mean, in float64, and what rounding may do to them."""

    def __init__(self, truth: Truth) -> None:
        anchors, pairs = truth.distance.new_zeros(len(truth.x)), torch.zeros_like(truth.distance)
        self.value, self.off, self.size, self.jump = (anchors.clone() for _ in range(4))
        self.slope, self.wobble = pairs.clone(), pairs.clone()  # by pair, of d; how far the slope may be off
        self.steady: Tensor = torch.zeros(len(truth.x), 1, dtype=torch.bool)  # where no slope can jump
        self.count = self.nonzero = 0
        self.flips = 0  # of the nonzero ones, those that may be counted or not
        self.always_nonzero = False  # whether every mean is one over the nonzero terms

    def share(self, reduction: str) -> tuple[float, float]:
        """What a mean divides by, as a factor, and the relative error of it."""
        if reduction in ("sum", "none"):
            return 1.0, 0.0
        count, flips = self.nonzero, self.flips
        if reduction == "mean" and not self.always_nonzero:
            count, flips = self.count, 0
        return 1 / max(count, 1), flips / (count - flips) if flips < count else math.inf if flips else 0.0


def errors_of(truth: Truth) -> Tensor:
    """How far each distance may be off; that of equal rows is 0 exactly."""
    if not truth.distance.numel():
        return truth.distance.clone()
    error = truth.relative * truth.distance + truth.floor(truth.distance)
    equal = (truth.distance == 0) & (torch.cdist(truth.x, truth.y, p=math.inf) == 0)
    return error.where(~equal, 0)


def padded(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The columns that are set in each row, first ones first, and which of the entries are such columns."""
    counts = mask.sum(1, keepdim=True)
    widest = int(counts.max())
    order = mask.int().argsort(dim=1, descending=True, stable=True)
    return order[:, :widest], torch.arange(widest) < counts


def triplets_of(truth: Truth) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """All triplets, some anchors at a time: (anchors, positives, negatives, which of either are any)."""
    rows = (truth.positives.any(1) & truth.negatives.any(1)).nonzero()[:, 0]
    while len(rows):
        p, is_positive = padded(truth.positives[rows])
        n, is_negative = padded(truth.negatives[rows])
        some = max(1, 2_000_000 // (p.shape[1] * n.shape[1]))
        yield rows[:some], p[:some], n[:some], is_positive[:some], is_negative[:some]
        rows = rows[some:]


class Triples:
    """Of some anchors: values (anchors, positives, negatives) and what they are made of."""

    def __init__(
        self, truth: Truth, error: Tensor, margin: float, rows: Tensor, p: Tensor, n: Tensor
    ) -> None:
        self.to_p, self.to_n = (rows[:, None], p), (rows[:, None], n)
        self.d_ap, self.d_an = truth.distance[self.to_p][:, :, None], truth.distance[self.to_n][:, None]
        self.off = error[self.to_p][:, :, None] + error[self.to_n][:, None] + truth.relative * margin
        self.z = self.d_ap - self.d_an + margin
        self.size = self.d_ap + self.d_an + margin

    def spread(self, by_pair: Tensor, values: Tensor) -> None:
        """Adds what each pair has a share in."""
        by_pair.index_put_(self.to_p, values.sum(2), accumulate=True)
        by_pair.index_put_(self.to_n, values.sum(1), accumulate=True)


def triplet_terms(truth: Truth, margin: float, soft: bool) -> Terms:
    terms, error = Terms(truth), errors_of(truth)
    for rows, p, n, is_positive, is_negative in triplets_of(truth):
        all_of, valid = (
            Triples(truth, error, margin, rows, p, n),
            is_positive[:, :, None] & is_negative[:, None],
        )
        z, off = all_of.z, all_of.off
        if soft:
            value, slope = reference.softplus(z) * valid, torch.sigmoid(z) * valid
            wobble = (torch.sigmoid(z + off) - torch.sigmoid(z - off)) * valid
            weight = torch.sigmoid(z + off) * valid
        else:
            value, slope = z.relu() * valid, ((z > 0) & valid).double()
            wobble = ((z.abs() <= off) & (off > 0) & valid).double()
            weight = ((z > -off) & valid).double()
        terms.count += int(valid.sum())
        terms.nonzero += int(valid.sum() if soft else slope.sum())
        terms.flips += 0 if soft else int(wobble.sum())
        terms.value[rows] = value.sum((1, 2))
        terms.off[rows] = (off * weight).sum((1, 2))
        terms.size[rows] = (all_of.size * weight + value).sum((1, 2))
        all_of.spread(terms.slope, slope)
        all_of.spread(terms.wobble, wobble)
    terms.steady |= soft
    return terms


def semi_hard_terms(truth: Truth, margin: float, exact: bool) -> Terms:
    terms, error = Terms(truth), errors_of(truth)
    for rows, p, n, is_positive, is_negative in triplets_of(truth):
        all_of = Triples(truth, error, margin, rows, p, n)
        threshold = truth.square[all_of.to_p][:, :, None]
        square = truth.square[all_of.to_n].where(is_negative, -math.inf)[:, None]

        def candidates(bound: float, threshold: Tensor = threshold, square: Tensor = square) -> Tensor:
            """The negatives that may be picked if squares are off by `bound`."""
            surely = square > threshold + bound
            nearest = square.where(surely, math.inf).amin(2, keepdim=True)
            fallback = ~surely.any(2, keepdim=True) & (square >= square.amax(2, keepdim=True) - bound)
            return ((square > threshold - bound) & (square <= nearest + bound)) | fallback

        pick = candidates(0.0).int().argmax(2, keepdim=True)
        possible = torch.zeros(all_of.z.shape, dtype=torch.bool).scatter(2, pick, True)
        if not exact:
            possible |= candidates(truth.bound)
        possible &= is_positive[:, :, None]
        picked = torch.zeros_like(possible).scatter(2, pick, True) & possible
        z, off = all_of.z, all_of.off
        least, most = z.where(possible, math.inf).amin(2), z.where(possible, -math.inf).amax(2)
        far = off.where(possible, 0).amax(2)
        counts = is_positive & (most > -far)
        active = picked & (z > 0)
        may_flip = counts & (least <= far) & (far > 0)
        several = possible.sum(2, keepdim=True) > 1
        doubtful = possible & (z > -off) & (several | (z <= off)) & (off > 0)
        terms.count += int(is_positive.sum())
        terms.nonzero += int(active.sum())
        terms.flips += int(may_flip.sum())
        terms.value[rows] = (z * active).sum((1, 2))
        terms.jump[rows] = (most.relu() - least.relu()).where(is_positive, 0).sum(1)
        terms.off[rows] = (far * counts).sum(1) + terms.jump[rows]
        terms.size[rows] = (all_of.size * (picked & counts[:, :, None])).sum((1, 2))
        all_of.spread(terms.slope, active.double())
        terms.wobble.index_put_(all_of.to_p, may_flip.double(), accumulate=True)
        terms.wobble.index_put_(all_of.to_n, doubtful.double().sum(1), accumulate=True)
    return terms


def multi_similarity_terms(truth: Truth, options: dict[str, Any]) -> Terms:
    terms, error, d = Terms(truth), errors_of(truth), truth.distance
    valid = truth.positives.any(1) & truth.negatives.any(1)
    if not valid.any():
        return terms
    epsilon, offset = options["epsilon"], 1 - options["base"]
    positives, negatives = (mask & valid[:, None] for mask in (truth.positives, truth.negatives))
    farthest = d.where(positives, -math.inf).argmax(1, keepdim=True)
    nearest = d.where(negatives, math.inf).argmin(1, keepdim=True)
    least_value, steady = torch.zeros(len(d)), torch.ones(len(d), 1, dtype=torch.bool)
    for sign, mask, rate, other in (
        (-1, positives, options["alpha"], nearest),
        (1, negatives, options["beta"], farthest),
    ):
        kept = surely = possibly = mask  # what mining leaves
        if epsilon is not None:
            gap = sign * (d.gather(1, other) - d) + epsilon
            off = error.gather(1, other) + error + truth.relative * (epsilon + 1e-2)
            kept, surely, possibly = mask & (gap > 0), mask & (gap > off), mask & (gap > -off)
        easy = sign < 0 and options["positive"] == "easy"
        if easy:
            first = d.where(mask, math.inf).argmin(1, keepdim=True)
            kept = mask & (first == torch.arange(d.shape[1]))
            possibly = mask & (d <= d.gather(1, first) + error + error.gather(1, first))
            surely = kept & (possibly.sum(1, keepdim=True) == 1)
        exponent = sign * rate * (offset - d)
        value, least, most = (
            torch.cat([exponent.where(some, -math.inf), torch.zeros(len(d), 1)], 1).logsumexp(1)
            for some in (kept, surely, possibly)
        )
        if easy:
            least = most = value
        steady = steady & (surely == possibly).all(1, keepdim=True)
        far = error.where(possibly, 0).amax(1)
        terms.value += value / rate
        least_value += least / rate
        terms.jump += (most - least) / rate
        terms.off += (most - least) / rate + far
        terms.size += (d.where(possibly, 0).amax(1) + abs(offset)) * valid + value / rate
        slope = (exponent - value[:, None]).exp().where(kept, 0)
        spread = 2 * rate * far[:, None]
        highest = (exponent - least[:, None] + spread).exp().clamp(max=1).where(possibly, 0)
        lowest = (exponent - most[:, None] - spread).exp().where(surely, 0)
        terms.slope += slope
        terms.wobble += torch.maximum(highest - slope, slope - lowest)
    terms.count, terms.nonzero = int(valid.sum()), int((terms.value > 0).sum())
    terms.flips = int((valid & (least_value < 2.0**-50)).sum())
    terms.steady = steady
    return terms


def pair_terms(truth: Truth, pairs: Tensor, z: Tensor, size: Tensor) -> Terms:
    """[z]₊ of the pairs, z = ±d plus something of the anchor, `size` that of its parts."""
    terms = Terms(truth)
    off = errors_of(truth) + truth.relative * (size - truth.distance)
    kept = (pairs & (z > -off)).double()
    flips = pairs & (z.abs() <= off) & (off > 0)
    terms.value, terms.off, terms.size = (z.relu() * pairs).sum(1), (off * kept).sum(1), (size * kept).sum(1)
    terms.slope, terms.wobble = (pairs & (z > 0)).double(), flips.double()
    terms.nonzero, terms.flips, terms.always_nonzero = int(terms.slope.sum()), int(flips.sum()), True
    return terms


def terms_of(truth: Truth, call: ManyTuples, picks: tuple[Tensor, Tensor] | None, exact: bool) -> list[Terms]:
    options, d = call.options, truth.distance
    if call.function == "batch_all_loss":
        soft = options["loss"] == "soft_margin"
        return [triplet_terms(truth, 0.0 if soft else options["margin"], soft)]
    if call.function == "semi_hard_loss":
        return [semi_hard_terms(truth, options["margin"], exact)]
    if call.function == "multi_similarity_loss":
        return [multi_similarity_terms(truth, options)]
    positives, negatives = pairs_of(truth, call, picks)
    if call.function == "contrastive_loss":
        start, end = d.new_tensor(options["pos_margin"]), d.new_tensor(options["neg_margin"])
        return [
            pair_terms(truth, positives, d - start, d + start),
            pair_terms(truth, negatives, end - d, d + end),
        ]
    assert call.beta is not None
    beta = beta_of(call, truth.batch.compute_type()).double()
    boundary, alpha = beta_by_anchor(truth.exact, beta)[:, None], options["alpha"]
    size = d + boundary.abs() + alpha
    pull, push = (
        pair_terms(truth, positives, d - boundary + alpha, size),
        pair_terms(truth, negatives, boundary - d + alpha, size),
    )
    for terms in (pull, push):
        terms.nonzero = int(pull.slope.sum() + push.slope.sum())
        terms.flips = int(pull.wobble.sum() + push.wobble.sum())
    return [pull, push]


def lengths_of_slopes(truth: Truth) -> list[tuple[Tensor, Tensor]]:
    """By pair, for x and for y: the norm of the derivative of d, and how far rounding rows may move it."""
    d = truth.distance
    if truth.name != "cosine":
        length = (d > 0).double() if truth.name == "euclidean" else 2 * d.sqrt()
        return 2 * [(length, torch.zeros(()))]
    norms = truth.x.norm(dim=1)[:, None], truth.y.norm(dim=1)[None]
    pulls = (norms[0] > 0) & (norms[1] > 0)
    per_norm = [torch.where(pulls, 1 / norm.where(norm > 0, 1), 0) for norm in norms]
    return [((2 * d).sqrt() * each, truth.unit_error * each) for each in per_norm]


class TupleTolerances:
    """How far the loss, the gradients of rows, and that of β by anchor, may be off."""

    def __init__(self, truth: Truth, groups: list[Terms], reduction: str) -> None:
        size = len(truth.x)
        cotangent = torch.full((size,), 1.5, dtype=torch.float64)
        if reduction == "none":
            cotangent = cotangent_of(cotangent).abs()
        zeros = torch.zeros(size, dtype=torch.float64)
        self.loss, self.loss_size, self.loss_slack = zeros.clone(), zeros.clone(), zeros.clone()
        self.beta, self.beta_pull, self.beta_slack = zeros.clone(), zeros.clone(), zeros.clone()
        sides = (len(truth.x), len(truth.y))
        self.gradient, self.pull, self.slack = (
            [torch.zeros(count, dtype=torch.float64) for count in sides] for _ in range(3)
        )
        self.uncertain = False  # whether the number of terms is
        tiny = torch.finfo(truth.batch.compute_type()).smallest_normal
        lengths = lengths_of_slopes(truth)
        for terms in groups:
            share, share_off = terms.share(reduction)
            self.uncertain |= share_off > 0.5
            more = 1 + share_off
            self.loss += share * (terms.off * more + terms.value * share_off)
            self.loss_slack += share * (terms.jump * more + terms.value * share_off)
            self.loss_size += share * terms.size
            weight = (cotangent * share)[:, None]
            slope, wobble = weight * terms.slope, weight * (terms.wobble * more + terms.slope * share_off)
            jump = wobble.where(~terms.steady, weight * terms.slope * share_off)
            self.beta += (slope * truth.relative + wobble).sum(1)
            self.beta_pull += slope.sum(1)
            self.beta_slack += jump.sum(1)
            for side, (length, moved) in enumerate(lengths):
                allowed = (slope * truth.relative + wobble) * (length + moved) + slope * moved
                allowed += weight * tiny * length * (terms.slope + terms.wobble > 0)
                self.gradient[side] += allowed.sum(1 - side)
                self.pull[side] += (slope * (length + moved)).sum(1 - side)
                self.slack[side] += (jump * (length + moved)).sum(1 - side)
        if truth.batch.ref_emb is None:
            self.gradient, self.pull, self.slack = (
                [part[0] + part[1]] for part in (self.gradient, self.pull, self.slack)
            )
        if reduction != "none":
            self.loss, self.loss_size, self.loss_slack = (
                part.sum() for part in (self.loss, self.loss_size, self.loss_slack)
            )


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
    groups = terms_of(truth, call, picks, exact)
    for reduction in reductions or REDUCTIONS:
        check_reduced(truth, call.but(reduction=reduction), picks, groups)


def check_reduced(
    truth: Truth, call: ManyTuples, picks: tuple[Tensor, Tensor] | None, groups: list[Terms]
) -> None:
    batch = truth.batch
    what = f"{call} {tuple(batch.emb.shape)} {batch.emb.dtype}"
    loss, gradients, active = run_tuples(batch, call)
    compute_type = batch.compute_type()
    expected, right, expected_active = plain_tuples(truth.exact, call, picks, compute_type, gram=False)
    assert (loss.dtype, loss.shape) == (compute_type, expected.shape), what
    given = [batch.emb, *([] if batch.ref_emb is None else [batch.ref_emb])]
    given += [call.beta] if isinstance(call.beta, Tensor) else []
    for gradient, like in zip(gradients, given, strict=True):
        assert (gradient.dtype, gradient.shape) == (like.dtype, like.shape), what

    allowed = TupleTolerances(truth, groups, call.options["reduction"])
    if active is not None and expected_active is not None:
        assert (active.dtype, active.shape) == (torch.int64, ()), what
        assert abs(int(active) - int(expected_active)) <= groups[0].flips, f"active triplets of {what}"
    if allowed.uncertain:
        return
    kind = torch.finfo(compute_type)
    # In float64 the judge, which adds up one after the other, rounds more.
    rounding = 2 * kind.eps if compute_type == torch.float32 else 4 * truth.relative
    tolerance = allowed.loss + rounding * expected.abs() + kind.smallest_normal * (allowed.loss_size > 0)
    assert_within(loss, expected, tolerance, f"loss of {what}")
    sizes = [*zip(allowed.gradient, allowed.pull, allowed.slack, strict=True)]
    if isinstance(call.beta, Tensor):
        exact_labels = truth.exact
        by_anchor = [
            torch.zeros(call.beta.numel(), dtype=torch.float64).index_add_(
                0,
                beta_by_anchor(exact_labels, torch.arange(call.beta.numel()).reshape(call.beta.shape)),
                part,
            )
            for part in (allowed.beta, allowed.beta_pull, allowed.beta_slack)
        ]
        sizes.append(tuple(by_anchor))
    names = ("emb", "beta") if batch.ref_emb is None else ("emb", "ref_emb", "beta")
    for name, gradient, true, (tolerance, _, _) in zip(names, gradients, right, sizes, strict=False):
        form = torch.finfo(gradient.dtype)
        rounding = form.eps * true.abs() + form.smallest_normal * form.eps
        room = tolerance[:, None] if gradient.dim() == 2 else tolerance.reshape(gradient.shape)
        assert_within(gradient, true, room + rounding * (room > 0), f"gradient of {name} of {what}")

    if compute_type == torch.float32:  # in float64 the plain formulation is the judge itself

        @cache
        def plain(gram: bool) -> list[Tensor]:
            value, slopes, _ = plain_tuples(batch.plain(), call, picks, compute_type, gram)
            return [value, *slopes]

        check_no_worse_than_plain(
            loss,
            lambda gram: plain(gram)[0],
            expected,
            allowed.loss_size,
            allowed.loss_slack,
            f"loss of {what}",
        )
        for i, (name, gradient, true, (_, pull, slack)) in enumerate(
            zip(names, gradients, right, sizes, strict=False), 1
        ):
            room = slack[:, None] if gradient.dim() == 2 else slack.reshape(gradient.shape)
            check_no_worse_than_plain(
                gradient, lambda gram, i=i: plain(gram)[i], true, pull, room, f"gradient of {name} of {what}"
            )
