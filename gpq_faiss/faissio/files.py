"""Index files, read and written by Faiss."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from ..errors import DataError
from ..files import atomic_path
from ..inputs import check_memory, reading

_WRITE_BYTES = 1 << 20
_LIMITS = threading.Lock()  # Faiss' limits are those of the process


def write_index(index: Any, path: str | Path) -> Path:
    """Write a Faiss index atomically.

    Raises:
        DataError: the file cannot be written.
    """
    path = Path(path)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        # If Faiss opens the file itself, it ignores errors of closing it, such as a full disk.
        writer = faiss.PyCallbackIOWriter(file.write, _WRITE_BYTES)  # type: ignore[attr-defined]
        faiss.write_index(index, writer)
    return path


def read_index(path: str | Path) -> Any:
    """Read a Faiss index, possibly an untrusted one.

    Raises:
        DataError: the file is missing or damaged, or is not a Faiss index, or is a binary one.
    """
    path = Path(path)
    with reading(path, "an index file (gpq index, or faiss.write_index)"), _LIMITS:
        size = path.stat().st_size
        check_memory(3 * size, str(path))
        data = np.fromfile(path, np.uint8)
        kind = data[:4].tobytes()
        if kind.startswith(b"IB"):
            raise DataError(f"{path} is a binary index, not product codes (IndexPQ)")
        if kind == b"IxM2":
            # Read an IndexIDMap2 as an IndexIDMap, which has the same bytes. The former also maps
            # ids to positions, which is not needed here and takes 2.7 s of 2.9 s for 10 million
            # items.
            data[:4] = np.frombuffer(b"IxMp", np.uint8)
        byte_limit = faiss.get_deserialization_vector_byte_limit()
        loop_limit = faiss.get_deserialization_loop_limit()
        # A damaged file may announce vectors of any size, but none is larger than the file.
        faiss.set_deserialization_vector_byte_limit(max(1, size))
        faiss.set_deserialization_loop_limit(max(1, size))
        try:
            return faiss.deserialize_index(data)
        finally:
            faiss.set_deserialization_vector_byte_limit(byte_limit)
            faiss.set_deserialization_loop_limit(loop_limit)
