"""extreme-field: its shares of the square, the printed equations, verdicts, figures, and the field behind the
measured movements."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.train_ref.support import command
from train_ref.computed import extreme_field
from train_ref.computed.extreme_field import (
    EQUATIONS,
    FIRST,
    SECOND,
    VANILLA,
    FieldSettings,
    Triplets,
    compute,
    errors,
    gradients,
    random_triplets,
)
from train_ref.experiments import EXPERIMENTS
from train_ref.experiments.extreme import FIELD_CLAIMS, judge_field
from train_ref.experiments.verdicts import NOT, NOT_RUN, PARTLY, REPRODUCED
from train_ref.folder import RunFolder
from train_ref.outcome import Outcome
from train_ref.report import drawing as drawing_module
from train_ref.report import extreme_field_figures, figures
from train_ref.report.drawing import Drawing, NoFigureError
from train_ref.report.tables import outcome_of
from train_ref.settings import Row
from tripletops import diagnostics

pytestmark = pytest.mark.usefixtures("one_thread")

NAME = "extreme-field-desk-quick"


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> RunFolder:
    out = tmp_path_factory.mktemp("field")
    command("run", "extreme-field", "--quick", "--out", out)
    return RunFolder(out / NAME)


# Numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "falls", "grows", "top_right", "near_corner"),
    [(FIRST, 2.4, 1.9, 18.9, 38), (SECOND, 15.2, 12.5, 32.5, 4)],
)
def test_shares_of_the_square(loss, falls, grows, top_right, near_corner):
    """Those of an independent computation on the same grid of 201²."""
    measures, arrays = compute(FieldSettings(loss=loss, fine=201), 0)
    assert round(measures["without entanglement/S_ap falls"], 1) == falls
    assert round(measures["without entanglement/S_an grows"], 1) == grows
    assert round(measures["p=0.8/top-right"], 1) == top_right
    assert round(measures["p=0.8/top-right near (1, 1)"]) == near_corner
    assert measures["p=0.8/top-left"] == 0
    assert arrays == {}


def test_shares_of_a_grid_of_nine_by_hand():
    """S_ap and S_an of 0, ½ and 1, p = 0.5. Both near an edge and near (1, 1) means 1 alone."""
    settings = FieldSettings(loss=FIRST, grid=3, fine=3, entanglement=(0.5,))
    found = diagnostics.field(FIRST, gamma=0.5, p=0.5, grid=3)
    measures, _ = compute(settings, 0)
    for name in diagnostics.QUARTERS:
        assert measures[f"p=0.5/{name}"] == pytest.approx(100 * found.quarters()[name])
    assert measures["p=0.5/up where S_an ≥ 0.8"] == pytest.approx(
        100 * float((found.total_an[2] > 0).sum()) / 3
    )
    steep = [float(found.total_an[i, 2]) < -abs(float(found.total_ap[i, 2])) for i in range(3)]
    assert steep == [True, True, False]  # at (1, 1) nothing moves
    assert measures["p=0.5/steeply down where S_ap ≥ 0.8"] == pytest.approx(200 / 3)
    assert measures["p=0.5/top-right near (1, 1)"] == measures["p=0.5/bottom-left near (1, 1)"] == 0
    assert measures["without entanglement/S_ap falls"] == pytest.approx(100 * 2 / 9)  # at S_ap = 1
    assert measures["S_ap falls only from S_ap ="] == 1
    assert "S_an grows only from S_an =" not in measures  # nowhere on so coarse a grid
    assert measures["p=0.5/as L1st"] == 100


def test_smaller_squares_at_the_corner():
    measures, _ = compute(FieldSettings(loss=SECOND, grid=11, fine=101), 0)
    for low in (0.8, 0.9, 0.95, 0.99):
        found = diagnostics.field(SECOND, gamma=0.5, p=0.8, grid=101, low=low).quarters()["top-right"]
        assert measures[extreme_field.inside(low, 0.8)] == pytest.approx(100 * found)
    inside = [measures[extreme_field.inside(low, 0.8)] for low in extreme_field.CORNERS]
    assert inside == sorted(inside, reverse=True)


@pytest.mark.parametrize("change", [{"part": "all"}, {"loss": "third_order"}, {"grid": 0}, {"step": 0.0}])
def test_other_settings_are_refused(change):
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=f"--{name} {value}: must be "):
        FieldSettings(**change)


# Equations --------------------------------------------------------------------------------------------------

MISPRINTED = {FIRST: {"(18)"}, SECOND: {"(24)"}, VANILLA: {"(30)", "(31)"}}


@pytest.mark.parametrize("loss", [FIRST, SECOND, VANILLA])
@pytest.mark.parametrize("step", [1e-3, 0.5])
def test_which_equations_are_misprinted(loss, step):
    found = errors(loss, random_triplets(200, 0), step)
    assert {name for name, error in found.items() if error > 1e-3} == MISPRINTED[loss]
    assert max(error for name, error in found.items() if name not in MISPRINTED[loss]) < 1e-13


def test_misprints_by_hand():
    """a, p, n = e₁, e₂, (e₁ + e₃)/√2: S_ap = 0 and S_an = 1/√2, by which (18) and (24) are off, times 1 + v²,
    where v is β or w_an·β_w. (30) and (31) are off by twice the gradients 2(a − n) and 2(n − p)."""
    half = math.sqrt(0.5)
    vectors = [[1.0, 0, 0], [0, 1.0, 0], [half, 0, half]]
    triplet = Triplets(*torch.tensor(vectors, dtype=torch.float64)[:, None])
    beta = 0.5 * math.exp(half) / (1 + math.exp(half))
    assert errors(FIRST, triplet, 0.5)["(18)"] == pytest.approx((1 + beta**2) * half)
    push = half * 0.5 * math.exp(0.25) / (1 + math.exp(0.25))
    assert errors(SECOND, triplet, 0.5)["(24)"] == pytest.approx((1 + push**2) * half)
    found = errors(VANILLA, triplet, 0.5)
    assert found["(30)"] == pytest.approx(4 * half)  # the largest coordinate, of e₃
    assert found["(31)"] == pytest.approx(4)  # of e₂


def test_gradients_are_those_of_differences():
    triplets = random_triplets(3, 1)
    distances = [(triplets.anchor - other) for other in (triplets.positive, triplets.negative)]
    slopes = gradients(VANILLA, triplets)
    torch.testing.assert_close(slopes.positive, -2 * distances[0])
    torch.testing.assert_close(slopes.negative, 2 * distances[1])
    torch.testing.assert_close(slopes.anchor, 2 * (distances[0] - distances[1]))


def test_random_triplets_are_unit_vectors_that_a_seed_decides():
    first, again, other = (random_triplets(50, seed) for seed in (3, 3, 4))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first.anchor, other.anchor)
    torch.testing.assert_close(torch.stack(first).norm(dim=-1), torch.ones(3, 50, dtype=torch.float64))


def test_equations_are_a_part():
    measures, _ = compute(FieldSettings(part=EQUATIONS, loss=SECOND, triplets=20), 0)
    assert list(measures) == [
        *("(13)", "(14)", "(15)", "(23)", "(24)", "(24) with S_an first", "(25)", "(26)", "(27)"),
    ]


# Verdicts ---------------------------------------------------------------------------------------------------


class Said(Outcome):
    """An outcome of given numbers."""

    def __init__(self, numbers: dict[str, dict[str, float]]) -> None:
        self.numbers = numbers

    def measures(self, row: str) -> list[str]:
        return list(self.numbers.get(row, {}))

    def values(self, row: str, measure: str) -> list[float]:
        found = self.numbers.get(row, {})
        return [found[measure]] if measure in found else []


@pytest.fixture(scope="module")
def numbers() -> dict[str, dict[str, float]]:
    """Of the experiment itself, on a coarser fine grid."""
    cells = EXPERIMENTS["extreme-field"].cells("desk", {})
    settings = {cell.row.key: dataclasses.replace(cell.settings, fine=401, triplets=50) for cell in cells}
    return {key: compute(each, 0).measures for key, each in settings.items()}


def test_verdicts(numbers):
    verdicts = {verdict.claim: verdict for verdict in judge_field(Said(numbers))}
    assert list(verdicts) == list(FIELD_CLAIMS)
    words = [PARTLY, REPRODUCED, REPRODUCED, REPRODUCED, PARTLY, REPRODUCED]
    words += [PARTLY, NOT, REPRODUCED, REPRODUCED]
    assert [verdict.outcome for verdict in verdicts.values()] == words
    said = "\n".join(verdict.because for verdict in verdicts.values())
    for part in (
        "25 of 29 hold to",
        "misprinted: (18), (24), (30), (31)",
        "for γ=0.5 2.4 % of the square",
        "top-left 0 %",
        "38 % move to the top right by L1st and 4 % by L2nd",
        "S_ap falls 2.4 → 15.2 %, S_an grows 1.9 → 12.5 %, to the top right with p=0.8 18.9 → 32.5 %",
    ):
        assert part in said


def test_verdicts_follow_the_numbers(numbers):
    """Numbers as the paper would have them, and numbers that contradict what is reproduced."""

    def changed(group: str, *parts: str, value: float) -> list[str]:
        other = {
            row: {
                name: value if row.startswith(group) and name.endswith(parts) else number
                for name, number in measures.items()
            }
            for row, measures in numbers.items()
        }
        return [verdict.outcome for verdict in judge_field(Said(other))]

    assert changed("Errors of equations", ")", value=0.0)[0] == REPRODUCED
    assert changed("L1st", "S_ap falls", value=0.0)[1] == NOT
    assert changed("L1st", "S_an grows only from S_an =", value=0.5)[2] == NOT
    assert changed("L1st: γ=0.2", "S_an grows only from S_an =", value=0.5)[2] == PARTLY
    assert changed("L2nd: γ=0.2", "p=0.4/top-left", value=3.0)[3] == NOT
    assert changed("L1st", "up where S_an ≥ 0.8", value=40.0)[4] == NOT
    assert changed("L1st", "up where S_an ≥ 0.8", value=60.0)[4] == REPRODUCED
    assert changed("L1st", "up where S_an ≥ 0.9", value=40.0)[4] == PARTLY  # does not decide
    assert changed("L1st: γ=0.2", "steeply down where S_ap ≥ 0.8", value=40.0)[5] == PARTLY
    assert changed("L2nd", "top-right near (1, 1)", value=0.0)[6] == REPRODUCED
    assert changed("L2nd", "top-right near (1, 1)", value=30.0)[6] == NOT
    assert (
        changed("L2nd", "S_ap falls", "S_an grows", "top-right", "bottom-left", value=-1.0)[7] == REPRODUCED
    )
    assert changed("L2nd: γ=0.8", "S_ap falls", value=0.0)[7] == PARTLY
    assert changed("Vanilla", "as with less p where that is wrong", value=80.0)[8] == PARTLY
    assert changed("Vanilla", "as L1st", value=20.0)[9] == NOT


def test_unfinished_rows_have_no_verdict(numbers):
    assert [verdict.outcome for verdict in judge_field(Said({}))] == [NOT_RUN] * len(FIELD_CLAIMS)
    only_first = {row: measures for row, measures in numbers.items() if row.startswith("L1st")}
    words = [verdict.outcome for verdict in judge_field(Said(only_first))]
    assert words == [NOT_RUN, REPRODUCED, REPRODUCED, *[NOT_RUN] * 7]
    key = "Errors of equations, L2nd: as printed"
    assert judge_field(Said({key: numbers[key]}))[0].outcome == NOT_RUN


# Figures ----------------------------------------------------------------------------------------------------


def panels(monkeypatch) -> list:
    """The figures that are saved from here on."""
    saved = []
    original = Drawing.save

    def save(self, figure, *arguments, **more):
        saved.append(figure)
        return original(self, figure, *arguments, **more)

    monkeypatch.setattr(drawing_module.Drawing, "save", save)
    return saved


def test_the_quick_run_has_figures(quick, tmp_path, monkeypatch):
    outcome = outcome_of(quick)
    assert outcome.unfinished == []
    experiment = EXPERIMENTS["extreme-field"]
    names = experiment.figures
    assert set(names) == set(extreme_field_figures.FIGURES) == set(extreme_field_figures.CAPTIONS)
    saved = panels(monkeypatch)
    for name in names:
        (path,) = figures.draw(name, Drawing(outcome, tmp_path))
        assert path.read_bytes().startswith(b"\x89PNG")
    changes, everything, vectors = saved
    assert [len(figure.axes) for figure in saved] == [3 * 6, 9 * 6, 3 * 6]
    titles = [axes.get_title() for axes in changes.axes[:6]]
    assert titles == [f"{loss}, {p}" for loss in ("L1st", "L2nd") for p in ("alone", "p=0.4", "p=0.8")]
    lines = [axes.get_ylabel().partition("\n")[0] for axes in everything.axes[::6]]
    assert lines == [f"{loss}, γ={g}" for loss in ("L1st", "Vanilla", "L2nd") for g in (0.2, 0.5, 0.8)]
    assert [axes.get_title() for axes in vectors.axes[:2]] == ["γ=0.2, p=0.4", "γ=0.2, p=0.8"]
    for figure, columns in ((changes, 6), (everything, 6), (vectors, 6)):
        assert {axes.get_xlabel() for axes in figure.axes[-columns:]} == {"$S_{ap}$"}
        assert all("$S_{an}$" in axes.get_ylabel() for axes in figure.axes[::columns])
    legend = [text.get_text() for text in vectors.legends[0].texts]
    assert legend == ["top-right", "bottom-left", "bottom-right"]


def test_figures_of_an_unfinished_run(quick, tmp_path):
    outcome = outcome_of(quick)
    del outcome.finals["L2nd: γ=0.5"]
    (path,) = extreme_field_figures.field_vectors(Drawing(outcome, tmp_path))
    assert path.exists()
    with pytest.raises(NoFigureError, match=r"the rows of both orders with γ=0\.5 are not finished yet"):
        extreme_field_figures.field_changes(Drawing(outcome, tmp_path))
    outcome.finals.clear()
    with pytest.raises(NoFigureError, match="no row of it is finished yet"):
        extreme_field_figures.field_all(Drawing(outcome, tmp_path))


def test_every_page_says_what_was_chosen(quick):
    from train_ref.report.page import write_report

    text = write_report(quick).read_text()
    assert "the leading S_ap of (18) and (24) is S_an, and (30) and (31) lost a minus" in text
    assert "![field_changes](field_changes.png)" in text


# The field behind measured movements ------------------------------------------------------------------------


def test_what_the_field_expects_of_measured_triplets():
    """The nearest place of the grid decides; similarities beyond its ends take the ends."""
    from matplotlib.figure import Figure

    field = diagnostics.field("first_order", gamma=0.5, p=0.8, grid=figures.FIELD_GRID, low=-0.2)
    # Bottom right, bottom left, and twice the top right.
    points = np.array([[0.3, 0.3, 0, 0], [0.99, 0.5, 0, 0], [0.3, 0.98, 0, 0], [0.3, 1.0000001, 0, 0]])
    axes = Figure().subplots()
    figures._movement_bars(axes, [10.0, 20.0, 30.0, 40.0], field, points)
    assert [bar.get_height() for bar in axes.patches] == [10, 20, 30, 40]
    assert axes.lines[0].get_ydata().tolist() == [50, 0, 25, 25]


def test_arrows_of_measured_moves_have_one_length_and_the_moves_direction():
    from matplotlib.figure import Figure

    points = np.array([[0.5, 0.5, 3e-7, 4e-7], [0.2, 0.1, 0, 0], [0.6, 0.2, 1e-3, 0]], np.float32)
    axes = Figure().subplots()
    figures._measured_arrows(axes, points)
    (arrows,) = axes.collections
    np.testing.assert_allclose(np.stack([arrows.U, arrows.V], 1), [[0.6, 0.8], [1, 0]], atol=1e-6)
    np.testing.assert_allclose(arrows.get_offsets(), [[0.5, 0.5], [0.6, 0.2]], atol=1e-6)
    figures._measured_arrows(axes, points[:0])


def test_the_field_behind_is_light_and_shaded_where_it_agrees():
    from matplotlib.figure import Figure

    field = diagnostics.field("second_order", gamma=0.5, p=0.8, grid=101)
    axes = Figure().subplots()
    figures._field_behind(axes, field, "bottom-left")
    arrows, shade = axes.collections
    assert arrows.get_alpha() == pytest.approx(0.3)
    assert max(arrows.get_zorder(), shade.get_zorder()) < 1
    path = shade.get_paths()[0]
    assert path.contains_point((0.95, 0.5))
    assert not path.contains_point((0.3, 0.5))


@pytest.mark.parametrize("order", ["first_order", "second_order"])
def test_movements_are_drawn_over_the_field_of_their_loss(order, monkeypatch):
    """Similarities beyond −1 and 1 by rounding, and a triplet that does not move, as in collapsed runs."""
    moves = [[-1.0000001, 0.8, 0.1, 0.1], [0.7, 1.0000001, -0.1, -0.1], [0.5, 0.4, 0, 0]]
    asked, saved = [], []
    original = diagnostics.field

    def field(loss, **more):
        asked.append((loss, more["gamma"], more["p"], more["low"]))
        return original(loss, **more)

    monkeypatch.setattr(diagnostics, "field", field)
    row = Row("early", group="HPHN")
    drawing = SimpleNamespace(
        outcome=SimpleNamespace(rows=[row], value=lambda *_: None),
        arrays=lambda row: {"moves": np.array(moves, np.float32)},
        settings=lambda row: SimpleNamespace(triplet=order),
        save=lambda figure, name: saved.append(figure) or name,
    )
    assert figures.movement(drawing) == ["movement-hphn"]
    assert asked == [(order, 0.5, 0.8, -1.0)]
    saved[0].draw_without_rendering()
    assert [panel.get_title() for panel in saved[0].axes[:4]] == list(figures.QUARTERS)
    assert "γ=0.5, p=0.8" in saved[0].get_suptitle()


def test_the_caption_names_gamma_and_p():
    assert f"γ={figures.GAMMA:g} and p={figures.ENTANGLEMENT:g}" in figures.CAPTIONS["movement"]
