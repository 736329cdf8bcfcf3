"""The handwritten digits inside scikit-learn, divided as for even/odd training: 0–5 seen, 6–9 not."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SEEN = range(6)
HELD_OUT_SHARE = 0.5  # of the seen digits' images: recall is measured on images that were not trained on


class Images(NamedTuple):
    pixels: Tensor
    """(N, 1, 8, 8) float32 from 0 to 1."""
    digits: Tensor
    """(N,) int64: what recall is measured by, and what training never sees."""

    @property
    def parity(self) -> Tensor:
        """(N,) 0 for even digits, 1 for odd ones: the only labels that training sees."""
        return self.digits % 2

    def at(self, index: Tensor) -> Images:
        return Images(self.pixels[index], self.digits[index])


class Digits(NamedTuple):
    train: Images
    seen: Images
    unseen: Images


def load_digits() -> Digits:
    """1,797 images: half of those of 0–5 to train on, the other half to measure on, and all of 6–9."""
    from sklearn import datasets

    bunch = datasets.load_digits()
    pixels = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    images = Images(pixels, torch.tensor(bunch.target, dtype=torch.int64))
    # The file goes from writer to writer: a shuffle lets both halves have all of them.
    images = images.at(torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0)))
    seen = images.at(images.digits < SEEN.stop)
    unseen = images.at(images.digits >= SEEN.stop)
    held_out = int(HELD_OUT_SHARE * len(seen.digits))
    return Digits(
        train=Images(seen.pixels[held_out:], seen.digits[held_out:]),
        seen=Images(seen.pixels[:held_out], seen.digits[:held_out]),
        unseen=unseen,
    )


def balanced_batch(labels: Tensor, per_class: int, generator: torch.Generator) -> Tensor:
    """The positions of `per_class` rows of every class, drawn without replacement."""
    rows = [torch.nonzero(labels == label).flatten() for label in labels.unique()]
    return torch.cat([row[torch.randperm(len(row), generator=generator)[:per_class]] for row in rows])
