"""The demo's trainings: a small convolutional network, from scratch, on half of scikit-learn's digits 0–5.

The settings were chosen once by `train_ref.demo.choice`, on seeds that the demo does not use.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

import tripletops as T
from train_ref import data, models
from tripletops.diagnostics import CollapseMonitor
from tripletops.evaluate import diameter, recall_at_k
from tripletops.samplers import PKSampler

CLASSES = 6  # the digits 0–5, all of them in every batch
STEPS = 80
UNDER = 0.2  # share of the first diameter, below which a network has collapsed
NEGATIVE_WORDS = {"hard": "hardest", "semihard": "semi-hard"}

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What one training differs in from another."""

    positive: str
    negative: str
    loss: str
    per_class: int
    dim: int
    normalise: bool
    learning_rate: float
    margin: float = 0.2

    def of(self, emb: Tensor, labels: Tensor) -> Tensor:
        if self.loss == "margin":
            return T.triplet_loss(
                emb, labels, positive=self.positive, negative=self.negative, margin=self.margin
            )
        return T.triplet_loss(emb, labels, positive=self.positive, negative=self.negative, loss=self.loss)

    def monitor(self) -> CollapseMonitor:
        margin = self.margin if self.loss == "margin" else None
        return CollapseMonitor(
            loss=self.loss, margin=margin, positive="easy" if self.positive == "easy" else "hard"
        )

    def _loss_words(self) -> str:
        words = f"{self.loss.replace('_', ' ')} loss"
        return f"{words} (α={self.margin:g})" if self.loss == "margin" else words

    def __str__(self) -> str:
        return (
            f"{self.positive} positives, {NEGATIVE_WORDS[self.negative]} negatives, "
            f"{self._loss_words()}, batches of {CLASSES * self.per_class}, "
            f"{self.dim} dimensions{', normalised' if self.normalise else ''}, Adam at {self.learning_rate:g}"
        )


COLLAPSING = Setting(
    positive="hard",
    negative="hard",
    loss="margin",
    margin=0.0,
    per_class=80,
    dim=2,
    normalise=True,
    learning_rate=0.001,
)
RECOMMENDED = Setting(
    positive="easy",
    negative="semihard",
    loss="second_order",
    per_class=8,
    dim=64,
    normalise=True,
    learning_rate=0.001,
)


class Images(NamedTuple):
    """Normalised images and their digits."""

    pixels: Tensor
    digits: Tensor


class Digits(NamedTuple):
    """What is trained on, other images of the same digits, and digits that training never sees."""

    train: Images
    held_out: Images
    unseen: Images


def load_digits() -> Digits:
    found = data.load("digits", 8)
    splits = (found.train, found.tests["train digits"], found.tests["test digits"])
    mean, std = found.mean[0], found.std[0]
    return Digits(*(Images((split.pixels / 255 - mean) / std, split.labels["digit"]) for split in splits))


def network(setting: Setting, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return models.build("convnet2", dim=setting.dim, normalise=setting.normalise, size=8, channels=1)


def batches(digits: Digits, setting: Setting, seed: int, steps: int) -> list[Tensor]:
    sampler = PKSampler(digits.train.digits, CLASSES, setting.per_class, batches=steps, seed=seed)
    return [torch.tensor(rows) for rows in sampler]


@dataclass(frozen=True, kw_only=True)
class Training:
    """What came of a training."""

    setting: Setting
    seed: int
    losses: list[float]
    diameters: list[float]  # of the training images' embeddings: before training, and after every step
    warning: str  # the monitor's words; empty, if it gave none
    warned_at: int | None  # the step
    before: Tensor  # the training images' embeddings
    after: Tensor
    held_out: float  # Recall@1 after training, 0 to 1
    unseen: float

    @property
    def share(self) -> float:
        """What is left of the first diameter."""
        return self.diameters[-1] / self.diameters[0]

    @property
    def lowest(self) -> float:
        """The smallest share of the first diameter on the way."""
        return min(self.diameters) / self.diameters[0]

    @property
    def collapsed(self) -> bool:
        return self.share < UNDER

    @property
    def under_at(self) -> int | None:
        """How many steps it took until the diameter was first under 20 %."""
        limit = UNDER * self.diameters[0]
        return next((step for step, each in enumerate(self.diameters) if each < limit), None)

    @property
    def warned_in_time(self) -> bool:
        """Whether the monitor warned while 20 % or more of the diameter was left."""
        return self.warned_at is not None and (self.under_at is None or self.warned_at < self.under_at)


def train(digits: Digits, setting: Setting, seed: int, steps: int) -> Training:
    model = network(setting, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=setting.learning_rate)
    monitor = setting.monitor()
    before = after = _embed(model, digits.train)
    losses, diameters, said = [], [diameter(before)], ""
    for rows in batches(digits, setting, seed, steps):
        emb, labels = model(digits.train.pixels[rows]), digits.train.digits[rows]
        loss = setting.of(emb, labels)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            monitor.update(emb, labels, loss)
        said = " ".join([said, *(str(each.message) for each in caught)]).strip()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after = _embed(model, digits.train)
        diameters.append(diameter(after))
    held_out, unseen = (recall_at_k(_embed(model, images), images.digits, 1)[1] for images in digits[1:])
    return Training(
        setting=setting,
        seed=seed,
        losses=losses,
        diameters=diameters,
        warning=said,
        warned_at=min(monitor.warned.values(), default=None),
        before=before,
        after=after,
        held_out=held_out,
        unseen=unseen,
    )


@torch.no_grad()
def _embed(model: nn.Module, images: Images) -> Tensor:
    emb: Tensor = model(images.pixels)
    return emb
