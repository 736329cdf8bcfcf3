"""`python -m bench builds OLD`: how fast is this source tree beside another one, in every call of ours that
the tables have? With `--bits N`: do both compute the same bits?

OLD is the folder of the other tree, with its library built in place (`pip install -e .` does that). Each tree
has a process of its own, with its own tripletops and the benchmarks of this tree. Both must suit the Python
and the torch that run this.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench import bits, core, dense, peers
from bench.measure import THREADS, Call, take_turns
from bench.registry import CALLS_IN_A_BLOCK, SMALL, Row
from bench.workers import HERE, Worker

SLOWER = 1.03  # a larger ratio is marked
ROUNDS = 15
ROWS = {row.name: row for row in (*core.ROWS, *dense.ROWS) if row.unit == "s"}
OTHERS = {*peers.PRODUCTS, *core.PEERS, dense.METRIC_LEARNING}
NO_SUCH_FUNCTION = "module 'tripletops' has no attribute"


def own_calls(names: Sequence[str]) -> Iterator[tuple[Row, str]]:
    """The rows of these names (none: all), with each contender of theirs that calls tripletops."""
    for row in ROWS.values():
        if not names or row.name in names:
            own = (contender for contender in (row.numerator, row.denominator) if contender not in OTHERS)
            yield from ((row, contender) for contender in own)


def answer(question: Any) -> Any:
    """Seconds per call of a contender; in the process of a worker."""
    torch.set_num_threads(THREADS)
    name, contender, calls = question
    try:
        call = _call(name, contender)
    except AttributeError as error:
        return str(error)
    return take_turns({contender: call}, 1, calls)[contender][0]


@lru_cache(maxsize=1)
def _call(name: str, contender: str) -> Call:
    row = ROWS[name]
    return row.contenders(row.shape)[contender]


def compare(old: Worker, new: Worker, row: Row, contender: str, rounds: int) -> tuple[float, float] | None:
    """Median seconds of both trees, which take turns; None where the old one lacks the function."""
    question = [row.name, contender, CALLS_IN_A_BLOCK if row.shape.n <= SMALL else 1]
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for worker, own in zip((old, new), seconds, strict=True):
            taken = worker.ask(question)
            if worker is old and str(taken).startswith(NO_SUCH_FUNCTION):
                return None
            if isinstance(taken, str):
                raise RuntimeError(f"{row.name}: {taken}")
            own.append(taken)
    return median(seconds[0]), median(seconds[1])


def report(tree: Path, names: Sequence[str], rounds: int) -> None:
    """Print new ÷ old for every call of ours in these rows."""
    width = 2 + max(len(name) for name in ROWS)
    print(f"{'row':<{width}}{'call':<14}{'old ms':>10}{'new ms':>10}{'new ÷ old':>11}", flush=True)
    slower = []
    for row, contender in own_calls(names):
        title = f"{row.name:<{width}}{contender:<14}"
        with Worker(tree, __name__) as old, Worker(HERE, __name__) as new:
            seconds = compare(old, new, row, contender, rounds)
        if seconds is None:
            print(f"{title}  only in the new", flush=True)
            continue
        before, after = seconds
        mark = "  slower" if after > SLOWER * before else ""
        print(f"{title}{1e3 * before:>10.3f}{1e3 * after:>10.3f}{after / before:>11.3f}{mark}", flush=True)
        if mark:
            slower.append(f"{row.name} ({contender})")
    print(f"slower by more than {SLOWER - 1:.0%}: {', '.join(slower) or 'none'}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", type=Path, help="the folder of the other tree")
    parser.add_argument("--rows", nargs="+", default=[], choices=ROWS, metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"turns of each tree ({ROUNDS})")
    parser.add_argument("--bits", type=int, metavar="N", help="compare N random calls of every function")
    parser.add_argument("--cases", nargs="+", metavar="NAME/NUMBER", help="repeat these calls of --bits")


def run(arguments: argparse.Namespace) -> int:
    """What `sys.exit` is to be told: 1 where bits differ."""
    if arguments.cases:
        return int(bits.repeat(arguments.old, arguments.cases) > 0)
    if arguments.bits:
        return int(bits.report(arguments.old, arguments.bits) > 0)
    report(arguments.old, arguments.rows, arguments.rounds)
    return 0
