"""The demo's training: the right images, recall as it is defined, and the same course on every backend."""

from __future__ import annotations

import pytest
import torch

import tripletops as T
from train_ref import demo, recall
from train_ref.data import balanced_batch, load_digits
from train_ref.models import even_odd_network
from train_ref.trainer import embed, train

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def digits():
    return load_digits()


def test_digits_are_divided_by_class_and_by_image(digits):
    assert sum(len(images.digits) for images in digits) == 1797
    assert digits.train.digits.unique().tolist() == [0, 1, 2, 3, 4, 5]
    assert digits.seen.digits.unique().tolist() == [0, 1, 2, 3, 4, 5]
    assert digits.unseen.digits.unique().tolist() == [6, 7, 8, 9]
    assert digits.train.pixels.shape[1:] == (1, 8, 8)
    assert digits.train.pixels.min() == 0
    assert digits.train.pixels.max() == 1
    assert digits.train.parity.equal(digits.train.digits % 2)
    trained_on = {image.numpy().tobytes() for image in digits.train.pixels}
    assert not any(image.numpy().tobytes() in trained_on for image in digits.seen.pixels)


def test_balanced_batch():
    labels = torch.tensor([7, -1, 7, 7, -1, -1, -1])
    batch = balanced_batch(labels, 3, torch.Generator().manual_seed(0))
    assert sorted(labels[batch].tolist()) == [-1, -1, -1, 7, 7, 7]
    assert len(set(batch.tolist())) == 6


@pytest.mark.parametrize("chunk", [1, 2, 3, 1024])
def test_recall_by_hand(monkeypatch, chunk):
    monkeypatch.setattr(recall, "CHUNK", chunk)
    # On a line, the nearest first:        others of 0.0: 1b 3a 7b;  of 1.0: 0a 3a 7b;
    # of 3.0: 1b 0a 7b;  of 7.0: 3a 1b 0a. Their own class comes 2nd, 3rd, 2nd, 2nd.
    emb, labels = torch.tensor([[0.0], [1.0], [3.0], [7.0]]), torch.tensor([0, 1, 0, 1])
    assert recall.recall_at([1, 2, 3, 10], emb, labels) == [0, 75, 100, 100]


def test_recall_leaves_out_the_query_and_not_its_duplicate():
    emb = torch.tensor([[1.0, 1.0], [1.0, 1.0], [9.0, 9.0]])
    assert recall.recall_at([1], emb, torch.tensor([0, 0, 1])) == [pytest.approx(200 / 3)]
    assert recall.recall_at([1], emb, torch.tensor([0, 1, 2])) == [0]


def course(digits, positive: str, backend: str | None, steps: int = 6) -> tuple[list[float], torch.Tensor]:
    """Losses and embeddings of a short training, in float64: in float32 Adam, which divides by the gradient's
    size, makes whole steps out of what rounding leaves of a zero."""
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(3)
    model, losses = even_odd_network().double(), []
    train(
        model,
        digits.train.pixels.double(),
        digits.train.parity,
        lambda emb, labels: T.triplet_loss(
            emb, labels, positive=positive, negative="random", generator=generator, backend=backend
        ),
        steps=steps,
        per_class=8,
        learning_rate=1e-3,
        generator=generator,
        after_step=losses.append,
    )
    return losses, embed(model, digits.unseen.pixels[:5].double())


@pytest.mark.parametrize("positive", demo.RULES)
def test_training_follows_the_reference(digits, positive):
    losses, embeddings = course(digits, positive, None)
    expected_losses, expected_embeddings = course(digits, positive, "reference")
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    torch.testing.assert_close(embeddings, expected_embeddings, rtol=1e-6, atol=1e-6)


def test_training_is_repeatable_and_learns(digits):
    losses, embeddings = course(digits, "easy", None, steps=20)
    again, embeddings_again = course(digits, "easy", None, steps=20)
    assert losses == again
    assert embeddings.equal(embeddings_again)
    assert sum(losses[-5:]) < sum(losses[:5])


def test_demo_end_to_end(monkeypatch, capsys, tmp_path, threads):
    arguments = ["--steps", "2", "--seeds", "2", "--no-speed-table", "--output", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["demo", *arguments])
    demo.main()
    printed = capsys.readouterr()
    table = [line.split() for line in printed.out.splitlines() if "±" in line and "R@" not in line]
    assert [line[0] for line in table[1:]] == ["random", "random", "easy", "easy"]
    assert "R@1" in printed.out
    assert "8/8" in printed.err  # the progress bar
    assert (tmp_path / "even_odd.png").stat().st_size > 10_000
