"""Batches on their way to a network: random views of byte images, and floats."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def views(pixels: Tensor, generator: torch.Generator, pad: int) -> Tensor:
    """(B, C, H, W): of each image one view, flipped or not and shifted by up to `pad` pixels either way.

    That is a random crop of the image padded by `pad`. The padding repeats the edge pixels, since
    no byte is exactly 0 after normalising.
    """
    batch, channels, height, width = pixels.shape

    def shifted(extent: int) -> Tensor:
        """(B, extent): the row or column that each one of the view is taken from."""
        shift = torch.randint(-pad, pad + 1, (batch, 1), generator=generator, device=generator.device)
        return (torch.arange(extent, device=generator.device) + shift).clamp_(0, extent - 1)

    rows, columns = shifted(height), shifted(width)
    flip = torch.rand((batch, 1), generator=generator, device=generator.device) < 0.5
    columns = torch.where(flip, columns.flip(1), columns)
    taken = (rows.unsqueeze(2) * width + columns.unsqueeze(1)).to(pixels.device)
    return pixels.flatten(2).gather(2, taken.view(batch, 1, -1).expand(-1, channels, -1)).view_as(pixels)


def as_floats(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(B, C, H, W) float32: (pixels / 255 − mean) / std, by channel."""
    mean_bytes, std_bytes = (
        255 * torch.tensor(values, dtype=torch.float32, device=pixels.device).view(-1, 1, 1)
        for values in (mean, std)
    )
    return pixels.to(torch.float32).sub_(mean_bytes).div_(std_bytes)
