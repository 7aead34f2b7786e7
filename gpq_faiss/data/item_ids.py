"""Ids and names of items that are given beside the data, and ids that do not depend on the order of items."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from ..files import fingerprint
from ..inputs import read_text
from ..progress import stage
from ..store import as_texts
from .arrays import read_npy, without_gradient
from .base import Dataset
from .id_files import read_ids, whole_numbers
from .images import FileImages
from .paths import local_path

IdFrom = Literal["position", "path", "content"]
ID_FROM: tuple[IdFrom, ...] = get_args(IdFrom)
_BLOCK = 1024


def stable_id(content: bytes) -> int:
    """63 bits of BLAKE2b: the same on every machine, never negative."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


def with_ids(dataset: Dataset, ids: Any = None, id_from: IdFrom = "position") -> Dataset:
    """``dataset`` with other ids: a file of them (:func:`.id_files.read_ids`) or the ids themselves, one per item; or by
    ``id_from`` ``path``
    from the name of each item as listed, or ``content`` from the bytes of its file or vector. Raises DataError: two items with the same id.
    """
    if id_from not in ID_FROM:
        raise UsageError(f"--read id_from={id_from}: choose from {', '.join(ID_FROM)}")
    if ids is not None:
        named = isinstance(ids, str)
        new = read_ids(ids, "--ids") if named else whole_numbers(np.asarray(without_gradient(ids)), "ids")
        if len(new) != len(dataset):
            what = f"--ids {ids} has" if named else "ids:"
            raise DataError(f"{what} {len(new):,} ids, {dataset.name} has {len(dataset):,} items")
    elif id_from == "position":
        return dataset
    elif id_from == "path":
        if "name" not in dataset.texts:
            raise UsageError(
                f"--read id_from=path: items of {dataset.name} have no paths: use content or --ids"
            )
        new = np.array([stable_id(name.encode()) for name in dataset.texts["name"].tolist()], dtype=np.int64)
    else:
        new = np.empty(len(dataset), np.int64)
        with stage("ids from content", len(dataset)) as reading:
            for i, content in enumerate(_contents(dataset)):
                new[i] = stable_id(content)
                reading.advance()
    _check_different(dataset, new, "the content of" if id_from == "content" else "the id of")
    return replace(dataset, ids=new, fingerprint=fingerprint(dataset.fingerprint, "ids", new.tobytes()))


def with_names(dataset: Dataset, names: str | Sequence[str]) -> Dataset:
    """``dataset`` with names from a list or a file, one per item: ``.npy`` of strings, or text with one per line."""
    where = f"--read names={names} has" if isinstance(names, str) else "names:"
    if not isinstance(names, str):
        listed = [str(name) for name in names]
    elif (path := local_path(names)).suffix == ".npy":
        found = read_npy(path, "names of items")
        if found.ndim != 1 or found.dtype.kind not in "US":
            raise DataError(
                f"--read names={names}: {found.dtype} {list(found.shape)}, expected a list of strings"
            )
        listed = found.astype(str).tolist()
    else:
        listed = read_text(path, "text with a name per line").splitlines()
    n = len(listed)
    if n != len(dataset):
        raise DataError(f"{where} {n:,} names, {dataset.name} has {len(dataset):,} items")
    column = as_texts(listed)
    mark = fingerprint(dataset.fingerprint, "names", "\0".join(column.tolist()))
    repeated = n - len(set(listed))
    notes = [*dataset.notes, *([f"{repeated:,} of the {n:,} names are repeated"] if repeated else ())]
    return replace(dataset, texts={**dataset.texts, "name": column}, fingerprint=mark, notes=notes)


def _contents(dataset: Dataset) -> Iterator[bytes]:
    if not isinstance(dataset, FileImages):
        for rows in dataset.spans(_BLOCK):
            for row in dataset.read(rows):
                yield row.tobytes()
        return
    for i in range(len(dataset)):
        source = dataset.source(i)
        try:
            yield Path(source).read_bytes() if isinstance(source, str) else bytes(source)
        except OSError as error:
            raise DataError(f"{dataset.item_name(i)} cannot be read: {error.strerror}") from None


def _check_different(dataset: Dataset, ids: NDArray[np.int64], what: str) -> None:
    order = np.argsort(ids, kind="stable")
    twice = np.flatnonzero(ids[order][1:] == ids[order][:-1])
    if not twice.size:
        return
    names = dataset.texts.get("name")
    pair = [int(order[twice[0]]), int(order[twice[0] + 1])]
    first, second = (str(names[i]) if names is not None else f"item {i}" for i in pair)
    pairs = f"({len(twice):,} pairs): leave one out, or give other ids"
    raise DataError(f"{dataset.name}: {second} has {what} {first} {pairs}")
