"""Which rows make a batch: samplers for `torch.utils.data.DataLoader(dataset, batch_sampler=...)`.

A batch-mining loss needs several rows of a class in one batch, and of several classes. Both samplers yield
the rows' numbers, one list a batch, the rows of a class side by side. The batches of an epoch depend on the
labels, the options, `seed` and the epoch alone: not on torch's global random state, nor on the process.

Every iteration is an epoch of its own: the first one 0 and each the next one, unless `set_epoch` says which.
`state_dict` holds the place in an epoch, so that a run can go on where it was interrupted.
"""

from __future__ import annotations

import hashlib
import numbers
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils.data import Sampler

# Batches of a PKSampler that are drawn together: enough to forget the calls' cost, few enough to stay small.
_BLOCK = 64


@dataclass
class _Place:
    """A place in the sequence of all batches: an epoch, and how many of its batches come before."""

    epoch: int
    batch: int


class _BalancedSampler(Sampler[list[int]]):
    """Batches of as many rows of each of `classes` different classes, and this process's share of them."""

    def __init__(
        self,
        labels: Tensor | Sequence[int],
        classes: int,
        rows: int,
        *,
        names: tuple[str, str],
        seed: int,
        num_replicas: int,
        rank: int,
    ) -> None:
        labels = torch.as_tensor(labels).cpu()
        if labels.ndim != 1 or not len(labels) or labels.is_floating_point() or labels.is_complex():
            raise ValueError(
                f"labels must be a vector of integers, not empty, got {labels.dtype} {tuple(labels.shape)}"
            )
        classes, rows = (_at_least_one(*named) for named in zip(names, (classes, rows), strict=True))
        num_replicas, rank = _at_least_one("num_replicas", num_replicas), _integer("rank", rank)
        if classes % num_replicas:
            raise ValueError(
                f"{names[0]} ({classes}) must be divisible by num_replicas ({num_replicas}): "
                "every process gets whole classes"
            )
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank must be from 0 to {num_replicas - 1}, got {rank}")
        self._labels = labels.unique(return_inverse=True)[1]
        self._sizes = self._labels.bincount()
        if classes > len(self._sizes):
            raise ValueError(
                f"{names[0]} ({classes}) must not exceed the number of classes ({len(self._sizes)})"
            )
        self._classes, self._rows = classes, rows
        self._seed = _integer("seed", seed)
        self._num_replicas, self._rank = num_replicas, rank
        self._next = _Place(epoch=0, batch=0)  # where the next iteration begins
        self._current: _Place | None = None  # where the last one is, if it is not over

    @property
    def sampler(self) -> _BalancedSampler:
        """Itself: as torch's batch sampler has a `sampler`, trainers look there for a `set_epoch` to call."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that is iterated over next. After it comes the next one, unless one is set again.

        An epoch that `load_state_dict` left at some batch goes on there.
        """
        epoch = _integer("epoch", epoch)
        if epoch != self._next.epoch:
            self._next = _Place(epoch, batch=0)
        # A loader with workers may have begun the epoch before a trainer says which it is.
        if self._current is not None and self._current.epoch != epoch:
            self._current = None

    def state_dict(self) -> dict[str, int]:
        """The epoch, and the number of its batches that were yielded.

        It is that of the iteration under way; if there is none, that of the next one. A plain DataLoader with
        workers asks for batches ahead of time, and is therefore ahead of what a training has seen.
        """
        place = self._current or self._next
        return {"epoch": place.epoch, "batch": place.batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin where `state_dict` was."""
        self._next = _Place(_integer("epoch", state["epoch"]), _integer("batch", state["batch"]))
        self._current = None

    def __iter__(self) -> Iterator[list[int]]:
        # This runs only when a first batch is asked for: an iterator that nobody uses is no epoch.
        current = self._current = self._next
        self._next = _Place(current.epoch + 1, batch=0)
        # The digest keeps epoch 1 of seed 0 apart from epoch 0 of seed 1; of a seed, torch uses 32 bits.
        digest = hashlib.blake2b(f"{self._seed} {current.epoch}".encode(), digest_size=4).digest()
        generator = Generator().manual_seed(int.from_bytes(digest, "little"))
        share = self._classes // self._num_replicas * self._rows
        try:
            for batch in islice(self._batches(generator), current.batch, None):
                current.batch += 1
                yield batch[self._rank * share : (self._rank + 1) * share].tolist()
        finally:  # also if the rest of the epoch is not wanted
            if self._current is current:
                self._current = None

    @abstractmethod
    def _batches(self, generator: Generator) -> Iterator[Tensor]:
        """The whole batches of an epoch, each a vector of row numbers, class by class."""


class PKSampler(_BalancedSampler):
    """P classes a batch, K rows of each.

    Every batch is drawn anew: P different classes, each equally likely whatever its size, and K different
    rows of each; only of a class that has fewer than K are they drawn with replacement. An epoch is `batches`
    batches, by default N // (P·K), at least one, so that it draws about as many rows as there are. It is no
    pass over the data: a row may come more than once in it, or not at all.

    Args:
        labels: the class of every row: (N,) integers, any values.
        p: classes in a batch.
        k: rows of each class in a batch.
        batches: batches in an epoch.
        seed: with the epoch it decides every batch.
        num_replicas: processes that share each batch; it must divide `p`.
        rank: which of them this is. Rank r yields the r-th share of every batch, whole classes; the ranks'
            shares one after the other are the batch that one process alone would get.
    """

    def __init__(
        self,
        labels: Tensor | Sequence[int],
        p: int,
        k: int,
        *,
        batches: int | None = None,
        seed: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        super().__init__(labels, p, k, names=("p", "k"), seed=seed, num_replicas=num_replicas, rank=rank)
        if batches is None:
            batches = max(1, len(self._labels) // (self._classes * self._rows))
        self._count = _at_least_one("batches", batches)
        self._order = self._labels.argsort()
        self._starts = self._sizes.cumsum(0) - self._sizes

    def __len__(self) -> int:
        return self._count

    def _batches(self, generator: Generator) -> Iterator[Tensor]:
        for first in range(0, self._count, _BLOCK):
            batches = min(_BLOCK, self._count - first)
            classes = _draw(self._sizes.new_full((batches,), len(self._sizes)), self._classes, generator)
            places = _draw(self._sizes[classes.flatten()], self._rows, generator)
            rows = self._order[self._starts[classes.flatten()].unsqueeze(1) + places]
            yield from rows.view(batches, -1)


class GroupSampler(_BalancedSampler):
    """Groups of n rows of a class, no row in two of them; `classes` groups of different classes a batch.

    In every epoch each class is shuffled and cut into groups of n, and the groups are dealt to batches at
    random, classes with more groups left being more likely. An epoch is as many batches as the groups can
    fill, and no row comes twice in it. Rows that don't fill a group, and groups that find no batch, sit it
    out; in the next epoch they are others.

    Args:
        labels: the class of every row: (N,) integers, any values.
        n: rows in a group.
        classes: groups in a batch, each of another class.
        seed: with the epoch it decides every batch.
        num_replicas: processes that share each batch; it must divide `classes`.
        rank: which of them this is, as in `PKSampler`.
    """

    def __init__(
        self,
        labels: Tensor | Sequence[int],
        n: int,
        classes: int,
        *,
        seed: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        super().__init__(
            labels, classes, n, names=("classes", "n"), seed=seed, num_replicas=num_replicas, rank=rank
        )
        groups = self._sizes // self._rows
        # In B batches a class has a place for B groups at most: the largest B that the groups can fill.
        count = int(groups.sum()) // self._classes
        while (fillable := int(groups.clamp(max=count).sum()) // self._classes) < count:
            count = fillable
        if not count:
            raise ValueError(
                f"no batch can be filled: it needs {classes} classes of at least {n} rows, "
                f"and there are {int((groups > 0).sum())}"
            )
        self._count = count
        self._groups = groups.clamp(max=count)

    def __len__(self) -> int:
        return self._count

    def _batches(self, generator: Generator) -> Iterator[Tensor]:
        shuffled = torch.randperm(len(self._labels), generator=generator)
        order = shuffled[self._labels[shuffled].argsort(stable=True)]
        following = self._sizes.cumsum(0) - self._sizes  # where each class's next group begins
        within = torch.arange(self._rows)
        left = self._without_surplus(generator)
        for batches_left in range(self._count, 0, -1):
            # The smallest of exponential variables, each divided by its weight: a weighted draw without
            # replacement. A class with a group for each batch that is left must be in all of them.
            keys = torch.empty(len(left)).exponential_(generator=generator) / left
            keys = keys.masked_fill(left == 0, torch.inf).masked_fill(left == batches_left, -1)
            classes = keys.topk(self._classes, largest=False, sorted=False).indices
            yield order[following[classes].unsqueeze(1) + within].flatten()
            following[classes] += self._rows
            left[classes] -= 1

    def _without_surplus(self, generator: Generator) -> Tensor:
        """How many groups of each class are dealt: in all what the batches hold; which sit out is random."""
        owners = torch.arange(len(self._groups)).repeat_interleave(self._groups)
        surplus = len(owners) - self._count * self._classes
        out = owners[torch.randperm(len(owners), generator=generator)[:surplus]]
        dealt: Tensor = self._groups - out.bincount(minlength=len(self._groups))
        return dealt


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int, got {value!r}")
    return int(value)


def _at_least_one(name: str, value: object) -> int:
    integer = _integer(name, value)
    if integer < 1:
        raise ValueError(f"{name} must be at least 1, got {integer}")
    return integer


def _draw(sizes: Tensor, count: int, generator: Generator) -> Tensor:
    """For each of M sizes, `count` numbers from 0 to size − 1: different ones where there are that many.

    Floyd's way: of the j-th number's range, one larger than the last one's, either a draw or, where that is
    taken, the end. Each set is equally likely, and the work doesn't grow with the sizes.
    """
    enough = sizes >= count
    chosen = sizes.new_empty(len(sizes), count)
    for j, uniform in enumerate(torch.rand(count, len(sizes), dtype=torch.float64, generator=generator)):
        end = torch.where(enough, sizes - count + j, sizes - 1)
        drawn = (uniform * (end + 1)).long()
        taken = (chosen[:, :j] == drawn.unsqueeze(1)).any(1) & enough
        chosen[:, j] = torch.where(taken, end, drawn)
    return chosen
