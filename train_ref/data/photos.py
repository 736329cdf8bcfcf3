"""What the data sets of photographs share: classes and file names become splits of square RGB images."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from train_ref.data.cache import ImageFiles, Pixels, decoded
from train_ref.data.splits import Dataset, Split, numbered

Listing = list[tuple[int, str]]
"""The class and the file name of every image."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def photo_dataset(
    name: str, title: str, train: Listing, tests: dict[str, Listing], place: Path, size: int, cache: Path
) -> Dataset:
    """Images are ordered by class and name. The tests' classes are numbered together: a query's class has the
    same number in the gallery."""

    def split(part: str, images: Listing, among: list[int]) -> Split:
        images = sorted(images)
        files = ImageFiles(place, [file for _, file in images])
        pixels = decoded(files, size, 3, decode_photo, cache, f"{name}-{part.replace(' ', '-')}")
        return Split(pixels, {"class": numbered([number for number, _ in images], among)})

    tested = [number for images in tests.values() for number, _ in images]
    return Dataset(
        name=name,
        train=split("train", train, [number for number, _ in train]),
        tests={part: split(part, images, tested) for part, images in tests.items()},
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        shareable=False,
        source=(
            f"{title} from {place.name}; {_counts(train)} to train on, "
            f"{', '.join(f'{_counts(images)} in {part}' for part, images in tests.items())}; "
            f"whole images scaled to {size}×{size}; non-commercial research"
        ),
    )


def decode_photo(file: io.BytesIO, size: int) -> Pixels:
    """The whole image, its aspect ratio not kept, by Pillow's antialiased bicubic filter."""
    image = Image.open(file)
    # JPEGs of more than four times the size come out of their decoder smaller, at least twice the size.
    image.draft("RGB", (2 * size, 2 * size))
    scaled = image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC)
    pixels: Pixels = np.asarray(scaled).transpose(2, 0, 1)
    return pixels


def _counts(images: Listing) -> str:
    return f"{len(images):,} images of {len({number for number, _ in images}):,} classes"
