"""Indexes in memory and over a file as users of the package call them: sizes, arrays and filters of any kind, slips.

Their answers on any codes and tables are in test_codeword_lists.py and test_forms.py.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.codes.codebooks import inject
from gpq_faiss.codes.scores import score_codes
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.faissio.io import load_index, save_index
from gpq_faiss.faissio.storage import FORMS as NAMES
from gpq_faiss.indexes.codeword_lists import CodewordLists
from gpq_faiss.indexes.file import open_file
from gpq_faiss.indexes.filters import Allow, Deny
from gpq_faiss.indexes.items import Items
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.indexes.opening import open_in_memory
from gpq_faiss.inputs import parse_bytes


def books(M: int, K: int = 16, d: int = 4, seed: int = 0) -> np.ndarray:
    Z = np.random.default_rng([seed, M, K, d]).standard_normal((M, K, d))
    return (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)


def draw(n: int, M: int, K: int = 16, seed: int = 0, distinct: int | None = None) -> np.ndarray:
    """Packed codes; of ``distinct`` ones some are very frequent, many rare."""
    rng = np.random.default_rng([seed, n, M])
    if distinct is None:
        return pack_codes(rng.integers(0, K, (n, M)), K)
    few = pack_codes(rng.integers(0, K, (distinct, M)), K)
    return few[np.minimum((rng.pareto(1, n) * 3).astype(int), distinct - 1)]


def ask(Q: int, width: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng([seed, Q, width]).standard_normal((Q, width)).astype(np.float32)


def best(xq: np.ndarray, codes: np.ndarray, Z: np.ndarray, k: int, ids: np.ndarray | None = None):
    """Brute force: scores and ids, ties in ascending order of id."""
    scores = score_codes(xq, codes, Z)
    own = np.arange(len(codes)) if ids is None else ids
    order = np.stack([np.lexsort((own, -row)) for row in scores])[:, :k]
    return np.take_along_axis(scores, order, axis=1), own[order]


def same(found: Any, expected: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


# ------------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("M", "K", "d"), [(1, 16, 12), (5, 4, 3), (5, 8, 2), (3, 16, 1), (4, 64, 3), (4, 256, 3)]
)
def test_codebooks_of_any_size_are_searched_in_memory_and_on_disk(
    tmp_path: Path, M: int, K: int, d: int
) -> None:
    Z, codes, n = books(M, K, d), draw(9000, M, K, distinct=4000), 9000
    ids = np.random.default_rng(M).permutation(10**12 + np.arange(n) * 7)
    memory = MemoryIndex.build(codes, Z, ids)
    memory.save(tmp_path / "a.faiss")
    xq = ask(20, M * d)
    with open_file(tmp_path / "a.faiss", "8MB") as disk:
        for k in (1, 30, n):
            expected = best(xq, codes, Z, k, ids)
            assert same(memory.search(xq, k), expected)
            assert same(disk.search(xq, k), expected)
            assert same(disk.search(xq[:1], k), (part[:1] for part in expected))
    for call in (lambda: disk.search(xq, 10), lambda: disk.range_search(xq, 1.0)):
        with pytest.raises(UsageError, match="was closed"):
            call()


@pytest.mark.parametrize("M", [128, 255, 256])
def test_as_many_codebooks_as_a_training_takes(tmp_path: Path, M: int) -> None:
    Z, codes = books(M, 16, 2), draw(9000, M)
    engine = MemoryIndex.build(codes, Z)
    xq = ask(3, 2 * M)
    expected = best(xq, codes, Z, 10)
    assert same(engine.search(xq, 10), expected)
    for form in ("flat", "fastscan"):
        engine.save(tmp_path / f"{form}.faiss", form)
        assert same(open_in_memory(tmp_path / f"{form}.faiss").search(xq, 10), expected)


def test_the_answer_depends_on_neither_batch_nor_threads() -> None:
    xq = ask(70, 32)
    engine = MemoryIndex.build(draw(9000, 8, distinct=3000), books(8))
    D, found = engine.search(xq, 15, threads=1)
    before = faiss.omp_get_max_threads()
    for other in (
        engine.search(xq, 15, threads=2),
        engine.search(xq.astype(np.float64), 15),
        tuple(np.concatenate(p) for p in zip(*(engine.search(q[None], 15) for q in xq), strict=True)),
    ):
        assert np.array_equal(other[0], D)
        assert np.array_equal(other[1], found)
    assert faiss.omp_get_max_threads() == before


def test_threads_that_search_a_new_index_together_all_get_the_answer() -> None:
    n = 10_000
    codes, Z, xq = draw(n, 6, distinct=30), books(6), ask(80, 24)
    rng = np.random.default_rng(0)
    ids = rng.permutation(10**6)[:n]
    lists = [ids[rng.random(n) < share] for share in (0.2, 0.9, 0.3)]
    expected = [best(xq, codes, Z, 50, ids)]
    for some in lists:
        among = np.isin(ids, some)
        expected.append(best(xq, codes[among], Z, 50, ids[among]))
    engine = MemoryIndex.build(codes, Z, ids)

    def run(seed: int) -> bool:
        order = np.random.default_rng(seed)
        right = True
        for _ in range(10):
            number, first = int(order.integers(4)), int(order.integers(70))
            where = None if number == 0 else lists[number - 1]
            D, found = engine.search(xq[first:], 50, where=where, threads=1)
            right &= np.array_equal(D, expected[number][0][first:])
            right &= np.array_equal(found, expected[number][1][first:])
        return bool(right)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))


# ----------------------------------------------------------------------------------------------- filters and ranges


def filters(ids: np.ndarray, rng: np.random.Generator):
    some = rng.choice(ids, 300, replace=False)
    few = rng.choice(ids, 5, replace=False)
    yield Allow(np.append(some, 10**15)), np.isin(ids, some)
    yield some, np.isin(ids, some)
    yield few.tolist(), np.isin(ids, few)
    yield Deny(few), ~np.isin(ids, few)
    yield Deny([]), np.ones(len(ids), bool)
    yield Allow([]), np.zeros(len(ids), bool)
    yield (lambda i: i % 3 == 0), ids % 3 == 0


def test_filters_are_brute_force_over_what_they_allow() -> None:
    rng = np.random.default_rng(9)
    n, k = 12_000, 12
    Z, codes, xq = books(6), draw(n, 6, distinct=900), ask(5, 24)
    for ids in (np.arange(n), rng.permutation(5 + 3 * np.arange(n))):
        engine = MemoryIndex.build(codes, Z, ids)
        for where, mask in filters(ids, rng):
            D, found = engine.search(xq, k, where=where)
            m = min(k, int(mask.sum()))
            if m:
                assert same((D[:, :m], found[:, :m]), best(xq, codes[mask], Z, m, ids[mask]))
            assert (found[:, m:] == -1).all()
            assert np.isneginf(D[:, m:]).all()


def test_allowed_ids_in_any_collection() -> None:
    engine = MemoryIndex.build(draw(50, 3), books(3))
    xq = ask(2, 12)
    expected = engine.search(xq, 4, where=[3, 5, 7, 9])[1]
    for where in ((3, 5, 7, 9), {3, 5, 7, 9}, frozenset({3, 5, 7, 9}), range(3, 10, 2), Allow({3, 5, 7, 9})):
        assert np.array_equal(engine.search(xq, 4, where=where)[1], expected)


def test_range_search_is_brute_force() -> None:
    rng = np.random.default_rng(11)
    n = 9000
    Z, codes, xq = books(6), draw(n, 6, distinct=5000), ask(6, 24)
    ids = rng.permutation(np.arange(n) * 2)
    truth = score_codes(xq, codes, Z)
    engine = MemoryIndex.build(codes, Z, ids)
    for least in (
        float(np.quantile(truth, 0.9995)),
        float(np.quantile(truth, 0.9)),
        1e9,
        float(truth.max()),
        -np.inf,
    ):
        for where, mask in (
            (None, np.ones(n, bool)),
            (lambda i: i % 4 == 0, ids % 4 == 0),
            ([], np.zeros(n, bool)),
        ):
            lims, D, found = engine.range_search(xq, least, where=where)
            assert lims.dtype == found.dtype == np.int64
            for q in range(6):
                hit = np.flatnonzero((truth[q] >= np.float32(least)) & mask)
                hit = hit[np.lexsort((ids[hit], -truth[q][hit]))]
                assert found[lims[q] : lims[q + 1]].tolist() == ids[hit].tolist()
                assert np.array_equal(D[lims[q] : lims[q + 1]], truth[q][hit])
    with pytest.raises(DataError, match="more than 10 results"):
        engine.range_search(xq, -1e9, limit=10)


@pytest.mark.parametrize("least", [1e39, -1e39, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["memory", "flat", "ivf"])
def test_beyond_float32_every_score_or_none_is_enough(kind: str, least: float, tmp_path: Path) -> None:
    n = 0 if least > 0 else 50
    engine = MemoryIndex.build(draw(50, 3), books(3))
    engine.save(tmp_path / "a.faiss", "flat" if kind == "memory" else kind)
    with warnings.catch_warnings(), open_file(tmp_path / "a.faiss", "3MB") as disk:
        warnings.simplefilter("error")
        lims, _, ids = (engine if kind == "memory" else disk).range_search(ask(2, 12), least)
    assert lims.tolist() == [0, n, 2 * n]
    assert sorted(ids[:n].tolist()) == list(range(n))


def test_a_filter_function_that_searches_the_same_file_is_an_error_and_no_standstill(tmp_path: Path) -> None:
    MemoryIndex.build(draw(50, 3), books(3)).save(tmp_path / "a.faiss")
    with open_file(tmp_path / "a.faiss", "3MB") as disk:
        xq = ask(1, 12)
        expected = disk.search(xq, 3)[1]
        with pytest.raises(UsageError, match="filter function searches"):
            disk.search(xq, 3, where=lambda ids: np.isin(ids, disk.search(xq, 3)[1]))
        assert np.array_equal(disk.search(xq, 3, where=lambda ids: np.isin(ids, expected))[1], expected)


# ----------------------------------------------------------------------------------------------- arrays and files


def test_extreme_ids_are_kept() -> None:
    Z = books(3)
    codes = np.array([[1, 2], [3, 4], [5, 6]], np.uint8)
    ids = np.array([2**63 - 1, -(2**63), 0])
    engine = MemoryIndex.build(codes, Z, ids)
    assert sorted(engine.search(ask(1, 12), 3)[1][0]) == sorted(ids.tolist())
    for wrong, message in (
        ([1, 1, 2], "id 1 occurs more than once"),
        ([1, 2], "expected 3"),
        ([-1, 2, 3], "id -1"),
        ([0.5, 2, 3], "whole numbers"),
        (np.array([2**63, 1, 2], np.uint64), "64 bits"),
    ):
        with pytest.raises(DataError, match=message):
            MemoryIndex.build(codes, Z, wrong)


def test_ids_that_repeat_are_not_taken_for_positions() -> None:
    codes = np.arange(9, dtype=np.uint8).reshape(3, 3)
    items = Items.ordered(codes, np.array([2, 0, 0]))
    assert items.ids.tolist() == [0, 0, 2]
    assert items.codes.tolist() == codes[[1, 2, 0]].tolist()
    assert Items.ordered(codes, np.array([2, 0, 1])).own is None


def test_what_the_caller_does_with_its_arrays_changes_nothing() -> None:
    Z, codes, ids = books(5), draw(500, 5), np.arange(500) * 3
    kept = Z.copy(), codes.copy(), ids.copy()
    engine = MemoryIndex.build(codes, Z, ids)
    xq = ask(6, 20)
    before = engine.search(xq, 9)
    for array in (Z, codes, ids):
        array[:] = array[::-1].copy()
    assert same(engine.search(xq, 9), before)
    assert same(MemoryIndex.build(kept[1], kept[0], kept[2]).search(xq, 9), before)


FORMS: list[tuple[Any, bool]] = [(form, ids) for form in NAMES for ids in (False, True)]


@pytest.mark.parametrize(("form", "ids"), FORMS)
def test_an_open_file_that_is_replaced_goes_on_answering(tmp_path: Path, form: Any, *, ids: bool) -> None:
    """As ``--overwrite`` replaces it: by another file of the same name."""
    Z, path = books(6), tmp_path / "a.faiss"
    numbers = np.random.default_rng(0).permutation(20_000) * 7 - 5 if ids else None
    MemoryIndex.build(draw(20_000, 6), Z, numbers).save(path, form)
    xq = ask(5, 24)
    with open_file(path, "3MB") as engine:
        before = engine.search(xq, 8)
        ranged = engine.range_search(xq, float(before[0][:, 3].max()))
        other = None if numbers is None else numbers[::-1] * 3
        MemoryIndex.build(draw(20_000, 6, seed=5), Z, other).save(path, form, overwrite=True)
        assert same(engine.search(xq, 8), before)
        path.unlink()
        assert same(engine.range_search(xq, float(before[0][:, 3].max())), ranged)


@pytest.mark.parametrize(("form", "ids"), FORMS)
def test_an_open_file_that_is_cut_off_is_one_line(tmp_path: Path, form: Any, *, ids: bool) -> None:
    Z, path = books(6), tmp_path / "a.faiss"
    numbers = np.arange(20_000) * 7 if ids else None
    MemoryIndex.build(draw(20_000, 6), Z, numbers).save(path, form)
    with open_file(path, "3MB") as engine:
        os.truncate(path, 5000)
        with pytest.raises(DataError, match="was changed while it was in use"):
            engine.range_search(ask(5, 24), 1.0)


# ------------------------------------------------------------------------------------------------------- what is refused


def _slips() -> list[tuple[type[Exception], str, dict[str, Any]]]:
    """Of a search for one result with one of these arguments."""
    far = np.array([2**64 - 700], np.uint64)
    return [
        *((UsageError, "k = ", {"k": k}) for k in (0, -1, 51, 2.0, True)),
        *((UsageError, "threads", {"threads": n}) for n in (1.5, "2", 10**12, 0, True)),
        *((UsageError, "nprobe", {"nprobe": n}) for n in (2.5, 0, "3")),
        (UsageError, "where = str", {"where": "abc"}),
        (DataError, "allowed ids", {"where": Allow([0.5])}),
        (DataError, "allowed ids", {"where": Allow([[1, 2], [3]])}),  # type: ignore[arg-type]
        (DataError, "denied ids", {"where": Deny(np.zeros((2, 2), int))}),
        (DataError, "filter function", {"where": lambda ids: ids}),
        (DataError, "filter function", {"where": lambda ids: np.ones(2, bool)}),
        *((DataError, "does not fit signed 64 bits", {"where": w}) for w in (Allow(far), Deny(far), far)),
        (DataError, "empty", {"xq": ask(1, 12)[:0]}),
        (DataError, r"\(1, 11\), expected numbers \[n, 12\]", {"xq": ask(1, 11)}),
        (DataError, "NaN", {"xq": ask(1, 12) * np.nan}),
        (DataError, "expected numbers", {"xq": ask(1, 12)[0]}),
        (DataError, "queries", {"xq": [[1, 2], [3]]}),
        (DataError, "too large", {"xq": np.full((1, 12), 3e38, np.float32)}),
    ]


@pytest.fixture
def both(tmp_path: Path) -> Iterator[tuple[Any, ...]]:
    """An index in memory, and its file in place."""
    memory = MemoryIndex.build(draw(50, 3), books(3))
    with open_file(memory.save(tmp_path / "a.faiss"), "3MB") as disk:
        yield memory, disk


@pytest.mark.parametrize(("error", "message", "slip"), _slips())
def test_a_search_that_cannot_be_is_one_line(
    both: tuple[Any, ...], error: type[Exception], message: str, slip: dict[str, Any]
) -> None:
    for index in both:
        with pytest.raises(error, match=message):
            index.search(**({"xq": ask(1, 12), "k": 1} | slip))


@pytest.mark.parametrize(
    ("slip", "message"),
    [
        *(({"min_score": least}, "minimum score") for least in (None, "0", True, float("nan"))),
        *(({"limit": limit}, "limit") for limit in (-1, 2.5, True, "10")),
    ],
    ids=str,
)
def test_a_range_that_cannot_be_is_a_usage_error(
    both: tuple[Any, ...], slip: dict[str, Any], message: str
) -> None:
    for index in both:
        with pytest.raises(UsageError, match=message):
            index.range_search(**({"xq": ask(1, 12), "min_score": 1.0} | slip))


def test_an_index_that_cannot_be_is_one_line() -> None:
    Z, codes = books(3), draw(20, 3)
    engine = MemoryIndex.build(codes, Z)
    ragged: Any = [[1, 2], [3]]
    calls: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (UsageError, "choose from", lambda: engine.to_faiss("best")),
        *(
            (
                UsageError,
                "needs 16 codewords",
                lambda f=form: MemoryIndex.build(draw(9, 5, 4), books(5, 4)).to_faiss(f),
            )  # type: ignore[misc]
            for form in ("fused", "fastscan", "ivf")
        ),
        (UsageError, "257 codebooks: at most 256", lambda: MemoryIndex.build(draw(10, 257), books(257))),
        (DataError, "no codes", lambda: MemoryIndex.build(codes[:0], Z)),
        (DataError, "beyond the last codebook", lambda: MemoryIndex.build(codes | 0xF0, Z)),
        (DataError, "norm", lambda: MemoryIndex.build(codes, Z * 2)),
        (DataError, "codes", lambda: MemoryIndex.build(ragged, Z)),
        (DataError, "codebooks", lambda: MemoryIndex.build(codes, ragged)),
        (DataError, "ids", lambda: MemoryIndex.build(codes, Z, ragged)),
        (DataError, "IxFI", lambda: open_in_memory(faiss.IndexFlatIP(3))),
    ]
    for error, message, call in calls:
        with pytest.raises(error, match=message):
            call()
    assert engine.ids.tolist() == list(range(20))
    huge = np.broadcast_to(np.zeros((1, 2), np.uint8), (1 << 32, 2))
    with pytest.raises(UsageError, match="too many for one search in memory"):
        CodewordLists(huge, Z)


def test_a_file_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="a device or a pipe"):
        open_file(tmp_path / "pipe")
    mapped = faiss.IndexIDMap(inject(books(3)))
    mapped.add_with_ids(ask(4, 12), np.array([5, -1, 7, 8]))
    faiss.write_index(mapped, str(tmp_path / "a.faiss"))
    with pytest.raises(DataError, match="has the id -1"):
        load_index(tmp_path / "a.faiss")
    MemoryIndex.build(draw(50, 3), books(3)).save(tmp_path / "l.faiss", "ivf")
    lists = faiss.read_index(str(tmp_path / "l.faiss"))
    faiss.extract_index_ivf(lists).set_direct_map_type(faiss.DirectMap.Hashtable)
    faiss.write_index(lists, str(tmp_path / "b.faiss"))
    with pytest.raises(
        DataError, match=r"b\.faiss is damaged .* or set up in a way that GPQ codes do not have"
    ):
        open_file(tmp_path / "b.faiss", "3MB")
    for text in ("[" * 100_000, '{"ntotal": ' + "9" * 5000 + "}"):
        index = inject(books(3))
        index.add_sa_codes(draw(5, 3))
        save_index(index, tmp_path / "s.faiss", overwrite=True)
        (tmp_path / "s.faiss.json").write_text(text)
        with pytest.raises(DataError, match=r"s\.faiss\.json"):
            load_index(tmp_path / "s.faiss")


@pytest.mark.parametrize(("memory", "expected"), [(2e9, 2 * 10**9), (np.int64(5), 5), ("2 GB", 2 * 10**9)])
def test_memory_in_any_number(memory: Any, expected: int) -> None:
    assert parse_bytes(memory) == expected


@pytest.mark.parametrize("memory", [True, None, 0.5, float("nan"), "much"])
def test_memory_that_is_none(memory: Any) -> None:
    with pytest.raises(UsageError, match="memory"):
        parse_bytes(memory)
