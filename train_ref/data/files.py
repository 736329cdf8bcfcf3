"""Finding a data set's files, and saying what is missing or damaged, where, and where to get it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class DataError(Exception):
    """A data set is missing, incomplete or damaged, or there is no room to keep it decoded."""


@dataclass(frozen=True)
class Layout:
    """One way in which a data set may lie below a root."""

    folder: str
    paths: tuple[str, ...]
    """Files and folders below `folder` that have to be there; a folder's ends in "/"."""
    origin: str
    """Where to get it."""

    def missing(self, root: Path) -> list[Path]:
        places = [(root / self.folder / path, path.endswith("/")) for path in self.paths]
        return [path for path, is_folder in places if not (path.is_dir() if is_folder else path.is_file())]


def default_roots() -> list[Path]:
    """$TRIPLETOPS_DATA where it is set, then data/ here."""
    variable = os.environ.get("TRIPLETOPS_DATA")
    return [*([Path(variable)] if variable else []), Path("data")]


def find(name: str, layouts: Sequence[Layout], roots: Sequence[Path]) -> tuple[Layout, Path]:
    """The first of `layouts`, the best first, that is complete below one of `roots`, and its folder there."""
    for layout in layouts:
        for root in roots:
            if not layout.missing(root):
                return layout, root / layout.folder
    searched = ", ".join(str(root.absolute()) for root in roots)
    lines = [f"{name}: no complete copy was found in {searched}. $TRIPLETOPS_DATA may name another folder."]
    for place, layout in enumerate(layouts):
        lines.append(f"{'Or' if place else 'Needed'}: {layout.origin}. Missing:")
        lines += [f"  {path.absolute()}" for root in roots for path in layout.missing(root)]
    raise DataError("\n".join(lines))


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_sha256(path: Path, expected: str, get_it: str = "anew.") -> None:
    """Raise unless the digest is `expected`, or begins with it where only its first digits are published."""
    found = sha256(path)
    if not found.startswith(expected):
        raise DataError(
            f"{path} is damaged or another version: its SHA-256 is {found}, expected {expected}. "
            f"Get it {get_it}"
        )


def check_count(name: str, what: str, found: int, expected: int, place: Path) -> None:
    """Raise unless the count is the published one; for lists and folders that have no published digest."""
    if found != expected:
        raise DataError(
            f"{name}: {place} has {found:,} {what}, the published data set {expected:,}. "
            "Unpack or download it anew."
        )


def read_table(path: Path, columns: int, header: int = 0) -> list[list[str]]:
    """The rows of a text file of columns between spaces, below `header` lines."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [line.split() for line in lines]
    for number, row in enumerate(rows[header:], header + 1):
        if len(row) != columns:
            raise DataError(
                f"{path}: line {number} has {len(row)} columns, expected {columns}: {lines[number - 1]!r}"
            )
    return rows[header:]
