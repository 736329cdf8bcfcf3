"""One positive and one negative for every anchor: the order of the steps. Rules are in `rules`."""

from __future__ import annotations

from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tripletops._call import Call, Mined
from tripletops._words import NEGATIVE, POSITIVE, Codes, Numbers
from tripletops.backends.triton import rules
from tripletops.backends.triton.extremes import keys_of, search
from tripletops.backends.triton.pairs import measure
from tripletops.backends.triton.rows import Rows


class Picked(NamedTuple):
    """By position, −1 and NaN for none."""

    positive: Tensor
    negative: Tensor
    d_ap: Tensor
    d_an: Tensor


class Selection:
    """What rules pick with. Anchors are named by position, candidates by row."""

    def __init__(self, rows: Rows, codes: Codes, numbers: Any, seed: Tensor | None) -> None:
        self.rows, self.numbers = rows, numbers
        self._seed = seed
        self._positive_rule = rules.rule_of(POSITIVE[POSITIVE.coded[codes.positive]], positives=True)
        self._negative_rule = rules.rule_of(NEGATIVE[NEGATIVE.coded[codes.negative]], positives=False)
        self._positive_key: Tensor | None = None
        self.positive = self.nobody()

    @property
    def seed(self) -> Tensor:
        assert self._seed is not None, "a random rule needs a seed"
        return self._seed

    def nobody(self) -> Tensor:
        return torch.full_like(self.rows.anchors.row, -1)

    def positive_keys(self) -> Tensor:
        """(L,) those of the picked positives, as the search compares them."""
        return keys_of(self.rows, self.positive) if self._positive_key is None else self._positive_key

    def select(self) -> Picked:
        alive = self.rows.anchors.row >= 0
        extremes = self._positive_rule.extreme(), self._negative_rule.extreme()
        positive, negative = search(self.rows, *extremes) if any(extremes) else (None, None)
        if positive is None:
            self.positive = self._positive_rule.pick(self).where(alive, -1)
        else:
            self.positive, self._positive_key = positive.row, positive.key
        picked = self._negative_rule.pick(self) if negative is None else negative.row
        return self._measured(torch.stack([self.positive, picked]).where(alive, -1))

    def _measured(self, picks: Tensor) -> Picked:
        if self._negative_rule.settles:
            d_ap = measure(self.rows, picks[:1])
            floors = self._negative_rule.floors(self, d_ap)
            distances = torch.cat([d_ap, measure(self.rows, picks[1:], floors)])
        else:
            distances = measure(self.rows, picks)
        return Picked(*picks.unbind(), *distances.unbind())


def mine(call: Call) -> tuple[Mined, Tensor]:
    """One positive and one negative of every anchor, by row; and whether all rows are finite."""
    codes = Codes(*call.codes)
    rows = Rows(call, codes.distance)
    picked = Selection(rows, codes, Numbers(*call.numbers), call.seed).select()
    picks = rows.by_row(torch.stack([picked.positive, picked.negative]).long())
    distances = rows.by_row(torch.stack([picked.d_ap, picked.d_an]))
    return Mined(picks.where(rows.finite, -1), distances.where(rows.finite, nan)), rows.finite
