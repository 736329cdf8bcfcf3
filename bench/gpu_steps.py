"""What a step of every function costs on a GPU beside its arithmetic, and a model of the arithmetic.

Launches and bytes are counted (`tripletops.info.gpu_step`); host times are measured here, with kernels
stubbed, beside those of naive PyTorch. The bound is a model: of the machine code for sm_80, the instructions
in the loops over tiles and dimensions, divided by what each pipe of an A100 issues. Nothing of it was run on
a GPU.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import torch

from bench import gpu_static, peers
from tripletops import info
from tripletops._words import FUNCTION

COUNTS = (128, 2048, 8192, 65536)
WIDTH = 128


class Pipe(NamedTuple):
    instructions: str  # how their names begin
    rate: float  # warp instructions per cycle of a multiprocessor


# NVIDIA A100: "Arithmetic Instructions" of the CUDA programming guide, compute capability 8.0, over 32 lanes;
# an HMMA of 16·8·8 TF32 or 16·8·16 half-precision products takes two cycles of all four tensor cores.
PIPES = {
    "tensor": Pipe("HMMA|IMMA", 0.5),
    "fp64": Pipe("DFMA|DADD|DMUL|DSETP|DMNMX", 1),
    "fma": Pipe("FFMA|FADD|FMUL|IMAD", 2),
    "alu": Pipe("IADD|LOP|ISETP|FSETP|FMNMX|FSEL|SEL|SHF|PRMT|LEA|IMNMX|PLOP|MOV|POPC|VABS", 2),
    "special": Pipe("MUFU|I2F|F2I|F2F|I2I", 0.5),
    "memory": Pipe("LD|ST|SHFL|RED|ATOM", 1),
    "issue": Pipe("", 4),
}
MULTIPROCESSORS, CLOCK = 108, 1.41e9


class Loops(NamedTuple):
    """Instructions by name: in the loop over tiles, and in the loop over dimensions within."""

    tile: Counter[str]
    depth: Counter[str]


def loops(sass: str) -> Loops:
    """Of two loops within each other, told by branches back."""
    instruction = r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+ +)?([A-Z][A-Z0-9]*)[^;]*?(0x[0-9a-f]+)?\s*;"
    lines = re.findall(instruction, sass)
    code = [(int(address, 16), name, target) for address, name, target in lines]
    back = [(int(to, 16), at) for at, name, to in code if name == "BRA" and to and int(to, 16) < at]
    tile, depth = Counter[str](), Counter[str]()
    for at, name, _ in code:
        nested = sum(start <= at <= end for start, end in back)
        if nested == 1:
            tile[name] += 1
        elif nested > 1:
            depth[name] += 1
    return Loops(tile, depth)


@cache
def _loops_of(kernel: str, variant: str, dtype: str, record: Any) -> Loops:
    return loops(gpu_static.cuobjdump("-sass", gpu_static.compile_record(record.value).asm["cubin"]))


class _Same(NamedTuple):
    """A record that is looked up by what the other arguments say."""

    value: Any

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same)


def bound(walks: Sequence[Any]) -> tuple[float, str]:
    """Seconds that the busiest pipe needs at least, and which it is."""
    cycles: Counter[str] = Counter()
    for walk in walks:
        record = walk.record
        found = _loops_of(record.kernel, record.variant, record.dtype, _Same(record))
        trips = walk.blocks * record.warps * walk.tiles
        steps = -(-walk.width // record.constants["DEPTH"])
        for name, pipe in PIPES.items():
            issued = sum(
                number * trips * (steps if which else 1)
                for which, counted in enumerate(found)
                for instruction, number in counted.items()
                if re.match(pipe.instructions, instruction)
            )
            cycles[name] += issued / pipe.rate
    if not cycles:
        return 0.0, ""
    name, most = max(cycles.items(), key=lambda item: item[1])
    return most / MULTIPROCESSORS / CLOCK, name


def seconds(call: Callable[[], Any], rounds: int = 15) -> float:
    """The median of some rounds, after three that are not counted."""
    samples = []
    for _ in range(rounds + 3):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return median(samples[3:])


def naive() -> None:
    emb, labels = torch.randn(16, WIDTH, requires_grad=True), torch.arange(16) % 4
    peers.naive_batch_hard(emb, labels).backward()


HEAD = f"{'function':<22}{'N':>6}{'launches':>10}{'torch':>7}{'waits':>7}{'host µs':>9}{'÷ naive':>9}"
HEAD += f"{'B/emb':>8}{'GFLOP':>10}{'bound µs':>10}  busiest"
LEGEND = f"""\
launches: of Triton's and torch's kernels, forward and backward, each torch operation counted as one; torch:
the latter alone; waits: how often the host waits for the GPU; host: time of the host code, kernels stubbed,
measured here (Triton's own launcher is not in it; torch's operations are those of 16 rows); ÷ naive: over
that of naive batch-hard PyTorch, measured here too; B/emb: bytes of the tensors that each launch is given,
those over pairs left out, over the bytes of emb (D={WIDTH}, float32); bound: a model, no measurement:
instructions of the sm_80 machine code in loops over pairs, over what the busiest pipe of an A100 issues"""


def line(name: str, count: int, naive_seconds: float) -> str:
    step, host = info.gpu_step(name, count, WIDTH), seconds(info.gpu_host_step(name, count, WIDTH))
    least, pipe = bound(step.walks)
    flops = sum(walk.flops for walk in step.walks)
    return (
        f"{name:<22}{count:>6}{step.launches:>10}{step.operations.total():>7}{step.waits.total():>7}"
        f"{host * 1e6:>9.0f}{host / naive_seconds:>9.2f}{step.bytes / (count * WIDTH * 4):>8.1f}"
        f"{flops / 1e9:>10.3g}{least * 1e6:>10.3g}  {pipe}"
    )


def table(names: Sequence[str] = tuple(FUNCTION), counts: Sequence[int] = COUNTS) -> str:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        naive_seconds = seconds(naive)
        lines = [line(name, count, naive_seconds) for name in names for count in counts]
    finally:
        torch.set_num_threads(before)
    return "\n".join([HEAD, *lines, "", LEGEND])
