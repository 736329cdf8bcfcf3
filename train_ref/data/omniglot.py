"""Omniglot: 50 alphabets, 1,623 letters, 20 drawings of each; 30 alphabets to train on and 20 to test."""

from __future__ import annotations

import functools
import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import Tensor

from train_ref.data.cache import ImageFiles, Pixels, decoded
from train_ref.data.files import DataError, Layout, find, sha256
from train_ref.data.splits import Dataset, Split, numbered

# ZIP_SHA256 is of re-packed zips. FINGERPRINT is of the images in them, so that the original zips pass too.
ZIP_SHA256 = {
    "images_background": "f47aa636a309498208342e2692f69b73a4c0aefc325f09d8753308be15a90060",
    "images_evaluation": "c9f43fa3e5c97382f0919378fb9767cbe28b6af433631af7b6833eda96c6b225",
}
FINGERPRINT = {
    "images_background": "6c066a0e8d3b34f7ba8970ad9e8893168d1ba2d2cdfe595e27a0b1e717f7b903",
    "images_evaluation": "3f71cc73b003dd27fcfe35046c5f10e953ff6f89379dbe0dd006cf2437d7f98d",
}
MEAN, STD = (0.0779,), (0.2303,)  # of the training images at 28×28
_LAYOUT = Layout(
    "omniglot",
    tuple(f"{name}.zip" for name in ZIP_SHA256),
    "https://github.com/brendenlake/omniglot, python/images_background.zip and images_evaluation.zip",
)


def load_omniglot(size: int, roots: Sequence[Path], cache: Path) -> Dataset:
    """Letters and alphabets are numbered by zip. The training alphabets are measured too (001 Table 4)."""
    _, folder = find("omniglot", [_LAYOUT], roots)
    train, test = (_load_zip(folder / f"{name}.zip", size, cache) for name in ZIP_SHA256)
    return Dataset(
        name="omniglot",
        train=train,
        tests={"test alphabets": test, "training alphabets": train},
        mean=MEAN,
        std=STD,
        shareable=True,
        source=(
            f"Omniglot, the two image zips; 30 alphabets with {len(train):,} images to train on, "
            f"20 with {len(test):,} to test, area-averaged to {size}×{size}; MIT"
        ),
    )


def decode_strokes(file: io.BytesIO, size: int) -> Pixels:
    """Strokes 255 on 0; a pixel of the result is the mean of the area it covers."""
    strokes = 255 - 255 * np.asarray(Image.open(file).convert("1"), dtype=np.float32)
    weights = _area_weights(len(strokes), size)
    averaged: Pixels = np.rint(weights @ strokes @ weights.T).astype(np.uint8)[None]
    return averaged


@functools.cache
def _area_weights(before: int, after: int) -> npt.NDArray[np.float32]:
    """(after, before): the share of every new pixel that an old one covers."""
    edges = np.linspace(0, before, after + 1)
    old = np.arange(before)
    overlap = np.minimum(edges[1:, None], old + 1) - np.maximum(edges[:-1, None], old)
    return (overlap.clip(0) * after / before).astype(np.float32)


def _load_zip(path: Path, size: int, cache: Path) -> Split:
    files = drawings(path)
    pixels = decoded(files, size, 1, decode_strokes, cache, f"omniglot-{path.stem}")
    return Split(pixels, labels(files.names))


def labels(names: Sequence[str]) -> dict[str, Tensor]:
    """Of images_background/<alphabet>/characterNN/NNNN_DD.png."""
    folders = [name.split("/")[1:3] for name in names]
    return {
        "letter": numbered([f"{alphabet}/{letter}" for alphabet, letter in folders]),
        "alphabet": numbered([alphabet for alphabet, _ in folders]),
    }


def drawings(path: Path) -> ImageFiles:
    """The images of a zip that has been checked, in the order of their names."""
    found, expected = sha256(path), ZIP_SHA256[path.stem]
    try:
        with zipfile.ZipFile(path) as archive:
            inside = sorted(name for name in archive.namelist() if name.startswith(f"{path.stem}/"))
        files = ImageFiles(path, [name for name in inside if name.endswith(".png")])
        right = found == expected or files.fingerprint() == FINGERPRINT[path.stem]
    except zipfile.BadZipFile:
        right = False
    if not right:
        raise DataError(
            f"{path} is damaged or another version: its SHA-256 is {found}, expected {expected}, "
            f"and it isn't another packing of the same images. Get it anew: {_LAYOUT.origin}"
        )
    return files
