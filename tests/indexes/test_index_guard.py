"""A file gives the same ids, scores and ties in memory and in place, whatever it holds and however it is read."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.faissio.storage import STORAGES, Storage
from gpq_faiss.indexes.file import open_file
from gpq_faiss.indexes.lists import IvfSettings
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.indexes.opening import open_in_memory
from gpq_faiss.indexes.plan import Plan


def same(found: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.tolist() == theirs.tolist()


@settings(max_examples=120, deadline=None)
@given(
    storage=st.sampled_from(list(STORAGES.values())),
    M=st.integers(1, 9),
    n=st.integers(1, 1500),
    distinct=st.sampled_from([1, 3, 40, 10**6]),
    numbered=st.sampled_from(["positions", "ascending", "any"]),
    k=st.integers(1, 80),
    nprobe=st.integers(1, 12),
    queries=st.integers(1, 9),
    scale=st.sampled_from([1.0, 0.0, 1e-30, 1e20]),
    keep=st.sampled_from([None, 0.0, 0.1, 0.9]),
    rows=st.sampled_from([None, 384, 1000]),
    threads=st.integers(1, 2),
    seed=st.integers(0, 2**20),
)
@example(
    # so many that the shortlist has to prove its answer, and in several blocks
    storage=Storage("fastscan"),
    M=6,
    n=30_000,
    distinct=300,
    numbered="any",
    k=50,
    nprobe=1,
    queries=9,
    scale=1.0,
    keep=None,
    rows=9000,
    threads=2,
    seed=0,
)
def test_memory_and_file_are_one_index(
    storage: Storage,
    M: int,
    n: int,
    distinct: int,
    numbered: str,
    k: int,
    nprobe: int,
    queries: int,
    scale: float,
    keep: float | None,
    rows: int | None,
    threads: int,
    seed: int,
) -> None:
    M = max(2, M) if storage.packing == "bytes" else M
    rng = np.random.default_rng(seed)
    Z = rng.normal(size=(M, 16, 4))
    Z = (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)
    few = rng.integers(0, 16, (min(n, distinct), M))
    codes = pack_codes(few[rng.integers(0, len(few), n)], 16)
    own = None if numbered == "positions" else np.arange(n) * 3 - 7 + 2 * (np.arange(n) > 1)
    ids = rng.permutation(own) if own is not None and numbered == "any" else own
    xq = (rng.normal(size=(queries, M * 4)) * scale).astype(np.float32)
    plan = Plan("ivf" if storage.lists else "exact", storage.packing)
    settings_ = IvfSettings(lists=min(9, n), nprobe=nprobe)
    made = MemoryIndex.build(codes, Z, ids, kind=plan, ivf=settings_)
    every = np.arange(n) if ids is None else ids
    where = None if keep is None else every[rng.random(n) < keep]
    k = min(k, n)
    with tempfile.TemporaryDirectory() as folder:
        path = made.save(Path(folder) / "i.faiss", storage)
        memory = open_in_memory(path)
        assert memory.plan.storage(M).lists == storage.lists
        with open_file(path, "100MB", rows=rows) as file:
            expected = memory.search(xq, k, where=where, threads=threads)
            same(made.search(xq, k, where=where), expected)
            same(file.search(xq, k, where=where, threads=threads), expected)
            same(file.search(xq, k, where=where, block=2), expected)  # also what blocks are kept of before
            least = (
                float(np.median(expected[0][np.isfinite(expected[0])]))
                if np.isfinite(expected[0]).any()
                else 1.0
            )
            ranges = memory.range_search(xq, least, where=where)
            same(file.range_search(xq, least, where=where), ranges)
            if storage.lists:
                same(file.search(xq, k, nprobe=1), memory.search(xq, k, nprobe=1))
                flat = MemoryIndex.build(codes, Z, ids, kind="flat")
                same(file.search(xq, k, nprobe=n, where=where), flat.search(xq, k, where=where))
