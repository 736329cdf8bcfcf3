"""What is measured beside the loss is what its definition says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tripletops as T
from tests.train_ref.support import (
    cell,
    losses,
)
from train_ref import procedures
from train_ref.trainer import Context, Training
from tripletops.evaluate import diameter

pytest.importorskip("sklearn")
pytestmark = pytest.mark.usefixtures("training_alone")


def movement(**changes) -> procedures.Movement:
    asked = {"positive": "hard", "negative": "hard", "normalise": True, "dim": 8, "network": "convnet2"}
    return procedures.Movement(Training(cell(**asked | changes), Context()))


@pytest.mark.parametrize(("positive", "negative"), [("hard", "hard"), ("easy", "easy")])
def test_disjoint_triplets(positive, negative):
    procedure = movement(positive=positive, negative=negative)
    torch.manual_seed(0)
    emb, labels = nn.functional.normalize(torch.randn(40, 8)), torch.arange(4).repeat_interleave(10)
    found = procedure.disjoint_triplets(emb, labels)
    rows = found.flatten().tolist()
    assert len(found) > 3
    assert len(rows) == len(set(rows))
    mined = T.mine(emb, labels, positive=positive, negative=negative, distance="cosine")
    triplets = list(
        zip(*(part.tolist() for part in (mined.anchor, mined.positive, mined.negative)), strict=True)
    )
    assert {tuple(triplet) for triplet in found.tolist()} < set(triplets)
    # Not one more could be had: each of those left out shares a row with one before it.
    used: set[int] = set()
    for triplet in triplets:
        if list(triplet) in found.tolist():
            used |= set(triplet)
        else:
            assert used & set(triplet)


@pytest.mark.parametrize("order", ["first_order", "second_order"])
def test_movement_by_its_definition(order):
    procedure = movement(triplet=order)
    training = procedure.training
    index = torch.tensor(next(iter(training.sampler)))
    inputs = training.inputs.batch(index, training.crops)
    parameters = [each.detach().clone() for each in training.parameters]
    with torch.no_grad():
        before = training.embeddings(inputs)
    rows = procedure.disjoint_triplets(before, training.labels[index])
    moves = procedure.move(inputs, training.labels[index], torch.optim.SGD(training.parameters, lr=1e-2))
    with torch.no_grad():
        after = training.embeddings(inputs)
    for emb, columns in ((before, moves[:, :2]), (after, moves[:, :2] + moves[:, 2:])):
        anchor, positive, negative = (emb[rows[:, place]] for place in range(3))
        expected = torch.stack([(anchor * positive).sum(1), (anchor * negative).sum(1)], 1)
        torch.testing.assert_close(columns, expected)
    # The step is down the loss that tripletops has under this name, of these triplets alone.
    with torch.no_grad():
        for each, old in zip(training.parameters, parameters, strict=True):
            each.copy_(old)
    s_ap, s_an = procedure.similarities(training.embeddings(inputs), rows).unbind(1)
    exponent = s_an - s_ap if order == "first_order" else s_an**2 / 2 - s_ap + s_ap**2 / 2
    gradients = torch.autograd.grad(torch.log1p(exponent.exp()).mean(), training.parameters)
    assert any(gradient.abs().max() > 0 for gradient in gradients)
    moved = procedure.move(inputs, training.labels[index], torch.optim.SGD(training.parameters, lr=1e-2))
    torch.testing.assert_close(moved, moves)
    for each, old, gradient in zip(training.parameters, parameters, gradients, strict=True):
        torch.testing.assert_close(each.detach(), old - 1e-2 * gradient, rtol=1e-4, atol=1e-6)


def test_quarters_of_all_moves(monkeypatch):
    procedure = movement()
    moves = torch.tensor([[1, 1], [1, -1], [1, -1], [-1, -1], [-1, 1]]).float()
    monkeypatch.setattr(
        procedure, "move", lambda *_: torch.cat([torch.zeros(5, 2), moves.roll(0, dims=0)], dim=1)
    )
    assert procedure.after() == pytest.approx(
        {"top-right": 20, "bottom-right": 40, "bottom-left": 20, "top-left": 20}
    )
    assert procedure.training.kept["moves"].shape == (2 * 4 * 5, 4)


def test_movement_end_to_end():
    procedure = movement()
    before = [each.detach().clone() for each in procedure.training.parameters]
    assert procedure.before() == {}
    measures = procedure.after()
    assert sum(measures.values()) == pytest.approx(100)
    assert set(measures) == {"top-right", "bottom-right", "bottom-left", "top-left"}
    changes = [
        float((each - old).detach().abs().max())
        for each, old in zip(procedure.training.parameters, before, strict=True)
    ]
    assert 0 < max(changes) < 1e-3  # the learning rate is a low one


def test_the_parts_of_the_bound():
    asked = cell(positive="hard", negative="hard", margin=0.0, network="convnet2", dim=4)
    training = Training(asked, Context())
    procedure = procedures.Collapse(training)
    parameters = [each.detach().clone() for each in training.parameters]
    measures = procedure.before()
    assert all(map(torch.equal, parameters, training.parameters))  # nothing is trained yet
    held_out = training.embed(training.dataset.tests["train digits"])
    assert measures["diameter before"] == pytest.approx(float(torch.pdist(held_out).max()), rel=1e-5)
    found = []
    for epoch in range(13):  # four batches each, of which fifty count
        training.sampler.set_epoch(-1 - 4 * epoch)
        for index in training.sampler:
            emb = training.embeddings(training.inputs.batch(torch.tensor(index), training.crops)).detach()
            distance = torch.cdist(emb, emb)
            same = training.labels[index][:, None] == training.labels[index]
            farthest = distance.masked_fill(~same, 0).amax(1)
            nearest = distance.masked_fill(same, torch.inf).amin(1)
            found.append(float((farthest - nearest).clamp(min=0).mean()))
    assert measures["loss before"] == pytest.approx(sum(found[:50]) / 50, rel=1e-3)
    assert measures["largest loss before"] == pytest.approx(max(found[:50]), rel=1e-3)
    losses(training, 4)
    after = procedure.after()["diameter"]
    assert after == pytest.approx(diameter(training.embed(training.dataset.tests["train digits"])))
    assert after != measures["diameter before"]


def test_the_validation_set_is_bounded_and_fixed(monkeypatch):
    monkeypatch.setattr(procedures, "VALIDATION", 7)
    training = Training(cell(network="convnet2"), Context())
    sizes = []
    embed = training.embed
    monkeypatch.setattr(training, "embed", lambda split: (sizes.append(len(split)), embed(split))[1])
    procedure = procedures.Collapse(training)
    assert procedure.diameter() == procedure.diameter()
    assert sizes == [7, 7]


def test_diagrams_are_kept_of_every_image():
    training = Training(cell(diagrams=(0, 2), normalise=True, dim=8), Context())
    procedure = procedures.Train(training)
    procedure.before()
    emb, labels = training.embed(training.dataset.train), training.labels
    similarity = emb @ emb.T
    same = labels[:, None] == labels
    expected = torch.stack(
        [
            similarity.masked_fill(~same, -2).fill_diagonal_(-2).amax(1),
            similarity.masked_fill(same, -2).amax(1),
        ],
        dim=1,
    )
    torch.testing.assert_close(training.kept["diagram 0"], expected, atol=1e-5, rtol=0)
    for _ in range(2):
        losses(training, 4)
        procedure.after_epoch()
    assert set(training.kept) == {"diagram 0", "diagram 2"}
