"""Which backend runs a call, and, for those that cannot, why not.

Every backend is one record in `REGISTRY`. `resolve` names the backend of a call before anything is
dispatched, so that a call that cannot run is refused with the reasons of all backends, instead of failing
somewhere inside one of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import torch

from tripletops.backends import cpu

# Read once: a lookup in os.environ costs as much as half the argument checks of a small batch.
FORCED = os.environ.get("TRIPLETOPS_BACKEND") or None
# Triton reads it when it is first imported, and takes these words for yes.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
_HAS_TRITON = find_spec("triton") is not None  # without importing it


class Backend(NamedTuple):
    name: str
    device: str | None  # whose tensors it is picked for; None: it has to be asked for by name
    reads: tuple[str, ...] | None  # the devices whose tensors it can read; None: any
    why_not: Callable[[], str | None]  # None where it is usable in this process


def _triton_why_not() -> str | None:
    if not _HAS_TRITON:
        return "the package triton is missing; `pip install triton`, or `pip install tripletops[gpu]`"
    if not INTERPRETED and not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} finds no GPU here (TRITON_INTERPRET=1 in the environment runs the "
            "kernels on CPU tensors, slowly, for tests)"
        )
    return None


def _reference_why_not() -> str | None:
    return None


REGISTRY = {
    backend.name: backend
    for backend in (
        Backend("cpu", "cpu", ("cpu",), cpu.why_not),
        Backend("triton", "cuda", ("cuda", "cpu") if INTERPRETED else ("cuda",), _triton_why_not),
        Backend("reference", None, None, _reference_why_not),
    )
}

_CPU = torch.device("cpu")


def backends() -> dict[str, str]:
    """What is usable in this process: every backend with the word ``"usable"``, or with the reason why not.

    >>> tripletops.backends()
    {'cpu': 'usable', 'triton': 'the package triton is missing; …', 'reference': 'usable'}
    """
    return {backend.name: backend.why_not() or "usable" for backend in REGISTRY.values()}


def check_word(backend: str | None, source: str = "backend=") -> None:
    """Raise `ValueError` unless `backend` is None or the name of a backend, usable or not."""
    if backend is not None and not (isinstance(backend, str) and backend in REGISTRY):
        raise ValueError(f"{source}{backend!r} is not one of {', '.join(map(repr, REGISTRY))}")


def resolve(backend: str | None, device: torch.device) -> str:
    """The name of the backend that runs a call on tensors of `device`.

    `backend` decides; where it is None, the environment variable ``TRIPLETOPS_BACKEND`` as it was when
    tripletops was imported; where that is not set either, the backend made for the device. `RuntimeError`,
    with every backend's reason, where that one cannot run; `ValueError` where none has that name.
    """
    if backend is None and FORCED is None and device == _CPU and cpu.why_not() is None:
        return "cpu"
    source = "backend="
    if backend is None and FORCED is not None:
        backend, source = FORCED, "TRIPLETOPS_BACKEND="
    check_word(backend, source)
    for candidate in REGISTRY.values():
        asked_for = candidate.name == backend if backend is not None else candidate.device == device.type
        if asked_for and _why_not_on(candidate, device) is None:
            return candidate.name
    asked = "no backend can" if backend is None else f"{source}{backend!r} cannot"
    reasons = (
        f"  {name}: {_why_not_on(record, device) or _usable(record, device)}"
        for name, record in REGISTRY.items()
    )
    raise RuntimeError("\n".join([f"{asked} run tensors on {device} here", *reasons]))


def _why_not_on(backend: Backend, device: torch.device) -> str | None:
    reason = backend.why_not()
    if reason is None and backend.reads is not None and device.type not in backend.reads:
        return f"reads {' and '.join(backend.reads)} tensors, these are on {device}"
    return reason


def _usable(backend: Backend, device: torch.device) -> str:
    note = "" if backend.device == device.type else ", never picked by itself"
    return f"usable with backend={backend.name!r}{note}"
