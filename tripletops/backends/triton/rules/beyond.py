"""The nearest negative strictly farther than d_ap + offset, d_ap being the distance of the picked positive.

With an offset of 0 it is the semi-hard one (SHN).
"""

from tripletops.backends.triton.extremes import Best, nearest_beyond
from tripletops.backends.triton.pairs import keys_beyond
from tripletops.backends.triton.rules import Rule
from tripletops.backends.triton.selection import Selection


class BeyondRule(Rule):
    settles = True  # keys are rounded

    def pick(self, selection: Selection) -> Best:
        # Without an offset the search starts above the key of the positive, computed as it computes its own
        # keys: duplicates of the positive are excluded by themselves.
        offset = selection.numbers.offset
        if offset == 0:
            return nearest_beyond(selection.rows, selection.positive_keys())
        return nearest_beyond(selection.rows, keys_beyond(selection.rows, selection.positive, offset))
