"""How good embeddings are: nearest neighbours, Recall@k, MAP@R, NMI and NMI+, the diameter.

Hundreds of thousands of rows must do, on any device, so nothing of N×M elements is ever held: queries are
compared with the gallery block by block, and a running list keeps the best candidates of each.

The neighbours are exact nevertheless: those that comparing every query with every row would give, the
distances taken from the differences of rows and sorted, equal ones by their place in the gallery. The fast
comparison, a matrix product of centred rows, only proposes candidates, some more than are asked for. They are
measured from the rows, and where rounding could have hidden a neighbour behind the last candidate (a bound on
it is known), that query is compared with every row after all. This costs time only for rows that are equal
or nearly so, as those of a collapsed network: some ten times as much.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import frexp, inf, nan
from typing import NamedTuple

import torch
from torch import Tensor

from tripletops import functional
from tripletops._arguments import encode_rows
from tripletops._rows import check_finite, check_rows, row_distances, whole

__all__ = ["Neighbours", "diameter", "map_at_r", "nearest", "nmi", "nmi_plus", "recall_at_k"]

# Rows of a block, and the elements of the largest tensor there may be, but for the rows themselves, the
# distances of one query from all of them, and the answer.
_QUERIES = 512
_GALLERY = 8192
_ELEMENTS = _QUERIES * _GALLERY
_GROUP = 16  # columns of a block of which only the minimum is looked at, at first
_SPARE = 16  # candidates beyond the neighbours asked for
_ROUNDS = 50  # of k-means


class Neighbours(NamedTuple):
    """The k nearest rows of the gallery for each of N queries, from near to far."""

    distances: Tensor
    """(N, k), float64 for float64 rows, else float32; inf where the gallery has no further row."""
    indices: Tensor
    """(N, k) int64, −1 where the gallery has no further row."""


def nearest(
    query: Tensor,
    k: int,
    gallery: Tensor | None = None,
    *,
    distance: str = "euclidean",
    use_faiss: bool = False,
) -> Neighbours:
    """The `k` nearest rows of `gallery` for every row of `query`, exactly; equal distances go by the index.

    Args:
        query: (N, D); float16 and bfloat16 are measured in float32.
        k: how many, which may be more than there are.
        gallery: (M, D); None: the queries themselves, each of which is left out of its own neighbours, by
            its place: another row that is equal to it is its neighbour at distance 0.
        distance: ``"euclidean"`` or ``"cosine"``, 1 − S. A zero row has S = 0 with everything.
        use_faiss: let FAISS propose the candidates, which changes nothing but the time it takes. It must be
            installed, the rows must be on the CPU, and not float64.
    """
    check_rows("query", query)
    if gallery is not None:
        check_rows("gallery", gallery)
        if gallery.device != query.device:
            raise ValueError(f"query is on {query.device} and gallery on {gallery.device}")
        if gallery.shape[1] != query.shape[1]:
            raise ValueError(
                f"query of shape {tuple(query.shape)} and gallery of shape {tuple(gallery.shape)} must have "
                f"rows of the same length D"
            )
        check_finite("gallery", gallery)
    check_finite("query", query)
    distances, indices = zip(*_search(query, gallery, whole("k", k), distance, use_faiss), strict=True)
    return Neighbours(torch.cat(distances), torch.cat(indices))


def recall_at_k(
    emb: Tensor,
    labels: Tensor,
    k: int | Sequence[int] = (1, 2, 4, 8),
    *,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    distance: str = "euclidean",
    use_faiss: bool = False,
) -> dict[int, float]:
    """The share, 0 to 1, of queries with a row of their own class among their k nearest, for every k given.

    A query whose class has no other row can't be answered, but it is counted, as the papers count. (The
    precision_at_1 of pytorch-metric-learning, which is Recall@1 otherwise, leaves it out.) No query: NaN.

    Args:
        emb: (N, D) queries.
        labels: (N,) their integer class ids.
        k: the numbers of neighbours to look at, or one number.
        ref_emb, ref_labels: (M, D) and (M,), the gallery; None: the queries themselves, each of which is left
            out of its own neighbours.
        distance, use_faiss: as in `nearest`.
    """
    emb, labels, ref_emb, ref_labels = _labelled(emb, labels, ref_emb, ref_labels)
    counts = [whole("k", number) for number in (k if isinstance(k, Iterable) else (k,))]
    hits = torch.zeros(max(counts, default=1), dtype=torch.int64, device=emb.device)
    start = 0
    for _, indices in _search(emb, ref_emb, len(hits), distance, use_faiss):
        match = _is_match(labels[start : start + len(indices)], ref_labels, indices)
        hits += (match.cumsum(1) > 0).sum(0)
        start += len(indices)
    return {count: int(hits[count - 1]) / len(emb) if len(emb) else nan for count in counts}


def map_at_r(
    emb: Tensor,
    labels: Tensor,
    *,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    distance: str = "euclidean",
    use_faiss: bool = False,
) -> float:
    """Mean average precision at R, 0 to 1, R being the number of rows of the query's class in the gallery.

    That of a query is (1/R)·Σ P(i) over those ranks i ≤ R that hold a row of its class, P(i) being the share
    of such rows in the ranks 1 to i. Queries with R = 0 are left out; NaN, if none is left. The arguments are
    those of `recall_at_k`. The work grows with the largest class: it takes as many neighbours as that has.
    """
    emb, labels, ref_emb, ref_labels = _labelled(emb, labels, ref_emb, ref_labels)
    classes, place = torch.cat([labels, ref_labels]).unique(return_inverse=True)
    relevant = place[len(labels) :].bincount(minlength=len(classes))[place[: len(labels)]]
    if ref_emb is None:
        relevant -= 1
    largest = int(relevant.max()) if len(emb) else 0
    rank = torch.arange(1, largest + 1, device=emb.device)
    total = torch.zeros((), dtype=torch.float64, device=emb.device)
    start = 0
    for _, indices in _search(emb, ref_emb, largest, distance, use_faiss):
        block = slice(start, start + len(indices))
        match = _is_match(labels[block], ref_labels, indices) & (rank <= relevant[block, None])
        precision = match.cumsum(1) / rank.double()
        total += (precision.where(match, 0).sum(1) / relevant[block].clamp(min=1)).sum()
        start = block.stop
    queries = int((relevant > 0).sum())
    return float(total) / queries if queries else nan


def nmi(emb: Tensor, labels: Tensor, *, clusters: int | None = None, seed: int = 0) -> float:
    """Normalised mutual information, 0 to 1, of the labels and of k-means clusters of the rows.

    It is normalised by the arithmetic mean of the two entropies. The k-means is scikit-learn's, in float32 on
    the CPU: one start by k-means++ drawn from `seed`, then Lloyd's algorithm for at most 50 rounds. A
    collapsed embedding may have fewer different rows than `clusters`, and then fewer are found. No row: NaN.

    Args:
        emb: (N, D).
        labels: (N,) integer class ids.
        clusters: their number, at most N; None: as many as there are classes.
        seed: that of the start.
    """
    emb, labels, _, _ = _labelled(emb, labels, None, None)
    count = len(labels.unique()) if clusters is None else whole("clusters", clusters)
    if len(emb) == 0:
        return nan
    if count > len(emb):
        raise ValueError(f"clusters={count}: emb of shape {tuple(emb.shape)} has fewer rows")
    try:
        from sklearn.cluster import KMeans
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.metrics import normalized_mutual_info_score
    except ImportError as error:
        raise ImportError('nmi needs scikit-learn: pip install "tripletops[evaluate]"') from error
    kmeans = KMeans(count, n_init=1, max_iter=_ROUNDS, random_state=seed, algorithm="lloyd", copy_x=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = kmeans.fit_predict(emb.detach().to("cpu", torch.float32, copy=True).numpy())
    return float(normalized_mutual_info_score(labels.cpu().numpy(), found))


def nmi_plus(emb: Tensor, labels: Tensor, factor: int, *, seed: int = 0) -> float:
    """NMI+: `nmi` with `factor` times as many clusters as there are classes, so that a class may be in
    several places. The easy-positive-sampling paper takes 10, and 30 for the languages of Omniglot."""
    _, labels, _, _ = _labelled(emb, labels, None, None)
    return nmi(emb, labels, clusters=max(1, whole("factor", factor) * len(labels.unique())), seed=seed)


def diameter(emb: Tensor) -> float:
    """The largest euclidean distance between two rows of `emb`, (N, D); 0 for fewer than two rows."""
    check_rows("emb", emb)
    check_finite("emb", emb)
    if len(emb) < 2:
        return 0.0
    one_class = torch.zeros(len(emb), dtype=torch.int64, device=emb.device)
    return float(functional.mine(emb, one_class, positive="hard", negative="hard").d_ap.max())


class _Space(NamedTuple):
    """Rows whose euclidean distances say what is asked for: for cosine, they are normalised."""

    query: Tensor
    gallery: Tensor
    centred_query: Tensor
    centred_gallery: Tensor
    squares: Tensor  # (M,) squared lengths of the centred gallery
    excludes_self: bool
    is_cosine: bool
    scale: float  # the rows given times this are the rows here

    def reported(self, measured: Tensor) -> Tensor:
        return measured.square() / 2 if self.is_cosine else measured / self.scale

    def measured(self, rows: Tensor, candidates: Tensor) -> Tensor:
        """Distances (B, C) of the queries `rows` from their candidates (B, C), from the differences of rows;
        from themselves: inf."""
        step = max(1, _ELEMENTS // max(1, candidates.shape[1] * self.gallery.shape[1]))
        distances = torch.cat(
            [
                row_distances(self.query[some][:, None], self.gallery[theirs])[:, 0]
                for some, theirs in zip(rows.split(step), candidates.split(step), strict=True)
            ]
        )
        return distances.masked_fill(candidates == rows[:, None], inf) if self.excludes_self else distances


def _space(query: Tensor, gallery: Tensor | None, distance: str) -> _Space:
    if distance not in ("euclidean", "cosine"):
        raise ValueError(f"distance={distance!r} is not one of 'euclidean', 'cosine'")
    excludes_self, is_cosine = gallery is None, distance == "cosine"
    if gallery is None:
        gallery = query
    dtype = torch.promote_types(torch.promote_types(query.dtype, gallery.dtype), torch.float32)
    query, gallery = query.detach().to(dtype).contiguous(), gallery.detach().to(dtype).contiguous()
    scale = 1.0 if is_cosine else _scale(query, gallery)
    if is_cosine:
        query, gallery = _unit(query, 0), _unit(gallery, 1)
    elif excludes_self:
        query = gallery = gallery * scale
    else:
        query, gallery = query * scale, gallery * scale
    centre = gallery.sum(0) / max(1, len(gallery))
    centred = gallery - centre
    return _Space(
        query=query,
        gallery=gallery,
        centred_query=centred if query is gallery else query - centre,
        centred_gallery=centred,
        squares=centred.square().sum(1),
        excludes_self=excludes_self,
        is_cosine=is_cosine,
        scale=scale,
    )


def _scale(query: Tensor, gallery: Tensor) -> float:
    """A power of two, by which nothing is rounded, that brings rows near 1: the squares of 1e30 and 1e-30 do
    not fit float32."""
    largest = max(float(rows.abs().max()) if rows.numel() else 0.0 for rows in (query, gallery))
    limit = frexp(torch.finfo(query.dtype).max)[1] - 28
    return 2.0 ** -max(-limit, min(limit, frexp(largest)[1]))


def _unit(rows: Tensor, side: int) -> Tensor:
    """Rows of length 1, two columns longer: they let a zero row be as far from everything, a zero row of the
    other side included, as orthogonal rows are."""
    if rows.shape[1] == 0:
        return rows
    largest = rows.abs().amax(1, keepdim=True)
    rows = rows / largest.where(largest > 0, 1)
    length = row_distances(rows, rows.new_zeros(1, rows.shape[1]))
    rows = torch.nn.functional.pad(rows / length.where(length > 0, 1), (0, 2))
    rows[:, side - 2] = (length[:, 0] == 0).to(rows.dtype)
    return rows


def _search(
    query: Tensor, gallery: Tensor | None, k: int, distance: str, use_faiss: bool
) -> Iterator[Neighbours]:
    """The neighbours of one block of queries after the other."""
    space = _space(query, gallery, distance)
    propose = _propose_by_faiss if use_faiss else _propose
    count = min(k, max(0, len(space.gallery) - space.excludes_self))
    candidates = min(len(space.gallery), count + space.excludes_self + _SPARE + count // 16)
    step = max(1, min(_QUERIES, _ELEMENTS // max(1, 2 * candidates)))
    for rows in torch.arange(len(query), device=query.device).split(step):
        with torch.no_grad(), _full_precision(query.device.type):
            if len(rows) and count:
                found = _nearest_of(space, rows, count, *propose(space, rows, candidates))
            else:
                found = Neighbours(space.query.new_empty(len(rows), 0), rows.new_empty(len(rows), 0))
        missing = (0, k - found.indices.shape[1])
        yield Neighbours(
            torch.nn.functional.pad(found.distances, missing, value=inf),
            torch.nn.functional.pad(found.indices, missing, value=-1),
        )


def _nearest_of(space: _Space, rows: Tensor, count: int, keys: Tensor, candidates: Tensor) -> Neighbours:
    """The `count` nearest of every query of `rows`, given its candidates and their squared distances as
    computed with rounding; what is no candidate has a key no lower than theirs."""
    candidates = candidates.sort(1).values
    measured = space.measured(rows, candidates)
    column = _lowest(space.reported(measured), count)
    measured, indices = measured.gather(1, column), candidates.gather(1, column)
    if candidates.shape[1] < len(space.gallery):
        uncertain = keys.amax(1) <= measured[:, -1].square() + _rounding(space, rows, measured[:, -1])
        for which in uncertain.nonzero()[:, 0].split(max(1, _ELEMENTS // len(space.gallery))):
            from_all = row_distances(space.query[rows[which]], space.gallery)
            if space.excludes_self:
                from_all.scatter_(1, rows[which, None], inf)
            column = _lowest(space.reported(from_all), count)
            measured[which], indices[which] = from_all.gather(1, column), column
    return Neighbours(space.reported(measured), indices)


def _rounding(space: _Space, rows: Tensor, radius: Tensor) -> Tensor:
    """By how much, at most, the key of a row can exceed its squared distance as measured, if it is within
    `radius` of its query.

    Key and measure both sum D terms. In whatever order, each addition is off by at most half an epsilon of
    the sum of absolute values, which is at most (‖x‖ + ‖y‖)², and ‖y‖ ≤ ‖x‖ + radius. The other steps of
    both are off by less than 8 epsilon. Of squares that are too small for the type, all may be lost.
    """
    reach = 2 * space.centred_query[rows].square().sum(1).sqrt() + radius
    limits = torch.finfo(reach.dtype)
    return (space.gallery.shape[1] + 16) * (limits.eps * reach.square() + limits.tiny)


def _propose(space: _Space, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` lowest squared distances, by Gram arithmetic on centred rows, and their indices."""
    query = space.centred_query[rows]
    keys, indices = query.new_empty(len(rows), 0), rows.new_empty(len(rows), 0)
    for start in range(0, len(space.gallery), _GALLERY):
        block = slice(start, start + _GALLERY)
        product = torch.addmm(space.squares[block], query, space.centred_gallery[block].T, alpha=-2)
        low, column = _low(product, min(count, product.shape[1]))
        keys, indices = torch.cat([keys, low], 1), torch.cat([indices, column + start], 1)
        if keys.shape[1] > count:
            keys, column = keys.topk(count, largest=False, sorted=False)
            indices = indices.gather(1, column)
    return keys + query.square().sum(1, keepdim=True), indices


def _low(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` lowest of every row and their columns, in any order.

    They are among the groups of columns whose minima are the `count` lowest: most columns are only looked at
    for a minimum, which takes much less time than a search for several.
    """
    groups = keys.shape[1] // _GROUP
    if 2 * count > groups:
        low = keys.topk(count, largest=False, sorted=False)
        return low.values, low.indices
    minima = keys[:, : groups * _GROUP].unflatten(1, (_GROUP, groups)).amin(1)
    group = minima.topk(count, largest=False, sorted=False).indices
    member = torch.arange(0, groups * _GROUP, groups, device=keys.device)
    rest = torch.arange(groups * _GROUP, keys.shape[1], device=keys.device)
    columns = torch.cat([(group[:, None] + member[:, None]).flatten(1), rest.expand(len(keys), -1)], 1)
    low = keys.gather(1, columns).topk(count, largest=False, sorted=False)
    return low.values, columns.gather(1, low.indices)


def _propose_by_faiss(space: _Space, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `_propose`: FAISS computes the same sums in another order."""
    query, gallery = space.centred_query[rows], space.centred_gallery
    if query.dtype is not torch.float32 or not query.is_cpu:
        raise ValueError(f"use_faiss=True is for float32 on the CPU, got {query.dtype} on {query.device}")
    try:
        import faiss
    except ImportError as error:
        raise ImportError('use_faiss=True needs FAISS: pip install "tripletops[faiss]"') from error
    keys, indices = faiss.knn(query.numpy(), gallery.numpy(), count)
    return torch.from_numpy(keys), torch.from_numpy(indices)


def _lowest(distances: Tensor, count: int) -> Tensor:
    """The columns of the `count` lowest of every row in ascending order, equal ones from left to right, which
    torch.topk does not promise."""
    limit = distances.topk(count, largest=False).values[:, -1:]
    below, level = distances < limit, distances == limit
    room = count - below.sum(1, keepdim=True)
    columns = (below | (level & (level.cumsum(1) <= room))).nonzero()[:, 1].view(-1, count)
    return columns.gather(1, distances.gather(1, columns).sort(stable=True).indices)


@contextmanager
def _full_precision(device: str) -> Iterator[None]:
    """Without autocast, TF32 and bfloat16 products, whose rounding the bound on it knows nothing of."""
    products = [getattr(torch.backends, library).matmul for library in ("cuda", "mkldnn")]
    before = [product.fp32_precision for product in products]
    try:
        for product in products:
            product.fp32_precision = "ieee"
        with torch.autocast(device, enabled=False):
            yield
    finally:
        for product, precision in zip(products, before, strict=True):
            product.fp32_precision = precision


def _is_match(labels: Tensor, gallery_labels: Tensor, indices: Tensor) -> Tensor:
    """Which neighbours are of the query's class."""
    if len(gallery_labels) == 0:
        return torch.zeros_like(indices, dtype=torch.bool)
    return (gallery_labels[indices.clamp(min=0)] == labels[:, None]) & (indices >= 0)


def _labelled(
    emb: Tensor, labels: Tensor, ref_emb: Tensor | None, ref_labels: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Queries and gallery, checked; the labels of the gallery are there even if it is the queries."""
    emb, labels, ref_emb, ref_labels, _, _ = encode_rows(emb, labels, ref_emb, ref_labels, None, None)
    check_finite("emb", emb)
    if ref_emb is not None:
        check_finite("ref_emb", ref_emb)
    return emb, labels, ref_emb, labels if ref_labels is None else ref_labels
