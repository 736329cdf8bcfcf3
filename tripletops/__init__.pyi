"""What tripletops offers, for type checkers and editors. Written by docs/write.py from
tripletops/_words.py."""

from typing import Literal, overload

from torch import Generator, Tensor

from tripletops import evaluate as evaluate
from tripletops import nn as nn
from tripletops import samplers as samplers
from tripletops.backends import backends as backends
from tripletops.functional import Triplets as Triplets

__all__: list[str]
__version__: str

def triplet_loss(
    emb: Tensor,
    labels: Tensor,
    *,
    positive: str = "hard",
    negative: str = "hard",
    cutoff: float = 0.5,
    nonzero_loss_cutoff: float | None = 1.4,
    loss: str = "margin",
    margin: float = 0.2,
    temperature: float = 1.0,
    distance: str | None = None,
    reduction: str = "mean",
    ignore_label: int | None = None,
    backend: str | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    self_index: Tensor | None = None,
    generator: Generator | None = None,
    seed: int | Tensor | None = None,
) -> Tensor: ...
def batch_hard_loss(
    emb: Tensor,
    labels: Tensor,
    *,
    loss: str = "margin",
    margin: float = 0.2,
    temperature: float = 1.0,
    distance: str | None = None,
    reduction: str = "mean",
    ignore_label: int | None = None,
    backend: str | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    self_index: Tensor | None = None,
) -> Tensor: ...
def easy_positive_loss(
    emb: Tensor,
    labels: Tensor,
    *,
    negative: str = "hard",
    cutoff: float = 0.5,
    nonzero_loss_cutoff: float | None = 1.4,
    loss: str = "second_order",
    margin: float = 0.2,
    temperature: float = 1.0,
    distance: str | None = None,
    reduction: str = "mean",
    ignore_label: int | None = None,
    backend: str | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    self_index: Tensor | None = None,
    generator: Generator | None = None,
    seed: int | Tensor | None = None,
) -> Tensor: ...
@overload
def batch_all_loss(
    emb: Tensor,
    labels: Tensor,
    *,
    loss: str = "margin",
    margin: float = 0.2,
    distance: str | None = None,
    reduction: str = "mean",
    return_active: Literal[False] = ...,
    ignore_label: int | None = None,
    backend: str | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    self_index: Tensor | None = None,
) -> Tensor: ...
@overload
def batch_all_loss(
    emb: Tensor,
    labels: Tensor,
    *,
    loss: str = "margin",
    margin: float = 0.2,
    distance: str | None = None,
    reduction: str = "mean",
    return_active: Literal[True],
    ignore_label: int | None = None,
    backend: str | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    self_index: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
def semi_hard_loss(
    emb: Tensor,
    labels: Tensor,
    *,
    margin: float = 0.2,
    distance: str | None = None,
    reduction: str = "mean",
    ignore_label: int | None = None,
    backend: str | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    self_index: Tensor | None = None,
) -> Tensor: ...
def multi_similarity_loss(
    emb: Tensor,
    labels: Tensor,
    *,
    alpha: float = 2.0,
    beta: float = 50.0,
    base: float = 1.0,
    epsilon: float | None = 0.1,
    positive: str = "all",
    reduction: str = "mean",
    ignore_label: int | None = None,
    backend: str | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    self_index: Tensor | None = None,
) -> Tensor: ...
def contrastive_loss(
    emb: Tensor,
    labels: Tensor,
    *,
    pos_margin: float = 0.0,
    neg_margin: float = 1.0,
    positive: str = "all",
    negative: str = "all",
    cutoff: float = 0.5,
    nonzero_loss_cutoff: float | None = 1.4,
    distance: str | None = None,
    reduction: str = "mean",
    ignore_label: int | None = None,
    backend: str | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    self_index: Tensor | None = None,
    generator: Generator | None = None,
    seed: int | Tensor | None = None,
) -> Tensor: ...
def beta_margin_loss(
    emb: Tensor,
    labels: Tensor,
    beta: float | Tensor,
    *,
    alpha: float = 0.2,
    positive: str = "random",
    negative: str = "distance",
    cutoff: float = 0.5,
    nonzero_loss_cutoff: float | None = 1.4,
    distance: str | None = None,
    reduction: str = "mean",
    ignore_label: int | None = None,
    backend: str | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    self_index: Tensor | None = None,
    generator: Generator | None = None,
    seed: int | Tensor | None = None,
) -> Tensor: ...
def mine(
    emb: Tensor,
    labels: Tensor,
    *,
    positive: str,
    negative: str,
    cutoff: float = 0.5,
    nonzero_loss_cutoff: float | None = 1.4,
    distance: str | None = None,
    ignore_label: int | None = None,
    backend: str | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    self_index: Tensor | None = None,
    generator: Generator | None = None,
    seed: int | Tensor | None = None,
) -> Triplets: ...
