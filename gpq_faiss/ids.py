"""Ids of items: whole numbers of signed 64 bits, in arrays, collections and files."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .codes.checks import as_array
from .errors import DataError
from .inputs import read_text, reading


def whole_numbers(ids: Any, source_name: str) -> NDArray[np.int64]:
    """Return ids as int64 [n]; whole floats and texts of whole numbers are ids, too.

    Raises DataError: not whole numbers of signed 64 bits, in one dimension.
    """
    array = as_array(list(ids) if isinstance(ids, set | frozenset | range) else ids, source_name)
    with contextlib.suppress(ValueError, OverflowError, TypeError), np.errstate(invalid="ignore"):
        # Numbers of objects and texts may be missing, or beyond 64 bits.
        if array.ndim == 1 and array.dtype.kind in "OUST":
            values = array.tolist()
            texts = [x.decode() if isinstance(x, bytes) else str(x) for x in values]
            # Names such as 2007_000027 are no numbers, but int() would take them.
            digits = [text.strip().removesuffix(".0").replace("_", "?") for text in texts]
            return np.array(list(map(int, digits)), np.int64)
        # Floats represent all whole numbers up to 2^24 (float32) or 2^53 (float64).
        exact = array.dtype.kind in "iu" or (np.abs(array) < 2 / np.finfo(array.dtype).eps).all()
        numbers = array.astype(np.int64)
        if array.ndim == 1 and exact and (numbers == array).all():
            return numbers
    raise DataError(
        f"{source_name}: {array.dtype} {list(array.shape)}, "
        "expected ids: whole numbers of signed 64 bits, none missing, no header line; texts may be "
        "names (--read names)"
    )


def read_ids(ids: Any, source_name: str = "ids") -> NDArray[np.int64]:
    """Return ids int64 [n] of an array, or of a file: ``.npy``, or text with one per line, where
    ``#`` starts a comment.

    ``source_name`` names the option in errors. Raises DataError: as :func:`whole_numbers`.
    """
    if not isinstance(ids, str | os.PathLike):
        return whole_numbers(ids, source_name)
    path = Path(ids).expanduser()
    if path.suffix == ".npy":
        with reading(path, "a .npy array of ids"):
            return whole_numbers(np.load(path, allow_pickle=False), f"{source_name}: {path}")
    lines = read_text(path, f"{source_name}, one whole number per line,").splitlines()
    words = [word for line in lines for word in line.partition("#")[0].split()]
    return whole_numbers(words, f"{source_name}: {path}")


def read_rows(
    path: str, ids: NDArray[np.int64], option: str, allowed: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return the rows of the items whose ids a file lists: ``.npy``, or text with one per line.

    Raises DataError: an id is not in the data, or its row is not ``allowed``.
    """
    listed = np.unique(read_ids(path, option))
    rows = np.flatnonzero(np.isin(ids, listed) & allowed)
    wrong = np.setdiff1d(listed, ids[rows])
    if len(wrong) or not len(listed):
        raise DataError(
            f"{option} {path}: the ids {wrong[:5].tolist()} ({len(wrong):,} of {len(listed):,}) "
            "are unknown, unlabelled or have another role: leave them out"
        )
    return rows
