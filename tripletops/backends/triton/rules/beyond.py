"""The nearest negative strictly farther than d_ap + offset, d_ap being the distance of the picked positive.

With an offset of 0 it is the semi-hard one (SHN).
"""

import torch
from torch import Tensor

from tripletops._words import DISTANCE
from tripletops.backends.triton.extremes import nearest_beyond
from tripletops.backends.triton.pairs import measure
from tripletops.backends.triton.rules import Rule
from tripletops.backends.triton.selection import Selection


class BeyondRule(Rule):
    settles = True  # keys are rounded

    def pick(self, selection: Selection) -> Tensor:
        # Without an offset the search starts above the key of the positive, computed as it computes its own
        # keys: duplicates of the positive are excluded by themselves.
        at_positive = selection.numbers.offset == 0
        floors = selection.positive_keys() if at_positive else self._floor_keys(selection)
        return nearest_beyond(selection.rows, floors.where(selection.positive >= 0, torch.inf)[None])[0]

    def floors(self, selection: Selection, d_ap: Tensor) -> Tensor:
        return d_ap + selection.numbers.offset

    def _floor_keys(self, selection: Selection) -> Tensor:
        """(L,) half the squared distance of a candidate at d_ap + offset."""
        rows = selection.rows
        floor = measure(rows, selection.positive[None])[0].double() + selection.numbers.offset
        scaled = floor / rows.frame.unscale
        half = {
            DISTANCE.code["euclidean"]: scaled.square() / 2,
            DISTANCE.code["sqeuclidean"]: scaled / rows.frame.unscale / 2,
            DISTANCE.code["cosine"]: floor,
        }[rows.distance]
        return half.where(floor >= 0, -torch.inf).to(rows.kind)
