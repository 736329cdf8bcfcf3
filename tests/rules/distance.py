"""``"distance"``: a negative drawn by inverse distance density on the sphere.

A draw is the largest of all keys, log weight plus Gumbel noise.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from tests.support.backends import Backend
from tests.support.batches import Batch, labels_of, random_batch
from tests.support.calls import CUTOFF, DISTANCES, DTYPES, LIMIT, T
from tests.support.checks import Pick
from tests.support.oracle import PICK, Truth, largest_hash, oracle_picks
from tests.support.planted import judged
from tests.support.worked import random_rows, tensor
from tests.support.worked_triplets import same
from tripletops import reference
from tripletops._words import NEGATIVE


def judge(pick: Pick) -> None:
    pick.one_of_all()
    check_drawn(pick.truth, pick.index, pick.numbers["cutoff"], pick.numbers["nonzero_loss_cutoff"])


def check_drawn(truth: Truth, n: Tensor, cutoff: float = CUTOFF, limit: float | None = LIMIT) -> None:
    """A draw has the largest key, but for what rounding does to keys."""
    assert torch.equal(n >= 0, truth.negatives.any(1)), "drawn negative: one too many, or one too few"
    found = (n >= 0).nonzero()[:, 0]
    if not len(found):
        return
    eligible, width = truth.negatives[found], truth.x.shape[1]
    noise = truth.noise[found]
    gumbel = -(-torch.log1p((noise + 0.5) / 2**32 - 1)).log()
    d = truth.unit_square[found].sqrt().clamp(min=cutoff)
    height = (1 - d.square() / 4).clamp(min=2**-20)
    log_weight = (2 - width) * d.log() + (3 - width) / 2 * height.log()
    # Unit rows have the radius 1 at most, and centring leaves no row longer than 2.
    off = truth.finer * PICK * (4 + math.sqrt(width)) * 4
    slope = abs(2 - width) / 2 / d.square() + abs(3 - width) / 8 / height
    terms = abs(2 - width) * d.log().abs() + abs(3 - width) / 2 * height.log().abs() + gumbel.abs()
    tolerance = slope * off + 8 * 2.0**-23 * truth.finer * (1 + terms)
    key = log_weight + gumbel
    surely = possibly = eligible
    if limit is not None:
        surely = eligible & (d.square() + off < limit**2)
        possibly = eligible & (d.square() - off < limit**2) & (cutoff < limit)
    picked = torch.zeros_like(eligible).scatter(1, n[found, None], True)
    uniform = noise.where(eligible, -1).argmax(1, keepdim=True) == torch.arange(len(truth.y))
    best = (key - tolerance).where(surely, -math.inf).amax(1, keepdim=True)
    allowed = possibly & (key + tolerance >= best)
    allowed = allowed | (uniform & ~surely.any(1, keepdim=True))
    assert (allowed & picked).any(1).all(), "drawn negative: another one has the larger key"


HALF = math.log(2) / 2


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        # ln d is −2, 1 and 2 HALFs for d = .5, √2 and 2, and ln(1 − d²/4) ln(15/16), −2 HALFs and −40 HALFs.
        (2, [math.log(15 / 16) / 2, -HALF, -20 * HALF]),
        (3, [2 * HALF, -HALF, -2 * HALF]),
        (4, [4 * HALF - math.log(15 / 16) / 2, -HALF, 16 * HALF]),
        (128, [252 * HALF - 62.5 * math.log(15 / 16), -HALF, 2248 * HALF]),
    ],
)
def test_log_weights(width, expected):
    x, y = torch.zeros(1, width, dtype=torch.float64), torch.zeros(4, width, dtype=torch.float64)
    x[0, 0] = 3.0
    y[0, 0], y[1, 1], y[2, 0] = 5.0, 1e-3, -7.0  # the same direction, at right angles, the antipode
    expected = [*expected, expected[1]]  # a zero row is at right angles to everything
    assert same(reference.log_weights(x, y, 0.5, None), [expected], 1e-12)
    assert same(reference.log_weights(x, y, 0.5, 1.4), [[expected[0], *[-math.inf] * 3]], 1e-12)
    assert same(reference.log_weights(x, y, 0.5, 2.0), [[*expected[:2], -math.inf, expected[3]]], 1e-12)
    # A cutoff that everything is nearer than; and beyond the limit, no weight is left.
    assert reference.log_weights(x, y, 2.5, None).unique().numel() == 1
    assert reference.log_weights(x, y, 2.5, None).isfinite().all()
    assert (reference.log_weights(x, y, 1.5, 1.5) == -math.inf).all()


def test_draws_without_dimensions():
    # Every distance is 0, so every weight the same: the largest hash.
    emb, labels = torch.ones(30, 0), torch.arange(30) % 3
    _, by_distance, _, _ = reference.mine(emb, labels, positive="hard", negative="distance", seed=5)
    hashes = reference.noise(5, 30, 30, torch.device("cpu"))
    assert torch.equal(by_distance, hashes.where(labels[:, None] != labels, -1).argmax(1))


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize(("cutoff", "limit"), [(0.5, 1.4), (0.9, None), (0.3, 1.0)])
def test_draws_by_loops(distance, cutoff, limit):
    emb, labels = random_rows(40, 6, 5)
    labels[3] = -9
    emb[7] = 0
    drawn = reference.mine(
        emb, labels, positive="easy", negative="distance", distance=distance, seed=-123, cutoff=cutoff,
        nonzero_loss_cutoff=limit, ignore_label=-9,
    )[1]  # fmt: skip
    hashes = reference.noise(-123, 40, 40, torch.device("cpu"))
    for a in range(40):
        keys = {}
        for c in range(40):
            if labels[c] in (labels[a], -9):
                continue
            s = torch.cosine_similarity(emb[a], emb[c], dim=0).item()
            d = max(math.sqrt(2 - 2 * s), cutoff)
            if limit is None or d < limit:
                v = (2**32 - hashes[a, c].item() - 0.5) / 2**32
                weight = -4 * math.log(d) - 1.5 * math.log(max(1 - d * d / 4, 2**-20))
                keys[c] = weight - math.log(-math.log1p(-v))
        if not keys:
            keys = {c: hashes[a, c].item() for c in range(40) if labels[c] not in (labels[a], -9)}
        assert drawn[a] == (-1 if a == 3 else max(keys, key=keys.__getitem__))


def at_distances(distances: list[float], width: int) -> Tensor:
    """Rows that far, on the unit sphere, from the first axis."""
    d = tensor(distances)
    rows = torch.zeros(len(d), width, dtype=torch.float64)
    rows[:, 0] = 1 - d.square() / 2
    rows[torch.arange(len(d)), 1 + torch.arange(len(d)) % (width - 1)] = (
        d * (1 - d.square() / 4).clamp(min=0).sqrt()
    )
    return rows


SPREAD = [0.1, 0.45, 0.505, 0.51, 0.55, 0.6, 0.7, 0.9, 1.1, 1.3, 1.39, 1.41, 1.7, 1.95]
EVEN = [0.2, 0.8, 0.805, 0.81, 0.85, 1.2, 1.35]


@pytest.mark.parametrize("over", ["anchors", "seeds"])
@pytest.mark.parametrize(
    ("width", "distances", "cutoff", "limit"),
    [
        (3, SPREAD, 0.5, 1.4),
        (3, SPREAD, 0.5, None),
        (16, SPREAD, 0.5, 1.4),
        (16, EVEN, 0.8, None),
        (128, SPREAD, 0.5, 1.4),  # the weights of .5 and 1.39 are e^90 apart
        (128, SPREAD[4:], 0.5, None),  # 1.95 outweighs everything
        (128, SPREAD[4:-2], 0.5, None),
        (16, SPREAD[-3:], 0.5, 1.4),  # no weight at all
    ],
)
def test_draws_follow_the_weights(width, distances, cutoff, limit, over):
    # Half of the candidates are positives, in between the negatives.
    negatives = at_distances(distances, width)
    ref_emb = torch.stack([negatives.flip(0), negatives], 1).flatten(0, 1)
    ref_labels = torch.tensor([0, 1]).repeat(len(negatives))
    anchor = at_distances([0.0], width)
    anchors, seeds = (2000, [11]) if over == "anchors" else (16, range(125))
    counts = torch.zeros(len(ref_emb))
    for seed in seeds:
        n = reference.mine(
            anchor.expand(anchors, -1), torch.zeros(anchors, dtype=torch.int64), positive="hard",
            negative="distance", ref_emb=ref_emb, ref_labels=ref_labels, seed=seed, cutoff=cutoff,
            nonzero_loss_cutoff=limit,
        )[1]  # fmt: skip
        counts += torch.bincount(n, minlength=len(ref_emb))
    assert not counts[::2].any()
    counts = counts[1::2].double()

    d = tensor(distances).clamp(min=cutoff)
    log_weight = (2 - width) * d.log() - (width - 3) / 2 * (1 - d.square() / 4).log()
    if limit is not None:
        log_weight[d >= limit] = -math.inf
    if (log_weight == -math.inf).all():
        log_weight = torch.zeros_like(d)
    expected = log_weight.softmax(0) * counts.sum()
    # Candidates too rare to count on are taken together, and hardly ever drawn.
    often = expected >= 5
    rare, rare_expected = counts[~often].sum(), expected[~often].sum()
    assert rare <= rare_expected + 4 * rare_expected.sqrt() + (rare_expected > 1e-3).double()
    if often.sum() > 1:
        observed = counts[often]
        p = chisquare(observed, expected[often] / expected[often].sum() * observed.sum()).pvalue
        assert p > 1e-3  # a fair draw fails for one seed in a thousand, and the seeds are fixed


def test_the_judge_is_as_sharp_as_the_promise():
    """In 3 dimensions log weights are −ln d. The second negative is moved until both keys are equal."""
    generator = torch.Generator().manual_seed(0)
    anchor, rows = torch.tensor([[1.0, 0, 0]]), torch.randn(3, 3, generator=generator, dtype=torch.float64)

    def at(angle: float) -> Tensor:
        return torch.tensor([math.cos(angle), math.sin(angle), 0.0], dtype=torch.float64)

    def keys(angle: float) -> Tensor:
        d = 2 * torch.tensor([math.sin(0.45), math.sin(angle / 2)], dtype=torch.float64)
        return -d.log() - (-torch.log1p((noise[1:] + 0.5) / 2**32 - 1)).log()

    rows[0], rows[1] = at(0.1), at(0.9)
    found = 0
    for seed in range(20):
        batch = Batch(
            anchor, torch.zeros(1, dtype=torch.int64), rows.float(), torch.tensor([0, 1, 1]), seed=seed
        )
        noise = Truth(batch, "cosine").noise[0]
        low, high = 0.55, 1.5  # above the cutoff of .5 and below the limit of 1.4
        if not keys(low)[1] > keys(low)[0] or not keys(high)[1] < keys(high)[0]:
            continue
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if keys(middle)[1] > keys(middle)[0] else (low, middle)
        found += 1
        for factor, others in ((1e-7, True), (1e-3, False), (-1e-3, False)):
            rows[2] = at(low * (1 + factor))
            given = replace(batch, ref_emb=rows.float())
            winner = 1 if factor > 0 else 2  # farther away, the second one weighs less
            assert judged(given, NEGATIVE, "distance", winner, "cosine")
            assert judged(given, NEGATIVE, "distance", 3 - winner, "cosine") == others
    assert found > 3


# On every backend


def drawn(batch: Batch, distance: str = "euclidean", seed: int | None = None, **numbers) -> Tensor:
    given = batch.options() | ({} if seed is None else {"seed": seed})
    words = {"positive": "hard", "negative": "distance", "distance": distance}
    return T.mine(batch.emb, batch.labels, **words, **given, **numbers).negative


def cutoffs_hold(backend: Backend) -> None:
    shapes = ((97, 1, None), (100, 3, None), (40, 16, 130), (130, 64, None))
    if backend.slow:
        shapes = ((50, 1, None), (35, 3, None), (17, 16, 66), (35, 40, None))
    cutoffs = [*product((0.5, 1e-3, 1.2, 5.0), (1.4, None, 0.9, 0.1))]
    for turn, ((count, width, candidates), dtype) in enumerate(product(shapes, DTYPES)):
        batch = random_batch(count, width, candidates, classes=7, dtype=dtype)
        centre = batch.emb[::3].float().mean(0)
        batch.emb[::4] = (centre + 0.2 * batch.emb[::4].float()).to(dtype)  # some nearer than the cutoff
        truth, distance = Truth(batch, "cosine"), DISTANCES[turn % len(DISTANCES)]
        for cutoff, limit in cutoffs[turn % 16 :: 16] if backend.slow else cutoffs:
            check_drawn(
                truth, drawn(batch, distance, cutoff=cutoff, nonzero_loss_cutoff=limit), cutoff, limit
            )


def draws_are_the_oracles(backend: Backend) -> None:
    """float64 keys of the kernels and of the oracle differ in the last digits only: no draw does."""
    shapes = ((40, 1), (67, 2), (50, 24)) if backend.slow else ((40, 1), (97, 2), (193, 8), (150, 128))
    for count, width in shapes:
        batch = random_batch(count, width, classes=9, dtype=torch.float64)
        truth = Truth(batch, "cosine")
        assert torch.equal(drawn(batch), oracle_picks(truth, "hard", "distance")[1])
        half = random_batch(count, width, classes=9).to(torch.float16)
        expected = oracle_picks(Truth(half, "cosine"), "hard", "distance")[1]
        assert (drawn(half) != expected).sum() <= 1


def draws_do_not_depend_on_the_distance(backend: Backend) -> None:
    for candidates, dtype in product((None, 31 if backend.slow else 131), (torch.float32, torch.float64)):
        batch = random_batch(33 if backend.slow else 120, 17, candidates, classes=6, dtype=dtype)
        assert batch.emb.norm(dim=1).std() > 0.1
        first, *others = (drawn(batch, distance) for distance in DISTANCES)
        assert all(torch.equal(first, other) for other in others)


def draws_are_uniform_without_weights(backend: Backend) -> None:
    for count, width, candidates in ((17, 20, 66),) if backend.slow else ((100, 8, None), (33, 40, 130)):
        batch = random_batch(count, width, candidates, classes=4)
        truth = Truth(batch, "euclidean")
        uniform = largest_hash(truth, truth.negatives)
        # From 2 on d reaches nothing; below the cutoff nothing is reached either.
        for cutoff, limit in ((0.5, 1e-3), (0.5, 0.5), (2.5, 2.0)):
            assert torch.equal(drawn(batch, cutoff=cutoff, nonzero_loss_cutoff=limit), uniform)
        assert not torch.equal(drawn(batch), uniform)
    # Orthogonal rows are at √2 from each other, beyond the limit of 1.4.
    size = 40 if backend.slow else 100
    batch = Batch(torch.eye(size), torch.arange(size) % 5)
    truth = Truth(batch, "euclidean")
    assert torch.equal(drawn(batch), largest_hash(truth, truth.negatives))


def weights_far_apart_neither_overflow_nor_repeat(backend: Backend) -> None:
    """In 512 dimensions they are e^(±300) apart; not one candidate is left to all seeds or anchors."""
    generator = torch.Generator().manual_seed(12)
    count = 40 if backend.slow else 120
    for dtype in (torch.float16,) if backend.slow else (torch.float16, torch.float32, torch.float64):
        centre = torch.randn(512, generator=generator)
        emb = (torch.randn(count, 512, generator=generator) + 0.7 * centre).to(dtype)
        batch = Batch(emb, labels_of(count, 6, generator))
        for limit in (1.4, None):
            negative = drawn(batch, nonzero_loss_cutoff=limit)
            check_drawn(Truth(batch, "cosine"), negative, limit=limit)
            assert len(negative.unique()) > count // 6
    # At one distance all weights are equal.
    batch = Batch(torch.eye(512)[:count] + 0.2, labels_of(count, 6, generator))
    seeds = range(8 if backend.slow else 40)
    assert len(torch.stack([drawn(batch, seed=seed) for seed in seeds])[:, 0].unique()) > len(seeds) // 3


def draws_follow_the_weights(backend: Backend) -> None:
    """One anchor, negatives at chosen distances: chi-square of many draws against the exact weights."""
    distances = torch.tensor([0.2, 0.5, 0.8, 1.0, 1.1, 1.2, 1.3, 1.5], dtype=torch.float64)
    cosines = 1 - distances.square() / 2
    draws = 1000 if backend.slow else 4000
    words = [*product((2, 3, 8, 32), ((0.5, 1.4), (0.9, None)))]
    for width, (cutoff, limit) in words[::3] if backend.slow else words:
        rows = torch.zeros(len(distances) + 1, width, dtype=torch.float64)
        rows[1:, 0], rows[1:, 1] = cosines, (1 - cosines.square()).sqrt()
        rows[0, 0] = 1.0
        emb = rows[:1].expand(draws, width).float()  # every anchor draws for itself
        nobody = torch.zeros(draws, dtype=torch.int64)
        batch = Batch(emb, nobody, rows.float() * 3, torch.arange(9).clamp(max=1))
        counts = drawn(batch, seed=3, cutoff=cutoff, nonzero_loss_cutoff=limit).bincount(minlength=9)[1:]
        d = distances.clamp(min=cutoff)
        log_weight = (2 - width) * d.log() - (width - 3) / 2 * (1 - d.square() / 4).log()
        if limit is not None:
            log_weight[d >= limit] = -math.inf
        expected = draws * log_weight.softmax(0)
        assert not counts[expected == 0].any()
        often = expected > 5
        observed = torch.cat([counts[often], counts[~often].sum()[None]]).double()
        wanted = torch.cat([expected[often], expected[~often].sum()[None]])
        observed, wanted = observed[wanted > 0], wanted[wanted > 0]
        assert chisquare(observed.numpy(), wanted.numpy()).pvalue > 1e-3


ON_EVERY_BACKEND = (
    cutoffs_hold,
    draws_are_the_oracles,
    draws_do_not_depend_on_the_distance,
    draws_are_uniform_without_weights,
    weights_far_apart_neither_overflow_nor_repeat,
    draws_follow_the_weights,
)
