"""The whole path on one page: images or embeddings ─► model ─► codes ─► Faiss index ─► ranking ─► report.

Every stage is a function of the same name as its command, takes paths and gives a path (or numbers), and meets the others
only through files; :func:`run` is all of them in a row.

    from gpq_faiss.pipeline import train, encode, index, search

    train("digits", "model", labelled="10-per-class")
    encode("model", "digits", "codes.h5")
    index("model", "codes.h5", "index.faiss")
    result = search("model", "index.faiss", "queries.npy", k=10)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .config import Config
from .data.open import open_data
from .stages.encode import encode
from .stages.evaluate import evaluate
from .stages.evaluation_result import Evaluation
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


@dataclass(frozen=True)
class PipelineResult:
    """What :func:`run` leaves behind."""

    model: Path
    codes: Path
    empty_index: Path
    index: Path
    results: SearchResult
    evaluation: Evaluation


def run(  # noqa: PLR0913
    data: object,
    folder: str | Path,
    *,
    config: Config | None = None,
    labelled: str | None = "all",
    protocol: str = "1",
    queries: str = "0:8",
    k: int = 10,
    compare: tuple[str, ...] = (),
    device: str = "cpu",
    amp: bool = False,
    on_device: bool = False,
) -> PipelineResult:
    """Everything, from labelled and unlabelled data to a filled index and its figures.

    Args:
        data: whatever :func:`gpq_faiss.open_data` takes.
        folder: where the products go.
        config: settings of the training (default: the ``recommended`` preset).
        labelled, protocol: which labels the training sees, and how queries are set apart.
        queries: rows of ``data`` to search for in the end.
        k: results of each.
        compare: methods and folders of models to evaluate beside it.
        device: where the network runs, the index is searched and the ranking is measured.
        amp: train the backbone in bf16.
        on_device: search and rank in the form for devices, as a GPU always does (:func:`.search.search`).
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
