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
NEAREST, SEMIHARD, FARTHEST, RANDOM_NEGATIVE, DISTANCE = range(5)
EUCLIDEAN, SQEUCLIDEAN, COSINE = range(3)
NONE = 3  # the reduction
SUM = 2
# Objectives over many tuples, each with parameters: a margin; none; a margin; alpha, beta, base, epsilon; two
# margins; alpha.
TUPLES = {
    "batch_all": (0, [0.3]),
    "batch_all_soft": (1, []),
    "semi_hard": (2, [0.3]),
    "multi_similarity": (3, [2.0, 50.0, 0.5, 0.1]),
    "contrastive": (4, [0.1, 1.3]),
    "beta_margin": (5, [0.2]),
}
BETA = 1.1


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


def brute_force_tuples(name, d, positives, negatives):
    """The sum of an objective's terms and its derivative by every entry of d, one anchor after the other."""
    total, slopes = 0.0, np.zeros_like(d)
    margin, *more = [*TUPLES[name][1], 0.0]
    for i in range(len(d)):
        p, n = np.flatnonzero(positives[i]), np.flatnonzero(negatives[i])
        d_ap, d_an = d[i, p], d[i, n]
        if name in ("contrastive", "beta_margin"):
            start, end = (margin, more[0]) if name == "contrastive" else (BETA - margin, BETA + margin)
            total += np.maximum(d_ap - start, 0).sum() + np.maximum(end - d_an, 0).sum()
            slopes[i, p] += d_ap > start
            slopes[i, n] -= d_an < end
        elif not (len(p) and len(n)):
            continue
        elif name == "multi_similarity":
            alpha, beta, base, epsilon = TUPLES[name][1]
            kept_p, kept_n = p[d_ap > d_an.min() - epsilon], n[d_an < d_ap.max() + epsilon]
            e_p, e_n = np.exp(-alpha * (1 - d[i, kept_p] - base)), np.exp(beta * (1 - d[i, kept_n] - base))
            total += np.log1p(e_p.sum()) / alpha + np.log1p(e_n.sum()) / beta
            slopes[i, kept_p] += e_p / (1 + e_p.sum())
            slopes[i, kept_n] -= e_n / (1 + e_n.sum())
        elif name == "semi_hard":
            for j in p:
                beyond = n[d_an > d[i, j]]
                k = beyond[np.argmin(d[i, beyond])] if len(beyond) else n[np.argmax(d_an)]
                if d[i, j] - d[i, k] + margin > 0:
                    total += d[i, j] - d[i, k] + margin
                    slopes[i, j] += 1
                    slopes[i, k] -= 1
        else:
            z = d_ap[:, None] - d_an + (margin if name == "batch_all" else 0)
            total += np.maximum(z, 0).sum() if name == "batch_all" else np.logaddexp(z, 0).sum()
            slope = z > 0 if name == "batch_all" else 1 / (1 + np.exp(-z))
            slopes[i, p] += slope.sum(1)
            slopes[i, n] -= slope.sum(0)
    return total, slopes


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


def tuples(name, variant, threads, *args, **options):
    objective, parameters = TUPLES[name]
    beta = BETA if name == "beta_margin" else None
    return kernels.tuples(
        variant, threads, *args, objective=objective, parameters=parameters, beta=beta, **options
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", TUPLES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_objectives_over_many_tuples(variant, name, dtype):
    rng = np.random.default_rng(8)
    for (count, width), classes in itertools.product([(2, 3), (31, 17), (97, 5), (150, 33)], (2, 12, 60)):
        emb, labels = rng.standard_normal((count, width)).astype(dtype), rng.integers(0, classes, count)
        memory = rng.standard_normal((count + 57, width)).astype(dtype)
        ids, me = rng.integers(0, classes, count + 57), rng.integers(-1, count + 57, count)
        for ref in (False, True):
            y, candidate_labels = (memory, ids) if ref else (emb, labels)
            others = np.arange(len(y)) != (me if ref else np.arange(count))[:, None]
            same = labels[:, None] == candidate_labels
            for distance in (COSINE,) if name == "multi_similarity" else (EUCLIDEAN, SQEUCLIDEAN, COSINE):
                u, v = emb.astype(float), y.astype(float)
                norms = [np.linalg.norm(rows, axis=1, keepdims=True) for rows in (u, v)]
                if distance == COSINE:
                    u, v = u / norms[0], v / norms[1]
                apart = u[:, None] - v
                d = (apart**2).sum(-1)
                d = np.sqrt(d) if distance == EUCLIDEAN else d / 2 if distance == COSINE else d
                p, n = (np.where(mask & others, d, np.nan) for mask in (same, ~same))
                if name == "semi_hard" and (np.abs(p[:, :, None] - n[:, None]) < 1e-6 * p[:, :, None]).any():
                    continue  # as far as each other, but for rounding: either may count as farther
                total, slopes = brute_force_tuples(name, d, same & others, ~same & others)
                if not ((same & others).any() and (~same & others).any()):
                    total, slopes = 0.0, slopes * 0
                with np.errstate(divide="ignore", invalid="ignore"):
                    factor = np.where(d > 0, slopes / d, 0) if distance == EUCLIDEAN else slopes
                factor = 2 * factor if distance == SQEUCLIDEAN else factor
                expected = [np.einsum("ij,ijd->id", factor, apart), -np.einsum("ij,ijd->jd", factor, apart)]
                if distance == COSINE:
                    expected = [
                        (g - (g * rows).sum(1, keepdims=True) * rows) / norm
                        for g, rows, norm in zip(expected, (u, v), norms, strict=True)
                    ]
                more = {"ref_emb": memory, "ref_labels": ids, "self_index": me} if ref else {}
                loss, _, *gradients, beta_gradient = tuples(
                    name, variant, 2, emb, labels, distance=distance, reduction=SUM, **more
                )
                exact = 1e-12 if dtype == np.float64 else 1e-5
                np.testing.assert_allclose(loss[0], total, rtol=exact, atol=exact)
                for found, wanted in zip(gradients, expected if ref else [sum(expected)], strict=False):
                    np.testing.assert_allclose(found, wanted, rtol=0, atol=exact * np.abs(wanted).max())
                if name == "beta_margin":
                    np.testing.assert_allclose(beta_gradient, -slopes.sum(1), atol=exact)


@pytest.mark.parametrize("variant", VARIANTS)
def test_threads_change_no_bit_of_objectives_over_many_tuples(variant):
    rng = np.random.default_rng(9)
    emb, labels = rng.standard_normal((500, 33)).astype(np.float32), rng.integers(0, 40, 500)
    memory, ids = rng.standard_normal((700, 33)).astype(np.float32), rng.integers(0, 40, 700)
    emb[50:60], memory[680:] = emb[5], memory[3]
    rules = [{}, {"positive": RANDOM, "negative": DISTANCE, "seed": 5}]
    for name, distance, more, rule in itertools.product(
        TUPLES, (EUCLIDEAN, COSINE), ({}, {"ref_emb": memory, "ref_labels": ids}), rules
    ):
        if name == "multi_similarity" and distance != COSINE:
            continue
        options = {"distance": distance, **more, **(rule if name in ("contrastive", "beta_margin") else {})}
        first = tuples(name, variant, 1, emb, labels, **options)
        for threads in (1, 2, 5):
            again = tuples(name, variant, threads, emb, labels, **options)
            for a, b in zip(first, again, strict=True):
                assert (a is None and b is None) or a.tobytes() == b.tobytes()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", TUPLES)
@pytest.mark.parametrize(("count", "width"), [(0, 4), (1, 4), (9, 0), (0, 0), (9, 4)])
def test_objectives_over_many_tuples_of_empty_and_degenerate_batches(variant, name, count, width):
    labels = np.arange(count) // 3 if width == 0 else np.zeros(count, np.int64)
    for dtype in (np.float16, np.float32, np.float64, np.uint16):
        emb = np.ones((count, width), dtype)
        loss, counts, gradient, *_ = tuples(name, variant, 1, emb, labels, distance=COSINE)
        assert not gradient.any()
        if count < 9 or width > 0:
            assert loss[0] == 0
            assert not counts.any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_threads_and_repeats_change_no_bit(variant):
    rng = np.random.default_rng(2)
    emb, labels = rng.standard_normal((700, 33)).astype(np.float32), rng.integers(0, 90, 700)
    memory, ids = rng.standard_normal((900, 33)).astype(np.float32), rng.integers(0, 90, 900)
    emb[50:60], memory[880:] = emb[5], memory[3]
    for positive, negative, distance in itertools.product(range(3), range(5), range(3)):
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
