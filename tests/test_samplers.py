"""The samplers: what a batch and an epoch hold, how they are repeated and resumed, and how processes share
them."""

from __future__ import annotations

import copy
import pickle
import time
from collections import Counter
from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from tripletops.samplers import GroupSampler, PKSampler

# Class 5 has rows 0, 2, 4, 6; class −1 rows 1, 5, 7; class 9 row 3.
LABELS = [5, -1, 5, 9, 5, -1, 5, -1]


def classes_of(batch: list[int], labels, rows: int) -> list[int]:
    """The class of each run of `rows` rows, which must be one."""
    runs = torch.as_tensor(labels)[batch].view(-1, rows)
    assert runs.eq(runs[:, :1]).all()
    return runs[:, 0].tolist()


def test_pk_batch_by_hand():
    batches = list(PKSampler(LABELS, 3, 3, batches=20))
    for batch in batches:
        assert sorted(classes_of(batch, LABELS, 3)) == [-1, 5, 9]
        rows = {LABELS[batch[start]]: batch[start : start + 3] for start in (0, 3, 6)}
        assert sorted(rows[-1]) == [1, 5, 7]  # as many as there are
        assert len(set(rows[5])) == 3  # three of four, none twice
        assert rows[9] == [3, 3, 3]  # fewer than three: with replacement
    assert len({tuple(sorted(batch)) for batch in batches}) == 4  # each of class 5's rows was once left out


def test_pk_epoch_is_about_as_many_rows_as_there_are():
    assert len(PKSampler(range(100), 10, 4)) == len(list(PKSampler(range(100), 10, 4))) == 2
    assert len(PKSampler(LABELS, 3, 3)) == 1
    assert len(list(PKSampler(LABELS, 2, 1, batches=130))) == 130  # more than are drawn together


def test_pk_draws_every_class_and_row_alike():
    labels = torch.tensor([0] * 4 + [1] * 8 + [2] * 4 + [3] * 8)
    batches = list(PKSampler(labels, 2, 3, batches=8000))
    classes = Counter(frozenset(classes_of(batch, labels, 3)) for batch in batches)
    assert len(classes) == 6
    for times in classes.values():  # of a binomial with a std of 33
        assert times == pytest.approx(8000 / 6, abs=5 * 33)
    rows = torch.tensor(batches).flatten().bincount(minlength=24)
    # Half of the batches have a class, and 3 of its rows: a row's share is 3/8 of 8,000 or half of that.
    torch.testing.assert_close(rows, 12000 // labels.bincount()[labels], atol=250, rtol=0)


def test_pk_draws_with_replacement_alike():
    rows = torch.tensor(list(PKSampler([0, 0], 1, 5, batches=2000))).flatten().bincount()
    assert rows[0].item() == pytest.approx(5000, abs=5 * 50)


def test_groups_by_hand():
    # In groups of 2 class 5 has two, −1 one (a row sits out) and 9 none: one batch of 5 and −1.
    sampler = GroupSampler(LABELS, 2, 2)
    assert len(sampler) == 1
    seen = set()
    for epoch in range(40):
        sampler.set_epoch(epoch)
        (batch,) = sampler
        assert sorted(classes_of(batch, LABELS, 2)) == [-1, 5]
        assert len(set(batch)) == 4
        seen.update(batch)
    assert seen == {0, 1, 2, 4, 5, 6, 7}  # all but the row of class 9 have their turn


def test_groups_are_dealt_until_no_batch_can_be_filled():
    # 6, 1, 1 and 1 groups for batches of 2: class 0 meets each other class once, and then is alone.
    labels = [0] * 12 + [1, 1, 2, 2, 3, 3]
    batches = list(GroupSampler(labels, 2, 2, seed=3))
    assert sorted(sorted(classes_of(batch, labels, 2)) for batch in batches) == [[0, 1], [0, 2], [0, 3]]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=9),
    n=st.integers(1, 4),
    classes=st.integers(1, 4),
    seed=st.integers(0, 2**40),
)
def test_groups_fill_as_many_batches_as_can_be(sizes, n, classes, seed):
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    groups = [size // n for size in sizes]
    # Gale and Ryser: B batches can be filled if no class is counted for more than B groups.
    most = max(b for b in range(sum(groups) + 1) if sum(min(g, b) for g in groups) >= b * classes)
    if not most or classes > len(sizes):
        with pytest.raises(ValueError, match="class"):
            GroupSampler(labels, n, classes)
        return
    sampler = GroupSampler(labels, n, classes, seed=seed)
    batches = list(sampler)
    assert len(sampler) == len(batches) == most
    for batch in batches:
        assert len(set(classes_of(batch, labels, n))) == classes
    rows = [row for batch in batches for row in batch]
    assert len(set(rows)) == len(rows) == most * classes * n


def both(**options):
    labels = torch.arange(60) % 6
    return PKSampler(labels, 4, 5, batches=7, **options), GroupSampler(labels, 5, 4, **options)


@pytest.mark.parametrize("which", [0, 1])
def test_seed_and_epoch_decide_every_batch(which):
    def epoch(seed, number):
        torch.manual_seed(torch.seed())  # the global state plays no part
        sampler = both(seed=seed)[which]
        sampler.set_epoch(number)
        return list(sampler)

    state = torch.get_rng_state()
    list(both()[which])
    assert torch.get_rng_state().equal(state)
    epochs = [epoch(seed, number) for seed in range(3) for number in range(3)]
    assert epochs == [epoch(seed, number) for seed in range(3) for number in range(3)]
    assert len({str(batches) for batches in epochs}) == 9
    sampler = both(seed=2)[which]
    assert [list(sampler) for _ in range(3)] == epochs[6:]  # nobody need set the epoch


every_sampler = pytest.mark.parametrize("which", [0, 1], ids=["PKSampler", "GroupSampler"])


def epochs_of(which, numbers):
    """The batches of these epochs, each chosen in a sampler of its own."""
    batches = []
    for number in numbers:
        sampler = both()[which]
        sampler.set_epoch(number)
        batches.append(list(sampler))
    return batches


@every_sampler
class TestEpochs:
    def test_an_epoch_that_is_set_wins(self, which):
        sampler = both()[which]
        list(sampler)
        for number in (5, 5, 0, -3):
            sampler.set_epoch(number)
            assert [list(sampler), list(sampler)] == epochs_of(which, [number, number + 1])

    def test_an_iterator_that_nobody_uses_is_no_epoch(self, which):
        sampler = both()[which]
        unused = [iter(sampler) for _ in range(3)]
        assert [list(sampler), list(sampler)] == epochs_of(which, [0, 1])
        assert list(unused[1]) == epochs_of(which, [2])[0]

    def test_an_epoch_that_is_cut_short_is_one(self, which):
        sampler = both()[which]
        cut = [list(islice(sampler, 2)) for _ in range(3)]
        assert cut == [batches[:2] for batches in epochs_of(which, range(3))]

    def test_several_at_once(self, which):
        sampler = both()[which]
        pairs = list(zip(sampler, sampler, strict=True))
        assert [list(batches) for batches in zip(*pairs, strict=True)] == epochs_of(which, [0, 1])

    @pytest.mark.parametrize(
        "workers", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}]
    )
    def test_in_a_loader(self, which, workers):
        rows = TensorDataset(torch.arange(60))
        loader = DataLoader(rows, batch_sampler=both()[which], **workers)
        given = [[batch.tolist() for (batch,) in loader] for _ in range(3)]
        assert given == epochs_of(which, range(3))

    def test_resumed_at_every_batch(self, which):
        expected = list(chain(*epochs_of(which, range(3))))
        sampler = both()[which]
        states = [sampler.state_dict()]
        for _ in range(2):
            for _ in sampler:
                states.append(sampler.state_dict())
        for place, state in enumerate(states):
            resumed = both()[which]
            resumed.load_state_dict(copy.deepcopy(state))
            assert resumed.state_dict() == state
            rest = list(chain(*(list(resumed) for _ in range(4))))
            assert rest[: len(expected) - place] == expected[place:]

    def test_between_two_epochs_the_next_one_is_resumed(self, which):
        for batches in (None, 2):
            sampler, resumed = both()[which], both()[which]
            list(islice(sampler, batches))
            resumed.load_state_dict(pickle.loads(pickle.dumps(sampler)).state_dict())
            assert [list(resumed)] == [list(sampler)] == epochs_of(which, [1])
            sampler.set_epoch(7)
            assert sampler.state_dict() == {"epoch": 7, "batch": 0}

    def test_a_resumed_epoch_may_be_set(self, which):
        """As trainers do, which know the epoch and not the batch; another epoch begins at its beginning."""
        sampler, resumed, other = (both()[which] for _ in range(3))
        state = [sampler.state_dict() for _ in islice(sampler, 2)][1]
        for loaded, epoch in ((resumed, 0), (other, 1)):
            loaded.load_state_dict(state)
            loaded.set_epoch(epoch)
        assert list(resumed) == epochs_of(which, [0])[0][2:]
        assert list(other) == epochs_of(which, [1])[0]

    def test_an_epoch_that_is_set_after_it_began(self, which):
        """By a trainer whose loader asked for batches ahead of time."""
        sampler = both()[which]
        ahead = iter(sampler)
        next(ahead)
        sampler.set_epoch(0)
        next(ahead)
        assert sampler.state_dict() == {"epoch": 0, "batch": 2}
        sampler.set_epoch(4)
        assert sampler.state_dict() == {"epoch": 4, "batch": 0}

    @pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
    @pytest.mark.parametrize("workers", [0, 1])
    def test_in_a_loader_that_can_be_resumed(self, which, workers):
        from torchdata.stateful_dataloader import StatefulDataLoader

        def loader():
            rows = TensorDataset(torch.arange(60))
            return StatefulDataLoader(rows, batch_sampler=both()[which], num_workers=workers)

        expected = list(chain(*epochs_of(which, range(3))))
        length = len(both()[which])
        for place in (2, length, length + 1):
            interrupted, resumed = loader(), loader()
            batches = chain(interrupted, interrupted)
            assert [batch.tolist() for (batch,) in islice(batches, place)] == expected[:place]
            resumed.load_state_dict(interrupted.state_dict())
            rest = [batch.tolist() for (batch,) in chain(resumed, resumed, resumed)]
            assert rest[: len(expected) - place] == expected[place:]


# Lightning's own: it uses what torch no longer wants used, and advises to have more workers.
@pytest.mark.filterwarnings(
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
    "ignore:The 'train_dataloader' does not have many workers",
)
@every_sampler
class TestLightning:
    @pytest.fixture
    def fit(self, which, tmp_path, one_thread):
        """Train for `epochs` epochs in all, and return the batches of each, by its number."""
        import lightning

        class Model(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(()))
                self.seen: dict[int, list[list[int]]] = {}

            def training_step(self, batch, _):
                self.seen.setdefault(self.current_epoch, []).append(batch[0].tolist())
                return self.weight.square()

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), 0.1)

        class Data(lightning.LightningDataModule):
            def __init__(self, workers) -> None:
                super().__init__()
                self.sampler, self.workers = both()[which], workers

            def train_dataloader(self):
                rows = TensorDataset(torch.arange(60))
                return DataLoader(rows, batch_sampler=self.sampler, num_workers=self.workers)

            def state_dict(self):
                return self.sampler.state_dict()

            def load_state_dict(self, state) -> None:
                self.sampler.load_state_dict(state)

        def fit(epochs, checkpoint=None, workers=None, **options):
            model = Model()
            trainer = lightning.Trainer(
                accelerator="cpu",
                max_epochs=epochs,
                default_root_dir=tmp_path,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                **options,
            )
            data = {"train_dataloaders": Data(workers=0).train_dataloader()}
            if workers is not None:
                data = {"datamodule": Data(workers)}
            trainer.fit(model, **data, ckpt_path=checkpoint, weights_only=True)
            trainer.save_checkpoint(tmp_path / "last.ckpt")
            return model.seen

        return fit

    def test_every_epoch_has_its_own_batches(self, which, fit):
        assert fit(3) == dict(enumerate(epochs_of(which, range(3))))

    def test_so_has_an_epoch_that_is_cut_short(self, which, fit):
        expected = [batches[:2] for batches in epochs_of(which, range(3))]
        assert fit(3, limit_train_batches=2) == dict(enumerate(expected))

    @pytest.mark.parametrize("workers", [None, 0, 1])
    def test_a_resumed_run_goes_on_with_the_next_epoch(self, which, workers, fit, tmp_path):
        """By itself, or by a data module's state: with workers, Lightning says the epoch after it began."""
        fit(2, workers=workers)
        resumed = fit(4, checkpoint=tmp_path / "last.ckpt", workers=workers)
        assert resumed == dict(zip((2, 3), epochs_of(which, (2, 3)), strict=True))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("replicas", [2, 4])
def test_processes_share_every_batch(which, replicas):
    alone = list(both(seed=1)[which])
    shares = [list(both(seed=1, num_replicas=replicas, rank=rank)[which]) for rank in range(replicas)]
    assert [list(chain(*parts)) for parts in zip(*shares, strict=True)] == alone
    assert {len(part) for share in shares for part in share} == {20 // replicas}


def test_a_loader_takes_them_as_batch_samplers():
    labels = torch.arange(60) % 6
    for sampler in both():
        loader = DataLoader(TensorDataset(labels), batch_sampler=sampler)
        given = [batch.tolist() for (batch,) in loader]
        sampler.set_epoch(0)
        assert given == [labels[batch].tolist() for batch in sampler]


@pytest.mark.parametrize(
    ("labels", "p", "k"),
    [
        (torch.arange(60_000) % 2, 2, 64),
        (torch.arange(60_000) % 964, 18, 32),
        (torch.arange(60_000) % 11_318, 64, 2),
    ],
)
def test_large_epochs_start_at_once(labels, p, k, one_thread):
    for make in (lambda: PKSampler(labels, p, k), lambda: GroupSampler(labels, k, p)):
        times = []
        for _ in range(3):
            start = time.process_time()  # which goes on only while this process does
            next(iter(make()))
            times.append(time.process_time() - start)
        assert min(times) < 0.1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PKSampler([], 1, 1), "labels must be a vector of integers"),
        (lambda: PKSampler([[0, 1]], 1, 1), r"labels must be .* got torch.int64 \(1, 2\)"),
        (lambda: GroupSampler([0.5, 1.0], 1, 1), r"labels must be .* got torch.float32 \(2,\)"),
        (lambda: PKSampler(LABELS, 0, 1), "p must be at least 1, got 0"),
        (lambda: PKSampler(LABELS, 1, -2), "k must be at least 1, got -2"),
        (lambda: GroupSampler(LABELS, 0, 1), "n must be at least 1, got 0"),
        (lambda: PKSampler(LABELS, 4, 1), r"p \(4\) must not exceed the number of classes \(3\)"),
        (lambda: PKSampler(LABELS, 1, 1, batches=0), "batches must be at least 1, got 0"),
        (lambda: PKSampler(LABELS, 3, 1, num_replicas=2), r"p \(3\) must be divisible by num_replicas \(2\)"),
        (lambda: GroupSampler(LABELS, 1, 3, num_replicas=2), r"classes \(3\) must be divisible"),
        (lambda: PKSampler(LABELS, 2, 1, num_replicas=2, rank=2), "rank must be from 0 to 1, got 2"),
        (lambda: PKSampler(LABELS, 2, 1, num_replicas=0), "num_replicas must be at least 1, got 0"),
        (lambda: GroupSampler(LABELS, 2, 3), "needs 3 classes of at least 2 rows, and there are 2"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def pk(**given):
    return PKSampler(LABELS, **{"p": 2, "k": 1, **given})


def group(**given):
    return GroupSampler(LABELS, **{"n": 1, "classes": 2, **given})


@pytest.mark.parametrize("value", [2.0, "2", True, torch.tensor(2)], ids=repr)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        *((pk, name) for name in ("p", "k", "batches", "seed", "num_replicas", "rank")),
        *((group, name) for name in ("n", "classes", "seed", "num_replicas", "rank")),
        (lambda epoch: pk().set_epoch(epoch), "epoch"),
    ],
)
def test_integers_are_asked_for_by_name(make, name, value):
    with pytest.raises(TypeError, match=f"{name} must be an int, got "):
        make(**{name: value})


def test_integers_of_numpy():
    small = {"seed": np.int8(3), "num_replicas": np.uint8(2), "rank": np.int64(1)}
    plain = {name: int(value) for name, value in small.items()}
    labels = torch.arange(60) % 20
    # 20·20 does not fit the type.
    given = PKSampler(labels, np.uint8(20), np.uint8(20), batches=np.int16(2), **small)
    assert list(given) == list(PKSampler(labels, 20, 20, batches=2, **plain))
    assert list(GroupSampler(labels, np.uint8(3), np.int8(20), **small)) == list(
        GroupSampler(labels, 3, 20, **plain)
    )
