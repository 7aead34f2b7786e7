"""Choosing nprobe by the recall that is asked for, with every operating point reported."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from ..codes.checks import Floats, Ids, check_recall, check_vectors
from ..codes.encode import decode
from ..errors import UsageError
from .ivf import IvfSearch
from .memory import Engine
from .probing import operating_points
from .threads import check_k

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
    """Set the least nprobe that reaches a recall (:func:`.probing.operating_points`), and record what was measured.

    Args:
        engine: of kind ``ivf``; its ``ivf.nprobe`` and ``ivf.points`` change.
        recall: mean share of the exact top ``k``, ties ordered by id, above 0 and at most 1.
        queries: [Q, M*d] like those to come (default: :func:`sample_queries`).

    Returns:
        Operating points, by ascending nprobe: ``nprobe``, ``recall``, ``seconds_per_query``, ``share`` of the items
        looked at. The chosen one is the first whose recall suffices.

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

    def run(nprobe: int) -> Ids:
        engine.set_nprobe(nprobe)
        return engine.search(xq, k, threads=threads)[1]

    found = engine.lists_of(run(len(search.probing.sizes)))
    chosen, points = operating_points(search.probing, xq, k, found, recall, run)
    engine.set_nprobe(chosen)
    engine.ivf = dataclasses.replace(engine.ivf, points=tuple(points))
    return points
