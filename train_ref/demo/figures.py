"""The demo's figures, as addresses that hold the picture itself: the report is one file."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import tripletops as T
from train_ref.demo.equality import Comparison
from train_ref.demo.training import UNDER, Digits, Training
from train_ref.report.drawing import BLUE, DPI, GREEN, GREY, RED, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"tripletops": BLUE, "naive PyTorch": RED, "torch.mm": GREY, "pytorch-metric-learning": GREEN}


def speed(medians: Mapping[int, Mapping[str, float]]) -> str:
    figure, [[axes]] = panels(1, 1, 7.0, 3.6)
    sizes = list(medians)
    for name in medians[sizes[0]]:
        times = [1e3 * medians[size][name] for size in sizes]
        axes.plot(sizes, times, "o-", color=COLOURS[name], label=name, markersize=5)
    axes.set(xscale="log", yscale="log", xlabel="rows in the batch, N", ylabel="milliseconds (log scale)")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.grid(color="#e5e5e5")
    axes.legend(frameon=False, fontsize=9)
    return _address(figure)


def curves(found: Comparison) -> str:
    figure, [[axes, difference]] = panels(1, 2, 4.2, 3.2)
    axes.plot(found.naive.losses, color=RED, linewidth=5, alpha=0.35, label="naive PyTorch")
    axes.plot(found.ours.losses, color=BLUE, linewidth=1.5, label="tripletops")
    axes.set(xlabel="step", ylabel="batch-hard loss", ylim=(0, None))
    axes.legend(frameon=False, fontsize=9)
    pairs = list(zip(found.ours.losses, found.naive.losses, strict=True))
    relative = [abs(ours - naive) / naive if naive else 0.0 for ours, naive in pairs]
    difference.plot([max(each, 1e-9) for each in relative], color=GREY, linewidth=1.2)
    difference.set(xlabel="step", ylabel="relative difference", yscale="log", ylim=(1e-9, 1))
    return _address(figure)


def diameters(trainings: Sequence[Training]) -> str:
    """The share of the first diameter, step by step, and where the monitor warned."""
    figure, [[axes]] = panels(1, 1, 7.0, 3.4)
    for each in trainings:
        colour = RED if each.setting.positive == "hard" else GREEN
        name = "batch-hard" if each.setting.positive == "hard" else "recommended"
        shares = [100 * diameter / each.diameters[0] for diameter in each.diameters]
        first = each.seed == trainings[0].seed
        axes.plot(shares, color=colour, linewidth=1.5, label=name if first else None)
        if each.warned_at is not None:
            axes.plot(each.warned_at, shares[each.warned_at], "v", color="black", markersize=7)
    axes.plot([], [], "v", color="black", label="the monitor warns", linestyle="none")
    axes.axhline(100 * UNDER, color=GREY, linewidth=1, linestyle="--", label=f"{UNDER:.0%}")
    axes.set(xlabel="step", ylabel="diameter, % of the first (log scale)", yscale="log")
    axes.legend(frameon=False, fontsize=9)
    return _address(figure)


def scatter(digits: Digits, collapsing: Training, recommended: Training) -> str:
    """002's triplet scatter diagram of the training images, before and after, for both settings."""
    figure, axes = panels(1, 4, 2.4, 3.0)
    names = ("batch-hard: before", "batch-hard: after", "recommended: before", "recommended: after")
    embeddings = (collapsing.before, collapsing.after, recommended.before, recommended.after)
    diagrams = [T.diagnostics.scatter(emb, digits.train.digits, positive="hard") for emb in embeddings]
    lowest = min(float(each.points.min()) for each in diagrams) - 0.05
    for panel, name, each in zip(axes[0], names, diagrams, strict=True):
        each.draw(panel)
        panel.set(xlim=(lowest, 1.05), ylim=(lowest, 1.05))
        panel.set_title(f"{name}\n{each.share_correct:.0%} correct", fontsize=9)
        panel.legend().remove()  # the caption says it
        panel.set_ylabel("$S_{an}$" if name == names[0] else "")
    return _address(figure)


def _address(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
