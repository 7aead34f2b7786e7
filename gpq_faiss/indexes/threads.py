"""Threads of searches."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import faiss

_PER_THREAD = 64  # minimum queries per thread


@contextlib.contextmanager
def omp_threads(threads: int | None) -> Iterator[None]:
    """Context in which Faiss uses ``threads`` (None: unchanged). The setting is process-wide and restored."""
    if threads is None:
        yield
        return
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(threads)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def in_parallel(run: Callable[[slice], None], n: int, step: int, threads: int | None) -> None:
    """``run`` slices of 0..n, at most ``step`` long, in threads with one Faiss thread each.

    So numpy's part of a search is parallel as well. A single batch that is too small to split is left to Faiss.
    """
    workers = min(threads or int(faiss.omp_get_max_threads()), os.cpu_count() or 1, max(1, n // _PER_THREAD))
    if workers == 1:
        with omp_threads(threads):
            for start in range(0, n, step):
                run(slice(start, start + step))
        return
    step = min(step, -(-n // workers))

    def one(start: int) -> None:
        faiss.omp_set_num_threads(1)  # for this thread only
        run(slice(start, start + step))

    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(one, range(0, n, step)):
            pass
