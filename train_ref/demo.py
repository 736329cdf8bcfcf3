"""`python -m train_ref.demo`: the speed table, then the experiment eps-even-odd on small handwritten digits.

The network is only told whether a digit is even or odd. Random positives pull all even digits together, and
the digits within them mix; an easy positive pulls an image only to the nearest one of its parity, which
leaves room for clusters ("Reducing Class Collapse in Metric Learning with Easy Positive Sampling", Table 1
and Fig. 2, there on MNIST). The images are those that scikit-learn carries: nothing is downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from bench.speed_table import speed_table
from train_ref import runner
from train_ref.experiments import EXPERIMENTS
from train_ref.folder import RunFolder
from train_ref.outcome import Outcome
from train_ref.settings import DESK
from train_ref.trainer import Context

EXPERIMENT = "eps-even-odd"
CHANGES = {"dataset": "digits", "size": 8}
STEPS = 30  # per epoch
EPOCHS = 10
SEEDS = 3
OUTPUT = Path("results/demo")


def recall_table(outcome: Outcome) -> str:
    """Recall by digit, mean ± standard deviation over the seeds, and what the paper has on MNIST."""
    names = outcome.measures(outcome.rows[0].key)
    splits = list(dict.fromkeys(name.rpartition("/")[0] for name in names))
    ks = list(dict.fromkeys(name.rpartition("/")[2] for name in names))
    lines = [f"{'':<29}" + "".join(f"{k:>13}" for k in ks) + "   MNIST, by the paper"]
    for row in outcome.rows:
        for split in splits:
            measures = [f"{split}/{k}" for k in ks]
            ours = "".join(f"{outcome.value(row.key, measure)!s:>13}" for measure in measures)
            paper = "".join(f"{row.published[measure]:>7.1f}" for measure in measures)
            lines.append(f"{row.name:<15}{split.partition('/')[0]:<14}{ours}{paper}")
    return "\n".join(lines)


def train(output: Path, steps: int, epochs: int, seeds: int) -> None:
    """Run the experiment below `output`, in place of an earlier demo's run there, and say what came out."""
    from train_ref.report.page import write_report

    earlier = RunFolder(output / f"{EXPERIMENT}-{DESK}")
    if earlier.config_file.exists() and earlier.config()["changes"].items() >= CHANGES.items():
        with earlier.locked():
            earlier.clear()
    print("Training on images of the digits 0–5, told even from odd alone; 6–9 it never sees", flush=True)
    changes = {**CHANGES, "steps": steps, "epochs": epochs, "seeds": seeds}
    folder = runner.new_run(EXPERIMENT, output, Context(), scale=DESK, changes=changes)
    outcome = Outcome(folder, runner.cells_of(folder.config()))
    print(f"\nRecall@k by digit in percent, mean ± std over {seeds} seeds")
    print(recall_table(outcome))
    for verdict in EXPERIMENTS[EXPERIMENT].judge(outcome):
        print(f"{verdict.claim}: {verdict.outcome}, on {CHANGES['dataset']} ({verdict.because})")
    page = write_report(folder)
    figures = ", ".join(path.name for path in sorted(folder.path.rglob("*.png")))
    print(f"\nThe report: {page}, with the figures {figures}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m train_ref.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of an epoch")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="epochs of every network")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="networks trained with each rule")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where the run's folder is made")
    parser.add_argument("--no-speed-table", action="store_true", help="only the training")
    arguments = parser.parse_args()

    if not arguments.no_speed_table:
        speed_table()
        print()
    torch.set_num_threads(1)  # so small a network gains little from threads, and loses much on a busy machine
    with runner.errors_in_words():
        train(arguments.output, arguments.steps, arguments.epochs, arguments.seeds)


if __name__ == "__main__":
    main()
