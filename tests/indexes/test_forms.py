"""Every form of an index file against brute force: in memory, in place, and by plain Faiss."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import faiss
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpq_faiss.build.shards import open_shard
from gpq_faiss.build.stream import build_index
from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.codes.scores import score_codes
from gpq_faiss.faissio import storage
from gpq_faiss.faissio.header import contents_of
from gpq_faiss.faissio.io import open_header
from gpq_faiss.faissio.storage import FORMS, WordLists, choose_P, first_words
from gpq_faiss.indexes import stored
from gpq_faiss.indexes.file import FileIndex, open_file
from gpq_faiss.indexes.filters import Allow, Deny
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.indexes.opening import open_in_memory


def unit(x: np.ndarray) -> np.ndarray:
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def draw(rng: np.random.Generator, M: int, d: int, n: int, distinct: int):
    """Codebooks, codes (few of them frequent), ids and queries that weigh the codebooks differently."""
    Z = unit(rng.normal(size=(M, 16, d)))
    few = rng.integers(0, 16, (distinct, M))
    codes = pack_codes(few[np.minimum((rng.pareto(1, n) * distinct / 4).astype(int), distinct - 1)], 16)
    xq = rng.normal(size=(3, M, d)) * 10.0 ** -rng.integers(0, 3, M)[:, None]
    return Z, codes, rng.permutation(3 * n)[:n] - 5, xq.reshape(3, -1).astype(np.float32)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    form=st.sampled_from(FORMS),
    M=st.sampled_from([2, 3, 5, 6, 12]),
    n=st.integers(1, 2500),
    share=st.floats(0.01, 1),
    k=st.integers(1, 100),
    own=st.booleans(),
    keep=st.sampled_from([None, 0.01, 0.5]),
    memory=st.sampled_from([300_000, 10_000_000]),
    typical=st.sampled_from([1, 50, 2048]),
)
@example(1, "ivf", 12, 2500, 1.0, 10, True, None, 300_000, 1)
@example(2, "ivf", 6, 2500, 0.05, 100, True, 0.5, 300_000, 1)
def test_every_form_gives_the_results_of_brute_force(
    seed: int,
    form: storage.Form,
    M: int,
    n: int,
    share: float,
    k: int,
    own: bool,
    keep: float | None,
    memory: int,
    typical: int,
) -> None:
    rng = np.random.default_rng(seed)
    Z, codes, ids, xq = draw(rng, M, 3, n, max(1, int(share * n)))
    ids = ids if own else np.arange(n)
    ids[ids == -1] = 10**9
    k = min(k, n)
    scores = score_codes(xq, codes, Z)
    where = None if keep is None else Allow(ids[rng.random(n) < keep])
    there = np.ones(n, np.bool_) if where is None else np.isin(ids, where.ids)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "_TYPICAL", typical)
        patch.setattr(stored, "_MOST_READ", 256)
        patch.setattr(stored, "_FIRST_READ", 128)
        patch.setattr(stored, "_KEPT", 2)
        index = MemoryIndex.build(codes, Z, ids if own else None)
        path = index.save(Path(folder) / "i.faiss", form)
        with open_file(path, memory) as placed:
            if memory == 300_000:  # a few pieces at a time
                placed.lists._room = placed.lists._piece
            for opened in (placed, open_in_memory(path)):
                D, found = opened.search(xq, k, where=where)
                for q in range(len(xq)):
                    rows = np.flatnonzero(there)
                    rows = rows[np.lexsort((ids[rows], -scores[q, rows]))]
                    best = rows[:k]
                    assert np.array_equal(found[q, : len(best)], ids[best])
                    assert np.array_equal(D[q, : len(best)], scores[q, best])
                    assert (found[q, len(best) :] == -1).all()
                    least = float(scores[q, rng.integers(n)])
                    reached = rows[scores[q, rows] >= least]
                    lims, own_scores, within = opened.range_search(xq[q : q + 1], least, where=where)
                    assert lims.tolist() == [0, len(reached)]
                    assert np.array_equal(within, ids[reached])
                    assert np.array_equal(own_scores, scores[q, reached])
            item = int(ids[rng.integers(n)])
            assert np.array_equal(placed.code_of(item), index.code_of(item))
            assert sorted(np.concatenate(list(placed.id_blocks(100))).tolist()) == sorted(ids.tolist())
            _check_bounded(placed, xq, k, ids, scores)
            _check_bounded(index, xq, k, ids, scores)


def _check_bounded(
    index: MemoryIndex | FileIndex, xq: np.ndarray, k: int, ids: np.ndarray, scores: np.ndarray
) -> None:
    """A search that stops early: right scores, and nothing outside of what was visited above the bound."""
    for nprobe in (1, 3, 10**6):
        D, found = index.search(xq, k, nprobe=nprobe)
        bound = index.bound(xq, k, nprobe)
        for q in range(len(xq)):
            order = np.lexsort((ids, -scores[q]))
            row = {int(item): at for at, item in enumerate(ids.tolist())}
            assert (found[q] != -1).all()
            assert np.array_equal(D[q], scores[q, [row[int(item)] for item in found[q]]])
            assert (np.diff(D[q]) <= 0).all()
            above = [i for i in order[:k].tolist() if scores[q, i] > bound[q]]
            assert set(ids[above].tolist()) <= set(found[q].tolist())
            if D[q, -1] > bound[q]:
                assert np.array_equal(found[q], ids[order[:k]])
        if nprobe == 10**6:
            assert np.isneginf(bound).all()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    M=st.sampled_from([1, 2, 3, 5, 12]),
    d=st.integers(1, 7),
    n=st.integers(0, 800),
    equal=st.booleans(),
    typical=st.sampled_from([1, 50]),
)
def test_lists_are_read_as_they_were_written(
    seed: int, M: int, d: int, n: int, equal: bool, typical: int
) -> None:
    """From a file by Faiss, and in place; also where codewords are equal, so that they cannot name a list."""
    rng = np.random.default_rng(seed)
    Z, codes, ids, _ = draw(rng, M, d, max(1, n), 200)
    codes, ids = codes[:n], ids[:n]
    ids[ids == -1] = 10**9
    if equal:
        Z[rng.integers(M), 3] = Z[rng.integers(M), 5] = unit(np.ones(d))
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "_TYPICAL", typical)
        path = Path(folder) / "i.faiss"
        faiss.write_index(storage.faiss_index(codes, ids, Z, "ivf"), str(path))
        layout = contents_of(faiss.read_index(str(path)))
        assert np.array_equal(layout.header.codebooks, Z)
        found, own = np.argsort(layout.ids), np.argsort(ids)
        assert np.array_equal(layout.codes[found], codes[own])
        assert np.array_equal(layout.ids[found], ids[own])
        header, _ = open_header(path, verify=False)
        with closing(header.source):
            assert np.array_equal(header.codebooks, Z)
            held = [header.codes(i, 0, int(size)) for i, size in enumerate(header.sizes)]
            assert np.array_equal(np.concatenate(held), layout.codes)
        if n:
            build_index([open_shard(path, Z, "", "")], Path(folder) / "again.faiss", Z, "ivf")
            assert (Path(folder) / "again.faiss").read_bytes() == path.read_bytes()


def test_lists_are_named_by_as_many_codewords_as_leave_large_ones() -> None:
    rng = np.random.default_rng(0)
    Z = unit(rng.normal(size=(6, 16, 4)))
    counts = np.zeros(16**4, np.int64)
    counts[rng.integers(0, 16**4, 3000)] = 1
    assert choose_P(counts, 6, Z) == 1
    assert choose_P(100_000 * counts, 6, Z) == 4
    assert choose_P(100_000 * counts[:16], 2, Z) == 1
    assert choose_P(np.array([5]), 1, Z[:1]) == 0
    Z[1, 3] = Z[1, 5]
    assert choose_P(100_000 * counts, 6, Z) == 1
    lists = WordLists.of(100_000 * counts, unit(rng.normal(size=(6, 16, 4))))
    codes = pack_codes(rng.integers(0, 16, (50, 6)), 16)
    assert np.array_equal(lists.words[:16], np.repeat(np.arange(16)[:, None], 4, axis=1))
    known = np.flatnonzero(lists.list_of(codes) >= 0)
    assert np.array_equal(lists.keys[lists.list_of(codes)[known]], first_words(codes, 6, 4)[known])


ALONE = """
import sys, faiss, numpy as np
index = faiss.read_index(sys.argv[1])
D, I = index.search(np.load(sys.argv[2]), 10)
np.save(sys.argv[3], I)
assert not any(name.startswith("gpq") for name in sys.modules)
"""


def test_plain_faiss_searches_the_lists_without_this_package(tmp_path: Path) -> None:
    """Recall of the default ``nprobe`` on codes as a class model makes them; with all lists only FastScan's rounding is left."""
    rng = np.random.default_rng(1)
    n, M = 60_000, 12
    classes = rng.integers(0, 16, (10, 4))
    words = np.concatenate([classes[rng.integers(0, 10, n)], rng.integers(0, 16, (n, 8))], axis=1)
    changed = rng.random(words.shape) < 0.05
    words[changed] = rng.integers(0, 16, int(changed.sum()))
    Z = unit(rng.normal(size=(M, 16, 12)))
    weight = np.array([0.8, 0.45, 0.26, 0.15, *np.linspace(0.026, 0.01, 8)])
    xq = (rng.normal(size=(50, M, 12)) * weight[:, None]).reshape(50, -1).astype(np.float32)
    index = MemoryIndex.build(pack_codes(words, 16), Z)
    truth = index.search(xq, 10)[0][:, -1:]
    path = index.save(tmp_path / "i.faiss", "ivf")
    np.save(tmp_path / "q.npy", xq)
    subprocess.run(
        [sys.executable, "-c", ALONE, path, tmp_path / "q.npy", tmp_path / "found.npy"],
        check=True,
        cwd=tmp_path,
    )

    def recall(found: np.ndarray) -> float:
        scores = score_codes(xq, index.codes, Z)
        return float((np.take_along_axis(scores, found, axis=1) >= truth).mean())

    assert recall(np.load(tmp_path / "found.npy")) > 0.85
    plain = faiss.read_index(str(path))
    lists = faiss.extract_index_ivf(plain)
    lists.nprobe = lists.nlist
    assert recall(plain.search(xq, 10)[1]) > 0.95
    flat = faiss.IndexPQFastScan(faiss.read_index(str(index.save(tmp_path / "flat.faiss"))))
    assert recall(flat.search(xq, 10)[1]) < recall(plain.search(xq, 10)[1])


def test_a_filter_reads_only_the_lists_that_are_visited(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    Z, codes, _, xq = draw(rng, 6, 4, 40_000, 40_000)
    xq *= np.repeat([1, 1, *[0.01] * 4], 4).astype(np.float32)
    path = MemoryIndex.build(codes, Z).save(tmp_path / "i.faiss", "ivf")
    with open_file(path) as index:
        index.search(xq[:1], 5, where=Deny([0, 1]))
        read = index.lists._at >= 0
        assert 0 < read.sum() < index.lists.lists / 2
        seen: list[int] = []
        index.search(xq[:1], 5, where=lambda ids: seen.extend(ids.tolist()) or ids > 1)
        assert 0 < len(seen) == len(set(seen)) < index.ntotal / 2
