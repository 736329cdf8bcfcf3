"""The table of tiles: every kernel has one for every target, and tuning, asked for, changes nothing else."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from tests.support.batches import random_batch
from tests.support.calls import DEVICE, DTYPES, T, TripletOptions, bits
from tests.support.checks import check
from tests.support.ops import CASES, here
from tests.support.oracle import Truth
from tripletops.backends.triton import tiles


def test_every_target_has_every_kernel_and_every_type():
    kernels = {*tiles.WALKS, "weigh"}
    for target, table in tiles.TILES.items():
        assert set(table) == kernels, target
        for kernel, by_type in table.items():
            assert set(by_type) == set(DTYPES), (target, kernel)
            for tile in (tile for choices in by_type.values() for tile in choices):
                assert tile.reason, (target, kernel)
                assert bool(tile.span) == (kernel == "weigh"), (target, kernel)


def test_walks_are_shared_out_without_a_rest():
    for blocks in (1, 3, 1000):
        for count in (1, 2, 7, 31, 1024):
            splits, each = tiles.shares(DEVICE, blocks, count)
            assert (splits - 1) * each < count <= splits * each


def test_nothing_is_tuned_unless_asked_for(monkeypatch):
    monkeypatch.delenv("TRIPLETOPS_AUTOTUNE", raising=False)
    monkeypatch.setattr(tiles, "_chosen", {})
    batch = random_batch(20, 5)
    T.triplet_loss(batch.emb, batch.labels)
    assert not tiles._chosen


def test_tuning_times_every_tile_once(monkeypatch):
    monkeypatch.setenv("TRIPLETOPS_AUTOTUNE", "1")
    monkeypatch.setattr(tiles, "_chosen", {})
    asked = []
    seconds = tiles._seconds

    def watch(call, device, rounds=3):
        asked.append(call)
        return seconds(call, device, rounds=1)

    monkeypatch.setattr(tiles, "_seconds", watch)
    batch = random_batch(40, 5)
    truth = Truth(batch, "euclidean")
    check(truth, "hard", "hard", TripletOptions())
    timed = len(asked)
    assert timed == len(tiles.TILES[tiles.target(DEVICE)]["select"][torch.float32]) == 2
    check(truth, "hard", "hard", TripletOptions())
    assert len(asked) == timed


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("case", CASES["mine"], ids=str)
def test_picks_do_not_depend_on_the_tile(case, which, monkeypatch):
    batch = random_batch(40, 5)
    mine = here(case.public())
    expected = mine(*here((batch.emb, batch.labels)))
    monkeypatch.setenv("TRIPLETOPS_AUTOTUNE", "1")
    monkeypatch.setattr(tiles, "_chosen", {})
    order = cycle([which, 1 - which])
    monkeypatch.setattr(tiles, "_seconds", lambda call, device: float(next(order)))
    found = mine(*here((batch.emb, batch.labels)))
    assert tiles._chosen or not tiles.INTERPRETED  # a GPU's table has one tile for some kernels
    for (_, kernel, dtype, *_), tile in tiles._chosen.items():
        assert tile == tiles.TILES[tiles.target(DEVICE)][kernel][dtype][which]
    assert bits(*(part.cpu() for part in found)) == bits(*(part.cpu() for part in expected))
