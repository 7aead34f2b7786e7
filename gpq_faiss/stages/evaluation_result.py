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
from ..report.gallery import Ranked
from ..report.plots import plot_curves
from .search_result import class_text

DEFAULT_KS = (1, 10, 100, 1000)
_SHOWN, _RESULTS = 10, 8
"""Best (and worst) queries on a page, and results per query."""


@dataclass(frozen=True, repr=False)
class Evaluation(Shown):
    """Measurements of one evaluation.

    Attributes:
        ranking: of the model.
        method: table name of the model (:func:`.compared.model_name`).
        bits: code length.
        protocol, split_hash: identify queries and database.
        compared: name -> ranking, of the other models and methods on the same split.
        notes: remarks for the user.
        device: where models were ranked.
        likeness: of the model; None for images (:func:`gpq_faiss.methods.measure.needs_perceptron`).
        compared_likeness: name -> likeness of the others.
        compared_bits: name -> code length of the others, without ``float`` and ``classifier``, which have no codes.
        compared_fingerprints: name -> fingerprint of the other models.
        queries: int64 [Q], data set rows of the queries, in the order of ``ranking.ap``.
        faiss_recall: share of the exact top 10 that plain Faiss finds in an index file, if one was given.
        results: index into ``queries`` -> data set rows of its first results, for the best and worst queries; images only.
    """

    ranking: RankingResult
    method: str
    bits: int
    protocol: str
    split_hash: str
    data: str
    model_fingerprint: str
    compared: dict[str, RankingResult] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    device: str = "cpu"
    likeness: Likeness | None = None
    compared_likeness: dict[str, Likeness] = field(default_factory=dict)
    compared_bits: dict[str, int] = field(default_factory=dict)
    compared_fingerprints: dict[str, str] = field(default_factory=dict)
    queries: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    faiss_recall: float | None = None
    results: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; the figures at the top level are the model's."""
        return {
            **self.ranking.as_dict(),
            "method": self.method,
            "likeness": _as_dict(self.likeness),
            "bits": self.bits,
            "protocol": self.protocol,
            "split_hash": self.split_hash,
            "data": self.data,
            "model_fingerprint": self.model_fingerprint,
            "compared": {
                name: {
                    **result.as_dict(),
                    "likeness": _as_dict(self.compared_likeness.get(name)),
                    "bits": self.compared_bits.get(name),
                    "model_fingerprint": self.compared_fingerprints.get(name),
                }
                for name, result in self.compared.items()
            },
            "notes": list(self.notes),
            "device": self.device,
            "faiss_recall": self.faiss_recall,
            "versions": {
                "gpq_faiss": __version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
        }

    def rows(self, ks: Sequence[int] = ()) -> list[dict[str, Any]]:
        """One row per model or method, for a table."""
        likeness = {self.method: self.likeness, **self.compared_likeness}
        bits = {self.method: self.bits, **self.compared_bits}
        return [
            {
                "method": name,
                "bits": bits.get(name, "-"),
                "mAP": result.map,
                **({"NN10@100": one.nn10_at_100} if (one := likeness.get(name)) is not None else {}),
                **{f"P@{k}": result.precision[k] for k in ks if k in result.precision},
                **{f"R@{k}": result.recall[k] for k in ks if k in result.recall},
            }
            for name, result in {self.method: self.ranking, **self.compared}.items()
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
        results = {self.method: self.ranking, **self.compared}
        bits = {self.method: self.bits, **self.compared_bits}
        same = len(set(bits.values())) == 1
        length = {name: f", {n} bits" for name, n in bits.items()}
        curves = {
            f"{name}{'' if same else length.get(name, '')}  (mAP {r.map:.3f})": (r.pr_recall, r.pr_precision)
            for name, r in results.items()
        }
        title = f"{self.data}{length[self.method] if same else ''}, protocol {self.protocol}"
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


def _as_dict(likeness: Likeness | None) -> dict[str, Any] | None:
    return None if likeness is None else likeness.as_dict()


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
    rows = evaluation.queries[chosen]
    names = data.texts.get("name")
    labels = [str(names[row]) if names is not None else f"id {data.ids[row]}" for row in rows.tolist()]
    aps = evaluation.ranking.ap[chosen].tolist()
    if not isinstance(data, ImageDataset):
        return html.table([{"query": label, "AP": ap} for label, ap in zip(labels, aps, strict=True)])
    texts = [f"{label}: AP {ap:.4f}" for label, ap in zip(labels, aps, strict=True)]
    images = data.read(rows)
    if not evaluation.results:
        return html.pictures(
            [(image, text) for image, text in zip(images, texts, strict=True) if image is not None]
        )
    return html.gallery(
        [
            _ranked(data, row, image, text, evaluation.results[query])
            for query, row, image, text in zip(chosen.tolist(), rows.tolist(), images, texts, strict=True)
            if image is not None
        ]
    )


def _ranked(
    data: ImageDataset, row: int, image: NDArray[np.uint8], text: str, results: NDArray[np.int64]
) -> Ranked:
    """A query and its results, marked relevant if they share a label."""
    packed = data.require_labels().packed
    shown = [
        (at, one) for at, one in zip(results.tolist(), data.read(results), strict=True) if one is not None
    ]
    return Ranked(
        query=image,
        results=[one for _, one in shown],
        relevant=[bool((packed[row] & packed[at]).any()) for at, _ in shown],
        query_name=text,
        names=[class_text(data, at) for at, _ in shown],
    )
