"""One run: a method is trained, encodes the database, ranks it for every query, and is measured.

The output is enough to rank again under another convention: the codes, the score of every codeword
for every query, and the labels of both sides.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from ..config import from_dict
from ..data.base import Dataset
from ..data.protocols import Split, make_split
from ..data.reader import Reader
from ..errors import UsageError
from ..evaluation.scorers import ScoreFunction, distinct_rows
from ..methods.coders import ProductCoder
from ..methods.measure import (
    Coded,
    Rows,
    encode_blocks,
    fit_and_encode,
    input_neighbours,
    native_image_size,
)
from ..methods.registry import find_method
from ..methods.trainable import embed_rows
from ..nn.device import torch_threads
from ..training.loop import RunOptions, fit
from .plan import RunSpec

KS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
"""The k of precision and recall, up to the size of the database."""
TOP = 1000
"""Number of result ids stored per query."""
MAX_CODE_BYTES = 256
"""Maximum code size to store; longer codes (``float``) are in the data anyway."""
_BLOCK_BYTES = 128 << 20  # of scores
_VECTOR_STREAM = 102  # of random numbers


def compute(
    spec: RunSpec, dataset: Dataset, work: Path, options: RunOptions
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return the arrays of the file of a run, and its measured attributes.

    ``work`` is the folder for checkpoints of a training, which is resumed if there are any.

    Raises:
        GpqError: the split is empty, or the method cannot be fitted or applied.
    """
    split = make_split(dataset, **spec.split_args)
    if not len(split.query) or not len(split.database):
        raise UsageError(
            f"{dataset.name}: labelled {spec.split_args['labelled']} leaves {len(split.query):,} "
            f"queries and {len(split.database):,} items to search: label fewer"
        )
    labels, image_size = dataset.require_labels(), native_image_size(dataset)
    # Items whose vectors are stored, the same for all methods of a seed.
    random = np.random.default_rng([spec.seed, _VECTOR_STREAM])
    keep = random.permutation(split.database)[: spec.vectors]
    # On one thread concurrent runs do not compete, and sums have a fixed order.
    with torch_threads(1), threadpool_limits(1):
        if find_method(spec.method).deep:
            coded = _train_and_encode(spec, dataset, split, work, options, keep)
        else:
            coded = fit_and_encode(
                spec.method,
                spec.bits or 32,
                spec.seed,
                dataset,
                split,
                image_size=image_size,
                queries=split.query,
                database=split.database,
                keep=keep,
            )
        start = time.perf_counter()
        ranking = coded.rank(labels, ks=KS)
        rank_seconds = time.perf_counter() - start
        neighbours = input_neighbours(dataset, image_size, coded.query_rows, coded.base_rows)
        recall = coded.neighbour_recall(neighbours)
        top = top_rows(
            coded.score, coded.codes, len(coded.query_rows), min(TOP, len(coded.base_rows))
        )
    seconds = {"fit": coded.fit_seconds, "encode": coded.encode_seconds, "rank": rank_seconds}
    attributes = {
        "bits_kept": coded.coder.bits + coded.coder.extra_bits,
        "map": ranking.map,
        "convention": ranking.convention,
        "neighbour_recall": None if recall is None else vars(recall),
        "queries_without_relevant": ranking.queries_without_relevant,
        "distinct_codes": ranking.n_distinct,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "counts": {
            "queries": len(coded.query_rows),
            "labelled": len(split.labelled),
            "unlabelled": len(split.unlabelled),
            "database": len(coded.base_rows),
        },
        "seen_classes": None if split.seen_classes is None else list(split.seen_classes),
        **coded.extra,
        "class_names": list(labels.class_names),
    }
    arrays = {
        "ap": ranking.ap,
        "ks": np.array(list(ranking.precision), np.int64),
        "precision": np.array(list(ranking.precision.values())),
        "recall": np.array(list(ranking.recall.values())),
        "pr_recall": ranking.pr_recall,
        "pr_precision": ranking.pr_precision,
        "top_ids": dataset.ids[coded.base_rows[top]],
    }
    return arrays | _coded_arrays(coded, dataset), attributes


def _train_and_encode(
    spec: RunSpec, dataset: Dataset, split: Split, work: Path, options: RunOptions, keep: Rows
) -> Coded:
    """Train a network, and encode queries and database by its vectors and its coder."""
    device = torch.device(options.device)
    fitted = fit(
        find_method(spec.method).load(),
        dataset,
        split,
        from_dict(dict(spec.settings)),
        folder=work,
        identity=f"{spec.identity} {device.type}",
        options=options,
    )
    start = time.perf_counter()
    method, coder = fitted.method, fitted.method.coder()
    with Reader(dataset, fitted.reader.image_size) as reader:
        reader.preload()
        xq, queries = embed_rows(method, reader, split.query, device, queries=True)
        encoded = encode_blocks(
            coder,
            split.database,
            lambda rows: embed_rows(method, reader, rows, device),
            keep,
        )
    encoded["encode_seconds"] = time.perf_counter() - start  # with the time of the network
    seconds, extra = fitted.run.seconds, {"steps": fitted.run.step}
    return Coded(coder, queries, xq=xq, fit_seconds=seconds, extra=extra, **encoded)


def top_rows(score: ScoreFunction, codes: NDArray[np.uint8], n_queries: int, k: int) -> Rows:
    """Return the database rows of the k <= N best items of every query, int64 [Q, k].

    ``score`` is a score function of distinct codes; ties go by row.
    """
    distinct, code_of = distinct_rows(np.ascontiguousarray(codes))
    top = np.empty((n_queries, k), np.int64)
    block = max(1, _BLOCK_BYTES // (8 * len(distinct)))
    for start in range(0, n_queries, block):
        queries = np.arange(start, min(start + block, n_queries))
        for q, code_scores in zip(queries, score(queries, distinct), strict=True):
            scores = code_scores[code_of]
            threshold = np.partition(scores, len(scores) - k)[len(scores) - k]
            rows = np.flatnonzero(
                scores >= threshold
            )  # more than k if several are at the threshold
            top[q] = rows[np.argsort(-scores[rows], kind="stable")[:k]]
    return top


def _coded_arrays(coded: Coded, dataset: Dataset) -> dict[str, NDArray[Any]]:
    """Return the arrays of a run by which its queries can be ranked again."""
    labels = dataset.require_labels()
    arrays: dict[str, NDArray[Any]] = {}
    for side, rows in (("query", coded.query_rows), ("database", coded.base_rows)):
        arrays |= {f"{side}_rows": rows, f"{side}_ids": dataset.ids[rows]}
        arrays[f"{side}_labels"] = labels.take(rows).packed
    # LOPQ has other tables in every inverted list; its runs are ranked again by the method alone.
    if isinstance(tables := coded.scorer[0], np.ndarray):
        arrays["tables"] = tables
    if coded.codes.shape[1] <= MAX_CODE_BYTES:
        arrays["codes"] = coded.codes
    if len(coded.vector_rows):
        arrays |= {"vectors": coded.vectors, "vector_rows": coded.vector_rows}
        arrays["vector_labels"] = labels.take(coded.vector_rows).packed
    if isinstance(coded.coder, ProductCoder):
        arrays["codebooks"] = coded.coder.codebooks
    return arrays
