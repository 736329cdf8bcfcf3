"""What is minimised: tripletops' losses under the names that the papers' tables need, and two of the tables'
baselines.

An objective is a module of (embeddings, labels); what it learns itself, β or the proxies, are its parameters.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tripletops as T
from train_ref.settings import Settings


class Objective(nn.Module):
    """Common to all: the settings, the number of classes, and the generator that picks are drawn from."""

    can_trim = False

    def __init__(self, settings: Settings, classes: int, backend: str | None, generator: torch.Generator):
        super().__init__()
        self.settings, self.backend, self.generator = settings, backend, generator
        self.reduction = "none" if settings.trim else "mean"
        if settings.trim and not self.can_trim:
            raise ValueError(
                f"trim={settings.trim}: {settings.objective} is no mean over triplets or pairs of an anchor"
            )

    def trimmed(self, loss: Tensor) -> Tensor:
        """The mean of the anchors' losses without the highest ("Learning with Bad Training Data via Iterative
        Trimmed Loss Minimization"). That paper trims the data set; paper 001 and this trim the batch."""
        if not self.settings.trim:
            return loss
        kept = max(1, round((1 - self.settings.trim) * len(loss)))
        return loss.sort().values[:kept].mean()


class Triplet(Objective):
    """One triplet per anchor: any rule for the positive, any for the negative, any loss."""

    can_trim = True

    def forward(self, emb: Tensor, labels: Tensor) -> Tensor:
        settings = self.settings
        loss = T.triplet_loss(
            emb,
            labels,
            positive=settings.positive,
            negative=settings.negative,
            loss=settings.triplet,
            distance=settings.distance,
            margin=settings.margin,
            nonzero_loss_cutoff=None,
            reduction=self.reduction,
            generator=self.generator,
            backend=self.backend,
        )
        return self.trimmed(loss)


class SemiHard(Objective):
    """Every positive pair with its semi-hard negative."""

    def forward(self, emb: Tensor, labels: Tensor) -> Tensor:
        return T.semi_hard_loss(emb, labels, margin=self.settings.margin, backend=self.backend)


class BetaMargin(Objective):
    """The margin loss with a β for each class, which starts at 1.2."""

    can_trim = True

    def __init__(self, settings: Settings, classes: int, backend: str | None, generator: torch.Generator):
        super().__init__(settings, classes, backend, generator)
        self.beta = nn.Parameter(torch.full((classes,), 1.2))

    def forward(self, emb: Tensor, labels: Tensor) -> Tensor:
        loss = T.beta_margin_loss(
            emb,
            labels,
            self.beta,
            alpha=self.settings.margin,
            positive=self.settings.positive,
            negative=self.settings.negative,
            nonzero_loss_cutoff=None,
            reduction=self.reduction,
            generator=self.generator,
            backend=self.backend,
        )
        return self.trimmed(loss)


class MultiSimilarity(Objective):
    def forward(self, emb: Tensor, labels: Tensor) -> Tensor:
        return T.multi_similarity_loss(emb, labels, positive=self.settings.positive, backend=self.backend)


class ProxyNCA(Objective):
    """ "No Fuss Distance Metric Learning using Proxies": every class has a learned point, its proxy. The loss
    of a row is −ln(e^(−d²(own proxy)) / Σ e^(−d²(other proxies))). It costs O(N·classes), so it needs no
    kernel."""

    def __init__(self, settings: Settings, classes: int, backend: str | None, generator: torch.Generator):
        super().__init__(settings, classes, backend, generator)
        self.proxies = nn.Parameter(torch.randn(classes, settings.dim))

    def forward(self, emb: Tensor, labels: Tensor) -> Tensor:
        # −d² of points on the sphere, plus a constant that cancels
        closeness = 2 * F.normalize(emb) @ F.normalize(self.proxies).T
        own = closeness.gather(1, labels[:, None])
        others = closeness.scatter(1, labels[:, None], -torch.inf).logsumexp(1, keepdim=True)
        return (others - own).mean()


OBJECTIVES: dict[str, Callable[[Settings, int, str | None, torch.Generator], Objective]] = {
    "triplet": Triplet,
    "semi_hard": SemiHard,
    "beta_margin": BetaMargin,
    "multi_similarity": MultiSimilarity,
    "proxy_nca": ProxyNCA,
}
