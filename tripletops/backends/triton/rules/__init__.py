"""The rules by which one positive and one negative of every anchor are picked, a module for each.

The module of the rule `hard` has the class HardRule. Nothing else knows a rule by its name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tripletops._words import Word

if TYPE_CHECKING:
    from tripletops.backends.triton.extremes import Best
    from tripletops.backends.triton.selection import Selection
    from tripletops.backends.triton.walk import Consumer


class Rule:
    """How one side of the triplets is picked: the questions that a rule answers. This one picks nothing."""

    def __init__(self, positives: bool) -> None:
        self.positives = positives

    def extreme(self) -> Consumer | None:
        """What is kept, where the rule is an extreme: both sides' extremes are found in one walk."""
        return None

    def pick(self, selection: Selection) -> Best:
        """Positives are there before negatives are picked."""
        return selection.nobody()

    # Whether a pick is replaced that turns out not strictly farther than the positive + offset, once the
    # distances that are reported have been measured.
    settles = False


def rule_of(word: Word, positives: bool) -> Rule:
    name = word.rule or word.name
    rule: Rule = getattr(import_module(f"{__name__}.{name}"), f"{name.capitalize()}Rule")(positives)
    return rule
