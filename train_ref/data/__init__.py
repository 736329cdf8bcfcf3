"""The data sets: `load` finds, checks and decodes one, as tensors that a batch is indexed from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from train_ref.data.augment import as_floats, views
from train_ref.data.cache import default_folder
from train_ref.data.files import DataError, default_roots
from train_ref.data.fine_grained import load_cars, load_cub
from train_ref.data.folders import load_inshop, load_market, load_sop
from train_ref.data.mnist_digits import load_digits, load_mnist
from train_ref.data.omniglot import load_omniglot
from train_ref.data.splits import Dataset, Split

__all__ = ["DATA_SETS", "DataError", "Dataset", "Split", "as_floats", "load", "views"]

DATA_SETS: dict[str, Callable[[int, Sequence[Path], Path], Dataset]] = {
    "mnist": load_mnist,
    "digits": load_digits,
    "omniglot": load_omniglot,
    "cub": load_cub,
    "cars": load_cars,
    "sop": load_sop,
    "inshop": load_inshop,
    "market": load_market,
}


def load(name: str, size: int, roots: Sequence[Path] | None = None, cache: Path | None = None) -> Dataset:
    """The data set `name` as size×size images.

    It is looked for in `roots`, else in $TRIPLETOPS_DATA, then in data/. Decoded images are kept in `cache`,
    else in $XDG_CACHE_HOME/tripletops or ~/.cache/tripletops. `DataError` says what is missing or damaged.
    """
    if name not in DATA_SETS:
        raise ValueError(f"no data set is called {name!r}; there are {', '.join(DATA_SETS)}")
    return DATA_SETS[name](size, default_roots() if roots is None else roots, cache or default_folder())
