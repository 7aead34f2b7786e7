"""Threads of searches."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import faiss


def in_parallel(
    run: Callable[[slice], None], n: int, step: int, threads: int | None, per_thread: int = 64
) -> None:
    """``run`` slices of 0..n, at most ``step`` long, in threads with one Faiss thread each, of which this is one.

    So numpy's part of a search is parallel as well. A batch of less than ``per_thread`` for each of two is left to Faiss.
    """
    before = int(faiss.omp_get_max_threads())
    workers = min(threads or before, os.cpu_count() or 1, max(1, n // per_thread))
    step = min(step, -(-n // workers))
    starts = iter(range(0, n, step))

    def work(own: int) -> None:
        faiss.omp_set_num_threads(own)  # for this thread only
        try:
            for start in starts:
                run(slice(start, start + step))
        except BaseException:
            collections.deque(starts, 0)  # the other threads have nothing left
            raise

    try:
        if workers == 1:
            work(threads or before)
            return
        with ThreadPoolExecutor(workers - 1) as pool:
            others = [pool.submit(work, 1) for _ in range(workers - 1)]
            work(1)
            for other in others:
                other.result()
    finally:
        faiss.omp_set_num_threads(before)
