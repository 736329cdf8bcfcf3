"""`python -m train_ref.demo`: the speed table, then even/odd training on digits by two rules for positives.

The network is only told whether a digit is even or odd. Random positives pull all even digits together, and
the digits within them mix; an easy positive pulls an image only to the nearest one of its parity, which
leaves room for clusters ("Reducing Class Collapse in Metric Learning with Easy Positive Sampling", Table 1
and Fig. 2, there on MNIST).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

import tripletops as T
from bench.speed_table import speed_table
from train_ref.data import Digits, Images, load_digits
from train_ref.models import even_odd_network
from train_ref.recall import recall_at
from train_ref.trainer import embed, train

KS = (1, 5, 10)
RULES = ("random", "easy")
SEEDS = 3
STEPS = 300
PER_CLASS = 64
LEARNING_RATE = 1e-3
MARGIN = 0.2
OUTPUT = Path("results/demo")
PAPER = (65.78 - 42.01, 42.31 - 35.16)  # what easy positives add to R@1 on MNIST: digits 0–5, digits 6–9


class Run(NamedTuple):
    """One trained network: its embeddings of the measured images, and Recall@1/5/10 of each in percent."""

    seen: Tensor
    unseen: Tensor
    seen_recall: list[float]
    unseen_recall: list[float]


def train_once(digits: Digits, positive: str, seed: int, steps: int, progress: tqdm[None]) -> Run:
    """Train on even/odd with `positive` as the rule for positives and random negatives; measure by digit."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = even_odd_network()

    def loss(emb: Tensor, labels: Tensor) -> Tensor:
        return T.triplet_loss(
            emb, labels, positive=positive, negative="random", margin=MARGIN, generator=generator
        )

    def after_step(value: float) -> None:
        progress.set_postfix_str(f"{positive} positives, seed {seed}, loss {value:.3f}", refresh=False)
        progress.update()

    train(
        model,
        digits.train.pixels,
        digits.train.parity,
        loss,
        steps=steps,
        per_class=PER_CLASS,
        learning_rate=LEARNING_RATE,
        generator=generator,
        after_step=after_step,
    )
    seen, unseen = embed(model, digits.seen.pixels), embed(model, digits.unseen.pixels)
    return Run(
        seen,
        unseen,
        recall_at(KS, seen, digits.seen.digits),
        recall_at(KS, unseen, digits.unseen.digits),
    )


def recall_table(runs: dict[str, list[Run]]) -> str:
    """Recall by digit, mean ± standard deviation over the seeds."""

    def cells(recalls: list[list[float]]) -> str:
        values = torch.tensor(recalls)
        spread = values.std(dim=0) if len(recalls) > 1 else torch.zeros(len(KS))
        return "  ".join(f"{m:5.1f} ± {s:4.1f}" for m, s in zip(values.mean(dim=0), spread, strict=True))

    heads = "  ".join(f"{f'R@{k}':>12}" for k in KS)
    lines = [f"{'positives':<11}{'measured on':<25}{heads}"]
    for rule, found in runs.items():
        lines.append(f"{rule:<11}{'0–5, held-out images':<25}{cells([run.seen_recall for run in found])}")
        lines.append(f"{rule:<11}{'6–9, never seen':<25}{cells([run.unseen_recall for run in found])}")
    return "\n".join(lines)


def verdict(runs: dict[str, list[Run]]) -> str:
    """What easy positives changed, beside what they changed in the paper."""

    seen = {rule: mean(run.seen_recall[0] for run in found) for rule, found in runs.items()}
    unseen = {rule: mean(run.unseen_recall[0] for run in found) for rule, found in runs.items()}
    return (
        f"Easy positives change R@1 by {seen['easy'] - seen['random']:+.1f} points on 0–5 and by "
        f"{unseen['easy'] - unseen['random']:+.1f} on 6–9 "
        f"(the paper, on MNIST: {PAPER[0]:+.1f} and {PAPER[1]:+.1f})"
    )


def draw(runs: dict[str, list[Run]], digits: Digits, path: Path) -> None:
    """The first seed's embeddings side by side, a colour a digit: seen digits above, unseen ones below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(runs), figsize=(5.2 * len(runs) + 1, 10), squeeze=False)
    for column, (rule, found) in enumerate(runs.items()):
        run = found[0]
        panels: list[tuple[str, Tensor, Images, list[float]]] = [
            ("digits 0–5, held-out images", run.seen, digits.seen, run.seen_recall),
            ("digits 6–9, never seen", run.unseen, digits.unseen, run.unseen_recall),
        ]
        for row, (name, emb, images, recall) in enumerate(panels):
            axis = axes[row][column]
            for digit in images.digits.unique().tolist():
                points = emb[images.digits == digit]
                axis.scatter(points[:, 0], points[:, 1], s=12, alpha=0.7, color=f"C{digit}", label=str(digit))
            axis.set_title(f"{rule} positives\n{name}: R@1 {recall[0]:.1f} %")
            axis.set_aspect("equal", adjustable="datalim")
            if column == len(runs) - 1:
                axis.legend(title="digit", loc="center left", bbox_to_anchor=(1.02, 0.5), markerscale=2)
    figure.suptitle("Embeddings in the plane of networks that were only told even from odd")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m train_ref.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of every network")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="networks trained with each rule")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder for the picture")
    parser.add_argument("--no-speed-table", action="store_true", help="only the training")
    arguments = parser.parse_args()

    if not arguments.no_speed_table:
        speed_table()
        print()
    torch.set_num_threads(1)  # so small a network gains little from threads, and loses much on a busy machine
    digits = load_digits()
    print(f"Training on {len(digits.train.digits)} images of the digits 0–5, told even from odd", flush=True)
    with tqdm(total=len(RULES) * arguments.seeds * arguments.steps, unit="step", mininterval=0.5) as progress:
        seeds = range(arguments.seeds)
        runs = {
            rule: [train_once(digits, rule, seed, arguments.steps, progress) for seed in seeds]
            for rule in RULES
        }
    print("\nRecall@k by digit in percent, mean ± std over the seeds")
    print(recall_table(runs))
    print(verdict(runs))
    picture = arguments.output / "even_odd.png"
    draw(runs, digits, picture)
    print(f"\nThe embeddings: {picture}")


if __name__ == "__main__":
    main()
