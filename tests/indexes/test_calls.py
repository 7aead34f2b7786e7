"""Indexes as users of the package call them: sizes, arrays, threads, files that are replaced, slips. Answers are in test_answers.py."""

import inspect
import os
import time
from concurrent.futures import ThreadPoolExecutor

import faiss
import numpy as np
import pytest
from index_factory import best, books, queries, random_codes, same

from gpq_faiss.codes.codebooks import inject
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.faissio.io import load_index, save_index
from gpq_faiss.faissio.storage import FORMS
from gpq_faiss.gpu.index import DeviceIndex, to_gpu
from gpq_faiss.indexes.base import Index
from gpq_faiss.indexes.file import FileIndex, open_file
from gpq_faiss.indexes.filters import Allow, Deny
from gpq_faiss.indexes.items import Items
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.indexes.opening import open_in_memory, open_index
from gpq_faiss.indexes.threads import in_parallel
from gpq_faiss.inputs import parse_bytes


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """An index of 50 items."""
    made = MemoryIndex.build(random_codes(50, 3), books(3))
    return made.save(tmp_path_factory.mktemp("index") / "a.faiss")


@pytest.fixture(scope="module")
def both(file):
    """It in memory and in place."""
    with open_file(file, "3MB") as disk:
        yield open_in_memory(file), disk


# Sizes, arrays and threads --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("M", [128, 255, 256])
def test_as_many_codebooks_as_a_training_takes(tmp_path, M):
    Z, codes, xq = books(M, d=2), random_codes(9000, M), queries(3, 2 * M)
    held = MemoryIndex.build(codes, Z)
    expected = best(xq, codes, Z, 10)
    assert same(held.search(xq, 10), expected)
    for form in ("flat", "fastscan"):
        path = held.save(tmp_path / f"{form}.faiss", form)
        assert same(open_in_memory(path).search(xq, 10), expected)


def test_the_answer_depends_on_neither_batch_nor_threads(tmp_path):
    codes, Z, xq = random_codes(9000, 8, distinct=3000), books(8), queries(600, 32)
    held, expected = MemoryIndex.build(codes, Z), best(xq, codes, Z, 15)
    before = faiss.omp_get_max_threads()
    for _ in range(3):  # by lists or a scan, whichever took less time
        assert same(held.search(xq, 15, threads=2), expected)
    with open_file(held.save(tmp_path / "lists.faiss", "ivf"), "3MB") as disk:
        for _ in range(2):  # reads lists, then has them
            assert same(disk.search(xq, 15, threads=2), expected)
    assert same(held.search(xq.astype(np.float64), 15, threads=1), expected)
    alone = zip(*(held.search(q[None], 15) for q in xq[:70]), strict=True)
    assert same((np.concatenate(parts) for parts in alone), (part[:70] for part in expected))
    assert faiss.omp_get_max_threads() == before
    assert sorted(held.range_search(xq[:1], -np.inf)[2]) == held.ids.tolist() == list(range(9000))


def test_an_error_in_a_thread_ends_the_others_and_is_raised():
    seen, before = [], faiss.omp_get_max_threads()

    def run(part):
        seen.append(part[0])
        if len(seen) == 3:
            raise DataError("the third")
        time.sleep(0.002)

    with pytest.raises(DataError, match="the third"):
        in_parallel(run, [np.arange(1000)], 2, step=1)
    assert 3 <= len(seen) < 500
    assert faiss.omp_get_max_threads() == before


def test_threads_that_use_threads_do_not_wait_for_each_other():
    done = []

    def outer(part):
        in_parallel(lambda inner: done.append((part[0], inner[0])), [np.arange(8)], 4, step=1)

    in_parallel(outer, [np.arange(16)], 4, step=1)
    assert sorted(done) == [(a, b) for a in range(16) for b in range(8)]


def test_threads_that_search_a_new_index_together_all_get_the_answer():
    n = 10_000
    codes, Z, xq = random_codes(n, 6, distinct=30), books(6), queries(80, 24)
    rng = np.random.default_rng(0)
    ids = rng.permutation(10**6)[:n]
    lists = [None, *(ids[rng.random(n) < share] for share in (0.2, 0.9, 0.3))]
    expected = []
    for some in lists:
        among = slice(None) if some is None else np.isin(ids, some)
        expected.append(best(xq, codes[among], Z, 50, ids[among]))
    held = MemoryIndex.build(codes, Z, ids)

    def run(seed):
        order, right = np.random.default_rng(seed), True
        for _ in range(10):
            number, first = int(order.integers(4)), int(order.integers(70))
            found = held.search(xq[first:], 50, where=lists[number], threads=1)
            right &= same(found, (part[first:] for part in expected[number]))
        return right

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))


def test_extreme_ids_are_kept():
    ids = np.array([2**63 - 1, -(2**63), 0])
    codes = np.array([[1, 2], [3, 4], [5, 6]], np.uint8)
    found = MemoryIndex.build(codes, books(3), ids).search(queries(1, 12), 3)[1]
    assert sorted(found[0]) == sorted(ids.tolist())
    assert Items.ordered(codes, np.array([2, 0, 1])).own is None


def test_what_the_caller_does_with_its_arrays_changes_nothing():
    arrays = random_codes(500, 5), books(5), np.arange(500) * 3
    kept = [array.copy() for array in arrays]
    held, xq = MemoryIndex.build(*arrays), queries(6, 20)
    before = held.search(xq, 9)
    for array in arrays:
        array[:] = array[::-1].copy()
    assert same(held.search(xq, 9), before)
    assert same(MemoryIndex.build(*kept).search(xq, 9), before)


# Files and devices ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ids", [False, True])
def test_an_open_file_that_is_replaced_goes_on_answering(tmp_path, form, *, ids):
    """As ``--overwrite`` replaces it: by another file of the same name."""
    Z, path, xq = books(6), tmp_path / "a.faiss", queries(5, 24)
    numbers = np.random.default_rng(0).permutation(20_000) * 7 - 5 if ids else None
    MemoryIndex.build(random_codes(20_000, 6), Z, numbers).save(path, form)
    with open_file(path, "3MB") as held:
        before = held.search(xq, 8)
        ranged = held.range_search(xq, float(before[0][:, 3].max()))
        other = None if numbers is None else numbers[::-1] * 3
        MemoryIndex.build(random_codes(20_000, 6, seed=5), Z, other).save(path, form, overwrite=True)
        assert same(held.search(xq, 8), before)
        path.unlink()
        assert same(held.range_search(xq, float(before[0][:, 3].max())), ranged)


def test_a_filter_function_that_searches_the_same_file_is_an_error_and_no_standstill(both):
    disk, xq = both[1], queries(1, 12)
    expected = disk.search(xq, 3)[1]
    with pytest.raises(UsageError, match="filter function searches"):
        disk.search(xq, 3, where=lambda ids: np.isin(ids, disk.search(xq, 3)[1]))
    assert np.array_equal(disk.search(xq, 3, where=lambda ids: np.isin(ids, expected))[1], expected)


def test_every_index_says_what_it_is(file, both):
    memory, disk = both
    xq = queries(2, 12)
    with open_index(file, memory="1MB") as other, open_index(file, in_place=True) as placed:
        assert isinstance(placed, FileIndex)
        on_device, of_faiss = to_gpu(memory, "cpu"), open_index(faiss.read_index(str(file)))
        for index in (memory, disk, other, placed, on_device, of_faiss):
            assert (index.ntotal, index.width, index.fingerprint) == (50, 12, memory.fingerprint)
            assert np.array_equal(index.codebooks, books(3))
            assert "50 items" in index.describe()
            assert same(index.search(xq, 9), memory.search(xq, 9))
    for call in (lambda: placed.search(xq, 1), lambda: placed.range_search(xq, 1.0)):
        with pytest.raises(UsageError, match="was closed"):
            call()
    with pytest.raises(UsageError, match="on a device it is exact"):
        on_device.search(xq, 1, nprobe=2)
    for options in ({"memory": "1GB"}, {"in_place": True}):
        with pytest.raises(UsageError, match="a Faiss index is in memory"):
            open_index(inject(books(3)), **options)


def test_ids_that_are_no_longer_wanted_need_no_open_file(file):
    """An error as a generator ends would be printed with its traceback."""
    with open_index(file, in_place=True) as placed:
        assert isinstance(placed, FileIndex)
        blocks = placed.id_blocks(10)
        assert len(next(blocks)) == 10
    blocks.close()


@pytest.mark.parametrize("name", ["search", "range_search", "describe", "close"])
def test_an_index_on_a_device_is_called_like_the_others(name):
    """But for what only lists on the CPU can do."""
    own = inspect.signature(getattr(DeviceIndex, name)).parameters
    stated = inspect.signature(getattr(Index, name)).parameters
    for parameter in stated.values():
        if parameter.name != "floor":
            assert own[parameter.name].kind == parameter.kind
            assert own[parameter.name].default == parameter.default
    assert all(own[name].default is not inspect.Parameter.empty for name in set(own) - set(stated))


# What is refused ------------------------------------------------------------------------------------------------------

FAR = np.array([2**64 - 700], np.uint64)
RAGGED = [[1, 2], [3]]


@pytest.mark.parametrize(
    ("error", "message", "slip"),
    [
        *((UsageError, "k = ", {"k": k}) for k in (0, -1, 51, 2.0, True)),
        *((UsageError, "threads", {"threads": n}) for n in (1.5, "2", 10**12, 0, True)),
        *((UsageError, "nprobe", {"nprobe": n}) for n in (2.5, 0, "3")),
        (UsageError, "where = str", {"where": "abc"}),
        (DataError, "allowed ids", {"where": Allow([0.5])}),
        (DataError, "allowed ids", {"where": Allow(RAGGED)}),
        (DataError, "denied ids", {"where": Deny(np.zeros((2, 2), int))}),
        (DataError, "filter function", {"where": lambda ids: ids}),
        (DataError, "filter function", {"where": lambda ids: np.ones(2, bool)}),
        *((DataError, "does not fit signed 64 bits", {"where": w}) for w in (Allow(FAR), Deny(FAR), FAR)),
        (DataError, "empty", {"xq": queries(1, 12)[:0]}),
        (DataError, r"\(1, 11\), expected numbers \[n, 12\]", {"xq": queries(1, 11)}),
        (DataError, "NaN", {"xq": queries(1, 12) * np.nan}),
        (DataError, "expected numbers", {"xq": queries(1, 12)[0]}),
        (DataError, "queries", {"xq": RAGGED}),
        (DataError, "too large", {"xq": np.full((1, 12), 3e38, np.float32)}),
        *((UsageError, "minimum score", {"min_score": least}) for least in (None, "0", True, float("nan"))),
        *((UsageError, "limit", {"min_score": 1.0, "limit": n}) for n in (-1, 2.5, True, "10")),
    ],
)
def test_a_search_that_cannot_be_is_one_line(both, error, message, slip):
    for index in both:
        search = index.range_search if "min_score" in slip else index.search
        with pytest.raises(error, match=message):
            search(**({"xq": queries(1, 12)} | ({} if "min_score" in slip else {"k": 1}) | slip))


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (UsageError, "257 codebooks: at most 256", {"codes": random_codes(10, 257), "codebooks": books(257)}),
        (DataError, "no codes", {"codes": random_codes(20, 3)[:0]}),
        (DataError, "beyond the last codebook", {"codes": random_codes(20, 3) | 0xF0}),
        (DataError, "norm", {"codebooks": books(3) * 2}),
        (DataError, "codes", {"codes": RAGGED}),
        (DataError, "codebooks", {"codebooks": RAGGED}),
        (DataError, "ids", {"ids": RAGGED}),
        (DataError, "id 1 occurs more than once", {"ids": [1, 1, *range(2, 20)]}),
        (DataError, "expected 20", {"ids": [1, 2]}),
        (DataError, "id -1", {"ids": [*range(-1, 19)]}),
        (DataError, "whole numbers", {"ids": np.arange(20) / 2}),
        (DataError, "64 bits", {"ids": np.arange(20, dtype=np.uint64) + np.uint64(2**63)}),
    ],
)
def test_an_index_that_cannot_be_is_one_line(error, message, change):
    with pytest.raises(error, match=message):
        MemoryIndex.build(**({"codes": random_codes(20, 3), "codebooks": books(3)} | change))


def test_a_file_that_cannot_be_is_one_line(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="a device or a pipe"):
        open_file(tmp_path / "pipe")
    with pytest.raises(DataError, match="is empty: add codes first"):
        open_file(save_index(inject(books(3)), tmp_path / "empty.faiss"))
    index = inject(books(3))
    index.add_sa_codes(random_codes(5, 3))
    path = save_index(index, tmp_path / "s.faiss")
    for text in ("[" * 100_000, '{"ntotal": ' + "9" * 5000 + "}"):
        (tmp_path / "s.faiss.json").write_text(text)
        with pytest.raises(DataError, match=r"s\.faiss\.json"):
            load_index(path)


def test_memory_in_any_number():
    for memory, expected in ((2e9, 2 * 10**9), (np.int64(5), 5), ("2 GB", 2 * 10**9)):
        assert parse_bytes(memory) == expected
    for wrong in (True, None, 0.5, float("nan"), "much"):
        with pytest.raises(UsageError, match="memory"):
            parse_bytes(wrong)
