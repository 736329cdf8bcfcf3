"""`python -m bench gpu-static`: what compilers make of every GPU kernel, where there is no GPU to run it on.

Every record of `tripletops.info.gpu_kernels()`, a kernel with one of its shipped tiles, is compiled for its
target. A line of the table says what a block takes of a multiprocessor, how many fit there at once, whether
products run on tensor cores, how wide loads are, and how much a tile makes of what it has loaded. The verdict
names everything that would be slow for a reason that shows without running it: `problems`.

The same compiler gives the same numbers, so the CSV is written anew instead of growing. A run over a part of
the records (--target, --kernel) leaves it alone, unless --csv names a file.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tripletops import info

Record = Any  # of tripletops.info.gpu_kernels(); the type lives beside the kernels, behind the public surface
Catalogue = Callable[[], Sequence[Record]]


class Limits(NamedTuple):
    """What the blocks share that are on a multiprocessor (an SM, a compute unit) at the same time."""

    backend: str  # with the next two: the target as triton names it
    arch: int | str
    lanes: int  # threads of a warp
    warps: int
    blocks: int
    shared: int  # bytes of shared memory
    reserved: int  # bytes of it that the driver adds to what a block asks for
    granule: int  # bytes that shared memory is dealt out by
    tensor_memory: int = 0  # columns


# NVIDIA: the table "Technical Specifications per Compute Capability" of the CUDA programming guide, and the
# granules of cuda_occupancy.h. Tensor memory: PTX ISA, "Tensor Memory": 512 columns.
# AMD: what LLVM computes occupancy with (AMDGPUBaseInfo.cpp, GFX90A and later): 8 waves on each of 4 SIMDs,
# 16 blocks (barriers) and 64 KiB of local data share per compute unit. Two details are left out, since
# whether two blocks fit never depends on them: many scalar registers cost one of the 8 waves, and blocks of a
# single wave need no barrier.
LIMITS = {
    "sm_80": Limits("cuda", 80, 32, warps=64, blocks=32, shared=164 << 10, reserved=1024, granule=128),
    "sm_90": Limits("cuda", 90, 32, warps=64, blocks=32, shared=228 << 10, reserved=1024, granule=128),
    "sm_100": Limits(
        "cuda", 100, 32, 64, 32, shared=228 << 10, reserved=1024, granule=128, tensor_memory=512
    ),
    "gfx942": Limits("hip", "gfx942", 64, warps=32, blocks=16, shared=64 << 10, reserved=0, granule=512),
}
# Alike on all of them: a warp lives on one of four partitions, each with 512 registers per lane (on AMD,
# vector and accumulation registers together), which are dealt out by eights.
PARTITIONS, REGISTERS, REGISTER_GRANULE = 4, 512, 8

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
ISSUED = {"tf32x3": 3, "bf16x3": 3, "bf16x6": 6}  # products of tensor cores that make one of that precision
DIMENSIONS = 128  # that bytes per distance are stated for


class Code(NamedTuple):
    """What the machine code of a record asks for."""

    registers: int  # per thread
    spill: int  # bytes per thread
    static: int  # bytes of shared memory per block
    dynamic: int
    warps: int  # per block
    tensor_cores: tuple[str, ...]  # names of instructions
    widest_load: str  # from global memory, in bytes per thread; "bulk" where the copy engine loads
    tensor_memory: int = 0  # columns per block
    scalar_spill: int = 0  # scalar registers of AMD kept in lanes of vector registers, which takes no memory


class Result(NamedTuple):
    record: Record
    code: Code | None
    error: str  # why there is no code


def survey(catalogue: Catalogue, chosen: Iterable[int], jobs: int) -> list[Result]:
    """Compile the chosen records of a catalogue in `jobs` processes."""
    records, chosen = catalogue(), list(chosen)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        # A kernel can't be sent to another process: there it is looked up again.
        outcomes = pool.map(_outcome, [catalogue] * len(chosen), chosen)
        return [Result(records[index], *outcome) for index, outcome in zip(chosen, outcomes, strict=True)]


def _outcome(catalogue: Catalogue, index: int) -> tuple[Code | None, str]:
    record = catalogue()[index]
    try:
        return read(record, compile_record(record)), ""
    except Exception as error:  # a compiler may raise anything; the other records are still compiled
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return None, ": ".join([type(error).__name__, *lines[-1:]])


def compile_record(record: Record) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    limits = LIMITS[record.target]
    return triton.compile(
        ASTSource(record.function, record.signature, record.constants, record.attributes),
        target=GPUTarget(limits.backend, limits.arch, limits.lanes),
        options={"num_warps": record.warps, "num_stages": record.stages, "enable_fp_fusion": True},
    )


def read(record: Record, compiled: Any) -> Code:
    if LIMITS[record.target].backend == "hip":
        return read_amd(compiled.asm["amdgcn"], compiled.metadata)
    usage = cuobjdump("-res-usage", compiled.asm["cubin"])
    return read_nvidia(usage, compiled.asm["ptx"], compiled.metadata)


def cuobjdump(option: str, cubin: bytes) -> str:
    """What the cuobjdump that comes with triton says."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, option, str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def read_nvidia(usage: str, ptx: str, metadata: Any) -> Code:
    """Resources as they are in the cubin; instructions by their names in PTX, which tell more than SASS."""
    found = re.search(rf"Function {re.escape(metadata.name)}:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage)
    if not found:
        raise ValueError(f"cuobjdump says nothing of {metadata.name}: {usage}")
    registers, stack, shared = map(int, found.groups())
    # From sm_90 on, a kernel that uses shared memory at all has what the driver reserves among its own.
    reserved = 1024 if metadata.target.arch >= 90 else 0
    return Code(
        registers=registers,
        spill=stack,
        static=max(0, shared - reserved),
        dynamic=metadata.shared,
        warps=metadata.num_warps,
        tensor_cores=_names(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\.[\w.:]+", ptx),
        widest_load=_widest_nvidia(ptx),
        tensor_memory=metadata.tmem_size,
    )


def read_amd(assembly: str, metadata: Any) -> Code:
    fields = {name: int(value) for name, value in re.findall(r"^[ -]+\.(\w+): +(\d+)$", assembly, re.M)}
    return Code(
        registers=fields["vgpr_count"],  # accumulation registers included
        # Some may go to accumulation registers: no bytes of memory, yet a spill.
        spill=max(fields["private_segment_fixed_size"], 4 * fields["vgpr_spill_count"]),
        static=fields["group_segment_fixed_size"],
        dynamic=metadata.shared,
        warps=metadata.num_warps,
        tensor_cores=_names(r"\bv_s?mfma\w+", assembly),
        widest_load=_widest_amd(assembly),
        scalar_spill=fields["sgpr_spill_count"],
    )


def _names(pattern: str, text: str) -> tuple[str, ...]:
    return tuple(sorted(set(re.findall(pattern, text))))


def _widest_nvidia(ptx: str) -> str:
    if re.search(r"\bcp\.async\.bulk\.\S*shared\S*\.global\b", ptx):
        return "bulk"
    loads = re.findall(r"\bld\.(?:[\w:]+\.)*global\.(?:[\w:]+\.)*?(?:v(\d)\.)?[busf](\d+)\b", ptx)
    copies = re.findall(r"\bcp\.async\.c[ag]\.shared\S*\s+\[[^]]*\], *\[[^]]*\], *(\w+)", ptx)
    sizes = [int(count or 1) * int(bits) // 8 for count, bits in loads]
    return str(max([*sizes, *(int(size, base=0) for size in copies)], default=0))


def _widest_amd(assembly: str) -> str:
    loads = re.findall(r"\b(?:global|buffer|flat)_load_(?:lds_)?[us]?(byte|short|dword)(?:x(\d))?", assembly)
    unit = {"byte": 1, "short": 2, "dword": 4}
    return str(max((unit[name] * int(count or 1) for name, count in loads), default=0))


def resident_blocks(code: Code, limits: Limits) -> int:
    """How many blocks are on a multiprocessor at the same time."""
    registers = _round_up(code.registers, REGISTER_GRANULE)
    warps = PARTITIONS * min(limits.warps // PARTITIONS, REGISTERS // registers)
    shared = _round_up(code.static + code.dynamic + limits.reserved, limits.granule)
    fits = [limits.blocks, warps // code.warps]
    if shared:
        fits.append(limits.shared // shared)
    if code.tensor_memory:
        fits.append(limits.tensor_memory // code.tensor_memory)
    return min(fits)


def _round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule


def _passes(record: Record) -> int:
    """How often distances are computed: for each SPAN of dimensions anew, where a kernel sums gradients."""
    return -(-DIMENSIONS // int(record.constants.get("SPAN", DIMENSIONS)))


def products_issued(record: Record) -> int:
    """Multiplications per pair and dimension, with those for precision and for further passes."""
    return int((_passes(record) + record.products - 1) * ISSUED.get(record.precision, 1))


def bytes_per_distance(record: Record) -> float:
    """Bytes that are loaded from the L2 cache per pair of a tile: rows and columns, in every pass.

    A second product already has the weights of the pairs, so it loads columns alone.
    """
    loads = _passes(record) * (1 / record.rows + 1 / record.columns) + (record.products - 1) / record.rows
    return float(DIMENSIONS * BYTES[record.dtype] * loads)


def flops_per_byte(record: Record) -> float:
    """Useful flops alone; `products_issued` counts all."""
    return float(2 * DIMENSIONS * record.products / bytes_per_distance(record))


def problems(result: Result) -> list[str]:
    """Everything that makes the record fail."""
    record, code, error = result
    if code is None:
        return [f"does not compile: {error}"]
    limits = LIMITS[record.target]
    shared, most = code.static + code.dynamic, limits.shared - limits.reserved
    blocks = resident_blocks(code, limits)
    found = []
    if code.spill:
        found.append(f"spills {code.spill} bytes per thread")
    if record.products and record.precision != "ieee" and not code.tensor_cores:
        found.append("has a dot without tensor-core instructions")
    if shared > most:
        found.append(f"takes {shared} bytes of shared memory, of which a block may have {most}")
    elif blocks == 0:
        found.append("fits no multiprocessor")
    elif blocks == 1 and not record.few_blocks:
        found.append("fits a multiprocessor only once, without a written reason")
    elif blocks > 1 and record.few_blocks:
        found.append(
            f"fits a multiprocessor {blocks} times, with a reason written why not: {record.few_blocks}"
        )
    return found


def failures(results: Iterable[Result]) -> list[str]:
    return [f"{_title(result.record)}: {what}" for result in results for what in problems(result)]


def _title(record: Record) -> str:
    return f"{record.kernel} ({record.variant}), {record.dtype}, {record.target}"


def line(result: Result) -> dict[str, object]:
    """What the CSV says of a record, whose columns not all records have."""
    import triton

    record, code, _ = result
    cells = {
        **{name: getattr(record, name) for name in ("target", "kernel", "variant", "dtype", "precision")},
        **{name: getattr(record, name) for name in ("stages", "reason", "few_blocks")},
        "verdict": "; ".join(problems(result)) or "ok",
        "triton": triton.__version__,
    }
    if record.products:
        cells |= {
            "rows": record.rows,
            "columns": record.columns,
            "products_issued": products_issued(record),
            "flops_per_byte": f"{flops_per_byte(record):.3g}",
            "bytes_per_distance": f"{bytes_per_distance(record):.3g}",
        }
    if code is not None:
        tensor_cores = " ".join(code.tensor_cores)
        blocks = resident_blocks(code, LIMITS[record.target])
        cells |= code._asdict() | {"tensor_cores": tensor_cores, "blocks": blocks}
    return cells


COLUMNS = [
    *("target", "kernel", "variant", "dtype", "precision", "rows", "columns", "warps", "stages"),
    *("registers", "spill", "scalar_spill", "static", "dynamic", "tensor_memory", "blocks", "widest_load"),
    *("products_issued", "flops_per_byte", "bytes_per_distance", "tensor_cores"),
    *("verdict", "reason", "few_blocks", "triton"),
]
# The table ends where the CSV goes on with sentences, and has shorter heads.
HEADS = {name: name for name in COLUMNS[1 : COLUMNS.index("verdict")]} | {
    "columns": "cols",
    "registers": "regs",
    "scalar_spill": "scalar",
    "tensor_memory": "tmem",
    "widest_load": "load",
    "products_issued": "issued",
    "flops_per_byte": "flops/B",
    "bytes_per_distance": "B/dist",
    "tensor_cores": "tensor cores",
}
LEGEND = f"""\
spill: bytes per thread; scalar: spilled scalar registers; static, dynamic: bytes of shared memory per block;
tmem: columns of tensor memory per block; blocks: at the same time on an SM or compute unit; load: the widest
from global memory, in bytes per thread; issued: products per pair and dimension; flops/B: useful flops per
byte from L2; B/dist: bytes from L2 per distance at D={DIMENSIONS}"""


def table(results: Iterable[Result]) -> str:
    """A group of lines for every target."""
    lines = [{name: str(cell) for name, cell in line(result).items()} for result in results]
    widths = {name: max(len(cells.get(name, "")) for cells in [HEADS, *lines]) for name in HEADS}

    def text(cells: Mapping[str, str]) -> str:
        return "  ".join(f"{cells.get(name, ''):<{width}}" for name, width in widths.items()).rstrip()

    groups = {target: [text(cells) for cells in lines if cells["target"] == target] for target in LIMITS}
    parts = ["\n".join([target, text(HEADS), *group]) for target, group in groups.items() if group]
    return "\n\n".join([*parts, LEGEND])


def write(path: Path, results: Iterable[Result]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(line(result) for result in results)


def verdict(results: Sequence[Result]) -> str:
    """Which records run alone on their multiprocessor and why, then all failures."""
    excused: dict[str, list[str]] = {}
    for result in results:
        if result.record.few_blocks:
            excused.setdefault(result.record.few_blocks, []).append(_title(result.record))
    parts = ["\n  ".join([f"one block at a time: {reason}", *who]) for reason, who in excused.items()]
    found = failures(results)
    return "\n\n".join([*parts, "\n".join([f"{len(results)} kernels, {len(found)} failures", *found])])


def refusal() -> str | None:
    """Why nothing can be compiled here."""
    if find_spec("triton") is None:
        return "gpu-static compiles with triton, which is missing: pip install triton"
    from triton import knobs

    if knobs.runtime.interpret:
        return "gpu-static compiles, and with TRITON_INTERPRET set triton does not: unset it"
    return None


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", nargs="+", choices=LIMITS, metavar="NAME", help=", ".join(LIMITS))
    parser.add_argument("--kernel", nargs="+", metavar="NAME", help="the kernels of these names alone")
    parser.add_argument("--csv", type=Path, help="write here (bench/results/gpu_static.csv; a part: nowhere)")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes compile (2)")


def run(
    targets: Sequence[str] | None, kernels: Sequence[str] | None, path: Path | None, jobs: int
) -> str | int:
    """Survey the catalogue or a part of it, print and write what was found; what `sys.exit` is to be told."""
    reason = refusal()
    if reason:
        return reason
    records = info.gpu_kernels()
    names = sorted({record.kernel for record in records})
    unknown = sorted(set(kernels or []) - set(names))
    if unknown:
        return f"no kernel is called {', '.join(unknown)}; there are {', '.join(names)}"
    chosen = [
        index
        for index, record in enumerate(records)
        if record.target in (targets or LIMITS) and record.kernel in (kernels or names)
    ]
    print(f"compiling {len(chosen)} kernels in {jobs} processes", flush=True)
    results = survey(info.gpu_kernels, chosen, jobs)
    print(table(results))
    if path is not None:
        write(path, results)
        print(f"\nwritten to {path}")
    print(f"\n{verdict(results)}")
    return 1 if failures(results) else 0
