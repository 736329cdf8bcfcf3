"""The gradients of a call: what adds to them, and what they are in the end."""

from __future__ import annotations

from math import nan

import torch
from torch import Tensor

from tripletops._call import Differentiated
from tripletops.backends.triton.costs import Cost
from tripletops.backends.triton.pairs import Ends, Lists, pull
from tripletops.backends.triton.rows import Lifted, Rows
from tripletops.backends.triton.stream import subtract_pulls


class Pulling:
    """The gradients of a call while they are being added up."""

    def __init__(self, given: Differentiated, ends: Ends, kind: torch.dtype) -> None:
        def zeros(wanted: bool, like: Tensor | None) -> Tensor | None:
            if not wanted or like is None:
                return None
            return torch.zeros(like.shape, dtype=kind, device=like.device)

        self.ends, self.kind = ends, kind
        self.dtype, self.device = given.emb.dtype, given.emb.device
        self.emb, self.ref_emb = zeros(given.wants_emb, given.emb), zeros(given.wants_ref, given.ref_emb)

    def pairs(self, candidate: Tensor, distance: Tensor, slope: Tensor) -> None:
        """Add what (lists, L) pairs of every anchor pull with, −1 for none, given the derivative of the loss
        by their distance."""
        lists = Lists(candidate, distance, slope.where(candidate >= 0, 0).to(self.kind))
        pull(self.ends, lists, self.emb, self.ref_emb)

    def negatives(self, rows: Rows, cost: Cost, weight: Tensor) -> None:
        """Add what all negatives pull with, by their cost and the weight of each anchor."""
        subtract_pulls(rows, cost, weight.to(self.kind), self.emb, self.ref_emb)

    def finished(self, finite: Tensor) -> tuple[Tensor, Tensor]:
        """In the type of the rows; (0,) where not wanted, NaN where something was not finite."""

        def result(gradient: Tensor | None, side: Lifted | None) -> Tensor:
            if gradient is None or side is None:
                return torch.empty(0, dtype=self.dtype, device=self.device)
            if side.lift is not None:
                gradient = gradient.double() * side.lift[:, None]
            return gradient.where(finite, nan).to(self.dtype)

        return result(self.emb, self.ends.emb), result(self.ref_emb, self.ends.ref_emb)
