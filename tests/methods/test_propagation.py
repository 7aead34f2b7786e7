"""What labels say of other items: propagated over neighbours, and left out in turn; against loops
and scikit-learn, and in trainings."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import RidgeCV

from gpq_faiss import open_data
from gpq_faiss.config import preset
from gpq_faiss.data.base import Reader
from gpq_faiss.losses.classification import subspace_classification
from gpq_faiss.methods import measure, propagation
from gpq_faiss.methods.gpq import build_gpq
from gpq_faiss.methods.leave_one_out import least_error
from gpq_faiss.methods.propagation import (
    left_out_accuracy,
    neighbour_graph,
    propagate,
)
from gpq_faiss.methods.trainable import TrainingBatch
from gpq_faiss.nn.quantizer import intra_normalize

# the propagation


def naive_graph(x, k):
    n, norms = len(x), np.linalg.norm(x, axis=1)
    A = np.zeros((n, n))
    for i in range(n):
        cosine = x @ x[i] / (norms * norms[i])
        for j in [j for j in np.argsort(-cosine) if j != i][:k]:
            A[i, j] = max(cosine[j], 0) ** 4
    A = A + A.T
    degree = A.sum(axis=1)
    return A / np.sqrt(np.outer(degree, degree), where=A > 0, out=np.ones_like(A))


@given(
    seed=st.integers(0, 10_000), n=st.integers(2, 25), width=st.integers(1, 6), k=st.integers(1, 30)
)
@settings(max_examples=25, deadline=None)
def test_the_graph_is_that_of_a_loop_over_all_pairs(seed, n, width, k):
    x = np.random.default_rng(seed).normal(size=(n, max(width, 2))).astype(np.float32)
    result = neighbour_graph(x, k).toarray()
    np.testing.assert_allclose(result, naive_graph(x.astype(float), k), atol=1e-4)
    np.testing.assert_allclose(result, result.T, atol=1e-12)
    assert not result.diagonal().any()


@given(
    seed=st.integers(0, 10_000),
    n=st.integers(3, 25),
    classes=st.integers(1, 4),
    several=st.booleans(),
    islands=st.integers(1, 4),
)
@settings(max_examples=25, deadline=None)
def test_labels_are_handed_on_fifty_times(seed, n, classes, several, islands):
    rng = np.random.default_rng(seed)
    # Islands stand at right angles: nothing is handed on between them.
    x = np.zeros((n, 4 * islands), np.float32)
    x.reshape(n, islands, 4)[np.arange(n), rng.integers(0, islands, n)] = rng.normal(size=(n, 4))
    labelled = np.sort(rng.permutation(n)[: rng.integers(1, n + 1)])
    y = np.eye(classes, dtype=np.float32)[rng.integers(0, classes, len(labelled))]
    if several:
        y = np.maximum(y, rng.integers(0, 2, y.shape)).astype(np.float32)
    result = propagate(neighbour_graph(x), labelled, y)

    W = naive_graph(x.astype(float), 15)
    Y = np.zeros((n, classes))
    Y[labelled] = y / y.sum(axis=1, keepdims=True)
    F = Y
    for _ in range(50):
        F = 0.05 * Y + 0.95 * W @ F

    def shares(p, axis):
        total = p.sum(axis=axis, keepdims=True)
        return p / np.where(total > 0, total, 1)

    expected = shares(shares(shares(F, 0) * Y.sum(axis=0), 1) ** 2, 1)
    np.testing.assert_allclose(result, expected, atol=5e-3)
    targets = result.any(axis=1)
    assert targets[labelled].all()
    np.testing.assert_allclose(result[targets].sum(axis=1), 1, rtol=1e-6)


def moons(n, seed=0):
    """Two half circles that reach into each other, on a sphere (random Fourier features), where
    near ones have a large cosine."""
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 2
    angle = np.pi * rng.random(n)
    plane = np.stack([np.cos(angle), np.sin(angle)], 1)
    plane[y == 1] = np.array([1.0, 0.5]) - plane[y == 1]
    phase = (plane + 0.05 * rng.normal(size=plane.shape)) @ rng.normal(size=(2, 32)) * 2.5
    return np.concatenate([np.cos(phase), np.sin(phase)], 1).astype(np.float32), y


def test_left_out_accuracy_follows_the_agreement_of_neighbours():
    x, y = moons(300)
    graph, truth = neighbour_graph(x), np.eye(2, dtype=np.float32)[y]
    assert left_out_accuracy(graph, np.arange(0, 300, 3), truth[::3], 0) > 0.9
    guessed = truth[np.random.default_rng(0).permutation(300)]
    assert 0.35 < left_out_accuracy(graph, np.arange(300), guessed, 0) < 0.65
    # A class that has one label alone is not counted; an item of two classes is half of each.
    assert left_out_accuracy(graph, np.array([0, 2, 1]), truth[[0, 2, 1]], 0) == 1
    assert left_out_accuracy(graph, np.array([0, 1]), truth[:2], 0) == 0
    assert left_out_accuracy(graph, np.arange(8), np.ones((8, 2), np.float32), 0) == 0.5


# in a training


def config_of(propagation=20.0, seed=0, unlabelled=60, **network):
    changes = {
        "quantizer": {"codebooks": 3},
        "posterior": {"networks": 2, "propagation": propagation},
        "network": {"hidden": [64], **network},
        "training": {
            "steps": 150,
            "batch_labelled": 20,
            "batch_unlabelled": unlabelled,
            "seed": seed,
        },
    }
    return preset("recommended").with_settings(changes)


@pytest.fixture(scope="module")
def data():
    x, y = moons(900)
    return open_data(7 * x, labels=y)


def prepared(data, config, labelled, pool, size=0):
    """A method as the training has it before its first step."""
    method = build_gpq(config, data, size, len(data.require_labels().class_names))
    learn(method, data, labelled, pool, size)
    return method


def learn(method, data, labelled, pool, size=0):
    with Reader(data, size) as reader:
        method.fit_inputs(reader, np.sort(np.concatenate([labelled, pool])))
        y = data.require_labels().dense(labelled)
        method.fit_labels(reader, labelled, y, np.setdiff1d(pool, labelled))


def standardised(data, rows):
    x = data.read(rows).astype(np.float32)
    return (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0).mean())


def test_every_unlabelled_item_learns_its_pseudo_label(data):
    labelled, pool = np.array([4, 9, 300, 401]), np.setdiff1d(np.arange(50, 700), [300, 401])
    method = prepared(data, config_of(), labelled, pool).eval()
    assert method.pseudo_labels.weight == pytest.approx(20 * 2 / 4)
    rows = np.sort(np.concatenate([labelled, pool]))
    y = data.require_labels().dense(labelled)
    targets = propagate(
        neighbour_graph(standardised(data, rows)), np.searchsorted(rows, labelled), y
    )

    unlabelled_rows = np.random.default_rng(0).permutation(pool)[:30]
    items = torch.from_numpy(
        data.read(np.concatenate([labelled, unlabelled_rows])).astype(np.float32)
    )
    batch = TrainingBatch(
        items, torch.from_numpy(y), 0, 10, torch.Generator(), torch.arange(4), unlabelled_rows
    )
    parts = method.losses(batch, amp=False)
    net = method
    expected = subspace_classification(
        intra_normalize(net.features(items[4:])[1], net.N),
        net.prototypes,
        torch.from_numpy(targets[np.searchsorted(rows, unlabelled_rows)]).float(),
        method.config.beta,
    )
    torch.testing.assert_close(parts["propagation"], expected, rtol=1e-3, atol=1e-4)
    loss = method.config.loss
    total = parts["classification"] + method.pseudo_labels.weight * parts["propagation"]
    total = total - loss.lambda2 * parts.get("entropy", torch.zeros(()))
    torch.testing.assert_close(parts["total"], total)
    parts["propagation"].backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in net.parameters())


FEW, MANY, POOL = np.arange(4), np.arange(450), np.arange(450, 900)


@pytest.mark.parametrize(
    ("config", "labelled", "pool", "patches"),
    [
        (config_of(), FEW, POOL, None),
        (config_of(300.0), MANY, POOL, None),
        (config_of(4.0), MANY, POOL, {}),
        (config_of(0.0), FEW, POOL, {}),
        # With no others, or none in the batches.
        (config_of(300.0), MANY, MANY, {}),
        (config_of(unlabelled=0), FEW, POOL, {}),
        # Where neighbours know less than a linear model, and where the labelled ones are too many
        # to compare.
        (config_of(300.0), MANY, POOL, {"LEAST_SHARE": 1.5}),
        (config_of(300.0), np.arange(60), POOL, {"MOST_ITEMS": 100}),
    ],
)
def test_labels_are_propagated_where_they_are_few(data, config, labelled, pool, patches):
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (patches or {}).items():
            patched.setattr(propagation, name, value)
        method = prepared(data, config, labelled, pool)
    targets = patches is None
    assert (method.pseudo_labels is not None) == targets
    assert method.uses_unlabelled == (targets or bool(config.loss.lambda2))


def test_labels_are_not_propagated_where_items_have_several(data):
    x = data.read(slice(None))
    y = np.eye(4, dtype=np.uint8)[data.require_labels().dense().argmax(axis=1)]
    y[::2, 2:] = 1
    assert prepared(open_data(x, labels=y), config_of(), FEW, POOL).pseudo_labels is None


# leaving one out

GRID = 2.0 ** (np.arange(33) / 4 - 5)


@pytest.mark.parametrize(("n", "width"), [(30, 8), (20, 40), (300, 16)])
def test_errors_are_those_of_ridge_cv(n, width):
    rng = np.random.default_rng(n)
    y = np.eye(3, dtype=np.float32)[np.arange(n) % 3]
    x = (y @ rng.normal(size=(3, width)) + 2 * rng.normal(size=(n, width))).astype(np.float32)
    result, predicted = least_error(x, y)
    ridge = RidgeCV(alphas=n * GRID**2, store_cv_results=True).fit(x.astype(float), y)
    assert ridge.alpha_ == pytest.approx(n * result**2)
    squared = ridge.cv_results_[:, :, np.flatnonzero(np.isclose(GRID, result))[0]]
    np.testing.assert_allclose((y - predicted) ** 2, squared, atol=1e-9)
    # Few rows and constant columns leave the noise finite.
    for small_set in (1, 5):
        with np.errstate(all="raise"):
            noise, _ = least_error(
                np.ones((small_set, 4), np.float32), np.eye(small_set, dtype=np.float32)
            )
        assert 0 < noise <= 8


def test_a_sample_ends_a_hopeless_propagation_early(monkeypatch, caplog):
    monkeypatch.setattr(propagation, "SAMPLE", 100)
    rng = np.random.default_rng(0)
    x, sizes = rng.standard_normal((1000, 8)).astype(np.float32), []

    def vectors(rows):
        sizes.append(len(rows))
        return x[rows], np.ones(len(rows), bool)

    labelled, y = np.arange(40), np.eye(4, dtype=np.float32)[rng.integers(0, 4, 40)]
    options = {"labels_per_class": 20.0, "accuracy": 0.9, "seed": 0}
    pseudo = propagation.propagate_labels(vectors, labelled, y, np.arange(40, 1000), **options)
    assert (pseudo, sizes) == (None, [140])


def test_array_methods_are_fitted_to_a_limited_number_of_items(monkeypatch):
    monkeypatch.setattr(measure, "_FIT_ROWS", 50)
    for n_labelled, n_unlabelled in ((10, 200), (120, 7), (20, 30), (60, 0)):
        rows = np.arange(n_labelled + n_unlabelled)
        split = SimpleNamespace(labelled=rows[:n_labelled], unlabelled=rows[n_labelled:])
        chosen = measure.training_rows(split)
        assert len(chosen) == len(set(chosen)) <= 50
        assert n_labelled > 50 or np.isin(split.labelled, chosen).all()
