"""The monitor in Lightning, in the Trainer of Hugging Face, and with TensorBoard: each runs for real."""

import csv
import math
import warnings

import pytest
import torch

import tripletops as T
from tripletops.diagnostics.monitor import CollapseMonitor

STEPS = 6


@pytest.fixture
def data():
    rows = torch.randn(48, 5, generator=torch.Generator().manual_seed(0))
    return rows, torch.arange(48) % 4


def test_tensorboard_gets_every_look(tmp_path, data):
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings():
        # TensorBoard's own imports use what its dependencies call deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        monitor = CollapseMonitor(writer=writer, prefix="health/")
        for _ in range(STEPS):
            monitor.update(*data, 0.25)
    events = EventAccumulator(str(tmp_path)).Reload()
    expected = {f"health/{name}" for name in monitor.last if name != "step"}
    assert set(events.Tags()["scalars"]) == expected
    written = events.Scalars("health/diameter")
    assert [event.step for event in written] == [found["step"] for found in monitor.history]
    assert written[-1].value == pytest.approx(monitor.last["diameter"])


def test_lightning_logs_and_resumes(tmp_path, data):
    pytest.importorskip("lightning")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger
    from torch.utils.data import DataLoader, TensorDataset

    class Network(LightningModule):
        def __init__(self, criterion):
            super().__init__()
            self.linear, self.criterion = torch.nn.Linear(5, 3), criterion

        def training_step(self, batch, _):
            return self.criterion(self.linear(batch[0]), batch[1])

        def validation_step(self, batch, _):
            self.log("validation", self.criterion(self.linear(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def fit(monitor, epochs, checkpoint=None):
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            logger=CSVLogger(tmp_path),
            callbacks=[monitor.lightning_callback()],
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        loader = DataLoader(TensorDataset(*data), batch_size=16)
        with warnings.catch_warnings():
            # Lightning advises more workers, and tells that a data set is small for its interval of logging.
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            network = Network(monitor.watch(T.nn.BatchHardLoss()))
            trainer.fit(network, loader, loader, ckpt_path=checkpoint, weights_only=False)
        return trainer

    monitor = CollapseMonitor()
    trainer = fit(monitor, 2)
    assert monitor.step == STEPS, "validation does not count"
    assert float(trainer.callback_metrics["collapse/diameter"]) == pytest.approx(monitor.last["diameter"])
    with (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        logged = [row["collapse/diameter"] for row in csv.DictReader(file) if row["collapse/diameter"]]
    assert len(logged) == len(monitor.history) > 1
    assert float(logged[-1]) == pytest.approx(monitor.last["diameter"])

    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed = CollapseMonitor()
    fit(resumed, 3, str(tmp_path / "last.ckpt"))
    assert resumed.step == STEPS + 3
    assert resumed.last["diameter_bound"] == monitor.last["diameter_bound"]


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows, labels):
        self.rows, self.labels = rows, labels

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        return {"rows": self.rows[place], "labels": self.labels[place]}


class WithLoss(torch.nn.Module):
    """A network that returns its loss, as the Trainer expects it."""

    def __init__(self, criterion):
        super().__init__()
        self.linear, self.criterion = torch.nn.Linear(5, 3), criterion

    def forward(self, rows, labels):
        emb = self.linear(rows)
        return {"loss": self.criterion(emb, labels), "emb": emb}


# The packages below use what others of them, or Python, call deprecated or will change.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
# On a machine without a GPU there is no memory to pin.
@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_hugging_face_logs_and_resumes(tmp_path, data):
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")

    def fit(monitor, steps, checkpoint=None):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=steps,
            per_device_train_batch_size=16,
            save_steps=STEPS,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_steps=1000,
        )
        torch.manual_seed(0)
        network = WithLoss(monitor.watch(T.nn.BatchHardLoss()))
        trainer = transformers.Trainer(network, arguments, train_dataset=Rows(*data))
        trainer.add_callback(monitor.hugging_face_callback(trainer))
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    monitor = CollapseMonitor()
    trainer = fit(monitor, STEPS)
    assert monitor.step == STEPS
    logged = [entry for entry in trainer.state.log_history if "collapse/diameter" in entry]
    assert [entry["step"] for entry in logged] == [1 + found["step"] for found in monitor.history]
    assert logged[-1]["collapse/diameter"] == monitor.last["diameter"]
    assert all(math.isfinite(entry["collapse/valid_share"]) for entry in logged)

    resumed = CollapseMonitor()
    fit(resumed, STEPS + 3, str(tmp_path / f"checkpoint-{STEPS}"))
    assert resumed.step == STEPS + 3
    assert resumed.last["diameter_bound"] == monitor.last["diameter_bound"]
