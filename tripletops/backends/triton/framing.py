"""From rows as the user holds them to rows as tiles are made of them: centred, scaled, padded to whole tiles.

float32 and float64 rows are framed as on the CPU (`csrc/kernels/survey.h`): multiplied by a power of two near
one over their spread and centred (cosine: normalised, then centred), so that products keep the digits that a
common offset would take. Half-precision rows stay half-precision numbers, which tensor cores multiply
exactly; but for cosine, whose unit rows are no such numbers.

Every kernel writes what its own programs own, and the next one adds it up: no atomics, and nothing that waits
for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tripletops.backends.triton.device import (
    COSINE,
    EMPTY,
    IGNORED,
    NOT_FINITE,
    SQEUCLIDEAN,
    exponent_of,
    power_of_two,
    scale_of,
)

HALVES = (torch.float16, torch.bfloat16)
SAMPLED = 9  # rows whose median is the origin: an odd number


class Frame(NamedTuple):
    """How distances of framed rows are to be read."""

    exponent: Tensor  # int32: the scale is 2 to the power of minus the largest; see `device.scale_of`
    count: int  # of exponents
    unscale: Tensor  # (1,) float64: one over the scale, of framed rows
    tiny: Tensor  # (1,) float64: smaller distances may have lost their digits, as products; 0: no outliers


class Given(NamedTuple):
    """One side of the pairs as the user holds it."""

    rows: Tensor
    stride: int
    label: Tensor
    count: int


class Names(NamedTuple):
    """By position: which row is there and what is known of it."""

    row: Tensor  # (L,) int32; −1: padding, or an ignored row
    source: Tensor  # (L,) int32, the same, ignored rows included
    label: Tensor  # (L,) int64
    self_position: Tensor  # (L,) int32, where the anchor itself lies among the candidates; −1: nowhere
    begin: Tensor  # (L,) int32, where an anchor's class lies among ordered candidates
    end: Tensor


class Unit(NamedTuple):
    """By row, under the cosine: a row times `lift`, a power of two that makes its largest element about 1,
    times `factor` has length 1. A factor of 0 is that of a zero row. float64."""

    factor: Tensor
    lift: Tensor


@triton.jit
def kept_labels(given, index, inside, ignore, IGNORES: tl.constexpr):
    """The labels of rows and whether they count."""
    label = tl.load(given.label + index, inside, 0)
    return label, inside & (label != ignore) if IGNORES else inside


@triton.jit
def lower_bound(ordered, length, values, steps, AFTER: tl.constexpr):
    """How many of the ordered numbers are less than the values; AFTER: or equal to them."""
    low, high = tl.zeros(values.shape, tl.int32), tl.zeros(values.shape, tl.int32) + length
    for _ in range(steps):
        middle = (low + high) // 2
        there = tl.load(ordered + middle, middle < length, 0)
        right = (there <= values if AFTER else there < values) & (low < high)
        low, high = tl.where(right, middle + 1, low), tl.where(right | (low >= high), high, middle)
    return low


@triton.jit
def store_names(
    names, given, self_index, place_of, position, index, label, kept, candidates,
    SELF: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """SELF: "same" where candidates are the anchors, "named" where self_index names them, else "none"."""
    tl.store(names.row + position, tl.where(kept, index, -1))
    tl.store(names.source + position, tl.where(position < given.count, index, -1))
    tl.store(names.label + position, label)
    own = tl.where(position < given.count, position, -1)
    if SELF == "none":
        own = tl.zeros_like(own) - 1
    if SELF == "named":
        named = tl.load(self_index + index, position < given.count, -1)
        valid = (named >= 0) & (named < candidates)
        own = tl.where(valid, named, -1).to(tl.int32)
        if ORDERED:
            own = tl.where(valid, tl.load(place_of + tl.where(valid, named, 0), valid, -1), -1)
    tl.store(names.self_position + position, own)


@triton.jit
def origin_kernel(
    given, origin, sample_exponent, width, sampled, ignore,
    IGNORES: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The median, coordinate by coordinate, of up to nine rows that are evenly spread, halved.

    Halves, because the difference of two of the largest numbers would not be finite.
    """
    sample = tl.arange(0, 16)
    kept = given.count + tl.zeros((1,), tl.int32)
    if IGNORES:
        kept = tl.zeros((1,), tl.int32)
        for start in range(0, given.count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            _, there = kept_labels(given, at, at < given.count, ignore, IGNORES)
            kept += tl.sum(there.to(tl.int32), 0)
    index = (sample.to(tl.int64) * tl.maximum(kept - 1, 0) // tl.maximum(sampled - 1, 1)).to(tl.int32)
    if IGNORES:
        place, index, before = index, tl.zeros_like(index), tl.zeros((1,), tl.int32)
        for start in range(0, given.count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            _, there = kept_labels(given, at, at < given.count, ignore, IGNORES)
            rank = before + tl.cumsum(there.to(tl.int32), 0) - 1
            chosen = there[None, :] & (rank[None, :] == place[:, None])
            index += tl.sum(tl.where(chosen, at[None, :], 0), 1)
            before += tl.sum(there.to(tl.int32), 0)
    valid = (sample < sampled) & (kept > 0)
    size = tl.zeros((16,), tl.float64)
    earlier = sample[:, None] < sample[None, :]
    for start in range(0, width, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        at = given.rows + index.to(tl.int64)[:, None] * given.stride + depth[None, :]
        values = tl.load(at, valid[:, None] & (depth < width)[None, :], 0.0).to(tl.float64) * 0.5
        size = tl.maximum(size, tl.max(tl.abs(values), 1))
        less = (values[:, None, :] < values[None, :, :]) | (
            (values[:, None, :] == values[None, :, :]) & earlier[:, :, None]
        )
        rank = tl.sum((less & valid[:, None, None]).to(tl.int32), 0)
        middle = (rank == sampled // 2) & valid[:, None]
        tl.store(origin + depth, tl.sum(tl.where(middle, values, 0.0), 0), depth < width)
    less = ((size[:, None] < size[None, :]) | ((size[:, None] == size[None, :]) & earlier)) & valid[:, None]
    middle = (tl.sum(less.to(tl.int32), 0) == sampled // 2) & valid
    tl.store(sample_exponent, exponent_of(tl.sum(tl.where(middle, size, 0.0), 0)))


@triton.jit
def unit_of(at, size, kept, width, KIND: tl.constexpr, DEPTH: tl.constexpr):
    """What makes unit rows of rows, in two steps within the type; `size` is their largest element."""
    most: tl.constexpr = 1022 if tl.float64 == KIND else 126
    exponent = tl.minimum(tl.maximum(-exponent_of(size), -most), most)
    lift = power_of_two(tl.where(size > 0, exponent, 0))
    square = tl.zeros(size.shape, tl.float64)
    for start in range(0, width, DEPTH):
        inside = (start + tl.arange(0, DEPTH) < width)[None, :]
        values = tl.load(at + start, kept[:, None] & inside, 0.0).to(tl.float64) * lift[:, None]
        square += tl.sum(values * values, 1)
    factor = tl.where(square > 0, 1.0 / tl.sqrt(tl.where(square > 0, square, 1.0)), 0.0)
    return factor, lift


@triton.jit
def store_relative(
    relative, given, reference, index, kept, factor, lift, width, ignore,
    IGNORES: tl.constexpr, KIND: tl.constexpr, FEW: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Unit rows less the first of the reference's that counts."""
    depth = tl.arange(0, DEPTH)
    at = given.rows + index.to(tl.int64)[:, None] * given.stride + depth[None, :]
    one = tl.zeros((1,), tl.int32)
    if IGNORES:
        every = tl.arange(0, FEW)
        _, usable = kept_labels(reference, every, every < reference.count, ignore, IGNORES)
        one += tl.min(tl.where(usable, every, reference.count), 0)
    there = one < reference.count
    from_one = reference.rows + one.to(tl.int64)[:, None] * reference.stride + depth[None, :]
    length = tl.zeros((1,), tl.float64)
    for start in range(0, width, DEPTH):
        values = tl.load(from_one + start, there[:, None] & (start + depth < width)[None, :], 0.0)
        length = tl.maximum(length, tl.max(tl.abs(values.to(tl.float64)), 1))
    one_factor, one_lift = unit_of(from_one, length, there, width, KIND, DEPTH)
    for start in range(0, width, DEPTH):
        inside = (start + depth < width)[None, :]
        values = tl.load(at + start, kept[:, None] & inside, 0.0).to(tl.float64)
        middle = tl.load(from_one + start, there[:, None] & inside, 0.0).to(tl.float64)
        values = values * lift[:, None] * factor[:, None]
        values -= middle * one_lift[:, None] * one_factor[:, None]
        to = relative + index.to(tl.int64)[:, None] * width + start + depth[None, :]
        tl.store(to, values.to(KIND), (index < given.count)[:, None] & inside)


@triton.jit
def survey_kernel(
    given, names, unit, reference, relative, self_index, origin, exponents, sums,
    width, first, rows, candidates, ignore,
    WHOLE: tl.constexpr, RELATIVE: tl.constexpr, SELF: tl.constexpr, COSINE: tl.constexpr,
    IGNORES: tl.constexpr, KIND: tl.constexpr, FEW: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The exponents of the sizes of rows, and what cosine multiplies them by.

    WHOLE: all that a walk over differences asks for, RELATIVE: and unit rows less one of them, which is the
    same for all, so that rows that are nearly parallel keep their digits. Else exponents are those of the
    rows less the origin (cosine: 0), and their sums, divided by the number of all rows, are added up for
    every coordinate.
    """
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    label, kept = kept_labels(given, index, index < given.count, ignore, IGNORES)
    at = given.rows + index.to(tl.int64)[:, None] * given.stride + depth[None, :]
    shifted: tl.constexpr = not WHOLE and not COSINE
    size, bad = tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.int32)
    for start in range(0, width, DEPTH):
        mask = kept[:, None] & (start + depth < width)[None, :]
        values = tl.load(at + start, mask, 0.0).to(tl.float64)
        bad = tl.maximum(bad, tl.max((~(tl.abs(values) < float("inf"))).to(tl.int32), 1))
        if shifted:
            values = values * 0.5 - tl.load(origin + start + depth, start + depth < width, 0.0)[None, :]
            values = tl.where(mask, values, 0.0)
            summed = sums + tl.program_id(0).to(tl.int64) * width + start + depth
            tl.store(summed, tl.sum(values * (1.0 / rows), 0), start + depth < width)
        size = tl.maximum(size, tl.max(tl.abs(values), 1))
    exponent = exponent_of(size)
    if COSINE:
        factor, lift = unit_of(at, size, kept, width, KIND, DEPTH)
        tl.store(unit.factor + index, factor, index < given.count)
        tl.store(unit.lift + index, lift, index < given.count)
        exponent = tl.zeros_like(exponent)
        if not WHOLE:
            for start in range(0, width, DEPTH):
                inside = start + depth < width
                values = tl.load(at + start, kept[:, None] & inside[None, :], 0.0).to(tl.float64)
                values = values * lift[:, None] * factor[:, None]
                summed = sums + tl.program_id(0).to(tl.int64) * width + start + depth
                tl.store(summed, tl.sum(values * (1.0 / rows), 0), inside)
    if WHOLE:
        if not COSINE:  # so that the squares of differences stay within the type
            headroom: tl.constexpr = 400 if tl.float64 == KIND else 50
            exponent = tl.where(size > 0, exponent - headroom, EMPTY)
        if RELATIVE:
            store_relative(
                relative, given, reference, index, kept, factor, lift, width, ignore,
                IGNORES, KIND, FEW, DEPTH,
            )  # fmt: skip
        store_names(names, given, self_index, self_index, index, index, label, kept, candidates, SELF, False)
    exponent = tl.where(kept, tl.where(bad > 0, NOT_FINITE, exponent), IGNORED)
    tl.store(exponents + first + index, exponent, index < given.count)


@triton.jit
def count_between(exponents, entries, low, high, BLOCK: tl.constexpr):
    """How many exponents lie in between, both ends included."""
    number = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, entries, BLOCK):
        at = start + tl.arange(0, BLOCK)
        exponent = tl.load(exponents + at, at < entries, IGNORED)
        number += ((exponent >= low) & (exponent <= high)).to(tl.int32)
    return tl.sum(number, 0)


@triton.jit
def largest_of(exponents, entries, BLOCK: tl.constexpr):
    largest = tl.full((BLOCK,), IGNORED, tl.int32)
    for start in range(0, entries, BLOCK):
        at = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(exponents + at, at < entries, IGNORED))
    return tl.max(largest, 0)


@triton.jit
def extent(exponents, entries, number, BLOCK: tl.constexpr):
    """(the largest exponent, the median or the least one of a row that is not 0, whether there are outliers).

    The median is that of all rows and one row of zeros.
    """
    largest = largest_of(exponents, entries, BLOCK)
    nonzero = count_between(exponents, entries, EMPTY + 1, NOT_FINITE, BLOCK)
    middle = tl.maximum(number // 2 - (number + 1 - nonzero), 0)
    largest = tl.where(nonzero > 0, largest, 0)
    median = largest
    outliers = count_between(exponents, entries, EMPTY + 1, largest - 6, BLOCK) > middle
    if outliers:
        low, high = tl.full((), -1200, tl.int32), tl.full((), 1200, tl.int32)
        for _ in range(12):
            between = (low + high) // 2
            enough = count_between(exponents, entries, EMPTY + 1, between, BLOCK) > middle
            low, high = tl.where(enough, low, between + 1), tl.where(enough, between, high)
        median = high
    return largest, median, outliers


@triton.jit
def frame_kernel(
    exponents, sums, origin, sample_exponent, frame, centre, entries, blocks, width,
    DISTANCE: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The scale and the centre, of which every program writes some coordinates.

    The origin lies among most rows, wherever a few others are, and on the grid that rows may lie on. The
    centre lies a whole number of sixteenths of the spread away from it: data on a grid stays on one, and its
    ties stay ties. Outliers move the mean away from all other rows; then the centre is the origin, or 0 where
    that is nearer to most rows. And the scale lies in the middle between the two, so that the squares of
    neither leave the exponents of the type.
    """
    depth = tl.program_id(0) * DEPTH + tl.arange(0, DEPTH)
    inside = depth < width
    mean = tl.zeros((DEPTH,), tl.float64)
    for start in range(0, blocks, ROWS):
        block = start + tl.arange(0, ROWS)
        at = sums + block.to(tl.int64)[:, None] * width + depth[None, :]
        mean += tl.sum(tl.load(at, (block < blocks)[:, None] & inside[None, :], 0.0), 0)
    number = tl.maximum(count_between(exponents, entries, EMPTY, NOT_FINITE, BLOCK), 1)
    mean = mean * (entries / number.to(tl.float64))
    exponent, tiny = tl.zeros((), tl.int32), tl.zeros((), tl.float64)
    if DISTANCE == COSINE:
        largest = largest_of(exponents, entries, BLOCK)
        centre_here = mean
    else:
        largest, median, outliers = extent(exponents, entries, number, BLOCK)
        around_zero = outliers & (tl.load(sample_exponent) < median)
        reach: tl.constexpr = 400 if tl.float64 == KIND else 50
        limit: tl.constexpr = 1022 if tl.float64 == KIND else 126
        between = largest - tl.minimum((largest - median) // 2, reach)
        exponent = tl.minimum(tl.maximum(tl.where(outliers, between, largest) + 1, -limit), limit)
        scale = power_of_two(-exponent)
        steps = tl.floor(mean * scale * 32 + 0.5) * 0.0625
        centre_here = tl.load(origin + depth, inside, 0.0) * scale * 2 + tl.where(outliers, 0.0, steps)
        centre_here = tl.where(around_zero, 0.0, centre_here)
        if SCALES:
            least: tl.constexpr = 2.0**-899 if tl.float64 == KIND else 2.0**-99
            tiny = tl.where(outliers, least / scale / scale, 0.0)
            if DISTANCE != SQEUCLIDEAN:
                tiny = tl.sqrt(tiny)
        else:  # squares of float16 fit float32 as they are, while scaling may round
            centre_here = centre_here / scale
            exponent = tl.zeros_like(exponent)
    tl.store(centre + depth, centre_here, inside)
    if tl.program_id(0) == 0:
        tl.store(frame.exponent, tl.where(largest == NOT_FINITE, NOT_FINITE, exponent))
        tl.store(frame.unscale, power_of_two(exponent))
        tl.store(frame.tiny, tiny)


@triton.jit
def exact_kernel(
    given, frame, centre, exact, width, ignore,
    IGNORES: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Whether half-precision rows, less the centre in that precision, are such numbers still."""
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    half: tl.constexpr = given.rows.dtype.element_ty
    scale, _ = scale_of(frame, 1, KIND)
    _, kept = kept_labels(given, index, index < given.count, ignore, IGNORES)
    for start in range(0, width, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        at = given.rows + index.to(tl.int64)[:, None] * given.stride + depth[None, :]
        mask = kept[:, None] & (depth < width)[None, :]
        middle = rounded(tl.load(centre + depth, depth < width, 0.0), half)
        values = tl.load(at, mask, 0.0).to(tl.float64) * scale - middle[None, :]
        same = (rounded(values, half) == values) | ~mask
        out = exact + tl.program_id(0).to(tl.int64) * width + depth
        tl.store(out, tl.min(same.to(tl.int32), 0), depth < width)


@triton.jit
def rounded(values, HALF: tl.constexpr):
    """float64 → the nearest numbers of a half-precision type, as float64."""
    return values.to(tl.float32).to(HALF).to(tl.float64)


@triton.jit
def exact_centre_kernel(centre, exact, rows, blocks, width, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """The centre of half-precision rows: 0 where to take it away would round them.

    It does not where all rows are within a factor of two of it, as with a large common offset; where some are
    not, the spread itself is as large as the offset.
    """
    depth = tl.program_id(0) * DEPTH + tl.arange(0, DEPTH)
    inside = depth < width
    every = tl.full((ROWS, DEPTH), 1, tl.int32)
    for start in range(0, blocks, ROWS):
        block = start + tl.arange(0, ROWS)
        at = exact + block.to(tl.int64)[:, None] * width + depth[None, :]
        every = tl.minimum(every, tl.load(at, (block < blocks)[:, None] & inside[None, :], 1))
    middle = rounded(tl.load(centre + depth, inside, 0.0), rows.dtype.element_ty)
    usable = (tl.min(every, 0) > 0) & (tl.abs(middle) < float("inf"))
    tl.store(centre + depth, tl.where(usable, middle, 0.0), inside)


@triton.jit
def place_kernel(
    given, names, unit, self_index, order, place_of, own_place, ordered, frame, centre, out,
    width, whole_width, candidates, steps, ignore,
    ORDERED: tl.constexpr, PLAIN: tl.constexpr, SELF: tl.constexpr, COSINE: tl.constexpr,
    IGNORES: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Framed rows by position, with all that is known of them.

    ORDERED: by class, as `order` says; `ordered` are the candidates' labels, in order, place_of where each
    candidate lies, and own_place takes that of these rows. PLAIN: the rows, scaled and not centred, too.
    """
    position = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = position < given.count
    index = position
    if ORDERED:
        index = tl.load(order + position, there, 0).to(tl.int32)
        tl.store(own_place + index, position, there)
    label, kept = kept_labels(given, index, there, ignore, IGNORES)
    store_names(names, given, self_index, place_of, position, index, label, kept, candidates, SELF, ORDERED)
    if ORDERED:
        begin = lower_bound(ordered, candidates, label, steps, False)
        end = lower_bound(ordered, candidates, label, steps, True)
        tl.store(names.begin + position, tl.where(kept, begin, 0))
        tl.store(names.end + position, tl.where(kept, end, 0))
    scale, _ = scale_of(frame, 1, KIND)
    factor, lift = tl.zeros((ROWS,), tl.float64) + scale, tl.full((ROWS,), 1.0, tl.float64)
    zero_row = tl.zeros((ROWS,), tl.float64)
    if COSINE:
        factor, lift = tl.load(unit.factor + index, there, 0.0), tl.load(unit.lift + index, there, 1.0)
        zero_row = ((factor == 0) & (width > 0)).to(tl.float64)
    stored: tl.constexpr = out.rows.dtype.element_ty
    square = tl.zeros((ROWS,), tl.float64)
    for start in range(0, whole_width, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        inside = depth < width
        mask = kept[:, None] & inside[None, :]
        at = given.rows + index.to(tl.int64)[:, None] * given.stride + depth[None, :]
        values = tl.load(at, mask, 0.0).to(tl.float64) * lift[:, None] * factor[:, None]
        to = position.to(tl.int64)[:, None] * whole_width + depth[None, :]
        here = (depth < whole_width)[None, :]
        if PLAIN:
            tl.store(out.plain + to, values.to(KIND).to(stored), here)
        framed = values - tl.load(centre + depth, inside, 0.0)[None, :]
        framed = tl.where(mask, framed, 0.0).to(KIND).to(stored)
        tl.store(out.rows + to, framed, here)
        framed = framed.to(tl.float64)
        square += tl.sum(framed * framed, 1)
    # S = 0 of a zero row with everything: ½ added on its side makes 1 − S come out of the arithmetic.
    tl.store(out.half + position, (square * 0.5 + 0.5 * zero_row).to(KIND))
    tl.store(out.nonzero + position, (1.0 - zero_row).to(KIND))
