"""The data sets: small trees in the public layouts, real files where they are, and what errors say."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import struct
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from train_ref.data import (
    DataError,
    as_floats,
    cache,
    fine_grained,
    folders,
    load,
    mnist_digits,
    omniglot,
    views,
)
from train_ref.data.cache import ImageFiles, decoded
from train_ref.data.files import default_roots
from train_ref.data.photos import decode_photo
from train_ref.data.splits import numbered


def photo(path: Path, colour: tuple[int, int, int] = (200, 100, 50), size: tuple[int, int] = (12, 8)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path, quality=95)


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def colours(split) -> list[list[int]]:
    """Of images of one colour each, rounded to the tens that they were written with."""
    return split.pixels.float().mean((2, 3)).div(10).round().mul(10).int().tolist()


# ---- numbering, floats, views


def test_numbered_by_hand():
    assert numbered([7, 3, 7, 9]).tolist() == [1, 0, 1, 2]
    assert numbered(["b", "a"], ["c", "b", "a"]).tolist() == [1, 0]
    assert numbered([5]).dtype == torch.int64


def test_as_floats_by_hand():
    pixels = torch.tensor([0, 51, 255, 255], dtype=torch.uint8).view(1, 2, 1, 2)
    floats = as_floats(pixels, mean=(0.1, 0.5), std=(0.2, 0.25))
    assert floats.dtype == torch.float32
    torch.testing.assert_close(floats.flatten(), torch.tensor([-0.5, 0.5, 2.0, 2.0]))
    assert pixels.flatten().tolist() == [0, 51, 255, 255]


def all_views(image: torch.Tensor, pad: int) -> list[torch.Tensor]:
    """Every flip and shift, by padding and cropping."""
    height, width = image.shape[1:]
    padded = torch.nn.functional.pad(image.float(), (pad,) * 4, mode="replicate").to(torch.uint8)
    crops = [
        padded[:, top : top + height, left : left + width]
        for top in range(2 * pad + 1)
        for left in range(2 * pad + 1)
    ]
    return [view for crop in crops for view in (crop, crop.flip(2))]


def test_views_are_the_crops_of_the_padded_image_and_all_of_them_occur():
    image = torch.arange(2 * 3 * 4, dtype=torch.uint8).view(2, 3, 4)
    expected = {tuple(view.flatten().tolist()) for view in all_views(image, pad=1)}
    assert len(expected) == 18
    found = views(image.expand(500, -1, -1, -1), torch.Generator().manual_seed(0), pad=1)
    assert found.shape == (500, 2, 3, 4)
    assert found.dtype == torch.uint8
    assert {tuple(view.flatten().tolist()) for view in found} == expected


def test_views_keep_images_apart_and_follow_the_generator_alone():
    pixels = torch.arange(40, dtype=torch.uint8).view(40, 1, 1, 1).expand(-1, 3, 5, 5)
    assert torch.equal(views(pixels, torch.Generator().manual_seed(0), pad=3), pixels)
    random = torch.randint(256, (8, 3, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    first = views(random, torch.Generator().manual_seed(2), pad=2)
    torch.manual_seed(5)
    assert torch.equal(first, views(random, torch.Generator().manual_seed(2), pad=2))
    assert not torch.equal(first, views(random, torch.Generator().manual_seed(3), pad=2))


def test_views_without_padding_flip_about_half_of_the_images():
    pixels = torch.tensor([1, 2], dtype=torch.uint8).view(1, 1, 1, 2).expand(1000, -1, -1, -1)
    flipped = (views(pixels, torch.Generator().manual_seed(0), pad=0)[:, 0, 0, 0] == 2).sum().item()
    assert 450 < flipped < 550


# ---- decoding


def test_strokes_are_white_and_averaged_by_area():
    ink = np.ones((3, 3), dtype=bool)
    ink[0, 0] = ink[1, 1] = False  # strokes are black in the files
    file = io.BytesIO()
    Image.fromarray(ink).save(file, "PNG")
    # Of 2×2 pixels each covers 1.5×1.5: its corner whole, the edges by halves, the middle by a quarter.
    expected = np.array([[1 + 0.25, 0.25], [0.25, 0.25]]) / 2.25 * 255
    assert omniglot.decode_strokes(file, 2).tolist() == [np.rint(expected).astype(int).tolist()]
    assert omniglot.decode_strokes(file, 3).tolist() == [(255 * ~ink).tolist()]


@pytest.mark.parametrize(
    ("mode", "colour", "expected"), [("RGB", (10, 20, 30), [10, 20, 30]), ("L", 77, [77] * 3)]
)
def test_photos_are_scaled_whole_to_squares_of_three_channels(mode, colour, expected):
    file = io.BytesIO()
    Image.new(mode, (90, 60), colour).save(file, "PNG")
    pixels = decode_photo(file, 16)
    assert pixels.shape == (3, 16, 16)
    assert pixels[:, 3, 5].tolist() == expected


def test_large_jpegs_are_scaled_as_small_ones_are():
    image = Image.radial_gradient("L").resize((640, 480)).convert("RGB")
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95)
    whole = np.asarray(image.resize((32, 32), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    assert np.abs(decode_photo(file, 32).astype(int) - whole).max() <= 3


# ---- the cache


@pytest.fixture
def three(tmp_path) -> ImageFiles:
    for place, name in enumerate(("a.png", "b.png", "c.png")):
        photo(tmp_path / "images" / name, (60 * place, 0, 0))
    return ImageFiles(tmp_path / "images", ["a.png", "b.png", "c.png"])


def test_images_are_decoded_once_until_they_change(three, tmp_path):
    folder = tmp_path / "cache"
    first = decoded(three, 4, 3, decode_photo, folder, "three")
    assert first[:, 0, 0, 0].tolist() == [0, 60, 120]
    assert first.dtype == torch.uint8

    decodings = []

    def decode_photo_counted(file, size):
        decodings.append(size)
        return decode_photo(file, size)

    decode_photo_counted.__name__ = decode_photo.__name__
    again = decoded(three, 4, 3, decode_photo_counted, folder, "three")
    assert torch.equal(first, again)
    assert decodings == []
    decoded(three, 5, 3, decode_photo_counted, folder, "three")
    assert decodings == [5, 5, 5]
    photo(tmp_path / "images" / "b.png", (7, 8, 9), (40, 30))
    assert decoded(three, 4, 3, decode_photo_counted, folder, "three")[1, :, 0, 0].tolist() == [7, 8, 9]
    assert decodings == [5, 5, 5, 4, 4, 4]


def test_writing_to_the_pixels_leaves_the_cache_as_it_is(three, tmp_path):
    decoded(three, 4, 3, decode_photo, tmp_path, "three").fill_(9)
    assert decoded(three, 4, 3, decode_photo, tmp_path, "three")[:, 0, 0, 0].tolist() == [0, 60, 120]


def test_a_cached_file_that_was_cut_off_is_made_anew(three, tmp_path):
    decoded(three, 4, 3, decode_photo, tmp_path / "cache", "three")
    (file,) = (tmp_path / "cache").glob("*.npy")
    for content in (file.read_bytes()[:-1], b""):
        file.write_bytes(content)
        again = decoded(three, 4, 3, decode_photo, tmp_path / "cache", "three")
        assert again[:, 0, 0, 0].tolist() == [0, 60, 120]


def test_of_two_that_start_together_one_decodes(three, tmp_path):
    decodings = []

    def decode_slowly(file, size):
        decodings.append(size)
        time.sleep(0.05)
        return decode_photo(file, size)

    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(decoded, three, 4, 3, decode_slowly, tmp_path, "three") for _ in range(2)]
        first, second = (each.result() for each in running)
    assert torch.equal(first, second)
    assert decodings == [4, 4, 4]


def test_a_damaged_image_is_named_and_nothing_is_kept(three, tmp_path):
    (tmp_path / "images" / "b.png").write_bytes(b"\x89PNG not")
    with pytest.raises(DataError, match=r"b\.png in .*images is damaged"):
        decoded(three, 4, 3, decode_photo, tmp_path / "cache", "three")
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".lock"}


def test_missing_images_are_counted_and_named(three, tmp_path):
    names = [*three.names, *(f"gone{number}.png" for number in range(4))]
    with pytest.raises(
        DataError, match=r"4 of 7 images are missing in .*images: gone0\.png, gone1\.png, gone2\.png, …"
    ):
        decoded(ImageFiles(three.place, names), 4, 3, decode_photo, tmp_path, "three")


def test_a_full_disk_is_an_error_before_decoding(three, tmp_path, monkeypatch):
    def full(descriptor, start, length):
        raise OSError(28, "No space left on device")

    def never(file, size):
        pytest.fail("decoding began")

    monkeypatch.setattr(cache.os, "posix_fallocate", full)
    with pytest.raises(DataError, match=r"three-4-.* takes 0 MB.*No space left on device.*XDG_CACHE_HOME"):
        decoded(three, 4, 3, never, tmp_path / "cache", "three")
    assert list((tmp_path / "cache").glob("*.partial")) == []


def test_a_cache_folder_that_cannot_be_made_is_an_error(three, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot be kept in .*file"):
        decoded(three, 4, 3, decode_photo, tmp_path / "file" / "cache", "three")


def test_the_default_cache_and_roots(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.default_folder() == Path("/somewhere/tripletops")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.default_folder() == Path.home() / ".cache" / "tripletops"
    monkeypatch.setenv("TRIPLETOPS_DATA", "/elsewhere")
    assert default_roots() == [Path("/elsewhere"), Path("data")]
    monkeypatch.delenv("TRIPLETOPS_DATA")
    assert default_roots() == [Path("data")]


# ---- what is missing


@pytest.mark.parametrize(
    ("name", "size", "places"),
    [
        ("mnist", 28, ["mnist/train-images-idx3-ubyte.gz", "mnist/t10k-labels-idx1-ubyte.gz"]),
        ("omniglot", 28, ["omniglot/images_background.zip", "omniglot/images_evaluation.zip"]),
        ("cub", 96, ["CUB_200_2011/images.txt", "CUB_200_2011/images", "cub200/cub200_s96_q85.zip"]),
        ("cars", 64, ["cars196/devkit/cars_train_annos.mat", "cars196/cars_annos.mat", "cars196/labels.csv"]),
        ("sop", 64, ["Stanford_Online_Products/Ebay_train.txt", "Stanford_Online_Products/Ebay_test.txt"]),
        ("inshop", 64, ["In-shop Clothes Retrieval Benchmark/Img/img", "inshop/list_eval_partition.txt"]),
        ("market", 64, ["Market-1501-v15.09.15/bounding_box_train", "Market-1501-v15.09.15/query"]),
    ],
)
def test_missing_files_are_named_in_every_folder_searched_with_where_to_get_them(
    tmp_path, name, size, places
):
    roots = [tmp_path / "one", tmp_path / "two"]
    with pytest.raises(DataError) as raised:
        load(name, size, roots=roots, cache=tmp_path)
    lines = str(raised.value).splitlines()
    assert lines[0].startswith(f"{name}: no complete copy was found in {roots[0]}, {roots[1]}.")
    assert {f"  {root / place}" for root in roots for place in places} <= set(lines)
    assert "https://" in str(raised.value)


def test_only_the_missing_files_are_named(tmp_path):
    write(tmp_path / "Stanford_Online_Products" / "Ebay_train.txt")
    with pytest.raises(DataError) as raised:
        load("sop", 64, roots=[tmp_path], cache=tmp_path)
    assert "Ebay_test.txt" in str(raised.value)
    assert "Ebay_train.txt" not in str(raised.value)


def test_unknown_names_and_sizes(tmp_path):
    with pytest.raises(
        ValueError, match=r"no data set is called 'mnits'; there are mnist, digits, omniglot, cub"
    ):
        load("mnits", 28, roots=[tmp_path])
    with pytest.raises(ValueError, match=r"mnist images are 28×28 and are not scaled, got size=32"):
        load("mnist", 32, roots=[tmp_path])


# ---- digits, MNIST


def test_digits():
    digits = load("digits", 8)
    assert len(digits.train) == 542
    assert {name: len(split) for name, split in digits.tests.items()} == {
        "train digits": 541,
        "test digits": 714,
    }
    assert digits.train.labels["digit"].unique().tolist() == [0, 1, 2, 3, 4, 5]
    assert digits.tests["test digits"].labels["digit"].unique().tolist() == [6, 7, 8, 9]
    assert torch.equal(digits.train.labels["parity"], digits.train.labels["digit"] % 2)
    assert digits.train.pixels.dtype == torch.uint8
    assert digits.train.pixels.max() == 255
    values = digits.train.pixels.double() / 255
    assert digits.mean == (round(values.mean().item(), 4),)
    assert digits.std == (round(values.std(correction=0).item(), 4),)
    trained_on = {tuple(image.flatten().tolist()) for image in digits.train.pixels}
    held_out = {tuple(image.flatten().tolist()) for image in digits.tests["train digits"].pixels}
    assert not trained_on & held_out


def idx(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes()))


def test_mnist_by_hand(tmp_path, monkeypatch):
    for part, digits in {"train": [5, 7, 0], "t10k": [9, 1]}.items():
        idx(tmp_path / f"mnist/{part}-labels-idx1-ubyte.gz", np.array(digits))
        idx(
            tmp_path / f"mnist/{part}-images-idx3-ubyte.gz",
            np.array(digits)[:, None, None] * np.ones((28, 28)),
        )
    for name in mnist_digits.MNIST_FILES:
        monkeypatch.setitem(mnist_digits.MNIST_FILES, name, sha256(tmp_path / "mnist" / name))
    mnist = load("mnist", 28, roots=[tmp_path], cache=tmp_path)
    splits = {"train": mnist.train, **mnist.tests}
    assert {name: split.labels["digit"].tolist() for name, split in splits.items()} == {
        "train": [5, 0],
        "train digits": [1],
        "test digits": [9],
    }
    assert {name: split.labels["parity"].tolist() for name, split in splits.items()} == {
        "train": [1, 0],
        "train digits": [1],
        "test digits": [1],
    }
    assert mnist.train.pixels.shape == (2, 1, 28, 28)
    assert mnist.train.pixels[:, 0, 3, 4].tolist() == [5, 0]

    path = tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz"
    expected = sha256(path)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(DataError, match=rf"{path.name} is damaged .* is {sha256(path)}, expected {expected}"):
        load("mnist", 28, roots=[tmp_path], cache=tmp_path)


def test_the_real_mnist(shared_data, tmp_path):
    mnist = load("mnist", 28, roots=[shared_data], cache=tmp_path)
    assert mnist.train.pixels.shape == (36_017, 1, 28, 28)
    assert {name: len(split) for name, split in mnist.tests.items()} == {
        "train digits": 6031,
        "test digits": 3969,
    }
    assert mnist.train.labels["digit"][:5].tolist() == [5, 0, 4, 1, 2]  # 5 0 4 1 9 2 …
    assert mnist.shareable


# ---- Omniglot


def omniglot_zips(root: Path) -> None:
    """An alphabet of two letters and one of one, two drawings of each; in the other zip one of one."""
    root.joinpath("omniglot").mkdir(parents=True)
    letters = {
        "images_background": ["Greek/character01", "Greek/character02", "Latin/character01"],
        "images_evaluation": ["Angelic/character01"],
    }
    for stem, inside in letters.items():
        with zipfile.ZipFile(root / "omniglot" / f"{stem}.zip", "w") as archive:
            archive.writestr(f"__MACOSX/{stem}/._0001_01.png", b"")
            archive.writestr(f"{stem}/", b"")
            for letter in reversed(inside):
                for drawing in (1, 2):
                    ink = np.ones((105, 105), dtype=bool)
                    ink[:, : 15 * drawing] = False
                    file = io.BytesIO()
                    Image.fromarray(ink).save(file, "PNG")
                    archive.writestr(f"{stem}/{letter}/0001_0{drawing}.png", file.getvalue())


def test_omniglot_by_hand(tmp_path, monkeypatch):
    omniglot_zips(tmp_path)
    path = tmp_path / "omniglot" / "images_background.zip"
    with pytest.raises(
        DataError, match=rf"{path.name} is damaged or another version: its SHA-256 is {sha256(path)}, "
    ):
        load("omniglot", 7, roots=[tmp_path], cache=tmp_path)

    # One zip is known by its own hash, the other by its images'.
    monkeypatch.setitem(omniglot.ZIP_SHA256, "images_background", sha256(path))
    names = [f"images_evaluation/Angelic/character01/0001_0{drawing}.png" for drawing in (1, 2)]
    images = ImageFiles(path.with_stem("images_evaluation"), names)
    monkeypatch.setitem(omniglot.FINGERPRINT, "images_evaluation", images.fingerprint())
    loaded = load("omniglot", 7, roots=[tmp_path], cache=tmp_path)
    assert loaded.train.labels["letter"].tolist() == [0, 0, 1, 1, 2, 2]
    assert loaded.train.labels["alphabet"].tolist() == [0, 0, 0, 0, 1, 1]
    assert loaded.train.pixels[0, 0, 2].tolist() == [255, 0, 0, 0, 0, 0, 0]
    assert loaded.train.pixels[1, 0, 2].tolist() == [255, 255, 0, 0, 0, 0, 0]
    assert loaded.tests["training alphabets"] is loaded.train
    assert loaded.tests["test alphabets"].labels["letter"].tolist() == [0, 0]

    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"images_background\.zip is damaged"):
        load("omniglot", 7, roots=[tmp_path], cache=tmp_path)


@pytest.mark.parametrize(
    ("stem", "alphabets", "letters"), [("images_background", 30, 964), ("images_evaluation", 20, 659)]
)
def test_the_real_omniglot(shared_data, monkeypatch, stem, alphabets, letters):
    path = shared_data / "omniglot" / f"{stem}.zip"
    names = omniglot.drawings(path).names
    labels = omniglot.labels(names)
    assert labels["alphabet"].unique().tolist() == list(range(alphabets))
    assert labels["letter"].bincount().tolist() == [20] * letters
    # The images pass in another packing too.
    monkeypatch.setitem(omniglot.ZIP_SHA256, stem, "another")
    assert omniglot.drawings(path).names == names


def test_the_constants_of_omniglot(shared_data, tmp_path):
    files = omniglot.drawings(shared_data / "omniglot" / "images_background.zip")
    values = decoded(files, 28, 1, omniglot.decode_strokes, tmp_path, "omniglot").double() / 255
    assert (round(values.mean().item(), 4),) == omniglot.MEAN
    assert (round(values.std(correction=0).item(), 4),) == omniglot.STD


# ---- CUB and Cars


def test_the_public_layout_of_cub(tmp_path, monkeypatch):
    monkeypatch.setattr(fine_grained, "CUB_IMAGES", 4)
    folder = tmp_path / "CUB_200_2011"
    names = ["101.Pelican/b.jpg", "001.Albatross/b.jpg", "001.Albatross/a.jpg", "100.Brown/c.jpg"]
    write(folder / "images.txt", *(f"{number} {name}" for number, name in enumerate(names, 1)))
    write(folder / "image_class_labels.txt", "4 100", "2 1", "3 1", "1 101")
    for place, name in enumerate(names):
        photo(folder / "images" / name, (50 * place, 100, 0))
    cub = load("cub", 6, roots=[tmp_path], cache=tmp_path)
    assert cub.train.labels["class"].tolist() == [0, 0, 1]
    assert colours(cub.train) == [[100, 100, 0], [50, 100, 0], [150, 100, 0]]
    assert cub.tests["test classes"].labels["class"].tolist() == [0]
    assert colours(cub.tests["test classes"]) == [[0, 100, 0]]
    assert cub.train.pixels.shape == (3, 3, 6, 6)
    assert not cub.shareable

    (folder / "images" / names[0]).unlink()
    with pytest.raises(DataError, match=r"1 of 1 images are missing in .*images: 101\.Pelican/b\.jpg"):
        load("cub", 6, roots=[tmp_path], cache=tmp_path)
    monkeypatch.setattr(fine_grained, "CUB_IMAGES", 11_788)
    with pytest.raises(
        DataError, match=r"cub: .*CUB_200_2011 has 4 labelled images, the published data set 11,788"
    ):
        load("cub", 6, roots=[tmp_path], cache=tmp_path)


def save_annotations(path: Path, **columns: list[object]) -> None:
    from scipy.io import savemat

    rows = list(zip(*columns.values(), strict=True))
    annotations = np.empty((1, len(rows)), dtype=[(name, object) for name in columns])
    annotations[0] = rows
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {"annotations": annotations})


def cars_in_two_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"train": "cars_train_annos.mat", "test": "cars_test_annos_withlabels.mat"}
    classes = {"train": [98, 99], "test": [2, 98]}
    for part, name in files.items():
        path = folder / "devkit" / name
        save_annotations(path, **{"class": classes[part]}, fname=["00001.jpg", "00002.jpg"])
        monkeypatch.setitem(fine_grained.SHA256, name, sha256(path))
    photo(folder / "cars_train/00001.jpg", (10, 0, 0))
    photo(folder / "cars_train/00002.jpg", (60, 0, 0))
    photo(folder / "cars_test/00001.jpg", (110, 0, 0))
    photo(folder / "cars_test/00002.jpg", (160, 0, 0))


def cars_in_one_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"car_ims/{number:06}.jpg" for number in range(1, 5)]
    save_annotations(
        folder / "cars_annos.mat", relative_im_path=names, test=[0, 1, 1, 0], **{"class": [2, 98, 98, 99]}
    )
    for place, red in enumerate((110, 160, 10, 60)):
        photo(folder / names[place], (red, 0, 0))


@pytest.mark.parametrize("make", [cars_in_two_folders, cars_in_one_folder])
def test_the_public_layouts_of_cars(tmp_path, monkeypatch, make):
    monkeypatch.setattr(fine_grained, "CARS_IMAGES", 4)
    make(tmp_path / "cars196", monkeypatch)
    cars = load("cars", 6, roots=[tmp_path], cache=tmp_path)
    assert cars.train.labels["class"].tolist() == [0, 1, 1]
    assert [red for red, _, _ in colours(cars.train)] == [110, 160, 10]
    assert cars.tests["test classes"].labels["class"].tolist() == [0]
    assert colours(cars.tests["test classes"])[0][0] == 60
    monkeypatch.setattr(fine_grained, "CARS_IMAGES", 16_185)
    with pytest.raises(DataError, match=r"cars: .* has 4 annotated images, the published data set 16,185"):
        load("cars", 6, roots=[tmp_path], cache=tmp_path)


@pytest.mark.parametrize(
    ("name", "train", "test", "classes"), [("cub", 5864, 5924, 100), ("cars", 8048, 8122, 98)]
)
def test_the_real_small_zips(shared_data, tmp_path, monkeypatch, name, train, test, classes):
    """Counts and labels of all, pixels of some."""

    def first_images(listing, *arguments):
        return decoded(ImageFiles(listing.place, listing.names[:20]), *arguments)

    monkeypatch.setattr("train_ref.data.photos.decoded", first_images)
    data = load(name, 32, roots=[shared_data], cache=tmp_path)
    tested = data.tests["test classes"]
    for split, images in ((data.train, train), (tested, test)):
        assert len(split.labels["class"]) == images
        assert split.labels["class"].unique().tolist() == list(range(classes))
        assert split.pixels.shape == (20, 3, 32, 32)
        # Photographs: neither dark nor of one colour.
        assert 40 < split.pixels.float().mean() < 220
        assert split.pixels.float().std() > 20
    assert data.mean == (0.485, 0.456, 0.406)
    assert not data.shareable


def test_the_real_annotations_of_cars_are_the_labels_of_the_small_zip(shared_data, tmp_path, monkeypatch):
    """The public layout's listing without its images: 15 of them are not in the zip."""
    listings = {}

    def listed(name, title, train, tests, place, size, folder):
        listings[place.name] = {*train, *tests["test classes"]}

    monkeypatch.setattr(fine_grained, "photo_dataset", listed)
    load("cars", 64, roots=[shared_data], cache=tmp_path)
    public = tmp_path / "cars196"
    for part in ("devkit", "cars_train", "cars_test"):
        (public / part).mkdir(parents=True)
    for name in ("cars_train_annos.mat", "cars_test_annos_withlabels.mat"):
        shutil.copyfile(shared_data / "cars196" / name, public / "devkit" / name)
    load("cars", 64, roots=[shared_data, tmp_path], cache=tmp_path)
    assert len(listings["cars196"]) == 16_185
    assert listings["cars196_full_s64_q80.zip"] < listings["cars196"]
    assert len(listings["cars196_full_s64_q80.zip"]) == 16_170


# ---- Stanford Online Products, In-shop, Market-1501


def test_sop(tmp_path, monkeypatch):
    folder = tmp_path / "Stanford_Online_Products"
    header = "image_id class_id super_class_id path"
    write(
        folder / "Ebay_train.txt",
        header,
        "1 1 1 bicycle_final/a_0.JPG",
        "2 10 1 bicycle_final/b_0.JPG",
        "3 2 2 c.JPG",
    )
    write(folder / "Ebay_test.txt", header, "4 11319 1 bicycle_final/d_0.JPG")
    for place, name in enumerate(
        ("bicycle_final/a_0.JPG", "bicycle_final/b_0.JPG", "c.JPG", "bicycle_final/d_0.JPG")
    ):
        photo(folder / name, (50 * place, 0, 0))
    with pytest.raises(DataError, match=r"Ebay_train\.txt has 3 images, the published data set 59,551"):
        load("sop", 8, roots=[tmp_path], cache=tmp_path)
    monkeypatch.setattr(folders, "SOP_IMAGES", {"train": 3, "test": 1})
    sop = load("sop", 8, roots=[tmp_path], cache=tmp_path)
    assert sop.train.labels["class"].tolist() == [0, 1, 2]
    assert [red for red, _, _ in colours(sop.train)] == [0, 100, 50]
    assert sop.tests["test classes"].labels["class"].tolist() == [0]
    assert colours(sop.tests["test classes"]) == [[150, 0, 0]]

    write(folder / "Ebay_test.txt", header, "4 11319 1")
    with pytest.raises(DataError, match=r"Ebay_test\.txt: line 2 has 3 columns, expected 4: '4 11319 1'"):
        load("sop", 8, roots=[tmp_path], cache=tmp_path)


@pytest.mark.parametrize(
    ("listed", "images"),
    [
        ("In-shop Clothes Retrieval Benchmark/Eval", "In-shop Clothes Retrieval Benchmark/Img"),
        ("inshop", "inshop"),
    ],
)
def test_inshop(tmp_path, monkeypatch, listed, images):
    rows = [
        "img/WOMEN/Dresses/id_00000002/02_1_front.jpg id_00000002 train",
        "img/WOMEN/Dresses/id_00000009/01_1_front.jpg id_00000009 query",
        "img/WOMEN/Dresses/id_00000009/01_2_side.jpg id_00000009 gallery",
        "img/MEN/Denim/id_00000005/01_1_front.jpg id_00000005 gallery",
    ]
    path = tmp_path / listed / "list_eval_partition.txt"
    write(path, "4", "image_name item_id evaluation_status", *(row.replace(" ", "   ") for row in rows))
    for place, row in enumerate(rows):
        photo(tmp_path / images / row.split()[0], (50 * place, 0, 0))
    with pytest.raises(DataError, match=r"has 1 train images, the published data set 25,882"):
        load("inshop", 8, roots=[tmp_path], cache=tmp_path)
    monkeypatch.setattr(folders, "INSHOP_IMAGES", {"train": 1, "query": 1, "gallery": 2})
    inshop = load("inshop", 8, roots=[tmp_path], cache=tmp_path)
    assert inshop.train.labels["class"].tolist() == [0]
    # The query's item is numbered as in the gallery, where another comes before it.
    assert inshop.tests["query"].labels["class"].tolist() == [1]
    assert inshop.tests["gallery"].labels["class"].tolist() == [0, 1]
    assert [red for red, _, _ in colours(inshop.tests["gallery"])] == [150, 100]

    write(path, "1", "image_name item_id evaluation_status", "img/a.jpg id_00000001 val")
    with pytest.raises(
        DataError, match=r"img/a\.jpg belongs to 'val', expected one of train, query, gallery"
    ):
        load("inshop", 8, roots=[tmp_path], cache=tmp_path)


def test_market_without_junk_and_distractors(tmp_path, monkeypatch):
    folder = tmp_path / "Market-1501-v15.09.15"
    reds = {
        "bounding_box_train/0007_c1s1_000001_01.jpg": 0,
        "bounding_box_train/0002_c1s1_000451_03.jpg": 50,
        "bounding_box_test/-1_c1s1_000401_03.jpg": 100,
        "bounding_box_test/0000_c1s1_000151_01.jpg": 100,
        "bounding_box_test/0001_c1s1_001051_03.jpg": 150,
        "bounding_box_test/1501_c6s4_001877_04.jpg": 200,
        "query/1501_c6s4_001902_00.jpg": 250,
    }
    for name, red in reds.items():
        photo(folder / name, (red, 0, 0), (64, 128))
    write(folder / "bounding_box_train" / "Thumbs.db")
    with pytest.raises(DataError, match=r"bounding_box_train has 2 images, the published data set 12,936"):
        load("market", 8, roots=[tmp_path], cache=tmp_path)
    counts = {"bounding_box_train": 2, "query": 1, "bounding_box_test": 4}
    monkeypatch.setattr(folders, "MARKET_IMAGES", counts)
    market = load("market", 8, roots=[tmp_path], cache=tmp_path)
    assert market.train.labels["class"].tolist() == [0, 1]
    assert [red for red, _, _ in colours(market.train)] == [50, 0]
    assert market.tests["query"].labels["class"].tolist() == [1]
    assert market.tests["gallery"].labels["class"].tolist() == [0, 1]
    assert [red for red, _, _ in colours(market.tests["gallery"])] == [150, 200]
    assert market.train.pixels.shape == (2, 3, 8, 8)
