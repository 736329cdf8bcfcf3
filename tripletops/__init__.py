"""Fused triplet mining and triplet losses for PyTorch, without the N×N distance matrix.

>>> import tripletops as T
>>> loss = T.batch_hard_loss(emb, labels)          # emb (N, D), labels (N,)
>>> loss = T.easy_positive_loss(emb, labels)       # EPHN
>>> triplets = T.mine(emb, labels, positive="easy", negative="semihard")

The functions are those of `_words.FUNCTION`; `__init__.pyi` shows them to type checkers.
"""

from tripletops import diagnostics, evaluate, functional, nn, samplers
from tripletops._words import FUNCTION as _FUNCTION

# As an attribute, `backends` is this function; `from tripletops.backends import …` still reads the package.
from tripletops.backends import backends
from tripletops.functional import Triplets

globals().update({_name: getattr(functional, _name) for _name in _FUNCTION})

__version__ = "0.1.0"

__all__ = ["Triplets", "__version__", "backends", "diagnostics", "evaluate", "nn", "samplers", *_FUNCTION]
