"""The rooms: who may import whom, who may name whom, how long a function may be, what is said once.

Imports are read from the source, so that a breach fails wherever it hides.

`nn → functional → ops → backends`; everything may read `_words`, which reads nothing; `reference` imports
torch and `_words` alone; `bench` and `train_ref` use the public surface only, and `reference` as a baseline;
`ops` is the only user of `torch.library`, `ops.cpp` the only one of torch's headers, `backends/triton` the
only one of triton. That package is imported where it is needed: by functions, never as tripletops itself is.
So are the packages of others that tripletops can do without.

Rules and objectives are modules of their own. Their names come from `_words`, so that one more needs no line
here.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple

import pytest

from tripletops._words import FUNCTION, NEGATIVE, OBJECTIVE, POSITIVE, Number

ROOT = Path(__file__).resolve().parents[1]

WORDS, CALL, SIGNATURES = "tripletops._words", "tripletops._call", "tripletops._signatures"
REFERENCE = "tripletops.reference"
TRITON = "tripletops.backends.triton"
SELECTION = f"{TRITON}.selection"
# The modules of that package, each of which may import those before it.
TRITON_MODULES = [
    f"{TRITON}.{module}"
    for module in (
        *("tiles", "device", "rows", "walk", "extremes", "draws"),
        *("pairs", "costs", "stream", "losses", "gradient"),
    )
]

DIAGNOSTICS = "tripletops.diagnostics"
ROWS = "tripletops._rows"
# What each of its modules may import, beside `_rows`.
DIAGNOSTICS_MODULES = {
    "rows": {"tripletops._arguments"},
    "geometry": {"tripletops.functional", "rows"},
    "compare": {"tripletops.evaluate", "rows"},
    "spectrum": {"rows"},
    "quantiles": {"rows"},
    "overview": {"tripletops.functional", "rows", "geometry", "quantiles", "spectrum"},
    "separated": {"tripletops._arguments", "rows"},
    "vector_field": {"rows"},
    "scatter_diagram": {"tripletops.functional", "rows", "vector_field"},
    "monitor": {"tripletops._arguments", "tripletops.functional", "tripletops.evaluate", "spectrum"},
}

RULES = sorted({word.rule or word.name for table in (POSITIVE, NEGATIVE) for word in table.values()})


class Family(NamedTuple):
    """A package with a module for each of some words. Another module in it is what two of them share."""

    names: tuple[str, ...]
    allowed: set[str]  # beside the package itself, what its modules share, and `_words`


FAMILIES = {
    REFERENCE: Family(tuple(OBJECTIVE), set()),
    f"{TRITON}.rules": Family(tuple(RULES), {CALL, SELECTION, *TRITON_MODULES}),
    f"{TRITON}.objectives": Family(tuple(OBJECTIVE), {CALL, SELECTION, *TRITON_MODULES}),
}
# What each module of tripletops may import of tripletops, beside `_words`. A new one has to find its place.
ALLOWED: dict[str, set[str]] = {
    WORDS: set(),
    CALL: set(),
    SIGNATURES: set(),
    "tripletops": {
        "tripletops.nn",
        "tripletops.functional",
        "tripletops.backends",
        "tripletops.diagnostics",
        "tripletops.evaluate",
        "tripletops.samplers",
    },
    "tripletops.info": {
        "tripletops",
        "tripletops.backends",
        "tripletops.backends.cpu",
        f"{TRITON}.catalogue",
    },
    "tripletops.nn": {"tripletops.functional", SIGNATURES},
    "tripletops.functional": {
        CALL,
        SIGNATURES,
        "tripletops._arguments",
        "tripletops.ops",
        "tripletops.reference",
        "tripletops.backends",
    },
    ROWS: set(),
    "tripletops.evaluate": {ROWS, "tripletops._arguments", "tripletops.functional"},
    DIAGNOSTICS: {f"{DIAGNOSTICS}.{module}" for module in DIAGNOSTICS_MODULES},
    **{
        f"{DIAGNOSTICS}.{module}": {
            ROWS,
            *(name if "." in name else f"{DIAGNOSTICS}.{name}" for name in allowed),
        }
        for module, allowed in DIAGNOSTICS_MODULES.items()
    },
    "tripletops.samplers": set(),
    "tripletops._arguments": {CALL, SIGNATURES, "tripletops.ops"},
    "tripletops.ops": {CALL, "tripletops.backends", "tripletops.backends.cpu", TRITON},
    "tripletops.backends": {"tripletops.backends.cpu"},
    "tripletops.backends.cpu": set(),
    **{module: {CALL, *TRITON_MODULES[:place]} for place, module in enumerate(TRITON_MODULES)},
    f"{TRITON}.rules": {SELECTION, *TRITON_MODULES},  # the selection for type checkers alone
    SELECTION: {CALL, f"{TRITON}.rules", *TRITON_MODULES},
    f"{TRITON}.objectives": {CALL, SELECTION, *TRITON_MODULES},
    TRITON: {CALL, SELECTION, f"{TRITON}.objectives", *TRITON_MODULES},
    f"{TRITON}.catalogue": {CALL, TRITON, *TRITON_MODULES},
    REFERENCE: set(),
    **{
        f"{package}.{name}": {package, *family.allowed}
        for package, family in FAMILIES.items()
        for name in family.names
    },
}
PACKAGES = {"tripletops", "tripletops.backends", DIAGNOSTICS, TRITON, *FAMILIES}
OUTSIDE = ("bench", "train_ref")
PUBLIC = {
    "tripletops",
    "tripletops.nn",
    "tripletops.info",
    "tripletops.reference",
    "tripletops.diagnostics",
    "tripletops.evaluate",
    "tripletops.samplers",
}
# What else a module may import, where it waits for a call or serves type checkers alone.
LATER = {
    "tripletops.evaluate": {"sklearn", "faiss"},
    f"{DIAGNOSTICS}.vector_field": {"matplotlib"},
    f"{DIAGNOSTICS}.scatter_diagram": {"matplotlib"},
    f"{DIAGNOSTICS}.monitor": {"lightning", "transformers"},
}
TORCH_HEADER = re.compile(r'^\s*#\s*include\s*[<"](torch|ATen|c10|caffe2)/', re.MULTILINE)
# What tests may import of tests, beside the `support` of their own package.
SHARED_BY_TESTS = {"support", "rules", "losses", "objectives", "fuzz", "ptx"}


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, root: Path, at_once: bool = False) -> Iterator[str]:
    """The full names of all modules that a file imports, at its top or anywhere inside; `at_once`: without
    those that wait for a call or serve type checkers alone."""
    name = module_name(path, root)
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in run_at_import(tree) if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                # Of `from package import name`, name is a module where there is a file for it.
                folder, file = root.joinpath(*base.split(".")), f"{base}.{alias.name}"
                is_module = (
                    any(folder.glob(f"{alias.name}.*")) or folder.joinpath(alias.name, "__init__.py").exists()
                )
                yield file if is_module else base
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (str(argument.value) for argument in node.args if isinstance(argument, ast.Constant))


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        is_later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
            isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        )
        if not is_later:
            yield child
            yield from run_at_import(child)


def is_of_triton(module: str) -> bool:
    return f"{module}.".startswith(f"{TRITON}.")


def attributes(path: Path) -> set[str]:
    """Everything of the form a.b.c in a file, so that `import torch` does not hide a use of
    `torch.library`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def sources(root: Path, *folders: str, suffixes: tuple[str, ...] = (".py",)) -> list[Path]:
    paths = (path for folder in folders for path in root.joinpath(folder).rglob("*"))
    return sorted(path for path in paths if path.suffix in suffixes)


def shared_modules(root: Path) -> dict[str, set[str]]:
    """The modules of families that are no word's own, with those that import them."""
    found: dict[str, set[str]] = {}
    for package, family in FAMILIES.items():
        modules = {module_name(path, root): path for path in sources(root, package.replace(".", "/"))}
        own = {f"{package}.{name}" for name in family.names}
        for name in modules.keys() - own - {package} - ALLOWED.keys():
            found[name] = {user for user, path in modules.items() if name in imports(path, root)}
    return found


def allowed_imports(root: Path) -> dict[str, set[str]]:
    """ALLOWED, with the modules that members of a family share, where two of them do."""
    allowed = {name: set(others) for name, others in ALLOWED.items()}
    for name, users in shared_modules(root).items():
        package = name.rpartition(".")[0]
        if len(users) > 1:
            allowed[name] = {package, *FAMILIES[package].allowed}
            for user in users:
                allowed.setdefault(user, {package, *FAMILIES[package].allowed}).add(name)
    return allowed


def package_breaches(root: Path) -> Iterator[str]:
    allowed = allowed_imports(root)
    for path in sources(root, "tripletops"):
        name = module_name(path, root)
        if name not in allowed:
            yield f"{name} has no place among the rooms"
        for imported in imports(path, root):
            if not may_import(name, imported, allowed.get(name, set())):
                yield f"{name} imports {imported}"
        for imported in imports(path, root, at_once=True):
            if imported.partition(".")[0] in LATER.get(name, set()):
                yield f"{name} imports {imported} at once"
        if not is_of_triton(name) and any(map(is_of_triton, imports(path, root, at_once=True))):
            yield f"{name} imports {TRITON} at once"
        used = {*imports(path, root), *attributes(path)}
        if name != "tripletops.ops" and any(item.startswith("torch.library") for item in used):
            yield f"{name} uses torch.library"


def may_import(name: str, imported: str, allowed: set[str]) -> bool:
    top = imported.partition(".")[0]
    if top in sys.stdlib_module_names:
        return True
    if name == WORDS:  # setup.py reads it without torch
        return False
    if top == "tripletops":
        return imported in allowed or (imported == WORDS and name != CALL)
    return top == "torch" or (top == "triton" and is_of_triton(name)) or top in LATER.get(name, set())


def outside_breaches(root: Path) -> Iterator[str]:
    for path in sources(root, *OUTSIDE):
        name = module_name(path, root)
        for imported in imports(path, root):
            if imported.partition(".")[0] == "tripletops" and imported not in PUBLIC:
                yield f"{name} imports {imported}"
        if any(item.startswith("torch.ops.tripletops") for item in attributes(path)):
            yield f"{name} uses torch.ops.tripletops"


def csrc_breaches(root: Path) -> Iterator[str]:
    for path in sources(root, "csrc", suffixes=(".h", ".cpp")):
        if path.name != "ops.cpp" and TORCH_HEADER.search(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(root).as_posix()} includes a header of torch"
    for path in sources(root, "csrc"):
        for imported in imports(path, root):
            if imported.partition(".")[0] not in sys.stdlib_module_names:
                yield f"{path.relative_to(root).as_posix()} imports {imported}"


def breaches_of_tests(root: Path) -> Iterator[str]:
    """Tests share what is made to be shared, never each other's functions."""
    tests = sources(root, "tests")
    stems = {path.stem for path in tests if path.stem.startswith("test_") or path.stem == "conftest"}
    for path in tests:
        for imported in imports(path, root):
            top, *rest = imported.split(".")
            own_support = [*path.relative_to(root).parent.parts, "support"]
            is_shared = [top, *rest] == own_support or (rest and rest[0] in SHARED_BY_TESTS)
            if top in stems or (top == "tests" and (not is_shared or stems & set(rest))):
                yield f"{path.relative_to(root).as_posix()} imports {imported}"


def breaches(root: Path) -> list[str]:
    """Everything that the rooms forbid, as "who imports what"."""
    found = (package_breaches, outside_breaches, csrc_breaches, breaches_of_tests)
    return [breach for find in found for breach in find(root)]


def test_no_breach():
    assert breaches(ROOT) == []


def test_every_room_is_there():
    modules = {module_name(path, ROOT) for path in sources(ROOT, "tripletops")}
    assert modules == ALLOWED.keys() | shared_modules(ROOT).keys()


def test_what_is_no_words_own_is_shared():
    for name, users in shared_modules(ROOT).items():
        assert len(users) > 1, f"{name} serves {users} alone and belongs there"


@pytest.mark.parametrize(
    ("file", "source", "breach"),
    [
        (
            "tripletops/ops.py",
            "from tripletops import functional",
            "tripletops.ops imports tripletops.functional",
        ),
        (
            "tripletops/ops.py",
            "from tripletops.nn import TripletLoss",
            "tripletops.ops imports tripletops.nn",
        ),
        ("tripletops/ops.py", "from . import functional", "tripletops.ops imports tripletops.functional"),
        ("tripletops/ops.py", "def f():\n    import tripletops.nn", "tripletops.ops imports tripletops.nn"),
        ("tripletops/nn.py", "from tripletops import ops", "tripletops.nn imports tripletops.ops"),
        ("tripletops/nn.py", "from tripletops import triplet_loss", "tripletops.nn imports tripletops"),
        (
            "tripletops/nn.py",
            "import importlib\nimportlib.import_module('tripletops.ops')",
            "imports tripletops.ops",
        ),
        (
            "tripletops/nn.py",
            "import torch\ntorch.library.custom_op('a')",
            "tripletops.nn uses torch.library",
        ),
        ("tripletops/nn.py", "from torch.library import Library", "tripletops.nn uses torch.library"),
        (
            "tripletops/backends/cpu.py",
            "from ..ops import LOSS",
            "tripletops.backends.cpu imports tripletops.ops",
        ),
        (
            "tripletops/backends/__init__.py",
            "from .. import ops",
            "tripletops.backends imports tripletops.ops",
        ),
        ("tripletops/backends/__init__.py", "import triton", "tripletops.backends imports triton"),
        (
            "tripletops/ops.py",
            "def f():\n    import triton.language",
            "tripletops.ops imports triton.language",
        ),
        (
            "tripletops/ops.py",
            "from tripletops.backends import triton",
            "tripletops.ops imports tripletops.backends.triton at once",
        ),
        (
            "tripletops/info.py",
            "try:\n    import tripletops.backends.triton.catalogue\nexcept ImportError:\n    pass",
            "tripletops.info imports tripletops.backends.triton at once",
        ),
        (
            "tripletops/functional.py",
            "def f():\n    from tripletops.backends import triton",
            "tripletops.functional imports tripletops.backends.triton",
        ),
        (
            "tripletops/backends/triton/tiles.py",
            "from tripletops.backends.triton import rows",
            "tripletops.backends.triton.tiles imports tripletops.backends.triton.rows",
        ),
        (
            "tripletops/backends/triton/rows.py",
            "from tripletops.ops import mine",
            "tripletops.backends.triton.rows imports tripletops.ops",
        ),
        (
            "tripletops/backends/triton/objectives/triplet.py",
            "import numpy",
            "tripletops.backends.triton.objectives.triplet imports numpy",
        ),
        (
            "tripletops/backends/triton/objectives/triplet.py",
            "from tripletops.backends.triton.objectives import contrastive",
            "tripletops.backends.triton.objectives.triplet imports "
            "tripletops.backends.triton.objectives.contrastive",
        ),
        (
            "tripletops/backends/triton/objectives/__init__.py",
            "from tripletops.backends.triton.objectives.triplet import Triplet",
            "tripletops.backends.triton.objectives imports tripletops.backends.triton.objectives.triplet",
        ),
        (
            "tripletops/backends/triton/selection.py",
            "from tripletops.backends.triton.rules.hard import HardRule",
            "tripletops.backends.triton.selection imports tripletops.backends.triton.rules.hard",
        ),
        (
            "tripletops/backends/triton/selection.py",
            "from importlib import import_module\nimport_module('tripletops.backends.triton.rules.hard')",
            "tripletops.backends.triton.selection imports tripletops.backends.triton.rules.hard",
        ),
        (
            "tripletops/backends/triton/rules/newest.py",
            "",
            "tripletops.backends.triton.rules.newest has no place among the rooms",
        ),
        ("tripletops/reference/newest.py", "", "tripletops.reference.newest has no place among the rooms"),
        ("tripletops/reference/__init__.py", "import numpy", "tripletops.reference imports numpy"),
        (
            "tripletops/reference/__init__.py",
            "from tripletops.ops import mine",
            "tripletops.reference imports tripletops.ops",
        ),
        (
            "tripletops/reference/__init__.py",
            "from tripletops._call import Call",
            "tripletops.reference imports tripletops._call",
        ),
        (
            "tripletops/reference/triplet.py",
            "from tripletops.reference.contrastive import pairs",
            "tripletops.reference.triplet imports tripletops.reference.contrastive",
        ),
        ("tripletops/_words.py", "import torch", "tripletops._words imports torch"),
        (
            "tripletops/_words.py",
            "from tripletops import _call",
            "tripletops._words imports tripletops._call",
        ),
        (
            "tripletops/_call.py",
            "from tripletops import _words",
            "tripletops._call imports tripletops._words",
        ),
        ("tripletops/nn.py", "from tripletops import _call", "tripletops.nn imports tripletops._call"),
        ("csrc/words.py", "from tripletops import _words", "csrc/words.py imports tripletops._words"),
        ("csrc/words.py", "def f():\n    import torch", "csrc/words.py imports torch"),
        ("tests/a.py", "from tests.test_b import f", "tests/a.py imports tests.test_b"),
        ("tests/a/test_a.py", "from tests.a.b import f", "tests/a/test_a.py imports tests.a.b"),
        ("tests/a/test_a.py", "import tests.b.support", "tests/a/test_a.py imports tests.b.support"),
        ("tests/test_rooms.py", "from test_rooms import f", "tests/test_rooms.py imports test_rooms"),
        (
            "tests/fuzz/test_fuzz.py",
            "from tests.fuzz.test_fuzz import f",
            "tests/fuzz/test_fuzz.py imports tests.fuzz.test_fuzz",
        ),
        (
            "tripletops/evaluate.py",
            "from sklearn.cluster import KMeans",
            "tripletops.evaluate imports sklearn.cluster at once",
        ),
        (
            "tripletops/evaluate.py",
            "try:\n    import faiss\nexcept ImportError:\n    faiss = None",
            "tripletops.evaluate imports faiss at once",
        ),
        (
            "tripletops/evaluate.py",
            "def f():\n    import scipy.spatial",
            "tripletops.evaluate imports scipy.spatial",
        ),
        (
            "tripletops/samplers.py",
            "def f():\n    import sklearn",
            "tripletops.samplers imports sklearn",
        ),
        (
            "tripletops/samplers.py",
            "from tripletops import evaluate",
            "tripletops.samplers imports tripletops.evaluate",
        ),
        (
            "tripletops/functional.py",
            "from tripletops.evaluate import nearest",
            "tripletops.functional imports tripletops.evaluate",
        ),
        ("tripletops/fast.py", "", "tripletops.fast has no place among the rooms"),
        ("bench/core.py", "from tripletops.ops import mine", "bench.core imports tripletops.ops"),
        ("bench/core.py", "from tripletops import _kernels", "bench.core imports tripletops._kernels"),
        (
            "bench/gpu_static.py",
            "from tripletops.backends.triton import catalogue",
            "bench.gpu_static imports tripletops.backends.triton.catalogue",
        ),
        (
            "bench/core.py",
            "import torch\ntorch.ops.tripletops.mine()",
            "bench.core uses torch.ops.tripletops",
        ),
        (
            "train_ref/a/b.py",
            "import tripletops.functional as F",
            "train_ref.a.b imports tripletops.functional",
        ),
        (
            "csrc/kernels/vector/tile.h",
            "#include <ATen/Parallel.h>",
            "csrc/kernels/vector/tile.h includes a header of torch",
        ),
        ("csrc/dispatch.cpp", '# include "torch/all.h"', "csrc/dispatch.cpp includes a header of torch"),
    ],
)
def test_a_breach_is_found(rooms, file, source, breach):
    is_new = not (rooms / file).exists()
    write(rooms, {file: source})
    found = breaches(rooms)
    (rooms / file).unlink() if is_new else (rooms / file).write_text("", encoding="utf-8")
    assert any(breach in each for each in found)


@pytest.fixture(scope="module")
def rooms(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("rooms")
    write_rooms(root)
    assert breaches(root) == []
    return root


def write_rooms(root: Path) -> None:
    """All modules, empty."""
    for name in ALLOWED:
        path = root.joinpath(*name.split("."))
        write(root, {path / "__init__.py" if name in PACKAGES else path.with_suffix(".py"): ""})
    (root / "tripletops" / "_kernels.abi3.so").touch()


def write(root: Path, files: dict[str | Path, str]) -> None:
    for file, source in files.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(source, encoding="utf-8")


def test_what_is_allowed_passes(tmp_path):
    write_rooms(tmp_path)
    shared = "from tripletops.backends.triton.objectives.both import Both"
    files = {
        "tripletops/nn.py": "import torch\nfrom tripletops import functional\nfrom . import functional",
        "tripletops/functional.py": "from tripletops.ops import mine\nfrom .backends import resolve",
        "tripletops/ops.py": "def f():\n    from tripletops.backends import triton",
        "tripletops/_words.py": "from typing import NamedTuple",
        "tripletops/_call.py": "from torch import Tensor",
        "tripletops/samplers.py": "from tripletops._words import FUNCTION",
        "tripletops/reference/__init__.py": "import torch\nfrom tripletops._words import FUNCTION",
        "tripletops/reference/triplet.py": "from tripletops.reference import select",
        "tripletops/backends/triton/__init__.py": "from tripletops.backends.triton.rows import Rows",
        "tripletops/backends/triton/rows.py": "import triton.language as tl\nfrom . import tiles",
        "tripletops/backends/triton/tiles.py": "import torch\nimport triton",
        "tripletops/backends/triton/objectives/both.py": "from tripletops.backends.triton import rows",
        "tripletops/backends/triton/objectives/triplet.py": shared,
        "tripletops/backends/triton/objectives/contrastive.py": shared,
        "tripletops/evaluate.py": "def f():\n    import faiss\n    from sklearn.cluster import KMeans",
        "bench/core.py": "import numpy\nimport tripletops as T\nfrom tripletops import reference, nn, mine",
        "train_ref/batches.py": "from tripletops.samplers import PKSampler\nfrom tripletops import evaluate",
        "csrc/ops.cpp": "#include <torch/csrc/stable/library.h>",
        "csrc/words.py": "import importlib.util",
        "tests/support/batches.py": "",
        "tests/a/test_a.py": "from tests.a.support import run",
        "tests/test_a.py": "from tests.support.batches import Batch\nfrom tests.rules import hard",
    }
    write(tmp_path, files)
    assert breaches(tmp_path) == []


# Names: an objective is known by name to its own files, to `_words` and to tests.

LANGUAGES = (".py", ".h", ".cpp")
# English, or a word of the field: in a comment they need not mean the objective.
COMMON = {"triplet", "contrastive"}


def class_name(objective: str) -> str:
    return "".join(part.capitalize() for part in objective.split("_"))


def own_files(objective: str) -> set[str]:
    return {
        f"csrc/kernels/objectives/{objective}.h",
        f"tripletops/backends/triton/objectives/{objective}.py",
        f"tripletops/reference/{objective}.py",
        "tripletops/_words.py",
    }


def code_of(text: str, suffix: str) -> str:
    """Without comments, and in Python without docstrings."""
    if suffix != ".py":
        return without_comments(text)
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    for token in tokenize.generate_tokens(io.StringIO("\n".join(lines)).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(lines)


def names_out_of_place(root: Path) -> list[str]:
    found = []
    for path in sources(root, "csrc", "tripletops", suffixes=LANGUAGES):
        file, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        code = code_of(text, path.suffix)
        for objective in OBJECTIVE:
            # `triplet` itself is the word of the field, so its class alone can be told.
            names = [class_name(objective)] + (
                [objective, f"{objective}_loss"] if objective != "triplet" else []
            )
            searched = code if objective in COMMON else text
            pattern = re.compile(rf"\b({'|'.join(names)})\b")
            if file not in own_files(objective):
                found += [f"{file} names {match}" for match in pattern.findall(searched)]
    return found


def test_objectives_are_named_in_their_own_files_alone():
    assert names_out_of_place(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source", "name"),
    [
        ("csrc/kernels/objective.h", "if (word == ObjectiveWord::supcon) return;", "supcon"),
        ("csrc/kernels/objective.h", "return Triplet<T>(call);", "Triplet"),
        ("csrc/kernels/objective.h", "// as info_nce does", "info_nce"),
        ("csrc/kernels/objectives/pairs.h", "class Contrastive;", "Contrastive"),
        ("csrc/kernels/objectives/triplet.h", "struct BatchAll {};", "BatchAll"),
        ("tripletops/ops.py", 'if objective == "contrastive":\n    pass', "contrastive"),
        ("tripletops/ops.py", "# batch_all has no such thing", "batch_all"),
        ("tripletops/functional.py", "def beta_margin_loss():\n    pass", "beta_margin_loss"),
        ("tripletops/reference/triplet.py", '"""As `semi_hard`."""', "semi_hard"),
    ],
)
def test_a_name_out_of_place_is_found(tmp_path, file, source, name):
    write(tmp_path, {file: source})
    assert names_out_of_place(tmp_path) == [f"{file} names {name}"]


def test_names_in_their_places_pass(tmp_path):
    files = {
        "csrc/kernels/objectives/supcon.h": "class Supcon {};  // supcon",
        "csrc/kernels/losses.h": "// contrastive: Extreme Triplet Learning\nint triplet; int supconx;",
        "tripletops/ops.py": '"""A contrastive word."""\ntriplet = 1  # contrastive',
        "tripletops/_words.py": "supcon = 1",
    }
    write(tmp_path, files)
    assert names_out_of_place(tmp_path) == []


# Length: a function can be read at once.

LONGEST = 60


class Measured(NamedTuple):
    name: str
    lines: int


def python_functions(text: str) -> Iterator[Measured]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Measured(node.name, node.end_lineno - node.lineno + 1)


def without_comments(text: str) -> str:
    """C++ with comments gone and the insides of strings and character constants with them; lines stay."""
    pattern = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'", re.DOTALL)

    def blank(match: re.Match[str]) -> str:
        found = match.group()
        return found[0] * 2 if found[0] in "\"'" else "\n" * found.count("\n")

    return pattern.sub(blank, text)


SCOPE = re.compile(
    r"^(extern\b|(inline\s+)?namespace\b|(template\s*<.*>\s*)?(class|struct|enum|union)\b)", re.S
)


def cpp_functions(text: str) -> Iterator[Measured]:
    """Functions at the level of a file, a namespace or a class. What is inside one, lambdas included, counts
    as part of it."""
    code = re.sub(r"^[ \t]*#(?:\\\n|[^\n])*", "", without_comments(text), flags=re.MULTILINE)
    start = place = 0  # of what precedes the next brace, and behind it
    while (brace := re.compile(r"[;{}]|\b(public|protected|private):").search(code, place)) is not None:
        head, place = code[start : brace.start()].strip(), brace.end()
        if brace.group() == "{" and not SCOPE.match(head):
            start += len(code[start:]) - len(code[start:].lstrip())
            place = closing_brace(code, place)
            named = re.findall(r"([\w~]+)\s*\(", head)
            if named and not head.endswith("="):
                yield Measured(named[0], code[start:place].count("\n") + 1)
        start = place


def closing_brace(code: str, place: int) -> int:
    """Behind the brace that closes the one before `place`."""
    depth = 1
    while depth and place < len(code):
        depth += {"{": 1, "}": -1}.get(code[place], 0)
        place += 1
    return place


def too_long(root: Path) -> list[str]:
    found = []
    for path in sources(root, "csrc", "tripletops", suffixes=LANGUAGES):
        text = path.read_text(encoding="utf-8")
        for function in python_functions(text) if path.suffix == ".py" else cpp_functions(text):
            if function.lines > LONGEST:
                found.append(f"{path.relative_to(root).as_posix()}: {function.name}, {function.lines} lines")
    return found


def test_no_function_is_too_long():
    assert too_long(ROOT) == []


CPP = """\
#include <vector>
#define TWICE(x) { \\
  x; x; }
namespace a {
enum class Word : int { one, two };
constexpr int kNumbers[] = {1, 2};  // an { in a comment
template <class T, class U>
class Rule : public Base<T> {
 public:
  explicit Rule(int k)
      : Base<T>(k), text_("}") {}

  // The one.
  template <class V>
  void pick(V v,
            int count) const override {
    each(v, [&](int i) {
      if (i == '{') return;
    });
BODY  }
  int count = 0;
};
}  // namespace a
static int last() { return 1; }
"""


def test_functions_of_cpp_are_found():
    found = list(cpp_functions(CPP.replace("BODY", "")))
    assert found == [("Rule", 2), ("pick", 7), ("last", 1)]


@pytest.mark.parametrize(
    ("file", "source", "name"),
    [
        ("csrc/kernels/walk.h", CPP.replace("BODY", "    ++count;\n" * (LONGEST - 6)), "pick"),
        ("tripletops/nn.py", "class A:\n  async def f(self):\n" + "    a = 1\n" * LONGEST, "f"),
    ],
)
def test_a_function_that_is_too_long_is_found(tmp_path, file, source, name):
    write(tmp_path, {file: source})
    assert too_long(tmp_path) == [f"{file}: {name}, {LONGEST + 1} lines"]
    shorter = source.replace("    ++count;\n", "", 1).replace("    a = 1\n", "", 1)
    write(tmp_path, {file: shorter})
    assert too_long(tmp_path) == []


# Said once: defaults stand in `_words`, and what is written from it is up to date.

NUMBERS = {
    option: function
    for function in FUNCTION.values()
    for option in function.options()
    if isinstance(option, Number)
}


def repeated_defaults(root: Path) -> list[str]:
    """Everything of the form "margin = 0.2", in a signature, an assignment or a call."""
    found = []
    for path in sources(root, "csrc", "tripletops", suffixes=LANGUAGES):
        if path.name == "_words.py":
            continue
        code = code_of(path.read_text(encoding="utf-8"), path.suffix)
        for number in NUMBERS:
            value = re.escape(f"{number.default}").removesuffix(r"\.0") + r"(\.0*)?(?![\w.])"
            pattern = re.compile(rf"\b{number.name}\s*(:[\w |]+)?=\s*{value}")
            found += [
                f"{path.relative_to(root).as_posix()} says {match.group()}"
                for match in pattern.finditer(code)
            ]
    return found


def test_defaults_are_said_once():
    assert repeated_defaults(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("tripletops/functional.py", "def f(margin=0.2): ..."),
        ("tripletops/functional.py", "def f(*, margin: float = 0.2): ..."),
        ("tripletops/nn.py", "def f(epsilon: float | None = 0.1): ..."),
        ("tripletops/reference/triplet.py", "g(temperature=1)"),
        ("csrc/kernels/call.h", "struct A { double margin = 0.2; };"),
        ("csrc/kernels/call.h", "struct A { double beta = 50; };"),
    ],
)
def test_a_default_that_is_repeated_is_found(tmp_path, file, source):
    write(tmp_path, {file: source})
    (found,) = {said.split()[0] for said in repeated_defaults(tmp_path)}
    assert found == file


def test_other_numbers_pass(tmp_path):
    files = {
        "tripletops/functional.py": "def f(margin=0.25): ...  # margin=0.2",
        "csrc/kernels/call.h": "if (margin == 0.2) return;  // margin = 0.2",
        "csrc/kernels/mask.h": "double beta = 500, margins = 0.2;",
        "tripletops/_words.py": "margin = 0.2",
    }
    write(tmp_path, files)
    assert repeated_defaults(tmp_path) == []


@pytest.fixture
def writer():
    spec = spec_from_file_location("write", ROOT / "docs" / "write.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_stub_and_readme_are_up_to_date(writer, capsys):
    assert writer.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("file", ["STUB", "README"])
def test_a_stale_file_is_found(writer, file, monkeypatch, tmp_path, capsys):
    changed = tmp_path / "file"
    text = getattr(writer, file).read_text(encoding="utf-8")
    changed.write_text(text.replace("margin", "gap"), encoding="utf-8")
    monkeypatch.setattr(writer, file, changed)
    monkeypatch.setattr(writer, "ROOT", tmp_path)
    if file == "README":
        monkeypatch.setattr(writer, "STUB", tmp_path / "stub")
        (tmp_path / "stub").write_text(writer.stub(), encoding="utf-8")
    else:
        monkeypatch.setattr(writer, "README", tmp_path / "readme")
        (tmp_path / "readme").write_text(writer.readme((ROOT / "README.md").read_text("utf-8")), "utf-8")
    assert writer.main(["--check"]) == 1
    assert capsys.readouterr().out == "file is not up to date: run `make words`\n"
    assert writer.main([]) == 0
    assert writer.main(["--check"]) == 0
