"""mine(exclusive=True): no row is in two triplets (002, section 6.1), and earlier anchors come first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tripletops as T
from tests.support.backends import Backend
from tests.support.calls import DEVICE

RULES = [("hard", "hard"), ("easy", "semihard"), ("random", "easy")]


def rows(count: int, width: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator).to(DEVICE)


def greedy(whole: T.Triplets, own: list[int | None]) -> list[bool]:
    """Which anchors keep what they picked, `own` being their places among the candidates."""
    used: set[int] = set()
    kept = []
    for anchor, positive, negative in zip(own, whole.positive.tolist(), whole.negative.tolist(), strict=True):
        triplet = {row for row in (anchor, positive, negative) if row is not None}
        if min(positive, negative) < 0:
            kept.append(True)
        elif used & triplet:
            kept.append(False)
        else:
            used |= triplet
            kept.append(True)
    return kept


def assert_exclusive(emb: Tensor, labels: Tensor, own: list[int | None], **options: object) -> T.Triplets:
    whole = T.mine(emb, labels, **options)
    found = T.mine(emb, labels, exclusive=True, **options)
    kept = torch.tensor(greedy(whole, own), dtype=torch.bool, device=emb.device)
    assert torch.equal(found.anchor, whole.anchor)
    for name, none in (("positive", -1), ("negative", -1), ("d_ap", torch.nan), ("d_an", torch.nan)):
        expected = getattr(whole, name).where(kept, none)
        torch.testing.assert_close(getattr(found, name), expected, rtol=0, atol=0, equal_nan=True)
    return found


def test_by_hand(backend: Backend):
    """Rows on a line at 0, 1, 5, 6, 20, classes 0 0 1 1 2. Anchor 0 takes rows 0, 1, 2; anchor 1 would take
    row 0 again, and 2 and 3 both want row 1; the last has no positive."""
    emb = torch.tensor([[0.0], [1.0], [5.0], [6.0], [20.0]], device=DEVICE)
    labels = torch.tensor([0, 0, 1, 1, 2], device=DEVICE)
    found = T.mine(emb, labels, positive="hard", negative="hard", exclusive=True, backend=backend.name)
    assert found.positive.tolist() == [1, -1, -1, -1, -1]
    assert found.negative.tolist() == [2, -1, -1, -1, 3]
    assert found.valid.tolist() == [True, False, False, False, False]
    assert found.d_ap.isnan().tolist() == [False, True, True, True, True]


@pytest.mark.parametrize(("positive", "negative"), RULES)
@pytest.mark.parametrize(("count", "classes"), [(0, 1), (1, 1), (2, 1), (7, 2), (33, 4), (60, 20)])
def test_earlier_anchors_come_first(backend: Backend, positive, negative, count, classes):
    labels = (torch.arange(count) % classes).to(DEVICE)
    emb = rows(count)
    emb[::3] = emb[:1].clone()  # duplicates
    options = {"positive": positive, "negative": negative, "seed": 3, "backend": backend.name}
    found = assert_exclusive(emb, labels, list(range(count)), **options)
    used = torch.cat(found.indices())
    assert len(used) == len(used.unique())
    assert len(found.indices()[0]) > 0 or count <= 2


def test_anchors_that_are_candidates_too(backend: Backend):
    """Anchors outside of the candidates share no row by themselves; one inside of them uses its own row."""
    ref_emb, emb = rows(20), rows(9, seed=1)
    self_index = torch.tensor([-1, 4, -1, 7, 0, -1, 4, 19, -1], device=DEVICE)
    emb = torch.where(self_index[:, None] < 0, emb, ref_emb[self_index])
    ref_labels = (torch.arange(20) % 4).to(DEVICE)
    labels = torch.where(self_index < 0, torch.arange(9, device=DEVICE) % 4, ref_labels[self_index])
    memory = {"ref_emb": ref_emb, "ref_labels": ref_labels}
    options = {"positive": "hard", "negative": "hard", "backend": backend.name, **memory}
    own = [None if place < 0 else place for place in self_index.tolist()]
    assert_exclusive(emb, labels, own, self_index=self_index, **options)
    assert_exclusive(emb, labels, [None] * 9, **options)


def test_the_reference_keeps_the_same_ones(backend: Backend):
    emb, labels = rows(40, 5), (torch.arange(40) % 6).to(DEVICE)
    options = {"positive": "easy", "negative": "hard", "exclusive": True}
    found = T.mine(emb, labels, **options, backend=backend.name)
    plain = T.mine(emb, labels, **options, backend="reference")
    assert torch.equal(found.positive, plain.positive)
    assert torch.equal(found.negative, plain.negative)


def test_rows_that_are_ignored_or_not_finite(backend: Backend):
    emb, labels = rows(12), (torch.arange(12) % 3).to(DEVICE)
    options = {"positive": "hard", "negative": "hard", "backend": backend.name}
    labels[::4] = -5
    assert_exclusive(emb, labels, list(range(12)), ignore_label=-5, **options)
    emb[1] = torch.nan
    found = T.mine(emb, labels, exclusive=True, **options)
    assert not found.valid.any()


def test_compiles_whole(backend: Backend):
    emb, labels = rows(16), (torch.arange(16) % 4).to(DEVICE)

    def mined(emb: Tensor) -> T.Triplets:
        return T.mine(emb, labels, positive="hard", negative="hard", exclusive=True, backend=backend.name)

    compiled = torch.compile(mined, fullgraph=True, backend="aot_eager")(emb)
    for ours, expected in zip(compiled, mined(emb), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    torch.library.opcheck(
        torch.ops.tripletops.exclusive.default,
        (torch.stack([compiled.positive, compiled.negative]), None, None),
    )
