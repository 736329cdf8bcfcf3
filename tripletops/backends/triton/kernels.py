"""The kernels. Every program owns the rows it writes: no atomics, the same bits run after run.

Prepared rows (`rows.py`) are addressed by position: ordered by class, so that a row's positives lie in one
range [begin, end), and padded to whole tiles. The kernels that walk over all candidates share them out over
`splits`, and what each found is merged on the host. `index` says which of the user's rows lies at a position,
−1: none, or an ignored one.
"""

import triton
import triton.language as tl

from tripletops.backends.triton.device import (
    COSINE,
    EUCLIDEAN,
    NOBODY,
    exponential_slope,
    gumbel,
    half_squares,
    hash_anchor,
    hash_candidate,
    improve,
    least_of,
    logistic,
    multiply,
    negative_distances,
    reported,
    same_class,
    share_of,
    softplus,
    squared_distance,
    threshold_slope,
    within_classes,
    within_type,
)

# What `select` keeps.
NOTHING: tl.constexpr = tl.constexpr(0)
NEAREST: tl.constexpr = tl.constexpr(1)
FARTHEST: tl.constexpr = tl.constexpr(2)
GIVEN: tl.constexpr = tl.constexpr(3)  # of positives: the key of one that was picked before
EVERY: tl.constexpr = tl.constexpr(4)  # of positives: the keys of all
BEYOND: tl.constexpr = tl.constexpr(5)  # of negatives: for each floor the nearest above it, and the farthest

# What a negative costs.
HINGE: tl.constexpr = tl.constexpr(0)
SOFT: tl.constexpr = tl.constexpr(1)
EXPONENTIAL: tl.constexpr = tl.constexpr(2)

# The losses of one triplet: the codes of `ops.LOSS`.
MARGIN: tl.constexpr = tl.constexpr(0)
SOFT_MARGIN: tl.constexpr = tl.constexpr(1)
FIRST_ORDER: tl.constexpr = tl.constexpr(2)
SECOND_ORDER: tl.constexpr = tl.constexpr(3)


@triton.jit
def select(
    x, x_half, x_nonzero, y, y_half, y_index, begin, end, self_position, given, floors,
    positive_key, positive_index, negative_key, negative_index, farthest_key, farthest_index,
    x_length, y_length, width, tiles, first_rank, last_rank,
    POSITIVE: tl.constexpr, NEGATIVE: tl.constexpr, RANKS: tl.constexpr,
    ZERO_ROWS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The extreme positives and negatives of every anchor, by (key, index), the key being half_squares()."""
    split, chunk = tl.program_id(1), tl.program_id(2)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ranks = tl.arange(0, RANKS)
    out = split.to(tl.int64) * x_length + rows
    class_begin, class_end = tl.load(begin + rows), tl.load(end + rows)
    own = tl.load(self_position + rows)
    if POSITIVE == GIVEN:
        wanted = tl.load(given + rows)
    kind: tl.constexpr = x_half.dtype.element_ty
    best_positive, positive = tl.full((ROWS,), float("inf"), kind), tl.full((ROWS,), NOBODY, tl.int32)
    best_farthest, farthest = best_positive, positive
    best_negative = tl.full((ROWS, RANKS), float("inf"), kind)
    negative = tl.full((ROWS, RANKS), NOBODY, tl.int32)

    start, stop = share_of(split, tiles, y_length, COLUMNS)
    if NEGATIVE == NOTHING:
        start, stop = within_classes(start, stop, class_begin, class_end, y_length, COLUMNS)
    for column in range(start, stop, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        index = tl.load(y_index + columns)
        key = half_squares(
            x, x_half, x_nonzero, y, y_half, rows, columns, width,
            ZERO_ROWS, ROWS, COLUMNS, DEPTH, PRECISION,
        )  # fmt: skip
        usable = (index >= 0)[None, :] & (columns[None, :] != own[:, None])
        same = same_class(columns[None, :], class_begin[:, None], class_end[:, None])
        if POSITIVE == EVERY:
            rank = columns[None, :] - class_begin[:, None]
            inside = usable & same & (rank >= first_rank) & (rank < last_rank)
            at = (rank - first_rank).to(tl.int64) * x_length + rows[:, None]
            tl.store(positive_key + at, key, inside)
        elif POSITIVE != NOTHING:
            candidates = usable & same
            if POSITIVE == GIVEN:
                candidates = candidates & (index[None, :] == wanted[:, None])
            ordered = -key if POSITIVE == FARTHEST else key
            least, place = least_of(tl.where(candidates, ordered, float("inf")), index)
            best_positive, positive = improve(least, place, best_positive, positive)
        if NEGATIVE == NEAREST or NEGATIVE == BEYOND:
            for k in range(RANKS):
                candidates = usable & ~same
                if NEGATIVE == BEYOND:
                    floor = tl.load(floors + (chunk * RANKS + k).to(tl.int64) * x_length + rows)
                    candidates = candidates & (key > floor[:, None])
                lowest_key, lowest_index = least_of(tl.where(candidates, key, float("inf")), index)
                here = (ranks == k)[None, :]
                rank_key = tl.where(here, lowest_key[:, None], float("inf"))
                rank_index = tl.where(here, lowest_index[:, None], NOBODY)
                best_negative, negative = improve(rank_key, rank_index, best_negative, negative)
        if NEGATIVE == FARTHEST or NEGATIVE == BEYOND:
            least, place = least_of(tl.where(usable & ~same, -key, float("inf")), index)
            best_farthest, farthest = improve(least, place, best_farthest, farthest)

    if POSITIVE != NOTHING and POSITIVE != EVERY:
        tl.store(positive_key + out, -best_positive if POSITIVE == FARTHEST else best_positive)
        tl.store(positive_index + out, positive)
    if NEGATIVE == NEAREST or NEGATIVE == BEYOND:
        rank = (split * tl.num_programs(2) + chunk) * RANKS + ranks
        at = rank.to(tl.int64)[None, :] * x_length + rows[:, None]
        tl.store(negative_key + at, best_negative)
        tl.store(negative_index + at, negative)
    if NEGATIVE == FARTHEST or NEGATIVE == BEYOND:
        if chunk == 0:  # the others have found the same
            tl.store(farthest_key + out, best_farthest)
            tl.store(farthest_index + out, farthest)


@triton.jit
def draw(
    x, x_half, x_nonzero, x_index, y, y_half, y_index, begin, end, self_position, seed, density,
    weight_key, weight_index, uniform_key, uniform_index,
    x_length, y_length, width, tiles,
    POSITIVES: tl.constexpr, BY_DISTANCE: tl.constexpr, ZERO_ROWS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A uniform positive or negative of every anchor, and a negative by its weight: least keys win.

    `density` holds (2−D)/2, (3−D)/2, the least and the limiting squared distance.
    """
    split = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    out = split.to(tl.int64) * x_length + rows
    class_begin, class_end = tl.load(begin + rows), tl.load(end + rows)
    own = tl.load(self_position + rows)
    row_hash = hash_anchor(tl.load(seed), tl.load(x_index + rows).to(tl.int64))
    kind: tl.constexpr = x_half.dtype.element_ty
    best_uniform, uniform = tl.full((ROWS,), 2**31 - 1, tl.int32), tl.full((ROWS,), NOBODY, tl.int32)
    best_weight, drawn = tl.full((ROWS,), float("inf"), kind), uniform
    if BY_DISTANCE:
        slope, height_slope = tl.load(density).to(kind), tl.load(density + 1).to(kind)
        least_square, limit = tl.load(density + 2).to(kind), tl.load(density + 3).to(kind)

    start, stop = share_of(split, tiles, y_length, COLUMNS)
    if POSITIVES:
        start, stop = within_classes(start, stop, class_begin, class_end, y_length, COLUMNS)
    for column in range(start, stop, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        index = tl.load(y_index + columns)
        usable = (index >= 0)[None, :] & (columns[None, :] != own[:, None])
        same = same_class(columns[None, :], class_begin[:, None], class_end[:, None])
        candidates = usable & same if POSITIVES else usable & ~same
        noise = hash_candidate(row_hash, index)
        # The largest hash of all: inverted, as a signed number. No two candidates of an anchor have the same.
        inverted = ((0xFFFFFFFF - noise) ^ 0x80000000).to(tl.int32, bitcast=True)
        least = tl.min(tl.where(candidates, inverted, 2**31 - 1), 1)
        chosen = candidates & (inverted == least[:, None])
        place = tl.min(tl.where(chosen, index[None, :], NOBODY), 1)
        best_uniform, uniform = improve(least, place, best_uniform, uniform)
        if BY_DISTANCE:
            half = half_squares(
                x, x_half, x_nonzero, y, y_half, rows, columns, width,
                ZERO_ROWS, ROWS, COLUMNS, DEPTH, PRECISION,
            )  # fmt: skip
            square = tl.maximum(half * 2, least_square)
            height = tl.maximum(1.0 - square * 0.25, 2.0**-20)
            key = slope * tl.log(square) + height_slope * tl.log(height) + gumbel(noise, kind)
            key = tl.where(candidates & (square < limit), -key, float("inf"))
            least, place = least_of(key, index)
            best_weight, drawn = improve(least, place, best_weight, drawn)
    tl.store(uniform_key + out, best_uniform)
    tl.store(uniform_index + out, uniform)
    if BY_DISTANCE:
        tl.store(weight_key + out, best_weight)
        tl.store(weight_index + out, drawn)


@triton.jit
def measure(
    x, x_stride, x_factor, x_index, y, y_stride, y_factor, y_index, begin, end, self_position, unscale,
    picks, floors, distances,
    pairs, x_length, y_count, width,
    SETTLE: tl.constexpr, DISTANCE: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The distances of picked candidates from the rows themselves; NaN where there is none.

    SETTLE: a pick that is not strictly farther than its floor after all is searched for among all negatives.
    """
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = at < pairs
    rows = (at % x_length).to(tl.int32)
    i = tl.load(x_index + rows)
    pick = tl.load(picks + at, inside, -1)
    found = pick >= 0
    kind: tl.constexpr = distances.dtype.element_ty
    back = tl.load(unscale)
    row_factor = tl.load(x_factor + i, i >= 0, 0.0)
    factor = tl.load(y_factor + pick, found, 0.0)
    square = squared_distance(x, x_stride, i, row_factor, y, y_stride, pick, factor, found, width, DEPTH)
    distance = reported(square, row_factor, factor, back, width, DISTANCE, kind).to(kind)
    if SETTLE:
        floor = tl.load(floors + at, inside, float("nan"))
        wrong = found & ~(distance > floor)
        if tl.max(wrong.to(tl.int32), 0) > 0:
            own = tl.load(self_position + rows)
            class_begin, class_end = tl.load(begin + rows), tl.load(end + rows)
            best, place = tl.full((ROWS,), float("inf"), kind), tl.full((ROWS,), NOBODY, tl.int32)
            for position in range(y_count):
                candidate = tl.load(y_index + position)
                j = tl.zeros_like(i) + candidate
                eligible = (
                    wrong & (j >= 0) & (own != position) & ~same_class(position, class_begin, class_end)
                )
                other = tl.load(y_factor + j, eligible, 0.0)
                square = squared_distance(
                    x, x_stride, i, row_factor, y, y_stride, j, other, eligible, width, DEPTH
                )
                apart = reported(square, row_factor, other, back, width, DISTANCE, kind).to(kind)
                apart = tl.where(eligible & (apart > floor), apart, float("inf"))
                best, place = improve(apart, tl.where(apart < float("inf"), j, NOBODY), best, place)
            distance = tl.where(wrong, best, distance)
            pick = tl.where(wrong, tl.where(place == NOBODY, -1, place), pick)
            found = pick >= 0
            tl.store(picks + at, pick, inside)
    tl.store(distances + at, tl.where(found, distance, float("nan")), inside)


@triton.jit
def score(d_ap, d_an, parameters, losses, slope_ap, slope_an, length, LOSS: tl.constexpr, ROWS: tl.constexpr):
    """The loss of one triplet per anchor and its slopes, in float64; 0 where a distance is NaN.

    `parameters` holds the margin and the temperature.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < length
    margin, temperature = tl.load(parameters), tl.load(parameters + 1)
    p = tl.load(d_ap + rows, inside, float("nan")).to(tl.float64)
    n = tl.load(d_an + rows, inside, float("nan")).to(tl.float64)
    valid = (p == p) & (n == n)
    p, n = tl.where(valid, p, 0.0), tl.where(valid, n, 0.0)
    if LOSS == MARGIN:
        z = p - n + margin
        loss = tl.where(z < 0, 0.0, z)  # NaN stays NaN
        slope_p = tl.where(z > 0, 1.0, 0.0).to(tl.float64)
        slope_n = -slope_p
    else:
        if LOSS == SOFT_MARGIN:
            z = p - n
            z_p, z_n = tl.full((ROWS,), 1.0, tl.float64), tl.full((ROWS,), -1.0, tl.float64)
        elif LOSS == FIRST_ORDER:
            z = (p - n) / temperature
            z_p = tl.zeros_like(p) + 1.0 / temperature
            z_n = -z_p
        else:  # equation 16, with S = 1 − d: the weights of the pairs are 1 − S_ap and S_an
            s_p, s_n = 1.0 - p, 1.0 - n
            z = (0.5 * s_n * s_n - s_p + 0.5 * s_p * s_p) / temperature
            z_p, z_n = p / temperature, -s_n / temperature
        sigma = logistic(z)
        loss, slope_p, slope_n = softplus(z), sigma * z_p, sigma * z_n
    tl.store(losses + rows, tl.where(valid, loss, 0.0), inside)
    tl.store(slope_ap + rows, tl.where(valid, slope_p, 0.0), inside)
    tl.store(slope_an + rows, tl.where(valid, slope_n, 0.0), inside)


@triton.jit
def pulls(
    x, x_stride, i, x_factor, y, y_stride, j, y_factor, distance, weight, valid, depth, inside,
    DISTANCE: tl.constexpr,
):  # fmt: skip
    """What pairs pull each row i with, (rows, depth): Σ weight · the derivative of the distance."""
    any_pair = tl.max(valid.to(tl.int32), 1) > 0
    row_mask = any_pair[:, None] & inside[None, :]
    a = tl.load(x + i.to(tl.int64)[:, None] * x_stride + depth[None, :], row_mask, 0.0)
    a = a.to(tl.float64)[:, None, :]
    mask = valid[:, :, None] & inside[None, None, :]
    b = tl.load(y + j.to(tl.int64)[:, :, None] * y_stride + depth[None, None, :], mask, 0.0).to(tl.float64)
    weight, distance = weight.to(tl.float64), distance.to(tl.float64)
    if DISTANCE == COSINE:
        # d/dx (1 − S) = ((u − v) − (1 − S) u) / |x|, which keeps its digits where u and v nearly agree.
        u = a * x_factor[:, None, None]
        v = b * tl.load(y_factor + j, valid, 0.0)[:, :, None]
        pull = (weight * x_factor[:, None])[:, :, None] * ((u - v) - distance[:, :, None] * u)
    elif DISTANCE == EUCLIDEAN:
        apart = valid & (distance > 0)
        difference = a - b
        if x.dtype.element_ty == tl.float64:  # one over a subnormal distance would overflow
            lift = tl.where(distance < 2.0**-900, 2.0**100, 1.0)
            distance, difference = distance * lift, difference * lift[:, :, None]
        factor = tl.where(apart, weight / tl.where(apart, distance, 1.0), 0.0)
        pull = factor[:, :, None] * difference
    else:
        pull = (2 * weight)[:, :, None] * (a - b)
    return tl.sum(tl.where(mask, pull, 0.0), 1)


@triton.jit
def pull(
    x, x_stride, x_factor, y, y_stride, y_factor, owner, other_index, picks, distances, weights,
    incoming, incoming_begin, gradient,
    length, lists, width, owners,
    AS_ANCHOR: tl.constexpr, AS_CANDIDATE: tl.constexpr, DISTANCE: tl.constexpr,
    OWNERS: tl.constexpr, PAIRS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Add to rows of the gradient what pulls at them, as anchors and as candidates, in a fixed order.

    Pair list·length + position joins the anchor at `position` with the candidate picks[pair]. `incoming`
    holds the pairs of every candidate, from incoming_begin[row] on. x are the rows pulled at, y the others.
    """
    position = tl.program_id(0) * OWNERS + tl.arange(0, OWNERS)
    depth = tl.program_id(1) * DEPTH + tl.arange(0, DEPTH)
    inside = depth < width
    row = tl.load(owner + position, position < owners, -1)
    alive = row >= 0
    i = tl.maximum(row, 0)
    factor = tl.load(x_factor + i, alive, 0.0)
    ahead = tl.arange(0, PAIRS)[None, :]
    total = tl.zeros((OWNERS, DEPTH), tl.float64)
    if AS_ANCHOR:
        for start in range(0, lists, PAIRS):
            chosen = start + ahead
            there = alive[:, None] & (chosen < lists)
            pair = chosen.to(tl.int64) * length + position[:, None]
            j = tl.load(picks + pair, there, -1)
            weight, distance = tl.load(weights + pair, there, 0.0), tl.load(distances + pair, there, 0.0)
            total += pulls(
                x, x_stride, i, factor, y, y_stride, j, y_factor, distance, weight, (j >= 0) & (weight != 0),
                depth, inside, DISTANCE,
            )  # fmt: skip
    if AS_CANDIDATE:
        begin, end = tl.load(incoming_begin + i, alive, 0), tl.load(incoming_begin + i + 1, alive, 0)
        for start in range(0, tl.max(end - begin, 0).to(tl.int32), PAIRS):
            chosen = begin[:, None] + start + ahead
            there = chosen < end[:, None]
            pair = tl.load(incoming + chosen, there, 0)
            weight, distance = tl.load(weights + pair, there, 0.0), tl.load(distances + pair, there, 0.0)
            valid = there & (weight != 0)
            j = tl.load(other_index + pair % length, valid, 0)
            total += pulls(
                x, x_stride, i, factor, y, y_stride, j, y_factor, distance, weight, valid,
                depth, inside, DISTANCE,
            )  # fmt: skip
    at = gradient + i.to(tl.int64)[:, None] * width + depth[None, :]
    mask = alive[:, None] & inside[None, :]
    kind: tl.constexpr = gradient.dtype.element_ty
    total = within_type(tl.load(at, mask, 0.0).to(tl.float64) + total, kind)
    tl.store(at, total.to(kind), mask)


@triton.jit
def cost(
    x, x_half, x_nonzero, x_plain, x_index, y, y_half, y_nonzero, y_plain, y_index, begin, end, self_position,
    unscale, thresholds, losses, slopes,
    x_length, y_length, width, tiles,
    SOFTPLUS: tl.constexpr, RANKS: tl.constexpr, DISTANCE: tl.constexpr,
    ZERO_ROWS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For each threshold t of an anchor, over its negatives: Σ [t − d]₊ and how many are above 0.

    SOFTPLUS: Σ softplus(t − d) and its slope. A threshold of −∞ is none.
    """
    split, chunk = tl.program_id(1), tl.program_id(2)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ranks = tl.arange(0, RANKS)
    class_begin, class_end = tl.load(begin + rows)[:, None], tl.load(end + rows)[:, None]
    own, alive = tl.load(self_position + rows)[:, None], (tl.load(x_index + rows) >= 0)[:, None]
    row_half = tl.load(x_half + rows)
    kind: tl.constexpr = x_half.dtype.element_ty
    back = tl.load(unscale).to(kind)
    total, slope = tl.zeros((ROWS, RANKS), tl.float64), tl.zeros((ROWS, RANKS), tl.float64)
    start, stop = share_of(split, tiles, y_length, COLUMNS)
    for column in range(start, stop, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        different = alive & (columns[None, :] != own)
        different = different & ~same_class(columns[None, :], class_begin, class_end)
        distance, negatives, _ = negative_distances(
            x, x_half, x_nonzero, x_plain, y, y_half, y_plain, y_index, different, row_half, rows, columns,
            back, width, DISTANCE, ZERO_ROWS, ROWS, COLUMNS, DEPTH, PRECISION,
        )  # fmt: skip
        for k in range(RANKS):
            threshold = tl.load(thresholds + (chunk * RANKS + k).to(tl.int64) * x_length + rows)
            z = threshold[:, None] - distance
            if SOFTPLUS:
                counts = negatives & (threshold > -float("inf"))[:, None]
                z = tl.where(counts, z, 0.0)
                term, weight = softplus(z), logistic(z)
            else:
                counts = negatives & (z > 0)
                term, weight = z, tl.full((ROWS, COLUMNS), 1.0, kind)
            here = (ranks == k)[None, :]
            mean = tl.sum(tl.where(counts, term * (1.0 / COLUMNS), 0.0), 1)  # their sum may leave the type
            total += tl.where(here, (mean.to(tl.float64) * COLUMNS)[:, None], 0.0)
            slope += tl.where(here, tl.sum(tl.where(counts, weight, 0.0), 1).to(tl.float64)[:, None], 0.0)
    rank = (split * tl.num_programs(2) + chunk) * RANKS + ranks
    at = rank.to(tl.int64)[None, :] * x_length + rows[:, None]
    tl.store(losses + at, total)
    tl.store(slopes + at, slope)


@triton.jit
def similarity(
    x, x_half, x_nonzero, x_plain, x_index, y, y_half, y_nonzero, y_plain, y_index, begin, end, self_position,
    unscale, limits, rate, nearest, sums,
    x_length, y_length, width, tiles,
    ZERO_ROWS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The nearest negative of an anchor, and Σ e^(rate·(nearest − d)) over the negatives within its limit."""
    split = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    class_begin, class_end = tl.load(begin + rows)[:, None], tl.load(end + rows)[:, None]
    own, alive = tl.load(self_position + rows)[:, None], (tl.load(x_index + rows) >= 0)[:, None]
    row_half = tl.load(x_half + rows)
    kind: tl.constexpr = x_half.dtype.element_ty
    back, beta, limit = tl.load(unscale).to(kind), tl.load(rate).to(kind), tl.load(limits + rows)
    best, total = tl.full((ROWS,), float("inf"), kind), tl.zeros((ROWS,), tl.float64)
    start, stop = share_of(split, tiles, y_length, COLUMNS)
    for column in range(start, stop, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        different = alive & (columns[None, :] != own)
        different = different & ~same_class(columns[None, :], class_begin, class_end)
        distance, negatives, _ = negative_distances(
            x, x_half, x_nonzero, x_plain, y, y_half, y_plain, y_index, different, row_half, rows, columns,
            back, width, COSINE, ZERO_ROWS, ROWS, COLUMNS, DEPTH, PRECISION,
        )  # fmt: skip
        nearer = tl.minimum(best, tl.min(tl.where(negatives, distance, float("inf")), 1))
        base = tl.where(nearer < float("inf"), nearer, 0.0)
        kept = negatives & (distance < limit[:, None])
        terms = tl.exp(tl.where(kept, beta * (base[:, None] - distance), 0.0))
        shrink = tl.exp(beta * (base - tl.where(best < float("inf"), best, base)))
        total = total * shrink + tl.sum(tl.where(kept, terms, 0.0), 1)
        best = nearer
    out = split.to(tl.int64) * x_length + rows
    tl.store(nearest + out, best)
    tl.store(sums + out, total)


@triton.jit
def weigh(
    x, x_half, x_nonzero, x_plain, x_index, y, y_half, y_nonzero, y_plain, y_index, begin, end, self_position,
    unscale, thresholds, weights, limits, nearest, log_sums, rate, pulled,
    x_length, y_length, width, tiles, ranks,
    COST: tl.constexpr, AS_ANCHOR: tl.constexpr, AS_CANDIDATE: tl.constexpr, DISTANCE: tl.constexpr,
    ZERO_ROWS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What all negative pairs pull a row with: Σ factor·(x − y), SPAN dimensions of it.

    The factor is the slope of the anchor's cost (`cost`, `similarity`) times its weight, over the distance of
    the framed rows if that is euclidean. x are the rows pulled at, as anchors, as candidates of the anchors
    y, or as both.
    """
    split = tl.program_id(2)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    span = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    alive, row_half = (tl.load(x_index + rows) >= 0)[:, None], tl.load(x_half + rows)
    kind: tl.constexpr = x_half.dtype.element_ty
    back, beta = tl.load(unscale).to(kind), tl.load(rate).to(kind)
    scale = 1.0 / back
    stride = (x_length if AS_ANCHOR else y_length).to(tl.int64)
    sums, total = tl.zeros((ROWS, SPAN), kind), tl.zeros((ROWS,), kind)
    start, stop = share_of(split, tiles, y_length, COLUMNS)
    for column in range(start, stop, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        down, across = rows[:, None], columns[None, :]
        if AS_ANCHOR:
            same = same_class(across, tl.load(begin + down), tl.load(end + down))
            different = alive & ~same & (across != tl.load(self_position + down))
        else:
            same = same_class(down, tl.load(begin + across), tl.load(end + across))
            different = alive & ~same & (down != tl.load(self_position + across))
        distance, negatives, near = negative_distances(
            x, x_half, x_nonzero, x_plain, y, y_half, y_plain, y_index, different, row_half, rows, columns,
            back, width, DISTANCE, ZERO_ROWS, ROWS, COLUMNS, DEPTH, PRECISION,
        )  # fmt: skip
        weight = tl.zeros((ROWS, COLUMNS), kind)
        if COST == EXPONENTIAL:
            if AS_ANCHOR:
                slope = exponential_slope(
                    tl.load(limits + down), tl.load(nearest + down), tl.load(log_sums + down), beta,
                    distance, negatives,
                )  # fmt: skip
                weight += slope * tl.load(weights + down)
            if AS_CANDIDATE:
                slope = exponential_slope(
                    tl.load(limits + across), tl.load(nearest + across), tl.load(log_sums + across), beta,
                    distance, negatives,
                )  # fmt: skip
                weight += slope * tl.load(weights + across)
        else:
            if AS_ANCHOR:
                slope = threshold_slope(thresholds + down, stride, ranks, distance, COST == SOFT)
                weight += slope * tl.load(weights + down)
            if AS_CANDIDATE:
                slope = threshold_slope(thresholds + across, stride, ranks, distance, COST == SOFT)
                weight += slope * tl.load(weights + across)
        if DISTANCE == EUCLIDEAN:
            apart = negatives & (distance > 0)
            weight = tl.where(apart, weight / tl.where(apart, distance * scale, 1.0), 0.0)
        else:
            weight = tl.where(negatives, weight, 0.0)
        if ZERO_ROWS:
            weight = tl.where(tl.load(x_nonzero + down) * tl.load(y_nonzero + across) == 0, 0.0, weight)

        clear = tl.where(near, 0.0, weight)
        total += tl.sum(clear, 1)
        others = tl.load(
            y + columns.to(tl.int64)[:, None] * width + span[None, :], (span < width)[None, :], 0.0
        )
        sums = multiply(clear, others.to(kind), sums, PRECISION)
        if tl.max(tl.max(near.to(tl.int32), 1), 0) > 0:
            # The difference of near rows has digits that the difference of two sums has lost.
            inside = (span < width)[None, :]
            a = tl.load(x_plain + rows.to(tl.int64)[:, None] * width + span[None, :], inside, 0.0).to(kind)
            for place in tl.range(0, COLUMNS, num_stages=1, loop_unroll_factor=1):
                here = near & (tl.arange(0, COLUMNS) == place)[None, :]
                pair_weight = tl.sum(tl.where(here, weight, 0.0), 1)
                if tl.max(tl.abs(pair_weight), 0) > 0:
                    b = tl.load(y_plain + (column + place) * width.to(tl.int64) + span[None, :], inside, 0.0)
                    sums -= pair_weight[:, None] * (a - b.to(kind))
    at = rows.to(tl.int64)[:, None] * width + span[None, :]
    inside = (span < width)[None, :]
    values = tl.load(x + at, inside, 0.0).to(kind)
    out = pulled + split.to(tl.int64) * x_length * width + at
    tl.store(out, total[:, None] * values - sums, inside)
