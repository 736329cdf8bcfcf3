"""The demo's command: it prints the story and writes it as one HTML file that stands on its own."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.speed_table import speed_table
from train_ref.demo import __doc__ as description
from train_ref.demo import equality, figures, training, words
from train_ref.demo.training import COLLAPSING, RECOMMENDED, Digits, load_digits, train
from train_ref.folder import write_whole
from train_ref.report.document import Block, Heading, Paragraph, Picture, Points, Table, page

SEEDS = 3
FIRST_SEED = 10  # the settings were chosen on others
OUTPUT = Path("results/demo")
WIDTH = 110


def say(text: str, indent: str = "") -> None:
    print(textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent), flush=True)


def tell_speed() -> list[Block]:
    print("1. How fast\n")
    medians = speed_table()
    rows = tuple(
        (str(size), *(f"{1e3 * seconds:.2f}" for seconds in median.values()))
        for size, median in medians.items()
    )
    names = next(iter(medians.values()))
    text = "Batch-hard, forward and backward, in milliseconds: D=128, 4 rows per class. torch.mm is the bare "
    return [
        Heading(2, "How fast"),
        Paragraph(text + "product of all pairs, without loss or backward."),
        Table(("N", *names), rows, numbers=True),
        Picture(figures.speed(medians), "Median times by the size of the batch.", "speed"),
    ]


def tell_equality(digits: Digits, steps: int) -> list[Block]:
    print("\n2. The same training as by plain PyTorch, only faster\n")
    found = equality.compare(digits, 0, steps)
    said = words.about_equality(found)
    for sentence in said:
        say(sentence)
    caption = "The loss of both trainings, step by step, and the relative difference between them."
    return [
        Heading(2, "The same training as by plain PyTorch, only faster"),
        *(Paragraph(sentence) for sentence in said),
        Picture(figures.curves(found), caption, "loss curves"),
    ]


def tell_collapse(digits: Digits, steps: int, seeds: int) -> list[Block]:
    # So small a network gains little from threads, and loses much on a busy machine.
    torch.set_num_threads(1)
    print("\n3. A training that should collapse, by the papers, and the setting that they recommend\n")
    collapsing, recommended = (
        [train(digits, setting, seed, steps) for seed in range(FIRST_SEED, FIRST_SEED + seeds)]
        for setting in (COLLAPSING, RECOMMENDED)
    )
    blocks: list[Block] = [
        Heading(2, "A training that should collapse, by the papers, and the setting that they recommend")
    ]
    for name, found in (("Batch-hard", collapsing), ("Recommended", recommended)):
        said = tuple(words.about_one(each) for each in found)
        say(f"{name}: {found[0].setting}")
        for sentence in said:
            say(sentence, "  ")
        blocks += [Paragraph(f"{found[0].setting}.", f"{name}:"), Points(tuple(map(Paragraph, said)))]
        warned = next((each for each in found if each.warning), None)
        if warned is not None:
            lead = f"The monitor's warning, seed {warned.seed}:"
            say(lead, "  ")
            say(warned.warning, "    ")
            blocks.append(Paragraph(warned.warning, lead))
        print()
    table, summary = words.recall_table([*collapsing, *recommended]), words.about_all(collapsing, recommended)
    print(words.in_columns(table) + "\n")
    say(summary)
    pictures = (
        ("diameter", figures.diameters([*collapsing, *recommended]), "The diameter of the embeddings."),
        (
            "scatter",
            figures.scatter(digits, collapsing[0], recommended[0]),
            f"The triplet scatter diagram, seed {FIRST_SEED}: every training image by its cosine similarity "
            "to its farthest positive and to its nearest negative. Red: the negative is at least as similar. "
            "A collapsed network has all its points in the corner (1, 1).",
        ),
    )
    return [
        *blocks,
        *(Picture(address, caption, name) for name, address, caption in pictures),
        Heading(3, "Recall@1"),
        table,
        Paragraph(summary),
        Paragraph(
            "The settings were chosen on seeds 100–109 by python -m train_ref.demo.choice, which states the "
            "criterion. Both have the same learning rate."
        ),
    ]


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a number from 1 on")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m train_ref.demo", description=description)
    count: dict[str, Any] = {"type": at_least_one, "metavar": "N"}
    parser.add_argument("--steps", **count, default=training.STEPS, help="of the trainings that may collapse")
    parser.add_argument("--compared-steps", **count, default=equality.STEPS, help="beside plain PyTorch")
    parser.add_argument("--seeds", **count, default=SEEDS, help="trainings with each setting")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the report")
    parser.add_argument("--no-speed-table", action="store_true", help="only the trainings")
    given = parser.parse_args(arguments)

    blocks: list[Block] = [Heading(1, "tripletops in a minute")]
    if not given.no_speed_table:
        blocks += tell_speed()
    digits = load_digits()
    blocks += tell_equality(digits, given.compared_steps)
    blocks += tell_collapse(digits, given.steps, given.seeds)
    given.output.mkdir(parents=True, exist_ok=True)
    report = given.output / "report.html"
    write_whole(report, page("tripletops in a minute", blocks).encode())
    print(f"\nThe report, with its figures: {report}")


if __name__ == "__main__":
    main()
