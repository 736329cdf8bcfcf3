"""What users call: one function for every entry of `_words.FUNCTION`, made here.

A function checks its arguments, once (`_arguments`), settles the backend (`backends`), and hands the call on:
to `ops`, or to `reference` where that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tripletops import _signatures, ops, reference
from tripletops._arguments import (
    Encoded,
    Options,
    draw_seed,
    encode_ignore_label,
    encode_learned,
    encode_rows,
)
from tripletops._arguments import starting_numbers as starting_numbers  # for nn
from tripletops._call import Call, Totals
from tripletops._words import FUNCTION, OBJECTIVE, Function
from tripletops.backends import check_word, resolve


class Triplets(NamedTuple):
    """What `mine` picked for every anchor: five tensors of shape (N,)."""

    anchor: Tensor
    """int64, 0 to N-1: the row of ``emb``."""
    positive: Tensor
    """int64, the row of ``ref_emb`` (left out: of ``emb``) picked as positive; -1 where there is none."""
    negative: Tensor
    """int64, likewise the row picked as negative; -1 where there is none."""
    d_ap: Tensor
    """Distance of anchor and positive, float32, or float64 for float64 embeddings; NaN for none."""
    d_an: Tensor
    """Distance of anchor and negative, likewise."""

    @property
    def valid(self) -> Tensor:
        """(N,) bool: the anchors that have both a positive and a negative."""
        return (self.positive >= 0) & (self.negative >= 0)

    def indices(self) -> tuple[Tensor, Tensor, Tensor]:
        """Anchor, positive and negative of the valid anchors alone.

        This is what the losses of other libraries take, and what a tensor can be indexed with: there, -1
        would stand for the last row.
        """
        valid = self.valid
        return self.anchor[valid], self.positive[valid], self.negative[valid]


def _public(function: Function) -> Callable[..., Any]:
    """The function that users call, made of what `_words` says about it."""
    options, objective = Options(function), OBJECTIVE[function.objective]
    learns, draws, flag = objective.learned, function.draws, function.flag
    positional = 2 if learns is None else 3
    evaluate = _mine if function.name == "mine" else _loss

    def public(
        emb: Tensor,
        labels: Tensor,
        *others: Any,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        self_index: Tensor | None = None,
        ignore_label: int | None = None,
        backend: str | None = None,
        **keywords: Any,
    ) -> Any:
        if len(others) > positional - 2:
            raise TypeError(_too_many(function, positional, others[positional - 2]))
        generator, seed = (
            (keywords.pop("generator", None), keywords.pop("seed", None)) if draws else (None, None)
        )
        flagged = False if flag is None else _flag(flag.name, keywords.pop(flag.name, False))
        given = None if learns is None else _learned(function, learns.name, others, keywords)

        encoded = options.encode(keywords)
        rows = encode_rows(emb, labels, ref_emb, ref_labels, self_index, ignore_label)
        learned = None if learns is None else encode_learned(learns.name, given, rows)
        backend = resolve(backend, rows[0].device)
        drawn = (
            draw_seed(encoded.draws, generator, seed, backend, rows[0], rows[2], learned) if draws else None
        )
        call = Call(*rows, drawn, learned, encoded.codes, encoded.numbers)
        return evaluate(function, options, encoded, backend, call, flagged)

    public.__name__ = public.__qualname__ = function.name
    public.__doc__ = _signatures.docstring(function)
    public.__signature__ = _signatures.signature(_signatures.arguments(function))  # type: ignore[attr-defined]
    return public


def _loss(
    function: Function, options: Options, encoded: Encoded, backend: str, call: Call, return_active: bool
) -> Tensor | tuple[Tensor, Tensor]:
    if backend != "reference":
        if not return_active:
            return ops.loss(backend, call, encoded.packed)
        loss, totals = ops.loss_and_totals(backend, call)
        return loss, Totals(*totals).active.long()
    value: Any = _plain(f"{function.objective}_loss", function, options, encoded, call)
    loss, active = value if isinstance(value, tuple) else (value, None)
    return (loss, active) if return_active else loss


def _mine(
    function: Function, options: Options, encoded: Encoded, backend: str, call: Call, exclusive: bool
) -> Triplets:
    anchor = torch.arange(call.emb.shape[0], device=call.emb.device)
    if backend == "reference":
        return Triplets(anchor, *_plain("mine", function, options, encoded, call, exclusive=exclusive))
    picks, distances = ops.mine(backend, call)
    if exclusive:
        kept = ops.exclusive(picks, call.self_index, call.ref_emb)
        picks, distances = picks.where(kept, -1), distances.where(kept, torch.nan)
    return Triplets(anchor, *picks.unbind(), *distances.unbind())


def _plain(
    name: str, function: Function, options: Options, encoded: Encoded, call: Call, **flags: bool
) -> Any:
    """What the function of `reference` with that name gives."""
    rows = {
        "ref_emb": call.ref_emb,
        "ref_labels": call.ref_labels,
        "self_index": call.self_index,
        "ignore_label": call.ignore_label,
    }
    learned = () if call.learned is None else (call.learned,)
    seed = {"seed": call.seed} if function.draws else {}
    plain = getattr(reference, name)
    return plain(call.emb, call.labels, *learned, **rows, **seed, **options.by_name(encoded), **flags)


def _too_many(function: Function, allowed: int, value: object) -> str:
    names = ", ".join(
        argument.name for argument in _signatures.arguments(function) if not argument.positional
    )
    return (
        f"{function.name}() takes {allowed} arguments by position, got {value!r} as well; "
        f"by keyword it takes {names}"
    )


def _learned(function: Function, name: str, others: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """The tensor that the objective learns, given by position or by keyword."""
    if others and name in keywords:
        raise TypeError(_signatures.given_twice(f"{function.name}()", name))
    if not others and name not in keywords:
        raise TypeError(f"{function.name}() is missing the argument {name!r}")
    return others[0] if others else keywords.pop(name)


def _flag(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(f"{name} must be a bool, got {value!r} of {type(value).__name__}")
    return value


def check_options(
    function: Function, *, ignore_label: int | None, backend: str | None, **options: Any
) -> None:
    """Raise what the public function would raise for these options, before there is a batch."""
    if function.flag is not None and function.flag.name in options:
        _flag(function.flag.name, options.pop(function.flag.name))
    Options(function).encode(options)
    if ignore_label is not None:
        encode_ignore_label(ignore_label, torch.int64)
    check_word(backend)


for _function in FUNCTION.values():
    globals()[_function.name] = _public(_function)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
