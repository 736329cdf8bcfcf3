"""Experiments that are computed, not trained: the numeric figures and theorems of the papers."""

from torch import Tensor


def percent(mask: Tensor) -> float:
    """The share of a mask that is true."""
    return 100 * float(mask.double().mean())
