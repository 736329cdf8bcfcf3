"""A uniform candidate: the one with the largest hash."""

from torch import Tensor

from tripletops.backends.triton.draws import draw
from tripletops.backends.triton.rules import Rule
from tripletops.backends.triton.selection import Selection


class RandomRule(Rule):
    def pick(self, selection: Selection) -> Tensor:
        return draw(selection.rows, selection.seed, positives=self.positives)
