"""Generalized Product Quantization as a Faiss toolkit.

    import gpq_faiss as gpq

    gpq.train("digits", "model", labelled="20-per-class")
    gpq.encode("model", "digits", "codes.h5")
    gpq.index("model", "codes.h5", "index.faiss")
    found = gpq.search("model", "index.faiss", "digits", k=10, rows="0:8")

Each name below is imported when it is first used, so ``import gpq_faiss`` is quick and needs no torch. The stages take
paths and return a path or a result.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Config, preset
    from .data.open import open_data
    from .encoder import Encoder, open_encoder
    from .errors import GpqError
    from .evaluation.ranking import rank_codes, rank_scores
    from .evaluation.tables import render
    from .experiment.pictures import draw_experiment
    from .experiment.report import report_experiment
    from .experiment.run import run_experiment
    from .gpu.faiss_form import to_faiss_gpu
    from .gpu.index import to_gpu
    from .indexes.base import Index
    from .indexes.filters import Allow, Deny
    from .indexes.memory import MemoryIndex
    from .indexes.opening import open_index
    from .nn.model import Model, load_model
    from .stages.encode import encode, encode_shards
    from .stages.evaluate import evaluate
    from .stages.export import export
    from .stages.export_encoder import export_encoder
    from .stages.export_faiss import export_faiss
    from .stages.index import index, index_shards
    from .stages.info import info
    from .stages.search import search
    from .stages.train import train
    from .store.reader import RowReader

__version__ = "0.1.0"

__all__ = [
    "Allow",
    "Config",
    "Deny",
    "Encoder",
    "GpqError",
    "Index",
    "MemoryIndex",
    "Model",
    "RowReader",
    "__version__",
    "draw_experiment",
    "encode",
    "encode_shards",
    "evaluate",
    "export",
    "export_encoder",
    "export_faiss",
    "index",
    "index_shards",
    "info",
    "load_model",
    "open_data",
    "open_encoder",
    "open_index",
    "preset",
    "rank_codes",
    "rank_scores",
    "render",
    "report_experiment",
    "run_experiment",
    "search",
    "to_faiss_gpu",
    "to_gpu",
    "train",
]

_WHERE = {
    "Allow": "indexes.filters",
    "Config": "config",
    "Deny": "indexes.filters",
    "Encoder": "encoder",
    "GpqError": "errors",
    "Index": "indexes.base",
    "MemoryIndex": "indexes.memory",
    "Model": "nn.model",
    "RowReader": "store.reader",
    "draw_experiment": "experiment.pictures",
    "encode": "stages.encode",
    "encode_shards": "stages.encode",
    "evaluate": "stages.evaluate",
    "export": "stages.export",
    "export_encoder": "stages.export_encoder",
    "export_faiss": "stages.export_faiss",
    "index": "stages.index",
    "index_shards": "stages.index",
    "info": "stages.info",
    "load_model": "nn.model",
    "open_data": "data.open",
    "open_encoder": "encoder",
    "open_index": "indexes.opening",
    "preset": "config",
    "rank_codes": "evaluation.ranking",
    "rank_scores": "evaluation.ranking",
    "render": "evaluation.tables",
    "report_experiment": "experiment.report",
    "run_experiment": "experiment.run",
    "search": "stages.search",
    "to_faiss_gpu": "gpu.faiss_form",
    "to_gpu": "gpu.index",
    "train": "stages.train",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    from .errors import needs

    try:
        value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    except ModuleNotFoundError as error:
        remedy = needs(f"{__name__}.{name}", error)
        if remedy is None:
            raise
        raise ModuleNotFoundError(remedy, name=error.name) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_WHERE))
