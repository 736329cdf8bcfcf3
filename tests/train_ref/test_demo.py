"""The demo: its story from end to end, what it says of each outcome, and how its settings are chosen."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from bench.speed_table import speed_table
from train_ref.demo import choice, equality, words
from train_ref.demo.__main__ import FIRST_SEED, SEEDS, main
from train_ref.demo.training import COLLAPSING, RECOMMENDED, STEPS, UNDER, Training, load_digits, train

pytest.importorskip("sklearn")
pytestmark = pytest.mark.usefixtures("training_alone")


@pytest.fixture(scope="module")
def digits():
    return load_digits()


@pytest.fixture
def threads():
    """The demo sets the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def made_up(diameters: list[float], warned_at: int | None = None, held_out: float = 1.0) -> Training:
    return Training(
        setting=COLLAPSING,
        seed=4,
        losses=[0.1],
        diameters=diameters,
        warning="" if warned_at is None else "The network collapses.",
        warned_at=warned_at,
        before=torch.zeros(1, 2),
        after=torch.zeros(1, 2),
        held_out=held_out,
        unseen=0.5,
    )


def test_end_to_end(monkeypatch, capsys, tmp_path, threads):
    monkeypatch.setattr("train_ref.demo.__main__.speed_table", lambda: speed_table({8: 1, 16: 1}))
    main(["--steps", "3", "--compared-steps", "2", "--seeds", "2", "--output", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    report = tmp_path / "out" / "report.html"
    assert f"The report, with its figures: {report}" in printed
    for part in ("1. How fast", "2. The same training", "3. A training that should collapse"):
        assert part in printed
    assert printed.count(f"Seed {FIRST_SEED + 1}:") == 2
    page = report.read_text(encoding="utf-8")
    pictures = re.findall(r'<img[^>]*src="([^"]{30})', page)
    assert len(pictures) == 4
    assert all(address.startswith("data:image/png;base64,") for address in pictures)
    assert not re.findall(r'(?:src|href)="(?!data:)', page), "the report must stand on its own"


def test_bad_numbers_are_refused(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["--seeds", "0", "--output", str(tmp_path / "out")])
    assert "--seeds: 0: must be a number from 1 on" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + SEEDS))
def test_the_monitor_warns_of_the_collapse_alone(digits, one_thread, seed):
    """Before the diameter is under a fifth, and never of the training that stays wide."""
    collapsing, recommended = (train(digits, setting, seed, STEPS) for setting in (COLLAPSING, RECOMMENDED))
    assert collapsing.collapsed
    assert collapsing.warned_in_time
    assert collapsing.warning.count("The network collapses") == 1
    assert not recommended.collapsed
    assert recommended.warning == ""
    assert recommended.held_out > 0.95 > collapsing.held_out


def test_both_trainings_take_the_same_steps(digits, threads):
    found = equality.compare(digits, 0, 4)
    assert len(found.ours.losses) == len(found.naive.losses) == 4
    assert found.same_rows < 1e-5
    assert found.largest[0] < 1e-4
    assert "curves agree" in words.about_equality(found)[1]
    found.ours.losses[2] *= 2
    assert found.largest[1] == 2
    assert "curves part" in words.about_equality(found)[1]


@pytest.mark.parametrize(
    ("diameters", "warned_at", "said"),
    [
        ([1.0, 0.5, 0.1], 1, "collapsed, in 2 steps. The monitor warned at step 1."),
        (
            [1.0, 0.1, 0.6],
            None,
            "under 20% after 1 steps and recovered: the network did not collapse for good.",
        ),
        ([1.0, 0.9, 2.0], None, "200% of it. The network did not collapse. The monitor did not warn."),
    ],
)
def test_what_is_said_follows_from_the_diameters(diameters, warned_at, said):
    assert said in words.about_one(made_up(diameters, warned_at))


def test_what_is_said_of_all():
    collapsing = [made_up([1.0, 0.1], 0, 0.3), made_up([1.0, 0.5], None, 0.6)]
    said = words.about_all(collapsing, [made_up([1.0, 2.0])])
    assert "1 of 2 with the first setting, 0 of 1" in said
    assert "30.0% to 60.0% against 100.0%" in said
    table = words.in_columns(words.recall_table(collapsing)).splitlines()
    assert len({len(line) for line in table}) == 1
    assert table[1].split()[:5] == ["batch-hard", "4", "10.0%", "yes", "0"]


def test_a_warning_is_in_time_while_enough_is_left():
    assert made_up([1.0, 0.5, 0.1], 1).warned_in_time
    assert not made_up([1.0, 0.5, 0.1], 2).warned_in_time
    assert not made_up([1.0, 0.5, 0.1]).warned_in_time
    assert made_up([1.0, 0.5], 1).warned_in_time


def test_the_criterion_of_the_choice():
    assert choice.all_collapse([made_up([1.0, 0.09])])
    assert not choice.all_collapse([made_up([1.0, 0.09]), made_up([1.0, 0.11])])
    wide = made_up([1.0, 0.3, 1.1], held_out=0.95)
    assert choice.all_stay_wide([wide])
    for worse in (
        replace(wide, diameters=[1.0, 0.19, 1.1]),
        replace(wide, diameters=[1.0, 0.99]),
        replace(wide, held_out=0.94),
    ):
        assert not choice.all_stay_wide([wide, worse])
    assert not set(choice.SEEDS) & set(range(FIRST_SEED, FIRST_SEED + SEEDS))
    assert COLLAPSING.learning_rate == RECOMMENDED.learning_rate
    assert choice.LEFT < UNDER
