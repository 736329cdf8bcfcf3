"""What is built and shipped: a library that any newer torch can load, no code that leaks out of its
instruction set, nothing compiled behind the user's back, and no file forgotten."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "tripletops" / "_C.abi3.so"
# Files that switch an instruction set on for themselves.
ISA_FILES = [
    path
    for path in sorted((ROOT / "csrc" / "kernels").glob("*.cpp"))
    if "#pragma GCC target" in path.read_text()
]


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    result = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def build_flags() -> list[str]:
    """The compiler flags as setup.py has them."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (flags,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLAGS"
    )
    return list(ast.literal_eval(flags))


def symbols(*arguments: str | Path) -> list[str]:
    return run(tool("nm"), "--demangle", *arguments).splitlines()


def test_the_library_needs_no_cpp_symbol_of_torch():
    if not LIBRARY.exists():
        pytest.skip("the library is not built in place")
    undefined = symbols("-D", "--undefined-only", LIBRARY)
    assert any("torch_parallel_for" in line or "aoti_torch_" in line for line in undefined), (
        "nothing was read"
    )
    assert [line for line in undefined if re.search(r"\b(torch|at|c10|caffe2|pybind11)::", line)] == []
    assert [line for line in undefined if re.search(r"\bPy_?[A-Z]", line)] == []


def test_the_library_exports_nothing():
    if not LIBRARY.exists():
        pytest.skip("the library is not built in place")
    exported = symbols("-D", "--defined-only", LIBRARY)
    assert [line for line in exported if "tripletops" in line] == []


def test_there_are_isa_files():
    assert {path.stem for path in ISA_FILES} >= {"avx2", "avx512"}


@pytest.mark.parametrize("path", ISA_FILES, ids=lambda path: path.stem)
def test_isa_files_define_no_weak_symbol(path, tmp_path):
    # Of weak definitions the linker keeps any one, so the baseline could end up with AVX-512 code.
    out = tmp_path / "kernel.o"
    run(tool("g++"), *build_flags(), "-fPIC", f"-I{ROOT / 'csrc'}", "-c", path, "-o", out)
    defined = symbols("--defined-only", out)
    assert any("tripletops" in line for line in defined), "nothing was read"
    assert [line for line in defined if re.search(r"^\S+ [WwVvu] ", line)] == []


def test_no_flag_reaches_beyond_the_baseline():
    assert [flag for flag in build_flags() if flag.startswith("-m") or "fast" in flag] == []
    assert "-ffp-contract=off" in build_flags()


def test_nothing_is_compiled_at_import():
    program = """
import sys, torch
started = []
sys.addaudithook(
    lambda event, args: started.append((event, args))
    if event in ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork") else None
)
import tripletops, tripletops.info
tripletops.info.report()
assert not started, started
assert "torch.utils.cpp_extension" not in sys.modules
assert "triton" not in sys.modules
"""
    run(sys.executable, "-c", program)


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory) -> Path:
    """A copy of what the packages are made from, so that nothing is left behind in the tree itself."""
    tree = tmp_path_factory.mktemp("source")
    for name in ("tripletops", "csrc"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tree)
    return tree


def in_tree(source_tree: Path) -> set[str]:
    files = (path for room in ("tripletops", "csrc") for path in (source_tree / room).rglob("*"))
    return {path.relative_to(source_tree).as_posix() for path in files if path.is_file()}


def test_sdist_has_all_sources(source_tree, tmp_path):
    pytest.importorskip("setuptools")
    pytest.importorskip("pybind11")
    run(sys.executable, "setup.py", "-q", "sdist", "-d", tmp_path, cwd=source_tree)
    (archive,) = tmp_path.glob("tripletops-*.tar.gz")
    with tarfile.open(archive) as file:
        packed = {name.partition("/")[2] for name in file.getnames()}
    assert "tripletops/py.typed" in packed
    assert in_tree(source_tree) <= packed
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md"} <= packed


def test_wheel_has_the_package_and_nothing_else(source_tree, tmp_path):
    pytest.importorskip("setuptools")
    pytest.importorskip("pybind11")
    run(sys.executable, "setup.py", "-q", "build_py", "-d", tmp_path, cwd=source_tree)
    packed = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert "tripletops/py.typed" in packed
    assert packed == {name for name in in_tree(source_tree) if name.startswith("tripletops/")}


def test_version_is_said_once():
    import tripletops

    assert re.fullmatch(r"\d+\.\d+\.\d+", tripletops.__version__)
    assert tripletops.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert not re.search(
        r"^version\s*=\s*\"", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )


def test_no_machine_paths_are_committed():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = run(tool("git"), "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    machine_path = re.compile(r"(?<![\w.}])/(?:root|home|work|opt|tmp|Users)/\w")
    found = []
    for name in listed:
        path = ROOT / name
        if path.suffix in {".png", ".jpg", ".svg"} or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if machine_path.search(line):
                found.append(f"{name}:{number}: {line.strip()}")
    assert found == []


def test_ci_runs_the_readmes_test_command():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8")
