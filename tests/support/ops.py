"""Calls of the ops themselves, by the names of their records, and what is tried on the ops of every backend.

Cases are made of `_words`: an objective, a rule or a loss that is added there is in them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map_only

import tripletops
from tests.support.calls import DEVICE
from tripletops._arguments import Options
from tripletops._call import Call, Differentiated, Evaluated, compute_type
from tripletops._words import FUNCTION, LOSS, NEGATIVE, OBJECTIVE, Choice, Function, Number


class Overloads(NamedTuple):
    """The ops of one backend, as torch has them."""

    mine: OpOverload
    loss: OpOverload
    gradient: OpOverload

    def evaluate(self, call: Call) -> Evaluated:
        return Evaluated(*self.loss(*call))


def _overloads(prefix: str) -> Overloads:
    return Overloads(*(getattr(torch.ops.tripletops, prefix + name).default for name in Overloads._fields))


CPU, TRITON = _overloads(""), _overloads("triton_")


# Cases


class Case(NamedTuple):
    """A public function with some of its options."""

    function: str
    options: dict[str, Any]

    def __str__(self) -> str:
        return " ".join([self.function, *(word for word in self.options.values() if isinstance(word, str))])

    def call(self, **options: Any) -> Call:
        """As the function hands it to the ops; `options` are those of `rows`."""
        function, given = FUNCTION[self.function], rows(**options)
        emb, encoded = given["emb"], Options(function).encode(self.options)
        learned = None
        if OBJECTIVE[function.objective].learned is not None:
            learned = torch.linspace(1, 4, COUNT, dtype=compute_type(emb)).requires_grad_(emb.requires_grad)
        seed = torch.tensor(5) if encoded.draws else None
        return Call(**given, seed=seed, learned=learned, codes=encoded.codes, numbers=encoded.numbers)

    def public(self) -> Callable[..., Any]:
        """The function with these options, with a seed if it draws, with its numbers if it learns some."""
        function, options = FUNCTION[self.function], dict(self.options)
        learned = OBJECTIVE[function.objective].learned
        if learned is not None:
            options[learned.name] = torch.arange(1.0, 1 + CLASSES)
        if function.draws:
            options["seed"] = torch.tensor(99)
        return partial(getattr(tripletops, self.function), **options)


WIDE = {"margin": 5.0, "neg_margin": 5.0}  # with which every term of the rows below has a slope


def cases_of(function: Function) -> list[Case]:
    """Some calls of the function, its defaults first. Every word of every choice is in one of them, and so is
    None for every number that can be None."""
    numbers = [option for option in function.options() if isinstance(option, Number)]
    wide = {number.name: WIDE[number.name] for number in numbers if number.name in WIDE}
    unlimited = {number.name: None for number in numbers if number.none is not None}
    everything = {choice.name: "all" for choice in function.choices if "all" in choice.words}
    given: list[dict[str, Any]] = [] if any(choice.required for choice in function.choices) else [{}]
    given += [everything] if len(everything) > 1 else []  # which the turns below do not come to
    for turn in range(max(len(choice.words) for choice in function.choices)):
        words = _compatible({choice.name: _word_of(choice, turn) for choice in function.choices})
        given.append({**words, **(unlimited if turn % 2 else {})})
    different: dict[str, Case] = {}
    for each in given:
        encoded = Options(function).encode({**each, **wide})
        different.setdefault(str(encoded), Case(function.name, {**each, **wide}))
    return [*different.values()]


def _word_of(choice: Choice, turn: int) -> str:
    return choice.words[turn % len(choice.words)]


def _compatible(words: dict[str, Any]) -> dict[str, Any]:
    """Without a distance where the loss has its own, with a positive where the negative goes by it."""
    if "loss" in words and LOSS[words["loss"]].cosine:
        words = {**words, "distance": None}
    if words.get("positive") == "all" and NEGATIVE[words.get("negative", "all")].needs_positive:
        words = {**words, "positive": "hard"}
    return words


CASES = {name: cases_of(function) for name, function in FUNCTION.items()}
LOSSES = [name for name in FUNCTION if name != "mine"]
every_function = pytest.mark.parametrize("function", FUNCTION)
every_loss = pytest.mark.parametrize("function", LOSSES)
every_objective = pytest.mark.parametrize("objective", OBJECTIVE)


def cases_of_objective(objective: str) -> list[Case]:
    """Those of the function that leaves most to choose: ops know objectives, not functions."""
    functions = [FUNCTION[name] for name in LOSSES if FUNCTION[name].objective == objective]
    return CASES[max(functions, key=lambda function: len(function.choices)).name]


def words_of(case: Case) -> dict[str, Any]:
    """Those that are in force, defaults included."""
    return Options(FUNCTION[case.function]).encode(case.options).words


# For Triton's interpreter, which is slow: `triplet` has every rule, and of each other objective two will do.
FEW_CASES = [
    case
    for objective in OBJECTIVE
    for case in cases_of_objective(objective)[: None if objective == "triplet" else 2]
]


# Arguments

COUNT, CANDIDATES, WIDTH, CLASSES = 13, 17, 5, 4


def rows(ref: bool = False, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> dict[str, Any]:
    """The rows of a call, by name: the public functions and `Call` have the same names for them."""
    generator = torch.Generator().manual_seed(3)

    def normal(count: int) -> Tensor:
        return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64).to(dtype)

    given: dict[str, Any] = dict.fromkeys(("ref_emb", "ref_labels", "self_index", "ignore_label"))
    given |= {"emb": normal(COUNT).requires_grad_(requires_grad), "labels": torch.arange(COUNT) % CLASSES}
    if ref:
        given["ref_emb"] = normal(CANDIDATES).requires_grad_(requires_grad)
        given["ref_labels"] = torch.arange(CANDIDATES) % CLASSES
        given["self_index"] = torch.arange(COUNT)
        given["ignore_label"] = 3
    return given


def differentiated(
    call: Call, evaluated: Evaluated, wants_emb: bool = True, wants_ref: bool = True
) -> Differentiated:
    """What autograd hands to the op of the gradient, where ones arrive at the loss."""
    known = {**call._asdict(), **evaluated._asdict(), "grad": torch.ones_like(evaluated.loss)}
    given = {name: value for name, value in known.items() if name in Differentiated._fields}
    given = tree_map_only(Tensor, Tensor.detach, given)
    return Differentiated(**given, wants_emb=wants_emb, wants_ref=wants_ref)


def direct_arguments(name: str, ops: Overloads = CPU) -> Call | Differentiated:
    """Of the op with that name, with a tensor wherever there can be one."""
    call = CASES["beta_margin_loss"][0].call(ref=True, requires_grad=False)
    return differentiated(call, ops.evaluate(call)) if name == "gradient" else call


def inputs_of(call: Call) -> dict[str, Tensor]:
    """What the loss can be differentiated by."""
    given = {"emb": call.emb, "ref_emb": call.ref_emb, "learned": call.learned}
    return {name: tensor for name, tensor in given.items() if tensor is not None}


def here(given: Any) -> Any:
    """The same on the device on trial, leaves staying leaves."""
    if isinstance(given, partial):
        return partial(given.func, *here(given.args), **here(given.keywords))
    move = lambda tensor: tensor.detach().to(DEVICE).requires_grad_(tensor.requires_grad)  # noqa: E731
    return tree_map_only(Tensor, move, given)


# opcheck and torch.compile


def opcheck(op: OpOverload, given: Call | Differentiated, **options: Any) -> None:
    """That of torch, to which here NaN equals NaN: ops report it where there is no pick."""
    assert_close = partial(torch.testing.assert_close, equal_nan=True)
    with mock.patch.object(torch.testing, "assert_close", assert_close):
        torch.library.opcheck(op, tuple(given), **options)


def total(result: Any) -> Tensor:
    """The sum of all floats of a result."""
    return sum(part.sum() for part in tree_leaves(result) if part.is_floating_point())


def check_compiled(function: Callable[..., Any], given: dict[str, Any], compiler: str = "inductor") -> None:
    """Without a graph break, the same bits as without torch.compile, and the same gradients."""

    def step(emb: Tensor, ref_emb: Tensor | None) -> Any:
        return function(**{**given, "emb": emb * 2, "ref_emb": ref_emb})

    wanted = [tensor for tensor in (given["emb"], given["ref_emb"]) if tensor is not None]
    eager = step(given["emb"], given["ref_emb"])
    compiled = torch.compile(step, fullgraph=True, backend=compiler)(given["emb"], given["ref_emb"])
    torch.testing.assert_close(compiled, eager, rtol=0, atol=0, equal_nan=True)
    losses = total(eager), total(compiled)
    assert losses[0].requires_grad == losses[1].requires_grad
    if not losses[0].requires_grad:
        return
    gradients = (torch.autograd.grad(loss, wanted) for loss in losses)
    for a, b in zip(*gradients, strict=True):
        assert a.any()
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


# Transforms


def dual(function: Callable[[Tensor], Tensor], x: Tensor, tangent: Tensor) -> Tensor:
    """By torch.autograd.forward_ad itself."""
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent


def transposed_hessian(function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return torch.autograd.functional.hessian(
        function, x, vectorize=True, outer_jacobian_strategy="forward-mode"
    )


# What is asked for of a function of x with a scalar value, and what the refusal says of it.
TRANSFORMS: dict[str, tuple[Callable[..., Any], str]] = {
    "make_dual": (lambda f, x: dual(f, x, x.cos()), "forward-mode"),
    "make_dual of a leaf": (lambda f, x: dual(f, x.clone().requires_grad_(), x.cos()), "forward-mode"),
    "jvp": (lambda f, x: torch.func.jvp(f, (x,), (x.cos(),)), "forward-mode"),
    "jacfwd": (lambda f, x: torch.func.jacfwd(f)(x), "forward-mode"),
    "jacobian": (
        lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True, strategy="forward-mode"),
        "forward-mode",
    ),
    "hessian of autograd": (transposed_hessian, "forward-mode"),
    "grad": (lambda f, x: torch.func.grad(f)(x), "by torch.func"),
    "vjp": (lambda f, x: torch.func.vjp(f, x), "by torch.func"),
    "jacrev": (lambda f, x: torch.func.jacrev(f)(x), "by torch.func"),
    "hessian": (lambda f, x: torch.func.hessian(f)(x), "by torch.func"),
    "vmap of grad": (lambda f, x: torch.vmap(torch.func.grad(f))(x.expand(2, *x.shape)), "by torch.func"),
    "vmap": (lambda f, x: torch.vmap(f)(x.expand(2, *x.shape)), "torch.func.vmap"),
    "grad of vmap": (
        lambda f, x: torch.func.grad(lambda x: torch.vmap(f)(x.expand(2, *x.shape)).sum())(x),
        "torch.func.vmap",
    ),
    "trace": (lambda f, x: torch.jit.trace(lambda x: f(x), (x,)), "torch.jit.trace"),
}
every_transform = pytest.mark.parametrize("transform", TRANSFORMS)


def refused(transform: str, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    run, words = TRANSFORMS[transform]
    with pytest.raises(RuntimeError, match=f"supports autograd .* and torch.compile; .*{words}"):
        run(function, x)
