"""`python -m bench builds OLD --bits N`: do two source trees compute the same bits?

N random calls (`random_calls`) of every function that both trees have are made in both, forward and backward.
What comes out is compared by its sha256. Calls with a word that the old tree does not know are counted, and
others are made in their place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.random_calls import Case, Option, arguments, case_of, cases, functions, run
from bench.workers import HERE, Worker

SHOWN = 5  # calls with other bits that are printed for each function
MOST_DRAWS = 5  # cases that are made for each one that is to be compared

Answer = dict[str, Any]


def answer(question: Any) -> Any:
    """What a worker says: its functions with their options, or what came of a call."""
    if question == "functions":
        return functions()
    case, want_values = Case(*question[0]), question[1]
    torch.set_num_threads(1 + case.number % 2)
    try:
        results = run(case)
    except (ValueError, TypeError, RuntimeError) as error:
        return {"error": type(error).__name__, "message": str(error)}
    said: Answer = {"digests": {name: digest(tensor) for name, tensor in results.items()}}
    if want_values:
        said["values"] = {name: tensor.double().flatten().tolist() for name, tensor in results.items()}
    return said


def digest(tensor: Tensor) -> str:
    """sha256 of type, shape and bits."""
    seen = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    seen.update(bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))
    return seen.hexdigest()


@dataclass
class Tally:
    """What came of the calls of one function."""

    same: int = 0
    only_new: int = 0  # the old tree does not know a word
    refused: int = 0  # by both
    different: list[tuple[Case, str]] = field(default_factory=list)  # and in what

    @property
    def compared(self) -> int:
        return self.same + len(self.different)

    @property
    def made(self) -> int:
        return self.compared + self.only_new + self.refused

    def add(self, case: Case, old: Answer, new: Answer) -> None:
        if "not one of" in old.get("message", "") and "error" not in new:
            self.only_new += 1
        elif "error" in old and old["error"] == new.get("error"):
            self.refused += 1
        elif old == new:
            self.same += 1
        else:
            self.different.append((case, difference(old, new)))


def difference(old: Answer, new: Answer) -> str:
    """Which results differ, and by how much where the values are known."""
    if "error" in old or "error" in new:
        texts = [
            f"{said['error']}: {said['message']}" if "error" in said else "a result" for said in (old, new)
        ]
        return f"{texts[0]} (old), {texts[1]} (new)"
    names = dict.fromkeys([*old["digests"], *new["digests"]])
    found = [name for name in names if old["digests"].get(name) != new["digests"].get(name)]
    if "values" in old:
        return ", ".join(f"{name} {_distance(old, new, name)}" for name in found)
    return ", ".join(found)


def _distance(old: Answer, new: Answer, name: str) -> str:
    before, after = (torch.tensor(said["values"].get(name, []), dtype=torch.float64) for said in (old, new))
    if len(before) != len(after):
        return f"({len(before)} numbers, then {len(after)})"
    others = before.view(torch.int64) != after.view(torch.int64)
    if not others.any():
        return "(its type or shape)"
    most, largest = (before - after)[others].abs().max(), before.abs().max()
    count = f"{int(others.sum())} of {len(before)} numbers"
    return f"({count}, by up to {most:.2g}, the largest being {largest:.2g})"


def shared_functions(old: Worker, new: Worker) -> dict[str, list[Option]]:
    """The functions of both trees with the options of both; the words are those of the new one."""
    before, after = old.ask("functions"), new.ask("functions")
    shared = {}
    for function in (name for name in after if name in before):
        names = {option[0] for option in before[function]}
        shared[function] = [Option(*option) for option in after[function] if option[0] in names]
    return shared


def ask_both(old: Worker, new: Worker, case: Case, want_values: bool = False) -> tuple[Answer, Answer]:
    for worker in (old, new):
        worker.send([case, want_values])
    return old.receive(), new.receive()


def compare(old: Worker, new: Worker, function: str, options: list[Option], count: int) -> Tally:
    """Make calls until `count` of them are compared."""
    tally = Tally()
    for case in cases(function, options):
        tally.add(case, *ask_both(old, new, case))
        if tally.compared == count or tally.made == MOST_DRAWS * count:
            break
    return tally


def report(tree: Path, count: int) -> int:
    """Print the table, then the first calls with other bits. The number of them is returned."""
    with Worker(tree, __name__) as old, Worker(HERE, __name__) as new:
        print(
            f"{'function':<24}{'calls':>7}{'other bits':>12}{'only in the new':>17}{'refused':>9}", flush=True
        )
        different = []
        for function, options in shared_functions(old, new).items():
            tally = compare(old, new, function, options, count)
            counts = f"{len(tally.different):>12}{tally.only_new:>17}{tally.refused:>9}"
            print(f"{function:<24}{tally.compared:>7}{counts}", flush=True)
            different.append(tally.different)
    for calls in different:
        for case, what in calls[:SHOWN]:
            print(f"\n{_description(case, what)}")
    total = sum(len(calls) for calls in different)
    print(f"\ncalls with other bits: {total}")
    if total:
        print(f"to repeat some: python -m bench builds {tree} --cases NAME/NUMBER …")
    return total


def repeat(tree: Path, names: Sequence[str]) -> int:
    """Make these calls again and print how far the results are apart. The number of different ones is
    returned."""
    total = 0
    with Worker(tree, __name__) as old, Worker(HERE, __name__) as new:
        options = shared_functions(old, new)
        for name in names:
            function, _, number = name.partition("/")
            case = case_of(function, int(number), options[function])
            tally = Tally()
            tally.add(case, *ask_both(old, new, case, want_values=True))
            total += len(tally.different)
            what = tally.different[0][1] if tally.different else "nothing"
            print(_description(case, what))
    return total


def _description(case: Case, what: str) -> str:
    return f"{case.name} differs in {what}\n  {arguments(case).summary}\n  {case.options}"
