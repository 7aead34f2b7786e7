"""Lists made of codewords against brute force: any codes, tables, filters and sizes of lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpq_faiss.codes.bits import pack_codes, unpack_codes
from gpq_faiss.codes.scores import score_codes
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.faissio import storage
from gpq_faiss.indexes.codeword_lists import CodewordLists, grouped, tree_of

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
    typical=st.sampled_from([4, 100]),
    scan=st.booleans(),
)
@example(1, 12, 16, 2, 3000, 1.0, 10, "unlike", None, 4, False)
@example(2, 12, 16, 2, 3000, 1.0, 10, "zero", 0.5, 4, False)
@example(3, 6, 16, 1, 3000, 0.05, 200, "near ties", None, 4, False)
@example(4, 3, 8, 4, 3000, 1.0, 5, "one wide table", 0.99, 4, False)
@example(5, 12, 16, 2, 3000, 1.0, 5, "plain", None, 100, True)
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
    typical: int,
    scan: bool,
) -> None:
    rng = np.random.default_rng(seed)
    Z, codes, xq = make(rng, M, K, d, n, max(1, int(share * n)), case)
    mask = None if keep is None else rng.random(n) < keep
    rows = np.arange(n) if mask is None else np.flatnonzero(mask)
    k = min(k, n)
    scores = score_codes(xq, codes, Z)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "_TYPICAL", typical)
        index = CodewordLists(codes, Z)
        if scan:  # as where codes had no structure of late; some shortlists are too short
            index._seconds, index.searched, index._more = [1.0, 0.0], 1, {k: 0.0}
        D, found = index.search(xq, k, mask=mask)
        alone = [index.search(q[None], k, mask=mask) for q in xq]
        again = index.search(
            xq, k, mask=mask, floor=D[:, -1]
        )  # what does not reach these scores is not missed
        assert np.array_equal(again[0], D)
        assert np.array_equal(again[1], found)
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
            own, within = index.range_search(xq[q], least, len(reached), mask=mask)
            assert np.array_equal(within, reached)
            assert np.array_equal(own, scores[q, reached])
            if len(reached):
                with pytest.raises(DataError, match="more than"):
                    index.range_search(xq[q], least, len(reached) - 1, mask=mask)
            assert not len(index.range_search(xq[q], float("inf"), 0, mask=mask)[1])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    M=st.integers(2, 13),
    n=st.integers(1, 2000),
    depth=st.none() | st.integers(0, 2),
)
def test_a_tree_leads_to_every_row_once_by_its_columns(seed: int, M: int, n: int, depth: int | None) -> None:
    rng = np.random.default_rng(seed)
    codes = pack_codes(rng.integers(0, 16, (max(1, n // 3), M)) & rng.integers(0, 16, M), 16)
    codes = codes[rng.integers(0, len(codes), n)]
    order, starts = grouped(codes)
    rows = codes[order[starts]]
    assert np.array_equal(
        rows, np.unique(rows, axis=0)[np.lexsort(unpack_codes(np.unique(rows, axis=0), M, 16).T[::-1])]
    )
    for first, last in zip(starts.tolist(), [*starts[1:].tolist(), n], strict=True):
        assert (codes[order[first:last]] == codes[order[first]]).all()
        assert (np.diff(order[first:last]) > 0).all()
    keys = storage.first_words(rows, M, 1)
    begin = np.append(np.flatnonzero(np.append(True, keys[1:] != keys[:-1])), len(rows))
    if depth is not None:
        depth = min(depth, rows.shape[1] - 1)
    tree = tree_of(rows, begin, 0, depth)

    def rows_below(level: int, low: int, high: int, prefix: list[int]) -> list[int]:
        if level == tree.depth:
            assert (rows[low:high, :level] == prefix).all()
            return list(range(low, high))
        reached = []
        for node in range(low, high):
            children = tree.children[level][node : node + 2].tolist()
            reached += rows_below(level + 1, *children, [*prefix, int(tree.values[level][node])])
        return reached

    for number in range(len(begin) - 1):
        reached = rows_below(0, int(tree.ends[number]), int(tree.ends[number + 1]), [])
        assert reached == list(range(begin[number], begin[number + 1]))


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
    assert 0 < index.scored < 0.1 * 3 * index.distinct


def test_codes_without_structure_are_scanned_as_a_whole_and_as_exactly() -> None:
    rng = np.random.default_rng(3)
    for K in (16, 8):
        Z, _, _ = make(rng, 12, K, 4, 10, 10, "plain")
        codes = pack_codes(rng.integers(0, K, (60_000, 12)), K)
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


def test_a_floor_of_another_length_is_an_error() -> None:
    rng = np.random.default_rng(4)
    Z, codes, xq = make(rng, 4, 16, 2, 100, 100, "plain")
    index = CodewordLists(codes, Z)
    for floor in (np.zeros(2, np.float32), np.zeros((3, 1), np.float32), np.float32(0)):
        with pytest.raises(UsageError, match="one score for each of the 3 queries"):
            index.search(xq, 1, floor=floor)
