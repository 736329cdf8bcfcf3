"""Every kernel and tile that ships for sm_80, executed from its PTX by a call that is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.support.backends import EMULATED
from tests.support.batches import random_batch
from tests.support.calls import DTYPES
from tests.support.ops import CASES, CLASSES, Case
from tripletops.backends.triton import tiles

pytestmark = pytest.mark.skipif(not EMULATED, reason="for the emulator of tests/ptx: make test-ptx")

COUNT, WIDTH = 70, 20  # more than a tile of rows; not all of one
EVERY_CASE = [case for cases in CASES.values() for case in cases]


def outcome(function: Any, emb: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The floats of a result, and their gradient."""
    emb = emb.detach().requires_grad_()
    result = function(emb, labels, **options)
    floats = torch.cat([part.reshape(-1) for part in tree_leaves(result) if part.is_floating_point()])
    gradient = torch.zeros_like(emb)
    if floats.requires_grad:
        (gradient,) = torch.autograd.grad(floats.sum(), emb)
    return floats.detach().double(), gradient.double()


def check(case: Case, dtype: torch.dtype) -> None:
    """Within 1e-5 of the largest number of its kind, and what the type of the gradient rounds off."""
    batch = random_batch(COUNT, WIDTH, classes=CLASSES).to(dtype)
    function, kind = case.public(), torch.finfo(dtype)
    found = outcome(function, batch.emb, batch.labels)
    expected = outcome(function, batch.emb.double(), batch.labels, backend="reference")
    rounding = kind.eps * expected[1].abs() + kind.eps * kind.smallest_normal
    for value, right, own in zip(found, expected, (0.0, rounding), strict=True):
        what = f"{case}, {dtype}"
        assert torch.equal(value.isnan(), right.isnan()), what  # no pick
        value, right = value.nan_to_num(), right.nan_to_num()
        assert ((value - right).abs() - own <= 1e-5 * right.abs().max()).all(), what


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kernel_that_ships_is_executed(emulator, monkeypatch, dtype):
    from tests.ptx.catalogue import key_of
    from tripletops.backends.triton.catalogue import compilations

    monkeypatch.setenv("TRIPLETOPS_AUTOTUNE", "1")  # every tile of the table is run, the first one is used
    monkeypatch.setattr(tiles, "_chosen", {})
    monkeypatch.setattr(tiles, "_seconds", lambda call, device: float(call() is None))
    for case in EVERY_CASE:
        check(case, dtype)
    name = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}[
        dtype
    ]
    shipped = {
        key_of(record.function, record.signature, record.constants)
        for record in compilations()
        if record.target == "sm_80" and record.dtype == name
    }
    assert shipped
    assert not shipped - emulator.executed
