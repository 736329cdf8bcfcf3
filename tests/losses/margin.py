"""``"margin"``: [d_ap − d_an + margin]₊."""

from __future__ import annotations

import pytest
import torch

from tests.support.tolerances import Gaps, Slopes
from tests.support.worked import LINE, LINE_LABELS, tensor
from tests.support.worked_triplets import (
    S_AN_BY_ANCHOR,
    S_AN_BY_NEGATIVE,
    S_AP_BY_ANCHOR,
    loss_and_gradients,
    pair_loss,
    same,
)
from tripletops import reference

NUMBERS = ({"margin": 0.2}, {"margin": 1.5}, {"margin": 0.0})


def slopes(gaps: Gaps) -> Slopes:
    """The hinge may flip where it is nearer to its kink than the distances are certain."""
    gap = gaps.d_ap - gaps.d_an + gaps.numbers["margin"]
    flips = gap.abs() <= gaps.off
    slope, none, one = ((gap > 0) | flips).double(), torch.zeros_like(gap), torch.ones_like(gap)
    return Slopes(slope, slope, one, flips.double(), none, one, flips, none)


def test_margin_on_a_line():
    # Batch-hard, margin .2: 3 − 2.5 + .2, 2 − 1.5 + .2, 3 − .5 + .2, 4.5 − .5 + .2, 4.5 − 4 + .2
    each = reference.triplet_loss(LINE, LINE_LABELS, reduction="none")
    assert same(each, [0.7, 0.7, 2.7, 4.2, 0.7])
    assert same(reference.triplet_loss(LINE, LINE_LABELS), 1.8)
    assert same(reference.triplet_loss(LINE, LINE_LABELS, reduction="mean_nonzero"), 1.8)
    # The derivative of |x_i − x_j| is ±1; by anchor (positive, negative), what x_0 … x_4 get:
    #   0 (2, 3):   0  0 +1 −1  0       x_0: −1 for the positive on its right, +1 for the negative there
    #   1 (2, 3):   0  0 +1 −1  0
    #   2 (0, 3):  −1  0  0 +1  0
    #   3 (4, 2):   0  0 −1  0 +1
    #   4 (3, 2):   0  0 +1 −1  0
    loss, gradient, _ = loss_and_gradients(LINE, LINE_LABELS, reduction="sum")
    assert loss == pytest.approx(9.0)
    assert same(gradient, [[-1], [0], [2], [-2], [1]])


def test_margin_has_no_slope_at_the_kink():
    # One anchor at 0, positive at 1, negative at 3, margin 2: 1 − 3 + 2 = 0.
    options = {"ref_emb": tensor([[1], [3]]), "ref_labels": torch.tensor([0, 1])}
    loss, by_anchor, by_ref = loss_and_gradients(tensor([[0]]), torch.tensor([0]), margin=2.0, **options)
    assert loss == 0
    assert not by_anchor.any()
    assert not by_ref.any()


def test_margin_euclidean_gradient():
    # From (0, 0) to p = (3, 4): 5; to n = (12, −5): 13. With margin 10: 5 − 13 + 10 = 2.
    options = {"ref_emb": tensor([[3, 4], [12, -5]]), "ref_labels": torch.tensor([0, 1])}
    loss, by_anchor, by_ref = loss_and_gradients(tensor([[0, 0]]), torch.tensor([0]), margin=10.0, **options)
    assert loss == 2
    # (a − p)/5 − (a − n)/13;  (p − a)/5;  −(n − a)/13
    assert same(by_anchor, [[-3 / 5 + 12 / 13, -4 / 5 - 5 / 13]])
    assert same(by_ref, [[3 / 5, 4 / 5], [-12 / 13, 5 / 13]])


def test_margin_sqeuclidean_gradient():
    # 25 − 169 + 200 = 56
    options = {"ref_emb": tensor([[3, 4], [12, -5]]), "ref_labels": torch.tensor([0, 1])}
    loss, by_anchor, by_ref = loss_and_gradients(
        tensor([[0, 0]]), torch.tensor([0]), margin=200.0, distance="sqeuclidean", **options
    )
    assert loss == 56
    # 2(a − p) − 2(a − n) = 2(n − p);  2(p − a);  −2(n − a)
    assert same(by_anchor, [[18, -18]])
    assert same(by_ref, [[6, 8], [-24, 10]])


def test_margin_cosine_gradient():
    # .4 − .2 + .2; d = 1 − S
    loss, by_anchor, by_pair = pair_loss(distance="cosine")
    assert loss == pytest.approx(0.4, rel=1e-15)
    assert same(by_anchor, tensor([S_AN_BY_ANCHOR]) - tensor([S_AP_BY_ANCHOR]))
    assert same(by_pair, tensor([[-0.128, 0.096], S_AN_BY_NEGATIVE]))


def test_margin_defaults_to_euclidean():
    assert pair_loss(loss="margin", margin=1.0)[0] == pair_loss(margin=1.0, distance="euclidean")[0]
