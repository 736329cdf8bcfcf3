"""`tripletops.evaluate`: by hand, against the oracle's sorted distances, scikit-learn and
pytorch-metric-learning; what it must refuse, and how little it may hold."""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning.distances import BaseDistance, CosineSimilarity, LpDistance
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from sklearn.metrics import normalized_mutual_info_score
from sklearn.neighbors import NearestNeighbors
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.batches import KINDS, LAYOUTS, laid_out, lattice_batch, random_batch, rows_of_kind
from tests.support.calls import bits
from tripletops import evaluate, reference
from tripletops.evaluate import diameter, map_at_r, nearest, nmi, nmi_plus, recall_at_k

DISTANCES = ("euclidean", "cosine")

# On a line: 0, 1 and 5 are of class 7, 2.5 and 10 of class −3.
LINE = torch.tensor([[0.0], [1.0], [2.5], [5.0], [10.0]])
LINE_LABELS = torch.tensor([7, 7, -3, 7, -3])


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few rows make many blocks, with rows and columns left over."""
    for name, value in {"_QUERIES": 7, "_GALLERY": 45, "_ELEMENTS": 300, "_SPARE": 3, "_GROUP": 4}.items():
        monkeypatch.setattr(evaluate, name, value)


@pytest.fixture
def digits() -> tuple[Tensor, Tensor]:
    """600 real images as rows, and their classes."""
    bunch = load_digits()
    return torch.tensor(bunch.data[:600], dtype=torch.float32), torch.tensor(bunch.target[:600])


def accuracy_of(include: tuple[str, ...], distance: BaseDistance, **options: Any) -> AccuracyCalculator:
    """Without FAISS, which is its default and need not be installed."""
    options = {"knn_func": CustomKNN(distance), "kmeans_func": KMeans, "k": "max_bin_count", **options}
    return AccuracyCalculator(include=include, device=torch.device("cpu"), **options)


def all_distances(query: Tensor, gallery: Tensor | None, distance: str) -> Tensor:
    """(N, M) in float64 from the differences of rows, a query's own at inf."""
    compare, report = reference.DISTANCES[distance]
    matrix = report(
        reference.key_matrix(compare, query.double(), (query if gallery is None else gallery).double())
    )
    return matrix.fill_diagonal_(math.inf) if gallery is None else matrix


def check_nearest(query: Tensor, k: int, gallery: Tensor | None, distance: str) -> None:
    """Each distance is that of its row and, up to its own rounding, the one of its rank; equal ones go by the
    index; no row comes twice, nor the query itself."""
    found = nearest(query, k, gallery, distance=distance)
    matrix = all_distances(query, gallery, distance)
    count = min(k, max(0, matrix.shape[1] - (gallery is None)))
    distances, indices = found.distances[:, :count], found.indices[:, :count]
    assert found.distances.shape == found.indices.shape == (len(query), k)
    assert (found.distances[:, count:] == math.inf).all()
    assert (found.indices[:, count:] == -1).all()

    expected = matrix.sort().values[:, :count]
    epsilon = torch.finfo(distances.dtype).eps
    tolerance = (query.shape[1] + 8) * epsilon * expected
    if distance == "cosine":  # normalised rows are rounded, by which ½‖u−v‖² moves ‖u−v‖ times as much
        tolerance += 4 * epsilon * (expected.sqrt() + epsilon)
    if torch.finfo(distances.dtype).bits == 64:
        tolerance *= 2  # the oracle's own rounding
    assert ((distances - expected).abs() <= tolerance).all()
    assert ((matrix.gather(1, indices) - distances).abs() <= tolerance).all()
    assert (distances.diff() >= 0).all()
    assert ((distances.diff() > 0) | (indices.diff() > 0)).all()
    assert (indices.sort().values.diff() > 0).all()


class Largest(TorchDispatchMode):
    """How many elements the largest tensor has that an operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() // leaf.element_size()
                 for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]  # fmt: skip
        self.elements = max(self.elements, *sizes, 0)
        return result


# By hand


def test_nearest_by_hand():
    found = nearest(LINE, 2)
    assert found.indices.tolist() == [[1, 2], [0, 2], [1, 0], [2, 1], [3, 2]]
    assert found.distances.tolist() == [[1, 2.5], [1, 1.5], [1.5, 2.5], [2.5, 4], [5, 7.5]]
    assert found.indices.dtype == torch.int64
    assert found.distances.dtype == torch.float32


def test_a_gallery_by_hand():
    found = nearest(torch.tensor([[2.0], [0.0]]), 3, LINE)
    assert found.indices.tolist() == [[2, 1, 0], [0, 1, 2]]
    assert found.distances.tolist() == [[0.5, 1, 2], [0, 1, 2.5]]


def test_cosine_by_hand():
    rows = torch.tensor([[2.0, 0.0], [0.0, 0.5], [-3.0, 0.0], [0.0, 0.0], [4.0, 0.0], [0.0, 0.0]])
    found = nearest(rows, 5, distance="cosine")
    assert found.indices[0].tolist() == [4, 1, 3, 5, 2]
    assert found.distances[0].tolist() == pytest.approx([0, 1, 1, 1, 2], rel=1e-7)
    assert found.indices[3].tolist() == [0, 1, 2, 4, 5]  # a zero row is as far from another one
    assert found.distances[3].tolist() == pytest.approx([1] * 5, rel=1e-7)


def test_recall_by_hand():
    assert recall_at_k(LINE, LINE_LABELS) == {1: 0.4, 2: 0.8, 4: 1, 8: 1}
    assert recall_at_k(LINE, LINE_LABELS, [3, 1]) == {3: 0.8, 1: 0.4}
    assert recall_at_k(LINE, LINE_LABELS, 1) == recall_at_k(LINE, LINE_LABELS, np.int64(1)) == {1: 0.4}


def test_map_at_r_by_hand():
    # 0 and 1 find their like first and not second: (1/2)·1; 5 finds it second: (1/2)·(1/2); the others, with
    # R = 1, do not find theirs.
    assert map_at_r(LINE, LINE_LABELS) == pytest.approx((1 / 2 + 1 / 2 + 0 + 1 / 4 + 0) / 5, abs=1e-15)


def test_a_gallery_of_other_rows_by_hand():
    query, labels = torch.tensor([[0.0], [4.0]]), torch.tensor([-3, 7])
    gallery = {"ref_emb": LINE, "ref_labels": LINE_LABELS}
    # 0 finds itself, of the other class, then 1, then 2.5; 4 finds 5, then 2.5, then 1.
    assert recall_at_k(query, labels, (1, 2, 3), **gallery) == {1: 0.5, 2: 0.5, 3: 1}
    assert map_at_r(query, labels, **gallery) == pytest.approx((0 + (1 + 2 / 3) / 3) / 2, abs=1e-15)


def test_a_duplicate_is_a_neighbour():
    emb, labels = torch.ones(3, 5), torch.tensor([0, 1, 0])
    assert nearest(emb, 2).indices.tolist() == [[1, 2], [0, 2], [0, 1]]
    assert nearest(emb, 2).distances.tolist() == [[0, 0]] * 3
    assert recall_at_k(emb, labels, (1, 2)) == {1: 1 / 3, 2: 2 / 3}


def test_a_class_of_one_row_counts_for_recall_only():
    emb, labels = torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([0, 0, 1])
    assert recall_at_k(emb, labels, (1, 2)) == {1: 2 / 3, 2: 2 / 3}
    assert map_at_r(emb, labels) == 1
    accuracy = accuracy_of(("precision_at_1",), LpDistance(normalize_embeddings=False))
    assert accuracy.get_accuracy(emb, labels) == {"precision_at_1": 1}  # as the docstring says


def test_nmi_by_hand():
    places = torch.tensor([[0.0], [0.1], [9.0], [9.1]])
    assert nmi(places, torch.tensor([5, 5, 2, 2])) == pytest.approx(1)
    assert nmi(places, torch.tensor([0, 1, 0, 1])) == pytest.approx(0, abs=1e-12)
    # 1 bit in common, of 1.5 and 1; the geometric mean of these would give 0.816.
    assert nmi(places, torch.tensor([0, 0, 1, 2]), clusters=2) == pytest.approx(1 / 1.25)


def test_nmi_plus_by_hand():
    places, labels = torch.tensor([[0.0], [9.0], [30.0], [39.0]]), torch.tensor([0, 1, 0, 1])
    assert nmi(places, labels) == pytest.approx(0, abs=1e-12)
    assert nmi_plus(places, labels, 2) == pytest.approx(1 / 1.5)  # the class is known, 1 bit of 2


def test_diameter_by_hand():
    assert diameter(torch.tensor([[0.0, 0.0], [3.0, 4.0], [1.0, 1.0]])) == 5
    assert diameter(torch.full((4, 3), 0.1)) == 0


# Against the oracle


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("small_blocks")
def test_every_kind_of_rows(kind, distance):
    generator = torch.Generator().manual_seed(0)
    for dtype, (count, width), k in (
        (torch.float32, (100, 3), 4),
        (torch.float32, (100, 40), 60),
        (torch.float64, (91, 17), 3),
        (torch.bfloat16, (91, 5), 1),
        (torch.float16, (91, 5), 2),
    ):
        rows = rows_of_kind(kind, count, width, dtype, generator).to(dtype)
        check_nearest(rows, k, None, distance)
        check_nearest(rows[:20], k, rows[10:], distance)


@pytest.mark.parametrize("distance", DISTANCES)
def test_blocks_of_the_real_size(distance):
    generator = torch.Generator().manual_seed(1)
    gallery = torch.randn(evaluate._GALLERY + 1000, 24, generator=generator)
    gallery[-500:] = gallery[:500]
    check_nearest(gallery[400 : 400 + evaluate._QUERIES + 3], 10, gallery, distance)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("candidates", [None, 150])
@pytest.mark.usefixtures("small_blocks")
def test_ties_go_to_the_lowest_index(candidates, distance):
    """On the lattice nothing is rounded, and half of all comparisons are ties."""
    for width in (2, 20):
        batch = lattice_batch(100, width, candidates, cosine=distance == "cosine")
        matrix = all_distances(batch.emb, batch.ref_emb, distance)
        expected = matrix.sort(stable=True)
        for k in (1, 5, 40):
            found = nearest(batch.emb, k, batch.ref_emb, distance=distance)
            assert torch.equal(found.indices, expected.indices[:, :k])
            torch.testing.assert_close(found.distances.double(), expected.values[:, :k], rtol=2e-7, atol=0)


@pytest.mark.parametrize("scale", [1e-40, 1e-25, 1e25, 3e37])
def test_squares_beyond_float32(scale):
    rows = random_batch(60, 4).emb
    expected, found = nearest(rows, 3), nearest(rows * scale, 3)
    scaled = (rows * scale).double() / scale  # below 1e-38 digits are lost
    assert torch.equal(found.indices, nearest(scaled, 3).indices)
    torch.testing.assert_close(found.distances / scale, expected.distances, rtol=1e-3, atol=0)


def test_a_large_offset_keeps_the_neighbours():
    """Products of these rows have no digit left for their differences."""
    near = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 2.0], [5.0, 5.0]]).repeat(30, 1)
    near += torch.arange(30).repeat_interleave(4)[:, None] * 16
    far = near + 2.0**20
    assert torch.equal(nearest(far, 3).indices, nearest(near, 3).indices)
    assert torch.equal(nearest(far, 3).distances, nearest(near, 3).distances)


def test_one_far_row_costs_the_others_nothing(monkeypatch):
    """What rounding can do to a neighbour depends on the query's surroundings, not on the longest row."""
    rows = torch.cat([random_batch(500, 16).emb, torch.full((1, 16), 1e3)])
    given = []
    lowest = evaluate._lowest
    monkeypatch.setattr(evaluate, "_lowest", lambda *call: given.append(call[0].shape) or lowest(*call))
    check_nearest(rows[:500], 4, rows, "euclidean")
    assert sum(queries for queries, columns in given if columns == len(rows)) == 0  # compared with all rows


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout):
    rows = random_batch(50, 6).emb
    assert bits(*nearest(laid_out(rows, layout), 4)) == bits(*nearest(rows, 4))


def test_types_of_queries_and_gallery_may_differ():
    rows = random_batch(40, 6).emb
    found = nearest(rows[:9].half(), 4, rows.double())
    assert found.distances.dtype == torch.float64
    assert bits(*found) == bits(*nearest(rows[:9].half().double(), 4, rows.double()))
    half = nearest(rows.bfloat16(), 4)
    assert bits(*half) == bits(*nearest(rows.bfloat16().float(), 4))


def test_the_same_bits_for_any_number_of_threads(threads):
    rows = random_batch(700, 32).emb
    torch.set_num_threads(1)
    one = nearest(rows, 7)
    torch.set_num_threads(2)
    assert bits(*nearest(rows, 7)) == bits(*one)


def test_neither_autocast_nor_gradients_matter():
    batch = random_batch(300, 16)
    expected = nearest(batch.emb, 5)
    emb = batch.emb.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = nearest(emb, 5)
    assert not found.distances.requires_grad
    assert bits(*found) == bits(*expected)
    assert recall_at_k(emb, batch.labels) == recall_at_k(batch.emb, batch.labels)
    assert diameter(emb) == diameter(batch.emb)
    assert nmi(emb, batch.labels) == nmi(batch.emb, batch.labels)


def test_the_precision_of_products_is_left_as_it_was():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        check_nearest(random_batch(300, 64).emb, 5, None, "euclidean")
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_diameter_is_the_largest_distance(dtype):
    rows = random_batch(200, 12, dtype=dtype).emb
    expected = float(all_distances(rows, rows, "euclidean").max())
    assert diameter(rows) == pytest.approx(expected, rel=1e-12 if dtype is torch.float64 else 1e-5)


# Against others


@pytest.mark.parametrize(("distance", "metric"), [("euclidean", "euclidean"), ("cosine", "cosine")])
def test_scikit_learn_finds_the_same_neighbours(digits, distance, metric):
    rows = digits[0].double()
    theirs = NearestNeighbors(n_neighbors=6, metric=metric, algorithm="brute").fit(rows.numpy())
    distances, _ = theirs.kneighbors()  # without an argument it leaves out the query itself
    found = nearest(rows, 6, distance=distance)
    torch.testing.assert_close(found.distances, torch.from_numpy(distances), rtol=1e-6, atol=1e-9)
    distances, indices = theirs.kneighbors(rows[:50].numpy() + 0.25)
    found = nearest(rows[:50] + 0.25, 6, rows, distance=distance)
    torch.testing.assert_close(found.distances, torch.from_numpy(distances), rtol=1e-6, atol=1e-9)
    is_apart = torch.from_numpy(np.diff(distances) > 1e-9).all(1)
    assert torch.equal(found.indices[is_apart, :-1], torch.from_numpy(indices)[is_apart, :-1])


@pytest.mark.parametrize(
    ("distance", "theirs"),
    [("euclidean", LpDistance(normalize_embeddings=False)), ("cosine", CosineSimilarity())],
)
@pytest.mark.parametrize("exact", [True, False])
def test_pytorch_metric_learning_measures_the_same(digits, distance, theirs, exact):
    """Given sorted neighbours; by its own, ties between these whole numbers are broken in other ways."""
    emb, labels = digits[0].double(), digits[1]

    def sorted_neighbours(query, k, gallery, is_own_gallery):
        found = all_distances(query, None if is_own_gallery else gallery, distance).sort(stable=True)
        return found.values[:, :k], found.indices[:, :k]

    knn = sorted_neighbours if exact else CustomKNN(theirs)
    calculator = accuracy_of(("precision_at_1", "mean_average_precision_at_r"), theirs, knn_func=knn)
    recall_tolerance, tolerance = (1e-12, 1e-12) if exact else (1.1 / 200, 3e-4)
    found = calculator.get_accuracy(emb, labels)
    recall = recall_at_k(emb, labels, [1], distance=distance)[1]
    assert recall == pytest.approx(found["precision_at_1"], abs=recall_tolerance)
    precision = map_at_r(emb, labels, distance=distance)
    assert precision == pytest.approx(found["mean_average_precision_at_r"], abs=tolerance)

    # A gallery that lacks a class: they leave its queries out of both, here MAP@R alone does.
    query, kept = slice(0, 200), labels[200:] != 3
    gallery = {"ref_emb": emb[200:][kept], "ref_labels": labels[200:][kept]}
    found = calculator.get_accuracy(emb[query], labels[query], *gallery.values())
    answerable = float((labels[query] != 3).double().mean())
    assert answerable < 1
    recall = recall_at_k(emb[query], labels[query], [1], **gallery, distance=distance)[1]
    assert recall == pytest.approx(found["precision_at_1"] * answerable, abs=recall_tolerance)
    precision = map_at_r(emb[query], labels[query], **gallery, distance=distance)
    assert precision == pytest.approx(found["mean_average_precision_at_r"], abs=tolerance)


def test_nmi_of_the_clusters_that_others_measure(digits):
    emb, labels = digits

    def clusters_of(rows, count):
        kmeans = KMeans(count, n_init=1, max_iter=50, random_state=3)
        return torch.from_numpy(kmeans.fit_predict(rows.numpy()))

    calculator = accuracy_of(("NMI",), LpDistance(), kmeans_func=clusters_of)
    assert nmi(emb, labels, seed=3) == pytest.approx(calculator.get_accuracy(emb, labels)["NMI"])
    more = normalized_mutual_info_score(labels.numpy(), clusters_of(emb, 100).numpy())
    assert nmi_plus(emb, labels, 10, seed=3) == pytest.approx(more)
    assert 0.6 < more < 1
    assert nmi(emb, labels, seed=4) != nmi(emb, labels, seed=3)
    assert nmi(emb, labels, seed=4) == nmi(emb, labels, seed=4)


def test_embeddings_stay_as_they_were(digits):
    emb, labels = digits
    before = bits(emb, labels)
    recall_at_k(emb, labels)
    recall_at_k(emb, labels, distance="cosine")
    nmi(emb, labels)
    diameter(emb)
    assert bits(emb, labels) == before


# How little is held


@pytest.mark.parametrize("collapsed", [False, True])
@pytest.mark.parametrize("distance", DISTANCES)
def test_nothing_of_n_by_n_is_held(distance, collapsed):
    count = 5000
    batch = random_batch(count, 8, classes=count // 20)
    emb = torch.ones_like(batch.emb) if collapsed else batch.emb
    calls = {
        "nearest": lambda: nearest(emb, 8, distance=distance),
        "recall_at_k": lambda: recall_at_k(emb, batch.labels, distance=distance),
        "map_at_r": lambda: map_at_r(emb, batch.labels, distance=distance),
        "diameter": lambda: diameter(emb),
    }
    for name, call in calls.items():
        if collapsed and name == "map_at_r":
            continue  # as slow as the others together, by the same way
        with Largest() as largest:
            call()
        assert largest.elements <= evaluate._ELEMENTS < count**2 / 5, name


def test_a_class_of_all_rows_is_held_in_blocks():
    """MAP@R then ranks all rows of the gallery for every query."""
    count = 2500
    with Largest() as largest:
        assert map_at_r(random_batch(count, 2).emb, torch.zeros(count, dtype=torch.int64)) == 1
    assert largest.elements <= evaluate._ELEMENTS


# The edges


@pytest.mark.parametrize("distance", DISTANCES)
def test_few_rows(distance):
    for count, gallery in ((0, None), (1, None), (2, None), (3, 0), (0, 3), (0, 0), (3, 1)):
        rows = random_batch(count, 4).emb
        check_nearest(rows, 3, None if gallery is None else random_batch(gallery, 4).emb, distance)


@pytest.mark.parametrize("distance", DISTANCES)
def test_rows_without_a_column_are_equal(distance):
    found = nearest(torch.ones(4, 0), 2, distance=distance)
    assert found.indices.tolist() == [[1, 2], [0, 2], [0, 1], [0, 1]]
    assert (found.distances == 0).all()
    assert diameter(torch.ones(4, 0)) == 0


def test_without_an_answer():
    none, labels = torch.ones(0, 3), torch.ones(0, dtype=torch.int64)
    assert math.isnan(recall_at_k(none, labels)[8])
    assert math.isnan(map_at_r(none, labels))
    assert math.isnan(nmi(none, labels))
    assert math.isnan(nmi_plus(none, labels, 10))
    assert diameter(none) == 0

    one, label = torch.ones(1, 3), torch.ones(1, dtype=torch.int64)
    assert recall_at_k(one, label, [1]) == {1: 0}
    assert math.isnan(map_at_r(one, label))
    assert nmi(one, label) == 1
    assert diameter(one) == 0
    assert recall_at_k(one, label, [1], ref_emb=none, ref_labels=labels) == {1: 0}
    assert math.isnan(map_at_r(one, label, ref_emb=none, ref_labels=labels))


def test_labels_of_any_integer_type():
    emb, labels = LINE, torch.tensor([2**63 + 1, 2**63 + 1, 4, 2**63 + 1, 4], dtype=torch.uint64)
    assert recall_at_k(emb, labels, [1, 2]) == {1: 0.4, 2: 0.8}
    assert map_at_r(emb, labels.to(torch.int8)) == map_at_r(LINE, LINE_LABELS)
    assert nmi(emb, labels) == nmi(LINE, LINE_LABELS)


def test_a_collapsed_embedding_has_an_nmi():
    assert nmi(torch.ones(6, 2), torch.arange(6) % 3) == pytest.approx(0, abs=1e-12)


# What is refused


def with_nan(row: int) -> Tensor:
    rows = torch.ones(4, 3)
    rows[row, 1] = math.nan if row % 2 else math.inf
    return rows


ROWS, LABELS = torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nearest(with_nan(2), 1), ValueError, r"query of shape \(4, 3\) is not finite in row 2"),
        (lambda: nearest(ROWS, 1, with_nan(3)), ValueError, "gallery .* not finite in row 3"),
        (lambda: recall_at_k(with_nan(1), LABELS), ValueError, "emb .* not finite in row 1"),
        (lambda: map_at_r(with_nan(1), torch.arange(4)), ValueError, "emb .* not finite in row 1"),
        (
            lambda: recall_at_k(ROWS, LABELS, ref_emb=with_nan(0), ref_labels=LABELS),
            ValueError,
            "ref_emb .* not finite in row 0",
        ),
        (lambda: nmi(with_nan(1), LABELS), ValueError, "not finite"),
        (lambda: diameter(with_nan(1)), ValueError, "not finite"),
        (lambda: nearest(ROWS[0], 1), ValueError, r"query must be \(N, D\), got query of shape \(3,\)"),
        (lambda: nearest(ROWS, 1, ROWS[:, :2]), ValueError, r"\(4, 3\) and gallery of shape \(4, 2\)"),
        (lambda: nearest(ROWS.long(), 1), TypeError, "query must be float16.*got torch.int64"),
        (lambda: nearest([[1.0]], 1), TypeError, "query must be a torch.Tensor, got list"),
        (lambda: nearest(ROWS, 0), ValueError, "k=0: must be 1 or greater"),
        (lambda: nearest(ROWS, 1.5), TypeError, "k must be an int, got 1.5"),
        (lambda: nearest(ROWS, True), TypeError, "k must be an int, got True"),
        (lambda: nearest(ROWS, 1, distance="manhattan"), ValueError, "'manhattan' is not one of 'euclidean'"),
        (lambda: recall_at_k(ROWS, LABELS, [1, -2]), ValueError, "k=-2"),
        (lambda: recall_at_k(ROWS, LABELS, 0), ValueError, "k=0: must be 1 or greater"),
        (lambda: recall_at_k(ROWS, LABELS, 1.0), TypeError, r"k must be an int, got 1\.0"),
        (lambda: recall_at_k(ROWS, LABELS, "1"), TypeError, "k must be an int, got '1'"),
        (lambda: recall_at_k(ROWS, LABELS[:3]), ValueError, r"\(4, 3\) and labels of shape \(3,\)"),
        (lambda: recall_at_k(ROWS, LABELS.float()), TypeError, "labels must be of an integer dtype"),
        (lambda: recall_at_k(ROWS, LABELS, ref_emb=ROWS), ValueError, "without ref_labels"),
        (lambda: map_at_r(ROWS, LABELS, ref_labels=LABELS), ValueError, "without ref_emb"),
        (lambda: nmi(ROWS, LABELS, clusters=5), ValueError, r"clusters=5: emb of .* has fewer rows"),
        (lambda: nmi(ROWS, LABELS, clusters=0), ValueError, "clusters=0: must be 1 or greater"),
        (lambda: nmi_plus(ROWS, LABELS, 0), ValueError, "factor=0: must be 1 or greater"),
        (lambda: diameter(ROWS[0]), ValueError, r"emb must be \(N, D\)"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


# What is not always installed


def test_faiss_finds_the_same():
    pytest.importorskip("faiss")
    rows = random_batch(700, 16).emb
    rows[300:340] = rows[0]
    for k in (1, 20):
        assert bits(*nearest(rows, k, use_faiss=True)) == bits(*nearest(rows, k))
        found = nearest(rows[:30], k, rows[20:], distance="cosine", use_faiss=True)
        assert bits(*found) == bits(*nearest(rows[:30], k, rows[20:], distance="cosine"))


def test_a_stand_in_for_faiss_finds_the_same(monkeypatch):
    asked = []

    def knn(query, gallery, count):
        asked.append(count)
        squares = ((query[:, None] - gallery) ** 2).sum(-1)
        order = squares.argsort(1)[:, :count]
        return np.take_along_axis(squares, order, 1), order

    monkeypatch.setitem(sys.modules, "faiss", types.SimpleNamespace(knn=knn))
    batch = random_batch(200, 6)
    assert bits(*nearest(batch.emb, 3, use_faiss=True)) == bits(*nearest(batch.emb, 3))
    assert recall_at_k(batch.emb, batch.labels, use_faiss=True) == recall_at_k(batch.emb, batch.labels)
    assert map_at_r(batch.emb, batch.labels, use_faiss=True) == map_at_r(batch.emb, batch.labels)
    assert asked


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(ImportError, match=r"tripletops\[faiss\]"):
        nearest(ROWS, 1, use_faiss=True)
    with pytest.raises(ValueError, match=r"use_faiss=True is for .* got torch.float64 on cpu"):
        nearest(ROWS.double(), 1, use_faiss=True)
    with pytest.raises(ImportError, match="nmi needs scikit-learn"):
        nmi(ROWS, LABELS)
