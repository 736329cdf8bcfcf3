"""One training: the network, the objective, the batches and the step; its whole state can be saved between
any two steps.

The step computes the loss on embeddings cut off from the network's graph, and hands their gradient on to it.
That has three uses. The loss is timed apart from the network. The share of embeddings that it moves can be
counted. And under torchrun every process mines in the batch of all processes: the embeddings are gathered,
every process computes the whole loss and goes on with the gradient of its own rows.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from train_ref import data, models
from train_ref.batches import batches
from train_ref.data import Dataset, Split
from train_ref.features import Inputs
from train_ref.objectives import OBJECTIVES
from train_ref.settings import Cell, Settings
from train_ref.weights import find_weights

CPU = torch.device("cpu")
EMBEDDED_AT_ONCE = 512


@dataclass(frozen=True)
class Context:
    """Where and with what a training runs: nothing here changes what it computes, rounding aside."""

    backend: str | None = None
    device: torch.device = CPU
    roots: Sequence[Path] | None = None
    cache: Path | None = None
    rank: int = 0
    world: int = 1
    opened: dict[tuple[str, int], Dataset] = field(default_factory=dict, init=False, compare=False)

    def dataset(self, settings: Settings) -> Dataset:
        """The data set of a training; each is opened and checked once."""
        key = settings.dataset, settings.size
        if key not in self.opened:
            self.opened[key] = data.load(*key, self.roots, self.cache)
        return self.opened[key]


class Step(NamedTuple):
    """The result of one step; the embeddings are those of the batch of all processes."""

    loss: float
    active: float  # the share of embeddings that the loss moves
    seconds: float
    loss_seconds: float
    embeddings: Tensor


class Training:
    def __init__(self, cell: Cell, context: Context):
        self.cell, self.settings, self.context = cell, cell.settings, context
        settings = cell.settings
        self.dataset = context.dataset(settings)
        self._check()
        self.labels = self.dataset.train.labels[settings.target].to(context.device)

        torch.manual_seed(cell.seed)
        network = models.build(
            settings.network,
            dim=settings.dim,
            normalise=settings.normalise,
            size=settings.size,
            channels=self.dataset.train.pixels.shape[1],
            frozen=settings.frozen,
            pretrained=find_weights(settings.network, context.roots) if settings.pretrained else None,
        )
        # Channels last halves the time of small convolutions on a CPU.
        self.network = network.to(context.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        # What the objective draws is the same in all processes.
        self.draws = torch.Generator().manual_seed(cell.seed)
        classes = int(self.labels.max()) + 1
        objective = OBJECTIVES[settings.objective](settings, classes, context.backend, self.draws)
        self.objective = objective.to(context.device)
        self.parameters = [each for each in self.network.parameters() if each.requires_grad]
        self.optimizer = self._optimizer()
        self.sampler = batches(
            settings,
            self.dataset.train.labels[settings.target],
            cell.seed,
            num_replicas=context.world,
            rank=context.rank,
        )
        self.crops = torch.Generator()  # random crops and flips are drawn from it
        self.inputs = Inputs(self.dataset, self.network, settings, context.device, context.cache)
        self.epoch, self.step_of_epoch = 0, 0
        self.steps: list[list[float]] = []  # of the epoch under way: loss, active, seconds, loss_seconds
        self.kept: dict[str, Tensor] = {}  # for figures

    def _check(self) -> None:
        """Refuse settings that would fail only later, some of them after the training."""
        settings, sets = self.settings, set(self.dataset.train.labels)
        splits = {"train", *self.dataset.tests}
        for name, words, known in (
            ("target", {settings.target}, sets),
            ("measured", set(settings.measured), sets),
            ("keep", set(settings.keep), splits),
            ("objective", {settings.objective}, set(OBJECTIVES)),
            ("optimizer", {settings.optimizer}, {"adam", "sgd"}),
            ("precision", {settings.precision}, {"float32", "bfloat16"}),
        ):
            if not words <= known:
                unknown, there_are = ", ".join(sorted(words - known)), ", ".join(sorted(known))
                raise ValueError(
                    f"{name}: there is no {unknown} for {settings.dataset}; there are {there_are}"
                )
        # The objective knows which of its own words and numbers go together.
        trial = OBJECTIVES[settings.objective](settings, 2, self.context.backend, torch.Generator())
        emb = nn.functional.normalize(torch.randn(4, settings.dim)).to(self.context.device)
        trial.to(self.context.device)(emb, torch.tensor([0, 0, 1, 1], device=self.context.device))

    def _optimizer(self) -> torch.optim.Optimizer:
        settings = self.settings
        groups: list[dict[str, Any]] = [{"params": self.parameters, "lr": settings.learning_rate}]
        learned = list(self.objective.parameters())
        if learned:
            groups.append({"params": learned, "lr": settings.objective_learning_rate})
        if settings.optimizer == "adam":
            return torch.optim.Adam(groups)
        return torch.optim.SGD(groups, momentum=settings.momentum)

    def _schedule(self) -> None:
        """Set the learning rates of this epoch: a tenth after every milestone."""
        passed = sum(self.epoch >= milestone for milestone in self.settings.milestones)
        rates = [self.settings.learning_rate, self.settings.objective_learning_rate]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
            group["lr"] = rate * 0.1**passed

    def epoch_steps(self) -> Iterator[Step]:
        """The steps of this epoch that are still to be done, one at a time."""
        self._schedule()
        self.network.train()
        self.sampler.set_epoch(self.epoch)
        for index in islice(self.sampler, self.step_of_epoch, None):
            step = self.step(torch.tensor(index))
            self.step_of_epoch += 1
            self.steps.append([step.loss, step.active, step.seconds, step.loss_seconds])
            yield step

    def close_epoch(self) -> dict[str, Any]:
        """Go on to the next epoch; the averages and times of this one are returned."""
        losses, active, seconds, loss_seconds = (list(column) for column in zip(*self.steps, strict=True))
        self.epoch, self.step_of_epoch, self.steps = self.epoch + 1, 0, []
        return {
            "epoch": self.epoch,
            "loss": sum(losses) / len(losses),
            "active": sum(active) / len(active),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "seconds": sum(seconds),
            "loss_seconds": sum(loss_seconds),
            "losses": losses,
        }

    def step(self, index: Tensor) -> Step:
        start = self._now()
        place = f"{self.cell.seed} {self.epoch} {self.step_of_epoch} {self.context.rank}"
        # Every step has its own seed, so that a checkpoint need not hold the state of these generators.
        seed = zlib.crc32(place.encode())
        self.crops.manual_seed(seed)
        torch.manual_seed(seed)  # for dropout, on any device
        emb = self.embeddings(self.inputs.batch(index, self.crops))
        whole = self._gathered(emb.detach()).requires_grad_()
        labels = self._gathered(self.labels[index])
        self.optimizer.zero_grad()
        before_loss = self._now()
        loss = self.objective(whole, labels)
        loss.backward()
        after_loss = self._now()
        assert whole.grad is not None
        emb.backward(whole.grad[self.context.rank * len(emb) :][: len(emb)])
        self._add_up_gradients()
        if self.settings.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        self.optimizer.step()
        value = loss.item()
        if value != value:
            raise ArithmeticError(
                f"{self.cell.key}: the loss is NaN in epoch {self.epoch + 1}: try a --learning-rate below "
                f"{self.settings.learning_rate}, or --clip"
            )
        active = (whole.grad != 0).any(dim=1).float().mean().item()
        seconds, loss_seconds = self._now() - start, after_loss - before_loss
        return Step(value, active, seconds, loss_seconds, whole.detach())

    def embeddings(self, inputs: Tensor) -> Tensor:
        """The network's embeddings of `inputs` as float32, computed in the precision of the settings."""
        half = self.settings.precision == "bfloat16"
        with torch.autocast(self.context.device.type, torch.bfloat16, enabled=half):
            emb: Tensor = self.inputs.through(self.network, inputs)
        return emb.float()

    @torch.no_grad()
    def embed(self, split: Split) -> Tensor:
        """The embeddings of a whole split, without views, on the CPU."""
        self.network.eval()
        parts = [self.embeddings(part).cpu() for part in self.inputs.plain(split, EMBEDDED_AT_ONCE)]
        return torch.cat(parts)

    def _gathered(self, rows: Tensor) -> Tensor:
        """The rows of all processes, in their order."""
        if self.context.world == 1:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self.context.world)]
        distributed.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    def _add_up_gradients(self) -> None:
        """Sum the gradients over processes: each has the part of one loss that goes through its own rows."""
        if self.context.world == 1:
            return
        gradients = [each.grad for each in self.parameters if each.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def _now(self) -> float:
        if self.context.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def state(self) -> dict[str, Any]:
        return {
            "network": self.network.state_dict(),
            "objective": self.objective.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
            "step_of_epoch": self.step_of_epoch,
            "steps": self.steps,
            "kept": self.kept,
            "draws": self.draws.get_state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self.objective.load_state_dict(state["objective"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.step_of_epoch, self.steps = state["epoch"], state["step_of_epoch"], state["steps"]
        self.kept = state["kept"]
        self.draws.set_state(state["draws"])
