"""What tensor cores do to float32 rows, which the interpreter cannot show: it multiplies exactly.

Keys are |x|²/2 + |y|²/2 − x·y of centred rows. Tensor cores read 11 significant bits of a number, and add up
in float32, rounding towards zero. Here that arithmetic is redone on the CPU: Triton's `tf32x3`, three
products of operands split in two, must keep the promise about picks; `tf32`, one product of the operands as
they are, must not, or this test would show nothing.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.oracle import PICK
from tripletops.backends.triton.tiles import TILES

# Of the tiles that select: the sum over as many dimensions joins the sums before it by an ordinary addition.
DEPTHS = sorted(
    {
        tile.depth
        for table in TILES.values()
        for tile in table["select"][torch.float32]
        if tile.precision == "tf32x3"
    }
)
ADDED_AT_ONCE = 8  # products that one instruction adds to a sum


def truncated(x: Tensor) -> Tensor:
    """float32 without its 13 lowest bits."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def rounded(x: Tensor) -> Tensor:
    """The nearest of the numbers that `truncated` leaves."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def towards_zero(x: Tensor) -> Tensor:
    """float64 → float32."""
    nearest = x.float()
    return torch.where(nearest.double().abs() > x.abs(), torch.nextafter(nearest, torch.zeros(())), nearest)


def multiplied(x: Tensor, y: Tensor, precision: str, depth: int) -> Tensor:
    """x·yᵀ in float32, of rows of it."""
    factors = [(x, y)]
    if precision == "tf32x3":
        x_big, y_big = rounded(x), rounded(y)
        factors = [(x - x_big, y_big), (x_big, y - y_big), (x_big, y_big)]
    total = torch.zeros(len(x), len(y))
    for block in range(0, x.shape[1], depth):
        part = torch.zeros_like(total)
        for a, b in factors:
            for start in range(block, min(block + depth, x.shape[1]), ADDED_AT_ONCE):
                some = slice(start, start + ADDED_AT_ONCE)
                read = truncated(a[:, some]).double(), truncated(b[:, some]).double()
                part = towards_zero(part.double() + read[0] @ read[1].T)
        total = total + part
    return total


def keys(rows: Tensor, precision: str, depth: int) -> Tensor:
    half = (rows.double().square().sum(1) / 2).float()
    return half[:, None] + half - multiplied(rows, rows, precision, depth)


def random_rows(width: int) -> Tensor:
    return torch.randn(40, width, generator=torch.Generator().manual_seed(width))


def opposite_rows(width: int) -> Tensor:
    """Two clusters on either side of the mean, all products of one sign, and mantissas full of ones: nothing
    that is cut off, in operands or sums, makes up for anything else."""
    ones = torch.full((20, width), 2 - 2.0**-23)
    ones -= 2.0**-23 * torch.randint(8, ones.shape, generator=torch.Generator().manual_seed(width))
    return torch.cat([ones, -ones])


def long_and_short_rows(width: int) -> Tensor:
    rows = random_rows(width)
    return rows * torch.logspace(-3, 0, len(rows))[:, None]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("rows_of", [random_rows, opposite_rows, long_and_short_rows])
@pytest.mark.parametrize("width", [3, 16, 128, 512])
def test_keys_by_three_products_keep_the_promise_about_picks(rows_of, width, depth):
    rows = rows_of(width)
    rows = (rows.double() - rows.double().mean(0)).float()
    exact = rows.double()
    square = (exact[:, None] - exact).square().sum(2)
    bound = PICK * (4 + math.sqrt(width)) * exact.square().sum(1).amax()
    # A pick and the extreme it is mistaken for may be off by as much each, in opposite directions.
    off = {
        name: 2 * (2 * keys(rows, name, depth).double() - square).abs().max() for name in ("tf32x3", "tf32")
    }
    assert off["tf32x3"] <= bound
    assert off["tf32"] > bound
