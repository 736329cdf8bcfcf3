"""The rules by which images are put into batches. An epoch's batches depend on (seed, epoch) alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from train_ref.settings import Settings
from tripletops.samplers import GroupSampler, PKSampler


class ShuffledBatches(Sampler[list[int]]):
    """Batches of one size through a shuffled data set, shuffled again where an epoch goes on beyond its end;
    no batch is sure to have two images of a class. Every one of `num_replicas` processes has its share of
    each batch."""

    def __init__(
        self, count: int, batch: int, *, steps: int | None, seed: int, num_replicas: int = 1, rank: int = 0
    ):
        if batch > count:
            raise ValueError(f"a batch of {batch} of a data set of {count} images")
        if batch % num_replicas:
            raise ValueError(f"a batch of {batch} can't be shared out among {num_replicas} processes")
        self.count, self.batch, self.seed, self.epoch = count, batch, seed, 0
        self.steps = steps or count // batch
        share = batch // num_replicas
        self.own = slice(rank * share, (rank + 1) * share)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        per_pass = self.count // self.batch
        for step in range(self.steps):
            if step % per_pass == 0:
                order = torch.randperm(self.count, generator=generator)
            start = step % per_pass * self.batch
            yield order[start : start + self.batch][self.own].tolist()


def batches(
    settings: Settings, labels: Tensor, seed: int, *, num_replicas: int, rank: int
) -> PKSampler | GroupSampler | ShuffledBatches:
    """The sampler that `settings.batches` names, with `settings.steps` batches per epoch if that is given."""
    batch, per_class = settings.batch, settings.per_class
    if settings.batches == "shuffled":
        return ShuffledBatches(
            len(labels), batch, steps=settings.steps, seed=seed, num_replicas=num_replicas, rank=rank
        )
    if batch % per_class:
        raise ValueError(f"a batch of {batch} can't have {per_class} images of every class in it")
    if settings.batches == "pk":
        return PKSampler(
            labels,
            batch // per_class,
            per_class,
            batches=settings.steps,
            seed=seed,
            num_replicas=num_replicas,
            rank=rank,
        )
    if settings.batches == "groups":
        if settings.steps is not None:
            raise ValueError(f"steps={settings.steps}: an epoch of groups is one pass over the images")
        return GroupSampler(
            labels, per_class, batch // per_class, seed=seed, num_replicas=num_replicas, rank=rank
        )
    raise ValueError(f"there are no batches {settings.batches!r}; there are 'pk', 'groups' and 'shuffled'")
