"""The ops as torch sees them: opcheck, torch.compile, the autograd routes, the transforms that are refused,
memory safety of direct calls."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad

import tripletops as T
from tripletops import ops

FORWARD = torch.ops.tripletops.triplet_forward.default
BACKWARD = torch.ops.tripletops.triplet_backward.default
MINE = torch.ops.tripletops.mine.default
TUPLES_FORWARD = torch.ops.tripletops.tuples_forward.default
TUPLES_BACKWARD = torch.ops.tripletops.tuples_backward.default

# Inductor itself imports modules that warn of their own deprecation.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Dynamo gives up on a function it has compiled too often, and tests share theirs."""
    yield
    torch.compiler.reset()


def arguments(requires_grad=True, ref=False, dtype=torch.float32, positive=0, negative=0, distance=0):
    generator = torch.Generator().manual_seed(3)
    emb = torch.randn(13, 5, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)
    labels = torch.arange(13) % 4
    seed = torch.tensor(5)
    rules = positive, negative, distance, 0.5, 1.4
    if not ref:
        return emb, labels, None, None, None, None, seed, *rules
    memory = (
        torch.randn(17, 5, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)
    )
    ids, me = torch.arange(17) % 4, torch.arange(13)
    # No row is ignored: opcheck takes the NaN that such rows report for a difference.
    return emb, labels, memory, ids, me, 77, seed, *rules


ALL = {"positive": ops.POSITIVE["all"], "negative": ops.NEGATIVE["all"]}
DRAWN = {"positive": ops.POSITIVE["random"], "negative": ops.NEGATIVE["distance"]}
OBJECTIVES = {  # the rules, then objective and parameters
    "batch_all": (ALL, 0, [0.2]),
    "batch_all_soft": ({**ALL, "distance": 1}, 1, []),
    "semi_hard": (ALL, 2, [0.2]),
    "multi_similarity": ({**ALL, "distance": 2}, 3, [2.0, 50.0, 1.0, 0.1]),
    "multi_similarity easy": ({**ALL, "positive": 1, "distance": 2}, 3, [2.0, 50.0, 1.0, math.inf]),
    "contrastive": (ALL, 4, [0.0, 3.0]),
    "contrastive drawn": ({**DRAWN, "distance": 2}, 4, [0.0, 3.0]),
    "beta_margin": (ALL, 5, [0.2]),
    "beta_margin drawn": (DRAWN, 5, [0.2]),
}
every_objective = pytest.mark.parametrize("objective", OBJECTIVES)


def tuples_arguments(name, reduction=0, **options):
    """Those of tuples_forward."""
    rules, objective, parameters = OBJECTIVES[name]
    given = arguments(**rules, **options)
    beta = None
    if objective == ops.OBJECTIVE["beta_margin"]:
        beta = torch.linspace(1, 4, 13, dtype=ops.compute_type(given[0]))
        beta.requires_grad_(given[0].requires_grad)
    return *given, objective, reduction, parameters, beta


def tuples_backward_arguments(given, grad, active, picks, state, wants_emb, wants_ref):
    emb, labels, memory, ids, me, ignored, _, *rules, _, _, objective, reduction, parameters, beta = given
    emb, memory, beta = (None if tensor is None else tensor.detach() for tensor in (emb, memory, beta))
    return (
        *(grad, emb, labels, memory, ids, me, ignored, *rules, objective, reduction, parameters, beta),
        *(active, picks, state, wants_emb, wants_ref),
    )


@pytest.mark.parametrize("ref", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_opcheck(ref, dtype):
    rules = {"positive": 1, "negative": 3, "distance": 2}
    torch.library.opcheck(MINE, arguments(ref=ref, dtype=dtype, **rules))
    for reduction in range(4):
        given = (*arguments(ref=ref, dtype=dtype, **rules), 3, reduction, 0.2, 1.0)
        torch.library.opcheck(FORWARD, given)
        loss, picks, terms = FORWARD(*given)
        grad = torch.ones_like(loss)
        for wants in itertools.product((False, True), (False, ref)):
            emb, memory = (None if tensor is None else tensor.detach() for tensor in (given[0], given[2]))
            torch.library.opcheck(BACKWARD, (grad, emb, memory, picks, terms, 2, *wants))


@every_objective
@pytest.mark.parametrize("ref", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_opcheck_of_tuples(objective, ref, dtype):
    given = tuples_arguments(objective, ops.REDUCTION["none" if ref else "mean"], ref=ref, dtype=dtype)
    torch.library.opcheck(TUPLES_FORWARD, given)
    loss, *kept = TUPLES_FORWARD(*given)
    for wants in ((True, ref), (False, False)):
        grad = torch.ones_like(loss)
        torch.library.opcheck(TUPLES_BACKWARD, tuples_backward_arguments(given, grad, *kept, *wants))


@every_objective
@pytest.mark.parametrize("ref", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_what_tuples_return(objective, ref, dtype):
    given = tuples_arguments(objective, ref=ref, dtype=dtype)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    loss, active, picks, state = TUPLES_FORWARD(*given)
    shapes = [(tensor.dtype, tuple(tensor.shape)) for tensor in (loss, active, picks, state)]
    assert shapes == [(compute, ()), (torch.int64, (2,)), (torch.int64, (2, 13)), (compute, (4, 13))]
    assert loss.requires_grad
    assert not any(tensor.requires_grad for tensor in (active, picks, state))
    for wants_emb, wants_ref in itertools.product((False, True), (False, ref)):
        gradients = TUPLES_BACKWARD(
            *tuples_backward_arguments(
                given, torch.ones_like(loss), active, picks, state, wants_emb, wants_ref
            )
        )
        assert [(tensor.dtype, tuple(tensor.shape)) for tensor in gradients] == [
            (dtype, (13, 5) if wants_emb else (0,)),
            (dtype, (17, 5) if wants_ref else (0,)),
            (compute, (0,) if given[-1] is None else (13,)),
        ]


@every_objective
def test_only_the_gradients_that_are_asked_for_are_computed_for_tuples(objective):
    given = tuples_arguments(objective, ref=True)
    inputs = [tensor for tensor in (given[0], given[2], given[-1]) if tensor is not None]
    everything = torch.autograd.grad(TUPLES_FORWARD(*given)[0], inputs)
    for count in (1, 2, 3):
        for chosen in itertools.combinations(range(len(inputs)), count):
            for position, tensor in enumerate(inputs):
                tensor.requires_grad_(position in chosen)
            loss = TUPLES_FORWARD(*given)[0]
            gradients = torch.autograd.grad(loss, [inputs[position] for position in chosen])
            for position, gradient in zip(chosen, gradients, strict=True):
                assert gradient.abs().sum() > 0
                assert torch.equal(gradient, everything[position])
    for tensor in inputs:
        tensor.requires_grad_(False)
    assert not TUPLES_FORWARD(*given)[0].requires_grad


@pytest.mark.parametrize("loss", range(4))
@pytest.mark.parametrize("ref", [False, True])
def test_both_autograd_routes_give_the_same_bits(loss, ref):
    given = (*arguments(ref=ref, distance=2), loss, 0, 0.2, 0.5)
    wanted = [tensor for tensor in (given[0], given[2]) if tensor is not None]
    by_function = torch.autograd.grad(ops.triplet_loss("cpu", *given), wanted)
    by_op = torch.autograd.grad(FORWARD(*given)[0], wanted)
    for a, b in zip(by_function, by_op, strict=True):
        assert a.abs().sum() > 0
        assert torch.equal(a, b)


def test_only_the_gradients_that_are_asked_for_are_computed():
    emb, labels, memory, ids, *_ = arguments(ref=True)
    for wanted in ((emb,), (memory,), (emb, memory)):
        for tensor in (emb, memory):
            tensor.requires_grad_(any(tensor is other for other in wanted))
        loss = T.batch_hard_loss(emb, labels, ref_emb=memory, ref_labels=ids, margin=9.0)
        for gradient in torch.autograd.grad(loss, wanted):
            assert gradient.abs().sum() > 0


@pytest.mark.parametrize(
    "rules", [("hard", "hard"), ("easy", "semihard"), ("random", "random"), ("random", "distance")]
)
@pytest.mark.parametrize("ref", [False, True])
def test_compiled_without_a_graph_break(rules, ref):
    emb, labels, memory, ids, me, *_ = arguments(ref=ref)
    seed = torch.tensor(99)
    positive, negative = rules

    def step(emb, memory):
        return T.triplet_loss(
            emb * 2,
            labels,
            positive=positive,
            negative=negative,
            ref_emb=memory,
            ref_labels=ids,
            self_index=me,
            seed=seed,
            loss="soft_margin",
        )

    wanted = [tensor for tensor in (emb, memory) if tensor is not None]
    eager = step(emb, memory)
    compiled = torch.compile(step, fullgraph=True)(emb, memory)
    assert torch.equal(eager, compiled)
    for a, b in zip(torch.autograd.grad(eager, wanted), torch.autograd.grad(compiled, wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


SEED = torch.tensor(99)
FUNCTIONS = {
    "batch_all": T.batch_all_loss,
    "batch_all_soft": partial(T.batch_all_loss, loss="soft_margin", reduction="none"),
    "batch_all active": lambda *given, **rows: T.batch_all_loss(*given, **rows, return_active=True)[1],
    "semi_hard": T.semi_hard_loss,
    "multi_similarity": T.multi_similarity_loss,
    "multi_similarity easy": partial(T.multi_similarity_loss, positive="easy", epsilon=None),
    "contrastive": partial(T.contrastive_loss, distance="cosine"),
    "contrastive drawn": partial(T.contrastive_loss, positive="random", negative="distance", seed=SEED),
    "beta_margin": partial(T.beta_margin_loss, beta=torch.tensor([1.0, 2.0, 3.0, 4.0]), seed=SEED),
    "beta_margin number": partial(T.beta_margin_loss, beta=1.2, seed=SEED, nonzero_loss_cutoff=None),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
@pytest.mark.parametrize("ref", [False, True])
def test_tuples_compiled_without_a_graph_break(function, ref):
    emb, labels, memory, ids, me, *_ = arguments(ref=ref)

    def step(emb, memory):
        return function(emb * 2, labels, ref_emb=memory, ref_labels=ids, self_index=me)

    wanted = [tensor for tensor in (emb, memory) if tensor is not None]
    eager = step(emb, memory)
    compiled = torch.compile(step, fullgraph=True)(emb, memory)
    assert torch.equal(eager, compiled)
    if eager.dtype == torch.int64:
        return
    gradients = (torch.autograd.grad(loss.sum(), wanted) for loss in (eager, compiled))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_tuples_compiled_with_dynamic_shapes_and_a_margin_that_grows():
    compiled = torch.compile(T.batch_all_loss, fullgraph=True, dynamic=True)
    for count, margin in ((9, 0.1), (14, 0.2), (30, 0.5)):
        emb, labels = torch.randn(count, 6), torch.arange(count) // 3
        assert torch.equal(compiled(emb, labels, margin=margin), T.batch_all_loss(emb, labels, margin=margin))
    drawn = torch.compile(T.beta_margin_loss, fullgraph=True, dynamic=True)
    for count in (9, 14, 30):
        assert drawn(torch.randn(count, 6), torch.arange(count) // 3, 1.2).isfinite()


@pytest.mark.parametrize("classes", [None, 4])
def test_a_learned_beta_compiles_too(classes):
    emb, labels, *_ = arguments()
    module = T.nn.BetaMarginLoss(classes=classes)
    compiled = torch.compile(module, fullgraph=True)
    eager, given = module(emb, labels, seed=SEED), compiled(emb, labels, seed=SEED)
    assert torch.equal(eager, given)
    (a,), (b,) = (torch.autograd.grad(loss, module.parameters()) for loss in (eager, given))
    assert a.any()
    torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_compiled_with_dynamic_shapes_and_the_global_generator():
    compiled = torch.compile(T.easy_positive_loss, fullgraph=True, dynamic=True)
    drawn = torch.compile(lambda e, y: T.mine(e, y, positive="random", negative="random"), fullgraph=True)
    for count in (9, 14, 30):
        emb, labels = torch.randn(count, 6), torch.arange(count) // 3
        assert torch.equal(compiled(emb, labels), T.easy_positive_loss(emb, labels))
        assert drawn(emb, labels).valid.all()


def test_a_module_compiles_too():
    emb, labels = torch.randn(12, 4), torch.arange(12) // 3
    module = T.nn.BatchHardLoss(margin=0.7)
    assert torch.equal(torch.compile(module, fullgraph=True)(emb, labels), module(emb, labels))


def test_a_second_derivative_is_refused():
    emb, labels = torch.randn(12, 4, requires_grad=True), torch.arange(12) // 3
    for loss in (
        T.batch_hard_loss(emb, labels, margin=5.0),
        FORWARD(emb, labels, *arguments()[2:], 0, 0, 5.0, 1.0)[0],
    ):
        (gradient,) = torch.autograd.grad(loss, emb, create_graph=True)
        with pytest.raises(RuntimeError, match="first order only"):
            gradient.square().sum().backward()


@every_objective
@pytest.mark.parametrize("which", ["emb", "ref_emb", "beta"])
def test_a_second_derivative_of_tuples_is_refused(objective, which):
    given = tuples_arguments(objective, ref=True)
    position = {"emb": 0, "ref_emb": 2, "beta": -1}[which]
    if given[position] is None:
        return
    loss = TUPLES_FORWARD(*given)[0]
    (gradient,) = torch.autograd.grad(loss, given[position], create_graph=True)
    with pytest.raises(RuntimeError, match="first order only"):
        gradient.square().sum().backward()


def test_create_graph_alone_is_harmless():
    emb, labels = torch.randn(12, 4, requires_grad=True), torch.arange(12) // 3
    loss = T.batch_hard_loss(emb, labels, margin=5.0)
    (plain,) = torch.autograd.grad(loss, emb, retain_graph=True)
    (graphed,) = torch.autograd.grad(loss, emb, create_graph=True)
    assert torch.equal(plain, graphed.detach())


# Transforms


def dual(function, x, tangent):
    """By torch.autograd.forward_ad itself."""
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent


def transposed_hessian(function, x):
    return torch.autograd.functional.hessian(
        function, x, vectorize=True, outer_jacobian_strategy="forward-mode"
    )


# What is asked for of a function of x with a scalar value, and what the refusal says of it.
TRANSFORMS: dict[str, tuple[Callable, str]] = {
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


def refused(transform, function, x):
    run, words = TRANSFORMS[transform]
    with pytest.raises(RuntimeError, match=f"supports autograd .* and torch.compile; .*{words}"):
        run(function, x)


DIFFERENTIABLE = {
    "triplet": T.batch_hard_loss,
    "mine": lambda *given, **rows: T.mine(*given, **rows, positive="easy", negative="hard").d_an.sum(),
    **{
        name: lambda *given, function=function, **rows: function(*given, **rows).sum()
        for name, function in FUNCTIONS.items()
        if name != "batch_all active"
    },
}


@every_transform
@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("which", ["emb", "ref_emb"])
def test_transforms_are_refused(transform, name, which):
    emb, labels, memory, ids, me, *_ = arguments(ref=True, requires_grad=False)
    rows = {"ref_emb": memory, "ref_labels": ids, "self_index": me}

    def loss(x):
        if which == "emb":
            return DIFFERENTIABLE[name](x, labels, **rows)
        return DIFFERENTIABLE[name](emb, labels, **{**rows, "ref_emb": x})

    refused(transform, loss, emb if which == "emb" else memory)


@every_transform
@pytest.mark.parametrize("beta", [torch.tensor(1.2), torch.tensor([1.0, 2.0, 3.0, 4.0])], ids=["()", "(C,)"])
def test_transforms_of_beta_are_refused(transform, beta):
    emb, labels, *_ = arguments(requires_grad=False)
    refused(transform, lambda x: T.beta_margin_loss(emb, labels, x, seed=SEED), beta)


# Of every op, the arguments that can be transformed.
TENSORS = {
    "mine": (0, 2),
    "triplet_forward": (0, 2),
    "triplet_backward": (0, 1, 2, 4),
    "tuples_forward": (0, 2, 15),
    "tuples_backward": (0, 1, 3, 13, 16),
}


def direct_arguments(name):
    if name.startswith("tuples"):
        given = tuples_arguments("beta_margin", ref=True, requires_grad=False)
        loss, *kept = TUPLES_FORWARD(*given)
        return tuples_backward_arguments(given, loss, *kept, True, True) if "back" in name else given
    given = (*arguments(ref=True, requires_grad=False), 0, 0, 5.0, 1.0)
    loss, picks, terms = FORWARD(*given)
    gradient = loss, given[0], given[2], picks, terms, 0, True, True
    return {"mine": given[:12], "triplet_forward": given, "triplet_backward": gradient}[name]


@every_transform
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("prefix", ["", "triton_"])
def test_transforms_of_direct_calls_are_refused(transform, name, prefix):
    if TRANSFORMS[transform][1] == "torch.func.vmap" and "backward" in name:
        return  # that is how torch takes many gradients at once
    op, given = getattr(torch.ops.tripletops, prefix + name).default, direct_arguments(name)
    for position in TENSORS[name]:

        def total(x, position=position):
            result = op(*given[:position], x, *given[position + 1 :])
            return sum(part.sum() for part in result if part.is_floating_point())

        refused(transform, total, given[position])


@pytest.mark.parametrize("function", [T.batch_hard_loss, T.batch_all_loss, T.contrastive_loss])
def test_tangents_of_what_arrives_at_the_loss_are_not_lost(function):
    """Backward is linear in it: dropping its tangent would be as wrong as dropping that of a row."""
    emb, labels, *_ = arguments()
    loss = function(emb, labels)

    def gradient(arrives):
        return torch.autograd.grad(loss, emb, arrives, retain_graph=True)[0].sum()

    for transform in ("make_dual", "jvp"):
        refused(transform, gradient, torch.ones(()))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("transform", ["make_dual", "jvp", "grad", "vmap"])
def test_transforms_are_refused_in_compiled_programs(transform, compiler):
    """Whoever is inside: what is transformed by torch may be compiled, and what is compiled transformed."""
    run, words = TRANSFORMS[transform]
    emb, labels, *_ = arguments(requires_grad=False)
    for function in (T.batch_hard_loss, T.batch_all_loss, DIFFERENTIABLE["mine"]):
        with pytest.raises(RuntimeError, match=words):
            torch.compile(partial(run, partial(function, labels=labels)), backend=compiler)(emb)
        torch.compiler.reset()
        with pytest.raises(RuntimeError, match=words):
            run(torch.compile(partial(function, labels=labels), backend=compiler), emb)
        torch.compiler.reset()


@pytest.mark.parametrize("function", [T.batch_hard_loss, T.batch_all_loss])
@pytest.mark.parametrize("create_graph", [False, True])
def test_many_gradients_at_once(function, create_graph):
    emb, labels, *_ = arguments()
    loss = function(emb, labels, margin=3.0, reduction="none")
    weights = torch.arange(39.0).reshape(3, 13).sin()
    gradient = partial(torch.autograd.grad, loss, emb, retain_graph=True)
    expected = torch.stack([gradient(weight)[0] for weight in weights])
    (given,) = gradient(weights, is_grads_batched=True, create_graph=create_graph)
    assert torch.equal(given, expected)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_what_is_not_transformed_passes(name):
    """A transform of other tensors, or of other outputs, is none of ours."""
    emb, labels, *_ = arguments()
    function = partial(DIFFERENTIABLE[name], labels=labels)
    expected = function(emb)
    with forward_ad.dual_level():
        forward_ad.make_dual(torch.ones(3), torch.ones(3))
        assert torch.equal(function(emb), expected)
    weight = torch.tensor(3.0)
    slope, value = torch.func.grad(lambda w: (w.square(), function(emb)), has_aux=True)(weight)
    assert slope == 6
    assert torch.equal(value, expected)
    if name != "mine":  # autograd outside of the transform goes on
        assert torch.equal(torch.autograd.grad(value, emb)[0], torch.autograd.grad(expected, emb)[0])
    detached, rows = torch.func.grad(lambda x: x.sum() + function(x.detach())), emb.detach()
    assert torch.equal(detached(rows), torch.ones_like(rows))
    assert torch.equal(torch.func.functionalize(function)(rows), expected)
    with forward_ad.dual_level():
        primal = forward_ad.unpack_dual(forward_ad.make_dual(rows, rows)).primal
        assert torch.equal(function(primal), expected)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_the_reference_has_the_derivatives(name):
    emb, labels, *_ = arguments(dtype=torch.float64)
    function = partial(DIFFERENTIABLE[name], labels=labels, backend="reference")
    rows, tangent = emb.detach(), emb.detach().cos()
    if name == "mine":
        assert torch.func.jvp(function, (rows,), (tangent,))[1] != 0
        return
    (gradient,) = torch.autograd.grad(function(emb), emb)
    assert gradient.any()
    torch.testing.assert_close(torch.func.grad(function)(rows), gradient)
    torch.testing.assert_close(dual(function, rows, tangent), (gradient * tangent).sum())
    torch.testing.assert_close(torch.func.jvp(function, (rows,), (tangent,))[1], (gradient * tangent).sum())
    for transform in ("vmap", "trace"):
        refused(transform, function, rows)


def test_nothing_of_size_n_by_n_is_saved():
    count, width = 300, 8
    saved = []
    emb, labels = torch.randn(count, width, requires_grad=True), torch.arange(count) // 3

    def note(tensor):
        saved.append(tensor.numel())
        return tensor

    for loss in (T.batch_hard_loss, *FUNCTIONS.values()):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss(emb, labels % 4)
        assert saved
        assert sum(saved) <= 3 * count * width


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.randn(13), "two dimensions"),
        (0, torch.randn(13, 10)[:, ::2], "adjacent"),
        (0, torch.ones(13, 5, dtype=torch.int32), "float16, bfloat16, float32 or float64"),
        (1, torch.arange(12), "labels must be 13 contiguous int64"),
        (1, torch.arange(13, dtype=torch.int32), "labels must be 13 contiguous int64"),
        (3, torch.arange(5), "ref_labels must be 17"),
        (3, None, "ref_emb needs ref_labels"),
        (2, torch.randn(17, 6), "agree in width and type"),
        (2, torch.randn(17, 5, dtype=torch.float64), "agree in width and type"),
        (4, torch.arange(3), "self_index must be 13"),
        (6, None, "a random rule needs a seed"),
        (7, 7, "no such word: 7"),
        (8, -1, "no such word: -1"),
        (9, 3, "no such word: 3"),
    ],
)
def test_direct_calls_with_bad_arguments_are_refused(position, value, message):
    given = list(arguments(requires_grad=False, ref=True, positive=2))
    given[position] = value
    with pytest.raises(RuntimeError, match=message):
        MINE(*given)


def test_backward_refuses_picks_out_of_range():
    given = (*arguments(requires_grad=False), 0, 0, 0.2, 1.0)
    loss, picks, terms = FORWARD(*given)
    with pytest.raises(RuntimeError, match="picks out of range: 13"):
        BACKWARD(torch.ones_like(loss), given[0], None, torch.full_like(picks, 13), terms, 0, True, False)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (1, torch.arange(12), "labels must be 13 contiguous int64"),
        (6, None, "a random rule needs a seed"),
        (7, 4, "no such word: 4"),
        (8, 6, "no such word: 6"),
        (9, 3, "no such word: 3"),
        (12, 6, "no such word: 6"),
        (12, -1, "no such word: -1"),
        (13, 4, "no such word: 4"),
        (14, [], "1 parameters, got 0"),
        (14, [0.1, 0.2], "1 parameters, got 2"),
        (15, None, "beta"),
        (15, torch.ones(12), "beta must be 13"),
        (15, torch.ones(13, dtype=torch.float64), "beta must be 13"),
    ],
)
def test_direct_calls_of_tuples_with_bad_arguments_are_refused(position, value, message):
    given = list(tuples_arguments("beta_margin drawn", ref=True, requires_grad=False))
    given[position] = value
    with pytest.raises(RuntimeError, match=message):
        TUPLES_FORWARD(*given)


def test_backward_of_tuples_refuses_picks_out_of_range():
    given = tuples_arguments("contrastive drawn", requires_grad=False)
    loss, active, picks, state = TUPLES_FORWARD(*given)
    for pick in (13, 2**62):
        kept = active, torch.full_like(picks, pick), state
        with pytest.raises(RuntimeError, match=f"picks out of range: {pick}"):
            TUPLES_BACKWARD(*tuples_backward_arguments(given, torch.ones_like(loss), *kept, True, False))


def test_self_index_out_of_range_is_harmless_in_the_kernel():
    given = list(arguments(requires_grad=False, ref=True))
    given[4] = torch.tensor([2**62, -(2**62)] + [10**6] * 11)
    picks, _ = MINE(*given)
    given[4] = torch.full((13,), -1)
    assert torch.equal(picks, MINE(*given)[0])


TRITON = ops._Ops(*(op.overload for op in ops._OPS["triton"]))


@pytest.fixture
def kernels(monkeypatch) -> SimpleNamespace:
    """What triton's ops run: here the CPU kernels, since this is about what torch does around them."""
    kernels = SimpleNamespace(**{name: op.overload for name, op in ops._OPS["cpu"]._asdict().items()})
    monkeypatch.setitem(sys.modules, "tripletops.backends.triton", kernels)
    monkeypatch.setattr(import_module("tripletops.backends"), "triton", kernels, raising=False)
    return kernels


def doubled(backward):
    return lambda *given: [gradient * 2 for gradient in backward(*given)]


class TestTriton:
    @pytest.mark.parametrize("name", ops._Ops._fields)
    def test_same_signature(self, name):
        cpu, triton = (getattr(handles, name).overload for handles in ops._OPS.values())
        assert str(triton._schema) == str(cpu._schema).replace(f"::{name}", f"::triton_{name}")
        assert set(triton.tags) - set(cpu.tags) == {torch.Tag.cudagraph_unsafe}

    @pytest.mark.parametrize("name", ops._Ops._fields)
    def test_for_tensors_on_a_gpu_and_for_the_interpreter(self, name):
        for key in ("CUDA", "CPU"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"tripletops::triton_{name}", key)

    @pytest.mark.parametrize("ref", [False, True])
    def test_opcheck(self, kernels, ref):
        torch.library.opcheck(TRITON.mine, arguments(ref=ref, positive=1))
        given = (*arguments(ref=ref), 0, 0, 0.2, 1.0)
        torch.library.opcheck(TRITON.triplet_forward, given)
        loss, picks, terms = TRITON.triplet_forward(*given)
        emb, memory = (None if tensor is None else tensor.detach() for tensor in (given[0], given[2]))
        grad = torch.ones_like(loss)
        torch.library.opcheck(TRITON.triplet_backward, (grad, emb, memory, picks, terms, 0, True, ref))
        given = tuples_arguments("beta_margin drawn", ref=ref)
        torch.library.opcheck(TRITON.tuples_forward, given)
        loss, *kept = TRITON.tuples_forward(*given)
        backward = tuples_backward_arguments(given, torch.ones_like(loss), *kept, True, ref)
        torch.library.opcheck(TRITON.tuples_backward, backward)

    @pytest.mark.parametrize("route", ["function", "op", "compiled"])
    def test_gradients(self, kernels, route):
        """By every route the backward pass is triton's own."""
        given = (*arguments(ref=True), 0, 0, 5.0, 1.0)
        wanted = given[0], given[2]
        expected = torch.autograd.grad(ops.triplet_loss("cpu", *given), wanted)
        run = {
            "function": partial(ops.triplet_loss, "triton"),
            "op": lambda *given: TRITON.triplet_forward(*given)[0],
            "compiled": torch.compile(partial(ops.triplet_loss, "triton"), fullgraph=True),
        }[route]
        loss = run(*given)
        kernels.triplet_backward = doubled(BACKWARD)
        for a, b in zip(torch.autograd.grad(loss, wanted), expected, strict=True):
            assert a.any()
            assert torch.equal(a, 2 * b)

    @every_objective
    def test_gradients_of_tuples(self, kernels, objective):
        given = tuples_arguments(objective, ref=True)
        wanted = [tensor for tensor in (given[0], given[2], given[-1]) if tensor is not None]
        losses = [ops.tuples_loss(backend, *given)[0] for backend in ("cpu", "triton")]
        kernels.tuples_backward = doubled(TUPLES_BACKWARD)
        for a, b in zip(*(torch.autograd.grad(loss, wanted) for loss in losses), strict=True):
            assert torch.equal(2 * a, b)

    def test_tuples_compiled_without_a_graph_break(self, kernels):
        given = tuples_arguments("contrastive")
        compiled = torch.compile(partial(ops.tuples_loss, "triton"), fullgraph=True)
        assert torch.equal(compiled(*given)[0], ops.tuples_loss("cpu", *given)[0])

    def test_public_functions_compiled_without_a_graph_break(self, kernels, monkeypatch):
        """The backend is picked while the program is traced."""
        registry = import_module("tripletops.backends")
        usable = registry.Backend("triton", "cpu", ("cpu",), registry._reference_why_not)
        monkeypatch.setitem(registry.REGISTRY, "triton", usable)
        picks = MINE(*arguments(positive=1))[0]
        kernels.mine = lambda *given: (picks + 1, MINE(*given)[1])
        emb, labels, *_ = arguments()
        mine = partial(T.mine, positive="easy", negative="hard")
        for backend, offset in (("cpu", 0), ("triton", 1)):
            for run in (mine, torch.compile(mine, fullgraph=True)):
                triplets = run(emb, labels, backend=backend)
                assert torch.equal(torch.stack(triplets[1:3]), picks + offset)

    def test_a_second_derivative_is_refused(self, kernels):
        given = (*arguments(), 0, 0, 5.0, 1.0)
        tuples = tuples_arguments("batch_all")
        for emb, loss in (
            (given[0], ops.triplet_loss("triton", *given)),
            (given[0], TRITON.triplet_forward(*given)[0]),
            (tuples[0], ops.tuples_loss("triton", *tuples)[0]),
        ):
            (gradient,) = torch.autograd.grad(loss, emb, create_graph=True)
            with pytest.raises(RuntimeError, match="first order only"):
                gradient.square().sum().backward()
