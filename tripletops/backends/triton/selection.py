"""One positive and one negative for every anchor: the order of the steps. Rules are in `rules`."""

from __future__ import annotations

import torch
from torch import Tensor

from tripletops._call import Call, Mined
from tripletops._words import NEGATIVE, POSITIVE, Codes, Numbers
from tripletops.backends.triton import rules
from tripletops.backends.triton.extremes import FARTHEST, Best, keys_of, merged, search
from tripletops.backends.triton.pairs import measure, settle
from tripletops.backends.triton.rows import Rows
from tripletops.backends.triton.scores import Scored, score


class Selection:
    """What rules pick with. Anchors are named by position, candidates by row."""

    def __init__(self, call: Call) -> None:
        self.codes, self.numbers = Codes(*call.codes), Numbers(*call.numbers)
        self._seed = call.seed
        self._positive_rule = rules.rule_of(POSITIVE[POSITIVE.coded[self.codes.positive]], positives=True)
        self._negative_rule = rules.rule_of(NEGATIVE[NEGATIVE.coded[self.codes.negative]], positives=False)
        extremes = self._positive_rule.extreme(), self._negative_rule.extreme()
        # One walk for both sides needs no order. Of walks over positives alone, an order saves the most.
        self.rows = Rows(call, self.codes.distance, ordered=False if all(extremes) else None)
        self._found: Best | None = None  # what the walk over positives has kept, before it is merged
        self._merged: Best | None = None

    @property
    def seed(self) -> Tensor:
        assert self._seed is not None, "a random rule needs a seed"
        return self._seed

    def nobody(self) -> Best:
        row = torch.full((1, 1, self.rows.length), -1, dtype=torch.int32, device=self.rows.device)
        return Best(row, row)

    @property
    def positive(self) -> Tensor:
        """(1, L) the rows of the picked positives."""
        return self._merged_positive().row[0]

    def positive_keys(self) -> Tensor:
        """(1, L) the keys of the picked positives, as the search compares them; infinite for none."""
        if self._positive_rule.extreme() is None:
            return keys_of(self.rows, self.positive[0])[0]
        return self._merged_positive().key[0]

    def _merged_positive(self) -> Best:
        assert self._found is not None, "positives are picked first"
        if self._merged is None:
            self._merged = merged(self._found, negated=self._positive_rule.extreme() is FARTHEST)
        return self._merged

    def select(self, loss: str | None = None) -> Scored:
        """With the losses of the triplets, if one is named."""
        extremes = self._positive_rule.extreme(), self._negative_rule.extreme()
        positive, negative = search(self.rows, *extremes) if any(extremes) else (None, None)
        self._found = self._positive_rule.pick(self) if positive is None else positive
        negative = self._negative_rule.pick(self) if negative is None else negative
        if self._negative_rule.settles:
            negative = self._settled(merged(negative))
        return score(self.rows, self._merged or self._found, negative, self.numbers, loss)

    def _settled(self, negative: Best) -> Best:
        floors, picks = measure(self.rows, self.positive), negative.row[0]
        settle(self.rows, picks, measure(self.rows, picks), floors, self.numbers.offset)
        return negative


def mine(call: Call) -> Mined:
    """One positive and one negative of every anchor, by row."""
    picks, distances, _ = Selection(call).select()
    return Mined(picks, distances)
