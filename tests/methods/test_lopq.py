"""Locally optimised product quantisation: local rotations, eigenvalue allocation, and an index that ranks as the score."""

from __future__ import annotations

import faiss
import numpy as np
import pytest
from array_methods import QUERIES, digits, digits_map
from numpy.typing import NDArray

from gpq_faiss.errors import DataError, MismatchError, UsageError
from gpq_faiss.methods.lopq import LEAST, LOPQ, local_rotation
from gpq_faiss.methods.opq import OPQ

WIDTH = 10
CENTRES = np.random.default_rng(9).standard_normal((4, WIDTH)) * 6
MIXES = np.random.default_rng(8).standard_normal((4, WIDTH, WIDTH)) * np.geomspace(3, 0.1, WIDTH)[:, None]


def vectors(n: int, seed: int) -> NDArray[np.float32]:
    """Four clusters, each long in directions of its own."""
    rng = np.random.default_rng(seed)
    c = rng.integers(0, 4, n)
    return (CENTRES[c] + np.einsum("nw,nwv->nv", rng.standard_normal((n, WIDTH)), MIXES[c])).astype(
        np.float32
    )


X, XB, XQ = vectors(1200, 0), vectors(200, 1), vectors(12, 2)


@pytest.fixture(scope="module", params=[(12, True), (8, False), (16, True)], ids=["12", "8-raw", "16"])
def method(request: pytest.FixtureRequest) -> LOPQ:
    bits, normalize = request.param
    return LOPQ(bits, cells=4, normalize=normalize).fit(X)


def scaled(method: LOPQ, x: NDArray[np.float32]) -> NDArray[np.float32]:
    return x / np.linalg.norm(x, axis=1, keepdims=True) if method.normalize else x


def test_the_code_is_that_of_the_nearest_cell_by_hand(method: LOPQ) -> None:
    codes = method.encode(XB)
    assert method.extra_bits == 2
    assert codes.shape == (200, (method.bits + 7) // 8 + 1)
    for x, code, cell in zip(scaled(method, XB), codes, method.cell_of(codes), strict=True):
        distances = ((x - method.centroids) ** 2).sum(axis=1)
        assert distances[cell] == pytest.approx(distances.min(), rel=1e-4)
        local = (method.rotations[cell] @ (x - method.centroids[cell])).reshape(method.M, 1, -1)
        to_words = ((local - method.codebooks[cell]) ** 2).sum(axis=2)
        for m in range(method.M):
            word = code[m // 2] >> (4 * (m % 2)) & 15
            assert to_words[m, word] == pytest.approx(to_words[m].min(), rel=1e-3, abs=1e-6)


def test_the_score_is_the_distance_to_the_reconstruction(method: LOPQ) -> None:
    codes = method.encode(XB)
    decoded = method.decode(codes).astype(np.float64)
    # Zero rows of the rotation carry codewords of 0: nothing is lost to the padding.
    expected = -((scaled(method, XQ)[:, None] - decoded) ** 2).sum(axis=2)
    np.testing.assert_allclose(method.score(XQ, codes), expected, rtol=1e-3, atol=1e-4)
    error = ((scaled(method, XB) - decoded) ** 2).sum(axis=1).mean()
    assert method.quantisation_error(XB) == pytest.approx(error, rel=1e-4)


def test_the_index_ranks_as_the_score(method: LOPQ) -> None:
    index = method.index()
    assert isinstance(index, faiss.IndexShards)
    assert index.is_trained
    assert index.ntotal == 0
    index.add(method.search_input(XB[:70]))
    index.add(method.search_input(XB[70:]))
    assert index.ntotal == len(XB)
    distances, ids = index.search(method.search_input(XQ), len(XB))
    assert (np.sort(ids, axis=1) == np.arange(len(XB))).all()
    scores = method.score(XQ, method.encode(XB))
    scale = np.abs(scores).max()
    np.testing.assert_allclose(np.take_along_axis(scores, ids, axis=1) / scale, -distances / scale, atol=2e-6)
    few, of_few = index.search(method.search_input(XQ), 5)
    np.testing.assert_array_equal(of_few, ids[:, :5])
    np.testing.assert_array_equal(few, distances[:, :5])


def test_equal_codes_have_bit_equal_scores_and_codes_repeat(method: LOPQ) -> None:
    codes = method.encode(XB)
    rows = np.random.default_rng(0).integers(0, len(codes), 300)
    alone = method.score(XQ, codes)
    np.testing.assert_array_equal(method.score(XQ, codes[rows]), alone[:, rows])
    assert method.score(XQ, codes[:0]).shape == (len(XQ), 0)
    again = LOPQ(method.bits, cells=4, normalize=method.normalize).fit(X)
    np.testing.assert_array_equal(again.encode(XB), codes)
    assert (LOPQ(method.bits, cells=4, seed=7).fit(X).encode(XB) != codes).any()


def test_rotations_are_the_principal_axes_of_their_cell(method: LOPQ) -> None:
    cell = method._cell_of(scaled(method, X))
    large = np.flatnonzero(np.bincount(cell, minlength=4) >= LEAST)
    assert len(large) >= 2
    for c in large:
        rotation = method.rotations[c].astype(np.float64)
        np.testing.assert_allclose(rotation.T @ rotation, np.eye(WIDTH), atol=1e-5)
        local = (scaled(method, X)[cell == c] - method.centroids[c]) @ rotation.T
        covariance = np.cov(local.T)
        off = covariance - np.diag(np.diag(covariance))
        assert np.abs(off).max() < 1e-3 * np.abs(covariance).max()


def test_eigenvalues_are_dealt_out_evenly() -> None:
    """Variances 64, 32, 16, 4, 2, 1 to two parts, by hand."""
    variances = np.array([4.0, 64.0, 1.0, 32.0, 2.0, 16.0])
    x = np.random.default_rng(0).standard_normal((4000, 6))
    x = np.linalg.qr(x - x.mean(axis=0))[0] * np.sqrt(4000 * variances)
    rotation = local_rotation(x.astype(np.float32), 2, 6)
    got = [np.sort(np.round((x @ rotation[p].T).var(axis=0))) for p in (slice(0, 3), slice(3, 6))]
    # 64 | 32; 16 to the smaller product: 64 | 512; 4 -> 256 | 512; 2 -> 512 | 512, and the first is full.
    assert sorted(part.tolist() for part in got) == [[1, 16, 32], [2, 4, 64]]
    # Small variances are no reason to fill one part alone: in units of 1e-6 it is the same.
    tiny = local_rotation((x * 1e-3).astype(np.float32), 2, 6)
    np.testing.assert_allclose(np.abs(tiny), np.abs(rotation), atol=1e-3)


def test_local_rotations_lower_the_error_below_a_global_one() -> None:
    local = LOPQ(8, cells=4, normalize=False).fit(X).quantisation_error(XB)
    one = LOPQ(8, cells=1, normalize=False).fit(X).quantisation_error(XB)
    opq = OPQ(8, normalize=False).fit(X).quantisation_error(XB)
    assert local < 0.7 * min(one, opq)


def test_small_cells_take_the_codebooks_of_all_residuals() -> None:
    x = np.concatenate([X, CENTRES[:1].astype(np.float32) + 40 + 0.1 * X[:20]])
    method = LOPQ(8, cells=4, normalize=False).fit(x)
    cell = method._cell_of(x)
    counts = np.bincount(cell, minlength=4)
    small = np.flatnonzero(counts < LEAST)
    assert len(small)
    common = local_rotation(x - method.centroids[cell], method.M, method.rotations.shape[1])
    for c in small:
        np.testing.assert_allclose(np.abs(method.rotations[c]), np.abs(common), atol=1e-4)


def test_many_cells_need_two_bytes() -> None:
    x = np.random.default_rng(0).standard_normal((260 * 256, 2)).astype(np.float32)
    method = LOPQ(4, cells=300, iterations=1).fit(x)
    assert method.extra_bits == 9
    codes = method.encode(x[:500])
    assert codes.shape == (500, 3)
    np.testing.assert_array_equal(method.cell_of(codes), method._cell_of(scaled(method, x[:500])))
    foreign = codes.copy()
    foreign[0, 1:] = 255
    with pytest.raises(DataError, match="cell 65535"):
        method.score(x[:2], foreign)


def test_refuses_what_cannot_be() -> None:
    with pytest.raises(UsageError, match="multiple of 4"):
        LOPQ(13)
    for bad in ({"cells": 0}, {"cells": 65_537}, {"iterations": 0}):
        with pytest.raises(UsageError, match="use 1 to 65,536 cells"):
            LOPQ(12, **bad)
    with pytest.raises(DataError, match="at least 16"):
        LOPQ(12).fit(X[:15])
    with pytest.raises(UsageError, match="width 2"):
        LOPQ(12).fit(X[:, :2])
    with pytest.raises(UsageError, match="fit first"):
        LOPQ(12).index()
    method = LOPQ(12).fit(X[:40])
    assert method.extra_bits == 0
    with pytest.raises(MismatchError, match="codes of"):
        method.score(XQ, np.zeros((3, 2), np.uint8))
    assert method.encode(XB[:0]).shape == (0, 3)
    assert method.encode(np.zeros((1, WIDTH), np.float32)).shape == (1, 3)


def test_works_on_digits() -> None:
    method = LOPQ(24).fit(digits()[0][QUERIES:])
    assert len(method.centroids) == 6
    assert digits_map(method) > 0.6
