"""What an evaluation returns: rankings, likeness and notes, as JSON, table, curves or an HTML page."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
        likeness = None if self.likeness is None else asdict(self.likeness)
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
    """

    measured: dict[str, Row]
    protocol: str
    split_hash: str
    data: str
    notes: tuple[str, ...] = ()
    device: str = "cpu"
    queries: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    results: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """Table name of the model."""
        return next(iter(self.measured))

    @property
    def ranking(self) -> RankingResult:
        """Of the model."""
        return self.measured[self.method].ranking

    def to_dict(self) -> dict[str, Any]:
        """For JSON; the figures at the top level are the model's."""
        (_, model), *others = self.measured.items()
        return {
            **model.to_dict(),
            **{name: getattr(self, name) for name in ("method", "protocol", "split_hash", "data", "device")},
            "compared": {name: row.to_dict() for name, row in others},
            "notes": list(self.notes),
            "versions": {
                "gpq_faiss": __version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
        }

    def rows(self, ks: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """One row per model or method, for a table; ``ks`` of precision and recall (default: all)."""
        ks = tuple(self.ranking.precision) if ks is None else ks
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
        likeness = self.measured[self.method].likeness
        size, convention, *rest = self.ranking.about()
        defined = [] if likeness is None else [likeness.definition]
        notes = [f"note: {note}" for note in self.notes]
        return [f"{size}, protocol {self.protocol}", convention, *defined, *rest, *notes]

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

    def save_page(self, data: Dataset, out: str | Path, *, overwrite: bool = False) -> Path:
        """Save a self-contained HTML page: table, precision-recall curves, best and worst queries with their images.

        Args:
            data: the evaluated data set; if not images, queries are shown by name or id.
            out: the page, .html.
            overwrite: replace an existing file.

        Raises:
            UsageError: another extension. OutputExistsError: ``out`` exists and ``overwrite`` is false.
        """
        if Path(out).suffix.lower() != ".html":
            raise UsageError(f"--out {out}: a page ends in .html")
        check_output(out, overwrite=overwrite)
        parts = [
            html.table(self.rows()),
            *map(html.note, self.about()),
            html.heading("Precision over recall"),
        ]
        with tempfile.TemporaryDirectory() as folder:
            parts.append(html.plot(self.draw(Path(folder) / "curves.svg")))
        for title, chosen in zip(("Best queries", "Worst queries"), _extremes(self.ranking.ap), strict=True):
            parts += [html.heading(title), self._pictures(data, chosen.tolist())]
        return html.save_page(f"{self.method} on {self.data}", parts, out, overwrite=overwrite)

    def _pictures(self, data: Dataset, chosen: list[int]) -> str:
        """Some queries, and for images their results."""
        names, ap = data.texts.get("name"), self.ranking.ap.tolist()
        rows = dict(zip(chosen, self.queries[chosen].tolist(), strict=True))
        shown = {
            q: str(names[row]) if names is not None else f"id {data.ids[row]}" for q, row in rows.items()
        }
        if not isinstance(data, ImageDataset):
            return html.table([{"query": name, "AP": ap[query]} for query, name in shown.items()])
        return html.gallery(
            [
                ranked(data, rows[query], data, self.results[query].tolist(), f"{name}: AP {ap[query]:.4f}")
                for query, name in shown.items()
            ]
        )


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
