"""Queries ─► vectors: open what the user gives as queries, and run the network on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.base import Dataset, ImageDataset
from ..data.images import is_image_name
from ..data.open import is_form, open_data
from ..data.paths import local_path, without_secrets
from ..encoder import Encoder
from ..errors import DataError, MismatchError, UsageError
from ..exported import OnnxEncoder
from ..files import fingerprint
from ..inputs import check_memory
from ..store.reader import RowReader


def parse_rows(text: str | None, n: int) -> NDArray[np.int64]:
    """Row numbers from ``"0:8"``, ``"3,5,9"`` or ``"100:200:10"`` (Python slices) for ``n`` items; all for None.

    Raises:
        UsageError: another form, or rows out of range.

    Examples:
        >>> parse_rows("0:3", 10).tolist(), parse_rows("5,-1", 10).tolist()
        ([0, 1, 2], [5, 9])
    """
    every, parts = np.arange(n), []
    try:
        for part in (":" if text is None else text).split(","):
            at: Any = [int(p) if p.strip() else None for p in part.split(":")]
            parts.append(every[slice(*at)] if len(at) > 1 else every[at])
        rows = np.concatenate(parts)
    except (ValueError, TypeError, IndexError):
        rows = every[:0]
    if not len(rows):
        raise UsageError(f"--rows {text}: write row numbers (3,5,9) or a range (0:8) of the {n:,} items")
    return rows


def open_queries(queries: object, **options: Any) -> Dataset:
    """Open queries as a data set: an image, or anything that :func:`open_data` takes, with its ``options``.

    Raises:
        MismatchError: vectors of items (``features.h5``).
        UsageError, DataError: as :func:`gpq_faiss.data.open.open_data`.
    """
    queries = str(queries) if isinstance(queries, Path) else queries
    if not isinstance(queries, str) or is_form(queries):
        return open_data(queries, **options)
    path, name = Path(queries), without_secrets(queries)
    try:
        own = RowReader(path).header.kind if path.suffix in (".h5", ".hdf5") else None
    except DataError:
        own = None  # other HDF5 files, and damaged ones, are read below
    if own is not None:
        raise MismatchError(f"{name} holds {own} of items: give the data of the queries instead")
    if not is_image_name(name) or (path := local_path(queries)).is_dir():
        return open_data(queries, **options)
    if not path.is_file():
        raise DataError(f"{name} not found: no such image")
    ids, mark = np.zeros(1, dtype=np.int64), fingerprint(queries)
    return ImageDataset(name=name, ids=ids, fingerprint=mark, max_bad=0.0, paths=[str(path)])


def query_vectors(
    encoder: Encoder | OnnxEncoder, queries: Dataset, *, rows: str | None = None, memory: int | None = None
) -> tuple[NDArray[np.float32], NDArray[np.int64], tuple[str, ...]]:
    """Run the network on queries: vectors float32 [Q, M·d], ids int64 [Q] and names.

    ``memory`` limits the vectors in bytes (default: the free memory).

    Raises:
        MismatchError: data that does not fit the model.
        DataError: no queries, or unreadable ones.
    """
    if not len(queries):
        raise DataError(f"{queries.name} has no queries")
    positions = parse_rows(rows, len(queries))
    M, _, d = encoder.shape
    what = f"{len(positions):,} queries"
    check_memory(2 * 4 * M * d * len(positions), what, memory, "select some with --rows")
    positions, vectors = encoder.embed_rows(queries, positions, queries=True)
    ids = queries.ids[positions]
    path_of = getattr(queries, "image_path", lambda i: None)
    return vectors, ids, tuple(path_of(int(p)) or str(i) for p, i in zip(positions, ids, strict=True))
