"""The folder of a run: its configuration, measurements, checkpoint and arrays, each file whole or not there.

A file is written under another name, brought to the disk and renamed, so that a process that is killed at any
moment leaves the old file or the new one. One checkpoint suffices, for trainings follow each other: it holds
the training under way with the records of its epochs. `metrics.jsonl` is written from those records, never
appended to, so that a resumed run can't have an epoch twice.
"""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy
import torch

Record = dict[str, Any]


class FolderError(Exception):
    """The folder can't be written to, or holds something else."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that its name never stands for half of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


class RunFolder:
    def __init__(self, path: Path):
        self.path = path
        self.config_file = path / "config.json"
        self.metrics_file = path / "metrics.jsonl"
        self.checkpoint_file = path / "checkpoint.pt"

    def create(self, config: Record) -> None:
        try:
            if self.config_file.exists():
                raise FolderError(
                    f"{self.path} holds a run already: go on with `python -m train_ref resume {self.path}`, "
                    "or choose another folder with --out"
                )
            self.path.joinpath("arrays").mkdir(parents=True, exist_ok=True)
            write_whole(self.config_file, json.dumps(config, indent=2).encode())
        except OSError as error:
            raise FolderError(f"{self.path} can't be written to: {error.strerror or error}") from error

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
            config: Record = json.loads(self.config_file.read_text())
        except (FileNotFoundError, NotADirectoryError):
            raise FolderError(f"{self.path} is no run: it has no {self.config_file.name}") from None
        return config

    def records(self) -> list[Record]:
        if not self.metrics_file.exists():
            return []
        return [json.loads(line) for line in self.metrics_file.read_text().splitlines()]

    def write_records(self, records: list[Record]) -> None:
        write_whole(self.metrics_file, "".join(json.dumps(record) + "\n" for record in records).encode())

    def checkpoint(self) -> Record | None:
        if not self.checkpoint_file.exists():
            return None
        state: Record = torch.load(self.checkpoint_file, map_location="cpu", weights_only=True)
        return state

    def write_checkpoint(self, state: Record) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_whole(self.checkpoint_file, buffer.getvalue())

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
        with numpy.load(file) as found:
            return dict(found)
