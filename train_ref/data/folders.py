"""Stanford Online Products, In-shop Clothes Retrieval and Market-1501 in their public folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from train_ref.data.files import DataError, Layout, check_count, find, read_table
from train_ref.data.photos import Listing, photo_dataset
from train_ref.data.splits import Dataset

SOP_IMAGES = {"train": 59_551, "test": 60_502}
INSHOP_IMAGES = {"train": 25_882, "query": 14_218, "gallery": 12_612}
MARKET_IMAGES = {"bounding_box_train": 12_936, "query": 3_368, "bounding_box_test": 19_732}

_SOP = Layout(
    "Stanford_Online_Products",
    ("Ebay_train.txt", "Ebay_test.txt"),
    "Stanford_Online_Products.zip of https://cvgl.stanford.edu/projects/lifted_struct, unpacked",
)
_INSHOP = Layout(
    "In-shop Clothes Retrieval Benchmark",
    ("Eval/list_eval_partition.txt", "Img/img/"),
    "https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html, img.zip unpacked where it is",
)
_INSHOP_TOGETHER = Layout(
    "inshop", ("list_eval_partition.txt", "img/"), "the same list and images in one folder"
)
_MARKET = Layout(
    "Market-1501-v15.09.15",
    tuple(f"{part}/" for part in MARKET_IMAGES),
    "Market-1501-v15.09.15.zip of https://zheng-lab.cecs.anu.edu.au/Project/project_reid.html, unpacked",
)


def load_sop(size: int, roots: Sequence[Path], cache: Path) -> Dataset:
    _, folder = find("sop", [_SOP], roots)
    parts = {}
    for part, published in SOP_IMAGES.items():
        path = folder / f"Ebay_{part}.txt"
        # image_id class_id super_class_id path
        parts[part] = [(int(row[1]), row[3]) for row in read_table(path, 4, header=1)]
        check_count("sop", "images", len(parts[part]), published, path)
    title, tests = "Stanford Online Products", {"test classes": parts["test"]}
    return photo_dataset("sop", title, parts["train"], tests, folder, size, cache)


def load_inshop(size: int, roots: Sequence[Path], cache: Path) -> Dataset:
    layout, folder = find("inshop", [_INSHOP, _INSHOP_TOGETHER], roots)
    path = folder / layout.paths[0]
    parts: dict[str, Listing] = {part: [] for part in INSHOP_IMAGES}
    # The number of images, then image_name item_id evaluation_status: img/….jpg id_00000002 query
    for name, item, part in read_table(path, 3, header=2):
        if part not in parts:
            raise DataError(f"{path}: {name} belongs to {part!r}, expected one of {', '.join(parts)}")
        parts[part].append((int(item.removeprefix("id_")), name))
    for part, published in INSHOP_IMAGES.items():
        check_count("inshop", f"{part} images", len(parts[part]), published, path)
    train, place = parts.pop("train"), (folder / layout.paths[1]).parent
    return photo_dataset("inshop", "In-shop Clothes Retrieval", train, parts, place, size, cache)


def load_market(size: int, roots: Sequence[Path], cache: Path) -> Dataset:
    """Without junk (−1) and distractors (0000). Images, twice as high as wide, are made square like all."""
    _, folder = find("market", [_MARKET], roots)
    parts = {}
    for part, published in MARKET_IMAGES.items():
        names = [path.name for path in (folder / part).glob("*.jpg")]
        check_count("market", "images", len(names), published, folder / part)
        # person_camera-and-sequence_frame_box.jpg
        people = [(int(name.split("_")[0]), f"{part}/{name}") for name in names]
        parts[part] = [(person, name) for person, name in people if person > 0]
    tests = {"query": parts["query"], "gallery": parts["bounding_box_test"]}
    return photo_dataset("market", "Market-1501", parts["bounding_box_train"], tests, folder, size, cache)
