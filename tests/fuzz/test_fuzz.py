"""The fuzzer in short: some calls of fixed seeds, and that it finds what it is there to find.

`make fuzz` makes 100,000 calls.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tripletops
from tests.fuzz import losses, objectives, rules, runner
from tests.fuzz.cases import FUNCTIONS, NUMBERS, Case, case_of
from tests.fuzz.checks import broken_promises, plain_result, run, run_mine
from tests.fuzz.objectives import Picks, terms_of
from tests.fuzz.oracle import Outcome, Truth
from tests.fuzz.runner import State, command_of, main, make_calls, resumed, run_all, usable_isas
from tests.support.batches import LAYOUTS
from tests.support.calls import bits
from tripletops._words import FUNCTION, LOSS, OBJECTIVE, Number
from tripletops.backends.cpu import instruction_sets

PLAIN_SEED = 20

pytestmark = pytest.mark.usefixtures("one_thread", "quiet")


@pytest.fixture
def quiet() -> Iterator[None]:
    """The oracle divides by 0 and overflows where a mask throws the result away."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what a child process would do: it need not be set up, and leaves no traces."""
    monkeypatch.setattr(runner, "prepare", lambda: None)
    monkeypatch.setattr(runner, "set_environment", lambda backend, isa: None)
    monkeypatch.setattr(runner.signal, "signal", lambda number, action: None)


# Calls


@pytest.mark.parametrize("isa", instruction_sets())
def test_every_call_keeps_its_promises(isa, tmp_path):
    seed = instruction_sets().index(isa)
    state = State(seed=seed, calls=600, backend="cpu", isas=[isa])
    assert run_all(state, tmp_path / "state.json") == 0, runner.summary(state)


def test_every_interpreted_call_keeps_its_promises(tmp_path):
    state = State(seed=3, calls=40, backend="triton", isas=["interpreter"])
    assert run_all(state, tmp_path / "state.json") == 0, runner.summary(state)


def test_all_instruction_sets_take_their_turns():
    assert usable_isas() == instruction_sets()
    state = State(seed=0, calls=100_000, backend="cpu", isas=["baseline", "avx2"])
    turns = [state.isa_of(number) for number in range(0, state.calls, runner.CHUNK)]
    assert turns[:4] == ["baseline", "avx2", "baseline", "avx2"]


def test_a_call_depends_on_its_number_alone():
    def contents(case: Case) -> Any:
        tensors = [*case.rows, case.batch.labels]
        return case.describe(), bits(*(tensor.contiguous() for tensor in tensors))

    calls = [contents(case_of(5, number)) for number in range(40)]
    assert [contents(case_of(5, number)) for number in reversed(range(40))] == calls[::-1]
    assert len({description for description, _ in calls}) == 40
    assert contents(case_of(6, 0)) != calls[0]


def test_a_thousand_calls_hold_everything():
    cases = [case_of(0, number) for number in range(1500)]
    for part, least in (
        ({case.function for case in cases}, len(FUNCTIONS)),
        ({case.kind for case in cases}, 72),
        ({case.layout for case in cases}, 7),
        ({case.batch.emb.dtype for case in cases}, 4),
        ({case.batch.labels.dtype for case in cases}, 8),
        ({(case.call.options.get("positive"), case.call.options.get("negative")) for case in cases}, 36),
        ({case.call.options.get("reduction") for case in cases}, 5),
        ({case.call.options.get("loss") for case in cases}, 1 + len(LOSS)),
        ({case.call.options.get("distance") for case in cases}, 4),
        ({(case.batch.ref_emb is None, case.batch.self_index is None) for case in cases}, 3),
        ({case.takes_threads for case in cases}, 2),
    ):
        assert len(part) >= least, part
    assert {0, 1, 2} <= {len(case.batch.emb) for case in cases}
    assert {0, 1, 2} <= {case.batch.emb.shape[1] for case in cases}
    assert any(len(case.rows) > 1 and len(case.rows[1]) == 0 for case in cases)
    assert any(case.batch.ignore_label is not None for case in cases)
    offsets = {case.call.options["offset"] for case in cases if case.call.options.get("negative") == "beyond"}
    assert min(offsets) < -1e29
    assert max(offsets) > 1e29
    assert min(map(abs, offsets)) == 0 < min(abs(offset) for offset in offsets if offset) < 1e-15
    assert any(not rows.isfinite().all() for case in cases for rows in case.rows)


# Words


def test_every_word_has_an_oracle():
    one_of = FUNCTION["mine"].choices
    assert [set(choice.words) for choice in one_of[:2]] == [set(rules.POSITIVE), set(rules.NEGATIVE)]
    assert set(losses.LOSS) == set(LOSS)
    assert set(objectives.OBJECTIVE) == set(OBJECTIVE)


def test_every_number_is_drawn():
    options = (option for function in FUNCTION.values() for option in function.options())
    assert {(each.name, each.unit) for each in options if isinstance(each, Number)} == set(NUMBERS)


# Planted defects


class Spoil(torch.autograd.Function):
    """The rows as they are; of their gradient, what `change` makes of it."""

    @staticmethod
    def forward(ctx, rows, change):
        ctx.change = change
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        ctx.change(gradient)
        return gradient, None


def longest_row(gradient):
    return int(gradient.double().norm(dim=1).argmax())


def scale_a_row(gradient):
    gradient[longest_row(gradient)] *= 1.01


def lose_a_row(gradient):
    gradient[longest_row(gradient)] = 0


def put_nan(gradient):
    gradient[0, -1] = torch.nan


def with_gradient(change: Callable[[Any], None]) -> Callable[..., Any]:
    def wrap(function):
        return lambda emb, *given, **options: function(Spoil.apply(emb, change), *given, **options)

    return wrap


def with_loss(change: Callable[[Any], Any]) -> Callable[..., Any]:
    def wrap(function):
        def call(*given, **options):
            value = function(*given, **options)
            return (change(value[0]), *value[1:]) if isinstance(value, tuple) else change(value)

        return call

    return wrap


def unsteady(function):
    """Another last bit with every call."""
    calls = []

    def call(*given, **options):
        calls.append(None)
        return with_loss(lambda loss: loss * (1 + len(calls) * 2.0**-22))(function)(*given, **options)

    return call


def careless(function):
    """Writes where it should only read."""

    def call(emb, *given, **options):
        value = function(emb, *given, **options)
        rows = emb.detach().numpy()  # behind autograd's back, as a kernel would
        rows[tuple(np.argwhere(np.isfinite(rows))[-1])] += 1
        return value

    return call


def broken(function):
    def call(*given, **options):
        raise RuntimeError("planted")

    return call


PLANTED = {
    "a row's gradient off by 1 %": (with_gradient(scale_a_row), "gradient of emb"),
    "a row without its gradient": (with_gradient(lose_a_row), "gradient of emb"),
    "a gradient that is NaN": (with_gradient(put_nan), "NaN gradient"),
    "a loss off by 0.1 %": (with_loss(lambda loss: loss * 1.001), "loss"),
    "a loss of the wrong type": (with_loss(lambda loss: loss.half()), "form"),
    "other bits with every call": (unsteady, "bits"),
    "an input that is modified": (careless, "inputs"),
    "an exception": (broken, "raised"),
}


PLAIN = ("normal, plain", "lattice, plain")


@cache
def plain_numbers() -> dict[str, list[int]]:
    """By function, the calls of PLAIN_SEED with nothing unusual about their rows."""
    numbers: dict[str, list[int]] = {name: [] for name in FUNCTIONS}
    for case in map(partial(case_of, PLAIN_SEED), range(24000)):
        usual = case.layout in LAYOUTS and case.type_name in ("float32", "float64")
        usual &= case.batch.emb.shape[1] > 1  # on a line, all rows are parallel
        if usual and case.kind in PLAIN and not case.takes_threads:
            numbers[case.function].append(case.number)
    return numbers


def calls_to_spoil(function: str, is_useful: Callable[[Case], bool], count: int) -> Iterator[Case]:
    """A few calls that keep their promises."""
    for number in plain_numbers()[function]:
        case = case_of(PLAIN_SEED, number)
        if is_useful(case) and not broken_promises(case):
            yield case
            count -= 1
        if count == 0:
            return
    pytest.fail("too few calls to spoil")


# Every function and, beside the default, every loss of a triplet.
OBJECTIVES = [(name, None) for name in FUNCTIONS if name != "mine"] + [
    ("triplet_loss", loss) for loss in LOSS
]


def has_loss(case: Case, loss: str | None) -> bool:
    if loss is not None and case.call.options["loss"] != loss:
        return False
    value, gradients, _ = run(case)
    return bool(value.isfinite().all() and value.abs().max() > 1e-3 and gradients[0].any())


@pytest.mark.parametrize(("function", "loss"), OBJECTIVES)
def test_planted_defects_are_found(function, loss, monkeypatch):
    for case in calls_to_spoil(function, partial(has_loss, loss=loss), 2):
        for name, (wrap, check) in PLANTED.items():
            with monkeypatch.context() as context:
                context.setattr(tripletops, function, wrap(getattr(tripletops, function)))
                found = [each.check for each in broken_promises(case_of(case.seed, case.number))]
            assert check in found, f"{name}: {found}\n{case.describe()}"


def mistaken(words: dict[str, Any]) -> Callable[..., Any]:
    """Calls with other words than those that were said."""

    def wrap(function):
        return lambda *given, **options: function(*given, **{**options, **words})

    return wrap


def options_of(name: str) -> dict[str, Any]:
    return {option.name: option.default for option in FUNCTION[name].options()}


def times(name: str, factor: float) -> Callable[..., Any]:
    """Calls with another number."""

    def wrap(function):
        default = options_of(function.__name__)[name]
        return lambda *given, **options: function(
            *given, **{**options, name: options.get(name, default) * factor}
        )

    return wrap


def instead(other: str) -> Callable[..., Any]:
    """Calls another function, with the options that both have."""

    def wrap(function):
        odd = options_of(function.__name__).keys() - options_of(other).keys()

        def call(*given, **options):
            both = {name: value for name, value in options.items() if name not in odd}
            return getattr(tripletops, other)(*given, **both)

        return call

    return wrap


# What was said, and a defect that confuses it with something like it.
CONFUSED = {
    "beyond without its offset": ("mine", {"negative": "beyond"}, mistaken({"offset": 0.0})),
    "beyond by the offset's negative": ("mine", {"negative": "beyond"}, times("offset", -1.0)),
    "beyond by a slightly larger offset": ("mine", {"negative": "beyond"}, times("offset", 1.1)),
    "the nearest instead of beyond": ("mine", {"negative": "beyond"}, mistaken({"negative": "hard"})),
    "any positive instead of softhard": ("mine", {"positive": "softhard"}, mistaken({"positive": "random"})),
    "the farthest instead of softhard": ("mine", {"positive": "softhard"}, mistaken({"positive": "hard"})),
    "any negative instead of softhard": ("mine", {"negative": "softhard"}, mistaken({"negative": "random"})),
    "the nearest instead of softhard": ("mine", {"negative": "softhard"}, mistaken({"negative": "hard"})),
    "first_order instead of sct": ("triplet_loss", {"loss": "sct"}, mistaken({"loss": "first_order"})),
    "sct by another weight": ("triplet_loss", {"loss": "sct"}, times("sct_weight", 1.01)),
    "sct by another temperature": ("triplet_loss", {"loss": "sct"}, times("temperature", 1.01)),
    "supcon by another temperature": ("supcon_loss", {}, times("temperature", 1.01)),
    "info_nce instead of supcon": ("supcon_loss", {}, instead("info_nce_loss")),
    "info_nce by another temperature": ("info_nce_loss", {}, times("temperature", 1.01)),
    "supcon instead of info_nce": ("info_nce_loss", {"positive": "all"}, instead("supcon_loss")),
    "all positives instead of the easy one": (
        "info_nce_loss",
        {"positive": "easy"},
        mistaken({"positive": "all"}),
    ),
    "the easy positive instead of all": (
        "info_nce_loss",
        {"positive": "all"},
        mistaken({"positive": "easy"}),
    ),
}


@pytest.mark.parametrize("name", CONFUSED)
def test_confused_words_are_found(name, monkeypatch):
    function, said, wrap = CONFUSED[name]
    right = getattr(tripletops, function)

    def outcome(case: Case) -> list[Tensor]:
        return [part.double() for part in run_mine(case)[1:3]] if function == "mine" else [run(case).loss]

    def is_useful(case: Case) -> bool:
        """It makes a difference that counts."""
        if any(case.call.options[word] != value for word, value in said.items()):
            return False
        before = outcome(case)
        with monkeypatch.context() as context:
            context.setattr(tripletops, function, wrap(right))
            after = outcome(case)
        return not all(torch.allclose(*both, rtol=1e-3) for both in zip(before, after, strict=True))

    for case in calls_to_spoil(function, is_useful, 2):
        with monkeypatch.context() as context:
            context.setattr(tripletops, function, wrap(right))
            found = [each.check for each in broken_promises(case)]
        assert found, f"{name}\n{case.describe()}"


def other_pick(triplets):
    """The first anchor's negative becomes another anchor's, where that is one of its own as well."""
    anchor = int(triplets.valid.nonzero()[0])
    others = triplets.negative[triplets.valid & (triplets.negative != triplets.negative[anchor])]
    negative = triplets.negative.clone()
    negative[anchor] = others[0]
    return triplets._replace(negative=negative)


def pick_for_nobody(triplets):
    positive = triplets.positive.clone()
    positive[int((positive < 0).nonzero()[0])] = 0
    return triplets._replace(positive=positive)


def no_pick(triplets):
    positive = triplets.positive.clone()
    positive[int(triplets.valid.nonzero()[0])] = -1
    return triplets._replace(positive=positive)


def wrong_distance(triplets):
    return triplets._replace(d_an=triplets.d_an * (1 + 1e-4))


PLANTED_PICKS = {
    "another pick": (other_pick, "picks"),
    "a pick too many": (pick_for_nobody, "picks"),
    "a pick too few": (no_pick, "picks"),
    "a distance off by 0.01 %": (wrong_distance, "distances"),
}


@pytest.mark.parametrize("negative", rules.NEGATIVE)
@pytest.mark.parametrize("name", PLANTED_PICKS)
def test_planted_picks_are_found(name, negative, monkeypatch):
    mine, (change, check) = tripletops.mine, PLANTED_PICKS[name]

    def is_useful(case: Case) -> bool:
        if case.call.options["negative"] != negative:
            return False
        triplets = run_mine(case)
        if name == "a pick too many":
            return bool((triplets.positive < 0).any())
        picked = triplets.valid
        return len(triplets.negative[picked].unique()) > 1 and bool((triplets.d_an[picked] > 0).all())

    for case in calls_to_spoil("mine", is_useful, 1):
        with monkeypatch.context() as context:
            context.setattr(tripletops, "mine", lambda *given, **options: change(mine(*given, **options)))
            found = [each.check for each in broken_promises(case)]
        assert check in found, f"{name}: {found}\n{case.describe()}"


@pytest.mark.parametrize(("function", "loss"), OBJECTIVES)
def test_the_oracle_agrees_with_the_reference(function, loss):
    """In float64, for rows of ordinary size: they have nothing in common but the definitions."""
    for case in calls_to_spoil(function, partial(has_loss, loss=loss), 3):
        exact = replace(case, batch=case.batch.to(torch.float64))
        picks = run_mine(case) if case.call.rules else None
        pairs = None if picks is None else Picks(picks.positive.numpy(), picks.negative.numpy())
        truth = Truth(exact.batch, case.call.distance)
        outcome = Outcome(truth, terms_of(truth, case.call, pairs), case.call.options["reduction"])
        value, *gradients = plain_result(exact, picks, gram=False)
        right = [outcome.loss.right, *(side.right for side in outcome.rows)]
        for part, expected in zip((value, *gradients), right, strict=False):
            np.testing.assert_allclose(part.numpy(), expected.astype(float), rtol=1e-9, atol=1e-9)


# The runner

# Stands in for a child process: every fifth call fails, and call 23 kills its process.
FAKE = """
import json, os, sys
for number in range(int(sys.argv[1]), int(sys.argv[2])):
    print(json.dumps({"number": number}), flush=True)
    if number == 23:
        os.abort()
    if number % 5 == 2:
        kind = {"function": "mine", "kind": f"kind {number % 10}", "type": "float32"}
        print(json.dumps({"broken": [["picks", f"wrong in {number}"]], **kind}), flush=True)
"""


@pytest.fixture
def fake_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(state: State, end: int, isa: str) -> list[str]:
        return [sys.executable, "-c", FAKE, str(state.next), str(end)]

    monkeypatch.setattr(runner, "worker_command", command)
    monkeypatch.setattr(runner, "CHUNK", 20)


@pytest.mark.usefixtures("fake_calls")
def test_failures_do_not_stop_a_run(tmp_path, capsys):
    state = State(seed=4, calls=50, backend="cpu", isas=["baseline", "avx2"])
    assert run_all(state, tmp_path / "state.json") == 1
    assert [each["number"] for each in state.failures] == [2, 7, 12, 17, 22, 23, 27, 32, 37, 42, 47]
    assert state.failures[5]["broken"] == [["died", "the process ended with -6"]]
    assert [each["isa"] for each in state.failures] == [*["baseline"] * 4, *["avx2"] * 5, *["baseline"] * 2]
    said = capsys.readouterr().out
    assert "python -m tests.fuzz --seed 4 --case 27 --isa avx2" in said
    assert "50 calls of seed 4: 11 failed" in said
    assert "5  mine, kind 2, float32: picks" in said
    assert f"1  {case_of(4, 23).function}, {case_of(4, 23).kind}, " in said


@pytest.mark.usefixtures("fake_calls")
@pytest.mark.parametrize("stops", [[1], [3, 5], [2, 4, 9]])
def test_a_run_that_was_stopped_goes_on(tmp_path, monkeypatch, stops):
    """It makes the same calls as one that was not, none of them twice."""

    def fresh() -> State:
        return State(seed=4, calls=50, backend="cpu", isas=["baseline", "avx2"])

    unbroken, broken_off = fresh(), tmp_path / "stopped.json"
    run_all(unbroken, tmp_path / "unbroken.json")
    for stop in stops:

        def stop_there(state: State, failure: Any, stop: int = stop) -> None:
            if len(state.failures) == stop:
                raise KeyboardInterrupt

        with monkeypatch.context() as context:
            context.setattr(runner, "report", stop_there)
            assert run_all(resumed(broken_off, fresh()), broken_off) == 130
    state = resumed(broken_off, fresh())
    assert len(state.failures) == stops[-1]
    assert run_all(state, broken_off) == 1
    assert state.failures == unbroken.failures
    assert state.next == unbroken.next == 50
    # A run that is through, or another one, starts from the beginning.
    assert resumed(broken_off, fresh()).next == 0
    state.next = 30
    state.save(broken_off)
    assert resumed(broken_off, fresh()).next == 30
    assert resumed(broken_off, replace(fresh(), calls=60)).next == 0
    other = replace(fresh(), seed=5)
    assert resumed(broken_off, other).next == 0
    assert resumed(broken_off, other, any_seed=True).seed == 4


@pytest.mark.usefixtures("in_this_process")
def test_the_printed_command_repeats_a_failure(monkeypatch, capsys):
    spoil = with_gradient(put_nan)
    monkeypatch.setattr(tripletops, "contrastive_loss", spoil(tripletops.contrastive_loss))
    make_calls(PLAIN_SEED, 0, 60, "cpu")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    failed = next(i for i, line in enumerate(lines) if line.get("function") == "contrastive_loss")
    number = lines[failed - 1]["number"]
    _, _, _, *words = shlex.split(command_of(PLAIN_SEED, number, "cpu", "baseline"))
    assert main(words) == 1
    said = capsys.readouterr().out
    assert case_of(PLAIN_SEED, number).describe() in said
    for check, message in lines[failed]["broken"]:
        assert f"BROKEN {check}: {message}" in said
    monkeypatch.undo()


def test_a_call_without_a_failure_says_so(capsys, monkeypatch):
    number = plain_numbers()["mine"][0]
    monkeypatch.setattr(runner, "prepare", lambda: None)
    monkeypatch.setattr(runner, "set_environment", lambda backend, isa: None)
    assert main(["--seed", str(PLAIN_SEED), "--case", str(number)]) == 0
    assert "all promises kept" in capsys.readouterr().out
