"""`python -m train_ref.demo.choice`: choose the demo's settings, on seeds that the demo does not use.

The criterion, for every seed: the collapsing setting must end with less than 10 % of the first diameter. The
recommended one must end with at least the first diameter, must never be under 20 % of it on the way, and must
have a Recall@1 of at least 95 % on held-out images. Both have one learning rate: the lowest that meets this.

Two earlier choices were rejected. With a margin of 0.2 batch-hard met the criterion only at learning rates at
which the recommended setting did not. With a margin of 0, as in the paper's own experiments on collapse, but
without normalised embeddings and with 20 % as the limit, all of these seeds collapsed, but one of the demo's
three did not. So embeddings are normalised, the limit is 10 %, and the demo has other seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from train_ref.demo.training import (
    COLLAPSING,
    RECOMMENDED,
    STEPS,
    UNDER,
    Training,
    load_digits,
    train,
)

SEEDS = range(100, 110)
RATES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
RECALL = 0.95
LEFT = 0.1  # of the first diameter, in a training that collapses


def main() -> None:
    torch.set_num_threads(1)
    digits = load_digits()
    for rate in RATES:
        met = []
        for setting, meets in ((COLLAPSING, all_collapse), (RECOMMENDED, all_stay_wide)):
            changed = replace(setting, learning_rate=rate)
            found = [train(digits, changed, seed, STEPS) for seed in SEEDS]
            met.append(meets(found))
            print(f"{changed}:\n  {summary(found)}; {'met' if met[-1] else 'not met'}", flush=True)
        if all(met):
            print(f"The learning rate is {rate:g}.")
            return


def all_collapse(found: Sequence[Training]) -> bool:
    return all(each.share < LEFT for each in found)


def all_stay_wide(found: Sequence[Training]) -> bool:
    return all(each.share >= 1 and each.lowest >= UNDER and each.held_out >= RECALL for each in found)


def summary(found: Sequence[Training]) -> str:
    shares, recalls = [each.share for each in found], [each.held_out for each in found]
    lowest, warnings = min(each.lowest for each in found), [each for each in found if each.warning]
    return (
        f"{sum(each.collapsed for each in found)} of {len(found)} collapse; diameter left "
        f"{min(shares):.1%} to {max(shares):.1%}, on the way at least {lowest:.1%}; "
        f"R@1 {min(recalls):.1%} to {max(recalls):.1%}; {len(warnings)} warnings, "
        f"{sum(each.warned_in_time for each in warnings)} of them before the diameter was under {UNDER:.0%}"
    )


if __name__ == "__main__":
    main()
