"""The rooms: who may import whom. Imports are read from the source, so that a breach fails wherever it hides.

`nn → functional → ops → backends`; `reference` imports torch alone; `bench` and `train_ref` use the public
surface only, and `reference` as a baseline; `ops` is the only user of `torch.library`, `ops.cpp` the only one
of torch's headers, `backends/triton` the only one of triton. That package is imported where it is needed: by
functions, never as tripletops itself is. So are the packages of others that tripletops can do without.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

TRITON = "tripletops.backends.triton"
# The modules of that package, each of which may import those before it.
TRITON_MODULES = ("tiles", "device", "kernels", "rows", "mining", "triplets", "tuples", "catalogue")

# What each module of tripletops may import of tripletops. A new module has to find its place here.
ALLOWED: dict[str, set[str]] = {
    "tripletops": {
        "tripletops.nn",
        "tripletops.functional",
        "tripletops.backends",
        "tripletops.evaluate",
        "tripletops.samplers",
    },
    "tripletops.info": {
        "tripletops",
        "tripletops.backends",
        "tripletops.backends.cpu",
        f"{TRITON}.catalogue",
    },
    "tripletops.nn": {"tripletops.functional"},
    "tripletops.functional": {
        "tripletops._arguments",
        "tripletops.ops",
        "tripletops.reference",
        "tripletops.backends",
    },
    "tripletops.evaluate": {"tripletops._arguments", "tripletops.functional"},
    "tripletops.samplers": set(),
    "tripletops._arguments": {"tripletops.ops"},
    "tripletops.ops": {"tripletops.backends", "tripletops.backends.cpu", TRITON},
    "tripletops.backends": {"tripletops.backends.cpu"},
    "tripletops.backends.cpu": set(),
    TRITON: {f"{TRITON}.{module}" for module in TRITON_MODULES},
    **{
        f"{TRITON}.{module}": {f"{TRITON}.{earlier}" for earlier in TRITON_MODULES[:place]}
        for place, module in enumerate(TRITON_MODULES)
    },
    "tripletops.reference": set(),
}
PACKAGES = {"tripletops", "tripletops.backends", TRITON}
OUTSIDE = ("bench", "train_ref")
PUBLIC = {
    "tripletops",
    "tripletops.nn",
    "tripletops.info",
    "tripletops.reference",
    "tripletops.evaluate",
    "tripletops.samplers",
}
# What else a module may import, where it waits for a call or serves type checkers alone.
LATER = {"tripletops.evaluate": {"sklearn", "faiss"}}
TORCH_HEADER = re.compile(r'^\s*#\s*include\s*[<"](torch|ATen|c10|caffe2)/', re.MULTILINE)


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


def breaches(root: Path) -> list[str]:
    """Everything that the rooms forbid, as "who imports what"."""
    found = []
    for path in sorted(root.joinpath("tripletops").rglob("*.py")):
        name = module_name(path, root)
        if name not in ALLOWED:
            found.append(f"{name} has no place among the rooms")
        for imported in imports(path, root):
            top = imported.partition(".")[0]
            if top == "tripletops":
                allowed = imported in ALLOWED.get(name, set())
            else:
                allowed = top == "torch" or top in sys.stdlib_module_names
                allowed = allowed or (top == "triton" and is_of_triton(name))
                allowed = allowed or top in LATER.get(name, set())
            if not allowed:
                found.append(f"{name} imports {imported}")
        for imported in imports(path, root, at_once=True):
            if imported.partition(".")[0] in LATER.get(name, set()):
                found.append(f"{name} imports {imported} at once")
        if not is_of_triton(name) and any(map(is_of_triton, imports(path, root, at_once=True))):
            found.append(f"{name} imports {TRITON} at once")
        used = {*imports(path, root), *attributes(path)}
        if name != "tripletops.ops" and any(item.startswith("torch.library") for item in used):
            found.append(f"{name} uses torch.library")
    for path in sorted(path for room in OUTSIDE for path in root.joinpath(room).rglob("*.py")):
        name = module_name(path, root)
        for imported in imports(path, root):
            if imported.partition(".")[0] == "tripletops" and imported not in PUBLIC:
                found.append(f"{name} imports {imported}")
        if any(item.startswith("torch.ops.tripletops") for item in attributes(path)):
            found.append(f"{name} uses torch.ops.tripletops")
    for path in sorted(
        path for path in root.joinpath("csrc").rglob("*") if path.is_file() and path.name != "ops.cpp"
    ):
        if TORCH_HEADER.search(path.read_text(encoding="utf-8")):
            found.append(f"{path.relative_to(root).as_posix()} includes a header of torch")
    return found


def test_no_breach():
    assert breaches(ROOT) == []


def test_every_room_is_there():
    modules = {module_name(path, ROOT) for path in ROOT.joinpath("tripletops").rglob("*.py")}
    assert modules == set(ALLOWED)


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
            "from tripletops.backends.triton import kernels",
            "tripletops.backends.triton.tiles imports tripletops.backends.triton.kernels",
        ),
        (
            "tripletops/backends/triton/tuples.py",
            "from tripletops.ops import LOSS",
            "tripletops.backends.triton.tuples imports tripletops.ops",
        ),
        (
            "tripletops/backends/triton/tuples.py",
            "import numpy",
            "tripletops.backends.triton.tuples imports numpy",
        ),
        ("tripletops/reference.py", "import numpy", "tripletops.reference imports numpy"),
        (
            "tripletops/reference.py",
            "from tripletops.ops import LOSS",
            "tripletops.reference imports tripletops.ops",
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
            "csrc/kernels/tile.h",
            "#include <ATen/Parallel.h>",
            "csrc/kernels/tile.h includes a header of torch",
        ),
        ("csrc/dispatch.cpp", '# include "torch/all.h"', "csrc/dispatch.cpp includes a header of torch"),
    ],
)
def test_a_breach_is_found(tmp_path, file, source, breach):
    for name in ALLOWED:
        path = tmp_path.joinpath(*name.split("."))
        path = path / "__init__.py" if name in PACKAGES else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "tripletops" / "_kernels.abi3.so").touch()
    assert breaches(tmp_path) == []
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(source, encoding="utf-8")
    assert any(breach in found for found in breaches(tmp_path))


def test_what_is_allowed_passes(tmp_path):
    for file, source in {
        "tripletops/nn.py": "import torch\nfrom tripletops import functional\nfrom . import functional",
        "tripletops/functional.py": "from tripletops.ops import LOSS\nfrom .backends import resolve",
        "tripletops/ops.py": "def f():\n    from tripletops.backends import triton",
        "tripletops/backends/triton/__init__.py": "from tripletops.backends.triton.rows import Rows",
        "tripletops/backends/triton/rows.py": "import triton.language as tl\nfrom . import tiles",
        "tripletops/backends/triton/tiles.py": "import torch\nimport triton",
        "tripletops/evaluate.py": "def f():\n    import faiss\n    from sklearn.cluster import KMeans",
        "bench/core.py": "import numpy\nimport tripletops as T\nfrom tripletops import reference, nn, mine",
        "train_ref/batches.py": "from tripletops.samplers import PKSampler\nfrom tripletops import evaluate",
        "csrc/ops.cpp": "#include <torch/csrc/stable/library.h>",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(source, encoding="utf-8")
    for module in ("reference", "samplers"):
        (tmp_path / "tripletops" / f"{module}.py").touch()
    assert breaches(tmp_path) == []
