"""Coders: codes against a naive loop, scores against sums over codewords, and a Faiss index that ranks as the scores do."""

from __future__ import annotations

import itertools
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpq_faiss.codes.bits import unpack_codes
from gpq_faiss.errors import DataError
from gpq_faiss.methods.coders import Coder, ProductCoder, SignCoder
from gpq_faiss.methods.dtq import AdditiveCoder, iterated_conditional_modes, reconstruct, update_codebooks

Floats = NDArray[np.float32]


def normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def unit(x: Floats) -> Floats:
    return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True), np.float32)


def assert_ranks_alike(coder: Coder, xq: Floats, codes: NDArray[np.uint8]) -> None:
    """The index finds every item, with the distance that the score is."""
    index = coder.index()
    (index.add if isinstance(index, faiss.IndexBinary) else index.add_sa_codes)(codes)
    assert index.ntotal == len(codes)
    distances, ids = index.search(coder.search_input(xq), len(codes))
    assert np.array_equal(np.sort(ids, axis=1), np.tile(np.arange(len(codes)), (len(xq), 1)))
    sign = 1 if index.metric_type == faiss.METRIC_INNER_PRODUCT else -1
    scores = np.take_along_axis(coder.score(xq, codes), ids, axis=1)
    np.testing.assert_allclose(scores, sign * distances.astype(np.float32), rtol=1e-5, atol=2e-5)


@given(
    M=st.integers(1, 5),
    bits=st.integers(2, 8),
    d=st.integers(1, 6),
    metric=st.sampled_from(["ip", "l2"]),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=30)
def test_product_codes_are_the_nearest_codewords_and_scores_their_sums(
    M: int, bits: int, d: int, metric: Any, seed: int
) -> None:
    assume((bits, d) != (2, 2))  # Faiss has no search table for 4 codewords of 2 dimensions
    K = 2**bits
    Z, x, xq = normal(seed, M, K, d), normal(seed + 1, 9, M, d), normal(seed + 2, 4, M, d)
    if metric == "ip":
        Z, x, xq = unit(Z), unit(x), unit(xq)
    coder = ProductCoder(Z, metric)
    assert (coder.bits, coder.code_size, coder.width) == (M * bits, -(-M * bits // 8), M * d)
    codes = coder.encode(x.reshape(9, -1))
    assert codes.shape == (9, coder.code_size)
    assert coder.encode(x[:0].reshape(0, M * d)).shape == (0, coder.code_size)
    chosen = unpack_codes(codes, M, K)
    distance = ((x[:, :, None].astype(float) - Z) ** 2).sum(axis=3)
    taken = np.take_along_axis(distance, chosen[:, :, None].astype(int), axis=2)
    assert (taken[:, :, 0] <= distance.min(axis=2) + 1e-5).all()
    scores = coder.score(xq.reshape(4, -1), codes)
    for q, n in itertools.product(range(4), range(9)):
        words = Z[np.arange(M), chosen[n]].astype(float)
        naive = (xq[q] * words).sum() if metric == "ip" else -((xq[q] - words) ** 2).sum()
        assert scores[q, n] == pytest.approx(naive, rel=1e-4, abs=1e-4)
    assert_ranks_alike(coder, xq.reshape(4, -1), codes)


def test_four_bit_codes_have_the_low_nibble_first_and_an_odd_last_one_empty() -> None:
    Z = np.broadcast_to(np.eye(16, dtype=np.float32), (3, 16, 16))
    x = np.concatenate([Z[0, [5]], Z[0, [12]], Z[0, [7]]], axis=1)
    assert ProductCoder(Z).encode(x).tolist() == [[5 | 12 << 4, 7]]


@pytest.mark.parametrize("shape", [(3, 16), (3, 12, 4), (3, 2, 4), (3, 512, 4)])
def test_codebooks_of_another_form_are_refused(shape: tuple[int, ...]) -> None:
    for make in (ProductCoder, lambda Z: ProductCoder(Z, "l2"), AdditiveCoder):
        with pytest.raises(DataError):
            make(np.zeros(shape, np.float32))
        Z = normal(0, 2, 16, 4)
        Z[1, 3, 2] = np.nan
        with pytest.raises(DataError):
            make(Z)
    with pytest.raises(DataError, match="norm"):
        ProductCoder(normal(0, 2, 16, 4))


@given(bits=st.integers(1, 40), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=25)
def test_sign_codes_are_signs_and_scores_hamming_distances(bits: int, seed: int) -> None:
    x, xq = normal(seed, 12, bits), normal(seed + 1, 5, bits)
    coder = SignCoder(bits)
    codes = coder.encode(x)
    assert codes.shape == (12, -(-bits // 8))
    for n, b in itertools.product(range(12), range(8 * coder.code_size)):
        assert codes[n, b // 8] >> b % 8 & 1 == (b < bits and x[n, b] > 0)
    naive = [[-float(((q > 0) != (row > 0)).sum()) for row in x] for q in xq]
    np.testing.assert_array_equal(coder.score(xq, codes), naive)
    assert_ranks_alike(coder, xq, codes)


# ------------------------------------------------------------------------------------------------------ additive codes


def squared_error(x: Floats, codes: NDArray[np.uint8], C: Floats) -> float:
    return float(np.square(x.astype(float) - reconstruct(codes, C)).sum(axis=1).mean())


@given(M=st.integers(1, 4), K=st.sampled_from([4, 16]), D=st.integers(1, 8), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=25)
def test_no_change_of_one_codeword_betters_an_additive_code(M: int, K: int, D: int, seed: int) -> None:
    assume((K, D) != (4, 2))  # see above
    C, x = normal(seed, M, K, D), normal(seed + 1, 10, D) * 2
    coder = AdditiveCoder(C)
    codes = coder.encode(x)
    chosen = unpack_codes(codes, M, K)
    for n, m, k in itertools.product(range(10), range(M), range(K)):
        other = chosen[n].copy()
        other[m] = k
        assert squared_error(x[n : n + 1], chosen[n : n + 1], C) <= (
            squared_error(x[n : n + 1], other[None], C) + 1e-4
        )
    xq = normal(seed + 2, 4, D)
    sums = np.stack([sum(C[m, chosen[n, m]] for m in range(M)) for n in range(10)])
    np.testing.assert_allclose(coder.score(xq, codes), xq @ sums.T, rtol=1e-4, atol=1e-4)
    assert_ranks_alike(coder, xq, codes)


def test_more_sweeps_never_worsen_an_additive_code() -> None:
    C, x = normal(0, 6, 16, 20), normal(1, 300, 20) * 3
    errors = [squared_error(x, iterated_conditional_modes(x, C, sweeps), C) for sweeps in range(6)]
    assert all(later <= earlier + 1e-4 for earlier, later in itertools.pairwise(errors))
    assert errors[-1] < 0.97 * errors[0]


def cross_products(C: Floats) -> float:
    """Σ over codebooks m ≠ m' of the squared inner products of their codewords, by a loop."""
    pairs = itertools.permutations(C.astype(float), 2)
    return sum(float(np.square(one @ two.T).sum()) for one, two in pairs)


@pytest.mark.parametrize("weight", [1e-3, 1e-1])
def test_updating_the_codebooks_lowers_their_objective(weight: float) -> None:
    C, x = normal(0, 4, 16, 10), normal(1, 400, 10) * 2
    codes = iterated_conditional_modes(x, C)

    def objective(C: Floats) -> float:
        return squared_error(x, codes, C) + weight * cross_products(C)

    values = [objective(C)]
    for _ in range(3):
        C = update_codebooks(x, codes, C, weight, rounds=1)
        values.append(objective(C))
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(values))
    assert values[-1] < 0.9 * values[0]
    # The last codebook is a minimum of the objective: no direction leads down.
    rng = np.random.default_rng(0)
    for scale in (1e-2, -1e-2):
        moved = C.copy()
        moved[-1] += scale * rng.standard_normal(C[-1].shape).astype(np.float32)
        assert objective(moved) > objective(C)
