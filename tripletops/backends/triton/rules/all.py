"""Every candidate: nothing is picked."""

from tripletops.backends.triton.rules import Rule


class AllRule(Rule):
    pass
