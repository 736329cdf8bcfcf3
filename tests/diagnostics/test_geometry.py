"""`tripletops.diagnostics`, geometry: by hand, against plain float64 matrices of all pairs on thousands of
small sets, the inequalities between the measures, and what must be refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tripletops as T
from tests.support.batches import LAYOUTS, laid_out
from tripletops.diagnostics import geometry, quantiles, rows
from tripletops.diagnostics.compare import hausdorff, isometric_error, pointwise_distance
from tripletops.diagnostics.geometry import class_diameters, collapse_bound, diameter, separation
from tripletops.diagnostics.overview import summary
from tripletops.diagnostics.quantiles import distance_quantiles
from tripletops.diagnostics.spectrum import effective_rank, thickness

pytestmark = pytest.mark.usefixtures("one_thread")

TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SETS = 1000  # random small sets of a test

# On a line: 0, 1 and 5 are of class 7, 2.5 and 10 of class −3.
LINE = torch.tensor([[0.0], [1.0], [2.5], [5.0], [10.0]])
LINE_LABELS = torch.tensor([7, 7, -3, 7, -3])
SQUARE = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few rows make many blocks, with rows left over."""
    from tripletops.diagnostics import compare, spectrum

    for module in (rows, geometry, compare, spectrum):
        monkeypatch.setattr(module, "BLOCK", 7)
    monkeypatch.setattr(rows, "ELEMENTS", 60)
    monkeypatch.setattr(geometry, "_ANCHORS", 3)
    monkeypatch.setattr(quantiles, "_BINS", 2**6)
    monkeypatch.setattr(quantiles, "_COLLECTED", 5)


def matrix(emb: Tensor, other: Tensor | None = None) -> Tensor:
    x, y = emb.double(), (emb if other is None else other).double()
    return (x[:, None] - y[None]).square().sum(2).sqrt()


def random_set(seed: int) -> tuple[Tensor, Tensor]:
    """Rows of several kinds: spread, on a lattice with ties, with duplicates, nearly equal, far away."""
    generator = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    count, dimension = pick(2, 24), pick(1, 7)
    emb = torch.randn(count, dimension, generator=generator)
    kind = seed % 5
    if kind == 1:
        emb = emb.round()
    elif kind == 2:
        emb = emb[torch.randint(0, 1 + count // 2, (count,), generator=generator)]
    elif kind == 3:
        emb = 1 + 1e-5 * emb
    elif kind == 4:
        emb = emb * 1e-3 + 100
    labels = torch.randint(0, pick(1, 6), (count,), generator=generator)
    return emb.to(TYPES[seed // 5 % 4]), labels


def close(value: float, expected: float, size: float) -> bool:
    return abs(value - expected) <= 1e-12 * size


class Largest(TorchDispatchMode):
    """How many elements the largest tensor has that an operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


# By hand


def test_diameter_by_hand():
    assert diameter(LINE) == (10.0, (0, 4))
    assert diameter(torch.tensor([[3.0, 0.0], [0.0, 0.0], [0.0, 4.0]])) == (5.0, (0, 2))
    assert diameter(torch.ones(3, 2)) == (0.0, (0, 1))
    assert diameter(torch.ones(1, 2)) == diameter(torch.ones(0, 2)) == (0.0, (-1, -1))
    assert diameter(torch.ones(3, 0)) == (0.0, (0, 1))


def test_class_diameters_by_hand():
    found = class_diameters(torch.cat([LINE, torch.tensor([[9.0]])]), torch.tensor([7, 7, -3, 7, -3, 8]))
    assert found.classes.tolist() == [-3, 7, 8]
    assert found.values.tolist() == [7.5, 5, 0]
    assert found.pairs.tolist() == [[2, 4], [0, 3], [-1, -1]]


def test_ignored_rows_are_not_read():
    emb = torch.cat([torch.full((1, 1), math.nan), LINE])
    labels = torch.cat([torch.tensor([9]), LINE_LABELS])
    assert class_diameters(emb, labels, ignore_label=9).pairs.tolist() == [[3, 5], [1, 4]]
    assert separation(emb, labels, ignore_label=9).triplet == (3, 5, 2)
    assert hausdorff(emb, emb + 1, labels, ignore_label=9).value == 1
    assert summary(emb, labels, ignore_label=9) == summary(LINE, LINE_LABELS)


def test_separation_by_hand():
    # From 5 the farthest positive, 0, is 5 away, and the nearest negative, 2.5, is 2.5 away. From 2.5 the
    # positive 10 is 7.5 away, and the negative 1 is 1.5 away: 6 is the most.
    found = separation(LINE, LINE_LABELS, 0.5)
    assert found == (False, (2, 4, 1), 7.5, 1.5, 6.5, 6.5)


@pytest.mark.parametrize(("alpha", "is_separated"), [(0.0, True), (1.0, True), (2.0, True), (2.001, False)])
def test_separation_at_the_limit(alpha: float, is_separated: bool):
    emb = torch.tensor([[0.0], [1.0], [4.0], [5.0]])
    found = separation(emb, torch.tensor([0, 0, 1, 1]), alpha)
    assert found.is_separated == is_separated
    assert (found.d_ap, found.d_an) == (1, 3)
    assert found.excess == pytest.approx(alpha - 2)
    assert found.loss == max(found.excess, 0)


def test_a_row_alone_in_its_class_is_its_own_positive():
    found = separation(torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1]), 1.5)
    assert found == (False, (0, 0, 1), 0, 1, 0.5, 0.5)
    assert separation(torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1]), 1.0).is_separated


@pytest.mark.parametrize("count", [0, 1, 4])
def test_one_class_is_separated(count: int):
    found = separation(torch.randn(count, 2), torch.zeros(count, dtype=torch.int64), 1.0)
    assert found.is_separated
    assert found.triplet == (-1, -1, -1)
    assert math.isnan(found.d_ap)
    assert math.isnan(found.d_an)
    assert (found.excess, found.loss) == (-math.inf, 0)


def test_thickness_by_hand():
    found = thickness(SQUARE)
    assert found.lower == pytest.approx(1, abs=1e-13)
    assert found.upper == pytest.approx(1, abs=1e-13)
    assert sorted(found.direction.abs().tolist()) == [0, 1]
    # A triangle is as thick as its least height: that of 3, 4, 5 on its longest side is 12/5.
    triangle = thickness(torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]]))
    assert triangle.upper == pytest.approx(2.4, abs=1e-13)
    assert triangle.direction.abs().tolist() == pytest.approx([0.8, 0.6])
    assert thickness(LINE)[:2] == pytest.approx((10, 10), abs=1e-12)


def test_thickness_of_a_box():
    # The corners of a box with the sides 3, 5, 4: the covariance of equal weights proves 3.
    corners = torch.cartesian_prod(*[torch.tensor([0.0, side]) for side in (3.0, 5.0, 4.0)])
    found = thickness(corners)
    assert found.lower == pytest.approx(3, abs=1e-9)
    assert found.upper == pytest.approx(3, abs=1e-9)
    assert found.direction.abs().tolist() == pytest.approx([1, 0, 0], abs=1e-6)


def test_few_rows_are_not_thick():
    for count in (1, 2, 5):
        emb = torch.randn(count, 5)
        found = thickness(emb)
        assert found[:2] == (0, 0)
        along = emb.double() @ found.direction
        assert float(along.max() - along.min()) < 1e-12
    assert thickness(torch.ones(0, 3))[:2] == (0, 0)
    flat = torch.randn(50, 4) * torch.tensor([1.0, 1.0, 0.0, 1.0])
    assert thickness(flat).lower == 0
    assert thickness(flat).upper < 1e-12
    assert thickness(torch.ones(5, 2))[:2] == pytest.approx((0, 0), abs=1e-14)


def test_hausdorff_by_hand():
    f, g = torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([[1.0], [0.5], [9.0]])
    found = hausdorff(f, g, torch.tensor([3, 3, 1]))
    assert found.classes.tolist() == [1, 3]
    assert found.values.tolist() == [4, 0.5]
    assert (found.value, found.label) == (4, 1)
    # Rows of a class may change places, in (12) but not in (26). The farthest may be of either set.
    swapped = torch.tensor([[1.0], [0.0], [5.0]])
    assert hausdorff(f, swapped, torch.tensor([3, 3, 1])).value == 0
    assert pointwise_distance(f, swapped) == (1, 0)
    assert hausdorff(f, torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64)).value == 5
    assert hausdorff(torch.zeros(3, 1), f, torch.zeros(3, dtype=torch.int64)).value == 5


def test_isometric_error_by_hand():
    # The distances 1, 2, 1 become 1, 5, 4.
    f, g = torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[0.0], [1.0], [5.0]])
    assert isometric_error(f, g) == (3, (0, 2))
    assert isometric_error(g, f) == (3, (0, 2))
    assert isometric_error(f, torch.cat([3 - f, f * 0], 1)) == (0, (0, 1))  # moved, in another dimension
    assert isometric_error(f[:1], g[:1]) == (0, (-1, -1))


def test_collapse_bound_by_hand():
    assert collapse_bound(5.0, 1.5) == 2
    assert collapse_bound(5.0, 1.5, c=4.0) == -1


def test_effective_rank_by_hand():
    assert effective_rank(LINE) == pytest.approx(1)
    assert effective_rank(SQUARE) == pytest.approx(2)
    assert effective_rank(SQUARE + 1000) == pytest.approx(2)
    # Singular values in the proportion 3 to 1.
    cross = torch.tensor([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    assert effective_rank(cross) == pytest.approx(4 / 3**0.75)
    assert effective_rank(torch.eye(6)) == pytest.approx(5)
    assert effective_rank(torch.full((5, 3), 0.1)) == effective_rank(torch.ones(1, 3)) == 0
    assert effective_rank(torch.ones(2, 0)) == 0


def test_quantiles_by_hand():
    # The distances are 1, 1.5, 2.5, 2.5, 4, 5, 5, 7.5, 9, 10.
    found = distance_quantiles(LINE, (0.0, 0.5, 0.25, 1.0))
    assert found.values.tolist() == [1, 4.5, 2.5, 10]
    assert (found.pairs, found.is_exact) == (10, True)
    assert distance_quantiles(LINE, 1.0).values.shape == ()
    assert distance_quantiles(LINE, 0.05).values == pytest.approx(1.225)
    assert distance_quantiles(LINE, (0.5,), sample=10).is_exact


def test_a_sample_says_so():
    emb = torch.randn(300, 8)
    exact, drawn = (distance_quantiles(emb, (0.1, 0.5, 0.9), sample=count) for count in (None, 20000))
    assert (exact.is_exact, exact.pairs) == (True, 300 * 299 // 2)
    assert (drawn.is_exact, drawn.pairs) == (False, 20000)
    assert (exact.values - drawn.values).abs().max() < 0.1
    assert drawn.values.tolist() == distance_quantiles(emb, (0.1, 0.5, 0.9), sample=20000).values.tolist()
    assert (
        drawn.values.tolist()
        != distance_quantiles(emb, (0.1, 0.5, 0.9), sample=20000, seed=1).values.tolist()
    )


def test_summary_by_hand():
    found = summary(LINE, LINE_LABELS, alpha=0.5)
    # d_ap − d_an: 5 − 2.5, 4 − 1.5, 7.5 − 1.5, 5 − 2.5, 7.5 − 5.
    assert found == pytest.approx(
        {
            "rows": 5,
            "classes": 2,
            "valid_share": 1,
            "diameter": 10,
            "class_diameter": 7.5,
            "worst_loss": 6.5,
            "is_separated": 0,
            "mean_loss": (2.5 * 4 + 6) / 5 + 0.5,
            "active_share": 1,
            "hard_negative_share": 1,
            "collapse_bound": -3,
            "effective_rank": 1,
            "mean_norm": 3.7,
            "max_norm": 10,
            "distance_q05": 1.225,
            "distance_q50": 4.5,
            "distance_q95": 9.55,
        }
    )


def test_summary_of_one_class():
    found = summary(LINE, torch.zeros(5, dtype=torch.int64))
    assert (found["valid_share"], found["worst_loss"], found["is_separated"]) == (0, 0, 1)
    assert all(math.isnan(found[name]) for name in ("mean_loss", "active_share", "hard_negative_share"))


# Against matrices of all pairs


def check_extremes(emb: Tensor, labels: Tensor) -> None:
    distances = matrix(emb)
    size = float(distances.max())
    found = diameter(emb)
    assert close(found.value, size, size)
    assert close(float(distances[found.pair]), size, size)
    assert found.pair[0] < found.pair[1]
    by_class = class_diameters(emb, labels)
    assert by_class.classes.tolist() == sorted(set(labels.tolist()))
    for label, value, pair in zip(by_class.classes, by_class.values, by_class.pairs.tolist(), strict=True):
        member = (labels == label).nonzero()[:, 0]
        assert close(float(value), float(distances[member][:, member].max()), float(value))
        assert (pair == [-1, -1]) == (len(member) == 1)
        if len(member) > 1:
            assert pair[0] < pair[1]
            assert set(pair) <= set(member.tolist())
            assert close(float(distances[pair[0], pair[1]]), float(value), float(value))


def check_separation(emb: Tensor, labels: Tensor, alpha: float) -> None:
    distances, same = matrix(emb), labels[:, None] == labels
    excess = distances.where(same, -math.inf).amax(1) - distances.where(~same, math.inf).amin(1) + alpha
    found, expected = separation(emb, labels, alpha), float(excess.max())
    if expected == -math.inf:
        assert found.triplet == (-1, -1, -1)
        return
    size = float(distances.max()) + alpha
    assert abs(found.excess - expected) <= 1e-12 * size
    assert found.is_separated == (found.excess <= 0)
    anchor, positive, negative = found.triplet
    assert labels[anchor] == labels[positive] != labels[negative]
    assert (anchor == positive) == (int((labels == labels[anchor]).sum()) == 1)
    assert close(found.d_ap, float(distances[anchor, positive]), size)
    assert close(found.d_an, float(distances[anchor, negative]), size)


def check_two(f: Tensor, g: Tensor, labels: Tensor) -> None:
    in_f, in_g, between = matrix(f), matrix(g), matrix(f, g)
    size = max(1e-300, float(in_f.max()), float(in_g.max()))
    found = isometric_error(f, g)
    assert close(found.value, float((in_f - in_g).abs().max()), size)
    assert close(float((in_f - in_g).abs()[found.pair]), found.value, size)
    assert found.pair[0] < found.pair[1]
    moved = pointwise_distance(f, g)
    assert close(moved.value, float(between.diag().max()), moved.value)
    sets = hausdorff(f, g, labels)
    for label, value in zip(sets.classes, sets.values.tolist(), strict=True):
        block = between[labels == label][:, labels == label]
        assert close(value, float(torch.maximum(block.amin(1).max(), block.amin(0).max())), value)
    assert sets.value == float(sets.values.max()) == float(sets.values[sets.classes == sets.label])


def check_quantiles(emb: Tensor) -> None:
    i, j = torch.triu_indices(len(emb), len(emb), 1)
    q = torch.tensor([0.0, 0.1, 1 / 3, 0.5, 0.99, 1.0], dtype=torch.float64)
    expected = matrix(emb)[i, j].quantile(q)
    found = distance_quantiles(emb, q.tolist()).values
    assert ((found - expected).abs() <= 2.0**-29 * expected).all()


def another(f: Tensor, seed: int) -> Tensor:
    """A second embedding of the same rows, from the same one to a distant one."""
    generator = torch.Generator().manual_seed(seed)
    step = (0.0, 1e-6, 1e-2, 1.0)[seed % 4]
    return (f.double() + step * torch.randn(f.shape, generator=generator)).to(f.dtype)


def check_all(seed: int) -> None:
    emb, labels = random_set(seed)
    check_extremes(emb, labels)
    check_separation(emb, labels, (0.0, 0.3)[seed % 2])
    check_two(emb, another(emb, seed), labels)
    check_quantiles(emb)


def test_random_sets():
    for seed in range(SETS):
        check_all(seed)


@pytest.mark.usefixtures("small_blocks")
def test_many_blocks():
    for seed in range(200):
        check_all(seed)


def test_inequalities():
    for seed in range(SETS):
        f, labels = random_set(seed)
        g, h = another(f, seed), another(f, seed + 7)
        size = 1 + float(f.double().abs().max())
        slack = 1e-12 * size
        moved, sets, error = (
            pointwise_distance(f, g).value,
            hausdorff(f, g, labels).value,
            isometric_error(f, g).value,
        )
        assert sets <= moved + slack
        assert error <= 2 * moved + slack
        # (16), for the diameter and for the width along every direction
        assert abs(diameter(f).value - diameter(g).value) <= min(error, 2 * sets) + slack
        assert hausdorff(f, h, labels).value <= sets + hausdorff(g, h, labels).value + slack
        assert isometric_error(f, h).value <= error + isometric_error(g, h).value + slack
        assert hausdorff(g, f, labels).value == pytest.approx(sets, abs=slack)
        # ½·L: no separated embedding is nearer than half of the worst triplet's loss.
        loss_f, loss_g = (separation(rows, labels, 0.1).excess for rows in (f, g))
        if loss_f > -math.inf:
            assert abs(loss_f - loss_g) <= 2 * error + slack
        largest = class_diameters(f, labels).values.max()
        assert largest <= diameter(f).value + slack
        assert effective_rank(f) <= min(len(f) - 1, f.shape[1]) + 1e-6


def test_thickness_holds_the_least_width():
    """No direction of many is thinner than the lower bound; the upper one is the width along its own."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(SETS):
        emb, _ = random_set(seed)
        found = thickness(emb, rounds=6)
        slack = 1e-12 * (1 + float(emb.double().abs().max()))
        assert 0 <= found.lower <= found.upper <= diameter(emb).value + slack
        assert float(found.direction.norm()) == pytest.approx(1)
        directions = torch.randn(200, emb.shape[1], generator=generator, dtype=torch.float64)
        directions = torch.cat([directions / directions.norm(dim=1, keepdim=True), found.direction[None]])
        along = emb.double() @ directions.T
        widths = along.amax(0) - along.amin(0)
        assert float(widths.min()) >= found.lower - slack
        assert float(widths[-1]) == pytest.approx(found.upper, abs=slack)


def test_thickness_in_the_plane_is_exact():
    for seed in range(200):
        emb = torch.randn(3 + seed % 20, 2, generator=torch.Generator().manual_seed(seed))
        angle = torch.linspace(0, math.pi, 20001, dtype=torch.float64)
        along = emb.double() @ torch.stack([angle.cos(), angle.sin()])
        expected = float((along.amax(0) - along.amin(0)).min())
        found = thickness(emb)
        assert found.upper - found.lower < 1e-12
        assert expected - 2e-4 * diameter(emb).value <= found.upper <= expected + 1e-12


def test_thickness_of_a_ball_is_narrow():
    """The interval is of use: many rows of the unit sphere are about 2 thick."""
    emb = torch.nn.functional.normalize(torch.randn(2000, 6, generator=torch.Generator().manual_seed(0)))
    found = thickness(emb)
    assert found.lower > 0.7
    assert found.upper < 2
    assert found.upper <= float((emb.amax(0) - emb.amin(0)).min()) + 1e-6


@pytest.mark.usefixtures("small_blocks")
def test_quantiles_with_heavy_ties():
    emb = torch.randint(0, 2, (60, 3), generator=torch.Generator().manual_seed(0)).float()
    check_quantiles(emb)
    check_quantiles(torch.zeros(30, 2))


def test_effective_rank_against_singular_values():
    for seed in range(200):
        emb, _ = random_set(seed)
        emb = emb.double() + torch.randn(emb.shape, generator=torch.Generator().manual_seed(seed))
        sigma = torch.linalg.svdvals(emb - emb.mean(0))
        share = sigma / sigma.sum()
        assert effective_rank(emb) == pytest.approx(float(torch.special.entr(share).sum().exp()), rel=1e-5)


# What rounding would hide


def test_a_search_again_finds_what_rounding_hides():
    """Rows on a sphere of 64 dimensions, whose opposite pairs differ in the eighth digit."""
    generator = torch.Generator().manual_seed(1)
    half = torch.nn.functional.normalize(torch.randn(600, 64, generator=generator, dtype=torch.float64))
    half *= 1 + 1e-7 * torch.randn(600, 1, generator=generator, dtype=torch.float64)
    emb = torch.cat([half, -half]).float()
    check_extremes(emb, torch.zeros(1200, dtype=torch.int64))
    check_separation(emb, torch.arange(1200) % 3, 0.1)


def test_large_classes():
    generator = torch.Generator().manual_seed(2)
    f = torch.randn(2500, 5, generator=generator)
    g = f + 1e-4 * torch.randn(2500, 5, generator=generator)
    labels = (torch.arange(2500) > 1100).long()
    check_extremes(f, labels)
    check_two(f, g, labels)


def test_a_rotated_copy_has_no_error():
    generator = torch.Generator().manual_seed(3)
    emb = torch.randn(300, 6, generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64)).Q
    assert isometric_error(emb, emb @ rotation + 1).value < 1e-13


@pytest.mark.parametrize("size", [1e-30, 1e30, 1e200])
def test_sizes_whose_squares_do_not_fit(size: float):
    emb = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    emb = emb * size if size == 1e200 else (emb * size).float()
    labels = torch.arange(40) % 4
    plain = emb.double() / size
    assert diameter(emb).value / size == pytest.approx(float(matrix(plain).max()), rel=1e-12)
    assert float(class_diameters(emb, labels).values.max()) / size == pytest.approx(
        float(class_diameters(plain, labels).values.max()), rel=1e-12
    )
    assert isometric_error(emb, 2 * emb).value / size == pytest.approx(diameter(plain).value, rel=1e-12)
    assert hausdorff(emb, emb.flip(0), labels).value / size == pytest.approx(
        hausdorff(plain, plain.flip(0), labels).value, rel=1e-12
    )
    assert thickness(emb).upper / size == pytest.approx(thickness(plain).upper, rel=1e-9)
    assert effective_rank(emb) == pytest.approx(effective_rank(plain), rel=1e-9)
    found = distance_quantiles(emb, 0.5).values / size
    assert float(found) == pytest.approx(float(distance_quantiles(plain, 0.5).values), rel=1e-8)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_types(layout: str, dtype: torch.dtype):
    plain = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    labels = torch.arange(30) % 4
    emb = laid_out(plain, layout).requires_grad_()
    assert summary(emb, labels) == summary(plain, labels)
    assert isometric_error(emb, plain * 2) == isometric_error(plain, plain * 2)
    assert thickness(emb)[:2] == thickness(plain)[:2]
    check_all_of(emb.detach(), labels)


def check_all_of(emb: Tensor, labels: Tensor) -> None:
    check_extremes(emb, labels)
    check_separation(emb, labels, 0.1)
    check_quantiles(emb)


def test_summary_agrees_with_the_loss():
    emb, labels = torch.randn(200, 8, generator=torch.Generator().manual_seed(0)), torch.arange(200) % 20
    found = summary(emb, labels, alpha=0.2)
    assert found["mean_loss"] == pytest.approx(float(T.batch_hard_loss(emb, labels, margin=0.2)), rel=1e-5)
    losses = T.batch_hard_loss(emb, labels, margin=0.2, reduction="none")
    assert found["worst_loss"] == pytest.approx(float(losses.max()), rel=1e-5)
    assert found["active_share"] == float((losses > 0).double().mean())


def test_nothing_of_all_pairs_is_held():
    count = 4096
    emb, labels = torch.randn(count, 4), torch.arange(count) % 2
    with Largest() as largest:
        summary(emb, labels)
        hausdorff(emb, emb + 1, labels)
        isometric_error(emb, emb * 2)
        distance_quantiles(emb)
        thickness(emb, rounds=2)
    assert largest.elements <= count * count // 4


# Refused

ONE = [diameter, thickness, effective_rank, distance_quantiles]


@pytest.mark.parametrize("function", ONE)
def test_bad_rows(function):
    emb = torch.randn(5, 2)
    emb[3, 1] = math.nan
    with pytest.raises(ValueError, match=r"emb of shape \(5, 2\) is not finite in row 3"):
        function(emb)
    with pytest.raises(ValueError, match=r"emb must be \(N, D\), got emb of shape \(5,\)"):
        function(torch.ones(5))
    with pytest.raises(TypeError, match=r"got torch\.int64"):
        function(torch.ones(5, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match="got list"):
        function([[1.0]])


@pytest.mark.parametrize("function", [class_diameters, separation, summary])
def test_bad_labelled_rows(function):
    emb, labels = torch.randn(5, 2), torch.arange(5)
    emb[3, 1] = math.inf
    with pytest.raises(ValueError, match="is not finite in row 3"):
        function(emb, labels)
    with pytest.raises(ValueError, match="is not finite in row 3"):
        function(emb, labels, ignore_label=1)
    with pytest.raises(ValueError, match=r"emb of shape \(5, 2\) and labels of shape \(4,\)"):
        function(emb, labels[:4])


@pytest.mark.parametrize(
    "function", [pointwise_distance, isometric_error, lambda f, g: hausdorff(f, g, torch.zeros(5))]
)
def test_embeddings_of_different_length(function):
    f = torch.randn(5, 2)
    with pytest.raises(ValueError, match=r"f of shape \(5, 2\) and g of shape \(4, 2\)"):
        function(f, f[:4])
    with pytest.raises(ValueError, match=r"g of shape \(5, 2\) is not finite in row 0"):
        function(f, f * math.nan)


def test_other_refusals():
    emb, labels = torch.randn(3, 2), torch.arange(3)
    with pytest.raises(ValueError, match=r"\(3, 2\) and g of shape \(3, 1\)"):
        pointwise_distance(emb, emb[:, :1])
    with pytest.raises(ValueError, match="no row"):
        pointwise_distance(emb[:0], emb[:0])
    with pytest.raises(ValueError, match="no row that counts"):
        hausdorff(emb[:0], emb[:0], labels[:0])
    with pytest.raises(ValueError, match="two rows"):
        distance_quantiles(emb[:1])
    with pytest.raises(ValueError, match="two rows that count, got 1"):
        summary(emb[:1], labels[:1])
    with pytest.raises(ValueError, match="no row"):
        effective_rank(emb[:0])
    with pytest.raises(ValueError, match="D must be at least 1"):
        thickness(emb[:, :0])
    with pytest.raises(ValueError, match=r"q=1\.5"):
        distance_quantiles(emb, 1.5)
    with pytest.raises(ValueError, match="sample=0"):
        distance_quantiles(emb, 0.5, sample=0)
    for alpha in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="alpha="):
            separation(emb, labels, alpha)
    with pytest.raises(TypeError, match="alpha must be a Python number"):
        summary(emb, labels, alpha="0")
    with pytest.raises(ValueError, match="loss=-1"):
        collapse_bound(1.0, -1.0)
