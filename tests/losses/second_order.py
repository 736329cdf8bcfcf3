"""``"second_order"``: softplus((½S_an² − S_ap + ½S_ap²)/τ)."""

from __future__ import annotations

import math

import pytest

from tests.support.tolerances import Gaps, Slopes, softplus_slopes
from tests.support.worked_triplets import pair_loss, same

NUMBERS = ({"temperature": 1.0}, {"temperature": 0.1})


def slopes(gaps: Gaps) -> Slopes:
    """The slopes are σ/τ times 1 − S_ap and S_an, both of which hold what S is rounded by."""
    rate, s_an = 1 / gaps.numbers["temperature"], 1 - gaps.d_an
    z = (s_an.square() / 2 - 0.5 + gaps.d_ap.square() / 2) * rate
    by_ap, by_an = rate * gaps.d_ap, rate * (s_an.abs() + gaps.d_an)
    floor = rate * (gaps.floor + gaps.kind.eps)
    return softplus_slopes(gaps, z, by_ap, by_an, rate, bend=2 * rate * gaps.off, floor=floor)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_second_order(temperature):
    # ½·.8² − .6 + ½·.6² = .32 − .6 + .18 = −.1: ln(1 + e^−.1) = ln 1.90483742 = 0.64439666,
    # and at τ = ½ ln(1 + e^−.2) = ln 1.81873075 = 0.59813887
    loss, by_anchor, by_pair = pair_loss(loss="second_order", temperature=temperature)
    assert loss == pytest.approx({1.0: 0.64439666, 0.5: 0.59813887}[temperature], abs=1e-8)
    # σ(−.1/τ)/τ · (S_an·dS_an − (1 − S_ap)·dS_ap), the pair weights being .8 and .4
    slope = 1 / (1 + math.exp(0.1 / temperature)) / temperature
    assert same(by_anchor, [[0, (0.8 * 0.3 - 0.4 * 0.4) * slope]])
    assert same(
        by_pair, [[-0.4 * 0.128 * slope, 0.4 * 0.096 * slope], [0.8 * 0.072 * slope, -0.8 * 0.096 * slope]]
    )


def test_second_order_defaults_to_cosine():
    assert pair_loss(loss="second_order")[0] == pair_loss(loss="second_order", distance="cosine")[0]
