"""Vectors and images of files (``features:``, ``csv:``, ``parquet:``, ``list:``, ``hf:``), and of tables, arrays and lists in memory."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError, one_line, optional
from ..files import fingerprint
from ..inputs import check_memory, read_text
from ..progress import stage
from ..store.rows import RowReader
from .arrays import JoinedMatrix, Matrix, read_ids
from .base import Dataset, FeatureDataset, ImageDataset, digest, features, images
from .images import BrokenImageError, as_array, to_pixels, without_gradient
from .labels import Labels, class_order, labels_of
from .paths import file_fingerprint, files_of, is_url, local_path, without_secrets
from .tables import LABELS, PLAIN, About, Options, arrow_table, first_of, open_table, read_labels, told

SUFFIXES = (".npy", ".npz", ".h5", ".hdf5", ".parquet", ".pq")
"""Endings of files of vectors."""

# Files of vectors -------------------------------------------------------------------------------------------------------


def _open(path: Path, o: Options) -> tuple[Matrix, About]:
    """The contents of one file. Raises as :func:`open_features`."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(f"{path}: features are read from {', '.join(SUFFIXES)}, not from {suffix or 'this'}")
    table = open_table(path, "a file of vectors", o)
    if "codebooks" in table.names:  # our features.h5 has packed labels
        with RowReader(path, kind="features") as reader:
            stored = reader.labels if o.want_labels else None
            labels = None if stored is None else Labels(stored, reader.header.class_names)
            return table.read("features"), About(labels, np.asarray(reader.ids), reader.texts())
    found, used = table.describe(o)
    return table.vectors({*used, *LABELS}, o.vectors), found


def _joined(files: Sequence[Path], parts: Sequence[tuple[Matrix, About]]) -> tuple[Matrix, About]:
    """Concatenated rows of several files. Raises DataError: they do not fit."""
    found = [part for _, part in parts]
    held = [(part.labels is not None, part.ids is not None, *sorted(part.texts)) for part in found]
    other = next((i for i, what in enumerate(held) if what != held[0]), None)
    if other is not None:
        what = "one has labels, ids or names that the other has not: either all files or none may have them"
        raise DataError(f"{files[0]} and {files[other]} do not fit: {what}")
    labels = [part.labels for part in found if part.labels is not None]
    names = class_order(name for part in labels for name in part.class_names)
    packed = [part.over(names).packed for part in labels]
    ids = [part.ids for part in found if part.ids is not None]
    joined = About(
        labels=Labels(np.concatenate(packed), tuple(names)) if labels else None,
        ids=np.concatenate(ids) if ids else None,
        texts={name: np.concatenate([part.texts[name] for part in found]) for name in found[0].texts},
        notes=list(dict.fromkeys(note for part in found for note in part.notes)),
    )
    return JoinedMatrix([matrix for matrix, _ in parts], files), joined


def open_features(path: str, o: Options = PLAIN) -> FeatureDataset:
    """Files of vectors, one or several concatenated; rows are checked when read. Files of labels and ids replace those inside."""
    files = files_of(path)
    parts = [_open(file, o) for file in files]
    marks = [file_fingerprint(file) for file in files]
    several = len(files) > 1
    matrix, found = _joined(files, parts) if several else parts[0]
    n = matrix.shape[0] if matrix.shape else 0
    name = f"features:{without_secrets(path)}"
    check_memory(8 * n, f"{name}: the ids of its {n:,} rows", o.memory)
    if o.label_file is not None:
        found.labels = read_labels(o.label_file, n)
        found.notes.append(told(o.label_file, found.labels))
    if o.id_file is not None:
        found.ids = read_ids(o.id_file)
    return features(name, matrix, found, fingerprint("several", *marks) if several else marks[0])


# Tables in memory -------------------------------------------------------------------------------------------------------


def open_frame(source: Any, o: Options = PLAIN) -> FeatureDataset:
    """Vectors in an Arrow-compatible table: a column of lists, or columns of numbers, one per dimension (default: all remaining ones)."""
    name, where = type(source).__name__, f"the {type(source).__name__}"
    pyarrow = optional(
        "pyarrow", "reading a table needs pyarrow: pip install 'gpq-faiss[parquet]'", DataError
    )
    try:
        data = source if isinstance(source, pyarrow.Table) else pyarrow.table(source)
    except Exception as error:  # from pyarrow, or the table's library
        what = f"{where} has a column that cannot be converted ({one_line(error)})"
        raise DataError(f"{what}: leave out those of mixed types") from None
    table = arrow_table(where, data.schema, data.column)
    found, used = table.describe(o)
    index = (data.schema.pandas_metadata or {}).get("index_columns", [])
    used.update(one for one in index if isinstance(one, str))
    return features(name, table.vectors(used, o.vectors, numbers=True), found)


def open_hf(source: Any, o: Options = PLAIN) -> ImageDataset | FeatureDataset:
    """Images or vectors of a folder of ``save_to_disk``, a ``Dataset`` or a ``DatasetDict`` (all parts, test parts last)."""
    folder, notes = isinstance(source, str), []
    name = f"hf:{source}" if folder else type(source).__name__
    datasets = optional(
        "datasets", f"reading {name} needs the package datasets: pip install 'gpq-faiss[hf]'", DataError
    )
    try:
        rows = datasets.load_from_disk(str(Path(source).expanduser())) if folder else source
        if isinstance(rows, datasets.DatasetDict) and rows:
            parts = sorted(rows, key=lambda part: (part.lower() == "test", part))
            notes.append(f"parts: {', '.join(parts)}")
            rows = datasets.concatenate_datasets([rows[part] for part in parts])
        if isinstance(rows, datasets.Dataset):
            data = rows.data.table if rows._indices is None else rows.with_format("arrow")[:]
            data.validate(full=True)  # Arrow checks neither offsets nor UTF-8 where it reads
    except Exception as error:  # from pyarrow, json, or datasets
        why = f"or it is damaged ({one_line(error)})"
        raise DataError(f"{name} is not a data set that save_to_disk wrote, {why}") from None
    if not isinstance(rows, datasets.Dataset):
        raise DataError(
            f"{name}: {type(rows).__name__} cannot be read by position: give a Dataset, no stream"
        )
    table, kinds_of = arrow_table(name, data.schema, data.column), rows.features
    table.class_names = lambda column: getattr(
        getattr(kinds_of[column], "feature", kinds_of[column]), "names", None
    )
    kinds = [] if o.vectors else [n for n, kind in kinds_of.items() if type(kind).__name__ == "Image"]
    image = o.image_column or first_of(("image",), kinds) or (kinds[0] if len(kinds) == 1 else None)
    if image is not None and image not in kinds:
        there = ", ".join(kinds) or "none"
        raise DataError(f"--read image_column={image}: no column of images (there are: {there})")
    about, used = table.describe(o)
    about.notes = notes + about.notes
    made: ImageDataset | FeatureDataset
    if image is None:
        made = features(name, table.vectors(used, o.vectors), about, "")
    else:
        column, own = table.column(image), [f"row {i}" for i in range(len(rows))]

        def fetch(i: int) -> bytes | str:
            value = column[i].as_py() or {}
            if value.get("bytes") is not None:
                return bytes(value["bytes"])
            if value.get("path") and not folder:  # a path in a folder from elsewhere is not opened
                return str(value["path"])
            raise BrokenImageError(f"row {i}", "there is no image in this row")

        own = about.texts["name"].tolist() if "name" in about.texts else own
        made = images(name, "hf", own, [f"{name}!{text}" for text in own], about, o.max_bad, fetch=fetch)
    marks = [file_fingerprint(Path(file["filename"])) for file in rows.cache_files]
    made.fingerprint = fingerprint("hf", *marks, rows._fingerprint, about.mark(), made.ids.tobytes())
    return made


# Tables and lists of paths of images ------------------------------------------------------------------------------------


def open_listed(path: str, o: Options = PLAIN, *, form: str) -> ImageDataset:
    """Images of a text list (``form`` ``list``), or of a table (``csv``, ``parquet``) with a column of paths; relative paths are below
    ``root`` or the folder of the list, and back-slashes are converted. Without a column of ids they are row numbers."""
    if is_url(path) and o.root is None:
        raise UsageError(f"{without_secrets(path)}: where are its images? Give their folder: --read root=DIR")
    file = local_path(path)
    base = file.parent if o.root is None else Path(o.root).expanduser()
    listed, about = _list(file) if form == "list" else _table(file, o, form)
    paths = [os.path.join(base, one.replace("\\", "/")) for one in listed]
    if not any(map(os.path.exists, paths)):
        missing = f"none of its {len(paths):,} images is there ({paths[0]}, for one)"
        raise DataError(f"{file}: {missing}: give their folder with --read root=DIR")
    return images(f"{form}:{without_secrets(path)}", "image files", listed, paths, about, o.max_bad)


def _table(file: Path, o: Options, form: str) -> tuple[list[str], About]:
    table = open_table(file, "a table of images", form=form)
    image = o.image_column or "image"
    listed = table.cells(image, ": name it with --read image_column")
    wrong = next((i for i, one in enumerate(listed) if not one or not isinstance(one, str)), None)
    if wrong is not None or not listed:
        at = "no rows" if wrong is None else f"{listed[wrong]!r} in row {wrong} of column {image!r}"
        raise DataError(f"{file} has {at}: paths of images are needed")
    return listed, table.describe(o, image)[0]


def read_lines(path: Path, what: str) -> list[tuple[int, str]]:
    """The non-blank lines of a text with their numbers from 1; ``what`` names its content. Raises DataError: missing, empty or not text."""
    lines = [(i, line.strip()) for i, line in enumerate(read_text(path, what).split("\n"), 1) if line.strip()]
    if not lines or any("\0" in line for _, line in lines):
        raise DataError(f"{path} is empty or not a text: {what} was expected")
    return lines


def _labels_in(line: str) -> list[str]:
    """The labels at the end of ``line``: 0/1 values, or one class number."""
    tokens = line.split()[1:]
    ones = list(itertools.takewhile({"0", "1"}.__contains__, reversed(tokens)))
    return ones[::-1] or [token for token in tokens[-1:] if token.removeprefix("-").isdecimal()]


def _list(file: Path) -> tuple[list[str], About]:
    """Lines of a path (which may contain blanks) and 0/1 labels (all 0 is unlabelled), one class number (-1 is unlabelled), or nothing.
    Class names are those of ``classes.txt`` beside the list."""
    lines = read_lines(file, "a list of images")
    columns = len(_labels_in(lines[0][1]))
    if not columns:
        return [line for _, line in lines], About(notes=["no labels"])
    values: list[list[int]] = []
    for number, line in lines:
        found = _labels_in(line) if columns > 1 else _labels_in(line)[-1:]
        if len(found) != columns or len(found[0]) > 18:
            what = f"{columns} labels of 0 or 1" if columns > 1 else "one class number"
            first = f"expected as in line {lines[0][0]}"
            raise DataError(f"{file} line {number}: {what} {first}, found {line[-60:]!r}")
        values.append([int(text) for text in found])
    beside = file.parent / "classes.txt"
    classes = [name for _, name in read_lines(beside, "class names")] if beside.is_file() else None
    labels = labels_of(np.array(values), str(file), class_names=classes)
    about = About(labels) if labels.has().any() else About(notes=["no labels"])
    return [line.rsplit(maxsplit=columns)[0] for _, line in lines], about


# Arrays, tensors, lists and map-style data sets of torch ----------------------------------------------------------------

_SAMPLED = 64
"""Items whose content is hashed for a fingerprint."""


def open_array(values: Any, o: Options = PLAIN) -> Dataset:
    """Vectors, numbers [N, width], or images, uint8 [N, H, W], [N, H, W, 3] or [N, 3, H, W]. Raises DataError: neither."""
    array = as_array(values, "the array")
    if array.ndim == 2:
        return features("array", array, About())
    planes = array.ndim == 4 and array.shape[3] != 3 and array.shape[1] == 3
    pixels = array.transpose(0, 2, 3, 1) if planes else array
    if pixels.dtype != np.uint8 or pixels.ndim < 3 or pixels.shape[3:] not in ((), (3,)):
        what = "images are uint8 [N, H, W(, 3)], vectors are numbers [N, width]"
        raise DataError(f"array is {array.dtype} {list(array.shape)}: {what}")
    mark = fingerprint("array", digest(array), str(pixels.shape))
    return ImageDataset(name="array", fingerprint=mark, pixels=pixels, notes=["no labels"])


def open_items(source: Any, o: Options = PLAIN) -> ImageDataset:
    """A list or a map-style data set of images, in any form that :func:`.images.to_images` takes, or of (image, label). They are read on
    demand, by one thread at a time, so the source must return the same image each time."""
    name = type(source).__name__
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise UsageError(f"{name} has no access by index: a data set with len() and [i] is needed")
    n, lock = len(source), threading.Lock()
    if not n:
        raise DataError(f"{name} has no items")

    def item(i: int) -> tuple[Any, Any]:
        try:
            with lock:
                found = source[i]
        except Exception as error:  # any error of the source
            raise BrokenImageError(f"item {i}", one_line(error)) from None
        pair = isinstance(found, tuple | list) and len(found) == 2
        return (found[0], found[1]) if pair else (found, None)

    def fetch(i: int) -> NDArray[np.uint8]:
        try:
            return to_pixels(item(i)[0], f"item {i}")
        except DataError as error:
            why = getattr(error, "why", str(error).removeprefix(f"item {i}: "))
            raise BrokenImageError(f"item {i}", why) from None

    def labels() -> Labels | None:
        """By ``targets`` (with class names in ``classes``), else inside the items, which are then all read."""
        targets, classes = getattr(source, "targets", None), getattr(source, "classes", None)
        if targets is None:
            with stage("reading labels", n) as reading:
                targets = [None] * n
                for i in range(n):
                    with contextlib.suppress(BrokenImageError):  # counted when it is read as an image
                        targets[i] = item(i)[1]
                    reading.advance()
        plain = [without_gradient(target) for target in targets]
        if all(target is None for target in plain):
            return None
        hot = all(isinstance(target, np.ndarray) and target.ndim == 1 for target in plain)
        values = np.asarray(plain) if classes is not None or hot else plain
        return labels_of(values, "labels", n, classes)

    about = About(labels() if o.want_labels else None)
    about.notes = ["no labels"] if about.labels is None else []
    own = [f"item {i}" for i in range(n)]
    found = images(name, "items", own, own, about, o.max_bad, fetch=fetch)
    sampled = np.unique(np.linspace(0, n - 1, num=min(_SAMPLED, n)).astype(np.int64))
    pixels, again = found.read(sampled), found.read(sampled[:1])[0]
    if pixels[0] is not None and (again is None or not np.array_equal(pixels[0], again)):
        raise DataError(f"{name}: item 0 differs at each read: leave out random transforms")
    digests = [b"" if x is None else bytes.fromhex(digest(x)) for x in pixels]
    found.fingerprint = fingerprint("items", str(n), *digests, about.mark())
    return found
