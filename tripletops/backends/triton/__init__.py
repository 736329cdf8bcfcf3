"""The ops on Triton's kernels: for GPU tensors, or for CPU tensors under Triton's interpreter.

The arguments are the records of `_call`, flat. No result has a shape that depends on values, and nothing
waits for the device, but for objectives over all positives: they read the size of the largest class.
"""

from __future__ import annotations

from typing import Any

from tripletops._call import Call, Differentiated, Evaluated, Gradients, Mined
from tripletops.backends.triton import selection
from tripletops.backends.triton.objectives import objective_of


def mine(*arguments: Any) -> Mined:
    mined, _ = selection.mine(Call(*arguments))
    return mined


def loss(*arguments: Any) -> Evaluated:
    return objective_of(Call(*arguments)).evaluate()


def gradient(*arguments: Any) -> Gradients:
    given = Differentiated(*arguments)
    return objective_of(given).differentiate(given)
