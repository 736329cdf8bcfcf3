"""Every instruction-set variant that this machine can run, on NumPy arrays, against brute force.

Nothing here imports torch, so that `make sanitize` can run the file with the module that
TRIPLETOPS_KERNELS_PATH names.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

os.environ.setdefault("TRIPLETOPS_POISON", "1")  # the kernels' own memory reads as NaN until it is written


def _load():
    path = os.environ.get("TRIPLETOPS_KERNELS_PATH")
    if not path:
        return importlib.import_module("tripletops._kernels")
    spec = importlib.util.spec_from_file_location("_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kernels = _load()
VARIANTS = kernels.variants()
HARD, EASY, RANDOM = range(3)
NEAREST, SEMIHARD, FARTHEST, RANDOM_NEGATIVE = range(4)
EUCLIDEAN, SQEUCLIDEAN, COSINE = range(3)
NONE = 3  # the reduction


def brute_force(emb, labels, positive, negative, distance, ref_emb=None, ref_labels=None, self_index=None):
    """Picks by the rules, from the float64 matrix of squared distances (or ½‖u−v‖²)."""
    x, y = emb.astype(float), (emb if ref_emb is None else ref_emb).astype(float)
    candidate_labels = labels if ref_labels is None else ref_labels
    if distance == COSINE:
        x, y = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (x, y))
    square = ((x[:, None] - y[None]) ** 2).sum(-1)
    picks = np.full((2, len(x)), -1)
    for i in range(len(x)):
        me = i if ref_emb is None else (-1 if self_index is None else self_index[i])
        others = np.arange(len(y)) != me
        positives = np.flatnonzero((candidate_labels == labels[i]) & others)
        negatives = np.flatnonzero((candidate_labels != labels[i]) & others)
        d = square[i]
        if len(positives):
            keys = -d[positives] if positive == HARD else d[positives]
            picks[0, i] = positives[np.argmin(keys)]
        if negative == SEMIHARD:
            negatives = negatives[d[negatives] > d[picks[0, i]]] if len(positives) else negatives[:0]
        if len(negatives):
            keys = -d[negatives] if negative == FARTHEST else d[negatives]
            picks[1, i] = negatives[np.argmin(keys)]
    return picks, square


def lattice(rng, count, width, dtype=np.float32):
    """Small whole numbers: every product is exact, so ties are ties and picks have to agree."""
    return rng.integers(-2, 3, (count, width)).astype(dtype)


SHAPES = [(1, 1), (2, 3), (5, 16), (6, 1), (7, 17), (13, 8), (16, 33), (17, 2), (31, 127), (33, 5), (97, 31)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_picks_on_a_lattice_are_the_brute_force_picks(variant, dtype):
    rng = np.random.default_rng(0)
    for (count, width), classes in itertools.product(SHAPES, (1, 3, 40)):
        emb, labels = lattice(rng, count, width, dtype), rng.integers(0, classes, count)
        ref = lattice(rng, count + 9, width, dtype), rng.integers(0, classes, count + 9)
        me = rng.integers(-1, count + 9, count)
        for positive, negative in itertools.product((HARD, EASY), (NEAREST, SEMIHARD, FARTHEST)):
            rules = {"positive": positive, "negative": negative, "distance": SQEUCLIDEAN}
            for more in ({}, {"ref_emb": ref[0], "ref_labels": ref[1], "self_index": me}):
                _, picks, terms, *_ = kernels.triplet(variant, 1, emb, labels, **rules, **more)
                expected, square = brute_force(emb, labels, **rules, **more)
                np.testing.assert_array_equal(picks, expected)
                for kind in range(2):
                    anchors = np.flatnonzero(expected[kind] >= 0)
                    np.testing.assert_array_equal(
                        terms[kind, anchors], square[anchors, expected[kind, anchors]]
                    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("distance", [EUCLIDEAN, COSINE])
def test_random_rows_are_picked_within_the_rounding_of_products(variant, distance):
    rng = np.random.default_rng(1)
    for count, width in [*SHAPES, (211, 64), (60, 700)]:
        emb, labels = rng.standard_normal((count, width)).astype(np.float32), rng.integers(0, 9, count)
        rows = emb / np.linalg.norm(emb, axis=1, keepdims=True) if distance == COSINE else emb
        radius = np.linalg.norm(rows - rows.mean(0), axis=1).max()
        bound = 2.0**-21 * (4 + np.sqrt(width)) * radius**2
        for positive, negative in itertools.product((HARD, EASY), (NEAREST, FARTHEST)):
            rules = {"positive": positive, "negative": negative, "distance": distance}
            _, picks, *_ = kernels.triplet(variant, 1, emb, labels, **rules)
            expected, square = brute_force(emb, labels, **rules)
            np.testing.assert_array_equal(picks < 0, expected < 0)
            rows_of = np.arange(count)
            off = np.abs(square[rows_of, picks] - square[rows_of, expected])[picks >= 0]
            assert off.max(initial=0) <= bound


@pytest.mark.parametrize("variant", VARIANTS)
def test_threads_and_repeats_change_no_bit(variant):
    rng = np.random.default_rng(2)
    emb, labels = rng.standard_normal((700, 33)).astype(np.float32), rng.integers(0, 90, 700)
    memory, ids = rng.standard_normal((900, 33)).astype(np.float32), rng.integers(0, 90, 900)
    emb[50:60], memory[880:] = emb[5], memory[3]
    for positive, negative, distance in itertools.product(range(3), range(4), range(3)):
        rules = {"positive": positive, "negative": negative, "distance": distance, "seed": 11}
        for more in ({}, {"ref_emb": memory, "ref_labels": ids}):
            first = kernels.triplet(variant, 1, emb, labels, **rules, **more)
            for threads in (1, 2, 5):
                again = kernels.triplet(variant, threads, emb, labels, **rules, **more)
                for a, b in zip(first, again, strict=True):
                    assert (a is None and b is None) or a.tobytes() == b.tobytes()


def test_variants_with_fused_multiply_add_agree_to_the_bit():
    fused = [variant for variant in VARIANTS if variant != "scalar"]
    if len(fused) < 2:
        pytest.skip(f"needs two instruction sets with fused multiply-add, this machine has {fused}")
    rng = np.random.default_rng(3)
    emb, labels = rng.standard_normal((150, 77)).astype(np.float32), rng.integers(0, 20, 150)
    for positive, negative, distance in itertools.product(range(3), range(4), range(3)):
        rules = {"positive": positive, "negative": negative, "distance": distance}
        a, b = (kernels.triplet(variant, 1, emb, labels, **rules) for variant in fused)
        assert [x.tobytes() for x in a[:4]] == [x.tobytes() for x in b[:4]]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_float16_is_read_exactly(variant):
    patterns = np.arange(2**16, dtype=np.uint16).view(np.float16)
    values = patterns[np.isfinite(patterns)]
    emb, labels = values[:, None], np.zeros(len(values), np.int64)
    memory, ids = np.array([[0], [1]], np.float16), np.array([0, 1])
    _, _, terms, *_ = kernels.triplet(
        variant,
        2,
        emb,
        labels,
        positive=HARD,
        negative=NEAREST,
        distance=EUCLIDEAN,
        ref_emb=memory,
        ref_labels=ids,
    )
    np.testing.assert_array_equal(terms[0], np.abs(values.astype(np.float32)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_half_precision_gradients_are_rounded_to_nearest_even(variant):
    # With a margin that keeps the hinge active, the anchor's gradient is 2(x−p) − 2(x−n) = 2(n−p) for any x.
    rng = np.random.default_rng(4)
    halves = rng.integers(0, 2**16, 3000).astype(np.uint16)
    positive, negative = halves[:1500].view(np.float16), halves[1500:].view(np.float16)
    usable = np.isfinite(positive) & np.isfinite(negative)
    tiny = (np.arange(40, dtype=np.uint16)[:, None] * np.array([1, 3], np.uint16)).view(np.float16)
    for p, n in [*zip(positive[usable], negative[usable], strict=True), *tiny]:
        gradient = kernels.triplet(
            variant,
            1,
            np.zeros((1, 1), np.float16),
            np.zeros(1, np.int64),
            positive=HARD,
            negative=NEAREST,
            distance=SQEUCLIDEAN,
            margin=1e30,
            ref_emb=np.array([[p], [n]], np.float16),
            ref_labels=np.array([0, 1]),
        )[3]
        with np.errstate(over="ignore"):
            expected = np.float16(2 * (np.float32(n) - np.float32(p)))
        assert gradient[0, 0].tobytes() == (expected + np.float16(0)).tobytes(), (p, n)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_is_the_upper_half_of_float32(variant):
    rng = np.random.default_rng(5)
    emb = rng.standard_normal((40, 9)).astype(np.float32)
    halves = (emb.view(np.uint32) >> 16).astype(np.uint16)
    widened = (halves.astype(np.uint32) << 16).view(np.float32)
    labels = rng.integers(0, 6, 40)
    rules = {"positive": EASY, "negative": NEAREST, "distance": SQEUCLIDEAN, "margin": 5.0}
    loss, picks, terms, gradient, _ = kernels.triplet(variant, 1, halves, labels, **rules)
    expected = kernels.triplet(variant, 1, widened, labels, **rules)
    assert [a.tobytes() for a in (loss, picks, terms)] == [a.tobytes() for a in expected[:3]]
    bits = expected[3].view(np.uint32).astype(np.uint64)
    np.testing.assert_array_equal(gradient, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))


@pytest.mark.parametrize("variant", VARIANTS)
def test_extreme_magnitudes_are_scaled_before_products(variant):
    rng = np.random.default_rng(6)
    labels = rng.integers(0, 5, 37)
    for dtype, magnitudes in (
        (np.float32, (1e30, 1.5e38, 1e-30, 1e-38)),
        (np.float64, (1e200, 8e307, 1e-200, 1e-300)),
    ):
        emb = lattice(rng, 37, 7, dtype) / dtype(2)
        rules = {"positive": HARD, "negative": SEMIHARD, "distance": EUCLIDEAN}
        expected = kernels.triplet(variant, 1, emb, labels, **rules)
        for magnitude in magnitudes:
            power = dtype(2.0) ** np.floor(np.log2(magnitude))
            scaled = kernels.triplet(variant, 1, emb * power, labels, **rules)
            np.testing.assert_array_equal(scaled[1], expected[1])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("count", "width"), [(0, 4), (1, 4), (9, 0), (0, 0)])
def test_empty_and_degenerate_batches(variant, count, width):
    for positive, negative, distance in itertools.product(range(3), range(4), range(3)):
        loss, picks, _, gradient, _ = kernels.triplet(
            variant,
            1,
            np.ones((count, width), np.float32),
            np.arange(count) // 3,
            positive=positive,
            negative=negative,
            distance=distance,
        )
        mined = count == 9 and negative != SEMIHARD
        assert (picks >= 0).all() == (mined or count == 0)
        assert loss[0] == pytest.approx(0.2 if mined else 0)
        assert not gradient.any()


def test_strided_rows_are_read_in_place():
    rng = np.random.default_rng(7)
    wide, labels = rng.standard_normal((30, 40)).astype(np.float32), rng.integers(0, 5, 30)
    rules = {"positive": EASY, "negative": SEMIHARD, "distance": COSINE}
    for variant in VARIANTS:
        a = kernels.triplet(variant, 1, wide[:, 3:20], labels, **rules)
        b = kernels.triplet(variant, 1, np.ascontiguousarray(wide[:, 3:20]), labels, **rules)
        assert [x.tobytes() for x in a[:4]] == [x.tobytes() for x in b[:4]]


def test_an_unknown_variant_is_refused_with_the_usable_ones():
    with pytest.raises(ValueError, match="'neon9' cannot run here; usable: scalar"):
        kernels.triplet(
            "neon9", 1, np.ones((2, 2), np.float32), np.zeros(2, np.int64), positive=0, negative=0, distance=0
        )


@pytest.mark.skipif("TRIPLETOPS_KERNELS_PATH" in os.environ, reason="starts processes without the sanitizer")
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_environment_selects_the_variant(variant):
    code = "from tripletops import _kernels; print(_kernels.selected())"
    environment = {**os.environ, "TRIPLETOPS_ISA": variant}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == variant
