"""The table of tiles: every kernel has one for every target, and tuning, asked for, changes nothing else."""

from __future__ import annotations

import pytest
import torch
from helpers import DEVICE, DTYPES, Objective, T, Truth, bits, check, random_batch

from tripletops.backends.triton import tiles


def test_every_target_has_every_kernel_and_every_type():
    kernels = {"select", "draw", "cost", "similarity", "weigh"}
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
    check(truth, "hard", "hard", Objective())
    timed = len(asked)
    assert timed == len(tiles.TILES[tiles.target(DEVICE)]["select"][torch.float32]) == 2
    check(truth, "hard", "hard", Objective())
    assert len(asked) == timed


@pytest.mark.parametrize("which", [0, 1])
def test_picks_do_not_depend_on_the_tile(which, monkeypatch):
    batch = random_batch(40, 5)
    expected = T.mine(batch.emb, batch.labels, positive="easy", negative="semihard")
    monkeypatch.setenv("TRIPLETOPS_AUTOTUNE", "1")
    monkeypatch.setattr(tiles, "_chosen", {})
    order = iter([which, 1 - which] * 10)
    monkeypatch.setattr(tiles, "_seconds", lambda call, device: float(next(order)))
    found = T.mine(batch.emb, batch.labels, positive="easy", negative="semihard")
    assert {*tiles._chosen.values()} == {tiles.TILES[tiles.target(DEVICE)]["select"][torch.float32][which]}
    assert bits(*found) == bits(*expected)
