"""Tables in memory (pyarrow, pandas, polars, DuckDB), and ``hf:FOLDER``: Hugging Face data sets, on disk or in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, one_line
from ..files import fingerprint
from .features import FileFeatures, file_features, held_features
from .images import BrokenImageError, FileImages, file_images
from .parquet import is_number, matrix_of
from .paths import file_fingerprint
from .tables import LABELS, Table, first_of


def open_frame(
    source: Any,
    *,
    label_column: str | None = None,
    ids: str | None = None,
    names: str | None = None,
    vectors: str | Sequence[str] | None = None,
    keep: Sequence[str] = (),
) -> FileFeatures:
    """Vectors in an Arrow-compatible table, with columns of labels, ids and names (default: by the usual names).

    ``vectors`` is a column of lists, or columns of numbers, one per dimension; default: the only column of lists, or one called
    ``features``, ``embedding`` ...; else all remaining columns of numbers.
    """
    where = f"the {type(source).__name__}"
    try:
        import pyarrow
    except ImportError:
        raise DataError("reading a table needs pyarrow: pip install 'gpq-faiss[parquet]'") from None
    try:
        data = source if isinstance(source, pyarrow.Table) else pyarrow.table(source)
    except Exception as error:  # from pyarrow, or the table's library
        what = f"{where} has a column that cannot be converted ({one_line(error)})"
        raise DataError(f"{what}: leave out those of mixed types") from None
    table = Table(where, data.schema.names, data.column, data.schema.types)
    found, used = table.describe(label_column, ids=ids, names=names, keep=keep)
    used.update(
        one for one in (data.schema.pandas_metadata or {}).get("index_columns", []) if isinstance(one, str)
    )
    if vectors is None:
        vectors = table.vectors(None, used, "name it, vectors=...")
        vectors = vectors or [n for n, kind in table.types.items() if n not in used and is_number(kind)]
    chosen = [vectors] if isinstance(vectors, str) else list(vectors)
    table.check(*chosen)
    if len(chosen) == 1 and table.holds_lists(chosen[0]):
        matrix = matrix_of(data.column(chosen[0]), f"{where}: {chosen[0]!r}")
    elif chosen and all(is_number(table.types[name]) for name in chosen):
        matrix = np.column_stack([data.column(name).to_numpy() for name in chosen])
    else:
        there = ", ".join(f"{name!r} is {table.types[name]}" for name in chosen) or "no column of vectors"
        raise DataError(f"{where}: {there}: a column of lists, or columns of numbers, are needed")
    return held_features(type(source).__name__, matrix, found)


class ArrowMatrix:
    """A column of lists in Arrow's form, in memory or mapped from a file. Raises DataError: not lists of numbers of one width."""

    def __init__(self, column: Any, where: str) -> None:
        self.column, self.where, self._width = column, where, 0
        first = self.read(slice(0, 1))
        self._width, self.dtype = first.shape[1] if first.ndim == 2 else 0, first.dtype
        self.shape = (len(column), self._width)

    def read(self, rows: slice | NDArray[np.int64]) -> NDArray[Any]:
        """See :class:`.arrays.Matrix`."""
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self.column))
            part = self.column.slice(start, max(0, stop - start))
        else:
            start, part = int(rows[0]) if len(rows) else 0, self.column.take(rows)
        return matrix_of(part, self.where, start=start, width=self._width)


def _hub_rows(source: Any, name: str) -> tuple[Any, list[str]]:
    """A ``datasets.Dataset`` of all parts, test parts last, and notes. Raises DataError: it cannot be read by position."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"reading {name} needs the package datasets: pip install 'gpq-faiss[hf]'") from None
    notes = []
    try:
        found = datasets.load_from_disk(str(Path(source).expanduser())) if isinstance(source, str) else source
        if isinstance(found, datasets.DatasetDict) and found:
            parts = sorted(found, key=lambda part: (part.lower() == "test", part))
            notes.append(f"parts: {', '.join(parts)}")
            found = datasets.concatenate_datasets([found[part] for part in parts])
    except Exception as error:  # from pyarrow, json, or datasets
        what = f"is not a data set that save_to_disk wrote, or it is damaged ({one_line(error)})"
        raise DataError(f"{name} {what}") from None
    if not isinstance(found, datasets.Dataset):
        what = f"{type(found).__name__} cannot be read by position"
        raise DataError(f"{name}: {what}: give a Dataset, not a stream")
    return found, notes


def _hub_column(data: Any, where: str, name: str) -> Any:
    """A column. Raises DataError: offsets out of range, which Arrow does not check, or a text that is not UTF-8."""
    import pyarrow

    try:
        data.column(name).validate(full=True)
    except (pyarrow.ArrowException, OSError) as error:
        why = one_line(error, 120)
        raise DataError(f"{where}: column {name!r} is damaged ({why}): write it again") from None
    return data.column(name)


def _hub_image(column: Any, may_open: bool, i: int) -> bytes | str:
    """Image of a row: bytes, or a path that may be opened (not in a folder from elsewhere)."""
    value = column[i].as_py()
    if value is not None and value["bytes"] is not None:
        return bytes(value["bytes"])
    if value is not None and value["path"] and may_open:
        return str(value["path"])
    raise BrokenImageError(f"row {i}", "there is no image in this row")


def open_hf(
    source: Any,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    vectors: str | None = None,
    ids: str | None = None,
    names: str | None = None,
    keep: Sequence[str] = (),
    max_bad: float = 0.01,
) -> FileImages | FileFeatures:
    """Images or vectors of a folder of ``save_to_disk``, a ``Dataset`` or a ``DatasetDict``.

    Images are in ``image_column`` (default: ``image`` or the only one), vectors in ``vectors`` or, without images, in the only column of
    lists of numbers. Labels are ``ClassLabel``, numbers, names, or lists of these.
    """
    folder = isinstance(source, str)
    name = f"hf:{source}" if folder else type(source).__name__
    rows, notes = _hub_rows(source, name)
    data = rows.data.table if rows._indices is None else rows.with_format("arrow")[:]
    column = partial(_hub_column, data, name)
    table = Table(name, data.schema.names, column, data.schema.types)
    kinds = {one: type(kind).__name__ for one, kind in rows.features.items()}
    images = [] if vectors else [one for one, kind in kinds.items() if kind == "Image"]
    if image_column is not None and image_column not in images:
        what = f"no column of images (there are: {', '.join(images) or 'none'})"
        raise DataError(f"--read image_column={image_column}: {what}")
    image = image_column or first_of(("image",), images) or (images[0] if len(images) == 1 else None)
    kind = rows.features.get(label_column or first_of(LABELS, table.names))
    classes = getattr(getattr(kind, "feature", kind), "names", None)
    if classes is not None and not all(isinstance(one, str) for one in classes):
        raise DataError(f"{name}: the class names of the labels are not texts: save the data set again")
    about, used = table.describe(label_column, ids=ids, names=names, keep=keep, class_names=classes)
    about.notes = notes + about.notes
    made: FileImages | FileFeatures
    if image is None:
        chosen = table.vectors(vectors, used, "name it with --read vectors")
        if chosen is None:
            there = ", ".join(table.names) or "none"
            raise DataError(f"{name}: which column holds the images or vectors? (there are: {there})")
        made = file_features(name, ArrowMatrix(column(chosen), f"{name}: {chosen!r}"), "", about)
    else:
        numbered = [f"row {i}" for i in range(len(rows))]
        own = about.texts["name"].tolist() if "name" in about.texts else numbered
        fetch = partial(_hub_image, column(image), not folder)
        paths, sizes = [f"{name}!{text}" for text in own], [0] * len(rows)
        made = file_images(name, "hf", own, sizes, "", about, paths, max_bad, fetch)
    marks = [file_fingerprint(Path(file["filename"])) for file in rows.cache_files]
    mark = made.labels.fingerprint() if made.labels else ""
    made.fingerprint = fingerprint("hf", *marks, rows._fingerprint, mark, made.ids.tobytes())
    made.texts = about.texts
    return made
