"""`python -m tripletops.info`: what is installed, what is usable here and, for the rest, why not."""

from __future__ import annotations

import os
import platform
from textwrap import indent

import torch

import tripletops
from tripletops.backends.cpu import isa, isa_variants

__all__ = ["isa", "isa_variants", "report"]

_WIDTH = 20


def report() -> str:
    """The page that `python -m tripletops.info` prints."""
    sections = {
        "versions": {
            "tripletops": tripletops.__version__,
            "torch": torch.__version__,
            "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        },
        "backends": tripletops.backends(),
        "cpu kernels": {
            "instruction sets": ", ".join(isa_variants()) or "none",
            "in use": isa() or "none",
            "threads": str(torch.get_num_threads()),
        },
        "environment": {
            name: os.environ.get(name, "not set") for name in ("TRIPLETOPS_BACKEND", "TRIPLETOPS_ISA")
        },
    }
    return "\n\n".join(f"{title}\n{_lines(entries)}" for title, entries in sections.items())


def _lines(entries: dict[str, str]) -> str:
    # A loader's message may have several lines: the further ones are set under the first.
    return "\n".join(
        f"  {name:<{_WIDTH}}{indent(value, ' ' * (_WIDTH + 2)).lstrip()}" for name, value in entries.items()
    )


if __name__ == "__main__":
    print(report())
