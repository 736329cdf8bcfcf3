"""The certified pass, forced, on every instruction set that has fast products of integers.

Its picks are those of double precision: the oracle measures all pairs in float64, a tie going to the lowest
index. So are they for any number of threads. The proven error (docs/certified.md) is compared with the true
one.
Nothing here imports torch, so that `make sanitize` can run the file.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.kernels import kernels, run, triplet, words

FORBIDDEN, WHERE_IT_PAYS, FORCED = 0, 1, 2
WITH_INTEGERS = [name for name in kernels.instruction_sets() if name != "baseline"]
every_isa = pytest.mark.parametrize("isa", WITH_INTEGERS)
DISTANCES = list(words.DISTANCE.names)
# Whatever has an extreme: nearest and farthest of either kind, and beyond with any offset.
RULES = [("hard", "hard"), ("easy", "semihard"), ("easy", "easy"), ("hard", "beyond"), ("easy", "hard")]


@pytest.fixture(autouse=True)
def forced() -> Iterator[None]:
    kernels.use_certified(FORCED)
    yield
    kernels.use_certified(WHERE_IT_PAYS)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def heavy(x: np.ndarray) -> np.ndarray:
    x[:: max(2, len(x) // 4)] *= 100
    return x


def one_huge(x: np.ndarray) -> np.ndarray:
    x[len(x) // 2] *= 1e6
    return x


def with_zeros(x: np.ndarray) -> np.ndarray:
    x[::5] = 0
    return x


# Rows of all kinds, out of normally distributed ones.
KINDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "normal": lambda x: x,
    "unit": unit,
    "tight": lambda x: unit(unit(x[: len(x) // 6 + 1]).repeat(6, axis=0)[: len(x)] + 0.01 * x),
    "offset": lambda x: x + 1000,
    "collapsed": lambda x: unit(x[:1]) + 1e-3 * x,
    "lattice": lambda x: np.rint(x),
    "duplicates": lambda x: np.concatenate([x[: len(x) // 3]] * 4)[: len(x)],
    "equal": lambda x: np.repeat(x[:1], len(x), axis=0),
    "low rank": lambda x: x[:, :1] @ np.ones((1, x.shape[1])) + 1e-3 * x,
    "heavy tails": heavy,
    "one huge row": one_huge,
    "zero rows": with_zeros,
    "huge": lambda x: x * 2e37,
    "tiny": lambda x: x * 1e-30,
    "subnormal": lambda x: x * 1e-42,
    "sizes": lambda x: x * np.exp2(np.arange(len(x)) % 40 - 20.0)[:, None],
}
SHAPES = [(70, 1, 3), (61, 3, 2), (90, 17, 4), (131, 31, 50), (66, 65, 33), (140, 129, 5)]


def rows(kind: str, count: int, width: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, count, width])
    with np.errstate(over="ignore", under="ignore"):
        return KINDS[kind](rng.standard_normal((count, width))).astype(np.float32)


def distances(x: np.ndarray, y: np.ndarray, distance: str) -> np.ndarray:
    """In float64. From a zero row everything has a cosine of 0."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    if distance != "cosine":
        square = np.stack([((y - row) ** 2).sum(1) for row in x])
        return np.sqrt(square) if distance == "euclidean" else square
    norms = [np.sqrt((rows**2).sum(1, keepdims=True)) for rows in (x, y)]
    u, v = (rows / np.where(norm > 0, norm, 1) for rows, norm in zip((x, y), norms, strict=True))
    values = np.stack([((v - row) ** 2).sum(1) / 2 for row in u])
    return np.where((norms[0] == 0) | (norms[1] == 0).T, 1.0, values)


def reported(values: np.ndarray) -> np.ndarray:
    largest = float(np.finfo(np.float32).max)
    return np.minimum(values, largest).astype(np.float32).astype(np.float64)


def check_side(key: np.ndarray, eligible: np.ndarray, picks: np.ndarray, ref: np.ndarray, ties: bool) -> None:
    """`picks` are the eligible candidates with the least key. The lowest of equal rows is picked and, where
    `ties` is true, of all that tie."""
    key = np.where(eligible, key, np.inf)
    best = key.min(1, initial=np.inf)
    none = best == np.inf
    assert (picks[none] == -1).all()
    expected = key.argmin(1)
    for anchor in np.flatnonzero(~none & (picks != expected)):
        pick, wanted = picks[anchor], expected[anchor]
        assert pick >= 0
        # The oracle adds up in another order: it may be wrong by the last bits of double.
        apart = abs(key[anchor, pick] - best[anchor])
        assert apart <= 4 * np.finfo(np.float64).eps * abs(best[anchor])
        assert apart > 0 or not (ties or (ref[pick] == ref[wanted]).all())


def check_picks(isa: str, rule: tuple[str, str], distance: str, emb, labels, offset=0.0, threads=2, **given):
    positive, negative = rule
    result = run(isa, threads, triplet(positive, negative, distance, offset=offset), emb, labels, **given)
    ref, ref_labels = given.get("ref_emb", emb), given.get("ref_labels", labels)
    own = given["self_index"] if "self_index" in given else np.full(len(emb), -1)
    own = own if "ref_emb" in given else np.arange(len(emb))
    other = np.arange(len(ref))[None] != own[:, None]
    ignored = given.get("ignore_label")
    counts = (labels != ignored)[:, None] & (ref_labels != ignored)[None]
    same = labels[:, None] == ref_labels[None]
    d = distances(widened(emb), widened(ref), distance)
    ties = distance != "cosine"  # units round, and so do their ties
    check_side(-d if positive == "hard" else d, same & other & counts, result.picks[0], ref, ties)
    eligible = ~same & other & counts
    if negative in ("semihard", "beyond"):
        picked = result.picks[0]
        d_ap = reported(np.take_along_axis(d, np.maximum(picked, 0)[:, None], 1))
        floor = d_ap + (offset if negative == "beyond" else 0)
        eligible &= (picked >= 0)[:, None] & (reported(d) > floor)
    check_side(-d if negative == "easy" else d, eligible, result.picks[1], ref, ties)


def widened(emb: np.ndarray) -> np.ndarray:
    if emb.dtype == np.uint16:  # bfloat16
        return (emb.astype(np.uint32) << 16).view(np.float32)
    return emb.astype(np.float32)


@every_isa
@pytest.mark.parametrize("kind", KINDS)
def test_picks_are_those_of_double_precision(isa, kind):
    turns = zip(itertools.cycle(RULES), itertools.cycle(DISTANCES), itertools.cycle(SHAPES), strict=False)
    first = WITH_INTEGERS.index(isa) + 3 * list(KINDS).index(kind)
    for rule, distance, (count, width, per_class) in itertools.islice(turns, first, first + 6):
        if kind in ("huge", "subnormal") and distance == "sqeuclidean":
            continue  # reported distances overflow, or vanish, and all of them tie
        emb = rows(kind, count, width)
        labels = np.random.default_rng(count).permutation(np.arange(count) // per_class)
        check_picks(isa, rule, distance, emb, labels, offset=0.1)


@every_isa
def test_picks_against_a_reference(isa):
    for (rule, distance), kind in zip(
        itertools.product(RULES, DISTANCES),
        itertools.cycle(("normal", "duplicates", "tight", "heavy tails")),
        strict=False,
    ):
        emb, ref = rows(kind, 37, 33), rows(kind, 150, 33, seed=1)
        rng = np.random.default_rng(5)
        self_index = rng.integers(-1, len(ref), len(emb))
        ref[self_index[self_index >= 0]] = emb[self_index >= 0]
        labels, ref_labels = rng.integers(0, 9, len(emb)), rng.integers(0, 9, len(ref))
        given = {"ref_emb": ref, "ref_labels": ref_labels, "self_index": self_index, "ignore_label": 4}
        check_picks(isa, rule, distance, emb, labels, offset=-0.2, **given)


@every_isa
@pytest.mark.parametrize("dtype", [np.float16, np.uint16], ids=["float16", "bfloat16"])
def test_picks_of_half_precision(isa, dtype):
    for rule, distance in itertools.product(RULES[:3], DISTANCES):
        emb = rows("normal", 95, 40)
        emb = (emb.view(np.uint32) >> 16).astype(np.uint16) if dtype == np.uint16 else emb.astype(dtype)
        check_picks(isa, rule, distance, emb, np.arange(len(emb)) // 5)


@every_isa
def test_strided_rows(isa):
    wide = rows("normal", 120, 50)
    check_picks(isa, RULES[0], "euclidean", wide[::2, :21], np.arange(60) // 3)


@every_isa
@pytest.mark.parametrize("kind", ["normal", "duplicates", "tight"])
def test_threads_change_no_bit(isa, kind):
    emb, labels = rows(kind, 700, 48), np.arange(700) // 30
    for rule in RULES[:4]:
        call = triplet(*rule, offset=0.05)
        one, *others = (run(isa, threads, call, emb, labels).bits() for threads in (1, 2, 3))
        assert others == [one, one]


def errors(isa: str, emb: np.ndarray, distance: str, farthest: bool, size: int) -> Any:
    """How far products of integers lie from the exact half squared distances, and the bound on that."""
    code = words.DISTANCE.code[distance]
    exact, approximate, bound = kernels.certified_errors(isa, emb, code, farthest, size)
    return np.abs(approximate - exact), bound


@every_isa
@pytest.mark.parametrize("size", [1, 2])
def test_the_error_stays_within_its_bound(isa, size):
    for kind, (count, width, _) in itertools.product(KINDS, SHAPES[:1] + SHAPES[2:4] + SHAPES[5:]):
        for distance, farthest in (("euclidean", False), ("cosine", True), ("euclidean", True)):
            error, bound = errors(isa, rows(kind, count, width), distance, farthest, size)
            off_diagonal = ~np.eye(count, dtype=bool)  # a zero row is at distance 1 from itself, too
            assert (error <= bound)[off_diagonal].all(), (kind, width, distance, farthest)


@every_isa
@pytest.mark.parametrize("size", [1, 2])
def test_a_bound_half_as_large_would_be_found_out(isa, size):
    """In few dimensions, residuals and rows point the same way now and then."""
    error, bound = errors(isa, rows("normal", 150, 2), "euclidean", True, size)
    assert error.max() > 0
    assert (error > bound / 2).any()


@every_isa
def test_small_batches_are_left_alone(isa):
    """The switching rule forbids them: the same bits as without the pass."""
    emb, labels = rows("normal", 300, 64), np.arange(300) // 4
    found = {}
    for use in (FORBIDDEN, WHERE_IT_PAYS):
        kernels.use_certified(use)
        found[use] = run(isa, 2, triplet("hard", "hard"), emb, labels).bits()
    assert found[FORBIDDEN] == found[WHERE_IT_PAYS]
