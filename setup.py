"""Build the compiled parts of tripletops; everything else is said in pyproject.toml.

`tripletops._C` holds the torch ops on torch's stable ABI and is loaded with `torch.ops.load_library`: it has
no `PyInit`, so one file serves every Python and every torch from 2.10 on, and so does a wheel.

`tripletops._kernels` shows the kernels to the tests on NumPy arrays, and knows nothing of torch. It serves
only the Python that it was built with, so it is built in place (`pip install -e`) and no wheel has it. The
kernels are compiled once and linked into both.

`TRIPLETOPS_SANITIZE=1` builds `_kernels` alone, under the address and undefined-behaviour sanitizers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.errors import CompileError
from torch.utils.cpp_extension import BuildExtension, get_cxx_compiler, include_paths, library_paths

SANITIZE = os.environ.get("TRIPLETOPS_SANITIZE") == "1"
TORCH_TARGET = "0x020a000000000000"  # 2.10, a byte each: the oldest torch that can load the ops

CSRC = Path("csrc")
GENERATED = Path("build") / "generated"  # headers that csrc/words.py writes
KERNELS = sorted(str(path) for path in [CSRC / "dispatch.cpp", *CSRC.glob("kernels/**/*.cpp")])
HEADERS = sorted(str(path) for path in CSRC.rglob("*.h"))
INCLUDED = [os.path.abspath(CSRC), os.path.abspath(CSRC / "kernels"), os.path.abspath(GENERATED)]

# Wider instruction sets are switched on by pragmas in their own files; a flag here would reach the baseline.
# The compiler must not fuse multiply and add by itself: the digits would change with the machine.
FLAGS = ["-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra"]
LINK_FLAGS: list[str] = []
if SANITIZE:
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    FLAGS += ["-O1", "-g", "-fno-omit-frame-pointer", *sanitizers]
    LINK_FLAGS += sanitizers


class Build(BuildExtension):
    """torch's ninja build, with the kernels compiled once for all extensions."""

    kernel_objects: list[str] | None = None

    def finalize_options(self) -> None:
        self.distribution.ext_modules = extensions(in_place=self.inplace or self.editable_mode)
        super().finalize_options()

    def run(self) -> None:
        check_compiler()
        # -B: a cached _words.pyc in the source tree would belong to nobody.
        subprocess.run([sys.executable, "-B", str(CSRC / "words.py"), str(GENERATED)], check=True)
        super().run()

    def build_extension(self, ext: Any) -> None:
        if self.kernel_objects is None:
            self.kernel_objects = self.compiler.compile(
                KERNELS,
                output_dir=self.build_temp,
                include_dirs=INCLUDED,
                extra_postargs=FLAGS,
                depends=HEADERS,
            )
        ext.extra_objects = [*ext.extra_objects, *self.kernel_objects]
        super().build_extension(ext)


class Wheel(bdist_wheel):
    """A wheel for one platform and every Python: requires-python in pyproject.toml says from which one on."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def check_compiler() -> None:
    """Refuse a compiler that fails on a small program: ninja's error would not say what to install."""
    compiler = get_cxx_compiler()  # a command line, which ninja gives to a shell too
    trial = subprocess.run(
        f"{compiler} -std=c++17 -fsyntax-only -x c++ -",
        shell=True,
        input="#include <vector>\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if trial.returncode != 0:
        said = trial.stderr.strip().replace("\n", " ") or f"exit status {trial.returncode}"
        raise CompileError(
            f"the C++ compiler `{compiler}` does not work ({said}): install GCC 12 or newer (Debian, Ubuntu: "
            "apt install g++), or name another one in the environment variable CXX"
        )


def extension(name: str, source: str, *, headers: list[str], flags: list[str], **options: Any) -> Extension:
    system = [f"-isystem{path}" for path in headers]  # no warnings out of other people's headers
    return Extension(
        name,
        [str(CSRC / source)],
        include_dirs=INCLUDED,
        extra_compile_args=[*FLAGS, *system, *flags],
        extra_link_args=LINK_FLAGS,
        depends=[*KERNELS, *HEADERS],
        language="c++",
        **options,
    )


ops = extension(
    "tripletops._C",
    "ops.cpp",
    headers=include_paths(),
    flags=[f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"],
    library_dirs=library_paths(),
    libraries=["torch", "torch_cpu"],
    py_limited_api=True,
)


def extensions(in_place: bool) -> list[Extension]:
    if not in_place and not SANITIZE:
        return [ops]
    import pybind11  # here, so that a wheel can be built without it

    kernels = extension("tripletops._kernels", "module.cpp", headers=[pybind11.get_include()], flags=[])
    return [kernels] if SANITIZE else [ops, kernels]


setup(ext_modules=extensions(in_place=False), cmdclass={"build_ext": Build, "bdist_wheel": Wheel})
