"""The modules: the same numbers as the functions, options as attributes, and a typo fails at once."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import Any

import pytest
import torch

import tripletops as T
from tests.support.arguments import NUMBERS, WORDS
from tripletops._signatures import row_arguments
from tripletops._words import FUNCTION, NEGATIVE, OBJECTIVE, POSITIVE, Function

RECORD = {record.module: record for record in FUNCTION.values() if record.module}


def function_of(record: Function) -> Callable[..., Any]:
    """The public function; where the module learns a number, with the start that the module has."""
    learned = OBJECTIVE[record.objective].learned
    return partial(getattr(T, record.name), **({} if learned is None else {learned.name: learned.start}))


every_module = pytest.mark.parametrize(
    ("module", "function"),
    [pytest.param(getattr(T.nn, name), function_of(record), id=name) for name, record in RECORD.items()],
)
every_triplet_module = pytest.mark.parametrize(
    ("module", "function"),
    [
        pytest.param(getattr(T.nn, name), function_of(record), id=name)
        for name, record in RECORD.items()
        if record.objective == "triplet"
    ],
)


@pytest.fixture
def emb() -> torch.Tensor:
    return torch.arange(60, dtype=torch.float64).reshape(12, 5).sin().requires_grad_()


@pytest.fixture
def labels() -> torch.Tensor:
    return torch.arange(12) % 4


@every_module
def test_same_options_and_defaults_as_the_function(module, function):
    options = inspect.signature(function).parameters
    rows = {"emb", "labels", *(argument.name for argument in row_arguments(RECORD[module.__name__]))}
    expected = {name: p.default for name, p in options.items() if name not in rows}
    given = {name: p.default for name, p in inspect.signature(module).parameters.items()}
    if OBJECTIVE[RECORD[module.__name__].objective].learned is not None:
        assert given.pop("classes") is None
    assert given == expected


def check_same(
    module: torch.nn.Module, function: Callable[..., Any], emb: torch.Tensor, labels: torch.Tensor
) -> None:
    """The same loss and gradients, with and without rows of reference."""
    rows: dict[str, Any] = {
        "ref_emb": emb.detach().cos().requires_grad_(),
        "ref_labels": labels.flip(0),
        "self_index": torch.arange(12) - 1,
    }
    for arguments in ({}, rows):
        expected, given = function(emb, labels, **arguments), module(emb, labels, **arguments)
        assert torch.equal(given, expected)
        inputs = [emb, *(tensor for tensor in arguments.values() if tensor.requires_grad)]
        for one, other in zip(
            torch.autograd.grad(given.sum(), inputs),
            torch.autograd.grad(expected.sum(), inputs),
            strict=True,
        ):
            assert torch.equal(one, other)


@every_triplet_module
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"margin": 1.5, "loss": "margin"},
        {"loss": "soft_margin", "distance": "sqeuclidean", "reduction": "sum"},
        {"loss": "first_order", "temperature": 0.1, "reduction": "none"},
        {"loss": "second_order", "ignore_label": 2, "reduction": "mean_nonzero"},
        {"loss": "sct", "sct_weight": 0.5, "reduction": "sum"},
    ],
    ids=str,
)
def test_same_loss_and_gradient_as_the_function(module, function, options, emb, labels):
    options = {"backend": "reference", **options}
    check_same(module(**options), partial(function, **options), emb, labels)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("BatchAllLoss", {"margin": 1.5}),
        ("BatchAllLoss", {"loss": "soft_margin", "distance": "cosine"}),
        ("SemiHardLoss", {"margin": 1.5, "distance": "sqeuclidean"}),
        ("MultiSimilarityLoss", {"alpha": 1.0, "beta": 9.0, "base": 0.5}),
        ("MultiSimilarityLoss", {"epsilon": None, "positive": "easy"}),
        ("SupConLoss", {"temperature": 0.5}),
        ("InfoNCELoss", {"temperature": 0.5}),
        ("InfoNCELoss", {"positive": "easy"}),
        ("ContrastiveLoss", {"pos_margin": 0.3, "neg_margin": 1.7}),
        ("ContrastiveLoss", {"positive": "easy", "negative": "semihard"}),
        ("ContrastiveLoss", {"positive": "easy", "negative": "beyond", "offset": -0.25}),
        ("BetaMarginLoss", {"beta": 1.25, "positive": "hard", "negative": "all", "distance": "sqeuclidean"}),
    ],
)
def test_same_objective_as_the_function(name, options, emb, labels):
    for common in ({}, {"reduction": "none"}, {"ignore_label": 2, "reduction": "sum"}):
        given = {"backend": "reference", **common, **options}
        check_same(getattr(T.nn, name)(**given), partial(function_of(RECORD[name]), **given), emb, labels)


def test_return_active(emb, labels):
    criterion = T.nn.BatchAllLoss(return_active=True, backend="reference")
    loss, active = criterion(emb, labels)
    expected, count = T.batch_all_loss(emb, labels, return_active=True, backend="reference")
    assert torch.equal(loss, expected)
    assert torch.equal(active, count)
    assert (active.dtype, active.shape) == (torch.int64, ())
    criterion.return_active = False
    assert torch.equal(criterion(emb, labels), expected)


class TestBeta:
    @pytest.mark.parametrize("classes", [None, 4])
    def test_is_learned(self, classes, emb, labels):
        criterion = T.nn.BetaMarginLoss(beta=0.9, classes=classes, backend="reference")
        assert isinstance(criterion.beta, torch.nn.Parameter)
        assert [name for name, _ in criterion.named_parameters()] == ["beta"]
        start = torch.full(() if classes is None else (classes,), 0.9)
        assert torch.equal(criterion.beta, start)
        optimizer = torch.optim.SGD(criterion.parameters(), lr=0.1)
        loss = criterion(emb, labels, seed=3)
        beta = start.requires_grad_()
        expected = T.beta_margin_loss(emb, labels, beta, seed=3, backend="reference")
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()
        assert criterion.beta.grad is not None
        assert criterion.beta.grad.any()
        assert torch.equal(criterion.beta.grad, beta.grad)
        optimizer.step()
        assert not torch.equal(criterion.beta, beta)

    def test_is_kept(self, emb, labels):
        criterion = T.nn.BetaMarginLoss(classes=4, backend="reference")
        with torch.no_grad():
            criterion.beta.copy_(torch.tensor([0.5, 1.0, 1.5, 2.0]))
        other = T.nn.BetaMarginLoss(classes=4, backend="reference")
        other.load_state_dict(criterion.state_dict())
        assert torch.equal(other.beta, criterion.beta)
        assert torch.equal(other(emb, labels, seed=1), criterion(emb, labels, seed=1))

    def test_moves_with_the_module(self, emb, labels):
        criterion = T.nn.BetaMarginLoss(backend="reference").double()
        criterion(emb, labels).backward()
        assert criterion.beta.grad is not None
        assert criterion.beta.grad.dtype is torch.float64

    def test_given_twice(self):
        with pytest.raises(TypeError, match="BetaMarginLoss got beta twice, by position and by keyword"):
            T.nn.BetaMarginLoss(1.2, beta=1.2)
        with pytest.raises(TypeError, match="BetaMarginLoss got classes twice"):
            T.nn.BetaMarginLoss(1.2, 3, classes=3)

    def test_labels_are_classes(self, emb, labels):
        with pytest.raises(ValueError, match="labels holds 3"):
            T.nn.BetaMarginLoss(classes=3, backend="reference")(emb, labels)


@pytest.mark.parametrize("name", [name for name, record in RECORD.items() if record.draws])
@pytest.mark.parametrize("negative", [word.name for word in NEGATIVE.values() if word.draws])
def test_random_rules(name, negative, emb, labels):
    criterion = getattr(T.nn, name)(
        negative=negative, distance="cosine", backend="reference", reduction="none"
    )
    assert torch.equal(criterion(emb, labels, seed=3), criterion(emb, labels, seed=3))
    assert not torch.equal(criterion(emb, labels, seed=3), criterion(emb, labels, seed=4))
    drawn = [criterion(emb, labels, generator=torch.Generator().manual_seed(9)) for _ in range(2)]
    assert torch.equal(*drawn)


def test_rules_of_the_named_losses(emb, labels):
    hard = T.nn.TripletLoss(positive="hard", negative="hard", backend="reference")
    assert torch.equal(T.nn.BatchHardLoss(backend="reference")(emb, labels), hard(emb, labels))
    easy = T.nn.TripletLoss(positive="easy", negative="semihard", loss="second_order", backend="reference")
    given = T.nn.EasyPositiveLoss(negative="semihard", backend="reference")
    assert torch.equal(given(emb, labels), easy(emb, labels))


def mistakes(name: str) -> Iterator[tuple[str, Any, type[Exception]]]:
    """Every option of a module with a value that it must not have."""
    public, objective = f"nn.{name}", OBJECTIVE[RECORD[name].objective]
    for number, refusals in NUMBERS[public].items():
        yield number, refusals[-1][0], ValueError
        yield number, "0.5", TypeError
    yield from ((option, "eazy", ValueError) for option in WORDS[public])
    yield "ignore_label", 0.5, TypeError
    if (flag := RECORD[name].flag) is not None:
        yield flag.name, "yes", TypeError
    if objective.learned is not None:
        yield objective.learned.name, inf, ValueError
        yield "classes", 0, ValueError


@pytest.mark.parametrize(
    ("name", "option", "value", "kind"),
    [
        pytest.param(name, *mistake, id=f"{name}-{mistake[0]}-{mistake[2].__name__}")
        for name in RECORD
        for mistake in mistakes(name)
    ],
)
def test_a_mistake_fails_at_construction(name, option, value, kind):
    with pytest.raises(kind, match=option):
        getattr(T.nn, name)(**{option: value})


def test_every_option_has_a_mistake():
    for name in RECORD:
        tried = {option for option, _, _ in mistakes(name)}
        assert tried == set(inspect.signature(getattr(T.nn, name)).parameters)


@every_module
def test_options_do_not_go_to_the_call(module, function, emb, labels):
    option = next(iter(inspect.signature(module).parameters.values()))
    name = module.__name__
    words = f"A call of {name} got an unexpected keyword argument {option.name!r}; its arguments are emb, "
    with pytest.raises(TypeError, match=re.escape(words)):
        module()(emb, labels, **{option.name: option.default})


@pytest.mark.parametrize("name", [name for name, record in RECORD.items() if not record.draws])
def test_a_seed_is_for_rules_that_draw(name, emb, labels):
    with pytest.raises(TypeError, match=f"A call of {name} got an unexpected keyword argument 'seed'"):
        getattr(T.nn, name)()(emb, labels, seed=1)


@every_module
def test_options_are_asked_for_by_keyword(module, function):
    parameters = inspect.signature(module).parameters.values()
    options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    allowed = [p.default for p in parameters if p.kind is not p.KEYWORD_ONLY]
    name, option = module.__name__, "margin" if "margin" in options else options[0]
    words = f"{name} takes its options by keyword, as in {name}({option}=0.5), got 0.5; they are "
    for given in ((0.5,), (0.5, 1.5)):
        with pytest.raises(TypeError, match=re.escape(words + ", ".join(options)) + "$"):
            module(*allowed, *given)
    with pytest.raises(
        TypeError, match=re.escape(f"({option}={module().__dict__[option]!r}), got 'cosine'; ")
    ):
        module(*allowed, "cosine")
    module(*allowed)


def test_modules_of_others_take_what_they_like():
    class Mine(T.nn.BatchHardLoss):
        def __init__(self, margin: float) -> None:
            super().__init__(margin=margin)

    assert Mine(0.75).margin == 0.75


def test_rules_are_checked_at_construction():
    ones = ", ".join(repr(word) for word in POSITIVE if word != "all")
    with pytest.raises(ValueError, match=f"positive='eazy'.*{ones}$"):
        T.nn.TripletLoss(positive="eazy")
    with pytest.raises(ValueError, match=r"negative='semi'.*'semihard'"):
        T.nn.EasyPositiveLoss(negative="semi")
    with pytest.raises(ValueError, match="cosine"):
        T.nn.EasyPositiveLoss(distance="euclidean")
    with pytest.raises(ValueError, match="positive='all'"):
        T.nn.ContrastiveLoss(negative="semihard")


def test_a_backend_need_not_be_usable_at_construction(emb, labels):
    criterion = T.nn.BatchHardLoss(backend="triton")
    with pytest.raises(RuntimeError, match="triton"):
        criterion(emb, labels)


def test_attributes_may_change(emb, labels):
    criterion = T.nn.BatchHardLoss(margin=0.1, backend="reference")
    criterion.margin = 2.0
    assert torch.equal(
        criterion(emb, labels), T.batch_hard_loss(emb, labels, margin=2.0, backend="reference")
    )
    criterion.margin = -2.0
    with pytest.raises(ValueError, match=r"margin=-2\.0"):
        criterion(emb, labels)
    contrastive = T.nn.ContrastiveLoss(positive="easy", backend="reference")
    contrastive.negative = "semihard"
    contrastive(emb, labels)
    contrastive.positive = "all"
    with pytest.raises(ValueError, match="positive='all'"):
        contrastive(emb, labels)


def test_repr():
    assert repr(T.nn.BatchHardLoss(margin=0.3, ignore_label=-1)) == (
        "BatchHardLoss(loss='margin', margin=0.3, temperature=1.0, sct_weight=1.0, reduction='mean', "
        "ignore_label=-1)"
    )
    assert repr(T.nn.BatchAllLoss()) == (
        "BatchAllLoss(loss='margin', margin=0.2, reduction='mean', return_active=False)"
    )
    assert repr(T.nn.MultiSimilarityLoss(epsilon=None)) == (
        "MultiSimilarityLoss(alpha=2.0, beta=50.0, base=1.0, positive='all', reduction='mean')"
    )
    assert repr(T.nn.InfoNCELoss()) == "InfoNCELoss(temperature=0.07, positive='all', reduction='mean')"
    assert repr(T.nn.BetaMarginLoss(classes=7)).startswith("BetaMarginLoss(classes=7, alpha=0.2, ")
    assert repr(T.nn.BetaMarginLoss()).startswith("BetaMarginLoss(alpha=0.2, ")
    assert "distance='cosine'" in repr(T.nn.EasyPositiveLoss(distance="cosine"))


@every_module
def test_copies(module, function, emb, labels):
    criterion = module(reduction="sum", backend="reference")
    record = RECORD[module.__name__]
    seed = {"seed": 3} if record.draws else {}
    number = OBJECTIVE[record.objective].learned
    learned = {} if number is None else {number.name: getattr(criterion, number.name)}
    assert dict(criterion.named_parameters()) == learned
    assert dict(criterion.state_dict()) == learned
    for other in (copy.deepcopy(criterion), pickle.loads(pickle.dumps(criterion))):
        assert repr(other) == repr(criterion)
        assert torch.equal(other(emb, labels, **seed), criterion(emb, labels, **seed))
