"""All that is cheap to know about an embedding, in one dict.

It takes two searches over all pairs, about as long as two calls of `batch_hard_loss`, and some sums over the
rows.
"""

from __future__ import annotations

from math import nan

from torch import Tensor

from tripletops import functional
from tripletops.diagnostics.geometry import class_diameters_of, collapse_bound, diameter, separation_of
from tripletops.diagnostics.quantiles import distance_quantiles
from tripletops.diagnostics.rows import BLOCK, labelled, number
from tripletops.diagnostics.spectrum import effective_rank

__all__ = ["summary"]

_SAMPLE = 2**15  # pairs of which the quantiles of distances are taken


def summary(
    emb: Tensor, labels: Tensor, *, alpha: float = 0.0, c: float = 2.0, ignore_label: int | None = None
) -> dict[str, float]:
    """The health of an embedding: numbers by name.

    ====================  ==================================================================================
    rows, classes         how many; rows with `ignore_label` are not counted
    valid_share           share of rows that have a positive and a negative
    diameter              (9b), exact
    class_diameter        the largest diameter of a class, exact
    worst_loss            loss of the worst triplet (`separation`), exact
    is_separated          1 where the embedding is α-triplet-separated (Definition 2.1), else 0
    mean_loss             mean batch-hard loss of the valid rows
    active_share          share of the valid rows whose batch-hard loss is above 0
    hard_negative_share   share of the valid rows with a negative nearer than their farthest positive
    collapse_bound        (17), of the diameter and the worst loss
    effective_rank        of the centred rows
    mean_norm, max_norm   of the rows, not centred
    distance_q05, _q50,   quantiles of the distances of pairs: of all of them, or of 32,768 drawn at random
    _q95
    ====================  ==================================================================================

    Without a valid row, mean_loss and the shares of valid rows are NaN.

    Args:
        emb: (N, D), two rows at least.
        labels: (N,) integer class ids.
        alpha: the margin α.
        c: the constant of `collapse_bound`.
        ignore_label: rows with it do not count.
    """
    alpha, given = number("alpha", alpha, at_least=0), labelled(emb, labels, ignore_label)
    emb = given.emb
    if len(emb) < 2:
        raise ValueError(f"summary needs two rows that count, got {len(emb)} of shape {tuple(emb.shape)}")
    mined = functional.mine(emb, given.labels, positive="hard", negative="hard")
    worst, farthest, by_class = separation_of(given, mined, alpha), diameter(emb), class_diameters_of(given)
    norms = [some.double().square().sum(1).sqrt() for some in emb.split(BLOCK)]
    low, middle, high = distance_quantiles(emb, (0.05, 0.5, 0.95), sample=_SAMPLE).values.tolist()
    return {
        "rows": len(emb),
        "classes": len(by_class.classes),
        "diameter": farthest.value,
        "class_diameter": float(by_class.values.max()),
        "worst_loss": worst.loss,
        "is_separated": int(worst.is_separated),
        **_shares(mined, alpha),
        "collapse_bound": collapse_bound(farthest.value, worst.loss, c),
        "effective_rank": effective_rank(emb),
        "mean_norm": sum(float(some.sum()) for some in norms) / len(emb),
        "max_norm": max(float(some.max()) for some in norms),
        "distance_q05": low,
        "distance_q50": middle,
        "distance_q95": high,
    }


def _shares(mined: functional.Triplets, alpha: float) -> dict[str, float]:
    """Of the rows that are valid, and of those rows that are not at rest."""
    valid = mined.valid
    excess = (mined.d_ap.double() - mined.d_an.double())[valid]
    is_empty = len(excess) == 0
    return {
        "valid_share": float(valid.double().mean()),
        "mean_loss": nan if is_empty else float((excess + alpha).clamp(min=0).mean()),
        "active_share": nan if is_empty else float((excess + alpha > 0).double().mean()),
        "hard_negative_share": nan if is_empty else float((excess > 0).double().mean()),
    }
