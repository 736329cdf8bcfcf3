"""Bad input: every refusal by type and text, on every public function and module that can be given it.

A refusal names what was given and, for a word, the words that exist. It comes before any kernel runs, and it
leaves nothing behind.
"""

from __future__ import annotations

import itertools
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
from tests.support.arguments import (
    DEGENERATE,
    DRAWING,
    FUNCTIONS,
    LOSSES,
    NUMBERS,
    PAIRS,
    RECORDS,
    REFUSED,
    TRIPLET_LOSSES,
    WORDS,
    numbers_of,
    those,
)
from tripletops._words import (
    DISTANCE,
    FINITE,
    FUNCTION,
    LOSS,
    NEGATIVE,
    OBJECTIVE,
    POSITIVE,
    REDUCTION,
    Number,
)

N, D, M = 6, 4, 9
# By default the rules of beta_margin_loss are random, which would leave nothing to compare.
PLAIN_RULES = {"positive": "hard", "negative": "hard"}


def each(functions: dict[str, Callable[..., Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("function", [pytest.param(f, id=n) for n, f in functions.items()])


every_function = each(FUNCTIONS)
every_loss = each(LOSSES)
every_triplet_loss = each(TRIPLET_LOSSES)
every_drawing = each(DRAWING)
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


def is_same(one: Any, other: Any) -> bool:
    """Whether two results have the same bits: a loss each, or the triplets of `mine`."""
    pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
    return all(torch.equal(left.nan_to_num(-1), right.nan_to_num(-1)) for left, right in pairs)


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


every_number = pytest.mark.parametrize(
    ("public", "name"),
    [pytest.param(public, name, id=f"{public}-{name}") for public in NUMBERS for name in NUMBERS[public]],
)


def number_of(public: str, name: str) -> Number:
    (number,) = (number for number in numbers_of(RECORDS[public]) if number.name == name)
    return number


def words_with(public: str, number: Number) -> dict[str, Any]:
    """Options with which the number counts."""
    for choice in RECORDS[public].choices:
        for word in (choice.table[name] for name in choice.words if number in choice.table[name].numbers):
            one_positive = {"positive": "easy"} if "positive" in WORDS[public] else {}
            return {**one_positive, choice.name: word.name, **({"seed": 3} if word.draws else {})}
    return {}


def words_without(public: str, number: Number) -> dict[str, str]:
    """Options with which the number does not count."""
    return {
        choice.name: next(name for name in choice.words if number not in choice.table[name].numbers)
        for choice in RECORDS[public].choices
        if any(number in choice.table[name].numbers for name in choice.words)
    }


class TestNumbers:
    @every_number
    def test_value(self, public, name, emb, labels):
        for value, text in NUMBERS[public][name]:
            with refused(ValueError, f"{name}={text}"):
                FUNCTIONS[public](emb, labels, **{name: value})

    @every_number
    @pytest.mark.parametrize(
        "value",
        ["0.2", None, True, [0.2], 1j, torch.tensor(0.2), np.array(0.2)],
        ids=lambda value: type(value).__name__,
    )
    def test_not_a_number(self, public, name, value, emb, labels):
        if value is None and number_of(public, name).none is not None:
            return
        with refused(TypeError, f"{name} must be a Python number", type(value).__name__):
            FUNCTIONS[public](emb, labels, **{name: value})

    @every_number
    @pytest.mark.parametrize(
        "value", [1, 0.5, np.float32(0.5), np.float64(0.5), np.int64(1), Fraction(1, 2)], ids=repr
    )
    def test_numbers_that_are_fine(self, public, name, value, emb, labels, backend):
        options = {**words_with(public, number_of(public, name)), "backend": backend}
        given = FUNCTIONS[public](emb, labels, **{name: value}, **options)
        assert is_same(given, FUNCTIONS[public](emb, labels, **{name: float(value)}, **options))

    @pytest.mark.parametrize(
        ("public", "name"),
        [
            pytest.param(public, number.name, id=f"{public}-{number.name}")
            for public, record in RECORDS.items()
            for number in numbers_of(record)
            if number.range.holds(0.0)
        ],
    )
    def test_zero_is_fine(self, public, name, emb, labels, backend):
        options = {**words_with(public, number_of(public, name)), "backend": backend}
        first, *others = (
            FUNCTIONS[public](emb, labels, **{name: zero}, **options) for zero in (0, 0.0, -0.0)
        )
        assert isinstance(first, T.Triplets) or first.isfinite()
        assert all(is_same(first, other) for other in others)

    @every_number
    def test_a_number_counts_where_its_word_is_chosen(self, public, name, backend):
        labels = torch.arange(40) % 5  # classes that overlap a little
        emb = torch.eye(5)[labels] + 0.5 * torch.arange(200.0).square().sin().reshape(40, 5)
        number, function = number_of(public, name), FUNCTIONS[public]
        values = [number.default, 0.9, 1.1]
        options = {**words_with(public, number), "backend": backend}
        first, *others = (function(emb, labels, **{name: value}, **options) for value in values)
        assert not all(is_same(first, other) for other in others)
        if number not in RECORDS[public].numbers:
            options = {**words_without(public, number), "backend": backend}
            first, *others = (function(emb, labels, **{name: value}, **options) for value in values)
            assert all(is_same(first, other) for other in others)

    @every_drawing
    def test_no_limit(self, function, emb, labels, backend):
        options = {"negative": "distance", "seed": 3, "backend": backend}
        given = function(emb, labels, nonzero_loss_cutoff=None, **options)
        assert is_same(given, function(emb, labels, nonzero_loss_cutoff=inf, **options))

    def test_flags_are_bools(self, emb, labels):
        for name, function in those(lambda record: record.flag is not None).items():
            flag = RECORDS[name].flag.name
            with refused(TypeError, f"{flag} must be a bool", "'no'"):
                function(emb, labels, **{flag: "no"})


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
        for beta, text in REFUSED[FINITE]:
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


every_word = pytest.mark.parametrize(
    ("public", "name"),
    [pytest.param(public, name, id=f"{public}-{name}") for public in WORDS for name in WORDS[public]],
)
SIMILARITY_LOSSES = [word.name for word in LOSS.values() if word.cosine]
MEASURED_FROM_A_POSITIVE = [word.name for word in NEGATIVE.values() if word.needs_positive]
on_similarities = each(those(lambda record: OBJECTIVE[record.objective].cosine))


class TestWords:
    @every_word
    @pytest.mark.parametrize("word", ["hardest", "", "Hard", 3, ["hard"], True], ids=repr)
    def test_unknown(self, public, name, word, emb, labels):
        with refused(ValueError) as caught:
            FUNCTIONS[public](emb, labels, **{name: word})
        known = ", ".join(map(repr, WORDS[public][name]))
        assert str(caught.value) == f"{name}={word!r} is not one of {known}"

    @every_word
    def test_none(self, public, name, emb, labels):
        """Of the words, the distance alone may be left to the loss, and the backend to the device."""
        if name in ("distance", "backend"):
            given = FUNCTIONS[public](emb, labels, **{name: None})
            assert is_same(given, FUNCTIONS[public](emb, labels))
        else:
            with refused(ValueError, f"{name}=None is not one of "):
                FUNCTIONS[public](emb, labels, **{name: None})

    @every_word
    def test_known(self, public, name, emb, labels, backend):
        if name == "backend":
            return
        for word in WORDS[public][name]:
            options = {name: word}
            if word in MEASURED_FROM_A_POSITIVE and "positive" in WORDS[public]:
                options["positive"] = "hard"
            if name == "distance" and "loss" in WORDS[public]:
                options["loss"] = "margin"
            FUNCTIONS[public](emb, labels, **options, backend=backend)

    @every_triplet_loss
    @pytest.mark.parametrize("loss", SIMILARITY_LOSSES)
    @pytest.mark.parametrize("distance", [word for word in DISTANCE if word != "cosine"])
    def test_similarity_losses_are_cosine(self, function, loss, distance, emb, labels, backend):
        with refused(ValueError, f"loss={loss!r}", f"distance={distance!r}", "cosine"):
            function(emb, labels, loss=loss, distance=distance, backend=backend)
        default = function(emb, labels, loss=loss, backend=backend)
        assert torch.equal(default, function(emb, labels, loss=loss, distance="cosine", backend=backend))

    @pytest.mark.parametrize("name", ["positive", "negative"])
    def test_all_is_for_many_tuples(self, name, emb, labels):
        for public in ("triplet_loss", "nn.TripletLoss", "mine"):
            with refused(ValueError, f"{name}='all' is not one of"):
                FUNCTIONS[public](emb, labels, **{name: "all"})

    @every_pair_loss
    @pytest.mark.parametrize("negative", MEASURED_FROM_A_POSITIVE)
    def test_a_picked_positive_is_needed(self, function, negative, emb, labels, backend):
        ones = ", ".join(repr(word) for word in POSITIVE if word != "all")
        with refused(ValueError) as caught:
            function(emb, labels, positive="all", negative=negative, backend=backend)
        assert str(caught.value) == (
            f"negative={negative!r} is measured from one positive, and positive='all' picks none; "
            f"choose one of {ones}"
        )
        for positive in POSITIVE:
            if positive != "all":
                function(emb, labels, positive=positive, negative=negative, backend=backend)

    @pytest.mark.parametrize("public", DRAWING)
    @pytest.mark.parametrize("option", ["positive", "negative"])
    def test_softhard_goes_with_any_rule_of_the_other_kind(self, public, option, emb, labels, backend):
        """It looks at the extreme of the other kind, whichever the other rule picks, if it picks any."""
        other = "negative" if option == "positive" else "positive"
        if "softhard" not in WORDS[public].get(option, ()):
            return
        for word in WORDS[public].get(other, ()):
            options = {option: "softhard", other: word, "seed": 1, "backend": backend}
            first, second = (FUNCTIONS[public](emb, labels, **options) for _ in range(2))
            assert is_same(first, second)

    def test_rules_are_required_of_mine(self, emb, labels):
        negatives = ", ".join(map(repr, WORDS["mine"]["negative"]))
        with refused(TypeError, f"mine() needs negative=, one of {negatives}"):
            T.mine(emb, labels, positive="hard")
        with refused(TypeError, "mine() needs positive="):
            T.mine(emb, labels, negative="hard")

    def test_beta_is_required(self, emb, labels):
        with refused(TypeError, "beta_margin_loss() is missing the argument 'beta'"):
            T.beta_margin_loss(emb, labels)

    @on_similarities
    def test_similarities_have_no_distance(self, function, emb, labels):
        for distance in ("cosine", "euclidean", None):
            with refused(TypeError, "takes no distance: it is defined on the cosine similarity"):
                function(emb, labels, distance=distance)


class TestNames:
    """Arguments that do not exist, come twice, or come by position."""

    @pytest.mark.parametrize("public", FUNCTIONS)
    def test_unknown(self, public, emb, labels):
        module = public.startswith("nn.")
        called = public.removeprefix("nn.") if module else f"{public}()"
        with refused(TypeError) as caught:
            FUNCTIONS[public](emb, labels, marginn=0.2)
        text, _, listed = str(caught.value).partition("; its arguments are ")
        assert text == f"{called} got an unexpected keyword argument 'marginn'"
        names = listed.split(", ")
        assert {*WORDS[public], *NUMBERS[public], "ignore_label"} <= set(names)
        assert ("emb" in names) is ("ref_emb" in names) is not module

    @pytest.mark.parametrize("public", FUNCTION)
    def test_by_position(self, public, emb, labels):
        learned = OBJECTIVE[FUNCTION[public].objective].learned
        given = (emb, labels) if learned is None else (emb, labels, learned.start)
        with refused(TypeError) as caught:
            getattr(T, public)(*given, "hard")
        text, _, listed = str(caught.value).partition("; by keyword it takes ")
        assert text == f"{public}() takes {len(given)} arguments by position, got 'hard' as well"
        assert {*WORDS[public], *NUMBERS[public], "ignore_label", "ref_emb"} <= set(listed.split(", "))

    def test_a_seed_is_for_rules_that_draw(self, emb, labels):
        for name, function in FUNCTIONS.items():
            if not RECORDS[name].draws:
                with refused(TypeError, "got an unexpected keyword argument 'seed'"):
                    function(emb, labels, seed=1)

    def test_a_learned_number_given_twice(self, emb, labels):
        with refused(TypeError, "beta_margin_loss() got beta twice, by position and by keyword"):
            T.beta_margin_loss(emb, labels, 1.2, beta=1.2)


class TestMessages:
    """Whole messages, as somebody reads them who made the mistake."""

    @pytest.mark.parametrize(
        ("function", "options", "kind", "message"),
        [
            (T.triplet_loss, {"offset": nan}, ValueError, "offset=nan: must be a finite number"),
            (T.triplet_loss, {"offset": -inf}, ValueError, "offset=-inf: must be a finite number"),
            (T.triplet_loss, {"offset": -(10**400)}, ValueError, "offset=-inf: must be a finite number"),
            (
                T.triplet_loss,
                {"offset": torch.tensor(0.5)},
                TypeError,
                "offset must be a Python number, got tensor(0.5000) of torch.Tensor",
            ),
            (
                T.triplet_loss,
                {"offset": "0.1"},
                TypeError,
                "offset must be a Python number, got '0.1' of str",
            ),
            (
                T.triplet_loss,
                {"offset": True},
                TypeError,
                "offset must be a Python number, got True of bool",
            ),
            (
                T.batch_hard_loss,
                {"sct_weight": -1},
                ValueError,
                "sct_weight=-1.0: must be a finite number, 0 or greater",
            ),
            (
                T.batch_hard_loss,
                {"sct_weight": inf},
                ValueError,
                "sct_weight=inf: must be a finite number, 0 or greater",
            ),
            (
                T.batch_hard_loss,
                {"loss": "sct", "distance": "euclidean"},
                ValueError,
                "loss='sct' is defined on the cosine similarity, got distance='euclidean'",
            ),
            (
                T.supcon_loss,
                {"temperature": 0},
                ValueError,
                "temperature=0.0: must be a finite number greater than 0",
            ),
            (
                T.info_nce_loss,
                {"temperature": -0.5},
                ValueError,
                "temperature=-0.5: must be a finite number greater than 0",
            ),
            (
                T.info_nce_loss,
                {"positive": "hard"},
                ValueError,
                "positive='hard' is not one of 'all', 'easy'",
            ),
            (
                T.supcon_loss,
                {"distance": "cosine"},
                TypeError,
                "supcon_loss() takes no distance: it is defined on the cosine similarity",
            ),
            (
                T.supcon_loss,
                {"seed": 1},
                TypeError,
                "supcon_loss() got an unexpected keyword argument 'seed'; its arguments are emb, labels, "
                "temperature, reduction, ignore_label, backend, ref_emb, ref_labels, self_index",
            ),
            (
                T.contrastive_loss,
                {"nonzero_loss_cutoff": 0.0},
                ValueError,
                "nonzero_loss_cutoff=0.0: must be a number greater than 0, or None for no limit",
            ),
        ],
        ids=str,
    )
    def test_message(self, function, options, kind, message, emb, labels):
        with refused(kind) as caught:
            function(emb, labels, **options)
        assert str(caught.value) == message


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
        assert is_same(given, expected)

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

    @pytest.mark.parametrize("public", DRAWING)
    def test_one_draw_per_call_and_only_for_random_rules(self, public, emb, labels, backend):
        generator, expected = (torch.Generator().manual_seed(5) for _ in range(2))
        positives, negatives = WORDS[public].get("positive", ("easy",)), WORDS[public]["negative"]
        for positive, negative in itertools.product(positives, negatives):
            if positive == "all" and NEGATIVE[negative].needs_positive:
                continue
            rules = {"positive": positive, "negative": negative}
            rules = {option: word for option, word in rules.items() if option in WORDS[public]}
            FUNCTIONS[public](emb, labels, **rules, generator=generator, backend=backend)
            if POSITIVE[positive].draws or NEGATIVE[negative].draws:
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


class TestDegenerateBatches:
    """Nothing to learn from is no error: the loss is exactly 0 and connected to the graph."""

    @every_loss
    @pytest.mark.parametrize("classes", DEGENERATE.values(), ids=DEGENERATE.keys())
    @pytest.mark.parametrize("reduction", REDUCTION)
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
            (T.supcon_loss, log(5)),
            (T.info_nce_loss, log(5)),
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
        for distance in DISTANCE:
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
    @each({name: function for name, function in DRAWING.items() if not name.startswith("nn.")})
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
