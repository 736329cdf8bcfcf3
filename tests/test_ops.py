"""The ops as torch sees them: opcheck, torch.compile, the autograd routes, the transforms that are refused,
memory safety of direct calls."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

import tripletops as T
from tests.support.ops import (
    CANDIDATES,
    CASES,
    COUNT,
    CPU,
    TRANSFORMS,
    TRITON,
    WIDTH,
    Case,
    Overloads,
    cases_of_objective,
    check_compiled,
    differentiated,
    direct_arguments,
    dual,
    every_function,
    every_loss,
    every_objective,
    every_transform,
    inputs_of,
    opcheck,
    refused,
    rows,
    total,
    words_of,
)
from tripletops import ops
from tripletops._call import Call, Gradients, Mined, Totals
from tripletops._signatures import returns_count
from tripletops._words import FUNCTION, LOSS, NEGATIVE, NUMBERS, OBJECTIVE, POSITIVE, TABLES, Codes

# Inductor itself imports modules that warn of their own deprecation.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Dynamo gives up on a function it has compiled too often, and tests share theirs."""
    yield
    torch.compiler.reset()


every_op = pytest.mark.parametrize("name", Overloads._fields)
with_and_without_ref = pytest.mark.parametrize("ref", [False, True])
SIMPLEST = CASES["triplet_loss"][0]


# What ops give back

OPCHECKED = (torch.float32, torch.float64, torch.bfloat16)


@every_objective
@with_and_without_ref
@pytest.mark.parametrize("dtype", OPCHECKED)
def test_opcheck(objective, ref, dtype):
    # The types take turns, another type has other cases; and so do the gradients that are not all wanted.
    partly = [wants for wants in itertools.product((False, True), {False, ref}) if wants != (True, ref)]
    for turn, case in enumerate(cases_of_objective(objective)):
        if turn % len(OPCHECKED) != OPCHECKED.index(dtype):
            continue
        call = case.call(ref=ref, dtype=dtype)
        opcheck(CPU.loss, call)
        evaluated = CPU.evaluate(call)
        for wants in ((True, ref), partly[turn % len(partly)]):
            opcheck(CPU.gradient, differentiated(call, evaluated, *wants))


@with_and_without_ref
@pytest.mark.parametrize("dtype", OPCHECKED)
def test_opcheck_of_mine(ref, dtype):
    for case in CASES["mine"][OPCHECKED.index(dtype) :: len(OPCHECKED)]:
        opcheck(CPU.mine, case.call(ref=ref, dtype=dtype))


def shapes(record: tuple[Tensor, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (part.dtype, tuple(part.shape)) for name, part in record._asdict().items()}


@every_objective
@with_and_without_ref
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_what_the_ops_return(objective, ref, dtype):
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    for case in cases_of_objective(objective):
        call = case.call(ref=ref, dtype=dtype)
        evaluated = CPU.evaluate(call)
        assert shapes(evaluated) == {
            "loss": (compute, (COUNT,) if words_of(case)["reduction"] == "none" else ()),
            "totals": (torch.float64, (len(Totals._fields),)),
            "picks": (torch.int64, (2, COUNT)),
            "saved": (compute, (len(OBJECTIVE[objective].saved), COUNT)),
        }
        assert [part.requires_grad for part in evaluated] == [True, False, False, False]
        for wants_emb, wants_ref in itertools.product((False, True), repeat=2):
            given = differentiated(call, evaluated, wants_emb, wants_ref)
            assert shapes(Gradients(*CPU.gradient(*given))) == {
                "emb": (dtype, (COUNT, WIDTH) if wants_emb else (0,)),
                "ref_emb": (dtype, (CANDIDATES, WIDTH) if wants_ref and ref else (0,)),
                "learned": (compute, (0,) if call.learned is None else (COUNT,)),
            }


@with_and_without_ref
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_what_mine_returns(ref, dtype):
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    for case in CASES["mine"]:
        mined = Mined(*CPU.mine(*case.call(ref=ref, dtype=dtype)))
        assert shapes(mined) == {"picks": (torch.int64, (2, COUNT)), "distances": (compute, (2, COUNT))}
        assert not any(part.requires_grad for part in mined)


# Autograd


@every_objective
def test_only_the_gradients_that_are_asked_for_are_computed(objective):
    for case in cases_of_objective(objective):
        call = case.call(ref=True)
        inputs = inputs_of(call)
        everything = dict(zip(inputs, gradients_of(CPU.loss, call, inputs), strict=True))
        for count in range(1, len(inputs) + 1):
            for chosen in itertools.combinations(inputs, count):
                for name, tensor in inputs.items():
                    tensor.requires_grad_(name in chosen)
                found = gradients_of(CPU.loss, call, {name: inputs[name] for name in chosen})
                for name, gradient in zip(chosen, found, strict=True):
                    assert gradient.any()
                    assert torch.equal(gradient, everything[name])
        for tensor in inputs.values():
            tensor.requires_grad_(False)
        assert not CPU.evaluate(call).loss.requires_grad


def gradients_of(
    op: Callable[..., Any], call: Call, inputs: dict[str, Tensor], **options: Any
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(op(*call)[0].sum(), [*inputs.values()], **options)


@every_loss
def test_a_function_gives_the_gradients_that_are_asked_for(function):
    given, run = rows(ref=True), CASES[function][0].public()
    for chosen in (("emb",), ("ref_emb",), ("emb", "ref_emb")):
        for name in ("emb", "ref_emb"):
            given[name].requires_grad_(name in chosen)
        for gradient in torch.autograd.grad(run(**given), [given[name] for name in chosen]):
            assert gradient.any()


# Of large batches, and of small ones, whose gradients are computed together with the loss.
ROUTES_OF_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    lambda *given: (ops.loss("cpu", Call(*given)),),
    lambda *given: (ops.loss("cpu", Call(*given), []),),
)


@every_objective
@with_and_without_ref
def test_both_autograd_routes_give_the_same_bits(objective, ref):
    """Those of the public functions go around torch's dispatcher."""
    for case in cases_of_objective(objective):
        call = case.call(ref=ref)
        inputs = inputs_of(call)
        expected = gradients_of(CPU.loss, call, inputs)
        for route in ROUTES_OF_FUNCTIONS:
            for a, b in zip(gradients_of(route, call, inputs), expected, strict=True):
                assert a.any()
                assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("objective", "which"),
    [(name, which) for name in OBJECTIVE for which in inputs_of(cases_of_objective(name)[0].call(ref=True))],
)
def test_a_second_derivative_is_refused(objective, which):
    for case in cases_of_objective(objective):
        call = case.call(ref=True)
        wanted = {which: inputs_of(call)[which]}
        for run in (*ROUTES_OF_FUNCTIONS, CPU.loss):
            (gradient,) = gradients_of(run, call, wanted, create_graph=True)
            with pytest.raises(RuntimeError, match="first order only"):
                gradient.square().sum().backward()


@every_objective
def test_a_derivative_of_the_gradient_op_is_refused(objective):
    call = cases_of_objective(objective)[0].call(ref=True)
    given = differentiated(call, CPU.evaluate(call))
    for name in float_tensors(given):
        tracked = given._replace(**{name: getattr(given, name).clone().requires_grad_()})
        with pytest.raises(RuntimeError, match="first order only"):
            total(CPU.gradient(*tracked)).backward()


def float_tensors(given: Any) -> list[str]:
    """The fields that can be differentiated by; an empty tensor has nothing to differentiate."""
    return [
        name
        for name, value in given._asdict().items()
        if isinstance(value, Tensor) and value.is_floating_point()
    ]


@every_loss
def test_create_graph_alone_is_harmless(function):
    given = rows()
    loss = CASES[function][0].public()(**given)
    (plain,) = torch.autograd.grad(loss, given["emb"], retain_graph=True)
    (graphed,) = torch.autograd.grad(loss, given["emb"], create_graph=True)
    assert torch.equal(plain, graphed.detach())


@every_objective
@pytest.mark.parametrize("create_graph", [False, True])
def test_many_gradients_at_once(objective, create_graph):
    reduced = next(case for case in cases_of_objective(objective) if words_of(case)["reduction"] == "none")
    call = reduced.call()
    loss = ops.loss("cpu", call)
    weights = torch.arange(3.0 * COUNT).reshape(3, COUNT).sin()
    gradient = partial(torch.autograd.grad, loss, call.emb, retain_graph=True)
    expected = torch.stack([gradient(weight)[0] for weight in weights])
    (given,) = gradient(weights, is_grads_batched=True, create_graph=create_graph)
    assert torch.equal(given, expected)


# Small batches: gradients that were computed together with the loss


REDUCED = {
    objective: next(case for case in cases_of_objective(objective) if words_of(case)["reduction"] != "none")
    for objective in OBJECTIVE
}


def small_loss(call: Call) -> Tensor:
    loss = ops.loss("cpu", call, [])
    assert "WithGradients" in loss.grad_fn.name()
    return loss


@every_objective
@with_and_without_ref
def test_what_arrives_at_the_loss_of_a_small_batch(objective, ref):
    """Every factor gives what the op of the gradient gives; but for one more rounding where it is no power of
    two, bit by bit."""
    call = REDUCED[objective].call(ref=ref)
    inputs = inputs_of(call)
    found, expected = small_loss(call), CPU.loss(*call)[0]
    for factor in (1.0, -2.0, 2.0**16, 0.3, 0.0, 2.0**60, 1e-30, 1e-44, torch.inf, torch.nan):
        gradients = (
            torch.autograd.grad(loss, [*inputs.values()], torch.tensor(factor), retain_graph=True)
            for loss in (found, expected)
        )
        for a, b in zip(*gradients, strict=True):
            rounding = 1e-6 * b.abs().max().item() if factor == 0.3 else 0
            torch.testing.assert_close(a, b, rtol=0, atol=rounding, equal_nan=True)


@pytest.mark.parametrize("scale", [2.0**-63, 2.0**-66, 2.0**-75, 2.0**60])
@pytest.mark.parametrize("factor", [2.0**-10, 2.0**10, 2.0**16])
def test_subnormal_and_huge_gradients_of_a_small_batch_are_not_rounded_twice(scale, factor):
    """Squared distances have gradients of the size of the rows; divided by N, some are subnormal."""
    given = CASES["triplet_loss"][0].call()
    emb = (given.emb.detach() * scale * 2.0**-60).requires_grad_()
    loss = partial(T.batch_hard_loss, emb, given.labels, distance="sqeuclidean", margin=2.0**-100)
    with_gradients = torch.autograd.grad(loss(), emb, torch.tensor(factor))
    per_anchor = loss(reduction="none")
    found = torch.autograd.grad(per_anchor, emb, torch.full_like(per_anchor, factor / COUNT))
    torch.testing.assert_close(with_gradients, found, rtol=3e-7, atol=2.0**-149)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_batches_of_half_precision_are_scaled_before_they_are_rounded(dtype):
    """As gradient scalers expect: what underflows by itself is there when multiplied by 2^16."""
    call = SIMPLEST.call()
    emb = (call.emb.detach() * 2.0**-8).to(dtype).requires_grad_()
    call = call._replace(emb=emb)
    small = call._replace(numbers=[number * 2.0**-8 for number in call.numbers])
    for factor in (1.0, 2.0**16, 2.0**-14):
        found, expected = (
            torch.autograd.grad(loss, emb, torch.tensor(factor))[0]
            for loss in (small_loss(small), CPU.loss(*small)[0])
        )
        assert found.dtype is dtype
        assert torch.equal(found, expected)


def test_a_small_batch_can_be_differentiated_again_and_again():
    call = SIMPLEST.call()
    loss = small_loss(call)
    gradient = partial(torch.autograd.grad, loss, call.emb, retain_graph=True)
    (first,) = gradient()
    kept = first.clone()
    first.zero_()
    assert torch.equal(gradient()[0], kept)
    assert torch.equal(gradient(torch.tensor(2.0))[0], 2 * kept)
    (graphed,) = gradient(create_graph=True)
    assert torch.equal(graphed.detach(), kept)
    weights = torch.tensor([1.0, -2.0, 0.5])
    assert torch.equal(gradient(weights, is_grads_batched=True)[0], weights[:, None, None] * kept)
    loss.backward()
    call.emb.register_hook(lambda arriving: arriving.mul_(3))
    call.emb.grad = None
    small_loss(call).backward(retain_graph=True)
    assert torch.equal(call.emb.grad, 3 * kept)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_rows_of_a_small_batch_that_change_before_backward_are_refused():
    call = SIMPLEST.call()
    loss = small_loss(call)
    with torch.no_grad():
        call.emb.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_surrounds_a_small_batch():
    """Hooks of saved tensors, anomaly detection, checkpoints, and modes without a graph."""
    given = rows()
    emb, run = given["emb"], partial(CASES["triplet_loss"][0].public(), **given)
    (expected,) = torch.autograd.grad(run(), emb)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        hooked = run()
    with torch.autograd.set_detect_anomaly(True):
        watched = run()
    checkpointed = torch.utils.checkpoint.checkpoint(run, use_reentrant=False)
    for loss in (hooked, watched, checkpointed):
        assert torch.equal(torch.autograd.grad(loss, emb)[0], expected)
    with torch.no_grad():
        assert not run().requires_grad
    with torch.inference_mode():
        assert run().is_inference()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = tree_map_only(Tensor, mode.from_tensor, given)
        loss = CASES["triplet_loss"][0].public()(**fake)
        (gradient,) = torch.autograd.grad(loss, fake["emb"])
        assert gradient.shape == emb.shape


def test_large_batches_do_not_compute_gradients_with_the_loss():
    for count in (1024, 1025):
        emb = torch.randn(count, 3, requires_grad=True)
        loss = T.batch_hard_loss(emb, torch.arange(count) // 2)
        assert ("WithGradients" in loss.grad_fn.name()) == (count == 1024)


@every_objective
def test_gradients_of_small_batches_do_not_depend_on_threads(objective):
    generator = torch.Generator().manual_seed(0)
    emb = torch.randn(300, 40, generator=generator, requires_grad=True)
    call = REDUCED[objective].call()
    learned = None if call.learned is None else call.learned[:1].detach().expand(300).contiguous()
    call = call._replace(emb=emb, labels=torch.arange(300) % 75, learned=learned)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            loss = small_loss(call)
            found.append((loss, *torch.autograd.grad(loss, emb)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@every_loss
def test_nothing_of_size_n_by_n_is_saved(function):
    count, width, saved = 300, 8, []
    emb, labels = torch.randn(count, width, requires_grad=True), torch.arange(count) % 4

    def note(tensor):
        saved.append(tensor.numel())
        return tensor

    for case in CASES[function]:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            case.public()(emb, labels)
        assert saved
        assert sum(saved) <= 3 * count * width


# torch.compile


@every_function
@with_and_without_ref
def test_compiled_without_a_graph_break(function, ref):
    """Inductor is slow: it has one case of every function."""
    first, second = CASES[function][ref:4:2]
    check_compiled(first.public(), rows(ref=ref), "inductor")
    check_compiled(second.public(), rows(ref=ref), "aot_eager")


@pytest.mark.parametrize("function", [name for name, record in FUNCTION.items() if returns_count(record)])
def test_the_number_of_active_terms_compiles_too(function):
    for case in CASES[function]:
        check_compiled(partial(case.public(), return_active=True), rows(), "aot_eager")


@pytest.mark.parametrize("beta", [1.2, torch.tensor(1.2)], ids=["number", "()"])
def test_one_beta_for_all_compiles_too(beta):
    for case in CASES["beta_margin_loss"][:2]:
        check_compiled(partial(case.public(), beta=beta), rows(), "aot_eager")


@pytest.mark.parametrize("function", ["easy_positive_loss", "batch_all_loss", "semi_hard_loss"])
def test_compiled_with_dynamic_shapes_and_a_margin_that_grows(function):
    run = getattr(T, function)
    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for count, margin in ((9, 0.1), (14, 0.2), (30, 0.5)):
        emb, labels = torch.randn(count, 6), torch.arange(count) // 3
        assert torch.equal(compiled(emb, labels, margin=margin), run(emb, labels, margin=margin))


def test_compiled_with_dynamic_shapes_and_the_global_generator():
    drawn = torch.compile(lambda e, y: T.mine(e, y, positive="random", negative="random"), fullgraph=True)
    learned = torch.compile(T.beta_margin_loss, fullgraph=True, dynamic=True)
    for count in (9, 14, 30):
        emb, labels = torch.randn(count, 6), torch.arange(count) // 3
        assert drawn(emb, labels).valid.all()
        assert learned(emb, labels, 1.2).isfinite()


@pytest.mark.parametrize("classes", [None, 4])
def test_a_learned_beta_compiles_too(classes):
    given, module = rows(), T.nn.BetaMarginLoss(classes=classes)
    emb, labels, seed = given["emb"], given["labels"], torch.tensor(99)
    compiled = torch.compile(module, fullgraph=True)
    losses = module(emb, labels, seed=seed), compiled(emb, labels, seed=seed)
    assert torch.equal(*losses)
    (a,), (b,) = (torch.autograd.grad(loss, module.parameters()) for loss in losses)
    assert a.any()
    torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_a_module_compiles_too():
    emb, labels = torch.randn(12, 4), torch.arange(12) // 3
    module = T.nn.BatchHardLoss(margin=0.7)
    assert torch.equal(torch.compile(module, fullgraph=True)(emb, labels), module(emb, labels))


# Transforms


def scalar(case: Case) -> Callable[..., Tensor]:
    """The case's public function, with the sum of what it gives back."""
    function = case.public()
    if case.function == "mine":
        return lambda *given, **options: function(*given, **options).d_an.nansum()
    return lambda *given, **options: function(*given, **options).sum()


@every_transform
@every_function
@pytest.mark.parametrize("which", ["emb", "ref_emb"])
def test_transforms_are_refused(transform, function, which):
    given = rows(ref=True, requires_grad=False)
    for run in map(scalar, CASES[function][:3]):
        refused(transform, lambda x, run=run: run(**{**given, which: x}), given[which])


@every_transform
@pytest.mark.parametrize("beta", [torch.tensor(1.2), torch.arange(1.0, 5.0)], ids=["()", "(C,)"])
def test_transforms_of_beta_are_refused(transform, beta):
    given = rows(requires_grad=False)
    for run in map(scalar, CASES["beta_margin_loss"][:2]):
        refused(transform, lambda x, run=run: run(**given, beta=x), beta)


# By vmap of the gradient op torch takes many gradients at once.
DIRECT = [
    (transform, name)
    for name in Overloads._fields
    for transform, (_, words) in TRANSFORMS.items()
    if not (words == "torch.func.vmap" and name == "gradient")
]


@pytest.mark.parametrize(("transform", "name"), DIRECT)
@pytest.mark.parametrize("backend", [CPU, TRITON], ids=["cpu", "triton"])
def test_transforms_of_direct_calls_are_refused(transform, name, backend):
    op, given = getattr(backend, name), direct_arguments(name)
    for field in float_tensors(given):
        refused(
            transform, lambda x, field=field: total(op(*given._replace(**{field: x}))), getattr(given, field)
        )


@every_loss
def test_tangents_of_what_arrives_at_the_loss_are_not_lost(function):
    """Backward is linear in it: dropping its tangent would be as wrong as dropping that of a row."""
    given = rows()
    loss = CASES[function][0].public()(**given)

    def gradient(arrives):
        return torch.autograd.grad(loss, given["emb"], arrives, retain_graph=True)[0].sum()

    for transform in ("make_dual", "jvp"):
        refused(transform, gradient, torch.ones(()))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("transform", ["make_dual", "jvp", "grad", "vmap"])
def test_transforms_are_refused_in_compiled_programs(transform, compiler):
    """Whoever is inside: what is transformed by torch may be compiled, and what is compiled transformed."""
    run, words = TRANSFORMS[transform]
    given = rows(requires_grad=False)
    for name in ("batch_hard_loss", "batch_all_loss", "mine"):
        function = partial(scalar(CASES[name][0]), labels=given["labels"])
        with pytest.raises(RuntimeError, match=words):
            torch.compile(partial(run, function), backend=compiler)(given["emb"])
        torch.compiler.reset()
        with pytest.raises(RuntimeError, match=words):
            run(torch.compile(function, backend=compiler), given["emb"])
        torch.compiler.reset()


@every_function
def test_what_is_not_transformed_passes(function):
    """A transform of other tensors, or of other outputs, is none of ours."""
    for case in CASES[function][:3]:
        check_what_is_not_transformed(scalar(case), differentiable=function != "mine")


def check_what_is_not_transformed(run: Callable[..., Tensor], differentiable: bool) -> None:
    given = rows()
    emb, loss = given["emb"], partial(run, labels=given["labels"])
    expected = loss(emb)
    with forward_ad.dual_level():
        forward_ad.make_dual(torch.ones(3), torch.ones(3))
        assert torch.equal(loss(emb), expected)
    weight = torch.tensor(3.0)
    slope, value = torch.func.grad(lambda w: (w.square(), loss(emb)), has_aux=True)(weight)
    assert slope == 6
    assert torch.equal(value, expected)
    if differentiable:  # autograd outside of the transform goes on
        assert torch.equal(torch.autograd.grad(value, emb)[0], torch.autograd.grad(expected, emb)[0])
    detached, values = torch.func.grad(lambda x: x.sum() + loss(x.detach())), emb.detach()
    assert torch.equal(detached(values), torch.ones_like(values))
    assert torch.equal(torch.func.functionalize(loss)(values), expected)
    with forward_ad.dual_level():
        primal = forward_ad.unpack_dual(forward_ad.make_dual(values, values)).primal
        assert torch.equal(loss(primal), expected)


@every_function
def test_the_reference_has_the_derivatives(function):
    for case in CASES[function][:3]:
        given = rows(dtype=torch.float64)
        emb, labels = given["emb"], given["labels"]
        run = partial(scalar(case), labels=labels, backend="reference")
        values, tangent = emb.detach(), emb.detach().cos()
        if function == "mine":
            assert torch.func.jvp(run, (values,), (tangent,))[1] != 0
            continue
        (gradient,) = torch.autograd.grad(run(emb), emb)
        assert gradient.any()
        slope = (gradient * tangent).sum()
        torch.testing.assert_close(torch.func.grad(run)(values), gradient)
        torch.testing.assert_close(dual(run, values, tangent), slope)
        torch.testing.assert_close(torch.func.jvp(run, (values,), (tangent,))[1], slope)
        for transform in ("vmap", "trace"):
            refused(transform, run, values)


# Direct calls

BAD_ARGUMENTS = [
    ("emb", torch.randn(13), "two dimensions"),
    ("emb", torch.randn(13, 10)[:, ::2], "adjacent"),
    ("emb", torch.ones(13, 5, dtype=torch.int32), "float16, bfloat16, float32 or float64"),
    ("labels", torch.arange(12), "labels must be 13 contiguous int64"),
    ("labels", torch.arange(13, dtype=torch.int32), "labels must be 13 contiguous int64"),
    ("ref_labels", torch.arange(5), "ref_labels must be 17"),
    ("ref_labels", None, "ref_emb needs ref_labels"),
    ("ref_emb", torch.randn(17, 6), "agree in width and type"),
    ("ref_emb", torch.randn(17, 5, dtype=torch.float64), "agree in width and type"),
    ("self_index", torch.arange(3), "self_index must be 13"),
    ("learned", None, "a number for each anchor"),
    ("learned", torch.ones(12), "learned must be 13"),
    ("learned", torch.ones(13, dtype=torch.float64), "learned must be 13"),
    ("codes", [], "too few codes: 0"),
    ("codes", [0] * (len(Codes._fields) - 1), f"too few codes: {len(Codes._fields) - 1}"),
    ("numbers", [], f"there are {len(NUMBERS)} numbers, got 0"),
    ("numbers", [0.0] * (len(NUMBERS) + 1), f"there are {len(NUMBERS)} numbers, got {len(NUMBERS) + 1}"),
]


@every_op
@pytest.mark.parametrize(("field", "value", "message"), BAD_ARGUMENTS)
def test_direct_calls_with_bad_arguments_are_refused(name, field, value, message):
    given = direct_arguments(name)._replace(**{field: value})
    with pytest.raises(RuntimeError, match=message):
        getattr(CPU, name)(*given)


@every_op
@pytest.mark.parametrize(
    ("option", "count"),
    [("objective", len(OBJECTIVE)), *((table.option, len(table.coded)) for table in TABLES)],
)
def test_codes_that_are_no_word_are_refused(name, option, count):
    given = direct_arguments(name)
    for code in (-1, count, 2**40):
        codes = Codes(*given.codes)._replace(**{option: code})
        with pytest.raises(RuntimeError, match=f"no such word: {code}"):
            getattr(CPU, name)(*given._replace(codes=[*codes]))


@pytest.mark.parametrize("name", ["mine", "loss"])
@pytest.mark.parametrize("seed", [None, torch.arange(2), torch.tensor(1, dtype=torch.int32)])
def test_a_random_rule_without_a_seed_is_refused(name, seed):
    with pytest.raises(RuntimeError, match="seed"):
        getattr(CPU, name)(*direct_arguments(name)._replace(seed=seed))


@every_objective
def test_an_objective_of_the_cosine_alone_refuses_other_distances(objective):
    call = cases_of_objective(objective)[0].call()
    call = call._replace(codes=[*Codes(*call.codes)._replace(distance=0)])
    if not OBJECTIVE[objective].cosine:
        assert CPU.evaluate(call).loss.isfinite().all()
        return
    with pytest.raises(RuntimeError, match="defined on the cosine"):
        CPU.loss(*call)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("grad", torch.ones(12), "grad must be 13"),
        ("grad", torch.ones(13, 1), "grad must be 1 "),
        ("grad", torch.ones((), dtype=torch.float64), "grad must be 1 "),
        ("totals", torch.ones(2, dtype=torch.float64), "totals must be 3"),
        ("totals", torch.ones(3), "totals must be 3"),
        ("picks", torch.zeros(13, dtype=torch.int64), "picks must be 26"),
        ("picks", torch.zeros(2, 13, dtype=torch.int32), "picks must be 26"),
        ("saved", torch.ones(3, 13), "saved must be 52"),
        ("saved", torch.ones(4, 13, dtype=torch.float64), "saved must be 52"),
    ],
)
def test_the_gradient_op_refuses_what_no_loss_can_have_kept(field, value, message):
    given = direct_arguments("gradient")._replace(**{field: value})
    with pytest.raises(RuntimeError, match=message):
        CPU.gradient(*given)


@every_objective
@pytest.mark.parametrize("pick", [COUNT, 2**62])
def test_the_gradient_op_refuses_picks_out_of_range(objective, pick):
    call = cases_of_objective(objective)[0].call(requires_grad=False)
    given = differentiated(call, CPU.evaluate(call))
    with pytest.raises(RuntimeError, match=f"picks out of range: {pick}"):
        CPU.gradient(*given._replace(picks=torch.full_like(given.picks, pick)))


@every_objective
def test_words_that_do_not_go_together_are_harmless(objective):
    """Nobody can say them to the public functions."""
    call = cases_of_objective(objective)[0].call(ref=True, requires_grad=False)
    call = call._replace(seed=torch.tensor(5))
    for positive, negative, loss in itertools.product(*map(range, map(len, (POSITIVE, NEGATIVE, LOSS)))):
        codes = Codes(*call.codes)._replace(positive=positive, negative=negative, loss=loss)
        given = call._replace(codes=[*codes])
        evaluated = CPU.evaluate(given)
        assert evaluated.picks.min() >= -1
        assert evaluated.picks.max() < CANDIDATES
        assert shapes(Gradients(*CPU.gradient(*differentiated(given, evaluated))))["emb"][1] == (COUNT, WIDTH)


@every_op
def test_self_index_out_of_range_is_harmless_in_the_kernel(name):
    outside = torch.tensor([2**62, -(2**62)] + [10**6] * 11)
    for case in (CASES["mine"][0], *(cases_of_objective(each)[0] for each in OBJECTIVE)):
        call = case.call(ref=True, requires_grad=False)
        found, expected = (
            results(name, call._replace(self_index=index)) for index in (outside, torch.full((COUNT,), -1))
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def results(name: str, call: Call) -> tuple[Tensor, ...]:
    if name == "gradient":
        return tuple(CPU.gradient(*differentiated(call, CPU.evaluate(call))))
    return tuple(getattr(CPU, name)(*call))


# Triton's ops, as far as torch goes


@pytest.fixture
def kernels(monkeypatch) -> SimpleNamespace:
    """What triton's ops run: here the CPU kernels, since this is about what torch does around them."""
    kernels = SimpleNamespace(**CPU._asdict())
    monkeypatch.setitem(sys.modules, "tripletops.backends.triton", kernels)
    monkeypatch.setattr(import_module("tripletops.backends"), "triton", kernels, raising=False)
    return kernels


def doubled(gradient: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    return lambda *given: [part * 2 for part in gradient(*given)]


ROUTES: dict[str, Callable[[Call], Tensor]] = {
    "function": lambda call: ops.loss("triton", call),
    "op": lambda call: TRITON.evaluate(call).loss,
    "compiled": lambda call: torch.compile(partial(ops.loss, "triton"), fullgraph=True)(call),
}


class TestTriton:
    @every_op
    def test_same_signature(self, name):
        cpu, triton = getattr(CPU, name), getattr(TRITON, name)
        assert str(triton._schema) == str(cpu._schema).replace(f"::{name}", f"::triton_{name}")
        assert set(triton.tags) - set(cpu.tags) == {torch.Tag.cudagraph_unsafe}

    @every_op
    def test_for_tensors_on_a_gpu_and_for_the_interpreter(self, name):
        for key in ("CUDA", "CPU"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"tripletops::triton_{name}", key)

    @with_and_without_ref
    def test_opcheck(self, kernels, ref):
        opcheck(TRITON.mine, CASES["mine"][1].call(ref=ref))
        for call in (SIMPLEST.call(ref=ref), CASES["beta_margin_loss"][0].call(ref=ref)):
            opcheck(TRITON.loss, call)
            opcheck(TRITON.gradient, differentiated(call, TRITON.evaluate(call), wants_ref=ref))

    @pytest.mark.parametrize("route", ROUTES)
    @every_objective
    def test_gradients(self, kernels, route, objective):
        """By every route the gradient is triton's own."""
        call = cases_of_objective(objective)[-1].call(ref=True)
        inputs = inputs_of(call)
        expected = gradients_of(CPU.loss, call, inputs)
        loss = ROUTES[route](call).sum()
        kernels.gradient = doubled(CPU.gradient)
        for a, b in zip(torch.autograd.grad(loss, [*inputs.values()]), expected, strict=True):
            assert a.any()
            assert torch.equal(a, 2 * b)

    def test_compiled_without_a_graph_break(self, kernels):
        call = CASES["contrastive_loss"][0].call()
        compiled = torch.compile(partial(ops.loss, "triton"), fullgraph=True)
        assert torch.equal(compiled(call), ops.loss("cpu", call))

    def test_public_functions_compiled_without_a_graph_break(self, kernels, monkeypatch):
        """The backend is picked while the program is traced."""
        registry = import_module("tripletops.backends")
        usable = registry.Backend("triton", "cpu", ("cpu",), registry._reference_why_not)
        monkeypatch.setitem(registry.REGISTRY, "triton", usable)
        picks = CPU.mine(*CASES["mine"][0].call())[0]
        kernels.mine = lambda *given: (picks + 1, CPU.mine(*given)[1])
        given, mine = rows(), CASES["mine"][0].public()
        for backend, offset in (("cpu", 0), ("triton", 1)):
            for run in (mine, torch.compile(mine, fullgraph=True)):
                triplets = run(given["emb"], given["labels"], backend=backend)
                assert torch.equal(torch.stack(triplets[1:3]), picks + offset)

    @pytest.mark.parametrize("route", ["function", "op"])
    @every_objective
    def test_a_second_derivative_is_refused(self, kernels, route, objective):
        call = cases_of_objective(objective)[0].call()
        (gradient,) = torch.autograd.grad(ROUTES[route](call), call.emb, create_graph=True)
        with pytest.raises(RuntimeError, match="first order only"):
            gradient.square().sum().backward()
