"""`python -m tripletops.info`: what is installed, what is usable here and, for the rest, why not."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from textwrap import indent
from typing import TYPE_CHECKING

import torch

import tripletops
from tripletops.backends import INTERPRETED
from tripletops.backends.cpu import instruction_sets, isa, using_certified

if TYPE_CHECKING:
    from tripletops.backends.triton.catalogue import Compilation

__all__ = ["gpu", "gpu_kernels", "instruction_sets", "isa", "report", "triton_version", "using_certified"]

_WIDTH = 20
_VARIABLES = (
    "TRIPLETOPS_BACKEND",
    "TRIPLETOPS_ISA",
    "TRIPLETOPS_CERTIFIED",
    "TRIPLETOPS_AUTOTUNE",
    "TRITON_INTERPRET",
)


def report() -> str:
    """The page that `python -m tripletops.info` prints."""
    sections = {
        "versions": {
            "tripletops": tripletops.__version__,
            "torch": torch.__version__,
            "triton": triton_version() or "none",
            "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        },
        "backends": tripletops.backends(),
        "cpu kernels": {
            "instruction sets": ", ".join(instruction_sets()) or "none",
            "in use": isa() or "none",
            "threads": str(torch.get_num_threads()),
        },
        "gpu kernels": {
            "GPU": ", ".join(gpu() or ["none"]),
            "interpreter": "on" if INTERPRETED else "off",
        },
        "environment": {name: os.environ.get(name, "not set") for name in _VARIABLES},
    }
    return "\n\n".join(f"{title}\n{_lines(entries)}" for title, entries in sections.items())


def triton_version() -> str | None:
    """The version of triton that is installed, found without importing it; None: none is."""
    # The wheels of other indexes have other names: pytorch-triton, triton-rocm, …
    for distribution in metadata.packages_distributions().get("triton", ()):
        return metadata.version(distribution)
    return None


def gpu() -> tuple[str, str] | None:
    """The name and the target ("sm_90", "gfx942") of the GPU that torch would use; None: there is none."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if torch.version.hip:
        return properties.name, properties.gcnArchName.partition(":")[0]
    return properties.name, f"sm_{properties.major}{properties.minor}"


def gpu_kernels() -> tuple[Compilation, ...]:
    """Every GPU kernel in every configuration that is shipped, as it can be compiled where no GPU is."""
    from tripletops.backends.triton.catalogue import compilations

    return compilations()


def _lines(entries: dict[str, str]) -> str:
    # A loader's message may have several lines: the further ones are set under the first.
    return "\n".join(
        f"  {name:<{_WIDTH}}{indent(value, ' ' * (_WIDTH + 2)).lstrip()}" for name, value in entries.items()
    )


if __name__ == "__main__":
    print(report())
