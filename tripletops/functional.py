"""What users call: pick one positive and one negative for every anchor, and take the loss of these triplets.

Here the arguments are checked, once (`_arguments`), the backend is settled (`backends`), and the call is
handed on: to `ops`, or to `reference` where that was asked for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tripletops import ops, reference
from tripletops._arguments import draw_seed, encode_ignore_label, encode_loss, encode_rows, encode_rules
from tripletops.backends import check_word, resolve


class Triplets(NamedTuple):
    """What `mine` picked for every anchor: five tensors of shape (N,)."""

    anchor: Tensor
    """int64, 0 to N-1: the row of ``emb``."""
    positive: Tensor
    """int64, the row of ``ref_emb`` (left out: of ``emb``) picked as positive; -1 where there is none."""
    negative: Tensor
    """int64, likewise the row picked as negative; -1 where there is none."""
    d_ap: Tensor
    """Distance of anchor and positive, float32, or float64 for float64 embeddings; NaN for none."""
    d_an: Tensor
    """Distance of anchor and negative, likewise."""

    @property
    def valid(self) -> Tensor:
        """(N,) bool: the anchors that have both a positive and a negative."""
        return (self.positive >= 0) & (self.negative >= 0)


def triplet_loss(
    emb: Tensor,
    labels: Tensor,
    *,
    positive: str = "hard",
    negative: str = "hard",
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
    margin: float = 0.2,
    distance: str | None = None,
    loss: str = "margin",
    temperature: float = 1.0,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    self_index: Tensor | None = None,
    ignore_label: int | None = None,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """The loss of one triplet per anchor, its positive and its negative picked by rule.

    A positive of an anchor is another row with its label (other by position: an exact duplicate is a
    positive), a negative is a row with another label. An anchor without the one or the other is invalid: it
    has no loss and no gradient and is not counted. With no valid anchor at all (N of 0 or 1, one class only,
    M = 0, …) the loss is exactly 0, connected to the graph. A tie goes to the candidate that comes first.

    The rules by the papers' names: hard+hard is batch-hard, HPHN (Hermans et al., "In Defense of the Triplet
    Loss for Person Re-Identification"); easy+hard EPHN, easy+semihard EPSHN, easy+easy EPEN (Xuan et al.,
    "Improved Embeddings with Easy Positive Triplet Mining"); an easy positive alone EPS ("Reducing Class
    Collapse in Metric Learning with Easy Positive Sampling"); semihard is FaceNet's (Schroff et al.).

    Args:
        emb: (N, D) embeddings, one row an anchor; float16, bfloat16, float32 or float64, any strides. Half
            precision is computed in float32, and the gradient comes in the type of ``emb``.
        labels: (N,) class ids of any integer dtype, any values.
        positive: ``"hard"`` the farthest positive (HP), ``"easy"`` the nearest (EP), ``"random"`` a uniform
            one.
        negative: ``"hard"`` the nearest negative (HN), ``"semihard"`` the nearest one strictly farther than
            the picked positive, if any (SHN), ``"easy"`` the farthest (EN), ``"random"`` a uniform one.
        generator: where the seed of the random rules is drawn from, one draw a call; None: torch's global
            generator. Eager mode only.
        seed: the seed itself, an int or an int64 tensor with one element, instead of ``generator``. The same
            seed gives the same picks on every backend. It is not used where neither rule is random.
        margin: of ``loss="margin"``, 0 or greater.
        distance: ``"euclidean"`` ‖x−y‖, ``"sqeuclidean"`` ‖x−y‖² or ``"cosine"`` 1−S, S being the cosine
            similarity; None: euclidean, or cosine for the losses that are defined on S.
        loss: of one triplet: ``"margin"`` [d_ap − d_an + margin]₊, ``"soft_margin"`` softplus(d_ap − d_an),
            ``"first_order"`` softplus((S_an − S_ap)/τ), which is NCA's, ``"second_order"``
            softplus((½S_an² − S_ap + ½S_ap²)/τ); the last two from "Extreme Triplet Learning", where τ = 1.
        temperature: τ, greater than 0.
        ref_emb: (M, D) rows to pick positives and negatives from, which receive gradients too; None: from
            ``emb``, where a row is never its own positive. If the float types differ, both are promoted.
        ref_labels: (M,) the class ids of ``ref_emb``.
        self_index: (N,) integers, the position of each anchor inside ``ref_emb``, which is then neither its
            positive nor its negative; −1: not in there.
        ignore_label: rows with this label are nobody's anchor, positive or negative, whatever they hold.
            (uint64 labels, and it with them, are read as int64 of the same 64 bits.)
        reduction: ``"mean"`` over valid anchors, ``"mean_nonzero"`` over those with a loss above 0,
            ``"sum"``, or ``"none"``: (N,), with 0 for invalid anchors.
        backend: ``"cpu"``, ``"triton"`` or ``"reference"``; None: what the environment variable
            TRIPLETOPS_BACKEND said at import, else the one made for the device. See `tripletops.backends`.

    Returns:
        A scalar, or (N,) for ``reduction="none"``; float32, or float64 for float64 embeddings. Differentiable
        once, in ``emb`` and ``ref_emb``. NaN, and so is every gradient, where a row that is not ignored is
        not finite.
    """
    options = encode_loss(positive, negative, distance, loss, reduction, margin, temperature)
    emb, labels, ref_emb, ref_labels, self_index, ignore_label = encode_rows(
        emb, labels, ref_emb, ref_labels, self_index, ignore_label
    )
    device = emb.device
    backend = resolve(backend, device)
    drawn = draw_seed(positive, negative, generator, seed, device)
    if backend != "reference":
        return ops.triplet_loss(emb, labels, ref_emb, ref_labels, self_index, ignore_label, drawn, *options)
    *_, margin, temperature = options
    return reference.triplet_loss(
        emb,
        labels,
        positive=positive,
        negative=negative,
        loss=loss,
        distance=distance,
        margin=margin,
        temperature=temperature,
        ref_emb=ref_emb,
        ref_labels=ref_labels,
        self_index=self_index,
        ignore_label=ignore_label,
        reduction=reduction,
        seed=drawn,
    )


def batch_hard_loss(
    emb: Tensor,
    labels: Tensor,
    *,
    margin: float = 0.2,
    distance: str | None = None,
    loss: str = "margin",
    temperature: float = 1.0,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    self_index: Tensor | None = None,
    ignore_label: int | None = None,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """The batch-hard loss: every anchor with its farthest positive and its nearest negative (HPHN).

    "In Defense of the Triplet Loss for Person Re-Identification", Hermans et al., equation 5:
    ``loss="margin"``, and its soft-margin form: ``loss="soft_margin"``. (The paper sums over the batch; here
    that is ``reduction="sum"``.)

    Args:
        emb: (N, D) embeddings, one row an anchor.
        labels: (N,) integer class ids.
        margin, distance, loss, temperature, ref_emb, ref_labels, self_index, ignore_label, reduction,
            backend: as in `triplet_loss`.

    Returns:
        A scalar, or (N,) for ``reduction="none"``; float32, or float64 for float64 embeddings.
    """
    return triplet_loss(
        emb,
        labels,
        positive="hard",
        negative="hard",
        margin=margin,
        distance=distance,
        loss=loss,
        temperature=temperature,
        ref_emb=ref_emb,
        ref_labels=ref_labels,
        self_index=self_index,
        ignore_label=ignore_label,
        reduction=reduction,
        backend=backend,
    )


def easy_positive_loss(
    emb: Tensor,
    labels: Tensor,
    *,
    negative: str = "hard",
    loss: str = "second_order",
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
    margin: float = 0.2,
    distance: str | None = None,
    temperature: float = 1.0,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    self_index: Tensor | None = None,
    ignore_label: int | None = None,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """The easy-positive loss: every anchor with its nearest positive and, by default, its nearest negative.

    ``negative="hard"`` is EPHN, ``negative="semihard"`` EPSHN, ``negative="easy"`` EPEN.
    The default loss is equation 16 of "Extreme Triplet Learning: Effectively Optimizing Easy Positives and
    Hard Negatives", on the cosine similarity; ``"first_order"`` is its equation 1, the loss of "Improved
    Embeddings with Easy Positive Triplet Mining" (Xuan et al.). An easy positive leaves a class its
    sub-clusters ("Reducing Class Collapse in Metric Learning with Easy Positive Sampling").

    Args:
        emb: (N, D) embeddings, one row an anchor.
        labels: (N,) integer class ids.
        negative, loss, generator, seed, margin, distance, temperature, ref_emb, ref_labels, self_index,
            ignore_label, reduction, backend: as in `triplet_loss`.

    Returns:
        A scalar, or (N,) for ``reduction="none"``; float32, or float64 for float64 embeddings.
    """
    return triplet_loss(
        emb,
        labels,
        positive="easy",
        negative=negative,
        generator=generator,
        seed=seed,
        margin=margin,
        distance=distance,
        loss=loss,
        temperature=temperature,
        ref_emb=ref_emb,
        ref_labels=ref_labels,
        self_index=self_index,
        ignore_label=ignore_label,
        reduction=reduction,
        backend=backend,
    )


def mine(
    emb: Tensor,
    labels: Tensor,
    *,
    positive: str,
    negative: str,
    distance: str | None = None,
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    self_index: Tensor | None = None,
    ignore_label: int | None = None,
    backend: str | None = None,
) -> Triplets:
    """Pick one positive and one negative for every anchor; no gradient flows through the result.

    Args:
        emb: (N, D) embeddings, one row an anchor.
        labels: (N,) integer class ids.
        positive, negative: the rules of `triplet_loss`.
        distance: ``"euclidean"``, ``"sqeuclidean"`` or ``"cosine"``; None: euclidean.
        generator, seed, ref_emb, ref_labels, self_index, ignore_label, backend: as in `triplet_loss`.

    Returns:
        `Triplets`, −1 and NaN standing for none: everywhere, if a row that is not ignored is not finite.
    """
    rules = encode_rules(positive, negative, distance)
    emb, labels, ref_emb, ref_labels, self_index, ignore_label = encode_rows(
        emb, labels, ref_emb, ref_labels, self_index, ignore_label
    )
    device = emb.device
    backend = resolve(backend, device)
    drawn = draw_seed(positive, negative, generator, seed, device)
    anchor = torch.arange(emb.shape[0], device=device)
    if backend != "reference":
        picks, distances = ops.mine(emb, labels, ref_emb, ref_labels, self_index, ignore_label, drawn, *rules)
        return Triplets(anchor, *picks.unbind(), *distances.unbind())
    return Triplets(
        anchor,
        *reference.mine(
            emb,
            labels,
            positive=positive,
            negative=negative,
            distance=distance or "euclidean",
            ref_emb=ref_emb,
            ref_labels=ref_labels,
            self_index=self_index,
            ignore_label=ignore_label,
            seed=drawn,
        ),
    )


def check_options(
    *,
    positive: str,
    negative: str,
    margin: float,
    distance: str | None,
    loss: str,
    temperature: float,
    ignore_label: int | None,
    reduction: str,
    backend: str | None,
) -> None:
    """Raise what `triplet_loss` would raise for these options, before there is a batch."""
    encode_loss(positive, negative, distance, loss, reduction, margin, temperature)
    if ignore_label is not None:
        encode_ignore_label(ignore_label, torch.int64)
    check_word(backend)
