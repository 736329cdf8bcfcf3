"""Finite rows of any size, through the Triton kernels."""

from __future__ import annotations

import pytest
import torch
from extremes import (
    COSINE,
    EUCLIDEAN,
    OUTLIER_LOSSES,
    Outlier,
    check_others,
    check_tiny_cosine,
    check_tiny_euclidean,
    nearly_parallel,
)
from helpers import DEVICE, Truth, check

TYPES = [
    torch.float16,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(
            DEVICE.type == "cpu", reason="Triton's interpreter converts subnormal bfloat16 numbers wrongly"
        ),
    ),
    torch.float32,
    torch.float64,
]


@pytest.mark.parametrize("name", EUCLIDEAN)
@pytest.mark.parametrize("dtype", TYPES)
def test_gradients_of_subnormal_rows(name, dtype):
    # Gradients divide by distances as they are reported, which here have five bits in float32 and float64.
    check_tiny_euclidean(name, dtype, digits=0.1 if dtype in (torch.float32, torch.float64) else 0.0)


@pytest.mark.parametrize("name", COSINE)
@pytest.mark.parametrize("dtype", TYPES)
def test_gradients_of_the_cosine_of_subnormal_rows(name, dtype):
    for tiny_rows in ([3, 8], list(range(12))):
        check_tiny_cosine(name, dtype, tiny_rows)


@pytest.mark.parametrize("name", OUTLIER_LOSSES)
@pytest.mark.parametrize("size", [1e5, 1e22, 1e28])
def test_outliers_do_not_spoil_the_others(name, size):
    check_others(name, Outlier(8, 8, (0,), size))
    check_others(name, Outlier(40, 8, (20,), size, 1e3))
    check_others(name, Outlier(24, 16, (1, 9, 20), size))


def test_picks_among_rows_that_are_nearly_parallel():
    truth = Truth(nearly_parallel(40, 8, seed=0), "cosine")
    for positive, negative in (("hard", "hard"), ("easy", "semihard")):
        check(truth, positive, negative)
