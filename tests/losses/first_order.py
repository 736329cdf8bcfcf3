"""``"first_order"``: softplus((S_an − S_ap)/τ)."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.tolerances import Gaps, Slopes, softplus_slopes
from tests.support.worked_triplets import pair_loss, same

NUMBERS = ({"temperature": 1.0}, {"temperature": 0.1})


def slopes(gaps: Gaps) -> Slopes:
    rate = 1 / gaps.numbers["temperature"]
    z = (gaps.d_ap - gaps.d_an) * rate
    by_d, none = torch.full_like(z, rate), torch.zeros_like(z)
    return softplus_slopes(gaps, z, by_d, by_d, rate, bend=2 * rate * gaps.off, floor=none)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_first_order(temperature):
    # softplus((.8 − .6)/τ): ln(1 + e^.2) = 0.79813887, ln(1 + e^.4) = ln 2.49182470 = 0.91301525
    loss, by_anchor, by_pair = pair_loss(loss="first_order", temperature=temperature)
    assert loss == pytest.approx({1.0: 0.79813887, 0.5: 0.91301525}[temperature], abs=1e-8)
    # σ(.2/τ)/τ · (dS_an − dS_ap)
    slope = 1 / (1 + math.exp(-0.2 / temperature)) / temperature
    assert same(by_anchor, [[0, -0.1 * slope]])  # .3 − .4
    assert same(by_pair, [[-0.128 * slope, 0.096 * slope], [0.072 * slope, -0.096 * slope]])


def test_first_order_defaults_to_cosine():
    assert pair_loss(loss="first_order")[0] == pair_loss(loss="first_order", distance="cosine")[0]
