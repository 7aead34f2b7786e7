"""The index equals brute force, however it was made and whatever has changed since."""

import math
import tempfile
from pathlib import Path
from typing import NamedTuple

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_factory import (
    SHAPES,
    books,
    make_rows,
    padded_best,
    queries,
    random_codes,
    random_ids,
    same,
    within,
)

from gpq_faiss import Index, open_index
from gpq_faiss.codes.encode import decode
from gpq_faiss.errors import DataError, MismatchError, UsageError
from gpq_faiss.faissio.files import write_index
from gpq_faiss.indexes.list_file import write_lists
from gpq_faiss.store.changes import Change


class Items(NamedTuple):
    """Codes, codebooks and ids of items, and queries."""

    codes: np.ndarray
    Z: np.ndarray
    ids: np.ndarray
    xq: np.ndarray

    @property
    def by_id(self):
        return dict(zip(self.ids.tolist(), self.codes, strict=True))


@st.composite
def items(draw, smallest=1, largest=300):
    """Many equal codes, so that ties decide, or none."""
    (M, K), n, seed = draw(SHAPES), draw(st.integers(smallest, largest)), draw(st.integers(0, 99))
    codes = random_codes(n, M, K, seed, draw(st.sampled_from([None, 1, 8, 60])))
    ids = np.arange(n) if draw(st.booleans()) else random_ids(n, seed)
    return Items(codes, books(M, K, 4, seed), ids, queries(3, M * 4, seed))


def by_parts(case):
    """Half of the items, then the others as a change."""
    half = (len(case.ids) + 1) // 2
    index = Index.build(case.codes[:half], case.Z, case.ids[:half])
    return index.apply(changes_of(case.ids[half:], case.codes[half:]))


def changes_of(ids, codes):
    numbers = np.asarray(ids).tolist()
    return {i: Change(1, bytes(code), None, None) for i, code in zip(numbers, codes, strict=True)}


def in_lists(folder, case):
    write_lists(folder / "x.lists", [Index.build(case.codes, case.Z, case.ids)], case.Z)
    return open_index(folder / "x.lists")


def in_faiss(folder, case):
    index = Index.build(case.codes, case.Z, case.ids)
    return open_index(write_index(index.to_faiss(), folder / "x.faiss"))


def merged(_, case):
    half = (len(case.ids) + 1) // 2
    index = Index.build(case.codes[:half], case.Z, case.ids[:half])
    if half == len(case.ids):
        return index
    return index.merge(Index.build(case.codes[half:], case.Z, case.ids[half:]))


def without_some(_, case):
    """Built with more items than there are in the end."""
    extra = np.setdiff1d(np.arange(900, 900 + len(case.ids)), case.ids)
    codes = np.concatenate([case.codes, case.codes[: len(extra)]])
    return Index.build(codes, case.Z, np.concatenate([case.ids, extra])).remove_ids(extra)


WAYS = {
    "built": lambda _, case: Index.build(case.codes, case.Z, case.ids),
    "Faiss object": lambda _, case: open_index(
        Index.build(case.codes, case.Z, case.ids).to_faiss()
    ),
    "index.faiss": in_faiss,
    "index.lists": in_lists,
    "codes.h5": lambda folder, case: open_index(
        make_rows(folder / "codes.h5", case.codes, case.ids, case.Z)
    ),
    "changed": lambda _, case: by_parts(case),
    "merged": merged,
    "removed": without_some,
}


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=30)
@given(case=items(), share=st.floats(0, 1), k_share=st.floats(0, 1), deny=st.booleans())
def test_index_equals_brute_force(way, case, share, k_share, deny):
    n = len(case.ids)
    k = max(1, int(k_share * n))
    with tempfile.TemporaryDirectory() as folder, WAYS[way](Path(folder), case) as index:
        assert (index.ntotal, index.d) == (n, case.xq.shape[1])
        assert same(index.search(case.xq, k), padded_best(case.xq, case.codes, case.Z, k, case.ids))
        mask = np.random.default_rng(n).random(n) < share
        listed = [*case.ids[~mask if deny else mask].tolist(), 10**12]
        options = {"deny" if deny else "allow": listed}
        passing = case.codes[mask], case.Z, case.ids[mask]
        expected = padded_best(case.xq, *passing[:2], k, passing[2])
        assert same(index.search(case.xq, k, threads=2, **options), expected)
        min_score = float(np.median(index.search(case.xq, n)[0]))
        expected = within(case.xq, *passing[:2], min_score, passing[2])
        assert same(index.range_search(case.xq, min_score, **options), expected)


@settings(max_examples=40)
@given(
    case=items(10, 120),
    steps=st.lists(st.lists(st.integers(0, 130), max_size=20, unique=True), max_size=6),
    seed=st.integers(0, 9),
)
def test_changes_equal_a_new_index(case, steps, seed):
    index, by_id, rng = (
        Index.build(case.codes, case.Z, case.ids),
        case.by_id,
        np.random.default_rng(seed),
    )
    for changed in steps:
        changes = {}
        for number in changed:
            code = case.codes[rng.integers(len(case.codes))] if rng.random() < 0.6 else None
            changes[number] = Change(1, None if code is None else bytes(code), None, None)
            by_id.pop(number, None)
            by_id |= {} if code is None else {number: code}
        index = index.apply(changes)
    if not by_id:
        assert index.ntotal == 0
        return
    ids, codes = np.array([*by_id], np.int64), np.array([*by_id.values()])
    k = len(ids)
    assert index.ntotal == k
    assert same(index.search(case.xq, k), padded_best(case.xq, codes, case.Z, k, ids))
    assert same(index.items_by_id(), (codes[np.argsort(ids)], np.sort(ids)))
    assert index.ids.tolist() == sorted(by_id)
    for number in by_id:
        assert np.array_equal(index.reconstruct(number), decode(by_id[number][None], case.Z)[0])
    assert index.code_of(10**12) is None
    assert len(index.segments) < 9


def test_indexes_share_nothing_that_changes():
    codes, ids, xq = random_codes(50, 4), np.arange(50), queries(2, 16)
    index = Index.build(codes, books(4), ids)
    before = index.search(xq, 50)
    assert len(index.remove_ids(ids).ids) == 0
    index.apply(changes_of(ids[:10], codes[10:20]))
    codes[:], ids[:] = 0, 7
    assert same(index.search(xq, 50), before)


# L2 -----------------------------------------------------------------------------------------------


def l2_index(bits, n=400, M=4, d=16, centre=0):
    index = faiss.IndexPQ(d, M, bits)
    index.train(queries(600, d, seed=5) + centre)
    index.add(queries(n, d, seed=6) + centre)
    return index


@pytest.mark.parametrize("bits", [4, 5, 6, 7, 8])
@pytest.mark.parametrize("centre", [0, 1000])
def test_l2_equals_brute_force_and_faiss(bits, centre):
    plain, xq = l2_index(bits, centre=centre), queries(5, 16) + np.float32(centre)
    index = open_index(plain)
    decoded = plain.reconstruct_n(0, plain.ntotal)
    exact = np.square(xq[:, None].astype(np.float64) - decoded[None]).sum(axis=2)
    D, ids = index.search(xq, 400)
    assert np.allclose(np.take_along_axis(exact, ids, axis=1), D, atol=1e-4)
    assert np.allclose(plain.search(xq, 400)[0], D, atol=1e-4)
    lims, distances, range_ids = index.range_search(xq, 20.0)
    assert np.array_equal(np.diff(lims), (D <= 20.0).sum(axis=1))
    assert same((distances, range_ids), (D[D <= 20.0], ids[D <= 20.0]))


# Arguments ----------------------------------------------------------------------------------------

CODES, Z, XQ = random_codes(300, 6), books(6), queries(20, 24)
INDEX = Index.build(CODES, Z)
NAN = np.where(np.arange(20)[:, None] == 3, np.float32(np.nan), XQ)


@pytest.mark.parametrize("k", [0, -1, 301, True, 2.0, "3", None])
def test_unfit_k_is_refused(k):
    with pytest.raises(UsageError, match=r"an index of 300 items: k = .*from 1 to 300"):
        INDEX.search(XQ, k)


@pytest.mark.parametrize(
    ("xq", "message"),
    [
        (XQ[:0], "at least one row"),
        (XQ[:, 1:], r"\[n, 24\]"),
        (XQ[0], r"\[n, 24\]"),
        (NAN, "NaN.* in row 3"),
        (XQ * np.float32(1e38), "too large for float32 scores in row"),
        (XQ.astype(np.complex64), "complex64"),
        ([[1.0], [1.0, 2.0]], "not an array of numbers"),
    ],
)
def test_unfit_queries_are_refused(xq, message):
    with pytest.raises(DataError, match=message):
        INDEX.search(xq, 5)
    with pytest.raises(DataError, match=message):
        INDEX.range_search(xq, 0.0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"threads": 0}, UsageError, "threads = 0"),
        ({"allow": [1], "deny": [2]}, UsageError, "allow and deny exclude each other"),
        ({"allow": [0.5]}, DataError, "allow"),
        ({"deny": ["a"]}, DataError, "deny"),
    ],
)
def test_unfit_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        INDEX.search(XQ, 5, **options)


@pytest.mark.parametrize("min_score", [math.nan, None, "1", True])
def test_unfit_minimum_score_is_refused(min_score):
    with pytest.raises(UsageError, match="needs a number as its minimum score"):
        INDEX.range_search(XQ, min_score)


def test_range_search_has_a_limit():
    with pytest.raises(DataError, match="has more than 50 results"):
        INDEX.range_search(XQ, -100.0, limit=50)
    assert INDEX.range_search(XQ[:1], -100.0, limit=300)[0].tolist() == [0, 300]


@pytest.mark.parametrize(
    ("codes", "ids", "message"),
    [
        (CODES[:0], None, "no codes: an index needs at least one item"),
        (CODES, np.arange(299), "ids: 299, expected 300"),
        (CODES, np.zeros(300, int), "ids: id 0 occurs more than once"),
        (CODES, np.arange(300) - 1, "an item has the id -1"),
        (CODES.astype(np.int64), None, "codes: int64"),
        (random_codes(300, 5) | 0xF0, None, r"expected uint8 \[n, 3\]|bits set"),
    ],
)
def test_unfit_items_are_refused(codes, ids, message):
    with pytest.raises(DataError, match=message):
        Index.build(codes, books(5) if "bits" in message else Z, ids)


def test_merging_refuses_other_codebooks_and_equal_ids():
    with pytest.raises(MismatchError, match="different codebooks cannot be merged"):
        INDEX.merge(Index.build(CODES, books(6, seed=1)))
    with pytest.raises(DataError, match="merged indexes: id 0 occurs more than once"):
        INDEX.merge(INDEX)
