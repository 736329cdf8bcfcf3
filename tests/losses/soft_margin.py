"""``"soft_margin"``: softplus(d_ap − d_an)."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.tolerances import Gaps, Slopes, softplus_slopes
from tests.support.worked import tensor
from tests.support.worked_triplets import (
    S_AN_BY_ANCHOR,
    S_AN_BY_NEGATIVE,
    S_AP_BY_ANCHOR,
    loss_and_gradients,
    pair_loss,
    same,
)


def slopes(gaps: Gaps) -> Slopes:
    gap = gaps.d_ap - gaps.d_an
    one, none = torch.ones_like(gap), torch.zeros_like(gap)
    return softplus_slopes(gaps, gap, one, one, rate=1.0, bend=gaps.off, floor=none)


def test_soft_margin():
    # softplus(.4 − .2) = ln(1 + e^.2) = ln 2.22140276 = 0.79813887; its slope is 1/(1 + e^−.2)
    loss, by_anchor, by_pair = pair_loss(distance="cosine", loss="soft_margin", margin=77.0)
    assert loss == pytest.approx(0.79813887, abs=1e-8)
    slope = 1 / (1 + math.exp(-0.2))
    assert same(by_anchor, slope * (tensor([S_AN_BY_ANCHOR]) - tensor([S_AP_BY_ANCHOR])))
    assert same(by_pair, slope * tensor([[-0.128, 0.096], S_AN_BY_NEGATIVE]))


@pytest.mark.parametrize(("gap", "expected"), [(1e4, 1e4), (-1e4, 0.0), (30.0, 30 + 9.357622968839299e-14)])
def test_soft_margin_far_out(gap, expected):
    # softplus(30) = 30 + ln(1 + e^−30), and e^−30 = 9.3576e-14
    emb, labels = tensor([[0], [max(gap, 0)], [max(-gap, 0)]]), torch.tensor([0, 0, 1])
    options = {"loss": "soft_margin", "ref_emb": emb[1:], "ref_labels": labels[1:]}
    loss, by_anchor, _ = loss_and_gradients(emb[:1] + 0.0, labels[:1], **options)
    assert loss == pytest.approx(expected, rel=1e-15, abs=0)
    assert by_anchor.isfinite().all()
