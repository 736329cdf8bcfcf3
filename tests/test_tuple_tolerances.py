"""The checks of objectives over many tuples themselves: an error above what is promised is found."""

from __future__ import annotations

from itertools import product
from unittest import mock

import pytest
import torch

from tests.support.batches import Batch, random_batch
from tests.support.calls import DISTANCES, REDUCTIONS
from tests.support.oracle import Truth
from tests.support.tuples import ManyTuples, Outcome, calls_of, check_tuples, run_tuples, unit_of

EVERY_CALL = [(name, distance) for distance in DISTANCES for name in calls_of(distance)]

pytestmark = pytest.mark.usefixtures("one_thread")


def check_found(truth: Truth, call: ManyTuples, reduction: str, what: str) -> None:
    """That the checks refuse a result which is 1 % off where it is largest, in its loss or in a gradient."""

    def spoiled(batch: Batch, call: ManyTuples) -> Outcome:
        loss, gradients, active = run_tuples(batch, call)
        part = {"loss": loss, "emb": gradients[0], "ref_emb": gradients[1], "beta": gradients[-1]}[what]
        rows = part if part.dim() == 2 else part.reshape(-1, 1)
        rows[rows.square().sum(1).argmax()] *= 1.01
        return loss, gradients, active

    found = pytest.raises(AssertionError, match=f"loss of {call.function}|gradient of {what} of")
    with mock.patch("tests.support.tuples.run_tuples", spoiled), found:
        check_tuples(truth, call, reduction)


@pytest.mark.parametrize(("name", "distance"), EVERY_CALL)
def test_wrong_results_are_found(name, distance):
    for dtype, reduction in product((torch.float32, torch.float64), REDUCTIONS):
        truth = Truth(random_batch(33, 5, 40, classes=5, seed=3, dtype=dtype), distance)
        call = calls_of(distance, unit_of(truth), classes=5)[name]
        for what in ("loss", "emb", "ref_emb", *(() if call.beta is None else ("beta",))):
            check_found(truth, call, reduction, what)
