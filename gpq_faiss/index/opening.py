"""Engines of index files and of Faiss indexes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import DataError
from ..faissio.io import load_index, sidecar_path
from ..faissio.layout import layout_of
from .items import Items
from .kinds import KINDS, Kind, check_kind
from .lists import IvfSettings
from .memory import Engine


def engine_of(
    index: Any, *, kind: Kind = "auto", what: str = "index", ivf: IvfSettings | None = None, **options: Any
) -> Engine:
    """An engine of what a Faiss index holds (any form that :func:`..faissio.layout.layout_of` knows); a snapshot.

    Raises:
        DataError: the index is empty or not sound.
        UsageError: see :meth:`Engine.build`.
    """
    layout = layout_of(index, what=what, deep=True)
    if layout.ntotal == 0:
        raise DataError(f"{what} is empty: add codes first (gpq index)")
    check_kind(kind, int(layout.codebooks.shape[1]))
    codes, ids, list_of = layout.ordered()
    codes, ids = codes.copy(), None if ids is None else ids.copy()  # so that the index may go
    if kind == "ivf" and ivf is None and list_of is not None:
        ivf = IvfSettings(
            centroids=layout.centroids,
            nprobe=int(layout.flat.nprobe),
            form="fastscan" if layout.kind == "ivf-fastscan" else "fused",
            list_of=list_of,
        )
    return Engine(Items.ordered(codes, ids), layout.codebooks, kind, ivf=ivf, **options)


def open_engine(source: Any, kind: Kind | None = None, **options: Any) -> Engine:
    """An engine of an index file or a Faiss index.

    Args:
        source: a path, or a Faiss index.
        kind: see :data:`.kinds.KINDS`; default: what the file was saved as, else ``ivf`` where it has lists, else ``auto``.
        options: ``group``, ``ivf`` as :meth:`Engine.build`.

    Raises:
        DataError, MismatchError: see :func:`..faissio.io.load_index`.
        UsageError: see :meth:`Engine.build`.
    """
    if not isinstance(source, str | Path):
        return engine_of(source, kind=kind or "auto", **options)
    index, sidecar = load_index(source)
    extra = sidecar["extra"]
    if kind is None:
        kind = extra.get("engine", "ivf" if sidecar["kind"].startswith("ivf") else "auto")
        if kind not in KINDS:
            raise DataError(f"{sidecar_path(source)}: kind {kind!r} is unknown: name the kind to open it as")
        options.setdefault("group", extra.get("group") is True)
    assert kind is not None
    return engine_of(
        index, kind=kind, what=str(source), model_fingerprint=sidecar["model_fingerprint"], **options
    )
