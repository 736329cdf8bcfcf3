"""The modules: the same numbers as the functions, options as attributes, and a typo fails at once."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tripletops as T

MODULES: list[tuple[type[torch.nn.Module], Callable[..., torch.Tensor]]] = [
    (T.nn.TripletLoss, T.triplet_loss),
    (T.nn.BatchHardLoss, T.batch_hard_loss),
    (T.nn.EasyPositiveLoss, T.easy_positive_loss),
]
every_module = pytest.mark.parametrize(("module", "function"), MODULES, ids=lambda value: value.__name__)
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
    assert given == expected


@every_module
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
    rows: dict[str, Any] = {
        "ref_emb": emb.detach().cos().requires_grad_(),
        "ref_labels": labels.flip(0),
        "self_index": torch.arange(12) - 1,
    }
    for arguments in ({}, rows):
        expected = function(emb, labels, backend="reference", **options, **arguments)
        given = module(backend="reference", **options)(emb, labels, **arguments)
        assert torch.equal(given, expected)
        inputs = [emb, *(tensor for tensor in arguments.values() if tensor.requires_grad)]
        for one, other in zip(
            torch.autograd.grad(given.sum(), inputs),
            torch.autograd.grad(expected.sum(), inputs),
            strict=True,
        ):
            assert torch.equal(one, other)


@pytest.mark.parametrize("module", [T.nn.TripletLoss, T.nn.EasyPositiveLoss])
def test_random_rules(module, emb, labels):
    criterion = module(negative="random", backend="reference", reduction="none")
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
        ("loss", "hinge", ValueError),
        ("distance", "l2", ValueError),
        ("reduction", "average", ValueError),
        ("ignore_label", 0.5, TypeError),
        ("backend", "gpu", ValueError),
    ],
)
def test_a_mistake_fails_at_construction(module, function, option, value, kind):
    with pytest.raises(kind, match=option):
        module(**{option: value})


def test_rules_are_checked_at_construction():
    with pytest.raises(ValueError, match=r"positive='eazy'.*'hard', 'easy', 'random'"):
        T.nn.TripletLoss(positive="eazy")
    with pytest.raises(ValueError, match=r"negative='semi'.*'semihard'"):
        T.nn.EasyPositiveLoss(negative="semi")
    with pytest.raises(ValueError, match="cosine"):
        T.nn.EasyPositiveLoss(distance="euclidean")


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


def test_repr():
    assert repr(T.nn.BatchHardLoss(margin=0.3, ignore_label=-1)) == (
        "BatchHardLoss(positive='hard', negative='hard', margin=0.3, loss='margin', temperature=1.0, "
        "ignore_label=-1, reduction='mean')"
    )
    assert "distance='cosine'" in repr(T.nn.EasyPositiveLoss(distance="cosine"))


@every_module
def test_copies(module, function, emb, labels):
    criterion = module(margin=0.7, reduction="sum", backend="reference")
    assert list(criterion.parameters()) == []
    assert criterion.state_dict() == {}
    for other in (copy.deepcopy(criterion), pickle.loads(pickle.dumps(criterion))):
        assert repr(other) == repr(criterion)
        assert torch.equal(other(emb, labels), criterion(emb, labels))
