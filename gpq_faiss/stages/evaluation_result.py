"""What an evaluation returns: rankings, likeness and notes, as JSON, table, curves or an HTML page."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import __version__
from ..data.base import Dataset, ImageDataset
from ..errors import UsageError
from ..evaluation.likeness import Likeness
from ..evaluation.ranking import RankingResult
from ..evaluation.tables import Shown
from ..files import check_output
from ..methods.measure import Coded
from ..report import html
from ..report.plots import plot_curves
from .search_result import ranked

DEFAULT_KS = (1, 10, 100, 1000)
_SHOWN, _RESULTS = 10, 8
"""Best (and worst) queries on a page, and results per query."""


@dataclass(frozen=True)
class Row:
    """A model or method of an evaluation.

    Attributes:
        ranking: its ranking.
        likeness: None for images (:func:`gpq_faiss.methods.measure.needs_perceptron`).
        bits: code length; None for ``float`` and ``classifier``, which have no codes.
        model_fingerprint: None for methods.
    """

    ranking: RankingResult
    likeness: Likeness | None = None
    bits: int | None = None
    model_fingerprint: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        likeness = None if self.likeness is None else vars(self.likeness)
        about = {"likeness": likeness, "bits": self.bits, "model_fingerprint": self.model_fingerprint}
        return {**self.ranking.as_dict(), **about}


@dataclass(frozen=True, repr=False)
class Evaluation(Shown):
    """Measurements of one evaluation.

    Attributes:
        measured: the model by its table name (:func:`.compared.model_name`), then the others on the same split.
        protocol, split_hash: identify queries and database.
        data: name of the data set.
        notes: remarks for the user.
        device: where models were ranked.
        queries: int64 [Q], data set rows of the queries, in the order of ``ranking.ap``.
        results: index into ``queries`` -> data set rows of its first results, for the best and worst queries; images only.
        faiss_recall: share of the exact top 10 that plain Faiss finds in an index file, if one was given.
    """

    measured: dict[str, Row]
    protocol: str
    split_hash: str
    data: str
    notes: tuple[str, ...] = ()
    device: str = "cpu"
    queries: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    results: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)
    faiss_recall: float | None = None

    @property
    def method(self) -> str:
        """Table name of the model."""
        return next(iter(self.measured))

    @property
    def ranking(self) -> RankingResult:
        """Of the model."""
        return self.measured[self.method].ranking

    @property
    def likeness(self) -> Likeness | None:
        """Of the model."""
        return self.measured[self.method].likeness

    @property
    def bits(self) -> int | None:
        """Code length of the model."""
        return self.measured[self.method].bits

    @property
    def compared(self) -> dict[str, RankingResult]:
        """Rankings of the other models and methods, by name."""
        return {name: row.ranking for name, row in self.measured.items() if name != self.method}

    def to_dict(self) -> dict[str, Any]:
        """For JSON; the figures at the top level are the model's."""
        versions = {"gpq_faiss": __version__, "numpy": np.__version__, "python": platform.python_version()}
        compared = {name: row.to_dict() for name, row in self.measured.items() if name != self.method}
        stated = ("method", "protocol", "split_hash", "data", "device", "faiss_recall")
        return {
            **self.measured[self.method].to_dict(),
            **{name: getattr(self, name) for name in stated},
            "compared": compared,
            "notes": list(self.notes),
            "versions": versions,
        }

    def rows(self, ks: Sequence[int] = ()) -> list[dict[str, Any]]:
        """One row per model or method, for a table."""
        return [
            {
                "method": name,
                "bits": row.bits or "-",
                "mAP": row.ranking.map,
                **({} if row.likeness is None else {"NN10@100": row.likeness.nn10_at_100}),
                **{f"P@{k}": row.ranking.precision[k] for k in ks if k in row.ranking.precision},
                **{f"R@{k}": row.ranking.recall[k] for k in ks if k in row.ranking.recall},
            }
            for name, row in self.measured.items()
        ]

    def about(self) -> list[str]:
        """Size, split, convention and notes."""
        size, convention, *rest = self.ranking.about()
        likeness = [] if self.likeness is None else [self.likeness.definition]
        notes = [f"note: {note}" for note in self.notes]
        return [f"{size}, protocol {self.protocol}", convention, *likeness, *rest, *notes]

    def _rows(self) -> list[dict[str, Any]]:
        return self.rows(tuple(self.ranking.precision))

    def draw(self, out: str | Path, *, overwrite: bool = False) -> Path:
        """Draw mean precision-recall curves of the model and all compared rows, as .png, .svg or .pdf.

        Raises:
            UsageError: another extension.
            DataError: the file cannot be written.
        """
        curves = {}
        for name, row in self.measured.items():
            length = f", {row.bits} bits" if row.bits else ""
            label = f"{name}{length}  (mAP {row.ranking.map:.3f})"
            curves[label] = row.ranking.pr_recall, row.ranking.pr_precision
        title = f"{self.data}, protocol {self.protocol}"
        return plot_curves(curves, out, x="recall", y="precision", title=title, overwrite=overwrite)

    def save_page(
        self,
        data: Dataset,
        out: str | Path,
        *,
        ks: Sequence[int] = DEFAULT_KS,
        overwrite: bool = False,
    ) -> Path:
        """Save a self-contained HTML page: table, precision-recall curves, best and worst queries with their images.

        Args:
            data: the evaluated data set; if not images, queries are shown by name or id.
            out: the page, .html.
            ks: k of precision and recall.
            overwrite: replace an existing file.

        Raises:
            UsageError: another extension. OutputExistsError: ``out`` exists and ``overwrite`` is false.
        """
        if Path(out).suffix.lower() != ".html":
            raise UsageError(f"--out {out}: a page ends in .html")
        check_output(out, overwrite=overwrite)
        with tempfile.TemporaryDirectory() as folder:
            curves = html.plot(self.draw(Path(folder) / "curves.svg"))
        parts = [
            html.table(self.rows(ks)),
            *map(html.note, self.about()),
            html.heading("Precision over recall"),
            curves,
        ]
        for title, chosen in zip(("Best queries", "Worst queries"), _extremes(self.ranking.ap), strict=True):
            parts += [html.heading(title), _query_pictures(self, data, chosen)]
        return html.save_page(f"{self.method} on {self.data}", parts, out, overwrite=overwrite)


def _extremes(ap: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers of the best queries and of the worst, by AP."""
    order = np.argsort(ap, kind="stable")
    return order[::-1][:_SHOWN], order[:_SHOWN]


def first_results(coded: Coded, ap: NDArray[Any]) -> dict[int, NDArray[np.int64]]:
    """Query number -> data set rows of its first results, for the best and worst queries by AP float [Q]."""
    results = {}
    for query in np.unique(np.concatenate(_extremes(ap))).tolist():
        scores = coded.score(np.array([query]), coded.codes)[0]
        results[query] = coded.base_rows[np.argsort(-scores, kind="stable")[:_RESULTS]]
    return results


def _query_pictures(evaluation: Evaluation, data: Dataset, chosen: NDArray[np.int64]) -> str:
    """The queries, and for images their results."""
    rows = evaluation.queries[chosen].tolist()
    names = data.texts.get("name")
    labels = [str(names[row]) if names is not None else f"id {data.ids[row]}" for row in rows]
    aps = evaluation.ranking.ap[chosen].tolist()
    if not isinstance(data, ImageDataset):
        return html.table([{"query": label, "AP": ap} for label, ap in zip(labels, aps, strict=True)])
    shown = [
        ranked(data, row, data, evaluation.results[query].tolist(), f"{label}: AP {ap:.4f}")
        for query, row, label, ap in zip(chosen.tolist(), rows, labels, aps, strict=True)
    ]
    return html.gallery(shown)
