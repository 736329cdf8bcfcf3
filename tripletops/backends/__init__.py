"""Which backend runs a call, and, for those that cannot, why not.

Every backend is one record in `REGISTRY`. `resolve` names the backend of a call before anything is
dispatched, so that a call that cannot run is refused with the reasons of all backends, instead of failing
somewhere inside one of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import torch

from tripletops.backends import cpu


class Backend(NamedTuple):
    name: str
    device: str | None  # whose tensors it reads; None: any device's, but only when asked for by name
    why_not: Callable[[], str | None]  # None where it is usable in this process


def _triton_why_not() -> str | None:
    return "not part of this version of tripletops"


def _reference_why_not() -> str | None:
    return None


REGISTRY = {
    backend.name: backend
    for backend in (
        Backend("cpu", "cpu", cpu.why_not),
        Backend("triton", "cuda", _triton_why_not),
        Backend("reference", None, _reference_why_not),
    )
}

# Read once: a lookup in os.environ costs as much as half the argument checks of a small batch.
FORCED = os.environ.get("TRIPLETOPS_BACKEND") or None

_CPU = torch.device("cpu")


def backends() -> dict[str, str]:
    """What is usable in this process: every backend with the word ``"usable"``, or with the reason why not.

    >>> tripletops.backends()
    {'cpu': 'usable', 'triton': 'not part of this version of tripletops', 'reference': 'usable'}
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
        f"  {name}: {_why_not_on(record, device) or _usable(record)}" for name, record in REGISTRY.items()
    )
    raise RuntimeError("\n".join([f"{asked} run tensors on {device} here", *reasons]))


def _why_not_on(backend: Backend, device: torch.device) -> str | None:
    if backend.device is not None and backend.device != device.type:
        return backend.why_not() or f"reads {backend.device} tensors, these are on {device}"
    return backend.why_not()


def _usable(backend: Backend) -> str:
    note = ", never picked by itself" if backend.device is None else ""
    return f"usable with backend={backend.name!r}{note}"
