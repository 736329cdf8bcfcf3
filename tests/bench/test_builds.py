"""Two source trees are compared by calls that both make alike: same batches, fair turns, honest counts."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tripletops
from bench import __main__ as command
from bench import bits, builds, core, dense, random_calls, registry, workers
from bench.random_calls import Case, Option
from bench.registry import Row
from bench.workers import HERE, Worker

FUNCTIONS = random_calls.functions()


class Scripted:
    """A worker that answers what it was told to."""

    def __init__(self, *answers: object) -> None:
        self.answers, self.questions = iter(answers), []

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def send(self, question: object) -> None:
        self.questions.append(question)

    def receive(self) -> object:
        return next(self.answers)

    def ask(self, question: object) -> object:
        self.send(question)
        return self.receive()


def answer(question: object) -> object:
    """What `Worker(…, __name__)` says: the question, and where it has its modules from."""
    return [question, tripletops.__file__, builds.__file__]


# --- workers


@pytest.fixture
def other_tree(tmp_path: Path) -> Path:
    """A tree whose tripletops has no function at all, and prints while it is imported."""
    package = tmp_path / "tripletops"
    package.mkdir()
    (package / "__init__.py").write_text("print('hello')\n__all__ = []\n")
    return tmp_path


def test_a_worker_has_the_library_of_its_tree_and_the_benchmarks_of_this_one():
    with Worker(HERE, __name__) as worker:
        assert worker.ask({"a": [1]}) == [
            {"a": [1]},
            str(HERE / "tripletops" / "__init__.py"),
            builds.__file__,
        ]
    assert worker.process.poll() is not None


def test_what_a_library_prints_is_no_answer(other_tree, monkeypatch):
    monkeypatch.setattr(workers, "HERE", other_tree / "here")
    (other_tree / "here" / "bench").mkdir(parents=True)
    (other_tree / "here" / "bench" / "__init__.py").touch()
    (other_tree / "here" / "bench" / "workers.py").write_text((HERE / "bench" / "workers.py").read_text())
    (other_tree / "here" / "bench" / "echo.py").write_text(
        "import tripletops\nanswer = lambda q: tripletops.__file__\n"
    )
    with Worker(other_tree, "bench.echo") as worker:
        assert worker.ask("?") == str(other_tree / "tripletops" / "__init__.py")


def test_a_worker_that_ended_is_named(tmp_path):
    with (
        Worker(tmp_path, "bench.no_such_module") as worker,
        pytest.raises(RuntimeError, match=f"{tmp_path} ended"),
    ):
        worker.receive()


# --- random calls


def test_functions_are_those_that_take_a_batch():
    public = {name for name in tripletops.__all__ if name.endswith("_loss")} | {"mine"}
    assert set(FUNCTIONS) == public


def test_options_are_those_of_the_signature():
    options = {option.name: option for option in FUNCTIONS["triplet_loss"]}
    assert set(options) >= {"positive", "negative", "loss", "margin", "distance", "reduction"}
    assert not set(options) & set(random_calls.NOT_OPTIONS)
    assert options["reduction"] == Option(
        "reduction", "word", ("mean", "mean_nonzero", "sum", "none"), 0.0, False
    )
    assert {"hard", "semihard", "distance"} <= set(options["negative"].words)
    assert options["distance"].none
    assert options["margin"] == Option("margin", "number", (), 0.2, False)
    by_name = {option.name: option for option in FUNCTIONS["beta_margin_loss"]}
    assert by_name["beta"].kind == "learned"
    assert {option.name: option.kind for option in FUNCTIONS["batch_all_loss"]}["return_active"] == "flag"
    assert all(option.words for options in FUNCTIONS.values() for option in options if option.kind == "word")


def test_a_case_can_be_repeated():
    one, other = (random_calls.case_of("triplet_loss", 5, FUNCTIONS["triplet_loss"]) for _ in range(2))
    assert one == other
    assert one == next(
        itertools.islice(random_calls.cases("triplet_loss", FUNCTIONS["triplet_loss"]), 5, None)
    )
    first, second = random_calls.arguments(one), random_calls.arguments(other)
    assert first.summary == second.summary
    assert bits.digest(first.positional[0]) == bits.digest(second.positional[0])
    following = random_calls.case_of("triplet_loss", 6, FUNCTIONS["triplet_loss"])
    assert bits.digest(random_calls.arguments(following).positional[0]) != bits.digest(first.positional[0])


def test_the_batches_have_all_there_is():
    made = [random_calls.arguments(Case("triplet_loss", number, {})) for number in range(400)]
    embeddings = [arguments.positional[0] for arguments in made]
    assert {str(emb.dtype).removeprefix("torch.") for emb in embeddings} == set(random_calls.DTYPES)
    assert {arguments.summary.split()[2].strip(",") for arguments in made} == set(random_calls.KINDS)
    assert {len(emb) for emb in embeddings} >= {0, 1, 1200}
    assert max(emb.shape[1] for emb in embeddings) == 70
    assert any(not emb.is_contiguous() for emb in embeddings)
    assert any(not emb.isfinite().all() for emb in embeddings)
    keywords = [set(arguments.keywords) for arguments in made]
    assert set().union(*keywords) == {
        "ref_emb",
        "ref_labels",
        "self_index",
        "ignore_label",
        "seed",
        "generator",
    }
    assert any("ref_emb" in arguments.leaves for arguments in made)
    assert any("ref_emb" not in arguments.leaves and "ref_emb" in arguments.keywords for arguments in made)
    for arguments in made:
        if "self_index" in arguments.keywords and len(arguments.positional[0]):
            inside = (index := arguments.keywords["self_index"]) >= 0
            found = arguments.keywords["ref_emb"][index[inside]]
            assert torch.equal(found.nan_to_num(), arguments.positional[0][inside].nan_to_num())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_most_calls_run(function):
    results = []
    for case in itertools.islice(random_calls.cases(function, FUNCTIONS[function]), 40):
        try:
            results.append(random_calls.run(case))
        except ValueError:  # words that do not go together
            continue
    assert len(results) >= 10
    names = set().union(*results)
    if function == "mine":
        assert names == {"anchor", "positive", "negative", "d_ap", "d_an"}
    else:
        assert names >= {"loss", "gradient of emb", "gradient of ref_emb"}
        assert any(result["gradient of emb"].count_nonzero() for result in results)
    assert ("gradient of beta" in names) == (function == "beta_margin_loss")
    assert ("active" in names) == (function == "batch_all_loss")


# --- bits


def test_a_digest_is_of_type_shape_and_bits():
    zeros = torch.zeros(2, 3)
    others = [-zeros, torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.int32), zeros + 1e-45, zeros[:1]]
    digests = {bits.digest(tensor) for tensor in [zeros, *others]}
    assert len(digests) == 6
    assert bits.digest(zeros) == bits.digest(torch.zeros(3, 2).T)
    assert len(bits.digest(torch.tensor(1.0))) == len(bits.digest(torch.zeros(0, 3))) == 64


def result(**values: list[float]) -> bits.Answer:
    digests = {
        name: bits.digest(torch.tensor(numbers, dtype=torch.float64)) for name, numbers in values.items()
    }
    return {"digests": digests, "values": values}


UNKNOWN = {"error": "ValueError", "message": "loss='sct' is not one of 'margin'"}
REFUSED = {"error": "ValueError", "message": "loss='first_order' is defined on the cosine similarity"}
FINE = result(loss=[1.0])


@pytest.mark.parametrize(
    ("old", "new", "counts", "what"),
    [
        (FINE, FINE, (1, 0, 0, 0), None),
        (UNKNOWN, FINE, (0, 1, 0, 0), None),
        (UNKNOWN, REFUSED, (0, 0, 1, 0), None),
        (REFUSED, REFUSED, (0, 0, 1, 0), None),
        (REFUSED, FINE, (0, 0, 0, 1), "ValueError: loss='first_order' is .+ (old), a result (new)"),
        (FINE, REFUSED, (0, 0, 0, 1), "a result (old), ValueError: loss='first_order' is .+ (new)"),
        (REFUSED, REFUSED | {"error": "TypeError"}, (0, 0, 0, 1), ".+ (old), TypeError: .+ (new)"),
        (FINE, result(loss=[1.5]), (0, 0, 0, 1), "loss (1 of 1 numbers, by up to 0.5, the largest being 1)"),
        (FINE, result(loss=[math.nan]), (0, 0, 0, 1), "loss (1 of 1 numbers, by up to nan, .+)"),
        (result(loss=[0.0]), result(loss=[-0.0]), (0, 0, 0, 1), "loss (1 of 1 numbers, by up to 0, .+)"),
        (
            FINE,
            FINE | {"digests": FINE["digests"] | {"active": ""}},
            (0, 0, 0, 1),
            "active (its type or shape)",
        ),
        (result(a=[1.0], b=[2.0, 4.0]), result(a=[1.0], b=[2.0]), (0, 0, 0, 1), "b (2 numbers, then 1)"),
    ],
)
def test_what_comes_of_a_call(old, new, counts, what):
    tally = bits.Tally()
    tally.add(Case("mine", 0, {}), old, new)
    assert (tally.same, tally.only_new, tally.refused, len(tally.different)) == counts
    assert tally.made == 1
    assert tally.compared == counts[0] + counts[3]
    if what is not None:
        pattern = what.replace("(", r"\(").replace(")", r"\)")
        assert re.fullmatch(pattern, tally.different[0][1]), tally.different[0][1]


def test_without_values_a_difference_names_the_results():
    assert (
        bits.difference({"digests": {"a": "1", "b": "2"}}, {"digests": {"a": "1", "b": "3", "c": "4"}})
        == "b, c"
    )


def test_options_of_both_trees_with_the_words_of_the_new():
    old = {"mine": [["positive", "word", ["hard"], 0.0, False], ["gone", "flag", [], 0.0, False]], "gone": []}
    new = {
        "mine": [["positive", "word", ["hard", "easy"], 0.0, False], ["offset", "number", [], 0.0, False]],
        "fresh": [],
    }
    shared = bits.shared_functions(Scripted(old), Scripted(new))
    assert shared == {"mine": [Option("positive", "word", ["hard", "easy"], 0.0, False)]}


def test_calls_are_made_until_enough_are_compared():
    old = Scripted(UNKNOWN, REFUSED, FINE, FINE, UNKNOWN, FINE)
    new = Scripted(FINE, REFUSED, FINE, result(loss=[2.0]), FINE, FINE)
    tally = bits.compare(old, new, "mine", FUNCTIONS["mine"], 3)
    assert (tally.same, tally.only_new, tally.refused) == (2, 2, 1)
    assert [case.number for case, _ in tally.different] == [3]
    assert old.questions == new.questions
    assert len(old.questions) == 6


def test_calls_that_no_tree_takes_come_to_an_end():
    endless = [Scripted(*[REFUSED] * 100) for _ in range(2)]
    tally = bits.compare(*endless, "mine", FUNCTIONS["mine"], 4)
    assert (tally.compared, tally.refused) == (0, 4 * bits.MOST_DRAWS)


def test_a_worker_answers_with_functions_digests_and_errors(threads):
    assert bits.answer("functions") == FUNCTIONS
    case = Case("mine", 3, {"positive": "easy", "negative": "hard"})
    said = bits.answer([case, False])
    assert said == {"digests": {name: bits.digest(tensor) for name, tensor in random_calls.run(case).items()}}
    assert set(bits.answer([case, True])["values"]) == set(said["digests"])
    said = bits.answer([Case("mine", 3, {"positive": "?", "negative": "hard"}), False])
    assert said["error"] == "ValueError"
    assert "not one of" in said["message"]


def test_this_tree_computes_the_bits_of_this_tree(capsys):
    assert bits.report(HERE, 3) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(FUNCTIONS)]] == list(FUNCTIONS)
    assert all(line.split()[1:4] == ["3", "0", "0"] for line in lines[1 : 1 + len(FUNCTIONS)])
    assert lines[-1] == "calls with other bits: 0"


class OneBitOff(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return torch.nextafter(loss, torch.full_like(loss, math.inf))

    @staticmethod
    def backward(ctx, upstream):
        return upstream


class Here(Scripted):
    """A worker that is this process."""

    def receive(self) -> object:
        return bits.answer(self.questions[-1])


@pytest.fixture
def one_bit_off(monkeypatch: pytest.MonkeyPatch, threads: None) -> None:
    """This process is the new tree, and one of its losses is one bit off."""

    def worker(tree: Path, module: str) -> Worker | Here:
        return Here() if tree == HERE else Worker(HERE, module)

    def loss(*given: object, **options: object) -> torch.Tensor:
        return OneBitOff.apply(right(*given, **options))

    right = tripletops.semi_hard_loss
    monkeypatch.setattr(bits, "Worker", worker)
    monkeypatch.setattr(bits, "functions", lambda: {"semi_hard_loss": FUNCTIONS["semi_hard_loss"]})
    monkeypatch.setattr(tripletops, "semi_hard_loss", loss)


def test_one_bit_is_found_and_can_be_repeated(one_bit_off, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench", "builds", str(tmp_path), "--bits", "7"])
    with pytest.raises(SystemExit, match="1"):
        command.main()
    printed = capsys.readouterr().out
    (line,) = (line for line in printed.splitlines() if line.startswith("semi_hard_loss  "))
    calls, different, *_ = map(int, line.split()[1:])
    assert calls == 7
    assert 4 <= different <= 7  # NaN has no next number
    named = re.findall(r"^(semi_hard_loss/\d+) differs in loss$", printed, re.M)
    assert len(named) == min(different, bits.SHOWN)
    assert f"calls with other bits: {different}" in printed

    monkeypatch.setattr("sys.argv", ["bench", "builds", str(tmp_path), "--cases", *named])
    with pytest.raises(SystemExit, match="1"):
        command.main()
    printed = capsys.readouterr().out
    assert re.findall(r"^(\S+) differs in loss \(\d+ of \d+ numbers, by up to ", printed, re.M) == named
    assert "'reduction': " in printed


# --- times


def test_own_calls_leave_the_peers_out():
    own = [(row.name, contender) for row, contender in builds.own_calls([])]
    assert len(own) == len(set(own))
    assert not {contender for _, contender in own} & {
        "torch.mm",
        "torch.mm out=",
        "naive",
        dense.METRIC_LEARNING,
    }
    assert {name for name, _ in own} == {row.name for row in (*core.ROWS, *dense.ROWS) if row.unit == "s"}
    assert [(row.name, contender) for row, contender in builds.own_calls(["shuffled", "mm-d128"])] == [
        ("mm-d128", "ours"),
        ("shuffled", "shuffled"),
        ("shuffled", "sorted"),
    ]


def small(name: str) -> Row:
    row = builds.ROWS[name]
    return replace(row, shape=replace(row.shape, n=64, d=8, k=4, m=0))


def test_a_worker_times_a_call(monkeypatch, threads):
    monkeypatch.setitem(builds.ROWS, "mm-d128", small("mm-d128"))
    builds._call.cache_clear()
    assert 0 < builds.answer(["mm-d128", "ours", 2]) < 60
    monkeypatch.setitem(builds.ROWS, "multi-similarity", small("multi-similarity"))
    monkeypatch.delattr(tripletops, "multi_similarity_loss")
    assert builds.answer(["multi-similarity", "ours", 1]).startswith(builds.NO_SUCH_FUNCTION)
    builds._call.cache_clear()


def test_trees_take_turns_and_medians_are_compared():
    old, new = Scripted(1.0, 5.0, 2.0), Scripted(3.0, 4.0, 9.0)
    assert builds.compare(old, new, builds.ROWS["mm-d128"], "ours", 3) == (2.0, 4.0)
    assert old.questions == new.questions == [["mm-d128", "ours", 1]] * 3
    many = Scripted(1.0), Scripted(1.0)
    builds.compare(*many, builds.ROWS["naive-n128"], "ours", 1)
    assert many[0].questions == [["naive-n128", "ours", registry.CALLS_IN_A_BLOCK]]


def test_a_function_that_is_missing():
    missing = f"{builds.NO_SUCH_FUNCTION} 'multi_similarity_loss'"
    assert (
        builds.compare(Scripted(missing), Scripted(1.0), builds.ROWS["multi-similarity"], "ours", 2) is None
    )
    with pytest.raises(RuntimeError, match="multi-similarity: module"):
        builds.compare(Scripted(1.0), Scripted(missing), builds.ROWS["multi-similarity"], "ours", 2)
    with pytest.raises(RuntimeError, match="multi-similarity: another"):
        builds.compare(Scripted("another reason"), Scripted(1.0), builds.ROWS["multi-similarity"], "ours", 2)


def test_the_command_shows_ratios(monkeypatch, capsys, tmp_path):
    seconds = {"mm-d128": (0.1, 0.102), "multi-similarity": None, "shuffled": (0.1, 0.104)}
    monkeypatch.setattr(builds, "Worker", lambda tree, module: Scripted())
    monkeypatch.setattr(builds, "compare", lambda old, new, row, contender, rounds: seconds[row.name])
    monkeypatch.setattr("sys.argv", ["bench", "builds", str(tmp_path), "--rows", *seconds])
    with pytest.raises(SystemExit, match="0"):
        command.main()
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["row", "call", "old", "ms", "new", "ms", "new", "÷", "old"],
        ["mm-d128", "ours", "100.000", "102.000", "1.020"],
        ["shuffled", "shuffled", "100.000", "104.000", "1.040", "slower"],
        ["shuffled", "sorted", "100.000", "104.000", "1.040", "slower"],
        ["multi-similarity", "ours", "only", "in", "the", "new"],
        ["slower", "by", "more", "than", "3%:", "shuffled", "(shuffled),", "shuffled", "(sorted)"],
    ]


def test_two_trees_are_timed(monkeypatch, capsys):
    builds.report(HERE, ["naive-n128"], rounds=1)
    *_, line, verdict = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"naive-n128 +ours +\d+\.\d+ +\d+\.\d+ +\d+\.\d+( +slower)?", line)
    assert verdict.startswith("slower by more than 3%: ")
