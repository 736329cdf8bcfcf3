"""`python -m bench core`, `dense`, `certified`, `diagnostics`: measure every row of that table here and say
which targets are met; the first also on a GPU, with `--device cuda`. `python -m bench gpu-static`: inspect
what the GPU kernels compile to. `python -m bench builds OLD`: compare this source tree with another one, by
speed or by bits."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from bench import builds, certified, core, dense, diagnostics, gpu_static, measure, record
from bench.registry import Row, Shape

RESULTS = Path(__file__).parent / "results"
# By table and device: the rows, and the check that has to pass before any of them is measured.
SUITES: dict[str, dict[str, tuple[list[Row], Callable[[], None]]]] = {
    "core": {"cpu": (core.ROWS, core.check), "cuda": (core.GPU_ROWS, core.check_gpu)},
    "dense": {"cpu": (dense.ROWS, dense.check)},
    "certified": {"cpu": (certified.ROWS, certified.check)},
    "diagnostics": {"cpu": (diagnostics.ROWS, diagnostics.check)},
}


def main() -> None:
    arguments = _arguments()
    if arguments.suite == "gpu-static":
        sys.exit(gpu_static.run(arguments.target, arguments.kernel, arguments.csv, arguments.jobs))
    if arguments.suite == "builds":
        sys.exit(builds.run(arguments))
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(f"No GPU here that torch {torch.__version__} could use: nothing was measured")
        return
    torch.set_num_threads(measure.THREADS)
    rows, check = SUITES[arguments.suite][arguments.device]
    check()
    chosen = [row for row in rows if not arguments.rows or row.name in arguments.rows]
    _measure_table(chosen, arguments)
    if arguments.csv is not None:
        print(f"appended to {arguments.csv}")


def _measure_table(rows: list[Row], arguments: argparse.Namespace) -> None:
    environment = measure.environment(arguments.device)
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    if arguments.quick:
        rows = [row.quick() for row in rows]
        print("A quick look at small sizes. This is NOT the table: the targets are for the full sizes.")
    width = 2 + max(len(row.title(row.shape)) for row in rows)
    print(f"{'what':<{width}}{'target':>8}{'measured':>10}{'met':>5}{'to out=':>9}", flush=True)
    when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    missed = []
    for row in rows:
        shape, processes = row.measure()
        print(_line(row, shape, processes, environment["isa"], width), flush=True)
        if row.target is not None and not row.target.met(row.value(processes), environment["isa"]):
            missed.append(row.name)
        if arguments.csv is not None:
            record.append(arguments.csv, when, row, shape, processes, environment)
    targets = sum(row.target is not None for row in rows)
    if targets:
        print(f"{targets - len(missed)} of {targets} targets met; missed: {', '.join(missed) or 'none'}")


def _line(row: Row, shape: Shape, processes: list[measure.Samples], isa: str, width: int) -> str:
    value, beside = row.value(processes), row.value_beside(processes)
    target = verdict = ""
    if row.target is not None:
        target, verdict = row.target.text(isa), "yes" if row.target.met(value, isa) else "NO"
    second = "" if beside is None else f"{beside:.2f}"
    return f"{row.title(shape):<{width}}{target:>8}{value:>10.2f}{verdict:>5}{second:>9}".rstrip()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    suites = parser.add_subparsers(dest="suite", required=True)
    for suite, tables in SUITES.items():
        _add_table_options(suites, suite, tables)
    gpu_static.add_options(
        suites.add_parser("gpu-static", help="registers, spills, occupancy of GPU kernels")
    )
    builds.add_options(suites.add_parser("builds", help="this source tree beside another one"))
    arguments = parser.parse_args()
    if arguments.suite == "builds":
        return arguments
    if arguments.suite == "gpu-static":
        part, name = arguments.target or arguments.kernel, "gpu_static.csv"
    else:
        part, name = arguments.quick, _file_name(arguments.suite, arguments.device)
        rows, _ = SUITES[arguments.suite][arguments.device]
        if unknown := set(arguments.rows) - {row.name for row in rows}:
            parser.error(f"no such row on {arguments.device}: {', '.join(sorted(unknown))}")
    if arguments.csv is None and not part:
        arguments.csv = RESULTS / name
    return arguments


def _add_table_options(suites: Any, suite: str, tables: Mapping[str, tuple[list[Row], object]]) -> None:
    names = ", ".join(dict.fromkeys(row.name for rows, _ in tables.values() for row in rows))
    options = suites.add_parser(suite, help=f"the rows {names}")
    options.add_argument("--rows", nargs="+", default=[], metavar="NAME", help=names)
    options.add_argument("--device", choices=tables, default="cpu", help="where to measure")
    options.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    where = " or ".join(f"bench/results/{_file_name(suite, device)}" for device in tables)
    options.add_argument("--csv", type=Path, help=f"append here ({where}; --quick: nowhere)")


def _file_name(suite: str, device: str) -> str:
    return f"{suite}.csv" if device == "cpu" else f"{suite}_{device}.csv"


if __name__ == "__main__":
    main()
