"""The report of a run: numbers worked by hand, what is missing, what is not published, pictures that open."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from train_ref import __main__ as command_line
from train_ref import data
from train_ref.experiments import EXPERIMENTS
from train_ref.experiments.verdicts import compared
from train_ref.folder import RunFolder
from train_ref.report import document, figures, tables
from train_ref.report.document import Heading, Links, Paragraph, Picture, Points, Table
from train_ref.report.drawing import Drawing, NoFigureError
from train_ref.report.page import write_report
from train_ref.report.publish import publish
from train_ref.settings import PAPER, Experiment, Row, Settings, Verdict

RECALL = "test digits/digit/R@1"
BASE = Settings(
    dataset="digits",
    size=8,
    target="parity",
    measured=("digit",),
    network="even_odd",
    dim=2,
    batch=16,
    learning_rate=1e-3,
    epochs=2,
    seeds=2,
)
ROWS = (
    Row("A <b>", {"margin": 0.1}, published={RECALL: 40.0, "test digits/digit/R@5": 80.25}),
    Row("EPS + A <b>", {"positive": "easy"}, published={RECALL: 60.0}),
    Row("<n> positives", {"dim": 4}, group="more"),
    Row("large", group="vast", scales=(PAPER,)),
)


def small(**changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "name": "small",
        "paper": "A Paper | of 1 < 2",
        "shows": "Table 9",
        "question": "Is it so?",
        "desk": BASE,
        "at_paper": Settings(**{**vars(BASE), "epochs": 50}),
        "rows": ROWS,
        "choices": ("Adam & 1e-3",),
        "quick": {"epochs": 1},
        "judge": lambda outcome: [compared(outcome, "EPS is above", [("A <b>", "EPS + A <b>")], RECALL)],
    }
    return Experiment(**{**settings, **changes})


def config(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "experiment": name,
        "scale": "desk",
        "quick": False,
        "changes": {},
        "backend": None,
        "processes": 1,
        "tensorboard": False,
        "environment": {"processor": "a processor", "torch": "2.10"},
    } | changes


def final(row: str, seed: int, measures: dict[str, float], **more: Any) -> dict[str, Any]:
    return {"cell": f"{row} #{seed}", "row": row, "seed": seed, "final": True, "measures": measures} | more


def at_epoch(row: str, seed: int, epoch: int, measures: dict[str, float]) -> dict[str, Any]:
    return {"cell": f"{row} #{seed}", "row": row, "seed": seed, "epoch": epoch, "measures": measures}


FINALS = [
    final("A <b>", 0, {RECALL: 40.0}, timing={"network": 98.0, "ours": 2.0, "naive": 42.0}),
    final("A <b>", 1, {RECALL: 44.0}),
    final("EPS + A <b>", 0, {RECALL: 61.0}),
    final("EPS + A <b>", 1, {RECALL: 63.0}),
    final("more: <n> positives", 0, {RECALL: 50.0}),
    final("more: <n> positives", 1, {RECALL: 50.0}),
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make a run of an experiment: `run(experiment, records)`."""

    def make(experiment: Experiment, records: list[dict[str, Any]], **changes: Any) -> RunFolder:
        monkeypatch.setitem(EXPERIMENTS, experiment.name, experiment)
        folder = RunFolder(tmp_path / f"{experiment.name}-desk")
        with folder.begun(config(experiment.name, **changes)):
            folder.write_records(records)
        return folder

    return make


def png_size(path: Path) -> tuple[int, int]:
    """Of a PNG that is not of one colour."""
    from PIL import Image

    assert path.stat().st_size < 250_000
    with Image.open(path) as image:
        assert len(image.convert("RGB").getcolors(1 << 24) or []) > 1
        return image.size


@pytest.mark.parametrize(
    ("first", "second", "few", "expected"),
    [
        (1.0, 0.6, 0.7, ["reproduced", "reproduced"]),
        (1.0, 0.6, 1.0, ["reproduced", "not reproduced"]),
        (1.0, 1.0, 1.0, ["partly reproduced", "not reproduced"]),
        (0.7, 0.6, 0.7, ["partly reproduced", "reproduced"]),
    ],
)
def test_collapse_is_told_from_the_last_diagram(run, first, second, few, expected):
    folder = run(EXPERIMENTS["extreme-group-size"], [])
    ends = {"1st n=2": first, "2nd n=2": second, "2nd n=8": 0.6, "1st n=8": few}
    for row, end in ends.items():
        assert not [each for each in judged(folder) if "(1, 1)" in each.claim]  # not before all are there
        diagrams = {f"diagram {epoch}": np.full((3, 2), where) for epoch, where in ((0, 0.5), (15, end))}
        folder.write_arrays(f"CAR: EPHN-{row} #0", diagrams)
    found = [each for each in judged(folder) if "(1, 1)" in each.claim]
    assert [each.outcome for each in found] == expected
    assert f"EPHN-1st n=2: S_ap {first:.3f}, S_an {first:.3f}" in found[0].because


@pytest.mark.parametrize(
    ("left", "expected"),  # left of a diameter of 10, from d=4 to d=1024
    [
        ([0.1] * 4 + [6.0] * 5, "reproduced"),
        ([4.0] * 4 + [6.0] * 5, "partly reproduced"),  # smaller, but nothing has collapsed
        ([0.1, 6.0, 6.0, 6.0, 6.0, 5.0, 4.0, 4.0, 4.0], "partly reproduced"),  # the lowest alone
        ([0.1, 6.0, 6.0, 6.0, 6.0, 5.0, 4.0, 4.0, 0.1], "not reproduced"),  # the highest too
        ([5.5] * 4 + [6.0] * 5, "not reproduced"),
        ([0.001] * 4 + [0.5] * 5, "not reproduced"),  # smaller, but everything has collapsed
    ],
)
def test_the_trend_of_collapse(run, left, expected):
    experiment = EXPERIMENTS["collapse-dim"]
    records = []
    for place, each in enumerate(experiment.cells("desk", {"seeds": 1})):
        before = {"diameter before": 10.0, "loss before": 1.0}
        after = {"diameter": left[place] if place < len(left) else 6.0}  # with other margins: no trend
        records += [at_epoch(each.row.key, 0, 0, before), final(each.row.key, 0, after)]
    *trends, bound = judged(run(experiment, records, changes={"seeds": 1}))
    assert [trend.outcome for trend in trends] == [expected, "not reproduced", "not reproduced"]
    assert bound.because == "it holds for 0 of 27 trainings"  # 10 − 2·1 = 8
    high, low = (10 * sum(part) / 3 for part in (left[-3:], left[:3]))
    assert f"{high:.0f} % is left in the third with the highest dimensions" in trends[0].because
    assert f"and {low:.0f} % in that with the lowest" in trends[0].because


def judged(folder: RunFolder) -> list[Verdict]:
    outcome = tables.outcome_of(folder)
    return tables.experiment_of(outcome).judge(outcome)


# The page ---------------------------------------------------------------------------------------------------


def test_report_has_mean_std_and_the_papers_number(run):
    text = write_report(run(small(), FINALS)).read_text()
    # (40 + 44) / 2, and the sample's standard deviation √8
    assert "| A &lt;b&gt; | 42.0 ± 2.8 | 40.0 | — | 80.25 |" in text
    assert "| EPS + A &lt;b&gt; | 62.0 ± 1.4 | 60.0 | — | — |" in text
    assert "### test digits, by digit" in text


def test_verdict_names_claim_scale_and_evidence(run):
    text = write_report(run(small(), FINALS)).read_text()
    assert (
        "- **Reproduced (desk scale):** EPS is above. A &lt;b&gt; 42.0 ± 2.8 → EPS + A &lt;b&gt; 62.0 ± 1.4."
        in text
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [({}, 1), ({"quick": True}, 0), ({"scale": "paper"}, 0), ({"changes": {"dim": 3}}, 0)],
    ids=["desk", "quick", "paper", "changed"],
)
def test_the_account_is_of_desk_scale_as_defined(run, tmp_path, changes, said):
    folder = run(small(account="the network is small."), FINALS, **changes)
    assert write_report(folder).read_text().count("**Why:** the network is small.") == said


def test_unfinished_trainings_are_named_and_their_numbers_dashes(run):
    started = at_epoch("EPS + A <b>", 0, 0, {RECALL: 1.0})  # under way: not in any number
    text = write_report(run(small(), [*FINALS[:2], started])).read_text()
    assert "| EPS + A &lt;b&gt; | — | 60.0 |" in text
    assert (
        "4 of 6 trainings are missing: EPS + A &lt;b&gt; (seed 0, 1); more: &lt;n&gt; positives (seed 0, 1)"
        in text
    )
    assert "more: — (nothing measured yet)." in text
    assert "**Not run (desk scale; unfinished):** EPS is above. Nothing of it has finished." in text


def test_run_without_any_record_has_a_report(run):
    text = write_report(run(small(figures=tuple(figures.FIGURES)), [])).read_text()
    assert "| A &lt;b&gt; | — | 40.0 | — | 80.25 |" in text
    assert text.count("Not drawn: ") == len(figures.FIGURES)
    assert "The loss was not timed." in text


def test_every_experiment_has_a_report_before_its_first_record(tmp_path):
    for name in EXPERIMENTS:
        folder = RunFolder(tmp_path / name)
        with folder.begun(config(name)):
            pass
        text = write_report(folder, roots=[tmp_path]).read_text()
        assert text.startswith(f"# {name}\n")
        trains = EXPERIMENTS[name].compute is None
        assert ("its files are not here any more" in text) == trains
        assert ("The loss's share of a step" in text) == trains


def test_settings_are_shown_once_or_by_row(run):
    text = write_report(run(small(), FINALS)).read_text()
    assert "| row | dim | positive | margin |" in text
    assert "| EPS + A &lt;b&gt; | 2 | easy | 0.2 |" in text
    assert "| learning rate | 0.001 |" in text
    assert "- Adam &amp; 1e-3" in text
    assert "| epochs | 2 | 50 | all |" in text
    assert "**Only at the paper's scale:** vast." in text


def test_scales_that_are_equal_are_called_the_papers(run):
    text = write_report(run(small(at_paper=BASE), FINALS)).read_text()
    assert "**Reproduced (the paper's scale):**" in text
    assert "desk scale is the paper's own here" in text


def test_trials_and_changes_are_marked(run):
    folder = run(small(), FINALS, quick=True, changes={"dim": 3, "recall_at": [1, 2]})
    text = write_report(folder).read_text()
    assert "**A trial, not a result.** Run with --quick (epochs 1;" in text
    assert "**Changed on the command line:** dim 3, recall at 1, 2." in text
    assert "(desk scale; quick trial; changed: dim 3, recall at 1, 2):" in text


def test_share_of_the_loss(run):
    text = write_report(run(small(), FINALS)).read_text()
    # 2 / (98 + 2) and 42 / (98 + 42)
    assert (
        "takes 2 % of a training step; batch-hard written by hand on the same embeddings would take 30 %"
        in text
    )
    assert "| A &lt;b&gt; | 98.0 | 2.00 | 2.00 % | 42.00 | 30.00 % |" in text


def test_data_and_machine(run):
    text = write_report(run(small(), FINALS)).read_text()
    assert "**Data:** scikit-learn's digits, 1,797 images" in text
    assert "processor a processor, torch 2.10." in text


def test_html_has_the_same_content_escaped(run):
    page = write_report(run(small(), FINALS)).with_suffix(".html").read_text()
    assert "<td>A &lt;b&gt;</td><td>42.0 ± 2.8</td><td>40.0</td>" in page
    assert "<p>A Paper | of 1 &lt; 2: Table 9.</p>" in page
    assert "<b>Reproduced (desk scale):</b> EPS is above." in page
    assert "A <b>" not in page


def test_blocks_in_both_languages():
    blocks = [
        Heading(2, "a*b"),
        Paragraph("text", "lead"),
        Points((Paragraph("x [y]"),)),
        Table(("", "n"), (("a|b", "1"),), numbers=True),
        Picture('a".png', "see", "plane"),
        Links((("all", "there"),)),
    ]
    assert document.markdown(blocks) == (
        "## a\\*b\n\n**lead** text\n\n- x \\[y]\n\n|  | n |\n| --- | ---: |\n| a\\|b | 1 |\n\n"
        '![plane](a".png)\n\nsee\n\n[all](there)\n'
    )
    page = document.page("1 < 2", blocks)
    assert "<title>1 &lt; 2</title>" in page
    assert "<h2>a*b</h2>\n<p><b>lead</b> text</p>\n<ul><li>x [y]</li></ul>\n<table class=numbers>" in page
    assert '<img src="a&quot;.png" alt="plane"><figcaption>see</figcaption>' in page
    assert page.endswith('<a href="there">all</a>\n</body>\n</html>\n')


@pytest.mark.parametrize(
    ("mean", "std", "seeds", "measure", "expected"),
    [
        (99.96, 0.04, 3, "a/b/R@1", "100.0 ± 0.0"),
        (12.345, 0.5, 3, "diameter", "12.3 ± 0.5"),
        (0.0512, 0.001, 2, "diameter", "0.0512 ± 0.0010"),
        (1234.6, 3.2, 2, "diameter", "1235 ± 3"),
        (2e-5, 1e-6, 2, "diameter", "2.0e-05 ± 1.0e-06"),
        (0.0, 0.0, 1, "top-left", "0.0"),
        (-3.21, 0.0, 1, tables.BOUND, "-3.21"),
    ],
)
def test_numbers_have_the_digits_they_need(mean, std, seeds, measure, expected):
    assert tables.shown(tables.Value(mean, std, seeds), measure) == expected


# Figures ----------------------------------------------------------------------------------------------------


def panels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved from now on, before they become pixels."""
    saved: list[Any] = []
    original = Drawing.save

    def save(self: Drawing, figure: Any, name: str, photos: bool = False) -> Path:
        saved.append(figure)
        return original(self, figure, name, photos)

    monkeypatch.setattr(Drawing, "save", save)
    return saved


def drawn(name: str, folder: RunFolder) -> list[Path]:
    return figures.draw(name, Drawing(tables.outcome_of(folder), folder.path))


def test_diameter_figure_has_the_bound(run, monkeypatch):
    rows = tuple(Row(f"N={n}", {"batch": n}, group="α=0") for n in (8, 16))
    settings = Settings(**{**vars(BASE), "margin": 0.0, "seeds": 2})
    experiment = small(
        procedure="collapse", rows=rows, desk=settings, at_paper=settings, figures=("diameter",)
    )
    records = []
    for n, losses, diameters in ((8, (1.0, 2.0), (9.0, 7.0)), (16, (3.0, 4.0), (0.5, 0.25))):
        for seed in range(2):
            before = {"diameter before": 10.0 + seed, "loss before": losses[seed]}
            row = f"α=0: N={n}"
            records += [at_epoch(row, seed, 0, before), final(row, seed, {"diameter": diameters[seed]})]
    folder = run(experiment, records)
    saved = panels(monkeypatch)
    [file] = drawn("diameter", folder)
    assert png_size(file)[0] > 300
    after, _, least, _ = saved[0].axes[0].lines
    assert list(zip(*after.get_data(), strict=True)) == [(8, 9.0), (8, 7.0), (16, 0.5), (16, 0.25)]
    # 10 − 2·1 and 11 − 2·2: 7.5 in the mean; 10 − 2·3 and 11 − 2·4: 3.5
    assert list(zip(*least.get_data(), strict=True)) == [(8, 7.5), (16, 3.5)]
    assert least.get_linestyle() == "--"
    assert saved[0].axes[0].get_title() == "α=0"
    assert saved[0].axes[0].get_xlabel() == "batch size N"
    assert (
        "| N=8 | 10.5 ± 0.7 | 1.50 ± 0.71 | 7.50 ± 0.71 | 8.00 ± 1.41 |" in write_report(folder).read_text()
    )


def test_diameter_is_drawn_against_the_dimension_where_that_varies(run, monkeypatch):
    rows = tuple(Row(f"d={dim}", {"dim": dim}, group="α=0.2") for dim in (4, 64))
    before = {"diameter before": 10.0, "loss before": 1.0}
    records = []
    for dim in (4, 64):
        records += [
            at_epoch(f"α=0.2: d={dim}", 0, 0, before),
            final(f"α=0.2: d={dim}", 0, {"diameter": float(dim)}),
        ]
    folder = run(small(rows=rows), records)
    saved = panels(monkeypatch)
    drawn("diameter", folder)
    assert saved[0].axes[0].lines[0].get_xdata().tolist() == [4, 64]
    assert saved[0].axes[0].get_xlabel() == "embedding dimension d"


def test_recall_by_epoch_is_the_mean_with_its_range(run, monkeypatch):
    records = []
    for seed, values in enumerate(((10.0, 20.0), (20.0, 40.0))):
        records += [at_epoch("A <b>", seed, epoch, {RECALL: value}) for epoch, value in enumerate(values)]
        records.append(final("A <b>", seed, {RECALL: values[-1]}))
    folder = run(small(), records)
    saved = panels(monkeypatch)
    png_size(*drawn("recall_by_epoch", folder))
    panel = saved[0].axes[0]
    assert panel.lines[0].get_ydata().tolist() == [15.0, 30.0]
    band = panel.collections[0].get_paths()[0].get_extents()
    assert (band.ymin, band.ymax) == (10.0, 40.0)
    assert panel.get_ylabel() == "R@1, test digits, by digit (%)"


def test_recall_against_settings(run, monkeypatch):
    rows = (
        *(Row(f"{n} positives", {"per_class": n or 8}, group="Fig 3b") for n in (0, 8)),
        *(
            Row(f"{loss}-{order}, n={n}", {"positive": "easy", "triplet": order, "per_class": n}, group="CUB")
            for loss, order in (("EPHN", "first_order"), ("EPHN", "second_order"))
            for n in (4, 2)
        ),
    )
    values = [30.0, 35.0, 40.0, 41.0, 50.0, 51.0]
    folder = run(
        small(rows=rows),
        [final(row.key, 0, {RECALL: value}) for row, value in zip(rows, values, strict=True)],
    )
    saved = panels(monkeypatch)
    for name in ("positives_in_batch", "group_size", "trimmed"):
        png_size(*drawn(name, folder))
    assert saved[0].axes[0].lines[0].get_xydata().tolist() == [[0, 30], [8, 35]]
    first, second = saved[1].axes[1].lines
    assert first.get_xydata().tolist() == [[2, 41], [4, 40]]
    assert (first.get_linestyle(), second.get_linestyle()) == ("--", "-")
    assert [text.get_text() for text in saved[1].axes[1].get_legend().texts] == ["EPHN-1st", "EPHN-2nd"]


def test_movement_sorts_triplets_into_their_quarters(run, monkeypatch):
    row = Row("1st order, early", group="HPHN")
    shares = dict(zip(figures.QUARTERS, (50.0, 25.0, 0.0, 25.0), strict=True))
    folder = run(small(rows=(row,)), [final(row.key, 0, shares)])
    moves = [[0.9, 0.8, 0.1, 0.1], [0.7, 0.6, 0.1, 0.1], [0.5, 0.4, -0.1, 0.1], [-0.3, 0.2, 0.1, -0.1]]
    folder.write_arrays(f"{row.key} #0", {"moves": np.array(moves, np.float32)})
    saved = panels(monkeypatch)
    [file] = drawn("movement", folder)
    assert file.name == "movement-hphn.png"
    png_size(file)
    points = [panel.collections[0].get_offsets().round(3).tolist() for panel in saved[0].axes[:4]]
    assert points == [[[0.9, 0.8], [0.7, 0.6]], [[0.5, 0.4]], [], [[-0.3, 0.2]]]
    assert saved[0].axes[0].get_xlim()[0] < -0.3
    assert [bar.get_height() for bar in saved[0].axes[4].patches] == [50, 25, 0, 25]


def test_diagrams_are_red_above_the_diagonal(run, monkeypatch):
    folder = run(small(), FINALS)
    found = {"diagram 0": np.array([[0.2, 0.8], [0.3, 0.9], [0.9, 0.1]], np.float16)}
    folder.write_arrays("A <b> #0", found)
    saved = panels(monkeypatch)
    png_size(*drawn("diagrams", folder))
    red, blue = saved[0].axes[0].collections
    assert (len(red.get_offsets()), len(blue.get_offsets())) == (2, 1)
    assert saved[0].axes[0].texts[0].get_text() == "33 % below"


def keep_embeddings(folder: RunFolder) -> None:
    """Embeddings of the digits in which every image is by its digit."""
    dataset = data.load("digits", 8)
    for row in ("A <b>", "EPS + A <b>"):
        arrays = {}
        for name, split in {"train": dataset.train, **dataset.tests}.items():
            noise = np.random.default_rng(0).normal(0, 0.1, (len(split), 2))
            digits = split.labels["digit"].numpy()[:, None]
            arrays[f"embeddings {name}"] = (np.hstack([digits, digits % 3]) + noise).astype(np.float16)
        folder.write_arrays(f"{row} #0", arrays)


def test_pictures_of_embeddings(run, monkeypatch):
    folder = run(small(), FINALS)
    keep_embeddings(folder)
    monkeypatch.setattr(figures, "TSNE_POINTS", 40)
    saved = panels(monkeypatch)
    for name in ("plane", "tsne", "strips"):
        png_size(*drawn(name, folder))
    assert [panel.get_title() for panel in saved[0].axes][:2] == [
        "A <b>: train digits",
        "EPS + A <b>: train digits",
    ]
    legend = saved[0].axes[1].get_legend()
    assert [text.get_text() for text in legend.texts] == ["0", "1", "2", "3", "4", "5"]
    mosaic = saved[2].axes[0].images[0].get_array()
    assert {tuple(colour) for colour in mosaic[3, 3::8]} == {(0, 0, 0), (255, 255, 255), (0x2F, 0x85, 0x5A)}


def test_figure_without_its_data_set_says_so(run, tmp_path):
    settings = Settings(**{**vars(BASE), "dataset": "mnist", "size": 28})
    folder = run(small(desk=settings, at_paper=settings, figures=("plane",)), FINALS)
    folder.write_arrays("A <b> #0", {"embeddings test digits": np.zeros((3, 2), np.float16)})
    with pytest.raises(NoFigureError, match="the data set mnist is not here"):
        figures.draw("plane", Drawing(tables.outcome_of(folder), folder.path, [tmp_path]))
    assert "Not drawn: the data set mnist is not here." in write_report(folder, [tmp_path]).read_text()


def test_every_figure_that_an_experiment_names_is_there():
    named = {name for experiment in EXPERIMENTS.values() for name in experiment.figures}
    assert named <= set(figures.FIGURES)
    assert set(figures.FIGURES) == set(figures.CAPTIONS)


# All runs on one page ---------------------------------------------------------------------------------------


def test_published_page_and_files(run, tmp_path):
    folder = run(small(figures=("recall_by_epoch", "strips")), FINALS)
    keep_embeddings(folder)
    target = tmp_path / "published"
    stale = target / "results" / "small" / "stale.png"
    stale.parent.mkdir(parents=True)
    stale.touch()
    text = publish([folder], target).read_text()
    assert "| EPS is above | reproduced | A &lt;b&gt; 42.0 ± 2.8 → EPS" in text
    assert "Run at desk scale." in text
    assert "[the run's page](results/small/report.md)" in text
    place = target / "results" / "small"
    text = (place / "report.md").read_text()
    assert "| A &lt;b&gt; | 42.0 ± 2.8 | 40.0 |" in text
    assert "![strips](strips.png)" in text  # digits may be shown
    assert "takes 2 % of a training step" in text
    assert {file.name for file in place.iterdir()} == {"report.md", "numbers.json", "strips.png"}
    numbers = json.loads((place / "numbers.json").read_text())
    row = numbers["rows"]["A <b>"]
    assert row["measures"][RECALL] == {"mean": 42.0, "std": 2.82843, "seeds": 2}
    assert row["settings"] == {"dim": 2, "positive": "hard", "margin": 0.1}
    assert row["milliseconds"] == {"network": 98.0, "ours": 2.0, "naive": 42.0}
    assert numbers["settings"]["epochs"] == 2
    assert numbers["unfinished"] == []
    assert not any(str(tmp_path) in file.read_text() for file in place.iterdir() if file.suffix != ".png")


@pytest.mark.parametrize("name", ["cub", "cars"])
def test_images_that_may_not_be_shared_are_not_published(run, tmp_path, monkeypatch, name):
    settings = Settings(**{**vars(BASE), "dataset": name})
    folder = run(small(desk=settings, at_paper=settings, figures=("strips",)), FINALS)
    keep_embeddings(folder)
    digits = data.load("digits", 8)
    closed = data.Dataset(**{**vars(digits), "shareable": False})
    monkeypatch.setattr(data, "load", lambda *_: closed)
    target = tmp_path / "published"
    publish([folder], target)
    assert (folder.path / "strips.png").exists()
    assert not list(target.rglob("*.png"))
    assert not any("strips.png" in page.read_text() for page in target.rglob("*.md"))
    assert "strips.png" in write_report(folder).read_text()


def test_two_runs_of_an_experiment_go_by_their_folders(run, tmp_path):
    first = run(small(), FINALS)
    second = RunFolder(tmp_path / "again")
    with second.begun(config("small", changes={"dim": 3})):
        second.write_records(FINALS[:1])
    target = tmp_path / "published"
    publish([first, second], target)
    assert {file.name for file in (target / "results").iterdir()} == {"small-desk", "again"}
    numbers = json.loads((target / "results" / "again" / "numbers.json").read_text())
    assert numbers["unfinished"][:2] == ["A <b> #1", "EPS + A <b> #0"]
    with pytest.raises(ValueError, match="under one name: small-desk"):
        publish([first, first], target)


def test_runs_that_were_published_before_stay(run, tmp_path):
    target = tmp_path / "published"
    publish([run(small(), FINALS)], target)
    (target / "results" / "small").rename(target / "results" / "earlier")
    other = RunFolder(tmp_path / "again")
    with other.begun(config("small", changes={"dim": 3})):
        other.write_records(FINALS[:1])
    text = publish([other], target).read_text()
    assert text.index("## earlier") < text.index("## small")
    assert "Run at desk scale; changed: dim 3; unfinished." in text


# Folders that can't be written to ---------------------------------------------------------------------------

_MAY_OVERRIDE = 1 << 1  # CAP_DAC_OVERRIDE, by which root writes to what nobody may write to


@contextmanager
def without_override() -> Iterator[None]:
    """Permissions hold for root, too. (Another user could not read the tests' own files everywhere.)"""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of capabilities, of this process
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, 32 capabilities at a time
    if libc.capget(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    effective = sets[0]

    def use(capabilities: int) -> None:
        sets[0] = capabilities
        if libc.capset(header, sets) != 0:
            raise OSError(ctypes.get_errno(), "capset")

    use(effective & ~_MAY_OVERRIDE)
    try:
        yield
    finally:
        use(effective)


@contextmanager
def read_only(*folders: Path) -> Iterator[None]:
    """Nothing can be written to the folders."""
    for folder in folders:
        folder.chmod(0o555)
    try:
        with without_override():
            yield
    finally:
        for folder in folders:
            folder.chmod(0o755)


def refusal(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    """What `python -m train_ref report` ends with."""
    monkeypatch.setattr("sys.argv", ["train_ref", "report", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert isinstance(ended.value.code, str)
    assert "\n" not in ended.value.code
    return ended.value.code


def test_a_report_in_a_read_only_folder(run, monkeypatch):
    path = run(small(), FINALS).path
    write_report(RunFolder(path))
    before = (path / "report.md").read_text()
    with read_only(path):
        said = refusal(monkeypatch, path)
    assert said == f"{path / 'report.md'} can't be written to: Permission denied"
    assert (path / "report.md").read_text() == before


def test_publishing_in_a_read_only_folder(run, tmp_path, monkeypatch):
    path = run(small(), FINALS).path
    target = tmp_path / "published"
    (target / "results" / "small").mkdir(parents=True)
    (target / "results" / "small" / "old.png").touch()
    with read_only(target, target / "results", target / "results" / "small"):
        said = refusal(monkeypatch, path, "--publish", target)
    assert said == f"{target / 'results' / 'small' / 'old.png'}: Permission denied"


def test_a_report_where_a_folder_is_in_its_place(run, monkeypatch):
    folder = run(small(), FINALS)
    (folder.path / "report.md").mkdir()
    said = refusal(monkeypatch, folder.path)
    assert said == f"{folder.path / 'report.md'} can't be written to: Is a directory"
