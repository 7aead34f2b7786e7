"""All stages in a row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpq_faiss as gpq
from gpq_faiss.config import Config
from gpq_faiss.stages.evaluation_result import Evaluation
from gpq_faiss.stages.search_result import SearchResult


@dataclass(frozen=True)
class Products:
    """Outputs of :func:`run`."""

    model: Path
    codes: Path
    index: Path
    results: SearchResult
    evaluation: Evaluation


def run(
    data: Any,
    folder: Path,
    *,
    config: Config,
    compare: tuple[str, ...] = (),
    device: str = "cpu",
    amp: bool = False,
    on_device: bool = False,
) -> Products:
    """Train on 20 labels per class, encode, index, search and evaluate."""
    model = gpq.train(data, folder / "model", config=config, labelled="20-per-class", amp=amp, device=device)
    codes = gpq.encode(model, data, folder / "codes.h5", device=device)
    index = gpq.index(model, codes, folder / "index.faiss")
    results = gpq.search(model, index, data, rows="0:8", device=device, on_device=on_device)
    evaluation = gpq.evaluate(model, data, compare=compare, device=device)
    return Products(model, codes, index, results, evaluation)
