"""Networks that are trained from scratch."""

from __future__ import annotations

from torch import nn


def even_odd_network(size: int = 8) -> nn.Sequential:
    """From `size`×`size` images to the plane, not normalised; Appendix C of the easy-positive-sampling paper.

    The paper does not say how the convolutions are padded or what stands between the dense layers: here zeros
    to the same size, and a ReLU.
    """
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(32)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(64)),
        *(nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64 * (size // 2) ** 2, 128), nn.ReLU(), nn.Linear(128, 2)),
    )
