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
from index_factory import best, books, padded_best, queries, random_codes, same, unit, within
from numba.core.registry import cpu_target
from safetensors import safe_open

from gpq_faiss import Index, compiled
from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.errors import DataError
from gpq_faiss.indexes import block_scan, lists
from gpq_faiss.indexes.list_file import open_lists, write_lists
from gpq_faiss.indexes.lists import InvertedLists


class Source:
    """Codes and ids that are read in blocks of at most 700."""

    def __init__(self, codes, ids):
        self.codes, self.ids, self.ntotal = codes, ids, len(ids)

    def blocks(self, size):
        for start in range(0, self.ntotal, 700):
            yield self.codes[start : start + 700], self.ids[start : start + 700]


def plain(Z, xq):
    return Z, xq


def equal_tables(Z, xq):
    M, _, d = Z.shape
    return np.repeat(Z[:1], M, axis=0), np.ascontiguousarray(np.tile(xq[:, :d], M))


def one_wide_table(Z, xq):
    xq[:, : Z.shape[2]] *= 1e4
    return Z, xq


def unlike_tables(Z, xq):
    """As codes of class and features have them."""
    return Z, xq * np.repeat(10.0 ** -np.arange(len(Z)), Z.shape[2]).astype(np.float32)


def near_ties(Z, xq):
    half = Z.shape[1] // 2
    Z[:, half:] = np.nextafter(Z[:, :half], np.float32(2))
    return Z, xq


def scaled(factor):
    return lambda Z, xq: (Z, xq * np.float32(factor))


CASES = [plain, equal_tables, one_wide_table, unlike_tables, near_ties, scaled(-0.0)]
CASES += [scaled(1e18), scaled(1e-42)]


@settings(max_examples=75, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from(
        [(M, 16) for M in (1, 2, 3, 5, 6, 12, 17)] + [(5, 4), (3, 8), (2, 64), (3, 256)]
    ),
    d=st.integers(1, 5),
    n=st.integers(1, 2500),
    share=st.floats(0.01, 1),
    k=st.integers(1, 200),
    case=st.sampled_from(CASES),
    filtered=st.sampled_from([None, 0.0, 0.01, 0.5, 0.99]),
    typical=st.sampled_from([1, 50, 2048]),
    mapped=st.booleans(),
)
@example(1, (12, 16), 2, 2500, 1.0, 10, unlike_tables, None, 1, True)
@example(3, (6, 16), 1, 2500, 0.05, 200, near_ties, None, 50, True)
@example(4, (3, 8), 4, 2500, 1.0, 5, one_wide_table, 0.99, 1, False)
def test_results_equal_brute_force(seed, shape, d, n, share, k, case, filtered, typical, mapped):
    rng = np.random.default_rng(seed)
    xq = rng.normal(size=(3, shape[0] * d)).astype(np.float32)
    Z, xq = case(unit(rng.normal(size=(*shape, d))), xq)
    distinct = max(1, int(share * n))
    rows = np.minimum((rng.pareto(1, n) * distinct / 4).astype(int), distinct - 1)
    codes = pack_codes(rng.integers(0, shape[1], (distinct, shape[0]))[rows], shape[1])
    ids = rng.permutation(3 * n)[:n] if seed % 3 else np.arange(n)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists, "_MIN_SUBLIST", typical)
        patch.setattr(lists, "_CACHE_BYTES", 0 if seed % 2 else 1 << 24)
        built = InvertedLists.build(codes, ids, Z)
        if mapped:
            crc = write_lists(Path(folder) / "i.lists", [Source(codes, ids)], Z)
            in_memory = built
            built, stored_crc = open_lists(Path(folder) / "i.lists")
            assert crc == stored_crc == in_memory.crc() == built.crc()
            pairs = zip(built.arrays, in_memory.arrays, strict=True)
            assert all(np.array_equal(array, expected) for array, expected in pairs)
        mask = np.ones(n, np.bool_)
        if filtered is not None:
            mask = rng.random(n) < filtered
            built = built.filtered(ids[~mask], deny=True)
        index = Index((built,), Z)
        assert index.ntotal == mask.sum()
        if index.ntotal == 0:
            return
        expected = padded_best(xq, codes[mask], Z, min(k, index.ntotal), ids[mask])
        assert same(index.search(xq, min(k, index.ntotal)), expected)
        least = float(expected[0][0, -1])
        assert same(index.range_search(xq, least), within(xq, codes[mask], Z, least, ids[mask]))


@pytest.mark.parametrize("together", [False, True])
def test_threads_and_batches_change_nothing(together, monkeypatch):
    monkeypatch.setattr(lists, "_CACHE_BYTES", 0 if together else 1 << 24)
    Z, codes, xq = books(12), random_codes(20_000, 12), queries(700, 48)
    xq[60:70] = 0  # all tie
    xq[70:80, :4] *= 1e4
    index = InvertedLists.build(codes, np.arange(20_000), Z)
    results = index.search(xq, 10, threads=1)
    assert same([array[:100] for array in results], best(xq[:100], codes, Z, 10))
    assert same(index.search(xq, 10, threads=2), results)
    assert same(index.search(xq[65:66], 10), [array[65:66] for array in results])


@pytest.mark.parametrize(("M", "K", "n", "Q"), [(4, 4, 100, 20_000), (3, 16, 3000, 5000)])
def test_first_threshold_is_reached(M, K, n, Q):
    """It is counted by rounded tables: one too many would lose the best of a few queries."""
    Z, codes, xq = books(M, K), random_codes(n, M, K), queries(Q, 4 * M)
    index = InvertedLists.build(codes, np.arange(n), Z)
    assert same(index.search(xq, 1), best(xq, codes, Z, 1))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), M=st.integers(1, 13), n=st.integers(1, 900))
def test_sorted_codes_are_recognised(seed, M, n):
    codes = random_codes(n, M, seed=seed, distinct=100)
    index = InvertedLists.build(codes, np.random.default_rng(seed).permutation(n), books(M))
    (sorted_codes, ids), *_ = index.blocks(n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "lexsort", None)  # must not be called
        again = InvertedLists.build(sorted_codes, ids, books(M))
    pairs = zip(again.arrays, index.arrays, strict=True)
    assert all(np.array_equal(array, expected) for array, expected in pairs)


# Files --------------------------------------------------------------------------------------------


def written(path, ids=None):
    codes = random_codes(3000, 6, distinct=1999)
    ids = np.random.default_rng(1).permutation(3000) if ids is None else ids
    sources = [Source(codes[:1000], ids[:1000]), Source(codes[1000:], ids[1000:])]
    write_lists(path, sources, books(6))
    return path


@pytest.mark.parametrize("ids", [None, np.arange(3000) << 32])
def test_safetensors_reads_the_file(ids, tmp_path):
    path = written(tmp_path / "i.lists", ids)
    built, _ = open_lists(path)
    with safe_open(path, "numpy") as file:
        assert same([file.get_tensor("codebooks")], [built.codebooks])
        for name in ("names", "ends", "blocks", "starts", "members"):
            array = getattr(built.arrays, name)
            assert same([file.get_tensor(name)], [array])
            assert array.flags.aligned


@pytest.mark.parametrize(("item", "message"), [(-1, "id -1"), (7, "id 7 occurs more than once")])
def test_wrong_ids_are_refused(item, message, tmp_path):
    ids = np.arange(3000)
    ids[2000] = item
    with pytest.raises(DataError, match=message):
        written(tmp_path / "i.lists", ids)


@pytest.mark.parametrize("damage", [b"", bytes(9), b"x" * 1000, "cut", "ends"])
def test_damaged_file_is_refused(damage, tmp_path):
    path = written(tmp_path / "i.lists")
    content = path.read_bytes()
    ends = open_lists(path)[0].arrays.ends.tobytes()
    if damage == "cut":
        damage = content[:-100]
    elif damage == "ends":
        damage = content.replace(ends, bytes(len(ends)))
    path.write_bytes(damage)
    with pytest.raises(DataError, match=r"i\.lists"):
        open_lists(path)


# Instructions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("processor", range(len(compiled.SHUFFLES)))
def test_every_processor_scans_as_the_plain_loop(processor, monkeypatch):
    name = compiled.SHUFFLES[processor][0]
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    if name not in [triple.partition("-")[0], *features.split(",")]:
        pytest.skip(f"this processor is not {name}")
    monkeypatch.setattr(compiled, "SHUFFLES", compiled.SHUFFLES[processor:])
    emitted = numba.extending.intrinsic(compiled.emit_scan)
    scan = numba.njit(lambda *arguments: emitted(*arguments))  # noqa: PLW0108
    rng = np.random.default_rng(processor)
    for T in (1, 2, 6, 40):
        for largest in (3, 254 // T, 255):
            blocks = rng.integers(0, 256, (2, T, 64), np.uint8)
            quantised = rng.integers(0, largest + 1, (2 * T, 16)).astype(np.uint8)
            first, base = int(rng.integers(T)), np.uint8(rng.integers(256))
            early = int(rng.integers(first, T + 1))
            expected = block_scan.scan_block(blocks, 1, quantised, base, first, early)
            assert scan(blocks, 1, quantised, base, first, early) == expected


WITHOUT_PRIVATE_PARTS = """
from numba.core import cgutils, options
del options.DefaultOptions._nrt, cgutils.for_range
import numpy as np
from index_factory import books, queries, random_codes, same, within
from gpq_faiss.indexes import block_scan
from gpq_faiss.indexes.index import Index
Z, codes, xq = books(12), random_codes(2000, 12), queries(1, 48)
results = Index.build(codes, Z).range_search(xq, 1.0)
assert same(results, within(xq, codes, Z, 1.0, np.arange(2000)))
assert block_scan._instructions() is None
"""


def test_search_needs_no_private_part_of_numba(tmp_path):
    # Not optimised, and not in the cache of the other tests.
    environment = os.environ | {"NUMBA_OPT": "0", "NUMBA_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = "tests:."
    subprocess.run([sys.executable, "-c", WITHOUT_PRIVATE_PARTS], check=True, env=environment)
