"""Triton's ops as torch sees them: opcheck, torch.compile, derivatives that are refused, bad input."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from math import nan
from typing import Any

import pytest
import torch
from torch import Tensor

import tripletops as T
from tests.support.calls import bits
from tests.support.ops import (
    CASES,
    COUNT,
    FEW_CASES,
    TRITON,
    Case,
    check_compiled,
    differentiated,
    every_function,
    every_loss,
    here,
    inputs_of,
    opcheck,
    refused,
    rows,
    total,
)
from tripletops._words import FUNCTION, LOSS, NEGATIVE, OBJECTIVE, Choice, Number

# Inductor itself imports modules that warn of their own deprecation.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Dynamo gives up on a function it has compiled too often, and tests share theirs."""
    yield
    torch.compiler.reset()


every_case = pytest.mark.parametrize("case", FEW_CASES, ids=str)

# Those of opcheck's tests that call an op but a few times; torch.compile is tried below.
QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")
THOROUGH = (FEW_CASES[0], CASES["multi_similarity_loss"][0])


def turn_of(case: Case) -> tuple[bool, torch.dtype]:
    """With ref_emb or without, and in which type: every case is another one."""
    turn = FEW_CASES.index(case)
    return turn % 2 == 0, (torch.float32, torch.float64, torch.bfloat16)[turn % 3]


@every_case
def test_opcheck(case):
    check = opcheck if case in THOROUGH else partial(opcheck, test_utils=QUICK)
    ref, dtype = turn_of(case)
    call = here(case.call(ref=ref, dtype=dtype))
    check(TRITON.loss, call)
    evaluated = TRITON.evaluate(call)
    for wants in product((False, True), (False, True) if ref else (False,)):
        check(TRITON.gradient, differentiated(call, evaluated, *wants))


@pytest.mark.parametrize("case", CASES["mine"], ids=str)
def test_opcheck_of_mine(case):
    turn = CASES["mine"].index(case)
    check = opcheck if turn == 0 else partial(opcheck, test_utils=QUICK)
    dtype = (torch.float32, torch.float64, torch.bfloat16)[turn % 3]
    check(TRITON.mine, here(case.call(ref=turn % 2 == 0, dtype=dtype)))


def test_self_index_out_of_range_is_harmless_in_the_kernel():
    call = here(CASES["mine"][0].call(ref=True, requires_grad=False))
    outside = here(torch.tensor([2**62, -(2**62)] + [10**6] * (COUNT - 2)))
    picks, _ = TRITON.mine(*call._replace(self_index=outside))
    assert torch.equal(picks, TRITON.mine(*call._replace(self_index=None))[0])


# torch.compile and autograd


@every_case
def test_compiled_without_a_graph_break(case):
    ref, _ = turn_of(case)
    check_compiled(here(case.public()), here(rows(ref=ref)), "aot_eager")


@pytest.mark.parametrize("case", CASES["mine"], ids=str)
def test_mining_compiled_without_a_graph_break(case):
    check_compiled(here(case.public()), here(rows(ref=True)), "aot_eager")


@pytest.mark.parametrize("case", [CASES["triplet_loss"][1], CASES["semi_hard_loss"][0]], ids=str)
def test_compiled_by_inductor(case):
    check_compiled(here(case.public()), here(rows(ref=True)), "inductor")


def test_the_number_of_active_terms_compiles_too():
    function = partial(here(CASES["batch_all_loss"][0].public()), return_active=True)
    check_compiled(function, here(rows()), "aot_eager")


def test_one_beta_for_all_compiles_too():
    function = partial(here(CASES["beta_margin_loss"][0].public()), beta=1.2, nonzero_loss_cutoff=None)
    check_compiled(function, here(rows()), "aot_eager")


def test_compiled_with_dynamic_shapes_and_a_margin_that_grows():
    for function in (T.batch_hard_loss, T.batch_all_loss):
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
        for count, margin in ((9, 0.1), (14, 0.2), (30, 0.5)):
            emb, labels = here((torch.randn(count, 6), torch.arange(count) // 3))
            assert torch.equal(compiled(emb, labels, margin=margin), function(emb, labels, margin=margin))


@every_case
def test_a_second_derivative_is_refused(case):
    call = here(case.call(ref=True))
    loss = total(TRITON.evaluate(call).loss)
    for wanted in inputs_of(call).values():
        (gradient,) = torch.autograd.grad(loss, wanted, create_graph=True)
        with pytest.raises(RuntimeError, match="first order only"):
            gradient.square().sum().backward()


@pytest.mark.parametrize("transform", ["make_dual", "jvp", "grad", "vmap", "trace"])
@every_loss
def test_transforms_are_refused(function, transform):
    given = here(rows(requires_grad=False))
    run = here(CASES[function][0].public())
    refused(transform, partial(run, labels=given["labels"]), given["emb"])


# Bad input


def few_rows() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    emb = torch.arange(24.0).reshape(6, 4).sin().requires_grad_()
    return emb, torch.arange(6) // 2, {"ref_emb": torch.ones(9, 4), "ref_labels": torch.arange(9) // 3}


BadCall = tuple[tuple[Any, Any], dict[str, Any]]


def bad_rows() -> list[BadCall]:
    """A sample of what tests/test_arguments.py goes through in full, as are the bad options below."""
    emb, labels, ref = few_rows()
    detached = emb.detach()
    return [
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


def bad_options(name: str) -> list[dict[str, Any]]:
    function = FUNCTION[name]
    options = function.options()
    choices = {option.name: option for option in options if isinstance(option, Choice)}
    bad: list[dict[str, Any]] = [{option.name: nan} for option in options if isinstance(option, Number)]
    bad += [{choice: "l2"} for choice in choices]
    if "negative" in choices:
        bad += [{"negative": "random", "seed": seed} for seed in (2**63, 1.0, "1")]
        bad += [{"negative": "random", "seed": None, "generator": 1}]
        if "all" in choices["negative"].words:
            rules = (word for word in NEGATIVE if NEGATIVE[word].needs_positive)
            bad += [{"positive": "all", "negative": rule} for rule in rules]
    if "loss" in choices and "distance" in choices:
        bad += [
            {"loss": word, "distance": "euclidean"} for word in choices["loss"].words if LOSS[word].cosine
        ]
    if OBJECTIVE[function.objective].learned is not None:
        bad += [{"beta": beta} for beta in (torch.ones(2), torch.ones(3, 1), "1")]
    return bad


def bad_calls(name: str) -> list[BadCall]:
    emb, labels, _ = few_rows()
    calls = bad_rows() + [((emb, labels), options) for options in bad_options(name)]
    if OBJECTIVE[FUNCTION[name].objective].learned is not None:
        calls += [((emb, labels - 1), {"beta": torch.ones(3)})]
    return calls


@every_function
def test_bad_input_is_refused_as_on_the_cpu(function):
    run, (emb, labels, _) = CASES[function][0].public(), here(few_rows())
    before = here(run)(emb, labels)
    for positional, options in bad_calls(function):
        with pytest.raises((TypeError, ValueError)) as theirs:
            run(*positional, **options, backend="cpu")
        state = torch.get_rng_state()
        with pytest.raises(theirs.type) as ours:
            here(run)(*here(positional), **here(options))
        assert (ours.type, str(ours.value)) == (theirs.type, str(theirs.value))
        assert torch.equal(torch.get_rng_state(), state)
    after = here(run)(emb, labels)
    if function == "mine":
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(after, before, strict=True))
    else:
        assert bits(after.detach().cpu()) == bits(before.detach().cpu())


NOTHING_TO_LEARN_FROM = {
    "N = 0": [],
    "N = 1": [3],
    "one class": [2, 2, 2, 2],
    "all classes distinct": [0, 1, 2, 3],
}


@every_loss
def test_nothing_to_learn_from_is_no_error(function):
    for classes in NOTHING_TO_LEARN_FROM.values():
        emb, labels = here((torch.ones(len(classes), 4, requires_grad=True), torch.tensor(classes).long()))
        loss = here(CASES[function][0].public())(emb, labels)
        loss.backward()
        assert loss == 0
        assert emb.grad is not None
        assert not emb.grad.any()
