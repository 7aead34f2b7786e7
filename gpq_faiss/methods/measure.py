"""Fit, encode, rank and measure a method; used by ``gpq evaluate`` and the experiments."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..codes.bits import unpack_codes
from ..data.base import Dataset, ImageDataset, Reader
from ..data.labels import Labels
from ..data.protocols import Split
from ..evaluation.neighbour_recall import NeighbourRecall, nearest, neighbour_recall, spaced_queries
from ..evaluation.ranking import DEFAULT, RankingResult, rank_codes
from ..evaluation.scorers import ScoreFunction
from ..evaluation.ties import Convention
from ..progress import stage
from .coders import Coder, Codes, Floats, Rows

log = logging.getLogger(__name__)

NO_NEIGHBOUR_RECALL = (
    "NN10@100 is not reported for images, whose nearest pixels say little: use features of them"
)
_FIT_ROWS = 100_000  # limit of the training matrix
_BLOCK = 16_384  # rows that are encoded at a time
_READ_ROWS = 2048  # rows that are read at a time
_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True)
class Coded:
    """Queries and database of a split as encoded by a method.

    Attributes:
        coder: the fitted coder.
        query_rows, base_rows: int64 [Q] and [N], rows in the data set of the readable items.
        xq: float32 [Q, width], coder input of the queries.
        codes: uint8 [N, code_size].
        vectors, vector_rows: float32 [n, width] and int64 [n], of some database items, for plots.
        fit_seconds, encode_seconds: time of fitting the coder, and of encoding the database.
        extra: further values stored with the run.
    """

    coder: Coder
    query_rows: Rows
    base_rows: Rows
    xq: Floats
    codes: Codes
    vectors: Floats = field(default_factory=lambda: np.empty((0, 0), np.float32))
    vector_rows: Rows = field(default_factory=lambda: _NO_ROWS)
    fit_seconds: float = 0.0
    encode_seconds: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    def score(self, queries: Rows, codes: Codes) -> Floats:
        """Scores float32 [q, n] of codes uint8 [n, code_size] for the queries at ``queries``, int64
        [q]."""
        return self.coder.score(self.xq[queries], codes)

    @functools.cached_property
    def scorer(self) -> tuple[Floats | ScoreFunction, Codes]:
        """Arguments of :func:`.rank_codes`: score tables and codeword numbers if the coder has
        tables, else a function and codes."""
        tables = self.coder.score_tables(self.xq)
        if tables is None:
            return self.score, self.codes
        return tables, unpack_codes(self.codes, self.coder.M, self.coder.K)

    def rank(
        self,
        labels: Labels,
        base: Labels | None = None,
        *,
        convention: Convention = DEFAULT,
        ks: Sequence[int] = (),
        threads: int = 1,
    ) -> RankingResult:
        """Rank the database for every query by :func:`.rank_codes`.

        Values of ``ks`` that are larger than the database are left out. ``base`` are the labels of
        the database if it is of another data set.
        """
        query = labels.take(self.query_rows).packed
        items = (base or labels).take(self.base_rows).packed
        return rank_codes(
            *self.scorer,
            query,
            items,
            convention,
            ks=[k for k in ks if k <= len(items)],
            threads=threads,
        )

    def neighbour_recall(self, neighbours: Rows | None) -> NeighbourRecall | None:
        """Compare the ranking with the neighbours of :func:`input_neighbours`, if there are any."""
        if neighbours is None:
            return None
        with stage("neighbour recall"):
            return neighbour_recall(*self.scorer, neighbours, n_queries=len(self.query_rows))


def fit_and_encode(
    coder: Coder,
    dataset: Dataset,
    split: Split,
    *,
    queries: Rows,
    database: Rows,
    keep: Rows = _NO_ROWS,
) -> Coded:
    """Fit a coder to the training items of a split, and encode queries and database.

    It is fitted to the features, or to the pixels of images, of at most 100,000 training items,
    labelled ones first. ``queries``, ``database`` and ``keep``, whose vectors are
    kept, are rows in the data set, int64. Raises DataError: the coder cannot learn from the data.
    """
    pool = training_rows(split)
    total = len(split.labelled) + len(split.unlabelled)
    if len(pool) < total:
        log.info("%s is fitted to %d of %d training items", coder.name, len(pool), total)
    with Reader(dataset, native_image_size(dataset)) as reader:
        x, pool = read_inputs(reader, pool)
        start = time.perf_counter()
        with stage(f"fitting {coder.name}"):
            coder.fit(x, split.training_labels(dataset.require_labels()).take(pool))
        seconds = time.perf_counter() - start
        del x
        read = functools.partial(read_inputs, reader)
        coded = encode_database(coder, *read(queries), database, read, keep)
    return replace(coded, fit_seconds=seconds)


def training_rows(split: Split) -> Rows:
    """Return the rows that an array method is fitted to, int64, ascending: at most 100,000, of
    which supervised methods see the labels of the split."""
    labelled = split.labelled[:: -(-len(split.labelled) // _FIT_ROWS)]
    count = min(_FIT_ROWS - len(labelled), len(split.unlabelled))
    spread = np.linspace(0, len(split.unlabelled), count, endpoint=False).astype(np.int64)
    return np.union1d(labelled, split.unlabelled[spread])


def encode_database(
    coder: Coder,
    xq: Floats,
    query_rows: Rows,
    database: Rows,
    read: Callable[[Rows], tuple[Floats, Rows]],
    keep: Rows,
) -> Coded:
    """Encode the items ``database``, and keep the vectors of those in ``keep``.

    ``read`` gives the vectors of the readable ones of some rows, and these rows.
    """
    parts = []
    start = time.perf_counter()
    with stage("encoding", len(database)) as encoding:
        for first in range(0, len(database), _BLOCK):
            block = database[first : first + _BLOCK]
            x, rows = read(block)
            parts.append((rows, coder.encode(x)))
            encoding.update(len(block))
    seconds = time.perf_counter() - start
    base_rows, codes = map(np.concatenate, zip(*parts, strict=True))
    vectors, vector_rows = read(database[np.isin(database, keep)]) if len(keep) else (xq[:0], keep)
    return Coded(
        coder, query_rows, base_rows, xq, codes, vectors, vector_rows, encode_seconds=seconds
    )


def needs_perceptron(dataset: Dataset) -> bool:
    """Whether the items are features, or images too small for convolutions (digits)."""
    from ..nn.backbones import VGG

    return native_image_size(dataset) < VGG.SMALLEST


def native_image_size(dataset: Dataset) -> int:
    """Side in pixels of the images for array methods; 0 for features."""
    return (dataset.native_size or 32) if isinstance(dataset, ImageDataset) else 0


def input_blocks(reader: Reader, rows: Rows) -> Iterator[tuple[Floats, Rows]]:
    """Input of array methods in blocks: features, or pixels in [0, 1], float32 [n, width]; and the
    readable rows int64 [n]."""
    for start in range(0, len(rows), _READ_ROWS):
        block = rows[start : start + _READ_ROWS]
        values, ok = reader.fetch(block)
        scale = np.float32(1 / 255 if values.dtype == np.uint8 else 1)
        yield values.reshape(len(values), -1).astype(np.float32) * scale, block[ok]


def read_inputs(reader: Reader, rows: Rows) -> tuple[Floats, Rows]:
    """The :func:`input_blocks` as one array."""
    parts, readable = zip(*input_blocks(reader, rows), strict=True)
    return np.concatenate(parts), np.concatenate(readable)


def input_neighbours(dataset: Dataset, query_rows: Rows, base_rows: Rows) -> Rows | None:
    """The neighbours of :func:`nearest` for the spaced queries by features, or by pixels of tiny
    images; None for larger images."""
    if not needs_perceptron(dataset):
        return None
    with Reader(dataset, native_image_size(dataset)) as reader, stage("neighbour recall"):
        xq, _ = read_inputs(reader, query_rows[spaced_queries(len(query_rows))])
        return nearest(xq, (x for x, _ in input_blocks(reader, base_rows)))
