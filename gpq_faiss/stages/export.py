"""Export of models and codes for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from ..errors import UsageError
from ..faissio.export import export_codebooks
from .export_codes import export_codes
from .export_faiss import export_faiss

Target = Literal["faiss", "factory", "numpy", "nanopq", "lancedb", "onnx", "torch", "parquet"]
TARGETS: tuple[Target, ...] = get_args(Target)


def export(
    source: str | Path,
    out: str | Path,
    *,
    to: Target,
    factory: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model, or codes, for another tool.

    Args:
        source: a model folder; for ``parquet`` a codes file.
        out: the file; Faiss forms have a sidecar ``out + ".json"``.
        to: ``faiss`` is an empty, trained ``IndexPQ`` (:func:`.export_faiss`); ``factory`` the same in the form of a
            ``faiss.index_factory`` string; ``numpy``, ``nanopq`` and ``lancedb`` are ``.npz`` files of codebooks
            (:mod:`gpq_faiss.faissio.export`); ``parquet`` is a table of codes with ids, names and labels (:func:`.export_codes`);
            ``onnx`` and ``torch`` are the network (:func:`.export_encoder`).
        factory: for ``factory``: the string, such as ``IDMap2,PQ12x4`` or ``PQ12x4fs``.
        overwrite: replace existing files.

    Returns:
        ``out``

    Raises:
        UsageError: an unknown form, an unsupported factory string, or ONNX is not installed.
        DataError, MismatchError: a damaged model, or one that does not fit the form.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    if to not in TARGETS:
        raise UsageError(f"--to {to}: choose from {', '.join(TARGETS)}")
    if factory is not None and to != "factory":
        raise UsageError(f"--factory {factory}: it belongs to --to factory, not to {to}")
    match to:
        case "faiss":
            return export_faiss(source, out, overwrite=overwrite)
        case "onnx" | "torch":
            from .export_encoder import export_encoder  # torch is slow to load

            return export_encoder(source, out, format=to, overwrite=overwrite)
        case "parquet":
            return export_codes(source, out, overwrite=overwrite)
        case _:
            return export_codebooks(source, out, to=to, factory=factory, overwrite=overwrite)
