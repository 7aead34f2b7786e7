"""What a search returns: ids, scores and names of the k best items per query, as JSON, table or picture."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.base import Dataset, ImageDataset
from ..errors import DataError
from ..evaluation.tables import Shown
from ..report.gallery import Cell, save_gallery
from ..store.items import Item


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
        return save_gallery(rows, out, columns=self.ids.shape[1], overwrite=overwrite)


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
