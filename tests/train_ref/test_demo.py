"""The demo, from end to end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.train_ref.support import (
    NAME,
    interrupt_at,
    rewrite,
    tree,
)
from train_ref import demo
from train_ref.folder import RunFolder

pytest.importorskip("sklearn")
pytestmark = pytest.mark.usefixtures("training_alone")


def test_demo_end_to_end(monkeypatch, capsys, tmp_path):
    arguments = [
        "--steps",
        "2",
        "--epochs",
        "1",
        "--seeds",
        "2",
        "--no-speed-table",
        "--output",
        str(tmp_path),
    ]
    monkeypatch.setattr("sys.argv", ["demo", *arguments])
    demo.main()
    printed = capsys.readouterr()
    table = [line for line in printed.out.splitlines() if line.count("±") == 3]
    assert len(table) == 4
    assert "42.0   87.5   96.6" in table[0]
    assert "42.3   83.9   93.6" in table[3]
    assert printed.out.count("reproduced, on digits") == 2
    report = tmp_path / NAME / "report.md"
    assert str(report) in printed.out
    assert report.exists()
    assert any(file.stat().st_size > 10_000 for file in (tmp_path / NAME).rglob("*.png"))


def demo_arguments(out: Path, *more: object) -> list[str]:
    return ["demo", "--no-speed-table", "--output", str(out), *map(str, more)]


def test_demo_makes_room_for_itself_alone(monkeypatch, tmp_path, unbroken, untrained):
    """It does away with the run that an earlier demo left, and with nothing else."""
    for changes, begins in (({"dataset": "digits", "size": 8}, True), ({"epochs": 3}, False)):
        path = Path(shutil.copytree(unbroken, tmp_path / str(begins) / NAME))
        rewrite(path / "config.json", changes=changes)
        (path / "notes.txt").write_text("nice")
        before = tree(path)
        monkeypatch.setattr("sys.argv", demo_arguments(path.parent))
        with pytest.raises(AssertionError if begins else SystemExit):
            demo.main()
        assert tree(path) == ({"notes.txt": b"nice"} if begins else before)


def test_demo_leaves_a_run_that_is_under_way(monkeypatch, capsys, tmp_path, unbroken, untrained):
    path = Path(shutil.copytree(unbroken, tmp_path / NAME))
    rewrite(path / "config.json", changes={"dataset": "digits", "size": 8})
    monkeypatch.setattr("sys.argv", demo_arguments(tmp_path))
    with RunFolder(path).locked():
        before = tree(path)
        with pytest.raises(SystemExit, match="is in use by process"):
            demo.main()
        assert tree(path) == before


def test_demo_says_what_is_wrong(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", demo_arguments(tmp_path / "out", "--seeds", 0))
    with pytest.raises(SystemExit, match="--seeds 0: must be from 1"):
        demo.main()
    assert not list(tmp_path.iterdir())


def test_demo_interrupted(monkeypatch, capsys, tmp_path):
    interrupt_at(monkeypatch, 1)
    monkeypatch.setattr("sys.argv", demo_arguments(tmp_path))
    with pytest.raises(SystemExit) as ended:
        demo.main()
    assert ended.value.code == 130
    assert f"python -m train_ref resume {tmp_path / NAME}" in capsys.readouterr().err
