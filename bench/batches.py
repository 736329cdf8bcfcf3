"""The batches that everything is measured on: the same numbers every time they are asked for."""

from __future__ import annotations

import torch
from torch import Tensor

SPREAD = 0.1  # of a cluster's rows around its centre, the centres having a spread of 1


def embeddings(n: int, d: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Normally distributed rows, which know nothing of their classes."""
    generator = torch.Generator().manual_seed(n + d)
    return torch.randn(n, d, generator=generator).to(device, dtype).requires_grad_()


def clusters(n: int, d: int, k: int) -> Tensor:
    """Rows for `sorted_labels`, each class apart: at D=128 about 1.4 across, and 16 away from the next."""
    generator = torch.Generator().manual_seed(n + d)
    centres = torch.randn(-(-n // k), d, generator=generator).repeat_interleave(k, dim=0)[:n]
    return (centres + SPREAD * torch.randn(n, d, generator=generator)).requires_grad_()


def sorted_labels(n: int, k: int, device: str = "cpu") -> Tensor:
    return torch.arange(n, device=device) // k
