"""The papers' experiments, one file a paper."""

from __future__ import annotations

from train_ref.experiments import collapse, easy_positives, extreme
from train_ref.settings import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (*collapse.EXPERIMENTS, *easy_positives.EXPERIMENTS, *extreme.EXPERIMENTS)
}
