"""What a step costs beside its arithmetic: a forward and a backward of a function whose kernels do not run.

Under fake tensors there is nothing to compute with: every launch is written down, Triton's by a recorder and
torch's by its dispatcher, with the bytes it is given. Whatever would make the host wait is written down too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tripletops._words import FUNCTION
from tripletops.backends.triton import catalogue
from tripletops.backends.triton.tiles import EVERYDAY_ON_GPUS, Launch, Recorder
from tripletops.backends.triton.walk import DIFFERENCES, NO_VALUES

PAIRWISE = ("walk_kernel", "weigh_kernel")  # what is not O(N·D)


class Walk(NamedTuple):
    """A launch that goes over pairs, with one of the tiles of sm_80."""

    launch: Launch
    dtype: torch.dtype
    blocks: int
    tiles: int  # that a block goes over
    width: int
    flops: int

    @property
    def record(self) -> catalogue.Compilation:
        """As it can be compiled."""
        return catalogue.compilation("sm_80", self.dtype, self.launch)


class Step(NamedTuple):
    kernels: Counter[str]  # Triton's launches
    operations: Counter[str]  # torch's, each counted as one launch: a sort is several
    waits: Counter[str]  # what stops the host until the device is done, by what asks for it
    bytes: int  # of the different tensors that each launch is given, but for those that go over pairs
    walks: list[Walk]  # those

    @property
    def launches(self) -> int:
        return self.kernels.total() + self.operations.total()


# Of these nothing runs on the device.
_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# Reading a value, making a tensor of values of the host's, or an operation whose result has as many elements
# as a condition is true for.
_WAITS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "lift_fresh", "scalar_tensor"}


def _size(tensors: Any) -> int:
    """Bytes of the different tensors."""
    different = {id(tensor): tensor for tensor in tree_leaves(tensors) if isinstance(tensor, Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in different.values())


def _bytes_given(arguments: dict[str, Any]) -> int:
    sampled = "sampled" in arguments  # of the rows it reads nine
    return _size([given for name, given in arguments.items() if not (sampled and name == "given")])


class _Operations(TorchDispatchMode):
    """Torch's own launches. Operations that are made of others are taken apart first."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # questions about a tensor
            return func(*args, **kwargs)
        with self:
            taken_apart = func.decompose(*args, **kwargs)
        if taken_apart is not NotImplemented:
            return taken_apart
        name = func.overloadpacket.__name__
        result = func(*args, **kwargs)
        tensors = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        found = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        if name in _WAITS or (name == "_to_copy" and kwargs.get("device") is not None):
            self.waits[name] += 1
        elif name not in _ALLOCATES and not func.is_view:
            self.operations[name] += 1
            self.bytes += _size([*tensors, *found])
        return result


def step(name: str, count: int, width: int = 128, dtype: torch.dtype = torch.float32, **words: str) -> Step:
    """A forward and a backward of the function with its defaults, but for the words that are given."""
    operations = _Operations()
    recorder = Recorder(everyday=count <= EVERYDAY_ON_GPUS, only="sm_80")
    with FakeTensorMode(), recorder, operations:
        catalogue.run(FUNCTION[name], catalogue.defaults_of(FUNCTION[name]) | words, dtype, count, width)
    kernels = Counter(launch.kernel.__name__ for launch in recorder.launches)
    beside = [launch.arguments for launch in recorder.launches if launch.kernel.__name__ not in PAIRWISE]
    return Step(
        kernels=kernels,
        operations=operations.operations,
        waits=operations.waits + Counter({"read_back": recorder.read_back} if recorder.read_back else {}),
        bytes=operations.bytes + sum(map(_bytes_given, beside)),
        walks=[_walk(launch, dtype) for launch in recorder.launches if launch.kernel.__name__ in PAIRWISE],
    )


def _walk(launch: Launch, dtype: torch.dtype) -> Walk:
    given = launch.arguments
    # A product is a multiplication and an addition, a squared difference a subtraction more.
    operations = {NO_VALUES.value: 0, DIFFERENCES.value: 3, None: 4}.get(given.get("VALUES"), 2)
    flops = given["x_length"] * given["y_length"] * given["width"] * operations
    return Walk(launch, dtype, prod(launch.grid), given["tiles"], given["width"], flops)


def host_step(name: str, count: int, width: int = 128) -> Callable[[], None]:
    """The same on CPU tensors, kernels stubbed: what its host code takes, Triton's launcher left out.

    torch's own operations are those of few rows, whatever the count.
    """
    function, everyday = FUNCTION[name], count <= EVERYDAY_ON_GPUS
    words = catalogue.defaults_of(function)

    def run() -> None:
        with Recorder(everyday, only="sm_80"):
            catalogue.run(function, words, torch.float32, 16, width)

    return run
