"""Searching: queries (images, embeddings or vectors) ─► ids and scores of the k best items.

The network encodes the queries, and :mod:`gpq_faiss.indexes` searches. Programs that already have
vectors need only the latter.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..codes.checks import Ids
from ..data.base import Dataset, ImageDataset
from ..data.open import open_data
from ..encoder import Encoder, OnnxEncoder, open_encoder
from ..errors import DataError, MismatchError, UsageError, optional
from ..evaluation.tables import Shown
from ..indexes.index import IdList, Index
from ..indexes.opening import open_index
from ..nn.device import gpu_memory
from ..report.gallery import Cell, save_gallery
from ..store.items import CHANGED_DATA, Item, ItemSource, PictureRows

if TYPE_CHECKING:
    import pandas

    from ..gpu.index import DeviceIndex

log = logging.getLogger(__name__)

_FITS = "the index and its search do not fit: free the GPU, or use --device cpu"
_COLUMNS = ["query", "rank", "id", "name", "labels", "score"]
_RESULT_NAMES = {*_COLUMNS, "ids", "names", "scores", "file_hash"}
"""Names in tables and JSON that no kept column replaces, and the hash of image files."""


def search(
    model: str | Path | Encoder | OnnxEncoder,
    index: str | Path | Index,
    queries: object,
    *,
    k: int = 10,
    rows: str | ArrayLike | None = None,
    allow: IdList | None = None,
    deny: IdList | None = None,
) -> SearchResult:
    """Find the k best items of an index for each query.

    Args:
        model: a model folder, an ONNX file of ``gpq export-encoder``, which needs no torch, or an
            :class:`..encoder.Encoder`; if that is on a GPU, the search runs there too.
        index: an ``index.faiss``, ``index.lists`` or ``codes.h5`` of the model, any ``IndexPQ``
            with its codebooks, or an open index. Changes of a service beside it are applied.
        queries: an image, or anything that :func:`gpq_faiss.open_data` accepts.
        k: number of results for each query; at most that of the items.
        rows: use only these queries: ``"0:8"``, or row numbers.
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
    opening = contextlib.nullcontext(index) if isinstance(index, Index) else open_index(index)
    with opening as opened, gpu_memory(_FITS):
        if opened.fingerprint != encoder.codebooks_fingerprint:
            raise MismatchError(
                f"{index} has other codebooks ({opened.fingerprint}) than {encoder.source} "
                f"({encoder.codebooks_fingerprint}): build the index with this model"
            )
        dataset = open_data(queries)
        rows = ":" if rows is None else rows
        text = rows if isinstance(rows, str) else ",".join(map(str, np.asarray(rows).tolist()))
        positions = parse_rows(text, len(dataset))
        positions, vectors = encoder.embed_rows(dataset, positions, queries=True)
        searched: Index | DeviceIndex = opened
        description = f"{opened.ntotal:,} items"
        if isinstance(encoder, Encoder) and encoder.device.type != "cpu":
            from ..gpu.index import to_gpu

            searched = to_gpu(opened, str(encoder.device))
            description += f" on {encoder.device}"
        scores, item_ids = searched.search(
            vectors, min(k, opened.ntotal) if isinstance(k, int) else k, allow=allow, deny=deny
        )
        source = opened.items or ItemSource()
        items = {number: source.item(number) for number in np.unique(item_ids).tolist()}
    # An item that a service has added may have the id of another one of the data.
    was_changed = opened.contained is not None and opened.contained[1] > 0
    query_ids = dataset.ids[positions]
    names = dataset.texts.get("name", np.full(len(dataset), ""))[positions]
    incomplete = int((item_ids == -1).any(axis=1).sum())
    if incomplete:
        log.warning(
            "%d of %d queries have fewer than %d results: too few items pass the filter",
            incomplete,
            len(query_ids),
            k,
        )
    return SearchResult(
        ids=item_ids,
        scores=scores,
        query_ids=query_ids,
        query_names=tuple(
            name or str(id_) for name, id_ in zip(names.tolist(), query_ids.tolist(), strict=True)
        ),
        codebooks_fingerprint=opened.fingerprint,
        description=description,
        items={number: item for number, item in items.items() if item is not None},
        data_fingerprint="" if was_changed else source.data_fingerprint,
    )


def parse_rows(text: str, n: int) -> Ids:
    """Return the row numbers ``"3,5,9"``, or those of ``"0:8"`` or ``"100:200:10"`` (slices).

    Raises:
        UsageError: the text is of another form, or a row is not one of the ``n`` items.

    Examples:
        >>> parse_rows("0:3", 10).tolist(), parse_rows("5,-1", 10).tolist()
        ([0, 1, 2], [5, 9])
    """
    numbers = np.arange(n)
    rows = np.arange(0)
    with contextlib.suppress(ValueError, TypeError, IndexError):
        if ":" in text:
            bounds = [int(bound) if bound.strip() else None for bound in text.split(":")]
            rows = numbers[slice(*bounds)]
        else:
            rows = numbers[[int(number) for number in text.split(",")]]
    if not len(rows):
        raise UsageError(
            f"--rows {text}: write row numbers (3,5,9) or a range (0:8) of the {n:,} items"
        )
    return rows


@dataclass(frozen=True, repr=False)
class SearchResult(Shown):
    """The k best items of each query, best first.

    Iterating yields a row for each result, so ``pandas.DataFrame(result)`` is their table.

    Attributes:
        ids: int64 [Q, k]; -1 fills the rows of queries with fewer than k results.
        scores: float32 [Q, k], inner products of the query with the codewords of the items.
        query_ids: int64 [Q].
        query_names: Q names to display: the name or path of the query if it has one, else its id.
        codebooks_fingerprint: of the codebooks of model and index.
        description: what was searched.
        items: names, labels and kept columns of the results by id, as far as they are known.
        data_fingerprint: of the data set of the items; empty if it is not known, or if a service
            has changed the index.
    """

    ids: NDArray[np.int64]
    scores: NDArray[np.float32]
    query_ids: NDArray[np.int64]
    query_names: tuple[str, ...]
    codebooks_fingerprint: str
    description: str = ""
    items: Mapping[int, Item] = field(default_factory=dict)
    data_fingerprint: str = ""

    @property
    def _kept(self) -> list[str]:
        """Names of the kept columns of the items, but for those named as columns of results."""
        texts = dict.fromkeys(name for item in self.items.values() for name in item.texts)
        return [name for name in texts if name not in _RESULT_NAMES]

    def _results(self, row: int) -> list[tuple[int, float, Item]]:
        """Return id, score and item of each result of a query, best first."""
        valid = self.ids[row] != -1
        results = zip(self.ids[row, valid].tolist(), self.scores[row, valid].tolist(), strict=True)
        return [(number, score, self.items.get(number, Item({}))) for number, score in results]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each result: query, rank, id, name, labels (separated by ``|``), score,
        and kept columns. Unknown values are None.
        """
        kept = self._kept
        for row, query in enumerate(self.query_names):
            for rank, (number, score, item) in enumerate(self._results(row), 1):
                yield {
                    "query": query,
                    "rank": rank,
                    "id": number,
                    "name": item.name,
                    "labels": None if item.labels is None else "|".join(item.labels),
                    "score": score,
                    **{column: item.texts.get(column) for column in kept},
                }

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows for a table, without unknown values."""
        texts = (row | {"id": str(row["id"])} for row in self)
        return [{key: value for key, value in row.items() if value is not None} for row in texts]

    def about(self) -> list[str]:
        """Return what was searched."""
        return [self.description] if self.description else []

    def to_pandas(self) -> pandas.DataFrame:
        """Return a table with a row for each result, in the columns of :meth:`__iter__`.

        Raises:
            UsageError: pandas is not installed.
        """
        return optional("pandas", "a table needs pandas: pip install pandas").DataFrame(
            list(self), columns=[*_COLUMNS, *self._kept]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: one entry for each query, without padding; unknown values are
        None.
        """
        queries = []
        kept = self._kept
        for row, (query, name) in enumerate(zip(self.query_ids, self.query_names, strict=True)):
            results = self._results(row)
            items = [item for _, _, item in results]
            queries.append(
                {
                    "id": int(query),
                    "name": name,
                    "ids": [number for number, _, _ in results],
                    "scores": [score for _, score, _ in results],
                    "names": [item.name for item in items],
                    "labels": [item.labels and list(item.labels) for item in items],
                    **{column: [item.texts.get(column) for item in items] for column in kept},
                }
            )
        return {
            "k": int(self.ids.shape[1]),
            "codebooks_fingerprint": self.codebooks_fingerprint,
            "description": self.description,
            "queries": queries,
        }

    def draw(
        self, items: Dataset, queries: Dataset, out: str | Path, *, overwrite: bool = False
    ) -> Path:
        """Draw each query with its results, framed by relevance if both have labels.

        A result's picture is the image of its name, if its file is the one that was encoded, or
        that of its id in a data set without files. A grey square stands for a missing image.

        Args:
            items: images of the indexed items.
            queries: the images that were searched for.
            out: .png, .svg or .pdf.

        Raises:
            DataError: they are not images, or nothing says which image belongs to which item.
        """
        if not isinstance(items, ImageDataset) or not isinstance(queries, ImageDataset):
            raise DataError("a picture needs images, of the items (--images) and as queries")
        rows = PictureRows(items.ids, items.texts)
        if not rows.are_files and self.data_fingerprint != items.fingerprint:
            raise DataError(
                f"{items.name} is not the data of the index, or a service has changed it, and "
                "nothing names its items: give the data that were encoded"
            )
        if self.data_fingerprint not in ("", items.fingerprint):
            log.warning(CHANGED_DATA, items.name)
        gallery = []
        query_rows = PictureRows(queries.ids, {})
        for row, query_id in enumerate(self.query_ids):
            query_row = query_rows.find(query_id, Item({}))
            labels: list[str] = []
            if queries.labels is not None and query_row >= 0:
                counts = queries.labels.take(np.array([query_row])).counts()
                labels = [queries.labels.class_names[c] for c in np.flatnonzero(counts)]
            cells = [Cell(_image(queries, query_row), ", ".join(labels))]
            for number, score, item in self._results(row):
                relevant = None
                if labels and item.labels is not None:
                    relevant = not set(labels).isdisjoint(item.labels)
                caption = " · ".join([*(item.labels or ()), f"{score:.2f}"])
                cells.append(Cell(_image(items, rows.find(number, item)), caption, relevant))
            gallery.append(cells)
        return save_gallery(gallery, out, overwrite=overwrite)


def _image(images: ImageDataset, row: int) -> NDArray[np.uint8]:
    """Return an image, or a grey square in place of one that is missing (-1) or broken."""
    image = images.image(row) if row >= 0 else None
    return np.full((32, 32, 3), 160, np.uint8) if image is None else image
