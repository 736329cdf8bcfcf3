"""A uniform one of the positives farther than the nearest negative, or of the negatives nearer than the
farthest positive; where there is none such, a uniform one of all."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tripletops.backends.triton.draws import draw, draw_among, fresh, start_draw
from tripletops.backends.triton.extremes import FARTHEST, NEAREST, merged, search, store_best
from tripletops.backends.triton.rules import Rule
from tripletops.backends.triton.selection import Selection
from tripletops.backends.triton.walk import KEYS, Consumer, Keeper, walk


class Limited(NamedTuple):
    seed: Tensor  # () int64
    row: Tensor  # (L,) int32, the anchors' rows
    limit: Tensor  # (L,) the key that candidates have to be above, or below


@triton.jit
def _take_farther(state, given, anchors, candidates, RANKS: tl.constexpr):
    limit = tl.load(given.limit + anchors.position)[:, None]
    return draw_among(state, candidates.eligible & (candidates.value > limit), candidates)


@triton.jit
def _take_nearer(state, given, anchors, candidates, RANKS: tl.constexpr):
    limit = tl.load(given.limit + anchors.position)[:, None]
    return draw_among(state, candidates.eligible & (candidates.value < limit), candidates)


_FARTHER = Consumer(start_draw, _take_farther, store_best)
_NEARER = Consumer(start_draw, _take_nearer, store_best)


class SofthardRule(Rule):
    """The same tiles compute the limits and the keys, so that duplicates of the limit are not beyond it."""

    def pick(self, selection: Selection) -> Tensor:
        rows = selection.rows

        def keeper(consumer: Consumer, limit: Tensor) -> Keeper:
            given = Limited(selection.seed, rows.anchors.row, limit)
            return Keeper(consumer, given, lambda splits: fresh(rows, splits))

        if self.positives:
            _, nearest = search(rows, negative=NEAREST)
            assert nearest is not None
            drawn, _ = walk(rows, "select", KEYS, positives=keeper(_FARTHER, nearest.key))
        else:
            farthest, _ = search(rows, positive=FARTHEST)
            assert farthest is not None
            _, drawn = walk(rows, "select", KEYS, negatives=keeper(_NEARER, farthest.key))
        chosen = merged(drawn)[1][0]
        return chosen.where(chosen >= 0, draw(rows, selection.seed, positives=self.positives))
