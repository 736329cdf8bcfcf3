"""`python -m bench core`: measure every row of the core table here and say which targets are met."""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

import torch

from bench import measure, record
from bench.registry import CORE, check

RESULTS = Path(__file__).parent / "results"
QUICK_ROUNDS = 3
WIDTH = 54


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(measure.THREADS)
    environment = measure.environment()
    isa = environment["isa"]
    check()

    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    if arguments.quick:
        print("A quick look at small sizes. This is NOT the table: the targets are for the full sizes.")
    print(f"{'what':<{WIDTH}}{'target':>8}{'measured':>10}{'met':>5}{'to out=':>9}", flush=True)
    when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    rows = [row for row in CORE if not arguments.rows or row.name in arguments.rows]
    missed = []
    for row in rows:
        shape = row.shape.quick() if arguments.quick else row.shape
        processes = row.measure(shape, QUICK_ROUNDS if arguments.quick else row.rounds)
        value, beside = row.value(processes), row.value_beside(processes)
        met = row.target.met(value, isa)
        if not met:
            missed.append(row.name)
        target, verdict = ("", "") if arguments.quick else (row.target.text(isa), "yes" if met else "NO")
        second = "" if beside is None else f"{beside:.2f}"
        line = f"{row.title(shape):<{WIDTH}}{target:>8}{value:>10.2f}{verdict:>5}{second:>9}"
        print(line.rstrip(), flush=True)
        if arguments.csv is not None:
            record.append(arguments.csv, when, row, shape, processes, environment)
    if not arguments.quick:
        print(f"{len(rows) - len(missed)} of {len(rows)} targets met; missed: {', '.join(missed) or 'none'}")
    if arguments.csv is not None:
        print(f"appended to {arguments.csv}")


def _arguments() -> argparse.Namespace:
    names = [row.name for row in CORE]
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("suite", choices=["core"])
    parser.add_argument("--rows", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--csv", type=Path, help="append here (bench/results/core.csv; --quick: nowhere)")
    arguments = parser.parse_args()
    if arguments.csv is None and not arguments.quick:
        arguments.csv = RESULTS / "core.csv"
    return arguments


if __name__ == "__main__":
    main()
