"""What a search returns: ids, scores and names of the k best items per query, as JSON, table, HDF5 or picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.base import Dataset, ImageDataset
from ..data.labels import Labels
from ..errors import DataError
from ..evaluation.tables import Shown
from ..report import html
from ..report.gallery import Ranked, save_gallery
from ..store import Item, write_arrays

_QUERIES, _RESULTS = 8, 10
"""Pictures in a notebook."""


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
        missing_shards: files of the shards that could not be searched (only with partial answers allowed).
        queries, images: the queries, and what they were searched in, where these are images at hand: for notebooks.
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
    missing_shards: tuple[str, ...] = ()
    queries: ImageDataset | None = None
    images: ImageDataset | None = None

    @property
    def short(self) -> int:
        """Number of queries with fewer than ``k`` results; 0 in a search by minimum score."""
        return int((self.ids == -1).any(axis=1).sum()) if self.min_score is None else 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON: one entry per query, without padding; with ``names``, ``labels`` and kept columns if known."""
        proven = {} if self.exact is None else {"proven_exact": int(self.exact.sum())}
        return {
            **({"k": int(self.ids.shape[1])} if self.min_score is None else {"min_score": self.min_score}),
            "codebooks_fingerprint": self.codebooks_fingerprint,
            "description": self.description,
            **proven,
            **({"missing_shards": list(self.missing_shards)} if self.missing_shards else {}),
            "queries": [
                {
                    "id": int(query),
                    "name": name,
                    "ids": [int(i) for i in ids if i != -1],
                    "scores": [float(s) for i, s in zip(ids, scores, strict=True) if i != -1],
                    **self._known([int(i) for i in ids if i != -1]),
                }
                for query, name, ids, scores in zip(
                    self.query_ids, self.query_names, self.ids, self.scores, strict=True
                )
            ],
        }

    def _known(self, ids: list[int]) -> dict[str, list[Any]]:
        """Names, labels and kept columns of results, one list each."""
        if self.items is None:
            return {}
        found = [self.items.get(i) for i in ids]
        columns = list(dict.fromkeys(name for item in self.items.values() for name in item.texts))
        plural = {name: "names" if name == "name" else name for name in columns}
        known: dict[str, list[Any]] = {
            plural[name]: [None if item is None else item.texts.get(name) for item in found]
            for name in columns
        }
        if any(item.labels is not None for item in self.items.values()):
            known["labels"] = [
                None if item is None or item.labels is None else list(item.labels) for item in found
            ]
        return known

    def rows(self) -> list[dict[str, Any]]:
        """A row per result, for a table."""
        return list(self._rows())

    def _rows(self) -> Iterator[dict[str, Any]]:
        return (
            {"query": name, "rank": rank, "id": str(i), "score": float(score), **self._texts(i)}
            for name, ids, scores in zip(self.query_names, self.ids, self.scores, strict=True)
            for rank, (i, score) in enumerate(zip(ids.tolist(), scores.tolist(), strict=True), 1)
            if i != -1
        )

    def about(self) -> list[str]:
        """How the index was searched."""
        missing = [f"missing shards: {', '.join(self.missing_shards)}"] if self.missing_shards else []
        proven = (
            []
            if self.exact is None
            else [f"{int(self.exact.sum())} of {len(self.exact)} results are proven to be exact"]
        )
        return [*([self.description] if self.description else []), *proven, *missing]

    def _pictures(self) -> str:
        if self.queries is None:
            return ""
        few = replace(
            self,
            query_ids=self.query_ids[:_QUERIES],
            ids=self.ids[:_QUERIES, :_RESULTS],
            scores=self.scores[:_QUERIES, :_RESULTS],
        )
        return html.in_notebook(html.gallery(few._ranked(self.images, self.queries)))

    def _texts(self, i: int) -> dict[str, str]:
        """Name, labels and kept columns of a result, for a table."""
        if self.items is None:
            return {}
        return {
            column.removesuffix("s") if column == "names" else column: ", ".join(value or ())
            if isinstance(value, list)
            else value or ""
            for column, (value,) in self._known([i]).items()
        }

    def save_hdf5(self, path: str | Path) -> Path:
        """Write datasets ``ids``, ``scores`` and ``query_ids``, shaped as in :class:`SearchResult`, and ``names`` (UTF-8 bytes [Q, k]) if
        known.

        Raises:
            DataError: the file cannot be written.
        """
        arrays: dict[str, NDArray[Any]] = {
            "ids": self.ids,
            "scores": self.scores,
            "query_ids": self.query_ids,
        }
        if self.items is not None and any(item.name is not None for item in self.items.values()):
            names = [
                [((item.name if item else None) or "").encode() for item in map(self.items.get, row)]
                for row in self.ids.tolist()
            ]
            arrays["names"] = np.array(names).reshape(self.ids.shape)
        return write_arrays(
            path, arrays, {"kind": "results", "codebooks_fingerprint": self.codebooks_fingerprint}
        )

    def draw(self, items: Dataset, queries: Dataset, out: str | Path, *, overwrite: bool = False) -> Path:
        """Draw each query with its results, framed by relevance if both have labels.

        Args:
            items: images of the indexed items, with the same ids.
            queries: images of the queries.
            out: .png, .svg, .pdf, or .html (a page with pictures and a table of the results).

        Raises:
            DataError: not images, or an id is missing from ``items`` or ``queries``.
        """
        for dataset, what in ((items, "items"), (queries, "queries")):
            if not isinstance(dataset, ImageDataset):
                raise DataError(
                    f"{dataset.name} holds {dataset.kind}, not images: a picture needs images of the {what}"
                )
        assert isinstance(items, ImageDataset)
        assert isinstance(queries, ImageDataset)
        ranked = self._ranked(items, queries)
        if Path(out).suffix.lower() == ".html":
            parts = [
                html.gallery(ranked),
                html.heading("Results"),
                html.table(self.rows()),
                html.note(self.description),
            ]
            return html.save_page(f"{items.name}: {len(ranked)} queries", parts, out, overwrite=overwrite)
        return save_gallery(ranked, out, columns=self.ids.shape[1], overwrite=overwrite)

    def _ranked(self, items: ImageDataset | None, queries: ImageDataset) -> list[Ranked]:
        """The pictures of queries and, with ``items``, of their results. Raises as :meth:`draw`."""

        def image(dataset: ImageDataset, position: int) -> NDArray[np.uint8]:
            found = dataset.read(np.array([position]))[0]
            return np.full((32, 32, 3), 160, np.uint8) if found is None else found

        query_row_of = {int(i): row for row, i in enumerate(queries.ids)}
        row_of = {} if items is None else {int(i): row for row, i in enumerate(items.ids)}
        missing = (
            [] if items is None else [int(i) for i in np.unique(self.ids) if i != -1 and int(i) not in row_of]
        )
        if items is not None and missing:
            raise DataError(
                f"{items.name} has no item with id {missing[0]}: --images must name the data of the index"
            )
        unknown = [int(i) for i in self.query_ids if int(i) not in query_row_of]
        if unknown:
            raise DataError(
                f"{queries.name} has no image with id {unknown[0]}, which is a query: give the queries as their images (DATA)"
            )
        ranked = []
        for query, ids, scores in zip(self.query_ids, self.ids, self.scores, strict=True):
            query_row = query_row_of[int(query)]
            if items is None:
                ranked.append(
                    Ranked(image(queries, query_row), [], query_name=class_text(queries, query_row))
                )
                continue
            rows = [row_of[int(i)] for i in ids if i != -1]
            names = [class_text(items, row) for row in rows]
            ranked.append(
                Ranked(
                    query=image(queries, query_row),
                    results=[image(items, row) for row in rows],
                    scores=[float(s) for s in scores[ids != -1]],
                    relevant=_relevance(items.labels, rows, queries.labels, query_row),
                    query_name=class_text(queries, query_row),
                    names=names if any(names) else None,
                )
            )
        return ranked


def _relevance(
    items: Labels | None, rows: list[int], queries: Labels | None, query_row: int
) -> list[bool] | None:
    """Whether each item shares a label with the query; None if that is not known."""
    if (
        items is None
        or queries is None
        or items.class_names != queries.class_names
        or not queries.has()[query_row]
    ):
        return None
    return [bool(row.any()) for row in items.packed[rows] & queries.packed[query_row]]


def class_text(dataset: Dataset, position: int) -> str:
    """Class names of an item, joined by commas; empty if it has none."""
    if dataset.labels is None:
        return ""
    classes = np.flatnonzero(dataset.labels.dense(np.array([position]), dtype=bool)[0])
    return ", ".join(dataset.labels.class_names[c] for c in classes)
