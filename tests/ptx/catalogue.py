"""Which of the kernels that ship for sm_80 a call launches: names that do not depend on the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

Key: TypeAlias = tuple[str, str, str]  # the kernel, its constants, the type of its rows


def key_of(function: Any, signature: dict[str, Any], constants: dict[Any, Any]) -> Key:
    """Of Triton's own record of a compilation. A number that happens to be 1 is no constant."""
    names = [parameter.name for parameter in function.params]
    flat = {}
    for path, value in constants.items():
        place, *inner = path if isinstance(path, tuple) else (names.index(path),)
        if function.params[place].is_constexpr:
            flat.update(_flat((names[place], *inner), value))
    pointers = [kind for kind in _leaves(tuple(signature.values())) if str(kind).startswith("*")]
    return function.__name__, str(sorted(flat.items())), pointers[0]


def _flat(path: tuple[Any, ...], value: Any) -> Iterator[tuple[str, str]]:
    value = getattr(value, "value", value)  # of tl.constexpr
    if isinstance(value, tuple):
        for place, part in enumerate(value):
            yield from _flat((*path, place), part)
    else:
        yield ".".join(map(str, path)), getattr(value, "__name__", str(value))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value
