"""A short table for the eye: tripletops, batch-hard by hand and the bare matrix product at a few sizes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

import tripletops as T
from bench import peers
from bench.batches import embeddings, sorted_labels
from bench.measure import THREADS, Call, percentile, step, take_turns
from bench.registry import CALLS_IN_A_BLOCK, SMALL

ROUNDS = {128: 30, 1024: 15, 4096: 5, 8192: 3}  # how often each size is measured: half a minute in all

OURS, NAIVE, PRODUCT, OTHER = "tripletops", "naive PyTorch", "torch.mm", "pytorch-metric-learning"


def speed_table(rounds: Mapping[int, int] = ROUNDS) -> dict[int, dict[str, float]]:
    """Print the median times at every size of `rounds`, D=128, K=4 per class; return them in seconds."""
    medians = {}
    torch.set_num_threads(THREADS)
    width = 2 + max(len(name) for name in _contenders(8))
    print(f"Batch-hard, forward and backward, in milliseconds: D=128, 4 rows per class, {THREADS} threads")
    heads = "".join(f"{name:>{width}}" for name in _contenders(8))
    print(f"{'N':>6}{heads}{'naive ÷ ours':>14}{'ours ÷ mm':>11}")
    for n, repeats in rounds.items():
        samples = take_turns(_contenders(n), repeats, CALLS_IN_A_BLOCK if n <= SMALL else 1)
        median = medians[n] = {name: percentile(values, 50) for name, values in samples.items()}
        cells = "".join(f"{1e3 * seconds:>{width}.2f}" for seconds in median.values())
        ratios = f"{median[NAIVE] / median[OURS]:>14.1f}{median[OURS] / median[PRODUCT]:>11.2f}"
        print(f"{n:>6}{cells}{ratios}", flush=True)
    return medians


def _contenders(n: int) -> dict[str, Call]:
    emb, labels = embeddings(n, 128), sorted_labels(n, 4)
    rows = emb.detach()
    contenders: dict[str, Call] = {
        OURS: step(lambda: T.batch_hard_loss(emb, labels), emb),
        NAIVE: step(lambda: peers.naive_batch_hard(emb, labels), emb),
        PRODUCT: partial(peers.matrix_product, rows, rows),
    }
    other = peers.metric_learning_batch_hard()
    if other is not None:
        contenders[OTHER] = step(lambda: other(emb, labels), emb)
    return contenders
