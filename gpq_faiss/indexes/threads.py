"""Threads of searches."""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import faiss

FEW = 16
"""Queries for which another thread is worth its waking, of some 100 microseconds."""
_CORES = os.cpu_count() or 1  # counted once, as the system reads a file to count them


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Threads that stay, as those of Faiss do: starting one takes longer than many a search. A forked process has its own."""
    return ThreadPoolExecutor(_CORES, f"gpq-search-{process}")


def workers(n: int, threads: int | None, few: int = FEW) -> int:
    """How many threads answer n queries, each at least ``few``; of ``threads`` at most (default: Faiss' setting)."""
    most = n // few
    return 1 if most < 2 else min(threads or faiss.omp_get_max_threads(), _CORES, most)


def in_parallel(
    run: Callable[..., None], arrays: Sequence[Any], count: int, step: int = 256
) -> None:
    """``run`` with the same rows of all arrays, at most ``step`` of them, in ``count`` threads, of which this is one."""
    n = len(arrays[0])
    if count == 1 and n <= step:
        run(*arrays)
        return
    step = min(step, -(-n // count))
    starts = iter(range(0, n, step))

    def work() -> None:
        try:
            for start in starts:
                run(*[array[start : start + step] for array in arrays])
        except BaseException:
            collections.deque(starts, 0)  # the other threads have nothing left
            raise

    others = [_pool(os.getpid()).submit(work) for _ in range(count - 1)]
    try:
        work()
    finally:  # not for those that have not begun: searches that wait for each other's threads would wait for ever
        others = [other for other in others if not other.cancel()]
        wait(others)
    for other in others:
        other.result()
