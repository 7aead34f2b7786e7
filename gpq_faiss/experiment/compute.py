"""One run: a method learns, encodes the database, ranks it for every query, and is measured.

What comes out is enough to rank again under another convention: the codes, a Faiss index without items that ranks as the method
does, what that index is searched with, and the labels of both sides.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from ..codes.bits import unpack_codes
from ..config import from_dict
from ..data.base import Dataset, FeatureDataset
from ..data.labels import Labels
from ..data.protocols import Split
from ..data.reader import Reader
from ..errors import DataError, UsageError
from ..evaluation.likeness import Likeness, likeness
from ..evaluation.metrics import RECALL_LEVELS
from ..evaluation.ranking import RankingResult, rank_codes
from ..faissio.blob import to_bytes
from ..methods.coders import ProductCoder, TableCoder
from ..methods.itq import BinaryMethod
from ..methods.lopq import LOPQ
from ..methods.pq import PQ
from ..methods.registry import METHODS, make_builder, make_method
from ..nn.device import resolve_device
from ..progress import stage
from ..stages.evaluate import input_neighbours
from ..training.loop import Fitted, RunOptions, fit
from ..training.vectors import embed_rows
from .cells import Cell

Progress = Callable[[int, int, dict[str, float]], None]
"""Steps done, of so many, and the latest figures."""

KS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
"""The k of precision and recall, those that the database reaches."""
TOP = 1000
"""Ranks whose ids are kept."""
MAX_CODE_BYTES = 256
"""Longer codes (those of ``float``) are not kept: the data have them."""
_FIT_ROWS, _FIT_BYTES, _BLOCK = 100_000, 8 << 30, 16_384
_VECTOR_STREAM = 102


@dataclass(frozen=True)
class Coded:
    """What a method made of queries and database.

    Attributes:
        bits: that an item really takes.
        query_rows, base_rows: int64, positions in the data set.
        codes: uint8 [N, W].
        score: (query numbers, codes) -> scores float32 [q, n].
        tables: of the exact engine, float32 [Q, M, K], or None.
        index: a trained, empty Faiss index that ranks as the method does.
        search_input: what it is searched with, [Q, ...].
        vectors, vector_rows: of some items of the database, for pictures.
        codebooks: float32 [M, K, d] of a quantiser that is trained, or None.
        fit_seconds, encode_seconds: what it took.
        extra: more to be kept beside it.
    """

    bits: int
    query_rows: NDArray[np.int64]
    base_rows: NDArray[np.int64]
    codes: NDArray[np.uint8]
    score: Callable[[NDArray[np.int64], NDArray[np.uint8]], NDArray[np.float32]]
    tables: NDArray[np.float32] | None
    index: Any
    search_input: NDArray[Any]
    vectors: NDArray[np.float32]
    vector_rows: NDArray[np.int64]
    codebooks: NDArray[np.float32] | None
    fit_seconds: float
    encode_seconds: float
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """A finished run: what its file holds."""

    arrays: dict[str, NDArray[Any]]
    attributes: dict[str, Any]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Everything that computes keeps to one thread: runs side by side do not fight, and sums have one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


class Earlier:
    """The latest training of a process, for runs that differ from it in nothing but how codes are made of it: other code lengths of
    class-posterior codes, say. Their outcomes are those that a training of their own would give."""

    def __init__(self) -> None:
        self._fitted: Fitted | None = None
        self._key = ""

    def of(self, cell: Cell) -> Fitted | None:
        """The training, if it can stand for that of ``cell``."""
        same = self._fitted is not None and self._key == _without(cell, type(self._fitted.method).codes_only)
        return self._fitted if same else None

    def keep(self, cell: Cell, fitted: Fitted) -> None:
        """Remember the training of ``cell``, or none if others cannot share it."""
        codes_only = type(fitted.method).codes_only
        shared = bool(codes_only) and not fitted.held
        self._fitted, self._key = (fitted, _without(cell, codes_only)) if shared else (None, "")


def _without(cell: Cell, codes_only: tuple[str, ...]) -> str:
    """All that decides about the training of a cell, less the settings ``codes_only``."""
    settings = {
        f"{section}.{key}": value
        for section, values in cell.settings.items()
        if isinstance(values, dict)
        for key, value in values.items()
        if f"{section}.{key}" not in codes_only
    }
    return json.dumps([cell.method, cell.split_hash, settings], sort_keys=True)


def compute(
    cell: Cell,
    dataset: Dataset,
    partial: Path,
    *,
    earlier: Earlier | None = None,
    device: str = "cpu",
    amp: bool = False,
    validate_every: int = 100,
    checkpoint_seconds: float = 60.0,
    progress: Progress | None = None,
) -> Outcome:
    """Make the run of ``cell``.

    Args:
        cell: what to run.
        dataset: its data.
        partial: folder for the checkpoints of a trained method; one that is there is continued.
        device: where a network runs.
        amp, validate_every, checkpoint_seconds, progress: of a training, as of :class:`gpq_faiss.training.loop.RunOptions`.
        earlier: what was trained before on these data; remembers the training of this run.

    Raises:
        GpqError: of the method, the data or the device.
    """
    split = cell.split(dataset)
    if not len(split.query) or not len(split.database):
        raise UsageError(
            f"{dataset.name}: labelled {cell.labelled} leaves {len(split.query):,} queries and {len(split.database):,} items to "
            "search: label fewer"
        )
    labels = dataset.require_labels()
    with one_thread():
        if METHODS[cell.method].deep:
            earlier = earlier or Earlier()
            options = RunOptions(
                resolve_device(device), True, amp, validate_every, checkpoint_seconds, progress
            )
            coded = _trained(cell, dataset, split, partial, options, earlier)
        else:
            coded = _fitted(cell, dataset, split, labels)
        start = time.perf_counter()
        ranking = _rank(coded, labels)
        ranked = time.perf_counter() - start
        like = _likeness(coded, dataset, labels)
        top = top_rows(coded.score, coded.codes, len(coded.query_rows), min(TOP, len(coded.base_rows)))
    arrays = _arrays(coded, ranking, dataset, labels, top)
    attributes = {
        "bits_kept": coded.bits,
        "map": ranking.map,
        "convention": ranking.convention,
        "likeness": None if like is None else like.as_dict(),
        "queries_without_relevant": ranking.queries_without_relevant,
        "distinct_codes": ranking.n_distinct,
        "seconds": {
            "fit": round(coded.fit_seconds, 3),
            "encode": round(coded.encode_seconds, 3),
            "rank": round(ranked, 3),
        },
        "counts": {
            "queries": len(coded.query_rows),
            "labelled": len(split.labelled),
            "unlabelled": len(split.unlabelled),
            "database": len(coded.base_rows),
        },
        "seen_classes": None if split.seen_classes is None else list(split.seen_classes),
        "split_notes": list(split.notes),
        **coded.extra,
    }
    return Outcome(arrays, attributes)


def _trained(
    cell: Cell,
    dataset: Dataset,
    split: Split,
    partial: Path,
    options: RunOptions,
    earlier: Earlier,
) -> Coded:
    """A network by the training loop, its vectors, and its coder's codes."""
    torch_device = options.device
    fitted = fit(
        make_builder(cell.method),
        dataset,
        split,
        from_dict(dict(cell.settings)),
        folder=partial,
        identity=f"{cell.identity} {torch_device.type}",
        options=options,
        earlier=earlier.of(cell),
    )
    earlier.keep(cell, fitted)
    start = time.perf_counter()
    method, coder = fitted.method, fitted.method.coder()
    wanted = _vector_choice(cell, split)
    codes, there, kept, kept_rows = [], [], [], []
    with Reader(dataset, fitted.image_size) as reader:
        reader.preload()
        xq, ok = embed_rows(method, reader, split.query, torch_device, queries=True)
        query_rows = split.query[ok]
        with stage("encoding", len(split.database)) as encoding:
            for first in range(0, len(split.database), _BLOCK):
                rows = split.database[first : first + _BLOCK]
                encoding.advance(len(rows))
                vectors, ok = embed_rows(method, reader, rows, torch_device)
                rows = rows[ok]
                codes.append(coder.encode(vectors))
                there.append(rows)
                chosen = np.isin(rows, wanted)
                kept.append(vectors[chosen])
                kept_rows.append(rows[chosen])
    encoded = time.perf_counter() - start
    product = isinstance(coder, ProductCoder)
    return Coded(
        bits=coder.bits,
        query_rows=query_rows,
        base_rows=np.concatenate(there),
        codes=np.concatenate(codes),
        score=lambda q, distinct: coder.score(xq[q], distinct),
        tables=coder.score_tables(xq) if isinstance(coder, TableCoder) else None,
        index=coder.index(),
        search_input=coder.search_input(xq),
        vectors=np.concatenate(kept),
        vector_rows=np.concatenate(kept_rows),
        codebooks=coder.codebooks if product else None,  # type: ignore[attr-defined]
        fit_seconds=fitted.run.seconds,
        encode_seconds=encoded,
        extra={
            "steps": fitted.run.step,
            "best_step": fitted.run.best_step or None,
            "validation_map": fitted.run.best if fitted.run.best_step else None,
            "parameters": sum(p.numel() for p in method.exported().parameters()),
            "log": [json.loads(line) for line in fitted.run.lines],
        },
    )


def _fitted(cell: Cell, dataset: Dataset, split: Split, labels: Labels) -> Coded:
    """An array method on the features (or the pixels) of all training items."""
    pool = np.sort(np.concatenate([split.labelled, split.unlabelled]))
    # All labelled items, whatever is left of the rest.
    pool = np.union1d(pool[:: -(-len(pool) // _FIT_ROWS)], split.labelled)
    size = _image_size(dataset)
    width = dataset.width if isinstance(dataset, FeatureDataset) else 3 * size**2
    if 4 * width * (len(pool) + len(split.database)) > _FIT_BYTES:
        raise UsageError(
            f"{cell.method}: {len(pool):,} training items of {width:,} numbers each are too much to hold in memory: "
            "give it features of the images"
        )
    method = make_method(cell.method, cell.bits or 32, cell.seed)
    with Reader(dataset, size) as reader:
        x, pool = _matrix(reader, pool)
        xq, query_rows = _matrix(reader, split.query)
        xb, base_rows = _matrix(reader, split.database)
    start = time.perf_counter()
    with stage(f"fitting {cell.method}"):
        method.fit(x, split.training_labels(labels).take(pool))
    fitted = time.perf_counter()
    parts = []
    with stage("encoding", len(xb)) as encoding:
        for first in range(0, len(xb), _BLOCK):
            block = xb[first : first + _BLOCK]
            parts.append(method.encode(block))
            encoding.advance(len(block))
    codes = np.concatenate(parts)
    encoded = time.perf_counter()
    chosen = np.isin(base_rows, _vector_choice(cell, split))
    return Coded(
        bits=method.bits + (method.extra_bits if isinstance(method, LOPQ) else 0),
        query_rows=query_rows,
        base_rows=base_rows,
        codes=codes,
        score=lambda q, distinct: method.score(xq[q], distinct),
        # Sums of tables are ranked many times faster than scores that a method gives itself.
        tables=method.score_tables(xq) if isinstance(method, PQ | BinaryMethod) else None,
        index=method.index(),
        search_input=method.index_input(xq),
        vectors=xb[chosen],
        vector_rows=base_rows[chosen],
        codebooks=None,
        fit_seconds=fitted - start,
        encode_seconds=encoded - fitted,
    )


def _image_size(dataset: Dataset) -> int:
    """Side that array methods see images at; 0 for features."""
    native = getattr(dataset, "native_size", None)
    return 0 if isinstance(dataset, FeatureDataset) else int(native or 32)


def _matrix(reader: Reader, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Features, or pixels in [0, 1], float32 [n, width], and the rows that could be read."""
    parts, there = [], []
    for first in range(0, len(rows), 4096):
        block = rows[first : first + 4096]
        values, ok = reader.fetch(block)
        scale = np.float32(1 / 255 if values.dtype == np.uint8 else 1)
        parts.append(values.reshape(len(values), -1).astype(np.float32) * scale)
        there.append(block[ok])
    return np.concatenate(parts), np.concatenate(there)


def _vector_choice(cell: Cell, split: Split) -> NDArray[np.int64]:
    """Database items whose vectors are kept: the same for every method of a seed."""
    order = np.random.default_rng([cell.seed, _VECTOR_STREAM]).permutation(split.database)
    return order[: cell.vectors]


def _rank(coded: Coded, labels: Labels) -> RankingResult:
    options: dict[str, Any] = {
        "ks": [k for k in KS if k <= len(coded.base_rows)],
        "levels": RECALL_LEVELS,
    }
    query, base = labels.take(coded.query_rows), labels.take(coded.base_rows)
    return rank_codes(*_scores_and_codes(coded), query, base, **options)


def _scores_and_codes(coded: Coded) -> tuple[Any, NDArray[np.uint8]]:
    """As :func:`.rank_codes` takes them: tables and codeword numbers where there are tables, else a function and codes."""
    if coded.tables is None:
        return coded.score, coded.codes
    _, M, K = coded.tables.shape
    return coded.tables, unpack_codes(coded.codes, M, K)


def _likeness(coded: Coded, dataset: Dataset, labels: Labels) -> Likeness | None:
    """None for images that convolutions are for."""
    neighbours = input_neighbours(dataset, _image_size(dataset), coded.query_rows, coded.base_rows, labels)
    if neighbours is None:
        return None
    with stage("likeness"):
        return likeness(
            *_scores_and_codes(coded),
            neighbours,
            n_queries=len(coded.query_rows),
            ids=dataset.ids[coded.base_rows],
        )


def top_rows(
    score: Callable[[NDArray[np.int64], NDArray[np.uint8]], NDArray[np.float32]],
    codes: NDArray[np.uint8],
    n_queries: int,
    k: int,
    memory: int = 128 << 20,
) -> NDArray[np.int64]:
    """Positions in the database of the k best items of every query, int64 [Q, k]; equal scores in order of position."""
    view = np.ascontiguousarray(codes).view(np.dtype((np.void, codes.shape[1]))).ravel()
    _, first, code_of = np.unique(view, return_index=True, return_inverse=True)
    distinct = codes[first]
    top = np.empty((n_queries, k), np.int64)
    block = max(1, memory // (8 * len(distinct)))
    for start in range(0, n_queries, block):
        rows = np.arange(start, min(start + block, n_queries))
        for q, of_codes in zip(rows, score(rows, distinct), strict=True):
            scores = of_codes[code_of]
            least = np.partition(scores, len(scores) - k)[len(scores) - k]
            better = np.flatnonzero(scores > least)
            tied = np.flatnonzero(scores == least)[: k - len(better)]
            top[q, : len(better)] = better[np.argsort(-scores[better], kind="stable")]
            top[q, len(better) :] = tied
    return top


def _arrays(
    coded: Coded, ranking: RankingResult, dataset: Dataset, labels: Labels, top: NDArray[np.int64]
) -> dict[str, NDArray[Any]]:
    base_ids = dataset.ids[coded.base_rows]
    arrays: dict[str, NDArray[Any]] = {
        "ap": ranking.ap,
        "ks": np.array(list(ranking.precision), np.int64),
        "precision": np.array(list(ranking.precision.values())),
        "recall": np.array(list(ranking.recall.values())),
        "pr_recall": ranking.pr_recall,
        "pr_precision": ranking.pr_precision,
        "query_rows": coded.query_rows,
        "query_ids": dataset.ids[coded.query_rows],
        "query_labels": labels.take(coded.query_rows).packed,
        "database_rows": coded.base_rows,
        "database_ids": base_ids,
        "database_labels": labels.take(coded.base_rows).packed,
        "top_ids": base_ids[top],
    }
    # Faiss writes no index made of several others (LOPQ's); such a run is ranked again from its method alone.
    with contextlib.suppress(DataError):
        arrays |= {"index": to_bytes(coded.index), "search_input": coded.search_input}
    if coded.codes.shape[1] <= MAX_CODE_BYTES:
        arrays["codes"] = coded.codes
    if len(coded.vector_rows):
        arrays |= {
            "vectors": coded.vectors,
            "vector_rows": coded.vector_rows,
            "vector_labels": labels.take(coded.vector_rows).packed,
        }
    if coded.codebooks is not None:
        arrays["codebooks"] = coded.codebooks
    return arrays
