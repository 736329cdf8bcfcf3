"""The rules by which one positive and one negative of every anchor are picked, a module for each.

The module of the rule `hard` has the class HardRule. Nothing else knows a rule by its name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from torch import Tensor

from tripletops._words import Word

if TYPE_CHECKING:
    from tripletops.backends.triton.selection import Selection
    from tripletops.backends.triton.walk import Consumer


class Rule:
    """How one side of the triplets is picked: the questions that a rule answers. This one picks nothing."""

    def __init__(self, positives: bool) -> None:
        self.positives = positives

    def extreme(self) -> Consumer | None:
        """What is kept, where the rule is an extreme: both sides' extremes are found in one walk."""
        return None

    def pick(self, selection: Selection) -> Tensor:
        """(L,) rows by position, −1 for none. Positives are there before negatives are picked."""
        return selection.nobody()

    # Whether picks are compared with the distances that are reported, once these have been measured. A pick
    # that is not above its floor is then replaced by the nearest candidate that is.
    settles = False

    def floors(self, selection: Selection, d_ap: Tensor) -> Tensor:
        """What the distance of a pick has to be above, given that of the positive."""
        raise AssertionError("this rule does not settle")


def rule_of(word: Word, positives: bool) -> Rule:
    name = word.rule or word.name
    rule: Rule = getattr(import_module(f"{__name__}.{name}"), f"{name.capitalize()}Rule")(positives)
    return rule
