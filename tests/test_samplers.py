"""The samplers: what a batch and an epoch hold, that they can be repeated, and how processes share them."""

from __future__ import annotations

import time
from collections import Counter
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from tripletops.samplers import GroupSampler, PKSampler

# Class 5 has rows 0, 2, 4, 6; class −1 rows 1, 5, 7; class 9 row 3.
LABELS = [5, -1, 5, 9, 5, -1, 5, -1]


def classes_of(batch: list[int], labels, rows: int) -> list[int]:
    """The class of each run of `rows` rows, which must be one."""
    runs = torch.as_tensor(labels)[batch].view(-1, rows)
    assert runs.eq(runs[:, :1]).all()
    return runs[:, 0].tolist()


def test_pk_batch_by_hand():
    batches = list(PKSampler(LABELS, 3, 3, batches=20))
    for batch in batches:
        assert sorted(classes_of(batch, LABELS, 3)) == [-1, 5, 9]
        rows = {LABELS[batch[start]]: batch[start : start + 3] for start in (0, 3, 6)}
        assert sorted(rows[-1]) == [1, 5, 7]  # as many as there are
        assert len(set(rows[5])) == 3  # three of four, none twice
        assert rows[9] == [3, 3, 3]  # fewer than three: with replacement
    assert len({tuple(sorted(batch)) for batch in batches}) == 4  # each of class 5's rows was once left out


def test_pk_epoch_is_about_as_many_rows_as_there_are():
    assert len(PKSampler(range(100), 10, 4)) == len(list(PKSampler(range(100), 10, 4))) == 2
    assert len(PKSampler(LABELS, 3, 3)) == 1
    assert len(list(PKSampler(LABELS, 2, 1, batches=130))) == 130  # more than are drawn together


def test_pk_draws_every_class_and_row_alike():
    labels = torch.tensor([0] * 4 + [1] * 8 + [2] * 4 + [3] * 8)
    batches = list(PKSampler(labels, 2, 3, batches=8000))
    classes = Counter(frozenset(classes_of(batch, labels, 3)) for batch in batches)
    assert len(classes) == 6
    for times in classes.values():  # of a binomial with a std of 33
        assert times == pytest.approx(8000 / 6, abs=5 * 33)
    rows = torch.tensor(batches).flatten().bincount(minlength=24)
    # Half of the batches have a class, and 3 of its rows: a row's share is 3/8 of 8,000 or half of that.
    torch.testing.assert_close(rows, 12000 // labels.bincount()[labels], atol=250, rtol=0)


def test_pk_draws_with_replacement_alike():
    rows = torch.tensor(list(PKSampler([0, 0], 1, 5, batches=2000))).flatten().bincount()
    assert rows[0].item() == pytest.approx(5000, abs=5 * 50)


def test_groups_by_hand():
    # In groups of 2 class 5 has two, −1 one (a row sits out) and 9 none: one batch of 5 and −1.
    sampler = GroupSampler(LABELS, 2, 2)
    assert len(sampler) == 1
    seen = set()
    for epoch in range(40):
        sampler.set_epoch(epoch)
        (batch,) = sampler
        assert sorted(classes_of(batch, LABELS, 2)) == [-1, 5]
        assert len(set(batch)) == 4
        seen.update(batch)
    assert seen == {0, 1, 2, 4, 5, 6, 7}  # all but the row of class 9 have their turn


def test_groups_are_dealt_until_no_batch_can_be_filled():
    # 6, 1, 1 and 1 groups for batches of 2: class 0 meets each other class once, and then is alone.
    labels = [0] * 12 + [1, 1, 2, 2, 3, 3]
    batches = list(GroupSampler(labels, 2, 2, seed=3))
    assert sorted(sorted(classes_of(batch, labels, 2)) for batch in batches) == [[0, 1], [0, 2], [0, 3]]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=9),
    n=st.integers(1, 4),
    classes=st.integers(1, 4),
    seed=st.integers(0, 2**40),
)
def test_groups_fill_as_many_batches_as_can_be(sizes, n, classes, seed):
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    groups = [size // n for size in sizes]
    # Gale and Ryser: B batches can be filled if no class is counted for more than B groups.
    most = max(b for b in range(sum(groups) + 1) if sum(min(g, b) for g in groups) >= b * classes)
    if not most or classes > len(sizes):
        with pytest.raises(ValueError, match="class"):
            GroupSampler(labels, n, classes)
        return
    sampler = GroupSampler(labels, n, classes, seed=seed)
    batches = list(sampler)
    assert len(sampler) == len(batches) == most
    for batch in batches:
        assert len(set(classes_of(batch, labels, n))) == classes
    rows = [row for batch in batches for row in batch]
    assert len(set(rows)) == len(rows) == most * classes * n


def both(**options):
    labels = torch.arange(60) % 6
    return PKSampler(labels, 4, 5, batches=7, **options), GroupSampler(labels, 5, 4, **options)


@pytest.mark.parametrize("which", [0, 1])
def test_seed_and_epoch_decide_every_batch(which):
    def epoch(seed, number):
        torch.manual_seed(torch.seed())  # the global state plays no part
        sampler = both(seed=seed)[which]
        sampler.set_epoch(number)
        return list(sampler)

    state = torch.get_rng_state()
    list(both()[which])
    assert torch.get_rng_state().equal(state)
    epochs = [epoch(seed, number) for seed in range(3) for number in range(3)]
    assert epochs == [epoch(seed, number) for seed in range(3) for number in range(3)]
    assert len({str(batches) for batches in epochs}) == 9
    sampler = both(seed=2)[which]
    assert list(sampler) == list(sampler) == epochs[6]  # until the epoch is set to another


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("replicas", [2, 4])
def test_processes_share_every_batch(which, replicas):
    alone = list(both(seed=1)[which])
    shares = [list(both(seed=1, num_replicas=replicas, rank=rank)[which]) for rank in range(replicas)]
    assert [list(chain(*parts)) for parts in zip(*shares, strict=True)] == alone
    assert {len(part) for share in shares for part in share} == {20 // replicas}


def test_a_loader_takes_them_as_batch_samplers():
    labels = torch.arange(60) % 6
    for sampler in both():
        loader = DataLoader(TensorDataset(labels), batch_sampler=sampler)
        assert [batch.tolist() for (batch,) in loader] == [labels[batch].tolist() for batch in sampler]


@pytest.mark.parametrize(
    ("labels", "p", "k"),
    [
        (torch.arange(60_000) % 2, 2, 64),
        (torch.arange(60_000) % 964, 18, 32),
        (torch.arange(60_000) % 11_318, 64, 2),
    ],
)
def test_large_epochs_start_at_once(labels, p, k):
    for make in (lambda: PKSampler(labels, p, k), lambda: GroupSampler(labels, k, p)):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            next(iter(make()))
            times.append(time.perf_counter() - start)
        assert min(times) < 0.1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PKSampler([], 1, 1), "labels must be a vector of integers"),
        (lambda: PKSampler([[0, 1]], 1, 1), r"labels must be .* got torch.int64 \(1, 2\)"),
        (lambda: GroupSampler([0.5, 1.0], 1, 1), r"labels must be .* got torch.float32 \(2,\)"),
        (lambda: PKSampler(LABELS, 0, 1), "p must be at least 1, got 0"),
        (lambda: PKSampler(LABELS, 1, -2), "k must be at least 1, got -2"),
        (lambda: GroupSampler(LABELS, 0, 1), "n must be at least 1, got 0"),
        (lambda: PKSampler(LABELS, 4, 1), r"p \(4\) must not exceed the number of classes \(3\)"),
        (lambda: PKSampler(LABELS, 1, 1, batches=0), "batches must be at least 1, got 0"),
        (lambda: PKSampler(LABELS, 3, 1, num_replicas=2), r"p \(3\) must be divisible by num_replicas \(2\)"),
        (lambda: GroupSampler(LABELS, 1, 3, num_replicas=2), r"classes \(3\) must be divisible"),
        (lambda: PKSampler(LABELS, 2, 1, num_replicas=2, rank=2), "rank must be from 0 to 1, got 2"),
        (lambda: PKSampler(LABELS, 2, 1, num_replicas=0), "num_replicas must be at least 1, got 0"),
        (lambda: GroupSampler(LABELS, 2, 3), "needs 3 classes of at least 2 rows, and there are 2"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()
