"""The ops as torch knows them: schemas, fake tensors and autograd. The only user of `torch.library`.

Arguments arrive checked (by `functional`) and words arrive as the codes of the tables below, which are the
orders of the enums in `csrc/kernels/problem.h`. Every backend has ops of its own, which are all the same but
for their implementation: that of `cpu` is C++, that of `triton` Python, and neither knows autograd.

Autograd (first order, reverse mode) and torch.compile are supported. Every op refuses the other ways in which
torch can transform a program: left alone, some of them give wrong derivatives without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

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


_FAKES: dict[str, Callable[..., Any]] = {
    "mine": _mine_fake,
    "triplet_forward": _forward_fake,
    "triplet_backward": _backward_fake,
    "tuples_forward": _tuples_forward_fake,
    "tuples_backward": _tuples_backward_fake,
}

_SUPPORTED = "tripletops supports autograd (first order, reverse mode) and torch.compile"

_in_torch_func = torch._C._are_functorch_transforms_active  # inside vmap, grad, jvp, …


def refuse_tracing_and_vmap(*tensors: Any) -> None:
    """Refuse what not even the reference can do; to be called before any value is looked at."""
    if torch.compiler.is_compiling():
        return
    if torch._C._is_tracing():
        _refuse_tracing()
    if _in_torch_func():
        for tensor in tensors:
            if isinstance(tensor, Tensor) and _functorch.is_batchedtensor(tensor):
                _refuse_vmap()


def refuse_derivatives(*arguments: Any) -> None:
    """Refuse derivatives of the tensors among `arguments` by forward mode or by torch.func."""
    if not (_in_torch_func() or forward_ad._current_level >= 0):
        return
    for tensor in arguments:
        if not isinstance(tensor, Tensor):
            continue
        # A compiled program enters level 0, the only one there is, without telling forward_ad.
        if forward_ad.unpack_dual(tensor, level=0).tangent is not None:
            raise RuntimeError(
                f"{_SUPPORTED}; forward-mode differentiation was asked for (torch.autograd.forward_ad, "
                "torch.func.jvp, jacfwd or hessian): backend='reference' has it"
            )
        if torch.is_grad_enabled() and tensor.requires_grad and _functorch.is_gradtrackingtensor(tensor):
            raise RuntimeError(
                f"{_SUPPORTED}; a derivative by torch.func was asked for (grad, vjp, jacrev or hessian): "
                "torch.autograd.grad gives the same, and backend='reference' has torch.func's"
            )


def _refuse_tracing(*_: Any) -> NoReturn:
    raise RuntimeError(f"{_SUPPORTED}; torch.jit.trace was asked for: torch.export takes the same program")


def _refuse_vmap(*_: Any) -> NoReturn:
    raise RuntimeError(f"{_SUPPORTED}; torch.func.vmap was asked for: call it once for every batch")


# Every argument and every result of apply() costs a small batch time. So only the tensors that can have a
# gradient are arguments of their own, and only the loss is a result: what else there is goes into a list.
_Call: TypeAlias = "tuple[_Op, tuple[Any, ...], list[Tensor]]"


class _TripletLoss(torch.autograd.Function):
    """The loss of triplet_forward."""

    @staticmethod
    def forward(ctx: Any, emb: Tensor, ref_emb: Tensor | None, call: _Call) -> Tensor:
        op, arguments, others = call
        loss, picks, terms = op.run(arguments)
        others += picks, terms
        ctx.save_for_backward(emb, ref_emb, picks, terms)
        ctx.op, ctx.distance = op.backward, arguments[_DISTANCE_ARGUMENT]
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        wants_emb, wants_ref, _ = ctx.needs_input_grad
        arguments = grad.contiguous(), *ctx.saved_tensors, ctx.distance, wants_emb, wants_ref
        emb_gradient, ref_gradient = ctx.op.call(arguments)
        return emb_gradient if wants_emb else None, ref_gradient if wants_ref else None, None


class _TuplesLoss(torch.autograd.Function):
    """The loss of tuples_forward."""

    @staticmethod
    def forward(ctx: Any, emb: Tensor, ref_emb: Tensor | None, beta: Tensor | None, call: _Call) -> Tensor:
        op, arguments, others = call
        loss, active, picks, state = op.run(arguments)
        others += active, picks, state
        *rows, ignore_label, _, positive, negative, distance = arguments[:10]
        ctx.save_for_backward(*rows, beta, active, picks, state)
        ctx.op, ctx.options = op.backward, (ignore_label, positive, negative, distance, *arguments[12:15])
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        wants_emb, wants_ref, wants_beta, _ = ctx.needs_input_grad
        *rows, beta, active, picks, state = ctx.saved_tensors
        arguments = grad.contiguous(), *rows, *ctx.options, beta, active, picks, state, wants_emb, wants_ref
        emb_gradient, ref_gradient, beta_gradient = ctx.op.call(arguments)
        return (
            emb_gradient if wants_emb else None,
            ref_gradient if wants_ref else None,
            beta_gradient if wants_beta else None,
            None,
        )


class _Gradient(torch.autograd.Function):
    """triplet_backward or tuples_backward, the end of what can be differentiated."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        *_, (op, arguments, _) = given
        return op.run(arguments)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise RuntimeError("tripletops is first order only: a second derivative of its loss was asked for")


class _Op:
    """An op of one backend and its autograd.

    torch.library.register_autograd would take several times as long as the op of a small batch, and it drops
    the tangents of forward mode where no gradient is asked for. So `autograd` is registered instead.
    """

    def __init__(
        self,
        name: str,
        function: type[torch.autograd.Function] | None = None,
        differentiable: tuple[str, ...] = (),
        backward: _Op | None = None,
    ) -> None:
        self.overload = getattr(torch.ops.tripletops, name).default
        self.function = function
        names = [argument.name for argument in self.overload._schema.arguments]
        if function is not None:
            self.inputs = itemgetter(*(names.index(argument) for argument in differentiable))
        self.backward = backward
        _library.impl(name, self.autograd, "Autograd")
        _library.impl(name, _refuse_tracing, "Tracer")
        if function is not _Gradient:  # torch.autograd.grad(..., is_grads_batched=True) needs those
            _library.impl(name, _refuse_vmap, "FuncTorchBatched")

    def call(self, arguments: tuple[Any, ...]) -> Any:
        if torch.compiler.is_compiling() or _in_torch_func() or forward_ad._current_level >= 0:
            return self.overload(*arguments)
        return self.record(arguments)  # what torch's dispatcher would come to, 5 µs later

    def autograd(self, *arguments: Any) -> Any:
        """The kernel of the Autograd key, which torch's dispatcher calls first."""
        refuse_derivatives(*arguments)
        # A transform of torch.func that was not refused asks for no gradient.
        return self.run(arguments) if _in_torch_func() else self.record(arguments)

    def record(self, arguments: tuple[Any, ...]) -> Any:
        """Run, and let autograd know of it."""
        if self.function is None or not torch.is_grad_enabled():
            return self.run(arguments)
        others: list[Tensor] = []
        result = self.function.apply(*self.inputs(arguments), (self, arguments, others))
        return (result, *others) if others else result

    def run(self, arguments: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload(*arguments)


class _Ops(NamedTuple):
    """The ops of one backend."""

    mine: _Op
    triplet_forward: _Op
    triplet_backward: _Op
    tuples_forward: _Op
    tuples_backward: _Op


_library = torch.library.Library("tripletops", "DEF")


def _define(prefix: str, *tags: torch.Tag) -> _Ops:
    """Tell torch of the ops whose names begin with `prefix`; their implementations come from elsewhere."""
    for name, schema in _SCHEMAS.items():
        _library.define(f"{prefix}{name}{schema}", tags=(torch.Tag.pt2_compliant_tag, *tags))
        torch.library.register_fake(f"tripletops::{prefix}{name}", _FAKES[name], lib=_library)
    triplet_backward = _Op(f"{prefix}triplet_backward", _Gradient, ("grad", "emb", "ref_emb", "terms"))
    tuples_backward = _Op(f"{prefix}tuples_backward", _Gradient, ("grad", "emb", "ref_emb", "beta", "state"))
    return _Ops(
        _Op(f"{prefix}mine"),
        _Op(f"{prefix}triplet_forward", _TripletLoss, ("emb", "ref_emb"), triplet_backward),
        triplet_backward,
        _Op(f"{prefix}tuples_forward", _TuplesLoss, ("emb", "ref_emb", "beta"), tuples_backward),
        tuples_backward,
    )


# Some of triton's read a size back from the GPU, which a CUDA graph cannot hold.
_OPS = {"cpu": _define(""), "triton": _define("triton_", torch.Tag.cudagraph_unsafe)}


def _run_triton(name: str, *arguments: Any) -> Any:
    from tripletops.backends import triton

    return getattr(triton, name)(*arguments)


for _name in _SCHEMAS:
    for _key in ("CUDA", "CPU"):  # CPU tensors are for Triton's interpreter
        _library.impl(f"triton_{_name}", partial(_run_triton, _name), _key)


def triplet_loss(backend: str, *arguments: Any) -> Tensor:
    """The loss of the mined triplets, differentiable in emb and ref_emb; arguments as in the schema.

    emb, labels, ref_emb, ref_labels, self_index, ignore_label, seed, positive, negative, distance, cutoff,
    nonzero_loss_cutoff, loss, reduction, margin, temperature.
    """
    return _OPS[backend].triplet_forward.call(arguments)[0]  # type: ignore[no-any-return]


def mine(backend: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Picks (2, N) and distances (2, N) of the positive and the negative of every anchor; arguments as in the
    schema: those of `triplet_loss` up to nonzero_loss_cutoff."""
    return _OPS[backend].mine.call(arguments)  # type: ignore[no-any-return]


def tuples_loss(backend: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    """An objective over many tuples, differentiable in emb, ref_emb and beta, and how many terms are active.

    Arguments as in the schema: those of `mine`, then objective, reduction, parameters, beta.
    """
    loss, active, _, _ = _OPS[backend].tuples_forward.call(arguments)
    return loss, active[0]
