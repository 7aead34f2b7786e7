"""The whole path: images or embeddings ─► model ─► codes ─► Faiss index ─► ranking ─► report.

Every stage is a function named like its command, takes paths and returns a path (or figures); stages communicate only through files.
:func:`run` runs all of them.

    from gpq_faiss.pipeline import train, encode, index, search

    train("digits", "model", labelled="10-per-class")
    encode("model", "digits", "codes.h5")
    index("model", "codes.h5", "index.faiss")
    result = search("model", "index.faiss", "queries.npy", k=10)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import Config
from .data.open import open_data
from .evaluation.tables import Shown
from .stages.encode import encode
from .stages.evaluate import evaluate
from .stages.evaluation_result import DEFAULT_KS, Evaluation
from .stages.export import export
from .stages.export_encoder import export_encoder
from .stages.export_faiss import export_faiss
from .stages.index import index
from .stages.info import info
from .stages.search import search
from .stages.search_result import SearchResult
from .stages.train import train

__all__ = [
    "PipelineResult",
    "encode",
    "evaluate",
    "export",
    "export_encoder",
    "export_faiss",
    "index",
    "info",
    "run",
    "search",
    "train",
]


@dataclass(frozen=True, repr=False)
class PipelineResult(Shown):
    """Outputs of :func:`run`."""

    model: Path
    codes: Path
    empty_index: Path
    index: Path
    results: SearchResult
    evaluation: Evaluation

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the evaluation."""
        return self.evaluation.rows(DEFAULT_KS)

    def about(self) -> list[str]:
        """As of the evaluation, and the files."""
        files = ", ".join(map(str, (self.model, self.codes, self.empty_index, self.index)))
        return [*self.evaluation.about(), f"written: {files}"]


def run(  # noqa: PLR0913
    data: object,
    folder: str | Path,
    *,
    config: Config | None = None,
    labelled: str | float | None = "all",
    protocol: str | int = "1",
    queries: str = "0:8",
    k: int = 10,
    compare: tuple[str, ...] = (),
    device: str = "cpu",
    amp: bool = False,
    on_device: bool = False,
) -> PipelineResult:
    """Run all stages, from labelled and unlabelled data to an index and its evaluation.

    Args:
        data: anything that :func:`gpq_faiss.open_data` accepts.
        folder: output folder.
        config: settings of the training (default: the ``recommended`` preset).
        labelled, protocol: labels available to the training, and how queries are held out.
        queries: rows of ``data`` to search for.
        k: results per query.
        compare: methods and model folders to compare with.
        device: device of network, search and ranking.
        amp: train the backbone in bf16.
        on_device: search and rank with the GPU algorithm (:func:`.search.search`).
    """
    folder = Path(folder)
    dataset = open_data(data)
    model = train(
        dataset, folder / "model", config=config, labelled=labelled, protocol=protocol, amp=amp, device=device
    )
    codes = encode(model, dataset, folder / "codes.h5", device=device)
    empty = export_faiss(model, folder / "empty.faiss")
    filled = index(model, codes, folder / "index.faiss")
    results = search(model, filled, dataset, rows=queries, k=k, device=device, on_device=on_device)
    evaluation = evaluate(model, dataset, compare=compare, device=device, on_device=on_device)
    return PipelineResult(model, codes, empty, filled, results, evaluation)
