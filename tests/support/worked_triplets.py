"""Triplets whose numbers are worked out on paper, and short ways to ask the oracle about them."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support import worked
from tripletops import reference

# One anchor on the first axis, |a| = 2; its positive and its negative are 3-4-5 triangles, |p| = |n| = 5.
#   u = (1, 0), v_p = (.6, .8), v_n = (.8, .6):  S_ap = .6, S_an = .8;  cosine d_ap = .4, d_an = .2
ANCHOR = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
PAIR = torch.tensor([[3.0, 4.0], [4.0, 3.0]], dtype=torch.float64)
# dS/dx = (v − S u)/|x|:
S_AP_BY_ANCHOR = [0.0, 0.4]  # ((.6, .8) − .6·(1, 0))/2
S_AN_BY_ANCHOR = [0.0, 0.3]  # ((.8, .6) − .8·(1, 0))/2
S_AP_BY_POSITIVE = [0.128, -0.096]  # ((1, 0) − .6·(.6, .8))/5 = (.64, −.48)/5
S_AN_BY_NEGATIVE = [0.072, -0.096]  # ((1, 0) − .8·(.8, .6))/5 = (.36, −.48)/5

# 0.999 quantiles of chi-square: a fair draw fails for one seed in a thousand, and the seeds are fixed.
CHI_SQUARE = {3: 16.27, 4: 18.47, 6: 22.46, 9: 27.88, 54: 91.87}


def chi_square(counts: Tensor) -> float:
    """Of counts that should be equal; the degrees of freedom are one less than there are counts."""
    expected = counts.sum() / counts.numel()
    return ((counts - expected).square().sum() / expected).item()


def same(actual: Tensor, expected: object, tolerance: float = 1e-15) -> bool:
    return worked.same(actual, expected, tolerance)


def picks(*arguments: Tensor, **options: object) -> tuple[list[int], list[int]]:
    p, n, _, _ = reference.mine(*arguments, **options)
    return p.tolist(), n.tolist()


def loss_and_gradients(emb: Tensor, labels: Tensor, **options: object) -> tuple[float, Tensor, Tensor | None]:
    emb = emb.clone().requires_grad_()
    ref_emb = options.pop("ref_emb", None)
    if isinstance(ref_emb, Tensor):
        options["ref_emb"] = ref_emb = ref_emb.clone().requires_grad_()
    loss = reference.triplet_loss(emb, labels, **options)
    loss.sum().backward()
    assert emb.grad is not None
    return loss.sum().item(), emb.grad, ref_emb.grad if isinstance(ref_emb, Tensor) else None


def pair_loss(pair: Tensor = PAIR, **options: object) -> tuple[float, Tensor, Tensor]:
    """The loss of ANCHOR with its positive and its negative, and its gradients."""
    loss, by_anchor, by_pair = loss_and_gradients(
        ANCHOR, torch.tensor([0]), ref_emb=pair, ref_labels=torch.tensor([0, 1]), **options
    )
    assert by_pair is not None
    return loss, by_anchor, by_pair


def hash_by_plain_integers(seed: int, anchor: int, candidate: int) -> int:
    low, all_bits = 2**32 - 1, 2**64 - 1
    row = (seed + (anchor + 1) * 0x9E3779B97F4A7C15) & all_bits
    row = ((row ^ (row >> 30)) * 0xBF58476D1CE4E5B9) & all_bits
    row = ((row ^ (row >> 27)) * 0x94D049BB133111EB) & all_bits
    row ^= row >> 31
    x = (candidate * 0x9E3779B1 + (row & low)) & low
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & low
    x ^= row >> 32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & low
    return x ^ (x >> 16)
