"""Ids of items from a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError


def as_int64(ids: NDArray[Any], what: str) -> NDArray[np.int64]:
    """Whole numbers of any type as int64. Raises DataError: one that does not fit; a cast would make another id of it."""
    if ids.dtype == np.uint64 and ids.size and int(ids.max()) >= 1 << 63:
        raise DataError(f"{what}: {int(ids.max())} does not fit signed 64 bits: use smaller ids")
    return ids.astype(np.int64, copy=False)


def read_ids(path: str | os.PathLike[str]) -> NDArray[np.int64]:
    """Ids int64 [n] from a ``.npy`` file, or from text with one on a line.

    Raises:
        DataError: missing, unreadable, or not a list of whole numbers of 64 bits.
    """
    path = Path(path).expanduser()
    try:
        if path.suffix == ".npy":
            found: NDArray[Any] = np.load(path, allow_pickle=False)
        else:
            found = np.array([int(line) for line in path.read_text(encoding="utf-8").split()], dtype=np.int64)
    except FileNotFoundError:
        raise DataError(f"{path} not found: it should hold ids") from None
    except (OSError, ValueError, OverflowError, EOFError) as error:
        why = " ".join(str(error).split())[:100]
        raise DataError(f"{path} holds no list of ids ({why}): write one whole number a line") from None
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise DataError(f"{path}: {found.dtype} {found.shape}, expected a list of ids (whole numbers)")
    return as_int64(found, str(path))
