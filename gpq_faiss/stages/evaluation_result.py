"""What an evaluation returns: rankings, likeness and notes, as JSON, table or curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..evaluation.likeness import Likeness
from ..evaluation.ranking import RankingResult
from ..evaluation.tables import Shown
from ..files import versions
from ..report.plots import plot_curves


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
        measured: the model by its table name (:func:`.evaluate.model_name`), then the others on the same split.
        queries: int64 [Q], data set rows of the queries, in the order of ``ranking.ap``.
        protocol, split_hash: identify queries and database.
        data: name of the data set.
        notes: remarks for the user.
        device: where models were ranked.
    """

    measured: dict[str, Row]
    queries: NDArray[np.int64]
    protocol: str
    split_hash: str
    data: str
    notes: tuple[str, ...] = ()
    device: str = "cpu"

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
            "versions": versions("numpy", "python"),
        }

    def rows(self, ks: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """One row per model or method, for a table; ``ks`` of precision and recall (default: all)."""
        return [
            {
                "method": name,
                "bits": row.bits or "-",
                "mAP": row.ranking.map,
                **({} if row.likeness is None else {"NN10@100": row.likeness.nn10_at_100}),
                **row.ranking.rows(ks)[0],
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
