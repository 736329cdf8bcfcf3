"""The exact expectations of eps-noise against sums over all labelings, and what its cells come to."""

from __future__ import annotations

import itertools
import math

import numpy
import pytest
import torch

from train_ref.computed import noise
from train_ref.computed.noise import NoiseSettings, Objective

LOSSES = [(loss, easy) for loss in ("triplet", "margin") for easy in (False, True)]


def enumerated(points, keep, margin, beta, loss, easy):
    """The expected sum over anchors by brute force: every labeling, every triplet or pair, plain loops."""
    count = len(points)
    apart = [[math.dist(a, b) for b in points] for a in points]
    total = 0.0
    for labeling in itertools.product((0, 1), repeat=count):
        chance = 1.0
        for place, label in enumerate(labeling):
            chance *= keep if label == (place >= count // 2) else 1 - keep
        for i in range(count):
            positives = [j for j in range(count) if j != i and labeling[j] == labeling[i]]
            negatives = [k for k in range(count) if labeling[k] != labeling[i]]
            if easy:
                positives = sorted(positives, key=lambda j: apart[i][j])[:1]
            if loss == "triplet":
                terms = [max(apart[i][j] - apart[i][k] + margin, 0) for j in positives for k in negatives]
            else:
                terms = [max(apart[i][j] - beta[i] + margin, 0) for j in positives]
                terms += [max(beta[i] - apart[i][k] + margin, 0) for k in negatives]
            total += chance * sum(terms)
    return total


def computed(points, keep, margin, beta, loss, easy):
    settings = NoiseSettings(loss=loss, easy=easy, keep=keep, margin=margin)
    objective = Objective.of(settings, points.shape[-2])
    return objective.per_anchor(noise.distances(points), beta).sum(-1)


@pytest.mark.parametrize(("loss", "easy"), LOSSES)
@pytest.mark.parametrize("count", [4, 6])
@pytest.mark.parametrize("keep", [0.6, 0.9, 1.0])
def test_expectation_is_the_sum_over_all_labelings(loss, easy, count, keep):
    generator = torch.Generator().manual_seed(count)
    for scale in (0.3, 1.0, 3.0):
        points = scale * torch.randn(count, 2, generator=generator, dtype=torch.float64)
        beta = 0.5 + torch.rand(count, generator=generator, dtype=torch.float64)
        expected = enumerated(points.tolist(), keep, 0.7, beta.tolist(), loss, easy)
        assert computed(points, keep, 0.7, beta, loss, easy).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("loss", "easy"), LOSSES)
def test_equal_distances_in_any_order(loss, easy):
    """Points on a square and duplicates: ties do not change the expectation."""
    corners = [[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    beta = torch.ones(6, dtype=torch.float64)
    points = torch.tensor(corners, dtype=torch.float64)
    expected = enumerated(corners, 0.8, 1.0, [1.0] * 6, loss, easy)
    assert computed(points, 0.8, 1.0, beta, loss, easy).item() == pytest.approx(expected, abs=1e-12)


def test_a_batch_of_embeddings_is_each_of_them():
    points = torch.randn(3, 8, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    beta = torch.ones(8, dtype=torch.float64)
    for loss, easy in LOSSES:
        whole = computed(points, 0.8, 1.0, beta, loss, easy)
        alone = torch.stack([computed(each, 0.8, 1.0, beta, loss, easy) for each in points])
        torch.testing.assert_close(whole, alone, rtol=1e-13, atol=0)


def test_four_points_by_hand():
    """Two collapsed classes of two, α=1 apart, p=.8. From an anchor, own is at 0 and the others at 1. Plain:
    (own, other) has loss 0; (other, own) weighs pq and loses 2; (other, other) weighs pq and loses 1."""
    p, q = 0.8, 0.2
    points = noise.collapsed(4, 1.0)
    beta = torch.ones(4, dtype=torch.float64)
    plain = 4 * (2 * p * q * 2 + 2 * p * q * 1)
    assert computed(points, p, 1.0, beta, "triplet", False).item() == pytest.approx(plain, abs=1e-14)
    # Own is the positive wherever it has the anchor's label, at loss 0. Else the first other is, and own is a
    # negative that loses 2.
    first = p * q * q + q * p * p  # anchor and first other agree, own does not
    second = p * q * p * q + q * p * q * p  # anchor and second other agree, own and the first do not
    one_negative_more = p * q * q * p + q * p * p * q  # first is the positive, the second other a negative
    easy = 4 * (first * 2 + one_negative_more * 1 + second * (2 + 1))
    assert computed(points, p, 1.0, beta, "triplet", True).item() == pytest.approx(easy, abs=1e-14)
    # Margin, β=1: own (0) loses 2 as a negative, 2pq; an other (1) loses 1 either way.
    margin = 4 * (2 * p * q * 2 + 2 * 1)
    assert computed(points, p, 1.0, beta, "margin", False).item() == pytest.approx(margin, abs=1e-14)


@pytest.mark.parametrize(("loss", "easy"), LOSSES)
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_gradients_are_finite(loss, easy, scale):
    """Also where all points coincide."""
    points = scale * torch.randn(8, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    points.requires_grad_(True)
    Objective.of(NoiseSettings(loss=loss, easy=easy, points=8))(points).backward()
    assert torch.isfinite(points.grad).all()
    assert scale == 0 or points.grad.abs().max() > 0


@pytest.mark.parametrize("loss", ["triplet", "margin"])
def test_without_noise_a_spread_embedding_has_no_loss(loss):
    settings = NoiseSettings(loss=loss, keep=1.0, points=12)
    beta = torch.full((12,), 1.55, dtype=torch.float64)
    points = noise.spread(12, 0.5, 2.6)
    assert torch.pdist(points[:6]).max() == pytest.approx(0.5)
    assert Objective.of(settings)(points, beta).item() == 0
    noisy = NoiseSettings(loss=loss, keep=0.9, points=12)
    assert Objective.of(noisy)(points, beta) > Objective.of(noisy)(noise.collapsed(12, 2.0))


def test_simplices_have_the_distances_they_are_asked_for():
    points = noise.simplices(10, 0.5, 2.0)
    apart = torch.cdist(points, points)
    torch.testing.assert_close(torch.pdist(points[:5]), torch.full((10,), 0.5, dtype=torch.float64))
    torch.testing.assert_close(apart[:5, 5:], torch.full((5, 5), 2.0, dtype=torch.float64))


def test_weights_of_far_points_are_those_of_the_losses():
    """The weights by rank against the loss's own, the anchor's class first."""
    keep, count = 0.8, 10
    labels = noise.labels_of(keep, count)
    apart = torch.arange(1.0, count, dtype=torch.float64).expand(1, count - 1)
    first = noise.Labels(labels.own[:, :1], labels.others[:, :1])
    _, nearest, other = noise._nearest(apart, first)
    for rank in range(1, count):
        own = int(rank < count // 2)
        before = min(rank - 1, count // 2 - 1)
        positive, negative = noise.pair_weights(keep, before, rank - 1 - before, own)
        assert positive == pytest.approx(nearest.sum(0)[0, rank - 1].item(), abs=1e-15)
        assert negative == pytest.approx((first.own * other).sum(0)[0, rank - 1].item(), abs=1e-15)
        if rank > 1:
            forward, reverse = noise.triplet_weights(keep, 1, before - 1, rank - 1 - before, own)
            far = rank - 1
            assert forward == pytest.approx((nearest[..., 0] * other[..., far]).sum().item(), abs=1e-15)
            assert reverse == pytest.approx(nearest[..., far].sum().item(), abs=1e-15)


@pytest.mark.parametrize(("loss", "apart"), [("triplet", 1.0), ("margin", 2.0)])
def test_with_noise_the_classes_collapse(loss, apart):
    settings = NoiseSettings(loss=loss, keep=0.8, points=12, starts=8, steps=800)
    measures = noise.compute(settings, 0).measures
    assert measures["smallest loss found"] == pytest.approx(measures["loss, collapsed"], abs=1e-5)
    assert max(measures["diameter of class 1"], measures["diameter of class 2"]) < 1e-3
    assert measures["smallest distance between classes"] == pytest.approx(apart, abs=1e-3)
    assert measures["loss, simplices"] == pytest.approx(measures["loss, collapsed"], abs=1e-12)


@pytest.mark.parametrize("loss", ["triplet", "margin"])
def test_with_easy_positives_they_do_not(loss):
    settings = NoiseSettings(loss=loss, easy=True, keep=0.8, points=16, starts=4, steps=300)
    found, again = noise.compute(settings, 3), noise.compute(settings, 3)
    assert found.measures["smallest loss found"] < found.measures["loss, each class in two modes"]
    assert found.measures["loss, each class in two modes"] < found.measures["loss, collapsed"]
    assert found.measures == again.measures
    for name, array in found.arrays.items():
        numpy.testing.assert_array_equal(array, again.arrays[name])
    assert (noise.compute(settings, 4).arrays["points"] != found.arrays["points"]).any()


@pytest.mark.parametrize("changes", [{"loss": "other"}, {"keep": 0.5}, {"keep": 1.1}, {"points": 10}])
def test_settings_that_make_no_sense_are_named(changes):
    [name] = changes
    with pytest.raises(ValueError, match=f"--{name}"):
        NoiseSettings(**changes)
