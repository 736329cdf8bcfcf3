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


def equal_rows(n: int, d: int) -> Tensor:
    return embeddings(1, d).detach().repeat(n, 1).requires_grad_()


def tight_clusters(n: int, d: int, count: int) -> Tensor:
    """Rows of all classes near each of `count` centres, which are 1,000 times as far apart."""
    generator = torch.Generator().manual_seed(n + d)
    centres = torch.randn(count, d, generator=generator)[torch.randint(count, (n,), generator=generator)]
    return (centres + 1e-3 * torch.randn(n, d, generator=generator)).requires_grad_()


def sorted_labels(n: int, k: int, device: str = "cpu") -> Tensor:
    return torch.arange(n, device=device) // k
