"""Searching: queries (images, embeddings or encoded vectors) ─► ids and scores of the k best items.

The network encodes the queries, :mod:`gpq_faiss.indexes` searches. Programs that have vectors need only the latter.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..build.item_files import known_items
from ..cluster.search import ClusterIndex
from ..data.base import Dataset, ImageDataset
from ..data.images import is_image_name
from ..data.open import is_form, open_data
from ..data.paths import local_path, without_secrets
from ..encoder import Encoder, OnnxEncoder, open_encoder
from ..errors import DataError, MismatchError, UsageError
from ..evaluation.tables import Shown
from ..faissio.io import read_sidecar
from ..files import fingerprint
from ..indexes.base import Index
from ..indexes.filters import Filter
from ..indexes.manifest import is_manifest
from ..indexes.opening import open_index
from ..inputs import check_memory, parse_bytes
from ..nn.device import gpu_memory, on_cpu, resolve_device
from ..progress import stage
from ..report.gallery import Cell, save_gallery
from ..store.items import Item
from ..store.reader import RowReader

if TYPE_CHECKING:
    from ..gpu.index import DeviceIndex

log = logging.getLogger(__name__)

_QUERIES = 1 << 14
"""Queries per call, so that progress shows."""
_FITS = "the index and its search do not fit: lower --memory, free the GPU, or use --device cpu"


def search(
    model: str | Path,
    index: str | Path,
    queries: object,
    *,
    k: int = 10,
    rows: str | None = None,
    memory: str | int | None = None,
    nprobe: int | None = None,
    where: Filter | None = None,
    min_score: float | None = None,
    device: str = "cpu",
    threads: int | None = None,
    ray: str | None = None,
    workers: int | None = None,
    data_args: Mapping[str, Any] | None = None,
) -> SearchResult:
    """Find the k best items of an index for each query.

    Args:
        model: model folder, or an ONNX file of ``gpq export-encoder``, which needs no torch.
        index: of :func:`gpq_faiss.index`, any Faiss index with these codebooks, or a manifest of shards.
        queries: an image, or anything that :func:`gpq_faiss.open_data` accepts.
        k: results per query, 1 to the number of items.
        rows: use only these queries (``"0:8"``).
        memory: see :func:`open_index`; on a GPU what a search may use beyond the index and the results (default: 1 GiB).
        nprobe: visit only this many lists (:meth:`..indexes.base.Index.search`), on the CPU.
        where: search only items that pass this filter (:mod:`..indexes.filters`).
        min_score: return all items with at least this score, from all lists, instead of ``k`` items per query.
        device: device of the network and the search.
        threads: CPU threads of the search (default: all cores).
        ray, workers: address of a Ray cluster (:func:`..cluster.connect.connected`) that searches the shards of a manifest, and the
            number of its processes that hold them; ``memory`` is then per worker.
        data_args: further arguments of :func:`gpq_faiss.open_data` for ``queries``.

    Returns:
        Ids and scores; equal scores are ordered by id. A warning is logged if some queries have fewer than ``k`` results.

    Raises:
        MismatchError: index and model have different codebooks.
        DataError: an unreadable file, an empty index, or k larger than the index.
        DeviceError: the device does not exist, or the index does not fit on it; there is no fall-back to another device.
        UsageError: options out of range, in conflict, or not supported on the device.
    """
    if min_score is not None and nprobe is not None:
        raise UsageError("a search by minimum score is exact: leave out nprobe")
    encoder = open_encoder(model, device)
    place = _device_of(index, device, nprobe) if ray is None else None
    budget = None if memory is None else parse_bytes(memory)
    with contextlib.ExitStack() as stack:
        with stage("opening the index"), gpu_memory(_FITS):
            opened: Index | DeviceIndex
            if ray is not None:
                opened = ClusterIndex(index, ray, budget, workers=workers)
            elif place is not None:
                from ..gpu.index import MEMORY, to_gpu

                opened = to_gpu(open_index(index), place, memory=budget or MEMORY)
            else:
                opened = open_index(index, budget)
        stack.callback(opened.close)
        if opened.fingerprint != encoder.codebooks_fingerprint:
            raise MismatchError(
                f"{index} has other codebooks ({opened.fingerprint}) than {model} ({encoder.codebooks_fingerprint}): "
                "build the index with this model"
            )
        # Half of the budget is for the search itself.
        half = None if budget is None or place is not None else budget // 2
        source = open_queries(queries, **(data_args or {}))
        vectors, ids, names = query_vectors(encoder, source, rows=rows, memory=half)
        log.info("%s: %s", index, opened.describe())
        with gpu_memory(_FITS):
            if min_score is None:
                scores, found = _search_all(opened, vectors, k, nprobe=nprobe, where=where, threads=threads)
            else:
                scores, found = _padded(
                    *opened.range_search(vectors, min_score, where=where, threads=threads)
                )
        exact = None
        if nprobe is not None:
            assert isinstance(opened, Index)
            exact = scores[:, -1] > opened.bound(vectors, k, nprobe)
        result = SearchResult(
            found,
            scores,
            ids,
            names,
            opened.fingerprint,
            exact=exact,
            description=opened.describe(),
            # JSON has no infinity.
            min_score=None if min_score is None else float(np.nan_to_num(min_score)),
            items=_items(index, found),
            queries=source if isinstance(source, ImageDataset) else None,
            pictured=_made_from(index, source) and bool(np.isin(found[found != -1], source.ids).all()),
        )
    if result.short:
        log.warning(
            f"{result.short} of {len(ids)} queries have fewer than {k} results: too few items pass the filter"
        )
    return result


def _made_from(index: str | Path, data: Dataset) -> bool:
    """Whether an index file is known to be of the items of ``data``."""
    about = None if is_manifest(index) else read_sidecar(index)
    return about is not None and about["extra"].get("data_fingerprint") == data.fingerprint


def _device_of(index: str | Path, device: str, nprobe: int | None) -> str | None:
    """The device that searches, None for the CPU: with ``auto`` also for what a GPU does not support."""
    if on_cpu(device):
        return None
    place = str(resolve_device(device))
    if not (is_manifest(index) or nprobe is not None):
        return place
    if device != "auto":
        raise UsageError(
            f"shards, and lists with nprobe, are searched on the CPU, not on {device}: take --device cpu"
        )
    log.info("searching on the CPU, as the GPU does not support this; the network runs on %s", place)
    return None


def _items(index: str | Path, found: NDArray[np.int64]) -> dict[int, Item] | None:
    """Names and labels of the results, from the file beside the index; None if there is no such file."""
    items = known_items(index)
    if items is None:
        return None
    with items:
        ids = np.unique(found[found != -1])
        return {int(i): item for i, item in zip(ids, items.lookup(ids), strict=True) if item is not None}


def _search_all(
    index: Index | DeviceIndex, vectors: NDArray[np.float32], k: int, **options: Any
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Scores and ids [Q, k] of all queries, in blocks."""
    parts = []
    with stage("searching", len(vectors), "query") as searching:
        for start in range(0, len(vectors), _QUERIES):
            block = vectors[start : start + _QUERIES]
            parts.append(index.search(block, k, **options))
            searching.advance(len(block))
    scores, found = (np.concatenate(part) for part in zip(*parts, strict=True))
    return scores, found


def _padded(
    lims: NDArray[np.int64], scores: NDArray[np.float32], ids: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Results of a range search as a matrix, padded with -inf and -1."""
    counts = np.diff(lims)
    shape = (len(counts), int(counts.max(initial=0)))
    D, found = np.full(shape, -np.inf, np.float32), np.full(shape, -1, np.int64)
    filled = np.arange(shape[1]) < counts[:, None]
    D[filled], found[filled] = scores, ids
    return D, found


# Queries ----------------------------------------------------------------------------------------------------------------


def parse_rows(text: str | None, n: int) -> NDArray[np.int64]:
    """Row numbers from ``"0:8"``, ``"3,5,9"`` or ``"100:200:10"`` (Python slices) for ``n`` items; all for None.

    Raises:
        UsageError: another form, or rows out of range.

    Examples:
        >>> parse_rows("0:3", 10).tolist(), parse_rows("5,-1", 10).tolist()
        ([0, 1, 2], [5, 9])
    """
    every, parts = np.arange(n), []
    try:
        for part in (":" if text is None else text).split(","):
            at: Any = [int(p) if p.strip() else None for p in part.split(":")]
            parts.append(every[slice(*at)] if len(at) > 1 else every[at])
        rows = np.concatenate(parts)
    except (ValueError, TypeError, IndexError):
        rows = every[:0]
    if not len(rows):
        raise UsageError(f"--rows {text}: write row numbers (3,5,9) or a range (0:8) of the {n:,} items")
    return rows


def open_queries(queries: object, **options: Any) -> Dataset:
    """Open queries as a data set: an image, or anything that :func:`open_data` takes, with its ``options``.

    Raises:
        MismatchError: vectors of items (``features.h5``).
        UsageError, DataError: as :func:`gpq_faiss.data.open.open_data`.
    """
    queries = str(queries) if isinstance(queries, Path) else queries
    if not isinstance(queries, str) or is_form(queries):
        return open_data(queries, **options)
    path, name = Path(queries), without_secrets(queries)
    try:
        own = RowReader(path).header.kind if path.suffix in (".h5", ".hdf5") else None
    except DataError:
        own = None  # other HDF5 files, and damaged ones, are read below
    if own is not None:
        raise MismatchError(f"{name} holds {own} of items: give the data of the queries instead")
    if not is_image_name(name) or (path := local_path(queries)).is_dir():
        return open_data(queries, **options)
    if not path.is_file():
        raise DataError(f"{name} not found: no such image")
    return ImageDataset(name=name, fingerprint=fingerprint(queries), max_bad=0.0, paths=[str(path)])


def query_vectors(
    encoder: Encoder | OnnxEncoder, queries: Dataset, *, rows: str | None = None, memory: int | None = None
) -> tuple[NDArray[np.float32], NDArray[np.int64], tuple[str, ...]]:
    """Run the network on queries: vectors float32 [Q, M·d], ids int64 [Q] and names.

    ``memory`` limits the vectors in bytes (default: the free memory).

    Raises:
        MismatchError: data that does not fit the model.
        DataError: no queries, or unreadable ones.
    """
    if not len(queries):
        raise DataError(f"{queries.name} has no queries")
    positions = parse_rows(rows, len(queries))
    M, _, d = encoder.shape
    what = f"{len(positions):,} queries"
    check_memory(2 * 4 * M * d * len(positions), what, memory, "select some with --rows")
    positions, vectors = encoder.embed_rows(queries, positions, queries=True)
    ids = queries.ids[positions]
    path_of = getattr(queries, "image_path", lambda i: None)
    return vectors, ids, tuple(path_of(int(p)) or str(i) for p, i in zip(positions, ids, strict=True))


# Results ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class SearchResult(Shown):
    """The k best items per query, best first.

    Attributes:
        ids: int64 [Q, k], the user's ids; -1 fills rows with fewer than k results (:attr:`short`).
        scores: float32 [Q, k], inner products of the query vector with the items' codewords.
        query_ids: int64 [Q].
        query_names: Q display names: the path of the query if it has one, else its id.
        codebooks_fingerprint: of the codebooks of model and index.
        exact: bool [Q], with ``nprobe``: which results are proven to be those of an exact search; None: all.
        description: how the index was searched.
        min_score: the requested minimum score, if the search was by score instead of ``k``.
        items: by id, names, labels and kept columns of the results; None if nothing beside the index names its items.
        queries: the queries, if they are images; ``pictured``: whether the index is of the same images.
    """

    ids: NDArray[np.int64]
    scores: NDArray[np.float32]
    query_ids: NDArray[np.int64]
    query_names: tuple[str, ...]
    codebooks_fingerprint: str
    exact: NDArray[np.bool_] | None = None
    description: str = ""
    min_score: float | None = None
    items: Mapping[int, Item] | None = None
    queries: ImageDataset | None = None
    pictured: bool = False

    @property
    def short(self) -> int:
        """Number of queries with fewer than ``k`` results; 0 in a search by minimum score."""
        return int((self.ids == -1).any(axis=1).sum()) if self.min_score is None else 0

    def _answers(self) -> Iterator[tuple[int, str, dict[str, list[Any]]]]:
        """Id and name of each query, and of its results ids, scores, and by column what is known of them."""
        items = self.items or {}
        columns = list(dict.fromkeys(name for item in items.values() for name in item.texts))
        labelled, nothing = any(item.labels is not None for item in items.values()), Item({})
        rows = zip(self.query_ids.tolist(), self.query_names, self.ids, self.scores, strict=True)
        for query, name, ids, scores in rows:
            there = ids != -1
            found: dict[str, list[Any]] = {"id": ids[there].tolist(), "score": scores[there].tolist()}
            known = [items.get(i, nothing) for i in found["id"]]
            found |= {column: [item.texts.get(column) for item in known] for column in columns}
            if labelled:
                found["labels"] = [None if item.labels is None else list(item.labels) for item in known]
            yield query, name, found

    def to_dict(self) -> dict[str, Any]:
        """For JSON: one entry per query, without padding; with ``names``, ``labels`` and kept columns if known."""
        plural = {"id": "ids", "score": "scores", "name": "names"}
        return {
            **({"k": int(self.ids.shape[1])} if self.min_score is None else {"min_score": self.min_score}),
            "codebooks_fingerprint": self.codebooks_fingerprint,
            "description": self.description,
            **({} if self.exact is None else {"proven_exact": int(self.exact.sum())}),
            "queries": [
                {"id": query, "name": name} | {plural.get(column, column): found[column] for column in found}
                for query, name, found in self._answers()
            ],
        }

    def rows(self) -> list[dict[str, Any]]:
        """A row per result, for a table."""
        return list(self._rows())

    def _rows(self) -> Iterator[dict[str, Any]]:
        for _, name, found in self._answers():
            for rank, (i, score, *known) in enumerate(zip(*found.values(), strict=True), 1):
                texts = (", ".join(text) if isinstance(text, list) else text or "" for text in known)
                columns = dict(zip(list(found)[2:], texts, strict=True))
                yield {"query": name, "rank": rank, "id": str(i), "score": score, **columns}

    def about(self) -> list[str]:
        """How the index was searched."""
        lines = [self.description] if self.description else []
        if self.exact is not None:
            lines.append(f"{int(self.exact.sum())} of {len(self.exact)} results are proven to be exact")
        return lines

    def _repr_html_(self) -> str:
        table = super()._repr_html_()
        if self.queries is None or not self.pictured:
            return table
        few = replace(self, query_ids=self.query_ids[:8], ids=self.ids[:8, :10], scores=self.scores[:8, :10])
        with tempfile.TemporaryDirectory() as folder:
            picture = few.draw(self.queries, None, Path(folder) / "found.png").read_bytes()
        return f'<img src="data:image/png;base64,{base64.b64encode(picture).decode()}">{table}'

    def draw(
        self, items: Dataset, queries: Dataset | None, out: str | Path, *, overwrite: bool = False
    ) -> Path:
        """Draw each query with its results, framed by relevance if both have labels.

        Args:
            items: images of the indexed items, with the same ids.
            queries: images of the queries; None: those that were searched, if they were images.
            out: .png, .svg or .pdf.

        Raises:
            DataError: not images, or an id is missing from ``items`` or ``queries``.
        """
        queries = self.queries if queries is None else queries
        if not isinstance(items, ImageDataset) or not isinstance(queries, ImageDataset):
            raise DataError("a picture needs images of the items (--images) and of the queries: give both")
        rows = []
        for at, ids, scores in zip(_rows_of(queries, self.query_ids), self.ids, self.scores, strict=True):
            found = _rows_of(items, ids[ids != -1])
            results = zip(found, scores.tolist(), _relevant(queries, at, items, found), strict=False)
            rows.append(
                [_cell(queries, at), *(_cell(items, row, f"{score:.2f}", of) for row, score, of in results)]
            )
        return save_gallery(rows, out, overwrite=overwrite)


def _relevant(queries: ImageDataset, query: int, items: ImageDataset, rows: list[int]) -> list[bool | None]:
    """Which items share a label with the query; None: not known."""
    one, other = queries.labels, items.labels
    if one and other and one.class_names == other.class_names and one.has()[query]:
        return [bool((one.packed[query] & other.packed[row]).any()) for row in rows]
    return [None] * len(rows)


def _rows_of(dataset: Dataset, ids: NDArray[np.int64]) -> list[int]:
    """Rows of items by id. Raises DataError: one is missing."""
    rows = dataset.rows_of(ids)
    if (rows < 0).any():
        raise DataError(
            f"{dataset.name} has no image with id {ids[rows < 0][0]}: give the data of the index and of the queries"
        )
    return [int(row) for row in rows]


def _cell(dataset: ImageDataset, row: int, score: str = "", relevant: bool | None = None) -> Cell:
    """An image, or a grey square in place of one that cannot be read, with its class names and score."""
    image = dataset.read(np.array([row]))[0]
    classes = ", ".join(() if dataset.labels is None else dataset.labels.names_of(row))
    shown = np.full((32, 32, 3), 160, np.uint8) if image is None else image
    return Cell(shown, " · ".join(filter(None, (classes, score))), relevant)
