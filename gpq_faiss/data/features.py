"""``features:FILES``: existing embeddings (CLIP, DINO, EfficientNet ...) in several file formats, read in bounded memory."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from ..files import fingerprint
from ..inputs import check_file, check_memory
from ..store import RowReader, as_texts, read_hdf5_array
from .arrays import HeldArray, Matrix, NpyArray, npz_array
from .base import About, FeatureDataset
from .ids import read_ids, repeated_ids, whole_numbers
from .label_files import read_labels
from .labels import Labels, Rows, class_order, labels_from_array, row_numbers
from .parquet import matrix_of
from .paths import file_fingerprint, files_of, without_secrets
from .tables import FEATURES, IDS, LABELS, NAMES, parquet_table


@dataclass(kw_only=True)
class FileFeatures(FeatureDataset):
    """Vectors of any source, streamed where it can be."""

    matrix: Matrix

    def _read(self, rows: Rows) -> NDArray[np.float32]:
        at = row_numbers(rows, len(self))
        run = len(at) and (np.diff(at) == 1).all()
        # float64 beyond the range of float32 becomes infinity, which the caller reports.
        with np.errstate(over="ignore"):
            block = self.matrix.read(slice(int(at[0]), int(at[-1]) + 1) if run else at)
            return block.astype(np.float32, copy=False)


def file_features(name: str, matrix: Matrix, content: str, about: About) -> FileFeatures:
    """A data set of vectors; ``content`` is their hash. Raises DataError: not a non-empty matrix of numbers."""
    shape, dtype = tuple(matrix.shape), matrix.dtype
    if len(shape) != 2 or 0 in shape or dtype.kind not in "fiu" or dtype.itemsize > 8:
        raise DataError(f"{name} is {dtype} {list(shape)}: numbers [N, width] are needed, one row per item")
    n, width = shape
    for what, column in (("labels", about.labels), ("ids", about.ids), *about.texts.items()):
        if column is not None and len(column) != n:
            raise DataError(f"{name} has {n:,} rows but {len(column):,} {what}: one each is needed")
    ids = np.arange(n, dtype=np.int64) if about.ids is None else about.ids
    bare = 0 if about.labels is None else int((~about.labels.has()).sum())
    said = ["no labels"] if about.labels is None else [f"{bare:,} of {n:,} items are unlabelled"] * (bare > 0)
    mark = "" if about.labels is None else about.labels.fingerprint()
    return FileFeatures(
        name=name,
        ids=ids,
        fingerprint=fingerprint("features", content, str((n, width)), mark, ids.tobytes()),
        labels=about.labels,
        texts=about.texts,
        notes=list(dict.fromkeys(about.notes + said)) + repeated_ids(ids),
        width=width,
        matrix=matrix,
    )


def held_features(name: str, array: NDArray[Any], about: About) -> FileFeatures:
    """:func:`file_features` of the rows of an array in memory."""
    content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return file_features(name, HeldArray(array), content, about)


class JoinedMatrix:
    """Concatenated rows of several files."""

    def __init__(self, parts: Sequence[Matrix], files: Sequence[Path]) -> None:
        self._parts, self.dtype = parts, np.result_type(*(part.dtype for part in parts))
        for part, file in zip(parts, files, strict=True):
            if len(part.shape) != 2 or part.shape[1] != parts[0].shape[1]:
                here, there = list(parts[0].shape), list(part.shape)
                raise DataError(f"{files[0]} is {here}, {file} {there}: rows of one width are needed")
        self._starts = np.concatenate([[0], np.cumsum([part.shape[0] for part in parts])]).astype(np.int64)
        self.shape = (int(self._starts[-1]), parts[0].shape[1])

    def read(self, rows: slice | NDArray[np.int64]) -> NDArray[Any]:
        """See :class:`.arrays.Matrix`."""
        at = row_numbers(rows, self.shape[0])
        part_of = np.searchsorted(self._starts, at, side="right") - 1
        out = np.empty((len(at), self.shape[1]), np.float32)
        for i in np.unique(part_of).tolist():
            mine = part_of == i
            out[mine] = self._parts[i].read(at[mine] - self._starts[i])
        return out


# Files ------------------------------------------------------------------------------------------------------------------


def _open_arrays(
    path: Path, want_labels: bool, memory: int | None, keep: Sequence[str]
) -> tuple[Matrix, About]:
    """An ``.npz`` or HDF5 file: arrays by their usual names; texts are in ``.npz`` alone."""
    packed = path.suffix.lower() == ".npz"
    find: Any = (
        partial(npz_array, path, memory=memory) if packed else partial(read_hdf5_array, path, required=False)
    )
    matrix = find((*FEATURES, "arr_0"))
    if matrix is None:
        raise DataError(f"{path} has none of the arrays {', '.join(FEATURES)}: name the vectors so")
    if not packed and matrix.name == "features" and find(["codebooks"]) is not None:
        # Our features.h5, whose labels are packed.
        with RowReader(path, kind="features") as reader:
            stored = reader.labels() if want_labels else None
            labels = None if stored is None else Labels(stored, reader.header.class_names)
            return matrix, About(labels, reader.ids(), reader.texts())
    found = About()
    columns = {what: find(names) for what, names in (("ids", IDS), ("labels", LABELS if want_labels else ()))}
    for what, column in columns.items():
        if column is not None:
            where = f"{path}: {column.name!r}"
            check_memory(2 * math.prod(column.shape) * column.dtype.itemsize, where, memory)
            array = column.read(slice(None))
            if what == "ids":
                found.ids = whole_numbers(array, where)
            else:
                classes = find(["class_names"]) if packed else None
                found.labels = labels_from_array(array, where, None if classes is None else classes.array)
    for column, names in {"name": NAMES if packed else (), **{name: (name,) for name in keep}}.items():
        held = find(names)
        if held is not None and held.dtype.kind == "U" and len(held.shape) == 1:
            found.texts[column] = as_texts(held.array.tolist())
        elif held is not None or column in keep:
            raise DataError(f"{path} has no texts {column!r}: name an array of texts with --read keep")
    return matrix, found


def _open(path: Path, want_labels: bool, memory: int | None, keep: Sequence[str]) -> tuple[Matrix, About]:
    """The contents of one file. Raises as :func:`open_features`."""
    suffix = path.suffix.lower()
    if check_file(path, "a file of features") == 0:
        raise DataError(f"{path} is empty (0 bytes)")
    if suffix not in SUFFIXES:
        raise DataError(f"{path}: features are read from {', '.join(SUFFIXES)}, not from {suffix or 'this'}")
    if suffix in (".parquet", ".pq"):
        table = parquet_table(path, "a Parquet file of vectors", memory)
        found, used = table.describe(labels=want_labels, keep=keep)
        name = table.vectors(None, {*used, *LABELS}, "name a column of lists 'features'")
        if name is None:
            raise DataError(f"{path} has no column of vectors (it has {', '.join(table.names[:20])})")
        return HeldArray(matrix_of(table.column(name), f"{path}: {name!r}")), found
    if keep and suffix != ".npz":
        what = f"{path} has no columns to keep: use Parquet or .npz"
        raise UsageError(f"--read keep={','.join(keep)}: {what}")
    return (
        (NpyArray(path, "vectors"), About())
        if suffix == ".npy"
        else _open_arrays(path, want_labels, memory, keep)
    )


SUFFIXES = (".npy", ".npz", ".h5", ".hdf5", ".parquet", ".pq")
"""Endings of files of vectors."""


def _joined(files: Sequence[Path], parts: Sequence[tuple[Matrix, About]]) -> tuple[Matrix, About]:
    """Concatenated rows of several files. Raises DataError: they do not fit."""
    found = [part for _, part in parts]
    held = [(part.labels is not None, part.ids is not None, *sorted(part.texts)) for part in found]
    other = next((i for i, what in enumerate(held) if what != held[0]), None)
    if other is not None:
        what = "one has labels, ids or names that the other has not: either all files or none may have them"
        raise DataError(f"{files[0]} and {files[other]} do not fit: {what}")
    joined = About(notes=list(dict.fromkeys(note for part in found for note in part.notes)))
    labels = [part.labels for part in found if part.labels is not None]
    if labels:
        names = class_order(name for part in labels for name in part.class_names)
        joined.labels = Labels(np.concatenate([part.over(names).packed for part in labels]), tuple(names))
    if found[0].ids is not None:
        joined.ids = np.concatenate([part.ids for part in found if part.ids is not None])
    for name in found[0].texts:
        joined.texts[name] = np.concatenate([part.texts[name] for part in found])
    return JoinedMatrix([matrix for matrix, _ in parts], files), joined


def open_features(
    path: str,
    *,
    labels: str | None = None,
    ids: str | None = None,
    keep: Sequence[str] = (),
    memory: int | None = None,
) -> FileFeatures:
    """Open files of vectors, one or several concatenated (:func:`.paths.files_of`), as a data set; rows are checked when read.

    Labels are class numbers with -1 for none, 0/1 rows, or (Parquet) names. Files of ``labels`` and ``ids`` replace those inside.
    ``memory`` is the budget in bytes for the decompressed size of a compressed file (default: free memory).
    """
    files = files_of(path)
    try:
        parts = [_open(file, labels is None, memory, keep) for file in files]
        marks = [file_fingerprint(file) for file in files]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    several = len(files) > 1
    matrix, found = _joined(files, parts) if several else parts[0]
    n = matrix.shape[0] if matrix.shape else 0
    name = f"features:{without_secrets(path)}"
    check_memory(8 * n, f"{name}: the ids of its {n:,} rows", memory)
    if labels is not None:
        found.labels = read_labels(labels, n)
    if ids is not None:
        found.ids = read_ids(ids, "--ids")
    return file_features(name, matrix, fingerprint("several", *marks) if several else marks[0], found)
