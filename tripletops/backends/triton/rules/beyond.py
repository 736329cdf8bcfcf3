"""The nearest negative strictly farther than the picked positive: the semi-hard one (SHN)."""

import torch
from torch import Tensor

from tripletops.backends.triton.extremes import nearest_beyond
from tripletops.backends.triton.rules import Rule
from tripletops.backends.triton.selection import Selection


class BeyondRule(Rule):
    settles = True  # keys are rounded

    def pick(self, selection: Selection) -> Tensor:
        # The search starts above the key of the positive, computed as it computes its own keys: duplicates of
        # the positive are excluded by themselves.
        floors = selection.positive_keys()
        return nearest_beyond(selection.rows, floors.where(selection.positive >= 0, torch.inf)[None])[0]

    def floors(self, selection: Selection, d_ap: Tensor) -> Tensor:
        return d_ap
