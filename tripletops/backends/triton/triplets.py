"""The ops for one triplet per anchor: mining, the loss of what was picked, its gradient."""

from __future__ import annotations

from math import nan
from typing import Any

import torch
from torch import Tensor

from tripletops.backends.triton import kernels
from tripletops.backends.triton.mining import Ends, Lists, Rules, pull, select
from tripletops.backends.triton.rows import Rows, lifted
from tripletops.backends.triton.tiles import SCORED, launch

MEAN, MEAN_NONZERO, SUM, NONE = range(4)  # the codes of `ops.REDUCTION`


def mine(*arguments: Any) -> tuple[Tensor, Tensor]:
    picks, distances, _ = _mine(*arguments)
    return picks, distances


def _mine(
    emb: Tensor, labels: Tensor, ref_emb: Tensor | None, ref_labels: Tensor | None, self_index: Tensor | None,
    ignore_label: int | None, seed: Tensor | None, positive: int, negative: int, distance: int, cutoff: float,
    nonzero_loss_cutoff: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(2, N) picks and distances, and whether all rows are finite."""
    rows = Rows(emb, labels, ref_emb, ref_labels, self_index, ignore_label, distance)
    picked = select(rows, Rules(seed, positive, negative, cutoff, nonzero_loss_cutoff))
    picks = rows.by_row(torch.stack([picked.positive, picked.negative]).long())
    distances = rows.by_row(torch.stack([picked.d_ap, picked.d_an]))
    return picks.where(rows.finite, -1), distances.where(rows.finite, nan), rows.finite


def triplet_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *mining, loss, reduction, margin, temperature = arguments
    picks, distances, finite = _mine(*mining)
    count, device = picks.shape[1], picks.device
    losses = torch.empty(count, dtype=torch.float64, device=device)
    slopes = torch.empty((2, count), dtype=torch.float64, device=device)
    parameters = torch.tensor([margin, temperature], dtype=torch.float64, device=device)
    launch(
        kernels.score,
        (-(-count // SCORED),),
        *distances.unbind(),
        parameters,
        losses,
        *slopes.unbind(),
        count,
        LOSS=loss,
        ROWS=SCORED,
    )
    losses, slopes = losses.where(finite, nan), slopes.where(finite, nan)
    value = losses
    if reduction != NONE:
        counted = (picks >= 0).all(0) if reduction == MEAN else losses.to(distances.dtype) > 0
        share = 1 if reduction == SUM else 1 / counted.sum().clamp(min=1).double()
        value, slopes = losses.sum() * share, slopes * share
    kind = distances.dtype
    return value.to(kind), picks, torch.cat([distances, slopes.to(kind)])


def triplet_backward(
    grad: Tensor, emb: Tensor, ref_emb: Tensor | None, picks: Tensor, terms: Tensor, distance: int,
    wants_emb: bool, wants_ref: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    index = torch.arange(len(emb), dtype=torch.int32, device=emb.device)
    rows, factor, lift = lifted(emb, distance)
    ref_rows, ref_factor, ref_lift = (None, None, None) if ref_emb is None else lifted(ref_emb, distance)
    ends = Ends(rows, factor, ref_rows, ref_factor, index, distance)
    gradients = fresh_gradients(emb, ref_emb, terms.dtype, wants_emb, wants_ref)
    pull(ends, Lists(picks.to(torch.int32), terms[:2], terms[2:] * grad), *gradients)
    return finished_gradients(emb, gradients, (lift, ref_lift), ~terms[2].isnan().any())


def fresh_gradients(
    emb: Tensor, ref_emb: Tensor | None, kind: torch.dtype, wants_emb: bool, wants_ref: bool
) -> tuple[Tensor | None, Tensor | None]:
    def zeros(like: Tensor) -> Tensor:
        return torch.zeros(like.shape, dtype=kind, device=like.device)

    return zeros(emb) if wants_emb else None, zeros(ref_emb) if wants_ref and ref_emb is not None else None


def finished_gradients(
    emb: Tensor,
    gradients: tuple[Tensor | None, Tensor | None],
    lifts: tuple[Tensor | None, Tensor | None],
    finite: Tensor,
) -> tuple[Tensor, Tensor]:
    """In the type of the rows, (0,) where not wanted, NaN where something was not finite."""

    def finished(gradient: Tensor | None, lift: Tensor | None) -> Tensor:
        if gradient is None:
            return emb.new_empty(0)
        if lift is not None:
            gradient = gradient.double() * lift[:, None]
        return gradient.where(finite, nan).to(emb.dtype)

    return finished(gradients[0], lifts[0]), finished(gradients[1], lifts[1])
