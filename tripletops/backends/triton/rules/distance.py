"""A negative drawn by inverse distance density on the sphere ("Sampling Matters in Deep Embedding
Learning"), by the distances of unit rows, whatever the distance of the call is."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tripletops.backends.triton import draws, extremes
from tripletops.backends.triton.device import gumbel, hash_candidate, improve, least_of
from tripletops.backends.triton.draws import keep_largest_hash, start_draw
from tripletops.backends.triton.extremes import Best, merged, start_best
from tripletops.backends.triton.rows import Rows
from tripletops.backends.triton.rules import Rule
from tripletops.backends.triton.selection import Selection
from tripletops.backends.triton.walk import KEYS, Consumer, Keeper, of_split, walk


class Density(NamedTuple):
    seed: Tensor  # () int64
    row: Tensor  # (L,) int32, the anchors' rows
    # () float64
    exponent: Tensor  # (2−D)/2, of the squared distance
    height_exponent: Tensor  # (3−D)/2, of 1 − a quarter of it
    least: Tensor  # a smaller squared distance counts as this one
    limit: Tensor  # from this squared distance on, the weight is 0


class Drawn(NamedTuple):
    """By weight and, where all weights are 0, uniformly: keys and rows, as `extremes.Best` and
    `draws.fresh`."""

    key: Tensor
    row: Tensor
    uniform_key: Tensor
    uniform_row: Tensor


@triton.jit
def _start(given, anchors, KIND: tl.constexpr, RANKS: tl.constexpr):
    best, row = start_best(given, anchors, KIND, RANKS)
    best_uniform, uniform, anchor = start_draw(given, anchors, KIND, RANKS)
    return best, row, best_uniform, uniform, anchor


@triton.jit
def _take_by_weight(state, given, anchors, candidates, RANKS: tl.constexpr):
    best, row, best_uniform, uniform, anchor = state
    noise = hash_candidate(anchor, candidates.row)
    best_uniform, uniform = keep_largest_hash(best_uniform, uniform, noise, candidates.eligible, candidates)
    kind: tl.constexpr = candidates.value.dtype
    exponent, height_exponent = tl.load(given.exponent).to(kind), tl.load(given.height_exponent).to(kind)
    square = tl.maximum(candidates.value * 2, tl.load(given.least).to(kind))
    height = tl.maximum(1.0 - square * 0.25, 2.0**-20)
    key = exponent * tl.log(square) + height_exponent * tl.log(height) + gumbel(noise, kind)
    has_weight = candidates.eligible & (square < tl.load(given.limit).to(kind))
    key, found = least_of(tl.where(has_weight, -key, float("inf")), candidates.row)
    best, row = improve(key, found, best, row)
    return best, row, best_uniform, uniform, anchor


@triton.jit
def _store(state, out, anchors, RANKS: tl.constexpr):
    best, row, best_uniform, uniform, _ = state
    at = of_split(anchors)
    tl.store(out.key + at, best)
    tl.store(out.row + at, row)
    tl.store(out.uniform_key + at, best_uniform)
    tl.store(out.uniform_row + at, uniform)


_BY_WEIGHT = Consumer(_start, _take_by_weight, _store)


class DistanceRule(Rule):
    def pick(self, selection: Selection) -> Tensor:
        rows = selection.rows.under_cosine()
        keeper = Keeper(
            _BY_WEIGHT,
            self._density(selection, rows),
            lambda splits: Drawn(*extremes.fresh(rows, splits), *draws.fresh(rows, splits)),
        )
        _, drawn = walk(rows, "draw", KEYS, negatives=keeper)
        chosen = merged(Best(drawn.key, drawn.row))[1][0]
        return chosen.where(chosen >= 0, merged(Best(drawn.uniform_key, drawn.uniform_row))[1][0])

    @staticmethod
    def _density(selection: Selection, rows: Rows) -> Density:
        numbers, seed = selection.numbers, selection.seed
        least = min(max(numbers.cutoff * numbers.cutoff, 2.0**-100), 2.0**100)  # its logarithm is finite
        limit = numbers.nonzero_loss_cutoff * numbers.nonzero_loss_cutoff
        values = (2 - rows.width) / 2, (3 - rows.width) / 2, least, limit
        density = torch.tensor(values, dtype=torch.float64, device=seed.device)
        return Density(seed, rows.anchors.row, *density.unbind())
