"""Integers from a file: ids of items, or row numbers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..inputs import check_file, check_memory
from .arrays import read_npy
from .paths import local_path

_BLOCK = 1 << 20  # characters of text per parsing block


def as_int64(ids: NDArray[Any], what: str) -> NDArray[np.int64]:
    """Integers of any type as int64. Raises DataError: out of range."""
    if ids.dtype == np.uint64 and ids.size and int(ids.max()) >= 1 << 63:
        raise DataError(f"{what}: {int(ids.max())} does not fit signed 64 bits: use smaller ids")
    return ids.astype(np.int64, copy=False)


def whole_numbers(ids: NDArray[Any], what: str) -> NDArray[np.int64]:
    """An array of integers as int64 [n]. Raises DataError: it is none, or out of range."""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataError(f"{what}: ids are {ids.dtype} {list(ids.shape)}, a list of whole numbers is needed")
    return as_int64(ids, what)


def read_ids(path: str | os.PathLike[str], what: str = "") -> NDArray[np.int64]:
    """Integers int64 [n] from a ``.npy`` file, or from text with one per line; ``#`` starts a comment. ``what`` names the option,
    for errors."""
    path = local_path(path)
    where = f"{what} {path}".strip()
    content = "a list of ids, one whole number per line,"
    try:
        if path.suffix == ".npy":
            return whole_numbers(read_npy(path, content), str(path))
        check_memory(4 * check_file(path, content), str(path))
        return _from_text(path)
    except DataError as error:
        raise DataError(f"{what} {error}".strip()) from None
    except OSError as error:
        raise DataError(f"{where} cannot be read: {error.strerror}") from None
    except (ValueError, OverflowError) as error:
        why = " ".join(str(error).split())[:100]
        raise DataError(f"{where} is not a list of ids ({why}): write one whole number per line") from None


def _from_text(path: Path) -> NDArray[np.int64]:
    parts = [np.empty(0, np.int64)]
    with path.open(encoding="utf-8-sig") as stream:
        while lines := stream.readlines(_BLOCK):
            words = [word for line in lines for word in line.partition("#")[0].split()]
            parts.append(np.array([int(word) for word in words], dtype=np.int64))
    return np.concatenate(parts)
