"""The baselines: what makes each of them that method, and that its score is what its Faiss index says."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from gpq_faiss.codes.bits import unpack_codes
from gpq_faiss.data.labels import Labels
from gpq_faiss.errors import DataError, MismatchError, UsageError
from gpq_faiss.evaluation.ranking import rank_codes
from gpq_faiss.methods.base import Coder, scaled_rows
from gpq_faiss.methods.classifier import ClassConfidence, Classifier
from gpq_faiss.methods.float_features import FloatFeatures, dot_rows
from gpq_faiss.methods.itq import ITQ
from gpq_faiss.methods.leave_one_out import leave_one_out
from gpq_faiss.methods.opq import OPQ
from gpq_faiss.methods.pq import PQ, pad
from gpq_faiss.methods.registry import ARRAY_METHODS, METHODS, make_builder, make_method

WIDTH, CLASSES = 20, 3
LENGTHS = {"pq": (12, 24, 16, 4), "opq": (12, 16), "itq": (12, 16, 5), "float": (12,), "classifier": (12,)}
CASES = [(name, bits) for name, lengths in LENGTHS.items() for bits in lengths]


def clusters(n: int, seed: int, width: int = WIDTH) -> tuple[NDArray[np.float32], Labels]:
    """Vectors around three centres with correlated noise, and their classes."""
    centres = np.random.default_rng(99).standard_normal((CLASSES, width)) * 1.5
    mix = np.random.default_rng(98).standard_normal((width, width)) / np.sqrt(width)
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, CLASSES, n)
    return (centres[ids] + rng.standard_normal((n, width)) @ mix).astype(np.float32), Labels.from_ids(
        ids, "abc"
    )


X, Y = clusters(900, 0)
XB, YB = clusters(300, 1)
XQ, YQ = clusters(15, 2)


BASELINES = ("opq", "pq", "itq", "float", "classifier")
"""What is tested here; the other methods have files of their own."""


def quick(name: str, bits: int, seed: int = 0) -> Coder:
    """The method with a small budget."""
    if name == "classifier":
        return Classifier(bits, seed=seed, steps=60, batch=64, hidden=16, learning_rate=1e-2)
    if name == "opq":
        return OPQ(bits, seed=seed, rotations=10)
    return make_method(name, bits, seed)


@pytest.fixture(scope="module")
def fitted() -> dict[tuple[str, int], Coder]:
    return {case: quick(*case).fit(X, Y) for case in CASES}


# ------------------------------------------------------------------------------------------------------ every method


@pytest.mark.parametrize(("name", "bits"), CASES)
def test_score_is_the_distance_of_the_faiss_index(
    fitted: dict[tuple[str, int], Coder], name: str, bits: int
) -> None:
    method = fitted[name, bits]
    index = method.index()
    assert index.is_trained
    assert index.ntotal == 0
    index.add(method.search_input(XB))
    distances, ids = index.search(method.search_input(XQ), len(XB))
    scores = method.score(XQ, method.encode(XB))
    sign = 1 if index.metric_type == faiss.METRIC_INNER_PRODUCT else -1
    tolerance = 0 if name == "itq" else 2e-5
    np.testing.assert_allclose(
        np.take_along_axis(scores, ids, axis=1), sign * distances, rtol=0, atol=tolerance
    )
    # All of the base is there, so this is the whole ranking.
    assert (np.sort(ids, axis=1) == np.arange(len(XB))).all()


@pytest.mark.parametrize(("name", "bits"), CASES)
def test_equal_codes_have_bit_equal_scores(
    fitted: dict[tuple[str, int], Coder], name: str, bits: int
) -> None:
    method = fitted[name, bits]
    codes = method.encode(XB)
    assert codes.dtype == np.uint8
    assert codes.shape == (len(XB), method.code_size)
    rng = np.random.default_rng(5)
    rows = rng.integers(0, len(codes), 500)
    alone = method.score(XQ, codes)
    assert alone.dtype == np.float32
    np.testing.assert_array_equal(method.score(XQ, codes[rows]), alone[:, rows])
    np.testing.assert_array_equal(method.score(XQ, codes[7:8])[:, 0], alone[:, 7])
    assert method.score(XQ, codes[:0]).shape == (len(XQ), 0)


@pytest.mark.parametrize(("name", "bits"), CASES)
def test_codes_repeat_by_seed(fitted: dict[tuple[str, int], Coder], name: str, bits: int) -> None:
    method = fitted[name, bits]
    of_torch, of_numpy = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    again = quick(name, bits).fit(X, Y)
    np.testing.assert_array_equal(method.encode(XB), again.encode(XB))
    assert again.settings() == method.settings()
    assert torch.equal(of_torch, torch.get_rng_state())
    assert (of_numpy == np.random.get_state()[1]).all()  # noqa: NPY002
    other = quick(name, bits).fit(X, Y, seed=7)
    assert other.settings() == {**method.settings(), "seed": 7}
    if name != "float":  # which has nothing to draw
        assert (method.encode(XB) != other.encode(XB)).any()


@pytest.mark.parametrize(("name", "bits"), CASES)
def test_codes_do_not_depend_on_the_batch(fitted: dict[tuple[str, int], Coder], name: str, bits: int) -> None:
    method = fitted[name, bits]
    whole = method.encode(XB)
    parts = np.concatenate([method.encode(XB[:0]), method.encode(XB[:1]), method.encode(XB[1:])])
    if name == "classifier":  # torch's sums follow the batch in the last bits
        np.testing.assert_allclose(parts.view(np.float32), whole.view(np.float32), rtol=1e-4, atol=1e-6)
    else:
        assert (parts != whole).any(axis=1).mean() <= 0.01


@pytest.mark.parametrize(("name", "bits"), CASES)
def test_ranks_well_above_chance(fitted: dict[tuple[str, int], Coder], name: str, bits: int) -> None:
    method = fitted[name, bits]
    result = rank_codes(lambda q, codes: method.score(XQ[q], codes), method.encode(XB), YQ, YB)
    assert result.map > (0.95 if name == "classifier" else 0.5)


# ------------------------------------------------------------------------------------------------------------- PQ


@pytest.mark.parametrize("bits", [4, 12, 16, 24])
@pytest.mark.parametrize("normalize", [False, True])
def test_pq_is_faiss_trained_on_the_padded_vectors(bits: int, normalize: bool) -> None:
    method = PQ(bits, seed=3, normalize=normalize).fit(X)
    wide = method.padded(WIDTH)
    assert wide % (bits // 4) == 0
    assert 0 <= wide - WIDTH < bits // 4
    train, base, queries = (pad(scaled_rows(a) if normalize else a, wide) for a in (X, XB, XQ))
    theirs = faiss.IndexPQ(wide, bits // 4, 4)
    theirs.pq.cp.seed = 4
    theirs.pq.cp.max_points_per_centroid = len(X)
    theirs.train(train)
    theirs.add(base)
    np.testing.assert_array_equal(faiss.vector_to_array(theirs.codes).reshape(len(XB), -1), method.encode(XB))
    distances, ids = theirs.search(queries, len(XB))
    scores = method.score(XQ, method.encode(XB))
    np.testing.assert_allclose(
        -np.take_along_axis(scores, ids, axis=1), distances, atol=1e-3 if not normalize else 1e-5
    )


def test_pq_score_is_the_distance_to_the_reconstruction() -> None:
    for method in (PQ(12).fit(X), PQ(12, normalize=False).fit(X), OPQ(12, rotations=3).fit(X)):
        codes = method.encode(XB)
        queries = scaled_rows(XQ) if method.normalize else XQ
        # What the appended zeros are decoded to, or what the rotation adds to them, has to be counted too.
        lifted = method._to_quantizer(queries)
        decoded = method.pq.decode(codes)
        expected = -((lifted[:, None] - decoded) ** 2).sum(axis=2)
        np.testing.assert_allclose(method.score(XQ, codes), expected, rtol=1e-4, atol=1e-4)


def test_padding_adds_nothing_to_a_distance() -> None:
    # 18 wide and 12 bits: three parts of six. 17 and a column of zeros is the same thing.
    narrow = np.ascontiguousarray(X[:, :17])
    wide = pad(narrow, 18)
    a, b = PQ(12).fit(narrow), PQ(12).fit(wide)
    assert a.padded(17) == 18
    np.testing.assert_array_equal(a.codebooks(), b.codebooks())
    np.testing.assert_array_equal(a.encode(narrow), b.encode(wide))
    assert (a.codebooks()[-1, :, -1] == 0).all()


def test_pq_trains_on_every_row() -> None:
    # Faiss's own limit would leave out all but 4,096 rows: put what matters behind them.
    rng = np.random.default_rng(0)
    near = rng.standard_normal((9000, 4)).astype(np.float32)
    far = near[:600] + np.float32(1000)
    method = PQ(4, normalize=False).fit(np.concatenate([near, far]))
    assert (np.abs(method.codebooks()[0]).max(axis=1) > 500).any()
    quantizer: Any = method._quantizer(4)
    assert quantizer.cp.max_points_per_centroid * 16 >= 10**9


@pytest.mark.parametrize("M", [1, 2, 3, 5])
def test_faiss_packs_as_unpack_codes_reads(M: int) -> None:
    expected = np.array(list(itertools.islice(itertools.product(range(16), repeat=M), 0, 5000, 7)), np.uint8)
    pq = faiss.ProductQuantizer(M, M, 4)
    faiss.copy_array_to_vector(np.tile(np.arange(16, dtype=np.float32), M), pq.centroids)
    codes = pq.compute_codes(expected.astype(np.float32))
    np.testing.assert_array_equal(unpack_codes(codes, M, 16), expected)


# ------------------------------------------------------------------------------------------------------------ OPQ


@pytest.mark.parametrize("bits", [12, 16])  # with and without padding
def test_opq_rotation_is_orthonormal_and_decoding_turns_back(bits: int) -> None:
    method = OPQ(bits, rotations=5).fit(X)
    assert method.rotation.shape == (method.padded(WIDTH), WIDTH)
    np.testing.assert_allclose(method.rotation.T @ method.rotation, np.eye(WIDTH), atol=1e-5)
    np.testing.assert_allclose(method._from_quantizer(method._to_quantizer(XB)), XB, atol=1e-4)


def test_opq_training_lowers_the_quantisation_error() -> None:
    # Two strong directions in one part of the vector: without a rotation, four codewords each.
    rng = np.random.default_rng(0)
    scale = np.array([10, 10, 5, 5, 0.1, 0.1, 0.1, 0.1])
    x = (rng.standard_normal((1500, 8)) * scale).astype(np.float32)
    plain = PQ(8, normalize=False).fit(x).quantisation_error(x)
    errors = [OPQ(8, normalize=False, rotations=n).fit(x).quantisation_error(x) for n in (0, 20)]
    assert errors[1] < 0.8 * plain
    assert errors[1] < 0.95 * errors[0]


@pytest.mark.parametrize("kind", [PQ, OPQ])
def test_quantisation_error(kind: type[PQ]) -> None:
    method = kind(16).fit(X)
    reconstruction = method.decode(method.encode(XB))
    assert reconstruction.shape == XB.shape
    expected = ((scaled_rows(XB) - reconstruction) ** 2).sum(axis=1).mean()
    assert method.quantisation_error(XB) == pytest.approx(expected, rel=1e-5)
    # The codewords are better than as many of the vectors themselves, and more iterations better than one.
    few = kind(16, iterations=1).fit(X)
    assert method.quantisation_error(X) < few.quantisation_error(X) < 1


# ------------------------------------------------------------------------------------------------------------ ITQ


@pytest.mark.parametrize("bits", [5, 12, 16])
def test_itq_codes_are_signs_of_the_rotated_components(bits: int) -> None:
    method = ITQ(bits).fit(X)
    rotation = method.rotation()
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(bits), atol=1e-4)
    np.testing.assert_allclose(method.mean(), X.mean(axis=0), atol=1e-4)
    coordinates = scaled_rows(XB - method.mean()) @ rotation.T
    np.testing.assert_allclose(method.project(XB), coordinates, atol=1e-5)
    codes = method.encode(XB)
    for i in range(bits):
        bit = codes[:, i // 8] >> (i % 8) & 1
        clear = np.abs(coordinates[:, i]) > 1e-5
        np.testing.assert_array_equal(bit[clear], (coordinates[:, i] > 0)[clear])
    if bits % 8:
        assert (codes[:, -1] >> (bits % 8) == 0).all()


def test_itq_spans_the_principal_components_and_training_nears_the_signs() -> None:
    method, start = ITQ(8).fit(X), ITQ(8, iterations=0).fit(X)
    y = scaled_rows(X - X.mean(axis=0))
    _, _, axes = np.linalg.svd(y - y.mean(axis=0), full_matrices=False)
    np.testing.assert_allclose(np.linalg.norm(method.rotation() @ axes[:8].T, axis=1), 1, atol=1e-2)

    def loss(m: ITQ) -> float:
        v = m.project(X)
        return float(((np.sign(v) - v) ** 2).sum(axis=1).mean())

    assert loss(method) < loss(start)


def test_hamming_scores_by_hand() -> None:
    method = ITQ(12).fit(X)
    codes = method.encode(XB)
    bits = np.unpackbits(codes, axis=1, bitorder="little")
    of_queries = np.unpackbits(method.encode(XQ), axis=1, bitorder="little")
    expected = -(of_queries[:, None] != bits).sum(axis=2)
    np.testing.assert_array_equal(method.score(XQ, codes), expected)


# ---------------------------------------------------------------------------------------------- float and classifier


def test_float_is_the_cosine() -> None:
    method = FloatFeatures(1).fit(X)
    assert method.bits == 32 * WIDTH
    expected = np.array([[np.dot(q, b) / np.linalg.norm(q) / np.linalg.norm(b) for b in XB] for q in XQ])
    np.testing.assert_allclose(method.score(XQ, method.encode(XB)), expected, atol=1e-5)
    np.testing.assert_allclose(method.score(XQ * 1e18, method.encode(XB * 1e-20)), expected, atol=1e-5)


@pytest.mark.parametrize("width", [1, 3, 10, 256, 9000])
def test_inner_products_do_not_depend_on_the_place(width: int) -> None:
    rng = np.random.default_rng(width)
    xb = rng.standard_normal((101, width), dtype=np.float32)
    xb[[0, 13, 50, 100]] = xb[77]
    for n in (1, 2, 9):
        scores = dot_rows(rng.standard_normal((n, width), dtype=np.float32), xb)
        assert (scores[:, [0, 13, 50, 100]] == scores[:, 77:78]).all()


def test_classifier_probabilities_and_training() -> None:
    method = quick("classifier", 12).fit(X, Y)
    assert isinstance(method, Classifier)
    p = method.probabilities(XB)
    assert p.shape == (len(XB), CLASSES)
    np.testing.assert_allclose(p.sum(axis=1), 1, atol=1e-5)
    assert (p.argmax(axis=1) == YB.class_ids()).mean() > 0.95
    assert np.mean(method.losses[-5:]) < 0.3 * np.mean(method.losses[:5])
    np.testing.assert_allclose(method.score(XQ, method.encode(XB)), method.probabilities(XQ) @ p.T, atol=1e-6)


def test_classifier_reads_labelled_rows_alone() -> None:
    seen = np.arange(0, len(X), 3)
    one = quick("classifier", 12).fit(X, Y.masked(seen))
    # The other rows count for the scale of the inputs, whatever their labels.
    two = quick("classifier", 12)
    ids = Y.class_ids()
    ids[np.setdiff1d(np.arange(len(X)), seen)] = -1
    two.fit(X, Labels.from_ids(ids, "abc"))
    np.testing.assert_array_equal(one.encode(XB), two.encode(XB))
    with pytest.raises(DataError, match="no item has one"):
        quick("classifier", 12).fit(X, Y.masked(seen[:0]))
    with pytest.raises(DataError, match="no item has one"):
        quick("classifier", 12).fit(X)


def test_several_classifiers_are_averaged() -> None:
    small: dict[str, Any] = {"steps": 5, "batch": 64, "hidden": 16, "learning_rate": 1e-2}
    one, three = (Classifier(networks=n, **small).fit(X, Y) for n in (1, 3))
    assert isinstance(three, Classifier)
    np.testing.assert_allclose(three.probabilities(XB).sum(axis=1), 1, atol=1e-5)
    assert len(three.losses) == 3 * len(one.losses)  # type: ignore[attr-defined]
    # The first is the one that is trained alone, and the mean of all is none of them.
    assert three.losses[:5] == one.losses  # type: ignore[attr-defined]
    assert not np.allclose(three.probabilities(XB), one.probabilities(XB), atol=1e-3)  # type: ignore[attr-defined]
    settings = [make_method(name, 12).settings() for name in ("classifier", "classifier-6")]
    assert [each.pop("networks") for each in settings] == [1, 6]
    assert [each.pop("method") for each in settings] == ["classifier", "classifier-6"]
    assert settings[0] == settings[1]


def test_a_classifier_learns_from_propagated_labels() -> None:
    few = Y.masked(np.array([int(np.flatnonzero(Y.class_ids() == c)[0]) for c in range(CLASSES)]))
    right = []
    for propagation in (0.0, 20.0):
        method = Classifier(
            propagation=propagation, steps=60, batch=64, hidden=16, learning_rate=1e-2, input_dropout=0.0
        ).fit(X, few)
        right.append((method.probabilities(XB).argmax(axis=1) == YB.class_ids()).mean())  # type: ignore[attr-defined]
    assert right[1] > right[0]
    assert make_method("classifier-propagated", 12).settings()["propagation"] == 20.0


@pytest.mark.parametrize("bits", [2, 4, 12, 48])
def test_class_confidence_is_the_probability_that_its_code_stands_for(bits: int) -> None:
    method = ClassConfidence(bits)
    method.classifier = quick("classifier", 12)  # type: ignore[assignment]
    method.fit(X, Y)
    codes = method.encode(XB)
    levels = 2 ** min(bits - 2, 16)  # two bits name three classes
    p, asked = method.classifier.probabilities(XB), method.classifier.probabilities(XQ)
    stands_for = np.empty_like(p)
    for row, of in zip(stands_for, p, strict=True):
        middle = (min(int(of.max() * levels), levels - 1) + 0.5) / levels
        row[:] = (1 - middle) / (CLASSES - 1)
        row[of.argmax()] = middle
    np.testing.assert_allclose(method.score(XQ, codes), asked @ stands_for.T, atol=1e-6)
    assert len(np.unique(codes, axis=0)) <= CLASSES * levels
    with pytest.raises(UsageError, match="1 bits are too few to name one of 3 classes"):
        ClassConfidence(1).fit(X, Y)


def test_classifier_with_several_labels_shares_the_probability() -> None:
    both = Y.dense(dtype=bool)
    both[both[:, 0], 1] = True  # class 0 always comes with class 1
    method = quick("classifier", 12).fit(X, Labels.from_multihot(both, "abc"))
    assert isinstance(method, Classifier)
    p = method.probabilities(XB)[YB.column(0)].mean(axis=0)
    assert p[:2] == pytest.approx([0.5, 0.5], abs=0.1)


# ------------------------------------------------------------------------------------------------------- bad arguments


def test_registry_lists_and_makes() -> None:
    for name in METHODS:
        assert METHODS[name].summary
        assert METHODS[name].citation
        if METHODS[name].deep:
            with pytest.raises(UsageError, match=f"{name} trains a network: .* gpq experiment run"):
                make_method(name, 24)
    assert set(BASELINES) < set(ARRAY_METHODS)
    for name in BASELINES:
        assert make_method(name, 24, seed=5).name == name
        assert make_method(name, 24, seed=5).seed == 5
        kept = make_method(name, 12).fit(X[:100], Y.take(slice(100))).bits
        assert METHODS[name].any_length == (kept == 12)
        with pytest.raises(UsageError, match=f"{name} trains no network"):
            make_builder(name)
    with pytest.raises(UsageError, match=r"no method 'lsh': choose one of .*pq.*itq.*classifier"):
        make_method("lsh", 24)


@pytest.mark.parametrize("name", BASELINES)
def test_refuses_what_cannot_be(name: str) -> None:
    with pytest.raises(UsageError, match="bits"):
        make_method(name, 0)
    with pytest.raises(UsageError, match="seed"):
        make_method(name, 12, -1)
    with pytest.raises(UsageError, match="fit first"):
        make_method(name, 12).encode(XB)
    with pytest.raises(UsageError, match="fit first"):
        make_method(name, 12).index()
    bad = X.copy()
    bad[[4, 9], 3] = np.nan, np.inf
    with pytest.raises(DataError, match="rows 4, 9 hold NaN or infinity"):
        make_method(name, 12).fit(bad, Y)
    with pytest.raises(DataError, match="nothing to learn from"):
        make_method(name, 12).fit(X[:0])
    with pytest.raises(DataError, match="900 training vectors but 300 labels"):
        make_method(name, 12).fit(X, YB)
    with pytest.raises(DataError, match="numbers"):
        make_method(name, 12).fit(X[0])
    method = quick(name, 12).fit(X, Y)
    with pytest.raises(MismatchError, match="width 19"):
        method.encode(XB[:, :19])
    with pytest.raises(MismatchError, match="codes of"):
        method.score(XQ, np.zeros((3, method.code_size + 1), np.uint8))
    with pytest.raises(DataError, match="uint8"):
        method.score(XQ, np.zeros((3, method.code_size), np.int64))


def test_refuses_codes_that_the_vectors_cannot_have() -> None:
    for kind in (PQ, OPQ):
        with pytest.raises(UsageError, match="multiple of 4"):
            kind(13)
        with pytest.raises(DataError, match="at least 16"):
            kind(12).fit(X[:15])
        with pytest.raises(UsageError, match="width 2"):
            kind(12).fit(X[:, :2])
    with pytest.raises(UsageError, match="at most 20 bits"):
        ITQ(21).fit(X)
    with pytest.raises(DataError, match="at least 13"):
        ITQ(12).fit(X[:12])
    zero = XB.copy()
    zero[6] = 0
    with pytest.raises(DataError, match="row 6 is all zero"):
        FloatFeatures(12).fit(X).encode(zero)
    # A zero vector has a nearest codeword all the same.
    assert PQ(12).fit(X).encode(zero).shape == (len(XB), 2)


def test_the_classifier_has_the_noise_that_its_labels_call_for() -> None:
    method = quick("classifier", 12).fit(X, Y)
    assert isinstance(method, Classifier)
    assert method.noise is None
    rows = np.flatnonzero(Y.has())
    learnt = ((X[rows] - X.mean(axis=0)) / np.sqrt(X.var(axis=0).mean())).astype(np.float32)
    sigma = leave_one_out(learnt, Y.dense(rows)).noise
    assert sigma > 0
    codes = {
        noise: Classifier(12, steps=60, batch=64, hidden=16, learning_rate=1e-2, noise=noise)
        .fit(X, Y)
        .encode(X)
        for noise in (sigma, 0.0)
    }
    probabilities = {noise: c.view(np.float32) for noise, c in codes.items()}
    np.testing.assert_allclose(method.encode(X).view(np.float32), probabilities[sigma], atol=1e-4)
    assert np.abs(probabilities[0.0] - probabilities[sigma]).max() > 0.01
    with pytest.raises(UsageError, match="noise -1"):
        Classifier(noise=-1.0)


# -------------------------------------------------------------------------------------------------------- real data


def _map(method: Coder, x: NDArray[np.float32], y: Labels, query: slice, base: slice) -> float:
    queries = x[query]
    codes = method.encode(x[base])
    return rank_codes(lambda q, c: method.score(queries[q], c), codes, y.take(query), y.take(base)).map


def test_works_on_digits() -> None:
    source = load_digits()
    order = np.random.default_rng(0).permutation(len(source.data))
    x, y = source.data[order].astype(np.float32), Labels.from_ids(source.target[order])
    query, base = slice(0, 100), slice(100, None)
    seen = y.masked(np.arange(100, 600)).take(base)
    methods = {name: quick(name, 24) for name in BASELINES}
    # With noisy inputs, 16 hidden units and 60 steps are too few.
    methods["classifier"] = Classifier(steps=300, batch=64, hidden=128)
    figures = {name: _map(made.fit(x[base], seen), x, y, query, base) for name, made in methods.items()}
    # Chance is 0.1.
    assert min(figures["pq"], figures["opq"]) > 0.55
    assert figures["itq"] > 0.45
    assert figures["float"] > 0.6
    assert figures["classifier"] > 0.85


@pytest.mark.skipif("GPQ_DATA" not in os.environ, reason="set GPQ_DATA to the folder of the test data")
def test_works_on_cifar10_features() -> None:
    folder = Path(os.environ["GPQ_DATA"]) / "cifar10-features"
    rows = np.random.default_rng(0).permutation(60_000)[:6_000]
    x = np.load(folder / "features.npy", allow_pickle=False)[rows].astype(np.float32)
    y = Labels.from_ids(np.load(folder / "labels.npy", allow_pickle=False)[rows])
    query, base = slice(0, 200), slice(200, None)
    seen = y.masked(np.arange(200, 1700)).take(base)
    for name, least in {"pq": 0.25, "opq": 0.24, "itq": 0.2, "float": 0.25, "classifier": 0.4}.items():
        assert _map(quick(name, 24).fit(x[base], seen), x, y, query, base) > least, name
