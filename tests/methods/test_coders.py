"""Coders: no other code is nearer, scores are those of a naive loop, and Faiss ranks as the scores
do."""

import itertools

import numpy as np
import pytest
from array_data import assert_faiss_ranks_alike, reconstruct
from hypothesis import assume, given
from hypothesis import strategies as st

from gpq_faiss.codes.bits import unpack_codes
from gpq_faiss.methods.coders import ProductCoder
from gpq_faiss.methods.dtq import AdditiveCoder, iterated_conditional_modes, update_codebooks

MAKERS = {"ip": ProductCoder, "l2": lambda Z: ProductCoder(Z, "l2"), "sums": AdditiveCoder}


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@given(
    kind=st.sampled_from(list(MAKERS)),
    M=st.integers(1, 5),
    bits=st.integers(2, 8),
    d=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_codes_are_locally_optimal_and_scores_are_of_the_sums(kind, M, bits, d, seed):
    assume((bits, d) != (2, 2))  # Faiss has no search table for 4 codewords of 2 dimensions
    K, parts = 2**bits, 1 if kind == "sums" else M
    Z, x, xq = normal(seed, M, K, d), normal(seed + 1, 9, parts, d), normal(seed + 2, 4, parts, d)
    if kind == "ip":
        Z, x, xq = (
            np.asarray(a / np.linalg.norm(a, axis=-1, keepdims=True), np.float32)
            for a in (Z, x, xq)
        )
    coder, C = MAKERS[kind](Z), Z
    if kind != "sums":  # product codes are sums too: of codewords that are zero but for their part
        C = np.zeros((M, K, M, d), np.float32)
        C[np.arange(M), :, np.arange(M)] = Z
    C, x, xq = C.reshape(M, K, -1).astype(float), x.reshape(9, -1), xq.reshape(4, -1)
    assert (coder.bits, coder.code_size, coder.width) == (M * bits, -(-M * bits // 8), parts * d)
    codes = coder.encode(x)
    assert codes.shape == (9, coder.code_size)
    assert coder.encode(x[:0]).shape == (0, coder.code_size)
    chosen = unpack_codes(codes, M, K)
    sums = C[np.arange(M), chosen].sum(axis=1)
    error = ((x - sums) ** 2).sum(axis=1)
    for m in range(M):
        remaining = x - sums + C[m, chosen[:, m]]
        least = ((remaining[:, None] - C[m]) ** 2).sum(axis=2).min(axis=1)
        assert (error <= least + (1e-4 if kind == "sums" else 1e-5)).all()
    naive = -((xq[:, None] - sums) ** 2).sum(axis=2) if kind == "l2" else xq @ sums.T
    np.testing.assert_allclose(coder.score(xq, codes), naive, rtol=1e-4, atol=1e-4)
    assert_faiss_ranks_alike(coder, xq, x)


def squared_error(x, codes, C):
    return float(np.square(x.astype(float) - reconstruct(codes, C)).sum(axis=1).mean())


@pytest.mark.parametrize("weight", [1e-3, 1e-1])
def test_updating_the_codebooks_lowers_their_objective(weight):
    C, x = normal(0, 4, 16, 10), normal(1, 400, 10) * 2
    codes = iterated_conditional_modes(x, C)

    def objective(C):
        pairs = itertools.permutations(C.astype(float), 2)
        return squared_error(x, codes, C) + weight * sum(
            float(((a @ b.T) ** 2).sum()) for a, b in pairs
        )

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
