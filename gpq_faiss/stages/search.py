"""Searching: queries (images, embeddings or vectors) ─► ids and scores of the k best items.

The network encodes the queries, and :mod:`gpq_faiss.indexes` searches. Programs that already have
vectors need only the latter.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Floats, Ids
from ..data.base import Dataset, ImageDataset
from ..data.images import is_image_name
from ..data.open import is_form, open_data
from ..data.paths import local_path, without_secrets
from ..encoder import Encoder, OnnxEncoder, open_encoder
from ..errors import DataError, MismatchError, UsageError
from ..evaluation.tables import Shown
from ..files import fingerprint
from ..indexes.index import IdList, Index
from ..indexes.opening import open_index
from ..inputs import check_memory
from ..nn.device import gpu_memory
from ..progress import stage
from ..report.gallery import Cell, save_gallery
from ..store.items import Item
from ..store.rows import RowReader

if TYPE_CHECKING:
    from ..gpu.index import DeviceIndex

log = logging.getLogger(__name__)

_QUERIES = 1 << 14
"""Queries for each call of the index, so that progress shows."""
_FITS = "the index and its search do not fit: free the GPU, or use --device cpu"


def search(
    model: str | Path | Encoder | OnnxEncoder,
    index: str | Path,
    queries: object,
    *,
    k: int = 10,
    rows: str | None = None,
    min_score: float | None = None,
    allow: IdList | None = None,
    deny: IdList | None = None,
) -> SearchResult:
    """Find the k best items of an index for each query.

    Args:
        model: a model folder, an ONNX file of ``gpq export-encoder``, which needs no torch, or an
            :class:`..encoder.Encoder`; if that is on a GPU, the search runs there too.
        index: an ``index.faiss``, ``index.lists`` or ``codes.h5`` of the model, or any ``IndexPQ``
            with its codebooks. Changes of a service beside it are applied.
        queries: an image, or anything that :func:`gpq_faiss.open_data` accepts.
        k: number of results for each query, 1 to the number of items.
        rows: use only these queries (``"0:8"``).
        min_score: find all items with at least this score instead of k items.
        allow: search only the items with these ids.
        deny: leave out the items with these ids.

    Returns:
        Ids and scores; equal scores are in ascending order of id. A warning is logged if some
        queries have fewer than ``k`` results.

    Raises:
        MismatchError: index and model have different codebooks.
        DataError: an unreadable file, an empty index, or no queries.
        DeviceError: the index does not fit on the GPU; there is no silent change of the device.
        UsageError: an option is out of range.
    """
    encoder = open_encoder(model) if isinstance(model, str | Path) else model
    with contextlib.ExitStack() as stack:
        with stage("opening the index"):
            opened = stack.enter_context(open_index(index))
        if opened.fingerprint != encoder.codebooks_fingerprint:
            raise MismatchError(
                f"{index} has other codebooks ({opened.fingerprint}) than {encoder.source} "
                f"({encoder.codebooks_fingerprint}): build the index with this model"
            )
        source = open_queries(queries)
        vectors, ids, names = query_vectors(encoder, source, rows=rows)
        description = f"{opened.ntotal:,} items"
        with gpu_memory(_FITS):
            searched: Index | DeviceIndex = opened
            if isinstance(encoder, Encoder) and encoder.device.type != "cpu":
                from ..gpu.index import to_gpu

                searched = to_gpu(opened, str(encoder.device))
                description += f" on {encoder.device}"
            if min_score is None:
                scores, item_ids = _search_all(searched, vectors, k, allow=allow, deny=deny)
            else:
                results = searched.range_search(vectors, min_score, allow=allow, deny=deny)
                scores, item_ids = _padded(*results)
        items = None
        if opened.items is not None:
            result_ids = np.unique(item_ids[item_ids != -1])
            looked_up = zip(result_ids.tolist(), opened.items.lookup(result_ids), strict=True)
            items = {number: item for number, item in looked_up if item is not None}
        same_data = opened.items is not None and opened.items.data_fingerprint == source.fingerprint
        result = SearchResult(
            item_ids,
            scores,
            ids,
            names,
            opened.fingerprint,
            description=description,
            # JSON has no infinity.
            min_score=None if min_score is None else float(np.nan_to_num(min_score)),
            items=items,
            data_fingerprint="" if opened.items is None else opened.items.data_fingerprint,
            queries=source if isinstance(source, ImageDataset) else None,
            pictured=same_data and bool(np.isin(item_ids[item_ids != -1], source.ids).all()),
        )
    if result.short:
        log.warning(
            "%d of %d queries have fewer than %d results: too few items pass the filter",
            *(result.short, len(ids), k),
        )
    return result


def _search_all(
    index: Index | DeviceIndex, vectors: Floats, k: int, **options: Any
) -> tuple[Floats, Ids]:
    """Return scores and ids [Q, k] of all queries."""
    blocks = []
    with stage("searching", len(vectors), "query") as searching:
        for start in range(0, len(vectors), _QUERIES):
            block = vectors[start : start + _QUERIES]
            blocks.append(index.search(block, k, **options))
            searching.advance(len(block))
    scores, ids = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
    return scores, ids


def _padded(lims: Ids, scores: Floats, ids: Ids) -> tuple[Floats, Ids]:
    """Return the results of a range search as matrices, padded with -inf and -1."""
    counts = np.diff(lims)
    shape = (len(counts), int(counts.max(initial=0)))
    D, padded_ids = np.full(shape, -np.inf, np.float32), np.full(shape, -1, np.int64)
    filled = np.arange(shape[1]) < counts[:, None]
    D[filled], padded_ids[filled] = scores, ids
    return D, padded_ids


# Queries ------------------------------------------------------------------------------------------


def parse_rows(text: str | None, n: int) -> Ids:
    """Return row numbers from ``"0:8"``, ``"3,5,9"`` or ``"100:200:10"`` (Python slices); all for
    None.

    Raises:
        UsageError: the text is of another form, or a row is not one of the ``n`` items.

    Examples:
        >>> parse_rows("0:3", 10).tolist(), parse_rows("5,-1", 10).tolist()
        ([0, 1, 2], [5, 9])
    """
    numbers, selections = np.arange(n), []
    try:
        for selection in (":" if text is None else text).split(","):
            bounds: Any = [int(bound) if bound.strip() else None for bound in selection.split(":")]
            selections.append(numbers[slice(*bounds)] if len(bounds) > 1 else numbers[bounds])
        rows = np.concatenate(selections)
    except (ValueError, TypeError, IndexError):
        rows = numbers[:0]
    if not len(rows):
        raise UsageError(
            f"--rows {text}: write row numbers (3,5,9) or a range (0:8) of the {n:,} items"
        )
    return rows


def open_queries(queries: object, **options: Any) -> Dataset:
    """Open queries as a data set: an image, or anything that :func:`open_data` takes, with its
    options.

    Raises:
        MismatchError: they are vectors or codes of items (``features.h5``, ``codes.h5``).
        UsageError, DataError: see :func:`gpq_faiss.data.open.open_data`.
    """
    queries = str(queries) if isinstance(queries, Path) else queries
    if not isinstance(queries, str) or is_form(queries):
        return open_data(queries, **options)
    path, name = Path(queries), without_secrets(queries)
    if path.suffix in (".h5", ".hdf5"):
        kind = None
        with contextlib.suppress(DataError), RowReader(path) as reader:
            kind = reader.header.kind
        if kind is not None:
            raise MismatchError(
                f"{name} holds {kind} of items: give the data of the queries instead"
            )
    if not is_image_name(name) or (path := local_path(queries)).is_dir():
        return open_data(queries, **options)
    if not path.is_file():
        raise DataError(f"{name} not found: no such image")
    return ImageDataset(name=name, fingerprint=fingerprint(queries), max_bad=0.0, paths=[str(path)])


def query_vectors(
    encoder: Encoder | OnnxEncoder, queries: Dataset, *, rows: str | None = None
) -> tuple[Floats, Ids, tuple[str, ...]]:
    """Run the network on queries: vectors float32 [Q, M*d], ids int64 [Q] and names.

    Raises:
        MismatchError: the data do not fit the model.
        DataError: there are no queries, or unreadable ones.
    """
    if not len(queries):
        raise DataError(f"{queries.name} has no queries")
    positions = parse_rows(rows, len(queries))
    M, _, d = encoder.shape
    needed = 2 * 4 * M * d * len(positions)
    check_memory(needed, f"{len(positions):,} queries", remedy="select some with --rows")
    positions, vectors = encoder.embed_rows(queries, positions, queries=True)
    ids = queries.ids[positions]
    path_of = getattr(queries, "image_path", lambda row: None)
    names = [
        path_of(row) or str(number)
        for row, number in zip(positions.tolist(), ids.tolist(), strict=True)
    ]
    return vectors, ids, tuple(names)


# Results ------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class SearchResult(Shown):
    """The k best items of each query, best first.

    Attributes:
        ids: int64 [Q, k]; -1 fills rows with fewer than k results (:attr:`short`).
        scores: float32 [Q, k], inner products of the query with the codewords of the items.
        query_ids: int64 [Q].
        query_names: Q names to display: the path of the query if it has one, else its id.
        codebooks_fingerprint: of the codebooks of model and index.
        description: what was searched.
        min_score: the requested minimum score, if the search was by score.
        items: names, labels and kept columns of the results by id; None if they are not known.
        data_fingerprint: of the data set of the items; empty if it is not known.
        queries: the queries, if they are images.
        pictured: whether the items are images of the same data set as the queries.
    """

    ids: NDArray[np.int64]
    scores: NDArray[np.float32]
    query_ids: NDArray[np.int64]
    query_names: tuple[str, ...]
    codebooks_fingerprint: str
    description: str = ""
    min_score: float | None = None
    items: Mapping[int, Item] | None = None
    data_fingerprint: str = ""
    queries: ImageDataset | None = None
    pictured: bool = False

    @property
    def short(self) -> int:
        """Number of queries with fewer than ``k`` results; 0 in a search by minimum score."""
        return int((self.ids == -1).any(axis=1).sum()) if self.min_score is None else 0

    def _answers(self) -> Iterator[tuple[int, str, dict[str, list[Any]]]]:
        """Yield id and name of each query, and by column its results."""
        items, unknown = self.items or {}, Item({})
        columns = list(dict.fromkeys(name for item in items.values() for name in item.texts))
        has_labels = any(item.labels is not None for item in items.values())
        rows = zip(self.query_ids.tolist(), self.query_names, self.ids, self.scores, strict=True)
        for query, name, ids, scores in rows:
            found_mask = ids != -1
            answer: dict[str, list[Any]] = {
                "id": ids[found_mask].tolist(),
                "score": scores[found_mask].tolist(),
            }
            results = [items.get(number, unknown) for number in answer["id"]]
            answer |= {column: [item.texts.get(column) for item in results] for column in columns}
            if has_labels:
                answer["labels"] = [
                    None if item.labels is None else list(item.labels) for item in results
                ]
            yield query, name, answer

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: one entry for each query, without padding, with what is known of the
        items.
        """
        plural = {"id": "ids", "score": "scores", "name": "names"}
        limit: dict[str, Any] = {"k": int(self.ids.shape[1])}
        if self.min_score is not None:
            limit = {"min_score": self.min_score}
        return {
            **limit,
            "codebooks_fingerprint": self.codebooks_fingerprint,
            "description": self.description,
            "queries": [
                {"id": query, "name": name}
                | {plural.get(column, column): answer[column] for column in answer}
                for query, name, answer in self._answers()
            ],
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each result, for a table."""
        return list(self._rows())

    def _rows(self) -> Iterator[dict[str, Any]]:
        for _, name, answer in self._answers():
            for rank, row in enumerate(zip(*answer.values(), strict=True), 1):
                number, score, *texts = row
                columns = {
                    column: ", ".join(text) if isinstance(text, list) else text or ""
                    for column, text in zip(list(answer)[2:], texts, strict=True)
                }
                yield {"query": name, "rank": rank, "id": str(number), "score": score, **columns}

    def about(self) -> list[str]:
        """Return what was searched."""
        return [self.description] if self.description else []

    def _repr_html_(self) -> str:
        table = super()._repr_html_()
        if self.queries is None or not self.pictured:
            return table
        first = replace(
            self, query_ids=self.query_ids[:8], ids=self.ids[:8, :10], scores=self.scores[:8, :10]
        )
        with tempfile.TemporaryDirectory() as folder:
            path = first.draw(self.queries, None, Path(folder) / "results.png")
            picture = base64.b64encode(path.read_bytes()).decode()
        return f'<img src="data:image/png;base64,{picture}">{table}'

    def draw(
        self, items: Dataset, queries: Dataset | None, out: str | Path, *, overwrite: bool = False
    ) -> Path:
        """Draw each query with its results, framed by relevance if both have labels.

        A result's picture is the image of its name, or of its id if the items have no names and are
        of this data set. A grey square stands for an image that is missing.

        Args:
            items: images of the indexed items.
            queries: images of the queries (default: those that were searched, if they were images).
            out: .png, .svg or .pdf.

        Raises:
            DataError: they are not images, or nothing says which image belongs to which item.
        """
        queries = self.queries if queries is None else queries
        if not isinstance(items, ImageDataset) or not isinstance(queries, ImageDataset):
            raise DataError(
                "a picture needs images of the items (--images) and of the queries: give both"
            )
        query_rows = queries.rows_of(self.query_ids)
        if (query_rows < 0).any():
            missing = self.query_ids[query_rows < 0][0]
            raise DataError(
                f"{queries.name} has no image with id {missing}: give the queries' data"
            )
        row_of = self._picture_rows(items)
        rows = []
        for query_row, ids, scores in zip(query_rows.tolist(), self.ids, self.scores, strict=True):
            query_labels = _labels_of(queries, query_row)
            row = [_cell(queries, query_row, ", ".join(query_labels or ()))]
            for number, score in zip(ids[ids != -1].tolist(), scores.tolist(), strict=False):
                item_row = row_of.get(number, -1)
                item = (self.items or {}).get(number, Item({}))
                labels = item.labels if self.items else _labels_of(items, item_row)
                shares = (
                    None
                    if not query_labels or labels is None
                    else bool({*query_labels} & {*labels})
                )
                caption = " · ".join(filter(None, (", ".join(labels or ()), f"{score:.2f}")))
                row.append(_cell(items, item_row, caption, shares))
            rows.append(row)
        return save_gallery(rows, out, overwrite=overwrite)

    def _picture_rows(self, images: ImageDataset) -> dict[int, int]:
        """Return the row of the image of each result, by the id of the result; -1 if it is
        missing.
        """
        ids = np.unique(self.ids[self.ids != -1])
        names = [(self.items or {}).get(number, Item({})).name for number in ids.tolist()]
        if any(names) and "name" in images.texts:
            row_of_name = {name: row for row, name in enumerate(images.texts["name"].tolist())}
            rows: Sequence[int] = [row_of_name.get(name or "", -1) for name in names]
        elif self.data_fingerprint in ("", images.fingerprint):
            rows = images.rows_of(ids).tolist()
        else:
            raise DataError(
                f"{images.name} is not the data of the index, and nothing names its items: "
                "give the data that were encoded"
            )
        return dict(zip(ids.tolist(), rows, strict=True))


def _labels_of(images: ImageDataset, row: int) -> tuple[str, ...] | None:
    """Return the labels of an image; None if they are not known."""
    if row < 0 or images.labels is None or not images.labels.has()[row]:
        return None
    return tuple(images.labels.names_of(row))


def _cell(images: ImageDataset, row: int, caption: str, relevant: bool | None = None) -> Cell:
    """Return an image with its caption, or a grey square in place of one that cannot be read."""
    image = images.read(np.array([row]))[0] if row >= 0 else None
    shown = np.full((32, 32, 3), 160, np.uint8) if image is None else image
    return Cell(shown, caption, relevant)
