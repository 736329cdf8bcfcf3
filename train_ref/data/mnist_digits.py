"""Handwritten digits: MNIST's idx files, and the 1,797 small images that scikit-learn carries.

Both are divided as for training on even against odd (001 Sec. 5.1): 0–5 are trained on and 6–9 are not.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from train_ref.data.files import DataError, Layout, check_sha256, find
from train_ref.data.splits import Dataset, Split

TRAINED_ON = 6  # the digits below it
MNIST_FILES = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
_MNIST = Layout("mnist", tuple(MNIST_FILES), "https://ossci-datasets.s3.amazonaws.com/mnist/ (four files)")


def load_mnist(size: int, roots: Sequence[Path], cache: Path) -> Dataset:
    """Trained on: the training images of 0–5; measured on the test images."""
    _check_size("mnist", size, 28)
    _, folder = find("mnist", [_MNIST], roots)
    for name, expected in MNIST_FILES.items():
        check_sha256(folder / name, expected)
    train, test = (
        _labelled(
            _idx(folder / f"{part}-images-idx3-ubyte.gz").unsqueeze(1),
            _idx(folder / f"{part}-labels-idx1-ubyte.gz"),
        )
        for part in ("train", "t10k")
    )
    seen = _rows(train, train.labels["digit"] < TRAINED_ON)
    return Dataset(
        name="mnist",
        train=seen,
        tests={
            "train digits": _rows(test, test.labels["digit"] < TRAINED_ON),
            "test digits": _rows(test, test.labels["digit"] >= TRAINED_ON),
        },
        mean=(0.1307,),
        std=(0.3081,),
        shareable=True,
        source=(
            f"MNIST, the four idx files; {len(seen):,} training images of 0–5, {len(test):,} test images; "
            "CC BY-SA 3.0"
        ),
    )


def load_digits(size: int, roots: Sequence[Path], cache: Path) -> Dataset:
    """Trained on: half of the images of 0–5; measured on the other half, and on all of 6–9."""
    _check_size("digits", size, 8)
    from sklearn import datasets

    bunch = datasets.load_digits()
    # Values are from 0 to 16.
    pixels = torch.tensor(bunch.images).mul(255 / 16).round().to(torch.uint8).unsqueeze(1)
    images = _labelled(pixels, torch.tensor(bunch.target))
    # The file goes from writer to writer: a shuffle lets both halves have all of them.
    images = _rows(images, torch.randperm(len(images), generator=torch.Generator().manual_seed(0)))
    seen = _rows(images, images.labels["digit"] < TRAINED_ON)
    held_out, trained_on = torch.arange(len(seen)).tensor_split([len(seen) // 2])
    return Dataset(
        name="digits",
        train=_rows(seen, trained_on),
        tests={
            "train digits": _rows(seen, held_out),
            "test digits": _rows(images, images.labels["digit"] >= TRAINED_ON),
        },
        mean=(0.3056,),
        std=(0.3779,),
        shareable=True,
        source=(
            f"scikit-learn's digits, {len(images):,} images of 8×8, half of those of 0–5 held out; CC BY 4.0"
        ),
    )


def _check_size(name: str, size: int, native: int) -> None:
    if size != native:
        raise ValueError(f"{name} images are {native}×{native} and are not scaled, got size={size}")


def _labelled(pixels: Tensor, digits: Tensor) -> Split:
    digits = digits.long()
    return Split(pixels, {"digit": digits, "parity": digits % 2})


def _rows(split: Split, index: Tensor) -> Split:
    return Split(split.pixels[index], {name: labels[index] for name, labels in split.labels.items()})


def _idx(path: Path) -> Tensor:
    """An idx file of bytes: two zeros, the type 8, the number of dimensions, each as 4 bytes, the values."""
    content = gzip.decompress(path.read_bytes())
    header = 4 + 4 * content[3]
    shape = [int(extent) for extent in np.frombuffer(content[4:header], dtype=">i4")]
    if content[:3] != b"\0\0\x08" or len(content) != header + math.prod(shape):
        raise DataError(f"{path} is not an idx file of bytes")
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape).copy())
