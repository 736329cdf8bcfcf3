"""The bench compares what it says it compares: fair baselines, right arithmetic, every row of the table."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest
import torch

import tripletops as T
from bench import __main__ as command
from bench import measure, peers, record, registry
from bench.registry import CORE, Row, Shape, Target
from bench.speed_table import speed_table
from tripletops import reference

ROWS = {row.name: row for row in CORE}


def environment(isa: str = "avx2") -> dict[str, str]:
    return measure.environment() | {"isa": isa}


def test_naive_batch_hard_is_batch_hard():
    emb, labels = registry.embeddings(23, 5), registry.sorted_labels(23, 4)
    found, expected = peers.naive_batch_hard(emb, labels), reference.triplet_loss(emb, labels)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, emb), torch.autograd.grad(expected, emb))


def test_metric_learning_batch_hard_is_batch_hard():
    loss = peers.metric_learning_batch_hard()
    if loss is None:
        pytest.skip("pytorch-metric-learning is not installed")
    emb, labels = registry.embeddings(24, 5), registry.sorted_labels(24, 4)
    torch.testing.assert_close(loss(emb, labels), reference.triplet_loss(emb, labels))


def test_products_agree():
    rows, columns, out = torch.randn(3, 2), torch.randn(5, 2), torch.empty(3, 5)
    assert peers.matrix_product(rows, columns).equal(rows @ columns.T)
    assert peers.matrix_product_into(out, rows, columns) is out
    assert out.equal(rows @ columns.T)


def test_contenders_take_turns():
    order: list[str] = []
    contenders = {name: (lambda name=name: order.append(name)) for name in "ab"}
    samples = measure.take_turns(contenders, rounds=3)
    assert "".join(order) == "ab" + "ab" * 3
    assert {name: len(values) for name, values in samples.items()} == {"a": 3, "b": 3}


def test_a_block_is_timed_per_call(monkeypatch):
    clock = 0.0

    def call() -> None:
        nonlocal clock
        clock += 0.5

    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock)
    assert measure.take_turns({"a": call}, rounds=2, calls=20) == {"a": [0.5, 0.5]}


def test_ratio_is_the_median_of_the_processes_ratios():
    # Medians within a process: 4/2, 9/3, 10/1. The processes' ratios 2, 3, 10 have the median 3.
    processes = [
        {"x": [1.0, 4.0, 50.0], "y": [2.0, 2.0, 7.0]},
        {"x": [9.0], "y": [3.0]},
        {"x": [10.0], "y": [1.0]},
    ]
    assert measure.ratio(processes, "x", "y") == 3


def test_percentile():
    assert measure.percentile([4.0, 1.0, 3.0, 2.0, 5.0], 50) == 3
    assert measure.percentile([4.0, 1.0, 3.0, 2.0, 5.0], 75) == 4


@pytest.mark.parametrize(
    ("target", "isa", "text", "met", "missed"),
    [
        (Target(0.5, avx512=0.3), "avx2", "≤ 0.5", 0.5, 0.51),
        (Target(0.5, avx512=0.3), "avx512", "≤ 0.3", 0.3, 0.31),
        (Target(1.1), "avx512", "≤ 1.1", 1.1, 1.2),
        (Target(30, at_least=True), "avx2", "≥ 30", 30, 29.9),
    ],
)
def test_target(target, isa, text, met, missed):
    assert target.text(isa) == text
    assert target.met(met, isa)
    assert not target.met(missed, isa)


def test_the_table_is_whole():
    bounds = {name: (row.target.avx512, row.target.bound) for name, row in ROWS.items()}
    assert len(bounds) == len(CORE)
    assert bounds == {
        "mm-d128": (0.3, 0.5),
        "mm-d512": (0.5, 0.7),
        "naive-n8192": (None, 30),
        "naive-n128": (None, 4),
        **{f"{rule}-k4": (None, 1.15) for rule in ("ephn", "epshn", "epen")},
        **{f"{rule}-k1024": (None, 1.5) for rule in ("ephn", "epshn", "epen")},
        **dict.fromkeys(("shuffled", "equal", "bfloat16"), (None, 1.1)),
        "memory-m65536": (None, 0.8),
        "peak-memory": (None, 6),
        **{f"double-n{n}": (None, 4.2) for n in (4096, 8192, 16384)},
    }
    assert {row.name for row in CORE if row.target.at_least} == {"naive-n8192", "naive-n128"}


@pytest.mark.parametrize("row", CORE, ids=lambda row: row.name)
def test_every_contender_runs(row: Row):
    shape = Shape(n=16, d=8, k=min(row.shape.k, 8), m=32 if row.shape.m else 0)
    contenders = row.contenders(shape)
    for call in contenders.values():
        call()
    if row.unit == "s":
        assert set(contenders) == {row.numerator, row.denominator} | ({row.beside} if row.beside else set())
    assert "{" not in row.title(shape)


def test_memory_does_not_grow_with_the_square():
    row = ROWS["peak-memory"]
    processes = row.measure(Shape(n=8192), rounds=1)
    assert 0 < row.value(processes) <= row.target.bound  # a matrix of N×N would be 64 times emb


def test_check_refuses_a_wrong_loss(monkeypatch):
    registry.check()
    right = T.triplet_loss
    monkeypatch.setattr(T, "triplet_loss", lambda *args, **kwargs: 1.01 * right(*args, **kwargs))
    with pytest.raises(AssertionError):
        registry.check()


def test_record(tmp_path):
    path = tmp_path / "new" / "core.csv"
    row = ROWS["mm-d128"]
    processes = [{"ours": [1.0, 2.0, 3.0], "torch.mm": [5.0, 5.0, 5.0], "torch.mm out=": [4.0, 4.0, 4.0]}]
    record.append(path, "now", row, row.shape, processes, environment("avx2"))
    record.append(path, "later", row, replace(row.shape, n=64), processes, environment("avx512"))
    with path.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [line["contender"] for line in lines] == ["ours", "torch.mm", "torch.mm out="] * 2
    first, other, again = lines[0], lines[1], lines[3]
    assert [first[f"p{percent}"] for percent in (10, 25, 50, 75, 90)] == ["1.2", "1.5", "2", "2.5", "2.8"]
    assert (first["ratio"], first["target"], first["met"], first["n"]) == ("0.4", "≤ 0.5", "yes", "8192")
    assert (other["ratio"], other["target"], other["met"]) == ("", "", "")
    assert (again["ratio"], again["target"], again["met"], again["n"]) == ("0.4", "", "", "64")
    assert first["torch"] == str(torch.__version__)


def test_command_prints_and_records(monkeypatch, capsys, tmp_path, threads):
    path = tmp_path / "quick.csv"
    monkeypatch.setattr("sys.argv", ["bench", "core", "--quick", "--rows", "bfloat16", "--csv", str(path)])
    command.main()
    printed = capsys.readouterr().out
    assert "NOT the table" in printed
    assert "bfloat16 ÷ float32, N=1024" in printed
    assert path.read_text(encoding="utf-8").count("\n") == 3


def test_command_says_what_is_missed(monkeypatch, capsys, tmp_path, threads):
    rows = [
        replace(ROWS["shuffled"], shape=Shape(1024), target=Target(-1), rounds=1),
        replace(ROWS["equal"], shape=Shape(1024), target=Target(1e9), rounds=1),
    ]
    monkeypatch.setattr(command, "CORE", rows)
    monkeypatch.setattr("sys.argv", ["bench", "core", "--csv", str(tmp_path / "core.csv")])
    command.main()
    assert "1 of 2 targets met; missed: shuffled" in capsys.readouterr().out


def test_speed_table(capsys, threads):
    speed_table({8: 1, 16: 2})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert [int(line.split()[0]) for line in lines[2:]] == [8, 16]
