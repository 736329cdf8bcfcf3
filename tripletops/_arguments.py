"""Check every argument once, before any kernel runs, and turn it into what the backends take.

The everyday batch has N = 8 to 128, where a whole call takes some tens of microseconds. So the checks of a
correct call are attribute reads and dictionary lookups, never a tensor operation, and a text is made only to
be raised. All of it can be traced by `torch.compile(fullgraph=True)`.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from math import inf
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tripletops import _signatures
from tripletops._call import compute_type
from tripletops._words import (
    FINITE,
    LOSS,
    NEGATIVE,
    OBJECTIVE,
    OBJECTIVE_CODE,
    POSITIVE,
    TABLES,
    Choice,
    Codes,
    Function,
    Number,
    Numbers,
    Range,
)
from tripletops.ops import refuse_derivatives, refuse_tracing_and_vmap

Rows: TypeAlias = "tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, int | None]"

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTEGERS = frozenset(
    getattr(torch, f"{signed}int{bits}") for signed in ("", "u") for bits in (8, 16, 32, 64)
)


_EXACT = {str, float, type(None)}
_REMEMBERED = 256  # sets of options of one function


class Encoded(NamedTuple):
    """The checked options of a call."""

    codes: list[int]  # of `_words.Codes`
    numbers: list[float]  # of `_words.Numbers`
    words: dict[str, Any]  # by option, fixed ones included
    draws: bool  # whether a random seed is needed
    packed: list[Tensor] | None = None  # for `ops`, where calls share these options


class Options:
    """The options of one public function: which there are, their defaults, and how they are checked."""

    def __init__(self, function: Function) -> None:
        options = function.options()
        self.function = function
        self.choices = {option.name: option for option in options if isinstance(option, Choice)}
        self.numbers = {option.name: option for option in options if isinstance(option, Number)}
        self.required = [choice.name for choice in self.choices.values() if choice.required]
        self.default_words: dict[str, str | None] = {table.option: word for table, word in function.fixed}
        if OBJECTIVE[function.objective].cosine:
            self.default_words["distance"] = "cosine"
        self.default_words |= {choice.name: choice.default for choice in self.choices.values()}
        defaults = {
            number.name: number.none if number.default is None else number.default
            for number in self.numbers.values()
        }
        self.default_numbers = Numbers(**defaults)
        # The numbers of words count where such a word is chosen; those of the function itself always do.
        self.own_numbers = {number.name for number in function.numbers}
        self.encoded: dict[tuple[tuple[str, Any], ...], Encoded] = {}

    def encode(self, given: dict[str, Any]) -> Encoded:
        """Check what the caller gave, by name; the rest has its defaults.

        A training gives the same options in every step: they are looked up the next time. Only options of
        exact types are, since True is equal to 1.0, and tracing must not see the table change.
        """
        if torch.compiler.is_compiling() or not _EXACT.issuperset(map(type, given.values())):
            return self._check(given)
        key = tuple(given.items())
        encoded = self.encoded.get(key)
        if encoded is None:
            encoded = self._check(given)._replace(packed=[])
            if len(self.encoded) >= _REMEMBERED:
                self.encoded.clear()
            self.encoded[key] = encoded
        return encoded

    def _check(self, given: dict[str, Any]) -> Encoded:
        words, found = dict(self.default_words), {}
        for name, value in given.items():
            choice = self.choices.get(name)
            if choice is not None:
                words[name] = _word(choice, value)
            elif name in self.numbers:
                found[name] = _number(self.numbers[name], value)
            else:
                known = _signatures.arguments(self.function)
                raise TypeError(_signatures.unexpected(self.function, f"{self.function.name}()", name, known))
        for name in self.required:
            if name not in given:
                raise TypeError(
                    f"{self.function.name}() needs {name}=, one of {_either(self.choices[name].words)}"
                )
        return self._encoded(words, found)

    def _encoded(self, words: dict[str, Any], given: dict[str, float]) -> Encoded:
        positive, negative, loss = words.get("positive"), words.get("negative"), words.get("loss")
        if negative is not None and NEGATIVE[negative].needs_positive and positive == "all":
            raise ValueError(
                f"negative={negative!r} is measured from one positive, and positive='all' picks none; choose "
                f"one of {_either(word for word in self.choices['positive'].words if word != 'all')}"
            )
        words = {**words, "distance": _distance_of(words.get("distance"), loss)}
        codes = {table.option: table.code[words[table.option]] for table in TABLES if table.option in words}
        draws = (positive is not None and POSITIVE[positive].draws) or (
            negative is not None and NEGATIVE[negative].draws
        )
        used = self.own_numbers | {
            number.name
            for table in TABLES
            if table.option in words
            for number in table[words[table.option]].numbers
        }
        numbers = self.default_numbers._replace(**{name: given[name] for name in given if name in used})
        objective = OBJECTIVE_CODE[self.function.objective]
        return Encoded(list(Codes(objective, **codes)), list(numbers), words, draws)

    def by_name(self, encoded: Encoded) -> dict[str, Any]:
        """The options as functions of `reference` take them."""
        options: dict[str, Any] = {
            name: word for name, word in encoded.words.items() if name in self.choices or name != "distance"
        }
        for name, number in self.numbers.items():
            value = getattr(Numbers(*encoded.numbers), name)
            options[name] = None if value == number.none else value
        return options


def _distance_of(distance: str | None, loss: str | None) -> str:
    """What None stands for. Some losses are functions of the cosine similarity."""
    if loss is None or not LOSS[loss].cosine:
        return distance or "euclidean"
    if distance not in (None, "cosine"):
        raise ValueError(f"loss={loss!r} is defined on the cosine similarity, got distance={distance!r}")
    return "cosine"


def _either(words: Iterable[str]) -> str:
    return ", ".join(map(repr, words))


def _word(choice: Choice, value: Any) -> str | None:
    if isinstance(value, str) and value in choice.words:
        return value
    if value is None and choice.default is None and not choice.required:
        return None
    raise ValueError(f"{choice.name}={value!r} is not one of {_either(choice.words)}")


def _number(number: Number, value: Any) -> float:
    if value is None and number.none is not None:
        return number.none
    return _within(number.name, value, number.range)


def _within(name: str, value: Any, allowed: Range) -> float:
    number: float = value if type(value) is float else _as_float(name, value)
    if not allowed.holds(number):
        raise ValueError(f"{name}={number!r}: must be {allowed.text}")
    return number


def encode_learned(name: str, given: float | Tensor | None, rows: Rows) -> Tensor:
    """Each anchor's number, (N,) in the type that losses have, connected to what was given if a tensor."""
    emb, labels, _, _, _, ignore_label = rows
    count, dtype = emb.shape[0], compute_type(emb)
    if not isinstance(given, Tensor):
        return torch.full((count,), _as_float(name, given), dtype=dtype, device=emb.device)
    refuse_tracing_and_vmap(given)
    _check_tensor(name, given)
    if given.dtype not in _FLOATS:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {given.dtype}")
    if given.dim() > 1:
        raise ValueError(f"{name} must be () or (C,), one number for each class, got {name}{_shape(given)}")
    if given.device != emb.device:
        raise ValueError(_different_devices("emb", emb, name, given))
    place = torch.zeros_like(labels)
    if given.dim() == 1:
        place = labels if ignore_label is None else labels.where(labels != ignore_label, 0)
        # A traced program cannot branch on values, but index_select stays within bounds by itself.
        if not torch.compiler.is_compiling() and count > 0:
            lowest, highest = (int(extreme) for extreme in place.aminmax())
            if lowest < 0 or highest >= given.shape[0]:
                raise ValueError(
                    f"labels holds {lowest if lowest < 0 else highest}, which {name}{_shape(given)} has no "
                    f"number for: with a number for each of C classes, labels must be in [0, C), "
                    f"C = {given.shape[0]}"
                )
    # The gradients of a class must be added up in the same order every time. That of index_select is, on the
    # CPU and for any number of threads; on a GPU that of an index is, which sorts. In float64, because one is
    # added after the other.
    values = given.double().reshape(-1)
    return (values.index_select(0, place) if emb.is_cpu else values[place]).to(dtype)


def starting_numbers(name: str, start: float, classes: int | None) -> Tensor:
    """Numbers to start learning from: (), or (classes,)."""
    start = _within(name, start, FINITE)
    if classes is None:
        return torch.tensor(start)
    classes = _as_int("classes", classes)
    if classes < 1:
        raise ValueError(f"classes={classes}: must be 1 or greater, or None for one {name} for all")
    return torch.full((classes,), start)


def encode_rows(
    emb: Tensor,
    labels: Tensor,
    ref_emb: Tensor | None,
    ref_labels: Tensor | None,
    self_index: Tensor | None,
    ignore_label: int | None,
) -> Rows:
    """The tensors of a call and the label to ignore, in the order of the functions of `ops`."""
    refuse_tracing_and_vmap(emb, labels, ref_emb, ref_labels, self_index)
    given_labels = labels
    emb, labels = _embeddings_and_labels("emb", emb, "labels", labels)
    if ignore_label is not None:
        ignore_label = encode_ignore_label(ignore_label, given_labels.dtype)
    if ref_emb is None:
        if ref_labels is not None:
            raise ValueError(f"ref_labels{_shape(ref_labels)} is given without ref_emb")
        if self_index is not None:
            raise ValueError(f"self_index{_shape(self_index)} is given without ref_emb, whose rows it names")
        return emb, labels, None, None, None, ignore_label

    if ref_labels is None:
        raise ValueError(f"ref_emb{_shape(ref_emb)} is given without ref_labels")
    ref_emb, ref_labels = _embeddings_and_labels("ref_emb", ref_emb, "ref_labels", ref_labels)
    if ref_emb.device != emb.device:
        raise ValueError(_different_devices("emb", emb, "ref_emb", ref_emb))
    if ref_emb.shape[1] != emb.shape[1]:
        raise ValueError(f"emb{_shape(emb)} and ref_emb{_shape(ref_emb)} must have rows of the same length D")
    if ref_emb.dtype is not emb.dtype:
        dtype = torch.promote_types(emb.dtype, ref_emb.dtype)
        # Left to itself, `to` gives rows that overlap in memory an inner stride other than 1.
        emb, ref_emb = (rows.to(dtype, memory_format=torch.contiguous_format) for rows in (emb, ref_emb))
    if self_index is not None:
        self_index = _positions(self_index, emb, ref_emb)
    return emb, labels, ref_emb, ref_labels, self_index, ignore_label


def draw_seed(
    draws: bool,
    generator: torch.Generator | None,
    seed: int | Tensor | None,
    backend: str,
    emb: Tensor,
    *others: Tensor | None,
) -> Tensor | None:
    """The seed of the random rules, an int64 tensor (), or None where no rule is random.

    It comes after every other check: a refused call must leave the random number generator as it was.
    """
    if generator is None and seed is None and not draws:
        return None
    if seed is not None:
        if generator is not None:
            raise ValueError(f"generator and seed={seed!r} exclude each other: give one of them")
        seed = _as_seed(seed, emb.device)
    elif generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {_type(generator)}")
    if not draws:
        return None
    if seed is None:
        if backend != "reference" and not torch.compiler.is_compiling():
            refuse_derivatives(emb, *others)  # the op would too, after the draw
        source = emb.device if generator is None else generator.device
        # All of int64 but its largest number, since randint leaves the upper bound out.
        seed = torch.randint(-(2**63), 2**63 - 1, (), generator=generator, device=source).to(emb.device)
    return seed


def encode_ignore_label(ignore_label: int, dtype: torch.dtype) -> int | None:
    """`ignore_label` as labels of `dtype` spell it in int64; None where no label can be equal to it."""
    if type(ignore_label) is not int:
        ignore_label = _as_int("ignore_label", ignore_label)
    if dtype is torch.uint64 and 2**63 <= ignore_label < 2**64:
        ignore_label -= 2**64
    return ignore_label if -(2**63) <= ignore_label < 2**63 else None


def _embeddings_and_labels(emb_name: str, emb: Tensor, name: str, labels: Tensor) -> tuple[Tensor, Tensor]:
    """`emb` with inner stride 1 and `labels` as contiguous int64, copied only where they are not that yet."""
    _check_tensor(emb_name, emb)
    _check_tensor(name, labels)
    dtype = labels.dtype
    if emb.dtype not in _FLOATS:
        raise TypeError(f"{emb_name} must be float16, bfloat16, float32 or float64, got {emb.dtype}")
    if dtype not in _INTEGERS:
        raise TypeError(f"{name} must be of an integer dtype, got {dtype}")
    rows, ids = emb.shape, labels.shape
    if len(rows) != 2 or len(ids) != 1 or rows[0] != ids[0]:
        raise ValueError(
            f"{emb_name} must be (N, D) and {name} (N,), "
            f"got {emb_name}{_shape(emb)} and {name}{_shape(labels)}"
        )
    if emb.device != labels.device:
        raise ValueError(_different_devices(emb_name, emb, name, labels))
    if emb.stride()[1] != 1:
        emb = emb.contiguous()
    if dtype is not torch.int64:
        labels = _as_int64(labels)
    if not labels.is_contiguous():
        labels = labels.contiguous()
    return emb, labels


def _check_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {_type(tensor)}")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else tensor.layout
        raise TypeError(f"{name} must be a dense tensor with values, got a {kind} tensor of {tensor.dtype}")


def _positions(self_index: Tensor, emb: Tensor, ref_emb: Tensor) -> Tensor:
    _check_tensor("self_index", self_index)
    if self_index.dtype not in _INTEGERS:
        raise TypeError(f"self_index must be of an integer dtype, got {self_index.dtype}")
    if self_index.dim() != 1 or self_index.shape[0] != emb.shape[0]:
        raise ValueError(
            f"self_index must be (N,), one position for each row of emb, "
            f"got self_index{_shape(self_index)} and emb{_shape(emb)}"
        )
    if self_index.device != emb.device:
        raise ValueError(_different_devices("emb", emb, "self_index", self_index))
    self_index = _as_int64(self_index).contiguous()
    # A traced program cannot branch on values. The kernels stay within bounds by themselves.
    if not torch.compiler.is_compiling() and self_index.shape[0] > 0:
        lowest, highest = (int(extreme) for extreme in self_index.aminmax())
        if lowest < -1 or highest >= ref_emb.shape[0]:
            outside = lowest if lowest < -1 else highest
            raise ValueError(
                f"self_index holds {outside}, which is neither a row of ref_emb{_shape(ref_emb)} "
                f"nor -1, for an anchor that is not among them"
            )
    return self_index


def _as_int64(integers: Tensor) -> Tensor:
    # The 64 bits of a uint64 are kept as they are: label identity is all that matters.
    return integers.view(torch.int64) if integers.dtype is torch.uint64 else integers.to(torch.int64)


def _as_seed(seed: int | Tensor, device: torch.device) -> Tensor:
    if isinstance(seed, Tensor):
        _check_tensor("seed", seed)
        if seed.dtype is not torch.int64:
            raise TypeError(f"seed must be an int or an int64 tensor, got a tensor of {seed.dtype}")
        if seed.numel() != 1:
            raise ValueError(f"seed must hold one element, got seed{_shape(seed)}")
        if seed.device != device:
            raise ValueError(f"seed{_shape(seed)} is on {seed.device} and emb on {device}")
        return seed.reshape(())
    if type(seed) is not int:
        seed = _as_int("seed", seed)
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed={seed}: must fit int64")
    return torch.tensor(seed, dtype=torch.int64, device=device)


def _as_float(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a Python number, got {value!r} of {_type(value)}")
    try:
        return float(value)
    except OverflowError:
        return -inf if value < 0 else inf  # an integer beyond every float; the caller refuses it


def _as_int(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int, got {value!r} of {_type(value)}")
    return int(value)


def _shape(tensor: object) -> str:
    return f" of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else ""


def _type(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _different_devices(left_name: str, left: Tensor, right_name: str, right: Tensor) -> str:
    return f"{left_name}{_shape(left)} is on {left.device} and {right_name}{_shape(right)} on {right.device}"
