"""Objectives and steps are what their formulas say, and every backend follows the same course."""

from __future__ import annotations

import errno
import functools
import io
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import tqdm
from torch import nn

import tripletops as T
from tests.train_ref.support import (
    RUN,
    cell,
    command,
    losses,
)
from train_ref import features, runner, trainer
from train_ref.data import DataError
from train_ref.features import Inputs
from train_ref.objectives import OBJECTIVES
from train_ref.trainer import Context, Training

pytest.importorskip("sklearn")
pytestmark = pytest.mark.usefixtures("training_alone")


# Backends ---------------------------------------------------------------------------------------------------


COURSES = {
    "random": {"positive": "random", "negative": "random"},
    "easy": {"positive": "easy", "negative": "semihard"},
    "hard": {"positive": "hard", "negative": "hard", "triplet": "soft_margin"},
    "first order": {"positive": "easy", "negative": "hard", "triplet": "first_order", "normalise": True},
    "second order": {"positive": "hard", "negative": "easy", "triplet": "second_order", "normalise": True},
    "trimmed": {"positive": "random", "negative": "random", "trim": 0.25},
    "semi_hard": {"objective": "semi_hard", "normalise": True},
    "margin": {"objective": "beta_margin", "positive": "random", "negative": "distance", "normalise": True},
    "easy margin": {
        "objective": "beta_margin",
        "positive": "easy",
        "negative": "distance",
        "normalise": True,
    },
    "trimmed margin": {
        "objective": "beta_margin",
        "positive": "random",
        "negative": "distance",
        "trim": 0.5,
        "normalise": True,
    },
    "multi_similarity": {"objective": "multi_similarity", "positive": "all", "normalise": True},
    "easy multi_similarity": {"objective": "multi_similarity", "positive": "easy", "normalise": True},
    "proxy_nca": {"objective": "proxy_nca", "normalise": True},
}


@pytest.mark.parametrize("course", COURSES)
def test_backends_follow_the_same_course(course):
    """Step by step, in plain descent: Adam makes whole steps out of what rounding leaves of a zero."""
    asked = cell(**COURSES[course], dim=16, steps=20, optimizer="sgd", learning_rate=2e-3)
    expected = losses(Training(asked, Context(backend="reference")), 20)
    found = losses(Training(asked, Context(backend="cpu")), 20)
    assert found == pytest.approx(expected, rel=1e-4)
    assert len(set(expected)) > 10


def test_every_objective_has_a_course():
    assert {changes.get("objective", "triplet") for changes in COURSES.values()} == set(OBJECTIVES)


def test_the_backend_is_the_one_asked_for(monkeypatch):
    asked = []
    triplet_loss = T.triplet_loss
    monkeypatch.setattr(
        T, "triplet_loss", lambda *rows, **how: (asked.append(how["backend"]), triplet_loss(*rows, **how))[1]
    )
    losses(Training(cell(), Context(backend="reference")), 1)
    assert asked[0] == "reference"


# The progress bar -------------------------------------------------------------------------------------------


def test_the_bar_has_what_a_reader_waits_for(tmp_path, monkeypatch):
    shown = io.StringIO()
    bar = functools.partial(tqdm.tqdm, file=shown)
    monkeypatch.setattr(runner, "tqdm", lambda **how: bar(**{**how, "disable": False, "mininterval": 0}))
    command(*RUN, "--out", tmp_path)
    lines = shown.getvalue().split("\r")
    last = next(line for line in reversed(lines) if "loss" in line)
    assert re.search(r"EPS \+ Triplet #0 loss \d+\.\d+ active \d+% diameter \d", last)
    assert "16/16" in lines[-1]
    assert re.search(r"\[\d\d:\d\d<", last)  # the time that is left


# Objectives and the step ------------------------------------------------------------------------------------


def objective(classes: int = 3, backend: str = "reference", **changes) -> nn.Module:
    settings = cell(**changes).settings
    return OBJECTIVES[settings.objective](settings, classes, backend, torch.Generator().manual_seed(0))


def test_proxy_nca_by_its_formula():
    """−log of exp(−d²(x, own)) / Σ over the other proxies of exp(−d²(x, other)), all on the sphere."""
    torch.manual_seed(0)
    loss = objective(objective="proxy_nca", dim=4)
    emb, labels = torch.randn(5, 4), torch.tensor([0, 2, 1, 1, 2])
    x, proxies = nn.functional.normalize(emb), nn.functional.normalize(loss.proxies.detach())
    expected = 0.0
    for row, label in zip(x, labels.tolist(), strict=True):
        square = [float((row - proxy).square().sum()) for proxy in proxies]
        others = sum(math.exp(-square[other]) for other in range(3) if other != label)
        expected -= math.log(math.exp(-square[label]) / others) / 5
    assert loss(emb, labels).item() == pytest.approx(expected, rel=1e-5)


def test_proxy_nca_where_the_answer_is_seen():
    loss = objective(classes=2, objective="proxy_nca", dim=2)
    with torch.no_grad():
        loss.proxies.copy_(torch.tensor([[3.0, 0.0], [0.0, 0.5]]))
    # d² to the own proxy is 0, to the other, at a right angle, 2: −log(1 / exp(−2)) = −2.
    assert loss(torch.tensor([[7.0, 0.0]]), torch.tensor([0])).item() == pytest.approx(-2)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_trimming_leaves_out_the_highest(backend):
    # On a line: 0 and 1 of one class, 3 and 5 of another. Hard picks have d_ap − d_an of 1 − 3, 1 − 2, 2 − 2
    # and 2 − 4: with the margin 3 the losses are 1, 2, 3, 1.
    emb, labels = torch.tensor([[0.0], [1.0], [3.0], [5.0]]), torch.tensor([0, 0, 1, 1])
    rules = {"positive": "hard", "negative": "hard", "margin": 3.0, "backend": backend}
    assert objective(**rules)(emb, labels).item() == 7 / 4
    assert objective(trim=0.25, **rules)(emb, labels).item() == pytest.approx(4 / 3)
    assert objective(trim=0.99, **rules)(emb, labels).item() == 1  # one is always left
    rows = emb.clone().requires_grad_()
    trimmed = objective(trim=0.5, **rules)(rows, labels)
    trimmed.backward()
    # The anchors 0 and 5 are left: the mean of (x₁ − x₀) − (x₃ − x₀) and (x₅ − x₃) − (x₅ − x₁), and 3.
    assert trimmed.item() == 1
    assert rows.grad is not None
    assert rows.grad.flatten().tolist() == pytest.approx([0, 1, -1, 0], abs=1e-6)


def test_beta_is_learned_at_its_own_rate():
    training = Training(
        cell(
            network="even_odd_relu",  # a batch in which no class's pairs cancel out in the gradient of its β
            objective="beta_margin",
            positive="random",
            negative="distance",
            normalise=True,
            optimizer="sgd",
            momentum=0.0,
            objective_learning_rate=0.125,
        ),
        Context(),
    )
    beta = training.objective.beta
    assert beta.tolist() == pytest.approx([1.2, 1.2])
    network = [each.detach().clone() for each in training.parameters]
    training.step(torch.tensor(next(iter(training.sampler))))
    assert beta.grad is not None
    assert beta.grad.abs().min() > 0
    torch.testing.assert_close(beta.detach(), 1.2 - 0.125 * beta.grad)
    for before, each in zip(network, training.parameters, strict=True):
        assert each.grad is not None
        torch.testing.assert_close(each.detach(), before - 1e-3 * each.grad)


def test_milestones_divide_the_rates_by_ten():
    training = Training(cell(objective="proxy_nca", steps=1, milestones=(1, 3)), Context())
    rates = []
    for _ in range(4):
        losses(training, 1)
        rates.append([group["lr"] for group in training.optimizer.param_groups])
    expected = [[1e-3 * share, 5e-4 * share] for share in (1, 0.1, 0.1, 0.01)]
    assert rates == [pytest.approx(pair) for pair in expected]


def test_clipping_bounds_the_step():
    settings = {"optimizer": "sgd", "learning_rate": 1.0, "momentum": 0.0}
    moved = {}
    for clip in (None, 1e-3):
        training = Training(cell(clip=clip, **settings), Context())
        before = torch.cat([each.detach().flatten().clone() for each in training.parameters])
        training.step(torch.tensor(next(iter(training.sampler))))
        after = torch.cat([each.detach().flatten() for each in training.parameters])
        moved[clip] = float((after - before).norm())
    assert moved[None] > 1e-2
    assert moved[1e-3] == pytest.approx(1e-3, rel=1e-2)


def test_half_precision_trains(monkeypatch):
    training = Training(cell(precision="bfloat16", steps=20, network="convnet2"), Context())
    seen = []
    training.network.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    found = losses(training, 20)
    assert seen[0] == torch.bfloat16
    assert all(map(math.isfinite, found))
    assert found != losses(Training(cell(steps=20, network="convnet2"), Context()), 20)
    assert training.parameters[0].dtype == torch.float32
    assert training.embed(training.dataset.tests["train digits"]).dtype == torch.float32


def test_training_learns_and_is_repeatable():
    asked = cell(positive="easy", steps=25)
    training = Training(asked, Context())
    found = losses(training, 25)
    assert sum(found[-5:]) < sum(found[:5])
    assert found == losses(Training(asked, Context()), 25)
    assert found != losses(Training(cell(1, positive="easy", steps=25), Context()), 25)


def test_dropout_goes_on_where_it_was():
    """A training that is taken up again drops what it would have dropped, in whatever state chance is."""

    def begun() -> Training:
        training = Training(cell(), Context())
        training.network.register_forward_hook(
            lambda network, _, emb: torch.dropout(emb, 0.5, train=network.training)
        )
        return training

    whole, first, second = begun(), begun(), begun()
    expected = losses(whole, 8)
    assert losses(first, 4) == expected[:4]
    assert losses(Training(cell(), Context()), 4) != expected[:4]  # it does drop something
    torch.rand(3)
    second.load_state(first.state())
    assert losses(second, 4) == expected[4:]


def test_the_active_share_counts_moved_embeddings():
    # The pairs of the first two classes are far from all others, and stay; within the third's is another.
    training = Training(cell(positive="hard", negative="hard"), Context())
    emb = torch.tensor([[0.0, 0], [0.1, 0], [9, 0], [9.1, 0], [50, 0], [51, 0], [50.3, 0.4]])
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    training.embeddings = lambda inputs: emb.clone().requires_grad_() * 1  # type: ignore[method-assign]
    training.inputs.batch = lambda *_: emb  # type: ignore[method-assign]
    training.labels = labels
    training.optimizer.step = lambda: None  # type: ignore[method-assign,assignment]
    step = training.step(torch.arange(7))
    assert step.active == pytest.approx(3 / 7)
    assert step.loss_seconds <= step.seconds


def test_nan_is_said_at_once(monkeypatch):
    training = Training(cell(), Context())
    training.objective.forward = lambda emb, labels: emb.sum() * torch.nan  # type: ignore[method-assign]
    with pytest.raises(ArithmeticError, match=r"row #0: the loss is NaN in epoch 1"):
        losses(training, 1)


def test_a_data_set_is_opened_once_for_all_trainings(monkeypatch):
    opened = []
    load = trainer.data.load
    monkeypatch.setattr(trainer.data, "load", lambda *asked: opened.append(asked) or load(*asked))
    context = Context()
    first, second = Training(cell(0), context), Training(cell(1), context)
    assert first.dataset is second.dataset
    assert [asked[:2] for asked in opened] == [("digits", 8)]


# Frozen blocks ----------------------------------------------------------------------------------------------


def inputs_through(stem: nn.Module, folder: Path, **changes) -> Inputs:
    asked = cell(**{"views": 3, "pad": 1} | changes)
    dataset = Context().dataset(asked.settings)
    return Inputs(dataset, SimpleNamespace(stem=stem), asked.settings, torch.device("cpu"), folder)


def test_frozen_blocks_are_computed_once(tmp_path, monkeypatch):
    monkeypatch.setattr(features, "COMPUTED_AT_ONCE", 100)
    torch.manual_seed(0)
    stem = nn.Conv2d(1, 2, 3)
    made = inputs_through(stem, tmp_path)
    split = made.dataset.train
    assert made.train.shape == (len(split), 3, 2, 6, 6)
    with torch.no_grad():
        images = made._floats(split.pixels)
        torch.testing.assert_close(made.train[:, 0], stem(images))
    assert not made.train[:, 1].equal(made.train[:, 2])
    index = torch.tensor([5, 0, 5])
    batch = made.batch(index, torch.Generator().manual_seed(0))
    for row, image in zip(batch, index, strict=True):
        assert any(row.equal(view) for view in made.train[image])
    plain = torch.cat(list(made.plain(split, 64)))
    assert plain.equal(made.train[:, 0])
    written = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.npy")}
    assert inputs_through(stem, tmp_path).train.equal(made.train)
    assert {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.npy")} == written
    with torch.no_grad():
        stem.weight += 1
    assert not inputs_through(stem, tmp_path).train.equal(made.train)  # other weights, other features


def test_no_room_for_features_is_said_before_they_are_computed(tmp_path, monkeypatch):
    def full(descriptor, start, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(Inputs, "_fill", lambda *_: pytest.fail("computing began"))
    with pytest.raises(DataError, match=r"features-digits-.* takes \d MB.*No space left.*XDG_CACHE_HOME"):
        inputs_through(nn.Conv2d(1, 2, 3), tmp_path)
    assert not list(tmp_path.glob("*.npy"))
