"""The sample that `make test` runs: chosen by the seed, and bounded."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def sampled(folder: Path, seed: int, seconds: float) -> tuple[list[str], str]:
    """The tests that were run, in order; and what is said of the sample."""
    options = ["--sample", str(seconds), "--sample-seed", str(seed), "-c", str(folder / "pytest.ini")]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.ptx.sample",
        *options,
    ]
    done = subprocess.run([*command, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 5), done.stdout + done.stderr  # 5: no test was run
    (said,) = re.findall(r".* tests by the seed .*", done.stdout)
    return re.findall(r"test_(\d+) PASSED", done.stdout), said


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    tests = "".join(f"def test_{i}():\n    pass\n\n\n" for i in range(20))
    (tmp_path / "test_some.py").write_text(tests, encoding="utf-8")
    return tmp_path


def test_the_seed_chooses_the_order(folder):
    first, said = sampled(folder, 7, 60)
    assert sorted(first, key=int) == [str(i) for i in range(20)] != first
    assert said.startswith("20 tests by the seed 7 (make test PTX_SEED=7); 0 were left out")
    assert sampled(folder, 7, 60)[0] == first != sampled(folder, 8, 60)[0]


def test_what_is_left_over_is_said(folder):
    tests, said = sampled(folder, 7, 0)
    assert tests == []
    assert "; 20 were left out" in said
