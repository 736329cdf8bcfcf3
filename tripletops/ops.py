"""The ops as torch knows them: schemas, fake tensors and autograd. The only user of `torch.library`.

Arguments arrive checked (by `functional`), as the records of `_call`. Every backend has ops of its own, which
are all the same but for their implementation: that of `cpu` is C++, that of `triton` Python, and neither
knows autograd.

Autograd (first order, reverse mode) and torch.compile are supported. Every op refuses the other ways in which
torch can transform a program: left alone, some of them give wrong derivatives without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeAlias, get_type_hints

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

from tripletops._call import Call, Differentiated, Evaluated, Gradients, Mined, Totals, compute_type
from tripletops._words import OBJECTIVES, REDUCTION, Codes
from tripletops.backends import cpu as _cpu  # noqa: F401  (loads the implementations)

# Schemas, written from the records.

_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int | None: "int?",
    list[int]: "int[]",
    list[float]: "float[]",
    bool: "bool",
}


def _arguments(record: type) -> str:
    return ", ".join(f"{_TYPES[kind]} {name}" for name, kind in get_type_hints(record).items())


def _results(record: type) -> str:
    return f"({', '.join(_TYPES[kind] for kind in get_type_hints(record).values())})"


_SCHEMAS = {
    "mine": f"({_arguments(Call)}) -> {_results(Mined)}",
    "loss": f"({_arguments(Call)}) -> {_results(Evaluated)}",
    "gradient": f"({_arguments(Differentiated)}) -> {_results(Gradients)}",
}


# Fake tensors: the shapes of results, which depend on no value.


def _mine_fake(*arguments: Any) -> Mined:
    emb = Call(*arguments).emb
    count = emb.shape[0]
    return Mined(
        emb.new_empty((2, count), dtype=torch.int64), emb.new_empty((2, count), dtype=compute_type(emb))
    )


def _loss_fake(*arguments: Any) -> Evaluated:
    call = Call(*arguments)
    emb, codes = call.emb, Codes(*call.codes)
    count, kind = emb.shape[0], compute_type(emb)
    return Evaluated(
        emb.new_empty((count,) if codes.reduction == REDUCTION.code["none"] else (), dtype=kind),
        emb.new_empty((len(Totals._fields),), dtype=torch.float64),
        emb.new_empty((2, count), dtype=torch.int64),
        emb.new_empty((len(OBJECTIVES[codes.objective].saved), count), dtype=kind),
    )


def _gradient_fake(*arguments: Any) -> Gradients:
    given = Differentiated(*arguments)
    emb, ref_emb = given.emb, given.ref_emb
    return Gradients(
        emb.new_empty(emb.shape if given.wants_emb else (0,)),
        emb.new_empty(ref_emb.shape if ref_emb is not None and given.wants_ref else (0,)),
        emb.new_empty((0,) if given.learned is None else (emb.shape[0],), dtype=compute_type(emb)),
    )


_FAKES: dict[str, Callable[..., Any]] = {
    "mine": _mine_fake,
    "loss": _loss_fake,
    "gradient": _gradient_fake,
}


# What is refused.

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


def _is_transformed() -> bool:
    """Whether anything but autograd may want to know of an op."""
    return (
        torch.compiler.is_compiling()
        or _in_torch_func()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
    )


def _refuse_tracing(*_: Any) -> NoReturn:
    raise RuntimeError(f"{_SUPPORTED}; torch.jit.trace was asked for: torch.export takes the same program")


def _refuse_vmap(*_: Any) -> NoReturn:
    raise RuntimeError(f"{_SUPPORTED}; torch.func.vmap was asked for: call it once for every batch")


# Autograd. Every argument and every result of apply() costs a small batch time. So only the tensors that can
# have a gradient are arguments of their own, and only the loss is a result: the others go into a list.
_Run: TypeAlias = "tuple[_LossOp, Call, list[Tensor]]"


class _Loss(torch.autograd.Function):
    """The loss of a call, differentiable in emb, ref_emb and learned."""

    @staticmethod
    def forward(ctx: Any, emb: Tensor, ref_emb: Tensor | None, learned: Tensor | None, run: _Run) -> Tensor:
        op, call, others = run
        loss, *others[:] = op.run(call)
        _save(ctx, op, call, *others)
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        op, call, kept = _saved(ctx)
        return _gradients(ctx, grad, op, call, *kept)


class _LossWithGradients(torch.autograd.Function):
    """The same of a small batch, with its gradients: backward multiplies them by what arrives."""

    @staticmethod
    def forward(
        ctx: Any,
        emb: Tensor,
        ref_emb: Tensor | None,
        learned: Tensor | None,
        run: tuple[_LossOp, Call, Tensor],
    ) -> Tensor:
        op, call, settings = run
        wants_emb, wants_ref, wants_learned, _ = ctx.needs_input_grad
        _, labels, _, ref_labels, self_index, ignore_label, seed, _, _, _ = call
        if ref_emb is None and learned is None and ignore_label is None and seed is None:
            loss, gradients = _loss_with_gradients(emb, labels, settings, wants_emb)
        else:
            wants = wants_emb, wants_ref, wants_learned
            others = ref_emb, ref_labels, self_index, ignore_label, seed, learned
            loss, gradients = _loss_with_gradients(emb, labels, settings, *wants, *others)
        _save(ctx, op, call, *gradients)
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if not (torch.is_grad_enabled() or _is_transformed() or _functorch.is_legacy_batchedtensor(grad)):
            gradients = _scaled(ctx.saved_tensors[_INPUTS:], grad, ctx.rows_type)
            if gradients is not None:
                rest = iter(gradients)
                return tuple([next(rest) if wanted else None for wanted in ctx.needs_input_grad])
        op, call, _ = _saved(ctx)
        _, *others = op.run(call)
        return _gradients(ctx, grad, op, call, *others)


_INPUTS = 7  # tensors of a call


def _save(ctx: Any, op: _LossOp, call: Call, *computed: Tensor) -> None:
    """Keep a call for backward."""
    emb, labels, ref_emb, ref_labels, self_index, ignore_label, seed, learned, codes, numbers = call
    ctx.save_for_backward(emb, labels, ref_emb, ref_labels, self_index, seed, learned, *computed)
    ctx.kept, ctx.rows_type = (op, ignore_label, codes, numbers), emb.dtype


def _saved(ctx: Any) -> tuple[_LossOp, Call, list[Tensor]]:
    emb, labels, ref_emb, ref_labels, self_index, seed, learned, *computed = ctx.saved_tensors
    op, ignore_label, codes, numbers = ctx.kept
    call = Call(emb, labels, ref_emb, ref_labels, self_index, ignore_label, seed, learned, codes, numbers)
    return op, call, computed


def _gradients(
    ctx: Any, grad: Tensor, op: _LossOp, call: Call, totals: Tensor, picks: Tensor, saved: Tensor
) -> Any:
    """What the op of the gradient gives for each argument of a Function above."""
    emb, labels, ref_emb, ref_labels, self_index, ignore_label, _, learned, codes, numbers = call
    wants_emb, wants_ref, wants_learned, _ = ctx.needs_input_grad
    emb_gradient, ref_gradient, learned_gradient = op.gradient.call(
        Differentiated(
            grad.contiguous(),
            emb,
            labels,
            ref_emb,
            ref_labels,
            self_index,
            ignore_label,
            learned,
            codes,
            numbers,
            totals,
            picks,
            saved,
            wants_emb,
            wants_ref,
        )
    )
    return (
        emb_gradient if wants_emb else None,
        ref_gradient if wants_ref else None,
        learned_gradient if wants_learned else None,
        None,
    )


def _scaled(gradients: Sequence[Tensor], factor: Tensor, rows_type: torch.dtype) -> Sequence[Tensor] | None:
    """Gradients times `factor`, those of rows in their type; None where digits would be missing."""
    if factor.item() != 1:
        gradients = [_scale(gradient, factor) for gradient in gradients]
        if not all(gradient.numel() for gradient in gradients):
            return None
    elif torch._C._autograd._get_current_graph_task_keep_graph():
        # A second backward pass must find what is kept as it is, whatever becomes of the first one's.
        gradients = [gradient.clone() for gradient in gradients]
    if rows_type is torch.float16 or rows_type is torch.bfloat16:
        return [gradient.to(rows_type) if gradient.dim() == 2 else gradient for gradient in gradients]
    return gradients


class _Gradient(torch.autograd.Function):
    """The gradient of a loss, which cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        *_, op, arguments = given
        return op.run(arguments)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise RuntimeError("tripletops is first order only: a second derivative of its loss was asked for")


class _Op:
    """An op of one backend and its autograd, of which this one has none.

    torch.library.register_autograd would take several times as long as the op of a small batch, and it drops
    the tangents of forward mode where no gradient is asked for. So `autograd` is registered instead.
    """

    record_type: type[Any] = Call
    takes_vmap = False

    def __init__(self, name: str) -> None:
        self.overload = getattr(torch.ops.tripletops, name).default
        _library.impl(name, self.autograd, "Autograd")
        _library.impl(name, _refuse_tracing, "Tracer")
        if not self.takes_vmap:
            _library.impl(name, _refuse_vmap, "FuncTorchBatched")

    def call(self, given: Any) -> Any:
        """Run, `given` being a record of the op's type."""
        if _is_transformed():
            return self.overload(*given)
        return self.recorded(given)  # what torch's dispatcher would come to, 5 µs later

    def autograd(self, *arguments: Any) -> Any:
        """The kernel of the Autograd key, which torch's dispatcher calls first."""
        refuse_derivatives(*arguments)
        given = self.record_type(*arguments)
        # A transform of torch.func that was not refused asks for no gradient.
        return self.run(given) if _in_torch_func() else self.recorded(given)

    def recorded(self, given: Any) -> Any:
        """Run, and let autograd know of it."""
        return self.run(given)

    def run(self, given: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload(*given)


class _LossOp(_Op):
    def __init__(self, name: str, gradient: _GradientOp) -> None:
        super().__init__(name)
        self.gradient = gradient

    def recorded(self, given: Call) -> Any:
        if not torch.is_grad_enabled():
            return self.run(given)
        others: list[Tensor] = []
        loss = _Loss.apply(given.emb, given.ref_emb, given.learned, (self, given, others))
        return loss, *others


class _GradientOp(_Op):
    record_type = Differentiated
    takes_vmap = True  # torch.autograd.grad(..., is_grads_batched=True) needs it

    def recorded(self, given: Differentiated) -> Any:
        if not torch.is_grad_enabled():
            return self.run(given)
        tensors = given.grad, given.emb, given.ref_emb, given.learned, given.totals, given.saved
        return _Gradient.apply(*tensors, self, given)


class _Ops(NamedTuple):
    """The ops of one backend."""

    mine: _Op
    loss: _Op


_library = torch.library.Library("tripletops", "DEF")


def _define(prefix: str, *tags: torch.Tag) -> _Ops:
    """Tell torch of the ops whose names begin with `prefix`; their implementations come from elsewhere."""
    for name, schema in _SCHEMAS.items():
        _library.define(f"{prefix}{name}{schema}", tags=(torch.Tag.pt2_compliant_tag, *tags))
        torch.library.register_fake(f"tripletops::{prefix}{name}", _FAKES[name], lib=_library)
    return _Ops(_Op(f"{prefix}mine"), _LossOp(f"{prefix}loss", _GradientOp(f"{prefix}gradient")))


# Gradients of small batches are computed together with the loss: to start an op takes as long there as to run
# it.
_SMALL = 1024  # rows of a side
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_REDUCTION, _NONE = Codes._fields.index("reduction"), REDUCTION.code["none"]

# Some of triton's read a size back from the GPU, which a CUDA graph cannot hold.
_OPS = {"cpu": _define(""), "triton": _define("triton_", torch.Tag.cudagraph_unsafe)}

# Two ops that only `_LossWithGradients` calls, below autograd and never while anything is traced.
_library.define(
    "loss_with_gradients(Tensor emb, Tensor labels, Tensor settings, "
    "bool wants_emb, bool wants_ref=False, bool wants_learned=False, Tensor? ref_emb=None, "
    "Tensor? ref_labels=None, Tensor? self_index=None, int? ignore_label=None, Tensor? seed=None, "
    "Tensor? learned=None) -> (Tensor, Tensor[])"
)
_library.define("scaled(Tensor gradient, Tensor factor) -> Tensor")
for _name in ("loss_with_gradients", "scaled"):
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
_loss_with_gradients = torch.ops.tripletops.loss_with_gradients.default
_scale = torch.ops.tripletops.scaled.default


def _run_triton(name: str, *arguments: Any) -> Any:
    from tripletops.backends import triton

    return getattr(triton, name)(*arguments)


for _name in _SCHEMAS:
    for _key in ("CUDA", "CPU"):  # CPU tensors are for Triton's interpreter
        _library.impl(f"triton_{_name}", partial(_run_triton, _name), _key)


# Which of the mined triplets share no row with an earlier one. Each depends on those before it, so the
# triplets are gone through one after the other, on the CPU whatever the device: O(N), beside mining's O(N²).


def _exclusive(picks: Tensor, self_index: Tensor | None, candidates: int | None) -> Tensor:
    count = picks.shape[1]
    own = range(count) if candidates is None else [-1] * count if self_index is None else self_index.tolist()
    used = bytearray((count if candidates is None else candidates) + 1)  # the last place is that of −1
    kept = []
    for anchor, positive, negative in zip(own, *picks.tolist(), strict=True):
        whole = positive >= 0 and negative >= 0
        free = not (used[anchor] or used[positive] or used[negative])
        if whole and free:
            used[anchor] = used[positive] = used[negative] = True
            used[-1] = False
        kept.append(free or not whole)
    return torch.tensor(kept, dtype=torch.bool, device=picks.device)


_library.define(
    "exclusive(Tensor picks, Tensor? self_index, SymInt? candidates) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe),
)
torch.library.register_fake(
    "tripletops::exclusive",
    lambda picks, self_index, candidates: picks.new_empty((picks.shape[1],), dtype=torch.bool),
    lib=_library,
)
_library.impl("exclusive", _exclusive, "CompositeExplicitAutograd")


def exclusive(picks: Tensor, self_index: Tensor | None, ref_emb: Tensor | None) -> Tensor:
    """(N,) bool: False for anchors whose triplet shares a row with the triplet of an earlier anchor."""
    candidates = None if ref_emb is None else ref_emb.shape[0]
    kept: Tensor = torch.ops.tripletops.exclusive(picks, self_index, candidates)
    return kept


def mine(backend: str, call: Call) -> Mined:
    """The positive and the negative of every anchor."""
    return Mined(*_OPS[backend].mine.call(call))


def loss(backend: str, call: Call, packed: list[Tensor] | None = None) -> Tensor:
    """The loss of the call's objective, differentiable in emb, ref_emb and learned.

    `packed` is where the codes and numbers of the call are kept as a tensor, from one call to the next.
    """
    op = _OPS[backend].loss
    if packed is None or backend != "cpu" or not _wants_gradients_now(call):
        return op.call(call)[0]  # type: ignore[no-any-return]
    if not packed:
        packed.append(torch.tensor([*call.codes, *call.numbers], dtype=torch.float64, device="cpu"))
    run = op, call, packed[0]
    return _LossWithGradients.apply(call.emb, call.ref_emb, call.learned, run)  # type: ignore[no-any-return]


def _wants_gradients_now(call: Call) -> bool:
    emb, ref_emb, learned = call.emb, call.ref_emb, call.learned
    return (
        torch.is_grad_enabled()
        and (
            emb.requires_grad
            or (ref_emb is not None and ref_emb.requires_grad)
            or (learned is not None and learned.requires_grad)
        )
        and emb.shape[0] <= _SMALL
        and (ref_emb is None or ref_emb.shape[0] <= _SMALL)
        and call.codes[_REDUCTION] != _NONE
        and type(emb) in _PLAIN
        and not _is_transformed()
    )


def loss_and_totals(backend: str, call: Call) -> tuple[Tensor, Tensor]:
    loss, totals, _, _ = _OPS[backend].loss.call(call)
    return loss, totals
