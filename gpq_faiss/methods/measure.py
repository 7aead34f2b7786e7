"""The one path by which a method is fitted, coded, ranked and measured: ``gpq evaluate`` and the experiments both take it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cluster.tasks import run_all, split
from ..codes.bits import unpack_codes
from ..data.base import Dataset, FeatureDataset
from ..data.labels import Labels
from ..data.protocols import Split
from ..data.reader import Reader
from ..errors import UsageError
from ..evaluation.likeness import Likeness, Neighbours, likeness, nearest, spaced_queries
from ..evaluation.ranking import Measured, RankingResult, ScoreFunction, measure_codes, rank_codes
from ..progress import stage
from .base import Coder, Codes, Floats
from .registry import make_method

Rows = NDArray[np.int64]

NO_LIKENESS = (
    "NN10@100 is not reported for images, whose pixels say little of what is alike: take features of them"
)
"""A note where there is no likeness."""

BLOCK = 16_384
"""Items that are encoded at a time."""
# Of what a method is fitted on: rows, and bytes.
_FIT_ROWS, _FIT_BYTES = 100_000, 8 << 30
# Of a block of inputs that are read, or searched for neighbours: rows, and bytes as float64.
_READ_ROWS, _NEAR_BYTES = 4096, 64 << 20
_NO_VECTORS, _NO_ROWS = np.empty((0, 0), np.float32), np.empty(0, np.int64)


@dataclass(frozen=True)
class Coded:
    """What a method made of the queries and the database of a split.

    Attributes:
        coder: that made the codes and scores them.
        query_rows, base_rows: int64 [Q] and [N], positions in the data set; items that cannot be read are not among them.
        xq: float32 [Q, width], the queries as the coder takes them.
        codes: uint8 [N, code_size].
        vectors, vector_rows: float32 [n, width] and int64 [n], of some items of the database, for pictures.
        fit_seconds, encode_seconds: time taken.
        extra: more to be kept with the run.
    """

    coder: Coder
    query_rows: Rows
    base_rows: Rows
    xq: Floats
    codes: Codes
    vectors: Floats = field(default_factory=lambda: _NO_VECTORS)
    vector_rows: Rows = field(default_factory=lambda: _NO_ROWS)
    fit_seconds: float = 0.0
    encode_seconds: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    def score(self, queries: Rows, codes: Codes) -> Floats:
        """Scores float32 [q, n] of codes uint8 [n, code_size] for queries by their numbers int64 [q]."""
        return self.coder.score(self.xq[queries], codes)

    @cached_property
    def scorer(self) -> tuple[Floats | ScoreFunction, NDArray[np.uint8]]:
        """As :func:`.rank_codes` takes them: score tables and codeword numbers where there are tables, else a function and codes.

        Sums of tables are ranked many times faster.
        """
        tables = self.coder.score_tables(self.xq)
        if tables is None:
            return self.score, self.codes
        _, M, K = tables.shape
        return tables, unpack_codes(self.codes, M, K)

    def rank(self, labels: Labels, *, ray: str | None = None, **options: Any) -> RankingResult:
        """Rank the database for every query, on the cluster at ``ray`` where one is given; ``options`` as for :func:`.rank_codes`."""
        query, base = labels.take(self.query_rows), labels.take(self.base_rows)
        if ray is None:
            return rank_codes(*self.scorer, query, base, **options)
        here: dict[str, Any] = {**options, "threads": 1}
        there = {"ties": "expected", "k": None, "denominator": "relevant", "ks": (), "levels": None, **here}

        def spread(tasks: Sequence[int]) -> list[Measured]:
            # Each preparation looks at the whole database, so a core gets its tasks at once.
            parts = split(tasks, ray)
            found = run_all(
                measure_codes, [(part,) for part in parts], ray, shared=(*self.scorer, query, base, there)
            )
            by_task = dict(zip(chain(*parts), chain(*found), strict=True))
            return [by_task[task] for task in tasks]

        return rank_codes(*self.scorer, query, base, **here, spread=spread)

    def likeness(self, neighbours: Neighbours, dataset: Dataset) -> Likeness:
        """Measure the ranking against the neighbours by input, of :func:`input_neighbours`."""
        with stage("likeness"):
            ids = dataset.ids[self.base_rows]
            return likeness(*self.scorer, neighbours, n_queries=len(self.query_rows), ids=ids)


def fit_and_encode(  # noqa: PLR0913
    name: str,
    bits: int,
    seed: int,
    dataset: Dataset,
    split: Split,
    *,
    image_size: int,
    queries: Rows,
    database: Rows,
    keep: Rows = _NO_ROWS,
) -> Coded:
    """Fit an array method to the training items of a split, and encode queries and database.

    It is fitted to the features (or the pixels) of all labelled items, and of as many of the others as make 100,000 with them.

    Args:
        name: of an array method.
        bits: code length.
        seed: of everything random.
        dataset: labelled data.
        split: whose training items and labels count.
        image_size: side in pixels that images are read at; 0 for features.
        queries, database: int64, their positions in the data set.
        keep: int64, items of the database whose vectors are kept.

    Raises:
        DataError: what the method cannot learn from.
        UsageError: no such array method, or too much to hold in memory.
    """
    pool = np.sort(np.concatenate([split.labelled, split.unlabelled]))
    # Methods that learn from labels see those of the training and no others.
    pool = np.union1d(pool[:: -(-len(pool) // _FIT_ROWS)], split.labelled)
    width = dataset.width if isinstance(dataset, FeatureDataset) else 3 * image_size**2
    needed = 4 * width * (len(pool) + len(queries))
    if needed > _FIT_BYTES:
        raise UsageError(
            f"{name}: {len(pool):,} training items of {width:,} numbers each need {needed / 2**30:.0f} GiB of memory: "
            "take features of the images instead"
        )
    coder = make_method(name, bits, seed)
    with Reader(dataset, image_size) as reader:
        x, pool = read_inputs(reader, pool)
        start = time.perf_counter()
        with stage(f"fitting {name}"):
            coder.fit(x, split.training_labels(dataset.require_labels()).take(pool))
        fitted = time.perf_counter() - start
        del x
        xq, query_rows = read_inputs(reader, queries)
        found = encode_blocks(coder, database, lambda rows: read_inputs(reader, rows), keep)
    return Coded(coder, query_rows, xq=xq, fit_seconds=fitted, **found)


def encode_blocks(
    coder: Coder, database: Rows, read: Callable[[Rows], tuple[Floats, Rows]], keep: Rows
) -> dict[str, Any]:
    """Encode a database a block at a time: ``base_rows``, ``codes``, ``vectors``, ``vector_rows`` and ``encode_seconds`` of
    :class:`Coded`.

    Args:
        coder: fitted.
        database: int64, positions in the data set.
        read: positions -> vectors, and the positions that could be read.
        keep: int64, items whose vectors are kept.
    """
    codes, base_rows, vectors, vector_rows = [], [], [], []
    seconds = 0.0
    with stage("encoding", len(database)) as encoding:
        for first in range(0, len(database), BLOCK):
            rows = database[first : first + BLOCK]
            encoding.advance(len(rows))
            x, rows = read(rows)
            start = time.perf_counter()
            codes.append(coder.encode(x))
            seconds += time.perf_counter() - start
            base_rows.append(rows)
            chosen = np.isin(rows, keep)
            vectors.append(x[chosen])
            vector_rows.append(rows[chosen])
    return {
        "base_rows": np.concatenate(base_rows),
        "codes": np.concatenate(codes),
        "vectors": np.concatenate(vectors),
        "vector_rows": np.concatenate(vector_rows),
        "encode_seconds": seconds,
    }


def needs_perceptron(dataset: Dataset) -> bool:
    """Whether convolutions cannot be applied to the items: ready-made features, or images too small for them (digits)."""
    from ..nn.backbones import VGG

    size = getattr(dataset, "native_size", None)
    return dataset.kind == "features" or (size is not None and size < VGG.SMALLEST)


def native_image_size(dataset: Dataset) -> int:
    """Side in pixels that array methods see images at; 0 for features."""
    native = getattr(dataset, "native_size", None)
    return 0 if isinstance(dataset, FeatureDataset) else int(native or 32)


def read_inputs(reader: Reader, rows: Rows) -> tuple[Floats, Rows]:
    """What array methods start from: features, or pixels in [0, 1], float32 [n, width]; and the rows int64 [n] that can be read."""
    parts, readable = [], []
    for start in range(0, len(rows), _READ_ROWS):
        block = rows[start : start + _READ_ROWS]
        values, ok = reader.fetch(block)
        scale = np.float32(1 / 255 if values.dtype == np.uint8 else 1)
        parts.append(values.reshape(len(values), -1).astype(np.float32) * scale)
        readable.append(block[ok])
    return np.concatenate(parts), np.concatenate(readable)


def input_neighbours(
    dataset: Dataset, image_size: int, query_rows: Rows, base_rows: Rows, labels: Labels
) -> Neighbours | None:
    """What likeness is measured against: the items nearest to some queries by their features, or the pixels of tiny images.

    Args:
        dataset: what is read, the database a block at a time.
        image_size: side in pixels that images are read at.
        query_rows, base_rows: int64, positions of all queries and of the database; all of them readable.
        labels: of the whole data set.

    Returns:
        None for images that are large enough for convolutions.
    """
    if not needs_perceptron(dataset):
        return None
    chosen = spaced_queries(len(query_rows))
    rows = query_rows[chosen]
    with Reader(dataset, image_size) as reader, stage("likeness", len(base_rows)) as nearing:
        xq, _ = read_inputs(reader, rows)
        size = max(1, min(_READ_ROWS, _NEAR_BYTES // (8 * xq.shape[1])))

        def blocks() -> Iterator[Floats]:
            for start in range(0, len(base_rows), size):
                yield read_inputs(reader, base_rows[start : start + size])[0]
                nearing.done = min(start + size, len(base_rows))

        return nearest(chosen, xq, blocks(), labels.take(rows), labels.take(base_rows))
