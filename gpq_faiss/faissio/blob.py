"""A Faiss index as bytes, to store in another file."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .io import reading_limits

BYTE_LIMIT = 1 << 30  # of one vector in an index that is read


def to_bytes(index: Any) -> NDArray[np.uint8]:
    """Serialised index (also binary ones), uint8 [n].

    Raises:
        DataError: Faiss cannot write an index of this kind.
    """
    write = faiss.serialize_index_binary if isinstance(index, faiss.IndexBinary) else faiss.serialize_index
    try:
        return np.asarray(write(index), dtype=np.uint8)
    except RuntimeError as error:
        raise DataError(f"Faiss cannot write an index of the kind {type(index).__name__}") from error


def from_bytes(data: NDArray[np.uint8], what: str) -> Any:
    """Deserialise an index from :func:`to_bytes`; ``what`` is its name in errors.

    Raises:
        DataError: not an index.
    """
    data = np.ascontiguousarray(data, dtype=np.uint8)
    read = faiss.deserialize_index_binary if data[:2].tobytes() == b"IB" else faiss.deserialize_index
    try:
        with reading_limits(BYTE_LIMIT):
            return read(data)
    except (RuntimeError, AssertionError, MemoryError) as error:
        raise DataError(f"{what} holds no Faiss index: it is damaged") from error


def faiss_version() -> str:
    """Version of Faiss."""
    return str(faiss.__version__)


def faiss_threads() -> int:
    """Number of threads of Faiss."""
    return int(faiss.omp_get_max_threads())


def add_codes(index: Any, codes: NDArray[np.uint8]) -> Any:
    """Add codes uint8 [N, W] to an empty index, after its transformations if any; returns the index.

    Raises:
        DataError: codes of another size.
    """
    data = np.ascontiguousarray(codes, dtype=np.uint8)
    if isinstance(index, faiss.IndexBinary):
        if data.shape[1] != index.code_size:
            raise DataError(f"codes of {data.shape[1]} bytes, but the index holds {index.code_size}")
        index.add(data)
        return index
    holder = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index
    if data.shape[1] != holder.sa_code_size():
        raise DataError(f"codes of {data.shape[1]} bytes, but the index holds {holder.sa_code_size()}")
    holder.add_sa_codes(data)
    index.ntotal = holder.ntotal
    return index
