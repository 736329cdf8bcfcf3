"""What the demo says. Every sentence follows from what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from train_ref.demo.equality import SETTING, Comparison
from train_ref.demo.training import CLASSES, UNDER, Training
from train_ref.report.document import Table

CLOSE = 1e-3  # a relative difference that nobody sees in a curve


def about_equality(found: Comparison) -> list[str]:
    largest, step = found.largest
    verdict = "The two loss curves agree" if largest < CLOSE else "The two loss curves part"
    return [
        f"Batch-hard, {len(found.ours.losses)} steps with batches of {CLASSES * SETTING.per_class}, by "
        "tripletops and by plain PyTorch, from the same weights on the same batches.",
        f"{verdict}: the largest relative difference is {largest:.1e}, at step {step}. The losses of the "
        f"same embeddings differ by at most {found.same_rows:.1e}; the rest is rounding that training "
        "carries on.",
        f"Plain PyTorch took {found.loss_ratio:.1f} times as long for the loss and {found.step_ratio:.2f} "
        "times as long for the whole step (medians; both took turns).",
    ]


def about_one(found: Training) -> str:
    """What became of the training."""
    text = (
        f"Seed {found.seed}: the diameter goes from {found.diameters[0]:.3g} to {found.diameters[-1]:.3g}, "
    )
    if found.collapsed:
        text += f"{found.share:.1%} of it. The network collapsed, in {found.under_at} steps. "
    elif found.under_at is not None:
        text += (
            f"{found.share:.0%} of it. It was under {UNDER:.0%} after {found.under_at} steps and recovered: "
            "the network did not collapse for good. "
        )
    else:
        text += f"{found.share:.0%} of it. The network did not collapse. "
    if found.warned_at is None:
        return text + "The monitor did not warn."
    return text + f"The monitor warned at step {found.warned_at}."


def about_all(collapsing: Sequence[Training], recommended: Sequence[Training]) -> str:
    """How many collapsed, and what was found with each setting."""
    return (
        f"Collapsed: {_count(collapsing)} with the first setting, {_count(recommended)} with the recommended "
        f"one. Recall@1 on held-out images of the same digits: {_recall(collapsing)} against "
        f"{_recall(recommended)}."
    )


def recall_table(trainings: Sequence[Training]) -> Table:
    header = ("setting", "seed", "diameter left", "collapsed", "warned at step", "R@1 held out", "R@1 6–9")
    rows = tuple(
        (
            "batch-hard" if each.setting.positive == "hard" else "recommended",
            str(each.seed),
            f"{each.share:.1%}",
            "yes" if each.collapsed else "no",
            "–" if each.warned_at is None else str(each.warned_at),
            f"{each.held_out:.1%}",
            f"{each.unseen:.1%}",
        )
        for each in trainings
    )
    return Table(header, rows, numbers=True)


def in_columns(table: Table) -> str:
    """The table for a terminal."""
    lines = (table.header, *table.rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def _count(trainings: Sequence[Training]) -> str:
    return f"{sum(each.collapsed for each in trainings)} of {len(trainings)}"


def _recall(trainings: Sequence[Training]) -> str:
    recalls = sorted(each.held_out for each in trainings)
    if len(recalls) == 1:
        return f"{recalls[0]:.1%}"
    return f"{recalls[0]:.1%} to {recalls[-1]:.1%}"
