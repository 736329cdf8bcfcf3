"""CUB-200-2011 and Cars-196: the first half of the classes to train on, the other half to test.

Both are read from their public folders, or else from small zips of the same images, scaled down.
"""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Sequence
from pathlib import Path

from train_ref.data.files import Layout, check_count, check_sha256, find, read_table
from train_ref.data.photos import Listing, photo_dataset
from train_ref.data.splits import Dataset

CUB_CLASSES, CUB_IMAGES = 200, 11_788
CARS_CLASSES, CARS_IMAGES = 196, 16_185
SHA256 = {
    "cub200_s96_q85.zip": "a56d67e27ec14c1631db97a028981aea6f3e2bcffedda60f655684153d6178ef",
    "cars196_full_s64_q80.zip": "adf99bd3ad44ca0ce0d132004418ad02bbc41cf2ae121776e61b5280517966f3",
    "labels.csv": "2ef1777ec277939aac4b83c71dab993af2c004544f0d6b1391f8dbedba981bab",
    "cars_train_annos.mat": "1c1973dd828a2964060b0bbc0e423466393fe3001a3f8e303f41fbf22067dfb1",
    "cars_test_annos_withlabels.mat": "790f75be8ea34eeded134cc559332baf23e30e91367e9ddca97d26ed9b895f05",
}

_CUB_FOLDER = Layout(
    "CUB_200_2011",
    ("images.txt", "image_class_labels.txt", "images/"),
    "CUB_200_2011.tgz of https://data.caltech.edu/records/65de6-vp158, unpacked",
)
_CUB_ZIP = Layout("cub200", ("cub200_s96_q85.zip",), "the same images with a short side of 96 in a zip")
_CARS_FOLDERS = Layout(
    "cars196",
    ("cars_train/", "cars_test/", "devkit/cars_train_annos.mat", "devkit/cars_test_annos_withlabels.mat"),
    "cars_train.tgz, cars_test.tgz, car_devkit.tgz and cars_test_annos_withlabels.mat of "
    "https://ai.stanford.edu/~jkrause/cars/car_dataset.html or a mirror of it, unpacked",
)
_CARS_FOLDER = Layout(
    "cars196", ("car_ims/", "cars_annos.mat"), "car_ims.tgz, unpacked, and cars_annos.mat of the same page"
)
_CARS_ZIP = Layout(
    "cars196",
    ("cars196_full_s64_q80.zip", "labels.csv"),
    "the same images with a short side of 64 in a zip, and its labels",
)


def load_cub(size: int, roots: Sequence[Path], cache: Path) -> Dataset:
    layout, folder = find("cub", [_CUB_FOLDER, _CUB_ZIP], roots)
    if layout is _CUB_FOLDER:
        names = dict(read_table(folder / "images.txt", 2))
        classes = dict(read_table(folder / "image_class_labels.txt", 2))
        images = [(int(classes[image]), name) for image, name in names.items() if image in classes]
        check_count("cub", "labelled images", len(images), CUB_IMAGES, folder)
        return _halves("cub", "CUB-200-2011", CUB_CLASSES, images, folder / "images", size, cache)
    archive = folder / layout.paths[0]
    check_sha256(archive, SHA256[archive.name])
    # 001.Black_footed_Albatross/….jpg
    with zipfile.ZipFile(archive) as members:
        images = [(int(name[:3]), name) for name in members.namelist()]
    title = "CUB-200-2011 (short side 96)"
    return _halves("cub", title, CUB_CLASSES, images, archive, size, cache)


def load_cars(size: int, roots: Sequence[Path], cache: Path) -> Dataset:
    layout, folder = find("cars", [_CARS_FOLDERS, _CARS_FOLDER, _CARS_ZIP], roots)
    if layout is _CARS_ZIP:
        archive, labels = (folder / path for path in layout.paths)
        check_sha256(archive, SHA256[archive.name])
        check_sha256(labels, SHA256[labels.name])
        with labels.open(newline="") as file:
            rows = list(csv.DictReader(file))
        images = [(int(row["class_id"]), row["path"]) for row in rows if row["in_zip"] == "1"]
        return _halves("cars", "Cars-196 (short side 64)", CARS_CLASSES, images, archive, size, cache)
    if layout is _CARS_FOLDER:
        images = _annotations(folder / "cars_annos.mat", "relative_im_path")
    else:
        images = []
        for part, annotations in zip(layout.paths[:2], layout.paths[2:], strict=True):
            check_sha256(folder / annotations, SHA256[Path(annotations).name])
            images += [(number, part + name) for number, name in _annotations(folder / annotations, "fname")]
    check_count("cars", "annotated images", len(images), CARS_IMAGES, folder)
    return _halves("cars", "Cars-196", CARS_CLASSES, images, folder, size, cache)


def _annotations(path: Path, name: str) -> Listing:
    """Classes and names of a MATLAB file with one array of structs."""
    from scipy.io import loadmat  # type: ignore[import-untyped]

    return [(int(row["class"]), str(row[name])) for row in loadmat(path, squeeze_me=True)["annotations"].flat]


def _halves(
    name: str, title: str, classes: int, images: Listing, place: Path, size: int, cache: Path
) -> Dataset:
    train = [image for image in images if image[0] <= classes // 2]
    test = [image for image in images if image[0] > classes // 2]
    return photo_dataset(name, title, train, {"test classes": test}, place, size, cache)
