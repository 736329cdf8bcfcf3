"""Batches of many kinds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """The tensors of one call."""

    emb: Tensor
    labels: Tensor
    ref_emb: Tensor | None = None
    ref_labels: Tensor | None = None
    self_index: Tensor | None = None
    ignore_label: int | None = None
    seed: int = 7

    def options(self) -> dict[str, Any]:
        return {
            "ref_emb": self.ref_emb,
            "ref_labels": self.ref_labels,
            "self_index": self.self_index,
            "ignore_label": self.ignore_label,
            "seed": self.seed,
        }

    def to(self, dtype: torch.dtype) -> Batch:
        ref_emb = None if self.ref_emb is None else self.ref_emb.to(dtype)
        return replace(self, emb=self.emb.to(dtype), ref_emb=ref_emb)

    def compute_type(self) -> torch.dtype:
        kinds = (self.emb.dtype, self.emb.dtype if self.ref_emb is None else self.ref_emb.dtype)
        return torch.float64 if torch.float64 in kinds else torch.float32

    def plain(self) -> Batch:
        """As the oracle takes it: the public functions accept any integer type."""
        return replace(
            self,
            labels=self.labels.long(),
            ref_labels=None if self.ref_labels is None else self.ref_labels.long(),
            self_index=None if self.self_index is None else self.self_index.long(),
        )


def labels_of(count: int, classes: int, generator: torch.Generator) -> Tensor:
    """`classes` ids, shuffled, as evenly often as can be."""
    labels = torch.arange(count) % max(classes, 1)
    return labels[torch.randperm(count, generator=generator)]


def random_batch(
    count: int,
    width: int,
    candidates: int | None = None,
    *,
    classes: int = 4,
    dtype: torch.dtype = torch.float32,
    with_self: bool = True,
    seed: int = 0,
) -> Batch:
    """Normal rows; with `candidates`, another set of as many, which holds half the anchors if `with_self`."""
    generator = torch.Generator().manual_seed(seed + 1000 * count + width)
    emb = torch.randn(count, width, generator=generator, dtype=torch.float64)
    labels = labels_of(count, classes, generator)
    if candidates is None:
        return Batch(emb.to(dtype), labels, seed=seed)
    ref_emb = torch.randn(candidates, width, generator=generator, dtype=torch.float64)
    ref_labels = labels_of(candidates, classes, generator)
    self_index = None
    if with_self:
        shared = min(count, candidates)
        place = torch.randperm(candidates, generator=generator)[:shared]
        ref_emb[place], ref_labels[place] = emb[:shared], labels[:shared]
        self_index = torch.full((count,), -1)
        self_index[:shared] = place
        self_index[1::2] = -1
    return Batch(emb.to(dtype), labels, ref_emb.to(dtype), ref_labels, self_index, seed=seed)


KINDS = ("normal", "lattice", "duplicates", "some zero", "offset", "long", "short")


def rows_of_kind(kind: str, count: int, width: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Rows of one of KINDS in float64, none of them beyond the range of `dtype`."""
    x = torch.randn(count, width, generator=generator, dtype=torch.float64)
    if kind == "lattice":
        x = torch.randint(-2, 3, (count, width), generator=generator).double()
    elif kind == "duplicates" and count:
        x = x[torch.randint(1 + count // 4, (count,), generator=generator)]
    elif kind == "some zero":
        x[torch.rand(count, generator=generator) < 0.3] = 0
    elif kind == "offset":
        x += 100
    elif kind in ("long", "short") and dtype not in (torch.float16, torch.bfloat16):
        x *= 1e15 if kind == "long" else 1e-15
    return x


# Batches without any triplet. Blocks of the kernels hold 96 rows.
ALONE = {
    "no rows": Batch(torch.ones(0, 3), torch.ones(0, dtype=torch.int64)),
    "one row": Batch(torch.ones(1, 3), torch.ones(1, dtype=torch.int64)),
    "one class": replace(random_batch(120, 3), labels=torch.zeros(120, dtype=torch.int64)),
    "all classes distinct": replace(random_batch(120, 3), labels=torch.arange(120)),
    "no candidates": Batch(
        torch.ones(4, 3), torch.arange(4) % 2, torch.ones(0, 3), torch.ones(0, dtype=torch.int64)
    ),
    "no anchors": random_batch(0, 3, 20),
    "only itself": Batch(
        torch.ones(2, 3), torch.arange(2), torch.ones(2, 3), torch.arange(2), torch.arange(2)
    ),
    "all ignored": replace(random_batch(20, 3), labels=torch.zeros(20, dtype=torch.int64), ignore_label=0),
    "no dimension, one class": Batch(torch.ones(5, 0), torch.zeros(5, dtype=torch.int64)),
}


def mirrored(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` of the rows and their opposites, shuffled: their mean is 0, so that centring rounds nothing."""
    half = rows[torch.randint(len(rows), (count // 2,), generator=generator)]
    whole = torch.cat([half, -half, half.new_zeros(count % 2, rows.shape[1])])
    return whole[torch.randperm(count, generator=generator)]


def lattice_batch(
    count: int,
    width: int,
    candidates: int | None = None,
    *,
    cosine: bool = False,
    classes: int = 3,
    seed: int = 0,
) -> Batch:
    """Rows on a small lattice, full of ties and duplicates, whose distances are exact in every float type.

    For cosine the rows are ±1 in 1, 4 or 16 places, times a power of two, or 0: so are their norms.
    """
    generator = torch.Generator().manual_seed(seed + 1000 * count + width)
    rows = torch.randint(-2, 3, (4 * count + 4, width), generator=generator).float()
    if cosine:
        rows = torch.zeros(4 * count + 4, width)
        for row in rows:
            power = int(torch.randint(3, (), generator=generator))
            places = torch.randperm(width, generator=generator)[: 4**power]
            if len(places) == 4**power:
                signs = torch.randint(2, places.shape, generator=generator) * 2.0 - 1
                row[places] = signs * 2.0 ** int(torch.randint(-2, 3, (), generator=generator))
    emb, labels = mirrored(rows, count, generator), labels_of(count, classes, generator)
    if candidates is None:
        return Batch(emb, labels, seed=seed)
    ref_emb, ref_labels = mirrored(rows, candidates, generator), labels_of(candidates, classes, generator)
    self_index = torch.randint(-1, candidates, (count,), generator=generator) if candidates else None
    return Batch(emb, labels, ref_emb, ref_labels, self_index, seed=seed)


LAYOUTS = ("adjacent", "transposed", "strided", "one off")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values in other places of memory; between them, where there is room, NaN."""
    rows, columns = x.shape
    if layout == "transposed":
        return x.t().contiguous().t()
    if layout == "strided":
        room = x.new_full((2 * rows, 3 * columns), math.nan)
        room[::2, 1::3] = x
        return room[::2, 1::3]
    if layout == "one off":
        room = x.new_full((rows * (columns + 3) + 1,), math.nan)
        shifted = room[1:].view(rows, columns + 3)[:, :columns]
        shifted.copy_(x)
        return shifted
    return x
