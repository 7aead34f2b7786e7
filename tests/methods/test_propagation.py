"""What labels say of other items: propagated over neighbours, and left out in turn; against loops
and scikit-learn, and in trainings."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import RidgeCV

from gpq_faiss import evaluate, open_data, train
from gpq_faiss.config import preset
from gpq_faiss.data.reader import Reader
from gpq_faiss.losses.classification import subspace_classification
from gpq_faiss.methods import measure, propagation
from gpq_faiss.methods.gpq import build_gpq
from gpq_faiss.methods.leave_one_out import least_error, leave_one_out
from gpq_faiss.methods.propagation import (
    left_out_accuracy,
    neighbour_graph,
    propagate,
    propagate_labels,
)
from gpq_faiss.methods.trainable import TrainingBatch
from gpq_faiss.training.loop import RunOptions

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


def test_equal_items_and_zeros_leave_the_graph_whole():
    """An item is told by others, be they equal to it; what has no direction has no neighbour, and
    is none."""
    x = np.concatenate([np.tile([[1.0, 2.0]], (6, 1)), np.zeros((2, 2)), [[-3.0, 1.0]]]).astype(
        np.float32
    )
    result = neighbour_graph(x, 3).toarray()
    assert np.isfinite(result).all()
    assert not result.diagonal().any()
    assert (result[:6].sum(axis=1) > 0).all()
    assert not result[6:8].any()


def test_of_many_items_nearly_all_neighbours_are_found():
    """Lists are searched, not all pairs."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(40, 8))[rng.integers(0, 40, 5000)] + rng.normal(size=(5000, 8))).astype(
        np.float32
    )
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    nearest = np.argsort(-(unit[:500] @ unit.T), axis=1)[:, 1:16]
    result = neighbour_graph(x)[:500].toarray() > 0
    assert np.take_along_axis(result, nearest, axis=1).mean() > 0.85


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


def test_left_out_labels_are_predicted_as_well_as_neighbours_know_them():
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
    seed, labelled, others, room, weight
):
    asked = np.random.default_rng(seed).permutation(1000)
    stride = asked[: labelled + others]
    names, remaining = np.sort(stride[:labelled]), np.sort(stride[labelled:])
    x = np.random.default_rng(seed).normal(size=(1000, 8)).astype(np.float32)
    y, section = np.ones((labelled, 2), np.float32), weight * labelled / 2
    ask = functools.partial(
        propagate_labels, lambda rows: (x[rows], np.ones(len(rows), bool)), names, y, remaining
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(propagation, "MOST_ITEMS", room)
        single, again = (ask(labels_per_class=section, accuracy=0.5, seed=seed) for _ in range(2))
    if not others or room - labelled < min(others, labelled) or weight < 0.14:
        assert single is None
    if single is None or again is None:
        return
    rows = single.rows
    assert single.weight == pytest.approx(weight)
    np.testing.assert_array_equal(rows, again.rows)
    assert (np.diff(rows) > 0).all()
    assert np.isin(names, rows).all()
    assert np.isin(rows, stride).all()
    assert len(rows) == min(room, labelled + others)
    # None is taken for another, and of others nothing is known.
    for row, p in zip(asked, single.of(asked), strict=True):
        np.testing.assert_array_equal(p, single.p[rows == row][0] if row in rows else [0, 0])


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
    made = build_gpq(config, data, size, len(data.require_labels().class_names))
    learn(made, data, labelled, pool, size)
    return made


def learn(made, data, labelled, pool, size=0):
    with Reader(data, size) as reader:
        made.fit_inputs(reader, np.sort(np.concatenate([labelled, pool])))
        y = data.require_labels().dense(labelled)
        made.fit_labels(reader, labelled, y, np.setdiff1d(pool, labelled))


def standardised(data, rows):
    x = data.read(rows).astype(np.float32)
    return (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0).mean())


def test_every_unlabelled_item_of_a_batch_learns_what_it_was_told(data):
    labelled, pool = np.array([4, 9, 300, 401]), np.setdiff1d(np.arange(50, 700), [300, 401])
    made = prepared(data, config_of(), labelled, pool).eval()
    assert made.pseudo_labels.weight == pytest.approx(20 * 2 / 4)
    rows = np.sort(np.concatenate([labelled, pool]))
    y = data.require_labels().dense(labelled)
    targets = propagate(
        neighbour_graph(standardised(data, rows)), np.searchsorted(rows, labelled), y
    )

    others = np.random.default_rng(0).permutation(pool)[:30]
    items = torch.from_numpy(data.read(np.concatenate([labelled, others])).astype(np.float32))
    batch = TrainingBatch(items, torch.from_numpy(y), 0, 10, torch.Generator(), labelled, others)
    parts = made.losses(batch, amp=False)
    net = made
    expected = subspace_classification(
        net.directions(net.features(items[4:])[1]),
        net.classifier.raw,
        torch.from_numpy(targets[np.searchsorted(rows, others)]).float(),
        made.config.beta,
    )
    torch.testing.assert_close(parts["propagation"], expected, rtol=1e-3, atol=1e-4)
    loss = made.config.loss
    total = parts["classification"] + made.pseudo_labels.weight * parts["propagation"]
    total = total - loss.lambda2 * parts.get("entropy", torch.zeros(()))
    torch.testing.assert_close(parts["total"], total)
    parts["propagation"].backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in net.parameters())


@pytest.mark.parametrize("backbone", ["mlp", "vgg"])
def test_of_images_the_pixels_are_compared_unless_they_are_convolved(backbone):
    digits, size = open_data("digits"), 32 if backbone == "vgg" else 8
    labelled, rows = np.arange(0, 300, 3), np.arange(600)
    others, labels = np.setdiff1d(rows, labelled), digits.require_labels()
    made = prepared(digits, config_of(backbone=backbone), labelled, others, size)
    if backbone == "vgg":
        assert made.pseudo_labels is made.accuracy is None
        return
    with Reader(digits, size) as reader:
        pixels = reader.fetch(rows)[0].reshape(600, -1).astype(np.float32) / 255
    assert 0.7 < made.accuracy < 1
    # The three channels are of one grey, and are divided by deviations that differ.
    scale = np.repeat([0.229, 0.224, 0.225], 64).astype(np.float32)
    compared = (pixels - pixels.mean(axis=0)) / scale
    expected = propagate(neighbour_graph(compared), labelled, labels.dense(labelled))
    np.testing.assert_allclose(made.pseudo_labels.p, expected, atol=1e-3)
    right = made.pseudo_labels.p.argmax(axis=1) == labels.dense(rows).argmax(axis=1)
    assert right[others].mean() > 0.9
    # The noise suits the labels, as with embeddings.
    noise, _ = leave_one_out(compared[labelled], labels.dense(labelled))
    assert made.backbone.head.noise == pytest.approx(noise, rel=1e-3)


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
def test_labels_are_propagated_where_they_are_few(data, config, labelled, pool, patches, caplog):
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (patches or {}).items():
            patched.setattr(propagation, name, value)
        made = prepared(data, config, labelled, pool)
    targets = patches is None
    assert (made.pseudo_labels is not None) == targets
    assert made.uses_unlabelled == (targets or bool(config.loss.lambda2))
    assert ("60 labelled items are too many to compare" in caplog.text) == (len(labelled) == 60)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_unlabelled_items_are_worth_something_now(data, tmp_path, device):
    """Four labels: with what they say of the others a code tells the classes apart, without it does
    not."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    result = {}
    for weight in (20.0, 0.0):
        config, model = config_of(weight, seed=1), tmp_path / f"m{weight}"
        train(data, model, config=config, labelled="2-per-class", options=RunOptions(device))
        result[weight] = evaluate(model, data, device=device).ranking.map
    assert result[20.0] > 0.9
    assert result[20.0] > result[0.0] + 0.2


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


def test_an_item_of_several_labels_is_a_share_right():
    """Two far groups, of which one has two labels each: either of them is half of the truth."""
    x = np.repeat([[-1.0], [1.0]], 10, axis=0).astype(np.float32)
    y = np.repeat([[1, 0, 0], [0, 1, 1]], 10, axis=0).astype(np.float32)
    assert leave_one_out(x, y)[1] == pytest.approx(0.75)
    # Labels that say nothing of the items are missed as often as not.
    rng = np.random.default_rng(0)
    _, guessed = leave_one_out(
        rng.normal(size=(2000, 5)).astype(np.float32),
        np.eye(4, dtype=np.float32)[rng.integers(0, 4, 2000)],
    )
    assert guessed == pytest.approx(0.25, abs=0.05)


def test_class_networks_take_the_noise_that_their_labels_call_for_unless_it_is_set():
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 3, 400)
    data = open_data(
        (np.eye(3, 8)[ids] * 14 + 7 * rng.normal(size=(400, 8))).astype(np.float32), labels=ids
    )
    noise, x = {}, standardised(data, np.arange(400))
    for n in (12, 400):
        made = prepared(data, config_of(), np.arange(n), np.arange(n, 400))
        noise[n], y = made.backbone.head.noise, data.require_labels().dense(np.arange(n))
        expected, predicted = least_error(x[:n], y)
        assert noise[n] == pytest.approx(1.5 * expected)
        assert made.accuracy == pytest.approx((predicted.argmax(1) == y.argmax(1)).mean())
    assert noise[12] > noise[400]
    for network in ({"noise": 0.5}, {"hidden": [16, 4]}):  # behind a layer it is not the input's
        made = prepared(data, config_of(**network), np.arange(12), np.arange(12, 400))
        assert made.backbone.head.noise == 0.5


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
