"""002, Figs 2 and 5, equations 4–39: where a step of gradient descent moves triplets, by its closed forms.

`compute` either measures the field of one loss and γ, or holds every equation, as it is printed, against
random unit vectors that follow autograd's gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from train_ref.computed import percent
from train_ref.settings import AboveZero, Computation, Computed, Count, FromZero
from tripletops import diagnostics

FIELD, EQUATIONS = "field", "equations"
FIRST, VANILLA, SECOND = "first_order", "margin", "second_order"  # as `diagnostics.field` has them
NEAR, NEARER = 0.8, 0.9  # S_an of at least this is near the top, S_ap near the right, both near (1, 1)
TOP_RIGHT, BOTTOM_LEFT = (diagnostics.QUARTERS.index(name) for name in ("top-right", "bottom-left"))

# Names of measures, and of the groups of them.
ALONE, FINER = "without entanglement", "on a finer grid"
CORNERS = (0.8, 0.9, 0.95, 0.99)  # where ever smaller squares at (1, 1) begin
FALLS, GROWS = "S_ap falls", "S_an grows"
FALLS_FROM, GROWS_FROM = "S_ap falls only from S_ap =", "S_an grows only from S_an ="
NEAR_CORNER = "near (1, 1)"
UP, DOWN = "up where S_an ≥ ", "steeply down where S_ap ≥ "  # a number follows
AS_FIRST, STILL_WRONG = "as L1st", "as with less p where that is wrong"
CORRECTED = "(24) with S_an first"  # the one that is not as printed


@dataclass(frozen=True, kw_only=True)
class FieldSettings(Computation):
    part: str = FIELD  # or "equations"
    loss: str = FIRST
    gamma: float = 0.5
    entanglement: tuple[FromZero, ...] = (0.4, 0.8)  # p
    step: AboveZero = 1e-3  # the vanilla loss has β = 2·step
    grid: Count = 201  # triplets a side
    fine: Count = 1001  # of a second grid, which shows what the first one's spacing does
    triplets: Count = 10_000  # random ones, that equations are tried on

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.part not in (FIELD, EQUATIONS):
            raise ValueError(f"--part {self.part}: must be {FIELD} or {EQUATIONS}")
        if self.loss not in diagnostics.LOSSES:
            raise ValueError(f"--loss {self.loss}: must be {', '.join(diagnostics.LOSSES)}")


def compute(settings: FieldSettings, seed: int) -> Computed:
    if settings.part == EQUATIONS:
        return Computed(errors(settings.loss, random_triplets(settings.triplets, seed), settings.step), {})
    return Computed(_measures(settings), {})  # the field itself is computed again where it is drawn


# The field --------------------------------------------------------------------------------------------------


def field_of(settings: FieldSettings, p: float, low: float = 0.0) -> diagnostics.Field:
    gamma, step, grid = settings.gamma, settings.step, settings.grid
    return diagnostics.field(settings.loss, gamma=gamma, p=p, step=step, grid=grid, low=low)


def inside(low: float, p: float) -> str:
    """The measure of what moves to the top right in a square at (1, 1)."""
    return f"to the top right inside [s, 1]², p={p:g}/s={low:g}"


def _measures(settings: FieldSettings) -> dict[str, float]:
    """Shares of the square in percent, "p=0.8/top-right" and the like, and where wrong regions begin."""
    least, most = min(settings.entanglement), max(settings.entanglement)
    fields = {p: field_of(settings, p) for p in settings.entanglement}
    finely = replace(settings, grid=settings.fine)
    fine = field_of(finely, most)
    measures = {f"{ALONE}/{name}": share for name, share in _wrong(fields[most]).items()}
    for p, found in fields.items():
        measures |= {f"p={p:g}/{name}": share for name, share in _shares(found).items()}
        first = field_of(replace(settings, loss=FIRST), p)
        measures[f"p={p:g}/{AS_FIRST}"] = percent(_quarters(found) == _quarters(first))
    before, after = _quarters(fields[least]), _quarters(fields[most])
    was_wrong = (before == TOP_RIGHT) | (before == BOTTOM_LEFT)
    if was_wrong.any():
        measures[f"p={most:g}/{STILL_WRONG}"] = percent((before == after)[was_wrong])
    finer = {**_wrong(fine), f"top-right, p={most:g}": 100 * fine.quarters()["top-right"]}
    measures |= {f"{FINER}/{name}": share for name, share in finer.items()}
    for low in CORNERS:
        measures[inside(low, most)] = 100 * field_of(finely, most, low).quarters()["top-right"]
    for name, line, has_some in (
        (FALLS_FROM, fine.s_ap, (fine.delta_ap < 0).any(0)),
        (GROWS_FROM, fine.s_an, (fine.delta_an > 0).any(1)),
    ):
        if has_some.any():
            measures[name] = float(line[has_some].min())
    return measures


def _quarters(found: diagnostics.Field) -> Tensor:
    return diagnostics.quarter_of(found.total_ap, found.total_an)


def _wrong(found: diagnostics.Field) -> dict[str, float]:
    return {FALLS: percent(found.delta_ap < 0), GROWS: percent(found.delta_an > 0)}


def _near(line: Tensor, least: float) -> Tensor:
    return line >= least - 1e-9  # grids are rounded


def _shares(found: diagnostics.Field) -> dict[str, float]:
    """With entanglement: of the whole square, near its corner (1, 1), and near its top and right edges."""
    corner = _quarters(found)[_near(found.s_an, NEAR)][:, _near(found.s_ap, NEAR)]
    is_steep = found.total_an < -found.total_ap.abs()
    return {
        **{name: 100 * share for name, share in found.quarters().items()},
        f"top-right {NEAR_CORNER}": percent(corner == TOP_RIGHT),
        f"bottom-left {NEAR_CORNER}": percent(corner == BOTTOM_LEFT),
        **{f"{UP}{low:g}": percent(found.total_an[_near(found.s_an, low)] > 0) for low in (NEAR, NEARER)},
        **{f"{DOWN}{low:g}": percent(is_steep[:, _near(found.s_ap, low)]) for low in (NEAR, NEARER)},
    }


# Equations --------------------------------------------------------------------------------------------------


class Triplets(NamedTuple):
    """Vectors (triplets, 3), float64."""

    anchor: Tensor
    positive: Tensor
    negative: Tensor


def random_triplets(count: int, seed: int) -> Triplets:
    """Unit vectors in three dimensions, which hold any triplet."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(3, count, 3, generator=generator, dtype=torch.float64)
    return Triplets(*(drawn / drawn.norm(dim=-1, keepdim=True)))


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1)


def gradients(loss: str, triplets: Triplets) -> Triplets:
    """Those of (1), (16) or (28), from autograd; every triplet of (28) counts as active."""
    leaves = Triplets(*(each.clone().requires_grad_() for each in triplets))
    s_ap, s_an = _dot(leaves.anchor, leaves.positive), _dot(leaves.anchor, leaves.negative)
    if loss == FIRST:
        losses = -torch.log(s_ap.exp() / (s_ap.exp() + s_an.exp()))
    elif loss == SECOND:
        wanted, unwanted = (s_ap - s_ap.square() / 2).exp(), (s_an.square() / 2).exp()
        losses = -torch.log(wanted / (wanted + unwanted))
    else:
        to_positive, to_negative = leaves.anchor - leaves.positive, leaves.anchor - leaves.negative
        losses = _dot(to_positive, to_positive) - _dot(to_negative, to_negative)
    return Triplets(*torch.autograd.grad(losses.sum(), leaves))


class Printed(NamedTuple):
    """What the printed equations are made from, and what they are held against."""

    f: Triplets
    slopes: Triplets
    moved: Triplets  # by the step, not normalised
    step: float
    s_ap: Tensor
    s_an: Tensor
    s_pn: Tensor
    off_ap: Tensor  # √(1 − S_ap²)
    off_an: Tensor
    gamma: Tensor  # by its definition below (19)

    @classmethod
    def of(cls, loss: str, f: Triplets, step: float) -> Printed:
        slopes = gradients(loss, f)
        moved = Triplets(*(each - step * slope for each, slope in zip(f, slopes, strict=True)))
        s_ap, s_an, s_pn = (
            _dot(f.anchor, f.positive),
            _dot(f.anchor, f.negative),
            _dot(f.positive, f.negative),
        )
        off_ap, off_an = (1 - s_ap**2).sqrt(), (1 - s_an**2).sqrt()
        gamma = _dot(
            (f.positive - s_ap[:, None] * f.anchor) / off_ap[:, None],
            (f.negative - s_an[:, None] * f.anchor) / off_an[:, None],
        )
        return cls(f, slopes, moved, step, s_ap, s_an, s_pn, off_ap, off_an, gamma)

    def norms(self, numbers: str, pull: Tensor, push: Tensor, keep_p: Tensor, keep_n: Tensor) -> Pairs:
        """(20)–(22), (25)–(27) and (35)–(37), which are of one form, beside the squared norms."""
        positive, negative, anchor = numbers.split()
        return {
            positive: (
                (keep_p + pull * self.s_ap) ** 2 + pull**2 * (1 - self.s_ap**2),
                _dot(self.moved.positive, self.moved.positive),
            ),
            negative: (
                (keep_n - push * self.s_an) ** 2 + push**2 * (1 - self.s_an**2),
                _dot(self.moved.negative, self.moved.negative),
            ),
            anchor: (
                (1 + pull * self.s_ap - push * self.s_an) ** 2
                + (pull * self.off_ap - self.gamma * push * self.off_an) ** 2
                + (push * (1 - self.gamma**2).clamp(min=0).sqrt() * self.off_an) ** 2,
                _dot(self.moved.anchor, self.moved.anchor),
            ),
        }

    def products(self) -> tuple[Tensor, Tensor]:
        """The new S_ap and S_an before normalising."""
        return _dot(self.moved.anchor, self.moved.positive), _dot(self.moved.anchor, self.moved.negative)


Pairs = dict[str, tuple[Tensor, Tensor]]  # by equation: as it is printed, and as it should be


def _first_order(of: Printed) -> Pairs:
    (a, p, n), ap, an, pn = of.f, of.s_ap, of.s_an, of.s_pn
    beta = of.step * an.exp() / (ap.exp() + an.exp())
    new_ap, new_an = of.products()
    times = beta[:, None]
    return {
        "(4)": (p + times * a, of.moved.positive),
        "(5)": (n - times * a, of.moved.negative),
        "(6)": (a - times * n + times * p, of.moved.anchor),
        "(7)": ((1 + beta**2) * ap + 2 * beta - beta * pn - beta**2 * an, new_ap),
        "(8)": ((1 + beta**2) * an - 2 * beta + beta * pn - beta**2 * ap, new_an),
        "(18)": ((1 + beta**2) * ap - 2 * beta + beta * pn - beta**2 * ap, new_an),
        "(19)": (ap * an + of.gamma * of.off_ap * of.off_an, pn),
        **of.norms("(20) (21) (22)", beta, beta, torch.ones_like(beta), torch.ones_like(beta)),
    }


def _second_order(of: Printed) -> Pairs:
    (a, p, n), ap, an, pn = of.f, of.s_ap, of.s_an, of.s_pn
    pushed = (an**2 / 2).exp()
    beta = of.step * pushed / ((ap - ap**2 / 2).exp() + pushed)
    pull, push = (1 - ap) * beta, an * beta  # w_ap·β_w and w_an·β_w
    new_ap, new_an = of.products()
    return {
        "(13)": (-pull[:, None] * a, of.step * of.slopes.positive),
        "(14)": (push[:, None] * a, of.step * of.slopes.negative),
        "(15)": (push[:, None] * n - pull[:, None] * p, of.step * of.slopes.anchor),
        "(23)": ((1 + pull**2) * ap + 2 * pull - push * pn - pull * push * an, new_ap),
        "(24)": ((1 + push**2) * ap - 2 * push + pull * pn - pull * push * ap, new_an),
        CORRECTED: ((1 + push**2) * an - 2 * push + pull * pn - pull * push * ap, new_an),
        **of.norms("(25) (26) (27)", pull, push, torch.ones_like(pull), torch.ones_like(push)),
    }


def _vanilla(of: Printed) -> Pairs:
    (a, p, n), ap, an, pn = of.f, of.s_ap, of.s_an, of.s_pn
    beta = 2 * of.step
    new_ap, new_an = of.products()
    whole = torch.full_like(ap, beta)
    return {
        "(29)": (-2 * (a - p), of.slopes.positive),
        "(30)": (2 * (a - n), -of.slopes.negative),
        "(31)": (2 * (n - p), -of.slopes.anchor),
        "(32)": ((1 - beta) * p + beta * a, of.moved.positive),
        "(33)": ((1 + beta) * n - beta * a, of.moved.negative),
        "(34)": (a - beta * n + beta * p, of.moved.anchor),
        **of.norms("(35) (36) (37)", whole, whole, 1 - whole, 1 + whole),
        "(38)": (
            (1 - beta + beta**2) * ap + 2 * beta - beta**2 - beta * (1 - beta) * pn - beta**2 * an,
            new_ap,
        ),
        "(39)": (
            (1 + beta + beta**2) * an - 2 * beta - beta**2 + beta * (1 + beta) * pn - beta**2 * ap,
            new_an,
        ),
    }


def errors(loss: str, triplets: Triplets, step: float) -> dict[str, float]:
    """By equation: the largest difference, over the triplets, between what is printed and what is so."""
    pairs = {FIRST: _first_order, SECOND: _second_order, VANILLA: _vanilla}[loss](
        Printed.of(loss, triplets, step)
    )
    return {name: float((printed - true).abs().max()) for name, (printed, true) in pairs.items()}
