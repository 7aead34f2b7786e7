"""Threads of searches."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import faiss

_PER_THREAD = 64  # minimum queries per thread


def in_parallel(run: Callable[[slice], None], n: int, step: int, threads: int | None) -> None:
    """``run`` slices of 0..n, at most ``step`` long, in threads with one Faiss thread each.

    So numpy's part of a search is parallel as well. A single batch that is too small to split is left to Faiss.
    """
    before = int(faiss.omp_get_max_threads())
    workers = min(threads or before, os.cpu_count() or 1, max(1, n // _PER_THREAD))
    if workers == 1:
        faiss.omp_set_num_threads(threads or before)
        try:
            for start in range(0, n, step):
                run(slice(start, start + step))
        finally:
            faiss.omp_set_num_threads(before)
        return
    step = min(step, -(-n // workers))

    def one(start: int) -> None:
        faiss.omp_set_num_threads(1)  # for this thread only
        run(slice(start, start + step))

    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(one, range(0, n, step)):
            pass
