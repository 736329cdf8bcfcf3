"""What a step launches beside its arithmetic, and that nothing in it waits for the device.

Kernels are stubbed and tensors are fake: whatever asks for a value fails.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from tripletops._words import FUNCTION, OBJECTIVE
from tripletops.backends.triton.steps import PAIRWISE, step

EVERYDAY, LARGE = 512, 8192
CHOICES = {choice.name: choice for choice in FUNCTION["triplet_loss"].choices}
BATCH_HARD = [(EVERYDAY, 5, 10.0), (LARGE, 12, 10.0)]


@pytest.mark.parametrize(("count", "launches", "times_emb"), BATCH_HARD)
def test_a_step_of_batch_hard_is_a_few_launches(count, launches, times_emb):
    counted = step("batch_hard_loss", count)
    assert counted.launches <= launches
    assert counted.bytes <= times_emb * count * 128 * 4
    assert not counted.waits


@pytest.mark.parametrize("count", [EVERYDAY, LARGE])
@pytest.mark.parametrize("distance", ["euclidean", "sqeuclidean", "cosine"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_no_distance_or_type_costs_many_launches(count, distance, dtype):
    assert step("batch_hard_loss", count, dtype=dtype, distance=distance).launches <= 12


@pytest.mark.parametrize("count", [EVERYDAY, LARGE])
@pytest.mark.parametrize("negative", CHOICES["negative"].words)
@pytest.mark.parametrize("positive", CHOICES["positive"].words)
def test_no_rule_waits(positive, negative, count):
    counted = step("triplet_loss", count, positive=positive, negative=negative)
    assert not counted.waits
    assert counted.launches <= 40


@pytest.mark.parametrize("name", FUNCTION)
def test_functions_over_tuples_read_back_one_size_and_wait_for_nothing_else(name):
    counted = step(name, LARGE)
    tuples = OBJECTIVE[FUNCTION[name].objective].name != "triplet"
    assert counted.waits <= Counter({"read_back": 2 if tuples else 0})  # forward, backward
    assert len(counted.walks) == sum(counted.kernels[kernel] for kernel in PAIRWISE) > 0


def test_waits_are_seen(monkeypatch):
    from tripletops.backends.triton import catalogue

    def waiting(what):
        x = torch.zeros(3)
        return {
            "_local_scalar_dense": lambda: x.new_empty(3)[x.argmax()],
            "lift_fresh": lambda: torch.tensor([1.0, 2.0]),
            "scalar_tensor": lambda: x.where(x > 0, 0),
            "nonzero": lambda: x[x > 0],
        }[what]()

    for what in ("lift_fresh", "scalar_tensor"):
        monkeypatch.setattr(catalogue, "run", lambda *_, what=what: waiting(what))
        assert step("mine", 4).waits[what]
    for what in ("_local_scalar_dense", "nonzero"):
        monkeypatch.setattr(catalogue, "run", lambda *_, what=what: waiting(what))
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException), match=what):
            step("mine", 4)
