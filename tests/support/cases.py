"""The cases that every backend is tried with: batches of a kind, and which words they meet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from tests.support.backends import Backend, in_turn
from tests.support.batches import Batch, labels_of, random_batch
from tests.support.calls import DISTANCES, DTYPES, TripletOptions
from tests.support.words import RULES, Rules, every_option, sized

POWERS = {"euclidean": 1, "sqeuclidean": 2, "cosine": 0}  # what a distance makes of the scale of the rows
HARD = Rules("hard", "hard", {})
OTHER_EDGES = "the edges of its tiles are elsewhere"
ROUNDED_UNIT_ROWS = "plain torch rounds unit rows before it can tell them apart"


@dataclass(frozen=True)
class Case:
    """A name, how to make the batches, and the words they meet. Words take turns from batch to batch."""

    name: str
    batches: Callable[[], Iterable[Batch]]
    distances: tuple[str, ...] = DISTANCES
    always: tuple[Rules, ...] = ()  # rules that every batch meets
    rules: int = len(RULES)  # how many others it meets
    options: int = 1  # how many of a loss and a reduction each of them is tried with
    unit: float = 1.0  # the size of the rows, and so of margins and offsets
    plain_cannot: tuple[tuple[str, str], ...] = ()  # by distance: why plain torch in float32 is no match
    not_slow: str = ""  # why a slow backend leaves it out

    def __str__(self) -> str:
        return self.name

    def meets(self, distance: str, backend: Backend, turn: int) -> bool:
        """Where words take turns, so do distances."""
        return backend.every_word or self.distances[turn % len(self.distances)] == distance

    def words(
        self, distance: str, backend: Backend, turn: int
    ) -> Iterator[tuple[Rules, list[TripletOptions]]]:
        """For the batch whose turn it is: rules, and the options to try them with."""
        unit = self.unit ** POWERS[distance]
        rules, options = (self.rules, self.options) if backend.every_word else (1, 1)
        always = () if backend.slow else self.always
        for number, each in enumerate((*always, *in_turn(RULES, turn, rules))):
            some = every_option(distance, turn, unit)
            if unit > 1e30:  # a sum would leave the type
                some = [option for option in some if option.reduction == "none"]
            yield each._replace(numbers=sized(each.numbers, unit)), in_turn(some, turn + number, options)


# Around the edges of the cpu's tiles: 6 or 14 rows; 8, 16 or 32 columns of floats, 4, 8 or 16 of doubles.
EDGES = (*range(1, 10), 11, 13, 14, 15, 16, 17, 23, 29, 31, 32, 33, 47, 48, 49, 63, 64, 65, 83, 84, 85, 97)
FEW = (1, 5, 6, 7, 14, 15, 31, 33, 64)
LARGE = (127, 128, 129, 191, 193, 223, 224, 225, 256, 257, 331, 577, 1153)
WIDTHS = (1, 2, 7, 8, 9, 31, 64, 101, 127, 128, 129, 255, 256, 257, 383)
# Around those of Triton's interpreter: 32 rows and columns, and 16 deep.
INTERPRETED_EDGES = (
    *((1, 1), (2, 16), (3, 2), (15, 31), (31, 16), (32, 17), (33, 32), (34, 1), (63, 33), (64, 15)),
    *((65, 3), (1, 5, 33), (5, 3, 32), (16, 17, 31), (33, 16, 65), (31, 8, 1), (65, 2)),
)


def everyday() -> list[Batch]:
    """Every type; the rows themselves and other candidates, with and without the anchors among them."""
    batches = [
        random_batch(2, 1, classes=2),
        random_batch(7, 3, classes=2, seed=1),
        random_batch(17, 16, classes=3, seed=2),
        random_batch(33, 5, classes=11, seed=3),
        random_batch(65, 31, classes=5, seed=4),
        random_batch(97, 7, classes=2, seed=5),
        random_batch(29, 13, classes=4, dtype=torch.float64, seed=6),
        random_batch(5, 8, 40, seed=7),
        random_batch(33, 4, 18, with_self=False, seed=8),
        random_batch(1, 33, 70, classes=2, dtype=torch.float64, seed=9),
        random_batch(10, 5, 34).to(torch.float16),
        random_batch(34, 3, classes=9, dtype=torch.bfloat16),
    ]
    ignoring = random_batch(47, 6, 53, classes=6, seed=10)
    ignoring.emb[ignoring.labels == 2] = math.nan
    assert ignoring.ref_emb is not None
    ignoring.ref_emb[ignoring.ref_labels == 2] = math.inf
    return [*batches, replace(ignoring, ignore_label=2)]


def edges(dtype: torch.dtype) -> list[Batch]:
    return [
        random_batch(count, width, classes=max(2, count // 4), dtype=dtype)
        for count, width in product(EDGES, (1, 3, 8, 17))
    ]


def interpreted_edges() -> list[Batch]:
    return [
        random_batch(count, *more, classes=max(2, count // 4), dtype=DTYPES[2 + turn % 2])
        for turn, (count, *more) in enumerate(INTERPRETED_EDGES)
    ]


def candidates_at_edges(dtype: torch.dtype) -> list[Batch]:
    return [
        random_batch(count, 1 + (count + candidates) % 9, candidates, classes=3, dtype=dtype)
        for count, candidates in product(FEW, (*FEW, 16, 32, 65, 97))
    ]


def large(count: int) -> list[Batch]:
    """Rows against themselves, and few anchors against many candidates."""
    return [
        *(random_batch(count, width, classes=count // 5) for width in (2, 7)),
        random_batch(67, 11, count, classes=count // 50 + 2),
    ]


def width_of(width: int) -> list[Batch]:
    return [random_batch(37, width, classes=6, dtype=dtype) for dtype in (torch.float32, torch.float64)]


def duplicates(dtype: torch.dtype) -> list[Batch]:
    """Few different rows, none of them round, all over the tiles."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    shapes = ((200, 5, None), (131, 40, None), (70, 6, 150), (70, 4, None), (19, 6, 80))
    for count, different, candidates in shapes:
        rows = torch.randn(different, 19, generator=generator) + 3
        emb = rows[torch.randint(different, (count,), generator=generator)].to(dtype)
        batch = Batch(emb, labels_of(count, 4, generator))
        if candidates:
            ref_emb = rows[torch.randint(different, (candidates,), generator=generator)].to(dtype)
            batch = replace(batch, ref_emb=ref_emb, ref_labels=labels_of(candidates, 4, generator))
        batches.append(batch)
    return batches


def uneven_classes() -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    batches = []
    for sizes in ((1, 2, 131, 5, 1, 17, 40), (1, 2, 41, 5, 1, 17)):
        labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        shuffled = labels[torch.randperm(len(labels), generator=generator)]
        emb = torch.randn(len(labels), 9, generator=generator)
        for some in (labels, labels.flip(0), shuffled):
            batches += [Batch(emb, some), Batch(emb[:50], shuffled[:50], emb.roll(1, 0) * 1.5, some)]
    return batches


def of_type(dtype: torch.dtype) -> list[Batch]:
    return [random_batch(59, 21, candidates, classes=7, dtype=dtype) for candidates in (None, 77)]


def of_two_types() -> list[Batch]:
    batch = random_batch(24, 10, 31)
    assert batch.ref_emb is not None
    return [
        replace(batch, emb=batch.emb.to(dtype), ref_emb=batch.ref_emb.to(other))
        for dtype, other in product(DTYPES, DTYPES)
        if dtype != other
    ]


def expanded() -> list[Batch]:
    """Rows and columns that share memory, and labels that are strided or expanded."""
    generator = torch.Generator().manual_seed(4)
    labels = labels_of(60, 4, generator)[::2]
    batches = []
    for dtype in DTYPES:
        column = torch.randn(30, 1, generator=generator).to(dtype).expand(30, 6)
        row = torch.randn(1, 6, generator=generator).to(dtype).expand(30, 6)
        batches += [Batch(column, labels), Batch(row, labels)]
        batches += [Batch(column, labels, row, labels.flip(0)), Batch(row, labels, column, labels.flip(0))]
        batches.append(Batch(column, torch.tensor([3]).expand(30), column, labels))
    return batches


# Scales


def scaled(batch: Batch, factor: float) -> Batch:
    ref_emb = None if batch.ref_emb is None else batch.ref_emb * factor
    return replace(batch, emb=batch.emb * factor, ref_emb=ref_emb)


def times(factor: float, width: int = 24, dtype: torch.dtype = torch.float32) -> list[Batch]:
    shapes = ((60, None), (60, 50), (7, 34), (20, None))
    return [
        scaled(random_batch(count, width, candidates, classes=6, dtype=dtype), factor)
        for count, candidates in shapes
    ]


def with_lengths() -> list[Batch]:
    generator, batches = torch.Generator().manual_seed(5), []
    for count in (80, 34):
        lengths = 10.0 ** torch.randint(-15, 16, (count, 1), generator=generator)
        batch = random_batch(count, 16, classes=5)
        batches.append(replace(batch, emb=batch.emb * lengths))
    return batches


def with_outlier() -> list[Batch]:
    batch = random_batch(12, 8, 35, classes=5)
    batch.emb[7] *= 1e4
    return [batch]


def with_offset(offset: float, dtype: torch.dtype) -> list[Batch]:
    batches = []
    for count, candidates in ((90, None), (90, 70), (34, 9)):
        batch = random_batch(count, 30, candidates, classes=9, dtype=torch.float64)
        ref_emb = None if batch.ref_emb is None else batch.ref_emb + offset
        batches.append(replace(batch, emb=batch.emb + offset, ref_emb=ref_emb).to(dtype))
    return batches


def with_clusters(spread: float) -> list[Batch]:
    """Where the scan sees nothing but rounding, reported distances must still be right, and in order."""
    generator, batches = torch.Generator().manual_seed(6), []
    for centres, repeats in ((9, 13), (5, 7)):
        count = centres * repeats
        emb = torch.randn(centres, 20, generator=generator).repeat(repeats, 1)
        emb = emb + spread * torch.randn(count, 20, generator=generator)
        batches.append(Batch(emb, labels_of(count, 4, generator)))
    return batches


NOT_SQUARED = ("euclidean", "cosine")  # where squared distances leave the type
NO_ROOM = (("euclidean", "plain torch squares in the type it is given"),)
NOT_APART = (("cosine", ROUNDED_UNIT_ROWS),)

SCALES = [
    Case("huge", partial(times, 1e18), unit=1e18, options=6),
    Case("tiny", partial(times, 1e-18), unit=1e-18, options=6),
    Case("squares overflow", partial(times, 1e30), NOT_SQUARED, unit=1e30, plain_cannot=NO_ROOM),
    Case("squares underflow", partial(times, 1e-30), NOT_SQUARED, unit=1e-30, plain_cannot=NO_ROOM),
    Case("largest", partial(times, 3e37, 3), NOT_SQUARED, unit=3e37, plain_cannot=NO_ROOM),
    Case("huge doubles", partial(times, 1e150, 24, torch.float64), NOT_SQUARED, unit=1e150),
    Case("lengths", with_lengths, options=4),
    Case("outlier", with_outlier),
    Case("offset", partial(with_offset, 1e4, torch.float32), options=4, plain_cannot=NOT_APART),
    Case("offset of doubles", partial(with_offset, 1e4, torch.float64), options=4),
    Case("offset of halves", partial(with_offset, 100.0, torch.float16)),
    Case("clusters", partial(with_clusters, 1e-2), unit=1e-2, options=4, plain_cannot=NOT_APART),
    Case("narrow clusters", partial(with_clusters, 1e-4), unit=1e-4, options=4, plain_cannot=NOT_APART),
    Case("narrowest clusters", partial(with_clusters, 1e-6), unit=1e-6, options=4, plain_cannot=NOT_APART),
]

CASES = [
    *(
        Case(f"tile edges, {dtype}", partial(edges, dtype), NOT_SQUARED, (HARD,), 1, not_slow=OTHER_EDGES)
        for dtype in (torch.float32, torch.float64)
    ),
    *(
        Case(
            f"candidates at tile edges, {dtype}",
            partial(candidates_at_edges, dtype),
            rules=1,
            not_slow=OTHER_EDGES,
        )
        for dtype in (torch.float32, torch.float64)
    ),
    Case("edges of the interpreter's tiles", interpreted_edges, always=(HARD,), rules=2),
    *(Case(f"{count} rows", partial(large, count), NOT_SQUARED, (HARD,), 3) for count in LARGE),
    *(Case(f"{width} columns", partial(width_of, width), always=(HARD,), rules=2) for width in WIDTHS),
    *(Case(f"duplicates, {dtype}", partial(duplicates, dtype), rules=8) for dtype in DTYPES),
    Case("uneven classes", uneven_classes, NOT_SQUARED, rules=10),
    *(Case(f"every type, {dtype}", partial(of_type, dtype), options=2) for dtype in DTYPES),
    Case("two types", of_two_types, rules=2),
    Case("expanded rows", expanded, always=(HARD,), rules=1),
    *SCALES,
]
