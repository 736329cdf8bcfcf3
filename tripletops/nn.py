"""The losses as modules: options are attributes, checked when the module is made; a batch goes to `forward`.

An attribute may be set to another value between two batches (a margin that grows, say): every call reads and
checks it anew.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from tripletops import functional

_Init = TypeVar("_Init", bound=Callable[..., None])


def _by_keyword(init: _Init) -> _Init:
    """Let a positional argument too many be answered with the keyword to write."""
    _, *parameters = inspect.signature(init).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    allowed = len(parameters) - len(options)
    example = "margin" if "margin" in options else next(iter(options))

    @wraps(init)
    def checked(self: Module, *arguments: Any, **keywords: Any) -> None:
        if len(arguments) > allowed:
            name, value = type(self).__name__, arguments[allowed]
            shown = value if isinstance(value, numbers.Real) else options[example]
            raise TypeError(
                f"{name} takes its options by keyword, as in {name}({example}={shown!r}), got {value!r}; "
                f"they are {', '.join(options)}"
            )
        init(self, *arguments, **keywords)

    return cast("_Init", checked)


class _Loss(Module):
    """A function of `functional` as a module, the function's options being attributes."""

    ignore_label: int | None
    reduction: str
    backend: str | None

    _function: ClassVar[Callable[..., Any]]
    _options: tuple[str, ...]

    def __init__(self, **options: Any) -> None:
        super().__init__()
        functional.check_options(self._function, **options)
        self._options = tuple(options)
        for name, value in options.items():
            setattr(self, name, value)

    def forward(
        self,
        emb: Tensor,
        labels: Tensor,
        *,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        self_index: Tensor | None = None,
    ) -> Any:
        """The loss of embeddings (N, D) with labels (N,); the rest is as in `tripletops.triplet_loss`."""
        return self._function(
            emb, labels, ref_emb=ref_emb, ref_labels=ref_labels, self_index=self_index, **self._arguments()
        )

    def _arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._options}

    def extra_repr(self) -> str:
        """Every option that has a value."""
        options = ((name, getattr(self, name)) for name in self._options)
        return ", ".join(f"{name}={value!r}" for name, value in options if value is not None)


class _DrawingLoss(_Loss):
    """One whose rules may be random."""

    positive: str
    negative: str
    cutoff: float
    nonzero_loss_cutoff: float | None
    distance: str | None

    def forward(
        self,
        emb: Tensor,
        labels: Tensor,
        *,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        self_index: Tensor | None = None,
        generator: torch.Generator | None = None,
        seed: int | Tensor | None = None,
    ) -> Any:
        """The loss of embeddings (N, D) with labels (N,); the rest is as in `tripletops.triplet_loss`."""
        return self._function(
            emb,
            labels,
            ref_emb=ref_emb,
            ref_labels=ref_labels,
            self_index=self_index,
            generator=generator,
            seed=seed,
            **self._arguments(),
        )


class TripletLoss(_DrawingLoss):
    """`tripletops.triplet_loss` as a module.

    Args:
        positive: ``"hard"``, ``"easy"`` or ``"random"``.
        negative: ``"hard"``, ``"semihard"``, ``"easy"``, ``"random"`` or ``"distance"``.
        cutoff, nonzero_loss_cutoff, margin, distance, loss, temperature, ignore_label, reduction, backend: as
            in `tripletops.triplet_loss`.
    """

    margin: float
    loss: str
    temperature: float

    _function = staticmethod(functional.triplet_loss)

    @_by_keyword
    def __init__(
        self,
        *,
        positive: str = "hard",
        negative: str = "hard",
        cutoff: float = 0.5,
        nonzero_loss_cutoff: float | None = 1.4,
        margin: float = 0.2,
        distance: str | None = None,
        loss: str = "margin",
        temperature: float = 1.0,
        ignore_label: int | None = None,
        reduction: str = "mean",
        backend: str | None = None,
    ) -> None:
        super().__init__(
            positive=positive,
            negative=negative,
            cutoff=cutoff,
            nonzero_loss_cutoff=nonzero_loss_cutoff,
            margin=margin,
            distance=distance,
            loss=loss,
            temperature=temperature,
            ignore_label=ignore_label,
            reduction=reduction,
            backend=backend,
        )


class BatchHardLoss(TripletLoss):
    """`tripletops.batch_hard_loss` as a module: the farthest positive and the nearest negative (HPHN).

    Args:
        margin, distance, loss, temperature, ignore_label, reduction, backend: as in
            `tripletops.triplet_loss`.
    """

    @_by_keyword
    def __init__(
        self,
        *,
        margin: float = 0.2,
        distance: str | None = None,
        loss: str = "margin",
        temperature: float = 1.0,
        ignore_label: int | None = None,
        reduction: str = "mean",
        backend: str | None = None,
    ) -> None:
        super().__init__(
            positive="hard",
            negative="hard",
            margin=margin,
            distance=distance,
            loss=loss,
            temperature=temperature,
            ignore_label=ignore_label,
            reduction=reduction,
            backend=backend,
        )


class EasyPositiveLoss(TripletLoss):
    """`tripletops.easy_positive_loss` as a module: nearest positive and, by default, nearest negative.

    Args:
        negative: ``"hard"`` (EPHN), ``"semihard"`` (EPSHN), ``"easy"`` (EPEN), ``"random"`` or
            ``"distance"``.
        loss, cutoff, nonzero_loss_cutoff, margin, distance, temperature, ignore_label, reduction, backend: as
            in `tripletops.easy_positive_loss`.
    """

    @_by_keyword
    def __init__(
        self,
        *,
        negative: str = "hard",
        loss: str = "second_order",
        cutoff: float = 0.5,
        nonzero_loss_cutoff: float | None = 1.4,
        margin: float = 0.2,
        distance: str | None = None,
        temperature: float = 1.0,
        ignore_label: int | None = None,
        reduction: str = "mean",
        backend: str | None = None,
    ) -> None:
        super().__init__(
            positive="easy",
            negative=negative,
            cutoff=cutoff,
            nonzero_loss_cutoff=nonzero_loss_cutoff,
            margin=margin,
            distance=distance,
            loss=loss,
            temperature=temperature,
            ignore_label=ignore_label,
            reduction=reduction,
            backend=backend,
        )


class BatchAllLoss(_Loss):
    """`tripletops.batch_all_loss` as a module: every triplet.

    Args:
        margin, loss, distance, ignore_label, reduction, return_active, backend: as in
            `tripletops.batch_all_loss`. With ``return_active=True`` a call returns a pair.
    """

    margin: float
    loss: str
    distance: str | None
    return_active: bool

    _function = staticmethod(functional.batch_all_loss)

    @_by_keyword
    def __init__(
        self,
        *,
        margin: float = 0.2,
        loss: str = "margin",
        distance: str | None = None,
        ignore_label: int | None = None,
        reduction: str = "mean",
        return_active: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__(
            margin=margin,
            loss=loss,
            distance=distance,
            ignore_label=ignore_label,
            reduction=reduction,
            return_active=return_active,
            backend=backend,
        )


class SemiHardLoss(_Loss):
    """`tripletops.semi_hard_loss` as a module: every positive pair with its semi-hard negative.

    Args:
        margin, distance, ignore_label, reduction, backend: as in `tripletops.semi_hard_loss`.
    """

    margin: float
    distance: str | None

    _function = staticmethod(functional.semi_hard_loss)

    @_by_keyword
    def __init__(
        self,
        *,
        margin: float = 0.2,
        distance: str | None = None,
        ignore_label: int | None = None,
        reduction: str = "mean",
        backend: str | None = None,
    ) -> None:
        super().__init__(
            margin=margin,
            distance=distance,
            ignore_label=ignore_label,
            reduction=reduction,
            backend=backend,
        )


class MultiSimilarityLoss(_Loss):
    """`tripletops.multi_similarity_loss` as a module.

    Args:
        alpha, beta, base, epsilon, positive, ignore_label, reduction, backend: as in
            `tripletops.multi_similarity_loss`.
    """

    alpha: float
    beta: float
    base: float
    epsilon: float | None
    positive: str

    _function = staticmethod(functional.multi_similarity_loss)

    @_by_keyword
    def __init__(
        self,
        *,
        alpha: float = 2.0,
        beta: float = 50.0,
        base: float = 1.0,
        epsilon: float | None = 0.1,
        positive: str = "all",
        ignore_label: int | None = None,
        reduction: str = "mean",
        backend: str | None = None,
    ) -> None:
        super().__init__(
            alpha=alpha,
            beta=beta,
            base=base,
            epsilon=epsilon,
            positive=positive,
            ignore_label=ignore_label,
            reduction=reduction,
            backend=backend,
        )


class ContrastiveLoss(_DrawingLoss):
    """`tripletops.contrastive_loss` as a module.

    Args:
        positive: ``"all"``, ``"hard"``, ``"easy"`` or ``"random"``.
        negative: ``"all"``, ``"hard"``, ``"semihard"``, ``"easy"``, ``"random"`` or ``"distance"``.
        pos_margin, neg_margin, cutoff, nonzero_loss_cutoff, distance, ignore_label, reduction, backend: as in
            `tripletops.contrastive_loss`.
    """

    pos_margin: float
    neg_margin: float

    _function = staticmethod(functional.contrastive_loss)

    @_by_keyword
    def __init__(
        self,
        *,
        pos_margin: float = 0.0,
        neg_margin: float = 1.0,
        positive: str = "all",
        negative: str = "all",
        cutoff: float = 0.5,
        nonzero_loss_cutoff: float | None = 1.4,
        distance: str | None = None,
        ignore_label: int | None = None,
        reduction: str = "mean",
        backend: str | None = None,
    ) -> None:
        super().__init__(
            pos_margin=pos_margin,
            neg_margin=neg_margin,
            positive=positive,
            negative=negative,
            cutoff=cutoff,
            nonzero_loss_cutoff=nonzero_loss_cutoff,
            distance=distance,
            ignore_label=ignore_label,
            reduction=reduction,
            backend=backend,
        )


class BetaMarginLoss(_DrawingLoss):
    """`tripletops.beta_margin_loss` as a module, whose β is a parameter: give it to the optimizer.

    Args:
        beta: where β starts.
        classes: how many classes have a β of their own, for labels from 0 to classes − 1; None: one β for
            all.
        positive: ``"all"``, ``"hard"``, ``"easy"`` or ``"random"``.
        negative: ``"all"``, ``"hard"``, ``"semihard"``, ``"easy"``, ``"random"`` or ``"distance"``.
        alpha, cutoff, nonzero_loss_cutoff, distance, ignore_label, reduction, backend: as in
            `tripletops.beta_margin_loss`.
    """

    alpha: float
    beta: Parameter  # () or (classes,)

    _function = staticmethod(functional.beta_margin_loss)

    @_by_keyword
    def __init__(
        self,
        beta: float = 1.2,
        classes: int | None = None,
        *,
        alpha: float = 0.2,
        positive: str = "random",
        negative: str = "distance",
        cutoff: float = 0.5,
        nonzero_loss_cutoff: float | None = 1.4,
        distance: str | None = None,
        ignore_label: int | None = None,
        reduction: str = "mean",
        backend: str | None = None,
    ) -> None:
        super().__init__(
            alpha=alpha,
            positive=positive,
            negative=negative,
            cutoff=cutoff,
            nonzero_loss_cutoff=nonzero_loss_cutoff,
            distance=distance,
            ignore_label=ignore_label,
            reduction=reduction,
            backend=backend,
        )
        self.beta = Parameter(functional.starting_beta(beta, classes))

    def _arguments(self) -> dict[str, Any]:
        return {**super()._arguments(), "beta": self.beta}

    def extra_repr(self) -> str:
        """The number of classes, if they have a β each, and every option that has a value."""
        classes = f"classes={len(self.beta)}, " if self.beta.dim() else ""
        return classes + super().extra_repr()
