"""Lists made of codewords against brute force: any codes, tables, filters and sizes of lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpq_faiss.codes.bits import pack_codes, unpack_codes
from gpq_faiss.codes.scores import score_codes
from gpq_faiss.errors import DataError
from gpq_faiss.indexes import codeword_lists
from gpq_faiss.indexes.codeword_lists import CodewordLists

CASES = ["plain", "equal tables", "one wide table", "unlike", "near ties", "zeros", "zero", "huge", "tiny"]


def make(rng: np.random.Generator, M: int, K: int, d: int, n: int, distinct: int, case: str):
    """Codebooks, codes (some frequent, most rare) and three queries."""
    Z = rng.normal(size=(M, K, d))
    Z = (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)
    xq = rng.normal(size=(3, M * d)).astype(np.float32)
    if case == "equal tables":
        Z[:] = Z[0]
        xq = np.ascontiguousarray(np.tile(xq[:, :d], M))
    elif case == "one wide table":
        xq[:, :d] *= 1e4
    elif case == "unlike":  # as codes of class and features are
        xq *= np.repeat(10.0 ** -np.arange(M), d).astype(np.float32)
    elif case == "near ties":
        Z[:, K // 2 :] = np.nextafter(Z[:, : K // 2], np.float32(2))
    elif case == "zeros":
        xq[:, ::2] = -0.0
    else:
        xq *= {"plain": 1, "zero": 0.0, "huge": 1e18, "tiny": 1e-42}[case]
    few = rng.integers(0, K, (distinct, M))
    rows = np.minimum((rng.pareto(1, n) * distinct / 4).astype(int), distinct - 1)
    return Z, pack_codes(few[rows], K), xq


def best(scores: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort((rows, -scores[rows]))]


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    M=st.sampled_from([1, 2, 3, 5, 6, 12, 17]),
    K=st.sampled_from([4, 8, 16, 16, 16, 32, 256]),
    d=st.integers(1, 5),
    n=st.integers(1, 3000),
    share=st.floats(0.01, 1),
    k=st.integers(1, 200),
    case=st.sampled_from(CASES),
    keep=st.sampled_from([None, 0.0, 0.01, 0.5, 0.99]),
    small=st.booleans(),
    cap=st.sampled_from([8, 64, 4096]),
    typical=st.sampled_from([4, 100]),
)
@example(1, 12, 16, 2, 3000, 1.0, 10, "unlike", None, False, 64, 4)
@example(2, 12, 16, 2, 3000, 1.0, 10, "zero", 0.5, False, 64, 4)
@example(3, 6, 16, 1, 3000, 0.05, 200, "near ties", None, False, 8, 4)
@example(4, 3, 8, 4, 3000, 1.0, 5, "one wide table", 0.99, False, 8, 4)
def test_search_and_range_search_are_brute_force(
    seed: int,
    M: int,
    K: int,
    d: int,
    n: int,
    share: float,
    k: int,
    case: str,
    keep: float | None,
    small: bool,
    cap: int,
    typical: int,
) -> None:
    rng = np.random.default_rng(seed)
    Z, codes, xq = make(rng, M, K, d, n, max(1, int(share * n)), case)
    mask = None if keep is None else rng.random(n) < keep
    rows = np.arange(n) if mask is None else np.flatnonzero(mask)
    k = min(k, n)
    scores = score_codes(xq, codes, Z)
    with pytest.MonkeyPatch.context() as patch:
        # also where all would be scored, and lists of a few codes
        if not small:
            patch.setattr(codeword_lists, "SMALL", 0)
        patch.setattr(codeword_lists, "CAP", cap)
        patch.setattr(codeword_lists, "_TYPICAL", typical)
        patch.setattr(codeword_lists, "_SAMPLE", 16)
        patch.setattr(codeword_lists, "_REFINE", 256)
        patch.setattr(codeword_lists, "_FIRST", 64)
        index = CodewordLists(codes, Z)
        allowed = None if mask is None else index.allowed(mask)
        D, found = index.search(xq, k, allowed=allowed)
        alone = [index.search(q[None], k, allowed=allowed) for q in xq]
        for q in range(len(xq)):
            expected = best(scores[q], rows)
            top = expected[:k]
            assert np.array_equal(found[q, : len(top)], top)
            assert np.array_equal(D[q, : len(top)], scores[q, top])
            assert (found[q, len(top) :] == -1).all()
            assert np.isneginf(D[q, len(top) :]).all()
            assert np.array_equal(alone[q][1][0], found[q])
            assert np.array_equal(alone[q][0][0], D[q])
            least = float(scores[q, rng.integers(n)])
            reached = expected[scores[q, expected] >= least]
            own, within = index.range_search(xq[q], least, len(reached), allowed=allowed)
            assert np.array_equal(within, reached)
            assert np.array_equal(own, scores[q, reached])
            if len(reached):
                with pytest.raises(DataError, match="more than"):
                    index.range_search(xq[q], least, len(reached) - 1, allowed=allowed)
            assert not len(index.range_search(xq[q], float("inf"), 0, allowed=allowed)[1])


def test_lists_hold_all_codes_once_and_share_their_first_codewords(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    Z, codes, _ = make(rng, 12, 16, 2, 60_000, 60_000, "plain")
    monkeypatch.setattr(codeword_lists, "CAP", 20)
    index = CodewordLists(codes, Z)
    assert index.distinct == len(np.unique(codes, axis=0))
    assert index.lists > 256
    assert index._begin[0] == 0
    assert index._begin[-1] == index.distinct
    sizes = np.diff(index._begin)
    assert (sizes > 0).all()
    indices = unpack_codes(index.codes, 12, 16)
    for first, stop in zip(index._begin[:-1].tolist(), index._begin[1:].tolist(), strict=True):
        assert (indices[first:stop, : index.P] == indices[first, : index.P]).all()
    assert np.array_equal(
        index.codes[np.repeat(np.arange(index.distinct), np.diff(index._starts))], codes[index._members]
    )


def test_only_few_codes_are_visited_where_the_first_codebooks_decide() -> None:
    """Codes of a class model: 4 codebooks decide, and the items of a class are alike in them."""
    rng = np.random.default_rng(1)
    classes = rng.integers(0, 16, (10, 4))
    indices = np.concatenate(
        [classes[rng.integers(0, 10, 100_000)], rng.integers(0, 16, (100_000, 8))], axis=1
    )
    changed = rng.random(indices.shape) < 0.05
    indices[changed] = rng.integers(0, 16, int(changed.sum()))
    Z, _, xq = make(rng, 12, 16, 3, 1, 1, "plain")
    xq *= np.repeat([0.8, 0.5, 0.3, 0.2, *[0.02] * 8], 3).astype(np.float32)
    index = CodewordLists(pack_codes(indices, 16), Z)
    index.search(xq, 10)
    assert index.searched == 3
    assert index.visited < 0.2 * 3 * index.distinct


def test_codes_without_structure_are_scanned_as_a_whole_and_as_exactly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(3)
    monkeypatch.setattr(codeword_lists, "SMALL", 0)
    for K in (16, 8):
        Z, _, _ = make(rng, 12, K, 4, 10, 10, "plain")
        codes = pack_codes(rng.integers(0, K, (20_000, 12)), K)
        xq = rng.normal(size=(80, 48)).astype(np.float32)
        xq[60:70] = 0  # all tie: a scan proves nothing
        xq[70:, :4] *= 1e4
        index = CodewordLists(codes, Z)
        D, found = index.search(xq, 10, threads=1)
        assert index._whole is not None
        scores = score_codes(xq, codes, Z)
        for q in range(len(xq)):
            top = best(scores[q], np.arange(len(codes)))[:10]
            assert np.array_equal(found[q], top)
            assert np.array_equal(D[q], scores[q, top])
