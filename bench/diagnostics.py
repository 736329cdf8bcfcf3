"""The diagnostics table: what looking at embeddings costs, beside the loss that trains them."""

from __future__ import annotations

import math

import tripletops as T
from bench.batches import embeddings, sorted_labels
from bench.measure import Call, step
from bench.registry import Row, Shape, Target, memory_row

STEPS = 10_000  # of a monitored training; the monitor looks often at first and rarely later


def summary_against_loss(shape: Shape) -> dict[str, Call]:
    emb, labels = embeddings(shape.n, shape.d), sorted_labels(shape.n, shape.k)
    loss = step(lambda: T.batch_hard_loss(emb, labels), emb)
    return {**summary_alone(shape), "batch-hard": loss}


def summary_alone(shape: Shape) -> dict[str, Call]:
    emb, labels = embeddings(shape.n, shape.d).detach(), sorted_labels(shape.n, shape.k)
    return {"summary": lambda: T.diagnostics.summary(emb, labels)}


def monitor_against_loss(shape: Shape) -> dict[str, Call]:
    """Each side alone: their sum is a monitored training, but the monitor's share is too small to be seen in
    the time of the sum."""
    emb, labels = embeddings(shape.n, shape.d), sorted_labels(shape.n, shape.k)
    one_step = step(lambda: T.batch_hard_loss(emb, labels), emb)
    value = T.batch_hard_loss(emb, labels).detach()

    def monitor() -> None:
        watching = T.diagnostics.CollapseMonitor()
        for _ in range(STEPS):
            watching.update(emb, labels, value)

    def losses() -> None:
        for _ in range(STEPS):
            one_step()

    return {"monitor": monitor, "losses": losses}


ROWS = [
    Row(
        "summary",
        "summary ÷ batch-hard loss, N={n}, D={d}",
        Target(3),
        Shape(65536),
        summary_against_loss,
        "summary",
        "batch-hard",
        rounds=5,
    ),
    memory_row(
        "summary-memory",
        "summary: peak memory growth ÷ bytes of emb, N={n}, D={d}",
        6,
        Shape(65536),
        summary_alone,
    ),
    Row(
        "monitor",
        f"CollapseMonitor ÷ batch-hard losses of {STEPS:,} steps, N={{n}}, D={{d}}",
        Target(0.02),
        Shape(1024),
        monitor_against_loss,
        "monitor",
        "losses",
        rounds=3,
    ),
]


def check() -> None:
    """Raise `AssertionError` unless the summary is that of the plain definitions."""
    shape = Shape(203, d=37)
    emb, labels = embeddings(shape.n, shape.d).detach().double(), sorted_labels(shape.n, shape.k)
    found = T.diagnostics.summary(emb, labels)
    distances = (emb[:, None] - emb).square().sum(2).sqrt()
    same = labels[:, None] == labels
    worst = distances.masked_fill(~same, 0).amax(1) - distances.masked_fill(same, math.inf).amin(1)
    assert math.isclose(found["diameter"], float(distances.max()), rel_tol=1e-12)
    assert math.isclose(found["worst_loss"], max(0.0, float(worst.max())), rel_tol=1e-12)
