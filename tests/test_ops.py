"""The ops as torch sees them: opcheck, torch.compile, the autograd routes, memory safety of direct calls."""

from __future__ import annotations

import itertools

import pytest
import torch

import tripletops as T
from tripletops import ops

FORWARD = torch.ops.tripletops.triplet_forward.default
BACKWARD = torch.ops.tripletops.triplet_backward.default
MINE = torch.ops.tripletops.mine.default

# Inductor itself imports modules that warn of their own deprecation.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def arguments(requires_grad=True, ref=False, dtype=torch.float32, positive=0, negative=0, distance=0):
    generator = torch.Generator().manual_seed(3)
    emb = torch.randn(13, 5, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)
    labels = torch.arange(13) % 4
    seed = torch.tensor(5)
    if not ref:
        return emb, labels, None, None, None, None, seed, positive, negative, distance
    memory = (
        torch.randn(17, 5, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)
    )
    ids, me = torch.arange(17) % 4, torch.arange(13)
    # No row is ignored: opcheck takes the NaN that such rows report for a difference.
    return emb, labels, memory, ids, me, 77, seed, positive, negative, distance


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


@pytest.mark.parametrize("loss", range(4))
@pytest.mark.parametrize("ref", [False, True])
def test_both_autograd_routes_give_the_same_bits(loss, ref):
    given = (*arguments(ref=ref, distance=2), loss, 0, 0.2, 0.5)
    wanted = [tensor for tensor in (given[0], given[2]) if tensor is not None]
    by_function = torch.autograd.grad(ops.triplet_loss(*given), wanted)
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


@pytest.mark.parametrize("rules", [("hard", "hard"), ("easy", "semihard"), ("random", "random")])
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


def test_create_graph_alone_is_harmless():
    emb, labels = torch.randn(12, 4, requires_grad=True), torch.arange(12) // 3
    loss = T.batch_hard_loss(emb, labels, margin=5.0)
    (plain,) = torch.autograd.grad(loss, emb, retain_graph=True)
    (graphed,) = torch.autograd.grad(loss, emb, create_graph=True)
    assert torch.equal(plain, graphed.detach())


def test_nothing_of_size_n_by_n_is_saved():
    count, width = 300, 8
    saved = []
    emb, labels = torch.randn(count, width, requires_grad=True), torch.arange(count) // 3

    def note(tensor):
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        T.batch_hard_loss(emb, labels)
    assert saved
    assert sum(saved) <= 2 * count * width


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


def test_self_index_out_of_range_is_harmless_in_the_kernel():
    given = list(arguments(requires_grad=False, ref=True))
    given[4] = torch.tensor([2**62, -(2**62)] + [10**6] * 11)
    picks, _ = MINE(*given)
    given[4] = torch.full((13,), -1)
    assert torch.equal(picks, MINE(*given)[0])
