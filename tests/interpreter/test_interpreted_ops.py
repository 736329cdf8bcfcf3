"""Triton's ops as torch sees them: opcheck, torch.compile, derivatives that are refused, bad input."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from helpers import DEVICE, bits
from test_errors import DEGENERATE, FUNCTIONS, LOSSES, NUMBERS, TRIPLET_DRAWING, WORDS
from test_ops import FUNCTIONS as TUPLE_FUNCTIONS
from test_ops import (
    OBJECTIVES,
    arguments,
    nothing_compiled,  # noqa: F401  (a fixture that runs by itself)
    pytestmark,  # noqa: F401
    refused,
    tuples_arguments,
    tuples_backward_arguments,
)
from torch import Tensor
from torch.utils._pytree import tree_map_only

import tripletops as T
from tripletops import ops

OPS = {name: getattr(torch.ops.tripletops, f"triton_{name}").default for name in
       ("mine", "triplet_forward", "triplet_backward", "tuples_forward", "tuples_backward")}  # fmt: skip


def here(given: Any) -> Any:
    """The same on the device on trial, leaves staying leaves."""
    if isinstance(given, partial):
        return partial(given.func, *here(given.args), **here(given.keywords))
    move = lambda tensor: tensor.detach().to(DEVICE).requires_grad_(tensor.requires_grad)  # noqa: E731
    return tree_map_only(Tensor, move, given)


def rules(positive: str, negative: str, distance: str) -> dict[str, int]:
    return {
        "positive": ops.POSITIVE[positive],
        "negative": ops.NEGATIVE[negative],
        "distance": ops.DISTANCE[distance],
    }


# Those of opcheck's tests that call an op but a few times; torch.compile is tried below.
QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize(
    ("ref", "dtype", "words", "loss", "reduction"),
    [
        (False, torch.float32, ("easy", "random", "cosine"), "second_order", "mean"),
        (True, torch.float64, ("hard", "easy", "euclidean"), "margin", "none"),
        (True, torch.bfloat16, ("random", "distance", "sqeuclidean"), "soft_margin", "mean_nonzero"),
    ],
)
def test_opcheck(ref, dtype, words, loss, reduction):
    check = partial(torch.library.opcheck, **({} if words[0] == "easy" else {"test_utils": QUICK}))
    mining = here(arguments(ref=ref, dtype=dtype, **rules(*words)))
    check(OPS["mine"], mining)
    given = (*mining, ops.LOSS[loss], ops.REDUCTION[reduction], 0.2, 1.0)
    check(OPS["triplet_forward"], given)
    value, picks, terms = OPS["triplet_forward"](*given)
    emb, memory = (None if tensor is None else tensor.detach() for tensor in (given[0], given[2]))
    for wants in itertools.product((False, True), (False, ref)):
        given = (torch.ones_like(value), emb, memory, picks, terms, ops.DISTANCE[words[2]], *wants)
        check(OPS["triplet_backward"], given)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_opcheck_of_tuples(objective):
    turn = [*OBJECTIVES].index(objective)
    check = partial(torch.library.opcheck, **({} if turn == 3 else {"test_utils": QUICK}))
    ref, dtype = turn % 2 == 0, (torch.float32, torch.float64, torch.bfloat16)[turn % 3]
    given = here(tuples_arguments(objective, turn % 4, ref=ref, dtype=dtype))
    check(OPS["tuples_forward"], given)
    loss, *kept = OPS["tuples_forward"](*given)
    wants = turn % 3 != 0, ref
    check(OPS["tuples_backward"], tuples_backward_arguments(given, torch.ones_like(loss), *kept, *wants))


def test_self_index_out_of_range_is_harmless_in_the_kernel():
    given = [*here(arguments(requires_grad=False, ref=True))]
    expected, _ = OPS["mine"](*given[:4], None, *given[5:])
    given[4] = here(torch.tensor([2**62, -(2**62)] + [10**6] * 11))
    assert torch.equal(OPS["mine"](*given)[0], expected)


# torch.compile and autograd

EVERY_FUNCTION = {
    **{
        f"{positive}+{negative}": partial(
            T.triplet_loss, positive=positive, negative=negative, loss="soft_margin", seed=torch.tensor(99)
        )
        for positive, negative in (("hard", "hard"), ("easy", "semihard"), ("random", "distance"))
    },
    **TUPLE_FUNCTIONS,
}
every_function = pytest.mark.parametrize("name", EVERY_FUNCTION)


def check_compiled(name: str, compiler: str, ref: bool) -> None:
    function = here(EVERY_FUNCTION[name])
    emb, labels, memory, ids, me, *_ = here(arguments(ref=ref))

    def step(emb: Tensor, memory: Tensor | None) -> Tensor:
        return function(emb * 2, labels, ref_emb=memory, ref_labels=ids, self_index=me)

    wanted = [tensor for tensor in (emb, memory) if tensor is not None]
    eager = step(emb, memory)
    compiled = torch.compile(step, fullgraph=True, backend=compiler)(emb, memory)
    assert torch.equal(eager, compiled)
    if not eager.is_floating_point():
        return
    gradients = (torch.autograd.grad(loss.sum(), wanted) for loss in (eager, compiled))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


@every_function
def test_compiled_without_a_graph_break(name):
    check_compiled(name, "aot_eager", ref=len(name) % 2 == 0)


@pytest.mark.parametrize("name", ["easy+semihard", "semi_hard"])
def test_compiled_by_inductor(name):
    check_compiled(name, "inductor", ref=True)


def test_compiled_with_dynamic_shapes_and_a_margin_that_grows():
    for function in (T.batch_hard_loss, T.batch_all_loss):
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
        for count, margin in ((9, 0.1), (14, 0.2), (30, 0.5)):
            emb, labels = here((torch.randn(count, 6), torch.arange(count) // 3))
            assert torch.equal(compiled(emb, labels, margin=margin), function(emb, labels, margin=margin))


@every_function
def test_a_second_derivative_is_refused(name):
    emb, labels, memory, ids, me, *_ = here(arguments(ref=True))
    loss = here(EVERY_FUNCTION[name])(emb, labels, ref_emb=memory, ref_labels=ids, self_index=me)
    if not loss.is_floating_point():
        return
    for wanted in (emb, memory):
        (gradient,) = torch.autograd.grad(loss.sum(), wanted, create_graph=True)
        with pytest.raises(RuntimeError, match="first order only"):
            gradient.square().sum().backward()


@pytest.mark.parametrize("transform", ["make_dual", "jvp", "grad", "vmap", "trace"])
@pytest.mark.parametrize("name", ["hard+hard", "batch_all", "beta_margin"])
def test_transforms_are_refused(name, transform):
    emb, labels, *_ = here(arguments(requires_grad=False))
    refused(transform, partial(here(EVERY_FUNCTION[name]), labels=labels), emb)


# Bad input


def rows() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    emb = torch.arange(24.0).reshape(6, 4).sin().requires_grad_()
    return emb, torch.arange(6) // 2, {"ref_emb": torch.ones(9, 4), "ref_labels": torch.arange(9) // 3}


def bad_calls(name: str) -> list[tuple[tuple[Any, Any], dict[str, Any]]]:
    """A sample of what tests/test_errors.py goes through in full."""
    emb, labels, ref = rows()
    detached = emb.detach()
    calls: list[tuple[tuple[Any, Any], dict[str, Any]]] = [
        ((detached[0], labels), {}),
        ((emb, labels[:, None]), {}),
        ((emb, labels[1:]), {}),
        ((detached.to(torch.int64), labels), {}),
        ((detached.to(torch.complex64), labels), {}),
        ((emb, labels.to(torch.float32)), {}),
        ((emb, labels.to(torch.bool)), {}),
        ((None, labels), {}),
        ((emb, labels), {"ref_emb": ref["ref_emb"]}),
        ((emb, labels), {"ref_labels": ref["ref_labels"]}),
        ((emb, labels), {**ref, "ref_emb": torch.ones(9, 3)}),
        ((emb, labels), {**ref, "ref_labels": torch.arange(8)}),
        ((emb, labels), {**ref, "self_index": torch.full((6,), 9)}),
        ((emb, labels), {**ref, "self_index": torch.full((6,), -2)}),
        ((emb, labels), {"self_index": labels}),
        ((emb, labels), {"ignore_label": 0.5}),
    ]
    calls += [((emb, labels), {number: values[0][0]}) for number, values in NUMBERS[name].items()]
    calls += [((emb, labels), {word: "l2"}) for word in WORDS[name] if word != "backend"]
    if name in TRIPLET_DRAWING:
        calls += [((emb, labels), {"negative": "random", "seed": seed}) for seed in (2**63, 1.0, "1")]
        calls += [((emb, labels), {"negative": "random", "generator": 1})]
        calls += [((emb, labels), {"loss": "first_order", "distance": "euclidean"})]
    if name == "beta_margin_loss":
        calls += [((emb, labels), {"beta": torch.ones(2)}), ((emb, labels - 1), {"beta": torch.ones(3)})]
        calls += [((emb, labels), {"beta": torch.ones(3, 1)}), ((emb, labels), {"beta": "1"})]
    return calls


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if not name.startswith("nn.")])
def test_bad_input_is_refused_as_on_the_cpu(name):
    function = FUNCTIONS[name]
    emb, labels, _ = here(rows())
    if name in LOSSES:
        before = function(emb, labels)
    for positional, options in bad_calls(name):
        with pytest.raises((TypeError, ValueError)) as theirs:
            function(*positional, **options, backend="cpu")
        state = torch.get_rng_state()
        with pytest.raises(theirs.type) as ours:
            function(*here(positional), **here(options))
        assert (ours.type, str(ours.value)) == (theirs.type, str(theirs.value))
        assert torch.equal(torch.get_rng_state(), state)
    if name in LOSSES:
        assert bits(function(emb, labels).cpu()) == bits(before.cpu())


@pytest.mark.parametrize("name", [name for name in LOSSES if not name.startswith("nn.")])
def test_nothing_to_learn_from_is_no_error(name):
    for classes in DEGENERATE.values():
        emb, labels = here((torch.ones(len(classes), 4, requires_grad=True), torch.tensor(classes).long()))
        loss = LOSSES[name](emb, labels)
        loss.backward()
        assert loss == 0
        assert emb.grad is not None
        assert not emb.grad.any()
