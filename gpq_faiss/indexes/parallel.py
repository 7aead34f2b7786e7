"""Threads for searches."""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import faiss

QUERIES = 16
"""Minimum number of queries per thread: waking a thread takes some 100 microseconds."""
_CORES = os.cpu_count() or 1  # counted once: Python reads a file to count them


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Return a pool of threads that stay alive, as those of Faiss do.

    Starting a thread takes longer than many a search. A forked process gets a pool of its own.
    """
    return ThreadPoolExecutor(_CORES, f"gpq-search-{process}")


def thread_count(queries: int, threads: int | None) -> int:
    """Return the number of threads for so many queries.

    It is at most ``threads`` (default: Faiss' setting).
    """
    useful = queries // QUERIES
    if useful < 2:
        return 1
    return min(threads or faiss.omp_get_max_threads(), _CORES, useful)


def in_parallel(run: Callable[..., None], arrays: Sequence[Any], threads: int) -> None:
    """Call ``run`` on blocks of up to 256 rows of all arrays, in several threads.

    The calling thread is one of them. An error in one thread stops the others, and is raised.
    """
    n = len(arrays[0])
    step = min(256, -(-n // threads))
    starts = iter(range(0, n, step))

    def work() -> None:
        try:
            for start in starts:
                run(*[array[start : start + step] for array in arrays])
        except BaseException:
            collections.deque(starts, 0)  # leaves nothing for the other threads
            raise

    futures = [_pool(os.getpid()).submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:  # cancel first: searches could wait for each other's threads for ever
        futures = [future for future in futures if not future.cancel()]
        wait(futures)
    for future in futures:
        future.result()
