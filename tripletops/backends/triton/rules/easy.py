"""The nearest positive (EP), the farthest negative (EN)."""

from tripletops.backends.triton.extremes import FARTHEST, NEAREST
from tripletops.backends.triton.rules import Rule
from tripletops.backends.triton.walk import Consumer


class EasyRule(Rule):
    def extreme(self) -> Consumer:
        return NEAREST if self.positives else FARTHEST
