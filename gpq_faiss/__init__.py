"""Generalized Product Quantization as a Faiss toolkit.

    import gpq_faiss as gpq

    gpq.train("digits", "model", labelled="20-per-class")
    gpq.encode("model", "digits", "codes.h5")
    gpq.index("model", "codes.h5", "index.faiss")
    results = gpq.search("model", "index.faiss", "digits", k=10, rows="0:8")

Each name below is imported when it is first used, so ``import gpq_faiss`` is quick and needs no
torch. The stages take paths and return a path or a result.
"""

import re
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# Names and modules are listed once, in the stub, which type checkers read too.
_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_MODULES = {
    name: module
    for module, name in re.findall(r"^from \.([\w.]+) import (\w+)", _STUB, re.MULTILINE)
}
__all__ = ["__version__", *_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    from .errors import needs

    try:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(needs(f"{__name__}.{name}", error), name=error.name) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_MODULES))
