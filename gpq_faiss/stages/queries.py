"""Queries ─► vectors: opening what the user gives as queries and running the network on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.base import BadItems, Dataset
from ..data.images import FileImages, is_image_name
from ..data.open import is_form, open_data
from ..data.paths import local_path, without_secrets
from ..encoder import open_encoder
from ..errors import DataError, MismatchError, UsageError
from ..exported import OnnxEncoder
from ..faissio.model import read_description
from ..files import fingerprint
from ..inputs import check_memory
from ..store import RowReader, describe


def parse_rows(text: str, n: int) -> NDArray[np.int64]:
    """Row numbers from ``"0:8"``, ``"3,5,9"`` or ``"100:200:10"`` (Python slices) for ``n`` items.

    Raises:
        UsageError: another form, or rows out of range.

    Examples:
        >>> parse_rows("0:3", 10).tolist(), parse_rows("5,-1", 10).tolist()
        ([0, 1, 2], [5, 9])
    """
    rows: list[int] = []
    try:
        for part in text.split(","):
            numbers = [int(p) if p.strip() else None for p in part.split(":")]
            if len(numbers) == 1 and numbers[0] is not None:
                if not -n <= numbers[0] < n:
                    raise UsageError(f"--rows {text}: there are only {n:,} items (0 to {n - 1})")
                rows.append(numbers[0] % n)
            elif 2 <= len(numbers) <= 3:
                rows += range(n)[slice(*numbers)]
            else:
                raise ValueError
    except ValueError:
        raise UsageError(f"--rows {text}: write row numbers (3,5,9) or a range (0:8)") from None
    if not rows:
        raise UsageError(f"--rows {text} selects none of the {n:,} items")
    return np.array(rows, dtype=np.int64)


def own_features(queries: object) -> Path | None:
    """The path if ``queries`` is a features.h5 of this package, else None."""
    if not isinstance(queries, str) or not queries.endswith((".h5", ".hdf5")) or not Path(queries).is_file():
        return None
    try:
        return Path(queries) if describe(Path(queries))["type"] == "features" else None
    except DataError:
        return None


def open_queries(queries: object, **options: Any) -> Dataset:
    """Open queries as a data set: an image, or anything that :func:`open_data` takes, with its ``options``.

    Raises:
        UsageError, DataError: as :func:`gpq_faiss.data.open.open_data`.
    """
    if not isinstance(queries, str) or is_form(queries) or not is_image_name(without_secrets(queries)):
        return open_data(queries, **options)
    if Path(queries).is_dir():
        return open_data(queries, **options)
    path, name = local_path(queries), without_secrets(queries)
    if not path.is_file():
        raise DataError(f"{name} not found: no such image")
    return FileImages(
        name=name,
        ids=np.zeros(1, dtype=np.int64),
        fingerprint=fingerprint(queries),
        bad=BadItems(1, 0.0),
        paths=[str(path)],
    )


def _read_features(
    path: Path, model: str | Path | OnnxEncoder, rows: str | None, memory: int | None
) -> tuple[NDArray[np.float32], NDArray[np.int64], tuple[str, ...]]:
    """:func:`query_vectors` from a ``features.h5`` of the same model: no network runs."""
    description = {"asymmetric": True} if isinstance(model, OnnxEncoder) else read_description(model)
    with RowReader(path) as reader:
        found, own = reader.header.model_fingerprint, description.get("model_fingerprint", "")
        if own and found != own:
            raise MismatchError(
                f"{path} holds features of another model (fingerprint {found}, {model} has {own}): "
                "encode the queries with this model"
            )
        if description.get("asymmetric", False):
            where = model.path if isinstance(model, OnnxEncoder) else model
            raise MismatchError(
                f"{path} holds vectors of items, but {where} encodes queries differently: give the data of the queries instead"
            )
        n = reader.ntotal
        positions = None if rows is None else parse_rows(rows, n)
        if positions is None:
            needed = n * (4 * reader.header.width + 8)
            check_memory(needed, f"{path}: {n:,} queries", memory, "select some with --rows")
            vectors, ids = reader.block(), reader.ids()
        else:
            vectors = np.concatenate([reader.block(p, p + 1) for p in positions.tolist()])
            ids = np.concatenate([reader.ids(p, p + 1) for p in positions.tolist()])
        return vectors, ids, tuple(str(i) for i in ids)


def query_vectors(
    model: str | Path | OnnxEncoder,
    queries: Dataset | Path,
    *,
    rows: str | None = None,
    device: str = "cpu",
    memory: int | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int64], tuple[str, ...]]:
    """Vectors float32 [Q, M·d] of the queries, their ids int64 [Q] and names.

    The path of a ``features.h5`` of the same model is read directly; the network does not run. ``memory`` limits the vectors in bytes
    (default: the free memory).

    Raises:
        MismatchError: features of another model, or data that does not fit the model.
        DataError: no queries, or unreadable ones.
    """
    if isinstance(queries, Path):
        return _read_features(queries, model, rows, memory)
    if not len(queries):
        raise DataError(f"{queries.name} has no queries")
    encoder = model if isinstance(model, OnnxEncoder) else open_encoder(model, device)
    positions = np.arange(len(queries)) if rows is None else parse_rows(rows, len(queries))
    M, _, d = encoder.shape
    check_memory(
        2 * 4 * M * d * len(positions), f"{len(positions):,} queries", memory, "select some with --rows"
    )
    positions, vectors = encoder.embed_rows(queries, positions, queries=True)
    ids = queries.ids[positions]
    path_of = getattr(queries, "image_path", lambda i: None)
    names = tuple(path_of(int(p)) or str(i) for p, i in zip(positions, ids, strict=True))
    return vectors, ids, names
