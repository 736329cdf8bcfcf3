"""The memory of Triton's kernels: how much their host code takes, and whether they keep to their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.ops import CASES, CLASSES, FEW_CASES, TRITON, here, total
from tripletops.backends import INTERPRETED

every_case = pytest.mark.parametrize("case", FEW_CASES, ids=str)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that appears, inside of Triton's ops too."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for name, op in TRITON._asdict().items():
            if func is op:
                with self:
                    return getattr(import_module("tripletops.backends.triton"), name)(*args)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


# Of every objective the first, and of `triplet` every rule.
@pytest.mark.parametrize(
    "case", [case for case in FEW_CASES if case in (CASES[case.function][0], *CASES["triplet_loss"])], ids=str
)
def test_no_square_of_the_batch_is_held(case):
    """Neither made on the way nor saved for the gradient."""
    count, width, saved = 200 if INTERPRETED else 4000, 4, []
    classes = CLASSES if "beta" in case.public().keywords else count // 4
    emb, labels = here((torch.randn(count, width, requires_grad=True), torch.arange(count) % classes))
    given = {"ref_emb": emb.detach() + 1, "ref_labels": labels} if FEW_CASES.index(case) % 2 else {}

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    function = here(case.public())
    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = function(emb, labels, **given)
        loss.sum().backward()
    # Rows are padded to 64 dimensions, and parts of a gradient are added up in the end.
    assert 0 < largest.elements < count**2 * 3 / 4
    assert sum(saved) <= 6 * count * width


class Watch:
    """All that the interpreter loads and stores: inside the tensors of the launch, and each place written by
    one program, which alone may read it."""

    def __init__(self) -> None:
        self.begin(())

    def begin(self, tensors: Any) -> None:
        extents = sorted(
            (tensor.data_ptr(), tensor.data_ptr() + last_element(tensor) * tensor.element_size())
            for tensor in tensors
            if isinstance(tensor, Tensor) and tensor.numel()
        )
        self.starts = np.array([start for start, _ in extents], dtype=np.uint64)
        self.ends = np.maximum.accumulate(np.array([0, *(end for _, end in extents)], dtype=np.uint64))
        self.loaded: dict[Any, list[Any]] = {}
        self.stored: dict[Any, list[Any]] = {}

    def see(self, pointers: Any, mask: Any, places: dict[Any, list[Any]], program: Any) -> None:
        places_now = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        size = np.uint64(pointers.get_element_ty().primitive_bitwidth // 8)
        ends = self.ends[np.searchsorted(self.starts, places_now, side="right")]
        assert (places_now + size <= ends).all(), "a place outside of all tensors"
        places.setdefault(program, []).append(places_now)

    def end(self) -> None:
        stored = {program: np.unique(np.concatenate(parts)) for program, parts in self.stored.items()}
        programs = [*stored]
        places = np.concatenate([np.empty(0, np.uint64), *stored.values()])
        if not len(places):
            return
        owners = np.repeat(np.arange(len(programs)), [len(parts) for parts in stored.values()])
        order = np.argsort(places)
        places, owners = places[order], owners[order]
        assert (np.diff(places) > 0).all(), "two programs write to the same place"
        for program, parts in self.loaded.items():
            read = np.unique(np.concatenate(parts))
            at = np.minimum(np.searchsorted(places, read), len(places) - 1)
            others = owners[at] != (programs.index(program) if program in stored else -1)
            assert not ((places[at] == read) & others).any(), "one program reads what another writes"


def last_element(tensor: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@contextmanager
def watched() -> Iterator[Watch]:
    from triton.runtime import interpreter

    watch = Watch()
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    to_host, run = executor._init_args_hst, executor.__call__
    load, store = builder.create_masked_load, builder.create_masked_store

    def given(self: Any, *arguments: Any) -> Any:
        result = to_host(self, *arguments)
        watch.begin(tree_leaves(result))
        return result

    def launched(self: Any, *arguments: Any, **options: Any) -> None:
        run(self, *arguments, **options)
        watch.end()

    def loaded(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        watch.see(pointers, mask, watch.loaded, tuple(self.grid_idx))
        return load(self, pointers, mask, *rest)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        watch.see(pointers, mask, watch.stored, tuple(self.grid_idx))
        return store(self, pointers, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(executor, "_init_args_hst", given)
        patches.setattr(executor, "__call__", launched)
        patches.setattr(builder, "create_masked_load", loaded)
        patches.setattr(builder, "create_masked_store", stored)
        yield watch


@pytest.mark.skipif(not INTERPRETED, reason="watches what the interpreter loads and stores")
@every_case
def test_kernels_keep_to_their_own_memory(case):
    function = case.public()
    for count, width, candidates in ((0, 3, 5), (1, 0, None), (35, 17, None), (9, 3, 33)):
        generator = torch.Generator().manual_seed(count)
        emb = torch.randn(count, width, generator=generator).requires_grad_()
        given = {}
        if candidates is not None:
            given = {
                "ref_emb": torch.randn(candidates, width, generator=generator).requires_grad_(),
                "ref_labels": torch.arange(candidates) % CLASSES,
            }
        with watched():
            total(function(emb, torch.arange(count) % CLASSES, **given, ignore_label=2)).backward()


@pytest.mark.skipif(not INTERPRETED, reason="watches what the interpreter loads and stores")
def test_the_watch_sees():
    """What it is there for, in a kernel that does it all."""
    triton = pytest.importorskip("triton")
    tl = triton.language

    @triton.jit
    def kernel(x, y, at: tl.constexpr, to: tl.constexpr):
        program = tl.program_id(0)
        tl.store(y + program * to, tl.load(x + at))

    x, y = torch.zeros(64), torch.zeros(64)
    with watched():
        kernel[(2,)](x, y, 0, 1)
        for arguments, fault in (
            ((x, y, 64, 1), "outside"),
            ((x[:4], y, 4, 1), "outside"),
            ((x, y, 0, 64), "outside"),
            ((x, y, 0, 0), "two programs"),
            ((y, y, 0, 1), "one program reads"),
        ):
            with pytest.raises(Exception, match=fault):
                kernel[(2,)](*arguments)
