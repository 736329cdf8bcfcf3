"""The words: codes, ranges and options, and that everything that says a word has it from there.

Signatures, modules, docstrings, error messages, the stub, the README's tables and the C++ enums are made of
`_words`. So a record that is changed here has to show up there.
"""

from __future__ import annotations

import ast
import inspect
import re
from importlib.util import module_from_spec, spec_from_file_location
from math import inf, nan
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tripletops as T
from tripletops import _arguments, _signatures, functional, nn, reference
from tripletops._words import (
    ABOVE_ZERO,
    DISTANCE,
    FINITE,
    FROM_ZERO,
    FUNCTION,
    LIMIT,
    LOSS,
    MARGIN,
    NEGATIVE,
    NUMBERS,
    OBJECTIVE,
    OBJECTIVE_CODE,
    OBJECTIVES,
    POSITIVE,
    REDUCTION,
    TABLES,
    Choice,
    Codes,
    Function,
    Number,
    Numbers,
    Range,
    Table,
    Word,
    fingerprint,
)
from tripletops.backends import cpu

ROOT = Path(__file__).resolve().parents[1]
RULES = {word.rule or word.name for table in (POSITIVE, NEGATIVE) for word in table.values()}
EVERY_NUMBER = {
    f"{function.name}-{option.name}": option
    for function in FUNCTION.values()
    for option in function.options()
    if isinstance(option, Number)
}
every_function = pytest.mark.parametrize("function", FUNCTION.values(), ids=FUNCTION)
every_table = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.option)


def load(path: Path) -> ModuleType:
    spec = spec_from_file_location(f"{path.stem}_of_the_sources", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestCodes:
    @every_table
    def test_a_code_is_a_place(self, table):
        assert list(table) == list(table.names) == [word.name for word in table.values()]
        assert [table.code[name] for name in table.coded] == list(range(len(table)))
        assert all(table.coded[table.code[name]] == name for name in table)

    def test_a_record_of_codes_has_every_table(self):
        assert Codes._fields == ("objective", *(table.option for table in TABLES))

    def test_codes_that_are_left_out(self):
        codes = Codes(objective=3)
        left_out = [table.coded[getattr(codes, table.option)] for table in TABLES]
        assert left_out == ["all", "all", "euclidean", "margin", "mean"]

    def test_objectives(self):
        assert [OBJECTIVE_CODE[objective.name] for objective in OBJECTIVES] == list(range(len(OBJECTIVE)))
        assert all(OBJECTIVE[name].name == name for name in OBJECTIVE)

    def test_numbers(self):
        assert len(set(NUMBERS)) == len(NUMBERS)
        assert Numbers._fields == NUMBERS
        assert set(Numbers()) == {0.0}
        assert {number.name for number in EVERY_NUMBER.values()} == set(NUMBERS)

    def test_every_word_is_somebodys_choice(self):
        for table in TABLES:
            chosen = {
                word
                for function in FUNCTION.values()
                for choice in function.choices
                if choice.table is table
                for word in choice.words
            }
            assert chosen == set(table)
        assert {function.objective for function in FUNCTION.values()} == set(OBJECTIVE)


class TestRanges:
    @pytest.mark.parametrize(
        ("allowed", "inside", "outside"),
        [
            (FROM_ZERO, [0.0, -0.0, 5e-324, 1, 1e308], [-5e-324, -1.0, inf, -inf, nan]),
            (ABOVE_ZERO, [5e-324, 1, 1e308], [0.0, -0.0, -1.0, inf, -inf, nan]),
            (FINITE, [0.0, -1e308, 1e308, -5e-324], [inf, -inf, nan]),
            (LIMIT, [5e-324, 1.4, inf], [0.0, -0.0, -1.0, -inf, nan]),
            (Range("", 2.0), [2.0, 3.0], [1.9999999, inf, nan]),
            (Range("", 2.0, strict=True, infinite=True), [2.0000001, inf], [2.0, nan]),
        ],
        ids=["from zero", "above zero", "finite", "limit", "from two", "above two"],
    )
    def test_ends(self, allowed, inside, outside):
        assert [value for value in inside if not allowed.holds(value)] == []
        assert [value for value in outside if allowed.holds(value)] == []

    @pytest.mark.parametrize("number", EVERY_NUMBER.values(), ids=EVERY_NUMBER)
    def test_a_number_says_all_about_itself(self, number):
        assert number.name.isidentifier()
        assert len(number.doc) > 5, "a letter is no documentation"
        assert number.unit
        assert number.range.text
        assert number.range.holds(number.default)
        assert number.none is None or "None" in number.doc


class TestRecords:
    @pytest.mark.parametrize(
        "word", [word for table in TABLES for word in table.values()], ids=lambda w: w.name
    )
    def test_a_word_says_all_about_itself(self, word):
        assert word.name.isidentifier()
        assert word.doc
        assert not word.doc.endswith(".")

    @every_function
    def test_a_function_says_all_about_itself(self, function):
        assert function.doc.endswith(".")
        assert function.text.endswith((".", ".)"))
        assert OBJECTIVE[function.objective]
        assert all(max(map(len, text.splitlines())) <= 110 for text in (function.doc, function.text))
        for choice in function.choices:
            assert set(choice.words) <= set(choice.table)
            assert len(set(choice.words)) == len(choice.words)
            assert choice.required or choice.default is None or choice.default in choice.words
        assert all(word in table for table, word in function.fixed)
        fixed = {table.option for table, _ in function.fixed}
        assert not fixed & {choice.name for choice in function.choices}

    @every_function
    def test_an_option_comes_once(self, function):
        names = [option.name for option in function.options()]
        assert len(set(names)) == len(names)
        assert set(names) <= {*NUMBERS, *(table.option for table in TABLES)}

    def test_options_come_with_the_numbers_of_their_words(self):
        a, b, c, d = (Number(name, 0.0, FINITE, "a unit", "a number") for name in "abcd")
        first = Table("first", Word("x", "", numbers=(a,)), Word("y", "", numbers=(b, a)), Word("z", ""))
        second = Table("second", Word("u", "", numbers=(c,)), Word("v", "", numbers=(d,)))
        choices = Choice(first, first.names, "x"), Choice(second, ("u",), "u")
        function = Function("f", "", "", "", "", choices, numbers=(d,))
        # The function's own number first; d of "v", which is not to be chosen, would come no second time.
        assert [option.name for option in function.options()] == ["d", "first", "a", "b", "second", "c"]
        function = function._replace(choices=choices[::-1], numbers=())
        assert [option.name for option in function.options()] == ["second", "c", "first", "a", "b"]

    def test_a_functions_own_number_comes_before_that_of_a_word(self):
        mine, others = (Number("a", default, FINITE, "a unit", "a number") for default in (1.0, 2.0))
        table = Table("first", Word("x", "", numbers=(others,)))
        function = Function("f", "", "", "", "", (Choice(table, table.names, "x"),), numbers=(mine,))
        assert function.options()[0] is mine

    @every_function
    def test_draws(self, function):
        words = [choice.table[word] for choice in function.choices for word in choice.words]
        assert function.draws == any(word.draws for word in words)
        assert function.draws == ("seed" in inspect.signature(getattr(T, function.name)).parameters)

    def test_semihard_is_beyond_with_no_offset(self):
        """At the cost of a number that must then have its default."""
        (offset,) = NEGATIVE["beyond"].numbers
        assert NEGATIVE["semihard"].rule == "beyond"
        assert offset.default == 0
        given = _arguments.Options(FUNCTION["triplet_loss"]).encode({"negative": "semihard", "offset": 3.0})
        assert Numbers(*given.numbers).offset == 0


# What the contract says of defaults. Every other test of them would repeat `_words` itself.
CONTRACT: dict[str, dict[str, Any]] = {
    "batch_hard_loss": {"margin": 0.2, "distance": None, "loss": "margin", "temperature": 1.0},
    "triplet_loss": {"positive": "hard", "negative": "hard", "offset": 0.0, "sct_weight": 1.0, "cutoff": 0.5}
    | {"nonzero_loss_cutoff": 1.4},
    "easy_positive_loss": {"negative": "hard", "loss": "second_order"},
    "batch_all_loss": {"margin": 0.2, "loss": "margin", "distance": None, "return_active": False},
    "semi_hard_loss": {"margin": 0.2, "distance": None},
    "multi_similarity_loss": {"alpha": 2.0, "beta": 50.0, "base": 1.0, "epsilon": 0.1, "positive": "all"},
    "contrastive_loss": {"pos_margin": 0.0, "neg_margin": 1.0, "positive": "all", "negative": "all"},
    "beta_margin_loss": {"alpha": 0.2, "positive": "random", "negative": "distance"},
    "supcon_loss": {"temperature": 0.1},
    "info_nce_loss": {"temperature": 0.07, "positive": "all"},
}
EVERYWHERE = {"ref_emb": None, "ref_labels": None, "self_index": None, "ignore_label": None, "backend": None}


class TestPublicSurface:
    @pytest.mark.parametrize("name", CONTRACT)
    def test_defaults_are_those_of_the_contract(self, name):
        parameters = inspect.signature(getattr(T, name)).parameters
        expected = {**CONTRACT[name], **EVERYWHERE, "reduction": "mean"}
        assert {option: parameters[option].default for option in expected} == expected

    def test_the_rules_of_mine_have_no_default(self):
        parameters = inspect.signature(T.mine).parameters
        assert parameters["positive"].default is parameters["negative"].default is inspect.Parameter.empty

    def test_every_function_and_module_is_there(self):
        assert set(FUNCTION) <= set(T.__all__)
        assert all(getattr(T, name) is getattr(functional, name) for name in FUNCTION)
        modules = {record.module for record in FUNCTION.values() if record.module}
        ours = {
            name
            for name, value in vars(nn).items()
            if inspect.isclass(value) and value.__module__ == nn.__name__
        }
        assert ours == modules | {"Loss"}

    @every_function
    def test_signature(self, function):
        """The batch by position, everything else by keyword."""
        parameters = inspect.signature(getattr(T, function.name)).parameters
        learned = OBJECTIVE[function.objective].learned
        positional = [name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
        assert positional == ["emb", "labels", *([] if learned is None else [learned.name])]
        for option in function.options():
            required = isinstance(option, Choice) and option.required
            assert parameters[option.name].default == (
                inspect.Parameter.empty if required else option.default
            )

    @every_function
    def test_docstring(self, function):
        text = " ".join(getattr(T, function.name).__doc__.split())
        assert text.startswith(" ".join(f"{function.doc} {function.text}".split()))
        listed = {argument.name for argument in _signatures.arguments(function)}
        assert listed == set(inspect.signature(getattr(T, function.name)).parameters)
        texts = [text]
        if function.module:
            texts.append(" ".join(getattr(T.nn, function.module).__doc__.split()))
        for option in function.options():
            described = " ".join(f"{option.name}: {_signatures.described(function, option)}".split())
            assert all(described in text for text in texts)

    @every_function
    def test_every_word_is_in_the_docstring(self, function):
        text = getattr(T, function.name).__doc__
        for choice in function.choices:
            assert [word for word in choice.words if f'``"{word}"``' not in text] == []

    def test_a_distance_that_is_left_out_is_explained_by_the_losses_there_are(self):
        assert "None: euclidean, or cosine for the losses that are defined on S." in T.triplet_loss.__doc__
        assert "None: euclidean." in T.semi_hard_loss.__doc__

    def test_stub(self):
        """What type checkers read is what Python has."""
        tree = ast.parse((ROOT / "tripletops" / "__init__.pyi").read_text(encoding="utf-8"))
        declared = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert {node.name for node in declared} == set(FUNCTION)
        for node in declared:
            parameters = inspect.signature(getattr(T, node.name)).parameters
            given = [*node.args.args, *node.args.kwonlyargs]
            assert [argument.arg for argument in given] == list(parameters)
            for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
                if argument.arg != "return_active":  # whose type says which of two results it is
                    expected = parameters[argument.arg].default
                    found = inspect.Parameter.empty if default is None else ast.literal_eval(default)
                    assert found == expected


class TestAChange:
    """A record that differs shows up in everything that is made of it."""

    @pytest.fixture
    def changed(self) -> Function:
        gap = MARGIN._replace(
            default=0.75, range=Range("a gap", 0.5), doc="how wide the gap is", unit="miles"
        )
        return FUNCTION["semi_hard_loss"]._replace(
            name="gap_loss",
            module="GapLoss",
            doc="The loss of gaps.",
            choices=(
                Choice(DISTANCE, ("cosine", "euclidean"), "cosine"),
                FUNCTION["semi_hard_loss"].choices[1],
            ),
            numbers=(gap,),
        )

    @pytest.fixture
    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(24.0).reshape(6, 4).sin(), torch.arange(6) // 2

    def test_function(self, changed, batch):
        function = functional._public(changed)
        assert function.__name__ == "gap_loss"
        assert inspect.signature(function).parameters["margin"].default == 0.75
        given = function(*batch)
        assert torch.equal(given, T.semi_hard_loss(*batch, margin=0.75, distance="cosine"))
        assert not torch.equal(given, T.semi_hard_loss(*batch, distance="cosine"))

    def test_module(self, changed, batch, monkeypatch):
        monkeypatch.setattr(functional, "gap_loss", functional._public(changed), raising=False)
        module = nn._module(changed)()
        assert repr(module) == "GapLoss(margin=0.75, distance='cosine', reduction='mean')"
        assert torch.equal(module(*batch), T.semi_hard_loss(*batch, margin=0.75, distance="cosine"))

    def test_documentation(self, changed):
        text = functional._public(changed).__doc__
        assert text.startswith("The loss of gaps.\n")
        assert "    margin: how wide the gap is; miles, a gap.\n" in text
        assert "sqeuclidean" not in text

    def test_errors(self, changed, batch):
        function = functional._public(changed)
        with pytest.raises(ValueError, match=r"^margin=0\.25: must be a gap$"):
            function(*batch, margin=0.25)
        with pytest.raises(ValueError, match=r"^distance='sqeuclidean' is not one of 'cosine', 'euclidean'$"):
            function(*batch, distance="sqeuclidean")
        with pytest.raises(
            TypeError, match=r"^gap_loss\(\) got an unexpected keyword argument 'alpha'; its arg"
        ):
            function(*batch, alpha=0.25)

    def test_stub(self, changed):
        lines = list(_signatures._declared(changed, "Tensor"))
        assert lines[0] == "def gap_loss("
        assert "    margin: float = 0.75," in lines
        assert '    distance: str = "cosine",' in lines

    def test_readme(self, monkeypatch):
        writer = load(ROOT / "docs" / "write.py")
        table = writer.rules_table(Table("positive", Word("odd", "every other positive", "Odd et al.")))
        assert table.splitlines()[-1] == '| `"odd"` | every other positive | Odd et al. |'
        paper = FUNCTION["semi_hard_loss"]._replace(doc="The loss of gaps.", paper="Gap et al.")
        monkeypatch.setattr(writer, "FUNCTION", {paper.name: paper})
        assert writer.functions_table().splitlines()[2:] == [
            "| `semi_hard_loss` | The loss of gaps | Gap et al. |"
        ]


class TestReadme:
    def test_every_word_has_a_row(self):
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        for table in (POSITIVE, NEGATIVE, LOSS):
            words = (word for word in table.values() if word.name != "all")
            assert [word.name for word in words if f'| `"{word.name}"` | {word.doc} |' not in text] == []
        assert [
            name for name, record in FUNCTION.items() if record.paper and f"| `{name}` |" not in text
        ] == []


class TestLibrary:
    """The C++ side: enums, numbers and registry are written from the words when the library is built."""

    @pytest.fixture
    def generator(self) -> ModuleType:
        return load(ROOT / "csrc" / "words.py")

    @pytest.fixture
    def elsewhere(self, generator, monkeypatch, tmp_path):
        """The generator with words of which something was replaced."""

        def replace(old: str, new: str) -> ModuleType:
            text = (ROOT / "tripletops" / "_words.py").read_text(encoding="utf-8")
            assert text.count(old) == 1
            (tmp_path / "_words.py").write_text(text.replace(old, new), encoding="utf-8")
            monkeypatch.setattr(generator, "_SOURCE", tmp_path / "_words.py")
            return generator

        return replace

    def test_it_was_built_with_these_words(self):
        if cpu._library is None:
            pytest.skip(f"backend cpu: {T.backends()['cpu']}")
        assert cpu._library.tripletops_fingerprint().decode() == fingerprint()

    def test_fingerprint(self):
        """Codes are places, so their order counts."""
        parts = dict(part.split(" ", 1) for part in fingerprint().split(";"))
        assert parts["positive"].split() == list(POSITIVE)
        assert parts["objective"].split() == list(OBJECTIVE)
        assert parts["numbers"].split() == list(NUMBERS)
        assert list(parts) == [*(table.option for table in TABLES), "objective", "numbers"]

    def test_enums(self, generator):
        enums = dict(re.findall(r"enum class (\w+) : int \{ (.*?) \};", generator.header()))
        assert enums == {
            **{table.option.capitalize(): ", ".join(table.coded) for table in TABLES},
            "ObjectiveWord": ", ".join(OBJECTIVE),
        }

    def test_numbers(self, generator):
        assert tuple(re.findall(r"double (\w+) = 0;", generator.header())) == NUMBERS
        assert f"kNumbers = {len(NUMBERS)};" in generator.header()

    def test_what_objectives_are(self, generator):
        def listed(name: str) -> list[str]:
            (found,) = re.findall(rf"{name}\[\] = \{{(.*)\}};", generator.header())
            return found.split(", ")

        assert listed("kSaved") == [str(len(objective.saved)) for objective in OBJECTIVES]
        assert listed("kLearns") == [str(objective.learned is not None).lower() for objective in OBJECTIVES]
        assert listed("kCosineOnly") == [str(objective.cosine).lower() for objective in OBJECTIVES]

    def test_the_headers_of_the_build_are_up_to_date(self, generator):
        folder = ROOT / "build" / "generated"
        if not folder.exists():
            pytest.skip("the library was not built in this tree")
        assert (folder / "words.h").read_text(encoding="utf-8") == generator.header()
        assert (folder / "registry.h").read_text(encoding="utf-8") == generator.registry()

    def test_a_file_that_is_up_to_date_is_left_alone(self, generator, tmp_path):
        generator.write(tmp_path / "new")
        files = sorted((tmp_path / "new").iterdir())
        assert [file.name for file in files] == ["registry.h", "words.h"]
        files[0].write_text("stale", encoding="utf-8")
        before = files[1].stat().st_mtime_ns
        generator.write(tmp_path / "new")
        assert files[0].read_text(encoding="utf-8") == generator.registry()
        assert files[1].stat().st_mtime_ns == before

    def test_another_word(self, generator, elsewhere):
        before = generator.header()
        changed = elsewhere(
            '    Word("easy", "the farthest negative", "EN"),', '    Word("odd", "", draws=True),'
        )
        header = changed.header()
        assert "softhard, odd, random" in header
        assert "word == Negative::odd" in header
        assert re.search('kFingerprint = "(.*)"', header)[1] != re.search('kFingerprint = "(.*)"', before)[1]
        registry = changed.registry()
        assert '#include "kernels/rules/odd.h"' in registry
        assert "case Negative::odd:\n      return std::make_unique<OddRule<T>>(Kind::negatives);" in registry

    def test_another_objective(self, elsewhere):
        registry = elsewhere('        Objective("batch_all"),', '        Objective("odd_one"),').registry()
        assert '#include "kernels/objectives/odd_one.h"' in registry
        assert "case ObjectiveWord::odd_one:\n      return std::make_unique<OddOne<T>>(" in registry


def files_in(folder: str, suffix: str) -> dict[str, str]:
    return {
        path.stem: path.read_text(encoding="utf-8")
        for path in (ROOT / folder).glob(f"*{suffix}")
        if path.stem != "__init__"
    }


class TestFiles:
    """A rule and an objective are one file per backend. Another file there is what several of them share."""

    @pytest.mark.parametrize(
        ("folder", "names", "suffix"),
        [
            ("csrc/kernels/rules", RULES, ".h"),
            ("csrc/kernels/objectives", set(OBJECTIVE), ".h"),
            ("tripletops/backends/triton/rules", RULES, ".py"),
            ("tripletops/backends/triton/objectives", set(OBJECTIVE), ".py"),
            ("tripletops/reference", set(OBJECTIVE), ".py"),
        ],
        ids=lambda value: value if isinstance(value, str) and "/" in value else "",
    )
    def test_one_for_each_word(self, folder, names, suffix):
        files = files_in(folder, suffix)
        assert names <= files.keys()
        for shared in files.keys() - names:
            mention = rf'#include "{shared}\.h"' if suffix == ".h" else rf"\.{shared} import"
            users = [name for name, text in files.items() if re.search(mention, text)]
            assert len(users) > 1, f"{folder}/{shared}{suffix} serves {users} alone"

    @pytest.mark.parametrize("rule", sorted(RULES))
    def test_the_class_of_a_rule(self, rule):
        name = f"{rule.capitalize()}Rule"
        assert re.search(
            rf"^(class|struct) {name}\b", files_in("csrc/kernels/rules", ".h")[rule], re.MULTILINE
        )
        text = files_in("tripletops/backends/triton/rules", ".py")[rule]
        assert re.search(rf"^(class|struct) {name}\b", text, re.MULTILINE)

    @pytest.mark.parametrize("objective", OBJECTIVE)
    def test_the_class_of_an_objective(self, objective):
        name = "".join(part.capitalize() for part in objective.split("_"))
        assert re.search(
            rf"^(class|struct) {name}\b", files_in("csrc/kernels/objectives", ".h")[objective], re.MULTILINE
        )
        text = files_in("tripletops/backends/triton/objectives", ".py")[objective]
        assert re.search(rf"^(class|struct) {name}\b", text, re.MULTILINE)
        assert callable(getattr(reference, f"{objective}_loss"))

    @pytest.mark.parametrize("loss", LOSS)
    def test_the_function_of_a_loss(self, loss):
        text = (ROOT / "csrc" / "kernels" / "losses.h").read_text(encoding="utf-8")
        assert re.search(rf"^inline Term {loss}\(const Numbers&", text, re.MULTILINE)
        text = (ROOT / "tripletops" / "backends" / "triton" / "losses.py").read_text(encoding="utf-8")
        assert re.search(rf"^def {loss}\(d_ap, d_an, numbers\)", text, re.MULTILINE)

    def test_the_reference_has_every_word(self):
        assert list(reference.LOSSES) == list(LOSS)
        assert list(reference.DISTANCES) == list(DISTANCE)
        assert set(reference.POSITIVES) == POSITIVE.keys() - {"all"}
        assert set(reference.NEGATIVES) == NEGATIVE.keys() - {"all"}
        assert {"mean", "mean_nonzero", "sum", "none"} == set(REDUCTION)

    def test_tests(self):
        """`all` picks nothing, and a triplet is no more than its rules and its loss."""
        assert RULES - {"all"} <= files_in("tests/rules", ".py").keys() <= RULES
        assert files_in("tests/losses", ".py").keys() == set(LOSS)
        assert set(OBJECTIVE) - {"triplet"} <= files_in("tests/objectives", ".py").keys() <= set(OBJECTIVE)
