"""collapse-toy: its triplets and descent by hand, its shares, and that a seed decides everything."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from tests.train_ref.support import command
from train_ref.computed.collapse_toy import DESCENT, Toy, compute, descend, discrepancies
from train_ref.experiments import EXPERIMENTS
from train_ref.experiments.collapse import FIVE, TWENTY, judge_toy
from train_ref.experiments.verdicts import NOT_RUN, PARTLY, REPRODUCED
from train_ref.folder import RunFolder
from train_ref.outcome import Outcome, Value
from train_ref.report import collapse_toy_figures
from train_ref.report.drawing import Drawing, NoFigureError
from train_ref.report.tables import outcome_of

SMALL = Toy(sets=12, starts=4, search_steps=60)
SMALL_DESCENT = Toy(part=DESCENT, sets=3, points=(4, 3), starts=3, search_steps=40)


def test_losses_and_discrepancies_by_hand():
    """On a line, a and p at 0 and 3, n at 1, moved to 0, 2 and 4: (a, p, n) has 3 − 1, and its distances
    change by 1 and 3; (p, a, n) has 3 − 2, and 1 and 0. n is alone in its class and no anchor."""
    f, g = torch.tensor([[0.0], [3.0], [1.0]]), torch.tensor([[0.0], [2.0], [4.0]])
    losses, totals = discrepancies(f, g, torch.tensor([0, 0, 1]))
    expected_losses, expected_totals = torch.full((3, 3, 3), -math.inf), torch.full((3, 3, 3), -math.inf)
    expected_losses[0, 1, 2], expected_losses[1, 0, 2] = 2, 1
    expected_totals[0, 1, 2], expected_totals[1, 0, 2] = 1 + 3, 1 + 0
    torch.testing.assert_close(losses, expected_losses)
    torch.testing.assert_close(totals, expected_totals)


def test_a_step_of_descent_by_hand():
    """a and p at 0 and 3, n at 1. The anchors a and p have the losses 2 and 1, n none: their mean over the
    two has the gradients −½·(1 − 1) − ½ = −½ for a, ½ + ½·(1 − 1) = ½ for p, and −½ + ½ = 0 for n."""
    points = torch.tensor([[0.0, 0.0], [3.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    frames = descend(points, torch.tensor([0, 0, 1]), Toy(descent_steps=2, learning_rate=0.5))
    assert len(frames) == 3
    assert torch.equal(frames[0], points)
    torch.testing.assert_close(
        frames[1], torch.tensor([[0.25, 0.0], [2.75, 0.0], [1.0, 0.0]], dtype=torch.float64)
    )


@pytest.mark.parametrize("settings", [SMALL, SMALL_DESCENT, dataclasses.replace(SMALL, drawn_from="uniform")])
def test_a_seed_decides_everything(settings):
    first, again, other = (compute(settings, seed) for seed in (3, 3, 4))
    assert first.measures == again.measures
    assert first.measures != other.measures
    for name, array in first.arrays.items():
        np.testing.assert_array_equal(array, again.arrays[name])
    assert all(math.isfinite(value) for value in first.measures.values())


def test_numbers_of_five_points_belong_together():
    measures, arrays = compute(SMALL, 0)
    assert measures["½·L"] <= measures["d_iso"]
    assert measures["d_iso"] / 2 <= measures["d_haus"]
    assert measures["c"] == pytest.approx(measures["d_haus"] / measures["d_iso"])
    assert measures["c"] == arrays["c"][0]
    assert 0.5 <= measures["c: lowest"] <= measures["c: median"] <= measures["c: highest"]
    assert measures["sets/½·d_iso ≤ d_haus"] == measures["sets/½·L ≤ d_iso"] == 100
    assert len(arrays["c"]) == round(12 * (1 - measures["sets/separated already"] / 100))
    anchor, positive, negative = arrays["hardest"]
    f = arrays["f"]
    loss = math.dist(f[anchor], f[positive]) - math.dist(f[anchor], f[negative])
    assert loss == pytest.approx(2 * measures["½·L"])
    assert arrays["labels"].tolist() == [0, 0, 0, 1, 1]


def test_numbers_of_the_descent_belong_together():
    measures, arrays = compute(SMALL_DESCENT, 0)
    assert arrays["steps"].tolist() == [0, 3, 6, 10, 15, 50]
    assert arrays["frames"].shape == (6, 7, 2)
    assert arrays["d_haus"][-1] == 0
    assert arrays["d_haus"][0] == measures["d_haus(f₀, f_last)"] > 0
    apart = np.linalg.norm(arrays["frames"][:, :, None] - arrays["frames"][:, None], axis=3).max((1, 2))
    assert measures["diameter before"] == pytest.approx(apart[0])
    assert measures["diameter after"] == pytest.approx(apart[-1])
    left = 100 * arrays["left by descent"].mean()
    assert measures["sets/diameter left by descent"] == pytest.approx(left)


def test_sets_that_are_all_separated_are_refused(monkeypatch):
    monkeypatch.setattr(
        torch, "randn", lambda shape, **_: torch.tensor([0.0, 1.0]).repeat(shape[0], 1)[..., None]
    )
    with pytest.raises(ValueError, match="all of 2 sets are separated already: draw more"):
        compute(dataclasses.replace(SMALL, sets=2, points=(1, 1)), 0)


class Said(Outcome):
    """An outcome of given numbers."""

    def __init__(self, numbers: dict[str, float]) -> None:
        self.numbers = numbers

    def value(self, row: str, measure: str) -> Value | None:
        assert row in (f"N=5: {FIVE}", f"N=20: {TWENTY}")
        return Value(self.numbers[measure], 0.0, 1) if measure in self.numbers else None


NUMBERS = {
    "c: lowest": 0.5,
    "c: median": 0.7,
    "c: highest": 1.5,
    "sets/c ≤ 0.53": 9.0,
    "sets/½·d_iso ≤ d_haus": 100.0,
    "sets/hardest has the largest discrepancy within 1 %": 97.0,
    "sets/same triplet": 96.0,
    "sets/d_iso is ½·L within 1 %": 95.0,
    "sets/diameter left by descent": 40.0,
    "sets/diameter left by the nearest separated": 49.0,
}


def test_verdicts():
    words = [verdict.outcome for verdict in judge_toy(Said(NUMBERS))]
    assert words == [REPRODUCED, PARTLY, REPRODUCED, PARTLY]
    assert [verdict.outcome for verdict in judge_toy(Said({}))] == [NOT_RUN] * 4
    changed = NUMBERS | {
        "c: lowest": 0.55,
        "sets/hardest has the largest discrepancy within 1 %": 100.0,
        "sets/diameter left by descent": 60.0,
        "sets/diameter left by the nearest separated": 9.0,
    }
    words = [verdict.outcome for verdict in judge_toy(Said(changed))]
    assert words == [PARTLY, REPRODUCED, PARTLY, REPRODUCED]


def test_the_boundary_of_a_class_is_where_its_triplets_end():
    """Points at 0 and 2: discs of radius 2 around both."""
    inside = collapse_toy_figures.boundary(
        np.array([[0.0, 0.0], [2.0, 0.0]]), np.array([-1.9, -2.0, 3.9, 4.1]), np.zeros(4)
    )
    np.testing.assert_allclose(inside, [0.1, 0.0, 0.1, -0.1], atol=1e-12)


def test_the_quick_run_has_figures(tmp_path):
    command("run", "collapse-toy", "--quick", "--out", tmp_path)
    outcome = outcome_of(RunFolder(tmp_path / "collapse-toy-desk-quick"))
    assert outcome.unfinished == []
    experiment = EXPERIMENTS["collapse-toy"]
    assert set(experiment.figures) == set(collapse_toy_figures.FIGURES) == set(collapse_toy_figures.CAPTIONS)
    for name in experiment.figures:
        (path,) = collapse_toy_figures.FIGURES[name](Drawing(outcome, tmp_path))
        assert path.read_bytes().startswith(b"\x89PNG")
    outcome.finals.clear()
    with pytest.raises(NoFigureError, match="no row of it is finished yet"):
        collapse_toy_figures.toy_separated(Drawing(outcome, tmp_path))
