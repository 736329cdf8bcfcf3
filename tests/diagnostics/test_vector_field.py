"""`diagnostics.field`: against unit vectors that are moved by autograd's gradient and normalised again; by
hand; its shares of the square, its drawings, and what must be refused."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from tripletops.diagnostics.vector_field import LOSSES, QUARTER_COLOURS, QUARTERS, Field, field, quarter_of

pytestmark = pytest.mark.usefixtures("one_thread")

DIMENSION = 5
ROUNDING = 1e-14  # float64's, in a cosine of vectors of length about 1


def triplets(s_ap: Tensor, s_an: Tensor, gamma: float, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Unit vectors (…, DIMENSION) of these similarities and this γ, each triplet turned at random."""
    axes = torch.linalg.qr(
        torch.randn(*s_ap.shape, DIMENSION, 3, generator=generator, dtype=torch.float64)
    ).Q.unbind(-1)
    side = gamma * axes[1] + math.sqrt(1 - gamma**2) * axes[2]
    positive = s_ap[..., None] * axes[0] + (1 - s_ap.square()).sqrt()[..., None] * axes[1]
    negative = s_an[..., None] * axes[0] + (1 - s_an.square()).sqrt()[..., None] * side
    return axes[0].contiguous(), positive, negative


def loss_of(loss: str, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Equations 1, 16 and 28 as they are printed; (28) with D > 0, as the paper supposes."""
    s_ap, s_an = (anchor * positive).sum(-1), (anchor * negative).sum(-1)
    if loss == "first_order":
        return -(s_ap.exp() / (s_ap.exp() + s_an.exp())).log()
    if loss == "second_order":
        wanted = (s_ap - s_ap.square() / 2).exp()
        return -(wanted / (wanted + (s_an.square() / 2).exp())).log()
    return (anchor - positive).square().sum(-1) - (anchor - negative).square().sum(-1)


def moved(loss: str, vectors: tuple[Tensor, ...], step: float) -> tuple[Tensor, Tensor]:
    """How S_ap and S_an change when the vectors follow autograd's gradient and are normalised again."""
    leaves = [each.clone().requires_grad_() for each in vectors]
    gradients = torch.autograd.grad(loss_of(loss, *leaves).sum(), leaves)
    new = [F.normalize(each - step * slope, dim=-1) for each, slope in zip(vectors, gradients, strict=True)]
    (a, p, n), (a_new, p_new, n_new) = vectors, new
    return (a_new * p_new).sum(-1) - (a * p).sum(-1), (a_new * n_new).sum(-1) - (a * n).sum(-1)


def moved_grid(loss: str, gamma: float, step: float, line: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    s_an, s_ap = torch.meshgrid(line, line, indexing="ij")
    return moved(loss, triplets(s_ap, s_an, gamma, torch.Generator().manual_seed(seed)), step)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("step", [1e-3, 0.3])
def test_closed_forms_are_what_happens_to_vectors(loss, step):
    """Random γ of both signs and both ends, on all of [−1, 1]²."""
    drawn = 2 * torch.rand(10, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 1
    for seed, gamma in enumerate([*drawn.tolist(), -1.0, 0.0, 1.0]):
        found = field(loss, gamma=gamma, step=step, grid=17, low=-1)
        ap, an = moved_grid(loss, gamma, step, found.s_ap, seed)
        torch.testing.assert_close(found.delta_ap, ap, rtol=0, atol=ROUNDING)
        torch.testing.assert_close(found.delta_an, an, rtol=0, atol=ROUNDING)
        assert ap.abs().max() > 0.1 * step
    assert gamma == 1


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("p", [0.0, 0.4, 1.7])
def test_entangled_totals(loss, p):
    """Equations 11 and 12, element by element."""
    found = field(loss, gamma=-0.3, p=p, grid=9, low=-0.5)
    ap, an = moved_grid(loss, -0.3, 1e-3, found.s_ap)
    for i, s_an in enumerate(found.s_an.tolist()):
        for j, s_ap in enumerate(found.s_ap.tolist()):
            q = math.sqrt(s_ap * s_an) if min(s_ap, s_an) > 0 else 0.0
            assert found.total_ap[i, j] == pytest.approx(float(ap[i, j] + p * q * an[i, j]), abs=ROUNDING)
            assert found.total_an[i, j] == pytest.approx(float(an[i, j] + p * q * ap[i, j]), abs=ROUNDING)


def at(found: Field) -> tuple[float, float]:
    """The changes at S_ap = S_an = 0."""
    return float(found.delta_ap[0, 0]), float(found.delta_an[0, 0])


def test_three_right_angles_by_hand():
    """a, p, n = e₁, e₂, e₃ (S_ap = S_an = γ = 0).

    First order, β = ¼: a' = (1, ¼, −¼), p' = (¼, 1, 0), n' = (−¼, 0, 1). Second order: nothing pushes, since
    w_an = 0, so a' = (1, ¼, 0), p' = (¼, 1, 0), n' = n. Vanilla, β = ½: a' = (1, ½, −½), p' = (½, ½, 0),
    n' = (−½, 0, 3/2).
    """
    both = 0.5 / math.sqrt(1.125 * 1.0625)
    assert at(field("first_order", gamma=0, step=0.5, grid=2)) == pytest.approx((both, -both), abs=ROUNDING)
    assert at(field("second_order", gamma=0, step=0.5, grid=2)) == pytest.approx(
        (0.5 / 1.0625, 0), abs=ROUNDING
    )
    vanilla = 0.75 / math.sqrt(1.5 * 0.5), -1.25 / math.sqrt(1.5 * 2.5)
    assert at(field("margin", gamma=0, step=0.25, grid=2)) == pytest.approx(vanilla, abs=ROUNDING)


def test_corners_by_hand():
    """First order, step 1. (1, 1): all three are one vector, and nothing moves. (S_ap, S_an) = (1, 0): p = a
    and β = 1/(1 + e), so a' = (1 + β, −β), p' = (1 + β, 0), n' = (−β, 1). (0, 1): n = a, and a' turns from it
    to p."""
    found = field("first_order", step=1.0, grid=2)
    assert [float(each[1, 1]) for each in (found.delta_ap, found.delta_an)] == [0, 0]
    beta = 1 / (1 + math.e)
    anchor = math.hypot(1 + beta, beta)
    expected_ap = (1 + beta) / anchor - 1
    expected_an = (-(1 + beta) * beta - beta) / (anchor * math.hypot(beta, 1))
    assert float(found.delta_ap[0, 1]) == pytest.approx(expected_ap, abs=ROUNDING)
    assert float(found.delta_an[0, 1]) == pytest.approx(expected_an, abs=ROUNDING)
    assert found.quarters() == {"top-right": 0, "top-left": 0, "bottom-left": 0.25, "bottom-right": 0.5}


def test_a_vector_that_a_step_moves_to_zero_is_similar_to_nothing():
    """First order, step 2, at (1, 1): β = 1 and n' = n − a = 0."""
    found = field("first_order", step=2.0, grid=2)
    assert (float(found.delta_ap[1, 1]), float(found.delta_an[1, 1])) == (0, -1)


def test_rows_are_s_an_and_columns_s_ap():
    found = field("second_order", gamma=0, grid=3)
    assert found.s_ap.tolist() == found.s_an.tolist() == [0, 0.5, 1]
    assert (found.delta_an[0] == 0).all()  # w_an = S_an = 0: nothing pushes
    assert (found.delta_an[1, :2] < 0).all()
    assert (found.delta_ap[:, 0] > 0).all()


def test_quarters_of_movements():
    ap = torch.tensor([1.0, -1.0, -1.0, 1.0, 0.0, 0.0, 0.0, 1.0, -1.0])
    an = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0, 1.0, -1.0, 0.0, 0.0])
    assert quarter_of(ap, an).tolist() == [0, 1, 2, 3, -1, 1, 2, 3, 2]
    assert QUARTERS == ("top-right", "top-left", "bottom-left", "bottom-right")
    assert set(QUARTER_COLOURS) == set(QUARTERS)


def percent(mask: Tensor) -> float:
    return round(100 * float(mask.double().mean()), 1)


@pytest.mark.parametrize(
    ("loss", "ap_falls", "an_grows", "top_right", "in_the_corner"),
    [("first_order", 2.4, 1.9, 18.9, 38), ("second_order", 15.2, 12.5, 32.5, 4)],
)
def test_shares_of_the_square(loss, ap_falls, an_grows, top_right, in_the_corner):
    """On a 201² grid with γ = .5 and p = .8, of vectors moved here and of the closed forms alike."""
    found = field(loss, gamma=0.5, p=0.8, grid=201)
    ap, an = (each.where(each.abs() > ROUNDING, 0) for each in moved_grid(loss, 0.5, 1e-3, found.s_ap))
    q = 0.8 * (found.s_an[:, None] * found.s_ap).sqrt()
    total_ap, total_an = ap + q * an, an + q * ap
    corner = (found.s_an >= 0.8 - 1e-9)[:, None] & (found.s_ap >= 0.8 - 1e-9)
    assert corner.sum() == 41**2
    for d_ap, d_an, t_ap, t_an in (
        (ap, an, total_ap, total_an),
        (found.delta_ap, found.delta_an, found.total_ap, found.total_an),
    ):
        assert percent(d_ap < 0) == ap_falls
        assert percent(d_an > 0) == an_grows
        to_top_right = (t_ap > 0) & (t_an > 0)
        assert percent(to_top_right) == top_right
        assert round(percent(to_top_right[corner])) == in_the_corner
        assert not ((t_ap <= 0) & (t_an > 0)).any()
    assert round(100 * found.quarters()["top-right"], 1) == top_right
    assert found.quarters()["top-left"] == 0


@pytest.mark.parametrize("gamma", [0.2, 0.5, 0.8])
def test_wrong_regions_of_the_first_order_have_a_known_area(gamma):
    """For a short step ΔS_ap < 0 where γ·√(1 − S_an²) > 2·√(1 − S_ap²), and ΔS_an > 0 where that holds with
    S_ap and S_an exchanged. The area of either is 1 − ∫₀¹ √(1 − γ²(1 − s²)/4) ds, about γ²/12."""
    s = torch.linspace(0, 1, 2001, dtype=torch.float64)
    area = 1 - float(torch.trapezoid((1 - gamma**2 * (1 - s.square()) / 4).sqrt(), s))
    assert area == pytest.approx(gamma**2 / 12, rel=0.05)
    found = field("first_order", gamma=gamma, step=1e-6, grid=1001)
    # The grid has its edges, on which nothing changes to first order in the step.
    assert percent(found.delta_ap[:, :-1] < 0) == pytest.approx(100 * area, abs=0.15)
    assert percent(found.delta_an[:-1] > 0) == pytest.approx(100 * area, abs=0.15)


@pytest.mark.parametrize("loss", LOSSES)
def test_top_left_is_empty_for_any_gamma_and_p_up_to_one(loss):
    """To first order in the step it is impossible for p ≤ 1: ΔS_ap < 0 < ΔS_an needs γ² > 4."""
    for gamma in (-1, -0.6, 0, 0.2, 0.5, 0.8, 1):
        for p in (0.0, 0.4, 0.8, 1.0):
            found = field(loss, gamma=gamma, p=p, step=1e-6, grid=101)
            assert found.quarters()["top-left"] == found.quarters(entangled=False)["top-left"] == 0


def test_shares_of_all_quarters_and_what_stays_are_all():
    found = field("second_order", grid=11)
    still = float(((found.total_ap == 0) & (found.total_an == 0)).double().mean())
    assert still > 0  # the corner (1, 1)
    assert sum(found.quarters().values()) + still == pytest.approx(1)
    assert found.quarters(entangled=False) != found.quarters()


def test_the_default_device_is_left_alone():
    with torch.device("meta"):
        found = field("margin", grid=3)
    assert found.delta_ap.device.type == "cpu"
    assert found.delta_ap.dtype == torch.float64


# Bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (
            {"loss": "third_order"},
            ValueError,
            "loss='third_order' is not one of 'first_order', 'second_order', ",
        ),
        ({"gamma": 1.01}, ValueError, "gamma=1.01: must be from −1 to 1"),
        ({"gamma": math.nan}, ValueError, "gamma=nan: must be finite"),
        ({"gamma": "0.5"}, TypeError, "gamma must be a Python number, got '0.5'"),
        ({"p": math.inf}, ValueError, "p=inf: must be finite"),
        ({"p": True}, TypeError, "p must be a Python number, got True"),
        ({"step": 0}, ValueError, "step=0.0: must be greater than 0"),
        ({"step": math.nan}, ValueError, "step=nan: must be finite"),
        ({"grid": 1}, ValueError, "grid=1: must be 2 or greater"),
        ({"grid": 11.0}, TypeError, "grid must be an int, got 11.0"),
        ({"low": -1.5}, ValueError, "low=-1.5: must be from −1 to 1"),
        ({"high": 1.5}, ValueError, "high=1.5: must be from −1 to 1"),
        ({"low": 0.5, "high": 0.5}, ValueError, "low=0.5 must be less than high=0.5"),
    ],
)
def test_wrong_arguments(arguments, error, said):
    with pytest.raises(error) as raised:
        field(**{"loss": "first_order"} | arguments)
    assert str(raised.value).startswith(said)


# Drawing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
def test_figure_has_six_labelled_panels(loss, tmp_path):
    figure = field(loss, grid=21).figure()
    shown = [axes for axes in figure.axes if axes.get_xlabel()]
    assert [axes.get_title() for axes in shown] == [
        r"$\Delta S_{ap}$",
        r"$\Delta S_{an}$",
        "movement",
        r"$\Delta S_{ap}^{total}$",
        r"$\Delta S_{an}^{total}$",
        "movement with entanglement",
    ]
    assert {(axes.get_xlabel(), axes.get_ylabel()) for axes in shown} == {("$S_{ap}$", "$S_{an}$")}
    assert len(figure.axes) == 6 + 4  # a colour bar for each of the changes
    assert f"{loss}, γ = 0.5, p = 0.8" in figure.get_suptitle()
    assert [text.get_text() for text in figure.legends[0].texts] == list(QUARTERS)
    figure.savefig(tmp_path / "field.png")
    assert (tmp_path / "field.png").read_bytes().startswith(b"\x89PNG")


def panel() -> tuple[Figure, object]:
    figure = Figure()
    return figure, figure.subplots()


def test_colours_say_which_changes_are_wanted():
    """Red where S_ap falls or S_an grows, blue where they do what the loss wants, white in between."""
    found = field("first_order", gamma=0.8, grid=41)
    for show, wanted in (("total_ap", 1), ("total_an", -1)):
        _, axes = panel()
        artist = found.draw(axes, show)
        change = wanted * getattr(found, show)
        least, most = divmod(int(change.argmin()), 41), divmod(int(change.argmax()), 41)
        values = getattr(found, show).numpy()
        red, _, blue, _ = artist.to_rgba(values[least])
        assert red > blue
        red, _, blue, _ = artist.to_rgba(values[most])
        assert blue > red
        assert min(artist.to_rgba(0.0)[:3]) > 0.95
        assert artist.get_clim() == (values.min(), values.max())


def test_a_change_of_one_sign_or_none_can_be_drawn(tmp_path):
    """γ = −1: S_ap nowhere falls. A step too short to change anything has no arrows."""
    figure, axes = panel()
    artist = field("first_order", gamma=-1, grid=11).draw(axes, "delta_an")
    assert artist.get_clim()[0] == -artist.get_clim()[1] < 0
    figure.savefig(tmp_path / "one.png")
    still = field("first_order", step=1e-18, grid=11)
    assert sum(still.quarters().values()) == 0
    still.figure().savefig(tmp_path / "none.png")


def test_arrows_point_where_their_quarter_is():
    """The second order moves nothing at (1, 0), where a triplet should be, nor at (1, 1)."""
    found = field("second_order", grid=11)
    _, axes = panel()
    arrows = found.draw(axes, "total", arrows=11)
    moving = (found.total_ap != 0) | (found.total_an != 0)
    assert len(arrows.U) == int(moving.sum()) == 121 - 2
    length = torch.hypot(found.total_ap, found.total_an)[moving]
    torch.testing.assert_close(torch.tensor(arrows.U), found.total_ap[moving] / length)
    torch.testing.assert_close(torch.tensor(arrows.V), found.total_an[moving] / length)
    from matplotlib.colors import to_rgba

    place = quarter_of(found.total_ap[moving], found.total_an[moving]).tolist()
    assert [tuple(colour) for colour in arrows.get_facecolors()] == [
        to_rgba(QUARTER_COLOURS[QUARTERS[index]]) for index in place
    ]


def test_drawing_refuses_other_words():
    _, axes = panel()
    with pytest.raises(ValueError, match="show='loss' is not one of 'delta_ap', 'delta_an', 'delta', "):
        field("margin", grid=3).draw(axes, "loss")
    with pytest.raises(ValueError, match="arrows=1: must be 2 or greater"):
        field("margin", grid=3).draw(axes, arrows=1)


def test_a_figure_without_matplotlib_says_what_to_install(monkeypatch):
    found = field("margin", grid=3)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'a figure needs matplotlib: pip install "tripletops\[demo\]"'):
        found.figure()
