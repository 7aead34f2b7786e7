"""Threads of a search."""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import faiss

QUERIES_PER_THREAD = 16
"""Minimum number of queries per thread: waking a thread takes some 100 microseconds."""
_CORES = os.cpu_count() or 1  # counted once, as the system reads a file to count them


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Return threads that are kept: starting one takes longer than many a search.

    A forked process has its own.
    """
    return ThreadPoolExecutor(_CORES, f"gpq-search-{process}")


def number_of_threads(queries: int, threads: int | None) -> int:
    """Return how many threads search for ``queries``, at most ``threads`` (default: Faiss' setting)."""
    most = queries // QUERIES_PER_THREAD
    return 1 if most < 2 else min(threads or faiss.omp_get_max_threads(), _CORES, most)


def run_parallel(
    function: Callable[..., None], arrays: Sequence[Any], threads: int, step: int = 256
) -> None:
    """Call ``function`` with the same rows of all arrays, at most ``step`` at a time.

    The calling thread is one of the ``threads``.
    """
    n = len(arrays[0])
    if threads == 1 and n <= step:
        function(*arrays)
        return
    step = min(step, -(-n // threads))
    starts = iter(range(0, n, step))

    def work() -> None:
        try:
            for start in starts:
                function(*[array[start : start + step] for array in arrays])
        except BaseException:
            collections.deque(starts, 0)  # nothing is left for the other threads
            raise

    futures = [_pool(os.getpid()).submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        # Futures that have not begun are not awaited: searches that wait for each other's threads would
        # wait for ever.
        futures = [future for future in futures if not future.cancel()]
        wait(futures)
    for future in futures:
        future.result()
