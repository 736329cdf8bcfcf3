"""The registry: what is usable, what is picked, that a refusal says why, and the environment variables."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import tripletops as T
from tripletops.backends import REGISTRY, cpu, resolve

registry: Any = import_module("tripletops.backends")
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
USABLE = T.backends()["cpu"] == "usable"
needs_kernels = pytest.mark.skipif(not USABLE, reason=f"backend cpu: {T.backends()['cpu']}")

CALL = """
import torch, tripletops as T
emb, labels = torch.arange(24.0).reshape(6, 4).sin(), torch.arange(6) // 2
"""


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, with these environment variables and no others of ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRIPLETOPS_")}
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


class TestBackends:
    def test_every_backend_is_told_of(self):
        told = T.backends()
        assert list(told) == ["cpu", "triton", "reference"]
        assert told["reference"] == "usable"
        assert told["triton"] == "not part of this version of tripletops"
        assert all(isinstance(text, str) and text for text in told.values())

    def test_a_reason_is_told(self, without_kernels):
        assert T.backends()["cpu"] == without_kernels

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
    def test_reference_runs_anywhere_but_only_by_name(self, device, without_kernels):
        assert resolve("reference", device) == "reference"
        with pytest.raises(RuntimeError, match="reference: usable with backend='reference', never picked"):
            resolve(None, device)

    def test_refusal_lists_every_backend(self, without_kernels):
        for backend in ("cpu", None):
            with pytest.raises(RuntimeError) as caught:
                resolve(backend, CPU)
            first, *reasons = str(caught.value).splitlines()
            assert ("no backend can run" if backend is None else "backend='cpu' cannot run") in first
            assert "cpu" in first
            assert reasons == [
                f"  cpu: {without_kernels}",
                "  triton: not part of this version of tripletops",
                "  reference: usable with backend='reference', never picked by itself",
            ]

    @needs_kernels
    def test_refusal_for_another_device(self):
        for backend in ("cpu", None):
            with pytest.raises(RuntimeError, match="cuda:0") as caught:
                resolve(backend, CUDA)
            assert "cpu: reads cpu tensors, these are on cuda:0" in str(caught.value)
            assert "triton: not part of this version" in str(caught.value)

    def test_triton_is_refused_by_name(self):
        with pytest.raises(RuntimeError, match="backend='triton' cannot run"):
            resolve("triton", CUDA)

    @pytest.mark.parametrize("word", ["gpu", "", "CPU", 1, ["cpu"]], ids=repr)
    def test_unknown_word(self, word):
        with pytest.raises(ValueError, match="'cpu', 'triton', 'reference'") as caught:
            resolve(word, CPU)
        assert f"backend={word!r}" in str(caught.value)

    def test_a_usable_backend_that_was_not_asked_for_is_offered(self, monkeypatch):
        monkeypatch.setattr(cpu, "_reason", None)
        with pytest.raises(RuntimeError, match="cpu: usable with backend='cpu'"):
            resolve("triton", CPU)

    def test_forced(self, monkeypatch):
        monkeypatch.setattr(registry, "FORCED", "reference")
        assert resolve(None, CPU) == "reference"
        monkeypatch.setattr(registry, "FORCED", "triton")
        assert resolve("reference", CPU) == "reference"
        with pytest.raises(RuntimeError, match="TRIPLETOPS_BACKEND='triton' cannot run"):
            resolve(None, CPU)
        monkeypatch.setattr(registry, "FORCED", "gpu")
        with pytest.raises(ValueError, match=r"TRIPLETOPS_BACKEND='gpu'.*'cpu', 'triton', 'reference'"):
            resolve(None, CPU)


class TestLoading:
    def test_missing_library(self, monkeypatch, tmp_path):
        monkeypatch.setattr(cpu, "__file__", str(tmp_path / "backends" / "cpu.py"))
        reason = cpu._load()
        assert reason is not None
        assert "_C.abi3.so is missing" in reason
        assert "pip install --no-build-isolation ." in reason

    @needs_kernels
    def test_library_of_another_torch(self, monkeypatch, tmp_path):
        (tmp_path / "_C.abi3.so").write_bytes(b"not a library")
        monkeypatch.setattr(cpu, "__file__", str(tmp_path / "backends" / "cpu.py"))
        reason = cpu._load()
        assert reason is not None
        assert "built for torch >= 2.10" in reason
        assert f"found torch {torch.__version__}" in reason
        assert "pip install --no-build-isolation ." in reason
        assert "invalid ELF header" in reason or "_C.abi3.so" in reason

    def test_without_kernels_the_rest_works(self, without_kernels):
        emb, labels = torch.eye(4, requires_grad=True), torch.tensor([0, 0, 1, 1])
        with pytest.raises(RuntimeError, match=without_kernels):
            T.batch_hard_loss(emb, labels)
        T.batch_hard_loss(emb, labels, backend="reference").backward()
        assert cpu.isa() is None


@needs_kernels
class TestInstructionSets:
    def test_best_is_in_use(self):
        variants = cpu.isa_variants()
        assert variants[0] == "scalar"
        assert set(variants) <= {"scalar", "avx2", "avx512"}
        asked = os.environ.get("TRIPLETOPS_ISA")
        assert cpu.isa() == (asked or variants[-1])

    @pytest.mark.parametrize("isa", cpu.isa_variants())
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
        assert ", ".join(cpu.isa_variants()) in run.stdout


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
        assert f"instruction sets {', '.join(cpu.isa_variants()) or 'none'}" in lines
        assert "TRIPLETOPS_BACKEND reference" in lines
        assert "TRIPLETOPS_ISA not set" in lines

    @needs_kernels
    def test_in_use(self):
        run = python("-m", "tripletops.info", TRIPLETOPS_ISA="scalar")
        lines = {" ".join(line.split()) for line in run.stdout.splitlines()}
        assert {"cpu usable", "in use scalar", "TRIPLETOPS_ISA scalar"} <= lines

    @needs_kernels
    def test_a_bad_setting_is_explained(self):
        run = python("-m", "tripletops.info", TRIPLETOPS_ISA="sse9", TRIPLETOPS_BACKEND="gpu")
        assert run.returncode == 0, run.stderr
        assert "TRIPLETOPS_ISA='sse9' is not usable" in run.stdout

    def test_a_reason_of_several_lines_stays_in_its_column(self):
        from tripletops.info import _lines

        assert _lines({"cpu": "one\ntwo"}) == "  cpu                 one\n                      two"
