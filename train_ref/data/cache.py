"""Decoded images and the outputs of frozen blocks are computed once and kept as .npy files, which later runs
map into memory.

A cached file's name has a digest of what it was made from, so that a changed source is decoded anew. A file
is written under another name, in space that was reserved, and renamed when it is whole: a run that is killed
leaves no half-written file, and a full disk is an error before the work starts.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import math
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from train_ref.data.files import DataError

Pixels = npt.NDArray[np.uint8]
Decoder = Callable[[io.BytesIO, int], Pixels]
"""An image file's bytes and a size to (C, size, size)."""
Array = np.memmap[Any, np.dtype[Any]]
Filler = Callable[[Array], None]

_VERSION = 1  # of the decoders; raise it when one changes, and older cached files are not used again
_BLOCK = 64


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tripletops"


@dataclass(frozen=True)
class ImageFiles:
    """Named images in a zip file or below a folder."""

    place: Path
    names: Sequence[str]

    def fingerprint(self) -> str:
        """A digest of names and sizes, in a zip also of the contents' checksums."""
        marks: dict[str, object]
        if self.place.is_dir():
            marks = {name: self._size(name) for name in self.names}
        else:
            with zipfile.ZipFile(self.place) as archive:
                members = {member.filename: (member.file_size, member.CRC) for member in archive.infolist()}
            marks = {name: members.get(name) for name in self.names}
        missing = [name for name, mark in marks.items() if mark is None]
        if missing:
            raise DataError(
                f"{len(missing):,} of {len(marks):,} images are missing in {self.place}: "
                f"{', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}. Unpack or download them anew."
            )
        return hashlib.sha256(repr(list(marks.items())).encode()).hexdigest()

    @contextmanager
    def reader(self) -> Iterator[Callable[[str], bytes]]:
        if self.place.is_dir():
            yield lambda name: (self.place / name).read_bytes()
        else:
            with zipfile.ZipFile(self.place) as archive:
                yield archive.read

    def _size(self, name: str) -> int | None:
        try:
            return (self.place / name).stat().st_size
        except OSError:
            return None


def decoded(files: ImageFiles, size: int, channels: int, decode: Decoder, folder: Path, name: str) -> Tensor:
    """(N, C, size, size) uint8, from `folder` if it was decoded before, in a file that begins with `name`."""
    made_from = f"{_VERSION} {decode.__name__} {size} {files.fingerprint()}"
    path = folder / f"{name}-{size}-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}.npy"
    shape = (len(files.names), channels, size, size)
    return kept(path, shape, np.uint8, lambda pixels: _fill(pixels, files, size, decode))


def kept(path: Path, shape: tuple[int, ...], dtype: npt.DTypeLike, fill: Filler) -> Tensor:
    """The array of the file `path`, which `fill` fills if it is not there yet."""
    try:
        if not _is_whole(path, shape, dtype):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Of processes that start together one fills it, and the others find its result.
            with path.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _is_whole(path, shape, dtype):
                    _write(path, shape, dtype, fill)
        # Copy-on-write: torch wants memory that it may write to, the file stays as it is.
        return torch.from_numpy(np.load(path, mmap_mode="c"))
    except OSError as error:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        raise DataError(
            f"{path.stem} takes {size / 1e6:,.0f} MB, which cannot be kept in {path.parent} ({error}). Make "
            "room there, or let XDG_CACHE_HOME name another folder."
        ) from error


def _is_whole(path: Path, shape: tuple[int, ...], dtype: npt.DTypeLike) -> bool:
    try:
        array = np.load(path, mmap_mode="r")
    except (FileNotFoundError, ValueError, EOFError):
        return False
    return bool(array.shape == shape and array.dtype == dtype)


def _write(path: Path, shape: tuple[int, ...], dtype: npt.DTypeLike, fill: Filler) -> None:
    partial = path.with_suffix(".partial")
    try:
        array = np.lib.format.open_memmap(partial, mode="w+", dtype=dtype, shape=shape)
        # A hole in the file that cannot be filled later would end the process.
        with partial.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, partial.stat().st_size)
        fill(array)
        array.flush()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _fill(pixels: Array, files: ImageFiles, size: int, decode: Decoder) -> None:
    with files.reader() as read, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:

        def fill_block(start: int) -> None:
            for row, name in enumerate(files.names[start : start + _BLOCK], start):
                try:
                    pixels[row] = decode(io.BytesIO(read(name)), size)
                except Exception as error:  # of many kinds: of the zip, of its compression, of the image
                    raise DataError(f"{name} in {files.place} is damaged ({error}). Get it anew.") from error

        try:
            list(threads.map(fill_block, range(0, len(files.names), _BLOCK)))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
