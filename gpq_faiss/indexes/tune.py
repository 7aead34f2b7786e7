"""Choose nprobe by recall, and report all operating points."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Codes, Floats, Ids
from ..codes.encode import decode
from .probing import SCORES, Probing

OperatingPoint = dict[str, float]
"""``nprobe``, ``recall``, ``seconds_per_query`` (all queries as one batch) and ``share`` of the items scanned."""


def sample_queries_of(
    n: int, codes_at: Callable[[Ids], Codes], Z: Floats, queries: int, *, noise: float, seed: int
) -> Floats:
    """Sample queries: decoded vectors of random items with noise on each sub-vector.

    Args:
        n: number of items.
        codes_at: rows int64 [r], ascending -> codes uint8 [r, code_size].
        Z: codebooks, float32 [M, K, d].
        noise: norm of the noise (codewords have norm 1).

    Returns:
        float32 [min(queries, n), M*d]. Real queries tune better.
    """
    rng = np.random.default_rng([seed, 1])
    queries = min(queries, n)
    # sampling without replacement needs memory for all items
    rows = rng.choice(n, queries, replace=False) if n < 1 << 24 else rng.integers(0, n, queries)
    M, _, d = Z.shape
    x = decode(codes_at(np.sort(rows)), Z).reshape(queries, M, d)
    move = rng.standard_normal(x.shape)
    x = x + noise * move / np.linalg.norm(move, axis=2, keepdims=True)
    unit = x / np.maximum(np.linalg.norm(x, axis=2, keepdims=True), 1e-12)
    return np.ascontiguousarray(unit.reshape(queries, M * d), dtype=np.float32)


def operating_points(
    probing: Probing,
    xq: Floats,
    k: int,
    list_of: NDArray[np.integer],
    recall: float,
    run: Callable[[int], object],
) -> tuple[int, list[OperatingPoint]]:
    """The smallest nprobe that reaches a recall, and all operating points.

    Recall is the mean share of the exact top ``k`` (ties ordered by id) in the results. As a search is exact within the probed lists,
    one exact search gives the recall of every nprobe.

    Args:
        xq: checked queries, float32 [Q, D].
        list_of: [Q, k], the list of each result of the exact search.
        run: searches all queries with a given nprobe, for timing.

    Returns:
        The nprobe; and points by ascending nprobe.
    """
    filled = len(probing.filled)
    at_rank, seen = np.zeros(filled, np.int64), np.zeros(filled)
    step = max(1, SCORES // len(probing.sizes))
    for start in range(0, len(xq), step):
        near = probing.nearest(xq[start : start + step], filled)
        rank_of = np.zeros((len(near), len(probing.sizes)), np.int64)
        np.put_along_axis(rank_of, near, np.arange(filled)[None, :], axis=1)
        ends = probing.sizes[near].cumsum(axis=1)
        always = (ends < k).sum(axis=1, keepdims=True)  # the rank of the list that completes k items
        ranks = np.take_along_axis(rank_of, list_of[start : start + step].astype(np.int64), axis=1)
        at_rank += np.bincount(np.where(ranks <= always, 0, ranks).reshape(-1), minlength=filled)
        seen += np.maximum(ends, np.take_along_axis(ends, always, axis=1)).sum(axis=0)
    recalls = at_rank.cumsum() / list_of.size
    shares = seen / (len(xq) * int(probing.sizes.sum()))
    chosen = int(np.searchsorted(recalls, recall - 1e-12)) + 1
    shown = {chosen} | {1 << i for i in range(filled.bit_length()) if 1 << i <= 4 * chosen}
    points = []
    for nprobe in sorted(n for n in shown if n <= filled):
        before = time.perf_counter()
        run(nprobe)
        points.append(
            {
                "nprobe": float(nprobe),
                "recall": float(recalls[nprobe - 1]),
                "seconds_per_query": (time.perf_counter() - before) / len(xq),
                "share": float(shares[nprobe - 1]),
            }
        )
    return chosen, points
