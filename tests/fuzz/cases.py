"""The calls to try: call `number` of a seed is the same one wherever and whenever it is made.

Its rows have a shape (clusters, duplicates, …) and a size (subnormal, one row far out, …); together these are
the kind by which failures are summed up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.batches import LAYOUTS, Batch, laid_out
from tripletops._words import FUNCTION, LOSS, NEGATIVE, OBJECTIVE, Choice, Number

FUNCTIONS = tuple(FUNCTION)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LABEL_TYPES = tuple(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))

# Tiles of the kernels have 6, 12, 16 or 32 rows, blocks have 96: so many, one more or one less.
COUNTS = (2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 15, 16, 17, 24, 31, 32, 33, 36, 40, 48)
LARGE_COUNTS = (64, 65, 95, 96, 97, 100, 130)
WIDTHS = (0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65)
SMALL = 17  # rows and columns, for a backend that is slow

# What is said several times is drawn as often.
SHAPES = (
    *("normal",) * 3,
    "lattice",
    "duplicates",
    "some zero",
    "offset",
    "clusters",
    "line",
    "sparse",
    "directions",
)
SIZES = (
    *("plain",) * 6,
    *("scaled",) * 2,
    *("subnormal",) * 2,
    "huge",
    *("outlier alone",) * 3,
    "outliers",
    "mixed rows",
    "mixed columns",
)
# Memory that several elements share, which makes them equal.
SHARED = ("equal rows", "equal columns", "overlapping")


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a public function, its batch aside."""

    function: str
    given: dict[str, Any]
    learned: float | Tensor | None = None  # what the objective learns

    @property
    def objective(self) -> str:
        return FUNCTION[self.function].objective

    @cached_property
    def options(self) -> dict[str, Any]:
        """Everything that is said or left to its default, words that cannot be chosen included."""
        function = FUNCTION[self.function]
        fixed = {table.option: word for table, word in function.fixed}
        return fixed | {option.name: option.default for option in function.options()} | self.given

    @property
    def distance(self) -> str:
        loss = self.options.get("loss")
        if OBJECTIVE[self.objective].cosine or (loss is not None and LOSS[loss].cosine):
            return "cosine"
        return self.options["distance"] or "euclidean"

    @property
    def rules(self) -> tuple[str, str] | None:
        """The rules by which one positive and one negative of each anchor are picked; None: nothing is."""
        positive, negative = self.options.get("positive"), self.options.get("negative")
        if negative is None or positive == negative == "all":
            return None
        return str(positive).replace("all", "hard"), str(negative).replace("all", "hard")

    def arguments(self, batch: Batch) -> dict[str, Any]:
        arguments = {**batch.options(), **self.given}
        if not FUNCTION[self.function].draws:
            arguments.pop("seed")
        return arguments


@dataclass(frozen=True, eq=False)
class Case:
    """One call, and how it was made."""

    seed: int
    number: int
    call: Call
    batch: Batch
    kind: str
    layout: str
    takes_threads: bool  # whether it has enough rows for several threads, which are too many for the oracle
    sizes_differ: bool  # whether rows of many sizes are in it, not just a few outliers

    @property
    def function(self) -> str:
        return self.call.function

    @property
    def rows(self) -> list[Tensor]:
        return [rows for rows in (self.batch.emb, self.batch.ref_emb) if rows is not None]

    @property
    def type_name(self) -> str:
        return "/".join(dict.fromkeys(str(rows.dtype).removeprefix("torch.") for rows in self.rows))

    def describe(self) -> str:
        batch = self.batch
        shapes = " against ".join(str(tuple(rows.shape)) for rows in self.rows)
        strides = ", ".join(str(rows.stride()) for rows in self.rows)
        lines = [
            f"{self.function} of {self.type_name} rows, {shapes}",
            f"  rows    {self.kind}; {self.layout}: strides {strides}",
            f"  labels  {in_short(batch.labels)}",
        ]
        if batch.ref_labels is not None:
            lines.append(f"  against {in_short(batch.ref_labels)}")
        if batch.self_index is not None:
            lines.append(f"  selves  {in_short(batch.self_index)}")
        words = {**self.call.given, "ignore_label": batch.ignore_label}
        if self.call.learned is not None:
            words["learned"] = self.call.learned
        if FUNCTION[self.function].draws:
            words["seed"] = batch.seed
        lines.append(f"  options {', '.join(f'{name}={value!r}' for name, value in words.items())}")
        return "\n".join(lines)


def in_short(integers: Tensor) -> str:
    values = integers.tolist()
    shown = str(values) if len(values) <= 50 else f"{len(values)}, {len(set(values))} of them different,"
    return f"{shown} {str(integers.dtype).removeprefix('torch.')}"


def case_of(seed: int, number: int, small: bool = False) -> Case:
    return Draw(np.random.default_rng([seed, number]), small).case(seed, number)


def within(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As `dtype`; what is too large for it becomes its largest number."""
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


class Draw:
    """Draws the parts of one call."""

    def __init__(self, random: np.random.Generator, small: bool) -> None:
        self.random, self.small = random, small

    def one_of(self, *choices: Any) -> Any:
        return choices[self.random.integers(len(choices))]

    def chance(self, probability: float) -> bool:
        return bool(self.random.random() < probability)

    def case(self, seed: int, number: int) -> Case:
        function = self.one_of(*FUNCTIONS)
        takes_threads = not self.small and self.chance(0.005)
        count, candidates, width = self.counts(takes_threads)
        dtype = self.one_of(*DTYPES, torch.float32, torch.float64)
        shape, size = self.one_of(*SHAPES), self.one_of(*SIZES)
        layout = self.one_of(*SHARED) if self.chance(0.06) else self.one_of("adjacent", *LAYOUTS)

        total = count + (candidates or 0)
        labels = self.labels(total)
        x, unit, far = self.sized(self.shaped(shape, total, width), size, dtype, labels)
        rows = within(torch.from_numpy(x), dtype)
        if self.small and dtype is torch.bfloat16:  # whose subnormals Triton's interpreter converts wrongly
            rows = rows.where(rows.abs() >= torch.finfo(dtype).smallest_normal, 0)
        batch = self.batch(rows, torch.from_numpy(labels), count, candidates)
        learns = OBJECTIVE[FUNCTION[function].objective].learned is not None
        classes = 0  # if not, each of them has a number to learn
        if learns and self.chance(0.5):
            classes = int(labels.max(initial=0)) + 1
        else:
            batch = self.renamed(batch)
        batch = self.with_layout(self.spoiled(batch, may_fill=layout not in SHARED), layout)
        if batch.ref_emb is not None and self.chance(0.05):
            batch = replace(batch, ref_emb=batch.ref_emb.to(self.one_of(torch.float32, torch.float64)))
        call = self.call(function, batch, unit * math.sqrt(max(width, 1)), classes)
        # Rows that share an outlier's elements are outliers, most of them.
        sizes_differ = (
            size == "mixed rows" or far > max(total // 8, 1) or (far > 0 and layout == "overlapping")
        )
        return Case(seed, number, call, batch, f"{shape}, {size}", layout, takes_threads, sizes_differ)

    def counts(self, takes_threads: bool) -> tuple[int, int | None, int]:
        """N; M, or None for no candidates of their own; D."""
        if takes_threads:
            return int(self.random.integers(520, 700)), None, self.one_of(16, 33, 100)
        counts, widths = COUNTS, WIDTHS
        if self.small:
            counts, widths = (tuple(each for each in some if each <= SMALL) for some in (COUNTS, WIDTHS))
        elif self.chance(0.06):
            counts, widths = LARGE_COUNTS, (1, 2, 5, 8, 17)
        count, candidates = (self.one_of(*(0, 1, 2) if self.chance(0.04) else counts) for _ in "nm")
        return count, candidates if self.chance(0.3) else None, self.one_of(*widths)

    def labels(self, total: int) -> np.ndarray:
        """Class ids, from 0 on: even classes, or a few large and many small ones."""
        classes = self.one_of(2, 3, 4, 5, 8, max(total // 2, 1), max(total // 3, 1), 1 + total)
        if self.chance(0.6):
            labels = np.arange(total) % classes
        else:
            labels = np.minimum(self.random.geometric(0.4, total) - 1, classes - 1)
        return np.sort(labels) if self.chance(0.3) else self.random.permutation(labels)

    def shaped(self, shape: str, total: int, width: int) -> np.ndarray:
        random = self.random
        x = random.standard_normal((total, width))
        if shape == "lattice":
            x = random.integers(-2, 3, (total, width)).astype(float)
        elif shape == "duplicates" and total:
            x = x[random.integers(1 + total // 4, size=total)]
        elif shape == "some zero":
            x[random.random(total) < 0.3] = 0
        elif shape == "offset":
            x += 10.0 ** random.uniform(0, 8) * random.standard_normal(width)
        elif shape == "clusters" and total:
            x = x[random.integers(1 + total // 4, size=total)] + 10.0 ** -random.uniform(0, 12) * x
        elif shape == "line":
            x = random.standard_normal((total, 1)) * random.standard_normal(width)
        elif shape == "sparse":
            x *= random.random((total, width)) < 0.2
        elif shape == "directions":  # all but parallel, some of them opposite
            x = random.standard_normal(width) + 10.0 ** -random.uniform(0, 9) * x
            x *= random.choice([-1.0, 1.0], (total, 1)) * 2.0 ** random.integers(-3, 4, (total, 1))
        return x

    def sized(
        self, x: np.ndarray, size: str, dtype: torch.dtype, labels: np.ndarray
    ) -> tuple[np.ndarray, float, int]:
        """The rows, by what most of them were multiplied, and how many are outliers.

        A row that is alone gets a label of its own.
        """
        random, kind = self.random, torch.finfo(dtype)
        total, width = x.shape
        least, normal, most = (
            math.log2(each) for each in (kind.smallest_normal * kind.eps, kind.smallest_normal, kind.max)
        )
        unit = 1.0
        if size == "scaled":
            unit = 2.0 ** random.uniform(least + 1, most - 2)
        elif size == "subnormal":
            unit = 2.0 ** random.uniform(least, normal)
        elif size == "huge":
            unit = 2.0 ** random.uniform(most - 5, most - 1)
        factors, far = np.full((total, 1), unit), np.arange(0)
        if size in ("outlier alone", "outliers"):
            far = random.permutation(total)[: self.one_of(1, 1, 1, 2, 3)]
            factors[far] *= 10.0 ** random.uniform(1, 30)
            if size == "outlier alone":
                labels[far] = labels.max(initial=0) + 1 + np.arange(len(far))
        elif size in ("mixed rows", "mixed columns"):
            reach = self.one_of(
                4, 15, 40
            )  # docs/numerics.md, "Limits": sizes 10³⁰ apart are too much for products
            factors = 2.0 ** random.uniform(-reach, reach, (total, 1) if size == "mixed rows" else (1, width))
        with np.errstate(over="ignore"):
            return x * factors, unit, len(far)

    def batch(self, rows: Tensor, labels: Tensor, count: int, candidates: int | None) -> Batch:
        seed = int(self.random.integers(-(2**63), 2**63 - 1))
        if candidates is None:
            return Batch(rows, labels, seed=seed)
        emb, ref_emb, names, ref_names = rows[:count], rows[count:], labels[:count], labels[count:]
        self_index = None
        if candidates and self.chance(0.6):
            self_index = torch.from_numpy(self.random.integers(-1, candidates, count))
            if self.chance(0.7):  # the anchors' own copies, as a memory bank has them
                places = torch.from_numpy(self.random.permutation(candidates)[:count])
                self_index[:] = -1
                self_index[: len(places)] = places
                ref_emb[places], ref_names[places] = emb[: len(places)], names[: len(places)]
            self_index = self_index.to(self.one_of(torch.int64, torch.int32))
        return Batch(emb, names, ref_emb, ref_names, self_index, seed=seed)

    def renamed(self, batch: Batch) -> Batch:
        """Other ids for the classes, of any integer type."""
        both = [part.tolist() for part in (batch.labels, batch.ref_labels) if part is not None]
        classes = 1 + max((max(part) for part in both if part), default=0)
        dtype = self.one_of(*(each for each in LABEL_TYPES if torch.iinfo(each).max >= classes))
        limits = torch.iinfo(dtype)
        start = self.one_of(0, limits.min, limits.max - classes)
        ids = [start + int(i) for i in self.random.permutation(classes)]
        labels, *ref_labels = (torch.tensor([ids[i] for i in part], dtype=dtype) for part in both)
        return replace(batch, labels=labels, ref_labels=ref_labels[0] if ref_labels else None)

    def spoiled(self, batch: Batch, may_fill: bool) -> Batch:
        """Sometimes with an ignored class, whatever its rows hold, or with a value that is not finite."""
        sides = [(batch.emb, batch.labels)]
        if batch.ref_emb is not None and batch.ref_labels is not None:
            sides.append((batch.ref_emb, batch.ref_labels))
        rows, labels = self.one_of(*sides)
        wrong = self.one_of(math.nan, math.inf, -math.inf)
        if may_fill and rows.numel() and self.chance(0.02):
            rows[self.random.integers(len(rows)), self.random.integers(rows.shape[1])] = wrong
        if len(labels) and self.chance(0.2):
            ignored = labels.tolist()[self.random.integers(len(labels))]
            if may_fill and self.chance(0.7):
                for rows, labels in sides:
                    rows[[label == ignored for label in labels.tolist()]] = wrong
            batch = replace(batch, ignore_label=ignored)
        return batch

    def with_layout(self, batch: Batch, layout: str) -> Batch:
        def placed(rows: Tensor) -> Tensor:
            count, width = rows.shape
            if layout in LAYOUTS or not rows.numel():
                return laid_out(rows, layout)
            if layout == "overlapping":
                return rows.reshape(-1)[: count + width - 1].as_strided((count, width), (1, 1))
            return (rows[:1] if layout == "equal rows" else rows[:, :1]).expand(count, width)

        return replace(
            batch,
            emb=placed(batch.emb),
            ref_emb=None if batch.ref_emb is None else placed(batch.ref_emb),
        )

    def call(self, function: str, batch: Batch, length: float, classes: int) -> Call:
        """`length` is a typical distance of two rows."""
        given: dict[str, Any] = self.words(function)
        distance = Call(function, given).distance
        if distance != "euclidean":
            length = length * min(length, 1e150) if distance == "sqeuclidean" else 1.0
        limit = torch.finfo(batch.compute_type()).max / 8
        length = min(length, limit)
        # Margins of the size of the distances: else no hinge of long rows is ever near its kink.
        margin = min(self.one_of(0.2, 0.0, length * self.random.uniform(0, 2), length * 30), limit)
        for option in FUNCTION[function].options():
            if isinstance(option, Number):
                value = NUMBERS[option.name, option.unit](self, length, margin)
                if not self.chance(0.7 if option.name in SELDOM else 0.1):
                    given[option.name] = value
        if given.get("distance") == Call(function, {**given, "distance": None}).distance and self.chance(0.3):
            del given["distance"]
        learns = OBJECTIVE[FUNCTION[function].objective].learned is not None
        return Call(function, given, self.learned(batch, length, classes) if learns else None)

    def words(self, function: str) -> dict[str, Any]:
        """One of the words of every choice, such that they go together."""
        choices = {
            option.name: option for option in FUNCTION[function].options() if isinstance(option, Choice)
        }
        words = {name: self.word(choice) for name, choice in choices.items()}
        if words.get("loss") and LOSS[words["loss"]].cosine and words["distance"] != "cosine":
            if self.chance(0.5):
                words["distance"] = "cosine"
            else:
                words["loss"] = self.one_of(
                    *(word for word in choices["loss"].words if not LOSS[word].cosine)
                )
        if words.get("positive") == "all" and NEGATIVE[words.get("negative", "all")].needs_positive:
            words["positive"] = self.one_of(*(word for word in choices["positive"].words if word != "all"))
        return words

    def word(self, choice: Choice) -> str:
        several = "all" in choice.words and len(choice.words) > 2
        return self.one_of(*choice.words, *("all",) * (2 if several else 0))

    def offset(self, length: float, margin: float) -> float:
        """Of either sign: of the size of the distances, tiny beside them, or beyond them all."""
        size = self.one_of(
            margin,
            length * self.random.uniform(0, 2),
            length * 10.0 ** -self.random.uniform(0, 20),
            self.one_of(min(length * 100, 1e308), 1e30, 1e300),
        )
        return self.one_of(-1.0, 1.0) * size

    def learned(self, batch: Batch, length: float, classes: int) -> float | Tensor:
        scale = self.one_of(1.2, length)
        if not classes:
            value = scale * self.random.uniform(0.5, 1.5)
            return value if self.chance(0.3) else torch.tensor(value, dtype=batch.compute_type())
        values = torch.from_numpy(scale * self.random.uniform(0.5, 1.5, classes))
        return within(values, self.one_of(*DTYPES) if self.chance(0.2) else batch.compute_type())


# By name and unit, because two objectives may give one name different meanings: a number, given a typical
# distance and a margin of about its size.
NUMBERS: dict[tuple[str, str], Callable[[Draw, float, float], float | None]] = {
    ("margin", "a distance"): lambda draw, length, margin: margin,
    ("temperature", "a similarity"): lambda draw, length, margin: draw.one_of(
        1.0, 0.1, 5.0, 10.0 ** draw.random.uniform(-2, 1)
    ),
    ("cutoff", "a distance of unit rows"): lambda draw, length, margin: draw.one_of(0.1, 1.0),
    ("nonzero_loss_cutoff", "a distance of unit rows"): lambda draw, length, margin: draw.one_of(None, 0.8),
    ("offset", "a distance"): Draw.offset,
    ("sct_weight", "a factor"): lambda draw, length, margin: draw.one_of(
        1.0, 0.0, draw.random.uniform(0, 3), 100.0
    ),
    ("alpha", "one over a similarity"): lambda draw, length, margin: draw.one_of(2.0, 0.5, 20.0),
    ("beta", "one over a similarity"): lambda draw, length, margin: draw.one_of(50.0, 5.0, 300.0),
    ("base", "a similarity"): lambda draw, length, margin: draw.one_of(1.0, 0.5, 0.0),
    ("epsilon", "a similarity"): lambda draw, length, margin: draw.one_of(0.1, 0.0, 0.5, None),
    ("pos_margin", "a distance"): lambda draw, length, margin: draw.one_of(0.0, 0.3 * length),
    ("neg_margin", "a distance"): lambda draw, length, margin: draw.one_of(1.0, margin),
    ("alpha", "a distance"): lambda draw, length, margin: draw.one_of(0.2, margin),
}
SELDOM = ("cutoff", "nonzero_loss_cutoff")  # most often left to their defaults
