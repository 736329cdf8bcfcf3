"""Watch a training while it runs: are its batches of any use, and do its embeddings shrink to a point?

A monitor gets the embeddings, the labels and the loss of every step, and looks at some of them: ever more
rarely, at the steps 0, 1, 2, 4, 8 and so on. In between it takes a cheap peek at the spread of the rows, at
every step in the beginning, and looks again as soon as that has fallen by a fifth. What it does not look at
must cost nothing: no check, no transfer from a GPU.

A look is one pass of mining, one search for the farthest pair, and the eigenvalues of a D×D matrix. So the
monitor sees what the loss sees: the live batch. It changes nothing, and it warns once of every kind of
trouble.
"""

from __future__ import annotations

import functools
import math
import numbers
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from tripletops import evaluate, functional
from tripletops._arguments import Options
from tripletops._rows import whole
from tripletops._words import FUNCTION
from tripletops.diagnostics.spectrum import effective_rank

__all__ = ["BatchWarning", "CollapseMonitor", "CollapseWarning"]

P = ParamSpec("P")
R = TypeVar("R")

_TRIPLET = FUNCTION["triplet_loss"]
_MODULES = {function.module: function for function in FUNCTION.values() if function.module}

# The schedule: the next look comes when there have been twice as many steps, or after `every` steps. Peeks
# are 32 times as dense, and one a step in the beginning.
_PEEKS = 32
_SUSPICIOUS = 4  # steps between peeks while the diameter is falling without the classes separating
_FALL = 0.8  # of the spread at the last look, below which a peek becomes a look

# Useless batches: fewer valid anchors than this share, in this many steps one after the other.
_VALID = 0.5
_BATCHES = 3

# Collapse. The choice is explained in docs/diagnostics.md.
_SHRUNK = 0.3  # of the first diameter
_UNSEPARATED = 0.8  # share of anchors whose negative is no farther than their positive
_UNDER = 0.2  # of the first diameter: the alarm must come before
_FALLING = 0.7  # of the first diameter, below which it counts where the next steps would lead
_AHEAD = 2  # that many steps
_BOUND_FACTOR = 2.0  # c in the bound diam₀ − c·L₀, equation 17 of the paper, as its experiments take it
_NARROW = 0.1  # diameter, as a share of the margin, at which the loss can't leave the margin's neighbourhood
_STUCK = 500  # steps with such a diameter
_GROWN = 1.25  # times the smallest diameter: the embeddings are spreading again

_ADVICE = (
    "What the papers recommend: semi-hard negatives (negative='semihard') or easy positives "
    "(easy_positive_loss) instead of the hardest ones, loss='second_order', a smaller batch, a larger "
    "embedding dimension."
)


class CollapseWarning(UserWarning):
    """All embeddings are shrinking to a point, or have done so."""


class BatchWarning(UserWarning):
    """Most rows of the batches have no positive or no negative, so that they train nothing."""


class _Rules(NamedTuple):
    """What the loss does, as far as the monitor has to know."""

    loss: str | None
    margin: float
    distance: str
    positive: str
    ignore_label: int | None
    backend: str | None

    @property
    def level(self) -> float:
        """The loss of embeddings that are all equal; NaN, if it is not known."""
        if self.loss is None:
            return math.nan
        return self.margin if self.loss == "margin" else math.log(2.0)


def _outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """What torch.compiler.disable does, which imports the compiler and triton: with the first call, not with
    this module."""
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **options)

    return call


class CollapseMonitor:
    """Measure live batches, log what is found, and warn once if they are useless or if the network collapses.

    >>> monitor = CollapseMonitor(margin=0.2)
    >>> for rows, labels in loader:
    ...     emb = network(rows)
    ...     loss = T.batch_hard_loss(emb, labels, margin=0.2)
    ...     monitor.update(emb, labels, loss)

    Or let the loss itself tell it, in any framework: ``criterion = monitor.watch(T.nn.BatchHardLoss())``.

    Args:
        loss: the word of the loss, which says what its value is once everything is equal: the margin for
            ``"margin"``, ln 2 for the others; None: not known.
        margin: that of the loss; None: the default of the losses.
        distance: that of the loss; None: euclidean, or cosine for the losses that are defined on it. For
            cosine, rows are normalised before they are measured.
        positive: ``"hard"`` or ``"easy"``, the positive that an anchor's nearest negative is compared with.
        ignore_label: that of the loss. Such rows are left out.
        every: steps between two looks later in the training, at most.
        writer: where to log: a SummaryWriter of TensorBoard (anything with ``add_scalar``), a dict, which
            gets a list for every name, or a function of a dict of values and a step.
        prefix: put before every name that is logged.
        backend: that of the mining, as in `mine`.

    `last` holds the measurements of the last look, `history` those of all looks since the start of the
    process, `warned` the step of each kind of warning.
    """

    def __init__(
        self,
        *,
        loss: str | None = "margin",
        margin: float | None = None,
        distance: str | None = None,
        positive: str = "hard",
        ignore_label: int | None = None,
        every: int = 1024,
        writer: Any = None,
        prefix: str = "collapse/",
        backend: str | None = None,
    ) -> None:
        self.every: int = whole("every", every)
        if positive not in ("hard", "easy"):
            raise ValueError(f"positive={positive!r} is not one of 'hard', 'easy'")
        _check_writer(writer)
        given = {"loss": loss, "margin": margin, "distance": distance}
        options = {name: value for name, value in given.items() if value is not None}
        functional.check_options(_TRIPLET, ignore_label=ignore_label, backend=backend, **options)
        self.writer: Any = writer
        self.prefix: str = prefix
        self._rules: _Rules = _rules(_TRIPLET, options, positive, ignore_label, backend)
        if loss is None:
            self._rules = self._rules._replace(loss=None)
        self._criterion: Any = None
        self.last: dict[str, float] | None = None
        self.history: list[dict[str, float]] = []
        self._state: _State = _State()

    @property
    def step(self) -> int:
        """How many batches there have been."""
        return self._state.step

    @property
    def warned(self) -> dict[str, int]:
        """The step of each kind of warning so far, ``"batches"`` and ``"collapse"``."""
        return dict(self._state.warned)

    @_outside_graphs
    def update(
        self,
        emb: Tensor,
        labels: Tensor,
        loss: Tensor | float,
        *,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        self_index: Tensor | None = None,
    ) -> dict[str, float] | None:
        """Tell the monitor of a step. It returns its measurements if it looked, else None.

        Args:
            emb: (N, D) the embeddings of the batch, with or without a graph, of any floating type.
            labels: (N,) their integer class ids.
            loss: its value, a number or a tensor; of several numbers the mean is taken.
            ref_emb, ref_labels, self_index: where the loss takes positives and negatives from elsewhere.
        """
        state = self._state
        step, state.step = state.step, state.step + 1
        if step < state.next_peek:
            return None
        with torch.no_grad():
            if step < state.next_look and state.first:
                state.next_peek = self._next_peek(step)
                if not self._has_shrunk(emb, labels):
                    return None
            found = self._measure(step, emb, labels, loss, (ref_emb, ref_labels, self_index))
        self._judge(found)
        # Three useless batches must follow each other at once: the last one of every epoch may be odd.
        state.next_look = step + 1 if 0 < state.useless < _BATCHES else self._after(step, 1)
        state.next_peek = self._next_peek(step)
        self.last = found
        self.history.append(found)
        _write(self.writer, self.prefix, found)
        return found

    def watch(self, criterion: Callable[..., Any]) -> torch.nn.Module:
        """`criterion`, any loss of embeddings and labels, as a module that tells the monitor of its calls.

        Calls without gradients, as in validation, are not told of. The word, the margin, the distance and so
        on are read from a loss of `tripletops.nn` at every look; for others those of the monitor hold. If the
        loss returns several things, the first is its value.
        """
        if not callable(criterion):
            raise TypeError(f"watch takes a loss that can be called, got {type(criterion).__qualname__}")
        self._criterion = criterion
        return _Watched(self, criterion)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training needs: the step, the first measurements, and what was warned of; numbers,
        strings, lists and dicts alone. `history` is not part of it."""
        return self._state.as_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the monitor was that gave `state`."""
        self._state = _State.of(state)

    def lightning_callback(self) -> Any:
        """A callback for Lightning's Trainer. It sends every look to the loggers, puts it among the metrics
        that other callbacks can watch, and keeps the monitor's state in the checkpoints. The embeddings come
        from `watch` or `update`."""
        return _lightning_callback(self)

    def hugging_face_callback(self, trainer: Any) -> Any:
        """A callback for the Trainer of Hugging Face, to be added to it: ``trainer.add_callback(...)``. It
        logs every look by ``trainer.log``, and keeps the monitor's state in the checkpoints. The embeddings
        come from `watch` or `update`."""
        return _hugging_face_callback(self, trainer)

    def _after(self, step: int, denser: int) -> int:
        return step + max(1, min(step, self.every) // denser)

    def _next_peek(self, step: int) -> int:
        following = self._after(step, _PEEKS)
        if self._state.suspicious:
            following = min(following, step + _SUSPICIOUS)
        return min(self._state.next_look, following)

    def _current_rules(self) -> _Rules:
        return _rules_of(self._criterion) or self._rules

    def _has_shrunk(self, emb: Tensor, labels: Tensor) -> bool:
        rows = _rows(emb, labels, self._current_rules())
        return len(rows) > 1 and not float(_spread(rows)) >= _FALL * self._state.spread

    def _measure(
        self,
        step: int,
        emb: Tensor,
        labels: Tensor,
        loss: Tensor | float,
        references: tuple[Tensor | None, Tensor | None, Tensor | None],
    ) -> dict[str, float]:
        rules = self._current_rules()
        mined = functional.mine(
            emb.detach() if isinstance(emb, Tensor) else emb,
            labels,
            positive=rules.positive,
            negative="hard",
            distance=rules.distance,
            ref_emb=None if references[0] is None else references[0].detach(),
            ref_labels=references[1],
            self_index=references[2],
            ignore_label=rules.ignore_label,
            backend=rules.backend,
        )
        value = _value(loss)
        found = {"step": step, "loss": value, "loss_level": value / rules.level if rules.level else math.nan}
        rows = _rows(emb, labels, rules)
        found |= _health(mined, labels, rules)
        found |= _geometry(rows)
        self._state.keep_first(found)
        first = self._state.first
        if first:
            found["diameter_share"] = found["diameter"] / first["diameter"] if first["diameter"] else math.nan
            found["diameter_bound"] = first["diameter"] - _BOUND_FACTOR * first["loss"]
        else:
            found["diameter_share"] = found["diameter_bound"] = math.nan
        return found

    def _judge(self, found: dict[str, float]) -> None:
        state = self._state
        if not math.isfinite(found["diameter"]):
            return  # rows that are not finite, as a gradient scaler produces them now and then
        state.spread = found["spread"]
        state.useless = state.useless + 1 if found["valid_share"] < _VALID else 0
        if state.useless >= _BATCHES:
            self._warn("batches", found, _about_batches(found), BatchWarning)
        level = self._current_rules().level
        state.follow_width(found, _NARROW * (level if level > 0 else math.inf))
        if state.is_collapsing(found):
            self._warn("collapse", found, _about_collapse(found, state, level), CollapseWarning)
        elif state.is_stuck(found):
            self._warn("collapse", found, _about_stuck(found, state, level), CollapseWarning)
        state.suspicious = (
            found["diameter_share"] < _FALLING
            and found["hard_negative_share"] >= _UNSEPARATED
            and "collapse" not in state.warned
        )
        state.previous = {"step": found["step"], "share": found["diameter_share"]}

    def _warn(self, kind: str, found: dict[str, float], text: str, category: type[UserWarning]) -> None:
        if kind not in self._state.warned:
            self._state.warned[kind] = int(found["step"])
            warnings.warn(text, category, stacklevel=4)


class _State:
    """What the monitor remembers from look to look, and what a checkpoint keeps."""

    def __init__(self) -> None:
        self.step = 0
        self.next_look = 0
        self.next_peek = 0
        self.spread = 0.0  # at the last look
        self.suspicious = False  # the diameter has fallen, and no warning has been given yet
        self.useless = 0  # looks at useless batches, one after the other
        self.narrow_since: int | None = None  # the step since which everything lies close together
        self.narrowest = math.inf  # the smallest diameter since then
        self.first: dict[str, float] = {}
        self.previous: dict[str, float] = {}
        self.warned: dict[str, int] = {}

    def as_dict(self) -> dict[str, Any]:
        return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> _State:
        state = cls()
        if set(saved) != set(vars(state)):
            raise ValueError(
                f"the state of a CollapseMonitor holds {', '.join(vars(state))}, got {', '.join(saved)}"
            )
        for name, value in saved.items():
            setattr(state, name, dict(value) if isinstance(value, Mapping) else value)
        return state

    def keep_first(self, found: dict[str, float]) -> None:
        if not self.first and math.isfinite(found["diameter"]) and found["rows"] > 1:
            self.first = {name: found[name] for name in ("step", "loss", "diameter", "effective_rank")}

    def is_collapsing(self, found: dict[str, float]) -> bool:
        """Whether the diameter has shrunk, or will have soon, without the classes separating."""
        share, before = found["diameter_share"], self.previous
        if found["rows"] < 2 or not found["valid_share"]:
            return False
        if found["diameter"] == 0:
            return True
        if not (math.isfinite(share) and found["hard_negative_share"] >= _UNSEPARATED):
            return False
        if before and share < min(before["share"], _FALLING):
            rate = (share / before["share"]) ** (1 / (found["step"] - before["step"]))
            if share * rate**_AHEAD < _UNDER:
                return True
        return share < _SHRUNK

    def follow_width(self, found: dict[str, float], narrow: float) -> None:
        if found["diameter"] > narrow or found["diameter"] > _GROWN * self.narrowest:
            self.narrow_since, self.narrowest = None, math.inf
        elif math.isfinite(narrow):
            self.narrow_since = int(found["step"]) if self.narrow_since is None else self.narrow_since
            self.narrowest = min(self.narrowest, found["diameter"])

    def is_stuck(self, found: dict[str, float]) -> bool:
        return self.narrow_since is not None and found["step"] - self.narrow_since >= _STUCK


class _Watched(torch.nn.Module):
    """A loss that tells a monitor of its calls."""

    def __init__(self, monitor: CollapseMonitor, criterion: Callable[..., Any]) -> None:
        super().__init__()
        self.monitor, self.criterion = monitor, criterion

    def forward(self, emb: Tensor, labels: Tensor, *others: Any, **options: Any) -> Any:
        returned = self.criterion(emb, labels, *others, **options)
        loss = returned[0] if isinstance(returned, tuple) else returned
        if self.training and torch.is_grad_enabled():
            references = {
                name: options[name] for name in ("ref_emb", "ref_labels", "self_index") if name in options
            }
            self.monitor.update(emb, labels, loss, **references)
        return returned


def _rules(
    function: Any, options: dict[str, Any], positive: str, ignore_label: int | None, backend: str | None
) -> _Rules:
    encoded = Options(function)
    words = encoded.encode(options).words
    margin = options.get("margin", encoded.default_numbers.margin)
    # A loss without a word for it, but with a margin, is a hinge.
    loss = words.get("loss", "margin" if "margin" in encoded.numbers else None)
    return _Rules(loss, float(margin), words["distance"], positive, ignore_label, backend)


def _rules_of(criterion: Any) -> _Rules | None:
    """The rules of a loss of `tripletops.nn`, as its attributes say now; None for any other loss."""
    names = [kind.__name__ for kind in type(criterion).__mro__ if kind.__module__ == "tripletops.nn"]
    function = next((_MODULES[name] for name in names if name in _MODULES), None)
    if function is None:
        return None
    known = Options(function)
    options = {name: getattr(criterion, name) for name in (*known.choices, *known.numbers)}
    positive = known.encode(options).words.get("positive")
    return _rules(
        function,
        options,
        "easy" if positive == "easy" else "hard",
        criterion.ignore_label,
        criterion.backend,
    )


def _rows(emb: Tensor, labels: Tensor, rules: _Rules) -> Tensor:
    """The rows that count, in at least float32; normalised, if the loss compares directions."""
    rows = emb.detach()
    if rules.ignore_label is not None:
        rows = rows[labels != rules.ignore_label]
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return torch.nn.functional.normalize(rows) if rules.distance == "cosine" else rows


def _spread(rows: Tensor) -> Tensor:
    """The root of the mean squared distance from the mean."""
    return (rows - rows.mean(0)).square().sum(1).mean().sqrt()


def _value(loss: object) -> float:
    if isinstance(loss, Tensor):
        return float(loss.detach().double().mean())
    if isinstance(loss, bool) or not isinstance(loss, numbers.Real):
        raise TypeError(f"loss must be a number or a torch.Tensor, got {type(loss).__qualname__}")
    return float(loss)


def _health(mined: functional.Triplets, labels: Tensor, rules: _Rules) -> dict[str, float]:
    """How much of the batch trains anything. Shares are of the rows that count, or of the valid anchors."""
    counted = torch.ones_like(mined.valid) if rules.ignore_label is None else labels != rules.ignore_label
    valid = mined.valid
    excess = (mined.d_ap - mined.d_an)[valid]
    has_loss = excess + rules.margin > 0 if rules.loss == "margin" else torch.ones_like(excess)
    counts = [counted.sum(), valid.sum(), (counted & (mined.positive < 0)).sum(), has_loss.sum()]
    rows, anchors, lonely, active, hard = torch.stack([*counts, (excess >= 0).sum()]).tolist()
    return {
        "rows": rows,
        "classes": len(labels[counted].unique()),
        "valid_share": anchors / rows if rows else math.nan,
        "without_partner_share": lonely / rows if rows else math.nan,
        "active_share": active / anchors if anchors else math.nan,
        "hard_negative_share": hard / anchors if anchors else math.nan,
    }


def _geometry(rows: Tensor) -> dict[str, float]:
    if not bool(rows.isfinite().all()) or len(rows) == 0:
        return dict.fromkeys(("diameter", "spread", "effective_rank"), math.nan)
    return {
        "diameter": evaluate.diameter(rows),
        "spread": float(_spread(rows)),
        "effective_rank": effective_rank(rows),
    }


def _about_batches(found: dict[str, float]) -> str:
    return (
        f"Only {found['valid_share']:.0%} of the rows of a batch are anchors with a positive and a negative, "
        f"at step {found['step']:.0f}, and as few were in the {_BATCHES - 1} steps before. "
        f"The batch has {found['rows']:.0f} rows of {found['classes']:.0f} classes, and "
        f"{found['without_partner_share']:.0%} of its rows have no other row of their class in it. A row "
        f"without a positive or a negative trains nothing as an anchor. Draw several classes with several "
        f"rows each: tripletops.samplers.PKSampler(labels, p=..., k=...)."
    )


def _about_collapse(found: dict[str, float], state: _State, level: float) -> str:
    first, bound = state.first, found["diameter_bound"]
    share = f", {found['diameter_share']:.0%} of it" if first["diameter"] else ""
    expected = f"is at least {bound:.3g}" if bound > 0 else "may be 0"
    return (
        f"The network collapses: the diameter of a batch's embeddings was {first['diameter']:.3g} at step "
        f"{first['step']:.0f} and is {found['diameter']:.3g} at step {found['step']:.0f}{share}, while for "
        f"{found['hard_negative_share']:.0%} of the anchors the negative is no farther than the positive. "
        f"{_about_loss(found, level)} By diam₀ − {_BOUND_FACTOR:g}·L₀, equation 17 of the paper on isometric "
        f"approximation, the diameter after training {expected}. The effective rank went from "
        f"{first['effective_rank']:.1f} to {found['effective_rank']:.1f}. {_ADVICE}"
    )


def _about_stuck(found: dict[str, float], state: _State, level: float) -> str:
    return (
        f"The network has collapsed: since step {state.narrow_since} the diameter of a batch's embeddings, "
        f"{found['diameter']:.3g} now, has been below {_NARROW:.0%} of {level:.3g} and has not grown. "
        f"{_about_loss(found, level)} {_ADVICE}"
    )


def _about_loss(found: dict[str, float], level: float) -> str:
    if math.isnan(level):
        return f"The loss is {found['loss']:.4g}."
    return f"The loss is {found['loss']:.4g}; that of embeddings which are all equal is {level:.4g}."


def _check_writer(writer: Any) -> None:
    known = writer is None or isinstance(writer, MutableMapping) or callable(writer)
    if not (known or hasattr(writer, "add_scalar")):
        raise TypeError(
            f"writer must have add_scalar, or be a dict or a function, got {type(writer).__qualname__}"
        )


def _named(prefix: str, found: dict[str, float]) -> dict[str, float]:
    return {prefix + name: value for name, value in found.items() if name != "step"}


def _write(writer: Any, prefix: str, found: dict[str, float]) -> None:
    values, step = _named(prefix, found), int(found["step"])
    if writer is None:
        return
    if hasattr(writer, "add_scalar"):
        for name, value in values.items():
            writer.add_scalar(name, value, step)
    elif isinstance(writer, MutableMapping):
        for name, value in {prefix + "step": step, **values}.items():
            writer.setdefault(name, []).append(value)
    else:
        writer(values, step)


def _lightning_callback(monitor: CollapseMonitor) -> Any:
    try:
        from lightning.pytorch import Callback
    except ImportError as error:
        raise ImportError("lightning_callback needs Lightning: pip install lightning") from error

    class CollapseCallback(Callback):
        logged: dict[str, float] | None = None

        def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
            if monitor.last is None or monitor.last is self.logged:
                return
            self.logged = monitor.last
            values = _named(monitor.prefix, monitor.last)
            self.log_dict(values, logger=False, batch_size=1)  # type: ignore[attr-defined]
            # The module's own log would leave out all but every n-th step.
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step)

        def state_dict(self) -> dict[str, Any]:
            return monitor.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            monitor.load_state_dict(state_dict)

    return CollapseCallback()


def _hugging_face_callback(monitor: CollapseMonitor, trainer: Any) -> Any:
    try:
        from transformers import TrainerCallback
        from transformers.trainer_callback import ExportableState
    except ImportError as error:
        raise ImportError("hugging_face_callback needs transformers: pip install transformers") from error

    class CollapseCallback(TrainerCallback, ExportableState):
        logged: dict[str, float] | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            # In a resumed training these are the states of the checkpoint, else those of now.
            saved = state.stateful_callbacks.get("CollapseCallback")
            if saved is not None:
                monitor.load_state_dict(saved["attributes"]["saved"])

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if monitor.last is not None and monitor.last is not self.logged:
                self.logged = monitor.last
                trainer.log(_named(monitor.prefix, monitor.last))

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"saved": monitor.state_dict()}}

    return CollapseCallback()
