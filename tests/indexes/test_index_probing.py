"""One meaning of a search in lists, in memory and in a file: exact within the probed lists, against brute force."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpq_faiss.build.coarse import Tables
from gpq_faiss.build.stream import build_index
from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.codes.checks import check_vectors
from gpq_faiss.codes.encode import decode
from gpq_faiss.codes.scores import score_codes
from gpq_faiss.errors import DataError
from gpq_faiss.faissio.layout import layout_of
from gpq_faiss.faissio.storage import Packing, Storage
from gpq_faiss.indexes.file import FileIndex, open_file
from gpq_faiss.indexes.lists import IvfSettings
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.indexes.opening import open_in_memory
from gpq_faiss.indexes.plan import Plan
from gpq_faiss.indexes.probing import Probing

FORMS: list[Packing] = ["fastscan", "bytes"]
LISTS = Storage("fastscan", lists=True)


def books(rng: np.random.Generator, M: int, d: int = 4) -> np.ndarray:
    Z = rng.normal(size=(M, 16, d))
    return (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)


def some_codes(rng: np.random.Generator, n: int, M: int, distinct: int) -> np.ndarray:
    """Of at most so many distinct codes; 0: any."""
    indices = rng.integers(0, 16, (distinct or n, M))
    return pack_codes(indices[rng.integers(0, distinct, n)] if distinct else indices, 16)


class Rows:
    """A shard of rows that are there already."""

    path, kind, row_bytes, data_fingerprint, fingerprint = Path("rows"), "codes", 32, "d", "f"

    def __init__(self, codes: np.ndarray, ids: np.ndarray) -> None:
        self.codes, self.ids, self.rows = codes, ids, len(ids)

    def blocks(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(0, self.rows, size):
            yield self.codes[start : start + size], self.ids[start : start + size]


def nearest(xq: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """All lists by the rule that :mod:`gpq_faiss.indexes.probing` states, in Python's whole numbers; unit centroids."""
    bits = (52 - (xq.shape[1] - 1).bit_length()) // 2
    points = np.rint(centroids.astype(np.float64) * 2.0**bits)
    out = []
    for query in xq.astype(np.float64):
        whole = np.rint(query / (np.abs(query).max() or 1) * 2.0**bits)
        scores = [sum(int(a) * int(b) for a, b in zip(whole, point, strict=True)) for point in points]
        out.append(sorted(range(len(points)), key=lambda number: (-scores[number], number)))
    return np.array(out)


def oracle(
    xq: np.ndarray,
    k: int,
    nprobe: int,
    *,
    codes: np.ndarray,
    Z: np.ndarray,
    ids: np.ndarray,
    list_of: np.ndarray,
    centroids: np.ndarray,
    allowed: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Brute force: the best of the lists that the rule names."""
    scores = score_codes(xq, codes, Z)
    D = np.full((len(xq), k), -np.inf, np.float32)
    found = np.full((len(xq), k), -1, np.int64)
    for q, order in enumerate(nearest(xq, centroids)):
        looked, held = 0, np.zeros(len(codes), bool)
        for number in order:
            inside = (list_of == number) & allowed
            if inside.any():
                if looked >= nprobe and held.sum() >= k:
                    break
                looked += 1
                held |= inside
        at = np.flatnonzero(held)
        at = at[np.lexsort((ids[at], -scores[q, at].astype(np.float64)))][:k]
        D[q, : len(at)], found[q, : len(at)] = scores[q, at], ids[at]
    return D, found


def lists_in(index: Any, ids: np.ndarray) -> np.ndarray:
    """The list of each id of a Faiss index."""
    layout = layout_of(index)
    where = dict(zip(layout.ids().tolist(), layout.list_numbers().tolist(), strict=True))
    return np.array([where[i] for i in ids.tolist()])


def same(found: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray]) -> None:
    assert found[1].tolist() == expected[1].tolist()
    assert (found[0] + np.float32(0)).tobytes() == (expected[0] + np.float32(0)).tobytes()


@settings(max_examples=60, deadline=None)
@given(
    M=st.integers(1, 12),
    n=st.integers(1, 400),
    distinct=st.sampled_from([0, 1, 2, 7, 60]),
    lists=st.sampled_from([None, 1, 3, 20]),
    own=st.booleans(),
    form=st.sampled_from(FORMS),
    nprobe=st.integers(1, 25),
    k=st.integers(1, 60),
    scale=st.sampled_from([1.0, 1.0, 1e-38, 1e-44, 1e30, 0.0]),
    keep=st.sampled_from([None, 0.0, 0.02, 0.5, 0.97]),
    seed=st.integers(0, 2**20),
)
@example(
    M=1,
    n=300,
    distinct=0,
    lists=3,
    own=False,
    form="fastscan",
    nprobe=3,
    k=60,
    scale=1.0,
    keep=None,
    seed=1,
)
@example(
    M=2,
    n=400,
    distinct=60,
    lists=3,
    own=False,
    form="bytes",
    nprobe=3,
    k=7,
    scale=1.0,
    keep=None,
    seed=1,
)
@example(
    M=6,
    n=400,
    distinct=1,
    lists=None,
    own=True,
    form="fastscan",
    nprobe=1,
    k=10,
    scale=1.0,
    keep=None,
    seed=1,
)
@example(
    M=4,
    n=400,
    distinct=0,
    lists=3,
    own=False,
    form="fastscan",
    nprobe=3,
    k=10,
    scale=1e-38,
    keep=None,
    seed=1,
)
def test_a_search_in_lists_has_one_meaning(
    M: int,
    n: int,
    distinct: int,
    lists: int | None,
    own: bool,
    form: Any,
    nprobe: int,
    k: int,
    scale: float,
    keep: float | None,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    Z = books(rng, M)
    codes = some_codes(rng, n, M, distinct)
    ids = rng.permutation(np.arange(n) * 3 + 2)
    xq = (rng.normal(size=(9, M * 4)) * scale).astype(np.float32)
    k = min(k, n)
    centroids = rng.normal(size=(20, M * 4)).astype(np.float32) if own else None
    asked = IvfSettings(
        lists=None if own or lists is None else min(lists, n), centroids=centroids, nprobe=nprobe
    )
    engine = MemoryIndex.build(codes, Z, ids, kind=Plan("ivf", form), ivf=asked)
    allowed = np.ones(n, bool) if keep is None else rng.random(n) < keep
    where = None if keep is None else ids[allowed].tolist()
    expected = oracle(
        xq,
        k,
        nprobe,
        codes=codes,
        Z=Z,
        ids=ids,
        list_of=lists_in(engine.to_faiss(), ids),
        centroids=engine.ivf.centroids,
        allowed=allowed,
    )
    same(engine.search(xq, k, where=where), expected)
    if not own:
        assert engine.ivf.lists <= len(np.unique(codes, axis=0))
    with tempfile.TemporaryDirectory() as folder:
        path = engine.save(Path(folder) / "i.faiss")
        with open_file(path) as file:
            for threads in (1, 2):
                same(file.search(xq, k, where=where, threads=threads), expected)
            same(file.search(xq, k, where=where, block=2), expected)
        same(open_in_memory(path, "ivf").search(xq, k, where=where), expected)
        everything = open_in_memory(path)
        everything.set_nprobe(10**6)
    flat = MemoryIndex.build(codes, Z, ids, kind="flat")
    same(everything.search(xq, k, where=where), flat.search(xq, k, where=where))
    # whatever the batch
    D, found = engine.search(xq[4:5], k, where=where)
    same((D, found), (expected[0][4:5], expected[1][4:5]))


@settings(max_examples=30, deadline=None)
@given(
    M=st.integers(1, 12),
    distinct=st.sampled_from([0, 5, 300]),
    form=st.sampled_from(FORMS),
    k=st.sampled_from([1, 10, 200]),
    seed=st.integers(0, 2**20),
)
def test_what_faiss_shortlists_is_proven(M: int, distinct: int, form: Any, k: int, seed: int) -> None:
    """Lists so long that Faiss gives a part of them only."""
    rng = np.random.default_rng(seed)
    Z, n = books(rng, M), 6000
    codes = some_codes(rng, n, M, distinct)
    xq = rng.normal(size=(20, M * 4)).astype(np.float32)
    engine = MemoryIndex.build(codes, Z, kind=Plan("ivf", form), ivf=IvfSettings(lists=12, nprobe=3))
    with tempfile.TemporaryDirectory() as folder, open_file(engine.save(Path(folder) / "i.faiss")) as file:
        same(engine.search(xq, k), file.search(xq, k))
    engine.set_nprobe(12)
    same(engine.search(xq, k), MemoryIndex.build(codes, Z, kind="flat").search(xq, k))


def test_the_order_of_lists_is_that_of_the_inner_products_whatever_the_batch() -> None:
    rng = np.random.default_rng(0)
    for D, lists in ((1, 3), (4, 500), (72, 300), (3072, 40)):
        centroids = rng.normal(size=(lists, D)).astype(np.float32) * 7
        sizes = rng.integers(0, 3, lists)
        sizes[0] = 1
        probing = Probing(centroids, sizes)
        xq = rng.normal(size=(30, D)).astype(np.float32)
        near = probing.nearest(xq, 10**6)
        assert sorted(near[0].tolist()) == np.flatnonzero(sizes).tolist()
        unit = centroids / np.linalg.norm(centroids, axis=1, keepdims=True)
        scores = np.take_along_axis(xq @ unit.T, near, axis=1)
        assert (np.diff(scores, axis=1) <= 1e-4 * np.abs(scores).max()).all()
        for n in (1, 2, 17):
            assert np.array_equal(probing.nearest(xq, n), near[:, :n])
            assert np.array_equal(probing.nearest(xq[3:4], n), near[3:4, :n])
        assert np.array_equal(probing.nearest(xq * np.float32(2.0**-100), 5), near[:, :5])


def test_equally_near_lists_are_looked_at_in_the_order_of_their_numbers() -> None:
    centroids = np.eye(8, dtype=np.float32)[[0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]]
    probing = Probing(centroids, np.array([1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]))
    for n in (2, 11):
        expected = [0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 2][:n]
        assert probing.nearest(np.eye(8, dtype=np.float32)[:1], n).tolist() == [expected]


@pytest.mark.parametrize("distinct", [1, 5, 77])
@pytest.mark.parametrize("assignment", ["nearest", "tables", "memory"])
def test_there_are_no_more_lists_than_distinct_codes(tmp_path: Path, distinct: int, assignment: Any) -> None:
    rng = np.random.default_rng(distinct)
    Z, n = books(rng, 6, 12), 20_000
    codes, ids = some_codes(rng, n, 6, distinct), np.arange(n)
    path = tmp_path / "i.faiss"
    if assignment == "memory":
        MemoryIndex.build(codes, Z, kind="ivf").save(path)
    else:
        build_index([Rows(codes, ids)], path, Z, LISTS, IvfSettings(assignment=assignment))
    xq = rng.normal(size=(50, 72)).astype(np.float32)
    with open_file(path) as engine:
        assert isinstance(engine, FileIndex)
        assert engine.lists <= len(np.unique(codes, axis=0))
        assert (engine.sizes > 0).all()
        assert (engine.search(xq, 10)[1] >= 0).all()
    assert (open_in_memory(path).search(xq, 10)[1] >= 0).all()


def test_a_file_whose_lists_are_mostly_empty_gives_k(tmp_path: Path) -> None:
    """One that plain Faiss made, or an earlier version."""
    rng = np.random.default_rng(0)
    Z = books(rng, 6, 12)
    codes = some_codes(rng, 1000, 6, 1)
    centroids = decode(some_codes(rng, 31, 6, 0), Z)
    engine = MemoryIndex.build(codes, Z, kind="ivf", ivf=IvfSettings(centroids=centroids, nprobe=1))
    xq = rng.normal(size=(50, 72)).astype(np.float32)
    assert engine.search(xq, 10)[1].tolist() == [list(range(10))] * 50
    with open_file(engine.save(tmp_path / "i.faiss")) as file:
        assert file.search(xq, 10)[1].tolist() == [list(range(10))] * 50


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_centroid_that_is_not_finite_is_refused(value: float) -> None:
    """Scores with it have no order."""
    centroids = np.ones((3, 4), np.float32)
    centroids[1, 2] = value
    with pytest.raises(DataError, match="IVF centroid 1 is not finite"):
        Probing(centroids, np.ones(3, np.int64))


def test_lists_whose_codes_cancel_have_a_direction() -> None:
    """A mean of opposite vectors is zero, which no opener takes for a centroid."""
    Z = np.array([[[1, 0], [-1, 0], [0, 1], [0, -1]] * 4] * 2, np.float32)
    codes = pack_codes(np.array([[0, 0], [1, 1]] * 500), 16)
    for lists in (1, 2, 3):
        coarse = Tables(codes, Z, lists)
        assert 1 <= len(coarse.centroids) <= min(lists, 2)
        assert np.allclose(np.linalg.norm(coarse.centroids, axis=1), 1)


def test_lists_that_are_given_stay_with_what_is_made_of_an_engine(tmp_path: Path) -> None:
    """Items need not be in the list nearest to them; filters, other probes and files must leave them there."""
    rng = np.random.default_rng(3)
    Z, n = books(rng, 6), 2000
    codes = some_codes(rng, n, 6, 300)
    _, place = np.unique(codes, axis=0, return_inverse=True)
    list_of = (place.reshape(-1) % 12).astype(np.int32)
    centroids = rng.normal(size=(12, 24)).astype(np.float32)
    ivf = IvfSettings(centroids=centroids, nprobe=2, list_of=list_of)
    engine = MemoryIndex.build(codes, Z, kind=Plan("ivf", "bytes"), ivf=ivf)
    assert np.array_equal(lists_in(engine.to_faiss(), np.arange(n)), list_of)
    xq = rng.normal(size=(8, 24)).astype(np.float32)
    kept = {"codes": codes, "Z": Z, "ids": np.arange(n), "list_of": list_of}
    kept["centroids"] = engine.ivf.centroids
    for where, allowed in ((None, np.ones(n, bool)), (range(0, n, 2), np.arange(n) % 2 == 0)):
        same(engine.search(xq, 20, where=where), oracle(xq, 20, 2, allowed=allowed, **kept))
    more = engine.to("ivf", ivf=dataclasses.replace(engine.ivf, nprobe=5))
    assert more.plan.packing == engine.plan.packing
    same(more.search(xq, 20), oracle(xq, 20, 5, allowed=np.ones(n, bool), **kept))
    again = open_in_memory(engine.save(tmp_path / "i.faiss"))
    assert np.array_equal(lists_in(again.to_faiss(), np.arange(n)), list_of)


def test_equal_codes_in_several_lists_are_not_taken_for_one() -> None:
    rng = np.random.default_rng(4)
    Z, n = books(rng, 6), 600
    codes = some_codes(rng, n, 6, 5)
    list_of = rng.integers(0, 6, n).astype(np.int32)
    centroids = rng.normal(size=(6, 24)).astype(np.float32)
    xq = rng.normal(size=(8, 24)).astype(np.float32)
    ivf = IvfSettings(centroids=centroids, nprobe=1, list_of=list_of)
    unit = ivf.trained(codes, Z).centroids
    kept = {"codes": codes, "Z": Z, "ids": np.arange(n), "list_of": list_of, "centroids": unit}
    expected = oracle(xq, 9, 1, allowed=np.ones(n, bool), **kept)
    same(MemoryIndex.build(codes, Z, kind="ivf", ivf=ivf).search(xq, 9), expected)


@pytest.mark.parametrize("form", FORMS)
def test_one_recall_is_tuned_for_in_memory_and_in_a_file(tmp_path: Path, form: Any) -> None:
    rng = np.random.default_rng(6)
    Z, n = books(rng, 6), 6000
    codes = some_codes(rng, n, 6, 900)
    xq = rng.normal(size=(40, 24)).astype(np.float32)
    engine = MemoryIndex.build(codes, Z, kind=Plan("ivf", form), ivf=IvfSettings(lists=40))
    exact = MemoryIndex.build(codes, Z, kind="flat").search(xq, 12)[1]
    with open_file(engine.save(tmp_path / "i.faiss")) as file:
        for recall in (0.3, 0.8, 1.0):
            mine, theirs = (
                [(p["nprobe"], p["recall"], p["share"]) for p in points]
                for points in (
                    engine.tune(recall, k=12, queries=xq),
                    file.tune(recall, k=12, queries=xq),
                )
            )
            assert mine == theirs
            assert engine.ivf.nprobe == file.nprobe
            for nprobe, stated, _ in mine:
                found = file.search(xq, 12, nprobe=int(nprobe))[1]
                shared = [len(set(a) & set(b)) for a, b in zip(found.tolist(), exact.tolist(), strict=True)]
                assert np.isclose(np.mean(shared) / 12, stated)
            chosen = next(p for p in mine if p[0] == file.nprobe)
            assert chosen[1] >= recall
            if file.nprobe > 1:
                found = file.search(xq, 12, nprobe=file.nprobe - 1)[1]
                shared = [len(set(a) & set(b)) for a, b in zip(found.tolist(), exact.tolist(), strict=True)]
                assert np.mean(shared) / 12 < recall


def test_a_range_search_finds_the_items_of_all_lists(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    Z, n = books(rng, 5), 3000
    codes = some_codes(rng, n, 5, 0)
    xq = rng.normal(size=(5, 20)).astype(np.float32)
    engine = MemoryIndex.build(codes, Z, kind="ivf", ivf=IvfSettings(nprobe=1))
    least = float(np.quantile(score_codes(xq, codes, Z), 0.99))
    with open_file(engine.save(tmp_path / "i.faiss")) as file:
        mine, theirs = engine.range_search(xq, least), file.range_search(xq, least)
        some = file.range_search(xq, least, nprobe=1)
    for a, b in zip(mine, theirs, strict=True):
        assert np.array_equal(a, b)
    assert len(some[1]) < len(mine[1])


def test_the_scores_that_faiss_gives_of_lists_are_as_near_as_the_proof_takes_them() -> None:
    """Of ``IndexIVFPQFastScan`` and of byte-fused ``IndexIVFPQ``, for queries of every size."""
    rng = np.random.default_rng(8)
    for M in (1, 2, 3, 7, 12):
        Z = books(rng, M)
        codes = some_codes(rng, 3000, M, 0)
        for form in FORMS:
            engine = MemoryIndex.build(codes, Z, kind=Plan("ivf", form), ivf=IvfSettings(lists=9))
            search = engine._engine.probed
            for scale in (1.0, 1e-3, 1e20):
                xq = check_vectors(rng.normal(size=(25, M * 4)) * scale, M * 4, what="queries")
                approximate, found = search.shortlist(xq, 50, search.probing.nearest(xq, 4))
                exact = np.take_along_axis(score_codes(xq, codes, Z), np.maximum(found, 0), axis=1)
                slack = search.slack(xq)
                assert ((exact - approximate <= slack[:, None]) | (found < 0)).all()
                assert (found >= 0).mean() > 0.5


@pytest.mark.parametrize("assignment", ["nearest", "tables", "memory"])
def test_fewer_lists_than_asked_for_are_said_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, assignment: Any
) -> None:
    rng = np.random.default_rng(9)
    Z, codes = books(rng, 6), some_codes(rng, 500, 6, 3)
    for lists in (2, 20):
        caplog.clear()
        if assignment == "memory":
            made = MemoryIndex.build(codes, Z, kind="ivf", ivf=IvfSettings(lists=lists)).ivf.lists
        else:
            ivf = IvfSettings(lists=lists, assignment=assignment)
            path = build_index([Rows(codes, np.arange(500))], tmp_path / f"{lists}.faiss", Z, LISTS, ivf)
            with open_file(path) as engine:
                made = engine.lists
        warned = [r.getMessage() for r in caplog.records if "requested" in r.getMessage()]
        assert made == min(lists, 3)
        assert [w.split(":")[0] for w in warned] == ([] if made == lists else ["3 of the 20 requested lists"])
