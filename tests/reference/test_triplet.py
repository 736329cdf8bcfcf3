"""The oracle against numbers worked out on paper; the working is in the comments.

What is about one rule or one loss is in its own file, in tests/rules and tests/losses.
"""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch

from tests.support.calls import DISTANCES, DTYPES, REDUCTIONS
from tests.support.worked import LINE, LINE_LABELS, tensor
from tests.support.worked_triplets import hash_by_plain_integers, loss_and_gradients, picks, same
from tripletops import reference

NAN = math.nan


# Selection


def test_ties_go_to_the_first_candidate():
    # Positives of row 0 at ±1, negatives at ±2: each rule sees nothing but equals.
    emb = tensor([[0], [-1], [1], [-2], [2], [-2], [2]])
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    for positive in ("hard", "easy"):
        for negative in ("hard", "easy"):
            p, n = picks(emb, labels, positive=positive, negative=negative)
            assert (p[0], n[0]) == (1, 3)
            p, n = picks(-emb, labels, positive=positive, negative=negative)
            assert (p[0], n[0]) == (1, 3)


@pytest.mark.parametrize("count", [2, 9, 100, 1000])
def test_ties_among_many(count):
    # All rows equal, labels 0 1 0 1 …: the first positive of row 0 is 2, of row 1 it is 3, of others 0 or 1.
    emb, labels = torch.ones(count, 3), torch.arange(count) % 2
    p, n = picks(emb, labels, positive="hard", negative="easy")
    first = [(2 if i == 0 else 3 if i == 1 else i % 2) for i in range(count)]
    assert p == [candidate if candidate < count else -1 for candidate in first]
    assert n == [1 - i % 2 for i in range(count)]
    assert picks(emb, labels, positive="easy", negative="hard") == (p, n)


def test_a_duplicate_is_a_positive_at_distance_zero():
    emb, labels = tensor([[0.1, 0.7], [5, 5], [0.1, 0.7], [0.1, 0.7]]), torch.tensor([0, 0, 0, 1])
    p, n, d_ap, d_an = reference.mine(emb, labels, positive="easy", negative="hard")
    assert (p[0], p[2], n[0], n[2]) == (2, 0, 3, 3)
    assert d_ap[0] == d_ap[2] == d_an[0] == d_an[2] == 0


def test_candidates_of_another_set():
    emb, labels = tensor([[0], [10]]), torch.tensor([0, 1])
    ref_emb, ref_labels = tensor([[0], [5], [1], [12]]), torch.tensor([0, 0, 1, 1])
    options = {"positive": "easy", "negative": "hard", "ref_emb": ref_emb, "ref_labels": ref_labels}
    # Row 0: positives 0, 5 away, negatives 1, 12. Row 10: positives (rows 2, 3) 9, 2 away, negatives 10, 5.
    assert picks(emb, labels, **options) == ([0, 3], [2, 1])
    # Row 0 is candidate 0; row 1 is none of them.
    assert picks(emb, labels, self_index=torch.tensor([0, -1]), **options) == ([1, 3], [2, 1])
    # What is named as self is no negative either.
    assert picks(emb, labels, self_index=torch.tensor([2, 1]), **options) == ([0, 3], [3, 0])
    # A self whose exclusion leaves no positive.
    nobody = picks(emb[:1], labels[:1], self_index=torch.tensor([0]), positive="hard", negative="hard",
                   ref_emb=ref_emb[[0, 2]], ref_labels=ref_labels[[0, 2]])  # fmt: skip
    assert nobody == ([-1], [1])


def test_each_pick_is_reported_by_itself():
    # Row 2 has a negative but no positive.
    emb, labels = tensor([[0], [4], [1]]), torch.tensor([0, 0, 1])
    assert picks(emb, labels, positive="hard", negative="hard") == ([1, 0, -1], [2, 2, 0])
    _, _, d_ap, d_an = reference.mine(emb, labels, positive="hard", negative="hard")
    assert same(d_ap, [4, 4, NAN])
    assert same(d_an, [1, 3, 1])


def test_ignored_rows_are_nobody_and_poison_nothing():
    # LINE with two rows in between that would be picked (0.9 and 3 have a class, inf and NaN are anywhere).
    emb = torch.cat([LINE[:2], tensor([[NAN], [math.inf]]), LINE[2:]])
    labels = torch.cat([LINE_LABELS[:2], torch.tensor([77, 77]), LINE_LABELS[2:]])
    p, n, d_ap, _ = reference.mine(emb, labels, positive="hard", negative="hard", ignore_label=77)
    # The rows of LINE from 2 on are now 4, 5, 6.
    assert p.tolist() == [4, 4, -1, -1, 0, 6, 5]
    assert n.tolist() == [5, 5, -1, -1, 5, 4, 4]
    assert d_ap[2:4].isnan().all()
    loss, gradient, _ = loss_and_gradients(emb, labels, ignore_label=77, reduction="sum")
    assert loss == pytest.approx(9.0)  # as in test_margin_on_a_line
    assert same(gradient, [[-1], [0], [0], [0], [2], [-2], [1]])
    # A label that means nothing else is no hindrance either: LINE without the class −3 is one class.
    assert picks(LINE, LINE_LABELS, positive="hard", negative="hard", ignore_label=-3)[1] == [-1] * 5


# Reductions


def test_reductions_count_what_they_should():
    # Easy+easy, margin 1: [1−7+1]₊, [1−6+1]₊, [2−4+1]₊, [4.5−2.5+1]₊, [4.5−7+1]₊ = 0, 0, 0, 3, 0
    options = {"positive": "easy", "negative": "easy", "margin": 1.0}
    for reduction, expected in [("none", [0, 0, 0, 3, 0]), ("sum", 3), ("mean", 0.6), ("mean_nonzero", 3)]:
        assert same(reference.triplet_loss(LINE, LINE_LABELS, reduction=reduction, **options), expected)
    assert reference.triplet_loss(LINE, LINE_LABELS, positive="easy", negative="easy", margin=0.0,
                                  reduction="mean_nonzero") == 2  # fmt: skip


# Edges


@pytest.mark.parametrize("distance", DISTANCES)
def test_no_slope_between_duplicates(distance):
    # Positive and negative both coincide with the anchor: the loss is the margin, and nothing pulls.
    emb, labels = torch.ones(4, 3, dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    loss, gradient, _ = loss_and_gradients(emb, labels, distance=distance, margin=0.25)
    assert loss == 0.25
    assert not gradient.any()


def test_zero_rows_by_cosine():
    # The zero row has S = 0 with everything, itself being no exception: d = 1, and no slope on either side.
    emb = tensor([[0, 0], [3, 4], [0, 0], [4, 3]])
    labels = torch.tensor([0, 0, 1, 1])
    p, n, d_ap, d_an = reference.mine(emb, labels, positive="easy", negative="hard", distance="cosine")
    assert (p.tolist(), n.tolist()) == ([1, 0, 3, 2], [2, 3, 0, 1])
    assert same(d_ap, [1, 1, 1, 1])
    assert same(d_an, [1, 0.04, 1, 0.04])  # (3, 4)·(4, 3)/25 = .96
    loss, gradient, _ = loss_and_gradients(emb, labels, distance="cosine", reduction="sum")
    assert loss == pytest.approx(0.2 + 1.16 + 0.2 + 1.16, rel=1e-15)
    # Only rows 1 and 3 pull at each other, as negatives, twice over: d(S)/dx = (v − S u)/|x| with
    # u = (.6, .8), v = (.8, .6):  ((.8, .6) − .96·(.6, .8))/5 = (.224, −.168)/5
    assert same(gradient, [[0, 0], [2 * 0.0448, -2 * 0.0336], [0, 0], [-2 * 0.0336, 2 * 0.0448]])


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_value_that_is_not_finite_is_never_mined_around(value, reduction):
    emb = LINE.clone()
    emb[1] = value
    p, n, d_ap, d_an = reference.mine(emb, LINE_LABELS, positive="easy", negative="hard")
    assert p.tolist() == n.tolist() == [-1] * 5
    assert d_ap.isnan().all()
    assert d_an.isnan().all()
    _, gradient, _ = loss_and_gradients(emb, LINE_LABELS, reduction=reduction)
    assert gradient.isnan().all()
    assert reference.triplet_loss(emb, LINE_LABELS, reduction=reduction).isnan().all()
    # In the candidates alone, with an ignored anchor and an ignored candidate: the whole gradient again.
    _, by_anchor, by_ref = loss_and_gradients(
        LINE, torch.tensor([8, 9, 8, 8, 8]), ref_emb=emb, ref_labels=torch.tensor([8, 8, 9, 9, -3]),
        ignore_label=9, reduction=reduction,
    )  # fmt: skip
    assert by_ref is not None
    assert by_anchor.isnan().all()
    assert by_ref.isnan().all()
    # No anchor, no loss to poison.
    loss, _, by_ref = loss_and_gradients(LINE[:0], LINE_LABELS[:0], ref_emb=emb, ref_labels=LINE_LABELS)
    assert loss == 0
    assert by_ref is not None
    assert not by_ref.any()


@pytest.mark.parametrize(
    ("labels", "ref_labels"),
    [
        ([], None),
        ([3], None),
        ([3, 3, 3], None),
        ([1, 2, 3], None),
        ([1, 2], []),
        ([1, 2], [1, 2]),
        ([], [1, 2]),
    ],
)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("width", [0, 2])
def test_nothing_to_compare_is_the_differentiable_zero(labels, ref_labels, reduction, width):
    options: dict[str, object] = {"reduction": reduction}
    if ref_labels is not None:
        options["ref_emb"] = torch.ones(len(ref_labels), width)
        options["ref_labels"] = torch.tensor(ref_labels, dtype=torch.int64)
        options["self_index"] = torch.arange(len(labels)) if len(ref_labels) else None
    loss, gradient, by_ref = loss_and_gradients(
        torch.ones(len(labels), width), torch.tensor(labels, dtype=torch.int64), **options
    )
    assert loss == 0
    assert not gradient.any()
    assert by_ref is None or not by_ref.any()


@pytest.mark.parametrize("distance", DISTANCES)
def test_rows_without_dimensions_are_all_at_distance_zero(distance):
    emb, labels = torch.ones(4, 0), torch.tensor([0, 1, 0, 1])
    p, n, d_ap, d_an = reference.mine(emb, labels, positive="hard", negative="easy", distance=distance)
    assert (p.tolist(), n.tolist()) == ([2, 3, 0, 1], [1, 0, 1, 0])
    assert d_ap.tolist() == d_an.tolist() == [0, 0, 0, 0]
    assert reference.triplet_loss(emb, labels, distance=distance, margin=0.5) == 0.5
    assert reference.triplet_loss(emb, labels, distance=distance, loss="soft_margin").item() == pytest.approx(
        math.log(2)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_types(dtype):
    emb = LINE.to(dtype, copy=True).requires_grad_()
    loss = reference.triplet_loss(emb, LINE_LABELS)
    loss.backward()
    _, _, d_ap, d_an = reference.mine(emb, LINE_LABELS, positive="hard", negative="hard")
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    assert loss.dtype == d_ap.dtype == d_an.dtype == computed
    assert loss.item() == pytest.approx(1.8, rel=1e-6)
    assert emb.grad is not None
    assert emb.grad.dtype == dtype
    assert same(emb.grad * 5, [[-1], [0], [2], [-2], [1]], 0.01)  # 1/5 has no short binary form


# The hash


@pytest.mark.parametrize("seed", [0, 1, -1, 1234567890123456789, 2**63 - 1, -(2**63)])
def test_the_hash_is_that_of_plain_integers(seed):
    expected = [[hash_by_plain_integers(seed, a, c) for c in range(40)] for a in range(30)]
    cpu = torch.device("cpu")
    assert reference.noise(seed, 30, 40, cpu).tolist() == expected
    assert reference.noise(torch.tensor(seed), 30, 40, cpu).tolist() == expected


def test_the_hash_stays_as_it_is():
    golden = {
        0: [[0x1854B4F0, 0x33088CA2, 0x5466D6A6], [0xF863FAD0, 0x947C2E3F, 0xCCB51FC1]],
        1: [[0xB41E90DF, 0x12D41DB0, 0xC1812DA6], [0x296BE0AA, 0x92C00B52, 0x40562205]],
        -1: [[0x4D511002, 0x6BFBB560, 0x8BA7C181], [0xA80E5EBF, 0xE443FFBC, 0x6A2C089F]],
        -(2**63): [[0x71694E0E, 0xB6B3AF88, 0xB7315D41], [0xA92BCC23, 0x989F56E4, 0xDDB6DFB0]],
    }
    for seed, expected in golden.items():
        assert reference.noise(seed, 2, 3, torch.device("cpu")).tolist() == expected


def test_one_anchor_never_draws_the_same_hash_twice():
    noise = reference.noise(5, 3, 100_000, torch.device("cpu"))
    assert all(len(row.unique()) == 100_000 for row in noise)


def test_the_oracle_needs_nothing_but_torch_and_the_words():
    assert reference.__file__ is not None
    modules = set()
    for file in Path(reference.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        modules |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        modules |= {
            alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
        }
    standard = {"__future__", "collections.abc", "functools", "importlib", "math", "typing"}
    # `from tripletops import reference` is how the module of an objective reaches the rest.
    assert modules == standard | {"torch", "tripletops", "tripletops._words"}
