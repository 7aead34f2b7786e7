"""Every index against brute force: any codes, tables, ids, filters, forms and budgets, in memory and in place."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from index_factory import same, score_codes, unit

from gpq_faiss import files
from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.errors import DataError
from gpq_faiss.faissio import storage
from gpq_faiss.faissio.storage import FORMS
from gpq_faiss.indexes import codeword_lists, stored
from gpq_faiss.indexes.file import open_file
from gpq_faiss.indexes.filters import Allow, Deny
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.indexes.opening import open_in_memory

CASES = ["plain", "equal tables", "one wide table", "unlike", "near ties", "zeros", "zero", "huge", "tiny"]

FILTERS = {
    "allow": lambda ids, kept: Allow(np.append(ids[kept], 10**15)),  # which is unknown
    "deny": lambda ids, kept: Deny(set(ids[~kept].tolist())),
    "array": lambda ids, kept: ids[kept],
    "tuple": lambda ids, kept: tuple(ids[kept].tolist()),
    "function": lambda ids, kept: lambda some: np.isin(some, ids[kept]),
}


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
    form=st.sampled_from(FORMS),
    M=st.sampled_from([1, 2, 3, 5, 6, 12, 17]),
    K=st.sampled_from([4, 8, 16, 16, 16, 16, 16, 64, 256]),
    d=st.integers(1, 5),
    n=st.integers(1, 2500),
    share=st.floats(0.01, 1),
    k=st.integers(1, 200),
    case=st.sampled_from(CASES),
    own=st.sampled_from(["none", "ascending", "any"]),
    keep=st.sampled_from([None, 0.0, 0.01, 0.5, 0.99]),
    by=st.sampled_from(sorted(FILTERS)),
    memory=st.sampled_from([300_000, 10_000_000]),
    typical=st.sampled_from([1, 50, 2048]),
)
@example(1, "ivf", 12, 16, 2, 2500, 1.0, 10, "unlike", "any", None, "deny", 300_000, 1)
@example(2, "ivf", 12, 16, 2, 2500, 1.0, 10, "zero", "any", 0.5, "function", 300_000, 1)
@example(3, "ivf", 6, 16, 1, 2500, 0.05, 200, "near ties", "none", None, "allow", 300_000, 50)
@example(4, "flat", 3, 8, 4, 2500, 1.0, 5, "one wide table", "any", 0.99, "allow", 300_000, 1)
@example(5, "fastscan", 12, 16, 2, 2500, 1.0, 5, "plain", "ascending", None, "allow", 10_000_000, 50)
def test_every_index_gives_the_results_of_brute_force(
    seed, form, M, K, d, n, share, k, case, own, keep, by, memory, typical
):
    rng = np.random.default_rng(seed)
    Z, codes, xq = make(rng, M, K, d, n, max(1, int(share * n)), case)
    form = form if K == 16 and (M > 1 or form != "fused") else "flat"
    ids = {"none": np.arange(n), "ascending": np.arange(n) * 3, "any": rng.permutation(3 * n)[:n] - 5}[own]
    ids[ids == -1] = 10**9
    k = min(k, n)
    scores = score_codes(xq, codes, Z)
    kept = np.ones(n, np.bool_) if keep is None else rng.random(n) < keep
    where = None if keep is None else FILTERS[by](ids, kept)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "fsync", lambda path: None)
        patch.setattr(storage, "_TYPICAL", typical)
        patch.setattr(stored, "_MOST_READ", 256)
        patch.setattr(stored, "_FIRST_READ", 128)
        patch.setattr(stored, "_KEPT", 2)
        patch.setattr(codeword_lists, "_MANY", 0 if seed % 2 else 1 << 24)
        built = MemoryIndex.build(codes, Z, None if own == "none" else ids)
        path = built.save(Path(folder) / "i.faiss", form)
        with open_file(path, memory) as placed:
            if memory == 300_000:  # a few pieces at a time
                placed.lists._room = placed.lists._piece
            index = open_in_memory(path)
            least = [float(scores[q, rng.integers(n)]) for q in range(len(xq))]
            for opened in (placed, index):
                check_exact(opened, xq, k, ids, scores, where, kept, least)
                check_bounded(opened, xq, k, ids, scores)
            item = int(ids[rng.integers(n)])
            assert np.array_equal(placed.code_of(item), index.code_of(item))
            assert sorted(np.concatenate(list(placed.id_blocks(100))).tolist()) == sorted(ids.tolist())


def check_exact(index, xq, k, ids, scores, where, kept, least):
    D, found = index.search(xq, k, where=where)
    # What does not reach these scores is not missed.
    assert same(index.search(xq, k, where=where, floor=D[:, -1].copy()), (D, found))
    for q in range(len(xq)):
        rows = np.flatnonzero(kept)
        rows = rows[np.lexsort((ids[rows], -scores[q, rows]))]
        top = rows[:k]
        assert np.array_equal(found[q, : len(top)], ids[top])
        assert np.array_equal(D[q, : len(top)], scores[q, top])
        assert (found[q, len(top) :] == -1).all()
        assert np.isneginf(D[q, len(top) :]).all()
        assert same(index.search(xq[q : q + 1], k, where=where), (D[q : q + 1], found[q : q + 1]))
        reached = rows[scores[q, rows] >= least[q]]
        lims, within, which = index.range_search(xq[q : q + 1], least[q], where=where, limit=len(reached))
        assert (lims.tolist(), lims.dtype, which.dtype) == ([0, len(reached)], np.int64, np.int64)
        assert np.array_equal(which, ids[reached])
        assert np.array_equal(within, scores[q, reached])
        if len(reached):
            with pytest.raises(DataError, match=f"more than {len(reached) - 1:,} results"):
                index.range_search(xq[q : q + 1], least[q], where=where, limit=len(reached) - 1)
    for bound, count in ((np.inf, 0), (1e39, 0), (-1e39, kept.sum()), (-np.inf, kept.sum())):
        assert np.array_equal(np.diff(index.range_search(xq, bound, where=where)[0]), [count] * len(xq))


def check_bounded(index, xq, k, ids, scores):
    """A search that stops early: right scores, and nothing outside of what was visited above the bound."""
    by_id = np.argsort(ids)
    for nprobe in (1, 3, 10**6):
        D, found = index.search(xq, k, nprobe=nprobe)
        bound = index.bound(xq, k, nprobe)
        assert (found != -1).all()
        rows = by_id[np.searchsorted(ids[by_id], found)]
        assert np.array_equal(D, np.take_along_axis(scores, rows, axis=1))
        assert (np.diff(D) <= 0).all()
        for q in range(len(xq)):
            order = np.lexsort((ids, -scores[q]))[:k]
            assert set(ids[order[scores[q, order] > bound[q]]].tolist()) <= set(found[q].tolist())
            if D[q, -1] > bound[q]:
                assert np.array_equal(found[q], ids[order])
    assert np.isneginf(bound).all()
