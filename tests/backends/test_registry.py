"""The registry: what is usable, what is picked, that a refusal says why, and the environment variables."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion

import tripletops as T
from tripletops import info
from tripletops.backends import REGISTRY, cpu, resolve

registry: Any = import_module("tripletops.backends")
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
USABLE = T.backends()["cpu"] == "usable"
needs_kernels = pytest.mark.skipif(not USABLE, reason=f"backend cpu: {T.backends()['cpu']}")

CALL = """
import torch, tripletops as T
emb, labels = torch.arange(24.0).reshape(6, 4).sin(), torch.arange(6) // 2
"""


NO_TRITON = "the package triton is missing; `pip install triton`, or `pip install tripletops[gpu]`"
NO_GPU = (
    f"torch {torch.__version__} finds no GPU here (TRITON_INTERPRET=1 in the environment runs the kernels on "
    "CPU tensors, slowly, for tests)"
)


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, with these environment variables and no others of ours."""
    ours = ("TRIPLETOPS_", "TRITON_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    root = str(Path(T.__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [kept.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**kept, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> str:
    """As on a machine where the compiled library cannot be loaded."""
    reason = "the compiled library is somewhere else"
    monkeypatch.setattr(cpu, "_reason", reason)
    return reason


@pytest.fixture(autouse=True)
def nothing_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FORCED", None)


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(registry, "_HAS_TRITON", False)
    return NO_TRITON


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(registry, "_HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return NO_GPU


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def gpu_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors that say they are on a GPU, and hold nothing."""
    with FakeTensorMode():
        return torch.empty(6, 4, device="cuda"), torch.empty(6, dtype=torch.int64, device="cuda")


class TestBackends:
    def test_every_backend_is_told_of(self):
        told = T.backends()
        assert list(told) == ["cpu", "triton", "reference"]
        assert told["reference"] == "usable"
        assert all(isinstance(text, str) and text for text in told.values())

    def test_a_reason_is_told(self, without_kernels):
        assert T.backends()["cpu"] == without_kernels

    def test_no_triton_is_told(self, without_triton):
        assert T.backends()["triton"] == without_triton

    def test_no_gpu_is_told(self, without_gpu):
        assert T.backends()["triton"] == without_gpu

    def test_a_gpu_is_usable(self, with_gpu):
        assert T.backends()["triton"] == "usable"

    def test_the_answer_is_the_callers(self):
        T.backends().clear()
        assert list(T.backends()) == list(REGISTRY)

    def test_function_and_package_share_a_name(self):
        assert callable(T.backends)
        assert import_module("tripletops.backends").backends is T.backends


class TestResolve:
    @needs_kernels
    def test_cpu_tensors(self):
        assert resolve(None, CPU) == "cpu"
        assert resolve("cpu", CPU) == "cpu"

    @pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
    def test_reference_runs_anywhere_but_only_by_name(self, device, without_kernels, without_gpu):
        assert resolve("reference", device) == "reference"
        with pytest.raises(RuntimeError, match="reference: usable with backend='reference', never picked"):
            resolve(None, device)

    def test_refusal_lists_every_backend(self, without_kernels, without_gpu):
        for backend in ("cpu", None):
            with pytest.raises(RuntimeError) as caught:
                resolve(backend, CPU)
            first, *reasons = str(caught.value).splitlines()
            assert ("no backend can run" if backend is None else "backend='cpu' cannot run") in first
            assert "cpu" in first
            assert reasons == [
                f"  cpu: {without_kernels}",
                f"  triton: {without_gpu}",
                "  reference: usable with backend='reference', never picked by itself",
            ]

    @needs_kernels
    def test_refusal_for_another_device(self, without_triton):
        for backend in ("cpu", None):
            with pytest.raises(RuntimeError, match="cuda:0") as caught:
                resolve(backend, CUDA)
            assert "cpu: reads cpu tensors, these are on cuda:0" in str(caught.value)
            assert f"triton: {without_triton}" in str(caught.value)

    @needs_kernels
    def test_gpu_tensors(self, with_gpu):
        assert resolve(None, CUDA) == "triton"
        assert resolve("triton", CUDA) == "triton"
        assert resolve(None, CPU) == "cpu"

    def test_triton_is_refused_by_name(self, without_gpu):
        for device in (CPU, CUDA):
            with pytest.raises(RuntimeError, match="backend='triton' cannot run") as caught:
                resolve("triton", device)
            assert f"triton: {without_gpu}" in str(caught.value)

    def test_triton_is_refused_where_it_is_usable_for_other_tensors(self, with_gpu):
        with pytest.raises(RuntimeError, match="triton: reads cuda tensors, these are on cpu"):
            resolve("triton", CPU)

    @pytest.mark.parametrize("word", ["gpu", "", "CPU", 1, ["cpu"]], ids=repr)
    def test_unknown_word(self, word):
        with pytest.raises(ValueError, match="'cpu', 'triton', 'reference'") as caught:
            resolve(word, CPU)
        assert f"backend={word!r}" in str(caught.value)

    def test_a_usable_backend_that_was_not_asked_for_is_offered(self, monkeypatch):
        monkeypatch.setattr(cpu, "_reason", None)
        with pytest.raises(RuntimeError, match="cpu: usable with backend='cpu'"):
            resolve("triton", CPU)

    def test_forced(self, monkeypatch, without_gpu):
        monkeypatch.setattr(registry, "FORCED", "reference")
        assert resolve(None, CPU) == "reference"
        monkeypatch.setattr(registry, "FORCED", "triton")
        assert resolve("reference", CPU) == "reference"
        with pytest.raises(RuntimeError, match="TRIPLETOPS_BACKEND='triton' cannot run"):
            resolve(None, CPU)
        monkeypatch.setattr(registry, "FORCED", "gpu")
        with pytest.raises(ValueError, match=r"TRIPLETOPS_BACKEND='gpu'.*'cpu', 'triton', 'reference'"):
            resolve(None, CPU)


class TestGpuTensors:
    @pytest.mark.parametrize("function", [T.batch_hard_loss, T.multi_similarity_loss])
    def test_what_is_missing_is_named(self, function, gpu_batch, without_triton):
        with pytest.raises(RuntimeError, match="no backend can run tensors on cuda:0") as caught:
            function(*gpu_batch)
        assert "pip install triton" in str(caught.value)

    def test_triton_runs_them(self, gpu_batch, with_gpu):
        """Tensors that hold nothing go all the way but for the kernels. (A gradient would need the GPU.)"""
        loss = T.batch_hard_loss(*gpu_batch)
        assert (loss.device, loss.shape) == (CUDA, ())


class TestLoading:
    """Each cause has a message of its own, which names what to do about it."""

    @pytest.fixture
    def tree(self, monkeypatch, tmp_path) -> Path:
        """A source tree in which nothing is built, and nothing else to import tripletops from."""
        tree = tmp_path / "tree"
        (tree / "tripletops" / "backends").mkdir(parents=True)
        monkeypatch.setattr(cpu, "__file__", str(tree / "tripletops" / "backends" / "cpu.py"))
        monkeypatch.setattr(sys, "path", [str(tree)])
        return tree

    def test_missing_library(self, tree):
        reason = cpu._load()
        assert reason is not None
        assert reason.startswith(f"the compiled library {tree}/tripletops/_C.abi3.so is missing")
        assert "`pip install --no-build-isolation -e .`" in reason
        assert "torch" not in reason

    def test_a_source_tree_that_hides_the_installed_package(self, tree, tmp_path):
        (tmp_path / "site" / "tripletops").mkdir(parents=True)
        sys.path.append(str(tmp_path / "site"))
        assert "is missing" in (cpu._load() or "")  # what is there has no library either
        (tmp_path / "site" / "tripletops" / "_C.abi3.so").touch()
        reason = cpu._load()
        assert reason is not None
        assert reason.startswith(f"the source tree {tree} has no compiled library and hides the tripletops ")
        assert f"installed in {tmp_path / 'site'}" in reason
        assert "run from another folder" in reason
        assert "`pip install --no-build-isolation -e .`" in reason

    def test_an_older_torch(self, tree, monkeypatch):
        (tree / "tripletops" / "_C.abi3.so").touch()
        monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.1+cpu"))
        assert cpu._load() == "the compiled library needs torch >= 2.10, found torch 2.9.1+cpu"

    def test_what_the_loader_says(self, tree):
        library = tree / "tripletops" / "_C.abi3.so"
        library.write_bytes(b"not a library")
        reason = cpu._load()
        assert reason is not None
        assert reason.startswith("the compiled library cannot be loaded: ")
        assert f"{library}: file too short" in reason
        assert "`pip install --no-build-isolation -e .`" in reason
        assert "torch" not in reason.replace(str(tree), "")

    @needs_kernels
    def test_a_library_of_another_version(self, tree):
        """Any other library does: what the package asks for is not in it."""
        other = next(Path(torch.__file__).parent.glob("lib/libc10.so"))
        (tree / "tripletops" / "_C.abi3.so").symlink_to(other)
        reason = cpu._load()
        assert reason is not None
        assert "undefined symbol: tripletops_isa" in reason
        assert "`pip install --no-build-isolation -e .`" in reason

    @needs_kernels
    def test_a_library_with_other_words(self, monkeypatch):
        """A rule or a number more, or in another place, and every code would mean something else."""
        monkeypatch.setattr(cpu, "fingerprint", lambda: "positive hard easy")
        library, reason = cpu._library, cpu._load()
        assert reason is not None
        assert reason.startswith("the compiled library was built from other sources; build it with ")
        assert cpu._library is library  # the one that is in use stays

    @needs_kernels
    def test_the_kernels_of_the_tests_are_not_needed(self):
        """They are built for one version of Python, and no wheel has them."""
        text = """
import sys
sys.modules["tripletops._kernels"] = None
import tripletops.info
print(T.backends()["cpu"], tripletops.info.isa(), T.batch_hard_loss(emb, labels).item())
"""
        run = python("-c", text.replace("import tripletops.info", CALL + "import tripletops.info"))
        assert run.returncode == 0, run.stderr
        assert run.stdout.split()[:2] == ["usable", cpu.instruction_sets()[-1]]

    def test_without_kernels_the_rest_works(self, without_kernels):
        emb, labels = torch.eye(4, requires_grad=True), torch.tensor([0, 0, 1, 1])
        with pytest.raises(RuntimeError, match=without_kernels):
            T.batch_hard_loss(emb, labels)
        T.batch_hard_loss(emb, labels, backend="reference").backward()
        assert cpu.isa() is None


@needs_kernels
class TestInstructionSets:
    def test_best_is_in_use(self):
        usable = cpu.instruction_sets()
        assert usable[0] == "baseline"
        assert set(usable) <= {"baseline", "avx2", "avxvnni", "avx512", "avx512vnni"}
        asked = os.environ.get("TRIPLETOPS_ISA")
        assert cpu.isa() == (asked or usable[-1])

    @pytest.mark.parametrize("isa", cpu.instruction_sets())
    def test_override(self, isa):
        text = "from tripletops.backends.cpu import isa; print(isa(), T.batch_hard_loss(emb, labels).item())"
        run = python("-c", CALL + text, TRIPLETOPS_ISA=isa)
        assert run.returncode == 0, run.stderr
        used, loss = run.stdout.split()
        assert used == isa
        emb, labels = torch.arange(24.0).reshape(6, 4).sin(), torch.arange(6) // 2
        assert float(loss) == pytest.approx(T.batch_hard_loss(emb, labels, backend="reference").item())

    def test_unusable_isa_is_told_when_asked_for_never_at_import(self):
        text = """
print(T.batch_hard_loss(emb, labels, backend="reference").item())
try:
    T.batch_hard_loss(emb, labels)
except RuntimeError as error:
    print(error)
"""
        run = python("-c", CALL + text, TRIPLETOPS_ISA="sse9")
        assert run.returncode == 0, run.stderr
        assert "TRIPLETOPS_ISA='sse9' is not usable" in run.stdout
        assert ", ".join(cpu.instruction_sets()) in run.stdout

    def test_another_one_for_a_while(self):
        before = cpu.isa()
        for name in cpu.instruction_sets():
            with cpu.using_isa(name):
                assert cpu.isa() == name
                T.batch_hard_loss(torch.eye(4), torch.tensor([0, 0, 1, 1]))
            assert cpu.isa() == before
        with pytest.raises(ZeroDivisionError), cpu.using_isa("baseline"):
            raise ZeroDivisionError
        assert cpu.isa() == before

    def test_an_unknown_one_is_refused(self):
        names = ", ".join(cpu.instruction_sets())
        with (
            pytest.raises(ValueError, match=f"'sse9' is not one of the instruction sets {names}"),
            cpu.using_isa("sse9"),
        ):
            pass
        assert cpu.isa() in cpu.instruction_sets()

    def test_none_without_kernels(self, without_kernels):
        with pytest.raises(RuntimeError, match=without_kernels), cpu.using_isa("baseline"):
            pass


class TestEnvironment:
    def test_backend_for_a_whole_process(self):
        text = "from tripletops.backends import resolve; print(resolve(None, emb.device))"
        run = python("-c", CALL + text, TRIPLETOPS_BACKEND="reference")
        assert run.returncode == 0, run.stderr
        assert run.stdout.split() == ["reference"]

    def test_the_argument_comes_first(self):
        text = "print(T.batch_hard_loss(emb, labels, backend='reference').item())"
        assert python("-c", CALL + text, TRIPLETOPS_BACKEND="triton").returncode == 0

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            ("triton", "RuntimeError: TRIPLETOPS_BACKEND='triton' cannot run tensors on cpu here"),
            ("gpu", "ValueError: TRIPLETOPS_BACKEND='gpu' is not one of 'cpu', 'triton', 'reference'"),
        ],
    )
    def test_what_cannot_run_is_refused_at_the_call(self, value, text):
        run = python(
            "-c", CALL + "print('imported'); T.batch_hard_loss(emb, labels)", TRIPLETOPS_BACKEND=value
        )
        assert run.stdout.split() == ["imported"]
        assert text in run.stderr

    @needs_kernels
    def test_empty_is_unset(self):
        run = python("-c", CALL + "T.batch_hard_loss(emb, labels)", TRIPLETOPS_BACKEND="")
        assert run.returncode == 0, run.stderr


class TestTriton:
    """In processes of their own, since what counts is settled by imports and by the environment."""

    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        if find_spec("triton") is None:
            pytest.skip("triton is not installed")

    def test_it_is_not_imported_before_it_is_needed(self):
        text = """
import sys, tripletops.info
T.batch_hard_loss(emb.requires_grad_(), labels, backend="reference").backward()
T.backends(), tripletops.info.report()
assert not {"triton", "tripletops.backends.triton"} & sys.modules.keys()
"""
        run = python("-c", CALL + text)
        assert run.returncode == 0, run.stderr

    def test_nothing_breaks_where_it_is_missing(self):
        text = """
import sys
sys.modules["triton"] = None
import tripletops.info
from tripletops.backends import resolve
print(T.backends()["triton"])
tripletops.info.report()
try:
    resolve(None, torch.device("cuda", 0))
except RuntimeError as error:
    print(error)
"""
        run = python("-c", text.replace("import tripletops.info", CALL + "import tripletops.info"))
        assert run.returncode == 0, run.stderr
        told, refusal, _, reason, _ = run.stdout.splitlines()
        assert told == NO_TRITON
        assert refusal == "no backend can run tensors on cuda:0 here"
        assert reason == f"  triton: {NO_TRITON}"

    @pytest.mark.parametrize("word", ["1", "ON"])
    def test_the_interpreter_is_for_cpu_tensors_but_only_by_name(self, word):
        text = """
from tripletops.backends import resolve
print(T.backends()["triton"], resolve("triton", emb.device), resolve("reference", emb.device))
try:
    print(resolve(None, emb.device))
except RuntimeError as error:
    print(error)
"""
        run = python("-c", CALL + text, TRITON_INTERPRET=word)
        assert run.returncode == 0, run.stderr
        told, *picked = run.stdout.splitlines()
        assert told == "usable triton reference"
        assert picked == ["cpu"] if USABLE else "usable with backend='triton', never picked" in run.stdout

    def test_other_words_are_no(self):
        run = python("-c", CALL + "T.batch_hard_loss(emb, labels, backend='triton')", TRITON_INTERPRET="0")
        assert "RuntimeError: backend='triton' cannot run tensors on cpu here" in run.stderr

    def test_a_whole_process(self):
        text = """
emb.requires_grad_()
loss = T.batch_hard_loss(emb, labels, margin=5.0)
loss.backward()
expected = T.batch_hard_loss(emb.detach(), labels, margin=5.0, backend="reference")
print(torch.allclose(loss, expected), emb.grad.any().item())
"""
        run = python("-c", CALL + text, TRITON_INTERPRET="1", TRIPLETOPS_BACKEND="triton")
        assert run.stdout.split() == ["True", "True"], run.stderr


class TestInfo:
    def test_page(self):
        run = python("-m", "tripletops.info", TRIPLETOPS_BACKEND="reference")
        assert run.returncode == 0, run.stderr
        assert run.stderr == ""
        lines = {" ".join(line.split()) for line in run.stdout.splitlines()}
        assert f"tripletops {T.__version__}" in lines
        assert f"torch {torch.__version__}" in lines
        assert "reference usable" in lines
        assert f"triton {T.backends()['triton']}" in lines
        assert f"instruction sets {', '.join(cpu.instruction_sets()) or 'none'}" in lines
        assert "TRIPLETOPS_BACKEND reference" in lines
        assert "TRIPLETOPS_ISA not set" in lines
        assert "TRITON_INTERPRET not set" in lines
        assert "TRIPLETOPS_AUTOTUNE not set" in lines
        assert f"triton {info.triton_version() or 'none'}" in lines
        assert "interpreter off" in lines
        assert f"GPU {', '.join(info.gpu() or ['none'])}" in lines

    def test_interpreter(self):
        run = python("-m", "tripletops.info", TRITON_INTERPRET="1")
        lines = {" ".join(line.split()) for line in run.stdout.splitlines()}
        assert {"interpreter on", "TRITON_INTERPRET 1"} <= lines

    @pytest.mark.parametrize(("hip", "target"), [(None, "sm_90"), ("7.1", "gfx942")], ids=["NVIDIA", "AMD"])
    def test_gpu(self, hip, target, with_gpu, monkeypatch):
        properties = SimpleNamespace(name="Fast GPU", major=9, minor=0, gcnArchName="gfx942:sramecc+:xnack-")
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        assert info.gpu() == ("Fast GPU", target)
        assert f"Fast GPU, {target}" in info.report()

    def test_no_gpu(self, without_gpu):
        assert info.gpu() is None

    def test_gpu_kernels(self):
        pytest.importorskip("triton")
        assert {record.target for record in info.gpu_kernels()} == {"sm_80", "sm_90", "sm_100", "gfx942"}

    def test_version_of_triton(self, monkeypatch):
        assert info.triton_version() == (version("triton") if find_spec("triton") else None)
        monkeypatch.setattr(info.metadata, "packages_distributions", dict)
        assert info.triton_version() is None

    @needs_kernels
    def test_in_use(self):
        run = python("-m", "tripletops.info", TRIPLETOPS_ISA="baseline")
        lines = {" ".join(line.split()) for line in run.stdout.splitlines()}
        assert {"cpu usable", "in use baseline", "TRIPLETOPS_ISA baseline"} <= lines

    @needs_kernels
    def test_a_bad_setting_is_explained(self):
        run = python("-m", "tripletops.info", TRIPLETOPS_ISA="sse9", TRIPLETOPS_BACKEND="gpu")
        assert run.returncode == 0, run.stderr
        assert "TRIPLETOPS_ISA='sse9' is not usable" in run.stdout

    def test_a_reason_of_several_lines_stays_in_its_column(self):
        from tripletops.info import _lines

        assert _lines({"cpu": "one\ntwo"}) == "  cpu                 one\n                      two"
