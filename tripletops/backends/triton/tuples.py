"""The ops for objectives over many tuples.

Positives are measured from the rows in lists, one for each rank: rank k of an anchor is the k-th candidate of
its class. Lists are made for as many ranks at a time as rows have dimensions, so that they take no more room
than the rows. Negatives are streamed tile by tile, and once more in the backward.
"""

from __future__ import annotations

from functools import cached_property
from math import inf, nan
from typing import NamedTuple

import torch
from torch import Tensor

from tripletops.backends.triton import kernels
from tripletops.backends.triton.mining import (
    ALL_NEGATIVES,
    ALL_POSITIVES,
    Ends,
    Lists,
    Rules,
    measure,
    places,
    pull,
    select,
    walk,
)
from tripletops.backends.triton.rows import COSINE, SQEUCLIDEAN, Rows, Side
from tripletops.backends.triton.tiles import RANKS, Tile, launch, shares, with_tile
from tripletops.backends.triton.triplets import (
    MEAN,
    NONE,
    SUM,
    finished_gradients,
    fresh_gradients,
)

# The codes of `ops.OBJECTIVE`.
BATCH_ALL, BATCH_ALL_SOFT, SEMI_HARD, MULTI_SIMILARITY, CONTRASTIVE, BETA_MARGIN = range(6)
EASY_POSITIVE = 1  # the code of `ops.POSITIVE`
_NOTHING, _EVERY, _BEYOND = kernels.NOTHING.value, kernels.EVERY.value, kernels.BEYOND.value
_HINGE, _SOFT, _EXPONENTIAL = kernels.HINGE.value, kernels.SOFT.value, kernels.EXPONENTIAL.value


class Costs(NamedTuple):
    """What negatives cost each anchor, by position: see `kernels.weigh`."""

    kind: int
    thresholds: Tensor  # (ranks, L)
    limits: Tensor
    nearest: Tensor
    log_sums: Tensor
    rate: Tensor


def softplus(z: Tensor) -> Tensor:
    return torch.logaddexp(z, torch.zeros_like(z))


def log_one_plus(exponent: Tensor, total: Tensor) -> Tensor:
    """ln(1 + e^exponent · total)."""
    return softplus(exponent + total.where(total > 0, 1).log()).where(total > 0, 0)


def both_sides(one: Side, other: Side) -> tuple[Tensor, ...]:
    """The arguments of a tile whose near pairs are measured."""
    return tuple(
        argument
        for side in (one, other)
        for argument in (side.rows, side.half, side.nonzero, side.plain, side.row)
    )


class Tuples:
    """An objective over the rows of a call. Anchors are named by position."""

    def __init__(
        self,
        rows: Rows,
        positive: int,
        negative: int,
        objective: int,
        reduction: int,
        parameters: list[float],
        beta: Tensor | None,
    ) -> None:
        self.rows, self.objective, self.reduction, self.parameters = rows, objective, reduction, parameters
        self.easy = positive == EASY_POSITIVE
        self.pairs_only = objective in (CONTRASTIVE, BETA_MARGIN)
        self.picks_positives = self.pairs_only and positive != ALL_POSITIVES
        self.picks_negatives = self.pairs_only and negative != ALL_NEGATIVES
        self.streams = objective != SEMI_HARD and not self.picks_negatives
        self.beta = None if beta is None else rows.by_position(beta.double())
        self.finite = rows.finite
        if beta is not None and self.beta is not None:
            self.finite = rows.finite & (self.beta.isfinite() | (rows.anchors.row < 0)).all()
        positives, negatives = rows.positives.long(), rows.negatives.long()
        self.valid = (positives > 0) & (negatives > 0)
        self.triplets = (positives * negatives).sum()
        self.any = (positives.sum() > 0) & (negatives.sum() > 0)
        self.length, self.device = len(rows.anchors.row), rows.anchors.order.device

    def by_anchor(self, value: float, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.full((self.length,), value, dtype=dtype, device=self.device)

    # Lists of positives.

    @cached_property
    def ranks(self) -> list[tuple[int, int]]:
        """From which rank to which a list goes: the one thing that has to be read back from the device."""
        most, step = int((self.rows.end - self.rows.begin).max()), max(self.rows.width, RANKS)
        return [(first, min(first + step, most)) for first in range(0, most, step)]

    def positives(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """(ranks, L) rows and distances of the positives of these ranks, −1 and NaN for none."""
        rows = self.rows
        position = rows.begin + torch.arange(first, last, dtype=torch.int32, device=self.device)[:, None]
        there = (position < rows.end) & (position != rows.self_position)
        index = rows.candidates.row
        candidate = index[position.clamp(max=len(index) - 1).long()].where(there, -1)
        if not self.pairs_only:
            candidate = candidate.where(self.valid, -1)
        return candidate, measure(rows, candidate)

    # Negatives, streamed.

    def negative_costs(self, thresholds: Tensor, soft: bool) -> tuple[Tensor, Tensor]:
        """(ranks, L) what the negatives cost and the slopes: see `kernels.cost`."""
        rows = self.rows
        others = len(rows.candidates.row)
        carried = 1 if len(thresholds) == 1 else RANKS
        chunks = -(-len(thresholds) // carried)
        padded = thresholds.new_full((chunks * carried, self.length), -inf)
        padded[: len(thresholds)] = thresholds

        def run(tile: Tile) -> tuple[Tensor, Tensor]:
            blocks = self.length // tile.rows
            splits, tiles = shares(self.device, blocks * chunks, others // tile.columns)
            shape = (splits, chunks * carried, self.length)
            losses = torch.empty(shape, dtype=torch.float64, device=self.device)
            slopes = torch.empty_like(losses)
            launch(
                kernels.cost,
                (blocks, splits, chunks),
                *both_sides(rows.anchors, rows.candidates),
                *places(rows),
                rows.unscale,
                padded,
                losses,
                slopes,
                self.length,
                others,
                rows.anchors.rows.shape[1],
                tiles,
                SOFTPLUS=soft,
                RANKS=carried,
                DISTANCE=rows.distance,
                ZERO_ROWS=rows.zero_rows,
                tile=tile,
            )
            return losses.sum(0)[: len(thresholds)], slopes.sum(0)[: len(thresholds)]

        found: tuple[Tensor, Tensor] = with_tile("cost", rows.anchors.rows, (soft, carried), run)
        return found

    def negative_exponentials(self, limits: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
        """(L,) the nearest negatives and the sums: see `kernels.similarity`."""
        rows = self.rows
        others = len(rows.candidates.row)

        def run(tile: Tile) -> tuple[Tensor, Tensor]:
            blocks = self.length // tile.rows
            splits, tiles = shares(self.device, blocks, others // tile.columns)
            nearest = torch.empty((splits, self.length), dtype=rows.kind, device=self.device)
            sums = torch.empty((splits, self.length), dtype=torch.float64, device=self.device)
            launch(
                kernels.similarity,
                (blocks, splits),
                *both_sides(rows.anchors, rows.candidates),
                *places(rows),
                rows.unscale,
                limits,
                rate,
                nearest,
                sums,
                self.length,
                others,
                rows.anchors.rows.shape[1],
                tiles,
                ZERO_ROWS=rows.zero_rows,
                tile=tile,
            )
            least = nearest.amin(0)
            apart = (least - nearest).double().where(nearest < inf, 0)
            return least, (sums * (rate * apart).exp()).sum(0)

        found: tuple[Tensor, Tensor] = with_tile("similarity", rows.anchors.rows, (), run)
        return found

    def stream_pulls(
        self, costs: Costs, weights: Tensor, wants_emb: bool, wants_ref: bool
    ) -> list[Tensor | None]:
        """(L, W) what negatives pull anchors with, and candidates: see `kernels.weigh`."""
        rows = self.rows
        x, y = rows.anchors, rows.candidates
        if rows.self_mining:
            return [self._weigh(x, x, costs, weights, True, True) if wants_emb else None, None]
        return [
            self._weigh(x, y, costs, weights, True, False) if wants_emb else None,
            self._weigh(y, x, costs, weights, False, True) if wants_ref else None,
        ]

    def _weigh(
        self, one: Side, other: Side, costs: Costs, weights: Tensor, as_anchor: bool, as_candidate: bool
    ) -> Tensor:
        rows = self.rows
        length, others, width = len(one.row), len(other.row), one.rows.shape[1]

        def run(tile: Tile) -> Tensor:
            blocks, spans = length // tile.rows, -(-width // tile.span)
            splits, tiles = shares(self.device, blocks * spans, others // tile.columns)
            pulled = torch.empty((splits, length, width), dtype=rows.kind, device=self.device)
            launch(
                kernels.weigh,
                (blocks, spans, splits),
                *both_sides(one, other),
                *places(rows),
                rows.unscale,
                costs.thresholds,
                weights,
                costs.limits,
                costs.nearest,
                costs.log_sums,
                costs.rate,
                pulled,
                length,
                others,
                width,
                tiles,
                len(costs.thresholds),
                COST=costs.kind,
                AS_ANCHOR=as_anchor,
                AS_CANDIDATE=as_candidate,
                DISTANCE=rows.distance,
                ZERO_ROWS=rows.zero_rows,
                tile=tile,
            )
            return pulled.sum(0)

        found: Tensor = with_tile("weigh", one.rows, (costs.kind, as_anchor, as_candidate), run)
        return found

    # Every triplet: a positive makes a threshold for the anchor's negatives.

    @property
    def soft(self) -> bool:
        return self.objective == BATCH_ALL_SOFT

    def thresholds(self, d_ap: Tensor) -> Tensor:
        margin = 0.0 if self.soft else self.parameters[0]
        return (d_ap + margin).nan_to_num(nan=-inf)  # within the type: the sum may be infinite

    def batch_all(self) -> tuple[Tensor, Tensor]:
        """(L,) losses and numbers of active terms."""
        losses, active = self.by_anchor(0), self.by_anchor(0)
        for first, last in self.ranks:
            loss, slope = self.negative_costs(self.thresholds(self.positives(first, last)[1]), self.soft)
            losses += loss.sum(0)
            active += slope.sum(0)
        return losses, active

    # FaceNet's negative of every (anchor, positive).

    def semi_hard(self, first: int, last: int) -> tuple[Lists, Lists]:
        """The positives of these ranks and their negatives; the weights are 1 and −1 where active."""
        rows = self.rows
        positive, d_ap = self.positives(first, last)
        keys = walk(rows, _EVERY, _NOTHING, ranks=(first, last)).positive_key
        found = walk(rows, _NOTHING, _BEYOND, floors=keys.where(positive >= 0, inf))
        negative = found.negative[: last - first].where(positive >= 0, -1).contiguous()
        d_an = measure(rows, negative, d_ap)
        far = found.farthest.where(self.valid, -1)[None]
        beyond = negative >= 0
        d_an = d_an.where(beyond, measure(rows, far))
        negative = negative.where(beyond, far).where(positive >= 0, -1)
        terms = d_ap.double() - d_an.double() + self.parameters[0]
        active = ((terms > 0) & (positive >= 0)).to(rows.kind)
        return Lists(positive, d_ap, active), Lists(negative, d_an, -active)

    def all_semi_hard(self) -> tuple[Tensor, Tensor]:
        losses, active = self.by_anchor(0), self.by_anchor(0)
        for first, last in self.ranks:
            positive, negative = self.semi_hard(first, last)
            terms = positive.distance.double() - negative.distance.double() + self.parameters[0]
            losses += terms.where(positive.weight > 0, 0).sum(0)
            active += positive.weight.double().sum(0)
        return losses, active

    # Multi-similarity: negatives nearer than the farthest positive + epsilon, positives farther than the
    # nearest negative − epsilon. The state keeps both logs relative to their largest exponents, beside which
    # their own digits would be lost.

    def positive_exponent(self, d: Tensor) -> Tensor:
        alpha, _, base, _ = self.parameters
        return alpha * (d.double() - 1 + base)

    def is_kept(self, d: Tensor, nearest: Tensor) -> Tensor:
        return d.double() > nearest.double() - self.parameters[3]

    def limits(self, farthest: Tensor) -> Tensor:
        limit = (farthest.double() + self.parameters[3]).to(self.rows.kind)
        return limit.where(self.valid, -inf)

    def multi_similarity(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(L,) losses, numbers of active terms, nearest positives, (4, L) state."""
        alpha, beta, base, _ = self.parameters
        kind = self.rows.kind
        farthest, nearest_positive = self.by_anchor(-inf, kind), self.by_anchor(inf, kind)
        easy = torch.full((self.length,), -1, dtype=torch.int32, device=self.device)
        for first, last in self.ranks:
            candidate, d = self.positives(first, last)
            farthest = torch.maximum(farthest, d.nan_to_num(nan=-inf).amax(0))
            least = d.nan_to_num(nan=inf).amin(0)
            # Within a class rows ascend with the rank: of equals the first one is the lowest.
            rank = torch.arange(last - first, device=self.device)[:, None]
            place = rank.where(d == least, last - first).amin(0).clamp(max=last - first - 1)
            better = least < nearest_positive
            easy = candidate.gather(0, place[None])[0].where(better, easy)
            nearest_positive = torch.minimum(nearest_positive, least)
        rate = torch.tensor(beta, dtype=torch.float64, device=self.device)
        nearest, negative_sum = self.negative_exponentials(self.limits(farthest), rate)
        largest = self.positive_exponent(nearest_positive if self.easy else farthest)
        positive_sum = self.by_anchor(1.0 if self.easy else 0.0)
        if not self.easy:
            for first, last in self.ranks:
                d = self.positives(first, last)[1]
                terms = (self.positive_exponent(d) - largest).exp()
                positive_sum += terms.where(self.is_kept(d, nearest), 0).sum(0)
        positive = log_one_plus(largest.where(self.valid, 0), positive_sum.where(self.valid, 0))
        reference = (beta * (1 - base - nearest.double())).where(self.valid, 0)
        negative = log_one_plus(reference, negative_sum.where(self.valid, 0))
        losses = positive / alpha + negative / beta
        state = torch.stack(
            [
                nearest.double(),
                farthest.double(),
                positive - largest,
                (negative - reference).where(negative_sum > 0, 0),
            ]
        )
        return losses, (losses > 0).double(), easy, state.where(self.valid, 0).to(kind)

    # Pairs: [d − start]₊ and [end − d]₊.

    def start(self) -> Tensor:
        if self.beta is None:
            return self.by_anchor(self.parameters[0])
        return self.beta - self.parameters[0]

    def end(self) -> Tensor:
        if self.beta is None:
            return self.by_anchor(self.parameters[1])
        return self.beta + self.parameters[0]

    def positive_pairs(self, d_ap: Tensor) -> tuple[Tensor, Tensor]:
        """(L,) losses and numbers of active terms of the positives."""
        if self.picks_positives:
            return _above_zero(d_ap[None].double() - self.start())
        losses, active = self.by_anchor(0), self.by_anchor(0)
        for first, last in self.ranks:
            loss, number = _above_zero(self.positives(first, last)[1].double() - self.start())
            losses += loss
            active += number
        return losses, active

    def negative_pairs(self, d_an: Tensor) -> tuple[Tensor, Tensor]:
        if self.picks_negatives:
            return _above_zero(self.end() - d_an[None].double())
        losses, slopes = self.negative_costs(self.end().to(self.rows.kind)[None], False)
        return losses[0], slopes[0]

    # What a term counts for in the loss.

    def shares(self, active: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.ones((), dtype=torch.float64, device=self.device)
        if self.reduction in (SUM, NONE):
            return one, one
        first, second = (one / active.clamp(min=1)).unbind()
        if self.objective == CONTRASTIVE:
            return first, second
        if self.objective == BETA_MARGIN:
            both = one / active.sum().clamp(min=1)
            return both, both
        share = second if self.reduction == MEAN else first
        return share, share


def _above_zero(terms: Tensor) -> tuple[Tensor, Tensor]:
    """Of (lists, L) terms, NaN for none: the sums of those above 0 and their numbers."""
    above = terms > 0
    return terms.where(above, 0).sum(0), above.sum(0).double()


def tuples_forward(
    emb: Tensor, labels: Tensor, ref_emb: Tensor | None, ref_labels: Tensor | None, self_index: Tensor | None,
    ignore_label: int | None, seed: Tensor | None, positive: int, negative: int, distance: int, cutoff: float,
    nonzero_loss_cutoff: float, objective: int, reduction: int, parameters: list[float], beta: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss, how many terms count (see `ops.py`), picks and, for the backward, four numbers an anchor.

    Those are the distances of the picks and the numbers of active pairs, or multi-similarity's.
    """
    rows = Rows(emb, labels, ref_emb, ref_labels, self_index, ignore_label, distance)
    tuples = Tuples(rows, positive, negative, objective, reduction, parameters, beta)
    picks = torch.full((2, tuples.length), -1, dtype=torch.int32, device=emb.device)
    state = torch.zeros((4, tuples.length), dtype=rows.kind, device=emb.device)
    negative_loss = tuples.by_anchor(0)
    if tuples.pairs_only:
        if tuples.picks_positives or tuples.picks_negatives:
            picked = select(rows, Rules(seed, positive, negative, cutoff, nonzero_loss_cutoff))
            picks = torch.stack([picked.positive, picked.negative]).where(tuples.any, -1)
            state[:2] = torch.stack([picked.d_ap, picked.d_an])
        positive_loss, pulled = tuples.positive_pairs(state[0])
        negative_loss, pushed = tuples.negative_pairs(state[1])
        state[2:] = torch.stack([pulled, pushed])
        active = torch.stack([pulled.sum(), pushed.sum()])
    elif objective == SEMI_HARD:
        positive_loss, terms = tuples.all_semi_hard()
        active = torch.stack([terms.sum(), rows.positives.where(tuples.valid, 0).sum()])
    elif objective == MULTI_SIMILARITY:
        positive_loss, terms, picks[0], state = tuples.multi_similarity()
        active = torch.stack([terms.sum(), tuples.valid.sum()])
    else:
        positive_loss, terms = tuples.batch_all()
        active = torch.stack([tuples.triplets if tuples.soft else terms.sum(), tuples.triplets])

    counts = tuples.any & tuples.finite
    active = active.long().where(counts, 0)
    if reduction == NONE:
        loss = rows.by_row(positive_loss + negative_loss)
    else:
        share, negative_share = tuples.shares(active)
        loss = positive_loss.sum() * share + negative_loss.sum() * negative_share
    loss = loss.where(tuples.any, 0).where(tuples.finite, nan).to(rows.kind)
    return loss, active, rows.by_row(picks.where(counts, -1).long()), rows.by_row(state)


def tuples_backward(
    grad: Tensor, emb: Tensor, labels: Tensor, ref_emb: Tensor | None, ref_labels: Tensor | None,
    self_index: Tensor | None, ignore_label: int | None, positive: int, negative: int, distance: int,
    objective: int, reduction: int, parameters: list[float], beta: Tensor | None, active: Tensor,
    picks: Tensor, state: Tensor, wants_emb: bool, wants_ref: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows = Rows(emb, labels, ref_emb, ref_labels, self_index, ignore_label, distance)
    tuples = Tuples(rows, positive, negative, objective, reduction, parameters, beta)
    picks, state = rows.by_position(picks).to(torch.int32), rows.by_position(state)
    upstream = grad.double() if reduction == NONE else grad.double().expand(rows.count)
    weight = rows.by_position(upstream).where(tuples.any & (rows.anchors.row >= 0), 0)
    positive_weight, negative_weight = (weight * share for share in tuples.shares(active))
    gradients = fresh_gradients(emb, ref_emb, rows.kind, wants_emb, wants_ref)
    ends = Ends(
        rows.anchors.raw,
        rows.anchors.factor,
        None if rows.self_mining else rows.candidates.raw,
        None if rows.self_mining else rows.candidates.factor,
        rows.anchors.row,
        distance,
    )

    def add_pairs(candidate: Tensor, d: Tensor, slope: Tensor) -> None:
        pull(ends, Lists(candidate, d, slope.where(candidate >= 0, 0).to(rows.kind)), *gradients)

    def add_streamed(costs: Costs) -> None:
        pulled = tuples.stream_pulls(costs, negative_weight.to(rows.kind), wants_emb, wants_ref)
        for gradient, side, pulls in zip(gradients, (rows.anchors, rows.candidates), pulled, strict=True):
            if gradient is not None and pulls is not None:
                gradient -= _streamed_gradient(rows, side, pulls)

    nothing = torch.zeros((1, tuples.length), dtype=rows.kind, device=emb.device)
    hinge = Costs(_HINGE, nothing, nothing[0], nothing[0], nothing[0], rows.unscale)
    if tuples.pairs_only:
        start, end = tuples.start(), tuples.end()
        if tuples.picks_positives:
            add_pairs(picks[:1], state[:1], (state[:1] > start) * positive_weight)
        else:
            for first, last in tuples.ranks:
                candidate, d = tuples.positives(first, last)
                add_pairs(candidate, d, (d > start) * positive_weight)
        if tuples.picks_negatives:
            add_pairs(picks[1:], state[1:2], (state[1:2] < end) * -negative_weight)
        else:
            add_streamed(hinge._replace(thresholds=end.to(rows.kind)[None]))
    elif objective == SEMI_HARD:
        for first, last in tuples.ranks:
            positives, negatives = tuples.semi_hard(first, last)
            add_pairs(positives.candidate, positives.distance, positives.weight * positive_weight)
            add_pairs(negatives.candidate, negatives.distance, negatives.weight * negative_weight)
    elif objective == MULTI_SIMILARITY:
        nearest, farthest, positive_log_sum, negative_log_sum = state
        log_sum = tuples.positive_exponent(farthest) + positive_log_sum.double()
        for first, last in tuples.ranks:
            candidate, d = tuples.positives(first, last)
            exponent = tuples.positive_exponent(d)
            if tuples.easy:
                slope = torch.sigmoid(exponent) * (candidate == picks[0])
            else:
                slope = (exponent - log_sum).exp() * tuples.is_kept(d, nearest)
            add_pairs(candidate, d, slope * positive_weight)
        rate = torch.tensor(parameters[1], dtype=torch.float64, device=emb.device)
        limits = tuples.limits(farthest)
        add_streamed(Costs(_EXPONENTIAL, nothing, limits, nearest, negative_log_sum, rate))
    else:
        for first, last in tuples.ranks:
            candidate, d = tuples.positives(first, last)
            thresholds = tuples.thresholds(d)
            _, slope = tuples.negative_costs(thresholds, tuples.soft)
            add_pairs(candidate, d, slope * positive_weight)
            add_streamed(hinge._replace(kind=_SOFT if tuples.soft else _HINGE, thresholds=thresholds))

    beta_gradient = emb.new_empty(0, dtype=rows.kind)
    if beta is not None:
        share, negative_share = tuples.shares(active)
        by_anchor = weight * (state[3].double() * negative_share - state[2].double() * share)
        beta_gradient = rows.by_row(by_anchor).where(tuples.finite, nan).to(rows.kind)
    lifts = rows.anchors.lift, rows.candidates.lift
    return (*finished_gradients(emb, gradients, lifts, tuples.finite), beta_gradient)


def _streamed_gradient(rows: Rows, side: Side, pulled: Tensor) -> Tensor:
    """By row: minus the gradient of what negatives, and only those, cost."""
    pulled = side.by_row(pulled[:, : rows.width])
    if rows.distance != COSINE:
        # Euclidean distances were those of framed rows too, so that the scale has cancelled.
        return (pulled * rows.unscale * 2).to(rows.kind) if rows.distance == SQEUCLIDEAN else pulled
    # What pulls at the unit row, less its part along that row.
    unit = side.raw.where(side.kept[:, None], 0).double() * side.factor[:, None]
    pulled = pulled.double()
    along = (pulled * unit).sum(1, keepdim=True)
    return ((pulled - along * unit) * side.factor[:, None]).to(rows.kind)
