"""Labels propagated over neighbours: against loops over all pairs, and in the trainings that use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpq_faiss import evaluate, train
from gpq_faiss.config import Config, merge, preset, validate
from gpq_faiss.data.open import open_data
from gpq_faiss.data.reader import Reader
from gpq_faiss.data.standard import open_digits
from gpq_faiss.errors import UsageError
from gpq_faiss.losses.classification import subspace_classification
from gpq_faiss.methods import propagation
from gpq_faiss.methods.gpq import build_gpq
from gpq_faiss.methods.leave_one_out import leave_one_out
from gpq_faiss.methods.posterior import PosteriorCodes
from gpq_faiss.methods.propagation import (
    PseudoLabels,
    left_out_accuracy,
    neighbour_graph,
    propagate,
    propagate_labels,
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
@settings(max_examples=25, deadline=None)
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


def test_of_many_items_nearly_all_neighbours_are_found() -> None:
    """Lists are searched, not all pairs."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(40, 8))[rng.integers(0, 40, 5000)] + rng.normal(size=(5000, 8))).astype(np.float32)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    nearest = np.argsort(-(unit[:500] @ unit.T), axis=1)[:, 1:16]
    found = neighbour_graph(x)[:500].toarray() > 0
    assert np.take_along_axis(found, nearest, axis=1).mean() > 0.85


@given(
    seed=st.integers(0, 10_000),
    n=st.integers(3, 25),
    classes=st.integers(1, 4),
    several=st.booleans(),
    islands=st.integers(1, 4),
)
@settings(max_examples=25, deadline=None)
def test_labels_are_handed_on_fifty_times(
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
    found = propagate(neighbour_graph(x), labelled, y)

    W = naive_graph(x.astype(float), 15)
    Y = np.zeros((n, classes))
    Y[labelled] = y / y.sum(axis=1, keepdims=True)
    F = sum(
        (0.05 * 0.95**t * np.linalg.matrix_power(W, t) @ Y for t in range(50)),
        0.95**50 * np.linalg.matrix_power(W, 50) @ Y,
    )
    expected = np.zeros_like(F)
    for c in range(classes):
        if Y[:, c].any():
            expected[:, c] = F[:, c] / F[:, c].sum() * Y[:, c].sum()
    total = expected.sum(axis=1, keepdims=True)
    expected = (expected / np.where(total > 0, total, 1)) ** 2
    total = expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected / np.where(total > 0, total, 1), atol=5e-3)
    told = found.any(axis=1)
    assert told[labelled].all()
    np.testing.assert_allclose(found[told].sum(axis=1), 1, rtol=1e-6)


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
    found = propagate(neighbour_graph(x), labelled, np.eye(2, dtype=np.float32))
    nearest = ((x[:, None] - x[labelled][None]) ** 2).sum(axis=2).argmin(axis=1)
    assert (found.argmax(axis=1) == y).mean() > 0.95
    assert (nearest == y).mean() < 0.9


def test_left_out_labels_are_predicted_as_well_as_neighbours_know_them() -> None:
    x, y = moons(300)
    graph, truth = neighbour_graph(x), np.eye(2, dtype=np.float32)[y]
    assert left_out_accuracy(graph, np.arange(0, 300, 3), truth[::3], 0) > 0.9
    guessed = truth[np.random.default_rng(0).permutation(300)]
    assert 0.35 < left_out_accuracy(graph, np.arange(300), guessed, 0) < 0.65
    # A class that has one label alone is not counted; an item of two classes is half of each.
    assert left_out_accuracy(graph, np.array([0, 2, 1]), truth[[0, 2, 1]], 0) == 1
    assert left_out_accuracy(graph, np.array([0, 1]), truth[:2], 0) == 0
    assert left_out_accuracy(graph, np.arange(8), np.ones((8, 2), np.float32), 0) == 0.5


@given(
    seed=st.integers(0, 100),
    labelled=st.integers(1, 30),
    others=st.integers(0, 200),
    room=st.integers(1, 250),
    weight=st.floats(0, 2),
)
@settings(max_examples=25, deadline=None)
def test_all_labelled_items_are_compared_and_others_by_the_seed(
    seed: int, labelled: int, others: int, room: int, weight: float
) -> None:
    every = np.random.default_rng(seed).permutation(1000)[: labelled + others]
    known, rest = np.sort(every[:labelled]), np.sort(every[labelled:])
    x = np.random.default_rng(seed).normal(size=(1000, 8)).astype(np.float32)
    y = np.ones((labelled, 2), np.float32)

    def found() -> PseudoLabels | None:
        return propagate_labels(
            lambda rows: (x[rows], np.ones(len(rows), bool)),
            known,
            y,
            rest,
            labels_per_class=weight * labelled / 2,
            accuracy=0.5,
            seed=seed,
        )

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(propagation, "MOST_ITEMS", room)
        one, again = found(), found()
    if not others or room - labelled < min(others, labelled) or weight < 0.14:
        assert one is None
    if one is None or again is None:
        return
    rows = one.rows
    assert one.weight == pytest.approx(weight)
    np.testing.assert_array_equal(rows, again.rows)
    assert (np.diff(rows) > 0).all()
    assert np.isin(known, rows).all()
    assert np.isin(rows, every).all()
    assert len(rows) == min(room, labelled + others)
    # None is taken for another, and of others nothing is known.
    asked = np.random.default_rng(seed).permutation(1000)
    for row, p in zip(asked, one.of(asked), strict=True):
        np.testing.assert_array_equal(p, one.p[rows == row][0] if row in rows else [0, 0])


# ------------------------------------------------------------------------------------------------------------ in a training


def config_of(propagation: float = 20.0, **training: Any) -> Config:
    small = {"steps": 150, "batch_labelled": 20, "batch_unlabelled": 60, **training}
    return validate(
        merge(
            preset("recommended"),
            {
                "quantizer": {"codebooks": 3},
                "posterior": {"networks": 2, "propagation": propagation},
                "network": {"hidden": [64]},
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
    assert made.pseudo_labels is not None
    assert made.pseudo_labels.weight == pytest.approx(20 * 2 / 4)
    rows = np.sort(np.concatenate([labelled, pool]))
    x = data.read(rows).astype(np.float32)
    whole = (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0).mean())
    y = data.require_labels().dense(labelled)
    told = propagate(neighbour_graph(whole), np.searchsorted(rows, labelled), y)

    others = np.random.default_rng(0).permutation(pool)[:30]
    items = torch.from_numpy(data.read(np.concatenate([labelled, others])).astype(np.float32))
    batch = TrainingBatch(items, torch.from_numpy(y), 0, 10, torch.Generator(), labelled, others)
    parts = made.losses(batch, amp=False)
    net = made.network
    expected = subspace_classification(
        net.directions(net.features(items[4:])[1]),
        net.classifier.raw,
        torch.from_numpy(told[[rows.tolist().index(row) for row in others]]).float(),
        made.config.beta,
    )
    torch.testing.assert_close(parts["propagation"], expected, rtol=1e-3, atol=1e-4)
    loss = made.config.loss
    total = parts["classification"] + made.pseudo_labels.weight * parts["propagation"]
    total = total - loss.lambda2 * parts.get("entropy", torch.zeros(()))
    torch.testing.assert_close(parts["total"], total)
    parts["propagation"].backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and bool(p.grad.any()) for p in net.parameters())
    # Another process is told the same.
    other = build_gpq(config_of(), data, 0, 2)
    assert isinstance(other, PosteriorCodes)
    other.take_prepared(made.prepared())
    assert (other.accuracy, other.prepared().keys()) == (made.accuracy, made.prepared().keys())
    for one, twin in zip(vars(made.pseudo_labels).values(), vars(other.pseudo_labels).values(), strict=True):
        np.testing.assert_array_equal(one, twin)


@pytest.mark.parametrize("backbone", ["mlp", "vgg"])
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
    expected = propagate(neighbour_graph(compared), labelled, y)
    np.testing.assert_allclose(made.pseudo_labels.p, expected, atol=1e-3)
    others = np.setdiff1d(rows, labelled)
    truth = digits.require_labels().dense(others).argmax(axis=1)
    assert (made.pseudo_labels.p[others].argmax(axis=1) == truth).mean() > 0.9
    assert isinstance(made.network.backbone.head, SubspaceHeads)
    # The noise suits the labels, as with embeddings.
    assert made.network.backbone.head.noise == pytest.approx(
        leave_one_out(compared[labelled], y).noise, rel=1e-3
    )


def test_labels_are_propagated_where_they_are_few(data: Any, caplog: pytest.LogCaptureFixture) -> None:
    few, many, pool = np.arange(4), np.arange(450), np.arange(450, 900)
    made = prepared(data, config_of(), few, pool)
    assert made.pseudo_labels is not None
    assert made.uses_unlabelled
    for config, labelled in ((config_of(4.0), many), (config_of(0.0), few)):
        made = prepared(data, config, labelled, pool)
        assert made.pseudo_labels is None
        assert made.uses_unlabelled == bool(config.loss.lambda2)
    assert prepared(data, config_of(300.0), many, pool).pseudo_labels is not None
    # With no others, or none in the batches, nothing is propagated; nor where neighbours know less than a linear model.
    assert prepared(data, config_of(300.0), many, many).pseudo_labels is None
    assert prepared(data, config_of(batch_unlabelled=0), few, pool).pseudo_labels is None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(propagation, "LEAST_SHARE", 1.5)
        assert prepared(data, config_of(300.0), many, pool).pseudo_labels is None
        patched.setattr(propagation, "MOST_ITEMS", 100)
        assert prepared(data, config_of(300.0), np.arange(60), pool).pseudo_labels is None
    assert "60 labelled items are too many to compare" in caplog.text
    with pytest.raises(UsageError, match=r"posterior\.propagation = -1"):
        config_of(-1.0)


def test_unlabelled_items_are_worth_something_now(data: Any, tmp_path: Path) -> None:
    """Four labels: with what they say of the others a code tells the classes apart, without it does not."""
    found = {}
    for weight in (20.0, 0.0):
        model = train(data, tmp_path / f"m{weight}", config=config_of(weight, seed=1), labelled="2-per-class")
        found[weight] = evaluate(model, data).ranking.map
    assert found[20.0] > 0.9
    assert found[20.0] > found[0.0] + 0.2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_learns_it_as_well(data: Any, tmp_path: Path) -> None:
    model = train(data, tmp_path / "m", config=config_of(), labelled="2-per-class", device="cuda")
    assert evaluate(model, data, device="cuda").ranking.map > 0.9
