"""Files of a run that are damaged or of another version are named, and never trained on."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch

from tests.train_ref.support import (
    NAME,
    RUN,
    assert_same_run,
    command,
    fail_in_training,
    interrupt_at,
    line,
    rewrite,
    tree,
)
from train_ref import __main__ as command_line
from train_ref.folder import FolderError, RunFolder, write_whole
from train_ref.report.page import write_report

pytest.importorskip("sklearn")
pytestmark = pytest.mark.usefixtures("training_alone")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory, training_alone) -> Path:
    """The folder of a run with a checkpoint, in its second epoch."""
    out = tmp_path_factory.mktemp("interrupted")
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, 6)
        with pytest.raises(SystemExit):
            command(*RUN, "--out", out)
    return out / NAME


@pytest.fixture
def copy(tmp_path, interrupted) -> Path:
    return Path(shutil.copytree(interrupted, tmp_path / NAME))


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def plain(content: bytes) -> bytes:
    """A checkpoint as it was before there were digests."""
    return content.partition(b"\n")[2]


DAMAGES = {
    "empty": lambda content: b"",
    "junk": lambda content: b"junk",
    "truncated": lambda content: content[: len(content) // 2],
    "in its digest": lambda content: flipped(content, 3),
    "in its weights": lambda content: flipped(content, len(content) // 2),
    "at its end": lambda content: flipped(content, len(content) - 1),
    "longer": lambda content: content + b"x",
    "truncated, without a digest": lambda content: plain(content)[: len(content) // 2],
    "of another program": lambda content: saved({"weights": torch.zeros(2)}),
    "no checkpoint": lambda content: saved([1, 2]),
}


def saved(what: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(what, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_not_resumed_from(copy, monkeypatch, unbroken, damage):
    file = copy / "checkpoint.pt"
    file.write_bytes(damage(file.read_bytes()))
    with monkeypatch.context() as patch:
        fail_in_training(patch, AssertionError("training goes on"))
        said = line("resume", copy)
    assert said.startswith(f"{file} is damaged")
    assert "delete it, and the training that was under way begins anew" in said
    assert f"python -m train_ref resume {copy}" in said
    file.unlink()
    command("resume", copy)
    assert_same_run(copy, unbroken)


def test_a_checkpoint_without_a_digest_is_resumed_from(copy, unbroken):
    file = copy / "checkpoint.pt"
    file.write_bytes(plain(file.read_bytes()))
    assert torch.load(file, weights_only=True)["training"]["step_of_epoch"] == 2
    command("resume", copy)
    assert_same_run(copy, unbroken)


def test_a_checkpoint_of_another_network(copy, untrained):
    """As after a change of the network's definition."""
    folder = RunFolder(copy)
    checkpoint = folder.checkpoint()
    assert checkpoint is not None
    del checkpoint.training["network"]["head.bias"]
    folder.write_checkpoint(checkpoint)
    said = line("resume", copy)
    assert f"{copy / 'checkpoint.pt'} is of another version of this network: delete it" in said


@pytest.mark.parametrize("doing", ["resume", "report"])
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"colour": "red"}, "there is no setting colour in this version: go on with the one that began"),
        ({"margin": -1.0}, "--margin -1.0: must be 0 or greater"),
        ({"epochs": "two"}, "eps-even-odd has other settings in this version: go on with the one that began"),
    ],
)
def test_settings_of_another_version(copy, monkeypatch, untrained, doing, setting, said):
    monkeypatch.setattr(command_line, "write_report", write_report)
    settings = json.loads((copy / "config.json").read_text())["settings"]
    settings["Triplet"] |= setting
    rewrite(copy / "config.json", settings=settings)
    before = tree(copy)
    assert line(doing, copy).startswith(said)
    assert tree(copy) == before


@pytest.mark.parametrize("doing", ["resume", "report"])
def test_an_experiment_of_another_version(copy, monkeypatch, untrained, doing):
    monkeypatch.setattr(command_line, "write_report", write_report)
    rewrite(copy / "config.json", experiment="eps-moon")
    assert line(doing, copy).startswith("there is no experiment 'eps-moon' in this version: ")


@pytest.mark.parametrize("doing", ["resume", "report"])
@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", '{"experiment": "eps-', "is damaged"),
        ("config.json", "\x00", "is damaged"),
        ("config.json", "[]", "is not of a run: it needs backend, changes,"),
        ("config.json", '{"experiment": "eps-even-odd"}', "is not of a run: it needs backend, changes,"),
        ("metrics.jsonl", '{"cell": "Tri', "is damaged"),
    ],
)
def test_damaged_files_are_named(copy, monkeypatch, untrained, doing, file, content, said):
    monkeypatch.setattr(command_line, "write_report", write_report)
    (copy / file).write_text(content)
    assert line(doing, copy).startswith(f"{copy / file} {said}")


def test_damaged_arrays_are_named(tmp_path, monkeypatch, unbroken):
    monkeypatch.setattr(command_line, "write_report", write_report)
    path = Path(shutil.copytree(unbroken, tmp_path / NAME))
    file = next(path.joinpath("arrays").iterdir())
    file.write_bytes(file.read_bytes()[:1000])
    assert line("report", path).startswith(f"{file} is damaged: delete it")
    file.unlink()
    command("report", path)


@pytest.mark.parametrize("place", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_file_is_whole_or_the_old_one(tmp_path, monkeypatch, place, error):
    file = tmp_path / "checkpoint.pt"
    write_whole(file, b"old")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, place, fail)
    with pytest.raises(FolderError if isinstance(error, OSError) else type(error)):
        write_whole(file, b"new and longer")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]
    monkeypatch.undo()
    write_whole(file, b"new and longer")
    assert file.read_bytes() == b"new and longer"


def test_a_run_can_be_read_by_others(unbroken):
    """As far as they may read other files that are made here."""
    mask = os.umask(0)
    os.umask(mask)
    for file in (unbroken / "config.json", unbroken / "metrics.jsonl"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~mask


def test_a_name_stands_for_a_file_on_the_disk(tmp_path, monkeypatch):
    """What is renamed was brought to the disk before: in the other order a power cut leaves an empty file."""
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *names: (order.append("replace"), replace(*names)))
    write_whole(tmp_path / "file", b"content")
    assert order[:2] == ["fsync", "replace"]
