"""Bad input: every refusal by type and text, on every public function and module that can be given it.

A refusal names what was given and, for a word, the words that exist. It comes before any kernel runs, and it
leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tripletops as T

N, D, M = 6, 4, 9
ROW_ARGUMENTS = ("ref_emb", "ref_labels", "self_index", "generator", "seed")


def as_function(module: type[torch.nn.Module]) -> Callable[..., torch.Tensor]:
    """Options go to the constructor, rows to the call."""

    def call(emb: Any, labels: Any, **arguments: Any) -> torch.Tensor:
        rows = {name: arguments.pop(name) for name in ROW_ARGUMENTS if name in arguments}
        loss: torch.Tensor = module(**arguments)(emb, labels, **rows)
        return loss

    return call


MINE: dict[str, Callable[..., Any]] = {"mine": partial(T.mine, positive="hard", negative="hard")}
DRAWING: dict[str, Callable[..., Any]] = {  # those with a rule that can be random
    "triplet_loss": T.triplet_loss,
    "easy_positive_loss": T.easy_positive_loss,
    "nn.TripletLoss": as_function(T.nn.TripletLoss),
    "nn.EasyPositiveLoss": as_function(T.nn.EasyPositiveLoss),
}
LOSSES: dict[str, Callable[..., Any]] = {
    "batch_hard_loss": T.batch_hard_loss,
    "nn.BatchHardLoss": as_function(T.nn.BatchHardLoss),
    **DRAWING,
}

every_function = pytest.mark.parametrize(
    "function", [pytest.param(f, id=n) for n, f in {**LOSSES, **MINE}.items()]
)
every_loss = pytest.mark.parametrize("function", [pytest.param(f, id=n) for n, f in LOSSES.items()])
every_drawing = pytest.mark.parametrize(
    "function", [pytest.param(f, id=n) for n, f in {**DRAWING, **MINE}.items()]
)


@pytest.fixture(params=["cpu", "reference"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    why_not = T.backends()[name]
    if why_not != "usable":
        pytest.skip(f"backend {name}: {why_not}")
    return name


@pytest.fixture
def emb() -> torch.Tensor:
    return torch.arange(N * D, dtype=torch.float32).reshape(N, D).sin().requires_grad_()


@pytest.fixture
def labels() -> torch.Tensor:
    return torch.arange(N) // 2


@pytest.fixture
def ref() -> dict[str, torch.Tensor]:
    return {"ref_emb": torch.arange(M * D).reshape(M, D).cos(), "ref_labels": torch.arange(M) // 3}


@contextmanager
def refused(kind: type[Exception], *texts: str) -> Iterator[None]:
    """The body raises exactly `kind`, with every one of `texts`, and draws no random number."""
    state = torch.get_rng_state()
    with pytest.raises(kind) as caught:
        yield
    assert caught.type is kind
    for text in texts:
        assert text in str(caught.value)
    assert torch.equal(torch.get_rng_state(), state)


class TestShapes:
    @every_function
    @pytest.mark.parametrize("shape", [(), (N,), (N, D, 1), (2, N, D)])
    def test_emb_not_2d(self, function, shape, labels):
        with refused(ValueError, "emb must be (N, D)", str(shape), str((N,))):
            function(torch.zeros(shape), labels)

    @every_function
    @pytest.mark.parametrize("shape", [(), (N, 1), (1, N)])
    def test_labels_not_1d(self, function, shape, emb):
        with refused(ValueError, "labels (N,)", str(shape), str((N, D))):
            function(emb, torch.zeros(shape, dtype=torch.int64))

    @every_function
    @pytest.mark.parametrize("length", [0, 1, N - 1, N + 1])
    def test_lengths_differ(self, function, length, emb):
        with refused(ValueError, str((N, D)), str((length,))):
            function(emb, torch.zeros(length, dtype=torch.int64))

    @every_function
    def test_ref_lengths_differ(self, function, emb, labels, ref):
        ref["ref_labels"] = ref["ref_labels"][:-1]
        with refused(ValueError, "ref_emb", "ref_labels", str((M, D)), str((M - 1,))):
            function(emb, labels, **ref)

    @every_function
    def test_ref_emb_not_2d(self, function, emb, labels, ref):
        ref["ref_emb"] = ref["ref_emb"][:, 0]
        with refused(ValueError, "ref_emb must be (N, D)", str((M,))):
            function(emb, labels, **ref)

    @every_function
    @pytest.mark.parametrize("width", [0, 1, D - 1, D + 1])
    def test_width_differs_from_ref(self, function, width, emb, labels, ref):
        ref["ref_emb"] = torch.zeros(M, width)
        with refused(ValueError, str((N, D)), str((M, width)), "same length"):
            function(emb, labels, **ref)

    @every_function
    @pytest.mark.parametrize("shape", [(), (N, 1), (N - 1,), (M,)])
    def test_self_index_not_one_per_anchor(self, function, shape, emb, labels, ref):
        with refused(ValueError, "self_index", str(shape), str((N, D))):
            function(emb, labels, **ref, self_index=torch.zeros(shape, dtype=torch.int64))


class TestDevices:
    """A machine without a second device can still make tensors that say they are on one."""

    @pytest.fixture
    def elsewhere(self) -> Callable[[torch.Tensor], torch.Tensor]:
        def move(tensor: torch.Tensor) -> torch.Tensor:
            with FakeTensorMode():
                return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")

        return move

    @every_function
    def test_labels(self, function, emb, labels, elsewhere):
        with refused(ValueError, "emb", "labels", "cpu", "cuda:0", str((N, D)), str((N,))):
            function(emb, elsewhere(labels))

    @every_function
    def test_ref_emb(self, function, emb, labels, ref, elsewhere):
        ref = {name: elsewhere(tensor) for name, tensor in ref.items()}
        with refused(ValueError, "emb", "ref_emb", "cpu", "cuda:0", str((N, D)), str((M, D))):
            function(emb, labels, **ref)

    @every_function
    def test_ref_labels(self, function, emb, labels, ref, elsewhere):
        ref["ref_labels"] = elsewhere(ref["ref_labels"])
        with refused(ValueError, "ref_emb", "ref_labels", "cpu", "cuda:0", str((M, D)), str((M,))):
            function(emb, labels, **ref)

    @every_function
    def test_self_index(self, function, emb, labels, ref, elsewhere):
        with refused(ValueError, "emb", "self_index", "cpu", "cuda:0", str((N, D)), str((N,))):
            function(emb, labels, **ref, self_index=elsewhere(labels))

    @every_drawing
    def test_seed(self, function, emb, labels, elsewhere, backend):
        with refused(ValueError, "seed", "cpu", "cuda:0"):
            function(emb, labels, seed=elsewhere(torch.tensor(1)), negative="random", backend=backend)


class TestTypes:
    @every_function
    @pytest.mark.parametrize(
        "dtype",
        [
            torch.int64,
            torch.uint8,
            torch.bool,
            torch.complex64,
            torch.complex128,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        ],
        ids=str,
    )
    def test_emb_dtype(self, function, dtype, labels):
        with refused(TypeError, "emb must be", str(dtype)):
            function(torch.zeros(N, D).to(dtype), labels)

    @every_function
    def test_ref_emb_dtype(self, function, emb, labels, ref):
        ref["ref_emb"] = ref["ref_emb"].to(torch.int32)
        with refused(TypeError, "ref_emb must be", "torch.int32"):
            function(emb, labels, **ref)

    @every_function
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bool, torch.complex64], ids=str)
    def test_label_dtype(self, function, dtype, emb, labels, ref):
        with refused(TypeError, "labels must be", str(dtype)):
            function(emb, labels.to(dtype))
        ref["ref_labels"] = ref["ref_labels"].to(dtype)
        with refused(TypeError, "ref_labels must be", str(dtype)):
            function(emb, labels, **ref)
        with refused(TypeError, "self_index must be", str(dtype)):
            ref["ref_labels"] = ref["ref_labels"].real.to(torch.int64)
            function(emb, labels, **ref, self_index=labels.to(dtype))

    @every_function
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (None, "NoneType"),
            ([[1.0, 2.0]], "list"),
            (np.zeros((N, D), np.float32), "numpy.ndarray"),
            ("emb", "str"),
            (1.0, "float"),
        ],
        ids=["None", "list", "ndarray", "str", "float"],
    )
    def test_not_a_tensor(self, function, value, text, emb, labels, ref):
        with refused(TypeError, "emb must be a torch.Tensor", text):
            function(value, labels)
        with refused(TypeError, "labels must be a torch.Tensor", text):
            function(emb, value)
        if value is not None:
            with refused(TypeError, "ref_emb must be a torch.Tensor", text):
                function(emb, labels, ref_emb=value, ref_labels=ref["ref_labels"])
            with refused(TypeError, "ref_labels must be a torch.Tensor", text):
                function(emb, labels, ref_emb=ref["ref_emb"], ref_labels=value)
            with refused(TypeError, "self_index must be a torch.Tensor", text):
                function(emb, labels, **ref, self_index=value)

    @every_function
    def test_tensors_without_rows(self, function, emb, labels):
        with refused(TypeError, "emb must be a dense tensor", "torch.sparse_coo"):
            function(emb.detach().to_sparse(), labels)
        with refused(TypeError, "labels must be a dense tensor", "torch.sparse_coo"):
            function(emb, labels.to_sparse())
        with refused(TypeError, "emb must be a dense tensor", "meta", "torch.float32"):
            function(emb.to("meta"), labels.to("meta"))
        with refused(TypeError, "labels must be a dense tensor", "meta", "torch.int64"):
            function(emb, labels.to("meta"))

    @every_function
    def test_nested(self, function, labels):
        rows = torch.nested.nested_tensor([torch.zeros(D)] * N, layout=torch.jagged)
        with refused(TypeError, "emb must be a dense tensor", "nested"):
            function(rows, labels)


class TestNumbers:
    @every_loss
    @pytest.mark.parametrize(
        ("margin", "text"),
        [
            (nan, "margin=nan"),
            (-0.1, "margin=-0.1"),
            (-1, "margin=-1"),
            (inf, "margin=inf"),
            (-inf, "margin=-inf"),
            (10**400, "margin=inf"),
            (np.float32(nan), "margin=nan"),
        ],
    )
    def test_margin_value(self, function, margin, text, emb, labels):
        with refused(ValueError, text):
            function(emb, labels, margin=margin)

    @every_loss
    @pytest.mark.parametrize(
        ("temperature", "text"),
        [
            (0, "temperature=0"),
            (0.0, "temperature=0.0"),
            (-0.0, "temperature=-0.0"),
            (-2.5, "temperature=-2.5"),
            (nan, "temperature=nan"),
            (inf, "temperature=inf"),
        ],
    )
    def test_temperature_value(self, function, temperature, text, emb, labels):
        with refused(ValueError, text):
            function(emb, labels, temperature=temperature)

    @every_loss
    @pytest.mark.parametrize("name", ["margin", "temperature"])
    @pytest.mark.parametrize(
        "value",
        ["0.2", None, True, [0.2], 1j, torch.tensor(0.2), np.array(0.2)],
        ids=lambda value: type(value).__name__,
    )
    def test_not_a_number(self, function, name, value, emb, labels):
        with refused(TypeError, f"{name} must be a Python number", type(value).__name__):
            function(emb, labels, **{name: value})

    @every_loss
    @pytest.mark.parametrize(
        "margin", [0, 0.0, 1, np.float32(0.5), np.float64(0.5), np.int64(1), Fraction(1, 2)], ids=repr
    )
    def test_numbers_that_are_fine(self, function, margin, emb, labels, backend):
        options = {"loss": "margin", "distance": "euclidean", "backend": backend}
        loss = function(emb, labels, margin=margin, **options)
        assert torch.equal(loss, function(emb, labels, margin=float(margin), **options))


WORDS = {
    "positive": ["hard", "easy", "random"],
    "negative": ["hard", "semihard", "easy", "random"],
    "distance": ["euclidean", "sqeuclidean", "cosine"],
    "loss": ["margin", "soft_margin", "first_order", "second_order"],
    "reduction": ["mean", "mean_nonzero", "sum", "none"],
    "backend": ["cpu", "triton", "reference"],
}
TAKES = {  # the words that each function lets its caller choose
    "triplet_loss": ["positive", "negative", "distance", "loss", "reduction", "backend"],
    "nn.TripletLoss": ["positive", "negative", "distance", "loss", "reduction", "backend"],
    "easy_positive_loss": ["negative", "distance", "loss", "reduction", "backend"],
    "nn.EasyPositiveLoss": ["negative", "distance", "loss", "reduction", "backend"],
    "batch_hard_loss": ["distance", "loss", "reduction", "backend"],
    "nn.BatchHardLoss": ["distance", "loss", "reduction", "backend"],
    "mine": ["positive", "negative", "distance", "backend"],
}
every_word = pytest.mark.parametrize(
    ("function", "name"),
    [
        pytest.param({**LOSSES, **MINE}[function], name, id=f"{function}-{name}")
        for function in TAKES
        for name in TAKES[function]
    ],
)


class TestWords:
    @every_word
    @pytest.mark.parametrize("word", ["hardest", "", "Hard", 3, ["hard"], True], ids=repr)
    def test_unknown(self, function, name, word, emb, labels):
        with refused(ValueError, f"{name}={word!r}", *map(repr, WORDS[name])):
            function(emb, labels, **{name: word})

    @every_loss
    @pytest.mark.parametrize("loss", ["first_order", "second_order"])
    @pytest.mark.parametrize("distance", ["euclidean", "sqeuclidean"])
    def test_similarity_losses_are_cosine(self, function, loss, distance, emb, labels, backend):
        with refused(ValueError, f"loss={loss!r}", f"distance={distance!r}", "cosine"):
            function(emb, labels, loss=loss, distance=distance, backend=backend)
        default = function(emb, labels, loss=loss, backend=backend)
        assert torch.equal(default, function(emb, labels, loss=loss, distance="cosine", backend=backend))

    def test_rules_of_later_versions_are_unknown(self, emb, labels):
        with refused(ValueError, "negative='distance'"):
            T.triplet_loss(emb, labels, negative="distance")

    def test_rules_are_required_of_mine(self, emb, labels):
        with pytest.raises(TypeError, match="positive"):
            T.mine(emb, labels, negative="hard")  # type: ignore[call-arg]


class TestReference:
    @every_function
    def test_ref_emb_alone(self, function, emb, labels, ref):
        with refused(ValueError, "ref_emb", str((M, D)), "without ref_labels"):
            function(emb, labels, ref_emb=ref["ref_emb"])

    @every_function
    def test_ref_labels_alone(self, function, emb, labels, ref):
        with refused(ValueError, "ref_labels", str((M,)), "without ref_emb"):
            function(emb, labels, ref_labels=ref["ref_labels"])

    @every_function
    def test_self_index_alone(self, function, emb, labels):
        with refused(ValueError, "self_index", str((N,)), "without ref_emb"):
            function(emb, labels, self_index=labels)

    @every_function
    @pytest.mark.parametrize("value", [-2, M, 2**62, -(2**63)])
    @pytest.mark.parametrize("position", [0, N - 1])
    def test_self_index_out_of_range(self, function, value, position, emb, labels, ref):
        self_index = torch.zeros(N, dtype=torch.int64)
        self_index[position] = value
        with refused(ValueError, f"self_index holds {value}", str((M, D))):
            function(emb, labels, **ref, self_index=self_index)

    @every_function
    @pytest.mark.parametrize(
        "dtype", [torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16], ids=str
    )
    def test_self_index_of_any_integer_dtype(self, function, dtype, emb, labels, ref, backend):
        self_index = torch.arange(N) + 3
        expected = function(emb, labels, **ref, self_index=self_index, backend=backend)
        given = function(emb, labels, **ref, self_index=self_index.to(dtype), backend=backend)
        for one, other in (
            zip(expected, given, strict=True) if isinstance(given, tuple) else [(expected, given)]
        ):
            assert torch.equal(one, other)

    @every_function
    def test_nothing_to_be_self_in(self, function, emb, labels, backend):
        empty = {"ref_emb": torch.zeros(0, D), "ref_labels": torch.zeros(0, dtype=torch.int64)}
        function(emb, labels, **empty, self_index=torch.full((N,), -1), backend=backend)
        with refused(ValueError, "self_index holds 0", str((0, D))):
            function(emb, labels, **empty, self_index=torch.zeros(N, dtype=torch.int64), backend=backend)


class TestIgnoreLabel:
    @every_function
    @pytest.mark.parametrize(
        "value", [1.0, "1", True, [1], torch.tensor(1)], ids=lambda value: type(value).__name__
    )
    def test_not_an_int(self, function, value, emb, labels):
        with refused(TypeError, "ignore_label must be an int", type(value).__name__):
            function(emb, labels, ignore_label=value)

    def test_numpy_int(self, emb, labels, backend):
        given = T.batch_hard_loss(emb, labels, ignore_label=np.int32(1), backend=backend)
        assert torch.equal(given, T.batch_hard_loss(emb, labels, ignore_label=1, backend=backend))

    @pytest.mark.parametrize("value", [99, 2**63, 2**64, -(2**63) - 1, 10**30])
    def test_a_label_nobody_has(self, value, emb, labels, backend):
        given = T.batch_hard_loss(emb, labels, ignore_label=value, backend=backend)
        assert torch.equal(given, T.batch_hard_loss(emb, labels, backend=backend))

    def test_uint64(self, emb, backend):
        large = torch.tensor([2**63, 2**63, 2**64 - 1, 2**64 - 1, 5, 5], dtype=torch.uint64)
        small = torch.tensor([0, 0, 1, 1, 2, 2])
        for big, little in ((2**63, 0), (2**64 - 1, 1), (5, 2), (None, None)):
            given = T.batch_hard_loss(emb, large, ignore_label=big, backend=backend)
            assert torch.equal(given, T.batch_hard_loss(emb, small, ignore_label=little, backend=backend))


class TestRandomness:
    @every_drawing
    def test_generator_and_seed(self, function, emb, labels, backend):
        generator = torch.Generator().manual_seed(1)
        state = generator.get_state()
        with refused(ValueError, "generator", "seed=3"):
            function(emb, labels, negative="random", generator=generator, seed=3, backend=backend)
        assert torch.equal(generator.get_state(), state)

    @every_drawing
    @pytest.mark.parametrize("negative", ["hard", "random"])
    def test_seed_type(self, function, negative, emb, labels, backend):
        options = {"negative": negative, "backend": backend}
        for seed in (1.0, "1", True, [1]):
            with refused(TypeError, "seed must be an int", type(seed).__name__):
                function(emb, labels, seed=seed, **options)
        with refused(TypeError, "seed", "torch.float32"):
            function(emb, labels, seed=torch.tensor(1.0), **options)
        with refused(TypeError, "seed", "torch.int32"):
            function(emb, labels, seed=torch.tensor(1, dtype=torch.int32), **options)

    @every_drawing
    def test_seed_value(self, function, emb, labels, backend):
        for seed in (2**63, -(2**63) - 1):
            with refused(ValueError, f"seed={seed}"):
                function(emb, labels, seed=seed, negative="random", backend=backend)
        for shape in ((2,), (0,)):
            with refused(ValueError, "seed", str(shape)):
                function(
                    emb,
                    labels,
                    seed=torch.zeros(shape, dtype=torch.int64),
                    negative="random",
                    backend=backend,
                )

    @every_drawing
    def test_generator_type(self, function, emb, labels, backend):
        with refused(TypeError, "generator must be a torch.Generator", "int"):
            function(emb, labels, negative="random", generator=1, backend=backend)

    @pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1, -(2**63)])
    def test_seeds_as_int_and_tensor(self, seed, backend):
        emb, labels = torch.zeros(40, 2), torch.arange(40) % 4
        rules: dict[str, Any] = {"positive": "random", "negative": "random", "backend": backend}
        given = T.mine(emb, labels, seed=seed, **rules)
        for tensor in (torch.tensor(seed), torch.tensor([seed]), torch.tensor([[seed]])):
            other = T.mine(emb, labels, seed=tensor, **rules)
            assert torch.equal(given.positive, other.positive)
            assert torch.equal(given.negative, other.negative)

    def test_one_draw_per_call_and_only_for_random_rules(self, emb, labels, backend):
        generator = torch.Generator().manual_seed(5)
        state = generator.get_state()
        T.triplet_loss(emb, labels, generator=generator, backend=backend)
        assert torch.equal(generator.get_state(), state)
        T.triplet_loss(
            emb, labels, positive="random", negative="random", generator=generator, backend=backend
        )
        expected = torch.Generator().manual_seed(5)
        torch.randint(-(2**63), 2**63 - 1, (), generator=expected)
        assert torch.equal(generator.get_state(), expected.get_state())

    def test_global_generator(self, emb, labels, backend):
        state = torch.get_rng_state()
        T.batch_hard_loss(emb, labels, backend=backend)
        T.triplet_loss(emb, labels, positive="random", seed=3, backend=backend)
        assert torch.equal(torch.get_rng_state(), state)
        T.triplet_loss(emb, labels, positive="random", backend=backend)
        assert not torch.equal(torch.get_rng_state(), state)


DEGENERATE = {
    "N = 0": [],
    "N = 1": [3],
    "one class": [2, 2, 2, 2],
    "all classes distinct": [0, 1, 2, 3],
}


class TestDegenerateBatches:
    """Nothing to learn from is no error: the loss is exactly 0 and connected to the graph."""

    @every_loss
    @pytest.mark.parametrize("classes", DEGENERATE.values(), ids=DEGENERATE.keys())
    @pytest.mark.parametrize("reduction", WORDS["reduction"])
    def test_differentiable_zero(self, function, classes, reduction, backend):
        emb = torch.arange(len(classes) * D, dtype=torch.float32).reshape(-1, D).sin().requires_grad_()
        loss = function(emb, torch.tensor(classes, dtype=torch.int64), reduction=reduction, backend=backend)
        assert torch.equal(loss, torch.zeros(len(classes) if reduction == "none" else ()))
        loss.sum().backward()
        assert emb.grad is not None
        assert torch.equal(emb.grad, torch.zeros_like(emb))

    @every_loss
    def test_no_candidates(self, function, emb, labels, backend):
        ref_emb = torch.zeros(0, D, requires_grad=True)
        ref_labels = torch.zeros(0, dtype=torch.int64)
        loss = function(emb, labels, ref_emb=ref_emb, ref_labels=ref_labels, backend=backend)
        assert torch.equal(loss, torch.zeros(()))
        loss.backward()
        assert emb.grad is not None
        assert torch.equal(emb.grad, torch.zeros_like(emb))

    @every_loss
    def test_rows_without_elements(self, function, labels, backend):
        emb = torch.zeros(N, 0, requires_grad=True)
        options: dict[str, Any] = {"loss": "margin", "margin": 0.75, "backend": backend}
        for distance in WORDS["distance"]:
            loss = function(emb, labels, distance=distance, **options)
            assert loss.item() == 0.75
            loss.backward()
            assert emb.grad is not None
            assert emb.grad.shape == (N, 0)

    @pytest.mark.parametrize("classes", DEGENERATE.values(), ids=DEGENERATE.keys())
    def test_nothing_is_mined(self, classes, backend):
        emb, labels = torch.ones(len(classes), D), torch.tensor(classes, dtype=torch.int64)
        triplets = T.mine(emb, labels, positive="hard", negative="hard", backend=backend)
        assert triplets.anchor.tolist() == list(range(len(classes)))
        assert not triplets.valid.any()


class TestSecondDerivative:
    @every_loss
    def test_refused(self, function, emb, labels):
        if T.backends()["cpu"] != "usable":
            pytest.skip("the plain torch of the reference can be differentiated as often as one likes")
        loss = function(emb, labels, backend="cpu")
        (gradient,) = torch.autograd.grad(loss, emb, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivative"):
            gradient.sum().backward()


class TestNothingLeftBehind:
    @every_loss
    def test_the_next_call_works(self, function, emb, labels, backend):
        before = function(emb, labels, backend=backend)
        (gradient,) = torch.autograd.grad(before, emb)
        for bad in (
            {"margin": -1.0},
            {"reduction": "all"},
            {"distance": "l2"},
            {"ref_emb": emb},
            {"ignore_label": 0.5},
        ):
            with refused(TypeError if "ignore_label" in bad else ValueError):
                function(emb, labels, backend=backend, **bad)
        with refused(ValueError):
            function(emb, labels[1:], backend=backend)
        assert emb.grad is None
        after = function(emb, labels, backend=backend)
        assert torch.equal(before, after)
        assert torch.equal(torch.autograd.grad(after, emb)[0], gradient)

    @every_drawing
    @pytest.mark.parametrize(
        "bad", [{"ignore_label": 0.5}, {"distance": "l2"}, {"backend": "gpu"}, {"backend": "triton"}]
    )
    def test_no_random_number_is_used_up(self, function, bad, emb, labels):
        kind = {"ignore_label": TypeError, "distance": ValueError}.get(next(iter(bad)))
        kind = kind or (RuntimeError if bad["backend"] == "triton" else ValueError)
        generator = torch.Generator().manual_seed(2)
        state = generator.get_state()
        for draws in ({}, {"generator": generator}):
            with refused(kind):
                function(emb, labels, negative="random", **draws, **bad)
        assert torch.equal(generator.get_state(), state)


class TestCompiled:
    """A traced program cannot look at values: what it does not check must still stay within bounds."""

    # dynamo makes an instance of an autograd function for itself
    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
    def test_self_index_out_of_range(self, emb, labels, ref):
        if T.backends()["cpu"] != "usable":
            pytest.skip(f"backend cpu: {T.backends()['cpu']}")
        compiled = torch.compile(T.batch_hard_loss, fullgraph=True, backend="eager")
        absent = T.batch_hard_loss(emb, labels, **ref, self_index=torch.full((N,), -1), backend="cpu")
        for value in (M, 2**62, -2, -(2**63)):
            loss = compiled(emb, labels, **ref, self_index=torch.full((N,), value), backend="cpu")
            assert torch.equal(loss, absent)


class TestAccepted:
    """What looks unusual and is fine."""

    @pytest.mark.parametrize(
        "name", ["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"]
    )
    def test_every_integer_dtype(self, name, emb, labels, backend):
        expected = T.batch_hard_loss(emb, labels, backend=backend)
        assert torch.equal(T.batch_hard_loss(emb, labels.to(getattr(torch, name)), backend=backend), expected)

    def test_strides(self, emb, labels, backend):
        expected = T.batch_hard_loss(emb, labels, backend=backend)
        wide = torch.full((N, 2 * D), nan)
        wide[:, ::2] = emb.detach()
        strided = wide[:, ::2].requires_grad_()
        loss = T.batch_hard_loss(strided, labels.repeat_interleave(2)[::2], backend=backend)
        loss.backward()
        expected.backward()
        assert torch.equal(loss, expected)
        assert strided.grad is not None
        assert emb.grad is not None
        assert torch.equal(strided.grad, emb.grad)
        transposed = emb.detach().T.contiguous().T
        assert torch.equal(T.batch_hard_loss(transposed, labels, backend=backend), expected)

    def test_gradient_reaches_both_types(self, emb, labels, ref, backend):
        for left, right in (
            (torch.float32, torch.float64),
            (torch.float16, torch.bfloat16),
            (torch.float64, torch.float16),
        ):
            x = emb.detach().to(left).requires_grad_()
            y = ref["ref_emb"].to(right).requires_grad_()
            loss = T.batch_hard_loss(
                x, labels, ref_emb=y, ref_labels=ref["ref_labels"], margin=5.0, backend=backend
            )
            loss.backward()
            assert loss.dtype is torch.promote_types(left, right)
            assert x.grad is not None
            assert y.grad is not None
            assert x.grad.dtype is left
            assert y.grad.dtype is right
            assert x.grad.abs().sum() > 0
            assert y.grad.abs().sum() > 0

    def test_mine_gives_no_gradient(self, emb, labels, ref, backend):
        triplets = T.mine(emb, labels, positive="easy", negative="semihard", backend=backend)
        assert not any(tensor.requires_grad for tensor in triplets)
        ref["ref_emb"].requires_grad_()
        triplets = T.mine(emb, labels, **ref, positive="easy", negative="hard", backend=backend)
        assert not any(tensor.requires_grad for tensor in triplets)
        assert torch.equal(triplets.anchor, torch.arange(N))
        assert triplets.valid.dtype is torch.bool

    def test_valid(self, backend):
        emb, labels = torch.eye(5), torch.tensor([0, 0, 1, 2, 2])
        triplets = T.mine(emb, labels, positive="hard", negative="hard", ignore_label=2, backend=backend)
        assert triplets.valid.tolist() == [True, True, False, False, False]
        assert triplets.d_ap.isnan().tolist() == [False, False, True, True, True]
