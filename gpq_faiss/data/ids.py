"""Ids and names of items: lists of integers from files, and ids and names that are given beside the data."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError, one_line
from ..files import fingerprint
from ..inputs import check_file, check_memory, read_text
from ..store import as_texts
from .arrays import read_npy, without_gradient
from .base import Dataset
from .paths import local_path

IdFrom = Literal["position", "path"]
ID_FROM: tuple[IdFrom, ...] = get_args(IdFrom)
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
    content = "a list of ids, one whole number per line,"
    try:
        if path.suffix == ".npy":
            return whole_numbers(read_npy(path, content), str(path))
        check_memory(4 * check_file(path, content), str(path))
        return _from_text(path)
    except DataError as error:
        raise DataError(f"{what} {error}".strip()) from None
    except (OSError, ValueError, OverflowError) as error:
        where, why = f"{what} {path}".strip(), one_line(error, 100)
        raise DataError(f"{where} is not a list of ids ({why}): write one whole number per line") from None


def _from_text(path: Path) -> NDArray[np.int64]:
    parts = [np.empty(0, np.int64)]
    with path.open(encoding="utf-8-sig") as stream:
        while lines := stream.readlines(_BLOCK):
            words = [word for line in lines for word in line.partition("#")[0].split()]
            parts.append(np.array([int(word) for word in words], dtype=np.int64))
    return np.concatenate(parts)


def stable_id(content: bytes) -> int:
    """63 bits of BLAKE2b: the same on every machine, never negative."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


def with_ids(dataset: Dataset, ids: Any = None, id_from: IdFrom = "position") -> Dataset:
    """``dataset`` with other ids: a file of them (:func:`read_ids`) or the ids themselves, one per item; or (``id_from`` ``path``)
    hashes of the names of the items, which do not depend on their order."""
    if id_from not in ID_FROM:
        raise UsageError(f"--read id_from={id_from}: choose from {', '.join(ID_FROM)}")
    if ids is not None:
        new = (
            read_ids(ids, "--ids")
            if isinstance(ids, str)
            else whole_numbers(np.asarray(without_gradient(ids)), "ids")
        )
        if len(new) != len(dataset):
            what = f"--ids {ids} has" if isinstance(ids, str) else "ids:"
            raise DataError(f"{what} {len(new):,} ids, {dataset.name} has {len(dataset):,} items")
    elif id_from == "position":
        return dataset
    elif "name" not in dataset.texts:
        raise UsageError(f"--read id_from=path: items of {dataset.name} have no paths: give --ids")
    else:
        new = np.array([stable_id(name.encode()) for name in dataset.texts["name"].tolist()], dtype=np.int64)
    mark = fingerprint(dataset.fingerprint, "ids", new.tobytes())
    return replace(dataset, ids=new, fingerprint=mark, notes=dataset.notes + repeated_ids(new))


def repeated_ids(ids: NDArray[np.int64]) -> list[str]:
    """A note if some ids occur more than once."""
    repeated = len(ids) - len(np.unique(ids))
    return [f"{repeated:,} of the {len(ids):,} ids are repeated"] if repeated else []


def with_names(dataset: Dataset, names: str | Sequence[str]) -> Dataset:
    """``dataset`` with names from a list or a text file, one per item."""
    if isinstance(names, str):
        listed = read_text(local_path(names), "text with a name per line").splitlines()
        where = f"--read names={names} has"
    else:
        listed, where = [str(name) for name in names], "names:"
    if len(listed) != len(dataset):
        raise DataError(f"{where} {len(listed):,} names, {dataset.name} has {len(dataset):,} items")
    column = as_texts(listed)
    mark = fingerprint(dataset.fingerprint, "names", "\0".join(column.tolist()))
    return replace(dataset, texts={**dataset.texts, "name": column}, fingerprint=mark)
