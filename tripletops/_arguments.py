"""Check every argument once, before any kernel runs, and turn it into what the kernels take.

The everyday batch has N = 8 to 128, where a whole call takes some tens of microseconds. So the checks of a
correct call are attribute reads and dictionary lookups, never a tensor operation, and a text is made only to
be raised. All of it can be traced by `torch.compile(fullgraph=True)`.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from math import inf
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from tripletops.ops import (
    DISTANCE,
    LOSS,
    NEGATIVE,
    OBJECTIVE,
    POSITIVE,
    REDUCTION,
    compute_type,
    refuse_derivatives,
    refuse_tracing_and_vmap,
)

_Value = TypeVar("_Value")
Rows: TypeAlias = "tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, int | None]"

# Equations 1 and 16 of "Extreme Triplet Learning" are functions of the cosine similarity.
_COSINE_LOSSES = frozenset({"first_order", "second_order"})

# "all" is a rule of the objectives over many tuples alone.
_ONE_POSITIVE = {word: code for word, code in POSITIVE.items() if word != "all"}
_ONE_NEGATIVE = {word: code for word, code in NEGATIVE.items() if word != "all"}
_MULTI_SIMILARITY_POSITIVE = {word: POSITIVE[word] for word in ("all", "easy")}
_BATCH_ALL = {"margin": "batch_all", "soft_margin": "batch_all_soft"}

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTEGERS = frozenset(
    getattr(torch, f"{signed}int{bits}") for signed in ("", "u") for bits in (8, 16, 32, 64)
)


def encode_rules(
    positive: str,
    negative: str,
    distance: str | None,
    cutoff: float,
    nonzero_loss_cutoff: float | None,
    positives: Mapping[str, int] = _ONE_POSITIVE,
    negatives: Mapping[str, int] = _ONE_NEGATIVE,
) -> tuple[int, int, int, float, float]:
    """The codes of the two selection rules, of the distance they go by, and the limits of
    negative="distance"."""
    if distance is None:
        distance = "euclidean"
    return (
        _code("positive", positive, positives),
        _code("negative", negative, negatives),
        _code("distance", distance, DISTANCE),
        _above_zero("cutoff", cutoff),
        inf if nonzero_loss_cutoff is None else _limit("nonzero_loss_cutoff", nonzero_loss_cutoff),
    )


def encode_loss(
    positive: str,
    negative: str,
    distance: str | None,
    cutoff: float,
    nonzero_loss_cutoff: float | None,
    loss: str,
    reduction: str,
    margin: float,
    temperature: float,
) -> tuple[int, int, int, float, float, int, int, float, float]:
    """The codes and numbers of a loss, in the order of `ops.triplet_loss`."""
    loss_code = _code("loss", loss, LOSS)
    if loss in _COSINE_LOSSES:
        if distance is None:
            distance = "cosine"
        elif distance != "cosine":
            _code("distance", distance, DISTANCE)
            raise ValueError(f"loss={loss!r} is defined on the cosine similarity, got distance={distance!r}")
    margin = _from_zero("margin", margin)
    temperature = _above_zero("temperature", temperature)
    rules = encode_rules(positive, negative, distance, cutoff, nonzero_loss_cutoff)
    return (*rules, loss_code, _code("reduction", reduction, REDUCTION), margin, temperature)


class Objective(NamedTuple):
    """The checked options of an objective over many tuples."""

    codes: tuple[int, int, int, float, float, int, int, list[float]]
    """As `ops.tuples_loss` takes them: the rules, objective, reduction and parameters."""
    words: dict[str, Any]
    """As its function in `reference` does."""


def encode_batch_all(
    margin: float, loss: str, distance: str | None, reduction: str, return_active: bool
) -> Objective:
    objective = _code("loss", loss, _BATCH_ALL)
    margin = _from_zero("margin", margin)
    if type(return_active) is not bool:
        raise TypeError(f"return_active must be a bool, got {return_active!r} of {_type(return_active)}")
    return Objective(
        _codes(objective, [margin] if loss == "margin" else [], reduction, distance),
        {"margin": margin, "loss": loss, "distance": distance, "reduction": reduction},
    )


def encode_semi_hard(margin: float, distance: str | None, reduction: str) -> Objective:
    margin = _from_zero("margin", margin)
    return Objective(
        _codes("semi_hard", [margin], reduction, distance),
        {"margin": margin, "distance": distance, "reduction": reduction},
    )


def encode_multi_similarity(
    alpha: float, beta: float, base: float, epsilon: float | None, positive: str, reduction: str
) -> Objective:
    alpha, beta, base = _above_zero("alpha", alpha), _above_zero("beta", beta), _finite("base", base)
    if epsilon is not None:
        epsilon = _from_zero("epsilon", epsilon)
    _code("positive", positive, _MULTI_SIMILARITY_POSITIVE)
    parameters = [alpha, beta, base, inf if epsilon is None else epsilon]
    return Objective(
        _codes("multi_similarity", parameters, reduction, "cosine", positive),
        {
            "alpha": alpha,
            "beta": beta,
            "base": base,
            "epsilon": epsilon,
            "positive": positive,
            "reduction": reduction,
        },
    )


def encode_contrastive(pos_margin: float, neg_margin: float, **pairs: Any) -> Objective:
    margins = {
        "pos_margin": _from_zero("pos_margin", pos_margin),
        "neg_margin": _from_zero("neg_margin", neg_margin),
    }
    return _pairs("contrastive", margins, **pairs)


def encode_beta_margin(alpha: float, **pairs: Any) -> Objective:
    return _pairs("beta_margin", {"alpha": _from_zero("alpha", alpha)}, **pairs)


def encode_beta(beta: float | Tensor, rows: Rows) -> Tensor:
    """`beta` of every anchor, (N,) in the type that losses have, connected to a `beta` that is a tensor."""
    emb, labels, _, _, _, ignore_label = rows
    count, dtype = emb.shape[0], compute_type(emb)
    if not isinstance(beta, Tensor):
        return torch.full((count,), _as_float("beta", beta), dtype=dtype, device=emb.device)
    refuse_tracing_and_vmap(beta)
    _check_tensor("beta", beta)
    if beta.dtype not in _FLOATS:
        raise TypeError(f"beta must be float16, bfloat16, float32 or float64, got {beta.dtype}")
    if beta.dim() > 1:
        raise ValueError(f"beta must be () or (C,), one number for each class, got beta{_shape(beta)}")
    if beta.device != emb.device:
        raise ValueError(_different_devices("emb", emb, "beta", beta))
    place = torch.zeros_like(labels)
    if beta.dim() == 1:
        place = labels if ignore_label is None else labels.where(labels != ignore_label, 0)
        # A traced program cannot branch on values, but index_select stays within bounds by itself.
        if not torch.compiler.is_compiling() and count > 0:
            lowest, highest = (int(extreme) for extreme in place.aminmax())
            if lowest < 0 or highest >= beta.shape[0]:
                raise ValueError(
                    f"labels holds {lowest if lowest < 0 else highest}, which beta{_shape(beta)} has no "
                    f"number for: with a number for each of C classes, labels must be in [0, C), "
                    f"C = {beta.shape[0]}"
                )
    # Whose gradient is added up in the same order every time: on the CPU that of index_select, for any number
    # of threads; on a GPU that of an index, which is sorted. float64, because one is added after the other.
    values = beta.double().reshape(-1)
    return (values.index_select(0, place) if emb.is_cpu else values[place]).to(dtype)


def starting_beta(beta: float, classes: int | None) -> Tensor:
    """A β to start learning from: (), or (classes,)."""
    beta = _finite("beta", beta)
    if classes is None:
        return torch.tensor(beta)
    classes = _as_int("classes", classes)
    if classes < 1:
        raise ValueError(f"classes={classes}: must be 1 or greater, or None for one β for all")
    return torch.full((classes,), beta)


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
    positive: str,
    negative: str,
    generator: torch.Generator | None,
    seed: int | Tensor | None,
    backend: str,
    emb: Tensor,
    *others: Tensor | None,
) -> Tensor | None:
    """The seed of the random rules, an int64 tensor (), or None where no rule is random.

    It comes after every other check: a refused call must leave the random number generator as it was.
    """
    is_random = positive == "random" or negative == "random" or negative == "distance"
    if generator is None and seed is None and not is_random:
        return None
    if seed is not None:
        if generator is not None:
            raise ValueError(f"generator and seed={seed!r} exclude each other: give one of them")
        seed = _as_seed(seed, emb.device)
    elif generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {_type(generator)}")
    if not is_random:
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


def _codes(
    objective: str,
    parameters: list[float],
    reduction: str,
    distance: str | None,
    positive: str = "all",
    negative: str = "all",
    cutoff: float = 0.5,
    nonzero_loss_cutoff: float | None = None,
) -> tuple[int, int, int, float, float, int, int, list[float]]:
    rules = encode_rules(positive, negative, distance, cutoff, nonzero_loss_cutoff, POSITIVE, NEGATIVE)
    return (*rules, OBJECTIVE[objective], _code("reduction", reduction, REDUCTION), parameters)


def _pairs(
    objective: str,
    parameters: dict[str, float],
    *,
    positive: str,
    negative: str,
    cutoff: float,
    nonzero_loss_cutoff: float | None,
    distance: str | None,
    reduction: str,
) -> Objective:
    codes = _codes(
        objective,
        list(parameters.values()),
        reduction,
        distance,
        positive,
        negative,
        cutoff,
        nonzero_loss_cutoff,
    )
    if positive == "all" and negative == "semihard":
        raise ValueError(
            "negative='semihard' is farther than the picked positive, and positive='all' picks none"
        )
    _, _, _, cutoff, nonzero_loss_cutoff, *_ = codes
    words = {
        "positive": positive,
        "negative": negative,
        "cutoff": cutoff,
        "nonzero_loss_cutoff": nonzero_loss_cutoff,
        "distance": distance,
        "reduction": reduction,
    }
    return Objective(codes, {**parameters, **words})


def _code(name: str, word: str, table: Mapping[str, _Value]) -> _Value:
    try:
        return table[word]
    except (KeyError, TypeError):  # TypeError: not hashable, so not a word either
        raise ValueError(f"{name}={word!r} is not one of {', '.join(map(repr, table))}") from None


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


def _from_zero(name: str, value: float) -> float:
    if type(value) is not float:
        value = _as_float(name, value)
    if not 0.0 <= value < inf:  # False for NaN too
        raise ValueError(f"{name}={value!r}: must be a finite number, 0 or greater")
    return value


def _above_zero(name: str, value: float) -> float:
    if type(value) is not float:
        value = _as_float(name, value)
    if not 0.0 < value < inf:
        raise ValueError(f"{name}={value!r}: must be a finite number greater than 0")
    return value


def _finite(name: str, value: float) -> float:
    if type(value) is not float:
        value = _as_float(name, value)
    if not -inf < value < inf:
        raise ValueError(f"{name}={value!r}: must be a finite number")
    return value


def _limit(name: str, value: float) -> float:
    if type(value) is not float:
        value = _as_float(name, value)
    if not value > 0.0:
        raise ValueError(f"{name}={value!r}: must be a number greater than 0, or None for no limit")
    return value


def _as_float(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a Python number, got {value!r} of {_type(value)}")
    try:
        return float(value)
    except OverflowError:
        return inf  # an integer beyond every float; the caller refuses it


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
