"""What makes each of the methods that learn from a matrix of vectors that method."""

import itertools

import faiss
import numpy as np
import pytest
import torch
from array_data import WIDTH, XB, XQ, YB, X, Y, clusters, quick
from hypothesis import given, settings
from hypothesis import strategies as st

from gpq_faiss.codes.bits import unpack_codes
from gpq_faiss.codes.codebooks import product_index
from gpq_faiss.data.labels import Labels
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.methods.coders import scaled_rows
from gpq_faiss.methods.faiss_codec import ITQ, OPQ, PQ
from gpq_faiss.methods.lopq import LEAST, LOPQ, local_rotation
from gpq_faiss.methods.registry import make_method, split_names
from gpq_faiss.methods.sdh import discrete_codes
from gpq_faiss.methods.sh import SH, smallest_modes


@pytest.mark.parametrize(
    ("method", "x", "message"),
    [
        *((kind(12), X[:15], "16") for kind in (PQ, LOPQ)),
        (ITQ(21), X, "cannot output 21"),
        (SH(4), np.ones((9, 4), np.float32), "are equal"),
        (SH(4), X[:1], "are equal"),
    ],
)
def test_codes_that_the_vectors_cannot_have_are_refused(method, x, message):
    with pytest.raises((UsageError, DataError), match=message):
        method.fit(x)


# PQ, OPQ and LOPQ


@pytest.mark.parametrize("bits", [4, 12, 24])
def test_pq_is_faiss_trained_on_all_padded_vectors(bits):
    x = clusters(4500, 3)[0]  # Faiss's own limit would leave out all but 4,096
    padding = ((0, 0), (0, -WIDTH % (bits // 4)))
    index = faiss.IndexPQ(WIDTH + padding[1][1], bits // 4, 4)
    index.pq.cp.seed, index.pq.cp.max_points_per_centroid = 4, 10**6
    index.train(np.pad(scaled_rows(x), padding))
    codes = index.sa_encode(np.pad(scaled_rows(XB), padding))
    np.testing.assert_array_equal(codes, PQ(bits, seed=3).fit(x).encode(XB))


def quantisation_error(method, x):
    decoded = product_index(method.quantizer.codebooks).sa_decode(method.encode(x))
    return float(((method._transformed(scaled_rows(x)) - decoded) ** 2).sum(axis=1).mean())


def test_opq_lowers_the_quantisation_error():
    # Two strong directions in one part of the vector: without a rotation, four codewords each.
    scale = np.array([10, 10, 5, 5, 0.1, 0.1, 0.1, 0.1])
    x = (np.random.default_rng(0).standard_normal((1500, 8)) * scale).astype(np.float32)
    assert quantisation_error(OPQ(8).fit(x), x) < 0.8 * quantisation_error(PQ(8).fit(x), x)


@pytest.mark.parametrize(
    "description", ["RQ2x6", "SQ8", "Flat", "RaBitQ", "IVF4,RaBitQ", "ITQ12,LSH", "OPQ3,PQ3x4"]
)
def test_a_codec_ranks_as_its_index_searches(description):
    coder = make_method(f"faiss:{description}", 12).fit(X)
    scores = coder.score(XQ, coder.encode(XB))
    xq, index = coder._transformed(XQ), coder._codec
    index.add(coder._transformed(XB))
    every_list = faiss.SearchParametersIVF(nprobe=4) if "IVF" in description else None
    distances, ids = index.search(xq, len(XB), params=every_list)
    reached = np.take_along_axis(scores, ids, axis=1)
    assert (np.diff(reached, axis=1) <= 1e-3).all()
    np.testing.assert_allclose(np.diff(reached, axis=1), -np.diff(distances, axis=1), atol=2e-3)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("nonsense", "has no codec"),
        ("IVF4,RaBitQfs", "has no codec"),
        ("HNSW32", "standalone codec not implemented"),
        ("PQ4x12", "clusters .4096"),
        ("ITQ21,LSH", "cannot output 21"),
    ],
)
def test_what_is_no_codec_of_these_vectors_is_refused(description, message):
    with pytest.raises((UsageError, DataError), match=f"faiss:{description}: .*{message}"):
        make_method(f"faiss:{description}", 12).fit(X)


def test_commas_of_a_factory_string_do_not_split_it():
    names = ["pq", "faiss:OPQ12,PQ12x4", "faiss:ITQ48,LSH", "opq"]
    assert split_names(", ".join(names).replace("12, P", "12,P")) == names


CENTRES = np.random.default_rng(9).standard_normal((4, 10)) * 6
MIXES = np.random.default_rng(8).standard_normal((4, 10, 10)) * np.geomspace(3, 0.1, 10)[:, None]


def long_clusters(n, seed):
    """Four clusters, each long in directions of its own."""
    rng = np.random.default_rng(seed)
    c = rng.integers(0, 4, n)
    return (CENTRES[c] + np.einsum("nw,nwv->nv", rng.standard_normal((n, 10)), MIXES[c])).astype(
        np.float32
    )


def test_lopq_codes_and_scores_by_hand():
    bits = 12  # of 10 dimensions: padded
    x, base, queries = (
        scaled_rows(long_clusters(n, seed)) for seed, n in enumerate((1200, 200, 12))
    )
    method = LOPQ(bits).fit(x)
    codes = method.encode(base)
    assert (method.extra_bits, codes.shape) == (2, (200, (bits + 7) // 8 + 1))
    chosen, cells = unpack_codes(codes[:, :-1], method.M, 16), codes[:, -1]
    decoded = np.empty((200, 10))
    for i, (row, words, cell) in enumerate(zip(base, chosen, cells, strict=True)):
        distances = ((row - method.centroids) ** 2).sum(axis=1)
        assert distances[cell] == pytest.approx(distances.min(), rel=1e-4)
        rotation, codebooks = method.cells[cell][0], method.cells[cell][1].codebooks
        local = (rotation @ (row - method.centroids[cell])).reshape(method.M, 1, -1)
        to_words = ((local - codebooks) ** 2).sum(axis=2)
        selected = to_words[np.arange(method.M), words]
        np.testing.assert_allclose(selected, to_words.min(axis=1), rtol=1e-3, atol=1e-6)
        decoded[i] = (
            method.centroids[cell] + codebooks[np.arange(method.M), words].ravel() @ rotation
        )
    # Zero rows of the rotation carry codewords of 0: nothing is lost to the padding.
    expected = -((queries[:, None] - decoded) ** 2).sum(axis=2)
    np.testing.assert_allclose(method.score(queries, codes), expected, rtol=1e-3, atol=1e-4)
    assert ((base - decoded) ** 2).sum(axis=1).mean() < quantisation_error(OPQ(bits).fit(x), base)
    cells = method._cell_of(x)
    large = np.flatnonzero(np.bincount(cells, minlength=4) >= LEAST)
    assert len(large) >= 2
    for c in large:
        rotation = method.cells[c][0].astype(np.float64)
        np.testing.assert_allclose(rotation.T @ rotation, np.eye(10), atol=1e-5)
        covariance = np.cov(((x[cells == c] - method.centroids[c]) @ rotation.T).T)
        assert (
            np.abs(covariance - np.diag(np.diag(covariance))).max()
            < 1e-3 * np.abs(covariance).max()
        )


def test_eigenvalues_are_dealt_out_evenly():
    """Variances 64, 32, 16, 4, 2, 1 to two parts, by hand."""
    variances = np.array([4.0, 64.0, 1.0, 32.0, 2.0, 16.0])
    x = np.random.default_rng(0).standard_normal((4000, 6))
    x = np.linalg.qr(x - x.mean(axis=0))[0] * np.sqrt(4000 * variances)
    rotation = local_rotation(x.astype(np.float32), 2)
    got = [np.sort(np.round((x @ rotation[p].T).var(axis=0))) for p in (slice(0, 3), slice(3, 6))]
    # 64 | 32; 16 to the smaller product: 64 | 512; 4 -> 256 | 512; 2 -> 512 | 512, and the first is
    # full.
    assert sorted(piece.tolist() for piece in got) == [[1, 16, 32], [2, 4, 64]]


# Bits


@given(lengths=st.lists(st.floats(0.01, 10), min_size=1, max_size=6), count=st.integers(1, 20))
@settings(deadline=None, max_examples=80)
def test_modes_have_the_smallest_eigenvalues_of_all(lengths, count):
    modes = smallest_modes(np.array(lengths), count)
    assert modes.shape == (count, 2)
    assert len({tuple(m) for m in modes.tolist()}) == count
    # In logs: 1 - exp(-t) runs into 1 where t is large. A small ε keeps the order.
    chosen = [(k * np.pi / lengths[axis]) ** 2 for axis, k in modes.tolist()]
    assert chosen == sorted(chosen)
    stride = sorted((k * np.pi / length) ** 2 for length in lengths for k in range(1, count + 1))
    np.testing.assert_allclose(chosen, stride[:count], rtol=1e-9)


def test_no_single_bit_of_sdh_lowers_the_objective_further():
    rng = np.random.default_rng(0)
    W, Q = rng.standard_normal((6, 4)), rng.standard_normal((8, 6)) * 3
    start = np.where(rng.random((8, 6)) < 0.5, -1.0, 1.0)

    def objective(B):
        return float(((B @ W) ** 2).sum() - 2 * (B * Q).sum())

    B = discrete_codes(start, W, Q, sweeps=50)
    assert set(np.unique(B)) == {-1.0, 1.0}
    assert objective(B) < objective(start)
    for i, j in itertools.product(range(8), range(6)):
        second = B.copy()
        second[i, j] *= -1
        assert objective(second) >= objective(B) - 1e-9
    # A single sweep is the paper's update, bit by bit: z = sgn(q - B' W' w).
    single = start.copy()
    for j in range(6):
        remaining = [m for m in range(6) if m != j]
        single[:, j] = np.sign(Q[:, j] - single[:, remaining] @ W[remaining] @ W[j])
    np.testing.assert_array_equal(discrete_codes(start, W, Q, sweeps=1), single)
    np.testing.assert_array_equal(discrete_codes(B, 0 * W, 0 * Q), B)


# float and classifier


def test_classifiers():
    single, six = (quick(name, 12).fit(X, Y) for name in ("classifier", "classifier-6"))
    p = single.encode(XB).view(np.float32)
    np.testing.assert_allclose(p.sum(axis=1), 1, atol=1e-5)
    assert (p.argmax(axis=1) == YB.dense().argmax(axis=1)).mean() > 0.95
    np.testing.assert_allclose(single.score(XB[:9], single.encode(XB)), p[:9] @ p.T, atol=1e-6)
    # The first of six is the one that is trained alone, and the mean of all is none of them.
    with torch.inference_mode():
        entry = [
            net(six._normalise(torch.from_numpy(XB))).softmax(dim=1).numpy() for net in six._nets
        ]
    assert len(entry) == 6
    np.testing.assert_allclose(entry[0], p, atol=1e-5)
    np.testing.assert_allclose(six.encode(XB).view(np.float32), np.mean(entry, axis=0), atol=1e-5)
    pair = Y.dense(dtype=bool)
    pair[pair[:, 0], 1] = True  # class 0 always comes with class 1
    several = quick("classifier", 12, steps=150).fit(X, Labels.from_multihot(pair, "abc"))
    shared = several.encode(XB).view(np.float32)[YB.rows_with(0)].mean(axis=0)
    assert shared[:2] == pytest.approx([0.5, 0.5], abs=0.1)
