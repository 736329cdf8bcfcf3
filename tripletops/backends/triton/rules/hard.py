"""The farthest positive (HP), the nearest negative (HN)."""

from tripletops.backends.triton.extremes import FARTHEST, NEAREST
from tripletops.backends.triton.rules import Rule
from tripletops.backends.triton.walk import Consumer


class HardRule(Rule):
    def extreme(self) -> Consumer:
        return FARTHEST if self.positives else NEAREST
