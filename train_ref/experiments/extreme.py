""" "Extreme Triplet Learning: Effectively Optimizing Easy Positives and Hard Negatives" (002).

The gradient of the first-order loss, lost in part on the sphere and shared by neighbours, can pull hard
negatives closer; the second-order loss weights it by how near the pairs are, and is claimed not to.
"""

from __future__ import annotations

from typing import Any

from train_ref.experiments.verdicts import NOT_RUN, compared, word
from train_ref.outcome import Outcome
from train_ref.settings import DESK, PAPER, Experiment, Row, Settings, Verdict

TITLE = "Extreme Triplet Learning: Effectively Optimizing Easy Positives and Hard Negatives"

AT_PAPER = Settings(
    dataset="cars",
    size=256,
    pad=10,
    network="resnet18",
    pretrained=True,
    batches="groups",
    batch=128,
    per_class=8,
    objective="triplet",
    positive="easy",
    negative="hard",
    triplet="second_order",
    optimizer="sgd",
    learning_rate=0.005,
    milestones=(20, 30),
    epochs=40,
    seeds=1,
    recall_at=(1, 2, 4),
)
AT_DESK = Settings(
    **{
        **vars(AT_PAPER),
        "size": 64,
        "pad": 3,
        "network": "mobilenet_v2",
        "frozen": 14,
        "views": 4,
        "milestones": (8, 12),
        "epochs": 15,
    }
)

# What the data sets change: at desk scale CUB's images are larger, at the paper's its learning rate is lower.
DATA: dict[str, dict[str, Any]] = {
    "CUB": {"dataset": "cub", "learning_rate": 0.0025},
    "CAR": {"dataset": "cars"},
    "SOP": {"dataset": "sop", "recall_at": (1, 10, 100)},
    "In-shop": {"dataset": "inshop", "recall_at": (1, 10, 20)},
}
DESK_DATA: dict[str, dict[str, Any]] = {"CUB": {"size": 96, "pad": 4}, "CAR": {}}
ORDERS = {"1st": "first_order", "2nd": "second_order"}
MINING = {
    "EPHN": {"positive": "easy", "negative": "hard"},
    "EPSHN": {"positive": "easy", "negative": "semihard"},
    "HPHN": {"positive": "hard", "negative": "hard"},
    "EPEN": {"positive": "easy", "negative": "easy"},
}


def _rows(name: str, data: str, changes: dict[str, Any], **more: Any) -> list[Row]:
    """The row at the paper's scale, and at desk scale where that has the data set."""
    changes = {**DATA[data], **changes}
    paper = Row(name, changes, group=data, scales=(PAPER,), **more)
    if data not in DESK_DATA:
        return [paper]
    return [Row(name, {**changes, **DESK_DATA[data]}, group=data, scales=(DESK,), **more), paper]


# Fig 4, Fig 6 -----------------------------------------------------------------------------------------------

GROUP_SIZES = (2, 4, 8, 16)


def _group_size_rows(data: str) -> list[Row]:
    rows = []
    for mining in ("EPHN", "EPSHN"):
        for order, loss in ORDERS.items():
            for n in GROUP_SIZES:
                changes: dict[str, Any] = {**MINING[mining], "triplet": loss, "per_class": n}
                if data == "CAR" and mining == "EPHN" and n in (2, 8):
                    changes["diagrams"] = (0, 5, 10, 15, 40)
                rows += _rows(f"{mining}-{order} n={n}", data, changes)
    return rows


def _recall(data: str) -> str:
    return "gallery/class/R@1" if data == "In-shop" else "test classes/class/R@1"


def judge_group_size(outcome: Outcome) -> list[Verdict]:
    verdicts = []
    for data in dict.fromkeys(row.group for row in outcome.rows):
        for mining in ("EPHN", "EPSHN"):
            pairs = [(f"{data}: {mining}-1st n={n}", f"{data}: {mining}-2nd n={n}") for n in GROUP_SIZES]
            claim = f"the second order is ahead of the first ({data}, {mining})"
            verdicts.append(compared(outcome, claim, pairs, _recall(data)))
        pairs = [(f"{data}: EPSHN-2nd n={n}", f"{data}: EPHN-2nd n={n}") for n in GROUP_SIZES]
        claim = f"with the second order, EPHN is above EPSHN ({data})"
        verdicts.append(compared(outcome, claim, pairs, _recall(data)))
    for data, collapsing, well in (("CUB", (2,), 8), ("CAR", (2, 4), 8)):
        verdicts += _recovers(outcome, data, collapsing, well)
    return verdicts + _at_the_corner(outcome)


def _recovers(outcome: Outcome, data: str, collapsing: tuple[int, ...], well: int) -> list[Verdict]:
    """Whether the first order fails for the small groups `collapsing`: whether its recall there is less than
    half of that for groups of `well`."""
    values = {n: outcome.value(f"{data}: EPHN-1st n={n}", _recall(data)) for n in (*collapsing, well)}
    if any(value is None for value in values.values()):
        return []
    recall = {n: value.mean for n, value in values.items() if value is not None}
    failed = [n for n in collapsing if recall[n] < recall[well] / 2]
    said = ", ".join(f"{value:.1f} at n={n}" for n, value in recall.items())
    small = " and ".join(map(str, collapsing))
    claim = f"at n={small} EPHN-1st has less than half of the R@1 that it has at n={well} ({data})"
    return [Verdict(claim, word(len(failed) == len(collapsing), bool(failed)), said)]


def _at_the_corner(outcome: Outcome) -> list[Verdict]:
    """Fig 6: whether the last diagram has all of its triplets at (1, 1)."""
    means = {}
    for row in ("1st n=2", "1st n=8", "2nd n=2", "2nd n=8"):
        diagrams = outcome.diagrams(f"CAR: EPHN-{row}")
        if last := max(diagrams, default=0):
            means[row] = diagrams[last].mean(0)
    if len(means) < 4:
        return []
    at_corner = {row: bool(mean.min() > 0.99) for row, mean in means.items()}

    def verdict(claim: str, *kept: bool, rows: tuple[str, ...]) -> Verdict:
        said = "; ".join(f"EPHN-{row}: S_ap {means[row][0]:.3f}, S_an {means[row][1]:.3f}" for row in rows)
        return Verdict(claim, word(all(kept), any(kept)), f"in the mean, {said}")

    return [
        verdict(
            "the scatter diagram of EPHN-1st with n=2 goes to (1, 1), and that of EPHN-2nd never (CAR)",
            at_corner["1st n=2"],
            not at_corner["2nd n=2"] and not at_corner["2nd n=8"],
            rows=("1st n=2", "2nd n=2", "2nd n=8"),
        ),
        verdict(
            "with n=8 the scatter diagram of EPHN-1st recovers from (1, 1) (CAR)",
            not at_corner["1st n=8"],
            rows=("1st n=8",),
        ),
    ]


# Fig 3 ------------------------------------------------------------------------------------------------------

QUARTERS = ("top-right", "top-left", "bottom-left", "bottom-right")


def judge_movement(outcome: Outcome) -> list[Verdict]:
    def share(row: str, quarter: str) -> float:
        value = outcome.value(row, quarter)
        return value.mean if value else float("nan")

    def said(rows: list[str]) -> str:
        return "; ".join(
            f"{row}: " + ", ".join(f"{q} {share(row, q):.0f} %" for q in QUARTERS) for row in rows
        )

    def verdict(claim: str, kept: list[bool], rows: list[str]) -> Verdict:
        if not all(row in outcome.finals for row in rows) or not rows:
            return Verdict(claim, NOT_RUN, "not all of it has finished")
        return Verdict(claim, word(all(kept), any(kept)), said(rows))

    minings = ("HPHN", "EPEN")
    every = [row.key for row in outcome.rows if row.key in outcome.finals]
    first = [f"{mining}: 1st order, early" for mining in minings]
    second = [f"{mining}: 2nd order, early" for mining in minings]
    late = [f"{mining}: 1st order, late" for mining in minings]

    def largest(row: str) -> str:
        return max(QUARTERS, key=lambda quarter: share(row, quarter))

    return [
        verdict("no triplet moves to the top left", [share(row, "top-left") < 2 for row in every], every),
        verdict(
            "early, the first order moves most to the top right",
            [largest(r) == "top-right" for r in first],
            first,
        ),
        verdict(
            "early, the second order moves most to the bottom right",
            [largest(row) == "bottom-right" for row in second],
            second,
        ),
        verdict(
            "late, the first order moves most to the bottom left and the top right",
            [share(row, "bottom-left") + share(row, "top-right") > 50 for row in late],
            late,
        ),
    ]


# Table 1 ----------------------------------------------------------------------------------------------------

_TABLE_1 = {
    "CUB": ("64.9 75.3 83.5", "65.2 75.3 82.9"),
    "CAR": ("82.7 89.3 93.0", "83.2 89.2 93.2"),
    "SOP": ("78.0 90.6 96.3", "78.8 90.8 96.3"),
    "In-shop": ("87.1 96.9 97.9", "89.0 96.9 97.8"),
}
_TABLE_1_N = {"CUB": 8, "CAR": 16, "SOP": 2, "In-shop": 2}


def _benchmark_rows(data: str) -> list[Row]:
    rows = []
    for (order, loss), numbers in zip(ORDERS.items(), _TABLE_1[data], strict=True):
        ks = DATA[data].get("recall_at", AT_PAPER.recall_at)
        place = _recall(data).removesuffix("1")
        published = {f"{place}{k}": float(number) for k, number in zip(ks, numbers.split(), strict=True)}
        changes = {**MINING["EPHN"], "triplet": loss, "per_class": _TABLE_1_N[data], "dim": 512, "seeds": 3}
        rows += _rows(f"EPHN-{order}", data, changes, published=published, at_paper={"network": "resnet50"})
    return rows


def judge_benchmarks(outcome: Outcome) -> list[Verdict]:
    groups = dict.fromkeys(row.group for row in outcome.rows)
    return [
        compared(
            outcome,
            f"EPHN-2nd is above EPHN-1st ({data})",
            [(f"{data}: EPHN-1st", f"{data}: EPHN-2nd")],
            _recall(data),
        )
        for data in groups
    ]


_common: dict[str, Any] = {
    "paper": TITLE,
    "desk": AT_DESK,
    "at_paper": AT_PAPER,
    "choices": (
        "momentum 0.9; a temperature of 1, as the formulas have it",
        "an epoch goes through all images once, n of a class side by side",
    ),
}

EXPERIMENTS = (
    Experiment(
        name="extreme-movement",
        shows="Fig 3",
        question="Which way does a step move the triplets it is taken for?",
        procedure="movement",
        rows=tuple(
            Row(
                f"{order} order, {phase}",
                {**MINING[mining], "triplet": loss, "per_class": 16}
                | ({"epochs": 0} if phase == "early" else {}),
                group=mining,
            )
            for mining in ("HPHN", "EPEN")
            for order, loss in ORDERS.items()
            for phase in ("early", "late")
        ),
        quick={"epochs": 0},
        quick_rows=lambda row: row.name.endswith("early"),
        account="early, hard positives are dissimilar and hard negatives similar. There the second order's "
        "weights, 1 − S_ap of the pull and S_an of the push, are nearly alike, and it moves as the first, "
        "whose weights are alike everywhere. Late, the first order has collapsed on HPHN: its moves are as "
        "small as rounding, and their quarter says little.",
        figures=("movement",),
        judge=judge_movement,
        **_common,
    ),
    Experiment(
        name="extreme-group-size",
        shows="Figs 4, 6",
        question="How does recall depend on the images of a class in a batch, by either order?",
        rows=tuple(row for data in DATA for row in _group_size_rows(data)),
        quick={"epochs": 1},
        quick_rows=lambda row: (
            row.group == "CAR" and row.name.startswith("EPHN") and row.name[-2:] in ("=2", "=8")
        ),
        account="by the diagrams the first order has collapsed on Cars, yet the neighbours keep their order "
        "however small their distances are, and recall with it: it falls far less than in the paper. For the "
        "rest the networks end at about the recall of the pretrained features, as in eps-cars and eps-cub.",
        figures=("group_size", "diagrams"),
        judge=judge_group_size,
        **_common,
    ),
    Experiment(
        name="extreme-benchmarks",
        shows="Table 1",
        question="Is the second order ahead on the benchmarks?",
        rows=tuple(row for data in DATA for row in _benchmark_rows(data)),
        quick={"epochs": 1, "seeds": 1},
        quick_rows=lambda row: row.group == "CAR",
        judge=judge_benchmarks,
        **_common,
    ),
)
