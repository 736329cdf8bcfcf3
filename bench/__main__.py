"""`python -m bench core`, `python -m bench dense`: measure every row of that table here and say which targets
are met."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable
from pathlib import Path

import torch

from bench import core, dense, measure, record
from bench.registry import Row

RESULTS = Path(__file__).parent / "results"
# The rows of a table, and what has to hold before any of them is measured.
SUITES: dict[str, tuple[list[Row], Callable[[], None]]] = {
    "core": (core.ROWS, core.check),
    "dense": (dense.ROWS, dense.check),
}


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(measure.THREADS)
    environment = measure.environment()
    isa = environment["isa"]
    rows, check = SUITES[arguments.suite]
    check()

    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    if arguments.quick:
        print("A quick look at small sizes. This is NOT the table: the targets are for the full sizes.")
    width = 2 + max(len(row.title(row.shape)) for row in rows)
    print(f"{'what':<{width}}{'target':>8}{'measured':>10}{'met':>5}{'to out=':>9}", flush=True)
    when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    rows = [row for row in rows if not arguments.rows or row.name in arguments.rows]
    if arguments.quick:
        rows = [row.quick() for row in rows]
    missed = []
    for row in rows:
        shape, processes = row.measure()
        value, beside = row.value(processes), row.value_beside(processes)
        target = verdict = ""
        if row.target is not None:
            target, verdict = row.target.text(isa), "yes" if row.target.met(value, isa) else "NO"
        if verdict == "NO":
            missed.append(row.name)
        second = "" if beside is None else f"{beside:.2f}"
        line = f"{row.title(shape):<{width}}{target:>8}{value:>10.2f}{verdict:>5}{second:>9}"
        print(line.rstrip(), flush=True)
        if arguments.csv is not None:
            record.append(arguments.csv, when, row, shape, processes, environment)
    if not arguments.quick:
        targets = sum(row.target is not None for row in rows)
        print(f"{targets - len(missed)} of {targets} targets met; missed: {', '.join(missed) or 'none'}")
    if arguments.csv is not None:
        print(f"appended to {arguments.csv}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    suites = parser.add_subparsers(dest="suite", required=True)
    for suite, (rows, _) in SUITES.items():
        names = [row.name for row in rows]
        options = suites.add_parser(suite, help=f"the rows {', '.join(names)}")
        options.add_argument("--rows", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
        options.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
        where = f"bench/results/{suite}.csv"
        options.add_argument("--csv", type=Path, help=f"append here ({where}; --quick: nowhere)")
    arguments = parser.parse_args()
    if arguments.csv is None and not arguments.quick:
        arguments.csv = RESULTS / f"{arguments.suite}.csv"
    return arguments


if __name__ == "__main__":
    main()
