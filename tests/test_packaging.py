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
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "tripletops" / "_C.abi3.so"
CPU = ROOT / "tripletops" / "backends" / "cpu.py"
# One for each instruction set, which switches it on for itself; the baseline switches nothing on.
ISA_FILES = sorted((ROOT / "csrc" / "kernels" / "isa").glob("*.cpp"))


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


def test_the_library_exports_what_python_asks_for_and_nothing_else():
    if not LIBRARY.exists():
        pytest.skip("the library is not built in place")
    exported = symbols("-D", "--defined-only", LIBRARY)
    ours = {line.split(maxsplit=2)[-1] for line in exported if "tripletops" in line}
    asked = set(re.findall(r"library\.(tripletops_\w+)", CPU.read_text(encoding="utf-8")))
    assert ours == asked


def test_there_are_isa_files():
    assert {path.stem for path in ISA_FILES} >= {"baseline", "avx2", "avx512"}


def test_isa_files_alone_switch_instruction_sets_on():
    """The baseline is one of them, and switches nothing on: it would be the baseline no more."""
    sources = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp"))
    switching = [
        path for path in sources if re.search(r"#pragma GCC target|target\(", path.read_text("utf-8"))
    ]
    assert switching == [path for path in ISA_FILES if path.stem != "baseline"]


@pytest.fixture(scope="module")
def generated(tmp_path_factory) -> Path:
    """The headers that the build writes first."""
    folder = tmp_path_factory.mktemp("generated")
    run(sys.executable, ROOT / "csrc" / "words.py", folder)
    assert sorted(path.name for path in folder.iterdir()) == ["registry.h", "words.h"]
    return folder


def test_headers_are_written_without_torch(tmp_path):
    """And without the package, which needs torch."""
    program = """
import runpy, sys
sys.modules.update(dict.fromkeys(["torch", "numpy", "tripletops"]))
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    run(sys.executable, "-c", program, ROOT / "csrc" / "words.py", tmp_path)
    assert (tmp_path / "words.h").exists()


@pytest.mark.parametrize("path", ISA_FILES, ids=lambda path: path.stem)
def test_isa_files_define_no_weak_symbol(path, generated, tmp_path):
    # Of weak definitions the linker keeps any one, so the baseline could end up with AVX-512 code.
    out = tmp_path / "kernel.o"
    folders = [f"-I{folder}" for folder in (ROOT / "csrc", ROOT / "csrc" / "kernels", generated)]
    run(tool("g++"), *build_flags(), "-fPIC", *folders, "-c", path, "-o", out)
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
    """A copy of what wheels are made from, so that nothing is left behind in the tree itself."""
    pytest.importorskip("setuptools")
    tree = tmp_path_factory.mktemp("source")
    for name in ("tripletops", "csrc"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tree)
    return tree


def setup(tree: Path, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", *map(str, arguments)]
    environment = {**os.environ, **variables}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # where it is unset, a build may leave .pyc files behind
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> Path:
    """A stand-in: objects are empty, and linking copies the library that was built in place.

    So a wheel is made in seconds, by all steps of a real build, and it works.
    """
    if not LIBRARY.exists():
        pytest.skip("the library is not built in place")
    script = tmp_path_factory.mktemp("compiler") / "g++"
    script.write_text(
        f"""#!/bin/sh
for argument; do
  case $previous in -o) output=$argument ;; esac
  previous=$argument
done
case $output in
  *.o) : >"$output" ;;
  *.so) cp '{LIBRARY}' "$output" ;;
esac
""",
        encoding="utf-8",
    )
    script.chmod(0o755)
    return script


@pytest.fixture(scope="module")
def wheel(source_tree, compiler, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = setup(source_tree, "bdist_wheel", "-d", folder, CXX=str(compiler))
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_has_the_package_and_its_library_and_nothing_else(source_tree, unpacked):
    packed = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    files = (path for path in (source_tree / "tripletops").rglob("*") if path.is_file())
    sources = {path.relative_to(source_tree).as_posix() for path in files}
    assert {"tripletops/py.typed", "tripletops/__init__.pyi", "tripletops/_words.py"} <= sources
    assert {name for name in packed if ".dist-info/" not in name} == sources | {"tripletops/_C.abi3.so"}


def test_the_wheel_serves_every_python(wheel):
    """No file of it is made for one version of Python, and its name says so."""
    _, _, python, abi, platform = wheel.stem.split("-")
    assert (python, abi) == ("py3", "none")
    assert platform.startswith("linux_")


def test_the_wheel_works(unpacked, tmp_path):
    program = """
import sys, torch, tripletops
assert tripletops.backends()["cpu"] == "usable", tripletops.backends()
assert tripletops.__file__.startswith(sys.path[1]), tripletops.__file__
emb, labels = torch.eye(4, requires_grad=True), torch.tensor([0, 0, 1, 1])
tripletops.batch_hard_loss(emb, labels).backward()
assert emb.grad.any()
"""
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True)


def test_a_source_tree_that_hides_the_wheel_says_so(source_tree, unpacked):
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    command = [sys.executable, "-m", "tripletops.info"]
    page = subprocess.run(
        command, cwd=source_tree, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert f"the source tree {source_tree} has no compiled library and hides" in page
    assert f"installed in {unpacked}" in page


def test_builds_in_place_have_the_kernels_for_the_tests(source_tree, compiler, tmp_path):
    tree = shutil.copytree(source_tree, tmp_path / "tree", ignore=shutil.ignore_patterns("build"))
    built = setup(tree, "build_ext", "--inplace", CXX=str(compiler))
    assert built.returncode == 0, built.stderr
    names = sorted(path.name.split(".")[0] for path in tree.glob("tripletops/*.so"))
    assert names == ["_C", "_kernels"]
    assert sorted(path.name for path in tree.glob("build/generated/*")) == ["registry.h", "words.h"]


@pytest.mark.parametrize("command", ["no-such-compiler", "false"])
def test_a_build_without_a_compiler_says_what_to_install(source_tree, tmp_path, command):
    run = setup(source_tree, "build_ext", "-b", tmp_path, "-t", tmp_path, CXX=command)
    assert run.returncode != 0
    (line,) = (line for line in run.stderr.splitlines() if line.startswith("error: "))
    assert f"the C++ compiler `{command}` does not work" in line
    assert "install GCC 12 or newer (Debian, Ubuntu: apt install g++)" in line
    assert "CXX" in line
    assert "ninja" not in run.stderr
    assert "Traceback" not in run.stderr


def test_the_sdist_is_whole(tmp_path):
    """`make test` and `make demo` need all that git does not ignore, and nothing else is packed."""
    pytest.importorskip("setuptools")
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = run(tool("git"), "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    tracked = {name for name in listed if (ROOT / name).exists()}
    for name in tracked:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tripletops" / "_C.abi3.so").touch()  # as in a tree that has been used
    built = setup(tmp_path, "sdist", "-d", tmp_path / "dist")
    assert built.returncode == 0, built.stderr
    (archive,) = (tmp_path / "dist").glob("tripletops-*.tar.gz")
    with tarfile.open(archive) as file:
        packed = {member.name.partition("/")[2]: member for member in file.getmembers() if member.isfile()}
    made = {"PKG-INFO", "setup.cfg"}
    names = {name for name in packed if not name.startswith("tripletops.egg-info/")}
    assert sorted(tracked - names) == [], "MANIFEST.in forgets these"
    assert sorted(names - tracked - made) == []
    assert packed[".ci/run"].mode & 0o100


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
