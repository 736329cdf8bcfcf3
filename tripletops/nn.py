"""The losses as modules: options are attributes, checked when the module is made; a batch goes to the call.

There is a class for every function of `_words.FUNCTION` that names one. An attribute may be set to another
value between two batches (a margin that grows, say): every call reads and checks it anew.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from tripletops import _signatures, functional
from tripletops._words import FUNCTION, OBJECTIVE, Function


class Loss(Module):
    """A public function as a module: what all of them have in common."""

    _record: ClassVar[Function]
    _public: ClassVar[Callable[..., Any]]
    _defaults: ClassVar[dict[str, Any]]  # of the options, in the order of the signature

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__()
        learned = OBJECTIVE[self._record.objective].learned
        names = () if learned is None else (learned.name, "classes")
        if len(given) > len(names):
            raise TypeError(self._by_keyword(given[len(names)]))
        starts = dict(zip(names, given, strict=False))
        for name in [name for name in names if name in options]:
            if name in starts:
                raise TypeError(_signatures.given_twice(self._get_name(), name))
            starts[name] = options.pop(name)
        for name in options:
            if name not in self._defaults:
                known = _signatures.module_arguments(self._record)
                raise TypeError(_signatures.unexpected(self._record, self._get_name(), name, known))
        options = {**self._defaults, **options}
        functional.check_options(self._record, **options)
        for name, value in options.items():
            setattr(self, name, value)
        if learned is not None:
            start = functional.starting_numbers(
                learned.name, starts.get(learned.name, learned.start), starts.get("classes")
            )
            setattr(self, learned.name, Parameter(start))

    def forward(
        self,
        emb: Tensor,
        labels: Tensor,
        *,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        self_index: Tensor | None = None,
        **draws: torch.Generator | int | Tensor | None,
    ) -> Any:
        """The loss of embeddings (N, D) with labels (N,). `ref_emb`, `ref_labels`, `self_index` and, where a
        rule can be random, `generator` and `seed` are those of the function."""
        for name in draws:
            if not self._record.draws or name not in ("generator", "seed"):
                known = _signatures.call_arguments(self._record)
                raise TypeError(
                    _signatures.unexpected(self._record, f"A call of {self._get_name()}", name, known)
                )
        learned = OBJECTIVE[self._record.objective].learned
        tensors = {} if learned is None else {learned.name: getattr(self, learned.name)}
        options = {name: getattr(self, name) for name in self._defaults}
        return self._public(
            emb,
            labels,
            ref_emb=ref_emb,
            ref_labels=ref_labels,
            self_index=self_index,
            **draws,
            **tensors,
            **options,
        )

    def extra_repr(self) -> str:
        """Every option that has a value; the number of classes, if each learns a number of its own."""
        learned = OBJECTIVE[self._record.objective].learned
        shown = {name: getattr(self, name) for name in self._defaults}
        if learned is not None and getattr(self, learned.name).dim():
            shown = {"classes": len(getattr(self, learned.name)), **shown}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items() if value is not None)

    def _by_keyword(self, value: object) -> str:
        """What to write instead of a positional argument too many."""
        name, options = self._get_name(), self._defaults
        example = "margin" if "margin" in options else next(iter(options))
        shown = value if isinstance(value, numbers.Real) else options[example]
        return (
            f"{name} takes its options by keyword, as in {name}({example}={shown!r}), got {value!r}; "
            f"they are {', '.join(options)}"
        )


def _module(function: Function) -> type[Loss]:
    defaults = {argument.name: argument.default for argument in _signatures.options(function)}
    return type(
        function.module,
        (Loss,),
        {
            "__module__": __name__,
            "__doc__": _signatures.module_docstring(function),
            "__signature__": _signatures.signature(_signatures.module_arguments(function)),
            "_record": function,
            "_public": staticmethod(getattr(functional, function.name)),
            "_defaults": defaults,
        },
    )


for _function in FUNCTION.values():
    if _function.module:
        globals()[_function.module] = _module(_function)

if TYPE_CHECKING:

    def __getattr__(name: str) -> type[Loss]: ...
