"""FaceNet's negative for every pair of an anchor and a positive: the nearest one strictly farther."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.backends import Backend
from tests.support.batches import Batch
from tests.support.oracle import Truth
from tests.support.terms import Terms, Triples, errors_of, triplets_of
from tests.support.tuples import ManyTuples, run_tuples
from tests.support.worked import (
    LINE,
    LINE_LABELS,
    RANDOM_ROWS,
    distances_of,
    random_rows,
    reductions_of,
    same,
    tensor,
    with_gradients,
)
from tripletops import reference
from tripletops._words import DISTANCE, REDUCTION

pytestmark = pytest.mark.usefixtures("one_thread")


# On paper


def test_a_line():
    # Each positive with the nearest negative beyond it, d_ap − d_an + 2:
    #   0:  1 → 1 − 2.5,  2 → 3 − 7            .5, −2
    #   1:  0 → 1 − 1.5,  2 → 2 − 6            1.5, −2
    #   2:  0 → 3 − 4,    1 → 2 − 4            1, 0
    #   3:  4 → 4.5 − 2.5, as none is farther  4
    #   4:  3 → 4.5 − 6                        .5              8 pairs, 5 above 0
    expected = {"none": [0.5, 1.5, 1, 4, 0.5], "sum": 7.5, "mean": 7.5 / 8, "mean_nonzero": 1.5}
    for reduction, value in expected.items():
        assert same(reference.semi_hard_loss(LINE, LINE_LABELS, margin=2.0, reduction=reduction), value)
    # What x_0 … x_4 get:
    #   0 1 3:   0 +1  0 −1  0       2 0 4:  −1  0 +2  0 −1       4 3 1:   0 +1  0 −1  0
    #   1 0 3:  −1 +2  0 −1  0       3 4 0:  +1  0  0 −2 +1
    _, (gradient,) = with_gradients(
        lambda emb: reference.semi_hard_loss(emb, LINE_LABELS, margin=2.0, reduction="sum"), LINE
    )
    assert same(gradient, [[-1], [4], [2], [-5], [0]])


@pytest.mark.parametrize("positive", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("side", [1, -1])
def test_ties_go_to_the_first_candidate(positive, side):
    # Negatives at ±2, either of them first: beyond a positive at 1, but not beyond one at 2 or 5, where the
    # farthest is taken.
    options = {"ref_labels": torch.tensor([0, 1, 1]), "margin": 10.0}
    ref_emb = tensor([[positive], [side * 2.0], [side * -2.0]])
    loss, (_, by_ref) = with_gradients(
        lambda emb, ref_emb: reference.semi_hard_loss(emb, torch.tensor([0]), ref_emb=ref_emb, **options),
        tensor([[0]]), ref_emb,
    )  # fmt: skip
    assert loss == positive - 2 + 10
    assert by_ref.tolist() == [[1], [-side], [0]]


def test_the_negative_is_strictly_farther():
    # Positive 2 away, negatives 2, 3 and 4 away: 2 − 3 + 5.
    options = {"ref_emb": tensor([[2], [-2], [4], [-3]]), "ref_labels": torch.tensor([0, 1, 1, 1])}
    for distance, expected in {"euclidean": 2 - 3 + 5, "sqeuclidean": 4 - 9 + 5}.items():
        loss = reference.semi_hard_loss(
            tensor([[0]]), torch.tensor([0]), margin=5.0, distance=distance, **options
        )
        assert loss == expected


def test_anchors_need_a_positive_and_a_negative():
    # Rows 2 and 3 are alone in their classes. Rows 0 and 1: 1 − .75, as no negative is farther than 1.
    emb, labels = tensor([[0], [1], [0.25], [0.75]]), torch.tensor([0, 0, 1, 2])
    assert same(reference.semi_hard_loss(emb, labels, margin=0.0, reduction="none"), [0.25, 0.25, 0, 0])


@pytest.mark.parametrize("rows", RANDOM_ROWS)
@pytest.mark.parametrize("distance", DISTANCE)
def test_by_loops(rows, distance):
    emb, labels = RANDOM_ROWS[rows]
    found = []
    for positives, negatives in distances_of(emb, labels, distance):
        # TensorFlow's rule: the smallest negative distance beyond the positive's, else the largest.
        beyond = [min((n for n in negatives if n > p), default=max(negatives)) for p in positives]
        found.append([max(p - n + 0.3, 0.0) for p, n in zip(positives, beyond, strict=True)])
    for reduction in REDUCTION:
        loss = reference.semi_hard_loss(emb, labels, margin=0.3, distance=distance, reduction=reduction)
        assert same(loss, reductions_of(found)[reduction], 1e-12)


def test_a_batch_of_three_hundred():
    emb, labels = random_rows(300, 16, 30)
    loss, (gradient,) = with_gradients(lambda emb: reference.semi_hard_loss(emb, labels), emb)
    assert loss > 0
    assert gradient.isfinite().all()


# For the backends


def calls(distance: str, unit: float, classes: int) -> dict[str, ManyTuples]:
    return {"": ManyTuples("semi_hard_loss", {"distance": distance, "margin": 0.2 * unit})}


def limits(distance: str, unit: float) -> list[ManyTuples]:
    """From a margin of 0 to one so large that everything is active."""
    margins = [size * unit for size in (0.0, 0.03, 0.5, 4.0, 1000.0)]
    return [ManyTuples("semi_hard_loss", {"distance": distance, "margin": margin}) for margin in margins]


def kinks() -> list[ManyTuples]:
    return [ManyTuples("semi_hard_loss", {"margin": 5.0})]


def whole_numbers() -> list[ManyTuples]:
    return [ManyTuples("semi_hard_loss", {"margin": 2.0})]


def of_equal_rows(distance: str, positives: int, negatives: int) -> list[tuple[ManyTuples, float]]:
    return [(ManyTuples("semi_hard_loss", {"distance": distance, "margin": 0.25}), 0.25)]


def terms(truth: Truth, call: ManyTuples, picks: tuple[Tensor, Tensor] | None, exact: bool) -> list[Terms]:
    found, error = Terms(truth), errors_of(truth)
    for rows, p, n, is_positive, is_negative in triplets_of(truth):
        all_of = Triples(truth, error, call.options["margin"], rows, p, n)
        threshold = truth.square[all_of.to_p][:, :, None]
        square = truth.square[all_of.to_n].where(is_negative, -math.inf)[:, None]
        pick = eligible(square, threshold, 0.0).int().argmax(2, keepdim=True)
        possible = torch.zeros(all_of.z.shape, dtype=torch.bool).scatter(2, pick, True)
        if not exact:
            possible |= eligible(square, threshold, truth.bound)
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
        found.count += int(is_positive.sum())
        found.nonzero += int(active.sum())
        found.flips += int(may_flip.sum())
        found.value[rows] = (z * active).sum((1, 2))
        found.jump[rows] = (most.relu() - least.relu()).where(is_positive, 0).sum(1)
        found.off[rows] = (far * counts).sum(1) + found.jump[rows]
        found.size[rows] = (all_of.size * (picked & counts[:, :, None])).sum((1, 2))
        all_of.spread(found.slope, active.double())
        found.wobble.index_put_(all_of.to_p, may_flip.double(), accumulate=True)
        found.wobble.index_put_(all_of.to_n, doubtful.double().sum(1), accumulate=True)
    return [found]


def eligible(square: Tensor, threshold: Tensor, bound: float) -> Tensor:
    """The negatives that may be picked if squared distances are off by `bound`."""
    surely = square > threshold + bound
    nearest = square.where(surely, math.inf).amin(2, keepdim=True)
    fallback = ~surely.any(2, keepdim=True) & (square >= square.amax(2, keepdim=True) - bound)
    return ((square > threshold - bound) & (square <= nearest + bound)) | fallback


# On every backend


def anchors_need_both(backend: Backend) -> None:
    """Anchor 0 has negatives only, anchor 1 positives only."""
    batch = Batch(
        torch.tensor([[0.0], [4.0]]), torch.tensor([0, 1]),
        torch.tensor([[0.25], [5.0]]), torch.tensor([1, 1]), torch.tensor([-1, -1]),
    )  # fmt: skip
    losses, gradients, _ = run_tuples(batch, ManyTuples("semi_hard_loss", {"reduction": "none"}))
    assert not losses.any()
    assert not any(gradient.any() for gradient in gradients)


ON_EVERY_BACKEND = (anchors_need_both,)
