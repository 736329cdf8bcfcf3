"""Fused triplet mining and triplet losses for PyTorch, without the N×N distance matrix.

>>> import tripletops as T
>>> loss = T.batch_hard_loss(emb, labels)          # emb (N, D), labels (N,)
>>> loss = T.easy_positive_loss(emb, labels)       # EPHN
>>> loss = T.multi_similarity_loss(emb, labels)    # one of the objectives over all pairs or all triplets
>>> triplets = T.mine(emb, labels, positive="easy", negative="semihard")
"""

from tripletops import evaluate, nn, samplers

# As an attribute, `backends` is this function; `from tripletops.backends import …` still reads the package.
from tripletops.backends import backends
from tripletops.functional import (
    Triplets,
    batch_all_loss,
    batch_hard_loss,
    beta_margin_loss,
    contrastive_loss,
    easy_positive_loss,
    mine,
    multi_similarity_loss,
    semi_hard_loss,
    triplet_loss,
)

__version__ = "0.1.0"

__all__ = [
    "Triplets",
    "__version__",
    "backends",
    "batch_all_loss",
    "batch_hard_loss",
    "beta_margin_loss",
    "contrastive_loss",
    "easy_positive_loss",
    "evaluate",
    "mine",
    "multi_similarity_loss",
    "nn",
    "samplers",
    "semi_hard_loss",
    "triplet_loss",
]
