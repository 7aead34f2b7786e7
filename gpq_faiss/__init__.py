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
    from .config import Config as Config
    from .config import preset as preset
    from .data.open import open_data as open_data
    from .encoder import Encoder as Encoder
    from .encoder import open_encoder as open_encoder
    from .errors import GpqError as GpqError
    from .evaluation.ranking import rank_codes as rank_codes
    from .evaluation.ranking import rank_scores as rank_scores
    from .evaluation.tables import render as render
    from .experiment.pictures import draw_experiment as draw_experiment
    from .experiment.report import report_experiment as report_experiment
    from .experiment.run import run_experiment as run_experiment
    from .gpu.faiss_form import to_faiss_gpu as to_faiss_gpu
    from .gpu.index import to_gpu as to_gpu
    from .indexes.base import Index as Index
    from .indexes.filters import Allow as Allow
    from .indexes.filters import Deny as Deny
    from .indexes.memory import MemoryIndex as MemoryIndex
    from .indexes.opening import open_index as open_index
    from .nn.model import Model as Model
    from .nn.model import load_model as load_model
    from .stages.encode import encode as encode
    from .stages.encode import encode_shards as encode_shards
    from .stages.evaluate import evaluate as evaluate
    from .stages.export import export as export
    from .stages.export import export_faiss as export_faiss
    from .stages.export_encoder import export_encoder as export_encoder
    from .stages.index import index as index
    from .stages.index import index_shards as index_shards
    from .stages.info import info as info
    from .stages.search import search as search
    from .stages.train import train as train
    from .store.reader import RowReader as RowReader

__version__ = "0.1.0"

_NAMES = {
    "config": "Config preset",
    "data.open": "open_data",
    "encoder": "Encoder open_encoder",
    "errors": "GpqError",
    "evaluation.ranking": "rank_codes rank_scores",
    "evaluation.tables": "render",
    "experiment.pictures": "draw_experiment",
    "experiment.report": "report_experiment",
    "experiment.run": "run_experiment",
    "gpu.faiss_form": "to_faiss_gpu",
    "gpu.index": "to_gpu",
    "indexes.base": "Index",
    "indexes.filters": "Allow Deny",
    "indexes.memory": "MemoryIndex",
    "indexes.opening": "open_index",
    "nn.model": "Model load_model",
    "stages.encode": "encode encode_shards",
    "stages.evaluate": "evaluate",
    "stages.export": "export export_faiss",
    "stages.export_encoder": "export_encoder",
    "stages.index": "index index_shards",
    "stages.info": "info",
    "stages.search": "search",
    "stages.train": "train",
    "store.reader": "RowReader",
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = ["__version__", *_WHERE]  # noqa: PLE0604


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
