"""Which rows a batch is made of."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from tests.train_ref.support import (
    cell,
)
from train_ref.batches import ShuffledBatches, batches

pytest.importorskip("sklearn")
pytestmark = pytest.mark.usefixtures("training_alone")


def epoch_of(sampler, epoch: int) -> list[list[int]]:
    sampler.set_epoch(epoch)
    return list(sampler)


def test_shuffled_batches_cover_the_data_set():
    sampler = ShuffledBatches(12, 4, steps=None, seed=0)
    assert len(sampler) == 3
    first, second = epoch_of(sampler, 0), epoch_of(sampler, 1)
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(12))
    assert first != second
    assert first == epoch_of(ShuffledBatches(12, 4, steps=None, seed=0), 0)
    assert first != epoch_of(ShuffledBatches(12, 4, steps=None, seed=1), 0)


def test_shuffled_batches_begin_anew_where_the_data_ends():
    found = epoch_of(ShuffledBatches(10, 4, steps=5, seed=0), 0)
    assert [len(set(batch)) for batch in found] == [4] * 5
    for passed in (found[:2], found[2:4]):
        assert len(set(chain(*passed))) == 8
    assert found[:2] != found[2:4]


def test_shares_of_a_shuffled_batch_make_it_up():
    ranks = [ShuffledBatches(20, 6, steps=7, seed=5, num_replicas=3, rank=rank) for rank in range(3)]
    shares = zip(*(epoch_of(rank, 2) for rank in ranks), strict=True)
    assert [list(chain(*parts)) for parts in shares] == epoch_of(ShuffledBatches(20, 6, steps=7, seed=5), 2)


def test_batches_that_cannot_be():
    labels = torch.arange(4).repeat(5)
    for changes, said in (
        ({"batch": 10, "per_class": 4}, "a batch of 10 can't have 4 images of every class"),
        ({"batches": "shuffled", "batch": 21}, "a batch of 21 of a data set of 20 images"),
        ({"batches": "piles"}, "there are no batches 'piles'; there are 'pk', 'groups' and 'shuffled'"),
    ):
        with pytest.raises(ValueError, match=said):
            batches(cell(**changes).settings, labels, 0, num_replicas=1, rank=0)
    with pytest.raises(ValueError, match="a batch of 5 can't be shared out among 2 processes"):
        ShuffledBatches(20, 5, steps=None, seed=0, num_replicas=2)
