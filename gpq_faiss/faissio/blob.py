"""A Faiss index as bytes, to store in another file."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .io import reading

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
    with reading(f"{what} holds no Faiss index, it is damaged", BYTE_LIMIT):
        return read(data)


def faiss_version() -> str:
    """Version of Faiss."""
    return str(faiss.__version__)


def faiss_threads() -> int:
    """Number of threads of Faiss."""
    return int(faiss.omp_get_max_threads())
