"""`diagnostics.scatter`: by hand, from embeddings and from `Triplets`, movements, drawings, bad input."""

from __future__ import annotations

import math

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

import tripletops as T
from tests.support.batches import LAYOUTS, laid_out
from tripletops.diagnostics import scatter_diagram
from tripletops.diagnostics.scatter_diagram import Scatter, scatter
from tripletops.diagnostics.vector_field import QUARTERS

pytestmark = pytest.mark.usefixtures("one_thread")


def on_circle(*degrees: float) -> Tensor:
    angles = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def cosines(*degrees: float) -> list[float]:
    return [math.cos(math.radians(each)) for each in degrees]


# Classes 0, 0, 1, 1 at 0°, 30°, 50° and 170°, of different lengths.
EMB = on_circle(0, 30, 50, 170) * torch.tensor([[1.0], [0.5], [7.0], [1e-3]])
LABELS = torch.tensor([0, 0, 1, 1])


def test_four_rows_by_hand():
    """Nearest positives and negatives are 30° and 50° away from row 0, 30° and 20° from row 1, 120° and 20°
    from row 2, 120° and 140° from row 3."""
    found = scatter(EMB, LABELS)
    assert found.rows.tolist() == [[0, 1, 2], [1, 0, 2], [2, 3, 1], [3, 2, 1]]
    expected = [cosines(30, 50), cosines(30, 20), cosines(120, 20), cosines(120, 140)]
    torch.testing.assert_close(found.points, torch.tensor(expected, dtype=torch.float64))
    assert found.correct.tolist() == [True, False, False, True]
    assert found.share_correct == 0.5
    assert found.moves is None
    assert found.quarters is None


def test_movements_by_hand():
    """Row 1 goes from 30° to 40° and row 3 from 170° to 160°, the others stay. (0, 1, 2): S_ap falls, S_an
    stays. (1, 0, 2): S_ap falls, S_an grows. (2, 3, 1) and (3, 2, 1): both grow."""
    after = on_circle(0, 40, 50, 160)
    found = scatter(EMB, LABELS, after=after)
    expected = [cosines(40, 50), cosines(40, 10), cosines(110, 10), cosines(110, 120)]
    torch.testing.assert_close(found.points + found.moves, torch.tensor(expected, dtype=torch.float64))
    assert found.moves[0, 1] == 0
    assert found.quarters == {"top-right": 0.5, "top-left": 0.25, "bottom-left": 0.25, "bottom-right": 0}
    assert found.share_correct == 0.5  # before


def test_triplets_stay_those_of_the_first_moment():
    """The rows change places: mined again, the triplets would be others."""
    after = EMB[[3, 1, 0, 2]]
    assert torch.equal(scatter(EMB, LABELS, after=after).rows, scatter(EMB, LABELS).rows)
    assert not torch.equal(scatter(after, LABELS).rows, scatter(EMB, LABELS).rows)


def test_another_scale_is_no_movement():
    generator = torch.Generator().manual_seed(0)
    for dimension in (1, 2, 3, 64, 512):
        emb = torch.randn(60, dimension, generator=generator)
        labels = torch.arange(60) % 5
        scale = torch.rand(60, 1, generator=generator, dtype=torch.float64) + 0.1
        found = scatter(emb, labels, after=emb.double() * scale)
        assert (found.moves == 0).all()
        assert sum(found.quarters.values()) == 0
        tiny = 1e-9 * torch.randn(60, dimension, generator=generator, dtype=torch.float64)
        if dimension > 1:  # on a line all cosines are ±1
            moved = scatter(emb, labels, after=emb.double() + tiny)
            assert (moved.moves != 0).all()
            assert sum(moved.quarters.values()) == pytest.approx(1)


def test_after_may_have_another_dimension():
    found = scatter(EMB, LABELS, after=torch.cat([EMB, torch.zeros(4, 3)], dim=1).float())
    torch.testing.assert_close(found.moves, torch.zeros(4, 2, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_given_triplets_of_rows(distance):
    """EMB's lengths differ: other triplets under the euclidean distance, but similarities all the same."""
    mined = T.mine(EMB, LABELS, positive="hard", negative="hard", distance=distance)
    found = scatter(EMB, triplets=mined)
    assert torch.equal(found.rows, torch.stack(mined.indices(), dim=1))
    unit = EMB / EMB.norm(dim=1, keepdim=True)
    anchor, positive, negative = (unit[each] for each in mined.indices())
    torch.testing.assert_close(found.points[:, 0], (anchor * positive).sum(1))
    torch.testing.assert_close(found.points[:, 1], (anchor * negative).sum(1))
    assert scatter(EMB, triplets=mined, after=EMB).quarters == dict.fromkeys(QUARTERS, 0)


def test_triplets_alone_are_their_distances():
    mined = T.mine(EMB, LABELS, positive="easy", negative="hard", distance="cosine")
    found, expected = scatter(triplets=mined), scatter(EMB, LABELS)
    assert torch.equal(found.rows, expected.rows)
    torch.testing.assert_close(found.points, expected.points)
    assert torch.equal(found.correct, expected.correct)


def test_triplets_of_rows_elsewhere():
    """Mined against other rows, the distances are all that the triplets have in common with `emb`."""
    mined = T.mine(
        EMB[:1],
        LABELS[:1],
        positive="easy",
        negative="hard",
        distance="cosine",
        ref_emb=EMB[1:],
        ref_labels=LABELS[1:],
    )
    expected = torch.tensor([cosines(30, 50)], dtype=torch.float64)
    torch.testing.assert_close(scatter(triplets=mined).points, expected)


@pytest.mark.parametrize(
    "rules", [("easy", "hard"), ("hard", "hard"), ("easy", "easy"), ("easy", "semihard")]
)
def test_the_rules_are_those_of_mine(rules):
    generator = torch.Generator().manual_seed(3)
    emb, labels = torch.randn(50, 4, generator=generator), torch.arange(50) % 7
    mined = T.mine(emb, labels, positive=rules[0], negative=rules[1], distance="cosine")
    found = scatter(emb, labels, positive=rules[0], negative=rules[1])
    assert torch.equal(found.rows, torch.stack(mined.indices(), dim=1))


def test_anchors_without_a_partner_are_left_out():
    """Class 2 has one row: it is nobody's anchor, but may be a negative."""
    found = scatter(on_circle(0, 10, 90), torch.tensor([1, 1, 2]))
    assert found.rows.tolist() == [[0, 1, 2], [1, 0, 2]]


def test_blocks_make_no_difference(monkeypatch):
    generator = torch.Generator().manual_seed(5)
    emb, labels = torch.randn(37, 6, generator=generator), torch.arange(37) % 4
    after = emb + torch.randn(37, 6, generator=generator)
    expected = scatter(emb, labels, after=after)
    monkeypatch.setattr(scatter_diagram, "_BLOCK", 5)
    found = scatter(emb, labels, after=after)
    for name in ("rows", "points", "moves", "correct"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_types_and_layouts(dtype, layout):
    generator = torch.Generator().manual_seed(7)
    emb, labels = torch.randn(23, 5, generator=generator).to(dtype), torch.arange(23) % 3
    expected = scatter(emb.double(), labels)
    found = scatter(laid_out(emb, layout).requires_grad_(), labels)
    assert found.points.dtype == torch.float64
    assert not found.points.requires_grad
    # Equal winners: the rounding of float16 rows is in both.
    assert torch.equal(found.rows, expected.rows)
    torch.testing.assert_close(found.points, expected.points)


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160, 1e300])
def test_huge_and_tiny_rows_keep_their_angles(scale):
    mined = T.mine(EMB, LABELS, positive="easy", negative="hard", distance="cosine")
    torch.testing.assert_close(scatter(scale * EMB, triplets=mined).points, scatter(EMB, LABELS).points)


def test_zero_rows_and_no_columns_are_similar_to_nothing():
    emb = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    found = scatter(emb, torch.tensor([0, 0, 1]))
    torch.testing.assert_close(found.points, torch.tensor([[0, math.sqrt(0.5)], [0, 0]], dtype=torch.float64))
    assert not found.correct.any()
    none = scatter(torch.empty(4, 0), LABELS)
    assert none.points.tolist() == [[0, 0]] * 4


# Bad input --------------------------------------------------------------------------------------------------

NAN_ROW = EMB.clone()
NAN_ROW[2, 1] = math.nan


@pytest.mark.parametrize(
    ("emb", "labels"),
    [
        (EMB[:0], LABELS[:0]),
        (EMB[:1], LABELS[:1]),
        (EMB, torch.zeros(4, dtype=torch.int64)),
        (EMB, torch.arange(4)),
        (EMB[[0, 2]], LABELS[[0, 2]]),
    ],
    ids=["no row", "one row", "one class", "all classes distinct", "two rows of two classes"],
)
def test_no_triplet_is_an_error_that_says_so(emb, labels):
    with pytest.raises(ValueError, match=f"none of {len(emb)} anchors has both a positive and a negative"):
        scatter(emb, labels)


MINED = T.mine(EMB, LABELS, positive="easy", negative="hard", distance="cosine")
FAR = T.mine(100 * EMB, LABELS, positive="easy", negative="hard", distance="euclidean")


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"emb": NAN_ROW, "labels": LABELS}, ValueError, "emb of shape (4, 2) is not finite in row 2"),
        (
            {"emb": EMB, "labels": LABELS, "after": NAN_ROW},
            ValueError,
            "after of shape (4, 2) is not finite in row 2",
        ),
        ({"emb": EMB / 0, "triplets": MINED}, ValueError, "emb of shape (4, 2) is not finite in row 0"),
        (
            {"emb": EMB, "labels": LABELS, "after": EMB[:3]},
            ValueError,
            "emb of shape (4, 2) and after of shape (3, 2) must embed the same data",
        ),
        ({"emb": EMB, "labels": LABELS[:3]}, ValueError, "emb must be (N, D) and labels (N,), got emb of"),
        ({"emb": EMB[0], "labels": LABELS}, ValueError, "emb must be (N, D), got emb of shape (2,)"),
        (
            {"emb": EMB.int(), "labels": LABELS},
            TypeError,
            "emb must be float16, bfloat16, float32 or float64",
        ),
        ({"emb": EMB.tolist(), "labels": LABELS}, TypeError, "emb must be a torch.Tensor, got list"),
        ({"emb": EMB, "labels": LABELS.float()}, TypeError, "labels must be of an integer dtype"),
        ({"emb": EMB, "labels": LABELS, "after": EMB.int()}, TypeError, "after must be float16"),
        ({"emb": EMB, "labels": LABELS, "positive": "soft"}, ValueError, "positive='soft'"),
        ({"emb": EMB, "labels": LABELS, "triplets": MINED}, ValueError, "give either labels, by which"),
        ({"emb": EMB}, ValueError, "give either labels, by which"),
        ({"labels": LABELS}, ValueError, "labels and after need emb, which is not given"),
        ({"triplets": MINED, "after": EMB}, ValueError, "labels and after need emb, which is not given"),
        ({"emb": EMB[:3], "triplets": MINED}, ValueError, "triplets name row 3, and emb has 3 rows"),
        (
            {"emb": EMB, "triplets": tuple(MINED)},
            TypeError,
            "triplets must be Triplets, as mine returns them",
        ),
        ({"triplets": FAR}, ValueError, "triplets have a distance outside of 0 to 2"),
    ],
)
def test_wrong_arguments(arguments, error, said):
    with pytest.raises(error) as raised:
        scatter(**arguments)
    assert str(raised.value).startswith(said)


# Drawing ----------------------------------------------------------------------------------------------------


def drawn(found: Scatter, **options: int) -> object:
    axes = found.draw(Figure().subplots(), **options)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("$S_{ap}$", "$S_{an}$")
    return axes


def test_points_are_blue_below_the_diagonal_and_red_above():
    axes = drawn(scatter(EMB, LABELS))
    below, above = axes.collections
    assert [text.get_text() for text in axes.get_legend().texts] == ["correct", "wrong"]
    for points, is_correct in ((below, True), (above, False)):
        x, y = points.get_offsets().T
        assert len(x) == 2
        assert ((x > y) == is_correct).all()
        red, _, blue, _ = points.get_facecolor()[0]
        assert (blue > red) == is_correct
    assert axes.get_title() == "50.0 % of 4 triplets correct"
    low, high = axes.get_xlim()
    assert low < cosines(120)[0]
    assert high > 1
    assert axes.lines[0].get_xdata()[0] == axes.lines[0].get_ydata()[0]


def test_arrows_go_from_before_to_after_and_quarters_are_named():
    found = scatter(EMB, LABELS, after=on_circle(0, 40, 50, 160))
    axes = drawn(found)
    names = [text.get_text() for text in axes.get_legend().texts]
    assert names == ["top-right: 50.0 %", "top-left: 25.0 %", "bottom-left: 25.0 %", "bottom-right: 0.0 %"]
    assert axes.get_title() == "50.0 % of 4 triplets correct before they moved"
    arrows = [
        (*start, u, v)
        for each in axes.collections
        for start, u, v in zip(each.get_offsets(), each.U, each.V, strict=True)
    ]
    order = [2, 3, 1, 0]  # by quarter
    torch.testing.assert_close(torch.tensor(arrows), torch.cat([found.points, found.moves], dim=1)[order])


def test_triplets_that_do_not_move_are_dots():
    axes = drawn(scatter(EMB, LABELS, after=EMB))
    assert axes.get_legend().texts[0].get_text() == "no move"
    assert len(axes.collections[0].get_offsets()) == 4


def test_of_many_triplets_some_are_drawn():
    generator = torch.Generator().manual_seed(0)
    emb, labels = torch.randn(300, 3, generator=generator), torch.arange(300) % 10
    axes = drawn(scatter(emb, labels), most=50)
    assert sum(len(points.get_offsets()) for points in axes.collections) == 50
    assert "of 300 triplets" in axes.get_title()
    moving = drawn(scatter(emb, labels, after=emb.flip(1) + emb), most=50)
    assert sum(len(arrows.U) for arrows in moving.collections) == 50
    for wrong, error in ((0, ValueError), (2.5, TypeError)):
        with pytest.raises(error, match="most"):
            scatter(emb, labels).draw(axes, most=wrong)


@pytest.mark.parametrize("after", [None, on_circle(0, 40, 50, 160)])
def test_figure_needs_no_display(after, tmp_path, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    figure = scatter(EMB, LABELS, after=after).figure()
    figure.savefig(tmp_path / "scatter.png")
    assert (tmp_path / "scatter.png").read_bytes().startswith(b"\x89PNG")
