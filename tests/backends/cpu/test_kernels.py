"""The kernels of every instruction set that this machine can run, on NumPy arrays, against brute force.

Nothing here imports torch, or the package around the kernels and the words, so that `make sanitize` can run
the file with the module that TRIPLETOPS_KERNELS_PATH names. What holds for every word is tried with every
word that there is: the same bits for any number of threads, and gradients that are derivatives.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.kernels import ROOT, Call, Result, kernels, run, triplet, words

# The others differ in their products of integers alone, which test_certified.py tries.
INSTRUCTION_SETS = [name for name in kernels.instruction_sets() if not name.endswith("vnni")]
every_isa = pytest.mark.parametrize("isa", INSTRUCTION_SETS)
POSITIVES, NEGATIVES = (
    [word for word in table if word != "all"] for table in (words.POSITIVE, words.NEGATIVE)
)


def allowed(call: Call) -> Call:
    """The call, with a distance that its loss is defined on, and a positive if its negative is measured from
    one."""
    if words.OBJECTIVE[call.objective].cosine or words.LOSS[call.loss].cosine:
        call = call._replace(distance="cosine")
    if words.NEGATIVE[call.negative].needs_positive and call.positive == "all":
        call = call._replace(positive="easy")
    return call


def every_call() -> Iterator[Call]:
    """Every word of every option of every public function, the others as they are by default."""
    for function in words.FUNCTION.values():
        default = {choice.name: choice.default or choice.words[0] for choice in function.choices}
        default |= {table.option: word for table, word in function.fixed}
        default.pop("reduction", None)
        for choice in function.choices:
            for word in choice.words if choice.name != "reduction" else ():
                yield allowed(Call(function.objective, **{**default, choice.name: word}))
        yield allowed(Call(function.objective, **default))


CALLS = {
    " ".join(call[:5]): call for call in every_call()
}  # by words, so that what several functions have in common is called once


def noise(seed: int, anchors: int, candidates: int) -> np.ndarray:
    """The 32-bit hashes of (seed, anchor, candidate) that random picks compare."""
    bits = lambda number: np.uint64(number)  # noqa: E731
    row = np.arange(1, anchors + 1, dtype=np.uint64) * bits(0x9E3779B97F4A7C15) + bits(seed)
    row = (row ^ (row >> bits(30))) * bits(0xBF58476D1CE4E5B9)
    row = (row ^ (row >> bits(27))) * bits(0x94D049BB133111EB)
    row = (row ^ (row >> bits(31)))[:, None]
    mask = bits(0xFFFFFFFF)
    x = (np.arange(candidates, dtype=np.uint64) * bits(0x9E3779B1) + row) & mask
    x = (x ^ (x >> bits(16))) * bits(0x85EBCA6B) & mask
    x = x ^ (row >> bits(32))
    x = (x ^ (x >> bits(13))) * bits(0xC2B2AE35) & mask
    return (x ^ (x >> bits(16))).astype(float)


class Anchor(NamedTuple):
    """What the rules know of one anchor, by candidate."""

    d: np.ndarray  # what is compared
    distance: np.ndarray  # what is reported
    noise: np.ndarray
    draw: np.ndarray  # of negative="distance": the smallest is picked
    positives: np.ndarray  # candidates
    negatives: np.ndarray
    numbers: dict[str, float]
    d_ap: float = np.nan

    def lowest(self, scores: np.ndarray, eligible: np.ndarray) -> int:
        return eligible[np.argmin(scores[eligible])] if len(eligible) else -1

    def uniform(self, eligible: np.ndarray, otherwise: np.ndarray) -> int:
        return self.lowest(-self.noise, eligible if len(eligible) else otherwise)

    def beyond(self, offset: float) -> int:
        farther = self.distance[self.negatives] > self.d_ap + offset
        return self.lowest(self.d, self.negatives[farther])


def softhard_positive(anchor: Anchor) -> int:
    nearest = anchor.d[anchor.negatives].min(initial=np.inf)
    positives = anchor.positives
    return anchor.uniform(positives[anchor.d[positives] > nearest], positives)


def softhard_negative(anchor: Anchor) -> int:
    farthest = anchor.d[anchor.positives].max(initial=-np.inf)
    negatives = anchor.negatives
    return anchor.uniform(negatives[anchor.d[negatives] < farthest], negatives)


def drawn_by_distance(anchor: Anchor) -> int:
    weighty = anchor.negatives[anchor.draw[anchor.negatives] < np.inf]
    return anchor.lowest(anchor.draw, weighty) if len(weighty) else anchor.uniform(weighty, anchor.negatives)


RULES: dict[str, dict[str, Callable[[Anchor], int]]] = {
    "positive": {
        "hard": lambda anchor: anchor.lowest(-anchor.d, anchor.positives),
        "easy": lambda anchor: anchor.lowest(anchor.d, anchor.positives),
        "random": lambda anchor: anchor.lowest(-anchor.noise, anchor.positives),
        "softhard": softhard_positive,
    },
    "negative": {
        "hard": lambda anchor: anchor.lowest(anchor.d, anchor.negatives),
        "semihard": lambda anchor: anchor.beyond(0.0),
        "beyond": lambda anchor: anchor.beyond(anchor.numbers["offset"]),
        "softhard": softhard_negative,
        "easy": lambda anchor: anchor.lowest(-anchor.d, anchor.negatives),
        "random": lambda anchor: anchor.lowest(-anchor.noise, anchor.negatives),
        "distance": drawn_by_distance,
    },
}


def unit(rows: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms > 0, norms, 1)


def squares(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return ((x[:, None] - y[None]) ** 2).sum(-1)


def reported(square: np.ndarray, distance: str) -> np.ndarray:
    """`square` is of unit rows for the cosine."""
    return {"euclidean": np.sqrt(square), "sqeuclidean": square, "cosine": square / 2}[distance]


def draws(x: np.ndarray, y: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Exponential draws over the weights of negative="distance", as logarithms; infinite for weight 0."""
    d, width = np.sqrt(squares(unit(x), unit(y))).clip(0.5), x.shape[1]
    height = (1 - d**2 / 4).clip(2.0**-20)
    weights = np.where(d < 1.4, (2 - width) * np.log(d) - (width - 3) / 2 * np.log(height), -np.inf)
    return np.log(-np.log1p(-(2**32 - hashes - 0.5) / 2**32)) - weights


class Picked(NamedTuple):
    picks: np.ndarray  # (2, N)
    square: np.ndarray  # (N, M), of unit rows for the cosine
    draws: np.ndarray  # (N, M)


def brute_force(
    call: Call,
    emb: np.ndarray,
    labels: np.ndarray,
    ref_emb: np.ndarray | None = None,
    ref_labels: np.ndarray | None = None,
    self_index: np.ndarray | None = None,
    seed: int = 0,
) -> Picked:
    """Picks by the rules, from the float64 matrix of squared distances."""
    x, y = emb.astype(float), (emb if ref_emb is None else ref_emb).astype(float)
    candidate_labels = labels if ref_labels is None else ref_labels
    me = np.arange(len(x)) if ref_emb is None else self_index
    hashes = noise(seed, len(x), len(y))
    draw = draws(x, y, hashes) if call.negative == "distance" else hashes
    square = squares(unit(x), unit(y)) if call.distance == "cosine" else squares(x, y)
    picks = np.full((2, len(x)), -1)
    for i in range(len(x)):
        others = np.arange(len(y)) != (-1 if me is None else me[i])
        same = candidate_labels == labels[i]
        positives, negatives = np.flatnonzero(same & others), np.flatnonzero(~same & others)
        distance = reported(square[i], call.distance)
        anchor = Anchor(square[i], distance, hashes[i], draw[i], positives, negatives, call.numbers)
        picks[0, i] = RULES["positive"][call.positive](anchor)
        if picks[0, i] >= 0:
            anchor = anchor._replace(d_ap=distance[picks[0, i]])
        picks[1, i] = RULES["negative"][call.negative](anchor)
    return Picked(picks, square, draw)


def lattice(rng, count, width, dtype=np.float32):
    """Small whole numbers: every product is exact, so ties are ties and picks have to agree."""
    return rng.integers(-2, 3, (count, width)).astype(dtype)


SHAPES = [(1, 1), (2, 3), (5, 16), (6, 1), (7, 17), (13, 8), (16, 33), (17, 2), (31, 127), (33, 5), (97, 31)]


def without(rules: list[str], *others: str) -> list[str]:
    return [rule for rule in rules if rule not in others]


@every_isa
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("positive", RULES["positive"])
def test_picks_on_a_lattice_are_the_brute_force_picks(isa, dtype, positive):
    rng = np.random.default_rng(0)
    for (count, width), classes in itertools.product(SHAPES, (1, 3, 40)):
        emb, labels = lattice(rng, count, width, dtype), rng.integers(0, classes, count)
        ref = lattice(rng, count + 9, width, dtype), rng.integers(0, classes, count + 9)
        me, seed = rng.integers(-1, count + 9, count), int(rng.integers(2**62))
        for negative in without([*RULES["negative"]], "distance"):
            # Whole numbers are exact; a positive and a negative offset, by turns.
            call = triplet(positive, negative, "sqeuclidean", offset=float(width % 2 * 5 - 3))
            for more in ({}, {"ref_emb": ref[0], "ref_labels": ref[1], "self_index": me}):
                given = run(isa, 1, call, emb, labels, seed=seed, **more)
                expected = brute_force(call, emb, labels, seed=seed, **more)
                np.testing.assert_array_equal(given.picks, expected.picks)
                for kind in range(2):
                    anchors = np.flatnonzero(expected.picks[kind] >= 0)
                    np.testing.assert_array_equal(
                        given.saved[kind, anchors], expected.square[anchors, expected.picks[kind, anchors]]
                    )


@every_isa
@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
def test_random_rows_are_picked_within_the_rounding_of_products(isa, distance):
    rng = np.random.default_rng(1)
    for count, width in [*SHAPES, (211, 64), (60, 700)]:
        emb, labels = rng.standard_normal((count, width)).astype(np.float32), rng.integers(0, 9, count)
        rows = emb / np.linalg.norm(emb, axis=1, keepdims=True) if distance == "cosine" else emb
        radius = np.linalg.norm(rows - rows.mean(0), axis=1).max()
        bound = 2.0**-21 * (4 + np.sqrt(width)) * radius**2
        for positive, negative in itertools.product(("hard", "easy"), ("hard", "easy")):
            call = triplet(positive, negative, distance)
            picks = run(isa, 1, call, emb, labels).picks
            expected, square, _ = brute_force(call, emb, labels)
            np.testing.assert_array_equal(picks < 0, expected < 0)
            rows_of = np.arange(count)
            off = np.abs(square[rows_of, picks] - square[rows_of, expected])[picks >= 0]
            assert off.max(initial=0) <= bound


@every_isa
def test_negatives_are_drawn_by_distance(isa):
    """Another negative may be picked only where its draw is the smallest but for rounding."""
    rng = np.random.default_rng(10)
    for count, width in [(2, 3), (31, 17), (97, 5), (150, 33), (60, 300)]:
        emb, labels = rng.standard_normal((count, width)), rng.integers(0, 9, count)
        for seed in range(4):
            call = triplet("hard", "distance")
            _, picks = run(isa, 1, call, emb, labels, seed=seed).picks
            (_, expected), _, draw = brute_force(call, emb, labels, seed=seed)
            np.testing.assert_array_equal(picks < 0, expected < 0)
            rows_of = np.flatnonzero(picks != expected)
            np.testing.assert_allclose(
                draw[rows_of, picks[rows_of]], draw[rows_of, expected[rows_of]], atol=1e-8 * width
            )
            assert len(rows_of) <= count // 50


def softplus(z):
    return np.logaddexp(z, 0)


# By loss: a function of S_ap and S_an for those on similarities, of d_ap and d_an for the others.
LOSSES: dict[str, Callable[..., np.ndarray]] = {
    "margin": lambda d_ap, d_an: np.maximum(d_ap - d_an + 0.3, 0),
    "soft_margin": lambda d_ap, d_an: softplus(d_ap - d_an),
    "first_order": lambda s_ap, s_an: softplus((s_an - s_ap) / 0.5),
    "second_order": lambda s_ap, s_an: softplus((s_an**2 / 2 - s_ap + s_ap**2 / 2) / 0.5),
    "sct": lambda s_ap, s_an: np.where(s_an <= s_ap, softplus((s_an - s_ap) / 0.5), 0.7 * s_an),
}


@every_isa
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_one_triplet(isa, loss):
    rng = np.random.default_rng(11)
    emb, labels = rng.standard_normal((60, 7)), rng.integers(0, 6, 60)
    numbers = {"margin": 0.3, "temperature": 0.5, "sct_weight": 0.7}
    for positive, negative in itertools.product(("hard", "easy"), ("hard", "easy")):
        distance = "cosine" if words.LOSS[loss].cosine else "euclidean"
        call = triplet(positive, negative, distance, loss, **numbers)
        given = run(isa, 1, call, emb, labels, reduction="none")
        (p, n), square, _ = brute_force(call, emb, labels)
        d = reported(square, distance)
        d_ap, d_an = d[np.arange(60), p], d[np.arange(60), n]
        pair = (1 - d_ap, 1 - d_an) if distance == "cosine" else (d_ap, d_an)
        assert (p >= 0).all()
        np.testing.assert_allclose(given.loss, LOSSES[loss](*pair), rtol=1e-12, atol=1e-12)


@every_isa
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_the_derivatives_of_the_loss(isa, name):
    """Central differences in a random direction: every word, whatever its formula is."""
    rng, call, step = np.random.default_rng(12), CALLS[name], 1e-6
    labels, ids = np.arange(40) % 6, np.arange(55) % 6
    rows = [rng.standard_normal((count, 6)) for count in (40, 55)]
    directions = [rng.standard_normal(each.shape) for each in rows]

    def at(way: float) -> Result:
        emb, ref_emb = (each + way * step * along for each, along in zip(rows, directions, strict=True))
        return run(isa, 1, call, emb, labels, ref_emb=ref_emb, ref_labels=ids, seed=3, reduction="sum")

    given, before, after = (at(way) for way in (0, -1, 1))
    np.testing.assert_array_equal(before.picks, after.picks)  # else the step is too long for this batch
    slope = sum((gradient * along).sum() for gradient, along in zip(given[4:6], directions, strict=True))
    assert abs(slope) > 1e-3
    assert (after.loss[0] - before.loss[0]) / (2 * step) == pytest.approx(slope, rel=1e-6, abs=1e-6)


# Objectives over many tuples by brute force: of one anchor with distances d, positives p and negatives n, the
# sum of its terms and their derivatives by d.

Anchored = Callable[[Call, np.ndarray, np.ndarray, np.ndarray], tuple[float, np.ndarray]]


def pair_terms(d: np.ndarray, p: np.ndarray, n: np.ndarray, start: float, end: float):
    """Positives are pulled to within `start`, negatives pushed beyond `end`."""
    slopes = np.zeros_like(d)
    slopes[p] += d[p] > start
    slopes[n] -= d[n] < end
    return np.maximum(d[p] - start, 0).sum() + np.maximum(end - d[n], 0).sum(), slopes


def contrastive(call, d, p, n):
    return pair_terms(d, p, n, call.numbers["pos_margin"], call.numbers["neg_margin"])


def beta_margin(call, d, p, n):
    alpha, beta = call.numbers["alpha"], call.learned()
    return pair_terms(d, p, n, beta - alpha, beta + alpha)


def batch_all(call, d, p, n):
    slopes = np.zeros_like(d)
    if call.loss == "margin":
        z = d[p][:, None] - d[n] + call.numbers["margin"]
        total, slope = np.maximum(z, 0).sum(), z > 0
    else:
        z = d[p][:, None] - d[n]
        total, slope = softplus(z).sum(), 1 / (1 + np.exp(-z))
    slopes[p] += slope.sum(1)
    slopes[n] -= slope.sum(0)
    return total, slopes


def semi_hard(call, d, p, n):
    total, slopes = 0.0, np.zeros_like(d)
    for j in p if len(n) else ():
        beyond = n[d[n] > d[j]]
        k = beyond[np.argmin(d[beyond])] if len(beyond) else n[np.argmax(d[n])]
        if d[j] - d[k] + call.numbers["margin"] > 0:
            total += d[j] - d[k] + call.numbers["margin"]
            slopes[j] += 1
            slopes[k] -= 1
    return total, slopes


def multi_similarity(call, d, p, n):
    slopes = np.zeros_like(d)
    if not (len(p) and len(n)):
        return 0.0, slopes
    alpha, beta, base, epsilon = (call.numbers[name] for name in ("alpha", "beta", "base", "epsilon"))
    kept_p, kept_n = p[d[p] > d[n].min() - epsilon], n[d[n] < d[p].max() + epsilon]
    if call.positive == "easy":
        kept_p = p[[np.argmin(d[p])]]
    e_p, e_n = np.exp(-alpha * (1 - d[kept_p] - base)), np.exp(beta * (1 - d[kept_n] - base))
    slopes[kept_p] += e_p / (1 + e_p.sum())
    slopes[kept_n] -= e_n / (1 + e_n.sum())
    return np.log1p(e_p.sum()) / alpha + np.log1p(e_n.sum()) / beta, slopes


def supcon(call, d, p, n):
    slopes, both = np.zeros_like(d), np.concatenate([p, n])
    if not len(p):
        return 0.0, slopes
    logits = (1 - d) / call.numbers["temperature"]
    log_sum = np.logaddexp.reduce(logits[both])
    slopes[both] -= np.exp(logits[both] - log_sum) / call.numbers["temperature"]
    slopes[p] += 1 / len(p) / call.numbers["temperature"]
    return log_sum - logits[p].mean(), slopes


def info_nce(call, d, p, n):
    total, slopes = 0.0, np.zeros_like(d)
    logits = (1 - d) / call.numbers["temperature"]
    taken = p[[np.argmin(d[p])]] if call.positive == "easy" and len(p) else p
    log_sum = np.logaddexp.reduce(logits[n]) if len(n) else -np.inf
    for j in taken:
        total += softplus(log_sum - logits[j])
        sigma = 1 / (1 + np.exp(logits[j] - log_sum)) / call.numbers["temperature"]
        slopes[j] += sigma
        slopes[n] -= sigma * np.exp(logits[n] - log_sum)
    return total, slopes


TUPLES: dict[str, tuple[Call, Anchored]] = {
    "batch_all": (Call("batch_all", numbers={"margin": 0.3}), batch_all),
    "batch_all_soft": (Call("batch_all", loss="soft_margin"), batch_all),
    "semi_hard": (Call("semi_hard", numbers={"margin": 0.3}), semi_hard),
    "multi_similarity": (
        Call("multi_similarity", numbers={"alpha": 2.0, "beta": 50.0, "base": 0.5, "epsilon": 0.1}),
        multi_similarity,
    ),
    "contrastive": (Call("contrastive", numbers={"pos_margin": 0.1, "neg_margin": 1.3}), contrastive),
    "beta_margin": (Call("beta_margin", numbers={"alpha": 0.2}), beta_margin),
    "supcon": (Call("supcon", numbers={"temperature": 0.3}), supcon),
    "info_nce": (Call("info_nce", numbers={"temperature": 0.3}), info_nce),
}
for _name in ("multi_similarity", "info_nce"):
    TUPLES[f"{_name}_easy"] = (TUPLES[_name][0]._replace(positive="easy"), TUPLES[_name][1])


class Pairs(NamedTuple):
    """All pairs of a batch, (N, M)."""

    u: np.ndarray  # (N, D), the anchors; unit rows for the cosine
    v: np.ndarray  # (M, D)
    norms: tuple[np.ndarray, np.ndarray]
    d: np.ndarray
    positives: np.ndarray
    negatives: np.ndarray

    def expected(self, call: Call, terms: Anchored) -> tuple[float, np.ndarray]:
        """The sum of all terms and its derivatives by every distance."""
        if not (self.positives.any() and self.negatives.any()):
            return 0.0, np.zeros_like(self.d)
        by_anchor = [
            terms(call, self.d[i], np.flatnonzero(self.positives[i]), np.flatnonzero(self.negatives[i]))
            for i in range(len(self.d))
        ]
        return sum(total for total, _ in by_anchor), np.stack([slopes for _, slopes in by_anchor])

    def gradients(self, slopes: np.ndarray, distance: str) -> list[np.ndarray]:
        """By the rows of anchors and candidates, from the derivatives by every distance."""
        apart, factor = self.u[:, None] - self.v, self.factors(slopes, distance)
        found = [np.einsum("ij,ijd->id", factor, apart), -np.einsum("ij,ijd->jd", factor, apart)]
        if distance != "cosine":
            return found
        return [
            (g - (g * rows).sum(1, keepdims=True) * rows) / norm
            for g, rows, norm in zip(found, (self.u, self.v), self.norms, strict=True)
        ]

    def bounds(self, slopes: np.ndarray, distance: str) -> list[np.ndarray]:
        """What no gradient of smaller derivatives exceeds, whatever their signs."""
        apart, factor = np.abs(self.u[:, None] - self.v), self.factors(slopes, distance)
        found = [np.einsum("ij,ijd->id", factor, apart), np.einsum("ij,ijd->jd", factor, apart)]
        if distance != "cosine":
            return found
        return [
            (g + (g * np.abs(rows)).sum(1, keepdims=True) * np.abs(rows)) / norm
            for g, rows, norm in zip(found, (self.u, self.v), self.norms, strict=True)
        ]

    def factors(self, slopes: np.ndarray, distance: str) -> np.ndarray:
        """What the difference of two rows is multiplied by."""
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = np.where(self.d > 0, slopes / self.d, 0) if distance == "euclidean" else slopes
        return 2 * factor if distance == "sqeuclidean" else factor

    def near_ties(self, margin: float = 0) -> np.ndarray:
        """In how many triplets each pair is whose negative is as far as its positive, with the margin, but
        for rounding: either may count as farther."""
        p, n = (np.where(mask, self.d, np.nan) for mask in (self.positives, self.negatives))
        p = p + margin
        near = np.abs(p[:, :, None] - n[:, None]) < 1e-6 * p[:, :, None]
        return near.sum(2) + near.sum(1)


def pairs_of(emb, labels, distance, ref_emb=None, ref_labels=None, self_index=None) -> Pairs:
    u, v = emb.astype(float), (emb if ref_emb is None else ref_emb).astype(float)
    norms = tuple(np.linalg.norm(rows, axis=1, keepdims=True) for rows in (u, v))
    if distance == "cosine":
        u, v = u / norms[0], v / norms[1]
    me = np.arange(len(u)) if ref_emb is None else self_index
    others = np.arange(len(v)) != me[:, None]
    same = labels[:, None] == (labels if ref_labels is None else ref_labels)
    return Pairs(u, v, norms, reported(squares(u, v), distance), same & others, ~same & others)


@every_isa
@pytest.mark.parametrize("name", TUPLES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_objectives_over_many_tuples(isa, name, dtype):
    rng, (call, terms) = np.random.default_rng(8), TUPLES[name]
    exact = 1e-12 if dtype == np.float64 else 1e-5
    distances = ("cosine",) if words.OBJECTIVE[call.objective].cosine else tuple(words.DISTANCE)
    for (count, width), classes in itertools.product([(2, 3), (31, 17), (97, 5), (150, 33)], (2, 12, 60)):
        emb, labels = rng.standard_normal((count, width)).astype(dtype), rng.integers(0, classes, count)
        memory = rng.standard_normal((count + 57, width)).astype(dtype)
        ids, me = rng.integers(0, classes, count + 57), rng.integers(-1, count + 57, count)
        ref = {"ref_emb": memory, "ref_labels": ids, "self_index": me}
        for more, distance in itertools.product(({}, ref), distances):
            pairs = pairs_of(emb, labels, distance, **more)
            if call.objective == "semi_hard" and pairs.near_ties().any():
                continue
            total, slopes = pairs.expected(call, terms)
            expected = pairs.gradients(slopes, distance)
            given = run(isa, 2, call._replace(distance=distance), emb, labels, reduction="sum", **more)
            np.testing.assert_allclose(given.loss[0], total, rtol=exact, atol=exact)
            spare = [0.0, 0.0]
            if call.objective == "batch_all" and call.loss == "margin" and dtype == np.float32:
                # A triplet at the kink of its hinge, but for rounding, may have a slope or none.
                spare = pairs.bounds(pairs.near_ties(call.numbers["margin"]), distance)
            if not more:
                expected, spare = [sum(expected)], [sum(spare)]
            gradients = (given.emb_gradient, given.ref_gradient)
            for found, wanted, flipped in zip(gradients, expected, spare, strict=False):
                assert (np.abs(found - wanted) <= exact * np.abs(wanted).max() + flipped).all()
            if given.learned_gradient is not None:
                np.testing.assert_allclose(given.learned_gradient, -slopes.sum(1), atol=exact)


def check_threads(isa: str, call: Call, *batch: np.ndarray, **rows: Any) -> None:
    first = run(isa, 1, call, *batch, **rows).bits()
    for threads in (1, 2, 5):
        assert run(isa, threads, call, *batch, **rows).bits() == first


def batch_with_duplicates(seed: int, count: int, classes: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    emb, labels = rng.standard_normal((count, 33)).astype(np.float32), rng.integers(0, classes, count)
    memory = rng.standard_normal((count + 200, 33)).astype(np.float32)
    ids = rng.integers(0, classes, count + 200)
    emb[50:60], memory[-20:] = emb[5], memory[3]
    emb[100:200] = emb[7] + np.float32(1e-3) * emb[100:200]  # nearer to each other than a product can tell
    memory[100:200] = emb[7] + np.float32(1e-3) * memory[100:200]
    return emb, labels, memory, ids


@every_isa
@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.objective != "triplet"])
def test_threads_change_no_bit_of_objectives_over_many_tuples(isa, name):
    emb, labels, memory, ids = batch_with_duplicates(9, 500, 40)
    for more in ({}, {"ref_emb": memory, "ref_labels": ids}):
        check_threads(isa, CALLS[name], emb, labels, seed=5, **more)


@every_isa
@pytest.mark.parametrize("positive", POSITIVES)
def test_threads_and_repeats_change_no_bit(isa, positive):
    emb, labels, memory, ids = batch_with_duplicates(2, 700, 90)
    for negative, distance in itertools.product(NEGATIVES, words.DISTANCE):
        for more in ({}, {"ref_emb": memory, "ref_labels": ids}):
            call = triplet(positive, negative, distance, offset=-0.5)
            check_threads(isa, call, emb, labels, seed=11, **more)


@every_isa
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("count", "width"), [(0, 4), (1, 4), (9, 0), (0, 0), (9, 4)])
def test_empty_and_degenerate_batches(isa, name, count, width):
    """No row, one row, rows without elements, one class: no loss and no gradient, of any type."""
    call, labels = CALLS[name], np.zeros(count, np.int64)
    for dtype in (np.float16, np.float32, np.float64, np.uint16):
        given = run(isa, 1, call, np.ones((count, width), dtype), labels)
        assert given.loss[0] == 0
        assert given.totals[0] == 0
        assert not (given.picks >= 0).all(0).any()
        assert not given.emb_gradient.any()


@every_isa
@pytest.mark.parametrize("name", CALLS)
def test_rows_without_elements(isa, name):
    """Three classes of three, all at distance 0: nothing to pull at."""
    for dtype in (np.float16, np.float32, np.float64, np.uint16):
        given = run(isa, 1, CALLS[name], np.ones((9, 0), dtype), np.arange(9) // 3)
        assert np.isfinite(given.loss).all()
        assert given.emb_gradient.shape == (9, 0)


@every_isa
@pytest.mark.parametrize(("positive", "negative"), [*itertools.product(POSITIVES, NEGATIVES)])
def test_picks_of_rows_without_elements(isa, positive, negative):
    """A negative at distance 0 is not farther than a positive at distance 0."""
    for distance in words.DISTANCE:
        call = triplet(positive, negative, distance)
        given = run(isa, 1, call, np.ones((9, 0), np.float32), np.arange(9) // 3)
        mined = not words.NEGATIVE[negative].needs_positive
        assert (given.picks >= 0).all() == mined
        assert (given.picks[0] >= 0).all()
        assert given.loss[0] == pytest.approx(0.2 if mined else 0)


def test_instruction_sets_with_fused_multiply_add_agree_to_the_bit():
    fused = [isa for isa in INSTRUCTION_SETS if isa != "baseline"]
    if len(fused) < 2:
        pytest.skip(f"needs two instruction sets with fused multiply-add, this machine has {fused}")
    rng = np.random.default_rng(3)
    emb, labels = rng.standard_normal((150, 77)).astype(np.float32), rng.integers(0, 20, 150)
    for positive, negative, distance in itertools.product(
        POSITIVES, without(NEGATIVES, "distance"), words.DISTANCE
    ):
        a, b = (run(isa, 1, triplet(positive, negative, distance), emb, labels).bits() for isa in fused)
        assert a == b


@every_isa
def test_every_float16_is_read_exactly(isa):
    patterns = np.arange(2**16, dtype=np.uint16).view(np.float16)
    values = patterns[np.isfinite(patterns)]
    emb, labels = values[:, None], np.zeros(len(values), np.int64)
    ref = {"ref_emb": np.array([[0], [1]], np.float16), "ref_labels": np.array([0, 1])}
    given = run(isa, 2, triplet("hard", "hard"), emb, labels, **ref)
    np.testing.assert_array_equal(given.saved[0], np.abs(values.astype(np.float32)))


@every_isa
def test_half_precision_gradients_are_rounded_to_nearest_even(isa):
    # With a margin that keeps the hinge active, the anchor's gradient is 2(x−p) − 2(x−n) = 2(n−p) for any x.
    rng = np.random.default_rng(4)
    halves = rng.integers(0, 2**16, 3000).astype(np.uint16)
    positive, negative = halves[:1500].view(np.float16), halves[1500:].view(np.float16)
    usable = np.isfinite(positive) & np.isfinite(negative)
    tiny = (np.arange(40, dtype=np.uint16)[:, None] * np.array([1, 3], np.uint16)).view(np.float16)
    call = triplet("hard", "hard", "sqeuclidean", margin=1e30)
    for p, n in [*zip(positive[usable], negative[usable], strict=True), *tiny]:
        ref = {"ref_emb": np.array([[p], [n]], np.float16), "ref_labels": np.array([0, 1])}
        gradient = run(isa, 1, call, np.zeros((1, 1), np.float16), np.zeros(1, np.int64), **ref).emb_gradient
        with np.errstate(over="ignore"):
            expected = np.float16(2 * (np.float32(n) - np.float32(p)))
        assert gradient[0, 0].tobytes() == (expected + np.float16(0)).tobytes(), (p, n)


@every_isa
def test_bfloat16_is_the_upper_half_of_float32(isa):
    rng = np.random.default_rng(5)
    emb = rng.standard_normal((40, 9)).astype(np.float32)
    halves = (emb.view(np.uint32) >> 16).astype(np.uint16)
    widened = (halves.astype(np.uint32) << 16).view(np.float32)
    labels = rng.integers(0, 6, 40)
    call = triplet("easy", "hard", "sqeuclidean", margin=5.0)
    given, expected = (run(isa, 1, call, rows, labels) for rows in (halves, widened))
    assert given.bits()[:4] == expected.bits()[:4]
    bits = expected.emb_gradient.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(given.emb_gradient, rounded)


@every_isa
@pytest.mark.parametrize("negative", without(NEGATIVES, "distance", "beyond"))
def test_extreme_magnitudes_are_scaled_before_products(isa, negative):
    rng = np.random.default_rng(6)
    labels = rng.integers(0, 5, 37)
    for dtype, magnitudes in (
        (np.float32, (1e30, 1.5e38, 1e-30, 1e-38)),
        (np.float64, (1e200, 8e307, 1e-200, 1e-300)),
    ):
        emb = lattice(rng, 37, 7, dtype) / dtype(2)
        call = triplet("hard", negative)
        expected = run(isa, 1, call, emb, labels)
        for magnitude in magnitudes:
            power = dtype(2.0) ** np.floor(np.log2(magnitude))
            scaled = run(isa, 1, call, emb * power, labels)
            np.testing.assert_array_equal(scaled.picks, expected.picks)


def test_strided_rows_are_read_in_place():
    rng = np.random.default_rng(7)
    wide, labels = rng.standard_normal((30, 40)).astype(np.float32), rng.integers(0, 5, 30)
    call = triplet("easy", "semihard", "cosine")
    for isa in INSTRUCTION_SETS:
        a = run(isa, 1, call, wide[:, 3:20], labels)
        b = run(isa, 1, call, np.ascontiguousarray(wide[:, 3:20]), labels)
        assert a.bits() == b.bits()


def test_an_unknown_instruction_set_is_refused_with_the_usable_ones():
    usable = ", ".join(kernels.instruction_sets())
    with pytest.raises(ValueError, match=f"'neon9' cannot run here; usable: {usable}"):
        run("neon9", 1, triplet("hard", "hard"), np.ones((2, 2), np.float32), np.zeros(2, np.int64))


def test_words_that_do_not_exist_are_refused():
    call, emb, labels = triplet("hard", "hard"), np.ones((2, 2), np.float32), np.zeros(2, np.int64)
    codes, numbers = call.codes("mean"), call.all_numbers()
    for place, code in enumerate(codes):
        for wrong in (-1, 99):
            changed = [*codes[:place], wrong, *codes[place + 1 :]]
            with pytest.raises(ValueError, match="no such word"):
                kernels.loss("baseline", 1, emb, labels, codes=changed, numbers=numbers)
        assert code >= 0
    with pytest.raises(ValueError, match="a call has all numbers"):
        kernels.loss("baseline", 1, emb, labels, codes=codes, numbers=numbers[1:])
    with pytest.raises(ValueError, match="a learned number is for objectives that learn one"):
        kernels.loss("baseline", 1, emb, labels, codes=codes, numbers=numbers, learned=1.0)


starts_processes = pytest.mark.skipif(
    "TRIPLETOPS_KERNELS_PATH" in os.environ, reason="starts processes without the sanitizer"
)


@starts_processes
@every_isa
def test_the_environment_selects_the_instruction_set(isa):
    code = "from tests.backends.cpu.test_kernels import kernels; print(kernels.selected())"
    environment = {**os.environ, "TRIPLETOPS_ISA": isa}
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == isa


@starts_processes
def test_torch_is_not_needed():
    code = (
        "import sys; sys.modules['torch'] = None; import tests.backends.cpu.test_kernels as t; t.kernels.loss"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
