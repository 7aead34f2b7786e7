"""``features:FILE``: existing embeddings (CLIP, DINO, EfficientNet ...) in several file formats."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from ..files import fingerprint
from ..inputs import check_file, check_memory
from ..store import RowReader, Texts, as_texts, read_hdf5_array
from .arrays import npz_array, npz_arrays
from .base import FeatureDataset
from .id_files import read_ids
from .label_files import label_cell, labels_from_array, labels_from_cells, read_labels
from .labels import Labels, Rows
from .parquet import decoded_bytes, is_list, is_text, open_parquet, read_cells
from .paths import files_of, without_secrets
from .table_files import missing_column
from .vectors import (
    ArrayVectors,
    ConcatVectors,
    Hdf5Vectors,
    NpyVectors,
    ParquetVectors,
    Vectors,
    file_fingerprint,
    first_of,
)

FEATURES = ("features", "x", "data", "embeddings", "embedding", "vectors", "vector", "emb")
LABELS = ("labels", "label", "y")
IDS = ("ids", "id")
CLASS_NAMES = ("class_names", "classes")
NAMES = ("name", "names", "path", "paths", "key", "keys")
"""Column names of item names, which results show."""

SUFFIXES = {
    ".npy": "npy",
    ".npz": "npz",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
    ".parquet": "parquet",
    ".pq": "parquet",
}


@dataclass
class _Source:
    """Contents of a file."""

    vectors: Vectors
    labels: Labels | None = None
    ids: NDArray[np.int64] | None = None
    texts: dict[str, Texts] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class FileFeatures(FeatureDataset):
    """Vectors in a file, streamed.

    Attributes:
        vectors: their source.
    """

    vectors: Vectors

    def _read(self, rows: Rows) -> NDArray[np.float32]:
        # float64 beyond the range of float32 becomes infinity, which the caller reports.
        with np.errstate(over="ignore"):
            return self.vectors.read(rows).astype(np.float32, copy=False)


def _ids(array: NDArray[Any], where: str) -> NDArray[np.int64]:
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{where} are {array.dtype} {list(array.shape)}: whole numbers [N] are needed")
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise DataError(f"{where} go up to {int(array.max())}: ids are signed 64-bit numbers")
    return array.astype(np.int64)


def texts_for_ids(ids: str, names: str | None) -> str:
    """The note on a column of ids that holds texts; ``names``: the column of names."""
    what = "they are the names" if names == ids else f"names are {names!r}, --keep {ids} shows them too"
    return f"{ids!r} holds texts: {what}; ids are row numbers (--id-from path: ids from the names)"


def _npz(path: Path, want_labels: bool, memory: int | None, keep: Sequence[str] = ()) -> _Source:
    there = npz_arrays(path)
    matrices = [name for name, head in there.items() if len(head.shape) == 2 and head.dtype.kind in "fiu"]
    name = first_of(FEATURES, list(there))
    if name is None:
        free = [m for m in matrices if m not in LABELS]
        if len(free) != 1:
            known = ", ".join(there) or "none"
            raise DataError(
                f"{path}: which array holds the features? Name it 'features' (there are: {known})"
            )
        name = free[0]
    source = _Source(ArrayVectors(npz_array(path, name, memory), f"{path}: {name!r}"))
    if want_labels and (label := first_of(LABELS, list(there))) is not None:
        names = first_of(CLASS_NAMES, list(there))
        class_names = None if names is None else [str(text) for text in npz_array(path, names, memory)]
        array = npz_array(path, label, memory)
        source.labels = labels_from_array(array.shape, array.__getitem__, f"{path}: {label!r}", class_names)
    texts, names_of = {column: column for column in keep}, first_of(NAMES, list(there))
    if (ids := first_of(IDS, list(there))) is not None and there[ids].dtype.kind == "U":
        names_of = names_of or ids
        source.notes.append(texts_for_ids(ids, names_of))
    elif ids is not None:
        source.ids = _ids(npz_array(path, ids, memory), f"{path}: {ids!r}")
    if names_of is not None:
        texts["name"] = names_of
    for column, array_name in texts.items():
        if array_name not in there:
            raise missing_column(path, array_name, list(there))
        if there[array_name].dtype.kind != "U":
            raise DataError(f"{path}: {array_name!r} is {there[array_name].dtype}: texts are needed")
        source.texts[column] = as_texts(npz_array(path, array_name, memory).astype(str).tolist())
    return source


def _hdf5(path: Path, want_labels: bool, memory: int | None, keep: Sequence[str] = ()) -> _Source:
    features = read_hdf5_array(path, FEATURES)
    assert features is not None
    source = _Source(Hdf5Vectors(features))
    if keep:
        raise UsageError(f"--keep {','.join(keep)}: {path} has no columns to keep: use CSV, Parquet or .npz")
    check_memory(16 * len(features), f"{path}: ids and labels", memory)
    if features.name == "features" and read_hdf5_array(path, ["codebooks"], required=False) is not None:
        # Our features.h5: its labels are packed, so their form is known.
        with RowReader(path, kind="features") as reader:
            source.ids = reader.ids()
            source.texts = reader.texts()
            packed = reader.labels() if want_labels else None
            if packed is not None:
                source.labels = Labels(packed, reader.header.class_names)
        return source
    labels = read_hdf5_array(path, LABELS, required=False) if want_labels else None
    if labels is not None:
        check_memory(16 * len(labels), f"{path}: {labels.name!r}", memory)
        source.labels = labels_from_array(labels.shape, labels.read, f"{path}: {labels.name!r}")
    ids = read_hdf5_array(path, IDS, required=False)
    if ids is not None:
        check_memory(16 * len(ids), f"{path}: {ids.name!r}", memory)
        source.ids = _ids(ids.read(slice(0, len(ids))), f"{path}: {ids.name!r}")
    return source


def _parquet(path: Path, want_labels: bool, memory: int | None, keep: Sequence[str] = ()) -> _Source:
    what = "a Parquet file of vectors"
    with open_parquet(path, what) as file:
        schema = file.schema_arrow
        lists = [field.name for field in schema if is_list(field.type)]
        name = first_of(FEATURES, lists)
        if name is None:
            free = [column for column in lists if column not in LABELS]
            if len(free) != 1:
                raise DataError(
                    f"{path}: which column holds the vectors? A list column 'features' is expected "
                    f"(there are: {', '.join(schema.names[:20])})"
                )
            name = free[0]
        label = first_of(LABELS, schema.names) if want_labels else None
        ids = first_of(IDS, schema.names)
        named = first_of(NAMES, schema.names)
        there = list(schema.names)
        are_texts = ids is not None and is_text(schema.field(ids).type)
    source = _Source(ParquetVectors(path, name, memory))
    if ids is not None and are_texts:
        named = named or ids
        source.notes.append(texts_for_ids(ids, named))
    if label is not None:
        cells = [label_cell(value) for value in read_cells(path, label, what, memory)]
        if any(cells):
            source.labels = labels_from_cells(cells, f"{path}: {label!r}")
    if ids is not None and not are_texts:
        source.ids = _parquet_ids(path, ids, what, memory)
    for column, cells_of in {**{c: c for c in keep}, **({"name": named} if named else {})}.items():
        if cells_of not in there:
            raise missing_column(path, cells_of, there)
        source.texts[column] = as_texts(
            "" if v is None else str(v) for v in read_cells(path, cells_of, what, memory)
        )
    return source


def _parquet_ids(path: Path, name: str, what: str, memory: int | None) -> NDArray[np.int64]:
    with open_parquet(path, what) as file:
        check_memory(decoded_bytes(file, name), f"{path}: {name!r}", memory)
        column = file.read(columns=[name])[name]
        if column.null_count:
            raise DataError(f"{path}: {name!r} has {column.null_count:,} empty cells: every row needs its id")
        return _ids(column.to_numpy(), f"{path}: {name!r}")


def _open(file: Path, want_labels: bool, memory: int | None, keep: Sequence[str]) -> tuple[_Source, str]:
    """Contents of one file, and their hash. Raises as :func:`open_features`."""
    form = SUFFIXES.get(file.suffix.lower(), "")
    if not form and file.exists():
        raise DataError(
            f"{file}: features are read from {', '.join(SUFFIXES)}, not from {file.suffix or 'this'}"
        )
    try:
        if check_file(file, "a file of features") == 0:
            raise DataError(f"{file} is empty (0 bytes)")
        if form == "npy":
            if keep:
                raise UsageError(
                    f"--keep {','.join(keep)}: {file} has no columns to keep: use CSV, Parquet or .npz"
                )
            source = _Source(NpyVectors(file))
        else:
            source = {"npz": _npz, "hdf5": _hdf5, "parquet": _parquet}[form](file, want_labels, memory, keep)
        return source, file_fingerprint(file)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None


def _joined(files: Sequence[Path], parts: Sequence[_Source]) -> _Source:
    """Concatenated rows of several files."""
    for what, has in (
        ("labels", [part.labels is not None for part in parts]),
        ("ids", [part.ids is not None for part in parts]),
        ("names", ["name" in part.texts for part in parts]),
    ):
        if any(has) and not all(has):
            raise DataError(
                f"{files[has.index(True)]} has {what}, {files[has.index(False)]} has none: either all files or none may have them"
            )
    joined = _Source(ConcatVectors([part.vectors for part in parts], [str(file) for file in files]))
    labels = [part.labels for part in parts if part.labels is not None]
    if labels:
        every = set().union(*(part.class_names for part in labels))
        numbers = all(name.isascii() and name.isdigit() for name in every)
        names = sorted(every, key=lambda name: (int(name), name) if numbers else (0, name))
        joined.labels = Labels.concatenate(labels, names)
    ids = [part.ids for part in parts if part.ids is not None]
    if ids:
        joined.ids = np.concatenate(ids)
    joined.notes = list(dict.fromkeys(note for part in parts for note in part.notes))
    for name in sorted(set.intersection(*(set(part.texts) for part in parts))):
        joined.texts[name] = np.concatenate([part.texts[name] for part in parts])
    return joined


def open_features(
    path: str | os.PathLike[str],
    *,
    labels: str | os.PathLike[str] | None = None,
    ids: str | os.PathLike[str] | None = None,
    keep: Sequence[str] = (),
    memory: int | None = None,
) -> FileFeatures:
    """Open a file of vectors as a data set; rows are checked when read.

    ====================  ======================================================================================
    ``.npy``              a matrix of numbers of 1 to 8 bytes, stored by rows; streamed
    ``.npz``              an array ``features``, or the only matrix; ``labels``, ``ids``, ``class_names``; in memory
    ``.h5``, ``.hdf5``    a dataset of :data:`FEATURES`; ``labels``, ``ids``; streamed (also our ``features.h5``)
    ``.parquet``, ``.pq``  a list column of :data:`FEATURES`; ``label(s)``, ``id(s)``; streamed by row group
    ====================  ======================================================================================

    Labels are class numbers with -1 for none, 0/1 rows, or (Parquet) names, with empty for none.

    Args:
        path: the file, or a pattern of several files, concatenated (:func:`.paths.files_of`: ``shard-*.npy``, URLs).
        labels: a file of labels instead of those inside: see :func:`~gpq_faiss.data.label_files.read_labels`.
        ids: a file of ids instead of those inside: see :func:`~gpq_faiss.data.id_files.read_ids`.
        keep: text columns to store with the items, besides their names (:data:`NAMES`).
        memory: budget in bytes for the decompressed size of a compressed file (default: free memory).

    Raises:
        UsageError: ``keep`` for a file without columns.
        DataError: missing, empty, truncated or of another format; larger than the budget; not a matrix of numbers; ids or labels that
            do not fit.
    """
    files = files_of(path)
    wanted = labels is None
    opened = [_open(file, wanted, memory, keep) for file in files]
    source = opened[0][0] if len(opened) == 1 else _joined(files, [part for part, _ in opened])
    content = opened[0][1] if len(opened) == 1 else fingerprint("several", *(mark for _, mark in opened))
    file = files[0] if len(files) == 1 else Path(path)
    n, width = source.vectors.n, source.vectors.width
    check_memory(8 * n, f"{file}: the ids of its {n:,} rows", memory)
    notes = source.notes
    if labels is not None:
        source.labels = read_labels(labels, n)
    if ids is not None:
        source.ids = read_ids(ids)
    for what, column in (("labels", source.labels), ("ids", source.ids), *source.texts.items()):
        if column is not None and len(column) != n:
            raise DataError(f"{file} has {n:,} rows but {len(column):,} {what}: one each is needed")
    own = np.arange(n, dtype=np.int64) if source.ids is None else source.ids
    if source.ids is not None and len(np.unique(own)) < n:
        notes.append(f"{n - len(np.unique(own)):,} of the {n:,} ids are repeated")
    if source.labels is None:
        notes.append("no labels")
    elif bare := int((~source.labels.has()).sum()):
        notes.append(f"{bare:,} of {n:,} items are unlabelled")
    mark = "" if source.labels is None else source.labels.fingerprint()
    return FileFeatures(
        name=f"features:{without_secrets(os.fspath(path))}",
        ids=own,
        fingerprint=fingerprint("features", content, str((n, width)), mark, own.tobytes()),
        labels=source.labels,
        texts=source.texts,
        notes=notes,
        width=width,
        vectors=source.vectors,
    )
