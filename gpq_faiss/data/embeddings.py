"""``features:FILES``: existing embeddings (CLIP, DINO, EfficientNet ...) in several file formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from ..files import fingerprint
from ..inputs import check_file, check_memory
from ..store import Hdf5Array, RowReader, as_texts, read_hdf5_array
from .arrays import NpyHeader, npz_array, npz_arrays
from .base import About, Options
from .columns import (
    CLASS_NAMES,
    FEATURES,
    IDS,
    LABELS,
    NAMES,
    first_of,
    parquet_columns,
    texts_for_ids,
)
from .id_files import read_ids, whole_numbers
from .label_files import labels_from_array, read_labels
from .labels import Labels, class_order
from .paths import file_fingerprint, files_of, without_secrets
from .vectors import (
    ArrayVectors,
    ConcatVectors,
    FileFeatures,
    Hdf5Vectors,
    NpyVectors,
    ParquetVectors,
    Vectors,
    file_features,
)

_PARQUET = "a Parquet file of vectors"
_Contents = tuple[Vectors, About]


def _npy(path: Path, want_labels: bool, memory: int | None, keep: Sequence[str]) -> _Contents:
    del want_labels, memory
    if keep:
        raise UsageError(
            f"--read keep={','.join(keep)}: {path} has no columns to keep: use CSV, Parquet or .npz"
        )
    return NpyVectors(path), About()


@dataclass
class _Member:
    """An array of an ``.npz``, as :class:`..store.Hdf5Array`."""

    path: Path
    name: str
    header: NpyHeader
    memory: int | None

    def __post_init__(self) -> None:
        self.shape, self.dtype = self.header.shape, self.header.dtype

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0

    def read(self, rows: slice) -> NDArray[Any]:
        return npz_array(self.path, self.name, self.memory)[rows]


_Find = Callable[[Sequence[str]], "_Member | Hdf5Array | None"]


def _numbers(
    path: Path, find: _Find, want_labels: bool, memory: int | None, names: Sequence[str] | None = None
) -> About:
    """Labels and ids of arrays."""
    found = About()
    if want_labels and (labels := find(LABELS)) is not None:
        check_memory(16 * len(labels), f"{path}: {labels.name!r}", memory)
        found.labels = labels_from_array(labels.shape, labels.read, f"{path}: {labels.name!r}", names)
    if (ids := find(IDS)) is not None and ids.dtype.kind != "U":
        check_memory(16 * len(ids), f"{path}: {ids.name!r}", memory)
        found.ids = whole_numbers(ids.read(slice(0, len(ids))), f"{path}: {ids.name!r}")
    return found


def _npz(path: Path, want_labels: bool, memory: int | None, keep: Sequence[str]) -> _Contents:
    there = npz_arrays(path)
    load = partial(npz_array, path, memory=memory)

    def find(names: Sequence[str]) -> _Member | None:
        name = first_of(names, list(there))
        return None if name is None else _Member(path, name, there[name], memory)

    matrices = [n for n, head in there.items() if len(head.shape) == 2 and head.dtype.kind in "fiu"]
    free = [name for name in matrices if name not in LABELS]
    name = first_of(FEATURES, list(there)) or (free[0] if len(free) == 1 else None)
    if name is None:
        known = ", ".join(there) or "none"
        raise DataError(f"{path}: which array holds the features? Name it 'features' (there are: {known})")
    vectors = ArrayVectors(load(name), f"{path}: {name!r}")
    classes = first_of(CLASS_NAMES, list(there))
    found = _numbers(
        path, find, want_labels, memory, None if classes is None else load(classes).astype(str).tolist()
    )
    texts, named, ids = (
        {column: column for column in keep},
        first_of(NAMES, list(there)),
        first_of(IDS, list(there)),
    )
    if ids is not None and there[ids].dtype.kind == "U":
        named = named or ids
        found.notes.append(texts_for_ids(ids, named))
    for column, array in (texts if named is None else texts | {"name": named}).items():
        if array not in there:
            raise DataError(
                f"{path} has no array {array!r} (it has {', '.join(there)}): name it with --read keep"
            )
        if there[array].dtype.kind != "U":
            raise DataError(f"{path}: {array!r} is {there[array].dtype}: texts are needed")
        found.texts[column] = as_texts(load(array).tolist())
    return vectors, found


def _hdf5(path: Path, want_labels: bool, memory: int | None, keep: Sequence[str]) -> _Contents:
    features = read_hdf5_array(path, FEATURES)
    assert features is not None
    vectors = Hdf5Vectors(features)
    if keep:
        raise UsageError(
            f"--read keep={','.join(keep)}: {path} has no columns to keep: use CSV, Parquet or .npz"
        )
    check_memory(16 * len(features), f"{path}: ids and labels", memory)
    if features.name != "features" or read_hdf5_array(path, ["codebooks"], required=False) is None:
        return vectors, _numbers(path, partial(read_hdf5_array, path, required=False), want_labels, memory)
    # Our features.h5: its labels are packed, so their form is known.
    with RowReader(path, kind="features") as reader:
        found = About(ids=reader.ids(), texts=reader.texts())
        packed = reader.labels() if want_labels else None
        if packed is not None:
            found.labels = Labels(packed, reader.header.class_names)
    return vectors, found


def _parquet(path: Path, want_labels: bool, memory: int | None, keep: Sequence[str]) -> _Contents:
    columns = parquet_columns(path, _PARQUET, memory)
    free = [name for name in columns.names if name not in LABELS]
    name = columns.vectors(None, free, "name a column of lists 'features'")
    if name is None:
        raise DataError(f"{path} has no column of vectors (it has {', '.join(columns.names[:20])})")
    label = first_of(LABELS, columns.names) if want_labels else None
    return ParquetVectors(path, name, memory), columns.describe(label, keep=keep)


SUFFIXES = {".npy": _npy, ".npz": _npz, ".h5": _hdf5, ".hdf5": _hdf5, ".parquet": _parquet, ".pq": _parquet}
"""Readers by the ending of a file."""


def _open(file: Path, want_labels: bool, memory: int | None, keep: Sequence[str]) -> tuple[_Contents, str]:
    """Contents of one file, and their hash. Raises as :func:`open_features`."""
    read = SUFFIXES.get(file.suffix.lower())
    if read is None and file.exists():
        raise DataError(
            f"{file}: features are read from {', '.join(SUFFIXES)}, not from {file.suffix or 'this'}"
        )
    try:
        if check_file(file, "a file of features") == 0:
            raise DataError(f"{file} is empty (0 bytes)")
        assert read is not None
        return read(file, want_labels, memory, keep), file_fingerprint(file)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None


def _joined(files: Sequence[Path], parts: Sequence[_Contents]) -> _Contents:
    """Concatenated rows of several files. Raises DataError: they do not fit."""
    vectors = ConcatVectors([part for part, _ in parts], [str(file) for file in files])
    found = [part for _, part in parts]
    for what, has in (
        ("labels", [part.labels is not None for part in found]),
        ("ids", [part.ids is not None for part in found]),
        ("names", ["name" in part.texts for part in found]),
    ):
        if any(has) and not all(has):
            one, other = files[has.index(True)], files[has.index(False)]
            raise DataError(f"{one} has {what}, {other} has none: either all files or none may have them")
    joined = About(notes=list(dict.fromkeys(note for part in found for note in part.notes)))
    labels = [part.labels for part in found if part.labels is not None]
    if labels:
        joined.labels = Labels.concatenate(
            labels, class_order(name for part in labels for name in part.class_names)
        )
    ids = [part.ids for part in found if part.ids is not None]
    if ids:
        joined.ids = np.concatenate(ids)
    for name in sorted(set.intersection(*(set(part.texts) for part in found))):
        joined.texts[name] = np.concatenate([part.texts[name] for part in found])
    return vectors, joined


def open_features(path: str, o: Options) -> FileFeatures:
    """Open files of vectors, one or several concatenated (:func:`.paths.files_of`), as a data set; rows are checked when read.

    Labels are class numbers with -1 for none, 0/1 rows, or (Parquet) names, with empty for none. Files of ``labels`` and ``ids``
    replace those
    inside. ``memory`` is the budget in bytes for the decompressed size of a compressed file (default: free memory).
    """
    files = files_of(path)
    opened = [_open(file, o.labels is None, o.memory, o.keep) for file in files]
    several = len(opened) > 1
    vectors, found = _joined(files, [part for part, _ in opened]) if several else opened[0][0]
    content = fingerprint("several", *(mark for _, mark in opened)) if several else opened[0][1]
    file, n = Path(path) if several else files[0], vectors.n
    check_memory(8 * n, f"{file}: the ids of its {n:,} rows", o.memory)
    if o.labels is not None:
        found.labels = read_labels(o.labels, n)
    if o.ids is not None:
        found.ids = read_ids(o.ids)
    for what, column in (("labels", found.labels), ("ids", found.ids), *found.texts.items()):
        if column is not None and len(column) != n:
            raise DataError(f"{file} has {n:,} rows but {len(column):,} {what}: one each is needed")
    if found.ids is not None and (repeated := n - len(np.unique(found.ids))):
        found.notes.append(f"{repeated:,} of the {n:,} ids are repeated")
    return file_features(f"features:{without_secrets(path)}", vectors, content, found)
