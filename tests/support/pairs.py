"""Objectives of pairs that stand alone: which pairs count, and hinges of single distances."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.oracle import Truth
from tests.support.terms import Terms, errors_of
from tests.support.tuples import ManyTuples


def pairs_of(truth: Truth, call: ManyTuples, picks: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """(N, M) masks of the positive and of the negative pairs that count."""
    positives, negatives = truth.positives, truth.negatives
    both = positives.any() & negatives.any()
    if picks is not None:
        candidate = torch.arange(len(truth.y))
        if call.options["positive"] != "all":
            positives = picks[0][:, None] == candidate
        if call.options["negative"] != "all":
            negatives = picks[1][:, None] == candidate
    return positives & both, negatives & both


def pair_terms(truth: Truth, pairs: Tensor, z: Tensor, size: Tensor) -> Terms:
    """[z]₊ of the pairs, z = ±d plus something of the anchor, `size` that of its parts."""
    terms = Terms(truth)
    off = errors_of(truth) + truth.relative * (size - truth.distance)
    kept = (pairs & (z > -off)).double()
    flips = pairs & (z.abs() <= off) & (off > 0)
    terms.value, terms.off, terms.size = (z.relu() * pairs).sum(1), (off * kept).sum(1), (size * kept).sum(1)
    terms.slope, terms.wobble = (pairs & (z > 0)).double(), flips.double()
    terms.nonzero, terms.flips, terms.always_nonzero = int(terms.slope.sum()), int(flips.sum()), True
    return terms
