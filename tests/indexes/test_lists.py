"""Inverted lists: any codes, masks and threads, in memory and mapped, against brute force."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from index_factory import best, books, queries, random_codes, same, score_codes, unit
from numba.core.registry import cpu_target
from safetensors import safe_open

from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.errors import DataError
from gpq_faiss.indexes import block_scan, lists
from gpq_faiss.indexes.list_file import open_lists, write_lists
from gpq_faiss.indexes.lists import InvertedLists

CASES = [
    "plain",
    "equal tables",
    "one wide table",
    "unlike",
    "near ties",
    "zeros",
    "zero",
    "huge",
    "tiny",
]


class Source:
    def __init__(self, codes, ids):
        self.codes, self.ids, self.ntotal = codes, ids, len(ids)

    def blocks(self, size):
        for start in range(0, self.ntotal, min(size, 700)):
            stop = start + min(size, 700)
            yield self.codes[start:stop], self.ids[start:stop]


def make(rng, M, K, d, n, distinct, case):
    """Codebooks, codes (some frequent, most rare) and three queries."""
    Z = unit(rng.normal(size=(M, K, d)))
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


@settings(max_examples=75, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    M=st.sampled_from([1, 2, 3, 5, 6, 12, 17]),
    K=st.sampled_from([4, 8, 16, 16, 16, 16, 64, 256]),
    d=st.integers(1, 5),
    n=st.integers(1, 2500),
    share=st.floats(0.01, 1),
    k=st.integers(1, 200),
    case=st.sampled_from(CASES),
    own=st.sampled_from(["none", "ascending", "any"]),
    keep=st.sampled_from([None, 0.0, 0.01, 0.5, 0.99]),
    typical=st.sampled_from([1, 50, 2048]),
    storage=st.sampled_from(["memory", "mapped"]),
)
@example(1, 12, 16, 2, 2500, 1.0, 10, "unlike", "any", None, 1, "mapped")
@example(3, 6, 16, 1, 2500, 0.05, 200, "near ties", "none", None, 50, "mapped")
@example(4, 3, 8, 4, 2500, 1.0, 5, "one wide table", "any", 0.99, 1, "memory")
def test_results_equal_brute_force(seed, M, K, d, n, share, k, case, own, keep, typical, storage):
    rng = np.random.default_rng(seed)
    Z, codes, xq = make(rng, M, K, d, n, max(1, int(share * n)), case)
    ids = {
        "none": np.arange(n),
        "ascending": np.arange(n) * 3,
        "any": rng.permutation(3 * n)[:n] - 5,
    }[own]
    ids[ids == -1] = 10**10
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists, "_TYPICAL", typical)
        patch.setattr(lists, "_MANY", 0 if seed % 2 else 1 << 24)
        index = InvertedLists.build(codes, ids, Z)
        if storage != "memory":
            path = Path(folder) / "i.lists"
            crc = write_lists(path, [Source(codes, ids)], Z)
            arrays, stored_crc = open_lists(path)
            assert all(
                same([one], [other])
                for one, other in zip(arrays, index.arrays, strict=True)
                if not isinstance(one, int)
            )
            index = InvertedLists(arrays)
            assert crc == stored_crc == index.crc()
        members = index.arrays.members.astype(np.int64)
        by_id = np.argsort(ids)
        assert np.array_equal(index.codes(), codes[by_id[np.searchsorted(ids[by_id], members)]])
        kept = np.ones(n, np.bool_) if keep is None else rng.random(n) < keep
        mask = None if keep is None else kept[by_id[np.searchsorted(ids[by_id], members)]]
        check_exact(index, xq, min(k, n), ids, score_codes(xq, codes, Z), kept, mask)


def check_exact(index, xq, k, ids, scores, kept, mask):
    D, found = index.search(xq, k, mask=mask)
    for q in range(len(xq)):
        rows = np.flatnonzero(kept)
        rows = rows[np.lexsort((ids[rows], -scores[q, rows]))]
        top = rows[:k]
        assert np.array_equal(found[q, : len(top)], ids[top])
        assert np.array_equal(D[q, : len(top)], scores[q, top])
        assert (found[q, len(top) :] == -1).all()
        assert np.isneginf(D[q, len(top) :]).all()
        assert same(index.search(xq[q : q + 1], k, mask=mask), (D[q : q + 1], found[q : q + 1]))
        least = scores[q, (7 * q) % len(ids)]
        reached = rows[scores[q, rows] >= least]
        within, which = index.range_search(xq[q], float(least), len(reached), mask=mask)
        assert np.array_equal(which, ids[reached])
        assert np.array_equal(within, scores[q, reached])
        if len(reached):
            with pytest.raises(DataError, match=f"more than {len(reached) - 1:,} results"):
                index.range_search(xq[q], float(least), len(reached) - 1, mask=mask)


@pytest.mark.parametrize("together", [False, True])
def test_threads_and_batches_change_nothing(together, monkeypatch):
    monkeypatch.setattr(lists, "_MANY", 0 if together else 1 << 24)
    Z, codes, xq = books(12), random_codes(20_000, 12), queries(700, 48)
    xq[60:70] = 0  # all tie
    xq[70:80, :4] *= 1e4
    index = InvertedLists.build(codes, np.arange(20_000), Z)
    expected = best(xq[:100], codes, Z, 10)
    results = index.search(xq, 10, threads=1)
    assert same([array[:100] for array in results], expected)
    assert same(index.search(xq, 10, threads=2), results)


@pytest.mark.parametrize(("M", "K", "n", "Q"), [(4, 4, 100, 20_000), (3, 16, 3000, 5000)])
def test_the_first_threshold_is_reached(M, K, n, Q):
    """It is counted by rounded tables: one too many would lose the best of a few queries."""
    Z, codes, xq = books(M, K), random_codes(n, M, K), queries(Q, 4 * M)
    index = InvertedLists.build(codes, np.arange(n), Z)
    assert same(index.search(xq, 1), best(xq, codes, Z, 1))


def test_blocks_of_equal_columns_are_passed_over():
    """Runs of 512 codes begin and end with a block, and one of them has all results."""
    words = np.zeros((16 * 512, 12), np.int64)
    words[:, 4] = np.arange(len(words)) // 512
    tails = np.random.default_rng(7).permutation(1 << 16)[: len(words), None]
    words[:, 8:] = tails >> [0, 4, 8, 12] & 15
    Z, codes, xq = books(12), pack_codes(words, 16), queries(50, 48)
    xq[:, 16:20] *= 20
    index = InvertedLists.build(codes, np.arange(len(codes)), Z)
    assert same(index.search(xq, 10), best(xq, codes, Z, 10))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), M=st.integers(1, 13), n=st.integers(1, 900))
def test_sorted_codes_are_recognised(seed, M, n):
    rng = np.random.default_rng(seed)
    codes = random_codes(n, M, seed=seed, distinct=100)
    index = InvertedLists.build(codes, rng.permutation(n), books(M))
    ids = index.arrays.members.astype(np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists, "lists_order", None)  # must not be called
        again = InvertedLists.build(index.codes(), ids, books(M))
    assert same(again.arrays[:6], index.arrays[:6])


def test_positions_are_those_of_the_members():
    ids = np.random.default_rng(0).permutation(5000)[:1000] * 10**7 - 3
    index = InvertedLists.build(random_codes(1000, 6), ids, books(6))
    assert np.array_equal(index.arrays.members[index.positions(ids)], ids)
    assert index.positions(np.array([5, -1, 2**62])).tolist() == [-1] * 3


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_queries_without_finite_scores_are_refused(value):
    index = InvertedLists.build(random_codes(100, 4), np.arange(100), books(4))
    xq = queries(3, 16)
    xq[1] = value
    with pytest.raises(DataError, match="too large for float32 scores in row 1"):
        index.search(xq, 1)
    with pytest.raises(DataError, match="too large"):
        index.range_search(xq[1], 0, 10)


# Files --------------------------------------------------------------------------------------------


def written(path, ids=None):
    codes = random_codes(3000, 6, distinct=2000)
    ids = np.random.default_rng(1).permutation(3000) if ids is None else ids
    sources = [Source(codes[:1000], ids[:1000]), Source(codes[1000:], ids[1000:])]
    write_lists(path, sources, books(6))
    return path


def test_a_file_is_what_safetensors_reads(tmp_path):
    path = written(tmp_path / "i.lists")
    arrays, _ = open_lists(path)
    with safe_open(path, "numpy") as file:
        for name in set(arrays._fields) - {"prefix"}:
            array = getattr(arrays, name)
            assert same([file.get_tensor(name)], [array])
            assert array.flags.aligned
            assert array.flags.writeable


def test_no_temporary_file_is_left(tmp_path):
    written(tmp_path / "i.lists")
    assert os.listdir(tmp_path) == ["i.lists"]


@pytest.mark.parametrize(("item", "message"), [(-1, "id -1"), (7, "id 7 occurs more than once")])
def test_wrong_ids_are_refused(item, message, tmp_path):
    ids = np.arange(3000)
    ids[2000] = item
    with pytest.raises(DataError, match=message):
        written(tmp_path / "i.lists", ids)


def test_no_codes_are_refused(tmp_path):
    with pytest.raises(DataError, match="no codes"):
        write_lists(tmp_path / "i.lists", [], books(6))


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "foreign", "ends"])
def test_damaged_files_are_refused(damage, tmp_path):
    path = written(tmp_path / "i.lists")
    content = path.read_bytes()
    changed = {
        "empty": b"",
        "cut": content[:-100],
        "foreign": b"x" * 1000,
        "ends": content.replace(
            open_lists(path)[0].ends.tobytes(), bytes(8 * len(open_lists(path)[0].ends))
        ),
    }
    path.unlink() if damage == "missing" else path.write_bytes(changed[damage])
    with pytest.raises(DataError, match=r"i\.lists"):
        open_lists(path)


# Instructions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("processor", range(len(block_scan.SHUFFLES)))
def test_every_processor_scans_as_the_plain_loop(processor, monkeypatch):
    name = block_scan.SHUFFLES[processor][0]
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    if name and name not in [triple.partition("-")[0], *features.split(",")]:
        pytest.skip(f"this processor is not {name}")
    monkeypatch.setattr(block_scan, "SHUFFLES", block_scan.SHUFFLES[processor:])
    emitted = numba.extending.intrinsic(block_scan.emit_scan)
    scan = numba.njit(lambda *arguments: emitted(*arguments))  # noqa: PLW0108
    rng = np.random.default_rng(processor)
    for T in (1, 2, 6, 40):
        for most in (3, 254 // T, 255):
            blocks = rng.integers(0, 256, (2, T, 64), np.uint8)
            quantised = rng.integers(0, most + 1, (2 * T, 16)).astype(np.uint8)
            first, base = int(rng.integers(T)), np.uint8(rng.integers(256))
            early = int(rng.integers(first, T + 1))
            expected = block_scan.scan_block(blocks, 1, quantised, base, first, early)
            assert scan(blocks, 1, quantised, base, first, early) == expected


WITHOUT_PRIVATE_PARTS = """
import numba.core.caching, numba.core.codegen, numba.core.options
numba.njit(lambda x: x)(1)  # loads what Numba itself needs
del numba.core.caching.FunctionCache
del numba.core.options.DefaultOptions._nrt
numba.core.codegen.CPUCodegen.magic_tuple = None
import numpy as np
from index_factory import best, books, queries, random_codes, same
from gpq_faiss.indexes import block_scan, list_kernels
from gpq_faiss.indexes.lists import InvertedLists
Z, codes, xq = books(12), random_codes(2000, 12), queries(5, 48)
index = InvertedLists.build(codes, np.arange(2000), Z)
assert same(index.search(xq, 10), best(xq, codes, Z, 10))
assert block_scan._instructions() is None
"""


def test_search_needs_no_private_part_of_numba():
    environment = os.environ | {"PYTHONPATH": "tests:."}
    subprocess.run([sys.executable, "-c", WITHOUT_PRIVATE_PARTS], check=True, env=environment)
