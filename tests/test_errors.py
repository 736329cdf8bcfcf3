"""Bad input: every refusal by type and text, on every public function and module that can be given it.

A refusal names what was given and, for a word, the words that exist. It comes before any kernel runs, and it
leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from math import inf, log, nan
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tripletops as T

N, D, M = 6, 4, 9
ROW_ARGUMENTS = ("ref_emb", "ref_labels", "self_index", "generator", "seed")


def as_function(module: Callable[..., torch.nn.Module]) -> Callable[..., torch.Tensor]:
    """Options go to the constructor, rows to the call."""

    def call(emb: Any, labels: Any, **arguments: Any) -> torch.Tensor:
        rows = {name: arguments.pop(name) for name in ROW_ARGUMENTS if name in arguments}
        loss: torch.Tensor = module(**arguments)(emb, labels, **rows)
        return loss

    return call


MINE: dict[str, Callable[..., Any]] = {"mine": partial(T.mine, positive="hard", negative="hard")}
# By default its rules are random, which would leave nothing to compare.
PLAIN_RULES = {"positive": "hard", "negative": "hard"}
TRIPLET_DRAWING: dict[str, Callable[..., Any]] = {  # those with a rule that can be random
    "triplet_loss": T.triplet_loss,
    "easy_positive_loss": T.easy_positive_loss,
    "nn.TripletLoss": as_function(T.nn.TripletLoss),
    "nn.EasyPositiveLoss": as_function(T.nn.EasyPositiveLoss),
}
TRIPLET_LOSSES: dict[str, Callable[..., Any]] = {
    "batch_hard_loss": T.batch_hard_loss,
    "nn.BatchHardLoss": as_function(T.nn.BatchHardLoss),
    **TRIPLET_DRAWING,
}
BETA_MARGIN: dict[str, Callable[..., Any]] = {
    "beta_margin_loss": partial(T.beta_margin_loss, beta=1.2, **PLAIN_RULES),
    "nn.BetaMarginLoss": as_function(partial(T.nn.BetaMarginLoss, **PLAIN_RULES)),
}
PAIRS: dict[str, Callable[..., Any]] = {
    "contrastive_loss": T.contrastive_loss,
    "nn.ContrastiveLoss": as_function(T.nn.ContrastiveLoss),
    **BETA_MARGIN,
}
TUPLES: dict[str, Callable[..., Any]] = {
    "batch_all_loss": T.batch_all_loss,
    "nn.BatchAllLoss": as_function(T.nn.BatchAllLoss),
    "semi_hard_loss": T.semi_hard_loss,
    "nn.SemiHardLoss": as_function(T.nn.SemiHardLoss),
    "multi_similarity_loss": T.multi_similarity_loss,
    "nn.MultiSimilarityLoss": as_function(T.nn.MultiSimilarityLoss),
    **PAIRS,
}
LOSSES = {**TRIPLET_LOSSES, **TUPLES}
FUNCTIONS = {**LOSSES, **MINE}


def each(functions: dict[str, Callable[..., Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("function", [pytest.param(f, id=n) for n, f in functions.items()])


every_function = each(FUNCTIONS)
every_loss = each(LOSSES)
every_triplet_loss = each(TRIPLET_LOSSES)
every_drawing = each({**TRIPLET_DRAWING, **PAIRS, **MINE})
every_pair_loss = each(PAIRS)


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
def refused(kind: type[Exception], *texts: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """The body raises exactly `kind`, with every one of `texts`, and draws no random number."""
    state = torch.get_rng_state()
    with pytest.raises(kind) as caught:
        yield caught
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


FROM_ZERO = [(nan, "nan"), (-0.1, "-0.1"), (-1, "-1"), (inf, "inf"), (-inf, "-inf"), (10**400, "inf")]
FROM_ZERO.append((np.float32(nan), "nan"))
ABOVE_ZERO = [*FROM_ZERO, (0, "0"), (0.0, "0.0"), (-0.0, "-0.0")]
FINITE = [(nan, "nan"), (inf, "inf"), (-inf, "-inf"), (10**400, "inf")]
LIMIT = [(nan, "nan"), (0.0, "0.0"), (-0.1, "-0.1"), (-inf, "-inf")]
CUTOFFS = {"cutoff": ABOVE_ZERO, "nonzero_loss_cutoff": LIMIT}
BATCH_HARD_NUMBERS = {"margin": FROM_ZERO, "temperature": ABOVE_ZERO}
NUMBERS: dict[str, dict[str, list[tuple[Any, str]]]] = {  # of each function, and what they must not be
    "triplet_loss": {**BATCH_HARD_NUMBERS, **CUTOFFS},
    "easy_positive_loss": {**BATCH_HARD_NUMBERS, **CUTOFFS},
    "batch_hard_loss": BATCH_HARD_NUMBERS,
    "batch_all_loss": {"margin": FROM_ZERO},
    "semi_hard_loss": {"margin": FROM_ZERO},
    "multi_similarity_loss": {
        "alpha": ABOVE_ZERO,
        "beta": ABOVE_ZERO,
        "base": FINITE,
        "epsilon": FROM_ZERO,
    },
    "contrastive_loss": {"pos_margin": FROM_ZERO, "neg_margin": FROM_ZERO, **CUTOFFS},
    "beta_margin_loss": {"alpha": FROM_ZERO, **CUTOFFS},
    "mine": CUTOFFS,
}
MODULES = {
    "triplet_loss": "nn.TripletLoss",
    "easy_positive_loss": "nn.EasyPositiveLoss",
    "batch_hard_loss": "nn.BatchHardLoss",
    "batch_all_loss": "nn.BatchAllLoss",
    "semi_hard_loss": "nn.SemiHardLoss",
    "multi_similarity_loss": "nn.MultiSimilarityLoss",
    "contrastive_loss": "nn.ContrastiveLoss",
    "beta_margin_loss": "nn.BetaMarginLoss",
}
NUMBERS.update({module: NUMBERS[function] for function, module in MODULES.items()})
every_number = pytest.mark.parametrize(
    ("function", "name", "refusals"),
    [
        pytest.param(FUNCTIONS[function], name, refusals, id=f"{function}-{name}")
        for function in NUMBERS
        for name, refusals in NUMBERS[function].items()
    ],
)


class TestNumbers:
    @every_number
    def test_value(self, function, name, refusals, emb, labels):
        for value, text in refusals:
            with refused(ValueError, f"{name}={text}"):
                function(emb, labels, **{name: value})

    @every_number
    @pytest.mark.parametrize(
        "value",
        ["0.2", None, True, [0.2], 1j, torch.tensor(0.2), np.array(0.2)],
        ids=lambda value: type(value).__name__,
    )
    def test_not_a_number(self, function, name, refusals, value, emb, labels):
        if value is None and name in ("epsilon", "nonzero_loss_cutoff"):
            return
        with refused(TypeError, f"{name} must be a Python number", type(value).__name__):
            function(emb, labels, **{name: value})

    @every_number
    @pytest.mark.parametrize(
        "value", [1, 0.5, np.float32(0.5), np.float64(0.5), np.int64(1), Fraction(1, 2)], ids=repr
    )
    def test_numbers_that_are_fine(self, function, name, refusals, value, emb, labels, backend):
        given = function(emb, labels, **{name: value}, backend=backend)
        expected = function(emb, labels, **{name: float(value)}, backend=backend)
        if isinstance(given, T.Triplets):
            assert torch.equal(given.d_an, expected.d_an)
        else:
            assert torch.equal(given, expected)

    @pytest.mark.parametrize(
        ("function", "name"),
        [
            pytest.param(FUNCTIONS[function], name, id=f"{function}-{name}")
            for function in NUMBERS
            for name, refusals in NUMBERS[function].items()
            if refusals is FROM_ZERO
        ],
    )
    def test_zero_is_fine(self, function, name, emb, labels, backend):
        for zero in (0, 0.0, -0.0):
            assert function(emb, labels, **{name: zero}, backend=backend).isfinite()

    @every_drawing
    def test_no_limit(self, function, emb, labels, backend):
        options = {"negative": "distance", "seed": 3, "backend": backend}
        given = function(emb, labels, nonzero_loss_cutoff=None, **options)
        same = function(emb, labels, nonzero_loss_cutoff=inf, **options)
        if isinstance(given, T.Triplets):
            given, same = given.negative, same.negative
        assert torch.equal(given, same)

    def test_return_active_is_a_bool(self, emb, labels):
        for function in (T.batch_all_loss, TUPLES["nn.BatchAllLoss"]):
            with refused(TypeError, "return_active must be a bool", "'no'"):
                function(emb, labels, return_active="no")


class TestBeta:
    """Of beta_margin_loss: a number, a tensor (), or one number for each class."""

    @pytest.fixture
    def call(self, emb, labels) -> Callable[..., torch.Tensor]:
        return partial(T.beta_margin_loss, emb, labels, **PLAIN_RULES)

    @pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str)
    @pytest.mark.parametrize("shape", [(), (3,)], ids=str)
    def test_dtype(self, call, dtype, shape):
        with refused(TypeError, "beta must be", str(dtype)):
            call(torch.ones(shape, dtype=dtype))

    @pytest.mark.parametrize(
        "value", ["1", None, True, [1.2], 1j, np.ones(3)], ids=lambda v: type(v).__name__
    )
    def test_type(self, call, value):
        with refused(TypeError, "beta must be", type(value).__name__):
            call(value)

    @pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, N), (0, 0)], ids=str)
    def test_shape(self, call, shape):
        with refused(ValueError, "beta must be () or (C,)", str(shape)):
            call(torch.ones(shape))

    def test_without_values(self, call):
        with refused(TypeError, "beta must be a dense tensor", "meta"):
            call(torch.ones(3, device="meta"))
        with refused(TypeError, "beta must be a dense tensor", "torch.sparse_coo"):
            call(torch.ones(3).to_sparse())

    def test_device(self, call):
        with FakeTensorMode():
            beta = torch.empty((), device="cuda")
        with refused(ValueError, "emb", "beta", "cpu", "cuda:0", str((N, D))):
            call(beta)

    @pytest.mark.parametrize("value", [-1, 3, 2**62, -(2**63)])
    @pytest.mark.parametrize("position", [0, N - 1])
    def test_label_out_of_range(self, value, position, emb, labels, backend):
        labels[position] = value
        for ignore_label in (None, 99):
            with refused(ValueError, f"labels holds {value}", "beta", str((3,)), "[0, C)", "C = 3"):
                T.beta_margin_loss(emb, labels, torch.ones(3), ignore_label=ignore_label, backend=backend)

    def test_no_class(self, emb, labels, backend):
        with refused(ValueError, "C = 0", str((0,))):
            T.beta_margin_loss(emb, labels, torch.ones(0), backend=backend)
        empty = T.beta_margin_loss(emb[:0], labels[:0], torch.ones(0), backend=backend)
        assert empty.item() == 0

    @pytest.mark.parametrize("ignored", [0, 1, 2])
    def test_ignored_rows_need_no_number(self, ignored, emb, labels, backend):
        options = {**PLAIN_RULES, "backend": backend}
        beta = torch.tensor([1.0, 1.25, 1.5])
        expected = T.beta_margin_loss(emb, labels, beta, ignore_label=ignored, **options)
        beta[ignored] = nan
        beta.requires_grad_()
        loss = T.beta_margin_loss(emb, labels, beta, ignore_label=ignored, **options)
        assert torch.equal(loss, expected)
        (gradient,) = torch.autograd.grad(loss, beta)
        assert gradient.isfinite().all()
        assert gradient[ignored] == 0
        for outside in (-1, 3, -(2**63)):
            ids, start = labels.where(labels != ignored, outside), beta.detach().nan_to_num(1.0)
            loss = T.beta_margin_loss(emb, ids, start, ignore_label=outside, **options)
            assert torch.equal(loss, expected)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("emb_dtype", [torch.bfloat16, torch.float64], ids=str)
    def test_every_float_type(self, dtype, emb_dtype, emb, labels, backend):
        options = {"positive": "all", "negative": "all", "alpha": 2.0, "backend": backend}
        expected = T.beta_margin_loss(emb.to(emb_dtype), labels, 1.25, **options)
        assert expected.dtype is (torch.float64 if emb_dtype is torch.float64 else torch.float32)
        for shape in ((), (1,), (3,)):
            beta = torch.full(shape, 1.25, dtype=dtype, requires_grad=True)
            ids = torch.zeros_like(labels) if shape == (1,) else labels
            loss = T.beta_margin_loss(emb.to(emb_dtype), ids, beta, **options)
            assert loss.dtype is expected.dtype
            if shape != (1,):
                assert torch.equal(loss, expected)
            (gradient,) = torch.autograd.grad(loss, beta)
            assert (gradient.dtype, gradient.shape) == (dtype, shape)

    @pytest.mark.parametrize("number", [1, np.float32(1.0), np.int64(1), Fraction(1, 1)], ids=repr)
    def test_numbers(self, number, call, backend):
        assert torch.equal(call(number, backend=backend), call(1.0, backend=backend))

    @pytest.mark.parametrize("value", [nan, inf, -inf])
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_not_finite(self, value, reduction, emb, labels, backend):
        options = {**PLAIN_RULES, "reduction": reduction, "backend": backend}
        assert T.beta_margin_loss(emb, labels, value, **options).isnan().all()
        for beta in (torch.tensor(value), torch.tensor([1.0, value, 1.0])):
            beta.requires_grad_()
            loss = T.beta_margin_loss(emb, labels, beta, **options)
            assert loss.isnan().all()
            for gradient in torch.autograd.grad(loss.sum(), (emb, beta)):
                assert gradient.isnan().all()

    def test_start_of_the_module(self):
        for beta, text in FINITE:
            with refused(ValueError, f"beta={text}"):
                T.nn.BetaMarginLoss(beta=beta)
        for beta in ("1", None, True, torch.tensor(1.2)):
            with refused(TypeError, "beta must be a Python number"):
                T.nn.BetaMarginLoss(beta=beta)
        for classes in (0, -1):
            with refused(ValueError, f"classes={classes}"):
                T.nn.BetaMarginLoss(classes=classes)
        for classes in (1.0, "3", True):
            with refused(TypeError, "classes must be an int"):
                T.nn.BetaMarginLoss(classes=classes)


ONE_POSITIVE = ["hard", "easy", "random"]
ONE_NEGATIVE = ["hard", "semihard", "easy", "random", "distance"]
DISTANCES = ["euclidean", "sqeuclidean", "cosine"]
REDUCTIONS = ["mean", "mean_nonzero", "sum", "none"]
EVERYWHERE = {"reduction": REDUCTIONS, "backend": ["cpu", "triton", "reference"]}
TRIPLET_WORDS = {
    "distance": DISTANCES,
    "loss": ["margin", "soft_margin", "first_order", "second_order"],
    **EVERYWHERE,
}
PAIR_WORDS = {
    "positive": [*ONE_POSITIVE, "all"],
    "negative": [*ONE_NEGATIVE, "all"],
    "distance": DISTANCES,
    **EVERYWHERE,
}
WORDS: dict[str, dict[str, list[str]]] = {  # that each function lets its caller choose
    "triplet_loss": {"positive": ONE_POSITIVE, "negative": ONE_NEGATIVE, **TRIPLET_WORDS},
    "easy_positive_loss": {"negative": ONE_NEGATIVE, **TRIPLET_WORDS},
    "batch_hard_loss": TRIPLET_WORDS,
    "batch_all_loss": {"loss": ["margin", "soft_margin"], "distance": DISTANCES, **EVERYWHERE},
    "semi_hard_loss": {"distance": DISTANCES, **EVERYWHERE},
    "multi_similarity_loss": {"positive": ["all", "easy"], **EVERYWHERE},
    "contrastive_loss": PAIR_WORDS,
    "beta_margin_loss": PAIR_WORDS,
    "mine": {
        "positive": ONE_POSITIVE,
        "negative": ONE_NEGATIVE,
        "distance": DISTANCES,
        "backend": EVERYWHERE["backend"],
    },
}
WORDS.update({module: WORDS[function] for function, module in MODULES.items()})
every_word = pytest.mark.parametrize(
    ("function", "name", "words"),
    [
        pytest.param(FUNCTIONS[function], name, words, id=f"{function}-{name}")
        for function in WORDS
        for name, words in WORDS[function].items()
    ],
)


class TestWords:
    @every_word
    @pytest.mark.parametrize("word", ["hardest", "", "Hard", 3, ["hard"], True], ids=repr)
    def test_unknown(self, function, name, words, word, emb, labels):
        with refused(ValueError) as caught:
            function(emb, labels, **{name: word})
        assert str(caught.value) == f"{name}={word!r} is not one of {', '.join(map(repr, words))}"

    @every_word
    def test_known(self, function, name, words, emb, labels, backend):
        if name == "backend":
            return
        for word in words:
            rules = {"positive": "hard"} if word == "semihard" and function in PAIRS.values() else {}
            cosine = {"loss": "margin"} if name == "distance" and function in TRIPLET_LOSSES.values() else {}
            function(emb, labels, **{**rules, **cosine, name: word}, backend=backend)

    @every_triplet_loss
    @pytest.mark.parametrize("loss", ["first_order", "second_order"])
    @pytest.mark.parametrize("distance", ["euclidean", "sqeuclidean"])
    def test_similarity_losses_are_cosine(self, function, loss, distance, emb, labels, backend):
        with refused(ValueError, f"loss={loss!r}", f"distance={distance!r}", "cosine"):
            function(emb, labels, loss=loss, distance=distance, backend=backend)
        default = function(emb, labels, loss=loss, backend=backend)
        assert torch.equal(default, function(emb, labels, loss=loss, distance="cosine", backend=backend))

    def test_all_is_for_many_tuples(self, emb, labels):
        for name in ("positive", "negative"):
            for function in (T.triplet_loss, partial(T.mine, **PLAIN_RULES), as_function(T.nn.TripletLoss)):
                with refused(ValueError, f"{name}='all' is not one of"):
                    function(emb, labels, **{name: "all"})

    @every_pair_loss
    def test_semihard_needs_a_picked_positive(self, function, emb, labels, backend):
        with refused(ValueError, "negative='semihard'", "positive='all'"):
            function(emb, labels, positive="all", negative="semihard", backend=backend)
        function(emb, labels, positive="easy", negative="semihard", backend=backend)

    def test_rules_are_required_of_mine(self, emb, labels):
        with pytest.raises(TypeError, match="positive"):
            T.mine(emb, labels, negative="hard")  # type: ignore[call-arg]

    def test_beta_is_required(self, emb, labels):
        with pytest.raises(TypeError, match="beta"):
            T.beta_margin_loss(emb, labels)  # type: ignore[call-arg]

    def test_similarities_have_no_distance(self, emb, labels):
        with pytest.raises(TypeError, match="distance"):
            T.multi_similarity_loss(emb, labels, distance="cosine")  # type: ignore[call-arg]


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
    @pytest.mark.parametrize("negative", ["hard", "random", "distance"])
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
        T.contrastive_loss(emb, labels, generator=generator, backend=backend)
        assert torch.equal(generator.get_state(), state)
        expected = torch.Generator().manual_seed(5)
        for function, positive, negative in (
            (T.triplet_loss, "random", "random"),
            (T.triplet_loss, "hard", "distance"),
            (T.contrastive_loss, "random", "all"),
            (T.contrastive_loss, "all", "distance"),
            (partial(T.beta_margin_loss, beta=1.2), "random", "distance"),
        ):
            function(emb, labels, positive=positive, negative=negative, generator=generator, backend=backend)
            torch.randint(-(2**63), 2**63 - 1, (), generator=expected)
            assert torch.equal(generator.get_state(), expected.get_state())

    def test_global_generator(self, emb, labels, backend):
        state = torch.get_rng_state()
        T.batch_hard_loss(emb, labels, backend=backend)
        T.triplet_loss(emb, labels, positive="random", seed=3, backend=backend)
        T.beta_margin_loss(emb, labels, 1.2, seed=3, backend=backend)
        assert torch.equal(torch.get_rng_state(), state)
        for draw in (partial(T.triplet_loss, negative="distance"), partial(T.beta_margin_loss, beta=1.2)):
            state = torch.get_rng_state()
            draw(emb, labels, backend=backend)
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
    @pytest.mark.parametrize("reduction", REDUCTIONS)
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

    @every_pair_loss
    @pytest.mark.parametrize("classes", DEGENERATE.values(), ids=DEGENERATE.keys())
    def test_pairs_of_one_kind(self, function, classes, backend):
        """Pairs stand alone, but a batch of positive pairs only, or of negative pairs only, is worth 0."""
        emb = torch.arange(len(classes) * D, dtype=torch.float32).reshape(-1, D).sin().requires_grad_()
        labels = torch.tensor(classes, dtype=torch.int64)
        for positive, negative in (("all", "all"), ("random", "distance"), ("easy", "all"), ("all", "hard")):
            loss = function(emb, labels, positive=positive, negative=negative, seed=1, backend=backend)
            assert loss.item() == 0
            (gradient,) = torch.autograd.grad(loss, emb)
            assert not gradient.any()

    @pytest.mark.parametrize("classes", DEGENERATE.values(), ids=DEGENERATE.keys())
    def test_nothing_is_active(self, classes, backend):
        emb, labels = torch.ones(len(classes), D), torch.tensor(classes, dtype=torch.int64)
        for loss in ("margin", "soft_margin"):
            value, active = T.batch_all_loss(emb, labels, loss=loss, return_active=True, backend=backend)
            assert value.item() == 0
            assert active.item() == 0
            assert (active.dtype, active.shape) == (torch.int64, ())

    @pytest.mark.parametrize(
        ("function", "expected"),
        [
            (partial(T.batch_all_loss, margin=0.75), 0.75),
            (partial(T.batch_all_loss, loss="soft_margin"), log(2)),
            (partial(T.semi_hard_loss, margin=0.75), 0.75),
            (T.multi_similarity_loss, log(2) / 2 + log(5) / 50),
            (T.contrastive_loss, 1.0),
            (partial(T.contrastive_loss, negative="distance", seed=1), 1.0),
            (partial(T.beta_margin_loss, beta=1.25, alpha=0.5, seed=1), 1.75),
        ],
    )
    def test_tuples_of_rows_without_elements(self, function, expected, labels, backend):
        """Each of the six rows has one positive and four negatives, all at distance 0."""
        emb = torch.zeros(N, 0, requires_grad=True)
        loss = function(emb, labels, backend=backend)
        assert loss.item() == pytest.approx(expected, rel=1e-6)
        (gradient,) = torch.autograd.grad(loss, emb)
        assert gradient.shape == (N, 0)

    @every_triplet_loss
    def test_rows_without_elements(self, function, labels, backend):
        emb = torch.zeros(N, 0, requires_grad=True)
        options: dict[str, Any] = {"loss": "margin", "margin": 0.75, "backend": backend}
        for distance in DISTANCES:
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


class TestTransforms:
    @each({name: f for name, f in {**TRIPLET_DRAWING, **PAIRS, **MINE}.items() if not name.startswith("nn.")})
    @pytest.mark.parametrize(
        ("transform", "words"),
        [
            (lambda loss, x: torch.func.jvp(loss, (x,), (x,)), "forward-mode"),
            (lambda loss, x: torch.func.grad(loss)(x), "by torch.func"),
            (lambda loss, x: torch.vmap(loss)(x[None]), "torch.func.vmap"),
            (lambda loss, x: torch.jit.trace(loss, (x,)), "torch.jit.trace"),
        ],
        ids=["jvp", "grad", "vmap", "trace"],
    )
    @pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # jvp warns of torch.jit.script
    def test_refused_before_anything_is_drawn(self, function, transform, words, emb, labels):
        if T.backends()["cpu"] != "usable":
            pytest.skip("the plain torch of the reference has these derivatives")

        def loss(x: torch.Tensor) -> torch.Tensor:
            result = function(x, labels, negative="random", backend="cpu")
            return result.d_an.sum() if isinstance(result, tuple) else result

        with refused(RuntimeError, "supports autograd", "torch.compile", words):
            transform(loss, emb.detach())


class TestNothingLeftBehind:
    @pytest.mark.parametrize("name", LOSSES)
    def test_the_next_call_works(self, name, emb, labels, backend):
        function = LOSSES[name]
        before = function(emb, labels, backend=backend)
        (gradient,) = torch.autograd.grad(before, emb)
        for bad in (
            *({number: nan} for number in NUMBERS[name]),
            *({word: "l2"} for word in WORDS[name]),
            {"ref_emb": emb},
            {"ignore_label": 0.5},
        ):
            with refused(TypeError if "ignore_label" in bad else ValueError):
                function(emb, labels, **{"backend": backend, **bad})
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

    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
    def test_label_without_a_beta(self, emb, labels):
        if T.backends()["cpu"] != "usable":
            pytest.skip(f"backend cpu: {T.backends()['cpu']}")
        compiled = torch.compile(partial(T.beta_margin_loss, **PLAIN_RULES), fullgraph=True, backend="eager")
        assert compiled(emb, labels, torch.ones(3), backend="cpu").isfinite()
        for value in (3, -1, 2**62):
            labels[0] = value
            with pytest.raises((IndexError, RuntimeError)):
                compiled(emb, labels, torch.ones(3), backend="cpu")


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

    def test_rows_that_overlap_in_memory_are_promoted(self, emb, labels, ref, backend):
        window = emb.detach().flatten()[: len(emb) + emb.shape[1]].as_strided(emb.shape, (1, 1))
        more = {"ref_emb": ref["ref_emb"].double(), "ref_labels": ref["ref_labels"], "backend": backend}
        expected = T.batch_hard_loss(window.double().contiguous(), labels, **more)
        assert torch.equal(T.batch_hard_loss(window, labels, **more), expected)

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
        indices = triplets.indices()
        assert type(indices) is tuple
        expected = [part[:2].tolist() for part in triplets[:3]]
        assert [part.tolist() for part in indices] == expected
        assert triplets.d_ap.isnan().tolist() == [False, False, True, True, True]
