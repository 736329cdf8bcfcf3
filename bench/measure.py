"""How things are measured: contenders take turns, medians are compared, fresh processes where it matters."""

from __future__ import annotations

import multiprocessing
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

import tripletops
from tripletops import info

THREADS = 2

Call = Callable[[], object]
Samples = dict[str, list[float]]  # seconds (or bytes) of every contender, one number a round
P = ParamSpec("P")
R = TypeVar("R")


def step(loss: Callable[[], Tensor], *leaves: Tensor) -> Call:
    """Forward and backward of `loss`, as one training step would run them."""

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        loss().backward()

    return run


def finish(device: str) -> None:
    """Wait until all that was asked of the device is done: a GPU works on after a call has returned."""
    if device == "cuda":
        torch.cuda.synchronize()


def take_turns(contenders: Mapping[str, Call], rounds: int, calls: int = 1, device: str = "cpu") -> Samples:
    """Seconds per call. All contenders run in every round, so that a slow moment of the machine hits all."""
    for call in contenders.values():
        for _ in range(calls):
            call()
    samples: Samples = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            if calls > 1:
                call()  # the caches are still the other contender's
            finish(device)
            start = time.perf_counter()
            for _ in range(calls):
                call()
            finish(device)
            samples[name].append((time.perf_counter() - start) / calls)
    return samples


def ratio(processes: Sequence[Samples], numerator: str, denominator: str) -> float:
    """The median over processes of the ratio of medians within each."""
    median = statistics.median
    return median(median(samples[numerator]) / median(samples[denominator]) for samples in processes)


def percentile(values: Sequence[float], percent: float) -> float:
    return float(torch.quantile(torch.tensor(values, dtype=torch.float64), percent / 100))


def in_fresh_process(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run `function` in a new interpreter, which inherits nothing: no warm thread pool, no grown heap."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()


def peak_growth(call: Call) -> int:
    """How many bytes the process grew by at the worst moment of `call`; for fresh processes only."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    except OSError:
        before = _kernel_bytes("self/status", "VmHWM")
    else:
        before = _kernel_bytes("self/status", "VmRSS")
    call()
    return _kernel_bytes("self/status", "VmHWM") - before


def peak_growth_of_gpu(call: Call) -> int:
    """How many bytes of the GPU's memory were taken at the worst moment of `call`, beside what was before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def free_memory() -> int:
    """The bytes that a process may take here without driving others out: nine tenths of what is free."""
    return int(0.9 * _kernel_bytes("meminfo", "MemAvailable"))


def limit_memory() -> None:
    """Let this process fail if it takes more than `free_memory` from here on, before the machine runs out."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (_kernel_bytes("self/status", "VmSize") + free_memory(), hard))


def _kernel_bytes(file: str, field: str) -> int:
    """What the kernel says in a file under /proc."""
    lines = Path("/proc", file).read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def environment(device: str = "cpu") -> dict[str, str]:
    """What the numbers depend on, for the record."""
    here = {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "isa": isa(),
        "tripletops": tripletops.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    return here | _gpu() if device == "cuda" else here


def isa() -> str:
    """The instruction set that tripletops' kernels use here; "none" where they don't run."""
    return info.isa() or "none"


def _gpu() -> dict[str, str]:
    name, architecture = info.gpu() or ("none", "none")
    return {
        "gpu": name,
        "architecture": architecture,
        "cuda": torch.version.cuda or f"ROCm {torch.version.hip}",
        "triton": info.triton_version() or "none",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
