"""What the GPU kernels compile to: no spill, tensor cores, at least two blocks on a multiprocessor.

That the survey sees these where they are is shown on kernels that are made to have them.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from bench import __main__ as command
from bench import gpu_static
from bench.gpu_static import LIMITS, Code, Result, failures, problems, resident_blocks
from tripletops import info


@triton.jit
def nearest(
    x, y, out, y_length, width,
    rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """The largest product of every row of x with one of y."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    at = tl.arange(0, depth)
    best = tl.full((rows,), float("-inf"), tl.float32)
    for first in range(0, y_length, columns):
        column = first + tl.arange(0, columns)
        products = tl.zeros((rows, columns), tl.float32)
        for start in range(0, width, depth):
            a = tl.load(x + row[:, None].to(tl.int64) * width + start + at[None, :])
            b = tl.load(y + column[None, :].to(tl.int64) * width + start + at[:, None])
            products = tl.dot(a, b, products, input_precision=precision)
        best = tl.maximum(best, tl.max(products, 1))
    tl.store(out + row, best)


@dataclass(frozen=True)
class Toy:
    """A record as `tripletops.info.gpu_kernels` has them."""

    kernel: str = "nearest"
    variant: str = "toy"
    target: str = "sm_80"
    dtype: str = "bf16"
    warps: int = 4
    stages: int = 2
    rows: int = 64
    columns: int = 64
    depth: int = 64
    products: int = 1
    precision: str = ""
    reason: str = "small"
    few_blocks: str = ""
    compiled_precision: str = "ieee"
    constants: dict[str, object] = field(default_factory=dict)
    function = nearest

    @property
    def attributes(self) -> dict[tuple[int, ...], list[list[object]]]:
        divisible = ("x", "y", "out", "y_length", "width")
        return {(nearest.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible}

    @property
    def signature(self) -> dict[str, str]:
        pointers = {"x": f"*{self.dtype}", "y": f"*{self.dtype}", "out": "*fp32"}
        numbers = {"y_length": "i32", "width": "i32"}
        return pointers | numbers | dict.fromkeys(("rows", "columns", "depth", "precision"), "constexpr")


def toy(**changes: object) -> Toy:
    record = replace(Toy(), **changes)
    tile = {"rows": record.rows, "columns": record.columns, "depth": record.depth}
    return replace(record, constants=tile | {"precision": record.compiled_precision} | record.constants)


# The first four are as they should be. What each of the others has wrong, `test_what_is_wrong_is_found` says.
TOYS = {target: toy(target=target) for target in LIMITS} | {
    "tf32x3": toy(dtype="fp32", depth=32, precision="tf32x3", compiled_precision="tf32x3"),
    "ieee": toy(dtype="fp32", depth=32, precision="ieee"),
    "no tensor cores": toy(dtype="fp32", depth=32, precision="tf32x3"),
    "spill": toy(columns=128, depth=16, warps=1, stages=1),
    "amd spill": toy(target="gfx942", rows=256, columns=128, depth=16, warps=1, stages=1),
    "one block": toy(depth=128, stages=4),
    "excused": toy(depth=128, stages=4, few_blocks="to see"),
    "stale": toy(few_blocks="to see"),
    "too much": toy(depth=128, stages=7),
    "no tile": toy(rows=60),
}


def toys() -> list[Toy]:
    return list(TOYS.values())


@pytest.fixture(scope="module")
def surveyed() -> dict[str, Result]:
    return dict(zip(TOYS, gpu_static.survey(toys, range(len(TOYS)), jobs=2), strict=True))


@pytest.mark.parametrize("target", LIMITS)
def test_a_good_kernel_passes(surveyed, target):
    result = surveyed[target]
    assert result.error == ""
    assert problems(result) == []
    assert result.code.warps == 4
    assert 16 < result.code.registers <= 255
    assert result.code.static == 0
    assert result.code.dynamic >= 64 * 64 * 2


@pytest.mark.parametrize(
    ("name", "instruction"),
    [
        ("sm_80", r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32"),
        ("sm_90", r"wgmma\.mma_async\.sync\.aligned\.m64n64k16\.f32\.bf16\.bf16"),
        ("sm_100", r"tcgen05\.mma\.cta_group::1\.kind::f16"),
        ("gfx942", r"v_mfma_f32_\w+_bf16"),
        ("tf32x3", r"mma\.sync\S+\.tf32\.tf32\.f32"),
    ],
)
def test_tensor_cores_are_found(surveyed, name, instruction):
    (found,) = surveyed[name].code.tensor_cores
    assert re.fullmatch(instruction, found)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("no tensor cores", r"has a dot without tensor-core instructions"),
        ("spill", r"spills \d+ bytes per thread"),
        ("amd spill", r"spills \d+ bytes per thread"),
        ("one block", r"fits a multiprocessor only once, without a written reason"),
        ("stale", r"fits a multiprocessor \d times, with a reason written why not: to see"),
        ("too much", r"takes \d+ bytes of shared memory, of which a block may have 166912"),
        ("no tile", r"does not compile: .+"),
    ],
)
def test_what_is_wrong_is_found(surveyed, name, what):
    assert any(re.fullmatch(what, problem) for problem in problems(surveyed[name])), problems(surveyed[name])


def test_what_is_allowed_passes(surveyed):
    assert problems(surveyed["tf32x3"]) == []
    assert problems(surveyed["ieee"]) == []
    assert surveyed["ieee"].code.tensor_cores == ()
    assert problems(surveyed["excused"]) == []


@pytest.mark.parametrize(("target", "sass"), [("sm_80", "HMMA"), ("sm_90", "HGMMA"), ("sm_100", "UTCHMMA")])
def test_sass_has_what_ptx_has(target, sass):
    compiled = gpu_static.compile_record(TOYS[target])
    code = gpu_static.read(TOYS[target], compiled)
    dump = gpu_static.cuobjdump("-sass", compiled.asm["cubin"])
    assert re.search(rf"\b{sass}\b", dump)
    widths = {int(bits) // 8 for bits in re.findall(r"\bLDG(?:STS)?\.E[.\w]*\.(64|128|256)\b", dump)}
    assert str(max(widths)) == code.widest_load == "16"


def test_tensor_memory_is_what_the_kernel_allocates():
    compiled = gpu_static.compile_record(TOYS["sm_100"])
    allocated = re.findall(r"tcgen05\.alloc\S*\s+\[%\w+\], (\d+);", compiled.asm["ptx"])
    assert [gpu_static.read(TOYS["sm_100"], compiled).tensor_memory] == [
        int(columns) for columns in allocated
    ]


def test_registers_bound_amd_waves_as_in_llvm():
    record = TOYS["gfx942"]
    compiled = gpu_static.compile_record(record)
    code = gpu_static.read(record, compiled)
    (waves,) = re.findall(r"; Occupancy: (\d+)", compiled.asm["amdgcn"])
    assert resident_blocks(code._replace(dynamic=0), LIMITS["gfx942"]) == int(waves) * 4 // code.warps


def code(registers: int = 32, dynamic: int = 0, warps: int = 4, **others: int) -> Code:
    values = {"spill": 0, "static": 0, "tensor_cores": ("mma",), "widest_load": "16"}
    return Code(registers=registers, dynamic=dynamic, warps=warps, **(values | others))


@pytest.mark.parametrize(
    ("target", "asked", "blocks"),
    [
        # 64 warps, of which a block has 4.
        ("sm_80", code(), 16),
        ("sm_80", code(warps=1), 32),
        # 255 registers are 256, of which a lane has 512 on each of 4 partitions: 8 warps. 169 are 176: 8 too.
        ("sm_80", code(255), 2),
        ("sm_80", code(255, warps=8), 1),
        ("sm_80", code(168), 3),
        ("sm_80", code(169), 2),
        ("sm_80", code(168, warps=8), 1),
        # 164 KiB with 1 KiB reserved per block: 81 KiB fit twice, a byte more does not.
        ("sm_80", code(dynamic=81 << 10), 2),
        ("sm_80", code(dynamic=(81 << 10) + 1), 1),
        ("sm_80", code(dynamic=80 << 10, static=1024), 2),
        ("sm_80", code(dynamic=163 << 10), 1),
        ("sm_80", code(dynamic=(163 << 10) + 1), 0),
        ("sm_90", code(dynamic=113 << 10), 2),
        ("sm_90", code(dynamic=(113 << 10) + 1), 1),
        ("sm_90", code(dynamic=227 << 10), 1),
        # 512 columns of tensor memory.
        ("sm_100", code(dynamic=113 << 10, tensor_memory=256), 2),
        ("sm_100", code(tensor_memory=128), 4),
        ("sm_100", code(tensor_memory=512), 1),
        ("sm_100", code(tensor_memory=1024), 0),
        # 8 waves on each of 4 SIMDs. Up to 512 registers: 190 are 192, so two waves; 257 are 264, so one.
        ("gfx942", code(), 8),
        ("gfx942", code(warps=1), 16),
        ("gfx942", code(190), 2),
        ("gfx942", code(257), 1),
        ("gfx942", code(512), 1),
        ("gfx942", code(512, warps=8), 0),
        ("gfx942", code(dynamic=32 << 10), 2),
        ("gfx942", code(dynamic=(32 << 10) + 1), 1),
        ("gfx942", code(dynamic=64 << 10), 1),
    ],
)
def test_resident_blocks(target, asked, blocks):
    assert resident_blocks(asked, LIMITS[target]) == blocks


def judged(asked: Code, **changes: object) -> list[str]:
    return problems(Result(toy(**changes), asked, ""))


def test_problems():
    assert judged(code()) == []
    assert judged(code(spill=8)) == ["spills 8 bytes per thread"]
    assert judged(code(scalar_spill=2)) == []  # lanes of vector registers, no memory
    assert judged(code(tensor_cores=())) == ["has a dot without tensor-core instructions"]
    assert judged(code(tensor_cores=()), precision="ieee") == []
    assert judged(code(tensor_cores=()), products=0) == []
    assert judged(code(255, warps=8)) == ["fits a multiprocessor only once, without a written reason"]
    assert judged(code(255, warps=8), few_blocks="big") == []
    assert judged(code(255), few_blocks="big") == [
        "fits a multiprocessor 2 times, with a reason written why not: big"
    ]
    assert judged(code(dynamic=163 << 10), few_blocks="big") == []
    assert judged(code(dynamic=162 << 10, static=1025), few_blocks="big") == [
        "takes 166913 bytes of shared memory, of which a block may have 166912"
    ]
    assert judged(code(tensor_memory=1024), target="sm_100", few_blocks="big") == ["fits no multiprocessor"]
    assert len(judged(code(dynamic=200 << 10, spill=8, tensor_cores=()))) == 3


def test_a_failure_names_its_kernel():
    results = [Result(toy(), code(), ""), Result(toy(), None, "out of luck")]
    assert failures(results) == ["nearest (toy), bf16, sm_80: does not compile: out of luck"]
    assert gpu_static.verdict(results).splitlines() == ["2 kernels, 1 failures", *failures(results)]


USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function helper:
  REG:9 STACK:8 SHARED:0 LOCAL:0 CONSTANT[0]:952 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function kernel:
  REG:142 STACK:320 SHARED:{shared} LOCAL:0 CONSTANT[0]:952 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


@pytest.mark.parametrize(
    ("arch", "shared", "static"), [(80, 0, 0), (80, 1024, 1024), (90, 0, 0), (90, 1024, 0), (100, 1124, 100)]
)
def test_cuobjdump_is_read(arch, shared, static):
    target = GPUTarget("cuda", arch, 32)
    metadata = SimpleNamespace(name="kernel", shared=16, num_warps=8, tmem_size=64, target=target)
    read = gpu_static.read_nvidia(USAGE.format(shared=shared), "", metadata)
    assert read == Code(142, 320, static, 16, 8, (), "0", tensor_memory=64)


def test_a_kernel_that_cuobjdump_omits_is_an_error():
    with pytest.raises(ValueError, match="cuobjdump says nothing of other"):
        gpu_static.read_nvidia(USAGE, "", SimpleNamespace(name="other"))


@pytest.mark.parametrize(
    ("ptx", "widest"),
    [
        ("", "0"),
        ("ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5];", "0"),
        ("@%p1 ld.global.b16 { %rs1 }, [ %rd1 + 0 ];", "2"),
        ("ld.global.b32 %r1, [%rd1];\nld.global.v2.b32 {%r1, %r2}, [%rd1];", "8"),
        ("ld.global.L1::evict_last.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];", "16"),
        ("ld.relaxed.gpu.global.u64 %rd1, [%rd2];", "8"),
        ("ld.global.nc.v8.b32 {%r1}, [%rd2];", "32"),
        ("cp.async.ca.shared.global [ %r99 + 0 ], [ %rd73 + 0 ], 0x4, %r466;", "4"),
        ("cp.async.cg.shared.global.L2::128B [ %r9 + 0 ], [ %rd7 + 0 ], 0x10;", "16"),
        ("cp.async.commit_group;\ncp.async.wait_group 0;", "0"),
        ("cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1];", "bulk"),
        ("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1], [%r1];", "0"),
    ],
)
def test_widest_load_of_ptx(ptx, widest):
    assert gpu_static._widest_nvidia(ptx) == widest


@pytest.mark.parametrize(
    ("assembly", "widest"),
    [
        ("s_load_dwordx8 s[4:11], s[0:1], 0x0", "0"),
        ("ds_read_b128 v[0:3], v4", "0"),
        ("global_load_ubyte v0, v[0:1], off", "1"),
        ("global_load_short_d16_hi v0, v[0:1], off", "2"),
        ("global_load_dword v0, v[0:1], off\nglobal_load_ushort v0, v[0:1], off", "4"),
        ("buffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen", "16"),
        ("global_load_lds_dwordx4 v[0:1], off", "16"),
    ],
)
def test_widest_load_of_amdgcn(assembly, widest):
    assert gpu_static._widest_amd(assembly) == widest


AMDGCN = """
	v_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
	global_load_dwordx2 v[0:1], v[0:1], off
amdhsa.kernels:
  - .agpr_count:     16
    .args:
      - .offset:         24
        .size:           4
    .group_segment_fixed_size: 256
    .name:           kernel
    .private_segment_fixed_size: {scratch}
    .sgpr_spill_count: {scalars}
    .vgpr_count:     80
    .vgpr_spill_count: {vectors}
"""


@pytest.mark.parametrize(
    ("scratch", "vectors", "scalars", "spill"),
    [(0, 0, 0, 0), (0, 2, 0, 8), (0, 0, 3, 0), (624, 210, 0, 840), (16, 0, 0, 16)],
)
def test_amdgcn_is_read(scratch, vectors, scalars, spill):
    text = AMDGCN.format(scratch=scratch, vectors=vectors, scalars=scalars)
    read = gpu_static.read_amd(text, SimpleNamespace(shared=12288, num_warps=4))
    instructions = ("v_mfma_f32_32x32x8_bf16",)
    assert read == Code(80, spill, 256, 12288, 4, instructions, "8", scalar_spill=scalars)


def test_what_a_tile_makes_of_its_loads():
    # 64 rows and 128 columns of 128 float32: 512·(1/64 + 1/128) bytes for the 2·128 flops of a pair.
    one = toy(dtype="fp32", columns=128, precision="tf32x3")
    assert gpu_static.bytes_per_distance(one) == 12
    assert gpu_static.flops_per_byte(one) == pytest.approx(256 / 12)
    assert gpu_static.products_issued(one) == 3
    # Distances are computed twice, for 64 of 128 dimensions of the second product each: 2·12 + 512/64 bytes.
    two = toy(dtype="fp32", columns=128, precision="tf32x3", products=2, constants={"SPAN": 64})
    assert gpu_static.bytes_per_distance(two) == 32
    assert gpu_static.flops_per_byte(two) == 512 / 32
    assert gpu_static.products_issued(two) == 9
    assert gpu_static.bytes_per_distance(toy(dtype="bf16", rows=128, columns=128)) == 4


def bench(monkeypatch: pytest.MonkeyPatch, names: Iterable[str], *arguments: str) -> object:
    """What the command tells `sys.exit` of these toys, compiled without the pool's start."""

    def survey(catalogue: gpu_static.Catalogue, chosen: Iterable[int], jobs: int) -> list[Result]:
        return [Result(catalogue()[index], *gpu_static._outcome(catalogue, index)) for index in chosen]

    monkeypatch.setattr(gpu_static, "survey", survey)
    monkeypatch.setattr(info, "gpu_kernels", lambda: [TOYS[name] for name in names])
    monkeypatch.setattr("sys.argv", ["bench", "gpu-static", *arguments])
    with pytest.raises(SystemExit) as exit_:
        command.main()
    return exit_.value.code


def test_command_prints_and_records(monkeypatch, capsys, tmp_path):
    path = tmp_path / "new" / "gpu_static.csv"
    for _ in range(2):  # the second writes over the first
        assert bench(monkeypatch, ["sm_80", "gfx942", "excused"], "--csv", str(path)) == 0
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line in LIMITS] == ["sm_80", "gfx942"] * 2
    assert "one block at a time: to see\n  nearest (toy), bf16, sm_80" in printed
    assert "3 kernels, 0 failures" in printed
    with path.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [line["target"] for line in lines] == ["sm_80", "gfx942", "sm_80"]
    assert [line["few_blocks"] for line in lines] == ["", "", "to see"]
    assert [line["blocks"] == "1" for line in lines] == [False, False, True]
    assert {line["verdict"] for line in lines} == {"ok"}
    assert {line["bytes_per_distance"] for line in lines} == {"8"}


def test_command_fails_with_what_failed(monkeypatch, capsys):
    names = ["sm_80", "no tensor cores", "gfx942"]
    assert bench(monkeypatch, names, "--target", "sm_80", "--kernel", "nearest") == 1
    printed = capsys.readouterr().out
    assert "nearest (toy), fp32, sm_80: has a dot without tensor-core instructions" in printed
    assert "2 kernels, 1 failures" in printed
    assert "written to" not in printed


def test_command_refuses_in_one_line(monkeypatch):
    assert (
        bench(monkeypatch, ["sm_80"], "--kernel", "farthest")
        == "no kernel is called farthest; there are nearest"
    )
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "unset it" in str(bench(monkeypatch, TOYS))
    monkeypatch.setattr(gpu_static, "find_spec", lambda name: None)
    assert "pip install triton" in str(bench(monkeypatch, TOYS))


def test_only_the_whole_survey_is_kept(monkeypatch):
    for arguments, path in {
        (): command.RESULTS / "gpu_static.csv",
        ("--target", "sm_80"): None,
        ("--kernel", "select"): None,
    }.items():
        monkeypatch.setattr("sys.argv", ["bench", "gpu-static", *arguments])
        assert command._arguments().csv == path


@pytest.fixture(scope="module")
def shipped() -> list[Result]:
    return gpu_static.survey(info.gpu_kernels, range(len(info.gpu_kernels())), jobs=2)


@pytest.mark.parametrize("target", LIMITS)
def test_every_shipped_kernel_passes(shipped, target):
    results = [result for result in shipped if result.record.target == target]
    assert results
    assert failures(results) == []
