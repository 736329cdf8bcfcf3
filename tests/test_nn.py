"""The modules: the same numbers as the functions, options as attributes, and a typo fails at once."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from functools import partial
from math import inf, nan
from typing import Any

import pytest
import torch

import tripletops as T

TRIPLET_MODULES: list[tuple[type[torch.nn.Module], Callable[..., torch.Tensor]]] = [
    (T.nn.TripletLoss, T.triplet_loss),
    (T.nn.BatchHardLoss, T.batch_hard_loss),
    (T.nn.EasyPositiveLoss, T.easy_positive_loss),
]
TUPLES_MODULES: list[tuple[type[torch.nn.Module], Callable[..., torch.Tensor]]] = [
    (T.nn.BatchAllLoss, T.batch_all_loss),
    (T.nn.SemiHardLoss, T.semi_hard_loss),
    (T.nn.MultiSimilarityLoss, T.multi_similarity_loss),
    (T.nn.ContrastiveLoss, T.contrastive_loss),
]
# The module has the beta that the function is given.
BETA_MARGIN = (T.nn.BetaMarginLoss, partial(T.beta_margin_loss, beta=1.2))
MODULES = [*TRIPLET_MODULES, *TUPLES_MODULES, BETA_MARGIN]


every_module = pytest.mark.parametrize(
    ("module", "function"), MODULES, ids=lambda value: getattr(value, "__name__", "beta_margin_loss")
)
every_triplet_module = pytest.mark.parametrize(
    ("module", "function"), TRIPLET_MODULES, ids=lambda value: value.__name__
)
ROWS = ("ref_emb", "ref_labels", "self_index", "generator", "seed")


@pytest.fixture
def emb() -> torch.Tensor:
    return torch.arange(60, dtype=torch.float64).reshape(12, 5).sin().requires_grad_()


@pytest.fixture
def labels() -> torch.Tensor:
    return torch.arange(12) % 4


@every_module
def test_same_options_and_defaults_as_the_function(module, function):
    options = inspect.signature(function).parameters
    expected = {name: p.default for name, p in options.items() if name not in ("emb", "labels", *ROWS)}
    given = {name: p.default for name, p in inspect.signature(module).parameters.items()}
    if module is T.nn.BetaMarginLoss:
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
    ],
    ids=str,
)
def test_same_loss_and_gradient_as_the_function(module, function, options, emb, labels):
    options = {"backend": "reference", **options}
    check_same(module(**options), partial(function, **options), emb, labels)


@pytest.mark.parametrize(
    ("module", "function", "options"),
    [
        (T.nn.BatchAllLoss, T.batch_all_loss, {"margin": 1.5}),
        (T.nn.BatchAllLoss, T.batch_all_loss, {"loss": "soft_margin", "distance": "cosine"}),
        (T.nn.SemiHardLoss, T.semi_hard_loss, {"margin": 1.5, "distance": "sqeuclidean"}),
        (T.nn.MultiSimilarityLoss, T.multi_similarity_loss, {"alpha": 1.0, "beta": 9.0, "base": 0.5}),
        (T.nn.MultiSimilarityLoss, T.multi_similarity_loss, {"epsilon": None, "positive": "easy"}),
        (T.nn.ContrastiveLoss, T.contrastive_loss, {"pos_margin": 0.3, "neg_margin": 1.7}),
        (T.nn.ContrastiveLoss, T.contrastive_loss, {"positive": "easy", "negative": "semihard"}),
        (*BETA_MARGIN, {"beta": 1.25, "positive": "hard", "negative": "all", "distance": "sqeuclidean"}),
    ],
)
def test_same_objective_as_the_function(module, function, options, emb, labels):
    for common in ({}, {"reduction": "none"}, {"ignore_label": 2, "reduction": "sum"}):
        given = {"backend": "reference", **common, **options}
        check_same(module(**given), partial(function, **given), emb, labels)


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

    def test_labels_are_classes(self, emb, labels):
        with pytest.raises(ValueError, match="labels holds 3"):
            T.nn.BetaMarginLoss(classes=3, backend="reference")(emb, labels)


@pytest.mark.parametrize(
    "module", [T.nn.TripletLoss, T.nn.EasyPositiveLoss, T.nn.ContrastiveLoss, T.nn.BetaMarginLoss]
)
@pytest.mark.parametrize("negative", ["random", "distance"])
def test_random_rules(module, negative, emb, labels):
    criterion = module(negative=negative, distance="cosine", backend="reference", reduction="none")
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


@every_module
@pytest.mark.parametrize(
    ("option", "value", "kind"),
    [
        ("margin", -0.5, ValueError),
        ("margin", "0.5", TypeError),
        ("temperature", 0.0, ValueError),
        ("cutoff", 0.0, ValueError),
        ("nonzero_loss_cutoff", 0.0, ValueError),
        ("alpha", -1.0, ValueError),
        ("beta", inf, ValueError),
        ("base", nan, ValueError),
        ("epsilon", -0.1, ValueError),
        ("pos_margin", -0.1, ValueError),
        ("neg_margin", nan, ValueError),
        ("classes", 0, ValueError),
        ("return_active", "yes", TypeError),
        ("positive", "eazy", ValueError),
        ("negative", "semi", ValueError),
        ("loss", "hinge", ValueError),
        ("distance", "l2", ValueError),
        ("reduction", "average", ValueError),
        ("ignore_label", 0.5, TypeError),
        ("backend", "gpu", ValueError),
    ],
)
def test_a_mistake_fails_at_construction(module, function, option, value, kind):
    if option not in inspect.signature(module).parameters:
        return
    with pytest.raises(kind, match=option):
        module(**{option: value})


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
    with pytest.raises(ValueError, match=r"positive='eazy'.*'hard', 'easy', 'random'"):
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
        "BatchHardLoss(positive='hard', negative='hard', cutoff=0.5, nonzero_loss_cutoff=1.4, margin=0.3, "
        "loss='margin', temperature=1.0, ignore_label=-1, reduction='mean')"
    )
    assert repr(T.nn.BatchAllLoss()) == (
        "BatchAllLoss(margin=0.2, loss='margin', reduction='mean', return_active=False)"
    )
    assert repr(T.nn.MultiSimilarityLoss(epsilon=None)) == (
        "MultiSimilarityLoss(alpha=2.0, beta=50.0, base=1.0, positive='all', reduction='mean')"
    )
    assert repr(T.nn.BetaMarginLoss(classes=7)).startswith("BetaMarginLoss(classes=7, alpha=0.2, ")
    assert repr(T.nn.BetaMarginLoss()).startswith("BetaMarginLoss(alpha=0.2, ")
    assert "distance='cosine'" in repr(T.nn.EasyPositiveLoss(distance="cosine"))


@every_module
def test_copies(module, function, emb, labels):
    criterion = module(reduction="sum", backend="reference")
    seed = {"seed": 3} if module is T.nn.BetaMarginLoss else {}
    learned = {"beta": criterion.beta} if module is T.nn.BetaMarginLoss else {}
    assert dict(criterion.named_parameters()) == learned
    assert dict(criterion.state_dict()) == learned
    for other in (copy.deepcopy(criterion), pickle.loads(pickle.dumps(criterion))):
        assert repr(other) == repr(criterion)
        assert torch.equal(other(emb, labels, **seed), criterion(emb, labels, **seed))
