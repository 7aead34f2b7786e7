"""Lists made of codewords: how they are chosen, stored and visited. Their answers are in test_answers.py."""

import itertools
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import faiss
import numba
import numpy as np
import pytest
from gpq_faiss.build.shards import open_shard
from gpq_faiss.build.stream import build_index
from gpq_faiss.faissio.header import contents_of
from gpq_faiss.faissio.io import open_header
from gpq_faiss.faissio.storage import WordLists, choose_P, first_words
from gpq_faiss.indexes.codeword_lists import CodewordLists, grouped
from gpq_faiss.indexes.file import open_file
from gpq_faiss.indexes.filters import Deny
from gpq_faiss.indexes.memory import MemoryIndex
from hypothesis import given, settings
from hypothesis import strategies as st
from index_factory import best, books, queries, random_codes, same, score_codes, unit
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from gpq_faiss import files
from gpq_faiss.codes.bits import pack_codes, unpack_codes
from gpq_faiss.errors import UsageError
from gpq_faiss.faissio import storage
from gpq_faiss.faissio.model import ModelHeader
from gpq_faiss.indexes import codeword_lists, near


def of_classes(n):
    """Codes of a class model, uint8 [n, 6]: 4 codebooks decide, and the items of a class are alike in them."""
    rng = np.random.default_rng(1)
    classes = rng.integers(0, 16, (10, 4))
    words = np.concatenate([classes[rng.integers(0, 10, n)], rng.integers(0, 16, (n, 8))], axis=1)
    changed = rng.random(words.shape) < 0.05
    words[changed] = rng.integers(0, 16, int(changed.sum()))
    return pack_codes(words, 16)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), M=st.integers(2, 13), n=st.integers(1, 2000))
def test_grouped_codes_are_in_the_order_of_their_codewords(seed, M, n):
    rng = np.random.default_rng(seed)
    codes = pack_codes(rng.integers(0, 16, (max(1, n // 3), M)) & rng.integers(0, 16, M), 16)
    codes = codes[rng.integers(0, len(codes), n)]
    order, starts = grouped(codes)
    rows, distinct = codes[order[starts]], np.unique(codes, axis=0)
    assert np.array_equal(rows, distinct[np.lexsort(unpack_codes(distinct, M, 16).T[::-1])])
    for first, last in zip(starts.tolist(), [*starts[1:].tolist(), n], strict=True):
        assert (codes[order[first:last]] == codes[order[first]]).all()
        assert (np.diff(order[first:last]) > 0).all()


@pytest.mark.parametrize("processor", range(len(near._SHUFFLES)))
def test_codes_are_near_up_to_254_steps_on_every_processor(processor, monkeypatch):
    """Against sums in integers, with the instructions of each processor that this one has."""
    what = near._SHUFFLES[processor][0]
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    if what and what not in [triple.partition("-")[0], *features.split(",")]:
        pytest.skip(f"this processor is not {what}")
    monkeypatch.setattr(near, "_SHUFFLES", near._SHUFFLES[processor:])
    test = intrinsic(near._near)

    @numba.njit
    def passed(*arguments):
        return test(*arguments)

    rng = np.random.default_rng(processor)
    for T in (1, 2, 3, 6, 40):
        for most in (3, 254 // T, 255):
            codes, steps = (
                rng.integers(0, 256, (300, T), np.uint8),
                rng.integers(0, most + 1, (2 * T, 16)).astype(np.uint8),
            )
            blocks = np.zeros((7, T, near.BLOCK), np.uint8)
            cuts = [0, *sorted(rng.integers(0, 300, 3).tolist()), 300]
            for first, last in itertools.pairwise(cuts):
                near.put(blocks, first + 70, codes[first:last])
            first, base = rng.integers(T), rng.integers(256)
            sums = base + sum(
                steps[2 * t + half, codes[:, t] >> 4 * half & 15].astype(int)
                for t in range(first, T)
                for half in range(2)
            )
            bits = [
                passed(blocks, block, steps, np.uint8(base), first, rng.integers(first, T + 1))
                for block in range(7)
            ]
            found = np.array([each >> lane & 1 for each in bits for lane in range(64)])
            assert np.array_equal(found[70:370], sums < 255)


@pytest.mark.parametrize(("M", "K", "n", "Q"), [(4, 4, 100, 20_000), (3, 16, 3000, 5000)])
def test_the_threshold_to_begin_with_is_reached(M, K, n, Q):
    """It is counted in rounded steps: one too many would lose the best item of a few queries in ten thousand."""
    Z, codes, xq = books(M, K), random_codes(n, M, K), queries(Q, 4 * M)
    assert same(CodewordLists(codes, Z).search(xq, 1), best(xq, codes, Z, 1))


def test_only_few_codes_are_visited_where_the_first_codebooks_decide():
    weights = np.repeat([0.8, 0.5, 0.3, 0.2, *[0.02] * 8], 3).astype(np.float32)
    index = CodewordLists(of_classes(100_000), books(12, d=3))
    index.search(queries(3, 36) * weights, 10)
    assert index.searched == 3
    assert 0 < index.scored < 0.1 * 3 * index.distinct


@pytest.mark.parametrize(("K", "many"), [(16, None), (8, None), (16, 0)])
def test_codes_without_structure_are_searched_as_exactly(K, many, monkeypatch):
    """Also where queries that reach many codes visit them together."""
    together = []
    if many is not None:
        visit = CodewordLists._together
        monkeypatch.setattr(codeword_lists, "_MANY", many)
        monkeypatch.setattr(CodewordLists, "_together", lambda *a: together.append(len(a[1])) or visit(*a))
    Z, codes, xq = books(12, K), random_codes(20_000, 12, K), queries(80, 48)
    xq[60:70] = 0  # all tie
    xq[70:, :4] *= 1e4
    index = CodewordLists(codes, Z)
    assert same(index.search(xq, 10, threads=1), best(xq, codes, Z, 10))
    mask = np.full(len(codes), True)
    mask[best(xq[:60], codes, Z, 200)[1]] = False
    expected = best(xq[:60], codes[mask], Z, 10, mask.nonzero()[0])
    assert same(index.search(xq[:60], 10, mask=mask), expected)
    assert (sum(together) > 60) == (many == 0)


@pytest.mark.parametrize("form", storage.FORMS)
def test_long_runs_of_codes_that_begin_alike_are_passed_over_as_exactly(form, tmp_path):
    """In memory, and in place, where only kind ivf is in order."""
    rng = np.random.default_rng(7)
    words = rng.integers(0, 16, (20_000, 12))
    for columns, kinds in ((slice(4), 2), (slice(4, 6), 8)):
        words[:, columns] = words[rng.integers(0, kinds, 20_000), columns]
    words[rng.random(20_000) < 0.01] = 3
    Z, codes, xq = books(12), pack_codes(words, 16), queries(50, 48)
    index = MemoryIndex.build(codes, Z, rng.permutation(20_000))
    expected = best(xq, index.codes, Z, 10)
    with open_file(index.save(tmp_path / "i.faiss", form), 10_000_000) as placed:
        for one in (index, placed):
            assert same(one.search(xq, 10), expected)


def test_the_run_behind_one_that_is_passed_over_is_searched():
    """Runs of 512 codes, which begin and end with a block, one of which has all results."""
    words = np.zeros((16 * 512, 12), np.int64)
    words[:, 4] = np.arange(len(words)) // 512
    words[:, 8:] = np.random.default_rng(7).permutation(1 << 16)[: len(words), None] >> [0, 4, 8, 12] & 15
    Z, codes, xq = books(12), pack_codes(words, 16), queries(50, 48)
    xq[:, 16:20] *= 20
    assert same(CodewordLists(codes, Z).search(xq, 10), best(xq, codes, Z, 10))


def test_arguments_that_cannot_be_are_refused():
    index = CodewordLists(random_codes(100, 4), books(4))
    for floor in (np.zeros(2, np.float32), np.zeros((3, 1), np.float32), np.float32(0)):
        with pytest.raises(UsageError, match="one score for each of the 3 queries"):
            index.search(queries(3, 16), 1, floor=floor)
    with pytest.raises(UsageError, match="too many for one search in memory"):
        CodewordLists(np.broadcast_to(np.zeros((1, 2), np.uint8), (1 << 32, 2)), books(3))


# In files -------------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    M=st.sampled_from([1, 2, 3, 5, 12]),
    d=st.integers(1, 7),
    n=st.integers(0, 800),
    equal=st.booleans(),
    typical=st.sampled_from([1, 50]),
)
def test_lists_are_read_as_they_were_written(seed, M, d, n, equal, typical):
    """From a file by Faiss, and in place; also where codewords are equal, so that they cannot name a list."""
    rng = np.random.default_rng(seed)
    Z, codes = unit(rng.normal(size=(M, 16, d))), random_codes(max(1, n), M, seed=seed, distinct=200)[:n]
    ids = rng.permutation(3 * n)[:n] + 5
    if equal:
        Z[rng.integers(M), 3] = Z[rng.integers(M), 5] = unit(np.ones(d))
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "fsync", lambda path: None)
        patch.setattr(storage, "_TYPICAL", typical)
        path = Path(folder) / "i.faiss"
        faiss.write_index(storage.faiss_index(codes, ids, Z, "ivf"), str(path))
        held = contents_of(faiss.read_index(str(path)))
        assert np.array_equal(held.header.codebooks, Z)
        found, own = np.argsort(held.ids), np.argsort(ids)
        assert np.array_equal(held.codes[found], codes[own])
        assert np.array_equal(held.ids[found], ids[own])
        header, _ = open_header(path, verify=False)
        with closing(header.source):
            parts = [header.codes(i, 0, int(size)) for i, size in enumerate(header.sizes)]
            assert np.array_equal(np.concatenate(parts), held.codes)
        if n:
            again = build_index(
                [open_shard(path, ModelHeader(path, Z, ""))], Path(folder) / "again.faiss", "ivf"
            )
            assert again.read_bytes() == path.read_bytes()


def test_lists_are_named_by_as_many_codewords_as_leave_large_ones():
    rng = np.random.default_rng(0)
    Z = books(6)
    counts = np.zeros(16**4, np.int64)
    counts[rng.integers(0, 16**4, 3000)] = 1
    assert choose_P(counts, 6, Z) == 1
    assert choose_P(100_000 * counts, 6, Z) == 4
    assert choose_P(100_000 * counts[:16], 2, Z) == 1
    assert choose_P(np.array([5]), 1, Z[:1]) == 0
    lists, codes = WordLists.of(100_000 * counts, Z), random_codes(50, 6)
    assert np.array_equal(lists.words[:16], np.repeat(np.arange(16)[:, None], 4, axis=1))
    known = np.flatnonzero(lists.list_of(codes) >= 0)
    assert np.array_equal(lists.keys[lists.list_of(codes)[known]], first_words(codes, 4)[known])
    Z[1, 3] = Z[1, 5]
    assert choose_P(100_000 * counts, 6, Z) == 1


ALONE = """
import sys, faiss, numpy as np
index = faiss.read_index(sys.argv[1])
D, I = index.search(np.load(sys.argv[2]), 10)
np.save(sys.argv[3], I)
assert not any(name.startswith("gpq") for name in sys.modules)
"""


def test_plain_faiss_searches_the_lists_without_this_package(tmp_path):
    """Recall of the default ``nprobe`` on codes as a class model makes them; with all lists only FastScan's rounding is left."""
    Z, weights = books(12, d=12), np.array([0.8, 0.45, 0.26, 0.15, *np.linspace(0.026, 0.01, 8)])
    xq = (queries(50, 144).reshape(50, 12, 12) * weights[:, None]).reshape(50, -1).astype(np.float32)
    index = MemoryIndex.build(of_classes(60_000), Z)
    truth = index.search(xq, 10)[0][:, -1:]
    path = index.save(tmp_path / "i.faiss", "ivf")
    np.save(tmp_path / "q.npy", xq)
    names = [path, tmp_path / "q.npy", tmp_path / "found.npy"]
    subprocess.run([sys.executable, "-c", ALONE, *names], check=True, cwd=tmp_path)

    def recall(found):
        scores = score_codes(xq, index.codes, Z)
        return float((np.take_along_axis(scores, found, axis=1) >= truth).mean())

    assert recall(np.load(tmp_path / "found.npy")) > 0.85
    plain = faiss.read_index(str(path))
    lists = faiss.extract_index_ivf(plain)
    lists.nprobe = lists.nlist
    assert recall(plain.search(xq, 10)[1]) > 0.95
    flat = index.to_faiss("fastscan")
    assert recall(flat.search(xq, 10)[1]) < recall(plain.search(xq, 10)[1])


def test_a_filter_reads_only_the_lists_that_are_visited(tmp_path):
    xq = queries(1, 24) * np.repeat([1, 1, *[0.01] * 4], 4).astype(np.float32)
    path = MemoryIndex.build(random_codes(40_000, 6), books(6)).save(tmp_path / "i.faiss", "ivf")
    with open_file(path) as index:
        index.search(xq, 5, where=Deny([0, 1]))
        read = index.lists._at >= 0
        assert 0 < read.sum() < index.lists.lists / 2
        seen = []
        index.search(xq, 5, where=lambda ids: seen.extend(ids.tolist()) or ids > 1)
        assert 0 < len(seen) == len(set(seen)) < index.ntotal / 2
