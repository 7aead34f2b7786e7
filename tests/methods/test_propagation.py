"""Labels propagated over neighbours: against loops over all pairs, and in the trainings that use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpq_faiss import encode, evaluate, train
from gpq_faiss.config import Config, merge, preset, validate
from gpq_faiss.data.open import open_data
from gpq_faiss.data.reader import Reader
from gpq_faiss.data.standard import open_digits
from gpq_faiss.errors import UsageError
from gpq_faiss.losses import SubspaceClassification, SubspaceSoftTargets
from gpq_faiss.methods import propagation
from gpq_faiss.methods.gpq import build_gpq
from gpq_faiss.methods.leave_one_out import leave_one_out
from gpq_faiss.methods.posterior import PosteriorCodes
from gpq_faiss.methods.propagation import (
    LEAST_WEIGHT,
    MOST_ITEMS,
    items_to_compare,
    likeliest_power,
    neighbour_graph,
    propagate,
    raised,
)
from gpq_faiss.methods.trainable import TrainingBatch
from gpq_faiss.nn.heads import SubspaceHeads

# ------------------------------------------------------------------------------------------------------- the propagation


def naive_graph(x: np.ndarray, k: int) -> np.ndarray:
    n = len(x)
    A = np.zeros((n, n))
    for i in range(n):
        cosine = [x[i] @ x[j] / (np.linalg.norm(x[i]) * np.linalg.norm(x[j])) for j in range(n)]
        for j in sorted((j for j in range(n) if j != i), key=lambda j: -cosine[j])[:k]:
            A[i, j] = max(cosine[j], 0) ** 4
    A = A + A.T
    W = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            if A[i, j]:
                W[i, j] = A[i, j] / np.sqrt(A[i].sum() * A[j].sum())
    return W


@given(seed=st.integers(0, 10_000), n=st.integers(2, 25), width=st.integers(1, 6), k=st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_the_graph_is_that_of_a_loop_over_all_pairs(seed: int, n: int, width: int, k: int) -> None:
    x = np.random.default_rng(seed).normal(size=(n, max(width, 2))).astype(np.float32)
    found = neighbour_graph(x, k).toarray()
    np.testing.assert_allclose(found, naive_graph(x.astype(float), k), atol=1e-4)
    np.testing.assert_allclose(found, found.T, atol=1e-12)
    assert not found.diagonal().any()


def test_equal_items_and_zeros_leave_the_graph_whole() -> None:
    """An item is told by others, be they equal to it; what has no direction has no neighbour, and is none."""
    x = np.concatenate([np.tile([[1.0, 2.0]], (6, 1)), np.zeros((2, 2)), [[-3.0, 1.0]]]).astype(np.float32)
    found = neighbour_graph(x, 3).toarray()
    assert np.isfinite(found).all()
    assert not found.diagonal().any()
    assert (found[:6].sum(axis=1) > 0).all()
    assert not found[6:8].any()


def naive_propagation(x: np.ndarray, labelled: np.ndarray, y: np.ndarray, raw: bool = False) -> np.ndarray:
    """Before it is raised to a power; ``raw``: before classes and items are weighed, too."""
    n, classes = len(x), y.shape[1]
    W = naive_graph(x.astype(float), 15)
    Y = np.zeros((n, classes))
    for row, own in zip(labelled, y, strict=True):
        Y[row] = own / own.sum()
    F = sum(
        (0.05 * 0.95**t * np.linalg.matrix_power(W, t) @ Y for t in range(50)),
        0.95**50 * np.linalg.matrix_power(W, 50) @ Y,
    )
    if raw:
        return F
    out = np.zeros_like(F)
    for c in range(classes):
        if Y[:, c].any():
            out[:, c] = F[:, c] / F[:, c].sum() * Y[:, c].sum()
    total = out.sum(axis=1, keepdims=True)
    return out / np.where(total > 0, total, 1)


@given(
    seed=st.integers(0, 10_000),
    n=st.integers(3, 25),
    classes=st.integers(1, 4),
    several=st.booleans(),
    islands=st.integers(1, 4),
)
@example(seed=922, n=19, classes=3, several=True, islands=2)
@settings(max_examples=100, deadline=None)
def test_labels_are_handed_on_fifty_times_and_left_out_one_by_one(
    seed: int, n: int, classes: int, several: bool, islands: int
) -> None:
    rng = np.random.default_rng(seed)
    # Islands stand at right angles: nothing is handed on between them.
    x = np.zeros((n, 4 * islands), np.float32)
    x.reshape(n, islands, 4)[np.arange(n), rng.integers(0, islands, n)] = rng.normal(size=(n, 4))
    labelled = np.sort(rng.permutation(n)[: rng.integers(1, n + 1)])
    y = np.eye(classes, dtype=np.float32)[rng.integers(0, classes, len(labelled))]
    if several:
        y = np.maximum(y, rng.integers(0, 2, y.shape)).astype(np.float32)
    seen: dict[str, np.ndarray] = {}

    def spy(p: np.ndarray, own: np.ndarray) -> float:
        seen.update(p=p, own=own)
        return 3.0

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(propagation, "likeliest_power", spy)
        found, _ = propagate(x, labelled, y)
    whole = naive_propagation(x, labelled, y) ** 3
    total = whole.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found, whole / np.where(total > 0, total, 1), atol=5e-3)
    told = found.any(axis=1)
    assert told[labelled].all()
    np.testing.assert_allclose(found[told].sum(axis=1), 1)

    largest = naive_propagation(x, labelled, y, raw=True)[labelled].max(axis=1)
    left, own, told = [], [], []
    for i in range(len(labelled)):
        others = np.arange(len(labelled)) != i
        # Of items whose class has another label.
        if (y[others].any(axis=0) & (y[i] > 0)).any():
            left.append(naive_propagation(x, labelled[others], y[others])[labelled[i]])
            own.append(y[i] / y[i].sum())
            reached = naive_propagation(x, labelled[others], y[others], raw=True)[labelled[i]].max()
            # Between these limits it is rounding that decides.
            told.append(reached > 1e-8 * largest[i] or reached < 1e-12 * largest[i])
            if reached < 1e-12 * largest[i]:
                left[-1][:] = 0
    assert len(seen["p"]) == len(left)
    if left:
        np.testing.assert_allclose(seen["p"][told], np.array(left)[told], atol=1e-3)
        np.testing.assert_allclose(seen["own"], own)


def test_of_many_labels_four_hundred_at_most_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of all classes, though these come in turn."""
    x = np.random.default_rng(0).normal(size=(1100, 8)).astype(np.float32)
    y = np.eye(3, dtype=np.float32)[np.arange(1001) % 3]
    seen = []
    monkeypatch.setattr(propagation, "likeliest_power", lambda p, own: seen.append(own) or 1.0)
    propagate(x, np.arange(1001), y)
    # Every third would be of one class.
    np.testing.assert_array_equal(seen[0], y[::4])
    assert (np.abs(seen[0].sum(axis=0) - 251 / 3) < 1).all()


def moons(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two half circles that reach into each other, on a sphere (random Fourier features), where near ones have a large cosine."""
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 2
    angle = np.pi * rng.random(n)
    plane = np.stack([np.cos(angle), np.sin(angle)], 1)
    plane[y == 1] = np.array([1.0, 0.5]) - plane[y == 1]
    phase = (plane + 0.05 * rng.normal(size=plane.shape)) @ rng.normal(size=(2, 32)) * 2.5
    return np.concatenate([np.cos(phase), np.sin(phase)], 1).astype(np.float32), y


def test_one_label_a_class_is_enough_where_classes_are_connected() -> None:
    x, y = moons(600)
    labelled = np.array([0, 1])
    found, _ = propagate(x, labelled, np.eye(2, dtype=np.float32))
    nearest = ((x[:, None] - x[labelled][None]) ** 2).sum(axis=2).argmin(axis=1)
    assert (found.argmax(axis=1) == y).mean() > 0.95
    assert (nearest == y).mean() < 0.9


@given(seed=st.integers(0, 1000), power=st.floats(1, 20), spread=st.floats(0.01, 100))
@settings(max_examples=60, deadline=None)
def test_a_power_keeps_the_order_and_nothing_else(seed: int, power: float, spread: float) -> None:
    rng = np.random.default_rng(seed)
    p = np.exp(spread * rng.normal(size=(50, 4)))
    p /= p.sum(axis=1, keepdims=True)
    p[::7] = 0
    found = raised(p, power)
    told = p.any(axis=1)
    assert (found.any(axis=1) == told).all()
    np.testing.assert_allclose(found[told].sum(axis=1), 1)
    # Against the greatest, as far as numbers go.
    logs = np.log(p[told]) - np.log(p[told].max(axis=1, keepdims=True))
    expected = np.maximum(np.exp(power * logs), 1e-300)
    got = np.maximum(found[told] / found[told].max(axis=1, keepdims=True), 1e-300)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_the_power_is_that_by_which_labels_are_drawn_if_there_are_enough() -> None:
    """And of none of them it is the one that was taken to be likely before."""
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(5), 4000)
    for true in (1.0, 1.5, 3.0, 5.0):
        classes = [rng.choice(5, p=own) for own in raised(p, true)]
        y = np.eye(5)[classes]
        found = [likeliest_power(p[:n], y[:n]) for n in (0, 20, 200, 4000)]
        assert found[0] == pytest.approx(2, rel=0.01)
        assert found[3] == pytest.approx(true, rel=0.1)
        assert found[2] == pytest.approx(true, rel=0.35)
        # Twenty labels hardly change what was thought before.
        assert found[1] == pytest.approx(2, rel=0.3)
        # A label that could not be says little against all others.
        wrong = np.vstack([y[:200], np.eye(5)[:1]]), np.vstack([p[:200], [[0, 0.25, 0.25, 0.25, 0.25]]])
        assert likeliest_power(wrong[1], wrong[0]) == pytest.approx(found[2], rel=0.05)


def pairs(n_labelled: int, weight: float, others: int = 300_000, classes: int = 10) -> float:
    """Pairs of items that are compared, of as many as there may be."""
    rows = items_to_compare(
        np.arange(n_labelled),
        np.arange(n_labelled, n_labelled + others),
        weight,
        width=256,
        classes=classes,
        seed=0,
    )
    return 0.0 if rows is None else (len(rows) / MOST_ITEMS) ** 2


@given(weight=st.floats(0, 3), labelled=st.integers(1, 3000))
@settings(max_examples=50, deadline=None)
def test_neighbours_cost_no_more_than_they_are_worth(weight: float, labelled: int) -> None:
    """The time goes with the pairs that are compared, and these with the weight; where that is next to nothing, none are."""
    cost = pairs(labelled, weight)
    if weight < LEAST_WEIGHT:
        assert cost == 0
    else:
        least = min(1, weight)
        assert least * 0.999 < cost <= (least**0.5 + (labelled + 1) / MOST_ITEMS) ** 2
    # 300,000 items with 290 labels in each of ten classes: less than a tenth of what was spent before.
    assert pairs(2900, 20 / 290) < 0.1
    assert pairs(2900, 20 / 290) < pairs(500, 20 / 50) < pairs(100, 2.0) <= 1


@given(
    seed=st.integers(0, 100),
    labelled=st.integers(1, 30),
    others=st.integers(0, 200),
    room=st.integers(1, 250),
)
@settings(max_examples=60, deadline=None)
def test_all_labelled_items_are_compared_and_others_by_the_seed(
    seed: int, labelled: int, others: int, room: int
) -> None:
    every = np.random.default_rng(seed).permutation(1000)[: labelled + others]
    known, rest = np.sort(every[:labelled]), np.sort(every[labelled:])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(propagation, "most_items", lambda width, classes: room)
        rows, again = (items_to_compare(known, rest, 1.0, width=8, classes=2, seed=seed) for _ in range(2))
    if not others or room - labelled < min(others, labelled):
        assert rows is None
        return
    assert rows is not None
    np.testing.assert_array_equal(rows, again)
    assert (np.diff(rows) > 0).all()
    assert np.isin(known, rows).all()
    assert np.isin(rows, every).all()
    assert len(rows) == min(room, labelled + others)


# -------------------------------------------------------------------------------------------------------------- the loss


def test_the_loss_is_the_cross_entropy_of_a_loop() -> None:
    rng = np.random.default_rng(0)
    B, M, d, C, beta = 7, 3, 5, 4, 6.0
    x = torch.nn.functional.normalize(torch.from_numpy(rng.normal(size=(B, M, d))), dim=2)
    W = torch.from_numpy(rng.normal(size=(M, C, d)))
    p = rng.random((B, C))
    p[2] = 0
    p /= np.maximum(p.sum(axis=1, keepdims=True), 1e-9)
    total = 0.0
    for b in range(B):
        for m in range(M):
            w = W[m].numpy() / np.linalg.norm(W[m].numpy(), axis=1, keepdims=True)
            z = beta * w @ x[b, m].numpy()
            log_q = z - np.log(np.exp(z).sum())
            total -= float(p[b] @ log_q) / M
    loss = SubspaceSoftTargets(beta)(x, W, torch.from_numpy(p))
    assert float(loss) == pytest.approx(total / (B - 1))
    # Sure of one class it is the loss of labels.
    y = torch.eye(C)[torch.arange(B) % C]
    torch.testing.assert_close(
        SubspaceSoftTargets(beta)(x.float(), W.float(), y),
        SubspaceClassification("paper", beta)(x.float(), W.float(), y),
    )
    assert float(SubspaceSoftTargets(beta)(x, W, torch.zeros(B, C))) == 0
    assert float(SubspaceSoftTargets(beta)(x[:0], W, torch.zeros(0, C))) == 0
    with pytest.raises(UsageError, match="beta is 0"):
        SubspaceSoftTargets(0)


# ------------------------------------------------------------------------------------------------------------ in a training


def config_of(propagation: float = 20.0, **training: Any) -> Config:
    small = {"steps": 150, "batch_labelled": 20, "batch_unlabelled": 60, **training}
    return validate(
        merge(
            preset("recommended"),
            {
                "quantizer": {"codebooks": 3},
                "posterior": {"committee": 2, "committee_hidden": 64, "propagation": propagation},
                "training": small,
            },
        )
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("moons")
    x, y = moons(900)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    return open_data(f"features:{folder / 'x.npy'}", labels=str(folder / "y.npy"))


def prepared(data: Any, config: Config, labelled: np.ndarray, pool: np.ndarray) -> PosteriorCodes:
    """A method as the training has it before its first step."""
    made = build_gpq(config, data, 0, 2)
    assert isinstance(made, PosteriorCodes)
    with Reader(data, 0) as reader:
        made.fit_inputs(reader, np.sort(np.concatenate([labelled, pool])))
        made.fit_labels(reader, labelled, data.require_labels().dense(labelled))
    return made


def test_every_unlabelled_item_of_a_batch_learns_what_it_was_told(data: Any) -> None:
    labelled, pool = np.array([4, 9, 300, 401]), np.setdiff1d(np.arange(50, 700), [300, 401])
    made = prepared(data, config_of(), labelled, pool).eval()
    assert made.weight == pytest.approx(20 * 2 / 4)
    rows = np.sort(np.concatenate([labelled, pool]))
    x = data.read(rows).astype(np.float32)
    whole = (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0).mean())
    y = data.require_labels().dense(labelled)
    told, _ = propagate(whole, np.searchsorted(rows, labelled), y)

    others = np.random.default_rng(0).permutation(pool)[:30]
    items = torch.from_numpy(data.read(np.concatenate([labelled, others])).astype(np.float32))
    batch = TrainingBatch(items, torch.from_numpy(y), 0, 10, torch.Generator(), labelled, others)
    parts = made.losses(batch, amp=False)
    net = made.network
    expected = SubspaceSoftTargets(made.config.loss.beta)(
        net.directions(net.features(items[4:])[1]),
        net.classifier.raw,
        torch.from_numpy(told[[rows.tolist().index(row) for row in others]]).float(),
    )
    torch.testing.assert_close(parts["propagation"], expected, rtol=1e-3, atol=1e-4)
    loss = made.config.loss
    total = parts["classification"] + made.weight * parts["propagation"] - loss.lambda2 * parts["entropy"]
    torch.testing.assert_close(parts["total"], total)
    parts["propagation"].backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and bool(p.grad.any()) for p in net.parameters())


@pytest.mark.parametrize("backbone", ["linear", "mlp", "vgg"])
def test_of_images_the_pixels_are_compared_unless_they_are_convolved(backbone: str) -> None:
    digits = open_digits()
    size = 32 if backbone == "vgg" else 8
    labelled, rows = np.arange(0, 300, 3), np.arange(600)
    y = digits.require_labels().dense(labelled)
    config = merge(config_of(), {"network": {"backbone": backbone}})
    made = build_gpq(config, digits, size, 10)
    assert isinstance(made, PosteriorCodes)
    with Reader(digits, size) as reader:
        made.fit_inputs(reader, rows)
        made.fit_labels(reader, labelled, y)
        if backbone == "vgg":
            assert made.pseudo_labels is None
            assert made.accuracy is None
            return
        pixels = reader.fetch(rows)[0].reshape(600, -1).astype(np.float32) / 255
    assert made.pseudo_labels is not None
    assert made.accuracy is not None
    assert 0.7 < made.accuracy < 1
    # The three channels are of one grey, and are divided by deviations that differ.
    scale = np.repeat([0.229, 0.224, 0.225], 64).astype(np.float32)
    compared = (pixels - pixels.mean(axis=0)) / scale
    expected, _ = propagate(compared, labelled, y)
    np.testing.assert_allclose(made.pseudo_labels.numpy(), expected, atol=1e-3)
    others = np.setdiff1d(rows, labelled)
    truth = digits.require_labels().dense(others).argmax(axis=1)
    assert (made.pseudo_labels[others].numpy().argmax(axis=1) == truth).mean() > 0.9
    assert isinstance(made.network.backbone.head, SubspaceHeads)
    # The noise suits the labels, as with embeddings.
    assert made.network.backbone.head.noise == pytest.approx(
        leave_one_out(compared[labelled], y).noise, rel=1e-3
    )


def test_labels_are_propagated_where_they_are_few(data: Any) -> None:
    few, many, pool = np.arange(4), np.arange(450), np.arange(450, 900)
    assert prepared(data, config_of(), few, pool).pseudo_labels is not None
    assert prepared(data, config_of(4.0), many, pool).pseudo_labels is None
    assert prepared(data, config_of(0.0), few, pool).pseudo_labels is None
    assert prepared(data, config_of(300.0), many, pool).pseudo_labels is not None
    # With no others, or none in the batches, nothing is propagated.
    assert prepared(data, config_of(300.0), many, many).pseudo_labels is None
    assert prepared(data, config_of(batch_unlabelled=0), few, pool).pseudo_labels is None
    with pytest.raises(UsageError, match=r"posterior\.propagation = -1"):
        config_of(-1.0)


def test_of_too_many_items_some_are_chosen_by_the_seed(
    data: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(propagation, "most_items", lambda width, classes: 100)
    few, pool = np.arange(0, 8, 2), np.arange(10, 900)
    made = [prepared(data, config_of(seed=seed), few, pool) for seed in (0, 0, 1)]
    assert [len(one.rows) for one in made] == [100] * 3
    assert all(np.isin(few, one.rows).all() for one in made)
    np.testing.assert_array_equal(made[0].rows, made[1].rows)
    assert (made[0].rows != made[2].rows).any()
    # What is lost on the others is nothing, and none is taken for another.
    x = data.read(made[0].rows).astype(np.float32)
    every = data.read(np.concatenate([few, pool])).astype(np.float32)
    whole = (x - every.mean(axis=0)) / np.sqrt(every.var(axis=0).mean())
    y = data.require_labels().dense(few)
    told, _ = propagate(whole, np.searchsorted(made[0].rows, few), y)
    expected = np.zeros((900, 2), np.float32)
    expected[made[0].rows] = told
    asked = np.random.default_rng(0).permutation(pool)
    items = torch.from_numpy(data.read(np.concatenate([few, asked])).astype(np.float32))
    batch = TrainingBatch(items, torch.from_numpy(y), 0, 10, torch.Generator(), few, asked)
    net = made[0].eval().network
    loss = SubspaceSoftTargets(made[0].config.loss.beta)(
        net.directions(net.features(items[4:])[1]), net.classifier.raw, torch.from_numpy(expected[asked])
    )
    torch.testing.assert_close(made[0].losses(batch, amp=False)["propagation"], loss, rtol=1e-3, atol=1e-4)
    assert (expected[asked].any(axis=1)).sum() <= 96
    # Half of what can be compared are labelled, or more: then nothing is propagated, and the log says so.
    assert not caplog.records
    assert prepared(data, config_of(300.0), np.arange(60), pool).pseudo_labels is None
    assert "60 labelled items are too many to compare" in caplog.text


def test_unlabelled_items_are_worth_something_now(data: Any, tmp_path: Path) -> None:
    """Four labels: with what they say of the others a code tells the classes apart, without it does not."""
    found = {}
    for weight in (20.0, 0.0):
        model = train(data, tmp_path / f"m{weight}", config=config_of(weight), labelled="2-per-class")
        found[weight] = evaluate(model, data).ranking.map
    assert found[20.0] > 0.9
    assert found[20.0] > found[0.0] + 0.05


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_learns_it_as_well(data: Any, tmp_path: Path) -> None:
    model = train(data, tmp_path / "m", config=config_of(), labelled="2-per-class", device="cuda")
    assert evaluate(model, data, device="cuda").ranking.map > 0.9


def test_a_run_that_was_cut_goes_on_as_if_it_had_not_been(data: Any, tmp_path: Path) -> None:
    config, often = config_of(steps=30), {"validate_every": 10, "checkpoint_seconds": 0.0}

    def cut(step: int, steps: int, figures: dict[str, float]) -> None:
        if step == 17:
            raise InterruptedError

    whole = train(data, tmp_path / "whole", config=config, labelled="2-per-class", **often)
    with pytest.raises(InterruptedError):
        train(data, tmp_path / "cut", config=config, labelled="2-per-class", **often, progress=cut)
    again = train(data, tmp_path / "cut", config=config, labelled="2-per-class", **often, resume=True)
    codes = [encode(model, data, tmp_path / f"{model.name}.h5").read_bytes() for model in (whole, again)]
    assert (whole / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert codes[0] == codes[1]
    lines = [line for line in (whole / "metrics.jsonl").read_text().splitlines() if "propagation" in line]
    assert len(lines) == 3
