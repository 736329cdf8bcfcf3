"""The folder of a run: its configuration, measurements, checkpoint and arrays, each file whole or not there.

A file is written under another name, brought to the disk and renamed, so that a process that is killed at any
moment leaves the old file or the new one. One checkpoint suffices, for trainings follow each other: it holds
the training under way with the records of its epochs. `metrics.jsonl` is written from those records, never
appended to, so that a resumed run can't have an epoch twice.

The first line of a checkpoint is the SHA-256 of the rest, for torch loads damaged weights without a word. A
checkpoint from before there were digests, a plain file of torch's, is resumed from as it is.

One process at a time works on a run. It holds a lock, which the system takes from it however it ends. Reading
a run, as a report does, needs no lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import platform
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch

Record = dict[str, Any]

# What a run writes, its figures aside, and the folders that it makes for it, inner ones first.
FILES = (
    "config.json",
    "metrics.jsonl",
    "checkpoint.pt",
    "report.md",
    "report.html",
    "arrays/*.npz",
    "tensorboard/*/*.tfevents.*",
)
FOLDERS = ("arrays", "tensorboard/*", "tensorboard")
CONFIG = {"experiment", "scale", "quick", "changes", "backend", "processes", "tensorboard", "environment"}
PLAIN = b"PK"  # how a plain file of torch's begins: it is a zip file


class Checkpoint(NamedTuple):
    """The training under way."""

    cell: str
    training: Record  # its state
    history: list[Record]  # of its epochs


class FolderError(Exception):
    """The folder is in use, can't be written to, or holds something else or something damaged."""


def _unwritable(path: Path, error: OSError) -> FolderError:
    return FolderError(f"{path} can't be written to: {error.strerror or error}")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that its name never stands for half of it; its folder is made if need be."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException as error:
        with suppress(OSError):  # it was never made, or nothing here can be removed
            part.unlink()
        if isinstance(error, OSError):
            raise _unwritable(path, error) from error
        raise


class RunFolder:
    def __init__(self, path: Path):
        self.path = path
        self.config_file = path / "config.json"
        self.metrics_file = path / "metrics.jsonl"
        self.checkpoint_file = path / "checkpoint.pt"

    @contextmanager
    def begun(self, config: Record) -> Iterator[None]:
        """Begin a run and hold its lock.

        If the work fails before anything was saved, the run is removed, so that the corrected command finds
        the place free. What else lies in the folder stays, and so does a folder that was there before. A run
        that fails by a `FolderError` is kept: it is as it should be, and can go on when the disk is.
        """
        with self._made(), self.locked():
            self._check_free()
            write_whole(self.config_file, json.dumps(config, indent=2).encode())
            try:
                yield
            except FolderError:
                raise
            except BaseException:
                if not self.metrics_file.exists() and not self.checkpoint_file.exists():
                    self.clear()
                raise

    @contextmanager
    def _made(self) -> Iterator[None]:
        """Make the folder and those above it; what is empty at the end goes again."""
        missing = [each for each in (self.path, *self.path.parents) if not each.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            yield
        finally:
            for folder in missing:
                with suppress(OSError):  # something is in it
                    folder.rmdir()

    def _check_free(self) -> None:
        if self.config_file.exists():
            raise FolderError(
                f"{self.path} holds a run already: go on with `python -m train_ref resume {self.path}`, "
                "or choose another folder with --out"
            )
        if found := self._found(*FILES, *FOLDERS):
            raise FolderError(
                f"{found[0]} is in the way of a new run: move it away, or choose another folder with --out"
            )

    def clear(self) -> None:
        """Remove the files of a run, and the folders within that are empty without them."""
        for file in self._found(*FILES):
            file.unlink()
        for folder in self._found(*FOLDERS):
            with suppress(OSError):  # something else is in it
                folder.rmdir()

    def _found(self, *patterns: str) -> list[Path]:
        return [path for pattern in patterns for path in self.path.glob(pattern)]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from working on the run."""
        path = self.path / ".lock"
        try:
            file = path.open("ab+", buffering=0)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().decode(errors="replace") or "another process"
                raise FolderError(
                    f"{self.path} is in use by {holder}: wait until it has ended, or stop it"
                ) from None
            except OSError as error:
                raise FolderError(f"{self.path} can't be locked: {error.strerror or error}") from error
            if not os.fstat(file.fileno()).st_nlink:
                raise FolderError(f"{self.path} was in use by a process that is just ending: try again")
            try:
                with suppress(OSError):  # on a full disk the lock is held without naming its holder
                    file.truncate(0)
                    file.write(_this_process().encode())
                yield
            finally:
                with suppress(OSError):
                    path.unlink()

    def reserve(self, size: int) -> None:
        """Raise unless `size` bytes can be written here; better now than after hours of training."""
        try:
            with tempfile.TemporaryFile(dir=self.path) as file:
                os.posix_fallocate(file.fileno(), 0, max(size, 1))
        except OSError as error:
            raise FolderError(
                f"{self.path} has no room for {size / 2**20:.0f} MiB of checkpoints and results: "
                f"{error.strerror or error}"
            ) from error

    def config(self) -> Record:
        try:
            config = json.loads(self.config_file.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise FolderError(f"{self.path} is no run: it has no {self.config_file.name}") from None
        except ValueError as error:
            raise FolderError(f"{self.config_file} is damaged ({error}): begin the run anew") from error
        if not isinstance(config, dict) or not set(config) >= CONFIG:
            raise FolderError(f"{self.config_file} is not of a run: it needs {', '.join(sorted(CONFIG))}")
        return config

    def records(self) -> list[Record]:
        try:
            return [json.loads(line) for line in self.metrics_file.read_bytes().splitlines()]
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise FolderError(
                f"{self.metrics_file} is damaged ({error}): delete it, and the trainings are done anew"
            ) from error

    def write_records(self, records: list[Record]) -> None:
        write_whole(self.metrics_file, "".join(json.dumps(record) + "\n" for record in records).encode())

    def checkpoint(self) -> Checkpoint | None:
        try:
            content = self.checkpoint_file.read_bytes()
        except FileNotFoundError:
            return None
        digest, _, saved = content.partition(b"\n")
        if content.startswith(PLAIN):
            saved = content
        elif digest != _digest(saved):
            raise self.unfit_checkpoint("is damaged, for its digest is another")
        try:
            return Checkpoint(**torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True))
        except Exception as error:  # of many kinds: of the zip file, of its pickle, of what it holds
            raise self.unfit_checkpoint("is damaged or of no run") from error

    def unfit_checkpoint(self, reason: str) -> FolderError:
        return FolderError(
            f"{self.checkpoint_file} {reason}: delete it, and the training that was under way begins anew"
        )

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        buffer = io.BytesIO()
        torch.save(checkpoint._asdict(), buffer)
        saved = buffer.getvalue()
        write_whole(self.checkpoint_file, _digest(saved) + b"\n" + saved)

    def drop_checkpoint(self) -> None:
        self.checkpoint_file.unlink(missing_ok=True)

    def _array_file(self, cell: str) -> Path:
        return self.path / "arrays" / (re.sub(r"[^A-Za-z0-9#=.]+", "-", cell) + ".npz")

    def write_arrays(self, cell: str, arrays: dict[str, numpy.ndarray[Any, Any]]) -> None:
        buffer = io.BytesIO()
        numpy.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
        write_whole(self._array_file(cell), buffer.getvalue())

    def arrays(self, cell: str) -> dict[str, numpy.ndarray[Any, Any]]:
        """What was kept of a training; empty where nothing was."""
        file = self._array_file(cell)
        if not file.exists():
            return {}
        try:
            with numpy.load(io.BytesIO(file.read_bytes())) as found:
                return dict(found)
        except Exception as error:  # of many kinds: of the zip file, of its compression, of numpy
            raise FolderError(
                f"{file} is damaged: delete it, and the figures are drawn without it"
            ) from error


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _this_process() -> str:
    """In words, for those who find a run in use."""
    return (
        f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')} "
        f"({shlex.join(sys.argv[1:])})"
    )
