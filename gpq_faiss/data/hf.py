"""``hf:FOLDER``: Hugging Face data sets as written by ``save_to_disk``, or in memory; images or vectors, read without conversion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..files import fingerprint
from .base import BadItems
from .embeddings import FEATURES, LABELS, FileFeatures
from .folder import is_test_split
from .frames import Columns
from .images import BrokenImageError, FileImages, check_max_bad
from .labels import Rows
from .parquet import is_list, matrix_of
from .tables import DEFAULT_LABEL_COLUMN
from .vectors import Vectors, check_array, file_fingerprint, first_of

_IMAGES = ("image", "img")
_MORE_LABELS = ("fine_label", "class", "category", "target")


@dataclass(kw_only=True)
class HubImages(FileImages):
    """Images of a column.

    Attributes:
        column: a data set with only that column, of encoded bytes or paths.
        may_open: whether paths may be opened (not for a folder from elsewhere).
    """

    column: Any = field(repr=False)
    may_open: bool = False

    def source(self, i: int) -> bytes | str:
        """Raises BrokenImageError: neither bytes, nor a path that may be opened."""
        value = next(iter(self.column[i].values()), None)  # a damaged row has none
        if value is not None and value["bytes"] is not None:
            return bytes(value["bytes"])
        if value is not None and value["path"] and self.may_open:
            return str(value["path"])
        raise BrokenImageError(self.item_name(i), "there is no image in this row")

    def image_path(self, i: int) -> str | None:
        """None: images in a table have no path."""
        del i
        return None


class HubVectors(Vectors):
    """Vectors of a column.

    Raises:
        DataError: not lists of numbers of one width.
    """

    def __init__(self, column: Any, name: str, where: str) -> None:
        self.name, self.where = name, f"{where}: {name!r}"
        self.column = _only(column, name, where).with_format("arrow")
        self.n, self.width = len(column), 0
        if not self.n:
            raise DataError(f"{where} has no rows")
        first = self.read(slice(0, 1))
        check_array((self.n, first.shape[1]), first.dtype, self.where)
        self.width = first.shape[1]

    def read(self, rows: Rows) -> NDArray[Any]:
        positions = np.arange(self.n)[rows]
        if not len(positions):
            return np.empty((0, self.width), np.float32)
        # A range is read as a slice, without copying rows one by one.
        together = int(positions[-1]) - int(positions[0]) == len(positions) - 1 and bool(
            (np.diff(positions) == 1).all()
        )
        chosen = slice(int(positions[0]), int(positions[-1]) + 1) if together else positions.tolist()
        return matrix_of(
            self.column[chosen].column(self.name), self.where, start=int(positions[0]), width=self.width
        )


def _only(rows: Any, name: str, where: str) -> Any:
    """One column as a data set, after checking its offsets, which Arrow does not.

    Raises:
        DataError: offsets out of range, or a text that is not UTF-8.
    """
    import pyarrow

    try:
        rows.data.table.column(name).validate(full=True)
    except (pyarrow.ArrowException, OSError) as error:
        why = " ".join(str(error).split())[:120]
        raise DataError(f"{where}: column {name!r} is damaged ({why}): write it again") from None
    return rows.select_columns([name])


def _load(folder: Path) -> Any:
    """Raises DataError: ``datasets`` is not installed, or not such a folder."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"reading {folder} needs the package datasets: pip install 'gpq-faiss[hf]'") from None
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: one that save_to_disk wrote is needed")
    try:
        return datasets.load_from_disk(str(folder))
    except Exception as error:  # from pyarrow, json, or datasets
        why = " ".join(str(error).split())[:160]
        raise DataError(
            f"{folder} is not a data set that save_to_disk wrote, or it is damaged ({why})"
        ) from None


def _joined(found: Any, where: str) -> tuple[Any, NDArray[np.uint8] | None, list[str]]:
    """All rows, marks (0 train, 1 test) if there are both parts, and notes."""
    import datasets

    if isinstance(found, datasets.Dataset):
        return found, None, []
    if not isinstance(found, datasets.DatasetDict) or not found:
        raise DataError(
            f"{where}: {type(found).__name__} cannot be read by position: give a Dataset, not a stream"
        )
    names = sorted(found, key=lambda name: (is_test_split(name, found), name))
    marks = np.concatenate(
        [np.full(len(found[name]), is_test_split(name, found), np.uint8) for name in names]
    )
    try:
        rows = datasets.concatenate_datasets([found[name] for name in names])
    except Exception as error:
        why = " ".join(str(error).split())[:160]
        raise DataError(f"{where}: its parts {', '.join(names)} do not fit together ({why})") from None
    return rows, marks if marks.any() and not marks.all() else None, [f"parts: {', '.join(names)}"]


def _image_column(rows: Any, wanted: str) -> str | None:
    import datasets

    images = [name for name, kind in rows.features.items() if isinstance(kind, datasets.Image)]
    if wanted in images:
        return wanted
    if wanted != "image":
        raise DataError(
            f"--image-column {wanted}: no column of images (there are: {', '.join(images) or 'none'})"
        )
    return first_of(_IMAGES, images) or (images[0] if len(images) == 1 else None)


def _class_names(kind: Any) -> list[str] | None:
    inner = getattr(kind, "feature", kind)
    names = getattr(inner, "names", None)
    return list(names) if isinstance(names, list) else None


def open_hf(
    source: Any,
    *,
    image_column: str = "image",
    label_column: str = DEFAULT_LABEL_COLUMN,
    vectors: str | None = None,
    ids: str | None = None,
    names: str | None = None,
    keep: Sequence[str] = (),
    max_bad: float = 0.01,
) -> FileImages | FileFeatures:
    """Images or vectors of a data set with their labels. Parts ``train`` and ``test`` are its official split.

    Args:
        source: the path of a folder, or a ``datasets.Dataset`` or ``DatasetDict``.
        image_column: of images; default ``image``, ``img`` or the only one.
        label_column: ``ClassLabel``, numbers, names, or lists of these; default ``label`` (or ``labels``, ``fine_label`` ...).
        vectors: column of vectors instead of images; default without images: the only column of lists of numbers.
        ids, names: columns; default: the usual names.
        keep: further text columns to store with the items.
        max_bad: allowed fraction of broken images.

    Raises:
        DataError: not such a data set, damaged, or without these columns.
        UsageError: ``max_bad`` out of range.
    """
    check_max_bad(max_bad)
    folder = isinstance(source, str)
    name = f"hf:{source}" if folder else type(source).__name__
    rows, official, notes = _joined(_load(Path(source).expanduser()) if folder else source, name)
    image = None if vectors is not None else _image_column(rows, image_column)
    columns = Columns(
        rows.features.arrow_schema, lambda n: _only(rows, n, name).with_format("arrow")[:].column(n), name
    )
    label: str | None = label_column
    if label_column == DEFAULT_LABEL_COLUMN:
        label = first_of((*LABELS, *_MORE_LABELS), columns.names)
    labels = None if label is None else columns.labels(label, _class_names(rows.features.get(label)))
    notes.append("no labels" if labels is None else f"labels from column {label!r}")
    ids, names = ids or columns.guess_ids(), names or columns.guess_names()
    notes += columns.notes(ids, names)
    own = np.arange(len(rows), dtype=np.int64) if ids is None else columns.ids(ids)
    texts = {column: columns.text(column) for column in keep}
    if names is not None:
        texts["name"] = columns.text(names)
    marks = [file_fingerprint(Path(file["filename"])) for file in rows.cache_files]
    shared: dict[str, Any] = {
        "name": name,
        "ids": own,
        "labels": labels,
        "official": official,
        "notes": notes,
        "texts": texts,
        "fingerprint": fingerprint(
            "hf", *marks, rows._fingerprint, labels.fingerprint() if labels else "", own.tobytes()
        ),
    }
    if image is None:
        found = HubVectors(rows, _vector_column(columns, vectors, {label, ids, names, *keep}), name)
        return FileFeatures(**shared, width=found.width, vectors=found)
    import datasets

    return HubImages(
        **shared,
        bad=BadItems(len(rows), max_bad),
        paths=[f"{name}!{text}" for text in (texts["name"].tolist() if names else _numbered(len(rows)))],
        column=_only(rows, image, name).cast_column(image, datasets.Image(decode=False)),
        may_open=not folder,
    )


def _numbered(n: int) -> list[str]:
    return [f"row {i}" for i in range(n)]


def _vector_column(columns: Columns, wanted: str | None, taken: set[str | None]) -> str:
    lists = [name for name in columns.names if is_list(columns.types[name]) and name not in taken]
    found = wanted or first_of(FEATURES, lists) or (lists[0] if len(lists) == 1 else None)
    if found is None or found not in lists:
        what = (
            f"{wanted!r} is not a column of lists" if wanted else "which column holds the images or vectors?"
        )
        there = ", ".join(columns.names) or "none"
        raise DataError(f"{columns.where}: {what} (there are: {there}): name it with --vector-column")
    return found
