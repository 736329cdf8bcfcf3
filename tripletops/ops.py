"""The ops as torch knows them: schemas, fake tensors and autograd. The only user of `torch.library`.

Arguments arrive checked (by `functional`) and words arrive as the codes of the tables below, which are the
orders of the enums in `csrc/kernels/problem.h`. Every backend has ops of its own, which are all the same but
for their implementation: that of `cpu` is C++, that of `triton` Python, and neither knows autograd.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tripletops.backends import cpu as _cpu  # noqa: F401  (loads the implementations)

POSITIVE = {"hard": 0, "easy": 1, "random": 2, "all": 3}
NEGATIVE = {"hard": 0, "semihard": 1, "easy": 2, "random": 3, "distance": 4, "all": 5}
DISTANCE = {"euclidean": 0, "sqeuclidean": 1, "cosine": 2}
LOSS = {"margin": 0, "soft_margin": 1, "first_order": 2, "second_order": 3}
REDUCTION = {"mean": 0, "mean_nonzero": 1, "sum": 2, "none": 3}
OBJECTIVE = {
    "batch_all": 0,
    "batch_all_soft": 1,
    "semi_hard": 2,
    "multi_similarity": 3,
    "contrastive": 4,
    "beta_margin": 5,
}

_MINING = (
    "Tensor emb, Tensor labels, Tensor? ref_emb, Tensor? ref_labels, Tensor? self_index, int? ignore_label, "
    "Tensor? seed, int positive, int negative, int distance, float cutoff, float nonzero_loss_cutoff"
)
_SCHEMAS = {
    "mine": f"({_MINING}) -> (Tensor picks, Tensor distances)",
    "triplet_forward": f"({_MINING}, int loss, int reduction, float margin, float temperature)"
    " -> (Tensor loss, Tensor picks, Tensor terms)",
    "triplet_backward": "(Tensor grad, Tensor emb, Tensor? ref_emb, Tensor picks, Tensor terms, int distance,"
    " bool wants_emb, bool wants_ref) -> (Tensor emb_gradient, Tensor ref_gradient)",
    "tuples_forward": f"({_MINING}, int objective, int reduction, float[] parameters, Tensor? beta)"
    " -> (Tensor loss, Tensor active, Tensor picks, Tensor state)",
    "tuples_backward": "(Tensor grad, Tensor emb, Tensor labels, Tensor? ref_emb, Tensor? ref_labels,"
    " Tensor? self_index, int? ignore_label, int positive, int negative, int distance, int objective,"
    " int reduction, float[] parameters, Tensor? beta, Tensor active, Tensor picks, Tensor state,"
    " bool wants_emb, bool wants_ref) -> (Tensor emb_gradient, Tensor ref_gradient, Tensor beta_gradient)",
}
_DISTANCE_ARGUMENT = 9  # its position in the schemas of mine and triplet_forward


class _Ops(NamedTuple):
    """The ops of one backend."""

    mine: Any
    triplet_forward: Any
    triplet_backward: Any
    tuples_forward: Any
    tuples_backward: Any


def compute_type(emb: Tensor) -> torch.dtype:
    """The type of losses and distances."""
    return torch.float64 if emb.dtype == torch.float64 else torch.float32


def _mine_fake(emb: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    count = emb.shape[0]
    return emb.new_empty((2, count), dtype=torch.int64), emb.new_empty((2, count), dtype=compute_type(emb))


def _forward_fake(emb: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    count, reduction = emb.shape[0], rest[-3]
    return (
        emb.new_empty((count,) if reduction == REDUCTION["none"] else (), dtype=compute_type(emb)),
        emb.new_empty((2, count), dtype=torch.int64),
        emb.new_empty((4, count), dtype=compute_type(emb)),
    )


def _backward_fake(
    grad: Tensor,
    emb: Tensor,
    ref_emb: Tensor | None,
    picks: Tensor,
    terms: Tensor,
    distance: int,
    wants_emb: bool,
    wants_ref: bool,
) -> tuple[Tensor, Tensor]:
    ref_shape = ref_emb.shape if ref_emb is not None and wants_ref else (0,)
    return emb.new_empty(emb.shape if wants_emb else (0,)), emb.new_empty(ref_shape)


def _tuples_forward_fake(emb: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count, reduction = emb.shape[0], rest[-3]
    return (
        emb.new_empty((count,) if reduction == REDUCTION["none"] else (), dtype=compute_type(emb)),
        emb.new_empty((2,), dtype=torch.int64),
        emb.new_empty((2, count), dtype=torch.int64),
        emb.new_empty((4, count), dtype=compute_type(emb)),
    )


def _tuples_backward_fake(
    grad: Tensor, emb: Tensor, labels: Tensor, ref_emb: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, beta, _, _, _, wants_emb, wants_ref = rest
    ref_shape = ref_emb.shape if ref_emb is not None and wants_ref else (0,)
    return (
        emb.new_empty(emb.shape if wants_emb else (0,)),
        emb.new_empty(ref_shape),
        emb.new_empty((0,) if beta is None else (emb.shape[0],), dtype=compute_type(emb)),
    )


_FAKES = _Ops(_mine_fake, _forward_fake, _backward_fake, _tuples_forward_fake, _tuples_backward_fake)


def _gradients(
    backward: Any, ctx: Any, grad: Tensor, wants_emb: bool, wants_ref: bool
) -> tuple[Tensor | None, Tensor | None]:
    emb, ref_emb, picks, terms = ctx.saved_tensors
    arguments = grad.contiguous(), emb, ref_emb, picks, terms, ctx.distance, wants_emb, wants_ref
    if torch.is_grad_enabled():  # create_graph=True: the op's own autograd stands ready to refuse
        emb_gradient, ref_gradient = backward(*arguments)
    else:
        with torch._C._AutoDispatchBelowAutograd():
            emb_gradient, ref_gradient = backward(*arguments)
    return emb_gradient if wants_emb else None, ref_gradient if wants_ref else None


# The ops' own autograd serves torch.compile and direct callers of torch.ops.


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, picks, terms = output
    ctx.mark_non_differentiable(picks, terms)
    ctx.save_for_backward(inputs[0], inputs[2], picks, terms)
    ctx.distance = inputs[_DISTANCE_ARGUMENT]


def _differentiate(backward: Any, ctx: Any, grad: Tensor, *_: Any) -> Any:
    wants_emb, wants_ref = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
    emb_gradient, ref_gradient = _gradients(backward, ctx, grad, wants_emb, wants_ref)
    return emb_gradient, None, ref_gradient, *[None] * 13


def _save_tuples(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, active, picks, state = output
    *rows, ignore_label, _, positive, negative, distance = inputs[:10]
    *options, beta = inputs[12:]
    ctx.mark_non_differentiable(active, picks, state)
    ctx.save_for_backward(*rows, beta, active, picks, state)
    ctx.options = ignore_label, positive, negative, distance, *options


def _differentiate_tuples(backward: Any, ctx: Any, grad: Tensor, *_: Any) -> Any:
    *rows, beta, active, picks, state = ctx.saved_tensors
    wants_emb, wants_ref, wants_beta = (ctx.needs_input_grad[position] for position in (0, 2, 15))
    emb_gradient, ref_gradient, beta_gradient = backward(
        grad.contiguous(), *rows, *ctx.options, beta, active, picks, state, wants_emb, wants_ref
    )
    return (
        emb_gradient if wants_emb else None,
        None,
        ref_gradient if wants_ref else None,
        *[None] * 12,
        beta_gradient if wants_beta else None,
    )


def _mark_picks(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output)


def _refuse(ctx: Any, *_: Any) -> None:
    raise RuntimeError("tripletops is first order only: a second derivative of its loss was asked for")


_library = torch.library.Library("tripletops", "DEF")


def _define(prefix: str, *tags: torch.Tag) -> _Ops:
    """Tell torch of the ops whose names begin with `prefix`; their implementations come from elsewhere."""
    for name, schema in _SCHEMAS.items():
        _library.define(f"{prefix}{name}{schema}", tags=(torch.Tag.pt2_compliant_tag, *tags))
        torch.library.register_fake(f"tripletops::{prefix}{name}", getattr(_FAKES, name), lib=_library)
    ops = _Ops(*(getattr(torch.ops.tripletops, prefix + name).default for name in _Ops._fields))
    for op, backward, save in (
        (ops.mine, _refuse, _mark_picks),
        (ops.triplet_forward, partial(_differentiate, ops.triplet_backward), _save),
        (ops.triplet_backward, _refuse, None),
        (ops.tuples_forward, partial(_differentiate_tuples, ops.tuples_backward), _save_tuples),
        (ops.tuples_backward, _refuse, None),
    ):
        torch.library.register_autograd(op, backward, setup_context=save, lib=_library)
    return ops


# Some of triton's read a size back from the GPU, which a CUDA graph cannot hold.
_OPS = {"cpu": _define(""), "triton": _define("triton_", torch.Tag.cudagraph_unsafe)}


def _run_triton(name: str, *arguments: Any) -> Any:
    from tripletops.backends import triton

    return getattr(triton, name)(*arguments)


for _name in _SCHEMAS:
    for _key in ("CUDA", "CPU"):  # CPU tensors are for Triton's interpreter
        _library.impl(f"triton_{_name}", partial(_run_triton, _name), _key)


class _TripletLoss(torch.autograd.Function):
    """The same in eager mode, where the op's own autograd would cost a small batch half as much again."""

    @staticmethod
    def forward(ctx: Any, emb: Tensor, ref_emb: Tensor | None, call: tuple[_Ops, tuple[Any, ...]]) -> Tensor:
        ops, arguments = call
        with torch._C._AutoDispatchBelowAutograd():
            loss, picks, terms = ops.triplet_forward(*arguments)
        ctx.save_for_backward(emb, ref_emb, picks, terms)
        ctx.op = ops.triplet_backward
        ctx.distance = arguments[_DISTANCE_ARGUMENT]
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        wants_emb, wants_ref, _ = ctx.needs_input_grad
        return *_gradients(ctx.op, ctx, grad, wants_emb, wants_ref), None


def triplet_loss(backend: str, *arguments: Any) -> Tensor:
    """The loss of the mined triplets, differentiable in emb and ref_emb; arguments as in the schema.

    emb, labels, ref_emb, ref_labels, self_index, ignore_label, seed, positive, negative, distance, cutoff,
    nonzero_loss_cutoff, loss, reduction, margin, temperature.
    """
    ops = _OPS[backend]
    if torch.compiler.is_compiling():
        return ops.triplet_forward(*arguments)[0]  # type: ignore[no-any-return]
    # Every argument of apply() costs; only these two can have a gradient.
    return _TripletLoss.apply(arguments[0], arguments[2], (ops, arguments))  # type: ignore[no-any-return]


def mine(backend: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Picks (2, N) and distances (2, N) of the positive and the negative of every anchor; arguments as in the
    schema: those of `triplet_loss` up to nonzero_loss_cutoff."""
    return _OPS[backend].mine(*arguments)  # type: ignore[no-any-return]


def tuples_loss(backend: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    """An objective over many tuples, differentiable in emb, ref_emb and beta, and how many terms are active.

    Arguments as in the schema: those of `mine`, then objective, reduction, parameters, beta.
    """
    loss, active, _, _ = _OPS[backend].tuples_forward(*arguments)
    return loss, active[0]
