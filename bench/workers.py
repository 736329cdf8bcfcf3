"""Processes that answer questions with the tripletops of any source tree, and the benchmarks of this one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).resolve().parents[1]

# tripletops is imported from its own tree, and only then `bench` from this one. What a library prints must
# not be taken for an answer, so answers have a copy of stdout to themselves.
_PROGRAM = """
import os, sys
tree, here, module = sys.argv[1:]
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.path.insert(0, tree)
import tripletops
assert tripletops.__file__.startswith(tree), tripletops.__file__
sys.path[0] = here
import importlib
from bench.workers import serve
serve(importlib.import_module(module).answer, answers)
"""


def serve(answer: Callable[[Any], Any], answers: Any) -> None:
    """Answer every question on stdin, a line of JSON each; this is what a worker's process does."""
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


class Worker:
    """A process with the tripletops of `tree`. It answers by the function `answer` of `module`."""

    def __init__(self, tree: Path, module: str) -> None:
        self.tree = tree.resolve()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, f"{self.tree}/", str(HERE), module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()

    def send(self, question: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        """The answer to the oldest question that has none yet."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process with the tripletops of {self.tree} ended")
        return json.loads(line)

    def ask(self, question: Any) -> Any:
        self.send(question)
        return self.receive()
