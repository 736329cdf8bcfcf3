"""Runs all trainings of an experiment one after the other, saves after every epoch, and goes on where a run
was broken off.

Ctrl-C is answered after the step under way: the state is saved, and how to go on is said. Under torchrun the
processes are one run: the first of them writes its folder and holds its lock.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import distributed
from tqdm import tqdm

import tripletops as T
from bench import measure, peers
from train_ref.data import DataError
from train_ref.experiments import EXPERIMENTS
from train_ref.folder import Checkpoint, FolderError, Record, RunFolder
from train_ref.procedures import PROCEDURES
from train_ref.settings import Cell, Experiment, Settings, unknown_settings
from train_ref.trainer import Context, Step, Training
from tripletops.evaluate import diameter

TIMED_ROUNDS = 30
ANOTHER_VERSION = "in this version: go on with the one that began the run, or run it anew"
INTERRUPTED = 130  # what shells expect of a program that Ctrl-C ended


class StoppedError(Exception):
    """The run in the folder that is named was interrupted and saved."""


@contextmanager
def errors_in_words() -> Iterator[None]:
    """End the program with one sentence where its user can do something about an error. Other errors are
    mistakes of the program: they keep their traceback."""
    try:
        yield
    except (DataError, FolderError, ValueError, ImportError, ArithmeticError) as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except StoppedError as stopped:
        print(f"\nSaved. Go on with: python -m train_ref resume {stopped}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


class Interrupt:
    """Remembers Ctrl-C or a request to end until the step under way is done; a second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Interrupt:
        self.previous = {each: signal.signal(each, self._ask) for each in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self.previous.items():
            signal.signal(each, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def new_run(
    name: str,
    out: Path,
    context: Context,
    *,
    scale: str,
    quick: bool = False,
    changes: dict[str, Any],
    tensorboard: bool = False,
) -> RunFolder:
    """Run an experiment in a folder of its own below `out`."""
    folder = RunFolder(out / f"{name}-{scale}{'-quick' if quick else ''}")
    config = {
        "experiment": name,
        "scale": scale,
        "quick": quick,
        "changes": changes,
        "backend": context.backend,
        "processes": context.world,
        "tensorboard": tensorboard,
        "environment": measure.environment(context.device.type),
    }
    cells = cells_of(config)  # first, so that a wrong setting leaves no folder behind
    _check_backend(context)
    config["settings"] = {cell.row.key: dataclasses.asdict(cell.settings) for cell in cells}
    with ExitStack() as held:
        _once(context, lambda: held.enter_context(folder.begun(config)))
        execute(folder, context)
    return folder


def resume(folder: RunFolder, context: Context) -> None:
    """Go on with a run."""
    with ExitStack() as held:
        _once(context, lambda: held.enter_context(folder.locked()))
        execute(folder, context)


def _check_backend(context: Context) -> None:
    """Raise where the backend that was asked for can't run here."""
    try:
        T.mine(
            torch.zeros(2, 2, device=context.device),
            torch.zeros(2, dtype=torch.int64, device=context.device),
            positive="hard",
            negative="hard",
            backend=context.backend,
        )
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def cells_of(config: Record) -> list[Cell]:
    """All trainings of a run. One that was begun keeps the settings that it was begun with, whatever has
    become of the experiment's since."""
    name = config["experiment"]
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no experiment {name!r} {ANOTHER_VERSION}")
    experiment: Experiment = EXPERIMENTS[name]
    if "settings" not in config:
        return experiment.cells(config["scale"], _with_tuples(config["changes"]), config["quick"])
    rows = {row.key: row for row in experiment.rows if config["scale"] in row.scales}
    kind = type(experiment.desk)
    found = []
    for key, recorded in config["settings"].items():
        if key not in rows:
            raise ValueError(f"{name} has no row {key!r} {ANOTHER_VERSION}")
        if unknown := unknown_settings(recorded, kind):
            raise ValueError(f"there is no setting {', '.join(unknown)} {ANOTHER_VERSION}")
        try:
            settings = kind(**_with_tuples(recorded))
        except TypeError as error:  # one is missing or of another type
            raise ValueError(f"{name} has other settings {ANOTHER_VERSION} ({error})") from error
        found += rows[key].cells(settings)
    return found


def _with_tuples(record: Record) -> Record:
    """JSON has lists only."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}


def keep_freed_memory() -> None:
    """Tell glibc not to hand large blocks back to the system at every step only to ask for them again at the
    next, which took a sixth of the time of small networks."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: no block has a mapping of its own
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: nothing is handed back


def execute(folder: RunFolder, context: Context) -> None:
    """Do all that is still to be done of a run whose lock is held."""
    keep_freed_memory()
    config = folder.config()
    if config["processes"] != context.world:
        raise ValueError(
            f"{folder.path} was begun by {config['processes']} processes, not {context.world}: their shares "
            f"of a batch would be others. Go on with torchrun --nproc-per-node {config['processes']}"
        )
    cells = cells_of(config)
    experiment = EXPERIMENTS[config["experiment"]]
    if experiment.compute is not None and context.world > 1:
        raise ValueError(f"{experiment.name} trains nothing: run it in one process, without torchrun")
    records = folder.records()
    finished = {record["cell"] for record in records if "final" in record}
    done = [record for record in records if record["cell"] in finished]
    left = [cell for cell in cells if cell.key not in finished]
    try:
        if experiment.compute is not None:
            _compute(experiment, folder, left, done)
            return
        steps, state_size = _rehearse(left, context)
        silent = None if context.rank == 0 else True
        # Two checkpoints, of weights and Adam's two moments each, and the arrays.
        _once(context, lambda: folder.reserve(2 * 3 * state_size + len(cells) * 2**20))
        with Interrupt() as interrupt, tqdm(total=steps, unit="step", mininterval=1, disable=silent) as bar:
            for cell in left:
                training = Training(cell, context)
                done += _train(experiment, training, folder, done, bar, interrupt, config["tensorboard"])
    except FolderError as error:
        raise FolderError(
            f"{error}. When that is put right, go on with `python -m train_ref resume {folder.path}`"
        ) from error


def _compute(experiment: Experiment, folder: RunFolder, cells: list[Cell], done: list[Record]) -> None:
    """Do the computations that are left, and save after each."""
    assert experiment.compute is not None
    with Interrupt() as interrupt:
        for cell in tqdm(cells, unit="computation"):
            measures, arrays = experiment.compute(cell.settings, cell.seed)
            if cell.is_first and arrays:
                folder.write_arrays(cell.key, arrays)
            done.append(_head(cell) | {"final": True, "measures": measures})
            folder.write_records(done)
            if interrupt.asked:
                raise StoppedError(folder.path)


def _head(cell: Cell) -> Record:
    """How all records of a cell begin."""
    return {"cell": cell.key, "row": cell.row.key, "seed": cell.seed}


def _rehearse(cells: list[Cell], context: Context) -> tuple[int, int]:
    """Set up each kind of training once, so that what is wrong with the last one is said before the first
    begins. Returns the steps of all of them and the bytes of the largest network."""
    steps: dict[Settings, int] = {}
    state_size = 0
    for cell in cells:
        if cell.settings not in steps:
            training = Training(cell, context)
            steps[cell.settings] = cell.settings.epochs * len(training.sampler)
            size = sum(tensor.nbytes for tensor in training.network.state_dict().values())
            state_size = max(state_size, size)
    return sum(steps[cell.settings] for cell in cells), state_size


def _train(
    experiment: Experiment,
    training: Training,
    folder: RunFolder,
    done: list[Record],
    bar: tqdm[None],
    interrupt: Interrupt,
    tensorboard: bool,
) -> list[Record]:
    """Do the rest of a training; all of its records are returned."""
    cell, context = training.cell, training.context
    procedure = PROCEDURES[experiment.procedure](training)
    head = _head(cell)
    checkpoint = folder.checkpoint()
    if checkpoint is not None and checkpoint.cell == cell.key:
        try:
            training.load_state(checkpoint.training)
        except (KeyError, RuntimeError, ValueError) as error:
            raise folder.unfit_checkpoint("is of another version of this network") from error
        history = checkpoint.history
        bar.update(len(training.steps) + sum(len(record.get("losses", ())) for record in history))
    else:
        history = [head | {"epoch": 0, "measures": procedure.before()}]
    writer = _tensorboard(folder, cell) if tensorboard and context.rank == 0 else None

    def save() -> None:
        folder.write_checkpoint(Checkpoint(cell.key, training.state(), history))
        folder.write_records(done + history)

    def finish() -> None:
        if training.kept:
            folder.write_arrays(cell.key, {name: tensor.numpy() for name, tensor in training.kept.items()})
        folder.write_records(done + history)
        folder.drop_checkpoint()

    while training.epoch < training.settings.epochs:
        for step in training.epoch_steps():
            _show(bar, cell, step)
            if _anyone(interrupt.asked, context):
                _once(context, save)
                raise StoppedError(folder.path)
        record = head | training.close_epoch()
        history.append(record | {"measures": procedure.after_epoch()})
        _once(context, save)
        if writer is not None:
            _write_scalars(writer, history[-1])
    final = head | {"final": True, "measures": procedure.after()}
    if cell.is_first and training.settings.epochs:
        final["timing"] = _timing(training, history)
    history.append(final)
    _once(context, finish)
    return history


def _show(bar: tqdm[None], cell: Cell, step: Step) -> None:
    if bar.update():  # the bar is about to be drawn
        bar.set_postfix_str(
            f"{cell.key} loss {step.loss:.4f} active {100 * step.active:.0f}% "
            f"diameter {diameter(step.embeddings):.3g}",
            refresh=False,
        )


def _timing(training: Training, history: list[Record]) -> dict[str, float]:
    """Milliseconds of the network's part of a step and of the loss, forward and backward, and of batch-hard
    written by hand on the same embeddings: the distance matrix, its masks and its gradient, which every plain
    formulation has."""
    index = torch.tensor(next(iter(training.sampler)))
    with torch.no_grad():
        emb = training.embeddings(training.inputs.batch(index, training.crops))
    emb, labels = emb.requires_grad_(), training.labels[index]
    parameters = list(training.objective.parameters())
    contenders = {
        "ours": measure.step(lambda: training.objective(emb, labels), emb, *parameters),
        "naive": measure.step(lambda: peers.naive_batch_hard(emb, labels), emb),
    }
    samples = measure.take_turns(contenders, TIMED_ROUNDS, device=training.context.device.type)
    epochs = [record for record in history if "seconds" in record]
    network = statistics.median(
        (record["seconds"] - record["loss_seconds"]) / len(record["losses"]) for record in epochs
    )
    times = {name: 1000 * statistics.median(values) for name, values in samples.items()}
    return {"network": 1000 * network, **times}


def _anyone(asked: bool, context: Context) -> bool:
    """Whether any process was interrupted, so that all stop after the same step."""
    if context.world == 1:
        return asked
    flag = torch.tensor(int(asked), device=context.device)
    distributed.all_reduce(flag)
    return bool(flag)


def _once(context: Context, action: Callable[[], object]) -> None:
    """Let the first process do what is done once for all of them. If it raises a `FolderError`, all raise
    it."""
    failed: list[FolderError | None] = [None]
    if context.rank == 0:
        try:
            action()
        except FolderError as error:
            failed = [error]
    if context.world > 1:
        distributed.broadcast_object_list(failed)
    if failed[0] is not None:
        raise failed[0]


def _tensorboard(folder: RunFolder, cell: Cell) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("--tensorboard needs the package tensorboard: pip install tensorboard") from error
    return SummaryWriter(str(folder.path / "tensorboard" / cell.key.replace(os.sep, "-")))


def _write_scalars(writer: Any, record: Record) -> None:
    scalars = {name: record[name] for name in ("loss", "active", "learning_rate")} | record["measures"]
    for name, value in scalars.items():
        writer.add_scalar(name, value, record["epoch"])
    writer.flush()
