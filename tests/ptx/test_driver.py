"""Triton's host code with the emulator behind it: what kernels of the package don't use yet, and faults."""

from __future__ import annotations

import pytest
import torch

import tripletops
from tests.ptx.driver import emulated
from tests.ptx.faults import FaultError

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def arguments_kernel(out, half, double, flag, one, large):
    tl.store(out, half + one)
    tl.store(out + 1, (double * 2).to(tl.float64))
    tl.store(out + 2, flag.to(tl.float64) + large.to(tl.float64))


def test_numbers_as_arguments():
    out = torch.zeros(3, dtype=torch.float64)
    with emulated():
        arguments_kernel[(1,)](out, 0.5, -1.25, True, 1, 2**40, enable_fp_fusion=True)
    assert out.tolist() == [1.5, -2.5, 2**40 + 1]


@triton.jit
def least_kernel(keys, least, count, total, previous, rows: tl.constexpr):
    """Every block puts its keys to the least of all by atomics, whatever their order."""
    place = tl.program_id(0) * rows + tl.arange(0, rows)
    key = tl.load(keys + place)
    tl.atomic_min(least + place % 16, key, sem="relaxed")
    tl.atomic_add(total, tl.sum(key.to(tl.float32), 0), sem="relaxed")
    tl.store(previous + tl.program_id(0), tl.atomic_cas(count, 0, tl.program_id(0) + 1))


def test_atomic_operations():
    keys = torch.randint(-(2**60), 2**60, (512,), generator=torch.Generator().manual_seed(0))
    least, count = torch.full((16,), 2**62), torch.zeros((), dtype=torch.int32)
    total, previous = torch.zeros(()), torch.zeros(4, dtype=torch.int32)
    with emulated():
        least_kernel[(4,)](keys, least, count, total, previous, rows=128, enable_fp_fusion=True)
    assert torch.equal(least, keys.view(-1, 16).amin(0))
    torch.testing.assert_close(total, keys.float().sum(), rtol=1e-4, atol=0)
    assert previous.tolist().count(0) == 1
    assert (previous[previous != 0] == count).all()


@triton.jit
def last_block_kernel(parts, counter, out, blocks: tl.constexpr):
    """The block that is last to arrive adds up what all have written."""
    block = tl.program_id(0)
    tl.store(parts + block, block + 1)
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel") == blocks - 1:
        tl.debug_barrier()
        tl.store(out, tl.sum(tl.load(parts + tl.arange(0, blocks)), 0))


def test_the_last_block_reads_what_the_others_released():
    def zeros(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32)

    out = zeros(1)
    with emulated():
        last_block_kernel[(8,)](zeros(8), zeros(1), out, blocks=8, enable_fp_fusion=True)
    assert out.item() == 36


@triton.jit
def one_place_kernel(out):
    tl.store(out, tl.program_id(0))


def test_a_fault_names_the_line_of_the_kernel():
    with (
        emulated(),
        pytest.raises(FaultError, match=r"byte 0 of tensor 0 while block \d writes it(.|\n)*test_driver.py:"),
    ):
        one_place_kernel[(2,)](torch.zeros(1, dtype=torch.int32), enable_fp_fusion=True)


def test_afterwards_everything_is_as_before():
    before = tripletops.backends()["triton"]
    with emulated():
        assert tripletops.backends()["triton"] == "usable"
    assert tripletops.backends()["triton"] == before
