"""Quantiles of the distances between all pairs of rows, or of a random sample of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import floor
from typing import NamedTuple

import torch
from torch import Tensor

from tripletops._rows import whole
from tripletops.diagnostics.rows import Pairs, apart, blocks, checked, number, scale_of

__all__ = ["Quantiles", "distance_quantiles"]

_BINS = 2**20  # of the histogram of distances
_COLLECTED = 2**21  # distances that are sorted at once


class Quantiles(NamedTuple):
    """Quantiles of the distances between pairs of rows."""

    values: Tensor
    """float64, of the shape of `q`."""
    pairs: int
    """How many distances they are taken of."""
    is_exact: bool
    """Whether these are all pairs; False: a random sample of them."""


def distance_quantiles(
    emb: Tensor,
    q: float | Iterable[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    *,
    sample: int | None = None,
    seed: int = 0,
) -> Quantiles:
    """Quantiles of the euclidean distances of the N(N−1)/2 pairs of rows of `emb`, (N, D).

    They interpolate linearly between the two nearest distances, as torch.quantile does. All pairs: each
    distance has a relative error below 2⁻²⁹. They are counted in two or three passes over blocks of pairs.

    Args:
        emb: (N, D), two rows at least.
        q: which, 0 to 1: one, or several.
        sample: take this many pairs at random, with replacement; None, or no fewer than there are: all.
        seed: that of the sample.
    """
    emb = checked("emb", emb)
    if len(emb) < 2:
        raise ValueError(f"emb of shape {tuple(emb.shape)} has no pair: two rows are needed")
    given = [number("q", one) for one in (q if isinstance(q, Iterable) else (q,))]
    for one in given:
        if not 0 <= one <= 1:
            raise ValueError(f"q={one!r}: must be 0 to 1")
    pairs = len(emb) * (len(emb) - 1) // 2
    is_exact = sample is None or whole("sample", sample) >= pairs
    if sample is not None and not is_exact:
        pairs = int(sample)
        ordered = sampled_distances(emb, pairs, seed).sort().values
    ranks = [min(max(one * (pairs - 1), 0.0), pairs - 1.0) for one in given]
    needed = sorted({rank for one in ranks for rank in (floor(one), min(floor(one) + 1, pairs - 1))})
    at = _ranked(emb, needed) if is_exact else {rank: float(ordered[rank]) for rank in needed}
    values = []
    for rank in ranks:
        low, high = at[floor(rank)], at[min(floor(rank) + 1, pairs - 1)]
        values.append(low + (rank - floor(rank)) * (high - low))
    shape = (len(values),) if isinstance(q, Iterable) else ()
    return Quantiles(
        torch.tensor(values, dtype=torch.float64, device=emb.device).reshape(shape), pairs, is_exact
    )


def sampled_distances(emb: Tensor, count: int, seed: int) -> Tensor:
    """The distances of `count` pairs of different rows, drawn uniformly with replacement."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.randint(len(emb), (count,), generator=generator)
    right = (left + 1 + torch.randint(len(emb) - 1, (count,), generator=generator)) % len(emb)
    scale = scale_of(emb)
    return apart(emb, left.to(emb.device), right.to(emb.device), scale) / scale


class _Bracket(NamedTuple):
    """Keys lowest … lowest + 2**width − 1, the ranks that lie there, and how many keys are lower or there."""

    lowest: int
    width: int
    ranks: list[int]
    below: int
    members: int


def _ranked(emb: Tensor, ranks: list[int]) -> dict[int, float]:
    """The distances of these ranks among all of them in ascending order, 0 being the lowest.

    A distance is not negative, so its bits, read as an integer, are in the order of the distances: a radix
    search over them is exact. A pass counts the members of _BINS bins in every bracket that holds a rank;
    the bins that do are the next brackets. When few members are left they are sorted.
    """
    pairs = Pairs(emb)
    brackets = [_Bracket(0, 63, ranks, 0, len(emb) * (len(emb) - 1) // 2)]
    found: dict[int, float] = {}
    while brackets:
        if sum(bracket.members for bracket in brackets) <= _COLLECTED:
            found |= _sorted(pairs, brackets)
            break
        brackets = [part for bracket, counts in _counted(pairs, brackets) for part in _parts(bracket, counts)]
        for single in (bracket for bracket in brackets if bracket.width == 0):
            value = torch.tensor(single.lowest).view(torch.float64)
            found |= dict.fromkeys(single.ranks, float(value))
        brackets = [bracket for bracket in brackets if bracket.width > 0]
    return {rank: value / pairs.scale for rank, value in found.items()}


def _keys(pairs: Pairs) -> Iterator[Tensor]:
    """The bits of the distances of all pairs, block by block."""
    for left, right in blocks(len(pairs.rows)):
        distances = pairs.block(left, right)
        if left == right:
            i, j = torch.triu_indices(len(distances), len(distances), 1, device=distances.device)
            distances = distances[i, j]
        yield distances.flatten().view(torch.int64)


def _within(keys: Tensor, bracket: _Bracket) -> Tensor:
    """Those of the keys that are in the bracket, counted from its lowest."""
    keys = keys - bracket.lowest
    return keys if bracket.width == 63 else keys[(keys >= 0) & (keys < 1 << bracket.width)]


def _counted(pairs: Pairs, brackets: list[_Bracket]) -> list[tuple[_Bracket, Tensor]]:
    """How many keys each bin of every bracket holds."""
    device = pairs.rows.device
    counts = [torch.zeros(_BINS, dtype=torch.int64, device=device) for _ in brackets]
    for keys in _keys(pairs):
        for bracket, count in zip(brackets, counts, strict=True):
            bins = _within(keys, bracket) >> _shift(bracket)
            count += bins.bincount(minlength=_BINS)
    return list(zip(brackets, counts, strict=True))


def _shift(bracket: _Bracket) -> int:
    """How many of the lower bits a bin leaves open."""
    return max(0, bracket.width - (_BINS.bit_length() - 1))


def _parts(bracket: _Bracket, counts: Tensor) -> Iterator[_Bracket]:
    """The bins that hold a rank."""
    upto, shift = counts.cumsum(0), _shift(bracket)
    ranks = torch.tensor(bracket.ranks, device=counts.device)
    bins = torch.searchsorted(upto, ranks - bracket.below, right=True)
    for chosen in bins.unique().tolist():
        members = int(counts[chosen])
        held = [rank for rank, place in zip(bracket.ranks, bins.tolist(), strict=True) if place == chosen]
        below = bracket.below + int(upto[chosen]) - members
        yield _Bracket(bracket.lowest + (chosen << shift), shift, held, below, members)


def _sorted(pairs: Pairs, brackets: list[_Bracket]) -> dict[int, float]:
    """The distances of the ranks in brackets with few members."""
    members: list[list[Tensor]] = [[] for _ in brackets]
    for keys in _keys(pairs):
        for bracket, kept in zip(brackets, members, strict=True):
            kept.append(_within(keys, bracket))
    found: dict[int, float] = {}
    for bracket, kept in zip(brackets, members, strict=True):
        ordered = (torch.cat(kept).sort().values + bracket.lowest).view(torch.float64)
        found |= {rank: float(ordered[rank - bracket.below]) for rank in bracket.ranks}
    return found
