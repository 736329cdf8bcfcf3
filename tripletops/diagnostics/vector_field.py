"""Where one step of gradient descent moves a triplet on the scatter diagram.

Diagram and equations are those of "Extreme Triplet Learning: Effectively Optimizing Easy Positives and Hard
Negatives". The diagram has S_ap, the cosine similarity of anchor and positive, to the right, and S_an, that
of anchor and negative, upwards. The step follows the gradient of the plain dot products (equations 4 to 6, 13
to 15, 32 to 34), which leaves the sphere; then the vectors are normalised again. What the paper calls
entanglement, equations 11 and 12, is its model of a network that moves near points alike.

The equations are the paper's with its misprints corrected: the leading S_ap of (18) and (24) is S_an, and
(30) and (31) lost a minus.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tripletops._rows import whole
from tripletops.diagnostics.rows import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["LOSSES", "QUARTERS", "QUARTER_COLOURS", "Field", "field", "quarter_of"]

LOSSES = ("first_order", "second_order", "margin")
QUARTERS = ("top-right", "top-left", "bottom-left", "bottom-right")  # in the order of the paper's Fig 3
QUARTER_COLOURS = {
    "top-right": "#c53030",
    "top-left": "#805ad5",
    "bottom-left": "#dd6b20",
    "bottom-right": "#2b6cb0",
}
# What `Field.draw` can show, and its title.
_SHOWN = {
    "delta_ap": r"$\Delta S_{ap}$",
    "delta_an": r"$\Delta S_{an}$",
    "delta": "movement",
    "total_ap": r"$\Delta S_{ap}^{total}$",
    "total_an": r"$\Delta S_{an}^{total}$",
    "total": "movement with entanglement",
}
_ROUNDING = 8 * torch.finfo(torch.float64).eps  # a smaller change of a similarity is taken for 0


class Field(NamedTuple):
    """The changes of S_ap and S_an in one step, on a grid of G×G triplets; all tensors are float64.

    Element [i, j] of a (G, G) tensor belongs to S_an = ``s_an[i]`` and S_ap = ``s_ap[j]``, as in an image.
    """

    loss: str
    gamma: float
    p: float
    step: float
    s_ap: Tensor
    """(G,), the columns."""
    s_an: Tensor
    """(G,), the rows."""
    delta_ap: Tensor
    """(G, G): ΔS_ap of equation 9."""
    delta_an: Tensor
    """(G, G): ΔS_an of equation 10."""
    total_ap: Tensor
    """(G, G): ΔS_ap with entanglement, equation 11."""
    total_an: Tensor
    """(G, G): ΔS_an with entanglement, equation 12."""

    def quarters(self, entangled: bool = True) -> dict[str, float]:
        """The share, 0 to 1, of the grid's triplets that move to each quarter; the rest does not move."""
        ap, an = (self.total_ap, self.total_an) if entangled else (self.delta_ap, self.delta_an)
        return quarter_shares(ap, an)

    def draw(self, axes: Axes, show: str = "total", *, arrows: int = 19) -> Any:
        """Draw on matplotlib's `axes`; returns the artist, which a colour bar can be made for.

        Args:
            axes: a panel.
            show: ``"delta_ap"``, ``"delta_an"``, ``"total_ap"`` or ``"total_an"``: the change by colour, red
                where it is not what the loss wants, with a line where it is 0. Each sign has a scale of its
                own. ``"delta"`` or ``"total"``: arrows, coloured by quarter. They show directions; all have
                one length.
            arrows: how many there are along each axis.
        """
        if show not in _SHOWN:
            raise ValueError(f"show={show!r} is not one of {', '.join(map(repr, _SHOWN))}")
        if show in ("delta", "total"):
            artist = self._draw_arrows(axes, show, whole("arrows", arrows, 2))
        else:
            artist = self._draw_change(axes, show)
        frame(axes, *self._ends())
        axes.set_title(_SHOWN[show], fontsize=10)
        return artist

    def figure(self) -> Figure:
        """Six panels: both changes and the movement, above without entanglement and below with it."""
        figure = new_figure(10.5, 6.6)
        for axes, show in zip(figure.subplots(2, 3).flat, _SHOWN, strict=True):
            artist = self.draw(axes, show)
            if show not in ("delta", "total"):
                least, most = artist.get_clim()
                figure.colorbar(artist, ax=axes, shrink=0.8, ticks=[least, 0, most], format="%.0e")
        figure.suptitle(f"{self.loss}, γ = {self.gamma:g}, p = {self.p:g}, step {self.step:g}", fontsize=10)
        arrows = [
            figure.axes[0].plot([], [], color=QUARTER_COLOURS[name], label=name)[0] for name in QUARTERS
        ]
        figure.legend(
            handles=arrows, loc="outside lower right", ncols=len(QUARTERS), fontsize=9, frameon=False
        )
        return figure

    def _ends(self) -> tuple[float, float]:
        return float(self.s_ap[0]), float(self.s_ap[-1])

    def _draw_change(self, axes: Axes, show: str) -> Any:
        from matplotlib.colors import TwoSlopeNorm

        change = getattr(self, show)
        least, most = float(change.min()), float(change.max())
        # A sign that does not occur has the other one's scale.
        scale = TwoSlopeNorm(0, least if least < 0 else -most or -1.0, most if most > 0 else -least or 1.0)
        # What the loss wants is blue: S_ap grows and S_an falls.
        colours = "RdBu" if show.endswith("ap") else "RdBu_r"
        x, y, z = self.s_ap.numpy(), self.s_an.numpy(), change.numpy()
        artist = axes.pcolormesh(x, y, z, cmap=colours, norm=scale, shading="nearest", rasterized=True)
        if least < 0 < most:
            axes.contour(x, y, z, levels=[0.0], colors="black", linewidths=1)
        return artist

    def _draw_arrows(self, axes: Axes, show: str, arrows: int) -> Any:
        low, high = self._ends()
        coarse = field(self.loss, gamma=self.gamma, p=self.p, step=self.step, grid=arrows, low=low, high=high)
        ap, an = getattr(coarse, f"{show}_ap"), getattr(coarse, f"{show}_an")
        length = torch.hypot(ap, an)
        moving = length > 0
        place = quarter_of(ap, an)[moving].tolist()
        s_an, s_ap = torch.meshgrid(coarse.s_an, coarse.s_ap, indexing="ij")
        return axes.quiver(
            *(each[moving].numpy() for each in (s_ap, s_an, ap / length, an / length)),
            color=[QUARTER_COLOURS[QUARTERS[index]] for index in place],
            angles="xy",
            scale_units="xy",
            scale=1.25 * (arrows - 1) / (high - low),
            width=0.1 / arrows,  # of the panel's
            pivot="mid",
        )


def field(
    loss: str,
    *,
    gamma: float = 0.5,
    p: float = 0.8,
    step: float = 1e-3,
    grid: int = 201,
    low: float = 0.0,
    high: float = 1.0,
) -> Field:
    """How S_ap and S_an change in one step of gradient descent: equations 7 to 12 on a grid of triplets.

    Args:
        loss: ``"first_order"`` (equation 1), ``"second_order"`` (16), or ``"margin"``: the vanilla triplet
            loss of squared distances (28), of which every triplet counts as active.
        gamma: γ of equation 19, −1 to 1: the cosine of the angle at the anchor between the directions to the
            positive and to the negative. 1: both lie on one side of it on one great circle; 0: a right angle.
        p: the strength of entanglement in equations 11 and 12; 0: none.
        step: the learning rate. The vanilla loss moves by twice as much, since its β is 2.
        grid: the triplets along each axis.
        low, high: the ends of both axes, −1 to 1. Where S_ap or S_an is below 0, the model of entanglement
            has no meaning: there the totals are the changes without it.
    """
    if loss not in LOSSES:
        raise ValueError(f"loss={loss!r} is not one of {', '.join(map(repr, LOSSES))}")
    gamma, low, high = (_cosine(name, of) for name, of in (("gamma", gamma), ("low", low), ("high", high)))
    p, step = number("p", p), number("step", step)
    if step <= 0:
        raise ValueError(f"step={step!r}: must be greater than 0")
    if low >= high:
        raise ValueError(f"low={low!r} must be less than high={high!r}")
    line = torch.linspace(low, high, whole("grid", grid, 2), dtype=torch.float64, device="cpu")
    s_an, s_ap = torch.meshgrid(line, line, indexing="ij")
    delta_ap, delta_an = _changes(loss, s_ap, s_an, gamma, step)
    entanglement = p * (s_ap.clamp(min=0) * s_an.clamp(min=0)).sqrt()
    total_ap = _rounded(delta_ap + entanglement * delta_an)
    total_an = _rounded(delta_an + entanglement * delta_ap)
    return Field(loss, gamma, p, step, line, line.clone(), delta_ap, delta_an, total_ap, total_an)


def quarter_of(change_ap: Tensor, change_an: Tensor) -> Tensor:
    """The place in `QUARTERS` that a movement goes to, int64; −1 where nothing moves.

    A similarity that stays as it is counts as one that falls.
    """
    right, up = change_ap > 0, change_an > 0
    place = torch.where(up, torch.where(right, 0, 1), torch.where(right, 3, 2))
    return place.masked_fill((change_ap == 0) & (change_an == 0), -1)


def quarter_shares(change_ap: Tensor, change_an: Tensor) -> dict[str, float]:
    """The share, 0 to 1, of the movements that go to each quarter."""
    place = quarter_of(change_ap, change_an)
    return {name: float((place == index).double().mean()) for index, name in enumerate(QUARTERS)}


def frame(axes: Axes, low: float, high: float) -> None:
    """The diagonal, the limits and the names of a scatter diagram's axes."""
    room = 0.03 * (high - low)
    axes.plot((low, high), (low, high), color="#888888", linewidth=0.8, zorder=0.5)
    limits = (low - room, high + room)
    axes.set(xlim=limits, ylim=limits, aspect="equal", xlabel="$S_{ap}$", ylabel="$S_{an}$")


def new_figure(width: float, height: float) -> Figure:
    """A figure that needs no display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('a figure needs matplotlib: pip install "tripletops[demo]"') from error
    return Figure(figsize=(width, height), layout="constrained")


def _pulls(
    loss: str, s_ap: Tensor, s_an: Tensor, step: float
) -> tuple[Tensor, Tensor, Tensor | float, Tensor | float]:
    """How a step moves the vectors: f_p' = keep_p·f_p + pull·f_a, f_n' = keep_n·f_n − push·f_a and
    f_a' = f_a + pull·f_p − push·f_n."""
    if loss == "first_order":  # equations 4 to 6
        beta = step * torch.sigmoid(s_an - s_ap)
        return beta, beta, 1.0, 1.0
    if loss == "second_order":  # equations 13 to 15
        beta = step * torch.sigmoid(s_an.square() / 2 - s_ap + s_ap.square() / 2)
        return (1 - s_ap) * beta, s_an * beta, 1.0, 1.0
    beta = torch.full_like(s_ap, 2 * step)  # equations 32 to 34
    return beta, beta, 1 - beta, 1 + beta


def _changes(loss: str, s_ap: Tensor, s_an: Tensor, gamma: float, step: float) -> tuple[Tensor, Tensor]:
    """ΔS_ap and ΔS_an of equations 9 and 10, with the products and norms of 17 to 27 and 35 to 39."""
    pull, push, keep_p, keep_n = _pulls(loss, s_ap, s_an, step)
    off_ap, off_an = (
        (1 - s_ap.square()).sqrt(),
        (1 - s_an.square()).sqrt(),
    )  # of p and n, at a right angle to a
    s_pn = s_ap * s_an + gamma * off_ap * off_an  # (19)
    new_ap = (keep_p + pull**2) * s_ap + pull * (1 + keep_p) - push * keep_p * s_pn - pull * push * s_an
    new_an = (keep_n + push**2) * s_an - push * (1 + keep_n) + pull * keep_n * s_pn - pull * push * s_ap
    positive = (keep_p + pull * s_ap) ** 2 + (pull * off_ap) ** 2  # (20), (25), (35): the squared norm
    negative = (keep_n - push * s_an) ** 2 + (push * off_an) ** 2  # (21), (26), (36)
    anchor = (  # (22), (27), (37)
        (1 + pull * s_ap - push * s_an) ** 2
        + (pull * off_ap - gamma * push * off_an) ** 2
        + (1 - gamma**2) * (push * off_an) ** 2
    )
    return (
        _rounded(_normalised(new_ap, anchor * positive) - s_ap),
        _rounded(_normalised(new_an, anchor * negative) - s_an),
    )


def _normalised(product: Tensor, squares: Tensor) -> Tensor:
    """A dot product divided by both norms, given the product of their squares. A vector that a large step
    moves to 0 has the similarity 0 with everything."""
    norms = squares.clamp(min=0).sqrt()
    return torch.where(norms > 0, product / norms.clamp(min=torch.finfo(torch.float64).tiny), 0.0)


def _rounded(change: Tensor) -> Tensor:
    """At the corners nothing moves: what rounding leaves there must not count as a direction."""
    return change.masked_fill(change.abs() <= _ROUNDING, 0.0)


def _cosine(name: str, value: object) -> float:
    given = number(name, value)
    if not -1 <= given <= 1:
        raise ValueError(f"{name}={given!r}: must be from −1 to 1")
    return given
