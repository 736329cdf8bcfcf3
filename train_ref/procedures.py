"""What is measured before, during and after a training; `Experiment.procedure` names one of these.

Measures are numbers by name, "<split>/<labels>/R@1" and the like, recall and NMI in percent as the papers
have them. Arrays that figures need go into `Training.kept`, of the first seed only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import tripletops as T
from train_ref.data import Split
from train_ref.trainer import Training
from tripletops.evaluate import diameter, nmi, nmi_plus, recall_at_k

Measures = dict[str, float]

VALIDATION = 2000  # images of the fixed set whose diameter is measured
LOSS_BATCHES = 50  # over which the loss before training is averaged
MOVEMENT_EPOCHS = 2  # 002, section 6.1
MOVEMENT_LEARNING_RATE = 1e-5


class Train:
    """Recall after some epochs, and after the last with NMI; triplet scatter diagrams where they are asked
    for."""

    def __init__(self, training: Training):
        self.training, self.settings = training, training.settings
        self.keeps = training.cell.is_first

    def before(self) -> Measures:
        self.keep_diagram()
        return self.recall_of_epoch()

    def after_epoch(self) -> Measures:
        self.keep_diagram()
        return self.recall_of_epoch()

    def after(self) -> Measures:
        tests = self.training.dataset.tests
        embeddings = {name: self.training.embed(split) for name, split in tests.items()}
        measures: Measures = {}
        if set(tests) == {"query", "gallery"}:
            measures |= self.recall("gallery", tests, embeddings)
        else:
            for place, name in enumerate(tests):
                measures |= self.recall(name, tests, embeddings)
                # k-means takes longer than everything else, so later splits are clustered for one seed only.
                if self.settings.nmi and (place == 0 or self.keeps):
                    measures |= self.clusters(name, tests[name], embeddings[name])
        for name in self.settings.keep if self.keeps else ():
            emb = self.training.embed(self.training.dataset.train) if name == "train" else embeddings[name]
            self.training.kept[f"embeddings {name}"] = emb.half()
        return measures

    def recall_of_epoch(self) -> Measures:
        """Recall on the first test split, every `measure_every` epochs, for the first seed only."""
        every, epoch = self.settings.measure_every, self.training.epoch
        if not every or epoch % every or not self.keeps:
            return {}
        tests = self.training.dataset.tests
        chosen = tests if set(tests) == {"query", "gallery"} else dict(list(tests.items())[:1])
        embeddings = {name: self.training.embed(split) for name, split in chosen.items()}
        return self.recall(list(chosen)[-1], chosen, embeddings)

    def recall(self, name: str, tests: dict[str, Split], embeddings: dict[str, Tensor]) -> Measures:
        """Recall@k within a split, or of the queries in the gallery."""
        measures: Measures = {}
        for label in self.settings.measured:
            labels, emb = tests[name].labels[label], embeddings[name]
            if name == "gallery":
                queries = embeddings["query"], tests["query"].labels[label]
                found = recall_at_k(*queries, self.settings.recall_at, ref_emb=emb, ref_labels=labels)
            else:
                found = recall_at_k(emb, labels, self.settings.recall_at)
            measures |= {f"{name}/{label}/R@{k}": 100 * value for k, value in found.items()}
        return measures

    def clusters(self, name: str, split: Split, emb: Tensor) -> Measures:
        measures = {}
        for label in self.settings.measured:
            labels = split.labels[label]
            measures[f"{name}/{label}/NMI"] = 100 * nmi(emb, labels)
            # NMI+ needs more images than clusters. Omniglot's letters have too few.
            if len(labels.unique()) * self.settings.nmi_factor < len(labels):
                measures[f"{name}/{label}/NMI+"] = 100 * nmi_plus(emb, labels, self.settings.nmi_factor)
        return measures

    def keep_diagram(self) -> None:
        """Keep the similarity of every training image to its nearest positive and to its nearest negative."""
        if self.training.epoch in self.settings.diagrams and self.keeps:
            split = self.training.dataset.train
            triplets = T.mine(
                self.training.embed(split),
                split.labels[self.settings.target],
                positive="easy",
                negative="hard",
                distance="cosine",
            )
            points = 1 - torch.stack([triplets.d_ap, triplets.d_an], dim=1)
            self.training.kept[f"diagram {self.training.epoch}"] = points[triplets.valid]


class Collapse(Train):
    """The diameter of a fixed set of images before and after training, and the loss before it. The bound of
    paper 000 is computed from these."""

    def before(self) -> Measures:
        training = self.training
        training.crops.manual_seed(training.cell.seed)
        losses: list[float] = []
        training.network.train()
        with torch.no_grad():
            while len(losses) < LOSS_BATCHES:
                training.sampler.set_epoch(-1 - len(losses))  # batches that no epoch has
                for index in training.sampler:
                    batch = torch.tensor(index)
                    emb = training.embeddings(training.inputs.batch(batch, training.crops))
                    losses.append(float(training.objective(emb, training.labels[batch])))
                    if len(losses) == LOSS_BATCHES:
                        break
        measures = {"loss before": sum(losses) / len(losses), "largest loss before": max(losses)}
        return measures | {"diameter before": self.diameter()}

    def after_epoch(self) -> Measures:
        return {"diameter": self.diameter()}

    def after(self) -> Measures:
        return {"diameter": self.diameter()}

    def diameter(self) -> float:
        split = next(iter(self.training.dataset.tests.values()))
        chosen = torch.linspace(0, len(split) - 1, min(VALIDATION, len(split))).long()
        part = Split(split.pixels[chosen], {name: labels[chosen] for name, labels in split.labels.items()})
        return diameter(self.training.embed(part))


class Movement(Train):
    """Where a step moves its triplets on the scatter diagram (paper 002, section 6.1). Every vector is in one
    triplet only, the learning rate is low, and the similarities are measured again after each step."""

    def before(self) -> Measures:
        return {}

    def after_epoch(self) -> Measures:
        return {}

    def after(self) -> Measures:
        training = self.training
        training.crops.manual_seed(training.cell.seed)
        training.network.train()
        optimizer = torch.optim.SGD(
            training.parameters, lr=MOVEMENT_LEARNING_RATE, momentum=self.settings.momentum
        )
        moves = []
        for epoch in range(MOVEMENT_EPOCHS):
            training.sampler.set_epoch(training.epoch + epoch)
            for index in training.sampler:
                batch = torch.tensor(index)
                inputs = training.inputs.batch(batch, training.crops)
                moves.append(self.move(inputs, training.labels[batch], optimizer))
        points = torch.cat(moves)
        if self.keeps:
            training.kept["moves"] = points
        return {name: 100 * float(where.float().mean()) for name, where in quarters(points).items()}

    def move(self, inputs: Tensor, labels: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
        """One step; (triplets, 4): S_ap and S_an before it, and by how much they changed."""
        emb = self.training.embeddings(inputs)
        rows = self.disjoint_triplets(emb.detach(), labels)
        before = self.similarities(emb, rows)
        s_ap, s_an = before.unbind(1)
        if self.settings.triplet == "second_order":
            exponent = s_an.square() / 2 - s_ap + s_ap.square() / 2
        else:
            exponent = s_an - s_ap
        optimizer.zero_grad()
        F.softplus(exponent).mean().backward()
        optimizer.step()
        with torch.no_grad():
            after = self.similarities(self.training.embeddings(inputs), rows)
        return torch.cat([before.detach(), after - before.detach()], dim=1).cpu()

    def disjoint_triplets(self, emb: Tensor, labels: Tensor) -> Tensor:
        """(triplets, 3): the mined triplets in the order of their anchors, without those that share a row
        with an earlier one."""
        mined = T.mine(
            emb,
            labels,
            positive=self.settings.positive,
            negative=self.settings.negative,
            distance="cosine",
            exclusive=True,
            backend=self.training.context.backend,
        )
        if not mined.valid.any():
            raise ValueError(f"a batch of {len(labels)} images has no triplet: raise --per-class or --batch")
        return torch.stack(mined.indices(), dim=1)

    @staticmethod
    def similarities(emb: Tensor, rows: Tensor) -> Tensor:
        anchor, positive, negative = (emb[rows[:, place]] for place in range(3))
        return torch.stack(
            [F.cosine_similarity(anchor, positive), F.cosine_similarity(anchor, negative)], dim=1
        )


def quarters(moves: Any) -> dict[str, Any]:
    """Which of the moves (triplets, 4), a tensor or an array, go to each quarter of the scatter diagram."""
    right, up = moves[:, 2] > 0, moves[:, 3] > 0
    return {
        "top-right": right & up,
        "top-left": ~right & up,
        "bottom-left": ~right & ~up,
        "bottom-right": right & ~up,
    }


PROCEDURES: dict[str, type[Train]] = {"train": Train, "collapse": Collapse, "movement": Movement}
