"""Choosing nprobe by the recall that is asked for, with every operating point reported."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
from numpy.typing import ArrayLike

from ..errors import UsageError
from .checks import Floats, check_recall, check_vectors
from .codebooks import decode
from .engine import Engine
from .ivf import IvfSearch
from .search import check_k

_SAMPLE = 256


def sample_queries(engine: Engine, n: int = _SAMPLE, *, noise: float = 0.5, seed: int = 0) -> Floats:
    """Queries where there are none: vectors of random items, each sub-vector moved off its codeword.

    Args:
        noise: length of the move, in random directions (codewords have length 1).

    Returns:
        float32 [min(n, ntotal), M*d]. A stand-in: real queries tune better.
    """
    rng = np.random.default_rng([seed, 1])
    rows = np.sort(rng.choice(engine.ntotal, min(n, engine.ntotal), replace=False))
    x = decode(engine.codes[rows], engine.codebooks).reshape(len(rows), engine.M, engine.d)
    move = rng.standard_normal(x.shape)
    x = x + noise * move / np.linalg.norm(move, axis=2, keepdims=True)
    unit = x / np.maximum(np.linalg.norm(x, axis=2, keepdims=True), 1e-12)
    return np.ascontiguousarray(unit.reshape(len(rows), -1), dtype=np.float32)


def tune_nprobe(
    engine: Engine,
    recall: float,
    *,
    k: int = 10,
    queries: ArrayLike | None = None,
    threads: int | None = 1,
) -> list[dict[str, float]]:
    """Set the least nprobe, to about a sixteenth, that reaches a recall, and record what was measured.

    A result counts as found if it scores at least the exact k-th score, so that ties at the k-th place count alike.

    Args:
        engine: of kind ``ivf``; its ``ivf.nprobe`` and ``ivf.points`` change.
        recall: mean share of the exact top ``k``, above 0 and at most 1.
        queries: [Q, M*d] like those to come (default: :func:`sample_queries`).

    Returns:
        Operating points, by ascending nprobe: ``nprobe``, ``recall``, ``seconds_per_query``, ``share`` of the codes
        scanned. With FastScan lists even all of them may miss a little; the largest nprobe is then taken.

    Raises:
        UsageError: not an ``ivf`` engine, or ``recall`` or ``k`` out of range.
        DataError: unfit queries.
    """
    search = engine.searcher
    if engine.kind != "ivf" or not isinstance(search, IvfSearch) or engine.ivf is None:
        raise UsageError(f"an engine of kind {engine.kind!r} has no nprobe to tune: build it with kind 'ivf'")
    check_recall(recall)
    k = check_k(k, engine.ntotal)
    xq = (
        sample_queries(engine)
        if queries is None
        else check_vectors(queries, engine.width, what="queries to tune by", allow_empty=False)
    )
    kth = engine.to("exact").search(xq, k, threads=threads)[0][:, -1:]
    lists = int(engine.ivf.lists or 1)
    sizes = np.bincount(search.list_of, minlength=lists)
    nearest = search.nearest_lists(xq)
    points: list[dict[str, float]] = []

    def reaches(nprobe: int) -> bool:
        search.nprobe = nprobe
        start = time.perf_counter()
        scores, _ = engine.search(xq, k, threads=threads)
        seconds = time.perf_counter() - start
        points.append(
            {
                "nprobe": float(nprobe),
                "recall": float((scores >= kth).mean()),
                "seconds_per_query": seconds / len(xq),
                "share": float(sizes[nearest[:, :nprobe]].sum(axis=1).mean() / len(search.codes)),
            }
        )
        return points[-1]["recall"] >= recall

    nprobe = 1
    while not reaches(nprobe) and nprobe < lists:
        nprobe = min(2 * nprobe, lists)
    low = int(points[-2]["nprobe"]) if len(points) > 1 and points[-1]["recall"] >= recall else nprobe
    while nprobe - low > max(1, nprobe // 16):
        middle = (low + nprobe) // 2
        if reaches(middle):
            nprobe = middle
        else:
            low = middle
    points.sort(key=lambda point: point["nprobe"])
    engine.set_nprobe(nprobe)
    engine.ivf = dataclasses.replace(engine.ivf, points=tuple(points))
    return points
