"""The bench compares what it says it compares: fair baselines, right arithmetic, every row of the table."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest
import torch

import tripletops as T
from bench import __main__ as command
from bench import core, dense, measure, peers, record, registry
from bench.batches import clusters, embeddings, equal_rows, sorted_labels, tight_clusters
from bench.registry import Row, Shape, Target
from bench.speed_table import speed_table
from tripletops import reference

CORE = {row.name: row for row in core.ROWS}
GPU = {row.name: row for row in core.GPU_ROWS}
ONLY_GPU = [row for row in core.GPU_ROWS if row.name not in CORE]
DENSE = {row.name: row for row in dense.ROWS}
TWO_CLASSES = {"memory-batch-all-2-classes", "memory-semi-hard-2-classes"}
CLOSE = {
    "equal-rows-euclidean",
    "equal-rows-cosine",
    "4-tight-clusters-euclidean",
    "4-tight-clusters-cosine",
}
OBJECTIVES = (
    "batch-all",
    "batch-all-soft-margin",
    "semi-hard",
    "multi-similarity",
    "supcon",
    "info-nce",
    "contrastive",
    "beta-margin",
)
# Inductor itself imports modules that warn of their own deprecation.
compiles = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a GPU, as long as nothing is computed there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure.info, "gpu", lambda: ("Fast GPU", "sm_90"))
    monkeypatch.setattr(measure.info, "triton_version", lambda: "3.7.1")
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def environment(isa: str = "avx2") -> dict[str, str]:
    return measure.environment() | {"isa": isa}


def test_naive_batch_hard_is_batch_hard():
    emb, labels = embeddings(23, 5), sorted_labels(23, 4)
    found, expected = peers.naive_batch_hard(emb, labels), reference.triplet_loss(emb, labels)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, emb), torch.autograd.grad(expected, emb))


def test_metric_learning_batch_hard_is_batch_hard():
    loss = peers.metric_learning_batch_hard()
    assert loss is not None
    emb, labels = embeddings(24, 5), sorted_labels(24, 4)
    torch.testing.assert_close(loss(emb, labels), reference.triplet_loss(emb, labels))


@pytest.mark.parametrize("name", dense.OTHERS)
def test_metric_learning_computes_the_same_objective(name):
    emb, labels = embeddings(24, 5), sorted_labels(24, 4)
    loss, leaves = dense.OBJECTIVES[name](emb, labels)
    registry.assert_agree(dense.OTHERS[name]()(emb, labels), loss(backend="reference"), *leaves)


def test_clusters_are_separated():
    # No hinge of batch-all is active: every negative is farther than every positive by more than the margin.
    emb, labels = clusters(1024, 128, 4), sorted_labels(1024, 4)
    distance = torch.cdist(emb.detach(), emb.detach())
    same = labels[:, None] == labels
    assert len(emb) == len(labels)
    assert distance[~same].min() > distance[same].max() + peers.MARGIN
    assert len(clusters(23, 5, 4)) == 23


def test_close_rows_are_close():
    assert equal_rows(7, 5).unique(dim=0).shape == (1, 5)
    emb = tight_clusters(512, 128, 4).detach()
    distance = torch.cdist(emb, emb)
    assert 0.7 < (distance > 1).float().mean() < 0.8
    assert not ((distance > 0.1) & (distance < 10)).any()


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


def test_a_gpu_is_waited_for(monkeypatch):
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("|"))
    measure.take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 1, 2, "cuda")
    assert "".join(order) == "aabb" + "a|aa|" + "b|bb|"
    order.clear()
    measure.take_turns({"a": lambda: order.append("a")}, 1)
    assert "".join(order) == "aa"


def test_peak_growth_of_a_gpu(monkeypatch):
    order: list[str] = []
    taken = iter([100])

    def note(name: str, result: object = None):
        return lambda: order.append(name) or result

    monkeypatch.setattr(torch.cuda, "synchronize", note("wait"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", note("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: order.append("before") or next(taken))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", note("peak", 175))
    assert measure.peak_growth_of_gpu(note("call")) == 75
    assert order == ["wait", "reset", "before", "call", "wait", "peak"]


def test_a_row_is_measured_where_its_shape_says(monkeypatch):
    taken = []

    def take_turns(contenders, rounds, calls, device):
        taken.append((contenders, calls, device))
        return {}

    monkeypatch.setattr(registry, "take_turns", take_turns)
    row = Row("row", "N={n}", Target(1), Shape(1024), lambda shape: shape.device, "a", "b")
    row.measure()
    row.on("cuda").measure()
    assert taken == [("cpu", 1, "cpu"), ("cuda", registry.CALLS_IN_A_BLOCK, "cuda")]
    monkeypatch.setattr(registry, "in_fresh_process", lambda function, *given: function(*given))
    monkeypatch.setattr(registry, "peak_growth_of_gpu", lambda call: call())
    row = registry.memory_row("row", "", 1, Shape(8), lambda shape: {"ours": lambda: shape.n})
    assert row.on("cuda").measure()[1] == [{"growth": [8.0], "emb": [8 * 128 * 4.0]}]


def test_batches_are_where_the_shape_says(threads):
    shape = Shape(8, d=4, m=16, device="meta")
    assert {tensor.device.type for tensor in core._batch(shape)} == {"meta"}
    for row in core.ROWS:
        row.contenders(shape)  # which would fail if they mixed devices
    rows = torch.empty(3, 2, device="meta")
    assert peers.products(rows, rows)["torch.mm out="]().device.type == "meta"
    assert peers.naive_batch_hard(rows, torch.empty(3, dtype=torch.int64, device="meta")).is_meta


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
        (Target(0.5, avx512vnni=0.3), "avx2", "≤ 0.5", 0.5, 0.51),
        (Target(0.5, avx512vnni=0.3), "avx512vnni", "≤ 0.3", 0.3, 0.31),
        (Target(1.1), "avx512", "≤ 1.1", 1.1, 1.2),
        (Target(30, sign="≥"), "avx2", "≥ 30", 30, 29.9),
        (Target(0.8, sign="<"), "avx2", "< 0.8", 0.79, 0.8),
    ],
)
def test_target(target, isa, text, met, missed):
    assert target.text(isa) == text
    assert target.met(met, isa)
    assert not target.met(missed, isa)


def test_the_core_table_is_whole():
    assert len(CORE) == len(core.ROWS)
    assert {name: (row.target.avx512vnni, row.target.bound) for name, row in CORE.items()} == {
        "mm-d128": (0.12, 0.2),
        "mm-d512": (0.15, 0.25),
        "naive-n8192": (None, 30),
        **{f"naive-n{n}": (None, 6) for n in core.EVERYDAY},
        **{f"threads-n{n}": (None, 1.03) for n in core.EVERYDAY},
        **{f"{rule}-k4": (None, 1.2) for rule in ("ephn", "epshn", "epen")},
        **{f"{rule}-k1024": (None, 1.5) for rule in ("ephn", "epshn", "epen")},
        **dict.fromkeys(("shuffled", "equal", "bfloat16"), (None, 1.1)),
        "memory-m65536": (None, 0.3),
        "peak-memory": (None, 6),
        **{f"double-n{n}": (None, 4.2) for n in (4096, 8192, 16384)},
    }
    assert {name: row.target.sign for name, row in CORE.items() if row.target.sign != "≤"} == {
        "naive-n8192": "≥",
        **{f"naive-n{n}": "≥" for n in core.EVERYDAY},
    }


def test_the_gpu_table_is_whole():
    assert len(GPU) == len(core.GPU_ROWS)
    common = {row.name for row in core.COMMON_ROWS}
    assert common == {name for name in CORE if not name.startswith("threads-")}
    assert list(GPU)[: len(common)] == [row.name for row in core.COMMON_ROWS]
    assert [row.name for row in ONLY_GPU] == [
        "compile-n8192",
        "compile-n128",
        "metric-learning-n8192",
        "metric-learning-n128",
    ]
    assert all(row.target is None and row.shape.device == "cuda" for row in core.GPU_ROWS)
    assert {name: GPU[name].shape.sizes() for name in common} == {
        name: CORE[name].shape.sizes() for name in common
    }
    assert GPU["mm-d512"].quick().shape == Shape(1024, d=512, device="cuda")


def test_the_dense_table_is_whole():
    assert len(DENSE) == len(dense.ROWS)
    assert {name: row.target and (row.target.text("avx512"), row.shape.n) for name, row in DENSE.items()} == {
        "semi-hard": ("≤ 0.6", 8192),
        "batch-all": ("≤ 1.1", 8192),
        "batch-all-k1024": ("≤ 5", 8192),
        "batch-all-soft-margin": ("≤ 2", 8192),
        "multi-similarity": ("≤ 1.2", 8192),
        "supcon": ("≤ 1.2", 8192),
        "info-nce": ("≤ 2", 8192),
        "beta-margin": ("≤ 1.2", 8192),
        "clusters": ("< 0.8", 8192),
        **{f"memory-{objective}": ("≤ 10", 32768) for objective in OBJECTIVES},
        **dict.fromkeys(TWO_CLASSES, ("≤ 24", 8192)),
        "metric-learning-batch-all": ("≥ 50", 2048),
        **dict.fromkeys(CLOSE),
        **dict.fromkeys(("contrastive", "metric-learning-multi-similarity")),
    }
    assert all(DENSE[name].shape == Shape(4096) for name in CLOSE)
    assert {name for name, row in DENSE.items() if row.shape.d != 128} == TWO_CLASSES
    assert all(DENSE[name].shape == Shape(8192, d=32, k=4096) for name in TWO_CLASSES)
    others = {name for name, row in DENSE.items() if row.shape.k != 4} - TWO_CLASSES
    assert others == {"batch-all-k1024"}


def test_a_quick_row_is_small_and_promises_nothing():
    quick = DENSE["metric-learning-batch-all"].quick()
    assert (quick.shape, quick.rounds) == (Shape(1024), 3)
    assert quick.target is None
    assert quick.bounded_by is None
    assert CORE["naive-n128"].quick().shape == Shape(128)
    assert CORE["memory-m65536"].quick().shape == Shape(256, m=8192)
    assert DENSE["batch-all-k1024"].quick().shape == Shape(1024, k=128)


@pytest.mark.parametrize(
    "row", [*core.ROWS, *dense.ROWS, GPU["metric-learning-n128"]], ids=lambda row: row.name
)
def test_every_contender_runs(row: Row):
    shape = Shape(n=16, d=8, k=min(row.shape.k, 8), m=32 if row.shape.m else 0)
    contenders = row.contenders(shape)
    for call in contenders.values():
        call()
    if row.unit == "s":
        assert set(contenders) == {row.numerator, row.denominator} | ({row.beside} if row.beside else set())
    assert "{" not in row.title(shape)


@pytest.mark.parametrize(
    "row", [row for row in (*core.ROWS, *dense.ROWS) if row.unit == "bytes"], ids=lambda row: row.name
)
def test_memory_does_not_grow_with_the_square(row: Row):
    row = replace(row, shape=Shape(8192))
    shape, processes = row.measure()
    assert shape == row.shape
    assert 0 < row.value(processes) <= row.target.bound  # a matrix of N×N would be 64 times emb


def hungry(shape: Shape) -> dict[str, measure.Call]:
    """A contender that fits into the free memory at N=512, and does not at N=1024."""
    size = measure.free_memory() // 512 * shape.n * 9 // 10
    return {"hungry": lambda: torch.empty(size, dtype=torch.uint8), "ours": lambda: None}


def test_a_row_finds_the_largest_size_that_fits(capsys):
    row = Row("row", "N={n}", None, Shape(256), hungry, "hungry", "ours", rounds=2, bounded_by="hungry")
    shape, processes = row.measure()
    assert shape.n == 512
    assert [len(samples["hungry"]) for samples in processes] == [2]
    assert "hungry does not survive N=1024: " in capsys.readouterr().out


def test_what_cannot_fit_is_not_tried(monkeypatch, capsys):
    monkeypatch.setattr(registry, "free_memory", lambda: 2**32)
    monkeypatch.setattr(registry, "in_fresh_process", lambda function, contenders, name, shape: shape.n**2)
    # N = 2**16 takes all of the free memory; twice the N would take four times as much.
    assert registry.largest(hungry, "hungry", Shape(1024)).n == 2**16
    assert "hungry takes 4.0 GiB at N=65536" in capsys.readouterr().out


def test_core_check_refuses_a_wrong_loss(monkeypatch):
    core.check()
    right = T.triplet_loss
    monkeypatch.setattr(T, "triplet_loss", lambda *args, **kwargs: 1.01 * right(*args, **kwargs))
    with pytest.raises(AssertionError):
        core.check()


@compiles
def test_peers_check(monkeypatch):
    core.check_peers()
    right = peers.naive_batch_hard
    monkeypatch.setattr(peers, "naive_batch_hard", lambda *given: 1.01 * right(*given))
    with pytest.raises(AssertionError):
        core.check_peers()


def test_a_missing_peer_is_named(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(core.PEERS, "metric-learning", ("the peer", peers.metric_learning_batch_hard))
    with pytest.raises(AssertionError, match="the peer is not installed"):
        GPU["metric-learning-n128"].contenders(Shape(8))


def test_dense_check_passes():
    dense.check()


@pytest.mark.parametrize("name", dense.OBJECTIVES)
def test_dense_check_refuses_a_wrong_loss(monkeypatch, name):
    right = dense.OBJECTIVES[name]

    def wrong(emb: torch.Tensor, labels: torch.Tensor) -> dense.BatchLoss:
        loss, leaves = right(emb, labels)
        factor = {None: 1.01, "reference": 1.0}
        return dense.BatchLoss(lambda backend=None: factor[backend] * loss(backend=backend), leaves)

    monkeypatch.setitem(dense.OBJECTIVES, name, wrong)
    with pytest.raises(AssertionError):
        dense.check()


def test_agreement_is_of_gradients_too():
    x = torch.ones(3, requires_grad=True)
    registry.assert_agree(x.sum(), x.sum(), x)
    with pytest.raises(AssertionError):
        registry.assert_agree(x.sum(), x.square().sum(), x)


def test_a_step_clears_every_gradient():
    x, y = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
    run = measure.step(lambda: 2 * x + 3 * y, x, y)
    run()
    run()
    assert (x.grad, y.grad) == (2, 3)


def test_record(tmp_path):
    path = tmp_path / "new" / "core.csv"
    row = CORE["mm-d128"]
    processes = [{"ours": [1.0, 2.0, 3.0], "torch.mm": [5.0, 5.0, 5.0], "torch.mm out=": [4.0, 4.0, 4.0]}]
    record.append(path, "now", row, row.shape, processes, environment("avx2"))
    record.append(path, "later", row.quick(), replace(row.shape, n=64), processes, environment("avx512"))
    with path.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [line["contender"] for line in lines] == ["ours", "torch.mm", "torch.mm out="] * 2
    first, other, again = lines[0], lines[1], lines[3]
    assert [first[f"p{percent}"] for percent in (10, 25, 50, 75, 90)] == ["1.2", "1.5", "2", "2.5", "2.8"]
    assert (first["ratio"], first["target"], first["met"], first["n"]) == ("0.4", "≤ 0.2", "no", "8192")
    assert (other["ratio"], other["target"], other["met"]) == ("", "", "")
    assert (again["ratio"], again["target"], again["met"], again["n"]) == ("0.4", "", "", "64")
    assert first["torch"] == str(torch.__version__)


def test_record_of_a_gpu(tmp_path, a_gpu):
    path = tmp_path / "core_cuda.csv"
    row = GPU["naive-n128"]
    record.append(path, "now", row, row.shape, [{"naive": [2.0], "ours": [1.0]}], measure.environment("cuda"))
    with path.open(encoding="utf-8") as file:
        line = next(csv.DictReader(file))
    assert (line["gpu"], line["architecture"], line["cuda"], line["triton"]) == (
        "Fast GPU",
        "sm_90",
        "13.0",
        "3.7.1",
    )
    assert (line["n"], line["ratio"], line["target"], line["met"]) == ("128", "2", "", "")


@pytest.mark.parametrize("suite", ["core", "dense", "diagnostics"])
def test_columns_are_those_of_the_results_so_far(suite):
    path = command.RESULTS / f"{suite}.csv"
    assert path.read_text(encoding="utf-8").splitlines()[0].split(",") == [
        *record.COLUMNS,
        *measure.environment(),
    ]


def test_command_without_a_gpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["bench", "core", "--device", "cuda"])
    command.main()
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"No GPU here that torch {torch.__version__} could use: nothing was measured"
    assert list(tmp_path.iterdir()) == []


def test_command_with_a_gpu(monkeypatch, capsys, tmp_path, threads, a_gpu):
    rows = [replace(GPU["bfloat16"], shape=Shape(1024), rounds=1)]  # on the CPU, after all
    monkeypatch.setitem(command.SUITES, "core", {"cuda": (rows, core.check)})
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["bench", "core", "--device", "cuda"])
    command.main()
    printed = capsys.readouterr().out
    assert "gpu Fast GPU, architecture sm_90" in printed
    assert "targets met" not in printed
    assert "Fast GPU" in (tmp_path / "core_cuda.csv").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["core", "--rows", "compile-n128"], "no such row on cpu: compile-n128"),
        (["core", "--device", "cuda", "--rows", "mm"], "no such row on cuda: mm"),
        (["core", "--device", "gpu"], "invalid choice: 'gpu'"),
        (["dense", "--device", "cuda"], "invalid choice: 'cuda'"),
    ],
)
def test_command_refuses(monkeypatch, capsys, arguments, text):
    monkeypatch.setattr("sys.argv", ["bench", *arguments])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert text in capsys.readouterr().err


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
        replace(CORE["shuffled"], shape=Shape(1024), target=Target(-1), rounds=1),
        replace(CORE["equal"], shape=Shape(1024), target=Target(1e9), rounds=1),
        replace(CORE["bfloat16"], shape=Shape(1024), target=None, rounds=1),
    ]
    monkeypatch.setitem(command.SUITES, "core", {"cpu": (rows, core.check)})
    monkeypatch.setattr("sys.argv", ["bench", "core", "--csv", str(tmp_path / "core.csv")])
    command.main()
    printed = capsys.readouterr().out
    assert "1 of 2 targets met; missed: shuffled" in printed
    (line,) = (line for line in printed.splitlines() if line.startswith("bfloat16"))
    assert "yes" not in line
    assert "NO" not in line


def test_command_measures_the_dense_table(monkeypatch, capsys, tmp_path, threads):
    path = tmp_path / "dense.csv"
    monkeypatch.setattr("sys.argv", ["bench", "dense", "--quick", "--rows", "clusters", "--csv", str(path)])
    command.main()
    assert "batch-all: separated clusters ÷ random rows, N=1024" in capsys.readouterr().out
    assert path.read_text(encoding="utf-8").count("\n") == 3


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["core"], "core.csv"),
        (["core", "--device", "cuda"], "core_cuda.csv"),
        (["dense"], "dense.csv"),
    ],
)
def test_results_go_beside_those_of_the_same_table(monkeypatch, arguments, name):
    monkeypatch.setattr("sys.argv", ["bench", *arguments])
    assert command._arguments().csv == command.RESULTS / name


def test_speed_table(capsys, threads):
    medians = speed_table({8: 1, 16: 2})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert [int(line.split()[0]) for line in lines[2:]] == list(medians) == [8, 16]
    assert all(seconds > 0 for median in medians.values() for seconds in median.values())
