"""Uniform draws: the candidate with the largest hash of (seed, anchor, candidate), as a consumer of the
walk."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tripletops.backends.triton.device import NOBODY, hash_anchor, hash_candidate, improve
from tripletops.backends.triton.extremes import NO_ROW, Best, merged, store_best
from tripletops.backends.triton.rows import Rows
from tripletops.backends.triton.walk import NO_VALUES, Consumer, Keeper, walk


class Seeded(NamedTuple):
    seed: Tensor  # () int64
    row: Tensor  # (L,) int32, the anchors' rows


@triton.jit
def start_draw(given, anchors, KIND: tl.constexpr, RANKS: tl.constexpr):
    """(inverted hash, row, hash of the anchor). `given` has what `Seeded` has."""
    nobody = tl.full(anchors.position.shape, NOBODY, tl.int32)
    anchor = hash_anchor(tl.load(given.seed), tl.load(given.row + anchors.position).to(tl.int64))
    return tl.full(anchors.position.shape, 2**31 - 1, tl.int32), nobody, anchor


@triton.jit
def keep_largest_hash(best, row, noise, eligible, candidates):
    """The largest hash of all: inverted, as a signed number. No two candidates of an anchor have the same."""
    inverted = ((0xFFFFFFFF - noise) ^ 0x80000000).to(tl.int32, bitcast=True)
    least = tl.min(tl.where(eligible, inverted, 2**31 - 1), 1)
    chosen = eligible & (inverted == least[:, None])
    found = tl.min(tl.where(chosen, candidates.row[None, :], NOBODY), 1)
    return improve(least, found, best, row)


@triton.jit
def draw_among(state, eligible, candidates):
    """The state after a tile of which these pairs count."""
    best, row, anchor = state
    best, row = keep_largest_hash(best, row, hash_candidate(anchor, candidates.row), eligible, candidates)
    return best, row, anchor


@triton.jit
def _take_uniform(state, given, anchors, candidates, RANKS: tl.constexpr):
    return draw_among(state, candidates.eligible, candidates)


_UNIFORM = Consumer(start_draw, _take_uniform, store_best)


def fresh(rows: Rows, splits: int) -> Best:
    """Keys are inverted hashes."""
    shape = (splits, 1, len(rows.anchors.row))
    full = torch.full(shape, NO_ROW, dtype=torch.int32, device=rows.anchors.row.device)
    return Best(full, full.clone())


def draw(rows: Rows, seed: Tensor, *, positives: bool) -> Tensor:
    """(L,) uniform positives or negatives by row, −1 for none."""
    keeper = Keeper(_UNIFORM, Seeded(seed, rows.anchors.row), lambda splits: fresh(rows, splits))
    if positives:
        best, _ = walk(rows, "draw", NO_VALUES, positives=keeper)
    else:
        _, best = walk(rows, "draw", NO_VALUES, negatives=keeper)
    return merged(best)[1][0]
