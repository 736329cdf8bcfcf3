"""Every kernel and tile that ships for sm_80, executed from its PTX by a call whose results are right."""

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
from tripletops._words import DISTANCE, NEGATIVE, POSITIVE
from tripletops.backends.triton import tiles

pytestmark = pytest.mark.skipif(not EMULATED, reason="for the emulator of tests/ptx: make test-ptx")

COUNT, WIDTH = 70, 20  # more than a tile of rows


def executed() -> list[Case]:
    """Each case of each function, and under the cosine, too: there may be zero rows then. And negatives that
    go by a positive which no search has found."""
    drawn = next(name for name, word in POSITIVE.items() if word.draws)
    given = [
        Case("mine", {"positive": drawn, "negative": name})
        for name, word in NEGATIVE.items()
        if word.needs_positive
    ]
    cases = {}
    for case in (*(case for some in CASES.values() for case in some), *given):
        cases[str(case)] = case
        if case.options.get("distance") in DISTANCE:
            cosine = case._replace(options={**case.options, "distance": "cosine"})
            cases[str(cosine)] = cosine
    return [*cases.values()]


EVERY_CASE = executed()


def outcome(case: Case, emb: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The floats of a result, and their gradient."""
    emb = emb.detach().requires_grad_()
    result = case.public()(emb, labels, **options)
    floats = torch.cat([part.reshape(-1) for part in tree_leaves(result) if part.is_floating_point()])
    gradient = torch.zeros_like(emb)
    if floats.requires_grad:
        (gradient,) = torch.autograd.grad(floats.sum(), emb)
    return floats.detach().double(), gradient.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", EVERY_CASE, ids=str)
def test_executed(case, dtype, monkeypatch):
    """Within 1e-5 of the largest number of its kind, and what the type of the gradient rounds off."""
    monkeypatch.setenv("TRIPLETOPS_AUTOTUNE", "1")  # every tile of the table is run, the first one is used
    monkeypatch.setattr(tiles, "_chosen", {})
    monkeypatch.setattr(tiles, "_seconds", lambda call, device: float(call() is None))
    batch, kind = random_batch(COUNT, WIDTH, classes=CLASSES).to(dtype), torch.finfo(dtype)
    found = outcome(case, batch.emb, batch.labels)
    expected = outcome(case, batch.emb.double(), batch.labels, backend="reference")
    rounding = kind.eps * expected[1].abs() + kind.eps * kind.smallest_normal
    for value, right, own in zip(found, expected, (0.0, rounding), strict=True):
        assert torch.equal(value.isnan(), right.isnan())  # no pick
        value, right = value.nan_to_num(), right.nan_to_num()
        assert ((value - right).abs() - own <= 1e-5 * right.abs().max()).all()


def test_these_calls_launch_every_kernel_that_ships():
    """Their launches are written down instead of run, as in `catalogue`."""
    from tests.ptx.catalogue import key_of
    from tripletops.backends.triton.catalogue import _compilation, compilations

    launched = set()
    for dtype in DTYPES:
        batch = random_batch(COUNT, WIDTH, classes=CLASSES).to(dtype)
        for case in EVERY_CASE:
            with tiles.Recorder() as recorder:
                outcome(case, batch.emb, batch.labels)
            for launch in recorder.launches:
                if launch.target in (None, "sm_80"):
                    record = _compilation("sm_80", dtype, launch)
                    launched.add(key_of(record.function, record.signature, record.constants))
    shipped = {
        key_of(
            record.function, record.signature, record.constants
        ): f"{record.kernel} {record.variant}, {record.dtype}"
        for record in compilations()
        if record.target == "sm_80"
    }
    assert not [name for key, name in shipped.items() if key not in launched]
