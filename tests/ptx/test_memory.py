"""Small kernels with one mistake each, which the emulator has to find, beside the same without it."""

from __future__ import annotations

import pytest
import torch

from tests.ptx.faults import FaultError
from tests.ptx.support import address, module, run
from tests.ptx.tensors import Fresh

IN, OUT = address(1, 0, 4), address(2, 1, 4)
LOAD, STORE = "ld.global.b32 %r1, [%rd1];", "st.global.b32 [%rd2], %r1;"
BARRIER = "bar.sync 0;"
# %r2: the address of a word of shared memory for every thread; %r3: that of the thread one warp further.
ROOM = """
mov.u32 %r4, %tid.x; shl.b32 %r5, %r4, 2; mov.b32 %r6, room; add.s32 %r2, %r6, %r5;
add.s32 %r7, %r4, 32; and.b32 %r7, %r7, 63; shl.b32 %r7, %r7, 2; add.s32 %r3, %r6, %r7;
"""


def numbers(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32)


def refused(what: str, text: str, *tensors: torch.Tensor, grid: int = 1, fresh: Fresh | None = None) -> None:
    with pytest.raises(FaultError, match=what):
        run(text, *tensors, grid=(grid, 1, 1), fresh=fresh)


# Global memory


def test_a_copy():
    given, found = numbers(64), torch.zeros(64, dtype=torch.int32)
    run(module(IN + OUT + LOAD + STORE, 2, threads=64), given, found)
    assert torch.equal(found, given)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("add.s64 %rd1, %rd1, 4;", "outside of memory: thread 31"),
        ("sub.s64 %rd1, %rd1, 4;", "outside of memory: thread 0"),
        ("add.s64 %rd1, %rd1, 2;", "no multiple of 4"),
        ("mov.b64 %rd1, 0;", "outside of memory: thread 0, 1, 2 and others"),
        ("add.s64 %rd1, %rd1, 1099511627776;", "outside of memory"),
    ],
)
def test_an_address_that_is_off(change, fault):
    refused(fault, module(IN + OUT + change + LOAD + STORE, 2), numbers(32), numbers(32))


def test_between_the_elements_of_a_strided_tensor():
    text = module(IN + OUT + LOAD + STORE, 2)
    run(text, numbers(32), numbers(32))
    refused("outside of memory: thread 1, 3", text, numbers(64)[::2], numbers(32))
    refused("outside of memory: thread 1, 3", text, numbers(32), numbers(64)[::2])


def test_a_guarded_access_touches_nothing_else():
    text = module(IN + OUT + "setp.lt.u32 %p1, %r39, 20; @%p1 " + LOAD + "@%p1 " + STORE, 2)
    found = torch.zeros(20, dtype=torch.int32)
    run(text, numbers(20), found)
    assert torch.equal(found, numbers(20))


def test_memory_that_nobody_wrote():
    copy = module(IN + OUT + LOAD + STORE, 2)
    with Fresh() as fresh:
        middle = torch.empty(32, dtype=torch.int32)
        refused("read of byte 0 of tensor 0 that nobody wrote", copy, middle, numbers(32), fresh=fresh)
        run(copy, numbers(32), middle, fresh=fresh)
        run(copy, middle, numbers(32), fresh=fresh)
        half = torch.empty(64, dtype=torch.int32)
        run(copy, numbers(32), half[:32], fresh=fresh)
        run(copy, half[:32], numbers(32), fresh=fresh)
        refused("that nobody wrote", copy, half[32:], numbers(32), fresh=fresh)
        half.zero_()
        run(copy, half[32:], numbers(32), fresh=fresh)


def test_two_blocks_at_one_place():
    copy = module(IN + OUT + LOAD + STORE, 2)
    refused("write to byte 0 of tensor 1 while block 1 writes it", copy, numbers(32), numbers(32), grid=2)
    own = "mov.u32 %r8, %ctaid.x; mul.wide.u32 %rd3, %r8, 128; add.s64 %rd2, %rd2, %rd3;"
    found = torch.zeros(64, dtype=torch.int32)
    run(module(IN + OUT + own + LOAD + STORE, 2), numbers(32), found, grid=(2, 1, 1))
    assert torch.equal(found, numbers(32).repeat(2))
    shared = numbers(64)  # each block reads the first half, and one writes there
    refused("(read of|write to) byte", module(IN + OUT + own + LOAD + STORE, 2), shared, shared, grid=2)


def test_warps_of_a_block_that_share_global_memory():
    other = "xor.b32 %r9, %r39, 32; ld.param.b64 %rd4, [k_param_1]; mad.wide.u32 %rd4, %r9, 4, %rd4;"
    read = other + "ld.global.b32 %r2, [%rd4];"
    refused("while warp 1 writes it", module(IN + OUT + LOAD + STORE + read, 2, 64), numbers(64), numbers(64))
    run(module(IN + OUT + LOAD + STORE + BARRIER + read, 2, 64), numbers(64), numbers(64))


# Shared memory


SAVE, FETCH = "st.shared.b32 [%r2], %r1;", "ld.shared.b32 %r1, [%r3];"


def shared(*steps: str) -> str:
    return module(IN + OUT + ROOM + LOAD + "\n".join(steps) + STORE, 2, threads=64)


def test_an_exchange_between_warps():
    found = numbers(64)
    run(shared(SAVE, BARRIER, FETCH), numbers(64), found)
    assert torch.equal(found, numbers(64).roll(-32))


@pytest.mark.parametrize(
    ("steps", "fault"),
    [
        ((SAVE, FETCH), "read of byte 128 of shared memory while warp 1 writes it"),
        ((BARRIER, FETCH), "read of byte 128 of shared memory that nobody wrote"),
        ((SAVE, BARRIER, FETCH, SAVE), "write to byte 0 of shared memory while warp 1 reads it"),
        ((SAVE, "st.shared.b32 [%r3], %r1;"), "write to byte 128 of shared memory while warp 1 writes it"),
        (("st.shared.b32 [room], %r4;",), "write to byte 0 of shared memory by several warps at once"),
        (("st.shared.b32 [%r2+512], %r1;",), "outside of memory"),
        (("st.shared.v2.b32 [%r2], {%r1, %r1};",), "no multiple of 8"),
    ],
)
def test_a_mistake_in_shared_memory(steps, fault):
    refused(fault, shared(*steps), numbers(64), numbers(64))


def test_warps_may_write_the_same_at_once_and_read_it_behind_a_barrier():
    same = "mov.b32 %r8, 5; st.shared.b32 [room], %r8;"
    read = "ld.shared.b32 %r1, [room];"
    found = numbers(64)
    run(shared(same, BARRIER, read), numbers(64), found)
    assert (found == 5).all()
    refused("while several warps writes it", shared(same, read), numbers(64), numbers(64))


def test_a_field_of_a_word_and_vectors():
    text = (
        "st.shared.b32 [%r2], %r1; ld.shared.u8 %rs1, [%r2+1]; ld.shared.s8 %r8, [%r2+3];"
        "cvt.u32.u16 %r9, %rs1; add.s32 %r1, %r8, %r9;"
    )
    given, found = torch.full((64,), -0x7FEDCBAA, dtype=torch.int32), numbers(64)  # 0x80123456
    run(shared(text), given, found)
    assert (found == 0x34 - 128).all()
    text = "st.shared.v2.b16 [%r2], {%rs1, 7}; ld.shared.b32 %r1, [%r2];"
    run(shared("cvt.u16.u32 %rs1, %r1;", text), numbers(64), found)
    assert torch.equal(found, numbers(64) + (7 << 16))


# Asynchronous copies


COPY = "cp.async.ca.shared.global [ %r2 + 0 ], [ %rd1 + 0 ], 0x4, %r10; cp.async.commit_group;"
WAIT = "cp.async.wait_group 0;"
FULL = "mov.b32 %r10, 4;"


def test_an_asynchronous_copy():
    found = numbers(64)
    run(shared(FULL, COPY, WAIT, BARRIER, FETCH), numbers(64), found)
    assert torch.equal(found, numbers(64).roll(-32))
    nothing = "setp.lt.u32 %p1, %r4, 32; selp.b32 %r10, 4, 0, %p1;"
    text = shared(nothing, COPY, WAIT, BARRIER, FETCH).replace(LOAD, "")
    run(text, numbers(32), found)  # in which only half of the threads have an element
    assert torch.equal(found, torch.cat([torch.zeros(32, dtype=torch.int32), numbers(32)]))


@pytest.mark.parametrize(
    ("steps", "fault"),
    [
        ((COPY, BARRIER, FETCH), "read of .* while an asynchronous copy writes it"),
        ((COPY, "cp.async.wait_group 1;", BARRIER, FETCH), "while an asynchronous copy writes it"),
        ((COPY, WAIT, FETCH), "read of byte 128 .* while warp 1 writes it"),
        ((COPY, SAVE), "write to .* while an asynchronous copy writes it"),
        ((SAVE, BARRIER, FETCH, COPY), "write to byte 0 .* while warp 1 reads it"),
        (("add.s64 %rd1, %rd1, 4;", COPY), "outside of memory: thread 63"),
    ],
)
def test_a_mistake_with_an_asynchronous_copy(steps, fault):
    refused(fault, shared(FULL, *steps), numbers(64), numbers(64))


def test_groups_of_copies_end_in_order():
    second = COPY.replace("%r2 + 0", "%r2 + 256")
    found = numbers(64)
    run(shared(FULL, COPY, second, "cp.async.wait_group 1;", BARRIER, FETCH), numbers(64), found)
    late = FETCH.replace("[%r3]", "[%r3+256]")
    refused(
        "asynchronous",
        shared(FULL, COPY, second, "cp.async.wait_group 1;", BARRIER, late),
        numbers(64),
        found,
    )
    run(shared(FULL, COPY, second, "cp.async.wait_all;", BARRIER, late), numbers(64), found)


# Divergence


HALF = "setp.lt.u32 %p1, %r39, {}; @%p1 bra $behind;\n"


def test_branches_and_loops():
    """Every thread adds up the numbers below its own."""
    text = """
mov.b32 %r1, 0; mov.b32 %r8, 0;
$loop:
setp.ge.u32 %p2, %r8, %r39; @%p2 bra $done;
add.s32 %r1, %r1, %r8; add.s32 %r8, %r8, 1; bra.uni $loop;
$done:
"""
    found = numbers(64)
    run(module(OUT.replace("param_1", "param_0") + text + STORE, 1, 64), found)
    assert torch.equal(found, (numbers(64) * (numbers(64) - 1) / 2).int())


def test_threads_that_leave_early():
    found = numbers(64)
    run(
        module(
            address(2, 0, 4) + "setp.ge.u32 %p1, %r39, 32; @%p1 exit; mov.b32 %r1, -1; bar.sync 0;" + STORE,
            1,
            64,
        ),
        found,
    )
    assert torch.equal(found, torch.cat([torch.full((32,), -1, dtype=torch.int32), numbers(64)[32:]]))


@pytest.mark.parametrize(
    ("collective", "lanes", "fault"),
    [
        ("shfl.sync.bfly.b32 %r1, %r39, 1, 31, -1;", 5, "the lanes of a warp have diverged"),
        ("shfl.sync.bfly.b32 %r1, %r39, 1, 31, -1;", 32, None),
        ("shfl.sync.bfly.b32 %r1, %r39, 1, 31, 15;", 0, "of some lanes only"),
        ("redux.sync.max.s32 %r1, %r39, -1;", 33, "the lanes of a warp have diverged"),
        ("bar.warp.sync -1;", 7, "the lanes of a warp have diverged"),
        ("bar.sync 0;", 32, "the threads of a block have diverged"),
        ("barrier.sync 0;", 0, None),
        ("bar.sync 1;", 0, "a barrier of a part of the block"),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2];", 40, "the lanes of a warp have diverged"),
        ("trap;", 0, "the kernel gave up"),
    ],
)
def test_divergence(collective, lanes, fault):
    text = module(address(1, 0, 4) + ROOM + HALF.format(lanes) + collective + "\n$behind:\n", 1, 64)
    if fault is None:
        run(text, numbers(64))
    else:
        refused(fault, text, numbers(64))


# Atomic operations


def atomic(operation: str, operands: str, bits: int = 32) -> str:
    """Every thread of every block does this to the first element; then writes what was there."""
    stem = "%rd" if bits == 64 else "%r"
    own = "mov.u32 %r8, %ctaid.x; mad.lo.s32 %r9, %r8, 32, %r39;"
    result = f"mad.wide.u32 %rd3, %r9, {bits // 8}, %rd3; st.global.b{bits} [%rd3], {stem}20;"
    return module(
        "ld.param.b64 %rd1, [k_param_0];"
        + address(4, 1, 4)
        + own
        + "cvt.u64.u32 %rd9, %r9; ld.param.b64 %rd3, [k_param_1];"
        f"atom.global.{operation} {stem}20, [%rd1], {operands};" + result,
        2,
    )


def test_atomic_sums_take_turns():
    total, before = torch.zeros(1, dtype=torch.int32), torch.zeros(96, dtype=torch.int32)
    run(atomic("relaxed.gpu.add.s32", "%r9"), total, before, grid=(3, 1, 1))
    assert total.item() == 95 * 96 // 2
    assert before.sort().values[0] == 0
    assert len(before.unique()) >= 95  # every thread but the first adds something


@pytest.mark.parametrize(
    ("operation", "expected"),
    [("min.s64", 0), ("max.u64", 95), ("exch.b64", None), ("add.u64", 4560), ("or.b64", 127)],
)
def test_atomic_operations_of_64_bits(operation, expected):
    place, before = torch.full((1,), 0 if expected != 0 else 99), torch.zeros(96, dtype=torch.int64)
    run(atomic(f"relaxed.gpu.{operation}", "%rd9", 64), place, before, grid=(3, 1, 1))
    assert expected is None or place.item() == expected


def test_compare_and_swap():
    place, before = torch.full((1,), 7), torch.zeros(96, dtype=torch.int64)
    run(atomic("acq_rel.gpu.cas.b64", "7, %rd9", 64), place, before, grid=(3, 1, 1))
    assert (before == 7).sum() == 1
    assert place.item() == int((before == 7).nonzero()[0])
    assert (before == place.item()).sum() == 95


def test_reductions_and_floats():
    total = torch.zeros(1)
    text = (
        "ld.param.b64 %rd1, [k_param_0]; mov.b32 %r1, 0f3F000000; red.global.relaxed.gpu.add.f32 [%rd1], %r1;"
    )
    run(module(text, 1), total, grid=(2, 1, 1))
    assert total.item() == 32


# Thread 0 of each block writes its word, then a counter says that it did; the block that comes second reads
# what the other one wrote.
PASSED_ON = """
ld.param.b64 %rd1, [k_param_0]; ld.param.b64 %rd2, [k_param_1]; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x;
setp.ne.u32 %p1, %r2, 0; @%p1 bra $end;
mad.wide.u32 %rd3, %r1, 4, %rd1; add.s32 %r3, %r1, 10; st.global.b32 [%rd3], %r3;
$middle:
MIDDLE
atom.global.ORDER.gpu.add.u32 %r4, [%rd2], 1;
setp.eq.u32 %p2, %r4, 0; @%p2 bra $end;
xor.b32 %r5, %r1, 1; mad.wide.u32 %rd4, %r5, 4, %rd1; ld.global.b32 %r6, [%rd4]; st.global.b32 [%rd3], %r6;
$end:
"""


def test_what_a_block_released_another_may_read():
    """Writes before the last barrier are released."""
    # All threads write and pass the barrier; the first of them does the rest.
    text = PASSED_ON.replace("setp.ne.u32 %p1, %r2, 0; @%p1 bra $end;", "setp.ne.u32 %p1, %r2, 0;")
    text = text.replace("st.global.b32 [%rd3], %r3;", "@!%p1 st.global.b32 [%rd3], %r3;")
    text = text.replace("MIDDLE", "fence.acq_rel.gpu; membar.gl; bar.sync 0; @%p1 bra $end;")
    words = numbers(2)
    run(module(text.replace("ORDER", "acq_rel"), 2), words, torch.zeros(1, dtype=torch.int32), grid=(2, 1, 1))
    assert words.tolist() in ([10, 10], [11, 11])
    for order in ("relaxed", "release", "acquire"):
        refused(
            "read of byte .* while block",
            module(text.replace("ORDER", order), 2),
            numbers(2),
            torch.zeros(1, dtype=torch.int32),
            grid=2,
        )
    refused(
        "read of byte .* while block",
        module(text.replace("ORDER", "acq_rel").replace("bar.sync 0;", ""), 2),
        numbers(2),
        torch.zeros(1, dtype=torch.int32),
        grid=2,
    )


def test_atomics_and_ordinary_accesses_do_not_mix():
    counter = "ld.param.b64 %rd1, [k_param_0]; atom.global.relaxed.gpu.add.u32 %r4, [%rd1], 1;"
    refused("while", module(counter + "ld.global.b32 %r5, [%rd1];", 1), numbers(1), grid=2)
    refused(
        "while",
        module("ld.param.b64 %rd1, [k_param_0]; ld.global.b32 %r5, [%rd1];" + counter, 1),
        numbers(1),
        grid=2,
    )
    run(module(counter + "ld.relaxed.gpu.global.b32 %r5, [%rd1];", 1), numbers(1), grid=(2, 1, 1))
    run(
        module("ld.param.b64 %rd1, [k_param_0]; st.release.gpu.global.b32 [%rd1], 1;", 1),
        numbers(1),
        grid=(2, 1, 1),
    )


def test_many_blocks_are_run_in_groups():
    found = torch.zeros(64 * 300, dtype=torch.int32)
    own = "mov.u32 %r8, %ctaid.x; mul.wide.u32 %rd3, %r8, 256; add.s64 %rd2, %rd2, %rd3;"
    run(module(IN + OUT + own + LOAD + STORE, 2, threads=64), numbers(64), found, grid=(300, 1, 1))
    assert torch.equal(found, numbers(64).repeat(300))
    same = module(IN + OUT + LOAD + STORE, 2, threads=64)
    refused("write to byte 0 of tensor 1 while block", same, numbers(64), numbers(64), grid=300)
