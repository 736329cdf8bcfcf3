"""One triplet per anchor, its positive and its negative picked by rule."""

from __future__ import annotations

import torch

from tripletops._call import Call, Differentiated, Evaluated, Gradients, Totals
from tripletops._words import LOSS
from tripletops.backends.triton.objectives import Objective
from tripletops.backends.triton.pairs import Ends, Lists, Upstream, pull
from tripletops.backends.triton.rows import raws
from tripletops.backends.triton.scores import total
from tripletops.backends.triton.selection import Selection
from tripletops.backends.triton.tiles import is_everyday


class Triplet(Objective):
    def evaluate(self) -> Evaluated:
        assert isinstance(self.given, Call)
        selection = Selection(self.given)
        scored = selection.select(LOSS.coded[self.codes.loss])
        loss, totals, saved = total(selection.rows, scored, self.codes.reduction)
        return Evaluated(loss, totals, scored.picks, saved)

    def differentiate(self, given: Differentiated) -> Gradients:
        emb, ref_emb = given.emb, given.ref_emb
        distances, slopes = given.saved[:2], given.saved[2:]
        lists = Lists(given.picks, distances, slopes)
        upstream = Upstream(given.grad, Totals(*given.totals.unbind()).positive_share)
        gradient = emb.new_empty(emb.shape) if given.wants_emb else None
        ref_gradient = ref_emb.new_empty(ref_emb.shape) if ref_emb is not None and given.wants_ref else None
        ends = Ends(*raws(given, self.codes.distance), None, self.codes.distance)
        pull(ends, lists, gradient, ref_gradient, upstream, searched=is_everyday(len(emb)))
        return Gradients(
            emb.new_empty(0) if gradient is None else gradient,
            emb.new_empty(0) if ref_gradient is None else ref_gradient,
            torch.empty(0, dtype=given.saved.dtype, device=emb.device),
        )
