"""What the kernels are made of: tiles of distances, what is kept of them, and the counter-based generator.

A tile is ROWS × COLUMNS pairs of prepared rows (`rows.Tiled`), addressed by position. Positions are int32,
addresses int64. −1 is an index that nobody has.
"""

import triton
import triton.language as tl

from tripletops import _words

NOBODY: tl.constexpr = tl.constexpr(2**31 - 1)

EUCLIDEAN: tl.constexpr = tl.constexpr(_words.DISTANCE.code["euclidean"])
SQEUCLIDEAN: tl.constexpr = tl.constexpr(_words.DISTANCE.code["sqeuclidean"])
COSINE: tl.constexpr = tl.constexpr(_words.DISTANCE.code["cosine"])

# Below a 16th of the rows' own squares a product has lost too many digits.
NEAR: tl.constexpr = tl.constexpr(16)


@triton.jit
def multiply(a, b, sums, PRECISION: tl.constexpr):
    """sums + a·b in the type of `sums`, on tensor cores."""
    if PRECISION == "interpreter":
        # Its tl.dot multiplies the bit patterns of bfloat16, and numpy's product may add up in an order that
        # depends on the column, so that equal columns get unequal keys.
        return sums + tl.sum(a.to(sums.dtype)[:, :, None] * b.to(sums.dtype)[None, :, :], 1)
    else:
        return tl.dot(a, b, sums, input_precision=PRECISION, out_dtype=sums.dtype)


@triton.jit
def half_squares(
    x, y, rows, columns, width, ZERO_ROWS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr
):
    """Half the squared distances of a tile, by |x|²/2 + |y|²/2 − x·y: what selection compares."""
    depth = tl.arange(0, DEPTH)
    x_at = x.rows + rows.to(tl.int64)[:, None] * width + depth[None, :]
    y_at = y.rows + columns.to(tl.int64)[None, :] * width + depth[:, None]
    products = tl.zeros((rows.shape[0], columns.shape[0]), x.half.dtype.element_ty)
    for start in range(0, width, DEPTH):
        products = multiply(tl.load(x_at + start), tl.load(y_at + start), products, PRECISION)
    half = tl.load(x.half + rows)[:, None] + tl.load(y.half + columns)[None, :] - products
    if ZERO_ROWS:  # S = 0 with everything, a tie that products would break
        half = tl.where(tl.load(x.nonzero + rows)[:, None] == 0, 1.0, half)
    return half


@triton.jit
def share_of(split, tiles, length, COLUMNS: tl.constexpr):
    """From where to where a split walks."""
    start = split * tiles * COLUMNS
    return start, tl.minimum(start + tiles * COLUMNS, length)


@triton.jit
def within_classes(start, stop, begin, end, length, COLUMNS: tl.constexpr):
    """The same, but only where some row has candidates of its own class."""
    lowest = tl.min(tl.where(end > begin, begin, length), 0)
    return tl.maximum(start, lowest // COLUMNS * COLUMNS), tl.minimum(stop, tl.max(end, 0))


@triton.jit
def same_class(positions, begin, end):
    return (positions >= begin) & (positions < end)


@triton.jit
def least_of(values, index):
    """The least value of every row and the lowest index that has it; infinity stands for no value."""
    least = tl.min(values, 1)
    is_least = (values == least[:, None]) & (values < float("inf"))
    return least, tl.min(tl.where(is_least, index[None, :], NOBODY), 1)


@triton.jit
def improve(value, place, best, best_place):
    """The lesser of two (value, place); the order of merging does not matter."""
    better = (value < best) | ((value == best) & (place < best_place))
    return tl.where(better, value, best), tl.where(better, place, best_place)


@triton.jit
def scaled_difference(a, a_factor, b, b_factor):
    """a·a_factor − b·b_factor, which is 0 between equal rows.

    Compilers fuse one of the products with the difference; the other product alone is then rounded.
    """
    return tl.where((a == b) & (a_factor == b_factor), 0.0, a * a_factor - b * b_factor)


@triton.jit
def squared_distance(x, x_stride, i, x_factor, y, y_stride, j, y_factor, valid, width, DEPTH: tl.constexpr):
    """The squared distance of the rows i and j, pair by pair, from the rows themselves, in float64."""
    depth = tl.arange(0, DEPTH)
    x_at = x + i.to(tl.int64)[:, None] * x_stride + depth[None, :]
    y_at = y + j.to(tl.int64)[:, None] * y_stride + depth[None, :]
    total = tl.zeros(valid.shape, tl.float64)
    for start in range(0, width, DEPTH):
        inside = valid[:, None] & (start + depth < width)[None, :]
        a = tl.load(x_at + start, inside, 0.0).to(tl.float64)
        b = tl.load(y_at + start, inside, 0.0).to(tl.float64)
        difference = scaled_difference(a, x_factor[:, None], b, y_factor[:, None])
        total += tl.sum(difference * difference, 1)
    return total


@triton.jit
def within_type(values, KIND: tl.constexpr):
    """The largest number that KIND holds stands for all larger ones; NaN stays NaN.

    The difference of two infinities would be NaN.
    """
    largest: tl.constexpr = 1.7976931348623157e308 if KIND.is_fp64() else 3.4028234663852886e38
    return tl.where(values > largest, largest, tl.where(values < -largest, -largest, values))


@triton.jit
def reported(square, x_factor, y_factor, unscale, width, DISTANCE: tl.constexpr, KIND: tl.constexpr):
    """The distance of rows multiplied by their factors: the inverse norms of cosine, else the scale."""
    if DISTANCE == EUCLIDEAN:
        return within_type(tl.sqrt(square) * unscale, KIND)
    elif DISTANCE == SQEUCLIDEAN:
        return within_type(square * unscale * unscale, KIND)
    else:
        zero_row = ((x_factor == 0) | (y_factor == 0)) & (width > 0)
        return tl.where(zero_row, 1.0, square * 0.5)


@triton.jit
def _distances(square, unscale, DISTANCE: tl.constexpr):
    """From squared distances of framed rows."""
    if DISTANCE == EUCLIDEAN:
        return tl.sqrt(square) * unscale
    elif DISTANCE == SQEUCLIDEAN:
        return square * unscale * unscale
    else:
        return square * 0.5


@triton.jit
def _measure(distance, chosen, x, y, rows, columns, unscale, lift, width, DISTANCE: tl.constexpr):
    """The distances of a tile, those of the chosen pairs anew, from the rows themselves times a lift."""
    kind: tl.constexpr = distance.dtype
    if tl.max(tl.max(chosen.to(tl.int32), 1), 0) > 0:
        x_at, y_at = x.plain + rows.to(tl.int64) * width, y.plain + columns.to(tl.int64) * width
        square = tl.zeros_like(distance)
        for at in tl.range(0, width, num_stages=1, loop_unroll_factor=1):  # rare: it may not cost registers
            difference = tl.load(x_at + at).to(kind)[:, None] - tl.load(y_at + at).to(kind)[None, :]
            difference *= lift
            square += difference * difference
        distance = tl.where(chosen, _distances(square, unscale * (1.0 / lift), DISTANCE), distance)
    return distance


@triton.jit
def negative_distances(
    x, y, frame, negatives, row_half, rows, columns, width,
    DISTANCE: tl.constexpr, ZERO_ROWS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The distances of a tile, and which of its negatives are near.

    Near pairs, which products could not tell apart, are measured from the rows themselves. So are pairs whose
    squares may have underflowed, as they do where outliers set the scale of all rows: those are lifted.
    """
    half = half_squares(x, y, rows, columns, width, ZERO_ROWS, DEPTH, PRECISION)
    half = tl.maximum(half, 0.0)
    near = negatives & (half * NEAR <= row_half[:, None] + tl.load(y.half + columns)[None, :])
    kind: tl.constexpr = half.dtype
    unscale = tl.load(frame.unscale).to(kind)
    distance = _distances(half * 2, unscale, DISTANCE)
    distance = _measure(distance, near, x, y, rows, columns, unscale, 1.0, width, DISTANCE)
    if DISTANCE != COSINE:
        lift: tl.constexpr = 2.0**500 if kind.is_fp64() else 2.0**64
        tiny = negatives & (distance < tl.load(frame.tiny).to(kind))
        distance = _measure(distance, tiny, x, y, rows, columns, unscale, lift, width, DISTANCE)
    return distance, near


@triton.jit
def log_one_plus(x):
    """ln(1 + x), which keeps the digits of a small x (Kahan's way)."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def softplus(z):
    return tl.maximum(z, 0.0) + log_one_plus(tl.exp(-tl.abs(z)))


@triton.jit
def logistic(z):
    small = tl.exp(-tl.abs(z))
    return tl.where(z >= 0, 1.0, small) / (1.0 + small)


# The generator: csrc/kernels/hash.h and `reference.noise` state it too.


@triton.jit
def hash_anchor(seed, anchor):
    z = seed.to(tl.uint64) + (anchor + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def hash_candidate(row, candidate):
    x = candidate.to(tl.uint32)[None, :] * 0x9E3779B1 + (row & 0xFFFFFFFF).to(tl.uint32)[:, None]
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = x ^ (row >> 32).to(tl.uint32)[:, None]
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def gumbel(noise, KIND: tl.constexpr):
    """−ln(−ln(1 − v)), v = (2³² − noise − ½) / 2³²."""
    v = ((0xFFFFFFFF - noise).to(KIND) + 0.5) * 2.0**-32
    large = (noise.to(KIND) + 0.5) * 2.0**-32
    exponential = tl.where(v < 0.25, -log_one_plus(-v), -tl.log(large))
    return -tl.log(exponential)
