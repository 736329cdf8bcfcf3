"""Goes through the calls of a seed, keeps count, and remembers where it was.

Child processes make the calls, a chunk of them each, for two reasons. The instruction set is chosen when the
kernels are loaded, so each chunk can have another one. And a call that kills its process is a failure like
any other. Progress is kept in a small file: a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / "build" / "fuzz.json"
CHUNK = 5000
SAVE_EVERY = 5.0  # seconds


@dataclass
class State:
    """What a run is, and how far it is; `next` is the first call that was not made yet."""

    seed: int
    calls: int
    backend: str
    isas: list[str]
    next: int = 0
    seconds: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(".new")
        written.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        written.replace(path)

    def isa_of(self, number: int) -> str:
        return self.isas[number // CHUNK % len(self.isas)]

    def end_of_chunk(self) -> int:
        return min(self.calls, (self.next // CHUNK + 1) * CHUNK)


def command_of(seed: int, number: int, backend: str, isa: str) -> str:
    words = f"python -m tests.fuzz --seed {seed} --case {number}"
    return f"{words} --backend {backend}" if backend != "cpu" else f"{words} --isa {isa}"


def set_environment(backend: str, isa: str | None) -> None:
    """What has to be there before the kernels are loaded."""
    os.environ |= {"TRIPLETOPS_POISON": "1", "TRIPLETOPS_BACKEND": backend}
    if backend == "triton":
        os.environ["TRITON_INTERPRET"] = "1"
    elif isa:
        os.environ["TRIPLETOPS_ISA"] = isa


# In the child


def prepare() -> None:
    """One thread for small batches, and memory that nobody wrote reads as NaN, as in the tests."""
    import numpy as np
    import torch

    np.seterr(all="ignore")  # of numbers that a mask throws away
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def certified(number: int, backend: str) -> AbstractContextManager[None]:
    """Every other call is made by the certified pass, which small batches would never see."""
    from tripletops.backends import cpu

    force = backend == "cpu" and number % 2 == 1
    return cpu.using_certified("always") if force else nullcontext()


def kind_of(case: Any) -> dict[str, str]:
    return {"function": case.function, "kind": case.kind, "type": case.type_name}


def make_calls(seed: int, begin: int, end: int, backend: str) -> None:
    """Says which call comes next, then what was wrong with it, a line of JSON for each."""
    from tests.fuzz.cases import case_of
    from tests.fuzz.checks import broken_promises

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is for the parent to tell about
    prepare()
    for number in range(begin, end):
        print(json.dumps({"number": number}), flush=True)
        case = case_of(seed, number, small=backend == "triton")
        with certified(number, backend):
            broken = broken_promises(case)
        if broken:
            print(json.dumps({"broken": broken, **kind_of(case)}), flush=True)


def show_case(seed: int, number: int, backend: str) -> int:
    from tests.fuzz.cases import case_of
    from tests.fuzz.checks import broken_promises

    prepare()
    case = case_of(seed, number, small=backend == "triton")
    print(case.describe())
    with certified(number, backend):
        broken = broken_promises(case)
    for check, message in broken:
        print(f"BROKEN {check}: {message}")
    if not broken:
        print("all promises kept")
    return int(bool(broken))


# In the parent


def usable_isas() -> list[str]:
    from tripletops.backends import cpu

    return cpu.instruction_sets() or sys.exit(cpu.why_not())


def group_of(failure: dict[str, Any]) -> tuple[str, str, str]:
    return failure["function"], failure["kind"], failure["type"]


def report(state: State, failure: dict[str, Any]) -> None:
    what = ", ".join(group_of(failure))
    print(f"\nFAILED {what} (seed {state.seed}, call {failure['number']})")
    for check, message in failure["broken"]:
        print(f"  {check}: {message}")
    print(f"  {command_of(state.seed, failure['number'], state.backend, failure['isa'])}", flush=True)


def worker_command(state: State, end: int, isa: str) -> list[str]:
    words = f"--seed {state.seed} --worker {state.next} {end} --backend {state.backend} --isa {isa}"
    return [sys.executable, "-m", "tests.fuzz", *words.split()]


def run_chunk(state: State, path: Path) -> None:
    """Up to the end of the chunk, or to a call that ended its process."""
    from tests.fuzz.cases import case_of

    isa, end, number = state.isa_of(state.next), state.end_of_chunk(), None
    begun = saved = time.monotonic()
    before = state.seconds
    command = worker_command(state, end, isa)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                said = json.loads(line)
                if "number" in said:
                    number = state.next = said["number"]
                else:
                    state.failures.append({"number": number, "isa": isa, **said})
                    state.next += 1
                    report(state, state.failures[-1])
                now = time.monotonic()
                if now - saved > SAVE_EVERY:
                    saved, state.seconds = now, before + now - begun
                    state.save(path)
                    done, failed = f"{state.next:,} of {state.calls:,} calls", len(state.failures)
                    print(f"{done}, {failed} failed, {state.next / state.seconds:.0f} a second", flush=True)
        except BaseException:
            child.kill()
            raise
        finally:
            state.seconds = before + time.monotonic() - begun
    if child.returncode == 0:
        state.next = end
    elif number is None:
        raise RuntimeError(f"the process ended with {child.returncode} before its first call")
    else:
        died = {"broken": [["died", f"the process ended with {child.returncode}"]]}
        kind = kind_of(case_of(state.seed, number, small=state.backend == "triton"))
        state.failures.append({"number": number, "isa": isa, **died, **kind})
        state.next = number + 1
        report(state, state.failures[-1])
    state.save(path)


def summary(state: State) -> str:
    if not state.failures:
        return f"{state.calls:,} calls of seed {state.seed}: all promises kept"
    lines = [f"{state.calls:,} calls of seed {state.seed}: {len(state.failures)} failed"]
    first = {group_of(failure): failure for failure in reversed(state.failures)}
    for group, count in sorted(Counter(map(group_of, state.failures)).items()):
        failure = first[group]
        checks = ", ".join(dict.fromkeys(check for check, _ in failure["broken"]))
        lines.append(f"  {count:5d}  {', '.join(group)}: {checks}")
        lines.append(f"         {command_of(state.seed, failure['number'], state.backend, failure['isa'])}")
    return "\n".join(lines)


def resumed(path: Path, wanted: State, any_seed: bool = False) -> State:
    """The state in the file if it is that of a run like the wanted one and there is something left to do."""
    if not path.exists():
        return wanted
    state = State(**json.loads(path.read_text(encoding="utf-8")))
    same = (state.calls, state.backend, state.isas) == (wanted.calls, wanted.backend, wanted.isas)
    same = same and (any_seed or state.seed == wanted.seed)
    return state if same and state.next < state.calls else wanted


def run_all(state: State, path: Path) -> int:
    which = f"calls {state.next:,} to {state.calls:,}"
    print(f"seed {state.seed}, {which}, {state.backend}: {', '.join(state.isas)}", flush=True)
    try:
        while state.next < state.calls:
            run_chunk(state, path)
    except KeyboardInterrupt:
        state.save(path)
        print(f"\nstopped at call {state.next:,}; the same command goes on there")
        return 130
    print(summary(state))
    return int(bool(state.failures))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, help="default: that of the run that was stopped, else a new one")
    parser.add_argument("--case", type=int, metavar="NUMBER", help="make this call alone and describe it")
    parser.add_argument("--backend", choices=("cpu", "triton"), default="cpu", help="triton is interpreted")
    parser.add_argument("--isa", help="one instruction set (default: all that this machine has, by turns)")
    parser.add_argument("--fresh", action="store_true", help="start over instead of going on")
    parser.add_argument("--state", type=Path, default=STATE, help="where progress is kept")
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker or given.case is not None:
        set_environment(given.backend, given.isa)
    if given.worker:
        make_calls(given.seed, *given.worker, given.backend)
        return 0
    if given.case is not None:
        return show_case(given.seed or 0, given.case, given.backend)
    isas = ["interpreter"] if given.backend == "triton" else [given.isa] if given.isa else usable_isas()
    seed = secrets.randbits(32) if given.seed is None else given.seed
    state = State(seed, given.calls, given.backend, isas)
    if not given.fresh:
        state = resumed(given.state, state, any_seed=given.seed is None)
    return run_all(state, given.state)
