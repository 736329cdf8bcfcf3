"""``"random"``: a uniform candidate, the one with the largest hash of (seed, anchor, candidate)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tripletops
from tests.support.backends import Backend
from tests.support.batches import random_batch
from tests.support.calls import T, mined
from tests.support.checks import Pick
from tests.support.oracle import Truth, largest_hash, oracle_picks
from tests.support.worked_triplets import CHI_SQUARE, chi_square, hash_by_plain_integers, picks
from tripletops import reference
from tripletops._words import NEGATIVE


def judge(pick: Pick) -> None:
    """The same bits on every backend."""
    pick.one_of_all()
    assert torch.equal(pick.index, largest_hash(pick.truth, pick.eligible)), f"{pick}: not the largest hash"


def test_a_random_pick_has_the_largest_hash():
    emb, labels = torch.zeros(12, 1), torch.tensor([0, 1, 2] * 4)
    for seed in (0, 99):
        p, n = picks(emb, labels, positive="random", negative="random", seed=seed)
        for i in range(12):
            others = [c for c in range(12) if c != i]
            of_class = [c for c in others if c % 3 == i % 3]
            of_others = [c for c in others if c % 3 != i % 3]
            assert p[i] == max(of_class, key=lambda c: hash_by_plain_integers(seed, i, c))
            assert n[i] == max(of_others, key=lambda c: hash_by_plain_integers(seed, i, c))


@pytest.mark.parametrize("seed", [3, -77])
def test_random_picks_are_uniform_over_anchors(seed):
    # 7000 anchors of class 0; candidates: 10 of class 0, 7 of class 1, mixed.
    ref_labels = torch.tensor([0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 0, 1, 0, 1, 0])
    p, n, _, _ = reference.mine(
        torch.zeros(7000, 1), torch.zeros(7000, dtype=torch.int64), positive="random", negative="random",
        ref_emb=torch.zeros(17, 1), ref_labels=ref_labels, seed=seed,
    )  # fmt: skip
    table = torch.zeros(17, 17).index_put((p, n), torch.ones(7000), accumulate=True)
    table = table[ref_labels == 0][:, ref_labels == 1]
    assert table.sum() == 7000
    assert chi_square(table.sum(1)) < CHI_SQUARE[9]
    assert chi_square(table.sum(0)) < CHI_SQUARE[6]
    # The positive says nothing about the negative: cells against products of sums, 9·6 degrees of freedom.
    expected = table.sum(1, keepdim=True) * table.sum(0) / 7000
    assert ((table - expected).square() / expected).sum() < CHI_SQUARE[54]


def test_random_picks_are_uniform_over_seeds():
    # The same anchor, seeds 0 to 2999 in a row; candidates 1 to 10 are its positives.
    noise = torch.stack([reference.noise(seed, 1, 11, torch.device("cpu"))[0, 1:] for seed in range(3000)])
    counts = torch.bincount(noise.argmax(1), minlength=10).double()
    assert chi_square(counts) < CHI_SQUARE[9]


# On every backend


def draws_are_the_same_everywhere(backend: Backend) -> None:
    for seed, (count, candidates) in zip(
        (0, -1, 2**63 - 1, -(2**63)), ((50, None), (18, 70), (33, 40), (65, None)), strict=True
    ):
        batch = replace(random_batch(count, 4, candidates, classes=3), seed=seed)
        triplets = mined(batch, "random", "random", "euclidean")
        expected = oracle_picks(Truth(batch, "euclidean"), "random", "random")
        assert torch.equal(triplets.positive, expected[0])
        assert torch.equal(triplets.negative, expected[1])
        if tripletops.backends()["cpu"] == "usable":
            rules = {"positive": "random", "negative": "random", "backend": "cpu"}
            others = tripletops.mine(batch.emb, batch.labels, **rules, **batch.options())
            assert torch.equal(triplets.positive, others.positive)
            assert torch.equal(triplets.negative, others.negative)


def seeds_decide(backend: Backend) -> None:
    batch = random_batch(60, 4, classes=3)

    def draws(**options) -> tuple[list[int], list[int]]:
        triplets = T.mine(batch.emb, batch.labels, positive="random", negative="random", **options)
        return triplets.positive.tolist(), triplets.negative.tolist()

    assert draws(seed=3) == draws(seed=3) == draws(seed=torch.tensor(3)) == draws(seed=torch.tensor([3]))
    assert draws(seed=3) != draws(seed=4)
    assert draws(seed=-1) == draws(seed=torch.tensor(-1))
    assert draws(generator=torch.Generator().manual_seed(1)) == draws(
        generator=torch.Generator().manual_seed(1)
    )
    generator = torch.Generator().manual_seed(1)
    assert draws(generator=generator) != draws(generator=generator)
    torch.manual_seed(9)
    first, second = draws(), draws()
    torch.manual_seed(9)
    assert (draws(), draws()) == (first, second)
    assert first != second
    # Rules that draw nothing leave the generators alone.
    before, state = torch.get_rng_state(), generator.get_state()
    for name, word in NEGATIVE.items():
        if name != "all" and not word.draws:
            T.triplet_loss(batch.emb, batch.labels, positive="easy", negative=name, generator=generator)
    T.batch_hard_loss(batch.emb, batch.labels)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(generator.get_state(), state)


ON_EVERY_BACKEND = (draws_are_the_same_everywhere, seeds_decide)
