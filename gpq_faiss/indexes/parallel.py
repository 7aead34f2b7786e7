"""Threads of searches."""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import faiss

QUERIES = 16
"""Minimum number of queries per thread: waking one takes some 100 microseconds."""
_CORES = os.cpu_count() or 1  # counted once, as the system reads a file to count them


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Return threads that stay, as those of Faiss do; a forked process has its own.

    Starting a thread takes longer than many a search.
    """
    return ThreadPoolExecutor(_CORES, f"gpq-search-{process}")


def thread_count(queries: int, threads: int | None) -> int:
    """Return how many threads answer the queries: at most ``threads`` (default: Faiss' setting)."""
    useful = queries // QUERIES
    if useful < 2:
        return 1
    return min(threads or faiss.omp_get_max_threads(), _CORES, useful)


def in_parallel(run: Callable[..., None], arrays: Sequence[Any], threads: int) -> None:
    """Call ``run`` with the same rows of all arrays, up to 256 of them, in so many threads.

    The calling thread is one of them. An error in one thread ends the others, and is raised.
    """
    n = len(arrays[0])
    step = min(256, -(-n // threads))
    starts = iter(range(0, n, step))

    def work() -> None:
        try:
            for start in starts:
                run(*[array[start : start + step] for array in arrays])
        except BaseException:
            collections.deque(starts, 0)  # nothing is left for the other threads
            raise

    futures = [_pool(os.getpid()).submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:  # searches that wait for each other's threads would wait for ever, so cancel first
        futures = [future for future in futures if not future.cancel()]
        wait(futures)
    for future in futures:
        future.result()
