"""The monitor in a plain loop: what it measures, when it looks, when it warns, and what it remembers.

The trainings are on the digits of scikit-learn. Their seeds are none of those on which the thresholds were
chosen (100 to 103).
"""

import json
import math
import warnings
from itertools import pairwise

import pytest
import torch
from sklearn.datasets import load_digits

import tripletops as T
from tripletops import samplers
from tripletops.diagnostics.monitor import BatchWarning, CollapseMonitor, CollapseWarning


@pytest.fixture(scope="module")
def digits():
    rows, labels = load_digits(return_X_y=True)
    return torch.tensor(rows, dtype=torch.float32) / 16, torch.tensor(labels)


def train(digits, criterion, seed, *, k=20, dim=2, rate=1e-2, normalise=False, steps=150):
    """The diameters of all batches, and the text of the warnings."""
    rows, labels = digits
    torch.manual_seed(seed)
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, dim))
    optimiser = torch.optim.Adam(network.parameters(), lr=rate)
    sampler, diameters = samplers.PKSampler(labels, p=10, k=k, seed=seed), []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        while len(diameters) < steps:
            for batch in sampler:
                emb = network(rows[batch])
                emb = torch.nn.functional.normalize(emb) if normalise else emb
                diameters.append(T.evaluate.diameter(emb.detach()))
                optimiser.zero_grad()
                criterion(emb, labels[batch]).backward()
                optimiser.step()
    return diameters, [one for one in said if issubclass(one.category, CollapseWarning | BatchWarning)]


COLLAPSING = {
    "two dimensions": (T.nn.BatchHardLoss(), {}),
    "no margin": (T.nn.BatchHardLoss(margin=0.0), {}),
    "soft margin": (T.nn.BatchHardLoss(loss="soft_margin"), {"k": 32, "dim": 4}),
    "on the sphere": (T.nn.BatchHardLoss(), {"normalise": True, "rate": 5e-3}),
    "first order": (
        T.nn.BatchHardLoss(loss="first_order"),
        {"k": 32, "dim": 3, "rate": 3e-3, "normalise": True},
    ),
}


@pytest.mark.parametrize("seed", [200, 201])
@pytest.mark.parametrize("case", COLLAPSING)
def test_a_collapse_is_announced_once_before_a_fifth_of_the_diameter_is_left(digits, case, seed):
    criterion, settings = COLLAPSING[case]
    monitor = CollapseMonitor()
    diameters, said = train(digits, monitor.watch(criterion), seed, **settings)
    under = [step for step, diameter in enumerate(diameters) if diameter < 0.2 * diameters[0]]
    assert under, "this training was to collapse"
    assert [one.category for one in said] == [CollapseWarning]
    assert monitor.warned["collapse"] < under[0]
    for word in ("semi-hard", "easy positives", "second_order", "smaller batch", "dimension"):
        assert word in str(said[0].message)
    assert f"step {monitor.warned['collapse']}," in str(said[0].message)


HEALTHY = {
    "semi-hard": (T.nn.SemiHardLoss(), {"dim": 4}),
    "semi-hard on the sphere": (T.nn.SemiHardLoss(), {"dim": 8, "normalise": True}),
    "small batches": (T.nn.BatchHardLoss(), {"k": 4, "dim": 64, "rate": 1e-3}),
    "easy positives, second order": (T.nn.EasyPositiveLoss(), {"k": 8, "dim": 16, "rate": 1e-3}),
    "easy positives, semi-hard": (
        T.nn.TripletLoss(positive="easy", negative="semihard"),
        {"dim": 4},
    ),
    "all triplets": (T.nn.BatchAllLoss(), {"k": 8, "dim": 16, "rate": 1e-3}),
}


@pytest.mark.parametrize("seed", [200, 201])
@pytest.mark.parametrize("case", HEALTHY)
def test_a_healthy_training_is_left_alone(digits, case, seed):
    criterion, settings = HEALTHY[case]
    monitor = CollapseMonitor()
    diameters, said = train(digits, monitor.watch(criterion), seed, **settings)
    assert diameters[-1] > 0.5 * diameters[0]
    assert said == []
    assert monitor.warned == {}


def batch(rows=12, dim=3, classes=4, seed=0, **options):
    emb = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed), **options)
    return emb, torch.arange(rows) % classes


def shrink(monitor, emb, labels, factor, steps):
    for step in range(steps):
        monitor.update(factor**step * emb, labels, 0.3)


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
@pytest.mark.parametrize("positive", ["hard", "easy"])
def test_measurements_are_those_of_the_plain_definitions(distance, positive):
    emb, labels = batch(rows=11, dim=3, classes=5, seed=3)
    labels[0], labels[1] = 77, 78  # alone in their classes
    found = CollapseMonitor(margin=0.3, distance=distance, positive=positive).update(emb, labels, 0.6)
    rows = emb / emb.norm(dim=1, keepdim=True) if distance == "cosine" else emb
    distances = torch.stack([(rows - row).norm(dim=1) for row in rows])
    compared = distances.square() / 2 if distance == "cosine" else distances
    picked, lonely = [], 0
    for i in range(11):
        own = [float(compared[i, j]) for j in range(11) if j != i and labels[j] == labels[i]]
        others = [float(compared[i, j]) for j in range(11) if labels[j] != labels[i]]
        lonely += not own
        if own:
            picked.append(((max if positive == "hard" else min)(own), min(others)))
    values = torch.linalg.svdvals((rows - rows.mean(0)).double())
    shares = values / values.sum()
    assert found == {
        "step": 0,
        "loss": 0.6,
        "loss_level": pytest.approx(2.0),
        "rows": 11,
        "classes": len(set(labels.tolist())),
        "valid_share": pytest.approx(len(picked) / 11),
        "without_partner_share": pytest.approx(lonely / 11),
        "active_share": pytest.approx(sum(p - n + 0.3 > 0 for p, n in picked) / len(picked)),
        "hard_negative_share": pytest.approx(sum(n <= p for p, n in picked) / len(picked)),
        "diameter": pytest.approx(float(distances.max()), rel=1e-5),
        "spread": pytest.approx(float((rows - rows.mean(0)).square().sum(1).mean().sqrt()), rel=1e-5),
        "effective_rank": pytest.approx(math.exp(-float((shares * shares.log()).sum())), rel=1e-4),
        "diameter_share": 1.0,
        "diameter_bound": pytest.approx(float(distances.max()) - 2 * 0.6, rel=1e-5),
    }


def test_ignored_rows_are_left_out():
    emb, labels = batch()
    with_more = torch.cat([emb, torch.full((3, 3), math.nan)]), torch.cat([labels, torch.full((3,), -1)])
    monitor = CollapseMonitor(ignore_label=-1)
    assert monitor.update(*with_more, 0.1) == pytest.approx(CollapseMonitor().update(emb, labels, 0.1))


def test_positives_may_come_from_elsewhere():
    emb, _ = batch()
    labels = torch.arange(12)
    found = CollapseMonitor().update(emb, labels, 0.1, ref_emb=emb + 1, ref_labels=labels)
    assert found["valid_share"] == 1
    assert CollapseMonitor().update(emb, labels, 0.1)["without_partner_share"] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_floating_type_is_measured(dtype):
    emb, labels = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = CollapseMonitor().update(emb.to(dtype).requires_grad_(), labels, torch.tensor(0.1))
    assert found["diameter"] == pytest.approx(T.evaluate.diameter(emb), rel=0.02)
    assert found["effective_rank"] == pytest.approx(
        CollapseMonitor().update(emb, labels, 0)["effective_rank"], rel=0.02
    )


def test_rows_that_are_not_finite_are_not_judged():
    emb, labels = batch()
    monitor = CollapseMonitor()
    broken = emb.clone()
    broken[2, 1] = math.nan
    for _ in range(4):
        found = monitor.update(broken, labels, math.nan)
        assert math.isnan(found["diameter"])
    assert monitor.warned == {}
    assert monitor.update(emb, labels, 0.1)["diameter_share"] == 1


@pytest.mark.parametrize(
    ("labels", "lonely"),
    [(torch.arange(12), "100%"), (torch.zeros(12, dtype=torch.long), "0%")],
    ids=["no positives", "one class"],
)
def test_useless_batches_are_announced_once(labels, lonely):
    emb, _ = batch()
    monitor = CollapseMonitor()
    monitor.update(emb, labels, 0.0)
    monitor.update(emb, labels, 0.0)
    with pytest.warns(BatchWarning, match=f"{lonely} of its rows have no other row.*PKSampler"):
        monitor.update(emb, labels, 0.0)
    for _ in range(20):
        monitor.update(emb, labels, 0.0)
    assert monitor.warned == {"batches": 2}


def test_one_useless_batch_now_and_then_is_nothing():
    emb, labels = batch()
    monitor = CollapseMonitor()
    for step in range(60):
        monitor.update(emb, torch.arange(12) if step % 3 < 2 else labels, 0.1)
    assert monitor.warned == {}


def test_equal_rows_are_a_collapse_at_once():
    _, labels = batch()
    with pytest.warns(CollapseWarning, match="is 0 at step 0"):
        CollapseMonitor().update(torch.ones(12, 3), labels, 0.2)


def test_a_network_that_stays_collapsed_is_announced():
    """As in a training that is resumed without the monitor's state."""
    emb, labels = batch()
    monitor = CollapseMonitor()
    with pytest.warns(CollapseWarning, match=r"since step 0 .* has not grown"):
        shrink(monitor, 1e-3 * emb, labels, 1.0, 1000)
    assert 500 <= monitor.warned["collapse"] < 800


def test_a_small_start_that_grows_is_nothing():
    emb, labels = batch()
    monitor = CollapseMonitor()
    for step in range(3000):
        monitor.update(1e-3 * 1.002**step * emb, labels, 0.2)
    assert monitor.warned == {}


def test_a_separated_batch_may_shrink():
    labels = torch.arange(12) % 4
    emb = torch.nn.functional.one_hot(labels).float() * 10
    monitor = CollapseMonitor()
    for step in range(200):
        monitor.update(emb * 0.98**step + 1e-4 * torch.randn(12, 4), labels, 0.0)
    assert monitor.history[-1]["diameter_share"] < 0.2
    assert monitor.warned == {}


def test_looks_thin_out():
    emb, labels = batch()
    monitor = CollapseMonitor(every=64)
    looked = [step for step in range(2000) if monitor.update(emb, labels, 0.1) is not None]
    assert looked[:8] == [0, 1, 2, 4, 8, 16, 32, 64]
    assert looked == [found["step"] for found in monitor.history]
    assert monitor.last == monitor.history[-1]
    gaps = [(b - a, max(1, min(64, a))) for a, b in pairwise(looked)]
    assert all(gap == most for gap, most in gaps)


def test_a_step_that_is_not_looked_at_reads_nothing():
    emb, labels = batch()
    monitor = CollapseMonitor()
    while monitor.step < 400 or monitor.step >= monitor._state.next_peek:
        monitor.update(emb, labels, 0.1)
    assert monitor.update(0, 0, 0) is None


def test_a_sudden_fall_late_in_a_training_is_looked_at():
    emb, labels = batch(rows=64, dim=2, classes=4)
    monitor = CollapseMonitor()
    for _ in range(5000):
        monitor.update(emb, labels, 0.1)
    with pytest.warns(CollapseWarning):
        shrink(monitor, emb, labels, 0.98, 200)
    (found,) = [found for found in monitor.history if found["step"] == monitor.warned["collapse"]]
    assert 0.2 < found["diameter_share"] < 0.4


def test_a_resumed_monitor_remembers():
    emb, labels = batch(rows=40, dim=2)
    monitor = CollapseMonitor()
    with pytest.warns(CollapseWarning):
        shrink(monitor, emb, labels, 0.9, 30)
    resumed = CollapseMonitor()
    resumed.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    for step in range(30, 60):
        found = [one.update(0.9**step * emb, labels, 0.3) for one in (monitor, resumed)]
        assert found[0] == found[1]
    assert resumed.warned == monitor.warned
    assert resumed.step == 60


def test_a_state_of_something_else_is_refused():
    with pytest.raises(ValueError, match=r"holds step, .*got epoch"):
        CollapseMonitor().load_state_dict({"epoch": 3})


def test_a_watched_loss_is_the_loss():
    emb, labels = batch()
    emb.requires_grad_()
    criterion = T.nn.BatchHardLoss(margin=0.5, distance="sqeuclidean")
    monitor = CollapseMonitor()
    watched = monitor.watch(criterion)
    assert torch.equal(watched(emb, labels), criterion(emb, labels))
    assert monitor.last["loss_level"] == pytest.approx(criterion(emb, labels).item() / 0.5)
    criterion.margin = 0.25
    watched(emb, labels)
    assert monitor.last["loss_level"] == pytest.approx(criterion(emb, labels).item() / 0.25)
    assert list(watched.state_dict()) == []


def test_validation_is_not_watched():
    emb, labels = batch()
    monitor = CollapseMonitor()
    watched = monitor.watch(T.nn.BatchHardLoss())
    with torch.no_grad():
        watched(emb, labels)
    watched.eval()(emb.requires_grad_(), labels)
    assert monitor.step == 0


@pytest.mark.parametrize(
    ("criterion", "level"),
    [
        (T.nn.BatchHardLoss(loss="soft_margin"), math.log(2)),
        (T.nn.EasyPositiveLoss(), math.log(2)),
        (T.nn.SemiHardLoss(margin=0.7), 0.7),
        (T.nn.SupConLoss(), math.nan),
        (T.nn.ContrastiveLoss(), math.nan),
        (T.batch_hard_loss, 0.2),
    ],
)
def test_the_level_of_a_collapsed_loss_is_read_from_the_criterion(criterion, level):
    emb, labels = batch()
    monitor = CollapseMonitor()
    loss = monitor.watch(criterion)(emb.requires_grad_(), labels)
    assert monitor.last["loss_level"] == pytest.approx(loss.item() / level, nan_ok=True)


@pytest.mark.parametrize("loss", ["margin", "soft_margin", "first_order", "second_order"])
def test_the_level_is_the_loss_of_equal_rows(loss):
    _, labels = batch()
    monitor = CollapseMonitor(loss=loss, margin=0.4)
    with pytest.warns(CollapseWarning):
        found = monitor.update(
            torch.ones(12, 3), labels, T.batch_hard_loss(torch.ones(12, 3), labels, loss=loss, margin=0.4)
        )
    assert found["loss_level"] == pytest.approx(1.0)


# Dynamo reads the .grad of every input of the graph that follows a break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_network_can_hold_a_watched_loss():
    emb, labels = batch()
    monitor = CollapseMonitor()
    watched = monitor.watch(T.nn.BatchHardLoss())
    network = torch.nn.Linear(3, 3)
    compiled = torch.compile(lambda rows: watched(network(rows), labels), backend="eager")
    for _ in range(3):
        compiled(emb).backward()
    assert monitor.step == 3


def test_it_writes_to_a_dict_and_to_a_function():
    emb, labels = batch()
    values, calls = {}, []
    for writer in (values, lambda found, step: calls.append((step, found))):
        monitor = CollapseMonitor(writer=writer, prefix="train/")
        for _ in range(2):
            monitor.update(emb, labels, 0.1)
    assert values["train/step"] == [0, 1]
    assert values["train/loss"] == [0.1, 0.1]
    assert [step for step, _ in calls] == [0, 1]
    assert calls[0][1] == {name: value[0] for name, value in values.items() if name != "train/step"}


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"every": 0}, ValueError, "every=0"),
        ({"every": 2.5}, TypeError, "2.5"),
        ({"margin": -1.0}, ValueError, "-1"),
        ({"loss": "hinge"}, ValueError, "hinge"),
        ({"distance": "l1"}, ValueError, "l1"),
        ({"loss": "first_order", "distance": "euclidean"}, ValueError, "first_order"),
        ({"positive": "all"}, ValueError, "all"),
        ({"writer": 3}, TypeError, "int"),
    ],
)
def test_bad_options_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        CollapseMonitor(**options)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ((torch.ones(4), torch.ones(4, dtype=torch.long), 0.1), ValueError, r"\(4,\)"),
        ((torch.ones(4, 2), torch.ones(3, dtype=torch.long), 0.1), ValueError, r"\(3,\)"),
        ((torch.ones(4, 2), torch.ones(4), 0.1), TypeError, "float32"),
        (([[1.0]], torch.ones(1, dtype=torch.long), 0.1), TypeError, "list"),
        ((torch.ones(4, 2), torch.ones(4, dtype=torch.long), "low"), TypeError, "str"),
    ],
)
def test_bad_batches_are_refused(given, error, text):
    with pytest.raises(error, match=text):
        CollapseMonitor().update(*given)


@pytest.mark.parametrize("rows", [0, 1])
def test_batches_without_a_pair_are_measured(rows):
    found = CollapseMonitor().update(torch.ones(rows, 2), torch.ones(rows, dtype=torch.long), 0.0)
    assert found["rows"] == rows
