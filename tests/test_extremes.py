"""Finite rows of any size: tiny ones, and some far away from all others."""

from __future__ import annotations

import itertools

import pytest
import torch
from extremes import (
    ALWAYS,
    COSINE,
    EUCLIDEAN,
    HUGE,
    OUTLIER_LOSSES,
    Outlier,
    check_huge,
    check_others,
    check_rows_that_differ_by_a_tiny_number,
    check_tiny_cosine,
    check_tiny_euclidean,
    nearly_parallel,
)
from helpers import DTYPES, Objective, Truth, check


@pytest.mark.parametrize("name", EUCLIDEAN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_subnormal_rows(name, dtype):
    check_tiny_euclidean(name, dtype)


@pytest.mark.parametrize("name", COSINE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiny_rows", [[3], [3, 8], list(range(12))])
def test_gradients_of_the_cosine_of_subnormal_rows(name, dtype, tiny_rows):
    check_tiny_cosine(name, dtype, tiny_rows)


@pytest.mark.parametrize("name", EUCLIDEAN)
def test_gradients_of_rows_that_differ_by_a_tiny_number(name):
    check_rows_that_differ_by_a_tiny_number(name)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("count", "width"), [(96, 3), (600, 8), (600, 33)])
def test_picks_among_rows_that_are_nearly_parallel(count, width, seed):
    truth = Truth(nearly_parallel(count, width, seed), "cosine")
    for positive, negative in (("hard", "hard"), ("easy", "semihard"), ("easy", "easy")):
        check(truth, positive, negative, Objective("cosine"))


@pytest.mark.parametrize("name", EUCLIDEAN)
@pytest.mark.parametrize("dtype", HUGE)
def test_nothing_is_nan_where_distances_are_too_large(name, dtype):
    margin = float(torch.finfo(dtype).max) / 8
    options = {key: margin if value == ALWAYS else value for key, value in EUCLIDEAN[name].items()}
    check_huge(name, dtype, EUCLIDEAN[name])
    check_huge(name, dtype, options)
    if name in ("batch_hard_loss", "batch_all_loss"):
        check_huge(name, dtype, {"loss": "soft_margin"})


@pytest.mark.parametrize("name", OUTLIER_LOSSES)
@pytest.mark.parametrize("size", [1e2, 1e5, 1e10, 1e20, 1e22, 1e23, 1e28])
def test_outliers_do_not_spoil_the_others(name, size):
    for count, offset in itertools.product((8, 40), (0.0, 1e3)):
        for place in (0, count // 2, count - 1):
            check_others(name, Outlier(count, 8, (place,), size, offset))
    check_others(name, Outlier(100, 33, (50,), size))
    check_others(name, Outlier(24, 16, (1, 9, 20), size))


@pytest.mark.parametrize("name", OUTLIER_LOSSES)
@pytest.mark.parametrize("size", [1e5, 1e30, 1e100])
def test_outliers_in_float64(name, size):
    for places in ((0,), (20,), (3, 21)):
        check_others(name, Outlier(40, 8, places, size, dtype=torch.float64))
