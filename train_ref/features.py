"""What goes into the network: batches of images, or of the outputs of its frozen blocks, which are computed
once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn

from train_ref.data import Dataset, Split
from train_ref.data.augment import as_floats, views
from train_ref.data.cache import Array, default_folder, kept
from train_ref.models import Network
from train_ref.settings import Settings

COMPUTED_AT_ONCE = 256


class Inputs:
    """A training's inputs. With a frozen stem they are its outputs for all views of the training images,
    (N, views, …), and a batch takes a random view of each. Without one they are images, cropped and flipped
    anew for every batch."""

    def __init__(
        self, dataset: Dataset, network: Network, settings: Settings, device: torch.device, cache: Path | None
    ):
        self.dataset, self.stem, self.pad, self.device = dataset, network.stem, settings.pad, device
        self.cache = cache or default_folder()
        self._features: dict[int, Tensor] = {}  # of whole splits, by the split's identity
        if self.stem is not None:
            self.train = self._stem_outputs(self.stem, dataset.train, settings.views)
            self._features[id(dataset.train)] = self.train

    def batch(self, index: Tensor, generator: torch.Generator) -> Tensor:
        """Inputs of the training images at `index`, each in one of its views."""
        if self.stem is not None:
            view = torch.randint(self.train.shape[1], index.shape, generator=generator)
            return self.train[index, view].to(self.device, memory_format=torch.channels_last)
        pixels = self.dataset.train.pixels[index]
        return self._floats(views(pixels, generator, self.pad) if self.pad else pixels)

    def plain(self, split: Split, size: int) -> Iterator[Tensor]:
        """Inputs of a whole split, its images neither cropped nor flipped."""
        if self.stem is None:
            for pixels in split.pixels.split(size):
                yield self._floats(pixels)
            return
        if id(split) not in self._features:
            self._features[id(split)] = self._stem_outputs(self.stem, split, 1)
        for part in self._features[id(split)].split(size):
            yield part[:, 0].to(self.device, memory_format=torch.channels_last)

    def through(self, network: Network, inputs: Tensor) -> Tensor:
        embeddings: Tensor = network(inputs) if self.stem is None else network.from_features(inputs)
        return embeddings

    def _floats(self, pixels: Tensor) -> Tensor:
        floats = as_floats(pixels.to(self.device), self.dataset.mean, self.dataset.std)
        return floats.contiguous(memory_format=torch.channels_last)

    @torch.no_grad()
    def _stem_outputs(self, stem: nn.Module, split: Split, count: int) -> Tensor:
        """(N, count, …) the stem's outputs for `count` views, the first being the image as it is; from a
        file, if they were computed before."""
        digest = hashlib.sha256(f"{len(split)} {split.pixels.shape} {count} {self.pad}".encode())
        digest.update(split.pixels[:: max(1, len(split) // 16)].numpy().tobytes())
        for tensor in stem.state_dict().values():
            digest.update(tensor.cpu().numpy().tobytes())
        file = self.cache / f"features-{self.dataset.name}-{digest.hexdigest()[:16]}.npy"
        stem.eval()
        shape = (len(split), count, *stem(self._floats(split.pixels[:1])).shape[1:])
        return kept(file, shape, numpy.float32, lambda out: self._fill(stem, split, out))

    def _fill(self, stem: nn.Module, split: Split, out: Array) -> None:
        generator = torch.Generator().manual_seed(0)
        for start in range(0, len(split), COMPUTED_AT_ONCE):
            pixels = split.pixels[start : start + COMPUTED_AT_ONCE]
            for view in range(out.shape[1]):
                seen = views(pixels, generator, self.pad) if view else pixels
                out[start : start + len(pixels), view] = stem(self._floats(seen)).cpu().numpy()
