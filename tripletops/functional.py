"""What users call: losses of one mined triplet per anchor, the mining alone, and objectives over many tuples.

Here the arguments are checked, once (`_arguments`), the backend is settled (`backends`), and the call is
handed on: to `ops`, or to `reference` where that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from tripletops import ops, reference
from tripletops._arguments import (
    Objective,
    Rows,
    draw_seed,
    encode_batch_all,
    encode_beta,
    encode_beta_margin,
    encode_contrastive,
    encode_ignore_label,
    encode_loss,
    encode_multi_similarity,
    encode_rows,
    encode_rules,
    encode_semi_hard,
)
from tripletops._arguments import starting_beta as starting_beta  # for nn
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

    def indices(self) -> tuple[Tensor, Tensor, Tensor]:
        """Anchor, positive and negative of the valid anchors alone.

        This is what the losses of other libraries take, and what a tensor can be indexed with: there, -1
        would stand for the last row.
        """
        valid = self.valid
        return self.anchor[valid], self.positive[valid], self.negative[valid]


def triplet_loss(
    emb: Tensor,
    labels: Tensor,
    *,
    positive: str = "hard",
    negative: str = "hard",
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
    cutoff: float = 0.5,
    nonzero_loss_cutoff: float | None = 1.4,
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
            precision is computed in float32, and the gradient comes in the type of ``emb``. Rows are not
            normalised, but for the cosine.
        labels: (N,) class ids of any integer dtype, any values.
        positive: ``"hard"`` the farthest positive (HP), ``"easy"`` the nearest (EP), ``"random"`` a uniform
            one.
        negative: ``"hard"`` the nearest negative (HN), ``"semihard"`` the nearest one strictly farther than
            the picked positive, if any (SHN), ``"easy"`` the farthest (EN), ``"random"`` a uniform one,
            ``"distance"`` one drawn by the inverse of the density that distances have on the sphere (Wu et
            al., "Sampling Matters in Deep Embedding Learning"): by the weight d^(2−D)·(1−d²/4)^((3−D)/2),
            d = √(2−2S), S being the cosine similarity whatever ``distance`` is.
        generator: where the seed of the random rules is drawn from, one draw a call; None: torch's global
            generator. Eager mode only.
        seed: the seed itself, an int or an int64 tensor with one element, instead of ``generator``. The same
            seed gives the same picks on every backend. It is not used where neither rule is random.
        cutoff: of ``negative="distance"``, greater than 0: a smaller d counts as this one.
        nonzero_loss_cutoff: of ``negative="distance"``, greater than 0: a negative at this d or beyond has
            weight 0; None: there is no such limit. Where all weights are 0, the draw is uniform.
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
        once, in ``emb`` and ``ref_emb``, by autograd; forward mode, the transforms of torch.func and
        torch.jit.trace are refused. (``backend="reference"`` has derivatives of any order, by forward mode
        and torch.func too.) NaN, and so is every gradient, where a row that is not ignored is not finite.
    """
    options = encode_loss(
        positive, negative, distance, cutoff, nonzero_loss_cutoff, loss, reduction, margin, temperature
    )
    emb, labels, ref_emb, ref_labels, self_index, ignore_label = encode_rows(
        emb, labels, ref_emb, ref_labels, self_index, ignore_label
    )
    backend = resolve(backend, emb.device)
    drawn = draw_seed(positive, negative, generator, seed, backend, emb, ref_emb)
    if backend != "reference":
        return ops.triplet_loss(
            backend, emb, labels, ref_emb, ref_labels, self_index, ignore_label, drawn, *options
        )
    _, _, _, cutoff, nonzero_loss_cutoff, _, _, margin, temperature = options
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
        cutoff=cutoff,
        nonzero_loss_cutoff=nonzero_loss_cutoff,
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
    cutoff: float = 0.5,
    nonzero_loss_cutoff: float | None = 1.4,
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
        negative, loss, generator, seed, cutoff, nonzero_loss_cutoff, margin, distance, temperature, ref_emb,
            ref_labels, self_index, ignore_label, reduction, backend: as in `triplet_loss`.

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
        cutoff=cutoff,
        nonzero_loss_cutoff=nonzero_loss_cutoff,
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
    cutoff: float = 0.5,
    nonzero_loss_cutoff: float | None = 1.4,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    self_index: Tensor | None = None,
    ignore_label: int | None = None,
    backend: str | None = None,
) -> Triplets:
    """Pick one positive and one negative for every anchor; no gradient flows through the result.

    To hand the triplets to a loss of another library, take `Triplets.indices`.

    Args:
        emb: (N, D) embeddings, one row an anchor.
        labels: (N,) integer class ids.
        positive, negative: the rules of `triplet_loss`.
        distance: ``"euclidean"``, ``"sqeuclidean"`` or ``"cosine"``; None: euclidean.
        generator, seed, cutoff, nonzero_loss_cutoff, ref_emb, ref_labels, self_index, ignore_label, backend:
            as in `triplet_loss`.

    Returns:
        `Triplets`, −1 and NaN standing for none: everywhere, if a row that is not ignored is not finite.
    """
    rules = encode_rules(positive, negative, distance, cutoff, nonzero_loss_cutoff)
    emb, labels, ref_emb, ref_labels, self_index, ignore_label = encode_rows(
        emb, labels, ref_emb, ref_labels, self_index, ignore_label
    )
    backend = resolve(backend, emb.device)
    drawn = draw_seed(positive, negative, generator, seed, backend, emb, ref_emb)
    anchor = torch.arange(emb.shape[0], device=emb.device)
    if backend != "reference":
        picks, distances = ops.mine(
            backend, emb, labels, ref_emb, ref_labels, self_index, ignore_label, drawn, *rules
        )
        return Triplets(anchor, *picks.unbind(), *distances.unbind())
    _, _, _, cutoff, nonzero_loss_cutoff = rules
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
            cutoff=cutoff,
            nonzero_loss_cutoff=nonzero_loss_cutoff,
        ),
    )


@overload
def batch_all_loss(
    emb: Tensor, labels: Tensor, *, margin: float = ..., loss: str = ..., distance: str | None = ...,
    ref_emb: Tensor | None = ..., ref_labels: Tensor | None = ..., self_index: Tensor | None = ...,
    ignore_label: int | None = ..., reduction: str = ..., return_active: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def batch_all_loss(
    emb: Tensor, labels: Tensor, *, margin: float = ..., loss: str = ..., distance: str | None = ...,
    ref_emb: Tensor | None = ..., ref_labels: Tensor | None = ..., self_index: Tensor | None = ...,
    ignore_label: int | None = ..., reduction: str = ..., return_active: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def batch_all_loss(
    emb: Tensor,
    labels: Tensor,
    *,
    margin: float = 0.2,
    loss: str = "margin",
    distance: str | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    self_index: Tensor | None = None,
    ignore_label: int | None = None,
    reduction: str = "mean",
    return_active: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The batch-all loss: every triplet of an anchor, a positive of it and a negative of it.

    "In Defense of the Triplet Loss for Person Re-Identification", Hermans et al., equation 6. Its "batch all
    (≠ 0)" is ``reduction="mean_nonzero"``.

    Args:
        emb: (N, D) embeddings, one row an anchor.
        labels: (N,) integer class ids.
        loss: of one triplet: ``"margin"`` [d_ap − d_an + margin]₊ or ``"soft_margin"`` softplus(d_ap − d_an).
        reduction: ``"mean"`` over all triplets, ``"mean_nonzero"`` over the active ones, those with a loss
            above 0 (none: 0), ``"sum"``, or ``"none"``: (N,), the sum over the triplets of each anchor.
        return_active: also return how many triplets are active; with ``"soft_margin"`` all of them are.
        margin, distance, ref_emb, ref_labels, self_index, ignore_label, backend: as in `triplet_loss`.

    Returns:
        A scalar, or (N,) for ``reduction="none"``; float32, or float64 for float64 embeddings. With
        ``return_active=True``, a pair of that and the count, an int64 scalar.
    """
    objective = encode_batch_all(margin, loss, distance, reduction, return_active)
    rows = encode_rows(emb, labels, ref_emb, ref_labels, self_index, ignore_label)
    value, active = _tuples_loss(reference.batch_all_loss, objective, rows, backend)
    return (value, active) if return_active else value


def semi_hard_loss(
    emb: Tensor,
    labels: Tensor,
    *,
    margin: float = 0.2,
    distance: str | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    self_index: Tensor | None = None,
    ignore_label: int | None = None,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """The semi-hard loss: every pair of an anchor and a positive of it, with a negative picked for the pair.

    That is the nearest negative strictly farther than this positive or, where there is none, the farthest
    negative: the rule of "FaceNet" (Schroff et al.) as TensorFlow's triplet_semihard_loss states it. (One
    positive an anchor, and none such: no triplet, is `triplet_loss` with ``negative="semihard"``.)

    Args:
        emb: (N, D) embeddings, one row an anchor.
        labels: (N,) integer class ids.
        reduction: of [d_ap − d_an + margin]₊: ``"mean"`` over all pairs whose anchor has a negative,
            ``"mean_nonzero"`` over those with a loss above 0 (none: 0), ``"sum"``, or ``"none"``: (N,), the
            sum over the pairs of each anchor.
        margin, distance, ref_emb, ref_labels, self_index, ignore_label, backend: as in `triplet_loss`.

    Returns:
        A scalar, or (N,) for ``reduction="none"``; float32, or float64 for float64 embeddings.
    """
    objective = encode_semi_hard(margin, distance, reduction)
    rows = encode_rows(emb, labels, ref_emb, ref_labels, self_index, ignore_label)
    return _tuples_loss(reference.semi_hard_loss, objective, rows, backend)[0]


def multi_similarity_loss(
    emb: Tensor,
    labels: Tensor,
    *,
    alpha: float = 2.0,
    beta: float = 50.0,
    base: float = 1.0,
    epsilon: float | None = 0.1,
    positive: str = "all",
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    self_index: Tensor | None = None,
    ignore_label: int | None = None,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """The multi-similarity loss: all pairs of an anchor, weighed against each other.

    "Multi-Similarity Loss with General Pair Weighting for Deep Metric Learning", Wang et al., on the cosine
    similarity S. The loss of an anchor is (1/α)·ln(1 + Σ_P e^(−α(S−λ))) + (1/β)·ln(1 + Σ_N e^(β(S−λ))), P and
    N being what mining leaves of its positives and negatives: N the negatives with S above the smallest S of
    a positive less ε, P the positives with S below the largest S of a negative plus ε. An empty sum is 0. An
    anchor without a positive or without a negative has no loss.

    Args:
        emb: (N, D) embeddings, one row an anchor.
        labels: (N,) integer class ids.
        alpha: α, greater than 0.
        beta: β, greater than 0.
        base: λ.
        epsilon: ε, 0 or greater; None: nothing is mined, P and N are all positives and all negatives.
        positive: ``"all"``, or ``"easy"``: P is the nearest positive alone, whatever ε is ("Reducing Class
            Collapse in Metric Learning with Easy Positive Sampling"); N stays as it was.
        reduction: ``"mean"`` over the anchors that have a positive and a negative, ``"mean_nonzero"`` over
            those with a loss above 0 (none: 0), ``"sum"``, or ``"none"``: (N,), with 0 for the others.
        ref_emb, ref_labels, self_index, ignore_label, backend: as in `triplet_loss`.

    Returns:
        A scalar, or (N,) for ``reduction="none"``; float32, or float64 for float64 embeddings.
    """
    objective = encode_multi_similarity(alpha, beta, base, epsilon, positive, reduction)
    rows = encode_rows(emb, labels, ref_emb, ref_labels, self_index, ignore_label)
    return _tuples_loss(reference.multi_similarity_loss, objective, rows, backend)[0]


def contrastive_loss(
    emb: Tensor,
    labels: Tensor,
    *,
    pos_margin: float = 0.0,
    neg_margin: float = 1.0,
    positive: str = "all",
    negative: str = "all",
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
    cutoff: float = 0.5,
    nonzero_loss_cutoff: float | None = 1.4,
    distance: str | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    self_index: Tensor | None = None,
    ignore_label: int | None = None,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """The contrastive loss: positives pulled to within one margin, negatives pushed beyond another.

    [d_ap − pos_margin]₊ of positive pairs and [neg_margin − d_an]₊ of negative pairs. "Dimensionality
    Reduction by Learning an Invariant Mapping", Hadsell et al., squares both and adds them up; here each kind
    has its own mean. Pairs stand alone: an anchor without a negative still has its positive pairs, and the
    other way round. But a batch without any positive pair, or without any negative pair, has the loss 0.

    Args:
        emb: (N, D) embeddings, one row an anchor.
        labels: (N,) integer class ids.
        pos_margin, neg_margin: 0 or greater.
        positive: ``"all"``: every positive pair; or a rule of `triplet_loss`, one for each anchor.
        negative: ``"all"``: every negative pair; or a rule of `triplet_loss`, one for each anchor.
            ``"semihard"`` needs a picked positive.
        reduction: ``"mean"``: the mean of the positive terms above 0 plus the mean of the negative terms
            above 0; ``"mean_nonzero"``: the same; ``"sum"`` of all terms; ``"none"``: (N,), the sum of the
            terms of each anchor.
        generator, seed, cutoff, nonzero_loss_cutoff, distance, ref_emb, ref_labels, self_index, ignore_label,
            backend: as in `triplet_loss`.

    Returns:
        A scalar, or (N,) for ``reduction="none"``; float32, or float64 for float64 embeddings.
    """
    objective = encode_contrastive(
        pos_margin,
        neg_margin,
        positive=positive,
        negative=negative,
        cutoff=cutoff,
        nonzero_loss_cutoff=nonzero_loss_cutoff,
        distance=distance,
        reduction=reduction,
    )
    rows = encode_rows(emb, labels, ref_emb, ref_labels, self_index, ignore_label)
    return _tuples_loss(reference.contrastive_loss, objective, rows, backend, generator, seed)[0]


def beta_margin_loss(
    emb: Tensor,
    labels: Tensor,
    beta: float | Tensor,
    *,
    alpha: float = 0.2,
    positive: str = "random",
    negative: str = "distance",
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
    cutoff: float = 0.5,
    nonzero_loss_cutoff: float | None = 1.4,
    distance: str | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    self_index: Tensor | None = None,
    ignore_label: int | None = None,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """The margin loss with a boundary β that is learned: positives within it, negatives beyond it, by α.

    "Sampling Matters in Deep Embedding Learning", Wu et al.: [d_ap − β + α]₊ of positive pairs
    and [β − d_an + α]₊ of negative pairs, the negatives drawn by the inverse of the density that distances
    have (see ``negative`` of `triplet_loss`). Pairs stand alone, as in `contrastive_loss`.

    Args:
        emb: (N, D) embeddings, one row an anchor.
        labels: (N,) integer class ids.
        beta: β, a number, a tensor () or a tensor (C,) with a number for each class, of which an anchor has
            its own class's: the labels of rows that are not ignored must then be in [0, C). A tensor of any
            of the float types receives a gradient in its own type.
        alpha: α, 0 or greater.
        positive, negative: as in `contrastive_loss`.
        reduction: ``"mean"``: the sum of all terms by the number of those above 0 (none: 0);
            ``"mean_nonzero"``: the same; ``"sum"``; ``"none"``: (N,), the sum of the terms of each anchor.
        generator, seed, cutoff, nonzero_loss_cutoff, distance, ref_emb, ref_labels, self_index, ignore_label,
            backend: as in `triplet_loss`.

    Returns:
        A scalar, or (N,) for ``reduction="none"``; float32, or float64 for float64 embeddings. NaN
        where a row that is not ignored is not finite, or its β.
    """
    objective = encode_beta_margin(
        alpha,
        positive=positive,
        negative=negative,
        cutoff=cutoff,
        nonzero_loss_cutoff=nonzero_loss_cutoff,
        distance=distance,
        reduction=reduction,
    )
    rows = encode_rows(emb, labels, ref_emb, ref_labels, self_index, ignore_label)
    boundary = encode_beta(beta, rows)
    return _tuples_loss(reference.beta_margin_loss, objective, rows, backend, generator, seed, boundary)[0]


def _tuples_loss(
    plain: Callable[..., Any],
    objective: Objective,
    rows: Rows,
    backend: str | None,
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
    beta: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """The value of an objective, and of batch_all the number of active triplets; `plain` is its reference."""
    codes, words = objective
    emb, labels, ref_emb, ref_labels, self_index, ignore_label = rows
    backend = resolve(backend, emb.device)
    drawn = None
    if "negative" in words:  # else there is nothing to draw
        drawn = draw_seed(words["positive"], words["negative"], generator, seed, backend, emb, ref_emb, beta)
        words["seed"] = drawn
    if backend != "reference":
        return ops.tuples_loss(backend, *rows, drawn, *codes, beta)
    if beta is not None:
        words["beta"] = beta
    result = plain(
        emb,
        labels,
        ref_emb=ref_emb,
        ref_labels=ref_labels,
        self_index=self_index,
        ignore_label=ignore_label,
        **words,
    )
    return result if isinstance(result, tuple) else (result, None)


def check_options(
    function: Callable[..., Any], *, ignore_label: int | None, backend: str | None, **options: Any
) -> None:
    """Raise what `function`, a loss, would raise for these options, before there is a batch."""
    _ENCODERS[function](**options)
    if ignore_label is not None:
        encode_ignore_label(ignore_label, torch.int64)
    check_word(backend)


_ENCODERS: dict[Callable[..., Any], Callable[..., Any]] = {
    triplet_loss: encode_loss,
    batch_all_loss: encode_batch_all,
    semi_hard_loss: encode_semi_hard,
    multi_similarity_loss: encode_multi_similarity,
    contrastive_loss: encode_contrastive,
    beta_margin_loss: encode_beta_margin,
}
